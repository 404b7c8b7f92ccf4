//! DeepSeek-V2 and V3: latent attention, first layers without experts, experts in groups, common experts.

use super::{Base, Family, Hf, Meta, llama};
use crate::rope::{Layout, Rope, Scaling, yarn_attention};
use crate::spec::{Experts, Ffn, Latent, Norm, NormKind, Score, Spec};
use halcyon::ir::error::{Error, Result};

pub(super) const FAMILY: Family = Family {
    name: "deepseek2",
    hf: &["deepseek_v2", "deepseek_v3"],
    from_hf: hf,
    gguf: &["deepseek2"],
    from_gguf: gguf,
};

/// Sizes of the attention.
struct Sizes {
    latent: Latent,
    /// Elements of a head that are rotated.
    turned: usize,
    /// The scores have this factor beyond that of the size of a head.
    scale: f64,
}

fn attend(s: &mut Spec, sizes: &Sizes, rope: &Rope) {
    let (l, turned) = (sizes.latent, sizes.turned);
    let size = l.plain.saturating_add(turned).max(1) as f64;
    s.each_attention(|_, a| {
        a.shared = 1;
        a.key = l.rank.saturating_add(turned);
        a.value = l.rank;
        a.scale = sizes.scale / size.sqrt();
        a.rope = Some(rope.clone());
        a.latent = Some(l);
    });
}

fn experts(s: &mut Spec, first: usize, inner: usize, experts: &Experts) {
    for l in s.layers.iter_mut().skip(first) {
        (l.ffn, l.inner) = (Ffn::Experts(experts.clone()), inner);
    }
}

fn hf(c: &Hf<'_>) -> Result<Spec> {
    let v3 = c.str("model_type")? == "deepseek_v3";
    let mut base = Base::hf("deepseek2", c)?;
    let ahead = base.add_ahead(c.maybe_usize("num_nextn_predict_layers")?);
    let mut s = base.spec();
    let turned = c.usize("qk_rope_head_dim")?;
    let mut rope = c.rope(turned, None)?;
    if !v3 || c.get("rope_interleave").and_then(|v| v.as_bool()).unwrap_or(true) {
        rope.layout = Layout::Pairs;
    }
    let scale = match &rope.scaling {
        Scaling::Yarn(y) => {
            // It counts here without `mscale` too.
            let all =
                ["rope_parameters", "rope_scaling"].iter().find_map(|k| c.get(k)?.get("mscale_all_dim"));
            yarn_attention(y.factor, all.and_then(|v| v.as_f64()).unwrap_or(0.0)).powi(2)
        }
        _ => 1.0,
    };
    let latent = Latent {
        queries: c.maybe_usize("q_lora_rank")?,
        rank: c.usize("kv_lora_rank")?,
        plain: c.usize("qk_nope_head_dim")?,
        value: c.usize("v_head_dim")?,
        // The models do not use `rms_norm_eps` here.
        norm: Norm { kind: NormKind::Rms, eps: 1e-6 },
    };
    attend(&mut s, &Sizes { latent, turned, scale }, &rope);
    let inner = c.usize("moe_intermediate_size")?;
    let common = c.maybe_usize("n_shared_experts")?.unwrap_or(0).saturating_mul(inner);
    let groups = c.maybe_usize("n_group")?.zip(c.maybe_usize("topk_group")?);
    let grouped = v3 || c.get("topk_method").is_some_and(|m| m == "group_limited_greedy");
    let e = Experts {
        activation: base.activation,
        score: if v3 { Score::Sigmoid } else { Score::Softmax },
        normalise: v3 && c.get("norm_topk_prob").and_then(|v| v.as_bool()).unwrap_or(true),
        scale: c.maybe_f64("routed_scaling_factor")?,
        groups: groups.filter(|_| grouped),
        choice_bias: v3,
        common: Some(common).filter(|n| *n > 0),
        ..llama::mixture(c.usize("n_routed_experts")?, c.usize("num_experts_per_tok")?)
    };
    experts(&mut s, c.maybe_usize("first_k_dense_replace")?.unwrap_or(0), inner, &e);
    s.split_ahead(ahead);
    Ok(s)
}

fn gguf(m: &Meta<'_>) -> Result<Spec> {
    let base = Base::gguf("deepseek2", m, Layout::Pairs)?;
    let mut s = base.spec();
    let Some(mut rope) = base.rope.clone() else { return Ok(s) };
    let mut scale = 1.0;
    if let Scaling::Yarn(y) = &mut rope.scaling {
        // The file has a tenth of `mscale_all_dim`. It lacks `mscale`, which is the same in the models.
        let all = m.maybe_f64("rope.scaling.yarn_log_multiplier")?.map(|v| v * 10.0).filter(|v| *v != 0.0);
        let own = m.maybe_f64("rope.scaling.attn_factor")?.unwrap_or(1.0);
        let attention = own * if all.is_some() { 1.0 } else { yarn_attention(y.factor, 1.0) };
        y.attention = Some(attention);
        scale = (attention * yarn_attention(y.factor, all.unwrap_or(0.0))).powi(2);
    }
    let size = |mla: &str, old: &str| match m.maybe_usize(mla)? {
        Some(n) => Ok(n),
        None => m.usize(old),
    };
    let (rank, turned) = (m.usize("attention.kv_lora_rank")?, rope.size);
    let head = size("attention.key_length_mla", "attention.key_length")?;
    let plain = head.checked_sub(turned).ok_or_else(|| {
        let what = format!("heads of {head} elements, of which {turned} are rotated");
        Error::argument("configuration", what)
    })?;
    let latent = Latent {
        queries: m.maybe_usize("attention.q_lora_rank")?.filter(|n| *n > 0),
        rank,
        plain,
        value: size("attention.value_length_mla", "attention.value_length")?,
        norm: base.rms(),
    };
    attend(&mut s, &Sizes { latent, turned, scale }, &rope);
    let inner = m.usize("expert_feed_forward_length")?;
    let common = m.maybe_usize("expert_shared_count")?.unwrap_or(0).saturating_mul(inner);
    let sigmoid = m.maybe_usize("expert_gating_func")? == Some(2);
    let e = Experts {
        score: if sigmoid { Score::Sigmoid } else { Score::Softmax },
        normalise: m.flag("expert_weights_norm")?,
        scale: m.maybe_f64("expert_weights_scale")?.filter(|f| *f != 0.0),
        groups: m.maybe_usize("expert_group_count")?.zip(m.maybe_usize("expert_group_used_count")?),
        choice_bias: sigmoid,
        common: Some(common).filter(|n| *n > 0),
        ..llama::mixture(m.maybe_usize("expert_count")?.unwrap_or(0), m.usize("expert_used_count")?)
    };
    experts(&mut s, m.maybe_usize("leading_dense_block_count")?.unwrap_or(0), inner, &e);
    s.split_ahead(m.maybe_usize("nextn_predict_layers")?.unwrap_or(0));
    Ok(s)
}
