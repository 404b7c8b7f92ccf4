//! `halcyon export`: writes a model's graph after the device-independent passes.

use crate::args::ExportArgs;
use crate::report::{self, size};
use crate::source;
use halcyon::ir::passes::{cse, fold, simplify};
use halcyon::ir::{Graph, Op};
use halcyon::{Error, Result, Shape};
use halcyon_formats::onnx::Model;
use halcyon_formats::onnx::export::{ExportOptions, Written, write};
use halcyon_formats::output;
use serde_json::json;
use std::collections::HashSet;
use std::path::Path;

pub(crate) fn main(a: &ExportArgs) -> Result<u8> {
    // If the model goes to stdout, the report goes to stderr.
    let piped = output::is_stdout(&a.output);
    if piped && a.json {
        return Err(Error::argument("export", "the model and --json both go to standard output; choose one"));
    }
    let model = super::open(&a.model)?;
    model.check("")?;
    let shapes = source::shapes(&model.inputs()?, &a.inputs)?;
    let given: Vec<(&str, Shape)> = shapes.iter().map(|(n, d)| (n.as_str(), Shape::from(&d[..]))).collect();
    let before = OriginalModel::of(&a.model, &model);
    // Device-independent passes; dtypes stay unchanged.
    let (graph, folded) = fold::run_lean(&model.import(&given)?.graph)?;
    let (graph, simplified) = simplify::run(&graph)?;
    let (graph, merged) = cse::run(&graph)?;
    let options = ExportOptions { opset: a.opset, external_data: a.external_data };
    let weights = weights(&graph);
    let w = write(&graph, &a.output, &options)?;
    let grown = before.grown(&w, weights, a.opset);
    if a.json {
        report::print_json(&json!({
            "model": report::path(&a.model),
            "output": report::path(&a.output),
            "opset": a.opset,
            "nodes": { "before": before.nodes, "after": w.nodes },
            "weights": w.initializers,
            "model_bytes": w.model_bytes,
            "data": w.data.as_ref().map(|(p, n)| json!({ "file": report::path(p), "bytes": n })),
            "bytes": { "before": before.bytes, "after": total(&w) },
            "grown": grown,
            "folded": folded,
            "simplified": simplified,
            "merged": merged,
        }))?;
    } else {
        let data = match &w.data {
            Some((p, n)) => format!(" and {} ({})", report::path_text(p), size(*n)),
            None => String::new(),
        };
        let text = format!(
            "{} ({}){data}: opset {}, {} nodes of {}, {} weights",
            report::path_text(&a.output),
            size(w.model_bytes),
            a.opset,
            w.nodes,
            before.nodes,
            w.initializers,
        );
        let text = match &grown {
            Some(why) => format!("{text}\n{why}"),
            None => text,
        };
        match piped {
            true => report::note(&text),
            false => report::print(&(text + "\n"))?,
        }
    }
    Ok(0)
}

/// The original model.
struct OriginalModel {
    /// Bytes of the model's file and external data, if known.
    bytes: Option<u64>,
    /// Bytes of its weights.
    weights: u64,
    nodes: usize,
}

impl OriginalModel {
    fn of(path: &Path, model: &Model) -> OriginalModel {
        let s = model.summary();
        let external = s.weights.iter().filter(|w| w.external).map(|w| w.bytes).fold(0, u64::saturating_add);
        OriginalModel {
            // A pipe has no length.
            bytes: std::fs::metadata(path)
                .ok()
                .filter(|m| m.is_file())
                .map(|m| m.len().saturating_add(external)),
            weights: s.weights.iter().map(|w| w.bytes).fold(0, u64::saturating_add),
            nodes: s.nodes,
        }
    }

    /// The parts of the model that grew, if the written model is larger than the original.
    fn grown(&self, w: &Written, weights: u64, opset: i64) -> Option<String> {
        let (before, after) = (self.bytes?, total(w));
        if after <= before {
            return None;
        }
        let mut why = vec![];
        if let Some(more) = weights.checked_sub(self.weights).filter(|n| *n > 0) {
            why.push(format!("weights and folded constants take {} more", size(more)));
        }
        let rest = |all: u64, weights: u64| all.saturating_sub(weights);
        if let Some(more) = rest(after, weights).checked_sub(rest(before, self.weights)).filter(|n| *n > 0) {
            let nodes = match w.nodes > self.nodes {
                true => format!(
                    "; there are {} nodes instead of {}: functions, control flow and operators that opset {opset} does not have are written \
                     as several nodes",
                    w.nodes, self.nodes
                ),
                false => String::new(),
            };
            why.push(format!("names, types and nodes take {} more{nodes}", size(more)));
        }
        Some(format!(
            "{} more than the {} that were read: {}",
            size(after - before),
            size(before),
            why.join("; ")
        ))
    }
}

/// Total bytes of the written files.
fn total(w: &Written) -> u64 {
    w.model_bytes.saturating_add(w.data.as_ref().map_or(0, |(_, n)| *n))
}

/// Bytes of a graph's constants, each counted once.
fn weights(g: &Graph) -> u64 {
    let mut seen = HashSet::new();
    let constants = g.nodes().iter().filter_map(|n| match &n.op {
        Op::Const(c) => Some(c),
        _ => None,
    });
    constants.filter(|c| seen.insert(c.key())).map(|c| c.bytes().len() as u64).fold(0, u64::saturating_add)
}
