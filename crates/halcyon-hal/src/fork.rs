//! Children of `fork` that do not call `exec`, such as the workers of Python's `multiprocessing`.
//!
//! A child has a copy of its parent's memory, but only the thread that forked. It must call [`in_child`]
//! before it uses a device, and no other thread of the parent may have been inside of Halcyon at the fork,
//! because that thread's locks stay locked in the child. Then:
//! - The parent's CPU devices compute on the calling thread alone. New ones have all their threads.
//! - The other devices of the parent fail with an error: the threads of their drivers do not exist.
//! - A driver that the parent loaded cannot be opened again.
//! - The parent's devices are never closed, because that would wait for threads that do not exist.

use crate::{BackendType, Device, Error, Result};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};

/// How many forks lie between this process and the first one.
static GENERATION: AtomicU64 = AtomicU64::new(0);
/// The drivers that this process loaded, and those that its ancestors loaded before they forked: one bit for
/// each row of [`crate::backend::BUILT_IN`].
static LOADED: AtomicU64 = AtomicU64::new(0);
static INHERITED: AtomicU64 = AtomicU64::new(0);
/// The devices that are open.
static OPEN: Mutex<Vec<Weak<dyn Device>>> = Mutex::new(Vec::new());

const FIX: &str = "Start the process without a fork (in Python: multiprocessing.get_context(\"spawn\")), or open \
                   the device only in the child";

/// Makes this process a usable child, as the module's documentation describes.
pub fn in_child() {
    GENERATION.fetch_add(1, Ordering::SeqCst);
    INHERITED.fetch_or(LOADED.swap(0, Ordering::SeqCst), Ordering::SeqCst);
    // The lock is free unless another thread was opening a device at the fork.
    if let Ok(mut open) = OPEN.try_lock() {
        open.drain(..).filter_map(|d| d.upgrade()).for_each(std::mem::forget);
    }
}

/// Adds a device to those that a child never closes.
pub(crate) fn opened(d: &Arc<dyn Device>) {
    let mut open = OPEN.lock().unwrap_or_else(|e| e.into_inner());
    open.retain(|d| d.strong_count() > 0);
    open.push(Arc::downgrade(d));
}

/// Notes that this process loads the driver of a backend.
///
/// # Errors
/// [`Error::Unavailable`] if an ancestor loaded it before it forked.
#[cfg(not(target_arch = "wasm32"))]
pub(crate) fn may_load(kind: BackendType) -> Result<()> {
    let bit = crate::backend::BUILT_IN.iter().position(|b| b.kind == kind).map_or(0, |i| 1 << i);
    if INHERITED.load(Ordering::SeqCst) & bit == 0 {
        LOADED.fetch_or(bit, Ordering::SeqCst);
        return Ok(());
    }
    let reason =
        "the driver was loaded before this process was forked, and its threads do not exist here".into();
    Err(Error::Unavailable { backend: kind.id().into(), tried: vec![], reason, fix: FIX.into() })
}

/// The process in which a value was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Origin(u64);

impl Origin {
    /// This process.
    pub(crate) fn here() -> Origin {
        Origin(GENERATION.load(Ordering::Relaxed))
    }

    /// Whether this process is the one in which the value was made.
    pub(crate) fn is_here(self) -> bool {
        self == Origin::here()
    }

    /// Refuses a device that was opened before the process was forked.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    pub(crate) fn check(self, kind: BackendType, id: &str) -> Result<()> {
        if self.is_here() {
            return Ok(());
        }
        let reason = format!("{id} was opened before this process was forked, and cannot be used here");
        Err(Error::Unavailable { backend: kind.id().into(), tried: vec![], reason, fix: FIX.into() })
    }
}
