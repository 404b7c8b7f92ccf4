//! Plain copies.

use crate::cpu::team::{SharedConst, SharedMut, Team};

/// Bytes below which one thread copies alone.
const GRAIN: usize = 256 << 10;

/// `bytes` bytes from `src` to `dst`, which may overlap.
///
/// # Safety
/// Both ranges are valid, and nobody else uses the destination meanwhile.
pub(crate) unsafe fn bytes(team: &Team, src: *const u8, dst: *mut u8, bytes: usize) {
    let (s, d) = (src as usize, dst as usize);
    if s.abs_diff(d) < bytes {
        // SAFETY: the caller's; `copy` allows overlap, which the parts below would not.
        unsafe { std::ptr::copy(src, dst, bytes) };
        return;
    }
    let (src, dst) = (SharedConst(src), SharedMut(dst));
    team.ranges(bytes, GRAIN, &|a, b| {
        // SAFETY: the caller's; parts are disjoint and the ranges do not overlap.
        unsafe { std::ptr::copy_nonoverlapping(src.get().add(a), dst.get().add(a), b - a) };
    });
}

/// Copies a strided operand to dense memory.
///
/// # Safety
/// `src` covers the walk, `dst` its number of elements; they do not overlap.
pub(crate) unsafe fn view<T: Copy + Send + Sync>(
    team: &Team,
    src: *const T,
    walk: &super::num::Walk,
    dst: *mut T,
) {
    let (s, d) = (SharedConst(src), SharedMut(dst));
    let run = walk.run().max(1);
    team.ranges(walk.numel / run, (GRAIN / size_of::<T>() / run).max(1), &|a, b| {
        for i in a..b {
            // SAFETY: the caller's; runs are disjoint in the destination.
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
