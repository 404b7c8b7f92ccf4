//! Depthwise convolution and pooling of bf16 images in blocks of 32 channels: on vectors of f32, for every
//! instruction set.

use super::blocked_tile::Act;
use super::blocked16::{After, PARTS, by_place};
use super::blocked16_tile::{BLOCK, Finish16, PIXELS, Place, Sums, finish};
use super::conv::Conv;
use super::pool::{Pool, counts};
use super::simd::{Simd, dispatch_simd};
use super::window::Window;
use crate::cpu::sys::Isa;
use crate::cpu::team::{SharedConst, SharedMut, Team};
use half::bf16;
use std::mem::MaybeUninit;

/// Pixels whose sums are finished together.
const RUN: usize = 2 * PIXELS;
/// Pixels of a register tile.
const WIDE: usize = 4;
/// Vectors of a block with the shortest vectors.
const VECTORS: usize = BLOCK / 4;

// What the taps of a window become.
const WEIGHTED: u8 = 0;
const LARGEST: u8 = 1;
const SUM: u8 = 2;

/// A depthwise convolution over whole blocks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Depthwise16 {
    conv: Conv,
}

impl Depthwise16 {
    /// `None` where it is not one, or not of whole blocks, or has three spatial axes or spread inputs.
    pub(crate) fn new(conv: Conv) -> Option<Depthwise16> {
        let w = &conv.window;
        let each = conv.groups == conv.c_in && conv.groups == conv.c_out && conv.c_in.is_multiple_of(BLOCK);
        let flat = w.input[0] == 1 && w.kernel[0] == 1 && w.output[0] == 1 && w.pad_lo[0] == 0;
        let some = conv.output_len() > 0 && conv.input_len() > 0 && w.kernel_size() > 0;
        (each && flat && some && w.input_dilation == [1; 3]).then_some(Depthwise16 { conv })
    }

    /// Floats of the weights as the kernel reads them.
    pub(crate) fn weights(&self) -> usize {
        self.conv.weight_len()
    }

    /// Packs `[C, 1, KH, KW]` of bf16 as `[C / 32, KH, KW, 32]` of f32.
    ///
    /// # Safety
    /// All weights are readable at `w`; [`Depthwise16::weights`] floats are writable at `to` and overlap
    /// nothing else.
    pub(crate) unsafe fn pack(&self, w: *const u16, to: *mut f32) {
        let taps = self.conv.window.kernel_size();
        for c in 0..self.conv.c_in {
            for t in 0..taps {
                // SAFETY: the caller's.
                unsafe {
                    let v = bf16::from_bits(*w.add(c * taps + t)).to_f32();
                    *to.add((c / BLOCK * taps + t) * BLOCK + c % BLOCK) = v;
                }
            }
        }
    }

    /// The convolution.
    ///
    /// # Safety
    /// `x` covers the input, `w` what [`Depthwise16::pack`] wrote, `y` the output, which overlaps nothing
    /// else; the pointers of `after` cover what it says.
    pub(crate) unsafe fn run(
        &self,
        team: &Team,
        isa: Isa,
        x: *const u16,
        w: *const f32,
        y: *mut u8,
        after: After,
    ) {
        let (window, blocks) = (&self.conv.window, self.conv.c_in / BLOCK);
        let (xs, ws, ys) = (SharedConst(x), SharedConst(w), SharedMut(y));
        let bf16 = isa.has_bf16();
        each_run(team, window, (self.conv.batch, blocks), &|plane, row, first, n| {
            let block = plane % blocks;
            let channel = |v: SharedConst<f32>| match v.get().is_null() {
                true => v.get(),
                false => v.get().wrapping_add(block * BLOCK),
            };
            let at = ((plane * window.output[1] + row) * window.output[2] + first) * BLOCK;
            let residual = Place { at: after.residual.get() as *mut u8, wide: after.residual_wide };
            let f = Finish16 {
                scale: channel(after.scale),
                bias: channel(after.bias),
                residual: residual.after(at),
                act: after.act,
                y: Place { at: ys.get(), wide: after.wide }.after(at),
            };
            let mut sums = MaybeUninit::<Sums>::uninit();
            // SAFETY: the caller's; runs are disjoint, and their sums are written before they are read.
            unsafe {
                let sums = (&mut *sums.as_mut_ptr()).0.as_mut_ptr();
                let x = xs.get().add(plane * window.in_size() * BLOCK);
                let w = ws.get().add(block * window.kernel_size() * BLOCK);
                taps::<WEIGHTED>(isa, window, row, first, n, x, w, sums);
                finish(isa, bf16, n, sums, &f);
            }
        });
    }
}

/// Pools images of so many blocks of channels.
///
/// # Safety
/// `x` covers the window's input in pixels of a block for each block of each image, `y` its output; they do
/// not overlap.
pub(crate) unsafe fn pool(
    team: &Team,
    isa: Isa,
    kind: Pool,
    (images, blocks): (usize, usize),
    w: &Window,
    x: *const u16,
    y: *mut u16,
) {
    let (xs, ys) = (SharedConst(x), SharedMut(y));
    let bf16 = isa.has_bf16();
    each_run(team, w, (images, blocks), &|plane, row, first, n| {
        let mut sums = MaybeUninit::<Sums>::uninit();
        // SAFETY: the caller's; runs are disjoint, and their sums are written before they are read.
        unsafe {
            let sums = (&mut *sums.as_mut_ptr()).0.as_mut_ptr();
            let x = xs.get().add(plane * w.in_size() * BLOCK);
            let none = std::ptr::null();
            match kind {
                Pool::Max => taps::<LARGEST>(isa, w, row, first, n, x, none, sums),
                Pool::Average { count_include_pad } => {
                    taps::<SUM>(isa, w, row, first, n, x, none, sums);
                    let down = counts(w, 1, row);
                    for p in 0..n {
                        let across = counts(w, 2, first + p);
                        let many = if count_include_pad { down.0 * across.0 } else { down.1 * across.1 };
                        let sums = std::slice::from_raw_parts_mut(sums.add(p * BLOCK), BLOCK);
                        sums.iter_mut().for_each(|v| *v /= many as f32);
                    }
                }
            }
            let at = ((plane * w.output[1] + row) * w.output[2] + first) * BLOCK;
            let y = Place { at: ys.get().add(at) as *mut u8, wide: false };
            let f = Finish16 { scale: none, bias: none, residual: Place::NONE, act: Act::None, y };
            finish(isa, bf16, n, sums, &f);
        }
    });
}

/// Calls `f(plane, row, first, n)` for all pixels of the output, in runs of at most [`RUN`] of a row. Parts
/// are rows of all of an image's blocks of channels, as convolutions are cut.
fn each_run(
    team: &Team,
    w: &Window,
    (images, blocks): (usize, usize),
    f: &(dyn Fn(usize, usize, usize, usize) + Sync),
) {
    let (rows, cols) = (w.output[1], w.output[2]);
    let want = (PARTS * team.threads()).div_ceil(images.max(1));
    let grain = (4096 / (cols * blocks * w.kernel_size()).max(1)).max(1);
    let parts = (rows / grain).clamp(1, want);
    by_place(team, images * parts, &|_, p| {
        let (image, k) = (p / parts, p % parts);
        for block in 0..blocks {
            for row in rows * k / parts..rows * (k + 1) / parts {
                for first in (0..cols).step_by(RUN) {
                    f(image * blocks + block, row, first, RUN.min(cols - first));
                }
            }
        }
    });
}

dispatch_simd! {
    /// The taps of pixels `first..first + n` of a row of the output: weighted and added, the largest, or
    /// added.
    ///
    /// # Safety
    /// `x` covers the window's input, `weights` its taps where they are weighted, `sums` `n` pixels.
    unsafe fn taps[const K: u8][K](
        isa,
        w: &Window,
        row: usize,
        first: usize,
        n: usize,
        x: *const u16,
        weights: *const f32,
        sums: *mut f32,
    ) = taps_body
}

#[inline(always)]
unsafe fn taps_body<S: Simd, const K: u8>(
    w: &Window,
    row: usize,
    first: usize,
    n: usize,
    x: *const u16,
    weights: *const f32,
    sums: *mut f32,
) {
    let mut done = 0;
    let wide = w.input[2] as isize;
    while done < n {
        let o = first + done;
        let inside = done + WIDE <= n && w.at(2, o, 0) >= 0 && w.at(2, o + WIDE - 1, w.kernel[2] - 1) < wide;
        // SAFETY: the caller's.
        unsafe {
            let sums = sums.add(done * BLOCK);
            if inside {
                pixels::<S, K, WIDE>(w, row, o, x, weights, sums);
                done += WIDE;
            } else {
                pixels::<S, K, 1>(w, row, o, x, weights, sums);
                done += 1;
            }
        }
    }
}

#[inline(always)]
unsafe fn pixels<S: Simd, const K: u8, const T: usize>(
    w: &Window,
    row: usize,
    o: usize,
    x: *const u16,
    weights: *const f32,
    sums: *mut f32,
) {
    let wide = w.input[2] as isize;
    let step = w.stride[2] * BLOCK;
    // SAFETY: the caller's; taps outside of the image are left out.
    unsafe {
        let none = if K == LARGEST { S::splat(f32::NEG_INFINITY) } else { S::zero() };
        let mut acc = [[none; VECTORS]; T];
        for i in 0..w.kernel[1] {
            let Some(h) = w.read(1, row, i) else { continue };
            for j in 0..w.kernel[2] {
                let col = w.at(2, o, j);
                if T == 1 && (col < 0 || col >= wide) {
                    continue;
                }
                let x = x.add((h * w.input[2] + col as usize) * BLOCK) as *const bf16;
                let tap = weights.wrapping_add((i * w.kernel[2] + j) * BLOCK);
                for v in 0..BLOCK / S::W {
                    let weight = if K == WEIGHTED { S::load(tap.add(v * S::W)) } else { none };
                    for (t, acc) in acc.iter_mut().enumerate() {
                        let x = S::load_bf16(x.add(t * step + v * S::W));
                        acc[v] = match K {
                            WEIGHTED => S::fma(x, weight, acc[v]),
                            LARGEST => S::max_nan(acc[v], x),
                            _ => S::add(acc[v], x),
                        };
                    }
                }
            }
        }
        for (t, acc) in acc.iter().enumerate() {
            for v in 0..BLOCK / S::W {
                S::store(sums.add(t * BLOCK + v * S::W), acc[v]);
            }
        }
    }
}
