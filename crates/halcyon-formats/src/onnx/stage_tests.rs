//! Tests of functions, control flow, sequences and staged runs, with the reference evaluator.

use super::proto::*;
use super::stage::{Engine, Handle};
use super::test_models::*;
use super::{Datum, Model, Placement, reference};
use bytes::Bytes;
use halcyon_ir::{ConstData, DType, Error, Graph, Result};
use std::sync::Arc;

#[derive(Debug)]
pub(super) struct Plain;

impl Engine for Plain {
    fn run(&mut self, graph: Graph, inputs: &[Handle]) -> Result<Vec<Handle>> {
        graph.check()?;
        let ins = inputs.iter().map(|h| self.read(h)).collect::<Result<Vec<_>>>()?;
        Ok(reference::run(&graph, &ins).into_iter().map(|c| -> Handle { Arc::new(c) }).collect())
    }
    fn upload(&mut self, data: &ConstData) -> Result<Handle> {
        Ok(Arc::new(data.clone()))
    }
    fn read(&mut self, tensor: &Handle) -> Result<ConstData> {
        Ok(tensor.downcast_ref::<ConstData>().unwrap().clone())
    }
}

pub(super) fn graph(nodes: Vec<NodeProto>, inputs: Vec<ValueInfoProto>, outputs: &[&str]) -> GraphProto {
    let out = |s: &&str| ValueInfoProto { name: s.to_string(), ..port(s, DType::F32, &[]) };
    GraphProto { node: nodes, input: inputs, output: outputs.iter().map(out).collect(), ..Default::default() }
}

pub(super) fn sub(n: NodeProto, name: &str, g: GraphProto) -> NodeProto {
    n.attr(name, attribute::GRAPH, |a| a.g = Some(Box::new(g)))
}

pub(super) fn whole(g: GraphProto) -> ModelProto {
    let set = |domain: &str, version| OperatorSetIdProto { domain: domain.into(), version };
    ModelProto { graph: Some(g), opset_import: vec![set("", 18), set("own", 1)], ..Default::default() }
}

fn staged(m: ModelProto, inputs: &[ConstData]) -> Result<(Vec<Datum>, Placement)> {
    let inputs: Vec<Datum> = inputs.iter().cloned().map(Datum::Tensor).collect();
    open(m).run_staged(&inputs, Box::new(Plain))
}

pub(super) fn values(d: &Datum) -> Vec<f64> {
    d.tensor().unwrap().to_vec()
}

/// Doubles x until its sum reaches 20.
fn doubling() -> ModelProto {
    let body = graph(
        vec![
            node("Add", &["v", "v"], &["w"]),
            node("ReduceSum", &["w"], &["s"]).int("keepdims", 0),
            node("Less", &["s", "limit"], &["go"]),
        ],
        vec![port("i", DType::I64, &[]), port("c", DType::Bool, &[]), port("v", DType::F32, &["2"])],
        &["go", "w", "s"],
    );
    let loops = sub(node("Loop", &["", "", "x"], &["y", "sums"]), "body", body);
    let mut g = graph(vec![loops], vec![port("x", DType::F32, &["2"])], &["y", "sums"]);
    g.initializer.push(super::tensor::encode(&t(&[], &[20f32]), "limit"));
    whole(g)
}

#[test]
fn a_loop_ends_by_its_computed_condition() {
    let (out, placement) = staged(doubling(), &[t(&[2], &[1f32, 2.0])]).unwrap();
    assert_eq!(values(&out[0]), [8.0, 16.0]);
    assert_eq!(values(&out[1]), [6.0, 12.0, 24.0]);
    assert_eq!((placement.loops[0].node.as_str(), placement.loops[0].iterations), ("Loop-y", 3));
    // No stage had to run.
    assert_eq!((placement.stages, placement.reads.len()), (0, 0), "{placement:?}");
    // Importing it as one graph is an error that gives the reason.
    let e = open(doubling()).import(&[]).unwrap_err().to_string();
    assert!(e.contains("the condition of Loop"), "{e}");
}

#[test]
fn branches_see_outer_names_and_one_is_taken() {
    let side = |op: &str, out: &str| graph(vec![node(op, &["x", "one"], &[out])], vec![], &[out]);
    let branch = sub(
        sub(node("If", &["c"], &["y"]), "then_branch", side("Add", "a")),
        "else_branch",
        side("Sub", "b"),
    );
    let nodes = vec![
        node("ReduceMax", &["x"], &["m"]).int("keepdims", 0),
        node("Greater", &["m", "one"], &["c"]),
        branch,
    ];
    let mut g = graph(nodes, vec![port("x", DType::F32, &["2"])], &["y"]);
    g.initializer.push(super::tensor::encode(&t(&[], &[1f32]), "one"));
    let run = |v: [f32; 2]| values(&staged(whole(g.clone()), &[t(&[2], &v)]).unwrap().0[0]);
    assert_eq!(run([0.0, 3.0]), [1.0, 4.0]);
    assert_eq!(run([0.0, 1.0]), [-1.0, 0.0]);
}

#[test]
fn data_dependent_shapes_are_computed_on_the_host() {
    let nodes = vec![
        node("Mul", &["x", "x"], &["q"]),
        node("SplitToSequence", &["q", "n"], &["s"]).int("axis", 0),
        node("SequenceAt", &["s", "last"], &["z"]),
        node("Neg", &["z"], &["y"]),
    ];
    let mut g = graph(nodes, vec![port("x", DType::F32, &["5"]), port("n", DType::I64, &[])], &["y"]);
    g.initializer.push(super::tensor::encode(&t(&[], &[-1i64]), "last"));
    let x = t(&[5], &[1f32, 2.0, 3.0, 4.0, 5.0]);
    let (out, p) = staged(whole(g), &[x, t(&[], &[2i64])]).unwrap();
    assert_eq!(values(&out[0]), [-25.0]);
    assert_eq!(p.stages, 1, "{p:?}");
}

fn function(name: &str, nodes: Vec<NodeProto>) -> FunctionProto {
    FunctionProto {
        name: name.into(),
        domain: "own".into(),
        input: vec!["a".into()],
        output: vec!["r".into()],
        node: nodes,
        opset_import: whole(GraphProto::default()).opset_import,
        ..Default::default()
    }
}

fn own(mut n: NodeProto) -> NodeProto {
    n.domain = "own".into();
    n
}

#[test]
fn functions_take_attributes_and_call_each_other() {
    let leaky = node("LeakyRelu", &["a"], &["r"])
        .attr("alpha", attribute::FLOAT, |a| a.ref_attr_name = "slope".into());
    let mut f = function("F", vec![leaky]);
    f.attribute_proto.push(AttributeProto {
        name: "slope".into(),
        f: 0.5,
        r#type: attribute::FLOAT,
        ..Default::default()
    });
    let twice = function(
        "Twice",
        vec![own(node("F", &["a"], &["m"])).float("slope", 0.25), own(node("F", &["m"], &["r"]))],
    );
    let mut m =
        whole(graph(vec![own(node("Twice", &["x"], &["y"]))], vec![port("x", DType::F32, &["2"])], &["y"]));
    m.functions = vec![f, twice];
    let i = import(m).unwrap();
    let y = reference::run(&i.graph, &[t(&[2], &[-8f32, 8.0])]).remove(0);
    assert_eq!(y.to_vec::<f64>(), [-1.0, 8.0]);
}

#[test]
fn attack_functions_without_end() {
    let mut m =
        whole(graph(vec![own(node("F", &["x"], &["y"]))], vec![port("x", DType::F32, &["2"])], &["y"]));
    m.functions = vec![function("F", vec![own(node("F", &["a"], &["r"]))])];
    assert!(matches!(import(m), Err(Error::Format { what, .. }) if what.contains("deeper")));
    // Thirty functions, each calling the next one twice.
    let mut m =
        whole(graph(vec![own(node("F0", &["x"], &["y"]))], vec![port("x", DType::F32, &["2"])], &["y"]));
    for k in 0..30 {
        let next = format!("F{}", k + 1);
        m.functions.push(function(
            &format!("F{k}"),
            vec![own(node(&next, &["a"], &["m"])), own(node(&next, &["m"], &["r"]))],
        ));
    }
    m.functions.push(function("F30", vec![node("Neg", &["a"], &["r"])]));
    assert!(matches!(import(m), Err(Error::Unsupported { .. })));
}

#[test]
fn attack_a_loop_without_end() {
    let body = graph(
        vec![node("Neg", &["v"], &["w"]), node("Identity", &["c"], &["go"])],
        vec![port("i", DType::I64, &[]), port("c", DType::Bool, &[]), port("v", DType::F32, &["2"])],
        &["go", "w"],
    );
    let loops = sub(node("Loop", &["", "", "x"], &["y"]), "body", body);
    let m = whole(graph(vec![loops], vec![port("x", DType::F32, &["2"])], &["y"]));
    assert!(matches!(import(m), Err(Error::Unsupported { .. })));
}

#[test]
fn scans_follow_their_directions_and_axes() {
    let body = graph(
        vec![node("Add", &["s", "v"], &["t"]), node("Identity", &["t"], &["o"])],
        vec![port("s", DType::F32, &["2"]), port("v", DType::F32, &["2"])],
        &["t", "o"],
    );
    let scan = sub(node("Scan", &["z", "x"], &["f", "y"]), "body", body)
        .int("num_scan_inputs", 1)
        .ints("scan_input_axes", &[1])
        .ints("scan_input_directions", &[1])
        .ints("scan_output_axes", &[-1]);
    let g = graph(
        vec![scan],
        vec![port("z", DType::F32, &["2"]), port("x", DType::F32, &["2", "3"])],
        &["f", "y"],
    );
    let i = import(whole(g)).unwrap();
    let out =
        reference::run(&i.graph, &[t(&[2], &[0f32, 10.0]), t(&[2, 3], &[1f32, 2.0, 3.0, 4.0, 5.0, 6.0])]);
    assert_eq!(out[0].to_vec::<f64>(), [6.0, 25.0]);
    assert_eq!(
        (out[1].dims.to_vec(), out[1].to_vec::<f64>()),
        (vec![2, 3], vec![3.0, 5.0, 6.0, 16.0, 21.0, 25.0])
    );
}

#[test]
fn stored_sequences_and_optionals_come_back() {
    use super::PortType;
    use prost::Message;
    let tensor = |v: f32| super::tensor::encode(&t(&[1], &[v]), "");
    let s =
        SequenceProto { elem_type: 1, tensor_values: vec![tensor(1.0), tensor(2.0)], ..Default::default() };
    let of = PortType::Tensor { dtype: DType::F32, shape: None };
    let ty = PortType::Sequence(Box::new(of.clone()));
    let read = |b: Vec<u8>, ty: &PortType| {
        Datum::parse_pb(Bytes::from(b), &super::tensor::External::none(), "x.pb", ty)
    };
    let Datum::Sequence(v) = read(s.encode_to_vec(), &ty).unwrap() else { panic!("no sequence") };
    assert_eq!(v.iter().map(values).collect::<Vec<_>>(), [[1.0], [2.0]]);
    let o = OptionalProto { elem_type: 1, tensor_value: Some(tensor(3.0)), ..Default::default() };
    let opt = PortType::Optional(Box::new(of));
    assert_eq!(
        read(o.encode_to_vec(), &opt).unwrap(),
        Datum::Optional(Some(Box::new(t(&[1], &[3f32]).into())))
    );
    assert_eq!(read(vec![], &opt).unwrap(), Datum::Optional(None));
    let lost = OptionalProto { elem_type: 1, ..Default::default() };
    assert!(matches!(read(lost.encode_to_vec(), &opt), Err(Error::Format { .. })));
    let odd = SequenceProto { elem_type: 9, ..Default::default() };
    assert!(matches!(read(odd.encode_to_vec(), &ty), Err(Error::Unsupported { .. })));
    // Reads back what was written.
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("v.pb");
    let pair = Datum::Sequence(vec![t(&[1], &[1f32]).into(), t(&[2], &[1f32, 2.0]).into()]);
    for (v, ty) in [
        (pair.clone(), &ty),
        (Datum::Optional(None), &opt),
        (Datum::Optional(Some(Box::new(t(&[1], &[3f32]).into()))), &opt),
    ] {
        v.write_pb(&path, "v").unwrap();
        assert_eq!(Datum::read_pb(&path, ty).unwrap(), v);
    }
    let mixed = Datum::Sequence(vec![pair, t(&[1], &[1f32]).into()]);
    assert!(matches!(mixed.write_pb(&path, "v"), Err(Error::Unsupported { .. })));
    let _ = Model::parse(Bytes::new(), super::tensor::External::none(), "x").unwrap_err();
}
