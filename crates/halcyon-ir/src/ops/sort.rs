//! Sorting: the indices that sort the elements along an axis.

use super::{Cost, Facts, IndexRange, Lowering, MixedRole, Moves, Op, Rewrite, Rounding, Rules, Types};
use crate::dtype::DType;
use crate::error::Result;
use crate::grad::{Backward, Gradient};
use crate::kernel::lower::{KernelCall, Lowered};
use crate::kernel::templates::scan;
use crate::layout::Restride;
use crate::reference::{Eval, Tensor, Vals, index, order};
use crate::shape::TensorType;
use crate::target::{Declined, Operand};

pub(super) struct ArgSort {
    pub axis: usize,
    pub descending: bool,
}

impl Rules for ArgSort {
    fn name(&self) -> String {
        "argsort".into()
    }
    fn attributes(&self) -> String {
        format!("axis {}{}", self.axis, if self.descending { ", descending" } else { "" })
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
        t.axis(self.axis, &t.x[0].shape)?;
        Ok(TensorType { dtype: DType::I64, shape: t.x[0].shape.clone() })
    }
    fn rewrite(&self, _: &Rewrite<'_>) -> Result<Op> {
        Ok(Op::ArgSort { axis: self.axis, descending: self.descending })
    }
    fn reference(&self, e: &Eval<'_>) -> Result<Tensor> {
        let x = e.x[0];
        let cmp = order(x);
        let mut out = vec![0; e.len()];
        index::lines(&x.dims, self.axis, |start, step, len| {
            let mut ord: Vec<usize> = (0..len).collect();
            // Stable in both directions: equal elements keep their order.
            ord.sort_by(|a, b| {
                let c = cmp(start + a * step, start + b * step);
                if self.descending { c.reverse() } else { c }
            });
            for (j, o) in ord.into_iter().enumerate() {
                out[start + j * step] = o as i64;
            }
        });
        e.made(Vals::I(out))
    }
    fn gradient(&self, b: &mut Backward<'_>) -> Result<Gradient> {
        Ok(b.none())
    }
    fn cost(&self, inputs: &[Operand], output: &Operand) -> Cost {
        let len = inputs.first().map_or(1, |x| x.view.shape[self.axis].max(2)) as f64;
        let flops = (output.view.numel() as f64 * len.log2()) as u64;
        Cost::reading_all(flops, inputs, output)
    }
    fn terms(&self, _: &[&[usize]]) -> Option<usize> {
        Some(1)
    }
    fn index_range(&self, _: &[Operand]) -> Option<IndexRange> {
        None
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
        call.single_kernel(scan::arg_sort(self.axis, self.descending, &call.inputs[0], call.out, call.caps))
    }
}
