//! A warm step makes nothing new, and each layer runs where it is placed. The tests run one after the other
//! in a process of their own, because a device counts what all backends of the process do.

#[path = "decode/common.rs"]
mod common;

use common::*;
use halcyon::prelude::*;
use halcyon_models::{
    Decoder, Engine, EngineOptions, GenerateOptions, Generator, LayerPlace, ModelFile, Placement, Sampling,
    Source, family, generate,
};
use halcyon_test::devices;
use std::path::Path;
use std::sync::{Arc, Mutex};

static ALONE: Mutex<()> = Mutex::new(());

#[test]
fn warm_steps_plan_and_compile_nothing() {
    if halcyon_test::left_out("warm_steps_plan_and_compile_nothing") {
        return;
    }
    let _alone = ALONE.lock();
    let name = "warm_steps_plan_and_compile_nothing";
    for b in devices::devices(name, Level::O2) {
        let source = file(&metadata("llama"), &tensors(None));
        let decoder = decoder(&b, &source, 64);
        let mut e = engine(&decoder, 1, 512);
        feed(&mut e, &[1, 2, 3, 4, 5], false);
        // The second step finds what the first one left, such as buffers that are free again.
        for t in 6..8 {
            feed(&mut e, &[t], false);
        }
        let made = |b: &Backend| (b.cache_stats().plans_built, b.counters().compiles);
        let before = made(&b);
        for t in 8..20 {
            feed(&mut e, &[t], false);
        }
        assert_eq!(made(&b), before, "{}", b.id());
        assert_eq!(b.cache_stats().copies, 0, "{}: a cache was copied", b.id());
    }
}

/// Caches and the matrices of recurrent layers are changed in place, in single steps and in chunks.
#[test]
fn states_of_recurrent_layers_are_not_copied() {
    if halcyon_test::left_out("states_of_recurrent_layers_are_not_copied") {
        return;
    }
    let _alone = ALONE.lock();
    let name = "states_of_recurrent_layers_are_not_copied";
    for b in devices::devices(name, Level::O2) {
        // DeltaNet, Mamba 2, convolutions, and latent attention.
        for family in ["qwen3_5", "granitemoehybrid", "lfm2", "deepseek_v3"] {
            let decoder = decoder(&b, &stored(family), 64);
            let mut e = engine(&decoder, 1, 8);
            let before = b.cache_stats().copies;
            feed(&mut e, &[5; 20], false);
            for t in 6..26 {
                feed(&mut e, &[t], false);
            }
            assert_eq!(b.cache_stats().copies, before, "{family} on {}: a state was copied", b.id());
        }
    }
}

fn stored(family: &str) -> Source {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(family);
    Source::open(&dir).expect("the model opens")
}

/// What each of two backends launches in a warm step of one token.
fn launches(p: Placement, source: &Source, of: [&Backend; 2]) -> [u64; 2] {
    let spec = family::spec(source).expect("the configuration is valid");
    let decoder = Decoder::load_on(p, source, spec, 64).expect("the weights are loaded");
    let mut e = engine(&Arc::new(decoder), 1, 8);
    feed(&mut e, &[1, 2, 3], false);
    feed(&mut e, &[4], false);
    let count = || of.map(|b| b.counters().launches + b.counters().library_calls);
    let before = count();
    feed(&mut e, &[5], false);
    let after = count();
    [after[0] - before[0], after[1] - before[1]]
}

/// Every layer that moves from the CPU to the other device takes its launches along.
#[test]
fn every_layer_launches_on_its_device() {
    let _alone = ALONE.lock();
    let name = "every_layer_launches_on_its_device";
    if !devices::test_backends().contains(&BackendType::OpenCl) {
        return;
    }
    let Some(gpu) = devices::open(name, BackendType::OpenCl, Level::O2) else { return };
    let cpu = Backend::new(BackendType::Cpu).expect("the CPU");
    let of = [&cpu, &gpu];
    let source = stored("smollm3");
    let spec = family::spec(&source).expect("the configuration is valid");
    let n = spec.layers.len();
    assert_eq!(n, 4);
    // Stages on the CPU, the GPU and the CPU again.
    let counts: Vec<[u64; 2]> = (1..n)
        .map(|k| launches(Placement::last_layers(&cpu, &gpu, k, &spec).expect("a placement"), &source, of))
        .collect();
    let [none, all] = [&cpu, &gpu].map(|b| launches(Placement::single(b, n), &source, of));
    assert_eq!((none[1], all[0]), (0, 0), "a device without layers launched something");
    assert!(none[0] > 0 && all[1] > 0);
    for (k, pair) in counts.windows(2).enumerate() {
        let (cpu, gpu) = (pair[0][0] as i64 - pair[1][0] as i64, pair[1][1] as i64 - pair[0][1] as i64);
        assert!(cpu > 5 && gpu > 5, "{} layers and one more: {counts:?}", k + 1);
    }
    // Layers apart from each other.
    let turned = |on: [usize; 4]| {
        let layers = on.map(|d| LayerPlace { mixer: d, feed_forward: d }).to_vec();
        let p = Placement { devices: vec![cpu.clone(), gpu.clone()], embedding: 0, layers, head: 0 };
        launches(p, &source, of)
    };
    let [apart, between] = [turned([1, 0, 0, 1]), turned([0, 1, 0, 1])];
    assert!(apart[1] > counts[0][1] && between[1] > counts[0][1], "{apart:?} {between:?} {counts:?}");
}

/// With the experts of a layer on the host, the host launches kernels for each such layer, and the device
/// fewer.
#[test]
fn experts_launch_on_the_host() {
    let _alone = ALONE.lock();
    let name = "experts_launch_on_the_host";
    if !devices::test_backends().contains(&BackendType::OpenCl) {
        return;
    }
    let Some(gpu) = devices::open(name, BackendType::OpenCl, Level::O2) else { return };
    let cpu = Backend::new(BackendType::Cpu).expect("the CPU");
    let source = stored("mixtral");
    let spec = family::spec(&source).expect("the configuration is valid");
    let counts: Vec<[u64; 2]> = (0..=spec.layers.len())
        .map(|k| {
            let p = Placement::single(&gpu, spec.layers.len()).experts_on(&cpu, k, &spec);
            launches(p.expect("a placement"), &source, [&cpu, &gpu])
        })
        .collect();
    assert_eq!(counts[0][0], 0);
    assert!(counts.windows(2).all(|p| p[0][0] < p[1][0] && p[0][1] > p[1][1]), "{counts:?}");
    assert!(counts[2][1] > 0);
}

/// What a batch copies to the host for a token does not grow with the vocabulary, and the tokens are those of
/// the CPU, which chooses from all logits.
#[test]
fn few_bytes_cross_for_each_token() {
    let _alone = ALONE.lock();
    let name = "few_bytes_cross_for_each_token";
    let cpu = Backend::new(BackendType::Cpu).expect("the CPU");
    let source = file(&metadata("llama"), &tensors(None));
    let prompts = [vec![1u32, 60, 61], vec![2, 7, 90, 4, 33]];
    let text = |b: &Backend, sampling: &Sampling, n: usize| -> (Vec<Vec<u32>>, u64) {
        let mut g = Generator::new(engine(&decoder(b, &source, 64), 2, 64), None, None);
        let o =
            GenerateOptions { max_tokens: Some(n), sampling: sampling.clone(), ..GenerateOptions::default() };
        let before = b.counters().downloaded_bytes;
        let made = g.batch(prompts.clone(), &o).expect("a batch");
        (made.into_iter().map(|g| g.tokens).collect(), b.counters().downloaded_bytes - before)
    };
    for kind in [BackendType::OpenCl, BackendType::WebGpu] {
        if !devices::test_backends().contains(&kind) {
            continue;
        }
        let Some(b) = devices::open(name, kind, Level::O2) else { continue };
        let penalties = Sampling { repeat_penalty: 1.2, repeat_last: 20, ..Sampling::default() };
        for (sampling, k) in [
            (Sampling::greedy(), 1),
            (Sampling { seed: 1, ..Sampling::default() }, 64),
            (Sampling { seed: 2, temperature: 1.4, ..Sampling::default() }, 64),
            (Sampling { seed: 3, ..penalties }, 64),
        ] {
            let n = 9;
            let (got, bytes) = text(&b, &sampling, n);
            assert_eq!(got, text(&cpu, &sampling, n).0, "{} {sampling:?}", b.id());
            // A number and a value of 4 bytes each, for every row of a step.
            let rows = (n * prompts.len()) as u64;
            let most = if sampling.temperature == 0.0 { 1 } else { k };
            assert!(bytes > 0 && bytes <= rows * most * 8, "{}: {bytes} bytes, {sampling:?}", b.id());
        }
    }
}

/// The text of a token is made after the step that computes the token was started.
#[test]
fn a_step_is_started_before_the_text_is_made() {
    let _alone = ALONE.lock();
    let name = "a_step_is_started_before_the_text_is_made";
    if !devices::test_backends().contains(&BackendType::OpenCl) {
        return;
    }
    let Some(b) = devices::open(name, BackendType::OpenCl, Level::O2) else { return };
    let metadata: Vec<_> = metadata("llama").into_iter().chain(tokenizer()).collect();
    let source = file(&metadata, &tensors(None));
    let spec = family::spec(&source).expect("the configuration is valid");
    let model = ModelFile { path: "random.gguf".into(), source, spec };
    let t = model.tokenizer().expect("a valid tokenizer").expect("a tokenizer");
    let mut e =
        Engine::new(Arc::new(model.load(&b, 64).expect("the weights load")), EngineOptions::default());
    let e = e.as_mut().expect("an engine");
    let mut compared = 0;
    for seed in 0..60 {
        let o = GenerateOptions {
            max_tokens: Some(4),
            sampling: Sampling { seed, temperature: 1.5, ..Sampling::default() },
            ignore_eos: true,
            ..GenerateOptions::default()
        };
        e.truncate(0, 0);
        let mut seen = vec![];
        let on_text = &mut |_: &str| {
            seen.push(b.counters().launches + b.counters().library_calls);
            std::ops::ControlFlow::Continue(())
        };
        let g = generate(e, 0, Some(&t), &[1, 60, 61], &o, on_text).expect("a text");
        // Each token but the last starts a step before its text is passed on. Some tokens are a part of a
        // character and have no text.
        if g.tokens.len() == 4 && seen.len() == 4 {
            assert!(seen[1] > seen[0] && seen[2] > seen[1], "{seen:?}");
            assert_eq!(seen[3], seen[2], "the last token needs no step");
            assert_eq!(e.length(0), 3 + 3);
            compared += 1;
        }
        if compared == 2 {
            return;
        }
    }
    panic!("no text had a piece for each token");
}

/// A step that was started before its text turned out to be the end leaves the sequence as it was.
#[test]
fn a_stop_string_gives_the_position_back() {
    let _alone = ALONE.lock();
    let name = "a_stop_string_gives_the_position_back";
    if !devices::test_backends().contains(&BackendType::OpenCl) {
        return;
    }
    let Some(gpu) = devices::open(name, BackendType::OpenCl, Level::O2) else { return };
    let cpu = Backend::new(BackendType::Cpu).expect("the CPU");
    let metadata: Vec<_> = metadata("llama").into_iter().chain(tokenizer()).collect();
    let run = |b: &Backend, stop: &str| {
        let source = file(&metadata, &tensors(None));
        let spec = family::spec(&source).expect("the configuration is valid");
        let model = ModelFile { path: "random.gguf".into(), source, spec };
        let t = model.tokenizer().expect("a valid tokenizer").expect("a tokenizer");
        let mut e = engine(&decoder(b, &model.source, 64), 1, 64);
        let o = GenerateOptions {
            max_tokens: Some(12),
            sampling: Sampling { seed: 4, temperature: 1.2, ..Sampling::default() },
            ignore_eos: true,
            stop: vec![stop.into()],
            ..GenerateOptions::default()
        };
        let on_text = &mut |_: &str| std::ops::ControlFlow::Continue(());
        let g = generate(&mut e, 0, Some(&t), &[1, 60, 61], &o, on_text).expect("a text");
        (g.tokens, g.text, g.finish, e.length(0))
    };
    let whole = run(&cpu, "");
    let letter = whole.1.chars().filter(char::is_ascii).nth(2).expect("a letter").to_string();
    let want = run(&cpu, &letter);
    assert_eq!(want.2, halcyon_models::Finish::Stop);
    assert_eq!(run(&gpu, &letter), want);
}
