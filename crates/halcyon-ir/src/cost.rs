//! Cost of the nodes of a graph. Each op's rule is in `crate::ops`.

use crate::error::Result;
use crate::graph::{Graph, NodeId};
use crate::layout::View;
use crate::ops::{Cost, Op};
use crate::shape::TensorType;
use crate::target::Operand;

/// An operand as a dense tensor. If it is an expansion or a literal, it has stride 0 along the axes that
/// repeat its elements, because these are stored only once.
fn operand(g: &Graph, id: NodeId) -> Result<Operand> {
    let n = g.node(id);
    let dims = n.ty.shape.dims()?;
    let view = match n.op {
        Op::Expand => View::dense(&g.shape(n.inputs[0]).dims()?).expand(&dims),
        Op::Full(_) => View::dense(&[]).expand(&dims),
        _ => View::dense(&dims),
    };
    Ok(Operand { dtype: n.ty.dtype, view })
}

/// Bytes of a dense value. Its shape must not contain symbols.
pub fn type_bytes(t: &TensorType) -> Result<u64> {
    Ok(t.dtype.bytes(View::dense(&t.shape.dims()?).numel()) as u64)
}

/// `(flops, bytes)` of a single node: its operations (a multiply-add counts as two) and the least number of
/// bytes it moves. The graph must not contain symbols.
pub fn of_node(g: &Graph, id: NodeId) -> Result<(u64, u64)> {
    let n = g.node(id);
    let ins = n.inputs.iter().map(|i| operand(g, *i)).collect::<Result<Vec<_>>>()?;
    let out = Operand { dtype: n.ty.dtype, view: View::dense(&n.ty.shape.dims()?) };
    let Cost { flops, bytes } = n.op.cost(&ins, &out);
    Ok((flops, bytes))
}
