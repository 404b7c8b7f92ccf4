//! Accumulators of reductions. They have 64 bits, so that sums of f32 stay accurate over any length. Values
//! are combined in a fixed order.

use super::lane::Lane;
use super::ops::{max_f32, max_f64, min_f32, min_f64, sl};
use crate::cpu::sys::{Isa, dispatch};
use halcyon_ir::ops::ReduceKind;
use halcyon_ir::{DType, Scalar};

/// The accumulator's bits for a value.
pub(super) fn acc_bits(lane: Lane, v: Scalar) -> u64 {
    match (lane, v) {
        (Lane::F32 | Lane::F64, v) => v.as_f64().to_bits(),
        (_, Scalar::U(u)) => u,
        (_, v) => v.as_i64() as u64,
    }
}

/// The value of an accumulator for a reduction of `dtype`.
pub(super) fn acc_value(dtype: DType, bits: u64) -> Scalar {
    match Lane::of(dtype) {
        Lane::F32 | Lane::F64 => Scalar::F(f64::from_bits(bits)),
        Lane::I32 | Lane::I64 => Scalar::I(bits as i64),
        _ => Scalar::U(bits),
    }
    .cast(dtype)
}

/// How the rows and columns of a block map to accumulators.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub rows: usize,
    pub cols: usize,
    /// Whether the axis of the rows, or of the columns, is reduced.
    pub row_reduced: bool,
    pub col_reduced: bool,
}

/// Combines all of `x` in an order that depends on its length alone. It first combines them into 32 values,
/// then halves the number of values until one is left.
#[inline(always)]
fn fold<T: Copy>(x: &[T], id: T, f: impl Fn(T, T) -> T + Copy) -> T {
    const W: usize = 32;
    let mut acc = [id; W];
    let mut it = x.chunks_exact(W);
    for c in &mut it {
        for i in 0..W {
            acc[i] = f(acc[i], c[i]);
        }
    }
    for (a, &v) in acc.iter_mut().zip(it.remainder()) {
        *a = f(*a, v);
    }
    let mut h = W / 2;
    while h > 0 {
        for i in 0..h {
            acc[i] = f(acc[i], acc[i + h]);
        }
        h /= 2;
    }
    acc[0]
}

#[inline(always)]
fn rows<T: Copy, A: Copy>(
    s: Shape,
    x: &[T],
    acc: &mut [A],
    id: T,
    f: impl Fn(T, T) -> T + Copy,
    wide: impl Fn(T) -> A + Copy,
    g: impl Fn(A, A) -> A + Copy,
) {
    if s.col_reduced {
        if s.row_reduced {
            acc[0] = g(acc[0], wide(fold(x, id, f)));
            return;
        }
        for (a, row) in acc.iter_mut().zip(x.chunks_exact(s.cols)) {
            *a = g(*a, wide(fold(row, id, f)));
        }
        return;
    }
    for (r, row) in x.chunks_exact(s.cols).enumerate() {
        let at = if s.row_reduced { 0 } else { r * s.cols };
        for (a, &v) in acc[at..at + s.cols].iter_mut().zip(row) {
            *a = g(*a, wide(v));
        }
    }
}

macro_rules! lanes {
    ($($t:ident $a:ident $body:ident $name:ident ($lo:expr, $hi:expr),
        $add:expr, $mul:expr, $max:expr, $min:expr, $aadd:expr, $amul:expr, $amax:expr, $amin:expr;)*) => {$(
        #[inline(always)]
        fn $body<const FMA: bool>(kind: ReduceKind, s: Shape, x: &[$t], acc: &mut [$a]) {
            let wide = |v: $t| v as $a;
            match kind {
                ReduceKind::Sum => rows(s, x, acc, 0 as $t, $add, wide, $aadd),
                ReduceKind::Prod => rows(s, x, acc, 1 as $t, $mul, wide, $amul),
                ReduceKind::Max => rows(s, x, acc, $lo, $max, wide, $amax),
                ReduceKind::Min => rows(s, x, acc, $hi, $min, wide, $amin),
            }
        }
        dispatch! { fn $name [] [] (isa, kind: ReduceKind, s: Shape, x: &[$t], acc: &mut [$a]) = $body }
    )*};
}
lanes! {
    f32 f64 f32_body f32_acc (f32::NEG_INFINITY, f32::INFINITY), |a, b| a + b, |a, b| a * b, max_f32, min_f32,
        |a, b| a + b, |a, b| a * b, max_f64, min_f64;
    f64 f64 f64_body f64_acc (f64::NEG_INFINITY, f64::INFINITY), |a, b| a + b, |a, b| a * b, max_f64, min_f64,
        |a, b| a + b, |a, b| a * b, max_f64, min_f64;
    i32 i64 i32_body i32_acc (i32::MIN, i32::MAX), i32::wrapping_add, i32::wrapping_mul, i32::max, i32::min,
        i64::wrapping_add, i64::wrapping_mul, i64::max, i64::min;
    i64 i64 i64_body i64_acc (i64::MIN, i64::MAX), i64::wrapping_add, i64::wrapping_mul, i64::max, i64::min,
        i64::wrapping_add, i64::wrapping_mul, i64::max, i64::min;
    u32 u64 u32_body u32_acc (u32::MIN, u32::MAX), u32::wrapping_add, u32::wrapping_mul, u32::max, u32::min,
        u64::wrapping_add, u64::wrapping_mul, u64::max, u64::min;
    u64 u64 u64_body u64_acc (u64::MIN, u64::MAX), u64::wrapping_add, u64::wrapping_mul, u64::max, u64::min,
        u64::wrapping_add, u64::wrapping_mul, u64::max, u64::min;
    // For bools, sum means "any" and product means "all".
    u8 u64 u8_body u8_acc (0, 1), |a, b| a | b, |a, b| a & b, u8::max, u8::min,
        |a, b| a | b, |a, b| a & b, u64::max, u64::min;
}

/// Combines a block of values with its accumulators.
///
/// # Safety
/// `x` holds `s.rows * s.cols` aligned values of type `lane`; they do not overlap `acc`.
pub(super) unsafe fn accumulate(
    isa: Isa,
    lane: Lane,
    kind: ReduceKind,
    s: Shape,
    x: *const u8,
    acc: &mut [u64],
) {
    let n = s.rows * s.cols;
    let p = acc.as_mut_ptr() as *mut u8;
    macro_rules! go {
        ($f:ident) => {
            // SAFETY: the contract makes `n` values at `x` readable. `acc` is exclusive, and u64, i64 and f64
            // have the same size and alignment and no invalid bit patterns.
            unsafe { $f(isa, kind, s, sl(x, n), super::ops::slm(p, acc.len())) }
        };
    }
    match lane {
        Lane::F32 => go!(f32_acc),
        Lane::F64 => go!(f64_acc),
        Lane::I32 => go!(i32_acc),
        Lane::I64 => go!(i64_acc),
        Lane::U32 => go!(u32_acc),
        Lane::U64 => go!(u64_acc),
        Lane::B8 | Lane::H16 => go!(u8_acc),
    }
}

/// Combines each accumulator in `acc`, as the first operand, with the accumulator in `from` at the same
/// index.
pub(super) fn combine(isa: Isa, lane: Lane, kind: ReduceKind, from: &[u64], acc: &mut [u64]) {
    let wide = match lane {
        Lane::F32 => Lane::F64,
        Lane::I32 => Lane::I64,
        Lane::U32 => Lane::U64,
        l => l,
    };
    if lane == Lane::B8 {
        for (a, &b) in acc.iter_mut().zip(from) {
            *a = if matches!(kind, ReduceKind::Sum | ReduceKind::Max) { *a | b } else { *a & b };
        }
        return;
    }
    let s = Shape { rows: 1, cols: from.len(), row_reduced: false, col_reduced: false };
    // SAFETY: `from` holds `from.len()` 64-bit values of type `wide`, and `acc` is an exclusive borrow.
    unsafe { accumulate(isa, wide, kind, s, from.as_ptr() as *const u8, acc) }
}
