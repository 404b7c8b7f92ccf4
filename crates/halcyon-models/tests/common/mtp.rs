//! Stored models with a layer for further tokens, whose tensors are apart from those of the model.

use std::path::{Path, PathBuf};

/// The stored cases.
#[allow(dead_code, reason = "one test needs only one case")]
pub(crate) const FAMILIES: [&str; 4] = ["deepseek_v3", "glm4_moe", "qwen3_next", "qwen3_5"];

/// A file of a case.
pub(crate) fn stored(name: &str, file: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/mtp").join(name).join(file)
}

/// The model of a case as a new folder in `dir`, as `mtp_case.py` writes it.
pub(crate) fn folder(dir: &Path, name: &str) -> PathBuf {
    let base = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name);
    let to = dir.join(name);
    std::fs::create_dir(&to).expect("a folder");
    let mut index = serde_json::Map::new();
    for from in [base.join("model.safetensors"), stored(name, "mtp.safetensors")] {
        let file = from.file_name().and_then(|n| n.to_str()).expect("a name");
        std::fs::copy(&from, to.join(file)).expect("copied");
        let tensors = halcyon_formats::safetensors::SafeTensors::open(&from).expect("a file");
        index.extend(tensors.names().map(|n| (n.to_string(), file.into())));
    }
    std::fs::copy(base.join("config.json"), to.join("config.json")).expect("copied");
    let index = serde_json::json!({ "weight_map": index }).to_string();
    std::fs::write(to.join("model.safetensors.index.json"), index).expect("written");
    to
}
