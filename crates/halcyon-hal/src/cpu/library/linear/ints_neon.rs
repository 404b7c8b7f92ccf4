//! Vectors of bytes of aarch64, whose baseline has NEON.

use super::ints::Ints;
use super::layout::Part;
use crate::cpu::library::simd::Portable;
use std::arch::aarch64::*;

/// 128 bits, with `smull` and `sadalp`. Weights of 8 bits have 128 subtracted, so that all bytes are signed.
#[derive(Clone, Copy)]
pub(super) struct Neon;

// SAFETY (of every block below): the baseline of aarch64 has NEON, and the trait requires that the bytes that
// a method reads are readable.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Ints for Neon {
    type S = Portable;
    type B = uint8x16_t;
    type I = int32x4_t;
    const SUBTRACTS: bool = true;

    #[inline(always)]
    unsafe fn load(p: *const u8) -> uint8x16_t {
        unsafe { vld1q_u8(p) }
    }
    #[inline(always)]
    unsafe fn table(p: *const u8) -> uint8x16_t {
        unsafe { vld1q_u8(p) }
    }
    #[inline(always)]
    unsafe fn moved(v: uint8x16_t, by: i32, mask: u8) -> uint8x16_t {
        // A negative number of places moves to the right.
        unsafe { vandq_u8(vshlq_u8(v, vdupq_n_s8(by as i8)), vdupq_n_u8(mask)) }
    }
    #[inline(always)]
    unsafe fn or(a: uint8x16_t, b: uint8x16_t) -> uint8x16_t {
        unsafe { vorrq_u8(a, b) }
    }
    #[inline(always)]
    unsafe fn look_up(table: uint8x16_t, v: uint8x16_t) -> uint8x16_t {
        unsafe { vqtbl1q_u8(table, v) }
    }
    #[inline(always)]
    unsafe fn splat(v: i32) -> int32x4_t {
        unsafe { vdupq_n_s32(v) }
    }
    #[inline(always)]
    unsafe fn dot(sum: int32x4_t, w: uint8x16_t, x: *const u8, wide: bool) -> int32x4_t {
        unsafe {
            let x = vreinterpretq_s8_s32(vdupq_n_s32(x.cast::<i32>().read_unaligned()));
            let w = if wide { veorq_u8(w, vdupq_n_u8(128)) } else { w };
            let w = vreinterpretq_s8_u8(w);
            let low = vmull_s8(vget_low_s8(w), vget_low_s8(x));
            let high = vmull_high_s8(w, x);
            // Two products have at most 2 * 128 * 127, which fits 16 bits.
            vpadalq_s16(sum, vpaddq_s16(low, high))
        }
    }
    #[inline(always)]
    unsafe fn widen(p: *const u8, part: Part) -> [f32; 4] {
        unsafe {
            let four = p.cast::<u32>().read_unaligned();
            let bytes = vreinterpret_u8_u32(vdup_n_u32(four));
            let v = vmovl_u16(vget_low_u16(vmovl_u8(bytes)));
            let v = match part {
                Part::All => v,
                Part::Signed => {
                    let wide = vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(bytes))));
                    return floats(vcvtq_f32_s32(wide));
                }
                Part::Low => vandq_u32(v, vdupq_n_u32(15)),
                Part::High => vshrq_n_u32::<4>(v),
                Part::Exponent => {
                    // The two smallest are denormal.
                    let small = vshlq_u32(vdupq_n_u32(0x0020_0000), vreinterpretq_s32_u32(v));
                    let bits = vshlq_n_u32::<23>(vsubq_u32(v, vdupq_n_u32(1)));
                    let bits = vbslq_u32(vcgtq_u32(v, vdupq_n_u32(1)), bits, small);
                    return floats(vreinterpretq_f32_u32(bits));
                }
            };
            floats(vcvtq_f32_u32(v))
        }
    }
    #[inline(always)]
    unsafe fn float(v: int32x4_t) -> [f32; 4] {
        unsafe { floats(vcvtq_f32_s32(v)) }
    }
}

#[inline(always)]
fn floats(v: float32x4_t) -> [f32; 4] {
    // SAFETY: both types are four floats.
    unsafe { std::mem::transmute(v) }
}
