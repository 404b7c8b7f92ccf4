//! Writes a folder in Hugging Face's layout from a GGUF file: `config.json`, `model.safetensors`, and the
//! tokenizer's files.
//!
//! The configuration is read again as any folder's is, and then everything that the other direction would
//! change in the folder's weights is undone. If the folder would mean another computation than the file's,
//! the file is refused.

use super::changes::Changes;
use super::config_json;
use super::encoder;
use super::folder::in_f32;
use super::names::{self, names};
use super::outputs::Part;
use super::tokenizer_json;
use crate::encoder::EncoderSpec;
use crate::family;
use crate::source::{Place, Source, Weights, places};
use crate::spec::{Mixer, Spec};
use halcyon::DType;
use halcyon::ir::error::{Error, Result};
use halcyon_formats::gguf::{GgmlType, Gguf, Metadata};
use halcyon_formats::output;
use halcyon_formats::safetensors::SafeTensorsWriter;
use half::{bf16, f16};
use serde_json::{Value as Json, json};
use std::collections::{BTreeMap, HashMap};
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

/// A canonical tensor as the folder has it, which is made of parts of the file.
struct Canonical {
    dims: Vec<usize>,
    parts: Vec<Part>,
}

/// A tensor of the folder.
struct Target {
    name: String,
    dims: Vec<usize>,
    /// The number of the canonical tensor, and where its values are.
    places: Vec<(usize, Place)>,
}

/// What reads the values of canonical tensors.
struct Reader<'a> {
    source: &'a Source,
    spec: &'a Spec,
    all: Vec<Canonical>,
    /// The last tensor that was read, and its values: those of experts are needed once for each expert.
    last: Option<(usize, Vec<f32>)>,
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
    let form = match EncoderSpec::of(source)? {
        Some(spec) => encoder_form(source, file, spec, dtype, folder)?,
        None => decoder_form(source, file, dtype, folder)?,
    };
    let mut reader = Reader { source, spec: &form.spec, all: vec![], last: None };
    let targets = targets(&mut reader, &form)?;
    let work = Unfinished::new(folder)?;
    let warnings = write_texts(&work.path, file.metadata(), &form.config)?;
    let infos: Vec<_> = targets.iter().map(|t| (t.name.as_str(), dtype, &t.dims[..])).collect();
    let format = BTreeMap::from([("format".to_string(), "pt".to_string())]);
    let mut out = SafeTensorsWriter::create(&work.path.join("model.safetensors"), &infos, &format)?;
    for t in &targets {
        if interrupted() {
            return Err(Error::Interrupted { what: format!("writing {}", folder.display()) });
        }
        out.append(&encoded(&reader.values(t)?, dtype).map_err(|v| too_large(&t.name, v))?)?;
        progress(targets.len() as u64);
    }
    let (bytes, tensors) = (out.finish()?, targets.len());
    work.finish(folder)?;
    Ok(FolderWritten { bytes, tensors, warnings })
}

pub(super) fn too_large(name: &str, value: f32) -> Error {
    let what = format!("the value {value} is beyond f16, which has numbers up to 65504; choose bf16 or f32");
    Error::Format { file: format!("tensor '{name}'"), what }
}

/// What a folder is made of.
struct Form {
    config: Json,
    /// The model as the folder has it, and as the file has it.
    own: Spec,
    spec: Spec,
    /// The canonical names of the tensors that the model may have.
    names: Vec<String>,
    /// What the file changes in the folder's tensors; `None` for encoders, where it changes nothing.
    changes: Option<Changes>,
}

fn as_folder(e: Error) -> Error {
    match e {
        Error::Unsupported { what, .. } => {
            Error::unsupported(what.replace("as a GGUF file", "as a folder"), "Use the GGUF file")
        }
        e => e,
    }
}

fn decoder_form(source: &Source, file: &Gguf, dtype: DType, folder: &Path) -> Result<Form> {
    let spec = family::spec(source)?;
    let config = config_json::configuration(source, file, &spec, dtype)?;
    let mut own = family::from_config(&config, folder)?;
    own.ahead.truncate(spec.ahead.len());
    let arch = file.metadata().str("general.architecture")?;
    let changes = Changes::between(&own, &spec, arch).map_err(as_folder)?;
    Ok(Form { names: names(&own), config, own, spec, changes: Some(changes) })
}

fn encoder_form(
    source: &Source,
    file: &Gguf,
    spec: EncoderSpec,
    dtype: DType,
    folder: &Path,
) -> Result<Form> {
    let config = encoder::configuration(source, file, &spec, dtype)?;
    let own = EncoderSpec::from_config(&config, folder)?
        .ok_or_else(|| Error::internal("the configuration of an encoder names none"))?;
    let arch = file.metadata().str("general.architecture")?;
    encoder::compare(&own, &spec, arch).map_err(as_folder)?;
    let names = names::of_encoder(spec.body.layers.len());
    Ok(Form { config, own: own.body, spec: spec.body, names, changes: None })
}

/// The tensors of the folder, each with its parts.
fn targets(reader: &mut Reader<'_>, form: &Form) -> Result<Vec<Target>> {
    let own = &form.own;
    let mut targets: Vec<Target> = vec![];
    let mut known: HashMap<String, usize> = HashMap::new();
    for name in &form.names {
        let Some(dims) = reader.dims(own, name)? else { continue };
        let places = places(own, name, &dims);
        if places.is_empty() {
            return Err(Error::unsupported(
                format!("the tensor '{name}' in a folder of {}", own.family),
                "Use the GGUF file",
            ));
        }
        let number = reader.all.len();
        let parts = match &form.changes {
            Some(changes) => changes.parts(own, name, &dims, GgmlType::F32),
            None => vec![Part::whole(name, &dims, GgmlType::F32)],
        };
        reader.all.push(Canonical { dims, parts });
        for p in places {
            let at = *known.entry(p.name.clone()).or_insert_with(|| {
                targets.push(Target { name: p.name.clone(), dims: p.dims.clone(), places: vec![] });
                targets.len() - 1
            });
            let t = &mut targets[at];
            if t.dims.len() != p.dims.len() {
                return Err(Error::shape("convert", format!("parts of '{}' have different axes", t.name)));
            }
            t.dims.iter_mut().zip(&p.dims).for_each(|(all, n)| *all = (*all).max(*n));
            t.places.push((number, p));
        }
    }
    for t in &targets {
        let of = |(n, p): &(usize, Place)| {
            let all: usize = reader.all[*n].dims.iter().product();
            if p.expert.is_some() { t.dims.iter().product() } else { all }
        };
        let (parts, whole) = (t.places.iter().map(of).sum::<usize>(), t.dims.iter().product::<usize>());
        if parts != whole {
            let what = format!("'{}' has {whole} elements, but the file has {parts} of them", t.name);
            return Err(Error::shape("convert", what));
        }
    }
    Ok(targets)
}

impl Reader<'_> {
    fn find(&self, name: &str) -> Result<Option<Weights>> {
        let Some(w) = self.source.find(self.spec, name)? else { return Ok(None) };
        let layer = super::mixture::layer(name).and_then(|i| self.spec.layer(i));
        match layer.filter(|_| name.ends_with(".ffn_up.weight")) {
            Some(l) => crate::source::gguf::up_of_joined(w, l.inner).map(Some),
            None => Ok(Some(w)),
        }
    }

    /// The sizes of a canonical tensor in the folder; `None` if the model has none.
    fn dims(&self, own: &Spec, name: &str) -> Result<Option<Vec<usize>>> {
        let stem = name.splitn(3, '.').nth(2).unwrap_or("");
        let layer = super::mixture::layer(name).and_then(|i| own.layer(i));
        let attention = layer.and_then(super::keys::attention);
        match (stem, attention.and_then(|a| Some((a, a.latent?)))) {
            // Folders have both in one matrix.
            ("attn_k_b.weight" | "attn_v_b.weight", _) => return Ok(None),
            ("attn_kv_b.weight", Some((a, l))) if self.find(name)?.is_none() => {
                return Ok(Some(vec![a.heads * (l.plain + l.value), l.rank]));
            }
            _ => {}
        }
        let Some(w) = self.find(name)? else { return Ok(None) };
        let d = w.dims();
        let all: usize = d.iter().product();
        let mamba = layer.is_some_and(|l| matches!(&l.mixer, Mixer::Recurrent(_)));
        Ok(Some(match (stem, &d[..]) {
            ("ssm_conv1d.weight" | "shortconv.conv.weight", [channels, .., k]) => vec![*channels, 1, *k],
            ("ssm_a" | "ssm_d" | "ssm_norm.weight", _) if mamba => vec![all],
            ("ffn_gate_inp_shexp.weight", [n]) => vec![1, *n],
            _ => d,
        }))
    }

    /// The values of a tensor of the folder.
    fn values(&mut self, t: &Target) -> Result<Vec<f32>> {
        let mut out = vec![0f32; t.dims.iter().product()];
        for (number, place) in &t.places {
            if self.last.as_ref().is_none_or(|(n, _)| n != number) {
                self.last = Some((*number, self.canonical(&self.all[*number])?));
            }
            let Some((_, values)) = &self.last else { continue };
            let dims = &self.all[*number].dims;
            match place.expert {
                Some(e) => {
                    let n = out.len();
                    let own = values.get(e * n..(e + 1) * n).unwrap_or_default();
                    place.put(own, &dims[1..], &mut out, &t.dims);
                }
                None => place.put(values, dims, &mut out, &t.dims),
            }
        }
        Ok(out)
    }

    /// The values of a canonical tensor, without what the file changes in them.
    fn canonical(&self, c: &Canonical) -> Result<Vec<f32>> {
        let mut out = vec![0f32; c.dims.iter().product()];
        // A file may have the matrix that others have in two parts.
        let whole = c.parts.first().filter(|_| c.parts.len() > 1).map(|p| self.find(&p.name));
        if let Some(w) = whole.transpose()?.flatten() {
            return in_f32(&w);
        }
        for p in &c.parts {
            let missing = || Error::argument("convert", format!("the model has no tensor '{}'", p.target));
            let w = self.find(&p.target)?.ok_or_else(missing)?;
            p.undo(&in_f32(&w)?, &c.dims, &mut out);
        }
        Ok(out)
    }
}

pub(super) fn encoded(v: &[f32], dtype: DType) -> Result<Vec<u8>, f32> {
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
    let (files, warning) = tokenizer_json::of_metadata(m)?;
    for (name, json) in files.into_iter().chain(modules(m, config)?) {
        let path = folder.join(name);
        if let Some(parent) = path.parent() {
            let io =
                |e: std::io::Error| Error::Io { path: parent.display().to_string(), what: e.to_string() };
            std::fs::create_dir_all(parent).map_err(io)?;
        }
        output::write(&path, &text(&json)?)?;
    }
    Ok(warning.into_iter().collect())
}

/// The files of sentence-transformers, if the file says how embeddings are pooled.
fn modules(m: &Metadata, config: &Json) -> Result<Vec<(&'static str, Json)>> {
    let arch = m.str("general.architecture")?;
    let Some(kind) = m.maybe(&format!("{arch}.pooling_type"), Metadata::u64)? else { return Ok(vec![]) };
    // Other numbers stand for no pooling, and for scores.
    if !(1..=3).contains(&kind) {
        return Ok(vec![]);
    }
    let of = |number: usize, path: &str, name: &str| {
        let kind = format!("sentence_transformers.models.{name}");
        json!({ "idx": number, "name": number.to_string(), "path": path, "type": kind })
    };
    let pooling = json!({
        "word_embedding_dimension": config["hidden_size"],
        "pooling_mode_mean_tokens": kind == 1,
        "pooling_mode_cls_token": kind == 2,
        "pooling_mode_lasttoken": kind == 3,
        "include_prompt": true,
    });
    let list = json!([of(0, "", "Transformer"), of(1, "1_Pooling", "Pooling")]);
    Ok(vec![("modules.json", list), ("1_Pooling/config.json", pooling)])
}

/// A folder that is being written beside its final place. Dropping it removes it.
pub(super) struct Unfinished {
    pub(super) path: PathBuf,
}

impl Unfinished {
    pub(super) fn new(folder: &Path) -> Result<Unfinished> {
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

    pub(super) fn finish(self, folder: &Path) -> Result<()> {
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
