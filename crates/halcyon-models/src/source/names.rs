//! How folders name and store the tensors: for each canonical name the places where families have it.

use super::folder::Recipe;
use crate::spec::{Activation, Layer, Mixer, Order, Recurrent, Scan, ScanKind, Spec};

/// The ways in which folders store a tensor, by its canonical name. Names lack the prefix.
pub(super) fn recipes(spec: &Spec, name: &str) -> Vec<Recipe> {
    if let Some(found) = super::encoders::recipes(spec, name) {
        return found;
    }
    // Some vectors have a name without `weight`.
    let (stem, part) = match name.ends_with(".ssm_a") || name.ends_with(".ssm_d") {
        true => (name, ""),
        false => name.rsplit_once('.').unwrap_or((name, "weight")),
    };
    let with = |names: &[&str]| names.iter().map(|n| Recipe::Plain(format!("{n}.{part}"))).collect();
    match stem {
        "token_embd" => return with(&["embed_tokens", "wte", "word_embeddings", "tok_embeddings"]),
        "position_embd" => return with(&["wpe"]),
        "per_layer_token_embd" => return with(&["embed_tokens_per_layer"]),
        "per_layer_model_proj" => return with(&["per_layer_model_projection"]),
        "per_layer_proj_norm" => return with(&["per_layer_projection_norm"]),
        "output_norm" => return with(&["norm", "ln_f", "embedding_norm", "final_layernorm"]),
        "output" => return with(&["lm_head", "embed_out"]),
        _ => {}
    }
    let Some((i, stem)) = stem.strip_prefix("blk.").and_then(|s| s.split_once('.')) else { return vec![] };
    let Some((i, layer)) = i.parse().ok().and_then(|i: usize| Some((i, spec.layer(i)?))) else {
        return vec![];
    };
    let names = Names { spec, layer, i, part };
    if let Some(own) = stem.strip_prefix("nextn.") {
        return names.ahead(own);
    }
    names.mixer(stem).or_else(|| names.ffn(stem)).unwrap_or_else(|| names.norm(stem))
}

/// The names in one layer.
struct Names<'a> {
    spec: &'a Spec,
    layer: &'a Layer,
    i: usize,
    /// `weight` or `bias`.
    part: &'a str,
}

impl Names<'_> {
    /// The full names of `name` in the layer.
    fn exact(&self, name: &str) -> [String; 2] {
        let i = self.i;
        if let Some(k) = self.own_number() {
            return [format!("mtp.layers.{k}.{name}"), format!("mtp.layers.{k}.{name}")];
        }
        [format!("layers.{i}.{name}"), format!("h.{i}.{name}")]
    }

    /// The number of the layer among those for further tokens, if folders of the family count these apart.
    fn own_number(&self) -> Option<usize> {
        let apart = matches!(self.spec.family, "qwen3next" | "qwen35" | "qwen35moe");
        self.i.checked_sub(self.spec.layers.len()).filter(|_| apart)
    }

    /// What a layer for further tokens has before and after the ordinary parts of a layer.
    fn ahead(&self, stem: &str) -> Vec<Recipe> {
        let part = self.part;
        let whole = |name: &str| vec![Recipe::Plain(format!("mtp.{name}.{part}"))];
        match (stem, self.own_number()) {
            // These exist once, for all layers.
            ("eh_proj", Some(0)) => whole("fc"),
            ("enorm", Some(0)) => whole("pre_fc_norm_embedding"),
            ("hnorm", Some(0)) => whole("pre_fc_norm_hidden"),
            ("shared_head_norm", Some(0)) => whole("norm"),
            ("embed_tokens", Some(0)) => whole("embed_tokens"),
            (_, Some(_)) => vec![],
            ("shared_head_norm", None) => self.plain(&["shared_head.norm"]),
            ("shared_head_head", None) => self.plain(&["shared_head.head"]),
            ("eh_proj" | "enorm" | "hnorm" | "embed_tokens", None) => self.plain(&[stem]),
            _ => vec![],
        }
    }

    /// The full names of weight or bias of `name`.
    fn of(&self, name: &str) -> [String; 2] {
        self.exact(&format!("{name}.{}", self.part))
    }

    fn plain(&self, names: &[&str]) -> Vec<Recipe> {
        names.iter().flat_map(|n| self.of(n)).map(Recipe::Plain).collect()
    }

    /// Outputs `first..first + count` of a layer that GPT-2 stores as `[inputs, outputs]`.
    fn turned(&self, name: &str, first: usize, count: usize) -> Vec<Recipe> {
        let turned = self.part == "weight" && self.spec.family == "gpt2";
        let recipe = |n| match turned {
            true => Recipe::TransposedRows(n, first, count),
            false => Recipe::Rows(n, first, count),
        };
        self.of(name).map(recipe).to_vec()
    }

    fn norm(&self, stem: &str) -> Vec<Recipe> {
        match stem {
            "attn_norm" => self.plain(&["input_layernorm", "ln_1", "ln_mlp", "operator_norm"]),
            "attn_norm_2" => self.plain(&["ln_attn"]),
            "post_attention_norm" => self.plain(&["post_attention_layernorm", "post_self_attn_layernorm"]),
            // With norms before and after, `post_attention_layernorm` is the norm after the mixer.
            "ffn_norm" if self.layer.order == Order::Both => self.plain(&["pre_feedforward_layernorm"]),
            "ffn_norm" => self.plain(&["post_attention_layernorm", "ln_2", "ffn_norm"]),
            "post_ffw_norm_1" => self.plain(&["post_feedforward_layernorm_1"]),
            "pre_ffw_norm_2" => self.plain(&["pre_feedforward_layernorm_2"]),
            "post_ffw_norm_2" => self.plain(&["post_feedforward_layernorm_2"]),
            "inp_gate" => self.plain(&["per_layer_input_gate"]),
            "proj" => self.plain(&["per_layer_projection"]),
            "post_norm" => self.plain(&["post_per_layer_input_norm"]),
            "layer_output_scale" => self.exact("layer_scalar").map(Recipe::Plain).to_vec(),
            "post_ffw_norm" => self.plain(&["post_feedforward_layernorm", "post_mlp_layernorm"]),
            _ => vec![],
        }
    }

    fn mixer(&self, stem: &str) -> Option<Vec<Recipe>> {
        let a = match &self.layer.mixer {
            Mixer::Attention(a) => a,
            Mixer::Recurrent(r) => return self.recurrent(r, stem),
        };
        // A gate of the results is stored with the queries.
        let q = a.heads * a.key * if a.gate { 2 } else { 1 };
        let (k, v) = (a.shared * a.key, a.shared * a.value);
        let (first, count, own) = match stem {
            "attn_q" => (0, q, "q_proj"),
            "attn_k" => (q, k, "k_proj"),
            "attn_v" => (q + k, v, "v_proj"),
            "attn_output" => {
                let mut out = self.plain(&[
                    "self_attn.o_proj",
                    "self_attn.out_proj",
                    "self_attn.dense",
                    "self_attention.dense",
                ]);
                out.extend(self.turned("attn.c_proj", 0, self.spec.hidden));
                return Some(out);
            }
            "attn_q_a" => return Some(self.plain(&["self_attn.q_a_proj"])),
            "attn_q_a_norm" => return Some(self.plain(&["self_attn.q_a_layernorm"])),
            "attn_q_b" => return Some(self.plain(&["self_attn.q_b_proj"])),
            "attn_kv_a_mqa" => return Some(self.plain(&["self_attn.kv_a_proj_with_mqa"])),
            "attn_kv_a_norm" => return Some(self.plain(&["self_attn.kv_a_layernorm"])),
            "attn_kv_b" => return Some(self.plain(&["self_attn.kv_b_proj"])),
            "attn_q_norm" => return Some(self.plain(&["self_attn.q_norm", "self_attn.q_layernorm"])),
            "attn_k_norm" => return Some(self.plain(&["self_attn.k_norm", "self_attn.k_layernorm"])),
            "attn_sinks" => return Some(self.exact("self_attn.sinks").map(Recipe::Plain).to_vec()),
            _ => return None,
        };
        let mut out = self.plain(&[&format!("self_attn.{own}")]);
        out.extend(self.of("self_attn.qkv_proj").map(|n| Recipe::Rows(n, first, count)));
        out.extend(self.turned("attn.c_attn", first, count));
        // Falcon: for each key head its query heads, the key and the value.
        let group = a.heads / a.shared.max(1) * a.key;
        let (before, take, after) = match stem {
            "attn_q" => (0, group, a.key + a.value),
            "attn_k" => (group, a.key, a.value),
            _ => (group + a.key, a.value, 0),
        };
        let grouped = |name| Recipe::Grouped { name, before, take, after };
        out.extend(self.of("self_attention.query_key_value").map(grouped));
        Some(out)
    }

    /// A recurrent layer: `linear_attn` (DeltaNet), `mamba` or `conv`.
    fn recurrent(&self, r: &Recurrent, stem: &str) -> Option<Vec<Recipe>> {
        let vector = |name: &str| self.exact(name).map(Recipe::Plain).to_vec();
        let mamba = |name: &str| self.plain(&[&format!("mamba.{name}")]);
        let Some(s) = &r.scan else {
            return Some(match stem {
                "shortconv.conv" => self.plain(&["conv.conv"]),
                "shortconv.in_proj" => self.plain(&["conv.in_proj"]),
                "shortconv.out_proj" => self.plain(&["conv.out_proj"]),
                _ => return None,
            });
        };
        let rate = |name: &str| self.exact(name).map(Recipe::MinusExp).to_vec();
        Some(match (stem, s.kind) {
            ("ssm_in", _) => mamba("in_proj"),
            ("ssm_d", _) => vector("mamba.D"),
            ("ssm_conv1d", ScanKind::Mamba { .. }) => mamba("conv1d"),
            ("ssm_dt", ScanKind::Mamba { .. }) => vector("mamba.dt_bias"),
            ("ssm_a", ScanKind::Mamba { .. }) => rate("mamba.A_log"),
            ("ssm_norm", ScanKind::Mamba { .. }) => mamba("norm"),
            ("ssm_out", ScanKind::Mamba { .. }) => mamba("out_proj"),
            ("ssm_conv1d", ScanKind::Delta) => self.plain(&["linear_attn.conv1d"]),
            ("ssm_dt", ScanKind::Delta) => vector("linear_attn.dt_bias"),
            ("ssm_a", ScanKind::Delta) => rate("linear_attn.A_log"),
            ("ssm_norm", ScanKind::Delta) => self.plain(&["linear_attn.norm"]),
            ("ssm_out", ScanKind::Delta) => self.plain(&["linear_attn.out_proj"]),
            ("attn_qkv" | "attn_gate" | "ssm_beta" | "ssm_alpha", ScanKind::Delta) => self.delta(s, stem),
            _ => return None,
        })
    }

    /// The projections of DeltaNet: each a matrix (Qwen 3.5), or joined for each key head (Qwen3-Next).
    fn delta(&self, s: &Scan, stem: &str) -> Vec<Recipe> {
        let each = s.heads / s.shared;
        let (key, value) = (s.key, each * s.value);
        let own = match stem {
            "attn_qkv" => "linear_attn.in_proj_qkv",
            "attn_gate" => "linear_attn.in_proj_z",
            "ssm_beta" => "linear_attn.in_proj_b",
            _ => "linear_attn.in_proj_a",
        };
        let (joined, sizes) = match stem {
            "attn_qkv" | "attn_gate" => ("linear_attn.in_proj_qkvz", vec![key, key, value, value]),
            _ => ("linear_attn.in_proj_ba", vec![each, each]),
        };
        let parts = match stem {
            "attn_qkv" => 0..3,
            "attn_gate" => 3..4,
            "ssm_beta" => 0..1,
            _ => 1..2,
        };
        let of = |name: String| {
            let part = |i: usize| Recipe::Grouped {
                name: name.clone(),
                before: sizes[..i].iter().sum(),
                take: sizes[i],
                after: sizes[i + 1..].iter().sum(),
            };
            Recipe::Joined(parts.clone().map(part).collect())
        };
        let mut all = self.plain(&[own]);
        all.extend(self.of(joined).map(of));
        all
    }

    /// The feed-forward part and its experts.
    fn ffn(&self, stem: &str) -> Option<Vec<Recipe>> {
        let n = self.layer.inner;
        let join = |a: Vec<Recipe>, b: Vec<Recipe>| -> Vec<Recipe> { a.into_iter().chain(b).collect() };
        let halves = |name: &str, which: usize, n: usize| {
            self.of(name).map(|name| Recipe::Rows(name, which * n, n)).to_vec()
        };
        let half = |which: usize| {
            join(halves("mlp.gate_up_proj", which, n), halves("shared_mlp.input_linear", which, n))
        };
        let shared = |name: &str| {
            self.plain(&[&format!("mlp.shared_experts.{name}"), &format!("mlp.shared_expert.{name}")])
        };
        Some(match stem {
            "ffn_gate_inp" if self.part == "scale" => self.plain(&["router"]),
            "ffn_down_exps" if self.part == "scale" => {
                self.exact("router.per_expert_scale").map(Recipe::Plain).to_vec()
            }
            "ffn_gate" => join(self.plain(&["mlp.gate_proj", "feed_forward.w1"]), half(0)),
            "ffn_up" => {
                let up = ["mlp.up_proj", "feed_forward.w3", "mlp.dense_h_to_4h", "mlp.fc1"];
                join(join(self.plain(&up), half(1)), self.turned("mlp.c_fc", 0, n))
            }
            "ffn_down" => {
                let down = [
                    "mlp.down_proj",
                    "feed_forward.w2",
                    "mlp.dense_4h_to_h",
                    "mlp.fc2",
                    "shared_mlp.output_linear",
                ];
                join(self.plain(&down), self.turned("mlp.c_proj", 0, self.spec.hidden))
            }
            "ffn_gate_inp" => self.plain(&[
                "mlp.gate",
                "mlp.router",
                "block_sparse_moe.gate",
                "block_sparse_moe.router.layer",
                "block_sparse_moe.router",
                "feed_forward.gate",
                "router.proj",
            ]),
            "ffn_gate_exps" => join(self.stacked("gate_proj", "w1"), self.fused(0)),
            "ffn_up_exps" => join(self.stacked("up_proj", "w3"), self.fused(1)),
            "ffn_down_exps" => join(self.stacked("down_proj", "w2"), self.fused(2)),
            "exp_probs_b" => {
                let bias = ["mlp.gate.e_score_correction_bias", "feed_forward.expert_bias"];
                bias.iter().flat_map(|n| self.exact(n)).map(Recipe::Plain).collect()
            }
            "ffn_gate_shexp" => {
                join(shared("gate_proj"), halves("shared_mlp.input_linear", 0, self.common()))
            }
            "ffn_up_shexp" => join(shared("up_proj"), halves("shared_mlp.input_linear", 1, self.common())),
            "ffn_down_shexp" => join(shared("down_proj"), self.plain(&["shared_mlp.output_linear"])),
            "ffn_gate_inp_shexp" => self.plain(&["mlp.shared_expert_gate"]),
            _ => return None,
        })
    }

    /// The inner size of the experts of all rows.
    fn common(&self) -> usize {
        self.layer.experts().and_then(|(e, _)| e.common).unwrap_or(0)
    }

    /// Experts, each with a tensor of its own.
    fn stacked(&self, own: &str, other: &str) -> Vec<Recipe> {
        let Some((e, _)) = self.layer.experts() else { return vec![] };
        let places = ["mlp.experts", "block_sparse_moe.experts", "feed_forward.experts"];
        let names = places.iter().flat_map(|p| [own, other].map(|n| format!("{p}.{{}}.{n}")));
        names.flat_map(|n| self.of(&n)).map(|n| Recipe::Stack(n, e.count)).collect()
    }

    /// Experts whose matrices are stored together: gate and up (0 and 1), and down (2).
    fn fused(&self, which: usize) -> Vec<Recipe> {
        let Some((e, n)) = self.layer.experts() else { return vec![] };
        let bias = self.part == "bias";
        // gpt-oss stores `[inputs, outputs]`, with gate and up in alternating columns.
        let turned = matches!(e.activation, Activation::ClampedSwiglu { .. });
        let stems = match which {
            0 | 1 => {
                ["mlp.experts.gate_up_proj", "experts.gate_up_proj", "block_sparse_moe.input_linear.weight"]
            }
            _ => ["mlp.experts.down_proj", "experts.down_proj", "block_sparse_moe.output_linear.weight"],
        };
        let recipe = |name: String| match (which, turned, bias) {
            (2, true, false) => Recipe::Experts { name, first: 0, step: 1, count: self.spec.hidden },
            (2, ..) => Recipe::Plain(name),
            (w, true, true) => Recipe::ExpertVector { name, first: w, step: 2 },
            (w, true, false) => Recipe::Experts { name, first: w, step: 2, count: n },
            (w, false, _) => Recipe::ExpertRows { name, first: w * n, count: n },
        };
        let name = |stem: &str| if bias { format!("{stem}_bias") } else { stem.to_string() };
        stems.iter().flat_map(|s| self.exact(&name(s))).map(recipe).collect()
    }
}
