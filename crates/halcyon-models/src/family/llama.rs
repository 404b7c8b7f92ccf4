//! Llama, and models of the same form: Mistral, TinyLlama, SmolLM.

use super::{Base, Family, Hf, Meta};
use crate::rope::Layout;
use crate::spec::{Activation, Experts, Ffn, Score, Spec};
use halcyon::ir::error::Result;

pub(super) const FAMILY: Family = Family {
    name: "llama",
    hf: &["llama", "mistral", "ministral"],
    from_hf: hf,
    gguf: &["llama"],
    from_gguf: gguf,
};

fn hf(c: &Hf<'_>) -> Result<Spec> {
    let mut s = Base::hf("llama", c)?.spec();
    // Mistral's window. Llama's own models have none, whatever the key says.
    let window =
        c.maybe_usize("sliding_window")?.filter(|_| c.get("model_type").is_some_and(|t| t != "llama"));
    s.each_attention(|i, a| a.window = window.filter(|_| c.slides(i).unwrap_or(true)));
    Ok(s)
}

fn gguf(m: &Meta<'_>) -> Result<Spec> {
    // Files of this architecture store queries and keys so that neighbours are rotated.
    let base = Base::gguf("llama", m, Layout::Pairs)?;
    let mut s = base.spec();
    let window = m.maybe_usize("attention.sliding_window")?;
    s.each_attention(|_, a| a.window = window.filter(|w| *w > 0));
    // Mixtral's files have this architecture too.
    if let Some(count) = m.maybe_usize("expert_count")?.filter(|n| *n > 0) {
        let experts = mixture(count, m.usize("expert_used_count")?);
        s.layers.iter_mut().for_each(|l| l.ffn = Ffn::Experts(experts.clone()));
    }
    Ok(s)
}

/// Mixtral's experts: a softmax over all, whose chosen weights are divided by their sum.
pub(super) fn mixture(count: usize, used: usize) -> Experts {
    Experts {
        count,
        used,
        activation: Activation::Silu,
        score: Score::Softmax,
        normalise: true,
        scale: None,
        groups: None,
        choice_bias: false,
        common: None,
        common_gate: false,
    }
}
