//! Small ONNX models with different structures, which tests and fuzz targets mutate.
#![allow(unreachable_pub, reason = "public for the test files that include this one")]

use halcyon_formats::onnx::proto::*;

pub fn floats(name: &str, dims: &[i64], v: &[f32]) -> TensorProto {
    let raw: Vec<u8> = v.iter().flat_map(|x| x.to_le_bytes()).collect();
    TensorProto {
        name: name.into(),
        dims: dims.into(),
        data_type: 1,
        raw_data: Some(raw.into()),
        ..Default::default()
    }
}

pub fn ints(name: &str, v: &[i64]) -> TensorProto {
    let raw: Vec<u8> = v.iter().flat_map(|x| x.to_le_bytes()).collect();
    TensorProto {
        name: name.into(),
        dims: vec![v.len() as i64],
        data_type: 7,
        raw_data: Some(raw.into()),
        ..Default::default()
    }
}

/// Makes a tensor a scalar.
pub fn scalar(mut t: TensorProto) -> TensorProto {
    t.dims.clear();
    t
}

pub fn port(name: &str, elem_type: i32, dims: &[i64]) -> ValueInfoProto {
    let dim = |d: &i64| Dimension { value: (*d >= 0).then_some(DimValue::Value(*d)) };
    let shape = Some(TensorShapeProto { dim: dims.iter().map(dim).collect() });
    let t = TypeValue::Tensor(TensorType { elem_type, shape });
    ValueInfoProto { name: name.into(), r#type: Some(TypeProto { value: Some(t) }) }
}

pub fn node(op: &str, inputs: &[&str], outputs: &[&str]) -> NodeProto {
    let s = |v: &[&str]| v.iter().map(|x| x.to_string()).collect();
    NodeProto { op_type: op.into(), input: s(inputs), output: s(outputs), ..Default::default() }
}

pub fn with(mut n: NodeProto, name: &str, f: impl FnOnce(&mut AttributeProto)) -> NodeProto {
    let mut a = AttributeProto { name: name.into(), ..Default::default() };
    f(&mut a);
    n.attribute.push(a);
    n
}

pub fn int(n: NodeProto, name: &str, v: i64) -> NodeProto {
    with(n, name, |a| (a.r#type, a.i) = (attribute::INT, v))
}

pub fn list(n: NodeProto, name: &str, v: &[i64]) -> NodeProto {
    with(n, name, |a| (a.r#type, a.ints) = (attribute::INTS, v.into()))
}

pub fn body(n: NodeProto, name: &str, g: GraphProto) -> NodeProto {
    with(n, name, |a| (a.r#type, a.g) = (attribute::GRAPH, Some(Box::new(g))))
}

pub fn graph(
    node: Vec<NodeProto>,
    input: Vec<ValueInfoProto>,
    output: Vec<ValueInfoProto>,
    initializer: Vec<TensorProto>,
) -> GraphProto {
    GraphProto { name: "g".into(), node, input, output, initializer, ..Default::default() }
}

pub fn model(opset: i64, g: GraphProto) -> ModelProto {
    ModelProto {
        ir_version: 8,
        opset_import: vec![OperatorSetIdProto { domain: String::new(), version: opset }],
        graph: Some(g),
        ..Default::default()
    }
}

/// `levels` nested `If` nodes.
pub fn nested_if(levels: usize) -> GraphProto {
    let mut g = graph(vec![node("Neg", &["x"], &["y"])], vec![], vec![port("y", 1, &[2])], vec![]);
    for _ in 0..levels {
        let other = graph(vec![node("Abs", &["x"], &["y"])], vec![], vec![port("y", 1, &[2])], vec![]);
        let n = body(body(node("If", &["c"], &["y"]), "then_branch", g), "else_branch", other);
        g = graph(vec![n], vec![], vec![port("y", 1, &[2])], vec![]);
    }
    g.input = vec![port("x", 1, &[2]), port("c", 9, &[])];
    g
}

/// A `Loop` that adds `x` `trips` times and returns all partial sums.
pub fn repeated(trips: i64) -> GraphProto {
    let step = graph(
        vec![
            node("Add", &["s", "x"], &["t"]),
            node("Identity", &["go"], &["on"]),
            node("Identity", &["t"], &["row"]),
        ],
        vec![port("i", 7, &[]), port("go", 9, &[]), port("s", 1, &[2])],
        vec![port("on", 9, &[]), port("t", 1, &[2]), port("row", 1, &[2])],
        vec![],
    );
    graph(
        vec![body(node("Loop", &["n", "", "x"], &["last", "y"]), "body", step)],
        vec![port("x", 1, &[2])],
        vec![port("last", 1, &[2]), port("y", 1, &[-1, 2])],
        vec![scalar(ints("n", &[trips]))],
    )
}

fn scan() -> GraphProto {
    let step = graph(
        vec![node("Add", &["s", "v"], &["t"]), node("Mul", &["t", "t"], &["w"])],
        vec![port("s", 1, &[2]), port("v", 1, &[2])],
        vec![port("t", 1, &[2]), port("w", 1, &[2])],
        vec![],
    );
    let n = int(body(node("Scan", &["z", "x"], &["last", "y"]), "body", step), "num_scan_inputs", 1);
    graph(
        vec![n],
        vec![port("x", 1, &[3, 2])],
        vec![port("last", 1, &[2]), port("y", 1, &[3, 2])],
        vec![floats("z", &[2], &[0.0, 0.0])],
    )
}

fn sequences() -> GraphProto {
    let each =
        graph(vec![node("Neg", &["e"], &["f"])], vec![port("e", 1, &[])], vec![port("f", 1, &[])], vec![]);
    graph(
        vec![
            int(node("SplitToSequence", &["x"], &["s"]), "axis", 0),
            body(node("SequenceMap", &["s"], &["m"]), "body", each),
            node("SequenceInsert", &["m", "x"], &["i"]),
            node("SequenceAt", &["i", "k"], &["at"]),
            node("SequenceLength", &["i"], &["len"]),
            node("Optional", &["at"], &["o"]),
            node("OptionalGetElement", &["o"], &["y"]),
        ],
        vec![port("x", 1, &[4, 2])],
        vec![port("y", 1, &[-1, -1]), port("len", 7, &[])],
        vec![scalar(ints("k", &[1]))],
    )
}

fn convolution() -> GraphProto {
    let conv = list(list(node("Conv", &["x", "w", "b"], &["c"]), "pads", &[1, 1, 1, 1]), "strides", &[2, 2]);
    let pool = list(list(node("MaxPool", &["r"], &["p"]), "kernel_shape", &[2, 2]), "strides", &[2, 2]);
    graph(
        vec![
            conv,
            node("Relu", &["c"], &["r"]),
            pool,
            node("GlobalAveragePool", &["p"], &["g"]),
            int(node("Flatten", &["g"], &["f"]), "axis", 1),
            int(node("Gemm", &["f", "m"], &["l"]), "transB", 1),
            int(node("Softmax", &["l"], &["y"]), "axis", 1),
        ],
        vec![port("x", 1, &[1, 2, 8, 8])],
        vec![port("y", 1, &[1, 2])],
        vec![
            floats("w", &[3, 2, 3, 3], &[0.1; 54]),
            floats("b", &[3], &[0.0; 3]),
            floats("m", &[2, 3], &[0.5; 6]),
        ],
    )
}

fn shapes() -> GraphProto {
    graph(
        vec![
            node("Shape", &["x"], &["s"]),
            int(node("Gather", &["s", "k"], &["n"]), "axis", 0),
            int(node("Concat", &["n", "one"], &["t"]), "axis", 0),
            node("Reshape", &["x", "t"], &["r"]),
            node("Expand", &["r", "e"], &["b"]),
            node("Tile", &["b", "e2"], &["q"]),
            list(node("Transpose", &["q"], &["tr"]), "perm", &[2, 0, 1]),
            node("Slice", &["tr", "from", "to", "ax", "st"], &["sl"]),
            node("Pad", &["sl", "pads"], &["pd"]),
            node("ConstantOfShape", &["e2"], &["cs"]),
            node("Range", &["r0", "r1", "r2"], &["rg"]),
            int(node("Cast", &["rg"], &["rf"]), "to", 1),
            node("ReduceSum", &["pd", "ax"], &["rs"]),
            node("Add", &["rs", "half"], &["y"]),
            node("Mul", &["cs", "half"], &["z"]),
        ],
        vec![port("x", 1, &[3, 4])],
        vec![port("y", 1, &[-1, -1, -1]), port("z", 1, &[-1, -1, -1]), port("rf", 1, &[-1])],
        vec![
            ints("k", &[0]),
            ints("one", &[-1]),
            ints("e", &[2, 3, 4]),
            ints("e2", &[1, 2, 1]),
            ints("from", &[3]),
            ints("to", &[-9]),
            ints("ax", &[0]),
            ints("st", &[-2]),
            ints("pads", &[0, 1, 0, 0, 0, 1]),
            scalar(ints("r0", &[1])),
            scalar(ints("r1", &[9])),
            scalar(ints("r2", &[3])),
            floats("half", &[1], &[0.5]),
        ],
    )
}

fn function() -> ModelProto {
    let refer = with(node("LeakyRelu", &["a"], &["b"]), "alpha", |a| {
        (a.r#type, a.ref_attr_name) = (attribute::FLOAT, "slope".into())
    });
    let mut call =
        with(node("Bend", &["x"], &["y"]), "slope", |a| (a.r#type, a.f) = (attribute::FLOAT, 0.25));
    call.domain = "own".into();
    let set = |d: &str, version| OperatorSetIdProto { domain: d.into(), version };
    let mut m = model(17, graph(vec![call], vec![port("x", 1, &[3])], vec![port("y", 1, &[3])], vec![]));
    m.opset_import.push(set("own", 1));
    m.functions = vec![FunctionProto {
        name: "Bend".into(),
        domain: "own".into(),
        input: vec!["a".into()],
        output: vec!["b".into()],
        attribute: vec!["slope".into()],
        node: vec![refer],
        opset_import: vec![set("", 17)],
        ..Default::default()
    }];
    m
}

fn sparse() -> GraphProto {
    let mut g = graph(
        vec![node("MatMul", &["x", "w"], &["y"])],
        vec![port("x", 1, &[2, 3])],
        vec![port("y", 1, &[2, 4])],
        vec![],
    );
    g.sparse_initializer = vec![SparseTensorProto {
        values: Some(floats("w", &[2], &[1.0, 2.0])),
        indices: Some(ints("", &[1, 7])),
        dims: vec![3, 4],
    }];
    g
}

/// All models, by name.
pub fn all() -> Vec<(&'static str, ModelProto)> {
    vec![
        ("if", model(17, nested_if(3))),
        ("loop", model(17, repeated(3))),
        ("scan", model(17, scan())),
        ("sequences", model(17, sequences())),
        ("convolution", model(17, convolution())),
        ("shapes", model(18, shapes())),
        ("function", function()),
        ("sparse", model(17, sparse())),
    ]
}
