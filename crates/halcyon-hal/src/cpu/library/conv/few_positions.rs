//! Convolution in f32 with few output positions per image and large kernels. The gradient of a convolution
//! with respect to its weights is such a convolution: its kernel is about as large as the image, and its
//! output is as small as the original kernel.
//!
//! The algorithm of `plain.rs` makes the output positions of one image the columns of a product, so a
//! register tile would be mostly empty. Here the positions of all images are the rows of one product,
//! `[images * positions, K] x [K, channels]`. The rows are unrolled for a few input channels at a time, so
//! that they stay in the second-level cache, and the product of each part is added to the sums.

use super::plain::{Conv, ConvOperands};
use crate::cpu::library::gemm::product_f32::{Epilogue, Gemm, Mat, MatMut, gemm};
use crate::cpu::sys::Isa;
use crate::cpu::team::{SharedConst, SharedMut, Team};

/// The largest number of output positions per image: half of the columns of the widest register tile.
const POSITIONS: usize = 24;
/// The smallest number of terms in the sum of one output element.
const SUMMED: usize = 1024;
/// Floats of unrolled input that are multiplied at a time.
const PART: usize = 1 << 18;

impl Conv {
    /// Whether the algorithm of this file is faster than that of `plain.rs`.
    pub(crate) fn has_few_positions(&self) -> bool {
        let (n, rows) = (self.window.out_size(), self.batch * self.window.out_size());
        self.groups == 1
            && (1..=POSITIONS).contains(&n)
            && self.window.kernel_size() > n
            && self.k() >= SUMMED
            && rows.min(self.c_out) >= 8
            && self.window.input_dilation == [1; 3]
    }
}

/// Convolution with few output positions, without an epilogue. Sums depend on the sizes alone, not on the
/// number of threads.
///
/// # Safety
/// The operands are readable for the lengths that [`ConvOperands`] states; `y` is writable and overlaps
/// nothing else. There is no bias, no ReLU and no chain.
pub(crate) unsafe fn conv_few_positions(team: &Team, isa: Isa, conv: &Conv, o: &ConvOperands<f32>) {
    let w = &conv.window;
    let (taps, n, m) = (w.kernel_size(), w.out_size(), conv.c_out);
    let rows = conv.batch * n;
    let channels = (PART / (rows * taps)).clamp(1, conv.c_in);
    let (unrolled, sums) = (team.scratch(rows * channels * taps), team.scratch(rows * m));
    let (a, c) = (SharedMut(unrolled.ptr()), SharedMut(sums.ptr()));
    let x = SharedConst(o.x);
    let mut from = 0;
    while from < conv.c_in {
        let part = channels.min(conv.c_in - from);
        let width = part * taps;
        let threads = if rows * width < 1 << 14 { 1 } else { rows.min(4 * team.threads()) };
        team.run(threads, &|t| {
            for row in rows * t / threads..rows * (t + 1) / threads {
                let image = row / n;
                // SAFETY: `row < rows` and `from + part <= c_in` select planes of the input, which the
                // contract makes readable; each row of the unrolled input is written by one thread.
                unsafe {
                    let planes = x.get().add((image * conv.c_in + from) * w.in_size());
                    unroll(conv, row % n, part, planes, a.get().add(row * width));
                }
            }
        });
        let weights = Mat { ptr: o.w.wrapping_add(from * taps), rs: 1, cs: conv.k() as isize };
        let left = Mat::rows(a.get() as *const f32, width);
        let g = Gemm::new((rows, m, width), left, weights, MatMut::rows(c.get(), m));
        let beta = if from == 0 { 0.0 } else { 1.0 };
        // SAFETY: `left` has been written above; the contract makes the weights readable; the sums are
        // scratch memory of `rows * m` floats that no other thread uses.
        unsafe { gemm(team, isa, &g.with(Epilogue { beta, ..Epilogue::default() })) };
        from += part;
    }
    let y = SharedMut(o.y);
    let threads = if rows * m < 1 << 14 { 1 } else { conv.batch.min(4 * team.threads()) };
    team.run(threads, &|t| {
        for image in conv.batch * t / threads..conv.batch * (t + 1) / threads {
            for co in 0..m {
                for p in 0..n {
                    // SAFETY: the indices are inside the sums and the output; images of different parts are
                    // disjoint.
                    unsafe {
                        *y.get().add((image * m + co) * n + p) = *c.get().add((image * n + p) * m + co);
                    }
                }
            }
        }
    });
}

/// Writes the input elements that output position `position` reads from `channels` planes: `channels * taps`
/// floats.
///
/// # Safety
/// `x` is readable for `channels` planes of the input; `to` is writable for `channels * taps` floats; `x` and
/// `to` do not overlap.
unsafe fn unroll(conv: &Conv, position: usize, channels: usize, x: *const f32, to: *mut f32) {
    let w = &conv.window;
    let [_, oh, ow] = w.output;
    let (od, oy, ox) = (position / (oh * ow), position / ow % oh, position % ow);
    let (kw, iw) = (w.kernel[2], w.input[2]);
    // The range of taps that lie inside of the line: `lo..hi`.
    let inside = |t: &usize| w.read(2, ox, *t).is_some();
    let lo = (0..kw).find(inside).unwrap_or(kw);
    let hi = (lo..kw).rev().find(inside).map_or(lo, |t| t + 1);
    let (first, step) = (w.read(2, ox, lo).unwrap_or(0), w.dilation[2]);
    let mut to = to;
    for c in 0..channels {
        for td in 0..w.kernel[0] {
            for th in 0..w.kernel[1] {
                // SAFETY: `read` gives positions inside of a plane, and `lo..hi` are taps inside of a line;
                // `to` advances by a line of taps each time, `channels * taps` floats in all.
                unsafe {
                    let line = std::slice::from_raw_parts_mut(to, kw);
                    to = to.add(kw);
                    let (Some(d), Some(h)) = (w.read(0, od, td), w.read(1, oy, th)) else {
                        line.fill(0.0);
                        continue;
                    };
                    line[..lo].fill(0.0);
                    line[hi..].fill(0.0);
                    let from = x.add(c * w.in_size() + (d * w.input[1] + h) * iw + first);
                    match step {
                        1 => std::ptr::copy_nonoverlapping(from, line.as_mut_ptr().add(lo), hi - lo),
                        _ => (lo..hi).for_each(|t| line[t] = *from.add((t - lo) * step)),
                    }
                }
            }
        }
    }
}
