//! What the fuzz targets share: a device with little memory, and a bound on the work per input.
//!
//! A small valid file may describe much work without needing much memory. Such work is not run here: a fuzz
//! target looks for crashes and for memory use out of proportion to the file, and must process thousands of
//! inputs per minute.

pub mod language;

use halcyon::{Backend, BackendType, ConstData, Error, Level, Result, Session};
use halcyon_formats::onnx::{Datum, Engine, Handle, PortType};
use halcyon_ir::ops::Op;
use halcyon_ir::{Bindings, Graph, Scalar, Shape};
use std::collections::BTreeSet;
use std::sync::{Arc, LazyLock};

pub use halcyon_test::{mutate, seed_models};

/// Maximum work of a graph that is run, as [`work`] counts it.
const WORK: usize = 1 << 20;
/// Maximum number of elements of an input.
const INPUT: usize = 4096;
/// Memory limit of the device in bytes.
const MEMORY: u64 = 256 << 20;

fn open(level: Level) -> Backend {
    Backend::builder()
        .backend_type(BackendType::Cpu)
        .num_threads(1)
        .memory_limit(MEMORY)
        .level(level)
        .build()
        .expect("the CPU is a device")
}

static O0: LazyLock<Backend> = LazyLock::new(|| open(Level::O0));
static O1: LazyLock<Backend> = LazyLock::new(|| open(Level::O1));

/// The CPU device at O0 and at O1.
pub fn backends() -> [&'static Backend; 2] {
    [&O0, &O1]
}

/// The approximate work of a graph: the elements that its nodes read and write, where each element of a
/// product, convolution or pool counts once for each of its terms. `None` if unknown.
fn work(g: &Graph) -> Option<usize> {
    let (g, _) = halcyon_ir::passes::inline::inline_composites(g, &|_| false).ok()?;
    let count = |d: &[usize]| d.iter().try_fold(1usize, |a, b| a.checked_mul((*b).max(1)));
    let numel = |s: &Shape| count(&s.known()?);
    g.nodes().iter().try_fold(g.nodes().len(), |sum, n| {
        let each = match &n.op {
            Op::Matmul => g.shape(n.inputs[0]).last()?.known()?.max(1),
            Op::Conv(_) => numel(g.shape(n.inputs[1]))?,
            Op::Pool(p) | Op::PoolGrad(p) => count(&p.kernel)?,
            _ => 1,
        };
        let read = n.inputs.iter().try_fold(0usize, |a, x| a.checked_add(numel(g.shape(*x))?))?;
        sum.checked_add(numel(&n.ty.shape)?.checked_mul(each)?)?.checked_add(read)
    })
}

/// Runs a graph if it is little work.
pub fn run(b: &Backend, g: &Graph, inputs: &[ConstData]) -> Result<Vec<ConstData>> {
    g.check()?;
    match work(g) {
        Some(n) if n <= WORK => Session::new(b, g.clone()).run(inputs),
        _ => Err(Error::unsupported("a large graph", "Not run here")),
    }
}

/// Maximum number of stages per run, because a model may loop forever.
const STAGES: usize = 16;

/// The device as an engine for staged runs, limited to a few stages.
#[derive(Debug)]
pub struct Small {
    backend: &'static Backend,
    runs: usize,
}

impl Small {
    pub fn new(backend: &'static Backend) -> Small {
        Small { backend, runs: 0 }
    }
}

impl Engine for Small {
    fn run(&mut self, graph: Graph, inputs: &[Handle]) -> Result<Vec<Handle>> {
        self.runs += 1;
        if self.runs > STAGES {
            return Err(Error::unsupported("a long loop", "Not run here"));
        }
        let x = inputs.iter().map(|h| self.read(h)).collect::<Result<Vec<_>>>()?;
        Ok(run(self.backend, &graph, &x)?.into_iter().map(|c| Arc::new(c) as Handle).collect())
    }
    fn upload(&mut self, data: &ConstData) -> Result<Handle> {
        Ok(Arc::new(data.clone()))
    }
    fn read(&mut self, tensor: &Handle) -> Result<ConstData> {
        tensor
            .downcast_ref::<ConstData>()
            .cloned()
            .ok_or_else(|| Error::internal("not a tensor of this engine"))
    }
}

/// A random value for a port, if it is small.
pub fn value(t: &PortType, r: &mut mutate::Rng) -> Option<Datum> {
    Some(match t {
        PortType::Tensor { dtype, shape } => {
            let dims = match shape {
                None => vec![2],
                Some(s) => {
                    let mut names = BTreeSet::new();
                    s.iter().for_each(|d| d.symbols(&mut names));
                    let b: Bindings = names.into_iter().map(|n| (n, 2)).collect();
                    s.bind(&b).ok()?.known()?.to_vec()
                }
            };
            let n = dims.iter().try_fold(1usize, |a, b| a.checked_mul(*b)).filter(|n| *n <= INPUT)?;
            let hostile = r.once_in(4);
            let v: Vec<Scalar> = (0..n)
                .map(|_| match dtype.is_int() && hostile {
                    true => Scalar::I(mutate::number(r)),
                    false => Scalar::F(r.below(5) as f64 - 1.0),
                })
                .collect();
            Datum::Tensor(halcyon_formats::data::from_scalars(*dtype, &dims, v).ok()?)
        }
        PortType::Text { .. } => {
            Datum::Text(halcyon_formats::onnx::Text { dims: vec![1], vals: vec!["a b".into()] })
        }
        PortType::Sequence(t) => {
            Datum::Sequence((0..r.below(3)).map(|_| value(t, r)).collect::<Option<_>>()?)
        }
        PortType::Optional(_) if r.once_in(2) => Datum::Optional(None),
        PortType::Optional(t) => Datum::Optional(Some(Box::new(value(t, r)?))),
        PortType::Map(_) => return None,
    })
}

/// Checks an error: it must have a message and an exit code, and must not be an internal error.
pub fn judge<T>(r: Result<T>) -> Option<T> {
    match r {
        Ok(v) => Some(v),
        Err(e) => {
            assert!(!matches!(e, Error::Internal(_)), "{e}");
            assert!((1..=5).contains(&e.exit_code()) && !e.to_string().is_empty());
            None
        }
    }
}

/// A number that depends on every byte of the input.
pub fn seed(data: &[u8]) -> u64 {
    data.iter().fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(*b)).wrapping_mul(0x0100_0000_01b3))
}
