//! Reverse-mode differentiation as a graph pass, with one rule per op (`crate::ops`). The rules of scalar ops
//! are a column of their table (`crate::ops::element_wise`).
//!
//! Gradients are ordinary nodes, so they can be fused, planned and differentiated again. Conventions:
//! elements that tie for a maximum or minimum share the gradient equally (except in pooling, where the first
//! of these elements gets the whole gradient); rounding functions and comparisons have gradient zero;
//! integers and bools have no gradient.

use crate::composite::CompositeKind;
use crate::error::{Error, Result};
use crate::graph::{Graph, Node, NodeId};
use crate::ops::Op;
use crate::shape::{Dims, Shape};
use smallvec::{SmallVec, smallvec};
use std::collections::{BinaryHeap, HashMap, HashSet};

pub(crate) mod conv;
pub(crate) mod scalar;
pub use scalar::ScalarGrad;

/// Gradients of a node's operands; `None` if an operand has no gradient.
pub(crate) type Grads = SmallVec<[Option<NodeId>; 3]>;

/// Appends nodes that compute `d loss / d wrt[k]` and returns them in the order of `wrt`. Each gradient has
/// the shape and dtype of `wrt[k]`. The entry is `None` if `wrt[k]` is not a float, if the loss does not
/// depend on `wrt[k]`, or if the loss depends on it only through integers or through ops whose gradient is
/// zero.
///
/// `loss` must be a float. It must have one element, unless `seed` is given. The seed is a node of the loss's
/// type that holds the incoming gradient. Contributions to one node are added in descending order of the
/// users' ids, which fixes the order of summation. If the row of a composite has a gradient in closed form
/// (as for softmax, layer norm and attention), this form is used. Any other composite is differentiated
/// through a copy of its body. New nodes take the span of the node that they differentiate.
///
/// Errors: the loss or the seed has the wrong type, or an op has no gradient ([`Error::Unsupported`], with
/// its name).
pub fn gradients(
    g: &mut Graph,
    loss: NodeId,
    wrt: &[NodeId],
    seed: Option<NodeId>,
) -> Result<Vec<Option<NodeId>>> {
    let outer = g.span.clone();
    let r = reverse(g, loss, wrt, seed);
    g.span = outer;
    r
}

fn first_seed(g: &mut Graph, loss: NodeId, seed: Option<NodeId>) -> Result<NodeId> {
    let t = g.ty(loss).clone();
    g.span = g.node(loss).span.clone();
    if !t.dtype.is_float() {
        return Err(Error::DType {
            op: "gradients".into(),
            dtype: t.dtype,
            want: "the loss must be a float".into(),
            at: g.span.clone(),
        });
    }
    match seed {
        Some(s) if *g.ty(s) == t => Ok(s),
        Some(s) => {
            Err(Error::shape("gradients", format!("the seed is {}, the loss is {t}", g.ty(s))).at(&g.span))
        }
        None if t.shape.numel().is(1) => Ok(g.full(t.dtype, &t.shape, 1.0)),
        None => Err(Error::shape(
            "gradients",
            format!("the loss has shape {}; reduce it to one element or give a seed", t.shape),
        )
        .at(&g.span)),
    }
}

fn reverse(g: &mut Graph, loss: NodeId, wrt: &[NodeId], seed: Option<NodeId>) -> Result<Vec<Option<NodeId>>> {
    // For each node, whether it depends on `wrt` through nodes that are floats.
    let mut needs = vec![false; g.nodes().len()];
    wrt.iter().for_each(|w| needs[w.index()] = true);
    mark(g, &mut needs, 0);
    let first = first_seed(g, loss, seed)?;

    // The nodes in `todo` are processed from the largest id down, so that every user of a node is processed
    // before the node. The body of a composite is appended when the composite is processed, so its ids are
    // larger than all ids in `todo`.
    let mut parts = Parts::new();
    let mut todo = BinaryHeap::new();
    let mut done: HashMap<NodeId, NodeId> = HashMap::new();
    if needs[loss.index()] {
        parts.insert(loss, smallvec![first]);
        todo.push(loss);
    }
    let wanted: HashSet<NodeId> = wrt.iter().copied().collect();
    while let Some(id) = todo.pop() {
        let node = g.node(id).clone();
        g.span = node.span.clone();
        let ways = parts.remove(&id).unwrap_or_default();
        let Some(mut dy) = ways.first().copied() else {
            continue;
        };
        for w in &ways[1..] {
            dy = g.add(dy, *w)?;
        }
        if wanted.contains(&id) {
            done.insert(id, dy);
        }
        let need: SmallVec<[bool; 4]> = node.inputs.iter().map(|i| needs[i.index()]).collect();
        if !need.contains(&true) {
            continue;
        }
        let rule = |g: &mut Graph| {
            let mut b = Backward { g, id, node: &node, dy, need: &need, wanted: &wanted };
            node.op.rules(|r| r.gradient(&mut b))
        };
        let grads = match rule(g)? {
            Gradient::Of(grads) => grads,
            Gradient::Before { grads, source, d } => {
                contribute(g, &node, &mut parts, &mut todo, (source, d))?;
                grads
            }
            Gradient::Body => {
                let (from, root) = inline(g, &node)?;
                needs.resize(from, false);
                mark(g, &mut needs, from);
                if needs[root.index()] {
                    parts.entry(root).or_default().push(dy);
                    todo.push(root);
                }
                continue;
            }
        };
        for ((x, d), need) in node.inputs.iter().zip(grads).zip(need) {
            let Some(d) = d.filter(|_| need) else { continue };
            contribute(g, &node, &mut parts, &mut todo, (*x, d))?;
        }
    }
    Ok(wrt.iter().map(|w| done.get(w).copied()).collect())
}

/// The parts of the gradients of nodes. Each processed user of a node adds one part.
type Parts = HashMap<NodeId, SmallVec<[NodeId; 2]>>;

/// Records `d`, which the rule of `node` returned, as a part of the gradient of `x`.
fn contribute(
    g: &Graph,
    node: &Node,
    parts: &mut Parts,
    todo: &mut BinaryHeap<NodeId>,
    (x, d): (NodeId, NodeId),
) -> Result<()> {
    if g.ty(d) != g.ty(x) {
        let what = format!("the gradient of an operand of type {} is {}", g.ty(x), g.ty(d));
        return Err(Error::shape(node.op.name(), what).at(&node.span));
    }
    let p = parts.entry(x).or_default();
    if p.is_empty() {
        todo.push(x);
    }
    p.push(d);
    Ok(())
}

/// Extends `needs` to the nodes from `from` on.
fn mark(g: &Graph, needs: &mut Vec<bool>, from: usize) {
    needs.resize(g.nodes().len(), false);
    for (i, n) in g.nodes().iter().enumerate().skip(from) {
        needs[i] = n.ty.dtype.is_float() && (needs[i] || n.inputs.iter().any(|x| needs[x.index()]));
    }
}

/// The gradients that the rule of an op returns.
pub(crate) enum Gradient {
    /// A node for each operand; `None` for an operand without a gradient.
    Of(Grads),
    /// Like `Of`. In addition, `d` is the gradient of `source`, the node from which an operand is expanded.
    /// This operand has no gradient in `grads`.
    Before { grads: Grads, source: NodeId, d: NodeId },
    /// Differentiation goes through a copy of the composite's body.
    Body,
}

/// The node that a gradient rule differentiates.
pub(crate) struct Backward<'a> {
    /// The graph to which the rule adds nodes.
    pub(crate) g: &'a mut Graph,
    pub(crate) id: NodeId,
    pub(crate) node: &'a Node,
    /// The gradient of the node's result.
    pub(crate) dy: NodeId,
    need: &'a [bool],
    wanted: &'a HashSet<NodeId>,
}

impl Backward<'_> {
    /// Operand `k`.
    pub(crate) fn x(&self, k: usize) -> NodeId {
        self.node.inputs[k]
    }

    /// Whether the gradient of operand `k` is needed.
    pub(crate) fn needs_grad(&self, k: usize) -> bool {
        self.need.get(k).copied().unwrap_or(false)
    }

    /// The node from which operand `k` is expanded. `None` if the operand is no expansion, if one of the last
    /// two axes of the node is expanded, if another of its axes is larger than 1, or if the gradient of the
    /// expanded operand itself is requested.
    pub(crate) fn expanded_matrix(&self, k: usize) -> Option<NodeId> {
        let x = self.x(k);
        let node = self.g.node(x);
        if !matches!(node.op, Op::Expand) || self.wanted.contains(&x) {
            return None;
        }
        let source = node.inputs[0];
        let (dims, to) = (&self.g.shape(source).0, &node.ty.shape.0);
        let batch = dims.len().checked_sub(2)?;
        let same = dims[batch..] == to[to.len() - 2..];
        (same && dims[..batch].iter().all(|d| d.is(1))).then_some(source)
    }

    /// `None` for each operand, to be filled in.
    pub(crate) fn no_grads(&self) -> Grads {
        SmallVec::from_elem(None, self.node.inputs.len())
    }

    /// No operand has a gradient.
    pub(crate) fn none(&self) -> Gradient {
        Gradient::Of(self.no_grads())
    }

    /// The gradient of the only operand.
    pub(crate) fn only(&self, d: NodeId) -> Gradient {
        Gradient::Of(smallvec![Some(d)])
    }

    /// The gradient of operand 0; the others have none.
    pub(crate) fn first(&self, d: NodeId) -> Gradient {
        let mut out = self.no_grads();
        if let Some(first) = out.first_mut() {
            *first = Some(d);
        }
        Gradient::Of(out)
    }

    /// Whether the node equals the node that `build` makes for operands of these types, of which it reads at
    /// least `least`. If not, another crate made a composite of the same name with another body, and the
    /// composite is differentiated through its body.
    pub(crate) fn is_built_by(
        &self,
        least: usize,
        build: impl FnOnce(&mut Graph, &[NodeId]) -> Result<NodeId>,
    ) -> bool {
        if self.node.inputs.len() < least {
            return false;
        }
        let mut own = Graph::new();
        let types = self.node.inputs.iter().map(|x| self.g.ty(*x).clone()).enumerate();
        let x: Vec<NodeId> = types.map(|(i, t)| own.input(&format!("x{i}"), t)).collect();
        // Operands that `build` refuses are those of another body.
        build(&mut own, &x).is_ok_and(|y| own.node(y).op == self.node.op)
    }

    /// Splits the gradients of the first operands, which [`flat`] has joined. `dims` are the sizes of these
    /// operands.
    pub(crate) fn parts(&mut self, all: NodeId, dims: &[Dims]) -> Result<Gradient> {
        let mut out = self.no_grads();
        let mut from = 0usize;
        for (i, dims) in dims.iter().enumerate() {
            let n: usize = dims.iter().product();
            if self.needs_grad(i) {
                let part = self.g.narrow(all, 0, from, n)?;
                out[i] = Some(self.g.reshape(part, &dims[..])?);
            }
            from += n;
        }
        Ok(Gradient::Of(out))
    }

    pub(crate) fn unsupported(&self, what: impl Into<String>, next: &str) -> Error {
        unsupported(what, next, self.node)
    }
}

/// Appends the body of a composite. Returns the first node added and the result. The body of a checkpoint
/// reads its operands through [`Op::Recompute`], so that no pass merges this copy of the body with the nodes
/// that computed the result.
fn inline(g: &mut Graph, node: &Node) -> Result<(usize, NodeId)> {
    let Op::Composite(c) = &node.op else {
        return Err(Error::internal(format!("{} has no body", node.op.name())));
    };
    let from = g.nodes().len();
    let root = c.result()?;
    let mut operands = node.inputs.clone();
    if c.kind == CompositeKind::Checkpoint {
        for x in &mut operands {
            *x = g.push(Op::Recompute, &[*x], None)?;
        }
    }
    let roots = g.inline(&c.body, &operands, &[root])?;
    let root = roots.first().ok_or_else(|| Error::internal("a composite has no result"))?;
    Ok((from, *root))
}

fn unsupported(what: impl Into<String>, next: &str, node: &Node) -> Error {
    Error::unsupported(format!("{} (at {})", what.into(), node.span), next)
}

pub(crate) fn zeros(g: &mut Graph, like: NodeId) -> NodeId {
    let t = g.ty(like).clone();
    g.full(t.dtype, &t.shape, 0.0)
}

/// Joins the elements of these nodes along one axis. A composite has one result, so a composite that computes
/// several gradients returns them in this form.
pub(crate) fn flat(g: &mut Graph, x: &[NodeId]) -> Result<NodeId> {
    let one = |x: &NodeId| {
        let n = g.shape(*x).numel();
        g.reshape(*x, Shape([n].into_iter().collect()))
    };
    let rows = x.iter().map(one).collect::<Result<Vec<_>>>()?;
    g.concat(&rows, 0)
}

/// `dy` where `mask` is true, elsewhere zero.
pub(crate) fn keep(g: &mut Graph, mask: NodeId, dy: NodeId) -> Result<NodeId> {
    let z = g.lit(dy, 0.0);
    g.select(mask, dy, z)
}

#[cfg(test)]
mod tests;
