//! Depthwise convolution and pooling of bf16 images in blocks of 32 channels, on f32 vectors of any
//! instruction set.

use super::blocked_bf16::{Bf16Epilogue, PARTS, by_place};
use super::blocked_bf16_tile::{BLOCK, Bf16TileEpilogue, PIXELS, Place, Sums, finish};
use super::blocked_tile::Activation;
use super::plain::Conv;
use super::pool::{Pool, counts};
use super::window::Window;
use crate::cpu::library::simd::{Simd, dispatch_simd};
use crate::cpu::sys::Isa;
use crate::cpu::team::{SharedConst, SharedMut, Team};
use half::bf16;
use std::mem::MaybeUninit;

/// Pixels that go through the epilogue together.
const RUN: usize = 2 * PIXELS;
/// Pixels of a register tile.
const WIDE: usize = 4;
/// Vectors per block with the shortest vectors.
const VECTORS: usize = BLOCK / 4;

// How the taps of a window are combined.
const WEIGHTED: u8 = 0;
const LARGEST: u8 = 1;
const SUM: u8 = 2;

/// A depthwise convolution over whole blocks of 32 channels.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Depthwise16 {
    conv: Conv,
}

impl Depthwise16 {
    /// `None` if `conv` is not depthwise, if its channels do not come in whole blocks, if an operand is
    /// empty, or if `conv` has three spatial axes or a dilated input.
    pub(crate) fn new(conv: Conv) -> Option<Depthwise16> {
        let w = &conv.window;
        let each = conv.groups == conv.c_in && conv.groups == conv.c_out && conv.c_in.is_multiple_of(BLOCK);
        let flat = w.input[0] == 1 && w.kernel[0] == 1 && w.output[0] == 1 && w.pad_lo[0] == 0;
        let some = conv.output_len() > 0 && conv.input_len() > 0 && w.kernel_size() > 0;
        (each && flat && some && w.input_dilation == [1; 3]).then_some(Depthwise16 { conv })
    }

    /// Size of the packed weights in floats.
    pub(crate) fn weights(&self) -> usize {
        self.conv.weight_len()
    }

    /// Packs `[C, 1, KH, KW]` of bf16 as `[C / 32, KH, KW, 32]` of f32.
    ///
    /// # Safety
    /// [`Depthwise16::weights`] values are readable at `w`. As many floats are writable at `to`, which
    /// overlaps nothing else.
    pub(crate) unsafe fn pack(&self, w: *const u16, to: *mut f32) {
        let taps = self.conv.window.kernel_size();
        for c in 0..self.conv.c_in {
            for t in 0..taps {
                // SAFETY: `c < c_in` and `t < taps`, so both indices are below `weights()`, which `w` and
                // `to` hold.
                unsafe {
                    let v = bf16::from_bits(*w.add(c * taps + t)).to_f32();
                    *to.add((c / BLOCK * taps + t) * BLOCK + c % BLOCK) = v;
                }
            }
        }
    }

    /// Computes the convolution with its epilogue.
    ///
    /// # Safety
    /// `x` is readable for the whole input, `w` for the weights that [`Depthwise16::pack`] wrote, and `y` is
    /// writable for the output, which overlaps nothing else. The pointers of `after` are null or readable as
    /// [`Bf16Epilogue`] describes.
    pub(crate) unsafe fn run(
        &self,
        team: &Team,
        isa: Isa,
        x: *const u16,
        w: *const f32,
        y: *mut u8,
        after: Bf16Epilogue,
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
            let f = Bf16TileEpilogue {
                scale: channel(after.scale),
                bias: channel(after.bias),
                residual: residual.after(at),
                act: after.act,
                y: Place { at: ys.get(), wide: after.wide }.after(at),
            };
            let mut sums = MaybeUninit::<Sums>::uninit();
            // SAFETY: the operands of every plane are readable and writable as `run` requires; runs of pixels
            // are disjoint. `taps` writes the sums of all `n <= RUN` pixels before `finish` reads them;
            // `bf16` is set only if the processor has AVX512_BF16.
            unsafe {
                let sums = (&raw mut (*sums.as_mut_ptr()).0).cast::<f32>();
                let x = xs.get().add(plane * window.in_size() * BLOCK);
                let w = ws.get().add(block * window.kernel_size() * BLOCK);
                taps::<WEIGHTED>(isa, window, Pixels { row, first, n }, x, w, sums);
                finish(isa, bf16, n, sums, &f);
            }
        });
    }
}

/// Pools `images` images of `blocks` channel blocks each.
///
/// # Safety
/// `x` is readable for `images * blocks` planes of the window's input, whose pixels hold a block of channels
/// each. `y` is writable for as many planes of the window's output. `x` and `y` do not overlap.
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
        // SAFETY: `x` and `y` hold all planes by contract; runs of pixels are disjoint. `taps` writes the
        // sums of all `n <= RUN` pixels before they are read; `bf16` is set only if the processor has
        // AVX512_BF16.
        unsafe {
            let sums = (&raw mut (*sums.as_mut_ptr()).0).cast::<f32>();
            let x = xs.get().add(plane * w.in_size() * BLOCK);
            let none = std::ptr::null();
            let pixels = Pixels { row, first, n };
            match kind {
                Pool::Max => taps::<LARGEST>(isa, w, pixels, x, none, sums),
                Pool::Average { count_include_pad } => {
                    taps::<SUM>(isa, w, pixels, x, none, sums);
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
            let f =
                Bf16TileEpilogue { scale: none, bias: none, residual: Place::NONE, act: Activation::None, y };
            finish(isa, bf16, n, sums, &f);
        }
    });
}

/// Calls `f(plane, row, first, n)` for all output pixels, in runs of at most [`RUN`] pixels of a row. A part
/// is a range of rows of one image with all its channel blocks, as in the convolutions, so that data stays in
/// the same core's cache.
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

/// Output pixels `first .. first + n` of row `row`.
#[derive(Clone, Copy)]
struct Pixels {
    row: usize,
    first: usize,
    n: usize,
}

dispatch_simd! {
    /// Combines the taps of output pixels. `K` selects the weighted sum, the largest value, or the sum.
    ///
    /// # Safety
    /// `x` is readable for a plane of the window's input, `weights` for a block's taps if `K` is `WEIGHTED`;
    /// `sums` is writable for `BLOCK` floats per pixel.
    unsafe fn taps[const K: u8][K](
        isa,
        w: &Window,
        pixels: Pixels,
        x: *const u16,
        weights: *const f32,
        sums: *mut f32,
    ) = taps_body
}

/// The body of [`taps`].
///
/// # Safety
/// The contract of [`taps`]; the calling function is compiled for the instruction set of `S`.
#[inline(always)]
unsafe fn taps_body<S: Simd, const K: u8>(
    w: &Window,
    Pixels { row, first, n }: Pixels,
    x: *const u16,
    weights: *const f32,
    sums: *mut f32,
) {
    let mut done = 0;
    let wide = w.input[2] as isize;
    while done < n {
        let o = first + done;
        let inside = done + WIDE <= n && w.at(2, o, 0) >= 0 && w.at(2, o + WIDE - 1, w.kernel[2] - 1) < wide;
        // SAFETY: by contract `sums` holds `n` pixels, and the function `pixels` writes pixels
        // `done .. done + T` of them; with several pixels, `inside` means that all their columns are in the
        // image.
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

/// Combines the taps of `T` output pixels from column `o`.
///
/// # Safety
/// The contract of [`taps_body`] with `n = T`. If `T > 1`, the columns that all taps of these pixels read are
/// inside the image.
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
    // SAFETY: `read` gives rows inside the image. Columns are inside it by contract, or are checked for a
    // single pixel. By contract `x` holds the plane, `weights` the taps and `sums` `T` pixels.
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
