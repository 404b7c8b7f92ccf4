//! Qwen3-Next and Qwen 3.5: gated DeltaNet, and attention with a gate in every fourth layer.

use super::{Base, Family, Hf, Meta, llama};
use crate::rope::Layout;
use crate::spec::{Experts, Ffn, Mixer, Norm, NormKind, Recurrent, Scan, ScanKind, Spec};
use halcyon::ir::error::{Error, Result};

pub(super) const QWEN3_NEXT: Family = Family {
    name: "qwen3next",
    hf: &["qwen3_next"],
    from_hf: |c| moe_hf("qwen3next", c),
    gguf: &["qwen3next"],
    from_gguf: |m| moe_gguf("qwen3next", m, false),
};

pub(super) const QWEN3_5: Family = Family {
    name: "qwen35",
    hf: &["qwen3_5_text", "qwen3_5"],
    from_hf: |c| hf("qwen35", c),
    gguf: &["qwen35"],
    from_gguf: |m| gguf("qwen35", m, true),
};

pub(super) const QWEN3_5_MOE: Family = Family {
    name: "qwen35moe",
    hf: &["qwen3_5_moe_text", "qwen3_5_moe"],
    from_hf: |c| moe_hf("qwen35moe", c),
    gguf: &["qwen35moe"],
    from_gguf: |m| moe_gguf("qwen35moe", m, true),
};

fn hf(family: &'static str, c: &Hf<'_>) -> Result<Spec> {
    let mut base = Base::hf(family, c)?;
    super::only_silu(c)?;
    // Qwen3-Next has no key for them. Whether they are there follows from the tensors.
    let ahead = match c.maybe_usize("mtp_num_hidden_layers")? {
        Some(n) => n,
        None => c.maybe_usize("num_nextn_predict_layers")?.unwrap_or(1),
    };
    let ahead = base.add_ahead(Some(ahead));
    let own = base.layers - ahead;
    base.rope = Some(c.rope_of(base.head, None, 0.25)?);
    let scan = Scan {
        kind: ScanKind::Delta,
        shared: c.usize("linear_num_key_heads")?,
        heads: c.usize("linear_num_value_heads")?,
        key: c.usize("linear_key_head_dim")?,
        value: c.usize("linear_value_head_dim")?,
        tiled: false,
        eps: base.eps,
    };
    let kernel = c.maybe_usize("linear_conv_kernel_dim")?.unwrap_or(4);
    let every = c.maybe_usize("full_attention_interval")?.unwrap_or(4).max(1);
    let attends =
        |i: usize| i >= own || c.layer_is(i, &["full_attention"]).unwrap_or((i + 1).is_multiple_of(every));
    let mut s = spec(&base, NormKind::RmsPlusOne, Recurrent { kernel, scan: Some(scan) }, &attends);
    s.split_ahead(ahead);
    Ok(s)
}

fn moe_hf(family: &'static str, c: &Hf<'_>) -> Result<Spec> {
    let mut s = hf(family, c)?;
    let count = c.usize_of(&["num_experts", "num_local_experts"])?;
    let experts = Experts {
        // Qwen 3.5 has no such key, and always divides.
        normalise: c.get("norm_topk_prob").is_none_or(|v| v.as_bool() != Some(false)),
        common: Some(c.usize("shared_expert_intermediate_size")?),
        common_gate: true,
        ..llama::mixture(count, c.usize("num_experts_per_tok")?)
    };
    let inner = c.usize("moe_intermediate_size")?;
    let step = c.maybe_usize("decoder_sparse_step")?.unwrap_or(1).max(1);
    let dense: Vec<u64> = c
        .get("mlp_only_layers")
        .and_then(|v| v.as_array())
        .map(|v| v.iter().filter_map(|n| n.as_u64()).collect())
        .unwrap_or_default();
    for (i, l) in s.layers.iter_mut().enumerate() {
        if !dense.contains(&(i as u64)) && (i + 1) % step == 0 && count > 0 {
            (l.ffn, l.inner) = (Ffn::Experts(experts.clone()), inner);
        }
    }
    if count > 0 {
        s.ahead.iter_mut().for_each(|l| (l.ffn, l.inner) = (Ffn::Experts(experts.clone()), inner));
    }
    Ok(s)
}

/// `tiled`: the order of value heads in files of Qwen 3.5.
fn gguf(family: &'static str, m: &Meta<'_>, tiled: bool) -> Result<Spec> {
    let base = Base::gguf(family, m, Layout::Half)?;
    let ahead = m.maybe_usize("nextn_predict_layers")?.unwrap_or(0).min(base.layers);
    let own = base.layers - ahead;
    let (heads, inner) = (m.usize("ssm.time_step_rank")?, m.usize("ssm.inner_size")?);
    if heads == 0 || inner % heads != 0 {
        let what = format!("ssm.inner_size = {inner} is not a multiple of ssm.time_step_rank = {heads}");
        return Err(Error::argument("configuration", what));
    }
    let scan = Scan {
        kind: ScanKind::Delta,
        shared: m.usize("ssm.group_count")?,
        heads,
        key: m.usize("ssm.state_size")?,
        value: inner / heads,
        tiled,
        eps: base.eps,
    };
    let every = m.maybe_usize("full_attention_interval")?.unwrap_or(4).max(1);
    let listed = m.pattern("attention.recurrent_layers");
    let attends = |i: usize| match listed.as_ref().and_then(|v| v.get(i)) {
        _ if i >= own => true,
        Some(recurrent) => !recurrent,
        None => (i + 1).is_multiple_of(every),
    };
    let recurrent = Recurrent { kernel: m.usize("ssm.conv_kernel")?, scan: Some(scan) };
    // The file's norms contain the 1.
    let mut s = spec(&base, NormKind::Rms, recurrent, &attends);
    s.split_ahead(ahead);
    Ok(s)
}

fn moe_gguf(family: &'static str, m: &Meta<'_>, tiled: bool) -> Result<Spec> {
    let mut s = gguf(family, m, tiled)?;
    let inner = m.usize("expert_feed_forward_length")?;
    let experts = Experts {
        common: Some(m.maybe_usize("expert_shared_feed_forward_length")?.unwrap_or(inner)),
        common_gate: true,
        ..llama::mixture(m.usize("expert_count")?, m.usize("expert_used_count")?)
    };
    for (i, l) in s.layers.iter_mut().chain(&mut s.ahead).enumerate() {
        if m.has(&format!("blk.{i}.ffn_gate_inp.weight")) {
            (l.ffn, l.inner) = (Ffn::Experts(experts.clone()), inner);
        }
    }
    Ok(s)
}

fn spec(base: &Base, kind: NormKind, recurrent: Recurrent, attends: &dyn Fn(usize) -> bool) -> Spec {
    let norm = Norm { kind, eps: base.eps };
    let mut s = base.spec();
    s.final_norm = norm;
    s.norm_heads(norm);
    s.each_attention(|_, a| a.gate = true);
    for (i, l) in s.layers.iter_mut().enumerate() {
        l.norm = norm;
        if !attends(i) {
            l.mixer = Mixer::Recurrent(recurrent);
        }
    }
    s
}
