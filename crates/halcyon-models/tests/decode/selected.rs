//! Logits that the device selects give the tokens that all logits give.

use crate::common::*;
use halcyon::prelude::*;
use halcyon_models::device_sample::needed;
use halcyon_models::{Candidates, Engine, Feed, GenerateOptions, Sampling, Session, generate};
use halcyon_test::devices;
use halcyon_text::Tokenizer;
use std::ops::ControlFlow;

const PROMPT: [u32; 3] = [1, 60, 61];

/// Tokens from all logits (`None`), or from the `k` that the device selects.
fn tokens(e: &mut Engine, o: &GenerateOptions, k: Option<usize>) -> Vec<u32> {
    e.truncate(0, 0);
    let mut s: Session<&Tokenizer> = Session::new(None, &PROMPT, o).expect("a session");
    let logits = feed(e, &PROMPT, false);
    let mut piece = s.next(&logits, false).expect("a token");
    while let Some(token) = piece.token.filter(|_| piece.finish.is_none()) {
        piece = match k {
            Some(k) => {
                let few = e.feed_largest(0, token, k).expect("logits");
                assert_eq!(few.len(), k);
                s.next_of(Candidates::of(few), false).expect("a token")
            }
            None => {
                let all = e.feed(&[Feed { sequence: 0, tokens: &[token], all: false }]).expect("logits");
                s.next(&all[0], false).expect("a token")
            }
        };
    }
    s.tokens().to_vec()
}

fn case(b: &Backend) {
    let mut e = engine(&decoder(b, &file(&metadata("llama"), &tensors(None)), 64), 1, 64);
    assert_eq!(e.selects(), !is_cpu(b));
    let warm = Sampling { temperature: 1.3, top_k: 20, top_p: 1.0, min_p: 0.0, ..Sampling::default() };
    let penalties = Sampling { repeat_penalty: 1.3, presence_penalty: 0.2, repeat_last: 30, ..warm.clone() };
    let greedy = Sampling { frequency_penalty: 0.5, ..Sampling::greedy() };
    let all = [Sampling::greedy(), Sampling { seed: 5, ..Sampling::default() }, warm, penalties, greedy];
    for sampling in all {
        let n = if is_cpu(b) { 40 } else { 10 };
        let o = GenerateOptions { max_tokens: Some(n), sampling, ..GenerateOptions::default() };
        let want = tokens(&mut e, &o, None);
        let k = needed(&o.sampling);
        assert!(k.is_some());
        assert_eq!(tokens(&mut e, &o, k), want, "{} {:?}", b.id(), o.sampling);
        e.truncate(0, 0);
        let g = generate(&mut e, 0, None, &PROMPT, &o, &mut |_| ControlFlow::Continue(()));
        assert_eq!(g.expect("tokens").tokens, want, "{}", b.id());
    }
    assert!(e.feed_largest(0, 1, 0).is_err() && e.feed_largest(9, 1, 1).is_err());
    assert!(e.feed_largest(0, VOCABULARY as u32, 1).is_err());
}

#[test]
fn selected_logits_give_the_same_tokens_on_the_cpu() {
    case(&Backend::new(BackendType::Cpu).expect("the CPU"));
}

#[test]
fn selected_logits_give_the_same_tokens_on_opencl() {
    let name = "selected_logits_give_the_same_tokens_on_opencl";
    if devices::test_backends().contains(&BackendType::OpenCl)
        && let Some(b) = devices::open(name, BackendType::OpenCl, Level::O2)
    {
        case(&b);
    }
}
