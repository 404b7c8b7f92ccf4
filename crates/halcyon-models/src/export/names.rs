//! The canonical names of the tensors that a model may have.

use crate::spec::{Ffn, Layer, Mixer, Order, ScanKind, Spec};

/// The names of all tensors that a decoder may have. Those of biases that it lacks are among them.
pub(super) fn names(spec: &Spec) -> Vec<String> {
    let top = ["token_embd", "position_embd", "output_norm", "output"];
    let mut all: Vec<String> = top.map(String::from).to_vec();
    if spec.embedding_norm.is_some() {
        all.push("token_embd_norm".into());
    }
    if spec.per_layer.is_some() {
        let inputs = ["per_layer_token_embd", "per_layer_model_proj", "per_layer_proj_norm"];
        all.extend(inputs.map(String::from));
    }
    for (i, l) in spec.layers.iter().chain(&spec.ahead).enumerate() {
        let own: &[&str] = if spec.per_layer.is_some() { &["inp_gate", "proj", "post_norm"] } else { &[] };
        let parts = [norms(l), mixer(l), ffn(l), own, &["layer_output_scale"]];
        all.extend(parts.concat().iter().map(|n| format!("blk.{i}.{n}")));
        if i >= spec.layers.len() {
            all.extend(AHEAD.map(|n| format!("blk.{i}.nextn.{n}")));
        }
    }
    all.into_iter().flat_map(parts).collect()
}

/// What layers for further tokens have beside the parts of a layer.
const AHEAD: [&str; 6] =
    ["eh_proj", "enorm", "hnorm", "embed_tokens", "shared_head_head", "shared_head_norm"];

/// The names of all tensors that an encoder may have.
pub(super) fn of_encoder(layers: usize) -> Vec<String> {
    let top = ["token_embd", "position_embd", "token_types", "token_embd_norm", "output_norm"];
    let layer = [
        "attn_norm",
        "attn_q",
        "attn_k",
        "attn_v",
        "attn_output",
        "attn_output_norm",
        "ffn_norm",
        "ffn_gate",
        "ffn_up",
        "ffn_down",
        "layer_output_norm",
    ];
    let own = (0..layers).flat_map(|i| layer.map(|n| format!("blk.{i}.{n}")));
    top.map(String::from).into_iter().chain(own).flat_map(parts).collect()
}

/// The tensors of a module: its weight and its bias, if its name does not say what it has.
fn parts(n: String) -> Vec<String> {
    let own = n.rsplit('.').next().unwrap_or("");
    match own {
        "ssm_a" | "ssm_d" => vec![n],
        "ssm_dt" | "exp_probs_b" => vec![format!("{n}.bias")],
        "attn_sinks" | "layer_output_scale" => vec![format!("{n}.weight")],
        "router" => vec![n.replace("router", "ffn_gate_inp.scale")],
        "expert_scales" => vec![n.replace("expert_scales", "ffn_down_exps.scale")],
        _ => vec![format!("{n}.weight"), format!("{n}.bias")],
    }
}

fn norms(l: &Layer) -> &'static [&'static str] {
    match l.order {
        Order::Before => &["attn_norm", "ffn_norm"],
        Order::After => &["post_attention_norm", "post_ffw_norm"],
        Order::Both => &["attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"],
        Order::Parallel => &["attn_norm"],
        Order::ParallelTwo => &["attn_norm", "attn_norm_2"],
    }
}

fn mixer(l: &Layer) -> &'static [&'static str] {
    match &l.mixer {
        Mixer::Attention(a) if a.latent.is_some() => &[
            "attn_q",
            "attn_q_a",
            "attn_q_a_norm",
            "attn_q_b",
            "attn_kv_a_mqa",
            "attn_kv_a_norm",
            "attn_kv_b",
            "attn_k_b",
            "attn_v_b",
            "attn_output",
        ],
        Mixer::Attention(a) if a.keys_of.is_some() => &["attn_q", "attn_output", "attn_q_norm", "attn_sinks"],
        Mixer::Attention(a) if a.values_of_keys => {
            &["attn_q", "attn_k", "attn_output", "attn_q_norm", "attn_k_norm", "attn_sinks"]
        }
        Mixer::Attention(_) => {
            &["attn_q", "attn_k", "attn_v", "attn_output", "attn_q_norm", "attn_k_norm", "attn_sinks"]
        }
        Mixer::Recurrent(r) => match r.scan.map(|s| s.kind) {
            None => &["shortconv.conv", "shortconv.in_proj", "shortconv.out_proj"],
            Some(ScanKind::Delta) => &[
                "attn_qkv",
                "attn_gate",
                "ssm_beta",
                "ssm_alpha",
                "ssm_conv1d",
                "ssm_dt",
                "ssm_a",
                "ssm_norm",
                "ssm_out",
            ],
            Some(ScanKind::Mamba { .. }) => {
                &["ssm_in", "ssm_conv1d", "ssm_dt", "ssm_a", "ssm_d", "ssm_norm", "ssm_out"]
            }
        },
    }
}

fn ffn(l: &Layer) -> &'static [&'static str] {
    match &l.ffn {
        Ffn::Gated(_) => &["ffn_gate", "ffn_up", "ffn_down"],
        Ffn::Plain(_) => &["ffn_up", "ffn_down"],
        Ffn::Experts(_) => &[
            "ffn_gate_inp",
            "ffn_gate_exps",
            "ffn_up_exps",
            "ffn_down_exps",
            "exp_probs_b",
            "ffn_gate_shexp",
            "ffn_up_shexp",
            "ffn_down_shexp",
            "ffn_gate_inp_shexp",
        ],
        Ffn::Beside(..) => &[
            "ffn_gate",
            "ffn_up",
            "ffn_down",
            "post_ffw_norm_1",
            "pre_ffw_norm_2",
            "post_ffw_norm_2",
            "ffn_gate_inp",
            "router",
            "ffn_gate_exps",
            "ffn_up_exps",
            "ffn_down_exps",
            "expert_scales",
        ],
    }
}
