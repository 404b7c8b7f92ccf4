//! Measurements: Halcyon and, where it is there, PyTorch in turns, so that both meet the same machine.

pub mod attention;
pub mod copies;
pub mod gemm;
pub mod launches;
pub mod memory;
pub mod models;
mod peer;
mod right;

use crate::event::{Event, Figure, Reference, Status};
use crate::own::{Own, begin, status_of, tell};
use halcyon::prelude::*;
use halcyon::{CapturedGraph, Error};
use peer::Peer;
pub use peer::{ENDS_WITH_US, python};
use serde_json::Value;
use std::time::Instant;

/// Turns of each side; the median counts.
const ROUNDS: usize = 5;
/// Seconds of a turn.
const TURN: f64 = 0.05;
/// Most runs of a turn.
const MOST: f64 = 2000.0;
/// Runs that show how many make a turn. `peer.py` has the same numbers.
const BATCH: usize = 10;

/// PyTorch's side, once it is asked for.
pub struct Bench {
    pub own: Own,
    peer: Option<Peer>,
}

/// Seconds of one run on each side.
#[derive(Clone, Copy, Debug)]
pub struct Timed {
    pub ours: f64,
    pub theirs: Option<f64>,
}

impl Bench {
    pub fn new(own: &Own) -> Bench {
        let peer = match own.torch.then(|| Peer::start(own.kind)) {
            Some(Ok(p)) => Some(p),
            Some(Err(why)) => {
                note(format!("PyTorch takes no part: {why}"));
                None
            }
            None => None,
        };
        if let Some(p) = &peer {
            note(p.name.clone());
        }
        if own.generated {
            note("vendors' libraries are switched off: generated kernels".into());
        }
        Bench { own: own.clone(), peer }
    }

    /// What PyTorch is called in figures.
    pub fn theirs(&self) -> String {
        self.peer.as_ref().map_or("PyTorch".into(), |p| p.short.clone())
    }

    /// PyTorch prepares a work; false where it takes no part or cannot, which is noted.
    pub fn prepare(&mut self, what: &Value) -> bool {
        let Some(p) = &mut self.peer else { return false };
        match p.make(what) {
            Ok(()) => true,
            Err(why) => {
                note(format!("PyTorch: {what}: {why}"));
                false
            }
        }
    }

    /// Seconds that a run of `ours` and of what PyTorch has prepared take, in turns, each behind a run that
    /// is not timed. `ours` may return before the device is done; `wait` waits.
    pub fn time(
        &mut self,
        theirs: bool,
        mut ours: impl FnMut() -> Result<()>,
        wait: impl Fn() -> Result<()>,
    ) -> Result<Timed> {
        let turn = if self.own.tiny { TURN / 10.0 } else { TURN };
        let mut run = |n: usize| -> Result<f64> {
            let start = Instant::now();
            for _ in 0..n {
                ours()?;
            }
            wait()?;
            Ok(start.elapsed().as_secs_f64() / n as f64)
        };
        // The first run compiles, the second one may be captured.
        run(1)?;
        run(1)?;
        let mut each = run(1)?;
        if each < turn {
            each = run(BATCH)?;
        }
        let n = (turn / each.max(1e-9)).clamp(1.0, MOST) as usize;
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

    /// As [`Bench::time`], of a captured graph, which the drivers of CUDA and ROCm have to replay.
    pub fn replay(&mut self, theirs: bool, b: &Backend, g: &CapturedGraph) -> Result<Timed> {
        let before = b.counters().replays;
        let t = self.time(theirs, || g.replay(), || b.synchronize())?;
        replayed(self.own.kind, b.counters().replays - before, g.executable().replays().reason)?;
        Ok(t)
    }
}

/// A capture that failed is a warning to a program, whose commands are submitted one by one then. Here it is
/// an error.
fn replayed(kind: BackendType, replays: u64, reason: Option<String>) -> Result<()> {
    if replays > 0 || !matches!(kind, BackendType::Cuda | BackendType::Rocm) {
        return Ok(());
    }
    let why = reason.unwrap_or_else(|| "no reason is known".into());
    Err(Error::Driver {
        device: kind.id().into(),
        call: "replaying a plan".into(),
        code: format!("its commands were submitted one by one: {why}"),
        next: "Look at the call that is named: a figure without a captured graph would be another's".into(),
    })
}

pub fn median(v: &mut [f64]) -> f64 {
    v.sort_by(f64::total_cmp);
    v.get(v.len() / 2).copied().unwrap_or(f64::NAN)
}

pub fn note(text: String) {
    Event::Note { text }.tell();
}

/// Why there is no figure.
#[derive(Debug)]
pub enum Bad {
    Error(Error),
    /// What was to be timed computes something else.
    Wrong(String),
}

impl From<Error> for Bad {
    fn from(e: Error) -> Bad {
        Bad::Error(e)
    }
}

/// Does a part of a section. Its error is that part's alone, unless the device is lost.
pub fn part(o: &Own, name: &str, f: impl FnOnce() -> Result<(), Bad>) {
    begin(name);
    match f() {
        Ok(()) => return,
        Err(Bad::Wrong(what)) => tell(name, Status::Wrong, what),
        Err(Bad::Error(e)) => match status_of(&e) {
            // What a device cannot do is not measured there, which is no failure of a measurement.
            Status::Unsupported => return note(format!("{name}: not measured: {e}")),
            s => tell(name, s, e.to_string()),
        },
    }
    o.stop_if_lost();
}

/// A rate (more is better): `amount` of work in `unit`s a second.
pub fn rate(name: &str, unit: &str, amount: f64, t: Timed, against: &str, target: Option<f64>, remark: &str) {
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
    Event::Figure(figure).tell();
}

/// A time (less is better), told in `unit`s of `scale` seconds.
pub fn time(
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
    Event::Figure(figure).tell();
}

/// Standard normal numbers, drawn on the device.
pub fn drawn(b: &Backend, dims: &[usize], dtype: DType, seed: u64) -> Result<Tensor> {
    let t = Tensor::randn(b, dims, dtype, seed);
    t.eval()?;
    Ok(t)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_replayed_is_an_error() {
        assert!(replayed(BackendType::Cuda, 1, None).is_ok() && replayed(BackendType::Cpu, 0, None).is_ok());
        let e = replayed(BackendType::Rocm, 0, Some("no functions for it".into())).unwrap_err();
        assert!(e.to_string().contains("no functions for it"));
    }
}
