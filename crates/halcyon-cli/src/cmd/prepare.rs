//! `halcyon prepare`: prepares a model for a device, and reports what changed.

use super::{Loaded, backend_json, backend_text, load};
use crate::args::PrepareArgs;
use crate::report::{self, time};
use halcyon::prepare::{ModelOptimizer, OptimizationReport, ReportOptions, report_html};
use halcyon::receipts::Effort;
use halcyon::{ConstData, Error, Result, Session};
use serde_json::Value;
use std::fmt::Write;
use std::time::Instant;

/// The exit code if the results at the level cannot be compared with the results at O0 (a result has another
/// shape, or other elements are finite).
const DIFFERS: u8 = 6;

pub(crate) fn main(a: &PrepareArgs) -> Result<u8> {
    let loaded = load(&a.model, &a.input, &a.backend, true, false)?;
    let graph = loaded.graph("a report")?.graph.clone();
    let inputs: Vec<ConstData> = loaded.data().iter().filter_map(|d| d.tensor().cloned()).collect();
    report::note("measuring the model at O0, at the level, and without each transformation");
    let start = Instant::now();
    let file = a.model.file_name().map_or_else(String::new, |n| n.to_string_lossy().into_owned());
    let options = ReportOptions {
        name: file,
        effort: Effort { pairs: a.repeat as usize, ..Effort::default() },
        ..ReportOptions::default()
    };
    let session = Session::new(&loaded.backend, graph);
    let optimizer = ModelOptimizer::new(&loaded.backend);
    let (_, done) = optimizer.report(&session, a.backend.level()?, &inputs, &options)?;
    if let Some(path) = &a.html {
        halcyon_host::output::write(path, report_html(&done).as_bytes())?;
    }
    if a.json {
        report::print_json(&json(a, &loaded, &done)?)?;
    } else {
        let mut out = String::new();
        if !report::quiet() {
            out += &backend_text(&loaded.backend);
            out += &loaded.input_text();
        }
        out += &done.to_string();
        if let Some(path) = a.html.as_ref().filter(|_| !report::quiet()) {
            // Writing to a string cannot fail.
            let _ = writeln!(out, "saved    {}", report::path_text(path));
        }
        report::print(&out)?;
        report::note(&format!("measured in {}", time(start.elapsed())));
    }
    Ok(if done.result.success { 0 } else { DIFFERS })
}

fn json(a: &PrepareArgs, loaded: &Loaded, done: &OptimizationReport) -> Result<Value> {
    let mut v = serde_json::to_value(done).map_err(|e| Error::internal(e.to_string()))?;
    v["model"] = report::path(&a.model);
    v["backend"] = backend_json(&loaded.backend);
    v["inputs"] = loaded.input_json();
    v["html"] = a.html.as_deref().map_or(Value::Null, report::path);
    Ok(v)
}
