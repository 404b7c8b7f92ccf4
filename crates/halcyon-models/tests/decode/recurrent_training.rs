//! Training of models with recurrent layers: logits of whole sequences, torch's gradients, fine-tuning.

use crate::common::*;
use crate::compare::folder;
use halcyon::prelude::*;
use halcyon_formats::npz::Npz;
use halcyon_formats::safetensors::SafeTensors;
use halcyon_models::export::write_folder;
use halcyon_models::{Decoder, LoadOptions, Lora, LoraOptions, ModelFile};
use halcyon_nn::{Adam, CrossEntropyOptions, ModuleExt, Optimizer, TrainStep, cross_entropy, loss_and_grads};
use halcyon_test::{Rng, devices};
use std::path::PathBuf;
use std::sync::Arc;

const FAMILIES: [&str; 5] = ["qwen3_5", "qwen3_5_moe", "qwen3_next", "granitemoehybrid", "lfm2"];
/// Families with gradients of torch. Those with experts are covered by `qwen3_next`.
const STORED: [&str; 4] = ["qwen3_5", "qwen3_next", "granitemoehybrid", "lfm2"];
const CONTEXT: usize = 256;

fn largest(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

fn deviation(v: &[f32]) -> f32 {
    let mean = v.iter().sum::<f32>() / v.len() as f32;
    (v.iter().map(|v| (v - mean).powi(2)).sum::<f32>() / v.len() as f32).sqrt()
}

fn tokens(b: &Backend, rows: &[Vec<u32>]) -> Tensor {
    let ids: Vec<i32> = rows.concat().iter().map(|t| *t as i32).collect();
    Tensor::from_slice(b, [rows.len(), rows[0].len()], &ids).expect("tokens")
}

/// The loss of the next tokens.
fn loss(decoder: &Decoder, tokens: &Tensor) -> Result<Tensor> {
    let n = tokens.dims()?[1] - 1;
    let (seen, next) = (tokens.narrow(1, 0, n), tokens.narrow(1, 1, n).flatten(0, -1));
    Ok(cross_entropy(&decoder.sequence_logits(&seen)?, &next, CrossEntropyOptions::default()))
}

fn adapted(b: &Backend, model: &ModelFile, lora: &Lora) -> Arc<Decoder> {
    let options = LoadOptions { lora: Some(lora), ..LoadOptions::from(CONTEXT) };
    Arc::new(model.load(b, options).expect("the weights load"))
}

/// Lengths of one chunk, of several, and with a part of one at the end.
#[test]
fn recurrent_sequences_of_any_length_have_the_logits_of_steps() {
    let b = Backend::cpu().expect("the CPU");
    let mut rng = Rng::new(11);
    for family in FAMILIES {
        let model = ModelFile::open(&folder(family)).expect("a model");
        let decoder = Arc::new(model.load(&b, CONTEXT).expect("the weights load"));
        for (batch, length) in [(1, 1), (2, 3), (1, 31), (2, 70)] {
            let rows: Vec<Vec<u32>> =
                (0..batch).map(|_| (0..length).map(|_| rng.below(60) as u32).collect()).collect();
            let got = decoder.sequence_logits(&tokens(&b, &rows)).expect("logits");
            let got = got.to_vec::<f32>().expect("logits");
            let steps = |r: &Vec<u32>| feed(&mut engine(&decoder, 1, 512), r, true);
            let want: Vec<f32> = rows.iter().flat_map(steps).collect();
            let far = largest(&got, &want) / deviation(&want);
            assert!(far < 1e-3, "{family} {batch} x {length}: {far:e}");
        }
    }
}

/// The logits of transformers in float64, also on other devices.
#[test]
fn recurrent_sequences_have_the_stored_logits() {
    for b in devices::devices("recurrent_sequences_have_the_stored_logits", Level::O2) {
        let families = if is_cpu(&b) { &FAMILIES[..] } else { &["qwen3_5"] };
        for family in families {
            let model = ModelFile::open(&folder(family)).expect("a model");
            let stored = Npz::open(&folder(family).join("expected.npz")).expect("the expected values");
            let ids = stored.get("ids").expect("ids").to_vec::<i64>();
            let ids: Vec<u32> = ids.iter().map(|v| *v as u32).collect();
            let want: Vec<f32> =
                stored.get("logits").expect("logits").to_vec::<f64>().iter().map(|v| *v as f32).collect();
            let decoder = model.load(&b, CONTEXT).expect("the weights load");
            let got = decoder.sequence_logits(&tokens(&b, &[ids])).expect("logits");
            let far = largest(&got.to_vec::<f32>().expect("logits"), &want) / deviation(&want);
            assert!(far < 1e-3, "{family} on {}: {far:e}", b.id());
        }
    }
}

/// Of 70 tokens, so that gradients pass from one chunk to the next.
#[test]
fn gradients_of_recurrent_layers_are_those_of_torch() {
    let (b, dir) = (Backend::cpu().expect("the CPU"), tempfile::tempdir().expect("a folder"));
    for family in STORED {
        let model = ModelFile::open(&folder(family)).expect("a model");
        let place = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/lora/gradients").join(family);
        let lora = Lora::load(&place, &model, &b).expect("adapters");
        let decoder = adapted(&b, &model, &lora);
        let stored = Npz::open(&place.join("gradients.npz")).expect("the expected values");
        let ids = stored.get("ids").expect("ids").to_vec::<i64>().iter().map(|v| *v as u32).collect();
        let (value, grads) =
            loss_and_grads(&lora, |_| loss(&decoder, &tokens(&b, &[ids]))).expect("gradients");
        let want = stored.get("loss").expect("loss").to_vec::<f64>()[0];
        let value = f64::from(value.item::<f32>().expect("a loss"));
        assert!((value - want).abs() < 1e-4 * want, "{family}: {value} {want}");
        // With the gradients as values, the saved file has them under PEFT's names.
        for (path, slot) in lora.parameters() {
            slot.set(grads.get(&path).expect("a gradient").clone()).expect("set");
        }
        lora.save(dir.path(), family).expect("written");
        let file = SafeTensors::open(&dir.path().join("adapter_model.safetensors")).expect("gradients");
        let names: Vec<&str> = file.names().collect();
        assert!(names.len() >= 14, "{family}: {names:?}");
        for name in names {
            let got = file.get(name).expect("a gradient").to_vec::<f32>();
            let want: Vec<f32> =
                stored.get(name).expect(name).to_vec::<f64>().iter().map(|v| *v as f32).collect();
            let length = want.iter().map(|v| v * v).sum::<f32>().sqrt();
            let far = got.iter().zip(&want).map(|(g, w)| (g - w).powi(2)).sum::<f32>().sqrt();
            assert!(length > 0.0 && far < 1e-3 * length, "{family} {name}: {far:e} of {length:e}");
        }
    }
}

#[test]
fn fine_tuning_lowers_the_loss_of_models_with_recurrent_layers() {
    let b = Backend::cpu().expect("the CPU");
    for family in FAMILIES {
        let model = ModelFile::open(&folder(family)).expect("a model");
        let targets = vec!["*_proj".into(), "in_proj*".into()];
        let options = LoraOptions { rank: 4, targets, ..LoraOptions::default() };
        let lora = Lora::new(&model, &b, &options).expect("adapters");
        let recurrent = |s: &str| [".ssm_out", ".shortconv.out_proj"].iter().any(|n| s.ends_with(n));
        assert!(lora.matrices().any(recurrent), "{family}");
        let decoder = adapted(&b, &model, &lora);
        let mut rng = Rng::new(4);
        let rows: Vec<Vec<u32>> = (0..2).map(|_| (0..20).map(|_| rng.below(60) as u32).collect()).collect();
        let x = tokens(&b, &rows);
        let optimizer = Optimizer::new(&lora, Adam::w().rate(0.02)).expect("an optimizer");
        let mut step =
            TrainStep::new(&lora, optimizer, |_: &&Lora, x: &[Tensor]| Ok(vec![loss(&decoder, &x[0])?]))
                .expect("a step");
        let mut run = || step.run(&[&x]).expect("a step")[0].item::<f32>().expect("a loss");
        let losses: Vec<f32> = (0..20).map(|_| run()).collect();
        assert!(losses[19] < 0.7 * losses[0], "{family}: {losses:?}");
    }
}

/// Qwen 3.5's GGUF files have another order of the value heads, in rows and columns.
#[test]
fn adapters_of_a_scan_have_the_same_effect_in_all_files() {
    let (b, dir) = (Backend::cpu().expect("the CPU"), tempfile::tempdir().expect("a folder"));
    let file = ModelFile::open(&folder("gguf").join("qwen3_5_moe.gguf")).expect("a model");
    let (place, peft) = (dir.path().join("folder"), dir.path().join("adapter"));
    write_folder(&file.source, &place, DType::F32, &|| false, &mut |_| {}).expect("written");
    let base = ModelFile::open(&place).expect("a model");
    let logits = |model: &ModelFile, lora: Option<&Lora>| {
        let options = LoadOptions { lora, ..LoadOptions::from(64) };
        let decoder = Arc::new(model.load(&b, options).expect("the weights load"));
        feed(&mut engine(&decoder, 1, 512), &(3..30).collect::<Vec<u32>>(), true)
    };
    let plain = logits(&file, None);
    assert!(largest(&plain, &logits(&base, None)) < 1e-3 * deviation(&plain));
    for target in ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"] {
        let targets = vec![target.to_string()];
        let lora = Lora::new(&file, &b, &LoraOptions { rank: 3, targets, ..LoraOptions::default() });
        let (lora, mut rng) = (lora.expect(target), Rng::new(3));
        for (path, slot) in lora.parameters().iter().filter(|(path, _)| path.ends_with(".b")) {
            let dims = slot.value().dims().expect("dims");
            let v: Vec<f32> = rng.f32s(dims.iter().product()).iter().map(|v| v * 0.2).collect();
            slot.set(Tensor::from_slice(&b, &dims, &v).expect("values")).expect(path);
        }
        let want = logits(&file, Some(&lora));
        lora.save(&peft, "base").expect("written");
        for model in [&base, &file] {
            let read = Lora::load(&peft, model, &b).expect("adapters");
            let far = largest(&want, &logits(model, Some(&read)));
            let moved = largest(&want, &plain);
            assert!(far < 1e-3 * moved.min(1.0), "{target} on {:?}: {far:e} of {moved:e}", model.path);
        }
    }
}
