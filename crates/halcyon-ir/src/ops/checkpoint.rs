//! Activation checkpointing (Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016). The
//! intermediate values of a checkpointed part of a graph are not kept for the gradient; the gradient computes
//! them again.

use super::composite::{CompositeGradient, CompositeKind, CompositeRow, some_per_element};
use crate::composite::Attrs;
use crate::error::{Error, Result};
use crate::graph::{Graph, NodeId};
use crate::ops::Op;
use crate::passes::rebuild::Rebuild;
use crate::shape::TensorType;
use std::collections::HashMap;
use std::ops::Range;

const NAME: &str = "checkpoint";

pub(super) static CHECKPOINT: CompositeRow = CompositeRow {
    name: NAME,
    has_builder: true,
    has_kernels: false,
    packs: false,
    summed: None,
    half: None,
    template: None,
    flops: some_per_element,
    gradient: CompositeGradient::Body,
};

impl Graph {
    /// The value that `body` computes from `x`. The body's intermediate values are not kept: the gradient
    /// computes the body again from `x` and gets the same values. The second computation runs just before the
    /// gradient needs it, after the gradients of all nodes that read the result.
    ///
    /// # Errors
    /// Errors of `body`.
    pub fn checkpoint(
        &mut self,
        x: &[NodeId],
        body: impl FnOnce(&mut Graph, &[NodeId]) -> Result<NodeId>,
    ) -> Result<NodeId> {
        self.composite(CompositeKind::Checkpoint, Attrs::new(), x, body)
    }

    /// Returns a graph in which each of these ranges of nodes is checkpointed. The ranges must be in order
    /// and must not overlap. A node of a range becomes a checkpoint composite ([`Graph::checkpoint`]) if a
    /// node outside the range reads it or if it is an output. The other nodes of the range exist only in the
    /// bodies of these composites. Also returns the new node of each old node, or
    /// [`DROPPED`](crate::passes::rebuild::DROPPED) for a node that was removed.
    ///
    /// Leaves in a range are not part of the checkpoint. The ranges take effect when
    /// [`crate::grad::gradients`] differentiates the graph.
    ///
    /// # Errors
    /// `Error::Argument` if the ranges are not in order, overlap or exceed the graph.
    pub fn checkpoint_ranges(&self, ranges: &[Range<usize>]) -> Result<(Graph, Vec<NodeId>)> {
        let n = self.nodes().len();
        let mut range_of: Vec<Option<usize>> = vec![None; n];
        let mut end = 0;
        for (k, r) in ranges.iter().enumerate() {
            if r.start < end || r.end < r.start || r.end > n {
                let what = format!("the range {r:?} of {n} nodes overlaps another one or exceeds the graph");
                return Err(Error::argument(NAME, what));
            }
            end = r.end;
            r.clone().filter(|i| !self.nodes()[*i].op.is_leaf()).for_each(|i| range_of[i] = Some(k));
        }
        let mut read_outside = vec![false; n];
        for (i, node) in self.nodes().iter().enumerate() {
            for x in &node.inputs {
                read_outside[x.index()] |= range_of[x.index()] != range_of[i];
            }
        }
        self.outputs().iter().for_each(|o| read_outside[o.node.index()] = true);
        let live = Rebuild::live(self);
        let mut r = Rebuild::new(self);
        for id in self.ids() {
            let range = range_of[id.index()];
            match range {
                Some(_) if !read_outside[id.index()] || !live[id.index()] => {}
                Some(_) => {
                    r.new.span = self.node(id).span.clone();
                    let (body, reads) = self.part(id, &|x| range_of[x.index()] == range)?;
                    let operands: Vec<NodeId> = reads.iter().map(|x| r.get(*x)).collect::<Result<_>>()?;
                    let root = body.outputs()[0].node;
                    let y = r.new.checkpoint(&operands, |g, x| {
                        let made = g.inline(&body, x, &[root])?.pop();
                        made.ok_or_else(|| Error::internal("a checkpoint without a result"))
                    })?;
                    r.set(id, y);
                }
                None if live[id.index()] => {
                    r.copy(id)?;
                }
                None => {}
            }
        }
        r.finish()
    }

    /// The graph that computes `root` with those of its predecessors for which `inside` is true. Other nodes
    /// that these nodes read become inputs of the graph, in the order of the returned list. Literals and
    /// iotas are copied instead.
    fn part(&self, root: NodeId, inside: &dyn Fn(NodeId) -> bool) -> Result<(Graph, Vec<NodeId>)> {
        let literal = |x: NodeId| matches!(self.node(x).op, Op::Full(_) | Op::Iota { .. });
        let mut need = vec![false; self.nodes().len()];
        need[root.index()] = true;
        for i in (0..=root.index()).rev().filter(|i| inside(NodeId(*i as u32))) {
            if need[i] {
                self.nodes()[i].inputs.iter().for_each(|x| need[x.index()] = true);
            }
        }
        let (mut body, mut reads) = (Graph::new(), vec![]);
        let mut map: HashMap<NodeId, NodeId> = HashMap::new();
        for id in self.ids().filter(|i| need[i.index()]) {
            let node = self.node(id);
            body.span = node.span.clone();
            let new = if inside(id) || literal(id) {
                let inputs = node.inputs.iter().map(|x| map[x]).collect();
                body.push_unchecked(crate::graph::Node { inputs, ..node.clone() })
            } else {
                reads.push(id);
                let ty: TensorType = node.ty.clone();
                body.input(&format!("x{}", reads.len() - 1), ty)
            };
            map.insert(id, new);
        }
        body.output("y", map[&root]);
        Ok((body, reads))
    }

    /// For each boundary between two consecutive nodes: the total size in bytes of the values that are
    /// computed before the boundary and read after it.
    fn crossing(&self) -> Vec<u64> {
        let n = self.nodes().len();
        let mut last: Vec<usize> = (0..n).collect();
        for i in (0..n).rev() {
            // A read of a view counts as a read of the viewed value.
            let at = if self.nodes()[i].op.is_view() { last[i] } else { i };
            for x in &self.nodes()[i].inputs {
                last[x.index()] = last[x.index()].max(at);
            }
        }
        let mut change = vec![0i128; n + 2];
        for (i, end) in last.iter().enumerate() {
            change[i + 1] += i128::from(self.stored_bytes(i));
            change[end + 1] -= i128::from(self.stored_bytes(i));
        }
        let mut now = 0i128;
        change
            .iter()
            .map(|c| {
                now += c;
                now.max(0) as u64
            })
            .collect()
    }

    /// The bytes of a node's value; 0 for leaves and views, which need no memory.
    fn stored_bytes(&self, i: usize) -> u64 {
        let n = &self.nodes()[i];
        if n.op.is_leaf() || n.op.is_view() {
            return 0;
        }
        let elements = n.ty.shape.numel().known().unwrap_or(0);
        n.ty.dtype.bytes(elements) as u64
    }

    /// Divides the nodes into `parts` ranges whose values have about the same size in bytes. Each boundary is
    /// near its place in an even division, where the values that cross the boundary are small. The last range
    /// is left out: its gradient is computed first, so computing it again would save no memory. If two
    /// boundaries coincide, there are fewer ranges than requested.
    pub fn even_ranges(&self, parts: usize) -> Vec<Range<usize>> {
        let n = self.nodes().len();
        let sizes: Vec<u64> = (0..n).map(|i| self.stored_bytes(i)).collect();
        let total: u64 = sizes.iter().fold(0, |a, b| a.saturating_add(*b));
        let mut before = vec![0u64; n + 1];
        for i in 0..n {
            before[i + 1] = before[i].saturating_add(sizes[i]);
        }
        let crossing = self.crossing();
        let place = |bytes: u64| before.partition_point(|b| *b < bytes).min(n);
        let mut cuts = vec![0usize];
        for k in 1..parts as u64 {
            // The search covers half of a part before and half of a part after the even boundary.
            let half = total / (2 * parts as u64);
            let even = (u128::from(total) * u128::from(k) / parts as u128) as u64;
            let (low, high) = (place(even.saturating_sub(half)).max(1), place(even.saturating_add(half)));
            let best = (low..=high.max(low))
                .filter(|at| *at < n)
                .min_by_key(|at| (crossing[*at], before[*at].abs_diff(even)));
            cuts.extend(best.filter(|at| cuts.last().is_some_and(|last| at > last)));
        }
        cuts.windows(2).map(|w| w[0]..w[1]).collect()
    }
}

#[cfg(test)]
mod tests {
    use crate::grad::gradients;
    use crate::graph::{Graph, NodeId};
    use crate::reference;
    use crate::{ConstData, DType, TensorType};

    /// A chain of `layers` products, each followed by tanh, and a loss. Returns the graph, the parameters and
    /// the loss.
    fn chain(layers: usize) -> (Graph, Vec<NodeId>, NodeId) {
        let mut g = Graph::new();
        let mut x = g.input("x", TensorType::new(DType::F64, [2, 3]));
        let mut params = vec![];
        for k in 0..layers {
            let w = g.input(&format!("w{k}"), TensorType::new(DType::F64, [3, 3]));
            params.push(w);
            let p = g.matmul(x, w).unwrap();
            let t = g.tanh(p).unwrap();
            x = g.add(t, x).unwrap();
        }
        let loss = g.sum(x, &[0, 1], false).unwrap();
        (g, params, loss)
    }

    fn values(g: &Graph) -> Vec<ConstData> {
        let of = |(k, i): (usize, &crate::graph::InputSpec)| {
            let dims = g.shape(i.node).dims().unwrap();
            let n: usize = dims.iter().product();
            let v: Vec<f64> = (0..n).map(|j| ((j * 7 + k * 3) % 11) as f64 / 11.0 - 0.4).collect();
            ConstData::from_slice(&dims, &v).unwrap()
        };
        g.inputs().iter().enumerate().map(of).collect()
    }

    #[test]
    fn ranges_change_no_bit_of_the_gradients() {
        let (mut plain, params, loss) = chain(4);
        plain.output("loss", loss);
        let before = plain.nodes().len();
        let ranges = plain.even_ranges(4);
        assert!(ranges.len() >= 2, "{ranges:?}");
        let (mut g, map) = plain.checkpoint_ranges(&ranges).unwrap();
        g.check().unwrap();
        assert!(g.nodes().len() < before);
        let of = |g: &mut Graph, params: &[NodeId], loss: NodeId| {
            let grads = gradients(g, loss, params, None).unwrap();
            for d in grads {
                g.output("d", d.unwrap());
            }
            g.check().unwrap();
            reference::eval(g, &values(g), &[]).unwrap()
        };
        let want = of(&mut plain, &params, loss);
        let own: Vec<NodeId> = params.iter().map(|p| map[p.index()]).collect();
        let got = of(&mut g, &own, map[loss.index()]);
        for (a, b) in want.iter().zip(&got) {
            assert_eq!(a.bytes(), b.bytes());
        }
    }

    #[test]
    fn ranges_that_overlap_are_errors() {
        let (g, _, _) = chain(2);
        assert!(g.checkpoint_ranges(&[0..4, 3..6]).is_err());
        assert!(g.checkpoint_ranges(&[0..4, 900..1000]).is_err());
        assert_eq!(g.even_ranges(1), []);
    }
}
