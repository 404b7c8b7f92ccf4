//! Class labels as indices.

use super::{Cost, Facts, IndexRange, Lowering, MixedRole, Moves, Op, Rewrite, Rounding, Rules, Types};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::grad::{Backward, Gradient};
use crate::kernel::lower::{KernelCall, Lowered};
use crate::kernel::templates::gather;
use crate::layout::Restride;
use crate::reference::{Eval, Tensor, Vals, index};
use crate::shape::{Dim, TensorType};
use crate::target::{Declined, Operand};

pub(super) struct ClassIndex {
    pub classes: Dim,
    pub ignore: Option<i64>,
}

impl Rules for ClassIndex {
    fn name(&self) -> String {
        // Errors about labels should name the op that the user called, which is cross_entropy.
        super::CROSS_ENTROPY.into()
    }
    fn attributes(&self) -> String {
        format!("{} classes", self.classes)
    }
    fn facts(&self) -> Facts {
        Facts {
            lowering: Lowering::Step,
            moves: Moves::Nothing,
            identity: None,
            packs: false,
            in_place: false,
            summed: None,
            template: None,
        }
    }
    fn infer(&self, t: &Types<'_>) -> Result<TensorType> {
        t.arity(1)?;
        if !t.x[0].dtype.is_int() {
            return Err(t.dtype(t.x[0].dtype, "labels are integers"));
        }
        Ok(TensorType { dtype: DType::I64, shape: t.x[0].shape.clone() })
    }
    fn rewrite(&self, r: &Rewrite<'_>) -> Result<Op> {
        Ok(Op::ClassIndex { classes: (r.dim)(self.classes)?, ignore: self.ignore })
    }
    fn reference(&self, e: &Eval<'_>) -> Result<Tensor> {
        let n = self.classes.known();
        let n = n.ok_or_else(|| Error::internal("the number of classes is not known"))?;
        e.made(Vals::I(index::classes(e.op, e.x[0], n, self.ignore)?))
    }
    fn gradient(&self, b: &mut Backward<'_>) -> Result<Gradient> {
        Ok(b.none())
    }
    fn cost(&self, inputs: &[Operand], output: &Operand) -> Cost {
        Cost::reading_all(0, inputs, output)
    }
    fn terms(&self, _: &[&[usize]]) -> Option<usize> {
        Some(1)
    }
    fn index_range(&self, _: &[Operand]) -> Option<IndexRange> {
        let end = self.classes.known()? as i64;
        // Labels are often computed in the same plan, as a slice of a larger tensor. Without `kept`, another
        // value could reuse their memory before an error is reported. Labels are small, so keeping them is
        // cheap.
        Some(IndexRange { operand: 0, low: 0, end, ignore: self.ignore, kept: true })
    }
    fn rounding(&self, _: &[&TensorType], _: &TensorType) -> Rounding {
        Rounding::Exact
    }
    fn mixed(&self, _: DType, _: &[DType], _: DType) -> MixedRole {
        MixedRole::Wide
    }
    fn restride(&self, _: &[usize]) -> Option<Restride> {
        None
    }
    fn kernels(&self, call: &KernelCall<'_>) -> Result<Lowered, Declined> {
        let n = self.classes.known();
        let n = n.ok_or_else(|| Declined::because("the number of classes is not known"))?;
        call.single_kernel(gather::class_index(n, self.ignore, &call.inputs[0], call.out, call.caps))
    }
}
