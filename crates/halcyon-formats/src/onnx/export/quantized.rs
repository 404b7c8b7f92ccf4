//! Exports quantisation as QuantizeLinear and DequantizeLinear. ONNX has no operator for a product with
//! weights of 4 bits, so this product becomes `MatMulNBits` of onnxruntime's operator set `com.microsoft`.

use super::emit::{Emitter, MICROSOFT, Val, int};
use halcyon_ir::composite::{Composite, CompositeKind as Kind};
use halcyon_ir::ops::quantize::{LIMIT, WEIGHT_BLOCK};
use halcyon_ir::{ConstData, DType, Error, NodeId, Op, Result, Scalar, TensorType};
use std::sync::Arc;

/// Whether the operators can express the composite: they take one scale, or a vector of scales along an axis.
pub(super) fn direct(c: &Composite, opset: i64) -> bool {
    let scale = c.body.inputs().get(1).map(|i| c.body.shape(i.node));
    // The type of the codes, which are the result of Quantize and the operand of Dequantize.
    let codes = c.dtype("dtype").or_else(|| c.body.inputs().first().map(|i| c.body.dtype(i.node)));
    match &c.kind {
        // The operators accept i16 from operator set 21 on. They cannot limit the magnitude of the codes.
        Kind::Quantize | Kind::Dequantize
            if codes == Some(DType::I16) && opset < 21 || c.int(LIMIT).is_some() =>
        {
            false
        }
        Kind::Quantize | Kind::Dequantize => scale.is_some_and(|s| match s.rank() {
            0 => true,
            1 => s[0].is(1) || c.int("axis").is_some(),
            _ => false,
        }),
        Kind::QuantizedMatmul => true,
        _ => false,
    }
}

/// QuantizeLinear or DequantizeLinear. The zero point is always written, because it determines the type of
/// QuantizeLinear's result.
pub(super) fn linear(e: &mut Emitter<'_>, c: &Composite, x: &[Val], ty: TensorType) -> Result<Val> {
    let lost = || Error::internal(format!("composite {} lacks an operand", c.kind));
    let (name, codes) = match &c.kind {
        Kind::Quantize => ("QuantizeLinear", ty.dtype),
        _ => ("DequantizeLinear", x.first().ok_or_else(lost)?.dtype()),
    };
    let scale = x.get(1).ok_or_else(lost)?.clone();
    let zero = match x.get(2) {
        Some(z) => z.clone(),
        None => {
            let dims = scale.shape().dims()?;
            e.constant("zero_point", ConstData::splat(codes, &dims, Scalar::I(0))?)
        }
    };
    let attrs = match c.int("axis") {
        Some(axis) if scale.rank() == 1 && !scale.shape()[0].is(1) => vec![int("axis", axis)],
        _ => vec![],
    };
    Ok(e.node(name, &[&x[0], &scale, &zero], attrs, ty))
}

/// The value of an operand, which must be a constant.
fn constant<'g>(e: &Emitter<'g>, id: NodeId) -> Result<&'g ConstData> {
    match &e.g.node(id).op {
        Op::Const(c) => Ok(c),
        _ => Err(Error::unsupported(
            "a product with weights of 4 bits that are computed",
            "Weights of MatMulNBits are constants",
        )),
    }
}

/// MatMulNBits: codes u8 `[n, k / 32, 16]` with two codes per byte, scales `[n k / 32]`, and zero points (see
/// [`zero_points`]).
pub(super) fn matmul(e: &mut Emitter<'_>, id: NodeId, x: &Val, ty: TensorType) -> Result<Val> {
    let inputs = e.g.node(id).inputs.clone();
    let [_, codes, scales, ..] = inputs[..] else {
        return Err(Error::internal("a product with weights of 4 bits lacks an operand"));
    };
    let (codes, scales) = (constant(e, codes)?, constant(e, scales)?);
    let (n, k) = (codes.dims[0], 2 * codes.dims[1]);
    let blocks = k / WEIGHT_BLOCK;
    let minima = match inputs.get(3) {
        Some(m) => Some(zero_points(constant(e, *m)?, scales, [n, blocks])?),
        None => None,
    };
    let codes = ConstData::new(DType::U8, &[n, blocks, WEIGHT_BLOCK / 2], codes.owner())?;
    let scales = ConstData::new(DType::F32, &[n * blocks], scales.owner())?;
    let operands: Vec<Val> = [x.clone()]
        .into_iter()
        .chain([codes, scales].into_iter().chain(minima).map(|c| e.weight(&c)))
        .collect();
    let size = |name, v: usize| int(name, v as i64);
    let attrs = vec![size("K", k), size("N", n), int("bits", 4), size("block_size", WEIGHT_BLOCK)];
    let operands: Vec<&Val> = operands.iter().collect();
    Ok(e.node_in(MICROSOFT, "MatMulNBits", &operands, attrs, ty))
}

/// Converts minima to zero points, where `minimum = -zero * scale`. If all zero points are whole numbers from
/// 0 to 15 (within 0.001), two are packed per byte, u8 `[n ⌈k / 64⌉]`; else they are f32 `[n k / 32]`.
fn zero_points(minima: &ConstData, scales: &ConstData, [n, blocks]: [usize; 2]) -> Result<ConstData> {
    let (m, s) = (minima.to_vec::<f32>(), scales.to_vec::<f32>());
    if m.iter().zip(&s).any(|(m, s)| *s == 0.0 && *m != 0.0) {
        return Err(Error::unsupported(
            "a block of 4-bit weights with the scale 0 and a minimum that is not 0, in ONNX",
            "Give the block a scale; the operator MatMulNBits multiplies its zero point by it",
        ));
    }
    let zeros: Vec<f32> = m.iter().zip(&s).map(|(m, s)| if *s == 0.0 { 0.0 } else { -m / s }).collect();
    let whole = |z: &f32| (z - z.round()).abs() < 1e-3 && (-0.5..15.5).contains(z);
    if !zeros.iter().all(whole) {
        return ConstData::from_slice(&[n * blocks], &zeros);
    }
    let row = blocks.div_ceil(2);
    let mut packed = vec![0u8; n * row];
    for (i, z) in zeros.iter().enumerate() {
        let (column, b) = (i / blocks, i % blocks);
        packed[column * row + b / 2] |= (z.round() as u8) << (4 * (b % 2));
    }
    ConstData::new(DType::U8, &[n * row], Arc::new(packed))
}

#[cfg(test)]
#[path = "quantized_tests.rs"]
mod tests;
