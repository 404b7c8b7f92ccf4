//! Folders in Hugging Face's layout: `config.json`, and safetensors files, perhaps with an index.

use super::names::recipes;
use super::{Weights, picked};
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
}

fn io(path: &Path, what: impl ToString) -> Error {
    Error::Io { path: path.display().to_string(), what: what.to_string() }
}

fn bad(path: &Path, what: impl Into<String>) -> Error {
    Error::Format { file: path.display().to_string(), what: what.into() }
}

/// Reads a JSON file of the folder.
fn json(path: &Path) -> Result<Value> {
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
            let what =
                "the folder has no config.json; a model's folder has config.json and safetensors files";
            return Err(io(path, what));
        }
        let config = json(&config)?;
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
        Ok(Folder { path: path.into(), config, files, at })
    }

    /// The folder's path.
    pub fn path(&self) -> &Path {
        &self.path
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

    fn has(&self, name: &str) -> bool {
        self.at.contains_key(name)
    }

    fn get(&self, name: &str) -> Result<ConstData> {
        let file = self.at.get(name).ok_or_else(|| bad(&self.path, format!("it has no tensor '{name}'")))?;
        self.files[*file].get(name)
    }

    pub(super) fn find(&self, spec: &Spec, name: &str) -> Result<Option<Weights>> {
        for recipe in recipes(spec, name) {
            for prefix in PREFIXES {
                if self.has(&recipe.source(prefix)) {
                    let data = recipe.make(self, prefix).map_err(|e| match e {
                        Error::Shape { what, .. } => bad(&self.path, format!("{name}: {what}")),
                        e => e,
                    })?;
                    return Ok(Some(Weights { data, blocks: None }));
                }
            }
        }
        Ok(None)
    }
}

/// What stands before the names of tensors, by how the model was saved.
const PREFIXES: &[&str] = &["model.", "", "transformer.", "model.language_model.", "language_model.model."];

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
    fn name(&self) -> String {
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

    fn make(&self, f: &Folder, prefix: &str) -> Result<ConstData> {
        let t = f.get(&self.source(prefix))?;
        let elements = |t: &ConstData, dims: &[usize], pick: &dyn Fn(usize) -> usize| -> Result<ConstData> {
            picked(t, dims, pick)
        };
        let dims = t.dims.to_vec();
        let too_small = |want: usize, has: usize| {
            Error::shape("weights", format!("it takes {want} rows of a tensor with {has}"))
        };
        match self {
            Recipe::Plain(_) => Ok(t),
            Recipe::MinusExp(_) => {
                let values: Vec<f32> = super::floats(&t)?.iter().map(|v| -v.exp()).collect();
                ConstData::from_slice(&dims, &values)
            }
            Recipe::Joined(parts) => {
                let parts = parts.iter().map(|p| p.make(f, prefix)).collect::<Result<Vec<_>>>()?;
                let mut out = parts.first().map(|p| p.dims.to_vec()).unwrap_or_default();
                if let Some(rows) = out.first_mut() {
                    *rows = parts.iter().filter_map(|p| p.dims.first()).sum();
                }
                let bytes: Vec<u8> = parts.iter().flat_map(|p| p.bytes().iter().copied()).collect();
                halcyon_formats::data::from_bytes(t.dtype, &out, Bytes::from(bytes))
            }
            Recipe::Rows(_, first, count) => {
                let rows = dims.first().copied().unwrap_or(0);
                if first + count > rows {
                    return Err(too_small(first + count, rows));
                }
                let width: usize = dims[1..].iter().product();
                let mut out = dims.clone();
                out[0] = *count;
                slice(&t, first * width, &out)
            }
            Recipe::TransposedRows(_, first, count) => {
                let [k, n] = dims[..] else { return Err(Error::shape("weights", "a matrix is expected")) };
                if first + count > n {
                    return Err(too_small(first + count, n));
                }
                elements(&t, &[*count, k], &|i| (i % k) * n + first + i / k)
            }
            Recipe::Stack(name, count) => {
                let one = |e: usize| f.get(&format!("{prefix}{}", name.replace("{}", &e.to_string())));
                let mut bytes = Vec::new();
                for e in 0..*count {
                    let next = one(e)?;
                    if next.dims != t.dims || next.dtype != t.dtype {
                        return Err(Error::shape(
                            "weights",
                            format!("expert {e} differs in type from expert 0"),
                        ));
                    }
                    bytes.extend_from_slice(next.bytes());
                }
                let out: Vec<usize> = std::iter::once(*count).chain(dims).collect();
                halcyon_formats::data::from_bytes(t.dtype, &out, Bytes::from(bytes))
            }
            Recipe::Experts { first, step, count, .. } => {
                let [e, k, n] = dims[..] else {
                    return Err(Error::shape("weights", "three axes are expected"));
                };
                if count == &0 || first + (count - 1) * step >= n {
                    return Err(too_small(first + count * step, n));
                }
                let one = count * k;
                elements(&t, &[e, *count, k], &|i| {
                    let (expert, at) = (i / one, i % one);
                    (expert * k + at % k) * n + first + at / k * step
                })
            }
            Recipe::ExpertRows { first, count, .. } => {
                let [e, n, k] = dims[..] else {
                    return Err(Error::shape("weights", "three axes are expected"));
                };
                if first + count > n {
                    return Err(too_small(first + count, n));
                }
                let one = count * k;
                elements(&t, &[e, *count, k], &|i| (i / one * n + first) * k + i % one)
            }
            Recipe::ExpertVector { first, step, .. } => {
                let [e, n] = dims[..] else { return Err(Error::shape("weights", "a matrix is expected")) };
                let count = (n - (*first).min(n)).div_ceil(*step);
                elements(&t, &[e, count], &|i| i / count * n + first + i % count * step)
            }
            Recipe::Grouped { before, take, after, .. } => {
                let (rows, all) = (dims.first().copied().unwrap_or(0), before + take + after);
                if all == 0 || dims.is_empty() || rows % all != 0 {
                    return Err(Error::shape("weights", format!("{rows} rows are not groups of {all}")));
                }
                let width: usize = dims[1..].iter().product();
                let mut out = dims.clone();
                out[0] = rows / all * take;
                elements(&t, &out, &|i| {
                    let (row, column) = (i / width, i % width);
                    (row / take * all + before + row % take) * width + column
                })
            }
        }
    }
}

/// `dims` elements from `first` on.
fn slice(t: &ConstData, first: usize, dims: &[usize]) -> Result<ConstData> {
    let size = t.dtype.size();
    let n: usize = dims.iter().product();
    let bytes = Bytes::copy_from_slice(&t.bytes()[first * size..(first + n) * size]);
    halcyon_formats::data::from_bytes(t.dtype, dims, bytes)
}
