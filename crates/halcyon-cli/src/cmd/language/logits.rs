//! `halcyon logits`: writes the logits of tokens.

use super::outfile::{files_with, refuse_inputs};
use super::{EXACT, hub, start, tokens};
use crate::args::LogitsArgs;
use crate::report;
use halcyon::{ConstData, Error, Result};
use halcyon_formats::npy;
use halcyon_models::Feed;

pub(crate) fn main(a: &LogitsArgs) -> Result<u8> {
    let l = &a.language;
    let mut inputs = files_with(&hub::local(&l.path(), &l.hub)?, &hub::adapters(&l.lora, &l.hub)?);
    inputs.push(a.tokens.clone());
    refuse_inputs(&inputs, &a.output, "--output")?;
    let ids = tokens(&a.tokens)?;
    if ids.is_empty() {
        return Err(Error::argument("--tokens", "the file has no tokens"));
    }
    let mut m = start(&a.language, Some(ids.len()), EXACT)?;
    let z = m.engine.feed(&[Feed { sequence: 0, tokens: &ids, all: true }])?.pop().unwrap_or_default();
    let vocabulary = m.engine.decoder().spec.vocabulary;
    npy::write(&a.output, &ConstData::from_slice(&[ids.len(), vocabulary], &z)?)?;
    report::note(&format!("{}: f32 [{}, {vocabulary}] from {}", a.output.display(), ids.len(), m.devices()));
    Ok(0)
}
