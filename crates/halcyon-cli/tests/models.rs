//! Real models with known outputs, run through the command: on cpu at O0, O1 and O2, on the other test
//! devices at O1 and O2. A sample is drawn by seed: one device besides the CPU, one level for each backend
//! and model, and one of the folders of models. HALCYON_CASES=all runs all.

mod common;

use common::*;
use halcyon_formats::npy;
use halcyon_ir::ConstData;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::Path;

const LEVELS: [&str; 3] = ["O0", "O1", "O2"];

/// The levels at which models run on a backend. Only the CPU runs O0.
fn levels(backend: &str) -> &'static [&'static str] {
    if backend == "cpu" { &LEVELS } else { &LEVELS[1..] }
}

/// Runs a model. Returns its saved first output and the report.
fn run(
    place: (&str, &str),
    model: &Path,
    inputs: &[String],
    more: &[&str],
) -> (ConstData, serde_json::Value) {
    let out = tempfile::tempdir().expect("a folder");
    let mut args = vec!["run", text(model), "--backend", place.0, "--level", place.1];
    args.extend(["--json", "--output-dir", text(out.path())]);
    inputs.iter().for_each(|i| args.extend(["--input", i]));
    args.extend(more);
    let v = halcyon(&args).ok().json();
    let file = v["outputs"][0]["file"].as_str().expect("a file");
    let x = npy::read(Path::new(file)).expect("the output was saved");
    (x, v)
}

fn places(test: &'static str) -> impl Iterator<Item = (&'static str, &'static str)> {
    drawn_backends(test).flat_map(move |b| {
        let levels = levels(b);
        let drawn = drawn(&format!("{test} on {b}"), levels.len());
        let runs = move |(i, _): &(usize, &&str)| drawn.is_none_or(|d| d == *i);
        levels.iter().enumerate().filter(runs).map(move |(_, level)| (b, *level))
    })
}

#[test]
fn mnist_recognises_ten_of_ten_digits() {
    let test = "mnist_recognises_ten_of_ten_digits";
    let Some(dir) = models(test, "mnist") else { return };
    let expected: BTreeMap<String, Vec<f64>> =
        serde_json::from_slice(&std::fs::read(dir.join("expected.json")).expect("expected.json"))
            .expect("is JSON");
    assert_eq!(expected.len(), 10);
    let model = dir.join("mnist.onnx");
    for place in places(test) {
        for digit in 0..10 {
            let file = format!("digit-{digit}.npy");
            let input = text(&dir.join(&file)).to_string();
            let (got, v) = run(place, &model, &[input], &["--top-k", "1"]);
            assert_eq!(v["top_k"]["rows"][0][0]["index"], digit, "{place:?}");
            for (g, w) in got.to_vec::<f64>().iter().zip(&expected[&file]) {
                assert!((g - w).abs() <= 1e-4, "{place:?} {file}: {g}, expected {w}");
            }
        }
        // An image of the digit gives the same result.
        let picture = text(&dir.join("digit-4.png")).to_string();
        let scale = ["--image-mean", "0.1307", "--image-std", "0.3081", "--top-k", "1"];
        let (got, v) = run(place, &model, &[picture], &scale);
        assert_eq!(v["top_k"]["rows"][0][0]["index"], 4, "{place:?}");
        for (g, w) in got.to_vec::<f64>().iter().zip(&expected["digit-4.npy"]) {
            assert!((g - w).abs() <= 1e-4, "{place:?} picture: {g}, expected {w}");
        }
    }
}

#[derive(Deserialize)]
struct Sentence {
    text: String,
    ids: Vec<i64>,
    embedding: Vec<f64>,
}

#[test]
fn minilm_embeds_sentences_alone_and_in_a_padded_batch() {
    let test = "minilm_embeds_sentences_alone_and_in_a_padded_batch";
    if left_out(test) {
        return;
    }
    let Some(dir) = models(test, "minilm") else { return };
    let Some(weights) = prepared(test, "HALCYON_MINILM", "") else {
        return;
    };
    let work = tempfile::tempdir().expect("a folder");
    let model = work.path().join("minilm.onnx");
    std::fs::copy(dir.join("minilm.onnx"), &model).expect("the model");
    std::fs::copy(weights.join("model.safetensors"), work.path().join("model.safetensors"))
        .expect("the weights");
    let sentences: Vec<Sentence> =
        serde_json::from_slice(&std::fs::read(dir.join("expected.json")).expect("expected.json"))
            .expect("is JSON");
    let longest = sentences.iter().map(|s| s.ids.len()).max().expect("sentences");

    // Padding is token 0 with a mask of 0.
    let save = |name: &str, rows: &[&Sentence], width: usize| -> Vec<String> {
        let pad = |f: fn(i64) -> i64| -> Vec<i64> {
            let row =
                |s: &&Sentence| (0..width).map(|i| s.ids.get(i).map_or(0, |v| f(*v))).collect::<Vec<_>>();
            rows.iter().flat_map(row).collect()
        };
        [("ids", pad(|v| v)), ("mask", pad(|_| 1))]
            .map(|(input, v)| {
                let path = work.path().join(format!("{name}-{input}.npy"));
                npy::write(&path, &ConstData::from_slice(&[rows.len(), width], &v).expect("fits"))
                    .expect("written");
                format!("{input}={}", text(&path))
            })
            .to_vec()
    };
    let close = |place: (&str, &str), got: &[f64], s: &Sentence, how: &str| {
        assert_eq!(got.len(), s.embedding.len());
        for (g, w) in got.iter().zip(&s.embedding) {
            assert!((g - w).abs() <= 1e-5, "{place:?} {how} \"{}\": {g}, expected {w}", s.text);
        }
    };
    let single: Vec<Vec<String>> =
        sentences.iter().enumerate().map(|(i, s)| save(&format!("s{i}"), &[s], s.ids.len())).collect();
    let batch = save("batch", &sentences.iter().collect::<Vec<_>>(), longest);
    for place in places(test) {
        for (s, inputs) in sentences.iter().zip(&single) {
            let (e, _) = run(place, &model, inputs, &[]);
            close(place, &e.to_vec::<f64>(), s, "alone");
        }
        let (e, _) = run(place, &model, &batch, &[]);
        assert_eq!(e.dims.as_slice(), [sentences.len(), 384]);
        for (row, s) in e.to_vec::<f64>().chunks(384).zip(&sentences) {
            close(place, row, s, "in a batch");
        }
    }
}

#[test]
fn squeezenet_follows_onnxruntime() {
    let test = "squeezenet_follows_onnxruntime";
    let Some(dir) = prepared(test, "HALCYON_TESTDATA", "squeezenet") else {
        return;
    };
    let want = npy::read(&dir.join("output.npy")).expect("the expected output");
    for place in places(test) {
        let input = text(&dir.join("input.npy")).to_string();
        let (got, _) = run(place, &dir.join("model.onnx"), &[input], &[]);
        assert_eq!((got.dtype, &got.dims), (want.dtype, &want.dims));
        for (g, w) in got.to_vec::<f64>().iter().zip(want.to_vec::<f64>()) {
            assert!((g - w).abs() <= 1e-3 * w.abs(), "{place:?}: {g}, expected {w}");
        }
    }
}

const FOLDERS: [&str; 4] = ["models/light", "models/random", "ml", "models/shapes"];

/// Checks that every case of a folder passes on its backends, and that there are at least `at_least`
/// cases.
fn all_pass(test: &'static str, folder: &str, at_least: u64) {
    if drawn("folder of models", FOLDERS.len()).is_some_and(|i| FOLDERS[i] != folder) {
        println!("{test}: another folder was drawn");
        return;
    }
    let Some(dir) = prepared(test, "HALCYON_TESTDATA", folder) else { return };
    for backend in drawn_backends(test) {
        let v = halcyon(&["conformance", "onnx", text(&dir), "--backend", backend, "--json"]).json();
        let bad: Vec<String> = v["cases"]
            .as_array()
            .expect("cases")
            .iter()
            .filter(|c| c["status"] != "passed")
            .map(|c| format!("{}: {}: {}", c["name"], c["status"], c["reason"]))
            .collect();
        assert!(bad.is_empty(), "{backend}: {bad:#?}");
        let passed = v["total"]["passed"].as_u64().expect("a count");
        assert!(passed >= at_least, "{passed} models on {backend}");
    }
}

#[test]
fn the_light_models_give_their_stored_outputs() {
    all_pass("the_light_models_give_their_stored_outputs", "models/light", 9);
}

#[test]
fn the_light_models_with_random_weights_follow_onnxruntime() {
    all_pass("the_light_models_with_random_weights_follow_onnxruntime", "models/random", 9);
}

#[test]
fn the_ml_domain_and_strings_follow_onnxruntime() {
    all_pass("the_ml_domain_and_strings_follow_onnxruntime", "ml", 380);
}

#[test]
fn graphs_of_real_shapes_follow_onnxruntime() {
    all_pass("graphs_of_real_shapes_follow_onnxruntime", "models/shapes", 10);
}
