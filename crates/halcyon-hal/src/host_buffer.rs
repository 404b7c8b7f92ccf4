//! Host memory that a device copies to and from directly, without a staging buffer.

use crate::{Error, Options, Result};
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Zeroed host memory at a fixed address, page-locked if the driver supports this. Dropping the value frees
/// the memory. The type implements [`halcyon_ir::data::Bytes`], so [`crate::Device::import`] accepts it on a
/// device that can use host memory directly (the CPU).
pub struct HostBuffer {
    memory: Box<dyn Pages>,
    bytes: usize,
    locked: bool,
    _loan: Charge,
}

/// The owner of a [`HostBuffer`]'s memory.
///
/// # Safety
/// `start` must return the same address each time. As long as the value lives, the requested number of bytes
/// from that address on must be initialised and used by nothing else.
pub(crate) unsafe trait Pages: Send + Sync {
    fn start(&self) -> *mut u8;
}

/// The total size of a device's host buffers, and its limit.
#[derive(Debug)]
// A build may have no driver that uses it.
#[allow(dead_code)]
pub(crate) struct Account {
    device: String,
    limit: Option<u64>,
    used: Arc<AtomicU64>,
}

/// Bytes charged to an account until this value is dropped.
#[derive(Debug)]
pub(crate) struct Charge {
    used: Arc<AtomicU64>,
    bytes: u64,
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.used.fetch_sub(self.bytes, Ordering::AcqRel);
    }
}

#[allow(dead_code)]
impl Account {
    pub(crate) fn new(device: &str, options: &Options) -> Account {
        let half = || halcyon_host::memory().map(|(_, total)| total / 2);
        Account { device: device.into(), limit: options.host_limit.or_else(half), used: Arc::default() }
    }

    pub(crate) fn used(&self) -> u64 {
        self.used.load(Ordering::Acquire)
    }

    /// Makes a buffer of `bytes` bytes from the memory that `pages` allocates. If `pages` fails, it returns
    /// the driver's reason, which becomes part of [`Error::OutOfMemory`].
    pub(crate) fn buffer(
        &self,
        bytes: usize,
        locked: bool,
        pages: impl FnOnce() -> std::result::Result<Box<dyn Pages>, String>,
    ) -> Result<HostBuffer> {
        let full = |used: u64, why: String| Error::OutOfMemory {
            device: self.device.clone(),
            what: format!("host memory for copies: {why}"),
            requested: bytes as u64,
            free: self.limit.map_or(0, |l| l.saturating_sub(used)),
            total: self.limit.unwrap_or(0),
            next: "Copy in smaller parts, or raise the limit on host memory (`host_limit`)".into(),
        };
        let n = bytes as u64;
        let within = |used: u64| used.checked_add(n).filter(|sum| self.limit.is_none_or(|l| *sum <= l));
        self.used
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, within)
            .map_err(|used| full(used, "over its limit".into()))?;
        let loan = Charge { used: self.used.clone(), bytes: n };
        let memory = pages().map_err(|why| full(self.used() - n, why))?;
        Ok(HostBuffer { memory, bytes, locked, _loan: loan })
    }
}

impl HostBuffer {
    /// Whether the pages are page-locked.
    pub fn is_locked(&self) -> bool {
        self.locked
    }
}

impl Deref for HostBuffer {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: `Pages` guarantees that the `bytes` bytes from `start` on are initialised, live as long as
        // `self.memory`, and belong to this value alone; `&self` excludes writes through `deref_mut`.
        unsafe { std::slice::from_raw_parts(self.memory.start(), self.bytes) }
    }
}

impl DerefMut for HostBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: `Pages` guarantees that the `bytes` bytes from `start` on are initialised and belong to
        // this value alone, and `&mut self` excludes other references to them.
        unsafe { std::slice::from_raw_parts_mut(self.memory.start(), self.bytes) }
    }
}

impl AsRef<[u8]> for HostBuffer {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl fmt::Debug for HostBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostBuffer({} bytes{})", self.bytes, if self.locked { ", locked" } else { "" })
    }
}
