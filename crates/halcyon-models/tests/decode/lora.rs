//! Adapters: gradients, training, PEFT's files.

use crate::common::*;
use halcyon::prelude::*;
use halcyon::{BlockType, Error};
use halcyon_formats::gguf::TensorInfo;
use halcyon_formats::npz::Npz;
use halcyon_models::{Decoder, LoadOptions, Lora, LoraOptions, ModelFile, Source};
use halcyon_nn::{Adam, CrossEntropyOptions, ModuleExt, Optimizer, TrainStep, cross_entropy, loss_and_grads};
use halcyon_test::{Rng, devices};
use std::path::{Path, PathBuf};
use std::sync::Arc;

fn data(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests").join(name)
}

fn random(tensors: &[(TensorInfo, Vec<u8>)]) -> ModelFile {
    let source = file(&metadata("llama"), tensors);
    let spec = halcyon_models::family::spec(&source).expect("the configuration is valid");
    ModelFile { path: "random.gguf".into(), source, spec }
}

fn adapted(b: &Backend, model: &ModelFile, lora: &Lora) -> Arc<Decoder> {
    Arc::new(
        model.load(b, LoadOptions { lora: Some(lora), ..LoadOptions::from(64) }).expect("the weights load"),
    )
}

fn cpu() -> Backend {
    Backend::new(BackendType::Cpu).expect("the CPU")
}

/// Whole sequences without a cache give the logits of steps with a cache.
#[test]
fn whole_sequences_have_the_logits_of_steps() {
    let b = cpu();
    let attention = ["llama", "gemma2", "gpt_oss", "falcon", "qwen3_moe", "gpt2", "llama-dynamic"];
    let recurrent = ["qwen3_5", "qwen3_5_moe", "qwen3_next", "granitemoehybrid", "lfm2"];
    for family in attention.into_iter().chain(recurrent) {
        let dir = data("data").join(family);
        let source = Source::open(&dir).expect("the model opens");
        let decoder = decoder(&b, &source, 64);
        let size = decoder.spec.vocabulary;
        let rows: Vec<Vec<u32>> =
            vec![(0..40).map(|i| i * 7 % 60).collect(), (0..40).map(|i| i * i % 50).collect()];
        let ids: Vec<i32> = rows.concat().iter().map(|t| *t as i32).collect();
        let tokens = Tensor::from_slice(&b, [2, 40], &ids).expect("tokens");
        let got = decoder.sequence_logits(&tokens).expect("logits").to_vec::<f32>().expect("logits");
        let want =
            rows.iter().flat_map(|r| feed(&mut engine(&decoder, 1, 512), r, true)).collect::<Vec<f32>>();
        let largest = want.iter().fold(0f32, |m, v| m.max(v.abs()));
        let far = got.iter().zip(&want).map(|(g, w)| (g - w).abs()).fold(0.0, f32::max);
        assert_eq!(got.len(), 2 * 40 * size, "{family}");
        assert!(far < 1e-4 * largest.max(1.0), "{family}: off by {far}");
        assert!(decoder.sequence_logits(&tokens.reshape([80])).is_err());
        assert!(decoder.sequence_logits(&Tensor::zeros(&b, [1, 65], DType::I32)).is_err());
    }
}

/// The loss of the next tokens.
fn loss(decoder: &Decoder, tokens: &Tensor) -> Result<Tensor> {
    let dims = tokens.dims()?;
    let seen = tokens.narrow(1, 0, dims[1] - 1);
    let next = tokens.narrow(1, 1, dims[1] - 1).flatten(0, -1);
    Ok(cross_entropy(&decoder.sequence_logits(&seen)?, &next, CrossEntropyOptions::default()))
}

fn batch(b: &Backend) -> Tensor {
    let mut rng = Rng::new(4);
    let ids: Vec<i32> = (0..2 * 9).map(|_| rng.below(VOCABULARY) as i32).collect();
    Tensor::from_slice(b, [2, 9], &ids).expect("tokens")
}

#[test]
fn gradients_are_the_differences_of_the_loss() {
    if halcyon_test::left_out("gradients_are_the_differences_of_the_loss") {
        return;
    }
    let name = "gradients_are_the_differences_of_the_loss";
    for b in devices::devices(name, Level::O2) {
        // Weights in blocks: the CPU rounds activations to 8 bits, so differences would be rough.
        let types: &[Option<BlockType>] = if is_cpu(&b) { &[None] } else { &[None, Some(BlockType::Q4_0)] };
        for blocks in types {
            let model = random(&tensors(*blocks));
            let targets = vec!["[qv]_proj".into(), "down_proj".into()];
            let lora = Lora::new(&model, &b, &LoraOptions { rank: 3, targets, ..LoraOptions::default() });
            let lora = lora.expect("adapters");
            assert_eq!(lora.matrices().count(), 6);
            // B begins with zeros, where A has no gradient.
            let mut rng = Rng::new(8);
            for (path, slot) in lora.parameters().iter().filter(|(path, _)| path.ends_with(".b")) {
                let dims = slot.value().dims().expect("dims");
                let v: Vec<f32> = rng.f32s(dims.iter().product()).iter().map(|v| v * 0.1).collect();
                slot.set(Tensor::from_slice(&b, &dims, &v).expect("values")).expect(path);
            }
            let (decoder, tokens) = (adapted(&b, &model, &lora), batch(&b));
            let (_, grads) = loss_and_grads(&lora, |_| loss(&decoder, &tokens)).expect("gradients");
            assert_eq!(grads.len(), 12);
            for (path, slot) in lora.parameters() {
                let grad = grads.get(&path).expect("a gradient").to_vec::<f32>().expect("values");
                let dims = slot.value().dims().expect("dims");
                let values = slot.value().to_vec::<f32>().expect("values");
                // Along the gradient itself, where the difference is largest.
                let length = grad.iter().map(|g| g * g).sum::<f32>().sqrt();
                let step = 0.02 / length;
                let at = |by: f32| -> f64 {
                    let v: Vec<f32> = values.iter().zip(&grad).map(|(v, g)| v + by * g).collect();
                    slot.set(Tensor::from_slice(&b, &dims, &v).expect("values")).expect("set");
                    f64::from(loss(&decoder, &tokens).expect("a loss").item::<f32>().expect("a loss"))
                };
                let slope = (at(step) - at(-step)) / f64::from(2.0 * step);
                at(0.0);
                let want = f64::from(length * length);
                assert!((slope - want).abs() < 0.03 * want, "{} {blocks:?} {path}: {slope}, {want}", b.id());
            }
        }
    }
}

#[test]
fn training_lowers_the_loss_and_files_keep_the_adapters() {
    let b = cpu();
    for blocks in [None, Some(BlockType::Q8_0)] {
        let model = random(&tensors(blocks));
        let lora = Lora::new(&model, &b, &LoraOptions::default()).expect("adapters");
        let (decoder, tokens) = (adapted(&b, &model, &lora), batch(&b));
        let plain = Arc::new(model.load(&b, 64).expect("the weights load"));
        let before = loss(&plain, &tokens).expect("a loss").item::<f32>().expect("a loss");
        let optimizer = Optimizer::new(&lora, Adam::w().rate(0.02)).expect("an optimizer");
        let mut step =
            TrainStep::new(&lora, optimizer, |_: &&Lora, x: &[Tensor]| Ok(vec![loss(&decoder, &x[0])?]));
        let step = step.as_mut().expect("a step");
        let mut losses = vec![];
        for _ in 0..25 {
            losses.push(step.run(&[&tokens]).expect("a step")[0].item::<f32>().expect("a loss"));
        }
        // New adapters change nothing.
        assert!((losses[0] - before).abs() < 1e-5, "{} {before}", losses[0]);
        assert!(losses[24] < 0.6 * before, "{losses:?}");
        let want = feed(&mut engine(&decoder, 1, 512), &[1, 2, 3], true);
        let dir = tempfile::tempdir().expect("a folder");
        lora.save(dir.path(), "random").expect("written");
        let read = Lora::load(dir.path(), &model, &b).expect("adapters");
        let again = adapted(&b, &model, &read);
        assert_eq!(bits(&feed(&mut engine(&again, 1, 512), &[1, 2, 3], true)), bits(&want));
        // Merged into the matrices.
        let mut all = tensors(blocks);
        for (t, bytes) in &mut all {
            let stem = t.name.trim_end_matches(".weight").to_string();
            if let Some(m) = lora.merged(&model, &stem).expect("a matrix") {
                *t = TensorInfo::new(t.name.clone(), &m.dims, halcyon_formats::gguf::GgmlType::F32);
                *bytes = m.bytes().to_vec();
            }
        }
        let merged = random(&all);
        let merged = Arc::new(merged.load(&b, 64).expect("the weights load"));
        let got = feed(&mut engine(&merged, 1, 512), &[1, 2, 3], true);
        let far = got.iter().zip(&want).map(|(g, w)| (g - w).abs()).fold(0.0, f32::max);
        // With blocks, the products of the base matrix round activations to 8 bits, and merged ones do not.
        let (spread, bound) =
            (want.iter().map(|v| v.abs()).fold(0.0, f32::max), if blocks.is_none() { 1e-4 } else { 0.05 });
        assert!(far < bound * spread, "{blocks:?}: {far} of {spread}");
    }
}

#[test]
fn an_adapter_of_peft_gives_its_logits() {
    let name = "an_adapter_of_peft_gives_its_logits";
    let model = ModelFile::open(&data("data/llama")).expect("the model opens");
    let stored = Npz::open(&data("lora/expected.npz")).expect("the expected values");
    let ids: Vec<u32> = stored.get("ids").expect("ids").to_vec::<i64>().iter().map(|v| *v as u32).collect();
    let want = stored.get("logits").expect("logits").to_vec::<f64>();
    for b in devices::devices(name, Level::O2) {
        let lora = Lora::load(&data("lora"), &model, &b).expect("adapters");
        let decoder = adapted(&b, &model, &lora);
        let got = feed(&mut engine(&decoder, 1, 512), &ids, true);
        let far = got.iter().zip(&want).map(|(g, w)| (f64::from(*g) - w).abs()).fold(0.0, f64::max);
        let mean = want.iter().sum::<f64>() / want.len() as f64;
        let std = (want.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / want.len() as f64).sqrt();
        assert!(far < 1e-3 * std, "{}: {far} of {std}", b.id());
        // The adapters matter.
        let plain = Arc::new(model.load(&b, 64).expect("the weights load"));
        let other = feed(&mut engine(&plain, 1, 512), &ids, true);
        let moved = other.iter().zip(&want).map(|(g, w)| (f64::from(*g) - w).abs()).fold(0.0, f64::max);
        assert!(moved > 0.1 * std, "{moved}");
    }
}

#[test]
fn wrong_adapters_are_errors() {
    let b = cpu();
    let model = random(&tensors(None));
    let new = |o: LoraOptions| Lora::new(&model, &b, &o).map(|_| ()).expect_err("an error").to_string();
    assert!(new(LoraOptions { rank: 0, ..Default::default() }).contains("rank"));
    let e = new(LoraOptions { targets: vec!["qkv".into()], ..Default::default() });
    assert!(e.contains("q_proj") && e.contains("qkv"), "{e}");
    assert!(new(LoraOptions { targets: vec!["[".into()], ..Default::default() }).contains("pattern"));
    // An adapter of a model of another size.
    let load = |dir: &Path| Lora::load(dir, &model, &b).map(|_| ()).expect_err("an error");
    assert!(matches!(load(&data("lora")), Error::Shape { .. } | Error::Unsupported { .. }));
    let dir = tempfile::tempdir().expect("a folder");
    assert!(matches!(load(dir.path()), Error::Io { .. }));
    let lora = Lora::new(&model, &b, &LoraOptions::default()).expect("adapters");
    lora.save(dir.path(), "x").expect("written");
    let config = dir.path().join("adapter_config.json");
    let text = std::fs::read_to_string(&config).expect("text");
    for (from, to, what) in [
        ("\"LORA\"", "\"IA3\"", "IA3"),
        ("\"bias\": \"none\"", "\"bias\": \"all\"", "bias"),
        ("\"inference_mode\"", "\"use_dora\"", "use_dora"),
        ("\"lora_alpha\": 16.0", "\"lora_alpha\": \"x\"", "lora_alpha"),
        ("{", "", "adapter_config.json"),
    ] {
        assert!(text.contains(from), "{from}");
        std::fs::write(&config, text.replacen(from, to, 1)).expect("written");
        assert!(load(dir.path()).to_string().contains(what), "{what}: {}", load(dir.path()));
    }
}
