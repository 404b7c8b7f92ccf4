//! GLM-4 with experts.

use super::{Base, Family, Hf, Meta, llama};
use crate::rope::Layout;
use crate::spec::{Experts, Ffn, Score, Spec};
use halcyon::ir::error::Result;

pub(super) const FAMILY: Family =
    Family { name: "glm4moe", hf: &["glm4_moe"], from_hf: hf, gguf: &["glm4moe"], from_gguf: gguf };

fn hf(c: &Hf<'_>) -> Result<Spec> {
    let mut base = Base::hf("glm4moe", c)?;
    let ahead = base.add_ahead(c.maybe_usize("num_nextn_predict_layers")?);
    base.rope = Some(c.rope_of(base.head, None, 0.5)?);
    let mut s = base.spec();
    if c.flag("use_qk_norm") {
        s.norm_heads(base.rms());
    }
    let inner = c.usize("moe_intermediate_size")?;
    let common = c.maybe_usize("n_shared_experts")?.unwrap_or(0).saturating_mul(inner);
    let groups = c.maybe_usize("n_group")?.zip(c.maybe_usize("topk_group")?);
    let experts = Experts {
        score: Score::Sigmoid,
        activation: base.activation,
        normalise: c.get("norm_topk_prob").is_none_or(|v| v.as_bool() == Some(true)),
        scale: c.maybe_f64("routed_scaling_factor")?,
        groups,
        choice_bias: true,
        common: Some(common).filter(|n| *n > 0),
        ..llama::mixture(c.usize("n_routed_experts")?, c.usize("num_experts_per_tok")?)
    };
    let dense = c.maybe_usize("first_k_dense_replace")?.unwrap_or(0);
    for l in s.layers.iter_mut().skip(dense) {
        (l.ffn, l.inner) = (Ffn::Experts(experts.clone()), inner);
    }
    s.split_ahead(ahead);
    Ok(s)
}

fn gguf(m: &Meta<'_>) -> Result<Spec> {
    let base = Base::gguf("glm4moe", m, Layout::Half)?;
    let mut s = base.spec();
    if m.has("blk.0.attn_q_norm.weight") {
        s.norm_heads(base.rms());
    }
    let inner = m.usize("expert_feed_forward_length")?;
    let common = m.maybe_usize("expert_shared_count")?.unwrap_or(0).saturating_mul(inner);
    let experts = Experts {
        score: Score::Sigmoid,
        normalise: m.flag("expert_weights_norm")?,
        scale: m.maybe_f64("expert_weights_scale")?,
        groups: m.maybe_usize("expert_group_count")?.zip(m.maybe_usize("expert_group_used_count")?),
        choice_bias: true,
        common: Some(common).filter(|n| *n > 0),
        ..llama::mixture(m.usize("expert_count")?, m.usize("expert_used_count")?)
    };
    let dense = m.maybe_usize("leading_dense_block_count")?.unwrap_or(0);
    for l in s.layers.iter_mut().skip(dense) {
        (l.ffn, l.inner) = (Ffn::Experts(experts.clone()), inner);
    }
    s.split_ahead(m.maybe_usize("nextn_predict_layers")?.unwrap_or(0));
    Ok(s)
}
