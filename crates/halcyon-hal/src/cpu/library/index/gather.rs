//! Kernels that read by index: gather, gather_elements and class_index.

use crate::Declined;
use crate::cpu::library::strided::{Indices, Walk, place};
use crate::cpu::library::wide::with_size;
use crate::cpu::library::{CpuKernel, Run};
use crate::cpu::team::{SharedConst, SharedMut};
use crate::library_call::CallForm;
use halcyon_ir::layout::View;

/// Minimum number of elements in a part of the work.
const GRAIN: usize = 16 << 10;

/// A view without `axis`, and the size and stride of that axis.
pub(crate) fn without(v: &View, axis: usize) -> (Walk, usize, isize) {
    let keep = |k: &usize| *k != axis;
    let shape: Vec<usize> = (0..v.rank()).filter(keep).map(|k| v.shape[k]).collect();
    let strides: Vec<isize> = (0..v.rank()).filter(keep).map(|k| v.strides[k]).collect();
    (Walk::of(&shape, &strides, v.offset), v.shape[axis], v.strides[axis])
}

/// `out[a.., i.., b..] = x[a.., index[i..], b..]`.
pub(crate) fn rows(call: &CallForm<'_>, axis: usize) -> Result<CpuKernel, Declined> {
    let [x, index] = call.inputs else {
        return Err(Declined::because("two operands are needed"));
    };
    let (n, stride) = (x.view.shape[axis], x.view.strides[axis]);
    let idx = Indices::new(index.dtype, &index.view);
    let before = Walk::of(&x.view.shape[..axis], &x.view.strides[..axis], x.view.offset);
    let after = Walk::of(&x.view.shape[axis + 1..], &x.view.strides[axis + 1..], 0);
    let total = before.numel * idx.walk.numel * after.numel;
    if n == 0 && total > 0 {
        return Err(Declined::because("there is nothing to gather from"));
    }
    let d = x.dtype;
    CpuKernel::new("cpu.gather", call, move |r| {
        // SAFETY: `CpuKernel::run` has checked that all views lie in their buffers and that the dense output
        // shares no buffer with an input.
        with_size!(d, T => unsafe { run_rows::<T>(r, n, stride, &idx, &before, &after) })
    })
}

/// The body of [`rows`].
///
/// # Safety
/// The buffers of `r` cover the operands that the walks, `n` and `stride` describe, `n > 0`, and the output
/// is dense, writable and overlaps nothing else.
unsafe fn run_rows<T: Copy + Send + Sync>(
    r: &Run<'_>,
    n: usize,
    stride: isize,
    idx: &Indices,
    before: &Walk,
    after: &Walk,
) {
    let (b, rows) = (after.numel, before.numel * idx.walk.numel);
    let (src, dst) = (SharedConst(r.bufs[0].ptr as *const T), SharedMut(r.bufs[2].ptr as *mut T));
    let ip = SharedConst(r.bufs[1].ptr as *const u8);
    let run = after.run().max(1);
    r.team.ranges(if b == 0 { 0 } else { rows }, GRAIN.div_ceil(b.max(1)), &|from, to| {
        for q in from..to {
            // SAFETY: `run_rows` requires that the walks stay inside their buffers, and `place` returns `i <
            // n`. Parts write disjoint rows of the dense output.
            unsafe {
                let i = place(idx.get(ip.get(), q % idx.walk.numel), n, r.fault);
                let s = src.get().offset(before.at(q / idx.walk.numel) + i as isize * stride);
                let d = dst.get().add(q * b);
                for j in 0..b / run {
                    let s = s.offset(after.at(j * run));
                    if run == 1 {
                        *d.add(j) = *s;
                    } else {
                        std::ptr::copy_nonoverlapping(s, d.add(j * run), run);
                    }
                }
            }
        }
    });
}

/// `out[i..] = x[i..]` with the coordinate on `axis` replaced by `index[i..]`.
pub(crate) fn elements(call: &CallForm<'_>, axis: usize) -> Result<CpuKernel, Declined> {
    let [x, index] = call.inputs else {
        return Err(Declined::because("two operands are needed"));
    };
    let (n, stride) = (x.view.shape[axis], x.view.strides[axis]);
    let idx = Indices::new(index.dtype, &index.view);
    // For each element of the index: the offset in x of its position, without the coordinate on `axis`.
    let mut strides = x.view.strides.clone();
    strides[axis] = 0;
    let at = Walk::of(&index.view.shape, &strides, x.view.offset);
    if n == 0 && at.numel > 0 {
        return Err(Declined::because("there is nothing to gather from"));
    }
    let d = x.dtype;
    CpuKernel::new("cpu.gather_elements", call, move |r| {
        with_size!(d, T => {
            let (src, dst) = (SharedConst(r.bufs[0].ptr as *const T), SharedMut(r.bufs[2].ptr as *mut T));
            let ip = SharedConst(r.bufs[1].ptr as *const u8);
            r.team.ranges(at.numel, GRAIN, &|a, b| {
                for q in a..b {
                    // SAFETY: `CpuKernel::run` has checked that the views lie in their buffers. The op's
                    // rules make the index no larger than x on the other axes; `place` returns `i < n`. Each
                    // `q` writes its own element of the output.
                    unsafe {
                        let i = place(idx.get(ip.get(), q), n, r.fault);
                        *dst.get().add(q) = *src.get().offset(at.at(q) + i as isize * stride);
                    }
                }
            });
        })
    })
}

/// Class labels as indices below `classes`. The label `ignore` becomes 0. Any other label that is negative or
/// not below `classes` also becomes 0, and sets the fault.
pub(crate) fn class_index(
    call: &CallForm<'_>,
    classes: Option<usize>,
    ignore: Option<i64>,
) -> Result<CpuKernel, Declined> {
    let ([labels], Some(n)) = (call.inputs, classes) else {
        return Err(Declined::because("one operand and a number of classes are needed"));
    };
    let labels = Indices::new(labels.dtype, &labels.view);
    CpuKernel::new("cpu.class_index", call, move |r| {
        let (src, dst) = (SharedConst(r.bufs[0].ptr as *const u8), SharedMut(r.bufs[1].ptr as *mut i64));
        r.team.ranges(labels.walk.numel, GRAIN, &|a, b| {
            for q in a..b {
                // SAFETY: `CpuKernel::run` has checked that the view lies in its buffer and that the output
                // is dense and writable. Each `q` writes its own element of the output.
                unsafe {
                    let l = labels.get(src.get(), q);
                    let (ok, ignored) = (l >= 0 && (l as u64) < n as u64, Some(l) == ignore);
                    if !ok && !ignored {
                        r.fault.set();
                    }
                    *dst.get().add(q) = if ok && !ignored { l } else { 0 };
                }
            }
        });
    })
}
