//! The inner loops of [`super::blocked_int8`] without tile registers, and the epilogue.

use super::blocked_bf16_tile::{BLOCK, Steps};
use super::blocked_int8::{Bytes, Store};
use super::blocked_tile::Activation;
use crate::cpu::library::simd::{Simd, dispatch_simd};

/// The epilogue of the sums of consecutive pixels: `act(sum * scale + bias + residual)`, each part optional.
#[derive(Clone, Copy, Debug)]
pub(super) struct ByteTile {
    /// Point to the values of the first of the 32 channels; null if absent.
    pub scale: *const f32,
    pub bias: *const f32,
    /// Points to the first of the 32 channels of the first pixel; pixels are 64 values apart. Null if absent.
    pub residual: *const f32,
    pub act: Activation,
    pub to: Store,
    pub y: *mut u8,
}

/// Channels from one pixel of the output to the next.
const PITCH: usize = 2 * BLOCK;

/// The sums of one or two tiles of pixels by 32 output channels. `start` has the values at which the sums of
/// signed images start. `small` says that no sum of two products saturates 16 bits.
///
/// # Safety
/// For every pixel of the tiles, 64 bytes are readable at every step's offset; `s.w` holds the weights of all
/// steps. `sums` is writable for `s.rows * BLOCK` values per tile, and `start` has `BLOCK` values. The
/// processor has the instructions of `bytes.engine`.
#[cfg(not(target_arch = "x86_64"))]
pub(super) unsafe fn on_vectors(
    _: &Bytes,
    _: bool,
    _: &Steps<'_>,
    _: &[*const u8],
    _: *mut i32,
    _: *const i32,
) {
    unreachable!("`Engine::of` finds no instructions on this processor");
}

#[cfg(target_arch = "x86_64")]
pub(super) use x86::on_vectors;

dispatch_simd! {
    /// Applies the epilogue to the sums of `n` pixels and stores the results.
    ///
    /// # Safety
    /// `sums` is readable for `n * BLOCK` values; the operands of `f` are null or readable and its output
    /// writable for `n` pixels.
    pub(super) unsafe fn finish[][](isa, n: usize, sums: *const i32, f: &ByteTile) = finish_body
}

/// The body of [`finish`]. The loops over channels have constant bounds, so that the compiler uses vectors.
///
/// # Safety
/// The contract of [`finish`]; the calling function is compiled for the instruction set of `S`.
#[inline(always)]
unsafe fn finish_body<S: Simd>(n: usize, sums: *const i32, f: &ByteTile) {
    // SAFETY: by contract all pointers are null or valid for `BLOCK` values of `n` pixels.
    unsafe {
        let channel = |p: *const f32, or: f32| match p.is_null() {
            true => [or; BLOCK],
            false => p.cast::<[f32; BLOCK]>().read_unaligned(),
        };
        let (scale, bias) = (channel(f.scale, 1.0), channel(f.bias, 0.0));
        let (lo, hi) = match f.act {
            Activation::None => (f32::NEG_INFINITY, f32::INFINITY),
            Activation::Relu => (0.0, f32::INFINITY),
            Activation::Clamp(lo, hi) => (lo, hi),
        };
        for p in 0..n {
            let s = sums.add(p * BLOCK).cast::<[i32; BLOCK]>().read_unaligned();
            let mut v = [0f32; BLOCK];
            for i in 0..BLOCK {
                let x = s[i] as f32;
                v[i] = if S::FMA { x.mul_add(scale[i], bias[i]) } else { x * scale[i] + bias[i] };
            }
            if !f.residual.is_null() {
                let r = f.residual.add(p * PITCH).cast::<[f32; BLOCK]>().read_unaligned();
                for i in 0..BLOCK {
                    v[i] += r[i];
                }
            }
            for x in &mut v {
                // NaN is kept.
                let low = if *x < lo { lo } else { *x };
                *x = if low > hi { hi } else { low };
            }
            match f.to {
                Store::Float => f.y.cast::<f32>().add(p * PITCH).cast::<[f32; BLOCK]>().write_unaligned(v),
                Store::Byte { inverse, zero, signed } => {
                    let (least, most) = if signed { (-128.0, 127.0) } else { (0.0, 255.0) };
                    let mut q = [0u8; BLOCK];
                    for i in 0..BLOCK {
                        let x = (v[i] * inverse).round_ties_even() + zero;
                        let x = if x.is_nan() { 0.0 } else { x };
                        let x = if x < least { least } else { x };
                        let x = if x > most { most } else { x };
                        // The value is not NaN and lies in the range of the type, so the conversion is
                        // defined.
                        q[i] = x.to_int_unchecked::<i32>() as u8;
                    }
                    f.y.add(p * PITCH).cast::<[u8; BLOCK]>().write_unaligned(q);
                }
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{BLOCK, Bytes, Steps};
    use crate::cpu::library::conv::blocked_bf16_tile::HALF;
    use crate::cpu::library::conv::blocked_int8::Engine;
    use std::arch::x86_64::*;

    /// Pixels whose sums are in registers at a time.
    const VNNI_ROWS: usize = 8;
    const AVX2_ROWS: usize = 4;

    /// Evaluates `$call` with the constant `$r` equal to `$rows`, which is one of the listed numbers.
    macro_rules! with_rows {
        ($rows:expr, [$($n:literal)*], $r:ident => $call:expr) => {
            match $rows {
                $($n => {
                    const $r: usize = $n;
                    $call
                })*
                _ => unreachable!("a part of a tile has at most this many rows"),
            }
        };
    }

    /// The function of the same name in the parent module, for x86-64. The definition for other architectures
    /// documents the arguments.
    ///
    /// # Safety
    /// The contract that is stated at that definition.
    pub(in super::super) unsafe fn on_vectors(
        bytes: &Bytes,
        small: bool,
        s: &Steps<'_>,
        x: &[*const u8],
        sums: *mut i32,
        start: *const i32,
    ) {
        let most = if bytes.engine == Engine::Avx2 { AVX2_ROWS } else { VNNI_ROWS };
        for (t, x) in x.iter().enumerate() {
            let mut done = 0;
            while done < s.rows {
                // Cut the pixels into parts of nearly equal size.
                let parts = (s.rows - done).div_ceil(most);
                let rows = (s.rows - done).div_ceil(parts);
                let x = x.wrapping_add(done * s.pixel);
                let to = sums.wrapping_add((t * s.rows + done) * BLOCK);
                // SAFETY: by contract the pixels, weights and sums are valid and the processor has the
                // instructions of the engine; `rows <= most`.
                unsafe {
                    match (bytes.engine, bytes.signed, small) {
                        (Engine::Avx2, true, true) => {
                            with_rows!(rows, [1 2 3 4], R => avx2::<R, true, true>(s, x, to, start))
                        }
                        (Engine::Avx2, true, false) => {
                            with_rows!(rows, [1 2 3 4], R => avx2::<R, true, false>(s, x, to, start))
                        }
                        (Engine::Avx2, false, true) => {
                            with_rows!(rows, [1 2 3 4], R => avx2::<R, false, true>(s, x, to, start))
                        }
                        (Engine::Avx2, false, false) => {
                            with_rows!(rows, [1 2 3 4], R => avx2::<R, false, false>(s, x, to, start))
                        }
                        (_, true, _) => {
                            with_rows!(rows, [1 2 3 4 5 6 7 8], R => vnni::<R, true>(s, x, to, start))
                        }
                        (_, false, _) => {
                            with_rows!(rows, [1 2 3 4 5 6 7 8], R => vnni::<R, false>(s, x, to, start))
                        }
                    }
                }
                done += rows;
            }
        }
    }

    /// # Safety
    /// The contract of [`on_vectors`] for `R` pixels from `x`; the processor has AVX512_VNNI.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn vnni<const R: usize, const SIGNED: bool>(
        s: &Steps<'_>,
        x: *const u8,
        to: *mut i32,
        start: *const i32,
    ) {
        // SAFETY: by contract the pixels, weights, sums and starting values are valid.
        unsafe {
            let first = match SIGNED {
                true => [_mm512_loadu_si512(start.cast()), _mm512_loadu_si512(start.add(16).cast())],
                false => [_mm512_setzero_si512(); 2],
            };
            let top = _mm512_set1_epi8(i8::MIN);
            let mut acc = [first; R];
            for (k, offset) in s.offsets.iter().enumerate() {
                let (x, w) = (x.wrapping_offset(*offset), s.w.add(2 * k * HALF));
                for g in 0..16 {
                    let w = [
                        _mm512_loadu_si512(w.add(64 * g).cast()),
                        _mm512_loadu_si512(w.add(HALF + 64 * g).cast()),
                    ];
                    for r in 0..R {
                        let v = x.add(r * s.pixel + 4 * g).cast::<i32>().read_unaligned();
                        let mut v = _mm512_set1_epi32(v);
                        if SIGNED {
                            v = _mm512_xor_si512(v, top);
                        }
                        for h in 0..2 {
                            acc[r][h] = _mm512_dpbusd_epi32(acc[r][h], v, w[h]);
                        }
                    }
                }
            }
            for (r, acc) in acc.iter().enumerate() {
                _mm512_storeu_si512(to.add(r * BLOCK).cast(), acc[0]);
                _mm512_storeu_si512(to.add(r * BLOCK + 16).cast(), acc[1]);
            }
        }
    }

    /// `SMALL`: no sum of two products saturates 16 bits.
    ///
    /// # Safety
    /// The contract of [`on_vectors`] for `R` pixels from `x`; the processor has AVX2.
    #[target_feature(enable = "avx2")]
    unsafe fn avx2<const R: usize, const SIGNED: bool, const SMALL: bool>(
        s: &Steps<'_>,
        x: *const u8,
        to: *mut i32,
        start: *const i32,
    ) {
        // SAFETY: by contract the pixels, weights, sums and starting values are valid.
        unsafe {
            let (ones, low) = (_mm256_set1_epi16(1), _mm256_set1_epi16(0xff));
            let top = _mm256_set1_epi8(i8::MIN);
            for half in 0..2 {
                let first = |h: usize| match SIGNED {
                    true => _mm256_loadu_si256(start.add(16 * half + 8 * h).cast()),
                    false => _mm256_setzero_si256(),
                };
                let mut acc = [[first(0), first(1)]; R];
                for (k, offset) in s.offsets.iter().enumerate() {
                    let (x, w) = (x.wrapping_offset(*offset), s.w.add((2 * k + half) * HALF));
                    for g in 0..16 {
                        let w = [0, 1].map(|h| _mm256_loadu_si256(w.add(64 * g + 32 * h).cast()));
                        for r in 0..R {
                            let v = x.add(r * s.pixel + 4 * g).cast::<i32>().read_unaligned();
                            let mut v = _mm256_set1_epi32(v);
                            if SIGNED {
                                v = _mm256_xor_si256(v, top);
                            }
                            for h in 0..2 {
                                let sum = if SMALL {
                                    _mm256_madd_epi16(_mm256_maddubs_epi16(v, w[h]), ones)
                                } else {
                                    // The bytes at even and at odd places, as 16-bit integers.
                                    let even = _mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(w[h]));
                                    let odd = _mm256_srai_epi16::<8>(w[h]);
                                    _mm256_add_epi32(
                                        _mm256_madd_epi16(_mm256_and_si256(v, low), even),
                                        _mm256_madd_epi16(_mm256_srli_epi16::<8>(v), odd),
                                    )
                                };
                                acc[r][h] = _mm256_add_epi32(acc[r][h], sum);
                            }
                        }
                    }
                }
                for (r, acc) in acc.iter().enumerate() {
                    for h in 0..2 {
                        _mm256_storeu_si256(to.add(r * BLOCK + 16 * half + 8 * h).cast(), acc[h]);
                    }
                }
            }
        }
    }
}
