//! Decoders on several devices.

use crate::batch::invariant;
use crate::common::*;
use crate::stored::{folder, folders};
use halcyon::prelude::*;
use halcyon_formats::npz::Npz;
use halcyon_models::fit::{StepSize, generation};
use halcyon_models::spec::Order;
use halcyon_models::{
    Batch, CacheLayout, Decoder, Event, Feed, GenerateOptions, LayerPlace, LoadOptions, Lora, LoraOptions,
    MemoryNeed, ModelFile, Placement, Request, Sampling, Source, Speculation, SpeculationOptions, family,
    generate,
};
use halcyon_nn::ModuleExt;
use halcyon_test::{Rng, devices, one_in};
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

fn cpu() -> Backend {
    Backend::new(BackendType::Cpu).expect("the CPU")
}

fn opencl(test: &str) -> Option<Backend> {
    if !devices::test_backends().contains(&BackendType::OpenCl) {
        return None;
    }
    devices::open(test, BackendType::OpenCl, Level::O2)
}

fn placed(p: Placement, source: &Source) -> Arc<Decoder> {
    let spec = family::spec(source).expect("the configuration is valid");
    Arc::new(Decoder::load_on(p, source, spec, 64).expect("the weights are loaded"))
}

/// Placements on two devices: halves, the last layer alone, and all feed-forward parts apart.
fn placements(a: &Backend, b: &Backend, source: &Source) -> Vec<(&'static str, Placement)> {
    let probe = decoder(a, source, 64);
    let spec = &probe.spec;
    let n = spec.layers.len();
    let layout = CacheLayout { pages: 8, page: 4, types: DType::F32.into(), sequences: 1 };
    let two = [a.clone(), b.clone()];
    let mut all = vec![];
    match Placement::by_shares(&two, &[1.0, 1.0], &probe, layout) {
        Ok(p) => all.push(("halves", p)),
        Err(e) => assert!(spec.family == "gemma4" && e.to_string().contains("1 groups"), "{e}"),
    }
    match Placement::last_layers(a, b, 1, spec) {
        Ok(p) => all.push(("the last layer", p)),
        Err(e) => assert!(spec.family == "gemma4" && e.to_string().contains("keys and values"), "{e}"),
    }
    if spec.layers.iter().all(|l| !matches!(l.order, Order::Parallel | Order::ParallelTwo)) {
        let one = LayerPlace { mixer: 0, feed_forward: 1 };
        let p = Placement { devices: two.to_vec(), embedding: 0, layers: vec![one; n], head: 0 };
        all.push(("feed-forward parts", p));
        if let Ok(p) = Placement::single(a, n).experts_on(b, n, spec) {
            all.push(("experts", p));
        }
    }
    assert!(!all.is_empty());
    all
}

/// A prompt in chunks, one more token, the tokens after a cut, and the first of the largest logits.
fn logits(decoder: &Arc<Decoder>) -> Vec<f32> {
    let size = decoder.spec.vocabulary as u32;
    let prompt: Vec<u32> = (0..21).map(|i| (i * 7 + 3) % size).collect();
    let mut e = engine(decoder, 1, 8);
    let mut all = feed(&mut e, &prompt, true);
    all.extend(feed(&mut e, &[5], false));
    e.truncate(0, 20);
    all.extend(feed(&mut e, &[2, 3], false));
    let largest = e.feed_largest(0, 4, 3).expect("logits");
    e.truncate(0, 22);
    let z = feed(&mut e, &[4], false);
    assert_eq!(largest[0].1.to_bits(), z[largest[0].0 as usize].to_bits());
    assert_eq!(largest[0].0, best(&z));
    all.extend(z);
    assert!(e.is_whole());
    all
}

/// Two devices of one kind compute the bits of one device, for every family and placement.
#[test]
fn a_split_over_devices_of_one_kind_has_the_same_bits() {
    let (a, b) = (cpu(), cpu());
    // Kinds of layers that are special here, and some others.
    let special = ["gemma4", "gemma4-moe", "gemma4-shared", "qwen3_5_moe", "lfm2", "deepseek_v2", "falcon"];
    let is_special = |d: &Path| special.iter().any(|s| d.ends_with(s));
    let (step, mut rng) = (one_in(6), Rng::fresh("a_split_over_devices_of_one_kind"));
    let (special, others): (Vec<_>, Vec<_>) = folders().into_iter().partition(|d| is_special(d));
    let first = rng.below(step);
    for dir in special.iter().chain(others.iter().skip(first).step_by(step)) {
        let source = Source::open(dir).expect("the model opens");
        let want = bits(&logits(&decoder(&a, &source, 64)));
        for (how, p) in placements(&a, &b, &source) {
            let d = placed(p, &source);
            assert_eq!(bits(&logits(&d)), want, "{}: {how}", dir.display());
        }
    }
}

/// The logits that transformers computes, on two APIs together.
#[test]
fn a_split_over_cpu_and_opencl_computes_the_stored_logits() {
    if halcyon_test::left_out("a_split_over_cpu_and_opencl_computes_the_stored_logits") {
        return;
    }
    let Some(b) = opencl("a_split_over_cpu_and_opencl_computes_the_stored_logits") else { return };
    let a = cpu();
    for family in ["smollm3", "gemma4-shared", "gemma4-moe", "qwen3_5_moe"] {
        let dir = folder(family);
        let source = Source::open(&dir).expect("the model opens");
        let stored = Npz::open(&dir.join("expected.npz")).expect("the expected values");
        let ids = stored.get("ids").expect("an array").to_vec::<i64>();
        let ids: Vec<u32> = ids.iter().map(|v| *v as u32).collect();
        let want = stored.get("logits").expect("an array").to_vec::<f64>();
        let mean = want.iter().sum::<f64>() / want.len() as f64;
        let std = (want.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / want.len() as f64).sqrt();
        for (how, p) in placements(&b, &a, &source) {
            let got = feed(&mut engine(&placed(p, &source), 1, 512), &ids, true);
            assert_eq!(got.len(), want.len());
            let far = got.iter().zip(&want).map(|(g, w)| (f64::from(*g) - w).abs()).fold(0.0, f64::max);
            assert!(far <= 1e-3 * std, "{family}, {how}: off by {far}, deviation {std}");
        }
    }
}

#[test]
fn batches_do_not_change_logits_under_a_split() {
    if halcyon_test::left_out("batches_do_not_change_logits_under_a_split") {
        return;
    }
    let Some(b) = opencl("batches_do_not_change_logits_under_a_split") else { return };
    let a = cpu();
    let mut rng = Rng::new(3);
    let prompts: Vec<Vec<u32>> =
        (0..7).map(|i| (0..1 + i * 5 % 19).map(|_| rng.below(250) as u32).collect()).collect();
    for (name, t) in [("f32", tensors(None)), ("q4_k_m", tensors_q4_k_m())] {
        let source = file(&metadata("llama"), &t);
        let spec = family::spec(&source).expect("the configuration is valid");
        let p = Placement::last_layers(&a, &b, 1, &spec).expect("a placement");
        invariant(&placed(p, &source), &prompts, &[7], &format!("cpu, opencl, cpu, {name}"));
    }
    let source = Source::open(&folder("qwen3_5_moe")).expect("the model opens");
    let small: Vec<Vec<u32>> = prompts.iter().map(|p| p.iter().map(|t| t % 50).collect()).collect();
    let some = placements(&b, &a, &source).into_iter().filter(|(how, _)| ["halves", "experts"].contains(how));
    for (how, p) in some {
        invariant(&placed(p, &source), &small[..3], &[3], &format!("qwen3_5_moe, {how}"));
    }
}

fn random() -> ModelFile {
    let source = file(&metadata("llama"), &tensors(None));
    let spec = family::spec(&source).expect("the configuration is valid");
    ModelFile { path: "random.gguf".into(), source, spec }
}

/// Generation, batches, speculation and adapters do not know of devices.
#[test]
fn what_uses_an_engine_works_under_a_split() {
    let (a, b) = (cpu(), cpu());
    let model = random();
    let options = LoraOptions { targets: vec!["*_proj".into()], ..LoraOptions::default() };
    let lora = Lora::new(&model, &a, &options).expect("adapters");
    // Adapters begin without an effect.
    let mut rng = Rng::new(8);
    for (_, slot) in lora.parameters() {
        let dims = slot.value().dims().expect("a matrix");
        let values: Vec<f32> = rng.f32s(dims.iter().product()).iter().map(|v| v * 0.2).collect();
        slot.set(Tensor::from_slice(&a, &dims, &values).expect("values")).expect("the same type");
    }
    let load = LoadOptions { lora: Some(&lora), ..LoadOptions::from(64) };
    let one = Arc::new(model.load(&a, load).expect("the weights load"));
    let p = Placement::last_layers(&a, &b, 1, &model.spec).expect("a placement");
    let two = Arc::new(model.load_on(p, load).expect("the weights load"));
    let plain = decoder(&a, &model.source, 64);
    let all = [&one, &two, &plain].map(|d| bits(&logits(d)));
    assert_eq!(all[0], all[1]);
    assert_ne!(all[0], all[2], "the adapters have no effect");

    let o = GenerateOptions { max_tokens: Some(12), sampling: Sampling::greedy(), ..Default::default() };
    let prompt = [1u32, 60, 61, 60, 61];
    let tokens = |d: &Arc<Decoder>| {
        let mut e = engine(d, 2, 8);
        let made = generate(&mut e, 0, None, &prompt, &o, &mut |_| ControlFlow::Continue(()));
        let alone = made.expect("tokens").tokens;
        let mut s = Speculation::lookup(SpeculationOptions::default()).expect("a speculation");
        e.truncate(0, 0);
        let made = s.generate(&mut e, 0, None, &prompt, &o, &mut |_| ControlFlow::Continue(()));
        assert_eq!(made.expect("tokens").tokens, alone);
        e.truncate(0, 0);
        let mut batch = Batch::new(None);
        for _ in 0..3 {
            let request = Request { prompt: prompt.to_vec(), options: o.clone() };
            batch.push(&e, request).expect("a request");
        }
        let mut done = 0;
        while !batch.is_idle() {
            for (_, event) in batch.step(&mut e).expect("a step") {
                if let Event::Done(g) = event {
                    assert_eq!(g.tokens, alone);
                    done += 1;
                }
            }
        }
        assert_eq!(done, 3);
        alone
    };
    assert_eq!(tokens(&one), tokens(&two));
    let ids = Tensor::from_slice(&a, [1, 4], &[1i32, 2, 3, 4]).expect("tokens");
    let e = two.sequence_logits(&ids).expect_err("one device");
    assert!(e.to_string().contains("2 devices"), "{e}");
}

#[test]
fn shares_decide_where_layers_go() {
    let (a, b) = (cpu(), cpu());
    let source = Source::open(&folder("smollm3")).expect("the model opens");
    let probe = decoder(&a, &source, 64);
    let layout = CacheLayout { pages: 8, page: 4, types: DType::F32.into(), sequences: 1 };
    let layers = |devices: usize, shares: &[f64]| -> Result<Vec<usize>> {
        let devices: Vec<Backend> = (0..devices).map(|i| [&a, &b][i % 2].clone()).collect();
        let p = Placement::by_shares(&devices, shares, &probe, layout)?;
        assert_eq!((p.embedding, p.head), (0, devices.len() - 1));
        assert!(p.layers.iter().all(|l| l.mixer == l.feed_forward));
        Ok((0..devices.len()).map(|d| p.layers.iter().filter(|l| l.mixer == d).count()).collect())
    };
    assert_eq!(layers(2, &[1.0, 1.0]).expect("a placement"), [2, 2]);
    assert_eq!(layers(2, &[1000.0, 1.0]).expect("a placement"), [3, 1]);
    assert_eq!(layers(2, &[1.0, 1000.0]).expect("a placement"), [1, 3]);
    assert_eq!(layers(4, &[1.0, 1.0, 1.0, 1000.0]).expect("a placement"), [1, 1, 1, 1]);
    assert_eq!(layers(1, &[0.1]).expect("a placement"), [4]);
    let fails = |devices: usize, shares: &[f64], part: &str| {
        let e = layers(devices, shares).expect_err("no placement").to_string();
        assert!(e.contains(part), "{e}");
    };
    fails(5, &[1.0; 5], "4 groups");
    fails(2, &[1.0], "shares");
    fails(2, &[1.0, 0.0], "shares");
    fails(2, &[1.0, f64::NAN], "shares");
    assert!(Placement::last_layers(&a, &b, 5, &probe.spec).is_err());
    let e = Placement::single(&a, 4).experts_on(&b, 1, &probe.spec).expect_err("no experts");
    assert!(e.to_string().contains("no experts"), "{e}");
    let few = Placement::single(&a, 3);
    assert!(few.check(&probe.spec).expect_err("a layer is missing").to_string().contains("3 layers"));
    let mut other = Placement::single(&a, 4);
    other.head = 1;
    assert!(other.check(&probe.spec).expect_err("no device").to_string().contains("no device 1"));
}

/// The weights and the need of each device add up to those of one device.
#[test]
fn the_memory_of_each_device_is_counted() {
    let (a, b) = (cpu(), cpu());
    let source = file(&metadata("llama"), &tensors(None));
    let one = decoder(&a, &source, 64);
    let p = Placement::last_layers(&a, &b, 1, &one.spec).expect("a placement");
    let two = placed(p, &source);
    let e = engine(&two, 1, 8);
    let (options, layout) = (*e.options(), e.options().layout());
    let all = one.device_parts(layout).remove(0);
    let [x, y] = &two.device_parts(layout)[..] else { panic!("two devices") };
    assert_eq!((x.weights + y.weights, x.cache + y.cache), (all.weights, all.cache));
    assert_eq!((&x.mixers[..], &y.feed_forward[..]), (&[0][..], &[1][..]));
    assert!(x.embedding && x.head && !y.embedding && !y.head && y.weights > 0);
    let stored: usize = tensors(None).iter().map(|(_, b)| b.len()).sum();
    assert_eq!(all.weights, stored as u64);
    let steps: Vec<StepSize> = generation(&one, options);
    let whole = MemoryNeed::of(&one, options, &steps).expect("a need");
    let of = |d: usize| MemoryNeed::of_device(&two, d, options, &steps).expect("a need");
    let (x, y) = (of(0), of(1));
    assert_eq!(x.cache + y.cache, whole.cache);
    let weights = |n: &MemoryNeed| n.in_place.max(n.copied + n.packed);
    // Each part of the file that is read in place is rounded up to pages.
    assert!((weights(&x) + weights(&y)).abs_diff(weights(&whole)) <= 1 << 16);
    assert!(x.device() > 0 && y.device() > 0);
}

#[test]
fn a_layer_stays_with_the_keys_that_it_reads() {
    let (a, b) = (cpu(), cpu());
    let source = Source::open(&folder("gemma4-shared")).expect("the model opens");
    let spec = family::spec(&source).expect("the configuration is valid");
    let e = Placement::last_layers(&a, &b, 2, &spec).expect_err("keys of another device");
    assert_eq!(e.exit_code(), 3, "{e}");
    assert!(e.to_string().contains("layer 2") && e.to_string().contains("layer 0"), "{e}");
    let feeds = [Feed { sequence: 0, tokens: &[1, 2], all: false }];
    // Stages that share keys and values on one device, with a part of another device between them.
    let mut p = Placement::single(&a, 4);
    p.devices.push(b);
    p.layers[1].feed_forward = 1;
    let mut e = engine(&placed(p, &source), 1, 8);
    let got = e.feed(&feeds).expect("logits").remove(0);
    let want = engine(&decoder(&a, &source, 64), 1, 8).feed(&feeds).expect("logits").remove(0);
    assert_eq!(bits(&got), bits(&want));
}
