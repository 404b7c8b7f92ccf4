//! Exports composites for which ONNX has an operator of the same definition.

use super::emit::{Emitter, Val, float, int};
use super::quantized;
use halcyon_ir::composite::{Composite, CompositeKind as Kind};
use halcyon_ir::{DType, Error, Result, Shape, TensorType};

/// Whether an operator of this operator set can express the composite. Other composites are written as their
/// bodies.
pub(super) fn direct(c: &Composite, opset: i64) -> bool {
    let inputs = c.body.inputs();
    let shape = |k: usize| inputs.get(k).map(|i| c.body.shape(i.node));
    let d = inputs.first().map(|i| c.body.dtype(i.node));
    match &c.kind {
        Kind::Softmax | Kind::LogSoftmax => true,
        Kind::Quantize | Kind::Dequantize | Kind::QuantizedMatmul => quantized::direct(c, opset),
        // These operators compute statistics in f32 and have f32 attributes, which is less precise than f64.
        Kind::BatchNorm | Kind::LayerNorm | Kind::RmsNorm if d == Some(DType::F64) => false,
        Kind::BatchNorm => true,
        Kind::LayerNorm => {
            let Some(axis) = c.int("axis").and_then(|a| usize::try_from(a).ok()) else { return false };
            let Some(rest) = shape(0).and_then(|s| s.get(axis..)) else { return false };
            (1..inputs.len()).all(|k| shape(k).is_some_and(|s| **s == *rest))
        }
        Kind::RmsNorm => {
            opset >= 23
                && matches!((shape(0), shape(1)), (Some(x), Some(s)) if s.rank() == 1 && x.last() == s.last())
        }
        Kind::Attention if opset < 23 || d == Some(DType::F64) => false,
        // Without a cache, the operator's causal mask is aligned to the first key, Halcyon's to the last.
        Kind::Attention => {
            let (q, k, v) = (shape(0), shape(1), shape(2));
            let four = |s: Option<&Shape>| s.is_some_and(|s| s.rank() == 4);
            let square = q.and_then(|s| s.get(2)) == k.and_then(|s| s.get(2));
            let mask = shape(3).is_none_or(|s| s.rank() >= 2);
            four(q) && four(k) && four(v) && (square || !c.flag("causal")) && mask
        }
        _ => false,
    }
}

/// Writes the operator for a composite for which [`direct`] is true, except a product with quantised weights,
/// which [`quantized::matmul`] writes.
pub(super) fn node(e: &mut Emitter<'_>, c: &Composite, x: &[Val], ty: TensorType) -> Result<Val> {
    let lost = || Error::internal(format!("composite {} lacks an attribute", c.kind));
    let axis = || c.int("axis").map(|a| int("axis", a)).ok_or_else(lost);
    let eps = || c.float("eps").map(|v| float("epsilon", v)).ok_or_else(lost);
    if matches!(c.kind, Kind::Quantize | Kind::Dequantize) {
        return quantized::linear(e, c, x, ty);
    }
    let mut operands = x.to_vec();
    let (op, attrs) = match &c.kind {
        Kind::Softmax => ("Softmax", vec![axis()?]),
        Kind::LogSoftmax => ("LogSoftmax", vec![axis()?]),
        Kind::LayerNorm => ("LayerNormalization", vec![axis()?, eps()?]),
        Kind::RmsNorm => ("RMSNormalization", vec![int("axis", -1), eps()?]),
        Kind::BatchNorm => ("BatchNormalization", vec![eps()?]),
        Kind::Attention => {
            let scale = c.float("scale").ok_or_else(lost)?;
            // Other software does not broadcast the last two axes of the mask.
            if let Some(mask) = x.get(3) {
                let mut s = mask.shape().clone();
                let r = s.rank();
                (s.0[r - 2], s.0[r - 1]) = (x[0].shape()[2], x[1].shape()[2]);
                operands[3] = e.expand(mask, &s)?;
            }
            ("Attention", vec![float("scale", scale), int("is_causal", c.flag("causal").into())])
        }
        other => return Err(Error::internal(format!("composite {other} has no operator"))),
    };
    Ok(e.node(op, &operands.iter().collect::<Vec<_>>(), attrs, ty))
}
