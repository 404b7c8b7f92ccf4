//! How the files of sentence-transformers, or the metadata of a GGUF file, say that a text's vector is made.

use super::pooling::{Pooling, normalize};
use crate::source::{Source, floats, json};
use halcyon::ir::error::{Error, Result};
use halcyon_formats::gguf::Metadata;
use halcyon_formats::safetensors::SafeTensors;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// A step after pooling.
#[derive(Clone, Debug)]
pub(super) enum After {
    Normalize,
    Dense(Dense),
}

/// A dense layer of a pooled vector.
#[derive(Clone, Debug)]
pub(super) struct Dense {
    inputs: usize,
    /// `[outputs, inputs]`.
    weights: Vec<f32>,
    bias: Option<Vec<f32>>,
    tanh: bool,
}

/// The configuration of a model's embeddings.
#[derive(Clone, Debug)]
pub(super) struct Config {
    /// Their results are joined.
    pub pooling: Vec<Pooling>,
    pub after: Vec<After>,
    /// The most tokens of a text.
    pub max_tokens: Option<usize>,
    pub prompts: BTreeMap<String, String>,
    pub default_prompt: Option<String>,
    /// Whether the tokens of a prompt take part in pooling.
    pub pool_prompt: bool,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            pooling: vec![Pooling::Mean],
            after: vec![],
            max_tokens: None,
            prompts: BTreeMap::new(),
            default_prompt: None,
            pool_prompt: true,
        }
    }
}

fn bad(path: &Path, what: impl Into<String>) -> Error {
    Error::Format { file: path.display().to_string(), what: what.into() }
}

/// A JSON file, if it is there.
fn maybe(path: PathBuf) -> Result<Option<Value>> {
    path.is_file().then(|| json(&path)).transpose()
}

/// A folder below `root` that a file names.
fn inside(root: &Path, file: &Path, name: &str) -> Result<PathBuf> {
    match name.contains(['/', '\\']) || name == ".." {
        true => Err(bad(file, format!("'{name}' is not the name of a folder beside it"))),
        false => Ok(root.join(name)),
    }
}

/// The folder with `config.json` and the weights, and the configuration of a folder at `root`.
pub(super) fn of_folder(root: &Path) -> Result<(PathBuf, Config)> {
    let mut c = Config::default();
    let mut model = root.to_path_buf();
    let file = root.join("modules.json");
    match maybe(file.clone())? {
        Some(list) => {
            let list = list.as_array().cloned().ok_or_else(|| bad(&file, "expected a list of modules"))?;
            for module in &list {
                let text = |key: &str| module.get(key).and_then(Value::as_str);
                let (kind, path) = (text("type").unwrap_or(""), text("path").unwrap_or(""));
                let place = inside(root, &file, path)?;
                match kind.rsplit('.').next().unwrap_or(kind) {
                    "Transformer" => model = place,
                    "Pooling" => pooling(&place, &mut c)?,
                    "Normalize" => c.after.push(After::Normalize),
                    "Dense" => c.after.push(After::Dense(dense(&place)?)),
                    other => {
                        return Err(Error::unsupported(
                            format!("the module '{other}' in {}", file.display()),
                            "Supported modules: Transformer, Pooling, Dense, Normalize",
                        ));
                    }
                }
            }
        }
        None if root.join("1_Pooling").is_dir() => pooling(&root.join("1_Pooling"), &mut c)?,
        None => {}
    }
    let number = |v: &Value| v.as_u64().and_then(|n| usize::try_from(n).ok()).filter(|n| *n > 0);
    let most = |name: &str, key: &str| -> Result<Option<usize>> {
        Ok(maybe(model.join(name))?.and_then(|v| v.get(key).and_then(number)))
    };
    c.max_tokens = match most("sentence_bert_config.json", "max_seq_length")? {
        Some(n) => Some(n),
        None => most("tokenizer_config.json", "model_max_length")?,
    };
    let file = root.join("config_sentence_transformers.json");
    if let Some(v) = maybe(file.clone())? {
        if let Some(prompts) = v.get("prompts").filter(|p| !p.is_null()) {
            c.prompts =
                serde_json::from_value(prompts.clone()).map_err(|e| bad(&file, format!("prompts: {e}")))?;
        }
        c.default_prompt = v.get("default_prompt_name").and_then(Value::as_str).map(String::from);
    }
    Ok((model, c))
}

/// The number in GGUF files of the way in which a folder's vectors are pooled, if its files say it, and what
/// such a file cannot say of them.
pub(crate) fn pooling_type(root: &Path) -> Result<(Option<u32>, Option<String>)> {
    if !root.join("modules.json").is_file() && !root.join("1_Pooling").is_dir() {
        return Ok((None, None));
    }
    let (_, c) = of_folder(root)?;
    let kind = match c.pooling[..] {
        [Pooling::Mean] => Some(1),
        [Pooling::Cls] => Some(2),
        [Pooling::LastToken] => Some(3),
        _ => None,
    };
    let dense = c.after.iter().any(|a| matches!(a, After::Dense(_)));
    let normalised = c.after.iter().any(|a| matches!(a, After::Normalize));
    let missing = if kind.is_none() || dense {
        let names: Vec<&str> = c.pooling.iter().map(|p| p.name()).collect();
        let then = if dense { " and a dense layer" } else { "" };
        Some(format!("the folder makes embeddings with {}{then}, which GGUF cannot say", names.join(" + ")))
    } else {
        normalised.then(|| {
            "the folder's embeddings have length 1, which GGUF cannot say; use `embed --normalize`".into()
        })
    };
    Ok((kind, missing))
}

/// Reads `config.json` of a pooling module.
fn pooling(place: &Path, c: &mut Config) -> Result<()> {
    let file = place.join("config.json");
    let v = json(&file)?;
    let on = |key: &str| v.get(key).and_then(Value::as_bool).unwrap_or(false);
    c.pooling = match v.get("pooling_mode") {
        Some(Value::String(name)) => vec![Pooling::by_name(name).map_err(|e| bad(&file, e.to_string()))?],
        Some(Value::Array(names)) => {
            let one = |n: &Value| Pooling::by_name(n.as_str().unwrap_or_default());
            names.iter().map(one).collect::<Result<_>>().map_err(|e| bad(&file, e.to_string()))?
        }
        _ => Pooling::ALL.into_iter().filter(|p| on(p.key())).collect(),
    };
    if c.pooling.is_empty() {
        return Err(bad(&file, "it chooses no way of pooling"));
    }
    c.pool_prompt = v.get("include_prompt").and_then(Value::as_bool).unwrap_or(true);
    Ok(())
}

fn dense(place: &Path) -> Result<Dense> {
    let file = place.join("config.json");
    let v = json(&file)?;
    let size = |key: &str| {
        let n = v.get(key).and_then(Value::as_u64).and_then(|n| usize::try_from(n).ok());
        n.filter(|n| *n > 0 && *n <= 1 << 20).ok_or_else(|| bad(&file, format!("it has no '{key}'")))
    };
    let (inputs, outputs) = (size("in_features")?, size("out_features")?);
    let name = v.get("activation_function").and_then(Value::as_str).unwrap_or("Tanh");
    let tanh = match name.rsplit('.').next().unwrap_or(name) {
        "Tanh" => true,
        "Identity" => false,
        other => return Err(bad(&file, format!("the activation '{other}' is not supported"))),
    };
    let weights = SafeTensors::open(&place.join("model.safetensors"))?;
    let read = |name: &str, dims: &[usize]| -> Result<Vec<f32>> {
        let data = weights.get(name)?;
        match data.dims[..] == *dims {
            true => floats(&data),
            false => Err(bad(&file, format!("'{name}' is {:?}, expected {dims:?}", data.dims.as_slice()))),
        }
    };
    let has_bias = v.get("bias").and_then(Value::as_bool).unwrap_or(true);
    Ok(Dense {
        inputs,
        weights: read("linear.weight", &[outputs, inputs])?,
        bias: has_bias.then(|| read("linear.bias", &[outputs])).transpose()?,
        tanh,
    })
}

/// The configuration of a GGUF file.
pub(super) fn of_gguf(m: &Metadata) -> Result<Config> {
    let arch = m.str("general.architecture")?;
    let kind = m.maybe(&format!("{arch}.pooling_type"), Metadata::u64)?;
    let pooling = match kind {
        None | Some(0 | 1) => Pooling::Mean,
        Some(2) => Pooling::Cls,
        Some(3) => Pooling::LastToken,
        Some(other) => {
            let what = format!("pooling_type {other}");
            return Err(Error::unsupported(what, "Choose a way of pooling, such as mean"));
        }
    };
    Ok(Config { pooling: vec![pooling], ..Config::default() })
}

/// The configuration of an open model.
pub(super) fn of(source: &Source, folder: Option<Config>) -> Result<Config> {
    match (source, folder) {
        (_, Some(c)) => Ok(c),
        (Source::Gguf(file), None) => of_gguf(file.metadata()),
        (Source::Folder(_), None) => Ok(Config::default()),
    }
}

impl After {
    /// Applies the step.
    pub(super) fn apply(&self, mut v: Vec<f32>) -> Vec<f32> {
        match self {
            After::Normalize => {
                normalize(&mut v);
                v
            }
            After::Dense(d) => {
                let row = |(i, w): (usize, &[f32])| {
                    let sum: f64 = w.iter().zip(&v).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum();
                    let sum = sum + d.bias.as_ref().map_or(0.0, |b| f64::from(b[i]));
                    (if d.tanh { sum.tanh() } else { sum }) as f32
                };
                d.weights.chunks_exact(d.inputs).enumerate().map(row).collect()
            }
        }
    }

    /// Sizes of its input and its output; `None` if it takes any.
    pub(super) fn sizes(&self) -> Option<(usize, usize)> {
        match self {
            After::Normalize => None,
            After::Dense(d) => Some((d.inputs, d.weights.len() / d.inputs)),
        }
    }
}
