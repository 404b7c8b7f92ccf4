//! Generators: one prompt, pieces, batches and streams give the same text.

use crate::common::*;
use halcyon::prelude::*;
use halcyon_formats::gguf::Value;
use halcyon_models::{
    Engine, EngineOptions, Event, Finish, GenerateOptions, Generation, Generator, ModelFile, Piece, Request,
    Sampling, Source,
};
use halcyon_test::{Rng, devices};
use halcyon_text::Message;
use std::pin::Pin;
use std::sync::Arc;

/// A generator with the random model and a tokenizer of bytes.
pub(crate) fn generator(b: &Backend, sequences: usize, positions: usize, chunk: usize) -> Generator {
    let metadata: Vec<(String, Value)> = metadata("llama").into_iter().chain(tokenizer()).collect();
    let source = file(&metadata, &tensors(None));
    let spec = halcyon_models::family::spec(&source).expect("the configuration is valid");
    let model = ModelFile { path: "random.gguf".into(), source, spec };
    let tokenizer = model.tokenizer().expect("a valid tokenizer").expect("a tokenizer");
    let template = model.template(&tokenizer).expect("a template");
    let options = EngineOptions { sequences, positions, page: 4, cache: DType::F32.into(), chunk };
    let engine = Engine::new(Arc::new(model.load(b, 64).expect("the weights load")), options);
    Generator::new(engine.expect("an engine"), Some(tokenizer), Some(template))
}

/// Prompts of different lengths, each with a seed and a limit of its own.
pub(crate) fn requests(n: usize) -> Vec<Request> {
    let mut rng = Rng::new(3);
    let request = |i: usize| {
        let sampling = Sampling { temperature: 1.5, seed: i as u64, ..Sampling::default() };
        let options = GenerateOptions { max_tokens: Some(1 + i * 5 % 12), sampling, ..Default::default() };
        let prompt = (0..1 + i * 11 % 31).map(|_| rng.below(VOCABULARY) as u32).collect();
        Request { prompt, options }
    };
    (0..n).map(request).collect()
}

pub(crate) fn outcome(g: &Generation) -> (Vec<u32>, String, Finish, usize) {
    (g.tokens.clone(), g.text.clone(), g.finish, g.prompt_tokens)
}

fn cpu() -> Backend {
    Backend::new(BackendType::Cpu).expect("the CPU")
}

#[test]
fn a_batch_generates_what_each_prompt_generates_alone() {
    let name = "a_batch_generates_what_each_prompt_generates_alone";
    for b in devices::devices(name, Level::O2) {
        let all = requests(if is_cpu(&b) { 13 } else { 4 });
        let mut solo = generator(&b, 1, 64, 512);
        let want = all.iter().map(|r| solo.generate(r.prompt.clone(), &r.options).expect("a text"));
        let want: Vec<_> = want.map(|g| outcome(&g)).collect();
        // Fewer sequences than prompts; chunks shorter than prompts; a cache that not all sequences fit.
        for (sequences, positions, chunk) in [(3, 192, 6), (5, 64, 512)] {
            let mut g = generator(&b, sequences, positions, chunk);
            let mut got = vec![None; all.len()];
            let mut pieces = vec![(vec![], String::new()); all.len()];
            g.batch_with(all.clone(), &mut |id, event| {
                match event {
                    Event::Piece(p) => {
                        pieces[id].0.extend(p.token);
                        pieces[id].1 += &p.text;
                    }
                    Event::Done(g) => got[id] = Some(outcome(&g)),
                    Event::Failed(e) => return Err(e),
                }
                Ok(())
            })
            .expect("a batch");
            for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                assert_eq!(got.as_ref(), Some(want), "{}, prompt {i}, {sequences} sequences", b.id());
                assert_eq!((&pieces[i].0, &pieces[i].1), (&want.0, &want.1), "{}, prompt {i}", b.id());
            }
        }
    }
}

/// A rotation that depends on the length that the whole prompt has.
#[test]
fn parts_of_a_prompt_are_rotated_as_the_whole_prompt() {
    let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/llama-dynamic");
    let source = Source::open(dir.as_ref()).expect("the model opens");
    let decoder = decoder(&cpu(), &source, 96);
    let prompt: Vec<u32> = (0..80).map(|i| i * 7 % 90).collect();
    let engine = |chunk| {
        let options =
            EngineOptions { sequences: 2, positions: 160, page: 4, cache: DType::F32.into(), chunk };
        Engine::new(decoder.clone(), options).expect("an engine")
    };
    let options = GenerateOptions { max_tokens: Some(8), sampling: Sampling::greedy(), ..Default::default() };
    let text = |chunk: usize| {
        let mut g = Generator::new(engine(chunk), None, None);
        let prompts = [prompt.clone(), prompt[..20].to_vec()];
        let made = g.batch(prompts, &options).expect("a batch");
        (made[0].tokens.clone(), made[1].tokens.clone())
    };
    let want = {
        let mut e = engine(512);
        let feed = halcyon_models::Feed { sequence: 0, tokens: &prompt, all: false };
        let logits = e.feed(&[feed]).expect("logits").remove(0);
        let mut parts = engine(512);
        let mut got = vec![];
        for part in prompt.chunks(9) {
            let feed = halcyon_models::Feed { sequence: 0, tokens: part, all: false };
            got = parts.feed_parts(&[feed], &[80]).expect("logits").remove(0);
            assert_eq!(got.is_empty(), parts.length(0) < 80);
        }
        assert_eq!(bits(&got), bits(&logits));
        greedy(&mut e, logits, 8)
    };
    assert_eq!(text(7).0, want);
    assert_eq!(text(7), text(512));
}

#[test]
fn pieces_are_the_text() {
    let mut g = generator(&cpu(), 1, 64, 512);
    let options = GenerateOptions { max_tokens: Some(20), stop: vec!["a".into()], ..Default::default() };
    for seed in 0..6 {
        let options =
            GenerateOptions { sampling: Sampling { seed, ..Sampling::default() }, ..options.clone() };
        let want = g.generate("hello", &options).expect("a text");
        let pieces: Result<Vec<Piece>> = g.stream("hello", &options).expect("a stream").collect();
        let pieces = pieces.expect("pieces");
        let text: String = pieces.iter().map(|p| p.text.as_str()).collect();
        let tokens: Vec<u32> = pieces.iter().filter_map(|p| p.token).collect();
        assert_eq!((tokens, text), (want.tokens, want.text));
        assert_eq!(pieces.last().and_then(|p| p.finish), Some(want.finish));
        assert!(pieces.iter().rev().skip(1).all(|p| p.finish.is_none()));
    }
    // A dropped stream leaves nothing behind.
    let first = g.stream("hello", &options).expect("a stream").next().expect("a piece").expect("a piece");
    let again = g.stream("hello", &options).expect("a stream").next().expect("a piece").expect("a piece");
    assert_eq!(first.token, again.token);
}

pub(crate) fn next(s: &mut halcyon_models::AsyncPieces) -> Option<Result<Piece>> {
    pollster::block_on(std::future::poll_fn(|c| futures_core::Stream::poll_next(Pin::new(&mut *s), c)))
}

#[test]
fn streams_of_a_worker_share_the_engine() {
    let mut g = generator(&cpu(), 2, 128, 16);
    let all = requests(5);
    let want: Vec<_> =
        all.iter().map(|r| g.generate(r.prompt.clone(), &r.options).expect("a text")).collect();
    let worker = g.into_worker().expect("a thread");
    let mut streams: Vec<_> = all.iter().map(|r| worker.stream(r.prompt.clone(), &r.options)).collect();
    let endless = GenerateOptions { ignore_eos: true, ..Default::default() };
    // A stream that nobody reads ends when it is dropped.
    drop(worker.stream("hello", &endless));
    let mut empty = worker.stream(vec![], &endless);
    for (s, want) in streams.iter_mut().zip(&want) {
        let (mut tokens, mut text, mut finish) = (vec![], String::new(), None);
        while let Some(piece) = next(s) {
            let piece = piece.expect("a piece");
            tokens.extend(piece.token);
            text += &piece.text;
            finish = piece.finish;
        }
        assert_eq!((&tokens, &text, finish), (&want.tokens, &want.text, Some(want.finish)));
    }
    let refused = next(&mut empty).expect("an item").expect_err("an error").to_string();
    assert!(refused.contains("no tokens"), "{refused}");
    assert!(next(&mut empty).is_none());
    let mut g = worker.join().expect("the generator");
    let again = g.generate(all[1].prompt.clone(), &all[1].options).expect("a text");
    assert_eq!(outcome(&again), outcome(&want[1]));
}

#[test]
fn chats_and_errors() {
    let mut g = generator(&cpu(), 2, 64, 512);
    let options = GenerateOptions { max_tokens: Some(3), ..Default::default() };
    let messages = [Message::new("user", "hi")];
    let chat = g.chat(&messages, &options).expect("an answer");
    assert_eq!(outcome(&chat), outcome(&g.generate("user: hi\n", &options).expect("a text")));
    let long: Vec<u32> = vec![5; 65];
    assert!(g.generate(long.clone(), &options).is_err());
    assert!(g.stream(long.clone(), &options).is_err());
    let e = g.batch([vec![1], long], &options).expect_err("an error").to_string();
    assert!(e.contains("65 positions"), "{e}");
    assert!(g.batch([vec![VOCABULARY as u32]], &options).is_err());
    assert!(g.batch(Vec::<&str>::new(), &options).expect("nothing").is_empty());
    // No tokens at all are wanted.
    let none = GenerateOptions { max_tokens: Some(0), ..Default::default() };
    let got = g.batch(["hello"], &none).expect("a batch");
    assert_eq!((got[0].tokens.len(), got[0].finish), (0, Finish::Length));
    // The context is full.
    let full = GenerateOptions { ignore_eos: true, ..Default::default() };
    let got = g.batch([vec![7; 60], vec![8; 64]], &full).expect("a batch");
    assert_eq!(got.iter().map(|g| g.tokens.len()).collect::<Vec<_>>(), [5, 1]);
    let mut bare = Generator::new(
        engine(
            &{
                let source = file(&metadata("llama"), &tensors(None));
                decoder(&cpu(), &source, 64)
            },
            1,
            512,
        ),
        None,
        None,
    );
    assert!(bare.generate("text", &options).is_err());
    assert!(bare.chat(&messages, &options).is_err());
    assert_eq!(bare.generate(vec![3], &options).expect("tokens").tokens.len(), 3);
}
