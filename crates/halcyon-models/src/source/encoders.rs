//! How folders of encoders name the tensors.

use super::folder::Recipe;
use crate::spec::Spec;

/// The ways in which folders store a tensor of an encoder; `None` if the model is no encoder.
pub(super) fn recipes(spec: &Spec, name: &str) -> Option<Vec<Recipe>> {
    let (stem, part) = name.rsplit_once('.').unwrap_or((name, "weight"));
    let (layer, own) = match stem.strip_prefix("blk.").and_then(|s| s.split_once('.')) {
        Some((i, own)) => (i, own),
        None => ("", stem),
    };
    match spec.family {
        "bert" | "xlm-roberta" => Some(bert(layer, own, part)),
        "modernbert" => {
            let inner = layer.parse().ok().and_then(|i: usize| spec.layers.get(i)).map_or(0, |l| l.inner);
            Some(modernbert(spec.hidden, inner, layer, own, part))
        }
        _ => None,
    }
}

fn bert(layer: &str, stem: &str, part: &str) -> Vec<Recipe> {
    let own = match stem {
        "token_embd" => "embeddings.word_embeddings",
        "position_embd" => "embeddings.position_embeddings",
        "token_types" => "embeddings.token_type_embeddings",
        "token_embd_norm" => "embeddings.LayerNorm",
        "attn_q" => "attention.self.query",
        "attn_k" => "attention.self.key",
        "attn_v" => "attention.self.value",
        "attn_output" => "attention.output.dense",
        "attn_output_norm" => "attention.output.LayerNorm",
        "ffn_up" => "intermediate.dense",
        "ffn_down" => "output.dense",
        "layer_output_norm" => "output.LayerNorm",
        _ => return vec![],
    };
    let stem = if layer.is_empty() { own.into() } else { format!("encoder.layer.{layer}.{own}") };
    // The first models have TensorFlow's names for norms.
    let old = if part == "weight" { "gamma" } else { "beta" };
    let parts = if own.ends_with("LayerNorm") { vec![part, old] } else { vec![part] };
    parts.into_iter().map(|p| Recipe::Plain(format!("{stem}.{p}"))).collect()
}

fn modernbert(hidden: usize, inner: usize, layer: &str, stem: &str, part: &str) -> Vec<Recipe> {
    let plain = |own: &str| Recipe::Plain(format!("{own}.{part}"));
    let in_layer = |own: &str| format!("layers.{layer}.{own}.{part}");
    vec![match stem {
        "token_embd" => plain("embeddings.tok_embeddings"),
        "token_embd_norm" => plain("embeddings.norm"),
        "output_norm" => plain("final_norm"),
        "attn_norm" => Recipe::Plain(in_layer("attn_norm")),
        "attn_q" => Recipe::Rows(in_layer("attn.Wqkv"), 0, hidden),
        "attn_k" => Recipe::Rows(in_layer("attn.Wqkv"), hidden, hidden),
        "attn_v" => Recipe::Rows(in_layer("attn.Wqkv"), 2 * hidden, hidden),
        "attn_output" => Recipe::Plain(in_layer("attn.Wo")),
        "ffn_norm" => Recipe::Plain(in_layer("mlp_norm")),
        "ffn_gate" => Recipe::Rows(in_layer("mlp.Wi"), 0, inner),
        "ffn_up" => Recipe::Rows(in_layer("mlp.Wi"), inner, inner),
        "ffn_down" => Recipe::Plain(in_layer("mlp.Wo")),
        _ => return vec![],
    }]
}
