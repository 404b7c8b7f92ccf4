//! Buffers and the pool's source of device memory.

use super::capture::Recordings;
use super::sys::{self, Api, CommandQueue, Context, Handle, Memory as MemoryObject, Owned};
use crate::Buffer;
use crate::commands::HasOwner;
use crate::hazard::Access;
use crate::host_buffer::Pages;
use crate::pool::{Block, Source};
use halcyon_ir::data::Bytes;
use std::any::Any;
use std::ffi::c_void;
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, RwLock, RwLockReadGuard, Weak};

/// The pool's source: `clCreateBuffer` in one context.
#[derive(Clone, Debug)]
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
    /// The number of the allocation's first byte. OpenCL exposes no addresses, so hazard tracking gives each
    /// byte of device memory its own number instead. No two allocations have the same numbers, not even one
    /// after the other.
    at: usize,
    captures: EndOfCaptures,
}

/// The OpenCL object of a buffer, the number of its first byte, and the captures that use its allocation.
#[derive(Debug)]
pub(super) struct Spot {
    object: Arc<Owned<MemoryObject>>,
    at: usize,
    captures: Arc<Users>,
}

/// The captures whose command buffers use an allocation.
#[derive(Debug, Default)]
pub(super) struct Users(Mutex<Vec<Weak<Recordings>>>);

impl Users {
    fn lock(&self) -> MutexGuard<'_, Vec<Weak<Recordings>>> {
        self.0.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn add(&self, one: &Arc<Recordings>) {
        let mut all = self.lock();
        all.retain(|w| w.strong_count() > 0 && !std::ptr::eq(w.as_ptr(), Arc::as_ptr(one)));
        all.push(Arc::downgrade(one));
    }
}

/// Belongs to the owner of an allocation. When it is dropped, the captures that use the allocation end:
/// their command buffers refer to its object, so the object would live as long as they do.
#[derive(Debug, Default)]
struct EndOfCaptures(Arc<Users>);

impl Drop for EndOfCaptures {
    fn drop(&mut self) {
        let all = std::mem::take(&mut *self.0.lock());
        all.iter().filter_map(Weak::upgrade).for_each(|r| r.end());
    }
}

/// Numbers for `bytes` bytes of device memory, see [`Memory::at`].
fn number(bytes: usize) -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    NEXT.fetch_add(bytes, Ordering::Relaxed)
}

impl Source for ClSource {
    type Raw = Memory;
    /// The buffer, or a sub-buffer of it.
    type Place = RwLock<Spot>;

    fn allocate(&self, bytes: usize) -> Result<Memory, String> {
        // Some implementations accept any size and fail at the first use, so their reported limit is enforced
        // here.
        if bytes as u64 > self.max {
            return Err(format!("the device allows {} bytes in one buffer", self.max));
        }
        let made = buffer(self.api, &self.context, bytes);
        let object = made.map(Arc::new).map_err(|c| format!("clCreateBuffer gave {}", sys::code_name(c)))?;
        Ok(Memory { object, at: number(bytes), captures: EndOfCaptures::default() })
    }

    fn place(&self, raw: &Memory, range: Option<(usize, usize)>) -> Result<Self::Place, String> {
        let Some((offset, bytes)) = range else {
            let captures = raw.captures.0.clone();
            return Ok(RwLock::new(Spot { object: raw.object.clone(), at: raw.at, captures }));
        };
        let part = sub_buffer(self.api, &raw.object, [offset, bytes]);
        let part = part.map_err(|c| format!("clCreateSubBuffer gave {}", sys::code_name(c)))?;
        let (at, captures) = (raw.at.wrapping_add(offset), raw.captures.0.clone());
        Ok(RwLock::new(Spot { object: Arc::new(part), at, captures }))
    }

    fn alignment(&self) -> usize {
        self.alignment
    }

    fn most(&self) -> u64 {
        self.max
    }
}

/// A part of a buffer, given by its offset and its size. The offset must be a multiple of the device's
/// alignment. The part keeps the buffer alive.
pub(super) fn sub_buffer(
    api: &'static Api,
    of: &Owned<MemoryObject>,
    region: [usize; 2],
) -> Result<Owned<MemoryObject>, i32> {
    let mut code = 0;
    // SAFETY: the buffer is live, and `region` has the layout of `cl_buffer_region`, two sizes, as this type
    // requires.
    let part = unsafe {
        (api.clCreateSubBuffer)(
            of.raw(),
            sys::MEM_READ_WRITE,
            sys::BUFFER_CREATE_TYPE_REGION,
            region.as_ptr().cast(),
            &mut code,
        )
    };
    // SAFETY: `clCreateSubBuffer` returned this object with one reference.
    unsafe { Owned::new(part, code, api.clReleaseMemObject) }
}

/// Creates a buffer that the device can read and write. The statistics of the pool include it only if the
/// pool itself requested it ([`ClSource`]).
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

/// The smallest memory that is imported: copying less costs little more than making an object.
pub(super) const IMPORTED: usize = 64 << 10;
/// Alignment in bytes that imported memory needs. With less, Intel's drivers copy the memory.
const PAGE: usize = 4096;

/// Device memory borrowed from the pool, or imported host memory.
// An associated type of a public trait cannot be less public.
#[allow(unreachable_pub)]
pub struct ClBuffer {
    storage: Storage,
    /// Id of the device that it belongs to.
    owner: u64,
}

enum Storage {
    Pooled(Block<ClSource>),
    /// Host memory, which the object keeps alive ([`ClBuffer::imported`]).
    Imported {
        spot: RwLock<Spot>,
        bytes: usize,
        _captures: EndOfCaptures,
    },
}

/// Drops the owner of imported host memory.
///
/// # Safety
/// `owner` comes from `Box::into_raw` of this type, and the call is the only one with it.
unsafe extern "system" fn give_back(_: Handle, owner: *mut c_void) {
    // SAFETY: the contract of this function. If the owner's destructor panics, the process ends, because a
    // panic does not leave a function of this ABI.
    drop(unsafe { Box::from_raw(owner.cast::<Arc<dyn Bytes>>()) });
}

impl ClBuffer {
    pub(super) fn pooled(block: Block<ClSource>, owner: u64) -> ClBuffer {
        ClBuffer { storage: Storage::Pooled(block), owner }
    }

    /// A buffer over host memory that the device reads directly, because it shares the host's memory. `None`
    /// if the memory is too small or not aligned to a page, or if the driver refuses it.
    pub(super) fn imported(source: &ClSource, data: Arc<dyn Bytes>, owner: u64) -> Option<ClBuffer> {
        // One call, because another one might give other memory.
        let memory = data.bytes();
        let (at, bytes) = (memory.as_ptr(), memory.len());
        // Intel's drivers also copy memory whose size is not a multiple of a cache line.
        let fits = bytes >= IMPORTED && bytes as u64 <= source.max && bytes.is_multiple_of(64);
        if !fits || !(at as usize).is_multiple_of(PAGE) {
            return None;
        }
        let api = source.api;
        let (mut code, flags) = (0, sys::MEM_READ_ONLY | sys::MEM_USE_HOST_PTR);
        // SAFETY: the context is live. The memory has `bytes` bytes, and stays as it is until the object is
        // destroyed: see below. The device does not write it, because of the flags and of
        // `DeviceInstance::is_read_only`.
        let raw = unsafe {
            (api.clCreateBuffer)(source.context.raw(), flags, bytes, at.cast_mut().cast(), &mut code)
        };
        // SAFETY: `clCreateBuffer` returned this buffer with one reference.
        let object = unsafe { Owned::<MemoryObject>::new(raw, code, api.clReleaseMemObject) };
        let object = object.inspect_err(|c| {
            tracing::debug!(code = %sys::code_name(*c), bytes, "host memory could not be imported");
        });
        let object = object.ok()?;
        // Commands may still use the memory when the last reference to the object is released. The driver
        // destroys the object after them, and then calls `give_back`.
        let keep = Box::into_raw(Box::new(data)).cast::<c_void>();
        // SAFETY: the object is live, and `keep` is what `give_back` needs. The driver calls it once.
        let code = unsafe { (api.clSetMemObjectDestructorCallback)(object.raw(), give_back, keep) };
        if code != sys::SUCCESS {
            // SAFETY: the driver did not take `keep`. No command used the object, which is released first.
            unsafe {
                drop(object);
                drop(Box::from_raw(keep.cast::<Arc<dyn Bytes>>()));
            }
            return None;
        }
        let ends = EndOfCaptures::default();
        let spot = Spot { object: Arc::new(object), at: number(bytes), captures: ends.0.clone() };
        let storage = Storage::Imported { spot: RwLock::new(spot), bytes, _captures: ends };
        Some(ClBuffer { storage, owner })
    }

    pub(super) fn is_imported(&self) -> bool {
        matches!(self.storage, Storage::Imported { .. })
    }

    /// The OpenCL object of the buffer. Moving a buffer replaces its object. This needs the ledger's lock and
    /// the locks of the device's own queue, so the object does not change while the caller holds one of them.
    pub(super) fn object(&self) -> Arc<Owned<MemoryObject>> {
        self.spot().object.clone()
    }

    pub(super) fn handle(&self) -> Handle {
        self.spot().object.raw()
    }

    /// The object for a command buffer of a capture. The capture ends before the buffer's memory is returned
    /// to the driver.
    pub(super) fn recorded_object(&self, by: &Arc<Recordings>) -> Arc<Owned<MemoryObject>> {
        let spot = self.spot();
        spot.captures.add(by);
        spot.object.clone()
    }

    fn spot(&self) -> RwLockReadGuard<'_, Spot> {
        let spot = match &self.storage {
            Storage::Pooled(block) => block.place(),
            Storage::Imported { spot, .. } => spot,
        };
        spot.read().unwrap_or_else(|e| e.into_inner())
    }

    /// The buffer's range in the numbering of device memory: the first number and the count.
    pub(crate) fn span(&self) -> (usize, usize) {
        let room = match &self.storage {
            Storage::Pooled(block) => block.room(),
            Storage::Imported { bytes, .. } => *bytes,
        };
        (self.spot().at, room.max(1))
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
        match &self.storage {
            Storage::Pooled(block) => block.bytes(),
            Storage::Imported { bytes, .. } => *bytes,
        }
    }

    fn is_writable(&self) -> bool {
        matches!(self.storage, Storage::Pooled(_))
    }

    fn place(&self) -> Option<u64> {
        Some(self.spot().at as u64)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl fmt::Debug for ClBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.storage {
            Storage::Pooled(block) => block.fmt(f),
            Storage::Imported { bytes, .. } => write!(f, "Imported({bytes} bytes)"),
        }
    }
}
