//! Tests of the backend through the user's API: its names, selection, results, memory limit and faults.

use halcyon::prelude::*;
use halcyon::{ConstData, Error, Fallback, OnnxSession, Policy, Selection};
use halcyon_formats::npy;
use halcyon_formats::onnx::Model;
use halcyon_hal::{backend, policy, select};
use halcyon_interpreter::{INTERPRETER, register};
use std::path::Path;

fn open(level: Level) -> Backend {
    register().unwrap();
    Backend::builder().backend_type(INTERPRETER).level(level).build().unwrap()
}

#[test]
fn the_backends_names_parse_and_serialise() {
    register().unwrap();
    register().unwrap(); // Registering again replaces the driver of this backend.
    for name in ["interp", "Interpreter", " INTERP "] {
        assert_eq!(name.parse::<BackendType>().unwrap(), INTERPRETER);
    }
    assert_eq!(
        (INTERPRETER.id(), INTERPRETER.title(), INTERPRETER.vendor()),
        ("interp", "Interpreter", "halcyon")
    );
    let text = serde_json::to_string(&INTERPRETER).unwrap();
    assert_eq!(text, "\"interp\"");
    assert_eq!(serde_json::from_str::<BackendType>(&text).unwrap(), INTERPRETER);
    let e = "interpp".parse::<BackendType>().unwrap_err();
    assert!(e.exit_code() == 2 && e.to_string().contains("noop, interp, interpreter"), "{e}");
    assert!(backend::all().contains(&INTERPRETER));
    assert!(select::discover().iter().any(|r| r.id == INTERPRETER && r.available));
}

#[test]
fn selection_uses_the_backend_only_when_named() {
    let b = open(Level::O1);
    assert_eq!((b.id(), b.selection().rule.as_str()), ("interp:0", "interp was requested"));
    let text = serde_json::to_string(b.selection()).unwrap();
    assert_eq!(&serde_json::from_str::<Selection>(&text).unwrap(), b.selection());
    // If the user's order names a software device, the device keeps its position in the order.
    let order = |text: &str| Backend::builder().policy(text.parse::<Policy>().unwrap()).build().unwrap();
    assert_eq!(order("interpreter").id(), "interp:0");
    assert_eq!(order("interp,cpu").id(), "interp:0");
    assert_eq!(order("cpu,interp").id(), "cpu:0");
    // Selection by priority skips the backend, and the report says why.
    let auto = order(policy::BY_PRIORITY);
    let why = auto.selection().candidates.iter().find(|c| c.backend == INTERPRETER).unwrap();
    assert_eq!(why.rejected.as_deref(), Some("it is used only when named"));
    let e = Backend::builder().backend_type(INTERPRETER).device(3).build().unwrap_err();
    assert!(e.exit_code() == 4 && e.to_string().contains("no device 3"), "{e}");
}

#[test]
fn the_backend_computes_and_launches_are_independent() {
    for level in [Level::O0, Level::O2] {
        let b = open(level);
        let x = Tensor::from_slice(&b, [2, 2], &[1.0f32, 2.0, 3.0, 4.0]).unwrap();
        assert_eq!((x.matmul(&x) + 1.0).relu().to_vec::<f32>().unwrap(), [8.0, 11.0, 16.0, 23.0]);
        let c = b.counters();
        assert!(c.launches > 0 && c.library_calls == 0 && c.compiles > 0, "{c:?}");
    }
}

/// Largest difference between the outputs of this backend and the CPU, and the CPU's outputs.
fn against_the_cpu(model: &Path, input: &ConstData) -> (f64, Vec<f64>) {
    let run = |b: &Backend| -> Vec<f64> {
        let s = OnnxSession::new(b, Model::open(model).unwrap()).unwrap();
        let out = s.run_data(&[input.clone().into()]).unwrap().outputs.remove(0);
        out.tensor().unwrap().to_vec()
    };
    let (got, want) = (run(&open(Level::O2)), run(&Backend::cpu().unwrap()));
    assert_eq!(got.len(), want.len());
    (got.iter().zip(&want).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max), want)
}

#[test]
fn models_give_the_results_of_the_cpu() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    // The digits model of this repository, on arbitrary numbers instead of an image.
    let x: Vec<f32> = (0..64).map(|i| (i * 37 % 64) as f32 / 63.0).collect();
    let x = ConstData::from_slice(&[1, 1, 8, 8], &x).unwrap();
    let (worst, want) = against_the_cpu(&root.join("models/digits.onnx"), &x);
    assert!(worst < 1e-4, "digits: {worst}");
    assert!((want.iter().sum::<f64>() - 1.0).abs() < 1e-4);
    // MNIST is in a folder beside the repository, if present.
    let mnist = root.join("../shared/models/mnist");
    if !mnist.is_dir() {
        println!("skipped mnist: the models folder beside the repository is absent");
        return;
    }
    let x = npy::read(&mnist.join("digit-7.npy")).unwrap();
    let (worst, want) = against_the_cpu(&mnist.join("mnist.onnx"), &x);
    assert!(worst < 1e-4, "mnist: {worst}");
    assert!(want.iter().all(|v| *v <= want[7]), "the digit is recognised as 7: {want:?}");
}

#[test]
fn the_backends_memory_is_capped() {
    register().unwrap();
    let b = Backend::builder().backend_type(INTERPRETER).memory_limit(64 << 10).build().unwrap();
    let keep = Tensor::from_slice(&b, [10_000], &[1.0f32; 10_000]).unwrap();
    let before = b.memory().allocated;
    let e = Tensor::from_slice(&b, [10_000], &[1.0f32; 10_000]).unwrap_err();
    let Error::OutOfMemory { requested, total, .. } = &e else { panic!("{e}") };
    assert_eq!((*requested, *total), (40_000, 64 << 10));
    // A run whose result does not fit into the memory limit is rejected too.
    let e = (&keep + 1.0).eval().map(|_| ()).unwrap_err();
    assert_eq!(e.exit_code(), 5, "{e}");
    assert_eq!(b.memory().allocated, before, "what failed left no memory allocated");
    drop(keep);
    Tensor::from_slice(&b, [10_000], &[1.0f32; 10_000]).unwrap();
    let e = Backend::builder().backend_type(INTERPRETER).memory_limit(1 << 20);
    let e = e.fallback(Fallback::Never).memory_needed(2 << 20).build().unwrap_err();
    let Error::OutOfMemory { requested, free, .. } = &e else { panic!("{e}") };
    assert_eq!((*requested, *free), (2 << 20, 1 << 20));
}

#[test]
fn a_bad_index_is_an_error_with_its_place() {
    let b = open(Level::O1);
    let table = Tensor::from_slice(&b, [3], &[1.0f32, 2.0, 3.0]).unwrap();
    let at = |i: i32| table.gather(&Tensor::from_slice(&b, [1], &[i]).unwrap(), 0).to_vec::<f32>();
    assert_eq!(at(2).unwrap(), [3.0]);
    let e = at(3).unwrap_err();
    assert!(matches!(e, Error::Index { .. }) && e.to_string().contains("backend.rs"), "{e}");
    assert_eq!(at(0).unwrap(), [1.0], "the fault is reported only once");
}

#[test]
fn the_command_accepts_the_backend_by_name() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let halcyon = |args: &[&str]| {
        let mut c = std::process::Command::new(env!("CARGO_BIN_EXE_halcyon-with-interpreter"));
        c.current_dir(&root).args(args).env("HALCYON_CONFIG", "off").env("HALCYON_CACHE", "off");
        let o = c.env_remove("HALCYON_BACKENDS").output().unwrap();
        let out = String::from_utf8_lossy(&o.stdout).into_owned();
        (o.status.code(), out, String::from_utf8_lossy(&o.stderr).into_owned())
    };
    let run = ["run", "models/digits.onnx", "--input", "models/digit-7.png", "--top-k", "1", "--json"];
    let (code, out, err) = halcyon(&[&run[..], &["--backend", "Interpreter"]].concat());
    assert_eq!(code, Some(0), "{out}{err}");
    let v: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!(v["top_k"]["rows"][0][0]["index"], 7, "{out}");
    assert!(out.contains("\"interp:0\""), "{out}");
    let (_, out, _) = halcyon(&["devices"]);
    let line = out.lines().find(|l| l.starts_with("interp:0")).unwrap_or_default();
    assert!(line.contains("Kernel IR interpreter") && line.contains("tried last"), "{out}");
    assert!(out.starts_with("cpu:0"), "{out}");
    let (code, _, err) = halcyon(&[&run[..6], &["--backend", "interpp"]].concat());
    assert!(code == Some(2) && err.contains("interp, interpreter"), "{err}");
}
