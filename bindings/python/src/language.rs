//! Language models: a generator whose streams share its steps, and embeddings.

mod embed;
mod options;
mod stream;

pub(crate) use embed::Embedder;
pub(crate) use options::Take;
pub(crate) use stream::{Generation, Piece, TextStream};

use crate::backend::Backend;
use crate::calls::Work;
use crate::errors::{OrRaise, argument};
use halcyon::{Backend as RawBackend, DType, Error, Result};
use halcyon_models::{
    Activations, CacheTypes, Engine, EngineOptions, GenerateOptions, Generator, LoadOptions, Lora, ModelFile,
    Speculation, SpeculationOptions, hub,
};
use halcyon_text::Message;
use options::Demand;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use stream::Shared;

/// The most positions of a sequence unless the caller asks for more.
const CONTEXT: usize = 4096;

/// A language model on a backend. Threads may use it at the same time: requests that do not fit into the
/// cache together wait for others.
#[pyclass(frozen, module = "halcyon._native")]
pub(crate) struct LanguageModel {
    shared: Arc<Shared>,
    backend: RawBackend,
    path: PathBuf,
    family: String,
    context: usize,
    vocabulary: usize,
    parallel: usize,
    has_template: bool,
    warnings: Vec<String>,
}

/// Options of loading a model.
struct Load {
    context: Option<usize>,
    parallel: usize,
    chunk: usize,
    cache: CacheTypes,
    activations: Activations,
    adapters: Vec<(PathBuf, f32)>,
    lookup: bool,
    mtp: bool,
    proposals: usize,
}

impl Load {
    fn of(options: &Bound<'_, PyDict>) -> PyResult<Load> {
        let o = Take(options);
        let cache: String = o.or("kv_dtype", "f16".into())?;
        let activations: String = o.or("activations", "fast".into())?;
        let engine = EngineOptions::default();
        let load = Load {
            context: o.get("context")?,
            parallel: o.or("parallel", 1)?,
            chunk: o.or("chunk", engine.chunk)?,
            cache: cache_type(&cache).or_raise()?.into(),
            activations: match activations.as_str() {
                "fast" => Activations::Fast,
                "fine" => Activations::Fine,
                other => return Err(argument("activations", format!("'{other}': expected fast or fine"))),
            },
            adapters: o.or("adapters", vec![])?,
            lookup: o.or("lookup", false)?,
            mtp: o.or("mtp", false)?,
            proposals: o.or("draft_max", SpeculationOptions::default().most)?,
        };
        o.end()?;
        if load.lookup && load.mtp {
            return Err(argument("mtp", "the model's own layer and a lookup exclude each other: choose one"));
        }
        Ok(load)
    }
}

fn cache_type(name: &str) -> Result<DType> {
    match name {
        "f32" => Ok(DType::F32),
        "f16" => Ok(DType::F16),
        "bf16" => Ok(DType::BF16),
        // Blocks are bytes.
        "q8_0" => Ok(DType::U8),
        other => Err(Error::argument("kv_dtype", format!("'{other}': expected f32, f16, bf16 or q8_0"))),
    }
}

/// The positions of a sequence. 0 asks for as many as the model was made for.
fn context(file: &ModelFile, asked: Option<usize>) -> Result<usize> {
    let made = file.spec.context;
    match asked {
        Some(0) => Ok(made),
        None => Ok(made.min(CONTEXT)),
        Some(n) if file.spec.learned_positions && n > made => {
            let what = format!("{n} positions, but the model has learned embeddings for {made}");
            Err(Error::argument("context", what))
        }
        Some(n) => Ok(n),
    }
}

/// Loads a model, and proposes further tokens as the options say.
fn load(path: &Path, backend: &RawBackend, o: &Load) -> Result<LanguageModel> {
    let file = ModelFile::open(&hub::local(path)?)?;
    let context = context(&file, o.context)?;
    let positions = context.checked_mul(o.parallel).ok_or_else(|| {
        let what = format!("{} sequences of {context} positions are too many", o.parallel);
        Error::argument("parallel", what)
    })?;
    // Adapters are read on the host, and a device takes them as weights when it computes.
    let lora = match o.adapters.is_empty() {
        true => None,
        false => Lora::load_all(&o.adapters, &file, &RawBackend::cpu()?)?,
    };
    let engine = EngineOptions {
        sequences: o.parallel,
        positions,
        cache: o.cache,
        chunk: o.chunk,
        ..EngineOptions::default()
    };
    let options = LoadOptions { context, activations: o.activations, lora: lora.as_ref(), fixed: true };
    let decoder = file.load(backend, options)?;
    let ahead = if o.mtp { Some(ahead(&file, &decoder, options)?) } else { None };
    let mut engine = Engine::new(Arc::new(decoder), engine)?;
    let how = SpeculationOptions { most: o.proposals, ..SpeculationOptions::default() };
    let speculation = match ahead {
        Some(layer) => Some(Speculation::ahead(Arc::new(layer), &mut engine, how)?),
        None if o.lookup => Some(Speculation::lookup(how)?),
        None => None,
    };
    let tokenizer = file.tokenizer()?;
    let template = match tokenizer.as_ref().map(|t| file.template(t)) {
        // Base models have none.
        None | Some(Err(Error::Unsupported { .. })) => None,
        Some(template) => Some(template?),
    };
    let has_template = template.is_some();
    let mut generator = Generator::new(engine, tokenizer, template);
    generator.speculate(speculation);
    Ok(LanguageModel {
        shared: Shared::new(generator),
        backend: backend.clone(),
        path: path.into(),
        family: file.spec.family.to_string(),
        context,
        vocabulary: file.spec.vocabulary,
        parallel: o.parallel,
        has_template,
        warnings: file.warnings()?,
    })
}

fn ahead(
    file: &ModelFile,
    decoder: &halcyon_models::Decoder,
    options: LoadOptions<'_>,
) -> Result<halcyon_models::Decoder> {
    file.load_ahead(decoder, options)?.ok_or_else(|| {
        Error::unsupported(
            format!("mtp for {}, which has no layer that predicts further tokens", file.path.display()),
            "Leave out mtp, or use lookup",
        )
    })
}

#[pymethods]
impl LanguageModel {
    #[new]
    fn new(
        py: Python<'_>,
        path: PathBuf,
        backend: &Backend,
        options: &Bound<'_, PyDict>,
    ) -> PyResult<LanguageModel> {
        let options = Load::of(options)?;
        let backend = backend.0.clone();
        py.work(|| load(&path, &backend, &options))
    }

    /// The tokens of a text, with the special tokens that begin one.
    fn tokens(&self, py: Python<'_>, text: String) -> PyResult<Vec<u32>> {
        py.work(|| self.shared.with(|g| g.tokens(text)))
    }

    /// The tokens of a chat (its messages as JSON), with the beginning of an answer.
    #[pyo3(signature = (messages, thinking))]
    fn chat_tokens(&self, py: Python<'_>, messages: &str, thinking: Option<bool>) -> PyResult<Vec<u32>> {
        let messages: Vec<Message> =
            serde_json::from_str(messages).map_err(|e| argument("messages", e.to_string()))?;
        py.work(|| self.shared.with(|g| g.chat_tokens(&messages, thinking)))
    }

    /// The text of tokens.
    fn text(&self, py: Python<'_>, tokens: Vec<u32>, skip_special: bool) -> PyResult<String> {
        // A model may have more rows than its tokenizer has tokens.
        let n = self.vocabulary;
        if let Some(wrong) = tokens.iter().find(|id| **id as usize >= n) {
            return Err(argument("tokens", format!("{wrong} is not in the vocabulary of {n}")));
        }
        py.work(|| {
            self.shared.with(|g| match g.tokenizer() {
                Some(t) => Ok(t.decode(&tokens, skip_special)),
                None => Err(Error::unsupported(
                    "text of a model that has no tokenizer",
                    "Use the token ids themselves",
                )),
            })
        })
    }

    /// Starts a generation.
    fn start(&self, py: Python<'_>, tokens: Vec<u32>, options: &Bound<'_, PyDict>) -> PyResult<TextStream> {
        let (options, demand) = options::generate(options, || self.backend.next_seed())?;
        let seed = options.sampling.seed;
        let id = py.work(|| {
            self.shared
                .with(|g| {
                    let mask = demand.map(|d| constraint(g, &d)).transpose()?;
                    Ok(GenerateOptions { mask, ..options })
                })
                .and_then(|options| self.shared.begin(tokens, options))
        })?;
        Ok(TextStream::new(self.shared.clone(), id, seed))
    }

    /// The backend of the weights.
    #[getter]
    fn backend(&self) -> Backend {
        Backend(self.backend.clone())
    }

    /// The file or folder.
    #[getter]
    fn path(&self) -> &Path {
        &self.path
    }

    /// The model's architecture, such as `llama`.
    #[getter]
    fn family(&self) -> &str {
        &self.family
    }

    /// The most positions of a sequence.
    #[getter]
    fn context(&self) -> usize {
        self.context
    }

    /// How many sequences are computed at the same time.
    #[getter]
    fn parallel(&self) -> usize {
        self.parallel
    }

    /// Whether the model has a chat template.
    #[getter]
    fn has_chat_template(&self) -> bool {
        self.has_template
    }

    /// What the user should know about the model.
    #[getter]
    fn warnings(&self) -> Vec<String> {
        self.warnings.clone()
    }

    /// What proposals of further tokens brought so far: accepted and proposed tokens, and the speed-up. None
    /// without proposals.
    fn speculation<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyDict>>> {
        let Some(s) = py.work(|| Ok(self.shared.speculation()))? else { return Ok(None) };
        let d = PyDict::new(py);
        d.set_item("verified_steps", s.verified)?;
        d.set_item("plain_steps", s.plain)?;
        d.set_item("proposed", s.proposed)?;
        d.set_item("accepted", s.accepted)?;
        d.set_item("speed_up", s.speed_up)?;
        Ok(Some(d))
    }

    fn __repr__(&self) -> String {
        let at = self.path.display();
        format!("LanguageModel({at}, {}, {} positions, {})", self.family, self.context, self.backend.id())
    }
}

fn constraint(g: &Generator, demand: &Demand) -> Result<Box<dyn halcyon_models::TokenMask>> {
    let tokenizer = g.tokenizer().ok_or_else(|| {
        Error::unsupported("a grammar for a model that has no tokenizer", "Leave out grammar and json_schema")
    })?;
    Ok(Box::new(match demand {
        Demand::Grammar(text) => halcyon_models::Constraint::grammar(text, tokenizer)?,
        Demand::Schema(text) => halcyon_models::Constraint::json_schema(text, tokenizer)?,
    }))
}
