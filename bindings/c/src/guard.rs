//! What every exported function does: errors become a status and a text, and panics stay inside.
//!
//! This module uses only the standard library, so that a test can include it.

use std::any::Any;
use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// The result of a function. Every value except `HALCYON_STATUS_OK` is a failure, whose text
/// `halcyon_last_error` returns.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HalcyonStatus {
    /// The function did what it was asked to do.
    Ok = 0,
    /// An argument is invalid: a null pointer, text that is not UTF-8, an unknown name, a number out of
    /// range.
    Argument = 1,
    /// The sizes of a tensor are not those that its elements or the model need.
    Shape = 2,
    /// An element type that is not accepted here.
    Dtype = 3,
    /// Something that Halcyon does not support.
    Unsupported = 4,
    /// A backend, a library or a device is missing.
    Unavailable = 5,
    /// There is not enough free memory.
    OutOfMemory = 6,
    /// A call into a driver failed, or a device's compiler rejected a kernel.
    Driver = 7,
    /// A model read an index that is out of range.
    Index = 8,
    /// A file or a model in memory is malformed.
    Format = 9,
    /// A file cannot be read.
    Io = 10,
    /// A loop of a model did not end.
    Endless = 11,
    /// The handle is in use by another call.
    Busy = 12,
    /// A bug in Halcyon. The process can go on, but the handles of the call should be freed.
    Internal = 13,
}

/// All statuses with their names.
const NAMES: &[(HalcyonStatus, &CStr)] = &[
    (HalcyonStatus::Ok, c"ok"),
    (HalcyonStatus::Argument, c"invalid argument"),
    (HalcyonStatus::Shape, c"shape"),
    (HalcyonStatus::Dtype, c"element type"),
    (HalcyonStatus::Unsupported, c"unsupported"),
    (HalcyonStatus::Unavailable, c"unavailable"),
    (HalcyonStatus::OutOfMemory, c"out of memory"),
    (HalcyonStatus::Driver, c"driver"),
    (HalcyonStatus::Index, c"index out of range"),
    (HalcyonStatus::Format, c"malformed file"),
    (HalcyonStatus::Io, c"input or output"),
    (HalcyonStatus::Endless, c"endless loop"),
    (HalcyonStatus::Busy, c"busy"),
    (HalcyonStatus::Internal, c"internal error"),
];

/// The name of a status.
pub(crate) fn status_name(status: i32) -> &'static CStr {
    NAMES.iter().find(|(s, _)| *s as i32 == status).map_or(c"unknown status", |(_, name)| name)
}

/// Why a function failed.
#[derive(Debug)]
pub(crate) struct Failure {
    pub status: HalcyonStatus,
    pub text: String,
}

impl Failure {
    pub(crate) fn argument(text: impl Into<String>) -> Failure {
        Failure { status: HalcyonStatus::Argument, text: text.into() }
    }
}

thread_local! {
    static LAST: RefCell<(HalcyonStatus, CString)> = RefCell::new((HalcyonStatus::Ok, CString::default()));
}

/// The text as a C string. NUL characters, which a C string cannot hold, are written as `\0`.
pub(crate) fn c_text(text: &str) -> CString {
    CString::new(text.replace('\0', "\\0")).unwrap_or_default()
}

/// Keeps a failure for [`last_error`] and [`last_status`].
fn remember(status: HalcyonStatus, text: &str) {
    // While a thread ends, its last failure may be gone already. Then there is no place for this one.
    let _ = LAST.try_with(|last| *last.borrow_mut() = (status, c_text(text)));
}

/// The text of this thread's last failure. It is valid until the next failure, or until the thread ends.
pub(crate) fn last_error() -> *const c_char {
    LAST.try_with(|last| last.borrow().1.as_ptr()).unwrap_or(c"".as_ptr())
}

/// The status of this thread's last failure.
pub(crate) fn last_status() -> HalcyonStatus {
    LAST.try_with(|last| last.borrow().0).unwrap_or(HalcyonStatus::Ok)
}

/// Runs the work of a function that returns a status.
pub(crate) fn guard(work: impl FnOnce() -> Result<(), Failure>) -> HalcyonStatus {
    match caught(work) {
        Ok(()) => HalcyonStatus::Ok,
        Err(status) => status,
    }
}

/// Runs the work of a function that returns a value, or `otherwise` on failure.
pub(crate) fn value<T>(otherwise: T, work: impl FnOnce() -> Result<T, Failure>) -> T {
    caught(work).unwrap_or(otherwise)
}

fn caught<T>(work: impl FnOnce() -> Result<T, Failure>) -> Result<T, HalcyonStatus> {
    // After a panic the handles may be in any state that their locks allow; Halcyon's locks ignore poisoning.
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(v)) => Ok(v),
        Ok(Err(failure)) => {
            remember(failure.status, &failure.text);
            Err(failure.status)
        }
        Err(panic) => {
            let text = panic_text(&*panic);
            let text = format!("internal error: {text}. Please report this with the calls that led here");
            remember(HalcyonStatus::Internal, &text);
            // The destructor of a panic's payload may panic too.
            let _ = catch_unwind(AssertUnwindSafe(|| drop(panic)));
            Err(HalcyonStatus::Internal)
        }
    }
}

fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|s| s.to_string());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "a panic without text".into())
}
