//! `halcyon bench llm`: tokens per second, by llama-bench's protocol: a prompt of random tokens, then single
//! tokens, each after a given number of positions.

use super::{Defaults, FAST, MAX_CONTEXT, start};
use crate::args::BenchLlmArgs;
use crate::report;
use halcyon::{Error, Result};
use halcyon_models::{Engine, Feed, cache_name};
use serde_json::{Value, json};
use std::time::Instant;

pub(crate) fn main(a: &BenchLlmArgs) -> Result<u8> {
    if a.repeat == 0 || a.prompt == 0 && a.generate == 0 {
        return Err(Error::argument("bench llm", "there is nothing to measure"));
    }
    let deepest = a.depth.iter().copied().max().unwrap_or(0);
    let positions = deepest.saturating_add(a.prompt.max(a.generate).max(1));
    if positions > MAX_CONTEXT {
        let what = format!("{positions} positions, depth included; at most {MAX_CONTEXT}");
        return Err(Error::argument("bench llm", what));
    }
    let chunk = a.language.cache.chunk()?;
    let mut m = start(&a.language, Some(positions), Defaults { text: false, ..FAST })?;
    let (mut rows, mut lines) = (vec![], vec![]);
    let backend = m.devices();
    for depth in &a.depth {
        let tests = [("pp", a.prompt, chunk), ("tg", a.generate, 1)];
        for (name, n, step) in tests.into_iter().filter(|(_, n, _)| *n > 0) {
            let label = if *depth == 0 { format!("{name}{n}") } else { format!("{name}{n} @ d{depth}") };
            let mut rates = vec![];
            // The first run builds the plans.
            for run in 0..=a.repeat {
                let rate = measure(&mut m.engine, *depth, n, step, u64::from(run))?;
                if run > 0 {
                    rates.push(rate);
                }
            }
            let mean = rates.iter().sum::<f64>() / rates.len() as f64;
            let spread = rates.iter().map(|r| (r - mean).powi(2)).sum::<f64>() / rates.len() as f64;
            rows.push(json!({
                "test": label, "n": n, "depth": depth, "avg_ts": mean, "stddev_ts": spread.sqrt(), "samples_ts": rates,
            }));
            lines.push(vec![label, format!("{mean:.2} ± {:.2}", spread.sqrt())]);
        }
    }
    if a.json {
        let (spec, types) = (&m.file.spec, m.engine.options().cache);
        report::print_json(&json!({
            "model": report::path(&a.language.path()), "architecture": spec.family, "backend": backend,
            "placement": m.placement,
            "type_k": cache_name(types.keys), "type_v": cache_name(types.values), "results": Value::Array(rows),
        }))?;
    } else {
        lines.insert(0, vec!["test".into(), "tokens/s".into()]);
        report::print(&report::table(&lines))?;
        report::note(&format!("on {backend}"));
    }
    Ok(0)
}

/// Tokens per second of `n` tokens after `depth` positions, in steps of `step` tokens.
fn measure(engine: &mut Engine, depth: usize, n: usize, step: usize, seed: u64) -> Result<f64> {
    let vocabulary = engine.decoder().spec.vocabulary as u64;
    // Any tokens do: the time does not depend on them.
    let token =
        |i: usize| ((i as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15 ^ seed << 7) >> 20) % vocabulary;
    let tokens: Vec<u32> = (0..depth + n).map(|i| token(i) as u32).collect();
    engine.truncate(0, 0);
    if depth > 0 {
        engine.feed(&[Feed { sequence: 0, tokens: &tokens[..depth], all: false }])?;
    }
    let start = Instant::now();
    for part in tokens[depth..].chunks(step) {
        engine.feed(&[Feed { sequence: 0, tokens: part, all: false }])?;
    }
    Ok(n as f64 / start.elapsed().as_secs_f64())
}
