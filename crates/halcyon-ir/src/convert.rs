//! Conversions beyond a plain cast: saturating casts, and casts to powers of two (`f8e8m0`).

use crate::dtype::{Class, DType, Scalar};
use crate::error::Result;
use crate::graph::{Graph, NodeId};
use crate::ops::element_wise::ScalarOp;
use crate::passes::small_types::encode_e8m0;

/// How a number between two powers of two is rounded to one of them.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Rounding {
    /// The nearer one; on a tie the larger one.
    Nearest,
    /// The larger one.
    Up,
    /// The smaller one.
    Down,
}

impl Graph {
    /// Casts to `dtype` after clamping `x` to the finite range of `dtype`, so infinities and numbers out of
    /// range become the largest or smallest finite number. NaN, casts from or to bool, and casts to the dtype
    /// that `x` already has are as in [`Graph::cast`]. A cast to an 8-bit float is ONNX `Cast` with
    /// `saturate`. A cast from a float to an integer truncates, so round before it to quantise. A cast to
    /// `f8e8m0` is [`Graph::cast_e8m0`] with [`Rounding::Nearest`] and `saturate`.
    pub fn cast_saturating(&mut self, x: NodeId, dtype: DType) -> Result<NodeId> {
        let mut x = x;
        let from = self.dtype(x);
        if dtype == DType::F8E8M0 && from != dtype {
            return self.cast_e8m0(x, Rounding::Nearest, true);
        }
        if from == dtype || from == DType::Bool || dtype == DType::Bool {
            return self.cast(x, dtype);
        }
        let mut is = from;
        if !from.is_native() {
            // Clamp in a wider type, because one small type may be unable to represent the limits of another.
            is = if from.class() == Class::Float { DType::F32 } else { DType::I32 };
            x = self.cast(x, is)?;
        }
        let (lo, hi) = dtype.finite_range();
        if is.is_float() && dtype.is_float() && hi > is.finite_range().1 {
            // Only infinities are out of range, and only the wider type can represent the limits, so clamp
            // after the cast.
            let y = self.cast(x, dtype)?;
            let (lo, hi) = (self.lit(y, lo), self.lit(y, hi));
            let y = self.scalar(ScalarOp::Max, &[y, lo])?;
            return self.scalar(ScalarOp::Min, &[y, hi]);
        }
        if is == DType::BF16 && dtype == DType::F16 || is.is_int() && hi.fract() != 0.0 {
            // Clamp in f32, because bf16 cannot represent the limits of f16, and integers cannot represent
            // limits with a fraction, which some small floats have.
            is = DType::F32;
            x = self.cast(x, is)?;
        }
        // The source range, including infinities if the type has them.
        let has = if is.is_float() { is.range() } else { from.range() };
        // Casts from floats to integers of 8 bits or more saturate by themselves. A clamp before such a cast
        // could be wrong, because f32 cannot represent all of these limits exactly (`i32::MAX`).
        let stops = is.is_float() && dtype.is_int() && dtype.bits() >= 8;
        for (op, end, needed) in [(ScalarOp::Max, lo, has.0 < lo), (ScalarOp::Min, hi, has.1 > hi)] {
            if needed && !stops {
                // `finite_range` returns f64, which rounds the limits of 64-bit integers. `Scalar::cast`
                // saturates and so restores the exact limit.
                let end = self.lit(x, Scalar::F(end).cast(dtype));
                x = self.scalar(op, &[x, end])?;
            }
        }
        self.cast(x, dtype)
    }

    /// Casts `x` to `f8e8m0`, a power of two chosen by `rounding`. Negative numbers and NaN become NaN; -0
    /// counts as zero. Values outside 2^-127 to 2^127, including zero and infinity, become the nearer limit
    /// if `saturate` is set and NaN otherwise (ONNX `Cast`).
    pub fn cast_e8m0(&mut self, x: NodeId, rounding: Rounding, saturate: bool) -> Result<NodeId> {
        let x = if self.dtype(x).is_native() { x } else { self.cast(x, DType::F32)? };
        let bits = encode_e8m0(self, x, rounding, saturate)?;
        self.bitcast(bits, DType::F8E8M0)
    }
}
