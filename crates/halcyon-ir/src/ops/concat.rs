//! Concatenation.

use super::{
    Cost, Facts, IndexRange, Lowering, MixedRole, Moves, Op, Rewrite, Rounding, Rules, ScatterKind, Types,
};
use crate::dtype::{DType, Scalar};
use crate::error::Result;
use crate::grad::{Backward, Gradient};
use crate::kernel::lower::{KernelCall, Lowered};
use crate::kernel::templates::gather;
use crate::layout::Restride;
use crate::reference::{Eval, Tensor, Vals, index, scatter};
use crate::shape::{Dim, TensorType};
use crate::target::{Declined, Operand};

pub(super) struct Concat {
    pub axis: usize,
}

impl Rules for Concat {
    fn name(&self) -> String {
        "concat".into()
    }
    fn attributes(&self) -> String {
        format!("axis {}", self.axis)
    }
    fn facts(&self) -> Facts {
        Facts {
            lowering: Lowering::Fused,
            moves: Moves::All,
            identity: None,
            packs: false,
            in_place: false,
            summed: None,
            template: None,
        }
    }
    fn infer(&self, t: &Types<'_>) -> Result<TensorType> {
        let Some(f) = t.x.first() else {
            return Err(t.argument("needs at least one operand"));
        };
        let axis = self.axis;
        t.axis(axis, &f.shape)?;
        let mut s = f.shape.clone();
        s.0[axis] = Dim::from(0);
        for x in t.x {
            let same = x.shape.rank() == s.rank() && (0..s.rank()).all(|k| k == axis || x.shape[k] == s[k]);
            if x.dtype != f.dtype {
                return Err(t.dtype(x.dtype, format!("the first operand is {}", f.dtype)));
            }
            if !same {
                return Err(t.shape(format!("{} and {} differ outside axis {axis}", f.shape, x.shape)));
            }
            s.0[axis] = s[axis].add(x.shape[axis]);
        }
        Ok(TensorType { dtype: f.dtype, shape: s })
    }
    fn rewrite(&self, _: &Rewrite<'_>) -> Result<Op> {
        Ok(Op::Concat { axis: self.axis })
    }
    fn reference(&self, e: &Eval<'_>) -> Result<Tensor> {
        let s = index::strides(&e.dims);
        let mut out = e.made(Vals::splat(e.dtype(), e.len(), Scalar::I(0)))?;
        let mut start = 0;
        for t in e.x {
            let at = index::walk(&t.dims, &s, start * s[self.axis]);
            out.v = scatter(ScatterKind::Set, &out, t, &at)?;
            start += t.dims[self.axis] as i64;
        }
        Ok(out)
    }
    fn gradient(&self, b: &mut Backward<'_>) -> Result<Gradient> {
        let mut at = Dim::from(0);
        let mut out = b.no_grads();
        for (k, d) in out.iter_mut().enumerate() {
            let len = b.g.shape(b.x(k))[self.axis];
            if b.needs_grad(k) {
                *d = Some(b.g.narrow(b.dy, self.axis, at, len)?);
            }
            at = at.add(len);
        }
        Ok(Gradient::Of(out))
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
        Rounding::Moves { with: Op::Concat { axis: self.axis }, clamp: false }
    }
    fn mixed(&self, _: DType, _: &[DType], _: DType) -> MixedRole {
        MixedRole::Moves { tables: false }
    }
    fn restride(&self, _: &[usize]) -> Option<Restride> {
        None
    }
    fn kernels(&self, c: &KernelCall<'_>) -> Result<Lowered, Declined> {
        let mut low = Lowered::default();
        let mut start = 0;
        for (i, x) in c.inputs.iter().enumerate() {
            if x.view.numel() > 0 {
                let copy = gather::copy(self.axis, start, x, c.out, c.caps);
                low.steps.extend(c.kernel_with_binding(copy, vec![i, c.inputs.len()])?.steps);
            }
            start += x.view.shape[self.axis];
        }
        Ok(low)
    }
}
