//! Maps each step of a plan to the part of the graph that it computes.

use super::Values;
use crate::dtype::Scalar;
use crate::error::{Error, Result};
use crate::graph::{Graph, Node, NodeId};
use crate::ops::Op;
use crate::plan::{BufId, Plan};
use std::collections::BTreeMap;
use std::ops::Range;

/// The optimised graph of a plan, and the values in the buffers of its steps.
#[derive(Clone, Debug)]
pub struct Trace {
    /// The graph after the passes, which the plan's steps compute.
    pub graph: Graph,
    /// For each buffer of each step: the node whose value the buffer holds, if it holds the whole value,
    /// densely. `None` for temporaries.
    pub(super) values: Vec<Values>,
}

/// Steps that together compute one value of the graph from stored values; usually a single step. If a single
/// step computes several values, the piece has all of them.
#[derive(Clone, Debug)]
pub struct Piece {
    pub steps: Range<usize>,
    /// The computation of these steps as a graph: its inputs are stored values, constants are part of it, and
    /// its outputs are the values that the steps compute.
    pub graph: Graph,
    /// Where each input is stored before the first step, in the order of the graph's inputs: (step, position
    /// among the step's buffers).
    pub inputs: Vec<(usize, usize)>,
    /// Where each value is stored after the last step, in the order of the graph's outputs: (step, position
    /// among the step's buffers).
    pub outputs: Vec<(usize, usize)>,
}

impl Trace {
    /// Divides the plan's steps into pieces, in order. Every step belongs to exactly one piece.
    ///
    /// # Errors
    /// [`crate::Error::Internal`] if the plan does not belong to this trace.
    pub fn pieces(&self, plan: &Plan) -> Result<Vec<Piece>> {
        if self.values.len() != plan.steps.len() {
            return Err(Error::internal(format!(
                "a trace of {} steps for a plan of {}",
                self.values.len(),
                plan.steps.len()
            )));
        }
        let written = |t: usize| -> Vec<(NodeId, BufId)> {
            let s = &plan.steps[t];
            let first = s.reads().len();
            let one = |k: usize| Some(((*self.values.get(t)?.get(k)?)?, s.buffers[k]));
            (first..s.buffers.len()).filter_map(one).collect()
        };
        let mut pieces = vec![];
        let mut start = 0;
        for t in 0..plan.steps.len() {
            // A step that writes only temporaries belongs to the piece of the next step that writes a value.
            // Steps that each write a part of the same buffer belong to one piece.
            let mine = written(t);
            if mine.is_empty() {
                continue;
            }
            let next = (t + 1..plan.steps.len()).map(written).find(|w| !w.is_empty());
            if next.as_ref() == Some(&mine) {
                continue;
            }
            pieces.push(self.piece(plan, start..t + 1, &mine));
            start = t + 1;
        }
        Ok(pieces)
    }

    /// The piece of `steps`, which compute the values `roots` in these buffers.
    fn piece(&self, plan: &Plan, steps: Range<usize>, roots: &[(NodeId, BufId)]) -> Piece {
        let mut stored: BTreeMap<NodeId, (usize, usize)> = BTreeMap::new();
        let mut outputs = vec![(steps.start, 0); roots.len()];
        for t in steps.clone() {
            let s = &plan.steps[t];
            let read = s.reads().len();
            for (k, (b, v)) in s.buffers.iter().zip(&self.values[t]).enumerate() {
                if let Some(n) = v {
                    match roots.iter().position(|r| *r == (*n, *b)) {
                        Some(o) => outputs[o] = (t, k),
                        None if k < read => {
                            stored.entry(*n).or_insert((t, k));
                        }
                        None => {}
                    }
                }
            }
        }
        let g = &self.graph;
        // Constants and literals are part of the graph of the piece, not inputs.
        stored.retain(|n, _| !g.node(*n).op.is_leaf() || matches!(g.node(*n).op, Op::Input(_)));
        // Tensors without elements are neither computed nor read by any step.
        let empty = |n: NodeId| g.shape(n).numel().is(0);
        let ends = |n: NodeId| stored.contains_key(&n) || empty(n);
        let last = roots.iter().map(|r| r.0.index()).max().unwrap_or(0);
        let mut live = vec![false; last + 1];
        roots.iter().for_each(|r| live[r.0.index()] = true);
        for i in (0..live.len()).rev() {
            if live[i] && !ends(NodeId(i as u32)) {
                g.nodes()[i].inputs.iter().for_each(|x| live[x.index()] = true);
            }
        }
        let mut part = Graph::new();
        let mut inputs = vec![];
        let mut map: BTreeMap<NodeId, NodeId> = BTreeMap::new();
        for id in g.ids().take(live.len()).filter(|n| live[n.index()]) {
            let node = g.node(id);
            part.span = node.span.clone();
            let new = match stored.get(&id) {
                Some(place) => {
                    inputs.push(*place);
                    let name = match node.op {
                        Op::Input(k) => g.inputs()[k as usize].name.to_string(),
                        _ => format!("{} %{}", node.op.name(), id.0),
                    };
                    part.input(&name, node.ty.clone())
                }
                None if empty(id) => {
                    part.full(node.ty.dtype, node.ty.shape.clone(), Scalar::I(0).cast(node.ty.dtype))
                }
                // No step of the piece reads this input, so the result must not depend on it (attention
                // without keys). A literal takes the input's place. If the result depends on the input after
                // all, the literal changes the result.
                None if matches!(node.op, Op::Input(_)) => {
                    let poison = if node.ty.dtype.is_float() { Scalar::F(f64::NAN) } else { Scalar::I(0x55) };
                    part.full(node.ty.dtype, node.ty.shape.clone(), poison.cast(node.ty.dtype))
                }
                None => part.push_unchecked(Node {
                    op: node.op.clone(),
                    inputs: node.inputs.iter().map(|x| map[x]).collect(),
                    ty: node.ty.clone(),
                    span: node.span.clone(),
                }),
            };
            map.insert(id, new);
        }
        for (root, _) in roots {
            part.output(&format!("{} %{}", g.node(*root).op.name(), root.0), map[root]);
            part.span = g.node(*root).span.clone();
        }
        Piece { steps, graph: part, inputs, outputs }
    }
}
