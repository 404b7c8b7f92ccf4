//! Copies a graph node by node while changing it.

use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::graph::{Graph, Node, NodeId, Operands};
use crate::ops::Op;
use crate::shape::{Shape, TensorType};

/// A graph under reconstruction. The new graph starts with one node for each input and then one node for each
/// argument, in order. [`Rebuild::finish`] adds outputs and states.
#[derive(Debug)]
pub struct Rebuild<'a> {
    old: &'a Graph,
    pub new: Graph,
    map: Vec<NodeId>,
    inputs: Vec<NodeId>,
    args: Vec<NodeId>,
}

/// The map entry of nodes that were not copied.
pub const DROPPED: NodeId = NodeId(u32::MAX);

fn missing() -> Error {
    Error::internal("a node refers to an input or argument that the graph does not have")
}

impl<'a> Rebuild<'a> {
    pub fn new(old: &'a Graph) -> Rebuild<'a> {
        let types = old.inputs().iter().map(|i| old.ty(i.node).clone()).collect();
        Rebuild::retyped(old, types, old.args().to_vec())
    }

    /// Gives the inputs the types `types` and the arguments the dtypes `arg_types`.
    pub fn retyped(old: &'a Graph, types: Vec<TensorType>, arg_types: Vec<DType>) -> Rebuild<'a> {
        let mut new = Graph::new();
        let mut inputs = vec![];
        for (i, ty) in old.inputs().iter().zip(types) {
            new.span = old.node(i.node).span.clone();
            inputs.push(new.input(&i.name, ty));
        }
        // An argument takes the span of its first node.
        let mut spans = vec![None; old.args().len()];
        for n in old.nodes() {
            if let Op::Arg(k) = n.op
                && let Some(s) = spans.get_mut(k as usize)
            {
                s.get_or_insert_with(|| n.span.clone());
            }
        }
        let mut args = vec![];
        for (d, s) in arg_types.into_iter().zip(spans) {
            new.span = s.unwrap_or_default();
            args.push(new.arg(d));
        }
        Rebuild { old, new, map: vec![DROPPED; old.nodes().len()], inputs, args }
    }

    /// For each node, whether an output depends on it.
    pub fn live(old: &Graph) -> Vec<bool> {
        old.live(&old.outputs().iter().map(|o| o.node).collect::<Vec<_>>())
    }

    /// The new node of node `old`. It is an error if `old` was not copied.
    pub fn get(&self, old: NodeId) -> Result<NodeId> {
        match self.map.get(old.index()) {
            Some(n) if *n != DROPPED => Ok(*n),
            _ => Err(Error::internal("a pass lost a node that is still used")),
        }
    }

    /// The shape of node `old` in the old graph.
    pub fn old_shape(&self, old: NodeId) -> &'a Shape {
        self.old.shape(old)
    }

    pub fn operands(&self, node: &Node) -> Result<Operands> {
        node.inputs.iter().map(|i| self.get(*i)).collect()
    }

    /// The new node of input `k`.
    pub fn input(&self, k: u32) -> Result<NodeId> {
        self.inputs.get(k as usize).copied().ok_or_else(missing)
    }

    /// The new node of argument `k`.
    pub fn arg(&self, k: u32) -> Result<NodeId> {
        self.args.get(k as usize).copied().ok_or_else(missing)
    }

    /// Records that node `old` became `new`.
    pub fn set(&mut self, old: NodeId, new: NodeId) {
        self.map[old.index()] = new;
    }

    /// Copies node `old` and records its new node. The operands must have been copied. Sets the span of the
    /// new graph to the node's span.
    pub fn copy(&mut self, old: NodeId) -> Result<NodeId> {
        let n = self.old.node(old);
        self.new.span = n.span.clone();
        let id = match n.op {
            Op::Input(k) => self.input(k)?,
            Op::Arg(k) => self.arg(k)?,
            _ => {
                let node = Node { inputs: self.operands(n)?, ..n.clone() };
                self.new.push_unchecked(node)
            }
        };
        self.set(old, id);
        Ok(id)
    }

    /// Returns the new graph, and a list with the new node of every old node ([`DROPPED`] if it has none).
    pub fn finish(mut self) -> Result<(Graph, Vec<NodeId>)> {
        for o in self.old.outputs() {
            let n = self.get(o.node)?;
            self.new.output(&o.name, n);
        }
        for &(i, o) in self.old.states() {
            self.new.state(i, o)?;
        }
        self.new.span = self.old.span.clone();
        for (i, id) in self.old.inputs().iter().zip(&self.inputs) {
            self.map[i.node.index()] = *id;
        }
        Ok((self.new, self.map))
    }
}

/// Removes the nodes that no output depends on. Inputs and arguments stay.
pub fn prune(g: &Graph) -> Result<Graph> {
    let live = Rebuild::live(g);
    let mut r = Rebuild::new(g);
    for id in g.ids().filter(|i| live[i.index()]) {
        r.copy(id)?;
    }
    r.finish().map(|(g, _)| g)
}
