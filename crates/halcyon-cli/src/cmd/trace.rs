//! `halcyon trace`: shows each form of a model, from its graph to its kernels.

use super::{Loaded, backend_json, backend_text, load, run::receipts_text};
use crate::args::TraceArgs;
use crate::report::{self, ms, table, time};
use halcyon::hal::Timing;
use halcyon::ir::lower::lower;
use halcyon::ir::plan::StepWork;
use halcyon::ir::{Graph, Op};
use halcyon::{ConstData, Executable, Result, Session};
use serde_json::{Value, json};
use std::fmt::Write;
use std::time::{Duration, Instant};

pub(crate) fn main(a: &TraceArgs) -> Result<u8> {
    let loaded = load(&a.model, &a.input, &a.backend, true, true)?;
    let (backend, graph) = (&loaded.backend, &loaded.graph("a trace")?.graph);
    let inputs: Vec<ConstData> = loaded.data().iter().filter_map(|d| d.tensor().cloned()).collect();

    // Lowering is timed separately; the session below lowers again.
    let start = Instant::now();
    lower(graph, backend.device().as_target(), &backend.lower_options())?;
    let lowering = start.elapsed();

    let session = Session::new(backend, graph.clone());
    let start = Instant::now();
    let exe = session.prepare(&inputs)?;
    let prepare = start.elapsed();

    // The first run includes one-time costs of the device. The times of steps are those of the second run.
    let start = Instant::now();
    session.run(&inputs)?;
    let first = start.elapsed();
    let buffers = session.upload(&inputs)?;
    backend.synchronize()?;
    backend.device().take_timings()?;
    let start = Instant::now();
    exe.run(&buffers, &[])?;
    backend.synchronize()?;
    let second = start.elapsed();
    let steps = by_step(&exe, &backend.device().take_timings()?);

    let done = Trace { a, loaded: &loaded, graph, exe: &exe, lowering, prepare, first, second, steps };
    if a.json {
        report::print_json(&done.json())?
    } else {
        report::print(&done.text())?
    }
    Ok(0)
}

/// The time of each step of a run; `None` if the device does not measure it or a step ran on the host.
pub(crate) fn by_step(exe: &Executable, timings: &[Timing]) -> Option<Vec<Duration>> {
    let steps = &exe.plan().steps;
    let device_only = steps.iter().all(|s| !matches!(s.work, StepWork::Host(_)));
    (device_only && timings.len() == steps.len())
        .then(|| timings.iter().map(|t| Duration::from_nanos(t.nanoseconds)).collect())
}

struct Trace<'a> {
    a: &'a TraceArgs,
    loaded: &'a Loaded,
    graph: &'a Graph,
    exe: &'a Executable,
    lowering: Duration,
    prepare: Duration,
    first: Duration,
    second: Duration,
    /// Device time of each step, if the device measures it.
    steps: Option<Vec<Duration>>,
}

impl Trace<'_> {
    fn text(&self) -> String {
        let (l, plan) = (self.loaded, self.exe.plan());
        let mut out = format!("model    {}\n", report::path_text(&self.a.model));
        out += &backend_text(&l.backend);
        // Writing to a string cannot fail.
        let _ = writeln!(out, "level    {}", super::level_text(&l.backend));
        out += &l.input_text();
        let g = self.graph;
        let _ = writeln!(out, "\ngraph ({} nodes)\n{g}", g.nodes().len());
        let _ = write!(out, "passes\n{}", receipts_text(&plan.receipts));
        for w in &plan.warnings {
            let _ = writeln!(out, "  warning: {}", report::name(w));
        }
        let _ = writeln!(out, "\nplan ({} steps)\n{plan}", plan.steps.len());
        for (name, source) in self.exe.sources() {
            let _ = writeln!(out, "\nsource of {name}\n{}", source.trim_end());
        }
        out += "\ntimes\n";
        out += &table(&[
            vec!["import".into(), time(l.times.load)],
            vec!["open device".into(), time(l.times.open)],
            vec!["passes and lowering, alone".into(), time(self.lowering)],
            vec!["passes, lowering, programs and weights".into(), time(self.prepare)],
            vec!["first run, inputs and outputs copied".into(), time(self.first)],
            vec!["second run, on the device".into(), time(self.second)],
        ]);
        match &self.steps {
            Some(t) => {
                out += "\ndevice time by step, second run\n";
                let rows: Vec<Vec<String>> = plan
                    .steps
                    .iter()
                    .zip(t)
                    .enumerate()
                    .map(|(i, (s, t))| {
                        let rate = |n: u64| n as f64 / t.as_secs_f64().max(1e-12) / 1e9;
                        vec![
                            i.to_string(),
                            s.op.clone(),
                            s.work.kernel_name(),
                            time(*t),
                            format!("{:.1} GFLOP/s", rate(s.flops)),
                            format!("{:.1} GB/s", rate(s.bytes)),
                        ]
                    })
                    .collect();
                out += &table(&rows);
            }
            None => {
                out += "  no times by step: this device does not measure them, or a step ran on the host\n"
            }
        }
        out
    }

    fn json(&self) -> Value {
        let (l, plan) = (self.loaded, self.exe.plan());
        let g = self.graph;
        let nodes: Vec<Value> = g
            .ids()
            .map(|id| {
                let n = g.node(id);
                json!({
                    "id": id.0,
                    "op": n.op.name(),
                    "detail": detail(&n.op),
                    "inputs": n.inputs.iter().map(|i| i.0).collect::<Vec<_>>(),
                    "dtype": n.ty.dtype,
                    "shape": n.ty.shape.to_string(),
                    "span": n.span,
                })
            })
            .collect();
        let steps: Vec<Value> = plan
            .steps
            .iter()
            .enumerate()
            .map(|(i, s)| {
                json!({
                    "op": s.op,
                    "kernel": s.work.kernel_name(),
                    "span": s.span,
                    "nodes": s.nodes,
                    "flops": s.flops,
                    "bytes": s.bytes,
                    "variant": s.tunable.as_ref().map(|t| t.variant.to_string()),
                    "tuned": s.tunable.as_ref().is_some_and(|t| t.tuned),
                    "device_ms": self.steps.as_ref().and_then(|t| t.get(i)).map(|t| ms(*t)),
                })
            })
            .collect();
        let sources: Vec<Value> =
            self.exe.sources().into_iter().map(|(n, s)| json!({ "name": n, "source": s })).collect();
        json!({
            "model": report::path(&self.a.model),
            "backend": backend_json(&l.backend),
            "inputs": l.input_json(),
            "graph": {
                "nodes": nodes,
                "outputs": g.outputs().iter().map(|o| json!({ "name": &*o.name, "node": o.node.0 })).collect::<Vec<_>>(),
            },
            "receipts": plan.receipts,
            "warnings": plan.warnings,
            "plan": {
                "steps": steps,
                "scratch_bytes": plan.scratch(),
                "constant_bytes": plan.const_bytes(),
                "flops": plan.flops(),
                "bytes": plan.bytes(),
            },
            "sources": sources,
            "times_ms": {
                "load": ms(l.times.load),
                "open_device": ms(l.times.open),
                "lower": ms(self.lowering),
                "prepare": ms(self.prepare),
                "first_run": ms(self.first),
                "second_run": ms(self.second),
            },
        })
    }
}

/// The op with its attributes, truncated.
fn detail(op: &Op) -> String {
    let mut s = format!("{op:?}");
    const MAX_CHARS: usize = 120;
    if let Some((i, _)) = s.char_indices().nth(MAX_CHARS) {
        s.truncate(i);
        s.push('…');
    }
    s
}
