//! Positions of extreme elements, and stable sorts, along an axis.

use crate::Declined;
use crate::cpu::library::CpuKernel;
use crate::cpu::library::index::gather::without;
use crate::cpu::library::wide::{Wide, Widened, with_type};
use crate::cpu::team::{SharedConst, SharedMut};
use crate::library_call::CallForm;
use halcyon_ir::layout::View;
use std::cmp::Ordering;

/// Minimum number of elements that each part of a job reads. A part of a sort may have an eighth of them.
const GRAIN: usize = 16 << 10;

/// Index of the largest or smallest element of each line. If the line contains NaN, the result is the index
/// of a NaN. Of equal elements (or several NaN) the first is taken, or the last if `last` is set.
pub(crate) fn arg_reduce(
    call: &CallForm<'_>,
    max: bool,
    axis: usize,
    last: bool,
) -> Result<CpuKernel, Declined> {
    let [x] = call.inputs else {
        return Err(Declined::because("one operand is needed"));
    };
    let (lines, len, step) = without(&x.view, axis);
    if len == 0 {
        return Err(Declined::because("the axis is empty"));
    }
    let d = x.dtype;
    CpuKernel::new(if max { "cpu.argmax" } else { "cpu.argmin" }, call, move |r| {
        with_type!(d, T => {
            let (s, o) = (SharedConst(r.bufs[0].ptr as *const T), SharedMut(r.bufs[1].ptr as *mut i64));
            r.team.ranges(lines.numel, GRAIN.div_ceil(len), &|a, b| {
                for l in a..b {
                    // SAFETY: `CpuKernel::run` checked that the views lie in their buffers. By the op's
                    // rules, the output has one i64 per line. `len > 0`, and each line has its own result.
                    unsafe {
                        let line = s.get().offset(lines.at(l));
                        *o.get().add(l) = extreme(line, step, len, max, last) as i64;
                    }
                }
            });
        })
    })
}

/// Index of the extreme element of a line.
///
/// # Safety
/// `len > 0` elements are readable from `line` on, `step` apart.
#[inline(always)]
unsafe fn extreme<T: Widened>(line: *const T, step: isize, len: usize, max: bool, last: bool) -> usize {
    // SAFETY: `at` is called with `j < len` only, which the contract makes readable.
    let at = |j: usize| unsafe { (*line.offset(j as isize * step)).wide() };
    let (mut best, mut value) = (0, at(0));
    for j in 1..len {
        let v = at(j);
        let c = match (value.is_nan(), v.is_nan()) {
            (false, false) if max => v.order(value),
            (false, false) => value.order(v),
            (a, b) => b.cmp(&a),
        };
        if c == Ordering::Greater || (last && c == Ordering::Equal) {
            (best, value) = (j, v);
        }
    }
    best
}

/// Indices that sort each line stably; NaN is the largest value.
pub(crate) fn arg_sort(call: &CallForm<'_>, axis: usize, descending: bool) -> Result<CpuKernel, Declined> {
    let [x] = call.inputs else {
        return Err(Declined::because("one operand is needed"));
    };
    let (lines, len, step) = without(&x.view, axis);
    let (outs, _, ostep) = without(&View::dense(&x.view.shape), axis);
    let d = x.dtype;
    CpuKernel::new("cpu.argsort", call, move |r| {
        with_type!(d, T => {
            let (s, o) = (SharedConst(r.bufs[0].ptr as *const T), SharedMut(r.bufs[1].ptr as *mut i64));
            // A smaller grain, because sorting costs more than reading.
            r.team.ranges(if len == 0 { 0 } else { lines.numel }, (GRAIN / 8).div_ceil(len.max(1)), &|a, b| {
                let mut keys: Vec<(<T as Widened>::W, i64)> = Vec::with_capacity(len);
                for l in a..b {
                    let (s0, o0) = (lines.at(l), outs.at(l));
                    keys.clear();
                    // SAFETY: `CpuKernel::run` checked the view; `j < len` lies in the line.
                    keys.extend((0..len).map(|j| unsafe { ((*s.get().offset(s0 + j as isize * step)).wide(), j as i64) }));
                    keys.sort_by(|x, y| if descending { y.0.order(x.0) } else { x.0.order(y.0) });
                    for (j, k) in keys.iter().enumerate() {
                        // SAFETY: by the op's rules, the output is i64 with the operand's shape. One thread
                        // writes a line.
                        unsafe { *o.get().offset(o0 + j as isize * ostep) = k.1 };
                    }
                }
            });
        })
    })
}
