//! Tests of `halcyon train`: accuracy, interruption and resumption, exported models, mistakes.

use crate::common::*;
use halcyon_test::drawn;
use serde_json::Value;
use std::fs;
use std::path::Path;

const DIGITS: &str = "examples/train/digits.toml";
const CHARS: &str = "examples/train/chars.toml";

fn lines(text: &str) -> Vec<Value> {
    text.lines().map(|l| serde_json::from_str(l).expect("a line of JSON")).collect()
}

/// Runs a training with settings, on the CPU with JSON lines.
fn train(config: &str, folder: &Path, settings: &[&str], more: &[&str]) -> Done {
    let output = format!("output={}", text(folder));
    let mut args = vec!["train", config, "--backend", "cpu", "--json", "--set", &output];
    settings.iter().for_each(|s| args.extend(["--set", *s]));
    args.extend(more);
    halcyon(&args)
}

#[test]
fn digits_reach_97_percent_and_the_exported_model_runs() {
    let dir = tempfile::tempdir().expect("a folder");
    let (run, onnx) = (dir.path().join("run"), dir.path().join("digits.onnx"));
    let export = format!("export={}", text(&onnx));
    let settings = ["epochs=8", &export, "tensorboard=true", "best={metric=\"accuracy\", goal=\"largest\"}"];
    let epochs = lines(&train(DIGITS, &run, &settings, &[]).ok().out);
    assert_eq!(epochs.len(), 8);
    for (i, e) in epochs.iter().enumerate() {
        assert_eq!(e["epoch"], i + 1);
        assert!(e["loss"].as_f64() > Some(0.0) && e["samples_per_s"].as_f64() > Some(0.0), "{e}");
    }
    let accuracy = epochs[7]["accuracy"].as_f64().expect("an accuracy");
    assert!(accuracy >= 0.97, "{accuracy}");
    let log = lines(&fs::read_to_string(run.join("log.jsonl")).expect("a log"));
    assert_eq!(log.len(), 8 * 22 + 8);
    assert!(run.join("loss.png").is_file() && run.join("tensorboard").is_dir());
    assert!(fs::read_dir(run.join("checkpoints")).expect("checkpoints").count() <= 4);
    // The batch of the model is open.
    let answer = ["run", text(&onnx), "--input", "models/digit-7.png", "--backend", "cpu", "--json"];
    let v = halcyon(&answer).ok().json();
    let text_of = v.to_string();
    assert!(text_of.contains("probabilities"), "{text_of}");
    let seven =
        halcyon(&["run", text(&onnx), "--input", "models/digit-7.png", "--backend", "cpu", "--top-k", "1"]);
    assert!(seven.ok().out.contains("7"), "{text_of}");
    halcyon(&["run", text(&onnx), "--input", "random:5x1x8x8", "--backend", "cpu"]).ok();
}

#[test]
fn mnist_reaches_98_percent() {
    if halcyon_test::left_out("mnist_reaches_98_percent") {
        return;
    }
    let Some(folder) = models("mnist_reaches_98_percent", "mnist") else { return };
    let dir = tempfile::tempdir().expect("a folder");
    let data = format!("data={}", text(&folder));
    let epochs = lines(&train("examples/train/mnist.toml", dir.path(), &[&data, "epochs=3"], &[]).ok().out);
    let accuracy = epochs[2]["accuracy"].as_f64().expect("an accuracy");
    assert!(accuracy >= 0.98, "{accuracy}");
}

/// The lines of a log, without their times: kind, step and loss.
fn losses(folder: &Path) -> Vec<String> {
    let log = fs::read_to_string(folder.join("log.jsonl")).expect("a log");
    lines(&log).iter().map(|l| format!("{} {} {}", l["kind"], l["step"], l["loss"])).collect()
}

/// If Ctrl-C ends a run and `--resume` continues it, the losses are the same as without the interruption.
#[cfg(unix)]
#[test]
fn an_interrupted_run_continues_with_the_same_bits() {
    use std::process::Command;
    let dir = tempfile::tempdir().expect("a folder");
    let (whole, parts) = (dir.path().join("whole"), dir.path().join("parts"));
    let settings = ["epochs=3", "workers=2"];
    train(DIGITS, &whole, &settings, &[]).ok();
    let output = format!("output={}", text(&parts));
    let args =
        ["train", DIGITS, "--backend", "cpu", "--json", "--set", &output, "--set", "epochs=3", "--set"];
    let mut child = command(&[&args[..], &["read_every=1"]].concat())
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .expect("the command starts");
    // The line of the first epoch is printed when the checkpoint of this epoch is written, so the signal
    // arrives in the second epoch.
    let mut first = String::new();
    let mut out = std::io::BufReader::new(child.stdout.take().expect("a pipe"));
    std::io::BufRead::read_line(&mut out, &mut first).expect("a line");
    let pid = child.id().to_string();
    assert!(Command::new("kill").args(["-INT", &pid]).status().expect("kill").success());
    let mut said = String::new();
    std::io::Read::read_to_string(&mut out, &mut said).expect("text");
    let status = child.wait().expect("it ends");
    assert_eq!(status.code(), Some(130), "{said}");
    assert!(said.contains("--resume") && said.contains("step-0000"), "{said}");
    let before = losses(&parts).len();
    assert!((22..60).contains(&before), "{before}");
    // Without --resume nothing is overwritten.
    train(DIGITS, &parts, &settings, &[]).code_is(2, "--resume");
    train(DIGITS, &parts, &settings, &["--resume"]).ok();
    assert_eq!(losses(&parts), losses(&whole));
    // Resuming a finished run does nothing. With more epochs, the run continues.
    assert_eq!(train(DIGITS, &parts, &settings, &["--resume"]).ok().out, "");
    let more = train(DIGITS, &parts, &["epochs=4"], &["--resume"]).ok();
    assert_eq!(lines(&more.out).len(), 1);
}

#[test]
fn characters_are_learned_and_exported() {
    let dir = tempfile::tempdir().expect("a folder");
    let onnx = dir.path().join("chars.onnx");
    let export = format!("export={}", text(&onnx));
    let settings = ["steps=60", "model.layers=1", "read_every=5", &export, "test.context=64"];
    train(CHARS, &dir.path().join("run"), &settings, &[]).ok();
    let log = lines(&fs::read_to_string(dir.path().join("run/log.jsonl")).expect("a log"));
    let loss = |l: &Value| l["loss"].as_f64().expect("a loss");
    let (first, last) = (loss(&log[0]), loss(&log[log.len() - 1]));
    assert!(first > 4.0 && last < first - 0.8, "{first} {last}");
    halcyon(&["run", text(&onnx), "--input", "zeros", "--backend", "cpu"]).ok();
}

/// Every backend trains, in every dtype of parameters.
#[test]
fn every_backend_and_dtype_trains() {
    for backend in drawn_backends("every_backend_and_dtype_trains") {
        // On a device each run compiles its programs, so a sample runs only one dtype.
        let only = if backend == "cpu" { None } else { drawn(&format!("training on {backend}"), 3) };
        for (k, dtype) in ["f32", "bf16", "f16"].into_iter().enumerate() {
            if only.is_some_and(|only| only != k) {
                continue;
            }
            let dir = tempfile::tempdir().expect("a folder");
            let (output, dtype) = (format!("output={}", text(dir.path())), format!("dtype={dtype}"));
            let args = ["train", DIGITS, "--backend", backend, "--json", "--set", "epochs=2", "--set"];
            let done = halcyon(&[&args[..], &[&output, "--set", &dtype]].concat());
            // A device without the type says so.
            if done.code == 3 {
                continue;
            }
            let epochs = lines(&done.ok().out);
            let accuracy = epochs[1]["accuracy"].as_f64().expect("an accuracy");
            assert!(accuracy > 0.8, "{backend} {dtype}: {accuracy}");
        }
    }
}

#[test]
fn mistakes_in_configurations_are_named() {
    let dir = tempfile::tempdir().expect("a folder");
    let run = dir.path().join("run");
    let file = dir.path().join("c.toml");
    fs::write(&file, "epoch = 3\n[model]\nkind = \"mlp\"\nhidden = [8]\n[train]\nkind = \"csv\"\n")
        .expect("written");
    halcyon(&["train", text(&file)]).fails(1, &["c.toml", "line 1", "epoch", "epochs"]);
    halcyon(&["train", "nothing.toml"]).fails(1, &["nothing.toml"]);
    let fails = |settings: &[&str], code: i32, parts: &[&str]| {
        let output = format!("output={}", text(&run));
        let mut args = vec!["train", DIGITS, "--backend", "cpu", "--set", &output];
        settings.iter().for_each(|s| args.extend(["--set", *s]));
        halcyon(&args).fails(code, parts);
        assert!(!run.join("checkpoints").exists(), "{settings:?}");
    };
    fails(&["epochs"], 2, &["key=value"]);
    fails(&["data=nowhere.npz"], 1, &["nowhere.npz"]);
    fails(&["train.shape=[64]", "test.shape=[64]"], 2, &["cnn", "[channels, height, width]"]);
    fails(&["model.channels=[4, 4, 4, 4]"], 2, &["1 to 3 convolutions"]);
    fails(&["test.shape=[1, 4, 16]"], 2, &["test data"]);
    fails(&["optimizer.momentum=0.9"], 2, &["momentum", "sgd"]);
    fails(&["optimizer.schedule={kind=\"sine\"}"], 2, &["sine"]);
    fails(&["batch=5000"], 2, &["1437"]);
    halcyon(&["train", "examples/train/mnist.toml", "--backend", "cpu"]).fails(2, &["--set data=DIR"]);
}
