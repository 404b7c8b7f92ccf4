//! A device that wraps a working one and fails on request. It belongs to an external backend, which is
//! registered and then opened by name.

use halcyon::hal::backend::Row;
use halcyon::hal::{
    Accounts, BufferRef, Caps, Command, Counters, Declined, Device, DeviceInfo, Driver, LibraryCall,
    LibraryKernel, Options, Program, Tag, Target, Timing, registry,
};
use halcyon::ir::data::Bytes;
use halcyon::ir::kernel::Kernel;
use halcyon::prelude::*;
use halcyon::{BackendBuilder, Error};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// Calls that can fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    Alloc,
    Compile,
    Submit,
    Write,
    Read,
}

/// The device's behaviour after the call that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum After {
    Works,
    /// Every later call of the kinds in [`Call`] fails, and so does `synchronize`.
    Lost,
}

/// Which call fails, and when.
#[derive(Debug, Default)]
pub struct Faults {
    /// The kind of call to fail, the number of such calls that succeed before, and the behaviour afterwards.
    armed: Mutex<Option<(Call, u64, After)>>,
    lost: AtomicBool,
    calls: AtomicU64,
}

impl Faults {
    /// Lets the next `n` calls of kind `call` succeed and the one after them fail. `after` is the device's
    /// behaviour from then on.
    pub fn arm(&self, call: Call, n: u64, after: After) {
        *self.armed.lock().unwrap() = Some((call, n, after));
    }

    /// Ends the failures. Returns whether a call failed since `Faults::arm`.
    pub fn disarm(&self) -> bool {
        self.lost.store(false, Ordering::SeqCst);
        self.armed.lock().unwrap().take().is_none()
    }

    /// Number of calls of the kinds of [`Call`] so far, including those that failed.
    pub fn calls(&self) -> u64 {
        self.calls.load(Ordering::SeqCst)
    }

    fn pass(&self, call: Call, name: &str) -> Result<()> {
        self.calls.fetch_add(1, Ordering::SeqCst);
        let mut armed = self.armed.lock().unwrap();
        let hit = match &mut *armed {
            Some((c, 0, _)) if *c == call => armed.take(),
            Some((c, n, _)) if *c == call => {
                *n -= 1;
                None
            }
            _ => None,
        };
        if let Some((_, _, After::Lost)) = hit {
            self.lost.store(true, Ordering::SeqCst);
        }
        if hit.is_none() && !self.lost.load(Ordering::SeqCst) {
            return Ok(());
        }
        let device = "faulty".to_string();
        Err(match call {
            _ if self.lost.load(Ordering::SeqCst) => Error::Driver {
                device,
                call: name.into(),
                code: "the device is lost".into(),
                next: "Open the device again".into(),
            },
            Call::Alloc => Error::OutOfMemory {
                device,
                what: "injected".into(),
                requested: 1,
                free: 0,
                total: 0,
                next: "Disarm".into(),
            },
            Call::Compile => Error::Compile { device, kernel: name.into(), log: "injected".into() },
            Call::Submit | Call::Write | Call::Read => {
                Error::Driver { device, call: name.into(), code: "injected".into(), next: "Disarm".into() }
            }
        })
    }
}

#[derive(Debug)]
struct FaultyDriver {
    row: &'static Row,
    inner: BackendType,
    faults: Arc<Faults>,
}

impl Driver for FaultyDriver {
    fn kind(&self) -> BackendType {
        BackendType::Other(self.row)
    }

    fn probe(&self) -> Result<Vec<DeviceInfo>> {
        let mut infos = registry::driver(self.inner)?.probe()?;
        for i in &mut infos {
            (i.backend, i.id) = (self.kind(), format!("{}:{}", self.row.id, i.index));
        }
        Ok(infos)
    }

    fn open(&self, index: usize, options: &Options) -> Result<Arc<dyn Device>> {
        let inner = registry::driver(self.inner)?.open(index, options)?;
        let mut info = inner.info().clone();
        (info.backend, info.id) = (self.kind(), format!("{}:{index}", self.row.id));
        Ok(Arc::new(Faulty { info, inner, faults: self.faults.clone() }))
    }
}

/// Opens a backend that wraps a device of `inner` and fails on request. `with` adds settings. Each call
/// registers a backend with a new name.
pub fn open(
    inner: BackendType,
    with: impl FnOnce(BackendBuilder) -> BackendBuilder,
) -> (Backend, Arc<Faults>) {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let id = format!("faulty-{inner}-{}", NEXT.fetch_add(1, Ordering::SeqCst));
    let row = Row { id: id.leak(), title: "Faulty", vendor: "test", priority: None, aliases: &[] };
    let row: &'static Row = Box::leak(Box::new(row));
    let faults = Arc::new(Faults::default());
    registry::register(Arc::new(FaultyDriver { row, inner, faults: faults.clone() })).unwrap();
    let b = with(Backend::builder().backend_type(row.id.parse().unwrap())).build().unwrap();
    assert_eq!(b.info().backend, BackendType::Other(row));
    (b, faults)
}

/// Buffers, programs and kernels are those of the wrapped device.
#[derive(Debug)]
struct Faulty {
    info: DeviceInfo,
    inner: Arc<dyn Device>,
    faults: Arc<Faults>,
}

impl Target for Faulty {
    fn caps(&self) -> &Caps {
        self.inner.caps()
    }
    fn library(&self, call: &LibraryCall<'_>) -> Result<Arc<dyn LibraryKernel>, Declined> {
        self.inner.library(call)
    }
    fn part_alignment(&self) -> Option<usize> {
        self.inner.part_alignment()
    }
    fn has_epilogues(&self) -> bool {
        self.inner.has_epilogues()
    }
    fn channel_block(&self, dtype: DType) -> Option<usize> {
        self.inner.channel_block(dtype)
    }
}

impl Device for Faulty {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }
    fn counters(&self) -> Counters {
        self.inner.counters()
    }
    fn pool(&self) -> &dyn Accounts {
        self.inner.pool()
    }
    fn pinned(&self) -> u64 {
        self.inner.pinned()
    }
    fn available(&self) -> Option<u64> {
        self.inner.available()
    }
    fn alloc(&self, bytes: usize, tag: Tag) -> Result<BufferRef> {
        self.faults.pass(Call::Alloc, "alloc")?;
        self.inner.alloc(bytes, tag)
    }
    fn part(&self, of: &BufferRef, offset: usize, bytes: usize) -> Result<BufferRef> {
        self.inner.part(of, offset, bytes)
    }
    fn import(&self, data: Arc<dyn Bytes>) -> Option<BufferRef> {
        self.inner.import(data)
    }
    fn write(&self, dst: &BufferRef, offset: usize, src: &[u8]) -> Result<()> {
        self.faults.pass(Call::Write, "write")?;
        self.inner.write(dst, offset, src)
    }
    fn read(&self, src: &BufferRef, offset: usize, dst: &mut [u8]) -> Result<()> {
        self.faults.pass(Call::Read, "read")?;
        self.inner.read(src, offset, dst)
    }
    fn pack(&self, kernel: &dyn LibraryKernel, from: &BufferRef, to: &BufferRef) -> Result<()> {
        self.faults.pass(Call::Submit, "pack")?;
        self.inner.pack(kernel, from, to)
    }
    fn pack_host(&self, constants: &[(&dyn LibraryKernel, &[u8], &BufferRef)]) -> Result<()> {
        // Packing takes memory on the device, so this call also counts as an allocation.
        self.faults.pass(Call::Alloc, "pack")?;
        self.faults.pass(Call::Submit, "pack")?;
        self.inner.pack_host(constants)
    }
    fn pack_room(&self, constants: &[&[u8]]) -> usize {
        self.inner.pack_room(constants)
    }
    fn compile(&self, kernel: &Kernel) -> Result<Arc<dyn Program>> {
        self.faults.pass(Call::Compile, &kernel.name)?;
        self.inner.compile(kernel)
    }
    /// If the call is to fail, the first half of the commands run.
    fn submit(&self, commands: &[Command<'_>]) -> Result<()> {
        if let Err(e) = self.faults.pass(Call::Submit, "submit") {
            self.inner.submit(&commands[..commands.len().div_ceil(2)])?;
            return Err(e);
        }
        self.inner.submit(commands)
    }
    fn synchronize(&self) -> Result<()> {
        match self.faults.lost.load(Ordering::SeqCst) {
            true => self.faults.pass(Call::Submit, "synchronize"),
            false => self.inner.synchronize(),
        }
    }
    fn take_fault(&self) -> Result<Option<u32>> {
        self.inner.take_fault()
    }
    fn take_timings(&self) -> Result<Vec<Timing>> {
        self.inner.take_timings()
    }
    fn as_target(&self) -> &dyn Target {
        self
    }
}
