//! The logits of a sequence do not depend on the other sequences of a step, nor on how its prompt is cut.

use crate::common::*;
use crate::stored::folder;
use halcyon::BlockType;
use halcyon::prelude::*;
use halcyon_formats::gguf::TensorInfo;
use halcyon_models::{CacheTypes, Decoder, Engine, Feed, Source};
use halcyon_test::{Rng, devices};
use std::sync::Arc;

/// The logits of the last token of the prompt and of one more token.
type Logits = [Vec<u32>; 2];

/// Prompts of 1 to 23 tokens, or of `longer` more.
fn prompts(n: usize, longer: usize, vocabulary: usize) -> Vec<Vec<u32>> {
    let mut rng = Rng::new(9);
    let size = |i: usize| 1 + i * 7 % 23 + if i % 3 == 1 { longer } else { 0 };
    (0..n).map(|i| (0..size(i)).map(|_| rng.below(vocabulary) as u32).collect()).collect()
}

fn step(e: &mut Engine, tokens: &[&[u32]]) -> Vec<Vec<u32>> {
    let feeds = tokens.iter().enumerate().map(|(sequence, t)| Feed { sequence, tokens: t, all: false });
    let feeds: Vec<Feed<'_>> = feeds.collect();
    e.feed(&feeds).expect("the tokens are computed").iter().map(|z| bits(z)).collect()
}

/// Runs prompts together.
fn together(decoder: &Arc<Decoder>, prompts: &[Vec<u32>], chunk: usize, cache: CacheTypes) -> Vec<Logits> {
    let mut e = engine_in(cache, decoder, prompts.len(), chunk);
    let first: Vec<&[u32]> = prompts.iter().map(Vec::as_slice).collect();
    // Any token may follow; here it is the prompt's first one.
    let next: Vec<&[u32]> = prompts.iter().map(|p| &p[..1]).collect();
    let (a, b) = (step(&mut e, &first), step(&mut e, &next));
    a.into_iter().zip(b).map(|(a, b)| [a, b]).collect()
}

/// The types of the weights: f32, one block type, and the mixture that is called Q4_K_M.
fn weights() -> [(&'static str, Vec<(TensorInfo, Vec<u8>)>); 3] {
    [("f32", tensors(None)), ("q4_0", tensors(Some(BlockType::Q4_0))), ("q4_k_m", tensors_q4_k_m())]
}

fn llama(b: &Backend, sizes: &[usize], (types, tensors): &(&str, Vec<(TensorInfo, Vec<u8>)>)) {
    let source = file(&metadata("llama"), tensors);
    let most = sizes.iter().copied().max().expect("a size");
    let prompts = prompts(most, 0, VOCABULARY);
    invariant(&decoder(b, &source, 64), &prompts, sizes, &format!("{} {types}", b.id()));
}

/// Compares batches of these sizes with runs of one prompt.
pub(crate) fn invariant(decoder: &Arc<Decoder>, all: &[Vec<u32>], sizes: &[usize], who: &str) {
    compare(decoder, all, sizes, DType::F32.into(), who);
}

/// The same with a cache of another type. Some prompts are longer.
pub(crate) fn invariant_in(decoder: &Arc<Decoder>, sizes: &[usize], cache: impl Into<CacheTypes>) {
    let cache = cache.into();
    let most = sizes.iter().copied().max().expect("a size");
    let all = prompts(most, 60, decoder.spec.vocabulary);
    compare(decoder, &all, sizes, cache, &format!("{} {cache}", decoder.backend().id()));
}

fn compare(decoder: &Arc<Decoder>, all: &[Vec<u32>], sizes: &[usize], cache: CacheTypes, who: &str) {
    let solo = |p: &Vec<u32>| together(decoder, std::slice::from_ref(p), 512, cache).remove(0);
    let alone: Vec<Logits> = all.iter().map(solo).collect();
    for &n in sizes {
        for chunk in [512, 6] {
            let got = together(decoder, &all[..n], chunk, cache);
            for (i, (got, want)) in got.iter().zip(&alone).enumerate() {
                for (which, (g, w)) in got.iter().zip(want).enumerate() {
                    let differ = g.iter().zip(w).filter(|(a, b)| a != b).count();
                    let who = format!("{who}, {n} prompts, chunks of {chunk}");
                    let at = format!("prompt {i} of {} tokens, logits {which}", all[i].len());
                    assert_eq!(differ, 0, "{who}, {at}: {differ} of {} logits differ", w.len());
                }
            }
        }
    }
}

#[test]
fn batches_do_not_change_logits_on_the_cpu() {
    for threads in [1, 3] {
        let b = Backend::builder().backend_type(BackendType::Cpu).num_threads(threads).build();
        let b = b.expect("the CPU");
        for w in weights() {
            llama(&b, &[1, 2, 7, 32], &w);
        }
    }
}

#[test]
fn batches_do_not_change_logits_on_opencl() {
    if halcyon_test::left_out("batches_do_not_change_logits_on_opencl") {
        return;
    }
    let name = "batches_do_not_change_logits_on_opencl";
    if !devices::test_backends().contains(&BackendType::OpenCl) {
        return;
    }
    let Some(b) = devices::open(name, BackendType::OpenCl, Level::O2) else { return };
    for w in weights() {
        llama(&b, &[1, 2, 7, 32], &w);
    }
}

/// Compares batches of the models in folders. Recurrent layers compute whole chunks of 16 positions, so some
/// prompts have several chunks.
fn recurrent(b: &Backend, sizes: &[usize], families: &[&str]) {
    for family in families {
        let decoder = decoder(b, &Source::open(&folder(family)).expect("the model opens"), 64);
        let most = sizes.iter().copied().max().expect("a size");
        let prompts = prompts(most, 27, decoder.spec.vocabulary);
        invariant(&decoder, &prompts, sizes, &format!("{family} on {}", b.id()));
    }
}

#[test]
fn batches_do_not_change_logits_of_recurrent_models_on_the_cpu() {
    for threads in [1, 3] {
        let b = Backend::builder().backend_type(BackendType::Cpu).num_threads(threads).build();
        recurrent(&b.expect("the CPU"), &[2, 7], &["qwen3_5_moe", "granitemoehybrid", "lfm2"]);
    }
}

#[test]
fn batches_do_not_change_logits_of_recurrent_models_on_opencl() {
    if halcyon_test::left_out("batches_do_not_change_logits_of_recurrent_models_on_opencl") {
        return;
    }
    let name = "batches_do_not_change_logits_of_recurrent_models_on_opencl";
    if !devices::test_backends().contains(&BackendType::OpenCl) {
        return;
    }
    let Some(b) = devices::open(name, BackendType::OpenCl, Level::O2) else { return };
    recurrent(&b, &[2], &["qwen3_5"]);
}

#[test]
fn batches_do_not_change_logits_of_other_attention() {
    if halcyon_test::left_out("batches_do_not_change_logits_of_other_attention") {
        return;
    }
    let name = "batches_do_not_change_logits_of_other_attention";
    let cpu = Backend::new(BackendType::Cpu).expect("the CPU");
    recurrent(&cpu, &[7], &["deepseek_v2", "deepseek_v3", "gemma4", "gemma4-moe", "gemma4-shared"]);
    if devices::test_backends().contains(&BackendType::OpenCl)
        && let Some(b) = devices::open(name, BackendType::OpenCl, Level::O2)
    {
        recurrent(&b, &[2], &["deepseek_v3", "gemma4-moe", "gemma4-shared"]);
    }
}

/// A sequence of a recurrent model goes back where it can, and is empty where it cannot.
#[test]
fn recurrent_models_go_back_by_at_least_16_positions() {
    let cpu = Backend::new(BackendType::Cpu).expect("the CPU");
    for family in ["qwen3_next", "granitemoehybrid", "lfm2"] {
        let decoder = decoder(&cpu, &Source::open(&folder(family)).expect("the model opens"), 128);
        let mut rng = Rng::new(4);
        let mut some =
            |n: usize| -> Vec<u32> { (0..n).map(|_| rng.below(decoder.spec.vocabulary) as u32).collect() };
        let (text, other) = (some(100), some(5));
        for (length, back) in [(5, 4), (15, 1), (16, 16), (47, 31), (48, 16), (49, 17), (100, 16), (100, 100)]
        {
            let who = format!("{family}: {back} back from {length}");
            let mut e = engine(&decoder, 1, 512);
            feed(&mut e, &text[..length], false);
            assert!(e.can_truncate(0, length - back), "{who}");
            assert_eq!(e.truncate(0, length - back), length - back, "{who}");
            let got = bits(&feed(&mut e, &other, true));
            let mut e = engine(&decoder, 1, 512);
            let whole = [&text[..length - back], &other[..]].concat();
            let want = bits(&feed(&mut e, &whole, true));
            assert!(got == want[want.len() - got.len()..], "{who}");
        }
        let mut e = engine(&decoder, 1, 512);
        feed(&mut e, &text, false);
        // What was overwritten since does not come back.
        assert_eq!(e.truncate(0, 90), 90);
        assert!(!e.can_truncate(0, 79), "{family}");
        assert_eq!(e.truncate(0, 79), 0, "{family}");
        let again = bits(&feed(&mut e, &other, true));
        assert_eq!(again, bits(&feed(&mut engine(&decoder, 1, 512), &other, true)), "{family}");
    }
}
