//! Embeddings: one vector for each text, from encoders or from decoders.

mod config;
mod memory;
mod pooling;

use crate::decoder::{Decoder, LoadOptions};
use crate::encoder::{Encoder, EncoderEngine, EncoderSpec};
use crate::engine::{Engine, EngineOptions, Feed};
use crate::lora::Lora;
use crate::model::ModelFile;
use crate::source::Source;
pub(crate) use config::pooling_type;
use config::{After, Config};
use halcyon::ir::error::{Error, Result};
use halcyon::{Backend, DType};
use halcyon_text::Tokenizer;
pub use pooling::Pooling;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Positions of the cache for texts that a decoder computes together, and how many texts there are.
const POSITIONS: usize = 2048;
const SEQUENCES: usize = 16;

/// Options of [`Embedder::open`]. What is not given follows from the model's configuration.
#[derive(Clone, Debug, Default)]
pub struct EmbedOptions {
    /// `None`: as the model's configuration says, else [`Pooling::Mean`].
    pub pooling: Option<Pooling>,
    /// Whether vectors have the length 1. `None`: as the model's configuration says, else no.
    pub normalize: Option<bool>,
    /// The name of a prompt of the model's configuration, which comes before each text.
    pub prompt: Option<String>,
    /// The most tokens of a text; longer texts are cut. `None`: as the model's configuration says.
    pub max_tokens: Option<usize>,
    /// Places of adapters (see [`Lora::load`]), each with a factor.
    pub adapters: Vec<(PathBuf, f32)>,
}

/// A text as tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tokens {
    pub ids: Vec<u32>,
    /// Tokens that were cut off because the text is too long.
    pub cut: usize,
}

#[derive(Debug)]
enum Model {
    Encoder(EncoderEngine),
    /// A decoder, and an engine with room for the longest text so far.
    Decoder(Arc<Decoder>, Option<Engine>),
}

/// A model that turns texts into vectors.
///
/// ```no_run
/// use halcyon::prelude::*;
/// use halcyon_models::{EmbedOptions, Embedder};
/// use std::path::Path;
///
/// # fn main() -> halcyon::Result<()> {
/// let backend = Backend::auto()?;
/// let mut model = Embedder::open(&backend, Path::new("all-MiniLM-L6-v2"), &EmbedOptions::default())?;
/// let vectors = model.embed(&["A cat sits outside.", "A man plays guitar."])?;
/// assert_eq!(vectors[0].len(), model.size());
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Embedder {
    model: Model,
    tokenizer: Option<Tokenizer>,
    config: Config,
    prompt: String,
    /// Tokens of the prompt that pooling leaves out.
    skipped: usize,
    max_tokens: usize,
    place: String,
    warnings: Vec<String>,
}

impl Embedder {
    /// Opens a GGUF file or a folder, and loads it on a backend. The folder may have the files of
    /// sentence-transformers.
    ///
    /// # Errors
    /// Errors of reading; `Error::Unsupported` for an architecture or a module that is not known;
    /// `Error::Argument` for a prompt that the model does not have, for a number of tokens that the model
    /// cannot compute, and for pooling by the first token of a decoder, which sees no other token.
    pub fn open(backend: &Backend, path: &Path, options: &EmbedOptions) -> Result<Embedder> {
        // A name is resolved here, because the folder may have files of sentence-transformers.
        let path = &crate::hub::local(path)?;
        let (place, folder) = match path.is_dir() {
            true => {
                let (place, c) = config::of_folder(path)?;
                (place, Some(c))
            }
            false => (path.to_path_buf(), None),
        };
        let source = Source::open(&place)?;
        let encoder = EncoderSpec::of(&source)?;
        let decoder = if encoder.is_none() { Some(crate::family::spec(&source)?) } else { None };
        let context = match (&encoder, &decoder) {
            (Some(e), _) => e.body.context,
            (None, Some(d)) => d.context,
            (None, None) => 0,
        };
        let mut config = match options.pooling {
            // The configuration's own way may be one that is not supported.
            Some(p) if folder.is_none() => Config { pooling: vec![p], ..Config::default() },
            _ => config::of(&source, folder)?,
        };
        if let Some(p) = options.pooling {
            config.pooling = vec![p];
        }
        if encoder.is_none() && config.pooling.contains(&Pooling::Cls) {
            let what = "the first token of a decoder sees no other token; use mean or lasttoken";
            return Err(Error::argument("pooling", what));
        }
        if let Some(on) = options.normalize {
            config.after.retain(|a| !matches!(a, After::Normalize));
            config.after.extend(on.then_some(After::Normalize));
        }
        let max_tokens = match options.max_tokens {
            Some(n) if n == 0 || n > context => {
                let what = format!("{n} tokens: expected 1 to {context}");
                return Err(Error::argument("max_tokens", what));
            }
            Some(n) => n,
            None => config.max_tokens.map_or(context, |n| n.min(context)),
        };
        let warnings = source.warnings()?;
        let tokenizer = crate::model::tokenizer(&source)?;
        // Adapters are read on the host: the device takes them as weights, after the check of its memory.
        let adapters = |file: &ModelFile| match options.adapters.is_empty() {
            true => Ok(None),
            false => Lora::load_all(&options.adapters, file, &Backend::cpu()?),
        };
        let model = match (encoder, decoder) {
            (Some(spec), _) => {
                let file = ModelFile { path: place, source, spec: spec.body.clone() };
                let lora = adapters(&file)?;
                let encoder = Encoder::load(backend, &file.source, spec, lora.as_ref())?;
                Model::Encoder(EncoderEngine::new(Arc::new(encoder)))
            }
            (None, Some(spec)) => {
                let file = ModelFile { path: place, source, spec };
                let lora = adapters(&file)?;
                let load = LoadOptions { lora: lora.as_ref(), fixed: true, ..LoadOptions::from(max_tokens) };
                Model::Decoder(Arc::new(file.load(backend, load)?), None)
            }
            (None, None) => return Err(Error::internal("a model without an architecture")),
        };
        let prompt = prompt(&config, options.prompt.as_deref())?;
        let place = path.display().to_string();
        let mut e = Embedder { model, tokenizer, config, prompt, skipped: 0, max_tokens, place, warnings };
        e.check_sizes()?;
        if !e.config.pool_prompt && !e.prompt.is_empty() {
            e.skipped = e.prompt_tokens()?;
        }
        Ok(e)
    }

    /// The sizes of dense layers must follow from each other.
    fn check_sizes(&self) -> Result<()> {
        let mut size = self.hidden() * self.config.pooling.len();
        for (from, to) in self.config.after.iter().filter_map(After::sizes) {
            if from != size {
                let what = format!("a dense layer takes {from} elements, but gets {size}");
                return Err(Error::shape("embed", what));
            }
            size = to;
        }
        Ok(())
    }

    fn hidden(&self) -> usize {
        match &self.model {
            Model::Encoder(e) => e.encoder().hidden(),
            Model::Decoder(d, _) => d.spec.hidden,
        }
    }

    /// Elements of an embedding.
    pub fn size(&self) -> usize {
        let dense = self.config.after.iter().rev().find_map(After::sizes);
        dense.map_or(self.hidden() * self.config.pooling.len(), |(_, to)| to)
    }

    /// The backend of the weights.
    pub fn backend(&self) -> &Backend {
        match &self.model {
            Model::Encoder(e) => e.encoder().backend(),
            Model::Decoder(d, _) => d.backend(),
        }
    }

    /// The most tokens of a text.
    pub fn max_tokens(&self) -> usize {
        self.max_tokens
    }

    /// What the user should know about the model.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    fn tokenizer(&self) -> Result<&Tokenizer> {
        self.tokenizer.as_ref().ok_or_else(|| {
            Error::unsupported(
                format!("text with {}, which has no tokenizer", self.place),
                "Put tokenizer.json into the folder, or give tokens (--tokens)",
            )
        })
    }

    /// Tokens of the prompt, with those before it and without those after it.
    fn prompt_tokens(&self) -> Result<usize> {
        let t = self.tokenizer()?;
        let (whole, plain) = (t.encode(&self.prompt, true, true)?, t.encode(&self.prompt, false, true)?);
        Ok(before(&whole, &plain).map_or(0, |n| n + plain.len()))
    }

    /// The tokens of a text after the prompt, with the special tokens that the model expects. A text with
    /// more than [`Embedder::max_tokens`] is cut before the special tokens at its end.
    ///
    /// # Errors
    /// `Error::Unsupported` for a model without a tokenizer; errors of the tokenizer.
    pub fn tokens(&self, text: &str) -> Result<Tokens> {
        let t = self.tokenizer()?;
        let joined;
        let text = match self.prompt.is_empty() {
            true => text,
            false => {
                joined = format!("{}{text}", self.prompt);
                &joined
            }
        };
        let mut ids = t.encode(text, true, true)?;
        let cut = ids.len().saturating_sub(self.max_tokens);
        if cut > 0 {
            let plain = t.encode(text, false, true)?;
            match before(&ids, &plain).filter(|_| cut < plain.len()) {
                Some(first) => drop(ids.drain(first + plain.len() - cut..first + plain.len())),
                None => ids.truncate(self.max_tokens),
            }
        }
        Ok(Tokens { ids, cut })
    }

    /// The embedding of each text: [`Embedder::size`] elements. Its bits do not depend on the other texts.
    ///
    /// # Errors
    /// The errors of [`Embedder::tokens`] and [`Embedder::embed_tokens`].
    pub fn embed<T: AsRef<str>>(&mut self, texts: &[T]) -> Result<Vec<Vec<f32>>> {
        let ids = texts.iter().map(|t| Ok(self.tokens(t.as_ref())?.ids)).collect::<Result<Vec<_>>>()?;
        let ids: Vec<&[u32]> = ids.iter().map(Vec::as_slice).collect();
        self.embed_tokens(&ids)
    }

    /// [`Embedder::embed`] for texts as tokens.
    ///
    /// # Errors
    /// `Error::Argument` for a text without tokens, with more than [`Embedder::max_tokens`], or with a token
    /// outside of the vocabulary; errors of the device.
    pub fn embed_tokens(&mut self, texts: &[&[u32]]) -> Result<Vec<Vec<f32>>> {
        if let Some((i, t)) =
            texts.iter().enumerate().find(|(_, t)| t.is_empty() || t.len() > self.max_tokens)
        {
            let what = format!("text {i} has {} tokens: expected 1 to {}", t.len(), self.max_tokens);
            return Err(Error::argument("embed", what));
        }
        let (size, skipped) = (self.hidden(), self.skipped);
        // Pooling by the last token needs no others.
        let all = self.config.pooling != [Pooling::LastToken];
        let hidden = match &mut self.model {
            Model::Encoder(e) => e.hidden(texts)?,
            Model::Decoder(d, engine) => decoded(d, engine, texts, all)?,
        };
        let pooled = |h: &Vec<f32>| {
            let all = self.config.pooling.iter().flat_map(|p| p.apply(h, size, skipped)).collect();
            self.config.after.iter().fold(all, |v, a| a.apply(v))
        };
        Ok(hidden.iter().map(pooled).collect())
    }
}

/// The options of an engine for texts of at most `longest` tokens.
fn engine_options(longest: usize) -> EngineOptions {
    let positions = longest.next_power_of_two().max(POSITIONS);
    EngineOptions { sequences: SEQUENCES, positions, cache: DType::F32.into(), ..EngineOptions::default() }
}

/// The activations after the last norm for each token of each text, or for the last one.
fn decoded(
    decoder: &Arc<Decoder>,
    kept: &mut Option<Engine>,
    texts: &[&[u32]],
    all: bool,
) -> Result<Vec<Vec<f32>>> {
    let longest = texts.iter().map(|t| t.len()).max().unwrap_or(0);
    let mut engine = match kept.take().filter(|e| e.context() >= longest) {
        Some(e) => e,
        None => Engine::of_activations(decoder.clone(), engine_options(longest))?,
    };
    let mut out = Vec::with_capacity(texts.len());
    let mut first = 0;
    while first < texts.len() {
        let mut positions = 0;
        let fits = |t: &&&[u32]| {
            positions += t.len();
            positions <= POSITIONS
        };
        let count = texts[first..].iter().take(SEQUENCES).take_while(fits).count().max(1);
        let these = texts[first..first + count].iter().enumerate();
        let feeds: Vec<Feed<'_>> = these.map(|(sequence, tokens)| Feed { sequence, tokens, all }).collect();
        let made = engine.feed(&feeds);
        for s in 0..count {
            engine.truncate(s, 0);
        }
        out.extend(made?);
        first += count;
    }
    *kept = Some(engine);
    Ok(out)
}

/// The text of the prompt.
fn prompt(c: &Config, asked: Option<&str>) -> Result<String> {
    let Some(name) = asked.or(c.default_prompt.as_deref()) else { return Ok(String::new()) };
    c.prompts.get(name).cloned().ok_or_else(|| {
        let known: Vec<&str> = c.prompts.keys().map(String::as_str).collect();
        let known = if known.is_empty() { "no prompts".into() } else { known.join(", ") };
        Error::argument("prompt", format!("the model has no prompt '{name}'; it has {known}"))
    })
}

/// The number of tokens of `whole` before those of `plain`.
fn before(whole: &[u32], plain: &[u32]) -> Option<usize> {
    (0..=whole.len().checked_sub(plain.len())?).find(|i| whole[*i..].starts_with(plain))
}
