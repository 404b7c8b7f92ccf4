//! Buffers in host memory, managed by Halcyon's pool, which provides reuse, the memory limit, accounting and
//! counters.

use halcyon_hal::pool::{Block, Source};
use halcyon_hal::{Buffer, BufferRef, Error, Result};
use std::any::Any;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, RwLock};

/// The pool's source of memory. A backend for a GPU would call the GPU driver's allocation function here.
#[derive(Debug)]
pub struct HostMemory;

/// One allocation.
pub type Memory = Arc<Mutex<Vec<u8>>>;

/// A buffer's allocation and the buffer's offset in it. A pool may divide allocations into ranges, and move
/// buffers.
#[derive(Clone, Debug)]
pub struct Spot {
    pub memory: Memory,
    pub offset: usize,
}

impl Source for HostMemory {
    type Raw = Memory;
    type Place = RwLock<Spot>;

    fn allocate(&self, bytes: usize) -> std::result::Result<Memory, String> {
        let mut v = vec![];
        v.try_reserve_exact(bytes).map_err(|e| e.to_string())?;
        v.resize(bytes, 0);
        Ok(Arc::new(Mutex::new(v)))
    }

    fn place(&self, raw: &Memory, range: Option<(usize, usize)>) -> std::result::Result<Self::Place, String> {
        let offset = range.map_or(0, |(offset, _)| offset);
        Ok(RwLock::new(Spot { memory: raw.clone(), offset }))
    }
}

pub(crate) fn lock(m: &Memory) -> MutexGuard<'_, Vec<u8>> {
    // A panic while the lock was held cannot make the bytes invalid.
    m.lock().unwrap_or_else(|e| e.into_inner())
}

/// A buffer of one device instance.
pub struct InterpreterBuffer {
    block: Block<HostMemory>,
    /// Number of the device instance that allocated it.
    owner: u64,
}

impl InterpreterBuffer {
    pub(crate) fn new(block: Block<HostMemory>, owner: u64) -> InterpreterBuffer {
        InterpreterBuffer { block, owner }
    }

    /// Checks that `b` belongs to device instance `owner`.
    ///
    /// # Errors
    /// [`Error::Argument`] if the buffer belongs to another device or device instance.
    pub(crate) fn of<'a>(call: &str, b: &'a BufferRef, owner: u64) -> Result<&'a InterpreterBuffer> {
        let own = b.as_any().downcast_ref::<InterpreterBuffer>().filter(|b| b.owner == owner);
        own.ok_or_else(|| {
            Error::argument(call, format!("{b:?} belongs to another device or device instance"))
        })
    }

    /// The buffer's current location. It is stable while the device's queue lock is held.
    pub(crate) fn spot(&self) -> Spot {
        self.block.place().read().unwrap_or_else(|e| e.into_inner()).clone()
    }

    /// Calls `f` with the buffer's bytes.
    pub(crate) fn with<T>(&self, f: impl FnOnce(&mut [u8]) -> T) -> T {
        let Spot { memory, offset } = self.spot();
        f(&mut lock(&memory)[offset..offset + self.block.bytes()])
    }
}

impl Buffer for InterpreterBuffer {
    fn bytes(&self) -> usize {
        self.block.bytes()
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl fmt::Debug for InterpreterBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.block.fmt(f)
    }
}
