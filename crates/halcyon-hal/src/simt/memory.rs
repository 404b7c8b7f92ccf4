//! Buffers and the pool's source of device memory.

use super::sys::{self, Address, Context};
use crate::commands::HasOwner;
use crate::hazard::Access;
use crate::host_buffer::Pages;
use crate::pool::{Block, Pinned, Place, Source};
use crate::validate;
use crate::{Buffer, BufferRef, DeviceMemory};
use std::any::Any;
use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The alignment of buffers in bytes, which kernels and the vendors' libraries rely on.
pub(super) const ALIGNMENT: u64 = 256;

/// The pool's source: the memory of one device.
#[derive(Debug)]
pub(super) struct SimtSource(pub Arc<Context>);

/// One allocation.
#[derive(Debug)]
pub(super) struct Memory {
    context: Arc<Context>,
    at: Address,
}

impl Memory {
    /// Allocates `bytes` bytes; the error is the reason that CUDA or HIP gives.
    pub(super) fn new(context: &Arc<Context>, bytes: usize) -> Result<Memory, String> {
        context.enter().map_err(|e| e.to_string())?;
        let mut at = 0;
        // SAFETY: CUDA or HIP writes one address to `at`.
        let code = unsafe { (context.api.f.alloc)(&mut at, bytes) };
        if code != sys::SUCCESS || at == 0 {
            return Err(sys::code_name(context.api.family, code));
        }
        Ok(Memory { context: context.clone(), at })
    }

    /// The first address.
    pub(super) fn at(&self) -> Address {
        self.at
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let code = match self.context.visit() {
            // SAFETY: this context allocated `self.at`, which is freed once. CUDA or HIP waits for work that
            // uses the memory.
            Ok(_visit) => unsafe { (self.context.api.f.free)(self.at) },
            Err(e) => return tracing::warn!(device = self.context.id, "memory could not be freed: {e}"),
        };
        if code != sys::SUCCESS {
            let code = sys::code_name(self.context.api.family, code);
            tracing::warn!(device = self.context.id, %code, "memory could not be freed");
        }
    }
}

/// The address of a buffer's first byte. Changes when the buffer is moved.
#[derive(Debug)]
pub(super) struct Spot(AtomicU64);

impl Place for Spot {
    fn replace(&self, with: Spot) {
        self.0.store(with.0.into_inner(), Ordering::Release);
    }
}

impl Source for SimtSource {
    type Raw = Memory;
    type Place = Spot;

    fn allocate(&self, bytes: usize) -> Result<Memory, String> {
        Memory::new(&self.0, bytes)
    }

    fn place(&self, raw: &Memory, range: Option<(usize, usize)>) -> Result<Spot, String> {
        let offset = range.map_or(0, |(offset, _)| offset);
        Ok(Spot(AtomicU64::new(raw.at + offset as u64)))
    }

    fn alignment(&self) -> usize {
        ALIGNMENT as usize
    }
}

/// Host pages that the device accesses directly.
#[derive(Debug)]
pub(super) struct SimtPages {
    context: Arc<Context>,
    at: *mut c_void,
    bytes: usize,
}

// SAFETY: the value owns the pages, and the functions of CUDA and HIP may be called from any thread.
unsafe impl Send for SimtPages {}
// SAFETY: `&self` only yields the address. Every access through it is unsafe and requires that nothing else
// accesses the same bytes meanwhile.
unsafe impl Sync for SimtPages {}

// SAFETY: the pages stay at one address until the value is dropped, have the requested size, and were zeroed
// when allocated. The value owns them.
unsafe impl Pages for SimtPages {
    fn start(&self) -> *mut u8 {
        self.at.cast()
    }
}

impl SimtPages {
    /// Allocates `bytes` bytes (at least one); the error is the reason that CUDA or HIP gives.
    pub(super) fn new(context: &Arc<Context>, bytes: usize) -> Result<SimtPages, String> {
        context.enter().map_err(|e| e.to_string())?;
        let (bytes, mut at) = (bytes.max(1), std::ptr::null_mut());
        // SAFETY: CUDA or HIP writes one address to `at`.
        let code = unsafe { (context.api.f.alloc_host)(&mut at, bytes, sys::PORTABLE) };
        if code != sys::SUCCESS || at.is_null() {
            return Err(sys::code_name(context.api.family, code));
        }
        // SAFETY: CUDA or HIP returned `bytes` bytes at `at`, which nothing else uses yet.
        unsafe { std::ptr::write_bytes(at.cast::<u8>(), 0, bytes) };
        Ok(SimtPages { context: context.clone(), at, bytes })
    }
}

impl SimtPages {
    pub(crate) fn at(&self) -> *mut c_void {
        self.at
    }

    /// Copies bytes to the start.
    ///
    /// # Errors
    /// [`Error::Argument`](crate::Error::Argument) if the pages are too small.
    ///
    /// # Safety
    /// Nothing else (`bytes` itself, another thread, a pending command) may access the first `bytes.len()`
    /// bytes of the pages during the call.
    pub(crate) unsafe fn copy_from(&self, bytes: &[u8]) -> crate::Result<()> {
        validate::range("copy to locked pages", self.bytes, 0, bytes.len())?;
        // SAFETY: the pages have `bytes.len()` bytes, checked above; `copy_from` requires that nothing else
        // accesses them.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.at.cast(), bytes.len()) };
        Ok(())
    }

    /// Copies words to the pages, from word `first` on.
    ///
    /// # Errors
    /// The errors of `SimtPages::copy_from`.
    ///
    /// # Safety
    /// Nothing else (`words` itself, another thread, a pending command) may access these `words.len()` words
    /// of the pages during the call.
    pub(crate) unsafe fn copy_words(&self, first: usize, words: &[u64]) -> crate::Result<()> {
        let (offset, bytes) = (first.saturating_mul(size_of::<u64>()), size_of_val(words));
        validate::range("copy to locked pages", self.bytes, offset, bytes)?;
        // SAFETY: the pages have `bytes` bytes from `offset` on, checked above; `copy_words` requires that
        // nothing else accesses them. Bytes need no alignment.
        unsafe {
            let to = self.at.cast::<u8>().add(offset);
            std::ptr::copy_nonoverlapping(words.as_ptr().cast::<u8>(), to, bytes);
        }
        Ok(())
    }

    /// Copies bytes from the start.
    ///
    /// # Errors
    /// The errors of `SimtPages::copy_from`.
    ///
    /// # Safety
    /// Nothing else (`bytes` itself, another thread, a pending command) may write the first `bytes.len()`
    /// bytes of the pages during the call.
    pub(crate) unsafe fn copy_to(&self, bytes: &mut [u8]) -> crate::Result<()> {
        validate::range("copy from locked pages", self.bytes, 0, bytes.len())?;
        // SAFETY: the pages have `bytes.len()` bytes, checked above, which were zeroed when they were
        // allocated; `copy_to` requires that nothing else writes them.
        unsafe { std::ptr::copy_nonoverlapping(self.at.cast(), bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }
}

impl Drop for SimtPages {
    fn drop(&mut self) {
        let code = match self.context.visit() {
            // SAFETY: this context allocated `self.at`, which is freed once.
            Ok(_visit) => unsafe { (self.context.api.f.free_host)(self.at) },
            Err(e) => {
                let id = &self.context.id;
                return tracing::warn!(device = id, "page-locked host memory could not be freed: {e}");
            }
        };
        if code != sys::SUCCESS {
            let code = sys::code_name(self.context.api.family, code);
            tracing::warn!(device = self.context.id, %code, "page-locked host memory could not be freed");
        }
    }
}

/// Device memory borrowed from the pool, or imported from another library.
// An associated type of a public trait cannot be less public.
#[allow(unreachable_pub)]
pub struct SimtBuffer {
    storage: Storage,
    /// Id of the device that it belongs to.
    owner: u64,
}

enum Storage {
    Pooled(Block<SimtSource>),
    Imported(Imported),
}

/// Memory of another library.
struct Imported {
    memory: Option<DeviceMemory>,
    context: Arc<Context>,
}

impl Drop for Imported {
    fn drop(&mut self) {
        let memory = self.memory.take();
        if let Err(e) = self.context.wait() {
            // Work on the device may still read the memory, so its owner must keep it.
            std::mem::forget(memory);
            tracing::warn!(device = self.context.id, "imported memory could not be returned: {e}");
        }
    }
}

/// Keeps exported memory in place.
struct Lent {
    _block: Pinned<SimtSource>,
    context: Arc<Context>,
}

impl Drop for Lent {
    fn drop(&mut self) {
        // The pool may give the memory to other work afterwards.
        if let Err(e) = self.context.wait() {
            tracing::warn!(device = self.context.id, "exported memory was returned too early: {e}");
        }
    }
}

impl SimtBuffer {
    pub(super) fn pooled(block: Block<SimtSource>, owner: u64) -> SimtBuffer {
        SimtBuffer { storage: Storage::Pooled(block), owner }
    }

    /// A buffer over memory of another library.
    pub(super) fn imported(memory: DeviceMemory, context: &Arc<Context>, owner: u64) -> SimtBuffer {
        let imported = Imported { memory: Some(memory), context: context.clone() };
        SimtBuffer { storage: Storage::Imported(imported), owner }
    }

    pub(super) fn is_imported(&self) -> bool {
        matches!(self.storage, Storage::Imported(_))
    }

    /// Keeps the memory allocated and in place, for another library.
    pub(super) fn keep(&self, of: &BufferRef, context: &Arc<Context>) -> Box<dyn Any + Send + Sync> {
        match &self.storage {
            Storage::Pooled(block) => Box::new(Lent { _block: block.pin(), context: context.clone() }),
            Storage::Imported(_) => Box::new(of.clone()),
        }
    }

    /// The address of the first byte. It changes only while the lock of the device's own queue and the lock
    /// that orders the queues (`Queues`) are both held.
    pub(super) fn address(&self) -> Address {
        match &self.storage {
            Storage::Pooled(block) => block.place().0.load(Ordering::Acquire),
            Storage::Imported(i) => i.memory.as_ref().map_or(0, DeviceMemory::address),
        }
    }

    /// The address range: the first address and the number of bytes.
    pub(crate) fn span(&self) -> (usize, usize) {
        let room = match &self.storage {
            Storage::Pooled(block) => block.room(),
            Storage::Imported(_) => self.bytes(),
        };
        (self.address() as usize, room.max(1))
    }

    pub(crate) fn reading(&self) -> Access {
        let (mut a, (at, bytes)) = (Access::default(), self.span());
        a.reads.add(at, bytes);
        a
    }

    pub(crate) fn writing(&self) -> Access {
        let (mut a, (at, bytes)) = (Access::default(), self.span());
        a.writes.add(at, bytes);
        a
    }
}

impl HasOwner for SimtBuffer {
    fn owner(&self) -> u64 {
        self.owner
    }
}

impl Buffer for SimtBuffer {
    fn bytes(&self) -> usize {
        match &self.storage {
            Storage::Pooled(block) => block.bytes(),
            Storage::Imported(i) => i.memory.as_ref().map_or(0, DeviceMemory::bytes),
        }
    }

    fn is_writable(&self) -> bool {
        !self.is_imported()
    }

    fn place(&self) -> Option<u64> {
        Some(self.address())
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl fmt::Debug for SimtBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.storage {
            Storage::Pooled(block) => block.fmt(f),
            Storage::Imported(i) => write!(f, "Imported({:?})", i.memory),
        }
    }
}
