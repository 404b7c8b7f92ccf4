//! ONNX models and tensors.
//!
//! [`Model::open`] maps and decodes a file, [`Model::check`] lists what of it is unsupported before any weight is touched,
//! [`Model::import`] builds its graph for given input shapes. Operators are rows in [`ops`].

mod build;
pub mod export;
mod host;
mod import;
#[cfg(test)]
mod import_tests;
mod model;
mod node;
pub mod ops;
pub mod proto;
#[cfg(test)]
mod reference;
pub mod tensor;
#[cfg(test)]
mod test_models;

pub use build::{Builder, Value};
pub use import::Imported;
pub use model::{Model, Port};
pub use node::Call;
