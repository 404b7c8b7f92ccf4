//! The arithmetic and addressing that the index, scan and sort kernels need: element types, strided operands,
//! indices.

use halcyon_ir::DType;
use halcyon_ir::layout::View;
use half::{bf16, f16};
use smallvec::SmallVec;
use std::cmp::Ordering;

/// A 64-bit type in which values are combined: f64, which holds every float exactly, or integers modulo 2^64.
pub(crate) trait Wide: Copy + Send + Sync + 'static {
    fn add(self, o: Self) -> Self;
    fn mul(self, o: Self) -> Self;
    /// The larger; NaN if either is NaN.
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

/// An element type.
pub(crate) trait Num: Copy + Send + Sync + 'static {
    type W: Wide;
    fn wide(self) -> Self::W;
    /// Rounds floats, wraps integers.
    fn narrow(w: Self::W) -> Self;
}

macro_rules! nums {
    ($($t:ty => $w:ty, |$x:ident| $wide:expr, |$y:ident| $narrow:expr;)*) => {$(
        impl Num for $t {
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
nums! {
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

/// Maps an element's row-major number to its position in a strided operand. Axes of size 1 are dropped, and
/// neighbouring axes are merged where possible.
#[derive(Clone, Debug)]
pub(crate) struct Walk {
    axes: SmallVec<[(usize, isize); 6]>,
    offset: isize,
    pub numel: usize,
}

impl Walk {
    pub(crate) fn new(v: &View) -> Walk {
        Walk::of(&v.shape, &v.strides, v.offset)
    }

    pub(crate) fn of(shape: &[usize], strides: &[isize], offset: isize) -> Walk {
        let mut axes: SmallVec<[(usize, isize); 6]> = SmallVec::new();
        for (&n, &s) in shape.iter().zip(strides).filter(|(n, _)| **n != 1) {
            match axes.last_mut() {
                Some((m, t)) if *t == s.wrapping_mul(n as isize) => (*m, *t) = (*m * n, s),
                _ => axes.push((n, s)),
            }
        }
        Walk { axes, offset, numel: shape.iter().product() }
    }

    /// Position of element `i` in the buffer, in elements.
    #[inline]
    pub(crate) fn at(&self, i: usize) -> isize {
        match self.axes.as_slice() {
            [] => self.offset,
            [(_, s)] => self.offset + i as isize * s,
            axes => {
                let (mut i, mut at) = (i, self.offset);
                for &(n, s) in axes.iter().rev() {
                    at += (i % n) as isize * s;
                    i /= n;
                }
                at
            }
        }
    }

    /// Whether the elements are contiguous.
    pub(crate) fn is_contiguous(&self) -> bool {
        matches!(self.axes.as_slice(), [] | [(_, 1)])
    }

    /// Length of the contiguous runs of elements; it divides `numel`.
    pub(crate) fn run(&self) -> usize {
        match self.axes.last() {
            Some((n, 1)) => *n,
            None => self.numel,
            _ => 1,
        }
    }
}

/// An index operand of any integer type.
#[derive(Clone, Debug)]
pub(crate) struct Indices {
    pub walk: Walk,
    dtype: DType,
}

impl Indices {
    pub(crate) fn new(dtype: DType, view: &View) -> Indices {
        Indices { walk: Walk::new(view), dtype }
    }

    /// Index number `i`. Values that do not fit i64 saturate; they are out of range anyway.
    ///
    /// # Safety
    /// `p` points to the operand's buffer, which holds its whole view, and `i` is less than its number of
    /// elements.
    #[inline]
    pub(crate) unsafe fn get(&self, p: *const u8, i: usize) -> i64 {
        let at = self.walk.at(i);
        macro_rules! read {
            ($t:ty) => {
                // SAFETY: element `i` lies in the view, and the contract says that the buffer holds the view.
                unsafe { *(p as *const $t).offset(at) }
            };
        }
        match self.dtype {
            DType::I64 => read!(i64),
            DType::I32 => read!(i32) as i64,
            DType::U64 => i64::try_from(read!(u64)).unwrap_or(i64::MAX),
            DType::U32 => read!(u32) as i64,
            DType::I16 => read!(i16) as i64,
            DType::U16 => read!(u16) as i64,
            DType::I8 => read!(i8) as i64,
            _ => read!(u8) as i64,
        }
    }
}

/// Converts an index into `n > 0` elements to a position. Negative indices count from the end; an index out
/// of range is clamped and reported as a fault.
#[inline]
pub(crate) fn place(i: i64, n: usize, fault: super::Fault<'_>) -> usize {
    let j = if i < 0 { i.saturating_add(n as i64) } else { i };
    if j >= 0 && (j as usize) < n {
        return j as usize;
    }
    fault.set();
    if j < 0 { 0 } else { n - 1 }
}
