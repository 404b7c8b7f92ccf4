//! Hardware abstraction layer: drivers, devices, memory, selection. All FFI of the project is here.
//!
//! The contract, which every driver keeps and [`conformance`] checks:
//! - Probing never panics. A missing library is [`Error::Unavailable`] with everything that was tried and
//!   what to do.
//! - A device is in order: commands of one [`Device::submit`] and of successive ones act as if run one after
//!   another. [`Device::read`] waits for what was submitted before it. [`stream`]s are further queues, which
//!   run beside it and each other; work on the same memory is ordered all the same.
//! - The caller validates shapes and bindings ([`halcyon_ir::kernel`]'s verifier); a device validates sizes
//!   of buffers, and gives typed errors for what only the driver can know (memory, compile logs, a lost
//!   device).
//! - Buffers hold undefined bytes when allocated. Bytes past the end are never touched by a correct kernel.
//! - A kernel that meets a bad index clamps it and sets the device's fault word, see [`Device::take_fault`].

pub mod backend;
#[cfg(not(target_arch = "wasm32"))]
pub mod cache;
pub mod chatter;
#[cfg(not(target_arch = "wasm32"))]
pub mod child;
pub mod config;
#[cfg(not(target_arch = "wasm32"))]
pub mod conformance;
#[cfg(feature = "cpu")]
pub mod cpu;
#[cfg(all(feature = "cuda", not(target_arch = "wasm32")))]
pub mod cuda;
// Each driver uses a part of it.
#[allow(dead_code)]
mod hazard;
pub mod heap;
pub mod host_buffer;
#[cfg(all(any(feature = "cuda", feature = "opencl", feature = "rocm"), not(target_arch = "wasm32")))]
mod lanes;
pub mod noop;
#[cfg(all(feature = "opencl", not(target_arch = "wasm32")))]
pub mod opencl;
pub mod policy;
pub mod pool;
#[cfg(not(target_arch = "wasm32"))]
pub mod probe;
pub mod registry;
pub mod replay;
#[cfg(all(feature = "rocm", not(target_arch = "wasm32")))]
pub mod rocm;
pub mod select;
#[cfg(all(any(feature = "cuda", feature = "rocm"), not(target_arch = "wasm32")))]
pub mod simt;
pub mod stream;
#[cfg(all(feature = "tpu", not(target_arch = "wasm32")))]
pub mod tpu;
pub mod tune;
pub mod validate;
#[cfg(all(feature = "webgpu", not(target_arch = "wasm32")))]
pub mod webgpu;

pub use backend::{BackendType, DeviceName};
pub use halcyon_ir::error::{Error, Result};
pub use halcyon_ir::host;
pub use halcyon_ir::target::{Caps, Declined, LibraryCall, LibraryKernel, Operand, Target};
pub use host_buffer::HostBuffer;
pub use pool::{AllocationStrategy, Defragmented, MemoryPoolConfig};
pub use replay::{Recording, Replay};
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

/// Facts about a device, read from the driver; `None` where it does not tell.
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
    /// Bytes that nobody used when the device was looked at or opened; `None` where the driver has no such
    /// query.
    pub free_memory: Option<u64>,
    pub compute_capability: Option<String>,
    pub compute_units: Option<u32>,
    pub unified_memory: bool,
    /// A CPU pretending to be a GPU (PoCL, lavapipe): never chosen unless named.
    pub software: bool,
    /// Whatever else the driver tells, by its own names.
    pub properties: BTreeMap<String, String>,
}

/// What an allocation is for.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Tag {
    Weights,
    Activations,
    State,
    Workspace,
    Io,
    /// Keys and values of attention.
    Kv,
    /// What an optimiser keeps for each parameter.
    Optimizer,
}

/// Device memory. Dropping it returns it to the device's pool.
pub trait Buffer: Send + Sync + fmt::Debug {
    fn bytes(&self) -> usize;
    /// Where it lies on a device that replays captured work ([`Device::capture`]): equal numbers are the same
    /// memory, until buffers are moved.
    fn place(&self) -> Option<u64> {
        None
    }
    fn as_any(&self) -> &dyn Any;
}
pub type BufferRef = Arc<dyn Buffer>;

/// A compiled kernel.
pub trait Program: Send + Sync + fmt::Debug {
    fn name(&self) -> &str;
    /// The source the device's compiler got, where there is one.
    fn source(&self) -> Option<&str> {
        None
    }
    fn as_any(&self) -> &dyn Any;
}

/// One piece of submitted work.
#[derive(Debug)]
pub enum Command<'a> {
    /// Buffers in the kernel's order; `params` in the kernel's order. A kernel that can fault
    /// (`Stmt::SetError`) has the fault word (u32) as its last buffer, which the device binds itself, and a
    /// parameter named `fault`, for which the device passes this command's `fault`.
    Launch {
        program: &'a Arc<dyn Program>,
        groups: [u32; 3],
        buffers: &'a [BufferRef],
        params: &'a [Scalar],
        fault: u32,
    },
    /// Buffers: inputs, outputs, then the workspace if the kernel wants one. `args` are the plan's run-time
    /// arguments.
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

/// What a device did since it was opened. Every number is counted where the work happens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counters {
    /// Kernels built by the device's compiler or interpreter.
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
    /// Requests to the driver or the system (not those that the pool served).
    pub allocations: u64,
    /// Launches of captured commands ([`Device::capture`]); what they run is counted above as if it were
    /// submitted.
    #[serde(default)]
    pub replays: u64,
    /// Bytes copied from other devices without the host ([`Device::copy_from_peer`]).
    #[serde(default)]
    pub peer_bytes: u64,
}

/// The live form of [`Counters`].
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
    pub replays: AtomicU64,
    pub peer_bytes: AtomicU64,
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
            replays: g(&self.replays),
            peer_bytes: g(&self.peer_bytes),
        }
    }
}

/// Bytes of a device's memory in use by this process, through this device, and what its pool did.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct MemoryStats {
    /// Held by live buffers, with what their sizes are rounded up by.
    pub allocated: u64,
    /// Highest value of `allocated`.
    pub peak: u64,
    /// What made up `peak`, when it was reached first.
    pub peak_by_tag: BTreeMap<Tag, u64>,
    /// Given by the driver: `allocated` and `cached`.
    pub reserved: u64,
    /// Highest value of `reserved`; never above `limit`.
    pub peak_reserved: u64,
    /// Given by the driver and not live: freed buffers that the pool keeps, unused parts of its chunks.
    pub cached: u64,
    /// The largest piece of `cached` that one buffer can take.
    pub largest_free: u64,
    /// The cap, if one was set, else the device's memory where known.
    pub limit: Option<u64>,
    pub by_tag: BTreeMap<Tag, u64>,
    /// Buffers that were handed out and given back, whatever memory served them.
    pub allocations: u64,
    pub frees: u64,
    /// Times that `cached` was given back for want of room.
    pub trims: u64,
    pub defragmentations: u64,
    pub moved_bytes: u64,
    /// Defragmentations that moved a buffer: an address that was taken at an earlier generation may be
    /// another's.
    pub generation: u64,
    /// Requests that ended in [`Error::OutOfMemory`].
    pub refusals: u64,
    /// Of the host, in [`HostBuffer`]s of the device; not part of the above.
    pub pinned: u64,
}

impl MemoryStats {
    /// Share of the free bytes that lie outside of the largest free range: `1 - largest_free / cached`, 0
    /// where nothing is free.
    pub fn fragmentation(&self) -> f64 {
        if self.cached == 0 { 0.0 } else { 1.0 - self.largest_free as f64 / self.cached as f64 }
    }

    /// MiB (1024² bytes) of live buffers.
    pub fn allocated_mb(&self) -> f64 {
        self.allocated as f64 / (1u64 << 20) as f64
    }

    /// MiB (1024² bytes) that live buffers may still take; `None` where neither a limit nor the device's
    /// memory is known.
    pub fn free_mb(&self) -> Option<f64> {
        self.limit.map(|l| l.saturating_sub(self.allocated) as f64 / (1u64 << 20) as f64)
    }
}

/// Settings for opening a device.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Options {
    /// Worker threads of the CPU device, the caller included. `None`: one per core the process may use.
    pub threads: Option<usize>,
    /// Whether the CPU device uses instruction sets beyond the target's baseline. `None`: what the processor
    /// has.
    pub simd: Option<bool>,
    /// Whether CUDA devices use cuDNN. Switched on, a device without it does not open, and one with it has
    /// the property `cudnn`. `None`: where it is found.
    pub cudnn: Option<bool>,
    /// Whether CUDA and ROCm devices use matrix units (tensor cores). `Some(false)`: neither generated
    /// kernels nor the vendors' libraries do; the libraries are then asked only for what they do without.
    /// `None`: where they are found.
    pub matrix_units: Option<bool>,
    /// Bytes that the driver may give: live buffers and what the pool keeps.
    pub memory_limit: Option<u64>,
    /// How buffers get their memory; `None` is the default.
    pub memory_pool: Option<MemoryPoolConfig>,
    /// Bytes that [`Device::alloc_host`] may take. `None`: half of the machine's memory.
    pub host_limit: Option<u64>,
    /// Directory for compiled programs. `None`: the user's cache directory.
    pub cache_dir: Option<PathBuf>,
    /// Times every command.
    pub profile: bool,
}

/// A family of devices reached through one runtime library.
pub trait Driver: Send + Sync + fmt::Debug {
    fn kind(&self) -> BackendType;
    /// The devices there are, or [`Error::Unavailable`].
    fn probe(&self) -> Result<Vec<DeviceInfo>>;
    /// The same without what takes long to ask: on CUDA and ROCm how much memory is free, which needs a
    /// context on each device. For whoever opens one of them next.
    fn list(&self) -> Result<Vec<DeviceInfo>> {
        self.probe()
    }
    fn open(&self, index: usize, options: &Options) -> Result<Arc<dyn Device>>;
}

/// An open device.
pub trait Device: Target + Send + Sync + fmt::Debug {
    fn info(&self) -> &DeviceInfo;
    fn counters(&self) -> Counters;
    fn memory(&self) -> MemoryStats;

    /// Bytes of the device's memory that nobody uses now, asked of its driver, or of the system where the
    /// device lives in the machine's memory. `None` where neither tells.
    fn free_memory(&self) -> Option<u64> {
        None
    }

    /// Bytes that buffers can still take: what the limit leaves, and no more than what is free with what the
    /// pool keeps. `None` where neither is known.
    fn available(&self) -> Option<u64> {
        let m = self.memory();
        let left = m.limit.map(|l| l.saturating_sub(m.allocated));
        // What the pool keeps is handed out again, or given back when the driver has no more.
        let free = self.free_memory().map(|f| f.saturating_add(m.cached));
        match (left, free) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    }

    /// What a check of memory has to say where [`Device::free_memory`] is not known; else empty.
    fn unknown_free(&self) -> &'static str {
        match self.free_memory() {
            Some(_) => "",
            None => {
                " (the driver does not tell what is free: its limit less what this process uses was taken)"
            }
        }
    }

    /// At least `bytes` bytes (0 gives a valid empty buffer).
    fn alloc(&self, bytes: usize, tag: Tag) -> Result<BufferRef>;

    /// Bytes by which such an [`Device::alloc`] raises [`MemoryStats::allocated`], where nothing that was
    /// freed serves it.
    fn footprint(&self, bytes: usize, _tag: Tag) -> usize {
        bytes
    }

    /// `bytes` bytes of a buffer from `offset` on as a buffer, which keeps the whole alive. The caller sees
    /// to it that parts that overlap are not in use by one command. `offset` is a multiple of
    /// [`Target::part_alignment`].
    ///
    /// # Errors
    /// [`Error::Unsupported`] where the device has no such thing; [`Error::Argument`] for a range outside of
    /// the buffer.
    fn part(&self, of: &BufferRef, offset: usize, bytes: usize) -> Result<BufferRef> {
        let _ = (of, offset, bytes);
        Err(Error::unsupported(
            format!("parts of buffers on {}", self.info().id),
            "Allocate a buffer for each part",
        ))
    }

    /// Memory of the host that copies to and from the device need no detour for: locked pages where the
    /// driver has them.
    ///
    /// # Errors
    /// [`Error::Unsupported`] where the device has no such thing; [`Error::OutOfMemory`] past
    /// [`Options::host_limit`], or where the system has none left.
    fn alloc_host(&self, bytes: usize) -> Result<HostBuffer> {
        let _ = bytes;
        Err(Error::unsupported(
            format!("memory of the host for copies on {}", self.info().id),
            "Copy from and to ordinary memory",
        ))
    }

    /// Waits, and moves buffers together so that free memory lies in large ranges. Buffers keep their
    /// contents, and everything that holds them (tensors, plans, captured graphs) goes on as before.
    ///
    /// # Errors
    /// [`Error::Unsupported`] where the device has no pool; the driver's own.
    fn defragment(&self) -> Result<Defragmented> {
        Err(Error::unsupported(
            format!("moving buffers on {}", self.info().id),
            "Free memory with empty_cache, or use a smaller batch",
        ))
    }

    /// A buffer over host memory without a copy, where the device shares it. The memory is never written.
    fn import(&self, _data: Arc<dyn halcyon_ir::data::Bytes>) -> Option<BufferRef> {
        None
    }

    /// Copies host bytes into a buffer, in order with submitted work.
    fn write(&self, dst: &BufferRef, offset: usize, src: &[u8]) -> Result<()>;
    /// Waits for submitted work, then copies out.
    fn read(&self, src: &BufferRef, offset: usize, dst: &mut [u8]) -> Result<()>;

    /// Writes a constant in the layout that a kernel of this device reads it in ([`LibraryKernel::packing`]).
    /// `from` holds the constant as it is, `to` has the packing's size.
    ///
    /// # Errors
    /// [`Error::Argument`] for a kernel that reads nothing packed, or of another device.
    fn pack(&self, kernel: &dyn LibraryKernel, _from: &BufferRef, _to: &BufferRef) -> Result<()> {
        Err(Error::argument("pack", format!("{} reads nothing packed", kernel.name())))
    }

    /// [`Device::pack`] of constants that lie on the host: kernel, bytes, destination. One buffer at a time
    /// holds a constant as it is, and none where the device reads it on the host.
    ///
    /// # Errors
    /// As [`Device::pack`]; [`Error::OutOfMemory`].
    fn pack_host(&self, constants: &[(&dyn LibraryKernel, &[u8], &BufferRef)]) -> Result<()> {
        let largest = constants.iter().map(|(_, from, _)| from.len()).max().unwrap_or(0);
        let from = self.alloc(largest, Tag::Weights)?;
        for (kernel, bytes, to) in constants {
            self.write(&from, 0, bytes)?;
            self.pack(*kernel, &from, to)?;
        }
        Ok(())
    }

    /// Bytes of the host's memory that [`Device::pack_host`] takes for a while to pack these constants,
    /// besides buffers.
    fn pack_room(&self, _constants: &[&[u8]]) -> usize {
        0
    }

    fn compile(&self, kernel: &Kernel) -> Result<Arc<dyn Program>>;
    /// Enqueues the commands in order.
    fn submit(&self, commands: &[Command<'_>]) -> Result<()>;

    /// Whether [`Device::copy_from_peer`] copies from another device.
    ///
    /// # Errors
    /// [`Error::Unsupported`] with the reason where it does not.
    fn can_copy_from(&self, from: &dyn Device) -> Result<()> {
        Err(Error::unsupported(
            format!("copies from {} to {}", from.info().id, self.info().id),
            "Copy through the host",
        ))
    }

    /// Copies `bytes` bytes of another device's buffer into one of this device, without the host: behind what
    /// was submitted to either, and before what will be.
    ///
    /// # Errors
    /// As [`Device::can_copy_from`]; [`Error::Argument`] for a range outside of a buffer; those of the
    /// driver.
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

    /// The driver's own, for [`Device::copy_from_peer`] of another of its devices.
    fn as_peer(&self) -> Option<&dyn Any> {
        None
    }

    /// Takes commands to be launched any number of times by one call each; nothing runs yet. See [`replay`]
    /// for what holds.
    ///
    /// # Errors
    /// [`Error::Unsupported`] where the device, or its runtime, has no such thing: the commands are to be
    /// submitted as ever; [`Error::Argument`] for a command whose buffers are not all among the recording's;
    /// those of the driver.
    fn capture(&self, recording: &Recording<'_>) -> Result<Arc<dyn Replay>> {
        let _ = recording;
        Err(Error::unsupported(format!("captured commands on {}", self.info().id), "Submit the commands"))
    }

    /// Launches captured commands, in order with what is submitted. `false`, and nothing runs, where a buffer
    /// does not lie where it lay: the commands are to be captured again.
    ///
    /// # Errors
    /// [`Error::Argument`] for another number of buffers or values, and for another device's capture; those
    /// of the driver.
    fn replay(&self, replay: &dyn Replay, buffers: &[&BufferRef], values: &[Scalar]) -> Result<bool> {
        let _ = (buffers, values);
        Err(replay::foreign(replay, &self.info().id))
    }

    /// Waits for all that was submitted, to streams too.
    fn synchronize(&self) -> Result<()>;

    /// A further queue of this device, see [`stream`].
    ///
    /// # Errors
    /// [`Error::Unsupported`] where the driver has none; those of the driver.
    fn create_stream(&self, options: &StreamOptions) -> Result<Arc<dyn Stream>> {
        let _ = options;
        Err(Error::unsupported(format!("streams on {}", self.info().id), "Use the device's own queue"))
    }

    /// Waits, then takes the id of the first fault since the last call. Those of streams are told by their
    /// events.
    fn take_fault(&self) -> Result<Option<u32>>;
    /// Device times of the commands submitted since the last call, in order; empty unless opened with
    /// `profile`.
    fn take_timings(&self) -> Result<Vec<Timing>> {
        Ok(vec![])
    }

    /// Libraries that this device may have kernels of its own in: the name, and what was found or why it is
    /// not used. It loads them.
    fn kernel_libraries(&self) -> Vec<(String, String)> {
        vec![]
    }

    /// Gives cached memory back to the system; returns the bytes freed.
    fn empty_cache(&self) -> u64;
    fn as_target(&self) -> &dyn Target;
}

/// What a device in the machine's memory has free: what the machine has, and no more than the device.
#[cfg(any(feature = "opencl", feature = "webgpu"))]
fn host_memory(total: Option<u64>) -> Option<u64> {
    halcyon_ir::host::memory().map(|m| m.0.min(total.unwrap_or(u64::MAX)))
}

/// Bytes in a GiB.
const GIB: f64 = (1u64 << 30) as f64;

impl DeviceInfo {
    /// `cpu:0`, `opencl:1`.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The driver's name for it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Memory in GiB (1024³ bytes).
    pub fn memory_gb(&self) -> Option<f64> {
        self.total_memory.map(|b| b as f64 / GIB)
    }

    /// Memory that nothing used when the device was looked at, in GiB (1024³ bytes).
    pub fn free_memory_gb(&self) -> Option<f64> {
        self.free_memory.map(|b| b as f64 / GIB)
    }

    /// The device as PyTorch names it: `cuda:0` for `rocm:0` too, `mps`, `xpu:0`, `xla:0`, `cpu`. `None`
    /// where PyTorch has no such device.
    pub fn torch_device(&self) -> Option<String> {
        self.backend.torch_name().map(|n| match self.backend {
            BackendType::Cpu | BackendType::Metal => n.into(),
            _ => format!("{n}:{}", self.index),
        })
    }
}

/// That a backend has no device of this number among `all`.
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

/// What the loader says of a library: the message of the innermost cause, which names what it met, without
/// the library's own name.
#[cfg(all(
    any(feature = "cuda", feature = "rocm", feature = "opencl", feature = "tpu", feature = "webgpu"),
    not(target_arch = "wasm32")
))]
fn loader_text(name: &str, e: &dyn std::error::Error) -> String {
    let mut e = e;
    while let Some(s) = e.source() {
        e = s;
    }
    let text = e.to_string();
    let text = text.strip_prefix(&format!("{name}: ")).map(String::from).unwrap_or(text);
    match foreign(std::path::Path::new(name)) {
        true => format!("it is built for another processor ({text})"),
        false => text,
    }
}

/// Why none of these names could be loaded, in a few words: `thing` is not on this machine, or one is and
/// fails. `tried` has a line for each name, `NAME: what the loader said`.
#[cfg(all(
    any(feature = "cuda", feature = "rocm", feature = "opencl", feature = "tpu", feature = "webgpu"),
    not(target_arch = "wasm32")
))]
fn not_loaded(thing: &str, tried: &[String]) -> String {
    // What the loaders of Linux, macOS and Windows say of a file that is not there.
    let said = ["cannot open shared object file: No such file or directory", "no such file", "os error 126"];
    let absent = |t: &String| {
        let Some((name, what)) = t.split_once(": ") else { return false };
        // A path was named by the user, or found: then something should be there.
        let named = name.contains(['/', '\\']) && !name.starts_with("/System/");
        !named && said.iter().any(|s| what.contains(s)) && !what.contains("it is built for")
    };
    match tried.iter().all(absent) {
        true => format!("no {thing} on this machine"),
        false => format!("the {thing} could not be loaded"),
    }
}

/// Whether a path leads to an ELF file whose class or machine is not this program's. Of such a file glibc
/// says that it does not exist.
#[cfg(all(
    any(feature = "cuda", feature = "rocm", feature = "opencl", feature = "tpu", feature = "webgpu"),
    not(target_arch = "wasm32")
))]
fn foreign(path: &std::path::Path) -> bool {
    let head = |p: &std::path::Path| -> Option<[u8; 20]> {
        let mut head = [0; 20];
        std::io::Read::read_exact(&mut std::fs::File::open(p).ok()?, &mut head).ok()?;
        head.starts_with(b"\x7fELF").then_some(head)
    };
    // Class and byte order, then the machine.
    let kind = |h: [u8; 20]| (h[4], h[5], h[18], h[19]);
    let own = std::env::current_exe().ok().and_then(|p| head(&p));
    head(path).zip(own).is_some_and(|(a, b)| kind(a) != kind(b))
}
