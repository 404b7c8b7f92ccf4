//! Splits a product whose right operand is a constant or literal that is larger than the largest buffer that
//! the device can bind. Each of the new products uses some of the operand's columns, and their results are
//! concatenated. An example is the weights of a classifier on a WebGPU adapter that binds at most 128 MiB.
//! Every element of the result is computed as before, but the operand is spread over several buffers.

use super::rebuild::{Rebuild, prune};
use crate::data::ConstData;
use crate::error::Result;
use crate::graph::{Graph, NodeId};
use crate::ops::Op;
use std::borrow::Cow;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

/// The number of columns in a part is a multiple of this number, if at least so many columns fit.
const COLUMNS: usize = 64;

/// A range of bytes of another constant.
struct Part(ConstData, Range<usize>);

impl AsRef<[u8]> for Part {
    fn as_ref(&self) -> &[u8] {
        &self.0.bytes()[self.1.clone()]
    }
}

/// The second operand of a product: a leaf (a constant or a literal) with two axes, possibly transposed and
/// repeated along batch axes.
#[derive(Clone, Copy)]
struct Operand {
    leaf: NodeId,
    transposed: bool,
    depth: usize,
    columns: usize,
}

fn operand(g: &Graph, id: NodeId) -> Option<Operand> {
    // A matrix that is used by a whole batch of products is the operand of an `Expand`.
    let id = if g.node(id).op == Op::Expand { g.node(id).inputs[0] } else { id };
    let n = g.node(id);
    let (leaf, transposed) = match &n.op {
        Op::Permute(p) if p[..] == [1, 0] => (n.inputs[0], true),
        _ => (id, false),
    };
    if !matches!(g.node(leaf).op, Op::Const(_) | Op::Full(_)) || g.dtype(leaf).bits() < 8 {
        return None;
    }
    let [depth, columns] = g.shape(id).known()?[..] else { return None };
    if columns < 2 {
        return None;
    }
    Some(Operand { leaf, transposed, depth, columns })
}

/// Splits operands larger than `most` bytes, unless a single column is larger. Returns the graph and the
/// number of products that were split.
pub fn run(graph: Cow<'_, Graph>, most: u64) -> Result<(Cow<'_, Graph>, usize)> {
    let g = &*graph;
    let live = Rebuild::live(g);
    let divided = |id: NodeId| -> Option<(Operand, usize)> {
        let n = g.node(id);
        let o = if n.op == Op::Matmul { operand(g, n.inputs[1])? } else { return None };
        let column = o.depth.checked_mul(g.dtype(o.leaf).size())?;
        if column.checked_mul(o.columns).is_some_and(|all| all as u64 <= most) {
            return None;
        }
        let fit = usize::try_from(most / (column as u64).max(1)).unwrap_or(usize::MAX);
        let fit = if fit < COLUMNS { fit } else { fit / COLUMNS * COLUMNS };
        (fit > 0 && fit < o.columns).then_some((o, fit))
    };
    if !g.ids().any(|i| live[i.index()] && divided(i).is_some()) {
        return Ok((graph, 0));
    }
    let mut r = Rebuild::new(g);
    // Parts of leaves, shared by products, keyed by leaf, first column and whether it is transposed.
    let mut parts: HashMap<(NodeId, usize, bool), NodeId> = HashMap::new();
    let mut products = 0;
    for id in g.ids().filter(|i| live[i.index()]) {
        r.copy(id)?;
        let Some((o, fit)) = divided(id) else { continue };
        let a = r.get(g.node(id).inputs[0])?;
        let mut sides = vec![];
        for start in (0..o.columns).step_by(fit) {
            let columns = start..o.columns.min(start + fit);
            let part = match parts.get(&(o.leaf, start, o.transposed)) {
                Some(p) => *p,
                None => {
                    let p = part(&mut r.new, g, &o, columns)?;
                    parts.insert((o.leaf, start, o.transposed), p);
                    p
                }
            };
            sides.push(r.new.matmul(a, part)?);
        }
        let axis = g.shape(id).rank() - 1;
        let whole = r.new.concat(&sides, axis)?;
        r.set(id, whole);
        products += 1;
    }
    Ok((Cow::Owned(prune(&r.finish()?.0)?), products))
}

/// These columns of an operand: a new leaf, or the transpose of one if the operand is transposed.
fn part(new: &mut Graph, g: &Graph, o: &Operand, columns: Range<usize>) -> Result<NodeId> {
    let (dtype, n) = (g.dtype(o.leaf), columns.len());
    let dims = if o.transposed { [n, o.depth] } else { [o.depth, n] };
    let leaf = match &g.node(o.leaf).op {
        Op::Full(v) => new.full(dtype, dims, *v),
        Op::Const(c) => {
            let size = dtype.size();
            let data = if o.transposed {
                let row = o.depth * size;
                let range = columns.start * row..columns.end * row;
                ConstData::new(dtype, &dims, Arc::new(Part(c.clone(), range)))?
            } else {
                let rows = c.bytes().chunks_exact(o.columns * size);
                let bytes: Vec<u8> =
                    rows.flat_map(|r| &r[columns.start * size..columns.end * size]).copied().collect();
                ConstData::new(dtype, &dims, Arc::new(bytes))?
            };
            new.constant(data)
        }
        _ => return Err(crate::Error::internal("an operand to be divided is not a constant or literal")),
    };
    if o.transposed { new.permute(leaf, &[1, 0]) } else { Ok(leaf) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::{DType, Scalar};
    use crate::reference;
    use crate::shape::TensorType;

    fn numbers(dims: &[usize], seed: usize) -> ConstData {
        let n: usize = dims.iter().product();
        let v = (0..n).map(|i| Scalar::F(((i * 7 + seed) % 23) as f64 - 11.0));
        ConstData::from_scalars(DType::F32, dims, v).unwrap()
    }

    #[test]
    fn parts_side_by_side_give_the_product() {
        for (transposed, literal) in [(false, false), (true, false), (false, true), (true, true)] {
            let mut g = Graph::new();
            let x = g.input("x", TensorType::new(DType::F32, [2, 3, 10]));
            let dims = if transposed { [150, 10] } else { [10, 150] };
            let w = match literal {
                true => g.full(DType::F32, dims, Scalar::F(0.5)),
                false => g.constant(numbers(&dims, 5)),
            };
            let w = if transposed { g.permute(w, &[1, 0]).unwrap() } else { w };
            let (y, z) = (g.matmul(x, w).unwrap(), g.neg(x).unwrap());
            let z = g.matmul(z, w).unwrap();
            g.output("y", y);
            g.output("z", z);
            let x = [numbers(&[2, 3, 10], 1)];
            let want = reference::eval(&g, &x, &[]).unwrap();
            // Limits that fit 64 columns of 40 bytes, 30 columns, no column, and everything.
            for (most, parts) in [(2600, 3), (1239, 5), (39, 0), (6000, 0)] {
                let (h, n) = run(Cow::Borrowed(&g), most).unwrap();
                assert_eq!(n, if parts > 0 { 2 } else { 0 });
                assert_eq!(reference::eval(&h, &x, &[]).unwrap(), want, "{transposed} {literal} {most}");
                let leaves = h.nodes().iter().filter(|n| matches!(n.op, Op::Const(_) | Op::Full(_)));
                let sizes: Vec<usize> =
                    leaves.map(|n| n.ty.shape.known().unwrap().iter().product::<usize>() * 4).collect();
                assert_eq!(sizes.len(), parts.max(1), "both products read the same parts");
                assert!(parts == 0 || sizes.iter().all(|s| *s as u64 <= most), "{sizes:?}");
            }
        }
    }
}
