//! A model in the form of a GGUF file.

use super::mixture::{self, MixtureOptions};
use crate::source::Source;
use bytes::Bytes;
use halcyon::DType;
use halcyon::ir::error::{Error, Result};
use halcyon_formats::gguf::{self, GgmlType, Gguf, TensorInfo, Value};
use std::fmt;

/// The version of the block formats, for `general.quantization_version`.
const BLOCKS_VERSION: u32 = 2;

/// Metadata and tensors. The tensors are read when they are needed.
#[derive(Debug)]
pub struct Content<'a> {
    pub metadata: Vec<(String, Value)>,
    /// In llama.cpp's order: tensors of no layer, then layer by layer, each sorted by name.
    pub tensors: Vec<Entry<'a>>,
    /// What the user should know: parts of the model that the file lacks.
    pub warnings: Vec<String>,
}

/// A tensor: its name, shape and stored type, and where its bytes come from.
pub struct Entry<'a> {
    pub info: TensorInfo,
    data: Data<'a>,
}

enum Data<'a> {
    Stored(Bytes),
    Made(Box<dyn Fn() -> Result<Bytes> + 'a>),
}

impl fmt::Debug for Entry<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.info.fmt(f)
    }
}

impl<'a> Entry<'a> {
    /// A tensor whose bytes `make` computes each time that they are read. They must have the length that
    /// `info` means.
    pub(super) fn made(info: TensorInfo, make: impl Fn() -> Result<Bytes> + 'a) -> Entry<'a> {
        Entry { info, data: Data::Made(Box::new(make)) }
    }

    /// The bytes in the stored type.
    ///
    /// # Errors
    /// Errors of reading.
    pub fn bytes(&self) -> Result<Bytes> {
        match &self.data {
            Data::Stored(b) => Ok(b.clone()),
            Data::Made(make) => make(),
        }
    }
}

/// A file of this metadata without tensors, for its readers.
pub(super) fn header(metadata: &[(String, Value)]) -> Result<Gguf> {
    Gguf::parse(gguf::encode(metadata, &[])?.into(), "the metadata")
}

impl<'a> Content<'a> {
    /// The content of a GGUF file.
    pub fn of_gguf(file: &'a Gguf) -> Content<'a> {
        // The new file is not split.
        let kept = |key: &str| !key.starts_with("split.");
        let metadata = file.metadata().entries().iter().filter(|(k, _)| kept(k)).cloned().collect();
        let entry = |t: &gguf::Tensor| Entry { info: t.info.clone(), data: Data::Stored(t.data.clone()) };
        Content::new(metadata, file.tensors().iter().map(entry).collect())
    }

    /// The content of a source.
    ///
    /// # Errors
    /// `Error::Unsupported` for a folder whose model a GGUF file cannot describe; errors of reading.
    pub fn of(source: &'a Source) -> Result<Content<'a>> {
        match source {
            Source::Gguf(file) => Ok(Content::of_gguf(file)),
            Source::Folder(folder) => super::folder::content(source, folder),
        }
    }

    pub(super) fn new(metadata: Vec<(String, Value)>, mut tensors: Vec<Entry<'a>>) -> Content<'a> {
        let place = |e: &Entry<'_>| mixture::layer(&e.info.name);
        tensors.sort_by(|a, b| place(a).cmp(&place(b)).then_with(|| a.info.name.cmp(&b.info.name)));
        Content { metadata, tensors, warnings: vec![] }
    }

    /// The types of the tensors in a file of this mixture. Sets the keys that name it.
    ///
    /// # Errors
    /// The errors of [`choose`](mixture::choose).
    pub fn quantise(&mut self, options: &MixtureOptions) -> Result<Vec<GgmlType>> {
        let infos: Vec<TensorInfo> = self.tensors.iter().map(|t| t.info.clone()).collect();
        let types = mixture::choose(header(&self.metadata)?.metadata(), &infos, options)?;
        self.set("general.quantization_version", BLOCKS_VERSION.into());
        self.set("general.file_type", options.file.number.into());
        Ok(types)
    }

    /// The types of the tensors if all floats and blocks become `dtype`: f32, f16 or bf16. Vectors, and
    /// matrices that are not quantised, become f32. Sets the keys that name the type.
    ///
    /// # Errors
    /// `Error::Argument` for another dtype.
    pub fn expand(&mut self, dtype: DType) -> Result<Vec<GgmlType>> {
        let file = match dtype {
            DType::F32 => 0u32,
            DType::F16 => 1,
            DType::BF16 => 32,
            other => return Err(Error::argument("convert", format!("{other}: expected f32, f16 or bf16"))),
        };
        self.set("general.file_type", file.into());
        let one = |t: &Entry<'_>| match t.info.ty {
            GgmlType::Plain(d) if !d.is_float() => t.info.ty,
            _ if mixture::is_quantised(&t.info) => GgmlType::Plain(dtype),
            _ => GgmlType::F32,
        };
        Ok(self.tensors.iter().map(one).collect())
    }

    /// Sets a key of the metadata.
    pub fn set(&mut self, key: &str, value: Value) {
        match self.metadata.iter_mut().find(|(k, _)| k == key) {
            Some((_, v)) => *v = value,
            None => self.metadata.push((key.into(), value)),
        }
    }
}
