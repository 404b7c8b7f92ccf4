//! `halcyon bench`: measures the machine's peak rates, single operations, models and the gain of
//! transformations, and compares them with an earlier report.

mod compare;
pub(crate) mod items;
#[cfg_attr(not(feature = "cpu"), path = "no_limits.rs")]
pub(crate) mod limits;
mod model;
mod ops;
#[cfg_attr(not(feature = "cpu"), path = "no_peak.rs")]
mod peak;
mod picture;
mod receipts;

use crate::args::{Bench, BenchArgs};
use halcyon::{Backend, Result};
use limits::Limit;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

pub(crate) fn main(a: &BenchArgs) -> Result<u8> {
    match &a.what {
        Bench::Peak(a) => peak::main(a),
        Bench::Ops(a) => ops::main(a),
        #[cfg(feature = "language")]
        Bench::Llm(a) => super::language::bench::main(a),
        Bench::Model(a) => model::main(a),
        Bench::Receipts(a) => receipts::main(a),
    }
}

/// Statistics of a repeated measurement, in seconds or as a rate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Sample {
    median: f64,
    min: f64,
    max: f64,
    /// Quartiles: half of the values lie between them.
    low: f64,
    high: f64,
    runs: usize,
}

impl Sample {
    /// Statistics of at least one value.
    fn of(values: &[f64]) -> Sample {
        let mut v = values.to_vec();
        v.sort_by(f64::total_cmp);
        let at = |i: usize| v.get(i.min(v.len().saturating_sub(1))).copied().unwrap_or(f64::NAN);
        let n = v.len();
        Sample { median: at(n / 2), min: at(0), max: at(n), low: at(n / 4), high: at(n - n / 4), runs: n }
    }

    /// The interquartile range divided by the median.
    fn spread(&self) -> f64 {
        (self.high - self.low) / self.median.abs().max(f64::MIN_POSITIVE)
    }

    fn json(&self, scale: f64) -> Value {
        json!({
            "median": self.median * scale, "min": self.min * scale, "max": self.max * scale,
            "low_quartile": self.low * scale, "high_quartile": self.high * scale, "runs": self.runs,
        })
    }

    /// Parses the output of [`Sample::json`] with this `scale`.
    fn parse(v: &Value, scale: f64) -> Option<Sample> {
        let of = |k: &str| Some(v.get(k)?.as_f64()? / scale);
        Some(Sample {
            median: of("median")?,
            min: of("min")?,
            max: of("max")?,
            low: of("low_quartile")?,
            high: of("high_quartile")?,
            runs: usize::try_from(v.get("runs")?.as_u64()?).ok()?,
        })
    }
}

/// Seconds to milliseconds, the unit of reports.
pub(crate) const MS: f64 = 1e3;

/// Calls `f` the requested number of times. Without a request, calls it at least `least` times, and then
/// until `time` has passed or 10,000 calls are done.
fn repeat(asked: Option<u32>, least: usize, time: Duration, mut f: impl FnMut() -> Result<()>) -> Result<()> {
    const MAX_RUNS: usize = 10_000;
    let start = Instant::now();
    let mut n = 0;
    while match asked {
        Some(k) => n < k as usize,
        None => n < least || n < MAX_RUNS && start.elapsed() < time,
    } {
        f()?;
        n += 1;
    }
    Ok(())
}

/// The settings of a report. Only reports with equal settings are comparable.
fn settings(b: &Backend) -> Value {
    json!({
        "device": b.id(),
        "name": b.info().name,
        "threads": threads(b),
        "level": b.level().to_string(),
        // Null without mixed precision, so that reports made before this setting existed can still be
        // compared.
        "precision": Some(b.amp()).filter(|p| *p != halcyon::AmpPolicy::None),
        "matmul_precision":
            Some(b.precision()).filter(|p| *p != halcyon::MatmulPrecision::Highest).map(|p| p.to_string()),
        "build": if cfg!(debug_assertions) { "debug" } else { "release" },
    })
}

/// Number of threads of the CPU device.
fn threads(b: &Backend) -> Option<usize> {
    b.info().properties.get("threads")?.parse().ok()
}

/// `94 %`.
pub(crate) fn percent(v: f64) -> String {
    if v < 0.0995 { format!("{:.1} %", v * 100.0) } else { format!("{:.0} %", v * 100.0) }
}

/// Three significant digits, as in `123` and `1.23`, but all digits before the point and at most two behind.
pub(crate) fn three(v: f64) -> String {
    match v.abs() {
        a if a >= 99.95 || a == 0.0 => format!("{v:.0}"),
        a if a >= 9.995 => format!("{v:.1}"),
        _ => format!("{v:.2}"),
    }
}

/// A rate in 10⁹ per second; an empty text if there was no work.
fn giga(work: u64, seconds: f64) -> String {
    if work == 0 { String::new() } else { three(work as f64 / seconds.max(1e-12) / 1e9) }
}

/// The least time of some work at the machine's peaks, in seconds, and whether compute or memory limits
/// it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bound {
    seconds: f64,
    by: &'static str,
}

impl From<Limit> for Bound {
    fn from(l: Limit) -> Bound {
        Bound { seconds: l.seconds, by: l.bound }
    }
}

/// `94 % of compute`.
fn share_text(bound: Option<Bound>, seconds: f64) -> String {
    let one = |b: Bound| {
        let share = b.seconds / seconds.max(1e-12);
        let note = if share > ABOVE { " (above the measured peak)" } else { "" };
        format!("{} of {}{note}", percent(share), b.by)
    };
    bound.map_or(String::new(), one)
}

/// Shares above this are marked. They occur if the machine was slower while its peak was measured than
/// during the work (other load, a lower clock), or if the kernel needs fewer operations than are counted.
pub(in crate::cmd) const ABOVE: f64 = 1.02;

fn work_json(flops: u64, bytes: u64, seconds: f64, bound: Option<Bound>) -> Value {
    let rate = |n: u64| n as f64 / seconds.max(1e-12) / 1e9;
    json!({
        "flops": flops,
        "bytes": bytes,
        "gflops": rate(flops),
        "gbytes_per_s": rate(bytes),
        "share_of_peak": bound.map(|b| b.seconds / seconds.max(1e-12)),
        "bound": bound.map(|b| b.by),
        "above_peak": bound.map(|b| b.seconds / seconds.max(1e-12) > ABOVE),
    })
}

/// Adds the fields of `more` to `v`.
fn merge(v: &mut Value, more: Value) {
    if let (Value::Object(a), Value::Object(b)) = (v, more) {
        a.extend(b);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_above_the_measured_peak_says_so() {
        let bound = Some(Bound { seconds: 1.2, by: "compute" });
        assert_eq!(share_text(bound, 1.0), "120 % of compute (above the measured peak)");
        assert_eq!(work_json(1, 1, 1.0, bound)["above_peak"], true);
        assert_eq!(share_text(bound, 2.0), "60 % of compute");
        assert_eq!(work_json(1, 1, 2.0, bound)["above_peak"], false);
        assert!(work_json(1, 1, 1.0, None)["above_peak"].is_null());
    }

    #[test]
    fn samples_have_quartiles() {
        let s = Sample::of(&[5.0, 1.0, 3.0, 2.0, 100.0, 4.0, 6.0, 7.0]);
        assert_eq!((s.median, s.min, s.max, s.low, s.high, s.runs), (5.0, 1.0, 100.0, 3.0, 7.0, 8));
        assert!((s.spread() - 0.8).abs() < 1e-12);
        let one = Sample::of(&[2.0]);
        assert_eq!((one.median, one.low, one.high, one.spread()), (2.0, 2.0, 2.0, 0.0));
        let three = Sample::of(&[1.0, 2.0, 3.0]);
        assert_eq!((three.low, three.median, three.high), (1.0, 2.0, 3.0));
        let back = Sample::parse(&s.json(MS), MS).expect("all fields");
        assert!((back.median - s.median).abs() < 1e-9 && back.runs == 8);
        assert_eq!(Sample::parse(&json!({ "median": 1.0 }), 1.0), None);
    }

    #[test]
    fn the_number_of_runs_is_as_requested() {
        let count = |asked, least| {
            let mut n = 0;
            repeat(asked, least, Duration::ZERO, || {
                n += 1;
                Ok(())
            })
            .expect("nothing fails");
            n
        };
        assert_eq!((count(Some(3), 7), count(None, 7)), (3, 7));
    }

    #[test]
    fn figures_have_three_digits() {
        assert_eq!([three(511.4), three(0.456), three(12.345), three(0.0)], ["511", "0.46", "12.3", "0"]);
        assert_eq!([percent(0.943), percent(0.0345)], ["94 %", "3.5 %"]);
        assert_eq!((giga(0, 1.0), giga(2_000_000_000, 0.5)), (String::new(), "4.00".into()));
    }
}
