//! Models with adapters merged into their matrices.

use super::content::{Content, Entry};
use super::to_folder::{FolderWritten, Unfinished, encoded, too_large};
use super::write;
use crate::lora::{Difference, Lora};
use crate::model::ModelFile;
use crate::source::{Folder, Source, floats, gguf};
use bytes::Bytes;
use halcyon::DType;
use halcyon::ir::error::{Error, Result};
use halcyon_formats::gguf::{GgmlType, TensorInfo};
use halcyon_formats::safetensors::SafeTensorsWriter;
use std::collections::{BTreeMap, HashMap};
use std::path::Path;

/// The content of a model whose matrices have the adapters' products added, and the types that the tensors
/// had before. Merged matrices are f32 until they are written, so nothing is rounded twice; they are computed
/// when they are written. A folder that was merged stays so.
///
/// # Errors
/// Those of [`Content::of`]; the error of a failed value.
pub fn merged_content<'a>(file: &'a mut ModelFile, lora: &Lora) -> Result<(Content<'a>, Vec<GgmlType>)> {
    let types: HashMap<String, GgmlType> =
        Content::of(&file.source)?.tensors.iter().map(|t| (t.info.name.clone(), t.info.ty)).collect();
    if let Source::Folder(folder) = &mut file.source {
        add(folder, lora)?;
        let content = Content::of(&file.source)?;
        let kept = content.tensors.iter().map(|t| types.get(&t.info.name).copied().unwrap_or(t.info.ty));
        let kept = kept.collect();
        return Ok((content, kept));
    }
    let mut differences = of_tensors(file, lora)?;
    let mut content = Content::of(&file.source)?;
    let kept = content.tensors.iter().map(|t| t.info.ty).collect();
    for t in &mut content.tensors {
        let Some(d) = differences.remove(&t.info.name) else { continue };
        let info = t.info.clone();
        let new = TensorInfo::new(info.name.clone(), &info.shape, GgmlType::F32);
        let placeholder = Entry::made(new.clone(), || Ok(Bytes::new()));
        let base = std::mem::replace(t, placeholder);
        *t = Entry::made(new, move || {
            let bytes = base.bytes()?;
            let mut values = vec![0f32; info.elements()];
            write::decode(info.ty, &bytes, &mut values);
            d.add_to(&mut values);
            Ok(values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>().into())
        });
    }
    match differences.into_keys().next() {
        Some(name) => Err(Error::internal(format!("the file has no tensor '{name}'"))),
        None => Ok((content, kept)),
    }
}

/// What adapters add to the tensors of a GGUF file, which may have several matrices in one tensor.
fn of_tensors(file: &ModelFile, lora: &Lora) -> Result<BTreeMap<String, Difference>> {
    let Source::Gguf(g) = &file.source else { return Ok(BTreeMap::new()) };
    let (mut all, mut joined) = (BTreeMap::new(), BTreeMap::<String, Vec<_>>::new());
    for (stem, d) in lora.differences()? {
        match gguf::place(g, &file.spec, &stem) {
            None => return Err(Error::argument("lora", format!("the model has no matrix '{stem}'"))),
            Some((name, None)) => drop(all.insert(name, d)),
            Some((name, rows)) => joined.entry(name).or_default().push((d, rows)),
        }
    }
    for (name, parts) in joined {
        let rows = g.find(&name).and_then(|t| t.shape().first().copied()).unwrap_or(0);
        all.insert(name, Difference::joined(parts, rows));
    }
    Ok(all)
}

/// Adds what adapters add to the tensors of a folder.
fn add(folder: &mut Folder, lora: &Lora) -> Result<()> {
    for (module, d) in lora.of_modules()? {
        if !module.contains("{}") {
            folder.add(format!("{module}.weight"), d);
            continue;
        }
        for (e, d) in d.of_experts().enumerate() {
            folder.add(format!("{}.weight", module.replace("{}", &e.to_string())), d);
        }
    }
    Ok(())
}

/// Writes a folder's model with merged adapters as a new folder. Other files of the folder are copied.
/// Weights get `dtype` (f32, f16 or bf16), or keep their types. The folder must not exist, or be empty; it
/// appears when it is complete. `progress` is called after each tensor with their number.
///
/// # Errors
/// `Error::Unsupported` for a GGUF file, and for a folder with quantised weights; `Error::Argument` for a
/// folder that has content, and for another dtype; `Error::Interrupted`; errors of reading and writing.
pub fn write_merged_folder(
    file: &mut ModelFile,
    lora: &Lora,
    target: (&Path, Option<DType>),
    interrupted: &dyn Fn() -> bool,
    progress: &mut dyn FnMut(u64),
) -> Result<FolderWritten> {
    let (to, dtype) = target;
    let Source::Folder(folder) = &mut file.source else {
        let next = "Write a GGUF file with the adapters, and convert that to a folder";
        return Err(Error::unsupported("a GGUF file with adapters as a folder", next));
    };
    if folder.is_quantised() {
        let next = "Write a GGUF file, or merge into the model's folder in floats";
        return Err(Error::unsupported("merging into quantised weights of a folder", next));
    }
    if let Some(other) = dtype.filter(|d| !matches!(d, DType::F32 | DType::F16 | DType::BF16)) {
        return Err(Error::argument("convert", format!("{other}: expected f32, f16 or bf16")));
    }
    add(folder, lora)?;
    let mut names: Vec<&str> = folder.names().collect();
    names.sort_unstable();
    let kind = |own: DType| match own {
        DType::F16 | DType::BF16 | DType::F32 => dtype.unwrap_or(own),
        own if own.is_float() => dtype.unwrap_or(DType::F32),
        own => own,
    };
    let mut infos = vec![];
    for n in &names {
        let t = folder.plain(n)?;
        infos.push((*n, kind(t.dtype), t.dims.to_vec()));
    }
    let work = Unfinished::new(to)?;
    copy_texts(folder.path(), &work.path, dtype)?;
    let borrowed: Vec<_> = infos.iter().map(|(n, d, dims)| (*n, *d, &dims[..])).collect();
    let format = BTreeMap::from([("format".to_string(), "pt".to_string())]);
    let mut out = SafeTensorsWriter::create(&work.path.join("model.safetensors"), &borrowed, &format)?;
    for (name, ty, _) in &infos {
        if interrupted() {
            return Err(Error::Interrupted { what: format!("writing {}", to.display()) });
        }
        let t = folder.with_difference(name)?;
        match t.dtype == *ty {
            true => out.append(t.bytes())?,
            false => out.append(&encoded(&floats(&t)?, *ty).map_err(|v| too_large(name, v))?)?,
        }
        progress(infos.len() as u64);
    }
    let (bytes, tensors) = (out.finish()?, infos.len());
    work.finish(to)?;
    Ok(FolderWritten { bytes, tensors, warnings: vec![] })
}

/// Copies the files of a module of sentence-transformers, such as `1_Pooling`.
fn copy_module(from: &Path, to: &Path) -> std::io::Result<()> {
    std::fs::create_dir(to)?;
    for entry in std::fs::read_dir(from)? {
        let entry = entry?;
        if entry.path().is_file() {
            std::fs::copy(entry.path(), to.join(entry.file_name()))?;
        }
    }
    Ok(())
}

/// Copies the files of a folder that are no weights, and modules that follow the model. The configuration
/// names the new type.
fn copy_texts(from: &Path, to: &Path, dtype: Option<DType>) -> Result<()> {
    let io = |e: std::io::Error| Error::Io { path: from.display().to_string(), what: e.to_string() };
    for entry in std::fs::read_dir(from).map_err(io)? {
        let path = entry.map_err(io)?.path();
        let Some(name) = path.file_name().and_then(|n| n.to_str()) else { continue };
        if path.is_dir() && name.starts_with(|c: char| c.is_ascii_digit()) && name.contains('_') {
            copy_module(&path, &to.join(name)).map_err(io)?;
        }
        let weights = [".safetensors", ".safetensors.index.json", ".bin", ".gguf", ".pth", ".pt"];
        if !path.is_file() || weights.iter().any(|w| name.ends_with(w)) {
            continue;
        }
        std::fs::copy(&path, to.join(name)).map_err(io)?;
    }
    let Some(dtype) = dtype else { return Ok(()) };
    let path = to.join("config.json");
    let mut config = crate::source::json(&path)?;
    let name = match dtype {
        DType::F16 => "float16",
        DType::BF16 => "bfloat16",
        _ => "float32",
    };
    for key in ["torch_dtype", "dtype"] {
        if config.get(key).is_some() {
            config[key] = name.into();
        }
    }
    let text = serde_json::to_vec_pretty(&config).map_err(|e| Error::internal(e.to_string()))?;
    halcyon_formats::output::write(&path, &text)
}
