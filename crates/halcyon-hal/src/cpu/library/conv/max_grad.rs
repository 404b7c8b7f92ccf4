//! The gradient of max pooling in f32, for windows that do not overlap. Each input element then gets the
//! gradient of at most one window. No sums are needed, so whole lines are computed with vector instructions.

use super::window::Window;
use crate::cpu::sys::{Isa, dispatch};
use crate::cpu::team::{SharedConst, SharedMut, Team};

/// Whether no two windows share an input element.
pub(in crate::cpu::library) fn is_separate(w: &Window) -> bool {
    (0..3).all(|a| w.stride[a] >= w.kernel[a] && w.dilation[a] == 1 && w.input_dilation[a] == 1)
}

/// No tap has been read yet.
const NONE: u32 = u32::MAX;

/// One line of the output.
struct Line<'a> {
    w: &'a Window,
    /// The planes of one channel: the input and its gradient. The gradient is zero where no line has written
    /// to it.
    x: &'a [f32],
    dx: &'a mut [f32],
    dy: &'a [f32],
    od: usize,
    oh: usize,
    /// For each output of the line, the largest element so far and the tap of this element.
    best: &'a mut [f32],
    which: &'a mut [u32],
}

/// Keeps the largest element. If several are equal, the first is kept. NaN counts as the largest.
#[inline(always)]
fn take(best: &mut f32, which: &mut u32, v: f32, tap: u32) {
    let larger = v > *best || (v.is_nan() && !best.is_nan()) || *which == NONE;
    *best = if larger { v } else { *best };
    *which = if larger { tap } else { *which };
}

#[inline(always)]
fn line_body<const FMA: bool>(l: Line<'_>) {
    let w = l.w;
    l.best.fill(f32::NEG_INFINITY);
    l.which.fill(NONE);
    // The first pass finds the largest element of each window. The second pass writes the gradient to this
    // element, and 0 to the others.
    for write in [false, true] {
        let mut tap = 0;
        for td in 0..w.kernel[0] {
            for th in 0..w.kernel[1] {
                let line = w.read(0, l.od, td).zip(w.read(1, l.oh, th));
                for tw in 0..w.kernel[2] {
                    tap += 1;
                    let (lo, hi) = w.span(2, tw);
                    let Some((d, h)) = line.filter(|_| lo < hi) else { continue };
                    let from = (d * w.input[1] + h) * w.input[2] + w.at(2, lo, tw) as usize;
                    let (best, which) = (&mut l.best[lo..hi], &mut l.which[lo..hi]);
                    if !write {
                        let x = &l.x[from..];
                        let n = best.len();
                        let all = best.iter_mut().zip(which.iter_mut());
                        match w.stride[2] {
                            1 => all.zip(x).for_each(|((b, i), x)| take(b, i, *x, tap)),
                            2 => {
                                // Indexing an array of two elements needs no bounds checks.
                                let (pairs, rest) = x.as_chunks::<2>();
                                all.zip(pairs).for_each(|((b, i), x)| take(b, i, x[0], tap));
                                if let (true, [x, ..]) = (n > pairs.len(), rest) {
                                    take(&mut best[n - 1], &mut which[n - 1], *x, tap);
                                }
                            }
                            s => all.zip(x.iter().step_by(s)).for_each(|((b, i), x)| take(b, i, *x, tap)),
                        }
                        continue;
                    }
                    let dx = &mut l.dx[from..];
                    let all = which.iter().zip(&l.dy[lo..hi]);
                    let value = |(i, g): (&u32, &f32)| if *i == tap { *g } else { 0.0 };
                    match w.stride[2] {
                        1 => dx.iter_mut().zip(all).for_each(|(d, p)| *d = value(p)),
                        2 => {
                            let (pairs, rest) = dx.as_chunks_mut::<2>();
                            let n = pairs.len();
                            pairs.iter_mut().zip(all.clone()).for_each(|(d, p)| d[0] = value(p));
                            rest.iter_mut().zip(all.skip(n)).for_each(|(d, p)| *d = value(p));
                        }
                        s => dx.iter_mut().step_by(s).zip(all).for_each(|(d, p)| *d = value(p)),
                    }
                }
            }
        }
    }
}
dispatch! {
    fn line[][](isa, l: Line<'_>) = line_body
}

/// The gradient for `planes` planes (batch size times channels).
///
/// # Safety
/// `x` has `planes * window.in_size()` readable elements, and `dy` has `planes * window.out_size()`. `dx` is
/// writable for as many elements as `x`, and nothing else uses `dx`. `x`, `dy` and `dx` do not overlap.
pub(in crate::cpu::library) unsafe fn run(
    team: &Team,
    isa: Isa,
    planes: usize,
    window: &Window,
    (x, dy): (*const f32, *const f32),
    dx: *mut f32,
) {
    let (n_in, n_out, ow) = (window.in_size(), window.out_size(), window.output[2]);
    let (xs, gs, out) = (SharedConst(x), SharedConst(dy), SharedMut(dx));
    team.ranges(planes, (8192 / (n_out * window.kernel_size()).max(1)).max(1), &|a, b| {
        let (mut best, mut which) = (vec![0f32; ow], vec![0u32; ow]);
        for q in a..b {
            // SAFETY: the contract makes all planes valid; ranges are disjoint.
            let (x, g, dx) = unsafe {
                (
                    std::slice::from_raw_parts(xs.get().add(q * n_in), n_in),
                    std::slice::from_raw_parts(gs.get().add(q * n_out), n_out),
                    {
                        // The output may be uninitialised memory.
                        std::ptr::write_bytes(out.get().add(q * n_in), 0, n_in);
                        std::slice::from_raw_parts_mut(out.get().add(q * n_in), n_in)
                    },
                )
            };
            for (i, dy) in g.chunks_exact(ow.max(1)).enumerate() {
                let (od, oh) = (i / window.output[1], i % window.output[1]);
                line(isa, Line { w: window, x, dx, dy, od, oh, best: &mut best, which: &mut which });
            }
        }
    });
}
