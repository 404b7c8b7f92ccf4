//! One vector type per instruction set behind one trait, so that each kernel is written once.
//!
//! The methods are `#[inline(always)]` and must be called from a function compiled for the instruction set
//! (`dispatch_simd!` makes one). This is a safety condition of every `unsafe fn` here, besides the conditions
//! on its pointers. Partial loads and stores access only the requested lanes.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod portable;
mod storage;

#[cfg(target_arch = "x86_64")]
pub(crate) use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) use avx512::{Avx512, mask16, transpose16};
pub(crate) use portable::Portable;
pub(crate) use storage::Storage;

use crate::cpu::sys::Isa;
use crate::cpu::vmath;
use half::{bf16, f16};

/// Vectors of f32. Every method must be called from code compiled for the instruction set.
pub(crate) trait Simd: Copy + Send + Sync + 'static {
    /// A register of [`Simd::W`] lanes.
    type V: Copy;
    /// Number of lanes.
    const W: usize;
    /// Rows of attention's register tile. This number and [`Simd::NV`] are chosen so that the accumulators
    /// fit the registers.
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
    /// The larger value; `b` if either is NaN.
    ///
    /// # Safety
    /// The caller is compiled for this instruction set.
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V;
    /// The smaller value; `b` if either is NaN.
    ///
    /// # Safety
    /// The caller is compiled for this instruction set.
    unsafe fn min(a: Self::V, b: Self::V) -> Self::V;
    /// The larger value; NaN if either is NaN.
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
    /// W signed bytes as floats.
    ///
    /// # Safety
    /// The caller is compiled for this instruction set; `p` has W readable bytes.
    unsafe fn load_i8(p: *const i8) -> Self::V;
    /// `x` in every lane.
    ///
    /// # Safety
    /// The caller is compiled for this instruction set.
    unsafe fn splat_f16(x: f16) -> Self::V;
    /// Transposes 32 signed bytes of each of the first W rows, and multiplies them by the row's scale:
    /// `dst[k * stride + r] = rows[r][k] * scale[r]` for `r < W`, `k < 32`.
    ///
    /// # Safety
    /// The caller is compiled for this instruction set; 32 bytes of each row are readable, and the named
    /// elements of `dst` are writable.
    #[inline(always)]
    unsafe fn turn_i8(rows: &[*const i8; 16], scale: Self::V, dst: *mut f32, stride: usize) {
        let mut s = [0f32; 16];
        // SAFETY: `s` has 16 floats, at least W. The contract makes the bytes readable and the elements
        // writable.
        unsafe {
            Self::store(s.as_mut_ptr(), scale);
            for k in 0..32 {
                for r in 0..Self::W {
                    *dst.add(k * stride + r) = f32::from(*rows[r].add(k)) * s[r];
                }
            }
        }
    }
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

    /// Transposes the block of W rows by W lanes in the first W vectors of `r`.
    ///
    /// # Safety
    /// The caller is compiled for this instruction set.
    #[inline(always)]
    unsafe fn turn(r: &mut [Self::V; 16]) {
        let mut t = [0f32; 256];
        // SAFETY: `t` has 256 floats, at least W rows of W. By the contract of `turn`, the caller is compiled
        // for the instruction set.
        unsafe {
            for i in 0..Self::W {
                Self::store(t.as_mut_ptr().add(i * Self::W), r[i]);
            }
            for i in 0..Self::W {
                let column: [f32; 16] =
                    std::array::from_fn(|j| if j < Self::W { t[j * Self::W + i] } else { 0.0 });
                r[i] = Self::load(column.as_ptr());
            }
        }
    }

    /// Prefetches the cache line at `p`, which need not be readable, into the second-level cache. The default
    /// does nothing.
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
    /// For each of `rows` rows, which start `stride` floats apart: replaces `x[i]` by `e^(x[i] - base[i])`,
    /// and adds the new value to `sum[i]`. `base` has the length of `sum`, a multiple of W.
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

    /// # Safety
    /// The caller is compiled for this instruction set.
    #[inline(always)]
    unsafe fn zero() -> Self::V {
        // SAFETY: by the contract of `zero`, the caller is compiled for the instruction set.
        unsafe { Self::splat(0.0) }
    }

    /// Sum of the lanes by halving: lane i + W/2 is added to lane i, and so on. The order is always the same.
    ///
    /// # Safety
    /// The caller is compiled for this instruction set.
    #[inline(always)]
    unsafe fn sum(v: Self::V) -> f32 {
        let mut t = [0f32; 16];
        // SAFETY: `t` has 16 floats, at least W. By the contract of `sum`, the caller is compiled for the
        // instruction set.
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

/// Defines an unsafe function that runs `$body::<S, ..>(args)` compiled for the instruction set `isa`, where
/// `S` is the [`Simd`] type of `isa`. Panics if `isa` is not available. The two bracketed lists declare and
/// name further generic parameters: `f[T: Storage][T](isa, ...) = body`.
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
