//! Launching a plan's commands with one call: when the commands of a run are captured, when a capture is
//! launched again, and when capturing is given up.
//!
//! A capture is valid for the buffers it was made with. Runs bind new buffers (a result is a new buffer each
//! time), but mostly get the same memory again from the pool. So captures are looked up by the addresses of
//! buffers, and commands are captured when the same addresses occur a second time. A few captures are kept
//! per set of bindings. If the captures of a set are repeatedly dropped before they are launched again, no
//! more are made for this set.

use super::{Executable, Lease};
use crate::queue::Queue;
use crate::sync::lock;
use halcyon_hal::{BufferRef, Command, Device, Recording};
use halcyon_ir::Scalar;
use halcyon_ir::error::{Error, Result};
use halcyon_ir::passes::Level;
use halcyon_ir::plan::{Plan, StepWork};
use smallvec::SmallVec;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// Number of captures kept per set of bindings, and number of earlier runs whose addresses are remembered.
const MAX_CAPTURES: usize = 4;
const REMEMBERED_RUNS: usize = 4;
/// A capture that is dropped before it was launched `MIN_LAUNCHES` more times counts as wasted. After
/// `MAX_WASTED` wasted captures of a set of bindings, no more are made for this set.
const MIN_LAUNCHES: u64 = 2;
const MAX_WASTED: u32 = 8;

/// How the runs of a plan were submitted to the device ([`Executable::captures`]).
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Captures {
    /// Number of captures made.
    pub made: u64,
    /// Runs that were a single launch of captured commands.
    pub launched: u64,
    /// Runs whose commands were submitted individually.
    pub submitted: u64,
    /// Why commands are not captured, or are no longer captured for some of the plan's bindings. `None` if
    /// capturing was not given up.
    pub reason: Option<String>,
}

/// Whether the runs of a plan are captured, and how its runs were submitted.
#[derive(Debug, Default)]
pub(super) struct CaptureState {
    made: AtomicU64,
    launched: AtomicU64,
    pub(super) submitted: AtomicU64,
    /// Whether no more captures are made for any bindings; `reason` says why.
    pub(super) off: AtomicBool,
    reason: Mutex<Option<String>>,
    /// Whether the values of run-time arguments are part of a capture, because library kernels take them.
    fixed: bool,
    /// For each buffer and each workspace of the plan, one position where it is bound: the step, and the
    /// position among the step's buffers.
    places: Vec<(u32, u32)>,
}

fn does_not_capture(device: &dyn Device) -> String {
    format!("{} does not capture commands", device.info().id)
}

impl CaptureState {
    pub(super) fn of(device: &dyn Device, plan: &Plan, level: Level) -> CaptureState {
        let mut w = CaptureState::default();
        let host = plan.steps.iter().find(|s| matches!(s.work, StepWork::Host(_)));
        if level < Level::O2 {
            w.stop(format!("at level {level} commands are not captured; use level {}", Level::O2));
        } else if let Some(s) = host {
            w.stop(format!("{} runs on the host between the commands", s.op));
        } else if plan.steps.is_empty() {
            w.stop("the plan has no commands".into());
        } else if !device.captures() {
            w.stop(does_not_capture(device));
        }
        if w.off.load(Ordering::Relaxed) {
            return w;
        }
        w.fixed = plan.steps.iter().any(|s| matches!(s.work, StepWork::Library(_)));
        let mut seen = vec![false; plan.buffers.len()];
        for (i, s) in plan.steps.iter().enumerate() {
            for (k, b) in s.buffers.iter().enumerate() {
                if !std::mem::replace(&mut seen[b.0 as usize], true) {
                    w.places.push((i as u32, k as u32));
                }
            }
            // Workspace follows the step's own buffers.
            if s.work.workspace() > 0 {
                w.places.push((i as u32, s.buffers.len() as u32));
            }
        }
        w
    }

    fn stop(&self, reason: String) {
        lock(&self.reason).get_or_insert(reason);
        self.off.store(true, Ordering::Relaxed);
    }

    /// Records why one set of bindings is no longer captured.
    fn note(&self, reason: String) {
        lock(&self.reason).get_or_insert(reason);
    }

    fn counts(&self) -> Captures {
        let n = |c: &AtomicU64| c.load(Ordering::Relaxed);
        Captures {
            made: n(&self.made),
            launched: n(&self.launched),
            submitted: n(&self.submitted),
            reason: lock(&self.reason).clone(),
        }
    }
}

/// A capture, and the buffer addresses (and fixed arguments) that it is valid for.
#[derive(Debug)]
struct Capture {
    key: Vec<u64>,
    commands: Arc<dyn halcyon_hal::Capture>,
    /// Number of launches after the first.
    again: u64,
}

/// The captures of one set of bindings, most recently launched first.
#[derive(Debug, Default)]
pub(super) struct Bound {
    /// Whether to capture at the first run, if the plan has no library kernels. Set for bindings that are
    /// kept.
    pub(super) at_once: bool,
    kept: Vec<Capture>,
    /// Buffer addresses of earlier runs.
    recent: VecDeque<Vec<u64>>,
    now: Vec<u64>,
    wasted: u32,
    over: bool,
}

impl Bound {
    fn remember(&mut self) {
        let mut v = match self.recent.len() {
            REMEMBERED_RUNS => self.recent.pop_front().unwrap_or_default(),
            _ => vec![],
        };
        v.clone_from(&self.now);
        self.recent.push_back(v);
    }
}

/// The bits of a scalar.
fn bits(v: &Scalar) -> u64 {
    match *v {
        Scalar::Bool(b) => b as u64,
        Scalar::I(i) => i as u64,
        Scalar::U(u) => u,
        Scalar::F(f) => f.to_bits(),
    }
}

impl Executable {
    /// How this executable's runs were submitted to the device.
    pub fn captures(&self) -> Captures {
        self.captures.counts()
    }

    /// Runs the plan with the current bindings as one launch, if its commands are captured or are to be
    /// captured now; `false` if they must be submitted individually.
    pub(super) fn launch_captured(
        &self,
        lease: &mut Lease,
        args: &[Scalar],
        on: Option<&Queue>,
    ) -> Result<bool> {
        let mut captured = std::mem::take(&mut lease.captured);
        let ran = self.launch_from(&mut captured, lease, args, on);
        lease.captured = captured;
        if matches!(ran, Ok(true)) {
            self.captures.launched.fetch_add(1, Ordering::Relaxed);
        }
        ran
    }

    fn launch_from(&self, c: &mut Bound, lease: &Lease, args: &[Scalar], on: Option<&Queue>) -> Result<bool> {
        let (w, d) = (&self.captures, &*self.runtime.device);
        if c.over {
            return Ok(false);
        }
        let mut buffers: SmallVec<[&BufferRef; 128]> = SmallVec::new();
        c.now.clear();
        for (step, k) in &w.places {
            let b = lease.buffer(*step as usize, *k as usize);
            let Some(at) = b.place() else {
                w.stop(does_not_capture(d));
                return Ok(false);
            };
            c.now.push(at);
            buffers.push(b);
        }
        if w.fixed {
            c.now.extend(args.iter().map(bits));
        }
        let values: SmallVec<[Scalar; 16]> = self.arguments(lease).map(|(_, v)| v).collect();
        let launch = |r: &dyn halcyon_hal::Capture| launch(d, on, r, &buffers, &values);
        // If the plan has library kernels (`fixed`), the first run is not captured, because a vendor's
        // library may initialise itself in that run.
        let first = c.at_once && c.kept.is_empty() && c.wasted == 0;
        let found = c.kept.iter().position(|k| k.key == c.now);
        match found {
            Some(i) => {
                if launch(&*c.kept[i].commands)? {
                    c.kept[i].again += 1;
                    c.kept[..=i].rotate_right(1);
                    return Ok(true);
                }
                // The device reports that a buffer has moved since the capture.
                let old = c.kept.remove(i);
                self.dropped(c, old);
            }
            None if c.recent.contains(&c.now) || (first && !w.fixed) => {}
            None => {
                c.remember();
                return Ok(false);
            }
        }
        if c.kept.len() == MAX_CAPTURES
            && let Some(old) = c.kept.pop()
        {
            self.dropped(c, old);
        }
        if c.over {
            return Ok(false);
        }
        let commands = match self.capture(lease, args, &buffers) {
            Ok(r) => r,
            Err(e @ Error::Unsupported { .. }) => {
                w.stop(e.to_string());
                return Ok(false);
            }
            Err(e) => {
                tracing::warn!(device = d.info().id, "a plan's commands could not be captured: {e}");
                w.note(e.to_string());
                c.over = true;
                return Ok(false);
            }
        };
        w.made.fetch_add(1, Ordering::Relaxed);
        let ran = launch(&*commands)?;
        if ran {
            c.kept.insert(0, Capture { key: c.now.clone(), commands, again: 0 });
        }
        Ok(ran)
    }

    fn capture(
        &self,
        lease: &Lease,
        args: &[Scalar],
        buffers: &[&BufferRef],
    ) -> Result<Arc<dyn halcyon_hal::Capture>> {
        let mut commands: Vec<Command<'_>> = Vec::with_capacity(self.plan().steps.len());
        for i in 0..self.plan().steps.len() {
            let c = self.command(lease, i, args)?;
            commands
                .push(c.ok_or_else(|| Error::internal("a step that runs on the host cannot be captured"))?);
        }
        let variables: Vec<(usize, usize)> = self.arguments(lease).map(|(at, _)| at).collect();
        self.runtime.device.capture(&Recording { commands: &commands, buffers, variables: &variables })
    }

    /// Drops a capture. If too many were wasted, no more are made for these bindings.
    fn dropped(&self, c: &mut Bound, old: Capture) {
        c.wasted += (old.again < MIN_LAUNCHES) as u32;
        if c.wasted >= MAX_WASTED {
            c.over = true;
            (c.kept, c.recent) = (vec![], VecDeque::new());
            self.captures.note(format!(
                "{MAX_WASTED} captures were dropped before they were launched {MIN_LAUNCHES} more times, \
                 because the runs used other buffers"
            ));
        }
    }
}

/// Launches captured commands in a queue, or in the device's own.
pub(crate) fn launch(
    device: &dyn Device,
    on: Option<&Queue>,
    captured: &dyn halcyon_hal::Capture,
    buffers: &[&BufferRef],
    values: &[Scalar],
) -> Result<bool> {
    match on {
        Some(q) => q.raw.launch_capture(captured, buffers, values),
        None => device.launch_capture(captured, buffers, values),
    }
}
