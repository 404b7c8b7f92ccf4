//! Reads by index: whole rows, and single elements.

use super::{
    Cost, Facts, IndexRange, Lowering, MixedRole, Moves, Op, Rewrite, Rounding, Rules, ScatterKind, Types,
    size,
};
use crate::dtype::DType;
use crate::error::Result;
use crate::grad::{Backward, Gradient, zeros};
use crate::kernel::lower::{KernelCall, Lowered};
use crate::kernel::templates::gather;
use crate::layout::Restride;
use crate::reference::{Eval, Tensor, index};
use crate::shape::{Shape, TensorType};
use crate::target::{Declined, Operand};

/// The range of indices along `axis` of operand 0; negative indices count from the end.
pub(super) fn along(axis: usize, inputs: &[Operand]) -> Option<IndexRange> {
    let n = *inputs.first()?.view.shape.get(axis)? as i64;
    Some(IndexRange { operand: 1, low: -n, end: n, ignore: None, kept: false })
}

/// The cost of a gather: only the rows that are read count.
fn cost(inputs: &[Operand], output: &Operand) -> Cost {
    Cost { flops: 0, bytes: 2 * size(output) + inputs.get(1).map_or(0, size) }
}

/// The shape of a gather of rows.
pub(super) fn gathered(x: &Shape, index: &Shape, axis: usize) -> Shape {
    x[..axis].iter().chain(index.iter()).chain(&x[axis + 1..]).copied().collect()
}

/// The type rule of a gather of elements: the dtype of `x` and the shape of the index.
pub(super) fn elements(t: &Types<'_>, axis: usize) -> Result<TensorType> {
    let (s, i) = (&t.x[0].shape, &t.x[1].shape);
    t.axis(axis, s)?;
    t.need_int(t.x[1].dtype)?;
    let fits = |k: usize| {
        k == axis || s[k] == i[k] || matches!((s[k].known(), i[k].known()), (Some(a), Some(b)) if b <= a)
    };
    if s.rank() != i.rank() || !(0..s.rank()).all(fits) {
        return Err(t.shape(format!(
            "the index {i} must have as many axes as {s}, and must not be larger on an axis other than {axis}"
        )));
    }
    Ok(TensorType { dtype: t.x[0].dtype, shape: i.clone() })
}

pub(super) struct Rows {
    pub axis: usize,
}

impl Rules for Rows {
    fn name(&self) -> String {
        "gather".into()
    }
    fn attributes(&self) -> String {
        format!("axis {}", self.axis)
    }
    fn facts(&self) -> Facts {
        Facts {
            lowering: Lowering::Step,
            moves: Moves::Operands(&[0]),
            identity: None,
            packs: false,
            in_place: false,
            summed: None,
            template: None,
        }
    }
    fn infer(&self, t: &Types<'_>) -> Result<TensorType> {
        t.arity(2)?;
        t.axis(self.axis, &t.x[0].shape)?;
        t.need_int(t.x[1].dtype)?;
        let shape = gathered(&t.x[0].shape, &t.x[1].shape, self.axis);
        Ok(TensorType { dtype: t.x[0].dtype, shape })
    }
    fn rewrite(&self, _: &Rewrite<'_>) -> Result<Op> {
        Ok(Op::Gather { axis: self.axis })
    }
    fn reference(&self, e: &Eval<'_>) -> Result<Tensor> {
        e.made(e.x[0].v.pick(&index::rows(e.op, &e.x[0].dims, e.x[1], self.axis)?))
    }
    fn gradient(&self, b: &mut Backward<'_>) -> Result<Gradient> {
        let z = zeros(b.g, b.x(0));
        let d = b.g.scatter_rows(z, b.x(1), b.dy, self.axis, ScatterKind::Add)?;
        Ok(b.first(d))
    }
    fn cost(&self, inputs: &[Operand], output: &Operand) -> Cost {
        cost(inputs, output)
    }
    fn terms(&self, _: &[&[usize]]) -> Option<usize> {
        Some(1)
    }
    fn index_range(&self, inputs: &[Operand]) -> Option<IndexRange> {
        along(self.axis, inputs)
    }
    fn rounding(&self, _: &[&TensorType], _: &TensorType) -> Rounding {
        Rounding::Moves { with: Op::Gather { axis: self.axis }, clamp: false }
    }
    fn mixed(&self, _: DType, _: &[DType], _: DType) -> MixedRole {
        MixedRole::Moves { tables: true }
    }
    fn restride(&self, _: &[usize]) -> Option<Restride> {
        None
    }
    fn kernels(&self, c: &KernelCall<'_>) -> Result<Lowered, Declined> {
        c.single_kernel(gather::gather(self.axis, &c.inputs[0], &c.inputs[1], c.out, c.caps))
    }
}

pub(super) struct Elements {
    pub axis: usize,
}

impl Rules for Elements {
    fn name(&self) -> String {
        "gather_elements".into()
    }
    fn attributes(&self) -> String {
        format!("axis {}", self.axis)
    }
    fn facts(&self) -> Facts {
        Facts {
            lowering: Lowering::Step,
            moves: Moves::Operands(&[0]),
            identity: None,
            packs: false,
            in_place: false,
            summed: None,
            template: None,
        }
    }
    fn infer(&self, t: &Types<'_>) -> Result<TensorType> {
        t.arity(2)?;
        elements(t, self.axis)
    }
    fn rewrite(&self, _: &Rewrite<'_>) -> Result<Op> {
        Ok(Op::GatherElements { axis: self.axis })
    }
    fn reference(&self, e: &Eval<'_>) -> Result<Tensor> {
        e.made(e.x[0].v.pick(&index::elements(e.op, &e.x[0].dims, e.x[1], self.axis)?))
    }
    fn gradient(&self, b: &mut Backward<'_>) -> Result<Gradient> {
        let z = zeros(b.g, b.x(0));
        let d = b.g.scatter_elements(z, b.x(1), b.dy, self.axis, ScatterKind::Add)?;
        Ok(b.first(d))
    }
    fn cost(&self, inputs: &[Operand], output: &Operand) -> Cost {
        cost(inputs, output)
    }
    fn terms(&self, _: &[&[usize]]) -> Option<usize> {
        Some(1)
    }
    fn index_range(&self, inputs: &[Operand]) -> Option<IndexRange> {
        along(self.axis, inputs)
    }
    fn rounding(&self, _: &[&TensorType], _: &TensorType) -> Rounding {
        Rounding::Moves { with: Op::GatherElements { axis: self.axis }, clamp: false }
    }
    fn mixed(&self, _: DType, _: &[DType], _: DType) -> MixedRole {
        MixedRole::Moves { tables: true }
    }
    fn restride(&self, _: &[usize]) -> Option<Restride> {
        None
    }
    fn kernels(&self, c: &KernelCall<'_>) -> Result<Lowered, Declined> {
        c.single_kernel(gather::gather_elements(self.axis, &c.inputs[0], &c.inputs[1], c.out, c.caps))
    }
}
