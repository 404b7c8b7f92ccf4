//! Running ONNX models.
//!
//! A model whose shapes follow from its inputs' shapes is one graph, compiled once for each set of shapes. A model in which computed
//! values decide how it goes on (conditions, run-time sizes, results whose shape depends on data, sequences) runs in stages: the
//! device computes what the decision needs, the host decides, and the rest is built on that. [`Run::placement`] says what was
//! computed where.

use crate::backend::Backend;
use crate::executable::Executable;
use crate::lru::Lru;
use crate::session::Session;
/// Graphs as ONNX models: `export::write(&graph, path, &options)`.
pub use halcyon_formats::onnx::export;
use halcyon_formats::onnx::{Datum, Engine, Handle, Imported, Model, Outcome, Placement};
use halcyon_hal::{BufferRef, Tag};
use halcyon_ir::error::{Error, Result};
use halcyon_ir::host;
use halcyon_ir::shape::Shape;
use halcyon_ir::{ConstData, DType, Graph};
use std::sync::{Arc, Mutex};

/// Sets of input shapes for which a model stays compiled.
const SHAPES: usize = 64;

/// A model on a backend.
#[derive(Debug)]
pub struct OnnxSession {
    backend: Backend,
    model: Model,
    inputs: Vec<String>,
    made: Mutex<Lru<Key, Arc<Made>>>,
}

/// Shapes of the inputs, and the values of those that steer shapes.
type Key = Vec<(Shape, Option<ConstData>)>;

/// What a model became for one set of shapes.
#[derive(Debug)]
enum Made {
    Graph(Box<(Session, Imported)>),
    Staged { why: String },
}

/// The results of a run.
#[derive(Debug)]
pub struct Run {
    /// In the order of the model's outputs.
    pub outputs: Vec<Datum>,
    pub placement: Placement,
    /// Why the model ran in stages, if it did.
    pub staged: Option<String>,
}

impl OnnxSession {
    /// Compiles nothing yet.
    ///
    /// # Errors
    /// [`Error::UnsupportedOps`] with all operators that are not supported.
    pub fn new(backend: &Backend, model: Model) -> Result<OnnxSession> {
        model.check(backend.info().backend.id())?;
        let inputs = model.inputs()?.into_iter().map(|p| p.name).collect();
        Ok(OnnxSession { backend: backend.clone(), model, inputs, made: Mutex::new(Lru::new(SHAPES)) })
    }

    pub fn backend(&self) -> &Backend {
        &self.backend
    }

    pub fn model(&self) -> &Model {
        &self.model
    }

    /// What the model is for these inputs, in the model's order.
    fn made(&self, inputs: &[Datum]) -> Result<Arc<Made>> {
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
            return Ok(Arc::new(Made::Staged { why: "an input is no tensor".into() }));
        };
        let mut cache = self.made.lock().unwrap_or_else(|e| e.into_inner());
        // Small integers may steer shapes; models where they do are kept by value too.
        let key: Key = tensors
            .iter()
            .map(|t| (Shape::from(&t.dims), (!t.dtype.is_float() && t.numel() <= 64).then(|| (*t).clone())))
            .collect();
        let plain: Key = key.iter().map(|(s, _)| (s.clone(), None)).collect();
        if let Some(m) = cache.get(&plain).or_else(|| cache.get(&key)) {
            return Ok(m);
        }
        let named = || self.inputs.iter().map(String::as_str).zip(&tensors);
        let shapes: Vec<(&str, Shape)> = named().map(|(n, t)| (n, Shape::from(&t.dims))).collect();
        let values: Vec<(&str, ConstData)> = named().map(|(n, t)| (n, (*t).clone())).collect();
        let (key, made) = match self.model.outcome(&shapes, &values)? {
            Outcome::Staged(why) => (plain, Made::Staged { why }),
            Outcome::Graph(i) => {
                let steered = |k: usize| i.fixed.contains(&self.inputs[k]);
                let small = (0..tensors.len()).filter(|k| steered(*k)).all(|k| key[k].1.is_some());
                let session = Session::new(&self.backend, i.graph.clone());
                let key = match (i.fixed.is_empty(), small) {
                    (true, _) => Some(plain),
                    (false, true) => Some(key),
                    // Values that decide and are too large to compare are looked at again each time.
                    (false, false) => None,
                };
                let made = Made::Graph(Box::new((session, *i)));
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

    /// The model as a graph for these inputs, where it is one.
    pub fn graph(&self, inputs: &[Datum]) -> Result<Outcome> {
        Ok(match &*self.made(inputs)? {
            Made::Staged { why } => Outcome::Staged(why.clone()),
            Made::Graph(g) => Outcome::Graph(Box::new(g.1.clone())),
        })
    }

    /// Compiles the model for these inputs. `None` where it runs in stages, which are compiled as they come.
    pub fn prepare(&self, inputs: &[Datum]) -> Result<Option<Arc<Executable>>> {
        match &*self.made(inputs)? {
            Made::Staged { .. } => Ok(None),
            Made::Graph(g) => g.0.prepare(&tensors(inputs)?).map(Some),
        }
    }

    /// Runs the model; inputs in the order of [`Model::inputs`].
    pub fn run(&self, inputs: &[Datum]) -> Result<Run> {
        match &*self.made(inputs)? {
            Made::Graph(g) => {
                let outputs = g.0.run(&tensors(inputs)?)?;
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
            Made::Staged { why } => {
                let engine = Box::new(DeviceEngine { backend: self.backend.clone() });
                let (outputs, placement) = self.model.run_staged(inputs, engine)?;
                Ok(Run { outputs, placement, staged: Some(why.clone()) })
            }
        }
    }
}

fn tensors(inputs: &[Datum]) -> Result<Vec<ConstData>> {
    let one =
        |d: &Datum| d.tensor().cloned().ok_or_else(|| Error::internal("an input of a graph is no tensor"));
    inputs.iter().map(one).collect()
}

/// A tensor on the device.
#[derive(Debug)]
struct DeviceTensor {
    buffer: BufferRef,
    dtype: DType,
    dims: Vec<usize>,
}

#[derive(Debug)]
struct DeviceEngine {
    backend: Backend,
}

fn device(h: &Handle) -> Result<&DeviceTensor> {
    h.downcast_ref().ok_or_else(|| Error::internal("a tensor of another engine"))
}

impl Engine for DeviceEngine {
    fn run(&mut self, graph: Graph, inputs: &[Handle]) -> Result<Vec<Handle>> {
        let exe = self.backend.plan(graph, vec![])?;
        let buffers = inputs.iter().map(|h| Ok(device(h)?.buffer.clone())).collect::<Result<Vec<_>>>()?;
        let out = exe.run(&self.backend, &buffers, &[])?;
        let one = |(buffer, o): (BufferRef, &halcyon_ir::plan::PlanOutput)| -> Handle {
            Arc::new(DeviceTensor { buffer, dtype: o.dtype, dims: o.dims.to_vec() })
        };
        Ok(out.into_iter().zip(&exe.plan().outputs).map(one).collect())
    }

    fn upload(&mut self, data: &ConstData) -> Result<Handle> {
        let d = self.backend.device();
        let buffer = d.alloc(data.bytes().len(), Tag::Io)?;
        d.write(&buffer, 0, data.bytes())?;
        Ok(Arc::new(DeviceTensor { buffer, dtype: data.dtype, dims: data.dims.to_vec() }))
    }

    fn read(&mut self, tensor: &Handle) -> Result<ConstData> {
        let t = device(tensor)?;
        let mut bytes = host::zeros(t.dtype.bytes(t.dims.iter().product()), "a value of the model")?;
        self.backend.device().read(&t.buffer, 0, &mut bytes)?;
        self.backend.check_faults()?;
        ConstData::new(t.dtype, &t.dims, Arc::new(bytes))
    }
}
