//! Common subexpressions: nodes of equal op, operands and type become one.

use super::rebuild::Rebuild;
use crate::error::Result;
use crate::graph::{Graph, NodeId, Operands};
use crate::op::Op;
use crate::scalar_op::ScalarOp;
use crate::shape::TensorType;
use std::collections::HashMap;
use std::collections::hash_map::Entry;

fn commutes(op: ScalarOp) -> bool {
    use ScalarOp::*;
    matches!(op, Add | Mul | Min | Max | And | Or | Xor | Eq | Ne)
}

/// Merges equal nodes and drops dead ones; returns the graph and how many merged. Every op is a pure function of its operands,
/// so any two equal nodes may merge; the first one's span stays. Operands of commutative scalar ops match in either order.
pub fn run(g: &Graph) -> Result<(Graph, usize)> {
    let live = Rebuild::live(g);
    let mut r = Rebuild::new(g);
    let mut seen: HashMap<(&Op, Operands, &TensorType), NodeId> = HashMap::new();
    let mut merged = 0;
    for id in g.ids().filter(|i| live[i.index()]) {
        let n = g.node(id);
        if matches!(n.op, Op::Input(_) | Op::Arg(_)) {
            r.copy(id)?;
            continue;
        }
        let mut x = r.operands(n)?;
        if matches!(n.op, Op::Scalar(s) if commutes(s)) {
            x.sort();
        }
        match seen.entry((&n.op, x, &n.ty)) {
            Entry::Occupied(e) => {
                r.set(id, *e.get());
                merged += 1;
            }
            Entry::Vacant(e) => {
                e.insert(r.copy(id)?);
            }
        }
    }
    Ok((r.finish()?.0, merged))
}
