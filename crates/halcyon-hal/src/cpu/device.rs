//! The CPU device: runs commands synchronously, one after another, on its team of threads.

use super::isa::IsaLevel;
use super::library::gemm::product_bf16::Bf16Code;
use super::library::{self, CpuKernel, Fault, Run};
use super::memory::{CpuBuffer, Held, HostMemory, HostSource, LINE, Ptr, copy_bytes};
use super::program::CpuProgram;
use super::stream::CpuStream;
use super::sys::Isa;
use super::team::Team;
use super::tracker::{self, Tracker};
use crate::hazard::Access;
use crate::host_buffer::{Account, Pages};
use crate::pool::{Pool, Source};
use crate::{
    Accounts, BackendType, BufferRef, Caps, Command, Counters, Counts, Declined, Defragmented, Device,
    DeviceInfo, Error, Exported, HostBuffer, LibraryCall, LibraryKernel, Options, Program, Result, Stream,
    StreamOptions, Supply, Tag, Target, Timing,
};
use halcyon_ir::data::Bytes;
use halcyon_ir::kernel::Kernel;
use halcyon_ir::{DType, Scalar};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

/// Number of threads the process may use; 1 without the feature `parallel`.
fn cores() -> usize {
    if !cfg!(feature = "parallel") {
        return 1;
    }
    std::thread::available_parallelism().map_or(1, |n| n.get())
}

/// Parses the `key: value` lines of a file under /proc. Empty if the file cannot be read.
fn proc_file(path: &str) -> BTreeMap<String, String> {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let mut m = BTreeMap::new();
    for (k, v) in text.lines().filter_map(|l| l.split_once(':')) {
        // /proc/cpuinfo repeats its keys for every processor; keep the first.
        m.entry(k.trim().to_string()).or_insert_with(|| v.trim().to_string());
    }
    m
}

/// Describes this machine: CPU model, instruction sets, memory sizes.
pub(crate) fn describe() -> DeviceInfo {
    let cpu = proc_file("/proc/cpuinfo");
    let mem = proc_file("/proc/meminfo");
    let kib = |k: &str| -> Option<u64> {
        mem.get(k)?.strip_suffix(" kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
    };
    let mut properties = BTreeMap::new();
    properties.insert("architecture".into(), std::env::consts::ARCH.to_string());
    properties.insert("simd".into(), Isa::best().name().to_string());
    let levels: Vec<&str> = IsaLevel::available().iter().map(|l| l.name()).collect();
    properties.insert("instruction_sets".into(), levels.join(" "));
    properties.insert("instruction_set".into(), IsaLevel::used().name().to_string());
    if let Some(flags) = cpu.get("flags").or_else(|| cpu.get("Features")) {
        let simd = ["sse4", "avx", "fma", "f16c", "amx", "asimd", "neon", "sve", "bf16", "i8mm"];
        let listed: Vec<&str> = flags.split(' ').filter(|f| simd.iter().any(|s| f.contains(s))).collect();
        properties.insert("features".into(), listed.join(" "));
    }
    for (k, name) in [("cpu MHz", "clock_mhz"), ("cache size", "cache")] {
        if let Some(v) = cpu.get(k) {
            properties.insert(name.into(), v.clone());
        }
    }
    DeviceInfo {
        backend: BackendType::Cpu,
        id: "cpu:0".into(),
        index: 0,
        name: cpu
            .get("model name")
            .or_else(|| cpu.get("Hardware"))
            .cloned()
            .unwrap_or_else(|| format!("{} processor", std::env::consts::ARCH)),
        vendor: cpu.get("vendor_id").cloned().unwrap_or_else(|| "unknown".into()),
        driver_version: None,
        total_memory: kib("MemTotal"),
        free_memory: kib("MemAvailable"),
        compute_capability: None,
        compute_units: Some(cores() as u32),
        unified_memory: true,
        software: false,
        properties,
    }
}

/// Alignment in bytes that suffices for every element type.
pub(crate) const ELEMENT: usize = 8;

/// Zeroed buffers of at least this size get memory that the system supplies at the first access. Smaller ones
/// are written in less time than it takes to ask for their pages.
const LAZY: usize = 1 << 20;

/// The CPU device.
#[derive(Debug)]
pub struct CpuDevice {
    info: DeviceInfo,
    caps: Caps,
    team: Team,
    isa: Isa,
    pool: Arc<Pool<HostSource>>,
    host: Account,
    counts: Arc<Counts>,
    /// Id of the command that met the first bad index; 0 if there is none.
    fault: AtomicU32,
    profile: bool,
    /// The device lock. A thread holds it while it runs commands or copies of the device's own queue, so they
    /// run in order. It contains the timings of profiled commands.
    queue: Mutex<Vec<Timing>>,
    /// Orders the device's own queue against its streams.
    tracker: Arc<Tracker>,
    /// The number of this opening of the device; buffers of another opening are rejected.
    number: u64,
}

/// The execution context of commands: the device's threads or a stream's.
pub(crate) struct Execution<'a> {
    pub team: &'a Team,
    pub isa: Isa,
    pub counts: &'a Counts,
    pub fault: &'a AtomicU32,
}

impl Execution<'_> {
    /// Runs a generated kernel.
    ///
    /// # Safety
    /// The buffers are live memory. In addition, either the accesses that `tracker::of_program` returns are
    /// registered with the tracker, or the device lock is held and there are no streams.
    pub(super) unsafe fn launch(
        &self,
        p: &CpuProgram,
        groups: [u32; 3],
        at: &[Ptr],
        params: &[Scalar],
        fault: u32,
    ) -> Result<()> {
        // SAFETY: this function's contract gives live buffers. The tracker, or the device lock, keeps out
        // conflicting commands: those that write memory this one reads, or use memory this one writes.
        unsafe { p.run(groups, at, params, fault, self.fault)? };
        Counts::add(&self.counts.launches, 1);
        Ok(())
    }

    /// Runs a library kernel.
    ///
    /// # Safety
    /// The buffers are live memory. In addition, either the accesses that `tracker::of_kernel` returns are
    /// registered with the tracker, or the device lock is held and there are no streams.
    pub(super) unsafe fn library(
        &self,
        k: &CpuKernel,
        at: &[Ptr],
        args: &[Scalar],
        fault: u32,
    ) -> Result<()> {
        Counts::add(&self.counts.library_calls, 1);
        let fault = Fault::new(self.fault, fault);
        let run = Run { bufs: at, args, team: self.team, isa: self.isa, fault };
        // SAFETY: this function's contract gives live buffers. The tracker, or the device lock, keeps out
        // conflicting commands: those that write memory this one reads, or use memory this one writes.
        unsafe { k.run(&run) }
    }

    /// Copies `d.bytes` bytes from `s` to `d`.
    ///
    /// # Safety
    /// Both ranges lie in live buffers and are equally long, and `d` is writable. In addition, either both
    /// are registered with the tracker, or the device lock is held and there are no streams.
    pub(super) unsafe fn copy(&self, s: &Ptr, d: &Ptr) {
        Counts::add(&self.counts.device_copies, 1);
        // SAFETY: this function's contract gives `d.bytes` readable bytes at `s`, which no other command
        // writes, and as many writable bytes at `d`, which no other command uses. `copy_bytes` permits
        // overlap.
        unsafe { copy_bytes(self.team, s.ptr, d.ptr, d.bytes) };
    }

    /// Copies `bytes` bytes of host memory at `from` to `d`.
    ///
    /// # Safety
    /// `bytes` bytes are readable at `from`, and nothing writes them during the call. `bytes <= d.bytes`, and
    /// `d` lies in a live buffer and is writable. In addition, either `d` is registered with the tracker, or
    /// the device lock is held and there are no streams.
    pub(super) unsafe fn write(&self, from: *const u8, d: &Ptr, bytes: usize) {
        Counts::add(&self.counts.uploads, 1);
        Counts::add(&self.counts.uploaded_bytes, bytes as u64);
        // SAFETY: this function's contract gives `bytes` readable bytes at `from`, which nothing writes, and
        // `bytes` writable bytes at `d`, which no other command uses. `copy_bytes` permits overlap.
        unsafe { copy_bytes(self.team, from, d.ptr, bytes) };
    }

    /// Copies `s` to host memory.
    ///
    /// # Safety
    /// `to.len()` bytes at `s` lie in a live buffer. In addition, either they are registered with the
    /// tracker, or the device lock is held and there are no streams.
    pub(super) unsafe fn read(&self, s: &Ptr, to: &mut [u8]) {
        Counts::add(&self.counts.downloads, 1);
        Counts::add(&self.counts.downloaded_bytes, to.len() as u64);
        // SAFETY: this function's contract gives `to.len()` readable bytes at `s`, which no command writes.
        // `to` is exclusively borrowed, so it overlaps nothing.
        unsafe { copy_bytes(self.team, s.ptr, to.as_mut_ptr(), to.len()) };
    }
}

pub(crate) fn program_of(p: &Arc<dyn Program>) -> Result<&CpuProgram> {
    p.as_any()
        .downcast_ref()
        .ok_or_else(|| Error::argument("launch", "the program belongs to another device"))
}

pub(crate) fn kernel_of(k: &dyn LibraryKernel) -> Result<&CpuKernel> {
    k.as_any()
        .downcast_ref()
        .ok_or_else(|| Error::argument("library call", "the kernel belongs to another device"))
}

impl CpuDevice {
    /// Opens the device with these options.
    ///
    /// # Errors
    /// Invalid settings of the memory pool.
    pub fn new(options: &Options) -> Result<CpuDevice> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let mut info = describe();
        let isa = match options.simd {
            Some(false) => Isa::Portable,
            _ if cfg!(feature = "simd") => Isa::best(),
            _ => Isa::Portable,
        };
        info.properties.insert("simd".into(), isa.name().to_string());
        if isa == Isa::Portable {
            info.properties.insert("instruction_set".into(), IsaLevel::Portable.name().to_string());
        }
        let code = if isa.bf16_is_faster() { Bf16Code::best(isa) } else { Bf16Code::Wide };
        info.properties.insert("bf16_products".into(), code.name().into());
        let team = Team::new(options.threads.unwrap_or_else(cores));
        info.properties.insert("threads".into(), team.threads().to_string());
        let counts = Arc::new(Counts::default());
        let pool = Pool::new(HostSource, info.id.clone(), options, info.total_memory, counts.clone())?;
        let caps = Caps {
            storage: Caps::storage_of(true, true),
            f64: true,
            i64: true,
            f16_arithmetic: super::sys::f16_arithmetic(),
            f8_products: Some(false),
            subgroup: None,
            max_workgroup: 256,
            workgroup_memory: 256 << 10,
            max_bindings: 1 << 16,
            // Launches cost little, so element-wise kernels are not merged into one launch.
            max_argument_bytes: 0,
            max_binding_bytes: u64::MAX,
            max_groups: u32::MAX,
            offset_alignment: 8,
            compute_units: Some(team.threads() as u32),
            is_cpu: true,
            matrix: vec![],
        };
        Ok(CpuDevice {
            caps,
            team,
            isa,
            pool,
            host: Account::new(&info.id, options),
            info,
            counts,
            fault: AtomicU32::new(0),
            profile: options.profile,
            queue: Mutex::new(vec![]),
            tracker: Arc::default(),
            number: NEXT.fetch_add(1, Ordering::Relaxed),
        })
    }

    /// Number of threads that work on a command, including the calling thread.
    pub fn threads(&self) -> usize {
        self.team.threads()
    }

    fn turn(&self) -> MutexGuard<'_, Vec<Timing>> {
        // A kernel that panics leaves a partly written buffer, but the list of timings is intact. So ignore
        // that the mutex is poisoned.
        self.queue.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn none_left(&self, bytes: usize, why: String) -> Error {
        Error::OutOfMemory {
            device: self.info.id.clone(),
            what: format!("memory for packing a constant: {why}"),
            requested: bytes as u64,
            free: self.available().unwrap_or(0),
            total: self.info.total_memory.unwrap_or(0),
            next: "Use a smaller model".into(),
        }
    }

    fn execution(&self) -> Execution<'_> {
        Execution { team: &self.team, isa: self.isa, counts: &self.counts, fault: &self.fault }
    }

    /// Runs one command.
    ///
    /// # Safety
    /// The device lock is held. The memory that `tracker::of_command` names is registered with the
    /// tracker, or there are no streams.
    unsafe fn run(&self, c: &Command<'_>) -> Result<()> {
        match c {
            Command::Launch { program, groups, buffers, params, fault } => {
                let p = program_of(program)?;
                let at: Vec<Ptr> = buffers
                    .iter()
                    .map(|b| CpuBuffer::of(&**b, self.number, p.name()).map(CpuBuffer::at))
                    .collect::<Result<_>>()?;
                // SAFETY: the command holds the buffers, and the device lock keeps them in place. `run`
                // requires that they are registered.
                unsafe { self.execution().launch(p, *groups, &at, params, *fault) }
            }
            Command::Library { kernel, buffers, args, fault } => {
                let k = kernel_of(&***kernel)?;
                let at: smallvec::SmallVec<[Ptr; 16]> = buffers
                    .iter()
                    .map(|b| CpuBuffer::of(&**b, self.number, k.name()).map(CpuBuffer::at))
                    .collect::<Result<_>>()?;
                // SAFETY: the command holds the buffers, and the device lock keeps them in place. `run`
                // requires that they are registered.
                unsafe { self.execution().library(k, &at, args, *fault) }
            }
            Command::Copy { src, src_offset, dst, dst_offset, bytes } => {
                let (s, d) = (
                    CpuBuffer::of(&***src, self.number, "copy")?.at(),
                    CpuBuffer::of(&***dst, self.number, "copy")?.at(),
                );
                let same = std::ptr::eq(s.ptr, d.ptr);
                crate::validate::copy([s.bytes, *src_offset], [d.bytes, *dst_offset], *bytes, same)?;
                check_writable("copy", &d)?;
                let (s, d) = (s.part(*src_offset, *bytes), d.part(*dst_offset, *bytes));
                // SAFETY: the code above checked both ranges and that the destination is writable. The
                // command holds the buffers, the device lock keeps them in place, and `run` requires that
                // they are registered.
                unsafe { self.execution().copy(&s, &d) };
                Ok(())
            }
        }
    }

    /// Runs work of the device's own queue, after conflicting work of streams. `each(f)` calls `f` once per
    /// command of the work, with the memory that the command uses. The caller holds the device lock, so no
    /// stream is created meanwhile.
    fn pass<R>(&self, each: tracker::Each<'_>, f: impl FnOnce() -> Result<R>) -> Result<R> {
        // Without streams, the device lock alone keeps the work in order.
        if self.tracker.is_quiet() { f() } else { self.tracker.pass(each, f) }
    }

    /// Address of a buffer of this opening of the device.
    #[cfg(test)]
    pub(crate) fn start_of(&self, b: &BufferRef) -> *mut u8 {
        CpuBuffer::of(&**b, self.number, "test").unwrap().at().ptr
    }

    /// Whether there are no streams.
    #[cfg(test)]
    pub(crate) fn is_quiet(&self) -> bool {
        self.tracker.is_quiet()
    }
}

/// Whether the data is not aligned to `ELEMENT` bytes. Kernels need aligned elements, but data in a mapped
/// file may start at any address.
fn askew(b: &[u8]) -> bool {
    !(b.as_ptr() as usize).is_multiple_of(ELEMENT)
}

pub(crate) fn check_range(op: &str, p: &Ptr, offset: usize, bytes: usize) -> Result<()> {
    match offset.checked_add(bytes) {
        Some(end) if end <= p.bytes => Ok(()),
        _ => Err(Error::argument(
            op,
            format!("{bytes} bytes from {offset} reach past the end of a buffer of {}", p.bytes),
        )),
    }
}

pub(crate) fn check_writable(op: &str, p: &Ptr) -> Result<()> {
    if p.read_only {
        Err(Error::argument(op, "the buffer holds imported data, which is read only"))
    } else {
        Ok(())
    }
}

impl Target for CpuDevice {
    fn caps(&self) -> &Caps {
        &self.caps
    }

    fn library(&self, call: &LibraryCall<'_>) -> Result<Arc<dyn LibraryKernel>, Declined> {
        library::find(self.isa, self.team.threads(), call).map(|k| Arc::new(k) as Arc<dyn LibraryKernel>)
    }

    fn part_alignment(&self) -> Option<usize> {
        Some(LINE)
    }

    fn has_epilogues(&self) -> bool {
        true
    }

    fn channel_block(&self, dtype: DType) -> Option<usize> {
        match dtype {
            DType::F32 => Some(library::simd::lanes(self.isa)),
            DType::BF16 => {
                library::conv::blocked_bf16::available(self.isa).then_some(library::conv::blocked_bf16::BLOCK)
            }
            _ => None,
        }
    }
}

impl Device for CpuDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn counters(&self) -> Counters {
        self.counts.snapshot()
    }

    fn pool(&self) -> &dyn Accounts {
        &*self.pool
    }

    fn pinned(&self) -> u64 {
        self.host.used()
    }

    fn free_memory(&self) -> Option<u64> {
        halcyon_host::memory().map(|m| m.0)
    }

    fn alloc(&self, bytes: usize, tag: Tag) -> Result<BufferRef> {
        Ok(Arc::new(CpuBuffer::pooled(self.pool.alloc(bytes, tag, &|| self.defragment())?, self.number)))
    }

    fn alloc_zeroed(&self, bytes: usize, tag: Tag) -> Result<Option<BufferRef>> {
        if bytes < LAZY {
            return Ok(None);
        }
        let block = self.pool.alloc(bytes, tag, &|| self.defragment())?;
        // New memory of `HostMemory` is zero.
        Ok(block.is_new().then(|| Arc::new(CpuBuffer::pooled(block, self.number)) as BufferRef))
    }

    fn supply(&self, buffers: &[BufferRef]) -> Supply {
        let own = |b: &BufferRef| Some(CpuBuffer::of(&**b, self.number, "supply").ok()?.held());
        let held: Vec<Held> = buffers.iter().filter_map(own).flatten().collect();
        match held.is_empty() {
            true => Supply::default(),
            false => Supply::start(move || held.iter().for_each(Held::supply)),
        }
    }

    fn defragment(&self) -> Result<Defragmented> {
        let _turn = self.turn();
        self.pool.defragment(&mut |m| {
            let (from, to) = (m.from.0.start(), m.to.0.start());
            // SAFETY: the pool chose both ranges inside their chunks. The new range may overlap the old one,
            // which `copy` permits, but no other live buffer. The device lock excludes the device's own
            // commands, and the pool does not move buffers that a stream uses.
            unsafe { std::ptr::copy(from.add(m.from.1), to.add(m.to.1), m.bytes) };
            Ok(())
        })
    }

    fn alloc_host(&self, bytes: usize) -> Result<HostBuffer> {
        self.host.buffer(bytes, false, || match HostMemory::pages(bytes) {
            Some(m) => Ok(Box::new(m) as Box<dyn Pages>),
            None => Err("the system has no memory left".into()),
        })
    }

    fn part(&self, of: &BufferRef, offset: usize, bytes: usize) -> Result<BufferRef> {
        Ok(Arc::new(CpuBuffer::part(of, offset, bytes, self.number)?))
    }

    /// Imports data whose address is a multiple of `ELEMENT`. Returns `None` for other data.
    fn import(&self, data: Arc<dyn Bytes>) -> Option<BufferRef> {
        CpuBuffer::lent(data, self.number).map(|b| Arc::new(b) as BufferRef)
    }

    fn export(&self, buffer: &BufferRef) -> Result<Option<Exported>> {
        let _turn = self.turn();
        let buffer = CpuBuffer::of(&**buffer, self.number, "export")?;
        // The pin excludes moves, so the address is read after it.
        let keep = buffer.keep();
        let at = buffer.at();
        self.pass(&|each| each(&tracker::reading(&at)), || Ok(()))?;
        Ok(Some(Exported {
            address: at.ptr.expose_provenance(),
            bytes: at.bytes,
            read_only: at.read_only,
            _keep: Box::new(keep),
        }))
    }

    fn write(&self, dst: &BufferRef, offset: usize, src: &[u8]) -> Result<()> {
        let _turn = self.turn();
        let d = CpuBuffer::of(&**dst, self.number, "write")?.at();
        check_range("write", &d, offset, src.len())?;
        check_writable("write", &d)?;
        let d = d.part(offset, src.len());
        self.pass(&|each| each(&tracker::writing(&d)), || {
            // SAFETY: `check_range` and `check_writable` accepted `src.len()` bytes of `d`, and `src` has
            // that length. `pass` has registered the write, unless there are no streams; this function holds
            // the device lock.
            unsafe { self.execution().write(src.as_ptr(), &d, src.len()) };
            Ok(())
        })
    }

    fn read(&self, src: &BufferRef, offset: usize, dst: &mut [u8]) -> Result<()> {
        let _turn = self.turn();
        let s = CpuBuffer::of(&**src, self.number, "read")?.at();
        check_range("read", &s, offset, dst.len())?;
        let s = s.part(offset, dst.len());
        self.pass(&|each| each(&tracker::reading(&s)), || {
            // SAFETY: `check_range` accepted `dst.len()` bytes of `s`. `pass` has registered the read, unless
            // there are no streams, and this function holds the device lock.
            unsafe { self.execution().read(&s, dst) };
            Ok(())
        })
    }

    fn pack(&self, kernel: &dyn LibraryKernel, from: &BufferRef, to: &BufferRef) -> Result<()> {
        let _turn = self.turn();
        let k: &CpuKernel = kernel
            .as_any()
            .downcast_ref()
            .ok_or_else(|| Error::argument("pack", "the kernel belongs to another device"))?;
        let (from, to) = (
            CpuBuffer::of(&**from, self.number, "pack")?.at(),
            CpuBuffer::of(&**to, self.number, "pack")?.at(),
        );
        // SAFETY: the caller holds both buffers, and the device lock keeps them in place. `pass` has ended
        // conflicting work of streams and lets none begin. `pack` checks the sizes, that `to` is writable,
        // and that the buffers do not overlap.
        self.pass(&|each| each(&tracker::of_copy(&from, &to)), || unsafe { k.pack(&self.team, &from, &to) })
    }

    fn pack_host(&self, constants: &[(&dyn LibraryKernel, &[u8], &BufferRef)]) -> Result<()> {
        let _turn = self.turn();
        let bytes: Vec<&[u8]> = constants.iter().map(|(_, b, _)| *b).collect();
        let room = match self.pack_room(&bytes) {
            0 => None,
            n => Some(HostSource.allocate(n).map_err(|e| self.none_left(n, e))?),
        };
        for (kernel, bytes, to) in constants {
            let k: &CpuKernel = kernel
                .as_any()
                .downcast_ref()
                .ok_or_else(|| Error::argument("pack", "the kernel belongs to another device"))?;
            let mut from = Ptr { ptr: bytes.as_ptr() as *mut u8, bytes: bytes.len(), read_only: true };
            if let Some(r) = room.as_ref().filter(|_| askew(bytes)) {
                // SAFETY: `pack_room` returned the length of the longest misaligned constant, so
                // `bytes.len()` bytes fit at the start of `r`, which this function owns.
                unsafe { copy_bytes(&self.team, from.ptr, r.start(), bytes.len()) };
                from.ptr = r.start();
            }
            let to = CpuBuffer::of(&***to, self.number, "pack")?.at();
            // SAFETY: `from` is a borrowed slice or its copy in `room`. The caller holds the buffer `to`, and
            // the device lock keeps it in place. `pass` has ended conflicting work of streams and lets none
            // begin. `pack` checks the sizes, that `to` is writable, and that the buffers do not overlap.
            self.pass(&|each| each(&tracker::writing(&to)), || unsafe { k.pack(&self.team, &from, &to) })?;
        }
        Ok(())
    }

    fn pack_room(&self, constants: &[&[u8]]) -> usize {
        constants.iter().filter(|b| askew(b)).map(|b| b.len()).max().unwrap_or(0)
    }

    fn compile(&self, kernel: &Kernel) -> Result<Arc<dyn Program>> {
        halcyon_ir::kernel::verify_for(kernel, &self.caps)?;
        let p = CpuProgram::new(kernel)?;
        Counts::add(&self.counts.compiles, 1);
        Ok(Arc::new(p))
    }

    fn submit(&self, commands: &[Command<'_>]) -> Result<()> {
        let mut timings = self.turn();
        let each = |f: &mut dyn FnMut(&Access)| {
            commands.iter().for_each(|c| f(&tracker::of_command(c, self.number)))
        };
        self.pass(&each, || {
            for c in commands {
                let start = self.profile.then(Instant::now);
                // SAFETY: `timings` is the guard of the device lock, and `pass` has registered the memory of
                // all commands unless there are no streams.
                unsafe { self.run(c)? };
                if let Some(s) = start {
                    timings.push(Timing { nanoseconds: s.elapsed().as_nanos() as u64 });
                }
            }
            Ok(())
        })
    }

    fn synchronize(&self) -> Result<()> {
        drop(self.turn());
        self.tracker.drain();
        Ok(())
    }

    /// Starts a thread that runs the stream's commands, with further threads for its kernels. Kernels split
    /// their work for the device's number of threads, even if the stream has fewer. Kernels that were made
    /// for the device therefore run on the stream unchanged.
    fn create_stream(&self, options: &StreamOptions) -> Result<Arc<dyn Stream>> {
        let _turn = self.turn();
        let (id, width) = (&self.info.id, self.team.threads());
        Ok(Arc::new(CpuStream::new(id, self.number, self.isa, width, &self.tracker, &self.counts, options)?))
    }

    fn take_fault(&self) -> Result<Option<u32>> {
        let _turn = self.turn();
        Ok(Some(self.fault.swap(0, Ordering::AcqRel)).filter(|f| *f != 0))
    }

    fn take_timings(&self) -> Result<Vec<Timing>> {
        Ok(std::mem::take(&mut *self.turn()))
    }

    fn as_target(&self) -> &dyn Target {
        self
    }
}
