//! Vectors of AVX2, with FMA and F16C.

use super::Simd;
use crate::cpu::sys::Isa;
use half::f16;
use std::arch::x86_64::*;

/// 8 lanes.
#[derive(Clone, Copy)]
pub(crate) struct Avx2;

/// A mask of the first `n` lanes.
///
/// # Safety
/// The caller is compiled for AVX2.
#[inline(always)]
unsafe fn mask8(n: usize) -> __m256i {
    // SAFETY: `mask8` requires AVX2.
    unsafe { _mm256_cmpgt_epi32(_mm256_set1_epi32(n as i32), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)) }
}

/// Lane 0 plus lane 2, plus the sum of lanes 1 and 3, as in [`Simd::sum`].
///
/// # Safety
/// The caller is compiled for AVX2.
#[inline(always)]
pub(super) unsafe fn sum4(v: __m128) -> f32 {
    // SAFETY: `sum4` requires AVX2, which includes SSE3.
    unsafe {
        let two = _mm_add_ps(v, _mm_movehl_ps(v, v));
        _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
    }
}

// SAFETY (of every block below): the trait requires that the caller is compiled for AVX2, FMA and F16C,
// and that the pointers are valid for the lanes each method accesses.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Simd for Avx2 {
    type V = __m256;
    const W: usize = 8;
    const MR: usize = 6;
    const NV: usize = 2;
    const ROWS: usize = 6;
    const VECS: usize = 2;
    const FMA: bool = true;
    const ISA: Isa = Isa::Avx2;

    #[inline(always)]
    unsafe fn prefetch(p: *const f32) {
        unsafe { _mm_prefetch::<_MM_HINT_T1>(p as *const i8) }
    }

    #[inline(always)]
    unsafe fn splat(x: f32) -> __m256 {
        unsafe { _mm256_set1_ps(x) }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> __m256 {
        unsafe { _mm256_loadu_ps(p) }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: __m256) {
        unsafe { _mm256_storeu_ps(p, v) }
    }
    #[inline(always)]
    unsafe fn load_part(p: *const f32, n: usize) -> __m256 {
        unsafe { _mm256_maskload_ps(p, mask8(n)) }
    }
    #[inline(always)]
    unsafe fn store_part(p: *mut f32, v: __m256, n: usize) {
        unsafe { _mm256_maskstore_ps(p, mask8(n), v) }
    }
    #[inline(always)]
    unsafe fn add(a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_add_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn mul(a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_mul_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn fma(a: __m256, b: __m256, c: __m256) -> __m256 {
        unsafe { _mm256_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn sub(a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_sub_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn max(a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_max_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn min(a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_min_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn max_nan(a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_blendv_ps(_mm256_max_ps(a, b), a, _mm256_cmp_ps::<_CMP_UNORD_Q>(a, a)) }
    }
    #[inline(always)]
    unsafe fn relu(a: __m256) -> __m256 {
        // `max` returns the second operand if either is NaN.
        unsafe { _mm256_max_ps(_mm256_setzero_ps(), a) }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const f16) -> __m256 {
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(p as *const __m128i)) }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const half::bf16) -> __m256 {
        unsafe {
            let h = _mm256_cvtepu16_epi32(_mm_loadu_si128(p as *const __m128i));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(h))
        }
    }
    #[inline(always)]
    unsafe fn sum(v: __m256) -> f32 {
        unsafe { sum4(_mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v))) }
    }
    #[inline(always)]
    unsafe fn turn(r: &mut [__m256; 16]) {
        // Interleaves single elements, then pairs of elements, then exchanges the halves of the vectors.
        unsafe {
            let (p, f) = (|v: __m256| _mm256_castps_pd(v), |v: __m256d| _mm256_castpd_ps(v));
            let mut a = [_mm256_setzero_ps(); 8];
            for i in 0..4 {
                a[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
                a[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
            }
            // Column c of rows 4 g .. 4 g + 4 is the low half of b[4 g + c], and column 4 + c the high half.
            let mut b = [_mm256_setzero_ps(); 8];
            for g in 0..2 {
                for h in 0..2 {
                    let (x, y) = (p(a[4 * g + h]), p(a[4 * g + 2 + h]));
                    b[4 * g + 2 * h] = f(_mm256_unpacklo_pd(x, y));
                    b[4 * g + 2 * h + 1] = f(_mm256_unpackhi_pd(x, y));
                }
            }
            for c in 0..4 {
                r[c] = _mm256_permute2f128_ps::<0x20>(b[c], b[4 + c]);
                r[4 + c] = _mm256_permute2f128_ps::<0x31>(b[c], b[4 + c]);
            }
        }
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const i8) -> __m256 {
        unsafe { _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(p as *const __m128i))) }
    }
    #[inline(always)]
    unsafe fn splat_f16(x: f16) -> __m256 {
        unsafe { _mm256_cvtph_ps(_mm_set1_epi16(x.to_bits() as i16)) }
    }
    #[inline(always)]
    unsafe fn turn_i8(rows: &[*const i8; 16], scale: __m256, dst: *mut f32, stride: usize) {
        // Four bytes are turned as one lane, and separated later.
        unsafe {
            let mut r = [_mm256_setzero_ps(); 16];
            for i in 0..8 {
                r[i] = _mm256_castsi256_ps(_mm256_loadu_si256(rows[i] as *const __m256i));
            }
            Self::turn(&mut r);
            for g in 0..8 {
                let x = _mm256_castps_si256(r[g]);
                let bytes =
                    [_mm256_slli_epi32::<24>(x), _mm256_slli_epi32::<16>(x), _mm256_slli_epi32::<8>(x), x];
                for e in 0..4 {
                    let v = _mm256_cvtepi32_ps(_mm256_srai_epi32::<24>(bytes[e]));
                    _mm256_storeu_ps(dst.add((4 * g + e) * stride), _mm256_mul_ps(v, scale));
                }
            }
        }
    }
}
