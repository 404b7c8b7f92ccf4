//! Safetensors files: an 8-byte length, a JSON header, then the tensors back to back (README of
//! huggingface/safetensors, section on the format).
//!
//! The header is fully checked here and not by the `safetensors` crate, whose end-of-buffer sum can overflow
//! on a forged header. As the format requires, tensors must cover the data without holes or overlaps.

use crate::{ConstData, bad};
use bytes::Bytes;
use halcyon_host::output::Output;
use halcyon_ir::dtype::ROWS;
use halcyon_ir::{DType, Error, Result};
use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, Visitor};
use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::io::Write;
use std::path::Path;

/// Longest accepted header in bytes. The format itself sets this bound.
const MAX_HEADER: u64 = 100_000_000;

/// An open file. Its tensors are slices of the file.
#[derive(Debug)]
pub struct SafeTensors {
    file: String,
    body: Bytes,
    metadata: BTreeMap<String, String>,
    tensors: BTreeMap<String, Info>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Info {
    dtype: String,
    shape: Vec<usize>,
    data_offsets: (usize, usize),
}

impl SafeTensors {
    /// # Errors
    /// [`Error::Io`], or [`Error::Format`] if the header is malformed or does not describe the rest of the
    /// file exactly.
    pub fn open(path: &Path) -> Result<SafeTensors> {
        SafeTensors::parse(crate::mmap::open(path)?, &path.display().to_string())
    }

    /// Like [`SafeTensors::open`], for a file in memory; `file` names it in errors.
    pub fn parse(data: Bytes, file: &str) -> Result<SafeTensors> {
        let fail = |what: String| bad(file, format!("safetensors header: {what}"));
        if data.is_empty() {
            let what = "this is an empty file. Its download or export has failed: make the file again";
            return Err(bad(file, what));
        }
        let len = data
            .first_chunk::<8>()
            .map(|b| u64::from_le_bytes(*b))
            .ok_or_else(|| fail("the file is shorter than its length field".into()))?;
        if len > MAX_HEADER || len > data.len() as u64 - 8 {
            return Err(fail(format!("its length is {len} bytes, but the file has {}", data.len())));
        }
        let start = 8 + len as usize;
        let header: Header = serde_json::from_slice(&data[8..start]).map_err(|e| fail(e.to_string()))?;
        let body = data.slice(start..);

        let mut order: Vec<(&String, &Info)> = header.tensors.iter().collect();
        order.sort_by_key(|(_, i)| i.data_offsets);
        let mut at = 0;
        for (name, i) in order {
            let (from, to) = i.data_offsets;
            let wrong = |what: String| bad(file, format!("tensor '{name}': {what}"));
            if from != at || to < from || to > body.len() {
                return Err(wrong(format!(
                    "bytes {from}..{to} do not begin at {at} and end within the {} bytes of data",
                    body.len()
                )));
            }
            // Types that `DType` lacks (such as 6-bit floats) are rejected only when such a tensor is read.
            if let Some(row) = ROWS.iter().find(|r| r.safetensors == Some(i.dtype.as_str())) {
                let want = crate::data::byte_len(row.dtype, &i.shape);
                if want != Some(to - from) {
                    return Err(wrong(format!("{}{:?} does not take {} bytes", i.dtype, i.shape, to - from)));
                }
            }
            at = to;
        }
        if at != body.len() {
            return Err(fail(format!("{} bytes at the end belong to no tensor", body.len() - at)));
        }
        Ok(SafeTensors { file: file.into(), body, metadata: header.metadata, tensors: header.tensors })
    }

    /// Names of the tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// The free-form metadata of the header.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// Returns one tensor without copying it.
    ///
    /// # Errors
    /// [`Error::Argument`] if no tensor has this name; [`Error::Unsupported`] for an element type that
    /// [`halcyon_ir::DType`] lacks.
    pub fn get(&self, name: &str) -> Result<ConstData> {
        let i = self
            .tensors
            .get(name)
            .ok_or_else(|| Error::argument("safetensors", format!("{} has no tensor '{name}'", self.file)))?;
        let row = ROWS.iter().find(|r| r.safetensors == Some(i.dtype.as_str())).ok_or_else(|| {
            Error::unsupported(
                format!("element type {} of tensor '{name}' in {}", i.dtype, self.file),
                "Convert it to an element type that Halcyon has",
            )
        })?;
        crate::data::from_bytes(row.dtype, &i.shape, self.body.slice(i.data_offsets.0..i.data_offsets.1))
    }
}

/// Writes a file of tensors in the given order. An existing file is replaced only when the new one is
/// complete. Returns the size in bytes.
///
/// # Errors
/// [`Error::Argument`] for a name that appears twice or is reserved; [`Error::Unsupported`] for a dtype that
/// the format lacks; [`Error::Io`].
pub fn write(
    path: &Path,
    tensors: &[(&str, &ConstData)],
    metadata: &BTreeMap<String, String>,
) -> Result<u64> {
    let of = |t: &ConstData| Layout { dtype: t.dtype, dims: t.dims.to_vec(), bytes: t.bytes().len() };
    let header = header(tensors.iter().map(|(n, t)| (*n, of(t))), metadata)?;
    halcyon_host::output::write_with(path, |o| {
        o.write_all(&(header.len() as u64).to_le_bytes())?;
        o.write_all(&header)?;
        tensors.iter().try_for_each(|(_, t)| o.write_all(t.bytes()))
    })
}

/// Writes a file piece by piece, so that it may be larger than the memory.
///
/// The tensors' names, types and shapes are given first, then their bytes in the same order. An existing file
/// is replaced only by [`SafeTensorsWriter::finish`].
#[derive(Debug)]
pub struct SafeTensorsWriter {
    out: Output,
    /// Bytes of the data that are missing.
    left: usize,
}

impl SafeTensorsWriter {
    /// Begins a file.
    ///
    /// # Errors
    /// Those of [`write()`]; [`Error::Argument`] for a tensor that is too large to address.
    pub fn create(
        path: &Path,
        tensors: &[(&str, DType, &[usize])],
        metadata: &BTreeMap<String, String>,
    ) -> Result<SafeTensorsWriter> {
        let (mut all, mut left) = (vec![], 0usize);
        for (name, dtype, dims) in tensors {
            let large = || Error::argument("safetensors", format!("'{name}' is too large to address"));
            let bytes = crate::data::byte_len(*dtype, dims).ok_or_else(large)?;
            left = left.checked_add(bytes).ok_or_else(large)?;
            all.push((*name, Layout { dtype: *dtype, dims: dims.to_vec(), bytes }));
        }
        let header = header(all.into_iter(), metadata)?;
        let mut out = Output::create(path)?;
        let length = (header.len() as u64).to_le_bytes();
        out.write_all(&length).and_then(|()| out.write_all(&header)).map_err(|e| out.failed(&e))?;
        Ok(SafeTensorsWriter { out, left })
    }

    /// Appends bytes to the data of all tensors.
    ///
    /// # Errors
    /// [`Error::Argument`] for more bytes than the tensors have; [`Error::Io`].
    pub fn append(&mut self, bytes: &[u8]) -> Result<()> {
        let Some(left) = self.left.checked_sub(bytes.len()) else {
            let what = format!("{} bytes, but {} are missing", bytes.len(), self.left);
            return Err(Error::argument("safetensors", what));
        };
        self.left = left;
        self.out.write_all(bytes).map_err(|e| self.out.failed(&e))
    }

    /// Completes the file. Returns its size in bytes.
    ///
    /// # Errors
    /// [`Error::Argument`] if bytes are missing; [`Error::Io`]. An old file is then unchanged.
    pub fn finish(self) -> Result<u64> {
        if self.left > 0 {
            return Err(Error::argument("safetensors", format!("{} bytes are missing", self.left)));
        }
        self.out.finish()
    }
}

/// What the header says of a tensor.
struct Layout {
    dtype: DType,
    dims: Vec<usize>,
    bytes: usize,
}

/// The JSON header, padded with spaces so that the data begins at a multiple of 8 bytes.
fn header<'n>(
    tensors: impl Iterator<Item = (&'n str, Layout)>,
    metadata: &BTreeMap<String, String>,
) -> Result<Vec<u8>> {
    let (mut map, mut at) = (serde_json::Map::new(), 0);
    if !metadata.is_empty() {
        map.insert(METADATA.into(), serde_json::json!(metadata));
    }
    for (name, t) in tensors {
        let row = ROWS.iter().find(|r| r.dtype == t.dtype);
        let dtype = row.and_then(|r| r.safetensors).ok_or_else(|| {
            let what = format!("{} tensors in safetensors files (tensor '{name}')", t.dtype);
            Error::unsupported(what, "Cast it to a type of the format")
        })?;
        let end = at + t.bytes;
        let info = serde_json::json!({ "dtype": dtype, "shape": t.dims, "data_offsets": [at, end] });
        if name == METADATA || map.insert(name.into(), info).is_some() {
            let what = format!("the name '{name}' is reserved or appears twice");
            return Err(Error::argument("safetensors", what));
        }
        at = end;
    }
    let mut text = serde_json::to_vec(&map).map_err(|e| Error::internal(e.to_string()))?;
    text.resize(text.len().next_multiple_of(8), b' ');
    Ok(text)
}

/// The header's key of free-form text.
const METADATA: &str = "__metadata__";

struct Header {
    metadata: BTreeMap<String, String>,
    tensors: BTreeMap<String, Info>,
}

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(d: D) -> std::result::Result<Header, D::Error> {
        struct V;
        impl<'de> Visitor<'de> for V {
            type Value = Header;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut m: A) -> std::result::Result<Header, A::Error> {
                let mut h = Header { metadata: BTreeMap::new(), tensors: BTreeMap::new() };
                // JSON allows duplicate keys, and readers differ on which one wins, so they are rejected.
                let mut seen = HashSet::new();
                while let Some(key) = m.next_key::<String>()? {
                    if !seen.insert(key.clone()) {
                        return Err(A::Error::custom(format!("'{key}' appears twice")));
                    }
                    if key == METADATA {
                        h.metadata = m.next_value()?;
                    } else {
                        h.tensors.insert(key, m.next_value()?);
                    }
                }
                Ok(h)
            }
        }
        d.deserialize_map(V)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(header: &str, body: &[u8]) -> Bytes {
        let mut v = (header.len() as u64).to_le_bytes().to_vec();
        v.extend(header.as_bytes());
        v.extend(body);
        v.into()
    }

    #[test]
    fn reads_tensors_without_copies() {
        let f = file(
            r#"{"__metadata__":{"format":"pt"},"b":{"dtype":"F32","shape":[2],"data_offsets":[2,10]},"a":{"dtype":"BF16","shape":[1,1],"data_offsets":[0,2]},"e":{"dtype":"I64","shape":[0,3],"data_offsets":[10,10]}}"#,
            &[0x80, 0x3f, 0, 0, 0, 0, 0, 0, 0x80, 0x3f],
        );
        let s = SafeTensors::parse(f.clone(), "t").unwrap();
        assert_eq!(s.names().collect::<Vec<_>>(), ["a", "b", "e"]);
        assert_eq!(s.metadata()["format"], "pt");
        let b = s.get("b").unwrap();
        assert_eq!(b.to_vec::<f32>(), [0.0, 1.0]);
        assert_eq!(b.bytes().as_ptr(), f[f.len() - 8..].as_ptr());
        let a = s.get("a").unwrap();
        assert_eq!((a.dtype, a.dims.as_slice()), (DType::BF16, &[1, 1][..]));
        assert!(s.get("e").unwrap().bytes().is_empty());
        assert!(matches!(s.get("zz"), Err(Error::Argument { .. })));
    }

    #[test]
    fn pieces_give_the_same_file_as_the_whole() {
        let dir = tempfile::tempdir().unwrap();
        let (a, b) = (dir.path().join("a"), dir.path().join("b"));
        let x = ConstData::from_slice(&[2, 2], &[1f32, 2., 3., 4.]).unwrap();
        let y = ConstData::from_slice(&[3], &[5i64, 6, 7]).unwrap();
        let metadata = BTreeMap::from([("format".to_string(), "pt".to_string())]);
        write(&a, &[("x", &x), ("y", &y)], &metadata).unwrap();
        let infos = [("x", DType::F32, &[2usize, 2][..]), ("y", DType::I64, &[3])];
        let mut w = SafeTensorsWriter::create(&b, &infos, &metadata).unwrap();
        w.append(&x.bytes()[..5]).unwrap();
        w.append(&x.bytes()[5..]).unwrap();
        assert!(matches!(w.append(&[0; 25]), Err(Error::Argument { .. })));
        w.append(y.bytes()).unwrap();
        w.finish().unwrap();
        assert_eq!(std::fs::read(&a).unwrap(), std::fs::read(&b).unwrap());
        let w = SafeTensorsWriter::create(&a, &infos, &metadata).unwrap();
        assert!(matches!(w.finish(), Err(Error::Argument { .. })));
        assert_eq!(std::fs::read(&a).unwrap(), std::fs::read(&b).unwrap(), "the old file is unchanged");
    }

    #[test]
    fn every_element_type_is_mapped() {
        for (d, name) in DType::all().filter_map(|d| Some((d, d.row().safetensors?))) {
            let h =
                format!(r#"{{"t":{{"dtype":"{}","shape":[3],"data_offsets":[0,{}]}}}}"#, name, d.bytes(3));
            let s = SafeTensors::parse(file(&h, &vec![0; d.bytes(3)]), "t").unwrap();
            assert_eq!(s.get("t").unwrap().dtype, d);
        }
        let h = r#"{"t":{"dtype":"F6_E2M3","shape":[4],"data_offsets":[0,3]}}"#;
        let s = SafeTensors::parse(file(h, &[0; 3]), "t").unwrap();
        assert!(matches!(s.get("t"), Err(Error::Unsupported { .. })));
    }

    fn refused(header: &str, body: usize) {
        let r = SafeTensors::parse(file(header, &vec![0; body]), "t");
        assert!(matches!(r, Err(Error::Format { .. })), "{header}: {r:?}");
    }

    #[test]
    fn attack_truncated() {
        let f = file(r#"{"t":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#, &[0; 4]);
        for n in 0..f.len() {
            assert!(matches!(SafeTensors::parse(f.slice(..n), "t"), Err(Error::Format { .. })), "cut at {n}");
        }
    }

    #[test]
    fn attack_header_length_beyond_the_file() {
        for n in [3u64, 100_000_001, u64::MAX, u64::MAX - 7] {
            let mut v = n.to_le_bytes().to_vec();
            v.extend(b"{}");
            assert!(matches!(SafeTensors::parse(v.into(), "t"), Err(Error::Format { .. })), "{n}");
        }
    }

    #[test]
    fn attack_overlaps_holes_and_tails() {
        let two = |a: &str, b: &str| {
            format!(
                r#"{{"a":{{"dtype":"U8","shape":[4],"data_offsets":{a}}},"b":{{"dtype":"U8","shape":[4],"data_offsets":{b}}}}}"#
            )
        };
        refused(&two("[0,4]", "[0,4]"), 4);
        refused(&two("[0,4]", "[3,7]"), 7);
        refused(&two("[0,4]", "[5,9]"), 9);
        refused(&two("[0,4]", "[4,8]"), 9);
        refused(&two("[0,4]", "[4,8]"), 7);
        refused(&two("[4,0]", "[4,8]"), 8);
    }

    #[test]
    fn attack_sizes_that_overflow() {
        for (shape, offsets) in [
            ("[18446744073709551615]", "[0,18446744073709551615]"),
            ("[18446744073709551616]", "[0,4]"),
            ("[4611686018427387904,4]", "[0,0]"),
            ("[-1]", "[0,4]"),
            ("[4]", "[-4,0]"),
            ("[5]", "[0,4]"),
            ("[1.5]", "[0,4]"),
        ] {
            refused(&format!(r#"{{"t":{{"dtype":"U8","shape":{shape},"data_offsets":{offsets}}}}}"#), 4);
        }
        // An offset whose sum with the length of everything before the data wraps around to the length of the
        // data.
        let body = 4u64;
        let head =
            r#"{"t":{"dtype":"U8","shape":[NNNNNNNNNNNNNNNNNNNN],"data_offsets":[0,NNNNNNNNNNNNNNNNNNNN]}}"#;
        let wrap = (body).wrapping_sub(8 + head.len() as u64);
        refused(&head.replace("NNNNNNNNNNNNNNNNNNNN", &wrap.to_string()), body as usize);
    }

    #[test]
    fn attack_duplicate_and_malformed_headers() {
        refused(
            r#"{"t":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"t":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#,
            4,
        );
        for h in
            ["", "[]", "{", "null", r#"{"t":1}"#, r#"{"t":{"dtype":"U8"}}"#, r#"{"__metadata__":{"a":1}}"#]
        {
            refused(h, 0);
        }
        refused(&format!("{}{}", "{\"a\":".repeat(100_000), "}".repeat(100_000)), 0);
    }
}
