//! Families that differ from Llama in a few factors: Granite, SmolLM 3, Cohere 2 and StarCoder 2.

use super::{Base, Family, Hf, Meta};
use crate::rope::Layout;
use crate::spec::{Activation, Ffn, Order, Spec};
use halcyon::ir::error::Result;

pub(super) const GRANITE: Family = Family {
    name: "granite",
    hf: &["granite"],
    from_hf: |c| {
        let s = Base::hf("granite", c)?.spec();
        let f = |key| c.maybe_f64(key);
        let factors = Factors {
            embedding: f("embedding_multiplier")?,
            residual: f("residual_multiplier")?,
            attention: f("attention_multiplier")?,
            logits: f("logits_scaling")?,
        };
        Ok(granite(s, factors))
    },
    gguf: &["granite"],
    from_gguf: |m| {
        let s = Base::gguf("granite", m, Layout::Pairs)?.spec();
        let f = |key| m.maybe_f64(key);
        let factors = Factors {
            embedding: f("embedding_scale")?,
            residual: f("residual_scale")?,
            attention: f("attention.scale")?,
            logits: f("logit_scale")?,
        };
        Ok(granite(s, factors))
    },
};

/// What Granite multiplies by. `logits` divides.
pub(super) struct Factors {
    pub(super) embedding: Option<f64>,
    pub(super) residual: Option<f64>,
    pub(super) attention: Option<f64>,
    pub(super) logits: Option<f64>,
}

pub(super) fn granite(mut s: Spec, f: Factors) -> Spec {
    s.embedding_scale = f.embedding;
    s.logit_scale = f.logits.filter(|l| *l != 0.0).map(|l| 1.0 / l);
    s.layers.iter_mut().for_each(|l| l.residual_scale = f.residual);
    s.each_attention(|_, a| a.scale = f.attention.filter(|s| *s != 0.0).unwrap_or(a.scale));
    s
}

pub(super) const SMOLLM3: Family = Family {
    name: "smollm3",
    hf: &["smollm3"],
    from_hf: |c| {
        let mut s = Base::hf("smollm3", c)?.spec();
        let listed = c.get("no_rope_layers").and_then(|v| v.as_array());
        let every = c.maybe_usize("no_rope_layer_interval")?.unwrap_or(4).max(1);
        let window = c.maybe_usize("sliding_window")?.filter(|_| c.flag("use_sliding_window"));
        s.each_attention(|i, a| {
            let own = listed.and_then(|v| v.get(i)).and_then(|v| v.as_u64()).map(|v| v != 0);
            if !own.unwrap_or((i + 1) % every != 0) {
                a.rope = None;
            }
            let turns = a.rope.is_some();
            a.window = window.filter(|_| c.slides(i).unwrap_or(!turns));
        });
        Ok(s)
    },
    gguf: &["smollm3"],
    from_gguf: |m| {
        let mut s = Base::gguf("smollm3", m, Layout::Pairs)?.spec();
        s.each_attention(|i, a| {
            if (i + 1) % 4 == 0 {
                a.rope = None;
            }
        });
        Ok(s)
    },
};

pub(super) const COHERE2: Family = Family {
    name: "cohere2",
    hf: &["cohere2"],
    from_hf: |c| {
        let base = Base::hf("cohere2", c)?;
        let every = match c.maybe_usize("sliding_window_pattern")? {
            Some(n) => n.max(1),
            None => c.maybe_usize("_sliding_window_pattern")?.unwrap_or(4).max(1),
        };
        let window = c.maybe_usize("sliding_window")?;
        let slides = |i: usize| c.slides(i).unwrap_or(!(i + 1).is_multiple_of(every));
        Ok(cohere(base, window, &slides, c.maybe_f64("logit_scale")?))
    },
    gguf: &["cohere2"],
    from_gguf: |m| {
        let base = Base::gguf("cohere2", m, Layout::Pairs)?;
        let window = m.maybe_usize("attention.sliding_window")?;
        let listed = m.pattern("attention.sliding_window_pattern");
        let slides =
            |i: usize| listed.as_ref().and_then(|l| l.get(i).copied()).unwrap_or(!(i + 1).is_multiple_of(4));
        Ok(cohere(base, window, &slides, m.maybe_f64("logit_scale")?))
    },
};

/// Both parts of a layer read one norm. Layers that see all positions do not rotate. The rotation is over
/// neighbours.
fn cohere(base: Base, window: Option<usize>, slides: &dyn Fn(usize) -> bool, logits: Option<f64>) -> Spec {
    let mut s = base.spec();
    s.logit_scale = logits;
    s.final_norm = base.layer_norm();
    for l in &mut s.layers {
        (l.order, l.norm) = (Order::Parallel, base.layer_norm());
    }
    s.each_attention(|i, a| match slides(i) {
        true => {
            a.window = window;
            if let Some(r) = &mut a.rope {
                r.layout = Layout::Pairs;
            }
        }
        false => a.rope = None,
    });
    s
}

pub(super) const STARCODER2: Family = Family {
    name: "starcoder2",
    hf: &["starcoder2"],
    from_hf: |c: &Hf<'_>| {
        let window = c.maybe_usize("sliding_window")?;
        Ok(starcoder(Base::hf("starcoder2", c)?, window, c.activation("hidden_act")?))
    },
    gguf: &["starcoder2"],
    from_gguf: |m: &Meta<'_>| -> Result<Spec> {
        Ok(starcoder(Base::gguf("starcoder2", m, Layout::Half)?, None, Activation::GeluTanh))
    },
};

fn starcoder(base: Base, window: Option<usize>, activation: Activation) -> Spec {
    let mut s = base.spec();
    s.final_norm = base.layer_norm();
    for l in &mut s.layers {
        (l.norm, l.ffn) = (base.layer_norm(), Ffn::Plain(activation));
    }
    s.each_attention(|_, a| a.window = window);
    s
}
