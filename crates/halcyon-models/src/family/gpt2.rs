//! GPT-2: learned positions and layer norms.

use super::{Base, Family, Hf, Meta};
use crate::rope::Layout;
use crate::spec::{Activation, Ffn, Spec};
use halcyon::ir::error::Result;

pub(super) const FAMILY: Family =
    Family { name: "gpt2", hf: &["gpt2"], from_hf: hf, gguf: &["gpt2"], from_gguf: gguf };

fn own(base: Base, activation: Activation) -> Spec {
    let mut s = base.spec();
    s.learned_positions = true;
    s.final_norm = base.layer_norm();
    for l in &mut s.layers {
        (l.norm, l.ffn) = (base.layer_norm(), Ffn::Plain(activation));
    }
    s.each_attention(|_, a| a.rope = None);
    s
}

fn hf(c: &Hf<'_>) -> Result<Spec> {
    let (hidden, heads) = (c.usize("n_embd")?, c.usize("n_head")?);
    if heads == 0 {
        return Err(c.bad("'n_head' is 0"));
    }
    let base = Base {
        family: "gpt2",
        vocabulary: c.usize("vocab_size")?,
        hidden,
        context: c.usize("n_positions")?,
        layers: c.usize("n_layer")?,
        heads,
        shared: heads,
        head: hidden / heads,
        inner: c.maybe_usize("n_inner")?.unwrap_or(hidden.saturating_mul(4)),
        eps: c.f64("layer_norm_epsilon")?,
        activation: c.activation("activation_function")?,
        rope: None,
    };
    let activation = base.activation;
    let mut s = own(base, activation);
    if c.get("scale_attn_weights").is_some_and(|v| v == false) {
        s.each_attention(|_, a| a.scale = 1.0);
    }
    if c.flag("scale_attn_by_inverse_layer_idx") {
        s.each_attention(|i, a| a.scale /= (i + 1) as f64);
    }
    Ok(s)
}

fn gguf(m: &Meta<'_>) -> Result<Spec> {
    Ok(own(Base::gguf("gpt2", m, Layout::Half)?, Activation::GeluTanh))
}
