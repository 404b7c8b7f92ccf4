//! BERT: learned positions, token types, norms after the parts of a layer.

use super::{EncoderSpec, Family};
use crate::family::{Base, Hf, Meta};
use crate::rope::Layout;
use crate::spec::{Activation, Ffn};
use halcyon::ir::error::{Error, Result};

pub(super) const FAMILY: Family =
    Family { name: "bert", hf: &["bert"], from_hf: hf, gguf: &["bert"], from_gguf: gguf };

fn hf(c: &Hf<'_>) -> Result<EncoderSpec> {
    read("bert", c, 0)
}

/// The configuration of an encoder with BERT's layers. `first` is the row of the first position.
pub(super) fn read(family: &'static str, c: &Hf<'_>, first: usize) -> Result<EncoderSpec> {
    if c.flag("is_decoder") {
        return Err(Error::unsupported(
            format!("{family} as a decoder ('is_decoder' of config.json)"),
            "Use an encoder",
        ));
    }
    if let Some(kind) = c.get("position_embedding_type").and_then(|v| v.as_str())
        && kind != "absolute"
    {
        return Err(Error::unsupported(
            format!("position_embedding_type '{kind}'"),
            "Use a model with absolute positions",
        ));
    }
    let mut base = Base::hf(family, c)?;
    base.context = base.context.saturating_sub(first);
    let activation = c.activation("hidden_act")?;
    Ok(with(&base, first, activation))
}

fn with(base: &Base, first: usize, activation: Activation) -> EncoderSpec {
    let mut s = EncoderSpec::post_norm(base, first);
    s.body.layers.iter_mut().for_each(|l| l.ffn = Ffn::Plain(activation));
    s
}

/// GGUF files of RoBERTa have this architecture too. They lack the unused rows of positions.
fn gguf(m: &Meta<'_>) -> Result<EncoderSpec> {
    if m.flag("attention.causal")? {
        return Err(Error::unsupported("bert with causal attention", "Use an encoder"));
    }
    // Most files do not name the activation. Published models have the exact GELU.
    let activation = match m.maybe_str("hidden_activation")? {
        Some("gelu_pytorch_tanh") => Activation::GeluTanh,
        _ => Activation::Gelu,
    };
    Ok(with(&Base::gguf("bert", m, Layout::Half)?, 0, activation))
}
