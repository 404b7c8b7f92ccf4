//! Exports graphs as ONNX models.
//!
//! [`export`] returns a model in memory. `write` writes a file. If this file would exceed the 2 GiB limit of
//! protobuf messages, the larger weights go to a second file. The table in `scalar` lists the scalar ops, and
//! `ops` writes the other primitives. A composite becomes the ONNX operator of the same definition
//! (`composite`), or else its body.
//!
//! Where ONNX leaves a result undefined, the result depends on the software that runs the model: an index out
//! of range, integer division by zero, a cast of a float to an integer type that cannot hold it, the maximum
//! of two zeros of different sign or of a NaN.

mod composite;
mod emit;
mod file;
mod ops;
mod quantized;
mod scalar;
mod shape;
#[cfg(test)]
mod tests;
mod window;

pub use file::{Written, to_bytes, write};
pub use scalar::spellings;

use super::ops::LATEST;
use super::proto::ModelProto;
use halcyon_ir::composite::{Composite, CompositeKind};
use halcyon_ir::passes::inline::inline_composites;
use halcyon_ir::{Error, Graph, NodeId, Op, Result};
use std::sync::Arc;

/// Oldest version of the default operator set that can be written.
pub const OLDEST: i64 = 20;

/// Options for exporting a graph.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportOptions {
    /// Version of the default operator set, from [`OLDEST`] to [`LATEST`]. Operators that it lacks are
    /// expressed by others if possible; newer versions give shorter models.
    pub opset: i64,
    /// Stores weights in a second file even if the model would fit into one.
    pub external_data: bool,
}

impl Default for ExportOptions {
    /// Version 21, which other software has supported for years, and a single file.
    fn default() -> ExportOptions {
        ExportOptions { opset: 21, external_data: false }
    }
}

/// Metadata key of the states: a JSON list of pairs of names, `[input, output]`. The output is the next value
/// of the input.
pub const STATES: &str = "halcyon.states";

/// Converts the graph to a model. Weights are included and share memory with the graph.
///
/// Inputs and outputs keep their names. Symbolic sizes become named dimensions. Run-time arguments become the
/// scalar inputs `arg0`, `arg1`, … after the others. States are listed in the metadata under [`STATES`]. The
/// graph is written without optimisation; run the passes first for a smaller model.
///
/// # Errors
/// [`Error::Argument`] for an operator set out of range, for names shared by two inputs or two outputs, and
/// for an output that has the name of an input but is another value; [`Error::Unsupported`] for ops and
/// element types that the operator set cannot express (such as custom ops, and before version 26 a bitcast
/// from or to a float or bool), for symbolic sizes that no input's shape determines, and for symbolic sizes
/// in an op that needs numbers (such as a running maximum).
pub fn export(graph: &Graph, options: &ExportOptions) -> Result<ModelProto> {
    if !(OLDEST..=LATEST).contains(&options.opset) {
        let what = format!("operator set {} is outside {OLDEST}..={LATEST}", options.opset);
        return Err(Error::argument("export", what));
    }
    // MatMulNBits takes constants. A product whose weights are computed is written as its body.
    let is_const = |id: &NodeId| matches!(graph.node(*id).op, Op::Const(_));
    let computed: Vec<*const Composite> = (graph.nodes().iter())
        .filter(|n| n.inputs.get(1..).is_some_and(|w| !w.iter().all(is_const)))
        .filter_map(|n| match &n.op {
            Op::Composite(c) if c.kind == CompositeKind::QuantizedMatmul => Some(Arc::as_ptr(c)),
            _ => None,
        })
        .collect();
    let is_written =
        |c: &Composite| composite::direct(c, options.opset) && !computed.contains(&(c as *const _));
    let (graph, _) = inline_composites(graph, &is_written)?;
    emit::Emitter::new(&graph, options.opset)?.model()
}

/// The IR version released with an operator set (version table in ONNX's Versioning.md).
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
