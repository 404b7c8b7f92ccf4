//! A cache in blocks of Q8_0, and of different types of keys and values.

use crate::batch::invariant_in;
use crate::common::*;
use crate::stored::folder;
use halcyon::ir::error::Error;
use halcyon::prelude::*;
use halcyon_models::{CacheTypes, Decoder, Engine, EngineOptions, MemoryNeed, Source};
use halcyon_test::{Rng, devices};
use std::sync::Arc;

const MIXED: CacheTypes = CacheTypes { keys: DType::U8, values: DType::F16 };

fn options(cache: impl Into<CacheTypes>, decoder: &Decoder, chunk: usize) -> EngineOptions {
    let cache = cache.into();
    EngineOptions { sequences: 1, positions: decoder.context(), page: 4, cache, chunk }
}

fn made(cache: CacheTypes, decoder: &Arc<Decoder>, chunk: usize) -> Engine {
    Engine::new(decoder.clone(), options(cache, decoder, chunk)).expect("an engine")
}

fn backends(name: &str, kinds: &[BackendType]) -> Vec<Backend> {
    let mut all = vec![Backend::new(BackendType::Cpu).expect("the CPU")];
    for kind in kinds {
        if devices::test_backends().contains(kind) {
            all.extend(devices::open(name, *kind, Level::O2));
        }
    }
    all
}

fn rms(x: &[f32]) -> f64 {
    (x.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / x.len() as f64).sqrt()
}

/// Rounding to 8 bits moves a number by at most 1/254 of the largest of its block. Here the logits move by
/// less than 1/50 of their size, and more than a cache in f16 moves them.
#[test]
fn logits_are_near_those_of_a_cache_in_f32() {
    if halcyon_test::left_out("logits_are_near_those_of_a_cache_in_f32") {
        return;
    }
    let name = "logits_are_near_those_of_a_cache_in_f32";
    for b in backends(name, &[BackendType::OpenCl, BackendType::WebGpu]) {
        let decoder = decoder(&b, &file(&metadata("llama"), &tensors(None)), 128);
        let mut rng = Rng::new(8);
        let tokens: Vec<u32> = (0..90).map(|_| rng.below(VOCABULARY) as u32).collect();
        let run = |cache: CacheTypes| {
            let mut e = made(cache, &decoder, 40);
            let mut z = feed(&mut e, &tokens, true);
            z.extend(feed(&mut e, &[5], false));
            z
        };
        let want = run(DType::F32.into());
        let off = |cache: CacheTypes| {
            let d: Vec<f32> = run(cache).iter().zip(&want).map(|(a, b)| a - b).collect();
            rms(&d) / rms(&want)
        };
        let (blocks, half) = (off(DType::U8.into()), off(DType::F16.into()));
        assert!(blocks < 0.02 && blocks > 4.0 * half, "{}: {blocks} {half}", b.id());
        // Only the keys, or only the values, are rounded.
        for mixed in [off(MIXED), off(CacheTypes { keys: DType::F16, values: DType::U8 })] {
            assert!(mixed < 0.02 && mixed > 2.0 * half, "{}: {mixed} {half}", b.id());
        }
    }
}

#[test]
fn batches_do_not_change_logits_of_a_cache_in_blocks() {
    for b in backends("batches_do_not_change_logits_of_a_cache_in_blocks", &[BackendType::OpenCl]) {
        let decoder = decoder(&b, &file(&metadata("llama"), &tensors(None)), 128);
        let sizes: &[usize] = if is_cpu(&b) { &[1, 2, 7] } else { &[1, 3] };
        invariant_in(&decoder, sizes, DType::U8);
        invariant_in(&decoder, &[2], MIXED);
    }
}

#[test]
fn heads_that_are_not_whole_blocks_are_refused() {
    let cpu = Backend::new(BackendType::Cpu).expect("the CPU");
    let decoder = decoder(&cpu, &Source::open(&folder("deepseek_v2")).expect("the model opens"), 16);
    let o = options(DType::U8, &decoder, 8);
    for e in [Engine::new(decoder.clone(), o).err(), MemoryNeed::of_generation(&decoder, o).err()] {
        let e = e.expect("heads of another size");
        assert!(matches!(e, Error::Unsupported { .. }), "{e}");
        let text = e.to_string();
        assert!(text.contains("q8_0 for heads of size") && text.contains("f16"), "{text}");
    }
    let other = Engine::new(
        decoder.clone(),
        EngineOptions { cache: CacheTypes { values: DType::I32, ..DType::F16.into() }, ..o },
    );
    assert!(matches!(other, Err(Error::Argument { .. })));
    // Latent attention caches no values.
    let values = CacheTypes { values: DType::U8, ..DType::F16.into() };
    assert!(decoder.check_cache(values).is_ok());
}

#[test]
fn the_cache_takes_34_bytes_for_32_numbers() {
    let cpu = Backend::new(BackendType::Cpu).expect("the CPU");
    let decoder = decoder(&cpu, &file(&metadata("llama"), &tensors(None)), 64);
    let bytes = |c: CacheTypes| {
        MemoryNeed::of_generation(&decoder, options(c, &decoder, 8)).expect("a need").cache_written
    };
    let (blocks, half) = (bytes(DType::U8.into()), bytes(DType::F16.into()));
    assert_eq!(blocks * 64, half * 34);
    assert_eq!(bytes(MIXED) * 2, blocks + half);
}
