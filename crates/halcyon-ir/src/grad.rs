//! Reverse-mode differentiation as a graph pass, with one rule per op and one row per scalar op
//! (`grad/scalar.rs`).
//!
//! Gradients are ordinary nodes, so they can be fused, planned and differentiated again. Conventions:
//! elements that tie for a maximum or minimum share the gradient equally (except in pooling, where the first
//! receives all of it); rounding functions and comparisons have gradient zero; integers and bools have no
//! gradient.

use crate::composite::SLICE_AT;
use crate::dtype::{DType, Scalar};
use crate::error::{Error, Result};
use crate::graph::{Graph, Node, NodeId};
use crate::op::{Op, PoolKind, ReduceKind, ScatterKind, SliceAxis};
use crate::shape::{Dim, Shape};
use smallvec::{SmallVec, smallvec};
use std::collections::{BinaryHeap, HashMap};

mod conv;
mod scalar;
pub use scalar::{ScalarGrad, scalar_row};

/// Gradients of a node's operands; `None` if an operand has no gradient.
type Grads = SmallVec<[Option<NodeId>; 3]>;

/// Appends nodes that compute `d loss / d wrt[k]` and returns them in the order of `wrt`. Each has the shape
/// and dtype of `wrt[k]`; it is `None` if the loss does not depend on `wrt[k]` or if that is not a float.
///
/// `loss` must be a float with one element, unless `seed` is given: a node of the loss's type that holds the
/// incoming gradient. Contributions to one node are added in descending order of the users' ids, which fixes
/// the order of summation. Composites are differentiated through a copy of their body, softmax and
/// log-softmax in closed form. New nodes take the span of the node they differentiate.
///
/// Errors: a loss of the wrong type; an op without a gradient ([`Error::Unsupported`], with its name).
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
    // Which nodes depend on `wrt` through floats.
    let mut needs = vec![false; g.nodes().len()];
    wrt.iter().for_each(|w| needs[w.index()] = true);
    mark(g, &mut needs, 0);
    let first = first_seed(g, loss, seed)?;

    // Nodes that wait for their rule, largest id first, so that every user of a node comes before it. The
    // body of a composite is appended when the composite is processed, so its ids are larger than those of
    // all waiting nodes.
    let mut parts: HashMap<NodeId, SmallVec<[NodeId; 2]>> = HashMap::new();
    let mut todo = BinaryHeap::new();
    let mut done: HashMap<NodeId, NodeId> = HashMap::new();
    if needs[loss.index()] {
        parts.insert(loss, smallvec![first]);
        todo.push(loss);
    }
    let wanted: std::collections::HashSet<NodeId> = wrt.iter().copied().collect();
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
        let grads = match body(g, id, &node, dy)? {
            Step::Grads(v) => v,
            Step::Inlined { from, root } => {
                needs.resize(from, false);
                mark(g, &mut needs, from);
                if needs[root.index()] {
                    parts.entry(root).or_default().push(dy);
                    todo.push(root);
                }
                continue;
            }
            Step::Rule => rule(g, id, &node, dy, &need)?,
        };
        for ((x, d), need) in node.inputs.iter().zip(grads).zip(need) {
            let Some(d) = d.filter(|_| need) else { continue };
            if g.ty(d) != g.ty(*x) {
                return Err(Error::shape(
                    node.op.name(),
                    format!("the gradient of an operand of type {} is {}", g.ty(*x), g.ty(d)),
                )
                .at(&node.span));
            }
            let p = parts.entry(*x).or_default();
            if p.is_empty() {
                todo.push(*x);
            }
            p.push(d);
        }
    }
    Ok(wrt.iter().map(|w| done.get(w).copied()).collect())
}

/// Extends `needs` to the nodes from `from` on.
fn mark(g: &Graph, needs: &mut Vec<bool>, from: usize) {
    needs.resize(g.nodes().len(), false);
    for (i, n) in g.nodes().iter().enumerate().skip(from) {
        needs[i] = n.ty.dtype.is_float() && (needs[i] || n.inputs.iter().any(|x| needs[x.index()]));
    }
}

enum Step {
    /// The composite has a gradient in closed form.
    Grads(Grads),
    /// The composite's body was appended from node `from` on; differentiation continues at its result.
    Inlined { from: usize, root: NodeId },
    /// Not a composite.
    Rule,
}

fn body(g: &mut Graph, id: NodeId, node: &Node, dy: NodeId) -> Result<Step> {
    let Op::Composite(c) = &node.op else {
        return Ok(Step::Rule);
    };
    if let (Some(axis), [x]) = (c.int("axis").and_then(|a| usize::try_from(a).ok()), &node.inputs[..])
        && matches!(&*c.name, "softmax" | "log_softmax")
    {
        // A composite of that name whose body is something else goes the general way.
        let mut own = Graph::new();
        let v = own.input("x0", g.ty(*x).clone());
        let log = &*c.name == "log_softmax";
        let y = if log { own.log_softmax(v, axis) } else { own.softmax(v, axis) }?;
        if own.node(y).op == node.op {
            // softmax: y·(dy − Σ dy·y); log-softmax: dy − exp(y)·Σ dy.
            let dx = if log {
                let (s, e) = (g.sum(dy, &[axis], true)?, g.exp(id)?);
                let m = g.mul(e, s)?;
                g.sub(dy, m)?
            } else {
                let p = g.mul(dy, id)?;
                let s = g.sum(p, &[axis], true)?;
                let d = g.sub(dy, s)?;
                g.mul(id, d)?
            };
            return Ok(Step::Grads(smallvec![Some(dx)]));
        }
    }
    if let (Some(axis), Some(len), [x, position]) = (c.int("axis"), c.int("len"), &node.inputs[..])
        && &*c.name == SLICE_AT
        && let (Ok(axis), Ok(len)) = (usize::try_from(axis), usize::try_from(len))
    {
        let mut own = Graph::new();
        let v = own.input("x0", g.ty(*x).clone());
        let p = own.input("x1", g.ty(*position).clone());
        let y = own.slice_at(v, p, axis, len)?;
        if own.node(y).op == node.op {
            let z = zeros(g, *x);
            let dx = g.update_slice(z, dy, *position, axis)?;
            return Ok(Step::Grads(smallvec![Some(dx), None]));
        }
    }
    let from = g.nodes().len();
    let root = c.result()?;
    let root = *g
        .inline(&c.body, &node.inputs, &[root])?
        .first()
        .ok_or_else(|| Error::internal("a composite has no result"))?;
    Ok(Step::Inlined { from, root })
}

fn unsupported(what: impl Into<String>, next: &str, node: &Node) -> Error {
    Error::unsupported(format!("{} (at {})", what.into(), node.span), next)
}

fn zeros(g: &mut Graph, like: NodeId) -> NodeId {
    let t = g.ty(like).clone();
    g.full(t.dtype, &t.shape, 0.0)
}

/// `dy` where `mask` is true, else zero.
fn keep(g: &mut Graph, mask: NodeId, dy: NodeId) -> Result<NodeId> {
    let z = g.lit(dy, 0.0);
    g.select(mask, dy, z)
}

/// The gradient rule of one op. Each rule follows from the op's definition in `op.rs`.
fn rule(g: &mut Graph, id: NodeId, node: &Node, dy: NodeId, need: &[bool]) -> Result<Grads> {
    let x = &node.inputs;
    let one = |d: NodeId| -> Grads { smallvec![Some(d)] };
    let none = || -> Grads { SmallVec::from_elem(None, x.len()) };
    let wants = |k: usize| need.get(k).copied().unwrap_or(false);
    let sx = match x.first() {
        Some(x) => g.shape(*x).clone(),
        None => return Ok(smallvec![]),
    };
    Ok(match &node.op {
        Op::Scalar(op) => match scalar_row(*op) {
            Some(ScalarGrad::Zero) => none(),
            Some(ScalarGrad::Factor(f)) => {
                let k = f(g, x[0], id)?;
                one(g.mul(dy, k)?)
            }
            Some(ScalarGrad::Operand(f)) => (0..x.len())
                .map(|k| if wants(k) { f(g, x, id, dy, k) } else { Ok(None) })
                .collect::<Result<_>>()?,
            None => {
                return Err(unsupported(
                    format!("the gradient of {}", op.name()),
                    "Add its row to grad/scalar.rs",
                    node,
                ));
            }
        },
        Op::Cast => one(g.cast(dy, g.dtype(x[0]))?),
        Op::Reshape => one(g.reshape(dy, &sx)?),
        Op::Permute(p) => {
            let mut inv = vec![0; p.len()];
            p.iter().enumerate().for_each(|(to, from)| inv[*from] = to);
            one(g.permute(dy, &inv)?)
        }
        Op::Expand => {
            let sy = &node.ty.shape;
            let lead = sy.rank() - sx.rank();
            let axes: Vec<usize> =
                (0..sy.rank()).filter(|&k| k < lead || (sx[k - lead].is(1) && !sy[k].is(1))).collect();
            let s = g.sum(dy, &axes, false)?;
            one(g.reshape(s, &sx)?)
        }
        Op::Slice(axes) => one(unslice(g, node, axes, dy, x[0])?),
        Op::Pad { lo, .. } => {
            let start: Vec<Dim> = lo.iter().map(|n| Dim::from(*n)).collect();
            one(g.slice(dy, &start, &vec![1; lo.len()], &sx)?)
        }
        Op::Concat { axis } => {
            let mut at = Dim::from(0);
            let mut out = none();
            for (k, x) in x.iter().enumerate() {
                let len = g.shape(*x)[*axis];
                if wants(k) {
                    out[k] = Some(g.narrow(dy, *axis, at, len)?);
                }
                at = at.add(len);
            }
            out
        }
        Op::Reduce { kind, axes, .. } => {
            let kept: Shape =
                (0..sx.rank()).map(|k| if axes.contains(&k) { Dim::from(1) } else { sx[k] }).collect();
            let (d, y) = (g.reshape(dy, &kept)?, g.reshape(id, &kept)?);
            one(reduced(g, *kind, axes, x[0], y, d)?)
        }
        Op::Scan { kind: ReduceKind::Sum, axis, exclusive, reverse } => {
            one(g.scan(ReduceKind::Sum, dy, *axis, *exclusive, !*reverse)?)
        }
        Op::Scan { kind, axis, exclusive, reverse } => {
            one(unscan(g, *kind, *axis, *exclusive, *reverse, x[0], dy)?)
        }
        Op::Matmul => {
            let r = sx.rank();
            let mut out = none();
            if wants(0) {
                let t = g.transpose(x[1], r - 2, r - 1)?;
                out[0] = Some(g.matmul(dy, t)?);
            }
            if wants(1) {
                let t = g.transpose(x[0], r - 2, r - 1)?;
                out[1] = Some(g.matmul(t, dy)?);
            }
            out
        }
        Op::Conv(c) => {
            let mut out = none();
            if wants(0) {
                out[0] = Some(conv::input(g, node, c, dy)?);
            }
            if wants(1) {
                out[1] = Some(conv::weight(g, node, c, dy)?);
            }
            out
        }
        Op::Pool(p) => one(g.push(Op::PoolGrad(p.clone()), &[x[0], id, dy], None)?),
        Op::PoolGrad(p) => {
            if p.kind == PoolKind::Max {
                return Err(unsupported(
                    "the second gradient of max_pool",
                    "Write the pool as slices and max where it is differentiated twice",
                    node,
                ));
            }
            // Linear in dy, and its derivative by x and y is zero.
            let mut out = none();
            out[2] = Some(g.pool(dy, p.clone())?);
            out
        }
        Op::Gather { axis } => {
            let z = zeros(g, x[0]);
            let d = g.scatter_rows(z, x[1], dy, *axis, ScatterKind::Add)?;
            smallvec![Some(d), None]
        }
        Op::GatherElements { axis } => {
            let z = zeros(g, x[0]);
            let d = g.scatter_elements(z, x[1], dy, *axis, ScatterKind::Add)?;
            smallvec![Some(d), None]
        }
        Op::ScatterElements { kind, .. } | Op::ScatterRows { kind, .. } => {
            unscatter(g, id, node, *kind, dy, need)?
        }
        Op::UpdateSlice { axis } => {
            let mut out = none();
            if wants(0) {
                let z = zeros(g, x[1]);
                out[0] = Some(g.update_slice(dy, z, x[2], *axis)?);
            }
            if wants(1) {
                let len = g.shape(x[1])[*axis];
                let i = g.iota(g.dtype(x[2]), [len], 0)?;
                let i = g.add(i, x[2])?;
                out[1] = Some(g.gather(dy, i, *axis)?);
            }
            out
        }
        Op::Custom(c) => {
            let v = c.op().clone().gradient(g, x, id, dy)?;
            if v.len() != x.len() {
                return Err(Error::argument(
                    node.op.name(),
                    format!("its gradient has {} entries for {} operands", v.len(), x.len()),
                )
                .at(&node.span));
            }
            v.into()
        }
        Op::Bitcast | Op::ArgReduce { .. } | Op::ArgSort { .. } | Op::ClassIndex { .. } => none(),
        Op::Input(_) | Op::Arg(_) | Op::Const(_) | Op::Full(_) | Op::Iota { .. } | Op::Composite(_) => none(),
    })
}

/// Gradient of a reduction. In `y` and `dy` the reduced axes have size 1.
fn reduced(
    g: &mut Graph,
    kind: ReduceKind,
    axes: &[usize],
    x: NodeId,
    y: NodeId,
    dy: NodeId,
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
            // The product of the other elements, without dividing, because elements may be zero: the product
            // of those before times the product of those after.
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

/// Gradient of a running product, maximum or minimum: for each of the `n` results, a reduction over the
/// elements it includes. Memory is quadratic in the axis.
fn unscan(
    g: &mut Graph,
    kind: ReduceKind,
    axis: usize,
    exclusive: bool,
    reverse: bool,
    x: NodeId,
    dy: NodeId,
) -> Result<NodeId> {
    let s = g.shape(x).clone();
    // Axis `axis` is the result, axis `axis + 1` the elements it includes.
    let mut wide = s.clone();
    wide.0.insert(axis + 1, s[axis]);
    let i = g.iota(DType::I32, &wide, axis)?;
    let k = g.iota(DType::I32, &wide, axis + 1)?;
    let seen = match (reverse, exclusive) {
        (false, false) => g.le(k, i)?,
        (false, true) => g.lt(k, i)?,
        (true, false) => g.ge(k, i)?,
        (true, true) => g.gt(k, i)?,
    };
    let rows = g.unsqueeze(x, axis)?;
    let rest = g.lit(x, kind.identity(g.dtype(x)));
    let m = g.select(seen, rows, rest)?;
    let y = g.reduce(kind, m, &[axis + 1], true)?;
    let d = g.unsqueeze(dy, axis + 1)?;
    let dm = reduced(g, kind, &[axis + 1], m, y, d)?;
    let dm = keep(g, seen, dm)?;
    g.sum(dm, &[axis], false)
}

/// Gradient of a slice: `dy` at the sliced positions, zeros elsewhere. Uses only views.
fn unslice(g: &mut Graph, node: &Node, axes: &[SliceAxis], dy: NodeId, x: NodeId) -> Result<NodeId> {
    let (s, out) = (g.shape(x).clone(), g.shape(dy).clone());
    if out.iter().any(|d| d.is(0)) {
        return Ok(zeros(g, x));
    }
    let back: Vec<usize> = (0..axes.len()).filter(|k| axes[*k].step < 0).collect();
    let mut d = g.flip(dy, &back)?;
    let (mut lo, mut hi) = (vec![0; axes.len()], vec![0; axes.len()]);
    for (k, a) in axes.iter().enumerate() {
        if a.step == 1 && a.start.is(0) && out[k] == s[k] {
            continue;
        }
        let (Some(n), Some(start), Some(len)) = (s[k].known(), a.start.known(), out[k].known()) else {
            return Err(unsupported(
                "the gradient of a slice with symbolic bounds",
                "Bind the sizes first",
                node,
            ));
        };
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
    g.pad(d, &lo, &hi, 0.0)
}

fn unscatter(
    g: &mut Graph,
    id: NodeId,
    node: &Node,
    kind: ScatterKind,
    dy: NodeId,
    need: &[bool],
) -> Result<Grads> {
    let (base, index, upd) = match node.inputs[..] {
        [b, i, u] => (b, i, u),
        _ => return Err(Error::internal("a scatter without three operands")),
    };
    let (axis, rows) = match node.op {
        Op::ScatterRows { axis, .. } => (axis, true),
        Op::ScatterElements { axis, .. } => (axis, false),
        _ => return Err(Error::internal("not a scatter")),
    };
    let read = |g: &mut Graph, x| {
        if rows { g.gather(x, index, axis) } else { g.gather_elements(x, index, axis) }
    };
    let write = |g: &mut Graph, x, u, kind| {
        if rows {
            g.scatter_rows(x, index, u, axis, kind)
        } else {
            g.scatter_elements(x, index, u, axis, kind)
        }
    };
    let mut out: Grads = smallvec![None, None, None];
    match kind {
        ScatterKind::Add => {
            out[0] = Some(dy);
            if need[2] {
                out[2] = Some(read(g, dy)?);
            }
        }
        ScatterKind::Set => {
            if need[0] {
                let z = zeros(g, upd);
                out[0] = Some(write(g, dy, z, ScatterKind::Set)?);
            }
            if need[2] {
                // Of several updates to one place only the last counts. Scatter the indices of the updates in
                // the same way; an update whose own index is found at its place was the last one.
                let (places, numbers) = if rows {
                    (Shape::from([g.shape(base)[axis]]), g.shape(index).clone())
                } else {
                    (g.shape(base).clone(), g.shape(upd).clone())
                };
                let n = g.iota(DType::I64, [numbers.numel()], 0)?;
                let n = g.reshape(n, &numbers)?;
                let blank = g.full(DType::I64, places, Scalar::I(-1));
                let won = if rows {
                    let w = g.scatter_rows(blank, index, n, 0, ScatterKind::Set)?;
                    g.gather(w, index, 0)?
                } else {
                    let w = write(g, blank, n, ScatterKind::Set)?;
                    read(g, w)?
                };
                let mut last = g.eq(won, n)?;
                if rows {
                    let tail = g.shape(base).rank() - axis - 1;
                    let s: Shape =
                        (numbers.iter().copied()).chain(std::iter::repeat_n(Dim::from(1), tail)).collect();
                    last = g.reshape(last, s)?;
                }
                let d = read(g, dy)?;
                out[2] = Some(keep(g, last, d)?);
            }
        }
        ScatterKind::Max | ScatterKind::Min => {
            let (b, r) = (g.eq(base, id)?, read(g, id)?);
            let u = g.eq(upd, r)?;
            let dt = g.dtype(base);
            let (nb, nu) = (g.cast(b, dt)?, g.cast(u, dt)?);
            let count = write(g, nb, nu, ScatterKind::Add)?;
            let share = g.div(dy, count)?;
            if need[0] {
                out[0] = Some(keep(g, b, share)?);
            }
            if need[2] {
                let d = read(g, share)?;
                out[2] = Some(keep(g, u, d)?);
            }
        }
        ScatterKind::Mul => {
            if need[2] {
                return Err(unsupported(
                    "the gradient of a multiplying scatter with respect to its updates",
                    "Gather, multiply and set instead",
                    node,
                ));
            }
            let t = g.ty(base).clone();
            let ones = g.full(t.dtype, &t.shape, 1.0);
            let k = write(g, ones, upd, ScatterKind::Mul)?;
            out[0] = Some(g.mul(dy, k)?);
        }
    }
    Ok(out)
}

#[cfg(test)]
mod tests;
