//! The program that runs a model on many inputs.

use super::Job;
use super::answer;
use crate::args::{RunArgs, Runtime};
use crate::cmd::ort::{Ort, OrtModel};
use crate::cmd::{LoadTimes, Loaded, backend_json, backend_text, bounds, level_text, tags_text};
use crate::report::size;
use crate::source::Input;
use halcyon::Result;
use halcyon_formats::onnx::{Datum, Outcome, Port};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

#[derive(Debug)]
pub(super) enum Engine {
    Halcyon(Box<Loaded>),
    Ort(Box<OrtEngine>),
}

/// A model in ONNX Runtime.
#[derive(Debug)]
pub(super) struct OrtEngine {
    pub ort: Ort,
    pub model: OrtModel,
    pub times: LoadTimes,
}

impl OrtEngine {
    /// Loads the library and the model. `outputs` are the names of the model's outputs.
    pub(super) fn open(a: &RunArgs, outputs: &[String], decode: Duration) -> Result<OrtEngine> {
        let start = Instant::now();
        let ort = Ort::open(&a.ort, &a.backend, false)?;
        let open = start.elapsed();
        let start = Instant::now();
        let model = ort.load(&a.model)?;
        if let Some((name, why)) = model.left_out().iter().find(|(n, _)| outputs.contains(n)) {
            return Err(halcyon::Error::unsupported(
                format!("the output '{name}' of ONNX Runtime, {why}"),
                "Run the model with --runtime halcyon",
            ));
        }
        let times = LoadTimes { load: decode + start.elapsed(), open, inputs: Duration::ZERO };
        Ok(OrtEngine { ort, model, times })
    }
}

/// The results of a run.
#[derive(Debug)]
pub(super) struct Ran {
    pub outputs: Vec<Datum>,
    pub time: Duration,
    pub warnings: Vec<String>,
}

impl Engine {
    /// Opens the device or the library, and the model. Returns the model's inputs and the names of its
    /// outputs too.
    pub(super) fn open(job: Job<'_>) -> Result<(Engine, Vec<Port>, Vec<String>)> {
        let Job { a, model, decode, .. } = job;
        let ports = model.inputs()?;
        let outputs: Vec<String> = model.output_names()?;
        if a.runtime == Runtime::Ort {
            drop(model);
            let engine = OrtEngine::open(a, &outputs, decode)?;
            return Ok((Engine::Ort(Box::new(engine)), ports, outputs));
        }
        let start = Instant::now();
        let backend = a.backend.open(false)?;
        let open = start.elapsed();
        let start = Instant::now();
        model.check(backend.info().backend.id())?;
        let session = bounds::session(&backend, model)?;
        let loaded = Loaded {
            backend,
            inputs: vec![],
            session,
            graph: Outcome::Staged("nothing has run".into()),
            whole: Default::default(),
            outputs: outputs.clone(),
            times: LoadTimes { load: decode + start.elapsed(), open, inputs: Duration::ZERO },
        };
        Ok((Engine::Halcyon(Box::new(loaded)), ports, outputs))
    }

    pub(super) fn times(&self) -> &LoadTimes {
        match self {
            Engine::Halcyon(l) => &l.times,
            Engine::Ort(o) => &o.times,
        }
    }

    /// Adds to the time that reading the inputs took.
    pub(super) fn read_inputs(&mut self, time: Duration) {
        match self {
            Engine::Halcyon(l) => l.times.inputs += time,
            Engine::Ort(o) => o.times.inputs += time,
        }
    }

    /// Compiles the model for the first inputs. Returns the plan's warnings.
    pub(super) fn prepare(&mut self, a: &RunArgs, inputs: &[Input]) -> Result<Vec<String>> {
        let Engine::Halcyon(l) = self else { return Ok(vec![]) };
        let data: Vec<Datum> = inputs.iter().map(|i| i.data.clone()).collect();
        l.graph = l.session.graph(&data)?;
        let copy = |i: &Input| Input { name: i.name.clone(), source: i.source.clone(), data: i.data.clone() };
        l.inputs = inputs.iter().map(copy).collect();
        let made = l.session.prepare(&data).or_else(|e| {
            l.move_to_other_device(&a.model, &a.backend, e)?;
            l.session.prepare(&data)
        })?;
        Ok(made.map_or(vec![], |e| e.plan().warnings.clone()))
    }

    pub(super) fn run(&mut self, inputs: &[Input]) -> Result<Ran> {
        match self {
            Engine::Halcyon(l) => {
                let data: Vec<Datum> = inputs.iter().map(|i| i.data.clone()).collect();
                let start = Instant::now();
                let run = l.session.run_data(&data)?;
                let time = start.elapsed();
                Ok(Ran { outputs: run.outputs, time, warnings: run.placement.warnings })
            }
            Engine::Ort(o) => {
                o.model.feed(inputs)?;
                let (outputs, time) = o.model.run()?;
                Ok(Ran { outputs, time, warnings: vec![] })
            }
        }
    }

    /// Where the model ran: `on cpu: …`, `in ONNX Runtime 1.31.1 (CPUExecutionProvider)`.
    pub(super) fn place(&self) -> String {
        match self {
            Engine::Halcyon(l) => answer::placement_text(&l.backend),
            Engine::Ort(o) => ort_place(&o.ort),
        }
    }

    /// Lines for `-v`.
    pub(super) fn text(&self) -> String {
        match self {
            Engine::Halcyon(l) => {
                format!("{}level    {}\n", backend_text(&l.backend), level_text(&l.backend))
            }
            Engine::Ort(o) => o.ort.text(),
        }
    }

    /// A line about memory for `-v`.
    pub(super) fn memory_text(&self) -> String {
        let Engine::Halcyon(l) = self else { return String::new() };
        let m = l.backend.memory();
        format!("memory   device buffers at most {} ({})\n", size(m.peak), tags_text(&m.peak_by_tag))
    }

    /// The program, its device and the device's counters.
    pub(super) fn json(&self) -> [(&'static str, Value); 3] {
        let (runtime, backend, counters) = match self {
            Engine::Halcyon(l) => (halcyon_json(), backend_json(&l.backend), json!(l.backend.counters())),
            Engine::Ort(o) => (o.ort.json(), Value::Null, Value::Null),
        };
        [("runtime", runtime), ("backend", backend), ("counters", counters)]
    }

    /// What ONNX Runtime reported.
    pub(super) fn messages(&self) -> Vec<String> {
        match self {
            Engine::Halcyon(_) => vec![],
            Engine::Ort(o) => o.ort.messages(),
        }
    }
}

pub(super) fn ort_place(ort: &Ort) -> String {
    format!("in {} ({})", ort.name(), ort.providers())
}

/// Halcyon as the program that ran a model.
pub(in crate::cmd) fn halcyon_json() -> Value {
    json!({ "name": "halcyon", "version": env!("CARGO_PKG_VERSION") })
}
