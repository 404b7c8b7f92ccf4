//! Language models on several devices: `--split`, `--gpu-layers`, `--cpu-moe` and `--n-cpu-moe`.

use crate::common::language::folder;
use crate::common::{Done, command, finish, text, there};
use halcyon_formats::npy;
use halcyon_ir::ConstData;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// A small model with experts in both of its layers. It has no tokenizer.
fn mixture() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../halcyon-models/tests/data/mixtral")
}

fn run(dir: &Path, args: &[&str]) -> Done {
    let mut c = command(args);
    c.current_dir(dir).env("HALCYON_CONFIG", "off");
    finish(c.env("HALCYON_CACHE", "programs").env("XDG_CACHE_HOME", dir.join("cache")))
}

fn logits(dir: &Path, args: &[&str]) -> Vec<f32> {
    run(dir, &[&["logits", "tiny.gguf", "--tokens", "ids.npy", "-o", "z.npy"], args].concat()).ok();
    npy::read(&dir.join("z.npy")).expect("logits").to_vec::<f32>()
}

/// The devices of a placement, and the layers on each: `[["cpu:0", [0], [0]]]`.
fn places(v: &Value) -> Value {
    let of = |d: &Value| json!([d["device"], d["mixers"], d["feed_forward"]]);
    v["placement"]["devices"].as_array().expect("devices").iter().map(of).collect()
}

#[test]
fn layers_go_to_the_devices_of_a_split() {
    let dir = folder();
    let cpu = logits(dir.path(), &["--backend", "cpu"]);
    assert_eq!(logits(dir.path(), &["--split", "cpu=1,cpu=1"]), cpu);
    assert_eq!(logits(dir.path(), &["--split", "cpu,cpu"]), cpu);
    let generate = |more: &[&str]| {
        let args = ["generate", "tiny.gguf", "-p", "the", "-n", "6", "--temp", "0", "--ignore-eos"];
        run(dir.path(), &[&args, more].concat()).ok()
    };
    let one = generate(&["--backend", "cpu", "--json"]).json();
    let two = generate(&["--split", "cpu=1,cpu=1", "--json"]).json();
    assert_eq!(one["tokens"], two["tokens"]);
    assert_eq!(places(&one), json!([["cpu:0", [0, 1], [0, 1]]]));
    assert_eq!(places(&two), json!([["cpu:0", [0], [0]], ["cpu:0", [1], [1]]]));
    assert_eq!(two["placement"]["why"], "--split, by shares");
    let sum = |v: &Value, key: &str| -> u64 {
        let devices = v["placement"]["devices"].as_array().expect("devices");
        devices.iter().map(|d| d[key].as_u64().expect("bytes")).sum()
    };
    assert!(sum(&one, "weights") > 0 && sum(&one, "cache") > 0);
    assert_eq!(["weights", "cache"].map(|k| sum(&two, k)), ["weights", "cache"].map(|k| sum(&one, k)));
    let said = generate(&["--split", "cpu,cpu", "-v"]);
    for part in ["placement: --split, by free memory", "embedding; layer 0", "layer 1; head"] {
        assert!(said.err.contains(part), "{part}: {}", said.err);
    }
    assert!(!said.out.contains("placement"), "{}", said.out);
    // Prompts together, a perplexity, and the memory.
    run(dir.path(), &["generate", "tiny.gguf", "--prompts", "prompts.txt", "-n", "4", "--split", "cpu,cpu"])
        .ok();
    let perplexity = |more: &[&str]| {
        let args = ["perplexity", "tiny.gguf", "-f", "text.txt", "-c", "64", "--json"];
        run(dir.path(), &[&args, more].concat()).ok().json()["perplexity"].clone()
    };
    assert_eq!(perplexity(&["--split", "cpu=2,cpu=1"]), perplexity(&["--backend", "cpu"]));
    let fit =
        |more: &[&str]| run(dir.path(), &[&["fit", "tiny.gguf", "--context", "64"], more].concat()).ok();
    let (one, two) =
        (fit(&["--backend", "cpu", "--json"]).json(), fit(&["--split", "cpu,cpu", "--json"]).json());
    assert_eq!((&two["cache"]["bytes"], &two["fits"]), (&one["cache"]["bytes"], &json!(true)));
    let devices = two["devices"].as_array().expect("devices");
    assert!(devices.len() == 2 && devices.iter().all(|d| d["peak"].as_u64() > Some(0)), "{devices:?}");
    assert_eq!(places(&two)[1][1], json!([1]));
    let said = fit(&["--split", "cpu,cpu"]).out;
    assert!(said.contains("layer 1; head") && said.matches("on cpu:0").count() > 4, "{said}");
}

#[test]
fn the_last_layers_go_to_the_device() {
    if halcyon_test::left_out("the_last_layers_go_to_the_device") {
        return;
    }
    let dir = folder();
    if !there("the_last_layers_go_to_the_device", "opencl") {
        return;
    }
    let close = |a: &[f32], b: &[f32]| {
        assert_eq!(a.len(), b.len());
        let largest = b.iter().fold(0f32, |m, v| m.max(v.abs()));
        let far = a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(far < 1e-4 * largest, "off by {far} of {largest}");
    };
    let cpu = logits(dir.path(), &["--backend", "cpu"]);
    close(&logits(dir.path(), &["--split", "opencl=2,cpu=1"]), &cpu);
    close(&logits(dir.path(), &["-ngl", "1", "--backend", "opencl"]), &cpu);
    let args =
        ["generate", "tiny.gguf", "-p", "the", "-n", "2", "-ngl", "1", "--backend", "opencl", "--json"];
    let v = run(dir.path(), &args).ok().json();
    assert_eq!(places(&v), json!([["cpu:0", [0], [0]], ["opencl:0", [1], [1]]]));
    let on = |d: usize| &v["placement"]["devices"][d];
    assert!(on(0)["embedding"] == true && on(0)["head"] == true && on(1)["head"] == false, "{v}");
    assert_eq!(v["backend"], "cpu:0 and opencl:0");
}

#[test]
fn experts_stay_on_the_cpu() {
    if halcyon_test::left_out("experts_stay_on_the_cpu") {
        return;
    }
    let dir = folder();
    let ids = ConstData::from_slice(&[4], &[1i64, 7, 9, 3]).expect("fits");
    npy::write(&dir.path().join("few.npy"), &ids).expect("written");
    if !there("experts_stay_on_the_cpu", "opencl") {
        return;
    }
    let model = mixture();
    let with = |how: &[&str], more: &[&str]| {
        let args = [how, &[text(&model), "--backend", "opencl", "-c", "32"], more].concat();
        run(dir.path(), &args)
    };
    let generate =
        ["generate", "--prompt-tokens", "few.npy", "-n", "5", "--temp", "0", "--ignore-eos", "--json"];
    let want = with(&generate, &[]).ok().json();
    let all = with(&generate, &["--cpu-moe"]).ok().json();
    let first = with(&generate, &["--n-cpu-moe", "1"]).ok().json();
    assert_eq!((&all["tokens"], &first["tokens"]), (&want["tokens"], &want["tokens"]));
    assert_eq!(places(&all), json!([["opencl:0", [0, 1], []], ["cpu:0", [], [0, 1]]]));
    assert_eq!(places(&first), json!([["opencl:0", [0, 1], [1]], ["cpu:0", [], [0]]]));
    // A device without room for all experts.
    let peak = |more: &[&str]| {
        let v = with(&["fit", "--json"], more).ok().json();
        v["devices"][0]["peak"].as_u64().expect("bytes")
    };
    let (most, least) = (peak(&[]), peak(&["--cpu-moe"]));
    assert!(least < most, "{least} {most}");
    let limit = ((least + most) / 2).to_string();
    let limit = ["--memory-limit", limit.as_str()];
    with(&generate[..generate.len() - 1], &limit).fails(5, &["opencl:0", "Give --n-cpu-moe 2"]);
    let v: Value = with(&["fit", "--json"], &limit).json();
    assert_eq!(v["fits"], false, "{v}");
    assert!(v["error"].to_string().contains("--n-cpu-moe"), "{v}");
    // The device was chosen by the program, so it may use another one too, and says so.
    let d = run(
        dir.path(),
        &[&generate[..], &[text(&model), "--backends", "opencl", "-c", "32"], &limit[..]].concat(),
    );
    let said = d.err.clone();
    let v = d.ok().json();
    assert_eq!((&v["tokens"], &places(&v)[1][0]), (&want["tokens"], &json!("cpu:0")));
    assert!(said.contains("--n-cpu-moe 2") && said.contains("cpu:0"), "{said}");
}

#[test]
fn wrong_placements_are_said() {
    let dir = folder();
    let fails = |more: &[&str], code: i32, parts: &[&str]| {
        run(dir.path(), &[&["generate", "tiny.gguf", "-p", "the"], more].concat()).fails(code, parts);
    };
    fails(&["--split", "cpu"], 2, &["--split", "two devices"]);
    fails(&["--split", "cpu,nosuch"], 2, &["nosuch"]);
    fails(&["--split", "cpu:77,cpu"], 4, &["77"]);
    fails(&["--split", "cpu=0.5,cpu"], 2, &["--split", "some have none"]);
    fails(&["--split", "cpu=0,cpu=1"], 2, &["not above 0"]);
    fails(&["--split", "cpu=x,cpu=1"], 2, &["no number as its share"]);
    fails(&["--split", "cpu,cpu,cpu"], 2, &["3 devices", "2 groups"]);
    fails(&["--split", "cpu,cpu", "--backend", "cpu"], 2, &["--split", "--backend"]);
    fails(&["--split", "cpu,cpu", "-ngl", "1"], 2, &["--split", "--gpu-layers"]);
    fails(&["--cpu-moe", "--n-cpu-moe", "1"], 2, &["--cpu-moe"]);
    fails(&["--cpu-moe", "--backend", "cpu"], 2, &["--cpu-moe", "no experts"]);
    fails(&["--n-cpu-moe", "3", "--backend", "cpu"], 2, &["--n-cpu-moe", "3 layers", "has 2"]);
    let onnx = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/digits.onnx");
    for options in [&["--cpu-moe"][..], &["--split", "cpu,cpu"], &["-ngl", "1"]] {
        run(dir.path(), &[&["fit", text(&onnx)], options].concat()).fails(2, &["only language models"]);
    }
}
