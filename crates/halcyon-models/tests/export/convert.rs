//! Folders as GGUF files, GGUF files as folders: the logits stay the same.

use crate::common::*;
use halcyon::Error;
use halcyon::prelude::*;
use halcyon_formats::gguf::{GgmlType, Gguf};
use halcyon_models::export::{Content, WriteOptions, write, write_folder};
use halcyon_models::{ModelFile, Source};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};

/// A copy of a stored folder in which values of the configuration are replaced.
fn folder(dir: &Path, name: &str, changes: Value) -> PathBuf {
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name);
    let to = dir.join(name);
    fs::create_dir(&to).expect("a folder");
    fs::copy(from.join("model.safetensors"), to.join("model.safetensors")).expect("copied");
    let text = fs::read_to_string(from.join("config.json")).expect("a configuration");
    let mut config: Value = serde_json::from_str(&text).expect("JSON");
    for (k, v) in changes.as_object().expect("an object") {
        config[k] = v.clone();
    }
    fs::write(to.join("config.json"), config.to_string()).expect("written");
    to
}

fn gguf(source: &Source, to: &Path) -> Result<()> {
    let content = Content::of(source)?;
    let types: Vec<GgmlType> = content.tensors.iter().map(|t| t.info.ty).collect();
    let mut options =
        WriteOptions { threads: None, requantise: false, interrupted: &|| false, progress: &mut || {} };
    write(&content, &types, to, &mut options).map(drop)
}

/// The logits of 12 tokens.
fn logits(b: &Backend, path: &Path) -> Vec<f32> {
    let source = Source::open(path).expect("a model");
    let mut e = engine(&decoder(b, &source, 32), 1, 8);
    let ids: Vec<u32> = (0..12).map(|i| 3 + i * 7 % 90).collect();
    feed(&mut e, &ids, true)
}

fn differ(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    let n = a.len() as f64;
    let mean = a.iter().map(|v| f64::from(*v)).sum::<f64>() / n;
    let std = (a.iter().map(|v| (f64::from(*v) - mean).powi(2)).sum::<f64>() / n).sqrt();
    a.iter().zip(b).map(|(a, b)| f64::from((a - b).abs())).fold(0.0, f64::max) / std
}

/// Folders with the changes that make them describable, and whether a folder can be made again.
fn cases() -> Vec<(&'static str, Value, bool)> {
    vec![
        ("llama", json!({}), true),
        ("llama-yarn", json!({}), false),
        ("mistral", json!({}), true),
        ("qwen2", json!({ "use_sliding_window": false }), true),
        ("qwen3", json!({}), true),
        ("qwen3_moe", json!({ "norm_topk_prob": true }), true),
        ("mixtral", json!({}), true),
        ("gemma2", json!({}), true),
        ("gemma3", json!({}), true),
        ("gpt_oss", json!({ "swiglu_limit": 7.0 }), false),
        ("olmo2", json!({}), true),
        ("granite", json!({}), true),
    ]
}

#[test]
fn logits_stay_the_same_from_a_folder_to_a_file_and_back() {
    let b = Backend::cpu().expect("the CPU");
    let dir = tempfile::tempdir().expect("a folder");
    for (name, changes, returns) in cases() {
        let from = folder(dir.path(), name, changes);
        let file = dir.path().join(format!("{name}.gguf"));
        gguf(&Source::open(&from).expect("a folder"), &file).unwrap_or_else(|e| panic!("{name}: {e}"));
        let want = logits(&b, &from);
        let d = differ(&want, &logits(&b, &file));
        assert!(d < 1e-4, "{name}: the file's logits differ by {d:e} standard deviations");
        // The folder has no tokenizer, and the file says so.
        assert!(ModelFile::open(&file).expect("a model").tokenizer().expect("none").is_none());
        if !returns {
            continue;
        }
        let back = dir.path().join(format!("{name}-back"));
        let source = Source::open(&file).expect("a file");
        let none = &|| false;
        write_folder(&source, &back, DType::F32, none, &mut |_| {}).unwrap_or_else(|e| panic!("{name}: {e}"));
        let d = differ(&want, &logits(&b, &back));
        assert!(d < 1e-4, "{name}: the new folder's logits differ by {d:e} standard deviations");
    }
}

#[test]
fn vectors_become_f32_and_matrices_keep_their_type() {
    let dir = tempfile::tempdir().expect("a folder");
    let from = folder(dir.path(), "gemma3", json!({}));
    let file = dir.path().join("m.gguf");
    gguf(&Source::open(&from).expect("a folder"), &file).expect("written");
    let g = Gguf::open(&file).expect("a file");
    for t in g.tensors() {
        let want = if t.shape().len() == 1 { GgmlType::F32 } else { GgmlType::BF16 };
        assert_eq!(t.ty(), want, "{}", t.name());
    }
    assert_eq!(g.metadata().u64("general.file_type").expect("a number"), 32);
    assert_eq!(g.metadata().str("tokenizer.ggml.model").expect("a name"), "none");
}

#[test]
fn what_a_file_cannot_say_is_refused() {
    let dir = tempfile::tempdir().expect("a folder");
    for (name, part) in
        [("qwen2", "window"), ("qwen3_moe", "normalise"), ("gpt_oss", "limit"), ("llama-dynamic", "scaling")]
    {
        let source = Source::open(&folder(dir.path(), name, json!({}))).expect("a folder");
        let e = gguf(&source, &dir.path().join("no.gguf")).expect_err("an error");
        assert!(matches!(e, Error::Unsupported { .. }) && e.to_string().contains(part), "{name}: {e}");
    }
    assert!(!dir.path().join("no.gguf").exists());
}

#[test]
fn a_folder_with_content_is_not_replaced_and_nothing_is_left_after_an_interrupt() {
    let dir = tempfile::tempdir().expect("a folder");
    let from = folder(dir.path(), "llama", json!({}));
    let file = dir.path().join("m.gguf");
    gguf(&Source::open(&from).expect("a folder"), &file).expect("written");
    let source = Source::open(&file).expect("a file");
    let e = write_folder(&source, &from, DType::F32, &|| false, &mut |_| {}).expect_err("an error");
    assert!(e.to_string().contains("has content"), "{e}");
    let before = fs::read_dir(dir.path()).expect("a folder").count();
    let to = dir.path().join("new");
    let e = write_folder(&source, &to, DType::F32, &|| true, &mut |_| {}).expect_err("an error");
    assert!(matches!(e, Error::Interrupted { .. }), "{e}");
    assert_eq!(fs::read_dir(dir.path()).expect("a folder").count(), before);
}
