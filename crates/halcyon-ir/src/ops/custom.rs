//! Ops that users define.

use super::{Cost, Facts, IndexRange, Lowering, MixedRole, Moves, Op, Rewrite, Rounding, Rules, Types};
use crate::custom::Custom;
use crate::data::ConstData;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::grad::{Backward, Gradient};
use crate::kernel::lower::{KernelCall, Lowered};
use crate::layout::Restride;
use crate::reference::{Eval, Tensor};
use crate::shape::TensorType;
use crate::target::{Declined, Operand};

impl Rules for Custom {
    fn name(&self) -> String {
        self.op().name().to_string()
    }
    fn attributes(&self) -> String {
        String::new()
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
        let owned: Vec<TensorType> = t.x.iter().map(|t| (*t).clone()).collect();
        self.op().infer(&owned)
    }
    fn rewrite(&self, _: &Rewrite<'_>) -> Result<Op> {
        Ok(Op::Custom(self.clone()))
    }
    fn reference(&self, e: &Eval<'_>) -> Result<Tensor> {
        let ins: Vec<ConstData> = e.x.iter().map(|t| t.write()).collect::<Result<_>>()?;
        let y = self.op().reference(&ins)?;
        if y.dtype != e.dtype() || y.dims != e.dims {
            let got = TensorType::new(y.dtype, &y.dims);
            let what = format!("the reference returned {got}, but the type rule says {}", e.ty);
            return Err(Error::shape(self.name(), what));
        }
        Ok(Tensor::read(&y))
    }
    fn gradient(&self, b: &mut Backward<'_>) -> Result<Gradient> {
        let x = &b.node.inputs;
        let v = self.op().clone().gradient(b.g, x, b.id, b.dy)?;
        if v.len() != x.len() {
            let what = format!("its gradient has {} entries for {} operands", v.len(), x.len());
            return Err(Error::argument(self.name(), what).at(&b.node.span));
        }
        Ok(Gradient::Of(v.into()))
    }
    fn cost(&self, inputs: &[Operand], output: &Operand) -> Cost {
        Cost::reading_all(0, inputs, output)
    }
    fn terms(&self, _: &[&[usize]]) -> Option<usize> {
        Some(1)
    }
    fn index_range(&self, _: &[Operand]) -> Option<IndexRange> {
        None
    }
    fn rounding(&self, _: &[&TensorType], _: &TensorType) -> Rounding {
        Rounding::Unknown { exact: false }
    }
    fn mixed(&self, _: DType, _: &[DType], _: DType) -> MixedRole {
        MixedRole::Wide
    }
    fn restride(&self, _: &[usize]) -> Option<Restride> {
        None
    }
    fn kernels(&self, call: &KernelCall<'_>) -> Result<Lowered, Declined> {
        Err(call.no_template())
    }
}
