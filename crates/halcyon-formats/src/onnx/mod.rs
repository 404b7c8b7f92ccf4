//! ONNX models and tensors.
//!
//! [`Model::open`] maps and decodes a file, [`Model::check`] lists what of it is unsupported before any weight is touched,
//! [`Model::import`] builds its graph for given input shapes. Operators are rows in [`ops`].

mod build;
mod function;
mod host;
mod import;
#[cfg(test)]
mod import_tests;
mod item;
mod model;
mod node;
pub mod ops;
mod order;
pub mod proto;
mod random;
#[cfg(test)]
mod reference;
pub mod sparse;
mod stage;
#[cfg(test)]
mod stage_tests;
pub mod tensor;
#[cfg(test)]
mod test_models;
pub mod wire;

pub use build::{Builder, Value};
pub use import::{Imported, Outcome};
pub use item::{Datum, Item, Keys, Text};
pub use model::{Model, Port, PortType};
pub use node::Call;
pub use stage::{Engine, Handle, Placement, Read};
