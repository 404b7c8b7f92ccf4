//! Memory of the CPU device: host allocations from the pool, or host data that was lent to it.

use crate::pool::{Block, Source};
use crate::{Buffer, BufferRef, Error, Result};
use halcyon_ir::data::Bytes;
use std::alloc::Layout;
use std::any::Any;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

/// Alignment of small allocations: a cache line, which is also the widest vector.
pub(crate) const LINE: usize = 64;
/// Allocations of at least this size are aligned to it, so that the system can back them with huge pages.
const HUGE: usize = 2 << 20;

/// Zeroed memory of the process. Zeroed, because reading bytes that nothing has written is undefined in Rust, whatever the
/// contract of a device says about them; large blocks come from the system as zero pages and cost nothing more.
pub(crate) struct HostMemory {
    base: NonNull<u8>,
    layout: Layout,
    start: NonNull<u8>,
}

// SAFETY: plain memory, owned.
unsafe impl Send for HostMemory {}
// SAFETY: accesses go through raw pointers, ordered by the device.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    pub(crate) fn new(bytes: usize) -> Option<HostMemory> {
        let align = if bytes >= HUGE { HUGE } else { LINE };
        // Over-allocated and aligned by hand: an aligned request would be cleared by hand instead of mapped as zeros.
        let layout = Layout::from_size_align(bytes.checked_add(align)?, 16).ok()?;
        // SAFETY: the size is not zero.
        let base = NonNull::new(unsafe { std::alloc::alloc_zeroed(layout) })?;
        let skip = base.as_ptr().align_offset(align);
        // SAFETY: `skip < align`, and `align` more bytes than asked for were allocated.
        let start = NonNull::new(unsafe { base.as_ptr().add(skip) })?;
        Some(HostMemory { base, layout, start })
    }

    /// The first of the bytes asked for.
    pub(crate) fn start(&self) -> *mut u8 {
        self.start.as_ptr()
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout.
        unsafe { std::alloc::dealloc(self.base.as_ptr(), self.layout) }
    }
}

impl fmt::Debug for HostMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostMemory({:?}, {} bytes)", self.start, self.layout.size())
    }
}

/// The process's allocator as a source of the pool.
#[derive(Debug)]
pub(crate) struct HostSource;

impl Source for HostSource {
    type Raw = HostMemory;
    fn allocate(&self, bytes: usize) -> std::result::Result<HostMemory, String> {
        HostMemory::new(bytes).ok_or_else(|| "the system has no memory left".into())
    }
}

enum Storage {
    /// Shared with the streams that use it.
    Pooled(Arc<Block<HostSource>>),
    /// Read only.
    Lent(Arc<dyn Bytes>),
    /// A range of another buffer, which it keeps alive.
    Part { at: Ptr, of: BufferRef },
}

/// A buffer of the CPU device.
pub(crate) struct CpuBuffer(Storage);

/// What keeps a buffer's bytes where they are, apart from the buffer: streams hold it until their work has run, and whoever counts the
/// references to a buffer sees none of it.
#[derive(Clone)]
pub(crate) enum Keep {
    Pooled(Arc<Block<HostSource>>),
    Lent { data: Arc<dyn Bytes> },
}

impl Keep {
    /// Tells memory apart.
    pub(crate) fn key(&self) -> usize {
        match self {
            Keep::Pooled(b) => Arc::as_ptr(b) as usize,
            Keep::Lent { data } => Arc::as_ptr(data) as *const u8 as usize,
        }
    }
}

/// Where a buffer lies. Whoever follows the pointer has checked the length, keeps the memory alive, and has entered what it reads and
/// writes with the device's tracker, or holds the device's lock while there is no stream.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ptr {
    pub ptr: *mut u8,
    pub bytes: usize,
    pub read_only: bool,
}

// SAFETY: an address; following it is unsafe.
unsafe impl Send for Ptr {}
// SAFETY: as above.
unsafe impl Sync for Ptr {}

impl CpuBuffer {
    pub(crate) fn pooled(block: Block<HostSource>) -> CpuBuffer {
        CpuBuffer(Storage::Pooled(Arc::new(block)))
    }

    /// Host data as a buffer, where its address suits every element type.
    pub(crate) fn lent(data: Arc<dyn Bytes>) -> Option<CpuBuffer> {
        (data.bytes().as_ptr() as usize)
            .is_multiple_of(super::device::ELEMENT)
            .then(|| CpuBuffer(Storage::Lent(data)))
    }

    /// A range of a buffer, which must lie inside of it.
    pub(crate) fn part(of: &BufferRef, offset: usize, bytes: usize) -> Result<CpuBuffer> {
        let whole = CpuBuffer::of(&**of, "part")?.at();
        crate::validate::range("part", whole.bytes, offset, bytes)?;
        let at = Ptr { ptr: whole.ptr.wrapping_add(offset), bytes, read_only: whole.read_only };
        Ok(CpuBuffer(Storage::Part { at, of: of.clone() }))
    }

    pub(crate) fn at(&self) -> Ptr {
        match &self.0 {
            Storage::Part { at, .. } => *at,
            Storage::Pooled(b) => Ptr {
                ptr: b.raw().map_or(std::ptr::dangling_mut(), |r| r.start.as_ptr()),
                bytes: b.bytes(),
                read_only: false,
            },
            Storage::Lent(d) => {
                let b = d.bytes();
                Ptr { ptr: b.as_ptr() as *mut u8, bytes: b.len(), read_only: true }
            }
        }
    }

    pub(crate) fn keep(&self) -> Result<Keep> {
        match &self.0 {
            Storage::Pooled(b) => Ok(Keep::Pooled(b.clone())),
            Storage::Lent(d) => Ok(Keep::Lent { data: d.clone() }),
            Storage::Part { of, .. } => CpuBuffer::of(&**of, "part")?.keep(),
        }
    }

    /// Downcasts what a caller hands in.
    pub(crate) fn of<'a>(b: &'a dyn Buffer, what: &str) -> Result<&'a CpuBuffer> {
        b.as_any().downcast_ref().ok_or_else(|| Error::argument(what, "the buffer belongs to another device"))
    }
}

impl Buffer for CpuBuffer {
    fn bytes(&self) -> usize {
        self.at().bytes
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl fmt::Debug for CpuBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Storage::Pooled(b) => b.fmt(f),
            Storage::Lent(d) => write!(f, "Lent({} bytes)", d.bytes().len()),
            Storage::Part { at, of } => write!(f, "Part({} bytes of {of:?})", at.bytes),
        }
    }
}
