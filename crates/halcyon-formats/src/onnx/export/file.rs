//! Writes exported models as bytes and files.

use super::super::proto::{EXTERNAL, ModelProto, StringStringEntryProto};
use super::{ExportOptions, export};
use crate::output::Output;
use bytes::Bytes;
use halcyon_ir::{Error, Graph, Result};
use prost::Message;
use std::io::Write;
use std::path::{Path, PathBuf};

/// Largest message that every protobuf reader accepts.
const MAX_MESSAGE: usize = i32::MAX as usize;
/// Tensors below this many bytes stay in the model file.
const MIN_EXTERNAL_BYTES: usize = 1024;
/// Alignment of offsets in the external data, as onnx.proto advises: a page, and for tensors of at least
/// `LARGE` bytes the allocation granularity of Windows.
const PAGE: (u64, u64) = (4096, 65_536);
const LARGE: usize = 1 << 20;

/// A report of the files written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Written {
    pub nodes: usize,
    pub initializers: usize,
    /// Bytes of the model file.
    pub model_bytes: u64,
    /// The external data file and its size in bytes, if there is one.
    pub data: Option<(PathBuf, u64)>,
}

/// Encodes the model as one message.
///
/// # Errors
/// The errors of [`export`]; [`Error::Unsupported`] above 2 GiB, which protobuf readers reject.
pub fn to_bytes(graph: &Graph, options: &ExportOptions) -> Result<Vec<u8>> {
    let m = export(graph, options)?;
    match m.encoded_len() {
        n if n > MAX_MESSAGE => Err(Error::unsupported(
            format!("a model of {n} bytes as one message"),
            "Write the model to a file; its larger weights then go to a second file",
        )),
        _ => Ok(m.encode_to_vec()),
    }
}

/// Writes the model to `path` as [`crate::output`] does: `-` is standard output, and devices and pipes are
/// written in place. With [`ExportOptions::external_data`], or if the model would exceed 2 GiB, larger
/// weights go to a second file with `.data` appended to the name. Both files are replaced only once they are
/// complete, so a model may overwrite the file that its weights are mapped from. An existing `.data` file is
/// replaced only if the model at `path` refers to it.
///
/// # Errors
/// The errors of [`export`]; [`Error::Io`]; [`Error::Argument`] for a file name that ONNX cannot refer to,
/// for external data beside a pipe or a device, and for a `.data` file that does not belong to the model.
pub fn write(graph: &Graph, path: &Path, options: &ExportOptions) -> Result<Written> {
    let mut m = export(graph, options)?;
    let mut model = Output::create(path)?;
    let mut data = None;
    if options.external_data || m.encoded_len() > MAX_MESSAGE {
        let (to, location) = data_file(path, model.is_stream())?;
        let mut out = Output::create(&to)?;
        write_external_data(&mut m, &mut out, &location).map_err(|e| out.failed(&e))?;
        data = Some((to, out));
    }
    let bytes = m.encode_to_vec();
    model.write_all(&bytes).map_err(|e| model.failed(&e))?;
    let g = m.graph.unwrap_or_default();
    model.flush_to_disk()?;
    if let Some((_, out)) = &mut data {
        out.flush_to_disk()?;
    }
    let data = data.map(|(to, out)| out.finish().map(|n| (to, n))).transpose()?;
    let model_bytes = model.finish()?;
    Ok(Written { nodes: g.node.len(), initializers: g.initializer.len(), model_bytes, data })
}

/// The path of the external data file, and the location by which the model refers to it.
fn data_file(path: &Path, stream: bool) -> Result<(PathBuf, String)> {
    let refuse = |what: String| Err(Error::argument("export", what));
    if stream {
        return refuse(format!(
            "the weights go to a second file beside the model, and {} is not a regular file; name a file with -o",
            path.display()
        ));
    }
    let Some(name) = path.file_name().and_then(|n| n.to_str()) else {
        return refuse(format!(
            "a model refers to its second file by name, and the name of {} is not UTF-8; choose another name",
            path.display()
        ));
    };
    let location = format!("{name}.data");
    if location.contains(['\\', ':']) {
        return refuse(format!(
            "'{location}' has a character (\\\\ or :) that ONNX does not allow in the name of a data file; choose another name"
        ));
    }
    let to = path.with_file_name(&location);
    if std::fs::symlink_metadata(&to).is_ok() && !refers_to(path, &location) {
        return refuse(format!(
            "{} exists and does not belong to a model at {}; move it away or choose another name",
            to.display(),
            path.display()
        ));
    }
    Ok((to, location))
}

/// Whether the file at `path` is a model with external data in `location`.
fn refers_to(path: &Path, location: &str) -> bool {
    let model = crate::mmap::open(path).ok().and_then(|b| ModelProto::decode(b).ok());
    let mut weights = model.iter().flat_map(|m| &m.graph).flat_map(|g| &g.initializer);
    weights.any(|t| t.external_data.iter().any(|e| e.key == "location" && e.value == location))
}

/// Moves the larger weights to the external data file.
fn write_external_data(m: &mut ModelProto, out: &mut Output, location: &str) -> std::io::Result<()> {
    let mut at = 0u64;
    let weights = m.graph.iter_mut().flat_map(|g| &mut g.initializer);
    for t in weights {
        let Some(raw) = t.raw_data.take_if(|raw: &mut Bytes| raw.len() >= MIN_EXTERNAL_BYTES) else {
            continue;
        };
        let start = at.next_multiple_of(if raw.len() >= LARGE { PAGE.1 } else { PAGE.0 });
        std::io::copy(&mut std::io::Read::take(std::io::repeat(0), start - at), out)?;
        out.write_all(&raw)?;
        at = start + raw.len() as u64;
        let entry = |key: &str, value: String| StringStringEntryProto { key: key.into(), value };
        t.data_location = EXTERNAL;
        t.external_data = vec![
            entry("location", location.into()),
            entry("offset", start.to_string()),
            entry("length", raw.len().to_string()),
        ];
    }
    Ok(())
}
