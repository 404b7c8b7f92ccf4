//! Finds the model input that holds an index that a kernel reported as out of range.

use halcyon_ir::error::Error;
use halcyon_ir::graph::NodeId;
use halcyon_ir::ops::Op;
use halcyon_ir::{ConstData, Graph, Scalar};

/// Adds to an [`Error::Index`] the input that holds the first bad index, if there is one; returns any other
/// error unchanged.
pub(crate) fn explain(e: Error, graph: &Graph, inputs: &[ConstData]) -> Error {
    let Error::Index { op, range, found, input: None, at } = e else { return e };
    // First look at the nodes of the reported span; if there are none in this graph, at all nodes.
    let here = |n: &NodeId| graph.node(*n).span == at;
    let input = graph.ids().filter(here).find_map(|n| bad(graph, n, inputs));
    let input = input.or_else(|| graph.ids().find_map(|n| bad(graph, n, inputs)));
    Error::Index { op, range, found, input, at }
}

/// Describes the first bad index of a node that reads its indices from an input.
fn bad(graph: &Graph, n: NodeId, inputs: &[ConstData]) -> Option<String> {
    let node = graph.node(n);
    let (Op::Gather { axis }
    | Op::GatherElements { axis }
    | Op::ScatterElements { axis, .. }
    | Op::ScatterRows { axis, .. }) = &node.op
    else {
        return None;
    };
    let (base, mut at) = (*node.inputs.first()?, *node.inputs.get(1)?);
    // Skip ops that keep every value.
    while matches!(graph.node(at).op, Op::Cast | Op::Reshape | Op::Permute(_) | Op::Expand) {
        at = *graph.node(at).inputs.first()?;
    }
    let Op::Input(k) = graph.node(at).op else { return None };
    let x = inputs.get(k as usize)?;
    let size = match graph.shape(base).get(*axis)?.known() {
        Some(n) => n,
        // Symbolic sizes are solved from the inputs' shapes.
        None => {
            let shapes: Vec<_> = inputs.iter().map(|t| halcyon_ir::shape::Shape::from(&t.dims)).collect();
            graph.shape(base).get(*axis)?.bind(&graph.solve(&shapes).ok()?).ok()?.known()?
        }
    } as i128;
    let value = |s: Scalar| match s {
        Scalar::I(i) => i128::from(i),
        Scalar::U(u) => i128::from(u),
        Scalar::Bool(b) => i128::from(b),
        Scalar::F(_) => 0,
    };
    let (place, v) = x.scalars().map(value).enumerate().find(|(_, v)| !(-size..size).contains(v))?;
    let name = &graph.inputs().get(k as usize)?.name;
    Some(format!("input '{name}' is {v} at {:?}", coordinates(place, &x.dims)))
}

fn coordinates(mut place: usize, dims: &[usize]) -> Vec<usize> {
    let mut out = vec![0; dims.len()];
    for (c, d) in out.iter_mut().zip(dims).rev() {
        *c = place % d;
        place /= d;
    }
    out
}
