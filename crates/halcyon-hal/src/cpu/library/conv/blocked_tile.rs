//! The register tiles of [`super::blocked`], and pooling in the blocked layout.

use super::pool::{Pool, counts};
use super::window::Window;
use crate::cpu::library::simd::{Simd, dispatch_simd};
use crate::cpu::sys::Isa;
use crate::cpu::team::{SharedConst, SharedMut, Team};

/// The activation, applied after scale, bias and residual.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Activation {
    None,
    /// `max(v, 0)`; NaN stays NaN.
    Relu,
    /// `min(max(v, lo), hi)`; NaN stays NaN.
    Clamp(f32, f32),
}

/// The operands of one tile. Distances are in floats.
pub(crate) struct Tile {
    /// The element that the first tap of the first pixel reads in the first block of input channels.
    pub x: *const f32,
    /// Weights of the first block of output channels, and the distance to the weights of the second block.
    pub w: *const f32,
    pub next_w: usize,
    /// Number of input channel blocks, and of consecutive values per block and tap.
    pub blocks: usize,
    pub inner: usize,
    pub taps: (usize, usize),
    /// Distances in the input between blocks, rows of taps, taps of a row, and pixels.
    pub plane: usize,
    pub tap_row: usize,
    pub tap_col: usize,
    pub pixel: usize,
    /// The output of the first pixel, and the distance from there to its output in the second block.
    pub y: *mut f32,
    pub next_y: usize,
    /// Distance from the first pixel of the tile to the first pixel of its second half, in the input and in
    /// the output. The halves may lie in two rows.
    pub half_x: usize,
    pub half_y: usize,
    /// Point to the values of the tile's first channel; null if absent.
    pub scale: *const f32,
    pub bias: *const f32,
    /// Points to the first pixel, in the output's layout; null if absent.
    pub residual: *const f32,
    pub act: Activation,
    /// Weights of later tiles to prefetch, up to `end`, and how many cache lines of them to prefetch per tap
    /// of each block.
    pub ahead: *const f32,
    pub end: *const f32,
    pub lines: usize,
}

/// Floats of a cache line.
const LINE: usize = 16;

/// Cache lines to prefetch in each of `steps` steps, so that all steps together prefetch `floats` floats.
pub(crate) fn prefetch_lines(floats: usize, steps: usize) -> usize {
    floats.div_ceil(LINE).div_ceil(steps.max(1))
}

/// The most pixels of a tile for vectors of `lanes` lanes. Two accumulators per pixel, two vectors of weights
/// and one input value must fit the registers: 32 with AVX-512 and on aarch64, else 16.
pub(crate) const fn pixels(lanes: usize) -> usize {
    if lanes == 16 || cfg!(target_arch = "aarch64") { MAX_PIXELS } else { 6 }
}

const MAX_PIXELS: usize = 14;

/// Pixels of the first half of a tile.
pub(crate) const fn half(pixels: usize) -> usize {
    pixels.div_ceil(2)
}

dispatch_simd! {
    /// Computes `T` pixels by `R` blocks of output channels. `P` is the distance between input pixels in
    /// vectors, or 0 if the distance is only known at run time.
    ///
    /// # Safety
    /// The contract of [`tile`], with `T` pixels and `R` blocks.
    unsafe fn sized[const T: usize, const R: usize, const P: usize][T, R, P](isa, t: &mut Tile) = sized_body
}

/// The body of [`sized`].
///
/// # Safety
/// The contract of [`sized`]; the calling function is compiled for the instruction set of `S`.
#[inline(always)]
unsafe fn sized_body<S: Simd, const T: usize, const R: usize, const P: usize>(t: &mut Tile) {
    if T > const { pixels(S::W) } {
        unreachable!("tiles are not wider than their registers");
    }
    // SAFETY: by contract the pointers and distances of `t` are valid for `T` pixels, `R` blocks and all
    // taps. Prefetched addresses need not be readable.
    unsafe {
        let pixel = if P == 0 { t.pixel } else { P * S::W };
        let half_x = t.half_x;
        let place = |k: usize| if k < half(T) { k * pixel } else { half_x + (k - half(T)) * pixel };
        let mut acc = [[S::zero(); R]; T];
        let mut w = t.w;
        for block in 0..t.blocks {
            for i in 0..t.taps.0 {
                for j in 0..t.taps.1 {
                    let mut x = t.x.add(block * t.plane + i * t.tap_row + j * t.tap_col);
                    let until = t.ahead.wrapping_add(t.lines * LINE).min(t.end);
                    while t.ahead < until {
                        S::prefetch(t.ahead);
                        t.ahead = t.ahead.wrapping_add(LINE);
                    }
                    for _ in 0..t.inner {
                        let mut v = [S::zero(); R];
                        for r in 0..R {
                            v[r] = S::load(w.add(r * t.next_w));
                        }
                        for k in 0..T {
                            let s = S::splat(*x.add(place(k)));
                            for r in 0..R {
                                acc[k][r] = S::fma(s, v[r], acc[k][r]);
                            }
                        }
                        w = w.add(S::W);
                        x = x.add(1);
                    }
                }
            }
        }
        for r in 0..R {
            let column = std::array::from_fn(|k| acc[k][r]);
            finish::<S, T>(t, r * S::W, r * t.next_y, column);
        }
    }
}

/// Applies scale, bias, residual and activation to `T` pixels and stores them. `channel` and `y` are the
/// offsets of the block's channels and output.
///
/// # Safety
/// Scale, bias and residual of `t` are null or readable, and its output writable, for `T` pixels at these
/// offsets. The calling function is compiled for the instruction set of `S`.
#[inline(always)]
unsafe fn finish<S: Simd, const T: usize>(t: &Tile, channel: usize, y: usize, mut v: [S::V; T]) {
    let at = |k: usize| y + if k < half(T) { k * S::W } else { t.half_y + (k - half(T)) * S::W };
    // SAFETY: by contract all pointers are valid for `T` vectors at the offsets `channel` and `at(k)`.
    unsafe {
        match (t.scale.is_null(), t.bias.is_null()) {
            (true, true) => {}
            (false, true) => {
                let s = S::load(t.scale.add(channel));
                v.iter_mut().for_each(|v| *v = S::mul(*v, s));
            }
            (true, false) => {
                let b = S::load(t.bias.add(channel));
                v.iter_mut().for_each(|v| *v = S::add(*v, b));
            }
            (false, false) => {
                let (s, b) = (S::load(t.scale.add(channel)), S::load(t.bias.add(channel)));
                v.iter_mut().for_each(|v| *v = S::fma(*v, s, b));
            }
        }
        if !t.residual.is_null() {
            for (k, v) in v.iter_mut().enumerate() {
                *v = S::add(*v, S::load(t.residual.add(at(k))));
            }
        }
        match t.act {
            Activation::None => {}
            Activation::Relu => v.iter_mut().for_each(|v| *v = S::relu(*v)),
            Activation::Clamp(lo, hi) => {
                let (lo, hi) = (S::splat(lo), S::splat(hi));
                // `max` and `min` return the second operand if one is NaN, so NaN is kept.
                v.iter_mut().for_each(|v| *v = S::min(hi, S::max(lo, *v)));
            }
        }
        for (k, v) in v.iter().enumerate() {
            S::store(t.y.add(at(k)), *v);
        }
    }
}

macro_rules! by_width {
    ($isa:expr, $n:expr, $r:literal, $p:literal, $t:expr, $($k:literal)*) => {
        match $n {
            $($k => sized::<$k, $r, $p>($isa, $t),)*
            n => unreachable!("a tile of {n} pixels"),
        }
    };
}

/// Computes a tile of `n` pixels (at most [`pixels`]) by `r` (1 or 2) blocks of output channels. Advances
/// [`Tile::ahead`].
///
/// # Safety
/// For `n` pixels, `r` blocks and all taps, the input, weights, scale, bias and residual that `t` describes
/// are readable (or null, if optional) and the output is writable and overlaps none of them.
pub(crate) unsafe fn tile(isa: Isa, n: usize, r: usize, t: &mut Tile) {
    let lanes = crate::cpu::library::simd::lanes(isa);
    let p = match t.pixel {
        p if p == lanes => 1,
        p if p == 2 * lanes => 2,
        _ => 0,
    };
    // SAFETY: `tile` requires operands that are valid for `n` pixels and `r` blocks, the sizes passed on;
    // `sized` checks that the processor has `isa`.
    unsafe {
        match (r, p) {
            (2, 1) => by_width!(isa, n, 2, 1, t, 1 2 3 4 5 6 7 8 9 10 11 12 13 14),
            (2, 2) => by_width!(isa, n, 2, 2, t, 1 2 3 4 5 6 7 8 9 10 11 12 13 14),
            (2, _) => by_width!(isa, n, 2, 0, t, 1 2 3 4 5 6 7 8 9 10 11 12 13 14),
            _ => by_width!(isa, n, 1, 0, t, 1 2 3 4 5 6 7 8 9 10 11 12 13 14),
        }
    }
}

dispatch_simd! {
    /// Computes `n` pixels of one row of one channel block of a depthwise convolution.
    ///
    /// # Safety
    /// The contract of [`tile`] for `n` pixels and one block, where each pixel of the input is a vector of
    /// the block's channels.
    pub(crate) unsafe fn depthwise[][](isa, n: usize, t: &Tile) = depthwise_body
}

/// The body of [`depthwise`].
///
/// # Safety
/// The contract of [`depthwise`]; the calling function is compiled for the instruction set of `S`.
#[inline(always)]
unsafe fn depthwise_body<S: Simd>(n: usize, t: &Tile) {
    let mut done = 0;
    // SAFETY: the contract covers `n` pixels, and each call handles pixels `done .. done + T` with
    // `done + T <= n`.
    unsafe {
        while n - done >= 6 {
            depthwise_tile::<S, 6>(t, done);
            done += 6;
        }
        while n - done >= 2 {
            depthwise_tile::<S, 2>(t, done);
            done += 2;
        }
        if done < n {
            depthwise_tile::<S, 1>(t, done);
        }
    }
}

/// Computes pixels `first .. first + T`.
///
/// # Safety
/// The contract of [`depthwise`] for `first + T` pixels; the calling function is compiled for the instruction
/// set of `S`.
#[inline(always)]
unsafe fn depthwise_tile<S: Simd, const T: usize>(t: &Tile, first: usize) {
    // SAFETY: by contract the input, weights and output are valid for all taps of pixels
    // `first .. first + T`.
    unsafe {
        let mut acc = [S::zero(); T];
        let mut w = t.w;
        for i in 0..t.taps.0 {
            for j in 0..t.taps.1 {
                let x = t.x.add(first * t.pixel + i * t.tap_row + j * t.tap_col);
                let v = S::load(w);
                for (k, a) in acc.iter_mut().enumerate() {
                    *a = S::fma(S::load(x.add(k * t.pixel)), v, *a);
                }
                w = w.add(S::W);
            }
        }
        finish::<S, T>(
            &Tile {
                residual: if t.residual.is_null() { t.residual } else { t.residual.add(first * S::W) },
                y: t.y.add(first * S::W),
                half_y: half(T) * S::W,
                ..*t
            },
            0,
            0,
            acc,
        );
    }
}

/// Pools `planes` images whose pixels are vectors of channels.
///
/// # Safety
/// `x` is readable for `planes` times the window's input size in vectors. `y` is writable for `planes` times
/// the window's output size in vectors. `x` and `y` do not overlap.
pub(crate) unsafe fn pool(
    team: &Team,
    isa: Isa,
    kind: Pool,
    planes: usize,
    w: &Window,
    x: *const f32,
    y: *mut f32,
) {
    let (rows, cols, b) = (w.output[1], w.output[2], crate::cpu::library::simd::lanes(isa));
    let (x, y) = (SharedConst(x), SharedMut(y));
    let grain = (8192 / (cols * w.kernel_size()).max(1)).max(1);
    team.ranges(planes * rows, grain, &|first, last| {
        for k in first..last {
            let (plane, row) = (k / rows, k % rows);
            // SAFETY: `x` and `y` hold all planes by contract; each `k` writes its own output row.
            unsafe {
                let x = x.get().add(plane * w.in_size() * b);
                pool_row(isa, kind, w, row, x, y.get().add(k * cols * b));
            }
        }
    });
}

dispatch_simd! {
    /// Pools one output row of one plane.
    ///
    /// # Safety
    /// `x` is readable for a plane of the window's input in vectors, `y` writable for a row of its output.
    unsafe fn pool_row[][](isa, kind: Pool, w: &Window, row: usize, x: *const f32, y: *mut f32) = pool_row_body
}

/// The body of `pool_row`.
///
/// # Safety
/// The contract of [`pool_row_of`].
#[inline(always)]
unsafe fn pool_row_body<S: Simd>(kind: Pool, w: &Window, row: usize, x: *const f32, y: *mut f32) {
    // SAFETY: by contract the plane at `x` is readable and the row at `y` is writable, as `pool_row_of`
    // requires.
    unsafe {
        match kind {
            Pool::Max => pool_row_of::<S, false>(kind, w, row, x, y),
            Pool::Average { .. } => pool_row_of::<S, true>(kind, w, row, x, y),
        }
    }
}

/// Pools one output row of one plane.
///
/// # Safety
/// `x` is readable for a plane of the window's input in vectors, `y` writable for a row of its output. The
/// calling function is compiled for the instruction set of `S`.
#[inline(always)]
unsafe fn pool_row_of<S: Simd, const AVERAGE: bool>(
    kind: Pool,
    w: &Window,
    row: usize,
    x: *const f32,
    y: *mut f32,
) {
    let down = counts(w, 1, row);
    for o in 0..w.output[2] {
        // SAFETY: `read` and `inside` give positions in the input plane, which `x` holds; `o` is in the
        // output row.
        unsafe {
            let mut acc = if AVERAGE { S::zero() } else { S::splat(f32::NEG_INFINITY) };
            // If all columns are inside the image, they need no check.
            let (first, step) = (w.at(2, o, 0), w.dilation[2]);
            let inside = first >= 0 && first as usize + (w.kernel[2] - 1) * step < w.input[2];
            for i in 0..w.kernel[1] {
                let Some(h) = w.read(1, row, i) else { continue };
                let line = x.add(h * w.input[2] * S::W);
                for j in 0..w.kernel[2] {
                    let c = if inside { Some(first as usize + j * step) } else { w.read(2, o, j) };
                    let Some(c) = c else { continue };
                    let v = S::load(line.add(c * S::W));
                    acc = if AVERAGE { S::add(acc, v) } else { S::max_nan(acc, v) };
                }
            }
            let y = y.add(o * S::W);
            S::store(y, acc);
            if let Pool::Average { count_include_pad } = kind {
                let across = counts(w, 2, o);
                let n = if count_include_pad { down.0 * across.0 } else { down.1 * across.1 };
                (0..S::W).for_each(|i| *y.add(i) /= n as f32);
            }
        }
    }
}
