//! Phi-3 and Phi-4.

use super::{Base, Family, Hf, Meta};
use crate::rope::{Layout, Scaling};
use crate::spec::Spec;
use halcyon::ir::error::{Error, Result};

pub(super) const FAMILY: Family =
    Family { name: "phi3", hf: &["phi3"], from_hf: hf, gguf: &["phi3"], from_gguf: gguf };

fn hf(c: &Hf<'_>) -> Result<Spec> {
    let mut s = Base::hf("phi3", c)?.spec();
    let window = c.maybe_usize("sliding_window")?;
    s.each_attention(|_, a| a.window = window);
    Ok(s)
}

fn gguf(m: &Meta<'_>) -> Result<Spec> {
    let base = Base::gguf("phi3", m, Layout::Half)?;
    let long = ["rope_factors_long.weight", "rope_factors_short.weight"].iter().any(|n| m.has(n));
    if long || base.rope.as_ref().is_some_and(|r| !matches!(r.scaling, Scaling::None)) {
        return Err(Error::unsupported(
            "GGUF files of Phi-3 with scaled rotations",
            "Use the folder in Hugging Face's layout",
        ));
    }
    let mut s = base.spec();
    let window = m.maybe_usize("attention.sliding_window")?;
    s.each_attention(|_, a| a.window = window.filter(|w| *w > 0));
    Ok(s)
}
