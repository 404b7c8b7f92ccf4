//! Tests that the OpenCL driver calls the OpenCL library. A proxy library counts the launches, and can
//! falsify a read-back, which changes the result. A missing or misnamed library is reported and not skipped
//! silently.
#![cfg(all(unix, feature = "opencl"))]

#[path = "../common/mod.rs"]
mod common;

use common::*;
use halcyon_hal::conformance::captures::Work;
use halcyon_hal::{BackendType, Error, Options, registry};
use halcyon_ir::{DType, Scalar};
use halcyon_test_host::{proxy, required, skip};
use std::process::{Command, Output};

/// Runs one of the ignored tests below in its own process.
fn child(name: &str) -> Command {
    let mut c = Command::new(std::env::current_exe().unwrap());
    c.args(["--exact", name, "--ignored", "--nocapture", "--test-threads=1"]);
    c.env_remove("HALCYON_OPENCL_LIBRARY");
    c
}

fn line(o: &Output) -> String {
    let text = String::from_utf8_lossy(&o.stdout).into_owned();
    let found = text.lines().find_map(|l| l.find("ANSWER ").map(|at| l[at..].to_string()));
    found.unwrap_or_else(|| panic!("{text}\n{}", String::from_utf8_lossy(&o.stderr)))
}

fn opencl_present() -> bool {
    match registry::driver(BackendType::OpenCl).and_then(|d| d.probe()) {
        Ok(_) => true,
        Err(e) => {
            assert!(!required(), "{e}");
            skip("the proxy for OpenCL", &e.to_string());
            false
        }
    }
}

#[test]
fn launches_are_seen_and_a_falsified_read_changes_the_answer() {
    let dir = tempfile::tempdir().unwrap();
    let Some(lib) = proxy::build(dir.path()).filter(|_| opencl_present()) else {
        return;
    };
    let counts = dir.path().join("counts");
    let plain = child("child_computes").output().unwrap();
    let want = "ANSWER 3 5 7 9 11 13 15 17 | 1 launches";
    assert_eq!(line(&plain), want);
    let mut c = child("child_computes");
    proxy::through(&mut c, &lib, &counts, None);
    assert_eq!(line(&c.output().unwrap()), want);
    assert_eq!(proxy::seen(&counts), proxy::Seen { launches: 1, reads: 1, falsified: 0 });
    let mut c = child("child_computes");
    proxy::through(&mut c, &lib, &counts, Some("1:7"));
    let bad = line(&c.output().unwrap());
    assert_ne!(bad, want);
    assert!(
        bad.starts_with("ANSWER 3 ") && bad.contains(" 7 9 11 13 15 17 |"),
        "only the second value differs: {bad}"
    );
    assert_eq!(proxy::seen(&counts).falsified, 1);
    // If the selected read-back does not occur, nothing is falsified.
    let mut c = child("child_computes");
    proxy::through(&mut c, &lib, &counts, Some("2"));
    assert_eq!(line(&c.output().unwrap()), want);
    assert_eq!(proxy::seen(&counts).falsified, 0);
}

/// The launches of a command buffer are seen too, and each launch of it runs them.
#[test]
fn launches_of_command_buffers_are_seen() {
    let dir = tempfile::tempdir().unwrap();
    let Some(lib) = proxy::build(dir.path()).filter(|_| opencl_present()) else {
        return;
    };
    let counts = dir.path().join("counts");
    let mut c = child("child_captures");
    proxy::through(&mut c, &lib, &counts, None);
    let text = line(&c.env("HALCYON_OPENCL_COMMAND_BUFFERS", "on").output().unwrap());
    if text.contains("not supported") {
        assert!(!required(), "{text}");
        return skip("command buffers through the proxy", &text);
    }
    assert_eq!(text, "ANSWER 4 3 2 1 | 6 launches");
    assert_eq!(proxy::seen(&counts).launches, 6);
    // On a processor, commands are submitted if nothing else is set.
    let mut c = child("child_captures");
    proxy::through(&mut c, &lib, &counts, None);
    let text = line(&c.env_remove("HALCYON_OPENCL_COMMAND_BUFFERS").output().unwrap());
    assert!(text.contains("HALCYON_OPENCL_COMMAND_BUFFERS=on"), "{text}");
}

#[test]
#[ignore = "run by the other tests in a process of its own"]
fn child_captures() {
    let dir = tempfile::tempdir().unwrap();
    let o = Options { cache_dir: Some(dir.path().into()), ..Default::default() };
    let w = Work::new(registry::driver(BackendType::OpenCl).unwrap().open(0, &o).unwrap());
    let r = match w.capture() {
        Ok(r) => r,
        Err(e) => return println!("ANSWER {}", e.to_string().replace('\n', " ")),
    };
    for a in [3.0, 2.0, 1.0] {
        assert!(w.launch(&r, [a, 0.0]));
    }
    let out: Vec<String> = w.answer().iter().map(|v| v.to_string()).collect();
    println!("ANSWER {} | {} launches", out.join(" "), w.device.counters().launches);
}

#[test]
#[ignore = "run by the other tests in a process of its own"]
fn child_computes() {
    let dir = tempfile::tempdir().unwrap();
    let o = Options { cache_dir: Some(dir.path().into()), ..Default::default() };
    let d = registry::driver(BackendType::OpenCl).unwrap().open(0, &o).unwrap();
    let p = d.compile(&affine(DType::F32)).unwrap();
    let x = upload(&*d, &pack(DType::F32, &(1..9).map(Scalar::I).collect::<Vec<_>>()));
    let y = upload(&*d, &[0; 32]);
    launch(&*d, &p, [1, 1, 1], &[&x, &y], &[Scalar::I(8), Scalar::F(2.0), Scalar::F(1.0)]).unwrap();
    let out: Vec<String> =
        unpack(DType::F32, &download(&*d, &y)).iter().map(|v| v.as_f64().to_string()).collect();
    println!("ANSWER {} | {} launches", out.join(" "), d.counters().launches);
}

#[test]
fn a_library_named_wrongly_is_reported_and_no_other_is_used() {
    for named in ["/nowhere/libOpenCL.so.1", "libhalcyon-has-no-such-library.so"] {
        let mut c = child("child_reports");
        c.env("HALCYON_OPENCL_LIBRARY", named);
        let text = line(&c.output().unwrap());
        assert!(text.starts_with("ANSWER 4 opencl is not available"), "{text}");
        assert!(text.contains(&format!("Tried: {named}: ")), "{text}");
    }
}

#[test]
fn a_loader_without_drivers_is_reported() {
    if !opencl_present() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let mut c = child("child_reports");
    // It depends on the loader which of these variables it reads.
    c.env("OCL_ICD_VENDORS", dir.path()).env("OPENCL_VENDOR_PATH", dir.path());
    let text = line(&c.output().unwrap());
    assert!(text.starts_with("ANSWER 4 ") && text.contains("no driver is registered"), "{text}");
}

#[test]
#[ignore = "run by the other tests in a process of its own"]
fn child_reports() {
    match registry::driver(BackendType::OpenCl).and_then(|d| d.probe()) {
        Ok(d) => println!("ANSWER {} devices", d.len()),
        Err(e) => {
            assert!(
                matches!(&e, Error::Unavailable { tried, fix, .. } if !tried.is_empty() && !fix.is_empty())
            );
            println!("ANSWER {} {}", e.exit_code(), e.to_string().replace('\n', " "));
        }
    }
}
