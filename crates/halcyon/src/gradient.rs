//! Gradients of tensors, computed by the gradient pass of the graph.

use crate::tensor::{Collector, Mode, Tensor, lift};
use halcyon_ir::composite::{Attrs, CompositeKind};
use halcyon_ir::error::{Error, Result};
use halcyon_ir::passes::rebuild::DROPPED;
use halcyon_ir::{Graph, NodeId, Op, grad};
use std::collections::HashMap;
use std::sync::Arc;

/// The name of the composite of [`Tensor::variable`].
const VARIABLE: &str = "variable";

/// Whether this is the op of [`Tensor::variable`].
pub(crate) fn is_variable(op: &Op) -> bool {
    matches!(op, Op::Composite(c) if c.kind.name() == VARIABLE)
}

/// Gradients of a scalar with respect to tensors.
#[derive(Debug)]
pub struct Gradients {
    of: Vec<(Tensor, Tensor)>,
}

impl Gradients {
    /// The gradient with respect to a tensor made by [`Tensor::requires_grad`]; `None` if the scalar does not
    /// depend on it.
    pub fn get(&self, t: &Tensor) -> Option<&Tensor> {
        self.of.iter().find(|(p, _)| Arc::ptr_eq(&p.0, &t.0)).map(|(_, g)| g)
    }

    /// Number of tensors with a gradient.
    pub fn len(&self) -> usize {
        self.of.len()
    }

    /// Whether there are no gradients.
    pub fn is_empty(&self) -> bool {
        self.of.is_empty()
    }
}

fn gradients_of(loss: &Tensor, wrt: Option<&[Tensor]>) -> Result<Vec<(Tensor, Tensor)>> {
    loss.check()?;
    let mut c = Collector { mode: Mode::Gradient, ..Collector::default() };
    c.visit(loss)?;
    // Parameters that the loss does not depend on get a gradient of zeros.
    let params: Vec<Tensor> = match wrt {
        Some(w) => w.to_vec(),
        None => {
            let mut seen = std::collections::HashSet::new();
            c.order
                .iter()
                .filter(|t| t.0.tracked && t.0.op.is_leaf() && seen.insert(Arc::as_ptr(&t.0)))
                .cloned()
                .collect()
        }
    };
    if params.is_empty() {
        return Err(Error::argument(
            "backward",
            "nothing that the loss depends on was marked with requires_grad",
        )
        .at(&loss.0.span));
    }
    let ids: Vec<Option<NodeId>> = params.iter().map(|p| c.ids.get(&Arc::as_ptr(&p.0)).copied()).collect();
    let root = c.ids[&Arc::as_ptr(&loss.0)];
    let known = c.graph.nodes().len();
    // Nodes built from tensors map back to those tensors; the argument node of a literal maps to the literal.
    let map = (0..known.min(c.order.len())).map(|i| (NodeId(i as u32), c.order[i].clone())).collect();
    let grads = lifted(loss, &mut c.graph, root, &ids, map)?.1;
    Ok(params.iter().cloned().zip(with_zeros(&params, grads)).collect())
}

/// Appends the gradients of the node `root` with respect to `ids` to a graph. Returns the tensors of the root
/// and of the gradients. `map` has the tensors of nodes that exist already.
fn lifted(
    loss: &Tensor,
    g: &mut Graph,
    root: NodeId,
    ids: &[Option<NodeId>],
    mut map: HashMap<NodeId, Tensor>,
) -> Result<(Tensor, Vec<Option<Tensor>>)> {
    let wanted: Vec<NodeId> = ids.iter().flatten().copied().collect();
    let mut found = grad::gradients(g, root, &wanted, None)?.into_iter();
    let nodes: Vec<Option<NodeId>> = ids.iter().map(|id| id.and_then(|_| found.next().flatten())).collect();
    // First make the tensors of those nodes of the forward pass that have no tensor yet.
    let value = lift(&loss.0.backend, g, &[root], &mut map, false)?.pop();
    // Then make the tensors of all gradients in one call, so that they are made in the order of the backward
    // pass.
    let all: Vec<NodeId> = nodes.iter().flatten().copied().collect();
    let mut made = lift(&loss.0.backend, g, &all, &mut map, true)?.into_iter();
    let grads = nodes.into_iter().map(|n| n.and_then(|_| made.next())).collect();
    Ok((value.ok_or_else(|| Error::internal("a loss was lost"))?, grads))
}

/// The gradients. A parameter without a gradient gets zeros.
fn with_zeros(params: &[Tensor], grads: Vec<Option<Tensor>>) -> impl Iterator<Item = Tensor> {
    let zero = |p: &Tensor| Tensor::zeros(p.backend(), p.0.ty.shape.clone(), p.0.ty.dtype);
    params.iter().zip(grads).map(move |(p, g)| g.unwrap_or_else(|| zero(p)))
}

impl Tensor {
    /// Gradients of this scalar with respect to every leaf that [`Tensor::requires_grad`] made and that the
    /// scalar depends on. They are lazy: they are computed when they are read, from values that the forward
    /// pass kept.
    ///
    /// # Errors
    /// `Error::Argument` if the scalar depends on no such leaf; errors that the tensors carry.
    pub fn backward(&self) -> Result<Gradients> {
        Ok(Gradients { of: gradients_of(self, None)? })
    }

    /// A new tensor with the same value, still lazy, as a parameter of [`value_and_grad`]. What was computed
    /// from this tensor does not depend on the new one, so it is constant for gradients with respect to the
    /// new one. Gradients with respect to this tensor go through the new one.
    ///
    /// ```
    /// use halcyon::prelude::*;
    /// # fn main() -> halcyon::Result<()> {
    /// let b = Backend::cpu()?;
    /// let w = Tensor::from_slice(&b, [2], &[1.0f32, 2.0])?;
    /// let f = b.compile(|x: &[Tensor]| {
    ///     let twice = &x[0] * 2.0;
    ///     halcyon::value_and_grad(&[x[0].variable()], |v| Ok((&v[0] * &twice).sum(..))).map(|(_, g)| g)
    /// });
    /// assert_eq!(f.call(&[&w])?[0].to_vec::<f32>()?, [2.0, 4.0]);
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn variable(&self) -> Tensor {
        // Not a view: `narrow` would move through it to this tensor. Every plan replaces the composite by its
        // body, which is its operand.
        let kind = CompositeKind::from(VARIABLE);
        Tensor::build(&[self], |g, x| g.composite(kind, Attrs::new(), x, |_, x| Ok(x[0])))
    }
}

/// The value of `f` at `params` and its gradients with respect to `params`, as one graph; nothing has run
/// when it returns. The value has no gradient history; the gradients keep theirs, so they can be
/// differentiated again.
///
/// # Errors
/// Errors of `f`, and errors that the tensors carry; [`Error::Argument`] if `params` is empty; an error if
/// the value of `f` is not a float with one element, or depends on `params` through an op without a gradient.
pub fn value_and_grad(
    params: &[Tensor],
    f: impl FnOnce(&[Tensor]) -> Result<Tensor>,
) -> Result<(Tensor, Vec<Tensor>)> {
    let loss = f(params)?;
    let g = gradients_of(&loss, Some(params))?;
    Ok((loss.without_history(), g.into_iter().map(|(_, g)| g).collect()))
}

/// Like [`value_and_grad`], but keeps only some of the values that `f` computes, and computes the others
/// again for the gradients. The forward is divided into `parts` parts of about the same number of bytes, at
/// places where few bytes pass from part to part. Only the values that pass from part to part are kept. With
/// 0 or 1 parts this is [`value_and_grad`]. In [`crate::Backend::compile`] the plan then needs less scratch
/// memory and more time. [`crate::checkpoint`] chooses the parts by hand. The value has no gradient history.
///
/// # Errors
/// The errors of [`value_and_grad`].
pub fn value_and_grad_in_parts(
    params: &[Tensor],
    parts: usize,
    f: impl FnOnce(&[Tensor]) -> Result<Tensor>,
) -> Result<(Tensor, Vec<Tensor>)> {
    let loss = f(params)?;
    if parts <= 1 {
        let g = gradients_of(&loss, Some(params))?;
        return Ok((loss.without_history(), g.into_iter().map(|(_, g)| g).collect()));
    }
    loss.check()?;
    let mut c = Collector { mode: Mode::Gradient, ..Collector::default() };
    c.visit_in_order(std::slice::from_ref(&loss))?;
    c.graph.output("", c.ids[&Arc::as_ptr(&loss.0)]);
    let (mut g, new) = c.graph.checkpoint_ranges(&c.graph.even_ranges(parts))?;
    // Only leaves keep their tensors: the other nodes are computed from checkpoints now.
    let leaf = |i: &usize| c.graph.nodes()[*i].op.is_leaf() && new[*i] != DROPPED;
    let map = (0..c.order.len()).filter(leaf).map(|i| (new[i], c.order[i].clone())).collect();
    let of = |t: &Tensor| c.ids.get(&Arc::as_ptr(&t.0)).map(|id| new[id.index()]).filter(|n| *n != DROPPED);
    let ids: Vec<Option<NodeId>> = params.iter().map(of).collect();
    let root = of(&loss).ok_or_else(|| Error::internal("a loss was lost"))?;
    let (loss, grads) = lifted(&loss, &mut g, root, &ids, map)?;
    Ok((loss.without_history(), with_zeros(params, grads).collect()))
}
