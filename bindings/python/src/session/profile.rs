//! Runs with the times of their steps.

use super::values::{Fetched, Given, fetch};
use super::{Cancel, OnnxSession, Request, cancelled, is_main_thread, lock, refuse_cancelled};
use halcyon::Executable;
use halcyon::hal::Timing;
use halcyon::ir::plan::StepWork;
use halcyon::onnx::{Datum, Input, Placement, Results, RunOptions};
use pyo3::prelude::*;
use serde::Serialize;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Something that took time.
#[derive(Serialize)]
pub(super) struct Event {
    name: String,
    category: &'static str,
    /// Nanoseconds since the start of the run.
    start: u64,
    nanoseconds: u64,
    properties: serde_json::Value,
}

impl Event {
    fn new(name: &str, category: &'static str, start: Duration, end: Duration) -> Event {
        let nanoseconds = ns(end.saturating_sub(start));
        Event {
            name: name.into(),
            category,
            start: ns(start),
            nanoseconds,
            properties: serde_json::json!({}),
        }
    }

    fn with(self, properties: serde_json::Value) -> Event {
        Event { properties, ..self }
    }
}

fn ns(d: Duration) -> u64 {
    u64::try_from(d.as_nanos()).unwrap_or(u64::MAX)
}

impl OnnxSession {
    /// Runs the model on host data, with the events of the run.
    pub(super) fn profile(
        &self,
        py: Python<'_>,
        given: Vec<Given>,
        request: Request<'_>,
        cancel: Option<&Cancel>,
    ) -> PyResult<(Vec<Fetched>, Vec<Event>)> {
        let data = given.into_iter().map(|g| g.datum(py)).collect::<PyResult<Vec<Datum>>>()?;
        let job = |options: RunOptions| -> halcyon::Result<(Vec<Fetched>, Vec<Event>)> {
            let _alone = lock(&self.profiled);
            refuse_cancelled(&options)?;
            let device = self.session.backend().device();
            let start = Instant::now();
            let is_graph = data.iter().all(|d| d.tensor().is_some());
            let exe = if is_graph { self.session.prepare(&data)? } else { None };
            let prepared = start.elapsed();
            self.session.backend().synchronize()?;
            device.take_timings()?;
            let names = self.inputs.iter().map(|p| p.name.as_str());
            let inputs: Vec<(&str, Input)> = names.zip(data.into_iter().map(Input::from)).collect();
            let begun = start.elapsed();
            let results = self.session.run_with(inputs, &options)?;
            self.session.backend().synchronize()?;
            let ended = start.elapsed();
            let timings = device.take_timings()?;
            let mut events = vec![
                Event::new("prepare", "Session", Duration::ZERO, prepared),
                Event::new("model_run", "Session", begun, ended).with(placement(&results)),
            ];
            if let Some(exe) = &exe {
                events.extend(steps(exe, &timings, begun));
            }
            let made = fetch(results, request.outputs, request.keep)?;
            events.push(Event::new("copy_outputs", "Session", ended, start.elapsed()));
            Ok((made, events))
        };
        let _call = crate::calls::call(py)?;
        match is_main_thread(py)? {
            true => self.interruptible(py, cancel, job)?,
            false => {
                let options = self.options(cancel.map(|c| c.0.clone()).unwrap_or_default());
                py.detach(|| job(options))
            }
        }
        .map_err(cancelled)
    }
}

/// What the device and the host computed, for a model that ran in stages.
fn placement(results: &Results) -> serde_json::Value {
    match results {
        Results::Device(_) => serde_json::json!({ "staged": false }),
        Results::Host(run) => {
            let p: &Placement = &run.placement;
            serde_json::json!({ "staged": true, "why": run.staged, "placement": p })
        }
    }
}

/// The steps of a plan with their measured times, one after another from the start of the run. Empty if the
/// device did not measure each step.
fn steps(exe: &Arc<Executable>, timings: &[Timing], begun: Duration) -> Vec<Event> {
    let steps = &exe.plan().steps;
    let on_device = steps.iter().all(|s| !matches!(s.work, StepWork::Host(_)));
    if !on_device || steps.len() != timings.len() {
        return vec![];
    }
    let mut at = begun;
    let one = |(s, t): (&halcyon::ir::plan::Step, &Timing)| {
        let start = at;
        at += Duration::from_nanos(t.nanoseconds);
        let name = match s.span.is_known() {
            true => s.span.text().into_owned(),
            false => s.op.clone(),
        };
        Event::new(&name, "Node", start, at).with(serde_json::json!({
            "op_name": s.op,
            "kernel": s.work.kernel_name(),
            "nodes": s.nodes,
            "flops": s.flops,
            "bytes": s.bytes,
        }))
    };
    steps.iter().zip(timings).map(one).collect()
}
