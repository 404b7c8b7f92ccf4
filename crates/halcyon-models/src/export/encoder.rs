//! The content of an encoder's folder.

use super::changes::{difference, refused};
use super::config_json::short;
use super::content::{Content, Entry, header};
use super::folder::{finish, found, general};
use super::names;
use super::outputs::{Edit, Output, Part, Pick};
use crate::embed;
use crate::encoder::EncoderSpec;
use crate::family::Meta;
use crate::source::{Folder, Source};
use crate::spec::{Activation, Ffn};
use halcyon::DType;
use halcyon::ir::error::{Error, Result};
use halcyon_formats::gguf::{Array, Gguf, Metadata, Value};
use serde_json::{Value as Json, json};

/// The content of a folder as a GGUF file.
pub(super) fn content<'a>(source: &'a Source, folder: &'a Folder, spec: &EncoderSpec) -> Result<Content<'a>> {
    let arch = if spec.norm_after { "bert" } else { "modern-bert" };
    let body = &spec.body;
    let found = found(source, body, names::of_encoder(body.layers.len()))?;
    let mut metadata = general(folder, arch);
    let types = found.get("token_types.weight").and_then(|(dims, _)| dims.first()).copied().unwrap_or(1);
    metadata.extend(keys(spec, arch, types));
    let (pooling, missing) = embed::pooling_type(folder.path())?;
    metadata.extend(pooling.map(|n| (format!("{arch}.pooling_type"), Value::from(n))));
    let read = {
        let has = |n: &str| found.contains_key(n);
        let header = header(&metadata)?;
        EncoderSpec::from_metadata(&Meta::of(header.metadata(), arch, body.vocabulary, &has))?
    };
    compare(spec, &read, arch)?;
    let part = |(name, (dims, ty)): (&String, &(Vec<usize>, _))| {
        let mut part = Part::whole(name, dims, *ty);
        if let (Some(first), "position_embd.weight") = (spec.first_position.filter(|n| *n > 0), name.as_str())
        {
            // Files lack the rows before the first position.
            let rows = dims.first().copied().unwrap_or(0);
            part.dims[0] = rows.saturating_sub(first);
            part.edit = Edit { pick: Pick::Rows((first..rows).collect()), ..Edit::default() };
        }
        part
    };
    let outputs = Output::all(found.iter().map(part), &|name| place(spec, name));
    let tensors: Vec<Entry<'_>> = outputs.into_iter().map(|o| o.entry(source, body)).collect();
    let (vocabulary, warning) = super::vocabulary::of_folder(folder, body)?;
    metadata.extend(vocabulary);
    let mut content = finish(metadata, tensors);
    content.warnings.extend(warning);
    content.warnings.extend(missing);
    Ok(content)
}

/// Whether both compute the same, but for what files cannot say.
///
/// # Errors
/// `Error::Unsupported` with the first difference.
pub(super) fn compare(spec: &EncoderSpec, read: &EncoderSpec, arch: &str) -> Result<()> {
    let mut want = spec.clone();
    (want.body.family, want.body.context) = (read.body.family, read.body.context);
    want.first_position = read.first_position.and(want.first_position).map(|_| 0);
    // A body has rotations that encoders do not use.
    want.body.each_attention(|i, a| a.rope = attention_rope(read, i));
    // Where no layer is local, its reach has no meaning.
    if !want.layers.iter().any(|l| l.local) {
        want.reach = read.reach;
    }
    match difference(&want, read, false) {
        None => Ok(()),
        Some(found) => Err(refused(arch, "the model", &found)),
    }
}

fn attention_rope(s: &EncoderSpec, i: usize) -> Option<crate::rope::Rope> {
    super::keys::attention(s.body.layers.get(i)?)?.rope.clone()
}

fn keys(spec: &EncoderSpec, arch: &str, types: usize) -> Vec<(String, Value)> {
    let body = &spec.body;
    // Sizes are far below this limit (`family::check`).
    let size = |n: usize| Value::from(u32::try_from(n).unwrap_or(u32::MAX));
    let inner = body.layers.first().map_or(0, |l| l.inner);
    let mut all = vec![
        ("vocab_size", size(body.vocabulary)),
        ("context_length", size(body.context)),
        ("embedding_length", size(body.hidden)),
        ("block_count", size(body.layers.len())),
        ("feed_forward_length", size(inner)),
        ("attention.head_count", size(spec.heads)),
        ("attention.head_count_kv", size(spec.heads)),
        ("attention.layer_norm_epsilon", (spec.norm.eps as f32).into()),
        ("attention.causal", false.into()),
    ];
    match body.layers.first().map(|l| &l.ffn) {
        // llama.cpp computes this one in all files of BERT, and calls the exact one so.
        Some(Ffn::Plain(Activation::GeluTanh)) => all.push(("hidden_activation", "gelu_pytorch_tanh".into())),
        _ => all.push(("hidden_activation", "gelu".into())),
    }
    match spec.norm_after {
        true => {}
        false => {
            let local: Vec<bool> = spec.layers.iter().map(|l| l.local).collect();
            let base = |local: bool| {
                let layer = spec.layers.iter().find(|l| l.local == local);
                layer.and_then(|l| l.rope.as_ref()).map(|r| (r.base as f32).into())
            };
            all.extend(base(false).or(base(true)).map(|v| ("rope.freq_base", v)));
            all.extend(base(true).map(|v| ("rope.freq_base_swa", v)));
            if local.contains(&true) {
                all.push(("attention.sliding_window", size(2 * spec.reach)));
            }
            all.push(("attention.sliding_window_pattern", Value::Array(Array::Bool(local))));
        }
    }
    let mut all: Vec<(String, Value)> = all.into_iter().map(|(k, v)| (format!("{arch}.{k}"), v)).collect();
    if spec.norm_after {
        all.push(("tokenizer.ggml.token_type_count".into(), size(types)));
    }
    all
}

/// `config.json` of the encoder of a GGUF file.
pub(super) fn configuration(source: &Source, file: &Gguf, spec: &EncoderSpec, dtype: DType) -> Result<Json> {
    let body = &spec.body;
    let m = file.metadata();
    let id = |key: &str| m.maybe(&format!("tokenizer.ggml.{key}_token_id"), Metadata::u64);
    let has = |name: &str| Ok::<_, Error>(source.find(body, name)?.is_some());
    let activation = match body.layers.first().map(|l| &l.ffn) {
        Some(Ffn::Plain(Activation::GeluTanh) | Ffn::Gated(Activation::GeluTanh)) => "gelu_pytorch_tanh",
        _ => "gelu",
    };
    let mut c = json!({
        "torch_dtype": match dtype { DType::F16 => "float16", DType::BF16 => "bfloat16", _ => "float32" },
        "vocab_size": body.vocabulary,
        "hidden_size": body.hidden,
        "num_hidden_layers": body.layers.len(),
        "num_attention_heads": spec.heads,
        "intermediate_size": body.layers.first().map_or(0, |l| l.inner),
        "max_position_embeddings": body.context,
        "pad_token_id": id("padding")?.unwrap_or(0),
    });
    let eps = short(spec.norm.eps);
    let more = match spec.norm_after {
        true => json!({
            "architectures": ["BertModel"],
            "model_type": "bert",
            "hidden_act": activation,
            "layer_norm_eps": eps,
            "position_embedding_type": "absolute",
            "type_vocab_size": match source.find(body, "token_types.weight")? {
                Some(w) => w.dims().first().copied().unwrap_or(1),
                None => 1,
            },
        }),
        false => {
            let local: Vec<bool> = spec.layers.iter().map(|l| l.local).collect();
            let base = |local: bool| {
                let layer = spec.layers.iter().find(|l| l.local == local);
                layer.and_then(|l| l.rope.as_ref()).map(|r| short(r.base))
            };
            let kind = |l: &bool| if *l { "sliding_attention" } else { "full_attention" };
            // Transformers before version 5 reads this in place of the list.
            let every = local.iter().skip(1).position(|l| !l).map_or(local.len().max(1), |i| i + 1);
            json!({
                "architectures": ["ModernBertModel"],
                "model_type": "modernbert",
                "hidden_activation": activation,
                "norm_eps": eps,
                "norm_bias": has("token_embd_norm.bias")?,
                "attention_bias": has("blk.0.attn_output.bias")?,
                "mlp_bias": has("blk.0.ffn_down.bias")?,
                "layer_types": local.iter().map(kind).collect::<Vec<_>>(),
                "global_attn_every_n_layers": every,
                "global_rope_theta": base(false).or(base(true)),
                "local_rope_theta": base(true).or(base(false)),
                "local_attention": 2 * spec.reach,
                "bos_token_id": id("bos")?,
                "eos_token_id": id("eos")?,
                "cls_token_id": id("bos")?,
                "sep_token_id": id("seperator")?,
            })
        }
    };
    if let (Json::Object(c), Json::Object(more)) = (&mut c, more) {
        c.extend(more);
    }
    Ok(c)
}

/// The name of a tensor in files; see [`super::changes::Changes::place`].
fn place(spec: &EncoderSpec, name: &str) -> (String, usize, usize) {
    let parts = [("attn_q", "attn_qkv", 0), ("attn_k", "attn_qkv", 1), ("attn_v", "attn_qkv", 2)];
    let gated = [("ffn_gate", "ffn_up", 0), ("ffn_up", "ffn_up", 1)];
    let joined = parts.iter().chain(&gated).find(|(own, ..)| name.contains(&format!(".{own}.")));
    match joined.filter(|_| !spec.norm_after) {
        Some((own, to, number)) => (name.replace(&format!(".{own}."), &format!(".{to}.")), *number, 1),
        None => (name.into(), 0, 1),
    }
}
