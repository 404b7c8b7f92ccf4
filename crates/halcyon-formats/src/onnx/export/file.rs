//! Models as bytes and files.

use super::super::proto::{EXTERNAL, ModelProto, StringStringEntryProto};
use super::{ExportOptions, export};
use crate::io;
use bytes::Bytes;
use halcyon_ir::{Error, Graph, Result};
use prost::Message;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

/// Largest message that every protobuf reader takes.
const LARGEST: usize = i32::MAX as usize;
/// Smallest tensor that is worth a place in the second file, in bytes.
const LEAST: usize = 1024;
/// Offsets are multiples of a page, and for tensors from this size on of what Windows maps in, as onnx.proto advises.
const PAGE: (u64, u64) = (4096, 65_536);
const LARGE: usize = 1 << 20;

/// What was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Written {
    pub nodes: usize,
    pub initializers: usize,
    /// Bytes of the model file.
    pub model_bytes: u64,
    /// The file of weights beside it and its bytes, if there is one.
    pub data: Option<(PathBuf, u64)>,
}

/// The model as one message.
///
/// # Errors
/// As [`export`]; [`Error::Unsupported`] above 2 GiB, which protobuf readers refuse.
pub fn to_bytes(graph: &Graph, options: &ExportOptions) -> Result<Vec<u8>> {
    let m = export(graph, options)?;
    match m.encoded_len() {
        n if n > LARGEST => Err(Error::unsupported(
            format!("a model of {n} bytes as one message"),
            "Write it to a file, which keeps the weights in another one",
        )),
        _ => Ok(m.encode_to_vec()),
    }
}

/// Writes the model to `path`. With [`ExportOptions::external_data`], or where the model would pass 2 GiB, the larger weights go to a
/// file of that name with `.data` added. Both replace files of their names only when they are complete, so a model may be written over
/// the one that its weights are still mapped from.
///
/// # Errors
/// As [`export`]; [`Error::Io`]; [`Error::Argument`] for a file name that ONNX cannot refer to.
pub fn write(graph: &Graph, path: &Path, options: &ExportOptions) -> Result<Written> {
    let mut m = export(graph, options)?;
    let name = path
        .file_name()
        .and_then(|n| n.to_str())
        .ok_or_else(|| Error::argument("export", format!("{} is no file name", path.display())))?
        .to_string();
    let beside = |ending: &str| path.with_file_name(format!("{name}{ending}"));
    let mut temp = Temporary(vec![]);
    let mut data = None;
    if options.external_data || m.encoded_len() > LARGEST {
        let location = format!("{name}.data");
        if location.contains(['\\', ':']) {
            let what = format!("'{location}' has characters that a model may not refer to a file by");
            return Err(Error::argument("export", what));
        }
        let part = temp.add(beside(".data.part"));
        let bytes = move_out(&mut m, &part, &location)?;
        data = Some((beside(".data"), bytes, part));
    }
    let part = temp.add(beside(".part"));
    let bytes = m.encode_to_vec();
    std::fs::write(&part, &bytes).map_err(|e| io(&part, e))?;
    let g = m.graph.unwrap_or_default();
    let mut out = Written {
        nodes: g.node.len(),
        initializers: g.initializer.len(),
        model_bytes: bytes.len() as u64,
        data: None,
    };
    let rename = |from: &Path, to: &Path| std::fs::rename(from, to).map_err(|e| io(to, e));
    if let Some((to, n, from)) = data {
        rename(&from, &to)?;
        out.data = Some((to, n));
    }
    rename(&part, path)?;
    Ok(out)
}

/// Unfinished files, which do not outlive an error.
struct Temporary(Vec<PathBuf>);

impl Temporary {
    fn add(&mut self, p: PathBuf) -> PathBuf {
        self.0.push(p.clone());
        p
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        for p in &self.0 {
            // Gone already when it got its name.
            let _ = std::fs::remove_file(p);
        }
    }
}

/// Moves the weights to a file; its size.
fn move_out(m: &mut ModelProto, path: &Path, location: &str) -> Result<u64> {
    let err = |e| io(path, e);
    let mut out = BufWriter::new(File::create(path).map_err(err)?);
    let mut at = 0u64;
    let weights = m.graph.iter_mut().flat_map(|g| &mut g.initializer);
    for t in weights {
        let Some(raw) = t.raw_data.take_if(|raw: &mut Bytes| raw.len() >= LEAST) else { continue };
        let start = at.next_multiple_of(if raw.len() >= LARGE { PAGE.1 } else { PAGE.0 });
        std::io::copy(&mut std::io::Read::take(std::io::repeat(0), start - at), &mut out).map_err(err)?;
        out.write_all(&raw).map_err(err)?;
        at = start + raw.len() as u64;
        let entry = |key: &str, value: String| StringStringEntryProto { key: key.into(), value };
        t.data_location = EXTERNAL;
        t.external_data = vec![
            entry("location", location.into()),
            entry("offset", start.to_string()),
            entry("length", raw.len().to_string()),
        ];
    }
    out.flush().map_err(err)?;
    Ok(at)
}
