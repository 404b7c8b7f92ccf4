//! Imports models built in code and runs them in the reference evaluator.

use super::proto::*;
use super::tensor::External;
use super::test_models::*;
use super::{Model, Outcome, reference};
use bytes::Bytes;
use halcyon_ir::{ConstData, DType, Dim, Error, Op, Shape};
use prost::Message;

fn mlp() -> ModelProto {
    let nodes = vec![
        node("Gemm", &["x", "w", "b"], &["h"]).int("transB", 1).float("alpha", 2.0),
        node("Relu", &["h"], &["y"]),
    ];
    let w = t(&[2, 3], &[1f32, 0.0, -1.0, 0.5, 0.5, 0.5]);
    model(17, port("x", DType::F32, &["n", "3"]), nodes, &[("w", w), ("b", t(&[2], &[0.0f32, 1.0]))])
}

#[test]
fn a_model_runs_and_keeps_names_spans_and_order() {
    let m = open(mlp());
    assert_eq!(m.opset(""), 17);
    assert_eq!(m.inputs().unwrap()[0].shape(), Some(&Shape::from([Dim::sym("n"), 3.into()])));
    let i = m.import(&[("x", [1usize, 3].into())]).unwrap();
    assert_eq!((&i.inputs[..], &i.outputs[..]), (&["x".to_string()][..], &["y".to_string()][..]));
    let g = &i.graph;
    assert_eq!(g.node(g.outputs()[0].node).span.text(), "Relu-y");
    assert!(g.nodes().iter().any(|n| matches!(n.op, Op::Const(_)) && n.span.text() == "b"));
    let y = reference::run(g, &[t(&[1, 3], &[1f32, 2.0, 4.0])]).remove(0);
    assert_eq!(y.to_vec::<f64>(), [0.0, 8.0]);
}

#[test]
fn symbolic_shapes_survive_and_bind() {
    let i = import(mlp()).unwrap();
    let y = i.graph.outputs()[0].node;
    assert_eq!(i.graph.shape(y), &Shape::from([Dim::sym("n"), 2.into()]));
    let b = i.graph.solve(&[[5usize, 3].into()]).unwrap();
    assert_eq!(i.graph.bind(&b).unwrap().shape(y), &Shape::from([5usize, 2]));
}

/// `reshape(x, [2 * n, -1])` plus a column of the numbers from 0 to `2 * n - 1`, where `n` is `x.shape[0]`.
fn shape_arithmetic() -> ModelProto {
    let nodes = vec![
        node("Shape", &["x"], &["s"]),
        node("Gather", &["s", "zero"], &["n"]).int("axis", 0),
        node("Mul", &["n", "two"], &["n2"]),
        node("Unsqueeze", &["n2", "axis0"], &["n2v"]),
        node("Concat", &["n2v", "minus"], &["target"]).int("axis", 0),
        node("Equal", &["target", "minus"], &["open"]),
        node("Where", &["open", "minus", "target"], &["target2"]),
        node("Reshape", &["x", "target2"], &["r"]),
        node("Range", &["zero", "n2", "one"], &["i"]),
        node("Cast", &["i"], &["f"]).int("to", 1),
        node("Unsqueeze", &["f", "axis1"], &["fv"]),
        node("Add", &["r", "fv"], &["y"]),
    ];
    let w = [
        ("zero", t(&[], &[0i64])),
        ("one", t(&[], &[1i64])),
        ("two", t(&[], &[2i64])),
        ("axis0", ints(&[0])),
        ("axis1", ints(&[1])),
        ("minus", ints(&[-1])),
    ];
    model(17, port("x", DType::F32, &["n", "4"]), nodes, &w)
}

#[test]
fn shape_arithmetic_is_done_at_import() {
    let m = open(shape_arithmetic());
    let i = m.import(&[("x", [1usize, 4].into())]).unwrap();
    let allowed = ["input", "reshape", "const", "expand", "add"];
    for n in i.graph.nodes() {
        assert!(allowed.contains(&n.op.name().as_str()), "{}", i.graph);
    }
    let x = t(&[1, 4], &[1f32, 2.0, 3.0, 4.0]);
    let y = reference::run(&i.graph, std::slice::from_ref(&x)).remove(0);
    assert_eq!((&y.dims[..], y.to_vec::<f64>()), (&[2, 2][..], vec![1.0, 2.0, 4.0, 5.0]));
    // A symbolic size gives the same result.
    let g = m.import(&[]).unwrap().graph;
    assert_eq!(g.shape(g.outputs()[0].node), &Shape::from([Dim::sym("n").mul(2.into()), 2.into()]));
    let g = g.bind(&g.solve(&[[1usize, 4].into()]).unwrap()).unwrap();
    assert_eq!(reference::run(&g, &[x]), [y]);
}

#[test]
fn a_symbolic_size_can_be_data() {
    let nodes = vec![
        node("Shape", &["x"], &["s"]),
        node("Cast", &["s"], &["f"]).int("to", 1),
        node("Mul", &["x", "f"], &["y"]),
    ];
    let g = import(model(17, port("x", DType::F32, &["n"]), nodes, &[])).unwrap().graph;
    let g = g.bind(&g.solve(&[[3usize].into()]).unwrap()).unwrap();
    let y = reference::run(&g, &[t(&[3], &[1f32, 2.0, 3.0])]).remove(0);
    assert_eq!(y.to_vec::<f64>(), [3.0, 6.0, 9.0]);
}

#[test]
fn all_unsupported_operators_are_listed_before_weights_are_read() {
    let mut m = mlp();
    let g = m.graph.as_mut().unwrap();
    // An external weight whose file does not exist, so that reading it would be an error.
    g.initializer[0].data_location = EXTERNAL;
    g.initializer[0].raw_data = None;
    let mut other = node("Fancy", &["h"], &["c"]);
    other.domain = "com.example".into();
    let mut nameless = node("Vague", &["h"], &["b"]);
    nameless.name = String::new();
    g.node.extend([
        node("Vague", &["h"], &["a"]),
        nameless,
        other,
        node("Relu", &["h"], &["d"]).int("turbo", 1),
        node("Gelu", &["h"], &["e"]),
    ]);
    let m = open(m);
    let Err(Error::UnsupportedOps(u)) = m.check("cpu") else { panic!() };
    let got: Vec<(&str, &str, i64, Vec<&str>)> = u
        .iter()
        .map(|u| (&*u.op, &*u.domain, u.opset, u.nodes.iter().map(String::as_str).collect()))
        .collect();
    assert_eq!(
        got,
        [
            ("Vague", "", 17, vec!["Vague-a", "Vague#3"]),
            ("Fancy", "com.example", 0, vec!["Fancy-c"]),
            ("Relu", "", 17, vec!["Relu-d"]),
            ("Gelu", "", 17, vec!["Gelu-e"]),
        ]
    );
    assert!(u.iter().all(|u| u.backend == "cpu"));
    assert!(u[2].reason.contains("turbo") && u[3].reason.contains("20"));
    assert!(matches!(m.import(&[]), Err(Error::UnsupportedOps(_))));
}

fn format_error(m: ModelProto, part: &str) {
    match import(m) {
        Err(Error::Format { what, .. }) => assert!(what.contains(part), "{what}"),
        r => panic!("{r:?}"),
    }
}

fn with(f: impl FnOnce(&mut GraphProto)) -> ModelProto {
    let mut m = mlp();
    f(m.graph.as_mut().unwrap());
    m
}

#[test]
fn malformed_graphs_are_typed_errors() {
    format_error(with(|g| g.node[0].input[0] = "ghost".into()), "Gemm-h reads 'ghost'");
    format_error(with(|g| g.output[0].name = "ghost".into()), "'ghost'");
    format_error(with(|g| g.node[0].input[2] = "y".into()), "cycle: Gemm-h, Relu-y");
    format_error(with(|g| g.node[1].output[0] = "h".into()), "another source");
    format_error(with(|g| g.node[1].output[0] = "w".into()), "another source");
    format_error(with(|g| g.initializer[1].name = "w".into()), "twice");
    format_error(with(|g| g.input.push(g.input[0].clone())), "twice");
    format_error(with(|g| g.initializer[0].data_location = EXTERNAL), "location");
    format_error(with(|g| g.input[0].r#type = None), "no type");
    assert!(Model::new(ModelProto::default(), External::none(), "m").is_err());
    // Wrong attribute type, missing operand, wrong operand shapes.
    for m in [
        with(|g| g.node[0].attribute[0].r#type = attribute::FLOAT),
        with(|g| g.node[1].input[0] = String::new()),
        with(|g| g.node[0].attribute.clear()),
    ] {
        let e = import(m).unwrap_err();
        assert!(matches!(e, Error::Argument { .. } | Error::Shape { .. }), "{e:?}");
    }
}

#[test]
fn nodes_may_be_in_any_order_and_unused_ones_are_dropped() {
    let m = with(|g| {
        g.node.reverse();
        g.node.push(node("Exp", &["h"], &["unused"]));
    });
    let i = import(m).unwrap();
    assert!(!i.graph.nodes().iter().any(|n| n.span.text() == "Exp-unused"));
    assert_eq!(i.graph.nodes().len(), import(mlp()).unwrap().graph.nodes().len());
}

#[test]
fn weights_stay_in_the_file() {
    let f = Bytes::from(mlp().encode_to_vec());
    let m = Model::parse(f.clone(), External::none(), "m").unwrap();
    let g = m.import(&[]).unwrap().graph;
    let weights: Vec<&ConstData> =
        g.nodes().iter().filter_map(|n| if let Op::Const(c) = &n.op { Some(c) } else { None }).collect();
    assert_eq!(weights.len(), 2);
    // The import does not copy the matrix, which the graph transposes. It may copy the small bias.
    assert!(weights.iter().any(|w| f.as_ptr_range().contains(&w.bytes().as_ptr())));
}

#[test]
fn external_weights_are_mapped_and_checked() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.onnx");
    let big = t(&[3, 100], &[0.5f32; 300]);
    let entry = |k: &str, v: &str| StringStringEntryProto { key: k.into(), value: v.into() };
    let mut m = model(
        17,
        port("x", DType::F32, &["1", "3"]),
        vec![node("MatMul", &["x", "w"], &["y"])],
        &[("w", big.clone())],
    );
    let w = &mut m.graph.as_mut().unwrap().initializer[0];
    w.raw_data = None;
    w.data_location = EXTERNAL;
    w.external_data = vec![entry("location", "w.bin"), entry("offset", "8")];
    std::fs::write(&path, m.encode_to_vec()).unwrap();
    let open = || Model::open(&path).unwrap().import(&[]);
    assert!(matches!(open(), Err(Error::Io { .. })));
    std::fs::write(dir.path().join("w.bin"), [&[0; 8], big.bytes()].concat()).unwrap();
    let y = reference::run(&open().unwrap().graph, &[t(&[1, 3], &[1f32, 1.0, 2.0])]).remove(0);
    assert_eq!((y.numel(), y.get(99).unwrap().as_f64()), (100, 2.0));
    std::fs::write(dir.path().join("w.bin"), big.bytes()).unwrap();
    assert!(matches!(open(), Err(Error::Format { .. })));
}

#[test]
fn given_shapes_must_fit() {
    let two = with(|g| {
        g.input.push(port("z", DType::F32, &["n", "2"]));
        g.node.push(node("Add", &["y", "z"], &["sum"]));
        g.output[0].name = "sum".into();
    });
    let m = open(two);
    // One input's size determines the other's.
    let g = m.import(&[("x", [4usize, 3].into())]).unwrap().graph;
    assert_eq!(g.shape(g.inputs()[1].node), &Shape::from([4usize, 2]));
    for s in [
        vec![("q", Shape::from([4usize]))],
        vec![("x", [4usize].into())],
        vec![("x", [4usize, 5].into())],
        vec![("x", [4usize, 3].into()), ("z", [5usize, 2].into())],
        vec![("x", [usize::MAX >> 1, 3].into())],
    ] {
        let e = m.import(&s).unwrap_err();
        assert!(matches!(e, Error::Argument { .. } | Error::Shape { .. }), "{s:?}: {e:?}");
    }
}

#[test]
fn sizes_with_one_name_may_differ_if_nothing_makes_them_equal() {
    let mut m = model(17, port("x", DType::F32, &["n"]), vec![], &[]);
    let g = m.graph.as_mut().unwrap();
    g.input.push(port("z", DType::F32, &["n"]));
    g.input.push(port("q", DType::F32, &["n"]));
    g.node = vec![node("Concat", &["x", "z"], &["y"]).int("axis", 0), node("Neg", &["q"], &["r"])];
    g.output.push(port("r", DType::F32, &["n"]));
    let m = open(m);
    let (x, z, q) = (("x", Shape::from([2usize])), ("z", [3usize].into()), ("q", [5usize].into()));
    let g = m.import(&[x.clone(), z.clone(), q]).unwrap().graph;
    let of = |k: usize| g.shape(g.outputs()[k].node).clone();
    assert_eq!((of(0), of(1)), (Shape::from([5usize]), Shape::from([5usize])));
    // Where an operator needs equal sizes, the error names the input.
    let mut sum = model(17, port("x", DType::F32, &["n"]), vec![node("Add", &["x", "z"], &["y"])], &[]);
    sum.graph.as_mut().unwrap().input.push(port("z", DType::F32, &["n"]));
    let e = open(sum).import(&[x.clone(), z.clone()]).unwrap_err();
    let text = e.to_string();
    let named = ["'z'", "n is 3 here and 2 elsewhere", "broadcast"].iter().all(|t| text.contains(t));
    assert!(matches!(&e, Error::Argument { .. }) && named, "{e}");
    // No size of `q` follows from the others.
    let e = m.import(&[x, z]).unwrap_err();
    assert!(matches!(&e, Error::Argument { .. }) && e.to_string().contains("'q'"), "{e}");
}

#[test]
fn outputs_without_a_type_follow_from_the_inputs() {
    let untyped = |name: &str| ValueInfoProto { name: name.into(), r#type: None };
    let open_with = |outputs: &[&str]| open(with(|g| g.output.extend(outputs.iter().map(|o| untyped(o)))));
    let m = open_with(&["h"]);
    assert_eq!(m.output_names().unwrap(), ["y", "h"]);
    let ports = m.outputs().unwrap();
    assert_eq!(ports[1].shape(), Some(&Shape::from([Dim::sym("n"), 2.into()])));
    assert_eq!(ports[1].dtype().unwrap(), DType::F32);
    assert_eq!(m.import(&[("x", [4usize, 3].into())]).unwrap().outputs, ["y", "h"]);
    // A sequence is no tensor of a graph: such a model runs in stages, and the type is not known before.
    let mut m = mlp();
    let g = m.graph.as_mut().unwrap();
    g.node.push(node("SequenceConstruct", &["y"], &["s"]));
    g.output.push(untyped("s"));
    let m = open(m);
    assert!(matches!(m.outcome(&[], &[]).unwrap(), Outcome::Staged(_)));
    let e = m.outputs().unwrap_err();
    assert!(matches!(e, Error::Unsupported { .. }) && e.to_string().contains("'s'"), "{e}");
    // The list of what is known is no error, and has the types that are declared.
    let known = m.known_outputs().unwrap();
    assert_eq!((&*known[0].0, known[0].1.as_ref()), ("y", Some(&m.typed_outputs().unwrap()[0])));
    assert_eq!(known[1], ("s".to_string(), None));
    let m = open_with(&["h"]);
    let all = m.outputs().unwrap().into_iter().map(|p| (p.name.clone(), Some(p)));
    assert_eq!(m.known_outputs().unwrap(), all.collect::<Vec<_>>());
}

#[test]
fn outputs_without_a_type_may_be_unknown_until_a_run() {
    let reshape = |shape: ValueInfoProto, x: ValueInfoProto| {
        let mut m = model(17, x, vec![node("Reshape", &["x", "s"], &["y"])], &[]);
        let g = m.graph.as_mut().unwrap();
        g.input.push(shape);
        g.output[0].r#type = None;
        open(m)
    };
    let x = port("x", DType::F32, &["2", "3"]);
    // A value of an input determines the shape.
    let by_value = reshape(port("s", DType::I64, &["2"]), x.clone());
    // The ranks of the inputs are open.
    let mut unranked = x;
    if let Some(TypeProto { value: Some(TypeValue::Tensor(t)) }) = &mut unranked.r#type {
        t.shape = None;
    }
    let by_rank = reshape(port("s", DType::I64, &["2"]), unranked);
    for m in [by_value, by_rank] {
        m.outputs().unwrap_err();
        assert_eq!(m.known_outputs().unwrap(), [("y".to_string(), None)]);
    }
}

#[test]
fn inputs_that_determine_shapes_are_fixed_by_value() {
    let mut m =
        model(17, port("x", DType::F32, &["2", "3"]), vec![node("Reshape", &["x", "s"], &["y"])], &[]);
    m.graph.as_mut().unwrap().input.push(port("s", DType::I64, &["2"]));
    let m = open(m);
    assert!(matches!(m.import(&[]), Err(Error::Unsupported { .. })));
    let x = t(&[2, 3], &[0f32; 6]);
    let i = m.import_with(&[], &[("x", x), ("s", ints(&[3, -1]))]).unwrap();
    assert_eq!(i.fixed, ["s"]);
    assert_eq!(i.graph.inputs().len(), 2);
    assert_eq!(i.graph.shape(i.graph.outputs()[0].node), &Shape::from([3usize, 2]));
    let wrong = m.import_with(&[], &[("s", t(&[2], &[3i32, 2]))]);
    assert!(matches!(wrong, Err(Error::Argument { .. })));
}

#[test]
fn values_that_are_not_tensors_are_named() {
    let element = port("", DType::F32, &["2"]).r#type.map(Box::new);
    let seq = TypeValue::Sequence(Box::new(ElementType { elem_type: element }));
    let seq = TypeProto { value: Some(seq) };
    let m = with(|g| g.input[0].r#type = Some(seq));
    assert!(matches!(import(m), Err(Error::Unsupported { what, .. }) if what.contains("a sequence")));
    let seq = TypeProto { value: Some(TypeValue::Sequence(Box::default())) };
    assert!(matches!(import(with(|g| g.input[0].r#type = Some(seq))), Err(Error::Format { .. })));
    let mut m = mlp();
    m.opset_import[0].version = 99;
    assert!(matches!(import(m), Err(Error::UnsupportedOps(u)) if u.len() == 2));
}

#[test]
fn attack_deep_nesting() {
    let mut g = GraphProto::default();
    for _ in 0..200 {
        let n = node("If", &["x"], &["y"]).attr("b", attribute::GRAPH, |a| a.g = Some(Box::new(g)));
        g = GraphProto { node: vec![n], ..Default::default() };
    }
    let f = ModelProto { graph: Some(g), ..Default::default() }.encode_to_vec();
    assert!(matches!(Model::parse(f.into(), External::none(), "m"), Err(Error::Format { .. })));
}

#[test]
fn attack_sizes_that_do_not_fit_memory() {
    let huge = ints(&[1 << 40, 1 << 40]);
    for n in [
        node("Expand", &["x", "w"], &["y"]),
        node("ConstantOfShape", &["w"], &["y"]),
        node("Tile", &["x", "w"], &["y"]),
    ] {
        let m = model(17, port("x", DType::F32, &["1", "1"]), vec![n], &[("w", huge.clone())]);
        assert!(matches!(import(m), Err(Error::Shape { .. })));
    }
    let x = port("x", DType::F32, &["9223372036854775807", "9223372036854775807"]);
    assert!(matches!(
        import(model(17, x, vec![node("Relu", &["x"], &["y"])], &[])),
        Err(Error::Shape { .. })
    ));
    let w =
        [("a", t(&[], &[0i64])), ("b", t(&[], &[i64::MAX])), ("c", t(&[], &[1i64])), ("z", t(&[], &[0i64]))];
    for step in ["c", "z"] {
        let n = vec![node("Range", &["a", "b", step], &["y"])];
        assert!(matches!(import(model(17, port("x", DType::F32, &[]), n, &w)), Err(Error::Argument { .. })));
    }
}

proptest::proptest! {
    #[test]
    fn damaged_models_never_panic(at in 0usize..2000, with in 0u8..) {
        for m in [mlp(), shape_arithmetic()] {
            let mut f = m.encode_to_vec();
            let n = f.len();
            f[at % n] = with;
            if let Ok(m) = Model::parse(f.into(), External::none(), "m") {
                let _ = (m.inputs(), m.outputs(), m.import(&[("x", [2usize, 4].into())]), m.import(&[]));
            }
        }
    }
}

#[test]
fn sparse_weights_equal_dense_ones() {
    let s = SparseTensorProto {
        values: Some(super::tensor::encode(&t(&[2], &[3f32, -1.0]), "w")),
        indices: Some(super::tensor::encode(&ints(&[1, 2]), "")),
        dims: vec![3],
    };
    let mut m = model(17, port("x", DType::F32, &["3"]), vec![node("Mul", &["x", "w"], &["y"])], &[]);
    let g = m.graph.as_mut().unwrap();
    g.sparse_initializer.push(s);
    // A weight may be declared as an input too. It is no input of a run.
    g.input.push(port("w", DType::F32, &["3"]));
    let names: Vec<String> = open(m.clone()).summary().inputs.into_iter().map(|p| p.0).collect();
    assert_eq!(names, ["x"]);
    let i = import(m).unwrap();
    let y = reference::run(&i.graph, &[t(&[3], &[5f32, 5.0, 5.0])]).remove(0);
    assert_eq!(y.to_vec::<f64>(), [0.0, 15.0, -5.0]);
}
