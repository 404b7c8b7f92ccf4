//! Decides when the kernels of a planner's plans are tuned: on request, before a plan's first run, or in the
//! background.

use super::Planner;
use crate::tune::{Job, TuneOptions, TuningMode, TuningReport, jobs};
use halcyon_ir::Graph;
use halcyon_ir::error::{Error, Result};
use halcyon_ir::lower::lower;
use halcyon_ir::passes::{Level, TUNED};
use halcyon_ir::plan::Plan;
use std::sync::{Arc, Weak};

impl Planner {
    /// Tunes the kernels that the plans of these graphs use and that are not tuned yet.
    ///
    /// # Errors
    /// The errors of [`crate::Backend::tune`].
    pub(crate) fn tune(&self, graphs: &[Graph], options: &TuneOptions<'_>) -> Result<TuningReport> {
        let (lowering, level) = (self.lower_options(), self.lowering.level);
        if lowering.tuned.is_none() || !lowering.passes.does(TUNED) {
            let why = match self.tuning.mode {
                TuningMode::Off => "tuning is off for this backend".into(),
                _ if level < Level::O2 => format!("plans of level {level} do not use tuned kernels; use O2"),
                _ => format!("the transformation \"{TUNED}\" is switched off"),
            };
            return Err(Error::argument("tune", why));
        }
        // The user asked for tuning, so an unwritable file is an error; report it before the work, not after.
        self.tuning.cache.save()?;
        let target = self.runtime.device.as_target();
        let plans = graphs.iter().map(|g| lower(g, target, &lowering)).collect::<Result<Vec<_>>>()?;
        let (jobs, known) = jobs(&plans);
        drop(plans);
        let mut report = self.tune_jobs(&jobs, options)?;
        report.known = known;
        Ok(report)
    }

    /// Tunes the kernels of `jobs`. Drops the cached plans if they would now use other kernels.
    fn tune_jobs(&self, jobs: &[Job], options: &TuneOptions<'_>) -> Result<TuningReport> {
        self.forgetting_plans(|| self.tuning.run(&self.runtime, jobs, options))
    }

    /// Calls `f`, which tunes, and drops the cached plans if they would now use other kernels.
    fn forgetting_plans<T>(&self, f: impl FnOnce() -> T) -> T {
        let before = self.tuning_generation();
        let out = f();
        if self.tuning_generation() != before {
            self.forget_plans();
        }
        out
    }

    /// Tunes the kernels of a new plan, or queues them for tuning, as the mode says. Returns whether plans
    /// would now use other kernels.
    pub(super) fn tune_new(self: &Arc<Planner>, plan: &Plan) -> bool {
        if !self.tuning.touch(plan) {
            return false;
        }
        match self.tuning.mode_at(self.lowering.level) {
            TuningMode::Off | TuningMode::Cached => false,
            TuningMode::Background => {
                let weak = Arc::downgrade(self);
                self.tuning.enqueue(jobs(std::slice::from_ref(plan)).0, move || {
                    let thread = std::thread::Builder::new().name("halcyon-tuner".into());
                    thread.spawn(move || tune_waiting(&weak)).map(drop)
                });
                false
            }
            mode @ (TuningMode::Budget(_) | TuningMode::Exhaustive) => {
                let before = self.tuning_generation();
                if let Err(e) = self.forgetting_plans(|| self.tuning.run_at_once(&self.runtime, plan, mode)) {
                    tracing::warn!(%e, "the kernels of a plan are not tuned");
                }
                self.tuning_generation() != before
            }
        }
    }
}

/// Tunes the queued kernels. Ends when no kernel is left, when tuning fails, or when the last handle on the
/// backend is dropped.
fn tune_waiting(weak: &Weak<Planner>) {
    while let Some(planner) = weak.upgrade() {
        let Some(job) = planner.tuning.next_job() else { return };
        match planner.tune_jobs(std::slice::from_ref(&job), &TuneOptions::default()) {
            Ok(r) => r
                .failed
                .iter()
                .for_each(|f| tracing::warn!(key = f.key, reason = f.reason, "a kernel is not tuned")),
            Err(e) => {
                tracing::warn!(%e, "tuning has stopped");
                // The other kernels would fail in the same way.
                planner.tuning.abandon();
                return;
            }
        }
    }
}
