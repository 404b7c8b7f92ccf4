//! A model file: its inputs and outputs, the check for unsupported operators, and its import as a graph.

use super::function;
use super::import::{self, Imported, Outcome};
use super::item::Datum;
use super::limits::{Limits, RunOptions};
use super::ops;
use super::order;
use super::proto::{
    self, DimValue, FunctionProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, TypeProto,
    TypeValue, ValueInfoProto,
};
use super::stage::{Engine, Placement};
use super::tensor::{self, External};
use super::wire;
use crate::{bad, foreign};
use bytes::Bytes;
use halcyon_ir::error::UnsupportedOp;
use halcyon_ir::{ConstData, DType, Dim, Error, Result, Shape, TensorType};
use prost::Message;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::Path;

/// Limit on the operator sets that a model or a function may import.
const OPSETS: usize = 1024;

/// Options for opening a model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct OpenOptions {
    /// Whether external data may be symbolic links that lead out of the model's folder. By default such links
    /// are rejected, except within a Hugging Face cache.
    pub external_links: bool,
}

impl OpenOptions {
    /// Sets [`OpenOptions::external_links`].
    pub fn external_links(mut self, allowed: bool) -> OpenOptions {
        self.external_links = allowed;
        self
    }
}

/// An open model. Weights stay in their mapped files until they are read; clones share the mapped files.
#[derive(Clone, Debug)]
pub struct Model {
    pub(super) file: String,
    pub(super) proto: ModelProto,
    pub(super) external: External,
    /// The mapped model file; empty for models in memory.
    map: Bytes,
    /// Number of results that [`Model::expose`] added. They are the last outputs of the graph.
    pub(super) exposed: usize,
}

/// A declared input or output of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct Port {
    pub name: String,
    pub ty: PortType,
}

/// The type of a port.
#[derive(Clone, Debug, PartialEq)]
pub enum PortType {
    Tensor {
        dtype: DType,
        /// A size that the model names is a symbol of that name. A size that it leaves open is a symbol made
        /// of the port's name and the axis. `None` if the rank is open too.
        shape: Option<Shape>,
    },
    /// A tensor of strings.
    Text {
        shape: Option<Shape>,
    },
    Sequence(Box<PortType>),
    Optional(Box<PortType>),
    /// A map from integers or strings to values.
    Map(Box<PortType>),
}

impl Port {
    /// The element type of a dense tensor.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for any other port.
    pub fn dtype(&self) -> Result<DType> {
        match &self.ty {
            PortType::Tensor { dtype, .. } => Ok(*dtype),
            other => Err(Error::unsupported(
                format!("'{}', {}, as a tensor", self.name, other.kind()),
                "Only dense tensors of numbers can be used here",
            )),
        }
    }

    /// The shape of a tensor if its rank is declared.
    pub fn shape(&self) -> Option<&Shape> {
        match &self.ty {
            PortType::Tensor { shape, .. } | PortType::Text { shape } => shape.as_ref(),
            _ => None,
        }
    }
}

impl PortType {
    /// Describes the port's type in messages.
    pub fn kind(&self) -> &'static str {
        match self {
            PortType::Tensor { .. } => "a tensor",
            PortType::Text { .. } => "a tensor of strings",
            PortType::Sequence(_) => "a sequence",
            PortType::Optional(_) => "an optional",
            PortType::Map(_) => "a map",
        }
    }

    /// Checks that a value has the kind and the element type of this port; the error describes the mismatch.
    /// Shapes, and the keys and values of maps, are not checked.
    pub(super) fn accepts(&self, x: &Datum) -> std::result::Result<(), String> {
        let ok = match (self, x) {
            (PortType::Tensor { dtype, .. }, Datum::Tensor(t)) => t.dtype == *dtype,
            (PortType::Text { .. }, Datum::Text(_)) => true,
            (PortType::Sequence(of), Datum::Sequence(s)) => return s.iter().try_for_each(|x| of.accepts(x)),
            (PortType::Optional(_), Datum::Optional(None)) => true,
            (PortType::Optional(of), Datum::Optional(Some(x))) => return of.accepts(x),
            (PortType::Map(_), Datum::Map(..)) => true,
            _ => false,
        };
        if ok { Ok(()) } else { Err(format!("the model takes {self}, but the value is {}", x.describe())) }
    }
}

impl std::fmt::Display for PortType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let dims = |s: &Option<Shape>| s.as_ref().map_or("[any shape]".into(), Shape::to_string);
        match self {
            PortType::Tensor { dtype, shape } => write!(f, "{dtype}{}", dims(shape)),
            PortType::Text { shape } => write!(f, "string{}", dims(shape)),
            PortType::Sequence(t) => write!(f, "sequence of {t}"),
            PortType::Optional(t) => write!(f, "optional {t}"),
            PortType::Map(t) => write!(f, "map to {t}"),
        }
    }
}

/// Version of the operator set that `sets` imports for `domain`; 0 if it is not imported. The default domain
/// is `""`; it has version 1 if `sets` is empty.
pub(super) fn opset(sets: &[OperatorSetIdProto], domain: &str) -> i64 {
    fn norm(d: &str) -> &str {
        if d == "ai.onnx" { "" } else { d }
    }
    match sets.iter().filter(|s| norm(&s.domain) == norm(domain)).map(|s| s.version).max() {
        Some(v) => v,
        // IR versions before 3 lack this field and mean version 1.
        None if sets.is_empty() && norm(domain).is_empty() => 1,
        None => 0,
    }
}

impl Model {
    /// Maps and decodes a model file. External data is looked up relative to the file's folder.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Format`] if the file is not an ONNX model.
    pub fn open(path: &Path) -> Result<Model> {
        Model::open_with(path, &OpenOptions::default())
    }

    /// Like [`Model::open`], with options.
    ///
    /// # Errors
    /// The errors of [`Model::open`].
    pub fn open_with(path: &Path, options: &OpenOptions) -> Result<Model> {
        let map = crate::mmap::open(path)?;
        let file = path.display().to_string();
        let external = External::in_folder_of(path).links(options.external_links);
        let m =
            Model::parse(map.clone(), external, &file).map_err(|e| foreign::not_a_model(&map, &file, e))?;
        Ok(Model { map, ..m })
    }

    /// Whether a constant's bytes are a slice of the model's mapped files, and not a separate allocation.
    pub fn maps(&self, c: &ConstData) -> bool {
        tensor::inside(&self.map, c.bytes()) || self.external.holds(c.bytes())
    }

    /// Like [`Model::open`], for a model in memory; `file` names it in errors.
    pub fn parse(data: Bytes, external: External, file: &str) -> Result<Model> {
        wire::check(&data, wire::Kind::Model, file)?;
        let proto = ModelProto::decode(data).map_err(|e| bad(file, format!("not an ONNX model: {e}")))?;
        Model::new(proto, external, file)
    }

    /// Builds a model from a decoded message.
    pub fn new(proto: ModelProto, external: External, file: &str) -> Result<Model> {
        if proto.graph.is_none() {
            return Err(bad(file, "the model has no graph"));
        }
        // Every node searches its list of operator sets, so their number is limited.
        let sets = proto.functions.iter().map(|f| &f.opset_import).chain([&proto.opset_import]);
        if let Some(n) = sets.map(Vec::len).find(|n| *n > OPSETS) {
            return Err(bad(file, format!("{n} operator sets are imported; at most {OPSETS} are allowed")));
        }
        Ok(Model { file: file.into(), proto, external, map: Bytes::new(), exposed: 0 })
    }

    /// The decoded file.
    pub fn proto(&self) -> &ModelProto {
        &self.proto
    }

    /// The model after `change`, which may replace weights, fix sizes or drop outputs. The result is checked
    /// where it is used, like a file.
    ///
    /// # Errors
    /// [`Error::Format`] if the change removes the graph; the errors of `change`.
    pub fn edit(mut self, change: impl FnOnce(&mut ModelProto) -> Result<()>) -> Result<Model> {
        change(&mut self.proto)?;
        self.graph()?;
        Ok(self)
    }

    pub(super) fn graph(&self) -> Result<&GraphProto> {
        self.proto.graph.as_ref().ok_or_else(|| bad(&self.file, "the model has no graph"))
    }

    /// Version of the operator set imported for `domain`; 0 if it is not imported. The default domain is
    /// `""`; it has version 1 if the model imports nothing.
    pub fn opset(&self, domain: &str) -> i64 {
        opset(&self.proto.opset_import, domain)
    }

    /// The functions that the model defines.
    pub(super) fn functions(&self) -> HashMap<(&str, &str, &str), &FunctionProto> {
        self.proto.functions.iter().map(|f| ((&*f.domain, &*f.name, &*f.overload), f)).collect()
    }

    /// Run-time inputs in the model's order: the graph's inputs that have no initializer.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for sparse tensors and for types that [`DType`] lacks; [`Error::Format`].
    pub fn inputs(&self) -> Result<Vec<Port>> {
        let g = self.graph()?;
        let weights: HashSet<&str> = order::initializers(g).collect();
        let mut seen = HashSet::new();
        if let Some(v) = g.input.iter().find(|v| !seen.insert(v.name.as_str())) {
            return Err(bad(&self.file, format!("input '{}' is declared twice", v.name)));
        }
        g.input.iter().filter(|v| !weights.contains(v.name.as_str())).map(|v| self.port(v)).collect()
    }

    /// The file's declarations of the outputs.
    fn declared_outputs(&self) -> Result<&[ValueInfoProto]> {
        let all = &self.graph()?.output;
        Ok(&all[..all.len().saturating_sub(self.exposed)])
    }

    /// Names of the outputs, in the model's order.
    ///
    /// # Errors
    /// [`Error::Format`] for a model without a graph.
    pub fn output_names(&self) -> Result<Vec<String>> {
        Ok(self.declared_outputs()?.iter().map(|v| v.name.clone()).collect())
    }

    /// The outputs whose types the file declares.
    pub(super) fn typed_outputs(&self) -> Result<Vec<Port>> {
        self.declared_outputs()?.iter().filter(|v| is_typed(v)).map(|v| self.port(v)).collect()
    }

    /// Outputs in the model's order. The type of an output that declares none follows from the declared
    /// inputs, if the model is one graph for them.
    ///
    /// # Errors
    /// The errors of [`Model::inputs`]; [`Error::Unsupported`] for a type that is not declared and does not
    /// follow, and the errors of [`Model::import`] on the way to it.
    pub fn outputs(&self) -> Result<Vec<Port>> {
        let declared = self.declared_outputs()?;
        let Some(open) = declared.iter().find(|v| !is_typed(v)) else {
            return declared.iter().map(|v| self.port(v)).collect();
        };
        match self.outcome(&[], &[])? {
            Outcome::Graph(g) => self.ports_of(declared, g.output_types()),
            Outcome::Staged(why) => Err(Error::unsupported(
                format!("{}: the type of '{}', which the file does not declare: {why}", self.file, open.name),
                "Declare the output's type in the model",
            )),
        }
    }

    /// Like [`Model::outputs`], with `None` for an output whose type is not declared and does not follow.
    /// Such a model may run: a run knows its inputs' sizes and values, from which the type follows.
    ///
    /// # Errors
    /// The errors of [`Model::inputs`].
    pub fn known_outputs(&self) -> Result<Vec<(String, Option<Port>)>> {
        let declared = self.declared_outputs()?;
        let port = |v: &ValueInfoProto| is_typed(v).then(|| self.port(v)).transpose();
        let mut ports = declared.iter().map(port).collect::<Result<Vec<_>>>()?;
        if ports.iter().any(Option::is_none) {
            // What prevents the inference is no fault of the model, or a run reports it.
            if let Ok(Outcome::Graph(g)) = self.outcome(&[], &[]) {
                ports = self.ports_of(declared, g.output_types())?.into_iter().map(Some).collect();
            }
        }
        Ok(declared.iter().map(|v| v.name.clone()).zip(ports).collect())
    }

    /// The outputs, with the types of the graph for those that declare none.
    fn ports_of(&self, declared: &[ValueInfoProto], types: Vec<TensorType>) -> Result<Vec<Port>> {
        let one = |(v, t): (&ValueInfoProto, TensorType)| match is_typed(v) {
            true => self.port(v),
            false => {
                let ty = PortType::Tensor { dtype: t.dtype, shape: Some(t.shape) };
                Ok(Port { name: v.name.clone(), ty })
            }
        };
        declared.iter().zip(types).map(one).collect()
    }

    /// The mapped model file; empty for models in memory.
    pub(super) fn mapped(&self) -> &Bytes {
        &self.map
    }

    pub(super) fn port(&self, v: &ValueInfoProto) -> Result<Port> {
        let what = format!("{}: '{}'", self.file, v.name);
        let t = v.r#type.as_ref().ok_or_else(|| bad(&what, "no type is declared"))?;
        Ok(Port { name: v.name.clone(), ty: port_type(t, &v.name, &what)? })
    }

    /// Checks that every node can be imported, without reading any weight.
    ///
    /// # Errors
    /// [`Error::UnsupportedOps`] lists all operators that the importer cannot build; `backend` is named in
    /// its message.
    pub fn check(&self, backend: &str) -> Result<()> {
        let g = self.graph()?;
        let mut check = Check {
            functions: self.functions(),
            backend,
            found: vec![],
            at: BTreeMap::new(),
            seen: HashSet::new(),
            calls: vec![],
        };
        check.nodes(&g.node, &self.proto.opset_import, false);
        // A work list is used instead of recursion, because functions may call each other in a long chain.
        while let Some(f) = check.calls.pop() {
            check.nodes(&f.node, &f.opset_import, true);
        }
        if check.found.is_empty() { Ok(()) } else { Err(Error::UnsupportedOps(check.found)) }
    }

    /// Builds the graph. Inputs that `shapes` does not name keep their declared shapes, with each symbol that
    /// the given shapes determine replaced by its size. Shapes may be symbolic.
    ///
    /// # Errors
    /// The errors of [`Model::check`]; [`Error::Argument`] and [`Error::Shape`] for shapes that do not fit
    /// the declared ones or the operators; [`Error::Format`] for values that are missing, defined twice or
    /// part of a cycle; [`Error::Unsupported`] if a shape depends on the value of an input, and for parts of
    /// operators and of the format that are not supported.
    pub fn import(&self, shapes: &[(&str, Shape)]) -> Result<Imported> {
        self.import_with(shapes, &[])
    }

    /// Like [`Model::import`], for models in which an input's value determines a shape (the shape operand of
    /// a Reshape, the axes of a reduction). Such a value is taken from `values`, if it is small, and built
    /// into the graph, which is then valid for that value only; [`Imported::fixed`] names these inputs. The
    /// other entries of `values` are ignored.
    pub fn import_with(&self, shapes: &[(&str, Shape)], values: &[(&str, ConstData)]) -> Result<Imported> {
        self.check("")?;
        match import::import(self, shapes, values, &Limits::whole())? {
            Outcome::Graph(g) => Ok(*g),
            Outcome::Staged(why) => Err(Error::unsupported(
                format!("{} as one graph: {why}", self.file),
                "Run the model in stages, or replace the value that decides how it goes on by a constant",
            )),
        }
    }

    /// Decides how the model runs for these inputs. This is [`Model::import_with`], but for a model that
    /// cannot be one graph it returns [`Outcome::Staged`] instead of an error. Models with long loops, or
    /// with loops whose trip count or condition comes from an input, are staged too, because a staged run
    /// compiles the body of a loop once.
    pub fn outcome(&self, shapes: &[(&str, Shape)], values: &[(&str, ConstData)]) -> Result<Outcome> {
        self.outcome_with(shapes, values, &RunOptions::default())
    }

    /// Like [`Model::outcome`], with limits on the loops that are unrolled.
    pub fn outcome_with(
        &self,
        shapes: &[(&str, Shape)],
        values: &[(&str, ConstData)],
        options: &RunOptions,
    ) -> Result<Outcome> {
        self.check("")?;
        import::import(self, shapes, values, &Limits::new(options.clone()))
    }

    /// Whether the model has an operator of [`ops::RANDOM`], which draws random numbers. If it does, the ONNX
    /// specification determines only the types and shapes of the model's results. (A Dropout in training mode
    /// also draws random numbers, but is not detected.)
    pub fn draws(&self) -> bool {
        fn any(nodes: &[NodeProto]) -> bool {
            nodes.iter().any(|n| {
                ops::RANDOM.contains(&n.op_type.as_str())
                    || n.attribute.iter().filter_map(|a| a.g.as_deref()).any(|g| any(&g.node))
            })
        }
        let functions = self.proto.functions.iter().any(|f| any(&f.node));
        functions || self.proto.graph.as_ref().is_some_and(|g| any(&g.node))
    }

    /// Runs the model in stages. This is for models in which computed values determine the rest of the
    /// computation. `inputs` are in the order of [`Model::inputs`], the results in the order of
    /// [`Model::outputs`]. [`Placement`] reports the parts that were computed on the device and on the host.
    ///
    /// # Errors
    /// The errors of [`Model::import`], and the errors of the engine.
    pub fn run_staged(&self, inputs: &[Datum], engine: Box<dyn Engine>) -> Result<(Vec<Datum>, Placement)> {
        self.run_staged_with(inputs, engine, &RunOptions::default())
    }

    /// Like [`Model::run_staged`], with limits and a way to interrupt it.
    ///
    /// # Errors
    /// The errors of [`Model::run_staged`]; [`Error::Endless`] for a loop that exceeds its limit;
    /// [`Error::Interrupted`] if the caller asked to interrupt the run.
    pub fn run_staged_with(
        &self,
        inputs: &[Datum],
        engine: Box<dyn Engine>,
        options: &RunOptions,
    ) -> Result<(Vec<Datum>, Placement)> {
        self.check("")?;
        import::run_staged(self, inputs, engine, options)
    }
}

/// Collects unsupported operators, one entry per operator and reason, in the order of first use.
struct Check<'m> {
    functions: HashMap<(&'m str, &'m str, &'m str), &'m FunctionProto>,
    backend: &'m str,
    found: Vec<UnsupportedOp>,
    at: BTreeMap<(String, String, String), usize>,
    /// Functions already put on the work list.
    seen: HashSet<(&'m str, &'m str, &'m str)>,
    /// The work list of functions to check.
    calls: Vec<&'m FunctionProto>,
}

impl<'m> Check<'m> {
    fn nodes(&mut self, nodes: &'m [NodeProto], opsets: &'m [OperatorSetIdProto], in_function: bool) {
        for (i, n) in nodes.iter().enumerate() {
            if let Some(&f) = self.functions.get(&function::key(n)) {
                if self.seen.insert(function::key(n)) {
                    self.calls.push(f);
                }
                continue;
            }
            let version = opset(opsets, &n.domain);
            if let Some(reason) = refuse(n, version, in_function) {
                let key = (n.domain.clone(), n.op_type.clone(), reason.clone());
                let k = *self.at.entry(key).or_insert_with(|| {
                    self.found.push(UnsupportedOp {
                        op: n.op_type.clone(),
                        domain: n.domain.clone(),
                        opset: version,
                        nodes: vec![],
                        backend: self.backend.into(),
                        reason,
                    });
                    self.found.len() - 1
                });
                self.found[k].nodes.push(import::node_name(n, i));
            }
            for g in n.attribute.iter().filter_map(|a| a.g.as_deref()) {
                self.nodes(&g.node, opsets, in_function);
            }
        }
    }
}

fn refuse(n: &NodeProto, opset: i64, in_function: bool) -> Option<String> {
    let Some(row) = ops::find(&n.domain, &n.op_type) else {
        return Some("the importer has no such operator".into());
    };
    if opset < row.since {
        return Some(format!("supported from operator set {} on", row.since));
    }
    let latest = ops::latest(&n.domain);
    if latest == 0 {
        return Some(format!("the importer supports no operator set of {}", n.domain));
    }
    if opset > latest {
        return Some(format!("operator sets after {latest} are not supported"));
    }
    if !in_function && n.attribute.iter().any(|a| !a.ref_attr_name.is_empty()) {
        return Some("refers to an attribute of a function, but is not inside a function".into());
    }
    let odd = n.attribute.iter().find(|a| !row.attrs.contains(&a.name.as_str()))?;
    Some(format!("attribute '{}' is not supported", odd.name))
}

/// Whether the file declares the type of an input or output.
fn is_typed(v: &ValueInfoProto) -> bool {
    v.r#type.as_ref().is_some_and(|t| t.value.is_some())
}

fn port_type(t: &TypeProto, name: &str, what: &str) -> Result<PortType> {
    let none = || bad(what, "no type is declared");
    let shape = |t: &proto::TensorType| -> Option<Shape> {
        let dim = |(k, d): (usize, &proto::Dimension)| match &d.value {
            Some(DimValue::Value(n)) if *n >= 0 => Dim::from(*n as usize),
            Some(DimValue::Param(p)) if !p.is_empty() => Dim::sym(p),
            // Some exporters write -1 for an open size.
            _ => Dim::sym(&format!("{name}.{k}")),
        };
        t.shape.as_ref().map(|s| s.dim.iter().enumerate().map(dim).collect())
    };
    let inner = |t: &Option<Box<TypeProto>>| {
        t.as_deref().ok_or_else(none).and_then(|t| port_type(t, name, what)).map(Box::new)
    };
    Ok(match t.value.as_ref().ok_or_else(none)? {
        TypeValue::Tensor(t) if t.elem_type == tensor::STRING => PortType::Text { shape: shape(t) },
        TypeValue::Tensor(t) => {
            PortType::Tensor { dtype: tensor::dtype(t.elem_type, what)?, shape: shape(t) }
        }
        TypeValue::Sequence(e) => PortType::Sequence(inner(&e.elem_type)?),
        TypeValue::Optional(e) => PortType::Optional(inner(&e.elem_type)?),
        TypeValue::Map(m) => PortType::Map(inner(&m.value_type)?),
        TypeValue::SparseTensor(_) => {
            return Err(Error::unsupported(
                format!("{what} is a sparse tensor"),
                "Only dense tensors are supported",
            ));
        }
    })
}
