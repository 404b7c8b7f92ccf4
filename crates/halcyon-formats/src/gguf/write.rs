//! Writes GGUF files, version 3.

use super::value::{self, Metadata, Value};
use super::{MAX_DEPTH, MAX_DIMS, MAX_NAME, TensorInfo, read};
use halcyon_host::output::Output;
use halcyon_ir::{Error, Result};
use std::io::Write;
use std::path::Path;

/// Writes a file piece by piece, so that it may be larger than the memory.
///
/// The tensors' names, shapes and types are given first, then their bytes in the same order. An existing file
/// is replaced only by [`GgufWriter::finish`].
///
/// ```no_run
/// use halcyon_formats::gguf::{GgmlType, GgufWriter, TensorInfo};
/// # fn main() -> halcyon_ir::Result<()> {
/// let tensors = vec![TensorInfo::new("a", &[2, 3], GgmlType::F32)];
/// let metadata = [("general.architecture".to_string(), "llama".into())];
/// let mut w = GgufWriter::create("model.gguf".as_ref(), &metadata, tensors)?;
/// w.append("a", &[0; 12])?;
/// w.append("a", &[0; 12])?;
/// w.finish()?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct GgufWriter {
    out: Output,
    layout: Layout,
    tensors: Vec<TensorInfo>,
    /// The tensor whose bytes come next.
    current: usize,
    /// How many of its bytes were written.
    written: u64,
}

impl GgufWriter {
    /// Begins a file. Tensors are aligned to 32 bytes, or to the value of the key `general.alignment`.
    ///
    /// # Errors
    /// [`Error::Argument`] for a name or key that appears twice or is too long, for a tensor with more than 4
    /// axes, whose rows are not whole blocks, or whose dtype GGUF lacks, and for arrays in more than 8
    /// levels; [`Error::Format`] for an invalid alignment; [`Error::Io`].
    pub fn create(path: &Path, metadata: &[(String, Value)], tensors: Vec<TensorInfo>) -> Result<GgufWriter> {
        let layout = Layout::new(&path.display().to_string(), metadata, &tensors)?;
        let mut out = Output::create(path)?;
        out.write_all(&layout.header).map_err(|e| out.failed(&e))?;
        let mut w = GgufWriter { out, layout, tensors, current: 0, written: 0 };
        w.skip_complete()?;
        Ok(w)
    }

    /// Appends bytes to a tensor. It must be the first one that is not complete.
    ///
    /// # Errors
    /// [`Error::Argument`] for another tensor, or more bytes than the tensor has; [`Error::Io`].
    pub fn append(&mut self, name: &str, bytes: &[u8]) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        let wrong = |what: String| Err(Error::argument("gguf", what));
        let Some(t) = self.tensors.get(self.current) else {
            return wrong(format!("bytes for '{name}', but all tensors are complete"));
        };
        if t.name != name {
            return wrong(format!("bytes for '{name}', but those of '{}' come next", t.name));
        }
        let size = self.layout.sizes[self.current];
        if bytes.len() as u64 > size - self.written {
            let n = bytes.len();
            return wrong(format!("{n} bytes for '{name}', after {} of its {size}", self.written));
        }
        self.out.write_all(bytes).map_err(|e| self.out.failed(&e))?;
        self.written += bytes.len() as u64;
        self.skip_complete()
    }

    /// Pads the current tensor if it is complete, and goes on to the next one that has bytes.
    fn skip_complete(&mut self) -> Result<()> {
        while self.layout.sizes.get(self.current) == Some(&self.written) {
            let padding = self.layout.padding(self.written);
            self.out.write_all(&padding).map_err(|e| self.out.failed(&e))?;
            (self.current, self.written) = (self.current + 1, 0);
        }
        Ok(())
    }

    /// Completes the file. Returns its size in bytes.
    ///
    /// # Errors
    /// [`Error::Argument`] if a tensor lacks bytes; [`Error::Io`]. An old file is then unchanged.
    pub fn finish(self) -> Result<u64> {
        if let Some(t) = self.tensors.get(self.current) {
            let size = self.layout.sizes[self.current];
            let what = format!("'{}' has only {} of its {size} bytes", t.name, self.written);
            return Err(Error::argument("gguf", what));
        }
        self.out.finish()
    }
}

/// Writes a file of tensors in the given order. Returns its size in bytes. An existing file is replaced only
/// when the new one is complete.
///
/// # Errors
/// Those of [`GgufWriter`].
pub fn write(path: &Path, metadata: &[(String, Value)], tensors: &[(TensorInfo, &[u8])]) -> Result<u64> {
    let mut w = GgufWriter::create(path, metadata, tensors.iter().map(|(t, _)| t.clone()).collect())?;
    tensors.iter().try_for_each(|(t, bytes)| w.append(&t.name, bytes))?;
    w.finish()
}

/// Like [`write()`], into memory.
///
/// # Errors
/// Those of [`write()`] without [`Error::Io`].
pub fn encode(metadata: &[(String, Value)], tensors: &[(TensorInfo, &[u8])]) -> Result<Vec<u8>> {
    let infos: Vec<TensorInfo> = tensors.iter().map(|(t, _)| t.clone()).collect();
    let layout = Layout::new("a GGUF file", metadata, &infos)?;
    let mut out = layout.header.clone();
    for ((t, bytes), size) in tensors.iter().zip(&layout.sizes) {
        if bytes.len() as u64 != *size {
            let what = format!("{} bytes for '{}', which has {size}", bytes.len(), t.name);
            return Err(Error::argument("gguf", what));
        }
        out.extend_from_slice(bytes);
        out.extend_from_slice(&layout.padding(*size));
    }
    Ok(out)
}

/// The parts of a file that do not depend on the tensors' bytes.
#[derive(Debug)]
struct Layout {
    /// Everything before the data, padded.
    header: Vec<u8>,
    /// Bytes of each tensor.
    sizes: Vec<u64>,
    alignment: u64,
}

impl Layout {
    fn new(file: &str, metadata: &[(String, Value)], tensors: &[TensorInfo]) -> Result<Layout> {
        let wrong = |what: String| Error::argument("gguf", what);
        if let Some(n) = metadata.iter().map(|(k, _)| k).chain(tensors.iter().map(|t| &t.name)).find(too_long)
        {
            let start: String = n.chars().take(40).collect();
            let what = format!("the name '{start}…' has {} bytes; the most is {MAX_NAME}", n.len());
            return Err(wrong(what));
        }
        value::sorted(metadata.iter().map(|(k, _)| k.as_str()))
            .and_then(|_| value::sorted(tensors.iter().map(|t| t.name.as_str())))
            .map_err(|n| wrong(format!("the name '{n}' appears twice")))?;
        let set = metadata.iter().filter(|(k, _)| k == "general.alignment").cloned().collect();
        let alignment = read::alignment(&Metadata::new(file, set)?, file)?;

        let mut header = b"GGUF".to_vec();
        header.extend_from_slice(&3u32.to_le_bytes());
        header.extend_from_slice(&(tensors.len() as u64).to_le_bytes());
        header.extend_from_slice(&(metadata.len() as u64).to_le_bytes());
        for (key, v) in metadata {
            if let Value::Array(a) = v
                && a.depth() > MAX_DEPTH
            {
                return Err(wrong(format!("'{key}' has arrays in more than {MAX_DEPTH} levels")));
            }
            value::string(key.as_bytes(), &mut header);
            header.extend_from_slice(&v.code().to_le_bytes());
            v.encode(&mut header);
        }
        let (mut sizes, mut at) = (Vec::with_capacity(tensors.len()), 0u64);
        for t in tensors {
            let of = |what: String| wrong(format!("tensor '{}': {what}", t.name));
            if t.shape.len() > MAX_DIMS {
                return Err(of(format!("it has {} axes; the most is {MAX_DIMS}", t.shape.len())));
            }
            let number = t.ty.number().ok_or_else(|| of(format!("GGUF has no type {}", t.ty)))?;
            let size = t.byte_len().map_err(of)? as u64;
            value::string(t.name.as_bytes(), &mut header);
            header.extend_from_slice(&(t.shape.len() as u32).to_le_bytes());
            t.shape.iter().rev().for_each(|d| header.extend_from_slice(&(*d as u64).to_le_bytes()));
            header.extend_from_slice(&number.to_le_bytes());
            header.extend_from_slice(&at.to_le_bytes());
            sizes.push(size);
            let next = at.checked_add(size).and_then(|n| n.checked_next_multiple_of(alignment));
            at = next.ok_or_else(|| of("the file would be too large".into()))?;
        }
        let mut layout = Layout { header, sizes, alignment };
        let padding = layout.padding(layout.header.len() as u64);
        layout.header.extend_from_slice(&padding);
        Ok(layout)
    }

    /// The zeros that follow `n` bytes.
    fn padding(&self, n: u64) -> Vec<u8> {
        vec![0; (n.next_multiple_of(self.alignment) - n) as usize]
    }
}

fn too_long(name: &&String) -> bool {
    name.len() > MAX_NAME
}
