//! Running ONNX models: `OnnxSession`.
//!
//! A model whose shapes follow from its inputs' shapes becomes one graph, which is compiled once per set of
//! input shapes. If computed values control the rest of the model (conditions, run-time sizes, results with
//! data-dependent shapes, sequences), the model runs in stages: the device computes the values that a
//! decision needs, the host decides, and the next stage is built accordingly. [`Run::placement`] reports what
//! was computed on the device and on the host.

mod engine;
mod io;

use crate::backend::Backend;
use crate::bad_index;
use crate::cancel;
use crate::executable::Executable;
use crate::lru::Lru;
use crate::session::Session;
use engine::DeviceEngine;
/// Writes graphs as ONNX models: `export::write(&graph, path, &options)`.
pub use halcyon_formats::onnx::export;
/// Limits of a run, and a flag that cancels it: [`OnnxSession::with_options`].
pub use halcyon_formats::onnx::{Cancel, MAX_ITERATIONS, RunOptions};
pub use halcyon_formats::onnx::{
    Datum, Engine, Handle, Imported, Keys, Model, Outcome, Placement, Port, PortType, Text,
};
use halcyon_ir::ConstData;
use halcyon_ir::error::{Error, Result};
use halcyon_ir::shape::{Shape, TensorType};
pub use io::{Input, Outputs, Results};
use std::path::Path;
use std::sync::{Arc, Mutex};

/// An input that is not a float and has at most this number of elements may determine shapes. The values of
/// such inputs can be part of the cache key.
const MAX_SHAPE_ELEMENTS: usize = 64;

/// Number of sets of input shapes for which a model's compiled form is cached.
const SHAPES: usize = 64;

/// An ONNX model on a backend.
#[derive(Debug)]
pub struct OnnxSession {
    backend: Backend,
    model: Arc<Model>,
    inputs: Vec<String>,
    ports: Vec<Port>,
    outputs: Vec<String>,
    options: RunOptions,
    made: Mutex<Lru<Key, Arc<PreparedModel>>>,
}

/// Shapes of the inputs, and the values of those inputs that may determine shapes.
type Key = Vec<(Shape, Option<ConstData>)>;

/// How a model runs for one set of input shapes.
#[derive(Debug)]
enum PreparedModel {
    Graph(Box<(Session, Imported)>),
    Staged { why: String },
}

/// The results of `OnnxSession::run_data`.
#[derive(Debug)]
pub struct Run {
    /// The outputs, in the model's order.
    pub outputs: Vec<Datum>,
    /// What was computed on the device and on the host, and the bytes copied between them.
    pub placement: Placement,
    /// The reason that the model ran in stages; `None` if it ran as one graph.
    pub staged: Option<String>,
}

impl OnnxSession {
    /// Opens a model file; external data is read from files beside it. Nothing is compiled yet.
    ///
    /// # Errors
    /// The errors of [`Model::open`] and [`OnnxSession::new`].
    pub fn open(backend: &Backend, path: impl AsRef<Path>) -> Result<OnnxSession> {
        OnnxSession::new(backend, Model::open(path.as_ref())?)
    }

    /// A session over a loaded model. Nothing is compiled yet.
    ///
    /// # Errors
    /// [`Error::UnsupportedOps`] with all operators of the model that are not supported.
    pub fn new(backend: &Backend, model: Model) -> Result<OnnxSession> {
        OnnxSession::over(backend, Arc::new(model))
    }

    fn over(backend: &Backend, model: Arc<Model>) -> Result<OnnxSession> {
        model.check(backend.info().backend.id())?;
        let ports = model.inputs()?;
        let inputs = ports.iter().map(|p| p.name.clone()).collect();
        let outputs = model.output_names()?;
        let (options, made) = (RunOptions::default(), Mutex::new(Lru::new(SHAPES)));
        Ok(OnnxSession { backend: backend.clone(), model, inputs, ports, outputs, options, made })
    }

    /// A session of the same model on another backend. The sessions share the model's weights in host memory.
    ///
    /// # Errors
    /// [`Error::UnsupportedOps`] if that backend does not support all operators of the model.
    pub fn on(&self, backend: &Backend) -> Result<OnnxSession> {
        Ok(OnnxSession::over(backend, self.model.clone())?.with_options(self.options.clone()))
    }

    /// Limits the iterations of the model's loops, and lets another thread cancel a run.
    ///
    /// ```no_run
    /// use halcyon::onnx::{Cancel, RunOptions};
    /// # fn main() -> halcyon::Result<()> {
    /// # let backend = halcyon::Backend::cpu()?;
    /// let cancel = Cancel::default();
    /// let options = RunOptions { max_iterations: 100_000, cancel: cancel.clone() };
    /// let session = halcyon::OnnxSession::open(&backend, "model.onnx")?.with_options(options);
    /// std::thread::spawn(move || {
    ///     std::thread::sleep(std::time::Duration::from_secs(10));
    ///     cancel.cancel();
    /// });
    /// # Ok(())
    /// # }
    /// ```
    pub fn with_options(mut self, options: RunOptions) -> OnnxSession {
        // Clear the cache, because short loops are part of the cached graphs, and the options affect these
        // loops.
        self.made = Mutex::new(Lru::new(SHAPES));
        self.options = options;
        self
    }

    pub(crate) fn options(&self) -> &RunOptions {
        &self.options
    }

    /// Names and types of the inputs, in the model's order.
    pub fn ports(&self) -> &[Port] {
        &self.ports
    }

    /// Names of the outputs, in the model's order.
    pub fn output_names(&self) -> &[String] {
        &self.outputs
    }

    /// The backend that the model runs on.
    pub fn backend(&self) -> &Backend {
        &self.backend
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// The model's form for these inputs, which are in the model's order.
    fn prepare_model(&self, inputs: &[Datum], options: &RunOptions) -> Result<Arc<PreparedModel>> {
        if inputs.len() != self.inputs.len() {
            return Err(Error::argument(
                "inputs",
                format!(
                    "the model takes {} ({}), {} given",
                    self.inputs.len(),
                    self.inputs.join(", "),
                    inputs.len()
                ),
            ));
        }
        let Some(tensors) = inputs.iter().map(|d| d.tensor()).collect::<Option<Vec<_>>>() else {
            return Ok(Arc::new(PreparedModel::Staged { why: "an input is not a tensor".into() }));
        };
        let types: Vec<TensorType> = tensors.iter().map(|t| TensorType::new(t.dtype, &t.dims)).collect();
        let host: Vec<Option<ConstData>> = tensors.iter().map(|t| Some((*t).clone())).collect();
        self.made_for(&types, &host, &|_| Err(Error::internal("every value is on the host")), options)
    }

    /// The model's form for inputs of these types. `host` holds the values that are on the host; `read`
    /// copies a value from the device. `read` is called only for small inputs that are not floats, and only
    /// if the model cannot be one graph without their values.
    fn made_for(
        &self,
        types: &[TensorType],
        host: &[Option<ConstData>],
        read: &dyn Fn(usize) -> Result<ConstData>,
        options: &RunOptions,
    ) -> Result<Arc<PreparedModel>> {
        // The graph is kept for later runs, so the loops in it have the session's limit.
        let options = &RunOptions { cancel: options.cancel.clone(), ..self.options };
        let mut cache = self.made.lock().unwrap_or_else(|e| e.into_inner());
        let plain: Key = types.iter().map(|t| (t.shape.clone(), None)).collect();
        if let Some(m) = cache.get(&plain) {
            return Ok(m);
        }
        let names = || self.inputs.iter().map(String::as_str);
        let shapes: Vec<(&str, Shape)> = names().zip(types).map(|(n, t)| (n, t.shape.clone())).collect();
        // Small inputs that are not floats may determine shapes. If they do, the cache key includes their
        // values.
        let small = |t: &TensorType| {
            let n = t.shape.numel().known();
            !t.dtype.is_float() && n.is_some_and(|n| n <= MAX_SHAPE_ELEMENTS)
        };
        let mut values: Vec<Option<ConstData>> = host.to_vec();
        let given = |v: &[Option<ConstData>]| -> Vec<(&str, ConstData)> {
            names().zip(v).filter_map(|(n, v)| Some((n, v.clone()?))).collect()
        };
        let keyed = |v: &[Option<ConstData>]| -> Key {
            let value =
                |(t, v): (&TensorType, &Option<ConstData>)| (t.shape.clone(), v.clone().filter(|_| small(t)));
            types.iter().zip(v).map(value).collect()
        };
        let mut key = keyed(&values);
        if let Some(m) = cache.get(&key) {
            return Ok(m);
        }
        let mut outcome = self.model.outcome_with(&shapes, &given(&values), options)?;
        let unread =
            (0..types.len()).filter(|k| values[*k].is_none() && small(&types[*k])).collect::<Vec<_>>();
        if matches!(outcome, Outcome::Staged(_)) && !unread.is_empty() {
            for k in unread {
                values[k] = Some(read(k)?);
            }
            key = keyed(&values);
            if let Some(m) = cache.get(&key) {
                return Ok(m);
            }
            outcome = self.model.outcome_with(&shapes, &given(&values), options)?;
        }
        let (key, made) = match outcome {
            Outcome::Staged(why) => (plain, PreparedModel::Staged { why }),
            Outcome::Graph(i) => {
                let steered = |k: usize| i.fixed.contains(&self.inputs[k]);
                let small = (0..types.len()).filter(|k| steered(*k)).all(|k| key[k].1.is_some());
                let session = Session::new(&self.backend, i.graph.clone());
                let key = match (i.fixed.is_empty(), small) {
                    (true, _) => Some(plain),
                    (false, true) => Some(key),
                    // If the values that determine shapes are too large to compare, nothing is cached.
                    (false, false) => None,
                };
                let made = PreparedModel::Graph(Box::new((session, *i)));
                match key {
                    Some(k) => (k, made),
                    None => return Ok(Arc::new(made)),
                }
            }
        };
        let made = Arc::new(made);
        cache.put(key, made.clone());
        Ok(made)
    }

    /// The model as a graph for these inputs (in the model's order), or the reason that it runs in stages.
    pub fn graph(&self, inputs: &[Datum]) -> Result<Outcome> {
        Ok(match &*self.prepare_model(inputs, &self.options)? {
            PreparedModel::Staged { why } => Outcome::Staged(why.clone()),
            PreparedModel::Graph(g) => Outcome::Graph(Box::new(g.1.clone())),
        })
    }

    /// Compiles the model for these inputs. `None` if it runs in stages, because stages are compiled during
    /// the run.
    pub fn prepare(&self, inputs: &[Datum]) -> Result<Option<Arc<Executable>>> {
        match &*self.prepare_model(inputs, &self.options)? {
            PreparedModel::Staged { .. } => Ok(None),
            PreparedModel::Graph(g) => g.0.prepare(&tensors(inputs)?).map(Some),
        }
    }

    /// Runs the model on host data of any kind. The inputs are in the order of [`Model::inputs`].
    pub fn run_data(&self, inputs: &[Datum]) -> Result<Run> {
        self.run_data_with(inputs, &self.options)
    }

    /// Like [`OnnxSession::run_data`], with options of this run.
    fn run_data_with(&self, inputs: &[Datum], options: &RunOptions) -> Result<Run> {
        match &*self.prepare_model(inputs, options)? {
            PreparedModel::Graph(g) => {
                let tensors = tensors(inputs)?;
                let outputs = cancellable(options, || g.0.run(&tensors));
                let outputs = outputs.map_err(|e| bad_index::explain(e, &g.1.graph, &tensors))?;
                let placement = Placement {
                    stages: 1,
                    bytes_written: inputs
                        .iter()
                        .filter_map(|d| d.tensor())
                        .map(|t| t.bytes().len() as u64)
                        .sum(),
                    bytes_read: outputs.iter().map(|t| t.bytes().len() as u64).sum(),
                    ..Placement::default()
                };
                Ok(Run { outputs: outputs.into_iter().map(Datum::Tensor).collect(), placement, staged: None })
            }
            PreparedModel::Staged { why } => {
                let engine = Box::new(DeviceEngine::new(&self.backend));
                let staged = || self.model.run_staged_with(inputs, engine, options);
                let (outputs, placement) = cancellable(options, staged)?;
                Ok(Run { outputs, placement, staged: Some(why.clone()) })
            }
        }
    }
}

/// Runs `f`, which ends between two steps of the device once the run is cancelled.
fn cancellable<T>(options: &RunOptions, f: impl FnOnce() -> T) -> T {
    let flag = options.cancel.clone();
    cancel::scope(move || flag.is_cancelled(), f)
}

fn tensors(inputs: &[Datum]) -> Result<Vec<ConstData>> {
    let one =
        |d: &Datum| d.tensor().cloned().ok_or_else(|| Error::internal("an input of a graph is not a tensor"));
    inputs.iter().map(one).collect()
}

/// ONNX export.
impl Session {
    /// The graph as an ONNX model, serialised in memory.
    ///
    /// # Errors
    /// The errors of [`export::to_bytes`].
    pub fn to_onnx(&self, options: &export::ExportOptions) -> Result<Vec<u8>> {
        export::to_bytes(self.graph(), options)
    }
}
