//! Matrix products.

use super::{
    Cost, Facts, IndexRange, Lowering, MixedRole, Moves, Op, RatedWork, Rewrite, Rounding, Rules, Types,
    sizes,
};
use crate::dtype::DType;
use crate::error::Result;
use crate::grad::{Backward, Gradient};
use crate::graph::{Graph, NodeId};
use crate::kernel::lower::{KernelCall, Lowered, Template};
use crate::kernel::templates;
use crate::layout::Restride;
use crate::reference::{Eval, Tensor, Vals, mixed, wrap};
use crate::shape::{Dim, Shape, TensorType};
use crate::target::{Declined, Operand};

const TEMPLATE: Template = tuned_template!(matmul);

pub(super) struct Matmul;

/// Number of operations of a product: two (a multiplication and an addition) for each element of the result
/// and each position along the summed axis.
pub(super) fn flops(inputs: &[Operand], output: &Operand) -> u64 {
    let k = inputs.first().and_then(|a| a.view.shape.last()).map_or(0, |k| *k as u64);
    (output.view.numel() as u64).saturating_mul(k).saturating_mul(2)
}

impl Rules for Matmul {
    fn name(&self) -> String {
        "matmul".into()
    }
    fn attributes(&self) -> String {
        String::new()
    }
    fn facts(&self) -> Facts {
        Facts {
            lowering: Lowering::Step,
            moves: Moves::Nothing,
            identity: None,
            packs: true,
            in_place: false,
            summed: Some((0, 0)),
            template: Some(&TEMPLATE),
        }
    }
    fn infer(&self, t: &Types<'_>) -> Result<TensorType> {
        t.arity(2)?;
        let (a, b, d) = (&t.x[0].shape, &t.x[1].shape, t.x[0].dtype);
        if d != t.x[1].dtype {
            return Err(t.dtype(t.x[1].dtype, format!("the left operand is {d}")));
        }
        if d == DType::Bool {
            return Err(t.dtype(DType::Bool, "cast to a number first"));
        }
        let r = a.rank();
        if r < 2 || r != b.rank() || a[..r - 2] != b[..r - 2] || a[r - 1] != b[r - 2] {
            return Err(t.shape(format!("{a} × {b}: expected [batch…, m, k] × [batch…, k, n]")));
        }
        let mut shape = a.clone();
        shape.0[r - 1] = b[r - 1];
        Ok(TensorType { dtype: d, shape })
    }
    fn rewrite(&self, _: &Rewrite<'_>) -> Result<Op> {
        Ok(Op::Matmul)
    }
    fn reference(&self, e: &Eval<'_>) -> Result<Tensor> {
        e.made(product(e.x[0], e.x[1])?)
    }
    fn gradient(&self, b: &mut Backward<'_>) -> Result<Gradient> {
        let (x, w, dy) = (b.x(0), b.x(1), b.dy);
        let r = b.g.shape(x).rank();
        let mut out = b.no_grads();
        if b.needs_grad(0) {
            let t = b.g.transpose(w, r - 2, r - 1)?;
            out[0] = Some(b.g.matmul(dy, t)?);
        }
        if !b.needs_grad(1) {
            return Ok(Gradient::Of(out));
        }
        let flipped = is_transposed(b.g, w);
        if let Some(source) = b.expanded_matrix(1).filter(|_| r > 2) {
            let (x, dy) = (all_rows(b.g, x)?, all_rows(b.g, dy)?);
            let d = left_transposed(b.g, x, dy, flipped)?;
            let shape = b.g.shape(source).clone();
            let d = b.g.reshape(d, shape)?;
            return Ok(Gradient::Before { grads: out, source, d });
        }
        out[1] = Some(left_transposed(b.g, x, dy, flipped)?);
        Ok(Gradient::Of(out))
    }
    fn cost(&self, inputs: &[Operand], output: &Operand) -> Cost {
        Cost::reading_all(flops(inputs, output), inputs, output)
    }
    fn terms(&self, x: &[&[usize]]) -> Option<usize> {
        x.first()?.last().copied()
    }
    fn index_range(&self, _: &[Operand]) -> Option<IndexRange> {
        None
    }
    fn rounding(&self, x: &[&TensorType], y: &TensorType) -> Rounding {
        match y.dtype.is_float() {
            true => Rounding::Linear { terms: sizes(x.first()).last().copied().unwrap_or(1) },
            false => Rounding::Exact,
        }
    }
    fn mixed(&self, _: DType, _: &[DType], _: DType) -> MixedRole {
        MixedRole::Product(RatedWork::Products)
    }
    fn restride(&self, _: &[usize]) -> Option<Restride> {
        None
    }
    fn kernels(&self, call: &KernelCall<'_>) -> Result<Lowered, Declined> {
        Err(call.no_template())
    }
}

/// All rows of a batch of matrices, as one matrix. If the products of a batch share their right operand, the
/// gradient of that operand is one product over all rows. Separate products would write one matrix for each
/// batch item, and these matrices would have to be summed.
fn all_rows(g: &mut Graph, x: NodeId) -> Result<NodeId> {
    let dims = g.shape(x).0.clone();
    let (last, others) = (dims[dims.len() - 1], &dims[..dims.len() - 1]);
    let rows = others.iter().fold(Dim::from(1), |n, d| n.mul(*d));
    g.reshape(x, Shape([rows, last].into_iter().collect()))
}

/// `xᵀ dy`. If `flipped`, it is computed as the transpose of `dyᵀ x`. The memory then holds `dyᵀ x` row by
/// row.
fn left_transposed(g: &mut Graph, x: NodeId, dy: NodeId, flipped: bool) -> Result<NodeId> {
    let r = g.shape(x).rank();
    let (a, b) = if flipped { (dy, x) } else { (x, dy) };
    let t = g.transpose(a, r - 2, r - 1)?;
    let d = g.matmul(t, b)?;
    if flipped { g.transpose(d, r - 2, r - 1) } else { Ok(d) }
}

/// Whether a node is the transpose of a matrix in memory, possibly reshaped or expanded along its leading
/// axes.
fn is_transposed(g: &Graph, mut x: NodeId) -> bool {
    loop {
        let node = g.node(x);
        match &node.op {
            Op::Expand | Op::Reshape => {
                let (from, to) = (&g.shape(node.inputs[0]).0, &g.shape(x).0);
                let last = |s: &[Dim]| s.len().checked_sub(2).map(|i| s[i..].to_vec());
                if last(from).is_none() || last(from) != last(to) {
                    return false;
                }
                x = node.inputs[0];
            }
            Op::Permute(p) => {
                let r = p.len();
                return r >= 2 && (p[r - 2], p[r - 1]) == (r - 1, r - 2);
            }
            _ => return false,
        }
    }
}

/// The product of `a` `[batch…, m, k]` and `b` `[batch…, k, n]`.
fn product(a: &Tensor, b: &Tensor) -> Result<Vals> {
    let r = a.dims.len();
    let (m, k, n) = (a.dims[r - 2], a.dims[r - 1], b.dims[r - 1]);
    let batch: usize = a.dims[..r - 2].iter().product();
    fn product<T: Copy>(
        (batch, m, k, n): (usize, usize, usize, usize),
        a: &[T],
        b: &[T],
        zero: T,
        f: impl Fn(T, T, T) -> T,
    ) -> Vec<T> {
        let mut y = vec![zero; batch * m * n];
        for i in 0..batch * m {
            let base = i / m.max(1) * k * n;
            for p in 0..k {
                let x = a[i * k + p];
                let row = &b[base + p * n..base + (p + 1) * n];
                let out = &mut y[i * n..(i + 1) * n];
                out.iter_mut().zip(row).for_each(|(o, w)| *o = f(*o, x, *w));
            }
        }
        y
    }
    let size = (batch, m, k, n);
    Ok(match (&a.v, &b.v) {
        (Vals::F(x), Vals::F(w)) => Vals::float(a.dtype, product(size, x, w, 0.0, |s, x, w| s + x * w)),
        (Vals::I(x), Vals::I(w)) => {
            let f = |s: i64, x: i64, w: i64| wrap(a.dtype, s.wrapping_add(x.wrapping_mul(w)));
            Vals::I(product(size, x, w, 0, f))
        }
        _ => return Err(mixed()),
    })
}
