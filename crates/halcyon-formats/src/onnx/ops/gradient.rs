//! Gradient of `ai.onnx.preview.training`: runs the gradient pass on the graph built so far.

use super::training::DOMAIN;
use super::{Row, row_in};
use crate::onnx::build::{Builder, Value};
use crate::onnx::model::Model;
use crate::onnx::node::Call;
use crate::onnx::proto::NodeProto;
use halcyon_ir::graph::Node;
use halcyon_ir::{NodeId, Result, Scalar, grad};
use std::collections::HashMap;

/// Attributes that contain value names.
pub(crate) const NAMES: &[&str] = &["xs", "y", "zs"];

pub(crate) const ROWS: &[Row] = &[row_in(DOMAIN, "Gradient", 1, NAMES, gradient)];

pub(crate) fn is(n: &NodeProto) -> bool {
    n.op_type == "Gradient" && n.domain == DOMAIN
}

/// Whether the model contains a `Gradient` node.
pub(crate) fn used(m: &Model) -> bool {
    fn any(nodes: &[NodeProto]) -> bool {
        // The recursion is bounded, because the nesting depth of messages is limited.
        nodes.iter().any(|n| is(n) || n.attribute.iter().filter_map(|a| a.g.as_deref()).any(|g| any(&g.node)))
    }
    m.proto.graph.iter().any(|g| any(&g.node)) || m.proto.functions.iter().any(|f| any(&f.node))
}

/// `d y / d x` for every x in `xs`, where y stands for the sum of its elements. The operands are the values
/// at which to take the gradient: first those for the names in `xs`, then those for the names in `zs`. If an
/// operand is not the tensor that its name refers to, the nodes between that tensor and y are rebuilt on the
/// operand.
fn gradient(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let xs = c.strings("xs")?.ok_or_else(|| c.invalid("attribute 'xs' is missing"))?;
    let names: Vec<String> = xs.iter().cloned().chain(c.strings("zs")?.unwrap_or_default()).collect();
    let args = c.args()?;
    if args.len() != names.len() {
        return Err(c.invalid(format!("xs and zs have {} names for {} operands", names.len(), args.len())));
    }
    let mut at: HashMap<NodeId, NodeId> = HashMap::new();
    let mut points = vec![];
    for (name, v) in names.iter().zip(args) {
        let named = c.named(name)?;
        if named.ty != v.ty {
            return Err(c.invalid(format!("'{name}' is {}, but its operand is {}", named.ty, v.ty)));
        }
        let (from, to) = (b.id(named)?, b.id(v)?);
        if at.insert(from, to).is_some_and(|old| old != to) {
            return Err(c.invalid(format!("two different operands are given for '{name}'")));
        }
        points.push(to);
    }
    let y = c.named(c.string("y", "")?)?;
    if !y.dtype().is_float() {
        return Err(c.invalid(format!("y is {}, but only floats have gradients", y.ty)));
    }
    let root = b.id(y)?;
    let root = rebuilt(b, root, at);
    let seed = b.g.full(y.dtype(), y.shape().clone(), Scalar::F(1.0));
    let found = grad::gradients(&mut b.g, root, &points[..xs.len()], Some(seed))?;
    let mut out = Vec::with_capacity(found.len());
    for (g, x) in found.into_iter().zip(c.args()?) {
        out.push(match g {
            Some(g) => b.value(g),
            None => b.full(x.dtype(), x.shape(), Scalar::F(0.0)),
        });
    }
    Ok(out)
}

/// Rebuilds the nodes from which `root` is computed, with each key of `at` replaced by its value. Returns the
/// new root.
fn rebuilt(b: &mut Builder, root: NodeId, mut at: HashMap<NodeId, NodeId>) -> NodeId {
    if at.iter().all(|(from, to)| from == to) {
        return root;
    }
    let live = b.g.live(&[root]);
    let ids: Vec<NodeId> = b.g.ids().filter(|n| live[n.index()]).collect();
    for n in ids {
        let node = b.g.node(n);
        if at.contains_key(&n) || !node.inputs.iter().any(|x| at.get(x).is_some_and(|y| y != x)) {
            continue;
        }
        let inputs = node.inputs.iter().map(|x| at.get(x).copied().unwrap_or(*x)).collect();
        let new = Node { inputs, ..node.clone() };
        let new = b.g.push_unchecked(new);
        at.insert(n, new);
    }
    at.get(&root).copied().unwrap_or(root)
}

#[cfg(test)]
mod tests {
    use crate::onnx::proto::{ModelProto, NodeProto, OperatorSetIdProto};
    use crate::onnx::test_models::*;
    use bytes::Bytes;
    use halcyon_ir::{ConstData, DType, Error};

    fn gradient(inputs: &[&str], outputs: &[&str], xs: &[&str], zs: &[&str], y: &'static str) -> NodeProto {
        let list = |v: &[&str]| v.iter().map(|s| Bytes::copy_from_slice(s.as_bytes())).collect::<Vec<_>>();
        let (xs, zs) = (list(xs), list(zs));
        let mut n = node("Gradient", inputs, outputs)
            .attr("xs", 8, |a| a.strings = xs)
            .attr("zs", 8, |a| a.strings = zs)
            .text("y", y);
        n.domain = super::DOMAIN.into();
        n
    }

    fn of(nodes: Vec<NodeProto>, w: &[(&str, ConstData)]) -> ModelProto {
        let mut m = model(22, port("x", DType::F32, &["2"]), nodes, w);
        m.opset_import.push(OperatorSetIdProto { domain: super::DOMAIN.into(), version: 1 });
        m
    }

    fn run(m: ModelProto) -> Vec<f32> {
        let g = import(m).unwrap().graph;
        crate::onnx::reference::run(&g, &[t(&[2], &[3f32, -1.0])]).remove(0).to_vec()
    }

    #[test]
    fn gradients_of_inputs_weights_and_intermediate_values() {
        // h = x * w, q = h * h. w is small and known, but must still be a variable.
        let w = [("w", t(&[2], &[2f32, 5.0])), ("v", t(&[2], &[1f32, 1.0]))];
        let body = |g| vec![node("Mul", &["x", "w"], &["h"]), node("Mul", &["h", "h"], &["q"]), g];
        assert_eq!(run(of(body(gradient(&["x"], &["y"], &["x"], &[], "q")), &w)), [24.0, -50.0]);
        assert_eq!(run(of(body(gradient(&["w", "x"], &["y"], &["w"], &["x"], "q")), &w)), [36.0, 10.0]);
        assert_eq!(run(of(body(gradient(&["h"], &["y"], &["h"], &[], "q")), &w)), [12.0, -10.0]);
        // At a value other than the one that the model computes.
        assert_eq!(run(of(body(gradient(&["v"], &["y"], &["h"], &[], "q")), &w)), [2.0, 2.0]);
        assert_eq!(run(of(body(gradient(&["v", "w"], &["y"], &["x"], &["w"], "q")), &w)), [8.0, 50.0]);
        // q does not depend on v.
        assert_eq!(run(of(body(gradient(&["v"], &["y"], &["v"], &[], "q")), &w)), [0.0, 0.0]);
        // q depends only on weights, and the Gradient node precedes the node that computes q.
        let square = node("Mul", &["w", "w"], &["q"]);
        let nodes = vec![gradient(&["w"], &["y"], &["w"], &[], "q"), square, node("Neg", &["x"], &["z"])];
        assert_eq!(run(of(nodes, &w)), [4.0, 10.0]);
    }

    #[test]
    fn second_derivatives() {
        let nodes = vec![
            node("Mul", &["x", "x"], &["s"]),
            node("Mul", &["s", "x"], &["q"]),
            gradient(&["x"], &["d"], &["x"], &[], "q"),
            gradient(&["x"], &["y"], &["x"], &[], "d"),
        ];
        assert_eq!(run(of(nodes, &[])), [18.0, -6.0]);
    }

    #[test]
    fn unknown_names_are_errors() {
        let square = || node("Mul", &["x", "x"], &["q"]);
        let refused = |n| {
            let e = import(of(vec![square(), node("Shape", &["x"], &["i"]), n], &[])).unwrap_err();
            assert!(matches!(e, Error::Argument { .. } | Error::Format { .. }), "{e}");
        };
        refused(gradient(&["x"], &["y"], &["x"], &[], "none"));
        refused(gradient(&["x"], &["y"], &["none"], &[], "q"));
        refused(gradient(&["x"], &["y"], &["x"], &["q"], "q"));
        refused(gradient(&["x", "q"], &["y"], &["x", "x"], &[], "q"));
        refused(gradient(&["x"], &["y"], &["x"], &[], "i"));
        refused(gradient(&["x"], &["y"], &["x"], &[], "y"));
    }
}
