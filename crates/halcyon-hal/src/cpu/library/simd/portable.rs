//! Vectors of the baseline instruction set.

use super::Simd;
use crate::cpu::sys::Isa;
use half::{bf16, f16};

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
    #[inline(always)]
    unsafe fn load_i8(p: *const i8) -> [f32; 4] {
        // SAFETY: the contract of `load_i8` makes 4 bytes at `p` readable.
        std::array::from_fn(|i| f32::from(unsafe { *p.add(i) }))
    }
    #[inline(always)]
    unsafe fn splat_f16(x: f16) -> [f32; 4] {
        [x.to_f32(); 4]
    }
}
