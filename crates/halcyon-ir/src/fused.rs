//! Fused kernels: a chain of element-wise ops over strided views, with an optional reduction at its end.
//!
//! This is the hand-over from the lowering to a device: GPUs get it as kernel IR (`kernel::lower`), the CPU's
//! tile executor runs it as it is.

use crate::dtype::{DType, Scalar};
use crate::layout::View;
use crate::op::ReduceKind;
use crate::scalar_op::ScalarOp;
use crate::shape::Dims;
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

/// Number of an instruction.
pub type Reg = u32;

/// One value per point of the iteration space. `dtype` is the value's type. Half floats may be kept in f32
/// between instructions; a [`InstrKind::Cast`] to their own type rounds them. Small integers wrap after every
/// instruction.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct Instr {
    pub kind: InstrKind,
    pub dtype: DType,
    pub args: SmallVec<[Reg; 3]>,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub enum InstrKind {
    /// Element of `loads[n]` at the point.
    Load(u32),
    /// Index of the point along axis `n` of the space.
    Iota(u32),
    /// `params[n]`: a literal or a run-time argument.
    Param(u32),
    Op(ScalarOp),
    /// To `dtype`, by the rules of [`Scalar::cast`]. From a half type to itself: drops the digits that an
    /// executor which keeps halves in f32 has beyond the type.
    Cast,
    Bitcast,
}

/// A value known when the step is submitted.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub enum Param {
    Literal(Scalar),
    /// Run-time argument of the plan.
    Arg(u32),
}

/// A read. `view.shape` is the space; masked-out points read `params[fill]`.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct Load {
    /// Place among the step's input buffers.
    pub input: u32,
    pub dtype: DType,
    pub view: View,
    pub fill: Option<u32>,
}

/// A result, written to output buffer `n` (its place in the list) through `view`, whose shape is the outer
/// space.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct Out {
    pub value: Reg,
    pub dtype: DType,
    /// How points that share an outer index combine; `None` exactly when nothing is reduced.
    pub reduce: Option<ReduceKind>,
    pub view: View,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct Fused {
    /// Iteration space, outer axes first, then `reduced` reduced axes. At most [`MAX_RANK`] axes.
    pub space: Dims,
    pub reduced: usize,
    pub loads: Vec<Load>,
    /// Types and values of the parameters.
    pub params: Vec<(DType, Param)>,
    pub body: Vec<Instr>,
    pub outs: Vec<Out>,
}

/// Axes that a fused kernel's space may have after collapsing.
pub const MAX_RANK: usize = 8;

impl Fused {
    pub fn outer(&self) -> &[usize] {
        &self.space[..self.space.len() - self.reduced]
    }

    pub fn inner(&self) -> &[usize] {
        &self.space[self.space.len() - self.reduced..]
    }

    /// FLOPs of one execution, from the rows of the scalar ops.
    pub fn flops(&self) -> u64 {
        let per: u64 = self
            .body
            .iter()
            .map(|i| if let InstrKind::Op(o) = i.kind { o.row().flops as u64 } else { 0 })
            .sum::<u64>()
            + self.outs.iter().filter(|o| o.reduce.is_some()).count() as u64;
        per.saturating_mul(self.space.iter().product::<usize>() as u64)
    }

    /// Bytes moved when every load reads each distinct element once.
    pub fn bytes(&self) -> u64 {
        let touched = |v: &View| -> usize {
            (0..v.rank())
                .filter(|&k| v.strides[k] != 0)
                .map(|k| v.mask.as_ref().map_or(v.shape[k], |m| m[k].1.saturating_sub(m[k].0)))
                .product()
        };
        let r: usize = self.loads.iter().map(|l| l.dtype.bytes(touched(&l.view))).sum();
        let w: usize = self.outs.iter().map(|o| o.dtype.bytes(o.view.numel())).sum();
        (r + w) as u64
    }

    /// The program without what reaches it at run time (sizes, strides, offsets, literal values): two fused
    /// kernels of one template can share a compiled program whose sizes are arguments.
    pub fn template(&self) -> Fused {
        let mut f = self.clone();
        let blank = |v: &mut View| {
            v.shape.iter_mut().for_each(|d| *d = 0);
            v.strides.iter_mut().for_each(|s| *s = isize::from(*s != 0));
            v.offset = 0;
            if let Some(m) = &mut v.mask {
                m.iter_mut().for_each(|m| *m = (0, 0));
            }
        };
        f.space.iter_mut().for_each(|d| *d = 0);
        f.loads.iter_mut().for_each(|l| blank(&mut l.view));
        f.outs.iter_mut().for_each(|o| blank(&mut o.view));
        f.params.iter_mut().for_each(|p| p.1 = Param::Literal(Scalar::I(0)));
        f
    }
}
