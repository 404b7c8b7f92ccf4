//! `halcyon doctor`: what works passes, what is broken fails with the step, and nothing takes the command down.

mod common;

use common::*;
use serde_json::Value;
use std::path::Path;

fn section<'a>(v: &'a Value, id: &str) -> &'a Value {
    let all = v["sections"].as_array().expect("sections");
    all.iter().find(|s| s["id"] == id).unwrap_or_else(|| panic!("no {id} in {v:#}"))
}

fn lines(s: &Value) -> &[Value] {
    s["lines"].as_array().expect("lines")
}

fn doctor(args: &[&str]) -> std::process::Command {
    let mut c = command(&[&["doctor"], args].concat());
    c.env("HALCYON_CONFIG", "off");
    c
}

#[test]
fn the_cpu_passes() {
    let d = finish(&mut doctor(&["--backend", "cpu", "--json"])).ok();
    let v = d.json();
    let cpu = section(&v, "cpu");
    assert_eq!(cpu["status"], "pass", "{v:#}");
    let checks: Vec<&str> = lines(cpu).iter().filter_map(|l| l["check"].as_str()).collect();
    assert_eq!(checks, ["library", "device", "open", "kernel", "copies", "product", "first use"]);
    assert!(lines(cpu)[5]["facts"]["flops_per_second"].as_f64() > Some(1e7), "{v:#}");
    let text = finish(&mut doctor(&["--backend", "cpu"])).ok().out;
    for part in ["host\n", "cpu\n", "pass", "GFLOP/s", "checksum", "everything that is here works"] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[test]
fn every_backend_has_a_section_and_absent_ones_a_reason() {
    let d = finish(&mut doctor(&["--json"]));
    let v = d.json();
    assert_eq!(Some(d.code as i64), v["exit_code"].as_i64(), "{v:#}");
    for id in ["cuda", "rocm", "metal", "tpu", "intel", "opencl", "webgpu", "cpu"] {
        let s = section(&v, id);
        for l in lines(s).iter().filter(|l| l["status"] != "pass") {
            assert!(l["text"].as_str().is_some_and(|t| t.len() > 10) && l["fix"].is_string(), "{id}: {l}");
        }
        assert!(!lines(s).is_empty(), "{id}: {v:#}");
    }
    // One that was asked for has to be there.
    let d = finish(&mut doctor(&["--backend", "tpu"]));
    assert_eq!(d.code, 2, "{d:?}");
    assert_eq!(finish(&mut doctor(&["--backend", "cudaa"])).code, 2);
}

#[test]
fn opencl_passes_where_it_is() {
    if !there("opencl_passes_where_it_is", "opencl") {
        return;
    }
    let v = finish(&mut doctor(&["--backend", "opencl", "--json"])).ok().json();
    assert_eq!(section(&v, "opencl")["status"], "pass", "{v:#}");
}

#[test]
fn what_is_broken_fails_and_says_what_to_do() {
    let mut c = doctor(&["--backend", "opencl", "--json"]);
    c.env("HALCYON_OPENCL_LIBRARY", "/nowhere/libNone.so");
    let d = finish(&mut c);
    assert_eq!(d.code, 2, "{d:?}");
    let v = d.json();
    let l = &lines(section(&v, "opencl"))[0];
    assert!(l["facts"]["tried"][0].as_str().is_some_and(|t| t.contains("/nowhere/libNone.so")), "{v:#}");

    let dir = tempfile::tempdir().expect("a folder");
    let file = dir.path().join("config.toml");
    std::fs::write(&file, "colour = 1\n").expect("written");
    let mut c = doctor(&["--backend", "cpu"]);
    let d = finish(c.env("HALCYON_CONFIG", &file));
    assert!(d.code == 2 && d.out.contains("fail") && d.out.contains("colour"), "{d:?}");
}

/// An OpenCL driver that ends the process that loads it.
#[test]
fn a_driver_that_crashes_is_a_failed_line() {
    let test = "a_driver_that_crashes_is_a_failed_line";
    if !there(test, "opencl") {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let Some(lib) = crashing(dir.path()) else {
        return skip(test, "no C compiler for the driver");
    };
    let vendors = dir.path().join("vendors");
    std::fs::create_dir(&vendors).expect("a folder");
    std::fs::write(vendors.join("crash.icd"), lib.display().to_string()).expect("written");
    let mut c = doctor(&["--backend", "opencl", "--json"]);
    let d = finish(c.env("OCL_ICD_VENDORS", &vendors));
    assert_eq!(d.code, 2, "{d:?}");
    let v = d.json();
    let l = lines(section(&v, "opencl")).last().expect("a line");
    assert_eq!((&l["check"], &l["status"]), (&"library".into(), &"fail".into()), "{v:#}");
    assert!(l["text"].as_str().is_some_and(|t| t.contains("signal")), "{v:#}");
    // Everything else goes on.
    let mut c = command(&["run", "models/digits.onnx", "--input", "models/digit-7.png", "--json"]);
    c.env("OCL_ICD_VENDORS", &vendors).env("HALCYON_CONFIG", "off");
    assert_eq!(finish(&mut c).ok().json()["backend"]["id"], "cpu:0");
}

#[cfg(unix)]
fn crashing(dir: &Path) -> Option<std::path::PathBuf> {
    let (from, to) = (dir.join("crash.c"), dir.join("libcrash.so"));
    let source = "#include <stdlib.h>\n__attribute__((constructor)) static void at_load(void) { abort(); }\n";
    std::fs::write(&from, source).expect("written");
    let made = std::process::Command::new("cc")
        .args(["-shared", "-fPIC", "-o"])
        .arg(&to)
        .arg(&from)
        .output()
        .ok()?;
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    Some(to)
}

#[cfg(not(unix))]
fn crashing(_: &Path) -> Option<std::path::PathBuf> {
    None
}

/// What the user asks for elsewhere decides nothing here: sums are exact, and the device is the one that is examined.
#[test]
fn settings_of_the_user_do_not_change_the_verdict() {
    let dir = tempfile::tempdir().expect("a folder");
    let file = dir.path().join("config.toml");
    std::fs::write(&file, "fallback = \"cpu\"\n").expect("written");
    let mut c = doctor(&["--backend", "cpu"]);
    finish(c.env("HALCYON_CONFIG", &file).env("HALCYON_PRECISION", "bf16")).ok();
    let mut c = doctor(&["--backend", "opencl"]);
    c.env("HALCYON_CONFIG", &file).env("HALCYON_OPENCL_LIBRARY", "/nowhere/libNone.so");
    assert_eq!(finish(&mut c).code, 2);
}
