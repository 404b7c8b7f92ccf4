//! Gemma 4: sizes of heads by kind of layer, late layers that use the keys and values of earlier ones, inputs
//! of each layer, and experts beside the feed-forward part.

use super::{Base, Family, Hf, Meta, llama};
use crate::rope::{Layout, Rope, Scaling};
use crate::spec::*;
use halcyon::ir::error::{Error, Result};

pub(super) const FAMILY: Family = Family {
    name: "gemma4",
    hf: &["gemma4_text", "gemma4"],
    from_hf: hf,
    gguf: &["gemma4"],
    from_gguf: gguf,
};

const FULL: &str = "full_attention";
const SLIDING: &str = "sliding_attention";

/// What all models have in common.
fn common(base: &Base, activation: Activation) -> Spec {
    let (mut s, norm) = (base.spec(), base.rms());
    s.embedding_scale = Some((base.hidden as f64).sqrt());
    for l in &mut s.layers {
        (l.order, l.ffn) = (Order::Both, Ffn::Gated(activation));
    }
    s.each_attention(|_, a| {
        a.scale = 1.0;
        a.qk_norm = Some(QkNorm { norm, by_head: true, after_rope: false });
        a.value_norm = Some(norm);
    });
    s
}

/// Lets the last `count` layers use the keys and values of the last layer of their kind before them.
fn share(s: &mut Spec, count: usize, slides: &dyn Fn(usize) -> bool) {
    let first = s.layers.len() - count.min(s.layers.len());
    s.each_attention(|i, a| {
        if i >= first {
            // A layer without such a layer names itself, which the check refuses.
            a.keys_of = Some((0..first).rev().find(|k| slides(*k) == slides(i)).unwrap_or(i));
        }
    });
}

fn hf(c: &Hf<'_>) -> Result<Spec> {
    let base = Base::hf("gemma4", c)?;
    let activation = c.activation("hidden_activation")?;
    let mut s = common(&base, activation);
    s.logit_cap = c.maybe_f64("final_logit_softcapping")?;
    let size = c.maybe_usize("hidden_size_per_layer_input")?.unwrap_or(256);
    s.per_layer = (size > 0).then(|| PerLayer { size, activation, norm: base.rms() });
    // The last layer always sees all positions.
    let slides = |i: usize| i + 1 != base.layers && c.slides(i).unwrap_or(!(i + 1).is_multiple_of(6));
    let joined = c.flag("attention_k_eq_v");
    let own = c.get("per_layer_config");
    let of_full = |i: usize, key: &str, global: &str| -> Result<Option<usize>> {
        match own {
            Some(all) => Ok(all[i.to_string()][key].as_u64().and_then(|n| usize::try_from(n).ok())),
            None if slides(i) => Ok(None),
            None => c.maybe_usize(global),
        }
    };
    let window = c.maybe_usize("sliding_window")?;
    for (i, l) in s.layers.iter_mut().enumerate() {
        let Mixer::Attention(a) = &mut l.mixer else { continue };
        let (key, shared) = ("head_dim", "num_key_value_heads");
        let fallback = if own.is_some() || slides(i) { base.head } else { 512 };
        a.key = of_full(i, key, "global_head_dim")?.unwrap_or(fallback);
        a.value = a.key;
        let heads = of_full(i, shared, "num_global_key_value_heads")?;
        a.shared = heads.filter(|_| joined || own.is_some()).unwrap_or(base.shared);
        a.values_of_keys = joined && !slides(i);
        a.window = window.filter(|_| slides(i));
        let mut rope = c.rope(a.key, Some(if slides(i) { SLIDING } else { FULL }))?;
        if c.get("rope_parameters").is_none() && !slides(i) {
            rope = Rope::plain(1e6, a.key, Layout::Half);
            rope.scaling = Scaling::Proportional { part: 0.25, factor: 1.0 };
        }
        a.rope = Some(rope);
    }
    let shared = c.maybe_usize("num_kv_shared_layers")?.unwrap_or(0);
    share(&mut s, shared, &slides);
    let wide = c.flag("use_double_wide_mlp");
    let experts = match c.flag("enable_moe_block") {
        true => {
            let experts = llama::mixture(c.usize("num_experts")?, c.usize("top_k_experts")?);
            Some(Beside {
                experts: Experts { activation, ..experts },
                inner: c.usize("moe_intermediate_size")?,
            })
        }
        false => None,
    };
    for l in &mut s.layers {
        let Mixer::Attention(a) = &l.mixer else { continue };
        if wide && a.keys_of.is_some() {
            l.inner = l.inner.saturating_mul(2);
        }
        if let Some(e) = &experts {
            l.ffn = Ffn::Beside(activation, e.clone());
        }
    }
    Ok(s)
}

fn gguf(m: &Meta<'_>) -> Result<Spec> {
    let base = Base::gguf("gemma4", m, Layout::Half)?;
    let mut s = common(&base, Activation::GeluTanh);
    s.logit_cap = m.maybe_f64("final_logit_softcapping")?;
    let size = m.usize("embedding_length_per_layer_input")?;
    let (activation, norm) = (Activation::GeluTanh, base.rms());
    s.per_layer = (size > 0).then_some(PerLayer { size, activation, norm });
    let pattern = m.pattern("attention.sliding_window_pattern").unwrap_or_default();
    let slides = |i: usize| pattern.get(i).copied().unwrap_or(false);
    let window = m.usize("attention.sliding_window")?;
    let (small, value) = (m.usize("attention.key_length_swa")?, m.usize("attention.value_length_swa")?);
    if value != small || m.maybe_usize("attention.value_length")?.is_some_and(|n| n != base.head) {
        let what = "keys and values of a model of Gemma 4 must have the same size";
        return Err(Error::argument("configuration", what));
    }
    let turned = m.maybe_usize("rope.dimension_count_swa")?.unwrap_or(small);
    let near = m.maybe_f64("rope.freq_base_swa")?.unwrap_or(10_000.0);
    let shared = m.maybe_usize("attention.shared_kv_layers")?.unwrap_or(0);
    let first = s.layers.len() - shared.min(s.layers.len());
    for (i, l) in s.layers.iter_mut().enumerate() {
        let name = |n: &str| format!("blk.{i}.{n}.weight");
        l.inner = m.of_layer("feed_forward_length", i)?.unwrap_or(base.inner);
        let Mixer::Attention(a) = &mut l.mixer else { continue };
        a.shared = m.of_layer("attention.head_count_kv", i)?.unwrap_or(base.shared);
        a.values_of_keys = i < first && !m.has(&name("attn_v")) && !m.has(&name("attn_qkv"));
        if slides(i) {
            (a.key, a.value, a.window) = (small, small, Some(window));
            // The factors of the file are for the other layers.
            a.rope = Some(Rope { factors: Some(vec![]), ..Rope::plain(near, turned, Layout::Half) });
        }
        if m.has(&name("ffn_gate_inp")) {
            let experts = llama::mixture(m.usize("expert_count")?, m.usize("expert_used_count")?);
            let experts = Experts { activation, ..experts };
            let inner = m.of_layer("expert_feed_forward_length", i)?.unwrap_or(0);
            l.ffn = Ffn::Beside(activation, Beside { experts, inner });
        }
    }
    share(&mut s, shared, &slides);
    Ok(s)
}
