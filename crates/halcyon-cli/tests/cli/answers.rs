//! Tests of the command from a user's view: results, reports, errors and exit codes.

use crate::common::*;
use halcyon_formats::{npy, npz, onnx};
use halcyon_ir::{ConstData, DType};
#[cfg(all(target_os = "linux", feature = "cuda", feature = "rocm"))]
use halcyon_test::standin;
use serde_json::Value;

const SEVEN: [&str; 4] = ["run", "models/digits.onnx", "--input", "models/digit-7.png"];

fn seven(more: &[&str]) -> Vec<&'static str> {
    SEVEN.into_iter().chain(more.iter().map(|s| &*s.to_string().leak())).collect()
}

fn f32s(dims: &[usize], v: &[f32]) -> ConstData {
    ConstData::from_slice(dims, v).expect("values fill the shape")
}

#[test]
fn readmes_first_command_recognises_a_seven() {
    let d = halcyon(&seven(&["--top-k", "3"])).ok();
    let rank = d.out.lines().find(|l| l.trim_start().starts_with("1.")).expect("a first rank");
    assert_eq!(rank.split_whitespace().nth(1), Some("7"), "{}", d.out);
    let d = halcyon(&seven(&["--top-k", "3", "--labels", "models/digits-labels.txt"])).ok();
    let rank = d.out.lines().find(|l| l.trim_start().starts_with("1.")).expect("a first rank");
    assert!(rank.contains("seven (7)"), "{}", d.out);
    let d = halcyon(&seven(&["--top-k", "3", "-v"])).ok();
    for part in ["backend  ", "times    load ", "compile ", "run      ", "memory   "] {
        assert!(d.out.contains(part), "{part}: {}", d.out);
    }
}

#[test]
fn json_is_the_only_output_and_is_complete() {
    let args = ["--top-k", "2", "--repeat", "12", "--json", "--backend", "cpu", "--threads", "1"];
    let d = halcyon(&seven(&args)).ok();
    let v = d.json();
    assert_eq!(v["top_k"]["rows"][0][0]["index"], 7);
    assert_eq!(v["backend"]["id"], "cpu:0");
    assert_eq!(v["backend"]["rule"], "cpu was requested");
    assert_eq!(v["outputs"][0]["shape"], serde_json::json!([1, 10]));
    assert_eq!(v["times_ms"]["run"]["runs"], 12);
    for t in ["load", "open_device", "read_inputs", "compile"] {
        assert!(v["times_ms"][t].as_f64().expect("a time") > 0.0, "{t}");
    }
    let run = |k: &str| v["times_ms"]["run"][k].as_f64().expect("a time");
    assert!(0.0 < run("min") && run("min") <= run("median") && run("median") <= run("max"));
    // The classifier has 6,090 f32 parameters.
    assert!(v["memory"]["process_peak_bytes"].as_u64().is_none_or(|b| b > 6090 * 4));
    // Progress is only shown on a terminal, which stderr is not here.
    assert_eq!(d.err, "");
}

#[test]
fn receipts_are_measured() {
    let d = halcyon(&seven(&["--receipts", "--json", "--backend", "cpu"])).ok();
    let v = d.json();
    let receipts = v["receipts"].as_array().expect("receipts");
    assert!(receipts.iter().any(|r| r["transformation"] == "fusion"), "{receipts:?}");
    for r in receipts {
        assert!(r["gain"].as_f64().expect("a gain") > 0.0, "{r}");
        assert!(r["error"].as_f64().expect("an error") < 1e-4, "{r}");
    }
    // Level O0 applies no transformations; a disabled transformation has no receipt.
    let none = halcyon(&seven(&["--level", "none", "--json", "--backend", "cpu"])).ok().json();
    assert_eq!(none["receipts"], serde_json::json!([]));
    let some = halcyon(&seven(&["--without", "fusion", "--json", "--backend", "cpu"])).ok().json();
    assert!(some["receipts"].as_array().expect("receipts").iter().all(|r| r["transformation"] != "fusion"));
}

#[test]
fn every_kind_of_source_gives_its_values() {
    let dir = tempfile::tempdir().expect("a folder");
    let at = |name: &str| dir.path().join(name);
    save(&add(DType::F32), &at("m.onnx"));
    let (a, b) = (f32s(&[2, 3], &[1., 2., 3., 4., 5., 6.]), f32s(&[2, 3], &[10., 20., 30., 40., 50., 60.]));
    // Misleading file names: the content decides.
    npy::write(&at("a.png"), &a).expect("written");
    onnx::tensor::write_pb(&at("b.npy"), "other", &b).expect("written");
    npz::write(&at("both.npy"), &[("b", &b), ("a", &a), ("c", &a)]).expect("written");
    npz::write(&at("single.npz"), &[("x", &b)]).expect("written");
    let path = |n: &str| text(&at(n)).to_string();
    let run = |inputs: &[String]| -> Vec<f32> {
        let (model, out) = (path("m.onnx"), path("out"));
        let mut args = vec!["run", &model, "--backend", "cpu", "--output-dir", &out];
        inputs.iter().for_each(|i| args.extend(["--input", i]));
        halcyon(&args).ok();
        npy::read(&at("out/sum.npy")).expect("saved").to_vec()
    };
    let want = [11., 22., 33., 44., 55., 66.];
    assert_eq!(run(&[path("a.png"), path("b.npy")]), want);
    assert_eq!(run(&[format!("b={}", path("b.npy")), path("a.png")]), want);
    assert_eq!(run(&[path("both.npy")]), want);
    assert_eq!(run(&[format!("b={}", path("single.npz")), path("a.png")]), want);
    assert_eq!(run(&[path("a.png"), "ones".into()]), [2., 3., 4., 5., 6., 7.]);
    assert_eq!(run(&["zeros:1x3".into(), "b=ones:1x3".into()]), [1.; 3]);
    let random = run(&["random:4x3".into(), "zeros:4x3".into()]);
    assert_eq!(random, run(&["random:4,3".into(), "zeros:4,3".into()]));
    assert!(random.len() == 12 && random.iter().all(|v| (0.0..1.0).contains(v)));
}

#[test]
fn wrong_inputs_say_what_is_right() {
    let dir = tempfile::tempdir().expect("a folder");
    let at = |name: &str| dir.path().join(name);
    save(&add(DType::F32), &at("m.onnx"));
    npy::write(&at("f64.npy"), &ConstData::from_slice(&[1, 3], &[1f64; 3]).expect("fits")).expect("written");
    npy::write(&at("four.npy"), &f32s(&[1, 4], &[0.; 4])).expect("written");
    npz::write(&at("z.npz"), &[("x", &f32s(&[3], &[0.; 3])), ("y", &f32s(&[3], &[0.; 3]))]).expect("written");
    std::fs::write(at("text.npy"), "hello").expect("written");
    let m = text(&at("m.onnx")).to_string();
    let path = |n: &str| text(&at(n)).to_string();
    let run = |inputs: &[&str]| {
        let mut args = vec!["run", &m, "--backend", "cpu"];
        inputs.iter().for_each(|i| args.extend(["--input", i]));
        halcyon(&args)
    };
    run(&[]).fails(2, &["a f32[n, 3]", "--input a=random:1x3", "--input b=random:1x3"]);
    run(&["zeros"]).fails(2, &["b f32[n, 3]"]);
    run(&["c=zeros", "zeros"]).fails(2, &["no input 'c'", "a, b"]);
    run(&["a=zeros", "a=zeros"]).fails(2, &["given twice"]);
    run(&["zeros", "zeros", "zeros"]).fails(2, &["one too many"]);
    run(&["zeros:x", "zeros"]).fails(2, &["is not a shape"]);
    run(&[&path("z.npz"), "zeros"]).fails(2, &["it has x, y", "the model takes a, b"]);
    run(&[&path("gone.npy"), "zeros"]).fails(1, &["gone.npy"]);
    run(&[&path("text.npy"), "zeros"]).fails(1, &["a text file", "give .npy"]);
    run(&[&m, "zeros"]).fails(1, &["ONNX model"]);
    run(&[&path("f64.npy"), "zeros"]).fails(2, &["input 'a'", "f64", "takes f32", "astype(\"f4\")"]);
    run(&[&path("four.npy"), "zeros"]).fails(2, &["'a'", "[n, 3]", "[1, 4]"]);
    run(&["zeros:2x3", "zeros:5x3"]).fails(2, &["'b'"]);
}

#[test]
fn exit_codes_and_messages() {
    // Exit code 1: other errors.
    halcyon(&["run", "gone.onnx"]).fails(1, &["gone.onnx"]);
    halcyon(&["run", "README.md"]).fails(1, &["not an ONNX model"]);
    halcyon(&seven(&["--labels", "models/digits.onnx", "--top-k", "1"])).fails(1, &["digits.onnx"]);
    // Exit code 2: usage errors, found by the parser or after it.
    halcyon(&["run"]).fails(2, &["MODEL"]);
    halcyon(&["walk"]).fails(2, &["walk"]);
    halcyon(&seven(&["--repeat", "0"])).fails(2, &["--repeat"]);
    halcyon(&seven(&["--backend", "cudaa"])).fails(2, &["cudaa", "rocm"]);
    halcyon(&seven(&["--level", "fast"])).fails(2, &["fast", "O1"]);
    halcyon(&seven(&["--without", "luck"])).fails(2, &["luck", "fusion"]);
    halcyon(&seven(&["--threads", "0", "--backend", "cpu"])).fails(2, &["thread"]);
    halcyon(&seven(&["--device", "0"])).fails(2, &["--backend"]);
    halcyon(&seven(&["--labels", ".gitignore", "--top-k", "1"])).fails(2, &["10 classes"]);
    // Exit code 3: not supported.
    let o3 = ["-q", "--level", "O3", "--max-error", "1e-9"];
    halcyon(&seven(&o3)).fails(3, &["the measured error is", "Raise the bound"]);
    halcyon(&["trace", "models/digits.onnx", "--level", "O3"]).fails(3, &["O3", "optimize"]);
    // Exit code 2 again: options that would have no effect. With weights of 4 bits, activations stay floats.
    halcyon(&seven(&["--max-error", "0.1"])).fails(2, &["--max-error", "--level O3"]);
    for (weights, how) in [("int4", "minmax"), ("int4min", "percentile:99"), ("int4", "dynamic")] {
        let four = ["--level", "O3", "--weights", weights, "--activations", how];
        halcyon(&seven(&four)).fails(2, &["--activations", "no effect", weights]);
    }
    // Exit code 4: not available.
    halcyon(&seven(&["--backend", "cuda"])).fails(4, &["cuda"]);
    halcyon(&seven(&["--backend", "cpu", "--device", "9"])).fails(4, &["no device 9", "cpu:0"]);
    // Exit code 5: out of memory, on the host and on the device.
    let huge = ["run", "models/digits.onnx", "--input", "random:100000000000x1x8x8", "--backend", "cpu"];
    halcyon(&huge).fails(5, &["image", "f32[100000000000, 1, 8, 8]"]);
    halcyon(&seven(&["--backend", "cpu", "--memory-limit", "64"])).fails(5, &["out of memory", "cpu"]);
}

#[test]
fn errors_are_json_where_json_is_asked_for() {
    for (args, code, kind) in [
        (seven(&["--json", "--level", "O3", "--max-error", "1e-9"]), 3, "Unsupported"),
        (seven(&["--json", "--backend", "metal"]), 4, "Unavailable"),
        (seven(&["--json", "--no-such-option"]), 2, "Usage"),
        (vec!["run", "gone.onnx", "--json"], 1, "Io"),
        (vec!["conformance", "onnx", "models", "--json"], 2, "Argument"),
    ] {
        let d = halcyon(&args);
        let v = d.json();
        assert_eq!(d.code, code, "{d:?}");
        assert_eq!((&v["exit_code"], &v["error"]["kind"]), (&code.into(), &kind.into()), "{v}");
        assert!(v["error"]["message"].as_str().is_some_and(|m| !m.is_empty()), "{v}");
    }
}

#[test]
fn an_unsupported_model_lists_all_its_operators() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("m.onnx");
    let of = |n: &str| port(n, DType::F32, &[Ok(3)]);
    let mut m = model("Nonsense", "our.domain", vec![of("x")], of("y"));
    let g = m.graph.as_mut().expect("a graph");
    let mut second = g.node[0].clone();
    (second.op_type, second.domain, second.name) = ("FancyNorm".into(), String::new(), "deep/norm".into());
    g.node.push(second);
    // A weight whose file is missing; nothing may try to read it.
    g.initializer.push(onnx::proto::TensorProto {
        dims: vec![3],
        data_type: 1,
        name: "w".into(),
        external_data: vec![onnx::proto::StringStringEntryProto {
            key: "location".into(),
            value: "gone.bin".into(),
        }],
        data_location: 1,
        ..Default::default()
    });
    g.node[0].input.push("w".into());
    save(&m, &path);
    let parts = [
        "2 unsupported ops",
        "Nonsense (our.domain, opset 1)",
        "the_Nonsense",
        "FancyNorm",
        "opset 17",
        "deep/norm",
        "cpu",
    ];
    halcyon(&["run", text(&path), "--backend", "cpu", "--input", "zeros"]).fails(3, &parts);
    let v = halcyon(&["run", text(&path), "--backend", "cpu", "--json"]).json();
    assert_eq!(v["error"]["facts"]["ops"].as_array().map(Vec::len), Some(2), "{v}");
}

#[test]
fn no_opencl_library_is_unavailable_with_what_was_tried() {
    let mut c = command(&seven(&["--backend", "opencl"]));
    c.env("HALCYON_OPENCL_LIBRARY", "/nowhere/libNone.so");
    finish(&mut c).fails(4, &["opencl is not available", "/nowhere/libNone.so"]);
    // `auto` continues without OpenCL and reports the reason.
    let mut c = command(&seven(&["--json"]));
    c.env("HALCYON_OPENCL_LIBRARY", "/nowhere/libNone.so");
    let v = finish(&mut c).ok().json();
    assert_eq!(v["backend"]["id"], "cpu:0");
    let rejected: Vec<&Value> = v["backend"]["candidates"]
        .as_array()
        .expect("candidates")
        .iter()
        .filter(|c| c["backend"] == "opencl")
        .collect();
    assert!(
        rejected[0]["rejected"].as_str().is_some_and(|r| r.contains("/nowhere/libNone.so")),
        "{rejected:?}"
    );
}

#[test]
fn devices_lists_every_backend() {
    let v = halcyon(&["devices", "--json"]).ok().json();
    let rows = v.as_array().expect("an array");
    let ids: Vec<&str> = rows.iter().filter_map(|r| r["id"].as_str()).collect();
    let known: Vec<&str> = halcyon_hal::backend::all().into_iter().map(|b| b.id()).collect();
    assert_eq!(ids, known);
    for r in rows {
        // A backend has either devices or a reason.
        assert_eq!(r["available"] == true, r["reason"].is_null(), "{r}");
        assert_eq!(r["available"] == true, r["devices"].as_array().is_some_and(|d| !d.is_empty()), "{r}");
    }
    let text = halcyon(&["devices"]).ok().out;
    for r in rows {
        let id = r["id"].as_str().expect("an id");
        assert!(text.lines().any(|l| l.starts_with(id)), "{id}: {text}");
    }
}

#[test]
fn the_probing_child_answers_in_json() {
    let d = halcyon(&["__probe", "cpu"]).ok();
    assert_eq!(d.json()["devices"][0]["id"], "cpu:0");
    let d = halcyon(&["__probe", "opencl"]).ok();
    assert!(d.json().is_object() || d.json().is_string(), "{d:?}");
    assert!(!halcyon(&["--help"]).ok().out.contains("__probe"));
}

#[test]
fn help_has_examples_and_the_version_is_printed() {
    let top = halcyon(&["--help"]).ok().out;
    assert!(top.contains("Exit codes: 0 done, 1 error, 2 usage, 3 not supported"), "{top}");
    for cmd in [
        &["run"][..],
        &["devices"],
        &["conformance", "onnx"],
        &["conformance", "ops"],
        &["replay"],
        &["trace"],
    ] {
        let args: Vec<&str> = cmd.iter().copied().chain(["--help"]).collect();
        let out = halcyon(&args).ok().out;
        assert!(out.contains("Examples:\n  halcyon "), "{out}");
    }
    assert_eq!(halcyon(&["--version"]).ok().out, format!("halcyon {}\n", env!("CARGO_PKG_VERSION")));
}

#[test]
fn trace_shows_graph_passes_plan_and_times() {
    let d = halcyon(&["trace", "models/digits.onnx", "--backend", "cpu"]).ok();
    for part in ["graph (", "%0: ", "image", "passes\n", "fusion", "plan (", "scratch ", "times\n", "import"]
    {
        assert!(d.out.contains(part), "{part}: {}", d.out);
    }
    let v =
        halcyon(&["trace", "models/digits.onnx", "--backend", "cpu", "--level", "O0", "--json"]).ok().json();
    let (nodes, steps) =
        (v["graph"]["nodes"].as_array().expect("nodes"), v["plan"]["steps"].as_array().expect("steps"));
    assert!(nodes.len() > 5 && steps.len() > 5 && v["times_ms"]["lower"].as_f64().is_some_and(|t| t > 0.0));
    assert!(steps.iter().all(|s| s["kernel"].as_str().is_some_and(|k| !k.is_empty())), "{steps:?}");
    assert_eq!(v["receipts"], serde_json::json!([]));
    // The default level leaves fewer steps.
    let fewer = halcyon(&["trace", "models/digits.onnx", "--backend", "cpu", "--json"]).ok().json();
    assert!(fewer["plan"]["steps"].as_array().expect("steps").len() < steps.len());
}

#[test]
fn trace_shows_generated_source_and_device_times_on_opencl() {
    let test = "trace_shows_generated_source_and_device_times_on_opencl";
    if !there(test, "opencl") {
        return;
    }
    let v = halcyon(&["trace", "models/digits.onnx", "--backend", "opencl", "--json"]).ok().json();
    let sources = v["sources"].as_array().expect("sources");
    assert!(
        !sources.is_empty()
            && sources.iter().all(|s| s["source"].as_str().is_some_and(|t| t.contains("__kernel")))
    );
    for s in v["plan"]["steps"].as_array().expect("steps") {
        assert!(s["device_ms"].as_f64().is_some_and(|t| t > 0.0), "{s}");
    }
}

/// A conformance case that adds `a` and `b`.
fn case(dir: &std::path::Path, expected: &ConstData, tolerance: Option<&str>) {
    let set = dir.join("test_data_set_0");
    std::fs::create_dir_all(&set).expect("a folder");
    save(&add(DType::F32), &dir.join("model.onnx"));
    let x = f32s(&[1, 3], &[1., 2., f32::NAN]);
    for (i, name) in ["a", "b"].iter().enumerate() {
        onnx::tensor::write_pb(&set.join(format!("input_{i}.pb")), name, &x).expect("written");
    }
    onnx::tensor::write_pb(&set.join("output_0.pb"), "sum", expected).expect("written");
    if let Some(t) = tolerance {
        std::fs::write(dir.join("tolerance.json"), t).expect("written");
    }
}

#[test]
fn conformance_tells_wrong_from_unsupported_from_broken() {
    let dir = tempfile::tempdir().expect("a folder");
    let at = |name: &str| dir.path().join(name);
    let nan = f32::NAN;
    case(&at("node/good"), &f32s(&[1, 3], &[2., 4., nan]), None);
    let run = |more: &[&str]| {
        let args: Vec<&str> = ["conformance", "onnx", text(dir.path()), "--backend", "cpu"]
            .into_iter()
            .chain(more.iter().copied())
            .collect();
        halcyon(&args)
    };
    assert!(run(&[]).ok().out.contains("1 passed, 0 wrong"));

    case(&at("node/loose"), &f32s(&[1, 3], &[2.1, 4., nan]), Some(r#"{"rtol": 0.1, "atol": 0}"#));
    case(&at("node/off"), &f32s(&[1, 3], &[2.1, 4., nan]), None);
    case(&at("node/shape"), &f32s(&[3], &[2., 4., nan]), None);
    case(&at("node/type"), &ConstData::from_slice(&[1, 3], &[2f64, 4., f64::NAN]).expect("fits"), None);
    case(&at("node/number"), &f32s(&[1, 3], &[2., 4., 6.]), None);
    case(&at("other"), &f32s(&[1, 3], &[2., 4., nan]), None);
    let of = |n: &str| port(n, DType::F32, &[Ok(1), Ok(3)]);
    save(&model("Nonsense", "our.domain", vec![of("a"), of("b")], of("sum")), &at("other/model.onnx"));
    case(&at("broken"), &f32s(&[1, 3], &[2., 4., nan]), None);
    std::fs::write(at("broken/test_data_set_0/input_1.pb"), [0xff; 9]).expect("written");
    case(&at("empty"), &f32s(&[1, 3], &[2., 4., nan]), None);
    std::fs::remove_file(at("empty/test_data_set_0/output_0.pb")).expect("removed");

    let d = run(&["--json"]);
    let v = d.json();
    assert_eq!(d.code, 1, "{d:?}");
    assert_eq!(
        v["total"],
        serde_json::json!({ "passed": 2, "saved": 0, "wrong": 4, "unsupported": 1, "error": 2, "not_run": 0 }),
        "{v}"
    );
    let status = |name: &str| {
        let c = v["cases"]
            .as_array()
            .expect("cases")
            .iter()
            .find(|c| c["name"] == name)
            .expect("the case")
            .clone();
        (
            c["status"].as_str().expect("a status").to_string(),
            c["reason"].as_str().expect("a reason").to_string(),
        )
    };
    assert_eq!(status("node/good"), ("passed".into(), String::new()));
    let (s, why) = status("node/off");
    assert!(
        s == "wrong" && why.contains("sum: 1 of 3 values differ, the most at [0]: 2, expected 2.1"),
        "{why}"
    );
    assert!(status("node/shape").1.contains("expected f32[3]"));
    assert_eq!(status("other").0, "unsupported");
    assert_eq!(status("empty").0, "error");
    // With `--json-lines`, each case is a line, printed as soon as its result is known.
    let lines = run(&["--json-lines"]);
    assert_eq!(lines.code, 1, "{lines:?}");
    let lines: Vec<Value> =
        lines.out.lines().map(|l| serde_json::from_str(l).expect("a line of JSON")).collect();
    let told: Vec<&Value> = lines.iter().filter_map(|l| l.get("case")).collect();
    assert_eq!(told, v["cases"].as_array().expect("cases").iter().collect::<Vec<_>>());
    assert_eq!(lines[0]["begin"], told[0]["name"]);
    assert_eq!(lines.last().expect("an end")["end"], v["total"]);
    // The first cases by name: broken, empty, node/good.
    let three = run(&["--json", "--limit", "3"]).json();
    assert_eq!(
        three["total"],
        serde_json::json!({ "passed": 1, "saved": 0, "wrong": 0, "unsupported": 0, "error": 2, "not_run": 0 })
    );
    halcyon(&["conformance", "onnx", text(&at("broken/test_data_set_0"))]).fails(2, &["model.onnx"]);
}

/// Uses the requested precision even on processors where bf16 is slower.
const FORCE: &str = "--force-precision";

#[test]
fn precision_is_chosen_by_flag_or_environment_and_reported() {
    let receipt = |v: &Value| {
        let all = v["receipts"].as_array().expect("receipts").clone();
        all.into_iter().find(|r| r["transformation"] == "mixed precision")
    };
    let v = halcyon(&seven(&["--precision", "bf16", FORCE, "--top-k", "1", "--json", "--backend", "cpu"]))
        .ok()
        .json();
    assert_eq!((&v["top_k"]["rows"][0][0]["index"], &v["backend"]["precision"]), (&7.into(), &"bf16".into()));
    let r = receipt(&v).expect("a receipt");
    assert!(r["count"].as_u64() > Some(0) && r["bytes"].as_u64() > Some(0), "{r}");
    assert_eq!(v["outputs"][0]["dtype"], "f32");
    let text = halcyon(&seven(&["--precision", "bf16", FORCE, "--backend", "cpu", "-v"])).ok();
    assert!(text.out.contains("level    O2, bf16"), "{}", text.out);
    let set = |p: &str, more: &[&str]| finish(command(&seven(more)).env("HALCYON_PRECISION", p));
    let v = set("bf16", &["--json", FORCE, "--backend", "cpu"]).ok().json();
    assert!(v["backend"]["precision"] == "bf16" && receipt(&v).is_some());
    // The flag overrides the environment, and a disabled transformation is off.
    let v = set("bf16", &["--precision", "f32", "--json", "--backend", "cpu"]).ok().json();
    assert!(v["backend"]["precision"] == "f32" && receipt(&v).is_none());
    let v = set("bf16", &["--without", "mixed precision", "--json", "--backend", "cpu"]).ok().json();
    assert!(receipt(&v).is_none());
    halcyon(&seven(&["--precision", "int9"])).fails(2, &["int9"]);
    set("int9", &["--backend", "cpu"]).fails(2, &["int9"]);
    let v = halcyon(&seven(&["--precision", "f16", FORCE, "--json", "--backend", "cpu"])).ok().json();
    assert!(v["backend"]["precision"] == "f16" && receipt(&v).is_some());
}

#[test]
fn precision_of_products_is_chosen_by_flag_and_reported() {
    let run = |p: &str, more: &[&str]| {
        let all = [&["--matmul-precision", p, "--backend", "cpu"], more].concat();
        halcyon(&seven(&all))
    };
    let v = run("Medium", &["--json"]).ok().json();
    assert_eq!(v["backend"]["matmul_precision"], "medium");
    assert!(run("high", &["-v"]).ok().out.contains("level    O2, products high"));
    // Below O2 no products are rounded, so none are reported.
    assert!(!run("high", &["-v", "--level", "O1"]).ok().out.contains("products high"));
    assert!(!run("highest", &["-v"]).ok().out.contains("products high"));
    run("tf32", &[]).fails(2, &["tf32", "highest, high or medium"]);
}

#[test]
fn conformance_ops_says_what_the_table_says() {
    let ops = |more: &[&str]| {
        let args = ["conformance", "ops", "--backend", "cpu", "--seed", "7", "--json"];
        halcyon(&args.into_iter().chain(more.iter().copied()).collect::<Vec<_>>())
    };
    let few = ["--op", "tanh", "--op", "matmul", "--op", "gather", "--dtype", "f32,bf16,i32,bool"];
    let v = ops(&few).ok().json();
    let cells = v["cells"].as_array().expect("cells");
    let of = |op: &str, d: &str| {
        let cell = cells.iter().find(|c| c["op"] == op && c["dtype"] == d);
        cell.unwrap_or_else(|| panic!("no {op} {d} in {cells:?}"))
    };
    // tanh does not accept integers, and matmul does not accept bool.
    assert_eq!(cells.len(), 2 + 3 + 4, "{cells:?}");
    assert_eq!(v["total"]["passed"], 9);
    for c in cells {
        assert_eq!((&c["status"], &c["unsupported_cases"]), (&"passed".into(), &0.into()), "{c}");
        assert!(c["cases"].as_u64().is_some_and(|n| n >= 3), "{c}");
        let share = c["speed"]["share_of_peak"].as_f64().expect("a share of a measured peak");
        // No upper bound: on a shared machine the peak may have been measured during a pause of the process.
        assert!(share > 0.0 && share.is_finite(), "{c}");
        assert!(c["speed"]["peak"]["gflops"].as_f64().is_some_and(|g| g > 0.0), "{c}");
    }
    assert!(of("tanh", "f32")["errors"]["ulp"].as_f64().is_some_and(|u| u > 0.0 && u < 10.0));
    assert_eq!(of("gather", "bf16")["errors"]["abs"], 0.0);
    assert_eq!(of("matmul", "f32")["speed"]["bound"], "compute");
    assert_eq!(of("gather", "f32")["speed"]["bound"], "memory");

    let lines = halcyon(
        &[&["conformance", "ops", "--backend", "cpu", "--seed", "7", "--json-lines", "--no-speed"], &few[..]]
            .concat(),
    );
    let lines: Vec<Value> =
        lines.ok().out.lines().map(|l| serde_json::from_str(l).expect("a line of JSON")).collect();
    assert_eq!(lines.len(), 2 * cells.len() + 1);
    for (cell, pair) in cells.iter().zip(lines.chunks(2)) {
        assert_eq!(
            pair[0]["begin"],
            format!("{} {}", cell["op"].as_str().unwrap(), cell["dtype"].as_str().unwrap())
        );
        assert_eq!(
            (&pair[1]["cell"]["errors"], &pair[1]["cell"]["library_calls"]),
            (&cell["errors"], &cell["library_calls"])
        );
    }
    assert_eq!(lines[2 * cells.len()]["end"], v["total"]);

    // With an unattainable tolerance and the same operands, ops that round fail and exact ones pass.
    let d = ops(&[&few[..], &["--tolerance", "1e-9", "--no-speed"]].concat());
    assert_eq!(d.code, 1, "{d:?}");
    let strict = d.json();
    let status = |op: &str, dt: &str| {
        let all = strict["cells"].as_array().expect("cells");
        all.iter().find(|c| c["op"] == op && c["dtype"] == dt).expect("the cell")["status"].clone()
    };
    assert_eq!([status("tanh", "f32"), status("matmul", "f32")], ["failed", "failed"]);
    assert_eq!([status("gather", "f32"), status("matmul", "i32")], ["passed", "passed"]);
    let text = halcyon(&["conformance", "ops", "--backend", "cpu", "--op", "tanh", "--tolerance", "1e-9"]);
    assert!(text.code == 1 && text.out.contains("FAIL") && text.out.contains("expected"), "{text:?}");

    ops(&["--op", "tanx"]).code_is(2, "there is no op");
    ops(&["--op", "tanh", "--dtype", "i32"]).code_is(2, "takes i32");
    ops(&["--op", "tanh", "--dtype", "f31"]).code_is(2, "is not a type");
    ops(&["--tolerance", "0"]).code_is(2, "not a factor");
    // On a device without measured peaks, the report says why there are no shares. (Exit code 4: there is no
    // OpenCL device.)
    let v =
        halcyon(&["conformance", "ops", "--backend", "opencl", "--op", "neg", "--dtype", "f32", "--json"]);
    assert!(v.code == 4 || v.code == 0 && v.json()["no_shares"].is_string(), "{v:?}");
}

#[test]
fn a_verified_run_agrees_and_a_failing_one_leaves_a_file() {
    let d = halcyon(&seven(&["--backend", "cpu", "--verify", "cpu:100%"])).ok();
    assert!(d.out.contains("all agree") && d.out.contains("--verify-seed"), "{}", d.out);
    let v = halcyon(&seven(&["--backend", "cpu", "--verify", "cpu:1%", "--verify-seed", "5", "--json"])).ok();
    let v = &v.json()["verify"];
    assert_eq!((&v["agrees"], &v["seed"]), (&true.into(), &5.into()));
    assert_eq!(v["checks"].as_array().map(Vec::len), Some(1), "{v}");
    assert!(v["pieces"].as_u64().is_some_and(|n| n > 2) && v["replay"].is_null(), "{v}");
    for bad in ["cpu:0%", "cpu:200%", "quantum"] {
        halcyon(&seven(&["--verify", bad])).fails(2, &[]);
    }
    halcyon(&seven(&["--verify-seed", "5"])).code_is(2, "--verify");

    // An index out of range: the failing step is saved, and fails again.
    let dir = tempfile::tempdir().expect("a folder");
    let (model_file, file) = (dir.path().join("gather.onnx"), dir.path().join("bad.replay"));
    let inputs = vec![port("x", DType::F32, &[Ok(4), Ok(3)]), port("i", DType::I64, &[Ok(2)])];
    save(&model("Gather", "", inputs, port("y", DType::F32, &[Ok(2), Ok(3)])), &model_file);
    npy::write(&dir.path().join("i.npy"), &ConstData::from_slice(&[2], &[1i64, 9]).expect("values"))
        .expect("written");
    let index = format!("i={}", text(&dir.path().join("i.npy")));
    let args = ["run", text(&model_file), "--input", "x=ones", "--input", &index, "--backend", "cpu"];
    let save_to = [&args[..], &["--save-replay", text(&file)]].concat();
    let d = halcyon(&save_to);
    assert!(d.code == 1 && d.err.contains("saved step") && d.err.contains("index out of range"), "{d:?}");
    let d = halcyon(&["replay", text(&file)]);
    assert!(d.code == 6 && d.out.contains("still fails: index out of range"), "{d:?}");
    let v = halcyon(&["replay", text(&file), "--level", "O0", "--json"]);
    assert_eq!(
        (v.code, &v.json()["verdict"], &v.json()["about"]["level"]),
        (6, &"fails".into(), &"O2".into())
    );
    // Files that are not replay files.
    halcyon(&["replay", "models/digits.onnx"]).fails(1, &["not a replay file of this version"]);
    halcyon(&["replay", text(&dir.path().join("none"))]).fails(1, &["none"]);
    halcyon(&["replay", text(&file), "--backend", "quantum"]).fails(2, &["quantum"]);
}

/// After a device is lost, every call fails. The cell in which the device was lost is reported as failed, and
/// the later cells are not run.
#[test]
#[cfg(all(target_os = "linux", feature = "cuda", feature = "rocm"))]
fn a_lost_device_ends_a_run_of_the_op_table() {
    if halcyon_test::left_out("a_lost_device_ends_a_run_of_the_op_table") {
        return;
    }
    let Some(dir) = standin::folder() else {
        return skip("a_lost_device_ends_a_run_of_the_op_table", "there is no c++");
    };
    // The stand-in reads its configuration from the environment when it is loaded.
    let lib = dir.join(format!("lost-{}.so", std::process::id()));
    let here = root().join("crates/halcyon-cli/tests/cli");
    let flags = ["-I", text(&here), "-include", "standin_set.h"];
    standin::compile(&lib, &flags).unwrap_or_else(|why| panic!("{why}"));
    let run = |form: &str| {
        let args =
            ["conformance", "ops", "--backend", "cuda", "--no-speed", "--seed", "7", "--dtype", "f32", form];
        let mut c =
            command(&[&args[..], &["--op", "add", "--op", "exp", "--op", "sqrt", "--op", "tanh"]].concat());
        c.env("HALCYON_CONFIG", "off").env("STANDIN_SET", "lose at launch=4");
        for v in ["CUDA", "NVRTC", "CUBLASLT", "CUDNN"] {
            c.env(format!("HALCYON_{v}_LIBRARY"), &lib);
        }
        finish(&mut c)
    };
    let d = run("--json");
    assert_eq!(d.code, 1, "{d:?}");
    let v = d.json();
    let status = |s: &str| v["total"][s].as_u64().expect("a count");
    assert!(status("passed") > 0 && status("failed") == 1 && status("not_run") > 0, "{v:#}");
    let cells = v["cells"].as_array().expect("cells");
    let failed = cells.iter().position(|c| c["status"] == "failed").expect("one failed");
    assert!(cells[failed]["reason"].as_str().is_some_and(|r| r.contains("719")), "{v:#}");
    for c in &cells[failed + 1..] {
        assert!(
            c["status"] == "not_run" && c["reason"].as_str().is_some_and(|r| r.contains("was lost at")),
            "{c}"
        );
    }
    let d = run("--json-lines");
    assert!(d.code == 1 && d.out.lines().last().is_some_and(|l| l.contains("not_run")), "{d:?}");
    let _ = std::fs::remove_file(&lib);
}
