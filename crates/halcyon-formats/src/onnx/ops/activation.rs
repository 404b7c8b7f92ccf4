//! Activation functions.

use super::{Row, one, row};
use crate::onnx::build::{Builder, Value};
use crate::onnx::node::Call;
use halcyon_ir::ScalarOp as S;
use halcyon_ir::{DType, Dim, Graph, NodeId, Result, Shape};

pub(super) const ROWS: &[Row] = &[
    row("Celu", 12, &["alpha"], celu),
    row("Elu", 1, &["alpha", "consumed_inputs"], elu),
    row("Gelu", 20, &["approximate"], gelu),
    row("HardSigmoid", 1, &["alpha", "beta", "consumed_inputs"], hard_sigmoid),
    row("HardSwish", 14, &[], hard_swish),
    row("Hardmax", 1, &["axis"], hardmax),
    row("LeakyRelu", 1, &["alpha", "consumed_inputs"], leaky_relu),
    row("LogSoftmax", 1, &["axis"], |b, c| rows(b, c, |b, x, k| whole(b, x, k, Graph::log_softmax))),
    row("Mish", 18, &[], mish),
    row("PRelu", 1, &["consumed_inputs"], prelu),
    row("Selu", 1, &["alpha", "consumed_inputs", "gamma"], selu),
    row("Shrink", 9, &["bias", "lambd"], shrink),
    row("Softmax", 1, &["axis"], |b, c| rows(b, c, |b, x, k| whole(b, x, k, Graph::softmax))),
    row("Softplus", 1, &[], |b, c| one(softplus(b, c.arg(0)?)?)),
    row("Softsign", 1, &[], softsign),
    row("SwiGLU", 28, &["alpha"], swiglu),
    row("Swish", 24, &["alpha"], |b, c| one(swish(b, c, c.arg(0)?)?)),
    row("ThresholdedRelu", 1, &["alpha"], thresholded_relu),
];

/// `x < 0 ? low : x`.
fn negative(b: &mut Builder, x: &Value, low: &Value) -> Result<Vec<Value>> {
    let zero = b.lit(x, 0.0);
    let below = b.scalar(S::Lt, &[x, &zero])?;
    one(b.scalar(S::Select, &[&below, low, x])?)
}

/// `factor * (exp(x) - 1)`.
fn exponential(b: &mut Builder, x: &Value, factor: f64) -> Result<Value> {
    let e = b.scalar(S::Expm1, &[x])?;
    let k = b.lit(x, factor);
    b.scalar(S::Mul, &[&k, &e])
}

/// `alpha * (exp(x / alpha) - 1)` for `x < 0`, else `x`.
fn celu(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let (x, alpha) = (c.arg(0)?, c.float("alpha", 1.0)?);
    let k = b.lit(x, alpha);
    let y = b.scalar(S::Div, &[x, &k])?;
    let low = exponential(b, &y, alpha.into())?;
    negative(b, x, &low)
}

/// `alpha * (exp(x) - 1)` for `x < 0`, else `x`.
fn elu(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let x = c.arg(0)?;
    let low = exponential(b, x, c.float("alpha", 1.0)?.into())?;
    negative(b, x, &low)
}

/// [`elu`] times `gamma`.
fn selu(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let x = c.arg(0)?;
    let (alpha, gamma) = if c.opset < 6 { (1.6732, 1.0507) } else { (1.673_263_2, 1.050_701) };
    let gamma = b.lit(x, c.float("gamma", gamma)?);
    let low = exponential(b, x, c.float("alpha", alpha)?.into())?;
    let y = negative(b, x, &low)?.remove(0);
    one(b.scalar(S::Mul, &[&gamma, &y])?)
}

fn gelu(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let op = match c.string("approximate", "none")? {
        "none" => S::Gelu,
        "tanh" => S::GeluTanh,
        other => return Err(c.invalid(format!("approximate is '{other}', expected 'none' or 'tanh'"))),
    };
    one(b.scalar(op, &[c.arg(0)?])?)
}

fn leaky_relu(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let x = c.arg(0)?;
    let alpha = b.lit(x, c.float("alpha", 0.01)?);
    let low = b.scalar(S::Mul, &[x, &alpha])?;
    negative(b, x, &low)
}

/// The slope broadcasts to the input. Before opset 7, it is one number, or has one number per channel.
fn prelu(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let (x, slope) = (c.arg(0)?, c.arg(1)?);
    let mut slope = slope.clone();
    if c.opset < 7 && slope.rank() == 1 && !slope.shape()[0].is(1) && x.rank() > 1 {
        slope = super::nn::channels(b, c, &slope, x.rank())?;
    }
    let low = b.scalar(S::Mul, &[x, &slope])?;
    if low.shape() != x.shape() {
        return Err(c.invalid(format!("slope {} does not broadcast to {}", slope.ty, x.ty)));
    }
    negative(b, x, &low)
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
pub(super) fn hard(b: &mut Builder, x: &Value, alpha: f64, beta: f64) -> Result<Value> {
    let (k, d, zero, top) = (b.lit(x, alpha), b.lit(x, beta), b.lit(x, 0.0), b.lit(x, 1.0));
    let y = b.scalar(S::Mul, &[x, &k])?;
    let y = b.scalar(S::Add, &[&y, &d])?;
    let y = b.scalar(S::Min, &[&y, &top])?;
    b.scalar(S::Max, &[&y, &zero])
}

/// `ln(exp(x) + 1)`, as `max(x, 0) + log1p(exp(-|x|))`, which does not overflow.
fn softplus(b: &mut Builder, x: &Value) -> Result<Value> {
    let a = b.scalar(S::Abs, &[x])?;
    let n = b.scalar(S::Neg, &[&a])?;
    let e = b.scalar(S::Exp, &[&n])?;
    let l = b.scalar(S::Log1p, &[&e])?;
    let p = b.scalar(S::Relu, &[x])?;
    b.scalar(S::Add, &[&p, &l])
}

/// `x * tanh(softplus(x))`.
fn mish(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let x = c.arg(0)?;
    let s = softplus(b, x)?;
    let t = b.scalar(S::Tanh, &[&s])?;
    one(b.scalar(S::Mul, &[x, &t])?)
}

/// `x / (1 + |x|)`.
fn softsign(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let x = c.arg(0)?;
    let (a, k) = (b.scalar(S::Abs, &[x])?, b.lit(x, 1.0));
    let d = b.scalar(S::Add, &[&k, &a])?;
    one(b.scalar(S::Div, &[x, &d])?)
}

/// `x - bias` above `lambd`, `x + bias` below `-lambd`, else zero. Integers are computed in a float type that
/// represents them exactly, except 64-bit integers, which are rounded to f64.
fn shrink(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let x = c.arg(0)?;
    let (bias, lambd) = (c.float("bias", 0.0)?, c.float("lambd", 0.5)?);
    let to = x.dtype();
    let via = match to {
        d if d.is_float() => d,
        d if d.bits() > 16 => DType::F64,
        _ => DType::F32,
    };
    let x = b.cast(x, via)?;
    let (hi, lo, bias, zero) = (b.lit(&x, lambd), b.lit(&x, -lambd), b.lit(&x, bias), b.lit(&x, 0.0));
    let (above, below) = (b.scalar(S::Gt, &[&x, &hi])?, b.scalar(S::Lt, &[&x, &lo])?);
    let (less, more) = (b.scalar(S::Sub, &[&x, &bias])?, b.scalar(S::Add, &[&x, &bias])?);
    let y = b.scalar(S::Select, &[&above, &less, &zero])?;
    let y = b.scalar(S::Select, &[&below, &more, &y])?;
    one(b.cast(&y, to)?)
}

/// `x * sigmoid(alpha * x)`.
fn swish(b: &mut Builder, c: &Call<'_>, x: &Value) -> Result<Value> {
    let alpha = c.float("alpha", 1.0)?;
    if alpha == 1.0 {
        return b.scalar(S::Silu, &[x]);
    }
    let k = b.lit(x, alpha);
    let s = b.scalar(S::Mul, &[&k, x])?;
    let s = b.scalar(S::Sigmoid, &[&s])?;
    b.scalar(S::Mul, &[x, &s])
}

/// `swish(gate) * value` (Shazeer, "GLU variants improve transformer", 2020).
fn swiglu(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let (gate, value) = (c.arg(0)?, c.arg(1)?);
    if gate.ty != value.ty {
        return Err(c.invalid(format!("the operands are {} and {}, expected equal types", gate.ty, value.ty)));
    }
    let g = swish(b, c, gate)?;
    one(b.scalar(S::Mul, &[&g, value])?)
}

/// `x` if it is above `alpha`, else zero.
fn thresholded_relu(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let x = c.arg(0)?;
    let (alpha, zero) = (b.lit(x, c.float("alpha", 1.0)?), b.lit(x, 0.0));
    let above = b.scalar(S::Gt, &[x, &alpha])?;
    one(b.scalar(S::Select, &[&above, x, &zero])?)
}

type Composite = fn(&mut Graph, NodeId, usize) -> Result<NodeId>;

fn whole(b: &mut Builder, x: &Value, axis: usize, f: Composite) -> Result<Value> {
    let id = b.id(x)?;
    let n = f(&mut b.g, id, axis)?;
    Ok(b.value(n))
}

/// Applies a function to rows along `axis`. Before opset 13, the operand is treated as a matrix: the axes
/// before `axis` are its rows, the other axes its columns.
fn rows(
    b: &mut Builder,
    c: &Call<'_>,
    f: fn(&mut Builder, &Value, usize) -> Result<Value>,
) -> Result<Vec<Value>> {
    let x = c.arg(0)?;
    let old = c.opset < 13;
    let axis = c.axis(c.int("axis", if old { 1 } else { -1 })?, x.rank())?;
    if !old || axis + 1 == x.rank() {
        return one(f(b, x, axis)?);
    }
    let size = |d: &[Dim]| Shape::from(d).numel();
    let flat = b.reshape(x, [size(&x.shape()[..axis]), size(&x.shape()[axis..])])?;
    let y = f(b, &flat, 1)?;
    one(b.reshape(&y, x.shape())?)
}

/// One at the first maximum of each row, zero elsewhere.
fn hardmax(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    rows(b, c, |b, x, axis| {
        let id = b.id(x)?;
        let top = b.g.argreduce(true, id, axis, true, false)?;
        let top = b.value(top);
        let mut s = vec![Dim::from(1); x.rank()];
        s[axis] = x.shape()[axis];
        let i = b.iota(top.dtype(), s[axis])?;
        let i = b.reshape(&i, s)?;
        let hit = b.scalar(S::Eq, &[&i, &top])?;
        b.cast(&hit, x.dtype())
    })
}
