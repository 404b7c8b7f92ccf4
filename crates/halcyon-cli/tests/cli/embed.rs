//! Tests of `halcyon embed`.

use crate::common::language::*;
use crate::common::*;
use halcyon::{Backend, Tensor};
use halcyon_formats::{npy, npz::Npz};
use halcyon_ir::ConstData;
use halcyon_models::{Lora, LoraOptions, ModelFile};
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// A small encoder without a tokenizer, with the vectors that transformers computes.
fn encoder(name: &str) -> PathBuf {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../halcyon-models/tests/embed/data");
    data.join(name).canonicalize().expect("the stored models are in the repository")
}

fn embed(dir: &TempDir, args: &[&str]) -> Done {
    let args = [&["embed"], args, &["--backend", "cpu"]].concat();
    finish(command(&args).current_dir(dir.path()).env("HALCYON_CONFIG", "off"))
}

/// The vectors of a JSON answer.
fn vectors(d: Done) -> Vec<Vec<f64>> {
    let number = |v: &serde_json::Value| v.as_f64().expect("a number");
    let d = d.ok();
    let all = d.json()["embeddings"].as_array().expect("embeddings").clone();
    all.iter().map(|v| v.as_array().expect("a vector").iter().map(number).collect()).collect()
}

fn close(got: &[f64], want: &[f64], what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    let far = got.iter().zip(want).any(|(g, w)| (g - w).abs() > 1e-4);
    assert!(!far, "{what}: {got:?}, expected {want:?}");
}

#[test]
fn tokens_are_pooled_as_asked() {
    let dir = tempfile::tempdir().expect("a folder");
    for name in ["bert", "modernbert"] {
        let model = encoder(name);
        let stored = Npz::open(&model.join("expected.npz")).expect("the expected values");
        let ids = stored.get("ids").expect("ids").to_vec::<i64>();
        let hidden = stored.get("hidden").expect("hidden").to_vec::<f64>();
        let size = hidden.len() / ids.len();
        let rows: Vec<&[f64]> = hidden.chunks_exact(size).collect();
        let by_column = |f: &dyn Fn(&mut dyn Iterator<Item = f64>) -> f64| -> Vec<f64> {
            (0..size).map(|j| f(&mut rows.iter().map(|r| r[j]))).collect()
        };
        let mean = by_column(&|v| v.sum::<f64>() / ids.len() as f64);
        let file = dir.path().join("ids.npy");
        npy::write(&file, &ConstData::from_slice(&[ids.len()], &ids).unwrap()).expect("written");
        let model = model.to_str().expect("UTF-8");
        let run = |more: &[&str]| {
            let args = [&[model, "--tokens", "ids.npy", "--json"], more].concat();
            vectors(embed(&dir, &args)).remove(0)
        };
        close(&run(&[]), &mean, name);
        close(&run(&["--pooling", "mean"]), &mean, name);
        close(&run(&["--pooling", "cls"]), rows[0], name);
        close(&run(&["--pooling", "last"]), rows[ids.len() - 1], name);
        close(&run(&["--pooling", "max"]), &by_column(&|v| v.fold(f64::MIN, f64::max)), name);
        let length = mean.iter().map(|v| v * v).sum::<f64>().sqrt();
        let unit: Vec<f64> = mean.iter().map(|v| v / length).collect();
        close(&run(&["--normalize"]), &unit, name);
        embed(&dir, &[model, "--tokens", "ids.npy", "--output", "out.npy"]).ok();
        let out = npy::read(&dir.path().join("out.npy")).expect("the file of vectors");
        assert_eq!(&out.dims[..], [1, size]);
        close(&out.to_vec::<f64>(), &mean, name);
    }
}

#[test]
fn texts_of_a_decoder() {
    let dir = tempfile::tempdir().expect("a folder");
    files(dir.path());
    let both = vectors(embed(&dir, &["tiny.gguf", "hello", "a b", "--json"]));
    assert_eq!(both.len(), 2);
    fs::write(dir.path().join("texts.txt"), "hello\na b\n").expect("written");
    assert_eq!(vectors(embed(&dir, &["tiny.gguf", "--file", "texts.txt", "--json"])), both);
    // Lines without text are no texts.
    fs::write(dir.path().join("texts.txt"), "\nhello\n  \na b\n\n").expect("written");
    assert_eq!(vectors(embed(&dir, &["tiny.gguf", "--file", "texts.txt", "--json"])), both);
    fs::write(dir.path().join("texts.txt"), "\n\n").expect("written");
    embed(&dir, &["tiny.gguf", "--file", "texts.txt"]).fails(2, &["no texts"]);
    assert_eq!(vectors(embed(&dir, &["tiny.gguf", "a b", "--json"])), both[1..]);
    // The last token alone differs from the mean of all.
    let last = vectors(embed(&dir, &["tiny.gguf", "hello", "--pooling", "last", "--json"]));
    assert_ne!(last[0], both[0]);
    let cut = embed(&dir, &["tiny.gguf", "a b a b", "--max-tokens", "2", "--json"]);
    assert!(cut.err.contains("too long"), "{cut:?}");
    assert_eq!(vectors(cut).len(), 1);
}

#[test]
fn wrong_input_is_named() {
    let dir = tempfile::tempdir().expect("a folder");
    files(dir.path());
    let model = encoder("bert");
    let model = model.to_str().expect("UTF-8");
    embed(&dir, &[model, "hello"]).fails(3, &["tokenizer"]);
    embed(&dir, &[model]).fails(2, &["no texts"]);
    embed(&dir, &["tiny.gguf", "hello", "--pooling", "cls"])
        .fails(2, &["first token of a decoder", "lasttoken"]);
    embed(&dir, &["tiny.gguf", "hello", "--pooling", "median"]).fails(2, &["median", "mean"]);
    embed(&dir, &["none.gguf", "hello"]).fails(1, &["none.gguf"]);
    fs::write(dir.path().join("ids.npy"), "no array").expect("written");
    let bad = embed(&dir, &[model, "--tokens", "ids.npy"]);
    assert_ne!(bad.code, 0, "{bad:?}");
}

/// The rows of a file of tokens are texts; a file of one dimension is one text.
#[test]
fn tokens_have_one_or_two_dimensions() {
    let dir = tempfile::tempdir().expect("a folder");
    files(dir.path());
    let with = |dims: &[usize], more: &[&str]| {
        let ids: Vec<i64> = (0..dims.iter().product::<usize>() as i64).map(|i| 261 + i).collect();
        let data = ConstData::from_slice(dims, &ids).expect("it fits");
        npy::write(&dir.path().join("ids.npy"), &data).expect("written");
        embed(&dir, &[&["tiny.gguf", "--tokens", "ids.npy"], more].concat())
    };
    let read = |dims: &[usize]| vectors(with(dims, &["--json"]));
    let both = read(&[2, 3]);
    assert_eq!(both.len(), 2);
    assert_eq!(read(&[3]), both[..1]);
    assert_eq!(read(&[1, 3]), both[..1]);
    with(&[1, 1, 3], &[]).fails(1, &["ids.npy", "[1, 1, 3]"]);
    with(&[2, 0], &[]).fails(1, &["ids.npy", "no tokens"]);
}

/// Encoders and decoders that do not fit are refused before anything is computed.
#[test]
fn embeddings_that_do_not_fit_are_refused() {
    let dir = tempfile::tempdir().expect("a folder");
    files(dir.path());
    let ids: Vec<i64> = vec![5; 20];
    npy::write(&dir.path().join("ids.npy"), &ConstData::from_slice(&[20], &ids).expect("fits"))
        .expect("written");
    let bert = encoder("bert");
    for model in ["tiny.gguf", bert.to_str().expect("UTF-8")] {
        let with = |limit: &str| embed(&dir, &[model, "--tokens", "ids.npy", "--memory-limit", limit]);
        let d = with("20K");
        d.fails(5, &["out of memory", "weights", "buffers for texts of up to 20 tokens", "smaller"]);
        with("64M").ok();
    }
}

/// Adapters of an encoder are added by `embed`, and merged by `convert` into a folder and a file.
#[test]
fn adapters_of_an_encoder_are_merged() {
    let dir = tempfile::tempdir().expect("a folder");
    files(dir.path());
    let bert = encoder("bert");
    let (file, cpu) = (ModelFile::open_any(&bert).expect("a model"), Backend::cpu().expect("the CPU"));
    let options = LoraOptions { targets: vec!["query".into(), "value".into()], ..LoraOptions::default() };
    let lora = Lora::new(&file, &cpu, &options).expect("adapters");
    for stem in lora.matrices() {
        let slot = &lora.adapter(stem).expect("an adapter").b;
        let dims = slot.value().dims().expect("dims");
        let v: Vec<f32> =
            (0..dims.iter().product()).map(|i: usize| (i * 7 % 11) as f32 * 0.05 - 0.2).collect();
        slot.set(Tensor::from_slice(&cpu, &dims, &v).expect("values")).expect("set");
    }
    lora.save(&dir.path().join("adapter"), "bert").expect("written");
    npy::write(&dir.path().join("ids.npy"), &ConstData::from_slice(&[4], &[3i64, 4, 5, 6]).expect("fits"))
        .expect("written");
    let bert = bert.to_str().expect("UTF-8");
    let run =
        |args: &[&str]| vectors(embed(&dir, &[args, &["--tokens", "ids.npy", "--json"]].concat())).remove(0);
    let (plain, want) = (run(&[bert]), run(&[bert, "--lora", "adapter"]));
    let far = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    let moved = far(&plain, &want);
    assert!(moved > 0.01, "{moved}");
    for (to, more) in [("new", &[][..]), ("new.gguf", &[]), ("f16.gguf", &["--dtype", "f16"])] {
        at(&dir, &[&["convert", bert, to, "--lora", "adapter"], more].concat()).ok();
        let d = far(&run(&[to]), &want);
        assert!(d < 0.02 * moved, "{to}: {d} of {moved}");
    }
    at(&dir, &["convert", "new.gguf", "again", "--lora", "adapter"]).fails(3, &["GGUF"]);
    at(&dir, &["convert", bert, "no.gguf", "--lora", "tiny.gguf"]).fails(1, &["no adapter"]);
}
