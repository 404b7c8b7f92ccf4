//! Phi-3 and Phi-4.

use super::{Base, Family, Hf, Meta};
use crate::rope::{Layout, Scaling};
use crate::spec::Spec;
use halcyon::ir::error::Result;

pub(super) const FAMILY: Family =
    Family { name: "phi3", hf: &["phi3"], from_hf: hf, gguf: &["phi3"], from_gguf: gguf };

fn hf(c: &Hf<'_>) -> Result<Spec> {
    let mut s = Base::hf("phi3", c)?.spec();
    let window = c.maybe_usize("sliding_window")?;
    s.each_attention(|_, a| a.window = window);
    Ok(s)
}

fn gguf(m: &Meta<'_>) -> Result<Spec> {
    let mut base = Base::gguf("phi3", m, Layout::Half)?;
    // Older files have the factors of longrope without naming the scaling.
    if m.has("rope_factors_long.weight")
        && let Some(r) = &mut base.rope
        && !matches!(r.scaling, Scaling::Long { .. })
    {
        let original = m.maybe_usize("rope.scaling.original_context_length")?.unwrap_or(base.context);
        r.scaling = Scaling::Long {
            short: vec![],
            long: vec![],
            original,
            factor: base.context as f64 / original.max(1) as f64,
            attention: m.maybe_f64("rope.scaling.attn_factor")?,
        };
    }
    let mut s = base.spec();
    let window = m.maybe_usize("attention.sliding_window")?;
    s.each_attention(|_, a| a.window = window.filter(|w| *w > 0));
    Ok(s)
}
