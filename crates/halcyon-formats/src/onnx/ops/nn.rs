//! Matrix products, convolution, normalisation, softmax.

use super::pool::window;
use super::reduce::mean_over;
use super::{Row, one, row};
use crate::onnx::build::{Builder, Value};
use crate::onnx::node::Call;
use halcyon_ir::ScalarOp as S;
use halcyon_ir::op::Conv;
use halcyon_ir::{Dim, Graph, NodeId, Result, Shape};

pub const ROWS: &[Row] = &[
    row("BatchNormalization", 7, &["epsilon", "momentum", "spatial", "training_mode"], batch_normalization),
    row("Conv", 1, &["auto_pad", "dilations", "group", "kernel_shape", "pads", "strides"], conv),
    row("Gemm", 7, &["alpha", "beta", "transA", "transB"], gemm),
    row("InstanceNormalization", 6, &["epsilon"], instance_normalization),
    row("LayerNormalization", 17, &["axis", "epsilon", "stash_type"], layer_normalization),
    row("LogSoftmax", 1, &["axis"], |b, c| softmax(b, c, Graph::log_softmax)),
    row("MatMul", 1, &[], matmul),
    row("Softmax", 1, &["axis"], |b, c| softmax(b, c, Graph::softmax)),
];

fn matmul(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let ids = b.ids(&[c.arg(0)?, c.arg(1)?])?;
    let n = b.g.matmul(ids[0], ids[1])?;
    one(b.value(n))
}

/// `alpha * A' * B' + beta * C`.
fn gemm(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let mut side = |i: usize, flag: &str| -> Result<NodeId> {
        let x = c.arg(i)?;
        if x.rank() != 2 {
            return Err(c.invalid(format!("operand {i} is a matrix, not {}", x.ty)));
        }
        let t = if c.flag(flag, false)? { b.permute(x, &[1, 0])? } else { x.clone() };
        b.id(&t)
    };
    let (l, r) = (side(0, "transA")?, side(1, "transB")?);
    let n = b.g.matmul(l, r)?;
    let y = b.value(n);
    let y = scaled(b, c, &y, "alpha")?;
    let Some(bias) = c.opt(2) else { return one(y) };
    if bias.shape().broadcast(y.shape()).ok().as_ref() != Some(y.shape()) {
        return Err(c.invalid(format!("C {} does not broadcast to {}", bias.ty, y.ty)));
    }
    let bias = scaled(b, c, bias, "beta")?;
    one(b.scalar(S::Add, &[&y, &bias])?)
}

fn scaled(b: &mut Builder, c: &Call<'_>, x: &Value, name: &str) -> Result<Value> {
    let k = c.float(name, 1.0)?;
    if k == 1.0 {
        return Ok(x.clone());
    }
    if !x.dtype().is_float() && k.fract() != 0.0 {
        return Err(c.unsupported(&format!("{name} {k} on {}", x.dtype()), "Use a float type"));
    }
    let k = b.lit(x, k);
    b.scalar(S::Mul, &[x, &k])
}

fn conv(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let (x, w) = (c.arg(0)?, c.arg(1)?);
    let attrs = conv_attrs(c, x, w)?;
    let ids = b.ids(&[x, w])?;
    let id = b.g.conv(ids[0], ids[1], attrs)?;
    let y = b.value(id);
    let Some(bias) = c.opt(2) else { return one(y) };
    let bias = channels(b, c, bias, y.rank())?;
    one(b.scalar(S::Add, &[&y, &bias])?)
}

/// The attributes of a convolution of `x` with the weight `w`, whose ranks are checked.
pub fn conv_attrs(c: &Call<'_>, x: &Value, w: &Value) -> Result<Conv> {
    if x.rank() < 3 || w.rank() != x.rank() {
        return Err(
            c.invalid(format!("input {} and weight {}: [n, c, …] and [o, c/group, …] expected", x.ty, w.ty))
        );
    }
    let n = x.rank() - 2;
    let kernel = w.shape()[2..]
        .iter()
        .map(|d| d.known().ok_or_else(|| c.unsupported("a kernel of symbolic size", "Give concrete shapes")))
        .collect::<Result<Vec<usize>>>()?;
    if c.ints("kernel_shape")?.is_some() && c.sizes("kernel_shape", n, 0)? != kernel {
        return Err(c.invalid(format!("kernel_shape differs from the weight {}", w.ty)));
    }
    let win = window(c, &x.shape()[2..], &kernel)?;
    let mut attrs = Conv::new(n);
    attrs.groups = usize::try_from(c.int("group", 1)?).map_err(|_| c.invalid("group is negative"))?;
    attrs.stride = win.stride.into();
    attrs.dilation = win.dilation.into();
    attrs.pad = win.pad.iter().map(|&(lo, hi)| (lo as i64, hi as i64)).collect();
    Ok(attrs)
}

/// A vector along axis 1 of a shape of `rank`, which is at least 2.
pub fn channels(b: &mut Builder, c: &Call<'_>, v: &Value, rank: usize) -> Result<Value> {
    if v.rank() != 1 {
        return Err(c.invalid(format!("a vector with one element per channel expected, not {}", v.ty)));
    }
    let mut s = vec![Dim::from(1); rank - 1];
    s[0] = v.shape()[0];
    b.reshape(v, s)
}

/// Scale, bias, mean and variance may be of a wider type than the input from version 14 on.
fn batch_normalization(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    if c.flag("training_mode", false)? || (1..5).any(|i| c.wants(i)) {
        return Err(c.unsupported("training mode", "Export the model for inference"));
    }
    if c.opset < 9 && !c.flag("spatial", true)? {
        return Err(c.unsupported("spatial = 0", "Export the model with operator set 9 or newer"));
    }
    let (x, eps) = (c.arg(0)?, c.float("epsilon", 1e-5)?);
    if x.rank() < 2 {
        return Err(c.invalid(format!("input {}: [n, c, …] expected", x.ty)));
    }
    let mut ids = Vec::with_capacity(5);
    for i in 0..5 {
        let v = c.arg(i)?;
        if i > 0 && (v.rank() != 1 || v.shape()[0] != x.shape()[1]) {
            return Err(c.invalid(format!(
                "operand {i} is {}, but {} has {} channels",
                v.ty,
                x.ty,
                x.shape()[1]
            )));
        }
        let v = b.cast(v, x.dtype().compute())?;
        ids.push(b.id(&v)?);
    }
    let y = b.g.batch_norm(ids[0], ids[1], ids[2], ids[3], ids[4], eps.into())?;
    let y = b.g.cast(y, x.dtype())?;
    one(b.value(y))
}

/// Statistics over all axes after the second.
fn instance_normalization(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let (x, eps) = (c.arg(0)?, c.float("epsilon", 1e-5)?);
    if x.rank() < 3 {
        return Err(c.invalid(format!("input {}: [n, c, …] expected", x.ty)));
    }
    let to = x.dtype();
    let x = b.cast(x, to.compute())?;
    let axes: Vec<usize> = (2..x.rank()).collect();
    let (d, r, _) = moments(b, &x, &axes, eps)?;
    let n = b.scalar(S::Mul, &[&d, &r])?;
    let (scale, bias) = (b.cast(c.arg(1)?, x.dtype())?, b.cast(c.arg(2)?, x.dtype())?);
    let (scale, bias) = (channels(b, c, &scale, x.rank())?, channels(b, c, &bias, x.rank())?);
    let y = b.scalar(S::Mul, &[&n, &scale])?;
    let y = b.scalar(S::Add, &[&y, &bias])?;
    one(b.cast(&y, to)?)
}

/// `(x - mean, 1 / sqrt(variance + eps), mean)` over `axes`, which are kept. The variance is the biased one.
fn moments(b: &mut Builder, x: &Value, axes: &[usize], eps: f32) -> Result<(Value, Value, Value)> {
    let m = mean_over(b, x, axes, true)?;
    let d = b.scalar(S::Sub, &[x, &m])?;
    let sq = b.scalar(S::Mul, &[&d, &d])?;
    let var = mean_over(b, &sq, axes, true)?;
    let e = b.lit(&var, eps);
    let ve = b.scalar(S::Add, &[&var, &e])?;
    Ok((d, b.scalar(S::Rsqrt, &[&ve])?, m))
}

fn layer_normalization(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let (x, scale, eps) = (c.arg(0)?, c.arg(1)?, c.float("epsilon", 1e-5)?);
    let axis = c.axis(c.int("axis", -1)?, x.rank())?;
    if c.int("stash_type", 1)? != 1 {
        return Err(c.unsupported("a stash_type other than float", "Export the model with stash_type 1"));
    }
    let mut ids = b.ids(&[x, scale])?;
    if let Some(v) = c.opt(2) {
        ids.push(b.id(v)?);
    }
    let y = b.g.layer_norm(ids[0], ids[1], ids.get(2).copied(), axis, eps.into())?;
    let mut out = vec![b.value(y)];
    if c.wants(1) || c.wants(2) {
        let x = b.cast(x, x.dtype().compute())?;
        let (_, r, m) = moments(b, &x, &(axis..x.rank()).collect::<Vec<_>>(), eps)?;
        out.extend([m, r]);
    }
    Ok(out)
}

/// Before version 13 the operand counts as a matrix: rows are the axes before `axis`, columns those from it on.
fn softmax(
    b: &mut Builder,
    c: &Call<'_>,
    f: fn(&mut Graph, NodeId, usize) -> Result<NodeId>,
) -> Result<Vec<Value>> {
    let x = c.arg(0)?;
    let old = c.opset < 13;
    let axis = c.axis(c.int("axis", if old { 1 } else { -1 })?, x.rank())?;
    if !old || axis + 1 == x.rank() {
        let id = b.id(x)?;
        let n = f(&mut b.g, id, axis)?;
        return one(b.value(n));
    }
    let size = |d: &[Dim]| Shape::from(d).numel();
    let flat = b.reshape(x, [size(&x.shape()[..axis]), size(&x.shape()[axis..])])?;
    let id = b.id(&flat)?;
    let n = f(&mut b.g, id, 1)?;
    let y = b.value(n);
    one(b.reshape(&y, x.shape())?)
}
