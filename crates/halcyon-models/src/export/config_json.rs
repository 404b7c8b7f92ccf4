//! `config.json` of a model that comes from a GGUF file.
//!
//! The keys are those of transformers before version 5, which later versions read too, where they have names
//! for everything; Gemma 4 has those of version 5. What a family has beyond Llama's keys is a function of its
//! own.

use super::folder::in_f32;
use super::keys::attention;
use crate::rope::{Rope, Scaling};
use crate::source::Source;
use crate::spec::{Activation, Attention, Experts, Ffn, Layer, Mixer, Order, Recurrent, Scan, Spec};
use halcyon::DType;
use halcyon::ir::error::{Error, Result};
use halcyon_formats::gguf::{Gguf, Metadata};
use serde_json::{Map, Value as Json, json};

/// A number as it would be written by hand: files hold the nearest f32.
pub(super) fn short(v: f64) -> f64 {
    (v as f32).to_string().parse().unwrap_or(v)
}

/// What all families' functions read.
struct Model<'a> {
    source: &'a Source,
    spec: &'a Spec,
    /// The first layer with attention that sees all positions, or the first with attention.
    attention: &'a Attention,
}

impl Model<'_> {
    fn has(&self, name: &str) -> Result<bool> {
        Ok(self.source.find(self.spec, name)?.is_some())
    }

    fn layers(&self) -> impl Iterator<Item = &Layer> {
        self.spec.layers.iter()
    }

    /// The experts, and the size between the products of each.
    fn experts(&self) -> Option<(&Experts, usize)> {
        self.layers().find_map(Layer::experts)
    }

    /// The layers before the first with experts.
    fn dense(&self) -> usize {
        self.layers().take_while(|l| l.experts().is_none()).count()
    }

    /// The kinds of the layers; `other` is that of recurrent ones.
    fn kinds(&self, other: &str) -> Vec<Json> {
        let kind = |l: &Layer| match attention(l) {
            None => other.into(),
            Some(a) if a.window.is_some() => "sliding_attention".into(),
            Some(_) => "full_attention".into(),
        };
        self.layers().map(kind).collect()
    }

    fn recurrent(&self) -> Option<Recurrent> {
        self.layers().find_map(|l| match &l.mixer {
            Mixer::Recurrent(r) => Some(*r),
            Mixer::Attention(_) => None,
        })
    }

    fn scan(&self) -> Result<(Recurrent, Scan)> {
        let found = self.recurrent().and_then(|r| Some((r, r.scan?)));
        found.ok_or_else(|| {
            Error::unsupported(
                "a model without recurrent layers in a folder of this family",
                "Use the GGUF file",
            )
        })
    }

    /// `model_type` and the name of the class.
    fn names(&self) -> Result<(&'static str, &'static str)> {
        let windows = self.layers().filter_map(attention).any(|a| a.window.is_some());
        let moe = self.experts().is_some();
        let v3 = self.experts().is_some_and(|(e, _)| e.choice_bias);
        Ok(match (self.spec.family, moe) {
            ("llama", true) | ("mixtral", _) => ("mixtral", "Mixtral"),
            ("llama", false) if windows => ("mistral", "Mistral"),
            ("llama", false) => ("llama", "Llama"),
            ("qwen2", _) => ("qwen2", "Qwen2"),
            ("qwen3", _) => ("qwen3", "Qwen3"),
            ("qwen3moe", _) => ("qwen3_moe", "Qwen3Moe"),
            ("qwen3next", _) => ("qwen3_next", "Qwen3Next"),
            ("qwen35", _) => ("qwen3_5_text", "Qwen3_5"),
            ("qwen35moe", _) => ("qwen3_5_moe_text", "Qwen3_5Moe"),
            ("gemma2", _) => ("gemma2", "Gemma2"),
            ("gemma3", _) => ("gemma3_text", "Gemma3"),
            ("gemma4", _) => ("gemma4_text", "Gemma4"),
            ("gpt-oss", _) => ("gpt_oss", "GptOss"),
            ("phi3", _) => ("phi3", "Phi3"),
            ("glm4moe", _) => ("glm4_moe", "Glm4Moe"),
            ("deepseek2", _) if v3 => ("deepseek_v3", "DeepseekV3"),
            ("deepseek2", _) => ("deepseek_v2", "DeepseekV2"),
            ("olmo2", _) => ("olmo2", "Olmo2"),
            ("granite", _) => ("granite", "Granite"),
            ("granitehybrid", _) => ("granitemoehybrid", "GraniteMoeHybrid"),
            ("lfm2", _) => ("lfm2", "Lfm2"),
            ("smollm3", _) => ("smollm3", "SmolLM3"),
            ("cohere2", _) => ("cohere2", "Cohere2"),
            ("starcoder2", _) => ("starcoder2", "Starcoder2"),
            ("gpt2", _) => ("gpt2", "GPT2LMHead"),
            ("falcon", _) => ("falcon", "Falcon"),
            (other, _) => {
                return Err(Error::unsupported(
                    format!("folders of the architecture {other}"),
                    "Use the GGUF file",
                ));
            }
        })
    }
}

/// `config.json`.
pub(super) fn configuration(source: &Source, file: &Gguf, spec: &Spec, dtype: DType) -> Result<Json> {
    let attentions = || spec.layers.iter().filter_map(attention);
    let Some(a) = attentions().find(|a| a.window.is_none()).or(attentions().next()) else {
        return Err(Error::unsupported("a model without attention in a folder", "Use the GGUF file"));
    };
    let model = Model { source, spec, attention: a };
    let (kind, class) = model.names()?;
    let m = file.metadata();
    let id = |key: &str| m.maybe(&format!("tokenizer.ggml.{key}_token_id"), Metadata::u64);
    let class =
        if class.ends_with("LMHead") { format!("{class}Model") } else { format!("{class}ForCausalLM") };
    let mut c = json!({
        "architectures": [class],
        "model_type": kind,
        "torch_dtype": match dtype { DType::F16 => "float16", DType::BF16 => "bfloat16", _ => "float32" },
        "vocab_size": spec.vocabulary,
        "tie_word_embeddings": !model.has("output.weight")?,
        "bos_token_id": id("bos")?,
        "eos_token_id": id("eos")?,
        "pad_token_id": id("padding")?,
    });
    let mut add = |more: Json| {
        if let (Json::Object(all), Json::Object(more)) = (&mut c, more) {
            all.extend(more);
        }
    };
    if spec.family == "gpt2" {
        add(gpt2(&model));
        return Ok(c);
    }
    add(common(&model)?);
    add(mixture(&model));
    match spec.family {
        "gemma2" | "gemma3" => add(gemma(&model)),
        "gemma4" => add(gemma4(&model)?),
        "granite" => add(granite(&model)),
        "granitehybrid" => {
            add(granite(&model));
            add(granite_hybrid(&model)?);
        }
        "qwen3next" | "qwen35" | "qwen35moe" => add(deltanet(&model)?),
        "deepseek2" => add(deepseek(&model)?),
        "glm4moe" => add(json!({ "use_qk_norm": a.qk_norm.is_some() })),
        "gpt-oss" => add(gpt_oss(&model)),
        "lfm2" => add(lfm2(&model)?),
        "smollm3" => {
            let turns = |l: &Layer| u8::from(attention(l).is_some_and(|a| a.rope.is_some()));
            add(json!({ "no_rope_layers": model.layers().map(turns).collect::<Vec<_>>() }));
        }
        "cohere2" => add(json!({
            "layer_norm_eps": short(spec.final_norm.eps),
            "logit_scale": spec.logit_scale.map(short),
        })),
        "starcoder2" => add(json!({
            "norm_epsilon": short(spec.final_norm.eps),
            "hidden_act": "gelu_pytorch_tanh",
            "use_bias": model.has("blk.0.attn_q.bias")?,
        })),
        "falcon" => add(falcon(&model)?),
        _ => {}
    }
    match (spec.ahead.len(), spec.family) {
        (0, _) => {}
        (n, "deepseek2" | "glm4moe") => add(json!({ "num_nextn_predict_layers": n })),
        (n, _) => add(json!({ "mtp_num_hidden_layers": n })),
    }
    if spec.family != "gemma4" {
        add(rotation(&model)?);
    }
    Ok(c)
}

/// The keys of Llama, which most families have too.
fn common(m: &Model<'_>) -> Result<Json> {
    let (s, a) = (m.spec, m.attention);
    let dense = m.layers().find(|l| !matches!(l.ffn, Ffn::Experts(_))).or(s.layers.first());
    let mut c = json!({
        "hidden_size": s.hidden,
        "intermediate_size": dense.map_or(0, |l| l.inner),
        "num_hidden_layers": s.layers.len(),
        "num_attention_heads": a.heads,
        "num_key_value_heads": a.shared,
        "max_position_embeddings": s.context,
        "rms_norm_eps": short(s.final_norm.eps),
        "hidden_act": "silu",
        "attention_bias": m.has("blk.0.attn_q.bias")?,
        "mlp_bias": m.has("blk.0.ffn_up.bias")?,
    });
    // transformers computes it for Falcon, and refuses the key.
    if s.family != "falcon" {
        c["head_dim"] = json!(a.key);
    }
    if let Some(w) = m.layers().filter_map(attention).find_map(|a| a.window) {
        c["sliding_window"] = json!(w);
        c["layer_types"] = m.kinds("linear_attention").into();
    }
    Ok(c)
}

/// The keys of models with experts.
fn mixture(m: &Model<'_>) -> Json {
    let Some((e, inner)) = m.experts() else { return json!({}) };
    let dense = m.layers().enumerate().filter(|(_, l)| l.experts().is_none()).map(|(i, _)| i);
    let mut c = json!({ "num_experts_per_tok": e.used });
    match m.spec.family {
        "llama" | "mixtral" | "gpt-oss" | "granitehybrid" => c["num_local_experts"] = json!(e.count),
        "deepseek2" | "glm4moe" => {
            c["n_routed_experts"] = json!(e.count);
            c["moe_intermediate_size"] = json!(inner);
            c["n_shared_experts"] = json!(e.common.map(|n| n / inner.max(1)));
            c["norm_topk_prob"] = json!(e.normalise);
            c["routed_scaling_factor"] = json!(short(e.scale.unwrap_or(1.0)));
            c["first_k_dense_replace"] = json!(m.dense());
            c["n_group"] = json!(e.groups.map(|g| g.0));
            c["topk_group"] = json!(e.groups.map(|g| g.1));
        }
        _ => {
            c["num_experts"] = json!(e.count);
            c["moe_intermediate_size"] = json!(inner);
            c["norm_topk_prob"] = json!(e.normalise);
            c["decoder_sparse_step"] = json!(1);
            c["mlp_only_layers"] = dense.collect();
            if let Some(n) = e.common {
                c["shared_expert_intermediate_size"] = json!(n);
            }
        }
    }
    c
}

fn gemma(m: &Model<'_>) -> Json {
    let n = 1.0 / (m.attention.scale * m.attention.scale);
    json!({
        "hidden_activation": "gelu_pytorch_tanh",
        // transformers insists on an integer where it is one.
        "query_pre_attn_scalar": if (n - n.round()).abs() < 1e-3 { json!(n.round() as i64) } else { json!(n) },
        "final_logit_softcapping": m.spec.logit_cap.map(short),
        "attn_logit_softcapping": m.attention.softcap.map(short),
    })
}

fn gemma4(m: &Model<'_>) -> Result<Json> {
    let s = m.spec;
    let near = m.layers().filter_map(attention).find(|a| a.window.is_some()).unwrap_or(m.attention);
    let mut own = Map::new();
    for (i, l) in m.layers().enumerate() {
        let Some(a) = attention(l) else { continue };
        if (a.key, a.shared) != (near.key, near.shared) {
            own.insert(i.to_string(), json!({ "head_dim": a.key, "num_key_value_heads": a.shared }));
        }
    }
    let base = |a: &Attention| short(a.rope.as_ref().map_or(10_000.0, |r| r.base));
    let far = match m.source.find(s, "rope_freqs.weight")? {
        None => json!({ "rope_type": "default", "rope_theta": base(m.attention) }),
        Some(w) => {
            let factors = in_f32(&w)?;
            let turned = factors.iter().take_while(|f| **f < 1e20).count();
            let factor = factors.first().copied().unwrap_or(1.0);
            let regular = |(i, f): (usize, &f32)| if i < turned { *f == factor } else { *f >= 1e20 };
            if !factors.iter().enumerate().all(regular) {
                let what = "these factors of the rotation (rope_freqs) in a folder";
                return Err(Error::unsupported(what, "Use the GGUF file"));
            }
            json!({
                "rope_type": "proportional",
                "rope_theta": base(m.attention),
                "partial_rotary_factor": turned as f64 / factors.len().max(1) as f64,
                "factor": factor,
            })
        }
    };
    let late = m.layers().filter_map(attention).filter(|a| a.keys_of.is_some()).count();
    let widths: Vec<usize> = m.layers().map(|l| l.inner).collect();
    let narrow = widths.iter().copied().min().unwrap_or(0);
    let experts = m.experts();
    Ok(json!({
        "hidden_activation": "gelu_pytorch_tanh",
        "intermediate_size": narrow,
        "use_double_wide_mlp": widths.iter().any(|n| *n != narrow),
        "head_dim": near.key,
        "num_key_value_heads": near.shared,
        "per_layer_config": own,
        "layer_types": m.kinds("full_attention"),
        "final_logit_softcapping": s.logit_cap.map(short),
        "hidden_size_per_layer_input": s.per_layer.map_or(0, |p| p.size),
        "vocab_size_per_layer_input": s.vocabulary,
        "attention_k_eq_v": m.layers().filter_map(attention).any(|a| a.values_of_keys),
        "num_kv_shared_layers": late,
        "enable_moe_block": experts.is_some(),
        "num_experts": experts.map(|(e, _)| e.count),
        "top_k_experts": experts.map(|(e, _)| e.used),
        "moe_intermediate_size": experts.map(|(_, n)| n),
        "rope_parameters": {
            "full_attention": far,
            "sliding_attention": { "rope_type": "default", "rope_theta": base(near) },
        },
    }))
}

fn granite(m: &Model<'_>) -> Json {
    let s = m.spec;
    json!({
        "embedding_multiplier": s.embedding_scale.map_or(1.0, short),
        "logits_scaling": s.logit_scale.map_or(1.0, |s| short(1.0 / s)),
        "attention_multiplier": short(m.attention.scale),
        "residual_multiplier": s.layers.first().and_then(|l| l.residual_scale).map_or(1.0, short),
    })
}

fn granite_hybrid(m: &Model<'_>) -> Result<Json> {
    let (r, s) = m.scan()?;
    let inner = s.heads * s.value;
    if !inner.is_multiple_of(m.spec.hidden) {
        let what = format!("{inner} channels for a hidden size of {}", m.spec.hidden);
        return Err(Error::unsupported(format!("{what} in a folder"), "Use the GGUF file"));
    }
    let (common, own) = match m.experts() {
        Some((e, inner)) => (e.common.unwrap_or(0), inner),
        None => m.spec.layers.first().map_or((0, 0), |l| (l.inner, l.inner)),
    };
    let first = m.layers().position(|l| attention(l).is_none()).unwrap_or(0);
    Ok(json!({
        "layer_types": m.kinds("linear_attention"),
        "position_embedding_type": if m.attention.rope.is_some() { "rope" } else { "nope" },
        "shared_intermediate_size": common,
        "intermediate_size": own,
        "num_local_experts": m.experts().map_or(0, |(e, _)| e.count),
        "num_experts_per_tok": m.experts().map_or(0, |(e, _)| e.used),
        "mamba_n_heads": s.heads,
        "mamba_n_groups": s.shared,
        "mamba_d_state": s.key,
        "mamba_d_head": s.value,
        "mamba_d_conv": r.kernel,
        "mamba_expand": inner / m.spec.hidden,
        "mamba_conv_bias": m.has(&format!("blk.{first}.ssm_conv1d.bias"))?,
        "mamba_proj_bias": m.has(&format!("blk.{first}.ssm_in.bias"))?,
    }))
}

fn deltanet(m: &Model<'_>) -> Result<Json> {
    let (r, s) = m.scan()?;
    Ok(json!({
        "layer_types": m.kinds("linear_attention"),
        "linear_conv_kernel_dim": r.kernel,
        "linear_num_key_heads": s.shared,
        "linear_num_value_heads": s.heads,
        "linear_key_head_dim": s.key,
        "linear_value_head_dim": s.value,
    }))
}

fn deepseek(m: &Model<'_>) -> Result<Json> {
    let Some((a, l)) = Some(m.attention).and_then(|a| Some((a, a.latent?))) else {
        return Err(Error::unsupported("DeepSeek without latent attention", "Use the GGUF file"));
    };
    let turned = a.key - l.rank;
    let grouped = m.experts().is_some_and(|(e, _)| e.groups.is_some());
    let v3 = m.experts().is_some_and(|(e, _)| e.choice_bias);
    Ok(json!({
        "num_key_value_heads": a.heads,
        "head_dim": turned,
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": l.plain,
        "qk_head_dim": l.plain + turned,
        "v_head_dim": l.value,
        "q_lora_rank": l.queries,
        "kv_lora_rank": l.rank,
        "scoring_func": v3.then_some("sigmoid"),
        "topk_method": match (v3, grouped) {
            (true, _) => "noaux_tc",
            (false, true) => "group_limited_greedy",
            (false, false) => "greedy",
        },
    }))
}

fn gpt_oss(m: &Model<'_>) -> Json {
    let mut c = json!({ "intermediate_size": m.experts().map_or(0, |(_, n)| n) });
    if let Some(Activation::ClampedSwiglu { alpha, limit }) = m.experts().map(|(e, _)| e.activation) {
        c["swiglu_alpha"] = json!(alpha);
        c["swiglu_limit"] = json!(limit);
    }
    c
}

fn lfm2(m: &Model<'_>) -> Result<Json> {
    let first = m.layers().position(|l| attention(l).is_none()).unwrap_or(0);
    Ok(json!({
        "norm_eps": short(m.spec.final_norm.eps),
        "layer_types": m.kinds("conv"),
        "conv_L_cache": m.recurrent().map_or(3, |r| r.kernel),
        "conv_bias": m.has(&format!("blk.{first}.shortconv.conv.bias"))?,
        "block_auto_adjust_ff_dim": false,
    }))
}

fn gpt2(m: &Model<'_>) -> Json {
    let s = m.spec;
    json!({
        "n_embd": s.hidden,
        "n_head": m.attention.heads,
        "n_layer": s.layers.len(),
        "n_positions": s.context,
        "n_inner": s.layers.first().map(|l| l.inner),
        "activation_function": "gelu_new",
        "layer_norm_epsilon": short(s.final_norm.eps),
    })
}

fn falcon(m: &Model<'_>) -> Result<Json> {
    let (s, a) = (m.spec, m.attention);
    let two = s.layers.first().is_some_and(|l| l.order == Order::ParallelTwo);
    let new = two || (a.shared != 1 && a.shared != a.heads);
    Ok(json!({
        "new_decoder_architecture": new,
        "multi_query": !new && a.shared == 1,
        "parallel_attn": true,
        "num_kv_heads": if new { a.shared } else { a.heads },
        "num_ln_in_parallel_attn": new.then_some(if two { 2 } else { 1 }),
        "ffn_hidden_size": s.layers.first().map(|l| l.inner),
        "activation": "gelu",
        "alibi": false,
        "bias": m.has("blk.0.attn_output.bias")?,
        "layer_norm_epsilon": short(s.final_norm.eps),
    }))
}

/// The keys of the rotation.
fn rotation(m: &Model<'_>) -> Result<Json> {
    let (source, spec) = (m.source, m.spec);
    let ropes = |slides: bool| {
        let all = spec.layers.iter().filter_map(attention).filter(move |a| a.window.is_some() == slides);
        all.filter_map(|a| a.rope.as_ref().map(|r| (r, a))).next()
    };
    let Some((r, a)) = ropes(false).or(ropes(true)) else { return Ok(json!({})) };
    let mut c = json!({ "rope_theta": short(r.base) });
    let head = if a.latent.is_some() { r.size } else { a.key };
    if r.size != head {
        c["partial_rotary_factor"] = json!(r.size as f64 / head as f64);
    }
    if let Some((local, _)) = ropes(true).filter(|_| spec.family == "gemma3") {
        c["rope_local_base_freq"] = json!(short(local.base));
    }
    let scaling = match &r.scaling {
        Scaling::None => match source.find(spec, "rope_freqs.weight")? {
            None => return Ok(c),
            Some(w) => llama3(r, &in_f32(&w)?)?,
        },
        Scaling::Linear { factor } => json!({ "rope_type": "linear", "factor": short(*factor) }),
        Scaling::Yarn(y) => {
            let mut all = json!({
                "rope_type": "yarn",
                "factor": short(y.factor),
                "original_max_position_embeddings": y.original,
                "beta_fast": short(y.beta_fast),
                "beta_slow": short(y.beta_slow),
                "attention_factor": y.attention,
                "truncate": y.truncate,
            });
            if let Some(scale) = mscale(m, y.factor) {
                all["mscale"] = json!(scale);
                all["mscale_all_dim"] = json!(scale);
            }
            all
        }
        Scaling::Long { original, factor, attention, .. } => {
            c["original_max_position_embeddings"] = json!(original);
            let list = |name: &str| -> Result<Vec<f64>> {
                let missing = || Error::argument("convert", format!("the model has no '{name}'"));
                let w = source.find(spec, name)?.ok_or_else(missing)?;
                Ok(in_f32(&w)?.into_iter().map(|v| short(f64::from(v))).collect())
            };
            json!({
                "rope_type": "longrope",
                "type": "longrope",
                "short_factor": list("rope_factors_short.weight")?,
                "long_factor": list("rope_factors_long.weight")?,
                "factor": short(*factor),
                "attention_factor": attention.map(short),
                "original_max_position_embeddings": original,
            })
        }
        Scaling::Llama3 { .. } | Scaling::Dynamic { .. } | Scaling::Proportional { .. } => {
            return Err(Error::unsupported("the scaling of the rotation in a folder", "Use the GGUF file"));
        }
    };
    c["rope_scaling"] = scaling;
    Ok(c)
}

/// DeepSeek's `mscale_all_dim`, which is in the scale of the scores.
fn mscale(m: &Model<'_>, factor: f64) -> Option<f64> {
    let l = m.attention.latent?;
    let plain = 1.0 / ((l.plain + m.attention.key - l.rank) as f64).sqrt();
    let scale = ((m.attention.scale / plain).sqrt() - 1.0) / (0.1 * factor.ln());
    Some(short(scale)).filter(|s| s.abs() > 1e-6)
}

/// The parameters with which Llama's scaling gives these factors.
fn llama3(r: &Rope, factors: &[f32]) -> Result<Json> {
    let plain = r.frequencies(0).0;
    let most = factors.iter().copied().fold(1.0, f32::max);
    for original in [8192, 4096, 2048, 512, 64, 32, 16] {
        let (factor, low, high) = (f64::from(most), 1.0, 4.0);
        let try_with = Rope { scaling: Scaling::Llama3 { factor, low, high, original }, ..r.clone() };
        let got = try_with.frequencies(0).0;
        let close = |((p, g), f): ((&f64, &f64), &f32)| (p / g / f64::from(*f) - 1.0).abs() < 1e-5;
        if got.len() == factors.len() && plain.iter().zip(&got).zip(factors).all(close) {
            return Ok(json!({
                "rope_type": "llama3", "factor": short(factor), "low_freq_factor": low,
                "high_freq_factor": high, "original_max_position_embeddings": original,
            }));
        }
    }
    Err(Error::unsupported("these factors of the rotation (rope_freqs) in a folder", "Use the GGUF file"))
}
