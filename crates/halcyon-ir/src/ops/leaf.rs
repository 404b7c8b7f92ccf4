//! Ops without operands: inputs, arguments, constants, literals and indices.

use super::{Cost, Facts, IndexRange, Lowering, MixedRole, Moves, Op, Rewrite, Rounding, Rules, Types};
use crate::data::ConstData;
use crate::dtype::{self, DType};
use crate::error::{Error, Result};
use crate::grad::{Backward, Gradient};
use crate::kernel::lower::{KernelCall, Lowered};
use crate::layout::Restride;
use crate::reference::{Eval, Tensor, Vals, index, wrap};
use crate::shape::TensorType;
use crate::target::{Declined, Operand};

/// The rules that all leaves share: no gradient, no work, no kernel.
macro_rules! leaf_rules {
    ($lowering:expr, $rounding:expr) => {
        fn facts(&self) -> Facts {
            Facts {
                lowering: $lowering,
                moves: Moves::Nothing,
                identity: None,
                packs: false,
                in_place: false,
                summed: None,
                template: None,
            }
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
            $rounding
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
    };
}

pub(super) struct Input(pub u32);

impl Rules for Input {
    leaf_rules!(Lowering::Stored, Rounding::Given);

    fn name(&self) -> String {
        "input".into()
    }
    fn attributes(&self) -> String {
        // A printed graph shows the input's name instead, which is stored in the graph.
        String::new()
    }
    fn infer(&self, t: &Types<'_>) -> Result<TensorType> {
        t.requested()
    }
    fn rewrite(&self, _: &Rewrite<'_>) -> Result<Op> {
        Ok(Op::Input(self.0))
    }
    fn reference(&self, _: &Eval<'_>) -> Result<Tensor> {
        Err(Error::argument("input", "has no value of its own; evaluate the graph"))
    }
}

pub(super) struct Arg(pub u32);

impl Rules for Arg {
    leaf_rules!(Lowering::Literal, Rounding::Unknown { exact: true });

    fn name(&self) -> String {
        "arg".into()
    }
    fn attributes(&self) -> String {
        format!("{}", self.0)
    }
    fn infer(&self, t: &Types<'_>) -> Result<TensorType> {
        let w = t.requested()?;
        match w.shape.rank() {
            0 => Ok(w),
            _ => Err(t.shape(format!("an argument must be a scalar, found {}", w.shape))),
        }
    }
    fn rewrite(&self, _: &Rewrite<'_>) -> Result<Op> {
        Ok(Op::Arg(self.0))
    }
    fn reference(&self, e: &Eval<'_>) -> Result<Tensor> {
        let missing = || Error::argument("arg", format!("no value given for argument {}", self.0));
        let v = e.args.get(self.0 as usize).copied().ok_or_else(missing)?;
        e.made(Vals::splat(e.dtype(), e.len(), v))
    }
}

pub(super) struct Const<'a>(pub &'a ConstData);

impl Rules for Const<'_> {
    leaf_rules!(Lowering::Stored, Rounding::Exact);

    fn name(&self) -> String {
        "const".into()
    }
    fn attributes(&self) -> String {
        format!("{:?}", self.0)
    }
    fn infer(&self, _: &Types<'_>) -> Result<TensorType> {
        Ok(TensorType::new(self.0.dtype, &self.0.dims))
    }
    fn rewrite(&self, _: &Rewrite<'_>) -> Result<Op> {
        Ok(Op::Const(self.0.clone()))
    }
    fn reference(&self, _: &Eval<'_>) -> Result<Tensor> {
        Ok(Tensor::read(self.0))
    }
}

pub(super) struct Full(pub dtype::Scalar);

impl Rules for Full {
    leaf_rules!(Lowering::Literal, Rounding::Exact);

    fn name(&self) -> String {
        "full".into()
    }
    fn attributes(&self) -> String {
        format!("{}", self.0.as_f64())
    }
    fn infer(&self, t: &Types<'_>) -> Result<TensorType> {
        t.requested()
    }
    fn rewrite(&self, _: &Rewrite<'_>) -> Result<Op> {
        Ok(Op::Full(self.0))
    }
    fn reference(&self, e: &Eval<'_>) -> Result<Tensor> {
        e.made(Vals::splat(e.dtype(), e.len(), self.0))
    }
}

pub(super) struct Iota {
    pub axis: usize,
}

impl Rules for Iota {
    leaf_rules!(Lowering::Literal, Rounding::Exact);

    fn name(&self) -> String {
        "iota".into()
    }
    fn attributes(&self) -> String {
        format!("axis {}", self.axis)
    }
    fn infer(&self, t: &Types<'_>) -> Result<TensorType> {
        let w = t.requested()?;
        t.axis(self.axis, &w.shape)?;
        match w.dtype {
            DType::Bool => Err(t.dtype(w.dtype, "a number type is needed")),
            _ => Ok(w),
        }
    }
    fn rewrite(&self, _: &Rewrite<'_>) -> Result<Op> {
        Ok(Op::Iota { axis: self.axis })
    }
    fn reference(&self, e: &Eval<'_>) -> Result<Tensor> {
        let (d, mut strides) = (e.dtype(), vec![0i64; e.dims.len()]);
        strides[self.axis] = 1;
        let at = index::walk(&e.dims, &strides, 0);
        e.made(match d.is_float() {
            true => Vals::float(d, at.iter().map(|p| *p as f64).collect()),
            false => Vals::I(at.iter().map(|p| wrap(d, *p as i64)).collect()),
        })
    }
}
