//! Running reductions along an axis, such as the cumulative sum.

use super::reduce::backward;
use super::{
    Cost, Facts, IndexRange, Lowering, MixedRole, Op, ReduceKind, Rewrite, Rounding, Rules, Types, sizes,
};
use crate::dtype::DType;
use crate::error::Result;
use crate::grad::{Backward, Gradient, keep};
use crate::graph::NodeId;
use crate::kernel::lower::{KernelCall, Lowered};
use crate::kernel::templates::scan;
use crate::layout::Restride;
use crate::reference::{Eval, Tensor, Vals, fold_f, fold_i, index, of_scalar, start_f};
use crate::shape::TensorType;
use crate::target::{Declined, Operand};

pub(super) struct Scan {
    pub kind: ReduceKind,
    pub axis: usize,
    pub exclusive: bool,
    pub reverse: bool,
}

impl Scan {
    fn op(&self, kind: ReduceKind) -> Op {
        Op::Scan { kind, axis: self.axis, exclusive: self.exclusive, reverse: self.reverse }
    }

    fn running<T: Copy>(&self, v: &[T], dims: &[usize], first: T, f: impl Fn(T, T) -> T) -> Vec<T> {
        let mut out = v.to_vec();
        index::lines(dims, self.axis, |start, step, len| {
            let mut acc = first;
            for j in 0..len {
                let p = start + step * if self.reverse { len - 1 - j } else { j };
                let next = f(acc, v[p]);
                out[p] = if self.exclusive { acc } else { next };
                acc = next;
            }
        });
        out
    }

    /// The gradient of a running product, maximum or minimum. Each result along the axis is computed again,
    /// as a separate reduction over the elements that it includes, and the gradients of these reductions are
    /// added. The memory needed is quadratic in the length of the axis.
    fn backward(&self, b: &mut Backward<'_>) -> Result<NodeId> {
        let (x, dy, axis, g) = (b.x(0), b.dy, self.axis, &mut *b.g);
        let s = g.shape(x).clone();
        // Axis `axis` numbers the results, axis `axis + 1` the elements.
        let mut wide = s.clone();
        wide.0.insert(axis + 1, s[axis]);
        let i = g.iota(DType::I32, &wide, axis)?;
        let k = g.iota(DType::I32, &wide, axis + 1)?;
        let seen = match (self.reverse, self.exclusive) {
            (false, false) => g.le(k, i)?,
            (false, true) => g.lt(k, i)?,
            (true, false) => g.ge(k, i)?,
            (true, true) => g.gt(k, i)?,
        };
        let rows = g.unsqueeze(x, axis)?;
        let rest = g.lit(x, self.kind.identity(g.dtype(x)));
        let m = g.select(seen, rows, rest)?;
        let y = g.reduce(self.kind, m, &[axis + 1], true)?;
        let d = g.unsqueeze(dy, axis + 1)?;
        let dm = backward(g, self.kind, &[axis + 1], [m, y, d])?;
        let dm = keep(g, seen, dm)?;
        g.sum(dm, &[axis], false)
    }
}

impl Rules for Scan {
    fn name(&self) -> String {
        format!("scan_{}", self.kind.name())
    }
    fn attributes(&self) -> String {
        let marks = [(self.exclusive, ", exclusive"), (self.reverse, ", reverse")];
        let marks: String = marks.into_iter().filter(|m| m.0).map(|m| m.1).collect();
        format!("axis {}{marks}", self.axis)
    }
    fn facts(&self) -> Facts {
        Facts {
            lowering: Lowering::Step,
            moves: self.kind.moves(),
            identity: self.exclusive.then_some(self.kind),
            packs: false,
            in_place: false,
            summed: None,
            template: None,
        }
    }
    fn infer(&self, t: &Types<'_>) -> Result<TensorType> {
        t.arity(1)?;
        t.axis(self.axis, &t.x[0].shape)?;
        match t.x[0].dtype {
            DType::Bool => Err(t.dtype(DType::Bool, "cast to a number first")),
            _ => Ok(t.x[0].clone()),
        }
    }
    fn rewrite(&self, _: &Rewrite<'_>) -> Result<Op> {
        Ok(self.op(self.kind))
    }
    fn reference(&self, e: &Eval<'_>) -> Result<Tensor> {
        let (kind, x) = (self.kind, e.x[0]);
        let d = x.dtype;
        e.made(match &x.v {
            Vals::F(v) => Vals::float(d, self.running(v, &x.dims, start_f(kind, d), fold_f(kind))),
            Vals::I(v) => Vals::I(self.running(v, &x.dims, of_scalar(kind.identity(d)), fold_i(kind, d))),
        })
    }
    fn gradient(&self, b: &mut Backward<'_>) -> Result<Gradient> {
        let d = match self.kind {
            ReduceKind::Sum => b.g.scan(ReduceKind::Sum, b.dy, self.axis, self.exclusive, !self.reverse)?,
            _ => self.backward(b)?,
        };
        Ok(b.only(d))
    }
    fn cost(&self, inputs: &[Operand], output: &Operand) -> Cost {
        Cost::reading_all(inputs.first().map_or(0, |x| x.view.numel() as u64), inputs, output)
    }
    fn terms(&self, _: &[&[usize]]) -> Option<usize> {
        Some(1)
    }
    fn index_range(&self, _: &[Operand]) -> Option<IndexRange> {
        None
    }
    fn rounding(&self, x: &[&TensorType], y: &TensorType) -> Rounding {
        match self.kind {
            // The error of a result is at most the maximum of its elements' errors. An exclusive scan starts
            // with the identity of a maximum, which is negative. An error is never negative, so the identity
            // counts as zero.
            ReduceKind::Max | ReduceKind::Min => {
                Rounding::Moves { with: self.op(ReduceKind::Max), clamp: true }
            }
            _ if y.dtype.is_float() => {
                Rounding::Linear { terms: sizes(x.first()).get(self.axis).copied().unwrap_or(1) }
            }
            _ => Rounding::Exact,
        }
    }
    fn mixed(&self, _: DType, _: &[DType], _: DType) -> MixedRole {
        MixedRole::Wide
    }
    fn restride(&self, _: &[usize]) -> Option<Restride> {
        None
    }
    fn kernels(&self, call: &KernelCall<'_>) -> Result<Lowered, Declined> {
        let x = &call.inputs[0];
        let k = scan::scan(self.kind, self.axis, self.exclusive, self.reverse, x, call.out, call.caps);
        call.single_kernel(k)
    }
}
