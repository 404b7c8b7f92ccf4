//! A log of JSON lines.

use crate::callback::{Callback, EpochReport, Flow, StepReport, make_folder_of};
use halcyon::ir::error::{Error, Result};
use serde_json::{Value, json};
use std::fs::{File, OpenOptions};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

/// The largest accepted size of the log of an earlier run in bytes.
const MOST: u64 = 1 << 30;

/// Appends one JSON object per step and per epoch to a file. The object of a step is
/// `{"kind":"step","step":…,"epoch":…,"loss":…,"samples_per_s":…}`. The object of an epoch has the same
/// fields with `"kind":"epoch"`, and also the metrics. Buffered lines are written to the file after each
/// epoch and at the end. Epochs are counted from 1. When a run is resumed, the lines of steps after the
/// checkpoint are removed. A run that starts at step 0 removes all lines of an existing file.
#[derive(Debug)]
pub struct JsonLog {
    path: PathBuf,
    file: Option<BufWriter<File>>,
}

impl JsonLog {
    /// A log in the file `path`. Its folder is made when training starts.
    pub fn new(path: impl Into<PathBuf>) -> JsonLog {
        JsonLog { path: path.into(), file: None }
    }

    fn failed(&self, e: &std::io::Error) -> Error {
        Error::Io { path: self.path.display().to_string(), what: e.to_string() }
    }

    fn line(&mut self, v: &Value, flush: bool) -> Result<()> {
        let Some(file) = &mut self.file else { return Ok(()) };
        let done = writeln!(file, "{v}").and_then(|()| if flush { file.flush() } else { Ok(()) });
        done.map_err(|e| self.failed(&e))
    }
}

/// Removes all lines from a log except those of steps and epochs that ended by step `step`.
fn cut(path: &Path, step: u64) -> Result<()> {
    let text = halcyon_host::input::text_of(path, MOST).map_err(|e| e.error(path))?;
    let kept = |l: &&str| {
        let v: Option<Value> = serde_json::from_str(l).ok();
        v.and_then(|v| v["step"].as_u64()).is_some_and(|s| s <= step)
    };
    let mut out = String::new();
    for l in text.lines().filter(kept) {
        out.push_str(l);
        out.push('\n');
    }
    match out == text {
        true => Ok(()),
        false => halcyon_host::output::write(path, out.as_bytes()),
    }
}

/// Reads the lines of steps up to `step`. Returns for each line whether it is the line of an epoch, the step,
/// and the loss.
pub(crate) fn read(path: &Path, step: u64) -> Result<Vec<(bool, u64, f64)>> {
    let text = halcyon_host::input::text_of(path, MOST).map_err(|e| e.error(path))?;
    let one = |l: &str| {
        let v: Value = serde_json::from_str(l).ok()?;
        let loss = v["loss"].as_f64().or_else(|| v["loss"].as_str()?.parse().ok())?;
        Some((v["kind"] == "epoch", v["step"].as_u64().filter(|s| *s <= step)?, loss))
    };
    Ok(text.lines().filter_map(one).collect())
}

/// A number as JSON. A number that is not finite becomes a string, because JSON has only finite numbers.
pub(crate) fn number(x: f64) -> Value {
    if x.is_finite() { json!(x) } else { json!(x.to_string()) }
}

impl Callback for JsonLog {
    fn on_start(&mut self, step: u64) -> Result<()> {
        make_folder_of(&self.path)?;
        if self.path.exists() {
            cut(&self.path, step)?;
        }
        let file = OpenOptions::new().create(true).append(true).open(&self.path);
        self.file = Some(BufWriter::new(file.map_err(|e| self.failed(&e))?));
        Ok(())
    }

    fn on_step(&mut self, r: &StepReport) -> Result<Flow> {
        let v = json!({
            "kind": "step", "step": r.step, "epoch": r.epoch + 1, "loss": number(r.loss),
            "samples_per_s": number(r.samples_per_s),
        });
        self.line(&v, false)?;
        Ok(Flow::Continue)
    }

    fn on_epoch(&mut self, r: &EpochReport) -> Result<Flow> {
        let mut v = json!({
            "kind": "epoch", "step": r.step, "epoch": r.epoch + 1, "loss": number(r.loss),
            "samples_per_s": number(r.samples_per_s),
        });
        // A metric does not replace a field of the line.
        for (name, x) in &r.metrics {
            if let Some(fields) = v.as_object_mut() {
                fields.entry(name.as_str()).or_insert_with(|| number(*x));
            }
        }
        self.line(&v, true)?;
        Ok(Flow::Continue)
    }

    fn on_end(&mut self) -> Result<()> {
        match self.file.as_mut().map(Write::flush) {
            Some(Err(e)) => Err(self.failed(&e)),
            _ => Ok(()),
        }
    }
}
