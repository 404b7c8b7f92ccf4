//! Adapters of encoders: their effect is that of merged matrices, also from GGUF files.

use halcyon::ConstData;
use halcyon::prelude::*;
use halcyon_formats::gguf::GgmlType;
use halcyon_formats::safetensors::{self, SafeTensors};
use halcyon_models::export::{Content, WriteOptions, merged_content, write, write_merged_folder};
use halcyon_models::{EmbedOptions, Embedder, Lora, LoraOptions, ModelFile};
use halcyon_nn::ModuleExt;
use halcyon_test::Rng;
use std::path::{Path, PathBuf};

fn encoder(path: &Path) -> ModelFile {
    ModelFile::open_any(path).expect("a model")
}

/// Writes a GGUF file of a model with adapters merged, in f32.
fn merge(model: &Path, adapters: &Path, to: &Path) {
    let (b, mut model) = (Backend::cpu().expect("the CPU"), encoder(model));
    let lora = Lora::load(adapters, &model, &b).expect("adapters");
    let (mut content, _) = merged_content(&mut model, &lora).expect("a content");
    let types = content.expand(DType::F32).expect("types");
    let mut options =
        WriteOptions { threads: None, requantise: true, interrupted: &|| false, progress: &mut || {} };
    write(&content, &types, to, &mut options).expect("written");
}

fn embed(b: &Backend, path: &Path, adapters: &[(PathBuf, f32)]) -> Vec<f32> {
    let options = EmbedOptions { adapters: adapters.to_vec(), ..EmbedOptions::default() };
    let mut e = Embedder::open(b, path, &options).expect("an embedder");
    e.embed_tokens(&[&[3, 4, 5, 6, 7]]).expect("a vector").remove(0)
}

fn largest(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

#[test]
fn encoders_follow_their_adapters() {
    let (b, dir) = (Backend::cpu().expect("the CPU"), tempfile::tempdir().expect("a folder"));
    for (family, target) in
        [("bert", "query"), ("bert", "dense"), ("xlm-roberta", "value"), ("modernbert", "Wo")]
    {
        let place = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/embed/data").join(family);
        let mut model = encoder(&place);
        let options = LoraOptions { rank: 2, targets: vec![target.into()], ..LoraOptions::default() };
        let (lora, mut rng) = (Lora::new(&model, &b, &options).expect("adapters"), Rng::new(6));
        for (path, slot) in lora.parameters().iter().filter(|(path, _)| path.ends_with(".b")) {
            let dims = slot.value().dims().expect("dims");
            let v: Vec<f32> = rng.f32s(dims.iter().product()).iter().map(|v| v * 0.3).collect();
            slot.set(Tensor::from_slice(&b, &dims, &v).expect("values")).expect(path);
        }
        let to = |name: &str| dir.path().join(format!("{family}-{target}-{name}"));
        let (peft, merged, file) = (to("peft"), to("merged"), to("m.gguf"));
        lora.save(&peft, family).expect("written");
        let content = Content::of(&model.source).expect("a content");
        let types: Vec<GgmlType> = content.tensors.iter().map(|t| t.info.ty).collect();
        let mut options =
            WriteOptions { threads: None, requantise: false, interrupted: &|| false, progress: &mut || {} };
        write(&content, &types, &file, &mut options).expect("written");
        drop(content);
        write_merged_folder(&mut model, &lora, (&merged, Some(DType::F32)), &|| false, &mut |_| {})
            .expect("written");
        // Names as of a model that was trained with a head.
        let other = to("other");
        std::fs::create_dir(&other).expect("a folder");
        std::fs::copy(peft.join("adapter_config.json"), other.join("adapter_config.json")).expect("copied");
        let stored = SafeTensors::open(&peft.join("adapter_model.safetensors")).expect("adapters");
        let named: Vec<(String, ConstData)> = stored
            .names()
            .map(|n| {
                (n.replace("base_model.model.", "base_model.model.bert."), stored.get(n).expect("values"))
            })
            .collect();
        let named: Vec<(&str, &ConstData)> = named.iter().map(|(n, t)| (n.as_str(), t)).collect();
        safetensors::write(&other.join("adapter_model.safetensors"), &named, &Default::default())
            .expect("written");
        let (want, plain) = (embed(&b, &merged, &[]), embed(&b, &place, &[]));
        let moved = largest(&want, &plain);
        assert!(moved > 1e-3, "{family} {target}: the adapters matter: {moved:e}");
        // ModernBERT's GGUF files are the same model too.
        for (base, adapter) in [(&place, &peft), (&file, &peft), (&place, &other)] {
            let far = largest(&want, &embed(&b, base, &[(adapter.clone(), 1.0)]));
            assert!(far < 1e-3 * moved.max(1.0), "{family} {target} on {base:?}: {far:e} of {moved:e}");
        }
        // Merged into a file, of the folder and of its file.
        for (base, what) in [(&place, "folder"), (&file, "file")] {
            let made = to(&format!("{what}-merged.gguf"));
            merge(base, &peft, &made);
            let far = largest(&want, &embed(&b, &made, &[]));
            assert!(far < 1e-3 * moved.max(1.0), "{family} {target}, {what}: {far:e} of {moved:e}");
        }
    }
}

/// The modules of sentence-transformers are part of a merged folder.
#[test]
fn merged_folders_keep_how_vectors_are_pooled() {
    let (b, dir) = (Backend::cpu().expect("the CPU"), tempfile::tempdir().expect("a folder"));
    let place = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/embed/data/qwen3-lasttoken");
    let mut model = encoder(&place);
    let lora = Lora::new(&model, &b, &LoraOptions::default()).expect("adapters");
    let to = dir.path().join("merged");
    write_merged_folder(&mut model, &lora, (&to, None), &|| false, &mut |_| {}).expect("written");
    let read = |n: &str| [&place, &to].map(|p| std::fs::read(p.join(n)).expect("a file"));
    for name in ["modules.json", "1_Pooling/config.json"] {
        let [old, new] = read(name);
        assert_eq!(old, new, "{name}");
    }
    // New adapters change nothing.
    assert_eq!(embed(&b, &to, &[]), embed(&b, &place, &[]));
}
