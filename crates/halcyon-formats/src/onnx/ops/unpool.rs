//! Pooling variants: indices of maxima, unpooling, and Lp norms.

use super::calc::{bin, checked_numel, known, select, trailing, with};
use super::pad::crop_and_pad;
use super::pool::{Pooled, pool, spatial};
use super::{Row, one, row};
use crate::onnx::build::{Builder, Range, Value};
use crate::onnx::node::Call;
use halcyon_ir::ScalarOp as S;
use halcyon_ir::ops::{PoolKind, ReduceKind, ScatterKind};
use halcyon_ir::{DType, Dim, Result, Scalar, Shape};

pub(super) const ROWS: &[Row] = &[
    row("GlobalLpPool", 1, &["p"], |b, c| {
        let axes = spatial(c)?;
        let x = c.arg(0)?;
        norm(b, c, |b, v| b.reduce(ReduceKind::Sum, v, &axes, true), x)
    }),
    row(
        "LpPool",
        1,
        &["auto_pad", "ceil_mode", "dilations", "kernel_shape", "p", "pads", "strides"],
        lp_pool,
    ),
    row("MaxUnpool", 9, &["kernel_shape", "pads", "strides"], max_unpool),
];

/// Returns `(sum |x|^p)^(1/p)`, for which `sum` computes the sum. The attribute `p` was a float in opset
/// version 1.
fn norm(
    b: &mut Builder,
    c: &Call<'_>,
    sum: impl FnOnce(&mut Builder, &Value) -> Result<Value>,
    x: &Value,
) -> Result<Vec<Value>> {
    let p = if c.opset < 2 { c.float("p", 2.0)?.into() } else { c.int("p", 2)? as f64 };
    if !(p.is_finite() && p > 0.0) {
        return Err(c.invalid(format!("the norm's p is {p}, expected a positive number")));
    }
    let to = x.dtype();
    if !to.is_float() {
        return Err(c.invalid(format!("a float type is needed, not {to}")));
    }
    let x = b.cast(x, to.compute())?;
    let powers = match p {
        1.0 => b.scalar(S::Abs, &[&x])?,
        2.0 => bin(b, S::Mul, &x, &x)?,
        _ => {
            let x = b.scalar(S::Abs, &[&x])?;
            with(b, S::Pow, &x, p)?
        }
    };
    let y = sum(b, &powers)?;
    let y = match p {
        1.0 => y,
        2.0 => b.scalar(S::Sqrt, &[&y])?,
        _ => with(b, S::Pow, &y, 1.0 / p)?,
    };
    one(b.cast(&y, to)?)
}

/// Computes a window's sum as its mean times its size. Padding counts as zeros.
fn lp_pool(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let Pooled { x, pool: p, .. } = pool(b, c, PoolKind::Avg { count_include_pad: true })?;
    let n = checked_numel(c, &p.kernel)?;
    let sum = |b: &mut Builder, v: &Value| {
        let id = b.id(v)?;
        let y = b.g.pool(id, p)?;
        let y = b.value(y);
        with(b, S::Mul, &y, n as f64)
    };
    norm(b, c, sum, &x)
}

/// Values, and the flat indices at which they were found.
#[derive(Clone)]
struct Maxima {
    v: Value,
    /// Flat index, or -1 in the padding.
    at: Value,
}

impl Maxima {
    fn part(&self, b: &mut Builder, axis: usize, start: usize, step: usize, len: usize) -> Result<Maxima> {
        let mut cut = |x: &Value| {
            let mut r: Vec<Range> =
                x.shape().iter().map(|&len| Range { start: Dim::from(0), step: 1, len }).collect();
            r[axis] = Range { start: Dim::from(start), step: step as i64, len: Dim::from(len) };
            b.slice(x, &r)
        };
        Ok(Maxima { v: cut(&self.v)?, at: cut(&self.at)? })
    }

    /// For each element, the larger of `self` and `o`, or `self` if they are equal. NaN is the largest. If
    /// `self` is in the padding, the result is `o`.
    fn or(&self, b: &mut Builder, o: &Maxima) -> Result<Maxima> {
        let mut take = bin(b, S::Gt, &o.v, &self.v)?;
        if self.v.dtype().is_float() {
            let (new, old) = (b.scalar(S::IsNan, &[&o.v])?, b.scalar(S::IsNan, &[&self.v])?);
            let old = b.scalar(S::Not, &[&old])?;
            let new = bin(b, S::And, &new, &old)?;
            take = bin(b, S::Or, &take, &new)?;
        }
        let outside = with(b, S::Lt, &self.at, 0i64)?;
        let take = bin(b, S::Or, &take, &outside)?;
        Ok(Maxima { v: select(b, &take, &o.v, &self.v)?, at: select(b, &take, &o.at, &self.at)? })
    }
}

/// Flat indices of the maxima of a pool, in the order of `storage_order`; -1 if the window has only padding.
/// Of equal maxima, the first in row-major order counts.
///
/// Along each axis, windows are doubled: the maximum of 2w elements is the larger one of the maxima of two
/// neighbouring windows of w elements. Finally, two windows that may overlap cover the whole kernel.
pub(super) fn places(b: &mut Builder, c: &Call<'_>, pooled: &Pooled, y: &Shape) -> Result<Value> {
    let x = c.arg(0)?;
    let rank = x.rank();
    let sizes = known(&x.shape()[2..])?;
    let total = checked_numel(c, &sizes)?;
    let columns = c.flag("storage_order", false)?;
    let mut at: Option<Value> = None;
    for (k, &n) in sizes.iter().enumerate() {
        let others = if columns { &sizes[..k] } else { &sizes[k + 1..] };
        let stride: usize = others.iter().product();
        let i = b.iota(DType::I64, Dim::from(n))?;
        let i = with(b, S::Mul, &i, stride as i64)?;
        let i = super::calc::along(b, &i, k + 2, rank)?;
        at = Some(match at {
            Some(a) => bin(b, S::Add, &a, &i)?,
            None => i,
        });
    }
    let at = at.ok_or_else(|| c.invalid("there are no spatial axes"))?;
    let at = crop_and_pad(b, c, &at, &pooled.cut, Scalar::I(0))?;
    let p = &pooled.pool;
    let pads = |side: fn(&(usize, usize)) -> usize| -> Vec<usize> {
        [0, 0].into_iter().chain(p.pad.iter().map(side)).collect()
    };
    let (lo, hi) = (pads(|p| p.0), pads(|p| p.1));
    let lowest = Scalar::F(x.dtype().range().0).cast(x.dtype());
    let ids = b.ids(&[&pooled.x, &at])?;
    let (v, at) = (b.g.pad(ids[0], &lo, &hi, lowest)?, b.g.pad(ids[1], &lo, &hi, Scalar::I(-1))?);
    let mut best = Maxima { v: b.value(v), at: b.value(at) };
    for axis in (2..rank).rev() {
        let (k, stride, gap) = (p.kernel[axis - 2], p.stride[axis - 2], p.dilation[axis - 2]);
        let out = known(&y[axis..=axis])?[0];
        let mut len = known(&best.v.shape()[axis..=axis])?[0];
        let mut w = 1;
        while 2 * w < k {
            // This cannot underflow, because the type rule has checked that the whole window fits.
            len -= w * gap;
            let (a, o) = (best.part(b, axis, 0, 1, len)?, best.part(b, axis, w * gap, 1, len)?);
            best = a.or(b, &o)?;
            w *= 2;
        }
        let first = best.part(b, axis, 0, stride, out)?;
        best = if k > 1 {
            let second = best.part(b, axis, (k - w) * gap, stride, out)?;
            first.or(b, &second)?
        } else {
            first
        };
    }
    let at = b.expand(&best.at, y)?;
    let plane = b.iota(DType::I64, y[0].mul(y[1]))?;
    let plane = with(b, S::Mul, &plane, total as i64)?;
    let plane = b.reshape(&plane, [y[0], y[1]])?;
    let plane = trailing(b, &plane, rank - 2)?;
    let flat = bin(b, S::Add, &at, &plane)?;
    let outside = with(b, S::Lt, &at, 0i64)?;
    select(b, &outside, &at, &flat)
}

/// Scatters elements into zeros, at the indices that a MaxPool returned.
fn max_unpool(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    spatial(c)?;
    let (x, at) = (c.arg(0)?, c.arg(1)?);
    if at.shape() != x.shape() {
        return Err(c.invalid(format!("input {} and indices {} differ in shape", x.ty, at.ty)));
    }
    let n = x.rank() - 2;
    if c.ints("kernel_shape")?.is_none() {
        return Err(c.invalid("attribute 'kernel_shape' is missing"));
    }
    let kernel = c.sizes("kernel_shape", n, 1)?;
    let (stride, pads) = (c.sizes("strides", n, 1)?, c.sizes("pads", 2 * n, 0)?);
    let dims = known(x.shape())?;
    let mut to = dims[..2].to_vec();
    for i in 0..n {
        let size = (dims[2 + i] as i64 - 1)
            .checked_mul(stride[i] as i64)
            .and_then(|v| v.checked_add(kernel[i] as i64 - pads[i] as i64 - pads[n + i] as i64))
            .and_then(|v| usize::try_from(v).ok());
        to.push(size.ok_or_else(|| {
            c.invalid(format!("the result of unpooling {} would have a negative or too large size", x.ty))
        })?);
    }
    let numel = checked_numel(c, &to)?;
    let base = b.full(x.dtype(), &Shape::from([numel]), Scalar::I(0));
    let (flat, at) = (b.reshape(x, [x.shape().numel()])?, b.reshape(at, [x.shape().numel()])?);
    let ids = b.ids(&[&base, &at, &flat])?;
    let y = b.g.scatter_rows(ids[0], ids[1], ids[2], 0, ScatterKind::Set)?;
    let y = b.value(y);
    let y = b.reshape(&y, to.clone())?;
    let Some(shape) = c.opt(2) else { return one(y) };
    let want = b.known_ints(shape, "the output shape of MaxUnpool")?;
    let hi: Option<Vec<usize>> = match want.len() == to.len() {
        true => want.iter().zip(&to).map(|(&w, &n)| usize::try_from(w).ok()?.checked_sub(n)).collect(),
        false => None,
    };
    let hi = hi.ok_or_else(|| {
        c.invalid(format!("output shape {want:?} must have the rank of {to:?}, and no smaller size"))
    })?;
    if hi.iter().any(|&n| n > i32::MAX as usize) {
        return Err(c.invalid(format!("output shape {want:?} is too large")));
    }
    let id = b.id(&y)?;
    let y = b.g.pad(id, &vec![0; to.len()], &hi, Scalar::I(0))?;
    one(b.value(y))
}
