//! `halcyon run`: runs a model once, repeatedly, or on many inputs.

pub(crate) mod answer;
mod engine;
pub(crate) mod leaf;
mod many;
mod ort;
mod output;
pub(crate) mod report;

pub(super) use engine::halcyon_json;
pub(crate) use report::receipts_text;

use super::verify;
use super::{Loaded, load_model, optimize, split, with_tokenizer};
use crate::args::{InputArgs, Print, RunArgs, Runtime};
use crate::cmd::bounds;
use crate::report::{self as tell, Progress, spread};
use crate::{json, rows, source, suggest};
use halcyon::host::{AnonymousPeak, MemorySampler};
use halcyon::ir::passes::QUANTIZED;
use halcyon::ir::plan::{Plan, Receipt};
use halcyon::onnx::Run;
use halcyon::quantize::Quantized;
use halcyon::split::Split;
use halcyon::{Backend, ConstData, Counters, Error, Level, MemoryStats, Result, Session};
use halcyon_formats::input as file_input;
use halcyon_formats::onnx::{Datum, Model};
use leaf::{Leaf, leaves};
use output::{OutputData, Target};
use report::RunReport;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Interval for sampling memory until the first run has ended. Later runs reuse its memory.
const SAMPLING_INTERVAL: Duration = Duration::from_millis(5);
/// Minimum number of pairs of measurements, with and without a transformation. A receipt's gain is the median
/// of the pairs.
const RECEIPT_RUNS: usize = 7;
/// Number of classes printed if class names are given: for a single input, and for each of several.
const CLASSES_PRINTED: (usize, usize) = (5, 1);

/// The arguments of a run, and what was read and opened for them.
struct Job<'a> {
    a: &'a RunArgs,
    input: InputArgs,
    labels: Option<Vec<String>>,
    /// The model, and the time it took to open.
    model: Model,
    decode: Duration,
    targets: Vec<Target>,
    /// What level O3 made of the model.
    quantized: Option<Quantized>,
}

pub(crate) fn main(a: &RunArgs) -> Result<u8> {
    bounds::set(a.max_iterations);
    let labels = a.labels.as_deref().map(read_labels).transpose()?;
    split::check(&a.split)?;
    a.backend.check_with_o3()?;
    let o3 = a.backend.level()? == Level::O3;
    if o3 {
        a.quantize.options().map(drop)?
    } else {
        a.quantize.only_at_o3()?
    }
    output::check(a)?;
    verify::spec(a)?;
    let start = Instant::now();
    let model = super::open(&a.model)?;
    let decode = start.elapsed();
    let ports = model.inputs()?;
    let inputs: Vec<String> = a.input.inputs.iter().chain(&a.more).cloned().collect();
    let inputs = source::split_lines(&ports, &inputs)?;
    let input = with_tokenizer(&a.model, &InputArgs { inputs, ..a.input.clone() });
    let names: Vec<String> = model.output_names()?;
    let targets = output::targets(a, &names)?;
    let many = rows::of(&ports, &input)?;
    output::fits(&targets, &names, a.top_k.is_some() || labels.is_some())?;
    let (model, quantized) = match o3 {
        true => quantized(a, model, &input, many.is_some())?,
        false => (model, None),
    };
    let job = Job { a, input, labels, model, decode, targets, quantized };
    match many {
        Some((rows, rest)) => many::main(job, rows, rest),
        None if a.runtime == Runtime::Ort => ort::once(job),
        None => once(job),
    }
}

/// The model at level O3. The error is measured on the run's own inputs or, if there are several, on
/// calibration samples.
fn quantized(a: &RunArgs, model: Model, input: &InputArgs, many: bool) -> Result<(Model, Option<Quantized>)> {
    let backend = a.backend.open(false)?;
    model.check(backend.info().backend.id())?;
    if many && a.quantize.calibrate.is_none() {
        return Err(Error::argument("--level", "O3 on several inputs needs samples; add --calibrate"));
    }
    let own = match many {
        true => vec![],
        false => vec![optimize::sample(&model.inputs()?, input)?],
    };
    let sample = own.first().cloned();
    let q = optimize::quantized(&model, &backend, &a.quantize, input, own)?;
    if !q.changed() {
        return Ok((model, Some(q)));
    }
    let sample = match sample {
        Some(s) => Some(s),
        None => optimize::samples(&model.inputs()?, &a.quantize, input)?.into_iter().next(),
    };
    sample.map(|s| optimize::warn_without_kernels(&q, &backend, &s)).transpose()?;
    // The JSON document of one run contains the report; the document of several inputs does not.
    if !a.json || many {
        tell::note(&q.report.to_string());
    }
    Ok((optimize::as_model(&q, &a.model)?, Some(q)))
}

/// Runs one set of inputs.
fn once(job: Job<'_>) -> Result<u8> {
    let Job { a, input, labels, model, decode, targets, quantized } = job;
    let watch = MemorySampler::start(SAMPLING_INTERVAL);
    let look = || watch.as_ref().inspect(|w| w.read());
    let spec = verify::spec(a)?;
    let mut loaded = load_model(model, decode, &input, &split::first(&a.split, &a.backend)?, (false, false))?;
    let inputs = loaded.data();

    let start = Instant::now();
    let over = match a.split.split.is_some() || a.split.may_leave.is_some() {
        true => {
            let graph = loaded.bound_graph("a split over devices")?;
            Some(split::split(&a.split, &a.backend, &loaded.backend, &graph)?)
        }
        false => None,
    };
    let exe = match &over {
        Some(_) => None,
        None => {
            let first = loaded.session.prepare(&inputs);
            let made = first.or_else(|e| {
                loaded.move_to_other_device(&a.model, &a.backend, e)?;
                loaded.session.prepare(&inputs)
            });
            made.inspect_err(|e| verify::write_replay(a, &loaded, &inputs, e))?
        }
    };
    let check = spec.map(|s| verify::options(a, s, &loaded)).transpose()?;
    let compile = start.elapsed();
    look();

    let counted = |s: &Split| -> Vec<Counters> { s.backends().iter().map(Backend::counters).collect() };
    let before = over.as_ref().map(counted).unwrap_or_default();
    let mut times = Vec::with_capacity(a.repeat as usize);
    let mut last = None;
    let mut progress = Progress::bar("run", a.repeat.into());
    for _ in 0..a.repeat {
        // Results of one run are freed before the next.
        drop(last.take());
        let start = Instant::now();
        last = Some(match &over {
            Some(s) => run_split(s, &inputs)?,
            None => loaded
                .session
                .run_data(&inputs)
                .inspect_err(|e| verify::write_replay(a, &loaded, &inputs, e))?,
        });
        times.push(start.elapsed());
        if let Some(w) = look() {
            w.stop();
        }
        progress.step();
    }
    progress.finish();
    let (memory, anonymous): (MemoryStats, Option<AnonymousPeak>) =
        (loaded.backend.memory(), watch.as_ref().map(MemorySampler::peak));
    let verified = match &check {
        Some(o) => Some(verify::run(a, o, &loaded, &inputs)?),
        None => None,
    };
    let last = last.ok_or_else(|| Error::argument("--repeat", "at least one run is needed"))?;
    let outputs: Vec<(String, Leaf<'_>)> =
        loaded.outputs.iter().zip(&last.outputs).flat_map(|(n, d)| leaves(n, d)).collect();

    let plan = exe.as_ref().map(|e| e.plan());
    let mut receipts = receipts(a, &loaded, &inputs, plan)?;
    if let Some(q) = quantized.as_ref().filter(|q| q.changed()) {
        receipts.insert(0, quantized_receipt(a, q, &loaded, &inputs)?);
    }
    let files = match &a.output_dir {
        Some(dir) => output::save(dir, &outputs)?,
        None => vec![],
    };
    let top = match a.top_k.or(labels.as_ref().map(|_| CLASSES_PRINTED.0)) {
        Some(k) => Some(answer::top_k(k, &outputs, labels.as_deref())?),
        None => None,
    };
    let table = |_: Option<&str>| Ok(top.as_ref().map(|t| output::classes(t, labels.is_some())));
    let written = output::write(&targets, &OutputData { outputs: &outputs, table: &table, rows: None })?;
    let done = RunReport {
        a,
        loaded: &loaded,
        split: over.as_ref().map(|s| (s, before.into_iter().zip(counted(s)).collect())),
        plan,
        run: &last,
        verified: verified.as_ref(),
        outputs: &outputs,
        receipts: &receipts,
        quantized: quantized.as_ref().map(|q| &q.report),
        times,
        compile,
        files,
        written,
        top,
        memory,
        anonymous,
    };
    print(&done, &targets)?;
    Ok(verified.map_or(0, |v| v.code()))
}

/// The plan's receipts, measured if `--receipts` is given.
fn receipts(a: &RunArgs, loaded: &Loaded, inputs: &[Datum], plan: Option<&Plan>) -> Result<Vec<Receipt>> {
    if !a.receipts {
        return Ok(plan.map_or(vec![], |p| p.receipts.clone()));
    }
    tell::note("measuring receipts: runs with and without every transformation, and at level O0");
    let graph = loaded.graph("receipts")?.graph.clone();
    let tensors: Vec<ConstData> = inputs.iter().filter_map(|d| d.tensor().cloned()).collect();
    let session = Session::new(&loaded.backend, graph);
    session.measure_receipts(&tensors, RECEIPT_RUNS, |without| match without {
        None => a.backend.open_at(Level::O0, None, false),
        name => a.backend.open_at(a.backend.level()?, name, false),
    })
}

/// The receipt of the quantisation, measured if `--receipts` is given.
fn quantized_receipt(a: &RunArgs, q: &Quantized, loaded: &Loaded, inputs: &[Datum]) -> Result<Receipt> {
    let tensors: Vec<ConstData> = inputs.iter().filter_map(|d| d.tensor().cloned()).collect();
    match a.receipts {
        true => q.receipt(&loaded.backend, &tensors, RECEIPT_RUNS),
        false => Ok(Receipt {
            error: Some(q.report.error),
            bytes: q.report.bytes_saved(),
            ..Receipt::new(QUANTIZED, q.report.quantized())
        }),
    }
}

/// Prints the requested results. If values go to standard output, everything else goes to stderr.
fn print(done: &RunReport<'_>, targets: &[Target]) -> Result<()> {
    let a = done.a;
    if a.json {
        return json::print(done);
    }
    let text = if tell::verbose() { done.text() } else { short(done) };
    match targets.iter().any(Target::is_stdout) {
        true => tell::note(text.trim_end()),
        false => tell::print(&text)?,
    }
    if !tell::verbose() {
        warnings(done.warnings());
    }
    done.outputs.iter().filter_map(|(n, l)| answer::odd_values(n, l)).for_each(|w| tell::warn(&w));
    Ok(())
}

/// Prints the warnings of a plan that concern users.
fn warnings<'a>(all: impl Iterator<Item = &'a String>) {
    all.filter(|w| answer::for_readers(w)).for_each(|w| tell::warn(&tell::short(w, 200)));
}

/// The answer, then one line about how it was computed.
fn short(d: &RunReport<'_>) -> String {
    let mut out = String::new();
    let all = d.a.print == Some(Print::All);
    match &d.top {
        Some(top) if !all => out += &top.short(),
        _ if d.a.output.is_empty() && d.files.is_empty() || d.a.print.is_some() => {
            d.outputs.iter().for_each(|(n, l)| out += &answer::show(n, l, all));
        }
        _ => {}
    }
    if let Some(v) = d.verified {
        out += &v.text();
    }
    if d.a.receipts {
        out += &receipts_text(d.receipts);
    }
    if tell::quiet() {
        return out;
    }
    // Writing to a string cannot fail.
    for f in d.files.iter().chain(&d.written) {
        let _ = writeln!(out, "saved {}", tell::path_text(f));
    }
    let place = match &d.split {
        Some((s, _)) => {
            let ids: Vec<String> = s.backends().iter().map(|b| b.id().to_string()).collect();
            format!("on {} (split)", ids.join(" and "))
        }
        None => answer::placement_text(&d.loaded.backend),
    };
    let (median, ..) = spread(&d.times);
    let _ = match d.times.len() {
        1 => writeln!(out, "{place}, {}", answer::duration_text(median)),
        n => writeln!(out, "{place}, {} (median of {n} runs)", answer::duration_text(median)),
    };
    out
}

/// Runs a model that is split over several devices.
fn run_split(s: &Split, inputs: &[Datum]) -> Result<Run> {
    let tensors: Vec<ConstData> = inputs.iter().filter_map(|d| d.tensor().cloned()).collect();
    let outputs = s.run(&tensors, &[])?;
    Ok(Run {
        outputs: outputs.into_iter().map(Datum::Tensor).collect(),
        placement: Default::default(),
        staged: None,
    })
}

fn read_labels(path: &Path) -> Result<Vec<String>> {
    let text = file_input::text(path).map_err(|e| suggest::missing(path, e))?;
    Ok(text.lines().map(|l| l.trim().to_string()).collect())
}

/// Paths in the order in which the files were written, for reports.
pub(super) fn paths(all: &[PathBuf]) -> Vec<String> {
    all.iter().map(|p| p.display().to_string()).collect()
}
