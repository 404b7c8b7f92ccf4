//! `halcyon compare`: Halcyon and ONNX Runtime on the same models.

use crate::common::*;
use crate::ort::has_library;
use halcyon_formats::npy;
use halcyon_formats::onnx::proto::*;
use halcyon_ir::{ConstData, DType};
use halcyon_test::seed_models as small;
use prost::Message;
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};

/// The programs that are compared: with each other, and each with itself on two models.
const PAIRS: [&str; 3] = ["halcyon,ort", "halcyon,halcyon", "ort,ort"];

fn compare(model: &Path, more: &[&str]) -> Done {
    halcyon(&[&["compare", text(model), "--backend", "cpu", "--repeat", "1"], more].concat())
}

/// The report of two models that differ.
fn differing(pair: &str, model: &Path, against: &Path) -> Value {
    // Options of Halcyon's device have no effect on ONNX Runtime alone.
    let args = ["compare", text(model), "--runtimes", pair, "--against", text(against), "--repeat", "1"];
    let done = halcyon(&[&args[..], &["--json"]].concat());
    assert_eq!(done.code, 6, "{pair}: {done:?}");
    done.json()
}

fn digits() -> PathBuf {
    root().join("models/digits.onnx")
}

fn decode(path: &Path) -> ModelProto {
    ModelProto::decode(fs::read(path).expect("a model").as_slice()).expect("a model")
}

fn graph(m: &mut ModelProto) -> &mut GraphProto {
    m.graph.as_mut().expect("a graph")
}

#[test]
fn both_programs_agree_and_the_report_has_times_and_memory() {
    if !has_library("both_programs_agree_and_the_report_has_times_and_memory") {
        return;
    }
    let v = compare(&digits(), &["-i", "models/digit-7.png", "--json"]).ok().json();
    assert_eq!((&v["agrees"], &v["random"], &v["search"]), (&true.into(), &false.into(), &Value::Null));
    let o = &v["outputs"][0];
    assert_eq!(o["name"], "probabilities");
    assert!(o["max_abs"].as_f64().expect("a number") < 1e-5 && o["outside"] == 0, "{o}");
    assert!(o["of_tolerance"].as_f64().expect("a number") < 0.5, "{o}");
    let [ours, theirs] = [0, 1].map(|i| v["runtimes"][i].clone());
    assert_eq!((&ours["name"], &theirs["name"]), (&"halcyon".into(), &"ort".into()));
    assert_eq!(ours["backend"]["id"], "cpu:0");
    assert_eq!(theirs["providers"][0], "CPUExecutionProvider");
    for r in [&ours, &theirs] {
        assert!(r["time_ms"]["median"].as_f64().expect("a time") > 0.0 && r["time_ms"]["runs"] == 1, "{r}");
        if cfg!(target_os = "linux") {
            let of = |k: &str| r["memory"][k].as_u64().unwrap_or_else(|| panic!("{k} in {r}"));
            assert!(of("before") > 0 && of("peak") > of("before") && of("readings") > 1, "{r}");
            assert!(of("with_file_pages") >= of("peak"), "{r}");
        }
    }
    let text = compare(&digits(), &[]).ok().out;
    for part in
        ["compared halcyon ", "with     ONNX Runtime 1.", "probabilities", "agrees", "time ", "memory "]
    {
        assert!(text.contains(part), "{part}: {text}");
    }
    let answer = compare(&digits(), &["-q"]).ok().out;
    assert!(answer.contains("probabilities") && !answer.contains("time "), "{answer}");
}

/// A chain of `n` layers, `h[i + 1] = relu(h[i] * w[i] + b[i])`, where each layer is three nodes with weights
/// of their own.
fn layers(n: usize) -> ModelProto {
    let (mut nodes, mut weights) = (vec![], vec![]);
    for i in 0..n {
        let name = |s: &str| format!("{s}{i}");
        let (w, b, m, a) = (name("w"), name("b"), name("m"), name("a"));
        let (x, y) = (if i == 0 { "x".into() } else { name("h") }, format!("h{}", i + 1));
        let w_values: Vec<f32> = (0..4).map(|k| 0.9 + 0.05 * (k + i % 3) as f32).collect();
        weights.push(small::floats(&w, &[4], &w_values));
        weights.push(small::floats(&b, &[4], &[0.1; 4]));
        for (op, inputs, output) in
            [("Mul", vec![&x, &w], &m), ("Add", vec![&m, &b], &a), ("Relu", vec![&a], &y)]
        {
            let inputs: Vec<&str> = inputs.into_iter().map(String::as_str).collect();
            let name = format!("{op}_{i}");
            nodes.push(NodeProto { name, ..small::node(op, &inputs, &[output]) });
        }
    }
    let of = |name: &str| port(name, DType::F32, &[Ok(2), Ok(4)]);
    let g = small::graph(nodes, vec![of("x")], vec![of(&format!("h{n}"))], weights);
    small::model(17, g)
}

/// Adds `by` to the first value of a weight.
fn alter(m: &mut ModelProto, weight: &str, by: f32) {
    alter_each(m, weight, |i| if i == 0 { by } else { 0.0 });
}

/// Adds `by` of the value's number to each value of a weight.
fn alter_each(m: &mut ModelProto, weight: &str, by: impl Fn(usize) -> f32) {
    let all = &mut graph(m).initializer;
    let t = all.iter_mut().find(|t| t.name == weight).expect("the weight");
    let mut raw = t.raw_data.as_ref().expect("raw data").to_vec();
    for (i, bytes) in raw.chunks_exact_mut(4).enumerate() {
        let old = f32::from_le_bytes((&*bytes).try_into().expect("four bytes"));
        bytes.copy_from_slice(&(old + by(i)).to_le_bytes());
    }
    t.raw_data = Some(raw.into());
}

/// One weight of the second model is altered. The node that reads it is the first that differs: in a small
/// model, and in one with more values than one run returns.
#[test]
fn an_altered_weight_is_found_at_its_node() {
    let test = "an_altered_weight_is_found_at_its_node";
    let pairs: Vec<&str> = match has_library(test) {
        true => PAIRS.to_vec(),
        false => vec![PAIRS[1]],
    };
    let dir = tempfile::tempdir().expect("a folder");
    let seed = halcyon_test::seed(test);
    let (whole, altered) = (dir.path().join("whole.onnx"), dir.path().join("altered.onnx"));
    for n in [1, 3, 70] {
        let m = layers(n);
        save(&m, &whole);
        let i = (seed % n as u64) as usize;
        for (op, weight) in [("Mul", format!("w{i}")), ("Add", format!("b{i}"))] {
            let mut other = m.clone();
            alter(&mut other, &weight, 0.75);
            save(&other, &altered);
            for pair in &pairs {
                let v = differing(pair, &whole, &altered);
                let first = &v["search"]["first"];
                assert_eq!(first["node"], format!("{op}_{i}"), "{pair}, {n} layers: {first}");
                assert_eq!(first["op"], op);
                assert!(first["max_abs"].as_f64().expect("a number") > 0.1, "{first}");
                // What the node reads agrees.
                let operand = &first["operands"][0];
                let agrees = &operand["difference"]["agrees"];
                assert!(agrees == true || operand["name"] == "x", "{first}");
                assert_eq!(v["search"]["skipped"], serde_json::json!([]));
                assert_eq!(v["search"]["values"], 3 * n);
            }
        }
    }
    let long = format!("halcyon,{}", if pairs.len() > 1 { "ort" } else { "halcyon" });
    let done = compare(&whole, &["--runtimes", &long, "--against", text(&altered)]);
    done.code_is(6, "first    node Add_");
}

/// A trained model, each of whose weights is altered in turn.
#[test]
fn an_altered_weight_of_a_trained_model_is_found() {
    if !has_library("an_altered_weight_of_a_trained_model_is_found") {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("altered.onnx");
    let mut m = decode(&digits());
    let g = graph(&mut m).clone();
    let floats = g.initializer.iter().filter(|t| t.data_type == 1 && t.raw_data.is_some());
    let weights: Vec<String> = floats.map(|t| t.name.clone()).collect();
    assert!(weights.len() >= 4, "{weights:?}");
    let drawn = drawn("an_altered_weight_of_a_trained_model_is_found", weights.len());
    for (_, w) in weights.iter().enumerate().filter(|(i, _)| drawn.is_none_or(|d| d == *i)) {
        let mut other = m.clone();
        // All values, because a single one may only reach a neuron that is off. They are not equal, because
        // the softmax takes away what all logits have in common.
        alter_each(&mut other, w, |i| 3.0 * (i * 7919 % 13) as f32 / 13.0);
        save(&other, &path);
        let v = differing("halcyon,ort", &digits(), &path);
        let first = &v["search"]["first"];
        let value = first["value"].as_str().unwrap_or_else(|| panic!("{w}: {v}"));
        let reader = g.node.iter().find(|n| n.output.iter().any(|o| o == value)).expect("the node");
        assert!(reader.input.contains(w), "{w} is not read by {}: {first}", reader.op_type);
    }
}

/// Nodes with graphs, results with data-dependent shapes, sequences and optionals on the way.
#[test]
fn nodes_of_every_kind_are_passed() {
    if !has_library("nodes_of_every_kind_are_passed") {
        return;
    }
    let f32s = |name: &str| port(name, DType::F32, &[Ok(4)]);
    let branch = |op: &str, out: &str| {
        small::graph(vec![small::node(op, &["x"], &[out])], vec![], vec![f32s(out)], vec![])
    };
    let choice = small::body(small::node("If", &["yes"], &["chosen"]), "then_branch", branch("Abs", "t"));
    let choice = small::body(choice, "else_branch", branch("Neg", "e"));
    let mut nodes = vec![
        small::node("ReduceMax", &["x"], &["largest"]),
        small::node("Less", &["zero", "largest"], &["yes_1"]),
        small::node("Squeeze", &["yes_1"], &["yes"]),
        choice,
        small::node("NonZero", &["chosen"], &["places"]),
        small::node("Optional", &["chosen"], &["maybe"]),
        small::node("OptionalGetElement", &["maybe"], &["certain"]),
        small::node("SequenceConstruct", &["certain", "chosen"], &["two"]),
        small::int(small::node("ConcatFromSequence", &["two"], &["joined"]), "axis", 0),
        small::node("Mul", &["joined", "w"], &["y"]),
    ];
    nodes.iter_mut().for_each(|n| n.name = format!("the_{}", n.op_type));
    let weights = vec![small::floats("w", &[8], &[2.0; 8]), small::floats("zero", &[1], &[0.0])];
    let outputs = vec![port("y", DType::F32, &[Ok(8)]), port("places", DType::I64, &[Ok(1), Err("n")])];
    let m = small::model(17, small::graph(nodes, vec![f32s("x")], outputs, weights));
    let dir = tempfile::tempdir().expect("a folder");
    let (whole, altered) = (dir.path().join("whole.onnx"), dir.path().join("altered.onnx"));
    save(&m, &whole);
    compare(&whole, &["-i", "[1, 0, -2, 3]"]).ok();
    let mut other = m.clone();
    alter(&mut other, "w", 1.0);
    save(&other, &altered);
    let args = ["-i", "[1, 0, -2, 3]", "--against", text(&altered), "--json"];
    let done = compare(&whole, &args);
    assert_eq!(done.code, 6, "{done:?}");
    let search = &done.json()["search"];
    assert_eq!(search["first"]["node"], "the_Mul", "{search}");
    assert_eq!(search["nodes_with_graphs"], 1);
    // The crate for ONNX Runtime cannot read an optional.
    assert_eq!(search["skipped"][0]["name"], "maybe", "{search}");
    assert_eq!(search["skipped"].as_array().map(Vec::len), Some(1));
}

/// The search gives ONNX Runtime the model from memory. The data of weights in other files is still read from
/// the model's folder.
#[test]
fn external_data_is_found_by_both_programs() {
    if !has_library("external_data_is_found_by_both_programs") {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let files: Vec<PathBuf> = ["whole", "altered"]
        .iter()
        .map(|kind| {
            let folder = dir.path().join(kind);
            fs::create_dir(&folder).expect("a folder");
            let mut m = layers(3);
            if *kind == "altered" {
                alter(&mut m, "b1", 0.75);
            }
            for t in &mut graph(&mut m).initializer {
                let raw = t.raw_data.take().expect("raw data");
                let file = format!("{}.bin", t.name);
                fs::write(folder.join(&file), &raw).expect("written");
                t.data_location = EXTERNAL;
                let entry = |k: &str, v: &str| StringStringEntryProto { key: k.into(), value: v.into() };
                t.external_data = vec![entry("location", &file), entry("length", &raw.len().to_string())];
            }
            let path = folder.join("m.onnx");
            save(&m, &path);
            path
        })
        .collect();
    for pair in PAIRS {
        let v = differing(pair, &files[0], &files[1]);
        assert_eq!(v["search"]["first"]["node"], "Add_1", "{pair}: {v}");
    }
}

#[test]
fn random_numbers_are_compared_by_type() {
    if !has_library("random_numbers_are_compared_by_type") {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("random.onnx");
    let of = |name: &str| port(name, DType::F32, &[Ok(5)]);
    save(&model("RandomUniformLike", "", vec![of("x")], of("y")), &path);
    let v = compare(&path, &["--json"]).ok().json();
    assert_eq!((&v["random"], &v["agrees"]), (&true.into(), &true.into()));
    compare(&path, &[]).ok().code_is(0, "random numbers");
}

#[test]
fn mistakes_are_usage_errors() {
    let digits = digits();
    let run = |more: &[&str]| halcyon(&[&["compare", text(&digits)], more].concat());
    run(&["--runtimes", "halcyon,halcyon"]).fails(2, &["--against"]);
    run(&["--runtimes", "halcyon"]).fails(2, &["two programs", "1 are given"]);
    run(&["--runtimes", "halcyon,ort,ort"]).fails(2, &["3 are given"]);
    run(&["--runtimes", "halcyon,torch"]).code_is(2, "torch");
    run(&["--rtol", "-1"]).code_is(2, "is not a number from 0 on");
    run(&["--runtimes", "ort,ort", "--against", "m.onnx", "--level", "O0"])
        .fails(2, &["--level has no effect"]);
    run(&["--runtimes", "halcyon,halcyon", "--against", "none.onnx"]).fails(1, &["none.onnx"]);
    // A model with other inputs.
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("add.onnx");
    save(&add(DType::F32), &path);
    let other = ["--runtimes", "halcyon,halcyon", "--against", text(&path)];
    run(&other).fails(2, &["image", "a, b"]);
}

/// Tolerances decide, and a comparison of Halcyon with itself needs no other program.
#[test]
fn tolerances_decide() {
    let dir = tempfile::tempdir().expect("a folder");
    let (whole, altered) = (dir.path().join("whole.onnx"), dir.path().join("altered.onnx"));
    let m = layers(2);
    save(&m, &whole);
    let mut other = m.clone();
    alter(&mut other, "w1", 1e-3);
    save(&other, &altered);
    let args = ["--runtimes", "halcyon,halcyon", "--against", text(&altered), "-i", "ones"];
    let with = |more: &[&str]| compare(&whole, &[&args[..], more].concat());
    with(&["--rtol", "1e-2"]).ok();
    with(&["--rtol", "0", "--atol", "1e-2"]).ok();
    with(&["--rtol", "1e-6", "--atol", "0"]).code_is(6, "node Mul_1");
    with(&["--rtol", "0", "--atol", "0"]).code_is(6, "node Mul_1");
}

/// Reads the value that a case of the ONNX suite expects, if it is a tensor.
fn expected(path: &Path, port: &halcyon_formats::onnx::Port) -> Option<ConstData> {
    halcyon_formats::onnx::Datum::read_pb(path, &port.ty).ok()?.tensor().cloned()
}

/// Cases of the ONNX suite. Where ONNX Runtime runs a case and gets the expected result, it agrees with
/// Halcyon. Where it does not agree, ONNX Runtime's result is not the expected one.
#[test]
fn halcyon_agrees_with_onnx_runtime_on_the_suite() {
    let test = "halcyon_agrees_with_onnx_runtime_on_the_suite";
    if !has_library(test) {
        return;
    }
    let Some(dir) = prepared(test, "HALCYON_TESTDATA", "suite/node") else { return };
    let mut cases: Vec<PathBuf> =
        fs::read_dir(&dir).expect("the cases").flatten().map(|e| e.path()).collect();
    cases.sort();
    assert!(cases.len() > 1000, "{}", cases.len());
    let one_in = one_in(60);
    let first = halcyon_test::seed(test) as usize % one_in;
    let (mut agree, mut lacking, mut unlike, mut wrong) = (0, 0, vec![], vec![]);
    for case in cases.iter().skip(first).step_by(one_in) {
        let path = case.join("model.onnx");
        let m = halcyon_formats::onnx::Model::open(&path).expect("a model");
        let mut args: Vec<String> = vec!["--rtol".into(), "1e-3".into(), "--json".into()];
        for (i, p) in m.inputs().expect("inputs").iter().enumerate() {
            let file = case.join(format!("test_data_set_0/input_{i}.pb"));
            args.extend(["-i".into(), format!("{}={}", p.name, text(&file))]);
        }
        let name = case.file_name().expect("a name").to_string_lossy().into_owned();
        let done = compare(&path, &args.iter().map(String::as_str).collect::<Vec<_>>());
        match done.code {
            0 => agree += 1,
            // ONNX Runtime lacks an operator set, an operator or a type.
            1 | 3 => {
                assert!(done.out.contains("ONNX Runtime"), "{name}: {done:?}");
                lacking += 1;
            }
            6 => {
                let out = tempfile::tempdir().expect("a folder");
                let mut run: Vec<&str> = vec!["run", text(&path), "--runtime", "ort"];
                run.extend(args.iter().skip(3).map(String::as_str));
                run.extend(["--output-dir", text(out.path())]);
                halcyon(&run).ok();
                let ports = m.outputs().expect("outputs");
                let right = ports.iter().enumerate().all(|(i, p)| {
                    let file = case.join(format!("test_data_set_0/output_{i}.pb"));
                    let Some(want) = expected(&file, p) else { return true };
                    let got = npy::read(&out.path().join(format!("{}.npy", p.name))).expect("saved");
                    let close = |a: f64, b: f64| {
                        let by = (a - b).abs();
                        a == b || a.is_nan() && b.is_nan() || b.is_finite() && by <= 1e-7 + 1e-3 * b.abs()
                    };
                    got.dims == want.dims
                        && got.to_vec::<f64>().iter().zip(want.to_vec::<f64>()).all(|(a, b)| close(*a, b))
                });
                match right {
                    true => wrong.push(format!("{name}: {}", done.json()["outputs"])),
                    false => unlike.push(name),
                }
            }
            _ => panic!("{name}: {done:?}"),
        }
    }
    assert!(wrong.is_empty(), "ONNX Runtime has the expected result, and Halcyon differs: {wrong:#?}");
    println!("{agree} cases agree, ONNX Runtime lacks {lacking}, and is not right in {unlike:?}");
    assert!(agree > lacking && agree > 10 * unlike.len(), "{agree}, {lacking}, {unlike:?}");
}
