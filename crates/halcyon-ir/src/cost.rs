//! Cost of the structured ops: floating-point (or integer) operations, and the minimum number of bytes moved.

use crate::error::Result;
use crate::graph::{Graph, NodeId};
use crate::layout::View;
use crate::op::Op;
use crate::passes::blocked::BLOCKED_CONV;
use crate::passes::bytes::BYTE_MATMUL;
use crate::shape::TensorType;
use crate::target::Operand;

fn distinct(v: &View) -> usize {
    (0..v.rank()).filter(|&k| v.strides[k] != 0).map(|k| v.shape[k]).product()
}

/// Number of (query, key) pairs in causal attention, where query `i` attends to keys up to `i + keys -
/// queries`.
fn visible(queries: usize, keys: usize) -> u64 {
    let (q, k) = (queries as u64, keys as u64);
    // With more queries than keys, the first queries attend to no key. The last query attends to all keys.
    let (rows, first) = if k >= q { (q, k - q + 1) } else { (k, 1) };
    let twice = u128::from(rows) * (u128::from(first) + u128::from(k));
    u64::try_from(twice / 2).unwrap_or(u64::MAX)
}

/// `(flops, bytes)` of one execution. A multiply-add counts as two.
pub fn of(op: &Op, inputs: &[Operand], output: &Operand) -> (u64, u64) {
    // Counts saturate, because operation counts can far exceed element counts.
    let n = output.view.numel() as u64;
    let count = |d: &[usize]| d.iter().fold(1u64, |a, n| a.saturating_mul(*n as u64));
    let size = |k: usize| inputs.get(k).map_or(0, |o| o.view.numel() as u64);
    let flops = match op {
        Op::Matmul => {
            let k = inputs.first().and_then(|a| a.view.shape.last()).map_or(0, |k| *k as u64);
            n.saturating_mul(k).saturating_mul(2)
        }
        Op::Conv(_) => {
            let k = inputs.get(1).map_or(0, |w| count(w.view.shape.get(1..).unwrap_or(&[])));
            n.saturating_mul(k).saturating_mul(2)
        }
        Op::Pool(p) => n.saturating_mul(count(&p.kernel)),
        Op::PoolGrad(p) => size(1).saturating_mul(count(&p.kernel)),
        Op::ArgReduce { .. } | Op::Scan { .. } => size(0),
        Op::ArgSort { axis, .. } => {
            let len = inputs.first().map_or(1, |x| x.view.shape[*axis].max(2)) as f64;
            (n as f64 * len.log2()) as u64
        }
        Op::Composite(c) => match &*c.name {
            BYTE_MATMUL => {
                let k = inputs.first().and_then(|a| a.view.shape.last()).map_or(0, |k| *k as u64);
                n.saturating_mul(k).saturating_mul(2)
            }
            BLOCKED_CONV => {
                let k = inputs.get(1).map_or(0, |w| count(w.view.shape.get(1..).unwrap_or(&[])));
                n.saturating_mul(k).saturating_mul(2)
            }
            // Two products of `[sq, sk]` by `d`, plus the softmax.
            "attention" if inputs.len() >= 2 => {
                let (q, k) = (&inputs[0].view.shape, &inputs[1].view.shape);
                let pairs = if c.flag("causal") { visible(q[2], k[2]) } else { count(&[q[2], k[2]]) };
                let scores = count(&[q[0], q[1]]).saturating_mul(pairs);
                scores.saturating_mul(4 * q[3] as u64 + 12)
            }
            _ => 8 * n,
        },
        _ => 0,
    };
    let read: u64 =
        inputs.iter().map(|o| o.dtype.bytes(distinct(&o.view)) as u64).fold(0, u64::saturating_add);
    let moved = match op {
        // Only the rows that are read or replaced count.
        Op::Gather { .. } | Op::GatherElements { .. } => {
            2 * output.dtype.bytes(n as usize) as u64
                + inputs.get(1).map_or(0, |i| i.dtype.bytes(i.view.numel()) as u64)
        }
        Op::UpdateSlice { .. } => 2 * inputs.get(1).map_or(0, |u| u.dtype.bytes(u.view.numel()) as u64),
        _ => read + output.dtype.bytes(n as usize) as u64,
    };
    (flops, moved)
}

/// An operand with the strides its reader sees. Elements that a broadcast repeats are stored only once.
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

/// FLOPs of a single node (a multiply-add counts as two) and the minimum number of bytes it moves. The graph
/// must not contain symbols.
pub fn of_node(g: &Graph, id: NodeId) -> Result<(u64, u64)> {
    let n = g.node(id);
    let ins = n.inputs.iter().map(|i| operand(g, *i)).collect::<Result<Vec<_>>>()?;
    let out = Operand { dtype: n.ty.dtype, view: View::dense(&n.ty.shape.dims()?) };
    let (flops, bytes) = of(&n.op, &ins, &out);
    let flops = match n.op {
        Op::Scalar(s) => (out.view.numel() as u64).saturating_mul(s.row().flops.into()),
        Op::Reduce { .. } => ins.first().map_or(0, |x| x.view.numel() as u64),
        _ => flops,
    };
    Ok((flops, bytes))
}

#[cfg(test)]
mod tests {
    use super::visible;

    #[test]
    fn causal_attention_counts_the_pairs_that_are_seen() {
        for (q, k) in [(4, 4), (1, 7), (3, 8), (8, 3), (5, 0), (0, 5)] {
            let seen = |i: usize| (i + k + 1).saturating_sub(q).min(k) as u64;
            assert_eq!(visible(q, k), (0..q).map(seen).sum::<u64>(), "{q} {k}");
        }
        assert_eq!(visible(1 << 40, 1 << 40), u64::MAX);
    }
}
