//! Tests of `halcyon select`, and of runs on several devices.

use crate::common::*;
use serde_json::Value;
use std::fs;

const DIGITS: &str = "models/digits.onnx";
const SEVEN: &str = "models/digit-7.png";

/// Runs the command without the user's settings.
fn clean(args: &[&str], vars: &[(&str, &str)]) -> Done {
    let mut c = command(args);
    c.env("HALCYON_CONFIG", "off").env_remove("HALCYON_BACKENDS");
    c.envs(vars.iter().copied());
    finish(&mut c)
}

fn candidate<'a>(v: &'a Value, id: &str) -> &'a Value {
    let all = v["backend"]["candidates"].as_array().expect("candidates");
    let it = all.iter().find(|c| c["device"] == id || c["backend"] == id);
    it.unwrap_or_else(|| panic!("{id} is not in {v:#}"))
}

#[test]
fn a_model_is_placed_with_what_it_needs() {
    let v = clean(&["select", DIGITS, "--backend", "cpu", "--json"], &[]).ok().json();
    assert_eq!((&v["backend"]["id"], &v["backend"]["fallback"]), (&"cpu:0".into(), &"never".into()));
    let (needs, free) = (v["needs"]["device"].as_u64(), v["needs"]["free"].as_u64());
    assert!(needs > Some(1000) && free > needs, "{v:#}");
    let p = &v["placement"];
    let ops = p["ops"].as_array().expect("ops");
    assert!(ops.len() > 3 && ops.iter().all(|o| o["device"] == 0 && o["reason"].is_null()), "{p:#}");
    assert_eq!((&p["between_bytes"], &p["segments"]), (&0.into(), &1.into()));
    // One image in, ten numbers out.
    assert_eq!((&p["devices"][0]["uploaded"], &p["devices"][0]["downloaded"]), (&256.into(), &40.into()));
    let text = clean(&["select", DIGITS, "--backend", "cpu"], &[]).ok().out;
    for part in ["cpu was requested", "needs    ", "ops on cpu:0", "256 B to the device, 40 B back"] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[test]
fn what_does_not_fit_says_what_is_missing() {
    let small = ["select", DIGITS, "--backend", "cpu", "--memory-limit", "4K"];
    clean(&small, &[]).fails(5, &["out of memory on cpu:0", "4096"]);
    // More memory suffices.
    clean(&["select", DIGITS, "--backend", "cpu", "--memory-limit", "64K"], &[]).ok();
    // The next device in the order is tried, and has the same limit.
    let auto = ["select", DIGITS, "--memory-limit", "4K", "--json"];
    let e = clean(&auto, &[]);
    assert_eq!(e.code, 5, "{e:?}");
    // `run` gives the same error if the plan does not fit.
    let e = clean(&["run", DIGITS, "--input", "random", "--memory-limit", "4K"], &[]);
    // One device or several, depending on the machine.
    e.fails(5, &["out of memory on ", "cpu:0", "4096"]);
}

#[test]
fn orders_come_from_the_caller_the_environment_and_a_file() {
    let dir = tempfile::tempdir().expect("a folder");
    let file = dir.path().join("config.toml");
    fs::write(&file, "backends = [\"rocm\", \"cpu\"]\nfallback = \"never\"\n").expect("written");
    let path = file.to_str().expect("text");
    let args = ["select", DIGITS, "--json"];
    let by = |vars: &[(&str, &str)], more: &[&str]| clean(&[&args[..], more].concat(), vars).ok().json();

    let v = by(&[], &[]);
    assert_eq!(
        (&v["backend"]["order"], &v["backend"]["order_by"]),
        (&"priority".into(), &"the default".into())
    );
    assert_eq!(v["backend"]["fallback"], "next");
    let v = by(&[("HALCYON_CONFIG", path)], &[]);
    assert_eq!((&v["backend"]["order"], &v["backend"]["order_by"]), (&"rocm,cpu".into(), &path.into()));
    assert_eq!(v["backend"]["fallback"], "never");
    assert!(
        candidate(&v, "cuda")["rejected"].as_str().is_some_and(|r| r.contains("does not contain it")),
        "{v:#}"
    );
    let env = [("HALCYON_CONFIG", path), ("HALCYON_BACKENDS", "torchbridge")];
    let v = by(&env, &[]);
    let order = (&v["backend"]["order"], &v["backend"]["order_by"]);
    assert_eq!(order, (&"torchbridge".into(), &"HALCYON_BACKENDS".into()));
    let v = by(&env, &["--backends", "host"]);
    assert_eq!((&v["backend"]["order"], &v["backend"]["order_by"]), (&"cpu".into(), &"the caller's".into()));
    let rule = v["backend"]["rule"].as_str().expect("a rule");
    assert!(rule.contains("the order cpu (the caller's)"), "{rule}");
}

#[test]
fn wrong_settings_name_where_they_stand() {
    let dir = tempfile::tempdir().expect("a folder");
    let file = dir.path().join("config.toml");
    fs::write(&file, "backend = \"cpu\"\n").expect("written");
    let path = file.to_str().expect("text");
    let args = ["select", DIGITS];
    clean(&args, &[("HALCYON_BACKENDS", "cuda,cudaa")])
        .fails(2, &["HALCYON_BACKENDS", "cudaa", "torchbridge"]);
    clean(&args, &[("HALCYON_CONFIG", path)]).fails(1, &[path, "backend"]);
    clean(&args, &[("HALCYON_CONFIG", "/nowhere/config.toml")])
        .fails(1, &["/nowhere/config.toml", "HALCYON_CONFIG"]);
    for (more, part) in [
        (&["--backends", "cpu,cpu"][..], "twice"),
        (&["--fallback", "maybe"], "never, next or cpu"),
        (&["--split", "cpu"], "two devices"),
        (&["--split", "cpu,opencl=0"], "not above 0"),
        (&["--may-leave", "101"], "percentage"),
    ] {
        clean(&[&args[..], more].concat(), &[]).fails(2, &[part]);
    }
    assert_eq!(clean(&["select", DIGITS, "--split", "cpu,cpu", "--backend", "cpu"], &[]).code, 2);
}

#[test]
fn a_fallback_is_reported() {
    let args = ["run", DIGITS, "--input", SEVEN, "--backend", "cuda", "--fallback", "cpu", "--json"];
    let v = clean(&args, &[]).ok().json();
    let rule = v["backend"]["rule"].as_str().expect("a rule");
    // If there is a CUDA device, it is selected.
    if v["backend"]["id"] == "cpu:0" {
        assert!(rule.contains("cuda was requested; the CPU is the fallback"), "{rule}");
        assert!(!candidate(&v, "cuda")["rejected"].is_null(), "{v:#}");
    }
    let strict = clean(&["run", DIGITS, "--input", SEVEN, "--backend", "tpu"], &[]);
    assert_eq!(strict.code, 4, "{strict:?}");
}

/// Predefined orders prefer the CPU to the software OpenCL device; a list that names OpenCL first selects it.
#[test]
fn software_devices_come_last() {
    let devices = clean(&["devices", "--json"], &[]).ok().json();
    let all = devices.as_array().expect("an array");
    let opencl = all.iter().find(|r| r["id"] == "opencl").expect("a row");
    let only_software = opencl["devices"]
        .as_array()
        .is_some_and(|d| !d.is_empty() && d.iter().all(|d| d["software"] == true));
    if !only_software {
        return skip(
            "software_devices_come_last",
            "OpenCL has no device, or one that is not a software device",
        );
    }
    let chosen = |order: &str| {
        let v = clean(&["select", DIGITS, "--json"], &[("HALCYON_BACKENDS", order)]).ok().json();
        v["backend"]["id"].as_str().expect("an id").to_string()
    };
    // A predefined order puts the software device last; a list names its backend explicitly.
    assert_eq!((chosen("inference"), chosen("opencl,cpu")), ("cpu:0".into(), "opencl:0".into()));
}

#[test]
fn a_run_over_two_devices_gives_what_one_gives() {
    let one = clean(&["run", DIGITS, "--input", SEVEN, "--backend", "cpu", "--json"], &[]).ok().json();
    let probe = clean(&["devices", "--json"], &[]).ok().json();
    let opencl =
        probe.as_array().expect("an array").iter().any(|r| r["id"] == "opencl" && r["available"] == true);
    assert!(opencl || !required(), "OpenCL is missing");
    let mut splits = vec!["cpu,cpu"];
    match opencl {
        true => splits.extend(["cpu,opencl", "opencl=0.3,cpu=0.7"]),
        false => skip("a_run_over_two_devices_gives_what_one_gives", "no OpenCL"),
    }
    for split in splits {
        let v = clean(&["run", DIGITS, "--input", SEVEN, "--split", split, "--repeat", "3", "--json"], &[])
            .ok()
            .json();
        let (got, want) = (&v["outputs"][0]["summary"], &one["outputs"][0]["summary"]);
        for k in ["min", "max", "mean"] {
            let (a, b) = (got[k].as_f64().expect("a number"), want[k].as_f64().expect("a number"));
            assert!((a - b).abs() < 1e-5, "{split} {k}: {a} {b}");
        }
        let (p, devices) = (&v["split"]["placement"], v["split"]["devices"].as_array().expect("devices"));
        for (i, d) in devices.iter().enumerate() {
            assert!(
                d["counters"]["launches"].as_u64() > Some(0)
                    || d["counters"]["library_calls"].as_u64() > Some(0),
                "{v:#}"
            );
            // The bytes that the runs copied equal those in the placement.
            let said = |k: &str| p["devices"][i][k].as_u64().map(|n| 3 * n);
            assert_eq!(d["runs_uploaded"].as_u64(), said("uploaded"), "{v:#}");
            assert_eq!(d["runs_downloaded"].as_u64(), said("downloaded"), "{v:#}");
        }
        let args = ["run", DIGITS, "--input", SEVEN, "--split", split, "--top-k", "1", "-v"];
        let text = clean(&args, &[]).ok().out;
        assert!(
            text.contains("placement") && text.contains("2 segments") && text.contains("copy     "),
            "{text}"
        );
    }
    // No op needs to leave the CPU.
    let v = clean(&["select", DIGITS, "--backend", "cpu", "--may-leave", "0", "--json"], &[]).ok().json();
    assert_eq!(v["placement"]["flops_elsewhere"], 0.0);
}

/// Services run without a home folder, or with one that is not a directory.
#[test]
#[cfg(unix)]
fn a_home_that_is_none_is_no_error() {
    for home in ["/dev/null", "/nowhere"] {
        let mut c = command(&["select", DIGITS, "--backend", "cpu"]);
        c.env_remove("HALCYON_CONFIG").env_remove("XDG_CONFIG_HOME").env("HOME", home);
        finish(&mut c).ok();
    }
}

#[test]
fn the_instruction_set_of_the_cpu_is_limited_or_refused() {
    let cpu = |vars: &[(&str, &str)]| {
        let all = clean(&["devices", "--json"], vars).ok().json();
        let row = all
            .as_array()
            .and_then(|a| a.iter().find(|r| r["id"] == "cpu"))
            .cloned()
            .expect("the CPU is listed");
        row["devices"][0]["properties"].clone()
    };
    let best = cpu(&[("HALCYON_CPU_ISA", "")]);
    let sets: Vec<&str> =
        best["instruction_sets"].as_str().expect("the sets are listed").split(' ').collect();
    assert_eq!((sets[0], best["instruction_set"].as_str()), ("portable", sets.last().copied()));
    for set in &sets {
        let p = cpu(&[("HALCYON_CPU_ISA", set)]);
        assert_eq!(
            (&p["instruction_set"], &p["instruction_sets"]),
            (&(*set).into(), &best["instruction_sets"])
        );
        let run = ["run", DIGITS, "--input", "random", "--backend", "cpu"];
        clean(&run, &[("HALCYON_CPU_ISA", set)]).ok();
    }
    // Whatever device is selected, an invalid value is an error that lists this machine's options.
    for backend in ["cpu", "auto", "noop"] {
        let run = ["run", DIGITS, "--input", "random", "--backend", backend];
        let list = sets.join(", ");
        clean(&run, &[("HALCYON_CPU_ISA", "avx1024")]).fails(2, &["HALCYON_CPU_ISA", "\"avx1024\"", &list]);
        if !sets.contains(&"amx") {
            clean(&run, &[("HALCYON_CPU_ISA", "amx")]).fails(2, &["has no \"amx\"", &list]);
        }
    }
}
