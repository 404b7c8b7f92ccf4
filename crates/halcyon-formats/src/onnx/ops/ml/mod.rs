//! Domain `ai.onnx.ml`: features, labels, linear models, support vectors, tree ensembles.
//!
//! Where the specification leaves results open (the columns and the label for a single score of two classes),
//! they follow ONNX Runtime's CPU provider, against which converted models are tested.

pub(super) mod feature;
mod forest;
pub(super) mod label;
pub(super) mod linear;
pub(super) mod map;
mod post;
pub(super) mod svm;
#[cfg(test)]
mod tests;
pub(super) mod tree;

use crate::data;
use crate::onnx::build::{Builder, Value};
use crate::onnx::node::Call;
use halcyon_ir::{DType, Dim, Result, Scalar, Shape};

const DOMAIN: &str = "ai.onnx.ml";

/// The operand as a float matrix `[N, F]`: f64 stays, all other dtypes become f32. A vector is one row.
fn matrix(b: &mut Builder, c: &Call<'_>, x: &Value) -> Result<Value> {
    let x = float(b, x)?;
    match x.rank() {
        1 => b.reshape(&x, [Dim::from(1), x.shape()[0]]),
        2 => Ok(x),
        r => Err(c.invalid(format!("the features have rank {r}, expected a vector or a matrix"))),
    }
}

/// Keeps f64 and casts every other dtype to f32.
fn float(b: &mut Builder, x: &Value) -> Result<Value> {
    if x.dtype() == DType::F64 { Ok(x.clone()) } else { b.cast(x, DType::F32) }
}

/// Numbers of an attribute as a constant.
fn floats(dtype: DType, dims: &[usize], v: &[f32]) -> Result<Value> {
    let v = v.iter().map(|&v| Scalar::F(v.into()));
    Ok(Value::table(data::from_scalars(dtype, dims, v)?))
}

/// Like [`floats`], for integers.
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

/// Stacks vectors `[N]` as columns.
fn columns(b: &mut Builder, v: &[&Value]) -> Result<Value> {
    let mut wide = Vec::with_capacity(v.len());
    for x in v {
        wide.push(b.reshape(x, Shape::from_iter([x.shape()[0], Dim::from(1)]))?);
    }
    b.concat(&wide.iter().collect::<Vec<_>>(), 1)
}

/// The index (i64) of the largest element of each row; the first index if several elements are equal.
fn best(b: &mut Builder, x: &Value) -> Result<Value> {
    let id = b.id(x)?;
    let n = b.g.argreduce(true, id, 1, false, false)?;
    Ok(b.value(n))
}
