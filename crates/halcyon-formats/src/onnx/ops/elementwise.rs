//! Element-wise operators.

use super::cast::convert;
use super::{Row, item_row, one, row, text};
use crate::onnx::build::{Builder, Value};
use crate::onnx::node::Call;
use halcyon_ir::ScalarOp as S;
use halcyon_ir::dtype::Class;
use halcyon_ir::{DType, Dim, Result, Scalar, Shape};

/// Attributes of binary operators before opset 7.
const LEGACY: &[&str] = &["axis", "broadcast", "consumed_inputs"];

pub(super) const ROWS: &[Row] = &[
    row("Abs", 6, &[], |b, c| map(b, c, S::Abs)),
    row("Acos", 7, &[], |b, c| map(b, c, S::Acos)),
    row("Acosh", 9, &[], |b, c| map(b, c, S::Acosh)),
    row("Add", 1, LEGACY, |b, c| map(b, c, S::Add)),
    row("And", 1, LEGACY, |b, c| map(b, c, S::And)),
    row("Asin", 7, &[], |b, c| map(b, c, S::Asin)),
    row("Asinh", 9, &[], |b, c| map(b, c, S::Asinh)),
    row("Atan", 7, &[], |b, c| map(b, c, S::Atan)),
    row("Atanh", 9, &[], |b, c| map(b, c, S::Atanh)),
    item_row("Cast", 6, &["to", "saturate", "round_mode"], |b, c| {
        let to = if text::to_strings(c)? { None } else { c.dtype("to")? };
        text::cast(b, c, to, cast)
    }),
    item_row("CastLike", 15, &["saturate", "round_mode"], |b, c| {
        text::cast(b, c, c.item(1)?.tensor().map(Value::dtype), cast_like)
    }),
    row("Ceil", 6, &[], |b, c| map(b, c, S::Ceil)),
    row("Clip", 6, &["min", "max"], clip),
    row("Cos", 7, &[], |b, c| map(b, c, S::Cos)),
    row("Cosh", 9, &[], |b, c| map(b, c, S::Cosh)),
    row("Div", 1, LEGACY, |b, c| map(b, c, S::Div)),
    row("Equal", 1, LEGACY, |b, c| map(b, c, S::Eq)),
    row("Erf", 9, &[], erf),
    row("Exp", 6, &[], |b, c| map(b, c, S::Exp)),
    row("Floor", 6, &[], |b, c| map(b, c, S::Floor)),
    row("Greater", 1, LEGACY, |b, c| map(b, c, S::Gt)),
    row("GreaterOrEqual", 12, &[], |b, c| map(b, c, S::Ge)),
    row("IsInf", 10, &["detect_negative", "detect_positive"], is_inf),
    item_row("Identity", 1, &[], |_, c| Ok(vec![c.item(0)?.clone()])),
    row("IsNaN", 9, &[], |b, c| map(b, c, S::IsNan)),
    row("Less", 1, LEGACY, |b, c| map(b, c, S::Lt)),
    row("LessOrEqual", 12, &[], |b, c| map(b, c, S::Le)),
    row("Log", 6, &[], |b, c| map(b, c, S::Log)),
    row("Max", 6, &[], |b, c| variadic(b, c, S::Max)),
    row("Mean", 6, &[], mean),
    row("Min", 6, &[], |b, c| variadic(b, c, S::Min)),
    row("Mod", 10, &["fmod"], modulo),
    row("Mul", 1, LEGACY, |b, c| map(b, c, S::Mul)),
    row("Neg", 6, &[], |b, c| map(b, c, S::Neg)),
    row("Not", 1, &[], |b, c| map(b, c, S::Not)),
    row("Or", 1, LEGACY, |b, c| map(b, c, S::Or)),
    row("Pow", 1, LEGACY, pow),
    row("Reciprocal", 6, &[], |b, c| map(b, c, S::Recip)),
    row("Relu", 6, &[], |b, c| map(b, c, S::Relu)),
    row("Round", 11, &[], |b, c| map(b, c, S::Round)),
    row("Sigmoid", 6, &[], |b, c| map(b, c, S::Sigmoid)),
    row("Sign", 9, &[], |b, c| map(b, c, S::Sign)),
    row("Sin", 7, &[], |b, c| map(b, c, S::Sin)),
    row("Sinh", 9, &[], |b, c| map(b, c, S::Sinh)),
    row("Sqrt", 6, &[], |b, c| map(b, c, S::Sqrt)),
    row("Sub", 1, LEGACY, |b, c| map(b, c, S::Sub)),
    row("Sum", 6, &[], |b, c| variadic(b, c, S::Add)),
    row("Tan", 7, &[], |b, c| map(b, c, S::Tan)),
    row("Tanh", 6, &[], |b, c| map(b, c, S::Tanh)),
    row("Where", 9, &[], |b, c| map(b, c, S::Select)),
    row("Xor", 1, LEGACY, |b, c| map(b, c, S::Xor)),
];

/// An operator that maps to a scalar op, with NumPy broadcasting.
pub(super) fn map(b: &mut Builder, c: &Call<'_>, op: S) -> Result<Vec<Value>> {
    let args = c.args()?;
    if args.len() != op.arity() {
        return Err(c.invalid(format!("takes {} operands, not {}", op.arity(), args.len())));
    }
    if let [x, y] = args[..] {
        let y = second_operand(b, c, x, y)?;
        return one(b.scalar(op, &[x, &y])?);
    }
    one(b.scalar(op, &args)?)
}

/// The second operand of a binary operator. Before opset 7 it broadcasts only if `broadcast` is set. Its axes
/// are then aligned with those of the first operand from `axis` on, or with the last ones if `axis` is
/// missing.
fn second_operand(b: &mut Builder, c: &Call<'_>, x: &Value, y: &Value) -> Result<Value> {
    let (wide, axis) = (c.flag("broadcast", false)?, c.opt_int("axis")?);
    if c.opset >= 7 {
        return match wide || axis.is_some() {
            true => Err(c.invalid("the attributes 'broadcast' and 'axis' do not exist in opset 7 and later")),
            false => Ok(y.clone()),
        };
    }
    if !wide && x.shape() != y.shape() {
        return Err(
            c.invalid(format!("the shapes of {} and {} differ, and 'broadcast' is not set", x.ty, y.ty))
        );
    }
    let y = match axis {
        Some(axis) if wide => {
            let at = c.axis(axis, x.rank())?;
            let rest = (x.rank() - at).checked_sub(y.rank()).ok_or_else(|| {
                c.invalid(format!("{} does not fit into {} from axis {axis} on", y.ty, x.ty))
            })?;
            let ones = std::iter::repeat_n(Dim::from(1), rest);
            b.reshape(y, y.shape().iter().copied().chain(ones).collect::<Shape>())?
        }
        _ => y.clone(),
    };
    let fits = y.rank() <= x.rank()
        && x.shape().iter().rev().zip(y.shape().iter().rev()).all(|(d, e)| d == e || e.is(1));
    if fits { Ok(y) } else { Err(c.invalid(format!("{} does not broadcast to {}", y.ty, x.ty))) }
}

/// True for infinities of the requested signs.
fn is_inf(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let x = c.arg(0)?;
    let far = match (c.flag("detect_negative", true)?, c.flag("detect_positive", true)?) {
        (true, true) => return map(b, c, S::IsInf),
        (true, false) => f64::NEG_INFINITY,
        (false, true) => f64::INFINITY,
        (false, false) => return one(b.full(DType::Bool, x.shape(), Scalar::Bool(false))),
    };
    // Compare in the compute type, because some small float types have no infinity.
    let x = b.cast(x, x.dtype().compute())?;
    let far = b.lit(&x, far);
    one(b.scalar(S::Eq, &[&x, &far])?)
}

fn variadic(b: &mut Builder, c: &Call<'_>, op: S) -> Result<Vec<Value>> {
    let (first, all) = (c.arg(0)?.clone(), c.args()?);
    one(all[1..].iter().try_fold(first, |s, v| b.scalar(op, &[&s, v]))?)
}

fn mean(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let to = c.arg(0)?.dtype();
    let wide = if to.is_float() { to.compute() } else { to };
    let mut sum = b.cast(c.arg(0)?, wide)?;
    for v in &c.args()?[1..] {
        if v.dtype() != to {
            return Err(c.invalid(format!("operands must have one type, but have {to} and {}", v.dtype())));
        }
        let v = b.cast(v, wide)?;
        sum = b.scalar(S::Add, &[&sum, &v])?;
    }
    let n = b.lit(&sum, c.inputs.len());
    let mean = b.scalar(S::Div, &[&sum, &n])?;
    one(b.cast(&mean, to)?)
}

/// Opset 9 and later also accept integers. They are converted to f64, and the result is truncated.
fn erf(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let x = c.arg(0)?;
    if x.dtype().is_float() {
        return map(b, c, S::Erf);
    }
    let f = b.cast(x, DType::F64)?;
    let f = b.scalar(S::Erf, &[&f])?;
    one(b.cast(&f, x.dtype())?)
}

fn cast(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let to = c.dtype("to")?.ok_or_else(|| c.invalid("attribute 'to' is missing"))?;
    one(convert(b, c, c.arg(0)?, to)?)
}

fn cast_like(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    one(convert(b, c, c.arg(0)?, c.arg(1)?.dtype())?)
}

/// The bounds are attributes before opset 11, and operands from then on. If the lower bound is greater than
/// the upper one, the result is the upper bound.
fn clip(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let mut x = c.arg(0)?.clone();
    let (lo, hi) = if c.opset < 11 {
        let lit = |v: Option<f32>| v.map(|v| b.lit(&x, v));
        (lit(c.opt_float("min")?), lit(c.opt_float("max")?))
    } else {
        (c.opt(1).cloned(), c.opt(2).cloned())
    };
    for (op, bound) in [(S::Max, lo), (S::Min, hi)] {
        if let Some(v) = bound {
            if v.rank() != 0 && !(v.rank() == 1 && v.shape()[0].is(1)) {
                return Err(c.invalid(format!("a bound is a scalar, not {}", v.ty)));
            }
            let v = b.reshape(&v, Shape::scalar())?;
            x = b.scalar(op, &[&x, &v])?;
        }
    }
    one(x)
}

/// The result has the sign of the dividend if `fmod` is 1, and the sign of the divisor if it is 0.
fn modulo(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    map(b, c, if c.flag("fmod", false)? { S::Rem } else { S::Mod })
}

/// The exponent may have another type than the base; the result has the base's type.
fn pow(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let x = c.arg(0)?;
    let e = &second_operand(b, c, x, c.arg(1)?)?;
    let to = x.dtype();
    // An integer base with a float exponent is computed in a float type that holds the base exactly (64-bit
    // bases are rounded to f64). With an integer exponent that the base's type does not hold, the power is
    // computed in i64, whose low bits are those of the narrower result.
    let via = match (to.is_float(), e.dtype().is_float()) {
        (false, true) if to.bits() > 16 => DType::F64,
        (false, true) => DType::F32,
        (false, false) if e.dtype().bits() > to.bits() => DType::I64,
        (false, false) if e.dtype().class() == Class::Uint && e.dtype().bits() == to.bits() => DType::I64,
        _ => to,
    };
    let (x, e) = (b.cast(x, via)?, b.cast(e, via)?);
    let y = b.scalar(S::Pow, &[&x, &e])?;
    one(b.cast(&y, to)?)
}

#[cfg(test)]
mod tests {
    use crate::onnx::test_models::*;
    use halcyon_ir::{DType, Error};

    #[test]
    fn infinities_by_sign() {
        let x = t(&[4], &[f32::INFINITY, f32::NEG_INFINITY, f32::NAN, f32::MAX]);
        let op = |n, p| node("IsInf", &["x"], &["y"]).int("detect_negative", n).int("detect_positive", p);
        check(10, op(1, 1), &x, &[], &[4], &[1.0, 1.0, 0.0, 0.0]);
        check(20, op(0, 1), &x, &[], &[4], &[1.0, 0.0, 0.0, 0.0]);
        check(20, op(1, 0), &x, &[], &[4], &[0.0, 1.0, 0.0, 0.0]);
        check(20, op(0, 0), &x, &[], &[4], &[0.0; 4]);
    }

    #[test]
    fn powers_of_wide_exponents() {
        let x = t(&[4], &[0i32, 1, -1, 2]);
        let op = || node("Pow", &["x", "w0"], &["y"]);
        check(15, op(), &x, &[t(&[], &[1i64 << 32])], &[4], &[0.0, 1.0, 1.0, 0.0]);
        check(15, op(), &x, &[t(&[], &[(1u64 << 32) + 1])], &[4], &[0.0, 1.0, -1.0, 0.0]);
        check(15, op(), &x, &[t(&[], &[-1i8])], &[4], &[0.0, 1.0, -1.0, 0.0]);
        check(15, op(), &x, &[t(&[], &[(1u32 << 31) + 1])], &[4], &[0.0, 1.0, -1.0, 0.0]);
        check(12, op(), &t(&[2], &[4f32, 9.0]), &[t(&[], &[0.5f64])], &[2], &[2.0, 3.0]);
        check(12, op(), &t(&[2], &[2f32, -3.0]), &[t(&[], &[3u8])], &[2], &[8.0, -27.0]);
    }

    #[test]
    fn integers_and_means() {
        check(9, node("Erf", &["x"], &["y"]), &t(&[3], &[-9i8, 0, 9]), &[], &[3], &[-1.0, 0.0, 1.0]);
        let halves = vec![node("Cast", &["x"], &["h"]).int("to", 10), node("Mean", &["h", "h", "h"], &["y"])];
        // The sum exceeds the range of f16.
        let g = import(model(13, port("x", DType::F32, &["2"]), halves, &[])).unwrap().graph;
        let y = crate::onnx::reference::run(&g, &[t(&[2], &[60_000f32, 1.0])]).remove(0);
        assert_eq!((y.dtype, y.to_vec::<f64>()), (DType::F16, vec![60_000.0, 1.0]));
        let w = [t(&[2], &[1f64; 2])];
        let m = model(
            13,
            port("x", DType::F32, &["2"]),
            vec![node("Mean", &["x", "w0"], &["y"])],
            &[("w0", w[0].clone())],
        );
        assert!(matches!(import(m), Err(Error::Argument { .. })));
    }
}
