//! Gemma 2 and Gemma 3.

use super::{Base, Family, Hf, Meta};
use crate::rope::Layout;
use crate::spec::{Activation, Ffn, Norm, NormKind, Order, QkNorm, Spec};
use halcyon::ir::error::Result;

pub(super) const GEMMA2: Family = Family {
    name: "gemma2",
    hf: &["gemma2"],
    from_hf: |c| {
        let mut s = hf("gemma2", c)?;
        let cap = c.maybe_f64("attn_logit_softcapping")?;
        s.each_attention(|_, a| a.softcap = cap);
        Ok(s)
    },
    gguf: &["gemma2"],
    from_gguf: |m| {
        let mut s = gguf("gemma2", m)?;
        // Early files lack the caps, which are the same in all models.
        let cap = m.maybe_f64("attn_logit_softcapping")?.or(Some(50.0));
        s.logit_cap = s.logit_cap.or(Some(30.0));
        let window = m.maybe_usize("attention.sliding_window")?;
        // Every second layer sees all positions.
        s.each_attention(|i, a| {
            a.softcap = cap;
            a.window = window.filter(|_| i % 2 == 0);
        });
        Ok(s)
    },
};

pub(super) const GEMMA3: Family = Family {
    name: "gemma3",
    hf: &["gemma3_text", "gemma3"],
    from_hf: gemma3_hf,
    gguf: &["gemma3"],
    from_gguf: gemma3_gguf,
};

/// What both have in common. The factor of RMS norms is `1 + weight`.
fn hf(family: &'static str, c: &Hf<'_>) -> Result<Spec> {
    let base = Base::hf(family, c)?;
    let norm = Norm { kind: NormKind::RmsPlusOne, eps: base.eps };
    let mut s = common(&base, norm);
    s.logit_cap = c.maybe_f64("final_logit_softcapping")?;
    let scale = 1.0 / c.f64("query_pre_attn_scalar")?.sqrt();
    let window = c.maybe_usize("sliding_window")?;
    s.each_attention(|i, a| {
        a.scale = scale;
        a.window = window.filter(|_| c.slides(i).unwrap_or(i % 2 == 0));
    });
    let key = if c.get("hidden_activation").is_some() { "hidden_activation" } else { "hidden_act" };
    let activation = c.activation(key)?;
    s.layers.iter_mut().for_each(|l| l.ffn = Ffn::Gated(activation));
    Ok(s)
}

fn common(base: &Base, norm: Norm) -> Spec {
    let mut s = base.spec();
    // The models round this factor to their type, bf16, but run in f32 it is exact.
    s.embedding_scale = Some((base.hidden as f64).sqrt());
    s.final_norm = norm;
    for l in &mut s.layers {
        (l.order, l.norm, l.ffn) = (Order::Both, norm, Ffn::Gated(Activation::GeluTanh));
    }
    s
}

fn gemma3_hf(c: &Hf<'_>) -> Result<Spec> {
    let mut s = hf("gemma3", c)?;
    let head = Base::hf("gemma3", c)?.head;
    let apart = c.get("rope_parameters").is_some_and(|p| p.get("sliding_attention").is_some());
    let mut local = c.rope(head, Some("sliding_attention"))?;
    if !apart {
        // Before transformers 5: a base of its own and no scaling.
        local.base = c.maybe_f64("rope_local_base_freq")?.unwrap_or(10_000.0);
        local.scaling = crate::rope::Scaling::None;
    }
    let global = c.rope(head, Some("full_attention"))?;
    let norm = s.final_norm;
    let every =
        c.maybe_usize("sliding_window_pattern")?.or(c.maybe_usize("_sliding_window_pattern")?).unwrap_or(6);
    let window = c.maybe_usize("sliding_window")?;
    s.each_attention(|i, a| {
        let slides = c.slides(i).unwrap_or((i + 1) % every.max(1) != 0);
        a.window = window.filter(|_| slides);
        a.rope = Some(if slides { local.clone() } else { global.clone() });
        a.qk_norm = Some(QkNorm { norm, by_head: true, after_rope: false });
    });
    Ok(s)
}

fn gguf(family: &'static str, m: &Meta<'_>) -> Result<Spec> {
    let base = Base::gguf(family, m, Layout::Half)?;
    let mut s = common(&base, base.rms());
    s.logit_cap = m.maybe_f64("final_logit_softcapping")?;
    // The largest model of each family has another scale.
    let (large, scale) = match family {
        "gemma2" => (46, (base.hidden / base.heads.max(1)) as f64),
        _ => (62, (base.hidden / base.heads.max(1)) as f64),
    };
    if base.layers == large {
        s.each_attention(|_, a| a.scale = 1.0 / scale.sqrt());
    }
    Ok(s)
}

fn gemma3_gguf(m: &Meta<'_>) -> Result<Spec> {
    let mut s = gguf("gemma3", m)?;
    let norm = s.final_norm;
    let window = m.maybe_usize("attention.sliding_window")?;
    let pattern = m.pattern("attention.sliding_window_pattern");
    let every = m.maybe_usize("attention.sliding_window_pattern").ok().flatten().unwrap_or(6).max(1);
    let base = m.maybe_f64("rope.freq_base_swa")?.unwrap_or(10_000.0);
    s.each_attention(|i, a| {
        let slides = pattern.as_ref().and_then(|p| p.get(i).copied()).unwrap_or((i + 1) % every != 0);
        a.window = window.filter(|_| slides);
        if let (Some(r), true) = (&mut a.rope, slides) {
            r.base = base;
            r.scaling = crate::rope::Scaling::None;
        }
        a.qk_norm = Some(QkNorm { norm, by_head: true, after_rope: false });
    });
    Ok(s)
}
