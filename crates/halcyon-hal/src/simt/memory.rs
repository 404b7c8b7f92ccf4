//! Buffers and where the pool gets them.

use super::sys::{self, Address, Context};
use crate::Buffer;
use crate::hazard::Access;
use crate::host_buffer::Pages;
use crate::pool::{Block, Place, Source};
use std::any::Any;
use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The pool's source: one device's memory.
#[derive(Debug)]
pub struct SimtSource(pub Arc<Context>);

/// One allocation.
#[derive(Debug)]
pub struct Memory {
    context: Arc<Context>,
    pub at: Address,
}

impl Memory {
    /// `bytes` bytes, or the runtime's reason.
    pub fn new(context: &Arc<Context>, bytes: usize) -> Result<Memory, String> {
        context.enter().map_err(|e| e.to_string())?;
        let mut at = 0;
        // SAFETY: one address is written.
        let code = unsafe { (context.api.f.alloc)(&mut at, bytes) };
        if code != sys::SUCCESS || at == 0 {
            return Err(sys::code_name(context.api.family, code));
        }
        Ok(Memory { context: context.clone(), at })
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let code = match self.context.visit() {
            // SAFETY: allocated once, by this context. The runtime waits for the work that uses it.
            Ok(_visit) => unsafe { (self.context.api.f.free)(self.at) },
            Err(e) => return tracing::warn!(device = self.context.id, "memory could not be freed: {e}"),
        };
        if code != sys::SUCCESS {
            let code = sys::code_name(self.context.api.family, code);
            tracing::warn!(device = self.context.id, %code, "memory could not be freed");
        }
    }
}

/// The address of a buffer's first byte.
#[derive(Debug)]
pub struct Spot(AtomicU64);

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
        256
    }
}

/// Pages of the host that the device copies from and to by itself.
#[derive(Debug)]
pub struct SimtPages {
    context: Arc<Context>,
    at: *mut c_void,
}

// SAFETY: an address that nothing else uses; the runtime may be called from any thread.
unsafe impl Send for SimtPages {}
// SAFETY: as above.
unsafe impl Sync for SimtPages {}

// SAFETY: the pages stay where they are until the value is dropped, have the size asked for, and were zeroed
// when they were made.
unsafe impl Pages for SimtPages {
    fn start(&self) -> *mut u8 {
        self.at.cast()
    }
}

impl SimtPages {
    /// `bytes` bytes (at least one is taken), or the runtime's reason.
    pub fn new(context: &Arc<Context>, bytes: usize) -> Result<SimtPages, String> {
        context.enter().map_err(|e| e.to_string())?;
        let (bytes, mut at) = (bytes.max(1), std::ptr::null_mut());
        // SAFETY: one address is written.
        let code = unsafe { (context.api.f.alloc_host)(&mut at, bytes, sys::PORTABLE) };
        if code != sys::SUCCESS || at.is_null() {
            return Err(sys::code_name(context.api.family, code));
        }
        // SAFETY: the pages have this size and are the caller's alone.
        unsafe { std::ptr::write_bytes(at.cast::<u8>(), 0, bytes) };
        Ok(SimtPages { context: context.clone(), at })
    }
}

impl SimtPages {
    pub(crate) fn at(&self) -> *mut c_void {
        self.at
    }

    /// Copies bytes to the beginning. Nobody else uses the pages meanwhile, and they have room for it.
    pub(crate) fn copy_from(&self, bytes: &[u8]) {
        // SAFETY: the owner's word.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.at.cast(), bytes.len()) }
    }

    /// Copies words to the place of word `at`, likewise.
    pub(crate) fn copy_words(&self, at: usize, words: &[u64]) {
        // SAFETY: the owner's word; pages begin at a multiple of eight.
        unsafe { std::ptr::copy_nonoverlapping(words.as_ptr(), self.at.cast::<u64>().add(at), words.len()) }
    }

    /// Copies bytes from the beginning, likewise.
    pub(crate) fn copy_to(&self, bytes: &mut [u8]) {
        // SAFETY: the owner's word.
        unsafe { std::ptr::copy_nonoverlapping(self.at.cast(), bytes.as_mut_ptr(), bytes.len()) }
    }
}

impl Drop for SimtPages {
    fn drop(&mut self) {
        let code = match self.context.visit() {
            // SAFETY: allocated once, by this context.
            Ok(_visit) => unsafe { (self.context.api.f.free_host)(self.at) },
            Err(e) => {
                let id = &self.context.id;
                return tracing::warn!(device = id, "pages of the host could not be freed: {e}");
            }
        };
        if code != sys::SUCCESS {
            let code = sys::code_name(self.context.api.family, code);
            tracing::warn!(device = self.context.id, %code, "pages of the host could not be freed");
        }
    }
}

/// Device memory on loan from the pool.
pub struct SimtBuffer {
    pub block: Block<SimtSource>,
    /// Number of the device that it belongs to.
    pub owner: u64,
}

impl SimtBuffer {
    /// The first byte's address. While the queue's lock is held it stays the buffer's.
    pub fn address(&self) -> Address {
        self.block.place().0.load(Ordering::Acquire)
    }

    /// The addresses it takes: the first one and how many.
    pub(crate) fn span(&self) -> (usize, usize) {
        (self.address() as usize, self.block.room().max(1))
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

impl Buffer for SimtBuffer {
    fn bytes(&self) -> usize {
        self.block.bytes()
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
        self.block.fmt(f)
    }
}
