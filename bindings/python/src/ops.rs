//! The operations of tensors, as functions of the submodule `_native.ops`. Shapes, element types and errors
//! are those of the graph builders with the same names.

use crate::calls::Work;
use crate::convert;
use crate::errors::{OrRaise, argument, exception};
use crate::tensor::Tensor;
use halcyon::{Attention, CrossEntropy, Order, Scan, Tensor as Inner, Variance};
use halcyon_ir::ops::{Conv, Pool, PoolKind, ReduceKind, ScatterKind};
use halcyon_ir::{DType, ScalarOp};
use pyo3::prelude::*;

/// An operand of Python.
type In<'py> = PyRef<'py, Tensor>;

fn reduce_kind(name: &str) -> PyResult<ReduceKind> {
    Ok(match name {
        "sum" => ReduceKind::Sum,
        "prod" => ReduceKind::Prod,
        "max" => ReduceKind::Max,
        "min" => ReduceKind::Min,
        _ => return Err(argument("reduce", format!("\"{name}\" is not one of sum, prod, max, min"))),
    })
}

fn scatter_kind(name: &str) -> PyResult<ScatterKind> {
    Ok(match name {
        "set" => ScatterKind::Set,
        "add" => ScatterKind::Add,
        "mul" => ScatterKind::Mul,
        "max" => ScatterKind::Max,
        "min" => ScatterKind::Min,
        _ => return Err(argument("scatter", format!("\"{name}\" is not one of set, add, mul, max, min"))),
    })
}

/// An element-wise operation with one to three operands of one element type, which broadcast. The names are
/// those of `scalar_ops()`.
#[pyfunction]
fn scalar(name: &str, operands: Vec<In<'_>>) -> PyResult<Tensor> {
    let op = ScalarOp::from_name(name)
        .ok_or_else(|| argument("scalar", format!("\"{name}\" is not an element-wise operation")))?;
    let all: Vec<&Inner> = operands.iter().map(|t| &t.0).collect();
    if all.len() != op.arity() {
        let what = format!("{name} takes {} operands, {} given", op.arity(), all.len());
        return Err(argument("scalar", what));
    }
    Tensor::made(Inner::scalar_op(op, &all))
}

/// The names of the element-wise operations, each with its number of operands.
#[pyfunction]
fn scalar_ops() -> Vec<(&'static str, usize)> {
    halcyon_ir::ops::element_wise::ROWS.iter().map(|r| (r.name, r.arity)).collect()
}

/// A tensor of rank 0 with the element type of `like`. Its value is a run-time argument of the plan, so that
/// another number needs no new plan.
#[pyfunction]
fn literal(like: In<'_>, value: &Bound<'_, PyAny>) -> PyResult<Tensor> {
    let value = convert::scalar(value)?;
    Tensor::made(Inner::scalar(like.0.backend(), value, like.0.dtype().or_raise()?))
}

/// Converts to another element type. Floats become integers by rounding towards zero and saturating.
#[pyfunction]
fn cast(x: In<'_>, dtype: &str) -> PyResult<Tensor> {
    Tensor::made(x.0.cast(convert::dtype(dtype)?))
}

/// Reinterprets the bits as another element type of equal size.
#[pyfunction]
fn bitcast(x: In<'_>, dtype: &str) -> PyResult<Tensor> {
    Tensor::made(x.0.bitcast(convert::dtype(dtype)?))
}

/// The same value, through which no gradient is propagated.
#[pyfunction]
fn stop_gradient(x: In<'_>) -> PyResult<Tensor> {
    Tensor::made(x.0.stop_gradient())
}

/// The matrix product as in NumPy.
#[pyfunction]
fn matmul(a: In<'_>, b: In<'_>) -> PyResult<Tensor> {
    Tensor::made(a.0.matmul(&b.0))
}

/// Another shape with the same number of elements, in row-major order. One size may be -1.
#[pyfunction]
fn reshape(x: In<'_>, shape: Vec<i64>) -> PyResult<Tensor> {
    let known = x.0.dims().or_raise()?;
    let total: usize = known.iter().product();
    let mut sizes = Vec::with_capacity(shape.len());
    let mut rest = None;
    for (i, n) in shape.iter().enumerate() {
        match (*n, rest) {
            (-1, None) => {
                rest = Some(i);
                sizes.push(1usize);
            }
            (-1, Some(_)) => return Err(argument("reshape", format!("{shape:?} has two sizes of -1"))),
            (n, _) => match usize::try_from(n) {
                Ok(n) => sizes.push(n),
                Err(_) => return Err(argument("reshape", format!("{n} in {shape:?} is not a size"))),
            },
        }
    }
    if let Some(i) = rest {
        let others: usize = sizes.iter().product();
        if others == 0 || !total.is_multiple_of(others) {
            let what = format!("{total} elements do not fill the shape {shape:?}");
            return Err(exception(halcyon::Error::shape("reshape", what)));
        }
        sizes[i] = total / others;
    }
    Tensor::made(Inner::build(&[&x.0], |g, v| g.reshape(v[0], sizes)))
}

/// The axes in another order.
#[pyfunction]
fn permute(x: In<'_>, axes: Vec<i64>) -> PyResult<Tensor> {
    Tensor::made(x.0.permute(&axes))
}

/// Repeats axes of size 1, and adds axes at the front.
#[pyfunction]
fn expand(x: In<'_>, shape: Vec<usize>) -> PyResult<Tensor> {
    Tensor::made(x.0.expand(shape))
}

/// `len` elements of each axis from `start` on, with this step, which may be negative.
#[pyfunction]
fn slice(x: In<'_>, start: Vec<usize>, step: Vec<i64>, len: Vec<usize>) -> PyResult<Tensor> {
    let rank = x.0.dims().or_raise()?.len();
    if [start.len(), step.len(), len.len()].iter().any(|n| *n != rank) {
        return Err(argument("slice", format!("start, step and len need {rank} entries each")));
    }
    Tensor::made(x.0.slice(&start, &step, &len))
}

/// `len` elements of an axis from a run-time `position` (an integer of rank 0) on.
#[pyfunction]
fn narrow_at(x: In<'_>, axis: i64, position: In<'_>, len: usize) -> PyResult<Tensor> {
    Tensor::made(x.0.narrow_at(axis, &position.0, len))
}

/// Reverses axes.
#[pyfunction]
fn flip(x: In<'_>, axes: Vec<i64>) -> PyResult<Tensor> {
    Tensor::made(x.0.flip(&axes))
}

/// Adds `lo` elements before and `hi` elements after each axis, all of this value.
#[pyfunction]
fn pad(x: In<'_>, lo: Vec<usize>, hi: Vec<usize>, value: &Bound<'_, PyAny>) -> PyResult<Tensor> {
    let rank = x.0.dims().or_raise()?.len();
    if lo.len() != rank || hi.len() != rank {
        return Err(argument("pad", format!("lo and hi need {rank} entries each")));
    }
    Tensor::made(x.0.pad(&lo, &hi, convert::scalar(value)?))
}

/// Joins tensors along an axis.
#[pyfunction]
fn concat(x: Vec<In<'_>>, axis: i64) -> PyResult<Tensor> {
    let all: Vec<&Inner> = x.iter().map(|t| &t.0).collect();
    if all.is_empty() {
        return Err(argument("concat", "needs at least one tensor"));
    }
    Tensor::made(Inner::cat(&all, axis))
}

/// Rows along an axis by integer index. The result's shape has the shape of `index` in place of the axis.
#[pyfunction]
fn gather(x: In<'_>, index: In<'_>, axis: i64) -> PyResult<Tensor> {
    Tensor::made(x.0.gather(&index.0, axis))
}

/// Single elements along an axis by integer index.
#[pyfunction]
fn gather_elements(x: In<'_>, index: In<'_>, axis: i64) -> PyResult<Tensor> {
    Tensor::made(x.0.gather_elements(&index.0, axis))
}

/// Combines single elements of `updates` into `x` along an axis; `kind` is set, add, mul, max or min.
#[pyfunction]
fn scatter_elements(x: In<'_>, index: In<'_>, updates: In<'_>, axis: i64, kind: &str) -> PyResult<Tensor> {
    Tensor::made(x.0.scatter_elements(&index.0, &updates.0, axis, scatter_kind(kind)?))
}

/// Combines rows of `updates` into `x` along an axis; `kind` is set, add, mul, max or min.
#[pyfunction]
fn scatter_rows(x: In<'_>, index: In<'_>, updates: In<'_>, axis: i64, kind: &str) -> PyResult<Tensor> {
    Tensor::made(x.0.scatter_rows(&index.0, &updates.0, axis, scatter_kind(kind)?))
}

/// `x` with `update` written at a run-time position (an integer of rank 0) along an axis.
#[pyfunction]
fn update_slice(x: In<'_>, update: In<'_>, position: In<'_>, axis: i64) -> PyResult<Tensor> {
    Tensor::made(x.0.update_slice(&update.0, &position.0, axis))
}

/// The axes of a reduction: no reduction for an empty list, because the builders take it as all axes.
fn reduction(x: &Inner, axes: Option<Vec<i64>>, f: impl FnOnce(&[i64]) -> Inner) -> PyResult<Tensor> {
    match axes {
        None => Tensor::made(f(&[])),
        Some(a) if a.is_empty() => Tensor::made(x.clone()),
        Some(a) => Tensor::made(f(&a)),
    }
}

/// Reduces axes (all, if `axes` is None) by sum, prod, max or min.
#[pyfunction]
#[pyo3(signature = (x, kind, axes = None, keepdim = false))]
fn reduce(x: In<'_>, kind: &str, axes: Option<Vec<i64>>, keepdim: bool) -> PyResult<Tensor> {
    let kind = reduce_kind(kind)?;
    reduction(&x.0, axes, |a| match keepdim {
        true => x.0.reduce_keepdim(kind, a),
        false => x.0.reduce(kind, a),
    })
}

/// The mean over axes (all, if `axes` is None).
#[pyfunction]
#[pyo3(signature = (x, axes = None, keepdim = false))]
fn mean(x: In<'_>, axes: Option<Vec<i64>>, keepdim: bool) -> PyResult<Tensor> {
    reduction(&x.0, axes, |a| match keepdim {
        true => x.0.mean_keepdim(a),
        false => x.0.mean(a),
    })
}

/// The variance over axes (all, if `axes` is None), divided by the number of elements less `correction`.
#[pyfunction]
#[pyo3(signature = (x, axes = None, keepdim = false, correction = 0))]
fn var(x: In<'_>, axes: Option<Vec<i64>>, keepdim: bool, correction: usize) -> PyResult<Tensor> {
    let axes = axes.unwrap_or_default();
    Tensor::made(x.0.var_with(&axes[..], Variance { correction, keepdim }))
}

/// The index (i64) of the first largest or smallest element along an axis.
#[pyfunction]
#[pyo3(signature = (x, max, axis, keepdim = false))]
fn argreduce(x: In<'_>, max: bool, axis: i64, keepdim: bool) -> PyResult<Tensor> {
    Tensor::made(Inner::build(&[&x.0], |g, v| {
        let a = g.shape(v[0]).axis(axis)?;
        g.argreduce(max, v[0], a, keepdim, false)
    }))
}

/// The indices (i64) that sort an axis. The sort is stable; NaN sorts as the largest.
#[pyfunction]
#[pyo3(signature = (x, axis, descending = false))]
fn argsort(x: In<'_>, axis: i64, descending: bool) -> PyResult<Tensor> {
    Tensor::made(x.0.argsort(axis, if descending { Order::Descending } else { Order::Ascending }))
}

/// A running reduction along an axis.
#[pyfunction]
#[pyo3(signature = (x, kind, axis, exclusive = false, reverse = false))]
fn scan(x: In<'_>, kind: &str, axis: i64, exclusive: bool, reverse: bool) -> PyResult<Tensor> {
    Tensor::made(x.0.scan(reduce_kind(kind)?, axis, Scan { exclusive, reverse }))
}

/// The numbers 0, 1, … along an axis of a shape.
#[pyfunction]
fn iota(like: In<'_>, dtype: &str, shape: Vec<usize>, axis: usize) -> PyResult<Tensor> {
    let dtype = convert::dtype(dtype)?;
    Tensor::made(Inner::build(&[&like.0], |g, _| g.iota(dtype, shape, axis)))
}

/// Softmax along an axis.
#[pyfunction]
fn softmax(x: In<'_>, axis: i64) -> PyResult<Tensor> {
    Tensor::made(x.0.softmax(axis))
}

/// The logarithm of softmax along an axis.
#[pyfunction]
fn log_softmax(x: In<'_>, axis: i64) -> PyResult<Tensor> {
    Tensor::made(x.0.log_softmax(axis))
}

/// Layer normalisation over the axes from `axis` on.
#[pyfunction]
fn layer_norm(x: In<'_>, scale: In<'_>, bias: Option<In<'_>>, axis: i64, eps: f64) -> PyResult<Tensor> {
    Tensor::made(x.0.layer_norm(&scale.0, bias.as_ref().map(|b| &b.0), axis, eps))
}

/// Root-mean-square normalisation over the last axis.
#[pyfunction]
fn rms_norm(x: In<'_>, scale: In<'_>, eps: f64) -> PyResult<Tensor> {
    Tensor::made(x.0.rms_norm(&scale.0, eps))
}

/// Batch normalisation over axis 1 with given statistics.
#[pyfunction]
fn batch_norm(
    x: In<'_>,
    scale: In<'_>,
    bias: In<'_>,
    mean: In<'_>,
    var: In<'_>,
    eps: f64,
) -> PyResult<Tensor> {
    Tensor::made(x.0.batch_norm(&scale.0, &bias.0, &mean.0, &var.0, eps))
}

pub(crate) fn conv_options(
    stride: Vec<usize>,
    pad: Vec<(i64, i64)>,
    dilation: Vec<usize>,
    input_dilation: Vec<usize>,
    groups: usize,
) -> Conv {
    Conv {
        stride: stride.into(),
        pad: pad.into(),
        dilation: dilation.into(),
        input_dilation: input_dilation.into(),
        groups,
    }
}

/// A convolution of `[n, channels, …]` with a weight of `[out, channels / groups, …]`. `input_dilation`
/// above 1 gives the transposed convolution.
#[pyfunction]
#[pyo3(signature = (x, weight, stride, pad, dilation, input_dilation, groups = 1))]
fn conv(
    x: In<'_>,
    weight: In<'_>,
    stride: Vec<usize>,
    pad: Vec<(i64, i64)>,
    dilation: Vec<usize>,
    input_dilation: Vec<usize>,
    groups: usize,
) -> PyResult<Tensor> {
    let options = conv_options(stride, pad, dilation, input_dilation, groups);
    Tensor::made(x.0.conv(&weight.0, options))
}

pub(crate) fn pool_options(
    kind: &str,
    kernel: Vec<usize>,
    stride: Vec<usize>,
    pad: Vec<(usize, usize)>,
    dilation: Vec<usize>,
) -> PyResult<Pool> {
    let kind = match kind {
        "max" => PoolKind::Max,
        "avg" => PoolKind::Avg { count_include_pad: false },
        "avg_padded" => PoolKind::Avg { count_include_pad: true },
        _ => return Err(argument("pool", format!("\"{kind}\" is not one of max, avg, avg_padded"))),
    };
    Ok(Pool {
        kind,
        kernel: kernel.into(),
        stride: stride.into(),
        pad: pad.into(),
        dilation: dilation.into(),
    })
}

/// Pooling of `[n, channels, …]`; `kind` is max, avg or avg_padded, which counts the padding.
#[pyfunction]
fn pool(
    x: In<'_>,
    kind: &str,
    kernel: Vec<usize>,
    stride: Vec<usize>,
    pad: Vec<(usize, usize)>,
    dilation: Vec<usize>,
) -> PyResult<Tensor> {
    let options = pool_options(kind, kernel, stride, pad, dilation)?;
    Tensor::made(x.0.pool(options))
}

/// Scaled dot-product attention of `[batch, heads, queries, size]`. The mask is added to the scores.
#[pyfunction]
#[pyo3(signature = (q, k, v, mask = None, causal = false, scale = None))]
fn attention(
    q: In<'_>,
    k: In<'_>,
    v: In<'_>,
    mask: Option<In<'_>>,
    causal: bool,
    scale: Option<f64>,
) -> PyResult<Tensor> {
    let options = Attention { mask: mask.as_ref().map(|m| &m.0), causal, scale };
    Tensor::made(q.0.attention(&k.0, &v.0, options))
}

/// The mean negative log-likelihood of integer labels under logits `[n, classes, …]`.
#[pyfunction]
#[pyo3(signature = (x, labels, ignore_index = Some(-100)))]
fn cross_entropy(x: In<'_>, labels: In<'_>, ignore_index: Option<i64>) -> PyResult<Tensor> {
    Tensor::made(x.0.cross_entropy_with(&labels.0, CrossEntropy { ignore_index }))
}

/// Uniform random numbers of f32 in [0, 1) from a key: two u32 tensors of rank 0.
#[pyfunction]
fn rand_by_key(low: In<'_>, high: In<'_>, shape: Vec<usize>) -> PyResult<Tensor> {
    Tensor::made(Inner::rand_by_key([&low.0, &high.0], shape))
}

/// Standard normal random numbers of f32 from a key: two u32 tensors of rank 0.
#[pyfunction]
fn randn_by_key(low: In<'_>, high: In<'_>, shape: Vec<usize>) -> PyResult<Tensor> {
    Tensor::made(Inner::randn_by_key([&low.0, &high.0], shape))
}

/// The indices of the elements that are not zero, as `[count, rank]` of i64. Computes the value.
#[pyfunction]
fn nonzero(py: Python<'_>, x: In<'_>) -> PyResult<Tensor> {
    let x = x.0.clone();
    let (backend, rows) = py.work(|| {
        let dims = x.dims()?;
        let zero = Inner::scalar(x.backend(), halcyon::Scalar::I(0), DType::I64).cast(x.dtype()?);
        let found = Inner::scalar_op(ScalarOp::Ne, &[&x, &zero]).to_data()?;
        let mut rows: Vec<i64> = vec![];
        for (at, _) in found.bytes().iter().enumerate().filter(|(_, b)| **b != 0) {
            let first = rows.len();
            let mut rest = at;
            rows.resize(first + dims.len(), 0);
            for (k, n) in dims.iter().enumerate().rev() {
                rows[first + k] = (rest % n) as i64;
                rest /= n;
            }
        }
        // A tensor of rank 0 has one row of no columns if it is not zero.
        let count =
            if dims.is_empty() { usize::from(found.bytes()[0] != 0) } else { rows.len() / dims.len() };
        Ok((x.backend().clone(), (count, dims.len(), rows)))
    })?;
    let (count, rank, rows) = rows;
    Tensor::made(Inner::from_slice(&backend, [count, rank], &rows).or_raise()?)
}

/// Adds the submodule `ops`.
pub(crate) fn register(parent: &Bound<'_, PyModule>) -> PyResult<()> {
    let m = PyModule::new(parent.py(), "ops")?;
    macro_rules! add {
        ($($f:ident)*) => { $( m.add_function(wrap_pyfunction!($f, &m)?)?; )* };
    }
    add! {
        scalar scalar_ops literal cast bitcast stop_gradient matmul reshape permute expand slice narrow_at flip
        pad concat gather gather_elements scatter_elements scatter_rows update_slice reduce mean var argreduce
        argsort scan iota softmax log_softmax layer_norm rms_norm batch_norm conv pool attention cross_entropy
        rand_by_key randn_by_key nonzero
    }
    crate::torch_ops::register(&m)?;
    parent.add_submodule(&m)
}
