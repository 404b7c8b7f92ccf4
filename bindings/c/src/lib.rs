//! The C library of Halcyon: devices, ONNX models and language models behind opaque handles. `docs/c-api.md`
//! explains it, and `include/halcyon.h` is generated from the exported functions and their documentation.
//!
//! Rules of every exported function:
//! - Panics become `HALCYON_STATUS_INTERNAL` ([`guard`]).
//! - Pointers are checked for null and alignment, and lengths for overflow ([`pointer`]).
//! - Enums of callers are integers, because a value that is not in the enum would be undefined behaviour.

mod backend;
mod devices;
mod failure;
mod generator;
mod guard;
mod model;
mod pointer;
mod tensor;

pub use backend::*;
pub use devices::*;
pub use generator::*;
pub use guard::HalcyonStatus;
pub use model::*;
pub use tensor::*;

use guard::{Failure, guard as guarded};
use std::ffi::c_char;

/// The version of the interface that this header describes. `halcyon_abi_version` returns the version of the
/// library that is loaded; a program must not use a library with another number.
pub const HALCYON_ABI_VERSION: u32 = 1;

/// A number of bytes that the driver does not report.
pub const HALCYON_UNKNOWN: u64 = u64::MAX;

/// Handles are used from any thread.
const _: () = {
    const fn shared<T: Send + Sync>() {}
    shared::<HalcyonDevices>();
    shared::<HalcyonOptions>();
    shared::<HalcyonBackend>();
    shared::<HalcyonModel>();
    shared::<HalcyonTensor>();
    shared::<HalcyonGenerator>();
};

/// The version of the interface of the loaded library: `HALCYON_ABI_VERSION` of its header.
#[unsafe(no_mangle)]
pub extern "C" fn halcyon_abi_version() -> u32 {
    HALCYON_ABI_VERSION
}

/// The version of Halcyon, such as `0.1.0`. The string is valid for ever.
#[unsafe(no_mangle)]
pub extern "C" fn halcyon_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

/// The text of the last failure on this thread; empty if nothing has failed on it. Never NULL. A call that
/// succeeds leaves the text as it is. The string is valid until the next failure on this thread, or until the
/// thread ends.
#[unsafe(no_mangle)]
pub extern "C" fn halcyon_last_error() -> *const c_char {
    guard::last_error()
}

/// The status of the last failure on this thread; `HALCYON_STATUS_OK` if nothing has failed on it. It says
/// why a function that returns a value returned NULL, 0 or -1.
#[unsafe(no_mangle)]
pub extern "C" fn halcyon_last_status() -> HalcyonStatus {
    guard::last_status()
}

/// The name of a status, such as `out of memory`. Never NULL. The string is valid for ever.
#[unsafe(no_mangle)]
pub extern "C" fn halcyon_status_name(status: i32) -> *const c_char {
    guard::status_name(status).as_ptr()
}

/// Sets the program that probes drivers: the path of the command `halcyon` of the same version. A driver that
/// crashes or hangs then ends a process of this program and not the caller's. Without a program, drivers are
/// probed in the caller's process, and TPUs are not detected. Call it before any function that looks for
/// devices. A second call with another path is an error.
///
/// # Safety
/// `path` is a string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn halcyon_set_probe_program(path: *const c_char) -> HalcyonStatus {
    guarded(|| {
        // SAFETY: the caller guarantees a string.
        let path = unsafe { pointer::text(path, "path") }?;
        devices::set_probe_program(path).map_err(Failure::argument)
    })
}
