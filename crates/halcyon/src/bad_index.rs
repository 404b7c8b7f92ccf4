//! Finds the model input that holds an index that a kernel reported as out of range.

use halcyon_ir::error::Error;
use halcyon_ir::graph::NodeId;
use halcyon_ir::layout::View;
use halcyon_ir::ops::Op;
use halcyon_ir::shape::Shape;
use halcyon_ir::target::Operand;
use halcyon_ir::{ConstData, Graph, Scalar};

/// Adds to an [`Error::Index`] the input that holds the first bad index, if there is one; returns any other
/// error unchanged.
pub(crate) fn explain(e: Error, graph: &Graph, inputs: &[ConstData]) -> Error {
    let Error::Index { op, range, found, input: None, at } = e else { return e };
    // First look at the nodes of the reported span. If none of them has a bad index, look at all nodes.
    let here = |n: &NodeId| graph.node(*n).span == at;
    let input = graph.ids().filter(here).find_map(|n| bad(graph, n, inputs));
    let input = input.or_else(|| graph.ids().find_map(|n| bad(graph, n, inputs)));
    Error::Index { op, range, found, input, at }
}

/// Describes the first bad index of a node that reads its indices from an input.
fn bad(graph: &Graph, n: NodeId, inputs: &[ConstData]) -> Option<String> {
    let node = graph.node(n);
    // Symbolic sizes are solved from the inputs' shapes.
    let shapes: Vec<_> = inputs.iter().map(|t| Shape::from(&t.dims)).collect();
    let sizes = graph.solve(&shapes).unwrap_or_default();
    let operand = |x: &NodeId| {
        let dims = graph.shape(*x).bind(&sizes).ok()?.known()?;
        Some(Operand { dtype: graph.dtype(*x), view: View::dense(&dims) })
    };
    let operands: Vec<Operand> = node.inputs.iter().map(operand).collect::<Option<_>>()?;
    let range = node.op.bind(&sizes).ok()?.index_range(&operands)?;
    let mut at = *node.inputs.get(range.operand)?;
    // Skip casts and views.
    while matches!(graph.node(at).op, Op::Cast | Op::Reshape | Op::Permute(_) | Op::Expand) {
        at = *graph.node(at).inputs.first()?;
    }
    let Op::Input(k) = graph.node(at).op else { return None };
    let x = inputs.get(k as usize)?;
    let value = |s: Scalar| match s {
        Scalar::I(i) => i128::from(i),
        Scalar::U(u) => i128::from(u),
        Scalar::Bool(b) => i128::from(b),
        Scalar::F(_) => 0,
    };
    let valid = i128::from(range.low)..i128::from(range.end);
    let good = |v: i128| valid.contains(&v) || range.ignore.is_some_and(|i| v == i128::from(i));
    let (place, v) = x.scalars().map(value).enumerate().find(|(_, v)| !good(*v))?;
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

#[cfg(test)]
mod tests {
    use super::*;
    use halcyon_ir::{DType, TensorType};

    fn input_of(g: &Graph, inputs: &[ConstData]) -> Option<String> {
        g.ids().find_map(|n| bad(g, n, inputs))
    }

    /// Tests an op with many indices and an op with one position.
    #[test]
    fn the_input_with_the_bad_index_is_named() {
        let mut g = Graph::new();
        let x = g.input("x", TensorType::new(DType::F32, [5]));
        let i = g.input("i", TensorType::new(DType::I64, [2]));
        let y = g.gather(x, i, 0).unwrap();
        g.output("y", y);
        let data = ConstData::from_slice(&[5], &[0f32; 5]).unwrap();
        let at = |v: [i64; 2]| ConstData::from_slice(&[2], &v).unwrap();
        assert_eq!(input_of(&g, &[data.clone(), at([-5, 4])]), None);
        assert_eq!(input_of(&g, &[data.clone(), at([4, 5])]).unwrap(), "input 'i' is 5 at [1]");

        let mut g = Graph::new();
        let base = g.input("base", TensorType::new(DType::F32, [5]));
        let part = g.input("part", TensorType::new(DType::F32, [2]));
        let p = g.input("p", TensorType::new(DType::I32, [0usize; 0]));
        let y = g.update_slice(base, part, p, 0).unwrap();
        g.output("y", y);
        let part = ConstData::from_slice(&[2], &[0f32; 2]).unwrap();
        let at = |v: i32| ConstData::from_slice(&[], &[v]).unwrap();
        assert_eq!(input_of(&g, &[data.clone(), part.clone(), at(3)]), None);
        assert_eq!(input_of(&g, &[data, part, at(4)]).unwrap(), "input 'p' is 4 at []");
    }
}
