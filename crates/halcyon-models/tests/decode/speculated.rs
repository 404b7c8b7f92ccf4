//! Proposed tokens change the time of a generation and nothing else.

use crate::common::*;
use crate::constrained::tokenizer;
use crate::stored::folders;
use halcyon::prelude::*;
use halcyon_models::{
    Constraint, Decoder, Engine, GenerateOptions, Generation, Sampling, Source, Speculation,
    SpeculationOptions, generate,
};
use halcyon_test::devices;
use halcyon_text::Tokenizer;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

fn always(most: usize) -> SpeculationOptions {
    SpeculationOptions { most, always: true }
}

/// A generation without (`None`) or with proposals, and the length of the sequence after it.
fn run(
    e: &mut Engine,
    s: Option<&mut Speculation>,
    t: Option<&Tokenizer>,
    prompt: &[u32],
    o: &GenerateOptions,
) -> (Generation, usize) {
    e.truncate(0, 0);
    let on_text = &mut |_: &str| ControlFlow::Continue(());
    let made = match s {
        None => generate(e, 0, t, prompt, o, on_text),
        Some(s) => s.generate(e, 0, t, prompt, o, on_text),
    };
    (made.expect("a text"), e.length(0))
}

/// Compares generations with each kind of draft to one without. Returns the accepted tokens of the drafts.
fn compare(
    who: &str,
    decoder: &Arc<Decoder>,
    t: Option<&Tokenizer>,
    prompt: &[u32],
    o: &GenerateOptions,
) -> [usize; 2] {
    let mut e = engine(decoder, 1, 64);
    let want = run(&mut e, None, t, prompt, o);
    let itself = engine(decoder, 1, 64);
    let drafts = [
        Speculation::lookup(always(3)).expect("a lookup"),
        Speculation::with_model(itself, &e, always(6)).expect("the same vocabulary"),
    ];
    drafts.map(|mut s| {
        let got = run(&mut e, Some(&mut s), t, prompt, o);
        let who = format!("{who}, {s:?}");
        assert_eq!(got.0.tokens, want.0.tokens, "{who}");
        assert_eq!((got.0.finish, got.0.text, got.1), (want.0.finish, want.0.text.clone(), want.1), "{who}");
        s.stats().accepted
    })
}

#[test]
fn proposals_do_not_change_the_tokens_of_any_family() {
    let cpu = Backend::new(BackendType::Cpu).expect("the CPU");
    let mut looked = 0;
    for dir in folders() {
        let source = Source::open(Path::new(&dir)).expect("the model opens");
        let decoder = decoder(&cpu, &source, 44);
        let size = decoder.spec.vocabulary as u32;
        let prompt: Vec<u32> = (0..18).map(|i| (i * 7 + i / 9) % size.min(40)).collect();
        // Until the context is full.
        let o = GenerateOptions { sampling: Sampling::greedy(), ..GenerateOptions::default() };
        let [lookup, itself] = compare(&dir.display().to_string(), &decoder, None, &prompt, &o);
        looked += lookup;
        // Of the model's own tokens, all are accepted.
        assert!(itself > 12, "{}: {itself}", dir.display());
    }
    assert!(looked > 0);
}

#[test]
fn proposals_work_with_draws_masks_and_other_devices() {
    let t = tokenizer();
    let mut tried = vec![Backend::new(BackendType::Cpu).expect("the CPU")];
    if devices::test_backends().contains(&BackendType::OpenCl) {
        let name = "proposals_work_with_draws_masks_and_other_devices";
        tried.extend(devices::open(name, BackendType::OpenCl, Level::O2));
    }
    for b in tried {
        let decoder = decoder(&b, &file(&metadata("llama"), &tensors(None)), 64);
        let mask = Constraint::json_schema("{\"items\": {\"type\": \"integer\"}, \"minItems\": 3}", &t);
        let mask = mask.expect("a schema");
        for (seed, masked) in [(1, false), (2, true), (3, true)] {
            let o = GenerateOptions {
                max_tokens: Some(if is_cpu(&b) { 40 } else { 12 }),
                sampling: Sampling { temperature: 1.2, repeat_penalty: 1.1, seed, ..Sampling::default() },
                mask: masked.then(|| Box::new(mask.clone()) as _),
                ..GenerateOptions::default()
            };
            let [_, itself] = compare(b.id(), &decoder, Some(&t), &[1, 60, 61, 60, 61], &o);
            assert!(itself > 0, "{}: {itself}", b.id());
        }
    }
}

#[test]
fn drafts_of_another_vocabulary_are_refused() {
    let cpu = Backend::new(BackendType::Cpu).expect("the CPU");
    let one = decoder(&cpu, &file(&metadata("llama"), &tensors(None)), 16);
    let dir = &folders()[0];
    let other = decoder(&cpu, &Source::open(dir).expect("the model opens"), 16);
    let made = Speculation::with_model(engine(&other, 1, 8), &engine(&one, 1, 8), always(3));
    assert!(made.expect_err("another vocabulary").to_string().contains("same tokens"));
    assert!(Speculation::lookup(always(0)).is_err());
}
