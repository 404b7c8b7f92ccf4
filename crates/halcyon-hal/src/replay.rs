//! Captured work: a list of commands that a device has taken once and runs again by one call.
//!
//! - A capture keeps programs and kernels alive, not buffers: each launch brings them, and runs only if they
//!   lie where they lay when the commands were captured. So a capture keeps no memory from the pool, and
//!   buffers that were moved since ([`MemoryStats::generation`](crate::MemoryStats::generation)) or are
//!   others are seen.
//! - A launch is ordered as a submission of the same commands would be, and counts what it runs.
//! - Scalars that are to change from launch to launch are named when the commands are captured. The device
//!   reads them from a buffer that a launch fills in the order of its queue, so several launches can be under
//!   way with values of their own.

use crate::{BufferRef, Command, Error};
use std::any::Any;
use std::fmt;

/// What is to be captured.
#[derive(Clone, Copy, Debug)]
pub struct Recording<'a> {
    pub commands: &'a [Command<'a>],
    /// The buffers that each launch brings, in this order. Every buffer of the commands is among them.
    pub buffers: &'a [&'a BufferRef],
    /// Parameters that take a new value in each launch: numbers of a command and of its parameter.
    pub variables: &'a [(usize, usize)],
}

/// Captured commands. The device that made it runs it ([`Device::replay`](crate::Device::replay),
/// [`Stream::replay`](crate::Stream::replay)).
pub trait Replay: Send + Sync + fmt::Debug {
    /// Commands that a launch runs.
    fn commands(&self) -> usize;
    fn as_any(&self) -> &dyn Any;
}

/// The error of a queue that is given another driver's capture.
pub(crate) fn foreign(replay: &dyn Replay, device: &str) -> Error {
    Error::argument("replay", format!("{replay:?} was not captured by this opening of {device}"))
}
