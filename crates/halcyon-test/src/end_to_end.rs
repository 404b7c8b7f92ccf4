//! End-to-end tests on one backend: decoding with a Llama model that keeps states, and training an MLP
//! through the gradient pass. Failures are returned as errors, not panics, because `halcyon-check` runs the
//! tests too.
#![allow(unreachable_pub, reason = "the included examples have public items")]

#[path = "../../../examples/02_stories.rs"]
mod stories;
#[path = "../../../examples/03_train_mlp.rs"]
mod train_mlp;

use halcyon::prelude::*;
use std::path::Path;

/// No limit on tokens or steps.
pub const ALL: usize = usize::MAX;

/// A description of the result, or of what is wrong.
pub type Found = std::result::Result<String, String>;

fn must(holds: bool, what: impl FnOnce() -> String) -> std::result::Result<(), String> {
    if holds { Ok(()) } else { Err(what()) }
}

/// Largest difference of two lists; infinite if a value is NaN or the lengths differ.
fn worst(got: impl ExactSizeIterator<Item = f64>, want: &[f64]) -> f64 {
    if got.len() != want.len() {
        return f64::INFINITY;
    }
    got.zip(want)
        .map(|(a, b)| (a - b).abs())
        .fold(0.0, |w, d| if d.is_nan() { f64::INFINITY } else { d.max(w) })
}

/// Decodes at most `tokens` tokens with the model in `dir` (`stories260k`), and compares them with the
/// expected output there.
pub fn stories(b: &Backend, dir: &Path, tokens: usize) -> Found {
    let who = format!("{} {}", b.id(), b.level());
    let text = std::fs::read_to_string(dir.join("expected.json")).map_err(|e| e.to_string())?;
    let want: stories::Expected = serde_json::from_str(&text).map_err(|e| e.to_string())?;
    let n = want.greedy_ids.len().min(tokens);
    let d = stories::decode(b, dir, &want.prompt_ids, n).map_err(|e| e.to_string())?;
    let far = worst(d.logits.iter().map(|v| *v as f64), &want.last_logits);
    must(far < 1e-3, || format!("{who}: logits are off by {far}"))?;
    must(d.ids == want.greedy_ids[..n], || format!("{who}: {:?}, expected {:?}", d.ids, want.greedy_ids))?;
    // Nothing is planned, compiled or allocated after the second token.
    let (second, last) = (d.made.get(1), d.made.last());
    must(second.is_some() && second == last, || {
        format!("{who}: (plans, kernels, allocations) {second:?} after the second token, {last:?} at the end")
    })?;
    let copies = b.cache_stats().copies;
    must(copies == 0, || format!("{who}: {copies} caches were copied instead of updated in place"))?;
    Ok(format!("{} tokens as expected, logits within {far:.1e}", d.ids.len()))
}

/// Trains an MLP on the digits in `data`, from the start values in `dir`, and compares the losses and weights
/// with those of a run in float64, which are in `dir` too. The weights are compared only after all steps.
pub fn mlp(b: &Backend, dir: &Path, data: &Path, steps: usize) -> Found {
    let read = |f: &str| halcyon_formats::npy::read(&dir.join(f)).map_err(|e| e.to_string());
    let start = ["w0.npy", "b0.npy", "w1.npy", "b1.npy"].map(read);
    let start = start.into_iter().collect::<std::result::Result<Vec<_>, _>>()?;
    let losses = read("losses.npy")?.to_vec::<f64>();
    let steps = steps.min(losses.len());
    let run = train_mlp::train(b, data, &start, steps, 64, 0.1).map_err(|e| e.to_string())?;
    let far = worst(run.losses.iter().copied(), &losses[..steps]);
    must(far < 1e-4, || format!("{}: losses are off by {far}", b.id()))?;
    let last = ["final_w0.npy", "final_b0.npy", "final_w1.npy", "final_b1.npy"];
    must(run.weights.len() == last.len(), || format!("{} weights", run.weights.len()))?;
    for (w, f) in run.weights.iter().zip(last).filter(|_| steps == losses.len()) {
        let far = worst(w.iter().copied(), &read(f)?.to_vec::<f64>());
        must(far < 1e-4, || format!("{} {f}: off by {far}", b.id()))?;
    }
    let (second, last) = (run.plans.get(1), run.plans.last());
    must(second.is_some() && second == last, || {
        format!("plans: {second:?} after two steps, {last:?} at the end")
    })?;
    Ok(format!("{} steps, losses within {far:.1e}", run.losses.len()))
}
