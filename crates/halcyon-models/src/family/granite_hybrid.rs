//! Granite 4: Mamba 2, attention in some layers, and experts in some models.

use super::others::{Factors, granite};
use super::{Base, Family, Hf, Meta, llama};
use crate::rope::Layout;
use crate::spec::{Experts, Ffn, Mixer, Recurrent, Scan, ScanKind, Score, Spec};
use halcyon::ir::error::{Error, Result};

pub(super) const FAMILY: Family = Family {
    name: "granitehybrid",
    hf: &["granitemoehybrid"],
    from_hf: hf,
    gguf: &["granitehybrid"],
    from_gguf: gguf,
};

fn hf(c: &Hf<'_>) -> Result<Spec> {
    let mut base = Base::hf("granitehybrid", c)?;
    super::only_silu(c)?;
    if c.get("position_embedding_type").is_none_or(|v| v.as_str() != Some("rope")) {
        base.rope = None;
    }
    let (heads, groups) = (c.usize("mamba_n_heads")?, c.maybe_usize("mamba_n_groups")?.unwrap_or(1));
    let inner = c.maybe_usize("mamba_expand")?.unwrap_or(2).saturating_mul(base.hidden);
    let value = divided(inner, heads)?;
    if c.maybe_usize("mamba_d_head")?.is_some_and(|n| n != value) {
        let what = format!("{heads} heads of {value} channels, but mamba_d_head has another size");
        return Err(c.bad(what));
    }
    // An infinite end of the range is stored as an object or as a number that JSON does not have.
    let limit = |i: usize, other: f64| {
        let list = c.get("time_step_limit").and_then(|v| v.as_array());
        list.and_then(|v| v.get(i)).and_then(|v| v.as_f64()).unwrap_or(other)
    };
    let scan = Scan {
        kind: ScanKind::Mamba { limit: (limit(0, 0.0), limit(1, f64::INFINITY)) },
        shared: groups,
        heads,
        key: c.usize("mamba_d_state")?,
        value,
        tiled: false,
        eps: base.eps,
    };
    let kernel = c.maybe_usize("mamba_d_conv")?.unwrap_or(4);
    let attends = |i: usize| !c.layer_is(i, &["mamba", "linear_attention"]).unwrap_or(true);
    let f = |key| c.maybe_f64(key);
    let factors = Factors {
        embedding: f("embedding_multiplier")?,
        residual: f("residual_multiplier")?,
        attention: f("attention_multiplier")?,
        logits: f("logits_scaling")?,
    };
    let common = c.usize("shared_intermediate_size")?;
    let count = c.maybe_usize("num_local_experts")?.unwrap_or(0);
    let experts = match count {
        0 => None,
        _ => Some((count, c.usize("num_experts_per_tok")?, c.usize("intermediate_size")?)),
    };
    let recurrent = Recurrent { kernel, scan: Some(scan) };
    Ok(with_parts(granite(base.spec(), factors), recurrent, &attends, common, experts))
}

fn gguf(m: &Meta<'_>) -> Result<Spec> {
    let mut base = Base::gguf("granitehybrid", m, Layout::Pairs)?;
    if !m.maybe_flag("rope.scaling.finetuned")?.unwrap_or(true) {
        base.rope = None;
    }
    let (heads, inner) = (m.usize("ssm.time_step_rank")?, m.usize("ssm.inner_size")?);
    let scan = Scan {
        kind: ScanKind::Mamba { limit: (0.0, f64::INFINITY) },
        shared: m.usize("ssm.group_count")?,
        heads,
        key: m.usize("ssm.state_size")?,
        value: divided(inner, heads)?,
        tiled: false,
        eps: base.eps,
    };
    // Layers without key heads are recurrent.
    let key_heads = m.list("attention.head_count_kv")?;
    let attends = |i: usize| key_heads.as_ref().is_none_or(|v| v.get(i).is_some_and(|n| *n > 0));
    let f = |key| m.maybe_f64(key);
    let factors = Factors {
        embedding: f("embedding_scale")?,
        residual: f("residual_scale")?,
        attention: f("attention.scale")?,
        logits: f("logit_scale")?,
    };
    let count = m.maybe_usize("expert_count")?.unwrap_or(0);
    let common = m.maybe_usize("expert_shared_feed_forward_length")?;
    let (common, experts) = match count {
        0 => (common.unwrap_or(base.inner), None),
        _ => (common.unwrap_or(0), Some((count, m.usize("expert_used_count")?, base.inner))),
    };
    let recurrent = Recurrent { kernel: m.usize("ssm.conv_kernel")?, scan: Some(scan) };
    Ok(with_parts(granite(base.spec(), factors), recurrent, &attends, common, experts))
}

/// Channels per head.
fn divided(inner: usize, heads: usize) -> Result<usize> {
    match heads > 0 && inner.is_multiple_of(heads) {
        true => Ok(inner / heads),
        false => Err(Error::argument("configuration", format!("{inner} channels in {heads} heads"))),
    }
}

/// `experts`: how many there are, how many a row uses, and their size.
fn with_parts(
    mut s: Spec,
    recurrent: Recurrent,
    attends: &dyn Fn(usize) -> bool,
    common: usize,
    experts: Option<(usize, usize, usize)>,
) -> Spec {
    for (i, l) in s.layers.iter_mut().enumerate() {
        if !attends(i) {
            l.mixer = Mixer::Recurrent(recurrent);
        }
        l.inner = common;
        if let Some((count, used, inner)) = experts {
            let experts = Experts {
                score: Score::SoftmaxOfChosen,
                normalise: false,
                common: Some(common).filter(|n| *n > 0),
                ..llama::mixture(count, used)
            };
            (l.ffn, l.inner) = (Ffn::Experts(experts), inner);
        }
    }
    s
}
