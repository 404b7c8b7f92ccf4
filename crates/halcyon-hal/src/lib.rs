//! Hardware abstraction layer: drivers, devices, memory and device selection. All FFI of the project is in
//! this crate, except the calls of ONNX Runtime, which are in `halcyon-ort`, and those with which tests
//! control their stand-ins.
//!
//! The driver contract, which [`conformance`] checks for every driver:
//! - Probing never panics. If a library is missing, the error is [`Error::Unavailable`], which lists what was
//!   tried and says what the user can do.
//! - A device runs its work in order: the commands of one [`Device::submit`] and of successive calls behave
//!   as if they ran one after another. [`Device::read`] waits for everything submitted before it. [`stream`]s
//!   are additional queues that may run concurrently with the device's queue; work that uses the same memory
//!   is still ordered.
//! - The caller validates shapes and bindings (with the verifier in [`halcyon_ir::kernel`]). A device
//!   validates the buffers of copies and of library kernels, whose sizes it knows, and the number of buffers
//!   and parameters of a launch. It returns typed errors for these, and for failures that only the driver
//!   detects (memory, compilation, a lost device).
//! - A new buffer's contents are undefined. A correct kernel never accesses bytes past the end of a buffer.
//!   Which bytes a generated kernel accesses depends on its parameters, so only the running kernel can check
//!   its accesses. On `cpu`, an access past the end is skipped and reported as an error. On `webgpu`, it is
//!   skipped or uses another element of the same buffer, depending on the device. On `cuda`, `rocm` and
//!   `opencl` nothing checks accesses. For these three, the interpreter tests the kernels of
//!   [`halcyon_ir::kernel::templates`]; the author of any other kernel is responsible for its accesses.
//! - A kernel that meets an index out of range clamps it and sets the device's fault word, see
//!   [`Device::take_fault`].

// rustfmt finds the modules inside a macro only if the macro has this name.
macro_rules! cfg_if {
    (if #[cfg($condition:meta)] { $($item:item)* }) => {
        $(#[cfg($condition)] $item)*
    };
}

// The drivers that load a library. In the table of backends, rows marked `native` have the same condition.
cfg_if! {
    if #[cfg(not(target_arch = "wasm32"))] {
        #[cfg(feature = "cuda")]
        pub mod cuda;
        #[cfg(feature = "opencl")]
        pub mod opencl;
        #[cfg(feature = "rocm")]
        pub mod rocm;
        #[cfg(feature = "simt")]
        pub mod simt;
        #[cfg(feature = "tpu")]
        pub mod tpu;
        #[cfg(feature = "webgpu")]
        pub mod webgpu;
    }
}

// Modules with `allow(dead_code)` are shared by drivers; a build with few drivers uses only a part of them.

pub mod backend;
#[cfg(not(target_arch = "wasm32"))]
pub mod cache;
pub mod capture;
#[cfg(not(target_arch = "wasm32"))]
pub mod child;
#[allow(dead_code)]
mod commands;
pub mod config;
#[cfg(not(target_arch = "wasm32"))]
pub mod conformance;
#[cfg(feature = "cpu")]
pub mod cpu;
pub mod driver_output;
mod exchange;
#[allow(dead_code)]
pub mod fork;
#[allow(dead_code)]
mod hazard;
pub mod heap;
pub mod host_buffer;
#[allow(dead_code)]
mod library_call;
#[allow(dead_code)]
mod loader;
pub mod noop;
pub mod policy;
pub mod pool;
#[cfg(not(target_arch = "wasm32"))]
pub mod probe;
#[allow(dead_code)]
mod queues;
#[allow(dead_code)]
mod reach;
#[allow(dead_code)]
mod recorded;
pub mod registry;
pub mod select;
pub mod stream;
pub mod tune;
pub mod validate;

pub use backend::{BackendType, DeviceName, Torch};
pub use capture::{Capture, Recording};
pub use exchange::{DeviceMemory, Exported};
pub use halcyon_host as host;
pub use halcyon_ir::error::{Error, Result};
pub use halcyon_ir::target::{Caps, Declined, LibraryCall, LibraryKernel, Operand, Target};
pub use host_buffer::HostBuffer;
pub use pool::{Accounts, AllocationStrategy, Defragmented, MemoryPoolConfig};
pub use stream::{Download, Event, Stream, StreamOptions};

use halcyon_ir::Scalar;
use halcyon_ir::kernel::Kernel;
use serde::{Deserialize, Serialize};
use std::any::Any;
use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Properties of a device as reported by its driver. A field is `None` if the driver does not report it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DeviceInfo {
    pub backend: BackendType,
    /// `cpu:0`, `opencl:1`.
    pub id: String,
    pub index: usize,
    pub name: String,
    pub vendor: String,
    pub driver_version: Option<String>,
    /// Bytes.
    pub total_memory: Option<u64>,
    /// Free device memory in bytes when the device was probed or opened. `None` if the driver has no such
    /// query, or if [`Driver::list`] left the query out.
    pub free_memory: Option<u64>,
    pub compute_capability: Option<String>,
    pub compute_units: Option<u32>,
    pub unified_memory: bool,
    /// Whether this is a software device, which runs on the CPU (PoCL, lavapipe). Automatic selection tries
    /// it after all other devices, see [`select`].
    pub software: bool,
    /// Further driver-specific properties, under the driver's names.
    pub properties: BTreeMap<String, String>,
}

/// The purpose of an allocation.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Tag {
    Weights,
    Activations,
    State,
    Workspace,
    Io,
    /// Keys and values of attention.
    Kv,
    /// The optimiser's state for each parameter.
    Optimizer,
}

/// Device memory. Dropping the last reference returns it to the device's pool.
pub trait Buffer: Send + Sync + fmt::Debug {
    fn bytes(&self) -> usize;
    /// Identifies the buffer's memory on a device that supports [`Device::capture`]. Buffers with equal
    /// numbers are in the same memory, until buffers are moved.
    fn place(&self) -> Option<u64> {
        None
    }
    /// Whether commands may write to the buffer. They may not if its memory was imported
    /// ([`Device::import`]).
    fn is_writable(&self) -> bool {
        true
    }
    fn as_any(&self) -> &dyn Any;
}
pub type BufferRef = Arc<dyn Buffer>;

/// The work of [`Device::supply`]. Dropping it waits for the end of the work.
#[derive(Debug, Default)]
pub struct Supply(Option<(std::thread::JoinHandle<()>, fork::Origin)>);

impl Supply {
    /// Runs `work` on a thread. If no thread can be started, the memory is supplied at the first access.
    #[cfg(feature = "cpu")]
    pub(crate) fn start(work: impl FnOnce() + Send + 'static) -> Supply {
        let thread = std::thread::Builder::new().name("halcyon-supply".into()).spawn(work);
        Supply(thread.ok().map(|t| (t, fork::Origin::here())))
    }
}

impl Drop for Supply {
    fn drop(&mut self) {
        match self.0.take() {
            // The work cannot panic, and there is nothing to undo if it did.
            Some((t, origin)) if origin.is_here() => drop(t.join()),
            // The thread does not exist in a forked child.
            other => std::mem::forget(other),
        }
    }
}

/// A compiled kernel.
pub trait Program: Send + Sync + fmt::Debug {
    fn name(&self) -> &str;
    /// The source passed to the device's compiler, if any.
    fn source(&self) -> Option<&str> {
        None
    }
    fn as_any(&self) -> &dyn Any;
}

/// One unit of submitted work.
#[derive(Debug)]
pub enum Command<'a> {
    /// `buffers` and `params` are in the kernel's order. A kernel that can fault (`Stmt::SetError`) declares
    /// the fault word (u32) as its last buffer, and a parameter named `fault`. The device binds this buffer
    /// itself, so `buffers` leaves it out. `params` has an entry for the parameter, but the device passes
    /// this command's `fault`, which must not be 0, in its place.
    Launch {
        program: &'a Arc<dyn Program>,
        groups: [u32; 3],
        buffers: &'a [BufferRef],
        params: &'a [Scalar],
        fault: u32,
    },
    /// `buffers` are the inputs, the outputs, then the workspace if the kernel needs one. `args` are the
    /// plan's run-time arguments.
    Library {
        kernel: &'a Arc<dyn LibraryKernel>,
        buffers: &'a [BufferRef],
        args: &'a [Scalar],
        fault: u32,
    },
    Copy {
        src: &'a BufferRef,
        src_offset: usize,
        dst: &'a BufferRef,
        dst_offset: usize,
        bytes: usize,
    },
}

/// Device time of one command, when profiling is on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Timing {
    pub nanoseconds: u64,
}

/// Counters of a device since it was opened. Each is incremented by the code that does the work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counters {
    /// Kernels compiled by the device's compiler or prepared by its interpreter.
    pub compiles: u64,
    /// Kernels found in the disk cache.
    pub compile_cache_hits: u64,
    pub launches: u64,
    pub library_calls: u64,
    pub uploads: u64,
    pub uploaded_bytes: u64,
    pub downloads: u64,
    pub downloaded_bytes: u64,
    pub device_copies: u64,
    /// Allocations requested from the driver or the operating system. Requests that the pool served from its
    /// cached memory are not counted.
    pub allocations: u64,
    /// Launches of captures ([`Device::capture`]). Their commands are included in the counters above as if
    /// they were submitted.
    #[serde(default)]
    pub capture_launches: u64,
    /// Bytes copied directly from other devices ([`Device::copy_from_peer`]).
    #[serde(default)]
    pub peer_bytes: u64,
    /// Algorithms of vendors' libraries that were measured ([`Options::algorithm_search`]).
    #[serde(default)]
    pub algorithms_measured: u64,
}

/// The atomic counters behind [`Counters`].
#[derive(Debug, Default)]
pub struct Counts {
    pub compiles: AtomicU64,
    pub compile_cache_hits: AtomicU64,
    pub launches: AtomicU64,
    pub library_calls: AtomicU64,
    pub uploads: AtomicU64,
    pub uploaded_bytes: AtomicU64,
    pub downloads: AtomicU64,
    pub downloaded_bytes: AtomicU64,
    pub device_copies: AtomicU64,
    pub allocations: AtomicU64,
    pub capture_launches: AtomicU64,
    pub peer_bytes: AtomicU64,
    pub algorithms_measured: AtomicU64,
}

impl Counts {
    pub fn add(c: &AtomicU64, n: u64) {
        c.fetch_add(n, Ordering::Relaxed);
    }

    pub fn snapshot(&self) -> Counters {
        let g = |c: &AtomicU64| c.load(Ordering::Relaxed);
        Counters {
            compiles: g(&self.compiles),
            compile_cache_hits: g(&self.compile_cache_hits),
            launches: g(&self.launches),
            library_calls: g(&self.library_calls),
            uploads: g(&self.uploads),
            uploaded_bytes: g(&self.uploaded_bytes),
            downloads: g(&self.downloads),
            downloaded_bytes: g(&self.downloaded_bytes),
            device_copies: g(&self.device_copies),
            allocations: g(&self.allocations),
            capture_launches: g(&self.capture_launches),
            peer_bytes: g(&self.peer_bytes),
            algorithms_measured: g(&self.algorithms_measured),
        }
    }
}

/// Memory that this process uses through this device, in bytes, and statistics of its pool.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct MemoryStats {
    /// Bytes of live buffers, including the rounding of their sizes.
    pub allocated: u64,
    /// Highest value of `allocated`.
    pub peak: u64,
    /// Breakdown of `peak` by tag, taken when `peak` was first reached.
    pub peak_by_tag: BTreeMap<Tag, u64>,
    /// Bytes obtained from the driver: `allocated` plus `cached`.
    pub reserved: u64,
    /// Highest value of `reserved`; never above `limit`.
    pub peak_reserved: u64,
    /// Bytes obtained from the driver and not live: freed buffers that the pool keeps and unused parts of its
    /// chunks.
    pub cached: u64,
    /// The largest part of `cached` that one buffer can use.
    pub largest_free: u64,
    /// The limit if one was set, else the device's memory if known.
    pub limit: Option<u64>,
    pub by_tag: BTreeMap<Tag, u64>,
    /// Buffers allocated and freed, whether their memory was new or reused.
    pub allocations: u64,
    pub frees: u64,
    /// How often `cached` was released to make room.
    pub trims: u64,
    pub defragmentations: u64,
    pub moved_bytes: u64,
    /// Number of defragmentations that moved a buffer. An address read at an earlier generation may now
    /// belong to another buffer.
    pub generation: u64,
    /// Requests that failed with [`Error::OutOfMemory`].
    pub refusals: u64,
    /// Host bytes in the device's [`HostBuffer`]s; not included in the fields above.
    pub pinned: u64,
}

impl MemoryStats {
    /// Share of the free bytes outside of the largest free range: `1 - largest_free / cached`, or 0 if
    /// nothing is free.
    pub fn fragmentation(&self) -> f64 {
        if self.cached == 0 { 0.0 } else { 1.0 - self.largest_free as f64 / self.cached as f64 }
    }

    /// MiB (1024² bytes) of live buffers.
    pub fn allocated_mb(&self) -> f64 {
        self.allocated as f64 / (1u64 << 20) as f64
    }

    /// MiB (1024² bytes) still available to live buffers; `None` if neither a limit nor the device's memory
    /// is known.
    pub fn free_mb(&self) -> Option<f64> {
        self.limit.map(|l| l.saturating_sub(self.allocated) as f64 / (1u64 << 20) as f64)
    }
}

/// Options for opening a device.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Options {
    /// Worker threads of the CPU device, including the calling thread. `None`: one per hardware thread that
    /// the process may use, or one in a build without the feature `parallel`.
    pub threads: Option<usize>,
    /// Whether the CPU device uses the processor's instruction sets beyond the portable one. `Some(true)`:
    /// opening fails if the build lacks the feature `simd`. `None`: use them if the build has it.
    pub simd: Option<bool>,
    /// Whether CUDA devices use cuDNN. `Some(true)`: opening a device fails if cuDNN is not found, and
    /// devices have the property `cudnn`. `None`: use it if found.
    pub cudnn: Option<bool>,
    /// Whether CUDA and ROCm devices use matrix units (tensor cores). `Some(false)`: generated kernels do not
    /// use them, and of vendor libraries only algorithms without matrix units are requested. `None`: use them
    /// if present.
    pub matrix_units: Option<bool>,
    /// Makes CUDA and ROCm devices measure the algorithms that a vendor's library lists for a call, once for
    /// each call, and take the fastest ([`Device::searches_algorithms`]). `None`: the library's first choice
    /// is taken.
    pub algorithm_search: Option<tune::AlgorithmSearch>,
    /// Maximum bytes obtained from the driver: live buffers plus what the pool keeps. `None`: the device's
    /// memory. If [`MemoryPoolConfig::max_size`] is set too, the smaller value counts.
    pub memory_limit: Option<u64>,
    /// How the pool allocates; `None` is the default strategy.
    pub memory_pool: Option<MemoryPoolConfig>,
    /// Maximum bytes of [`Device::alloc_host`]. `None`: half of the machine's memory.
    pub host_limit: Option<u64>,
    /// Directory for compiled programs. `None`: the user's cache directory, or none with `HALCYON_CACHE=off`.
    pub cache_dir: Option<PathBuf>,
    /// Measures the device time of every command.
    pub profile: bool,
}

/// Finds and opens the devices of one backend.
pub trait Driver: Send + Sync + fmt::Debug {
    fn kind(&self) -> BackendType;
    /// The available devices, or [`Error::Unavailable`].
    fn probe(&self) -> Result<Vec<DeviceInfo>>;
    /// Like `Driver::probe`, but without slow queries: on CUDA and ROCm, the query of free memory needs a
    /// context on each device. Used to find a device that is then opened.
    fn list(&self) -> Result<Vec<DeviceInfo>> {
        self.probe()
    }
    fn open(&self, index: usize, options: &Options) -> Result<Arc<dyn Device>>;
}

/// An open device.
pub trait Device: Target + Send + Sync + fmt::Debug {
    fn info(&self) -> &DeviceInfo;
    fn counters(&self) -> Counters;
    /// The pool of the device's buffers.
    fn pool(&self) -> &dyn Accounts;

    /// Host bytes in the device's [`HostBuffer`]s.
    fn pinned(&self) -> u64 {
        0
    }

    fn memory(&self) -> MemoryStats {
        MemoryStats { pinned: self.pinned(), ..self.pool().stats() }
    }

    /// Free device memory in bytes, queried from the driver (or from the operating system for devices that
    /// share host memory). `None` if neither reports it.
    fn free_memory(&self) -> Option<u64> {
        None
    }

    /// Bytes that buffers can still take: the remainder of the limit, capped by the free memory plus what the
    /// pool keeps. `None` if neither is known.
    fn available(&self) -> Option<u64> {
        let m = self.memory();
        let left = m.limit.map(|l| l.saturating_sub(m.allocated));
        // The pool reuses its cached memory, or releases it when the driver has no more.
        let free = self.free_memory().map(|f| f.saturating_add(m.cached));
        match (left, free) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    }

    /// The note that messages about memory checks contain if [`Device::free_memory`] is unknown; otherwise
    /// empty.
    fn unknown_free(&self) -> &'static str {
        match self.free_memory() {
            Some(_) => "",
            None => {
                " (the driver does not report free memory; free means the limit minus what this process uses)"
            }
        }
    }

    /// Allocates at least `bytes` bytes (0 gives a valid empty buffer).
    fn alloc(&self, bytes: usize, tag: Tag) -> Result<BufferRef>;

    /// Allocates a buffer whose bytes are zero although nothing writes them, because the system supplies its
    /// memory at the first access ([`Device::supply`] makes it do so earlier). `None` if the device has no
    /// such memory, or none of this size: then allocate a buffer and write it.
    ///
    /// # Errors
    /// Those of [`Device::alloc`].
    fn alloc_zeroed(&self, bytes: usize, tag: Tag) -> Result<Option<BufferRef>> {
        let _ = (bytes, tag);
        Ok(None)
    }

    /// Starts a thread that makes the system supply all memory of buffers from [`Device::alloc_zeroed`].
    /// Their contents do not change, and commands may use them meanwhile. Does nothing for other buffers.
    fn supply(&self, buffers: &[BufferRef]) -> Supply {
        let _ = buffers;
        Supply::default()
    }

    /// Bytes by which [`Device::alloc`] of this size and tag raises [`MemoryStats::allocated`] if no freed
    /// buffer is reused.
    fn footprint(&self, bytes: usize, tag: Tag) -> usize {
        self.pool().footprint(bytes, tag)
    }

    /// A buffer over the `bytes` bytes at `offset` of the buffer `of`. It keeps all of `of` alive. `offset`
    /// must be a multiple of [`Target::part_alignment`]. The caller must not use overlapping parts in one
    /// command.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the device does not support parts; [`Error::Argument`] for a range outside
    /// of `of`, or for an offset that is not a multiple of [`Target::part_alignment`].
    fn part(&self, of: &BufferRef, offset: usize, bytes: usize) -> Result<BufferRef> {
        let _ = (of, offset, bytes);
        Err(Error::unsupported(
            format!("parts of buffers on {}", self.info().id),
            "Allocate a buffer for each part",
        ))
    }

    /// Allocates host memory that the device copies to and from directly, without a staging buffer:
    /// page-locked memory if the driver has it.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the device does not support it; [`Error::OutOfMemory`] past
    /// [`Options::host_limit`], or if the system has no memory left.
    fn alloc_host(&self, bytes: usize) -> Result<HostBuffer> {
        let _ = bytes;
        Err(Error::unsupported(
            format!("host memory for copies on {}", self.info().id),
            "Copy from and to ordinary memory",
        ))
    }

    /// Waits for submitted work, then moves buffers together so that free memory forms large ranges. Buffers
    /// keep their contents; tensors, plans and captured graphs that hold them stay valid.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the device has no pool; errors of the driver.
    fn defragment(&self) -> Result<Defragmented> {
        Err(Error::unsupported(
            format!("moving buffers on {}", self.info().id),
            "Free memory with empty_cache, or use a smaller batch",
        ))
    }

    /// A buffer over host memory without a copy; `None` if the device cannot use this memory directly. The
    /// device never writes to the memory.
    fn import(&self, _data: Arc<dyn halcyon_ir::data::Bytes>) -> Option<BufferRef> {
        None
    }

    /// The memory of a buffer, for code outside of Halcyon that reads it in place. Waits for submitted work
    /// that writes to the buffer. The memory does not move while the result lives. `None` if the host cannot
    /// address the buffer.
    ///
    /// # Errors
    /// [`Error::Argument`] for a buffer of another device; errors of the driver.
    fn export(&self, _buffer: &BufferRef) -> Result<Option<Exported>> {
        Ok(None)
    }

    /// The memory of a buffer by its address on the device, for other libraries that use the same device.
    /// Waits for submitted work. The memory does not move while the result lives. Dropping the result waits
    /// for all work on the device, so that the other library's work has ended. `None` if the device has no
    /// addresses that other libraries know.
    ///
    /// # Errors
    /// [`Error::Argument`] for a buffer of another device; errors of the driver.
    fn export_device(&self, _buffer: &BufferRef) -> Result<Option<DeviceMemory>> {
        Ok(None)
    }

    /// A buffer over memory of this device that another library allocated. Waits for all work on the device,
    /// the other library's included. Memory whose address is not a multiple of the device's alignment is
    /// copied, other memory is used in place. The device never writes to it.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the device does not use memory of other libraries; [`Error::Argument`] for
    /// memory of another device; errors of the driver.
    fn import_device(&self, memory: DeviceMemory) -> Result<BufferRef> {
        let _ = memory;
        Err(Error::unsupported(
            format!("memory of other libraries on {}", self.info().id),
            "Copy it through the host",
        ))
    }

    /// Copies host bytes into a buffer, in order with submitted work.
    fn write(&self, dst: &BufferRef, offset: usize, src: &[u8]) -> Result<()>;
    /// Waits for submitted work, then copies bytes of a buffer to the host.
    fn read(&self, src: &BufferRef, offset: usize, dst: &mut [u8]) -> Result<()>;

    /// Rewrites a constant into the layout that a kernel of this device reads ([`LibraryKernel::packing`]).
    /// `from` holds the original constant; `to` has the size of the packing.
    ///
    /// # Errors
    /// [`Error::Argument`] if the kernel does not read packed constants or belongs to another device.
    fn pack(&self, kernel: &dyn LibraryKernel, _from: &BufferRef, _to: &BufferRef) -> Result<()> {
        Err(Error::argument("pack", format!("{} does not read packed constants", kernel.name())))
    }

    /// Like [`Device::pack`], for constants in host memory, each given as (kernel, bytes, destination). At
    /// most one temporary buffer holds an original constant at a time; devices that read host memory need
    /// none.
    ///
    /// # Errors
    /// The errors of [`Device::pack`]; [`Error::OutOfMemory`].
    fn pack_host(&self, constants: &[(&dyn LibraryKernel, &[u8], &BufferRef)]) -> Result<()> {
        let largest = constants.iter().map(|(_, from, _)| from.len()).max().unwrap_or(0);
        let from = self.alloc(largest, Tag::Weights)?;
        for (kernel, bytes, to) in constants {
            self.write(&from, 0, bytes)?;
            self.pack(*kernel, &from, to)?;
        }
        Ok(())
    }

    /// Bytes of temporary host memory that [`Device::pack_host`] needs for these constants, besides buffers.
    fn pack_room(&self, _constants: &[&[u8]]) -> usize {
        0
    }

    fn compile(&self, kernel: &Kernel) -> Result<Arc<dyn Program>>;
    /// Enqueues the commands in order.
    fn submit(&self, commands: &[Command<'_>]) -> Result<()>;

    /// Whether [`Device::copy_from_peer`] copies from another device.
    ///
    /// # Errors
    /// [`Error::Unsupported`] with the reason if it does not.
    fn can_copy_from(&self, from: &dyn Device) -> Result<()> {
        Err(Error::unsupported(
            format!("copies from {} to {}", from.info().id, self.info().id),
            "Copy through the host",
        ))
    }

    /// Copies `bytes` bytes from another device's buffer into one of this device, without going through the
    /// host. The copy runs after all work submitted to either device so far and before later work.
    ///
    /// # Errors
    /// The errors of [`Device::can_copy_from`]; [`Error::Argument`] for a range outside of a buffer; errors
    /// of the driver.
    fn copy_from_peer(
        &self,
        from: &dyn Device,
        src: &BufferRef,
        src_offset: usize,
        dst: &BufferRef,
        dst_offset: usize,
        bytes: usize,
    ) -> Result<()> {
        let _ = (src, src_offset, dst, dst_offset, bytes);
        self.can_copy_from(from)
    }

    /// The driver's device type, for [`Device::copy_from_peer`] between devices of one driver.
    fn as_peer(&self) -> Option<&dyn Any> {
        None
    }

    /// Whether [`Device::capture`] is implemented. A device that implements it must return `true` here, or
    /// its plans are never captured. A capture may still fail, for example if the driver's library has no
    /// functions for it.
    fn captures(&self) -> bool {
        false
    }

    /// Records commands so that one call launches them any number of times. Nothing runs yet. See [`capture`]
    /// for the guarantees.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the device or its library cannot capture (submit the commands instead);
    /// [`Error::Argument`] for a command with a buffer that is not in the recording's list; errors of the
    /// driver.
    fn capture(&self, recording: &Recording<'_>) -> Result<Arc<dyn Capture>> {
        let _ = recording;
        Err(Error::unsupported(format!("captured commands on {}", self.info().id), "Submit the commands"))
    }

    /// Launches captured commands, in order with submitted work. Returns `false` and runs nothing if a buffer
    /// is not at its captured address or is smaller than at capture; the commands must then be captured
    /// again.
    ///
    /// # Errors
    /// [`Error::Argument`] for a wrong number of buffers or values, or for another device's capture; errors
    /// of the driver.
    fn launch_capture(
        &self,
        capture: &dyn Capture,
        buffers: &[&BufferRef],
        values: &[Scalar],
    ) -> Result<bool> {
        let _ = (buffers, values);
        Err(capture::foreign(capture, &self.info().id))
    }

    /// Waits for all submitted work, including that of streams.
    fn synchronize(&self) -> Result<()>;

    /// Creates an additional queue of this device, see [`stream`].
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the driver has no streams; errors of the driver.
    fn create_stream(&self, options: &StreamOptions) -> Result<Arc<dyn Stream>> {
        let _ = options;
        Err(Error::unsupported(format!("streams on {}", self.info().id), "Use the device's own queue"))
    }

    /// Waits for submitted work, then returns and clears the id of the first fault since the last call.
    /// Faults of streams are reported by the streams' events.
    fn take_fault(&self) -> Result<Option<u32>>;
    /// Device times of the commands submitted since the last call, in order; empty unless the device was
    /// opened with [`Options::profile`].
    fn take_timings(&self) -> Result<Vec<Timing>> {
        Ok(vec![])
    }

    /// The libraries that may contain kernels for this device: the name of each, and the version that was
    /// found or the reason why it is not used. Loads the libraries.
    fn kernel_libraries(&self) -> Vec<(String, String)> {
        vec![]
    }

    /// Whether [`Options::algorithm_search`] was set and has an effect. May load the libraries.
    ///
    /// # Errors
    /// The reason why it has none, or that it was not set.
    fn searches_algorithms(&self) -> std::result::Result<(), String> {
        Err("it uses no library that lists algorithms".into())
    }

    /// Releases cached memory to the system; returns the bytes freed.
    fn empty_cache(&self) -> u64 {
        self.pool().trim()
    }

    fn as_target(&self) -> &dyn Target;
}

/// Free memory of a device that uses host memory: the machine's free memory, capped by the device's total.
#[allow(dead_code)]
fn host_memory(total: Option<u64>) -> Option<u64> {
    halcyon_host::memory().map(|m| m.0.min(total.unwrap_or(u64::MAX)))
}

/// Bytes in a GiB.
const GIB: f64 = (1u64 << 30) as f64;

impl DeviceInfo {
    /// `cpu:0`, `opencl:1`.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The name that the driver reports.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Memory in GiB (1024³ bytes).
    pub fn memory_gb(&self) -> Option<f64> {
        self.total_memory.map(|b| b as f64 / GIB)
    }

    /// Free memory when the device was probed or opened, in GiB (1024³ bytes).
    pub fn free_memory_gb(&self) -> Option<f64> {
        self.free_memory.map(|b| b as f64 / GIB)
    }

    /// PyTorch's name of the device: `cuda:0` (for `rocm:0` too), `mps`, `xpu:0`, `xla:0`, `cpu`. `None` if
    /// PyTorch has no such device.
    pub fn torch_device(&self) -> Option<String> {
        self.backend.torch().map(|t| match t {
            Torch::Single(name) => name.into(),
            Torch::Numbered(name) => format!("{name}:{}", self.index),
        })
    }
}

/// The error for a device index that does not exist. `all` lists the existing devices.
fn no_device(backend: BackendType, index: usize, all: impl Iterator<Item = DeviceInfo>) -> Error {
    let tried: Vec<String> = all.map(|d| format!("{}:{} {}", backend, d.index, d.name)).collect();
    let fix = match tried.len() {
        0 => "Choose another backend".into(),
        1 => "Choose device 0, which is the only one".into(),
        2 => "Choose device 0 or 1".into(),
        n => format!("Choose a device from 0 to {}", n - 1),
    };
    Error::Unavailable {
        backend: backend.id().into(),
        tried,
        reason: format!("there is no device {index}"),
        fix,
    }
}
