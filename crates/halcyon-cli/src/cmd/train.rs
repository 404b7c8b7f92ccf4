//! `halcyon train`: trains a model according to a configuration file.

use crate::args::TrainArgs;
use crate::report::{self, size};
use halcyon::{Error, Result};
use halcyon_train::run::{Config, Outcome, RunOptions, train};
use halcyon_train::{EpochReport, Stopped};
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

pub(crate) fn main(a: &TrainArgs) -> Result<u8> {
    a.backend.check()?;
    let mut config = Config::read(&a.config, &a.set)?;
    config.detect_anomaly |= a.detect_anomaly;
    let backend = a.backend.open(false)?;
    let interrupt = watched()?;
    if !a.json && !report::quiet() {
        report::print(&super::backend_text(&backend))?;
    }
    let json = a.json;
    let on_epoch = move |r: &EpochReport| {
        let line = if json { format!("{}\n", epoch_json(r)) } else { epoch_text(r) };
        report::print(&line)
    };
    let options =
        RunOptions { backend, resume: a.resume, interrupt, progress: !a.json, on_epoch: Box::new(on_epoch) };
    let outcome = train(&config, options)?;
    if !a.json {
        report::print(&end_text(&outcome))?;
    }
    if outcome.report.stopped == Stopped::Interrupted {
        let at = outcome.report.checkpoint.as_deref().map(report::path_text).unwrap_or_default();
        let what = format!(
            "training, after step {}. The checkpoint is {at}; continue with --resume",
            outcome.report.step
        );
        return Err(Error::Interrupted { what });
    }
    Ok(0)
}

/// The flag that Ctrl-C sets. A second Ctrl-C ends the process at once.
pub(crate) fn watched() -> Result<Arc<AtomicBool>> {
    let flag = Arc::new(AtomicBool::new(false));
    let of_handler = flag.clone();
    let handler = move || {
        if of_handler.swap(true, Ordering::Relaxed) {
            std::process::exit(130);
        }
    };
    ctrlc::set_handler(handler).map_err(|e| Error::internal(format!("Ctrl-C cannot be watched: {e}")))?;
    Ok(flag)
}

/// A number that is not finite becomes a string, because JSON has only finite numbers.
fn number(x: f64) -> Value {
    if x.is_finite() { json!(x) } else { json!(x.to_string()) }
}

fn epoch_json(r: &EpochReport) -> Value {
    let mut v = json!({
        "epoch": r.epoch + 1,
        "step": r.step,
        "loss": number(r.loss),
        "samples_per_s": number(r.samples_per_s),
    });
    // A metric does not replace a field of the line.
    for (name, x) in &r.metrics {
        if let Some(fields) = v.as_object_mut() {
            fields.entry(name.as_str()).or_insert_with(|| number(*x));
        }
    }
    v
}

fn epoch_text(r: &EpochReport) -> String {
    let mut line = format!("epoch {:3}  loss {:.4}", r.epoch + 1, r.loss);
    r.metrics.iter().for_each(|(k, x)| line += &format!("  {k} {x:.4}"));
    line + &format!("  {:.0} samples/s\n", r.samples_per_s)
}

fn end_text(o: &Outcome) -> String {
    let r = &o.report;
    let mut out = format!("{} parameters, {} epochs, {} steps", o.parameters, r.epoch, r.step);
    if let Some(step) = o.resumed {
        out += &format!(", resumed from step {step}");
    }
    out += match r.stopped {
        Stopped::Done | Stopped::Interrupted => "\n",
        Stopped::Callback => "; stopped early\n",
    };
    if let Some(path) = &r.checkpoint {
        out += &format!("checkpoint {}\n", report::path_text(path));
    }
    if let Some((path, bytes)) = &o.exported {
        out += &format!("model {} ({})\n", report::path_text(path), size(*bytes));
    }
    out
}
