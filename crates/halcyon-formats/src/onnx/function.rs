//! Expands the functions that a model defines: in a copy of the body, references to the function's attributes
//! are replaced by the values that a call gives.

use super::proto::{AttributeProto, FunctionProto, GraphProto, NodeProto, ValueInfoProto};
use crate::bad;
use halcyon_ir::Result;

/// The key of a function: domain, name and overload.
pub(super) fn key(n: &NodeProto) -> (&str, &str, &str) {
    (&n.domain, &n.op_type, &n.overload)
}

/// Estimates the bytes that [`body`] allocates. Byte strings are shared and not counted.
pub(super) fn weight(f: &FunctionProto, n: &NodeProto) -> usize {
    fn attribute(a: &AttributeProto) -> usize {
        let tensor = |t: &super::proto::TensorProto| {
            t.dims.len() * 8
                + t.float_data.len() * 4
                + t.int32_data.len() * 4
                + t.int64_data.len() * 8
                + t.double_data.len() * 8
                + t.uint64_data.len() * 8
                + t.string_data.len() * size_of::<bytes::Bytes>()
        };
        size_of::<AttributeProto>()
            + a.floats.len() * 4
            + a.ints.len() * 8
            + a.strings.len() * size_of::<bytes::Bytes>()
            + a.t.iter().chain(&a.tensors).map(tensor).sum::<usize>()
            + a.g
                .iter()
                .map(|g| nodes(&g.node) + g.initializer.iter().map(tensor).sum::<usize>())
                .sum::<usize>()
    }
    fn nodes(all: &[NodeProto]) -> usize {
        let text = |v: &[String]| v.iter().map(|s| size_of::<String>() + s.len()).sum::<usize>();
        let one = |n: &NodeProto| {
            size_of::<NodeProto>()
                + text(&n.input)
                + text(&n.output)
                + n.name.len()
                + n.op_type.len()
                + n.attribute.iter().map(attribute).sum::<usize>()
        };
        all.iter().map(one).sum()
    }
    let given: usize = n.attribute.iter().chain(&f.attribute_proto).map(attribute).sum();
    // Each reference copies at most all given attributes. References in nested graphs are not counted.
    let refers = f.node.iter().flat_map(|n| &n.attribute).filter(|a| !a.ref_attr_name.is_empty()).count();
    nodes(&f.node).saturating_add(given.saturating_mul(refers))
}

/// The body of `f` as a graph, for the calling node `n`.
///
/// # Errors
/// [`halcyon_ir::Error::Format`] if a required attribute is missing.
pub(super) fn body(f: &FunctionProto, n: &NodeProto, file: &str) -> Result<GraphProto> {
    let given = |name: &str| n.attribute.iter().find(|a| a.name == name);
    if let Some(name) = f.attribute.iter().find(|a| given(a).is_none()) {
        return Err(bad(file, format!("{} needs attribute '{name}', which a call lacks", f.name)));
    }
    let value = |name: &str| given(name).or_else(|| f.attribute_proto.iter().find(|a| a.name == name));
    let port = |s: &String| ValueInfoProto { name: s.clone(), r#type: None };
    let mut g = GraphProto {
        node: f.node.clone(),
        name: f.name.clone(),
        input: f.input.iter().map(port).collect(),
        output: f.output.iter().map(port).collect(),
        ..GraphProto::default()
    };
    fill(&mut g, &value);
    Ok(g)
}

/// Replaces references to the function's attributes by their values. A reference to an attribute without a
/// value is removed.
fn fill<'v>(g: &mut GraphProto, value: &impl Fn(&str) -> Option<&'v AttributeProto>) {
    for n in &mut g.node {
        n.attribute.retain_mut(|a| {
            if let Some(g) = &mut a.g {
                fill(g, value);
            }
            if a.ref_attr_name.is_empty() {
                return true;
            }
            match value(&a.ref_attr_name) {
                None => false,
                Some(v) => {
                    *a = AttributeProto {
                        name: std::mem::take(&mut a.name),
                        ref_attr_name: String::new(),
                        ..v.clone()
                    };
                    true
                }
            }
        });
    }
}
