//! The largest magnitude of 16-bit codes, and the largest sum of the magnitudes of weights. The product of
//! the two tells whether an i32 sum can wrap.

use super::{Factor, Finder, MAX_DEPTH, turned};
use crate::graph::NodeId;
use crate::ops::Op;
use crate::ops::element_wise::ScalarOp;

impl Finder<'_> {
    /// The bounds that minima and maxima with constants set for a value; infinite if there are no such ops.
    fn bounds(&self, id: NodeId, depth: usize) -> (f64, f64) {
        let (n, all) = (self.g.node(id), (f64::NEG_INFINITY, f64::INFINITY));
        let (Op::Scalar(op), [x, c], true) = (&n.op, &n.inputs[..], depth < MAX_DEPTH) else { return all };
        let limit = |c: NodeId| match self.uniform(c).map(|c| &self.g.node(c).op) {
            Some(Op::Full(v)) => Some(v.as_f64()),
            Some(Op::Const(c)) => c.scalars().next().map(|v| v.as_f64()),
            _ => None,
        };
        let (Some(c), (low, high)) = (limit(*c), self.bounds(*x, depth + 1)) else { return all };
        match op {
            ScalarOp::Min => (low.min(c), high.min(c)),
            ScalarOp::Max => (low.max(c), high.max(c)),
            _ => all,
        }
    }

    /// The largest magnitude of i16 codes, which may be clamped before they are cast.
    pub(super) fn largest_code(&self, codes: NodeId) -> u64 {
        let n = self.g.node(codes);
        let (low, high) = match (&n.op, self.input(codes)) {
            (Op::Cast, Some(x)) => match self.bounds(x, 0) {
                // A cast wraps integers that do not fit, so the codes can have any magnitude.
                (low, high) if self.g.dtype(x).is_int() && (low < -32768.0 || high > 32767.0) => {
                    return 1 << 15;
                }
                bounds => bounds,
            },
            _ => (f64::NEG_INFINITY, f64::INFINITY),
        };
        let (low, high) = (low.max(f64::from(i16::MIN)), high.min(f64::from(i16::MAX)));
        low.abs().max(high.abs()) as u64
    }

    /// The largest sum of the magnitudes along the summed axis of a constant right operand of i16.
    pub(super) fn largest_sum(&self, f: &Factor) -> Option<u64> {
        let Op::Const(c) = &self.g.node(f.codes).op else { return None };
        let (&[_, cols], turns) = (&c.dims[..], turned(self.g, f)?) else { return None };
        let mut sums = vec![0u64; if turns { 1 } else { cols }];
        let (words, _) = c.bytes().as_chunks::<2>();
        let mut most = 0;
        for row in words.chunks_exact(cols.max(1)) {
            let values = row.iter().map(|w| u64::from(i16::from_le_bytes(*w).unsigned_abs()));
            if turns {
                most = most.max(values.sum());
            } else {
                sums.iter_mut().zip(values).for_each(|(s, v)| *s += v);
            }
        }
        Some(sums.into_iter().fold(most, u64::max))
    }
}
