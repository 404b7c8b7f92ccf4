//! Arithmetic on values in fewer words, for operators that are formulas.

use crate::onnx::build::{Builder, Value};
use crate::onnx::host::symbolic;
use crate::onnx::node::Call;
use halcyon_ir::ScalarOp as S;
use halcyon_ir::{ConstData, DType, Dim, Result, Scalar, Shape};

/// `op(x, y)` with broadcasting.
pub fn bin(b: &mut Builder, op: S, x: &Value, y: &Value) -> Result<Value> {
    b.scalar(op, &[x, y])
}

/// `op(x, k)` with a literal of the type of `x`.
pub fn with(b: &mut Builder, op: S, x: &Value, k: impl Into<Scalar>) -> Result<Value> {
    let k = b.lit(x, k);
    b.scalar(op, &[x, &k])
}

pub fn select(b: &mut Builder, cond: &Value, yes: &Value, no: &Value) -> Result<Value> {
    b.scalar(S::Select, &[cond, yes, no])
}

/// `x` limited to `lo..=hi`; NaN stays.
pub fn clamp(b: &mut Builder, x: &Value, lo: f64, hi: f64) -> Result<Value> {
    let x = with(b, S::Max, x, lo)?;
    with(b, S::Min, &x, hi)
}

/// `lo <= x <= hi`; false for NaN.
pub fn within(b: &mut Builder, x: &Value, lo: f64, hi: f64) -> Result<Value> {
    let (above, below) = (with(b, S::Ge, x, lo)?, with(b, S::Le, x, hi)?);
    bin(b, S::And, &above, &below)
}

/// A tensor of the node's own, rounded from f64.
pub fn floats(dtype: DType, dims: &[usize], v: &[f64]) -> Result<Value> {
    let data = match dtype {
        DType::F64 => ConstData::from_slice(dims, v)?,
        _ => crate::data::from_scalars(dtype, dims, v.iter().map(|&v| Scalar::F(v)))?,
    };
    Ok(Value::table(data))
}

/// Indices of the node's own.
pub fn indices(dims: &[usize], v: &[i32]) -> Result<Value> {
    Ok(Value::table(ConstData::from_slice(dims, v)?))
}

/// A vector as axis `axis` of a shape of `rank`, all other sizes 1.
pub fn along(b: &mut Builder, v: &Value, axis: usize, rank: usize) -> Result<Value> {
    let n = v.shape().numel();
    let s: Shape = (0..rank).map(|k| if k == axis { n } else { Dim::from(1) }).collect();
    b.reshape(v, s)
}

/// Element `i` along an axis, without that axis.
pub fn nth(b: &mut Builder, x: &Value, axis: usize, i: usize) -> Result<Value> {
    let part = b.narrow(x, axis, Dim::from(i), Dim::from(1))?;
    let s: Shape = (0..x.rank()).filter(|&k| k != axis).map(|k| x.shape()[k]).collect();
    b.reshape(&part, s)
}

/// With further axes of size 1 at the end.
pub fn trailing(b: &mut Builder, x: &Value, n: usize) -> Result<Value> {
    let s: Shape = x.shape().iter().copied().chain(std::iter::repeat_n(Dim::from(1), n)).collect();
    b.reshape(x, s)
}

/// Sizes that must be numbers.
pub fn known(dims: &[Dim]) -> Result<Vec<usize>> {
    dims.iter().map(|d| d.known().ok_or_else(|| symbolic(*d))).collect()
}

/// An integer type for indices below `n`.
pub fn index_type(n: Dim) -> DType {
    match n.known() {
        Some(n) if n <= i32::MAX as usize => DType::I32,
        _ => DType::I64,
    }
}

/// Number of elements, if it and their bytes (of any type) can be addressed.
pub fn checked_numel(c: &Call<'_>, dims: &[usize]) -> Result<usize> {
    dims.iter()
        .try_fold(1usize, |n, &d| n.checked_mul(d.max(1)))
        .filter(|n| *n <= isize::MAX as usize / 16)
        .map(|n| if dims.contains(&0) { 0 } else { n })
        .ok_or_else(|| c.invalid(format!("sizes {dims:?} are larger than memory")))
}
