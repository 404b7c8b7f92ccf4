//! LFM 2: gated short convolutions, and attention in some layers.

use super::{Base, Family, Hf, Meta};
use crate::rope::Layout;
use crate::spec::{Mixer, Recurrent, Spec};
use halcyon::ir::error::{Error, Result};

pub(super) const FAMILY: Family =
    Family { name: "lfm2", hf: &["lfm2"], from_hf: hf, gguf: &["lfm2"], from_gguf: gguf };

fn hf(c: &Hf<'_>) -> Result<Spec> {
    let mut base = Base::hf("lfm2", c)?;
    if let Some(n) = c.maybe_usize("block_ff_dim")? {
        base.inner = n;
    }
    if c.get("block_auto_adjust_ff_dim").is_none_or(|v| v.as_bool() != Some(false)) {
        let multiple = c.maybe_usize("block_multiple_of")?.unwrap_or(256).max(1);
        let factor = c.maybe_f64("block_ffn_dim_multiplier")?.unwrap_or(1.0);
        let inner = (base.inner.saturating_mul(2) / 3) as f64 * factor;
        base.inner = (inner as usize).div_ceil(multiple).saturating_mul(multiple);
    }
    let listed = c.get("full_attn_idxs").and_then(|v| v.as_array());
    let listed = |i: usize| listed.is_none_or(|v| v.iter().any(|n| n.as_u64() == Some(i as u64)));
    let attends = |i: usize| c.layer_is(i, &["full_attention"]).unwrap_or_else(|| listed(i));
    Ok(spec(&base, c.maybe_usize("conv_L_cache")?.unwrap_or(3), &attends))
}

fn gguf(m: &Meta<'_>) -> Result<Spec> {
    let base = Base::gguf("lfm2", m, Layout::Half)?;
    // Layers without key heads have a convolution.
    let heads = m.list("attention.head_count_kv")?;
    let heads = heads.ok_or_else(|| {
        Error::argument("configuration", "attention.head_count_kv must be a list with a number per layer")
    })?;
    let attends = |i: usize| heads.get(i).is_some_and(|n| *n > 0);
    Ok(spec(&base, m.usize("shortconv.l_cache")?, &attends))
}

fn spec(base: &Base, kernel: usize, attends: &dyn Fn(usize) -> bool) -> Spec {
    let mut s = base.spec();
    s.norm_heads(base.rms());
    for (_, l) in s.layers.iter_mut().enumerate().filter(|(i, _)| !attends(*i)) {
        l.mixer = Mixer::Recurrent(Recurrent { kernel, scan: None });
    }
    s
}
