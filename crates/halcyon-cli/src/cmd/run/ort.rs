//! `halcyon run --runtime ort`: runs a model once or repeatedly in ONNX Runtime.

use super::answer::{self, Top};
use super::engine::{OrtEngine, ort_place};
use super::leaf::{Leaf, LeafJson, leaves};
use super::output::{self, OutputData, Target};
use super::{CLASSES_PRINTED, Job, SAMPLING_INTERVAL, paths};
use crate::args::{Print, RunArgs};
use crate::json;
use crate::report::{self, Progress, ms, size, spread, summary, time};
use crate::source::{self, Input};
use halcyon::host::{AnonymousPeak, MemorySampler};
use halcyon::{Error, Result};
use serde::ser::{Serialize, SerializeMap, Serializer};
use serde_json::{Map, Value, json};
use std::fmt::Write;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Everything that a run reports.
struct OrtReport<'a> {
    a: &'a RunArgs,
    engine: &'a OrtEngine,
    inputs: &'a [Input],
    outputs: &'a [(String, Leaf<'a>)],
    times: Vec<Duration>,
    files: Vec<PathBuf>,
    written: Vec<PathBuf>,
    top: Option<Top>,
    anonymous: Option<AnonymousPeak>,
}

/// Runs one set of inputs.
pub(super) fn once(job: Job<'_>) -> Result<u8> {
    let Job { a, input, labels, model, decode, targets, .. } = job;
    let watch = MemorySampler::start(SAMPLING_INTERVAL);
    let ports = model.inputs()?;
    let names: Vec<String> = model.output_names()?;
    drop(model);
    let mut engine = OrtEngine::open(a, &names, decode)?;
    let start = Instant::now();
    let inputs = source::resolve(&ports, &input, false)?;
    engine.times.inputs = start.elapsed();
    engine.model.feed(&inputs)?;

    let mut times = Vec::with_capacity(a.repeat as usize);
    let mut last = None;
    let mut progress = Progress::bar("run", a.repeat.into());
    for _ in 0..a.repeat {
        // Results of one run are freed before the next.
        drop(last.take());
        let (outputs, time) = engine.model.run()?;
        last = Some(outputs);
        times.push(time);
        if let Some(w) = &watch {
            w.read();
            w.stop();
        }
        progress.step();
    }
    progress.finish();
    let anonymous = watch.as_ref().map(MemorySampler::peak);
    let last = last.ok_or_else(|| Error::argument("--repeat", "at least one run is needed"))?;
    let outputs: Vec<(String, Leaf<'_>)> =
        engine.model.outputs().iter().zip(&last).flat_map(|(n, d)| leaves(n, d)).collect();
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
    let (engine, inputs, outputs) = (&engine, &inputs[..], &outputs[..]);
    let done = OrtReport { a, engine, inputs, outputs, times, files, written, top, anonymous };
    done.print(&targets)?;
    Ok(0)
}

impl OrtReport<'_> {
    fn print(&self, targets: &[Target]) -> Result<()> {
        if self.a.json {
            return json::print(self);
        }
        let text = if report::verbose() { self.text() } else { self.short() };
        match targets.iter().any(Target::is_stdout) {
            true => report::note(text.trim_end()),
            false => report::print(&text)?,
        }
        self.outputs.iter().filter_map(|(n, l)| answer::odd_values(n, l)).for_each(|w| report::warn(&w));
        Ok(())
    }

    /// The answer, then one line about how it was computed.
    fn short(&self) -> String {
        let mut out = String::new();
        let all = self.a.print == Some(Print::All);
        match &self.top {
            Some(top) if !all => out += &top.short(),
            _ if self.a.output.is_empty() && self.files.is_empty() || self.a.print.is_some() => {
                self.outputs.iter().for_each(|(n, l)| out += &answer::show(n, l, all));
            }
            _ => {}
        }
        if report::quiet() {
            return out;
        }
        // Writing to a string cannot fail.
        for f in self.files.iter().chain(&self.written) {
            let _ = writeln!(out, "saved {}", report::path_text(f));
        }
        let (median, ..) = spread(&self.times);
        let runs = match self.times.len() {
            1 => String::new(),
            n => format!(" (median of {n} runs)"),
        };
        let place = ort_place(&self.engine.ort);
        let _ = writeln!(out, "{place}, {}{runs}", answer::duration_text(median));
        out
    }

    fn text(&self) -> String {
        let mut out = format!("model    {}\n", report::path_text(&self.a.model));
        out += &self.engine.ort.text();
        // Writing to a string cannot fail.
        for i in self.inputs {
            let (name, source) = (report::name(&i.name), report::name(&i.source));
            let _ = writeln!(out, "input    {name} {} from {source}", i.data.describe());
        }
        if let Some(top) = &self.top {
            out += &top.text();
        }
        for (name, x) in self.outputs {
            match x {
                _ if self.a.print == Some(Print::All) => {
                    out += &format!("output   {}", answer::show(name, x, true))
                }
                Leaf::Tensor(x) => {
                    let name = report::name(name);
                    let (dims, text) = (x.dims.as_slice(), summary(x).text(x));
                    let _ = writeln!(out, "output   {name} {}{dims:?}  {text}", x.dtype);
                }
                other => out += &format!("output   {}", answer::show(name, other, false)),
            }
        }
        for f in self.files.iter().chain(&self.written) {
            let _ = writeln!(out, "saved    {}", report::path_text(f));
        }
        let t = &self.engine.times;
        let _ = writeln!(
            out,
            "times    load library {}, load model {}, read inputs {}",
            time(t.open),
            time(t.load),
            time(t.inputs)
        );
        let (median, min, max) = spread(&self.times);
        let _ = writeln!(
            out,
            "run      median {}, min {}, max {} of {}; the first {}",
            time(median),
            time(min),
            time(max),
            self.times.len(),
            time(self.times[0])
        );
        if let Some(p) = self.anonymous {
            let _ = writeln!(out, "memory   anonymous memory at most {}", size(p.bytes));
        }
        for m in self.engine.ort.messages() {
            let _ = writeln!(out, "warning  {}", report::name(&m));
        }
        out
    }

    /// The JSON object without the outputs, which are serialised while being written.
    fn head(&self) -> Value {
        let (median, min, max) = spread(&self.times);
        let t = &self.engine.times;
        let input = |i: &Input| {
            let mut v = json!({ "name": i.name, "type": i.data.describe(), "source": i.source });
            if let Some(t) = i.data.tensor() {
                v["dtype"] = json!(t.dtype);
                v["shape"] = json!(t.dims.as_slice());
            }
            v
        };
        json!({
            "model": report::path(&self.a.model),
            "runtime": self.engine.ort.json(),
            "backend": null,
            "inputs": self.inputs.iter().map(input).collect::<Vec<_>>(),
            "written": paths(&self.written),
            "top_k": self.top.as_ref().map(Top::json),
            "times_ms": {
                "load": ms(t.load),
                "open_device": ms(t.open),
                "read_inputs": ms(t.inputs),
                "run": {
                    "first": ms(self.times[0]), "median": ms(median), "min": ms(min), "max": ms(max),
                    "runs": self.times.len(),
                },
            },
            "memory": {
                "process_peak_bytes": report::peak_memory(),
                "peak_anonymous": self.anonymous.map(|p| p.bytes),
                "anonymous_readings": self.anonymous.map(|p| p.readings),
            },
            "warnings": self.engine.ort.messages(),
        })
    }
}

impl Serialize for OrtReport<'_> {
    fn serialize<S: Serializer>(&self, s: S) -> std::result::Result<S::Ok, S::Error> {
        let mut m = s.serialize_map(None)?;
        if let Value::Object(head) = self.head() {
            for (k, v) in &head {
                m.serialize_entry(k, v)?;
            }
        }
        let outputs: Vec<LeafJson<'_>> = self
            .outputs
            .iter()
            .enumerate()
            .map(|(i, (name, leaf))| {
                let file = self.files.get(i).map(|f| ("file".to_string(), report::path(f)));
                let more: Map<String, Value> = file.into_iter().collect();
                LeafJson { name, leaf: *leaf, summary: true, more }
            })
            .collect();
        m.serialize_entry("outputs", &outputs)?;
        m.end()
    }
}
