//! The functions of CUDA and HIP, loaded at run time. HIP has CUDA's driver API under its own names, so one
//! table lists both names of each function. (CUDA: "CUDA Driver API" and "NVRTC" of the toolkit's
//! documentation; HIP: `hip_runtime_api.h` and `hiprtc.h`.)

use super::{Family, VendorLibrary};
use crate::fork::Origin;
use crate::{Error, Result};
use libloading::Library;
use std::collections::BTreeMap;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// A function's result: 0 is success. CUDA and HIP use the same error numbers.
pub(super) type Code = c_int;
/// A stream, event, module or function.
pub(super) type Handle = *mut c_void;
/// A device address.
pub(super) type Address = u64;

pub(super) const SUCCESS: Code = 0;
/// The argument `what` that [`Family::load`] passes to [`Family::first`].
const RUNTIME: &str = "runtime";
/// Results of the initialisation that mean that there is no device: "no device", and in HIP also "invalid
/// device".
pub(super) const NONE: [Code; 2] = [100, 101];
pub(super) const NOT_READY: Code = 600;
pub(super) const PEER_ENABLED: Code = 704;
/// Errors of module loading that mean that the driver cannot use the compiler's output: wrong format, no code
/// for the device, invalid PTX, no PTX compiler, PTX version too new, or not permitted.
pub(super) const REFUSED: [Code; 6] = [200, 209, 218, 221, 222, 223];
/// Stream flag: no implicit synchronisation with the default stream.
pub(super) const NON_BLOCKING: c_uint = 1;
/// Event flag: no time stamp is recorded.
pub(super) const DISABLE_TIMING: c_uint = 2;
/// Capture mode: only the capturing thread is forbidden to make calls that could synchronise.
pub(super) const THREAD_LOCAL: c_int = 1;
/// Host memory flag: usable from every context.
pub(super) const PORTABLE: c_uint = 1;

/// Which of a function's two names applies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Side {
    Cuda,
    Hip,
}

macro_rules! functions {
    ($(#[$doc:meta])* $table:ident { $($field:ident: $cuda:literal, $hip:literal, ($($argument:ty),*);)* }) => {
        $(#[$doc])*
        #[allow(missing_debug_implementations)]
        pub(in crate::simt) struct $table {
            $(pub(in crate::simt) $field: unsafe extern "system" fn($($argument),*) -> $crate::simt::sys::Code,)*
        }

        impl $table {
            /// Resolves the functions in a library; the error is the name of a missing one.
            pub(crate) fn resolve(lib: &libloading::Library, side: $crate::simt::sys::Side) -> std::result::Result<$table, &'static str> {
                Ok($table {
                    $($field: {
                        let name = match side {
                            $crate::simt::sys::Side::Cuda => $cuda,
                            $crate::simt::sys::Side::Hip => $hip,
                        };
                        // SAFETY: both APIs declare this function with this type.
                        let f = unsafe {
                            lib.get::<unsafe extern "system" fn($($argument),*) -> $crate::simt::sys::Code>(name.as_bytes())
                        };
                        *f.map_err(|_| name)?
                    },)*
                })
            }
        }
    };
}
pub(super) use functions;

functions! {
    /// Functions of CUDA or HIP.
    Functions {
        init: "cuInit", "hipInit", (c_uint);
        driver_version: "cuDriverGetVersion", "hipDriverGetVersion", (*mut c_int);
        device_count: "cuDeviceGetCount", "hipGetDeviceCount", (*mut c_int);
        device: "cuDeviceGet", "hipDeviceGet", (*mut c_int, c_int);
        device_name: "cuDeviceGetName", "hipDeviceGetName", (*mut c_char, c_int, c_int);
        device_memory: "cuDeviceTotalMem_v2", "hipDeviceTotalMem", (*mut usize, c_int);
        device_attribute: "cuDeviceGetAttribute", "hipDeviceGetAttribute", (*mut c_int, c_int, c_int);
        device_bus: "cuDeviceGetPCIBusId", "hipDeviceGetPCIBusId", (*mut c_char, c_int, c_int);
        memory_info: "cuMemGetInfo_v2", "hipMemGetInfo", (*mut usize, *mut usize);
        wait: "cuCtxSynchronize", "hipDeviceSynchronize", ();
        alloc: "cuMemAlloc_v2", "hipMalloc", (*mut Address, usize);
        free: "cuMemFree_v2", "hipFree", (Address);
        alloc_host: "cuMemHostAlloc", "hipHostMalloc", (*mut *mut c_void, usize, c_uint);
        free_host: "cuMemFreeHost", "hipHostFree", (*mut c_void);
        write: "cuMemcpyHtoDAsync_v2", "hipMemcpyHtoDAsync", (Address, *const c_void, usize, Handle);
        read: "cuMemcpyDtoHAsync_v2", "hipMemcpyDtoHAsync", (*mut c_void, Address, usize, Handle);
        copy: "cuMemcpyDtoDAsync_v2", "hipMemcpyDtoDAsync", (Address, Address, usize, Handle);
        fill: "cuMemsetD8Async", "hipMemsetD8Async", (Address, u8, usize, Handle);
        stream_create: "cuStreamCreate", "hipStreamCreateWithFlags", (*mut Handle, c_uint);
        stream_destroy: "cuStreamDestroy_v2", "hipStreamDestroy", (Handle);
        stream_wait: "cuStreamSynchronize", "hipStreamSynchronize", (Handle);
        event_create: "cuEventCreate", "hipEventCreateWithFlags", (*mut Handle, c_uint);
        event_destroy: "cuEventDestroy_v2", "hipEventDestroy", (Handle);
        event_record: "cuEventRecord", "hipEventRecord", (Handle, Handle);
        event_query: "cuEventQuery", "hipEventQuery", (Handle);
        event_wait: "cuEventSynchronize", "hipEventSynchronize", (Handle);
        stream_behind: "cuStreamWaitEvent", "hipStreamWaitEvent", (Handle, Handle, c_uint);
        event_elapsed: "cuEventElapsedTime", "hipEventElapsedTime", (*mut f32, Handle, Handle);
        module_load: "cuModuleLoadData", "hipModuleLoadData", (*mut Handle, *const c_void);
        module_unload: "cuModuleUnload", "hipModuleUnload", (Handle);
        module_function: "cuModuleGetFunction", "hipModuleGetFunction", (*mut Handle, Handle, *const c_char);
        function_attribute: "cuFuncGetAttribute", "hipFuncGetAttribute", (*mut c_int, c_int, Handle);
        launch: "cuLaunchKernel", "hipModuleLaunchKernel",
            (Handle, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Handle, *mut *mut c_void, *mut *mut c_void);
    }
}

functions! {
    /// Functions for captured graphs. Older versions of CUDA and HIP lack them.
    GraphFunctions {
        begin: "cuStreamBeginCapture_v2", "hipStreamBeginCapture", (Handle, c_int);
        end: "cuStreamEndCapture", "hipStreamEndCapture", (Handle, *mut Handle);
        instantiate: "cuGraphInstantiateWithFlags", "hipGraphInstantiateWithFlags", (*mut Handle, Handle, u64);
        launch: "cuGraphLaunch", "hipGraphLaunch", (Handle, Handle);
        destroy: "cuGraphDestroy", "hipGraphDestroy", (Handle);
        exec_destroy: "cuGraphExecDestroy", "hipGraphExecDestroy", (Handle);
    }
}

functions! {
    /// Functions of the run-time compiler.
    CompilerFunctions {
        version: "nvrtcVersion", "hiprtcVersion", (*mut c_int, *mut c_int);
        create: "nvrtcCreateProgram", "hiprtcCreateProgram",
            (*mut Handle, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char);
        destroy: "nvrtcDestroyProgram", "hiprtcDestroyProgram", (*mut Handle);
        compile: "nvrtcCompileProgram", "hiprtcCompileProgram", (Handle, c_int, *const *const c_char);
        log_size: "nvrtcGetProgramLogSize", "hiprtcGetProgramLogSize", (Handle, *mut usize);
        log: "nvrtcGetProgramLog", "hiprtcGetProgramLog", (Handle, *mut c_char);
        code_size: "nvrtcGetCUBINSize", "hiprtcGetCodeSize", (Handle, *mut usize);
        code: "nvrtcGetCUBIN", "hiprtcGetCode", (Handle, *mut c_char);
    }
}

functions! {
    /// Functions that only NVRTC has, since version 11.2. They return the architectures that NVRTC knows, and
    /// the PTX code of a program. The driver compiles PTX.
    PtxFunctions {
        generations: "nvrtcGetNumSupportedArchs", "nvrtcGetNumSupportedArchs", (*mut c_int);
        generation: "nvrtcGetSupportedArchs", "nvrtcGetSupportedArchs", (*mut c_int);
        size: "nvrtcGetPTXSize", "nvrtcGetPTXSize", (Handle, *mut usize);
        text: "nvrtcGetPTX", "nvrtcGetPTX", (Handle, *mut c_char);
    }
}

/// Resolves one function of a library. If it is missing, the error is the function's name. The type must be
/// the one that the API declares.
macro_rules! get {
    ($lib:ident, $name:literal, ($($argument:ty),*)) => {{
        // SAFETY: the uses below pass the type that the API declares for the function.
        let f = unsafe { $lib.get::<unsafe extern "system" fn($($argument),*) -> Code>($name.as_bytes()) };
        *f.map_err(|_| $name)?
    }};
}

impl PtxFunctions {
    /// The architectures that the compiler knows, as numbers; empty if it does not report them.
    fn architectures(&self) -> Vec<u32> {
        let mut n = 0;
        // SAFETY: the compiler writes one number to `n`.
        if unsafe { (self.generations)(&mut n) } != SUCCESS {
            return vec![];
        }
        let mut all: Vec<c_int> = vec![0; usize::try_from(n).unwrap_or(0)];
        // SAFETY: `all` has room for as many numbers as the compiler reported above.
        match unsafe { (self.generation)(all.as_mut_ptr()) } {
            SUCCESS => all.into_iter().filter_map(|g| u32::try_from(g).ok()).collect(),
            _ => vec![],
        }
    }
}

/// Queries whether a device can access the memory of another.
type CanAccess = unsafe extern "system" fn(*mut c_int, c_int, c_int) -> Code;

/// The functions that copy memory between devices.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Peers {
    /// CUDA identifies devices by their contexts.
    Contexts {
        can: CanAccess,
        enable: unsafe extern "system" fn(Handle, c_uint) -> Code,
        copy: unsafe extern "system" fn(Address, Handle, Address, Handle, usize, Handle) -> Code,
    },
    /// HIP identifies devices by their numbers.
    Devices {
        can: CanAccess,
        enable: unsafe extern "system" fn(c_int, c_uint) -> Code,
        copy: unsafe extern "system" fn(Address, c_int, Address, c_int, usize, Handle) -> Code,
    },
}

impl Peers {
    fn resolve(lib: &Library, side: Side) -> std::result::Result<Peers, &'static str> {
        Ok(match side {
            Side::Cuda => Peers::Contexts {
                can: get!(lib, "cuDeviceCanAccessPeer", (*mut c_int, c_int, c_int)),
                enable: get!(lib, "cuCtxEnablePeerAccess", (Handle, c_uint)),
                copy: get!(lib, "cuMemcpyPeerAsync", (Address, Handle, Address, Handle, usize, Handle)),
            },
            Side::Hip => Peers::Devices {
                can: get!(lib, "hipDeviceCanAccessPeer", (*mut c_int, c_int, c_int)),
                enable: get!(lib, "hipDeviceEnablePeerAccess", (c_int, c_uint)),
                copy: get!(lib, "hipMemcpyPeerAsync", (Address, c_int, Address, c_int, usize, Handle)),
            },
        })
    }
}

/// How a thread selects the device of its next calls.
#[derive(Clone, Copy)]
enum Current {
    /// CUDA: the device's primary context, which must be retained first.
    Context {
        retain: unsafe extern "system" fn(*mut Handle, c_int) -> Code,
        release: unsafe extern "system" fn(c_int) -> Code,
        set: unsafe extern "system" fn(Handle) -> Code,
        push: unsafe extern "system" fn(Handle) -> Code,
        pop: unsafe extern "system" fn(*mut Handle) -> Code,
    },
    /// HIP: the device number.
    Device {
        set: unsafe extern "system" fn(c_int) -> Code,
        get: unsafe extern "system" fn(*mut c_int) -> Code,
    },
}

/// The loaded library of CUDA or HIP.
#[allow(missing_debug_implementations)]
pub struct Api {
    pub(super) f: Functions,
    /// The error is the name of a missing function.
    pub(super) graphs: std::result::Result<GraphFunctions, &'static str>,
    pub(super) peers: std::result::Result<Peers, &'static str>,
    current: Current,
    pub library: String,
    pub family: &'static Family,
}

/// A loaded run-time compiler.
#[allow(missing_debug_implementations)]
pub struct Compiler {
    pub(super) f: CompilerFunctions,
    pub(super) ptx: Option<PtxFunctions>,
    pub library: String,
    pub family: &'static Family,
    pub version: (i32, i32),
    /// The architectures that the compiler knows, as numbers (90 is sm_90); empty if it does not report them.
    pub generations: Vec<u32>,
}

impl std::fmt::Debug for Api {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Api({})", self.library)
    }
}

impl std::fmt::Debug for Compiler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Compiler({})", self.describe())
    }
}

impl Compiler {
    /// For messages: `libnvrtc.so.12 12.9`.
    pub fn describe(&self) -> String {
        format!("{} {}.{}", self.library, self.version.0, self.version.1)
    }
}

impl Current {
    fn resolve(lib: &Library, side: Side) -> std::result::Result<Current, &'static str> {
        Ok(match side {
            Side::Cuda => Current::Context {
                retain: get!(lib, "cuDevicePrimaryCtxRetain", (*mut Handle, c_int)),
                release: get!(lib, "cuDevicePrimaryCtxRelease_v2", (c_int)),
                set: get!(lib, "cuCtxSetCurrent", (Handle)),
                push: get!(lib, "cuCtxPushCurrent_v2", (Handle)),
                pop: get!(lib, "cuCtxPopCurrent_v2", (*mut Handle)),
            },
            Side::Hip => Current::Device {
                set: get!(lib, "hipSetDevice", (c_int)),
                get: get!(lib, "hipGetDevice", (*mut c_int)),
            },
        })
    }
}

impl Api {
    /// Major version of the driver's API.
    pub fn major(&self) -> Option<u32> {
        let mut v = 0;
        // SAFETY: CUDA or HIP writes one number to `v`.
        let code = unsafe { (self.f.driver_version)(&mut v) };
        let v = u32::try_from(v).ok().filter(|v| code == SUCCESS && *v > 0)?;
        Some(match self.family.side {
            Side::Cuda => v / 1000,
            Side::Hip => v / 10_000_000,
        })
    }
}

/// A retained device context. After [`Context::enter`], the thread's calls of CUDA or HIP refer to this
/// device.
#[derive(Debug)]
pub(crate) struct Context {
    pub api: &'static Api,
    /// The device number of CUDA or HIP.
    pub device: c_int,
    /// CUDA's primary context; null in HIP.
    raw: Handle,
    /// `cuda:0`.
    pub id: String,
    /// The process that opened the device.
    origin: Origin,
}

// SAFETY: `raw` is an opaque handle of CUDA or HIP, whose functions may be called from any thread.
unsafe impl Send for Context {}
// SAFETY: no field is modified after construction, and the functions of CUDA and HIP are thread-safe.
unsafe impl Sync for Context {}

impl Context {
    pub(crate) fn new(api: &'static Api, device: c_int, id: String) -> Result<Context> {
        let mut raw: Handle = std::ptr::null_mut();
        if let Current::Context { retain, .. } = api.current {
            // SAFETY: CUDA listed the device number `device`, and writes one handle to `raw`.
            check(api, &id, "cuDevicePrimaryCtxRetain", unsafe { retain(&mut raw, device) })?;
        }
        let c = Context { api, device, raw, id, origin: Origin::here() };
        c.enter()?;
        Ok(c)
    }

    /// Free device memory in bytes, as CUDA or HIP reports it. If the device shares host memory, this is at
    /// most the host's free memory.
    pub(crate) fn free_memory(&self, unified: bool) -> Option<u64> {
        self.enter().ok()?;
        let (mut free, mut total) = (0usize, 0usize);
        // SAFETY: CUDA or HIP writes one number each to `free` and `total`.
        let code = unsafe { (self.api.f.memory_info)(&mut free, &mut total) };
        let told = (code == SUCCESS).then_some(free as u64);
        let host = if unified { halcyon_host::memory().map(|m| m.0) } else { None };
        match (told, host) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    }

    /// Makes this device the current device of the calling thread.
    pub(crate) fn enter(&self) -> Result<()> {
        self.origin.check(self.api.family.kind, &self.id)?;
        let (call, code) = match self.api.current {
            // SAFETY: `new` retained the context.
            Current::Context { set, .. } => ("cuCtxSetCurrent", unsafe { set(self.raw) }),
            // SAFETY: HIP listed the device number `self.device`.
            Current::Device { set, .. } => ("hipSetDevice", unsafe { set(self.device) }),
        };
        self.check(call, code)
    }

    /// Waits for all work on the device in this context, that of other libraries included.
    pub(crate) fn wait(&self) -> Result<()> {
        let _visit = self.visit()?;
        // SAFETY: the function has no arguments; `visit` made the context current.
        self.check("waiting for the device", unsafe { (self.api.f.wait)() })
    }

    /// Makes this device the current device of the thread until the returned value is dropped. Then restores
    /// the previous device. Destructors use this, because they may run in the middle of another device's
    /// work.
    pub(crate) fn visit(&self) -> Result<Visit<'_>> {
        self.origin.check(self.api.family.kind, &self.id)?;
        let mut before = None;
        match self.api.current {
            Current::Context { push, .. } => {
                // SAFETY: `new` retained the context.
                self.check("cuCtxPushCurrent", unsafe { push(self.raw) })?;
            }
            Current::Device { get, .. } => {
                let mut device = 0;
                // SAFETY: HIP writes one number to `device`.
                self.check("hipGetDevice", unsafe { get(&mut device) })?;
                before = Some(device).filter(|d| *d != self.device);
                self.enter()?;
            }
        }
        Ok(Visit { context: self, before })
    }

    /// Whether this device can access the memory of another.
    pub(crate) fn reaches(&self, peers: Peers, other: &Context) -> Result<bool> {
        let (Peers::Contexts { can, .. } | Peers::Devices { can, .. }) = peers;
        let mut yes = 0;
        // SAFETY: CUDA or HIP writes one number to `yes`, and listed both device numbers.
        let code = unsafe { can(&mut yes, self.device, other.device) };
        self.check("querying access to another device", code)?;
        Ok(yes != 0)
    }

    /// Enables access to another device's memory. The thread must have entered this device. Repeated calls
    /// succeed.
    pub(crate) fn reach(&self, peers: Peers, other: &Context) -> Result<()> {
        let code = match peers {
            // SAFETY: `other.raw` is a retained context; no flags are defined.
            Peers::Contexts { enable, .. } => unsafe { enable(other.raw, 0) },
            // SAFETY: HIP listed the device number `other.device`; no flags are defined.
            Peers::Devices { enable, .. } => unsafe { enable(other.device, 0) },
        };
        match code {
            PEER_ENABLED => Ok(()),
            code => self.check("reaching another device", code),
        }
    }

    /// Enqueues a copy from another device in a stream of this one.
    ///
    /// # Safety
    /// Both ranges of `bytes` bytes must lie in live allocations of their devices until the copy is done, and
    /// `stream` must be a live stream of this device.
    pub(crate) unsafe fn copy_peer(
        &self,
        peers: Peers,
        to: Address,
        (other, from): (&Context, Address),
        bytes: usize,
        stream: Handle,
    ) -> Code {
        match peers {
            // SAFETY: `copy_peer` requires valid ranges and a live stream; both contexts are retained.
            Peers::Contexts { copy, .. } => unsafe { copy(to, self.raw, from, other.raw, bytes, stream) },
            // SAFETY: `copy_peer` requires valid ranges and a live stream; HIP listed both device numbers.
            Peers::Devices { copy, .. } => unsafe {
                copy(to, self.device, from, other.device, bytes, stream)
            },
        }
    }

    /// Fails unless `code` is success.
    pub(crate) fn check(&self, call: &str, code: Code) -> Result<()> {
        check(self.api, &self.id, call, code)
    }
}

/// See [`Context::visit`].
#[derive(Debug)]
pub(crate) struct Visit<'a> {
    context: &'a Context,
    /// In HIP, the device that was current before, if it was not this one.
    before: Option<c_int>,
}

impl Drop for Visit<'_> {
    fn drop(&mut self) {
        let code = match (self.context.api.current, self.before) {
            (Current::Context { pop, .. }, _) => {
                let mut popped: Handle = std::ptr::null_mut();
                // SAFETY: CUDA writes one handle to `popped`; `visit` pushed the context in this thread.
                unsafe { pop(&mut popped) }
            }
            // SAFETY: `hipGetDevice` returned this number in `visit`.
            (Current::Device { set, .. }, Some(device)) => unsafe { set(device) },
            (Current::Device { .. }, None) => SUCCESS,
        };
        if code != SUCCESS {
            let code = code_name(self.context.api.family, code);
            tracing::warn!(device = self.context.id, %code, "the thread could not switch back to the device that it used before");
        }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if let Current::Context { release, .. } = self.api.current {
            // SAFETY: `new` retained the context once. Everything that was created in the context holds a
            // reference to this `Context`, so everything was destroyed before this drop.
            let code = unsafe { release(self.device) };
            if code != SUCCESS {
                tracing::warn!(device = self.id, code = %code_name(self.api.family, code), "the context could not be released");
            }
        }
    }
}

/// An error's name and number. HIP's error names differ from CUDA's only in spelling, so both share these
/// descriptions.
pub(super) fn code_name(family: &Family, code: Code) -> String {
    let s = match code {
        1 => "invalid value",
        2 => "out of memory",
        3 => "not initialised",
        4 => "the driver is shutting down",
        35 => "the driver is older than the library",
        46 => "the device is taken by another process",
        100 => "no device",
        101 => "invalid device",
        200 => "invalid image",
        201 => "invalid context",
        209 => "no binary for this device",
        214 => "memory error that could not be corrected",
        218 => "invalid source or binary",
        217 => "peer access is not supported",
        221 => "the driver's PTX compiler was not found",
        222 => "made by a newer compiler than the driver supports",
        223 => "the driver's PTX compiler is disabled",
        303 => "a shared object could not be initialised",
        304 => "the operating system refused a call",
        400 => "invalid handle",
        500 => "not found",
        600 => "not ready",
        700 => "illegal address",
        701 => "too many resources for a launch",
        702 => "a launch ran too long",
        704 => "peer access is enabled already",
        705 => "peer access is not enabled",
        715 => "illegal instruction",
        716 => "misaligned address",
        717 => "invalid address space",
        718 => "invalid program counter",
        719 => "a launch failed",
        801 => "not supported",
        802 => "the system is not ready",
        803 => "driver and library do not match",
        804 => "the device does not support compatibility mode",
        900 => "the call is not permitted during a capture",
        901 => "the capture was ended by an earlier error",
        902..=907 => "a capture with invalid dependencies between streams",
        _ => "unknown error",
    };
    format!("{} error {code} ({s})", family.title)
}

fn next_step(code: Code) -> &'static str {
    match code {
        2 => "Use a smaller batch or free memory on the device",
        35 | 803 | 804 => "Update the GPU's driver",
        46 => "Let the other process end, or choose another device",
        209 | 218 | 221..=223 => {
            "Use a run-time compiler that is no newer than the driver, or update the driver"
        }
        214 | 700 | 702 | 715..=719 => {
            "This process can no longer use the device; start the program again, and look for the cause in the system's log"
        }
        801 => "Choose another device",
        _ => {
            "Please report this with the output of `halcyon devices --json`; --backend cpu works without this driver"
        }
    }
}

/// [`Error::Driver`] for a call that returned `code`.
pub(super) fn driver_error(family: &Family, device: &str, call: &str, code: Code) -> Error {
    Error::Driver {
        device: device.into(),
        call: call.into(),
        code: code_name(family, code),
        next: next_step(code).into(),
    }
}

fn check(api: &Api, device: &str, call: &str, code: Code) -> Result<()> {
    if code == SUCCESS { Ok(()) } else { Err(driver_error(api.family, device, call, code)) }
}

/// A non-empty environment variable.
fn variable(name: &str) -> Option<String> {
    std::env::var_os(name).filter(|v| !v.is_empty()).map(|v| v.to_string_lossy().into_owned())
}

impl Family {
    /// Names and paths to try for the library of CUDA or HIP, in order.
    pub fn candidates(&self) -> Vec<String> {
        match variable(self.library_variable) {
            Some(named) => vec![named],
            None => self.with_folders(self.libraries, &[]),
        }
    }

    /// Names and paths to try for the run-time compiler, in order: the loader's path, the toolkit's
    /// directories, Python packages.
    pub fn compiler_candidates(&self) -> Vec<String> {
        match variable(self.compiler_variable) {
            Some(named) => vec![named],
            None => self.with_folders(self.compilers, self.packages),
        }
    }

    /// Names and paths to try for another vendor library, in order.
    pub fn library_candidates(&self, l: &VendorLibrary) -> Vec<String> {
        match variable(l.variable) {
            Some(named) => vec![named],
            None => self.with_folders(l.names, l.packages),
        }
    }

    /// Libraries that the probe does not load: the compiler, which is loaded when a device is opened, and the
    /// vendor libraries with kernels, each loaded by the first call that needs it.
    pub fn later(&self) -> Vec<String> {
        let more = self.kernel_libraries().flat_map(|l| self.library_candidates(l));
        self.compiler_candidates().into_iter().chain(more).collect()
    }

    /// The vendor's libraries with kernels.
    pub fn kernel_libraries(&self) -> impl Iterator<Item = &VendorLibrary> {
        let all = [Some(&self.products), self.plain_products.as_ref(), self.convolutions.as_ref()];
        all.into_iter().flatten()
    }

    fn with_folders(&self, names: &[&str], packages: &[&str]) -> Vec<String> {
        let mut all: Vec<String> = names.iter().map(|n| n.to_string()).collect();
        let mut folders: Vec<PathBuf> = vec![];
        let toolkits = self.toolkit_variables.iter().filter_map(|v| variable(v)).map(PathBuf::from);
        for toolkit in toolkits.chain(self.toolkits.iter().map(PathBuf::from)) {
            folders.extend(["lib64", "lib", "bin", "targets/x86_64-linux/lib"].map(|d| toolkit.join(d)));
        }
        let sites = if packages.is_empty() { vec![] } else { halcyon_host::python::packages() };
        let packages = packages.iter().flat_map(|p| sites.iter().map(move |s| s.join(p)));
        for folder in folders.into_iter().chain(packages) {
            let there = names.iter().map(|n| folder.join(n)).filter(|p| p.is_file());
            all.extend(there.map(|p| p.display().to_string()));
        }
        all
    }

    /// Loads the library of CUDA or HIP. Failures are not remembered, so a library that is installed later is
    /// found.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if no library could be used. It lists for every name the loader's message, or
    /// the function that the library lacks.
    ///
    /// # Safety
    /// Loading each of `names`, which runs its initialisers, must be sound, and so must unloading it again if
    /// it lacks a function. A name that cannot be loaded is skipped. If a library has a function of CUDA or
    /// HIP, the function must have the type that the vendor declares.
    pub unsafe fn load(&'static self, names: &[String]) -> Result<&'static Api> {
        static LOADED: Mutex<BTreeMap<String, &'static Api>> = Mutex::new(BTreeMap::new());
        let resolve = |lib: &Library, name: &str| {
            let (f, current) = (Functions::resolve(lib, self.side)?, Current::resolve(lib, self.side)?);
            let graphs = GraphFunctions::resolve(lib, self.side);
            let peers = Peers::resolve(lib, self.side);
            Ok(Api { f, graphs, peers, current, library: name.into(), family: self })
        };
        // SAFETY: `load` requires that loading and unloading the libraries is sound, and functions with the
        // types that the vendor declares, which are the types that `resolve` gives them.
        unsafe { self.first(&LOADED, names, RUNTIME, self.fix, &resolve) }
    }

    /// Loads the run-time compiler.
    ///
    /// # Errors
    /// The errors of [`Family::load`].
    ///
    /// # Safety
    /// The contract of [`Family::load`], but for libraries of the compiler and its functions.
    pub unsafe fn compiler(&'static self, names: &[String]) -> Result<&'static Compiler> {
        static LOADED: Mutex<BTreeMap<String, &'static Compiler>> = Mutex::new(BTreeMap::new());
        let resolve = |lib: &Library, name: &str| {
            let f = CompilerFunctions::resolve(lib, self.side)?;
            let ptx = match self.side {
                Side::Cuda => PtxFunctions::resolve(lib, self.side).ok(),
                Side::Hip => None,
            };
            let mut version = (0, 0);
            // SAFETY: the compiler writes one number each to the two fields.
            unsafe { (f.version)(&mut version.0, &mut version.1) };
            let generations = ptx.as_ref().map_or_else(Vec::new, PtxFunctions::architectures);
            Ok(Compiler { f, ptx, library: name.into(), family: self, version, generations })
        };
        // SAFETY: `compiler` requires that loading and unloading the libraries is sound, and functions with
        // the types that the vendor declares, which are the types that `resolve` gives them.
        unsafe { self.first(&LOADED, names, "run-time compiler", self.compiler_fix, &resolve) }
    }

    /// Loads the first library of `names` in which `resolve` finds every function. This library is never
    /// unloaded. A library that lacks a function is unloaded again.
    ///
    /// # Safety
    /// Loading each of `names`, which runs its initialisers, must be sound, and so must unloading it again if
    /// it lacks a function. A name that cannot be loaded is skipped. If a library has a function that
    /// `resolve` looks up, the function must have the type that `resolve` gives it.
    pub(super) unsafe fn first<T>(
        &self,
        loaded: &Mutex<BTreeMap<String, &'static T>>,
        names: &[String],
        what: &str,
        fix: &str,
        resolve: &dyn Fn(&Library, &str) -> std::result::Result<T, &'static str>,
    ) -> Result<&'static T> {
        let mut loaded = loaded.lock().unwrap_or_else(|e| e.into_inner());
        let _driver = crate::driver_output::capture(self.kind.id());
        let mut tried = vec![];
        for name in names {
            // One library name may be given for both families, so the family is part of the key.
            let key = format!("{} {name}", self.kind);
            if let Some(t) = loaded.get(&key) {
                return Ok(t);
            }
            // SAFETY: `first` requires that loading the library, which runs its initialisers, is sound, and
            // that unloading it is sound.
            let lib = match unsafe { Library::new(name) } {
                Ok(l) => l,
                Err(e) => {
                    tried.push(format!("{name}: {}", crate::loader::loader_text(name, &e)));
                    continue;
                }
            };
            match resolve(&lib, name) {
                Ok(t) => {
                    // Vendors' libraries start threads and register exit handlers, so a library that is used
                    // is never unloaded.
                    std::mem::forget(lib);
                    let t: &'static T = Box::leak(Box::new(t));
                    loaded.insert(key, t);
                    return Ok(t);
                }
                Err(f) => tried.push(format!("{name}: it has no function {f}")),
            }
        }
        let reason = match what {
            RUNTIME => crate::loader::not_loaded(self.runtime, &tried),
            _ => format!("no {what} of {} could be loaded", self.title),
        };
        Err(Error::Unavailable { backend: self.kind.id().into(), tried, reason, fix: fix.into() })
    }
}

/// Sorts the names of libraries that have the version of CUDA or HIP in their file names, so that those most
/// likely to work with a driver of this major version come first: the driver's version and older ones, newest
/// first; then names without a version; then newer versions, oldest first.
pub(super) fn by_major(mut names: Vec<String>, driver: u32) -> Vec<String> {
    names.sort_by_cached_key(|n| match major_of(n) {
        Some(m) if m <= driver => (0, driver - m),
        None => (1, 0),
        Some(m) => (2, m),
    });
    names
}

/// The major version in a file name: `libnvrtc.so.12`, `nvrtc64_120_0.dll`. If an absolute path has no
/// version in its file name, the file that the path links to is used.
fn major_of(name: &str) -> Option<u32> {
    let of = |file: &str| -> Option<u32> {
        match (file.split_once(".so."), file.strip_suffix(".dll")) {
            (Some((_, v)), _) => v.split('.').next()?.parse().ok(),
            (None, Some(stem)) => {
                let v = stem.split_once("64_")?.1.split('_').next()?;
                let v: u32 = v.parse().ok()?;
                // The number may end with the digit of the minor version: `120` or `12`.
                Some(if v >= 100 { v / 10 } else { v })
            }
            _ => None,
        }
    };
    let path = Path::new(name);
    let file = |p: &Path| p.file_name().and_then(|f| of(&f.to_string_lossy()));
    file(path).or_else(|| path.is_absolute().then(|| file(&path.canonicalize().ok()?)).flatten())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_of_the_drivers_version_come_first() {
        let dir = tempfile::tempdir().unwrap();
        let at = |n: &str| dir.path().join(n).display().to_string();
        std::fs::write(at("libnvrtc.so.11.8.89"), "").unwrap();
        let mut names: Vec<String> =
            ["libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so.11.2", "/x/libnvrtc.so.12"]
                .map(String::from)
                .into();
        let mut want: Vec<String> = [names[2].clone(), names[4].clone(), names[3].clone()].into();
        #[cfg(unix)]
        {
            std::os::unix::fs::symlink(at("libnvrtc.so.11.8.89"), at("libnvrtc.so")).unwrap();
            names.push(at("libnvrtc.so"));
            want.push(at("libnvrtc.so"));
        }
        want.extend([names[0].clone(), names[1].clone()]);
        assert_eq!(by_major(names, 12), want);
        let dlls = ["nvrtc64_130_0.dll", "nvrtc64_120_0.dll", "nvrtc64_112_0.dll", "cublasLt64_12.dll"];
        assert_eq!(dlls.map(major_of), [Some(13), Some(12), Some(11), Some(12)]);
        assert_eq!(major_of("hiprtc0604.dll"), None);
    }
}
