//! Softmax and norms: one group per row, sums and extremes through a tree in workgroup memory.

use super::template::Template;
use super::{E, Kernel, Launch, Local, Reduce, Ty};
use crate::error::Result;
use crate::target::{Caps, Operand};

/// Work-items per row.
const ITEMS: u32 = 128;

/// Rows of a tensor: an axis, or the axes from one on taken together.
struct Rows<'a> {
    len: E<'a>,
    /// `len`, or 0 in a group past the last row.
    todo: E<'a>,
    outer: Vec<E<'a>>,
    inner: Vec<E<'a>>,
    rank: usize,
    axes: std::ops::Range<usize>,
}

impl<'a> Rows<'a> {
    fn declare(t: &'a Template, shape: &[usize], axes: std::ops::Range<usize>) -> Rows<'a> {
        let inside: usize = shape[axes.clone()].iter().product();
        let outside: usize = shape
            .iter()
            .enumerate()
            .filter(|(k, _)| !axes.contains(k))
            .map(|(_, n)| n)
            .product();
        let dims = t.sizes("d", shape);
        let (count, len) = (t.size("rows", outside), t.size("len", inside));
        Rows {
            len,
            todo: t.work(count, len),
            outer: (0..shape.len())
                .filter(|k| !axes.contains(k))
                .map(|k| dims[k])
                .collect(),
            inner: dims[axes.clone()].to_vec(),
            rank: shape.len(),
            axes,
        }
    }

    /// Full index of element `i` of a row with outer index `row`.
    fn at(&self, t: &'a Template, row: &[E<'a>], i: E<'a>) -> Vec<E<'a>> {
        let mut inner = t.split(i, &self.inner).into_iter();
        let mut outer = row.iter();
        (0..self.rank)
            .filter_map(|k| {
                if self.axes.contains(&k) {
                    inner.next()
                } else {
                    outer.next().copied()
                }
            })
            .collect()
    }

    /// Outer index of the group's row.
    fn row(&self, t: &'a Template) -> Vec<E<'a>> {
        t.split(t.b.let_(t.b.linear_group()), &self.outer)
    }

    /// Combines `f` over the row.
    fn reduce(
        &self,
        t: &'a Template,
        op: Reduce,
        ty: Ty,
        scratch: Local<'a>,
        f: impl Fn(E<'a>) -> E<'a>,
    ) -> E<'a> {
        let b = &t.b;
        let acc = b.var_of(ty, op.identity(ty.dtype()));
        b.for_(b.local_id(0), self.todo, ITEMS, |i| {
            acc.set(b.op(op.op(), &[acc.get(), f(i)]))
        });
        b.group_reduce(op, acc.get(), scratch)
    }
}

fn groups(shape: &[usize], axes: &std::ops::Range<usize>) -> u64 {
    shape
        .iter()
        .enumerate()
        .filter(|(k, _)| !axes.contains(k))
        .map(|(_, &n)| n as u64)
        .product()
}

/// `softmax`, or its logarithm, along an axis.
pub(super) fn softmax(
    axis: usize,
    log: bool,
    x: &Operand,
    out: &Operand,
    caps: &Caps,
) -> Result<(Kernel, Launch)> {
    let t = Template::new(if log { "log_softmax" } else { "softmax" }, ITEMS, &[x, out]);
    let (ax, ao) = (t.input(x), t.output(out));
    let axes = axis..axis + 1;
    let rows = Rows::declare(&t, &x.view.shape, axes.clone());
    let (b, ty) = (&t.b, Ty::of(x.dtype));
    let scratch = b.local(ty, ITEMS);
    let row = &rows.row(&t)[..];
    {
        let load = |i| ax.load(b, &rows.at(&t, row, i));
        let max = b.let_(rows.reduce(&t, Reduce::Max, ty, scratch, load));
        let sum = b.let_(rows.reduce(&t, Reduce::Add, ty, scratch, |i| (load(i) - max).exp()));
        let log_sum = if log { b.let_(sum.log()) } else { sum };
        b.for_(b.local_id(0), rows.todo, ITEMS, |i| {
            let at = rows.at(&t, row, i);
            let d = ax.load(b, &at) - max;
            ao.store(b, &at, if log { d - log_sum } else { d.exp() / sum });
        });
    }
    let n = groups(&x.view.shape, &axes);
    drop(rows);
    t.finish(n, caps.max_groups)
}

/// Layer norm over the axes from `axis` on, or with `rms` root-mean-square norm over the last. `scale` and `bias` broadcast to
/// the input. Statistics are in the compute type, the variance from the deviations (two passes).
pub(super) fn norm(
    axis: usize,
    rms: bool,
    eps: f64,
    x: &Operand,
    scale: &Operand,
    bias: Option<&Operand>,
    out: &Operand,
    caps: &Caps,
) -> Result<(Kernel, Launch)> {
    let spread = |o: &Operand| Operand {
        dtype: o.dtype,
        view: o.view.expand(&x.view.shape),
    };
    let scale = spread(scale);
    let bias = bias.map(spread);
    let mut all = vec![x, &scale, out];
    all.extend(bias.as_ref());
    let t = Template::new(if rms { "rms_norm" } else { "layer_norm" }, ITEMS, &all);
    let (ax, ak) = (t.input(x), t.input(&scale));
    let ab = bias.as_ref().map(|b| t.input(b));
    let ao = t.output(out);
    let axes = axis..x.view.rank();
    let rows = Rows::declare(&t, &x.view.shape, axes.clone());
    let (b, ty) = (&t.b, Ty::of(x.dtype));
    let eps = t.float("eps", ty, eps);
    let scratch = b.local(ty, ITEMS);
    let row = &rows.row(&t)[..];
    {
        let load = |i| ax.load(b, &rows.at(&t, row, i));
        let n = rows.len.to(ty);
        let mean = if rms {
            None
        } else {
            Some(b.let_(rows.reduce(&t, Reduce::Add, ty, scratch, load) / n))
        };
        let square = rows.reduce(&t, Reduce::Add, ty, scratch, |i| {
            let d = centred(load(i), mean);
            d * d
        });
        let r = b.let_((square / n + eps).rsqrt());
        b.for_(b.local_id(0), rows.todo, ITEMS, |i| {
            let at = rows.at(&t, row, i);
            let y = centred(ax.load(b, &at), mean) * r * ak.load(b, &at);
            let y = match &ab {
                Some(ab) => y + ab.load(b, &at),
                None => y,
            };
            ao.store(b, &at, y);
        });
    }
    let n = groups(&x.view.shape, &axes);
    drop(rows);
    t.finish(n, caps.max_groups)
}

fn centred<'a>(v: E<'a>, mean: Option<E<'a>>) -> E<'a> {
    match mean {
        Some(m) => v - m,
        None => v,
    }
}
