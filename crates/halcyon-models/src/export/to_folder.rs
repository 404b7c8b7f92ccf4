//! Writes a folder in Hugging Face's layout from a GGUF file: `config.json` and `model.safetensors`.
//!
//! The configuration is read again as any folder's is. If it means another computation than the file's, the
//! file is refused.

use super::folder::{Turn, difference, in_f32, names, turned};
use super::keys::attention;
use crate::family;
use crate::rope::{Layout, Rope, Scaling};
use crate::source::{Source, Weights, published};
use crate::spec::{Ffn, Mixer, NormKind, Spec};
use halcyon::DType;
use halcyon::ir::error::{Error, Result};
use halcyon_formats::gguf::{Gguf, Metadata};
use halcyon_formats::output;
use halcyon_formats::safetensors::SafeTensorsWriter;
use half::{bf16, f16};
use serde_json::{Value as Json, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// What was written.
#[derive(Debug)]
pub struct FolderWritten {
    /// The size of `model.safetensors` in bytes.
    pub bytes: u64,
    /// The number of tensors.
    pub tensors: usize,
    /// Parts of the model that the folder lacks.
    pub warnings: Vec<String>,
}

/// A tensor of the folder: its name, the canonical one, and the expert if it is one of several.
struct Part {
    name: String,
    of: String,
    expert: Option<usize>,
    dims: Vec<usize>,
}

/// Writes a folder with weights in `dtype`: f32, f16 or bf16. The folder must not exist, or be empty; it
/// appears when it is complete. `progress` is called after each tensor with their number.
///
/// # Errors
/// `Error::Unsupported` for a model whose folders have another form, or whose computation a configuration
/// cannot describe; `Error::Argument` for a folder that has content, and for another dtype;
/// `Error::Interrupted`; errors of reading and writing.
pub fn write_folder(
    source: &Source,
    folder: &Path,
    dtype: DType,
    interrupted: &dyn Fn() -> bool,
    progress: &mut dyn FnMut(u64),
) -> Result<FolderWritten> {
    let Source::Gguf(file) = source else {
        return Err(Error::argument("convert", "the model is a folder already"));
    };
    if !matches!(dtype, DType::F32 | DType::F16 | DType::BF16) {
        return Err(Error::argument("convert", format!("{dtype}: expected f32, f16 or bf16")));
    }
    let spec = family::spec(source)?;
    let config = configuration(source, file, &spec, dtype)?;
    let own = family::from_config(&config, folder)?;
    let turns = compare(&spec, &own, source)?;
    let mut parts = vec![];
    for name in names(&spec) {
        if let Some(w) = source.find(&spec, &name)? {
            add_parts(&mut parts, &own, name, &w)?;
        }
    }
    let work = Unfinished::new(folder)?;
    let warnings = write_texts(&work.path, file.metadata(), &config)?;
    let infos: Vec<_> = parts.iter().map(|p| (p.name.as_str(), dtype, &p.dims[..])).collect();
    let format = BTreeMap::from([("format".to_string(), "pt".to_string())]);
    let mut out = SafeTensorsWriter::create(&work.path.join("model.safetensors"), &infos, &format)?;
    let mut current: Option<(&str, Vec<f32>)> = None;
    for p in &parts {
        if interrupted() {
            return Err(Error::Interrupted { what: format!("writing {}", folder.display()) });
        }
        if current.as_ref().is_none_or(|(name, _)| *name != p.of) {
            let missing = || Error::internal(format!("'{}' has gone", p.of));
            let w = source.find(&spec, &p.of)?.ok_or_else(missing)?;
            current = Some((&p.of, values(&p.of, &w, &turns, &own)?));
        }
        let Some((_, all)) = &current else { continue };
        let n: usize = p.dims.iter().product();
        let first = p.expert.unwrap_or(0) * n;
        out.append(&encoded(&all[first..first + n], dtype).map_err(|v| too_large(&p.name, v))?)?;
        progress(parts.len() as u64);
    }
    let (bytes, tensors) = (out.finish()?, parts.len());
    work.finish(folder)?;
    Ok(FolderWritten { bytes, tensors, warnings })
}

fn too_large(name: &str, value: f32) -> Error {
    let what = format!("the value {value} is beyond f16, which has numbers up to 65504; choose bf16 or f32");
    Error::Format { file: format!("tensor '{name}'"), what }
}

fn add_parts(parts: &mut Vec<Part>, own: &Spec, of: String, w: &Weights) -> Result<()> {
    let Some((name, experts)) = published(own, &of) else {
        let next = "Use the GGUF file";
        return Err(Error::unsupported(format!("the tensor '{of}' in a folder of {}", own.family), next));
    };
    let dims = w.dims();
    match experts {
        None => parts.push(Part { name, of, expert: None, dims }),
        Some(n) => parts.extend((0..n).map(|e| Part {
            name: name.replace("{}", &e.to_string()),
            of: of.clone(),
            expert: Some(e),
            dims: dims[1..].to_vec(),
        })),
    }
    Ok(())
}

/// For each layer, how rows of queries and keys return to the folder's order.
fn compare(spec: &Spec, own: &Spec, source: &Source) -> Result<Vec<Option<Turn>>> {
    let mut want = own.clone();
    want.family = spec.family;
    let mut turns = vec![];
    for (l, g) in want.layers.iter_mut().zip(&spec.layers) {
        let mut turn = None;
        if let Mixer::Attention(a) = &mut l.mixer
            && let Some(b) = attention(g)
            && let (Some(x), Some(y)) = (&mut a.rope, &b.rope)
        {
            if (x.layout, y.layout) == (Layout::Half, Layout::Pairs) {
                turn = Some(Turn { key: a.key, size: x.size, back: true });
                x.layout = y.layout;
            }
            // Checked when the configuration was made.
            if matches!(x.scaling, Scaling::Llama3 { .. }) && has_factors(source, spec)? {
                x.scaling = Scaling::None;
            }
        }
        turns.push(turn);
    }
    match difference(&want, spec, true) {
        None => Ok(turns),
        Some((a, b)) => Err(Error::unsupported(
            format!("this model as a folder: it has `{b}`, but the configuration would mean `{a}`"),
            "Use the GGUF file",
        )),
    }
}

fn has_factors(source: &Source, spec: &Spec) -> Result<bool> {
    Ok(source.find(spec, "rope_freqs.weight")?.is_some())
}

/// The values of a tensor as the folder has them.
fn values(name: &str, w: &Weights, turns: &[Option<Turn>], own: &Spec) -> Result<Vec<f32>> {
    let mut v = in_f32(w)?;
    if name.ends_with("norm.weight") && own.final_norm.kind == NormKind::RmsPlusOne {
        v.iter_mut().for_each(|v| *v -= 1.0);
    }
    let layer = super::mixture::layer(name).and_then(|i| turns.get(i)?.as_ref());
    match layer.filter(|_| name.contains("attn_q") || name.contains("attn_k")) {
        Some(turn) => Ok(turned(&v, w.dims().first().copied().unwrap_or(0), turn)),
        None => Ok(v),
    }
}

fn encoded(v: &[f32], dtype: DType) -> Result<Vec<u8>, f32> {
    Ok(match dtype {
        DType::F16 => match v.iter().find(|v| v.is_finite() && v.abs() >= 65_520.0) {
            Some(v) => return Err(*v),
            None => v.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect(),
        },
        DType::BF16 => v.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect(),
        _ => v.iter().flat_map(|v| v.to_le_bytes()).collect(),
    })
}

/// Writes `config.json` and the texts beside it. Returns what is missing.
fn write_texts(folder: &Path, m: &Metadata, config: &Json) -> Result<Vec<String>> {
    let text = |v: &Json| serde_json::to_vec_pretty(v).map_err(|e| Error::internal(e.to_string()));
    output::write(&folder.join("config.json"), &text(config)?)?;
    if let Some(t) = m.maybe("tokenizer.chat_template", |m, k| m.str(k))? {
        output::write(&folder.join("chat_template.jinja"), t.as_bytes())?;
    }
    let has_tokenizer = m.get("tokenizer.ggml.tokens").is_some();
    let missing = "the folder has no tokenizer.json: it is not made from the GGUF file's tokenizer. Take it \
                   from the model's own folder";
    Ok(if has_tokenizer { vec![missing.into()] } else { vec![] })
}

/// A number as it would be written by hand: files hold the nearest f32.
fn short(v: f64) -> f64 {
    (v as f32).to_string().parse().unwrap_or(v)
}

/// `config.json`.
fn configuration(source: &Source, file: &Gguf, spec: &Spec, dtype: DType) -> Result<Json> {
    let experts = spec.layers.iter().find_map(|l| match &l.ffn {
        Ffn::Experts(e) => Some((e, l.inner)),
        _ => None,
    });
    let Some(a) = spec.layers.first().and_then(attention) else {
        return Err(Error::unsupported("layers without attention in a folder", "Use the GGUF file"));
    };
    let windows: Vec<Option<usize>> =
        spec.layers.iter().map(|l| attention(l).and_then(|a| a.window)).collect();
    let (model, class) = match (spec.family, experts.is_some()) {
        ("llama", true) => ("mixtral", "Mixtral"),
        ("llama", false) if windows.iter().any(Option::is_some) => ("mistral", "Mistral"),
        ("llama", false) => ("llama", "Llama"),
        ("qwen2", false) => ("qwen2", "Qwen2"),
        ("qwen3", false) => ("qwen3", "Qwen3"),
        ("qwen3moe", true) => ("qwen3_moe", "Qwen3Moe"),
        ("gemma2", false) => ("gemma2", "Gemma2"),
        ("gemma3", false) => ("gemma3_text", "Gemma3"),
        ("olmo2", false) => ("olmo2", "Olmo2"),
        ("granite", false) => ("granite", "Granite"),
        (other, _) => {
            return Err(Error::unsupported(
                format!("folders of the architecture {other}"),
                "Folders are written of llama, mistral, mixtral, qwen2, qwen3, qwen3moe, gemma2, gemma3, olmo2 and granite",
            ));
        }
    };
    let has = |name: &str| source.find(spec, name).map(|w| w.is_some());
    let m = file.metadata();
    let id = |key: &str| m.maybe(&format!("tokenizer.ggml.{key}_token_id"), Metadata::u64);
    let dense = spec.layers.iter().find(|l| !matches!(l.ffn, Ffn::Experts(_))).or(spec.layers.first());
    let mut c = json!({
        "architectures": [format!("{class}ForCausalLM")],
        "model_type": model,
        "torch_dtype": match dtype { DType::F16 => "float16", DType::BF16 => "bfloat16", _ => "float32" },
        "vocab_size": spec.vocabulary,
        "hidden_size": spec.hidden,
        "intermediate_size": dense.map_or(0, |l| l.inner),
        "num_hidden_layers": spec.layers.len(),
        "num_attention_heads": a.heads,
        "num_key_value_heads": a.shared,
        "head_dim": a.key,
        "max_position_embeddings": spec.context,
        "rms_norm_eps": short(spec.final_norm.eps),
        "tie_word_embeddings": !has("output.weight")?,
        "attention_bias": has("blk.0.attn_q.bias")?,
        "mlp_bias": has("blk.0.ffn_up.bias")?,
        "bos_token_id": id("bos")?,
        "eos_token_id": id("eos")?,
        "pad_token_id": id("padding")?,
    });
    let gemma = model.starts_with("gemma");
    let activation = if gemma { "hidden_activation" } else { "hidden_act" };
    c[activation] = json!(if gemma { "gelu_pytorch_tanh" } else { "silu" });
    if gemma {
        let n = 1.0 / (a.scale * a.scale);
        c["query_pre_attn_scalar"] = json!(if (n - n.round()).abs() < 1e-3 { n.round() } else { n });
        c["final_logit_softcapping"] = json!(spec.logit_cap.map(short));
        c["attn_logit_softcapping"] = json!(a.softcap.map(short));
    }
    if let Some(w) = windows.iter().find_map(|w| *w) {
        c["sliding_window"] = json!(w);
        let kind = |w: &Option<usize>| if w.is_some() { "sliding_attention" } else { "full_attention" };
        c["layer_types"] = windows.iter().map(kind).collect();
    }
    if let Some((e, inner)) = experts {
        c["num_experts_per_tok"] = json!(e.used);
        c[if model == "mixtral" { "num_local_experts" } else { "num_experts" }] = json!(e.count);
        if model != "mixtral" {
            c["moe_intermediate_size"] = json!(inner);
            c["norm_topk_prob"] = json!(e.normalise);
            c["decoder_sparse_step"] = json!(1);
            let dense = |i: &usize| !matches!(spec.layers[*i].ffn, Ffn::Experts(_));
            c["mlp_only_layers"] = (0..spec.layers.len()).filter(dense).collect();
        }
    }
    if model == "granite" {
        c["embedding_multiplier"] = json!(spec.embedding_scale.map_or(1.0, short));
        c["logits_scaling"] = json!(spec.logit_scale.map_or(1.0, |s| short(1.0 / s)));
        c["attention_multiplier"] = json!(short(a.scale));
        c["residual_multiplier"] =
            json!(spec.layers.first().and_then(|l| l.residual_scale).map_or(1.0, short));
    }
    rotation(&mut c, source, spec)?;
    Ok(c)
}

/// The keys of the rotation, in the form before transformers 5, which later versions read too.
fn rotation(c: &mut Json, source: &Source, spec: &Spec) -> Result<()> {
    let ropes = |slides: bool| {
        let all = spec.layers.iter().filter_map(attention).filter(move |a| a.window.is_some() == slides);
        all.filter_map(|a| a.rope.as_ref()).next()
    };
    let Some(r) = ropes(false).or(ropes(true)) else { return Ok(()) };
    c["rope_theta"] = json!(short(r.base));
    if let Some(local) = ropes(true).filter(|_| spec.family == "gemma3") {
        c["rope_local_base_freq"] = json!(short(local.base));
    }
    let scaling = match &r.scaling {
        Scaling::None => match source.find(spec, "rope_freqs.weight")? {
            None => return Ok(()),
            Some(w) => llama3(r, &in_f32(&w)?)?,
        },
        Scaling::Linear { factor } => json!({ "rope_type": "linear", "factor": short(*factor) }),
        Scaling::Yarn(y) => json!({
            "rope_type": "yarn",
            "factor": short(y.factor),
            "original_max_position_embeddings": y.original,
            "beta_fast": short(y.beta_fast),
            "beta_slow": short(y.beta_slow),
            "attention_factor": y.attention,
            "truncate": y.truncate,
        }),
        _ => return Err(Error::unsupported("the scaling of the rotation in a folder", "Use the GGUF file")),
    };
    c["rope_scaling"] = scaling;
    Ok(())
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

/// A folder that is being written beside its final place. Dropping it removes it.
struct Unfinished {
    path: PathBuf,
}

impl Unfinished {
    fn new(folder: &Path) -> Result<Unfinished> {
        let io = |e: std::io::Error| Error::Io { path: folder.display().to_string(), what: e.to_string() };
        if folder.exists() && std::fs::read_dir(folder).map_err(io)?.next().is_some() {
            let what = format!("the folder {} has content; name a new one", folder.display());
            return Err(Error::argument("OUT", what));
        }
        let name = folder.file_name().ok_or_else(|| {
            Error::argument("OUT", format!("{} does not name a new folder", folder.display()))
        })?;
        let name = format!(".{}-{}.tmp", name.to_string_lossy(), std::process::id());
        let path = folder.with_file_name(name);
        std::fs::create_dir(&path).map_err(io)?;
        Ok(Unfinished { path })
    }

    fn finish(self, folder: &Path) -> Result<()> {
        let io = |e: std::io::Error| Error::Io { path: folder.display().to_string(), what: e.to_string() };
        if folder.exists() {
            std::fs::remove_dir(folder).map_err(io)?;
        }
        std::fs::rename(&self.path, folder).map_err(io)
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        // Nothing is left after a rename.
        let _ = std::fs::remove_dir_all(&self.path);
    }
}
