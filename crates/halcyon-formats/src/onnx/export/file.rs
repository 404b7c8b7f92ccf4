//! Models as bytes and files.

use super::super::proto::{EXTERNAL, ModelProto, StringStringEntryProto};
use super::{ExportOptions, export};
use crate::output::Output;
use bytes::Bytes;
use halcyon_ir::{Error, Graph, Result};
use prost::Message;
use std::io::Write;
use std::path::{Path, PathBuf};

/// Largest message that every protobuf reader takes.
const LARGEST: usize = i32::MAX as usize;
/// Smallest tensor that is worth a place in the second file, in bytes.
const LEAST: usize = 1024;
/// Offsets are multiples of a page, and for tensors from this size on of what Windows maps in, as onnx.proto
/// advises.
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

/// Writes the model to `path`, as [`crate::output`] writes files: `-` is standard output, and devices and
/// pipes are written in place. With [`ExportOptions::external_data`], or where the model would pass 2 GiB,
/// the larger weights go to a file of that name with `.data` added. Both replace files of their names only
/// when they are complete, so a model may be written over the one that its weights are still mapped from. A
/// `.data` file is only replaced where the model that was there named it: another one is somebody's.
///
/// # Errors
/// As [`export`]; [`Error::Io`]; [`Error::Argument`] for a file name that ONNX cannot refer to, for a second
/// file beside a pipe or a device, and for a `.data` file that is none of the model's.
pub fn write(graph: &Graph, path: &Path, options: &ExportOptions) -> Result<Written> {
    let mut m = export(graph, options)?;
    let mut model = Output::create(path)?;
    let mut data = None;
    if options.external_data || m.encoded_len() > LARGEST {
        let (to, location) = data_file(path, model.is_stream())?;
        let mut out = Output::create(&to)?;
        move_out(&mut m, &mut out, &location).map_err(|e| out.failed(&e))?;
        data = Some((to, out));
    }
    let bytes = m.encode_to_vec();
    model.write_all(&bytes).map_err(|e| model.failed(&e))?;
    let g = m.graph.unwrap_or_default();
    model.settle()?;
    if let Some((_, out)) = &mut data {
        out.settle()?;
    }
    let data = data.map(|(to, out)| out.finish().map(|n| (to, n))).transpose()?;
    let model_bytes = model.finish()?;
    Ok(Written { nodes: g.node.len(), initializers: g.initializer.len(), model_bytes, data })
}

/// The second file's path, and the name by which the model refers to it.
fn data_file(path: &Path, stream: bool) -> Result<(PathBuf, String)> {
    let refuse = |what: String| Err(Error::argument("export", what));
    if stream {
        return refuse(format!(
            "weights in a second file need a file to lie beside, which {} is not; name one with -o",
            path.display()
        ));
    }
    let Some(name) = path.file_name().and_then(|n| n.to_str()) else {
        return refuse(format!(
            "a model refers to its second file by name, in UTF-8, which {} is not; choose another name",
            path.display()
        ));
    };
    let location = format!("{name}.data");
    if location.contains(['\\', ':']) {
        return refuse(format!("'{location}' has characters that a model may not refer to a file by"));
    }
    let to = path.with_file_name(&location);
    if std::fs::symlink_metadata(&to).is_ok() && !names(path, &location) {
        return refuse(format!(
            "{} is there and is no part of a model at {}; move it away or choose another name",
            to.display(),
            path.display()
        ));
    }
    Ok((to, location))
}

/// Whether there is a model at `path` whose weights lie in `location`.
fn names(path: &Path, location: &str) -> bool {
    let model = crate::mmap::open(path).ok().and_then(|b| ModelProto::decode(b).ok());
    let mut weights = model.iter().flat_map(|m| &m.graph).flat_map(|g| &g.initializer);
    weights.any(|t| t.external_data.iter().any(|e| e.key == "location" && e.value == location))
}

/// Moves the weights to a file.
fn move_out(m: &mut ModelProto, out: &mut Output, location: &str) -> std::io::Result<()> {
    let mut at = 0u64;
    let weights = m.graph.iter_mut().flat_map(|g| &mut g.initializer);
    for t in weights {
        let Some(raw) = t.raw_data.take_if(|raw: &mut Bytes| raw.len() >= LEAST) else { continue };
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
