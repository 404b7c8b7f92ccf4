//! The graph: a list of typed nodes, and the methods that build it. User code, autodiff, the passes and every
//! importer use this representation. `graph/file.rs` turns graphs into bytes and checks them.
//!
//! A graph is a pure function of its inputs and arguments. A state (KV cache, parameter, running statistic)
//! is an input whose new value is an output. [`Graph::states`] pairs them. If the caller donates the input,
//! the plan may store the new value in the old value's buffer.

mod file;

use crate::custom::{Custom, CustomOp};
use crate::data::ConstData;
use crate::dtype::{DType, Scalar};
use crate::error::{Error, Result, Span, one_line};
use crate::ops::element_wise::{Rule, ScalarOp};
use crate::ops::{Axes, Conv, Op, Pool, ReduceKind, ScatterKind, SliceAxis};
use crate::shape::{Bindings, Dim, Shape, TensorType};
use serde::{Deserialize, Serialize};
use smallvec::{SmallVec, smallvec};
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

    /// The sizes of the symbols for which the declared input shapes equal `shapes`. `shapes` are in the order
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
}

/// Builds graphs: one method per op. The method checks the operands' types, adds the node and returns its id.
/// The method of a view returns the operand itself if the view would change nothing.
impl Graph {
    // Nodes, inputs and outputs.

    /// Adds a node after checking its type rule. `want` is the requested type; ops whose type does not follow
    /// from their operands require it (see [`Op::infer`]).
    pub fn push(&mut self, op: Op, inputs: &[NodeId], want: Option<TensorType>) -> Result<NodeId> {
        let ty = {
            let tys: SmallVec<[&TensorType; 4]> = inputs.iter().map(|i| self.ty(*i)).collect();
            op.infer(&tys, want.as_ref()).map_err(|e| e.at(&self.span))?
        };
        if let Some(why) = ty.fault() {
            return Err(Error::shape(op.name(), why).at(&self.span));
        }
        Ok(self.push_unchecked(Node { op, inputs: inputs.into(), ty, span: self.span.clone() }))
    }

    /// Adds a node without checking its type. The caller must have derived `node.ty` from the op's type rule.
    pub fn push_unchecked(&mut self, node: Node) -> NodeId {
        self.nodes.push(node);
        NodeId(self.nodes.len() as u32 - 1)
    }

    // Leaves.

    /// Adds a run-time input. Its index is the number of inputs added before. The type is not checked here.
    pub fn input(&mut self, name: &str, ty: TensorType) -> NodeId {
        let n = self.inputs.len() as u32;
        let node =
            self.push_unchecked(Node { op: Op::Input(n), inputs: smallvec![], ty, span: self.span.clone() });
        self.inputs.push(InputSpec { name: name.into(), node });
        node
    }

    /// Adds a run-time scalar argument (rank 0).
    pub fn arg(&mut self, dtype: DType) -> NodeId {
        let n = self.args.len() as u32;
        self.args.push(dtype);
        let ty = TensorType::new(dtype, Shape::scalar());
        self.push_unchecked(Node { op: Op::Arg(n), inputs: smallvec![], ty, span: self.span.clone() })
    }

    /// Adds a constant with the dtype and shape of `data`.
    pub fn constant(&mut self, data: ConstData) -> NodeId {
        let ty = TensorType::new(data.dtype, &data.dims);
        self.push_unchecked(Node { op: Op::Const(data), inputs: smallvec![], ty, span: self.span.clone() })
    }

    /// A literal: a tensor with `value`, cast to `dtype`, in every element.
    pub fn full(&mut self, dtype: DType, shape: impl Into<Shape>, value: impl Into<Scalar>) -> NodeId {
        let ty = TensorType::new(dtype, shape);
        let op = Op::Full(value.into().cast(dtype));
        self.push_unchecked(Node { op, inputs: smallvec![], ty, span: self.span.clone() })
    }

    /// A rank-0 literal with the dtype of `like`.
    pub fn lit(&mut self, like: NodeId, value: impl Into<Scalar>) -> NodeId {
        self.full(self.dtype(like), Shape::scalar(), value)
    }

    /// The index along `axis`, as a tensor of this dtype and shape.
    pub fn iota(&mut self, dtype: DType, shape: impl Into<Shape>, axis: usize) -> Result<NodeId> {
        self.push(Op::Iota { axis }, &[], Some(TensorType::new(dtype, shape)))
    }

    /// Declares `node` as an output. Returns the output's index.
    pub fn output(&mut self, name: &str, node: NodeId) -> u32 {
        self.outputs.push(OutputSpec { name: name.into(), node });
        self.outputs.len() as u32 - 1
    }

    /// Replaces all outputs.
    pub fn set_outputs(&mut self, outputs: Vec<OutputSpec>) {
        self.outputs = outputs;
    }

    /// Declares that output `output` is the next version of the state held by input `input`. Their types must
    /// be equal.
    pub fn state(&mut self, input: u32, output: u32) -> Result<()> {
        let bad = |w: &str| Err(Error::argument("state", w));
        let (Some(i), Some(o)) = (self.inputs.get(input as usize), self.outputs.get(output as usize)) else {
            return bad("there is no such input or output");
        };
        if self.ty(i.node) != self.ty(o.node) {
            return bad("the new value's type differs from the state's");
        }
        self.states.push((input, output));
        Ok(())
    }

    // Element-wise.

    /// Applies a scalar op with NumPy broadcasting.
    pub fn scalar(&mut self, op: ScalarOp, x: &[NodeId]) -> Result<NodeId> {
        let mut s =
            self.shape(*x.first().ok_or_else(|| Error::argument(op.name(), "no operand is given"))?).clone();
        for i in &x[1..] {
            s = s.broadcast(self.shape(*i)).map_err(|e| match e {
                Error::Shape { what, .. } => {
                    Error::Shape { op: op.name().into(), what, at: self.span.clone() }
                }
                e => e,
            })?;
        }
        let x: SmallVec<[NodeId; 3]> = x.iter().map(|i| self.expand(*i, &s)).collect::<Result<_>>()?;
        self.push(Op::Scalar(op), &x, None)
    }

    /// Casts to `dtype`. Returns `x` if it already has this dtype.
    pub fn cast(&mut self, x: NodeId, dtype: DType) -> Result<NodeId> {
        if self.dtype(x) == dtype {
            return Ok(x);
        }
        let want = TensorType { dtype, shape: self.shape(x).clone() };
        self.push(Op::Cast, &[x], Some(want))
    }

    /// Reinterprets the bits as `dtype`, which must have the same number of bits.
    pub fn bitcast(&mut self, x: NodeId, dtype: DType) -> Result<NodeId> {
        let want = TensorType { dtype, shape: self.shape(x).clone() };
        self.push(Op::Bitcast, &[x], Some(want))
    }

    // Views. Each returns its operand if it changes nothing.

    /// The same elements in row-major order with another shape.
    pub fn reshape(&mut self, x: NodeId, shape: impl Into<Shape>) -> Result<NodeId> {
        let want = TensorType { dtype: self.dtype(x), shape: shape.into() };
        if want.shape == *self.shape(x) {
            return Ok(x);
        }
        self.push(Op::Reshape, &[x], Some(want))
    }

    /// Reorders the axes: axis `k` of the result is axis `perm[k]` of `x`.
    pub fn permute(&mut self, x: NodeId, perm: &[usize]) -> Result<NodeId> {
        if perm.iter().copied().eq(0..self.shape(x).rank()) {
            return Ok(x);
        }
        self.push(Op::Permute(perm.into()), &[x], None)
    }

    /// Swaps two axes.
    pub fn transpose(&mut self, x: NodeId, a: usize, b: usize) -> Result<NodeId> {
        let mut p: Axes = (0..self.shape(x).rank()).collect();
        if a >= p.len() || b >= p.len() {
            return Err(Error::shape(
                "transpose",
                format!("axis {a} or {b} is outside shape {}", self.shape(x)),
            )
            .at(&self.span));
        }
        p.swap(a, b);
        self.permute(x, &p)
    }

    /// Broadcasts to `shape` by NumPy's rules.
    pub fn expand(&mut self, x: NodeId, shape: &Shape) -> Result<NodeId> {
        if self.shape(x) == shape {
            return Ok(x);
        }
        let want = TensorType { dtype: self.dtype(x), shape: shape.clone() };
        self.push(Op::Expand, &[x], Some(want))
    }

    /// Along each axis `k`: `len[k]` elements from `start[k]` in steps of `step[k]`.
    pub fn slice(&mut self, x: NodeId, start: &[Dim], step: &[i64], len: &[Dim]) -> Result<NodeId> {
        let same = start.iter().all(|s| s.is(0)) && step.iter().all(|s| *s == 1) && len == &self.shape(x)[..];
        if same {
            return Ok(x);
        }
        if start.len() != step.len() {
            return Err(Error::argument("slice", "expected one start and one step per axis").at(&self.span));
        }
        let axes = start.iter().zip(step).map(|(s, t)| SliceAxis { start: *s, step: *t }).collect();
        let want = TensorType { dtype: self.dtype(x), shape: len.iter().copied().collect() };
        self.push(Op::Slice(axes), &[x], Some(want))
    }

    /// The view of `len` elements from `start` along one axis.
    pub fn narrow(
        &mut self,
        x: NodeId,
        axis: usize,
        start: impl Into<Dim>,
        len: impl Into<Dim>,
    ) -> Result<NodeId> {
        let s = self.shape(x).clone();
        if axis >= s.rank() {
            return Err(Error::shape("narrow", format!("axis {axis} is outside shape {s}")).at(&self.span));
        }
        let mut st: Vec<Dim> = vec![Dim::from(0); s.rank()];
        let mut ln: Vec<Dim> = s.to_vec();
        st[axis] = start.into();
        ln[axis] = len.into();
        self.slice(x, &st, &vec![1; s.rank()], &ln)
    }

    /// Reverses axes.
    pub fn flip(&mut self, x: NodeId, axes: &[usize]) -> Result<NodeId> {
        let s = self.shape(x).clone();
        let pick = |k: usize| axes.contains(&k) && !s[k].is(0);
        let start: Vec<Dim> =
            (0..s.rank()).map(|k| if pick(k) { s[k].offset(-1) } else { Dim::from(0) }).collect();
        let step: Vec<i64> = (0..s.rank()).map(|k| if pick(k) { -1 } else { 1 }).collect();
        self.slice(x, &start, &step, &s)
    }

    /// Adds `lo[k]` elements before and `hi[k]` after along each axis `k`, filled with `value`.
    pub fn pad(&mut self, x: NodeId, lo: &[usize], hi: &[usize], value: impl Into<Scalar>) -> Result<NodeId> {
        if lo.iter().chain(hi).all(|n| *n == 0) && lo.len() == self.shape(x).rank() {
            return Ok(x);
        }
        let value = value.into().cast(self.dtype(x));
        self.push(Op::Pad { lo: lo.into(), hi: hi.into(), value }, &[x], None)
    }

    /// Inserts an axis of size 1.
    pub fn unsqueeze(&mut self, x: NodeId, axis: usize) -> Result<NodeId> {
        let mut s = self.shape(x).clone();
        if axis > s.rank() {
            return Err(
                Error::shape("unsqueeze", format!("axis {axis} is outside 0..={}", s.rank())).at(&self.span)
            );
        }
        s.0.insert(axis, Dim::from(1));
        self.reshape(x, s)
    }

    /// Removes an axis, which must have size 1.
    pub fn squeeze(&mut self, x: NodeId, axis: usize) -> Result<NodeId> {
        let mut s = self.shape(x).clone();
        if axis >= s.rank() || !s[axis].is(1) {
            return Err(
                Error::shape("squeeze", format!("axis {axis} of {s} is not of size 1")).at(&self.span)
            );
        }
        s.0.remove(axis);
        self.reshape(x, s)
    }

    /// Concatenates along `axis`. All other axes must have equal sizes.
    pub fn concat(&mut self, x: &[NodeId], axis: usize) -> Result<NodeId> {
        if let [one] = x {
            return Ok(*one);
        }
        self.push(Op::Concat { axis }, x, None)
    }

    // Structured.

    /// Reduces over `axes`. `keep` keeps them as axes of size 1. Returns `x` if `axes` is empty.
    pub fn reduce(&mut self, kind: ReduceKind, x: NodeId, axes: &[usize], keep: bool) -> Result<NodeId> {
        let mut axes: Axes = axes.into();
        axes.sort();
        axes.dedup();
        if axes.is_empty() {
            return Ok(x);
        }
        self.push(Op::Reduce { kind, axes, keep }, &[x], None)
    }

    pub fn sum(&mut self, x: NodeId, axes: &[usize], keep: bool) -> Result<NodeId> {
        self.reduce(ReduceKind::Sum, x, axes, keep)
    }

    /// Matrix product by NumPy's rules: batch dimensions broadcast; a rank-1 operand is a row (left) or a
    /// column (right).
    pub fn matmul(&mut self, a: NodeId, b: NodeId) -> Result<NodeId> {
        let (ra, rb) = (self.shape(a).rank(), self.shape(b).rank());
        if ra == 0 || rb == 0 {
            return Err(Error::shape("matmul", "operands must have at least one axis").at(&self.span));
        }
        let a2 = if ra == 1 { self.unsqueeze(a, 0)? } else { a };
        let b2 = if rb == 1 { self.unsqueeze(b, 1)? } else { b };
        let (sa, sb) = (self.shape(a2).clone(), self.shape(b2).clone());
        let (la, lb) = (sa.rank() - 2, sb.rank() - 2);
        let batch = Shape::from(&sa[..la]).broadcast(&Shape::from(&sb[..lb])).map_err(|e| match e {
            Error::Shape { .. } => {
                Error::shape("matmul", format!("the batch dimensions of {sa} and {sb} do not broadcast"))
                    .at(&self.span)
            }
            e => e,
        })?;
        let full = |t: &[Dim]| -> Shape { batch.iter().chain(t).copied().collect() };
        let a3 = self.expand(a2, &full(&sa[la..]))?;
        let b3 = self.expand(b2, &full(&sb[lb..]))?;
        let mut y = self.push(Op::Matmul, &[a3, b3], None)?;
        if rb == 1 {
            y = self.squeeze(y, self.shape(y).rank() - 1)?;
        }
        if ra == 1 {
            y = self.squeeze(y, self.shape(y).rank() - if rb == 1 { 1 } else { 2 })?;
        }
        Ok(y)
    }

    /// Convolution of `x` `[n, c, i…]` with weight `w` `[o, c/groups, k…]` ([`Conv`]).
    pub fn conv(&mut self, x: NodeId, w: NodeId, attrs: Conv) -> Result<NodeId> {
        self.push(Op::Conv(attrs), &[x, w], None)
    }

    /// Pooling of `x` `[n, c, i…]` over its spatial axes ([`Pool`]).
    pub fn pool(&mut self, x: NodeId, attrs: Pool) -> Result<NodeId> {
        self.push(Op::Pool(attrs), &[x], None)
    }

    /// Selects rows along `axis` by index ([`Op::Gather`]).
    pub fn gather(&mut self, x: NodeId, index: NodeId, axis: usize) -> Result<NodeId> {
        self.push(Op::Gather { axis }, &[x, index], None)
    }

    /// Selects single elements along `axis` ([`Op::GatherElements`]).
    pub fn gather_elements(&mut self, x: NodeId, index: NodeId, axis: usize) -> Result<NodeId> {
        self.push(Op::GatherElements { axis }, &[x, index], None)
    }

    /// Combines single elements of `upd` into `base` along `axis` ([`Op::ScatterElements`]).
    pub fn scatter_elements(
        &mut self,
        base: NodeId,
        index: NodeId,
        upd: NodeId,
        axis: usize,
        kind: ScatterKind,
    ) -> Result<NodeId> {
        self.push(Op::ScatterElements { axis, kind }, &[base, index, upd], None)
    }

    /// Combines rows of `upd` into `base` along `axis` ([`Op::ScatterRows`]).
    pub fn scatter_rows(
        &mut self,
        base: NodeId,
        index: NodeId,
        upd: NodeId,
        axis: usize,
        kind: ScatterKind,
    ) -> Result<NodeId> {
        self.push(Op::ScatterRows { axis, kind }, &[base, index, upd], None)
    }

    /// `base` with `update` written at the run-time `position` along `axis`.
    pub fn update_slice(
        &mut self,
        base: NodeId,
        update: NodeId,
        position: NodeId,
        axis: usize,
    ) -> Result<NodeId> {
        self.push(Op::UpdateSlice { axis }, &[base, update, position], None)
    }

    /// Converts labels to checked class indices ([`Op::ClassIndex`]).
    pub fn class_index(
        &mut self,
        labels: NodeId,
        classes: impl Into<Dim>,
        ignore: Option<i64>,
    ) -> Result<NodeId> {
        self.push(Op::ClassIndex { classes: classes.into(), ignore }, &[labels], None)
    }

    /// Index of the largest (or smallest) element along `axis` ([`Op::ArgReduce`]).
    pub fn argreduce(&mut self, max: bool, x: NodeId, axis: usize, keep: bool, last: bool) -> Result<NodeId> {
        self.push(Op::ArgReduce { max, axis, keep, last }, &[x], None)
    }

    /// Indices that sort the elements along `axis` ([`Op::ArgSort`]).
    pub fn argsort(&mut self, x: NodeId, axis: usize, descending: bool) -> Result<NodeId> {
        self.push(Op::ArgSort { axis, descending }, &[x], None)
    }

    /// Running reduction along `axis`. `exclusive` excludes the element itself; `reverse` runs from the end.
    pub fn scan(
        &mut self,
        kind: ReduceKind,
        x: NodeId,
        axis: usize,
        exclusive: bool,
        reverse: bool,
    ) -> Result<NodeId> {
        self.push(Op::Scan { kind, axis, exclusive, reverse }, &[x], None)
    }

    /// Adds a custom op.
    pub fn custom(&mut self, op: Arc<dyn CustomOp>, x: &[NodeId]) -> Result<NodeId> {
        self.push(Op::Custom(Custom::new(op)), x, None)
    }
}

macro_rules! builders {
    (
        unary { $($(#[$udoc:meta])+ $u:ident $umethod:ident $urow:tt;)* }
        binary { $($(#[$bdoc:meta])+ $b:ident $bmethod:ident $btensor:ident $brow:tt;)* }
        ternary { $($(#[$tdoc:meta])+ $t:ident $tmethod:ident $ttensor:ident $trow:tt;)* }
    ) => {
        /// Element-wise ops, with broadcasting.
        impl Graph {
            $(#[doc = concat!("Adds [`ScalarOp::", stringify!($u), "`].")]
            pub fn $umethod(&mut self, x: NodeId) -> Result<NodeId> {
                self.scalar(ScalarOp::$u, &[x])
            })*
            $(#[doc = concat!("Adds [`ScalarOp::", stringify!($b), "`].")]
            pub fn $bmethod(&mut self, a: NodeId, b: NodeId) -> Result<NodeId> {
                self.scalar(ScalarOp::$b, &[a, b])
            })*
            $(#[doc = concat!("Adds [`ScalarOp::", stringify!($t), "`].")]
            pub fn $tmethod(&mut self, a: NodeId, b: NodeId, c: NodeId) -> Result<NodeId> {
                self.scalar(ScalarOp::$t, &[a, b, c])
            })*
        }
    };
}
crate::for_each_scalar_op!(builders);

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

    pub(super) fn mlp(batch: Dim) -> Graph {
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
