//! Tests of `halcyon prepare`.

use crate::common::*;
use halcyon_ir::DType;

const DIGITS: &str = "models/digits.onnx";

#[test]
fn a_report_is_text_json_and_a_page() {
    let dir = tempfile::tempdir().expect("a folder");
    let page = dir.path().join("page.html");
    let args = ["prepare", DIGITS, "--backend", "cpu", "--threads", "1", "--repeat", "3"];
    let done = halcyon(&[&args[..], &["--json", "--html", text(&page)]].concat()).ok();
    let v = done.json();
    assert_eq!((&v["success"], &v["level"], &v["device"]), (&true.into(), &"O2".into(), &"cpu:0".into()));
    let number = |v: &serde_json::Value| v.as_f64().expect("a number");
    let m = &v["metrics"];
    assert!(
        number(&m["time_before_ms"]) > 0.0
            && number(&m["time_after_ms"]) > 0.0
            && number(&m["speedup"]) > 0.0
    );
    assert!(number(&m["error"]) < 1e-4 && m["outputs"].as_array().is_some_and(|o| !o.is_empty()), "{m}");
    let list = |k: &str| v[k].as_array().unwrap_or_else(|| panic!("{k} is not a list")).clone();
    let receipts = list("receipts");
    let names: Vec<_> = receipts.iter().map(|r| r["transformation"].clone()).collect();
    assert!(!names.is_empty() && names == list("optimizations_applied"));
    assert!(receipts.iter().all(|r| number(&r["gain"]) > 0.0));
    let steps = |k: &str| list(k).iter().map(|o| o["steps"].as_u64().expect("a count")).sum::<u64>();
    assert_eq!(Some(steps("ops_before")), m["steps_before"].as_u64());
    assert_eq!(Some(steps("ops_after")), m["steps_after"].as_u64());
    let html = std::fs::read_to_string(&page).expect("written");
    assert!(html.contains("digits.onnx at O2") && html.contains("<svg") && !html.contains("<script"));

    // A level without transformations, and a level with one transformation switched off.
    let plain = halcyon(&[&args[..], &["--json", "--level", "none"]].concat()).ok().json();
    assert_eq!(
        (&plain["optimizations_applied"], &plain["metrics"]["error"]),
        (&serde_json::json!([]), &0.0.into())
    );
    let done = halcyon(&[&args[..], &["--without", "fusion"]].concat()).ok();
    for part in
        ["model    digits.onnx", "level    O2: optimised", "warning  fusion: switched off", "before  "]
    {
        assert!(done.out.contains(part), "{part}: {}", done.out);
    }
    assert!(!done.out.contains("applied  fusion"), "{}", done.out);
    assert!(done.out.contains("backend  cpu:0") && done.out.contains("input    image"), "{}", done.out);
    // The report alone.
    let quiet = halcyon(&[&args[..], &["-q", "--html", text(&page)]].concat()).ok();
    assert!(quiet.out.contains("model    digits.onnx") && quiet.err.is_empty(), "{quiet:?}");
    for part in ["backend  ", "input    ", "saved    ", "not cuda"] {
        assert!(!quiet.out.contains(part), "{part}: {}", quiet.out);
    }
    halcyon(&["prepare", DIGITS, "--level", "fast"]).fails(2, &["fast"]);
    halcyon(&["prepare", "gone.onnx"]).fails(1, &["gone.onnx"]);
}

#[test]
fn names_of_the_model_are_escaped() {
    let dir = tempfile::tempdir().expect("a folder");
    let (path, page) = (dir.path().join("m.onnx"), dir.path().join("page.html"));
    let odd = "<img src=x>\nforged";
    save(&model("Neg", "", vec![port("x", DType::F32, &[Ok(4)])], port(odd, DType::F32, &[Ok(4)])), &path);
    let args = ["prepare", text(&path), "--backend", "cpu", "--repeat", "1", "--html", text(&page)];
    let done = halcyon(&args).ok();
    assert!(!done.out.lines().any(|l| l.starts_with("forged")), "{}", done.out);
    let html = std::fs::read_to_string(&page).expect("written");
    assert!(html.contains("&lt;img src=x&gt;") && !html.contains("<img"), "{html}");
}
