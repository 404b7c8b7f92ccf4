//! ModernBERT: rotation, local layers between global ones, a gated feed-forward part, norms before the parts.

use super::{EncoderLayer, EncoderSpec, Family};
use crate::family::{Base, Hf, Meta};
use crate::rope::{Layout, Rope};
use crate::spec::{Activation, Ffn};
use halcyon::ir::error::Result;

pub(super) const FAMILY: Family =
    Family { name: "modernbert", hf: &["modernbert"], from_hf: hf, gguf: &["modern-bert"], from_gguf: gguf };

/// `ropes` are those of global and local layers, and `window` counts the positions on both sides.
fn with(
    base: &Base,
    ropes: [Rope; 2],
    window: usize,
    activation: Activation,
    local: impl Fn(usize) -> bool,
) -> EncoderSpec {
    let mut body = base.spec();
    body.layers.iter_mut().for_each(|l| l.ffn = Ffn::Gated(activation));
    let layer = |i: usize| {
        let local = local(i);
        EncoderLayer { local, rope: Some(ropes[usize::from(local)].clone()) }
    };
    EncoderSpec {
        layers: (0..body.layers.len()).map(layer).collect(),
        body,
        norm: base.layer_norm(),
        norm_after: false,
        heads: base.heads,
        first_position: None,
        reach: window / 2,
    }
}

fn hf(c: &Hf<'_>) -> Result<EncoderSpec> {
    let base = Base::hf("modernbert", c)?;
    // Before transformers 5, the bases had keys of their own.
    let rope = |kind: &str, key: &str| -> Result<Rope> {
        match c.maybe_f64(key)? {
            Some(theta) => Ok(Rope::plain(theta, base.head, Layout::Half)),
            None => c.rope(base.head, Some(kind)),
        }
    };
    let global = rope("full_attention", "global_rope_theta")?;
    let local = match (c.get("rope_parameters"), c.get("local_rope_theta")) {
        (None, None) => global.clone(),
        _ => rope("sliding_attention", "local_rope_theta")?,
    };
    let every = c.maybe_usize("global_attn_every_n_layers")?.unwrap_or(3).max(1);
    let slides = |i: usize| c.slides(i).unwrap_or(!i.is_multiple_of(every));
    let activation = c.activation("hidden_activation")?;
    Ok(with(&base, [global, local], c.maybe_usize("local_attention")?.unwrap_or(128), activation, slides))
}

fn gguf(m: &Meta<'_>) -> Result<EncoderSpec> {
    let base = Base::gguf("modernbert", m, Layout::Half)?;
    let global = m.rope(base.head, Layout::Half)?;
    let mut local = global.clone();
    if let Some(theta) = m.maybe_f64("rope.freq_base_swa")? {
        local.base = theta;
    }
    let listed = m.pattern("attention.sliding_window_pattern");
    let every = match listed {
        Some(_) => 1,
        None => m.maybe_usize("attention.sliding_window_pattern")?.unwrap_or(3).max(1),
    };
    let slides = |i: usize| match &listed {
        Some(l) => l.get(i).copied().unwrap_or(false),
        None => !i.is_multiple_of(every),
    };
    let window = m.maybe_usize("attention.sliding_window")?.unwrap_or(128);
    Ok(with(&base, [global, local], window, Activation::Gelu, slides))
}
