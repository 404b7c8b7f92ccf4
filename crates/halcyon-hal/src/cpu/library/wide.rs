//! Element types and the 64-bit types in which the scan, scatter and sort kernels compute with them.

use half::{bf16, f16};
use std::cmp::Ordering;

/// A 64-bit type in which values are combined: f64, which holds every float exactly, or integers modulo 2^64.
pub(crate) trait Wide: Copy + Send + Sync + 'static {
    fn add(self, o: Self) -> Self;
    fn mul(self, o: Self) -> Self;
    /// The larger value; NaN if either is NaN.
    fn larger(self, o: Self) -> Self;
    fn smaller(self, o: Self) -> Self;
    fn is_nan(self) -> bool;
    /// Total order in which NaN is the largest value and equal to itself.
    fn order(self, o: Self) -> Ordering;
    /// Converts a scalar.
    fn from_scalar(s: halcyon_ir::Scalar) -> Self;
    fn from_f64(x: f64) -> Self;
    fn as_f64(self) -> f64;
}

impl Wide for f64 {
    #[inline(always)]
    fn add(self, o: f64) -> f64 {
        self + o
    }
    #[inline(always)]
    fn mul(self, o: f64) -> f64 {
        self * o
    }
    #[inline(always)]
    fn larger(self, o: f64) -> f64 {
        if self > o || self.is_nan() { self } else { o }
    }
    #[inline(always)]
    fn smaller(self, o: f64) -> f64 {
        if self < o || self.is_nan() { self } else { o }
    }
    #[inline(always)]
    fn is_nan(self) -> bool {
        f64::is_nan(self)
    }
    #[inline(always)]
    fn order(self, o: f64) -> Ordering {
        self.partial_cmp(&o).unwrap_or_else(|| self.is_nan().cmp(&o.is_nan()))
    }
    fn from_scalar(s: halcyon_ir::Scalar) -> f64 {
        s.as_f64()
    }
    fn from_f64(x: f64) -> f64 {
        x
    }
    fn as_f64(self) -> f64 {
        self
    }
}

macro_rules! wide_int {
    ($($t:ident |$s:ident| $from:expr;)*) => {$(
        impl Wide for $t {
            #[inline(always)]
            fn add(self, o: $t) -> $t {
                self.wrapping_add(o)
            }
            #[inline(always)]
            fn mul(self, o: $t) -> $t {
                self.wrapping_mul(o)
            }
            #[inline(always)]
            fn larger(self, o: $t) -> $t {
                Ord::max(self, o)
            }
            #[inline(always)]
            fn smaller(self, o: $t) -> $t {
                Ord::min(self, o)
            }
            #[inline(always)]
            fn is_nan(self) -> bool {
                false
            }
            #[inline(always)]
            fn order(self, o: $t) -> Ordering {
                self.cmp(&o)
            }
            fn from_scalar($s: halcyon_ir::Scalar) -> $t {
                $from
            }
            fn from_f64(x: f64) -> $t {
                x as $t
            }
            fn as_f64(self) -> f64 {
                self as f64
            }
        }
    )*};
}
wide_int! {
    i64 |s| s.as_i64();
    u64 |s| if let halcyon_ir::Scalar::U(u) = s { u } else { s.as_i64() as u64 };
}

/// An element type, with the 64-bit type in which kernels compute.
pub(crate) trait Widened: Copy + Send + Sync + 'static {
    type W: Wide;
    fn wide(self) -> Self::W;
    /// Rounds floats, wraps integers.
    fn narrow(w: Self::W) -> Self;
}

macro_rules! widened {
    ($($t:ty => $w:ty, |$x:ident| $wide:expr, |$y:ident| $narrow:expr;)*) => {$(
        impl Widened for $t {
            type W = $w;
            #[inline(always)]
            fn wide(self) -> $w {
                let $x = self;
                $wide
            }
            #[inline(always)]
            fn narrow($y: $w) -> $t {
                $narrow
            }
        }
    )*};
}
widened! {
    f32 => f64, |x| x as f64, |y| y as f32;
    f64 => f64, |x| x, |y| y;
    f16 => f64, |x| x.to_f64(), |y| halcyon_ir::dtype::f16_of(y);
    bf16 => f64, |x| x.to_f64(), |y| halcyon_ir::dtype::bf16_of(y);
    i8 => i64, |x| x as i64, |y| y as i8;
    i16 => i64, |x| x as i64, |y| y as i16;
    i32 => i64, |x| x as i64, |y| y as i32;
    i64 => i64, |x| x, |y| y;
    u8 => u64, |x| x as u64, |y| y as u8;
    u16 => u64, |x| x as u64, |y| y as u16;
    u32 => u64, |x| x as u64, |y| y as u32;
    u64 => u64, |x| x, |y| y;
}

/// Evaluates an expression with `$t` as the Rust type of a dtype; bool is `u8`.
macro_rules! with_type {
    ($d:expr, $t:ident => $e:expr) => {{
        use halcyon_ir::DType as D;
        match $d {
            D::F32 => {
                type $t = f32;
                $e
            }
            D::F64 => {
                type $t = f64;
                $e
            }
            D::F16 => {
                type $t = half::f16;
                $e
            }
            D::BF16 => {
                type $t = half::bf16;
                $e
            }
            D::I8 => {
                type $t = i8;
                $e
            }
            D::I16 => {
                type $t = i16;
                $e
            }
            D::I32 => {
                type $t = i32;
                $e
            }
            D::I64 => {
                type $t = i64;
                $e
            }
            D::U16 => {
                type $t = u16;
                $e
            }
            D::U32 => {
                type $t = u32;
                $e
            }
            D::U64 => {
                type $t = u64;
                $e
            }
            // u8 and bool. [`super::find`] declines calls with small types.
            _ => {
                type $t = u8;
                $e
            }
        }
    }};
}
pub(crate) use with_type;

/// Like `with_type!`, with the unsigned integer of the same size, for kernels that only move data.
macro_rules! with_size {
    ($d:expr, $t:ident => $e:expr) => {
        match $d.size() {
            1 => { type $t = u8; $e }
            2 => { type $t = u16; $e }
            4 => { type $t = u32; $e }
            _ => { type $t = u64; $e }
        }
    };
}
pub(crate) use with_size;
