//! Measurements: Halcyon and PyTorch, if present, take turns, so that both run under the same conditions.

pub(crate) mod attention;
pub(crate) mod copies;
pub(crate) mod gemm;
pub(crate) mod launches;
pub(crate) mod memory;
pub(crate) mod models;
mod peer;
mod results;

use crate::child_section::{SectionArgs, begin, emit, status_of};
use crate::event::{Event, Figure, Reference, Status};
use halcyon::prelude::*;
use halcyon::{CapturedGraph, Error};
use peer::Peer;
pub(crate) use peer::{EXIT_WITH_PARENT, python};
use serde_json::Value;
use std::time::Instant;

/// Number of turns of Halcyon and of PyTorch. The medians are reported.
const ROUNDS: usize = 5;
/// Seconds per turn.
const SECONDS_PER_TURN: f64 = 0.05;
/// Maximum number of runs per turn.
const MAX_RUNS_PER_TURN: f64 = 2000.0;
/// If one run is shorter than a turn, this many runs determine the number of runs per turn. `peer.py` has the
/// same values of this constant and of [`MAX_RUNS_PER_TURN`].
const BATCH: usize = 10;

/// Measures Halcyon and, if it was requested, PyTorch in another process.
pub(crate) struct Bench {
    pub(crate) own: SectionArgs,
    peer: Option<Peer>,
}

/// Seconds per run on each side.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Timed {
    pub ours: f64,
    pub theirs: Option<f64>,
}

impl Bench {
    pub(crate) fn new(own: &SectionArgs) -> Bench {
        let peer = match own.torch.then(|| Peer::start(own.kind)) {
            Some(Ok(p)) => Some(p),
            Some(Err(why)) => {
                note(format!("PyTorch is not measured: {why}"));
                None
            }
            None => None,
        };
        if let Some(p) = &peer {
            note(p.name.clone());
        }
        if own.generated {
            note("vendors' libraries are switched off, so generated kernels are measured".into());
        }
        Bench { own: own.clone(), peer }
    }

    /// PyTorch's name in figures.
    pub(crate) fn theirs(&self) -> String {
        self.peer.as_ref().map_or("PyTorch".into(), |p| p.short.clone())
    }

    /// Makes PyTorch prepare a workload. Returns false if PyTorch is absent or cannot prepare it. In the
    /// second case the report names the workload.
    pub(crate) fn prepare(&mut self, what: &Value) -> bool {
        let Some(p) = &mut self.peer else { return false };
        match p.make(what) {
            Ok(()) => true,
            Err(why) => {
                note(format!("PyTorch: {what}: {why}"));
                false
            }
        }
    }

    /// Measures the seconds per run of `ours` and of the workload prepared by PyTorch, in turns. Before each
    /// turn there is one untimed run. `ours` may return before the device is done; `wait` waits for it.
    pub(crate) fn time(
        &mut self,
        theirs: bool,
        mut ours: impl FnMut() -> Result<()>,
        wait: impl Fn() -> Result<()>,
    ) -> Result<Timed> {
        let turn = if self.own.tiny { SECONDS_PER_TURN / 10.0 } else { SECONDS_PER_TURN };
        let mut run = |n: usize| -> Result<f64> {
            let start = Instant::now();
            for _ in 0..n {
                ours()?;
            }
            wait()?;
            Ok(start.elapsed().as_secs_f64() / n as f64)
        };
        // The first run compiles, the second may be captured.
        run(1)?;
        run(1)?;
        let mut each = run(1)?;
        if each < turn {
            each = run(BATCH)?;
        }
        let n = (turn / each.max(1e-9)).clamp(1.0, MAX_RUNS_PER_TURN) as usize;
        let (mut a, mut b) = (vec![], vec![]);
        for _ in 0..if self.own.tiny { 1 } else { ROUNDS } {
            run(1)?;
            a.push(run(n)?);
            if let Some(p) = self.peer.as_mut().filter(|_| theirs) {
                match p.time(turn) {
                    Ok(t) => b.push(t),
                    Err(why) => note(format!("PyTorch: {why}")),
                }
            }
        }
        Ok(Timed { ours: median(&mut a), theirs: (!b.is_empty()).then(|| median(&mut b)) })
    }

    /// Like [`Bench::time`], for a captured graph. It is an error if the backend supports captures and did
    /// not launch one.
    pub(crate) fn time_capture(&mut self, theirs: bool, b: &Backend, g: &CapturedGraph) -> Result<Timed> {
        let before = b.counters().capture_launches;
        let t = self.time(theirs, || g.launch(), || b.synchronize())?;
        check_captured(
            self.own.kind,
            b.counters().capture_launches - before,
            g.executable().captures().reason,
        )?;
        Ok(t)
    }
}

/// In a user's program a failed capture only causes a warning, and the commands are submitted one by one.
/// Here it is an error.
fn check_captured(kind: BackendType, launches: u64, reason: Option<String>) -> Result<()> {
    if launches > 0 || !kind.built_in().is_some_and(|row| row.captures) {
        return Ok(());
    }
    let why = reason.unwrap_or_else(|| "no reason is known".into());
    Err(Error::Driver {
        device: kind.id().into(),
        call: "launching a captured plan".into(),
        code: format!("its commands were submitted one by one: {why}"),
        next:
            "Look at the call that the reason names. Without a captured graph, the figure would measure something else"
                .into(),
    })
}

pub(crate) fn median(v: &mut [f64]) -> f64 {
    v.sort_by(f64::total_cmp);
    v.get(v.len() / 2).copied().unwrap_or(f64::NAN)
}

pub(crate) fn note(text: String) {
    Event::Note { text }.emit();
}

/// Why there is no figure.
#[derive(Debug)]
pub(crate) enum FigureError {
    Error(Error),
    /// The measured work computes wrong results.
    Wrong(String),
}

impl From<Error> for FigureError {
    fn from(e: Error) -> FigureError {
        FigureError::Error(e)
    }
}

/// Runs a part of a section. An error fails only that part, unless the device is lost.
pub(crate) fn part(o: &SectionArgs, name: &str, f: impl FnOnce() -> Result<(), FigureError>) {
    begin(name);
    match f() {
        Ok(()) => return,
        Err(FigureError::Wrong(what)) => emit(name, Status::Wrong, what),
        Err(FigureError::Error(e)) => match status_of(&e) {
            // A feature that the device lacks is not measured. This is not a failure.
            Status::Unsupported => return note(format!("{name}: not measured: {e}")),
            s => emit(name, s, e.to_string()),
        },
    }
    o.stop_if_lost();
}

/// Reports a rate (more is better). `amount` is the work of one run; `amount` divided by seconds has the unit
/// `unit`.
pub(crate) fn rate(
    name: &str,
    unit: &str,
    amount: f64,
    t: Timed,
    against: &str,
    target: Option<f64>,
    remark: &str,
) {
    let reference = t.theirs.map(|s| Reference { what: against.into(), value: amount / s });
    let value = amount / t.ours;
    let figure = Figure {
        name: name.into(),
        unit: unit.into(),
        value,
        more: true,
        reference,
        target,
        note: remark.into(),
    };
    Event::Figure(figure).emit();
}

/// Reports a time (less is better) in `unit`s of `scale` seconds.
pub(crate) fn time(
    name: &str,
    (unit, scale): (&str, f64),
    t: Timed,
    against: &str,
    target: Option<f64>,
    remark: &str,
) {
    let reference = t.theirs.map(|s| Reference { what: against.into(), value: s / scale });
    let value = t.ours / scale;
    let figure = Figure {
        name: name.into(),
        unit: unit.into(),
        value,
        more: false,
        reference,
        target,
        note: remark.into(),
    };
    Event::Figure(figure).emit();
}

/// Standard normal random numbers, generated on the device.
pub(crate) fn random_normal(b: &Backend, dims: &[usize], dtype: DType, seed: u64) -> Result<Tensor> {
    let t = Tensor::randn(b, dims, dtype, seed);
    t.eval()?;
    Ok(t)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_that_was_not_captured_is_an_error() {
        assert!(
            check_captured(BackendType::Cuda, 1, None).is_ok()
                && check_captured(BackendType::Cpu, 0, None).is_ok()
        );
        let e = check_captured(BackendType::Rocm, 0, Some("no functions for it".into())).unwrap_err();
        assert!(e.to_string().contains("no functions for it"));
    }
}
