//! A warm step makes nothing new, and each layer runs where it is placed. The tests run one after the other
//! in a process of their own, because a device counts what all backends of the process do.

#[path = "decode/common.rs"]
mod common;

use common::*;
use halcyon::prelude::*;
use halcyon_models::{Decoder, LayerPlace, Placement, Source, family};
use halcyon_test::devices;
use std::path::Path;
use std::sync::{Arc, Mutex};

static ALONE: Mutex<()> = Mutex::new(());

#[test]
fn warm_steps_plan_and_compile_nothing() {
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
