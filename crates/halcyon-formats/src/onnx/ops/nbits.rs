//! MatMulNBits, onnxruntime's product with weights of 4 bits in blocks. It is an operator of the set
//! `com.microsoft`; the other operators of that set are not supported.

use super::{Row, one, row_in};
use crate::onnx::build::{Builder, Value};
use crate::onnx::node::Call;
use halcyon_ir::ScalarOp as S;
use halcyon_ir::ops::quantize::WEIGHT_BLOCK;
use halcyon_ir::{DType, Dim, Result, Shape};

pub(super) const ROWS: &[Row] =
    &[row_in("com.microsoft", "MatMulNBits", 1, &["K", "N", "accuracy_level", "bits", "block_size"], matmul)];

/// The sizes of a node: `k`, `n`, blocks per column, and how often a scale is repeated so that every 32
/// weights have one.
struct Sizes {
    k: usize,
    n: usize,
    blocks: usize,
    repeat: usize,
}

fn sizes(c: &Call<'_>) -> Result<Sizes> {
    let positive = |name: &str| -> Result<usize> {
        let v = c.int(name, 0)?;
        usize::try_from(v)
            .ok()
            .filter(|v| *v > 0 && *v <= 1 << 31)
            .ok_or_else(|| c.invalid(format!("{name} is {v}, expected a positive number")))
    };
    let (k, n, block) = (positive("K")?, positive("N")?, positive("block_size")?);
    let bits = c.int("bits", 4)?;
    if bits != 4 {
        return Err(c.unsupported(&format!("weights of {bits} bits"), "Weights of 4 bits are supported"));
    }
    if !block.is_multiple_of(WEIGHT_BLOCK) || !k.is_multiple_of(block) {
        let what = format!("blocks of {block} weights for {k} rows");
        return Err(c.unsupported(&what, "Blocks are multiples of 32 that divide the number of rows"));
    }
    Ok(Sizes { k, n, blocks: k / block, repeat: block / WEIGHT_BLOCK })
}

/// `v` has one element for each block, `[n, blocks]`. Repeats it, so that the result has one element for
/// every 32 weights.
fn repeated(b: &mut Builder, v: &Value, s: &Sizes) -> Result<Value> {
    let v = b.reshape(v, dims(&[s.n, s.blocks, 1]))?;
    let v = b.expand(&v, &dims(&[s.n, s.blocks, s.repeat]))?;
    b.reshape(&v, dims(&[s.n, s.blocks * s.repeat]))
}

fn dims(d: &[usize]) -> Shape {
    d.iter().map(|n| Dim::from(*n)).collect()
}

/// Returns the zero points `[n, blocks]` in f32. The operand `z` has two per byte, or floats.
fn zero_points(b: &mut Builder, c: &Call<'_>, z: &Value, s: &Sizes) -> Result<Value> {
    if z.dtype().is_float() {
        if !z.shape().numel().is(s.n * s.blocks) {
            return Err(c.invalid(format!("zero points are {}, expected {} elements", z.ty, s.n * s.blocks)));
        }
        let z = b.reshape(z, dims(&[s.n, s.blocks]))?;
        return b.cast(&z, DType::F32);
    }
    let row = s.blocks.div_ceil(2);
    if z.dtype() != DType::U8 || !z.shape().numel().is(s.n * row) {
        return Err(c.invalid(format!("zero points are {}, expected {} bytes", z.ty, s.n * row)));
    }
    let z = b.reshape(z, dims(&[s.n, row, 1]))?;
    let (mask, four) = (b.lit(&z, 15), b.lit(&z, 4));
    let low = b.scalar(S::And, &[&z, &mask])?;
    let high = b.scalar(S::Shr, &[&z, &four])?;
    let z = b.concat(&[&low, &high], 2)?;
    let z = b.reshape(&z, dims(&[s.n, 2 * row]))?;
    let z = b.narrow(&z, 1, Dim::from(0), Dim::from(s.blocks))?;
    b.cast(&z, DType::F32)
}

/// `x` times the transpose of the weights `(code - zero) * scale`; the zero point is 8 if none is given.
fn matmul(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let (x, codes, scales) = (c.arg(0)?, c.arg(1)?, c.arg(2)?);
    let s = sizes(c)?;
    if c.opt(4).is_some() {
        return Err(c.unsupported("a group index (g_idx)", "Export the model without reordered weights"));
    }
    let out = x.dtype();
    if !out.is_float() || !out.is_native() {
        return Err(c.invalid(format!("the operand is {}, expected floats", x.ty)));
    }
    if codes.dtype() != DType::U8 || !codes.shape().numel().is(s.n * s.k / 2) {
        return Err(c.invalid(format!("the weights are {}, expected {} bytes", codes.ty, s.n * s.k / 2)));
    }
    if !scales.shape().numel().is(s.n * s.blocks) || !scales.dtype().is_float() {
        return Err(c.invalid(format!("the scales are {}, expected {} floats", scales.ty, s.n * s.blocks)));
    }
    let codes = b.reshape(codes, dims(&[s.n, s.k / 2]))?;
    let own = b.cast(scales, DType::F32)?;
    let own = b.reshape(&own, dims(&[s.n, s.blocks]))?;
    let minima = match c.opt(3) {
        Some(z) => {
            let z = zero_points(b, c, z, &s)?;
            let m = b.scalar(S::Mul, &[&z, &own])?;
            let m = b.scalar(S::Neg, &[&m])?;
            Some(repeated(b, &m, &s)?)
        }
        None => None,
    };
    let own = repeated(b, &own, &s)?;
    let wide = b.cast(x, DType::F32)?;
    let ids = [b.id(&wide)?, b.id(&codes)?, b.id(&own)?];
    let minima = minima.map(|m| b.id(&m)).transpose()?;
    let y = b.g.quantized_matmul(ids[0], ids[1], ids[2], minima)?;
    let mut y = b.value(y);
    if let Some(bias) = c.opt(5) {
        let bias = b.cast(bias, DType::F32)?;
        y = b.scalar(S::Add, &[&y, &bias])?;
    }
    one(b.cast(&y, out)?)
}
