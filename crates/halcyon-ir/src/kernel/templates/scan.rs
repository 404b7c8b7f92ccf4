//! Running reductions, index of the extreme element, and stable sorts along an axis.

use crate::dtype::DType;
use crate::error::Result;
use crate::kernel::access::{GROUP, Template, typed};
use crate::kernel::{E, Kernel, Launch, Ty};
use crate::ops::ReduceKind;
use crate::target::{Caps, Operand};

fn without(shape: &[usize], axis: usize) -> Vec<usize> {
    shape.iter().enumerate().filter(|(k, _)| *k != axis).map(|(_, &n)| n).collect()
}

fn with<'a>(idx: &[E<'a>], axis: usize, i: E<'a>) -> Vec<E<'a>> {
    let mut v = idx.to_vec();
    v.insert(axis, i);
    v
}

/// Running reduction. One work-item computes each line.
pub(crate) fn scan(
    kind: ReduceKind,
    axis: usize,
    exclusive: bool,
    reverse: bool,
    x: &Operand,
    out: &Operand,
    caps: &Caps,
) -> Result<(Kernel, Launch)> {
    let t = Template::new("scan", GROUP, &[x, out]);
    let (ax, ao) = (t.input(x), t.output(out));
    let b = &t.b;
    let d = x.dtype;
    let len = t.size("len", x.view.shape[axis]);
    let groups = t.points(&without(&x.view.shape, axis), |_, idx| {
        let acc = b.var_of(Ty::of(d), kind.identity(d));
        b.for_(0, len, 1, |s| {
            let at = with(idx, axis, if reverse { len - 1 - s } else { s });
            let before = acc.get();
            let after = typed(b, kind.op(d), d, &[before, ax.load(b, &at)]);
            acc.set(after);
            ao.store(b, &at, if exclusive { before } else { after });
        });
    });
    t.finish(groups, caps.max_groups)
}

/// Whether `a` is strictly before `c`: smaller, or larger if `descending`. NaN counts as the largest value.
fn before<'a>(a: E<'a>, c: E<'a>, descending: bool) -> E<'a> {
    let (a, c) = if descending { (c, a) } else { (a, c) };
    if !a.ty().is_float() {
        return a.lt(c);
    }
    a.lt(c).or(c.is_nan().and(!a.is_nan()))
}

/// Index (i64) of the largest or smallest element of each line; among equal ones, of the first, or of the
/// last if `last` is set. NaN counts as the extreme element.
pub(crate) fn arg_reduce(
    max: bool,
    axis: usize,
    last: bool,
    x: &Operand,
    out: &Operand,
    caps: &Caps,
) -> Result<(Kernel, Launch)> {
    let t = Template::new("arg_reduce", GROUP, &[x, out]);
    let (ax, ao) = (t.input(x), t.output(out));
    let b = &t.b;
    let len = t.size("len", x.view.shape[axis]);
    let keep = out.view.rank() == x.view.rank();
    let groups = t.points(&without(&x.view.shape, axis), |_, idx| {
        let best = b.var(ax.load(b, &with(idx, axis, b.index(0))));
        let place = b.var(b.index(0));
        b.for_(1, len, 1, |s| {
            let (v, top) = (ax.load(b, &with(idx, axis, s)), best.get());
            let mut better = if max { v.gt(top) } else { v.lt(top) };
            if v.ty() == Ty::Bool {
                better = if max { v.and(!top) } else { top.and(!v) };
            }
            if v.ty().is_float() {
                better = better.or(v.is_nan().and(!top.is_nan()));
            }
            if last {
                let mut tie = v.equals(top);
                if v.ty().is_float() {
                    // Only NaN ties with NaN.
                    tie = (tie.and(!top.is_nan())).or(v.is_nan());
                }
                better = better.or(tie);
            }
            b.if_(better, || {
                best.set(v);
                place.set(s);
            });
        });
        let at = if keep { with(idx, axis, b.index(0)) } else { idx.to_vec() };
        ao.store(b, &at, place.get().to(Ty::of(DType::I64)));
    });
    t.finish(groups, caps.max_groups)
}

/// Stable sort of each line: the position of an element is the number of elements that precede it. One
/// work-item per element makes `len` comparisons. Ties are broken by index, so the result does not depend on
/// the order of work-items.
pub(crate) fn arg_sort(
    axis: usize,
    descending: bool,
    x: &Operand,
    out: &Operand,
    caps: &Caps,
) -> Result<(Kernel, Launch)> {
    let t = Template::new("arg_sort", GROUP, &[x, out]);
    let (ax, ao) = (t.input(x), t.output(out));
    let b = &t.b;
    let len = t.size("len", x.view.shape[axis]);
    let groups = t.points(&x.view.shape, |_, idx| {
        let mine = ax.load(b, idx);
        let mine = if mine.ty() == Ty::Bool { mine.to(Ty::U32) } else { mine };
        let rank = b.var(b.index(0));
        b.for_(0, len, 1, |s| {
            let mut at = idx.to_vec();
            at[axis] = s;
            let v = ax.load(b, &at);
            // Bools are compared as numbers.
            let v = if v.ty() == Ty::Bool { v.to(Ty::U32) } else { v };
            let tie = (!before(v, mine, descending)).and(!before(mine, v, descending));
            let ahead = before(v, mine, descending).or(tie.and(s.lt(idx[axis])));
            b.if_(ahead, || rank.set(rank.get() + 1));
        });
        let mut at = idx.to_vec();
        at[axis] = rank.get();
        ao.store(b, &at, idx[axis].to(Ty::I64));
    });
    t.finish(groups, caps.max_groups)
}
