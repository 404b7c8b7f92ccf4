//! A trained model of 260,000 parameters, in every form in which it is stored.

use crate::common::*;
use halcyon::prelude::*;
use halcyon_models::Source;
use halcyon_test::{devices, models};
use serde_json::Value;
use std::path::Path;

/// What is expected of the model.
struct Expected {
    prompt: Vec<u32>,
    greedy: Vec<u32>,
    logits: Vec<f64>,
}

fn expected(dir: &Path) -> Expected {
    let text = std::fs::read_to_string(dir.join("expected.json")).expect("the expected values");
    let v: Value = serde_json::from_str(&text).expect("JSON");
    let list = |key: &str| v[key].as_array().expect("a list").clone();
    let ids = |key: &str| list(key).iter().map(|t| t.as_u64().expect("a token") as u32).collect();
    let logits = list("last_logits").iter().map(|z| z.as_f64().expect("a logit")).collect();
    Expected { prompt: ids("prompt_ids"), greedy: ids("greedy_ids"), logits }
}

/// The logits after the prompt, and the next tokens.
fn run(b: &Backend, path: &Path, prompt: &[u32], n: usize) -> (Vec<f32>, Vec<u32>) {
    let source = Source::open(path).expect("the model opens");
    let decoder = decoder(b, &source, 128);
    let mut e = engine(&decoder, 1, 512);
    let logits = feed(&mut e, prompt, false);
    (logits.clone(), greedy(&mut e, logits, n))
}

#[test]
fn every_form_tells_the_same_story() {
    let name = "every_form_tells_the_same_story";
    let Some(dir) = models(name, "stories260k") else { return };
    let want = expected(&dir);
    let cpu = Backend::new(BackendType::Cpu).expect("the CPU");
    let q4 = dir.join("stories260k-q4_0.gguf");
    let (_, own) = run(&cpu, &q4, &want.prompt, want.greedy.len());
    for b in devices::devices(name, Level::O2) {
        // Devices that are emulated are slow.
        let n = if is_cpu(&b) { want.greedy.len() } else { 8 };
        for (file, error) in [("", 1e-3), ("-f32.gguf", 1e-3), ("-f16.gguf", 0.02), ("-q8_0.gguf", 0.3)] {
            let path = if file.is_empty() { dir.clone() } else { dir.join(format!("stories260k{file}")) };
            let (logits, tokens) = run(&b, &path, &want.prompt, n);
            let far = logits.iter().zip(&want.logits).map(|(g, w)| (f64::from(*g) - w).abs());
            let far = far.fold(0.0, |a, d| if d.is_nan() { f64::INFINITY } else { d.max(a) });
            assert!(far < error, "{} on {}: the logits are off by {far}", path.display(), b.id());
            assert_eq!(tokens, want.greedy[..n], "{} on {}", path.display(), b.id());
        }
        assert_eq!(run(&b, &q4, &want.prompt, n).1, own[..n], "{} on {}", q4.display(), b.id());
    }
}
