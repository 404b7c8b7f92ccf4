//! The content of a folder: its weights with GGUF's names, shapes and order of rows.
//!
//! Where GGUF's architecture computes in another way than the folder's model, the weights make up for it: the
//! factor `1 + weight` of norms is stored, rows of queries and keys are arranged for the other layout of the
//! rotation, and another scale of the scores becomes a factor of the queries. Then the metadata is read as
//! any file's is. If that means another computation than the folder's, the file is refused.

use super::changes::Changes;
use super::content::{Content, Entry, header};
use super::encoder;
use super::keys::{self, attention};
use super::names::names;
use super::outputs::{Output, Part};
use crate::embed;
use crate::encoder::EncoderSpec;
use crate::family::{self, Meta};
use crate::rope::{Rope, Scaling};
use crate::source::{Folder, Source, Weights};
use crate::spec::Spec;
use bytes::Bytes;
use halcyon::BlockType;
use halcyon::ir::error::Result;
use halcyon_formats::gguf::{Array, GgmlType, TensorInfo, Value};
use std::collections::BTreeMap;

/// The content of a folder as a GGUF file. Matrices keep their type; vectors become f32.
pub(super) fn content<'a>(source: &'a Source, folder: &'a Folder) -> Result<Content<'a>> {
    if let Some(spec) = EncoderSpec::of(source)? {
        return encoder::content(source, folder, &spec);
    }
    let spec = family::spec(source)?;
    // Mixtral's files have Llama's architecture.
    let arch = if spec.family == "mixtral" { "llama" } else { spec.family };
    let mut metadata = general(folder, arch);
    metadata.extend(keys::of_spec(&spec, arch));
    if let "qwen35" | "qwen35moe" = arch {
        metadata.push((format!("{arch}.rope.dimension_sections"), sections(folder, &spec)));
    }
    let found = found(source, &spec, names(&spec))?;
    let factors = factors(&spec);
    let read = {
        let has = |n: &str| found.contains_key(n) || factors.iter().any(|f| f.0 == n);
        family::from_metadata(&Meta::of(header(&metadata)?.metadata(), arch, spec.vocabulary, &has))?
    };
    let changes = Changes::between(&spec, &read, arch)?;
    let parts: Vec<Part> =
        found.iter().flat_map(|(name, (dims, ty))| changes.parts(&spec, name, dims, *ty)).collect();
    let outputs = Output::all(parts, &|name| changes.place(&spec, name));
    let mut tensors: Vec<Entry<'_>> = outputs.into_iter().map(|o| o.entry(source, &spec)).collect();
    for (name, values) in factors {
        let info = TensorInfo::new(name, &[values.len()], GgmlType::F32);
        let bytes: Vec<u8> = values.iter().flat_map(|v| (*v as f32).to_le_bytes()).collect();
        tensors.push(Entry::made(info, move || Ok(Bytes::from(bytes.clone()))));
    }
    let (vocabulary, warning) = super::vocabulary::of_folder(folder, &spec)?;
    metadata.extend(vocabulary);
    let (pooling, missing) = embed::pooling_type(folder.path())?;
    metadata.extend(pooling.map(|n| (format!("{arch}.pooling_type"), Value::from(n))));
    let mut content = finish(metadata, tensors);
    content.warnings.extend(warning);
    content.warnings.extend(missing);
    let window = spec.layers.iter().filter_map(|l| attention(l)?.window).find(|w| *w < spec.context);
    if let (Some(w), "llama" | "phi3") = (window, arch) {
        content.warnings.push(format!(
            "the model's layers see {w} positions; llama.cpp ignores that in files of the architecture {arch}"
        ));
    }
    Ok(content)
}

/// The first keys of a file.
pub(super) fn general(folder: &Folder, arch: &str) -> Vec<(String, Value)> {
    let name = folder.path().canonicalize().ok();
    let name = name.as_deref().unwrap_or(folder.path()).file_name().unwrap_or_default().to_string_lossy();
    vec![
        ("general.architecture".into(), arch.into()),
        ("general.type".into(), "model".into()),
        ("general.name".into(), name.as_ref().into()),
    ]
}

/// Sizes and types of the tensors that the folder has.
pub(super) fn found(
    source: &Source,
    spec: &Spec,
    names: Vec<String>,
) -> Result<BTreeMap<String, (Vec<usize>, GgmlType)>> {
    let mut found = BTreeMap::new();
    for name in names {
        // Experts may be copied together here, so only their type is kept.
        if let Some(w) = source.find(spec, &name)? {
            found.insert(name, (w.dims(), stored_type(&w)));
        }
    }
    Ok(found)
}

/// The content, with the key that names the type of most tensors.
pub(super) fn finish<'a>(metadata: Vec<(String, Value)>, tensors: Vec<Entry<'a>>) -> Content<'a> {
    let mut content = Content::new(metadata, tensors);
    let types: Vec<GgmlType> = content.tensors.iter().map(|t| t.info.ty).collect();
    let file = [(GgmlType::F16, 1u32), (GgmlType::BF16, 32)].into_iter().find(|(t, _)| types.contains(t));
    content.set("general.file_type", file.map_or(0, |(_, n)| n).into());
    content
}

/// How the pairs of a rotation are divided among the axes of images. Texts have the same position on each,
/// but llama.cpp insists on the key.
fn sections(folder: &Folder, spec: &Spec) -> Value {
    let rope = spec.layers.iter().find_map(|l| attention(l)?.rope.as_ref());
    let pairs = rope.map_or(0, |r| i32::try_from(r.size / 2).unwrap_or(i32::MAX));
    let text = folder.config.get("text_config").unwrap_or(&folder.config);
    let all = text["rope_parameters"]["mrope_section"].as_array();
    let given = all.map(|v| v.iter().filter_map(|n| n.as_i64().and_then(|n| i32::try_from(n).ok())));
    let mut sections: Vec<i32> = given.map_or_else(|| vec![11, 11, 10], Iterator::collect);
    if sections.iter().map(|n| i64::from(*n)).sum::<i64>() > i64::from(pairs) {
        // The default is for heads that are larger.
        sections = vec![pairs - pairs / 3 * 2, pairs / 3, pairs / 3];
    }
    sections.resize(4, 0);
    Value::Array(Array::I32(sections))
}

/// Tensors with factors of the rotation.
fn factors(spec: &Spec) -> Vec<(&'static str, Vec<f64>)> {
    let ropes = || spec.layers.iter().filter_map(|l| attention(l)?.rope.as_ref());
    let Some(r) = ropes().find(|r| r.scaling != Scaling::None) else { return vec![] };
    match &r.scaling {
        Scaling::Long { short, long, .. } => {
            vec![("rope_factors_short.weight", short.clone()), ("rope_factors_long.weight", long.clone())]
        }
        Scaling::Llama3 { .. } | Scaling::Proportional { .. } => {
            let plain = Rope { scaling: Scaling::None, ..r.clone() };
            let ((f, _), (g, _)) = (plain.frequencies(0), r.frequencies(0));
            // A pair that does not turn.
            let by = |(f, g): (&f64, f64)| if g == 0.0 { 1e30 } else { f / g };
            vec![("rope_freqs.weight", f.iter().zip(g).map(by).collect())]
        }
        _ => vec![],
    }
}

fn stored_type(w: &Weights) -> GgmlType {
    match w.blocks {
        Some(b) => GgmlType::Block(b),
        None => GgmlType::Plain(w.data.dtype),
    }
}

pub(super) fn in_f32(w: &Weights) -> Result<Vec<f32>> {
    let Some(b): Option<BlockType> = w.blocks else { return crate::source::floats(&w.data) };
    let mut v = vec![0f32; w.dims().iter().product()];
    b.decode(w.data.bytes(), &mut v);
    Ok(v)
}
