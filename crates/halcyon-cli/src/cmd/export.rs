//! `halcyon export`: a model as its graph, after the passes that no device decides.

use crate::args::ExportArgs;
use crate::report::{self, size};
use crate::source;
use halcyon::ir::passes::{cse, fold, simplify};
use halcyon::{Result, Shape};
use halcyon_formats::onnx::Model;
use halcyon_formats::onnx::export::{ExportOptions, write};
use serde_json::json;

pub fn main(a: &ExportArgs) -> Result<u8> {
    let model = Model::open(&a.model)?;
    model.check("")?;
    let shapes = source::shapes(&model.inputs()?, &a.inputs)?;
    let given: Vec<(&str, Shape)> = shapes.iter().map(|(n, d)| (n.as_str(), Shape::from(&d[..]))).collect();
    let before = model.summary().nodes;
    // The passes that depend on no device; element types stay as they are.
    let (graph, folded) = fold::run(&model.import(&given)?.graph)?;
    let (graph, simplified) = simplify::run(&graph)?;
    let (graph, merged) = cse::run(&graph)?;
    let options = ExportOptions { opset: a.opset, external_data: a.external_data };
    let w = write(&graph, &a.output, &options)?;
    if a.json {
        report::print_json(&json!({
            "model": a.model,
            "output": a.output,
            "opset": a.opset,
            "nodes": { "before": before, "after": w.nodes },
            "weights": w.initializers,
            "model_bytes": w.model_bytes,
            "data": w.data.as_ref().map(|(p, n)| json!({ "file": p, "bytes": n })),
            "folded": folded,
            "simplified": simplified,
            "merged": merged,
        }))?;
    } else {
        let data = match &w.data {
            Some((p, n)) => format!(" and {} ({})", p.display(), size(*n)),
            None => String::new(),
        };
        report::print(&format!(
            "{} ({}){data}: opset {}, {} nodes of {before}, {} weights\n",
            a.output.display(),
            size(w.model_bytes),
            a.opset,
            w.nodes,
            w.initializers,
        ))?;
    }
    Ok(0)
}
