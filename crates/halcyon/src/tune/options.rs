//! What to tune, with which candidates and for how long.

use super::report::Event;
use crate::timing::Effort;
use halcyon_ir::kernel::lower::Lowered;
use halcyon_ir::kernel::tune::{Tunable, Variant};
use halcyon_ir::target::{Caps, Declined};
use std::time::Duration;

/// The source of candidates.
pub trait Space: Sync {
    /// The variants to measure against the default.
    fn variants(&self, t: &Tunable) -> Vec<Variant>;
    /// Builds the kernels of a variant, or of the default.
    ///
    /// # Errors
    /// [`Declined`] if the device cannot run the variant.
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

/// Options of `Backend::tune_with`.
#[derive(Clone, Copy)]
pub struct TuneOptions<'a> {
    /// Time after which to stop; `None`: no limit. Kernels are tuned in order of their cost in the plan, most
    /// expensive first.
    pub budget: Option<Duration>,
    /// Number of pairs of bursts with which the fastest candidates are measured, and the duration of every
    /// burst. [`Effort::interval`] is not used.
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
