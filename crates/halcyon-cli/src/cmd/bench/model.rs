//! `halcyon bench model`: how long a model takes, and which steps take the time.

use super::compare::{self, EarlierReport, head};
use super::limits::{Limits, Work};
use super::picture::{Bar, Part, svg};
use super::{Bound, MS, Sample, giga, merge, percent, repeat, settings, share_text, work_json};
use crate::args::BenchModelArgs;
use crate::cmd::trace::by_step;
use crate::cmd::{Loaded, backend_json, backend_text, load};
use crate::report::{self, figures, short, time};
use halcyon::ir::plan::{Plan, Step};
use halcyon::{Error, Executable, Result};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::{Duration, Instant};

/// Number of unmeasured runs before the measured runs.
const WARM_UP: usize = 2;
/// Without `--repeat`: at least this many runs, and as many as fit in [`TIME`].
const MIN_RUNS: usize = 10;
const TIME: Duration = Duration::from_secs(2);
/// Number of steps in the chart.
const CHART_STEPS: usize = 25;
/// Name of the row for whole runs.
const END_TO_END: &str = "end to end";

pub(super) fn main(a: &BenchModelArgs) -> Result<u8> {
    let before = a.compare.as_deref().map(|f| EarlierReport::read(f, "model")).transpose()?;
    let loaded = load(&a.model, &a.input, &a.backend, true, true)?;
    if a.picture.is_some() {
        loaded.graph("a picture")?;
    }
    let inputs = loaded.data();
    let device = loaded.backend.device();
    let start = Instant::now();
    let exe = loaded.session.prepare(&inputs)?;
    let prepare = start.elapsed();
    for _ in 0..WARM_UP {
        loaded.session.run_data(&inputs)?;
    }
    let (bounds, no_shares) = match &exe {
        Some(e) => match bounds(&loaded, e) {
            Ok(b) => (b.into_iter().map(Some).collect(), None),
            Err(Error::Unsupported { what, .. }) => (vec![None; e.plan().steps.len()], Some(what)),
            Err(e) => return Err(e),
        },
        None => (vec![], None),
    };

    report::note("timing runs");
    let (mut totals, mut steps) = (vec![], vec![]);
    repeat(a.repeat, MIN_RUNS, TIME, || {
        device.take_timings()?;
        let start = Instant::now();
        loaded.session.run_data(&inputs)?;
        totals.push(start.elapsed().as_secs_f64());
        let timings = device.take_timings()?;
        steps.extend(exe.as_ref().and_then(|e| by_step(e, &timings)));
        Ok(())
    })?;
    // A device measures either all runs or none.
    let split =
        exe.as_ref().filter(|_| steps.len() == totals.len()).map(|e| TimeBreakdown::new(e, &steps, &bounds));
    let no_split = match (&split, loaded.graph("steps")) {
        (Some(_), _) => None,
        (None, Err(e)) => Some(e.to_string()),
        (None, Ok(_)) => {
            Some("the device does not measure the times of steps, or a step ran on the host".into())
        }
    };
    let mut settings = settings(&loaded.backend);
    let what: Vec<String> =
        loaded.inputs.iter().map(|i| format!("{} {}", report::name(&i.name), i.data.describe())).collect();
    merge(
        &mut settings,
        json!({ "model": a.model.file_name().map(|n| n.to_string_lossy()), "inputs": what }),
    );
    let total = Sample::of(&totals);
    let done = Report { a, loaded: &loaded, settings, prepare, total, split, no_split, no_shares, before };
    if let Some(path) = &a.picture {
        let text = done.picture()?;
        halcyon_host::output::write(path, text.as_bytes())?;
    }
    if a.json {
        report::print_json(&done.json())?
    } else {
        report::print(&done.text())?
    }
    Ok(0)
}

/// The arithmetic of a step's products, from the kernel's name.
fn arithmetic(kernel: &str) -> &'static str {
    let has = |names: &[&str]| kernel.split(['.', '_', ' ']).any(|part| names.contains(&part));
    if has(&["int8", "i8", "u8"]) {
        "int8"
    } else if has(&["bf16"]) {
        "bf16"
    } else {
        "f32"
    }
}

fn work(plan: &Plan, s: &Step) -> Work {
    let outputs = s.buffers.iter().rev().take(s.outputs);
    let written = outputs.map(|b| plan.buffers[b.0 as usize].bytes as u64).sum::<u64>().min(s.bytes);
    Work { flops: s.flops, read: s.bytes - written, written, arithmetic: arithmetic(&s.work.kernel_name()) }
}

/// For each step, the least time that the measured peaks of the machine allow.
fn bounds(loaded: &Loaded, exe: &Executable) -> Result<Vec<Bound>> {
    let mut limits = Limits::new(&loaded.backend)?;
    report::note("measuring peaks");
    exe.plan().steps.iter().map(|s| limits.cached(&work(exe.plan(), s)).map(Bound::from)).collect()
}

/// One step, or all steps of a kind.
#[derive(Clone, Debug)]
struct StepTime {
    name: String,
    kernel: String,
    span: String,
    steps: usize,
    /// Seconds.
    time: Sample,
    flops: u64,
    bytes: u64,
    bound: Option<Bound>,
}

/// How the time of a run is divided.
struct TimeBreakdown {
    /// In plan order.
    steps: Vec<StepTime>,
    /// Slowest first.
    kinds: Vec<StepTime>,
}

/// The sum of the least times of some steps; `None` if one of them is unknown. `by` is the limit, compute or
/// memory, whose steps take longer in total.
fn together(bounds: &[Option<Bound>]) -> Option<Bound> {
    let all: Vec<Bound> = bounds.iter().copied().collect::<Option<_>>()?;
    let of = |by: &str| all.iter().filter(|b| b.by == by).map(|b| b.seconds).sum::<f64>();
    let (compute, memory) = (of("compute"), of("memory"));
    Some(Bound { seconds: compute + memory, by: if compute >= memory { "compute" } else { "memory" } })
}

impl TimeBreakdown {
    /// `times[run][step]` is the time of a step in one run.
    fn new(exe: &Executable, times: &[Vec<Duration>], bounds: &[Option<Bound>]) -> TimeBreakdown {
        let plan = exe.plan();
        let seconds = |run: &[Duration], of: &[usize]| of.iter().map(|i| run[*i].as_secs_f64()).sum::<f64>();
        let spent = |name: &str, of: &[usize]| {
            let samples: Vec<f64> = times.iter().map(|run| seconds(run, of)).collect();
            let steps = || of.iter().map(|i| &plan.steps[*i]);
            let mut kernels: Vec<String> = steps().map(|s| s.work.kernel_name()).collect();
            kernels.sort();
            kernels.dedup();
            StepTime {
                name: name.into(),
                kernel: kernels.join(", "),
                span: match of {
                    [one] => plan.steps[*one].span.text().into(),
                    _ => String::new(),
                },
                steps: of.len(),
                time: Sample::of(&samples),
                flops: steps().fold(0, |n, s| n.saturating_add(s.flops)),
                bytes: steps().fold(0, |n, s| n.saturating_add(s.bytes)),
                bound: together(&of.iter().map(|i| bounds[*i]).collect::<Vec<_>>()),
            }
        };
        let mut by_kind: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
        for (i, s) in plan.steps.iter().enumerate() {
            by_kind.entry(&s.op).or_default().push(i);
        }
        let mut kinds: Vec<StepTime> = by_kind.iter().map(|(k, of)| spent(k, of)).collect();
        kinds.sort_by(|a, b| b.time.median.total_cmp(&a.time.median));
        let steps = plan.steps.iter().enumerate().map(|(i, s)| spent(&s.op, &[i])).collect();
        TimeBreakdown { steps, kinds }
    }

    fn seconds(&self) -> f64 {
        self.kinds.iter().map(|k| k.time.median).sum()
    }

    /// Indices of the steps, slowest first.
    fn slowest(&self) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.steps.len()).collect();
        order.sort_by(|a, b| self.steps[*b].time.median.total_cmp(&self.steps[*a].time.median));
        order
    }
}

struct Report<'a> {
    a: &'a BenchModelArgs,
    loaded: &'a Loaded,
    settings: Value,
    prepare: Duration,
    /// Seconds of whole runs.
    total: Sample,
    split: Option<TimeBreakdown>,
    /// Why `split` is `None`.
    no_split: Option<String>,
    /// Why there are no shares of a peak.
    no_shares: Option<String>,
    before: Option<EarlierReport>,
}

fn clock(seconds: f64) -> String {
    time(Duration::from_secs_f64(seconds))
}

impl StepTime {
    /// The cells after the name: time, share of the total, rates, share of the peak.
    fn cells(&self, all: f64) -> Vec<String> {
        let t = self.time.median;
        vec![
            clock(t),
            percent(t / all.max(1e-12)),
            giga(self.flops, t),
            giga(self.bytes, t),
            share_text(self.bound, t),
        ]
    }

    fn json(&self, all: f64) -> Value {
        let mut v = json!({
            "name": self.name, "kernel": self.kernel, "steps": self.steps, "time_ms": self.time.json(MS),
            "share_of_time": self.time.median / all.max(1e-12),
        });
        merge(&mut v, work_json(self.flops, self.bytes, self.time.median, self.bound));
        v
    }
}

impl Report<'_> {
    /// FLOPs, bytes and least time of all steps together.
    fn whole(&self) -> Option<(u64, u64, Option<Bound>)> {
        let s = self.split.as_ref()?;
        let sum = |f: fn(&StepTime) -> u64| s.steps.iter().map(f).fold(0, u64::saturating_add);
        let bounds: Vec<Option<Bound>> = s.steps.iter().map(|s| s.bound).collect();
        Some((sum(|s| s.flops), sum(|s| s.bytes), together(&bounds)))
    }

    /// Time of a run outside of its steps.
    fn outside(&self) -> Option<f64> {
        Some((self.total.median - self.split.as_ref()?.seconds()).max(0.0))
    }

    fn names(&self) -> Vec<&str> {
        let kinds = self.split.iter().flat_map(|s| s.kinds.iter().map(|k| k.name.as_str()));
        std::iter::once(END_TO_END).chain(kinds).collect()
    }

    fn text(&self) -> String {
        let (l, t) = (self.loaded, &self.total);
        let mut out = format!("model    {}\n", report::path_text(&self.a.model));
        out += &backend_text(&l.backend);
        // Writing to a string cannot fail.
        let _ = writeln!(out, "level    {}", super::super::level_text(&l.backend));
        out += &l.input_text();
        let _ = writeln!(
            out,
            "run      median {}, min {}, max {}, spread {} of {} (inputs and outputs copied)",
            clock(t.median),
            clock(t.min),
            clock(t.max),
            percent(t.spread()),
            t.runs
        );
        if let Some((flops, bytes, bound)) = self.whole() {
            let _ = write!(out, "work     {} GFLOP/s, {} GB/s", giga(flops, t.median), giga(bytes, t.median));
            let _ = match bound {
                Some(b) => writeln!(
                    out,
                    "; at the measured peaks the steps would take {}: {}",
                    clock(b.seconds),
                    share_text(bound, t.median)
                ),
                None => writeln!(out),
            };
        }
        if let Some(b) = &self.before {
            b.note(&self.settings, &self.names());
            out += &b.text();
            let _ = writeln!(out, "  {END_TO_END} {}", compare::cell(b.ratio(END_TO_END, t)).trim_end());
        }
        if let Some(s) = &self.split {
            out += "\nby kind\n";
            let title = ["", "steps", "time", "of the run", "GFLOP/s", "GB/s", "share of peak"];
            let mut rows: Vec<Vec<String>> = vec![title.map(String::from).into()];
            if self.before.is_some() {
                rows[0].push("ratio  ".into());
            }
            for k in &s.kinds {
                let mut cells = vec![short(&k.name, 40), k.steps.to_string()];
                cells.extend(k.cells(t.median));
                if let Some(b) = &self.before {
                    cells.push(compare::cell(b.ratio(&k.name, &k.time)));
                }
                rows.push(cells);
            }
            if let Some(rest) = self.outside() {
                rows.push(vec![
                    "(outside of steps)".into(),
                    String::new(),
                    clock(rest),
                    percent(rest / t.median.max(1e-12)),
                ]);
            }
            out += &figures(rows, &[1, 2, 3, 4, 5, 6, 7]);
            let _ = writeln!(out, "\nslowest steps, {} of {}", self.a.top.min(s.steps.len()), s.steps.len());
            let title = ["", "", "", "time", "of the run", "GFLOP/s", "GB/s", "share of peak", ""];
            let mut rows: Vec<Vec<String>> = vec![title.map(String::from).into()];
            rows.extend(s.slowest().into_iter().take(self.a.top).map(|i| {
                let p = &s.steps[i];
                let mut cells = vec![i.to_string(), short(&p.name, 40), p.kernel.clone()];
                cells.extend(p.cells(t.median));
                cells.push(short(&p.span, 60));
                cells
            }));
            out += &figures(rows, &[0, 3, 4, 5, 6, 7]);
        }
        for (what, why) in [("times of steps", &self.no_split), ("shares of a peak", &self.no_shares)] {
            if let Some(why) = why {
                let _ = writeln!(out, "  there are no {what}: {why}");
            }
        }
        if let Some(p) = &self.a.picture {
            let _ = writeln!(out, "saved    {}", p.display());
        }
        out
    }

    fn json(&self) -> Value {
        let (l, all) = (self.loaded, self.total.median);
        let mut first = json!({ "name": END_TO_END, "time_ms": self.total.json(MS) });
        if let Some((flops, bytes, bound)) = self.whole() {
            merge(&mut first, work_json(flops, bytes, all, bound));
        }
        let mut rows = vec![first];
        rows.extend(self.split.iter().flat_map(|s| s.kinds.iter().map(|k| k.json(all))));
        let steps = self.split.as_ref().map(|s| {
            let one = |(i, p): (usize, &StepTime)| {
                let mut v = p.json(all);
                merge(&mut v, json!({ "step": i, "span": p.span }));
                v
            };
            s.steps.iter().enumerate().map(one).collect::<Vec<_>>()
        });
        let mut v = head("model", &self.settings);
        merge(
            &mut v,
            json!({
                "model": report::path(&self.a.model),
                "backend": backend_json(&l.backend),
                "inputs": l.input_json(),
                "prepare_ms": report::ms(self.prepare),
                "rows": rows,
                "steps": steps,
                "outside_of_steps_ms": self.outside().map(|t| t * MS),
                "no_steps": self.no_split,
                "no_shares": self.no_shares,
                "picture": self.a.picture,
            }),
        );
        if let Some(b) = &self.before {
            b.add_to(&mut v);
        }
        v
    }

    fn picture(&self) -> Result<String> {
        let (b, t) = (&self.loaded.backend, self.total.median);
        let s = self.split.as_ref().ok_or_else(|| {
            let why = self.no_split.clone().unwrap_or_default();
            Error::unsupported(format!("a picture without the times of steps: {why}"), "Use --backend cpu")
        })?;
        let bar = |label: String, p: &StepTime| Bar {
            label,
            note: format!(
                "{}  {}{}",
                clock(p.time.median),
                percent(p.time.median / t),
                p.bound.map_or(String::new(), |b| format!("  ({})", share_text(Some(b), p.time.median)))
            ),
            length: p.time.median,
        };
        let mut kinds: Vec<Bar> =
            s.kinds.iter().map(|k| bar(format!("{} × {}", k.steps, k.name), k)).collect();
        if let Some(rest) = self.outside() {
            kinds.push(Bar {
                label: "outside of steps".into(),
                note: format!("{}  {}", clock(rest), percent(rest / t)),
                length: rest,
            });
        }
        let slow = s.slowest().into_iter().take(CHART_STEPS).map(|i| {
            let p = &s.steps[i];
            bar(format!("{i} {} {}", p.name, p.span), p)
        });
        let name = self.a.model.file_name().map_or_else(String::new, |n| n.to_string_lossy().into_owned());
        Ok(svg(
            &format!("{name}: {} on {}, level {}", clock(t), b.id(), super::super::level_text(b)),
            &[
                Part { title: "By kind (in brackets: the share of the measured peak)", bars: kinds },
                Part { title: "Slowest steps", bars: slow.collect() },
            ],
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_names_give_their_arithmetic() {
        for (name, want) in [
            ("cpu.gemm.avx512", "f32"),
            ("cpu.gemm.bf16.avx512", "bf16"),
            ("cpu.conv_i8.avx512", "int8"),
            ("ir.mul8", "f32"),
        ] {
            assert_eq!(arithmetic(name), want, "{name}");
        }
    }

    #[test]
    fn bounds_add_up() {
        let b = |seconds, by| Some(Bound { seconds, by });
        let all = together(&[b(1.0, "compute"), b(3.0, "memory"), b(1.5, "compute")]).expect("all known");
        assert_eq!((all.seconds, all.by), (5.5, "memory"));
        assert!(together(&[b(1.0, "compute"), None]).is_none());
    }
}
