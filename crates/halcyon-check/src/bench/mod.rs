//! Measurements: Halcyon and, where it is there, PyTorch in turns, so that both meet the same machine.

pub mod attention;
pub mod copies;
pub mod gemm;
pub mod launches;
pub mod memory;
pub mod models;
mod peer;

use crate::event::{Event, Figure, Reference, Status};
use crate::own::{Own, begin, status_of, tell};
use halcyon::CapturedGraph;
use halcyon::prelude::*;
use peer::Peer;
use serde_json::Value;
use std::time::Instant;

/// Turns of each side; the median counts.
const ROUNDS: usize = 5;
/// Seconds of a turn.
const TURN: f64 = 0.05;
/// Most runs of a turn.
const MOST: f64 = 2000.0;

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

    /// Seconds that a run of `ours` and of what PyTorch has prepared take, in turns. `ours` may return before the device is done;
    /// `wait` waits.
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
        // The first run compiles, the second one shows how many make a turn.
        run(1)?;
        let n = (turn / run(1)?.max(1e-9)).clamp(1.0, MOST) as usize;
        let (mut a, mut b) = (vec![], vec![]);
        for _ in 0..if self.own.tiny { 1 } else { ROUNDS } {
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

    /// As [`Bench::time`], of a captured graph.
    pub fn replay(&mut self, theirs: bool, b: &Backend, g: &CapturedGraph) -> Result<Timed> {
        self.time(theirs, || g.replay(), || b.synchronize())
    }
}

pub fn median(v: &mut [f64]) -> f64 {
    v.sort_by(f64::total_cmp);
    v.get(v.len() / 2).copied().unwrap_or(f64::NAN)
}

pub fn note(text: String) {
    Event::Note { text }.tell();
}

/// Does a part of a section. Its error is that part's alone.
pub fn part(name: &str, f: impl FnOnce() -> Result<()>) {
    begin(name);
    if let Err(e) = f() {
        let status = match status_of(&e) {
            // What a device cannot do is not measured there, which is no failure of a measurement.
            Status::Unsupported => return note(format!("{name}: not measured: {e}")),
            s => s,
        };
        tell(name, status, e.to_string());
    }
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
