//! Where weights come from: a GGUF file, or a folder in Hugging Face's layout. Weights have GGUF's names in
//! both: `blk.0.attn_q.weight`.

mod encoders;
mod folder;
pub(crate) mod gguf;
mod names;
mod packed;
mod places;
mod quantised;

use crate::spec::Spec;
use bytes::Bytes;
pub use folder::Folder;
pub(crate) use folder::{Module, json, module_names};
use halcyon::ir::error::{Error, Result};
use halcyon::{BlockType, ConstData, DType};
use halcyon_formats::foreign::{self, Foreign};
use halcyon_formats::gguf::Gguf;
pub(crate) use places::{Place, places};
use std::io::Read;
use std::path::Path;

/// An open model.
#[derive(Debug)]
pub enum Source {
    Gguf(Gguf),
    Folder(Folder),
}

/// A tensor of weights.
#[derive(Clone, Debug)]
pub struct Weights {
    /// The values, or the bytes of blocks: u8 with the bytes of a row as its last axis.
    pub data: ConstData,
    pub blocks: Option<BlockType>,
}

impl Weights {
    /// Sizes in elements.
    pub fn dims(&self) -> Vec<usize> {
        let mut d: Vec<usize> = self.data.dims.to_vec();
        if let (Some(last), Some(b)) = (d.last_mut(), self.blocks) {
            *last = b.elements_of(*last).unwrap_or(0);
        }
        d
    }

    /// The values in f32.
    pub(crate) fn decoded(&self) -> Result<Weights> {
        Ok(Weights { data: ConstData::from_slice(&self.dims(), &self.floats()?)?, blocks: None })
    }

    /// The values, decoded if they are in blocks.
    ///
    /// # Errors
    /// Those of a cast to f32.
    pub fn floats(&self) -> Result<Vec<f32>> {
        match self.blocks {
            None => floats(&self.data),
            Some(b) => {
                let mut v = vec![0f32; self.dims().iter().product()];
                b.decode(self.data.bytes(), &mut v);
                Ok(v)
            }
        }
    }

    /// Weights without blocks of the elements `pick(0), pick(1), …`.
    ///
    /// # Errors
    /// `Error::Shape` if one of the elements does not exist.
    pub(crate) fn picked(&self, dims: &[usize], pick: &dyn Fn(usize) -> usize) -> Result<Weights> {
        Ok(Weights { data: picked(&self.data, dims, pick)?, blocks: None })
    }
}

/// A tensor of the elements `pick(0), pick(1), …` of `t`.
pub(crate) fn picked(t: &ConstData, dims: &[usize], pick: &dyn Fn(usize) -> usize) -> Result<ConstData> {
    let size = t.dtype.size();
    let (from, n) = (t.bytes(), dims.iter().product::<usize>());
    let mut to = Vec::with_capacity(n * size);
    for i in 0..n {
        let at = pick(i).saturating_mul(size);
        let one = from.get(at..at.saturating_add(size));
        to.extend_from_slice(one.ok_or_else(|| Error::shape("weights", "an element does not exist"))?);
    }
    halcyon_formats::data::from_bytes(t.dtype, dims, Bytes::from(to))
}

impl Source {
    /// Opens a GGUF file, or a folder with `config.json` and safetensors files. A name such as
    /// `hf:ORG/REPO:Q4_K_M` stands for a model of the Hugging Face Hub ([`crate::hub`]).
    ///
    /// # Errors
    /// Errors of reading: `Error::Io` for a folder without `config.json`, `Error::Format` for a file of
    /// another kind.
    pub fn open(path: &Path) -> Result<Source> {
        let path = &crate::hub::local(path)?;
        if path.is_dir() {
            return Ok(Source::Folder(Folder::open(path)?));
        }
        Gguf::open(path).map(Source::Gguf).map_err(|e| no_gguf(path, e))
    }

    /// What the user should know before the weights are loaded.
    ///
    /// # Errors
    /// Errors of reading the scales of quantised weights.
    pub fn warnings(&self) -> Result<Vec<String>> {
        match self {
            Source::Gguf(file) => Ok(gguf::warnings(file)),
            Source::Folder(folder) => folder.warnings(),
        }
    }

    /// The tensor with a canonical name, if the model has it. `spec` gives the sizes by which tensors that
    /// hold several matrices are divided.
    ///
    /// # Errors
    /// Errors of reading; `Error::Unsupported` for an element type that is not supported.
    pub fn find(&self, spec: &Spec, name: &str) -> Result<Option<Weights>> {
        match self {
            Source::Gguf(file) => gguf::find(file, spec, name),
            Source::Folder(folder) => folder.find(spec, name),
        }
    }
}

impl Source {
    /// The module in Hugging Face's layout that has the matrix with the canonical name `stem`. `None` if the
    /// model has no such matrix, or it belongs to no module, as experts do that are stored together.
    pub(crate) fn module(&self, spec: &Spec, stem: &str) -> Option<Module> {
        match self {
            Source::Folder(folder) => folder.module(spec, stem),
            Source::Gguf(file) => {
                let name = format!("{stem}.weight");
                gguf::place(file, spec, stem)?;
                let usual = places::preferred(spec, &name, |r| Module::of("", r).is_some())?;
                Module::of(places::prefix(spec, &name, &usual), &usual)
            }
        }
    }
}

/// The error `e` of a file that cannot be opened as a GGUF file, with what it is instead.
fn no_gguf(path: &Path, e: Error) -> Error {
    let Error::Format { file, what } = e else { return e };
    let mut head = vec![];
    let read = std::fs::File::open(path).and_then(|f| f.take(1 << 16).read_to_end(&mut head));
    if read.is_err() || head.starts_with(b"GGUF") {
        return Error::Format { file, what };
    }
    if head.len() < 4 && !head.is_empty() {
        let what = format!("not a GGUF file: it has only {} bytes. Download or make it again", head.len());
        return Error::Format { file, what };
    }
    let what = match foreign::kind(&head) {
        // A safetensors file is recognised by its whole length.
        None if path.extension().is_some_and(|x| x == "safetensors") => {
            "not a GGUF file: this is a safetensors file. Give the folder in which it and config.json are"
                .into()
        }
        Some(k @ Foreign::SafeTensors) => {
            format!("not a GGUF file: this is {k}. Give the folder in which it and config.json are")
        }
        Some(k @ (Foreign::Empty | Foreign::GitLfs | Foreign::Html)) => {
            format!("not a GGUF file: this is {k}. {}", k.advice())
        }
        Some(k) => format!("not a GGUF file: this is {k}. Give a GGUF file, or a folder with config.json"),
        None => what,
    };
    Error::Format { file, what }
}

/// The values of `data` as f32.
pub(crate) fn floats(data: &ConstData) -> Result<Vec<f32>> {
    Ok(halcyon_formats::data::cast(data, DType::F32)?.to_vec::<f32>())
}
