//! Block-quantised weights as floats.

use super::{Cost, Facts, IndexRange, Lowering, MixedRole, Moves, Op, Rewrite, Rounding, Rules, Types};
use crate::blocks::BlockType;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::grad::{Backward, Gradient};
use crate::graph::{Graph, NodeId};
use crate::kernel::lower::{KernelCall, Lowered};
use crate::kernel::templates::blocks;
use crate::layout::Restride;
use crate::reference::{Eval, Tensor, Vals};
use crate::shape::TensorType;
use crate::target::{Declined, Operand};

pub(super) struct DecodeBlocks(pub BlockType);

impl Rules for DecodeBlocks {
    fn name(&self) -> String {
        "decode_blocks".into()
    }
    fn attributes(&self) -> String {
        self.0.name().into()
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
        if t.x[0].dtype != DType::U8 {
            return Err(t.dtype(t.x[0].dtype, "blocks are bytes (u8)"));
        }
        let shape = &t.x[0].shape;
        let bytes = shape.last().and_then(|d| d.known());
        let n = bytes.and_then(|n| self.0.elements_of(n)).ok_or_else(|| {
            let row = self.0.row();
            t.shape(format!(
                "{}: the last axis must be known, and a multiple of the {} bytes of a block of {}",
                t.x[0].shape, row.bytes, row.name
            ))
        })?;
        let leading = shape.iter().take(shape.rank() - 1).copied();
        // f64 is requested where a graph is evaluated as a reference.
        let dtype = t.want.map_or(DType::F32, |w| w.dtype);
        if !matches!(dtype, DType::F32 | DType::F64) {
            return Err(t.dtype(dtype, "blocks are decoded to f32"));
        }
        Ok(TensorType { dtype, shape: leading.chain([n.into()]).collect() })
    }
    fn rewrite(&self, _: &Rewrite<'_>) -> Result<Op> {
        Ok(Op::DecodeBlocks(self.0))
    }
    fn reference(&self, e: &Eval<'_>) -> Result<Tensor> {
        let Vals::I(x) = &e.x[0].v else { return Err(Error::internal("blocks are not integers")) };
        let bytes: Vec<u8> = x.iter().map(|v| *v as u8).collect();
        let mut y = vec![0f32; e.len()];
        self.0.decode(&bytes, &mut y);
        e.made(Vals::F(y.into_iter().map(f64::from).collect()))
    }
    fn gradient(&self, b: &mut Backward<'_>) -> Result<Gradient> {
        Ok(b.none())
    }
    fn cost(&self, inputs: &[Operand], output: &Operand) -> Cost {
        Cost::reading_all(2 * output.view.numel() as u64, inputs, output)
    }
    // Weights stay in their blocks: constant folding would store them as floats.
    fn terms(&self, _: &[&[usize]]) -> Option<usize> {
        None
    }
    fn index_range(&self, _: &[Operand]) -> Option<IndexRange> {
        None
    }
    fn rounding(&self, _: &[&TensorType], _: &TensorType) -> Rounding {
        Rounding::OfLargest { units: 2.0 }
    }
    fn mixed(&self, _: DType, _: &[DType], _: DType) -> MixedRole {
        MixedRole::Wide
    }
    fn restride(&self, _: &[usize]) -> Option<Restride> {
        None
    }
    fn kernels(&self, c: &KernelCall<'_>) -> Result<Lowered, Declined> {
        let v = &c.inputs[0].view;
        if v.shape.last().is_some_and(|n| *n > 1) && v.strides.last() != Some(&1) {
            return Err(Declined::needs_dense([0]));
        }
        c.single_kernel(blocks::decode(self.0, &c.inputs[0], c.out, c.caps))
    }
}

impl Graph {
    /// Decodes block-quantised weights to f32. The last axis of `x`, u8 `[…, bytes]`, holds whole blocks of
    /// `format`; the result is `[…, elements]`.
    ///
    /// # Errors
    /// [`Error::DType`] unless `x` is u8; [`Error::Shape`] if the last axis is not known or does not hold
    /// whole blocks.
    pub fn decode_blocks(&mut self, x: NodeId, format: BlockType) -> Result<NodeId> {
        self.push(Op::DecodeBlocks(format), &[x], None)
    }
}
