//! Folders in Hugging Face's layout: `config.json`, and safetensors files, perhaps with an index.

use super::names::recipes;
use super::packed::Stored;
use super::quantised::Scheme;
use super::{Weights, picked};
use crate::lora::Difference;
use crate::spec::Spec;
use bytes::Bytes;
use halcyon::ConstData;
use halcyon::ir::error::{Error, Result};
use halcyon_formats::safetensors::SafeTensors;
use serde_json::Value;
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

/// The most bytes of a JSON file.
const MAX_JSON: u64 = 64 << 20;

/// An open folder.
#[derive(Debug)]
pub struct Folder {
    path: PathBuf,
    pub config: Value,
    files: Vec<SafeTensors>,
    /// The file of each tensor.
    at: HashMap<String, usize>,
    /// How the weights are quantised, if they are.
    scheme: Option<Scheme>,
    /// What adapters add to tensors, by the tensors' names.
    differences: HashMap<String, Difference>,
}

fn io(path: &Path, what: impl ToString) -> Error {
    Error::Io { path: path.display().to_string(), what: what.to_string() }
}

pub(super) fn bad(path: &Path, what: impl Into<String>) -> Error {
    Error::Format { file: path.display().to_string(), what: what.into() }
}

/// Reads a JSON file of a folder.
pub(crate) fn json(path: &Path) -> Result<Value> {
    let size = std::fs::metadata(path).map_err(|e| io(path, e))?.len();
    if size > MAX_JSON {
        return Err(bad(path, format!("it has {size} bytes; at most {MAX_JSON} are read")));
    }
    let text = std::fs::read(path).map_err(|e| io(path, e))?;
    serde_json::from_slice(&text).map_err(|e| bad(path, e.to_string()))
}

impl Folder {
    /// Opens a folder.
    ///
    /// # Errors
    /// `Error::Io` if a file is missing; `Error::Format` if one is malformed.
    pub fn open(path: &Path) -> Result<Folder> {
        let config = path.join("config.json");
        if !config.is_file() {
            let adapters = path.join("adapter_config.json").is_file();
            let what = match adapters {
                true => "the folder has adapters and no model; give the model, and the folder with --lora",
                false => {
                    "the folder has no config.json; a model's folder has config.json and safetensors files"
                }
            };
            return Err(io(path, what));
        }
        let file = config;
        let config = json(&file)?;
        let scheme = Scheme::of(&config, &file)?;
        let index = path.join("model.safetensors.index.json");
        let names: Vec<String> = if index.is_file() {
            let map: BTreeMap<String, String> = serde_json::from_value(json(&index)?["weight_map"].clone())
                .map_err(|e| bad(&index, format!("weight_map: {e}")))?;
            let mut files: Vec<String> = map.into_values().collect();
            files.sort();
            files.dedup();
            if let Some(f) = files.iter().find(|f| f.contains(['/', '\\']) || f.as_str() == "..") {
                return Err(bad(&index, format!("'{f}' is not the name of a file in the folder")));
            }
            files
        } else {
            vec!["model.safetensors".into()]
        };
        let files = names.iter().map(|n| SafeTensors::open(&path.join(n))).collect::<Result<Vec<_>>>()?;
        let mut at = HashMap::new();
        for (i, file) in files.iter().enumerate() {
            for name in file.names() {
                if at.insert(name.to_string(), i).is_some() {
                    return Err(bad(path, format!("two files have a tensor '{name}'")));
                }
            }
        }
        Ok(Folder { path: path.into(), config, files, at, scheme, differences: HashMap::new() })
    }

    /// The folder's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the configuration says that the embedding makes the logits, too.
    fn ties(&self) -> bool {
        let key = "tie_word_embeddings";
        let own = self.config.get("text_config").and_then(|t| t.get(key)).or(self.config.get(key));
        own.is_some_and(|v| v == true) && self.config.get(key).is_none_or(|v| v != false)
    }

    /// Another JSON file of the folder, if it is there.
    ///
    /// # Errors
    /// `Error::Format` if it is malformed.
    pub fn json(&self, name: &str) -> Result<Option<Value>> {
        let path = self.path.join(name);
        path.is_file().then(|| json(&path)).transpose()
    }

    /// Bytes and sizes of all tensors whose type is known.
    pub fn sizes(&self) -> impl Iterator<Item = (usize, Vec<usize>)> + '_ {
        let all = self.files.iter().flat_map(|f| f.names().filter_map(|n| f.get(n).ok()));
        all.map(|t| (t.bytes().len(), t.dims.to_vec()))
    }

    /// Whether a file has a tensor of this name.
    pub(super) fn stores(&self, name: &str) -> bool {
        self.at.contains_key(name)
    }

    /// The names of all stored tensors.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.at.keys().map(String::as_str)
    }

    /// A tensor as it is stored.
    pub(crate) fn plain(&self, name: &str) -> Result<ConstData> {
        let file = self.at.get(name).ok_or_else(|| bad(&self.path, format!("it has no tensor '{name}'")))?;
        self.files[*file].get(name)
    }

    fn has(&self, name: &str) -> bool {
        self.stores(name) || self.scheme.as_ref().is_some_and(|s| s.has(self, name))
    }

    /// The scales of a matrix, if it is quantised.
    fn quantised(&self, name: &str) -> Result<Option<(&Scheme, Stored)>> {
        match &self.scheme {
            Some(s) if s.has(self, name) => Ok(Some((s, s.stored(self, name)?))),
            _ => Ok(None),
        }
    }

    /// Adds an adapter's product to a tensor that is stored as it is used.
    pub(crate) fn add(&mut self, name: String, difference: Difference) {
        self.differences.insert(name, difference);
    }

    /// Whether the weights are quantised.
    pub(crate) fn is_quantised(&self) -> bool {
        self.scheme.is_some()
    }

    /// A tensor as it is stored, or with what an adapter adds, in f32.
    pub(crate) fn with_difference(&self, name: &str) -> Result<ConstData> {
        let t = self.plain(name)?;
        match self.differences.get(name) {
            Some(d) => d.added(&t.dims, super::floats(&t)?),
            None => Ok(t),
        }
    }

    /// A tensor in its form in memory.
    fn get(&self, name: &str) -> Result<Part> {
        let part = self.without_difference(name)?;
        let Some(d) = self.differences.get(name) else { return Ok(part) };
        let data = d.added(&part.weights.dims(), part.weights.floats()?)?;
        Ok(Part { weights: Weights { data, blocks: None }, ..part })
    }

    fn without_difference(&self, name: &str) -> Result<Part> {
        match self.quantised(name)? {
            Some((scheme, stored)) => Ok(Part { weights: stored.make(scheme.form(&stored))?, by_rows: true }),
            None => Ok(Part { weights: Weights { data: self.plain(name)?, blocks: None }, by_rows: false }),
        }
    }

    /// Tensors of one shape, one after the other. All get the same form.
    fn stack(&self, names: &[String]) -> Result<Weights> {
        let stored: Vec<Option<(&Scheme, Stored)>> =
            names.iter().map(|n| self.quantised(n)).collect::<Result<_>>()?;
        let forms = stored.iter().map(|s| s.as_ref().map(|(scheme, s)| scheme.form(s)));
        // Plain tensors beside quantised ones keep their type, which then differs.
        let form = forms.flatten().reduce(|a, b| a.join(b));
        let (mut bytes, mut first) = (Vec::new(), None::<Weights>);
        for (name, stored) in names.iter().zip(stored) {
            let next = match (stored, form) {
                _ if self.differences.contains_key(name) => self.get(name)?.weights,
                (Some((_, stored)), Some(form)) => stored.make(form)?,
                _ => Weights { data: self.plain(name)?, blocks: None },
            };
            let kind = |w: &Weights| (w.data.dims.clone(), w.data.dtype, w.blocks);
            if first.as_ref().is_some_and(|f| kind(f) != kind(&next)) {
                return Err(Error::shape("weights", format!("'{name}' differs in type from '{}'", names[0])));
            }
            bytes.extend_from_slice(next.data.bytes());
            first.get_or_insert(next);
        }
        let first = first.ok_or_else(|| Error::shape("weights", "no experts"))?;
        let dims: Vec<usize> = std::iter::once(names.len()).chain(first.data.dims.to_vec()).collect();
        let data = halcyon_formats::data::from_bytes(first.data.dtype, &dims, Bytes::from(bytes))?;
        Ok(Weights { data, blocks: first.blocks })
    }

    /// Warnings about tensors that are decoded when the model is loaded.
    ///
    /// # Errors
    /// Errors of reading scales.
    pub(crate) fn warnings(&self) -> Result<Vec<String>> {
        let Some(scheme) = &self.scheme else { return Ok(vec![]) };
        let mut all: BTreeMap<&str, [usize; 3]> = BTreeMap::new();
        for name in scheme.names(self) {
            let stored = scheme.stored(self, &name)?;
            let form = scheme.form(&stored);
            if form.blocks().is_none() {
                let sums = all.entry(form.dtype().name()).or_default();
                sums[0] += 1;
                sums[1] += stored.size;
                sums[2] += stored.dims.iter().product::<usize>() * form.dtype().size();
            }
        }
        let mib = |n: usize| n as f64 / f64::from(1 << 20);
        let line = |(dtype, [count, stored, loaded]): (&str, [usize; 3])| {
            let (kind, stored, loaded) = (scheme.name(), mib(stored), mib(loaded));
            format!(
                "{count} tensors in {kind} are decoded to {dtype} when they are loaded: \
                 {stored:.1} MiB become {loaded:.1} MiB"
            )
        };
        Ok(all.into_iter().map(line).collect())
    }

    /// The module that has a matrix; see [`crate::source::Source::module`].
    pub(super) fn module(&self, spec: &Spec, stem: &str) -> Option<Module> {
        if stem == "output" && self.ties() {
            return None;
        }
        let recipes = recipes(spec, &format!("{stem}.weight"));
        let names = recipes.iter().flat_map(|r| PREFIXES.iter().map(move |p| (r, r.source(p))));
        let (recipe, name) = names.into_iter().find(|(_, n)| self.has(n))?;
        Module::of(name.strip_suffix(&recipe.name())?, recipe)
    }

    pub(super) fn find(&self, spec: &Spec, name: &str) -> Result<Option<Weights>> {
        // A matrix for the outputs may be in the file although the configuration ties it to the embedding.
        if name == "output.weight" && self.ties() {
            return Ok(None);
        }
        for recipe in recipes(spec, name) {
            for prefix in PREFIXES {
                if self.has(&recipe.source(prefix)) {
                    let made = recipe.make(self, prefix).map_err(|e| match e {
                        Error::Shape { what, .. } => bad(&self.path, format!("{name}: {what}")),
                        e => e,
                    })?;
                    return Ok(Some(made));
                }
            }
        }
        Ok(None)
    }
}

/// A tensor as recipes read it.
struct Part {
    weights: Weights,
    /// Whether the last axis is that of the inputs, whatever the family stores. Quantised matrices are so.
    by_rows: bool,
}

/// A module in Hugging Face's layout that has a matrix, alone or with others.
#[derive(Clone, Debug)]
pub(crate) struct Module {
    /// `{}` stands for the number of an expert.
    pub(crate) name: String,
    recipe: Recipe,
}

impl Module {
    /// The module that a recipe reads; `None` if it reads none.
    pub(super) fn of(prefix: &str, recipe: &Recipe) -> Option<Module> {
        let name = match recipe {
            Recipe::Plain(n) | Recipe::Stack(n, _) => n.clone(),
            Recipe::Rows(..) | Recipe::TransposedRows(..) | Recipe::Joined(_) | Recipe::Grouped { .. } => {
                recipe.name()
            }
            _ => return None,
        };
        Some(Module { name: format!("{prefix}{}", name.strip_suffix(".weight")?), recipe: recipe.clone() })
    }

    /// The rows of the matrix among the `all` outputs of the module; `None` if it has all, in their order.
    ///
    /// # Errors
    /// `Error::Shape` if the module has fewer.
    pub(crate) fn rows(&self, all: usize) -> Result<Option<Vec<usize>>> {
        let parts = match &self.recipe {
            Recipe::Plain(_) | Recipe::Stack(..) => return Ok(None),
            Recipe::Joined(parts) => &parts[..],
            own => std::slice::from_ref(own),
        };
        // The recipe's part of a matrix whose rows are their numbers.
        let numbers: Vec<f64> = (0..all).map(|i| i as f64).collect();
        let numbers = ConstData::from_slice(&[all, 1], &numbers)?;
        let mut rows = vec![];
        for p in parts {
            rows.extend(p.part_of(numbers.clone(), true)?.to_vec::<f64>().into_iter().map(|i| i as usize));
        }
        Ok((!rows.iter().copied().eq(0..all)).then_some(rows))
    }

    /// Whether the module has this matrix only, stored as it is used.
    pub(crate) fn is_plain(&self) -> bool {
        matches!(self.recipe, Recipe::Plain(_) | Recipe::Stack(..))
    }

    /// Whether folders store the transpose.
    pub(crate) fn is_turned(&self) -> bool {
        matches!(self.recipe, Recipe::TransposedRows(..))
    }
}

/// The names that a module may have, by how its model was saved.
pub(crate) fn module_names(name: &str) -> impl Iterator<Item = String> {
    let bare = PREFIXES.iter().filter_map(|p| name.strip_prefix(p)).min_by_key(|n| n.len());
    let bare = bare.unwrap_or(name).to_string();
    std::iter::once(name.to_string()).chain(PREFIXES.iter().map(move |p| format!("{p}{bare}")))
}

/// What stands before the names of tensors, by how the model was saved.
const PREFIXES: &[&str] =
    &["model.", "", "transformer.", "model.language_model.", "language_model.model.", "bert.", "roberta."];

/// How a canonical tensor is made from the folder's tensors. Names lack the prefix.
#[derive(Clone, Debug)]
pub(super) enum Recipe {
    Plain(String),
    /// Rows `first..first + count` of a matrix, or elements of a vector.
    Rows(String, usize, usize),
    /// A matrix stored as `[inputs, outputs]`: the same rows of its transpose.
    TransposedRows(String, usize, usize),
    /// Matrices of experts, each a tensor of its own. `{}` is the number.
    Stack(String, usize),
    /// `[experts, inputs, outputs]`, transposed; every `step`-th output from `first` on.
    Experts {
        name: String,
        first: usize,
        step: usize,
        count: usize,
    },
    /// `[experts, outputs, inputs]`: outputs `first..first + count`.
    ExpertRows {
        name: String,
        first: usize,
        count: usize,
    },
    /// A vector for each expert: every `step`-th element from `first` on.
    ExpertVector {
        name: String,
        first: usize,
        step: usize,
    },
    /// A vector `v`, as `-exp(v)` in f32.
    MinusExp(String),
    /// Rows of several recipes, one after the other.
    Joined(Vec<Recipe>),
    /// Rows in groups per key head: `before` rows are skipped, `take` are kept, `after` are skipped.
    Grouped {
        name: String,
        before: usize,
        take: usize,
        after: usize,
    },
}

impl Recipe {
    pub(super) fn name(&self) -> String {
        match self {
            Recipe::Plain(n) | Recipe::Rows(n, ..) | Recipe::TransposedRows(n, ..) | Recipe::MinusExp(n) => {
                n.clone()
            }
            Recipe::Joined(parts) => parts.first().map(Recipe::name).unwrap_or_default(),
            Recipe::Stack(n, _) => n.replace("{}", "0"),
            Recipe::Experts { name, .. }
            | Recipe::ExpertRows { name, .. }
            | Recipe::ExpertVector { name, .. }
            | Recipe::Grouped { name, .. } => name.clone(),
        }
    }

    /// The full name of the first tensor that the recipe reads.
    fn source(&self, prefix: &str) -> String {
        format!("{prefix}{}", self.name())
    }

    fn make(&self, f: &Folder, prefix: &str) -> Result<Weights> {
        if let Recipe::Stack(name, count) = self {
            let names: Vec<String> =
                (0..*count).map(|e| format!("{prefix}{}", name.replace("{}", &e.to_string()))).collect();
            return f.stack(&names);
        }
        if let Recipe::Joined(parts) = self {
            return joined(parts.iter().map(|p| p.make(f, prefix)).collect::<Result<_>>()?);
        }
        let Part { weights: Weights { data, blocks }, by_rows } = f.get(&self.source(prefix))?;
        Ok(Weights { data: self.part_of(data, by_rows)?, blocks })
    }

    /// The recipe's part of one stored tensor. A row of a tensor in blocks is its bytes.
    fn part_of(&self, t: ConstData, by_rows: bool) -> Result<ConstData> {
        let dims = t.dims.to_vec();
        let too_small = |want: usize, has: usize| {
            Error::shape("weights", format!("it takes {want} rows of a tensor with {has}"))
        };
        match self {
            Recipe::Plain(_) | Recipe::Stack(..) | Recipe::Joined(_) => Ok(t),
            Recipe::MinusExp(_) => {
                let values: Vec<f32> = super::floats(&t)?.iter().map(|v| -v.exp()).collect();
                ConstData::from_slice(&dims, &values)
            }
            Recipe::TransposedRows(_, first, count) if !by_rows => {
                let [k, n] = dims[..] else { return Err(Error::shape("weights", "a matrix is expected")) };
                if first + count > n {
                    return Err(too_small(first + count, n));
                }
                picked(&t, &[*count, k], &|i| (i % k) * n + first + i / k)
            }
            Recipe::Rows(_, first, count) | Recipe::TransposedRows(_, first, count) => {
                let rows = dims.first().copied().unwrap_or(0);
                if first + count > rows {
                    return Err(too_small(first + count, rows));
                }
                let width: usize = dims[1..].iter().product();
                let mut out = dims.clone();
                out[0] = *count;
                slice(&t, first * width, &out)
            }
            Recipe::Experts { first, step, count, .. } if !by_rows => {
                let [e, k, n] = dims[..] else {
                    return Err(Error::shape("weights", "three axes are expected"));
                };
                if count == &0 || first + (count - 1) * step >= n {
                    return Err(too_small(first + count * step, n));
                }
                let one = count * k;
                picked(&t, &[e, *count, k], &|i| {
                    let (expert, at) = (i / one, i % one);
                    (expert * k + at % k) * n + first + at / k * step
                })
            }
            Recipe::Experts { first, step, count, .. } => expert_rows(&t, *first, *step, *count),
            Recipe::ExpertRows { first, count, .. } => expert_rows(&t, *first, 1, *count),
            Recipe::ExpertVector { first, step, .. } => {
                let [e, n] = dims[..] else { return Err(Error::shape("weights", "a matrix is expected")) };
                let count = (n - (*first).min(n)).div_ceil(*step);
                picked(&t, &[e, count], &|i| i / count * n + first + i % count * step)
            }
            Recipe::Grouped { before, take, after, .. } => {
                let (rows, all) = (dims.first().copied().unwrap_or(0), before + take + after);
                if all == 0 || dims.is_empty() || rows % all != 0 {
                    return Err(Error::shape("weights", format!("{rows} rows are not groups of {all}")));
                }
                let mut out = dims.clone();
                out[0] = rows / all * take;
                picked_rows(&t, &out, &|row| row / take * all + before + row % take)
            }
        }
    }
}

/// The rows of all parts, one after the other. Parts of different types are decoded to f32.
fn joined(parts: Vec<Weights>) -> Result<Weights> {
    let kind = |w: &Weights| (w.data.dtype, w.blocks);
    let same = parts.iter().all(|p| kind(p) == kind(&parts[0]));
    let parts: Vec<Weights> = match same {
        true => parts,
        false => parts.iter().map(Weights::decoded).collect::<Result<_>>()?,
    };
    let first = parts.first().ok_or_else(|| Error::shape("weights", "no parts"))?;
    let mut out = first.data.dims.to_vec();
    if let Some(rows) = out.first_mut() {
        *rows = parts.iter().filter_map(|p| p.data.dims.first()).sum();
    }
    let bytes: Vec<u8> = parts.iter().flat_map(|p| p.data.bytes().iter().copied()).collect();
    let data = halcyon_formats::data::from_bytes(first.data.dtype, &out, Bytes::from(bytes))?;
    Ok(Weights { data, blocks: first.blocks })
}

/// Of `[experts, rows, width]`: `count` rows of each expert, every `step`-th from `first` on.
fn expert_rows(t: &ConstData, first: usize, step: usize, count: usize) -> Result<ConstData> {
    let [e, n, k] = t.dims[..] else { return Err(Error::shape("weights", "three axes are expected")) };
    if count == 0 || first + (count - 1) * step >= n {
        let what = format!("it takes {} rows of a tensor with {n}", first + count * step);
        return Err(Error::shape("weights", what));
    }
    picked_rows(t, &[e, count, k], &|row| row / count * n + first + row % count * step)
}

/// A tensor of the rows `pick(0), pick(1), …`, which must exist. The last axis is that of a row.
fn picked_rows(t: &ConstData, dims: &[usize], pick: &dyn Fn(usize) -> usize) -> Result<ConstData> {
    let (width, rows) = match dims {
        // Each element of a vector is a row.
        [n] => (t.dtype.size(), *n),
        [rows @ .., width] => (width * t.dtype.size(), rows.iter().product()),
        [] => return Err(Error::shape("weights", "a vector or a matrix is expected")),
    };
    let mut to = Vec::with_capacity(rows * width);
    for row in 0..rows {
        let at = pick(row) * width;
        to.extend_from_slice(&t.bytes()[at..at + width]);
    }
    halcyon_formats::data::from_bytes(t.dtype, dims, Bytes::from(to))
}

/// `dims` elements from `first` on.
fn slice(t: &ConstData, first: usize, dims: &[usize]) -> Result<ConstData> {
    let size = t.dtype.size();
    let n: usize = dims.iter().product();
    let bytes = Bytes::copy_from_slice(&t.bytes()[first * size..(first + n) * size]);
    halcyon_formats::data::from_bytes(t.dtype, dims, bytes)
}
