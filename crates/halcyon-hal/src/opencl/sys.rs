//! The OpenCL library, loaded at run time: its functions, constants and error names.
//!
//! The values are those of Khronos' `CL/cl.h`. No binding crate is used: if the library that the user named
//! does not load, the available crates fall back to the system's library, and they reduce the loader's
//! message to a number.

use crate::{Error, Result};
use std::collections::BTreeMap;
use std::ffi::{c_char, c_void};
use std::marker::PhantomData;
use std::sync::Mutex;

pub(super) type Handle = *mut c_void;

macro_rules! api {
    ($($name:ident($($t:ty),*) -> $r:ty;)*) => {
        /// The functions that this driver uses, from one library that is never unloaded.
        #[allow(non_snake_case)]
        pub(crate) struct Api {
            /// The name or path that was loaded.
            pub library: String,
            $(pub $name: unsafe extern "system" fn($($t),*) -> $r,)*
        }

        impl Api {
            /// Resolves all functions of the table; the error is the name of a missing one.
            fn resolve(lib: &libloading::Library, library: String) -> std::result::Result<Api, &'static str> {
                Ok(Api {
                    library,
                    $($name: {
                        // SAFETY: the OpenCL specification declares the function with this type.
                        let f = unsafe { lib.get::<unsafe extern "system" fn($($t),*) -> $r>(concat!(stringify!($name), "\0").as_bytes()) };
                        *f.map_err(|_| stringify!($name))?
                    },)*
                })
            }
        }
    };
}

type Notify = Option<unsafe extern "system" fn(Handle, *mut c_void)>;
type EventNotify = Option<unsafe extern "system" fn(Handle, i32, *mut c_void)>;
type MemoryNotify = unsafe extern "system" fn(Handle, *mut c_void);
type ContextNotify = Option<unsafe extern "system" fn(*const c_char, *const c_void, usize, *mut c_void)>;

api! {
    clGetPlatformIDs(u32, *mut Handle, *mut u32) -> i32;
    clGetPlatformInfo(Handle, u32, usize, *mut c_void, *mut usize) -> i32;
    clGetDeviceIDs(Handle, u64, u32, *mut Handle, *mut u32) -> i32;
    clGetDeviceInfo(Handle, u32, usize, *mut c_void, *mut usize) -> i32;
    clGetExtensionFunctionAddressForPlatform(Handle, *const c_char) -> *mut c_void;
    clCreateContext(*const isize, u32, *const Handle, ContextNotify, *mut c_void, *mut i32) -> Handle;
    clReleaseContext(Handle) -> i32;
    clCreateCommandQueue(Handle, Handle, u64, *mut i32) -> Handle;
    clReleaseCommandQueue(Handle) -> i32;
    clCreateBuffer(Handle, u64, usize, *mut c_void, *mut i32) -> Handle;
    clCreateSubBuffer(Handle, u64, u32, *const c_void, *mut i32) -> Handle;
    clReleaseMemObject(Handle) -> i32;
    clSetMemObjectDestructorCallback(Handle, MemoryNotify, *mut c_void) -> i32;
    clCreateProgramWithSource(Handle, u32, *const *const c_char, *const usize, *mut i32) -> Handle;
    clCreateProgramWithBinary(Handle, u32, *const Handle, *const usize, *const *const u8, *mut i32, *mut i32) -> Handle;
    clBuildProgram(Handle, u32, *const Handle, *const c_char, Notify, *mut c_void) -> i32;
    clGetProgramInfo(Handle, u32, usize, *mut c_void, *mut usize) -> i32;
    clGetProgramBuildInfo(Handle, Handle, u32, usize, *mut c_void, *mut usize) -> i32;
    clReleaseProgram(Handle) -> i32;
    clCreateKernel(Handle, *const c_char, *mut i32) -> Handle;
    clReleaseKernel(Handle) -> i32;
    clSetKernelArg(Handle, u32, usize, *const c_void) -> i32;
    clGetKernelWorkGroupInfo(Handle, Handle, u32, usize, *mut c_void, *mut usize) -> i32;
    clEnqueueNDRangeKernel(Handle, Handle, u32, *const usize, *const usize, *const usize, u32, *const Handle, *mut Handle) -> i32;
    clEnqueueReadBuffer(Handle, Handle, u32, usize, usize, *mut c_void, u32, *const Handle, *mut Handle) -> i32;
    clEnqueueWriteBuffer(Handle, Handle, u32, usize, usize, *const c_void, u32, *const Handle, *mut Handle) -> i32;
    clEnqueueCopyBuffer(Handle, Handle, Handle, usize, usize, usize, u32, *const Handle, *mut Handle) -> i32;
    clEnqueueMapBuffer(Handle, Handle, u32, u64, usize, usize, u32, *const Handle, *mut Handle, *mut i32) -> *mut c_void;
    clEnqueueUnmapMemObject(Handle, Handle, *mut c_void, u32, *const Handle, *mut Handle) -> i32;
    clFlush(Handle) -> i32;
    clFinish(Handle) -> i32;
    clGetEventProfilingInfo(Handle, u32, usize, *mut c_void, *mut usize) -> i32;
    clReleaseEvent(Handle) -> i32;
    clGetEventInfo(Handle, u32, usize, *mut c_void, *mut usize) -> i32;
    clWaitForEvents(u32, *const Handle) -> i32;
    clSetEventCallback(Handle, i32, EventNotify, *mut c_void) -> i32;
    clCreateUserEvent(Handle, *mut i32) -> Handle;
    clSetUserEventStatus(Handle, i32) -> i32;
    clEnqueueMarkerWithWaitList(Handle, u32, *const Handle, *mut Handle) -> i32;
    clEnqueueBarrierWithWaitList(Handle, u32, *const Handle, *mut Handle) -> i32;
}

impl std::fmt::Debug for Api {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Api({})", self.library)
    }
}

/// The kinds of objects, as types, so that a function cannot be passed an object of another kind.
macro_rules! kinds {
    ($($kind:ident),*) => { $(#[derive(Debug)] pub(crate) enum $kind {})* };
}
kinds!(Context, CommandQueue, Memory, Program, Kernel, Event, CommandBuffer);

/// A reference to an OpenCL object of kind `K`, released when dropped. Contexts, queues, buffers, programs
/// and kernels keep their dependencies alive by OpenCL's reference counts, so the order of drops does not
/// matter.
pub(super) struct Owned<K> {
    raw: Handle,
    release: unsafe extern "system" fn(Handle) -> i32,
    kind: PhantomData<fn() -> K>,
}

// SAFETY: OpenCL objects may be used and released from any thread (OpenCL 1.2, appendix A.2). The exception
// is `clSetKernelArg`, which is called only under a lock: that of the only queue, or the one that all queues
// share.
unsafe impl<K> Send for Owned<K> {}
// SAFETY: OpenCL's functions are thread-safe except for `clSetKernelArg`, which is called under a lock
// (OpenCL 1.2, appendix A.2).
unsafe impl<K> Sync for Owned<K> {}

impl<K> Owned<K> {
    /// Takes ownership of one reference to `raw`; the error is the creating call's `code`.
    ///
    /// # Safety
    /// If `code` is success, `raw` must be null or a live object of kind `K` with a reference that the caller
    /// owns, and `release` its release function.
    pub(super) unsafe fn new(
        raw: Handle,
        code: i32,
        release: unsafe extern "system" fn(Handle) -> i32,
    ) -> std::result::Result<Owned<K>, i32> {
        match code {
            SUCCESS if raw.is_null() => Err(OUT_OF_HOST_MEMORY),
            SUCCESS => Ok(Owned { raw, release, kind: PhantomData }),
            c => Err(c),
        }
    }

    pub(super) fn raw(&self) -> Handle {
        self.raw
    }
}

impl<K> Drop for Owned<K> {
    fn drop(&mut self) {
        // SAFETY: `new` requires one owned reference to a live object, which is released once.
        let code = unsafe { (self.release)(self.raw) };
        if code != SUCCESS {
            tracing::warn!(code = %code_name(code), "an OpenCL object could not be released");
        }
    }
}

impl<K> std::fmt::Debug for Owned<K> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:p}", self.raw)
    }
}

pub(super) const TRUE: u32 = 1;
pub(super) const DEVICE_TYPE_CPU: u64 = 1 << 1;
pub(super) const DEVICE_TYPE_GPU: u64 = 1 << 2;
pub(super) const DEVICE_TYPE_ACCELERATOR: u64 = 1 << 3;
pub(super) const DEVICE_TYPE_ALL: u64 = 0xFFFF_FFFF;
pub(super) const PLATFORM_VERSION: u32 = 0x0901;
pub(super) const PLATFORM_NAME: u32 = 0x0902;
pub(super) const DEVICE_TYPE: u32 = 0x1000;
pub(super) const DEVICE_MAX_COMPUTE_UNITS: u32 = 0x1002;
pub(super) const DEVICE_MAX_WORK_GROUP_SIZE: u32 = 0x1004;
pub(super) const DEVICE_MAX_CLOCK_FREQUENCY: u32 = 0x100C;
pub(super) const DEVICE_MAX_MEM_ALLOC_SIZE: u32 = 0x1010;
pub(super) const DEVICE_MAX_PARAMETER_SIZE: u32 = 0x1017;
/// In bits.
pub(super) const DEVICE_MEM_BASE_ADDR_ALIGN: u32 = 0x1019;
pub(super) const DEVICE_GLOBAL_MEM_SIZE: u32 = 0x101F;
pub(super) const DEVICE_LOCAL_MEM_SIZE: u32 = 0x1023;
pub(super) const DEVICE_AVAILABLE: u32 = 0x1027;
pub(super) const DEVICE_COMPILER_AVAILABLE: u32 = 0x1028;
pub(super) const DEVICE_NAME: u32 = 0x102B;
pub(super) const DEVICE_VENDOR: u32 = 0x102C;
pub(super) const DRIVER_VERSION: u32 = 0x102D;
pub(super) const DEVICE_PROFILE: u32 = 0x102E;
pub(super) const DEVICE_VERSION: u32 = 0x102F;
pub(super) const DEVICE_EXTENSIONS: u32 = 0x1030;
pub(super) const DEVICE_SINGLE_FP_CONFIG: u32 = 0x101B;
/// A bit of [`DEVICE_SINGLE_FP_CONFIG`].
pub(super) const FP_CORRECTLY_ROUNDED_DIVIDE_SQRT: u64 = 1 << 7;
pub(super) const DEVICE_DOUBLE_FP_CONFIG: u32 = 0x1032;
pub(super) const DEVICE_HOST_UNIFIED_MEMORY: u32 = 0x1035;
pub(super) const DEVICE_OPENCL_C_VERSION: u32 = 0x103D;
/// Requires OpenCL 3.0 or `cl_khr_extended_versioning`. The names of extensions with their versions.
pub(super) const DEVICE_EXTENSIONS_WITH_VERSION: u32 = 0x1060;
/// Bytes of a name with a version: a version of four bytes, then the name, padded with zeros.
pub(super) const NAME_VERSION: usize = 4 + 64;
/// Requires `cl_khr_command_buffer`.
pub(super) const DEVICE_COMMAND_BUFFER_CAPABILITIES: u32 = 0x12A9;
pub(super) const DEVICE_COMMAND_BUFFER_REQUIRED_QUEUE_PROPERTIES: u32 = 0x12AA;
/// A bit of [`DEVICE_COMMAND_BUFFER_CAPABILITIES`], in versions before 0.9.8.
pub(super) const COMMAND_BUFFER_CAPABILITY_SIMULTANEOUS_USE: u64 = 1 << 2;
/// A property of a command buffer, with its only flag before version 0.9.8.
pub(super) const COMMAND_BUFFER_FLAGS: u64 = 0x1293;
pub(super) const COMMAND_BUFFER_SIMULTANEOUS_USE: u64 = 1 << 0;
/// Requires `cl_nv_device_attribute_query`.
pub(super) const DEVICE_COMPUTE_CAPABILITY_MAJOR_NV: u32 = 0x4000;
pub(super) const DEVICE_COMPUTE_CAPABILITY_MINOR_NV: u32 = 0x4001;
/// The extension with AMD's attributes.
pub(super) const AMD_ATTRIBUTES: &str = "cl_amd_device_attribute_query";
/// Requires [`AMD_ATTRIBUTES`]; in KiB.
pub(super) const DEVICE_GLOBAL_FREE_MEMORY_AMD: u32 = 0x4039;
pub(super) const CONTEXT_PLATFORM: isize = 0x1084;
pub(super) const QUEUE_PROFILING_ENABLE: u64 = 1 << 1;
pub(super) const MEM_READ_WRITE: u64 = 1 << 0;
pub(super) const MEM_READ_ONLY: u64 = 1 << 2;
pub(super) const MEM_USE_HOST_PTR: u64 = 1 << 3;
pub(super) const MEM_ALLOC_HOST_PTR: u64 = 1 << 4;
/// Takes the origin and the size, both `usize`.
pub(super) const BUFFER_CREATE_TYPE_REGION: u32 = 0x1220;
pub(super) const MAP_READ: u64 = 1 << 0;
pub(super) const MAP_WRITE: u64 = 1 << 1;
pub(super) const PROGRAM_BINARY_SIZES: u32 = 0x1165;
pub(super) const PROGRAM_BINARIES: u32 = 0x1166;
pub(super) const PROGRAM_BUILD_LOG: u32 = 0x1183;
pub(super) const KERNEL_WORK_GROUP_SIZE: u32 = 0x11B0;
pub(super) const PROFILING_COMMAND_START: u32 = 0x1282;
pub(super) const PROFILING_COMMAND_END: u32 = 0x1283;
pub(super) const EVENT_COMMAND_EXECUTION_STATUS: u32 = 0x11D3;
pub(super) const FALSE: u32 = 0;
/// Status of a finished event.
pub(super) const COMPLETE: i32 = 0;

pub(super) const SUCCESS: i32 = 0;
pub(super) const DEVICE_NOT_FOUND: i32 = -1;
pub(super) const MEM_OBJECT_ALLOCATION_FAILURE: i32 = -4;
pub(super) const OUT_OF_HOST_MEMORY: i32 = -6;
pub(super) const BUILD_PROGRAM_FAILURE: i32 = -11;
pub(super) const PLATFORM_NOT_FOUND_KHR: i32 = -1001;

/// Symbolic name of an error code.
pub(super) fn code_name(code: i32) -> String {
    let s = match code {
        0 => "CL_SUCCESS",
        -1 => "CL_DEVICE_NOT_FOUND",
        -2 => "CL_DEVICE_NOT_AVAILABLE",
        -3 => "CL_COMPILER_NOT_AVAILABLE",
        -4 => "CL_MEM_OBJECT_ALLOCATION_FAILURE",
        -5 => "CL_OUT_OF_RESOURCES",
        -6 => "CL_OUT_OF_HOST_MEMORY",
        -7 => "CL_PROFILING_INFO_NOT_AVAILABLE",
        -8 => "CL_MEM_COPY_OVERLAP",
        -11 => "CL_BUILD_PROGRAM_FAILURE",
        -12 => "CL_MAP_FAILURE",
        -13 => "CL_MISALIGNED_SUB_BUFFER_OFFSET",
        -14 => "CL_EXEC_STATUS_ERROR_FOR_EVENTS_IN_WAIT_LIST",
        -15 => "CL_COMPILE_PROGRAM_FAILURE",
        -16 => "CL_LINKER_NOT_AVAILABLE",
        -17 => "CL_LINK_PROGRAM_FAILURE",
        -19 => "CL_KERNEL_ARG_INFO_NOT_AVAILABLE",
        -30 => "CL_INVALID_VALUE",
        -31 => "CL_INVALID_DEVICE_TYPE",
        -32 => "CL_INVALID_PLATFORM",
        -33 => "CL_INVALID_DEVICE",
        -34 => "CL_INVALID_CONTEXT",
        -35 => "CL_INVALID_QUEUE_PROPERTIES",
        -36 => "CL_INVALID_COMMAND_QUEUE",
        -37 => "CL_INVALID_HOST_PTR",
        -38 => "CL_INVALID_MEM_OBJECT",
        -42 => "CL_INVALID_BINARY",
        -43 => "CL_INVALID_BUILD_OPTIONS",
        -44 => "CL_INVALID_PROGRAM",
        -45 => "CL_INVALID_PROGRAM_EXECUTABLE",
        -46 => "CL_INVALID_KERNEL_NAME",
        -47 => "CL_INVALID_KERNEL_DEFINITION",
        -48 => "CL_INVALID_KERNEL",
        -49 => "CL_INVALID_ARG_INDEX",
        -50 => "CL_INVALID_ARG_VALUE",
        -51 => "CL_INVALID_ARG_SIZE",
        -52 => "CL_INVALID_KERNEL_ARGS",
        -53 => "CL_INVALID_WORK_DIMENSION",
        -54 => "CL_INVALID_WORK_GROUP_SIZE",
        -55 => "CL_INVALID_WORK_ITEM_SIZE",
        -56 => "CL_INVALID_GLOBAL_OFFSET",
        -57 => "CL_INVALID_EVENT_WAIT_LIST",
        -58 => "CL_INVALID_EVENT",
        -59 => "CL_INVALID_OPERATION",
        -61 => "CL_INVALID_BUFFER_SIZE",
        -63 => "CL_INVALID_GLOBAL_WORK_SIZE",
        -64 => "CL_INVALID_PROPERTY",
        -1001 => "CL_PLATFORM_NOT_FOUND_KHR",
        -1138 => "CL_INVALID_COMMAND_BUFFER_KHR",
        -1139 => "CL_INVALID_SYNC_POINT_WAIT_LIST_KHR",
        -1140 => "CL_INCOMPATIBLE_COMMAND_QUEUE_KHR",
        -9999 => "NVIDIA: illegal read or write to a buffer",
        _ => return format!("OpenCL error {code}"),
    };
    format!("{s} ({code})")
}

fn next_step(code: i32) -> &'static str {
    match code {
        -2 | -33 | -36 => {
            "The device may be lost or taken by another process; start again, and look at the system's log"
        }
        -3 => "Install the driver's compiler, or choose another device",
        MEM_OBJECT_ALLOCATION_FAILURE | -5 | OUT_OF_HOST_MEMORY => {
            "Use a smaller batch or free memory on the device; drivers also report this after a kernel that ran too long"
        }
        -54 | -55 => {
            "The device's limit for this kernel is lower than the one it reported; please report the device"
        }
        _ => "Please report this with `halcyon devices --json`; --backend cpu does not need this driver",
    }
}

/// [`Error::Driver`] for a call that returned `code`.
pub(super) fn driver_error(device: &str, call: &str, code: i32) -> Error {
    Error::Driver {
        device: device.into(),
        call: call.into(),
        code: code_name(code),
        next: next_step(code).into(),
    }
}

/// The time at which a command started or ended, in nanoseconds of the device's clock.
pub(super) fn stamp(api: &Api, event: &Owned<Event>, which: u32) -> std::result::Result<u64, i32> {
    let mut t = 0u64;
    // SAFETY: the event is live, and the result is one 64-bit number.
    let code = unsafe {
        (api.clGetEventProfilingInfo)(event.raw(), which, 8, (&raw mut t).cast(), std::ptr::null_mut())
    };
    if code == SUCCESS { Ok(t) } else { Err(code) }
}

/// Fails unless `code` is success.
pub(super) fn check(device: &str, call: &str, code: i32) -> Result<()> {
    if code == SUCCESS { Ok(()) } else { Err(driver_error(device, call, code)) }
}

/// What the user can do if OpenCL is missing.
pub(super) fn fix() -> String {
    let s = if cfg!(target_os = "linux") {
        "Install a GPU driver with OpenCL and the loader (apt-get install ocl-icd-libopencl1), or PoCL to run on the CPU \
         (apt-get install pocl-opencl-icd ocl-icd-libopencl1), or name a library in HALCYON_OPENCL_LIBRARY"
    } else if cfg!(target_os = "windows") {
        "Install the GPU vendor's driver, which brings OpenCL.dll, or name a library in HALCYON_OPENCL_LIBRARY"
    } else {
        "Install an OpenCL driver, or name its library in HALCYON_OPENCL_LIBRARY"
    };
    s.into()
}

/// Environment variable that names the only library to try.
pub(super) const LIBRARY_VARIABLE: &str = "HALCYON_OPENCL_LIBRARY";

/// Names and paths to try, in order.
pub(super) fn candidates() -> Vec<String> {
    if let Some(named) = std::env::var_os(LIBRARY_VARIABLE).filter(|v| !v.is_empty()) {
        return vec![named.to_string_lossy().into_owned()];
    }
    let names: &[&str] = if cfg!(target_os = "windows") {
        &["OpenCL.dll"]
    } else if cfg!(target_os = "macos") {
        &["/System/Library/Frameworks/OpenCL.framework/OpenCL"]
    } else if cfg!(target_os = "android") {
        &["libOpenCL.so", "/vendor/lib64/libOpenCL.so", "/system/vendor/lib64/libOpenCL.so"]
    } else {
        &["libOpenCL.so.1", "libOpenCL.so"]
    };
    names.iter().map(|s| s.to_string()).collect()
}

/// Loads the OpenCL library. Failures are not cached, so a library that is installed later is found.
///
/// # Errors
/// [`Error::Unavailable`] if no library could be used. For every name, the error has the loader's message, or
/// the function that the library lacks.
pub(super) fn load() -> Result<&'static Api> {
    load_from(&candidates())
}

/// [`load`] from the first of these names that works.
pub(super) fn load_from(names: &[String]) -> Result<&'static Api> {
    static LOADED: Mutex<BTreeMap<String, &'static Api>> = Mutex::new(BTreeMap::new());
    let mut loaded = LOADED.lock().unwrap_or_else(|e| e.into_inner());
    let _driver = crate::driver_output::capture("opencl");
    let mut tried = vec![];
    for name in names {
        if let Some(api) = loaded.get(name) {
            return Ok(api);
        }
        // SAFETY: loading runs the initialisers of the library, and a library that lacks a function is
        // unloaded again. Both are sound for an OpenCL library, and this is one: it has the standard name, or
        // the user named it.
        let lib = match unsafe { libloading::Library::new(name) } {
            Ok(l) => l,
            Err(e) => {
                tried.push(format!("{name}: {}", crate::loader::loader_text(name, &e)));
                continue;
            }
        };
        match Api::resolve(&lib, name.clone()) {
            Ok(api) => {
                // Drivers leave threads and exit handlers behind, so a library that is used is never
                // unloaded.
                std::mem::forget(lib);
                let api: &'static Api = Box::leak(Box::new(api));
                loaded.insert(name.clone(), api);
                return Ok(api);
            }
            Err(f) => tried.push(format!("{name}: it has no function {f}")),
        }
    }
    let reason = crate::loader::not_loaded("OpenCL library", &tried);
    Err(Error::Unavailable { backend: "opencl".into(), tried, reason, fix: fix() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_an_error_that_lists_what_was_tried() {
        let e = load_from(&["libnothing-here.so.7".into(), "/nowhere/libOpenCL.so".into()]).unwrap_err();
        let Error::Unavailable { tried, fix, .. } = &e else { panic!("{e}") };
        assert_eq!(tried.len(), 2);
        assert!(
            tried[0].starts_with("libnothing-here.so.7: ") && tried[1].starts_with("/nowhere/libOpenCL.so: ")
        );
        assert!(
            tried[0].len() > "libnothing-here.so.7: ".len() + 5,
            "the loader's reason is there: {tried:?}"
        );
        assert!(!fix.is_empty() && e.exit_code() == 4);
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn a_library_that_is_not_opencl_is_named_with_the_missing_function() {
        let e = load_from(&["libc.so.6".into()]).unwrap_err();
        assert!(e.to_string().contains("libc.so.6: it has no function cl"), "{e}");
    }

    #[test]
    fn codes_have_names() {
        assert_eq!(code_name(-54), "CL_INVALID_WORK_GROUP_SIZE (-54)");
        assert_eq!(code_name(-777), "OpenCL error -777");
        let e = driver_error("opencl:0", "clFinish", -5).to_string();
        assert!(e.contains("clFinish failed on opencl:0: CL_OUT_OF_RESOURCES (-5)"), "{e}");
    }
}
