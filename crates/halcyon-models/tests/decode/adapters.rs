//! Adapters in all files: the same results from PEFT's folders and GGUF files, on folders and GGUF files,
//! alone, in sums and merged; gradients in every family.

use crate::common::*;
use halcyon::BlockType;
use halcyon::prelude::*;
use halcyon_formats::gguf::{self, GgmlType, TensorInfo, Value};
use halcyon_formats::safetensors::{self, SafeTensors};
use halcyon_models::export::{Content, WriteOptions, merged_content, write, write_merged_folder};
use halcyon_models::{Decoder, EmbedOptions, Embedder, LoadOptions, Lora, LoraOptions, ModelFile, Source};
use halcyon_nn::{CrossEntropyOptions, ModuleExt, cross_entropy, loss_and_grads};
use halcyon_test::Rng;
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub(crate) fn data(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests").join(name)
}

pub(crate) fn written(content: &Content<'_>, types: &[GgmlType], to: &Path) {
    let mut options =
        WriteOptions { threads: None, requantise: true, interrupted: &|| false, progress: &mut || {} };
    write(content, types, to, &mut options).expect("written");
}

/// The model as a GGUF file, its matrices in `blocks`, or in the types of the folder.
pub(crate) fn as_gguf(model: &ModelFile, to: &Path, blocks: Option<GgmlType>) -> ModelFile {
    let content = Content::of(&model.source).expect("a content");
    let ty = |t: &TensorInfo| blocks.filter(|_| t.shape.len() >= 2).unwrap_or(t.ty);
    let types: Vec<GgmlType> = content.tensors.iter().map(|t| ty(&t.info)).collect();
    written(&content, &types, to);
    ModelFile::open(to).expect("a model")
}

fn loaded(b: &Backend, model: &ModelFile, lora: Option<&Lora>) -> Arc<Decoder> {
    Arc::new(model.load(b, LoadOptions { lora, ..LoadOptions::from(64) }).expect("the weights load"))
}

/// The logits of 12 tokens.
pub(crate) fn logits(b: &Backend, model: &ModelFile, lora: Option<&Lora>) -> Vec<f32> {
    let ids: Vec<u32> = (0..12).map(|i| 3 + i * 7 % 90).collect();
    feed(&mut engine(&loaded(b, model, lora), 1, 8), &ids, true)
}

/// The largest difference in standard deviations.
pub(crate) fn differ(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    let n = a.len() as f64;
    let mean = a.iter().map(|v| f64::from(*v)).sum::<f64>() / n;
    let std = (a.iter().map(|v| (f64::from(*v) - mean).powi(2)).sum::<f64>() / n).sqrt();
    a.iter().zip(b).map(|(a, b)| f64::from((a - b).abs())).fold(0.0, f64::max) / std
}

/// Adapters with random values that matter.
fn random(model: &ModelFile, b: &Backend, targets: &[&str], seed: u64) -> Lora {
    let targets = targets.iter().map(|t| t.to_string()).collect();
    let lora = Lora::new(model, b, &LoraOptions { rank: 3, targets, seed, ..LoraOptions::default() });
    let (lora, mut rng) = (lora.expect("adapters"), Rng::new(seed));
    // B begins with zeros.
    for (path, slot) in lora.parameters().iter().filter(|(path, _)| path.ends_with(".b")) {
        let dims = slot.value().dims().expect("dims");
        let v: Vec<f32> = rng.f32s(dims.iter().product()).iter().map(|v| v * 0.1).collect();
        slot.set(Tensor::from_slice(b, &dims, &v).expect("values")).expect(path);
    }
    lora
}

/// A GGUF file of these adapters, which belong to a GGUF file.
fn adapter_file(lora: &Lora, to: &Path, changed: &[(&str, Value)]) {
    let mut metadata: Vec<(String, Value)> = vec![
        ("general.type".into(), "adapter".into()),
        ("adapter.type".into(), "lora".into()),
        ("general.architecture".into(), "llama".into()),
        ("adapter.lora.alpha".into(), Value::from(16f32)),
    ];
    for (key, v) in changed {
        metadata.retain(|(k, _)| k != key);
        metadata.push(((*key).into(), v.clone()));
    }
    let mut parts = vec![];
    for stem in lora.matrices() {
        let adapter = lora.adapter(stem).expect("an adapter");
        for (which, p) in [("a", &adapter.a), ("b", &adapter.b)] {
            let (dims, v) = (p.value().dims().expect("dims"), p.value().to_vec::<f32>().expect("values"));
            let info = TensorInfo::new(format!("{stem}.weight.lora_{which}"), &dims, GgmlType::F32);
            parts.push((info, v.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>()));
        }
    }
    let parts: Vec<(TensorInfo, &[u8])> = parts.iter().map(|(t, b)| (t.clone(), &b[..])).collect();
    gguf::write(to, &metadata, &parts).expect("written");
}

/// llama's GGUF files have another order of the rows of queries and keys, and adapters follow it.
#[test]
fn adapters_have_the_same_effect_in_all_files() {
    let (b, dir) = (Backend::cpu().expect("the CPU"), tempfile::tempdir().expect("a folder"));
    let folder = ModelFile::open(&data("data/llama")).expect("a model");
    let file = as_gguf(&folder, &dir.path().join("m.gguf"), None);
    let plain = logits(&b, &folder, None);
    // Adapters of the GGUF file, as a GGUF file and as PEFT's folder, on both.
    let own = random(&file, &b, &["[qkv]_proj", "down_proj", "lm_head"], 5);
    assert!(own.adapter("output").is_some(), "the head has an adapter");
    let want = logits(&b, &file, Some(&own));
    assert!(differ(&plain, &want) > 0.1, "the adapters matter");
    let (gguf, peft) = (dir.path().join("adapter.gguf"), dir.path().join("adapter"));
    adapter_file(&own, &gguf, &[]);
    own.save(&peft, "base").expect("written");
    for place in [&gguf, &peft] {
        for model in [&file, &folder] {
            let lora = Lora::load(place, model, &b).expect("adapters");
            let d = differ(&want, &logits(&b, model, Some(&lora)));
            assert!(d < 1e-4, "{place:?} on {:?}: {d:e}", model.path);
        }
    }
    // And the other way round: those of the folder.
    let own = random(&folder, &b, &["[qk]_proj"], 6);
    let (want, peft) = (logits(&b, &folder, Some(&own)), dir.path().join("second"));
    own.save(&peft, "base").expect("written");
    let read = Lora::load(&peft, &file, &b).expect("adapters");
    assert!(differ(&want, &logits(&b, &file, Some(&read))) < 1e-4);
}

/// A model whose experts have tensors of their own, and that GGUF files can describe.
fn with_experts(dir: &Path) -> PathBuf {
    let (from, to) = (data("data/qwen3_moe"), dir.join("experts"));
    std::fs::create_dir_all(&to).expect("a folder");
    std::fs::copy(from.join("model.safetensors"), to.join("model.safetensors")).expect("copied");
    let config = std::fs::read_to_string(from.join("config.json")).expect("text");
    let new = config.replace("\"norm_topk_prob\": false", "\"norm_topk_prob\": true");
    assert_ne!(new, config);
    std::fs::write(to.join("config.json"), new).expect("written");
    to
}

/// Experts' adapters: a module for each expert in PEFT's folders, one tensor for all in GGUF files.
#[test]
fn adapters_of_experts_have_the_same_effect_in_all_files() {
    let (b, dir) = (Backend::cpu().expect("the CPU"), tempfile::tempdir().expect("a folder"));
    let folder = ModelFile::open(&with_experts(dir.path())).expect("a model");
    let file = as_gguf(&folder, &dir.path().join("m.gguf"), None);
    let own = random(&folder, &b, &["gate_proj", "up_proj", "down_proj"], 5);
    assert!(own.adapter("blk.1.ffn_gate_exps").is_some());
    let (plain, want) = (logits(&b, &folder, None), logits(&b, &folder, Some(&own)));
    assert!(differ(&plain, &want) > 0.1, "the adapters matter");
    let (gguf, peft) = (dir.path().join("adapter.gguf"), dir.path().join("adapter"));
    adapter_file(&own, &gguf, &[("general.architecture", Value::from("qwen3moe"))]);
    own.save(&peft, "base").expect("written");
    // PEFT's formula for one expert, from the stored files.
    let stored = SafeTensors::open(&peft.join("adapter_model.safetensors")).expect("adapters");
    let part = |which: &str| {
        let name = format!("base_model.model.model.layers.1.mlp.experts.2.up_proj.lora_{which}.weight");
        let t = stored.get(&name).expect("a module of the expert");
        (t.dims.to_vec(), t.to_vec::<f32>())
    };
    let ((a_dims, a), (b_dims, up)) = (part("A"), part("B"));
    let base = folder.source.find(&folder.spec, "blk.1.ffn_up_exps.weight").expect("read").expect("experts");
    let base = base.floats().expect("values");
    let merged = own.merged(&folder, "blk.1.ffn_up_exps").expect("merged").expect("an adapter");
    let merged = merged.to_vec::<f32>();
    let (rank, inputs, outputs) = (a_dims[0], a_dims[1], b_dims[0]);
    for (row, column) in [(0, 0), (3, 5), (outputs - 1, inputs - 1)] {
        let sum: f32 = (0..rank).map(|r| up[row * rank + r] * a[r * inputs + column]).sum();
        let at = (2 * outputs + row) * inputs + column;
        let want = base[at] + 16.0 / rank as f32 * sum;
        assert!((merged[at] - want).abs() < 1e-5, "{row} {column}: {} {want}", merged[at]);
    }
    for place in [&gguf, &peft] {
        for model in [&file, &folder] {
            for scales in [&[1.0][..], &[0.25, 0.75]] {
                let places: Vec<_> = scales.iter().map(|s| (place.clone(), *s)).collect();
                let lora = Lora::load_all(&places, model, &b).expect("adapters");
                let d = differ(&want, &logits(&b, model, lora.as_ref()));
                assert!(d < 1e-4, "{place:?} on {:?}: {d:e}", model.path);
            }
        }
    }
    // A folder may have adapters of some experts only.
    let names: Vec<String> = stored.names().filter(|n| n.contains("experts.1.")).map(String::from).collect();
    let some: Vec<_> = names.iter().map(|n| (n.as_str(), stored.get(n).expect("values"))).collect();
    let some: Vec<_> = some.iter().map(|(n, t)| (*n, t)).collect();
    safetensors::write(&peft.join("adapter_model.safetensors"), &some, &Default::default()).expect("written");
    let read = Lora::load(&peft, &folder, &b).expect("adapters");
    let merged = read.merged(&folder, "blk.1.ffn_up_exps").expect("merged").expect("an adapter");
    let (merged, one) = (merged.to_vec::<f32>(), outputs * inputs);
    assert_eq!(bits(&merged[..one]), bits(&base[..one]), "the first expert has no adapter");
    assert!(merged[one..2 * one] != base[one..2 * one]);
}

#[test]
fn sums_of_adapters_add_what_each_adds_by_its_scale() {
    let (b, dir) = (Backend::cpu().expect("the CPU"), tempfile::tempdir().expect("a folder"));
    let model = ModelFile::open(&data("data/llama")).expect("a model");
    let one = random(&model, &b, &["q_proj", "v_proj"], 1);
    let two = random(&model, &b, &["v_proj", "up_proj"], 2);
    let places = [dir.path().join("one"), dir.path().join("two")];
    one.save(&places[0], "x").expect("written");
    two.save(&places[1], "x").expect("written");
    let all = |scales: &[(usize, f32)]| {
        let places: Vec<_> = scales.iter().map(|(i, s)| (places[*i].clone(), *s)).collect();
        Lora::load_all(&places, &model, &b).expect("adapters").expect("some")
    };
    let both = all(&[(0, 1.0), (1, -0.5)]);
    assert_eq!(both.matrices().count(), 3 * model.spec.layers.len());
    for stem in both.matrices().map(String::from).collect::<Vec<_>>() {
        let values = |l: &Lora| {
            let m = l.merged(&model, &stem).expect("a matrix");
            m.map(|m| m.to_vec::<f32>())
        };
        let base =
            model.source.find(&model.spec, &format!("{stem}.weight")).expect("read").expect("it is there");
        let base = base.floats().expect("values");
        let (one, two) = (values(&one).unwrap_or(base.clone()), values(&two).unwrap_or(base.clone()));
        let got = values(&both).expect("an adapter");
        for i in 0..base.len() {
            let want = one[i] - 0.5 * (two[i] - base[i]);
            assert!((got[i] - want).abs() < 1e-5, "{stem} {i}: {} {want}", got[i]);
        }
    }
    // A scale of 0 changes nothing; a sum keeps its effect in files.
    assert!(differ(&logits(&b, &model, None), &logits(&b, &model, Some(&all(&[(0, 0.0)])))) < 1e-6);
    let third = dir.path().join("third");
    both.save(&third, "x").expect("written");
    let read = Lora::load(&third, &model, &b).expect("adapters");
    assert!(differ(&logits(&b, &model, Some(&both)), &logits(&b, &model, Some(&read))) < 1e-5);
    assert!(Lora::load_all(&[], &model, &b).expect("none").is_none());
    let e = Lora::load_all(&[(places[0].clone(), f32::NAN)], &model, &b).map(drop).expect_err("an error");
    assert!(e.to_string().contains("scale"), "{e}");
}

#[test]
fn merged_models_have_the_logits_of_base_and_adapters() {
    let (b, dir) = (Backend::cpu().expect("the CPU"), tempfile::tempdir().expect("a folder"));
    let path = |name: &str| dir.path().join(name);
    for family in ["llama", "gemma3", "qwen3_moe"] {
        let place = match family {
            "qwen3_moe" => with_experts(dir.path()),
            other => data("data").join(other),
        };
        let folder = || ModelFile::open(&place).expect("a model");
        let lora = random(&folder(), &b, &["[qkvo]_proj", "*_proj", "lm_head"], 3);
        // Gemma 3 has the embedding as its head.
        assert_eq!(lora.adapter("output").is_some(), family != "gemma3");
        assert_eq!(lora.adapter("blk.1.ffn_up_exps").is_some(), family == "qwen3_moe");
        let peft = path(&format!("{family}-adapter"));
        lora.save(&peft, "base").expect("written");
        let want = logits(&b, &folder(), Some(&lora));
        let plain = logits(&b, &folder(), None);
        assert!(differ(&plain, &want) > 0.1, "{family}: the adapters matter");
        let check = |what: &str, model: &Path, bound: f64| {
            let d = differ(&want, &logits(&b, &ModelFile::open(model).expect("a model"), None));
            assert!(d < bound, "{family} {what}: {d:e}");
        };
        // To a folder, in f32 and in the folder's own types.
        // Rounding to bf16 moves the weights of chosen experts too.
        let rounded = if family == "qwen3_moe" { 0.15 } else { 0.05 };
        for (dtype, bound) in [(Some(DType::F32), 1e-4), (None, rounded)] {
            let to = path(&format!("{family}-{dtype:?}"));
            let mut steps = 0;
            let done =
                write_merged_folder(&mut folder(), &lora, (&to, dtype), &|| false, &mut |_| steps += 1);
            assert_eq!(done.expect("written").tensors, steps);
            check(&format!("folder {dtype:?}"), &to, bound);
        }
        // To a GGUF file.
        let to = path(&format!("{family}.gguf"));
        let mut base = folder();
        let (mut content, _) = merged_content(&mut base, &lora).expect("a content");
        let types = content.expand(DType::F32).expect("types");
        written(&content, &types, &to);
        check("folder to GGUF", &to, 1e-4);
        // From a GGUF file, in f32 and f16.
        for (name, ty, bound) in [("f32", GgmlType::F32, 1e-4), ("f16", GgmlType::F16, 0.02)] {
            let mut base = as_gguf(&folder(), &path(&format!("{family}-{name}.gguf")), Some(ty));
            let lora = Lora::load(&peft, &base, &b).expect("adapters");
            let own = logits(&b, &base, Some(&lora));
            let to = path(&format!("{family}-{name}-merged.gguf"));
            let (content, kept) = merged_content(&mut base, &lora).expect("a content");
            written(&content, &kept, &to);
            let merged = ModelFile::open(&to).expect("a model");
            let d = differ(&own, &logits(&b, &merged, None));
            assert!(d < bound, "{family} {name}: {d:e}");
            let Source::Gguf(g) = &merged.source else { panic!("a GGUF file") };
            assert_eq!(g.tensor("blk.0.attn_q.weight").expect("a matrix").ty(), ty, "{family} {name}");
        }
    }
}

#[test]
fn weights_in_blocks_are_merged_and_stay_in_blocks() {
    let (b, dir) = (Backend::cpu().expect("the CPU"), tempfile::tempdir().expect("a folder"));
    let source = file(&metadata("llama"), &tensors(Some(BlockType::Q8_0)));
    let spec = halcyon_models::family::spec(&source).expect("the configuration is valid");
    let mut base = ModelFile { path: "random.gguf".into(), source, spec };
    let lora = random(&base, &b, &["*_proj"], 3);
    let (want, plain) = (logits(&b, &base, Some(&lora)), logits(&b, &base, None));
    let (content, kept) = merged_content(&mut base, &lora).expect("a content");
    let to = dir.path().join("m.gguf");
    written(&content, &kept, &to);
    let merged = ModelFile::open(&to).expect("a model");
    let Source::Gguf(g) = &merged.source else { panic!("a GGUF file") };
    let q = g.tensor("blk.0.attn_q.weight").expect("a matrix");
    assert_eq!(q.ty(), GgmlType::Block(BlockType::Q8_0));
    let (d, moved) = (differ(&want, &logits(&b, &merged, None)), differ(&want, &plain));
    assert!(d < 0.2 && moved > 10.0 * d, "{d} {moved}");
}

#[test]
fn embeddings_follow_the_adapters() {
    let (b, dir) = (Backend::cpu().expect("the CPU"), tempfile::tempdir().expect("a folder"));
    let place = data("data/llama");
    let mut model = ModelFile::open(&place).expect("a model");
    let lora = random(&model, &b, &["v_proj"], 4);
    let (peft, merged) = (dir.path().join("adapter"), dir.path().join("merged"));
    lora.save(&peft, "base").expect("written");
    write_merged_folder(&mut model, &lora, (&merged, Some(DType::F32)), &|| false, &mut |_| {})
        .expect("written");
    let embed = |path: &Path, adapters: Vec<(PathBuf, f32)>| {
        let options = EmbedOptions { adapters, ..EmbedOptions::default() };
        let mut e = Embedder::open(&b, path, &options).expect("an embedder");
        e.embed_tokens(&[&[3, 4, 5, 6]]).expect("a vector").remove(0)
    };
    let (want, got) = (embed(&merged, vec![]), embed(&place, vec![(peft.clone(), 1.0)]));
    assert!(differ(&want, &got) < 1e-3, "{}", differ(&want, &got));
    assert!(differ(&want, &embed(&place, vec![(peft, 0.0)])) > 0.05, "the adapters matter");
}

#[test]
fn wrong_adapter_files_are_errors() {
    let (b, dir) = (Backend::cpu().expect("the CPU"), tempfile::tempdir().expect("a folder"));
    let folder = ModelFile::open(&data("data/llama")).expect("a model");
    let file = as_gguf(&folder, &dir.path().join("m.gguf"), None);
    let lora = random(&file, &b, &["q_proj"], 5);
    let load = |path: &Path| Lora::load(path, &file, &b).map(drop).expect_err("an error").to_string();
    let place = dir.path().join("adapter.gguf");
    for (key, value, what) in [
        ("general.type", Value::from("model"), "adapter"),
        ("adapter.type", Value::from("control_vector"), "control_vector"),
        ("general.architecture", Value::from("qwen2"), "qwen2"),
        ("adapter.lora.alpha", Value::from(f32::NAN), "alpha"),
    ] {
        adapter_file(&lora, &place, &[(key, value)]);
        assert!(load(&place).contains(what), "{key}: {}", load(&place));
    }
    // A model in place of an adapter, a matrix that has none, and one half of an adapter.
    assert!(load(&file.path).contains("adapter"), "{}", load(&file.path));
    for names in
        [vec!["token_embd.weight.lora_a", "token_embd.weight.lora_b"], vec!["blk.0.attn_q.weight.lora_a"]]
    {
        let metadata =
            [("general.type", "adapter"), ("adapter.type", "lora"), ("general.architecture", "llama")];
        let metadata: Vec<(String, Value)> = metadata.map(|(k, v)| (k.into(), v.into())).to_vec();
        let bytes = [0u8; 16];
        let parts: Vec<_> =
            names.iter().map(|n| (TensorInfo::new(*n, &[2, 2], GgmlType::F32), &bytes[..])).collect();
        gguf::write(&place, &metadata, &parts).expect("written");
        let e = load(&place);
        assert!(e.contains("token_embd") || e.contains("one of its two"), "{e}");
    }
}

fn loss(decoder: &Decoder, tokens: &Tensor) -> Result<Tensor> {
    let n = tokens.dims()?[1] - 1;
    let (seen, next) = (tokens.narrow(1, 0, n), tokens.narrow(1, 1, n).flatten(0, -1));
    Ok(cross_entropy(&decoder.sequence_logits(&seen)?, &next, CrossEntropyOptions::default()))
}

/// Every adapter of every family gets a gradient, and one of them is compared with differences of the loss.
#[test]
fn gradients_reach_the_adapters_of_every_family() {
    if halcyon_test::left_out("gradients_reach_the_adapters_of_every_family") {
        return;
    }
    let b = Backend::cpu().expect("the CPU");
    let ids: Vec<i32> = (0..18).map(|i| 3 + i * 7 % 50).collect();
    let tokens = Tensor::from_slice(&b, [2, 9], &ids).expect("tokens");
    let families = ["llama", "qwen2", "qwen3", "qwen3_moe", "gemma3", "gemma4-moe", "gpt_oss"];
    for family in families {
        let model = ModelFile::open(&data("data").join(family)).expect("a model");
        let lora = random(&model, &b, &["*_proj"], 7);
        let decoder = loaded(&b, &model, Some(&lora));
        let (_, grads) = loss_and_grads(&lora, |_| loss(&decoder, &tokens)).expect("gradients");
        assert_eq!(grads.len(), 2 * lora.matrices().count(), "{family}");
        let mut largest = (0f32, None);
        for (path, slot) in lora.parameters() {
            let grad = grads.get(&path).expect("a gradient").to_vec::<f32>().expect("values");
            let length = grad.iter().map(|g| g * g).sum::<f32>().sqrt();
            assert!(length.is_finite() && length > 0.0, "{family} {path}: {length}");
            if length > largest.0 {
                largest = (length, Some((path, slot, grad)));
            }
        }
        let (length, Some((path, slot, grad))) = largest else { panic!("{family} has no gradients") };
        let dims = slot.value().dims().expect("dims");
        let values = slot.value().to_vec::<f32>().expect("values");
        // Small, so that no row changes its experts.
        let step = 0.0005 / length;
        let at = |by: f32| -> f64 {
            let v: Vec<f32> = values.iter().zip(&grad).map(|(v, g)| v + by * g).collect();
            slot.set(Tensor::from_slice(&b, &dims, &v).expect("values")).expect("set");
            f64::from(loss(&decoder, &tokens).expect("a loss").item::<f32>().expect("a loss"))
        };
        let (slope, want) = ((at(step) - at(-step)) / f64::from(2.0 * step), f64::from(length * length));
        assert!((slope - want).abs() < 0.01 * want, "{family} {path}: {slope}, {want}");
    }
}

/// Adapters of a GGUF file have the names that a folder of the family has.
#[test]
fn adapters_of_files_have_the_names_of_folders() {
    let (b, dir) = (Backend::cpu().expect("the CPU"), tempfile::tempdir().expect("a folder"));
    for family in ["lfm2", "mixtral", "llama", "glm4_moe"] {
        let folder = ModelFile::open(&data("data").join(family)).expect("a model");
        let file = as_gguf(&folder, &dir.path().join(format!("{family}.gguf")), None);
        let names = |model: &ModelFile| {
            let o = LoraOptions { rank: 1, targets: vec!["*".into()], ..LoraOptions::default() };
            let to = dir.path().join("names");
            Lora::new(model, &b, &o).expect("adapters").save(&to, "base").expect("written");
            let stored = SafeTensors::open(&to.join("adapter_model.safetensors")).expect("adapters");
            let mut all: Vec<String> = stored.names().map(String::from).collect();
            all.sort();
            all
        };
        let want = names(&folder);
        assert!(want.len() > 8, "{want:?}");
        assert_eq!(names(&file), want, "{family}");
    }
}
