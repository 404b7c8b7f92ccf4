//! Reads and writes model and tensor files: ONNX, safetensors, GGUF and NumPy. Reads the weights of PyTorch's
//! `.pt` files. Also decodes the images of ONNX's ImageDecoder.
//!
//! Contract of the crate:
//! - Every parser distrusts its input. Lengths and offsets are checked against the file before anything is
//!   sliced or allocated. A malformed file gives an [`halcyon_ir::Error::Format`] that names the file and the
//!   place.
//! - Weights are copied only if they must be converted or unpacked. A file is mapped once ([`mmap::open`]),
//!   and a tensor that is not copied is a slice of that map. Such a slice need not be aligned to its element
//!   type.
//! - A file's kind is detected from its content ([`sniff::kind`]), never from its name alone.
#![deny(unsafe_code)]
pub mod data;
pub mod foreign;
pub mod gguf;
pub mod jpeg;
pub mod mmap;
pub mod npy;
pub mod npz;
pub mod onnx;
pub mod picture;
pub mod safetensors;
pub mod sniff;
pub mod torch;
mod zip;
pub use halcyon_host::{input, output};
pub use halcyon_ir::ConstData;

use halcyon_ir::Error;
use std::path::Path;

/// An [`Error::Format`] about `file`.
pub(crate) fn bad(file: &str, what: impl Into<String>) -> Error {
    Error::Format { file: file.into(), what: what.into() }
}

/// An [`Error::Io`] about `path`.
pub(crate) fn io(path: &Path, e: std::io::Error) -> Error {
    Error::Io { path: path.display().to_string(), what: e.to_string() }
}
