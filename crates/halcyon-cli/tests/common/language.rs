//! A small language model with random weights, and files for it.

use super::{Done, command, finish};
use halcyon_formats::gguf::{self, GgmlType, TensorInfo, Value};
use halcyon_formats::npy;
use halcyon_ir::{ConstData, DType};
use std::fs;
use std::path::Path;
use tempfile::TempDir;

/// Sizes of the model.
const HIDDEN: usize = 32;
const HEADS: usize = 4;
const SHARED: usize = 2;
const INNER: usize = 64;
const LAYERS: usize = 2;
pub const CONTEXT: usize = 512;

/// ChatML.
const TEMPLATE: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n\
    {% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

/// What [`tiny`] leaves out or changes.
#[derive(Clone, Copy, Debug)]
pub struct Tiny {
    pub architecture: &'static str,
    pub tokenizer: bool,
    pub template: bool,
}

impl Default for Tiny {
    fn default() -> Tiny {
        Tiny { architecture: "llama", tokenizer: true, template: true }
    }
}

/// The texts and kinds of all tokens: special ones, bytes, letters with and without a space, some words.
pub fn vocabulary() -> Vec<(String, i32)> {
    let mut all = vec![("<unk>".into(), 2), ("<s>".into(), 3), ("</s>".into(), 3)];
    all.extend((0..256).map(|b| (format!("<0x{b:02X}>"), 6)));
    all.extend(["<|im_start|>", "<|im_end|>"].map(|t| (t.into(), 3)));
    all.push(("▁".into(), 1));
    all.extend(('a'..='z').flat_map(|c| [(c.to_string(), 1), (format!("▁{c}"), 1)]));
    all.extend(["th", "the", "▁the", "in", "on", "ti", "me", "time"].map(|t| (t.into(), 1)));
    all
}

/// Random numbers from -1 to 1, the same on every machine.
fn noise(n: usize, seed: &mut u64) -> impl Iterator<Item = f32> {
    (0..n).map(move |_| {
        *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (*seed >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    })
}

/// The file of a Llama model with these changes. Its logits are small, so that all tokens are about equally
/// probable.
pub fn tiny(how: Tiny) -> Vec<u8> {
    let tokens = vocabulary();
    let entry = |key: &str, v: Value| (key.to_string(), v);
    let own = |key: &str, v: Value| (format!("{}.{key}", how.architecture), v);
    let n = |v: usize| Value::from(v as u32);
    let mut metadata = vec![
        entry("general.architecture", how.architecture.into()),
        entry("general.name", "tiny".into()),
        own("context_length", n(CONTEXT)),
        own("embedding_length", n(HIDDEN)),
        own("block_count", n(LAYERS)),
        own("feed_forward_length", n(INNER)),
        own("attention.head_count", n(HEADS)),
        own("attention.head_count_kv", n(SHARED)),
        own("attention.layer_norm_rms_epsilon", 1e-5f32.into()),
        own("rope.dimension_count", n(HIDDEN / HEADS)),
    ];
    if how.tokenizer {
        let texts: Vec<String> = tokens.iter().map(|t| t.0.clone()).collect();
        // Longer tokens are merged first, but letters with a space last, because no longer token begins so.
        let score = |t: &String| match t.chars().count() {
            2 if t.starts_with('▁') => -40.0,
            n => n as f32 - 20.0,
        };
        let scores: Vec<f32> = texts.iter().map(score).collect();
        let kinds: Vec<i32> = tokens.iter().map(|t| t.1).collect();
        metadata.extend([
            entry("tokenizer.ggml.model", "llama".into()),
            entry("tokenizer.ggml.tokens", texts.into()),
            entry("tokenizer.ggml.scores", scores.into()),
            entry("tokenizer.ggml.token_type", kinds.into()),
            entry("tokenizer.ggml.unknown_token_id", n(0)),
            entry("tokenizer.ggml.bos_token_id", n(1)),
            entry("tokenizer.ggml.eos_token_id", n(2)),
        ]);
        if how.template {
            metadata.push(entry("tokenizer.chat_template", TEMPLATE.into()));
        }
    }
    let (head, v) = (HIDDEN / HEADS, tokens.len());
    let mut shapes = vec![
        ("token_embd".to_string(), vec![v, HIDDEN]),
        ("output_norm".into(), vec![HIDDEN]),
        ("output".into(), vec![v, HIDDEN]),
    ];
    for i in 0..LAYERS {
        let layer: [(&str, &[usize]); 9] = [
            ("attn_norm", &[HIDDEN]),
            ("attn_q", &[HIDDEN, HIDDEN]),
            ("attn_k", &[SHARED * head, HIDDEN]),
            ("attn_v", &[SHARED * head, HIDDEN]),
            ("attn_output", &[HIDDEN, HIDDEN]),
            ("ffn_norm", &[HIDDEN]),
            ("ffn_gate", &[INNER, HIDDEN]),
            ("ffn_up", &[INNER, HIDDEN]),
            ("ffn_down", &[HIDDEN, INNER]),
        ];
        shapes.extend(layer.map(|(name, shape)| (format!("blk.{i}.{name}"), shape.to_vec())));
    }
    let mut seed = 1;
    let make = |(name, shape): &(String, Vec<usize>)| {
        let size: usize = shape.iter().product();
        let scale = if name == "output" { 0.1 } else { 0.3 };
        let values = noise(size, &mut seed).map(|x| if shape.len() == 1 { 1.0 } else { x * scale });
        let bytes: Vec<u8> = values.flat_map(f32::to_le_bytes).collect();
        (TensorInfo::new(format!("{name}.weight"), shape, GgmlType::Plain(DType::F32)), bytes)
    };
    let all: Vec<(TensorInfo, Vec<u8>)> = shapes.iter().map(make).collect();
    let tensors: Vec<(TensorInfo, &[u8])> = all.iter().map(|(t, b)| (t.clone(), &b[..])).collect();
    gguf::encode(&metadata, &tensors).expect("a file")
}

/// A folder with [`files`].
pub fn folder() -> TempDir {
    let dir = tempfile::tempdir().expect("a folder");
    files(dir.path());
    dir
}

/// Runs a command in this folder.
pub fn at(dir: &TempDir, args: &[&str]) -> Done {
    finish(command(args).current_dir(dir.path()).env("HALCYON_CONFIG", "off"))
}

/// Writes what the examples of the language commands read: `tiny.gguf`, `ids.npy` and `text.txt`.
pub fn files(dir: &Path) {
    fs::write(dir.join("tiny.gguf"), tiny(Tiny::default())).expect("written");
    let ids = ConstData::from_slice(&[5], &[1i64, 270, 280, 290, 300]).expect("fits");
    npy::write(&dir.join("ids.npy"), &ids).expect("written");
    fs::write(dir.join("prompts.txt"), "once\n{\"prompt\": \"upon a time\", \"seed\": 3}\n")
        .expect("written");
    let words = ["once", "upon", "a", "time", "there", "was", "the", "little", "fox", "who", "sang"];
    let text: Vec<&str> = (0..400).map(|i| words[i * i % 97 % words.len()]).collect();
    fs::write(dir.join("text.txt"), text.join(" ")).expect("written");
}
