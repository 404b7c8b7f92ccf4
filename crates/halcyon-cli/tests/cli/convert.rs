//! Tests of `halcyon convert`.

use crate::common::language::*;
use halcyon::prelude::*;
use halcyon_formats::gguf::{GgmlType, Gguf};
use halcyon_formats::npy;
use halcyon_models::{Lora, LoraOptions, ModelFile};
use std::fs;
use tempfile::TempDir;

fn logits(dir: &TempDir, model: &str) -> Vec<f32> {
    at(dir, &["logits", model, "--tokens", "ids.npy", "-o", "z.npy", "--backend", "cpu"]).ok();
    npy::read(&dir.path().join("z.npy")).expect("logits").to_vec::<f32>()
}

#[test]
fn a_file_becomes_a_folder_and_a_file_again() {
    let dir = folder();
    let v = at(&dir, &["convert", "tiny.gguf", "made", "--json"]).ok().json();
    assert_eq!(v["tensors"].as_u64(), Some(21));
    assert!(v["warnings"].as_array().expect("warnings").is_empty(), "{v}");
    let tokens = |model: &str| at(&dir, &["tokenize", model, "Once upon a time", "--json"]).ok().json();
    assert_eq!(tokens("made")["tokens"], tokens("tiny.gguf")["tokens"]);
    let made = dir.path().join("made");
    let template = fs::read_to_string(made.join("chat_template.jinja")).expect("the template");
    assert!(template.contains("im_start"));
    at(&dir, &["convert", "made", "again.gguf"]).ok();
    let want = logits(&dir, "tiny.gguf");
    let largest = want.iter().fold(0f32, |m, v| m.max(v.abs()));
    for model in ["made", "again.gguf"] {
        let got = logits(&dir, model);
        let d = want.iter().zip(&got).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
        assert!(d < 1e-4 * largest, "{model}: {d}");
    }
    // The same weights, and f32 stays f32.
    let (a, b) = (dir.path().join("tiny.gguf"), dir.path().join("again.gguf"));
    let (a, b) = (Gguf::open(&a).expect("a file"), Gguf::open(&b).expect("a file"));
    for t in a.tensors() {
        assert_eq!(b.tensor(t.name()).expect("the same tensors").data, t.data, "{}", t.name());
    }
}

#[test]
fn blocks_are_expanded_exactly() {
    let dir = folder();
    at(&dir, &["quantize", "tiny.gguf", "q.gguf", "--type", "q8_0"]).ok();
    at(&dir, &["convert", "q.gguf", "f.gguf", "--dtype", "f32"]).ok();
    let open = |name: &str| Gguf::open(&dir.path().join(name)).expect("a file");
    let (q, f) = (open("q.gguf"), open("f.gguf"));
    assert_eq!(f.metadata().u64("general.file_type").expect("a number"), 0);
    for t in q.tensors() {
        let n = f.tensor(t.name()).expect("the same tensors");
        assert_eq!(n.ty(), GgmlType::F32);
        if let GgmlType::Block(b) = t.ty() {
            let mut want = vec![0f32; t.shape().iter().product()];
            b.decode(&t.data, &mut want);
            let want: Vec<u8> = want.iter().flat_map(|v| v.to_le_bytes()).collect();
            assert_eq!(n.data[..], want[..], "{}", t.name());
        }
    }
}

#[test]
fn a_folder_can_be_quantised() {
    let dir = folder();
    at(&dir, &["convert", "tiny.gguf", "made", "--dtype", "bf16"]).ok();
    at(&dir, &["quantize", "made", "q.gguf", "--type", "q8_0"]).ok();
    let q = Gguf::open(&dir.path().join("q.gguf")).expect("a file");
    assert_eq!(q.tensor("blk.0.ffn_up.weight").expect("a tensor").ty().name(), "q8_0");
    assert_eq!(q.tensor("blk.0.ffn_norm.weight").expect("a tensor").ty(), GgmlType::F32);
}

#[test]
fn wrong_input_is_refused() {
    let dir = folder();
    let c = |args: &[&str]| at(&dir, &[&["convert"], args].concat());
    c(&["tiny.gguf", "o.gguf"]).fails(2, &["--dtype", "f32, f16 or bf16"]);
    c(&["tiny.gguf", "o.gguf", "--dtype", "q8_0"]).fails(2, &["--dtype", "'q8_0'"]);
    c(&["tiny.gguf", "tiny.gguf", "--dtype", "f16"]).fails(2, &["the model itself"]);
    c(&["none", "o.gguf"]).fails(1, &["none"]);
    fs::create_dir(dir.path().join("full")).expect("a folder");
    fs::write(dir.path().join("full/x"), "x").expect("written");
    c(&["tiny.gguf", "full"]).fails(2, &["has content"]);
    c(&["full", "o.gguf"]).fails(1, &["config.json"]);
    c(&["tiny.gguf", "none/made"]).fails(1, &["none/made"]);
    at(&dir, &["convert", "tiny.gguf", "made"]).ok();
    c(&["made", "other"]).fails(2, &[".gguf"]);
    let path = dir.path().join("made/config.json");
    let config = fs::read_to_string(&path).expect("a configuration");
    fs::write(&path, config.replace("\"llama\"", "\"mamba9\"")).expect("written");
    c(&["made", "o.gguf"]).fails(3, &["mamba9"]);
    assert!(!dir.path().join("o.gguf").exists());
}

#[test]
fn adapters_are_merged_or_added_by_their_scale() {
    let dir = folder();
    let model = ModelFile::open(&dir.path().join("tiny.gguf")).expect("a model");
    let cpu = Backend::cpu().expect("the CPU");
    let lora = Lora::new(&model, &cpu, &LoraOptions::default()).expect("adapters");
    // B begins with zeros.
    for stem in lora.matrices() {
        let slot = &lora.adapter(stem).expect("an adapter").b;
        let dims = slot.value().dims().expect("dims");
        let v: Vec<f32> =
            (0..dims.iter().product()).map(|i: usize| (i * 7 % 11) as f32 * 0.02 - 0.1).collect();
        slot.set(Tensor::from_slice(&cpu, &dims, &v).expect("values")).expect("set");
    }
    lora.save(&dir.path().join("adapter"), "tiny").expect("written");
    let with = |options: &[&str]| {
        let args = ["logits", "tiny.gguf", "--tokens", "ids.npy", "-o", "z.npy", "--backend", "cpu"];
        at(&dir, &[&args, options].concat()).ok();
        npy::read(&dir.path().join("z.npy")).expect("logits").to_vec::<f32>()
    };
    let far = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
    let (plain, want) = (logits(&dir, "tiny.gguf"), with(&["--lora", "adapter"]));
    let moved = far(&plain, &want);
    assert!(moved > 0.01, "{moved}");
    let twice = with(&["--lora-scaled", "adapter:0.25", "--lora-scaled", "adapter:0.75"]);
    assert!(far(&twice, &want) < 1e-3 * moved);
    assert!(far(&with(&["--lora-scaled", "adapter:0"]), &plain) < 1e-3 * moved);
    at(&dir, &["convert", "tiny.gguf", "merged.gguf", "--lora", "adapter"]).ok();
    assert!(far(&logits(&dir, "merged.gguf"), &want) < 1e-3 * moved);
    at(&dir, &["convert", "tiny.gguf", "base"]).ok();
    at(&dir, &["convert", "base", "new", "--lora", "adapter", "--json"]).ok();
    assert!(far(&logits(&dir, "new"), &want) < 1e-3 * moved);
    at(&dir, &["quantize", "tiny.gguf", "q.gguf", "--type", "f16", "--lora", "adapter"]).ok();
    assert!(far(&logits(&dir, "q.gguf"), &want) < 0.1 * moved);
    for (args, what) in [
        (&["convert", "tiny.gguf", "no", "--lora", "adapter"][..], "GGUF"),
        (&["convert", "tiny.gguf", "no.gguf", "--lora", "nothing"], "adapter_config.json"),
        (&["convert", "tiny.gguf", "no.gguf", "--lora-scaled", "adapter"], "PATH:SCALE"),
        (&["convert", "tiny.gguf", "tiny.gguf", "--lora", "adapter"], "the model itself"),
    ] {
        let d = at(&dir, args);
        assert!(d.code != 0 && d.err.contains(what), "{args:?}: {}", d.err);
    }
}
