//! `halcyon generate`: continues a text.

use super::constrain::demand;
use super::interrupt::{self, Doing};
use super::speculate::{line, speculation, to_json};
use super::{FAST, generation_json, options, start_with, text_or_stdin, times, tokens, write_piece};
use crate::args::GenerateArgs;
use crate::cmd::run::report::memory_json;
use crate::report;
use halcyon::host::MemorySampler;
use halcyon::{Error, Result};
use halcyon_models::generate;
use serde_json::json;
use std::ops::ControlFlow;
use std::time::Duration;

pub(crate) fn main(a: &GenerateArgs) -> Result<u8> {
    if let Some(file) = &a.prompts {
        return super::batch::main(a, file);
    }
    if a.parallel.is_some() {
        return Err(Error::argument("--parallel", "it is for --prompts"));
    }
    let mut options = options(&a.sampling)?;
    let demand = demand(&a.sampling)?;
    let watch = a.json.then(|| MemorySampler::start(Duration::from_millis(2))).flatten();
    let mut m = start_with(&a.language, None, FAST, Some(&a.speculation))?;
    let tokenizer = match &a.prompt {
        Some(_) => Some(m.take_tokenizer()?),
        None => m.tokenizer.take(),
    };
    let prompt = match (&a.prompt_tokens, &a.prompt, &tokenizer) {
        (Some(file), ..) => tokens(file)?,
        (None, Some(text), Some(t)) => t.encode(&text_or_stdin(text)?, true, true)?,
        _ => return Err(Error::argument("generate", "give --prompt or --prompt-tokens")),
    };
    if prompt.is_empty() {
        return Err(Error::argument("--prompt", "the prompt has no tokens"));
    }
    options.mask = demand.map(|d| d.mask(tokenizer.as_ref())).transpose()?;
    let mut speculation = speculation(&a.speculation, &mut m)?;
    let print = !a.json;
    let mut on_text = |piece: &str| match (!print || write_piece(piece)) && !interrupt::stopped() {
        true => ControlFlow::Continue(()),
        false => ControlFlow::Break(()),
    };
    interrupt::handle();
    // Without a tokenizer nothing asks whether Ctrl-C was pressed.
    if tokenizer.is_some() {
        interrupt::doing(Doing::Answering);
    }
    let t = tokenizer.as_ref();
    let g = match &mut speculation {
        None => generate(&mut m.engine, 0, t, &prompt, &options, &mut on_text)?,
        Some(s) => s.generate(&mut m.engine, 0, t, &prompt, &options, &mut on_text)?,
    };
    let code = if interrupt::stopped() { interrupt::CODE } else { 0 };
    let backend = m.devices();
    if a.json {
        let mut v = generation_json(&g, &backend);
        v["placement"] = m.placement.clone();
        v["memory"] = json!({
            "process_peak_bytes": report::peak_memory(),
            "peak_anonymous": watch.map(|w| w.peak().bytes),
            "device": memory_json(&m.engine.decoder().backend().memory()),
        });
        if let Some(s) = &speculation {
            v["speculation"] = to_json(s);
        }
        report::print_json(&v)?;
        return Ok(code);
    }
    if tokenizer.is_none() {
        let ids: Vec<String> = g.tokens.iter().map(u32::to_string).collect();
        report::print(&ids.join(" "))?;
    }
    report::print("\n")?;
    report::note(&format!("{} on {backend}", times(&g)));
    if let Some(s) = speculation.as_ref().filter(|_| report::verbose()) {
        report::note(&line(s));
    }
    Ok(code)
}
