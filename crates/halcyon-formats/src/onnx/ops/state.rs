//! Operators that carry a state from one call to the next.

use super::index::size;
use super::{Row, one, row};
use crate::onnx::build::{Builder, Value};
use crate::onnx::node::Call;
use halcyon_ir::ScalarOp as S;
use halcyon_ir::ops::{Conv, ScatterKind};
use halcyon_ir::{DType, Dim, Result, Scalar, Shape};

pub(super) const ROWS: &[Row] = &[
    row("CausalConvWithState", 27, &["activation"], causal_conv),
    row("TensorScatter", 24, &["axis", "mode"], tensor_scatter),
];

/// A depthwise convolution of at most this many taps becomes a sum of shifted products, which is one fused
/// kernel.
const TAPS: usize = 16;

/// Depthwise convolution over the concatenation of the past state and the input `[n, c, t]`. The new state is
/// the end of the concatenation.
fn causal_conv(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let (x, w) = (c.arg(0)?, c.arg(1)?);
    let silu = match c.string("activation", "none")? {
        "none" => false,
        "silu" | "swish" => true,
        other => return Err(c.invalid(format!("activation '{other}' is not known"))),
    };
    let k = w.shape().last().and_then(|d| d.known());
    let (3, 3, Some(k @ 1..)) = (x.rank(), w.rank(), k) else {
        return Err(
            c.invalid(format!("input is {}, weight {}; expected [n, c, t] and [c, 1, k]", x.ty, w.ty))
        );
    };
    let (n, ch, t) = (x.shape()[0], x.shape()[1], x.shape()[2]);
    if w.shape()[0] != ch || !w.shape()[1].is(1) || w.dtype() != x.dtype() {
        return Err(
            c.invalid(format!("weight is {}, expected [c, 1, k] with c and the type of {}", w.ty, x.ty))
        );
    }
    let past = Shape::from([n, ch, Dim::from(k - 1)]);
    let all = match c.opt(3) {
        Some(p) if *p.shape() != past => {
            return Err(c.invalid(format!("past state {} must be {past}", p.ty)));
        }
        Some(p) => b.concat(&[p, x], 2)?,
        None => {
            let id = b.id(x)?;
            let id = b.g.pad(id, &[0, 0, k - 1], &[0; 3], Scalar::F(0.0))?;
            b.value(id)
        }
    };
    // Half types are summed in f32 and rounded once.
    let via = x.dtype().compute();
    let (wide, w) = (b.cast(&all, via)?, b.cast(w, via)?);
    let mut y = if k <= TAPS {
        let mut sum: Option<Value> = None;
        for j in 0..k {
            let (x, w) = (b.narrow(&wide, 2, Dim::from(j), t)?, b.narrow(&w, 2, Dim::from(j), Dim::from(1))?);
            let w = b.reshape(&w, [Dim::from(1), ch, Dim::from(1)])?;
            let p = b.scalar(S::Mul, &[&x, &w])?;
            sum = Some(match sum {
                Some(s) => b.scalar(S::Add, &[&s, &p])?,
                None => p,
            });
        }
        sum.ok_or_else(|| c.invalid("the kernel is empty"))?
    } else {
        let groups = ch.known().ok_or_else(|| c.unsupported("symbolic channels", "Give concrete shapes"))?;
        let ids = b.ids(&[&wide, &w])?;
        let id = b.g.conv(ids[0], ids[1], Conv { groups, ..Conv::new(1) })?;
        b.value(id)
    };
    if let Some(bias) = c.opt(2) {
        if bias.rank() != 1 || bias.shape()[0] != ch {
            return Err(c.invalid(format!("bias {} must have {ch} elements", bias.ty)));
        }
        let bias = b.cast(bias, via)?;
        let bias = b.reshape(&bias, [ch, Dim::from(1)])?;
        y = b.scalar(S::Add, &[&y, &bias])?;
    }
    if silu {
        y = b.scalar(S::Silu, &[&y])?;
    }
    let y = b.cast(&y, x.dtype())?;
    Ok(vec![y, b.narrow(&all, 2, t, Dim::from(k - 1))?])
}

/// Writes the update into the cache, starting at each sample's write index. In mode `circular`, positions
/// past the end wrap around.
fn tensor_scatter(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let (x, u) = (c.arg(0)?, c.arg(1)?);
    let axis = c.axis(c.int("axis", -2)?, x.rank())?;
    if axis == 0 {
        return Err(c.invalid("axis is 0, which is the batch axis"));
    }
    let fits = u.rank() == x.rank() && (0..x.rank()).all(|a| a == axis || x.shape()[a] == u.shape()[a]);
    let longer = || matches!((u.shape()[axis].known(), x.shape()[axis].known()), (Some(a), Some(n)) if a > n);
    if !fits || longer() {
        return Err(c.invalid(format!("update {} does not fit into {} along axis {axis}", u.ty, x.ty)));
    }
    let circular = match c.string("mode", "linear")? {
        "linear" => false,
        "circular" => true,
        other => return Err(c.invalid(format!("mode '{other}' is not known"))),
    };
    let mut at = super::index::along(b, u.shape()[axis], axis, x.rank())?;
    if let Some(first) = c.opt(2) {
        if first.rank() != 1 || first.shape()[0] != x.shape()[0] {
            return Err(c.invalid(format!(
                "write indices are {}, expected one for each sample of {}",
                first.ty, x.ty
            )));
        }
        let mut s = vec![Dim::from(1); x.rank()];
        s[0] = x.shape()[0];
        let first = b.cast(first, DType::I64)?;
        let first = b.reshape(&first, s)?;
        at = b.scalar(S::Add, &[&at, &first])?;
        let n = size(x.shape()[axis]);
        if circular {
            at = b.scalar(S::Mod, &[&at, &n])?;
        } else {
            // In a scatter, a negative index counts from the end, but here it is an error. It is replaced by
            // an index out of range, which the device reports.
            let (zero, past) = (b.lit(&at, 0), b.lit(&at, i64::MAX >> 1));
            let below = b.scalar(S::Lt, &[&at, &zero])?;
            at = b.scalar(S::Select, &[&below, &past, &at])?;
        }
    }
    let at = b.expand(&at, u.shape())?;
    let ids = b.ids(&[x, &at, u])?;
    let n = b.g.scatter_elements(ids[0], ids[1], ids[2], axis, ScatterKind::Set)?;
    one(b.value(n))
}
