//! A slice at a run-time position.

use super::composite::{CompositeGradient, CompositeKind, CompositeRow, some_per_element};
use crate::composite::{Attr, Composite, attrs};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::grad::{Backward, Gradient, zeros};
use crate::graph::{Graph, NodeId};
use crate::ops::element_wise::ScalarOp;
use crate::shape::Dim;

const NAME: &str = "slice_at";

pub(super) static SLICE_AT: CompositeRow = CompositeRow {
    name: NAME,
    has_builder: true,
    has_kernels: false,
    packs: false,
    summed: None,
    half: None,
    template: None,
    flops: some_per_element,
    gradient: CompositeGradient::Closed(gradient),
};

/// The gradient of the operand is `dy`, written at the position into zeros.
fn gradient(c: &Composite, b: &mut Backward<'_>) -> Result<Gradient> {
    let attr = |name| c.int(name).and_then(|n| usize::try_from(n).ok());
    let (Some(axis), Some(len), [x, position]) = (attr("axis"), attr("len"), &b.node.inputs[..]) else {
        return Ok(Gradient::Body);
    };
    let (x, position) = (*x, *position);
    let mut own = Graph::new();
    let v = own.input("x0", b.g.ty(x).clone());
    let p = own.input("x1", b.g.ty(position).clone());
    let y = own.slice_at(v, p, axis, len)?;
    // A composite of this kind with another body is differentiated through its body.
    if own.node(y).op != b.node.op {
        return Ok(Gradient::Body);
    }
    let z = zeros(b.g, x);
    let dx = b.g.update_slice(z, b.dy, position, axis)?;
    Ok(b.first(dx))
}

impl Graph {
    /// `len` elements along `axis`, from the run-time `position` (a rank-0 integer). `position` must not be
    /// negative, and `position + len` must not exceed the axis.
    pub fn slice_at(&mut self, x: NodeId, position: NodeId, axis: usize, len: usize) -> Result<NodeId> {
        let s = self.shape(x).clone();
        if axis >= s.rank() || s[axis].known().is_some_and(|n| n < len) {
            let what = format!("there are no {len} elements along axis {axis} of {s}");
            return Err(Error::shape(NAME, what).at(&self.span));
        }
        if !self.dtype(position).is_int() || self.shape(position).rank() != 0 {
            let what = format!("the position must be an integer of rank 0, not {}", self.ty(position));
            return Err(Error::argument(NAME, what).at(&self.span));
        }
        let a = attrs([("axis", Attr::Int(axis as i64)), ("len", Attr::Int(len as i64))]);
        self.composite(CompositeKind::SliceAt, a, &[x, position], |g, x| {
            let i = g.rows_from(x[1], len.into())?;
            g.gather(x[0], i, axis)
        })
    }

    /// The indices `position..position + len`. If the position is negative, all indices are set to the
    /// largest value, which is out of range. Otherwise a gather would count negative indices from the end.
    pub(crate) fn rows_from(&mut self, position: NodeId, len: Dim) -> Result<NodeId> {
        let narrow = self.dtype(position).bits() < 32;
        let p = if narrow { self.cast(position, DType::I32)? } else { position };
        let d = self.dtype(p);
        let i = self.iota(d, [len], 0)?;
        let i = self.add(i, p)?;
        if matches!(d, DType::U32 | DType::U64) {
            return Ok(i);
        }
        let (zero, far) = (self.lit(p, 0i64), self.full(d, [len], d.range().1));
        let negative = self.scalar(ScalarOp::Lt, &[p, zero])?;
        self.scalar(ScalarOp::Select, &[negative, far, i])
    }
}
