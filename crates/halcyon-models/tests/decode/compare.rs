//! Compares models with what transformers computed.
#![allow(dead_code, reason = "`standin_models` uses a part")]

use crate::common::*;
use halcyon::prelude::*;
use halcyon_formats::npz::Npz;
use halcyon_models::Source;
use halcyon_models::rope::Scaling;
use halcyon_models::spec::Mixer;
use std::path::{Path, PathBuf};

/// The folders of `tests/data`.
pub(crate) fn folders() -> Vec<PathBuf> {
    let data = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data");
    let all = std::fs::read_dir(data).expect("the stored models").flatten().map(|e| e.path());
    let mut all: Vec<PathBuf> = all.filter(|p| p.join("config.json").is_file()).collect();
    all.sort();
    assert_eq!(all.len(), 31, "{all:?}");
    all
}

/// The folder of a family.
pub(crate) fn folder(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

/// How the prompt is fed.
#[derive(Clone, Copy, Debug)]
pub(crate) enum How {
    Whole,
    Chunks,
    Tokens,
}

/// Compares the logits and the continuation of a folder's model.
pub(crate) fn case(b: &Backend, dir: &Path, ways: &[How]) {
    compare(b, dir, &dir.join("expected.npz"), ways);
}

/// Compares the logits of a model with those in a file, and the continuation if the file has one.
pub(crate) fn compare(b: &Backend, dir: &Path, expected: &Path, ways: &[How]) {
    let stored = Npz::open(expected).expect("the expected values");
    let get = |name: &str| stored.get(name).expect("an array");
    let ids = |name: &str| -> Vec<u32> { get(name).to_vec::<i64>().iter().map(|v| *v as u32).collect() };
    let (prompt, want) = (ids("ids"), get("logits").to_vec::<f64>());
    let generated = if stored.get("generated").is_ok() { ids("generated") } else { vec![] };
    let source = Source::open(dir).expect("the model opens");
    let decoder = decoder(b, &source, (prompt.len() + generated.len()).next_multiple_of(4));
    let mean = want.iter().sum::<f64>() / want.len() as f64;
    let std = (want.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / want.len() as f64).sqrt();
    // These rotations depend on the length that a sequence has when a token is fed.
    let by_length = decoder.spec.layers.iter().any(|l| {
        let Mixer::Attention(a) = &l.mixer else { return false };
        a.rope.as_ref().is_some_and(|r| matches!(r.scaling, Scaling::Dynamic { .. } | Scaling::Long { .. }))
    });
    let mut first: Option<Vec<u32>> = None;
    for way in ways {
        let who = format!("{} on {} ({way:?})", dir.display(), b.id());
        let mut e = engine(&decoder, 1, if matches!(way, How::Chunks) { 5 } else { 512 });
        let got = match way {
            How::Tokens if by_length => continue,
            How::Tokens => prompt.iter().flat_map(|t| feed(&mut e, &[*t], false)).collect(),
            _ => feed(&mut e, &prompt, true),
        };
        assert_eq!(got.len(), want.len(), "{who}");
        let far = |(g, w): (&f32, &f64)| g.is_nan() || (f64::from(*g) - w).abs() > 1e-3 * std;
        if let Some(at) = got.iter().zip(&want).position(far) {
            panic!("{who}: logit {at} is {}, expected {}, deviation {std}", got[at], want[at]);
        }
        let got_bits = bits(&got);
        assert!(
            *first.get_or_insert_with(|| got_bits.clone()) == got_bits,
            "{who}: other bits than {:?}",
            ways[0]
        );
        let last = got[got.len() - decoder.spec.vocabulary..].to_vec();
        assert_eq!(greedy(&mut e, last, generated.len()), generated, "{who}");
    }
}
