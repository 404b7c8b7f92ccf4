//! Merges chains of additions and multiplications by constants that follow a product or convolution (batch
//! normalisation at inference) into one multiplication and one addition: `((x - a) * b) * c + d` becomes `x *
//! (b c) + (d - a b c)`. Folding then computes the constants. Results are rounded differently, which is
//! allowed from level O2 on.

use super::rebuild::{Rebuild, prune};
use crate::composite::CompositeKind;
use crate::error::Result;
use crate::graph::{Graph, NodeId};
use crate::ops::Op;
use crate::ops::element_wise::ScalarOp;
use crate::shape::Shape;
use std::collections::{HashMap, HashSet};

/// `base * scale + shift`, with the constants as they are before broadcasting.
#[derive(Clone, Copy)]
struct Affine {
    base: NodeId,
    scale: Option<NodeId>,
    shift: Option<NodeId>,
    /// Number of ops that the function replaces.
    ops: usize,
}

/// Merges the chains. Returns the graph and the number of merged chains.
pub fn run(g: &Graph) -> Result<(Graph, usize)> {
    let live = Rebuild::live(g);
    let mut readers = vec![0usize; g.nodes().len()];
    for id in g.ids().filter(|i| live[i.index()]) {
        g.node(id).inputs.iter().for_each(|i| readers[i.index()] += 1);
    }
    g.outputs().iter().for_each(|o| readers[o.node.index()] += 1);
    let mut r = Rebuild::new(g);
    // For each old node: its value as an affine function of a product or convolution.
    let mut known: HashMap<NodeId, Affine> = HashMap::new();
    // The products whose chains were merged.
    let mut merged: HashSet<NodeId> = HashSet::new();
    for id in g.ids().filter(|i| live[i.index()]) {
        let n = g.node(id);
        let new = r.copy(id)?;
        let bytes = matches!(&n.op, Op::Composite(c) if c.kind == CompositeKind::ByteConv);
        if (bytes || matches!(n.op, Op::Conv(_) | Op::Matmul)) && n.ty.dtype.is_float() {
            known.insert(id, Affine { base: new, scale: None, shift: None, ops: 0 });
            continue;
        }
        let Op::Scalar(op) = n.op else { continue };
        let [a, b] = n.inputs[..] else { continue };
        let from = |x: NodeId| known.get(&x).filter(|_| readers[x.index()] == 1).copied();
        let (x, c, first, old) = match (from(a), from(b)) {
            (Some(x), None) => (x, b, true, a),
            (None, Some(x)) => (x, a, false, b),
            _ => continue,
        };
        let Some(c) = constant(g, c) else { continue };
        let c = r.get(c)?;
        r.new.span = n.span.clone();
        let Some(y) = step(&mut r.new, x, op, c, first)? else { continue };
        known.remove(&old);
        known.insert(id, y);
        let terms = usize::from(y.scale.is_some()) + usize::from(y.shift.is_some());
        let negative = op == ScalarOp::Sub;
        if y.ops > terms || negative {
            let shape = n.ty.shape.clone();
            let mut v = y.base;
            for (op, c) in [(ScalarOp::Mul, y.scale), (ScalarOp::Add, y.shift)] {
                if let Some(c) = c {
                    let c = r.new.expand(c, &shape)?;
                    v = r.new.scalar(op, &[v, c])?;
                }
            }
            r.set(id, v);
            merged.insert(y.base);
        }
    }
    if merged.is_empty() {
        return Ok((g.clone(), 0));
    }
    let g = r.finish()?.0;
    Ok((prune(&g)?, merged.len()))
}

/// If `id` is a constant or literal, possibly reshaped, expanded or permuted, returns it without its last
/// expansion. `None` for other nodes.
fn constant(g: &Graph, id: NodeId) -> Option<NodeId> {
    let mut at = id;
    loop {
        let n = g.node(at);
        match &n.op {
            Op::Const(_) | Op::Full(_) => break,
            Op::Reshape | Op::Expand | Op::Permute(_) => at = n.inputs[0],
            _ => return None,
        }
    }
    let n = g.node(id);
    Some(if n.op == Op::Expand { n.inputs[0] } else { id })
}

/// Extends the affine function `x` by one more op with the constant `c`. `first` says whether `x` is the op's
/// first operand. `None` for ops other than `x + c`, `x - c` and `x * c`, and if the result would need larger
/// constants.
fn step(g: &mut Graph, x: Affine, op: ScalarOp, c: NodeId, first: bool) -> Result<Option<Affine>> {
    let parts = [x.scale, x.shift, Some(c)];
    // Do not merge constants whose broadcast shape is larger than each of them.
    let shapes: Vec<&Shape> = parts.iter().flatten().map(|i| g.shape(*i)).collect();
    let numel = |s: &Shape| s.known().map(|d| d.iter().product::<usize>());
    let largest = shapes.iter().filter_map(|s| numel(s)).max();
    let mut all = shapes[0].clone();
    for s in &shapes[1..] {
        match all.broadcast(s) {
            Ok(b) => all = b,
            Err(_) => return Ok(None),
        }
    }
    if largest.is_none() || numel(&all) != largest {
        return Ok(None);
    }
    let ops = x.ops + 1;
    let y = match (op, first) {
        (ScalarOp::Add, _) => Affine { shift: Some(sum(g, x.shift, c)?), ops, ..x },
        (ScalarOp::Sub, true) => {
            let c = g.neg(c)?;
            Affine { shift: Some(sum(g, x.shift, c)?), ops, ..x }
        }
        (ScalarOp::Mul, _) => Affine {
            scale: Some(match x.scale {
                Some(s) => g.mul(s, c)?,
                None => c,
            }),
            shift: match x.shift {
                Some(s) => Some(g.mul(s, c)?),
                None => None,
            },
            ops,
            ..x
        },
        _ => return Ok(None),
    };
    Ok(Some(y))
}

fn sum(g: &mut Graph, a: Option<NodeId>, b: NodeId) -> Result<NodeId> {
    match a {
        Some(a) => g.add(a, b),
        None => Ok(b),
    }
}
