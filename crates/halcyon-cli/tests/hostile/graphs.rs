//! Tests of models whose graph is not valid: cycles, wrong types, missing parts, names that are too long.

use super::*;

#[test]
fn a_faulty_model_is_no_usage_error() {
    let mut a = Attacks::new();
    let scalars = |op: &str, of: &[f32]| {
        let names: Vec<String> = (0..of.len()).map(|k| format!("s{k}")).collect();
        let w: Vec<TensorProto> = names.iter().zip(of).map(|(n, v)| scalar(floats(n, &[1], &[*v]))).collect();
        let ins: Vec<&str> = names.iter().map(String::as_str).collect();
        (node(op, &ins, &["z"]), w)
    };
    let (n, w) = scalars("Range", &[0.0, 1.0, 0.0]);
    let mut g = op(node("Neg", &["x"], &["y"]), w);
    g.node.push(n);
    g.output = vec![port("z", 1, &[])];
    a.graph(g, 1, &["Range"]);
    let two = vec![ints("s", &[3, 5])];
    a.graph(op(node("Reshape", &["x", "s"], &["y"]), two), 1, &["Reshape"]);
    let top = int(node("TopK", &["x", "k"], &["y", "i"]), "axis", 7);
    a.graph(op(top, vec![ints("k", &[1])]), 1, &["TopK"]);
    let sum = with(node("Einsum", &["x"], &["y"]), "equation", |a| {
        (a.r#type, a.s) = (attribute::STRING, b"ij,jk->ik".to_vec().into())
    });
    a.graph(op(sum, vec![]), 1, &["Einsum"]);
    let still = list(node("Conv", &["x", "w"], &["y"]), "strides", &[0]);
    let w = floats("w", &[1, 1, 2], &[1.0, 2.0]);
    let g = graph(vec![still], vec![port("x", 1, &[1, 1, 4])], vec![port("y", 1, &[])], vec![w]);
    a.graph(g, 1, &["stride"]);
}

#[test]
fn graphs_that_are_none() {
    let mut a = Attacks::new();
    let y = || vec![port("y", 1, &[2])];
    let x = || vec![port("x", 1, &[2])];
    let cycle =
        vec![node("Add", &["x", "b"], &["a"]), node("Neg", &["a"], &["b"]), node("Abs", &["b"], &["y"])];
    a.graph(graph(cycle, x(), y(), vec![]), 1, &["cycle", "Add#0, Neg#1"]);
    a.graph(graph(vec![node("Add", &["x", "y"], &["y"])], x(), y(), vec![]), 1, &["cycle", "Add#0"]);
    a.graph(op(node("Neg", &["nothing"], &["y"]), vec![]), 1, &["reads 'nothing'"]);
    a.graph(graph(vec![], x(), y(), vec![]), 1, &["output 'y' is not computed"]);
    let twice = vec![node("Neg", &["x"], &["y"]), node("Abs", &["x"], &["y"])];
    a.graph(graph(twice, x(), y(), vec![]), 1, &["'y', a result of Abs#1, has another source"]);
    a.graph(
        graph(vec![node("Neg", &["x"], &["x"])], x(), vec![port("x", 1, &[2])], vec![]),
        1,
        &["another source"],
    );
    let two = vec![port("x", 1, &[2]), port("x", 1, &[2])];
    let g = graph(vec![node("Neg", &["x"], &["y"])], two, y(), vec![]);
    a.model(&model(17, g), &["--input", "x=ones"], 1, &["input 'x' is declared twice"]);
    let w = || floats("w", &[2], &[1.0, 2.0]);
    a.graph(op(node("Add", &["x", "w"], &["y"]), vec![w(), w()]), 1, &["initializer 'w' is declared twice"]);
    a.bytes(b"", &[], 1, &["an empty file"]);
    a.bytes(b"hello, this is no model", &[], 1, &["not an ONNX model"]);
    let mut m = model(17, op(node("Neg", &["x"], &["y"]), vec![]));
    m.opset_import = vec![m.opset_import[0].clone(); 5000];
    a.model(&m, &["--input", "ones"], 1, &["5000 operator sets"]);
}

#[test]
fn wrong_types_and_missing_parts() {
    let mut a = Attacks::new();
    let two = |n: NodeProto, b: ValueInfoProto| {
        graph(vec![n], vec![port("x", 1, &[2]), b], vec![port("y", 1, &[])], vec![])
    };
    a.graph(two(node("Add", &["x", "b"], &["y"]), port("b", 7, &[2])), 1, &["i64"]);
    a.graph(two(node("Add", &["x", "b"], &["y"]), port("b", 1, &[3])), 1, &["[2]", "[3]"]);
    a.graph(two(node("MatMul", &["x", "b"], &["y"]), port("b", 1, &[3, 2])), 1, &["matmul"]);
    a.graph(op(node("Add", &["x"], &["y"]), vec![]), 1, &["takes 2 operands"]);
    a.graph(op(node("Reshape", &["x"], &["y"]), vec![]), 1, &["operand 1 is missing"]);
    a.graph(op(node("Concat", &["x"], &["y"]), vec![]), 1, &["'axis' is missing"]);
    let wrong = with(node("Concat", &["x"], &["y"]), "axis", |a| (a.r#type, a.f) = (attribute::FLOAT, 0.0));
    a.graph(op(wrong, vec![]), 1, &["attribute 'axis' has type 1"]);
    a.graph(op(int(node("Concat", &["x"], &["y"]), "axis", i64::MIN), vec![]), 1, &["axis"]);
    // Invalid type codes in a weight and in an input; strings where numbers are needed.
    let odd = |code| TensorProto { data_type: code, ..floats("w", &[2], &[1.0, 2.0]) };
    a.graph(op(node("Add", &["x", "w"], &["y"]), vec![odd(0)]), 1, &["tensor 'w'"]);
    a.graph(op(node("Add", &["x", "w"], &["y"]), vec![odd(99)]), 1, &["tensor 'w'"]);
    a.graph(two(node("Add", &["x", "b"], &["y"]), port("b", -1, &[2])), 1, &["'b'"]);
    let words = vec!["a".into(), "b".into()];
    let text = TensorProto {
        name: "w".into(),
        dims: vec![2],
        data_type: 8,
        string_data: words,
        ..Default::default()
    };
    a.graph(op(node("Add", &["x", "w"], &["y"]), vec![text.clone()]), 3, &["strings"]);
    let few = TensorProto { dims: vec![1 << 40], ..text };
    a.graph(op(node("Add", &["x", "w"], &["y"]), vec![few]), 1, &["do not fill"]);
    // Inputs that are missing, of another shape, or of another dtype.
    let m = model(17, two(node("Add", &["x", "b"], &["y"]), port("b", 1, &[2])));
    let path = a.dir.path().join("two.onnx");
    save(&m, &path);
    let path = self::text(&path).to_string();
    let done = halcyon(&["run", &path, "--backend", "cpu", "--input", "ones"]);
    done.fails(2, &["not given", "b f32[2]"]);
    refused(&["run", &path, "--backend", "cpu", "--input", "ones", "--input", "zeros:3"], 2, &["'b'", "[3]"]);
    let npy_path = a.dir.path().join("i.npy");
    npy::write(&npy_path, &ConstData::from_slice(&[2], &[1i64, 2]).expect("a tensor")).expect("a file");
    let given = format!("b={}", self::text(&npy_path));
    refused(
        &["run", &path, "--backend", "cpu", "--input", "x=ones", "--input", &given],
        2,
        &["i64", "the model takes f32"],
    );
}

#[test]
fn sparse_weights() {
    let mut a = Attacks::new();
    let g = |dims: &[i64], at: TensorProto| {
        let mut g = op(node("Add", &["x", "w"], &["y"]), vec![]);
        let values = Some(floats("w", &[2], &[1.0, 2.0]));
        g.sparse_initializer = vec![SparseTensorProto { values, indices: Some(at), dims: dims.to_vec() }];
        g
    };
    a.graph(g(&[2], ints("", &[0, 2])), 1, &["sparse tensor 'w'", "outside"]);
    a.graph(g(&[2], ints("", &[-1, 1])), 1, &["outside"]);
    a.graph(g(&[2], ints("", &[1, 0])), 1, &["is not above"]);
    a.graph(g(&[i64::MAX], ints("", &[0, 1])), 1, &["too large"]);
    // A tensor of such a size is not allocated: the shapes do not match, or the device's limit is checked
    // first.
    a.graph(g(&[1 << 40], ints("", &[0, 1])), 1, &["[2]"]);
    let mut huge = g(&[1 << 30], ints("", &[0, 1]));
    huge.node = vec![node("Neg", &["w"], &["y"])];
    a.graph(huge, 5, &["out of memory"]);
    // A valid sparse tensor works.
    let path = a.dir.path().join("sparse.onnx");
    save(&model(17, g(&[2], ints("", &[0, 1]))), &path);
    let out = a.dir.path().join("out");
    let args = ["run", text(&path), "--backend", "cpu", "--input", "ones", "--output-dir", text(&out)];
    halcyon(&args).ok();
    assert_eq!(npy::read(&out.join("y.npy")).expect("an output").to_vec::<f32>(), [2.0, 3.0]);
}

#[test]
fn names_cannot_write_to_the_terminal() {
    let mut a = Attacks::new();
    a.graph(op(node("Neg", &["\u{1b}[31mred\u{7}"], &["y"]), vec![]), 1, &["\\u{1b}[31mred\\u{7}"]);
    let long = "n".repeat(10 << 20);
    a.graph(op(node("Neg", &[&long], &["y"]), vec![]), 1, &["more bytes"]);
    let many: Vec<NodeProto> =
        (0..5000).map(|k| node("Neg", &[&format!("v{}", (k + 1) % 5000)], &[&format!("v{k}")])).collect();
    a.graph(graph(many, vec![], vec![port("v0", 1, &[])], vec![]), 1, &["cycle", "and 4992 more"]);
}
