//! Falcon: attention and feed-forward part side by side.

use super::{Base, Family, Hf, Meta};
use crate::rope::Layout;
use crate::spec::{Activation, Ffn, Order, Spec};
use halcyon::ir::error::{Error, Result};

pub(super) const FAMILY: Family =
    Family { name: "falcon", hf: &["falcon"], from_hf: hf, gguf: &["falcon"], from_gguf: gguf };

fn own(base: Base, order: Order, activation: Activation) -> Spec {
    let mut s = base.spec();
    s.final_norm = base.layer_norm();
    for l in &mut s.layers {
        (l.norm, l.ffn, l.order) = (base.layer_norm(), Ffn::Plain(activation), order);
    }
    s
}

fn hf(c: &Hf<'_>) -> Result<Spec> {
    if c.flag("alibi") {
        return Err(Error::unsupported("Falcon models with ALiBi", "Use a model with rotary positions"));
    }
    let (hidden, heads) = (c.usize("hidden_size")?, c.usize("num_attention_heads")?);
    if heads == 0 {
        return Err(c.bad("'num_attention_heads' is 0"));
    }
    let new = c.flag("new_decoder_architecture");
    let shared = match (new, c.get("multi_query").is_none_or(|v| v.as_bool() == Some(true))) {
        (true, _) => c.maybe_usize("num_kv_heads")?.unwrap_or(heads),
        (false, true) => 1,
        (false, false) => heads,
    };
    let order = match (new, c.maybe_usize("num_ln_in_parallel_attn")?) {
        (true, Some(1)) => Order::Parallel,
        (true, _) => Order::ParallelTwo,
        (false, _) if c.get("parallel_attn").is_none_or(|v| v.as_bool() == Some(true)) => Order::Parallel,
        (false, _) => Order::Before,
    };
    let base = Base {
        family: "falcon",
        vocabulary: c.usize("vocab_size")?,
        hidden,
        context: c.maybe_usize("max_position_embeddings")?.unwrap_or(2048),
        layers: c.usize("num_hidden_layers")?,
        heads,
        shared,
        head: hidden / heads,
        inner: c.maybe_usize("ffn_hidden_size")?.unwrap_or(hidden.saturating_mul(4)),
        eps: c.f64("layer_norm_epsilon")?,
        activation: Activation::Gelu,
        rope: Some(c.rope(hidden / heads, None)?),
    };
    let activation =
        if c.get("activation").is_some() { c.activation("activation")? } else { Activation::Gelu };
    Ok(own(base, order, activation))
}

fn gguf(m: &Meta<'_>) -> Result<Spec> {
    let base = Base::gguf("falcon", m, Layout::Half)?;
    let order = if m.has("blk.0.attn_norm_2.weight") { Order::ParallelTwo } else { Order::Parallel };
    Ok(own(base, order, Activation::Gelu))
}
