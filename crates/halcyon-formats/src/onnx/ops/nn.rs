//! Matrix products and convolution.

use super::pool::window;
use super::{Row, one, row};
use crate::onnx::build::{Builder, Value};
use crate::onnx::node::Call;
use halcyon_ir::ScalarOp as S;
use halcyon_ir::ops::Conv;
use halcyon_ir::{Dim, NodeId, Result};

pub(super) const ROWS: &[Row] = &[
    row("Conv", 1, &["auto_pad", "dilations", "group", "kernel_shape", "pads", "strides"], conv),
    row("Gemm", 1, &["alpha", "beta", "broadcast", "transA", "transB"], gemm),
    row("MatMul", 1, &[], matmul),
];

fn matmul(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let ids = b.ids(&[c.arg(0)?, c.arg(1)?])?;
    let n = b.g.matmul(ids[0], ids[1])?;
    one(b.value(n))
}

/// `alpha * A' * B' + beta * C`. A' and B' are A and B, transposed if `transA` or `transB` is set. Before
/// opset 7, the attribute `broadcast` states whether C broadcasts.
fn gemm(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    if c.opset >= 7 && c.opt_int("broadcast")?.is_some() {
        return Err(c.invalid("attribute 'broadcast' exists only before opset 7"));
    }
    let mut side = |i: usize, flag: &str| -> Result<NodeId> {
        let x = c.arg(i)?;
        if x.rank() != 2 {
            return Err(c.invalid(format!("operand {i} must be a matrix, found {}", x.ty)));
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

/// The attributes of a convolution of `x` with the weight `w`. Checks the ranks.
pub(super) fn conv_attrs(c: &Call<'_>, x: &Value, w: &Value) -> Result<Conv> {
    if x.rank() < 3 || w.rank() != x.rank() {
        return Err(c.invalid(format!(
            "the input is {}, the weight {}, expected [n, c, …] and [o, c/group, …]",
            x.ty, w.ty
        )));
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
    attrs.pad = win.pad.into();
    Ok(attrs)
}

/// Reshapes a vector so that it broadcasts along axis 1 of a value of rank `rank`, which is at least 2.
pub(super) fn channels(b: &mut Builder, c: &Call<'_>, v: &Value, rank: usize) -> Result<Value> {
    if v.rank() != 1 {
        return Err(c.invalid(format!("expected a vector with one element per channel, found {}", v.ty)));
    }
    let mut s = vec![Dim::from(1); rank - 1];
    s[0] = v.shape()[0];
    b.reshape(v, s)
}
