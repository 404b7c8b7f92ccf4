//! `--draft` and `--lookup`.

use super::{Running, fit, hub};
use crate::args::{LanguageArgs, SpeculationArgs};
use crate::report;
use halcyon::{Error, Result};
use halcyon_models::{Engine, EngineOptions, ModelFile, Speculation, SpeculationOptions};
use halcyon_text::Tokenizer;
use serde_json::{Value, json};
use std::path::Path;
use std::sync::Arc;

/// The draft that the options name.
pub(super) fn speculation(
    a: &SpeculationArgs,
    language: &LanguageArgs,
    m: &Running,
) -> Result<Option<Speculation>> {
    let options = SpeculationOptions { most: a.draft_max, ..SpeculationOptions::default() };
    if a.lookup {
        return Speculation::lookup(options).map(Some);
    }
    let Some(path) = &a.draft else { return Ok(None) };
    let draft = open(path, language, m)?;
    Speculation::with_model(draft, &m.engine, options).map(Some)
}

fn open(path: &Path, language: &LanguageArgs, m: &Running) -> Result<Engine> {
    let file = ModelFile::open(&hub::local(path, &language.hub)?)?;
    for w in file.warnings()? {
        report::warn(&w);
    }
    if let (Some(a), Some(b)) = (file.tokenizer()?, m.file.tokenizer()?) {
        same_tokens(&a, &b)?;
    }
    let (context, decoder) = (m.engine.context(), m.engine.decoder());
    let context = if file.spec.learned_positions { context.min(file.spec.context) } else { context };
    let options = EngineOptions { positions: context, chunk: language.chunk, ..*m.engine.options() };
    fit::check_host(&file)?;
    let decoder = file.load(decoder.backend(), context)?;
    fit::check(&file, &decoder, options, false)?;
    Engine::new(Arc::new(decoder), options)
}

fn same_tokens(draft: &Tokenizer, model: &Tokenizer) -> Result<()> {
    let count = draft.vocab_size().min(model.vocab_size()) as u32;
    match (0..count).find(|id| draft.token_text(*id) != model.token_text(*id)) {
        None => Ok(()),
        Some(id) => {
            let [a, b] = [draft, model].map(|t| t.token_text(id).unwrap_or("").to_string());
            let what = format!("token {id} is '{a}', but '{b}' in the model; both need the same tokens");
            Err(Error::argument("--draft", what))
        }
    }
}

/// What the speculation brought, as a line.
pub(super) fn line(s: &Speculation) -> String {
    let t = s.stats();
    let speed_up = t.speed_up.map_or(String::new(), |s| format!(", {s:.2} times as fast as without"));
    format!(
        "drafts: {} of {} tokens accepted ({:.0} %), {} steps with drafts and {} without{speed_up}",
        t.accepted,
        t.proposed,
        t.acceptance() * 100.0,
        t.verified,
        t.plain,
    )
}

/// The same as JSON.
pub(super) fn to_json(s: &Speculation) -> Value {
    let t = s.stats();
    json!({
        "proposed": t.proposed, "accepted": t.accepted, "acceptance": t.acceptance(),
        "steps_with_drafts": t.verified, "steps_without": t.plain, "speed_up": t.speed_up,
    })
}
