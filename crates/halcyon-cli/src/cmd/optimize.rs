//! `halcyon optimize`, and the quantisation of a model at level O3.

use super::with_tokenizer;
use crate::args::{InputArgs, OptimizeArgs, QuantizeArgs};
use crate::report::{self, size};
use crate::source::{self, Input};
use halcyon::ir::Graph;
use halcyon::ir::plan::Receipt;
use halcyon::quantize::{Activations, QuantizeOptions, Quantized, quantize};
use halcyon::{Backend, ConstData, Error, Level, Result, Shape};
use halcyon_formats::npz::Npz;
use halcyon_formats::onnx::export::{ExportOptions, export, write};
use halcyon_formats::onnx::tensor::External;
use halcyon_formats::onnx::{Model, Port};
use halcyon_formats::{input as file_input, output};
use serde_json::json;
use std::path::{Path, PathBuf};

/// The newest operator set. A quantised model that is kept in memory uses this operator set.
const IN_MEMORY: i64 = halcyon_formats::onnx::ops::LATEST;
/// One of every `SHARE` samples is used to measure the error.
const SHARE: usize = 4;
/// Minimum number of pairs of bursts for a receipt.
const RECEIPT_RUNS: usize = 7;

/// A sample: the inputs of one run.
pub(crate) type Sample = Vec<ConstData>;

pub(crate) fn main(a: &OptimizeArgs) -> Result<u8> {
    a.backend.check_with_o3()?;
    if a.backend.level()? < Level::O2 {
        return Err(Error::argument("--level", "`optimize` always works at level O3; leave it out"));
    }
    if output::is_stdout(&a.output) {
        return Err(Error::argument("-o", "name a file; the report goes to standard output"));
    }
    a.quantize.options()?;
    let model = super::open(&a.model)?;
    let input = with_tokenizer(&a.model, &a.input);
    let backend = a.backend.open_at(Level::O3, None, false)?;
    model.check(backend.info().backend.id())?;
    let ports = model.inputs()?;
    let own = match input.inputs.is_empty() && a.quantize.calibrate.is_some() {
        true => vec![],
        false => vec![sample(&ports, &input)?],
    };
    let q = quantized(&model, &backend, &a.quantize, &input, own.clone())?;
    if !q.changed() {
        return Err(Error::argument(
            "--without",
            "the quantisation is switched off, so nothing would change",
        ));
    }
    let written =
        write(&q.graph, &a.output, &ExportOptions { opset: a.opset, external_data: a.external_data })?;
    let receipt = match a.receipts {
        false => None,
        true => {
            let all = if own.is_empty() { samples(&ports, &a.quantize, &input)? } else { own };
            let measured = |s: &Sample| {
                warn_without_kernels(&q, &backend, s)?;
                q.receipt(&backend, s, RECEIPT_RUNS)
            };
            all.first().map(measured).transpose()?
        }
    };
    if a.json {
        report::print_json(&json!({
            "model": report::path(&a.model),
            "output": report::path(&a.output),
            "opset": a.opset,
            "nodes": written.nodes,
            "model_bytes": written.model_bytes,
            "data": written.data.as_ref().map(|(p, n)| json!({ "file": report::path(p), "bytes": n })),
            "backend": super::backend_json(&backend),
            "quantisation": q.report,
            "receipt": receipt,
        }))?;
        return Ok(0);
    }
    let (before, after) = q.report.bytes;
    let mut text = format!("{}\n", q.report);
    text += &format!("weights {} instead of {}\n", size(after), size(before));
    if let Some(Receipt { gain: Some(gain), .. }) = &receipt {
        text += &format!("{gain:.2}x as fast as at O2 on {}\n", backend.id());
    }
    text += &format!(
        "saved {} ({}): opset {}, {} nodes\n",
        report::path_text(&a.output),
        size(written.model_bytes),
        a.opset,
        written.nodes
    );
    report::print(&text)?;
    Ok(0)
}

/// Quantises a model for `backend`. If activations need ranges from samples, the calibration samples give
/// them, and the samples `own` measure the error. If `own` is empty, a quarter of the calibration samples
/// measures the error instead.
pub(crate) fn quantized(
    model: &Model,
    backend: &Backend,
    a: &QuantizeArgs,
    input: &InputArgs,
    own: Vec<Sample>,
) -> Result<Quantized> {
    let ports = model.inputs()?;
    let options = a.options()?;
    let all = samples(&ports, a, input)?;
    if options.weights.keeps_activations() || options.activations == Activations::Dynamic || all.is_empty() {
        return without_ranges(model, backend, &options, &ports, own.into_iter().chain(all).collect());
    }
    let held = if own.is_empty() { all.len().div_ceil(SHARE).min(all.len().saturating_sub(1)) } else { 0 };
    // Every fourth sample measures the error (of fewer than four, the last one). The last quarter would be a
    // poor choice if the files are sorted by kind.
    let is_held = |i: &usize| held > 0 && i % SHARE == SHARE - 1 || held == 1 && *i == all.len() - 1;
    let (mut calibration, mut check) = (vec![], own);
    for (i, s) in all.iter().enumerate() {
        if is_held(&i) { check.push(s.clone()) } else { calibration.push(s.clone()) }
    }
    if check.is_empty() {
        return Err(Error::argument(
            "--calibrate",
            "one sample is not enough: another one must measure the error; add samples or --input",
        ));
    }
    let ranges = format!("{} for calibration", counted(calibration.len()));
    report::note(&format!("quantising: {ranges}; the error is measured on {}", counted(check.len())));
    quantize(backend, &graph(model, &check[0], &ports)?, &calibration, &check, &options)
}

fn counted(samples: usize) -> String {
    format!("{samples} sample{}", if samples == 1 { "" } else { "s" })
}

/// Quantises a model whose activations have no ranges from samples, so every sample measures the error.
fn without_ranges(
    model: &Model,
    backend: &Backend,
    options: &QuantizeOptions,
    ports: &[Port],
    check: Vec<Sample>,
) -> Result<Quantized> {
    let Some(first) = check.first() else {
        return Err(Error::argument("--calibrate", "no samples; at least one must measure the error"));
    };
    let activations = match options.weights.keeps_activations() {
        true => "activations stay floats",
        false => "ranges of activations are computed in each run",
    };
    report::note(&format!("quantising: {activations}; the error is measured on {}", counted(check.len())));
    quantize(backend, &graph(model, first, ports)?, &[], &check, options)
}

/// Warns of quantised layers that run in f32 on dequantised weights.
pub(crate) fn warn_without_kernels(q: &Quantized, backend: &Backend, sample: &Sample) -> Result<()> {
    for t in q.types_without_kernels(backend, sample)? {
        let layers = match q.report.of_type(t) {
            1 => "1 quantised layer runs".to_string(),
            n => format!("{n} quantised layers run"),
        };
        report::warn(&format!(
            "the plan for {} has no kernel with {t} weights: {layers} in f32 on dequantised weights, which is \
             not faster than O2",
            backend.id()
        ));
    }
    Ok(())
}

/// The model's graph with symbols, or, if the model cannot have symbols, for the sizes of this sample.
fn graph(model: &Model, sample: &Sample, ports: &[Port]) -> Result<Graph> {
    match model.import(&[]) {
        Ok(i) if i.fixed.is_empty() => Ok(i.graph),
        _ => {
            let shapes: Vec<(&str, Shape)> =
                ports.iter().zip(sample).map(|(p, x)| (p.name.as_str(), Shape::from(&x.dims))).collect();
            let values: Vec<(&str, ConstData)> =
                ports.iter().zip(sample).map(|(p, x)| (p.name.as_str(), x.clone())).collect();
            Ok(model.import_with(&shapes, &values)?.graph)
        }
    }
}

/// Makes a model from the quantised graph.
pub(crate) fn as_model(q: &Quantized, path: &Path) -> Result<Model> {
    let proto = export(&q.graph, &ExportOptions { opset: IN_MEMORY, external_data: false })?;
    Model::new(proto, External::in_folder_of(path), &path.display().to_string())
}

/// The tensors of one run's inputs.
pub(crate) fn sample(ports: &[Port], input: &InputArgs) -> Result<Sample> {
    tensors(source::resolve(ports, input, false)?)
}

fn tensors(inputs: Vec<Input>) -> Result<Sample> {
    let one = |i: Input| {
        i.data.tensor().cloned().ok_or_else(|| {
            Error::unsupported(
                format!("level O3 for the input '{}', which is {}", i.name, i.data.describe()),
                "Use level O2",
            )
        })
    };
    inputs.into_iter().map(one).collect()
}

/// The calibration samples.
pub(crate) fn samples(ports: &[Port], a: &QuantizeArgs, input: &InputArgs) -> Result<Vec<Sample>> {
    let Some(path) = &a.calibrate else { return Ok(vec![]) };
    if !path.is_dir() {
        let all = of_file(ports, path, input)?;
        return match all.is_empty() {
            true => Err(Error::argument("--calibrate", format!("{} has no samples", path.display()))),
            false => Ok(all),
        };
    }
    let failed = |e: std::io::Error| Error::Io { path: path.display().to_string(), what: e.to_string() };
    let mut files: Vec<PathBuf> = vec![];
    for entry in std::fs::read_dir(path).map_err(failed)? {
        let file = entry.map_err(failed)?.path();
        let hidden = file.file_name().is_some_and(|n| n.to_string_lossy().starts_with('.'));
        if file.is_file() && !hidden {
            files.push(file);
        }
    }
    files.sort();
    let mut all = vec![];
    for f in &files {
        all.extend(of_file(ports, f, input)?);
    }
    match all.is_empty() {
        true => Err(Error::argument("--calibrate", format!("{} has no files", path.display()))),
        false => Ok(all),
    }
}

/// The samples in a file.
fn of_file(ports: &[Port], path: &Path, input: &InputArgs) -> Result<Vec<Sample>> {
    let of = |text: String| sample(ports, &InputArgs { inputs: vec![text], ..input.clone() });
    let shown = path.display().to_string();
    match path.extension().map(|e| e.to_string_lossy().to_lowercase()).as_deref() {
        Some("npz") => of_archive(ports, path),
        Some("txt") => {
            let text = file_input::text(path)?;
            let lines = text.lines().map(str::trim).filter(|l| !l.is_empty());
            lines.map(|l| of(format!("text:{l}"))).collect()
        }
        _ => {
            let x = of(shown)?;
            Ok(rows(ports, x))
        }
    }
}

fn of_archive(ports: &[Port], path: &Path) -> Result<Vec<Sample>> {
    let z = Npz::open(path)?;
    let mut arrays = vec![];
    for p in ports {
        let found = z.names().find(|n| *n == p.name).map(str::to_string);
        let name = found.ok_or_else(|| {
            let names: Vec<&str> = z.names().collect();
            let what = format!(
                "{} has no array for the input '{}'; it has {}",
                path.display(),
                p.name,
                names.join(", ")
            );
            Error::argument("--calibrate", what)
        })?;
        arrays.push(cast(p, z.get(&name)?)?);
    }
    let stacked =
        ports.iter().zip(&arrays).all(|(p, x)| p.shape().is_some_and(|s| x.dims.len() == s.rank() + 1));
    if !stacked {
        return Ok(rows(ports, arrays));
    }
    let n = arrays.iter().map(|x| x.dims[0]).min().unwrap_or(0);
    if arrays.iter().any(|x| x.dims[0] != n) {
        let what = format!("the arrays of {} have different numbers of samples", path.display());
        return Err(Error::argument("--calibrate", what));
    }
    (0..n).map(|i| arrays.iter().map(|x| part(x, i, true)).collect()).collect()
}

/// Casts an array to the input's dtype, because NumPy files often store floats as f64.
fn cast(p: &Port, x: ConstData) -> Result<ConstData> {
    let want = p.dtype()?;
    if x.dtype == want {
        return Ok(x);
    }
    ConstData::from_scalars(want, &x.dims, x.scalars().map(|v| v.cast(want)))
}

/// Splits a batch into rows, if the model takes single rows.
fn rows(ports: &[Port], x: Sample) -> Vec<Sample> {
    let open = |p: &Port| {
        p.shape().and_then(|s| s.first().copied()).is_some_and(|d| d.known().is_none_or(|n| n == 1))
    };
    let n = x.first().and_then(|x| x.dims.first().copied()).unwrap_or(0);
    let same = n > 1 && x.iter().all(|x| x.dims.first() == Some(&n));
    if !same || !ports.iter().all(open) {
        return vec![x];
    }
    let row = |i: usize| x.iter().map(|x| part(x, i, false)).collect::<Result<Sample>>();
    (0..n).map(row).collect::<Result<Vec<Sample>>>().unwrap_or(vec![x.clone()])
}

/// The part of `x` at index `i` of the first axis. The axis is removed if `drop` is true; otherwise it has
/// size 1.
fn part(x: &ConstData, i: usize, drop: bool) -> Result<ConstData> {
    let n = x.dims[0].max(1);
    let len = x.bytes().len() / n;
    let mut dims = x.dims.to_vec();
    match drop {
        true => drop_first(&mut dims),
        false => dims[0] = 1,
    }
    let bytes = x.bytes()[i * len..(i + 1) * len].to_vec();
    ConstData::new(x.dtype, &dims, std::sync::Arc::new(bytes))
}

fn drop_first(dims: &mut Vec<usize>) {
    dims.remove(0);
}
