//! Lists the contents of a model file without building its graph: names, types, weights, operators.

use super::import::node_name;
use super::model::Model;
use super::ops;
use super::proto::{GraphProto, NodeProto, OperatorSetIdProto, TensorProto, ValueInfoProto};
use super::tensor;
use halcyon_ir::{DType, Error};
use std::collections::{BTreeMap, HashMap};

/// The contents of a model file.
#[derive(Clone, Debug, Default)]
pub struct Summary {
    pub ir_version: i64,
    pub producer: String,
    pub producer_version: String,
    pub domain: String,
    pub model_version: i64,
    /// The model's own description.
    pub description: String,
    /// Domain and version; the default domain is `ai.onnx`.
    pub opsets: Vec<(String, i64)>,
    pub metadata: Vec<(String, String)>,
    pub graph_name: String,
    pub graph_description: String,
    /// Names and types as text, without the inputs that have a stored default. For an unsupported type, the
    /// text gives the reason.
    pub inputs: Vec<(String, String)>,
    pub outputs: Vec<(String, String)>,
    pub functions: Vec<String>,
    pub weights: Vec<Weight>,
    /// One entry per operator and opset version, in the order of first use, including subgraphs and
    /// functions.
    pub operators: Vec<Operator>,
    /// Number of nodes of the graph, its subgraphs and functions.
    pub nodes: usize,
    /// Operator (domain and name) of each node, by the node's name.
    pub op_of: HashMap<String, (String, String)>,
}

/// A stored tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct Weight {
    pub name: String,
    /// Name of the dtype; ONNX's name if `DType` lacks it.
    pub dtype: String,
    pub dims: Vec<i64>,
    pub elements: u64,
    pub bytes: u64,
    /// Whether it is stored as external data.
    pub external: bool,
}

/// An operator of the model.
#[derive(Clone, Debug, PartialEq)]
pub struct Operator {
    /// Empty for the default domain.
    pub domain: String,
    pub name: String,
    pub opset: i64,
    pub count: usize,
    /// Whether it is a function that the model defines.
    pub function: bool,
    /// First version of the operator set that the importer supports; `None` if it lacks the operator.
    pub since: Option<i64>,
    /// The reasons why the importer rejects it, each with its nodes.
    pub refused: Vec<(String, Vec<String>)>,
}

impl Model {
    /// The file's contents, whether supported or not.
    pub fn summary(&self) -> Summary {
        let m = &self.proto;
        let mut s = Summary {
            ir_version: m.ir_version,
            producer: m.producer_name.clone(),
            producer_version: m.producer_version.clone(),
            domain: m.domain.clone(),
            model_version: m.model_version,
            description: m.doc_string.clone(),
            opsets: m.opset_import.iter().map(|o| (shown(&o.domain).into(), o.version)).collect(),
            metadata: m.metadata_props.iter().map(|p| (p.key.clone(), p.value.clone())).collect(),
            functions: m.functions.iter().map(|f| f.name.clone()).collect(),
            ..Summary::default()
        };
        let mut at = BTreeMap::new();
        let functions: Vec<(&str, &str)> = m.functions.iter().map(|f| (&*f.domain, &*f.name)).collect();
        if let Some(g) = &m.graph {
            s.graph_name.clone_from(&g.name);
            s.graph_description.clone_from(&g.doc_string);
            let dense = g.initializer.iter().map(|t| t.name.as_str());
            let sparse =
                g.sparse_initializer.iter().filter_map(|t| t.values.as_ref()).map(|t| t.name.as_str());
            let stored: Vec<&str> = dense.chain(sparse).collect();
            let port = |v: &ValueInfoProto| {
                let text = match self.port(v) {
                    Ok(p) => p.ty.to_string(),
                    Err(e) => format!("({e})"),
                };
                (v.name.clone(), text)
            };
            let runtime = |v: &&ValueInfoProto| !stored.contains(&v.name.as_str());
            s.inputs = g.input.iter().filter(runtime).map(port).collect();
            s.outputs = g.output.iter().map(port).collect();
            s.graph(g, &m.opset_import, &functions, &mut at);
        }
        for f in &m.functions {
            s.walk(&f.node, &f.opset_import, &functions, &mut at);
        }
        if let Err(Error::UnsupportedOps(all)) = self.check("") {
            for u in all {
                let same = |o: &&mut Operator| o.domain == u.domain && o.name == u.op && o.opset == u.opset;
                if let Some(o) = s.operators.iter_mut().find(same) {
                    o.refused.push((u.reason, u.nodes));
                }
            }
        }
        s
    }
}

type Found = BTreeMap<(String, String, i64), usize>;

impl Summary {
    fn graph(
        &mut self,
        g: &GraphProto,
        sets: &[OperatorSetIdProto],
        functions: &[(&str, &str)],
        at: &mut Found,
    ) {
        self.weights.extend(g.initializer.iter().map(weight));
        self.weights.extend(g.sparse_initializer.iter().filter_map(|t| t.values.as_ref()).map(weight));
        self.walk(&g.node, sets, functions, at);
    }

    /// Recurses once per level of nested graphs, which the decoder limits.
    fn walk(
        &mut self,
        nodes: &[NodeProto],
        sets: &[OperatorSetIdProto],
        functions: &[(&str, &str)],
        at: &mut Found,
    ) {
        for (i, n) in nodes.iter().enumerate() {
            self.nodes += 1;
            let domain = if n.domain == "ai.onnx" { "" } else { &n.domain };
            let opset = super::model::opset(sets, &n.domain);
            let key = (domain.to_string(), n.op_type.clone(), opset);
            let k = *at.entry(key).or_insert_with(|| {
                self.operators.push(Operator {
                    domain: domain.into(),
                    name: n.op_type.clone(),
                    opset,
                    count: 0,
                    function: functions.contains(&(&*n.domain, &*n.op_type)),
                    since: ops::find(&n.domain, &n.op_type).map(|r| r.since),
                    refused: vec![],
                });
                self.operators.len() - 1
            });
            self.operators[k].count += 1;
            self.op_of.insert(node_name(n, i), (domain.into(), n.op_type.clone()));
            for a in &n.attribute {
                if n.op_type == "Constant" {
                    self.weights.extend(a.t.iter().map(|t| Weight { name: node_name(n, i), ..weight(t) }));
                }
                for g in a.g.as_deref().into_iter().chain(&a.graphs) {
                    self.graph(g, sets, functions, at);
                }
            }
        }
    }
}

/// The default domain is usually stored as an empty name.
fn shown(domain: &str) -> &str {
    if domain.is_empty() { "ai.onnx" } else { domain }
}

fn weight(t: &TensorProto) -> Weight {
    let elements = t.dims.iter().fold(1u64, |a, &d| a.saturating_mul(u64::try_from(d).unwrap_or(0)));
    let dtype = DType::from_onnx(t.data_type);
    let bytes = match dtype {
        Some(d) => {
            u64::try_from((u128::from(elements) * u128::from(d.bits())).div_ceil(8)).unwrap_or(u64::MAX)
        }
        None => t.string_data.iter().map(|s| s.len() as u64).sum(),
    };
    Weight {
        name: t.name.clone(),
        dtype: dtype.map_or_else(|| tensor::type_name(t.data_type).into(), |d| d.name().into()),
        dims: t.dims.clone(),
        elements,
        bytes,
        external: t.data_location == super::proto::EXTERNAL,
    }
}

#[cfg(test)]
mod tests {
    use crate::onnx::test_models::*;
    use halcyon_ir::DType;

    #[test]
    fn summaries_count_unsupported_operators_too() {
        let mut odd = node("Nothing", &["h"], &["y"]);
        odd.domain = "our.domain".into();
        let nodes = vec![
            node("Gemm", &["x", "w"], &["h0"]).int("unheard", 1),
            node("Relu", &["h0"], &["h1"]),
            node("Relu", &["h1"], &["h"]),
            odd,
        ];
        let m = model(17, port("x", DType::F32, &["n", "3"]), nodes, &[("w", t(&[3, 2], &[0f32; 6]))]);
        let described = open(m.clone()).edit(|m| {
            m.doc_string = "of the model".into();
            m.graph.get_or_insert_default().doc_string = "of the graph".into();
            Ok(())
        });
        let described = described.unwrap();
        let d = described.summary();
        assert_eq!((&*d.description, &*d.graph_description), ("of the model", "of the graph"));
        let gone = described.clone().edit(|m| {
            m.graph = None;
            Ok(())
        });
        assert!(gone.unwrap_err().to_string().contains("no graph"));
        assert_eq!(described.proto().doc_string, "of the model");
        let s = open(m).summary();
        assert_eq!(s.inputs, [("x".to_string(), "f32[n, 3]".to_string())]);
        let names: Vec<(&str, usize)> = s.operators.iter().map(|o| (&*o.name, o.count)).collect();
        assert_eq!(names, [("Gemm", 1), ("Relu", 2), ("Nothing", 1)]);
        assert_eq!((s.weights[0].elements, s.weights[0].bytes, &*s.weights[0].dtype), (6, 24, "f32"));
        assert_eq!(s.operators[2].since, None);
        assert!(s.operators[0].refused[0].0.contains("unheard"));
        assert!(s.operators[2].refused[0].0.contains("no such operator"));
        assert_eq!(s.op_of["Relu-h1"], (String::new(), "Relu".to_string()));
    }
}
