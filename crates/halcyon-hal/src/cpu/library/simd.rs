//! One vector type per instruction set, behind one trait, so that each kernel is written once.
//!
//! The methods are `#[inline(always)]` and must be reached from a function compiled for the instruction set
//! (`dispatch_simd!` makes one): that is the safety condition of every `unsafe fn` here, beside those of its
//! pointers. Partial loads and stores touch only the lanes asked for.

use super::mat::{Fma, Tile, TileRows, register_tile};
use crate::cpu::sys::Isa;
use crate::cpu::vmath;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

/// Vectors of f32.
pub(crate) trait Simd: Copy + Send + Sync + 'static {
    /// A register of [`Simd::W`] lanes.
    type V: Copy;
    /// Lanes.
    const W: usize;
    /// Rows of attention's register tiles, chosen with [`Simd::NV`] so that the accumulators stay in
    /// registers.
    const MR: usize;
    /// Vectors of a row of those.
    const NV: usize;
    /// Whether multiply-add is one rounding.
    const FMA: bool;
    /// The instruction set's name.
    const ISA: Isa;

    unsafe fn splat(x: f32) -> Self::V;
    unsafe fn load(p: *const f32) -> Self::V;
    unsafe fn store(p: *mut f32, v: Self::V);
    /// The first `n <= W` lanes; the others are 0.
    unsafe fn load_part(p: *const f32, n: usize) -> Self::V;
    /// The first `n <= W` lanes.
    unsafe fn store_part(p: *mut f32, v: Self::V, n: usize);
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`.
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// `max(a, 0)` that keeps NaN.
    unsafe fn relu(a: Self::V) -> Self::V;
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V;
    /// The larger; `b` where one is NaN.
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V;
    /// The smaller; `b` where one is NaN.
    unsafe fn min(a: Self::V, b: Self::V) -> Self::V;
    /// The larger; NaN where one is NaN.
    unsafe fn max_nan(a: Self::V, b: Self::V) -> Self::V;
    /// `p[0], p[2], ..`: `n <= W` lanes, zeros after them. Reads nothing past `p[2 (n - 1)]`.
    #[inline(always)]
    unsafe fn load_even(p: *const f32, n: usize) -> Self::V {
        let mut t = [0f32; 16];
        // SAFETY: the caller's; W <= 16.
        unsafe {
            for i in 0..n {
                t[i] = *p.add(2 * i);
            }
            Self::load(t.as_ptr())
        }
    }
    /// Converts W halves.
    unsafe fn load_f16(p: *const f16) -> Self::V;
    /// Converts W bfloats.
    unsafe fn load_bf16(p: *const bf16) -> Self::V;
    /// `dst[k * stride + r] = src[r * rs + k]` for `r < rows`, `k < kc`, where `rows <= W`.
    unsafe fn transpose(src: *const f32, rs: isize, rows: usize, kc: usize, dst: *mut f32, stride: usize) {
        // SAFETY: the caller's.
        unsafe {
            for r in 0..rows {
                let s = src.offset(r as isize * rs);
                for k in 0..kc {
                    *dst.add(k * stride + r) = *s.add(k);
                }
            }
        }
    }

    /// Asks for the cache line at `p`, which need not be readable, to be in the second level soon.
    #[inline(always)]
    unsafe fn prefetch(_p: *const f32) {}
    /// `y[i] = e^(x[i] - m)` for `i < n`; the pointers may be equal.
    #[inline(always)]
    unsafe fn exp_minus(n: usize, x: *const f32, m: f32, y: *mut f32) {
        for i in 0..n {
            // SAFETY: the caller's.
            unsafe {
                let d = *x.add(i) - m;
                *y.add(i) = if Self::FMA { vmath::exp::<true>(d) } else { vmath::exp::<false>(d) };
            }
        }
    }
    /// `x[i] = e^(x[i] - base[i])`, added to `sum[i]`, for each of `rows` rows that begin `stride` apart.
    /// `base` is as long as `sum`, a multiple of W.
    #[inline(always)]
    unsafe fn weigh(x: *mut f32, rows: usize, stride: usize, base: &[f32], sum: &mut [f32]) {
        for j in 0..rows {
            // SAFETY: the caller's.
            let row = unsafe { std::slice::from_raw_parts_mut(x.add(j * stride), sum.len()) };
            for ((x, b), t) in row.iter_mut().zip(base).zip(sum.iter_mut()) {
                let d = *x - *b;
                *x = if Self::FMA { vmath::exp::<true>(d) } else { vmath::exp::<false>(d) };
                *t += *x;
            }
        }
    }

    /// Most rows, and vectors of a row, of the register tile of [`super::panels`].
    const ROWS: usize;
    const VECS: usize;
    /// The tile over rows of A as they lie, `rs` floats apart; see [`super::mat::register_tile`]. `out` has
    /// ROWS, ROWS - 1, 4, 2 or 1 rows.
    unsafe fn tile(kc: usize, a: *const f32, rs: isize, b: *const f32, out: &Tile);

    #[inline(always)]
    unsafe fn zero() -> Self::V {
        // SAFETY: the caller's.
        unsafe { Self::splat(0.0) }
    }

    /// Sum of the lanes by halving: lane i + W/2 onto lane i, and so on. The same order on every call.
    #[inline(always)]
    unsafe fn sum(v: Self::V) -> f32 {
        let mut t = [0f32; 16];
        // SAFETY: W <= 16.
        unsafe { Self::store(t.as_mut_ptr(), v) };
        let mut h = Self::W / 2;
        while h > 0 {
            for i in 0..h {
                t[i] += t[i + h];
            }
            h /= 2;
        }
        t[0]
    }
}

/// The register tile with as many rows and vectors as there are.
macro_rules! tile_of_rows {
    ($kc:expr, $a:expr, $rs:expr, $b:expr, $out:expr) => {
        match $out.cols.div_ceil(Self::W) {
            1 => tile_of_rows!(1, $kc, $a, $rs, $b, $out),
            2 => tile_of_rows!(2, $kc, $a, $rs, $b, $out),
            _ => tile_of_rows!({ Self::VECS }, $kc, $a, $rs, $b, $out),
        }
    };
    ($nv:tt, $kc:expr, $a:expr, $rs:expr, $b:expr, $out:expr) => {
        if $out.rows == Self::ROWS {
            register_tile::<Self, Fma, { Self::ROWS }, $nv>(
                $kc,
                TileRows { ptr: $a, rs: $rs, ks: 1 },
                $b,
                $out,
            )
        } else if $out.rows == Self::ROWS - 1 {
            register_tile::<Self, Fma, { Self::ROWS - 1 }, $nv>(
                $kc,
                TileRows { ptr: $a, rs: $rs, ks: 1 },
                $b,
                $out,
            )
        } else if $out.rows == 4 {
            register_tile::<Self, Fma, 4, $nv>($kc, TileRows { ptr: $a, rs: $rs, ks: 1 }, $b, $out)
        } else if $out.rows == 2 {
            register_tile::<Self, Fma, 2, $nv>($kc, TileRows { ptr: $a, rs: $rs, ks: 1 }, $b, $out)
        } else {
            register_tile::<Self, Fma, 1, $nv>($kc, TileRows { ptr: $a, rs: $rs, ks: 1 }, $b, $out)
        }
    };
}

/// The constants of an instruction set's vectors.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Sizes {
    /// Lanes of a vector.
    pub lanes: usize,
    /// Columns of a panel of [`super::panels`].
    pub panel: usize,
    /// Rows and columns of attention's register tile.
    pub attention: (usize, usize),
}

impl Sizes {
    pub fn of(isa: Isa) -> Sizes {
        const fn of<S: Simd>() -> Sizes {
            Sizes { lanes: S::W, panel: S::VECS * S::W, attention: (S::MR, S::NV * S::W) }
        }
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => of::<Avx512>(),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => of::<Avx2>(),
            _ => of::<Portable>(),
        }
    }
}

/// Lanes of the vectors of an instruction set.
pub(crate) fn lanes(isa: Isa) -> usize {
    Sizes::of(isa).lanes
}

/// Plain arrays, which compilers turn into the baseline's vectors.
#[derive(Clone, Copy)]
pub(crate) struct Portable;

impl Simd for Portable {
    type V = [f32; 4];
    const W: usize = 4;
    const MR: usize = if cfg!(target_arch = "aarch64") { 8 } else { 4 };
    const NV: usize = 2;
    const ROWS: usize = Self::MR;
    const VECS: usize = 2;
    const FMA: bool = cfg!(target_arch = "aarch64");
    const ISA: Isa = Isa::Portable;

    #[inline(always)]
    unsafe fn tile(kc: usize, a: *const f32, rs: isize, b: *const f32, out: &Tile) {
        // SAFETY: the caller's.
        unsafe { tile_of_rows!(kc, a, rs, b, out) }
    }

    #[inline(always)]
    unsafe fn splat(x: f32) -> [f32; 4] {
        [x; 4]
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> [f32; 4] {
        // SAFETY: the caller's pointer covers 4 floats.
        unsafe { std::ptr::read_unaligned(p as *const [f32; 4]) }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: [f32; 4]) {
        // SAFETY: the caller's pointer covers 4 floats.
        unsafe { std::ptr::write_unaligned(p as *mut [f32; 4], v) }
    }
    #[inline(always)]
    unsafe fn load_part(p: *const f32, n: usize) -> [f32; 4] {
        // SAFETY: only lanes below n are read.
        std::array::from_fn(|i| if i < n { unsafe { *p.add(i) } } else { 0.0 })
    }
    #[inline(always)]
    unsafe fn store_part(p: *mut f32, v: [f32; 4], n: usize) {
        for i in 0..n.min(4) {
            // SAFETY: only lanes below n are written.
            unsafe { *p.add(i) = v[i] };
        }
    }
    #[inline(always)]
    unsafe fn add(a: [f32; 4], b: [f32; 4]) -> [f32; 4] {
        std::array::from_fn(|i| a[i] + b[i])
    }
    #[inline(always)]
    unsafe fn mul(a: [f32; 4], b: [f32; 4]) -> [f32; 4] {
        std::array::from_fn(|i| a[i] * b[i])
    }
    #[inline(always)]
    unsafe fn fma(a: [f32; 4], b: [f32; 4], c: [f32; 4]) -> [f32; 4] {
        std::array::from_fn(|i| if Self::FMA { a[i].mul_add(b[i], c[i]) } else { a[i] * b[i] + c[i] })
    }
    #[inline(always)]
    unsafe fn sub(a: [f32; 4], b: [f32; 4]) -> [f32; 4] {
        std::array::from_fn(|i| a[i] - b[i])
    }
    #[inline(always)]
    unsafe fn max(a: [f32; 4], b: [f32; 4]) -> [f32; 4] {
        std::array::from_fn(|i| if a[i] > b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    unsafe fn min(a: [f32; 4], b: [f32; 4]) -> [f32; 4] {
        std::array::from_fn(|i| if a[i] < b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    unsafe fn max_nan(a: [f32; 4], b: [f32; 4]) -> [f32; 4] {
        std::array::from_fn(|i| if a[i].is_nan() || a[i] > b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    unsafe fn relu(a: [f32; 4]) -> [f32; 4] {
        a.map(|x| if x < 0.0 { 0.0 } else { x })
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const f16) -> [f32; 4] {
        // SAFETY: the caller's pointer covers 4 halves.
        std::array::from_fn(|i| unsafe { p.add(i).read_unaligned() }.to_f32())
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const bf16) -> [f32; 4] {
        // SAFETY: the caller's pointer covers 4 bfloats.
        std::array::from_fn(|i| f32::from_bits((unsafe { p.add(i).read_unaligned() }.to_bits() as u32) << 16))
    }
}

#[cfg(target_arch = "x86_64")]
pub(crate) use x86::{Avx2, Avx512, mask16, transpose16};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{Fma, Simd, Tile, TileRows, register_tile};
    use crate::cpu::sys::Isa;
    use crate::cpu::vmath512;
    use half::f16;
    use std::arch::x86_64::*;

    /// 8 lanes.
    #[derive(Clone, Copy)]
    pub(crate) struct Avx2;

    #[inline(always)]
    unsafe fn mask8(n: usize) -> __m256i {
        // SAFETY: AVX2 by the trait's condition.
        unsafe { _mm256_cmpgt_epi32(_mm256_set1_epi32(n as i32), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)) }
    }

    // SAFETY (of every block below): the trait's condition, that the caller is compiled for these
    // instructions, and the caller's promise about its pointers.
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
        unsafe fn tile(kc: usize, a: *const f32, rs: isize, b: *const f32, out: &Tile) {
            // SAFETY: the caller's.
            unsafe { tile_of_rows!(kc, a, rs, b, out) }
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
            // The second operand is returned when one is NaN.
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
    }

    /// 16 lanes.
    #[derive(Clone, Copy)]
    pub(crate) struct Avx512;

    #[inline(always)]
    pub(crate) fn mask16(n: usize) -> __mmask16 {
        ((1u32 << n) - 1) as __mmask16
    }

    // SAFETY (of every block below): as for AVX2.
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
        unsafe fn tile(kc: usize, a: *const f32, rs: isize, b: *const f32, out: &Tile) {
            // SAFETY: the caller's.
            unsafe { tile_of_rows!(kc, a, rs, b, out) }
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
        unsafe fn exp_minus(n: usize, x: *const f32, m: f32, y: *mut f32) {
            unsafe { vmath512::exp_minus(n, x, m, y) }
        }
        #[inline(always)]
        unsafe fn weigh(x: *mut f32, rows: usize, stride: usize, base: &[f32], sum: &mut [f32]) {
            // Column by column, so that base and sum stay in registers.
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
        unsafe fn transpose(
            src: *const f32,
            rs: isize,
            rows: usize,
            kc: usize,
            dst: *mut f32,
            stride: usize,
        ) {
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

    /// Transposes a 16x16 block in registers: pairs, then quads, then 128-bit blocks twice.
    #[inline(always)]
    pub(crate) unsafe fn transpose16(r: [__m512; 16]) -> [__m512; 16] {
        // SAFETY: AVX-512 by the trait's condition.
        unsafe {
            let z = _mm512_setzero_ps();
            let mut a = [z; 16];
            for i in 0..8 {
                a[2 * i] = _mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]);
                a[2 * i + 1] = _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]);
            }
            // b[4 g + c] holds, per 128-bit block q, column 4 q + c of rows 4 g .. 4 g + 4.
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
}

/// Storage types that are computed with in f32.
pub(crate) trait Storage: Copy + Send + Sync + 'static {
    /// True for f32 itself.
    const IS_F32: bool;
    /// W elements.
    unsafe fn load<S: Simd>(p: *const Self) -> S::V;
    /// The first `n <= W` elements, zeros after them.
    unsafe fn load_part<S: Simd>(p: *const Self, n: usize) -> S::V;
    fn widen(self) -> f32;
    /// Widens the whole of `src`; `dst` has its length.
    fn widen_slice(src: &[Self], dst: &mut [f32]);
    /// Rounds to nearest, ties to even; the lengths are equal.
    fn narrow_slice(src: &[f32], dst: &mut [Self]);
}

impl Storage for f32 {
    const IS_F32: bool = true;
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const f32) -> S::V {
        // SAFETY: the caller's.
        unsafe { S::load(p) }
    }
    #[inline(always)]
    unsafe fn load_part<S: Simd>(p: *const f32, n: usize) -> S::V {
        // SAFETY: the caller's.
        unsafe { S::load_part(p, n) }
    }
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }
    #[inline(always)]
    fn widen_slice(src: &[f32], dst: &mut [f32]) {
        dst.copy_from_slice(src);
    }
    #[inline(always)]
    fn narrow_slice(src: &[f32], dst: &mut [f32]) {
        dst.copy_from_slice(src);
    }
}

macro_rules! half_storage {
    ($t:ident $load:ident $widen:expr, $narrow:expr) => {
        impl Storage for $t {
            const IS_F32: bool = false;
            #[inline(always)]
            unsafe fn load<S: Simd>(p: *const $t) -> S::V {
                // SAFETY: the caller's.
                unsafe { S::$load(p) }
            }
            #[inline(always)]
            unsafe fn load_part<S: Simd>(p: *const $t, n: usize) -> S::V {
                let mut t = [$t::ZERO; 16];
                // SAFETY: only n elements are read from the caller's pointer; W <= 16.
                unsafe {
                    for i in 0..n {
                        t[i] = *p.add(i);
                    }
                    S::$load(t.as_ptr())
                }
            }
            #[inline(always)]
            fn widen(self) -> f32 {
                self.to_f32()
            }
            fn widen_slice(src: &[$t], dst: &mut [f32]) {
                $widen(src, dst)
            }
            fn narrow_slice(src: &[f32], dst: &mut [$t]) {
                $narrow(src, dst)
            }
        }
    };
}
half_storage!(f16 load_f16 |s: &[f16], d| s.convert_to_f32_slice(d), |s, d: &mut [f16]| d.convert_from_f32_slice(s));
half_storage!(bf16 load_bf16 widen_bf16_best, narrow_bf16_best);

fn widen_bf16_best(src: &[bf16], dst: &mut [f32]) {
    // SAFETY: this set is here.
    unsafe { widen_bf16(Isa::best(), src, dst) }
}

fn narrow_bf16_best(src: &[f32], dst: &mut [bf16]) {
    // SAFETY: this set is here.
    unsafe { narrow_bf16(Isa::best(), src, dst) }
}

dispatch_simd! {
    unsafe fn widen_bf16[][](isa, src: &[bf16], dst: &mut [f32]) = widen_bf16_body
}
dispatch_simd! {
    unsafe fn narrow_bf16[][](isa, src: &[f32], dst: &mut [bf16]) = narrow_bf16_body
}

/// A plain loop, which is vector code in the functions above.
#[inline(always)]
unsafe fn widen_bf16_body<S: Simd>(src: &[bf16], dst: &mut [f32]) {
    for (s, d) in src.iter().zip(dst) {
        *d = f32::from_bits(u32::from(s.to_bits()) << 16);
    }
}

/// As `bf16::from_f32`: to nearest, ties to even, NaN quiet.
#[inline(always)]
unsafe fn narrow_bf16_body<S: Simd>(src: &[f32], dst: &mut [bf16]) {
    for (s, d) in src.iter().zip(dst) {
        let x = s.to_bits();
        let near = x.wrapping_add(0x7fff + (x >> 16 & 1)) >> 16;
        let nan = x >> 16 | 0x40;
        *d = bf16::from_bits(if x & 0x7fff_ffff > 0x7f80_0000 { nan } else { near } as u16);
    }
}

/// Defines an unsafe function that runs `$body::<S, ..>(args)`, generic over the [`Simd`] type, compiled for
/// `isa`. The two bracketed lists are the further generic parameters, declared and named: `f[T:
/// Storage][T](isa, ...) = body`.
macro_rules! dispatch_simd {
    ($(#[$doc:meta])* $vis:vis unsafe fn $name:ident [$($g:tt)*] [$($u:tt)*] ($isa:ident $(, $arg:ident: $ty:ty)* $(,)?) = $body:ident) => {
        $(#[$doc])*
        $vis unsafe fn $name<$($g)*>($isa: $crate::cpu::sys::Isa $(, $arg: $ty)*) {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
            unsafe fn avx512<$($g)*>($($arg: $ty),*) {
                // SAFETY: the caller's condition.
                unsafe { $body::<$crate::cpu::library::simd::Avx512, $($u)*>($($arg),*) }
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c")]
            unsafe fn avx2<$($g)*>($($arg: $ty),*) {
                // SAFETY: the caller's condition.
                unsafe { $body::<$crate::cpu::library::simd::Avx2, $($u)*>($($arg),*) }
            }
            // SAFETY: `check` has verified the features; the rest is the caller's condition.
            unsafe {
                match $isa.check() {
                    #[cfg(target_arch = "x86_64")]
                    $crate::cpu::sys::Isa::Avx512 => avx512::<$($u)*>($($arg),*),
                    #[cfg(target_arch = "x86_64")]
                    $crate::cpu::sys::Isa::Avx2 => avx2::<$($u)*>($($arg),*),
                    _ => $body::<$crate::cpu::library::simd::Portable, $($u)*>($($arg),*),
                }
            }
        }
    };
}
pub(crate) use dispatch_simd;

#[cfg(test)]
mod bf16_tests {
    use super::*;

    #[test]
    fn conversions_are_those_of_the_type() {
        let edges = [
            0u32,
            1,
            0x7fff,
            0x8000,
            0x8001,
            0x1_7fff,
            0x1_8000,
            0x7f7f_ffff,
            0x7f80_0000,
            0x7f80_0001,
            0x7fff_ffff,
        ];
        let mut rng = super::super::testing::Rng::new();
        let random = std::iter::repeat_with(|| rng.f32().to_bits().wrapping_mul(0x9e37_79b9)).take(100_000);
        let bits = edges.iter().flat_map(|e| [*e, *e | 1 << 31]).chain(random);
        let x: Vec<f32> = bits.map(f32::from_bits).collect();
        for isa in Isa::available() {
            let (mut y, mut z) = (vec![bf16::ZERO; x.len()], vec![0f32; x.len()]);
            // SAFETY: this set is here.
            unsafe {
                narrow_bf16(isa, &x, &mut y);
                widen_bf16(isa, &y, &mut z);
            }
            for i in 0..x.len() {
                let want = bf16::from_f32(x[i]);
                assert_eq!(y[i].to_bits(), want.to_bits(), "{isa:?} {:x}", x[i].to_bits());
                assert_eq!(z[i].to_bits(), u32::from(want.to_bits()) << 16, "{isa:?}");
            }
        }
    }
}
