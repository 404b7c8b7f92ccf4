//! Adapters in PEFT's files.

use super::{Adapter, Lora, STEMS};
use crate::model::ModelFile;
use crate::source::floats;
use halcyon::ir::error::{Error, Result};
use halcyon::{Backend, ConstData, DType, Tensor};
use halcyon_formats::safetensors::{self, SafeTensors};
use halcyon_nn::Param;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

const CONFIG: &str = "adapter_config.json";
const WEIGHTS: &str = "adapter_model.safetensors";
/// What PEFT puts before the names of modules.
const PREFIX: &str = "base_model.model.";

/// Canonical names of the matrices of all layers that can have an adapter, with the names of Hugging Face's
/// modules. A matrix that is stored together with another one is left out.
pub(super) fn names(file: &ModelFile) -> Vec<(String, String)> {
    let layers = 0..file.spec.layers.len();
    let stems = layers.flat_map(|i| STEMS.map(|s| format!("blk.{i}.{s}")));
    stems.filter_map(|stem| Some((stem.clone(), file.source.module(&file.spec, &stem)?))).collect()
}

fn bad(path: &Path, what: impl Into<String>) -> Error {
    Error::Format { file: path.display().to_string(), what: what.into() }
}

/// The scale of the configuration for an adapter of this rank.
fn scale(config: &Value, path: &Path) -> Result<impl Fn(usize) -> f32 + use<>> {
    let unsupported = |what: String| Err(Error::unsupported(what, "Merge the adapters with PEFT"));
    if config["peft_type"].as_str() != Some("LORA") {
        return unsupported(format!("adapters of the type {} ({})", config["peft_type"], path.display()));
    }
    for key in ["use_dora", "lora_bias"] {
        if config[key].as_bool() == Some(true) {
            return unsupported(format!("adapters with {key} ({})", path.display()));
        }
    }
    let filled = |v: &Value| match v {
        Value::Array(a) => !a.is_empty(),
        Value::Object(o) => !o.is_empty(),
        _ => false,
    };
    for key in ["modules_to_save", "alpha_pattern", "layer_replication", "trainable_token_indices"] {
        if filled(&config[key]) {
            return unsupported(format!("adapters with {key} ({})", path.display()));
        }
    }
    if !matches!(config["bias"].as_str(), None | Some("none")) {
        return unsupported(format!("adapters with bias {} ({})", config["bias"], path.display()));
    }
    let alpha = config["lora_alpha"].as_f64().filter(|a| a.is_finite());
    let alpha = alpha.ok_or_else(|| bad(path, "lora_alpha is not a number"))?;
    let root = config["use_rslora"].as_bool() == Some(true);
    Ok(move |rank: usize| {
        let rank = rank as f64;
        (alpha / if root { rank.sqrt() } else { rank }) as f32
    })
}

impl Lora {
    /// Reads a folder of PEFT with adapters for this model.
    ///
    /// # Errors
    /// `Error::Io` and `Error::Format` for missing and malformed files; `Error::Shape` for adapters of
    /// another model; `Error::Unsupported` for other kinds of adapters, and for adapters of matrices that
    /// cannot have one.
    pub fn load(folder: &Path, file: &ModelFile, backend: &Backend) -> Result<Lora> {
        let path = folder.join(CONFIG);
        let text = halcyon_formats::input::text(&path)?;
        let config: Value = serde_json::from_str(&text).map_err(|e| bad(&path, e.to_string()))?;
        let scale = scale(&config, &path)?;
        let weights = SafeTensors::open(&folder.join(WEIGHTS))?;
        let mut rest: BTreeSet<String> = weights.names().map(str::to_string).collect();
        let mut take = |name: String| -> Result<Option<ConstData>> {
            rest.remove(&name).then(|| weights.get(&name)).transpose()
        };
        let (mut adapters, mut kept, mut most) = (BTreeMap::new(), BTreeMap::new(), 0);
        for (stem, name) in names(file) {
            let part = |which: &str| format!("{PREFIX}{name}.lora_{which}.weight");
            let (Some(a), Some(b)) = (take(part("A"))?, take(part("B"))?) else { continue };
            let ([rank, _], [_, other]) = (&a.dims[..], &b.dims[..]) else {
                return Err(bad(folder, format!("the adapter of '{name}' has no two matrices")));
            };
            if rank != other || *rank == 0 {
                return Err(bad(folder, format!("the adapter of '{name}' has ranks {rank} and {other}")));
            }
            most = most.max(*rank);
            let scale = scale(*rank);
            let param = |t: &ConstData| -> Result<Param> {
                Ok(Param::new(Tensor::from_slice(backend, t.dims.to_vec(), &floats(t)?)?))
            };
            let adapter = Adapter { a: param(&a)?, b: param(&b)?, scale };
            let found = file.source.find(&file.spec, &format!("{stem}.weight"))?;
            adapter.check(&stem, &found.map(|w| w.dims()).unwrap_or_default())?;
            kept.insert(stem.clone(), name);
            adapters.insert(stem, adapter);
        }
        if let Some(name) = rest.first() {
            let what = format!("the adapter tensor '{name}' with this {} model", file.spec.family);
            return Err(Error::unsupported(what, "Merge the adapters with PEFT"));
        }
        if adapters.is_empty() {
            return Err(bad(folder, "it has no adapters"));
        }
        let alpha = scale(most) * most as f32;
        Ok(Lora { adapters, names: kept, rank: most, alpha })
    }

    /// Writes a folder that PEFT loads. `base` is the name of the model to which the adapters belong.
    ///
    /// # Errors
    /// `Error::Io`; the error of a failed value.
    pub fn save(&self, folder: &Path, base: &str) -> Result<()> {
        let io = |e: std::io::Error| Error::Io { path: folder.display().to_string(), what: e.to_string() };
        std::fs::create_dir_all(folder).map_err(io)?;
        let mut tensors = vec![];
        for (stem, adapter) in &self.adapters {
            let name = &self.names[stem];
            for (which, p) in [("A", &adapter.a), ("B", &adapter.b)] {
                let (dims, values) = (p.value().dims()?, p.value().cast(DType::F32).to_vec::<f32>()?);
                let name = format!("{PREFIX}{name}.lora_{which}.weight");
                tensors.push((name, ConstData::from_slice(&dims, &values)?));
            }
        }
        let all: Vec<(&str, &ConstData)> = tensors.iter().map(|(n, t)| (n.as_str(), t)).collect();
        let format = BTreeMap::from([("format".to_string(), "pt".to_string())]);
        safetensors::write(&folder.join(WEIGHTS), &all, &format)?;
        let last = |n: &String| n.rsplit('.').next().unwrap_or_default().to_string();
        let targets: BTreeSet<String> = self.names.values().map(last).collect();
        let config = json!({
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "r": self.rank,
            "lora_alpha": self.alpha,
            "lora_dropout": 0.0,
            "target_modules": targets,
            "bias": "none",
            "fan_in_fan_out": false,
            "inference_mode": true,
        });
        let text = serde_json::to_string_pretty(&config).map_err(|e| Error::internal(e.to_string()))?;
        halcyon_formats::output::write(&folder.join(CONFIG), text.as_bytes())
    }
}
