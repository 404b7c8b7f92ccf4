//! Pointers of callers: checked for null and alignment, and lengths for overflow.

use crate::guard::Failure;
use std::ffi::{CStr, c_char};

type Result<T> = std::result::Result<T, Failure>;

fn check<T>(p: *const T, name: &str) -> Result<()> {
    if p.is_null() {
        return Err(Failure::argument(format!("`{name}` is NULL")));
    }
    if !p.is_aligned() {
        return Err(Failure::argument(format!("`{name}` is not aligned to {} bytes", align_of::<T>())));
    }
    Ok(())
}

/// The value behind a pointer; `name` is the argument's name for errors.
///
/// # Safety
/// `p` is null, or points to a `T` that nothing changes while `'a` lasts.
pub(crate) unsafe fn get<'a, T>(p: *const T, name: &str) -> Result<&'a T> {
    check(p, name)?;
    // SAFETY: `p` is neither null nor misaligned, and the caller guarantees that it points to a live value.
    Ok(unsafe { &*p })
}

/// The value behind a pointer, to be changed.
///
/// # Safety
/// `p` is null, or points to a `T` that nothing else uses while `'a` lasts.
pub(crate) unsafe fn get_mut<'a, T>(p: *mut T, name: &str) -> Result<&'a mut T> {
    check(p, name)?;
    // SAFETY: `p` is neither null nor misaligned, and the caller guarantees that nothing else uses the value.
    Ok(unsafe { &mut *p })
}

/// A place for a result.
pub(crate) struct Out<T>(*mut T);

impl<T> Out<T> {
    /// # Safety
    /// `p` is null, or points to memory for a `T` that nothing else uses during the call. The memory need not
    /// be initialised.
    pub(crate) unsafe fn new(p: *mut T, name: &str) -> Result<Out<T>> {
        check(p, name)?;
        Ok(Out(p))
    }

    /// Writes a value; the old content is not dropped.
    pub(crate) fn set(&self, v: T) {
        // SAFETY: `new` checked the pointer, and its caller guarantees memory for a `T`.
        unsafe { self.0.write(v) }
    }
}

impl<T> Out<*mut T> {
    /// Like [`Out::new`], for a handle. The place is set to null, so that it is null if the call fails.
    ///
    /// # Safety
    /// As for [`Out::new`].
    pub(crate) unsafe fn handle(p: *mut *mut T) -> Result<Out<*mut T>> {
        // SAFETY: the caller guarantees that `p` is null or points to memory for a pointer.
        let out = unsafe { Out::new(p, "out") }?;
        out.set(std::ptr::null_mut());
        Ok(out)
    }

    /// Moves a value into a new handle.
    pub(crate) fn give(&self, v: T) {
        self.set(Box::into_raw(Box::new(v)));
    }
}

/// The array at a pointer. An array without elements may be null.
///
/// # Safety
/// `p` is null, or points to `n` values that nothing changes while `'a` lasts.
pub(crate) unsafe fn slice<'a, T>(p: *const T, n: usize, name: &str) -> Result<&'a [T]> {
    if n == 0 {
        return Ok(&[]);
    }
    check(p, name)?;
    if n.checked_mul(size_of::<T>()).is_none_or(|bytes| isize::try_from(bytes).is_err()) {
        return Err(Failure::argument(format!(
            "`{name}` has {n} elements, more than the address space holds"
        )));
    }
    // SAFETY: `p` is neither null nor misaligned, the size is within the address space, and the caller
    // guarantees `n` values.
    Ok(unsafe { std::slice::from_raw_parts(p, n) })
}

/// The text at a pointer.
///
/// # Safety
/// `p` is null, or points to a string that ends with NUL and that nothing changes while `'a` lasts.
pub(crate) unsafe fn text<'a>(p: *const c_char, name: &str) -> Result<&'a str> {
    check(p, name)?;
    // SAFETY: `p` is not null, and the caller guarantees a NUL.
    let text = unsafe { CStr::from_ptr(p) };
    text.to_str().map_err(|e| {
        Failure::argument(format!("`{name}` is not UTF-8: the byte at {} is wrong", e.valid_up_to()))
    })
}

/// Drops a handle; null is ignored.
///
/// # Safety
/// `p` is null, or [`Out::give`] made it and nothing uses it any more.
pub(crate) unsafe fn free<T>(p: *mut T) {
    let drop_it = || {
        if !p.is_null() {
            // SAFETY: `give` made the pointer from a box, and the caller guarantees that this is its last
            // use.
            drop(unsafe { Box::from_raw(p) });
        }
        Ok(())
    };
    crate::guard::guard(drop_it);
}
