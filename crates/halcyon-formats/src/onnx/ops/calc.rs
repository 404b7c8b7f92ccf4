//! Helpers for arithmetic on values, for operators that are defined by formulas.

use crate::onnx::build::{Builder, Value};
use crate::onnx::host::symbolic;
use crate::onnx::node::Call;
use halcyon_ir::ScalarOp as S;
use halcyon_ir::{ConstData, DType, Dim, Result, Scalar, Shape};

/// `op(x, y)` with broadcasting.
pub(super) fn bin(b: &mut Builder, op: S, x: &Value, y: &Value) -> Result<Value> {
    b.scalar(op, &[x, y])
}

/// `op(x, k)` with `k` as a literal of the dtype of `x`.
pub(super) fn with(b: &mut Builder, op: S, x: &Value, k: impl Into<Scalar>) -> Result<Value> {
    let k = b.lit(x, k);
    b.scalar(op, &[x, &k])
}

pub(super) fn select(b: &mut Builder, cond: &Value, yes: &Value, no: &Value) -> Result<Value> {
    b.scalar(S::Select, &[cond, yes, no])
}

/// `x` clamped to `lo..=hi`; NaN stays NaN.
pub(super) fn clamp(b: &mut Builder, x: &Value, lo: f64, hi: f64) -> Result<Value> {
    let x = with(b, S::Max, x, lo)?;
    with(b, S::Min, &x, hi)
}

/// `lo <= x <= hi`; false for NaN.
pub(super) fn within(b: &mut Builder, x: &Value, lo: f64, hi: f64) -> Result<Value> {
    let (above, below) = (with(b, S::Ge, x, lo)?, with(b, S::Le, x, hi)?);
    bin(b, S::And, &above, &below)
}

/// A float constant of the node, rounded from f64.
pub(super) fn floats(dtype: DType, dims: &[usize], v: &[f64]) -> Result<Value> {
    let data = match dtype {
        DType::F64 => ConstData::from_slice(dims, v)?,
        _ => crate::data::from_scalars(dtype, dims, v.iter().map(|&v| Scalar::F(v)))?,
    };
    Ok(Value::table(data))
}

/// An index constant of the node.
pub(super) fn indices(dims: &[usize], v: &[i32]) -> Result<Value> {
    Ok(Value::table(ConstData::from_slice(dims, v)?))
}

/// Reshapes a vector to `rank` axes, with its elements along `axis`. All other axes have size 1.
pub(super) fn along(b: &mut Builder, v: &Value, axis: usize, rank: usize) -> Result<Value> {
    let n = v.shape().numel();
    let s: Shape = (0..rank).map(|k| if k == axis { n } else { Dim::from(1) }).collect();
    b.reshape(v, s)
}

/// Element `i` along an axis; the axis is removed.
pub(super) fn nth(b: &mut Builder, x: &Value, axis: usize, i: usize) -> Result<Value> {
    let part = b.narrow(x, axis, Dim::from(i), Dim::from(1))?;
    let s: Shape = (0..x.rank()).filter(|&k| k != axis).map(|k| x.shape()[k]).collect();
    b.reshape(&part, s)
}

/// Appends `n` axes of size 1.
pub(super) fn trailing(b: &mut Builder, x: &Value, n: usize) -> Result<Value> {
    let s: Shape = x.shape().iter().copied().chain(std::iter::repeat_n(Dim::from(1), n)).collect();
    b.reshape(x, s)
}

/// The sizes as numbers. Fails if one is symbolic.
pub(super) fn known(dims: &[Dim]) -> Result<Vec<usize>> {
    dims.iter().map(|d| d.known().ok_or_else(|| symbolic(*d))).collect()
}

/// An integer dtype for indices below `n`.
pub(super) fn index_type(n: Dim) -> DType {
    match n.known() {
        Some(n) if n <= i32::MAX as usize => DType::I32,
        _ => DType::I64,
    }
}

/// The number of elements. Fails above `isize::MAX / 16`, so that a tensor with this number of elements can
/// be addressed whatever its dtype is.
pub(super) fn checked_numel(c: &Call<'_>, dims: &[usize]) -> Result<usize> {
    dims.iter()
        .try_fold(1usize, |n, &d| n.checked_mul(d.max(1)))
        .filter(|n| *n <= isize::MAX as usize / 16)
        .map(|n| if dims.contains(&0) { 0 } else { n })
        .ok_or_else(|| c.invalid(format!("a tensor of sizes {dims:?} is larger than memory")))
}
