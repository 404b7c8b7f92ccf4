//! Folders as GGUF files, GGUF files as folders: the logits stay the same.

use crate::common::*;
use halcyon::Error;
use halcyon::prelude::*;
use halcyon_formats::gguf::{GgmlType, Gguf};
use halcyon_formats::safetensors::SafeTensors;
use halcyon_models::export::{Content, WriteOptions, write, write_folder};
use halcyon_models::{ModelFile, Source};
use serde_json::{Value, json};
use std::collections::BTreeMap;
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

/// Folders with the changes that make them describable.
fn cases() -> Vec<(&'static str, Value)> {
    let none = || json!({});
    let list = vec![
        ("llama", none()),
        ("llama-yarn", none()),
        ("mistral", none()),
        ("qwen2", json!({ "use_sliding_window": false })),
        ("qwen3", none()),
        ("qwen3_moe", json!({ "norm_topk_prob": true })),
        ("qwen3_next", none()),
        ("qwen3_5", none()),
        ("qwen3_5_moe", none()),
        ("mixtral", none()),
        ("gemma2", none()),
        ("gemma3", none()),
        ("gemma4", none()),
        ("gemma4-moe", none()),
        ("gemma4-shared", none()),
        ("gpt_oss", json!({ "swiglu_limit": 7.0 })),
        ("phi3", none()),
        ("phi4", none()),
        ("glm4_moe", none()),
        ("deepseek_v2", none()),
        ("deepseek_v3", none()),
        ("olmo2", none()),
        ("granite", none()),
        ("granitemoehybrid", none()),
        ("lfm2", none()),
        ("smollm3", json!({ "no_rope_layers": [1, 1, 1, 0] })),
        ("cohere2", none()),
        ("starcoder2", none()),
        ("gpt2", none()),
        // Files have no norm between the parts of a layer.
        ("falcon", json!({ "parallel_attn": true })),
    ];
    let families: Vec<&str> = halcyon_models::family::FAMILIES.iter().map(|f| f.name).collect();
    assert_eq!(families.len(), 24, "{families:?}: a new family needs a case here");
    list
}

/// Names, sizes and values of the tensors of a folder.
fn stored(folder: &Path) -> BTreeMap<String, (Vec<usize>, Vec<f32>)> {
    let file = SafeTensors::open(&folder.join("model.safetensors")).expect("a file");
    let names: Vec<String> = file.names().map(String::from).collect();
    let read = |n: String| {
        let t = halcyon_formats::data::cast(&file.get(&n).expect("a tensor"), DType::F32).expect("f32");
        (n, (t.dims.to_vec(), t.to_vec::<f32>()))
    };
    names.into_iter().map(read).collect()
}

#[test]
fn logits_stay_the_same_from_a_folder_to_a_file_and_back() {
    let b = Backend::cpu().expect("the CPU");
    let dir = tempfile::tempdir().expect("a folder");
    for (name, changes) in cases() {
        let from = folder(dir.path(), name, changes);
        let file = dir.path().join(format!("{name}.gguf"));
        gguf(&Source::open(&from).expect("a folder"), &file).unwrap_or_else(|e| panic!("{name}: {e}"));
        let want = logits(&b, &from);
        let d = differ(&want, &logits(&b, &file));
        assert!(d < 1e-4, "{name}: the file's logits differ by {d:e} standard deviations");
        // The folder has no tokenizer, and the file says so.
        assert!(ModelFile::open(&file).expect("a model").tokenizer().expect("none").is_none());
        let back = dir.path().join(format!("{name}-back"));
        let source = Source::open(&file).expect("a file");
        let none = &|| false;
        write_folder(&source, &back, DType::F32, none, &mut |_| {}).unwrap_or_else(|e| panic!("{name}: {e}"));
        let (was, now) = (stored(&from), stored(&back));
        // The stored folder of Falcon has norms that its changed configuration does not use.
        let unused = |n: &&String| name == "falcon" && n.contains("post_attention_layernorm");
        let names = was.keys().filter(|n| !unused(n));
        assert!(names.eq(now.keys()), "{name}: the names of the new folder's tensors are others");
        for (tensor, (dims, values)) in was.iter().filter(|(n, _)| !unused(n)) {
            assert_eq!(dims, &now[tensor].0, "{name}: {tensor}");
            // Factors of the scores' scale, and another order of what is rotated, are in these.
            if !["q_proj", "q_norm", "q_b_proj", "kv_a_proj", "A_log", "c_attn"]
                .iter()
                .any(|n| tensor.contains(n))
            {
                let far = values.iter().zip(&now[tensor].1).filter(|(a, b)| (*a - *b).abs() > 1e-6).count();
                assert_eq!(far, 0, "{name}: {tensor}");
            }
        }
        // These have all values, so the logits need not be computed.
        if !["llama", "gemma2", "gemma3", "deepseek_v2", "deepseek_v3", "qwen3_next", "gpt2"].contains(&name)
        {
            continue;
        }
        let d = differ(&want, &logits(&b, &back));
        assert!(d < 1e-4, "{name}: the new folder's logits differ by {d:e} standard deviations");
    }
}

#[test]
fn names_of_a_file_are_those_of_the_converter_of_llama_cpp() {
    let dir = tempfile::tempdir().expect("a folder");
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data");
    // Files that its converter made of stored folders.
    for name in ["gemma4-moe", "gemma4-shared", "phi3", "glm4_moe"] {
        let theirs = Gguf::open(&data.join(format!("gguf/{name}.gguf"))).expect("a file");
        let file = dir.path().join("m.gguf");
        gguf(&Source::open(&data.join(name)).expect("a folder"), &file).expect("written");
        let ours = Gguf::open(&file).expect("a file");
        let shapes = |g: &Gguf| -> BTreeMap<String, Vec<usize>> {
            g.tensors().iter().map(|t| (t.name().to_string(), t.shape().to_vec())).collect()
        };
        assert_eq!(shapes(&ours), shapes(&theirs), "{name}");
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
