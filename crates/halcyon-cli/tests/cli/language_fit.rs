//! The memory of language models: what `fit` predicts, and what a generation takes.

use crate::common::language::{Tiny, tiny};
use crate::common::{self, Done, finish, skip, text};
use halcyon::{Backend, Tensor};
use halcyon_formats::gguf::{self, GgmlType, TensorInfo, Value as Entry};
use halcyon_formats::npy;
use halcyon_ir::blocks::BlockType;
use halcyon_ir::{ConstData, DType};
use halcyon_models::{Lora, LoraOptions, ModelFile};
use serde_json::Value;
use std::path::{Path, PathBuf};

const MIB: u64 = 1 << 20;
const HIDDEN: usize = 256;
const INNER: usize = 1024;
const LAYERS: usize = 8;
const VOCABULARY: usize = 2000;

/// A Llama model of 11 million weights in one type, in a file of its own. It has no tokenizer.
fn model(dir: &Path, ty: GgmlType) -> PathBuf {
    let n = |v: usize| Entry::from(v as u32);
    let entries: [(&str, Entry); 9] = [
        ("general.architecture", "llama".into()),
        ("llama.context_length", n(8192)),
        ("llama.embedding_length", n(HIDDEN)),
        ("llama.block_count", n(LAYERS)),
        ("llama.feed_forward_length", n(INNER)),
        ("llama.attention.head_count", n(4)),
        ("llama.attention.head_count_kv", n(4)),
        ("llama.attention.layer_norm_rms_epsilon", 1e-5f32.into()),
        ("llama.vocab_size", n(VOCABULARY)),
    ];
    let metadata: Vec<(String, Entry)> = entries.into_iter().map(|(k, v)| (k.to_string(), v)).collect();
    let mut shapes = vec![
        ("token_embd".to_string(), vec![VOCABULARY, HIDDEN]),
        ("output_norm".into(), vec![HIDDEN]),
        ("output".into(), vec![VOCABULARY, HIDDEN]),
    ];
    for i in 0..LAYERS {
        let square = ["attn_q", "attn_k", "attn_v", "attn_output"].map(|n| (n, vec![HIDDEN, HIDDEN]));
        let norms = ["attn_norm", "ffn_norm"].map(|n| (n, vec![HIDDEN]));
        let wide = ["ffn_gate", "ffn_up"].map(|n| (n, vec![INNER, HIDDEN]));
        let down = [("ffn_down", vec![HIDDEN, INNER])];
        let all = square.into_iter().chain(norms).chain(wide).chain(down);
        shapes.extend(all.map(|(name, shape)| (format!("blk.{i}.{name}"), shape)));
    }
    // No two tensors are equal, because equal constants are stored once.
    let mut seed = 7u64;
    let mut noise = || {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 40) as f32 / (1u64 << 26) as f32 - 0.125
    };
    let mut make = |(name, shape): &(String, Vec<usize>)| {
        let ty = if shape.len() == 1 { GgmlType::Plain(DType::F32) } else { ty };
        let values: Vec<f32> = (0..shape.iter().product()).map(|_| noise()).collect();
        let bytes = match ty {
            GgmlType::Block(b) => {
                let mut to = vec![0; ty.row_bytes(values.len()).expect("whole blocks")];
                b.encode(&values, &mut to);
                to
            }
            GgmlType::Plain(DType::F32) => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
            // The upper half of an f32.
            _ => values.iter().flat_map(|v| (v.to_bits() >> 16).to_le_bytes()[..2].to_vec()).collect(),
        };
        (TensorInfo::new(format!("{name}.weight"), shape, ty), bytes)
    };
    let all: Vec<(TensorInfo, Vec<u8>)> = shapes.iter().map(&mut make).collect();
    let tensors: Vec<(TensorInfo, &[u8])> = all.iter().map(|(t, b)| (t.clone(), &b[..])).collect();
    let path = dir.join(format!("{}.gguf", ty.name()));
    std::fs::write(&path, gguf::encode(&metadata, &tensors).expect("a file")).expect("written");
    path
}

fn prompt(dir: &Path, tokens: usize) -> PathBuf {
    let ids: Vec<i64> = (0..tokens as i64).map(|i| i * 37 % 1000 + 3).collect();
    let path = dir.join("prompt.npy");
    npy::write(&path, &ConstData::from_slice(&[tokens], &ids).expect("fits")).expect("written");
    path
}

fn command(args: &[&str]) -> Done {
    let mut c = common::command(&[args, &["--backend", "cpu", "--threads", "2", "--json"]].concat());
    finish(c.env("HALCYON_CACHE", "off").env("HALCYON_CONFIG", "off"))
}

fn figure(v: &Value, path: &str) -> u64 {
    v.pointer(path).and_then(Value::as_u64).unwrap_or_else(|| panic!("no figure {path} in {v}"))
}

#[test]
fn generations_take_what_is_predicted() {
    let dir = tempfile::tempdir().expect("a folder");
    let ids = prompt(dir.path(), 64);
    let block = |b| GgmlType::Block(b);
    let cases = [
        (GgmlType::Plain(DType::F32), "512"),
        (GgmlType::Plain(DType::BF16), "512"),
        (block(BlockType::Q8_0), "8192"),
        (block(BlockType::Q4_0), "8192"),
    ];
    for (ty, context) in cases {
        let path = model(dir.path(), ty);
        let sizes = ["-c", context, "--chunk", "64"];
        let fit = command(&[&["fit", text(&path)], &sizes[..]].concat()).ok().json();
        let ran = ["generate", text(&path), "--prompt-tokens", text(&ids), "-n", "4", "--ignore-eos"];
        let run = command(&[&ran[..], &sizes].concat()).ok().json();
        // `untouched`: bytes that the prediction has and the measurement may lack.
        let near = |path: &str, measured: &str, percent: u64, untouched: u64| {
            let (p, m) = (figure(&fit, path), figure(&run, measured));
            println!("{} {context}: {path} {:.2} MiB, measured {:.2} MiB", ty.name(), mib(p), mib(m));
            let right = m * percent / 100;
            assert!(m <= p + right && p <= m + untouched + right, "{path}: {p}, measured {m}: {fit} {run}");
        };
        near("/peak/device", "/memory/device/peak", 1, 0);
        if run["memory"]["peak_anonymous"].is_null() {
            skip("generations_take_what_is_predicted", "the system does not report anonymous memory");
        } else {
            // The generation writes 68 positions of the cache. Whether the pages of the others are resident
            // depends on the system, which gives huge pages while it has some.
            let cache = figure(&fit, "/cache/bytes");
            let (written, positions) = (68, context.parse::<u64>().expect("a number"));
            near("/peak/anonymous", "/memory/peak_anonymous", 5, cache - cache * written / positions);
        }
        assert_eq!(figure(&fit, "/cache/position"), (2 * LAYERS * HIDDEN * 2) as u64);
        assert!(figure(&fit, "/plans") > 0 && fit["fits"] == true, "{fit}");
    }
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / MIB as f64
}

#[test]
fn a_model_that_does_not_fit_is_refused_with_a_context_that_fits() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = model(dir.path(), GgmlType::Plain(DType::F32));
    let ids = prompt(dir.path(), 40);
    let limit = ["--memory-limit", "80M", "--kv-dtype", "f32", "--chunk", "64"];
    let fit = |more: &[&str]| command(&[&["fit", text(&path)], &limit[..], more].concat());
    let refused = fit(&["-c", "8192"]);
    let v = refused.json();
    assert_eq!((refused.code, &v["fits"]), (5, &Value::from(false)), "{v}");
    assert_eq!(v["error"]["kind"], "OutOfMemory");
    let most = figure(&v, "/largest_context/f32");
    assert!(most.is_multiple_of(32) && (256..8192).contains(&most), "{v}");
    assert!(figure(&v, "/largest_context/f16") >= 2 * most, "{v}");
    let types: Vec<&str> =
        v["quantised"].as_array().expect("a list").iter().filter_map(|q| q["type"].as_str()).collect();
    assert_eq!(types, ["q8_0", "q6_k", "q5_k_m", "q4_k_m", "q4_0"]);
    // The advice holds: that context fits, and two pages more do not.
    let with = |n: u64| ["-c".to_string(), n.to_string()];
    let run = |n: u64| {
        let ran = ["generate", text(&path), "--prompt-tokens", text(&ids), "-n", "2", "--ignore-eos"];
        command(&[&ran[..], &limit, &with(n).each_ref().map(String::as_str)].concat())
    };
    let done = run(most).ok().json();
    assert!(figure(&done, "/memory/device/peak") <= 80 * MIB, "{done}");
    let d = run(most + 64);
    let said = d.json();
    assert_eq!((d.code, &said["error"]["kind"]), (5, &Value::from("OutOfMemory")), "{d:?}");
    let next = said["error"]["message"].as_str().expect("a text").to_string();
    assert!(next.contains(&format!("--context {most}")) && next.contains("--kv-dtype f16"), "{next}");
    // Every command that loads a model refuses it.
    for (command_line, advice) in [
        (vec!["chat", text(&path)], "Use weights in q4_0 with --context "),
        (vec!["logits", text(&path), "--tokens", text(&ids), "-o", "/dev/null"], "Use weights in q8_0, "),
        (vec!["bench", "llm", text(&path), "-p", "8", "-n", "1", "-r", "1"], "Use weights in q8_0, "),
    ] {
        let mut c = common::command(&command_line);
        c.args(["--memory-limit", "20M", "--backend", "cpu"]).env("HALCYON_CONFIG", "off");
        finish(&mut c).fails(5, &["out of memory", advice]);
    }
}

#[test]
fn wrong_options_of_fit_are_said() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("tiny.gguf");
    std::fs::write(&path, tiny(Tiny::default())).expect("written");
    let fit = |model: &str, more: &[&str]| {
        let mut c = common::command(&[&["fit", model, "--backend", "cpu"], more].concat());
        finish(c.env("HALCYON_CONFIG", "off"))
    };
    fit(text(&path), &["--train"]).fails(2, &["--train", "--context"]);
    fit(text(&path), &["--input", "x=3"]).fails(2, &["--input"]);
    fit(text(&path), &["--kv-dtype", "i8"]).fails(2, &["i8", "f16"]);
    fit(text(&path), &["--chunk", "0"]).fails(2, &["--chunk"]);
    fit("models/digits.onnx", &["-ctk", "f16"]).fails(2, &["--cache-type-k", "language models"]);
    fit("models/digits.onnx", &["-c", "8"]).fails(2, &["--context", "language models"]);
    fit(text(dir.path()), &[]).fails(1, &["config.json"]);
    let said = fit(text(&path), &["--batch", "3", "-c", "64"]).ok().out;
    for part in ["3 sequences of 64 positions", "plans", "fits     yes", "largest context "] {
        assert!(said.contains(part), "{part}: {said}");
    }
}

/// Adapters, drafts and sequences take memory, and what does not fit with them is refused.
#[test]
fn drafts_and_sequences_count() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = model(dir.path(), GgmlType::Plain(DType::F32));
    let small = model(dir.path(), GgmlType::Block(BlockType::Q4_0));
    let ids = prompt(dir.path(), 64);
    let sizes = ["-c", "512", "--chunk", "64"];
    let fit = |more: &[&str]| command(&[&["fit", text(&path)], &sizes[..], more].concat());
    let alone = figure(&fit(&[]).ok().json(), "/peak/device");
    let draft = ["--draft", text(&small)];
    let both = fit(&draft).ok().json();
    let run = |more: &[&str]| {
        let ran = ["generate", text(&path), "--prompt-tokens", text(&ids), "-n", "12", "--ignore-eos"];
        command(&[&ran[..], &["--temp", "0"], &sizes, &draft, more].concat())
    };
    let ran = run(&[]).ok().json();
    let (p, m) = (figure(&both, "/peak/device"), figure(&ran, "/memory/device/peak"));
    println!("with a draft: {:.2} MiB, measured {:.2} MiB", mib(p), mib(m));
    assert!(p.abs_diff(m) <= m / 20, "{p}, measured {m}: {both} {ran}");
    let own = figure(&both, "/draft/device");
    assert!(figure(&both, "/peak/device") >= alone + own && own > MIB, "{both}");
    // With room for one of the two, nothing is allocated.
    let limit = (alone + own / 2).to_string();
    let limit = ["--memory-limit", &limit];
    let d = fit(&[&draft[..], &limit].concat());
    assert_eq!((d.code, &d.json()["fits"]), (5, &Value::from(false)), "{d:?}");
    fit(&limit).ok();
    let said = run(&limit).json()["error"]["message"].as_str().expect("a text").to_string();
    assert!(said.contains("next to its draft") && said.contains("Leave out --draft"), "{said}");
    // Each sequence has a cache of its own.
    let [one, three] = ["1", "3"].map(|n| figure(&fit(&["--parallel", n]).ok().json(), "/cache/bytes"));
    assert!(three > 2 * one, "{one} {three}");
}

/// Adapters of rank 64 for all projections of a model, in a folder.
fn adapters(dir: &Path, model: &Path) -> PathBuf {
    let (file, cpu) = (ModelFile::open(model).expect("a model"), Backend::cpu().expect("the CPU"));
    let options = LoraOptions { rank: 64, targets: vec!["*_proj".into()], ..LoraOptions::default() };
    let lora = Lora::new(&file, &cpu, &options).expect("adapters");
    // Equal constants are stored once, and new adapters have zeros.
    for (i, stem) in lora.matrices().enumerate() {
        let slot = &lora.adapter(stem).expect("an adapter").b;
        let dims = slot.value().dims().expect("dims");
        let v: Vec<f32> = (0..dims.iter().product()).map(|k: usize| (k * 7 % 11 + i) as f32 * 1e-4).collect();
        slot.set(Tensor::from_slice(&cpu, &dims, &v).expect("values")).expect("set");
    }
    let to = dir.join("adapters");
    lora.save(&to, "random").expect("written");
    to
}

#[test]
fn adapters_count_before_they_are_on_a_device() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = model(dir.path(), GgmlType::Plain(DType::F32));
    let (ids, lora) = (prompt(dir.path(), 64), adapters(dir.path(), &path));
    let sizes = ["-c", "512", "--chunk", "64"];
    let lora = ["--lora", text(&lora)];
    let fit = |more: &[&str]| command(&[&["fit", text(&path)], &sizes[..], more].concat());
    let run = |more: &[&str]| {
        let ran = ["generate", text(&path), "--prompt-tokens", text(&ids), "-n", "4", "--ignore-eos"];
        command(&[&ran[..], &sizes, more].concat())
    };
    let alone = figure(&fit(&[]).ok().json(), "/peak/device");
    let with = fit(&lora).ok().json();
    let ran = run(&lora).ok().json();
    let (p, m) = (figure(&with, "/peak/device"), figure(&ran, "/memory/device/peak"));
    println!("with adapters: {:.2} MiB, measured {:.2} MiB", mib(p), mib(m));
    assert!(p.abs_diff(m) <= m / 50, "{p}, measured {m}: {with} {ran}");
    // 4 square matrices and 3 with the inner size, rank 64, in f32.
    let bytes = LAYERS * 64 * 4 * (4 * 2 * HIDDEN + 3 * (HIDDEN + INNER));
    assert_eq!(figure(&with, "/adapters"), bytes as u64);
    assert!(p > alone + bytes as u64, "{p} {alone}");
    if !ran["memory"]["peak_anonymous"].is_null() {
        let (p, m) = (figure(&with, "/peak/anonymous"), figure(&ran, "/memory/peak_anonymous"));
        println!("anonymous: {:.2} MiB, measured {:.2} MiB", mib(p), mib(m));
        assert!(p.abs_diff(m) <= m / 10, "{p}, measured {m}: {with} {ran}");
    }
    // With room for the model alone, both say so and nothing is allocated.
    let limit = (alone + bytes as u64 / 2).to_string();
    let limit = [&lora[..], &["--memory-limit", &limit]].concat();
    for d in [fit(&limit), run(&limit)] {
        let v = d.json();
        assert_eq!((d.code, &v["error"]["kind"]), (5, &Value::from("OutOfMemory")), "{d:?}");
        let said = v["error"]["message"].as_str().expect("a text");
        let all = [format!("adapters of {bytes}"), "Leave out --lora".into()];
        assert!(all.iter().all(|t| said.contains(t)), "{said}");
    }
}

/// A chat is refused where a generation fits, if the buffers of its further steps do not.
#[test]
fn a_chat_takes_more_than_a_generation() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = model(dir.path(), GgmlType::Plain(DType::F32));
    let fit = command(&["fit", text(&path), "-c", "512"]).ok().json();
    let (alone, more) = (figure(&fit, "/peak/device"), figure(&fit, "/chat"));
    assert!(more > MIB, "{fit}");
    let start = |limit: u64| {
        let limit = limit.to_string();
        let mut c = common::command(&["chat", text(&path), "-c", "512", "--memory-limit", &limit]);
        finish(c.args(["--backend", "cpu"]).env("HALCYON_CONFIG", "off"))
    };
    start(alone + more / 2).fails(5, &["out of memory"]);
    // The model has no tokenizer, which is the next thing that a chat needs.
    start(alone + more + MIB).fails(3, &["tokenizer"]);
}
