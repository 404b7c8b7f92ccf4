//! Buffers and the pool's source of device memory.

use super::sys::{self, Api, CommandQueue, Context, Handle, Memory as MemoryObject, Owned};
use crate::Buffer;
use crate::commands::HasOwner;
use crate::hazard::Access;
use crate::host_buffer::Pages;
use crate::pool::{Block, Source};
use std::any::Any;
use std::ffi::c_void;
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, RwLock, RwLockReadGuard};

/// The pool's source: `clCreateBuffer` in one context.
#[derive(Debug)]
pub(super) struct ClSource {
    pub api: &'static Api,
    pub context: Arc<Owned<Context>>,
    /// Maximum bytes of one buffer.
    pub max: u64,
    /// Alignment of sub-buffers in bytes.
    pub alignment: usize,
}

/// One allocation.
#[derive(Debug)]
pub(super) struct Memory {
    pub object: Arc<Owned<MemoryObject>>,
    /// OpenCL exposes no addresses. Hazard tracking uses a unique number per byte instead; this is the first
    /// one.
    at: usize,
}

/// The OpenCL object of a buffer, and the number of its first byte.
#[derive(Debug)]
pub(super) struct Spot {
    object: Arc<Owned<MemoryObject>>,
    at: usize,
}

impl Source for ClSource {
    type Raw = Memory;
    /// The buffer, or a sub-buffer of it.
    type Place = RwLock<Spot>;

    fn allocate(&self, bytes: usize) -> Result<Memory, String> {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        // Some implementations accept any size and fail at the first use, so their reported limit is enforced
        // here.
        if bytes as u64 > self.max {
            return Err(format!("the device allows {} bytes in one buffer", self.max));
        }
        let made = buffer(self.api, &self.context, bytes);
        let object = made.map(Arc::new).map_err(|c| format!("clCreateBuffer gave {}", sys::code_name(c)))?;
        Ok(Memory { object, at: NEXT.fetch_add(bytes, Ordering::Relaxed) })
    }

    fn place(&self, raw: &Memory, range: Option<(usize, usize)>) -> Result<Self::Place, String> {
        let Some((offset, bytes)) = range else {
            return Ok(RwLock::new(Spot { object: raw.object.clone(), at: raw.at }));
        };
        let region = [offset, bytes];
        let mut code = 0;
        // SAFETY: the buffer is live, and `region` has the layout of `cl_buffer_region`, two sizes, as this
        // type requires.
        let part = unsafe {
            (self.api.clCreateSubBuffer)(
                raw.object.raw(),
                sys::MEM_READ_WRITE,
                sys::BUFFER_CREATE_TYPE_REGION,
                region.as_ptr().cast(),
                &mut code,
            )
        };
        // SAFETY: `clCreateSubBuffer` returned this object with one reference; it keeps the parent alive.
        let part = unsafe { Owned::new(part, code, self.api.clReleaseMemObject) };
        part.map(|p| RwLock::new(Spot { object: Arc::new(p), at: raw.at.wrapping_add(offset) }))
            .map_err(|c| format!("clCreateSubBuffer gave {}", sys::code_name(c)))
    }

    fn alignment(&self) -> usize {
        self.alignment
    }

    fn most(&self) -> u64 {
        self.max
    }
}

/// Creates a buffer that the device can read and write. It does not appear in the pool's statistics, unless
/// the pool itself requested it.
pub(super) fn buffer(
    api: &'static Api,
    context: &Owned<Context>,
    bytes: usize,
) -> Result<Owned<MemoryObject>, i32> {
    buffer_with(api, context, bytes, sys::MEM_READ_WRITE)
}

fn buffer_with(
    api: &'static Api,
    context: &Owned<Context>,
    bytes: usize,
    flags: u64,
) -> Result<Owned<MemoryObject>, i32> {
    let mut code = 0;
    // SAFETY: the context is live, and no host memory is passed.
    let raw = unsafe { (api.clCreateBuffer)(context.raw(), flags, bytes, std::ptr::null_mut(), &mut code) };
    // SAFETY: `clCreateBuffer` returned this buffer with one reference; `clReleaseMemObject` releases it.
    unsafe { Owned::new(raw, code, api.clReleaseMemObject) }
}

/// Host memory allocated by the driver, mapped as long as this value lives.
#[derive(Debug)]
pub(super) struct ClPages {
    api: &'static Api,
    buffer: Owned<MemoryObject>,
    queue: Arc<Owned<CommandQueue>>,
    at: *mut c_void,
}

// SAFETY: the value owns the mapping, and the library's functions may be called from any thread.
unsafe impl Send for ClPages {}
// SAFETY: `&self` only yields the address, and accesses through it are unsafe.
unsafe impl Sync for ClPages {}

// SAFETY: the mapping stays at one address until the value is dropped, has the requested size, and was zeroed
// when it was made. The value owns it.
unsafe impl Pages for ClPages {
    fn start(&self) -> *mut u8 {
        self.at.cast()
    }
}

impl ClPages {
    /// Allocates `bytes` bytes (at least one); the error is the driver's reason.
    pub(super) fn new(
        api: &'static Api,
        context: &Owned<Context>,
        queue: Arc<Owned<CommandQueue>>,
        bytes: usize,
    ) -> Result<ClPages, String> {
        let bytes = bytes.max(1);
        let buffer = buffer_with(api, context, bytes, sys::MEM_READ_WRITE | sys::MEM_ALLOC_HOST_PTR)
            .map_err(|c| format!("clCreateBuffer gave {}", sys::code_name(c)))?;
        let (mut code, flags) = (0, sys::MAP_READ | sys::MAP_WRITE);
        // SAFETY: the queue and the buffer are live; the range is the whole buffer, and the call blocks.
        let at = unsafe {
            (api.clEnqueueMapBuffer)(
                queue.raw(),
                buffer.raw(),
                sys::TRUE,
                flags,
                0,
                bytes,
                0,
                std::ptr::null(),
                std::ptr::null_mut(),
                &mut code,
            )
        };
        if code != sys::SUCCESS || at.is_null() {
            return Err(format!("clEnqueueMapBuffer gave {}", sys::code_name(code)));
        }
        // SAFETY: the mapping has `bytes` bytes at `at`, which nothing else uses yet.
        unsafe { std::ptr::write_bytes(at.cast::<u8>(), 0, bytes) };
        Ok(ClPages { api, buffer, queue, at })
    }
}

impl Drop for ClPages {
    fn drop(&mut self) {
        // SAFETY: `new` mapped the address once, with this queue. OpenCL releases the buffer only after this
        // command.
        let code = unsafe {
            (self.api.clEnqueueUnmapMemObject)(
                self.queue.raw(),
                self.buffer.raw(),
                self.at,
                0,
                std::ptr::null(),
                std::ptr::null_mut(),
            )
        };
        if code != sys::SUCCESS {
            tracing::warn!(code = %sys::code_name(code), "host memory could not be unmapped");
        }
    }
}

/// Device memory borrowed from the pool.
// An associated type of a public trait cannot be less public.
#[allow(unreachable_pub)]
pub struct ClBuffer {
    pub block: Block<ClSource>,
    /// Id of the device that it belongs to.
    pub owner: u64,
}

impl ClBuffer {
    /// The OpenCL object of the buffer. It does not change while the locks of the queue and, with streams, of
    /// the ledger are held.
    pub(super) fn object(&self) -> Arc<Owned<MemoryObject>> {
        self.spot().object.clone()
    }

    pub(super) fn handle(&self) -> Handle {
        self.spot().object.raw()
    }

    fn spot(&self) -> RwLockReadGuard<'_, Spot> {
        self.block.place().read().unwrap_or_else(|e| e.into_inner())
    }

    /// The buffer's range in the numbering of device memory: the first number and the count.
    pub(crate) fn span(&self) -> (usize, usize) {
        (self.spot().at, self.block.room().max(1))
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

impl HasOwner for ClBuffer {
    fn owner(&self) -> u64 {
        self.owner
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
