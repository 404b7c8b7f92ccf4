//! Domain `ai.onnx.ml`: features, labels, linear models, support vectors, tree ensembles.
//!
//! Where the specification leaves results open (which columns a single score of two classes becomes, which
//! label it gives), they are those of ONNX Runtime's CPU provider, so that converted models give what they
//! were tested with.

pub mod feature;
mod forest;
pub mod label;
pub mod linear;
pub mod map;
mod post;
pub mod svm;
#[cfg(test)]
mod tests;
pub mod tree;

use crate::data;
use crate::onnx::build::{Builder, Value};
use crate::onnx::node::Call;
use halcyon_ir::{DType, Dim, Result, Scalar, Shape};

const DOMAIN: &str = "ai.onnx.ml";

/// The operand as a matrix `[N, F]` of floats: f64 stays, everything else becomes f32. A vector counts as one
/// row.
fn matrix(b: &mut Builder, c: &Call<'_>, x: &Value) -> Result<Value> {
    let x = float(b, x)?;
    match x.rank() {
        1 => b.reshape(&x, [Dim::from(1), x.shape()[0]]),
        2 => Ok(x),
        r => Err(c.invalid(format!("the features are a vector or a matrix, not of rank {r}"))),
    }
}

/// f64 as it is, anything else as f32.
fn float(b: &mut Builder, x: &Value) -> Result<Value> {
    if x.dtype() == DType::F64 { Ok(x.clone()) } else { b.cast(x, DType::F32) }
}

/// Numbers of an attribute as a constant.
fn floats(dtype: DType, dims: &[usize], v: &[f32]) -> Result<Value> {
    let v = v.iter().map(|&v| Scalar::F(v.into()));
    Ok(Value::table(data::from_scalars(dtype, dims, v)?))
}

/// As [`floats`], of integers.
fn integers(dtype: DType, dims: &[usize], v: impl IntoIterator<Item = i64>) -> Result<Value> {
    Ok(Value::table(data::from_scalars(dtype, dims, v.into_iter().map(Scalar::I))?))
}

/// `x` of `[N, F]` times the transpose of `w` of `[K, F]`.
fn product(b: &mut Builder, x: &Value, w: &Value) -> Result<Value> {
    let w = b.permute(w, &[1, 0])?;
    let ids = b.ids(&[x, &w])?;
    let n = b.g.matmul(ids[0], ids[1])?;
    Ok(b.value(n))
}

/// Columns of equal length `[N]` beside each other.
fn columns(b: &mut Builder, v: &[&Value]) -> Result<Value> {
    let mut wide = Vec::with_capacity(v.len());
    for x in v {
        wide.push(b.reshape(x, Shape::from_iter([x.shape()[0], Dim::from(1)]))?);
    }
    b.concat(&wide.iter().collect::<Vec<_>>(), 1)
}

/// The place of the largest of each row, the first of equals, as i64.
fn best(b: &mut Builder, x: &Value) -> Result<Value> {
    let id = b.id(x)?;
    let n = b.g.argreduce(true, id, 1, false, false)?;
    Ok(b.value(n))
}
