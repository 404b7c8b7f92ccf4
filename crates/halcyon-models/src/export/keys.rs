//! Metadata of a GGUF file from what the model computes.

use crate::rope::{Rope, Scaling, yarn_attention};
use crate::spec::{
    Attention, Experts, Ffn, Latent, Layer, Mixer, Norm, NormKind, Recurrent, ScanKind, Score, Spec,
};
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

    fn list(&mut self, key: &str, v: impl Iterator<Item = usize>) {
        let v: Vec<i32> = v.map(|n| i32::try_from(n).unwrap_or(i32::MAX)).collect();
        self.add(key, v);
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
    let (ahead, spec) = (spec.ahead.len(), &spec.listed());
    let mut k = Keys { arch, all: vec![] };
    k.size("vocab_size", spec.vocabulary);
    k.size("context_length", spec.context);
    k.size("embedding_length", spec.hidden);
    k.size("block_count", spec.layers.len());
    if ahead > 0 {
        k.size("nextn_predict_layers", ahead);
    }
    let experts_only = |l: &Layer| matches!(l.ffn, Ffn::Experts(_));
    let dense: Vec<usize> = spec.layers.iter().filter(|l| !experts_only(l)).map(|l| l.inner).collect();
    match (&dense[..], spec.layers.first()) {
        ([first, rest @ ..], _) if rest.iter().any(|n| n != first) => {
            k.list("feed_forward_length", spec.layers.iter().map(|l| l.inner));
        }
        ([n, ..], _) => k.size("feed_forward_length", *n),
        ([], l) => k.size("feed_forward_length", l.map_or(0, |l| l.inner)),
    }
    if let Some((e, inner)) = spec.layers.iter().find_map(Layer::experts) {
        k.size("expert_count", e.count);
        k.size("expert_used_count", e.used);
        k.size("expert_feed_forward_length", inner);
        let first = spec.layers.iter().take_while(|l| l.experts().is_none()).count();
        mixture(&mut k, e, inner, first);
    }
    if let Some(p) = spec.per_layer {
        k.size("embedding_length_per_layer_input", p.size);
    }
    norm(&mut k, spec.final_norm);
    k.maybe("final_logit_softcapping", spec.logit_cap);
    k.maybe("embedding_scale", spec.embedding_scale.filter(|_| granite(arch)));
    // Granite's key is the divisor.
    k.maybe("logit_scale", spec.logit_scale.map(|s| if granite(arch) { 1.0 / s } else { s }));
    k.maybe("residual_scale", spec.layers.first().and_then(|l| l.residual_scale));
    heads(&mut k, spec);
    let recurrent = |l: &Layer| match &l.mixer {
        Mixer::Recurrent(r) => Some(*r),
        Mixer::Attention(_) => None,
    };
    if let Some(r) = spec.layers.iter().find_map(recurrent) {
        scan(&mut k, &r, spec);
    }
    k.all
}

/// Whether the architecture has Granite's factors.
fn granite(arch: &str) -> bool {
    arch.starts_with("granite")
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
    let shared: Vec<usize> = layers().map(|a| a.map_or(0, |a| a.shared)).collect();
    // DeltaNet's layers are listed in another key.
    let listed = matches!(k.arch, "lfm2" | "granitehybrid" | "gemma4");
    match listed && shared.iter().any(|n| *n != a.shared) {
        true => k.list("attention.head_count_kv", shared.into_iter()),
        false => k.size("attention.head_count_kv", a.shared),
    }
    // The sizes of layers that see all positions; the others may have their own.
    let all = layers().flatten().find(|a| a.window.is_none()).unwrap_or(a);
    k.size("attention.key_length", all.key);
    k.size("attention.value_length", all.value);
    if k.arch == "gemma4" {
        gemma4(k, spec);
    }
    if let Some(l) = &a.latent {
        latent(k, a, l);
    }
    k.maybe("attention.scale", Some(a.scale).filter(|_| granite(k.arch)));
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
        rope(k, r, a.latent.is_some());
        if let Some(own) = rope_of(true).filter(|own| own.base != r.base) {
            k.float("rope.freq_base_swa", own.base);
        }
    } else if k.arch == "granitehybrid" {
        // Their files say so that nothing is rotated.
        k.size("rope.dimension_count", a.key);
        k.add("rope.scaling.finetuned", false);
    }
}

/// The layers with a window have sizes of their own, and late layers use keys of earlier ones.
fn gemma4(k: &mut Keys<'_>, spec: &Spec) {
    let layers = || spec.layers.iter().filter_map(attention);
    let near = layers().find(|a| a.window.is_some());
    if let Some(a) = near.or(layers().next()) {
        k.size("attention.key_length_swa", a.key);
        k.size("attention.value_length_swa", a.value);
        k.size("rope.dimension_count_swa", a.rope.as_ref().map_or(a.key, |r| r.size));
    }
    k.size("attention.shared_kv_layers", layers().filter(|a| a.keys_of.is_some()).count());
    if spec.per_layer.is_none() {
        k.size("embedding_length_per_layer_input", 0);
    }
}

fn latent(k: &mut Keys<'_>, a: &Attention, l: &Latent) {
    if let Some(n) = l.queries {
        k.size("attention.q_lora_rank", n);
    }
    k.size("attention.kv_lora_rank", l.rank);
    k.size("attention.key_length_mla", l.plain + a.key - l.rank);
    k.size("attention.value_length_mla", l.value);
}

/// The sizes of recurrent layers, and which layers these are.
fn scan(k: &mut Keys<'_>, r: &Recurrent, spec: &Spec) {
    let Some(s) = &r.scan else {
        k.size("shortconv.l_cache", r.kernel);
        return;
    };
    k.size("ssm.conv_kernel", r.kernel);
    k.size("ssm.state_size", s.key);
    k.size("ssm.group_count", s.shared);
    k.size("ssm.time_step_rank", s.heads);
    k.size("ssm.inner_size", s.heads * s.value);
    if s.kind == ScanKind::Delta {
        let recurrent: Vec<bool> = spec.layers.iter().map(|l| attention(l).is_none()).collect();
        if let Some(first) = recurrent.iter().position(|r| !r) {
            k.size("full_attention_interval", first + 1);
        }
        k.add("attention.recurrent_layers", Value::Array(Array::Bool(recurrent)));
    }
}

fn rope(k: &mut Keys<'_>, r: &Rope, latent: bool) {
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
            // The file's factor is on top of the paper's, or if it has `mscale_all_dim`, in its place.
            let paper = yarn_attention(y.factor, 1.0);
            let given = y.attention.is_some() || y.mscale.is_some();
            match y.mscale.filter(|_| latent) {
                Some((_, all)) => {
                    k.float("rope.scaling.yarn_log_multiplier", 0.1 * all);
                    let own = y.factor_of_rotations();
                    k.maybe("rope.scaling.attn_factor", Some(own).filter(|f| (f - 1.0).abs() > 1e-9));
                }
                None => {
                    let own = y.factor_of_rotations() / paper;
                    k.maybe("rope.scaling.attn_factor", Some(own).filter(|_| given));
                }
            }
        }
        // Files do not name this scaling: they have its factors as tensors.
        Scaling::Long { original, .. } => {
            k.size("rope.scaling.original_context_length", *original);
            k.float("rope.scaling.attn_factor", r.frequencies(0).1);
        }
    }
}

fn mixture(k: &mut Keys<'_>, e: &Experts, inner: usize, first: usize) {
    if k.arch == "gemma4" {
        return;
    }
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
