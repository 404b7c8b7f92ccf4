//! Normalisation.

use super::nn::channels;
use super::reduce::mean_over;
use super::{Row, one, row};
use crate::onnx::build::{Builder, Value};
use crate::onnx::host::symbolic;
use crate::onnx::node::Call;
use halcyon_ir::ScalarOp as S;
use halcyon_ir::ops::{Pool, PoolKind, ReduceKind as R};
use halcyon_ir::{DType, Dim, Result, Shape};

pub(super) const ROWS: &[Row] = &[
    row(
        "BatchNormalization",
        1,
        &["consumed_inputs", "epsilon", "is_test", "momentum", "spatial", "training_mode"],
        batch_normalization,
    ),
    row("GroupNormalization", 18, &["epsilon", "num_groups", "stash_type"], group_normalization),
    row("InstanceNormalization", 1, &["consumed_inputs", "epsilon"], instance_normalization),
    row("LRN", 1, &["alpha", "beta", "bias", "size"], lrn),
    row("LayerNormalization", 17, &["axis", "epsilon", "stash_type"], layer_normalization),
    row("LpNormalization", 1, &["axis", "p"], lp_normalization),
    row("MeanVarianceNormalization", 9, &["axes"], mean_variance),
    row("RMSNormalization", 23, &["axis", "epsilon", "stash_type"], rms_normalization),
];

/// The statistics are per channel, or per feature if `spatial` is 0 (before opset 9). In training mode they
/// are computed from the batch, and the updated running statistics are further results. The mode is an
/// attribute before opset 7 and from opset 14 on. In between, the mode is training if any of these results is
/// used.
fn batch_normalization(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let asks = (1..5).any(|i| c.is_result_used(i));
    let training = match c.opset {
        14.. => c.flag("training_mode", false)?,
        7..=13 => asks,
        _ => !c.flag("is_test", false)?,
    };
    if asks && !training {
        return Err(c.invalid("the statistics are results in training mode only"));
    }
    let (x, eps) = (c.arg(0)?, c.float("epsilon", 1e-5)?);
    if !x.dtype().is_float() || x.rank() == 0 {
        return Err(c.invalid(format!("the input is {}, expected floats [n, c, …]", x.ty)));
    }
    let given = x.shape().clone();
    // An operand `[n]` with a single axis is a batch of `n` with one channel.
    let x = if x.rank() == 1 { b.reshape(x, [given[0], 1.into()])? } else { x.clone() };
    let spatial = c.opset >= 9 || c.flag("spatial", true)?;
    let per = if spatial { Shape::from([x.shape()[1]]) } else { Shape::from(&x.shape()[1..]) };
    let mut w = Vec::with_capacity(4);
    for i in 1..5 {
        let v = c.arg(i)?;
        if v.shape() != &per || !v.dtype().is_float() {
            return Err(c.invalid(format!(
                "operand {i} is {}, expected floats of shape {per} for input {}",
                v.ty, x.ty
            )));
        }
        w.push(b.cast(v, x.dtype().compute())?);
    }
    let (to, x) = (x.dtype(), b.cast(&x, x.dtype().compute())?);
    let along = |b: &mut Builder, v: &Value| {
        if spatial {
            return channels(b, c, v, x.rank());
        }
        let s: Shape = [Dim::from(1)].into_iter().chain(v.shape().iter().copied()).collect();
        b.reshape(v, s)
    };
    if !training && spatial {
        let ids = b.ids(&[&x, &w[0], &w[1], &w[2], &w[3]])?;
        let y = b.g.batch_norm(ids[0], ids[1], ids[2], ids[3], ids[4], eps.into())?;
        let y = b.value(y);
        let y = b.cast(&y, to)?;
        return one(b.reshape(&y, &given)?);
    }
    let axes: Vec<usize> = (0..x.rank()).filter(|&k| k == 0 || (spatial && k > 1)).collect();
    let (mean, var) = if training {
        let m = mean_over(b, &x, &axes, true)?;
        let d = b.scalar(S::Sub, &[&x, &m])?;
        let sq = b.scalar(S::Mul, &[&d, &d])?;
        (m, mean_over(b, &sq, &axes, true)?)
    } else {
        (along(b, &w[2])?, along(b, &w[3])?)
    };
    let d = b.scalar(S::Sub, &[&x, &mean])?;
    let r = inverse_root(b, &var, eps)?;
    let (scale, bias) = (along(b, &w[0])?, along(b, &w[1])?);
    let k = b.scalar(S::Mul, &[&r, &scale])?;
    let y = b.scalar(S::Mul, &[&d, &k])?;
    let y = b.scalar(S::Add, &[&y, &bias])?;
    let y = b.cast(&y, to)?;
    let mut out = vec![b.reshape(&y, &given)?];
    if asks {
        let momentum = f64::from(c.float("momentum", 0.9)?);
        let now = [b.reshape(&mean, &per)?, b.reshape(&var, &per)?];
        for (i, new) in now.iter().enumerate() {
            let (keep, take) = (b.lit(new, momentum), b.lit(new, 1.0 - momentum));
            let old = b.scalar(S::Mul, &[&w[2 + i], &keep])?;
            let new = b.scalar(S::Mul, &[new, &take])?;
            let sum = b.scalar(S::Add, &[&old, &new])?;
            out.push(b.cast(&sum, c.arg(3 + i)?.dtype())?);
        }
        for v in &now {
            out.push(b.cast(v, to)?);
        }
    }
    Ok(out)
}

/// `1 / sqrt(var + eps)`.
fn inverse_root(b: &mut Builder, var: &Value, eps: f32) -> Result<Value> {
    let e = b.lit(var, eps);
    let v = b.scalar(S::Add, &[var, &e])?;
    b.scalar(S::Rsqrt, &[&v])
}

/// `(x - mean, 1 / sqrt(variance + eps), mean)` over `axes`, which are kept with size 1. The variance is the
/// biased estimate.
fn moments(b: &mut Builder, x: &Value, axes: &[usize], eps: f32) -> Result<(Value, Value, Value)> {
    let m = mean_over(b, x, axes, true)?;
    let d = b.scalar(S::Sub, &[x, &m])?;
    let sq = b.scalar(S::Mul, &[&d, &d])?;
    let var = mean_over(b, &sq, axes, true)?;
    Ok((d, inverse_root(b, &var, eps)?, m))
}

/// The dtype that statistics are computed in.
fn stash(c: &Call<'_>) -> Result<DType> {
    let d = c.dtype("stash_type")?.unwrap_or(DType::F32);
    if d.is_float() { Ok(d) } else { Err(c.invalid(format!("stash_type {d} is not a float type"))) }
}

fn float(c: &Call<'_>, x: &Value) -> Result<()> {
    if x.dtype().is_float() { Ok(()) } else { Err(c.invalid(format!("{} is not of a float type", x.ty))) }
}

/// Checks that `v` broadcasts to `x` without enlarging it.
fn fits(c: &Call<'_>, v: &Value, x: &Value) -> Result<()> {
    match v.shape().broadcast(x.shape()) {
        Ok(s) if s == *x.shape() => Ok(()),
        _ => Err(c.invalid(format!("{} does not broadcast to {}", v.ty, x.ty))),
    }
}

fn layer_normalization(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let (x, scale, eps) = (c.arg(0)?, c.arg(1)?, c.float("epsilon", 1e-5)?);
    float(c, x)?;
    let axis = c.axis(c.int("axis", -1)?, x.rank())?;
    let (to, inner) = (x.dtype(), stash(c)?);
    for v in [Some(scale), c.opt(2)].into_iter().flatten() {
        fits(c, v, x)?;
    }
    let axes: Vec<usize> = (axis..x.rank()).collect();
    let mut out = vec![];
    // The composite computes in f32, or in f64 for f64 operands.
    if inner == DType::F32 {
        let mut ids = b.ids(&[x, scale])?;
        if let Some(v) = c.opt(2) {
            ids.push(b.id(v)?);
        }
        let y = b.g.layer_norm(ids[0], ids[1], ids.get(2).copied(), axis, eps.into())?;
        out.push(b.value(y));
        if !c.is_result_used(1) && !c.is_result_used(2) {
            return Ok(out);
        }
    }
    let w = b.cast(x, if inner == DType::F32 { to.compute() } else { inner })?;
    let (d, r, m) = moments(b, &w, &axes, eps)?;
    if out.is_empty() {
        let n = b.scalar(S::Mul, &[&d, &r])?;
        let n = b.cast(&n, to)?;
        let mut y = b.scalar(S::Mul, &[&n, scale])?;
        if let Some(v) = c.opt(2) {
            y = b.scalar(S::Add, &[&y, v])?;
        }
        out.push(y);
    }
    out.push(b.cast(&m, inner)?);
    out.push(b.cast(&r, inner)?);
    Ok(out)
}

/// `x / sqrt(mean(x²) + eps) * scale`, with the mean over the axes from `axis` on.
fn rms_normalization(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let (x, scale, eps) = (c.arg(0)?, c.arg(1)?, c.float("epsilon", 1e-5)?);
    float(c, x)?;
    float(c, scale)?;
    fits(c, scale, x)?;
    let axis = c.axis(c.int("axis", -1)?, x.rank())?;
    let (to, inner) = (scale.dtype(), stash(c)?);
    let (s, n) = (x.shape().clone(), x.shape()[axis..].iter().fold(Dim::from(1), |n, &d| n.mul(d)));
    if inner == DType::F32 && to == x.dtype() && scale.shape()[..] == s[axis..] {
        let flat: Shape = s[..axis].iter().copied().chain([n]).collect();
        let (x, scale) = (b.reshape(x, flat)?, b.reshape(scale, [n])?);
        let ids = b.ids(&[&x, &scale])?;
        let y = b.g.rms_norm(ids[0], ids[1], eps.into())?;
        let y = b.value(y);
        return one(b.reshape(&y, &s)?);
    }
    let w = b.cast(x, inner)?;
    let sq = b.scalar(S::Mul, &[&w, &w])?;
    let m = mean_over(b, &sq, &(axis..x.rank()).collect::<Vec<_>>(), true)?;
    let r = inverse_root(b, &m, eps)?;
    let y = b.scalar(S::Mul, &[&w, &r])?;
    let y = b.cast(&y, x.dtype())?;
    let y = b.cast(&y, to)?;
    one(b.scalar(S::Mul, &[&y, scale])?)
}

/// The statistics are per image and channel: over all axes after the second.
fn instance_normalization(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let (x, eps) = (c.arg(0)?, c.float("epsilon", 1e-5)?);
    float(c, x)?;
    if x.rank() < 3 {
        return Err(c.invalid(format!("input {}: [n, c, …] expected", x.ty)));
    }
    let to = x.dtype();
    let x = b.cast(x, to.compute())?;
    let axes: Vec<usize> = (2..x.rank()).collect();
    let (d, r, _) = moments(b, &x, &axes, eps)?;
    let n = b.scalar(S::Mul, &[&d, &r])?;
    let (scale, bias) = (b.cast(c.arg(1)?, x.dtype())?, b.cast(c.arg(2)?, x.dtype())?);
    let y = affine(b, c, &n, &scale, &bias)?;
    one(b.cast(&y, to)?)
}

/// `x * scale + bias` with one scale and bias per channel.
fn affine(b: &mut Builder, c: &Call<'_>, x: &Value, scale: &Value, bias: &Value) -> Result<Value> {
    let (s, t) = (channels(b, c, scale, x.rank())?, channels(b, c, bias, x.rank())?);
    let y = b.scalar(S::Mul, &[x, &s])?;
    let y = b.scalar(S::Add, &[&y, &t])?;
    if y.shape() == x.shape() {
        return Ok(y);
    }
    Err(c.invalid(format!(
        "scale {} and bias {} must have one element per channel of {}",
        scale.ty, bias.ty, x.ty
    )))
}

/// The statistics are per group of consecutive channels. Scale and bias have one element per group before
/// opset 21, and one per channel from then on.
fn group_normalization(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let (x, eps) = (c.arg(0)?, c.float("epsilon", 1e-5)?);
    float(c, x)?;
    if x.rank() < 2 {
        return Err(c.invalid(format!("input {}: [n, c, …] expected", x.ty)));
    }
    let s = x.shape().clone();
    let (n, channels) = (s[0], s[1].known().ok_or_else(|| symbolic(s[1]))?);
    let groups = c.opt_int("num_groups")?.ok_or_else(|| c.invalid("attribute 'num_groups' is missing"))?;
    let groups = usize::try_from(groups).ok().filter(|g| *g > 0 && channels % g == 0).ok_or_else(|| {
        c.invalid(format!("num_groups is {groups}, which does not divide {channels} channels"))
    })?;
    let size = s[2..].iter().fold(Dim::from(channels / groups), |n, &d| n.mul(d));
    let w = b.cast(x, stash(c)?)?;
    let w = b.reshape(&w, [n, groups.into(), size])?;
    let (d, r, _) = moments(b, &w, &[2], eps)?;
    let y = b.scalar(S::Mul, &[&d, &r])?;
    let y = b.cast(&y, x.dtype())?;
    let y = if c.opset < 21 { y } else { b.reshape(&y, &s)? };
    let y = affine(b, c, &y, c.arg(1)?, c.arg(2)?)?;
    one(b.reshape(&y, &s)?)
}

/// `x` divided by its norm of order `p` along an axis; zero if the norm is zero.
fn lp_normalization(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let x = c.arg(0)?;
    float(c, x)?;
    let axis = c.axis(c.int("axis", -1)?, x.rank())?;
    let (to, x) = (x.dtype(), b.cast(x, x.dtype().compute())?);
    let norm = match c.int("p", 2)? {
        1 => {
            let a = b.scalar(S::Abs, &[&x])?;
            b.reduce(R::Sum, &a, &[axis], true)?
        }
        2 => {
            let sq = b.scalar(S::Mul, &[&x, &x])?;
            let sum = b.reduce(R::Sum, &sq, &[axis], true)?;
            b.scalar(S::Sqrt, &[&sum])?
        }
        p => return Err(c.invalid(format!("p is {p}, expected 1 or 2"))),
    };
    let zero = b.lit(&norm, 0.0);
    let none = b.scalar(S::Eq, &[&norm, &zero])?;
    let y = b.scalar(S::Div, &[&x, &norm])?;
    let y = b.scalar(S::Select, &[&none, &zero, &y])?;
    one(b.cast(&y, to)?)
}

/// `(x - mean) / (sqrt(variance) + 1e-9)`. ONNX's function body of the operator has the term 1e-9, but the
/// formula in its description does not.
fn mean_variance(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let x = c.arg(0)?;
    float(c, x)?;
    let axes = c.axes(c.ints("axes")?.unwrap_or(&[0, 2, 3]), x.rank())?;
    let (to, x) = (x.dtype(), b.cast(x, x.dtype().compute())?);
    let m = mean_over(b, &x, &axes, true)?;
    let d = b.scalar(S::Sub, &[&x, &m])?;
    let sq = b.scalar(S::Mul, &[&d, &d])?;
    let var = mean_over(b, &sq, &axes, true)?;
    let root = b.scalar(S::Sqrt, &[&var])?;
    let small = b.lit(&root, 1e-9);
    let root = b.scalar(S::Add, &[&root, &small])?;
    let y = b.scalar(S::Div, &[&d, &root])?;
    one(b.cast(&y, to)?)
}

/// `x / (bias + alpha / size * Σ x²)^beta`. The sum covers `size` neighbouring channels. `(size - 1) / 2` of
/// them, rounded down, come before the channel itself (Krizhevsky et al. 2012).
fn lrn(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let x = c.arg(0)?;
    float(c, x)?;
    if x.rank() < 2 {
        return Err(c.invalid(format!("input {}: [n, c, …] expected", x.ty)));
    }
    let s = x.shape().clone();
    let channels = s[1].known().ok_or_else(|| symbolic(s[1]))?;
    let size = c.opt_int("size")?.ok_or_else(|| c.invalid("attribute 'size' is missing"))?;
    let size = usize::try_from(size)
        .ok()
        .filter(|n| *n > 0)
        .ok_or_else(|| c.invalid(format!("size is {size}, expected at least 1")))?;
    let (to, w) = (x.dtype(), b.cast(x, x.dtype().compute())?);
    let sq = b.scalar(S::Mul, &[&w, &w])?;
    // The mean over the window, padded with zeros. Zeros beyond the number of channels do not change the sum,
    // so the padding is limited.
    let far = channels.saturating_sub(1);
    let (lo, hi) = (((size - 1) / 2).min(far), (size / 2).min(far));
    let kernel = lo + hi + 1;
    let flat = s[2..].iter().fold(Dim::from(1), |n, &d| n.mul(d));
    let rows = b.reshape(&sq, [s[0], 1.into(), s[1], flat])?;
    let id = b.id(&rows)?;
    let id = b.g.pool(
        id,
        Pool {
            kind: PoolKind::Avg { count_include_pad: true },
            kernel: [kernel, 1].into_iter().collect(),
            stride: [1, 1].into_iter().collect(),
            pad: [(lo, hi), (0, 0)].into_iter().collect(),
            dilation: [1, 1].into_iter().collect(),
        },
    )?;
    let mean = b.value(id);
    let mean = b.reshape(&mean, &s)?;
    let alpha = f64::from(c.float("alpha", 1e-4)?) / size as f64 * kernel as f64;
    let (alpha, bias, beta) =
        (b.lit(&mean, alpha), b.lit(&mean, c.float("bias", 1.0)?), b.lit(&mean, c.float("beta", 0.75)?));
    let y = b.scalar(S::Mul, &[&mean, &alpha])?;
    let y = b.scalar(S::Add, &[&y, &bias])?;
    let y = b.scalar(S::Pow, &[&y, &beta])?;
    let y = b.scalar(S::Div, &[&w, &y])?;
    one(b.cast(&y, to)?)
}
