//! Element types in memory that are computed in f32, and their conversions.

use super::{Simd, dispatch_simd};
use crate::cpu::sys::Isa;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

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
    /// Widens `src` to f32; the lengths are equal.
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
                // SAFETY: by the contract of `Storage::load`, W elements at `p` are readable, and the caller
                // is compiled for the instruction set of `S`.
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
    // SAFETY: the function has no conditions.
    unsafe { widen_bf16(Isa::best(), src, dst) }
}

fn narrow_bf16_best(src: &[f32], dst: &mut [bf16]) {
    // SAFETY: the function has no conditions.
    unsafe { narrow_bf16(Isa::best(), src, dst) }
}

dispatch_simd! {
    /// # Safety
    /// No conditions; the dispatch checks that `isa` is available.
    unsafe fn widen_bf16[][](isa, src: &[bf16], dst: &mut [f32]) = widen_bf16_body
}
dispatch_simd! {
    /// # Safety
    /// No conditions; the dispatch checks that `isa` is available.
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

#[cfg(test)]
mod tests {
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
        let mut rng = crate::cpu::library::testing::Rng::new();
        let random = std::iter::repeat_with(|| rng.f32().to_bits().wrapping_mul(0x9e37_79b9)).take(100_000);
        let bits = edges.iter().flat_map(|e| [*e, *e | 1 << 31]).chain(random);
        let x: Vec<f32> = bits.map(f32::from_bits).collect();
        for isa in Isa::available() {
            let (mut y, mut z) = (vec![bf16::ZERO; x.len()], vec![0f32; x.len()]);
            // SAFETY: the functions have no conditions.
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
