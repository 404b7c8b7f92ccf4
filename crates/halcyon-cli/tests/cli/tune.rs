//! Tests of `halcyon tune`: kernels are measured once, stored, listed and moved between files; unreadable or
//! unwritable files are errors.

use crate::common::*;
use serde_json::Value;
use std::path::Path;

const DIGITS: &str = "models/digits.onnx";

fn tune(file: &Path, more: &[&str]) -> Done {
    halcyon(&[&["tune", "--tuning-cache", text(file)], more].concat())
}

fn count(v: &Value) -> usize {
    v.as_array().map_or(0, Vec::len)
}

#[test]
fn a_model_is_tuned_once() {
    if halcyon_test::left_out("a_model_is_tuned_once") {
        return;
    }
    if !there("a_model_is_tuned_once", "opencl") {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let file = dir.path().join("tuning.json");
    // A budget of zero leaves every kernel for later.
    let none = tune(&file, &[DIGITS, "--backend", "opencl", "--budget", "0", "--json"]).ok().json();
    let left = none["report"]["left"].as_u64().expect("a number");
    assert!(left > 0 && count(&none["report"]["tuned"]) == 0, "{none}");

    let first = tune(&file, &[DIGITS, "--backend", "opencl", "--json"]).ok().json();
    assert_eq!(count(&first["report"]["tuned"]) as u64, left, "{first}");
    for k in first["report"]["tuned"].as_array().expect("kernels") {
        assert!(k["best"]["gain"].as_f64() >= Some(1.0), "{k}");
        // Every variant works: those that were rejected were only too slow.
        let rejected = k["rejected"].as_array().expect("rejections");
        assert!(rejected.iter().all(|r| r["why"] == "too_slow"), "{k}");
    }
    let second = tune(&file, &[DIGITS, "--backend", "opencl", "--json"]).ok().json();
    let r = &second["report"];
    assert_eq!(
        (count(&r["tuned"]), r["known"].as_u64(), r["left"].as_u64()),
        (0, Some(left), Some(0)),
        "{r}"
    );

    // Plans report the tuned variants that they use.
    let args = ["trace", DIGITS, "--backend", "opencl", "--tuning-cache", text(&file), "--json"];
    let trace = halcyon(&args).ok().json();
    let steps = trace["plan"]["steps"].as_array().expect("steps");
    let tuned = steps.iter().filter(|s| s["tuned"] == true).count() as u64;
    assert!(
        tuned >= left && steps.iter().all(|s| s["tuned"] == false || s["variant"].is_string()),
        "{steps:?}"
    );

    let list = tune(&file, &["--list"]).ok();
    assert!(list.out.contains("opencl: ") && list.out.contains("matmul"), "{}", list.out);
    let other = dir.path().join("other.json");
    let e = tune(&file, &["--export", text(&other), "--json"]).ok().json();
    assert!(e["exported"].as_u64() == Some(left) && e["report"].is_null(), "{e}");
    let third = dir.path().join("third.json");
    let i = tune(&third, &["--import", text(&other), "--list", "--json"]).ok().json();
    assert_eq!((i["imported"].as_u64(), count(&i["entries"]) as u64), (Some(left), left));
    let again = tune(&third, &[DIGITS, "--backend", "opencl", "--json"]).ok().json();
    assert_eq!(count(&again["report"]["tuned"]), 0, "an imported cache is as good: {again}");
}

#[test]
fn what_cannot_be_read_or_written_is_an_error() {
    let dir = tempfile::tempdir().expect("a folder");
    let (file, bad) = (dir.path().join("tuning.json"), dir.path().join("bad.json"));
    std::fs::write(&bad, "{\"format\": 7, \"entries\": []}").expect("it is written");
    tune(&file, &["--import", text(&bad)]).fails(1, &["format 7"]);
    tune(&file, &["--import", text(&dir.path().join("none"))]).fails(1, &["no such file"]);
    tune(&file, &["--budget=-1"]).fails(2, &["--budget"]);
    tune(&file, &["--tuning", "often"]).fails(2, &["often"]);
    tune(&file, &[DIGITS, "--backend", "cpu", "--level", "O1"]).fails(2, &["O2"]);
    tune(&bad.join("x.json"), &[DIGITS, "--backend", "cpu"]).fails(1, &["bad.json"]);
    // A cache of another version is rejected and left unchanged (`outputs.rs` tests damaged caches).
    let before = std::fs::read(&bad).expect("the file");
    tune(&bad, &["--list"]).fails(1, &["format 7"]);
    tune(&bad, &[DIGITS, "--backend", "cpu"]).fails(1, &["format 7"]);
    assert_eq!(std::fs::read(&bad).expect("the file"), before);
    let r = tune(&file, &[DIGITS, "--backend", "cpu", "--json"]).ok().json();
    assert_eq!(count(&r["report"]["tuned"]), 0, "the library of the CPU has no variants");
    let mut c = command(&["tune", "--list"]);
    finish(c.env("HALCYON_TUNING_CACHE", "off")).fails(2, &["--tuning-cache"]);
}

/// A full disk, simulated by a file size limit of zero in the shell that starts the command.
#[test]
#[cfg(unix)]
fn a_full_disk_is_an_error_and_leaves_nothing_behind() {
    let dir = tempfile::tempdir().expect("a folder");
    let file = dir.path().join("tuning.json");
    let exe = env!("CARGO_BIN_EXE_halcyon");
    let script = format!(
        "trap '' XFSZ; ulimit -f 0; exec '{exe}' tune {DIGITS} --backend cpu --tuning-cache '{}'",
        text(&file)
    );
    let mut shell = std::process::Command::new("/bin/sh");
    finish(shell.args(["-c", &script]).current_dir(root())).fails(1, &["tuning.json"]);
    let names = std::fs::read_dir(dir.path()).expect("a folder").flatten().map(|f| f.file_name());
    assert_eq!(names.collect::<Vec<_>>(), ["tuning.json.lock"]);
}
