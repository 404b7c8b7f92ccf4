//! Buffers: host memory, handed out by Halcyon's pool, which brings reuse, the hard cap, accounting and counters.

use halcyon_hal::pool::{Block, Source};
use halcyon_hal::{Buffer, BufferRef, Error, Result};
use std::any::Any;
use std::fmt;
use std::sync::{Mutex, MutexGuard};

/// Where the pool gets memory from: for a graphics processor, the driver's allocation call.
#[derive(Debug)]
pub struct HostMemory;

impl Source for HostMemory {
    type Raw = Mutex<Vec<u8>>;

    fn allocate(&self, bytes: usize) -> std::result::Result<Self::Raw, String> {
        let mut v = vec![];
        v.try_reserve_exact(bytes).map_err(|e| e.to_string())?;
        v.resize(bytes, 0);
        Ok(Mutex::new(v))
    }
}

/// A buffer of one opening of the device.
pub struct InterpreterBuffer {
    block: Block<HostMemory>,
    /// Number of the opening that made it.
    owner: u64,
}

impl InterpreterBuffer {
    pub(crate) fn new(block: Block<HostMemory>, owner: u64) -> InterpreterBuffer {
        InterpreterBuffer { block, owner }
    }

    /// A buffer that this opening made.
    ///
    /// # Errors
    /// [`Error::Argument`] for one of another device, or of another opening.
    pub(crate) fn of<'a>(call: &str, b: &'a BufferRef, owner: u64) -> Result<&'a InterpreterBuffer> {
        let own = b.as_any().downcast_ref::<InterpreterBuffer>().filter(|b| b.owner == owner);
        own.ok_or_else(|| Error::argument(call, format!("{b:?} belongs to another device or opening")))
    }

    /// The bytes. The block may be longer than the buffer.
    pub(crate) fn lock(&self) -> Result<MutexGuard<'_, Vec<u8>>> {
        let raw = self.block.raw().ok_or_else(|| Error::internal("a buffer was used after its release"))?;
        Ok(raw.lock().unwrap_or_else(|e| e.into_inner()))
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
