//! ONNX files: what they declare, and changes to them before a session is made.

use super::ports::packed;
use crate::calls::{self, Work};
use crate::errors::{OrRaise, argument, exception};
use crate::interface::{View, numpy_view};
use crate::tensor::Tensor;
use bytes::Bytes;
use halcyon::formats::mmap;
use halcyon::formats::onnx::export::{ExportOptions, write};
use halcyon::formats::onnx::ops::{self, LATEST};
use halcyon::formats::onnx::proto::{
    AttributeProto, DimValue, Dimension, EXTERNAL, GraphProto, NodeProto, TensorType, TypeProto, TypeValue,
    ValueInfoProto, attribute,
};
use halcyon::formats::onnx::tensor::{self, External};
use halcyon::formats::onnx::{Model, Outcome};
use halcyon::ir::passes::{cse, fold, simplify};
use halcyon::{ConstData, DType, Error};
use halcyon_ir::{Dim, TensorType as InferredType};
use prost::Message;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::{PyDict, PyList, PyString};
use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

/// ONNX's names of element types, by their numbers in `TensorProto.DataType`.
const TYPES: [&str; 27] = [
    "undefined",
    "float",
    "uint8",
    "int8",
    "uint16",
    "int16",
    "int32",
    "int64",
    "string",
    "bool",
    "float16",
    "double",
    "uint32",
    "uint64",
    "complex64",
    "complex128",
    "bfloat16",
    "float8e4m3fn",
    "float8e4m3fnuz",
    "float8e5m2",
    "float8e5m2fnuz",
    "uint4",
    "int4",
    "float4e2m1",
    "float8e8m0",
    "uint2",
    "int2",
];
/// The oldest version of the file format in which an initializer need not be an input. In older files the
/// initializers among the inputs are constants.
const SEPARATE_INITIALIZERS: i64 = 4;

/// Where a model came from.
enum Source {
    File(PathBuf),
    Memory(Bytes),
}

/// An ONNX model, before it is on a backend.
#[pyclass(frozen, module = "halcyon._native")]
pub(crate) struct OnnxModel {
    pub(super) file: Model,
    source: Arc<Source>,
    /// The types of the outputs that follow from the declared inputs, after [`OnnxModel::validate`]. Not set
    /// if the model is not one graph.
    inferred: OnceLock<Vec<InferredType>>,
}

/// Name, type and sizes of an input or output.
type Declared<'py> = (String, String, Bound<'py, PyList>);

fn element(code: i32) -> &'static str {
    usize::try_from(code).ok().and_then(|c| TYPES.get(c)).copied().unwrap_or("undefined")
}

/// The type as text: `tensor(float)`, `seq(map(int64,tensor(float)))`.
fn type_text(t: Option<&TypeProto>) -> String {
    match t.and_then(|t| t.value.as_ref()) {
        None => "undefined".into(),
        Some(TypeValue::Tensor(t)) => format!("tensor({})", element(t.elem_type)),
        Some(TypeValue::SparseTensor(t)) => format!("sparse_tensor({})", element(t.elem_type)),
        Some(TypeValue::Sequence(e)) => format!("seq({})", type_text(e.elem_type.as_deref())),
        Some(TypeValue::Optional(e)) => format!("optional({})", type_text(e.elem_type.as_deref())),
        Some(TypeValue::Map(m)) => {
            format!("map({},{})", element(m.key_type), type_text(m.value_type.as_deref()))
        }
    }
}

/// The tensor in a type, if it is a tensor or an optional tensor.
fn tensor_of(t: &TypeProto) -> Option<&TensorType> {
    match t.value.as_ref()? {
        TypeValue::Tensor(t) | TypeValue::SparseTensor(t) => Some(t),
        TypeValue::Optional(e) => tensor_of(e.elem_type.as_deref()?),
        _ => None,
    }
}

fn dims(v: &ValueInfoProto) -> &[Dimension] {
    let shape = v.r#type.as_ref().and_then(tensor_of).and_then(|t| t.shape.as_ref());
    shape.map_or(&[], |s| &s.dim)
}

/// A dimension's size, its name, or `None`.
fn size<'py>(py: Python<'py>, d: &Dimension) -> Bound<'py, PyAny> {
    match &d.value {
        Some(DimValue::Value(n)) if *n >= 0 => match n.into_pyobject(py) {
            Ok(n) => n.into_any(),
            Err(never) => match never {},
        },
        Some(DimValue::Param(p)) if !p.is_empty() => PyString::new(py, p).into_any(),
        _ => py.None().into_bound(py),
    }
}

fn declared<'py>(py: Python<'py>, v: &ValueInfoProto) -> PyResult<Declared<'py>> {
    let sizes = PyList::new(py, dims(v).iter().map(|d| size(py, d)))?;
    Ok((v.name.clone(), type_text(v.r#type.as_ref()), sizes))
}

/// The name of a dimension.
fn symbol(d: &Dimension) -> Option<&str> {
    match &d.value {
        Some(DimValue::Param(p)) if !p.is_empty() => Some(p),
        _ => None,
    }
}

/// An output's declaration, completed by its inferred type: sizes that the file fixes or that follow from the
/// inputs, then names in the file, then names of sizes of the inputs.
fn completed<'py>(
    py: Python<'py>,
    v: &ValueInfoProto,
    inferred: Option<&InferredType>,
    names: &HashSet<&str>,
) -> PyResult<Declared<'py>> {
    let Some(t) = inferred else { return declared(py, v) };
    let text = match v.r#type.as_ref().is_some_and(|t| t.value.is_some()) {
        true => type_text(v.r#type.as_ref()),
        false => format!("tensor({})", element(t.dtype.row().onnx)),
    };
    let own = dims(v);
    let one = |(k, d): (usize, &Dim)| {
        let own = own.get(k).filter(|_| own.len() == t.shape.rank());
        let fixed = own.filter(|d| matches!(d.value, Some(DimValue::Value(n)) if n >= 0));
        let follows = d.known().and_then(|n| i64::try_from(n).ok()).map(|n| size_of(DimValue::Value(n)));
        let inferred = names.get(d.to_string().as_str()).map(|n| size_of(DimValue::Param((*n).into())));
        let open = Dimension::default();
        let named = own.filter(|d| symbol(d).is_some());
        size(py, fixed.or(follows.as_ref()).or(named).or(inferred.as_ref()).unwrap_or(&open))
    };
    let sizes = PyList::new(py, t.shape.iter().enumerate().map(one).collect::<Vec<_>>())?;
    Ok((v.name.clone(), text, sizes))
}

fn size_of(value: DimValue) -> Dimension {
    Dimension { value: Some(value) }
}

fn initializers(g: &GraphProto) -> HashSet<&str> {
    let sparse = g.sparse_initializer.iter().filter_map(|s| s.values.as_ref());
    g.initializer.iter().chain(sparse).map(|t| t.name.as_str()).collect()
}

#[pymethods]
impl OnnxModel {
    /// Opens a file. Weights stay in the file until they are read.
    #[staticmethod]
    fn open(py: Python<'_>, path: PathBuf) -> PyResult<OnnxModel> {
        let file = py.work(|| Model::open(&path))?;
        Ok(OnnxModel { file, source: Arc::new(Source::File(path)), inferred: OnceLock::new() })
    }

    /// A model in memory. External data is read from `folder`, or from `files`, which maps names to contents.
    #[staticmethod]
    #[pyo3(signature = (data, folder = None, files = None))]
    fn parse(
        py: Python<'_>,
        data: PyBackedBytes,
        folder: Option<PathBuf>,
        files: Option<HashMap<String, PyBackedBytes>>,
    ) -> PyResult<OnnxModel> {
        let mut external = match folder {
            Some(f) => External::in_folder_of(&f.join("model.onnx")),
            None => External::none(),
        };
        for (name, contents) in files.unwrap_or_default() {
            external = external.with_file(&name, Bytes::from_owner(contents));
        }
        let data = Bytes::from_owner(data);
        let file = py.work(|| Model::parse(data.clone(), external, "a model in memory"))?;
        Ok(OnnxModel { file, source: Arc::new(Source::Memory(data)), inferred: OnceLock::new() })
    }

    /// Name, type and sizes of each input that a run needs.
    fn inputs<'py>(&self, py: Python<'py>) -> PyResult<Vec<Declared<'py>>> {
        let Some(g) = &self.file.proto().graph else { return Ok(vec![]) };
        let stored = initializers(g);
        g.input.iter().filter(|v| !stored.contains(&*v.name)).map(|v| declared(py, v)).collect()
    }

    /// Name, type and sizes of each output. What the file does not declare is what [`OnnxModel::validate`]
    /// found.
    fn outputs<'py>(&self, py: Python<'py>) -> PyResult<Vec<Declared<'py>>> {
        let Some(g) = &self.file.proto().graph else { return Ok(vec![]) };
        // The names that users know. Sizes that the file leaves open have names of the importer's.
        let names: HashSet<&str> = g.input.iter().flat_map(dims).filter_map(symbol).collect();
        let types = self.inferred.get().map_or(&[][..], Vec::as_slice);
        g.output.iter().enumerate().map(|(k, v)| completed(py, v, types.get(k), &names)).collect()
    }

    /// Name, type and sizes of each input with a stored value, which a run may replace.
    fn overridable<'py>(&self, py: Python<'py>) -> PyResult<Vec<Declared<'py>>> {
        let proto = self.file.proto();
        let Some(g) = proto.graph.as_ref().filter(|_| proto.ir_version >= SEPARATE_INITIALIZERS) else {
            return Ok(vec![]);
        };
        let stored = initializers(g);
        g.input.iter().filter(|v| stored.contains(&*v.name)).map(|v| declared(py, v)).collect()
    }

    /// The description in the file.
    fn metadata<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let (m, d) = (self.file.proto(), PyDict::new(py));
        d.set_item("producer_name", &m.producer_name)?;
        d.set_item("producer_version", &m.producer_version)?;
        d.set_item("domain", &m.domain)?;
        d.set_item("description", &m.doc_string)?;
        d.set_item("version", m.model_version)?;
        d.set_item("ir_version", m.ir_version)?;
        let graph = m.graph.as_ref();
        d.set_item("graph_name", graph.map_or("", |g| &g.name))?;
        d.set_item("graph_description", graph.map_or("", |g| &g.doc_string))?;
        let opsets: Vec<(&str, i64)> =
            m.opset_import.iter().map(|o| (o.domain.as_str(), o.version)).collect();
        d.set_item("opsets", opsets)?;
        let custom = PyDict::new(py);
        m.metadata_props.iter().try_for_each(|p| custom.set_item(&p.key, &p.value))?;
        d.set_item("custom", custom)?;
        Ok(d)
    }

    /// The number of nodes, the number of stored tensors and their elements.
    fn counts(&self) -> (usize, usize, u64) {
        let s = self.file.summary();
        (s.nodes, s.weights.len(), s.weights.iter().map(|w| w.elements).sum())
    }

    /// Finds defects that do not depend on the inputs' sizes: unknown operators, names without a source,
    /// wrong element types.
    fn validate(&self, py: Python<'_>) -> PyResult<()> {
        let _call = calls::call(py)?;
        match py.detach(|| self.file.outcome(&[], &[])) {
            Err(e @ (Error::Format { .. } | Error::UnsupportedOps(_) | Error::DType { .. })) => {
                Err(exception(e))
            }
            Ok(Outcome::Graph(g)) => {
                self.inferred.get_or_init(|| g.output_types());
                Ok(())
            }
            // What else fails may work with sizes that are known.
            _ => Ok(()),
        }
    }

    /// The model with sizes for named dimensions, and for dimensions with a denotation such as `DATA_BATCH`.
    fn with_sizes(
        &self,
        py: Python<'_>,
        names: HashMap<String, i64>,
        denotations: HashMap<String, i64>,
    ) -> PyResult<OnnxModel> {
        let mut sizes: Vec<((usize, usize), i64)> = vec![];
        if !denotations.is_empty() {
            for (place, denotation) in self.denotations()? {
                sizes.extend(denotations.get(&denotation).map(|n| (place, *n)));
            }
        }
        let _call = calls::call(py)?;
        let file = py.detach(|| {
            self.file.clone().edit(|m| {
                let Some(g) = &mut m.graph else { return Ok(()) };
                for ((input, axis), n) in sizes {
                    let dim = g.input.get_mut(input).and_then(|v| dims_mut(v)?.get_mut(axis));
                    if let Some(d) = dim {
                        d.value = Some(DimValue::Value(n));
                    }
                }
                let all = g.input.iter_mut().chain(&mut g.output).chain(&mut g.value_info);
                for d in all.filter_map(dims_mut).flatten() {
                    if let Some(DimValue::Param(p)) = &d.value
                        && let Some(n) = names.get(p)
                    {
                        d.value = Some(DimValue::Value(*n));
                    }
                }
                Ok(())
            })
        });
        self.changed(file.or_raise()?)
    }

    /// The model in which random operators without a seed have one that follows from `seed`.
    fn with_seed(&self, seed: u64) -> PyResult<OnnxModel> {
        let mut next = seed;
        let file = self.file.clone().edit(|m| {
            if let Some(g) = &mut m.graph {
                seed_nodes(&mut g.node, &mut next);
            }
            m.functions.iter_mut().for_each(|f| seed_nodes(&mut f.node, &mut next));
            Ok(())
        });
        self.changed(file.or_raise()?)
    }

    /// The model with other values of stored tensors: the name, the value, and the element type whose bits
    /// an array holds, for types that NumPy lacks. `external` requires that each is stored in another file.
    /// Returns the model and the names that it does not store.
    fn with_initializers(
        &self,
        values: Vec<(String, Bound<'_, PyAny>, Option<String>)>,
        external: bool,
    ) -> PyResult<(OnnxModel, Vec<String>)> {
        let mut unknown = vec![];
        let mut new = HashMap::new();
        let stored = self.file.proto().graph.iter().flat_map(|g| &g.initializer);
        let stored: HashMap<&str, _> = stored.map(|t| (t.name.as_str(), t)).collect();
        for (name, value, own) in &values {
            let data = match own {
                None => host_data(value)?,
                Some(own) => bits(value, crate::convert::dtype(own)?)?,
            };
            let Some(old) = stored.get(name.as_str()) else {
                unknown.push(name.clone());
                continue;
            };
            let sizes: Vec<i64> = data.dims.iter().map(|d| *d as i64).collect();
            if old.data_type != data.dtype.row().onnx || old.dims != sizes {
                let what = format!(
                    "the model's initializer \"{name}\" is {}{:?}, the value is {}{sizes:?}",
                    element(old.data_type),
                    old.dims,
                    element(data.dtype.row().onnx),
                );
                return Err(argument("initializer", what));
            }
            if external && old.data_location != EXTERNAL {
                let what = format!("\"{name}\" is not stored as external data");
                return Err(argument("add_external_initializers", what));
            }
            new.insert(name.clone(), tensor::encode(&data, name));
        }
        let file = self.file.clone().edit(|m| {
            for t in m.graph.iter_mut().flat_map(|g| &mut g.initializer) {
                if let Some(other) = new.remove(&t.name) {
                    *t = other;
                }
            }
            Ok(())
        });
        Ok((self.changed(file.or_raise()?)?, unknown))
    }

    /// The model in which inputs with a stored value need a value for each run.
    fn without_initializers(&self, names: HashSet<String>) -> PyResult<OnnxModel> {
        let file = self.file.clone().edit(|m| {
            if let Some(g) = &mut m.graph {
                g.initializer.retain(|t| !names.contains(&t.name));
                g.sparse_initializer.retain(|t| t.values.as_ref().is_none_or(|t| !names.contains(&t.name)));
            }
            Ok(())
        });
        self.changed(file.or_raise()?)
    }

    /// The model with only these outputs. What they do not need is not computed.
    fn with_outputs(&self, names: HashSet<String>) -> PyResult<OnnxModel> {
        let file = self.file.clone().edit(|m| {
            if let Some(g) = &mut m.graph {
                g.output.retain(|v| names.contains(&v.name));
            }
            Ok(())
        });
        self.changed(file.or_raise()?)
    }

    /// Writes the model as it is imported, or with `optimize` after the passes that do not depend on a
    /// device.
    fn write(&self, py: Python<'_>, path: PathBuf, optimize: bool) -> PyResult<()> {
        py.work(|| {
            self.file.check("")?;
            let mut graph = self.file.import(&[])?.graph;
            if optimize {
                graph = fold::run_lean(&graph)?.0;
                graph = simplify::run(&graph)?.0;
                graph = cse::run(&graph)?.0;
            }
            write(&graph, &path, &ExportOptions { opset: LATEST, external_data: false })?;
            Ok(())
        })
    }
}

/// Whether a node, or one inside of it, repeats a graph.
fn repeats(nodes: &[NodeProto]) -> bool {
    nodes.iter().any(|n| {
        let inner = |g: &GraphProto| repeats(&g.node);
        matches!(n.op_type.as_str(), "Loop" | "Scan" | "SequenceMap")
            || n.attribute.iter().any(|a| a.g.as_deref().is_some_and(inner) || a.graphs.iter().any(inner))
    })
}

impl OnnxModel {
    /// Whether the model has loops.
    pub(super) fn has_loops(&self) -> bool {
        let proto = self.file.proto();
        let graph = proto.graph.iter().map(|g| &g.node);
        graph.chain(proto.functions.iter().map(|f| &f.node)).any(|nodes| repeats(nodes))
    }

    fn changed(&self, file: Model) -> PyResult<OnnxModel> {
        Ok(OnnxModel { file, source: self.source.clone(), inferred: OnceLock::new() })
    }

    /// The denotations of the inputs' dimensions by input and axis.
    fn denotations(&self) -> PyResult<Vec<((usize, usize), String)>> {
        let data = match &*self.source {
            Source::File(path) => mmap::open(Path::new(path)).or_raise()?,
            Source::Memory(data) => data.clone(),
        };
        let file = denoted::File::decode(data).map_err(|e| argument("the model", e.to_string()))?;
        let inputs = file.graph.into_iter().flat_map(|g| g.inputs).enumerate();
        let dims = inputs.flat_map(|(i, v)| {
            let shape = v.kind.and_then(|k| k.tensor).and_then(|t| t.shape);
            let dims = shape.into_iter().flat_map(|s| s.dims).enumerate();
            dims.map(move |(axis, d)| ((i, axis), d.denotation))
        });
        Ok(dims.filter(|(_, d)| !d.is_empty()).collect())
    }
}

fn dims_mut(v: &mut ValueInfoProto) -> Option<&mut Vec<Dimension>> {
    fn of(t: &mut TypeProto) -> Option<&mut Vec<Dimension>> {
        match t.value.as_mut()? {
            TypeValue::Tensor(t) | TypeValue::SparseTensor(t) => Some(&mut t.shape.as_mut()?.dim),
            TypeValue::Sequence(e) | TypeValue::Optional(e) => of(e.elem_type.as_deref_mut()?),
            TypeValue::Map(m) => of(m.value_type.as_deref_mut()?),
        }
    }
    of(v.r#type.as_mut()?)
}

/// Gives each random operator without a seed one of its own. `next` is the state of the numbers. The depth of
/// nested graphs is limited by the decoder.
fn seed_nodes(nodes: &mut [NodeProto], next: &mut u64) {
    for n in nodes {
        n.attribute.iter_mut().filter_map(|a| a.g.as_deref_mut()).for_each(|g| seed_nodes(&mut g.node, next));
        let is_dropout = n.op_type == "Dropout";
        let draws = is_dropout || ops::RANDOM.contains(&n.op_type.as_str());
        if !draws || n.attribute.iter().any(|a| a.name == "seed") {
            continue;
        }
        // A linear congruential generator (Knuth, MMIX): its high bits are good enough for keys.
        *next = next.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        // Dropout's seed is an integer, those of the other operators are floats. 24 bits fit both.
        let bits = *next >> 40;
        let seed = AttributeProto { name: "seed".into(), ..AttributeProto::default() };
        n.attribute.push(match is_dropout {
            true => AttributeProto { r#type: attribute::INT, i: bits as i64, ..seed },
            false => AttributeProto { r#type: attribute::FLOAT, f: bits as f32, ..seed },
        });
    }
}

/// The tensor whose bits an array of unsigned integers holds. Elements of fewer than 8 bits are in the low
/// bits of each byte.
fn bits(array: &Bound<'_, PyAny>, dtype: DType) -> PyResult<ConstData> {
    match numpy_view(array)? {
        Some(view) if dtype.bits() < 8 && view.dtype.size() == 1 => packed(&view, dtype),
        Some(view) if view.dtype.size() == dtype.size() => View { dtype, ..view }.copied(),
        _ => Err(argument("initializer", format!("the array holds no bits of {dtype}"))),
    }
}

/// An array or a tensor as host data.
pub(super) fn host_data(value: &Bound<'_, PyAny>) -> PyResult<ConstData> {
    if let Ok(t) = value.cast::<Tensor>() {
        let t = t.get().0.clone();
        return value.py().work(|| t.to_data());
    }
    let view = match value.hasattr("__array_struct__")? {
        true => numpy_view(value)?,
        false => None,
    };
    match view {
        Some(v) => v.copied(),
        None => {
            let what = format!("a value of the type {} is no array of numbers", value.get_type().name()?);
            Err(argument("initializer", what))
        }
    }
}

/// The parts of onnx.proto that hold the denotations of dimensions. The importer's own messages skip them.
mod denoted {
    use prost::Message;

    #[derive(Message)]
    pub(super) struct File {
        #[prost(message, optional, tag = "7")]
        pub(super) graph: Option<Graph>,
    }
    #[derive(Message)]
    pub(super) struct Graph {
        #[prost(message, repeated, tag = "11")]
        pub(super) inputs: Vec<Value>,
    }
    #[derive(Message)]
    pub(super) struct Value {
        #[prost(message, optional, tag = "2")]
        pub(super) kind: Option<Kind>,
    }
    #[derive(Message)]
    pub(super) struct Kind {
        #[prost(message, optional, tag = "1")]
        pub(super) tensor: Option<Tensor>,
    }
    #[derive(Message)]
    pub(super) struct Tensor {
        #[prost(message, optional, tag = "2")]
        pub(super) shape: Option<Shape>,
    }
    #[derive(Message)]
    pub(super) struct Shape {
        #[prost(message, repeated, tag = "1")]
        pub(super) dims: Vec<Dim>,
    }
    #[derive(Message)]
    pub(super) struct Dim {
        #[prost(string, tag = "3")]
        pub(super) denotation: String,
    }
}
