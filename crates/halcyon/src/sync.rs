//! Locking of values that stay valid when a thread panics.

use std::sync::{Mutex, MutexGuard};

/// Locks `m`. A panic of another thread while it held the lock is ignored, so this is for values of which
/// every update is a single step or leaves the value complete.
pub(crate) fn lock<T: ?Sized>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(|e| e.into_inner())
}
