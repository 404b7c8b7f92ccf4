//! Mixtral: Llama with experts.

use super::{Base, Family, Hf, Meta, llama};
use crate::rope::Layout;
use crate::spec::{Experts, Ffn, Spec};
use halcyon::ir::error::Result;

pub(super) const FAMILY: Family = Family {
    name: "mixtral",
    hf: &["mixtral"],
    from_hf: hf,
    // Most of Mixtral's GGUF files name Llama's architecture, which knows experts too.
    gguf: &["mixtral"],
    from_gguf: gguf,
};

fn hf(c: &Hf<'_>) -> Result<Spec> {
    let base = Base::hf("mixtral", c)?;
    let mut s = base.spec();
    let window = c.maybe_usize("sliding_window")?;
    s.each_attention(|_, a| a.window = window);
    let experts = llama::mixture(c.usize("num_local_experts")?, c.usize("num_experts_per_tok")?);
    let experts = Experts { activation: base.activation, ..experts };
    s.layers.iter_mut().for_each(|l| l.ffn = Ffn::Experts(experts.clone()));
    Ok(s)
}

fn gguf(m: &Meta<'_>) -> Result<Spec> {
    let mut s = Base::gguf("mixtral", m, Layout::Pairs)?.spec();
    let experts = llama::mixture(m.usize("expert_count")?, m.usize("expert_used_count")?);
    s.layers.iter_mut().for_each(|l| l.ffn = Ffn::Experts(experts.clone()));
    Ok(s)
}
