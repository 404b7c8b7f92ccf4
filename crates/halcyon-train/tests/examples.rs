//! The examples that train with this crate.

#[path = "../../../examples/06_char_gpt.rs"]
mod char_gpt;
#[path = "../../../examples/05_digits_cnn.rs"]
mod digits;
#[path = "../../../examples/10_mnist_cnn.rs"]
mod mnist;

use halcyon::OnnxSession;
use halcyon::ir::passes::AmpPolicy;
use halcyon::prelude::*;
use halcyon_formats::npz::Npz;
use halcyon_test::models;
use std::path::{Path, PathBuf};

fn shipped(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(name)
}

/// The share of the test images that a model file classifies correctly.
fn accuracy(b: &Backend, model: &Path) -> f64 {
    let data = Npz::open(&shipped("models/digits.npz")).unwrap();
    let images = Tensor::from_data(b, &data.get("test_images").unwrap()).unwrap();
    let n = images.dims().unwrap()[0];
    let images = images.reshape([n, 1, 8, 8]).cast(DType::F32) / 16.0;
    let found = OnnxSession::open(b, model).unwrap().run([("image", &images)]).unwrap();
    let p = &found["probabilities"];
    assert_eq!(p.dims().unwrap().as_slice(), [n, 10]);
    let digits = p.argmax(-1).to_vec::<i64>().unwrap();
    let labels = data.get("test_labels").unwrap().to_vec::<i64>();
    digits.iter().zip(&labels).filter(|(d, l)| d == l).count() as f64 / n as f64
}

/// Trains for fewer epochs than the example's `main`, which made `models/digits.onnx`.
#[test]
fn the_digits_cnn_reaches_97_percent_also_as_a_file() {
    let b = Backend::cpu().unwrap();
    let (net, found) = digits::train(&b, &shipped("models/digits.npz"), 2, 18).unwrap();
    assert!(found >= 0.97, "{found}");
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("digits.onnx");
    let bytes = digits::save(&net, &b, &file).unwrap();
    assert_eq!(std::fs::metadata(&file).unwrap().len(), bytes);
    assert!(bytes < 40_000, "{bytes}");
    assert!((accuracy(&b, &file) - found).abs() < 1e-9);
    assert!(accuracy(&b, &shipped("models/digits.onnx")) >= 0.978);
}

#[test]
fn the_mnist_cnn_continues_from_its_checkpoint() {
    let Some(data) = models("the_mnist_cnn_continues_from_its_checkpoint", "mnist") else { return };
    let b = Backend::cpu().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let run = |steps| mnist::Run {
        data: data.clone(),
        folder: dir.path().join("run"),
        precision: AmpPolicy::None,
        epochs: 1,
        seed: 7,
        steps,
    };
    assert_eq!(mnist::train(&b, &run(Some(40))).unwrap().step, 40);
    let first = mnist::train(&b, &run(None)).unwrap();
    assert_eq!(first.step, 125);
    assert!(first.metrics["accuracy"] >= 0.95, "{first:?}");
    // Each run adds lines to the log. The last line is that of the epoch, with the metrics.
    let log = std::fs::read_to_string(dir.path().join("run/log.jsonl")).unwrap();
    assert!(log.lines().last().unwrap().contains("\"accuracy\""), "{log}");
    // A run that is complete takes no step.
    let again = mnist::train(&b, &run(None)).unwrap();
    assert_eq!((again.step, again.metrics), (125, first.metrics));
}

#[test]
fn the_character_model_learns_and_writes() {
    let b = Backend::cpu().unwrap();
    let (gpt, v, [first, last]) = char_gpt::train(&b, &shipped("examples/train/text.txt"), 60).unwrap();
    // If all characters are equally probable, the loss is ln(size).
    let random = (v.size() as f64).ln();
    assert!(first < random + 1.0 && last < 0.7 * random, "{first} {last} {random}");
    let text = gpt.write(&b, &v, "The ", 12).unwrap();
    assert!(text.starts_with("The ") && text.chars().count() == 16, "{text}");
}
