//! Without the CPU backend no device's peak can be measured.

use halcyon::{Backend, Error, Result};

/// What something computes and moves.
#[derive(Clone, Copy, Debug)]
pub struct Work {
    pub flops: u64,
    pub read: u64,
    pub written: u64,
    // Where limits are measured, it says which.
    #[allow(dead_code)]
    pub arithmetic: &'static str,
}

impl Work {
    pub fn bytes(&self) -> u64 {
        self.read.saturating_add(self.written)
    }
}

/// The least time that the machine's peaks allow for some work.
#[derive(Clone, Copy, Debug)]
pub struct Limit {
    pub seconds: f64,
    pub bound: &'static str,
    pub flops: f64,
    pub bandwidth: f64,
}

/// There is none.
#[derive(Debug)]
pub enum Limits {}

impl Limits {
    /// # Errors
    /// Always [`Error::Unsupported`].
    pub fn new(b: &Backend) -> Result<Limits> {
        Err(Error::unsupported(
            format!("measuring the peaks of {} in a build without the CPU backend", b.id()),
            "Build with the feature \"cpu\"",
        ))
    }

    pub fn forget(&mut self) {
        match *self {}
    }

    pub fn measure(&mut self, _: &Work) -> Result<Limit> {
        match *self {}
    }

    pub fn known(&mut self, _: &Work) -> Result<Limit> {
        match *self {}
    }
}
