//! The graph: a list of typed nodes. User code, autodiff, the passes and every importer use this
//! representation.
//!
//! A graph is a pure function of its inputs and arguments. A state (KV cache, parameter, running statistic)
//! is an input whose new value is an output. [`Graph::states`] pairs them. If the caller donates the input,
//! the plan may store the new value in the old value's buffer.

mod build;

use crate::data::ConstData;
use crate::dtype::DType;
use crate::error::{Error, Result, Span, one_line};
use crate::ops::Op;
use crate::ops::element_wise::{Rule, ScalarOp};
use crate::shape::{Bindings, Dim, Shape, TensorType};
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;
use std::collections::{BTreeSet, HashMap};
use std::hash::{Hash, Hasher};
use std::sync::Arc;

/// Index of a node in its graph. Operands have smaller indices than their users.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub struct NodeId(pub u32);

impl NodeId {
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// Operands of a node, in order.
pub type Operands = SmallVec<[NodeId; 3]>;

/// One op, its operands, its type and its span.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Node {
    pub op: Op,
    pub inputs: Operands,
    pub ty: TensorType,
    pub span: Span,
}

/// A named run-time input.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct InputSpec {
    pub name: Arc<str>,
    pub node: NodeId,
}

/// A named output.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct OutputSpec {
    pub name: Arc<str>,
    pub node: NodeId,
}

/// A list of typed nodes in topological order, with named inputs and outputs.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Graph {
    nodes: Vec<Node>,
    inputs: Vec<InputSpec>,
    outputs: Vec<OutputSpec>,
    args: Vec<DType>,
    /// `(input, output)` pairs: the output is the next version of the state held by the input.
    states: Vec<(u32, u32)>,
    /// The span given to nodes added from now on.
    #[serde(skip)]
    pub span: Span,
}

/// Magic bytes of a serialised graph; the last byte is the format version.
const MAGIC: &[u8; 8] = b"HALCGRF1";

/// Maximum nesting depth of composites in a serialised graph. The built-in composites nest three deep.
const MAX_DEPTH: usize = 16;

impl Graph {
    pub fn new() -> Graph {
        Graph::default()
    }

    /// The nodes in topological order, indexed by [`NodeId`].
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    pub fn ids(&self) -> impl DoubleEndedIterator<Item = NodeId> + use<> {
        (0..self.nodes.len() as u32).map(NodeId)
    }

    pub fn node(&self, id: NodeId) -> &Node {
        &self.nodes[id.index()]
    }

    pub fn ty(&self, id: NodeId) -> &TensorType {
        &self.node(id).ty
    }

    pub fn shape(&self, id: NodeId) -> &Shape {
        &self.ty(id).shape
    }

    pub fn dtype(&self, id: NodeId) -> DType {
        self.ty(id).dtype
    }

    pub fn inputs(&self) -> &[InputSpec] {
        &self.inputs
    }

    pub fn outputs(&self) -> &[OutputSpec] {
        &self.outputs
    }

    /// Dtypes of the run-time scalar arguments.
    pub fn args(&self) -> &[DType] {
        &self.args
    }

    /// `(input, output)` indices of the states; see [`Graph::state`].
    pub fn states(&self) -> &[(u32, u32)] {
        &self.states
    }

    // Whole-graph operations.

    /// All symbols that occur in the types of the nodes.
    pub fn symbols(&self) -> BTreeSet<Arc<str>> {
        let mut s = BTreeSet::new();
        for n in &self.nodes {
            n.ty.shape.iter().for_each(|d| d.symbols(&mut s));
        }
        s
    }

    /// Returns the graph with every symbol replaced by its size, and checks every type rule again.
    pub fn bind(&self, b: &Bindings) -> Result<Graph> {
        let mut g = Graph {
            inputs: self.inputs.clone(),
            outputs: self.outputs.clone(),
            args: self.args.clone(),
            states: self.states.clone(),
            ..Graph::new()
        };
        g.nodes.reserve(self.nodes.len());
        for n in &self.nodes {
            g.span = n.span.clone();
            let want =
                TensorType { dtype: n.ty.dtype, shape: n.ty.shape.bind(b).map_err(|e| e.at(&n.span))? };
            g.push(n.op.bind(b)?, &n.inputs, Some(want))?;
        }
        Ok(g)
    }

    /// The sizes of the symbols with which the declared input shapes become `shapes`, which are in the order
    /// of the inputs. A symbol gets its size from a dimension that is this symbol alone. It is an error if a
    /// symbol of an input occurs only inside expressions, such as `2*s`.
    pub fn solve(&self, shapes: &[Shape]) -> Result<Bindings> {
        let mut b = Bindings::new();
        if shapes.len() != self.inputs.len() {
            return Err(Error::argument(
                "bind",
                format!("{} inputs are declared, {} given", self.inputs.len(), shapes.len()),
            ));
        }
        for (i, s) in self.inputs.iter().zip(shapes) {
            let want = self.shape(i.node);
            let bad = || Error::shape("input", format!("input \"{}\" is {s}, declared {want}", i.name));
            if want.rank() != s.rank() {
                return Err(bad());
            }
            for (w, d) in want.iter().zip(s.iter()) {
                let mut names = BTreeSet::new();
                w.symbols(&mut names);
                if names.len() == 1
                    && *w == Dim::sym(names.iter().next().map_or("", |s| s))
                    && let Some(n) = d.known()
                {
                    for name in names {
                        if *b.entry(name).or_insert(n) != n {
                            return Err(bad());
                        }
                    }
                }
            }
        }
        for (i, s) in self.inputs.iter().zip(shapes) {
            if self.shape(i.node).bind(&b)? != *s {
                return Err(Error::shape(
                    "input",
                    format!("input \"{}\" is {s}, declared {}", i.name, self.shape(i.node)),
                ));
            }
        }
        Ok(b)
    }

    /// Copies `roots` and the nodes of `other` that they depend on into this graph. Input `k` of `other`
    /// becomes `inputs[k]`. Run-time arguments keep their indices, so this graph must have declared them.
    /// Returns the new ids of the roots.
    pub fn inline(&mut self, other: &Graph, inputs: &[NodeId], roots: &[NodeId]) -> Result<Vec<NodeId>> {
        let mut map: HashMap<NodeId, NodeId> = HashMap::new();
        let live = other.live(roots);
        for (i, n) in other.nodes.iter().enumerate().filter(|(i, _)| live[*i]) {
            let id = match n.op {
                Op::Input(k) => {
                    *inputs.get(k as usize).ok_or_else(|| Error::internal("inline: missing input"))?
                }
                _ => {
                    let ins = n.inputs.iter().map(|x| map[x]).collect();
                    self.push_unchecked(Node {
                        inputs: ins,
                        span: if n.span.is_known() { n.span.clone() } else { self.span.clone() },
                        op: n.op.clone(),
                        ty: n.ty.clone(),
                    })
                }
            };
            map.insert(NodeId(i as u32), id);
        }
        Ok(roots.iter().map(|r| map[r]).collect())
    }

    /// For each node, whether it is one of `roots` or a root depends on it.
    pub fn live(&self, roots: &[NodeId]) -> Vec<bool> {
        let mut live = vec![false; self.nodes.len()];
        roots.iter().for_each(|r| live[r.index()] = true);
        for i in (0..self.nodes.len()).rev() {
            if live[i] {
                self.nodes[i].inputs.iter().for_each(|x| live[x.index()] = true);
            }
        }
        live
    }

    /// Structural hash over ops, types, edges, outputs, arguments and states. It ignores spans and names. For
    /// a constant, it covers the dtype, the shape and at most the first 64 bytes.
    pub fn structural_hash(&self) -> u64 {
        let mut h = std::collections::hash_map::DefaultHasher::new();
        self.hash(&mut h);
        h.finish()
    }

    // Serialisation: magic, header length, JSON header, then the constants' bytes.

    /// Serialises the graph, with the format version first.
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        let mut g = self.clone();
        let mut blobs = vec![];
        g.each_const(0, &mut |c| {
            c.blob = blobs.len() as u32;
            blobs.push(c.clone());
            Ok(())
        })?;
        let head =
            serde_json::to_vec(&g).map_err(|e| Error::internal(format!("graph does not serialise: {e}")))?;
        let mut out = MAGIC.to_vec();
        out.extend((head.len() as u64).to_le_bytes());
        out.extend(head);
        for b in blobs {
            out.extend(b.bytes());
        }
        Ok(out)
    }

    /// Reads a graph written by [`Graph::to_bytes`], and checks its structure and types.
    ///
    /// # Errors
    /// [`Error::Format`] for bytes that are not such a graph, and errors of the type rules.
    pub fn from_bytes(b: &[u8]) -> Result<Graph> {
        let bad = |what: &str| Error::Format { file: "graph".into(), what: what.into() };
        if b.get(..8) != Some(MAGIC) {
            return Err(bad("not a graph of this version (expected HALCGRF1)"));
        }
        let len = b
            .get(8..16)
            .and_then(|x| x.try_into().ok())
            .map(u64::from_le_bytes)
            .ok_or_else(|| bad("truncated"))?;
        let end = usize::try_from(len)
            .ok()
            .and_then(|l| l.checked_add(16))
            .ok_or_else(|| bad("header length overflows"))?;
        let head = b.get(16..end).ok_or_else(|| bad("the header is longer than the file"))?;
        let mut g: Graph = serde_json::from_slice(head).map_err(|e| bad(&format!("header: {e}")))?;
        g.well_formed(0).map_err(|w| bad(&w))?;
        let mut at = end;
        g.each_const(0, &mut |c| {
            let n = c
                .dims
                .iter()
                .try_fold(1usize, |a, d| a.checked_mul(*d))
                .ok_or_else(|| bad("a constant is too large"))?;
            let stop = at.checked_add(c.dtype.bytes(n)).ok_or_else(|| bad("a constant is too large"))?;
            let data = b.get(at..stop).ok_or_else(|| bad("a constant's data is missing"))?.to_vec();
            at = stop;
            c.attach(Arc::new(data))
        })?;
        if at != b.len() {
            return Err(bad("bytes at the end belong to no constant"));
        }
        // A type that contradicts its rule is an error in the file here, not an internal error.
        g.check().map_err(|e| match e {
            Error::Internal(what) => bad(&what),
            e => e,
        })?;
        Ok(g)
    }

    /// Visits every constant in node order. Constants in the body of a composite are visited at the
    /// composite's position.
    fn each_const(&mut self, depth: usize, f: &mut dyn FnMut(&mut ConstData) -> Result<()>) -> Result<()> {
        for n in &mut self.nodes {
            match &mut n.op {
                Op::Const(c) => f(c)?,
                Op::Composite(c) if depth < MAX_DEPTH && c.body.has_const(depth) => {
                    Arc::make_mut(c).body.each_const(depth + 1, f)?
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn has_const(&self, depth: usize) -> bool {
        self.nodes.iter().any(|n| match &n.op {
            Op::Const(_) => true,
            Op::Composite(c) => depth < MAX_DEPTH && c.body.has_const(depth + 1),
            _ => false,
        })
    }

    /// Checks the structure: operands precede their users, every input, argument, output and state index is
    /// in range, states pair equal types, and composites are not nested too deeply. The error names the
    /// violation.
    fn well_formed(&self, depth: usize) -> Result<(), String> {
        if depth > MAX_DEPTH {
            return Err(format!("composites are nested deeper than {MAX_DEPTH}"));
        }
        for (i, n) in self.nodes.iter().enumerate() {
            if n.inputs.iter().any(|x| x.index() >= i) {
                return Err(format!("operand of node {i} is not a node before it"));
            }
            match &n.op {
                Op::Input(k) => {
                    let spec = self.inputs.get(*k as usize).and_then(|s| self.nodes.get(s.node.index()));
                    if spec.is_none_or(|s| s.ty != n.ty) {
                        return Err(format!("node {i} is not a declared input"));
                    }
                }
                Op::Arg(k) if self.args.get(*k as usize) != Some(&n.ty.dtype) => {
                    return Err(format!("node {i} is not a declared argument"));
                }
                Op::Composite(c) => c.body.well_formed(depth + 1)?,
                _ => {}
            }
        }
        for (k, s) in self.inputs.iter().enumerate() {
            match self.nodes.get(s.node.index()).map(|n| &n.op) {
                Some(Op::Input(j)) if *j as usize == k => {}
                _ => return Err(format!("input {k} does not refer to its own input node")),
            }
        }
        if let Some(k) = self.outputs.iter().position(|o| o.node.index() >= self.nodes.len()) {
            return Err(format!("output {k} is not a node"));
        }
        let ty = |n: NodeId| &self.nodes[n.index()].ty;
        let paired = |(i, o): &(u32, u32)| match (self.inputs.get(*i as usize), self.outputs.get(*o as usize))
        {
            (Some(i), Some(o)) => ty(i.node) == ty(o.node),
            _ => false,
        };
        match self.states.iter().all(paired) {
            true => Ok(()),
            false => Err("a state is not a pair of an input and an output of one type".into()),
        }
    }

    /// Checks the graph's structure, and every node against its type rule.
    pub fn check(&self) -> Result<()> {
        self.well_formed(0).map_err(|w| Error::internal(format!("graph: {w}")))?;
        self.check_types()
    }

    fn check_types(&self) -> Result<()> {
        for n in &self.nodes {
            let tys: Vec<&TensorType> = n.inputs.iter().map(|i| self.ty(*i)).collect();
            if let Some(why) = n.ty.fault() {
                return Err(Error::shape(n.op.name(), why).at(&n.span));
            }
            let t = n.op.infer(&tys, Some(&n.ty)).map_err(|e| e.at(&n.span))?;
            if t != n.ty {
                return Err(Error::internal(format!(
                    "{} is typed {} but its rule gives {t} (at {})",
                    n.op.name(),
                    n.ty,
                    n.span
                )));
            }
            if let Op::Composite(c) = &n.op {
                c.body.check_types().map_err(|e| e.at(&n.span))?;
            }
        }
        Ok(())
    }
}

impl PartialEq for Graph {
    fn eq(&self, o: &Self) -> bool {
        self.nodes.len() == o.nodes.len()
            && self.outputs.iter().map(|x| x.node).eq(o.outputs.iter().map(|x| x.node))
            && (&self.args, &self.states) == (&o.args, &o.states)
            && self
                .nodes
                .iter()
                .zip(&o.nodes)
                .all(|(a, b)| (&a.op, &a.inputs, &a.ty) == (&b.op, &b.inputs, &b.ty))
    }
}
impl Eq for Graph {}
impl Hash for Graph {
    fn hash<H: Hasher>(&self, h: &mut H) {
        for n in &self.nodes {
            (&n.op, &n.inputs, &n.ty).hash(h);
        }
        self.outputs.iter().for_each(|o| o.node.hash(h));
        (&self.args, &self.states).hash(h);
    }
}

impl std::fmt::Display for Graph {
    /// One line per node: index, type, op, operands, span.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (i, n) in self.nodes.iter().enumerate() {
            write!(f, "%{i}: {} = {}", n.ty, n.op.name())?;
            if let Op::Input(k) = &n.op {
                write!(f, " \"{}\"", one_line(self.inputs.get(*k as usize).map_or("?", |i| &*i.name)))?;
            }
            let attributes = n.op.attributes();
            if !attributes.is_empty() {
                write!(f, " {attributes}")?;
            }
            for (k, x) in n.inputs.iter().enumerate() {
                write!(f, "{}%{}", if k == 0 { "(" } else { ", " }, x.0)?;
            }
            if !n.inputs.is_empty() {
                write!(f, ")")?;
            }
            if n.span.is_known() {
                write!(f, "  # {}", n.span)?;
            }
            writeln!(f)?;
        }
        for o in &self.outputs {
            writeln!(f, "output \"{}\" = %{}", one_line(&o.name), o.node.0)?;
        }
        Ok(())
    }
}

/// Whether the first operand of a scalar op is a condition.
pub fn has_condition(op: ScalarOp) -> bool {
    op.row().rule == Rule::Select
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mlp(batch: Dim) -> Graph {
        let mut g = Graph::new();
        let x = g.input("x", TensorType::new(DType::F32, [batch, 4.into()]));
        let w = g.constant(ConstData::from_slice(&[4, 3], &[0.5f32; 12]).unwrap());
        let y = g.matmul(x, w).unwrap();
        let y = g.softmax(y, 1).unwrap();
        g.output("y", y);
        g
    }

    #[test]
    fn symbolic_graphs_bind() {
        let g = mlp(Dim::sym("b"));
        let b = g.solve(&[[7usize, 4].into()]).unwrap();
        let h = g.bind(&b).unwrap();
        assert_eq!(h.shape(h.outputs()[0].node), &Shape::from([7usize, 3]));
        assert_eq!(h.structural_hash(), mlp(7.into()).structural_hash());
        assert!(g.solve(&[[7usize, 5].into()]).is_err());
        assert!(g.bind(&Bindings::new()).is_err());
    }

    #[test]
    fn serialised_graphs_come_back_and_damage_is_an_error() {
        let g = mlp(Dim::sym("b"));
        let b = g.to_bytes().unwrap();
        assert_eq!(Graph::from_bytes(&b).unwrap(), g);
        for n in [0, 7, 15, 40, b.len() - 1] {
            assert!(Graph::from_bytes(&b[..n]).is_err(), "{n}");
        }
        let mut c = b.clone();
        c[8..16].copy_from_slice(&u64::MAX.to_le_bytes());
        assert!(Graph::from_bytes(&c).is_err());
        let mut c = b.clone();
        c.push(0);
        assert!(Graph::from_bytes(&c).is_err());
    }

    #[test]
    fn constants_in_bodies_are_serialised_and_bodies_are_checked() {
        let mut g = Graph::new();
        let x = g.input("x", TensorType::new(DType::F32, [3usize]));
        let y = g
            .composite("table", Default::default(), &[x], |g, x| {
                let c = g.constant(ConstData::from_slice(&[3], &[1f32, 2.0, 4.0]).unwrap());
                g.mul(x[0], c)
            })
            .unwrap();
        g.output("y", y);
        let b = g.to_bytes().unwrap();
        assert_eq!(Graph::from_bytes(&b).unwrap(), g);
        // Corrupt the JSON header: operand, input, output and state indices out of range, in the graph and in
        // the composite's body.
        let len = u64::from_le_bytes(b[8..16].try_into().unwrap()) as usize;
        let head = std::str::from_utf8(&b[16..16 + len]).unwrap();
        let with = |head: &str| {
            let mut v = MAGIC.to_vec();
            v.extend((head.len() as u64).to_le_bytes());
            v.extend(head.as_bytes());
            v.extend(&b[16 + len..]);
            Graph::from_bytes(&v)
        };
        assert_eq!(with(head).unwrap(), g);
        for (from, to) in [
            ("\"inputs\":[0,1]", "\"inputs\":[0,9]"),
            ("\"inputs\":[0,1]", "\"inputs\":[0,2]"),
            ("\"inputs\":[0]", "\"inputs\":[1]"),
            ("\"Input\":0", "\"Input\":7"),
            ("\"node\":2", "\"node\":3"),
            ("\"node\":1", "\"node\":0"),
            ("\"states\":[]", "\"states\":[[0,4]]"),
            ("\"dims\":[3]", "\"dims\":[4]"),
            ("\"dims\":[3]", "\"dims\":[2305843009213693952,4]"),
            ("\"shape\":[3]", "\"shape\":[5]"),
            ("\"shape\":[3]", "\"shape\":[9223372036854775807]"),
        ] {
            assert!(head.contains(from), "{from} is not in {head}");
            for (at, _) in head.match_indices(from) {
                let changed = [&head[..at], to, &head[at + from.len()..]].concat();
                // An output may also name the input node, so that change is valid.
                assert!(with(&changed).is_err() || from == "\"node\":1", "{changed}");
            }
        }
    }

    #[test]
    fn shape_errors_name_the_op_the_shapes_and_the_place() {
        let mut g = Graph::new();
        let x = g.input("x", TensorType::new(DType::F32, [2usize, 3]));
        let y = g.input("y", TensorType::new(DType::F32, [4usize]));
        g.span = Span::new("model.rs:7");
        let e = g.add(x, y).unwrap_err().to_string();
        assert!(
            e.contains("add") && e.contains("[2, 3]") && e.contains("[4]") && e.contains("model.rs:7"),
            "{e}"
        );
        let e = g.matmul(x, y).unwrap_err().to_string();
        assert!(e.contains("matmul"), "{e}");
    }
}
