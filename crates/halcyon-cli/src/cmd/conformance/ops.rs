//! `halcyon conformance ops`: runs the op table on this machine.

use super::{CaseError, Lines, PanicRecorder, catch_panics, check_alive};
use crate::args::{OpsArgs, parse_device};
use crate::cmd::bench::items;
use crate::cmd::bench::limits::{Limit, Limits};
use crate::cmd::bench::{ABOVE, percent, three};
use crate::cmd::{backend_json, backend_text, level_text};
use crate::report::{self, Progress, figures, number};
use halcyon::hal::DeviceName;
use halcyon::optable::check::{self, has};
use halcyon::optable::{self, Case, Errors, Rng, Row};
use halcyon::{Backend, BackendType, DType, Error, Level, Result, Session};
use serde::Serialize;
use serde_json::{Value, json};
use std::fmt::Write;
use std::time::{Duration, Instant};

/// Cases per op and dtype on devices that may have to compile a kernel for each case.
const DEVICE_CASES: usize = 3;
/// The time of an operation is the median of at least this many runs, and of as many as fit in [`TIME`].
const MIN_RUNS: usize = 3;
const TIME: Duration = Duration::from_millis(25);
/// If at most this many ops were run, the report has a line of figures for every cell, not only for the cells
/// nearest to their tolerance.
const DETAILED: usize = 3;
/// Number of cells listed below the matrices: those nearest to their tolerance.
const NEAREST: usize = 8;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Status {
    Passed,
    /// No case is supported on this device.
    Unsupported,
    /// A result is wrong, or a case failed for another reason than lack of support.
    Failed,
    /// Skipped, because an earlier cell lost the device.
    #[serde(rename = "not_run")]
    NotRun,
}

/// Measured speed, compared with the machine's peak.
#[derive(Clone, Debug)]
struct Speed {
    shape: String,
    seconds: f64,
    flops: u64,
    bytes: u64,
    limit: Option<Limit>,
}

/// One op with one dtype.
#[derive(Clone, Debug)]
struct Cell {
    op: String,
    dtype: DType,
    status: Status,
    /// The first failure, or, if no case failed, the first unsupported case, with its label.
    reason: String,
    cases: usize,
    unsupported: usize,
    tolerance: String,
    errors: Errors,
    /// Number of calls to library kernels.
    library_calls: u64,
    speed: Option<Speed>,
}

pub(super) fn main(a: &OpsArgs) -> Result<u8> {
    let DeviceName { backend: kind, index } = parse_device(&a.backend, a.device)?;
    let level: Level = a.level.parse()?;
    let dtypes: Vec<DType> = a.dtypes.iter().map(|d| dtype(d)).collect::<Result<_>>()?;
    if !(a.tolerance > 0.0 && a.tolerance.is_finite()) {
        return Err(Error::argument(
            "--tolerance",
            format!("{} is not a factor; give a number above 0", a.tolerance),
        ));
    }
    let rows = select_rows(&a.ops)?;
    let mut b = Backend::builder().backend_type(kind).level(level).amp(halcyon::AmpPolicy::None);
    if let Some(n) = index {
        b = b.device(n);
    }
    if let Some(n) = a.threads {
        b = b.num_threads(n);
    }
    let backend = b.build()?;
    crate::args::print_warnings(&backend);
    let (limits, no_shares) = match (a.no_speed, Limits::new(&backend)) {
        (true, _) => (None, Some("--no-speed".to_string())),
        (false, Ok(l)) => (Some(l), None),
        (false, Err(Error::Unsupported { what, .. })) => (None, Some(what)),
        (false, Err(e)) => return Err(e),
    };
    let most = match (a.cases, backend.info().backend) {
        (Some(n), _) => n as usize,
        (None, BackendType::Cpu) => usize::MAX,
        _ => DEVICE_CASES,
    };
    let seed = a.seed.unwrap_or_else(Rng::fresh_seed);
    let mut run = Run { backend: &backend, limits, speed: !a.no_speed, most, factor: a.tolerance, seed };

    let start = Instant::now();
    let takes = |r: &Row, d: &DType| {
        r.dtypes.contains(d)
            && r.cases.iter().any(|c| c.takes(*d))
            && (dtypes.is_empty() || dtypes.contains(d))
    };
    let work: Vec<(&Row, DType)> =
        rows.iter().flat_map(|r| DType::all().filter(|d| takes(r, d)).map(move |d| (r, d))).collect();
    if work.is_empty() {
        return Err(Error::argument("--dtype", format!("none of these ops takes {}", a.dtypes.join(" or "))));
    }
    let mut progress = Progress::new("op and type", work.len() as u64);
    let quiet = PanicRecorder::start();
    let lines = Lines(a.json_lines);
    let mut cells = Vec::with_capacity(work.len());
    let mut lost = None::<String>;
    for (row, d) in work {
        let name = format!("{} {d}", row.name);
        lines.emit("begin", &name)?;
        let cell = match &lost {
            Some(why) => Cell { status: Status::NotRun, reason: why.clone(), ..Cell::of(row, d) },
            None => run.cell(row, d),
        };
        if cell.status == Status::Failed
            && let Err(e) = check_alive(&**backend.device())
        {
            lost = Some(format!("the device was lost at {name}: {}", report::message(&e)));
        }
        lines.emit("cell", cell.json())?;
        cells.push(cell);
        progress.step();
        // Frees programs and constants that are no longer needed.
        if backend.info().backend != BackendType::Cpu {
            backend.empty_cache();
        }
    }
    drop(quiet);
    progress.finish();

    let done = Report { a, backend: &backend, cells, seed, no_shares, took: start.elapsed() };
    if a.json_lines {
        lines.emit("end", done.total())?;
    } else if a.json {
        report::print_json(&done.json())?;
    } else {
        report::print(&done.text())?;
    }
    Ok(if done.count(Status::Failed) == 0 { 0 } else { 1 })
}

fn dtype(name: &str) -> Result<DType> {
    DType::all().find(|d| d.name() == name.trim()).ok_or_else(|| {
        let names: Vec<&str> = DType::all().map(|d| d.name()).collect();
        Error::argument("--dtype", format!("\"{name}\" is not a type; the types are {}", names.join(", ")))
    })
}

/// The rows with these names, or all rows if no name is given.
fn select_rows(names: &[String]) -> Result<Vec<Row>> {
    let all = optable::rows();
    for n in names {
        if !all.iter().any(|r| r.name == *n) {
            let near: Vec<&str> = all.iter().map(|r| &*r.name).filter(|r| r.contains(n.as_str())).collect();
            let there: Vec<&str> = match near.is_empty() {
                true => all.iter().map(|r| &*r.name).collect(),
                false => near,
            };
            return Err(Error::argument(
                "--op",
                format!("there is no op \"{n}\"; there are {}", there.join(", ")),
            ));
        }
    }
    Ok(all.into_iter().filter(|r| names.is_empty() || names.contains(&r.name)).collect())
}

struct Run<'a> {
    backend: &'a Backend,
    limits: Option<Limits>,
    speed: bool,
    /// Limit on the cases of each op and dtype.
    most: usize,
    /// Factor on tolerances.
    factor: f64,
    seed: u64,
}

impl Run<'_> {
    fn cell(&mut self, row: &Row, d: DType) -> Cell {
        let b = self.backend;
        let mut cell = Cell::of(row, d);
        let calls = b.counters().library_calls;
        if !has(b, d) {
            cell.reason = format!("{} has no {d}", b.id());
            return cell;
        }
        // The operands depend on the op, the dtype and the seed, not on other cells.
        let name = format!("{} {d}", row.name);
        let mix = |h: u64, c: u8| (h ^ c as u64).wrapping_mul(0x0100_0000_01b3);
        let mut rng = Rng::new(name.bytes().fold(self.seed ^ 0xcbf2_9ce4_8422_2325, mix));
        let mut failed = None;
        let mut lacks = None;
        for case in row.cases.iter().filter(|c| c.takes(d)).take(self.most) {
            let result = catch_panics(|| {
                let mut s = case.sample(row.tol, d, &mut rng)?;
                s.want = s.want.scaled(self.factor);
                check::judge(b, &s)
            });
            let at = |what: String| format!("[{}] {what}", case.label);
            match result {
                Ok(Ok(e)) => {
                    cell.errors = cell.errors.max(e);
                    cell.status = Status::Passed;
                    cell.cases += 1;
                }
                Ok(Err(wrong)) => {
                    cell.errors = cell.errors.max(wrong.errors);
                    cell.cases += 1;
                    failed.get_or_insert(at(wrong.what));
                }
                Err(CaseError::Error(Error::Unsupported { what, .. })) => {
                    cell.unsupported += 1;
                    lacks.get_or_insert(at(what));
                }
                Err(CaseError::Error(e)) => {
                    cell.cases += 1;
                    failed.get_or_insert(at(report::message(&e)));
                }
                Err(CaseError::Panic(what)) => {
                    cell.cases += 1;
                    failed.get_or_insert(at(what));
                }
            }
        }
        if failed.is_some() {
            cell.status = Status::Failed;
        }
        cell.reason = failed.or(lacks).unwrap_or_default();
        cell.library_calls = b.counters().library_calls - calls;
        if cell.status == Status::Passed
            && self.speed
            && let Some(case) = row.bench.as_ref().filter(|c| c.takes(d))
        {
            match catch_panics(|| self.time(case, d, &mut rng)) {
                Ok(s) => cell.speed = Some(s),
                Err(CaseError::Error(Error::Unsupported { what, .. })) => {
                    cell.reason = format!("[{}] {what}", case.label)
                }
                // The op passed on small tensors but failed on this larger one.
                Err(CaseError::Error(e)) => {
                    cell.status = Status::Failed;
                    cell.reason = format!("[{}] {}", case.label, report::message(&e));
                }
                Err(CaseError::Panic(what)) => {
                    cell.status = Status::Failed;
                    cell.reason = format!("[{}] {what}", case.label);
                }
            }
        }
        cell
    }

    fn time(&mut self, case: &Case, d: DType, rng: &mut Rng) -> Result<Speed> {
        let b = self.backend;
        let graph = case.graph(d)?;
        let arithmetic = match d {
            DType::BF16 => "bf16",
            DType::I8 | DType::U8 => "int8",
            _ => "f32",
        };
        let work = items::work(&graph, arithmetic)?;
        let inputs = case.inputs(d, rng)?;
        let s = Session::new(b, graph);
        let exe = s.prepare(&inputs)?;
        let buffers = s.upload(&inputs)?;
        let mut times = vec![];
        let begin = Instant::now();
        // The first run is not counted, because it includes one-time costs of the device.
        while times.len() <= MIN_RUNS || begin.elapsed() < TIME {
            let start = Instant::now();
            let out = exe.run(&buffers, &[])?;
            b.synchronize()?;
            times.push(start.elapsed().as_secs_f64());
            drop(out);
        }
        times.remove(0);
        times.sort_by(f64::total_cmp);
        let limit = self.limits.as_mut().map(|l| l.cached(&work)).transpose()?;
        Ok(Speed {
            shape: case.label.clone(),
            seconds: times[times.len() / 2],
            flops: work.flops,
            bytes: work.bytes(),
            limit,
        })
    }
}

impl Speed {
    /// Share of the machine's peak.
    fn share(&self) -> Option<f64> {
        self.limit.map(|l| l.seconds / self.seconds.max(1e-12))
    }

    /// The rate of the resource that limits the op (compute or memory), as in `12.3 GFLOP/s`.
    fn rate(&self) -> String {
        let per_second = |n: u64| three(n as f64 / self.seconds.max(1e-12) / 1e9);
        let computes = match self.limit {
            Some(l) => l.bound == "compute",
            // Without a measured peak, an op with more than 16 FLOPs per byte is taken to be limited by
            // compute.
            None => self.flops / 16 > self.bytes,
        };
        match computes {
            true => format!("{} GFLOP/s", per_second(self.flops)),
            false => format!("{} GB/s", per_second(self.bytes)),
        }
    }

    fn json(&self) -> Value {
        json!({
            "shape": self.shape,
            "time_ms": self.seconds * 1e3,
            "gflops": self.flops as f64 / self.seconds.max(1e-12) / 1e9,
            "gbytes_per_s": self.bytes as f64 / self.seconds.max(1e-12) / 1e9,
            "share_of_peak": self.share(),
            "above_peak": self.share().map(|s| s > ABOVE),
            "bound": self.limit.map(|l| l.bound),
            "peak": self.limit.map(|l| json!({ "gflops": l.flops / 1e9, "gbytes_per_s": l.bandwidth / 1e9 })),
        })
    }
}

impl Cell {
    /// A cell before any case has run.
    fn of(row: &Row, d: DType) -> Cell {
        Cell {
            op: row.name.clone(),
            dtype: d,
            status: Status::Unsupported,
            reason: String::new(),
            cases: 0,
            unsupported: 0,
            tolerance: row.tol.to_string(),
            errors: Errors::default(),
            library_calls: 0,
            speed: None,
        }
    }

    /// The cell's text in the matrix.
    fn text(&self) -> String {
        match self.status {
            Status::Failed => "FAIL".into(),
            Status::Unsupported => "no".into(),
            Status::NotRun => "not run".into(),
            Status::Passed => self
                .speed
                .as_ref()
                .and_then(Speed::share)
                .map_or("ok".into(), |s| format!("{:.0}%{}", s * 100.0, if s > ABOVE { "!" } else { "" })),
        }
    }

    fn json(&self) -> Value {
        json!({
            "op": self.op,
            "dtype": self.dtype,
            "status": self.status,
            "reason": (!self.reason.is_empty()).then_some(&self.reason),
            "cases": self.cases,
            "unsupported_cases": self.unsupported,
            "tolerance": self.tolerance,
            "errors": self.errors,
            "library_calls": self.library_calls,
            "speed": self.speed.as_ref().map(Speed::json),
        })
    }
}

struct Report<'a> {
    a: &'a OpsArgs,
    backend: &'a Backend,
    cells: Vec<Cell>,
    seed: u64,
    no_shares: Option<String>,
    took: Duration,
}

impl Report<'_> {
    fn count(&self, s: Status) -> usize {
        self.cells.iter().filter(|c| c.status == s).count()
    }

    fn text(&self) -> String {
        let mut out = backend_text(self.backend);
        // Writing to a string cannot fail.
        let _ = writeln!(out, "level    {}", level_text(self.backend));
        let mut ops: Vec<&str> = self.cells.iter().map(|c| &*c.op).collect();
        ops.dedup();
        // Two matrices, because native dtypes and small types have few ops in common.
        for native in [true, false] {
            let types: Vec<DType> = DType::all()
                .filter(|d| d.is_native() == native && self.cells.iter().any(|c| c.dtype == *d))
                .collect();
            out += &self.matrix(&ops, &types);
        }
        if ops.len() <= DETAILED {
            out += &details(&self.cells.iter().collect::<Vec<_>>());
        } else {
            let mut near: Vec<&Cell> = self.cells.iter().filter(|c| c.errors.of_tolerance > 0.0).collect();
            near.sort_by(|a, b| b.errors.of_tolerance.total_cmp(&a.errors.of_tolerance));
            near.truncate(NEAREST);
            if !near.is_empty() {
                out += "nearest to their tolerances\n";
                out += &details(&near);
            }
        }
        for (what, status) in
            [("failed", Status::Failed), ("not run", Status::NotRun), ("not supported", Status::Unsupported)]
        {
            let mut reasons: Vec<(&str, Vec<String>)> = vec![];
            for c in self.cells.iter().filter(|c| c.status == status) {
                let who = format!("{} {}", c.op, c.dtype);
                match reasons.iter_mut().find(|(r, _)| *r == c.reason) {
                    Some((_, v)) => v.push(who),
                    None => reasons.push((&c.reason, vec![who])),
                }
            }
            for (why, who) in reasons {
                let named = who.iter().take(6).cloned().collect::<Vec<_>>().join(", ");
                let more = if who.len() > 6 { format!(" and {} more", who.len() - 6) } else { String::new() };
                let _ = writeln!(out, "{what}: {named}{more}: {}", why.replace('\n', " "));
            }
        }
        if let (Some(why), false) = (&self.no_shares, self.a.no_speed) {
            let _ = writeln!(out, "no shares of a peak: {why}");
        }
        let _ = writeln!(
            out,
            "{} ops and types with {} cases on {} at {} in {}: {} passed, {} not supported, {} failed (--seed {})",
            self.cells.len(),
            self.cells.iter().map(|c| c.cases).sum::<usize>(),
            self.backend.id(),
            level_text(self.backend),
            report::time(self.took),
            self.count(Status::Passed),
            self.count(Status::Unsupported),
            self.count(Status::Failed),
            self.seed,
        );
        out
    }

    fn matrix(&self, ops: &[&str], types: &[DType]) -> String {
        let mut table = vec![vec!["op".to_string()]];
        table[0].extend(types.iter().map(|d| d.to_string()));
        for op in ops {
            let cells: Vec<String> = types
                .iter()
                .map(|d| {
                    let cell = self.cells.iter().find(|c| c.op == *op && c.dtype == *d);
                    cell.map_or(String::new(), Cell::text)
                })
                .collect();
            if cells.iter().any(|c| !c.is_empty()) {
                table.push([vec![op.to_string()], cells].concat());
            }
        }
        if table.len() == 1 {
            return String::new();
        }
        let right: Vec<usize> = (1..=types.len()).collect();
        figures(table, &right)
    }

    fn total(&self) -> Value {
        json!({
            "passed": self.count(Status::Passed),
            "unsupported": self.count(Status::Unsupported),
            "failed": self.count(Status::Failed),
            "not_run": self.count(Status::NotRun),
            "cases": self.cells.iter().map(|c| c.cases).sum::<usize>(),
        })
    }

    fn json(&self) -> Value {
        json!({
            "backend": backend_json(self.backend),
            "level": self.backend.level(),
            "seed": self.seed,
            "tolerance_factor": self.a.tolerance,
            "total": self.total(),
            "no_shares": self.no_shares,
            "cells": self.cells.iter().map(Cell::json).collect::<Vec<_>>(),
        })
    }
}

/// A line of figures for each cell.
fn details(cells: &[&Cell]) -> String {
    let title = [
        "op",
        "type",
        "",
        "cases",
        "largest error",
        "relative",
        "ulp",
        "allowed",
        "used",
        "time",
        "rate",
        "share",
    ];
    let mut rows: Vec<Vec<String>> = vec![title.map(String::from).into()];
    for c in cells {
        let status = match c.status {
            Status::Passed => "passed",
            Status::Unsupported => "not supported",
            Status::Failed => "FAILED",
            Status::NotRun => "not run",
        };
        let mut row = vec![c.op.clone(), c.dtype.to_string(), status.into()];
        if !matches!(c.status, Status::Unsupported | Status::NotRun) {
            let e = &c.errors;
            row.extend([c.cases.to_string(), short(e.abs), short(e.rel), short(e.ulp), c.tolerance.clone()]);
            row.push(percent(e.of_tolerance));
            if let Some(s) = &c.speed {
                let share = s
                    .limit
                    .zip(s.share())
                    .map_or(String::new(), |(l, v)| format!("{} of {}{}", percent(v), l.bound, above(v)));
                row.extend([report::time(Duration::from_secs_f64(s.seconds)), s.rate(), share]);
            }
        }
        rows.push(row);
    }
    figures(rows, &[3, 4, 5, 6, 8, 9, 10])
}

/// The note after a share that is above the measured peak.
fn above(share: f64) -> &'static str {
    if share > ABOVE { " (above the measured peak)" } else { "" }
}

/// Errors are printed with few digits.
fn short(v: f64) -> String {
    match v.abs() {
        a if a == 0.0 || !a.is_finite() => number(v),
        a if !(1e-2..1e4).contains(&a) => format!("{v:.1e}"),
        _ => three(v),
    }
}
