//! `halcyon generate --prompts`: continues many prompts together.

use super::speculate::{line, speculation};
use super::{Defaults, FAST, constrain::demand, generation_json, options, start_with};
use crate::args::{GenerateArgs, Mtp};
use crate::report;
use halcyon::{Error, Result};
use halcyon_formats::input;
use halcyon_models::{Batch, Event, GenerateOptions, Generation, Request};
use halcyon_text::Tokenizer;
use serde_json::Value;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

/// Prompts at once unless the user chooses.
const PARALLEL: usize = 8;

pub(super) fn main(a: &GenerateArgs, file: &Path) -> Result<u8> {
    let mut proposals = a.speculation.clone();
    if proposals.mtp.mtp == Mtp::Auto {
        // A step computes tokens of several sequences anyway, so the layer brings less than alone.
        proposals.mtp.mtp = Mtp::Off;
    }
    let mut options = options(&a.sampling)?;
    let demand = demand(&a.sampling)?;
    let text = input::text(file)?;
    let lines: Vec<(usize, &str)> =
        text.lines().enumerate().filter(|(_, l)| !l.trim().is_empty()).map(|(i, l)| (i + 1, l)).collect();
    if lines.is_empty() {
        return Err(Error::argument("--prompts", format!("{} has no prompts", file.display())));
    }
    let parallel = a.parallel.unwrap_or(PARALLEL);
    if parallel == 0 {
        return Err(Error::argument("--parallel", "must be at least 1"));
    }
    let defaults = Defaults { sequences: parallel.min(lines.len()), ..FAST };
    let mut m = start_with(&a.language, None, defaults, Some(&proposals))?;
    let tokenizer = m.tokenizer.take().map(Arc::new);
    options.mask = demand.map(|d| d.mask(tokenizer.as_deref())).transpose()?;
    let mut batch = Batch::new(tokenizer.clone());
    batch.speculate(speculation(&proposals, &mut m)?);
    for (number, line) in &lines {
        let at = |e: Error| Error::Format {
            file: format!("{}, line {number}", file.display()),
            what: report::message(&e),
        };
        let request = request(line, tokenizer.as_deref(), &options).map_err(at)?;
        batch.push(&m.engine, request).map_err(at)?;
    }
    let backend = m.devices();
    let start = Instant::now();
    let mut done: Vec<Option<Generation>> = vec![None; lines.len()];
    let (mut printed, mut tokens) = (0, 0);
    while !batch.is_idle() {
        for (id, event) in batch.step(&mut m.engine)? {
            match event {
                Event::Piece(_) => {}
                Event::Failed(e) => return Err(e),
                Event::Done(g) => {
                    tokens += g.tokens.len();
                    done[id] = Some(*g);
                }
            }
        }
        // In the order of the lines.
        while let Some(g) = done.get_mut(printed).and_then(Option::take) {
            print(&g, printed, a.json, tokenizer.is_some(), &backend)?;
            printed += 1;
        }
    }
    let time = start.elapsed().as_secs_f64();
    report::note(&format!(
        "{} prompts, {tokens} tokens in {time:.2} s, {:.1} tokens/s on {backend}",
        lines.len(),
        tokens as f64 / time.max(1e-9)
    ));
    if let Some(s) = batch.speculation().filter(|_| report::verbose()) {
        report::note(&line(s));
    }
    Ok(0)
}

fn print(g: &Generation, index: usize, json: bool, text: bool, backend: &str) -> Result<()> {
    if json {
        let mut v = generation_json(g, backend);
        v["index"] = index.into();
        return report::print(&format!("{v}\n"));
    }
    if text {
        return report::print(&format!("{}\n", g.text));
    }
    let ids: Vec<String> = g.tokens.iter().map(u32::to_string).collect();
    report::print(&format!("{}\n", ids.join(" ")))
}

/// The request of a line: a text, or a JSON object.
fn request(line: &str, tokenizer: Option<&Tokenizer>, options: &GenerateOptions) -> Result<Request> {
    let bad = |what: String| Error::argument("prompt", what);
    let encode = |text: &str| match tokenizer {
        Some(t) => t.encode(text, true, true),
        None => Err(bad("the model has no tokenizer; give objects with prompt_tokens".into())),
    };
    let mut options = options.clone();
    if !line.trim_start().starts_with('{') {
        return Ok(Request { prompt: encode(line)?, options });
    }
    let v: Value = serde_json::from_str(line).map_err(|e| bad(e.to_string()))?;
    let number = |key: &str| match &v[key] {
        Value::Null => Ok(None),
        n => n.as_u64().map(Some).ok_or_else(|| bad(format!("{key} is {n}: expected a whole number"))),
    };
    if let Some(key) = v.as_object().and_then(|o| o.keys().find(|k| !KEYS.contains(&k.as_str()))) {
        return Err(bad(format!("'{key}' is not one of {}", KEYS.join(", "))));
    }
    if let Some(seed) = number("seed")? {
        options.sampling.seed = seed;
    }
    if let Some(n) = number("max_tokens")? {
        options.max_tokens = Some(usize::try_from(n).unwrap_or(usize::MAX));
    }
    let prompt = match (&v["prompt"], &v["prompt_tokens"]) {
        (Value::String(text), Value::Null) => encode(text)?,
        (Value::Null, Value::Array(ids)) => {
            let id = |t: &Value| t.as_u64().and_then(|t| u32::try_from(t).ok());
            let ids: Option<Vec<u32>> = ids.iter().map(id).collect();
            ids.ok_or_else(|| bad("prompt_tokens are not all token ids".into()))?
        }
        _ => return Err(bad("expected either prompt, a text, or prompt_tokens, a list".into())),
    };
    Ok(Request { prompt, options })
}

/// The keys of an object.
const KEYS: [&str; 4] = ["prompt", "prompt_tokens", "seed", "max_tokens"];
