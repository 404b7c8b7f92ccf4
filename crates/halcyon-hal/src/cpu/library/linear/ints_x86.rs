//! Vectors of bytes of x86-64.

use super::ints::Ints;
use super::layout::{Part, STEPS};
use crate::cpu::library::simd::{Avx2, Avx512};
use std::arch::x86_64::*;

/// Calls `$left::<N>` or `$right::<N>` on 16-bit lanes of `$v`. The number of places is a constant after
/// inlining.
macro_rules! shifted {
    ($v:expr, $by:expr, $left:ident, $right:ident) => {
        match $by {
            1 => $left::<1>($v),
            2 => $left::<2>($v),
            3 => $left::<3>($v),
            4 => $left::<4>($v),
            5 => $left::<5>($v),
            6 => $left::<6>($v),
            7 => $left::<7>($v),
            -1 => $right::<1>($v),
            -2 => $right::<2>($v),
            -3 => $right::<3>($v),
            -4 => $right::<4>($v),
            -5 => $right::<5>($v),
            -6 => $right::<6>($v),
            -7 => $right::<7>($v),
            _ => $v,
        }
    };
}

/// 512 bits, with the products of AVX512_VNNI.
#[derive(Clone, Copy)]
pub(super) struct Vnni;

// SAFETY (of every block below): the trait requires that the caller is compiled for AVX-512 F, BW, DQ, VL and
// VNNI, and that the bytes that a method reads are readable.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Ints for Vnni {
    type S = Avx512;
    type B = __m512i;
    type I = __m512i;
    const SUBTRACTS: bool = false;

    #[inline(always)]
    unsafe fn load(p: *const u8) -> __m512i {
        unsafe { _mm512_loadu_si512(p.cast()) }
    }
    #[inline(always)]
    unsafe fn table(p: *const u8) -> __m512i {
        unsafe { _mm512_broadcast_i32x4(_mm_loadu_si128(p.cast())) }
    }
    #[inline(always)]
    unsafe fn moved(v: __m512i, by: i32, mask: u8) -> __m512i {
        unsafe {
            let v = shifted!(v, by, _mm512_slli_epi16, _mm512_srli_epi16);
            _mm512_and_si512(v, _mm512_set1_epi8(mask as i8))
        }
    }
    #[inline(always)]
    unsafe fn or(a: __m512i, b: __m512i) -> __m512i {
        unsafe { _mm512_or_si512(a, b) }
    }
    #[inline(always)]
    unsafe fn look_up(table: __m512i, v: __m512i) -> __m512i {
        unsafe { _mm512_shuffle_epi8(table, v) }
    }
    #[inline(always)]
    unsafe fn splat(v: i32) -> __m512i {
        unsafe { _mm512_set1_epi32(v) }
    }
    #[inline(always)]
    unsafe fn dot(sum: __m512i, w: __m512i, x: *const u8, _wide: bool) -> __m512i {
        unsafe { _mm512_dpbusd_epi32(sum, w, _mm512_set1_epi32(x.cast::<i32>().read_unaligned())) }
    }
    #[inline(always)]
    unsafe fn widen(p: *const u8, part: Part) -> __m512 {
        unsafe {
            let bytes = _mm_loadu_si128(p.cast());
            let v = _mm512_cvtepu8_epi32(bytes);
            let v = match part {
                Part::All => v,
                Part::Signed => _mm512_cvtepi8_epi32(bytes),
                Part::Low => _mm512_and_si512(v, _mm512_set1_epi32(15)),
                Part::High => _mm512_srli_epi32::<4>(v),
                Part::Exponent => {
                    let one = _mm512_set1_epi32(1);
                    // The two smallest are denormal.
                    let small = _mm512_sllv_epi32(_mm512_set1_epi32(0x0020_0000), v);
                    let bits = _mm512_slli_epi32::<23>(_mm512_sub_epi32(v, one));
                    let bits = _mm512_mask_mov_epi32(small, _mm512_cmpgt_epi32_mask(v, one), bits);
                    return _mm512_castsi512_ps(bits);
                }
            };
            _mm512_cvtepi32_ps(v)
        }
    }
    #[inline(always)]
    unsafe fn float(v: __m512i) -> __m512 {
        unsafe { _mm512_cvtepi32_ps(v) }
    }
}

/// 256 bits. `vpmaddubsw` sums two products of bytes in 16 bits. The sums of as many steps as fit 16 bits are
/// added there and then widened, because widening costs as much as multiplying. Weights that take 8 bits, and
/// their activations, are widened to 16 bits first, and `vpmaddwd` sums two of their products in 32 bits.
#[derive(Clone, Copy)]
pub(super) struct Maddubs;

// SAFETY (of every block below): the trait requires that the caller is compiled for AVX2 and FMA, and that
// the bytes that a method reads are readable.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Ints for Maddubs {
    type S = Avx2;
    type B = __m256i;
    type I = __m256i;
    const SUBTRACTS: bool = false;
    const WORDS: bool = true;

    #[inline(always)]
    fn run(bits: u32) -> usize {
        // A step adds two products to a sum in 16 bits.
        let step = 2 * 127 * ((1 << bits) - 1);
        if bits == 8 { STEPS } else { STEPS.min(i16::MAX as usize / step) }
    }

    #[inline(always)]
    unsafe fn load(p: *const u8) -> __m256i {
        unsafe { _mm256_loadu_si256(p.cast()) }
    }
    #[inline(always)]
    unsafe fn table(p: *const u8) -> __m256i {
        unsafe { _mm256_broadcastsi128_si256(_mm_loadu_si128(p.cast())) }
    }
    #[inline(always)]
    unsafe fn moved(v: __m256i, by: i32, mask: u8) -> __m256i {
        unsafe {
            let v = shifted!(v, by, _mm256_slli_epi16, _mm256_srli_epi16);
            _mm256_and_si256(v, _mm256_set1_epi8(mask as i8))
        }
    }
    #[inline(always)]
    unsafe fn or(a: __m256i, b: __m256i) -> __m256i {
        unsafe { _mm256_or_si256(a, b) }
    }
    #[inline(always)]
    unsafe fn look_up(table: __m256i, v: __m256i) -> __m256i {
        unsafe { _mm256_shuffle_epi8(table, v) }
    }
    #[inline(always)]
    unsafe fn splat(v: i32) -> __m256i {
        unsafe { _mm256_set1_epi32(v) }
    }
    #[inline(always)]
    unsafe fn open(sum: __m256i, wide: bool) -> __m256i {
        if wide { sum } else { unsafe { _mm256_setzero_si256() } }
    }
    #[inline(always)]
    unsafe fn close(sum: __m256i, run: __m256i, wide: bool) -> __m256i {
        if wide {
            return run;
        }
        unsafe { _mm256_add_epi32(sum, _mm256_madd_epi16(run, _mm256_set1_epi16(1))) }
    }
    #[inline(always)]
    unsafe fn word(w: __m256i, odd: bool) -> __m256i {
        unsafe {
            match odd {
                false => _mm256_and_si256(w, _mm256_set1_epi16(255)),
                true => _mm256_srli_epi16::<8>(w),
            }
        }
    }
    #[inline(always)]
    unsafe fn dot(run: __m256i, w: __m256i, x: *const u8, wide: bool) -> __m256i {
        unsafe {
            let four = |x: *const u8| _mm256_set1_epi32(x.cast::<i32>().read_unaligned());
            if wide { add_words(run, w, four(x)) } else { add_bytes(run, w, four(x)) }
        }
    }
    #[inline(always)]
    unsafe fn widen(p: *const u8, part: Part) -> __m256 {
        unsafe {
            let bytes = _mm_loadl_epi64(p.cast());
            let v = _mm256_cvtepu8_epi32(bytes);
            let v = match part {
                Part::All => v,
                Part::Signed => _mm256_cvtepi8_epi32(bytes),
                Part::Low => _mm256_and_si256(v, _mm256_set1_epi32(15)),
                Part::High => _mm256_srli_epi32::<4>(v),
                Part::Exponent => {
                    let one = _mm256_set1_epi32(1);
                    // The two smallest are denormal.
                    let small = _mm256_sllv_epi32(_mm256_set1_epi32(0x0020_0000), v);
                    let bits = _mm256_slli_epi32::<23>(_mm256_sub_epi32(v, one));
                    let bits = _mm256_blendv_epi8(small, bits, _mm256_cmpgt_epi32(v, one));
                    return _mm256_castsi256_ps(bits);
                }
            };
            _mm256_cvtepi32_ps(v)
        }
    }
    #[inline(always)]
    unsafe fn float(v: __m256i) -> __m256 {
        unsafe { _mm256_cvtepi32_ps(v) }
    }
}

/// Defines a function that adds sums of two products to `run`. It is assembly, because otherwise the compiler
/// would reorder the additions of a whole group, which takes more registers than there are.
macro_rules! step {
    ($(#[$doc:meta])* $name:ident: $multiply:literal $add:literal) => {
        $(#[$doc])*
        ///
        /// # Safety
        /// The processor has AVX2.
        #[inline]
        #[target_feature(enable = "avx2")]
        unsafe fn $name(run: __m256i, w: __m256i, x: __m256i) -> __m256i {
            let mut run = run;
            // SAFETY: the instructions are those of AVX2, and change only the named registers.
            unsafe {
                std::arch::asm!(
                    concat!($multiply, " {two}, {w}, {x}"),
                    concat!($add, " {run}, {run}, {two}"),
                    two = out(ymm_reg) _,
                    w = in(ymm_reg) w,
                    x = in(ymm_reg) x,
                    run = inout(ymm_reg) run,
                    options(pure, nomem, nostack, preserves_flags)
                );
            }
            run
        }
    };
}

step! {
    /// Of unsigned bytes of `w` and signed bytes of `x`, in 16 bits.
    add_bytes: "vpmaddubsw" "vpaddw"
}
step! {
    /// Of 16-bit integers, in 32 bits.
    add_words: "vpmaddwd" "vpaddd"
}
