//! GGUF files: metadata and tensors of a language model, as llama.cpp uses them. Versions 2 and 3,
//! little-endian.
//!
//! A file has a header (`GGUF`, the version, two counts), the metadata, a table of tensors and the tensors'
//! bytes. Every tensor begins at a multiple of the alignment: 32, or what the key `general.alignment` says. A
//! large model may have several files, its parts: `NAME-00001-of-00003.gguf` and so on. The first of them has
//! the metadata.
//!
//! The file is mapped, and a tensor is a slice of the map. Everything in the file is checked when it is
//! opened, except that strings may be invalid UTF-8 ([`Value::Bytes`]), because some vocabularies have such
//! tokens.

mod read;
mod types;
mod value;
mod write;

pub use types::{GgmlType, LISTED, ListedRow};
pub use value::{Array, Metadata, Value};
pub use write::{GgufWriter, encode, write};

use crate::{ConstData, bad};
use bytes::Bytes;
use halcyon_ir::shape::Dims;
use halcyon_ir::{DType, Error, Result};
use read::Part;
use std::path::{Path, PathBuf};

/// The alignment of tensors in a file whose metadata does not set it.
const ALIGNMENT: u64 = 32;
/// The largest accepted alignment. Huge pages have 2 MiB.
const MAX_ALIGNMENT: u64 = 1 << 24;
/// The most axes of a tensor.
const MAX_DIMS: usize = 4;
/// The most bytes of a key or a tensor's name.
const MAX_NAME: usize = 65_535;
/// The most levels of arrays in a metadata value.
const MAX_DEPTH: usize = 8;
/// The most files of a model: their names have five digits.
const MAX_PARTS: u64 = 99_999;

/// A tensor's name, shape and element type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    pub name: String,
    /// Sizes in elements, the outermost axis first: a matrix of `n` rows with `k` elements is `[n, k]`. (The
    /// file has them in the opposite order.)
    pub shape: Dims,
    pub ty: GgmlType,
}

impl TensorInfo {
    pub fn new(name: impl Into<String>, shape: &[usize], ty: GgmlType) -> TensorInfo {
        TensorInfo { name: name.into(), shape: shape.into(), ty }
    }

    /// The number of elements.
    pub fn elements(&self) -> usize {
        // `byte_len` has checked that this does not overflow.
        self.shape.iter().fold(1, |n: usize, d| n.saturating_mul(*d))
    }

    /// Bytes of a row: of the elements along the last axis. A scalar is one row of one element. `None` if the
    /// row does not consist of whole blocks.
    fn row_bytes(&self) -> Option<usize> {
        self.ty.row_bytes(self.shape.last().copied().unwrap_or(1))
    }

    /// Bytes of the tensor, or what is wrong with its shape. In the check of the size, an axis of size 0
    /// counts as 1, so that strides do not overflow either.
    fn byte_len(&self) -> std::result::Result<usize, String> {
        let (ty, shape) = (self.ty, &self.shape);
        let k = shape.last().copied().unwrap_or(1);
        let too_large = || format!("{ty}{:?} is too large to address", shape.as_slice());
        if !k.is_multiple_of(ty.elements()) {
            let per = ty.elements();
            return Err(format!(
                "a row of {k} elements does not consist of whole blocks of {ty}, which have {per}"
            ));
        }
        let row = ty.row_bytes(if k == 0 { ty.elements() } else { k }).ok_or_else(too_large)?;
        // The elements are counted too: a block type may have more of them than bytes.
        let bound = |innermost: usize| {
            let outer = &shape[..shape.len().saturating_sub(1)];
            let n = outer.iter().try_fold(innermost.max(1), |n, d| n.checked_mul((*d).max(1)));
            // The number of bits must be addressable, as for every tensor.
            n.filter(|n| *n <= isize::MAX as usize / 8)
        };
        let (bytes, _) = bound(row).zip(bound(k)).ok_or_else(too_large)?;
        Ok(if shape.contains(&0) { 0 } else { bytes })
    }
}

/// A tensor of an open file.
#[derive(Clone, Debug)]
pub struct Tensor {
    pub info: TensorInfo,
    /// The tensor's bytes: a slice of the mapped file, in row-major order.
    pub data: Bytes,
}

impl Tensor {
    pub fn name(&self) -> &str {
        &self.info.name
    }

    /// Sizes in elements, the outermost axis first.
    pub fn shape(&self) -> &[usize] {
        &self.info.shape
    }

    pub fn ty(&self) -> GgmlType {
        self.info.ty
    }

    /// The tensor without a copy of its bytes. A plain type gives its dtype and the shape. A block type gives
    /// `u8` with the leading axes and, as the last axis, the bytes of a row: `[n, k]` becomes
    /// `[n, k / elements * bytes]`.
    ///
    /// # Errors
    /// None for a tensor of an open file. [`Error::Shape`] if the fields were changed and do not fit.
    pub fn to_const(&self) -> Result<ConstData> {
        if let GgmlType::Plain(dtype) = self.info.ty {
            return crate::data::from_bytes(dtype, &self.info.shape, self.data.clone());
        }
        let mut dims = self.info.shape.clone();
        let row = self.info.byte_len().ok().and_then(|_| self.info.row_bytes());
        let (Some(last), Some(row)) = (dims.last_mut(), row) else {
            let what = format!("the rows of '{}' do not consist of whole blocks", self.info.name);
            return Err(Error::shape("gguf", what));
        };
        *last = row;
        crate::data::from_bytes(DType::U8, &dims, self.data.clone())
    }
}

/// An open model: a file, or all its parts. Its tensors are slices of the files.
///
/// ```no_run
/// # fn main() -> halcyon_ir::Result<()> {
/// let file = halcyon_formats::gguf::Gguf::open("model.gguf".as_ref())?;
/// println!("{}", file.metadata().str("general.architecture")?);
/// for t in file.tensors() {
///     println!("{}: {} {:?}", t.name(), t.ty(), t.shape());
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Gguf {
    /// The name of the file that was opened, for errors.
    file: String,
    version: u32,
    alignment: u64,
    metadata: Metadata,
    tensors: Vec<Tensor>,
    /// The indices of the tensors, sorted by name.
    order: Vec<u32>,
    paths: Vec<PathBuf>,
    bytes: u64,
}

impl Gguf {
    /// Opens a file. If it is one part of a model, opens all parts, which must be in the same folder.
    ///
    /// # Errors
    /// [`Error::Io`], also for a part that is missing; [`Error::Format`] for a malformed file, or parts that
    /// do not belong together; [`Error::Unsupported`] for a big-endian file, another version of the format,
    /// or an element type that is not known.
    pub fn open(path: &Path) -> Result<Gguf> {
        let name = path.display().to_string();
        let data = crate::mmap::open(path)?;
        let opened = Part::parse(&data, &name)?;
        let Some((no, count)) = place_among_parts(&opened.metadata, &name)? else {
            return Gguf::join(name, vec![(path.into(), data.len() as u64, opened)]);
        };
        let stem = stem(path, no, count).ok_or_else(|| {
            let want = format!("-{:05}-of-{count:05}.gguf", no + 1);
            let what = "so the other parts cannot be found. Give the file its original name";
            bad(
                &name,
                format!("it is part {} of {count}, but its name does not end in {want}, {what}", no + 1),
            )
        })?;
        let mut opened = Some((path.to_path_buf(), data.len() as u64, opened));
        let mut parts = vec![];
        for k in 0..count {
            if k == no {
                parts.extend(opened.take());
                continue;
            }
            let p = path.with_file_name(format!("{stem}-{:05}-of-{count:05}.gguf", k + 1));
            if !p.exists() {
                let part = format!("no such file: it is part {} of {count} of the model, like {name}", k + 1);
                let what = format!("{part}. Put all parts into one folder");
                return Err(Error::Io { path: p.display().to_string(), what });
            }
            let (data, own) = (crate::mmap::open(&p)?, p.display().to_string());
            let part = Part::parse(&data, &own)?;
            if place_among_parts(&part.metadata, &own)? != Some((k, count)) {
                let what = format!("its metadata does not say that it is part {} of {count}", k + 1);
                return Err(bad(&own, format!("{what}. It belongs to another model, or was renamed")));
            }
            parts.push((p, data.len() as u64, part));
        }
        Gguf::join(name, parts)
    }

    /// Like [`Gguf::open`], for a file in memory. `file` names it in errors.
    ///
    /// # Errors
    /// Those of [`Gguf::open`], and [`Error::Unsupported`] for one part of a model.
    pub fn parse(data: Bytes, file: &str) -> Result<Gguf> {
        let part = Part::parse(&data, file)?;
        if let Some((no, count)) = place_among_parts(&part.metadata, file)? {
            return Err(Error::unsupported(
                format!("{file}: part {} of {count} of a model, without the others", no + 1),
                "Open it by its path",
            ));
        }
        Gguf::join(file.into(), vec![(file.into(), data.len() as u64, part)])
    }

    /// The model of all parts, in order.
    fn join(file: String, parts: Vec<(PathBuf, u64, Part)>) -> Result<Gguf> {
        let mut parts = parts.into_iter();
        let Some((path, mut bytes, first)) = parts.next() else {
            return Err(Error::internal("a GGUF model without files"));
        };
        let Part { version, alignment, metadata, mut tensors } = first;
        let mut paths = vec![path];
        for (path, n, part) in parts {
            tensors.extend(part.tensors);
            paths.push(path);
            bytes = bytes.saturating_add(n);
        }
        let total = metadata.maybe("split.tensors.count", Metadata::u64)?;
        if let Some(n) = total.filter(|n| *n != tensors.len() as u64 && paths.len() > 1) {
            let what =
                format!("the model has {n} tensors, but its {} files have {}", paths.len(), tensors.len());
            return Err(bad(&file, format!("{what}. The files do not belong together")));
        }
        let order = value::sorted(tensors.iter().map(Tensor::name))
            .map_err(|n| bad(&file, format!("two tensors are called '{n}'")))?;
        Ok(Gguf { file, version, alignment, metadata, tensors, order, paths, bytes })
    }

    /// The version of the format: 2 or 3.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// The alignment of tensors in bytes. In a model of several files, that of the first one.
    pub fn alignment(&self) -> u64 {
        self.alignment
    }

    /// The metadata. In a model of several files, that of the first one.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// The tensors, in the order of the files.
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// The tensor with this name, if there is one.
    pub fn find(&self, name: &str) -> Option<&Tensor> {
        let i = self.order.binary_search_by_key(&name, |i| self.tensors[*i as usize].name()).ok()?;
        Some(&self.tensors[self.order[i] as usize])
    }

    /// The tensor with this name.
    ///
    /// # Errors
    /// [`Error::Argument`] if there is none.
    pub fn tensor(&self, name: &str) -> Result<&Tensor> {
        let none = || Error::argument("gguf", format!("{} has no tensor '{name}'", self.file));
        self.find(name).ok_or_else(none)
    }

    /// The files, in order. More than one if the model has parts.
    pub fn paths(&self) -> &[PathBuf] {
        &self.paths
    }

    /// The bytes of all files.
    pub fn file_bytes(&self) -> u64 {
        self.bytes
    }
}

/// Index and number of the parts, from the metadata. `None` for a model in one file.
fn place_among_parts(m: &Metadata, file: &str) -> Result<Option<(u64, u64)>> {
    let count = m.maybe("split.count", Metadata::u64)?.unwrap_or(0);
    if count <= 1 {
        return Ok(None);
    }
    let no = m.u64("split.no")?;
    match no < count && count <= MAX_PARTS {
        true => Ok(Some((no, count))),
        false => Err(bad(file, format!("it is part {no}, counted from 0, of {count}"))),
    }
}

/// The file name of a part without its number. `None` if the name does not end in this number.
fn stem(path: &Path, no: u64, count: u64) -> Option<String> {
    let name = path.file_name()?.to_str()?;
    name.strip_suffix(&format!("-{:05}-of-{count:05}.gguf", no + 1)).map(String::from)
}

#[cfg(test)]
mod tests;
