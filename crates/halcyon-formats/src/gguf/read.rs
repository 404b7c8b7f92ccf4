//! Reads one GGUF file: the header, the metadata, the table of tensors, the data.

use super::value::{self, ARRAY, Array, BOOL, Metadata, STRING, Value};
use super::{ALIGNMENT, GgmlType, MAX_ALIGNMENT, MAX_DEPTH, MAX_DIMS, MAX_NAME, Tensor, TensorInfo};
use crate::bad;
use bytes::Bytes;
use halcyon_ir::shape::Dims;
use halcyon_ir::{Error, Result};

/// The most tensors, and the most metadata keys, of a file.
const MAX_COUNT: u64 = 1 << 24;
/// Bytes of the smallest entry of the table of tensors: lengths, a type and an offset.
const SMALLEST_TENSOR: u64 = 24;
/// Bytes of the smallest key with its value.
const SMALLEST_ENTRY: u64 = 13;

/// One file. A model may have several.
#[derive(Debug)]
pub(super) struct Part {
    pub version: u32,
    pub alignment: u64,
    pub metadata: Metadata,
    /// In the order of the file.
    pub tensors: Vec<Tensor>,
}

/// A position in a file.
struct Cursor<'d> {
    data: &'d [u8],
    at: usize,
    file: &'d str,
}

impl<'d> Cursor<'d> {
    fn fail<T>(&self, what: impl AsRef<str>) -> Result<T> {
        Err(bad(self.file, format!("{} (at byte {})", what.as_ref(), self.at)))
    }

    fn left(&self) -> u64 {
        (self.data.len() - self.at) as u64
    }

    /// The next `n` bytes. `what` names them in the error.
    fn take(&mut self, n: u64, what: &str) -> Result<&'d [u8]> {
        if n > self.left() {
            return self.fail(format!("{what} has {n} bytes, but the file has only {} more", self.left()));
        }
        let from = self.at;
        self.at += n as usize;
        Ok(&self.data[from..self.at])
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N]> {
        match self.take(N as u64, what)?.first_chunk::<N>() {
            Some(b) => Ok(*b),
            None => Err(Error::internal("a slice has another length than was asked for")),
        }
    }

    fn u32(&mut self, what: &str) -> Result<u32> {
        self.array(what).map(u32::from_le_bytes)
    }

    fn u64(&mut self, what: &str) -> Result<u64> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// The number of things that take at least `smallest` bytes each.
    fn count(&mut self, smallest: u64, what: &str) -> Result<usize> {
        let n = self.u64(what)?;
        match n.checked_mul(smallest).is_some_and(|b| b <= self.left()) {
            true => Ok(n as usize),
            false => self.fail(format!("{what} is {n}, but the file has only {} more bytes", self.left())),
        }
    }

    fn string(&mut self, what: &str) -> Result<&'d [u8]> {
        let n = self.u64(what)?;
        self.take(n, what)
    }

    /// A key or a tensor's name.
    fn name(&mut self, what: &str) -> Result<&'d str> {
        let bytes = self.string(what)?;
        if bytes.len() > MAX_NAME {
            return self.fail(format!("{what} has {} bytes; the most is {MAX_NAME}", bytes.len()));
        }
        match std::str::from_utf8(bytes) {
            Ok(s) => Ok(s),
            Err(_) => self.fail(format!("{what} is not UTF-8")),
        }
    }

    fn value(&mut self, key: &str) -> Result<Value> {
        let what = &format!("the value of '{key}'");
        match self.u32(what)? {
            BOOL => self.bools(1, what).map(|b| Value::Bool(b.first() == Some(&true))),
            STRING => {
                let bytes = self.string(what)?;
                let text = std::str::from_utf8(bytes).map(|s| Value::String(s.into()));
                Ok(text.unwrap_or_else(|_| Value::Bytes(bytes.into())))
            }
            ARRAY => self.elements(MAX_DEPTH, what).map(Value::Array),
            code => {
                let bytes = self.take(value::size(code) as u64, what)?;
                match value::number(code, bytes) {
                    Some(v) => Ok(v),
                    None => self.fail(format!("{what} has the unknown type {code}")),
                }
            }
        }
    }

    fn bools(&mut self, n: u64, what: &str) -> Result<Vec<bool>> {
        let bytes = self.take(n, what)?;
        match bytes.iter().find(|b| **b > 1) {
            Some(b) => self.fail(format!("{what} has a bool that is neither 0 nor 1, but {b}")),
            None => Ok(bytes.iter().map(|b| *b == 1).collect()),
        }
    }

    /// Strings; byte strings if one of them is not UTF-8. Vocabularies have hundreds of thousands.
    fn strings(&mut self, n: usize, what: &str) -> Result<Array> {
        let start = self.at;
        // More would be a guess of the file: it may end at once.
        let mut text = Vec::with_capacity(n.min(1 << 20));
        for _ in 0..n {
            let Ok(s) = std::str::from_utf8(self.string(what)?) else { break };
            text.push(s.to_string());
        }
        if text.len() == n {
            return Ok(Array::String(text));
        }
        self.at = start;
        (0..n).map(|_| self.string(what).map(Vec::from)).collect::<Result<_>>().map(Array::Bytes)
    }

    /// An array, which may contain arrays down to `depth` levels.
    fn elements(&mut self, depth: usize, what: &str) -> Result<Array> {
        if depth == 0 {
            return self.fail(format!("{what} has arrays in more than {MAX_DEPTH} levels"));
        }
        let code = self.u32(what)?;
        let count =
            |c: &mut Self, smallest: usize| c.count(smallest as u64, &format!("the length of {what}"));
        match code {
            BOOL => {
                let n = count(self, 1)?;
                self.bools(n as u64, what).map(Array::Bool)
            }
            STRING => {
                let n = count(self, 8)?;
                self.strings(n, what)
            }
            ARRAY => {
                let n = count(self, 12)?;
                (0..n).map(|_| self.elements(depth - 1, what)).collect::<Result<Vec<_>>>().map(Array::Array)
            }
            code => {
                // The size of an unknown type is 0, and its elements are refused below.
                let size = value::size(code);
                let n = count(self, size)?;
                let bytes = self.take((n * size) as u64, what)?;
                match value::numbers(code, bytes) {
                    Some(a) => Ok(a),
                    None => self.fail(format!("{what} has elements of the unknown type {code}")),
                }
            }
        }
    }

    /// One entry of the table of tensors, and the tensor's offset in the data.
    fn tensor(&mut self) -> Result<(TensorInfo, u64)> {
        let name = self.name("the name of a tensor")?;
        let what = &format!("the description of tensor '{name}'");
        let rank = self.u32(what)?;
        if rank as usize > MAX_DIMS {
            return self.fail(format!("tensor '{name}' has {rank} axes; the most is {MAX_DIMS}"));
        }
        let mut shape = Dims::new();
        for _ in 0..rank {
            let d = self.u64(what)?;
            match usize::try_from(d) {
                Ok(d) => shape.push(d),
                Err(_) => return self.fail(format!("tensor '{name}' is too large: an axis has size {d}")),
            }
        }
        // The file has the innermost axis first.
        shape.reverse();
        let number = self.u32(what)?;
        let Some(ty) = GgmlType::from_number(number) else {
            return Err(Error::unsupported(
                format!("tensor '{name}' in {}: the element type with the number {number}", self.file),
                "Quantise the model to a type that Halcyon has, for instance q4_k or q8_0",
            ));
        };
        let offset = self.u64(what)?;
        Ok((TensorInfo { name: name.into(), shape, ty }, offset))
    }
}

/// The alignment of tensors that the metadata sets.
///
/// # Errors
/// [`Error::Format`] unless it is a power of two that is not too large.
pub(super) fn alignment(m: &Metadata, file: &str) -> Result<u64> {
    let a = m.maybe("general.alignment", Metadata::u64)?.unwrap_or(ALIGNMENT);
    match a.is_power_of_two() && a <= MAX_ALIGNMENT {
        true => Ok(a),
        false => {
            let what = "is not a power of two from 1 to";
            Err(bad(file, format!("metadata 'general.alignment' {what} {MAX_ALIGNMENT}: {a}")))
        }
    }
}

/// The version of the format.
fn version(c: &mut Cursor) -> Result<u32> {
    let v = c.u32("the version")?;
    let file = c.file;
    match v {
        2 | 3 => Ok(v),
        // The version is small, so one that is large in this byte order is small in the other one.
        _ if v.swap_bytes() < 0x1_0000 && v != 0 => Err(Error::unsupported(
            format!("{file}: a big-endian GGUF file (version {})", v.swap_bytes()),
            "Convert it to little-endian with gguf_convert_endian.py of the Python package gguf",
        )),
        _ => Err(Error::unsupported(
            format!("{file}: version {v} of GGUF; Halcyon reads 2 and 3"),
            if v < 2 { "Convert the model again with a current converter" } else { "Use a newer Halcyon" },
        )),
    }
}

impl Part {
    /// `file` names the file in errors.
    pub(super) fn parse(data: &Bytes, file: &str) -> Result<Part> {
        let mut c = Cursor { data, at: 0, file };
        if c.take(4, "a GGUF file's header")? != b"GGUF" {
            return Err(bad(file, "not a GGUF file: it does not begin with the letters GGUF"));
        }
        let version = version(&mut c)?;
        let tensors = c.count(SMALLEST_TENSOR, "the number of tensors")?;
        let keys = c.count(SMALLEST_ENTRY, "the number of metadata keys")?;
        if let Some(n) = [tensors, keys].into_iter().find(|n| *n as u64 > MAX_COUNT) {
            return c.fail(format!("{n} tensors or metadata keys; the most is {MAX_COUNT}"));
        }
        let one = |c: &mut Cursor| {
            let key = c.name("a metadata key")?;
            Ok((key.to_string(), c.value(key)?))
        };
        let entries = (0..keys).map(|_| one(&mut c)).collect::<Result<Vec<_>>>()?;
        let metadata = Metadata::new(file, entries)?;
        let alignment = alignment(&metadata, file)?;
        let table = (0..tensors).map(|_| c.tensor()).collect::<Result<Vec<_>>>()?;
        let start = (c.at as u64).next_multiple_of(alignment);
        let tensors = place(data, file, table, start, alignment)?;
        Ok(Part { version, alignment, metadata, tensors })
    }
}

/// Gives every tensor its bytes. `start` is where the data begins.
fn place(
    data: &Bytes,
    file: &str,
    table: Vec<(TensorInfo, u64)>,
    start: u64,
    alignment: u64,
) -> Result<Vec<Tensor>> {
    let mut ranges = Vec::with_capacity(table.len());
    let mut tensors = Vec::with_capacity(table.len());
    for (info, offset) in table {
        let wrong = |what: String| Err(bad(file, format!("tensor '{}': {what}", info.name)));
        let size = match info.byte_len() {
            Ok(n) => n as u64,
            Err(what) => return wrong(what),
        };
        if !offset.is_multiple_of(alignment) {
            return wrong(format!("its offset {offset} is not a multiple of the alignment {alignment}"));
        }
        // Padding at the end of a file may be absent, so a tensor without bytes may begin beyond the end.
        if size == 0 {
            tensors.push(Tensor { info, data: Bytes::new() });
            continue;
        }
        let from = start.checked_add(offset);
        let end = from.and_then(|f| f.checked_add(size));
        let (Some(from), Some(end)) = (from, end.filter(|e| *e <= data.len() as u64)) else {
            return wrong(format!(
                "its {size} bytes at {start} + {offset} reach beyond the end of the file, after {} bytes. \
                 The file is cut short or damaged: fetch it again",
                data.len()
            ));
        };
        let (from, end) = (from as usize, end as usize);
        ranges.push((from, end, tensors.len()));
        tensors.push(Tensor { info, data: data.slice(from..end) });
    }
    ranges.sort_unstable();
    if let Some(w) = ranges.windows(2).find(|w| w[1].0 < w[0].1) {
        let [a, b] = [w[0].2, w[1].2].map(|i: usize| &tensors[i].info.name);
        return Err(bad(file, format!("the tensors '{a}' and '{b}' overlap")));
    }
    Ok(tensors)
}
