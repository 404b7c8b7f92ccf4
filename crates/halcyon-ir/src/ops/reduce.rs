//! Reductions, and the indices of largest and smallest elements.

use super::{
    Axes, Cost, Facts, IndexRange, Lowering, MixedRole, Moves, Op, Rewrite, Rounding, Rules, Types, sizes,
};
use crate::dtype::{DType, Scalar};
use crate::error::Result;
use crate::grad::{Backward, Gradient, keep};
use crate::graph::{Graph, NodeId};
use crate::kernel::lower::{KernelCall, Lowered};
use crate::kernel::templates::scan;
use crate::layout::Restride;
use crate::ops::element_wise::ScalarOp;
use crate::reference::{Eval, Tensor, Vals, fold_f, fold_i, index, of_scalar, order, start_f};
use crate::shape::{Dim, Dims, Shape, TensorType};
use crate::target::{Declined, Operand};
use serde::{Deserialize, Serialize};
use std::cmp::Ordering;

/// The combining operation of a reduction or scan.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord, Serialize, Deserialize)]
pub enum ReduceKind {
    Sum,
    Prod,
    /// Propagates NaN. On bool: any.
    Max,
    /// Propagates NaN. On bool: all.
    Min,
}

impl ReduceKind {
    /// How the reduction moves elements of its operand: only the results of maxima and minima are such
    /// elements.
    pub(super) fn moves(self) -> Moves {
        match self {
            ReduceKind::Max | ReduceKind::Min => Moves::Compared(&[0]),
            ReduceKind::Sum | ReduceKind::Prod => Moves::Nothing,
        }
    }

    pub fn name(self) -> &'static str {
        ["sum", "prod", "max", "min"][self as usize]
    }

    /// The scalar op that combines two partial results.
    pub fn op(self, dtype: DType) -> ScalarOp {
        match (self, dtype) {
            (ReduceKind::Sum, DType::Bool) => ScalarOp::Or,
            (ReduceKind::Prod, DType::Bool) => ScalarOp::And,
            (ReduceKind::Sum, _) => ScalarOp::Add,
            (ReduceKind::Prod, _) => ScalarOp::Mul,
            (ReduceKind::Max, _) => ScalarOp::Max,
            (ReduceKind::Min, _) => ScalarOp::Min,
        }
    }

    /// The result of reducing no elements.
    pub fn identity(self, dtype: DType) -> Scalar {
        let (lo, hi) = dtype.range();
        match self {
            ReduceKind::Sum => Scalar::I(0).cast(dtype),
            ReduceKind::Prod => Scalar::I(1).cast(dtype),
            ReduceKind::Max => Scalar::F(lo).cast(dtype),
            ReduceKind::Min => Scalar::F(hi).cast(dtype),
        }
    }
}

/// The shape after a reduction over `axes`. With `keep` they stay as axes of size 1.
pub fn reduced(s: &Shape, axes: &[usize], keep: bool) -> Shape {
    s.iter()
        .enumerate()
        .filter_map(|(k, d)| match axes.contains(&k) {
            false => Some(*d),
            true if keep => Some(Dim::from(1)),
            true => None,
        })
        .collect()
}

pub(super) struct Reduce<'a> {
    pub kind: ReduceKind,
    pub axes: &'a Axes,
    pub keep: bool,
}

impl Rules for Reduce<'_> {
    fn name(&self) -> String {
        format!("reduce_{}", self.kind.name())
    }
    fn attributes(&self) -> String {
        format!("over {:?}", self.axes)
    }
    fn facts(&self) -> Facts {
        Facts {
            lowering: Lowering::Fused,
            moves: self.kind.moves(),
            identity: Some(self.kind),
            packs: false,
            in_place: false,
            summed: None,
            template: None,
        }
    }
    fn infer(&self, t: &Types<'_>) -> Result<TensorType> {
        t.arity(1)?;
        let (d, s) = (t.x[0].dtype, &t.x[0].shape);
        if d == DType::Bool && matches!(self.kind, ReduceKind::Sum | ReduceKind::Prod) {
            return Err(t.dtype(d, "cast to a number first, or use max (any) and min (all)"));
        }
        self.axes.iter().try_for_each(|a| t.axis(*a, s))?;
        Ok(TensorType { dtype: d, shape: reduced(s, self.axes, self.keep) })
    }
    fn rewrite(&self, _: &Rewrite<'_>) -> Result<Op> {
        Ok(Op::Reduce { kind: self.kind, axes: self.axes.clone(), keep: self.keep })
    }
    fn reference(&self, e: &Eval<'_>) -> Result<Tensor> {
        let (kind, x) = (self.kind, e.x[0]);
        let hit = |k: usize| self.axes.contains(&k);
        let kept: Dims = (0..x.dims.len()).map(|k| if hit(k) { 1 } else { x.dims[k] }).collect();
        let s = index::strides(&kept);
        let st: Vec<i64> = (0..s.len()).map(|k| if hit(k) { 0 } else { s[k] }).collect();
        let at = index::walk(&x.dims, &st, 0);
        e.made(match &x.v {
            Vals::F(v) => {
                let (mut out, f) = (vec![start_f(kind, x.dtype); e.len()], fold_f(kind));
                at.iter().zip(v).for_each(|(p, v)| out[*p] = f(out[*p], *v));
                Vals::float(x.dtype, out)
            }
            Vals::I(v) => {
                let first = of_scalar(kind.identity(x.dtype));
                let (mut out, f) = (vec![first; e.len()], fold_i(kind, x.dtype));
                at.iter().zip(v).for_each(|(p, v)| out[*p] = f(out[*p], *v));
                Vals::I(out)
            }
        })
    }
    fn gradient(&self, b: &mut Backward<'_>) -> Result<Gradient> {
        let (x, id, dy) = (b.x(0), b.id, b.dy);
        let kept = reduced(b.g.shape(x), self.axes, true);
        let (d, y) = (b.g.reshape(dy, &kept)?, b.g.reshape(id, &kept)?);
        let dx = backward(b.g, self.kind, self.axes, [x, y, d])?;
        Ok(b.only(dx))
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
        if matches!(self.kind, ReduceKind::Max | ReduceKind::Min) {
            let with = Op::Reduce { kind: ReduceKind::Max, axes: self.axes.clone(), keep: self.keep };
            return Rounding::Moves { with, clamp: false };
        }
        if !y.dtype.is_float() {
            return Rounding::Exact;
        }
        let dims = sizes(x.first());
        Rounding::Linear { terms: self.axes.iter().filter_map(|a| dims.get(*a).copied()).product() }
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

/// Gradient of a reduction of `x` to `y`. In `y` and `dy` the reduced axes have size 1.
pub(super) fn backward(
    g: &mut Graph,
    kind: ReduceKind,
    axes: &[usize],
    [x, y, dy]: [NodeId; 3],
) -> Result<NodeId> {
    let s = g.shape(x).clone();
    match kind {
        ReduceKind::Sum => g.expand(dy, &s),
        ReduceKind::Max | ReduceKind::Min => {
            let hit = g.eq(x, y)?;
            let ones = g.cast(hit, g.dtype(x))?;
            let count = g.sum(ones, axes, true)?;
            let share = g.div(dy, count)?;
            keep(g, hit, share)
        }
        ReduceKind::Prod => {
            // The product of the other elements is the product of those before times the product of those
            // after. The product of all is not divided by the element, because the element may be zero.
            let rest: Vec<usize> = (0..s.rank()).filter(|k| !axes.contains(k)).collect();
            let perm: Vec<usize> = rest.iter().chain(axes).copied().collect();
            let n = axes.iter().fold(Dim::from(1), |a, k| a.mul(s[*k]));
            let flat: Shape = rest.iter().map(|k| s[*k]).chain([n]).collect();
            let p = g.permute(x, &perm)?;
            let moved = g.shape(p).clone();
            let f = g.reshape(p, &flat)?;
            let before = g.scan(ReduceKind::Prod, f, rest.len(), true, false)?;
            let after = g.scan(ReduceKind::Prod, f, rest.len(), true, true)?;
            let others = g.mul(before, after)?;
            let others = g.reshape(others, moved)?;
            let mut inv = vec![0; perm.len()];
            perm.iter().enumerate().for_each(|(to, from)| inv[*from] = to);
            let others = g.permute(others, &inv)?;
            g.mul(others, dy)
        }
    }
}

pub(super) struct ArgReduce {
    pub max: bool,
    pub axis: usize,
    pub keep: bool,
    pub last: bool,
}

impl Rules for ArgReduce {
    fn name(&self) -> String {
        if self.max { "argmax" } else { "argmin" }.into()
    }
    fn attributes(&self) -> String {
        format!("axis {}", self.axis)
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
        let s = &t.x[0].shape;
        t.axis(self.axis, s)?;
        if s[self.axis].is(0) {
            return Err(t.shape(format!("axis {} of {s} is empty", self.axis)));
        }
        Ok(TensorType { dtype: DType::I64, shape: reduced(s, &[self.axis], self.keep) })
    }
    fn rewrite(&self, _: &Rewrite<'_>) -> Result<Op> {
        Ok(Op::ArgReduce { max: self.max, axis: self.axis, keep: self.keep, last: self.last })
    }
    fn reference(&self, e: &Eval<'_>) -> Result<Tensor> {
        let x = e.x[0];
        let nan = |p: usize| matches!(&x.v, Vals::F(v) if v[p].is_nan());
        let cmp = order(x);
        let mut out = vec![];
        index::lines(&x.dims, self.axis, |start, step, len| {
            let mut best = 0;
            for j in 1..len {
                let (a, b) = (start + best * step, start + j * step);
                let c = match (nan(a), nan(b)) {
                    (true, true) => Ordering::Equal,
                    (true, false) => Ordering::Less,
                    (false, true) => Ordering::Greater,
                    _ if self.max => cmp(b, a),
                    _ => cmp(a, b),
                };
                if c == Ordering::Greater || (self.last && c == Ordering::Equal) {
                    best = j;
                }
            }
            out.push(best as i64);
        });
        e.made(Vals::I(out))
    }
    fn gradient(&self, b: &mut Backward<'_>) -> Result<Gradient> {
        Ok(b.none())
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
        let k = scan::arg_reduce(self.max, self.axis, self.last, &call.inputs[0], call.out, call.caps);
        call.single_kernel(k)
    }
}
