//! Qwen 2, Qwen 3 and Qwen 3 with experts.

use super::{Base, Family, Hf, Meta, llama};
use crate::rope::Layout;
use crate::spec::{Experts, Ffn, Spec};
use halcyon::ir::error::Result;

pub(super) const QWEN2: Family = Family {
    name: "qwen2",
    hf: &["qwen2"],
    from_hf: |c| windowed(Base::hf("qwen2", c)?, c),
    gguf: &["qwen2"],
    from_gguf: |m| Ok(Base::gguf("qwen2", m, Layout::Half)?.spec()),
};

pub(super) const QWEN3: Family = Family {
    name: "qwen3",
    hf: &["qwen3"],
    from_hf: |c| {
        let base = Base::hf("qwen3", c)?;
        let norm = base.rms();
        let mut s = windowed(base, c)?;
        s.norm_heads(norm);
        Ok(s)
    },
    gguf: &["qwen3"],
    from_gguf: |m| {
        let base = Base::gguf("qwen3", m, Layout::Half)?;
        let mut s = base.spec();
        s.norm_heads(base.rms());
        Ok(s)
    },
};

pub(super) const QWEN3_MOE: Family = Family {
    name: "qwen3moe",
    hf: &["qwen3_moe"],
    from_hf: moe_hf,
    gguf: &["qwen3moe"],
    from_gguf: moe_gguf,
};

/// The window of the layers that `layer_types` names.
fn windowed(base: Base, c: &Hf<'_>) -> Result<Spec> {
    let mut s = base.spec();
    let window = c.maybe_usize("sliding_window")?.filter(|_| c.flag("use_sliding_window"));
    let first = c.maybe_usize("max_window_layers")?.unwrap_or(28);
    s.each_attention(|i, a| a.window = window.filter(|_| c.slides(i).unwrap_or(i >= first)));
    Ok(s)
}

fn moe_hf(c: &Hf<'_>) -> Result<Spec> {
    let base = Base::hf("qwen3moe", c)?;
    let mut s = base.spec();
    // Here every layer has the window.
    let window = c.maybe_usize("sliding_window")?.filter(|_| c.flag("use_sliding_window"));
    s.each_attention(|_, a| a.window = window);
    s.norm_heads(base.rms());
    let count = c.usize_of(&["num_experts", "num_local_experts"])?;
    let experts = Experts {
        activation: base.activation,
        normalise: c.flag("norm_topk_prob"),
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
            l.ffn = Ffn::Experts(experts.clone());
            l.inner = inner;
        }
    }
    Ok(s)
}

fn moe_gguf(m: &Meta<'_>) -> Result<Spec> {
    let base = Base::gguf("qwen3moe", m, Layout::Half)?;
    let mut s = base.spec();
    s.norm_heads(base.rms());
    let experts = llama::mixture(m.usize("expert_count")?, m.usize("expert_used_count")?);
    let inner = m.usize("expert_feed_forward_length")?;
    for (i, l) in s.layers.iter_mut().enumerate() {
        if m.has(&format!("blk.{i}.ffn_gate_inp.weight")) {
            l.ffn = Ffn::Experts(experts.clone());
            l.inner = inner;
        }
    }
    Ok(s)
}
