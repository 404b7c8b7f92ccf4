//! Constants that a pass computes from others: the same bytes for every plan, as long as one of them holds
//! them.

use crate::data::{Bytes, ConstData};
use crate::dtype::DType;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, Weak};

/// What was done to a constant.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) enum Derived {
    Rounded(DType),
    /// Rows and columns of bytes, exchanged.
    Turned([usize; 2]),
    /// Of bytes of such an element type and shape, their sums over an axis, in i32.
    Sums(DType, [usize; 2], usize),
}

type Known = HashMap<(usize, usize, Derived), (Weak<dyn Bytes>, Weak<dyn Bytes>)>;
static KNOWN: Mutex<Option<Known>> = Mutex::new(None);

/// The bytes of the other constant: those that are known, or what `make` gives, if it gives any.
pub(super) fn derived(
    c: &ConstData,
    how: Derived,
    make: impl FnOnce(&[u8]) -> Option<Vec<u8>>,
) -> Option<Arc<dyn Bytes>> {
    let owner = c.owner();
    let (at, len) = c.key();
    let key = (at, len, how);
    let lock = || KNOWN.lock().unwrap_or_else(|e| e.into_inner());
    let before = lock().get_or_insert_default().get(&key).and_then(|(from, to)| {
        // Other bytes may have come to lie where those were.
        let same = std::ptr::addr_eq(Arc::as_ptr(&from.upgrade()?), Arc::as_ptr(&owner));
        to.upgrade().filter(|_| same)
    });
    if before.is_some() {
        return before;
    }
    let data: Arc<dyn Bytes> = Arc::new(make(c.bytes())?);
    let mut m = lock();
    let known = m.get_or_insert_default();
    known.retain(|_, (from, to)| from.strong_count() > 0 && to.strong_count() > 0);
    known.insert(key, (Arc::downgrade(&owner), Arc::downgrade(&data)));
    Some(data)
}
