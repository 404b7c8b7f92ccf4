//! Fused kernels: a chain of element-wise instructions over strided views, with an optional reduction at the
//! end.
//!
//! Lowering passes fused kernels to a device. GPUs get them as kernel IR (`kernel::lower`); the CPU
//! device's executor of fused chains runs them directly.

mod affine;

pub use affine::{Affine, AffineActivation};

use crate::dtype::{DType, Scalar};
use crate::layout::View;
use crate::ops::ReduceKind;
use crate::ops::element_wise::ScalarOp;
use crate::shape::Dims;
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

/// Index of an instruction and of the value it computes.
pub type Reg = u32;

/// An instruction computes one value per point of the iteration space. `dtype` is the value's dtype. An
/// executor may keep half floats in f32 between instructions; an [`InstrKind::Cast`] to the same half type
/// rounds them. Integers of 8 and 16 bits wrap after every instruction.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct Instr {
    pub kind: InstrKind,
    pub dtype: DType,
    pub args: SmallVec<[Reg; 3]>,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub enum InstrKind {
    /// The element of `loads[n]` at the point.
    Load(u32),
    /// The index of the point along axis `n` of the iteration space.
    Iota(u32),
    /// `params[n]`: a literal or a run-time argument.
    Param(u32),
    Op(ScalarOp),
    /// Converts to `dtype` by the rules of [`Scalar::cast`]. A cast from a half type to itself rounds values
    /// that an executor keeps in f32.
    Cast,
    Bitcast,
}

/// A value that is known when the step is submitted.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub enum Param {
    Literal(Scalar),
    /// Run-time argument of the plan, by index.
    Arg(u32),
}

/// A read. `view.shape` is the iteration space. Points outside the view's mask read `params[fill]`.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct Load {
    /// Index among the step's input buffers.
    pub input: u32,
    pub dtype: DType,
    pub view: View,
    pub fill: Option<u32>,
}

/// A result. Entry `n` of [`Fused::outs`] is written to output buffer `n` through `view`. The shape of `view`
/// is the sizes of the outer axes.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct Out {
    pub value: Reg,
    pub dtype: DType,
    /// How points with the same outer index are combined. `None` exactly if the kernel reduces nothing.
    pub reduce: Option<ReduceKind>,
    pub view: View,
}

/// A fused kernel. It evaluates `body` at every point of `space` and stores or reduces the values in `outs`.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct Fused {
    /// Iteration space: the outer axes, then `reduced` reduced axes. At most [`MAX_RANK`] axes.
    pub space: Dims,
    pub reduced: usize,
    pub loads: Vec<Load>,
    /// Dtypes and values of the parameters.
    pub params: Vec<(DType, Param)>,
    pub body: Vec<Instr>,
    pub outs: Vec<Out>,
}

/// Maximum number of axes of a fused kernel's space, after lowering has merged axes.
pub const MAX_RANK: usize = 8;

impl Fused {
    /// Sizes of the outer (not reduced) axes.
    pub fn outer(&self) -> &[usize] {
        &self.space[..self.space.len() - self.reduced]
    }

    /// Sizes of the reduced axes.
    pub fn inner(&self) -> &[usize] {
        &self.space[self.space.len() - self.reduced..]
    }

    /// FLOPs of one execution: those of the table of scalar ops, and one per point for each reduction.
    pub fn flops(&self) -> u64 {
        let per: u64 = self
            .body
            .iter()
            .map(|i| if let InstrKind::Op(o) = i.kind { o.row().flops as u64 } else { 0 })
            .sum::<u64>()
            + self.outs.iter().filter(|o| o.reduce.is_some()).count() as u64;
        per.saturating_mul(self.space.iter().product::<usize>() as u64)
    }

    /// Bytes moved if every load reads each distinct element once and every result is written once.
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

    /// The kernel without the values passed at run time: sizes, strides, offsets, bounds of masks, literals
    /// and arguments. For each stride, the template keeps only whether the stride is 0. Two fused kernels
    /// with equal templates can share a compiled program that takes these values as arguments.
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
