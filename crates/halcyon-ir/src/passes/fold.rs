//! Constant folding, with the arithmetic of the reference.
//!
//! A node whose operands are constants becomes a constant if the result is small. A small constant whose
//! elements are all equal becomes a literal ([`Op::Full`]), which takes no memory. Views that would enlarge a
//! constant stay views, but nodes that are computed from them are folded.

use super::rebuild::Rebuild;
use crate::data::ConstData;
use crate::dtype::Scalar;
use crate::error::Result;
use crate::graph::{Graph, Node, NodeId};
use crate::ops::Op;
use crate::ops::element_wise::Rule;
use crate::reference::eval_op;
use crate::shape::{Dims, Shape};
use std::collections::HashMap;

/// Largest result that is folded, in elements.
pub const MAX_RESULT: usize = 65_536;
/// Maximum work for one node, in multiply-adds or elements read.
const MAX_WORK: usize = 1 << 22;
/// Maximum work for a graph.
const TOTAL_WORK: usize = 1 << 26;
/// [`run_lean`] folds results of up to this many bytes even if they are larger than their operands, because
/// the node itself takes about as much space in a file.
pub const ALWAYS: usize = 256;
/// Maximum total bytes of folded values, in addition to four times the bytes of the graph's own constants: a
/// few small nodes must not become gigabytes.
const TOTAL_BYTES: usize = 64 << 20;

/// The remaining budget for a graph.
struct Budget {
    work: usize,
    bytes: usize,
}

/// Folds constants and drops dead nodes. Returns the graph and the number of nodes that became constants or
/// literals. A node whose evaluation fails (for example an index out of range) is kept and fails when it
/// runs.
pub fn run(g: &Graph) -> Result<(Graph, usize)> {
    folded(g, false)
}

/// Like [`run`], for a graph that is stored in a file: a node whose result is larger than its operands is not
/// folded, unless the result is small ([`ALWAYS`]). So ranges, computed masks and dequantised weights do not
/// enlarge the file.
pub fn run_lean(g: &Graph) -> Result<(Graph, usize)> {
    folded(g, true)
}

fn folded(g: &Graph, lean: bool) -> Result<(Graph, usize)> {
    let live = Rebuild::live(g);
    let mut r = Rebuild::new(g);
    // Values of constant nodes of the new graph. Literals are recognised by their op.
    let mut known: HashMap<NodeId, ConstData> = HashMap::new();
    // For nodes that lean folding keeps although their value is known: the bytes from which they are
    // computed.
    let mut computed: HashMap<NodeId, usize> = HashMap::new();
    let mut changes = 0;
    let own = g.nodes().iter().map(|n| if let Op::Const(c) = &n.op { c.bytes().len() } else { 0 });
    let own = own.fold(0usize, usize::saturating_add);
    let mut left = Budget { work: TOTAL_WORK, bytes: own.saturating_mul(4).saturating_add(TOTAL_BYTES) };
    let useful = read_by_constants(g, &live);
    for id in g.ids().filter(|i| live[i.index()]) {
        let n = g.node(id);
        let new = r.copy(id)?;
        if let Op::Const(c) = &n.op {
            let small = c.numel() <= MAX_RESULT;
            if let Some(v) = small.then(|| uniform(c)).flatten() {
                changes += replace(&mut r, id, n, Op::Full(v));
            } else {
                known.insert(new, c.clone());
            }
            continue;
        }
        if n.op.is_leaf() {
            continue;
        }
        if let Some(v) = literal(&r, n)? {
            changes += replace(&mut r, id, n, Op::Full(v));
            continue;
        }
        // A view that would enlarge a constant is kept. Its value is not computed if no node that depends
        // only on constants reads it.
        if !useful[id.index()] && n.op.is_view() && growing(&r, n)? {
            continue;
        }
        let Some(y) = value(&r, n, &known, &mut left)? else { continue };
        if let Some(v) = uniform(&y) {
            changes += replace(&mut r, id, n, Op::Full(v));
            continue;
        }
        let bytes = y.bytes().len();
        left.bytes -= bytes;
        if lean && bytes > ALWAYS {
            let from = operand_bytes(&r, n, &known, &computed)?;
            if bytes > from {
                // Keep the value: results computed from it may be small.
                computed.insert(new, from);
                known.insert(new, y);
                continue;
            }
        }
        if n.op.is_view() && growing(&r, n)? {
            known.insert(new, y);
        } else {
            changes += replace(&mut r, id, n, Op::Const(y.clone()));
            known.insert(r.get(id)?, y);
        }
    }
    // Operands of the replaced nodes are dead now.
    let g = r.finish()?.0;
    Ok((super::rebuild::prune(&g)?, changes))
}

fn replace(r: &mut Rebuild, id: NodeId, n: &Node, op: Op) -> usize {
    let new =
        r.new.push_unchecked(Node { op, inputs: Default::default(), ty: n.ty.clone(), span: n.span.clone() });
    r.set(id, new);
    1
}

/// The value that all elements of a tensor have, if they are equal.
pub(super) fn uniform(c: &ConstData) -> Option<Scalar> {
    if c.dtype.bits() < 8 {
        let first = c.get(0)?;
        return c.scalars().all(|s| s == first).then_some(first);
    }
    let (b, n) = (c.bytes(), c.dtype.size());
    // All elements are equal if the data equals itself shifted by one element.
    (b.len() >= n && b[n..] == b[..b.len() - n]).then(|| c.get(0)).flatten()
}

/// The literal that a node over literals evaluates to, found without evaluating elements. Works for any
/// shape, including symbolic ones.
fn literal(r: &Rebuild, n: &Node) -> Result<Option<Scalar>> {
    let x = r.operands(n)?;
    let mut vals = vec![];
    for i in &x {
        match r.new.node(*i).op {
            Op::Full(v) => vals.push(v),
            _ => return Ok(None),
        }
    }
    let Some(first) = vals.first().copied() else {
        return Ok(None);
    };
    Ok(match &n.op {
        Op::Scalar(s) => {
            let on = if s.row().rule == Rule::Select { 1 } else { 0 };
            match s.row().rule {
                Rule::Select => Some(if first.as_bool() { vals[1] } else { vals[2] }),
                _ => Some(s.eval(r.new.dtype(x[on]), &vals)),
            }
        }
        Op::Cast => Some(first.cast(n.ty.dtype)),
        Op::Bitcast => Some(Scalar::from_bytes(n.ty.dtype, &first.to_bytes(r.new.dtype(x[0])))),
        Op::Reshape | Op::Permute(_) | Op::Expand | Op::Slice(_) => Some(first),
        Op::Pad { value, .. } if *value == first => Some(first),
        Op::Concat { .. } if vals.iter().all(|v| *v == first) => Some(first),
        _ => None,
    })
}

/// The node's value, if the values of its operands are known and both the value and the work are small
/// enough.
fn value(
    r: &Rebuild,
    n: &Node,
    known: &HashMap<NodeId, ConstData>,
    left: &mut Budget,
) -> Result<Option<ConstData>> {
    let Some(dims) = n.ty.shape.known() else {
        return Ok(None);
    };
    let x = r.operands(n)?;
    let sizes: Option<Vec<Dims>> = x.iter().map(|i| r.new.shape(*i).known()).collect();
    let Some(sizes) = sizes else { return Ok(None) };
    let of: Vec<&[usize]> = sizes.iter().map(|d| &d[..]).collect();
    let Some(work) = n.op.reference_work(&of, &dims).filter(|w| *w <= MAX_WORK.min(left.work)) else {
        return Ok(None);
    };
    if count(&dims).is_none_or(|c| c > MAX_RESULT || n.ty.dtype.bytes(c) > left.bytes) {
        return Ok(None);
    }
    if !x.iter().all(|i| known.contains_key(i) || matches!(r.new.node(*i).op, Op::Full(_))) {
        return Ok(None);
    }
    left.work -= work;
    let mut data = vec![];
    for (i, d) in x.iter().zip(&sizes) {
        match (known.get(i), &r.new.node(*i).op) {
            (Some(c), _) => data.push(c.clone()),
            (_, Op::Full(v)) => data.push(ConstData::splat(r.new.dtype(*i), d, *v)?),
            _ => return Ok(None),
        }
    }
    let refs: Vec<&ConstData> = data.iter().collect();
    Ok(eval_op(&n.op, &refs, &n.ty, &[]).ok())
}

/// Bytes of a node's operands as constants. A literal counts as one element.
fn operand_bytes(
    r: &Rebuild,
    n: &Node,
    known: &HashMap<NodeId, ConstData>,
    computed: &HashMap<NodeId, usize>,
) -> Result<usize> {
    let one = |i: &NodeId| match (computed.get(i), known.get(i)) {
        (Some(bytes), _) => *bytes,
        (None, Some(c)) => c.bytes().len(),
        (None, None) => r.new.dtype(*i).size(),
    };
    Ok(r.operands(n)?.iter().map(one).fold(0, usize::saturating_add))
}

fn count(d: &[usize]) -> Option<usize> {
    d.iter().try_fold(1usize, |a, b| a.checked_mul(*b))
}

/// Whether a view has more elements than its operand, so that folding it would take more memory.
fn growing(r: &Rebuild, n: &Node) -> Result<bool> {
    let numel = |s: &Shape| s.known().and_then(|d| count(&d));
    let before = r.operands(n)?.first().and_then(|i| numel(r.new.shape(*i))).unwrap_or(0);
    Ok(numel(&n.ty.shape).is_none_or(|after| after > before))
}

/// For each node, whether it is read by a node that depends only on constants.
fn read_by_constants(g: &Graph, live: &[bool]) -> Vec<bool> {
    let mut constant = vec![false; g.nodes().len()];
    let mut read = constant.clone();
    for id in g.ids().filter(|i| live[i.index()]) {
        let n = g.node(id);
        constant[id.index()] = match n.op {
            Op::Const(_) | Op::Full(_) => true,
            _ => !n.op.is_leaf() && n.inputs.iter().all(|i| constant[i.index()]),
        };
        if constant[id.index()] {
            n.inputs.iter().for_each(|i| read[i.index()] = true);
        }
    }
    read
}
