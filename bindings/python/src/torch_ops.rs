//! What `torch.compile` needs beyond `ops.rs`: gradients of convolutions, pools, attention and layer
//! normalisation, whose nodes PyTorch's graphs name, scalars that a compiled function reads at run time, and
//! weights that plans treat as constants.

use crate::backend::Backend;
use crate::convert;
use crate::dlpack;
use crate::errors::{OrRaise, argument};
use crate::ops::{conv_options, pool_options};
use crate::tensor::Tensor;
use halcyon::{Backend as Raw, Result, Tensor as Inner};
use halcyon_ir::grad::gradients;
use halcyon_ir::{ConstData, Graph, NodeId};
use pyo3::prelude::*;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// An operand of Python.
type In<'py> = PyRef<'py, Tensor>;

/// The gradient of the result of `forward` with respect to operand `of`. The last operand is the gradient of
/// the result. Lowering drops the forward nodes that the gradient does not read.
fn gradient(
    operands: &[&Inner],
    of: usize,
    forward: impl FnOnce(&mut Graph, &[NodeId]) -> Result<NodeId>,
) -> PyResult<Tensor> {
    Tensor::made(Inner::build(operands, |g, v| {
        let (seed, x) = v.split_last().ok_or_else(|| halcyon::Error::argument("gradient", "no operand"))?;
        let y = forward(g, x)?;
        let made = gradients(g, y, &[x[of]], Some(*seed))?;
        match made.first().copied().flatten() {
            Some(d) => Ok(d),
            // The result does not depend on the operand.
            None => {
                let t = g.ty(x[of]).clone();
                Ok(g.full(t.dtype, &t.shape, 0i64))
            }
        }
    }))
}

/// Stride, padding, dilation, input dilation and groups of a convolution.
type Geometry = (Vec<usize>, Vec<(i64, i64)>, Vec<usize>, Vec<usize>, usize);

/// The gradient of `conv` with respect to its operand `of`: `x` or `weight`. `dy` is the gradient of the
/// result, `geometry` the arguments of `conv` from `stride` on.
#[pyfunction]
fn conv_grad(of: &str, x: In<'_>, weight: In<'_>, dy: In<'_>, geometry: Geometry) -> PyResult<Tensor> {
    let k = match of {
        "x" => 0,
        "weight" => 1,
        _ => return Err(argument("conv_grad", format!("\"{of}\" is not one of x, weight"))),
    };
    let (stride, pad, dilation, input_dilation, groups) = geometry;
    let options = conv_options(stride, pad, dilation, input_dilation, groups);
    gradient(&[&x.0, &weight.0, &dy.0], k, |g, v| g.conv(v[0], v[1], options))
}

/// The gradient of `pool` with respect to its operand. `dy` is the gradient of the result. The first of
/// several largest elements of a window gets the whole gradient.
#[pyfunction]
fn pool_grad(
    x: In<'_>,
    dy: In<'_>,
    kind: &str,
    kernel: Vec<usize>,
    stride: Vec<usize>,
    pad: Vec<(usize, usize)>,
    dilation: Vec<usize>,
) -> PyResult<Tensor> {
    let options = pool_options(kind, kernel, stride, pad, dilation)?;
    gradient(&[&x.0, &dy.0], 0, |g, v| g.pool(v[0], options))
}

/// The gradients of `attention` with as many key heads as query heads, with respect to queries, keys and
/// values, one after the other in one axis.
#[pyfunction]
#[pyo3(signature = (q, k, v, dy, mask = None, causal = false, scale = 1.0))]
fn attention_grad(
    q: In<'_>,
    k: In<'_>,
    v: In<'_>,
    dy: In<'_>,
    mask: Option<In<'_>>,
    causal: bool,
    scale: f64,
) -> PyResult<Tensor> {
    let mut all = vec![&q.0, &k.0, &v.0, &dy.0];
    all.extend(mask.as_ref().map(|m| &m.0));
    Tensor::made(Inner::build(&all, |g, x| {
        g.attention_grad([x[0], x[1], x[2], x[3]], x.get(4).copied(), causal, scale)
    }))
}

/// The gradients of `layer_norm` with respect to its operand, scale and bias, one after the other in one
/// axis.
#[pyfunction]
fn layer_norm_grad(x: In<'_>, scale: In<'_>, dy: In<'_>, axis: usize, eps: f64) -> PyResult<Tensor> {
    Tensor::made(Inner::build(&[&x.0, &scale.0, &dy.0], |g, v| {
        g.layer_norm_grad([v[0], v[1], v[2]], axis, eps)
    }))
}

/// Inside of a compiled function: the tensor of rank 0 whose value is argument `number` of the call.
#[pyfunction]
fn call_argument(backend: &Backend, number: u32, dtype: &str) -> PyResult<Tensor> {
    Tensor::made(Inner::argument(&backend.0, number, convert::dtype(dtype)?))
}

/// Parameters of a model whose values plans may treat as constants, as long as nobody changes them.
#[pyclass(frozen, module = "halcyon._native")]
pub(crate) struct Weights {
    backend: Raw,
    shared: Vec<ConstData>,
}

#[pymethods]
impl Weights {
    /// Takes DLPack capsules of dense tensors.
    #[new]
    fn new(py: Python<'_>, backend: &Backend, capsules: Vec<Bound<'_, PyAny>>) -> PyResult<Weights> {
        let shared = capsules
            .iter()
            .map(|c| dlpack::open(py, c).and_then(|(view, owner)| view.shared(owner)))
            .collect::<PyResult<_>>()?;
        Ok(Weights { backend: backend.0.clone(), shared })
    }

    /// Constants with the present values, and the fingerprint of these values. The constants have their own
    /// memory, because plans keep what they derive from it.
    fn constants(&self, py: Python<'_>) -> PyResult<(Vec<Tensor>, u64)> {
        let copies = py.detach(|| {
            let copy = |d: &ConstData| ConstData::new(d.dtype, &d.dims, Arc::new(d.bytes().to_vec()));
            self.shared.iter().map(copy).collect::<Result<Vec<ConstData>>>()
        });
        let copies = copies.or_raise()?;
        let tensors = copies.iter().map(|d| Tensor::made(Inner::constant(&self.backend, d)));
        Ok((tensors.collect::<PyResult<_>>()?, py.detach(|| fingerprint(&copies, 1))))
    }

    /// The fingerprint of the present values, computed on this number of threads. Other values have another
    /// fingerprint, but for one chance in 2^64.
    fn fingerprint(&self, py: Python<'_>, threads: usize) -> u64 {
        py.detach(|| fingerprint(&self.shared, threads))
    }

    /// The number of bytes.
    #[getter]
    fn nbytes(&self) -> usize {
        self.shared.iter().map(|d| d.bytes().len()).sum()
    }
}

/// Odd numbers with about as many ones as zeros, one for each sum.
const KEYS: [u64; 6] = [
    0x9E37_79B9_7F4A_7C15,
    0xBF58_476D_1CE4_E5B9,
    0x94D0_49BB_1331_11EB,
    0xD6E8_FEB8_6659_FD93,
    0xA076_1D64_78BD_642F,
    0xE703_7ED1_A0B4_28DB,
];
/// Each part of this size has a sum of its own, so that threads share the work.
const PART: usize = 1 << 18;

/// Both halves of the product, so that every bit of the operands counts.
#[inline]
fn fold(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    (product as u64) ^ ((product >> 64) as u64)
}

#[inline]
fn mix(sum: u64, word: u64) -> u64 {
    fold(sum ^ word, KEYS[0])
}

/// The sum of a part. Six sums side by side, because one sum waits for its last multiplication.
fn part(bytes: &[u8]) -> u64 {
    let mut sums = KEYS;
    let (pairs, tail) = bytes.as_chunks::<16>();
    let (blocks, rest) = pairs.as_chunks::<6>();
    for block in blocks {
        // By index: with iterators the sums stay in memory, which takes twice the time.
        #[allow(clippy::needless_range_loop)]
        for i in 0..6 {
            let pair = u128::from_le_bytes(block[i]);
            sums[i] = fold(sums[i] ^ (pair as u64), KEYS[i] ^ ((pair >> 64) as u64));
        }
    }
    let words = rest.as_flattened().iter().chain(tail);
    let start = words.fold(bytes.len() as u64, |s, b| mix(s, u64::from(*b)));
    sums.into_iter().fold(start, mix)
}

fn fingerprint(data: &[ConstData], threads: usize) -> u64 {
    let parts: Vec<&[u8]> = data.iter().flat_map(|d| d.bytes().chunks(PART)).collect();
    let sums: Vec<AtomicU64> = parts.iter().map(|_| AtomicU64::new(0)).collect();
    let next = AtomicUsize::new(0);
    // Parts have different sizes and threads different speeds, so each thread takes the next part.
    let work = || {
        while let Some(k) = Some(next.fetch_add(1, Ordering::Relaxed)).filter(|k| *k < parts.len()) {
            sums[k].store(part(parts[k]), Ordering::Relaxed);
        }
    };
    std::thread::scope(|s| {
        for _ in 1..threads.min(parts.len()) {
            // If the system refuses a thread, the others do its parts.
            let _ = std::thread::Builder::new().spawn_scoped(s, work);
        }
        work();
    });
    sums.into_iter().map(AtomicU64::into_inner).fold(data.len() as u64, mix)
}

/// Adds the functions to the submodule `ops`.
pub(crate) fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    macro_rules! add {
        ($($f:ident)*) => { $( m.add_function(wrap_pyfunction!($f, m)?)?; )* };
    }
    add! { conv_grad pool_grad attention_grad layer_norm_grad call_argument }
    Ok(())
}
