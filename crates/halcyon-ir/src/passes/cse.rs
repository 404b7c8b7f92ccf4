//! Common subexpressions: merges nodes with equal op, operands and type.

use super::rebuild::Rebuild;
use crate::data::ConstData;
use crate::error::Result;
use crate::graph::{Graph, NodeId, Operands};
use crate::ops::Op;
use crate::ops::element_wise::ScalarOp;
use crate::shape::TensorType;
use smallvec::SmallVec;
use std::collections::HashMap;
use std::collections::hash_map::{DefaultHasher, Entry};
use std::hash::{Hash, Hasher};

/// Maximum number of constants with the same hash that a constant is compared with. Enough for any model that
/// is not built to cause collisions.
const MAX_COMPARED: usize = 8;
/// Constants of up to this many bytes are hashed in full.
const FULLY_HASHED_BYTES: usize = 4096;

/// Hashes only parts of large constants, to avoid reading gigabytes.
fn hash(c: &ConstData) -> u64 {
    let mut h = DefaultHasher::new();
    let b = c.bytes();
    (c.dtype, &c.dims, b.len()).hash(&mut h);
    match b.len() <= FULLY_HASHED_BYTES {
        true => b.hash(&mut h),
        false => (&b[..64], &b[b.len() / 2..][..64], &b[b.len() - 64..]).hash(&mut h),
    }
    h.finish()
}

fn commutes(op: ScalarOp) -> bool {
    use ScalarOp::*;
    matches!(op, Add | Mul | Min | Max | And | Or | Xor | Eq | Ne)
}

/// Merges equal nodes and drops dead ones. Returns the graph and the number of merged nodes. Every op is a
/// pure function of its operands, so any two equal nodes may be merged; the first one's span is kept.
/// Operands of commutative scalar ops match in either order.
pub fn run(g: &Graph) -> Result<(Graph, usize)> {
    let live = Rebuild::live(g);
    let mut r = Rebuild::new(g);
    let mut seen: HashMap<(&Op, Operands, &TensorType), NodeId> = HashMap::new();
    let mut constants: HashMap<u64, SmallVec<[NodeId; 1]>> = HashMap::new();
    let mut merged = 0;
    for id in g.ids().filter(|i| live[i.index()]) {
        let n = g.node(id);
        if matches!(n.op, Op::Input(_) | Op::Arg(_)) {
            r.copy(id)?;
            continue;
        }
        if let Op::Const(c) = &n.op {
            let alike = constants.entry(hash(c)).or_default();
            let same = alike.iter().find(|i| matches!(&r.new.node(**i).op, Op::Const(d) if c == d)).copied();
            if let Some(old) = same {
                r.set(id, old);
                merged += 1;
            } else {
                let new = r.copy(id)?;
                if alike.len() < MAX_COMPARED {
                    alike.push(new);
                }
            }
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
