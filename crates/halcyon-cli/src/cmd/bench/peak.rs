//! `halcyon bench peak`: measures the machine's peak rates, and the time to start a job on a team.

use super::compare::{self, EarlierReport, head};
use super::limits::{rates, working_sets};
use super::{MS, Sample, merge, percent, settings, threads, three};
use crate::args::BenchPeakArgs;
use crate::report::{self, Progress, figures, size};
use halcyon::{Backend, BackendType, Error, Result};
use halcyon_hal::cpu::peak::{self, MulAdd, Stream};
use halcyon_hal::cpu::sys::{Caches, Isa};
use halcyon_hal::cpu::team::Team;
use serde_json::{Value, json};
use std::fmt::Write;
use std::time::Duration;

/// Number of jobs for measuring how long a team takes to run an empty job, with no pause between jobs.
const JOBS: usize = 2000;
/// Number of jobs for the same measurement with a pause of [`REST`] before each job, in which the threads
/// fall asleep.
const RESTED_JOBS: usize = 50;
const REST: Duration = Duration::from_millis(10);

pub(super) fn main(a: &BenchPeakArgs) -> Result<u8> {
    let before = a.compare.as_deref().map(|f| EarlierReport::read(f, "peak")).transpose()?;
    let mut b = Backend::builder().backend_type(a.backend.parse()?);
    if let Some(n) = a.threads {
        b = b.num_threads(n);
    }
    let b = b.build()?;
    if b.info().backend != BackendType::Cpu {
        return Err(Error::unsupported(
            format!("measuring the peaks of {}", b.id()),
            "Use --backend cpu; `halcyon bench ops` times operations on every device",
        ));
    }
    let mut settings = settings(&b);
    merge(&mut settings, json!({ "level": null }));
    let threads = threads(&b).unwrap_or(1);
    let done = Report { name: b.info().name.clone(), settings, rows: measure(threads)?, before };
    if a.json {
        report::print_json(&done.json())?
    } else {
        report::print(&done.text())?
    }
    Ok(0)
}

/// The unit of a row.
#[derive(Clone, Copy, Debug)]
enum Unit {
    /// Operations per second.
    Ops,
    /// Bytes per second.
    Bytes,
    /// Seconds.
    Time,
}

#[derive(Debug)]
struct Row {
    name: String,
    what: String,
    threads: usize,
    unit: Unit,
    /// The figure, or the reason why there is none.
    value: std::result::Result<Sample, String>,
}

fn measure(threads: usize) -> Result<Vec<Row>> {
    let isa = Isa::best();
    let mut rows = vec![];
    let counts = if threads == 1 { vec![1] } else { vec![1, threads] };
    let mut progress = Progress::new("peak", (counts.len() * 11) as u64);
    for &n in &counts {
        let team = Team::new(n);
        for kind in MulAdd::ALL {
            let (what, value) = match rates(|| peak::multiply_add(&team, isa, kind)) {
                Ok(rates) => (peak::instruction(isa, kind)?.to_string(), Ok(Sample::of(&rates))),
                Err(Error::Unsupported { what, .. }) => (String::new(), Err(what)),
                Err(e) => return Err(e),
            };
            let name = format!("multiply-add {}", kind.name());
            rows.push(Row { name, what, threads: n, unit: Unit::Ops, value });
            progress.step();
        }
        for (place, bytes) in working_sets(n) {
            for stream in [Stream::Read, Stream::Triad] {
                let (what, value) = match &bytes {
                    Ok(bytes) => {
                        let rates = rates(|| peak::bandwidth(&team, isa, stream, *bytes))?;
                        (size(*bytes as u64), Ok(Sample::of(&rates)))
                    }
                    Err(why) => (String::new(), Err(why.clone())),
                };
                let name = format!("{} {place}", stream.name());
                rows.push(Row { name, what, threads: n, unit: Unit::Bytes, value });
                progress.step();
            }
        }
        for (name, rest, jobs) in [
            ("starting a job", Duration::ZERO, JOBS),
            ("starting a job on sleeping threads", REST, RESTED_JOBS),
        ] {
            let value = match n {
                1 => Err("there is only one thread".into()),
                _ => Ok(Sample::of(&peak::hand_off(&team, rest, jobs))),
            };
            let what = if rest.is_zero() {
                "no pauses".into()
            } else {
                format!("after pauses of {} ms", rest.as_millis())
            };
            rows.push(Row { name: name.into(), what, threads: n, unit: Unit::Time, value });
            progress.step();
        }
    }
    progress.finish();
    Ok(rows)
}

struct Report {
    name: String,
    settings: Value,
    rows: Vec<Row>,
    before: Option<EarlierReport>,
}

impl Row {
    /// The row's name in reports. It ends with "1 thread" or "all threads"; the settings contain the number
    /// of all threads.
    fn key(&self) -> String {
        format!("{}, {}", self.name, if self.threads == 1 { "1 thread" } else { "all threads" })
    }

    fn best(&self, s: &Sample) -> String {
        match self.unit {
            Unit::Ops => format!("{} GFLOP/s", three(s.max / 1e9)),
            Unit::Bytes => format!("{} GB/s", three(s.max / 1e9)),
            Unit::Time => format!("{} µs", three(s.min * 1e6)),
        }
    }

    fn median(&self, s: &Sample) -> String {
        match self.unit {
            Unit::Ops | Unit::Bytes => three(s.median / 1e9),
            Unit::Time => three(s.median * 1e6),
        }
    }

    fn json(&self) -> Value {
        let mut v =
            json!({ "name": self.key(), "measures": self.name, "threads": self.threads, "what": self.what });
        let more = match (&self.value, self.unit) {
            (Err(why), _) => json!({ "absent": why }),
            (Ok(s), Unit::Ops) => json!({ "unit": "operations/s", "rate": s.json(1.0) }),
            (Ok(s), Unit::Bytes) => json!({ "unit": "bytes/s", "rate": s.json(1.0) }),
            (Ok(s), Unit::Time) => json!({ "unit": "ms", "time_ms": s.json(MS) }),
        };
        merge(&mut v, more);
        v
    }
}

impl Report {
    fn keys(&self) -> Vec<String> {
        self.rows.iter().map(Row::key).collect()
    }

    fn text(&self) -> String {
        let c = Caches::get();
        let mut out = format!("machine  {}, {}\n", self.name, Isa::best().name());
        // Writing to a string cannot fail.
        let _ = writeln!(
            out,
            "caches   L1 {}, L2 {} a core; L3 {}{}",
            size(c.l1 as u64),
            size(c.l2 as u64),
            if c.l3 == 0 { "none".into() } else { size(c.l3 as u64) },
            if c.known { "" } else { " (typical sizes: the system does not report them)" }
        );
        if let Some(b) = &self.before {
            let keys = self.keys();
            b.note(&self.settings, &keys.iter().map(String::as_str).collect::<Vec<_>>());
            out += &b.text();
        }
        let mut table = vec![];
        let mut title: Vec<String> = ["", "threads", "", "best", "median", "spread"].map(String::from).into();
        title.extend(self.before.is_some().then(|| "ratio  ".into()));
        table.push(title);
        let mut absent = vec![];
        for r in &self.rows {
            match &r.value {
                Err(why) => absent.push((r.key(), why)),
                Ok(s) => {
                    let mut cells = vec![r.name.clone(), r.threads.to_string(), r.what.clone()];
                    cells.extend([r.best(s), r.median(s), percent(s.spread())]);
                    if let Some(b) = &self.before {
                        cells.push(compare::cell(b.ratio(&r.key(), s)));
                    }
                    table.push(cells);
                }
            }
        }
        out += &figures(table, &[1, 2, 3, 4, 5, 6]);
        for (name, why) in absent {
            let _ = writeln!(out, "  not measured: {name} ({why})");
        }
        out
    }

    fn json(&self) -> Value {
        let c = Caches::get();
        let mut v = head("peak", &self.settings);
        merge(
            &mut v,
            json!({
                "machine": {
                    "name": self.name, "simd": Isa::best().name(), "l1": c.l1, "l2": c.l2, "l3": c.l3, "caches_known": c.known,
                },
                "rows": self.rows.iter().map(Row::json).collect::<Vec<_>>(),
            }),
        );
        if let Some(b) = &self.before {
            b.add_to(&mut v);
        }
        v
    }
}
