//! `halcyon run --runtime ort`: models in ONNX Runtime, whose library is loaded at run time.

use crate::common::*;
use serde_json::Value;
use std::sync::LazyLock;

/// Whether ONNX Runtime's library is here. With HALCYON_REQUIRE_ALL=1 a missing one is a failure.
pub(crate) fn has_library(test: &str) -> bool {
    static REASON: LazyLock<Option<String>> = LazyLock::new(|| {
        let done = halcyon(&["run", "models/digits.onnx", "-i", "ones", "--runtime", "ort"]);
        match done.code {
            0 => None,
            4 => Some(done.err),
            _ => panic!("{done:?}"),
        }
    });
    match &*REASON {
        None => true,
        Some(why) => {
            assert!(!required(), "{why}");
            skip(test, why.trim_end());
            false
        }
    }
}

const DIGIT: [&str; 4] = ["run", "models/digits.onnx", "-i", "models/digit-7.png"];

fn run(more: &[&str]) -> Done {
    halcyon(&[&DIGIT[..], more].concat())
}

/// The values of the first output.
fn values(v: &Value) -> Vec<f64> {
    let all = v["outputs"][0]["values"].as_array().expect("values");
    all.iter().map(|x| x.as_f64().expect("a number")).collect()
}

#[test]
fn the_answer_and_the_document_are_those_of_halcyon() {
    if !has_library("the_answer_and_the_document_are_those_of_halcyon") {
        return;
    }
    let theirs = run(&["--runtime", "ort", "--top-k", "2", "--repeat", "3", "--json"]).ok().json();
    let ours = run(&["--backend", "cpu", "--top-k", "2", "--repeat", "3", "--json"]).ok().json();
    assert_eq!((&ours["runtime"]["name"], &theirs["runtime"]["name"]), (&"halcyon".into(), &"ort".into()));
    for (a, b) in values(&ours).iter().zip(&values(&theirs)) {
        assert!((a - b).abs() < 1e-5, "{a} and {b}");
    }
    for part in ["inputs", "outputs", "top_k"] {
        let keys = |v: &Value| -> Vec<String> {
            let v = if v[part].is_array() { &v[part][0] } else { &v[part] };
            v.as_object().expect("an object").keys().filter(|k| *k != "steers_shape").cloned().collect()
        };
        assert_eq!(keys(&ours), keys(&theirs), "{part}");
    }
    assert_eq!(theirs["top_k"]["rows"][0][0]["index"], 7);
    assert_eq!(theirs["times_ms"]["run"]["runs"], 3);
    let r = &theirs["runtime"];
    assert_eq!(r["providers"], serde_json::json!(["CPUExecutionProvider"]), "{r}");
    let version = r["version"].as_str().expect("a version");
    let library = r["library"].as_str().expect("a path");
    assert!(version.starts_with("1.") && library.contains("onnxruntime"), "{r}");

    let text = run(&["--runtime", "ort"]).ok().out;
    assert!(text.contains(&format!("in ONNX Runtime {version} (CPUExecutionProvider), ")), "{text}");
    let long = run(&["--runtime", "ort", "-v", "--threads", "1"]).ok().out;
    assert!(long.contains(library) && long.contains("1 threads"), "{long}");
}

#[test]
fn outputs_and_many_inputs_are_written_alike() {
    if !has_library("outputs_and_many_inputs_are_written_alike") {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let read = |name: &str| std::fs::read_to_string(dir.path().join(name)).expect("a file");
    for (program, files) in [("halcyon", ["a.csv", "a.json"]), ("ort", ["b.csv", "b.json"])] {
        let [csv, json] = files.map(|f| dir.path().join(f));
        let args = ["run", "models/digits.onnx", "-i", "models/", "-i", DIGIT[3], "--runtime", program];
        halcyon(&[&args[..], &["--batch", "4", "--top-k", "1", "-o", text(&csv)]].concat()).ok();
        run(&["--runtime", program, "-o", text(&json)]).ok();
    }
    let classes = |csv: &str| -> Vec<Vec<String>> {
        csv.lines().map(|l| l.split(',').take(2).map(String::from).collect()).collect()
    };
    assert_eq!(classes(&read("a.csv")), classes(&read("b.csv")));
    assert!(classes(&read("a.csv")).len() > 2);
    let shape = |s: &str| serde_json::from_str::<Value>(s).expect("JSON")["outputs"][0]["shape"].clone();
    assert_eq!(shape(&read("a.json")), shape(&read("b.json")));
}

#[test]
fn options_of_halcyon_are_usage_errors() {
    for (option, more) in [
        ("--level", &["--level", "O2"][..]),
        ("--precision", &["--precision", "bf16"]),
        ("--verify", &["--verify", "cpu"]),
        ("--split", &["--split", "cpu=1,cpu=1"]),
        ("--backends", &["--backends", "cpu"]),
        ("--memory-limit", &["--memory-limit", "1G"]),
        ("--max-iterations", &["--max-iterations", "9"]),
    ] {
        let done = run(&[&["--runtime", "ort"], more].concat());
        done.fails(2, &[&format!("{option} has no effect, because ONNX Runtime runs the model")]);
    }
    run(&["--ort-library", "x.so"]).fails(2, &["--ort-library has no effect"]);
    let v = run(&["--runtime", "ort", "--level", "O1", "--json"]).json();
    assert_eq!((&v["exit_code"], &v["error"]["kind"]), (&2.into(), &"Usage".into()));
}

#[test]
fn a_named_library_is_used_or_the_error_says_why_not() {
    let none = "/nowhere/libonnxruntime.so";
    let v = run(&["--runtime", "ort", "--ort-library", none, "--json"]).json();
    assert_eq!(v["exit_code"], 4);
    let tried = v["error"]["facts"]["tried"].as_array().expect("a list");
    assert!(tried.len() == 1 && tried[0].as_str().expect("text").starts_with(none), "{v}");
    // The variable names the only library, too.
    let mut c = command(&[&DIGIT[..], &["--runtime", "ort"]].concat());
    let done = finish(c.env("ORT_DYLIB_PATH", none));
    done.fails(4, &[none, "ORT_DYLIB_PATH", "pip install onnxruntime"]);
    if !has_library("a_named_library_is_used_or_the_error_says_why_not") {
        return;
    }
    let found = run(&["--runtime", "ort", "--json"]).ok().json();
    let library = found["runtime"]["library"].as_str().expect("a path");
    let named = run(&["--runtime", "ort", "--ort-library", library, "--json"]).ok().json();
    assert_eq!(named["runtime"]["found_by"], "named by the caller");
    let mut c = command(&[&DIGIT[..], &["--runtime", "ort", "--json"]].concat());
    let by_variable = finish(c.env("ORT_DYLIB_PATH", library)).ok().json();
    assert_eq!(by_variable["runtime"]["found_by"], "ORT_DYLIB_PATH");
}

#[test]
fn a_backend_chooses_a_provider_or_the_error_lists_them() {
    if !has_library("a_backend_chooses_a_provider_or_the_error_lists_them") {
        return;
    }
    let v = run(&["--runtime", "ort", "--json"]).ok().json();
    let available = v["runtime"]["available_providers"].as_array().expect("a list").clone();
    let has = |name: &str| available.iter().any(|p| p == name);
    assert!(has("CPUExecutionProvider"));
    run(&["--runtime", "ort", "--backend", "cpu"]).ok();
    run(&["--runtime", "ort", "--backend", "opencl"]).fails(3, &["provider"]);
    run(&["--runtime", "ort", "--backend", "cpu:1"]).fails(2, &["CPUExecutionProvider has one device"]);
    if !has("CUDAExecutionProvider") {
        run(&["--runtime", "ort", "--backend", "cuda"]).fails(4, &["CPUExecutionProvider"]);
    }
}

#[test]
fn a_model_that_onnx_runtime_lacks_operators_for_is_not_supported() {
    if !has_library("a_model_that_onnx_runtime_lacks_operators_for_is_not_supported") {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("odd.onnx");
    let x = |name: &str| port(name, halcyon_ir::DType::F32, &[Ok(3)]);
    save(&model("Nothing", "our.domain", vec![x("x")], x("y")), &path);
    let done = halcyon(&["run", text(&path), "-i", "ones", "--runtime", "ort"]);
    assert!([1, 3].contains(&done.code) && done.err.contains("our.domain"), "{done:?}");
}
