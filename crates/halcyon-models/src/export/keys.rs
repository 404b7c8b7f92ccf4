//! Metadata of a GGUF file from what the model computes.

use crate::rope::{Rope, Scaling, yarn_attention};
use crate::spec::{Attention, Experts, Ffn, Layer, Mixer, Norm, NormKind, Score, Spec};
use halcyon_formats::gguf::{Array, Value};

/// The attention of a layer.
pub(super) fn attention(l: &Layer) -> Option<&Attention> {
    match &l.mixer {
        Mixer::Attention(a) => Some(a),
        _ => None,
    }
}

/// Keys and values in order; keys get the architecture's name.
struct Keys<'a> {
    arch: &'a str,
    all: Vec<(String, Value)>,
}

impl Keys<'_> {
    fn add(&mut self, key: &str, v: impl Into<Value>) {
        self.all.push((format!("{}.{key}", self.arch), v.into()));
    }

    fn size(&mut self, key: &str, v: usize) {
        // Sizes are far below this limit (`family::check`).
        self.add(key, u32::try_from(v).unwrap_or(u32::MAX));
    }

    fn float(&mut self, key: &str, v: f64) {
        self.add(key, v as f32);
    }

    fn maybe(&mut self, key: &str, v: Option<f64>) {
        if let Some(v) = v {
            self.float(key, v);
        }
    }
}

/// The keys that describe the computation. What the architecture has no key for is not said; the caller reads
/// the keys again and compares.
pub(super) fn of_spec(spec: &Spec, arch: &str) -> Vec<(String, Value)> {
    let mut k = Keys { arch, all: vec![] };
    k.size("vocab_size", spec.vocabulary);
    k.size("context_length", spec.context);
    k.size("embedding_length", spec.hidden);
    k.size("block_count", spec.layers.len());
    let experts = |l: &Layer| match &l.ffn {
        Ffn::Experts(e) => Some((e.clone(), l.inner)),
        _ => None,
    };
    let dense = spec.layers.iter().find(|l| experts(l).is_none());
    if let Some(l) = dense.or(spec.layers.first()) {
        k.size("feed_forward_length", l.inner);
    }
    if let Some((e, inner)) = spec.layers.iter().find_map(experts) {
        let first = spec.layers.iter().take_while(|l| experts(l).is_none()).count();
        mixture(&mut k, &e, inner, first);
    }
    norm(&mut k, spec.final_norm);
    k.maybe("final_logit_softcapping", spec.logit_cap);
    k.maybe("embedding_scale", spec.embedding_scale.filter(|_| arch == "granite"));
    // Granite's key is the divisor.
    k.maybe("logit_scale", spec.logit_scale.map(|s| if arch == "granite" { 1.0 / s } else { s }));
    k.maybe("residual_scale", spec.layers.first().and_then(|l| l.residual_scale));
    heads(&mut k, spec);
    k.all
}

fn norm(k: &mut Keys<'_>, n: Norm) {
    let key = match n.kind {
        NormKind::Layer => "attention.layer_norm_epsilon",
        NormKind::Rms | NormKind::RmsPlusOne => "attention.layer_norm_rms_epsilon",
    };
    k.float(key, n.eps);
}

fn heads(k: &mut Keys<'_>, spec: &Spec) {
    let layers = || spec.layers.iter().map(attention);
    let Some(a) = layers().flatten().next() else { return };
    k.size("attention.head_count", a.heads);
    k.size("attention.head_count_kv", a.shared);
    k.size("attention.key_length", a.key);
    k.size("attention.value_length", a.value);
    k.maybe("attention.scale", Some(a.scale).filter(|_| k.arch == "granite"));
    k.maybe("attn_logit_softcapping", a.softcap);
    let slides: Vec<bool> = layers().map(|a| a.is_some_and(|a| a.window.is_some())).collect();
    if let Some(window) = layers().flatten().find_map(|a| a.window) {
        k.size("attention.sliding_window", window);
        if slides.contains(&false) {
            k.add("attention.sliding_window_pattern", Value::Array(Array::Bool(slides.clone())));
        }
    }
    // The rotation of layers that see all positions; the others may have a base of their own.
    let rope_of = |slides: bool| {
        let mut all = layers().flatten().filter(|a| a.window.is_some() == slides);
        all.find_map(|a| a.rope.as_ref())
    };
    if let Some(r) = rope_of(false).or(rope_of(true)) {
        rope(k, r);
        if let Some(own) = rope_of(true).filter(|own| own.base != r.base) {
            k.float("rope.freq_base_swa", own.base);
        }
    }
}

fn rope(k: &mut Keys<'_>, r: &Rope) {
    k.size("rope.dimension_count", r.size);
    k.float("rope.freq_base", r.base);
    match &r.scaling {
        // Llama's factors are a tensor.
        Scaling::None | Scaling::Llama3 { .. } => {}
        // There is no key for these.
        Scaling::Dynamic { .. } | Scaling::Proportional { .. } => {}
        Scaling::Linear { factor } => {
            k.add("rope.scaling.type", "linear");
            k.float("rope.scaling.factor", *factor);
        }
        Scaling::Yarn(y) => {
            k.add("rope.scaling.type", "yarn");
            k.float("rope.scaling.factor", y.factor);
            k.size("rope.scaling.original_context_length", y.original);
            k.float("rope.scaling.yarn_beta_fast", y.beta_fast);
            k.float("rope.scaling.yarn_beta_slow", y.beta_slow);
            let own = y.mscale.map(|(m, all)| yarn_attention(y.factor, m) / yarn_attention(y.factor, all));
            // The file's factor is on top of the paper's.
            let attention = y.attention.or(own);
            k.maybe("rope.scaling.attn_factor", attention.map(|a| a / yarn_attention(y.factor, 1.0)));
        }
        Scaling::Long { original, factor, attention, .. } => {
            k.add("rope.scaling.type", "longrope");
            k.float("rope.scaling.factor", *factor);
            k.size("rope.scaling.original_context_length", *original);
            k.maybe("rope.scaling.attn_factor", *attention);
        }
    }
}

fn mixture(k: &mut Keys<'_>, e: &Experts, inner: usize, first: usize) {
    k.size("expert_count", e.count);
    k.size("expert_used_count", e.used);
    k.size("expert_feed_forward_length", inner);
    if first > 0 {
        k.size("leading_dense_block_count", first);
    }
    let function: u32 = match e.score {
        Score::Softmax => 1,
        Score::Sigmoid => 2,
        Score::SoftmaxOfChosen => 3,
    };
    k.add("expert_gating_func", function);
    k.add("expert_weights_norm", e.normalise);
    k.maybe("expert_weights_scale", e.scale);
    if let Some((groups, kept)) = e.groups {
        k.size("expert_group_count", groups);
        k.size("expert_group_used_count", kept);
    }
    if let Some(common) = e.common {
        k.size("expert_shared_count", common / inner.max(1));
        k.size("expert_shared_feed_forward_length", common);
    }
}
