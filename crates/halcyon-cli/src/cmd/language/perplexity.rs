//! `halcyon perplexity`: how well a model predicts a text.

use super::{MEASURE, start};
use crate::args::PerplexityArgs;
use crate::report;
use halcyon::{Error, Result};
use halcyon_formats::input;
use halcyon_models::Feed;
use serde_json::json;

/// Positions of a window unless the user chooses them.
const WINDOW: usize = 512;

pub(crate) fn main(a: &PerplexityArgs) -> Result<u8> {
    let text = input::text(&a.text)?;
    let window = a.language.cache.context.filter(|n| *n > 0).unwrap_or(WINDOW);
    if window < 2 {
        return Err(Error::argument("--context", "a window has at least 2 positions"));
    }
    let mut m = start(&a.language, Some(window), MEASURE)?;
    let tokenizer = m.tokenizer()?;
    let ids = tokenizer.encode(&text, true, false)?;
    if ids.len() < 3 {
        return Err(Error::argument("perplexity", "the text is too short; give a longer one (--file)"));
    }
    if ids.len() < window {
        let what =
            format!("the text has {} tokens, and a window {window}; choose a smaller --context", ids.len());
        return Err(Error::argument("perplexity", what));
    }
    let vocabulary = m.engine.decoder().spec.vocabulary;
    let bos = tokenizer.special_ids().bos.filter(|b| ids.first() == Some(b));
    let (mut sum, mut count) = (0f64, 0usize);
    let windows = ids.len() / window;
    let mut progress = report::Progress::bar("windows", windows as u64);
    for part in ids.chunks_exact(window) {
        // Each window begins as a text does.
        let mut fed = part.to_vec();
        if let Some(b) = bos {
            fed[0] = b;
        }
        m.engine.truncate(0, 0);
        let z = m.engine.feed(&[Feed { sequence: 0, tokens: &fed, all: true }])?.pop().unwrap_or_default();
        for at in window / 2..window - 1 {
            sum -= log_probability(&z[at * vocabulary..(at + 1) * vocabulary], part[at + 1] as usize);
            count += 1;
        }
        progress.step();
    }
    progress.finish();
    let perplexity = (sum / count.max(1) as f64).exp();
    if a.json {
        let backend = m.devices();
        report::print_json(&json!({
            "perplexity": perplexity, "tokens": count, "windows": windows, "window": window, "backend": backend,
            "placement": m.placement,
        }))?;
    } else {
        report::print(&format!("{perplexity:.4}\n"))?;
        report::note(&format!("{count} tokens predicted in {windows} windows of {window}"));
    }
    Ok(0)
}

/// The logarithm of the softmax's element `at`.
fn log_probability(z: &[f32], at: usize) -> f64 {
    let top = z.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = z.iter().map(|v| f64::from(v - top).exp()).sum();
    f64::from(z[at] - top) - sum.ln()
}
