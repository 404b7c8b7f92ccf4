//! Element types and the types in which kernels accumulate them.

use half::{bf16, f16};

/// An element type and its accumulator: f32 for f16 and bf16, a 32-bit integer for integers of 8 and 16 bits,
/// otherwise the type itself. Integer sums wrap.
pub trait Accumulated: Copy + Send + Sync + 'static {
    type Acc: Copy + Send + Sync + Default + PartialOrd + 'static;
    /// The smallest value of the element type; negative infinity for floats.
    const LEAST: Self::Acc;
    fn up(self) -> Self::Acc;
    fn down(a: Self::Acc) -> Self;
    /// `a * b + c`, in one rounding if `FMA`.
    fn mul_add<const FMA: bool>(a: Self::Acc, b: Self::Acc, c: Self::Acc) -> Self::Acc;
    fn add(a: Self::Acc, b: Self::Acc) -> Self::Acc;
    /// `a / n`. For integers, it is truncated, and 0 if `n` is 0.
    fn div(a: Self::Acc, n: usize) -> Self::Acc;
    /// The larger value; NaN if either is NaN.
    fn max(a: Self::Acc, b: Self::Acc) -> Self::Acc;
}

macro_rules! float_types {
    ($($t:ty => $acc:ty, |$x:ident| $up:expr, |$a:ident| $down:expr;)*) => {$(
        impl Accumulated for $t {
            type Acc = $acc;
            const LEAST: $acc = <$acc>::NEG_INFINITY;
            #[inline(always)]
            fn up(self) -> $acc { let $x = self; $up }
            #[inline(always)]
            fn down($a: $acc) -> $t { $down }
            #[inline(always)]
            fn mul_add<const FMA: bool>(a: $acc, b: $acc, c: $acc) -> $acc {
                if FMA { a.mul_add(b, c) } else { a * b + c }
            }
            #[inline(always)]
            fn add(a: $acc, b: $acc) -> $acc { a + b }
            #[inline(always)]
            fn div(a: $acc, n: usize) -> $acc { a / n as $acc }
            #[inline(always)]
            fn max(a: $acc, b: $acc) -> $acc {
                // If `b` is NaN, `m` does not matter, because the next line returns `b`.
                let m = if a > b || a.is_nan() { a } else { b };
                if b.is_nan() { b } else { m }
            }
        }
    )*};
}
float_types! {
    f32 => f32, |x| x, |a| a;
    f64 => f64, |x| x, |a| a;
    f16 => f32, |x| x.to_f32(), |a| f16::from_f32(a);
    bf16 => f32, |x| x.to_f32(), |a| bf16::from_f32(a);
}

macro_rules! int_types {
    ($($t:ty => $acc:ty;)*) => {$(
        impl Accumulated for $t {
            type Acc = $acc;
            const LEAST: $acc = <$t>::MIN as $acc;
            #[inline(always)]
            fn up(self) -> $acc { self as $acc }
            #[inline(always)]
            fn down(a: $acc) -> $t { a as $t }
            #[inline(always)]
            fn mul_add<const FMA: bool>(a: $acc, b: $acc, c: $acc) -> $acc { a.wrapping_mul(b).wrapping_add(c) }
            #[inline(always)]
            fn add(a: $acc, b: $acc) -> $acc { a.wrapping_add(b) }
            #[inline(always)]
            fn div(a: $acc, n: usize) -> $acc { if n == 0 { 0 } else { a / n as $acc } }
            #[inline(always)]
            fn max(a: $acc, b: $acc) -> $acc { Ord::max(a, b) }
        }
    )*};
}
int_types! { i8 => i32; i16 => i32; i32 => i32; i64 => i64; u8 => u32; u16 => u32; u32 => u32; u64 => u64; }
