//! The weights in PyTorch's `.pt` and `.pth` files: files that `torch.save(model.state_dict(), file)` writes
//! since PyTorch 1.6, and checkpoints that contain such dicts.
//!
//! The file is a zip archive with a pickle, which has the names and shapes, and one member per storage. A
//! small machine reads the pickle (`pickle.rs`); it builds values and runs no code. If the file has other
//! Python objects, such as a whole model, reading returns an error that names the object. Numbers and strings
//! in the file are ignored.

mod pickle;

use crate::zip::Archive;
use crate::{ConstData, bad};
use bytes::Bytes;
use halcyon_ir::{DType, Error, Result};
use pickle::{Arena, Element, Value, View};
use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::{Mutex, MutexGuard};

/// The size of the largest accepted pickle in bytes. The pickle of a model with 100,000 tensors has about 20
/// MB.
const MAX_PICKLE: u64 = 1 << 28;
/// Deepest nesting of dicts, lists and tuples with tensors.
const MAX_DEPTH: usize = 64;
/// A tensor that repeats elements (PyTorch's `expand`) is larger than its storage. `MAX_EXPANSION` is the
/// largest accepted ratio of the two sizes. Tensors of up to `MAX_EXPANDED` bytes are always accepted.
const MAX_EXPANSION: usize = 1024;
const MAX_EXPANDED: usize = 1 << 20;

/// An open file. A contiguous tensor of an uncompressed member is a slice of the file.
///
/// ```no_run
/// # fn main() -> halcyon_ir::Result<()> {
/// let file = halcyon_formats::torch::TorchFile::open("model.pt".as_ref())?;
/// for name in file.names() {
///     println!("{name}: {:?}", file.get(name)?.dims);
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct TorchFile {
    archive: Archive,
    arena: Arena,
    tensors: BTreeMap<String, u32>,
    /// The index of each member by name.
    members: HashMap<String, usize>,
    /// The top folder of the archive, with a slash at the end.
    folder: String,
    big_endian: bool,
    /// Whether the members have checksums. PyTorch can write files without checksums.
    checked: bool,
    /// A cache of the storages that were read, by key. Several tensors may share a storage, and unpacking a
    /// storage takes time.
    read: Mutex<HashMap<String, Bytes>>,
}

impl TorchFile {
    /// # Errors
    /// [`Error::Io`]; [`Error::Format`] for a malformed file, or a file with Python objects other than
    /// tensors and built-in values (dicts, lists, tuples, sets, numbers, strings, bytes);
    /// [`Error::Unsupported`] for a file that was written by PyTorch before version 1.6.
    pub fn open(path: &Path) -> Result<TorchFile> {
        TorchFile::parse(crate::mmap::open(path)?, &path.display().to_string())
    }

    /// Like [`TorchFile::open`], for a file in memory. `file` is the name of the file in errors.
    ///
    /// # Errors
    /// Those of [`TorchFile::open`].
    pub fn parse(data: Bytes, file: &str) -> Result<TorchFile> {
        if !data.starts_with(b"PK") && data.first() == Some(&0x80) {
            return Err(Error::unsupported(
                format!("{file}: PyTorch's format before version 1.6"),
                "Load it in PyTorch and save it again with torch.save",
            ));
        }
        let archive = Archive::parse(data, file, |name| Some(name))?;
        let members: HashMap<String, usize> =
            archive.members.iter().enumerate().map(|(i, m)| (m.name.clone(), i)).collect();
        let mut pickles = archive.members.iter().filter(|m| {
            m.name == "data.pkl" || m.name.strip_suffix("/data.pkl").is_some_and(|f| !f.contains('/'))
        });
        let (Some(m), None) = (pickles.next(), pickles.next()) else {
            return Err(bad(file, "it has no data.pkl, or several: PyTorch did not write it"));
        };
        if m.size > MAX_PICKLE {
            return Err(bad(file, format!("its pickle has {} bytes; the most is {MAX_PICKLE}", m.size)));
        }
        let folder = m.name.strip_suffix("data.pkl").unwrap_or_default().to_string();
        let checked = m.crc != 0;
        let pickle = if checked { archive.member(m) } else { archive.body(m) }?;
        let (arena, root) = pickle::read(&pickle).map_err(|what| bad(file, what))?;
        let big_endian = match members.get(&format!("{folder}byteorder")) {
            None => false,
            Some(i) => match &archive.start(&archive.members[*i], 8)?[..] {
                b"little" => false,
                b"big" => true,
                _ => return Err(bad(file, "its byte order is neither little nor big")),
            },
        };
        let tensors = flatten(&arena, &pickle, root).map_err(|what| bad(file, what))?;
        let read = Mutex::default();
        let t = TorchFile { archive, arena, tensors, members, folder, big_endian, checked, read };
        t.tensors.values().try_for_each(|i| t.check(&t.arena.tensors[*i as usize]))?;
        Ok(t)
    }

    /// Names of the tensors, sorted. Names of nested dicts are joined with dots: `model.fc1.weight`. The name
    /// of an element of a list or tuple is its index.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Returns one tensor in row-major order. The data is copied only if it is strided, compressed or
    /// big-endian, or has bools that are neither 0 nor 1.
    ///
    /// # Errors
    /// [`Error::Argument`] if no tensor has this name; [`Error::Unsupported`] for complex numbers;
    /// [`Error::Format`] for a damaged member; [`Error::OutOfMemory`].
    pub fn get(&self, name: &str) -> Result<ConstData> {
        let file = &self.archive.file;
        let i = self
            .tensors
            .get(name)
            .ok_or_else(|| Error::argument("torch", format!("{file} has no tensor '{name}'")))?;
        let view = &self.arena.tensors[*i as usize];
        let dtype = match view.element {
            Element::Is(d) => d,
            Element::Unsupported(e) => {
                let what = format!("element type {e} of tensor '{name}' in {file}");
                return Err(Error::unsupported(what, "Convert it to an element type that Halcyon has"));
            }
        };
        let bytes = self.storage(view.storage)?;
        let size = dtype.size();
        let dense = crate::data::byte_len(dtype, &view.dims)
            .ok_or_else(|| bad(file, format!("tensor '{name}' is too large to address")))?;
        // This cannot exceed the storage, because `check` compared the position of the last element with the
        // storage's size.
        let start = if dense == 0 { 0 } else { view.offset as usize * size };
        let contiguous = contiguous(view);
        if contiguous && !self.big_endian {
            let part = bytes.slice(start..start + dense);
            return crate::data::from_bytes(dtype, &view.dims, booleans(dtype, part));
        }
        let mut out = halcyon_host::reserve(dense, &format!("the tensor {name} of {file}"))?;
        match contiguous {
            true => out.extend_from_slice(&bytes[start..start + dense]),
            false => gather(view, size, &bytes, &mut out),
        }
        if self.big_endian {
            out.chunks_exact_mut(size).for_each(<[u8]>::reverse);
        }
        crate::data::from_bytes(dtype, &view.dims, booleans(dtype, Bytes::from(out)))
    }

    /// The member of a storage.
    fn member(&self, s: u32) -> Result<&crate::zip::Member> {
        let key = &self.arena.storages[s as usize].key;
        let name = format!("{}data/{key}", self.folder);
        let i = self.members.get(&name);
        let i = i.ok_or_else(|| bad(&self.archive.file, format!("its member '{name}' is missing")))?;
        Ok(&self.archive.members[*i])
    }

    fn storage(&self, s: u32) -> Result<Bytes> {
        // The pickle describes a storage once for each tensor that uses it, so the same storage has several
        // numbers. The key identifies the storage.
        let key = &self.arena.storages[s as usize].key;
        if let Some(b) = lock(&self.read).get(key) {
            return Ok(b.clone());
        }
        let m = self.member(s)?;
        let bytes = if self.checked { self.archive.member(m) } else { self.archive.body(m) }?;
        lock(&self.read).insert(key.clone(), bytes.clone());
        Ok(bytes)
    }

    /// Checks that a tensor lies within its storage and does not repeat its elements too often, and that the
    /// storage's size is the size of its member in the archive.
    fn check(&self, view: &View) -> Result<()> {
        let fail = |what: String| Err(bad(&self.archive.file, format!("storage of a tensor {what}")));
        let storage = &self.arena.storages[view.storage as usize];
        let member = self.member(view.storage)?;
        let size = match view.element {
            Element::Is(d) => d.size() as u64,
            Element::Unsupported("complex64") => 8,
            Element::Unsupported(_) => 16,
        };
        // The length of an untyped storage is in bytes.
        let unit = if storage.element.is_some() { size } else { 1 };
        if storage.numel.checked_mul(unit) != Some(member.size) {
            return fail(format!("'{}': {} elements in {} bytes", storage.key, storage.numel, member.size));
        }
        let numel = view.dims.iter().try_fold(1u64, |n, d| n.checked_mul(*d as u64));
        let Some(numel) = numel.filter(|n| n.checked_mul(size).is_some()) else {
            return fail(format!("'{}': the shape {:?} is too large to address", storage.key, view.dims));
        };
        if numel == 0 {
            return Ok(());
        }
        let last = view
            .dims
            .iter()
            .zip(&view.strides)
            .try_fold(view.offset, |at, (d, s)| at.checked_add((*d as u64 - 1).checked_mul(*s as u64)?));
        if last.and_then(|l| l.checked_add(1)?.checked_mul(size)).is_none_or(|end| end > member.size) {
            return fail(format!(
                "'{}': {:?} with strides {:?} from {} reaches beyond its {} bytes",
                storage.key, view.dims, view.strides, view.offset, member.size
            ));
        }
        let most = (member.size.saturating_mul(MAX_EXPANSION as u64)).max(MAX_EXPANDED as u64);
        if numel * size > most {
            return fail(format!(
                "'{}': the shape {:?} repeats its elements too often",
                storage.key, view.dims
            ));
        }
        Ok(())
    }
}

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    // Entries are complete when they are inserted, so a panic in another thread leaves the map valid.
    m.lock().unwrap_or_else(|e| e.into_inner())
}

/// Converts bools to 0 or 1, because PyTorch reads every byte other than 0 as true.
fn booleans(dtype: DType, bytes: Bytes) -> Bytes {
    match dtype == DType::Bool && bytes.iter().any(|b| *b > 1) {
        true => bytes.iter().map(|b| u8::from(*b != 0)).collect::<Vec<u8>>().into(),
        false => bytes,
    }
}

/// Whether the elements are in row-major order without gaps.
fn contiguous(view: &View) -> bool {
    let mut want = 1usize;
    if view.dims.contains(&0) {
        return true;
    }
    view.dims.iter().zip(&view.strides).rev().all(|(d, s)| {
        let fits = *d == 1 || *s == want;
        want = want.saturating_mul(*d);
        fits
    })
}

/// Appends the elements of a strided tensor in row-major order. All elements must lie within `bytes`.
fn gather(view: &View, size: usize, bytes: &[u8], out: &mut Vec<u8>) {
    let numel: usize = view.dims.iter().product();
    let mut index = vec![0usize; view.dims.len()];
    let mut at = view.offset as usize;
    for _ in 0..numel {
        out.extend_from_slice(&bytes[at * size..(at + 1) * size]);
        for axis in (0..index.len()).rev() {
            index[axis] += 1;
            // The addition may wrap, because the stride of an axis of size 1 may be any number. The stride is
            // subtracted again below.
            at = at.wrapping_add(view.strides[axis]);
            if index[axis] < view.dims[axis] {
                break;
            }
            at = at.wrapping_sub(view.strides[axis].wrapping_mul(view.dims[axis]));
            index[axis] = 0;
        }
    }
}

/// The tensors of nested dicts, lists and tuples, by their joined names.
fn flatten(arena: &Arena, pickle: &[u8], root: Value) -> std::result::Result<BTreeMap<String, u32>, String> {
    // This limit bounds the memory for names: if dicts contain the same dict several times, a small file can
    // have a huge number of names.
    let most = pickle.len().saturating_mul(16).saturating_add(1 << 20);
    let (mut out, mut bytes) = (BTreeMap::new(), 0usize);
    let mut stack = vec![(String::new(), root, 0usize)];
    let mut push = |stack: &mut Vec<_>, name: &str, own: &str, value: Value, depth: usize| {
        if !matches!(value, Value::Tensor(_) | Value::Dict(_) | Value::Items(_)) {
            return Ok(());
        }
        bytes = bytes.saturating_add(name.len() + own.len() + 64);
        if bytes > most || depth > MAX_DEPTH {
            return Err("its dicts are nested too deeply, or appear too often in each other".to_string());
        }
        stack.push((if name.is_empty() { own.to_string() } else { format!("{name}.{own}") }, value, depth));
        Ok(())
    };
    while let Some((name, value, depth)) = stack.pop() {
        match value {
            Value::Tensor(t) => {
                let name = if name.is_empty() { "tensor".to_string() } else { name };
                if out.contains_key(&name) {
                    return Err(format!("two tensors are called '{name}'"));
                }
                out.insert(name, t);
            }
            Value::Dict(d) => {
                for (key, value) in &arena.dicts[d as usize] {
                    let key = match key {
                        Value::Text(from, to) => {
                            let text = pickle.get(*from as usize..*to as usize).unwrap_or_default();
                            String::from_utf8_lossy(text).into_owned()
                        }
                        Value::Int(n) => n.to_string(),
                        _ => continue,
                    };
                    push(&mut stack, &name, &key, *value, depth + 1)?;
                }
            }
            Value::Items(i) => {
                for (k, value) in arena.items[i as usize].iter().enumerate() {
                    push(&mut stack, &name, &k.to_string(), *value, depth + 1)?;
                }
            }
            _ => {}
        }
    }
    Ok(out)
}

#[cfg(test)]
mod tests;
