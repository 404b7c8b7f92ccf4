//! gpt-oss: experts with biases, sinks, and a window in every second layer.

use super::{Base, Family, Hf, Meta, llama};
use crate::rope::{Layout, Scaling};
use crate::spec::{Activation, Experts, Ffn, Score, Spec};
use halcyon::ir::error::Result;

pub(super) const FAMILY: Family =
    Family { name: "gpt-oss", hf: &["gpt_oss"], from_hf: hf, gguf: &["gpt-oss"], from_gguf: gguf };

fn experts(count: usize, used: usize, alpha: f64, limit: f64) -> Experts {
    Experts {
        activation: Activation::ClampedSwiglu { alpha, limit },
        score: Score::SoftmaxOfChosen,
        normalise: false,
        ..llama::mixture(count, used)
    }
}

fn hf(c: &Hf<'_>) -> Result<Spec> {
    let mut s = Base::hf("gpt-oss", c)?.spec();
    let window = c.maybe_usize("sliding_window")?;
    s.each_attention(|i, a| {
        a.sinks = true;
        a.window = window.filter(|_| c.slides(i).unwrap_or(i % 2 == 0));
    });
    let (alpha, limit) = (c.maybe_f64("swiglu_alpha")?, c.maybe_f64("swiglu_limit")?);
    let used = c.usize_of(&["num_experts_per_tok", "experts_per_token"])?;
    let count = c.usize_of(&["num_local_experts", "num_experts"])?;
    let e = experts(count, used, alpha.unwrap_or(1.702), limit.unwrap_or(7.0));
    s.layers.iter_mut().for_each(|l| l.ffn = Ffn::Experts(e.clone()));
    Ok(s)
}

fn gguf(m: &Meta<'_>) -> Result<Spec> {
    let mut base = Base::gguf("gpt-oss", m, Layout::Half)?;
    if let Some(n) = m.maybe_usize("expert_feed_forward_length")? {
        base.inner = n;
    }
    if let Some(r) = &mut base.rope
        && let Scaling::Yarn(y) = &mut r.scaling
    {
        // The ends of this family's ramp are not rounded.
        y.truncate = false;
    }
    let mut s = base.spec();
    let window = m.maybe_usize("attention.sliding_window")?;
    s.each_attention(|i, a| {
        a.sinks = true;
        a.window = window.filter(|_| i % 2 == 0);
    });
    let e = experts(m.usize("expert_count")?, m.usize("expert_used_count")?, 1.702, 7.0);
    s.layers.iter_mut().for_each(|l| l.ffn = Ffn::Experts(e.clone()));
    Ok(s)
}
