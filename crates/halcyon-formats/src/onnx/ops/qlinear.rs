//! Products of 8-bit integers.
//!
//! Sums are exact. They are split into parts, which the f32 kernels compute and which are added in i32. The
//! parts are so short that no partial sum exceeds 2^24, up to which f32 represents every integer. The result
//! therefore does not depend on the order of additions, and wraps at 32 bits as the operators allow. The
//! length of the parts follows from known weights and zero points, else from the dtypes. Products run in i32
//! and convolutions in f64 if a single term could already be too large, if there would be too many parts, or
//! if a size is symbolic.

use super::nn::{channels, conv_attrs};
use super::{Row, one, row};
use crate::onnx::build::{Builder, Value};
use crate::onnx::node::Call;
use halcyon_ir::ScalarOp as S;
use halcyon_ir::{DType, Dim, Result, Shape};

const CONV: &[&str] = &["auto_pad", "dilations", "group", "kernel_shape", "pads", "strides"];

pub(super) const ROWS: &[Row] = &[
    row("ConvInteger", 10, CONV, conv_integer),
    row("MatMulInteger", 10, &[], matmul_integer),
    row("QLinearConv", 10, CONV, qlinear_conv),
    row("QLinearMatMul", 10, &[], qlinear_matmul),
];

/// Largest sum for which every partial sum is exact in f32.
const EXACT: u64 = 1 << 24;
/// Limit on the parts that a sum is split into.
const PARTS: usize = 64;

fn bytes_only(c: &Call<'_>, x: &Value) -> Result<()> {
    match x.dtype() {
        DType::I8 | DType::U8 => Ok(()),
        d => Err(c.invalid(format!("an operand is {d}, not i8 or u8"))),
    }
}

/// The zero points if they are known, else the ends of the dtype's range.
fn zeros(x: &Value, zero: Option<&Value>) -> Vec<i64> {
    let known = |z: &Value| -> Option<Vec<i64>> {
        z.host()?.vals.iter().map(|n| Some(n.known()?.as_i64())).collect()
    };
    match zero {
        None => vec![0],
        Some(z) => known(z).unwrap_or_else(|| {
            let (lo, hi) = x.dtype().range();
            vec![lo as i64, hi as i64]
        }),
    }
}

/// Largest magnitude of an element minus its zero point; at least 1.
fn magnitude(x: &Value, zero: Option<&Value>) -> u64 {
    let (lo, hi) = x.dtype().range();
    let far = |z: i64| (z - lo as i64).unsigned_abs().max((hi as i64 - z).unsigned_abs());
    zeros(x, zero).into_iter().map(far).max().unwrap_or(0).max(1)
}

/// Magnitudes of the elements of a known weight minus the zero point of their output, as a function
/// `get(element, output)`.
fn weights(w: &Value, zero: Option<&Value>, outputs: usize) -> Option<impl Fn(usize, usize) -> u64 + use<>> {
    let data = w.data().ok().flatten()?;
    let signed = match data.dtype {
        DType::I8 => true,
        DType::U8 => false,
        _ => return None,
    };
    // An empty weight does not determine the sizes.
    if data.bytes().is_empty() {
        return None;
    }
    let known = zero.is_none_or(|z| z.host().is_some());
    let z = Some(zeros(w, zero)).filter(|z| known && (z.len() == 1 || z.len() == outputs))?;
    Some(move |i: usize, o: usize| {
        let v = data.bytes().get(i).copied().unwrap_or(0);
        let v = if signed { i64::from(v as i8) } else { i64::from(v) };
        (v - z.get(if z.len() == 1 { 0 } else { o }).copied().unwrap_or(0)).unsigned_abs()
    })
}

/// Splits `0..n` into runs in which the sum of `cost(i, o)` is at most `limit` for each of `outs` outputs.
/// `None` if a single element exceeds the limit or there are too many runs.
pub(super) fn runs(
    n: usize,
    outs: usize,
    limit: u64,
    cost: impl Fn(usize, usize) -> u64,
) -> Option<Vec<(usize, usize)>> {
    let mut sums = vec![0u64; outs];
    let (mut cuts, mut start) = (vec![], 0);
    for i in 0..n {
        let step: Vec<u64> = (0..outs).map(|o| cost(i, o)).collect();
        if step.iter().any(|s| *s > limit) {
            return None;
        }
        if sums.iter().zip(&step).any(|(a, s)| a + s > limit) {
            cuts.push((start, i - start));
            start = i;
            sums.fill(0);
        }
        sums.iter_mut().zip(&step).for_each(|(a, s)| *a += s);
    }
    cuts.push((start, n - start));
    (cuts.len() <= PARTS).then_some(cuts)
}

/// Like [`runs`], for equal costs.
pub(super) fn equal_runs(n: usize, limit: u64, cost: u64) -> Option<Vec<(usize, usize)>> {
    let len = usize::try_from(limit / cost.max(1)).ok().filter(|l| *l > 0)?;
    let parts = n.div_ceil(len).max(1);
    (parts <= PARTS).then(|| (0..parts).map(|i| (i * len, len.min(n - i * len))).collect())
}

/// `x - zero` in f32, which is exact for 8 bits. `zero` must broadcast to `x`.
fn centered(b: &mut Builder, c: &Call<'_>, x: &Value, zero: Option<&Value>) -> Result<Value> {
    let wide = b.cast(x, DType::F32)?;
    let Some(z) = zero else { return Ok(wide) };
    if z.shape().broadcast(x.shape()).ok().as_ref() != Some(x.shape()) {
        return Err(c.invalid(format!("the zero point {} does not broadcast to {}", z.ty, x.ty)));
    }
    let z = b.cast(z, DType::F32)?;
    b.scalar(S::Sub, &[&wide, &z])
}

fn same_type(c: &Call<'_>, x: &Value, zero: Option<&Value>) -> Result<()> {
    match zero {
        Some(z) if z.dtype() != x.dtype() => Err(c.invalid(format!(
            "the zero point is {} and the operand is {}; their types must be equal",
            z.ty, x.ty
        ))),
        _ => Ok(()),
    }
}

fn add_all(b: &mut Builder, c: &Call<'_>, parts: Vec<Value>) -> Result<Value> {
    let mut parts = parts.into_iter();
    let first = parts.next().ok_or_else(|| c.invalid("there is nothing to sum"))?;
    parts.try_fold(first, |sum, p| b.scalar(S::Add, &[&sum, &p]))
}

/// Shapes a zero point or scale of a matrix for broadcasting: a single value, one value per row (left
/// operand) or per column, or a tensor of the matrix's rank.
fn per_line(b: &mut Builder, v: &Value, rows: bool) -> Result<Value> {
    if v.shape().numel().is(1) {
        return b.reshape(v, Shape::scalar());
    }
    match (v.rank(), rows) {
        (1, true) => b.reshape(v, [v.shape()[0], Dim::from(1)]),
        _ => Ok(v.clone()),
    }
}

/// The zero points of both operands of a matrix product.
fn lines(b: &mut Builder, zx: Option<&Value>, zw: Option<&Value>) -> Result<(Option<Value>, Option<Value>)> {
    Ok((zx.map(|z| per_line(b, z, true)).transpose()?, zw.map(|z| per_line(b, z, false)).transpose()?))
}

fn matmul(b: &mut Builder, x: &Value, w: &Value) -> Result<Value> {
    let ids = b.ids(&[x, w])?;
    let id = b.g.matmul(ids[0], ids[1])?;
    Ok(b.value(id))
}

/// Whether the operand is of an 8-bit float type. Its values and products are exact in f32, but some sums are
/// not.
fn eight_bit_float(x: &Value) -> bool {
    x.dtype().is_float() && x.dtype().bits() == 8 && x.dtype() != DType::F8E8M0
}

/// `(x - zx) (w - zw)` in i32, by NumPy's rules for matrix products.
fn product(
    b: &mut Builder,
    c: &Call<'_>,
    x: &Value,
    zx: Option<&Value>,
    w: &Value,
    zw: Option<&Value>,
) -> Result<Value> {
    bytes_only(c, x)?;
    bytes_only(c, w)?;
    same_type(c, x, zx)?;
    same_type(c, w, zw)?;
    if x.rank() == 0 || w.rank() == 0 {
        return Err(c.invalid("an operand is a scalar"));
    }
    let (zx, zw) = lines(b, zx, zw)?;
    let (zx, zw) = (zx.as_ref(), zw.as_ref());
    let (last, axis) = (x.rank() - 1, w.rank().saturating_sub(2));
    if x.shape()[last] != w.shape()[axis] {
        return Err(c.invalid(format!("{} × {}: the summed sizes differ", x.ty, w.ty)));
    }
    let columns = if w.rank() == 1 { Some(1) } else { w.shape()[w.rank() - 1].known() };
    let limit = EXACT / magnitude(x, zx);
    let known = columns.filter(|_| w.rank() <= 2).and_then(|n| Some((n, weights(w, zw, n)?)));
    let parts = match (x.shape()[last].known(), known) {
        (Some(k), Some((n, get))) => runs(k, n, limit, |i, o| get(i * n + o, o)),
        (Some(k), None) => equal_runs(k, limit, magnitude(w, zw)),
        (None, _) => None,
    };
    let (x, w) = (centered(b, c, x, zx)?, centered(b, c, w, zw)?);
    let mul = |b: &mut Builder, x: &Value, w: &Value| -> Result<Value> {
        let y = matmul(b, x, w)?;
        b.cast(&y, DType::I32)
    };
    let Some(parts) = parts else {
        let (x, w) = (b.cast(&x, DType::I32)?, b.cast(&w, DType::I32)?);
        return mul(b, &x, &w);
    };
    let mut sums = vec![];
    for &(at, n) in &parts {
        let (at, n) = (Dim::from(at), Dim::from(n));
        let (x, w) = match parts.len() {
            1 => (x.clone(), w.clone()),
            _ => (b.narrow(&x, last, at, n)?, b.narrow(&w, axis, at, n)?),
        };
        sums.push(mul(b, &x, &w)?);
    }
    add_all(b, c, sums)
}

/// The convolution of `x - zx` with `w - zw` in i32.
fn convolution(
    b: &mut Builder,
    c: &Call<'_>,
    x: &Value,
    zx: Option<&Value>,
    w: &Value,
    zw: Option<&Value>,
) -> Result<Value> {
    bytes_only(c, x)?;
    bytes_only(c, w)?;
    same_type(c, x, zx)?;
    same_type(c, w, zw)?;
    let attrs = conv_attrs(c, x, w)?;
    let zx = zx.map(|z| scalar(b, c, z)).transpose()?;
    let limit = EXACT / magnitude(x, zx.as_ref());
    let taps = Shape::from(&w.shape()[2..]).numel().known();
    // Parts are runs of the input channels of each group.
    let parts = match (w.shape()[0].known(), w.shape()[1].known(), taps) {
        (Some(o), Some(n), Some(taps)) => match weights(w, zw, o) {
            Some(get) => runs(n, o, limit, |i, o| (0..taps).map(|t| get((o * n + i) * taps + t, o)).sum()),
            None => equal_runs(n, limit, magnitude(w, zw).saturating_mul(taps as u64)),
        },
        _ => None,
    };
    let zw = zw.map(|z| outputs(b, c, z, w)).transpose()?;
    let (x, w) = (centered(b, c, x, zx.as_ref())?, centered(b, c, w, zw.as_ref())?);
    let conv = |b: &mut Builder, x: &Value, w: &Value| -> Result<Value> {
        let ids = b.ids(&[x, w])?;
        let id = b.g.conv(ids[0], ids[1], attrs.clone())?;
        let y = b.value(id);
        // A sum in f64 may exceed i32. It wraps in the cast from i64.
        let y = if y.dtype() == DType::F64 { b.cast(&y, DType::I64)? } else { y };
        b.cast(&y, DType::I32)
    };
    match parts.as_deref() {
        None => {
            let (x, w) = (b.cast(&x, DType::F64)?, b.cast(&w, DType::F64)?);
            conv(b, &x, &w)
        }
        Some([_]) => conv(b, &x, &w),
        Some(parts) => {
            let (g, s) = (Dim::from(attrs.groups), x.shape().clone());
            if w.shape()[1].mul(g) != s[1] {
                return Err(c.invalid(format!(
                    "the weight {} in {} groups does not fit the input {}",
                    w.ty, attrs.groups, x.ty
                )));
            }
            let split = |n: Dim| [s[0], g, n].iter().chain(&s[2..]).copied().collect::<Shape>();
            let merged = |n: Dim| [s[0], g.mul(n)].iter().chain(&s[2..]).copied().collect::<Shape>();
            let grouped = b.reshape(&x, split(w.shape()[1]))?;
            let mut sums = vec![];
            for &(at, n) in parts {
                let (at, n) = (Dim::from(at), Dim::from(n));
                let x = b.narrow(&grouped, 2, at, n)?;
                let (x, w) = (b.reshape(&x, merged(n))?, b.narrow(&w, 1, at, n)?);
                sums.push(conv(b, &x, &w)?);
            }
            add_all(b, c, sums)
        }
    }
}

/// Reshapes a value to a scalar. The value must have one element.
fn scalar(b: &mut Builder, c: &Call<'_>, v: &Value) -> Result<Value> {
    if !v.shape().numel().is(1) {
        return Err(c.invalid(format!("expected one value, not {}", v.ty)));
    }
    b.reshape(v, Shape::scalar())
}

/// Shapes `v` for broadcasting to the weight `w`. It has a single value, or one per output channel of `w`.
fn outputs(b: &mut Builder, c: &Call<'_>, v: &Value, w: &Value) -> Result<Value> {
    if v.shape().numel().is(1) {
        return b.reshape(v, Shape::scalar());
    }
    if v.rank() != 1 || v.shape()[0] != w.shape()[0] {
        return Err(c.invalid(format!("{} does not have one value per output channel of {}", v.ty, w.ty)));
    }
    let mut s = vec![Dim::from(1); w.rank()];
    s[0] = v.shape()[0];
    b.reshape(v, s)
}

fn conv_integer(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    one(convolution(b, c, c.arg(0)?, c.opt(2), c.arg(1)?, c.opt(3))?)
}

fn matmul_integer(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    one(product(b, c, c.arg(0)?, c.opt(2), c.arg(1)?, c.opt(3))?)
}

/// `saturate(round(sum * factor) + zero)`, with ties to even. A float result is not rounded to an integer.
fn requantized(b: &mut Builder, c: &Call<'_>, sum: &Value, factor: &Value, zero: &Value) -> Result<Value> {
    let sum = b.cast(sum, DType::F32)?;
    let y = b.scalar(S::Mul, &[&sum, factor])?;
    let y = if zero.dtype().is_int() { b.scalar(S::Round, &[&y])? } else { y };
    let z = b.cast(zero, DType::F32)?;
    let y = b.scalar(S::Add, &[&y, &z])?;
    if y.shape() != sum.shape() {
        return Err(c.invalid(format!("scales or zero points do not broadcast to {}", sum.shape())));
    }
    let id = b.id(&y)?;
    let y = b.g.cast_saturating(id, zero.dtype())?;
    Ok(b.value(y))
}

/// The bias is an i32 in units of the product of the input's and the weight's scale.
fn qlinear_conv(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let (x, w, zero) = (c.arg(0)?, c.arg(3)?, c.arg(7)?);
    let mut sum = convolution(b, c, x, c.opt(2), w, c.opt(5))?;
    if let Some(bias) = c.opt(8) {
        let bias = b.cast(bias, DType::I32)?;
        let bias = channels(b, c, &bias, sum.rank())?;
        sum = b.scalar(S::Add, &[&sum, &bias])?;
    }
    let mut scale = |i: usize| -> Result<Value> {
        let s = scalar(b, c, c.arg(i)?)?;
        b.cast(&s, DType::F32)
    };
    let (sx, sy) = (scale(1)?, scale(6)?);
    let sw = b.cast(c.arg(4)?, DType::F32)?;
    let sw = if sw.shape().numel().is(1) { scalar(b, c, &sw)? } else { channels(b, c, &sw, sum.rank())? };
    let f = b.scalar(S::Mul, &[&sx, &sw])?;
    let f = b.scalar(S::Div, &[&f, &sy])?;
    let zero = scalar(b, c, zero)?;
    one(requantized(b, c, &sum, &f, &zero)?)
}

fn qlinear_matmul(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let (x, w) = (c.arg(0)?, c.arg(3)?);
    let (zx, zw) = (c.opt(2), c.opt(5));
    let sum = if eight_bit_float(x) || eight_bit_float(w) {
        same_type(c, x, zx)?;
        same_type(c, w, zw)?;
        let (zx, zw) = lines(b, zx, zw)?;
        let (x, w) = (centered(b, c, x, zx.as_ref())?, centered(b, c, w, zw.as_ref())?);
        matmul(b, &x, &w)?
    } else {
        product(b, c, x, zx, w, zw)?
    };
    let mut scale = |i: usize, rows: bool| -> Result<Value> {
        let s = b.cast(c.arg(i)?, DType::F32)?;
        per_line(b, &s, rows)
    };
    let (sx, sw, sy) = (scale(1, true)?, scale(4, false)?, scale(6, false)?);
    let f = b.scalar(S::Mul, &[&sx, &sw])?;
    let f = b.scalar(S::Div, &[&f, &sy])?;
    let zero = per_line(b, c.arg(7)?, false)?;
    one(requantized(b, c, &sum, &f, &zero)?)
}
