//! Generators and batches with a draft give the texts that they give without one.

use crate::common::*;
use crate::generator::{generator, next, outcome, requests};
use crate::stored::folder;
use halcyon::BlockType;
use halcyon::prelude::*;
use halcyon_models::{
    Engine, EngineOptions, Event, Finish, GenerateOptions, Generator, Request, Sampling, Source, Speculation,
    SpeculationOptions,
};
use halcyon_test::devices;

type Outcome = (Vec<u32>, String, Finish, usize);

fn always(most: usize) -> SpeculationOptions {
    SpeculationOptions { most, always: true }
}

/// A lookup, the model itself, and a model that often chooses other tokens, for engines with so many
/// sequences.
fn drafts(b: &Backend, of: &Engine, sequences: usize) -> Vec<Speculation> {
    let other = decoder(b, &file(&metadata("llama"), &tensors(Some(BlockType::Q4_0))), 64);
    let model = |d| Speculation::with_model(engine(d, sequences, 64), of, always(3));
    vec![
        Speculation::lookup(always(2)).expect("a lookup"),
        model(of.decoder()).expect("the same vocabulary"),
        model(&other).expect("the same vocabulary"),
    ]
}

/// The outcomes of requests in a batch, checked against their pieces.
fn batch(g: &mut Generator, all: &[Request]) -> Vec<Outcome> {
    let mut got = vec![None; all.len()];
    let mut pieces = vec![(vec![], String::new()); all.len()];
    g.batch_with(all.to_vec(), &mut |id, event| {
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
    let got: Vec<Outcome> = got.into_iter().map(|g| g.expect("an outcome")).collect();
    for (g, p) in got.iter().zip(&pieces) {
        assert_eq!((&p.0, &p.1), (&g.0, &g.1));
    }
    got
}

#[test]
fn batches_with_drafts_generate_the_same() {
    let name = "batches_with_drafts_generate_the_same";
    let mut backends = vec![Backend::new(BackendType::Cpu).expect("the CPU")];
    if devices::test_backends().contains(&BackendType::OpenCl) {
        backends.extend(devices::open(name, BackendType::OpenCl, Level::O2));
    }
    for b in backends {
        let all = requests(if is_cpu(&b) { 13 } else { 4 });
        let want = batch(&mut generator(&b, 3, 192, 512), &all);
        let mut g = generator(&b, 3, 192, 8);
        // A draft with fewer sequences than the engine, too.
        for sequences in [3, 1] {
            for (i, s) in drafts(&b, g.engine(), sequences).into_iter().enumerate() {
                g.speculate(s);
                assert_eq!(batch(&mut g, &all), want, "{} draft {i}", b.id());
                let stats = g.speculation().expect("the draft is given back").stats();
                // The model itself proposes what it chooses.
                if i == 1 {
                    let least = if is_cpu(&b) { (0.7, 5) } else { (0.3, 1) };
                    assert!(
                        stats.acceptance() > least.0 && stats.accepted >= least.1,
                        "{}: {stats:?}",
                        b.id()
                    );
                }
            }
        }
    }
}

#[test]
fn generators_streams_and_workers_with_drafts_generate_the_same() {
    let b = Backend::new(BackendType::Cpu).expect("the CPU");
    let mut g = generator(&b, 2, 128, 512);
    let options = |seed| GenerateOptions {
        max_tokens: Some(24),
        sampling: Sampling { seed, temperature: 1.3, ..Sampling::default() },
        stop: vec!["ba".into()],
        ..GenerateOptions::default()
    };
    let want: Vec<Outcome> =
        (0..4).map(|seed| outcome(&g.generate("abcabc", &options(seed)).expect("a text"))).collect();
    for (i, s) in drafts(&b, g.engine(), 2).into_iter().enumerate() {
        assert!(g.speculate(s).is_none());
        for (seed, want) in want.iter().enumerate() {
            let o = options(seed as u64);
            assert_eq!(&outcome(&g.generate("abcabc", &o).expect("a text")), want);
            let mut pieces = g.stream("abcabc", &o).expect("a stream");
            let (mut tokens, mut text, mut end) = (vec![], String::new(), None);
            while let Some(p) = pieces.next() {
                assert_eq!(end, None);
                let p = p.expect("a piece");
                tokens.extend(p.token);
                text += &p.text;
                end = p.finish;
                assert_eq!(pieces.finish(), end);
            }
            assert_eq!((&tokens, &text, end), (&want.0, &want.1, Some(want.2)));
        }
        let worker = g.into_worker().expect("a thread");
        let mut streams: Vec<_> = (0..4u64).map(|seed| worker.stream("abcabc", &options(seed))).collect();
        for (s, want) in streams.iter_mut().zip(&want) {
            let mut text = String::new();
            while let Some(p) = next(s) {
                text += &p.expect("a piece").text;
            }
            assert_eq!(text, want.1);
        }
        g = worker.join().expect("the generator");
        let s = g.speculate(None).expect("the worker keeps the draft");
        // A lookup finds nothing in texts without repetitions.
        assert!(s.stats().accepted > 10 || i != 1, "{:?}", s.stats());
    }
}

/// Rotations that depend on the length, and layers that go back a few positions only.
#[test]
fn drafts_in_batches_work_with_other_layers() {
    let b = Backend::new(BackendType::Cpu).expect("the CPU");
    for family in ["llama-dynamic", "lfm2", "qwen3_5"] {
        let decoder = decoder(&b, &Source::open(&folder(family)).expect("the model opens"), 80);
        let made = || {
            let options =
                EngineOptions { sequences: 2, positions: 160, page: 4, cache: DType::F32.into(), chunk: 64 };
            Generator::new(Engine::new(decoder.clone(), options).expect("an engine"), None, None)
        };
        let prompts: Vec<Vec<u32>> = (0..3).map(|i| (0..20 + i).map(|t| t * 7 % 30 + i).collect()).collect();
        let o = GenerateOptions {
            max_tokens: Some(30),
            sampling: Sampling { seed: 2, ..Sampling::default() },
            ..GenerateOptions::default()
        };
        let run = |g: &mut Generator| -> Vec<Vec<u32>> {
            g.batch(prompts.clone(), &o).expect("a batch").into_iter().map(|g| g.tokens).collect()
        };
        let want = run(&mut made());
        let mut g = made();
        let s = Speculation::with_model(engine(&decoder, 2, 64), g.engine(), always(3));
        g.speculate(s.expect("the same vocabulary"));
        assert_eq!(run(&mut g), want, "{family}");
        let stats = g.speculation().expect("a draft").stats();
        assert!(stats.accepted > 30, "{family}: {stats:?}");
    }
}
