//! Builds models in code for the importer's tests.

use super::proto::*;
use super::tensor::{self, External};
use super::{Imported, Model, reference};
use bytes::Bytes;
use halcyon_ir::{ConstData, DType, Element, Result};

pub(super) fn t<T: Element>(dims: &[usize], v: &[T]) -> ConstData {
    ConstData::from_slice(dims, v).unwrap()
}

pub(super) fn ints(v: &[i64]) -> ConstData {
    t(&[v.len()], v)
}

pub(super) fn port(name: &str, dtype: DType, dims: &[&str]) -> ValueInfoProto {
    let dim = dims
        .iter()
        .map(|d| Dimension {
            value: match d.parse() {
                Ok(n) => Some(DimValue::Value(n)),
                Err(_) if d.is_empty() => None,
                Err(_) => Some(DimValue::Param(d.to_string())),
            },
        })
        .collect();
    let t = TensorType { elem_type: dtype.row().onnx, shape: Some(TensorShapeProto { dim }) };
    ValueInfoProto { name: name.into(), r#type: Some(TypeProto { value: Some(TypeValue::Tensor(t)) }) }
}

pub(super) fn node(op: &str, inputs: &[&str], outputs: &[&str]) -> NodeProto {
    let s = |v: &[&str]| v.iter().map(|x| x.to_string()).collect();
    NodeProto {
        op_type: op.into(),
        input: s(inputs),
        output: s(outputs),
        name: format!("{op}-{}", outputs[0]),
        ..Default::default()
    }
}

impl NodeProto {
    pub fn attr(mut self, name: &str, kind: i32, f: impl FnOnce(&mut AttributeProto)) -> NodeProto {
        let mut a = AttributeProto { name: name.into(), r#type: kind, ..Default::default() };
        f(&mut a);
        self.attribute.push(a);
        self
    }
    pub fn int(self, name: &str, v: i64) -> NodeProto {
        self.attr(name, attribute::INT, |a| a.i = v)
    }
    pub fn ints(self, name: &str, v: &[i64]) -> NodeProto {
        self.attr(name, attribute::INTS, |a| a.ints = v.to_vec())
    }
    pub fn float(self, name: &str, v: f32) -> NodeProto {
        self.attr(name, attribute::FLOAT, |a| a.f = v)
    }
    pub fn text(self, name: &str, v: &'static str) -> NodeProto {
        self.attr(name, attribute::STRING, |a| a.s = Bytes::from_static(v.as_bytes()))
    }
}

/// A model with input `x` and output `y`.
pub(super) fn model(
    opset: i64,
    x: ValueInfoProto,
    nodes: Vec<NodeProto>,
    weights: &[(&str, ConstData)],
) -> ModelProto {
    ModelProto {
        ir_version: 8,
        opset_import: vec![OperatorSetIdProto { domain: String::new(), version: opset }],
        graph: Some(GraphProto {
            node: nodes,
            input: vec![x],
            output: vec![port("y", DType::F32, &[])],
            initializer: weights.iter().map(|(n, d)| tensor::encode(d, n)).collect(),
            ..Default::default()
        }),
        ..Default::default()
    }
}

pub(super) fn open(m: ModelProto) -> Model {
    Model::new(m, External::none(), "m").unwrap()
}

pub(super) fn import(m: ModelProto) -> Result<Imported> {
    open(m).import(&[])
}

/// Runs a single node from `x` and weights `w0`, `w1`… to `y`.
pub(super) fn run_one(opset: i64, n: NodeProto, x: &ConstData, weights: &[ConstData]) -> ConstData {
    let names: Vec<String> = (0..weights.len()).map(|i| format!("w{i}")).collect();
    let w: Vec<(&str, ConstData)> = names.iter().map(String::as_str).zip(weights.iter().cloned()).collect();
    let dims: Vec<String> = x.dims.iter().map(|d| d.to_string()).collect();
    let dims: Vec<&str> = dims.iter().map(String::as_str).collect();
    let i = import(model(opset, port("x", x.dtype, &dims), vec![n], &w)).unwrap();
    i.graph.check().unwrap();
    reference::run(&i.graph, std::slice::from_ref(x)).remove(0)
}

pub(super) fn check(
    opset: i64,
    n: NodeProto,
    x: &ConstData,
    weights: &[ConstData],
    dims: &[usize],
    want: &[f64],
) {
    let what = format!("{} at {opset}", n.op_type);
    let y = run_one(opset, n, x, weights);
    assert_eq!(&y.dims[..], dims, "{what}");
    for (a, b) in y.to_vec::<f64>().iter().zip(want) {
        assert!(
            a == b || (a - b).abs() < 1e-6 * b.abs().max(1.0),
            "{what}: {:?} instead of {want:?}",
            y.to_vec::<f64>()
        );
    }
}
