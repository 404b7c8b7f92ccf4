//! Gradients of scalar ops. Each row of `crate::ops::element_wise` names one.

use super::keep;
use crate::error::Result;
use crate::graph::{Graph, NodeId};
use std::f64::consts::{FRAC_1_SQRT_2, LN_2, PI};

/// How the gradient of a scalar op is computed.
#[derive(Clone, Copy, Debug)]
pub enum ScalarGrad {
    /// The derivative is zero wherever it exists, so no gradient is propagated.
    Zero,
    /// For ops of one operand: the derivative, computed from operand `x` and result `y`. It multiplies the
    /// incoming gradient.
    Factor(fn(&mut Graph, NodeId, NodeId) -> Result<NodeId>),
    /// The gradient of operand `k`, computed from the operands, the result, the incoming gradient and `k`.
    Operand(fn(&mut Graph, &[NodeId], NodeId, NodeId, usize) -> Result<Option<NodeId>>),
}

fn plus(g: &mut Graph, x: NodeId, v: f64) -> Result<NodeId> {
    let k = g.lit(x, v);
    g.add(x, k)
}

fn times(g: &mut Graph, x: NodeId, v: f64) -> Result<NodeId> {
    let k = g.lit(x, v);
    g.mul(x, k)
}

fn square(g: &mut Graph, x: NodeId) -> Result<NodeId> {
    g.mul(x, x)
}

/// `v - x`.
fn from(g: &mut Graph, v: f64, x: NodeId) -> Result<NodeId> {
    let k = g.lit(x, v);
    g.sub(k, x)
}

/// `1 + x²` or `1 - x²`.
fn one_plus_square(g: &mut Graph, x: NodeId) -> Result<NodeId> {
    let s = square(g, x)?;
    plus(g, s, 1.0)
}
fn one_minus_square(g: &mut Graph, x: NodeId) -> Result<NodeId> {
    let s = square(g, x)?;
    from(g, 1.0, s)
}

/// The larger (or smaller) operand receives the gradient; equal operands share it.
fn pick(
    g: &mut Graph,
    mine: NodeId,
    other: NodeId,
    dy: NodeId,
    better: fn(&mut Graph, NodeId, NodeId) -> Result<NodeId>,
) -> Result<Option<NodeId>> {
    let half = times(g, dy, 0.5)?;
    let tie = g.eq(mine, other)?;
    let shared = keep(g, tie, half)?;
    let wins = better(g, mine, other)?;
    g.select(wins, dy, shared).map(Some)
}

/// Gradient of the divisor `y` of a remainder `x - y·n`, where `n` is the rounded quotient.
fn divisor(
    g: &mut Graph,
    x: &[NodeId],
    dy: NodeId,
    round: fn(&mut Graph, NodeId) -> Result<NodeId>,
) -> Result<Option<NodeId>> {
    let q = g.div(x[0], x[1])?;
    let n = round(g, q)?;
    let p = g.mul(dy, n)?;
    g.neg(p).map(Some)
}

pub(crate) fn sqrt(g: &mut Graph, _: NodeId, y: NodeId) -> Result<NodeId> {
    let r = g.recip(y)?;
    times(g, r, 0.5)
}

pub(crate) fn rsqrt(g: &mut Graph, _: NodeId, y: NodeId) -> Result<NodeId> {
    let s = square(g, y)?;
    let c = g.mul(s, y)?;
    times(g, c, -0.5)
}

pub(crate) fn recip(g: &mut Graph, _: NodeId, y: NodeId) -> Result<NodeId> {
    let s = square(g, y)?;
    g.neg(s)
}

pub(crate) fn exp2(g: &mut Graph, _: NodeId, y: NodeId) -> Result<NodeId> {
    times(g, y, LN_2)
}

pub(crate) fn expm1(g: &mut Graph, _: NodeId, y: NodeId) -> Result<NodeId> {
    plus(g, y, 1.0)
}

pub(crate) fn log2(g: &mut Graph, x: NodeId, _: NodeId) -> Result<NodeId> {
    let r = g.recip(x)?;
    times(g, r, 1.0 / LN_2)
}

pub(crate) fn log1p(g: &mut Graph, x: NodeId, _: NodeId) -> Result<NodeId> {
    let s = plus(g, x, 1.0)?;
    g.recip(s)
}

pub(crate) fn cos(g: &mut Graph, x: NodeId, _: NodeId) -> Result<NodeId> {
    let s = g.sin(x)?;
    g.neg(s)
}

pub(crate) fn tan(g: &mut Graph, _: NodeId, y: NodeId) -> Result<NodeId> {
    one_plus_square(g, y)
}

pub(crate) fn asin(g: &mut Graph, x: NodeId, _: NodeId) -> Result<NodeId> {
    let s = one_minus_square(g, x)?;
    g.rsqrt(s)
}

pub(crate) fn acos(g: &mut Graph, x: NodeId, _: NodeId) -> Result<NodeId> {
    let s = one_minus_square(g, x)?;
    let r = g.rsqrt(s)?;
    g.neg(r)
}

pub(crate) fn atan(g: &mut Graph, x: NodeId, _: NodeId) -> Result<NodeId> {
    let s = one_plus_square(g, x)?;
    g.recip(s)
}

pub(crate) fn tanh(g: &mut Graph, _: NodeId, y: NodeId) -> Result<NodeId> {
    one_minus_square(g, y)
}

pub(crate) fn asinh(g: &mut Graph, x: NodeId, _: NodeId) -> Result<NodeId> {
    let s = one_plus_square(g, x)?;
    g.rsqrt(s)
}

pub(crate) fn acosh(g: &mut Graph, x: NodeId, _: NodeId) -> Result<NodeId> {
    // (x - 1)(x + 1) is accurate near 1, where x² - 1 cancels.
    let (a, b) = (plus(g, x, -1.0)?, plus(g, x, 1.0)?);
    let p = g.mul(a, b)?;
    g.rsqrt(p)
}

pub(crate) fn atanh(g: &mut Graph, x: NodeId, _: NodeId) -> Result<NodeId> {
    let s = one_minus_square(g, x)?;
    g.recip(s)
}

pub(crate) fn erf(g: &mut Graph, x: NodeId, _: NodeId) -> Result<NodeId> {
    let s = square(g, x)?;
    let n = g.neg(s)?;
    let e = g.exp(n)?;
    times(g, e, 2.0 / PI.sqrt())
}

pub(crate) fn sigmoid(g: &mut Graph, _: NodeId, y: NodeId) -> Result<NodeId> {
    let r = from(g, 1.0, y)?;
    g.mul(y, r)
}

pub(crate) fn silu(g: &mut Graph, x: NodeId, y: NodeId) -> Result<NodeId> {
    // s + y·(1 - s) with s = sigmoid(x).
    let s = g.sigmoid(x)?;
    let r = from(g, 1.0, s)?;
    let p = g.mul(y, r)?;
    g.add(s, p)
}

pub(crate) fn gelu(g: &mut Graph, x: NodeId, _: NodeId) -> Result<NodeId> {
    // Φ(x) + x·φ(x).
    let u = times(g, x, FRAC_1_SQRT_2)?;
    let e = g.erf(u)?;
    let e = plus(g, e, 1.0)?;
    let cdf = times(g, e, 0.5)?;
    let s = square(g, u)?;
    let n = g.neg(s)?;
    let d = g.exp(n)?;
    let pdf = times(g, d, 1.0 / (2.0 * PI).sqrt())?;
    let p = g.mul(x, pdf)?;
    g.add(cdf, p)
}

pub(crate) fn gelu_tanh(g: &mut Graph, x: NodeId, _: NodeId) -> Result<NodeId> {
    // With u = k·(x + c·x³) and t = tanh(u): (1 + t)/2 + x/2·(1 - t²)·k·(1 + 3c·x²).
    let (k, c) = ((2.0 / PI).sqrt(), 0.044715);
    let s = square(g, x)?;
    let cs = times(g, s, c)?;
    let q = plus(g, cs, 1.0)?;
    let xq = g.mul(x, q)?;
    let u = times(g, xq, k)?;
    let t = g.tanh(u)?;
    let a = plus(g, t, 1.0)?;
    let a = times(g, a, 0.5)?;
    let r = one_minus_square(g, t)?;
    let b = times(g, cs, 3.0)?;
    let b = plus(g, b, 1.0)?;
    let b = times(g, b, 0.5 * k)?;
    let b = g.mul(b, r)?;
    let b = g.mul(b, x)?;
    g.add(a, b)
}

// The gradient is computed from the result, which is positive where the operand is positive. Hence the
// operand need not be kept, and relu can be in the epilogue of the product before it.
pub(crate) fn relu(g: &mut Graph, _: &[NodeId], y: NodeId, dy: NodeId, _: usize) -> Result<Option<NodeId>> {
    let z = g.lit(y, 0.0);
    let up = g.gt(y, z)?;
    keep(g, up, dy).map(Some)
}

pub(crate) fn sub(g: &mut Graph, _: &[NodeId], _: NodeId, dy: NodeId, k: usize) -> Result<Option<NodeId>> {
    if k == 0 { Ok(Some(dy)) } else { g.neg(dy).map(Some) }
}

pub(crate) fn div(g: &mut Graph, x: &[NodeId], y: NodeId, dy: NodeId, k: usize) -> Result<Option<NodeId>> {
    let d = g.div(dy, x[1])?;
    if k == 0 {
        return Ok(Some(d));
    }
    let p = g.mul(d, y)?;
    g.neg(p).map(Some)
}

pub(crate) fn rem(g: &mut Graph, x: &[NodeId], _: NodeId, dy: NodeId, k: usize) -> Result<Option<NodeId>> {
    if k == 0 { Ok(Some(dy)) } else { divisor(g, x, dy, Graph::trunc) }
}

pub(crate) fn modulo(g: &mut Graph, x: &[NodeId], _: NodeId, dy: NodeId, k: usize) -> Result<Option<NodeId>> {
    if k == 0 { Ok(Some(dy)) } else { divisor(g, x, dy, Graph::floor) }
}

pub(crate) fn pow(g: &mut Graph, x: &[NodeId], y: NodeId, dy: NodeId, k: usize) -> Result<Option<NodeId>> {
    let z = g.lit(x[0], 0.0);
    let f = if k == 0 {
        // For y = a^b: b·a^(b-1), and 0 for b = 0 whatever a is.
        let e = plus(g, x[1], -1.0)?;
        let p = g.pow(x[0], e)?;
        let p = g.mul(x[1], p)?;
        let flat = g.eq(x[1], z)?;
        g.select(flat, z, p)?
    } else {
        // For y = a^b: y·ln a, and 0 if a is not positive (there is no derivative for negative a).
        let ok = g.gt(x[0], z)?;
        let one = g.lit(x[0], 1.0);
        let a = g.select(ok, x[0], one)?;
        let l = g.log(a)?;
        g.mul(y, l)?
    };
    g.mul(dy, f).map(Some)
}

pub(crate) fn atan2(g: &mut Graph, x: &[NodeId], _: NodeId, dy: NodeId, k: usize) -> Result<Option<NodeId>> {
    let (a, b) = (square(g, x[0])?, square(g, x[1])?);
    let s = g.add(a, b)?;
    let f = g.div(x[1 - k], s)?;
    let d = g.mul(dy, f)?;
    if k == 0 { Ok(Some(d)) } else { g.neg(d).map(Some) }
}

pub(crate) fn min(g: &mut Graph, x: &[NodeId], _: NodeId, dy: NodeId, k: usize) -> Result<Option<NodeId>> {
    pick(g, x[k], x[1 - k], dy, Graph::lt)
}

pub(crate) fn max(g: &mut Graph, x: &[NodeId], _: NodeId, dy: NodeId, k: usize) -> Result<Option<NodeId>> {
    pick(g, x[k], x[1 - k], dy, Graph::gt)
}

pub(crate) fn fma(g: &mut Graph, x: &[NodeId], _: NodeId, dy: NodeId, k: usize) -> Result<Option<NodeId>> {
    match k {
        2 => Ok(Some(dy)),
        _ => g.mul(dy, x[1 - k]).map(Some),
    }
}

pub(crate) fn select(g: &mut Graph, x: &[NodeId], _: NodeId, dy: NodeId, k: usize) -> Result<Option<NodeId>> {
    let z = g.lit(dy, 0.0);
    match k {
        1 => g.select(x[0], dy, z).map(Some),
        2 => g.select(x[0], z, dy).map(Some),
        _ => Ok(None),
    }
}
