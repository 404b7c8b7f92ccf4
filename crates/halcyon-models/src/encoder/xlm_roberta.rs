//! RoBERTa and XLM-RoBERTa: BERT whose positions begin after the row of the padding token.

use super::{EncoderSpec, Family, bert};
use crate::family::{Hf, Meta};
use halcyon::ir::error::{Error, Result};

pub(super) const FAMILY: Family = Family {
    name: "xlm-roberta",
    hf: &["xlm-roberta", "roberta", "camembert"],
    from_hf: hf,
    gguf: &[],
    from_gguf: gguf,
};

fn hf(c: &Hf<'_>) -> Result<EncoderSpec> {
    let pad = c.maybe_usize("pad_token_id")?.unwrap_or(1);
    bert::read("xlm-roberta", c, pad.saturating_add(1))
}

fn gguf(_: &Meta<'_>) -> Result<EncoderSpec> {
    Err(Error::internal("GGUF files of RoBERTa have the architecture bert"))
}
