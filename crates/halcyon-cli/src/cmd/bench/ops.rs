//! `halcyon bench ops`: measures single operations and compares them with the machine's peaks.

use super::compare::{self, EarlierReport, head};
use super::items::{Item, random, select_items};
use super::limits::{Limit, Limits, Work};
use super::{ABOVE, MS, Sample, giga, merge, percent, repeat, settings, share_text, work_json};
use crate::args::BenchOpsArgs;
use crate::cmd::{backend_json, backend_text};
use crate::report::{self, Progress, figures, time};
use halcyon::ir::ConstData;
use halcyon::{Backend, Error, Result, Session};
use serde_json::{Value, json};
use std::fmt::Write;
use std::time::{Duration, Instant};

/// Number of unmeasured runs before the measured runs.
const WARM_UP: usize = 2;
/// Without `--repeat`: at least this many runs, and as many as fit in [`TIME`].
const MIN_RUNS: usize = 7;
const TIME: Duration = Duration::from_millis(500);

pub(super) fn main(a: &BenchOpsArgs) -> Result<u8> {
    a.backend.check()?;
    let items = select_items(&a.only)?;
    let before = a.compare.as_deref().map(|f| EarlierReport::read(f, "ops")).transpose()?;
    let backend = a.backend.open(false)?;
    let (mut limits, no_limits) = match Limits::new(&backend) {
        Ok(l) => (Some(l), None),
        Err(Error::Unsupported { what, .. }) => (None, Some(what)),
        Err(e) => return Err(e),
    };
    let mut rows = Vec::with_capacity(items.len());
    let mut progress = Progress::new("operation", items.len() as u64);
    for item in items {
        let measured = match measure(&backend, &item, a.repeat, limits.as_mut()) {
            Ok(m) => Ok(m),
            // An unsupported operation becomes a row with the reason.
            Err(Error::Unsupported { what, .. }) => Err(what),
            Err(e) => return Err(e),
        };
        backend.empty_cache();
        rows.push(Row { item, measured });
        progress.step();
    }
    progress.finish();
    let done = Report { settings: settings(&backend), backend, rows, no_limits, before };
    if a.json {
        report::print_json(&done.json())?
    } else {
        report::print(&done.text())?
    }
    Ok(0)
}

/// Maximum number of times that a peak is measured again if the work was faster than the peak permits.
const MAX_REMEASURED: usize = 3;

struct Measured {
    work: Work,
    /// Seconds.
    time: Sample,
    limit: Option<Limit>,
}

fn measure(b: &Backend, item: &Item, runs: Option<u32>, limits: Option<&mut Limits>) -> Result<Measured> {
    let graph = item.graph()?;
    let work = item.work(&graph)?;
    let session = Session::new(b, graph);
    let inputs = session
        .graph()
        .inputs()
        .iter()
        .enumerate()
        .map(|(i, s)| {
            let ty = session.graph().ty(s.node);
            random(ty.dtype, &ty.shape.dims()?, i as u64 + 1)
        })
        .collect::<Result<Vec<ConstData>>>()?;
    let exe = session.prepare(&inputs)?;
    let buffers = session.upload(&inputs)?;
    drop(inputs);
    let mut times = vec![];
    let mut run = |keep: bool| -> Result<()> {
        let start = Instant::now();
        let out = exe.run(&buffers, &[])?;
        b.synchronize()?;
        if keep {
            times.push(start.elapsed().as_secs_f64());
        }
        // The results are dropped after the time is taken, because freeing memory is not part of the work.
        drop(out);
        Ok(())
    };
    // Peaks are measured before and after the work, because other load on the machine may lower either
    // result; the higher one counts.
    let mut limits = limits;
    if let Some(l) = &mut limits {
        l.clear();
        l.measure(&work)?;
    }
    for _ in 0..WARM_UP {
        run(false)?;
    }
    repeat(runs, MIN_RUNS, TIME, || run(true))?;
    let time = Sample::of(&times);
    // If the work was faster than the peak permits, the peak was probably measured under load.
    let above = |l: &Limit| l.seconds > ABOVE * time.median;
    let limit = match limits {
        None => None,
        Some(l) => {
            let mut limit = l.measure(&work)?;
            for _ in 0..MAX_REMEASURED {
                if above(&limit) {
                    limit = l.measure(&work)?;
                }
            }
            Some(limit)
        }
    };
    Ok(Measured { work, time, limit })
}

struct Row {
    item: Item,
    measured: std::result::Result<Measured, String>,
}

struct Report {
    backend: Backend,
    settings: Value,
    rows: Vec<Row>,
    /// Why no share of a peak can be given.
    no_limits: Option<String>,
    before: Option<EarlierReport>,
}

impl Report {
    fn text(&self) -> String {
        let mut out = backend_text(&self.backend);
        // Writing to a string cannot fail.
        let _ = writeln!(out, "level    {}", super::super::level_text(&self.backend));
        if let Some(b) = &self.before {
            let names: Vec<&str> = self.rows.iter().map(|r| r.item.name.as_str()).collect();
            b.note(&self.settings, &names);
            out += &b.text();
        }
        let title = ["", "", "median", "min", "spread", "GFLOP/s", "GB/s", "share of peak"];
        let mut table: Vec<Vec<String>> = vec![title.map(String::from).into()];
        if self.before.is_some() {
            table[0].push("ratio  ".into());
        }
        let mut absent = vec![];
        for r in &self.rows {
            let m = match &r.measured {
                Ok(m) => m,
                Err(why) => {
                    absent.push((&r.item.name, why));
                    continue;
                }
            };
            let t = &m.time;
            let mut cells = vec![
                r.item.name.clone(),
                r.item.what.clone(),
                time(Duration::from_secs_f64(t.median)),
                time(Duration::from_secs_f64(t.min)),
                percent(t.spread()),
                giga(m.work.flops, t.median),
                giga(m.work.bytes(), t.median),
                share_text(m.limit.map(Into::into), t.median),
            ];
            if let Some(b) = &self.before {
                cells.push(compare::cell(b.ratio(&r.item.name, t)));
            }
            table.push(cells);
        }
        out += &figures(table, &[2, 3, 4, 5, 6, 7, 8]);
        for (name, why) in absent {
            let _ = writeln!(out, "  not measured: {name} ({why})");
        }
        if let Some(why) = &self.no_limits {
            let _ = writeln!(out, "  no shares of a peak: {why}");
        }
        out
    }

    fn json(&self) -> Value {
        let row = |r: &Row| {
            let mut v = json!({ "name": r.item.name, "what": r.item.what, "arithmetic": r.item.arithmetic });
            let more = match &r.measured {
                Err(why) => json!({ "unsupported": why }),
                Ok(m) => {
                    let bound = m.limit.map(Into::into);
                    let mut w = work_json(m.work.flops, m.work.bytes(), m.time.median, bound);
                    let peak = m
                        .limit
                        .map(|l| json!({ "gflops": l.flops / 1e9, "gbytes_per_s": l.bandwidth / 1e9 }));
                    merge(&mut w, json!({ "time_ms": m.time.json(MS), "peak": peak }));
                    w
                }
            };
            merge(&mut v, more);
            v
        };
        let mut v = head("ops", &self.settings);
        merge(
            &mut v,
            json!({
                "backend": backend_json(&self.backend),
                "rows": self.rows.iter().map(row).collect::<Vec<_>>(),
                "no_shares": self.no_limits,
            }),
        );
        if let Some(b) = &self.before {
            b.add_to(&mut v);
        }
        v
    }
}
