//! Captures: lists of commands that a device records once and launches again with one call.
//!
//! - A capture keeps programs and kernels alive, but not buffers: the caller passes the buffers to each
//!   launch, and the launch runs only if they are at their captured addresses. A capture therefore holds no
//!   pool memory, and moved ([`MemoryStats::generation`](crate::MemoryStats::generation)) or different
//!   buffers are detected.
//! - A launch is ordered like a submission of the same commands and updates the same counters.
//! - Scalars that change between launches are declared at capture. The device reads them from a buffer. If
//!   the values have changed, a launch first copies the new ones to this buffer, in queue order, so several
//!   launches with different values can be pending at a time.

use crate::{BufferRef, Command, Error};
use std::any::Any;
use std::fmt;

/// The commands to capture, their buffers, and the parameters that change between launches.
#[derive(Clone, Copy, Debug)]
pub struct Recording<'a> {
    pub commands: &'a [Command<'a>],
    /// The buffers that the caller passes to each launch, in this order. They must include every buffer of
    /// the commands.
    pub buffers: &'a [&'a BufferRef],
    /// Parameters that may take a new value in each launch: (index of the command, index of its parameter).
    pub variables: &'a [(usize, usize)],
}

/// A capture. Only the device that recorded it can launch it
/// ([`Device::launch_capture`](crate::Device::launch_capture),
/// [`Stream::launch_capture`](crate::Stream::launch_capture)).
pub trait Capture: Send + Sync + fmt::Debug {
    /// The number of commands that a launch runs.
    fn commands(&self) -> usize;
    fn as_any(&self) -> &dyn Any;
}

/// Error for launching a capture that another opening of a device recorded.
pub(crate) fn foreign(c: &dyn Capture, device: &str) -> Error {
    Error::argument("launch_capture", format!("{c:?} was not captured by this opening of {device}"))
}
