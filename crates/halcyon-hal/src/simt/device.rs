//! An open device.

use super::adapter::Adapter;
use super::capture::SimtCapture;
use super::library::{Libraries, Search, Searcher, SimtKernel, Sources};
use super::memory::{ALIGNMENT, SimtBuffer, SimtPages, SimtSource};
use super::program::{Function, SimtProgram};
use super::queue::{Point, Queue, Stamp};
use super::stream::{SimtStream, Staging, Watcher};
use super::sys::Context;
use super::toolchain::Toolchain;
use crate::cache::{self, DiskCache};
use crate::commands::{self, Addressed, DeviceInstance};
use crate::hazard::Access;
use crate::host_buffer::{Account, Pages};
use crate::pool::Pool;
use crate::queues::{Mark, Queues};
use crate::tune;
use crate::validate::{self, Signature};
use crate::{
    Accounts, Buffer, BufferRef, Caps, Capture, Command, Counters, Counts, Declined, Defragmented, Device,
    DeviceInfo, DeviceMemory, Error, HostBuffer, LibraryCall, LibraryKernel, Options, Program, Recording,
    Result, Stream, StreamOptions, Tag, Target, Timing,
};
use halcyon_ir::Scalar;
use halcyon_ir::kernel::{Kernel, verify_for};
use halcyon_ir::render;
use std::any::Any;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

/// Number of programs kept in memory. Beyond this number, programs that nothing else uses are dropped.
const MAX_PROGRAMS: usize = 2048;

/// The state shared by the queues of one device.
#[derive(Debug)]
pub(crate) struct Shared {
    /// Identifies this device instance; buffers and programs of another instance are rejected.
    pub number: u64,
    pub counts: Arc<Counts>,
    pub queues: Queues<Point>,
    pub staging: Staging,
    pub watcher: Watcher,
    /// Whether kernels of two streams can run concurrently.
    pub overlaps: bool,
    /// The time stamp from which the times of streams are measured.
    origin: OnceLock<Stamp>,
    /// Whether this device can access the memory of other devices, by their device numbers. Filled on demand.
    pub peers: Mutex<HashMap<i32, bool>>,
    /// This field is last, because dropping the fields above needs it.
    pub context: Arc<Context>,
}

/// An open device: one context, queue and pool.
#[derive(Debug)]
pub(super) struct SimtDevice {
    info: DeviceInfo,
    caps: Caps,
    toolchain: Toolchain,
    pub(super) queue: Queue,
    pub(super) pool: Arc<Pool<SimtSource>>,
    /// The queue that records captures, created for the first capture.
    pub(super) recorder: Mutex<Option<Queue>>,
    host: Account,
    programs: Mutex<HashMap<u128, Arc<SimtProgram>>>,
    disk: Option<DiskCache>,
    libraries: Libraries,
    search: Option<Search>,
    pub(super) shared: Arc<Shared>,
}

impl Shared {
    pub(super) fn kernel<'a>(&self, k: &'a Arc<dyn LibraryKernel>) -> Result<&'a SimtKernel> {
        k.as_any().downcast_ref::<SimtKernel>().filter(|k| k.owner == self.number).ok_or_else(|| {
            Error::argument("submit", format!("{} is a library kernel of another device", k.name()))
        })
    }

    /// The time stamp from which the times of streams are measured.
    pub(super) fn origin(&self) -> Result<&Stamp> {
        self.origin.get().ok_or_else(|| Error::internal("a stream has no time stamp of its beginning"))
    }

    /// Enqueues commands up to the first invalid one.
    pub(super) fn enqueue(&self, queue: &Queue, commands: &[Command<'_>]) -> Result<()> {
        let mut s = queue.begin()?;
        // SAFETY: the driver contract requires that the submitted commands have buffers as large as the
        // kernels need.
        unsafe { commands::run(self, &mut s, queue.counts(), commands) }
    }
}

impl DeviceInstance for Shared {
    type Buffer = SimtBuffer;
    type Program = SimtProgram;

    fn id(&self) -> &str {
        &self.context.id
    }

    fn number(&self) -> u64 {
        self.number
    }

    fn is_read_only(&self, b: &SimtBuffer) -> bool {
        b.is_imported()
    }
}

impl Addressed for Shared {
    fn span(b: &SimtBuffer) -> (usize, usize) {
        b.span()
    }

    fn kernel_writes(&self, kernel: &Arc<dyn LibraryKernel>, buffer: usize) -> Option<bool> {
        self.kernel(kernel).ok().map(|k| k.writes(buffer))
    }
}

impl SimtDevice {
    /// # Safety
    /// The contract of [`Family::compiler`](super::Family::compiler), for `compilers`. The library of
    /// `kernels` must meet the contract of [`SimtDriver::with_kernels`](super::SimtDriver::with_kernels).
    pub(super) unsafe fn open(
        adapter: &Adapter,
        compilers: &[String],
        kernels: Sources,
        options: &Options,
    ) -> Result<SimtDevice> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let (api, mut info, mut caps) = (adapter.api, adapter.info(), adapter.caps());
        if options.matrix_units == Some(false) {
            caps.matrix.clear();
        }
        let context = Arc::new(Context::new(api, adapter.device, info.id.clone())?);
        info.free_memory = context.free_memory(info.unified_memory);
        let dir = options.cache_dir.clone().or_else(cache::user_dir).map(|d| d.join(api.family.kind.id()));
        let disk = dir.map(|d| DiskCache::new(d, cache::DEFAULT_LIMIT));
        // SAFETY: `open` requires names that meet the contract of `Family::compiler`.
        let toolchain = unsafe { Toolchain::choose(adapter, &context, compilers, disk.as_ref()) }?;
        info.properties.insert("compiler".into(), toolchain.describe());
        if !toolchain.passed.is_empty() {
            let passed = toolchain.passed.join("; ");
            tracing::warn!(device = info.id, used = toolchain.describe(), "compilers were skipped: {passed}");
            info.properties.insert("compilers_passed_over".into(), passed);
        }
        let counts = Arc::new(Counts::default());
        let source = SimtSource(context.clone());
        let pool = Pool::new(source, info.id.clone(), options, info.total_memory, counts.clone())?;
        let queue = Queue::new(&context, pool.clone(), counts.clone(), options.profile, false)?;
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let libraries = Libraries::new(&context, number, kernels, options);
        if options.cudnn == Some(true) {
            let found = libraries.dnn().map_err(|absent| {
                let next =
                    "Do not enable cuDNN, or install it where `halcyon doctor` says that it is searched for";
                Error::unsupported(format!("cuDNN on {}: {absent}", info.id), next)
            })?;
            info.properties.insert("cudnn".into(), found);
        }
        let search = options.algorithm_search.as_ref();
        let search = search.map(|s| Search::new(s.0.clone(), tune::device_key(&info, &caps)));
        Ok(SimtDevice {
            libraries,
            search,
            host: Account::new(&info.id, options),
            info,
            caps,
            toolchain,
            queue,
            pool,
            recorder: Mutex::default(),
            programs: Mutex::default(),
            disk,
            shared: Arc::new(Shared {
                number,
                counts,
                queues: Queues::default(),
                staging: Staging::default(),
                watcher: Watcher::default(),
                overlaps: adapter.concurrent(),
                origin: OnceLock::new(),
                peers: Mutex::default(),
                context,
            }),
        })
    }

    /// Enqueues work in the device's own queue, in order with the work of streams that uses the same memory.
    pub(super) fn ordered_own<R>(
        &self,
        access: impl FnOnce() -> Access,
        f: impl FnOnce() -> Result<R>,
    ) -> Result<(Arc<Point>, R)> {
        self.shared.context.enter()?;
        self.shared.queues.ordered_own(&self.queue, access, f)
    }

    /// Waits for the enqueued work. After an error, waits for everything in the queue.
    fn wait_for_result(&self, made: Result<(Arc<Point>, ())>) -> Result<()> {
        match made {
            Ok((point, ())) => point.wait(),
            Err(e) => {
                self.queue.finish()?;
                Err(e)
            }
        }
    }

    /// Compiles source text, or loads its binary from the disk cache.
    pub(super) fn build(&self, name: &str, text: &str, entry: &str, items: u32) -> Result<Function> {
        let start = std::time::Instant::now();
        let disk = self.disk.as_ref();
        let built = self.toolchain.build(&self.shared.context, disk, name, text, entry, items);
        let (function, hit) = built.map_err(|f| f.error())?;
        if hit {
            Counts::add(&self.shared.counts.compile_cache_hits, 1);
            return Ok(function);
        }
        Counts::add(&self.shared.counts.compiles, 1);
        tracing::debug!(kernel = name, device = %self.info.id, elapsed = ?start.elapsed(), "compiled");
        Ok(function)
    }
}

impl Target for SimtDevice {
    fn caps(&self) -> &Caps {
        &self.caps
    }

    fn library(&self, call: &LibraryCall<'_>) -> std::result::Result<Arc<dyn LibraryKernel>, Declined> {
        let searcher = self.search.as_ref().map(|search| Searcher { search, device: self });
        self.libraries.find(call, searcher).map(|k| Arc::new(k) as Arc<dyn LibraryKernel>)
    }

    fn has_epilogues(&self) -> bool {
        self.libraries.has_epilogues()
    }
}

impl Device for SimtDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn counters(&self) -> Counters {
        self.shared.counts.snapshot()
    }

    fn pool(&self) -> &dyn Accounts {
        &*self.pool
    }

    fn pinned(&self) -> u64 {
        self.host.used()
    }

    fn free_memory(&self) -> Option<u64> {
        self.shared.context.free_memory(self.info.unified_memory)
    }

    fn alloc(&self, bytes: usize, tag: Tag) -> Result<BufferRef> {
        let block = self.pool.alloc(bytes, tag, &|| self.defragment())?;
        Ok(Arc::new(SimtBuffer::pooled(block, self.shared.number)))
    }

    fn defragment(&self) -> Result<Defragmented> {
        // SAFETY: `while_idle` waits for the work of all streams, and lets none of them enqueue work during
        // the call, because streams enqueue only under the lock that it holds.
        self.shared.queues.while_idle(|| unsafe { self.queue.defragment() })
    }

    fn alloc_host(&self, bytes: usize) -> Result<HostBuffer> {
        self.host.buffer(bytes, true, || {
            Ok(Box::new(SimtPages::new(&self.shared.context, bytes)?) as Box<dyn Pages>)
        })
    }

    fn export_device(&self, buffer: &BufferRef) -> Result<Option<DeviceMemory>> {
        let b = self.shared.buffer("export", buffer)?;
        self.synchronize()?;
        // The buffer does not move while it is kept, so the address is read afterwards.
        let keep = b.keep(buffer, &self.shared.context);
        Ok(Some(DeviceMemory {
            device: (self.info.backend, self.info.index),
            address: b.address(),
            bytes: b.bytes(),
            read_only: b.is_imported(),
            _keep: keep,
        }))
    }

    fn import_device(&self, memory: DeviceMemory) -> Result<BufferRef> {
        let device = (self.info.backend, self.info.index);
        if memory.device() != device {
            let what = format!("{memory:?} is not memory of {}", self.info.id);
            return Err(Error::argument("import", what));
        }
        self.shared.context.wait()?;
        let aligned = memory.address().is_multiple_of(ALIGNMENT);
        let bytes = memory.bytes();
        let imported: BufferRef =
            Arc::new(SimtBuffer::imported(memory, &self.shared.context, self.shared.number));
        if aligned {
            return Ok(imported);
        }
        let own = self.alloc(bytes, Tag::Io)?;
        let copy = Command::Copy { src: &imported, src_offset: 0, dst: &own, dst_offset: 0, bytes };
        self.submit(&[copy])?;
        // Dropping the import waits for the copy.
        Ok(own)
    }

    fn write(&self, dst: &BufferRef, offset: usize, src: &[u8]) -> Result<()> {
        let b = self.shared.writable("write", dst)?;
        validate::range("write", dst.bytes(), offset, src.len())?;
        // SAFETY: the buffer is this device's, and the range was validated.
        match self.shared.queues.unordered(|| unsafe { self.queue.write(b, offset, src) }) {
            Some(r) => r?,
            None if src.is_empty() => {}
            None => {
                let (from, n) = (src.as_ptr().cast(), src.len());
                // SAFETY: the range was validated, and `src` outlives the wait: `wait_for_result` waits even
                // after an error.
                let write = || unsafe { self.queue.write_later(b, offset, from, n) };
                self.wait_for_result(self.ordered_own(|| b.writing(), write))?;
            }
        }
        Counts::add(&self.shared.counts.uploads, 1);
        Counts::add(&self.shared.counts.uploaded_bytes, src.len() as u64);
        Ok(())
    }

    fn read(&self, src: &BufferRef, offset: usize, dst: &mut [u8]) -> Result<()> {
        let b = self.shared.buffer("read", src)?;
        validate::range("read", src.bytes(), offset, dst.len())?;
        // SAFETY: the buffer is this device's, and the range was validated.
        match self.shared.queues.unordered(|| unsafe { self.queue.read(b, offset, dst) }) {
            Some(r) => r?,
            None if dst.is_empty() => self.queue.finish()?,
            None => {
                let (to, n) = (dst.as_mut_ptr().cast(), dst.len());
                // SAFETY: the range was validated, and `dst` outlives the wait: `wait_for_result` waits even
                // after an error.
                let read = || unsafe { self.queue.read_later(b, offset, to, n) };
                self.wait_for_result(self.ordered_own(|| b.reading(), read))?;
            }
        }
        Counts::add(&self.shared.counts.downloads, 1);
        Counts::add(&self.shared.counts.downloaded_bytes, dst.len() as u64);
        Ok(())
    }

    fn compile(&self, kernel: &Kernel) -> Result<Arc<dyn Program>> {
        let key = kernel.key();
        // The lock is held while compiling, so that two threads do not build the same kernel.
        let mut programs = self.programs.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(p) = programs.get(&key) {
            return Ok(p.clone());
        }
        verify_for(kernel, &self.caps)?;
        let _driver = crate::driver_output::capture(self.shared.context.api.family.kind.id());
        let signature = Signature::of(kernel)?;
        let source = render::render(kernel, self.shared.context.api.family.language)?;
        let entry =
            source.entries.first().ok_or_else(|| Error::internal("a rendered kernel without an entry"))?;
        let function = self.build(&kernel.name, &source.text, entry, kernel.items())?;
        let program = Arc::new(SimtProgram {
            signature,
            workgroup: kernel.workgroup,
            function,
            source: source.text,
            kernel: kernel.clone(),
            indirect: Mutex::default(),
            owner: self.shared.number,
        });
        if programs.len() >= MAX_PROGRAMS {
            programs.retain(|_, p| Arc::strong_count(p) > 1);
        }
        programs.insert(key, program.clone());
        Ok(program)
    }

    fn submit(&self, commands: &[Command<'_>]) -> Result<()> {
        let enqueue = || self.shared.enqueue(&self.queue, commands);
        match self.shared.queues.unordered(enqueue) {
            Some(r) => r,
            None => self.ordered_own(|| self.shared.access(commands), enqueue).map(drop),
        }
    }

    fn can_copy_from(&self, from: &dyn Device) -> Result<()> {
        self.reaches(from)
    }

    fn copy_from_peer(
        &self,
        from: &dyn Device,
        src: &BufferRef,
        src_offset: usize,
        dst: &BufferRef,
        dst_offset: usize,
        bytes: usize,
    ) -> Result<()> {
        self.copy_peer(from, (src, src_offset), (dst, dst_offset), bytes)
    }

    fn as_peer(&self) -> Option<&dyn Any> {
        Some(self)
    }

    fn captures(&self) -> bool {
        true
    }

    fn capture(&self, recording: &Recording<'_>) -> Result<Arc<dyn Capture>> {
        SimtCapture::new(self, recording).map(|r| Arc::new(r) as Arc<dyn Capture>)
    }

    fn launch_capture(
        &self,
        capture: &dyn Capture,
        buffers: &[&BufferRef],
        values: &[Scalar],
    ) -> Result<bool> {
        let r = SimtCapture::of(&self.shared, capture)?;
        let launch = || r.launch(&self.queue, buffers, values);
        match self.shared.queues.unordered(launch) {
            Some(ran) => ran,
            None => self.ordered_own(|| r.access(buffers), launch).map(|(_, ran)| ran),
        }
    }

    fn synchronize(&self) -> Result<()> {
        self.queue.finish()?;
        self.shared.queues.drain();
        Ok(())
    }

    /// Each stream of Halcyon is a stream of CUDA or HIP. Whether work of several streams runs at the same
    /// time depends on the hardware.
    fn create_stream(&self, options: &StreamOptions) -> Result<Arc<dyn Stream>> {
        let counts = self.shared.counts.clone();
        let queue = Queue::new(&self.shared.context, self.pool.clone(), counts, options.profile, true)?;
        if self.shared.origin.get().is_none() {
            let stamp = queue.stamp()?;
            self.shared.origin.get_or_init(|| stamp);
        }
        Ok(Arc::new(SimtStream::new(&self.shared, &self.queue, queue)?))
    }

    fn take_fault(&self) -> Result<Option<u32>> {
        self.queue.take_fault()
    }

    fn take_timings(&self) -> Result<Vec<Timing>> {
        self.queue.take_timings()
    }

    fn kernel_libraries(&self) -> Vec<(String, String)> {
        let mut all = self.libraries.describe();
        let t = &self.toolchain;
        let passed =
            if t.passed.is_empty() { String::new() } else { format!(" (not used: {})", t.passed.join("; ")) };
        all.push(("run-time compiler".into(), format!("{}{passed}", t.describe())));
        all
    }

    fn searches_algorithms(&self) -> std::result::Result<(), String> {
        match self.search {
            Some(_) => self.libraries.lists_algorithms(),
            None => Err("it was not requested".into()),
        }
    }

    fn as_target(&self) -> &dyn Target {
        self
    }
}
