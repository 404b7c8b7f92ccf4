//! Counters of plans, programs and runs.

use std::sync::atomic::AtomicU64;

/// The counters of a runtime. The code that uses the runtime increments them.
#[derive(Default, Debug)]
pub(crate) struct Stats {
    pub(crate) plans_built: AtomicU64,
    pub(crate) plan_hits: AtomicU64,
    pub(crate) runs: AtomicU64,
    pub(crate) state_copies: AtomicU64,
    pub(crate) steps: AtomicU64,
    pub(crate) packed_loads: AtomicU64,
    pub(crate) kernels_tuned: AtomicU64,
    pub(crate) candidates_tried: AtomicU64,
    pub(crate) smaller_plans: AtomicU64,
}

/// Counters of a backend's plans, programs and runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct CacheStats {
    /// Plans made by lowering a graph.
    pub plans_built: u64,
    /// Requests for a plan that was in the cache.
    pub plan_hits: u64,
    /// Plans now in the cache.
    pub plans: usize,
    /// Programs now in the cache.
    pub programs: usize,
    /// Runs of plans.
    pub runs: u64,
    /// Steps submitted by all runs.
    pub steps: u64,
    /// States, donated tensors and tensors with an updated slice that were copied because the old value was
    /// still needed.
    pub copies: u64,
    /// Packed constants that were read from the disk cache instead of being packed again.
    pub packed_loads: u64,
    /// Kernels that were tuned: their candidates were compiled, checked and timed.
    pub kernels_tuned: u64,
    /// Candidates tried in tuning, also for kernels whose tuning did not finish.
    pub candidates_tried: u64,
    /// Plans made without a transformation that costs memory, because there was too little memory for it.
    pub smaller_plans: u64,
}
