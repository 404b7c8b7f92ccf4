//! An open OpenCL device.

use super::adapter::Adapter;
use super::capture::ClCapture;
use super::command_buffer::CommandBuffers;
use super::memory::{ClBuffer, ClPages, ClSource};
use super::program::{Builder, ClProgram, Entry};
use super::queue::Queue;
use super::stream::{ClStream, Point, Shared};
use super::sys::{self, Context, Event, Owned};
use crate::cache::{self, DiskCache};
use crate::commands::{Addressed, DeviceInstance};
use crate::fork::Origin;
use crate::hazard::Access;
use crate::host_buffer::{Account, Pages};
use crate::pool::Pool;
use crate::queues::Mark;
use crate::validate::{self, Signature};
use crate::{
    Accounts, BufferRef, Caps, Capture, Command, Counters, Counts, Declined, Defragmented, Device,
    DeviceInfo, Error, HostBuffer, LibraryCall, LibraryKernel, Options, Program, Recording, Result, Stream,
    StreamOptions, Tag, Target, Timing,
};
use halcyon_ir::Scalar;
use halcyon_ir::data::Bytes;
use halcyon_ir::kernel::{Kernel, verify_for};
use halcyon_ir::render::{self, Language};
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

/// Number of programs kept in memory. Beyond this number, programs that nothing else uses are dropped.
const MAX_PROGRAMS: usize = 2048;

/// An open device: one context, queue and pool.
#[derive(Debug)]
pub(super) struct OpenClDevice {
    adapter: Adapter,
    info: DeviceInfo,
    caps: Caps,
    counts: Arc<Counts>,
    context: Arc<Owned<Context>>,
    /// What the pool's memory comes from, for imported memory.
    source: ClSource,
    queue: Queue,
    shared: Arc<Shared>,
    pool: Arc<Pool<ClSource>>,
    host: Account,
    programs: Mutex<HashMap<u128, Arc<ClProgram>>>,
    disk: Option<DiskCache>,
    /// The process that opened the device.
    origin: Origin,
    /// The functions for captures, or why there are none. Resolved by the first capture.
    command_buffers: OnceLock<std::result::Result<Arc<CommandBuffers>, String>>,
    /// Identifies this device instance; buffers and programs of another instance are rejected.
    number: u64,
}

impl OpenClDevice {
    pub(super) fn open(adapter: Adapter, options: &Options) -> Result<OpenClDevice> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let (api, info, caps) = (adapter.api, adapter.info(), adapter.caps());
        let properties = [sys::CONTEXT_PLATFORM, adapter.platform as isize, 0];
        let mut code = 0;
        // SAFETY: `properties` is zero-terminated, and the device belongs to the platform.
        let raw = unsafe {
            (api.clCreateContext)(
                properties.as_ptr(),
                1,
                &adapter.device,
                None,
                std::ptr::null_mut(),
                &mut code,
            )
        };
        // SAFETY: `clCreateContext` returned this context with one reference.
        let context = unsafe { Owned::new(raw, code, api.clReleaseContext) }
            .map_err(|c| sys::driver_error(&info.id, "clCreateContext", c))?;
        let context = Arc::new(context);
        let counts = Arc::new(Counts::default());
        let (max, alignment) = (caps.max_binding_bytes, adapter.alignment());
        let source = ClSource { api, context: context.clone(), max, alignment };
        let pool = Pool::new(source.clone(), info.id.clone(), options, info.total_memory, counts.clone())?;
        let queue = Queue::new(&adapter, &context, &info.id, pool.clone(), options.profile, false)?;
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let (api, id) = (adapter.api, info.id.clone());
        let shared = Shared::new(api, context.clone(), id, number, counts.clone());
        let dir = options.cache_dir.clone().or_else(cache::user_dir).map(|d| d.join("opencl"));
        Ok(OpenClDevice {
            adapter,
            host: Account::new(&info.id, options),
            info,
            caps,
            counts,
            context,
            source,
            queue,
            shared,
            pool,
            programs: Mutex::default(),
            disk: dir.map(|d| DiskCache::new(d, cache::DEFAULT_LIMIT)),
            origin: Origin::here(),
            command_buffers: OnceLock::new(),
            number,
        })
    }

    pub(super) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    pub(super) fn queue(&self) -> &Queue {
        &self.queue
    }

    /// Alignment of sub-buffers in bytes.
    pub(super) fn sub_buffer_alignment(&self) -> usize {
        self.source.alignment
    }

    /// Whether kernels can read words of 64 bits.
    pub(super) fn has_words(&self) -> bool {
        self.caps.i64
    }

    /// The functions for captures; the error is the reason why there are none.
    pub(super) fn command_buffers(&self) -> std::result::Result<&Arc<CommandBuffers>, &str> {
        let found = self.command_buffers.get_or_init(|| CommandBuffers::of(&self.adapter).map(Arc::new));
        found.as_ref().map_err(|why| why.as_str())
    }

    /// Enqueues one command of the device's own queue, ordered with streams; returns the event of its
    /// completion.
    fn ordered_own(
        &self,
        access: impl FnOnce() -> Access,
        f: impl FnOnce() -> Result<Owned<Event>>,
    ) -> Result<Arc<Point>> {
        let f = || f().map(|e| (Some(self.queue.point(e)), ()));
        self.shared.queues.own_marked(&self.queue, access, f).map(|(point, ())| point)
    }

    /// Compiles source text, or loads its binary from the disk cache.
    pub(super) fn build(&self, name: &str, text: &str, entry: &str, items: u32) -> Result<Entry> {
        let b = Builder {
            adapter: &self.adapter,
            context: &self.context,
            id: &self.info.id,
            options: self.adapter.build_options(),
        };
        let platform = self.info.properties.get("platform_version").map_or("", |s| s.as_str());
        let device_version = self.info.properties.get("version").map_or("", |s| s.as_str());
        // The key contains the text instead of the kernel, because the text also changes if a renderer
        // changes.
        let key = cache::digest(&[
            text.as_bytes(),
            b.options.as_bytes(),
            self.info.name.as_bytes(),
            self.info.driver_version.as_deref().unwrap_or("").as_bytes(),
            device_version.as_bytes(),
            platform.as_bytes(),
            env!("CARGO_PKG_VERSION").as_bytes(),
        ]);
        if let Some(disk) = &self.disk
            && let Some(binary) = disk.get(key)
        {
            match b.load(&binary).map(|p| b.entry(p, entry, items)) {
                Some(Ok(k)) => {
                    Counts::add(&self.counts.compile_cache_hits, 1);
                    return Ok(k);
                }
                _ => {
                    tracing::warn!(kernel = name, "the driver refuses a cached program; it is built again");
                    disk.remove(key);
                }
            }
        }
        let start = std::time::Instant::now();
        let program = b.compile(name, text)?;
        let binary = self.disk.as_ref().and_then(|disk| Some((disk, b.binary(&program)?)));
        let entry = b.entry(program, entry, items)?;
        Counts::add(&self.counts.compiles, 1);
        tracing::debug!(kernel = name, device = %self.info.id, elapsed = ?start.elapsed(), "compiled");
        if let Some((disk, binary)) = binary {
            disk.put(key, &binary);
        }
        Ok(entry)
    }
}

impl Target for OpenClDevice {
    fn caps(&self) -> &Caps {
        &self.caps
    }

    fn library(&self, _: &LibraryCall<'_>) -> std::result::Result<Arc<dyn LibraryKernel>, Declined> {
        Err(Declined::because("OpenCL has no vendor library; kernels are generated"))
    }
}

impl Device for OpenClDevice {
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
        self.adapter.free_memory()
    }

    fn alloc(&self, bytes: usize, tag: Tag) -> Result<BufferRef> {
        self.origin.check(self.info.backend, &self.info.id)?;
        let block = self.pool.alloc(bytes, tag, &|| self.defragment())?;
        Ok(Arc::new(ClBuffer::pooled(block, self.number)))
    }

    fn defragment(&self) -> Result<Defragmented> {
        self.origin.check(self.info.backend, &self.info.id)?;
        // SAFETY: `while_idle` waits for the work of all streams and lets none of them enqueue more, because
        // streams enqueue only under the lock that it holds.
        self.shared.queues.while_idle(|| unsafe { self.queue.defragment(&self.context) })
    }

    fn alloc_host(&self, bytes: usize) -> Result<HostBuffer> {
        self.origin.check(self.info.backend, &self.info.id)?;
        self.host.buffer(bytes, true, || {
            let pages = ClPages::new(self.adapter.api, &self.context, self.queue.object(), bytes)?;
            Ok(Box::new(pages) as Box<dyn Pages>)
        })
    }

    fn import(&self, data: Arc<dyn Bytes>) -> Option<BufferRef> {
        if !self.info.unified_memory {
            return None;
        }
        ClBuffer::imported(&self.source, data, self.number).map(|b| Arc::new(b) as BufferRef)
    }

    fn write(&self, dst: &BufferRef, offset: usize, src: &[u8]) -> Result<()> {
        self.origin.check(self.info.backend, &self.info.id)?;
        let b = self.shared.writable("write", dst)?;
        validate::range("write", dst.bytes(), offset, src.len())?;
        // SAFETY: the buffer is this device's, and the range was validated.
        match self.shared.queues.unordered(|| unsafe { self.queue.write(b, offset, src) }) {
            Some(r) => r?,
            None if src.is_empty() => {}
            None => {
                // SAFETY: the range was validated, and `src` outlives the wait, which also happens after an
                // error.
                let write = || unsafe { self.queue.write_later(b, offset, src) };
                match self.ordered_own(|| b.writing(), write) {
                    Ok(point) => point.wait()?,
                    Err(e) => {
                        self.queue.finish()?;
                        return Err(e);
                    }
                }
            }
        }
        Counts::add(&self.counts.uploads, 1);
        Counts::add(&self.counts.uploaded_bytes, src.len() as u64);
        Ok(())
    }

    fn read(&self, src: &BufferRef, offset: usize, dst: &mut [u8]) -> Result<()> {
        self.origin.check(self.info.backend, &self.info.id)?;
        let b = self.shared.buffer("read", src)?;
        validate::range("read", src.bytes(), offset, dst.len())?;
        // SAFETY: the buffer is this device's, and the range was validated.
        match self.shared.queues.unordered(|| unsafe { self.queue.read(b, offset, dst) }) {
            Some(r) => r?,
            None if dst.is_empty() => self.queue.finish()?,
            None => {
                let (to, n) = (dst.as_mut_ptr(), dst.len());
                // SAFETY: the range was validated, and `dst` outlives the wait, which also happens after an
                // error.
                let read = || unsafe { self.queue.read_later(b, offset, to, n) };
                match self.ordered_own(|| b.reading(), read) {
                    Ok(point) => point.wait()?,
                    Err(e) => {
                        self.queue.finish()?;
                        return Err(e);
                    }
                }
            }
        }
        Counts::add(&self.counts.downloads, 1);
        Counts::add(&self.counts.downloaded_bytes, dst.len() as u64);
        Ok(())
    }

    fn compile(&self, kernel: &Kernel) -> Result<Arc<dyn Program>> {
        self.origin.check(self.info.backend, &self.info.id)?;
        let key = kernel.key();
        // The lock is held while compiling, so that two threads do not build the same kernel.
        let mut programs = self.programs.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(p) = programs.get(&key) {
            return Ok(p.clone());
        }
        verify_for(kernel, &self.caps)?;
        let _driver = crate::driver_output::capture("opencl");
        let signature = Signature::of(kernel)?;
        let source = render::render(kernel, Language::OpenCl)?;
        let entry =
            source.entries.first().ok_or_else(|| Error::internal("a rendered kernel without an entry"))?;
        let entry = Arc::new(self.build(&kernel.name, &source.text, entry, kernel.items())?);
        let program = Arc::new(ClProgram {
            signature,
            workgroup: kernel.workgroup,
            entry,
            source: source.text,
            ir: kernel.clone(),
            indirect: Mutex::default(),
            owner: self.number,
        });
        if programs.len() >= MAX_PROGRAMS {
            programs.retain(|_, p| Arc::strong_count(p) > 1);
        }
        programs.insert(key, program.clone());
        Ok(program)
    }

    fn submit(&self, commands: &[Command<'_>]) -> Result<()> {
        self.origin.check(self.info.backend, &self.info.id)?;
        // SAFETY: `unordered` or `ordered_own` of `Queues` calls this, as `enqueue` requires.
        let enqueue = || unsafe { self.shared.enqueue(&self.queue, commands) };
        let s = &self.shared;
        match s.queues.unordered(enqueue) {
            Some(r) => r,
            None => s.queues.ordered_own(&self.queue, || s.access(commands), enqueue).map(drop),
        }
    }

    /// Whether the driver has command buffers is found by the first capture.
    fn captures(&self) -> bool {
        true
    }

    fn capture(&self, recording: &Recording<'_>) -> Result<Arc<dyn Capture>> {
        ClCapture::new(self, recording).map(|c| Arc::new(c) as Arc<dyn Capture>)
    }

    fn launch_capture(
        &self,
        capture: &dyn Capture,
        buffers: &[&BufferRef],
        values: &[Scalar],
    ) -> Result<bool> {
        let c = ClCapture::of(&self.shared, capture)?;
        let launch = || c.launch(&self.queue, buffers, values);
        match self.shared.queues.unordered(launch) {
            Some(ran) => ran,
            None => {
                self.shared.queues.ordered_own(&self.queue, || c.access(buffers), launch).map(|(_, ran)| ran)
            }
        }
    }

    fn synchronize(&self) -> Result<()> {
        self.origin.check(self.info.backend, &self.info.id)?;
        self.queue.finish()?;
        self.shared.queues.drain();
        Ok(())
    }

    /// A stream has its own OpenCL queue. Whether it overlaps with others depends on the driver and the
    /// hardware.
    fn create_stream(&self, options: &StreamOptions) -> Result<Arc<dyn Stream>> {
        self.origin.check(self.info.backend, &self.info.id)?;
        let (id, pool) = (&self.info.id, self.pool.clone());
        let queue = Queue::new(&self.adapter, &self.context, id, pool, options.profile, true)?;
        Ok(Arc::new(ClStream::new(&self.shared, &self.queue, queue)?))
    }

    fn take_fault(&self) -> Result<Option<u32>> {
        self.queue.take_fault()
    }

    fn take_timings(&self) -> Result<Vec<Timing>> {
        self.queue.take_timings()
    }

    fn as_target(&self) -> &dyn Target {
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(options: &Options) -> Option<OpenClDevice> {
        let adapters = match sys::load().and_then(Adapter::all) {
            Ok(a) => a,
            Err(e) => {
                assert!(!halcyon_test_host::required(), "{e}");
                eprintln!("skipped: {e}");
                return None;
            }
        };
        Some(OpenClDevice::open(adapters[0], options).unwrap())
    }

    /// Memory that begins at a page. It holds a reference as long as it lives.
    struct Pages {
        memory: Vec<u8>,
        bytes: usize,
        _alive: Arc<()>,
    }

    impl AsRef<[u8]> for Pages {
        fn as_ref(&self) -> &[u8] {
            let start = self.memory.as_ptr().align_offset(4096);
            &self.memory[start..start + self.bytes]
        }
    }

    #[test]
    fn host_memory_is_imported_without_a_copy() {
        let Some(d) = device(&Options::default()) else { return };
        let alive = Arc::new(());
        let n = 3 * super::super::memory::IMPORTED;
        let value = |i: usize| (i % 251) as u8;
        let pages = |bytes: usize| {
            let mut p = Pages { memory: vec![0; bytes + 4096], bytes, _alive: alive.clone() };
            let start = p.memory.as_ptr().align_offset(4096);
            p.memory[start..][..bytes].iter_mut().enumerate().for_each(|(i, b)| *b = value(i));
            Arc::new(p)
        };
        // PoCL is the device of the tests.
        assert!(d.info.unified_memory || !d.info.software, "{:?}", d.info);
        if !d.info.unified_memory {
            assert!(d.import(pages(n)).is_none());
            return;
        }
        let data = pages(n);
        let before = (d.counters().uploads, d.memory().allocated);
        let b = d.import(data).unwrap();
        assert_eq!((b.bytes(), d.counters().uploads, d.memory().allocated), (n, before.0, before.1));
        // It is read only.
        let own = d.alloc(n, Tag::Io).unwrap();
        let copy = |src: &BufferRef, dst: &BufferRef| {
            let (src, dst) = (src.clone(), dst.clone());
            let c = Command::Copy { src: &src, src_offset: 0, dst: &dst, dst_offset: 0, bytes: n };
            d.submit(&[c])
        };
        let e = copy(&own, &b).unwrap_err();
        assert!(e.to_string().contains("read-only"), "{e}");
        assert!(d.write(&b, 0, &[1]).is_err());
        copy(&b, &own).unwrap();
        // The host's memory lives until the commands that read it are done.
        drop(b);
        let mut got = vec![0; n];
        d.read(&own, 0, &mut got).unwrap();
        assert!(got.iter().enumerate().all(|(i, b)| *b == value(i)));
        d.synchronize().unwrap();
        let start = std::time::Instant::now();
        while Arc::strong_count(&alive) > 1 {
            assert!(start.elapsed().as_secs() < 60, "the memory is not given back");
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        // What is too small, or has another size than whole lines, is copied.
        assert!(d.import(pages(4096)).is_none() && d.import(pages(n + 8)).is_none());
    }

    #[test]
    fn compile_errors_contain_the_log() {
        let dir = tempfile::tempdir().unwrap();
        let o = Options { cache_dir: Some(dir.path().into()), ..Default::default() };
        let Some(d) = device(&o) else { return };
        let bad = "__kernel void broken(__global float* x) { x[0] = undeclared_name; }";
        let e = d.build("broken", bad, "broken", 1).unwrap_err();
        let Error::Compile { device, kernel, log } = &e else { panic!("{e}") };
        assert!(device == &d.info.id && kernel == "broken" && log.contains("undeclared_name"), "{e}");
        assert_eq!(d.counters().compiles, 0);
        let e = d.build("k", "__kernel void k(__global float* x) { x[0] = 1; }", "other", 1).unwrap_err();
        assert!(e.to_string().contains("clCreateKernel(other)"), "{e}");
    }

    #[test]
    fn a_cached_program_that_the_driver_refuses_is_built_again() {
        let dir = tempfile::tempdir().unwrap();
        let o = Options { cache_dir: Some(dir.path().into()), ..Default::default() };
        let text = "__kernel void k(__global float* x) { x[0] = 1; }";
        let Some(d) = device(&o) else { return };
        d.build("k", text, "k", 1).unwrap();
        let warm = device(&o).unwrap();
        warm.build("k", text, "k", 1).unwrap();
        assert_eq!((warm.counters().compiles, warm.counters().compile_cache_hits), (0, 1));
        // A valid cache entry that contains no program.
        let files: Vec<_> =
            std::fs::read_dir(dir.path().join("opencl")).unwrap().flatten().map(|e| e.path()).collect();
        let [file] = &files[..] else { panic!("{files:?}") };
        let key = u128::from_str_radix(file.file_stem().unwrap().to_str().unwrap(), 16).unwrap();
        DiskCache::new(dir.path().join("opencl"), cache::DEFAULT_LIMIT).put(key, b"no program");
        let again = device(&o).unwrap();
        again.build("k", text, "k", 1).unwrap();
        assert_eq!((again.counters().compiles, again.counters().compile_cache_hits), (1, 0));
    }
}
