//! ONNX tensors: converts `TensorProto` to [`ConstData`] and back, and reads external data and `.pb` files.

use super::proto::{EXTERNAL, TensorProto};
use crate::foreign::{self, Foreign};
use crate::{ConstData, bad};
use bytes::Bytes;
use halcyon_ir::{DType, Error, Result};
use prost::Message;
use std::collections::HashMap;
use std::path::{Component, Path, PathBuf};
use std::sync::Mutex;

/// The folder of a model's external data, with the files mapped so far.
#[derive(Debug, Default)]
pub struct External {
    dir: Option<PathBuf>,
    /// Whether symbolic links may lead out of the folder.
    links: bool,
    maps: Mutex<HashMap<PathBuf, Bytes>>,
}

impl Clone for External {
    fn clone(&self) -> External {
        let maps = self.maps.lock().unwrap_or_else(|e| e.into_inner()).clone();
        External { dir: self.dir.clone(), links: self.links, maps: Mutex::new(maps) }
    }
}

impl External {
    /// External data in the folder of the model file `model`.
    pub fn in_folder_of(model: &Path) -> External {
        let dir = match model.parent() {
            Some(d) if !d.as_os_str().is_empty() => d,
            _ => Path::new("."),
        };
        External { dir: Some(dir.into()), links: false, maps: Mutex::default() }
    }

    /// Sets whether files may be symbolic links that lead out of the model's folder. By default only links
    /// within a Hugging Face cache may.
    pub fn links(self, allowed: bool) -> External {
        External { links: allowed, ..self }
    }

    /// Adds the contents of a file that is read instead of the file `name` in the folder.
    pub fn with_file(mut self, name: &str, contents: Bytes) -> External {
        let path = self.path(name);
        self.maps.get_mut().unwrap_or_else(|e| e.into_inner()).insert(path, contents);
        self
    }

    /// Total bytes of the mapped files.
    pub(super) fn mapped(&self) -> usize {
        let maps = self.maps.lock().unwrap_or_else(|e| e.into_inner());
        maps.values().map(Bytes::len).fold(0, usize::saturating_add)
    }

    /// Whether these bytes are part of a mapped file.
    pub(super) fn holds(&self, bytes: &[u8]) -> bool {
        let maps = self.maps.lock().unwrap_or_else(|e| e.into_inner());
        maps.values().any(|m| inside(m, bytes))
    }

    /// No folder, for a model that does not come from a file: every external tensor is an error.
    pub fn none() -> External {
        External::default()
    }

    fn path(&self, location: &str) -> PathBuf {
        self.dir.as_ref().map_or_else(|| location.into(), |d| d.join(location))
    }

    /// The bytes that `t` refers to. `want` is the size in bytes that follows from its type and sizes.
    ///
    /// The location must be a relative path without `..`. The file must also lie in the model's folder after
    /// symbolic links are resolved, unless a link stays in its Hugging Face cache or [`External::links`]
    /// allows it. Otherwise a downloaded model, or an archive with links, could read any file of the machine.
    fn slice(&self, t: &TensorProto, want: usize, what: &str) -> Result<Bytes> {
        let fail = |why: String| bad(what, why);
        let entry = |key: &str| t.external_data.iter().find(|e| e.key == key).map(|e| e.value.as_str());
        let number = |key: &str| match entry(key) {
            None => Ok(None),
            Some(v) => {
                v.parse::<usize>().map(Some).map_err(|_| fail(format!("external {key} '{v}' is not a size")))
            }
        };
        let location =
            entry("location").ok_or_else(|| fail("the tensor is external, but has no location".into()))?;
        // Backslashes and drive letters mean different things on different systems, so they are rejected on
        // all.
        let plain = !location.is_empty()
            && !location.contains(['\\', ':', '\0'])
            && Path::new(location)
                .components()
                .all(|c| matches!(c, Component::Normal(_) | Component::CurDir));
        if !plain {
            return Err(fail(format!("external location '{location}' leaves the model's folder")));
        }
        let offset = number("offset")?.unwrap_or(0);
        let path = self.path(location);
        let mut maps =
            self.maps.lock().map_err(|_| Error::internal("a thread ended while mapping weights"))?;
        let map = match maps.get(&path) {
            Some(m) => m,
            None => {
                let dir = self.dir.as_ref().ok_or_else(|| {
                    fail("the tensor is external, but the model does not come from a file".into())
                })?;
                if !self.links {
                    check_inside(dir, &path).map_err(|to| fail(leads_out(location, &to)))?;
                }
                let m = crate::mmap::open(&path)
                    .map_err(|e| if path.exists() { e } else { missing_file(&path, what) })?;
                if let Some(k @ (Foreign::GitLfs | Foreign::Html)) = foreign::kind(&m) {
                    let file = path.display().to_string();
                    return Err(bad(
                        &file,
                        format!("this should be weights of the model, but is {k}. {}", k.advice()),
                    ));
                }
                maps.entry(path.clone()).or_insert(m)
            }
        };
        let rest = map.len().checked_sub(offset).ok_or_else(|| {
            fail(format!("external offset {offset} is past the {} bytes of {location}", map.len()))
        })?;
        // Without a length, the tensor's own size is used.
        let length = number("length")?.unwrap_or(want);
        if length != want {
            return Err(fail(format!("external length {length}, but the tensor takes {want} bytes")));
        }
        if length > rest {
            return Err(fail(format!(
                "external bytes {offset}..+{length} are past the {} bytes of {location}",
                map.len()
            )));
        }
        Ok(map.slice(offset..offset + length))
    }
}

/// The error for a missing file of weights.
fn missing_file(path: &Path, what: &str) -> Error {
    Error::Io {
        path: path.display().to_string(),
        what: format!(
            "there is no such file, and these are the model's weights ({what} is in it). Put the file there under this name: it comes with the \
             model, from the same page or export"
        ),
    }
}

fn leads_out(location: &str, to: &Path) -> String {
    format!(
        "external data '{location}' is a link to {}, outside of the model's folder. If you put it there, allow it with \
         --allow-external-links (in Rust OpenOptions::external_links), or copy the file into the folder",
        to.display()
    )
}

/// Resolves the symbolic links of a file in the folder `dir`, and checks that the target lies in this folder
/// or in the Hugging Face cache that contains the folder (the `snapshots` of the cache link to its `blobs`).
/// The error is the path that the links lead to. Missing files pass; opening them reports the error.
fn check_inside(dir: &Path, path: &Path) -> std::result::Result<(), PathBuf> {
    let (Ok(base), Ok(to)) = (dir.canonicalize(), path.canonicalize()) else { return Ok(()) };
    if to.starts_with(&base) {
        return Ok(());
    }
    let named = |p: &Path, start: &str| p.file_name().is_some_and(|n| n.to_string_lossy().starts_with(start));
    let cache = base.ancestors().find(|p| named(p, "models--"));
    match cache {
        Some(c) if base.starts_with(c.join("snapshots")) && to.starts_with(c.join("blobs")) => Ok(()),
        _ => Err(to),
    }
}

/// Whether `part` is a range of `whole`.
pub(super) fn inside(whole: &[u8], part: &[u8]) -> bool {
    let (w, p) = (whole.as_ptr_range(), part.as_ptr_range());
    w.start <= p.start && p.end <= w.end
}

/// `TensorProto.DataType.STRING`.
pub const STRING: i32 = 8;

/// Reads a tensor of strings.
///
/// # Errors
/// [`Error::Format`] if the elements are not strings, the sizes and the number of strings disagree, or a
/// string is not UTF-8.
pub fn decode_text(t: &TensorProto, file: &str) -> Result<super::item::Text> {
    let what = if t.name.is_empty() { file.to_string() } else { format!("{file}: tensor '{}'", t.name) };
    if t.data_type != STRING {
        return Err(bad(&what, format!("element type {} where strings are expected", t.data_type)));
    }
    let dims = sizes(&t.dims, &what)?;
    if dims.iter().try_fold(1usize, |n, d| n.checked_mul(*d)) != Some(t.string_data.len()) {
        return Err(bad(&what, format!("{} strings do not fill {dims:?}", t.string_data.len())));
    }
    let text = |b: &Bytes| {
        std::str::from_utf8(b).map(str::to_string).map_err(|_| bad(&what, "a string is not valid UTF-8"))
    };
    let vals = t.string_data.iter().map(text).collect::<Result<_>>()?;
    Ok(super::item::Text { dims, vals })
}

/// Names of the `TensorProto.DataType` codes that [`DType`] lacks.
const OTHER_TYPES: &[(i32, &str)] =
    &[(8, "string"), (14, "complex64"), (15, "complex128"), (27, "float6e2m3"), (28, "float6e3m2")];

/// ONNX's name of a type that [`DType`] lacks.
pub(super) fn type_name(code: i32) -> &'static str {
    OTHER_TYPES.iter().find(|(c, _)| *c == code).map_or("no known type", |(_, name)| name)
}

/// The dtype of an ONNX type code.
///
/// # Errors
/// [`Error::Unsupported`] for ONNX types that [`DType`] lacks, [`Error::Format`] for unknown codes; `what`
/// names the tensor.
pub fn dtype(code: i32, what: &str) -> Result<DType> {
    DType::from_onnx(code).ok_or_else(|| match OTHER_TYPES.iter().find(|(c, _)| *c == code) {
        Some((_, name)) => Error::unsupported(
            format!("element type {name} of {what}"),
            "Export the model with another element type",
        ),
        None => bad(what, format!("{code} is not an ONNX element type")),
    })
}

/// Converts sizes to `usize`.
///
/// # Errors
/// [`Error::Format`] for negative sizes; `what` names the tensor.
pub fn sizes(dims: &[i64], what: &str) -> Result<Vec<usize>> {
    dims.iter()
        .map(|&d| usize::try_from(d).map_err(|_| bad(what, format!("{dims:?} has a negative size"))))
        .collect()
}

/// Decodes a tensor. `file` names its file in errors.
///
/// # Errors
/// [`Error::Format`] if sizes, type and data disagree, or the location of external data is missing or not
/// allowed; [`Error::Unsupported`] for segmented tensors and element types that [`DType`] lacks;
/// [`Error::Io`] for an external file that cannot be read.
pub fn decode(t: &TensorProto, external: &External, file: &str) -> Result<ConstData> {
    let what = if t.name.is_empty() { file.to_string() } else { format!("{file}: tensor '{}'", t.name) };
    let dtype = dtype(t.data_type, &what)?;
    let dims = sizes(&t.dims, &what)?;
    let want = crate::data::byte_len(dtype, &dims)
        .ok_or_else(|| bad(&what, format!("{dtype}{dims:?} is too large to address")))?;
    if t.segment.is_some() {
        return Err(Error::unsupported(
            format!("{what} is stored in segments"),
            "Save the model again without segments",
        ));
    }
    let bytes = if t.data_location == EXTERNAL {
        external.slice(t, want, &what)?
    } else if let Some(raw) = &t.raw_data {
        raw.clone()
    } else {
        typed(t, dtype, &what)?
    };
    if bytes.len() != want {
        return Err(bad(
            &what,
            format!("{dtype}{dims:?} takes {want} bytes, but {} are stored", bytes.len()),
        ));
    }
    crate::data::from_bytes(dtype, &dims, bytes)
}

/// Decodes the typed field that holds elements of `dtype`, as the comments of TensorProto in onnx.proto
/// specify.
fn typed(t: &TensorProto, dtype: DType, what: &str) -> Result<Bytes> {
    fn pack<T: Copy, const N: usize>(v: &[T], f: impl Fn(T) -> [u8; N]) -> Bytes {
        v.iter().flat_map(|&x| f(x)).collect::<Vec<u8>>().into()
    }
    // Integers under 32 bits are stored one per `int32_data` entry and must be in range. Half and 8-bit
    // floats are stored as their bits, types under 8 bits as packed bytes.
    let narrow = |lo: i32, hi: i32, size: usize| {
        let mut out = Vec::with_capacity(t.int32_data.len() * size);
        for &v in &t.int32_data {
            if v < lo || v > hi {
                return Err(bad(what, format!("{v} does not fit {dtype}")));
            }
            out.extend_from_slice(&v.to_le_bytes()[..size]);
        }
        Ok(Bytes::from(out))
    };
    Ok(match dtype {
        DType::F32 => pack(&t.float_data, f32::to_le_bytes),
        DType::F64 => pack(&t.double_data, f64::to_le_bytes),
        DType::I64 => pack(&t.int64_data, i64::to_le_bytes),
        DType::U64 => pack(&t.uint64_data, u64::to_le_bytes),
        DType::I32 => pack(&t.int32_data, i32::to_le_bytes),
        DType::U32 => {
            let narrow: std::result::Result<Vec<u32>, _> =
                t.uint64_data.iter().map(|&v| u32::try_from(v)).collect();
            pack(&narrow.map_err(|_| bad(what, "a value does not fit u32"))?, u32::to_le_bytes)
        }
        DType::Bool => narrow(0, 1, 1)?,
        DType::U8 => narrow(0, u8::MAX.into(), 1)?,
        DType::I8 => narrow(i8::MIN.into(), i8::MAX.into(), 1)?,
        DType::I16 => narrow(i16::MIN.into(), i16::MAX.into(), 2)?,
        DType::U16 | DType::F16 | DType::BF16 => narrow(0, u16::MAX.into(), 2)?,
        _ => narrow(0, u8::MAX.into(), 1)?,
    })
}

/// Encodes a tensor as a message with its bytes in `raw_data`. The message has no type if ONNX lacks the
/// element type.
pub fn encode(t: &ConstData, name: &str) -> TensorProto {
    TensorProto {
        dims: t.dims.iter().map(|&d| d as i64).collect(),
        data_type: t.dtype.row().onnx,
        name: name.into(),
        raw_data: Some(Bytes::copy_from_slice(t.bytes())),
        ..Default::default()
    }
}

/// Like [`encode`], but an element type that ONNX lacks is an error.
///
/// # Errors
/// [`Error::Unsupported`] for an element type that ONNX lacks.
pub(super) fn encode_known(t: &ConstData, name: &str) -> Result<TensorProto> {
    match t.dtype.row().onnx {
        0 => Err(Error::unsupported(
            format!("element type {} in an ONNX file", t.dtype),
            "Cast to another element type",
        )),
        _ => Ok(encode(t, name)),
    }
}

/// Encodes a tensor of strings as a message.
pub fn encode_text(t: &super::item::Text, name: &str) -> TensorProto {
    TensorProto {
        dims: t.dims.iter().map(|&d| d as i64).collect(),
        data_type: STRING,
        name: name.into(),
        string_data: t.vals.iter().map(|s| Bytes::copy_from_slice(s.as_bytes())).collect(),
        ..Default::default()
    }
}

/// Reads a `.pb` tensor file. Returns its name, which may be empty, and its value. Same errors as [`decode`].
pub fn read_pb(path: &Path) -> Result<(String, ConstData)> {
    let file = path.display().to_string();
    parse_pb(crate::mmap::open(path)?, &External::in_folder_of(path), &file)
}

/// Like [`read_pb`], for bytes in memory.
pub fn parse_pb(data: Bytes, external: &External, file: &str) -> Result<(String, ConstData)> {
    super::wire::check(&data, super::wire::Kind::Tensor, file)?;
    let t = TensorProto::decode(data).map_err(|e| bad(file, format!("not an ONNX tensor: {e}")))?;
    let value = decode(&t, external, file)?;
    Ok((t.name, value))
}

/// Writes a `.pb` tensor file.
///
/// # Errors
/// [`Error::Unsupported`] for an element type that ONNX lacks; [`Error::Io`].
pub fn write_pb(path: &Path, name: &str, t: &ConstData) -> Result<()> {
    crate::output::write(path, &encode_known(t, name)?.encode_to_vec())
}

#[cfg(test)]
#[path = "tensor_tests.rs"]
mod tests;
