//! The exported model under construction: names, nodes, constants.

use super::super::proto::*;
use super::{STATES, ir_version, ops};
use bytes::Bytes;
use halcyon_ir::graph::Node;
use halcyon_ir::{
    ConstData, DType, Dim, Dims, Error, Graph, NodeId, Op, Result, Scalar, Shape, Span, TensorType,
};
use std::collections::{HashMap, HashSet};
use std::rc::Rc;
use std::sync::Arc;

/// A value of the exported model.
#[derive(Clone, Debug)]
pub(super) struct Val {
    pub name: Rc<str>,
    pub ty: TensorType,
}

impl Val {
    pub(super) fn dtype(&self) -> DType {
        self.ty.dtype
    }

    pub(super) fn shape(&self) -> &Shape {
        &self.ty.shape
    }

    pub(super) fn rank(&self) -> usize {
        self.ty.shape.rank()
    }
}

/// How an operand of a graph node is written. ONNX operators broadcast implicitly.
#[derive(Clone, Copy, Debug)]
enum Source {
    Node(NodeId),
    /// A literal of any shape in the graph, written as a scalar.
    Scalar(NodeId),
}

impl Source {
    fn node(self) -> NodeId {
        match self {
            Source::Node(n) | Source::Scalar(n) => n,
        }
    }
}

pub(super) struct Emitter<'g> {
    pub g: &'g Graph,
    pub opset: i64,
    nodes: Vec<NodeProto>,
    initializers: Vec<(String, ConstData)>,
    /// Names already used for values and nodes.
    names: HashSet<String>,
    node_names: HashSet<String>,
    /// Types of the computed values.
    types: Vec<(Rc<str>, TensorType)>,
    values: Vec<Option<Val>>,
    sources: Vec<Vec<Source>>,
    /// Constants by content, so that equal ones are stored once.
    pool: HashMap<(DType, Dims, Vec<u8>), Val>,
    /// Weights by the address of their bytes.
    weights: HashMap<(usize, usize, DType, Dims), Val>,
    /// Constant vectors of one i64, with their values.
    known: HashMap<Rc<str>, i64>,
    pub(super) sizes: HashMap<Dim, Val>,
    span: Span,
}

/// onnxruntime's operator set for operators that ONNX lacks, and its version.
pub(super) const MICROSOFT: &str = "com.microsoft";
const MICROSOFT_VERSION: i64 = 1;

/// Literals of at most this many elements are stored. A node computes larger literals.
const DENSE: usize = 16;
/// Constants of at most this many bytes are looked up by content.
const POOLED: usize = 1024;

impl<'g> Emitter<'g> {
    pub(super) fn new(g: &'g Graph, opset: i64) -> Result<Emitter<'g>> {
        let mut e = Emitter {
            g,
            opset,
            nodes: vec![],
            initializers: vec![],
            names: HashSet::new(),
            node_names: HashSet::new(),
            types: vec![],
            values: vec![None; g.nodes().len()],
            sources: g.ids().map(|id| sources(g, id)).collect(),
            pool: HashMap::new(),
            weights: HashMap::new(),
            known: HashMap::new(),
            sizes: HashMap::new(),
            span: Span::default(),
        };
        for i in g.inputs() {
            if !e.names.insert(i.name.to_string()) {
                return Err(Error::argument("export", format!("two inputs are called '{}'", i.name)));
            }
            e.values[i.node.index()] = Some(Val { name: (&*i.name).into(), ty: g.ty(i.node).clone() });
        }
        let mut seen = HashSet::new();
        for o in g.outputs() {
            if !seen.insert(&o.name) {
                return Err(Error::argument("export", format!("two outputs are called '{}'", o.name)));
            }
            if !e.names.insert(o.name.to_string())
                && e.values[o.node.index()].as_ref().is_none_or(|v| *v.name != *o.name)
            {
                let what =
                    format!("'{}' is the name of an input and of another value that is an output", o.name);
                return Err(Error::argument("export", what));
            }
        }
        Ok(e)
    }

    /// Returns the finished model.
    pub(super) fn model(mut self) -> Result<ModelProto> {
        let g = self.g;
        // Several `Op::Arg` nodes may stand for the same argument. The argument becomes one input.
        let mut args: Vec<Val> = vec![];
        for (k, d) in g.args().iter().enumerate() {
            let name = self.unused_name(&format!("arg{k}"));
            args.push(Val { name, ty: TensorType::new(*d, Shape::scalar()) });
        }
        let live = self.live();
        for id in g.ids().filter(|id| live[id.index()]) {
            if let Op::Arg(k) = g.node(id).op {
                let lost = || Error::internal("a node names an argument that is not declared");
                self.values[id.index()] = Some(args.get(k as usize).ok_or_else(lost)?.clone());
            }
        }
        for id in g.ids().filter(|id| live[id.index()]) {
            if self.values[id.index()].is_none() {
                let node = g.node(id);
                self.span = node.span.clone();
                let v = ops::node(&mut self, id).map_err(|e| located(e, node))?;
                if v.ty != node.ty {
                    let what = format!(
                        "{} was exported with type {}, but has type {}",
                        node.op.name(),
                        v.ty,
                        node.ty
                    );
                    return Err(Error::internal(what));
                }
                self.values[id.index()] = Some(v);
            }
        }
        self.outputs()?;
        let stored = self.initializers.iter().map(|(_, c)| c.dtype);
        let given = g.inputs().iter().map(|i| g.dtype(i.node));
        let taken = g.outputs().iter().map(|o| g.dtype(o.node));
        for d in self.types.iter().map(|(_, t)| t.dtype).chain(stored).chain(given).chain(taken) {
            self.require_type(d)?;
        }

        let ports =
            |name: &str, ty: &TensorType| ValueInfoProto { name: name.into(), r#type: Some(type_proto(ty)) };
        let mut input: Vec<ValueInfoProto> =
            g.inputs().iter().map(|i| ports(&i.name, g.ty(i.node))).collect();
        input.extend(args.iter().map(|a| ports(&a.name, &a.ty)));
        let output: Vec<ValueInfoProto> = g.outputs().iter().map(|o| ports(&o.name, g.ty(o.node))).collect();
        let outputs: HashSet<&str> = g.outputs().iter().map(|o| &*o.name).collect();
        let value_info = self.types.iter().filter(|(n, _)| !outputs.contains(&**n));
        let mut opset_import = vec![OperatorSetIdProto { domain: String::new(), version: self.opset }];
        if self.nodes.iter().any(|n| n.domain == MICROSOFT) {
            opset_import.push(OperatorSetIdProto { domain: MICROSOFT.into(), version: MICROSOFT_VERSION });
        }
        let graph = GraphProto {
            name: "halcyon".into(),
            input,
            output,
            value_info: value_info.map(|(n, t)| ports(n, t)).collect(),
            initializer: self.initializers.iter().map(|(n, c)| weight(n, c)).collect(),
            node: self.nodes,
            ..Default::default()
        };
        Ok(ModelProto {
            ir_version: ir_version(self.opset),
            opset_import,
            producer_name: "halcyon".into(),
            producer_version: env!("CARGO_PKG_VERSION").into(),
            metadata_props: states(g)?,
            graph: Some(graph),
            ..Default::default()
        })
    }

    /// Marks the nodes that the outputs need. Literals that are written as scalars, and expansions that
    /// ONNX's implicit broadcasting replaces, are not needed.
    fn live(&self) -> Vec<bool> {
        let mut live = vec![false; self.sources.len()];
        self.g.outputs().iter().for_each(|o| live[o.node.index()] = true);
        for i in (0..live.len()).rev() {
            if live[i] {
                for s in &self.sources[i] {
                    if let Source::Node(n) = s {
                        live[n.index()] = true;
                    }
                }
            }
        }
        live
    }

    /// Gives the outputs their names. The result of a node is renamed. A value that is not the result of a
    /// node, or that has another output name already, is copied by an `Identity` node.
    fn outputs(&mut self) -> Result<()> {
        let made: HashMap<&str, usize> = (self.nodes.iter().enumerate())
            .flat_map(|(i, n)| n.output.iter().map(move |o| (o.as_str(), i)))
            .collect();
        let mut renamed: HashMap<Rc<str>, Rc<str>> = HashMap::new();
        let mut copies: Vec<(Val, Rc<str>)> = vec![];
        for o in self.g.outputs() {
            let v = self.values[o.node.index()]
                .clone()
                .ok_or_else(|| Error::internal("an output was not written"))?;
            let name: Rc<str> = (&*o.name).into();
            if v.name == name {
                continue;
            }
            if made.contains_key(&*v.name) && !renamed.contains_key(&v.name) {
                renamed.insert(v.name.clone(), name);
            } else {
                copies.push((v, name));
            }
        }
        let new = |n: &mut String| {
            if let Some(to) = renamed.get(n.as_str()) {
                *n = to.to_string();
            }
        };
        for n in &mut self.nodes {
            n.input.iter_mut().for_each(new);
            n.output.iter_mut().for_each(new);
        }
        self.types.retain(|(n, _)| !renamed.contains_key(n));
        for (v, name) in copies {
            let from = renamed.get(&v.name).unwrap_or(&v.name).to_string();
            let node_name = self.node_name("Identity");
            self.nodes.push(NodeProto {
                op_type: "Identity".into(),
                name: node_name,
                input: vec![from],
                output: vec![name.to_string()],
                ..Default::default()
            });
        }
        Ok(())
    }

    /// An unused name for a value.
    fn unused_name(&mut self, base: &str) -> Rc<str> {
        unused_name(&mut self.names, base).into()
    }

    /// A node's name: its span, with the operator added if one span gives several nodes.
    fn node_name(&mut self, op: &str) -> String {
        let base = match &*self.span.text() {
            "" => op.to_string(),
            s if self.node_names.contains(s) => format!("{s}/{op}"),
            s => s.to_string(),
        };
        unused_name(&mut self.node_names, &base)
    }

    // Reading the graph.

    /// Operand `k` of a graph node.
    pub(super) fn operand(&mut self, id: NodeId, k: usize) -> Result<Val> {
        let lost = || Error::internal("an operand is missing");
        let s = *self.sources[id.index()].get(k).ok_or_else(lost)?;
        match (s, &self.g.node(s.node()).op) {
            (Source::Scalar(n), &Op::Full(v)) => self.lit(self.g.dtype(n), v),
            _ => self.values[s.node().index()].clone().ok_or_else(lost),
        }
    }

    pub(super) fn operands(&mut self, id: NodeId) -> Result<Vec<Val>> {
        (0..self.sources[id.index()].len()).map(|k| self.operand(id, k)).collect()
    }

    // Constants.

    /// A weight of the graph, named after its span.
    pub(super) fn weight(&mut self, c: &ConstData) -> Val {
        let key = (c.key().0, c.key().1, c.dtype, c.dims.clone());
        // Empty tensors have no address to identify them by.
        let known = if c.bytes().is_empty() { None } else { self.weights.get(&key) };
        if let Some(v) = known {
            return v.clone();
        }
        let base = self.span.text().into_owned();
        let v = self.store(if base.is_empty() { "weight" } else { &base }, c.clone());
        self.weights.insert(key, v.clone());
        v
    }

    fn store(&mut self, base: &str, c: ConstData) -> Val {
        let name = self.unused_name(base);
        let v = Val { name: name.clone(), ty: TensorType::new(c.dtype, &c.dims) };
        self.initializers.push((name.to_string(), c));
        v
    }

    /// A constant. Equal constants of at most [`POOLED`] bytes are stored once.
    pub(super) fn constant(&mut self, base: &str, c: ConstData) -> Val {
        if c.bytes().len() > POOLED {
            return self.store(base, c);
        }
        let key = (c.dtype, c.dims.clone(), c.bytes().to_vec());
        if let Some(v) = self.pool.get(&key) {
            return v.clone();
        }
        let one = (c.dtype == DType::I64 && c.dims[..] == [1]).then(|| c.get(0)).flatten();
        let v = self.store(base, c);
        if let Some(n) = one {
            self.known.insert(v.name.clone(), n.as_i64());
        }
        self.pool.insert(key, v.clone());
        v
    }

    /// The value of a constant vector of one i64.
    pub(super) fn known_int(&self, v: &Val) -> Option<i64> {
        self.known.get(&v.name).copied()
    }

    pub(super) fn lit(&mut self, dtype: DType, v: impl Into<Scalar>) -> Result<Val> {
        Ok(self.constant("const", ConstData::splat(dtype, &[], v.into().cast(dtype))?))
    }

    /// A scalar with the dtype of `like`.
    pub(super) fn scalar_like(&mut self, like: &Val, v: impl Into<Scalar>) -> Result<Val> {
        self.lit(like.dtype(), v)
    }

    /// A vector of i64.
    pub(super) fn ints(&mut self, v: &[i64]) -> Result<Val> {
        Ok(self.constant("const", ConstData::from_slice(&[v.len()], v)?))
    }

    /// A tensor with the value `v` in every element.
    pub(super) fn full(&mut self, ty: &TensorType, v: Scalar) -> Result<Val> {
        match ty.shape.known() {
            Some(d) if d.iter().try_fold(1usize, |a, n| a.checked_mul(*n)).is_some_and(|n| n <= DENSE) => {
                Ok(self.constant("const", ConstData::splat(ty.dtype, &d, v)?))
            }
            _ => {
                let x = self.lit(ty.dtype, v)?;
                self.expand(&x, &ty.shape)
            }
        }
    }

    // Nodes.

    /// A node with one result.
    pub(super) fn node(&mut self, op: &str, x: &[&Val], attrs: Vec<AttributeProto>, ty: TensorType) -> Val {
        self.node_of(op, x, attrs, vec![ty]).swap_remove(0)
    }

    /// A node of another operator set, with one result.
    pub(super) fn node_in(
        &mut self,
        domain: &str,
        op: &str,
        x: &[&Val],
        attrs: Vec<AttributeProto>,
        ty: TensorType,
    ) -> Val {
        let y = self.node(op, x, attrs, ty);
        if let Some(n) = self.nodes.last_mut() {
            n.domain = domain.into();
        }
        y
    }

    /// A node with one result per type in `types`, which must not be empty.
    pub(super) fn node_of(
        &mut self,
        op: &str,
        x: &[&Val],
        attrs: Vec<AttributeProto>,
        ty: Vec<TensorType>,
    ) -> Vec<Val> {
        let base = op.to_lowercase();
        let out: Vec<Val> = ty.into_iter().map(|ty| Val { name: self.unused_name(&base), ty }).collect();
        let name = self.node_name(op);
        self.nodes.push(NodeProto {
            op_type: op.into(),
            name,
            input: x.iter().map(|v| v.name.to_string()).collect(),
            output: out.iter().map(|v| v.name.to_string()).collect(),
            attribute: attrs,
            ..Default::default()
        });
        self.types.extend(out.iter().map(|v| (v.name.clone(), v.ty.clone())));
        out
    }

    /// Adds an attribute to the newest node.
    pub(super) fn set_last(&mut self, a: AttributeProto) {
        if let Some(n) = self.nodes.last_mut() {
            n.attribute.push(a);
        }
    }

    /// A node whose result has the type of its first operand.
    pub(super) fn node_of_first_type(&mut self, op: &str, x: &[&Val], attrs: Vec<AttributeProto>) -> Val {
        self.node(op, x, attrs, x[0].ty.clone())
    }

    /// An element-wise operator on operands that broadcast, with a result of `dtype`.
    pub(super) fn map(&mut self, op: &str, x: &[&Val], dtype: DType) -> Result<Val> {
        let shape = x[1..].iter().try_fold(x[0].shape().clone(), |s, v| s.broadcast(v.shape()))?;
        Ok(self.node(op, x, vec![], TensorType { dtype, shape }))
    }

    /// Like [`Emitter::map`], with the dtype of the last operand.
    pub(super) fn calc(&mut self, op: &str, x: &[&Val]) -> Result<Val> {
        let d = x.last().map_or(DType::Bool, |v| v.dtype());
        self.map(op, x, d)
    }

    pub(super) fn test(&mut self, op: &str, a: &Val, b: &Val) -> Result<Val> {
        self.map(op, &[a, b], DType::Bool)
    }

    pub(super) fn cast(&mut self, x: &Val, to: DType) -> Val {
        if x.dtype() == to {
            return x.clone();
        }
        let ty = TensorType { dtype: to, shape: x.shape().clone() };
        let mut attributes = vec![int("to", to.row().onnx.into())];
        // Halcyon's cast overflows to NaN or infinity; the operator saturates by default.
        if to.is_float() && to.bits() == 8 {
            attributes.push(int("saturate", 0));
        }
        // The operator's default is to round up.
        if to == DType::F8E8M0 {
            attributes.push(text("round_mode", "nearest"));
        }
        self.node("Cast", &[x], attributes, ty)
    }

    pub(super) fn transpose(&mut self, x: &Val, perm: &[usize]) -> Val {
        if perm.iter().copied().eq(0..perm.len()) {
            return x.clone();
        }
        let shape: Shape = perm.iter().map(|&p| x.shape()[p]).collect();
        let perm: Vec<i64> = perm.iter().map(|&p| p as i64).collect();
        self.node("Transpose", &[x], vec![ints("perm", &perm)], TensorType { dtype: x.dtype(), shape })
    }

    pub(super) fn reshape(&mut self, x: &Val, shape: &Shape) -> Result<Val> {
        if x.shape() == shape {
            return Ok(x.clone());
        }
        let (to, zeros) = self.target(x.shape(), shape)?;
        let attrs = if zeros { vec![int("allowzero", 1)] } else { vec![] };
        Ok(self.node("Reshape", &[x, &to], attrs, TensorType { dtype: x.dtype(), shape: shape.clone() }))
    }

    pub(super) fn expand(&mut self, x: &Val, shape: &Shape) -> Result<Val> {
        if x.shape() == shape {
            return Ok(x.clone());
        }
        // A size that `x` already has need not be computed: Expand broadcasts both ways.
        let lead = shape.rank() - x.rank();
        let ask: Vec<Dim> = (0..shape.rank())
            .map(|k| {
                if k >= lead && shape[k].known().is_none() && x.shape()[k - lead] == shape[k] {
                    Dim::from(1)
                } else {
                    shape[k]
                }
            })
            .collect();
        let to = self.dims(&ask)?;
        Ok(self.node("Expand", &[x, &to], vec![], TensorType { dtype: x.dtype(), shape: shape.clone() }))
    }

    /// Adds `lo[k]` elements before and `hi[k]` after along each axis `k`; negative counts remove elements.
    pub(super) fn pad(&mut self, x: &Val, lo: &[i64], hi: &[i64], value: Scalar) -> Result<Val> {
        let shape = (0..x.rank()).map(|k| x.shape()[k].offset(lo[k].saturating_add(hi[k]))).collect();
        let pads = self.ints(&[lo, hi].concat())?;
        let value = self.scalar_like(x, value)?;
        Ok(self.node("Pad", &[x, &pads, &value], vec![], TensorType { dtype: x.dtype(), shape }))
    }

    /// Fails unless the operator set has the element type.
    fn require_type(&self, d: DType) -> Result<()> {
        let (what, row) = (format!("the element type {d}"), d.row());
        match row.onnx {
            0 => Err(Error::unsupported(format!("{what} in ONNX"), "Cast to another element type")),
            _ => self.require_opset(&what, row.onnx_since),
        }
    }

    /// Fails unless the operator set is at least `since`.
    pub(super) fn require_opset(&self, what: &str, since: i64) -> Result<()> {
        if self.opset >= since {
            return Ok(());
        }
        Err(Error::unsupported(
            format!("{what} in operator set {}", self.opset),
            format!("Export for operator set {since} or newer"),
        ))
    }
}

fn unused_name(taken: &mut HashSet<String>, base: &str) -> String {
    let mut name = base.to_string();
    let mut n = 1;
    // Suffixes start at the number of names taken, which grows, so the search is short even if one name is
    // requested repeatedly.
    while !taken.insert(name.clone()) {
        let rest = if n == 1 { taken.len() } else { taken.len() + n };
        name = format!("{base}_{rest}");
        n += 1;
    }
    name
}

/// The operands of a node in ONNX. Element-wise operators and products broadcast, so an expansion that only
/// serves broadcasting is skipped.
fn sources(g: &Graph, id: NodeId) -> Vec<Source> {
    let n = g.node(id);
    let mut out: Vec<Source> = n.inputs.iter().map(|i| Source::Node(*i)).collect();
    let core = match n.op {
        Op::Scalar(_) => 0,
        Op::Matmul => 2,
        _ => return out,
    };
    let shape = |s: &Source| match s {
        Source::Node(n) => g.shape(*n).clone(),
        Source::Scalar(_) => Shape::scalar(),
    };
    // Axes that broadcast: all of them, or for products those before the matrix axes.
    let batch = |s: &Shape| Shape::from(&s[..s.rank() - core]);
    let want = batch(&n.ty.shape);
    for k in 0..out.len() {
        let mut from = n.inputs[k];
        while let Op::Expand = g.node(from).op {
            from = g.node(from).inputs[0];
        }
        let new = match g.node(from).op {
            Op::Full(_) if core == 0 => Source::Scalar(from),
            _ => Source::Node(from),
        };
        let (s, old) = (shape(&new), shape(&out[k]));
        if s.rank() < core || s[s.rank() - core..] != old[old.rank() - core..] {
            continue;
        }
        let before = std::mem::replace(&mut out[k], new);
        let all = out.iter().try_fold(Shape::scalar(), |a, s| a.broadcast(&batch(&shape(s))));
        if all.ok().as_ref() != Some(&want) {
            out[k] = before;
        }
    }
    out
}

/// Adds the node's name to an error that has no location.
fn located(e: Error, n: &Node) -> Error {
    match e {
        Error::Unsupported { what, next } if n.span.is_known() => {
            Error::Unsupported { what: format!("{what} (at {})", n.span), next }
        }
        e => e.at(&n.span),
    }
}

fn states(g: &Graph) -> Result<Vec<StringStringEntryProto>> {
    if g.states().is_empty() {
        return Ok(vec![]);
    }
    let names: Option<Vec<(&str, &str)>> = (g.states().iter())
        .map(|&(i, o)| Some((&*g.inputs().get(i as usize)?.name, &*g.outputs().get(o as usize)?.name)))
        .collect();
    let names = names.ok_or_else(|| Error::internal("a state names no input or output"))?;
    let value = serde_json::to_string(&names).map_err(|e| Error::internal(e.to_string()))?;
    Ok(vec![StringStringEntryProto { key: STATES.into(), value }])
}

/// Shared bytes of a constant.
struct Owner(Arc<dyn halcyon_ir::data::Bytes>);

impl AsRef<[u8]> for Owner {
    fn as_ref(&self) -> &[u8] {
        self.0.bytes()
    }
}

fn weight(name: &str, c: &ConstData) -> TensorProto {
    TensorProto {
        dims: c.dims.iter().map(|&d| d as i64).collect(),
        data_type: c.dtype.row().onnx,
        name: name.into(),
        raw_data: Some(Bytes::from_owner(Owner(c.owner()))),
        ..Default::default()
    }
}

pub(super) fn type_proto(t: &TensorType) -> TypeProto {
    let dim = |d: &Dim| Dimension {
        value: Some(match d.known() {
            Some(n) => DimValue::Value(n as i64),
            None => DimValue::Param(d.to_string()),
        }),
    };
    let shape = Some(TensorShapeProto { dim: t.shape.iter().map(dim).collect() });
    let tensor = super::super::proto::TensorType { elem_type: t.dtype.row().onnx, shape };
    TypeProto { value: Some(TypeValue::Tensor(tensor)) }
}

// Attributes.

fn attribute(name: &str, r#type: i32) -> AttributeProto {
    AttributeProto { name: name.into(), r#type, ..Default::default() }
}
pub(super) fn int(name: &str, i: i64) -> AttributeProto {
    AttributeProto { i, ..attribute(name, super::super::proto::attribute::INT) }
}
pub(super) fn ints(name: &str, v: &[i64]) -> AttributeProto {
    AttributeProto { ints: v.to_vec(), ..attribute(name, super::super::proto::attribute::INTS) }
}
pub(super) fn float(name: &str, f: f64) -> AttributeProto {
    AttributeProto { f: f as f32, ..attribute(name, super::super::proto::attribute::FLOAT) }
}
pub(super) fn text(name: &str, s: &'static str) -> AttributeProto {
    AttributeProto {
        s: Bytes::from_static(s.as_bytes()),
        ..attribute(name, super::super::proto::attribute::STRING)
    }
}
