//! One of the programs that are compared, with its model and the inputs.

use crate::args::{CompareArgs, Runtime};
use crate::cmd::ort::{Ort, OrtModel};
use crate::cmd::{backend_json, backend_text, bounds, level_text, open, run};
use crate::report;
use crate::source::Input;
use halcyon::{Backend, Error, OnnxSession, Result};
use halcyon_formats::onnx::Datum;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

#[derive(Debug)]
pub(super) struct Side {
    path: PathBuf,
    program: Program,
    /// Names of the results of a run: the model's outputs, then the exposed values.
    results: Vec<String>,
}

#[derive(Debug)]
enum Program {
    Halcyon { session: Box<OnnxSession>, inputs: Vec<Datum>, warnings: Vec<String>, staged: Option<String> },
    Ort { ort: Ort, model: Box<OrtModel> },
}

impl Side {
    /// Opens a program and the model. `other` is the side that was opened first. Two sides of the same
    /// program share the device or the library.
    pub(super) fn open(
        a: &CompareArgs,
        runtime: Runtime,
        path: &Path,
        inputs: &[Input],
        other: Option<&Side>,
    ) -> Result<Side> {
        let program = other.map(|o| &o.program);
        match runtime {
            Runtime::Halcyon => {
                let backend = match program {
                    Some(Program::Halcyon { session, .. }) => session.backend().clone(),
                    _ => a.backend.open(false)?,
                };
                Side::halcyon(&backend, path, &[], inputs)
            }
            Runtime::Ort => {
                let ort = match program {
                    Some(Program::Ort { ort, .. }) => ort.clone(),
                    _ => Ort::open(&a.ort, &a.backend, a.runtimes.contains(&Runtime::Halcyon))?,
                };
                let names: Vec<String> = open(path)?.output_names()?;
                let model = ort.load(path)?;
                if let Some((name, why)) = model.left_out().iter().find(|(n, _)| names.contains(n)) {
                    return Err(Error::unsupported(
                        format!("the output '{name}' of ONNX Runtime, {why}"),
                        "Compare models without such outputs",
                    ));
                }
                Side::ort(ort, model, path, inputs)
            }
        }
    }

    /// The same program with a model that also returns the values `names`. Values that the program cannot
    /// return are left out.
    pub(super) fn exposing(&self, names: &[String], inputs: &[Input]) -> Result<Side> {
        match &self.program {
            Program::Halcyon { session, .. } => Side::halcyon(session.backend(), &self.path, names, inputs),
            Program::Ort { ort, .. } => {
                let model = ort.load_exposing(&self.path, &open(&self.path)?, names)?;
                Side::ort(ort.clone(), model, &self.path, inputs)
            }
        }
    }

    fn halcyon(backend: &Backend, path: &Path, names: &[String], inputs: &[Input]) -> Result<Side> {
        let mut model = open(path)?;
        let mut results: Vec<String> = model.output_names()?;
        model.expose(names)?;
        results.extend(names.iter().cloned());
        let session = bounds::session(backend, model)?;
        let inputs: Vec<Datum> = inputs.iter().map(|i| i.data.clone()).collect();
        let warnings = session.prepare(&inputs)?.map_or(vec![], |e| e.plan().warnings.clone());
        let program = Program::Halcyon { session: Box::new(session), inputs, warnings, staged: None };
        Ok(Side { path: path.into(), program, results })
    }

    fn ort(ort: Ort, mut model: OrtModel, path: &Path, inputs: &[Input]) -> Result<Side> {
        model.feed(inputs)?;
        let results = model.outputs().to_vec();
        Ok(Side { path: path.into(), program: Program::Ort { ort, model: Box::new(model) }, results })
    }

    /// Runs the model. Returns its results with their names, and the time.
    pub(super) fn run(&mut self) -> Result<(Vec<(String, Datum)>, Duration)> {
        let (results, time) = match &mut self.program {
            Program::Halcyon { session, inputs, warnings, staged } => {
                let start = Instant::now();
                let run = session.run_data(inputs)?;
                let time = start.elapsed();
                for w in run.placement.warnings {
                    if !warnings.contains(&w) {
                        warnings.push(w);
                    }
                }
                *staged = run.staged;
                (run.outputs, time)
            }
            Program::Ort { model, .. } => model.run()?,
        };
        Ok((self.results.iter().cloned().zip(results).collect(), time))
    }

    /// The program, in a few words.
    pub(super) fn name(&self) -> String {
        match &self.program {
            Program::Halcyon { session, .. } => {
                let b = session.backend();
                format!("halcyon {} on {} at {}", env!("CARGO_PKG_VERSION"), b.id(), level_text(b))
            }
            Program::Ort { ort, .. } => format!("{} ({})", ort.name(), ort.providers()),
        }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Lines for `-v`.
    pub(super) fn text(&self) -> String {
        match &self.program {
            Program::Halcyon { session, staged, .. } => {
                let why = match staged {
                    Some(why) => format!("         runs in stages: {}\n", report::name(why)),
                    None => String::new(),
                };
                backend_text(session.backend()) + &why
            }
            Program::Ort { ort, .. } => ort.text(),
        }
    }

    pub(super) fn json(&self) -> Value {
        let mut v = match &self.program {
            Program::Halcyon { session, staged, .. } => {
                let mut v = run::halcyon_json();
                v["backend"] = backend_json(session.backend());
                v["staged"] = json!(staged);
                v
            }
            Program::Ort { ort, .. } => ort.json(),
        };
        v["model"] = report::path(&self.path);
        v["warnings"] = json!(self.warnings());
        v
    }

    /// Warnings of the plan, or what ONNX Runtime reported.
    pub(super) fn warnings(&self) -> Vec<String> {
        match &self.program {
            Program::Halcyon { warnings, .. } => warnings.clone(),
            Program::Ort { ort, .. } => ort.messages(),
        }
    }

    /// The peak of the device's buffers, if Halcyon is the program.
    pub(super) fn device_peak(&self) -> Option<u64> {
        match &self.program {
            Program::Halcyon { session, .. } => Some(session.backend().memory().peak),
            Program::Ort { .. } => None,
        }
    }
}
