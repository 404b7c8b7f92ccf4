//! No cheating: the device asked for is the device that works. A library between the command and the real OpenCL counts the
//! launches and falsifies one read-back; the answer must show it.

mod common;
#[path = "../../halcyon-hal/tests/common/proxy.rs"]
mod proxy;

use common::*;
use halcyon_formats::npy;
use std::path::Path;

/// The digit model on OpenCL through the proxy: probabilities, and what the proxy saw.
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
    let (honest, seen) = run(dir.path(), &lib, None);
    assert!(honest[7] > 0.99, "{honest:?}");
    assert!(seen.launches >= 4 && seen.reads >= 1 && seen.falsified == 0, "{seen:?}");
    // Byte 31 of the read-back is the exponent of the seventh class's probability.
    let (falsified, seen) = run(dir.path(), &lib, Some("1:31"));
    assert_eq!(seen.falsified, 1, "{seen:?}");
    assert_ne!(honest[7].to_bits(), falsified[7].to_bits());
    assert!((0..10).filter(|i| *i != 7).all(|i| honest[i].to_bits() == falsified[i].to_bits()));
    // On the CPU nothing is launched through the library.
    let counts = dir.path().join("counts-cpu");
    let mut c = command(&["run", "models/digits.onnx", "--input", "models/digit-7.png", "--backend", "cpu"]);
    proxy::through(&mut c, &lib, &counts, None);
    finish(&mut c).ok();
    assert_eq!(proxy::seen(&counts).launches, 0);
}
