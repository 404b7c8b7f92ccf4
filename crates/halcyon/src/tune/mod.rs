//! Tuning: finds which of the kernels that a template can build is fastest on this device.
//!
//! A backend first uses the kernels that the templates' heuristics choose (the default). Tuning builds the
//! other variants that are legal on the device ([`halcyon_ir::kernel::tune`]), compares their results with
//! the default's, times both alternately, and records the best in a cache on disk ([`halcyon_hal::tune`]). A
//! variant that gives wrong results, does not compile, fails or crashes is also recorded (quarantined), and
//! never tried again on that device with that driver. Plans use tuned kernels at level O2; their receipts and
//! steps say so.
//!
//! [`Backend::tune`](crate::Backend::tune) tunes the kernels of a graph on request; [`TuningMode`] controls
//! automatic tuning.

mod measure;
mod standard;
mod state;

pub use halcyon_hal::tune::{
    Best, Entry, FILE_VARIABLE, Guard, Rejection, Table, TuningCache, TuningMode, VARIABLE, Why, device_key,
};
pub use halcyon_ir::kernel::tune::{Choices, Known, Tolerance, Tunable, Variant};
pub use standard::standard;

use crate::timing::Effort;
use halcyon_ir::kernel::lower::Lowered;
use halcyon_ir::target::{Caps, Declined};
use serde::{Deserialize, Serialize};
pub(crate) use state::{Job, Tuning, jobs};
use std::path::PathBuf;
use std::time::Duration;

/// The source of candidates.
pub trait Space: Sync {
    /// The variants to measure against the default.
    fn variants(&self, t: &Tunable) -> Vec<Variant>;
    /// Builds the kernels of a variant, or of the default.
    ///
    /// # Errors
    /// [`Declined`] if the device cannot run it.
    fn build(&self, t: &Tunable, v: &Variant, caps: &Caps) -> Result<Lowered, Declined>;
}

/// The variants of the kernel IR's templates.
#[derive(Clone, Copy, Debug, Default)]
pub struct Templates;

impl Space for Templates {
    fn variants(&self, t: &Tunable) -> Vec<Variant> {
        t.choices.others.clone()
    }

    fn build(&self, t: &Tunable, v: &Variant, caps: &Caps) -> Result<Lowered, Declined> {
        t.build(v, caps)
    }
}

/// Progress events of tuning. At least one is sent for every pair of bursts.
#[derive(Clone, Copy, Debug)]
pub enum Event<'a> {
    Candidate(&'a Progress),
    Done(&'a TunedKernel),
}

/// The progress of tuning.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    /// Number of kernels done; `of` is their total.
    pub done: usize,
    /// Number of kernels to tune.
    pub of: usize,
    /// The key of the kernel being tuned.
    pub key: String,
    /// Number, from 1, of the candidate being tried; `candidates` is their total.
    pub candidate: usize,
    /// Number of candidates of that kernel.
    pub candidates: usize,
}

/// Options of `Backend::tune_with`.
#[derive(Clone, Copy)]
pub struct TuneOptions<'a> {
    /// Time after which to stop; `None`: no limit. Kernels are tuned in order of their cost in the plan, most
    /// expensive first.
    pub budget: Option<Duration>,
    /// Number and duration of measurements of the candidates closest to the best.
    pub effort: Effort,
    /// The source of candidates; the kernel IR's templates by default.
    pub space: &'a dyn Space,
    /// Called with each progress event.
    pub events: &'a (dyn Fn(Event<'_>) + Sync),
}

impl std::fmt::Debug for TuneOptions<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TuneOptions").field("budget", &self.budget).field("effort", &self.effort).finish()
    }
}

impl Default for TuneOptions<'_> {
    fn default() -> Self {
        let effort = Effort { pairs: 11, interval: 0.05, burst: Duration::from_millis(4) };
        TuneOptions { budget: None, effort, space: &Templates, events: &|_| () }
    }
}

/// A kernel that was tuned.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TunedKernel {
    /// The kernel's key in the cache.
    pub key: String,
    /// The op that the kernel computes.
    pub op: String,
    /// Number of steps of the plan that use it.
    pub steps: usize,
    /// The fastest variant, which may be the default.
    pub best: Best,
    /// Variants that were quarantined, now or earlier.
    pub rejected: Vec<Rejection>,
}

/// A kernel that could not be tuned, and why.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Untuned {
    /// The kernel's key in the cache.
    pub key: String,
    /// The op that the kernel computes.
    pub op: String,
    /// Why it was not tuned.
    pub reason: String,
}

/// The results of tuning.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TuningReport {
    /// The device's key in the cache, as [`device_key`] gives it.
    pub device: String,
    /// Path of the cache file; `None` if the cache is in memory.
    pub cache: Option<PathBuf>,
    /// Kernels that were tuned.
    pub tuned: Vec<TunedKernel>,
    /// Number of kernels that had been tuned before.
    pub known: usize,
    /// Number of kernels not tuned because the budget was used up.
    pub left: usize,
    /// Kernels that could not be tuned.
    pub failed: Vec<Untuned>,
    /// Candidates during which an earlier process ended, quarantined now: key and rejection.
    pub recovered: Vec<(String, Rejection)>,
    /// Time taken, in seconds.
    pub seconds: f64,
}
