//! Progress and results of tuning.

use halcyon_hal::tune::{Best, Rejection};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Progress events of tuning. At least one is sent for every pair of bursts (series of timed runs).
#[derive(Clone, Copy, Debug)]
pub enum Event<'a> {
    Candidate(&'a Progress),
    Done(&'a TunedKernel),
}

/// The progress of tuning.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    /// Number of kernels that are done, out of `of`.
    pub done: usize,
    /// Number of kernels to tune.
    pub of: usize,
    /// The key of the kernel being tuned.
    pub key: String,
    /// The candidate that is being tried, counted from 1, out of `candidates`. It is equal to `candidates`
    /// while the fastest candidates are measured again.
    pub candidate: usize,
    /// Number of candidates of that kernel.
    pub candidates: usize,
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
    /// The device's key in the cache, as [`halcyon_hal::tune::device_key`] gives it.
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
    /// Candidates that were being tried when an earlier process ended, and that are quarantined now. Each
    /// entry is the kernel's key and the rejection.
    pub recovered: Vec<(String, Rejection)>,
    /// Time taken, in seconds.
    pub seconds: f64,
}
