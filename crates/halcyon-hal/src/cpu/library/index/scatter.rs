//! Scatter ops and updates of a slice. One thread applies all updates of an element, in index order.

use super::gather::without;
use crate::Declined;
use crate::cpu::library::strided::{Indices, Walk, place};
use crate::cpu::library::wide::{Wide, Widened, with_size, with_type};
use crate::cpu::library::{CpuKernel, Run};
use crate::cpu::team::{SharedConst, SharedMut, Team};
use crate::library_call::CallForm;
use halcyon_ir::layout::dense_strides;
use halcyon_ir::ops::ScatterKind;

/// Minimum number of updates that each part of a job applies.
const GRAIN: usize = 8 << 10;

/// Applies the update `u` to the element at `d`.
///
/// # Safety
/// `d` is readable and writable, and no other thread uses it.
#[inline(always)]
unsafe fn put<T: Widened>(kind: ScatterKind, d: *mut T, u: T) {
    // SAFETY: the contract makes `d` valid and exclusive.
    unsafe {
        let old = || (*d).wide();
        *d = match kind {
            ScatterKind::Set => u,
            ScatterKind::Add => T::narrow(old().add(u.wide())),
            ScatterKind::Mul => T::narrow(old().mul(u.wide())),
            ScatterKind::Max => T::narrow(old().larger(u.wide())),
            ScatterKind::Min => T::narrow(old().smaller(u.wide())),
        }
    }
}

/// Copies the base to the output, unless they are the same buffer.
///
/// # Safety
/// Buffer 0 of `r` holds the view `base`, buffer 3 a dense output of `base.numel` elements of type T; they
/// are the same or do not overlap.
unsafe fn start<T: Copy + Send + Sync>(r: &Run<'_>, base: &Walk) {
    let (s, d) = (r.bufs[0].ptr as *const T, r.bufs[3].ptr as *mut T);
    if !std::ptr::eq(s, d) {
        // SAFETY: the contract makes both ranges valid and disjoint, since they are not the same buffer.
        unsafe { copy_view(r.team, s, base, d) };
    }
}

/// Declines an in-place call whose base is not dense.
fn in_place_ok(call: &CallForm<'_>) -> Result<(), Declined> {
    if call.in_place > 0 && !call.inputs[0].view.is_dense() {
        return Err(Declined::because("in place, the base must be dense"));
    }
    Ok(())
}

/// Returns a kernel that copies the base to the output and then, for every position `p` of the index,
/// combines `updates[p]` with the output's element at `p`, where the coordinate along `axis` is replaced by
/// `index[p]`.
pub(crate) fn elements(call: &CallForm<'_>, axis: usize, kind: ScatterKind) -> Result<CpuKernel, Declined> {
    let [base, index, updates] = call.inputs else {
        return Err(Declined::because("three operands are needed"));
    };
    let from = Walk::new(&base.view);
    let out = dense_strides(&base.view.shape);
    let n = base.view.shape[axis];
    // Each thread processes whole lines along the axis, because different lines write different elements.
    let (il, len, istep) = without(&index.view, axis);
    let (ul, _, ustep) = without(&updates.view, axis);
    let lines: Vec<usize> =
        (0..index.view.rank()).filter(|k| *k != axis).map(|k| index.view.shape[k]).collect();
    let line_strides: Vec<isize> = (0..out.len()).filter(|k| *k != axis).map(|k| out[k]).collect();
    let ol = Walk::of(&lines, &line_strides, 0);
    if n == 0 && len * il.numel > 0 {
        return Err(Declined::because("there is nothing to scatter into"));
    }
    let (step, d) = (out[axis], base.dtype);
    // Reads the index at an address that is computed below.
    let one = Indices::new(index.dtype, &halcyon_ir::layout::View::dense(&[]));
    let isize_of = index.dtype.size() as isize;
    CpuKernel::new("cpu.scatter_elements", call, move |r| {
        with_type!(d, T => {
            // SAFETY: `CpuKernel::run` checked the base's view and the dense output, which overlaps no other
            // operand.
            unsafe { start::<T>(r, &from) };
            let (u, o) = (SharedConst(r.bufs[2].ptr as *const T), SharedMut(r.bufs[3].ptr as *mut T));
            let ip = SharedConst(r.bufs[1].ptr as *const u8);
            r.team.ranges(if len == 0 { 0 } else { il.numel }, GRAIN.div_ceil(len.max(1)), &|a, b| {
                for l in a..b {
                    let (i0, u0, o0) = (il.at(l), ul.at(l), ol.at(l));
                    for j in 0..len as isize {
                        // SAFETY: `CpuKernel::run` checked that the views lie in their buffers. By the op's
                        // rules, the updates have the shape of the index, which fits the base. `place` keeps
                        // the index below `n`, and lines are disjoint.
                        unsafe {
                            let i = one.get(ip.get().offset((i0 + j * istep) * isize_of), 0);
                            let at = o0 + place(i, n, r.fault) as isize * step;
                            put(kind, o.get().offset(at), *u.get().offset(u0 + j * ustep));
                        }
                    }
                }
            });
        })
    })
}

/// Returns a kernel that copies the base to the output and then combines `updates[a.., i.., b..]` with
/// `out[a.., index[i..], b..]`, for all positions `a` before the axis, `i` in the index and `b` after the
/// axis. In place, nothing is copied.
pub(crate) fn rows(call: &CallForm<'_>, axis: usize, kind: ScatterKind) -> Result<CpuKernel, Declined> {
    let [base, index, updates] = call.inputs else {
        return Err(Declined::because("three operands are needed"));
    };
    in_place_ok(call)?;
    let from = Walk::new(&base.view);
    let idx = Indices::new(index.dtype, &index.view);
    let ups = Walk::new(&updates.view);
    let n = base.view.shape[axis];
    let outer: usize = base.view.shape[..axis].iter().product();
    let inner: usize = base.view.shape[axis + 1..].iter().product();
    let count = idx.walk.numel;
    if n == 0 && outer * count * inner > 0 {
        return Err(Declined::because("there is nothing to scatter into"));
    }
    let d = base.dtype;
    CpuKernel::new("cpu.scatter_rows", call, move |r| {
        with_type!(d, T => {
            // SAFETY: `CpuKernel::run` checked the base's view and the dense output, which in place is the
            // base's buffer and else overlaps no other operand.
            unsafe { start::<T>(r, &from) };
            let (u, o) = (SharedConst(r.bufs[2].ptr as *const T), SharedMut(r.bufs[3].ptr as *mut T));
            let ip = SharedConst(r.bufs[1].ptr as *const u8);
            // A column has one position before the axis and one after it. Each thread processes whole
            // columns, so that the updates of one element keep their order.
            let columns = if count == 0 { 0 } else { outer * inner };
            r.team.ranges(columns, GRAIN.div_ceil(count.max(1)), &|a, b| {
                let mut c = a;
                while c < b {
                    let (p, q) = (c / inner, c % inner);
                    let width = (inner - q).min(b - c);
                    for i in 0..count {
                        // SAFETY: `CpuKernel::run` checked that the views lie in their buffers. By the op's
                        // rules, the updates have `outer x count x inner` elements and the output the shape
                        // of the base. `place` keeps the row below `n`, and columns are disjoint.
                        unsafe {
                            let row = place(idx.get(ip.get(), i), n, r.fault);
                            let to = o.get().add((p * n + row) * inner + q);
                            let first = (p * count + i) * inner + q;
                            if ups.is_contiguous() {
                                let s = u.get().offset(ups.at(first));
                                for j in 0..width {
                                    put(kind, to.add(j), *s.add(j));
                                }
                            } else {
                                for j in 0..width {
                                    put(kind, to.add(j), *u.get().offset(ups.at(first + j)));
                                }
                            }
                        }
                    }
                    c += width;
                }
            });
        })
    })
}

/// Greatest common divisor, at least 1.
fn common(a: usize, b: usize) -> usize {
    if b == 0 { a.max(1) } else { common(b, a % b) }
}

/// `out = base; out[.., p .. p + len, ..] = update` along the axis, where `p` is a scalar on the device. A
/// `p` that is negative, or so large that the update would reach past the end, is clamped and sets the fault.
/// In place, only the update is written.
pub(crate) fn update_slice(call: &CallForm<'_>, axis: usize) -> Result<CpuKernel, Declined> {
    let [base, update, position] = call.inputs else {
        return Err(Declined::because("three operands are needed"));
    };
    in_place_ok(call)?;
    let from = Walk::new(&base.view);
    let up = Walk::new(&update.view);
    let pos = Indices::new(position.dtype, &position.view);
    let (n, len) = (base.view.shape[axis], update.view.shape[axis]);
    let Some(room) = n.checked_sub(len) else {
        return Err(Declined::because("the update is longer than the base"));
    };
    let inner: usize = base.view.shape[axis + 1..].iter().product();
    let outer: usize = base.view.shape[..axis].iter().product();
    let d = base.dtype;
    CpuKernel::new("cpu.update_slice", call, move |r| {
        with_size!(d, T => {
            // SAFETY: `CpuKernel::run` checked the base's view, the dense output, and the position's one
            // element.
            let p = unsafe {
                start::<T>(r, &from);
                pos.get(r.bufs[2].ptr, 0)
            };
            if p < 0 || p as u64 > room as u64 {
                r.fault.set();
            }
            let p = p.clamp(0, room as i64) as usize;
            let (u, o) = (SharedConst(r.bufs[1].ptr as *const T), SharedMut(r.bufs[3].ptr as *mut T));
            let each = len * inner;
            let run = common(each, up.run());
            r.team.ranges(if each == 0 { 0 } else { outer * (each / run) }, (GRAIN / run).max(1), &|a, b| {
                for q in a..b {
                    let i = q * run;
                    // SAFETY: `CpuKernel::run` checked the update's view; the runs are disjoint, and lie in
                    // the output because `p <= n - len`.
                    unsafe {
                        let to = o.get().add((i / each * n + p) * inner + i % each);
                        std::ptr::copy_nonoverlapping(u.get().offset(up.at(i)), to, run);
                    }
                }
            });
        })
    })
}

/// Minimum number of bytes that each thread copies.
const COPY_GRAIN: usize = 256 << 10;

/// Copies a strided operand to dense memory.
///
/// # Safety
/// Every element that `walk` visits from `src` is readable; `dst` is writable for `walk.numel` elements and
/// overlaps none of them.
unsafe fn copy_view<T: Copy + Send + Sync>(team: &Team, src: *const T, walk: &Walk, dst: *mut T) {
    let (s, d) = (SharedConst(src), SharedMut(dst));
    let run = walk.run().max(1);
    team.ranges(walk.numel / run, (COPY_GRAIN / size_of::<T>() / run).max(1), &|a, b| {
        for i in a..b {
            // SAFETY: `i * run < walk.numel`, so the run is readable from `src` by contract and its place in
            // `dst` is writable; each run has its own place.
            unsafe {
                let from = s.get().offset(walk.at(i * run));
                if run == 1 {
                    *d.get().add(i) = *from;
                } else {
                    std::ptr::copy_nonoverlapping(from, d.get().add(i * run), run);
                }
            }
        }
    });
}
