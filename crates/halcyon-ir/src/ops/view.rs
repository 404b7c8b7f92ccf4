//! Views: ops that move no data. Lowering turns them into strides ([`Restride`]).

use super::{
    Axes, Cost, Facts, IndexRange, Lowering, MixedRole, Moves, Op, Rewrite, Rounding, Rules, ScatterKind,
    Types,
};
use crate::dtype::{DType, Scalar};
use crate::error::{Error, Result};
use crate::grad::{Backward, Gradient, zeros};
use crate::graph::NodeId;
use crate::kernel::lower::{KernelCall, Lowered};
use crate::layout::Restride;
use crate::reference::{Eval, Tensor, Vals, index, scatter};
use crate::shape::{Dim, TensorType};
use crate::target::{Declined, Operand};
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

/// Start and step of a slice along one axis. `start` may be symbolic.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct SliceAxis {
    pub start: Dim,
    /// Non-zero. A negative step walks down from `start`.
    pub step: i64,
}

/// The rules that all views share: elements only move, and a view has no kernel.
macro_rules! view_rules {
    () => {
        fn facts(&self) -> Facts {
            Facts {
                lowering: Lowering::View,
                moves: Moves::All,
                identity: None,
                packs: false,
                in_place: false,
                summed: None,
                template: None,
            }
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
        fn kernels(&self, call: &KernelCall<'_>) -> Result<Lowered, Declined> {
            Err(call.no_template())
        }
    };
    (moves: $op:expr) => {
        view_rules!();

        fn rewrite(&self, _: &Rewrite<'_>) -> Result<Op> {
            Ok($op(self))
        }
        fn rounding(&self, _: &[&TensorType], _: &TensorType) -> Rounding {
            Rounding::Moves { with: $op(self), clamp: false }
        }
        fn mixed(&self, _: DType, _: &[DType], _: DType) -> MixedRole {
            MixedRole::Moves { tables: false }
        }
    };
}

pub(super) struct Reshape;

impl Rules for Reshape {
    view_rules!(moves: |_| Op::Reshape);

    fn name(&self) -> String {
        "reshape".into()
    }
    fn attributes(&self) -> String {
        String::new()
    }
    fn infer(&self, t: &Types<'_>) -> Result<TensorType> {
        t.arity(1)?;
        let (x, w) = (t.x[0], t.requested()?);
        let (n, from) = (w.shape.numel(), x.shape.numel());
        if n != from || n.is_lost() {
            return Err(t.shape(format!("{} has {from} elements, {} has {n}", x.shape, w.shape)));
        }
        Ok(TensorType { dtype: x.dtype, shape: w.shape })
    }
    fn restride(&self, out: &[usize]) -> Option<Restride> {
        Some(Restride::Reshape(out.into()))
    }
    fn reference(&self, e: &Eval<'_>) -> Result<Tensor> {
        e.made(e.x[0].v.clone())
    }
    fn gradient(&self, b: &mut Backward<'_>) -> Result<Gradient> {
        let s = b.g.shape(b.x(0)).clone();
        let d = b.g.reshape(b.dy, s)?;
        Ok(b.only(d))
    }
}

pub(super) struct Recompute;

impl Rules for Recompute {
    view_rules!(moves: |_| Op::Recompute);

    fn name(&self) -> String {
        "recompute".into()
    }
    fn attributes(&self) -> String {
        String::new()
    }
    fn infer(&self, t: &Types<'_>) -> Result<TensorType> {
        t.arity(1)?;
        Ok(t.x[0].clone())
    }
    fn restride(&self, out: &[usize]) -> Option<Restride> {
        Some(Restride::Permute((0..out.len()).collect()))
    }
    fn reference(&self, e: &Eval<'_>) -> Result<Tensor> {
        e.made(e.x[0].v.clone())
    }
    fn gradient(&self, b: &mut Backward<'_>) -> Result<Gradient> {
        Ok(b.only(b.dy))
    }
}

pub(super) struct Permute<'a>(pub &'a Axes);

impl Rules for Permute<'_> {
    view_rules!(moves: |p: &Permute<'_>| Op::Permute(p.0.clone()));

    fn name(&self) -> String {
        "permute".into()
    }
    fn attributes(&self) -> String {
        format!("{:?}", self.0)
    }
    fn infer(&self, t: &Types<'_>) -> Result<TensorType> {
        t.arity(1)?;
        let (p, s) = (self.0, &t.x[0].shape);
        let mut seen: Vec<usize> = p.to_vec();
        seen.sort();
        if !seen.iter().copied().eq(0..s.rank()) {
            return Err(t.shape(format!("{p:?} is not a permutation of the axes of {s}")));
        }
        Ok(TensorType { dtype: t.x[0].dtype, shape: p.iter().map(|&i| s[i]).collect() })
    }
    fn restride(&self, _: &[usize]) -> Option<Restride> {
        Some(Restride::Permute(self.0.clone()))
    }
    fn reference(&self, e: &Eval<'_>) -> Result<Tensor> {
        let s = index::strides(&e.x[0].dims);
        let st: Vec<i64> = self.0.iter().map(|k| s[*k]).collect();
        e.made(e.x[0].v.pick(&index::walk(&e.dims, &st, 0)))
    }
    fn gradient(&self, b: &mut Backward<'_>) -> Result<Gradient> {
        let mut inv = vec![0; self.0.len()];
        self.0.iter().enumerate().for_each(|(to, from)| inv[*from] = to);
        let d = b.g.permute(b.dy, &inv)?;
        Ok(b.only(d))
    }
}

pub(super) struct Expand;

impl Rules for Expand {
    view_rules!(moves: |_| Op::Expand);

    fn name(&self) -> String {
        "expand".into()
    }
    fn attributes(&self) -> String {
        String::new()
    }
    fn infer(&self, t: &Types<'_>) -> Result<TensorType> {
        t.arity(1)?;
        let (x, w) = (t.x[0], t.requested()?);
        if x.shape.broadcast(&w.shape)? != w.shape {
            return Err(t.shape(format!("{} does not broadcast to {}", x.shape, w.shape)));
        }
        Ok(TensorType { dtype: x.dtype, shape: w.shape })
    }
    fn restride(&self, out: &[usize]) -> Option<Restride> {
        Some(Restride::Expand(out.into()))
    }
    fn reference(&self, e: &Eval<'_>) -> Result<Tensor> {
        let x = e.x[0];
        let (s, skip) = (index::strides(&x.dims), e.dims.len() - x.dims.len());
        let st: Vec<i64> = (0..e.dims.len())
            .map(|k| if k < skip || x.dims[k - skip] == 1 { 0 } else { s[k - skip] })
            .collect();
        e.made(x.v.pick(&index::walk(&e.dims, &st, 0)))
    }
    fn gradient(&self, b: &mut Backward<'_>) -> Result<Gradient> {
        let (sx, sy) = (b.g.shape(b.x(0)).clone(), b.node.ty.shape.clone());
        let lead = sy.rank() - sx.rank();
        let axes: Vec<usize> =
            (0..sy.rank()).filter(|&k| k < lead || (sx[k - lead].is(1) && !sy[k].is(1))).collect();
        let s = b.g.sum(b.dy, &axes, false)?;
        let d = b.g.reshape(s, sx)?;
        Ok(b.only(d))
    }
}

pub(super) struct Slice<'a>(pub &'a SmallVec<[SliceAxis; 4]>);

impl Slice<'_> {
    /// `dy` at the sliced positions, zeros elsewhere. Uses only views.
    fn backward(&self, b: &mut Backward<'_>) -> Result<NodeId> {
        let (axes, x, dy) = (self.0, b.x(0), b.dy);
        let (s, out) = (b.g.shape(x).clone(), b.g.shape(dy).clone());
        if out.iter().any(|d| d.is(0)) {
            return Ok(zeros(b.g, x));
        }
        let back: Vec<usize> = (0..axes.len()).filter(|k| axes[*k].step < 0).collect();
        let mut d = b.g.flip(dy, &back)?;
        let (mut lo, mut hi) = (vec![0; axes.len()], vec![0; axes.len()]);
        for (k, a) in axes.iter().enumerate() {
            if a.step == 1 && a.start.is(0) && out[k] == s[k] {
                continue;
            }
            let (Some(n), Some(start), Some(len)) = (s[k].known(), a.start.known(), out[k].known()) else {
                return Err(
                    b.unsupported("the gradient of a slice with symbolic bounds", "Bind the sizes first")
                );
            };
            let g = &mut *b.g;
            let step = a.step.unsigned_abs() as usize;
            let first = if a.step < 0 { start - (len - 1) * step } else { start };
            if step > 1 && len > 1 {
                // Insert zeros between the elements: add an axis, pad it to the step, and merge it into its
                // neighbour.
                d = g.unsqueeze(d, k + 1)?;
                let r = g.shape(d).rank();
                let mut gap = vec![0; r];
                gap[k + 1] = step - 1;
                d = g.pad(d, &vec![0; r], &gap, 0.0)?;
                let mut merged = g.shape(d).clone();
                merged.0.remove(k + 1);
                merged.0[k] = Dim::from(len * step);
                d = g.reshape(d, merged)?;
                d = g.narrow(d, k, 0usize, (len - 1) * step + 1)?;
            }
            lo[k] = first;
            hi[k] = n - first - ((len - 1) * step + 1);
        }
        b.g.pad(d, &lo, &hi, 0.0)
    }
}

impl Rules for Slice<'_> {
    view_rules!();

    fn name(&self) -> String {
        "slice".into()
    }
    fn attributes(&self) -> String {
        let axes: Vec<String> = self.0.iter().map(|a| format!("{} by {}", a.start, a.step)).collect();
        format!("from {}", axes.join(", "))
    }
    fn infer(&self, t: &Types<'_>) -> Result<TensorType> {
        t.arity(1)?;
        let (axes, s, w) = (self.0, &t.x[0].shape, t.requested()?);
        if axes.len() != s.rank() || w.shape.rank() != s.rank() {
            return Err(t.shape(format!("one entry per axis of {s} is needed")));
        }
        for (k, a) in axes.iter().enumerate() {
            if a.step == 0 {
                return Err(t.argument("the step of a slice must not be 0"));
            }
            if let (Some(n), Some(st), Some(l)) = (s[k].known(), a.start.known(), w.shape[k].known())
                && l > 0
            {
                let last = st as i128 + (l as i128 - 1) * i128::from(a.step);
                if st >= n || last < 0 || last >= n as i128 {
                    let step = a.step;
                    return Err(t.shape(format!("{l} elements from {st} by {step} exceed axis {k} of {s}")));
                }
            }
        }
        Ok(TensorType { dtype: t.x[0].dtype, shape: w.shape })
    }
    fn rewrite(&self, r: &Rewrite<'_>) -> Result<Op> {
        let axis = |a: &SliceAxis| Ok(SliceAxis { start: (r.dim)(a.start)?, step: a.step });
        Ok(Op::Slice(self.0.iter().map(axis).collect::<Result<_>>()?))
    }
    fn restride(&self, out: &[usize]) -> Option<Restride> {
        Some(Restride::Slice {
            start: self.0.iter().map(|a| a.start.known().unwrap_or(0)).collect(),
            step: self.0.iter().map(|a| a.step as isize).collect(),
            len: out.into(),
        })
    }
    fn reference(&self, e: &Eval<'_>) -> Result<Tensor> {
        let s = index::strides(&e.x[0].dims);
        let mut base = 0;
        let mut st = vec![];
        for (k, a) in self.0.iter().enumerate() {
            let start = a.start.known();
            let start = start.ok_or_else(|| Error::shape("slice", "the start is symbolic; bind it first"))?;
            // An empty slice may have any start, so the product may overflow. A slice of one element may have
            // any step.
            base = i64::saturating_add(base, (start as i64).saturating_mul(s[k]));
            st.push(if e.dims[k] > 1 { a.step * s[k] } else { 0 });
        }
        e.made(e.x[0].v.pick(&index::walk(&e.dims, &st, base)))
    }
    fn gradient(&self, b: &mut Backward<'_>) -> Result<Gradient> {
        let d = self.backward(b)?;
        Ok(b.only(d))
    }
    fn rounding(&self, _: &[&TensorType], _: &TensorType) -> Rounding {
        Rounding::Moves { with: Op::Slice(self.0.clone()), clamp: false }
    }
    fn mixed(&self, _: DType, _: &[DType], _: DType) -> MixedRole {
        MixedRole::Moves { tables: false }
    }
}

pub(super) struct Pad<'a> {
    pub lo: &'a SmallVec<[usize; 4]>,
    pub hi: &'a SmallVec<[usize; 4]>,
    pub value: Scalar,
}

impl Pad<'_> {
    fn filled(&self, value: Scalar) -> Op {
        Op::Pad { lo: self.lo.clone(), hi: self.hi.clone(), value }
    }
}

impl Rules for Pad<'_> {
    view_rules!();

    fn name(&self) -> String {
        "pad".into()
    }
    fn attributes(&self) -> String {
        format!("{:?} before, {:?} after", self.lo, self.hi)
    }
    fn infer(&self, t: &Types<'_>) -> Result<TensorType> {
        t.arity(1)?;
        let s = &t.x[0].shape;
        if self.lo.len() != s.rank() || self.hi.len() != s.rank() {
            return Err(t.shape(format!("one entry per axis of {s} is needed")));
        }
        let grown = |k: usize| Ok(s[k].offset(t.amount(self.lo[k])?).offset(t.amount(self.hi[k])?));
        let shape = (0..s.rank()).map(grown).collect::<Result<_>>()?;
        Ok(TensorType { dtype: t.x[0].dtype, shape })
    }
    fn rewrite(&self, r: &Rewrite<'_>) -> Result<Op> {
        Ok(self.filled((r.fill)(self.value)))
    }
    fn restride(&self, _: &[usize]) -> Option<Restride> {
        Some(Restride::Pad { lo: self.lo.clone(), hi: self.hi.clone(), value: self.value })
    }
    fn reference(&self, e: &Eval<'_>) -> Result<Tensor> {
        let s = index::strides(&e.dims);
        let base = self.lo.iter().zip(&s).map(|(l, s)| *l as i64 * s).sum();
        let blank = e.made(Vals::splat(e.dtype(), e.len(), self.value))?;
        e.made(scatter(ScatterKind::Set, &blank, e.x[0], &index::walk(&e.x[0].dims, &s, base))?)
    }
    fn gradient(&self, b: &mut Backward<'_>) -> Result<Gradient> {
        let start: Vec<Dim> = self.lo.iter().map(|n| Dim::from(*n)).collect();
        let s = b.g.shape(b.x(0)).clone();
        let d = b.g.slice(b.dy, &start, &vec![1; start.len()], &s)?;
        Ok(b.only(d))
    }
    fn rounding(&self, _: &[&TensorType], _: &TensorType) -> Rounding {
        // The padding is exact, so its error is 0.
        Rounding::Moves { with: self.filled(Scalar::F(0.0)), clamp: false }
    }
    fn mixed(&self, low: DType, _: &[DType], _: DType) -> MixedRole {
        match self.value.cast(low) == self.value {
            true => MixedRole::Moves { tables: false },
            false => MixedRole::Wide,
        }
    }
}
