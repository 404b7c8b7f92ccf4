//! Quantisation: `q = saturate(round(x / scale) + zero)` and back, `x = (q - zero) * scale`.

use super::{Row, one, row};
use crate::onnx::build::{Builder, Value};
use crate::onnx::host::{Host, Num};
use crate::onnx::node::Call;
use halcyon_ir::ScalarOp as S;
use halcyon_ir::ops::ReduceKind;
use halcyon_ir::{DType, Dim, Result, Shape};

pub(super) const ROWS: &[Row] = &[
    row("DequantizeLinear", 10, &["axis", "block_size", "output_dtype"], dequantize),
    row("DynamicQuantizeLinear", 11, &[], dynamic),
    row("QuantizeLinear", 10, &["axis", "block_size", "output_dtype", "precision", "saturate"], quantize),
];

/// A dtype attribute; 0 means none.
fn dtype(c: &Call<'_>, name: &str) -> Result<Option<DType>> {
    if c.int(name, 0)? == 0 { Ok(None) } else { c.dtype(name) }
}

/// Reshapes a scale or zero point so that it broadcasts to `x`. It has one element, one per index of an axis,
/// or one per block of an axis.
fn broadcast_scale(b: &mut Builder, c: &Call<'_>, v: &Value, x: &Value) -> Result<Value> {
    if v.shape().numel().is(1) {
        return b.reshape(v, Shape::scalar());
    }
    let block = c.int("block_size", 0)?;
    let block = usize::try_from(block)
        .map_err(|_| c.invalid(format!("block_size is {block}, expected at least 0")))?;
    let axis = if x.rank() == 1 { 0 } else { c.axis(c.int("axis", 1)?, x.rank())? };
    let n = x.shape()[axis];
    if block == 0 {
        if v.rank() != 1 || v.shape()[0] != n {
            return Err(c.invalid(format!(
                "scale is {} for axis {axis} of {}, expected a vector of {n}",
                v.ty, x.ty
            )));
        }
        let mut s = vec![Dim::from(1); x.rank()];
        s[axis] = n;
        return b.reshape(v, s);
    }
    let same = v.rank() == x.rank() && (0..x.rank()).all(|k| k == axis || v.shape()[k] == x.shape()[k]);
    let bad = || {
        c.invalid(format!(
            "scale {} must have one element per block of {block} on axis {axis} of {}",
            v.ty, x.ty
        ))
    };
    if !same {
        return Err(bad());
    }
    let (Some(n), Some(parts)) = (n.known(), v.shape()[axis].known()) else {
        return Err(c.unsupported("blocks of a symbolic size", "Give concrete input shapes"));
    };
    if n.div_ceil(block) != parts {
        return Err(bad());
    }
    // Repeats each scale along a new axis by the block length, merges the axes and crops. All of these are
    // views.
    let block = block.min(n.max(1));
    let mut s = v.shape().to_vec();
    s.insert(axis + 1, Dim::from(1));
    let y = b.reshape(v, s.clone())?;
    s[axis + 1] = Dim::from(block);
    let y = b.expand(&y, &Shape::from(&s[..]))?;
    s.remove(axis + 1);
    s[axis] = Dim::from(parts * block);
    let y = b.reshape(&y, s)?;
    b.narrow(&y, axis, Dim::from(0), Dim::from(n))
}

fn check_zero(c: &Call<'_>, zero: Option<&Value>, scale: &Value, want: DType) -> Result<()> {
    match zero {
        Some(z) if z.dtype() != want => {
            Err(c.invalid(format!("the zero point is {}, not {want}", z.dtype())))
        }
        Some(z)
            if z.shape() != scale.shape() && !(z.shape().numel().is(1) && scale.shape().numel().is(1)) =>
        {
            Err(c.invalid(format!("zero point {} and scale {} differ in shape", z.ty, scale.ty)))
        }
        _ => Ok(()),
    }
}

/// The division is computed in the scale's dtype, or in `precision`. Rounds to nearest, ties to even.
fn quantize(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let (x, scale, zero) = (c.arg(0)?, c.arg(1)?, c.opt(2));
    let asked = dtype(c, "output_dtype")?;
    let to = asked.or(zero.map(|z| z.dtype())).unwrap_or(DType::U8);
    if !(to.is_int() && to.bits() <= 16 || !to.is_native() && to != DType::F8E8M0) {
        return Err(c.invalid(format!("quantisation to {to} is not defined")));
    }
    check_zero(c, zero, scale, to)?;
    let via = match dtype(c, "precision")? {
        Some(d) if d.is_float() && d.is_native() => d,
        Some(d) => return Err(c.invalid(format!("precision is {d}, expected f16, bf16, f32 or f64"))),
        // There is no arithmetic in f8e8m0, the type of scales that are powers of two.
        None if scale.dtype() == DType::F8E8M0 => {
            if x.dtype().is_float() {
                x.dtype()
            } else {
                DType::F32
            }
        }
        None if scale.dtype().is_float() => scale.dtype(),
        // f64 quotients of integers are exact enough to round correctly.
        None => DType::F64,
    };
    // The operands and the quotient are rounded to `via`. Everything else is computed in the type that `via`
    // is computed in, so that the sum with the zero point is not rounded to a half type.
    let (wide, scale) = (b.cast(x, via)?, b.cast(scale, via)?);
    let (wide, scale) = (b.cast(&wide, via.compute())?, b.cast(&scale, via.compute())?);
    let scale = broadcast_scale(b, c, &scale, x)?;
    let q = b.scalar(S::Div, &[&wide, &scale])?;
    let q = b.cast(&q, via)?;
    let mut q = b.cast(&q, via.compute())?;
    if to.is_int() {
        q = b.scalar(S::Round, &[&q])?;
    }
    if let Some(z) = zero {
        // This sum is exact, unless it is so large that the result saturates.
        let z = b.cast(z, q.dtype())?;
        let z = broadcast_scale(b, c, &z, x)?;
        q = b.scalar(S::Add, &[&q, &z])?;
    }
    if !c.flag("saturate", true)? && !to.is_int() {
        return one(b.cast(&q, to)?);
    }
    let id = b.id(&q)?;
    let y = b.g.cast_saturating(id, to)?;
    one(b.value(y))
}

/// Computed in f32 (in f64, if the result is f64) and rounded once to the result's dtype.
fn dequantize(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let (x, scale, zero) = (c.arg(0)?, c.arg(1)?, c.opt(2));
    let to = dtype(c, "output_dtype")?.unwrap_or(scale.dtype());
    if !to.is_float() || !to.is_native() || !scale.dtype().is_float() {
        return Err(
            c.invalid(format!("dequantisation with a scale of {} to {to} is not defined", scale.dtype()))
        );
    }
    check_zero(c, zero, scale, x.dtype())?;
    if let Some(y) = weights(b, c, to)? {
        return one(y);
    }
    let via = to.compute();
    let mut y = x.clone();
    if let Some(z) = zero {
        // Differences of 8- and 16-bit integers are exact in i32.
        let wide = if x.dtype().is_float() { via } else { DType::I32 };
        let (wide, z) = (b.cast(&y, wide)?, b.cast(z, wide)?);
        let z = broadcast_scale(b, c, &z, x)?;
        y = b.scalar(S::Sub, &[&wide, &z])?;
    }
    let y = b.cast(&y, via)?;
    let scale = b.cast(scale, via)?;
    let scale = broadcast_scale(b, c, &scale, x)?;
    let y = b.scalar(S::Mul, &[&y, &scale])?;
    one(b.cast(&y, to)?)
}

/// Constants of integers with at least this many elements stay integers.
const WEIGHTS: usize = 1024;

/// Large constants of i8, u8 or i16 as a composite, which the builder does not fold, so that kernels can
/// multiply the integers. `None` for other operands.
fn weights(b: &mut Builder, c: &Call<'_>, to: DType) -> Result<Option<Value>> {
    let (x, scale, zero) = (c.arg(0)?, c.arg(1)?, c.opt(2));
    let integers = matches!(x.dtype(), DType::I8 | DType::U8 | DType::I16) && x.is_constant();
    let large = x.shape().numel().known().is_some_and(|n| n >= WEIGHTS);
    let vector = scale.shape().numel().is(1) || scale.rank() == 1;
    if !integers || !large || !vector || c.int("block_size", 0)? != 0 {
        return Ok(None);
    }
    if [scale.dtype(), to] != [DType::F32; 2] {
        return Ok(None);
    }
    // Checks the shapes.
    broadcast_scale(b, c, scale, x)?;
    let axis = match scale.shape().numel().is(1) || x.rank() == 1 {
        true => Some(0),
        false => Some(c.axis(c.int("axis", 1)?, x.rank())?),
    };
    let (x, scale) = (b.id(x)?, b.id(scale)?);
    let zero = zero.map(|z| b.id(z)).transpose()?;
    let y = b.g.dequantize(x, scale, zero, axis)?;
    Ok(Some(b.value(y)))
}

/// Quantises to u8. Scale and zero point map the operand's range, extended to include 0, to the range of u8.
fn dynamic(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let x = c.arg(0)?;
    if x.dtype() != DType::F32 {
        return Err(c.invalid(format!("the input is {}, expected f32", x.ty)));
    }
    let axes: Vec<usize> = (0..x.rank()).collect();
    let lit =
        |v: f64| -> Value { Host { dtype: DType::F32, dims: vec![], vals: vec![Num::Is(v.into())] }.into() };
    let (zero, steps) = (lit(0.0), lit(255.0));
    let top = b.reduce(ReduceKind::Max, x, &axes, false)?;
    let low = b.reduce(ReduceKind::Min, x, &axes, false)?;
    let (top, low) = (b.scalar(S::Max, &[&top, &zero])?, b.scalar(S::Min, &[&low, &zero])?);
    let span = b.scalar(S::Sub, &[&top, &low])?;
    let scale = b.scalar(S::Div, &[&span, &steps])?;
    // An operand of zeros has an empty range, for which any scale is correct.
    let flat = b.scalar(S::Eq, &[&span, &zero])?;
    let scale = b.scalar(S::Select, &[&flat, &lit(1.0), &scale])?;
    let at = b.scalar(S::Div, &[&low, &scale])?;
    let at = b.scalar(S::Sub, &[&zero, &at])?;
    let at = b.scalar(S::Max, &[&at, &zero])?;
    let at = b.scalar(S::Min, &[&at, &steps])?;
    let at = b.scalar(S::Round, &[&at])?;
    let q = b.scalar(S::Div, &[x, &scale])?;
    let q = b.scalar(S::Round, &[&q])?;
    let q = b.scalar(S::Add, &[&q, &at])?;
    Ok(vec![b.cast(&q, DType::U8)?, scale, b.cast(&at, DType::U8)?])
}
