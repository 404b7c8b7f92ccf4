//! Builds the graphs of a model that runs in stages, without computing anything.

use halcyon::ir::{Graph, TensorType};
use halcyon::{ConstData, DType, Error, Result, Scalar};
use halcyon_formats::onnx::{Datum, Engine, Handle, Keys, Model, PortType, Text};
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

/// The stages of a model, as far as they can be determined without its values.
#[derive(Debug, Default)]
pub(super) struct Stages {
    pub graphs: Vec<Graph>,
    /// Nodes that run on the host, each with its number of runs.
    pub host: Vec<(String, usize)>,
    /// Why the walk stopped before the end of the model.
    pub stopped: Option<String>,
}

/// Walks the stages. Every value that a decision depends on is assumed to be zero, so sizes that depend on
/// such a value are usually too small.
pub(super) fn stages(model: &Model, inputs: &[Datum]) -> Stages {
    let graphs = Rc::new(RefCell::new(vec![]));
    let mut s = Stages::default();
    match model.run_staged(inputs, Box::new(DryRunEngine { graphs: graphs.clone() })) {
        Ok((_, p)) => s.host = p.host_nodes,
        Err(e) => s.stopped = Some(e.to_string()),
    }
    s.graphs = graphs.take();
    s
}

/// A placeholder of a type: zeros or empty strings, with 1 for symbolic sizes. Sequences, maps and optionals
/// are empty.
pub(super) fn empty(ty: &PortType) -> Result<Datum> {
    Ok(match ty {
        PortType::Tensor { dtype, shape } => {
            let dims: Vec<usize> =
                shape.iter().flat_map(|s| s.iter()).map(|d| d.known().unwrap_or(1)).collect();
            let fits = dims
                .iter()
                .try_fold(1usize, |a, d| a.checked_mul(*d))
                .is_some_and(|n| dtype.bytes(n) <= ZEROS);
            if !fits {
                return Err(Error::unsupported(format!("a value of {ty}"), "Give smaller inputs"));
            }
            Datum::Tensor(ConstData::splat(*dtype, &dims, Scalar::I(0))?)
        }
        PortType::Text { shape } => {
            let dims: Vec<usize> =
                shape.iter().flat_map(|s| s.iter()).map(|d| d.known().unwrap_or(1)).collect();
            let n = dims.iter().try_fold(1usize, |a, d| a.checked_mul(*d)).filter(|n| *n <= ZEROS >> 6);
            let n = n.ok_or_else(|| Error::unsupported(format!("a value of {ty}"), "Give smaller inputs"))?;
            Datum::Text(Text::new(&dims, vec![String::new(); n])?)
        }
        PortType::Sequence(_) => Datum::Sequence(vec![]),
        PortType::Optional(_) => Datum::Optional(None),
        PortType::Map(of) => Datum::Map(Keys::Ints(vec![]), Box::new(empty(of)?)),
    })
}

/// An engine that collects the stages of a model and computes nothing: every value that is read is zero.
#[derive(Debug)]
struct DryRunEngine {
    graphs: Rc<RefCell<Vec<Graph>>>,
}

/// Limit in bytes on one value of a dry run; a string counts as 64 bytes.
pub(super) const ZEROS: usize = 1 << 28;

impl Engine for DryRunEngine {
    fn run(&mut self, graph: Graph, _: &[Handle]) -> Result<Vec<Handle>> {
        let out = graph.outputs().iter().map(|o| Arc::new(graph.ty(o.node).clone()) as Handle).collect();
        self.graphs.borrow_mut().push(graph);
        Ok(out)
    }

    fn prepare(&mut self, graph: Graph) -> Result<Handle> {
        let out: Vec<TensorType> = graph.outputs().iter().map(|o| graph.ty(o.node).clone()).collect();
        self.graphs.borrow_mut().push(graph);
        Ok(Arc::new(out))
    }

    fn launch(
        &mut self,
        plan: &Handle,
        values: &mut [Option<Handle>],
        _: &[usize],
        outputs: &[usize],
    ) -> Result<()> {
        let types: &Vec<TensorType> =
            plan.downcast_ref().ok_or_else(|| Error::internal("a plan of another engine"))?;
        for (o, t) in outputs.iter().zip(types) {
            values[*o] = Some(Arc::new(t.clone()));
        }
        Ok(())
    }

    fn flag(&mut self, _: &Handle) -> Result<bool> {
        Ok(false)
    }

    fn resize(&mut self, _: Option<&Handle>, dtype: DType, dims: &[usize]) -> Result<Handle> {
        Ok(Arc::new(TensorType::new(dtype, dims)))
    }

    fn put(&mut self, _: &mut Handle, _: usize, _: &Handle) -> Result<()> {
        Ok(())
    }

    fn upload(&mut self, data: &ConstData) -> Result<Handle> {
        Ok(Arc::new(TensorType::new(data.dtype, &data.dims)))
    }

    fn read(&mut self, t: &Handle) -> Result<ConstData> {
        let t: &TensorType = t.downcast_ref().ok_or_else(|| Error::internal("a tensor of another engine"))?;
        let dims = t.shape.dims()?;
        let n = dims.iter().try_fold(1usize, |a, d| a.checked_mul(*d)).filter(|n| t.dtype.bytes(*n) <= ZEROS);
        if n.is_none() {
            let what = format!("a stage that reads {t}, more than {} MiB, in a dry run", ZEROS >> 20);
            return Err(Error::unsupported(what, "Give smaller inputs"));
        }
        ConstData::splat(t.dtype, &dims, Scalar::I(0))
    }
}
