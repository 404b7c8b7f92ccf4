//! A device that computes nothing: it allocates memory, verifies kernels, and validates and counts every
//! command. Outputs of launches are filled with [`POISON`], so that they cannot be mistaken for results. The
//! device is used only if the user names it.

use crate::commands::{self, Actions, Compiled, DeviceInstance, HasOwner};
use crate::pool::{Block, Pool, Source};
use crate::stream::Report;
use crate::validate::{self, Argument, Signature};
use crate::{
    Accounts, BackendType, Buffer, BufferRef, Caps, Command, Counters, Counts, Declined, Defragmented,
    Device, DeviceInfo, Download, Driver, Error, Event, LibraryCall, LibraryKernel, Options, Program, Result,
    Stream, StreamOptions, Tag, Target, Timing,
};
use halcyon_ir::data::Bytes;
use halcyon_ir::kernel::{Kernel, verify_for};
use std::any::Any;
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, RwLock};
use std::time::Instant;

/// The value of every byte of newly allocated memory, and of a buffer that a launch of at least one workgroup
/// writes: NaN in float types, -1 in signed integers.
pub const POISON: u8 = 0xFF;

/// The driver of the noop device.
#[derive(Debug)]
pub struct NoopDriver;

impl Driver for NoopDriver {
    fn kind(&self) -> BackendType {
        BackendType::Noop
    }

    fn probe(&self) -> Result<Vec<DeviceInfo>> {
        Ok(vec![info()])
    }

    fn open(&self, index: usize, options: &Options) -> Result<Arc<dyn Device>> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        if index != 0 {
            return Err(Error::Unavailable {
                backend: BackendType::Noop.id().into(),
                tried: vec![info().id],
                reason: format!("there is no device {index}"),
                fix: "Use device 0".into(),
            });
        }
        let info = info();
        let counts = Arc::new(Counts::default());
        Ok(Arc::new(NoopDevice {
            pool: Pool::new(HostMemory, info.id.clone(), options, None, counts.clone())?,
            turn: Arc::default(),
            info,
            caps: Caps::generous(),
            counts,
            programs: Mutex::default(),
            timings: options.profile.then(Mutex::default),
            number: NEXT.fetch_add(1, Ordering::Relaxed),
        }))
    }
}

fn info() -> DeviceInfo {
    DeviceInfo {
        backend: BackendType::Noop,
        id: format!("{}:0", BackendType::Noop.id()),
        index: 0,
        name: "Halcyon noop (computes nothing)".into(),
        vendor: String::new(),
        driver_version: Some(env!("CARGO_PKG_VERSION").into()),
        total_memory: None,
        free_memory: None,
        compute_capability: None,
        compute_units: None,
        unified_memory: true,
        software: true,
        properties: BTreeMap::new(),
    }
}

#[derive(Debug)]
pub(crate) struct HostMemory;

/// An allocation, and the offset at which the buffer starts.
pub(crate) type Place = (Arc<Mutex<Vec<u8>>>, usize);

impl Source for HostMemory {
    type Raw = Arc<Mutex<Vec<u8>>>;
    type Place = RwLock<Place>;

    fn allocate(&self, bytes: usize) -> std::result::Result<Self::Raw, String> {
        let mut v = vec![];
        v.try_reserve_exact(bytes).map_err(|e| e.to_string())?;
        v.resize(bytes, POISON);
        Ok(Arc::new(Mutex::new(v)))
    }

    fn place(
        &self,
        raw: &Self::Raw,
        range: Option<(usize, usize)>,
    ) -> std::result::Result<Self::Place, String> {
        Ok(RwLock::new((raw.clone(), range.map_or(0, |(offset, _)| offset))))
    }
}

struct NoopBuffer {
    block: Block<HostMemory>,
    owner: u64,
}

impl NoopBuffer {
    /// Gives access to the buffer's bytes. The caller holds the device's `turn`, so the buffer is not moved.
    fn with<T>(&self, f: impl FnOnce(&mut [u8]) -> T) -> T {
        let place = self.block.place().read().unwrap_or_else(|e| e.into_inner());
        let mut all = place.0.lock().unwrap_or_else(|e| e.into_inner());
        f(&mut all[place.1..place.1 + self.block.bytes()])
    }
}

impl fmt::Debug for NoopBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.block.fmt(f)
    }
}

impl HasOwner for NoopBuffer {
    fn owner(&self) -> u64 {
        self.owner
    }
}

impl Buffer for NoopBuffer {
    fn bytes(&self) -> usize {
        self.block.bytes()
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// A verified kernel.
#[derive(Debug)]
struct NoopProgram {
    signature: Signature,
    owner: u64,
}

impl HasOwner for NoopProgram {
    fn owner(&self) -> u64 {
        self.owner
    }
}

impl Compiled for NoopProgram {
    fn signature(&self) -> &Signature {
        &self.signature
    }
}

impl Program for NoopProgram {
    fn name(&self) -> &str {
        &self.signature.name
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

#[derive(Debug)]
struct NoopDevice {
    info: DeviceInfo,
    caps: Caps,
    counts: Arc<Counts>,
    pool: Arc<Pool<HostMemory>>,
    /// Held while commands or copies run and while buffers are moved.
    turn: Arc<Mutex<()>>,
    programs: Mutex<HashMap<u128, Arc<NoopProgram>>>,
    /// `Some` if profiling is on.
    timings: Option<Mutex<Vec<Timing>>>,
    number: u64,
}

/// Validates and counts commands for the device and its streams. The device and the streams run each command
/// during the call that submits it, so the commands run in order.
#[derive(Debug)]
struct Checker {
    id: String,
    counts: Arc<Counts>,
    turn: Arc<Mutex<()>>,
    number: u64,
}

#[derive(Debug)]
struct NoopStream {
    checker: Checker,
    report: Mutex<Arc<Report>>,
}

impl Stream for NoopStream {
    fn overlaps(&self) -> bool {
        false
    }

    fn submit(&self, commands: &[Command<'_>]) -> Result<()> {
        let _turn = self.checker.lock_queue();
        self.checker.run(commands)
    }

    fn write(&self, dst: &BufferRef, offset: usize, src: Arc<dyn Bytes>) -> Result<()> {
        self.checker.write(dst, offset, src.bytes())
    }

    fn read(&self, src: &BufferRef, offset: usize, bytes: usize) -> Result<Download> {
        validate::range("read", src.bytes(), offset, bytes)?;
        let mut to = halcyon_host::zeros(bytes, "a copy to the host")?;
        self.checker.read(src, offset, &mut to)?;
        Ok(Download::new(self.record()?, Arc::new(Mutex::new(to))))
    }

    fn record(&self) -> Result<Event> {
        Ok(Event::completed(std::mem::take(&mut *self.report.lock().unwrap_or_else(|e| e.into_inner()))))
    }

    fn wait(&self, event: &Event) -> Result<()> {
        // An event of this device is always complete. Another device reports the errors of its own work.
        let _ = event.wait();
        Ok(())
    }
}

impl DeviceInstance for Checker {
    type Buffer = NoopBuffer;
    type Program = NoopProgram;

    fn id(&self) -> &str {
        &self.id
    }

    fn number(&self) -> u64 {
        self.number
    }
}

/// What commands do: a launch fills its outputs with [`POISON`], and a copy copies.
struct Fill;

impl Actions<Checker> for Fill {
    unsafe fn launch(
        &mut self,
        p: &NoopProgram,
        groups: [u32; 3],
        buffers: &[&NoopBuffer],
        _: &[Argument],
    ) -> Result<()> {
        if !groups.contains(&0) {
            for (b, _) in buffers.iter().zip(&p.signature.buffers).filter(|(_, d)| d.write) {
                b.with(|bytes| bytes.fill(POISON));
            }
        }
        Ok(())
    }

    unsafe fn copy(
        &mut self,
        src: (&NoopBuffer, usize),
        dst: (&NoopBuffer, usize),
        bytes: usize,
    ) -> Result<()> {
        let data = src.0.with(|all| all[src.1..src.1 + bytes].to_vec());
        dst.0.with(|all| all[dst.1..dst.1 + bytes].copy_from_slice(&data));
        Ok(())
    }
}

impl NoopDevice {
    fn checker(&self) -> Checker {
        let (id, counts, turn) = (self.info.id.clone(), self.counts.clone(), self.turn.clone());
        Checker { id, counts, turn, number: self.number }
    }
}

impl Checker {
    fn lock_queue(&self) -> MutexGuard<'_, ()> {
        // The mutex protects no data, so a poisoned lock is safe to use.
        self.turn.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Runs commands. The caller holds the device's `turn`.
    fn run(&self, commands: &[Command<'_>]) -> Result<()> {
        // SAFETY: the actions of `Fill` have no conditions, because they access vectors only through checked
        // slices.
        unsafe { commands::run(self, &mut Fill, &self.counts, commands) }
    }

    fn write(&self, dst: &BufferRef, offset: usize, src: &[u8]) -> Result<()> {
        let b = self.buffer("write", dst)?;
        validate::range("write", dst.bytes(), offset, src.len())?;
        let _turn = self.lock_queue();
        b.with(|bytes| bytes[offset..offset + src.len()].copy_from_slice(src));
        Counts::add(&self.counts.uploads, 1);
        Counts::add(&self.counts.uploaded_bytes, src.len() as u64);
        Ok(())
    }

    fn read(&self, src: &BufferRef, offset: usize, dst: &mut [u8]) -> Result<()> {
        let b = self.buffer("read", src)?;
        validate::range("read", src.bytes(), offset, dst.len())?;
        let _turn = self.lock_queue();
        b.with(|bytes| dst.copy_from_slice(&bytes[offset..offset + dst.len()]));
        Counts::add(&self.counts.downloads, 1);
        Counts::add(&self.counts.downloaded_bytes, dst.len() as u64);
        Ok(())
    }
}

impl Target for NoopDevice {
    fn caps(&self) -> &Caps {
        &self.caps
    }

    fn library(&self, _: &LibraryCall<'_>) -> std::result::Result<Arc<dyn LibraryKernel>, Declined> {
        Err(Declined::because("this device computes nothing"))
    }
}

impl Device for NoopDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn counters(&self) -> Counters {
        self.counts.snapshot()
    }

    fn pool(&self) -> &dyn Accounts {
        &*self.pool
    }

    fn alloc(&self, bytes: usize, tag: Tag) -> Result<BufferRef> {
        let block = self.pool.alloc(bytes, tag, &|| self.defragment())?;
        Ok(Arc::new(NoopBuffer { block, owner: self.number }))
    }

    fn defragment(&self) -> Result<Defragmented> {
        let checker = self.checker();
        let _turn = checker.lock_queue();
        self.pool.defragment(&mut |m| {
            let from = m.from.0.lock().unwrap_or_else(|e| e.into_inner());
            let data = from[m.from.1..m.from.1 + m.bytes].to_vec();
            // `to` may be the same allocation, whose lock must be released first.
            drop(from);
            let mut to = m.to.0.lock().unwrap_or_else(|e| e.into_inner());
            to[m.to.1..m.to.1 + m.bytes].copy_from_slice(&data);
            Ok(())
        })
    }

    fn write(&self, dst: &BufferRef, offset: usize, src: &[u8]) -> Result<()> {
        self.checker().write(dst, offset, src)
    }

    fn read(&self, src: &BufferRef, offset: usize, dst: &mut [u8]) -> Result<()> {
        self.checker().read(src, offset, dst)
    }

    fn compile(&self, kernel: &Kernel) -> Result<Arc<dyn Program>> {
        let mut programs = self.programs.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(p) = programs.get(&kernel.key()) {
            return Ok(p.clone());
        }
        verify_for(kernel, &self.caps)?;
        let p = Arc::new(NoopProgram { signature: Signature::of(kernel)?, owner: self.number });
        programs.insert(kernel.key(), p.clone());
        Counts::add(&self.counts.compiles, 1);
        Ok(p)
    }

    fn submit(&self, commands: &[Command<'_>]) -> Result<()> {
        let checker = self.checker();
        let _turn = checker.lock_queue();
        for c in commands {
            let start = self.timings.as_ref().map(|_| Instant::now());
            checker.run(std::slice::from_ref(c))?;
            if let (Some(t), Some(start)) = (&self.timings, start) {
                let nanoseconds = start.elapsed().as_nanos() as u64;
                t.lock().unwrap_or_else(|e| e.into_inner()).push(Timing { nanoseconds });
            }
        }
        Ok(())
    }

    fn synchronize(&self) -> Result<()> {
        drop(self.checker().lock_queue());
        Ok(())
    }

    fn create_stream(&self, _: &StreamOptions) -> Result<Arc<dyn Stream>> {
        Ok(Arc::new(NoopStream { checker: self.checker(), report: Mutex::default() }))
    }

    fn take_fault(&self) -> Result<Option<u32>> {
        Ok(None)
    }

    fn take_timings(&self) -> Result<Vec<Timing>> {
        let Some(t) = &self.timings else { return Ok(vec![]) };
        Ok(std::mem::take(&mut *t.lock().unwrap_or_else(|e| e.into_inner())))
    }

    fn as_target(&self) -> &dyn Target {
        self
    }
}
