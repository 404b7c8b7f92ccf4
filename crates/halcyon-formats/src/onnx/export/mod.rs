//! Graphs as ONNX models.
//!
//! [`export`] gives a model in memory, `write` a file, with the weights in a second one where the first would
//! pass the 2 GiB that a protobuf message may take. Scalar ops are rows of `scalar`'s table, the other
//! primitives are in `ops`, and a composite becomes the ONNX operator of the same definition (`composite`) or
//! else its body.
//!
//! Where ONNX leaves a result open (an index out of range, an integer divided by zero, a float cast to an
//! integer that cannot hold it, which of two zeros or whether a NaN is the larger), the engine that runs the
//! model decides.

mod composite;
mod emit;
mod file;
mod ops;
mod scalar;
mod shape;
#[cfg(test)]
mod tests;
mod window;

pub use file::{Written, to_bytes, write};
pub use scalar::spellings;

use super::ops::LATEST;
use super::proto::ModelProto;
use halcyon_ir::passes::inline::inline_composites;
use halcyon_ir::{Error, Graph, Result};

/// Oldest version of the default operator set that models are written for.
pub const OLDEST: i64 = 20;

/// How a graph is written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportOptions {
    /// Version of the default operator set, from [`OLDEST`] to [`LATEST`]. What a version lacks is written as
    /// older operators where that is possible; newer versions give shorter models.
    pub opset: i64,
    /// Puts weights into a file of their own even where the model would fit into one.
    pub external_data: bool,
}

impl Default for ExportOptions {
    /// Version 21, which engines have known for years, and one file.
    fn default() -> ExportOptions {
        ExportOptions { opset: 21, external_data: false }
    }
}

/// Key of the model's metadata that pairs states: a JSON list of `[input, output]` names, each output being
/// the input's next value.
pub const STATES: &str = "halcyon.states";

/// The graph as a model, weights included and shared with the graph.
///
/// Inputs and outputs keep their names, symbolic sizes become named ones, run-time arguments become the
/// scalar inputs `arg0`, `arg1`, … after the others, and states are listed in the metadata under [`STATES`].
/// The graph is written as it is; run the passes first for a smaller one.
///
/// # Errors
/// [`Error::Argument`] for an operator set outside the range and for names that two inputs or two outputs
/// share; [`Error::Unsupported`] for ops that the operator set cannot express (custom ops; a bitcast to a
/// float before version 26) and symbolic sizes that follow from no input's shape.
pub fn export(graph: &Graph, options: &ExportOptions) -> Result<ModelProto> {
    if !(OLDEST..=LATEST).contains(&options.opset) {
        let what = format!("operator set {} is outside {OLDEST}..={LATEST}", options.opset);
        return Err(Error::argument("export", what));
    }
    let (graph, _) = inline_composites(graph, &|c| composite::direct(c, options.opset))?;
    emit::Emitter::new(&graph, options.opset)?.model()
}

/// The IR version that came with an operator set (the table of versions in ONNX's Versioning.md).
fn ir_version(opset: i64) -> i64 {
    match opset {
        ..=20 => 9,
        21..=22 => 10,
        23 => 11,
        24 => 12,
        25..=27 => 13,
        _ => 14,
    }
}
