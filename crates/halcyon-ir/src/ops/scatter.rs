//! Writes by index: rows, elements, and a slice at a run-time position.

use super::gather::{along, elements, gathered};
use super::{
    Cost, Facts, IndexRange, Lowering, MixedRole, Moves, Op, ReduceKind, Rewrite, Rounding, Rules, Types,
    size, sizes,
};
use crate::dtype::{DType, Scalar};
use crate::error::Result;
use crate::grad::{Backward, Gradient, keep, zeros};
use crate::graph::{Graph, NodeId};
use crate::kernel::lower::{KernelCall, Lowered};
use crate::kernel::templates::gather;
use crate::layout::Restride;
use crate::reference::{Eval, Tensor, index, scatter};
use crate::shape::{Dim, Shape, TensorType};
use crate::target::{Declined, Operand};
use serde::{Deserialize, Serialize};

/// How a scatter combines an update with the base element. Variants other than `Set` are reductions.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub enum ScatterKind {
    /// The update replaces the base element. If several updates go to the same element, the last one in index
    /// order counts.
    Set,
    Add,
    Mul,
    Max,
    Min,
}

impl ScatterKind {
    /// The reduction that combines an update with the base element; `None` if the update replaces it.
    pub(crate) fn reduction(self) -> Option<ReduceKind> {
        match self {
            ScatterKind::Set => None,
            ScatterKind::Add => Some(ReduceKind::Sum),
            ScatterKind::Mul => Some(ReduceKind::Prod),
            ScatterKind::Max => Some(ReduceKind::Max),
            ScatterKind::Min => Some(ReduceKind::Min),
        }
    }
}

/// A scatter of rows ([`Op::ScatterRows`]) or of elements ([`Op::ScatterElements`]).
pub(super) struct Scatter {
    pub axis: usize,
    pub kind: ScatterKind,
    pub rows: bool,
}

impl Scatter {
    /// Whether the kernel writes the updates over a copy of the base, or over the base itself.
    fn sets_rows(&self) -> bool {
        self.rows && self.kind == ScatterKind::Set
    }

    fn op(&self, kind: ScatterKind) -> Op {
        match self.rows {
            true => Op::ScatterRows { axis: self.axis, kind },
            false => Op::ScatterElements { axis: self.axis, kind },
        }
    }

    fn read(&self, g: &mut Graph, x: NodeId, index: NodeId) -> Result<NodeId> {
        match self.rows {
            true => g.gather(x, index, self.axis),
            false => g.gather_elements(x, index, self.axis),
        }
    }

    fn write(&self, g: &mut Graph, kind: ScatterKind, [x, index, u]: [NodeId; 3]) -> Result<NodeId> {
        g.push(self.op(kind), &[x, index, u], None)
    }

    /// A bool for each update: whether it is the last update of its element. The result broadcasts to the
    /// shape of the updates.
    fn last(&self, g: &mut Graph, [base, index, updates]: [NodeId; 3]) -> Result<NodeId> {
        // Scatters the numbers of the updates in place of the updates. If an element then holds the number of
        // an update, that update is the last one of the element.
        let (places, numbers) = match self.rows {
            true => (Shape::from([g.shape(base)[self.axis]]), g.shape(index).clone()),
            false => (g.shape(base).clone(), g.shape(updates).clone()),
        };
        let n = g.iota(DType::I64, [numbers.numel()], 0)?;
        let n = g.reshape(n, &numbers)?;
        let blank = g.full(DType::I64, places, Scalar::I(-1));
        if !self.rows {
            let won = self.write(g, ScatterKind::Set, [blank, index, n])?;
            let won = self.read(g, won, index)?;
            return g.eq(won, n);
        }
        let won = g.scatter_rows(blank, index, n, 0, ScatterKind::Set)?;
        let won = g.gather(won, index, 0)?;
        let last = g.eq(won, n)?;
        let tail = g.shape(base).rank() - self.axis - 1;
        let s: Shape = (numbers.iter().copied()).chain(std::iter::repeat_n(Dim::from(1), tail)).collect();
        g.reshape(last, s)
    }
}

impl Rules for Scatter {
    fn name(&self) -> String {
        if self.rows { "scatter_rows" } else { "scatter_elements" }.into()
    }
    fn attributes(&self) -> String {
        format!("axis {}, {:?}", self.axis, self.kind)
    }
    fn facts(&self) -> Facts {
        let moves = match self.kind {
            ScatterKind::Set => Moves::Operands(&[0, 2]),
            ScatterKind::Max | ScatterKind::Min => Moves::Compared(&[0, 2]),
            ScatterKind::Add | ScatterKind::Mul => Moves::Nothing,
        };
        Facts {
            lowering: Lowering::Step,
            moves,
            identity: None,
            packs: false,
            in_place: self.sets_rows(),
            summed: None,
            template: None,
        }
    }
    fn infer(&self, t: &Types<'_>) -> Result<TensorType> {
        t.arity(3)?;
        let (base, index, updates) = (t.x[0], t.x[1], t.x[2]);
        let want = match self.rows {
            true => {
                t.axis(self.axis, &base.shape)?;
                t.need_int(index.dtype)?;
                gathered(&base.shape, &index.shape, self.axis)
            }
            false => elements(t, self.axis)?.shape,
        };
        if updates.dtype != base.dtype {
            return Err(t.dtype(updates.dtype, format!("the base is {}", base.dtype)));
        }
        if base.dtype == DType::Bool && self.kind != ScatterKind::Set {
            return Err(t.dtype(DType::Bool, "cast to a number first"));
        }
        match updates.shape == want {
            true => Ok(base.clone()),
            false if self.rows => Err(t.shape(format!("updates are {}, expected {want}", updates.shape))),
            false => {
                Err(t.shape(format!("updates are {}, expected the index's shape {want}", updates.shape)))
            }
        }
    }
    fn rewrite(&self, _: &Rewrite<'_>) -> Result<Op> {
        Ok(self.op(self.kind))
    }
    fn reference(&self, e: &Eval<'_>) -> Result<Tensor> {
        let at = match self.rows {
            true => index::rows(e.op, &e.x[0].dims, e.x[1], self.axis)?,
            false => index::elements(e.op, &e.x[0].dims, e.x[1], self.axis)?,
        };
        e.made(scatter(self.kind, e.x[0], e.x[2], &at)?)
    }
    fn gradient(&self, b: &mut Backward<'_>) -> Result<Gradient> {
        let ([base, index, updates], id, dy) = ([b.x(0), b.x(1), b.x(2)], b.id, b.dy);
        let mut out = b.no_grads();
        let (first, third, g) = (b.needs_grad(0), b.needs_grad(2), &mut *b.g);
        match self.kind {
            ScatterKind::Add => {
                out[0] = Some(dy);
                if third {
                    out[2] = Some(self.read(g, dy, index)?);
                }
            }
            ScatterKind::Set => {
                if first {
                    let z = zeros(g, updates);
                    out[0] = Some(self.write(g, ScatterKind::Set, [dy, index, z])?);
                }
                if third {
                    let last = self.last(g, [base, index, updates])?;
                    let d = self.read(g, dy, index)?;
                    out[2] = Some(keep(g, last, d)?);
                }
            }
            ScatterKind::Max | ScatterKind::Min => {
                let (b, r) = (g.eq(base, id)?, self.read(g, id, index)?);
                let u = g.eq(updates, r)?;
                let dt = g.dtype(base);
                let (nb, nu) = (g.cast(b, dt)?, g.cast(u, dt)?);
                let count = self.write(g, ScatterKind::Add, [nb, index, nu])?;
                let share = g.div(dy, count)?;
                if first {
                    out[0] = Some(keep(g, b, share)?);
                }
                if third {
                    let d = self.read(g, share, index)?;
                    out[2] = Some(keep(g, u, d)?);
                }
            }
            ScatterKind::Mul => {
                if third {
                    return Err(b.unsupported(
                        "the gradient of a multiplying scatter with respect to its updates",
                        "Gather, multiply and set instead",
                    ));
                }
                let t = g.ty(base).clone();
                let ones = g.full(t.dtype, &t.shape, 1.0);
                let k = self.write(g, ScatterKind::Mul, [ones, index, updates])?;
                out[0] = Some(g.mul(dy, k)?);
            }
        }
        Ok(Gradient::Of(out))
    }
    fn cost(&self, inputs: &[Operand], output: &Operand) -> Cost {
        if self.sets_rows() {
            // Counts only what is read and written in place.
            return Cost {
                flops: 0,
                bytes: inputs.get(1).map_or(0, size) + 2 * inputs.get(2).map_or(0, size),
            };
        }
        Cost::reading_all(0, inputs, output)
    }
    fn terms(&self, _: &[&[usize]]) -> Option<usize> {
        Some(1)
    }
    fn index_range(&self, inputs: &[Operand]) -> Option<IndexRange> {
        along(self.axis, inputs)
    }
    fn rounding(&self, x: &[&TensorType], y: &TensorType) -> Rounding {
        match self.kind {
            ScatterKind::Set => Rounding::Moves { with: self.op(ScatterKind::Set), clamp: false },
            ScatterKind::Max | ScatterKind::Min => {
                Rounding::Moves { with: self.op(ScatterKind::Max), clamp: false }
            }
            // All updates may go to one element.
            _ if y.dtype.is_float() => Rounding::Linear { terms: sizes(x.get(1)).iter().product() },
            _ => Rounding::Exact,
        }
    }
    fn mixed(&self, _: DType, _: &[DType], _: DType) -> MixedRole {
        MixedRole::Wide
    }
    fn restride(&self, _: &[usize]) -> Option<Restride> {
        None
    }
    fn kernels(&self, c: &KernelCall<'_>) -> Result<Lowered, Declined> {
        let operands = [&c.inputs[0], &c.inputs[1], &c.inputs[2]];
        if self.sets_rows() {
            let set = gather::set_rows(self.axis, operands[1], operands[2], c.out, c.caps);
            return c.over_base(set, vec![1, 2, c.inputs.len()]);
        }
        c.single_kernel(gather::scatter(self.axis, self.kind, self.rows, operands, c.out, c.caps))
    }
}

pub(super) struct UpdateSlice {
    pub axis: usize,
}

impl Rules for UpdateSlice {
    fn name(&self) -> String {
        "update_slice".into()
    }
    fn attributes(&self) -> String {
        format!("axis {}", self.axis)
    }
    fn facts(&self) -> Facts {
        Facts {
            lowering: Lowering::Step,
            moves: Moves::Operands(&[0, 1]),
            identity: None,
            packs: false,
            in_place: true,
            summed: None,
            template: None,
        }
    }
    fn infer(&self, t: &Types<'_>) -> Result<TensorType> {
        t.arity(3)?;
        let (b, u, axis) = (&t.x[0].shape, &t.x[1].shape, self.axis);
        t.axis(axis, b)?;
        t.need_int(t.x[2].dtype)?;
        if t.x[2].shape.rank() != 0 {
            return Err(t.shape(format!("the position must be a scalar, not {}", t.x[2].shape)));
        }
        if t.x[1].dtype != t.x[0].dtype {
            return Err(t.dtype(t.x[1].dtype, format!("the base is {}", t.x[0].dtype)));
        }
        let sizes = (u.get(axis).and_then(|d| d.known()), b[axis].known());
        let longer = matches!(sizes, (Some(a), Some(n)) if a > n);
        if u.rank() != b.rank() || longer || (0..b.rank()).any(|k| k != axis && u[k] != b[k]) {
            return Err(t.shape(format!("update {u} does not fit into {b} along axis {axis}")));
        }
        Ok(t.x[0].clone())
    }
    fn rewrite(&self, _: &Rewrite<'_>) -> Result<Op> {
        Ok(Op::UpdateSlice { axis: self.axis })
    }
    fn reference(&self, e: &Eval<'_>) -> Result<Tensor> {
        let at = index::update(e.op, &e.dims, e.x[1], e.x[2], self.axis)?;
        e.made(scatter(ScatterKind::Set, e.x[0], e.x[1], &at)?)
    }
    fn gradient(&self, b: &mut Backward<'_>) -> Result<Gradient> {
        let ([_, u, position], dy) = ([b.x(0), b.x(1), b.x(2)], b.dy);
        let mut out = b.no_grads();
        if b.needs_grad(0) {
            let z = zeros(b.g, u);
            out[0] = Some(b.g.update_slice(dy, z, position, self.axis)?);
        }
        if b.needs_grad(1) {
            let len = b.g.shape(u)[self.axis];
            let i = b.g.rows_from(position, len)?;
            out[1] = Some(b.g.gather(dy, i, self.axis)?);
        }
        Ok(Gradient::Of(out))
    }
    fn cost(&self, inputs: &[Operand], _: &Operand) -> Cost {
        // Counts only the elements of the update, which are read and written.
        Cost { flops: 0, bytes: 2 * inputs.get(1).map_or(0, size) }
    }
    fn terms(&self, _: &[&[usize]]) -> Option<usize> {
        Some(1)
    }
    fn index_range(&self, x: &[Operand]) -> Option<IndexRange> {
        let room = x[0].view.shape[self.axis] - x[1].view.shape[self.axis];
        Some(IndexRange { operand: 2, low: 0, end: room as i64 + 1, ignore: None, kept: false })
    }
    fn rounding(&self, _: &[&TensorType], _: &TensorType) -> Rounding {
        Rounding::Moves { with: Op::UpdateSlice { axis: self.axis }, clamp: false }
    }
    fn mixed(&self, _: DType, _: &[DType], _: DType) -> MixedRole {
        MixedRole::Wide
    }
    fn restride(&self, _: &[usize]) -> Option<Restride> {
        None
    }
    fn kernels(&self, c: &KernelCall<'_>) -> Result<Lowered, Declined> {
        let update = gather::update_slice(self.axis, &c.inputs[1], &c.inputs[2], c.out, c.caps);
        c.over_base(update, vec![1, 2, c.inputs.len()])
    }
}
