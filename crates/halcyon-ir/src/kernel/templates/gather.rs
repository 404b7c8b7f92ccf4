//! Gathers, scatters, slice updates, class indices and the copies of a concatenation. In gathers and
//! scatters, a negative index counts from the end. The position of a slice update must not be negative. An
//! index or position out of range is clamped and sets the fault word. Scatters are deterministic: one
//! work-item computes each result and applies the updates in order, or looks for the last update.

use crate::error::{Error, Result};
use crate::kernel::access::{Access, GROUP, Template, typed};
use crate::kernel::{Builder, E, Fault, Kernel, Launch, Reduce, Ty};
use crate::ops::ScatterKind;
use crate::ops::element_wise::ScalarOp;
use crate::target::{Caps, Operand};

/// Converts a loaded index to i64 without making an invalid index look valid.
fn wide(raw: E<'_>) -> E<'_> {
    match raw.ty() {
        Ty::U64 => raw.min(u64::MAX >> 1).to(Ty::I64),
        _ => raw.to(Ty::I64),
    }
}

/// Wraps a loaded index and clamps it to `0..n`. Also returns whether it was in range.
fn wrapped<'a>(b: &'a Builder, raw: E<'a>, n: E<'a>) -> (E<'a>, E<'a>) {
    let wide = wide(raw);
    let n64 = n.to(Ty::I64);
    let wide = b.let_(wide.lt(0).select(wide + n64, wide));
    let ok = wide.ge(0).and(wide.lt(n64));
    (wide.min(n64 - 1).max(0).to(n.ty()), ok)
}

pub(super) fn checked<'a>(b: &'a Builder, raw: E<'a>, n: E<'a>, fault: Fault<'a>) -> E<'a> {
    let (i, ok) = wrapped(b, raw, n);
    b.if_(!ok, || fault.set());
    i
}

/// Fails for an axis without elements. Every index is out of range there, and a clamped index needs an
/// element.
fn not_empty(n: usize) -> Result<()> {
    match n {
        0 => Err(Error::argument("gather", "the axis has no elements, so every index is out of range")),
        _ => Ok(()),
    }
}

/// `out[a…, i…, b…] = x[a…, index[i…], b…]`.
pub(crate) fn gather(
    axis: usize,
    x: &Operand,
    index: &Operand,
    out: &Operand,
    caps: &Caps,
) -> Result<(Kernel, Launch)> {
    not_empty(x.view.shape[axis])?;
    let t = Template::new("gather", GROUP, &[x, index, out]);
    let (ax, ai, ao) = (t.input(x), t.input(index), t.output(out));
    let b = &t.b;
    let fault = b.fault();
    let n = t.size("len", x.view.shape[axis]);
    let r = index.view.rank();
    let groups = t.points(&out.view.shape, |_, idx| {
        let i = checked(b, ai.load(b, &idx[axis..axis + r]), n, fault);
        let mut at = idx[..axis].to_vec();
        at.push(i);
        at.extend(&idx[axis + r..]);
        ao.store(b, idx, ax.load(b, &at));
    });
    t.finish(groups, caps.max_groups)
}

/// `out[i…] = x[i… with i_axis = index[i…]]`.
pub(crate) fn gather_elements(
    axis: usize,
    x: &Operand,
    index: &Operand,
    out: &Operand,
    caps: &Caps,
) -> Result<(Kernel, Launch)> {
    not_empty(x.view.shape[axis])?;
    let t = Template::new("gather_elements", GROUP, &[x, index, out]);
    let (ax, ai, ao) = (t.input(x), t.input(index), t.output(out));
    let b = &t.b;
    let fault = b.fault();
    let n = t.size("len", x.view.shape[axis]);
    let groups = t.points(&out.view.shape, |_, idx| {
        let mut at = idx.to_vec();
        at[axis] = checked(b, ai.load(b, idx), n, fault);
        ao.store(b, idx, ax.load(b, &at));
    });
    t.finish(groups, caps.max_groups)
}

fn scatter_op(kind: ScatterKind) -> Option<ScalarOp> {
    match kind {
        ScatterKind::Set => None,
        ScatterKind::Add => Some(ScalarOp::Add),
        ScatterKind::Mul => Some(ScalarOp::Mul),
        ScatterKind::Max => Some(ScalarOp::Max),
        ScatterKind::Min => Some(ScalarOp::Min),
    }
}

/// Scatter along an axis. With `rows`, each element of the index selects a whole slice of the base, and the
/// updates are `[a…, i…, b…]` for an index `[i…]` and a base `[a…, n, b…]`. Otherwise index and updates have
/// the same shape, which is no larger than the base's except along `axis`.
///
/// Each work-item computes one result. It goes, in order, through all updates that have the result's position
/// on the other axes, and applies those whose index equals the result's position along `axis`. This needs no
/// atomics, but the cost of a result grows with the number of updates that it goes through.
pub(crate) fn scatter(
    axis: usize,
    kind: ScatterKind,
    rows: bool,
    [base, index, updates]: [&Operand; 3],
    out: &Operand,
    caps: &Caps,
) -> Result<(Kernel, Launch)> {
    let t = Template::new(
        if rows { "scatter_rows" } else { "scatter_elements" },
        GROUP,
        &[base, index, updates, out],
    );
    let (ax, ai, au, ao) = (t.input(base), t.input(index), t.input(updates), t.output(out));
    let b = &t.b;
    let fault = b.fault();
    let d = base.dtype;
    let n = t.size("len", base.view.shape[axis]);
    let walk: usize = if rows { index.view.numel() } else { index.view.shape[axis] };
    let steps = t.size("steps", walk);
    let idims = t.sizes("i", &index.view.shape);
    let groups = t.points(&out.view.shape, |_, idx| {
        let acc = b.var(ax.load(b, idx));
        // The index may be smaller than the base on the other axes. Results beyond it are unchanged.
        let mut reached: Option<E<'_>> = None;
        if !rows {
            for k in (0..idx.len()).filter(|&k| k != axis) {
                let ok = idx[k].lt(idims[k]);
                reached = Some(reached.map_or(ok, |r| r.and(ok)));
            }
        }
        let visit = || {
            b.for_(0, steps, 1, |s| {
                let (ii, ui) = if rows {
                    let ii = t.split(s, &idims);
                    let mut ui = idx[..axis].to_vec();
                    ui.extend(&ii);
                    ui.extend(&idx[axis + 1..]);
                    (ii, ui)
                } else {
                    let mut ii = idx.to_vec();
                    ii[axis] = s;
                    (ii.clone(), ii)
                };
                let (i, ok) = wrapped(b, ai.load(b, &ii), n);
                b.if_(!ok, || fault.set());
                b.if_(i.equals(idx[axis]), || {
                    let u = au.load(b, &ui);
                    acc.set(match scatter_op(kind) {
                        None => u,
                        Some(op) => typed(b, op, d, &[acc.get(), u]),
                    });
                });
            });
        };
        match reached {
            Some(r) => b.if_(r, visit),
            None => visit(),
        }
        ao.store(b, idx, acc.get());
    });
    t.finish(groups, caps.max_groups)
}

/// Writes `update` at `position` along `axis` of a tensor that is already in the output's buffer. The
/// position is clamped so that the update fits.
pub(crate) fn update_slice(
    axis: usize,
    update: &Operand,
    position: &Operand,
    out: &Operand,
    caps: &Caps,
) -> Result<(Kernel, Launch)> {
    let t = Template::new("update_slice", GROUP, &[update, position, out]);
    let (au, ap, ao) = (t.input(update), t.input(position), t.output(out));
    let b = &t.b;
    let fault = b.fault();
    let room = t.size("room", out.view.shape[axis] - update.view.shape[axis]);
    let groups = t.points(&update.view.shape, |_, idx| {
        let (wide, most) = (b.let_(wide(ap.load(b, &[]))), room.to(Ty::I64));
        b.if_(wide.lt(0).or(wide.gt(most)), || fault.set());
        let start = wide.max(0).min(most).to(room.ty());
        let mut at = idx.to_vec();
        at[axis] = at[axis] + start;
        ao.store(b, &at, au.load(b, idx));
    });
    t.finish(groups, caps.max_groups)
}

/// Writes rows of updates `[a…, i…, b…]` at `index` `[i…]` along `axis` of a tensor `[a…, n, b…]` that is
/// already in the output's buffer. If several updates go to the same place, the last one counts: each update
/// looks for a later one, and is skipped if there is one.
///
/// A workgroup searches and copies one row `[b…]` of an update. On CPUs, and on devices with too small
/// workgroups, a work-item does.
pub(crate) fn set_rows(
    axis: usize,
    index: &Operand,
    updates: &Operand,
    out: &Operand,
    caps: &Caps,
) -> Result<(Kernel, Launch)> {
    let together = !caps.is_cpu && caps.max_workgroup >= GROUP && caps.workgroup_memory >= 4 * GROUP;
    let name = if together { "set_rows" } else { "set_rows_item" };
    let t = Template::new(name, GROUP, &[index, updates, out]);
    let (ai, au, ao) = (t.input(index), t.input(updates), t.output(out));
    let b = &t.b;
    let fault = b.fault();
    let n = t.size("len", out.view.shape[axis]);
    let count = index.view.numel();
    let outer = &out.view.shape[..axis];
    let inner = &out.view.shape[axis + 1..];
    // Without updates nothing is stored, but the kernel still divides by these sizes.
    let sizes: Vec<usize> = index.view.shape.iter().map(|n| (*n).max(1)).collect();
    let (steps, idims) = (t.size("steps", count.max(1)), t.sizes("i", &sizes));
    let (odims, ndims) = (t.sizes("a", outer), t.sizes("b", inner));
    let row = t.size("row", inner.iter().product::<usize>());
    let rows = outer.iter().product::<usize>() * count;
    let all = t.size("rows", rows);
    let (lid, lanes) = if together { (b.local_id(0), i64::from(GROUP)) } else { (b.index(0), 1) };
    let me = if together { b.linear_group() } else { b.linear_id() };
    let exists = b.let_(me.lt(all));
    let me = b.let_(exists.select(me, 0));
    let (a, s) = (b.let_(me.idiv(steps)), b.let_(me.imod(steps)));
    let (at, ii) = (t.split(a, &odims), t.split(s, &idims));
    let (place, ok) = wrapped(b, b.load_if(ai.buf, ai.at(b, &ii), exists), n);
    let place = b.let_(place);
    b.if_(exists.and(!ok), || fault.set());
    let found = b.var_of(Ty::I32, 0);
    b.for_(s + 1 + lid, steps, lanes, |j| {
        let (other, _) = wrapped(b, ai.load(b, &t.split(j, &idims)), n);
        b.if_(other.equals(place), || found.set(1));
    });
    let later = match together {
        true => b.group_reduce(Reduce::Max, found.get(), b.local(Ty::I32, GROUP)),
        false => found.get(),
    };
    let skipped = later.gt(0).or(!exists);
    b.for_(lid, skipped.select(b.index(0), row), lanes, |e| {
        let tail = t.split(e, &ndims);
        let from = [&at[..], &ii, &tail].concat();
        let to = [&at[..], &[place], &tail].concat();
        ao.store(b, &to, au.load(b, &from));
    });
    let groups = if together { rows } else { rows.div_ceil(GROUP as usize) };
    t.finish(groups as u64, caps.max_groups)
}

/// Class labels as indices below `classes`. A label that is out of range or equals `ignore` becomes 0. A
/// label that is out of range and does not equal `ignore` sets the fault word.
pub(crate) fn class_index(
    classes: usize,
    ignore: Option<i64>,
    labels: &Operand,
    out: &Operand,
    caps: &Caps,
) -> Result<(Kernel, Launch)> {
    let t = Template::new("class_index", GROUP, &[labels, out]);
    let (al, ao) = (t.input(labels), t.output(out));
    let b = &t.b;
    let fault = b.fault();
    let n = t.size("classes", classes);
    let groups = t.points(&labels.view.shape, |_, idx| {
        let wide = b.let_(wide(al.load(b, idx)));
        let ok = wide.ge(0).and(wide.lt(n.to(Ty::I64)));
        let ignored = ignore.map(|i| wide.equals(i));
        let fine = ignored.map_or(ok, |i| ok.or(i));
        b.if_(!fine, || fault.set());
        // An ignored label becomes class 0, even if it is in range.
        let counts = ignored.map_or(ok, |i| ok.and(!i));
        ao.store(b, idx, counts.select(wide, 0i64));
    });
    t.finish(groups, caps.max_groups)
}

/// Copies a strided tensor into part of a dense one, from `start` along `axis` (for concatenation).
pub(crate) fn copy(
    axis: usize,
    start: usize,
    x: &Operand,
    out: &Operand,
    caps: &Caps,
) -> Result<(Kernel, Launch)> {
    let t = Template::new("copy", GROUP, &[x, out]);
    let (ax, ao): (Access<'_>, Access<'_>) = (t.input(x), t.output(out));
    let b = &t.b;
    let start = t.size("start", start);
    let groups = t.points(&x.view.shape, |_, idx| {
        let mut at = idx.to_vec();
        if let Some(a) = at.get_mut(axis) {
            *a = *a + start;
        }
        ao.store(b, &at, ax.load(b, idx));
    });
    t.finish(groups, caps.max_groups)
}
