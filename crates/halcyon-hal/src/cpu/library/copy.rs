//! Plain copies.

use crate::cpu::team::{SharedConst, SharedMut, Team};

/// The fewest bytes worth giving to another thread.
const GRAIN: usize = 256 << 10;

/// Copies `bytes` bytes from `src` to `dst`. The ranges may overlap.
///
/// # Safety
/// `src` is readable and `dst` writable for `bytes` bytes, and no other thread accesses the destination or
/// writes the source during the call.
pub(crate) unsafe fn bytes(team: &Team, src: *const u8, dst: *mut u8, bytes: usize) {
    let (s, d) = (src as usize, dst as usize);
    if s.abs_diff(d) < bytes {
        // SAFETY: both ranges are valid by contract. `copy` allows overlap; the parallel copy below does not.
        unsafe { std::ptr::copy(src, dst, bytes) };
        return;
    }
    let (src, dst) = (SharedConst(src), SharedMut(dst));
    team.ranges(bytes, GRAIN, &|a, b| {
        // SAFETY: both ranges are valid by contract and, as their distance is at least `bytes`, do not
        // overlap; parts are disjoint.
        unsafe { std::ptr::copy_nonoverlapping(src.get().add(a), dst.get().add(a), b - a) };
    });
}

/// Copies a strided operand to dense memory.
///
/// # Safety
/// Every element that `walk` visits from `src` is readable; `dst` is writable for `walk.numel` elements and
/// overlaps none of them.
pub(crate) unsafe fn view<T: Copy + Send + Sync>(
    team: &Team,
    src: *const T,
    walk: &super::strided::Walk,
    dst: *mut T,
) {
    let (s, d) = (SharedConst(src), SharedMut(dst));
    let run = walk.run().max(1);
    team.ranges(walk.numel / run, (GRAIN / size_of::<T>() / run).max(1), &|a, b| {
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
