//! `--draft`, `--lookup` and `--mtp`.

use super::fit::{self, Work};
use super::{Running, hub};
use crate::args::{HubArgs, Mtp, SpeculationArgs};
use crate::report::{self, size};
use halcyon::{Error, Result};
use halcyon_models::fit::{MemoryNeed, StepSize, StoredWeights};
use halcyon_models::{
    Decoder, Engine, EngineOptions, LoadOptions, ModelFile, Speculation, SpeculationOptions,
};
use halcyon_text::Tokenizer;
use serde_json::{Value, json};
use std::path::Path;
use std::sync::Arc;

/// A loaded draft model, or the model's own layer for further tokens. Nothing is allocated for it yet.
pub(super) struct Draft {
    /// `None`: the layer is in the model's own file.
    file: Option<ModelFile>,
    pub decoder: Decoder,
    pub options: EngineOptions,
}

impl Draft {
    /// Loads a draft next to a model with an engine of these options.
    pub(super) fn open(
        path: &Path,
        hub: &HubArgs,
        model: &ModelFile,
        (decoder, options): (&Decoder, EngineOptions),
    ) -> Result<Draft> {
        let file = ModelFile::open(&hub::local(path, hub)?)?;
        for w in file.warnings()? {
            report::warn(&w);
        }
        if let (Some(a), Some(b)) = (file.tokenizer()?, model.tokenizer()?) {
            same_tokens(&a, &b)?;
        }
        let context = decoder.context().min(options.positions);
        let context = if file.spec.learned_positions { context.min(file.spec.context) } else { context };
        let positions = context.saturating_mul(options.sequences);
        let options = EngineOptions { positions, ..options };
        fit::check_host(&file)?;
        let decoder = file.load(decoder.backend(), context)?;
        Ok(Draft { file: Some(file), decoder, options })
    }

    /// Loads the model's own layer for further tokens, if it has one and `mtp` allows it.
    pub(super) fn own(
        mtp: Mtp,
        model: &ModelFile,
        (decoder, options): (&Decoder, EngineOptions),
        load: LoadOptions<'_>,
    ) -> Result<Option<Draft>> {
        let layer = match mtp {
            Mtp::Off => None,
            Mtp::On => model.load_ahead(decoder, load)?,
            // Without it the model works as well.
            Mtp::Auto => model.load_ahead(decoder, load).unwrap_or_else(|e| {
                report::warn(&format!("the layer for further tokens is not used: {}", report::message(&e)));
                None
            }),
        };
        if layer.is_none() && mtp == Mtp::On {
            let what = format!("--mtp on for {}", model.path.display());
            return Err(Error::unsupported(
                format!("{what}, which has no layer that predicts further tokens"),
                "Leave out --mtp, or give --draft or --lookup",
            ));
        }
        Ok(layer.map(|decoder| Draft { file: None, decoder, options }))
    }

    /// [`Draft::own`] if it fits with the steps that check up to `most` tokens. A layer that was not asked
    /// for is left out if it does not, with a note.
    pub(super) fn own_checked(
        mtp: Mtp,
        model: &ModelFile,
        both: (&Decoder, EngineOptions),
        load: LoadOptions<'_>,
        (work, most): (Work, usize),
    ) -> Result<Option<Draft>> {
        let Some(own) = Draft::own(mtp, model, both, load)? else { return Ok(None) };
        match fit::check_proposals(model, both, load, (work, Some(&own), most)) {
            Err(Error::OutOfMemory { device, requested, free, .. }) if mtp == Mtp::Auto => {
                report::note(&format!(
                    "the layer for further tokens is left out, as with --mtp off: with it, the model needs {} on \
                     {device}, where {} are free",
                    size(requested),
                    size(free)
                ));
                Ok(None)
            }
            checked => checked.map(|()| Some(own)),
        }
    }

    /// Whether this is the model's own layer.
    pub(super) fn is_own(&self) -> bool {
        self.file.is_none()
    }

    /// The sizes of the weights in its own files.
    pub(super) fn stored(&self) -> StoredWeights {
        self.file.as_ref().map(ModelFile::stored).unwrap_or_default()
    }

    /// The memory that it needs beside a model with these steps, and with this need on its device.
    pub(super) fn need(&self, work: Work, steps: &[StepSize], model: &MemoryNeed) -> Result<MemoryNeed> {
        let own = || work.steps(&self.decoder, self.options);
        match self.file {
            Some(_) => MemoryNeed::of(&self.decoder, self.options, &own()),
            None => MemoryNeed::of_ahead(&self.decoder, self.options, steps, model),
        }
    }
}

/// The draft that the options name. The model was started with them.
pub(super) fn speculation(a: &SpeculationArgs, m: &mut Running) -> Result<Option<Speculation>> {
    let options = SpeculationOptions { most: a.draft_max, ..SpeculationOptions::default() };
    if a.lookup {
        return Speculation::lookup(options).map(Some);
    }
    let Some(draft) = m.draft.take() else { return Ok(None) };
    if draft.is_own() {
        let layer = Arc::new(draft.decoder);
        m.ahead = Some(layer.clone());
        return Speculation::ahead(layer, &mut m.engine, options).map(Some);
    }
    let draft = Engine::new(Arc::new(draft.decoder), draft.options)?;
    Speculation::with_model(draft, &m.engine, options).map(Some)
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
