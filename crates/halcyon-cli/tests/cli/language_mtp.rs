//! `--mtp`: proposals of a model's own layer for further tokens.

use crate::common::{self, Done, finish, text};
use halcyon_formats::gguf::{self, GgmlType, TensorInfo, Value as Entry};
use halcyon_formats::npy;
use halcyon_ir::ConstData;
use serde_json::Value;
use std::path::{Path, PathBuf};

const MIB: u64 = 1 << 20;
const HIDDEN: usize = 256;
const VOCABULARY: usize = 2000;
const LAYERS: usize = 4;

/// The norms of a layer for further tokens.
const NORMS: [&str; 3] = ["enorm", "hnorm", "shared_head_norm"];

/// A GLM-4 model of `LAYERS` layers, the last of which predicts further tokens if it has `norms` for that.
/// Each token alone decides what follows, and the layer knows this: between embedding and output, nothing is
/// added.
fn model(dir: &Path, norms: &[&str]) -> PathBuf {
    let ahead = !norms.is_empty();
    let sizes = [
        ("context_length", 4096),
        ("embedding_length", HIDDEN),
        ("block_count", LAYERS),
        ("nextn_predict_layers", usize::from(ahead)),
        ("feed_forward_length", HIDDEN),
        ("attention.head_count", 4),
        ("attention.head_count_kv", 4),
        ("leading_dense_block_count", LAYERS),
        ("expert_count", 2),
        ("expert_used_count", 1),
        ("expert_feed_forward_length", 8),
    ];
    let mut metadata: Vec<(String, Entry)> =
        sizes.iter().map(|(k, v)| (format!("glm4moe.{k}"), Entry::from(*v as u32))).collect();
    metadata.push(("general.architecture".into(), "glm4moe".into()));
    metadata.push(("glm4moe.attention.layer_norm_rms_epsilon".into(), 1e-5f32.into()));
    let mut seed = 7u64;
    let mut noise = |n: usize| -> Vec<f32> {
        let mut next = || {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 40) as f32 / (1u64 << 23) as f32 - 1.0
        };
        (0..n).map(|_| next()).collect()
    };
    let mut tensors: Vec<(TensorInfo, Vec<u8>)> = vec![];
    let mut add = |name: String, shape: &[usize], values: Vec<f32>| {
        let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        tensors.push((TensorInfo::new(format!("{name}.weight"), shape, GgmlType::F32), bytes));
    };
    for name in ["token_embd", "output"] {
        add(name.into(), &[VOCABULARY, HIDDEN], noise(VOCABULARY * HIDDEN));
    }
    add("output_norm".into(), &[HIDDEN], vec![1.0; HIDDEN]);
    for i in 0..LAYERS {
        for name in ["attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up"] {
            add(format!("blk.{i}.{name}"), &[HIDDEN, HIDDEN], noise(HIDDEN * HIDDEN));
        }
        // So small that it changes no choice, and different, because equal constants are stored once.
        for name in ["attn_output", "ffn_down"] {
            let values = noise(HIDDEN * HIDDEN).iter().map(|v| v * 1e-9).collect();
            add(format!("blk.{i}.{name}"), &[HIDDEN, HIDDEN], values);
        }
        for name in ["attn_norm", "post_attention_norm"] {
            add(format!("blk.{i}.{name}"), &[HIDDEN], vec![1.0; HIDDEN]);
        }
    }
    if ahead {
        let own = |name: &str| format!("blk.{}.nextn.{name}", LAYERS - 1);
        for name in norms {
            add(own(name), &[HIDDEN], vec![1.0; HIDDEN]);
        }
        let (rows, columns) = (HIDDEN, 2 * HIDDEN);
        let eye = (0..rows * columns).map(|i| if i / columns == i % columns { 1.0 } else { 0.0 });
        add(own("eh_proj"), &[rows, columns], eye.collect());
    }
    let all: Vec<(TensorInfo, &[u8])> = tensors.iter().map(|(t, b)| (t.clone(), &b[..])).collect();
    let to = dir.join(format!("{}.gguf", norms.len()));
    std::fs::write(&to, gguf::encode(&metadata, &all).expect("a file")).expect("written");
    to
}

fn command(args: &[&str]) -> Done {
    let mut c = common::command(&[args, &["--backend", "cpu", "--threads", "2", "--json"]].concat());
    finish(c.env("HALCYON_CACHE", "off").env("HALCYON_CONFIG", "off"))
}

fn prompt(dir: &Path) -> PathBuf {
    let ids: Vec<i64> = (1..40).collect();
    let to = dir.join("ids.npy");
    npy::write(&to, &ConstData::from_slice(&[ids.len()], &ids).expect("a list")).expect("written");
    to
}

fn figure(v: &Value, at: &str) -> u64 {
    v.pointer(at).and_then(Value::as_u64).unwrap_or_else(|| panic!("{at}: {v}"))
}

#[test]
fn a_layer_for_further_tokens_proposes_them() {
    let dir = tempfile::tempdir().expect("a folder");
    let (path, ids) = (model(dir.path(), &NORMS), prompt(dir.path()));
    let run = |more: &[&str]| {
        let ran =
            ["generate", text(&path), "--prompt-tokens", text(&ids), "-n", "60", "--temp", "0", "-c", "512"];
        command(&[&ran[..], more].concat())
    };
    let off = run(&["--mtp", "off"]).ok().json();
    assert!(off.get("speculation").is_none(), "{off}");
    // llama.cpp's name and value, too.
    for more in [&[][..], &["--mtp", "on", "--draft-max", "3"], &["--spec-type", "draft-mtp"]] {
        let on = run(more).ok().json();
        assert_eq!(on["tokens"], off["tokens"], "{more:?}");
        let s = &on["speculation"];
        assert!(s["acceptance"].as_f64().is_some_and(|a| a > 0.8) && figure(s, "/accepted") > 0, "{s}");
    }
    let d = run(&["--mtp", "on", "--lookup"]);
    assert!(
        d.code == 2 && d.json()["error"]["message"].as_str().is_some_and(|m| m.contains("--mtp")),
        "{d:?}"
    );
    let inspected = finish(&mut common::command(&["inspect", text(&path), "--json"])).ok().json();
    assert_eq!(figure(&inspected, "/further_tokens/layers"), 1);
    let own = figure(&inspected, "/further_tokens/parameters");
    assert_eq!(own, (7 * HIDDEN * HIDDEN + 2 * HIDDEN * HIDDEN + 5 * HIDDEN) as u64);
    // A model without such a layer.
    let plain = model(dir.path(), &[]);
    let on = |path: &Path, mtp: &str| {
        let ran = ["generate", text(path), "--prompt-tokens", text(&ids), "-n", "4", "--mtp", mtp];
        command(&ran)
    };
    let said = |d: &Done| d.json()["error"]["message"].as_str().unwrap_or_default().to_string();
    let d = on(&plain, "on");
    assert!(d.code != 0 && said(&d).contains("no layer"), "{d:?}");
    // One that lacks a tensor is not used, unless it was asked for.
    let broken = model(dir.path(), &NORMS[..1]);
    let d = on(&broken, "auto").ok();
    assert!(d.json().get("speculation").is_none() && d.err.contains("hnorm"), "{d:?}");
    let d = on(&broken, "on");
    assert!(d.code != 0 && said(&d).contains("hnorm"), "{d:?}");
}

#[test]
fn a_layer_for_further_tokens_counts() {
    let dir = tempfile::tempdir().expect("a folder");
    let (path, ids) = (model(dir.path(), &NORMS), prompt(dir.path()));
    let sizes = ["-c", "512", "--chunk", "64"];
    let fit = |more: &[&str]| command(&[&["fit", text(&path)], &sizes[..], more].concat());
    let run = |more: &[&str]| {
        let ran = ["generate", text(&path), "--prompt-tokens", text(&ids), "-n", "60", "--temp", "0"];
        command(&[&ran[..], &sizes, more].concat())
    };
    let (with, without) = (fit(&[]).ok().json(), fit(&["--mtp", "off"]).ok().json());
    assert_eq!(with["draft"]["own_layer"], true);
    assert!(without["draft"].is_null());
    let [p, alone] = [&with, &without].map(|v| figure(v, "/peak/device"));
    let ran = run(&[]).ok().json();
    let m = figure(&ran, "/memory/device/peak");
    println!("with the layer: {:.2} MiB, measured {:.2} MiB", p as f64 / MIB as f64, m as f64 / MIB as f64);
    assert!(p.abs_diff(m) <= m / 20, "{p}, measured {m}: {with} {ran}");
    // With room for the model alone, the layer is left out unless it was asked for.
    let limit = ((p + alone) / 2).to_string();
    let limit = ["--memory-limit", &limit];
    assert!(fit(&limit).ok().json()["draft"].is_null());
    assert!(run(&limit).ok().json().get("speculation").is_none());
    let on = [&limit[..], &["--mtp", "on"]].concat();
    assert_eq!((fit(&on).code, run(&on).code), (5, 5));
}

/// Prompts of a file have the tokens that they have without proposals.
#[test]
fn prompts_of_a_file_have_proposals() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = model(dir.path(), &NORMS);
    let prompts = dir.path().join("prompts.txt");
    let lines: Vec<String> =
        (0..5).map(|i| format!("{{\"prompt_tokens\": [{}, {}, 3]}}", 10 + i, 7 * i + 1)).collect();
    std::fs::write(&prompts, lines.join("\n")).expect("written");
    let run = |more: &[&str]| {
        let ran = ["generate", text(&path), "--prompts", text(&prompts), "--parallel", "3", "-n", "40", "-v"];
        let d = command(&[&ran[..], &["--temp", "0", "-c", "512"], more].concat()).ok();
        let tokens = |l: &str| serde_json::from_str::<Value>(l).expect("JSON")["tokens"].clone();
        (d.out.lines().map(tokens).collect::<Vec<_>>(), d.err)
    };
    // Proposals for several sequences need not pay, so they are used only if they are asked for.
    let (want, said) = run(&[]);
    assert_eq!(want.len(), 5);
    assert!(!said.contains("drafts:"), "{said}");
    for more in [&["--mtp", "on"][..], &["--lookup"], &["--draft", text(&path)]] {
        let (got, said) = run(more);
        assert_eq!(got, want, "{more:?}");
        assert!(said.contains("drafts:"), "{said}");
    }
    let both = ["generate", text(&path), "--prompts", text(&prompts), "--mtp", "on", "--lookup"];
    let d = command(&both);
    assert!(
        d.code == 2 && d.json()["error"]["message"].as_str().is_some_and(|m| m.contains("--mtp")),
        "{d:?}"
    );
}
