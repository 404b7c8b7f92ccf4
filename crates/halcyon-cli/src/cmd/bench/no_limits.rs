//! Replaces `limits.rs` in builds without the CPU backend, which cannot measure the peaks of a machine.

use halcyon::{Backend, Error, Result};

/// The operations and memory traffic of some work.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Work {
    pub flops: u64,
    pub read: u64,
    pub written: u64,
    // Only used in builds that can measure limits.
    #[allow(dead_code)]
    pub arithmetic: &'static str,
}

impl Work {
    pub(crate) fn bytes(&self) -> u64 {
        self.read.saturating_add(self.written)
    }
}

/// The least time for some work at the machine's peaks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limit {
    pub seconds: f64,
    pub bound: &'static str,
    pub flops: f64,
    pub bandwidth: f64,
}

/// Never constructed.
#[derive(Debug)]
pub(crate) enum Limits {}

impl Limits {
    /// # Errors
    /// Always [`Error::Unsupported`].
    pub(crate) fn new(b: &Backend) -> Result<Limits> {
        Err(Error::unsupported(
            format!("measuring the peaks of {} in a build without the CPU backend", b.id()),
            "Build with the feature \"cpu\"",
        ))
    }

    pub(crate) fn clear(&mut self) {
        match *self {}
    }

    pub(crate) fn measure(&mut self, _: &Work) -> Result<Limit> {
        match *self {}
    }

    pub(crate) fn cached(&mut self, _: &Work) -> Result<Limit> {
        match *self {}
    }
}
