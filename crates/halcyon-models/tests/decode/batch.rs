//! The logits of a sequence do not depend on the other sequences of a step, nor on how its prompt is cut.

use crate::common::*;
use halcyon::BlockType;
use halcyon::prelude::*;
use halcyon_formats::gguf::TensorInfo;
use halcyon_models::{Decoder, Engine, Feed};
use halcyon_test::{Rng, devices};
use std::sync::Arc;

/// The logits of the last token of the prompt and of one more token.
type Logits = [Vec<u32>; 2];

fn prompts(n: usize) -> Vec<Vec<u32>> {
    let mut rng = Rng::new(9);
    (0..n).map(|i| (0..1 + i * 7 % 23).map(|_| rng.below(VOCABULARY) as u32).collect()).collect()
}

fn step(e: &mut Engine, tokens: &[&[u32]]) -> Vec<Vec<u32>> {
    let feeds = tokens.iter().enumerate().map(|(sequence, t)| Feed { sequence, tokens: t, all: false });
    let feeds: Vec<Feed<'_>> = feeds.collect();
    e.feed(&feeds).expect("the tokens are computed").iter().map(|z| bits(z)).collect()
}

/// Runs prompts together.
fn together(decoder: &Arc<Decoder>, prompts: &[Vec<u32>], chunk: usize) -> Vec<Logits> {
    let mut e = engine(decoder, prompts.len(), chunk);
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

/// Compares batches of these sizes with runs of one prompt.
fn invariant(b: &Backend, sizes: &[usize], (types, tensors): &(&str, Vec<(TensorInfo, Vec<u8>)>)) {
    let source = file(&metadata("llama"), tensors);
    let decoder = decoder(b, &source, 64);
    let most = sizes.iter().copied().max().expect("a size");
    let all = prompts(most);
    let solo = |p: &Vec<u32>| together(&decoder, std::slice::from_ref(p), 512).remove(0);
    let alone: Vec<Logits> = all.iter().map(solo).collect();
    for &n in sizes {
        for chunk in [512, 6] {
            let got = together(&decoder, &all[..n], chunk);
            for (i, (got, want)) in got.iter().zip(&alone).enumerate() {
                for (which, (g, w)) in got.iter().zip(want).enumerate() {
                    let differ = g.iter().zip(w).filter(|(a, b)| a != b).count();
                    let who = format!("{} {types}, {n} prompts, chunks of {chunk}", b.id());
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
            invariant(&b, &[1, 2, 7, 32], &w);
        }
    }
}

#[test]
fn batches_do_not_change_logits_on_opencl() {
    let name = "batches_do_not_change_logits_on_opencl";
    if !devices::test_backends().contains(&BackendType::OpenCl) {
        return;
    }
    let Some(b) = devices::open(name, BackendType::OpenCl, Level::O2) else { return };
    for w in weights() {
        invariant(&b, &[1, 2, 7, 32], &w);
    }
}
