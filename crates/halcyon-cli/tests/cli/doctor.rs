//! Tests of `halcyon doctor`: working backends pass, broken ones fail at a named step, and no driver crashes
//! the command.

use crate::common::*;
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
    for part in ["host\n", "cpu\n", "pass", "GFLOP/s", "checksum", "everything that is present works"] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[test]
fn every_backend_has_a_section_and_absent_ones_a_reason() {
    let d = finish(&mut doctor(&["--json"]));
    let v = d.json();
    assert_eq!(Some(d.code as i64), v["exit_code"].as_i64(), "{v:#}");
    for id in halcyon_hal::backend::all().into_iter().map(|b| b.id()) {
        let s = section(&v, id);
        for l in lines(s).iter().filter(|l| l["status"] != "pass") {
            assert!(l["text"].as_str().is_some_and(|t| t.len() > 10) && l["fix"].is_string(), "{id}: {l}");
        }
        assert!(!lines(s).is_empty(), "{id}: {v:#}");
    }
    // A requested backend must be present.
    let d = finish(&mut doctor(&["--backend", "tpu"]));
    assert_eq!(d.code, 2, "{d:?}");
    assert_eq!(finish(&mut doctor(&["--backend", "cudaa"])).code, 2);
}

#[test]
fn opencl_and_webgpu_pass_where_they_are() {
    for backend in ["opencl", "webgpu"] {
        if there("opencl_and_webgpu_pass_where_they_are", backend) {
            let v = finish(&mut doctor(&["--backend", backend, "--json"])).ok().json();
            assert_eq!(section(&v, backend)["status"], "pass", "{v:#}");
        }
    }
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

/// OpenCL, WebGPU and TPU each get a driver that crashes the process that loads it. Files register the
/// drivers of OpenCL and Vulkan; an environment variable names the PJRT plugin.
#[test]
fn drivers_that_crash_are_failed_lines_and_everything_else_goes_on() {
    let test = "drivers_that_crash_are_failed_lines_and_everything_else_goes_on";
    let dir = tempfile::tempdir().expect("a folder");
    let at_load =
        "#include <stdlib.h>\n__attribute__((constructor)) static void at_load(void) { abort(); }\n";
    let Some(lib) = library(dir.path(), "crash", at_load) else {
        return skip(test, "no C compiler for the drivers");
    };
    let vendors = dir.path().join("vendors");
    std::fs::create_dir(&vendors).expect("a folder");
    std::fs::write(vendors.join("crash.icd"), lib.display().to_string()).expect("written");
    let vulkan = manifest(dir.path(), "crash.json", &lib);
    let backends = [("opencl", "OCL_ICD_VENDORS", &vendors), ("webgpu", "VK_ICD_FILENAMES", &vulkan)];
    let with = [("tpu", "HALCYON_TPU_LIBRARY", &lib)].into_iter().chain(backends);
    let with: Vec<(&str, &str, &std::path::PathBuf)> =
        with.filter(|(b, ..)| *b == "tpu" || there(test, b)).collect();
    for (backend, variable, value) in &with {
        let mut c = doctor(&["--backend", backend, "--json"]);
        let d = finish(c.env_remove("VK_DRIVER_FILES").env(variable, value));
        assert_eq!(d.code, 2, "{d:?}");
        let v = d.json();
        let l = lines(section(&v, backend)).last().expect("a line");
        assert_eq!((&l["check"], &l["status"]), (&"library".into(), &"fail".into()), "{v:#}");
        assert!(l["text"].as_str().is_some_and(|t| t.contains("signal")), "{v:#}");
    }
    // All broken drivers are present at once, and results of probes are cached. In the second run, a driver
    // that crashed must not be taken for a harmless one.
    let all = |args: &[&str]| {
        let mut c = command(args);
        c.env_remove("VK_DRIVER_FILES").env("HALCYON_CONFIG", "off");
        c.env("HALCYON_CACHE", "programs").env("XDG_CACHE_HOME", dir.path().join("cache"));
        with.iter().for_each(|(_, variable, value)| {
            c.env(variable, value);
        });
        finish(&mut c)
    };
    for _ in 0..2 {
        let v = all(&["devices", "--json"]).ok().json();
        for (backend, ..) in &with {
            let row = row(&v, backend);
            let reason = row["reason"].as_str().unwrap_or_default();
            assert!(row["available"] == false && reason.contains("signal"), "{backend}: {v:#}");
            assert!(reason.contains("libcrash.so"), "{backend}: {reason}");
        }
    }
    let v = all(&["run", "models/digits.onnx", "--input", "models/digit-7.png", "--json"]).ok().json();
    assert_eq!(v["backend"]["id"], "cpu:0");
    all(&["run", "models/digits.onnx", "--input", "models/digit-7.png", "--backend", with[0].0])
        .fails(4, &["signal"]);
}

/// The path of a library leads to no file, to a text, to a library for another processor, or to a library
/// without the needed functions. In each case the backend is reported as absent, with the path and what is
/// wrong.
#[test]
#[cfg(target_os = "linux")]
fn what_is_no_library_is_named_with_what_is_wrong() {
    let test = "what_is_no_library_is_named_with_what_is_wrong";
    let dir = tempfile::tempdir().expect("a folder");
    let text = dir.path().join("libtext.so");
    std::fs::write(
        &text,
        "This is a text and not a library, however long it may be, and it is longer than a header.\n",
    )
    .expect("written");
    // The header of a library for a processor that no test machine has (EM_S390).
    let mut head = std::fs::read(env!("CARGO_BIN_EXE_halcyon"))
        .expect("the command")
        .into_iter()
        .take(4096)
        .collect::<Vec<u8>>();
    (head[16], head[18], head[19]) = (3, 22, 0);
    let foreign = dir.path().join("libforeign.so");
    std::fs::write(&foreign, head).expect("written");
    let empty = library(dir.path(), "empty", "int x;\n");
    let mut cases = vec![
        (dir.path().join("libnowhere.so"), "No such file"),
        (text, "invalid ELF header"),
        (foreign, "another processor"),
    ];
    match empty {
        Some(lib) => cases.push((lib, "has no function")),
        None => skip(test, "no C compiler for the library without functions"),
    }
    let vulkan = there(test, "webgpu");
    for (lib, part) in &cases {
        let mut c = command(&["devices", "--json"]);
        c.env("HALCYON_OPENCL_LIBRARY", lib).env("HALCYON_TPU_LIBRARY", lib).env_remove("VK_DRIVER_FILES");
        c.env("VK_ICD_FILENAMES", manifest(dir.path(), "driver.json", lib));
        let v = finish(&mut c).ok().json();
        for backend in ["opencl", "intel", "tpu", "webgpu"].iter().filter(|b| **b != "webgpu" || vulkan) {
            let row = row(&v, backend);
            let reason = row["reason"].as_str().unwrap_or_default();
            assert_eq!(row["available"], false, "{backend}: {v:#}");
            assert!(reason.contains(text_of(lib)) && reason.contains(part), "{backend}, {part}: {reason}");
        }
        let mut c =
            command(&["run", "models/digits.onnx", "--input", "models/digit-7.png", "--backend", "opencl"]);
        finish(c.env("HALCYON_OPENCL_LIBRARY", lib).env("HALCYON_CONFIG", "off"))
            .fails(4, &[text_of(lib), part]);
    }
    // Vulkan's loader library is only found by its name, so the files are in a folder of the search path.
    for (lib, part) in
        cases.iter().filter(|(_, part)| ["invalid ELF header", "has no function"].contains(part))
    {
        let path = dir.path().join(format!("path {part}"));
        std::fs::create_dir(&path).expect("a folder");
        std::fs::copy(lib, path.join("libvulkan.so.1")).expect("copied");
        let v = finish(command(&["devices", "--json"]).env("LD_LIBRARY_PATH", &path)).ok().json();
        let reason = row(&v, "webgpu")["reason"].as_str().unwrap_or_default().to_string();
        assert!(reason.contains("libvulkan.so.1: ") && reason.contains(part), "{part}: {reason}");
    }
}

/// A machine without driver libraries: every absence is explained, and everything works on the CPU.
#[test]
#[cfg(target_os = "linux")]
fn without_any_driver_everything_works_and_every_absence_is_explained() {
    let dir = tempfile::tempdir().expect("a folder");
    std::fs::write(dir.path().join("libvulkan.so.1"), "no library").expect("written");
    let bare = |args: &[&str]| {
        let mut c = command(args);
        c.env("HALCYON_OPENCL_LIBRARY", "/nowhere/libOpenCL.so.1")
            .env("HALCYON_TPU_LIBRARY", "/nowhere/libtpu.so");
        finish(c.env("LD_LIBRARY_PATH", dir.path()).env("HALCYON_CONFIG", "off"))
    };
    let v = bare(&["devices", "--json"]).ok().json();
    for r in v.as_array().expect("rows").iter().filter(|r| r["id"] != "cpu") {
        let reason = r["reason"].as_str().unwrap_or_default();
        assert!(
            r["available"] == false && reason.contains("is not available: ") && reason.contains(". "),
            "{r}"
        );
    }
    assert_eq!(row(&v, "cpu")["available"], true);
    assert!(bare(&["devices"]).ok().out.starts_with("cpu:0 "));
    let v = bare(&["doctor", "--json"]).ok().json();
    assert_eq!(
        (&section(&v, "cpu")["status"], &section(&v, "webgpu")["status"]),
        (&"pass".into(), &"absent".into())
    );
    let digit = ["models/digits.onnx", "--input", "models/digit-7.png"];
    let v = bare(&[&["run", "--json"], &digit[..]].concat()).ok().json();
    assert_eq!(v["backend"]["id"], "cpu:0");
    for backend in ["opencl", "webgpu", "tpu", "metal", "cuda"] {
        bare(&[&["run", "--backend", backend], &digit[..]].concat()).fails(4, &[backend, "not available"]);
    }
    bare(&["inspect", "models/digits.onnx"]).ok();
    bare(&["fit", "models/digits.onnx"]).ok();
    assert_eq!(bare(&["select", "models/digits.onnx", "--json"]).ok().json()["backend"]["id"], "cpu:0");
}

fn row<'a>(v: &'a Value, id: &str) -> &'a Value {
    v.as_array().and_then(|a| a.iter().find(|r| r["id"] == id)).unwrap_or_else(|| panic!("no {id} in {v:#}"))
}

fn text_of(p: &Path) -> &str {
    text(p)
}

/// Writes a file that registers a library as a Vulkan driver.
fn manifest(dir: &Path, name: &str, library: &Path) -> std::path::PathBuf {
    let file = dir.join(name);
    let text = serde_json::json!({
        "file_format_version": "1.0.0",
        "ICD": { "library_path": library, "api_version": "1.1.0" },
    });
    std::fs::write(&file, text.to_string()).expect("written");
    file
}

/// Compiles a library from C source; `None` without a C compiler.
fn library(dir: &Path, name: &str, source: &str) -> Option<std::path::PathBuf> {
    let to = dir.join(format!("lib{name}.so"));
    halcyon_test::library(&to, source, &[]).then_some(to)
}

/// The user's settings do not affect the check: products are not rounded to bf16, and no other device takes
/// the place of the one being examined.
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

/// A machine with two GPUs of one vendor, whose libraries are stand-ins named in the environment. A child
/// process finds the GPUs. They are examined, selected and used.
#[test]
#[cfg(all(target_os = "linux", feature = "cuda", feature = "rocm"))]
fn a_gpu_is_found_examined_chosen_and_used() {
    use halcyon_hal::{cuda, rocm};
    const SEVEN: [&str; 4] = ["run", "models/digits.onnx", "--input", "models/digit-7.png"];
    let paths = halcyon_test::standin::paths();
    let drawn = drawn("a_gpu_is_found_examined_chosen_and_used", paths.len());
    let one = |(i, (id, _)): (usize, &(&'static str, _))| drawn.is_none_or(|d| d == i).then_some(*id);
    for there in paths.iter().enumerate().filter_map(one) {
        // Runs the command on such a machine, with or without the vendor's compiler.
        let on = |args: &[&str], compiler: bool| {
            let mut c = command(args);
            c.env("HALCYON_CONFIG", "off").env("HALCYON_CACHE", "off").env_remove("HALCYON_BACKENDS");
            for (id, path) in &paths {
                let it = |wanted: bool| if wanted { path } else { "/nowhere/libNone.so" };
                let here = *id == there;
                let family = if *id == "cuda" { &cuda::CUDA } else { &rocm::ROCM };
                c.env(family.library_variable, it(here)).env(family.compiler_variable, it(here && compiler));
            }
            finish(&mut c)
        };
        let v = on(&["devices", "--json"], true).ok().json();
        let d = &row(&v, there)["devices"];
        assert_eq!(d.as_array().map(Vec::len), Some(2), "{v:#}");
        assert_eq!((&d[1]["id"], &d[1]["software"]), (&format!("{there}:1").into(), &false.into()), "{d:#}");

        let v = on(&["doctor", "--backend", there, "--json"], true).ok().json();
        let s = section(&v, there);
        assert_eq!(s["status"], "pass", "{v:#}");
        for check in ["library", "device", "open", "kernel", "copies", "product"] {
            let is = |l: &&Value| l["check"] == check && l["status"] == "pass";
            assert!(lines(s).iter().any(|l| is(&l)), "{check}: {s:#}");
        }

        // The GPU is selected automatically, before the CPU.
        let v = on(&[&SEVEN[..], &["--json"]].concat(), true).ok().json();
        assert_eq!(v["backend"]["id"], format!("{there}:0"), "{v:#}");
        assert!(on(&SEVEN, true).ok().out.contains('7'));
        let v =
            on(&["run", SEVEN[1], "--input", SEVEN[3], "--backend", &format!("{there}:1"), "--json"], true);
        assert_eq!(v.ok().json()["backend"]["id"], format!("{there}:1"));

        // Without the compiler, kernels cannot be built, so another device is selected, and the reason is
        // reported.
        let v = on(&[&SEVEN[..], &["--json"]].concat(), false).ok().json();
        let all = v["backend"]["candidates"].as_array().expect("candidates");
        let it = all.iter().find(|c| c["backend"] == there).expect("the backend is a candidate");
        assert!(it["rejected"].as_str().is_some_and(|r| r.contains("/nowhere/libNone.so")), "{v:#}");
        on(&[&SEVEN[..], &["--backend", there]].concat(), false)
            .fails(4, &["/nowhere/libNone.so", "Install"]);
        let v = on(&["doctor", "--backend", there, "--json"], false);
        assert_eq!(v.code, 2, "{v:?}");
    }
}
