//! Tests that the requested device really does the work. A proxy library between the command and OpenCL
//! counts launches and corrupts one read-back, and the corruption must change the answer.

use crate::common::*;
use halcyon_formats::npy;
use halcyon_test::proxy;
use std::path::Path;

/// Runs the digit model on OpenCL through the proxy. Returns the probabilities and the proxy's counts.
fn run(dir: &Path, lib: &Path, corrupt: Option<&str>) -> (Vec<f32>, proxy::Seen) {
    let counts = dir.join(format!("counts-{}", corrupt.unwrap_or("none").replace(':', "-")));
    let out = dir.join("out");
    let mut c = command(&[
        "run",
        "models/digits.onnx",
        "--input",
        "models/digit-7.png",
        "--backend",
        "opencl",
        "--output-dir",
        text(&out),
    ]);
    proxy::through(&mut c, lib, &counts, corrupt);
    finish(&mut c).ok();
    (npy::read(&out.join("probabilities.npy")).expect("an output").to_vec(), proxy::seen(&counts))
}

#[test]
fn a_falsified_read_back_changes_the_answer_and_launches_are_real() {
    let test = "a_falsified_read_back_changes_the_answer_and_launches_are_real";
    if !there(test, "opencl") {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let Some(lib) = proxy::build(dir.path()) else {
        skip(test, "no C compiler for the proxy library");
        return;
    };
    let (unaltered, seen) = run(dir.path(), &lib, None);
    assert!(unaltered[7] > 0.99, "{unaltered:?}");
    assert!(seen.launches >= 4 && seen.reads >= 1 && seen.falsified == 0, "{seen:?}");
    // Byte 31 of the read-back contains exponent bits of the probability of class 7.
    let (falsified, seen) = run(dir.path(), &lib, Some("1:31"));
    assert_eq!(seen.falsified, 1, "{seen:?}");
    assert_ne!(unaltered[7].to_bits(), falsified[7].to_bits());
    assert!((0..10).filter(|i| *i != 7).all(|i| unaltered[i].to_bits() == falsified[i].to_bits()));
    // On the CPU nothing is launched through the library.
    let counts = dir.path().join("counts-cpu");
    let mut c = command(&["run", "models/digits.onnx", "--input", "models/digit-7.png", "--backend", "cpu"]);
    proxy::through(&mut c, &lib, &counts, None);
    finish(&mut c).ok();
    assert_eq!(proxy::seen(&counts).launches, 0);
}

#[test]
fn verification_finds_a_falsified_step_and_its_file_repeats_nothing() {
    let test = "verification_finds_a_falsified_step_and_its_file_repeats_nothing";
    if !there(test, "opencl") {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let Some(lib) = proxy::build(dir.path()) else {
        skip(test, "no C compiler for the proxy library");
        return;
    };
    let file = dir.path().join("wrong.replay");
    let verified = |corrupt: Option<&str>| {
        let model = ["run", "models/digits.onnx", "--input", "models/digit-7.png", "--backend", "opencl"];
        let more = ["--verify", "cpu", "--save-replay", text(&file), "--json"];
        let mut c = command(&[&model[..], &more[..]].concat());
        proxy::through(&mut c, &lib, &dir.path().join("counts-verify"), corrupt);
        finish(&mut c)
    };
    let unaltered = verified(None).ok().json();
    assert_eq!(unaltered["verify"]["agrees"], true, "{unaltered}");
    assert!(!file.exists());
    // The first read-back is the result of the run. The later read-backs are the verified steps.
    let wrong = verified(Some("5:3"));
    assert_eq!(wrong.code, 6, "{wrong:?}");
    let v = &wrong.json()["verify"];
    let last = v["checks"].as_array().and_then(|c| c.last()).expect("checks");
    assert!(v["agrees"] == false && last["wrong"].is_string() && last["span"].is_string(), "{v}");
    // The device itself is right: its results agree with the reference and differ from those in the file.
    let again = halcyon(&["replay", text(&file), "--json"]).ok().json();
    assert_eq!(
        (&again["verdict"], &again["recorded_results"]),
        (&"agrees".into(), &"differs".into()),
        "{again}"
    );
    assert_eq!(again["about"]["step"], last["step"]);
    halcyon(&["replay", text(&file), "--backend", "cpu"]).ok();
}
