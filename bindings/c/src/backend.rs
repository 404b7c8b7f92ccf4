//! Open devices, and the options with which they are opened.

use crate::guard::{HalcyonStatus, c_text, guard, value};
use crate::pointer::{Out, free, get, get_mut, text};
use halcyon::hal::DeviceName;
use halcyon::{AmpPolicy, Backend, BackendBuilder, Fallback, Level};
use std::ffi::{CString, c_char};
use std::ptr::null;

/// Options of `halcyon_backend_open`. One thread at a time may use a handle of this type.
#[derive(Clone, Debug, Default)]
pub struct HalcyonOptions {
    level: Option<Level>,
    precision: Option<AmpPolicy>,
    threads: Option<usize>,
    memory_limit: Option<u64>,
    memory_needed: Option<u64>,
}

impl HalcyonOptions {
    /// The settings of a backend with these options.
    fn settings(&self) -> BackendBuilder {
        let mut b = Backend::builder();
        if let Some(level) = self.level {
            b = b.level(level);
        }
        if let Some(precision) = self.precision {
            b = b.amp(precision);
        }
        if let Some(n) = self.threads {
            b = b.num_threads(n);
        }
        if let Some(bytes) = self.memory_limit {
            b = b.memory_limit(bytes);
        }
        match self.memory_needed {
            Some(bytes) => b.memory_needed(bytes),
            None => b,
        }
    }
}

/// An open device. Any number of threads may use a handle of this type at the same time.
#[derive(Debug)]
pub struct HalcyonBackend {
    pub(crate) backend: Backend,
    id: CString,
    level: CString,
    report: CString,
    warnings: CString,
}

/// Makes options with the default values. The caller frees `*out` with `halcyon_options_free`.
///
/// # Safety
/// `out` points to a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn halcyon_options_new(out: *mut *mut HalcyonOptions) -> HalcyonStatus {
    guard(|| {
        // SAFETY: the caller guarantees memory for a pointer.
        unsafe { Out::handle(out) }?.give(HalcyonOptions::default());
        Ok(())
    })
}

/// Frees options. NULL is allowed.
///
/// # Safety
/// `options` is NULL or options that were not freed yet, and nothing uses them any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn halcyon_options_free(options: *mut HalcyonOptions) {
    // SAFETY: the caller guarantees that this is the last use of the handle.
    unsafe { free(options) }
}

/// Sets the number of threads of the CPU device, including the calling thread. On other devices the option
/// has no effect, which `halcyon_backend_warnings` reports. Without it, all processors are used. 0 is an
/// error of `halcyon_backend_open`.
///
/// # Safety
/// `options` are options.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn halcyon_options_set_threads(
    options: *mut HalcyonOptions,
    threads: usize,
) -> HalcyonStatus {
    guard(|| {
        // SAFETY: the caller guarantees options that no other thread uses.
        unsafe { get_mut(options, "options") }?.threads = Some(threads);
        Ok(())
    })
}

/// Sets the optimisation level: `O0`, `O1`, `O2` or `O3`. Without it, `O2`.
///
/// # Safety
/// `options` are options, `level` is a string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn halcyon_options_set_level(
    options: *mut HalcyonOptions,
    level: *const c_char,
) -> HalcyonStatus {
    guard(|| {
        // SAFETY: the caller guarantees options that no other thread uses, and a string.
        let (options, level) = unsafe { (get_mut(options, "options")?, text(level, "level")?) };
        options.level = Some(level.parse()?);
        Ok(())
    })
}

/// Sets the element type of matrix products and convolutions: `f32`, `bf16` or `f16`. Inputs and outputs keep
/// their types. It needs level `O2`. Without it, the environment variable `HALCYON_PRECISION`, else `f32`.
///
/// # Safety
/// `options` are options, `precision` is a string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn halcyon_options_set_precision(
    options: *mut HalcyonOptions,
    precision: *const c_char,
) -> HalcyonStatus {
    guard(|| {
        // SAFETY: the caller guarantees options that no other thread uses, and a string.
        let (options, name) = unsafe { (get_mut(options, "options")?, text(precision, "precision")?) };
        options.precision = Some(name.parse()?);
        Ok(())
    })
}

/// Sets the most bytes that may be taken from the device's driver. A run that needs more fails with
/// `HALCYON_STATUS_OUT_OF_MEMORY`.
///
/// # Safety
/// `options` are options.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn halcyon_options_set_memory_limit(
    options: *mut HalcyonOptions,
    bytes: u64,
) -> HalcyonStatus {
    guard(|| {
        // SAFETY: the caller guarantees options that no other thread uses.
        unsafe { get_mut(options, "options") }?.memory_limit = Some(bytes);
        Ok(())
    })
}

/// Sets the bytes of memory that must be free. A device with less is not chosen; the report of the selection
/// says how many bytes are missing.
///
/// # Safety
/// `options` are options.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn halcyon_options_set_memory_needed(
    options: *mut HalcyonOptions,
    bytes: u64,
) -> HalcyonStatus {
    guard(|| {
        // SAFETY: the caller guarantees options that no other thread uses.
        unsafe { get_mut(options, "options") }?.memory_needed = Some(bytes);
        Ok(())
    })
}

/// Opens a device. `name` is the name of a backend (`cuda`: its first device), of a device (`cuda:1`), or
/// `auto` for the best device of the machine. `options` may be NULL. The caller frees `*out` with
/// `halcyon_backend_free`.
///
/// # Safety
/// `name` is a string, `options` are NULL or options, `out` points to a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn halcyon_backend_open(
    name: *const c_char,
    options: *const HalcyonOptions,
    out: *mut *mut HalcyonBackend,
) -> HalcyonStatus {
    guard(|| {
        // SAFETY: the caller guarantees memory for a pointer, and a string.
        let (out, name) = unsafe { (Out::handle(out)?, text(name, "name")?) };
        let settings = match options.is_null() {
            true => Backend::builder(),
            // SAFETY: the caller guarantees options.
            false => unsafe { get(options, "options") }?.settings(),
        };
        let DeviceName { backend, index } = name.parse()?;
        let settings = settings.backend_type(backend);
        let backend = match index {
            None => settings.build()?,
            Some(i) => settings.device(i).fallback(Fallback::Never).build()?,
        };
        out.give(HalcyonBackend {
            id: c_text(backend.id()),
            level: c_text(&backend.level().to_string()),
            report: c_text(&backend.selection().to_string()),
            warnings: c_text(&backend.warnings().join("\n")),
            backend,
        });
        Ok(())
    })
}

/// Frees a backend. NULL is allowed. Models and generators of the backend stay valid; the device is closed
/// when the last of them is freed.
///
/// # Safety
/// `backend` is NULL or a backend that was not freed yet, and nothing uses it any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn halcyon_backend_free(backend: *mut HalcyonBackend) {
    // SAFETY: the caller guarantees that this is the last use of the handle.
    unsafe { free(backend) }
}

/// The name of the open device, such as `cpu:0`. The string belongs to the backend. NULL if `backend` is
/// NULL.
///
/// # Safety
/// `backend` is NULL or a backend.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn halcyon_backend_id(backend: *const HalcyonBackend) -> *const c_char {
    // SAFETY: the caller guarantees a backend or NULL.
    value(null(), || Ok(unsafe { get(backend, "backend") }?.id.as_ptr()))
}

/// The optimisation level, such as `O2`. The string belongs to the backend. NULL if `backend` is NULL.
///
/// # Safety
/// `backend` is NULL or a backend.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn halcyon_backend_level(backend: *const HalcyonBackend) -> *const c_char {
    // SAFETY: the caller guarantees a backend or NULL.
    value(null(), || Ok(unsafe { get(backend, "backend") }?.level.as_ptr()))
}

/// The report of the selection: the device, the rule that chose it, and a line for each candidate that was
/// rejected, with the reason. The string belongs to the backend. NULL if `backend` is NULL.
///
/// # Safety
/// `backend` is NULL or a backend.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn halcyon_backend_report(backend: *const HalcyonBackend) -> *const c_char {
    // SAFETY: the caller guarantees a backend or NULL.
    value(null(), || Ok(unsafe { get(backend, "backend") }?.report.as_ptr()))
}

/// A line for each option that has no effect on this device, or less effect than requested; empty if there is
/// none. The string belongs to the backend. NULL if `backend` is NULL.
///
/// # Safety
/// `backend` is NULL or a backend.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn halcyon_backend_warnings(backend: *const HalcyonBackend) -> *const c_char {
    // SAFETY: the caller guarantees a backend or NULL.
    value(null(), || Ok(unsafe { get(backend, "backend") }?.warnings.as_ptr()))
}
