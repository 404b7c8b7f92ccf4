//! Element-wise operators.

use super::{Row, item_row, one, row};
use crate::onnx::build::{Builder, Value};
use crate::onnx::node::Call;
use halcyon_ir::ScalarOp as S;
use halcyon_ir::{DType, Result, Scalar, Shape};

pub const ROWS: &[Row] = &[
    row("Abs", 6, &[], |b, c| map(b, c, S::Abs)),
    row("Acos", 7, &[], |b, c| map(b, c, S::Acos)),
    row("Acosh", 9, &[], |b, c| map(b, c, S::Acosh)),
    row("Add", 7, &[], |b, c| map(b, c, S::Add)),
    row("And", 7, &[], |b, c| map(b, c, S::And)),
    row("Asin", 7, &[], |b, c| map(b, c, S::Asin)),
    row("Asinh", 9, &[], |b, c| map(b, c, S::Asinh)),
    row("Atan", 7, &[], |b, c| map(b, c, S::Atan)),
    row("Atanh", 9, &[], |b, c| map(b, c, S::Atanh)),
    row("Cast", 6, &["to", "saturate", "round_mode"], cast),
    row("CastLike", 15, &["saturate", "round_mode"], cast_like),
    row("Ceil", 6, &[], |b, c| map(b, c, S::Ceil)),
    row("Clip", 6, &["min", "max"], clip),
    row("Cos", 7, &[], |b, c| map(b, c, S::Cos)),
    row("Cosh", 9, &[], |b, c| map(b, c, S::Cosh)),
    row("Div", 7, &[], |b, c| map(b, c, S::Div)),
    row("Dropout", 7, &["ratio", "seed"], dropout),
    row("Elu", 6, &["alpha"], elu),
    row("Equal", 7, &[], |b, c| map(b, c, S::Eq)),
    row("Erf", 9, &[], |b, c| map(b, c, S::Erf)),
    row("Exp", 6, &[], |b, c| map(b, c, S::Exp)),
    row("Floor", 6, &[], |b, c| map(b, c, S::Floor)),
    row("Gelu", 20, &["approximate"], gelu),
    row("Greater", 7, &[], |b, c| map(b, c, S::Gt)),
    row("GreaterOrEqual", 12, &[], |b, c| map(b, c, S::Ge)),
    row("HardSigmoid", 6, &["alpha", "beta"], hard_sigmoid),
    row("HardSwish", 14, &[], hard_swish),
    item_row("Identity", 1, &[], |_, c| Ok(vec![c.item(0)?.clone()])),
    row("IsNaN", 9, &[], |b, c| map(b, c, S::IsNan)),
    row("LeakyRelu", 6, &["alpha"], leaky_relu),
    row("Less", 7, &[], |b, c| map(b, c, S::Lt)),
    row("LessOrEqual", 12, &[], |b, c| map(b, c, S::Le)),
    row("Log", 6, &[], |b, c| map(b, c, S::Log)),
    row("Max", 6, &[], |b, c| variadic(b, c, S::Max)),
    row("Mean", 6, &[], mean),
    row("Min", 6, &[], |b, c| variadic(b, c, S::Min)),
    row("Mod", 10, &["fmod"], modulo),
    row("Mul", 7, &[], |b, c| map(b, c, S::Mul)),
    row("Neg", 6, &[], |b, c| map(b, c, S::Neg)),
    row("Not", 1, &[], |b, c| map(b, c, S::Not)),
    row("Or", 7, &[], |b, c| map(b, c, S::Or)),
    row("Pow", 7, &[], pow),
    row("PRelu", 7, &[], prelu),
    row("Reciprocal", 6, &[], |b, c| map(b, c, S::Recip)),
    row("Relu", 6, &[], |b, c| map(b, c, S::Relu)),
    row("Round", 11, &[], |b, c| map(b, c, S::Round)),
    row("Sigmoid", 6, &[], |b, c| map(b, c, S::Sigmoid)),
    row("Sign", 9, &[], |b, c| map(b, c, S::Sign)),
    row("Sin", 7, &[], |b, c| map(b, c, S::Sin)),
    row("Sinh", 9, &[], |b, c| map(b, c, S::Sinh)),
    row("Softplus", 1, &[], softplus),
    row("Sqrt", 6, &[], |b, c| map(b, c, S::Sqrt)),
    row("Sub", 7, &[], |b, c| map(b, c, S::Sub)),
    row("Sum", 6, &[], |b, c| variadic(b, c, S::Add)),
    row("Tan", 7, &[], |b, c| map(b, c, S::Tan)),
    row("Tanh", 6, &[], |b, c| map(b, c, S::Tanh)),
    row("Where", 9, &[], |b, c| map(b, c, S::Select)),
    row("Xor", 7, &[], |b, c| map(b, c, S::Xor)),
];

/// An operator that is a scalar op of ours, with NumPy broadcasting.
fn map(b: &mut Builder, c: &Call<'_>, op: S) -> Result<Vec<Value>> {
    let args = c.args()?;
    if args.len() != op.arity() {
        return Err(c.invalid(format!("takes {} operands, not {}", op.arity(), args.len())));
    }
    one(b.scalar(op, &args)?)
}

fn variadic(b: &mut Builder, c: &Call<'_>, op: S) -> Result<Vec<Value>> {
    let (first, all) = (c.arg(0)?.clone(), c.args()?);
    one(all[1..].iter().try_fold(first, |s, v| b.scalar(op, &[&s, v]))?)
}

fn mean(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let sum = variadic(b, c, S::Add)?.remove(0);
    let n = b.lit(&sum, c.inputs.len());
    one(b.scalar(S::Div, &[&sum, &n])?)
}

/// `saturate` and `round_mode` concern 8-bit floats, which are refused by type.
fn cast(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let to = c.dtype("to")?.ok_or_else(|| c.invalid("attribute 'to' is missing"))?;
    one(b.cast(c.arg(0)?, to)?)
}

fn cast_like(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    one(b.cast(c.arg(0)?, c.arg(1)?.dtype())?)
}

/// Bounds are attributes before version 11 and operands from it on. The upper bound wins where they cross.
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

/// At inference the operator passes its operand on; the mask is then all ones.
fn dropout(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let x = c.arg(0)?;
    if c.opset >= 12
        && let Some(t) = c.opt(2)
        && b.known_scalar(t, "training_mode of Dropout")?.as_bool()
    {
        return Err(c.unsupported("training mode", "Export the model for inference"));
    }
    let mut out = vec![x.clone()];
    if c.wants(1) {
        let dtype = if c.opset < 10 { x.dtype() } else { DType::Bool };
        out.push(b.full(dtype, x.shape(), Scalar::Bool(true)));
    }
    Ok(out)
}

fn gelu(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    match c.string("approximate", "none")? {
        "none" => map(b, c, S::Gelu),
        "tanh" => map(b, c, S::GeluTanh),
        other => Err(c.unsupported(&format!("approximation '{other}'"), "Known are 'none' and 'tanh'")),
    }
}

fn leaky_relu(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let x = c.arg(0)?;
    let alpha = b.lit(x, c.float("alpha", 0.01)?);
    let low = b.scalar(S::Mul, &[x, &alpha])?;
    negative(b, x, &low)
}

fn prelu(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let (x, slope) = (c.arg(0)?, c.arg(1)?);
    let low = b.scalar(S::Mul, &[x, slope])?;
    if low.shape() != x.shape() {
        return Err(c.invalid(format!("slope {} does not broadcast to {}", slope.ty, x.ty)));
    }
    negative(b, x, &low)
}

/// `alpha * (exp(x) - 1)` below zero.
fn elu(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let x = c.arg(0)?;
    let alpha = b.lit(x, c.float("alpha", 1.0)?);
    let e = b.scalar(S::Expm1, &[x])?;
    let low = b.scalar(S::Mul, &[&alpha, &e])?;
    negative(b, x, &low)
}

/// `x < 0 ? low : x`.
fn negative(b: &mut Builder, x: &Value, low: &Value) -> Result<Vec<Value>> {
    let zero = b.lit(x, 0.0);
    let below = b.scalar(S::Lt, &[x, &zero])?;
    one(b.scalar(S::Select, &[&below, low, x])?)
}

fn hard_sigmoid(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let (alpha, beta) = (c.float("alpha", 0.2)?, c.float("beta", 0.5)?);
    one(hard(b, c.arg(0)?, alpha.into(), beta.into())?)
}

fn hard_swish(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let x = c.arg(0)?;
    let h = hard(b, x, 1.0 / 6.0, 0.5)?;
    one(b.scalar(S::Mul, &[x, &h])?)
}

/// `max(0, min(1, alpha * x + beta))`.
fn hard(b: &mut Builder, x: &Value, alpha: f64, beta: f64) -> Result<Value> {
    let (k, d, zero, top) = (b.lit(x, alpha), b.lit(x, beta), b.lit(x, 0.0), b.lit(x, 1.0));
    let y = b.scalar(S::Mul, &[x, &k])?;
    let y = b.scalar(S::Add, &[&y, &d])?;
    let y = b.scalar(S::Min, &[&y, &top])?;
    b.scalar(S::Max, &[&y, &zero])
}

/// `ln(exp(x) + 1)`, as `max(x, 0) + log1p(exp(-|x|))`, which does not overflow.
fn softplus(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let x = c.arg(0)?;
    let a = b.scalar(S::Abs, &[x])?;
    let n = b.scalar(S::Neg, &[&a])?;
    let e = b.scalar(S::Exp, &[&n])?;
    let l = b.scalar(S::Log1p, &[&e])?;
    let p = b.scalar(S::Relu, &[x])?;
    one(b.scalar(S::Add, &[&p, &l])?)
}

/// `fmod` 1 takes the sign of the dividend, 0 that of the divisor.
fn modulo(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    map(b, c, if c.flag("fmod", false)? { S::Rem } else { S::Mod })
}

/// The exponent may have another type; the result has the base's.
fn pow(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let (x, e) = (c.arg(0)?, c.arg(1)?);
    let to = x.dtype();
    // An integer base with a float exponent is computed in a float type that holds it.
    let via = match (to.is_float(), e.dtype().is_float()) {
        (false, true) if to.bits() > 16 => DType::F64,
        (false, true) => DType::F32,
        _ => to,
    };
    let (x, e) = (b.cast(x, via)?, b.cast(e, via)?);
    let y = b.scalar(S::Pow, &[&x, &e])?;
    one(b.cast(&y, to)?)
}
