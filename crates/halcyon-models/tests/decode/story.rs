//! The trained model of 260,000 parameters, and what is expected of its files.

use crate::common::*;
use halcyon::prelude::*;
use halcyon_models::Source;
use serde_json::Value;
use std::path::Path;

/// The files: the folder, and GGUF files in four types, with the error that their logits may have. The
/// logits of the last one have no bound, because rounding to 4 bits changes them much.
pub(crate) const FILES: [(&str, Option<f64>); 5] = [
    ("", Some(1e-3)),
    ("stories260k-f32.gguf", Some(1e-3)),
    ("stories260k-f16.gguf", Some(0.02)),
    ("stories260k-q8_0.gguf", Some(0.3)),
    ("stories260k-q4_0.gguf", None),
];

/// What is expected of the model.
pub(crate) struct Expected {
    pub(crate) prompt: Vec<u32>,
    pub(crate) greedy: Vec<u32>,
    pub(crate) logits: Vec<f64>,
}

pub(crate) fn expected(dir: &Path) -> Expected {
    let text = std::fs::read_to_string(dir.join("expected.json")).expect("the expected values");
    let v: Value = serde_json::from_str(&text).expect("JSON");
    let list = |key: &str| v[key].as_array().expect("a list").clone();
    let ids = |key: &str| list(key).iter().map(|t| t.as_u64().expect("a token") as u32).collect();
    let logits = list("last_logits").iter().map(|z| z.as_f64().expect("a logit")).collect();
    Expected { prompt: ids("prompt_ids"), greedy: ids("greedy_ids"), logits }
}

/// The logits after the prompt, and the next tokens.
pub(crate) fn run(b: &Backend, path: &Path, prompt: &[u32], n: usize) -> (Vec<f32>, Vec<u32>) {
    let source = Source::open(path).expect("the model opens");
    let decoder = decoder(b, &source, 128);
    let mut e = engine(&decoder, 1, 512);
    let logits = feed(&mut e, prompt, false);
    (logits.clone(), greedy(&mut e, logits, n))
}

/// Checks the first `n` tokens of a file on a device, and the logits before them. `own` is what the CPU
/// continues the file of 4 bits with.
pub(crate) fn check(
    b: &Backend,
    dir: &Path,
    (file, error): (&str, Option<f64>),
    want: &Expected,
    (own, n): (&[u32], usize),
) {
    let path = if file.is_empty() { dir.into() } else { dir.join(file) };
    let (logits, tokens) = run(b, &path, &want.prompt, n);
    let Some(error) = error else {
        assert_eq!(tokens, own[..n], "{} on {}", path.display(), b.id());
        return;
    };
    let far = logits.iter().zip(&want.logits).map(|(g, w)| (f64::from(*g) - w).abs());
    let far = far.fold(0.0, |a, d| if d.is_nan() { f64::INFINITY } else { d.max(a) });
    assert!(far < error, "{} on {}: the logits are off by {far}", path.display(), b.id());
    assert_eq!(tokens, want.greedy[..n], "{} on {}", path.display(), b.id());
}
