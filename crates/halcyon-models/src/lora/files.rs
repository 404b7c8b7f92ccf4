//! Adapters in PEFT's files.

use super::order::{self, FileOrder};
use super::parts::{self, Part, Whole};
use super::{Adapter, Lora, STEMS, matrix};
use crate::model::ModelFile;
use crate::source::{Module, floats, module_names};
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

/// Canonical names of the matrices that can have an adapter, with Hugging Face's modules. A head that is the
/// embedding's matrix is left out.
pub(super) fn modules(file: &ModelFile) -> Vec<(String, Module)> {
    let layers = 0..file.spec.layers.len();
    let stems = layers.flat_map(|i| STEMS.map(|s| format!("blk.{i}.{s}")));
    let stems = stems.chain(["output".to_string()]);
    let named = stems.filter_map(|stem| Some((stem.clone(), file.source.module(&file.spec, &stem)?)));
    // Experts whose matrices a folder stores together are no modules.
    let mut all: Vec<(String, Module)> =
        named.filter(|(stem, m)| stem.ends_with("_exps") == m.name.contains("{}")).collect();
    // Granite's folders have the same name for the expert of all rows and for a part without experts.
    let common = |stem: &str| {
        let layer = stem.split('.').nth(1).and_then(|i| file.spec.layers.get(i.parse::<usize>().ok()?));
        layer.and_then(|l| l.experts()).is_some_and(|(e, _)| e.common.is_some())
    };
    all.retain(|(stem, _)| !stem.ends_with("_shexp") || common(stem));
    let of_common = all.iter().filter(|(stem, _)| stem.ends_with("_shexp"));
    let of_common: BTreeSet<String> = of_common.map(|(_, m)| m.name.clone()).collect();
    all.retain(|(stem, m)| stem.ends_with("_shexp") || !of_common.contains(&m.name));
    all
}

pub(super) fn bad(path: &Path, what: impl Into<String>) -> Error {
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

/// Values of a part: sizes and elements.
type Values = (Vec<usize>, Vec<f32>);

/// The adapters of all matrices for which `take` gives `A` and `B`: it gets the canonical name, that of the
/// module in Hugging Face's layout, the place in this module, and which of the two is meant. `None` if there
/// are none.
pub(super) fn adapters_of(
    path: &Path,
    file: &ModelFile,
    backend: &Backend,
    from: FileOrder,
    scale: &dyn Fn(usize) -> f32,
    take: &mut dyn FnMut(&str, &str, Option<&Part>, &str) -> Result<Option<Values>>,
) -> Result<Option<Lora>> {
    let (mut adapters, mut kept) = (BTreeMap::new(), BTreeMap::new());
    let (mut turns, mut most) = (BTreeMap::new(), 0);
    let mut places = parts::of(file)?;
    for (stem, module) in modules(file) {
        let (name, place) = (module.name, places.get(&stem));
        let (mut a, mut b) = match (take(&stem, &name, place, "A")?, take(&stem, &name, place, "B")?) {
            (Some(a), Some(b)) => (a, b),
            (None, None) => continue,
            _ => return Err(bad(path, format!("the adapter of '{name}' has one of its two matrices"))),
        };
        let (&[.., rank, _], &[.., _, other]) = (&a.0[..], &b.0[..]) else {
            return Err(bad(path, format!("the adapter of '{name}' has no two matrices")));
        };
        if rank != other || rank == 0 {
            return Err(bad(path, format!("the adapter of '{name}' has ranks {rank} and {other}")));
        }
        most = most.max(rank);
        if let Some(m) = order::to_model(file, &stem, from) {
            m.apply(rank, &mut a.1, &mut b.1);
        }
        let adapter = Adapter {
            a: Param::new(Tensor::from_slice(backend, &a.0[..], &a.1)?),
            b: Param::new(Tensor::from_slice(backend, &b.0[..], &b.1)?),
            scale: scale(rank),
        };
        adapter.check(&stem, &matrix(file, &stem)?.map(|w| w.dims()).unwrap_or_default())?;
        turns.extend(order::for_folders(file, &stem).map(|t| (stem.clone(), t)));
        kept.insert(stem.clone(), name);
        adapters.insert(stem, adapter);
    }
    let alpha = if most > 0 { scale(most) * most as f32 } else { 0.0 };
    places.retain(|stem, _| adapters.contains_key(stem));
    Ok((most > 0).then_some(Lora { adapters, names: kept, turns, parts: places, rank: most, alpha }))
}

/// Experts of the layer of a matrix.
fn experts(file: &ModelFile, stem: &str) -> usize {
    let layer = stem.split('.').nth(1).and_then(|i| i.parse::<usize>().ok());
    let layer = layer.and_then(|i| file.spec.layers.get(i));
    layer.and_then(|l| l.experts()).map_or(0, |(e, _)| e.count)
}

/// The values of all experts, one after the other; zeros for those without an adapter. `None` if none has
/// one.
fn stacked(parts: Vec<Option<Values>>) -> std::result::Result<Option<Values>, String> {
    let Some(dims) = parts.iter().flatten().next().map(|(dims, _)| dims.clone()) else { return Ok(None) };
    let (count, mut all) = (parts.len(), vec![]);
    for part in parts {
        match part {
            Some((other, _)) if other != dims => return Err(format!("{dims:?} and {other:?} differ")),
            Some((_, values)) => all.extend(values),
            None => all.resize(all.len() + dims.iter().product::<usize>(), 0.0),
        }
    }
    Ok(Some(([&[count], &dims[..]].concat(), all)))
}

impl Lora {
    /// Reads adapters for this model: a folder of PEFT, or a GGUF file as llama.cpp has it.
    ///
    /// # Errors
    /// `Error::Io` and `Error::Format` for missing and malformed files; `Error::Shape` for adapters of
    /// another model; `Error::Unsupported` for other kinds of adapters, and for adapters of matrices that
    /// cannot have one.
    pub fn load(path: &Path, file: &ModelFile, backend: &Backend) -> Result<Lora> {
        match path.is_file() {
            true => super::gguf::load(path, file, backend),
            false => Lora::of_peft(path, file, backend),
        }
    }

    fn of_peft(folder: &Path, file: &ModelFile, backend: &Backend) -> Result<Lora> {
        let path = folder.join(CONFIG);
        let text = halcyon_formats::input::text(&path)?;
        let config: Value = serde_json::from_str(&text).map_err(|e| bad(&path, e.to_string()))?;
        let scale = scale(&config, &path)?;
        let weights = SafeTensors::open(&folder.join(WEIGHTS))?;
        let stored: BTreeSet<String> = weights.names().map(str::to_string).collect();
        let mut rest = stored.clone();
        let mut one = |name: &str, which: &str| -> Result<Option<Values>> {
            // What stands before the names depends on the class with which a model was trained.
            let mut all = module_names(name).map(|n| format!("{PREFIX}{n}.lora_{which}.weight"));
            let Some(name) = all.find(|n| stored.contains(n)) else { return Ok(None) };
            rest.remove(&name);
            let t = weights.get(&name)?;
            Ok(Some((t.dims.to_vec(), floats(&t)?)))
        };
        let mut take = |stem: &str, name: &str, place: Option<&Part>, which: &str| match name.contains("{}") {
            false => match (one(name, which)?, place.filter(|_| which == "B")) {
                (Some((dims, b)), Some(place)) => match dims[..] {
                    [rows, rank] if rows == place.of => {
                        let b = place.pick(&b, rank);
                        Ok(Some((vec![b.len() / rank.max(1), rank], b)))
                    }
                    _ => {
                        let what = format!("B of '{name}' is {dims:?}: expected {} rows", place.of);
                        Err(Error::shape("lora", what))
                    }
                },
                (values, _) => Ok(values),
            },
            true => {
                let of = |e: usize| one(&name.replace("{}", &e.to_string()), which);
                let parts = (0..experts(file, stem)).map(of).collect::<Result<Vec<_>>>()?;
                stacked(parts).map_err(|e| bad(folder, format!("the adapters of '{name}': {e}")))
            }
        };
        let lora = adapters_of(folder, file, backend, FileOrder::Folder, &scale, &mut take)?;
        if let Some(name) = rest.first() {
            let what = format!("the adapter tensor '{name}' with this {} model", file.spec.family);
            return Err(Error::unsupported(what, "Merge the adapters with PEFT"));
        }
        lora.ok_or_else(|| bad(folder, "it has no adapters"))
    }

    /// Writes a folder that PEFT loads. `base` is the name of the model to which the adapters belong.
    ///
    /// # Errors
    /// `Error::Io`; the error of a failed value.
    pub fn save(&self, folder: &Path, base: &str) -> Result<()> {
        let io = |e: std::io::Error| Error::Io { path: folder.display().to_string(), what: e.to_string() };
        std::fs::create_dir_all(folder).map_err(io)?;
        let (mut tensors, mut joined) = (vec![], BTreeMap::<&str, Whole>::new());
        for (stem, adapter) in &self.adapters {
            let name = &self.names[stem];
            let values = |p: &Param| p.value().cast(DType::F32).to_vec::<f32>();
            let (mut a, mut b) = (values(&adapter.a)?, values(&adapter.b)?);
            if let Some(m) = self.turns.get(stem) {
                m.apply(adapter.rank()?, &mut a, &mut b);
            }
            if let Some(part) = self.parts.get(stem).filter(|p| p.rows.is_some()) {
                let rank = adapter.rank()?;
                let new = || Whole { rank, a: vec![], b: vec![] };
                joined.entry(name).or_insert_with(new).add(name, a, &b, part)?;
                continue;
            }
            for (which, p, values) in [("A", &adapter.a, a), ("B", &adapter.b, b)] {
                let dims = p.value().dims()?;
                let file = |name: &str| format!("{PREFIX}{name}.lora_{which}.weight");
                match &dims[..] {
                    [experts, rest @ ..] if rest.len() == 2 => {
                        let one = (values.len() / experts.max(&1)).max(1);
                        for (e, v) in values.chunks_exact(one).enumerate() {
                            let name = file(&name.replace("{}", &e.to_string()));
                            tensors.push((name, ConstData::from_slice(rest, v)?));
                        }
                    }
                    _ => tensors.push((file(name), ConstData::from_slice(&dims, &values)?)),
                }
            }
        }
        for (name, Whole { rank, a, b }) in joined {
            let sides = [("A", [rank, a.len() / rank], a), ("B", [b.len() / rank, rank], b)];
            for (which, dims, values) in sides {
                let file = format!("{PREFIX}{name}.lora_{which}.weight");
                tensors.push((file, ConstData::from_slice(&dims, &values)?));
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
