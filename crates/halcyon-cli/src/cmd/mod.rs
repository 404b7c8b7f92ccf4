//! The subcommands.

pub(crate) mod bench;
mod bounds;
pub(crate) mod compare;
pub(crate) mod conformance;
pub(crate) mod devices;
mod difference;
pub(crate) mod doctor;
mod dry_run;
pub(crate) mod export;
pub(crate) mod fit;
mod fit_train;
pub(crate) mod help;
pub(crate) mod inspect;
#[cfg(feature = "language")]
pub(crate) mod language;
pub(crate) mod optimize;
mod ort;
pub(crate) mod prepare;
pub(crate) mod probe;
pub(crate) mod replay;
pub(crate) mod run;
pub(crate) mod select;
mod split;
pub(crate) mod trace;
pub(crate) mod train;
pub(crate) mod tune;
mod verify;

use crate::args::{self, BackendArgs, InputArgs};
use crate::source::{self, Input};
use crate::{report, suggest, text};
use halcyon::hal::Tag;
use halcyon::ir::Graph;
use halcyon::ir::passes::MIXED;
use halcyon::{Backend, BackendType, ConstData, Error, OnnxSession, Result, Shape};
use halcyon_formats::onnx::{Datum, Imported, Model, OpenOptions, Outcome};
use serde_json::{Value, json};
use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

macro_rules! commands {
    ($(
        $(#[doc = $about:expr])* $(#[cfg($($cfg:tt)*)])? $(#[command($($options:tt)*)])?
        $name:ident($args:ty) => $main:path;
    )*) => {
        // A command with its arguments. (No doc comment: clap would make it the description of the program.)
        #[derive(clap::Subcommand, Debug)]
        pub(crate) enum Command {
            $($(#[doc = $about])* $(#[cfg($($cfg)*)])? $(#[command($($options)*)])? $name($args),)*
        }

        impl Command {
            /// Runs the command. Returns its exit code unless an error occurs.
            pub(crate) fn run(self) -> Result<u8> {
                match self {
                    $($(#[cfg($($cfg)*)])? Command::$name(a) => $main(&a),)*
                }
            }
        }
    };
}

// Each command has a file in this folder and an entry here: its line in the help, its arguments and its
// function.
commands! {
    /// Runs an ONNX model
    Run(args::RunArgs) => run::main;
    /// Compares two programs that run a model, node by node if they differ
    Compare(args::CompareArgs) => compare::main;
    /// Shows a model's contents and cost, and where it can run
    Inspect(args::InspectArgs) => inspect::main;
    /// Computes the memory that a model needs, and the largest batch
    Fit(args::FitArgs) => fit::main;
    /// Measures what a level changes: time, memory, differences
    Prepare(args::PrepareArgs) => prepare::main;
    /// Shows which device a model would run on, and why
    Select(args::SelectArgs) => select::main;
    /// Writes an ONNX model again: checked, folded, simplified
    Export(args::ExportArgs) => export::main;
    /// Quantises an ONNX model and writes it
    Optimize(args::OptimizeArgs) => optimize::main;
    /// Continues a text with a language model
    #[cfg(feature = "language")]
    Generate(args::GenerateArgs) => language::generate::main;
    /// Talks with a language model
    #[cfg(feature = "language")]
    Chat(args::ChatArgs) => language::chat::main;
    /// Computes the logits of tokens
    #[cfg(feature = "language")]
    Logits(args::LogitsArgs) => language::logits::main;
    /// Computes embeddings: a vector for each text
    #[cfg(feature = "language")]
    Embed(args::EmbedArgs) => language::embed::main;
    /// Measures how well a language model predicts a text
    #[cfg(feature = "language")]
    Perplexity(args::PerplexityArgs) => language::perplexity::main;
    /// Shows the tokens of a text
    #[cfg(feature = "language")]
    Tokenize(args::TokenizeArgs) => language::tokenize::main;
    /// Quantises a language model and writes it as a GGUF file
    #[cfg(feature = "language")]
    Quantize(args::QuantizeModelArgs) => language::quantize::main;
    /// Converts a language model between a folder and a GGUF file
    #[cfg(feature = "language")]
    Convert(args::ConvertArgs) => language::convert::main;
    /// Lists the devices of this machine
    Devices(args::DevicesArgs) => devices::main;
    /// Checks that each backend works, step by step
    Doctor(args::DoctorArgs) => doctor::main;
    /// Trains a model as a configuration file says
    Train(args::TrainArgs) => train::main;
    /// Checks every op, or ONNX test cases, against expected results
    Conformance(args::ConformanceArgs) => conformance::main;
    /// Repeats a failure from its replay file
    Replay(args::ReplayArgs) => replay::main;
    /// Measures which kernels are fastest and keeps the result
    Tune(args::TuneArgs) => tune::main;
    /// Shows a model's graph, passes, kernels, source and times
    Trace(args::TraceArgs) => trace::main;
    /// Measures the machine, single operations, or a model
    Bench(args::BenchArgs) => bench::main;
    /// Prints a completion script for a shell
    Completions(args::CompletionsArgs) => help::completions;
    /// Prints or writes the manual pages
    Man(args::ManArgs) => help::man;
    /// Prints help on a command or a topic
    Help(args::HelpArgs) => help::main;
    /// Probes a driver and prints what it found as JSON
    #[command(name = "__probe", hide = true)]
    Probe(args::ProbeArgs) => probe::main;
    /// Examines a backend in this process and prints one event per line
    #[command(name = "__doctor", hide = true)]
    DoctorChild(args::DoctorChildArgs) => doctor::child;
    /// Runs a model with one of the compared programs, to measure its memory
    #[command(name = "__compare", hide = true)]
    CompareChild(args::CompareArgs) => compare::memory::child;
    /// Tunes in this process and prints one event per line
    #[command(name = "__tune", hide = true)]
    TuneChild(args::TuneArgs) => tune::child;
}

/// Opens a model with the options from the command line.
pub(crate) fn open(path: &Path) -> Result<Model> {
    let links = EXTERNAL_LINKS.load(Ordering::Relaxed);
    suggest::open(path, &OpenOptions::default().external_links(links))
}

/// `--allow-external-links`, for all models of the process.
pub(crate) static EXTERNAL_LINKS: AtomicBool = AtomicBool::new(false);

/// A model with a device and inputs, before compilation.
#[derive(Debug)]
pub(crate) struct Loaded {
    pub backend: Backend,
    pub inputs: Vec<Input>,
    pub session: OnnxSession,
    /// The model as one graph for these inputs, or the reason why it cannot be one.
    pub graph: Outcome,
    /// The model as one graph with long loops unrolled; `None` if this is impossible. Computed on first use.
    pub whole: OnceCell<Option<Box<Imported>>>,
    /// Names of the model's outputs.
    pub outputs: Vec<String>,
    pub times: LoadTimes,
}

#[derive(Debug)]
pub(crate) struct LoadTimes {
    /// Mapping and decoding the model, checking it, and building its graph.
    pub load: Duration,
    /// Selecting and opening the device.
    pub open: Duration,
    /// Reading the inputs.
    pub inputs: Duration,
}

/// The input arguments, with the model's own tokenizer if none is named.
pub(crate) fn with_tokenizer(path: &Path, a: &InputArgs) -> InputArgs {
    let tokenizer = a.tokenizer.clone().or_else(|| text::find_tokenizer(path));
    InputArgs { tokenizer, ..a.clone() }
}

/// Opens a model and a device, reads the inputs and builds the graph. Unsupported operators are reported
/// before any weight or input is read. For `fill` and `profile` see [`load_model`].
pub(crate) fn load(path: &Path, a: &InputArgs, b: &BackendArgs, fill: bool, profile: bool) -> Result<Loaded> {
    b.check()?;
    let start = Instant::now();
    let model = self::open(path)?;
    load_model(model, start.elapsed(), &with_tokenizer(path, a), b, (fill, profile))
}

/// Like [`load`], for a model that is open already. `decode` is the time that opening it took. `fill` allows
/// random inputs, and `profile` enables timing.
pub(crate) fn load_model(
    model: Model,
    decode: Duration,
    a: &InputArgs,
    b: &BackendArgs,
    (fill, profile): (bool, bool),
) -> Result<Loaded> {
    let start = Instant::now();
    let backend = b.open(profile)?;
    let open = start.elapsed();

    let start = Instant::now();
    model.check(backend.info().backend.id())?;
    let ports = model.inputs()?;
    let check = start.elapsed();

    let start = Instant::now();
    let inputs = source::resolve(&ports, a, fill)?;
    let read = start.elapsed();

    let start = Instant::now();
    let outputs = model.output_names()?;
    let session = bounds::session(&backend, model)?;
    let values: Vec<Datum> = inputs.iter().map(|i| i.data.clone()).collect();
    let graph = session.graph(&values)?;
    Ok(Loaded {
        backend,
        inputs,
        session,
        graph,
        whole: OnceCell::new(),
        outputs,
        times: LoadTimes { load: decode + check + start.elapsed(), open, inputs: read },
    })
}

impl Loaded {
    /// The graph of a model that is one graph, if necessary with its long loops unrolled.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a model that runs in stages even with its loops unrolled; `what` names the
    /// user of the graph.
    pub(crate) fn graph(&self, what: &str) -> Result<&Imported> {
        let why = match &self.graph {
            Outcome::Graph(g) => return Ok(g),
            Outcome::Staged(why) => why,
        };
        self.whole.get_or_init(|| self.unrolled()).as_deref().ok_or_else(|| {
            Error::unsupported(
                format!("{what} of a model that is not a single graph: {why}"),
                "Use `halcyon run`, which runs the model in stages",
            )
        })
    }

    fn unrolled(&self) -> Option<Box<Imported>> {
        let given = self.inputs.iter().map(|i| Some((i.name.as_str(), i.data.tensor()?)));
        let given = given.collect::<Option<Vec<_>>>()?;
        let shapes: Vec<(&str, Shape)> = given.iter().map(|(n, t)| (*n, Shape::from(&t.dims))).collect();
        let values: Vec<(&str, ConstData)> = given.into_iter().map(|(n, t)| (n, t.clone())).collect();
        self.session.model().import_with(&shapes, &values).ok().map(Box::new)
    }

    /// The graph for the inputs' sizes, without symbols.
    ///
    /// # Errors
    /// The errors of [`Loaded::graph`].
    pub(crate) fn bound_graph(&self, what: &str) -> Result<Graph> {
        let graph = &self.graph(what)?.graph;
        let sizes: Vec<Shape> =
            self.inputs.iter().filter_map(|i| i.data.tensor()).map(|t| Shape::from(&t.dims)).collect();
        graph.bind(&graph.solve(&sizes)?)
    }

    /// Called with the error `e` if the model could not be prepared. If the device has too little memory,
    /// moves to the first device with enough, unless the user chose the device.
    ///
    /// # Errors
    /// `e` if it is not [`Error::OutOfMemory`], if the user chose the device, or if the model is not a single
    /// graph. Otherwise [`Error::OutOfMemory`] with the bytes that each device lacks.
    pub(crate) fn move_to_other_device(&mut self, path: &Path, b: &BackendArgs, e: Error) -> Result<()> {
        if !matches!(e, Error::OutOfMemory { .. }) || b.kind()? != BackendType::Auto {
            return Err(e);
        }
        let Ok(graph) = self.bound_graph("choosing a device by its memory") else { return Err(e) };
        let bytes: Vec<usize> =
            self.inputs.iter().filter_map(|i| i.data.tensor()).map(|t| t.bytes().len()).collect();
        tracing::warn!(device = self.backend.id(), error = %e, "the model does not fit; trying the other devices");
        let backend = b.builder(b.level()?, None, false)?.build_for(&graph, &bytes)?;
        crate::args::print_warnings(&backend);
        let model = open(path)?;
        model.check(backend.info().backend.id())?;
        self.session = bounds::session(&backend, model)?;
        self.backend = backend;
        Ok(())
    }

    fn determines_shape(&self, input: &str) -> bool {
        matches!(&self.graph, Outcome::Graph(g) if g.fixed.iter().any(|f| f == input))
    }

    pub(crate) fn data(&self) -> Vec<Datum> {
        self.inputs.iter().map(|i| i.data.clone()).collect()
    }

    /// One line per input.
    pub(crate) fn input_text(&self) -> String {
        let mut out = String::new();
        for i in &self.inputs {
            let fixed = match self.determines_shape(&i.name) {
                true => " (determines a shape: the plan is only for this value)",
                false => "",
            };
            out += &format!(
                "input    {} {} from {}{fixed}\n",
                report::name(&i.name),
                i.data.describe(),
                report::name(&i.source)
            );
        }
        out
    }

    pub(crate) fn input_json(&self) -> Value {
        let one = |i: &Input| {
            let mut v = json!({
                "name": i.name,
                "type": i.data.describe(),
                "source": i.source,
                "steers_shape": self.determines_shape(&i.name),
            });
            if let Some(t) = i.data.tensor() {
                v["dtype"] = json!(t.dtype);
                v["shape"] = json!(t.dims.as_slice());
            }
            v
        };
        self.inputs.iter().map(one).collect()
    }
}

/// The selected device and the reason, as JSON.
pub(crate) fn backend_json(b: &Backend) -> Value {
    let s = b.selection();
    json!({
        "id": b.id(),
        "name": b.info().name,
        "requested": s.requested,
        "rule": s.rule,
        "order": s.policy,
        "order_by": s.policy_by.to_string(),
        "fallback": s.fallback,
        "candidates": s.candidates,
        "device": s.device,
        "level": b.level(),
        "precision": b.amp(),
        "matmul_precision": b.precision().to_string(),
        "warnings": b.warnings(),
    })
}

/// The level, the mixed-precision policy if any, and the precision of products if they need not be exact:
/// `O2, bf16, products high`. Says so if the requested policy is not used because it is not faster.
pub(crate) fn level_text(b: &Backend) -> String {
    let mut text = b.level().to_string();
    if b.amp() != halcyon::AmpPolicy::None {
        text += &format!(", {}", b.amp());
    } else if b.warnings().iter().any(|w| w.starts_with(&format!("{MIXED}: "))) {
        text += ", f32 kept (nothing is faster in the requested type)";
    }
    if b.precision() != halcyon::MatmulPrecision::Highest && b.level() >= halcyon::Level::O2 {
        text += &format!(", products {}", b.precision());
    }
    text
}

/// Memory by tag: `activations 12.0 MiB, io 1.0 MiB`.
pub(crate) fn tags_text(tags: &BTreeMap<Tag, u64>) -> String {
    let one = |(t, b): (&Tag, &u64)| format!("{} {}", tag(*t), report::size(*b));
    tags.iter().filter(|(_, b)| **b > 0).map(one).collect::<Vec<_>>().join(", ")
}

pub(crate) fn tags_json(tags: &BTreeMap<Tag, u64>) -> Value {
    tags.iter().map(|(t, b)| (tag(*t), json!(b))).collect::<serde_json::Map<_, _>>().into()
}

fn tag(t: Tag) -> String {
    format!("{t:?}").to_lowercase()
}

/// Why a device was selected, and a line for every reason why others were not.
pub(crate) fn backend_text(b: &Backend) -> String {
    format!(
        "backend  {} ({}): {}\n{}",
        b.id(),
        b.info().name,
        b.selection().rule,
        rejected_text(b, "         ")
    )
}

/// Why the other devices were not selected, one line per reason: abbreviated, or in full with `-v`.
pub(crate) fn rejected_text(b: &Backend, indent: &str) -> String {
    let mut out = String::new();
    let mut reasons: Vec<(String, Vec<&str>)> = vec![];
    for c in &b.selection().candidates {
        let Some(why) = &c.rejected else { continue };
        let why = match (&c.brief, c.required, c.free) {
            _ if report::verbose() => report::reason(c.backend, why),
            (_, Some(need), Some(free)) => {
                format!("too little memory: {} needed, {} free", report::size(need), report::size(free))
            }
            (Some(brief), ..) => brief.clone(),
            (None, ..) => report::reason(c.backend, why),
        };
        let who = c.device.as_deref().unwrap_or(c.backend.id());
        match reasons.iter_mut().find(|(r, _)| *r == why) {
            Some((_, v)) => v.push(who),
            None => reasons.push((why, vec![who])),
        }
    }
    for (why, who) in reasons {
        out += &report::wrap(&why, &format!("{indent}not {}: ", who.join(", ")), &format!("{indent}    "));
    }
    out
}
