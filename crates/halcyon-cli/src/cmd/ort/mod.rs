//! ONNX Runtime as the program that runs a model, for `run --runtime ort` and `compare`.

#[cfg(feature = "ort")]
mod on;
#[cfg(feature = "ort")]
pub(super) use on::{Ort, OrtModel};

#[cfg(not(feature = "ort"))]
mod off;
#[cfg(not(feature = "ort"))]
pub(super) use off::{Ort, OrtModel};
