//! Vectors of AVX-512 F, BW, DQ and VL.

use super::Simd;
use crate::cpu::sys::Isa;
use crate::cpu::vmath512;
use half::f16;
use std::arch::x86_64::*;

/// 16 lanes.
#[derive(Clone, Copy)]
pub(crate) struct Avx512;

/// A mask of the first `n <= 16` lanes.
#[inline(always)]
pub(crate) fn mask16(n: usize) -> __mmask16 {
    ((1u32 << n) - 1) as __mmask16
}

// SAFETY (of every block below): the trait requires that the caller is compiled for AVX-512 F, BW, DQ and
// VL, and that the pointers are valid for the lanes each method accesses.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Simd for Avx512 {
    type V = __m512;
    const W: usize = 16;
    const MR: usize = 12;
    const NV: usize = 2;
    const ROWS: usize = 9;
    const VECS: usize = 3;
    const FMA: bool = true;
    const ISA: Isa = Isa::Avx512;

    #[inline(always)]
    unsafe fn prefetch(p: *const f32) {
        unsafe { _mm_prefetch::<_MM_HINT_T1>(p as *const i8) }
    }

    #[inline(always)]
    unsafe fn splat(x: f32) -> __m512 {
        unsafe { _mm512_set1_ps(x) }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> __m512 {
        unsafe { _mm512_loadu_ps(p) }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: __m512) {
        unsafe { _mm512_storeu_ps(p, v) }
    }
    #[inline(always)]
    unsafe fn load_part(p: *const f32, n: usize) -> __m512 {
        unsafe { _mm512_maskz_loadu_ps(mask16(n), p) }
    }
    #[inline(always)]
    unsafe fn store_part(p: *mut f32, v: __m512, n: usize) {
        unsafe { _mm512_mask_storeu_ps(p, mask16(n), v) }
    }
    #[inline(always)]
    unsafe fn add(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_add_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn mul(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_mul_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn sub(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_sub_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn max(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_max_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn min(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_min_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn max_nan(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_mask_mov_ps(_mm512_max_ps(a, b), _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(a, a), a) }
    }
    #[inline(always)]
    unsafe fn relu(a: __m512) -> __m512 {
        unsafe { _mm512_max_ps(_mm512_setzero_ps(), a) }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const f16) -> __m512 {
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(p as *const __m256i)) }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const half::bf16) -> __m512 {
        unsafe {
            let h = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p as *const __m256i));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(h))
        }
    }

    #[inline(always)]
    unsafe fn load_i8(p: *const i8) -> __m512 {
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p as *const __m128i))) }
    }
    #[inline(always)]
    unsafe fn splat_f16(x: f16) -> __m512 {
        unsafe { _mm512_cvtph_ps(_mm256_set1_epi16(x.to_bits() as i16)) }
    }
    #[inline(always)]
    unsafe fn turn_i8(rows: &[*const i8; 16], scale: __m512, dst: *mut f32, stride: usize) {
        // Four bytes are turned as one lane, and separated later. A vector has 32 bytes of two rows, chosen
        // such that the last exchange of 128-bit blocks gives the rows in order.
        unsafe {
            let half = |i: usize| _mm256_loadu_si256(rows[i] as *const __m256i);
            let mut a = [_mm512_setzero_si512(); 8];
            for i in 0..8 {
                let low = if i < 4 { i } else { i + 4 };
                a[i] = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(half(low)), half(low + 4));
            }
            let mut b = a;
            for i in 0..4 {
                b[2 * i] = _mm512_unpacklo_epi32(a[2 * i], a[2 * i + 1]);
                b[2 * i + 1] = _mm512_unpackhi_epi32(a[2 * i], a[2 * i + 1]);
            }
            // a[4 g + c] holds columns c and 4 + c of rows 8 g .. 8 g + 4, then of the next four rows.
            for g in 0..2 {
                for h in 0..2 {
                    let (x, y) = (b[4 * g + h], b[4 * g + 2 + h]);
                    a[4 * g + 2 * h] = _mm512_unpacklo_epi64(x, y);
                    a[4 * g + 2 * h + 1] = _mm512_unpackhi_epi64(x, y);
                }
            }
            for g in 0..8 {
                let (x, y) = (a[g % 4], a[4 + g % 4]);
                let x = match g < 4 {
                    true => _mm512_shuffle_i32x4::<0x88>(x, y),
                    false => _mm512_shuffle_i32x4::<0xdd>(x, y),
                };
                let bytes =
                    [_mm512_slli_epi32::<24>(x), _mm512_slli_epi32::<16>(x), _mm512_slli_epi32::<8>(x), x];
                for e in 0..4 {
                    let v = _mm512_cvtepi32_ps(_mm512_srai_epi32::<24>(bytes[e]));
                    _mm512_storeu_ps(dst.add((4 * g + e) * stride), _mm512_mul_ps(v, scale));
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn sum(v: __m512) -> f32 {
        unsafe {
            let v = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps::<1>(v));
            super::avx2::sum4(_mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v)))
        }
    }
    #[inline(always)]
    unsafe fn turn(r: &mut [__m512; 16]) {
        *r = unsafe { transpose16(*r) };
    }
    #[inline(always)]
    unsafe fn exp_minus(n: usize, x: *const f32, m: f32, y: *mut f32) {
        unsafe { vmath512::exp_minus(n, x, m, y) }
    }
    #[inline(always)]
    unsafe fn weigh(x: *mut f32, rows: usize, stride: usize, base: &[f32], sum: &mut [f32]) {
        // Process 16 columns of all rows at a time, so that their `base` and `sum` stay in registers.
        for (i, (b, t)) in base.chunks_exact(16).zip(sum.chunks_exact_mut(16)).enumerate() {
            unsafe {
                let (base, mut sum) = (_mm512_loadu_ps(b.as_ptr()), _mm512_loadu_ps(t.as_ptr()));
                for j in 0..rows {
                    let p = x.add(j * stride + i * 16);
                    let e = vmath512::exp_16(_mm512_sub_ps(_mm512_loadu_ps(p), base));
                    _mm512_storeu_ps(p, e);
                    sum = _mm512_add_ps(sum, e);
                }
                _mm512_storeu_ps(t.as_mut_ptr(), sum);
            }
        }
    }
    #[inline(always)]
    unsafe fn transpose(src: *const f32, rs: isize, rows: usize, kc: usize, dst: *mut f32, stride: usize) {
        unsafe {
            let mut k = 0;
            while k < kc {
                let nk = (kc - k).min(16);
                let m = mask16(nk);
                let mut r = [_mm512_setzero_ps(); 16];
                if rows == 16 {
                    for i in 0..16 {
                        r[i] = _mm512_maskz_loadu_ps(m, src.offset(i as isize * rs).add(k));
                    }
                } else {
                    for i in 0..rows {
                        r[i] = _mm512_maskz_loadu_ps(m, src.offset(i as isize * rs).add(k));
                    }
                }
                let t = transpose16(r);
                let w = mask16(rows);
                if nk == 16 {
                    for i in 0..16 {
                        _mm512_mask_storeu_ps(dst.add((k + i) * stride), w, t[i]);
                    }
                } else {
                    for i in 0..nk {
                        _mm512_mask_storeu_ps(dst.add((k + i) * stride), w, t[i]);
                    }
                }
                k += 16;
            }
        }
    }
}

/// Transposes a 16x16 block in registers: interleaves single elements, then pairs of elements, then exchanges
/// 128-bit blocks in two rounds.
///
/// # Safety
/// The caller is compiled for AVX-512F.
#[inline(always)]
pub(crate) unsafe fn transpose16(r: [__m512; 16]) -> [__m512; 16] {
    // SAFETY: the contract of `transpose16` gives AVX-512F.
    unsafe {
        let z = _mm512_setzero_ps();
        let mut a = [z; 16];
        for i in 0..8 {
            a[2 * i] = _mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]);
            a[2 * i + 1] = _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]);
        }
        // b[4 g + c] holds, in 128-bit block q, column 4 q + c of rows 4 g .. 4 g + 4.
        let mut b = [z; 16];
        for g in 0..4 {
            let p = |v: __m512| _mm512_castps_pd(v);
            let f = |v: __m512d| _mm512_castpd_ps(v);
            b[4 * g] = f(_mm512_unpacklo_pd(p(a[4 * g]), p(a[4 * g + 2])));
            b[4 * g + 1] = f(_mm512_unpackhi_pd(p(a[4 * g]), p(a[4 * g + 2])));
            b[4 * g + 2] = f(_mm512_unpacklo_pd(p(a[4 * g + 1]), p(a[4 * g + 3])));
            b[4 * g + 3] = f(_mm512_unpackhi_pd(p(a[4 * g + 1]), p(a[4 * g + 3])));
        }
        let mut t = [z; 16];
        for c in 0..4 {
            let (r0, r1, r2, r3) = (b[c], b[4 + c], b[8 + c], b[12 + c]);
            let x0 = _mm512_shuffle_f32x4::<0x88>(r0, r1);
            let x1 = _mm512_shuffle_f32x4::<0xdd>(r0, r1);
            let x2 = _mm512_shuffle_f32x4::<0x88>(r2, r3);
            let x3 = _mm512_shuffle_f32x4::<0xdd>(r2, r3);
            t[c] = _mm512_shuffle_f32x4::<0x88>(x0, x2);
            t[8 + c] = _mm512_shuffle_f32x4::<0xdd>(x0, x2);
            t[4 + c] = _mm512_shuffle_f32x4::<0x88>(x1, x3);
            t[12 + c] = _mm512_shuffle_f32x4::<0xdd>(x1, x3);
        }
        t
    }
}
