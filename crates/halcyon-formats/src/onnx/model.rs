//! A model file: what it takes and gives, what of it is supported, and its graph.

use super::import::{self, Imported};
use super::ops;
use super::proto::{self, DimValue, GraphProto, ModelProto, TypeValue, ValueInfoProto};
use super::tensor::{self, External};
use crate::bad;
use bytes::Bytes;
use halcyon_ir::error::UnsupportedOp;
use halcyon_ir::{ConstData, DType, Dim, Error, Result, Shape};
use prost::Message;
use std::collections::{BTreeMap, HashSet};
use std::path::Path;

/// An open model. Its weights stay in their files until something reads them.
#[derive(Debug)]
pub struct Model {
    pub(super) file: String,
    pub(super) proto: ModelProto,
    pub(super) external: External,
}

/// An input or output of a model, as declared.
#[derive(Clone, Debug, PartialEq)]
pub struct Port {
    pub name: String,
    pub dtype: DType,
    /// Symbols where the model names a size; a size it leaves open gets a symbol made of the port's name and the axis.
    /// `None` where even the rank is open.
    pub shape: Option<Shape>,
}

impl Model {
    /// Maps and decodes a model file. External data lies beside it.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Format`] if it is not an ONNX model.
    pub fn open(path: &Path) -> Result<Model> {
        Model::parse(crate::mmap::open(path)?, External::beside(path), &path.display().to_string())
    }

    /// As [`Model::open`], of a model in memory; `file` names it in errors.
    pub fn parse(data: Bytes, external: External, file: &str) -> Result<Model> {
        // Nesting is bounded by the decoder (100 messages).
        let proto = ModelProto::decode(data).map_err(|e| bad(file, format!("not an ONNX model: {e}")))?;
        Model::new(proto, external, file)
    }

    /// A model from its message.
    pub fn new(proto: ModelProto, external: External, file: &str) -> Result<Model> {
        if proto.graph.is_none() {
            return Err(bad(file, "the model has no graph"));
        }
        Ok(Model { file: file.into(), proto, external })
    }

    pub(super) fn graph(&self) -> Result<&GraphProto> {
        self.proto.graph.as_ref().ok_or_else(|| bad(&self.file, "the model has no graph"))
    }

    /// Version of the operator set imported for `domain`; 0 if none is. The default domain is `""`.
    pub fn opset(&self, domain: &str) -> i64 {
        let norm = |d: &str| if d == "ai.onnx" { "" } else { d }.to_string();
        let sets = &self.proto.opset_import;
        match sets.iter().filter(|s| norm(&s.domain) == norm(domain)).map(|s| s.version).max() {
            Some(v) => v,
            // IR versions before 3 had no such field and meant version 1.
            None if sets.is_empty() && norm(domain).is_empty() => 1,
            None => 0,
        }
    }

    /// Run-time inputs in the model's order: the graph's inputs without those that have an initializer.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for inputs that are not tensors of a type in [`DType`]; [`Error::Format`].
    pub fn inputs(&self) -> Result<Vec<Port>> {
        let g = self.graph()?;
        let weights: HashSet<&str> = g.initializer.iter().map(|t| t.name.as_str()).collect();
        g.input.iter().filter(|v| !weights.contains(v.name.as_str())).map(|v| self.port(v)).collect()
    }

    /// Outputs in the model's order. Errors as [`Model::inputs`].
    pub fn outputs(&self) -> Result<Vec<Port>> {
        self.graph()?.output.iter().map(|v| self.port(v)).collect()
    }

    fn port(&self, v: &ValueInfoProto) -> Result<Port> {
        let what = format!("{}: '{}'", self.file, v.name);
        let t = match v.r#type.as_ref().and_then(|t| t.value.as_ref()) {
            Some(TypeValue::Tensor(t)) => t,
            Some(other) => {
                let kind = match other {
                    TypeValue::Sequence(_) => "a sequence",
                    TypeValue::Map(_) => "a map",
                    TypeValue::Optional(_) => "an optional",
                    _ => "a sparse tensor",
                };
                return Err(Error::unsupported(
                    format!("{what} is {kind}"),
                    "Only dense tensors are supported",
                ));
            }
            None => return Err(bad(&what, "no type is declared")),
        };
        let dim = |(k, d): (usize, &proto::Dimension)| match &d.value {
            Some(DimValue::Value(n)) if *n >= 0 => Dim::from(*n as usize),
            Some(DimValue::Param(p)) if !p.is_empty() => Dim::sym(p),
            // Some exporters write -1 for an open size.
            _ => Dim::sym(&format!("{}.{k}", v.name)),
        };
        Ok(Port {
            name: v.name.clone(),
            dtype: tensor::dtype(t.elem_type, &what)?,
            shape: t.shape.as_ref().map(|s| s.dim.iter().enumerate().map(dim).collect()),
        })
    }

    /// Looks at every node, and at no weight.
    ///
    /// # Errors
    /// [`Error::UnsupportedOps`] with all operators the importer cannot build, for the report of `backend`;
    /// [`Error::Unsupported`] for other parts of the format that it lacks.
    pub fn check(&self, backend: &str) -> Result<()> {
        let g = self.graph()?;
        if !g.sparse_initializer.is_empty() {
            return Err(Error::unsupported(
                format!("{} holds sparse weights", self.file),
                "Export the model with dense weights",
            ));
        }
        // One entry per operator and reason, in the order of first use.
        let mut found: Vec<UnsupportedOp> = Vec::new();
        let mut at: BTreeMap<(String, String, String), usize> = BTreeMap::new();
        for (i, n) in g.node.iter().enumerate() {
            let opset = self.opset(&n.domain);
            let Some(reason) = self.refuse(n, opset) else {
                continue;
            };
            let key = (n.domain.clone(), n.op_type.clone(), reason.clone());
            let k = *at.entry(key).or_insert_with(|| {
                found.push(UnsupportedOp {
                    op: n.op_type.clone(),
                    domain: n.domain.clone(),
                    opset,
                    nodes: vec![],
                    backend: backend.into(),
                    reason,
                });
                found.len() - 1
            });
            found[k].nodes.push(import::node_name(n, i));
        }
        if found.is_empty() { Ok(()) } else { Err(Error::UnsupportedOps(found)) }
    }

    fn refuse(&self, n: &proto::NodeProto, opset: i64) -> Option<String> {
        if self.proto.functions.iter().any(|f| f.name == n.op_type && f.domain == n.domain) {
            return Some("functions defined in the model are not supported; inline them".into());
        }
        let Some(row) = ops::find(&n.domain, &n.op_type) else {
            return Some("the importer has no such operator".into());
        };
        if opset < row.since {
            return Some(format!("supported from operator set {} on", row.since));
        }
        let latest = ops::latest(&n.domain);
        if opset > latest {
            return Some(format!("operator sets after {latest} are not known"));
        }
        if n.attribute.iter().any(|a| !a.ref_attr_name.is_empty()) {
            return Some("refers to an attribute of a function outside one".into());
        }
        let odd = n.attribute.iter().find(|a| !row.attrs.contains(&a.name.as_str()))?;
        Some(format!("attribute '{}' is not supported", odd.name))
    }

    /// Builds the graph. Inputs that `shapes` does not name keep their declared shapes, in which a symbol that the given
    /// shapes determine is replaced by its size. Shapes may be symbolic.
    ///
    /// # Errors
    /// As [`Model::check`]; [`Error::Argument`] and [`Error::Shape`] for shapes that do not fit the declared ones or the
    /// operators; [`Error::Format`] for values that are missing, defined twice or defined in a cycle;
    /// [`Error::Unsupported`] where a shape depends on the value of an input.
    pub fn import(&self, shapes: &[(&str, Shape)]) -> Result<Imported> {
        self.import_with(shapes, &[])
    }

    /// As [`Model::import`], for models in which inputs steer shapes (the target of a Reshape, the axes of a reduction). Where
    /// one does, its value is taken from `values` and built into the graph, which then holds for that value alone:
    /// [`Imported::fixed`] names these inputs. Other values are ignored.
    pub fn import_with(&self, shapes: &[(&str, Shape)], values: &[(&str, ConstData)]) -> Result<Imported> {
        self.check("")?;
        import::import(self, shapes, values)
    }
}
