//! Element-wise ops: the scalar ops (one row each in `crate::scalar_op`), casts and bitcasts.

use super::{Cost, Facts, IndexRange, Lowering, MixedRole, Moves, Op, Rewrite, Rounding, Rules, Types};
use crate::data::ConstData;
use crate::dtype::DType;
use crate::error::Result;
use crate::grad::{Backward, Gradient, ScalarGrad};
use crate::kernel::lower::{KernelCall, Lowered};
use crate::layout::Restride;
use crate::reference::{self, Eval, Tensor};
use crate::scalar_op::{Rule, ScalarOp};
use crate::shape::TensorType;
use crate::target::{Declined, Operand};

pub(super) struct Scalar(pub ScalarOp);

impl Rules for Scalar {
    fn name(&self) -> String {
        self.0.name().into()
    }
    fn attributes(&self) -> String {
        String::new()
    }
    fn facts(&self) -> Facts {
        // The first operand of a selection is its condition.
        let moves = if self.0 == ScalarOp::Select { Moves::Operands(&[1, 2]) } else { Moves::Nothing };
        Facts {
            lowering: Lowering::ElementWise,
            moves,
            identity: None,
            packs: false,
            in_place: false,
            summed: None,
            template: None,
        }
    }
    fn infer(&self, t: &Types<'_>) -> Result<TensorType> {
        let (s, x) = (self.0, t.x);
        t.arity(s.arity())?;
        let first = if s.row().rule == Rule::Select { 1 } else { 0 };
        let d = x[first].dtype;
        if !s.takes(d) {
            let classes = s.row().on;
            let want =
                format!("it takes types of class \"{classes}\" (f float, i signed, u unsigned, b bool)");
            return Err(t.dtype(d, want));
        }
        if first == 1 && x[0].dtype != DType::Bool {
            return Err(t.dtype(x[0].dtype, "the condition must be bool"));
        }
        if let Some(other) = x[first..].iter().find(|o| o.dtype != d) {
            return Err(t.dtype(other.dtype, format!("the other operand is {d}; cast one")));
        }
        if let Some(other) = x.iter().find(|o| o.shape != x[0].shape) {
            return Err(t.shape(format!("operand shapes {} and {} differ", x[0].shape, other.shape)));
        }
        Ok(TensorType { dtype: s.result(d), shape: x[0].shape.clone() })
    }
    fn rewrite(&self, _: &Rewrite<'_>) -> Result<Op> {
        Ok(Op::Scalar(self.0))
    }
    fn reference(&self, e: &Eval<'_>) -> Result<Tensor> {
        e.made(reference::scalar(self.0, e.x)?)
    }
    fn gradient(&self, b: &mut Backward<'_>) -> Result<Gradient> {
        match self.0.row().gradient {
            ScalarGrad::Zero => Ok(b.none()),
            ScalarGrad::Factor(f) => {
                let k = f(b.g, b.x(0), b.id)?;
                let d = b.g.mul(b.dy, k)?;
                Ok(b.only(d))
            }
            ScalarGrad::Operand(f) => {
                let mut out = b.no_grads();
                for (k, d) in out.iter_mut().enumerate() {
                    if b.needs_grad(k) {
                        *d = f(b.g, &b.node.inputs, b.id, b.dy, k)?;
                    }
                }
                Ok(Gradient::Of(out))
            }
        }
    }
    fn cost(&self, inputs: &[Operand], output: &Operand) -> Cost {
        let flops = (output.view.numel() as u64).saturating_mul(self.0.row().flops.into());
        Cost::reading_all(flops, inputs, output)
    }
    fn terms(&self, _: &[&[usize]]) -> Option<usize> {
        Some(1)
    }
    fn index_range(&self, _: &[Operand]) -> Option<IndexRange> {
        None
    }
    fn rounding(&self, _: &[&TensorType], _: &TensorType) -> Rounding {
        Rounding::Scalar(self.0)
    }
    fn mixed(&self, _: DType, _: &[DType], _: DType) -> MixedRole {
        self.0.row().mixed
    }
    fn restride(&self, _: &[usize]) -> Option<Restride> {
        None
    }
    fn kernels(&self, call: &KernelCall<'_>) -> Result<Lowered, Declined> {
        Err(call.no_template())
    }
}

pub(super) struct Cast;

impl Rules for Cast {
    fn name(&self) -> String {
        "cast".into()
    }
    fn attributes(&self) -> String {
        String::new()
    }
    fn facts(&self) -> Facts {
        Facts {
            lowering: Lowering::ElementWise,
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
        Ok(TensorType { dtype: t.requested()?.dtype, shape: t.x[0].shape.clone() })
    }
    fn rewrite(&self, _: &Rewrite<'_>) -> Result<Op> {
        Ok(Op::Cast)
    }
    fn reference(&self, e: &Eval<'_>) -> Result<Tensor> {
        e.made(reference::cast(e.x[0], e.dtype()))
    }
    fn gradient(&self, b: &mut Backward<'_>) -> Result<Gradient> {
        let d = b.g.dtype(b.x(0));
        let d = b.g.cast(b.dy, d)?;
        Ok(b.only(d))
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
        Rounding::Cast
    }
    fn mixed(&self, _: DType, x: &[DType], y: DType) -> MixedRole {
        // A product that becomes an integer must not be rounded before the conversion.
        if x.contains(&DType::F32) && y.is_int() { MixedRole::Exact } else { MixedRole::Wide }
    }
    fn restride(&self, _: &[usize]) -> Option<Restride> {
        None
    }
    fn kernels(&self, call: &KernelCall<'_>) -> Result<Lowered, Declined> {
        Err(call.no_template())
    }
}

pub(super) struct Bitcast;

impl Rules for Bitcast {
    fn name(&self) -> String {
        "bitcast".into()
    }
    fn attributes(&self) -> String {
        String::new()
    }
    fn facts(&self) -> Facts {
        Facts {
            lowering: Lowering::ElementWise,
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
        let (d, from) = (t.requested()?.dtype, t.x[0].dtype);
        if d.bits() != from.bits() {
            return Err(t.dtype(d, format!("its size differs from {from}")));
        }
        Ok(TensorType { dtype: d, shape: t.x[0].shape.clone() })
    }
    fn rewrite(&self, _: &Rewrite<'_>) -> Result<Op> {
        Ok(Op::Bitcast)
    }
    fn reference(&self, e: &Eval<'_>) -> Result<Tensor> {
        let c = e.x[0].write()?;
        Ok(Tensor::read(&ConstData::new(e.dtype(), &e.dims, c.owner())?))
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
        None
    }
    fn rounding(&self, _: &[&TensorType], _: &TensorType) -> Rounding {
        Rounding::Bits
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
