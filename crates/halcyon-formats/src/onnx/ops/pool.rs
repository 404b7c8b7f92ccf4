//! Pooling, and the window attributes shared with convolution.

use super::pad::crop_and_pad;
use super::reduce::mean_over;
use super::unpool::places;
use super::{Row, one, row};
use crate::onnx::build::{Builder, Value};
use crate::onnx::node::Call;
use halcyon_ir::ops::{Pool, PoolKind, ReduceKind};
use halcyon_ir::{Dim, Result, Scalar};

pub(super) const ROWS: &[Row] = &[
    row(
        "AveragePool",
        1,
        &["auto_pad", "ceil_mode", "count_include_pad", "dilations", "kernel_shape", "pads", "strides"],
        average,
    ),
    row("GlobalAveragePool", 1, &[], |b, c| {
        let axes = spatial(c)?;
        one(mean_over(b, c.arg(0)?, &axes, true)?)
    }),
    row("GlobalMaxPool", 1, &[], |b, c| {
        let axes = spatial(c)?;
        one(b.reduce(ReduceKind::Max, c.arg(0)?, &axes, true)?)
    }),
    row(
        "MaxPool",
        1,
        &["auto_pad", "ceil_mode", "dilations", "kernel_shape", "pads", "storage_order", "strides"],
        max,
    ),
];

/// How a kernel moves along the spatial axes.
#[derive(Debug)]
pub(super) struct Window {
    pub stride: Vec<usize>,
    pub dilation: Vec<usize>,
    /// Negative values crop. They result from automatic padding if the strides are longer than the kernel.
    pub pad: Vec<(i64, i64)>,
}

/// Indices of the operand's spatial axes.
pub(super) fn spatial(c: &Call<'_>) -> Result<Vec<usize>> {
    let x = c.arg(0)?;
    if x.rank() < 3 {
        return Err(c.invalid(format!("input {}: [n, c, …] expected", x.ty)));
    }
    Ok((2..x.rank()).collect())
}

/// Reads `strides`, `dilations`, `pads` and `auto_pad` for input sizes `x`.
pub(super) fn window(c: &Call<'_>, x: &[Dim], kernel: &[usize]) -> Result<Window> {
    let n = x.len();
    let (stride, dilation) = (c.sizes("strides", n, 1)?, c.sizes("dilations", n, 1)?);
    if kernel.iter().chain(&stride).chain(&dilation).any(|&v| v == 0) {
        return Err(c.invalid("kernel, stride and dilation must be at least 1"));
    }
    let pads = c.sizes("pads", 2 * n, 0)?;
    let pad = match c.string("auto_pad", "NOTSET")? {
        "NOTSET" | "" => (0..n).map(|k| (pads[k] as i64, pads[n + k] as i64)).collect(),
        "VALID" => vec![(0, 0); n],
        auto @ ("SAME_UPPER" | "SAME_LOWER") => (0..n)
            .map(|k| {
                // Enough padding for ceil(x / stride) results. If the total is odd, the end (SAME_UPPER) or
                // the start (SAME_LOWER) gets one element more.
                let x = known(c, x[k])?;
                let reach = reach(c, kernel[k], dilation[k])?;
                let total = (x.div_ceil(stride[k]).saturating_sub(1) * stride[k] + reach) as i64 - x as i64;
                let (small, large) = (total / 2, total - total / 2);
                Ok(if auto == "SAME_UPPER" { (small, large) } else { (large, small) })
            })
            .collect::<Result<_>>()?,
        other => return Err(c.invalid(format!("auto_pad '{other}' is not known"))),
    };
    Ok(Window { stride, dilation, pad })
}

fn known(c: &Call<'_>, d: Dim) -> Result<usize> {
    d.known().ok_or_else(|| {
        c.unsupported(&format!("padding that depends on the symbolic size {d}"), "Give concrete input shapes")
    })
}

/// Number of elements that a dilated kernel spans. It is an error if this number does not fit 31 bits.
fn reach(c: &Call<'_>, kernel: usize, dilation: usize) -> Result<usize> {
    (kernel - 1)
        .checked_mul(dilation)
        .and_then(|v| v.checked_add(1))
        .filter(|v| *v <= i32::MAX as usize)
        .ok_or_else(|| c.invalid("the dilated kernel is too large"))
}

/// A pool and its operand, in the form that the graph uses.
#[derive(Debug)]
pub(super) struct Pooled {
    /// The operand, cropped by negative padding.
    pub x: Value,
    pub pool: Pool,
    /// The padding that the node declares; ceiling mode changes the padding in `pool`.
    pub given: Vec<(usize, usize)>,
    /// The amounts, zero or negative, by which each axis of the operand was cropped.
    pub cut: Vec<(i64, i64)>,
}

/// Kernel and window of a pool. In ceiling mode the padding at the end is adjusted so that the last, partial
/// window is included; a window that would start inside that padding is not included.
pub(super) fn pool(b: &mut Builder, c: &Call<'_>, kind: PoolKind) -> Result<Pooled> {
    spatial(c)?;
    let x = c.arg(0)?;
    let dims = &x.shape()[2..];
    if c.ints("kernel_shape")?.is_none() {
        return Err(c.invalid("attribute 'kernel_shape' is missing"));
    }
    let kernel = c.sizes("kernel_shape", dims.len(), 1)?;
    let w = window(c, dims, &kernel)?;
    let mut cut = vec![(0, 0); 2];
    cut.extend(w.pad.iter().map(|p| (p.0.min(0), p.1.min(0))));
    let x =
        if cut.iter().any(|p| *p != (0, 0)) { crop_and_pad(b, c, x, &cut, Scalar::I(0))? } else { x.clone() };
    let given: Vec<(usize, usize)> =
        w.pad.iter().map(|p| (p.0.max(0) as usize, p.1.max(0) as usize)).collect();
    let mut pad = given.clone();
    if c.flag("ceil_mode", false)? {
        for (k, &d) in x.shape()[2..].iter().enumerate() {
            let (lo, hi) = pad[k];
            let (n, reach) = (known(c, d)?, reach(c, kernel[k], w.dilation[k])?);
            let room = (n + lo + hi)
                .checked_sub(reach)
                .ok_or_else(|| c.invalid(format!("a window of {reach} does not fit into {}", n + lo + hi)))?;
            let mut out = room.div_ceil(w.stride[k]) + 1;
            if (out - 1) * w.stride[k] >= n + lo {
                out -= 1;
            }
            pad[k].1 = (out.saturating_sub(1) * w.stride[k] + reach).saturating_sub(n + lo);
        }
    }
    let pool = Pool {
        kind,
        kernel: kernel.into(),
        stride: w.stride.into(),
        pad: pad.into(),
        dilation: w.dilation.into(),
    };
    Ok(Pooled { x, pool, given, cut })
}

fn max(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let p = pool(b, c, PoolKind::Max)?;
    let x = b.id(&p.x)?;
    let n = b.g.pool(x, p.pool.clone())?;
    let y = b.value(n);
    if !c.is_result_used(1) {
        return one(y);
    }
    let at = places(b, c, &p, y.shape())?;
    Ok(vec![y, at])
}

fn average(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let Pooled { x, pool: mut p, given, .. } = pool(b, c, PoolKind::Avg { count_include_pad: false })?;
    let mut x = b.id(&x)?;
    if c.flag("count_include_pad", false)? {
        // Declared padding counts towards the mean, but padding that ceiling mode adds does not. If ceiling
        // mode adds padding, only the added padding stays in the pool, and the declared padding becomes a pad
        // op before the pool.
        let (mut lo, mut hi) = (vec![0; 2], vec![0; 2]);
        for (k, given) in given.iter().enumerate() {
            let end = given.1.min(p.pad[k].1);
            lo.push(given.0);
            hi.push(end);
            p.pad[k] = (0, p.pad[k].1 - end);
        }
        if p.pad.iter().all(|e| *e == (0, 0)) {
            p.kind = PoolKind::Avg { count_include_pad: true };
            p.pad = lo[2..].iter().copied().zip(hi[2..].iter().copied()).collect();
        } else {
            x = b.g.pad(x, &lo, &hi, 0.0)?;
        }
    }
    let n = b.g.pool(x, p)?;
    one(b.value(n))
}
