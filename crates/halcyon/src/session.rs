//! `Session`: running a whole graph (a loaded model) with host data in and out.

use crate::backend::Backend;
use crate::capture::CapturedGraph;
use crate::executable::Executable;
use crate::planner::Wanted;
use crate::tensor::Tensor;
use crate::tune::{TuneOptions, TuningReport};
use halcyon_hal::{BufferRef, Tag};
use halcyon_ir::error::{Error, Result, Span};
use halcyon_ir::shape::{Shape, TensorType};
use halcyon_ir::{ConstData, Graph, Scalar};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// A graph on a backend. The sizes of symbolic dimensions are taken from the inputs of each run; the plan for
/// a set of sizes is made once.
#[derive(Debug)]
pub struct Session {
    backend: Backend,
    graph: Graph,
    /// The last run's input shapes, the tuning generation at that time, and the plan for both.
    last: Mutex<Option<(Vec<Shape>, u64, Arc<Executable>)>>,
}

impl Session {
    /// A session over a graph. Nothing is compiled or run yet.
    pub fn new(backend: &Backend, graph: Graph) -> Session {
        Session { backend: backend.clone(), graph, last: Mutex::default() }
    }

    /// The backend that the graph runs on.
    pub fn backend(&self) -> &Backend {
        &self.backend
    }

    /// The graph, with its symbols.
    pub fn graph(&self) -> &Graph {
        &self.graph
    }

    /// Checks the number, dtypes and shapes of the inputs against the graph, binds the graph's symbols and
    /// compiles it.
    pub fn prepare(&self, inputs: &[ConstData]) -> Result<Arc<Executable>> {
        let types = types(inputs);
        // The values of the first run decide which ops may be computed in f16.
        if self.backend.needs_sample() && self.cached(&self.shapes(&types)?).is_none() {
            return self.prepare_with(&types, Some(&self.upload(inputs)?));
        }
        self.prepare_with(&types, None)
    }

    /// The last run's plan, if it was for these shapes and no kernel was tuned since.
    fn cached(&self, shapes: &[Shape]) -> Option<Arc<Executable>> {
        let last = self.last.lock().unwrap_or_else(|e| e.into_inner());
        let (s, g, e) = last.as_ref()?;
        (s.as_slice() == shapes && *g == self.backend.tuning_generation()).then(|| e.clone())
    }

    /// Like [`Session::prepare`], given the inputs' types instead of their values. `sample` are inputs of
    /// these types.
    pub(crate) fn prepare_with(
        &self,
        inputs: &[TensorType],
        sample: Option<&[BufferRef]>,
    ) -> Result<Arc<Executable>> {
        let shapes = self.shapes(inputs)?;
        if let Some(e) = self.cached(&shapes) {
            return Ok(e);
        }
        let generation = self.backend.tuning_generation();
        let bindings = self.graph.solve(&shapes)?;
        let wanted = Wanted { sample: sample.map(|s| (s, &[] as &[Scalar])), mixed: None };
        let e = self.backend.planner().plan_for(self.graph.bind(&bindings)?, vec![], wanted)?;
        *self.last.lock().unwrap_or_else(|e| e.into_inner()) = Some((shapes, generation, e.clone()));
        Ok(e)
    }

    /// The graph with its symbols bound to the sizes of these inputs, after checking them.
    pub(crate) fn bind_graph(&self, inputs: &[ConstData]) -> Result<Graph> {
        self.graph.bind(&self.graph.solve(&self.shapes(&types(inputs))?)?)
    }

    /// Shapes of the inputs, after checking their number and dtypes.
    fn shapes(&self, inputs: &[TensorType]) -> Result<Vec<Shape>> {
        let specs = self.graph.inputs();
        if specs.len() != inputs.len() {
            let names: Vec<&str> = specs.iter().map(|i| &*i.name).collect();
            return Err(Error::argument(
                "inputs",
                format!("the model takes {} ({}), {} given", specs.len(), names.join(", "), inputs.len()),
            ));
        }
        for (s, x) in specs.iter().zip(inputs) {
            if self.graph.dtype(s.node) != x.dtype {
                return Err(Error::DType {
                    op: format!("input \"{}\"", s.name),
                    dtype: x.dtype,
                    want: format!("the model takes {}", self.graph.dtype(s.node)),
                    at: Default::default(),
                });
            }
        }
        Ok(inputs.iter().map(|x| x.shape.clone()).collect())
    }

    /// Runs the graph and waits for its results, which are in the order of the graph's outputs.
    pub fn run(&self, inputs: &[ConstData]) -> Result<Vec<ConstData>> {
        let exe = self.prepare(inputs)?;
        let b = self.upload(inputs)?;
        let out = exe.run(&b, &[])?;
        self.download(&exe, &out)
    }

    /// The plan for these inputs with its bindings, for running it many times at the least cost:
    /// [`CapturedGraph::bind`] replaces inputs, [`CapturedGraph::launch`] runs it, [`CapturedGraph::read`]
    /// copies results to the host.
    ///
    /// # Errors
    /// The errors of [`Session::prepare`].
    #[track_caller]
    pub fn capture(&self, inputs: &[ConstData]) -> Result<CapturedGraph> {
        let span = Span::caller();
        let exe = self.prepare(inputs)?;
        let given = inputs.iter().map(|x| Tensor::from_data(&self.backend, x)).collect::<Result<Vec<_>>>()?;
        let donated = vec![false; given.len()];
        CapturedGraph::new(&self.backend, exe, given, donated, span)
    }

    /// Copies inputs to the device, in order.
    pub fn upload(&self, inputs: &[ConstData]) -> Result<Vec<BufferRef>> {
        let d = self.backend.device();
        inputs
            .iter()
            .map(|x| {
                let b = d.alloc(x.bytes().len(), Tag::Io)?;
                d.write(&b, 0, x.bytes())?;
                Ok(b)
            })
            .collect()
    }

    /// Copies outputs to the host; waits for them. A fault of a kernel is reported as an error here.
    pub fn download(&self, exe: &Executable, out: &[BufferRef]) -> Result<Vec<ConstData>> {
        exe.download(out)
    }

    /// Time of one run on device buffers, including the wait for its completion: the median of `n` runs after
    /// a warm-up.
    pub fn time(&self, inputs: &[ConstData], n: usize) -> Result<Duration> {
        let exe = self.prepare(inputs)?;
        let b = self.upload(inputs)?;
        let mut t = vec![];
        for i in 0..n.max(1) + 1 {
            let start = Instant::now();
            exe.run(&b, &[] as &[Scalar])?;
            self.backend.synchronize()?;
            if i > 0 {
                t.push(start.elapsed());
            }
        }
        t.sort();
        Ok(t[t.len() / 2])
    }

    /// Tunes the kernels of the plan for inputs of these sizes.
    ///
    /// # Errors
    /// The errors of [`Backend::tune`]; errors of binding the graph's symbols.
    pub fn tune(&self, inputs: &[ConstData], options: &TuneOptions<'_>) -> Result<TuningReport> {
        let shapes: Vec<Shape> = inputs.iter().map(|x| Shape::from(&x.dims)).collect();
        let graph = self.graph().bind(&self.graph().solve(&shapes)?)?;
        self.backend().tune_with(&[graph], options)
    }
}

fn types(inputs: &[ConstData]) -> Vec<TensorType> {
    inputs.iter().map(|x| TensorType::new(x.dtype, &x.dims)).collect()
}

/// Largest absolute difference over all outputs, relative to the largest magnitude of the reference.
/// Non-finite values must agree exactly, and so must shapes and dtypes; otherwise the result is infinite. If
/// one list is longer, its further outputs are not compared.
pub fn difference(got: &[ConstData], reference: &[ConstData]) -> f64 {
    let (mut worst, mut scale) = (0f64, 0f64);
    for (g, r) in got.iter().zip(reference) {
        if g.dims != r.dims || g.dtype != r.dtype {
            return f64::INFINITY;
        }
        for (a, b) in g.scalars().zip(r.scalars()) {
            let (a, b) = (a.as_f64(), b.as_f64());
            if !a.is_finite() || !b.is_finite() {
                if !(a == b || a.is_nan() && b.is_nan()) {
                    return f64::INFINITY;
                }
                continue;
            }
            worst = worst.max((a - b).abs());
            scale = scale.max(b.abs());
        }
    }
    if worst == 0.0 { 0.0 } else { worst / scale.max(f64::MIN_POSITIVE) }
}
