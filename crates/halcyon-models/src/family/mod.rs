//! The families of models: one file per family, which reads a family's configuration.
//!
//! A family has two readers: one for `config.json` of a Hugging Face folder, one for the metadata of a GGUF
//! file. Each makes a [`Spec`]. A new family is a file and a row of [`FAMILIES`].

mod config;
mod deepseek;
mod deltanet;
mod falcon;
#[cfg(test)]
mod fields;
mod gemma;
mod gemma4;
mod glm4;
mod gpt2;
mod gpt_oss;
mod granite_hybrid;
mod lfm2;
mod llama;
mod mixtral;
mod olmo2;
mod others;
mod phi3;
mod qwen;

pub(crate) use config::{Base, Hf, Meta};

use crate::rope::{Rope, Scaling};
use crate::source::Source;
use crate::spec::{Attention, Mixer, Recurrent, Spec};
use halcyon::ir::error::{Error, Result};
use std::path::Path;

/// A family of models.
#[derive(Debug)]
pub struct Family {
    /// The family's name.
    pub name: &'static str,
    /// Its names in `model_type` of `config.json`, and how the file is read.
    hf: &'static [&'static str],
    from_hf: fn(&Hf<'_>) -> Result<Spec>,
    /// Its names in `general.architecture` of GGUF files, and how the metadata is read.
    gguf: &'static [&'static str],
    from_gguf: fn(&Meta<'_>) -> Result<Spec>,
}

/// Every family.
pub const FAMILIES: &[Family] = &[
    llama::FAMILY,
    qwen::QWEN2,
    qwen::QWEN3,
    qwen::QWEN3_MOE,
    deltanet::QWEN3_NEXT,
    deltanet::QWEN3_5,
    deltanet::QWEN3_5_MOE,
    gemma::GEMMA2,
    gemma::GEMMA3,
    gemma4::FAMILY,
    gpt_oss::FAMILY,
    mixtral::FAMILY,
    phi3::FAMILY,
    glm4::FAMILY,
    deepseek::FAMILY,
    olmo2::FAMILY,
    others::GRANITE,
    granite_hybrid::FAMILY,
    lfm2::FAMILY,
    others::SMOLLM3,
    others::COHERE2,
    others::STARCODER2,
    gpt2::FAMILY,
    falcon::FAMILY,
];

/// What a model computes, by the configuration of its source.
///
/// # Errors
/// `Error::Unsupported` for a family that is not known, with the list of those that are; `Error::Format` or
/// `Error::Argument` for a configuration that lacks something or has values that are not supported.
pub fn spec(source: &Source) -> Result<Spec> {
    match source {
        Source::Gguf(file) => {
            let name = file.metadata().str("general.architecture")?;
            from_metadata(&Meta::new(file, name)?)
        }
        Source::Folder(folder) => {
            let mut spec = from_config(&folder.config, folder.path())?;
            // A configuration may name layers for further tokens that were not saved.
            let own = format!("layers.{}.eh_proj.", spec.layers.len());
            if !folder.names().any(|n| n.contains(&own) || n.contains("mtp.fc.")) {
                spec.ahead.clear();
            }
            Ok(spec)
        }
    }
}

/// What a folder's model computes, by its `config.json`.
pub(crate) fn from_config(config: &serde_json::Value, folder: &Path) -> Result<Spec> {
    // Models with images keep the configuration of the language model apart.
    let text = config.get("text_config").filter(|t| t.get("model_type").is_some()).unwrap_or(config);
    let hf = Hf::new(text, folder);
    let name = hf.str("model_type")?;
    let found = FAMILIES.iter().find(|f| f.hf.contains(&name));
    let family = found.ok_or_else(|| unknown(name, "model_type"))?;
    check_kinds(family, &hf)?;
    let spec = (family.from_hf)(&hf)?;
    check(&spec)?;
    Ok(spec)
}

/// Values of `config.json` that a family would ignore.
fn check_kinds(family: &Family, c: &Hf<'_>) -> Result<()> {
    // Granite's files leave out the first word.
    let plain = |k: &str| format!("full_{k}") == "full_attention";
    let attends = |k: &str| plain(k) || ["full_attention", "sliding_attention"].contains(&k);
    let known = |k: &str| attends(k) || ["linear_attention", "mamba", "conv"].contains(&k);
    for key in ["layer_types", "layers_block_type"] {
        let Some(v) = c.get(key) else { continue };
        let list = v.as_array().ok_or_else(|| c.bad(format!("'{key}' must be a list")))?;
        if let Some(other) = list.iter().find(|k| !k.as_str().is_some_and(known)) {
            return Err(Error::unsupported(
                format!("a layer of the kind {other} ({key})"),
                "Known kinds: full_attention, sliding_attention, linear_attention, mamba, conv",
            ));
        }
        if let Some(n) = c.maybe_usize("num_hidden_layers")?.filter(|n| *n > list.len()) {
            return Err(c.bad(format!("'{key}' has {} kinds for {n} layers", list.len())));
        }
    }
    let apart = |p: &serde_json::Value| p.as_object().is_some_and(|p| p.keys().any(|k| attends(k)));
    if !matches!(family.name, "gemma3" | "gemma4") && c.get("rope_parameters").is_some_and(apart) {
        return Err(Error::unsupported(
            format!("rope_parameters by kind of layer in a {} model", family.name),
            "Use a model with the same rotation in all layers",
        ));
    }
    Ok(())
}

/// Recurrent parts know one activation.
fn only_silu(c: &Hf<'_>) -> Result<()> {
    match c.get("hidden_act").and_then(|v| v.as_str()) {
        None | Some("silu" | "swish") => Ok(()),
        Some(other) => Err(Error::unsupported(
            format!("recurrent layers with the activation '{other}' (hidden_act)"),
            "Use a model with silu",
        )),
    }
}

/// No size of a layer is larger.
const MAX: usize = 1 << 24;

fn bad(what: String) -> Result<()> {
    Err(Error::argument("configuration", what))
}

fn check_rope(s: &Spec, i: usize, r: &Rope) -> Result<()> {
    if let Scaling::Long { short, long, .. } = &r.scaling {
        // The factors of a GGUF file are tensors.
        let wrong = |v: &Vec<f64>| !v.is_empty() && v.len() != r.size / 2;
        if wrong(short) || wrong(long) {
            let what = format!("{} short and {} long factors for", short.len(), long.len());
            return bad(format!("layer {i}: {what} a rotation of {} elements", r.size));
        }
    }
    // Both lengths, because some frequencies depend on it.
    let finite = |context: usize| {
        let (f, attention) = r.frequencies(context);
        attention.is_finite() && f.iter().all(|f| f.is_finite())
    };
    if r.size > 4096 || !finite(1) || !finite(s.context) {
        return bad(format!("layer {i}: a rotation without finite angles: {:?}", r.scaling));
    }
    Ok(())
}

fn check_attention(s: &Spec, i: usize, a: &Attention) -> Result<()> {
    let sizes = [a.heads, a.shared, a.key, a.value];
    if sizes.iter().any(|n| *n == 0 || *n > MAX) || !a.heads.is_multiple_of(a.shared) {
        return bad(format!("layer {i}: {} heads, {} key heads, sizes {sizes:?}", a.heads, a.shared));
    }
    if let Some(r) = &a.rope
        && (r.size % 2 != 0 || r.size > a.key || !r.base.is_finite() || r.base <= 0.0)
    {
        return bad(format!("layer {i}: a rotation of {} of {} elements, base {}", r.size, a.key, r.base));
    }
    if let Some(r) = &a.rope {
        check_rope(s, i, r)?;
    }
    if let Some(l) = &a.latent {
        let sizes = [l.queries.unwrap_or(1), l.rank, l.plain, l.value];
        let turned = a.rope.as_ref().map_or(0, |r| r.size);
        if sizes.iter().any(|n| *n == 0 || *n > MAX) || turned == 0 || l.rank + turned != a.key {
            return bad(format!("layer {i}: latent attention with sizes {l:?}, {turned} elements rotated"));
        }
    }
    if let Some(other) = a.keys_of {
        let fits = s.layers.get(other).filter(|_| other < i).is_some_and(|l| match &l.mixer {
            Mixer::Attention(b) => {
                b.keys_of.is_none() && (b.shared, b.key, b.value) == (a.shared, a.key, a.value)
            }
            Mixer::Recurrent(_) => false,
        });
        if !fits || a.latent.is_some() {
            return bad(format!("layer {i}: the keys and values of layer {other} do not fit"));
        }
    }
    if a.gate && a.key != a.value {
        return bad(format!("layer {i}: a gate for heads of {} elements, not {}", a.value, a.key));
    }
    if a.window == Some(0) || !a.scale.is_finite() {
        return bad(format!("layer {i}: a window of 0 positions, or a scale of {}", a.scale));
    }
    Ok(())
}

fn check_recurrent(i: usize, r: &Recurrent) -> Result<()> {
    if r.kernel == 0 || r.kernel > 1024 {
        return bad(format!("layer {i}: a convolution over {} positions; expected 1 to 1024", r.kernel));
    }
    let Some(s) = r.scan else { return Ok(()) };
    let sizes = [s.shared, s.heads, s.key, s.value];
    let product = sizes.iter().try_fold(1usize, |a, n| a.checked_mul(*n));
    if sizes.contains(&0) || !s.heads.is_multiple_of(s.shared) || product.is_none_or(|p| p > 1 << 40) {
        return bad(format!("layer {i}: {} heads, {} key heads, sizes {sizes:?}", s.heads, s.shared));
    }
    if s.heads * s.value > MAX || s.shared * s.key > MAX || s.heads * s.value * s.key > MAX << 4 {
        return bad(format!("layer {i}: a state of {} heads of {} x {}", s.heads, s.key, s.value));
    }
    Ok(())
}

/// What a GGUF file's model computes.
pub(crate) fn from_metadata(meta: &Meta<'_>) -> Result<Spec> {
    let found = FAMILIES.iter().find(|f| f.gguf.contains(&meta.arch));
    let family = found.ok_or_else(|| unknown(meta.arch, "general.architecture"))?;
    let mut spec = (family.from_gguf)(meta)?;
    // A file may name layers that it does not have.
    if !meta.has(&format!("blk.{}.nextn.eh_proj.weight", spec.layers.len())) {
        spec.ahead.clear();
    }
    check(&spec)?;
    Ok(spec)
}

fn unknown(name: &str, key: &str) -> Error {
    if crate::encoder::is_encoder(name) {
        return Error::unsupported(
            format!("text and logits from '{name}' ({key}), which is an encoder"),
            "`halcyon embed` computes embeddings with it",
        );
    }
    let known: Vec<&str> = FAMILIES.iter().map(|f| f.name).collect();
    Error::unsupported(
        format!("models of the architecture '{name}' ({key})"),
        format!("Known architectures: {}", known.join(", ")),
    )
}

/// Limits that keep hostile configurations from using unbounded memory, and rules that the decoder relies on.
pub(crate) fn check(s: &Spec) -> Result<()> {
    let count = s.layers.len() + s.ahead.len();
    if s.layers.is_empty() && count > 0 {
        return bad(format!("{count} layers, all of which predict further tokens"));
    }
    if s.layers.is_empty() || count > 4096 {
        return bad(format!("{count} layers: expected 1 to 4096"));
    }
    for (name, n) in [("vocabulary", s.vocabulary), ("hidden size", s.hidden), ("context", s.context)] {
        if n == 0 || n > MAX << 4 {
            return bad(format!("a {name} of {n}"));
        }
    }
    if let Some(p) = s.per_layer.filter(|p| p.size == 0 || p.size > MAX) {
        return bad(format!("inputs of layers of size {}", p.size));
    }
    let mut kernel = None;
    if let Some(i) = s.ahead.iter().position(|l| !matches!(l.mixer, Mixer::Attention(_))) {
        return bad(format!("layer {}, which predicts further tokens, is recurrent", s.layers.len() + i));
    }
    for (i, l) in s.layers.iter().chain(&s.ahead).enumerate() {
        if l.inner == 0 || l.inner > MAX {
            return bad(format!("layer {i}: a feed-forward part of size {}", l.inner));
        }
        match &l.mixer {
            Mixer::Attention(a) => check_attention(s, i, a)?,
            Mixer::Recurrent(r) => {
                check_recurrent(i, r)?;
                // The rows of a step are arranged once for all layers.
                if *kernel.get_or_insert(r.kernel) != r.kernel {
                    return bad(format!(
                        "layer {i}: a convolution over {} positions, not {kernel:?}",
                        r.kernel
                    ));
                }
            }
        }
        if let Some((e, inner)) = l.experts()
            && (inner == 0
                || inner > MAX
                || e.count == 0
                || e.used == 0
                || e.used > e.count
                || e.count > 65_536)
        {
            return bad(format!("layer {i}: {} of {} experts", e.used, e.count));
        }
        if let Some((e, _)) = l.experts()
            && let Some(n) = e.common.filter(|n| *n == 0 || *n > MAX)
        {
            return bad(format!("layer {i}: an expert of all rows of size {n}"));
        }
        if let Some((e, _)) = l.experts()
            && let Some((groups, kept)) = e.groups
            && (groups == 0
                || e.count % groups != 0
                || kept == 0
                || kept > groups
                || e.used > e.count / groups * kept)
        {
            let what = format!("{} experts of {kept} of {groups} groups of {} experts", e.used, e.count);
            return bad(format!("layer {i}: {what}"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of 9 elements of a head, transformers rotates five pairs, by angles of the powers -2i/9 of the base.
    #[test]
    fn an_odd_part_of_a_head_is_rounded_up() {
        let config = serde_json::json!({
            "rope_theta": 10_000.0, "partial_rotary_factor": 0.75, "max_position_embeddings": 64
        });
        let r = Hf::new(&config, std::path::Path::new("none")).rope(12, None).expect("a rotation");
        let angles = r.frequencies(64).0;
        assert_eq!((r.size, angles.len()), (10, 5));
        for (i, a) in angles.iter().enumerate() {
            assert!((a - 10_000f64.powf(-2.0 * i as f64 / 9.0)).abs() < 1e-12, "{i}: {a}");
        }
    }

    #[test]
    fn the_table_of_the_documentation_has_every_name() {
        let page = include_str!("../../../../docs/language-models.md");
        let rows: Vec<Vec<&str>> = page
            .lines()
            .filter(|l| l.starts_with("| "))
            .map(|l| l.trim_matches('|').split(" | ").map(str::trim).collect())
            .filter(|r: &Vec<&str>| r.len() == 4)
            .collect();
        for f in FAMILIES {
            let row = rows.iter().find(|r| r[0] == f.name).unwrap_or_else(|| panic!("no row '{}'", f.name));
            for (names, cell) in [(f.hf, row[1]), (f.gguf, row[2])] {
                let missing = names.iter().find(|n| !cell.contains(&format!("`{n}`")));
                assert_eq!(missing, None, "{row:?}");
                assert_eq!(cell.matches('`').count(), 2 * names.len(), "{row:?}: it has further names");
            }
        }
    }
}
