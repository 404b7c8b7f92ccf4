//! The commands for language models.

mod ask;
mod batch;
pub(crate) mod bench;
pub(crate) mod chat;
mod constrain;
pub(crate) mod convert;
pub(crate) mod embed;
pub(crate) mod fit;
pub(crate) mod generate;
pub(crate) mod hub;
mod interrupt;
pub(crate) mod logits;
mod merge;
mod outfile;
pub(crate) mod perplexity;
mod place;
pub(crate) mod quantize;
mod speculate;
mod thinking;
pub(crate) mod tokenize;

use crate::args::{CacheArgs, HubArgs, LanguageArgs, LoraArgs, Mtp, SamplingArgs, SpeculationArgs};
use crate::report;
use fit::Work;
use halcyon::hal::driver_output;
use halcyon::{Backend, DType, Error, Result};
use halcyon_formats::npy;
use halcyon_models::{
    Activations, CacheTypes, Decoder, Engine, EngineOptions, GenerateOptions, Generation, LoadOptions, Lora,
    ModelFile, Sampling, StepName,
};
use halcyon_text::Tokenizer;
use serde_json::{Value, json};
use speculate::Draft;
use std::io::{Read, Write};
use std::panic::resume_unwind;
use std::path::Path;
use std::sync::Arc;
use std::thread::ScopedJoinHandle;

/// The most positions of the cache unless the user asks for more.
const CONTEXT: usize = 4096;
/// The most bytes of a text that is read whole.
const MAX_TEXT: u64 = 256 << 20;

/// A model that is ready to run.
pub(super) struct Running {
    pub file: ModelFile,
    pub engine: Engine,
    /// If the command asked for it ([`Defaults::text`]) and the model has one.
    pub tokenizer: Option<Tokenizer>,
    options: EngineOptions,
    /// The device of each part, and why.
    pub placement: Value,
    /// The draft of [`start_with`].
    draft: Option<Draft>,
    /// The layer for further tokens that the engine follows.
    ahead: Option<Arc<Decoder>>,
}

/// The types of cached keys and values. `default` is the type of both.
fn cache_types(a: &CacheArgs, default: &str) -> Result<CacheTypes> {
    let of = |option: &str, name: &Option<String>| match (name, &a.kv_dtype) {
        (Some(name), _) => kv_dtype(option, name),
        (None, both) => kv_dtype("--kv-dtype", both.as_deref().unwrap_or(default)),
    };
    // It is wrong even if the other two options replace it.
    of("--kv-dtype", &None)?;
    let keys = of("--cache-type-k", &a.cache_type_k)?;
    Ok(CacheTypes { keys, values: of("--cache-type-v", &a.cache_type_v)? })
}

/// The type of this name, which `option` has.
fn kv_dtype(option: &str, name: &str) -> Result<DType> {
    match name {
        "f32" => Ok(DType::F32),
        "f16" => Ok(DType::F16),
        "bf16" => Ok(DType::BF16),
        // Blocks are bytes.
        "q8_0" => Ok(DType::U8),
        other => Err(Error::argument(option, format!("'{other}': expected f32, f16, bf16 or q8_0"))),
    }
}

/// What a command uses unless the user chooses otherwise.
#[derive(Clone, Copy)]
pub(super) struct Defaults {
    /// The type of cached keys and values.
    kv_dtype: &'static str,
    activations: Activations,
    work: Work,
    /// Whether the command needs the tokenizer. It is made while the weights are loaded.
    pub text: bool,
    /// Sequences for which the cache has room, of the context's length each.
    pub sequences: usize,
}

/// Speed comes first.
pub(super) const FAST: Defaults = Defaults {
    kv_dtype: "f16",
    activations: Activations::Fast,
    work: Work::Generation,
    text: true,
    sequences: 1,
};
/// Prompts of chats are short, and small models answer better.
pub(super) const FINE: Defaults = Defaults { activations: Activations::Fine, work: Work::Chat, ..FAST };
/// The quality of a model is measured.
pub(super) const MEASURE: Defaults = Defaults { work: Work::All, ..FINE };
/// Numbers are compared with those of other programs.
pub(super) const EXACT: Defaults = Defaults { kv_dtype: "f32", text: false, ..MEASURE };

fn activations(name: &str) -> Result<Activations> {
    match name {
        "fast" => Ok(Activations::Fast),
        "fine" => Ok(Activations::Fine),
        other => Err(Error::argument("--activations", format!("'{other}': expected fast or fine"))),
    }
}

/// Opens and loads the model. `context`, if given, replaces the user's.
pub(super) fn start(a: &LanguageArgs, context: Option<usize>, defaults: Defaults) -> Result<Running> {
    start_with(a, context, defaults, None)
}

/// [`start`] with a draft. Nothing is allocated unless both models fit.
pub(super) fn start_with(
    a: &LanguageArgs,
    context: Option<usize>,
    defaults: Defaults,
    speculation: Option<&SpeculationArgs>,
) -> Result<Running> {
    a.backend.check()?;
    let cache = cache_types(&a.cache, defaults.kv_dtype)?;
    let activations = a.activations.as_deref().map_or(Ok(defaults.activations), activations)?;
    let chunk = a.cache.chunk()?;
    let file = ModelFile::open(&hub::local(&a.path(), &a.hub)?)?;
    let context = context_of(&file, context.or(a.cache.context))?;
    for w in file.warnings()? {
        report::warn(&w);
    }
    let mut devices = place::Devices::open(&a.place, &a.backend, &file)?;
    let sequences = defaults.sequences;
    let positions = context.checked_mul(sequences).ok_or_else(|| {
        Error::argument("--parallel", format!("{sequences} sequences of {context} positions are too many"))
    })?;
    let options = EngineOptions { sequences, positions, cache, chunk, ..EngineOptions::default() };
    let lora = adapters(&a.lora, &a.hub, &file)?;
    let load = LoadOptions { context, activations, lora: lora.as_ref(), fixed: true };
    let mut prepare = || {
        let decoder = devices.load(&file, load, options, defaults.work)?;
        let draft = match speculation {
            Some(s) => proposals(a, (s, defaults.work), (&file, load), (&decoder, options))?,
            None => None,
        };
        let decoder = Arc::new(decoder);
        if report::verbose() {
            report::note(&place::text(&decoder, options, devices.why()));
        }
        let placement = place::to_json(&decoder, options, devices.why());
        Ok((Engine::new(decoder, options)?, draft, placement))
    };
    // The tokenizer takes as long as the weights of a small model.
    let (made, tokenizer) = std::thread::scope(|s| {
        let tokenizer = defaults.text.then(|| s.spawn(|| file.tokenizer()));
        let made: Result<_> = prepare();
        let join = |t: ScopedJoinHandle<'_, _>| t.join().unwrap_or_else(|panic| resume_unwind(panic));
        (made, tokenizer.map_or(Ok(None), join))
    });
    let (engine, draft, placement) = made?;
    Ok(Running { engine, file, tokenizer: tokenizer?, options, placement, draft, ahead: None })
}

/// The adapters of the options, on the host. A device gets them as weights when it computes, so the check of
/// its memory comes first.
fn adapters(a: &LoraArgs, h: &HubArgs, file: &ModelFile) -> Result<Option<Lora>> {
    let places = hub::adapters(a, h)?;
    if places.is_empty() { Ok(None) } else { Lora::load_all(&places, file, &Backend::cpu()?) }
}

/// Why `--mtp on` is refused beside other proposals.
const ONE_WAY: &str = "the model's own layer, --draft or --lookup: choose one";

/// Loads what proposes tokens, unless that is a lookup. Fails if the model does not fit with it; a layer for
/// further tokens that was not asked for is left out then.
fn proposals(
    a: &LanguageArgs,
    (s, work): (&SpeculationArgs, Work),
    (file, load): (&ModelFile, LoadOptions<'_>),
    both: (&Decoder, EngineOptions),
) -> Result<Option<Draft>> {
    let mtp = s.mtp.mtp;
    if s.lookup || s.draft.is_some() {
        if mtp == Mtp::On {
            return Err(Error::argument("--mtp", ONE_WAY));
        }
        let draft = s.draft.as_deref().map(|path| Draft::open(path, &a.hub, file, both)).transpose()?;
        fit::check_proposals(file, both, load, (work, draft.as_ref(), s.draft_max))?;
        return Ok(draft);
    }
    Draft::own_checked(mtp, file, both, load, (work, s.draft_max))
}

/// No cache has more positions, so that its sizes can be computed.
const MAX_CONTEXT: usize = 1 << 26;

/// The positions of a sequence: what the user chose, or the default.
fn context_of(file: &ModelFile, chosen: Option<usize>) -> Result<usize> {
    let made = file.spec.context;
    let context = match chosen {
        Some(0) => made,
        Some(n) => n,
        None => made.min(CONTEXT),
    };
    if context > MAX_CONTEXT {
        return Err(Error::argument("--context", format!("{context} positions; at most {MAX_CONTEXT}")));
    }
    if file.spec.learned_positions && context > made {
        let what = format!("{context} positions, but the model has learned embeddings for {made}");
        return Err(Error::argument("--context", what));
    }
    if context > made {
        report::warn(&format!("the model was made for {made} positions, and the context has {context}"));
    }
    Ok(context)
}

impl Running {
    /// Makes the cache again if its values were lost because the device failed during a step.
    pub(super) fn restart(&mut self) -> Result<()> {
        self.engine.truncate(0, 0);
        if !self.engine.is_whole() {
            self.engine = Engine::new(self.engine.decoder().clone(), self.options)?;
            self.engine.look_ahead(self.ahead.clone())?;
        }
        Ok(())
    }

    /// The devices: `cpu:0`, or `cpu:0 and opencl:0`.
    pub(super) fn devices(&self) -> String {
        place::devices(self.engine.decoder())
    }

    /// The model's tokenizer, once.
    pub(super) fn take_tokenizer(&mut self) -> Result<Tokenizer> {
        self.tokenizer.take().ok_or_else(|| no_tokenizer(&self.file))
    }
}

fn tokenizer(file: &ModelFile) -> Result<Tokenizer> {
    file.tokenizer()?.ok_or_else(|| no_tokenizer(file))
}

fn no_tokenizer(file: &ModelFile) -> Error {
    Error::unsupported(
        format!("text with {}, which has no tokenizer", file.path.display()),
        "Put tokenizer.json into the folder, or give tokens (--prompt-tokens, --tokens)",
    )
}

/// The options of a generation. Draws a seed if none is given.
pub(super) fn options(a: &SamplingArgs) -> Result<GenerateOptions> {
    let seed = a.draw_seed.and_then(|s| s.0).unwrap_or_else(|| {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        let seed = now.map_or(0, |t| t.as_nanos() as u64) ^ u64::from(std::process::id()) << 32;
        if report::verbose() && a.temperature != 0.0 {
            report::note(&format!("seed {seed}"));
        }
        seed
    });
    let sampling = Sampling {
        temperature: a.temperature,
        top_k: a.top_k,
        typical_p: a.typical,
        top_p: a.top_p,
        min_p: a.min_p,
        repeat_penalty: a.repeat_penalty,
        presence_penalty: a.presence_penalty,
        frequency_penalty: a.frequency_penalty,
        seed,
        steps: steps(a)?,
        ..Sampling::default()
    };
    sampling.check()?;
    if a.stop.iter().any(String::is_empty) {
        return Err(Error::argument("--stop", "a stop string must not be empty"));
    }
    Ok(GenerateOptions {
        max_tokens: a.max_tokens,
        sampling,
        stop: a.stop.clone(),
        ignore_eos: a.ignore_eos,
        ..GenerateOptions::default()
    })
}

/// The steps of `--samplers`.
fn steps(a: &SamplingArgs) -> Result<Vec<StepName>> {
    let Some(text) = &a.samplers else { return Ok(StepName::ALL.to_vec()) };
    text.split([';', ',']).filter(|t| !t.trim().is_empty()).map(str::parse).collect()
}

/// A text, or standard input for `-`.
pub(super) fn text_or_stdin(text: &str) -> Result<String> {
    if text != "-" {
        return Ok(text.into());
    }
    let mut out = vec![];
    let io = |e: std::io::Error| Error::Io { path: "standard input".into(), what: e.to_string() };
    std::io::stdin().lock().take(MAX_TEXT + 1).read_to_end(&mut out).map_err(io)?;
    if out.len() as u64 > MAX_TEXT {
        return Err(Error::argument("standard input", format!("more than {MAX_TEXT} bytes")));
    }
    String::from_utf8(out).map_err(|_| Error::argument("standard input", "the text is not UTF-8"))
}

/// Token ids from an .npy file.
pub(super) fn tokens(path: &Path) -> Result<Vec<u32>> {
    let data = npy::read(path)?;
    let bad = |what: String| Error::Format { file: path.display().to_string(), what };
    if !data.dtype.is_int() || data.dims.iter().filter(|d| **d != 1).count() > 1 {
        let what = format!("{} {:?}: expected a list of integers", data.dtype, data.dims.as_slice());
        return Err(bad(what));
    }
    let id = |v: i64| u32::try_from(v).map_err(|_| bad(format!("{v} is not a token")));
    data.to_vec::<i64>().into_iter().map(id).collect()
}

/// Writes a piece of text at once. Returns whether anybody reads it.
pub(super) fn write_piece(text: &str) -> bool {
    let mut out = driver_output::out();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).is_ok()
}

/// Tokens per second, if there was time to measure.
fn rate(tokens: usize, time: std::time::Duration) -> f64 {
    tokens as f64 / time.as_secs_f64().max(1e-9)
}

/// The times of a generation as a line.
pub(super) fn times(g: &Generation) -> String {
    // The first token comes from the prompt's logits.
    let decoded = g.tokens.len().saturating_sub(1);
    format!(
        "prompt: {} tokens, {:.1} tokens/s; answer: {} tokens, {:.1} tokens/s ({})",
        g.prompt_tokens,
        rate(g.prompt_tokens, g.prompt_time),
        g.tokens.len(),
        rate(decoded, g.time),
        g.finish
    )
}

/// A generation as JSON.
pub(super) fn generation_json(g: &Generation, backend: &str) -> Value {
    let decoded = g.tokens.len().saturating_sub(1);
    json!({
        "tokens": g.tokens,
        "text": g.text,
        "finish_reason": g.finish.to_string(),
        "prompt_tokens": g.prompt_tokens,
        "backend": backend,
        "timings": {
            "prompt_ms": g.prompt_time.as_secs_f64() * 1e3,
            "prompt_per_second": rate(g.prompt_tokens, g.prompt_time),
            "predicted_n": g.tokens.len(),
            "predicted_ms": g.time.as_secs_f64() * 1e3,
            "predicted_per_second": rate(decoded, g.time),
        },
    })
}
