//! Tensors in safetensors files. If the tensors exceed a limit, they are divided into several files. The
//! files have the names that Hugging Face uses: `model.safetensors`, or `model-00001-of-00003.safetensors`
//! and so on with the index `model.safetensors.index.json`.

use super::manifest::FileRecord;
use flate2::Crc;
use halcyon::ir::error::{Error, Result};
use halcyon::{ConstData, Tensor};
use halcyon_formats::safetensors::{self, SafeTensors};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashSet};
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// The largest accepted size of an index in bytes.
const MOST_INDEX: u64 = 256 << 20;

/// The index of several files.
#[derive(Debug, Serialize, Deserialize)]
struct Index {
    metadata: IndexMetadata,
    weight_map: BTreeMap<String, String>,
}

#[derive(Debug, Serialize, Deserialize)]
struct IndexMetadata {
    total_size: u64,
}

fn bytes_of(t: &Tensor) -> Result<u64> {
    let n: usize = t.dims()?.iter().product();
    Ok(t.dtype()?.bytes(n) as u64)
}

/// Writes tensors to files of at most `limit` bytes of data each. A tensor that is larger than `limit` gets
/// its own file. Values are copied to the host for one file at a time. Returns the files that were written.
pub(super) fn write(
    folder: &Path,
    stem: &str,
    tensors: &[(String, Tensor)],
    limit: u64,
) -> Result<Vec<(String, FileRecord)>> {
    let mut parts: Vec<Vec<&(String, Tensor)>> = vec![vec![]];
    let (mut filled, mut total) = (0u64, 0u64);
    for named in tensors {
        let n = bytes_of(&named.1)?;
        if filled > 0 && filled.saturating_add(n) > limit {
            parts.push(vec![]);
            filled = 0;
        }
        filled += n;
        total += n;
        if let Some(part) = parts.last_mut() {
            part.push(named);
        }
    }
    let count = parts.len();
    let name = |i: usize| match count {
        1 => format!("{stem}.safetensors"),
        _ => format!("{stem}-{:05}-of-{count:05}.safetensors", i + 1),
    };
    let mut files = vec![];
    for (i, part) in parts.iter().enumerate() {
        let data = part.iter().map(|(n, t)| Ok((n.as_str(), t.to_data()?))).collect::<Result<Vec<_>>>()?;
        let refs: Vec<(&str, &ConstData)> = data.iter().map(|(n, t)| (*n, t)).collect();
        let format = BTreeMap::from([("format".to_string(), "pt".to_string())]);
        safetensors::write(&folder.join(name(i)), &refs, &format)?;
        files.push(name(i));
    }
    if count > 1 {
        let of = |i: usize| parts[i].iter().map(move |(n, _)| (n.clone(), i));
        let weight_map = (0..count).flat_map(of).map(|(n, i)| (n, name(i))).collect();
        let index = Index { metadata: IndexMetadata { total_size: total }, weight_map };
        let text = serde_json::to_vec_pretty(&index).map_err(|e| Error::internal(e.to_string()))?;
        let own = format!("{stem}.safetensors.index.json");
        halcyon_host::output::write(&folder.join(&own), &text)?;
        files.push(own);
    }
    files.into_iter().map(|n| Ok((n.clone(), record(&folder.join(n))?))).collect()
}

/// Size and checksum of a file.
pub(super) fn record(path: &Path) -> Result<FileRecord> {
    let io = |e: std::io::Error| Error::Io { path: path.display().to_string(), what: e.to_string() };
    let mut file = File::open(path).map_err(io)?;
    let (mut crc, mut bytes) = (Crc::new(), 0u64);
    let mut part = vec![0u8; 1 << 18];
    loop {
        match file.read(&mut part).map_err(io)? {
            0 => return Ok(FileRecord { bytes, crc32: crc.sum() }),
            n => {
                crc.update(&part[..n]);
                bytes += n as u64;
            }
        }
    }
}

/// Tensors of one or several files, by name.
#[derive(Debug)]
pub(super) struct Tensors {
    files: Vec<SafeTensors>,
    /// The file of each tensor.
    of: BTreeMap<String, usize>,
}

impl Tensors {
    /// Opens the files of `stem` in a folder. The folder has either one file or an index with several files.
    pub(super) fn open(folder: &Path, stem: &str) -> Result<Tensors> {
        let single = folder.join(format!("{stem}.safetensors"));
        if single.exists() {
            let file = SafeTensors::open(&single)?;
            let of = file.names().map(|n| (n.to_string(), 0)).collect();
            return Ok(Tensors { files: vec![file], of });
        }
        let path = folder.join(format!("{stem}.safetensors.index.json"));
        let text = halcyon_host::input::text_of(&path, MOST_INDEX).map_err(|e| e.error(&path))?;
        let bad = |what: String| Error::Format { file: path.display().to_string(), what };
        let index: Index = serde_json::from_str(&text).map_err(|e| bad(e.to_string()))?;
        let (mut files, mut opened, mut of) = (vec![], BTreeMap::new(), BTreeMap::new());
        for (name, file) in index.weight_map {
            if file.contains(['/', '\\']) || file.starts_with('.') {
                return Err(bad(format!("'{file}' is not a file name")));
            }
            let i = match opened.get(&file) {
                Some(i) => *i,
                None => {
                    files.push(SafeTensors::open(&folder.join(&file))?);
                    opened.insert(file.clone(), files.len() - 1);
                    files.len() - 1
                }
            };
            of.insert(name, i);
        }
        // This makes one pass over each file, because searching for each name would take quadratic time.
        let own = files.iter().enumerate().flat_map(|(i, f)| f.names().map(move |n| (n, i)));
        let own: HashSet<(&str, usize)> = own.collect();
        if let Some((name, _)) = of.iter().find(|(n, i)| !own.contains(&(n.as_str(), **i))) {
            return Err(bad(format!("the tensor '{name}' is not in the file that the index names")));
        }
        drop(own);
        Ok(Tensors { files, of })
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.of.keys().map(String::as_str)
    }

    pub(super) fn get(&self, name: &str) -> Option<Result<ConstData>> {
        self.of.get(name).map(|i| self.files[*i].get(name))
    }
}
