//! Locking of values that stay valid when a thread panics.

use std::sync::{Mutex, MutexGuard};

/// Locks `m`, even if a thread panicked while it held the lock. So use this function only for values that are
/// valid at every moment of an update.
pub(crate) fn lock<T: ?Sized>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(|e| e.into_inner())
}
