//! Buffers and where the pool gets them.

use super::sys::{self, Api, Owned};
use crate::Buffer;
use crate::hazard::Access;
use crate::pool::{Block, Source};
use std::any::Any;
use std::fmt;
use std::sync::Arc;

/// The pool's source: `clCreateBuffer` in one context.
#[derive(Debug)]
pub struct ClSource {
    pub api: &'static Api,
    pub context: Arc<Owned>,
    /// Most bytes of one buffer.
    pub max: u64,
}

impl Source for ClSource {
    type Raw = Owned;

    fn allocate(&self, bytes: usize) -> Result<Owned, String> {
        // Some implementations accept any size and fail at the first use, so the limit they report is checked here.
        if bytes as u64 > self.max {
            return Err(format!("the device allows {} bytes in one buffer", self.max));
        }
        buffer(self.api, &self.context, bytes)
            .map_err(|c| format!("clCreateBuffer gave {}", sys::code_name(c)))
    }
}

/// A buffer of its own, outside the pool.
pub fn buffer(api: &'static Api, context: &Owned, bytes: usize) -> Result<Owned, i32> {
    let mut code = 0;
    // SAFETY: the context is live; no host memory is passed.
    let raw = unsafe {
        (api.clCreateBuffer)(context.raw(), sys::MEM_READ_WRITE, bytes, std::ptr::null_mut(), &mut code)
    };
    // SAFETY: a buffer created just now, released by its own function.
    unsafe { Owned::new(raw, code, api.clReleaseMemObject) }
}

/// Device memory on loan from the pool.
pub struct ClBuffer {
    pub block: Block<ClSource>,
    /// Number of the device that it belongs to.
    pub owner: u64,
}

impl ClBuffer {
    fn handle(&self) -> Option<usize> {
        self.block.raw().map(|h| h.raw() as usize)
    }

    pub(crate) fn reading(&self) -> Access {
        let mut a = Access::default();
        self.handle().into_iter().for_each(|h| a.reads.add(h, 1));
        a
    }

    pub(crate) fn writing(&self) -> Access {
        let mut a = Access::default();
        self.handle().into_iter().for_each(|h| a.writes.add(h, 1));
        a
    }
}

impl Buffer for ClBuffer {
    fn bytes(&self) -> usize {
        self.block.bytes()
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl fmt::Debug for ClBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.block.fmt(f)
    }
}
