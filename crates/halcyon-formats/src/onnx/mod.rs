//! ONNX models and tensors.
//!
//! [`Model::open`] maps and decodes a file. [`Model::check`] lists the unsupported operators without reading
//! any weight. [`Model::import`] builds the graph for given input shapes. The supported operators are the
//! rows of the tables in [`ops`].

mod body;
mod build;
pub mod export;
mod expose;
mod function;
mod host;
mod import;
#[cfg(test)]
mod import_tests;
mod item;
mod ledger;
mod limits;
#[cfg(test)]
mod loop_tests;
mod model;
mod node;
pub mod ops;
mod order;
#[cfg(test)]
mod page;
pub mod proto;
mod random;
#[cfg(test)]
mod reference;
pub mod sparse;
mod stage;
#[cfg(test)]
mod stage_tests;
mod summary;
pub mod tensor;
#[cfg(test)]
mod test_models;
mod trace;
pub mod wire;

pub use build::{Builder, Value};
pub use expose::MainNode;
pub use import::{Imported, Outcome};
pub use item::{Datum, Item, Keys, Text};
pub use limits::{Cancel, MAX_ITERATIONS, RunOptions};
pub use model::{Model, OpenOptions, Port, PortType};
pub use node::Call;
pub use stage::{Engine, Handle, LoopRun, Placement, Read};
pub use summary::{Operator, Summary, Weight};
