//! Conversions that a plain cast does not do: to the ends of the range instead of past them, and powers of
//! two.

use crate::dtype::{Class, DType, Scalar};
use crate::error::Result;
use crate::graph::{Graph, NodeId};
use crate::passes::narrow::encode_e8m0;
use crate::scalar_op::ScalarOp;

/// Which power of two stands for a number between two of them.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Rounding {
    /// The nearer one; the larger of two that are as near.
    Nearest,
    /// The larger one.
    Up,
    /// The smaller one.
    Down,
}

impl Graph {
    /// [`Graph::cast`] of the number in the finite range of `dtype` that is nearest to `x`: infinities and
    /// numbers out of range become the largest and smallest one. NaN is cast as it is. This is ONNX `Cast`
    /// with `saturate` to the 8-bit floats, and the last step of a quantisation: a float is truncated to an
    /// integer, so round it first. To `f8e8m0` it is [`Graph::cast_e8m0`] to the nearest power.
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
            // A small type may not hold the other's ends.
            is = if from.class() == Class::Float { DType::F32 } else { DType::I32 };
            x = self.cast(x, is)?;
        }
        let (lo, hi) = dtype.finite_range();
        if is.is_float() && dtype.is_float() && hi > is.finite_range().1 {
            // Only infinities are out of range, and the ends are numbers of the wider type alone.
            let y = self.cast(x, dtype)?;
            let (lo, hi) = (self.lit(y, lo), self.lit(y, hi));
            let y = self.scalar(ScalarOp::Max, &[y, lo])?;
            return self.scalar(ScalarOp::Min, &[y, hi]);
        }
        if is == DType::BF16 && dtype == DType::F16 {
            // The ends have more digits than bf16.
            is = DType::F32;
            x = self.cast(x, is)?;
        }
        // With infinities, where the type has them.
        let has = if is.is_float() { is.range() } else { from.range() };
        // Casts from floats to integers of 8 bits and more stop at the ends themselves, which f32 does not
        // hold exactly.
        let stops = is.is_float() && dtype.is_int() && dtype.bits() >= 8;
        for (op, end, needed) in [(ScalarOp::Max, lo, has.0 < lo), (ScalarOp::Min, hi, has.1 > hi)] {
            if needed && !stops {
                // By way of the type itself, since f64 rounds the ends of 64-bit integers.
                let end = self.lit(x, Scalar::F(end).cast(dtype));
                x = self.scalar(op, &[x, end])?;
            }
        }
        self.cast(x, dtype)
    }

    /// To `f8e8m0`: the power of two that stands for `x`. Negative numbers and NaN are NaN, -0 is zero. What
    /// is outside of 2^-127 to 2^127, zero and infinity among it, becomes the nearer end where `saturate` is
    /// set, and NaN else (ONNX `Cast`).
    pub fn cast_e8m0(&mut self, x: NodeId, rounding: Rounding, saturate: bool) -> Result<NodeId> {
        let x = if self.dtype(x).is_native() { x } else { self.cast(x, DType::F32)? };
        let bits = encode_e8m0(self, x, rounding, saturate)?;
        self.bitcast(bits, DType::F8E8M0)
    }
}
