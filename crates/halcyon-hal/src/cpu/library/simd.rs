//! One vector type per instruction set behind one trait, so that each kernel is written once.
//!
//! The methods are `#[inline(always)]` and must be called from a function compiled for the instruction set
//! (`dispatch_simd!` makes one). This is a safety condition of every `unsafe fn` here, besides those of its
//! pointers. Partial loads and stores access only the requested lanes.

use super::gemm::matrix::{Fma, Tile, TileRows, register_tile};
use crate::cpu::sys::Isa;
use crate::cpu::vmath;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

/// Vectors of f32. Every method must be called from code compiled for the instruction set.
pub(crate) trait Simd: Copy + Send + Sync + 'static {
    /// A register of [`Simd::W`] lanes.
    type V: Copy;
    /// Number of lanes.
    const W: usize;
    /// Rows of attention's register tile, chosen together with [`Simd::NV`] so that the accumulators fit the
    /// registers.
    const MR: usize;
    /// Vectors per row of attention's register tile.
    const NV: usize;
    /// Whether multiply-add rounds once.
    const FMA: bool;
    /// The instruction set.
    const ISA: Isa;

    /// `x` in every lane.
    ///
    /// # Safety
    /// The caller is compiled for this instruction set.
    unsafe fn splat(x: f32) -> Self::V;
    /// # Safety
    /// The caller is compiled for this instruction set; `p` has W readable floats.
    unsafe fn load(p: *const f32) -> Self::V;
    /// # Safety
    /// The caller is compiled for this instruction set; `p` has room for W floats.
    unsafe fn store(p: *mut f32, v: Self::V);
    /// Loads the first `n <= W` lanes; the others are 0.
    ///
    /// # Safety
    /// The caller is compiled for this instruction set; `p` has `n` readable floats.
    unsafe fn load_part(p: *const f32, n: usize) -> Self::V;
    /// Stores the first `n <= W` lanes.
    ///
    /// # Safety
    /// The caller is compiled for this instruction set; `p` has room for `n` floats.
    unsafe fn store_part(p: *mut f32, v: Self::V, n: usize);
    /// # Safety
    /// The caller is compiled for this instruction set.
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V;
    /// # Safety
    /// The caller is compiled for this instruction set.
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`.
    ///
    /// # Safety
    /// The caller is compiled for this instruction set.
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// `max(a, 0)`; NaN stays NaN.
    ///
    /// # Safety
    /// The caller is compiled for this instruction set.
    unsafe fn relu(a: Self::V) -> Self::V;
    /// # Safety
    /// The caller is compiled for this instruction set.
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V;
    /// The larger; `b` if either is NaN.
    ///
    /// # Safety
    /// The caller is compiled for this instruction set.
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V;
    /// The smaller; `b` if either is NaN.
    ///
    /// # Safety
    /// The caller is compiled for this instruction set.
    unsafe fn min(a: Self::V, b: Self::V) -> Self::V;
    /// The larger; NaN if either is NaN.
    ///
    /// # Safety
    /// The caller is compiled for this instruction set.
    unsafe fn max_nan(a: Self::V, b: Self::V) -> Self::V;
    /// Loads `p[0], p[2], ..` into `n <= W` lanes; the others are 0. Reads nothing past `p[2 (n - 1)]`.
    ///
    /// # Safety
    /// The caller is compiled for this instruction set; `p[2 i]` is readable for `i < n`, and `n <= W`.
    #[inline(always)]
    unsafe fn load_even(p: *const f32, n: usize) -> Self::V {
        let mut t = [0f32; 16];
        // SAFETY: the contract makes `p[2 i]` readable for `i < n <= W`, and `t` has 16 floats, at least W.
        unsafe {
            for i in 0..n {
                t[i] = *p.add(2 * i);
            }
            Self::load(t.as_ptr())
        }
    }
    /// Converts W f16 values.
    ///
    /// # Safety
    /// The caller is compiled for this instruction set; `p` has W readable elements, not necessarily aligned.
    unsafe fn load_f16(p: *const f16) -> Self::V;
    /// Converts W bf16 values.
    ///
    /// # Safety
    /// The caller is compiled for this instruction set; `p` has W readable elements, not necessarily aligned.
    unsafe fn load_bf16(p: *const bf16) -> Self::V;
    /// `dst[k * stride + r] = src[r * rs + k]` for `r < rows`, `k < kc`, where `rows <= W`.
    ///
    /// # Safety
    /// The caller is compiled for this instruction set; `rows <= W`; the named elements of `src` are readable
    /// and those of `dst` writable.
    unsafe fn transpose(src: *const f32, rs: isize, rows: usize, kc: usize, dst: *mut f32, stride: usize) {
        // SAFETY: the contract makes `src[r * rs + k]` readable and `dst[k * stride + r]` writable for these
        // ranges.
        unsafe {
            for r in 0..rows {
                let s = src.offset(r as isize * rs);
                for k in 0..kc {
                    *dst.add(k * stride + r) = *s.add(k);
                }
            }
        }
    }

    /// Prefetches the cache line at `p`, which need not be readable, into the second-level cache.
    ///
    /// # Safety
    /// The caller is compiled for this instruction set.
    #[inline(always)]
    unsafe fn prefetch(_p: *const f32) {}
    /// `y[i] = e^(x[i] - m)` for `i < n`; `x` and `y` may be equal.
    ///
    /// # Safety
    /// The caller is compiled for this instruction set; `x` has `n` readable floats and `y` room for `n`.
    #[inline(always)]
    unsafe fn exp_minus(n: usize, x: *const f32, m: f32, y: *mut f32) {
        for i in 0..n {
            // SAFETY: the contract makes `x` readable and `y` writable for `i < n`.
            unsafe {
                let d = *x.add(i) - m;
                *y.add(i) = if Self::FMA { vmath::exp::<true>(d) } else { vmath::exp::<false>(d) };
            }
        }
    }
    /// `x[i] = e^(x[i] - base[i])`, added to `sum[i]`, for each of `rows` rows that start `stride` floats
    /// apart. `base` has the length of `sum`, a multiple of W.
    ///
    /// # Safety
    /// The caller is compiled for this instruction set; `x` is valid for `sum.len()` floats at each of the
    /// rows, which overlap neither `base` nor `sum`.
    #[inline(always)]
    unsafe fn weigh(x: *mut f32, rows: usize, stride: usize, base: &[f32], sum: &mut [f32]) {
        for j in 0..rows {
            // SAFETY: the contract makes `sum.len()` floats of row `j` valid and exclusive.
            let row = unsafe { std::slice::from_raw_parts_mut(x.add(j * stride), sum.len()) };
            for ((x, b), t) in row.iter_mut().zip(base).zip(sum.iter_mut()) {
                let d = *x - *b;
                *x = if Self::FMA { vmath::exp::<true>(d) } else { vmath::exp::<false>(d) };
                *t += *x;
            }
        }
    }

    /// Largest number of rows, and vectors per row, of the register tile of [`super::gemm::panels`].
    const ROWS: usize;
    const VECS: usize;
    /// Computes a register tile from rows of A that start `rs` floats apart; see
    /// [`super::gemm::matrix::register_tile`]. `out` has ROWS, ROWS - 1, 4, 2 or 1 rows.
    ///
    /// # Safety
    /// The caller is compiled for this instruction set; otherwise the contract of
    /// [`super::gemm::matrix::register_tile`].
    unsafe fn tile(kc: usize, a: *const f32, rs: isize, b: *const f32, out: &Tile);

    /// # Safety
    /// The caller is compiled for this instruction set.
    #[inline(always)]
    unsafe fn zero() -> Self::V {
        // SAFETY: the contract of `zero` gives the instruction set.
        unsafe { Self::splat(0.0) }
    }

    /// Sum of the lanes by halving: lane i + W/2 is added to lane i, and so on. The order is always the same.
    ///
    /// # Safety
    /// The caller is compiled for this instruction set.
    #[inline(always)]
    unsafe fn sum(v: Self::V) -> f32 {
        let mut t = [0f32; 16];
        // SAFETY: `t` has 16 floats, at least W; the contract of `sum` gives the instruction set.
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

/// Calls `register_tile` with the number of rows and vectors of `$out`.
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

/// The sizes that follow from an instruction set's vectors.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Sizes {
    /// Lanes of a vector.
    pub lanes: usize,
    /// Columns per panel of [`super::gemm::panels`].
    pub panel: usize,
    /// Rows and columns of attention's register tile.
    pub attention: (usize, usize),
}

impl Sizes {
    pub(crate) fn of(isa: Isa) -> Sizes {
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

/// Number of lanes of an instruction set's vectors.
pub(crate) fn lanes(isa: Isa) -> usize {
    Sizes::of(isa).lanes
}

/// Plain arrays, which the compiler turns into the baseline's vectors.
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
        // SAFETY: `Simd::tile` has the contract of `register_tile`.
        unsafe { tile_of_rows!(kc, a, rs, b, out) }
    }

    #[inline(always)]
    unsafe fn splat(x: f32) -> [f32; 4] {
        [x; 4]
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> [f32; 4] {
        // SAFETY: the contract of `load` makes 4 floats at `p` readable.
        unsafe { std::ptr::read_unaligned(p as *const [f32; 4]) }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: [f32; 4]) {
        // SAFETY: the contract of `store` makes 4 floats at `p` writable.
        unsafe { std::ptr::write_unaligned(p as *mut [f32; 4], v) }
    }
    #[inline(always)]
    unsafe fn load_part(p: *const f32, n: usize) -> [f32; 4] {
        // SAFETY: only lanes below `n` are read, which the contract makes readable.
        std::array::from_fn(|i| if i < n { unsafe { *p.add(i) } } else { 0.0 })
    }
    #[inline(always)]
    unsafe fn store_part(p: *mut f32, v: [f32; 4], n: usize) {
        for i in 0..n.min(4) {
            // SAFETY: only lanes below `n` are written, which the contract makes writable.
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
        // SAFETY: the contract of `load_f16` makes 4 elements at `p` readable.
        std::array::from_fn(|i| unsafe { p.add(i).read_unaligned() }.to_f32())
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const bf16) -> [f32; 4] {
        // SAFETY: the contract of `load_bf16` makes 4 elements at `p` readable.
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

    /// A mask of the first `n` lanes.
    ///
    /// # Safety
    /// The caller is compiled for AVX2.
    #[inline(always)]
    unsafe fn mask8(n: usize) -> __m256i {
        // SAFETY: the contract of `mask8` gives AVX2.
        unsafe { _mm256_cmpgt_epi32(_mm256_set1_epi32(n as i32), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)) }
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
        unsafe fn tile(kc: usize, a: *const f32, rs: isize, b: *const f32, out: &Tile) {
            // SAFETY: `Simd::tile` has the contract of `register_tile`.
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
    }

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
        unsafe fn tile(kc: usize, a: *const f32, rs: isize, b: *const f32, out: &Tile) {
            // SAFETY: `Simd::tile` has the contract of `register_tile`.
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
            // Column by column, so that `base` and `sum` stay in registers.
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

    /// Transposes a 16x16 block in registers: pairs, then groups of four, then 128-bit blocks twice.
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
}

/// Storage dtypes that are computed in f32.
pub(crate) trait Storage: Copy + Send + Sync + 'static {
    /// True for f32 itself.
    const IS_F32: bool;
    /// Loads W elements.
    ///
    /// # Safety
    /// The caller is compiled for `S`'s instruction set; `p` has W readable elements.
    unsafe fn load<S: Simd>(p: *const Self) -> S::V;
    /// Loads the first `n <= W` elements; the other lanes are 0.
    ///
    /// # Safety
    /// The caller is compiled for `S`'s instruction set; `p` has `n` readable elements.
    unsafe fn load_part<S: Simd>(p: *const Self, n: usize) -> S::V;
    fn widen(self) -> f32;
    /// Widens `src` to f32; `dst` has its length.
    fn widen_slice(src: &[Self], dst: &mut [f32]);
    /// Rounds `src` to nearest, ties to even; the lengths are equal.
    fn narrow_slice(src: &[f32], dst: &mut [Self]);
}

impl Storage for f32 {
    const IS_F32: bool = true;
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const f32) -> S::V {
        // SAFETY: `Storage::load` has the contract of `Simd::load`.
        unsafe { S::load(p) }
    }
    #[inline(always)]
    unsafe fn load_part<S: Simd>(p: *const f32, n: usize) -> S::V {
        // SAFETY: `Storage::load_part` has the contract of `Simd::load_part`.
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
                // SAFETY: `Storage::load` makes W elements at `p` readable and gives the instruction set.
                unsafe { S::$load(p) }
            }
            #[inline(always)]
            unsafe fn load_part<S: Simd>(p: *const $t, n: usize) -> S::V {
                let mut t = [$t::ZERO; 16];
                // SAFETY: the contract makes `n` elements at `p` readable; `t` has 16, at least W.
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
    // SAFETY: `Isa::best` returns a set that is available here.
    unsafe { widen_bf16(Isa::best(), src, dst) }
}

fn narrow_bf16_best(src: &[f32], dst: &mut [bf16]) {
    // SAFETY: `Isa::best` returns a set that is available here.
    unsafe { narrow_bf16(Isa::best(), src, dst) }
}

dispatch_simd! {
    /// # Safety
    /// None besides an available `isa`, which is checked.
    unsafe fn widen_bf16[][](isa, src: &[bf16], dst: &mut [f32]) = widen_bf16_body
}
dispatch_simd! {
    /// # Safety
    /// None besides an available `isa`, which is checked.
    unsafe fn narrow_bf16[][](isa, src: &[f32], dst: &mut [bf16]) = narrow_bf16_body
}

/// A plain loop, which becomes vector code in the functions above.
///
/// # Safety
/// The caller is compiled for `S`'s instruction set.
#[inline(always)]
unsafe fn widen_bf16_body<S: Simd>(src: &[bf16], dst: &mut [f32]) {
    for (s, d) in src.iter().zip(dst) {
        *d = f32::from_bits(u32::from(s.to_bits()) << 16);
    }
}

/// Rounds like `bf16::from_f32`: to nearest, ties to even; NaN becomes quiet.
///
/// # Safety
/// The caller is compiled for `S`'s instruction set.
#[inline(always)]
unsafe fn narrow_bf16_body<S: Simd>(src: &[f32], dst: &mut [bf16]) {
    for (s, d) in src.iter().zip(dst) {
        let x = s.to_bits();
        let near = x.wrapping_add(0x7fff + (x >> 16 & 1)) >> 16;
        let nan = x >> 16 | 0x40;
        *d = bf16::from_bits(if x & 0x7fff_ffff > 0x7f80_0000 { nan } else { near } as u16);
    }
}

/// Defines an unsafe function that runs `$body::<S, ..>(args)`, generic over the [`Simd`] type and compiled
/// for `isa`. Panics if `isa` is not available. The two bracketed lists declare and name further generic
/// parameters: `f[T: Storage][T](isa, ...) = body`.
macro_rules! dispatch_simd {
    ($(#[$doc:meta])* $vis:vis unsafe fn $name:ident [$($g:tt)*] [$($u:tt)*] ($isa:ident $(, $arg:ident: $ty:ty)* $(,)?) = $body:ident) => {
        $(#[$doc])*
        $vis unsafe fn $name<$($g)*>($isa: $crate::cpu::sys::Isa $(, $arg: $ty)*) {
            /// # Safety
            /// The contract of the enclosing function, on a processor with AVX-512.
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
            unsafe fn avx512<$($g)*>($($arg: $ty),*) {
                // SAFETY: the contract of `$name` holds, and this function is compiled for AVX-512.
                unsafe { $body::<$crate::cpu::library::simd::Avx512, $($u)*>($($arg),*) }
            }
            /// # Safety
            /// The contract of the enclosing function, on a processor with AVX2, FMA and F16C.
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c")]
            unsafe fn avx2<$($g)*>($($arg: $ty),*) {
                // SAFETY: the contract of `$name` holds, and this function is compiled for AVX2.
                unsafe { $body::<$crate::cpu::library::simd::Avx2, $($u)*>($($arg),*) }
            }
            // SAFETY: `check` verified the instruction set; `$name` has the rest of the body's contract.
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
            // SAFETY: `isa` is one of the available sets.
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
