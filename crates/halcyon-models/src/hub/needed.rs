//! The files that those of a folder name.

use super::plain_name;
use crate::source::json;
use halcyon::ir::error::{Error, Result};
use std::collections::BTreeSet;
use std::path::Path;

/// The files that a folder with `config.json` needs beside it: those with weights, and those of the modules
/// of sentence-transformers.
///
/// # Errors
/// `Error::Format` for an index that is malformed or that names files outside the folder.
pub(super) fn by_folder(folder: &Path) -> Result<Vec<String>> {
    let mut all = weights(folder)?;
    all.extend(modules(folder)?);
    Ok(all)
}

fn weights(folder: &Path) -> Result<Vec<String>> {
    let index = folder.join("model.safetensors.index.json");
    let has = |name: &str| folder.join(name).is_file();
    if !index.is_file() {
        // A folder of adapters has no model.
        let adapters = has("adapter_config.json") && !has("config.json");
        return Ok(vec![if adapters { "adapter_model.safetensors" } else { "model.safetensors" }.into()]);
    }
    let bad = |what: String| Error::Format { file: index.display().to_string(), what };
    let json = json(&index)?;
    let map = json["weight_map"].as_object().ok_or_else(|| bad("it has no weight_map".into()))?;
    let files: BTreeSet<&str> = map.values().filter_map(|v| v.as_str()).collect();
    match files.iter().find(|f| !plain_name(f)) {
        Some(f) => Err(bad(format!("'{f}' is not the name of a file in the folder"))),
        None => Ok(files.into_iter().map(str::to_string).collect()),
    }
}

fn modules(folder: &Path) -> Result<Vec<String>> {
    let list = folder.join("modules.json");
    if !list.is_file() {
        return Ok(vec![]);
    }
    let mut all = vec![];
    for module in json(&list)?.as_array().into_iter().flatten() {
        let text = |key: &str| module[key].as_str().unwrap_or("");
        let (kind, path) = (text("type").rsplit('.').next().unwrap_or(""), text("path"));
        // The reader of the folder refuses what is skipped here.
        if !plain_name(path) || path.contains('/') {
            continue;
        }
        let files: &[&str] = match kind {
            "Pooling" => &["config.json"],
            "Dense" => &["config.json", "model.safetensors"],
            _ => &[],
        };
        all.extend(files.iter().map(|f| format!("{path}/{f}")));
    }
    Ok(all)
}
