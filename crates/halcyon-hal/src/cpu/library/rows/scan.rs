//! Running reductions (cumulative sums and the like) along an axis.

use crate::Declined;
use crate::cpu::library::CpuKernel;
use crate::cpu::library::index::gather::without;
use crate::cpu::library::wide::{Wide, Widened, with_type};
use crate::cpu::team::{SharedConst, SharedMut};
use crate::library_call::CallForm;
use halcyon_ir::layout::View;
use halcyon_ir::ops::ReduceKind;

/// Minimum number of elements that each part of a job scans.
const GRAIN: usize = 16 << 10;

/// Running reduction along `axis`. One thread processes a line, in order. Floats are accumulated in f64 and
/// rounded when they are stored.
pub(crate) fn scan(
    call: &CallForm<'_>,
    kind: ReduceKind,
    axis: usize,
    exclusive: bool,
    reverse: bool,
) -> Result<CpuKernel, Declined> {
    let [x] = call.inputs else {
        return Err(Declined::because("one operand is needed"));
    };
    let (lines, len, step) = without(&x.view, axis);
    let (outs, _, ostep) = without(&View::dense(&x.view.shape), axis);
    let d = x.dtype;
    CpuKernel::new("cpu.scan", call, move |r| {
        with_type!(d, T => {
            let (s, o) = (SharedConst(r.bufs[0].ptr as *const T), SharedMut(r.bufs[1].ptr as *mut T));
            let first = <<T as Widened>::W as Wide>::from_scalar(kind.identity(d));
            r.team.ranges(if len == 0 { 0 } else { lines.numel }, GRAIN.div_ceil(len.max(1)), &|a, b| {
                for l in a..b {
                    let (s0, o0) = (lines.at(l), outs.at(l));
                    let mut acc = first;
                    for j in 0..len {
                        let j = if reverse { len - 1 - j } else { j } as isize;
                        // SAFETY: `CpuKernel::run` checked that both views lie in their buffers. By the op's
                        // rules, the output has the shape and dtype of the operand. The lines of the output
                        // are disjoint, and each is written by one thread.
                        unsafe {
                            let v = (*s.get().offset(s0 + j * step)).wide();
                            let next = match kind {
                                ReduceKind::Sum => acc.add(v),
                                ReduceKind::Prod => acc.mul(v),
                                ReduceKind::Max => acc.larger(v),
                                ReduceKind::Min => acc.smaller(v),
                            };
                            *o.get().offset(o0 + j * ostep) = T::narrow(if exclusive { acc } else { next });
                            acc = next;
                        }
                    }
                }
            });
        })
    })
}
