//! The trained model as ONNX.

use super::data::{Data, Target};
use super::models::Model;
use crate::onnx::write_onnx;
use halcyon::ir::error::Result;
use halcyon::{DType, Dim, Shape, Tensor};
use std::path::Path;

/// Writes the model's forward in evaluation mode. A float input is f32, and other inputs have the dtype of
/// the data. The model computes in the dtype of its parameters. If the targets are classes, the output is
/// their probabilities. The input has the name of the data's column. The batch size is a symbol; for a
/// character model it is 1. Returns the size of the file in bytes.
pub(super) fn write(model: &Model, data: &Data, path: &Path) -> Result<u64> {
    let backend = model.backend();
    let batch = match model {
        Model::Chars(_) => Dim::from(1),
        _ => Dim::sym("batch"),
    };
    let shape: Shape = std::iter::once(batch).chain(data.input.dims.iter().map(|d| Dim::from(*d))).collect();
    let dtype = if data.input.dtype.is_float() { DType::F32 } else { data.input.dtype };
    let x = Tensor::placeholder(&backend, dtype, shape);
    let y = super::answers(model, model.dtype()?, &x);
    let (name, y) = match data.target {
        Target::Classes(_) => ("probabilities", y.softmax(-1)),
        Target::Values => ("values", y),
    };
    write_onnx(model, &[(&data.input.name, &x)], &[(name, &y)], path)
}
