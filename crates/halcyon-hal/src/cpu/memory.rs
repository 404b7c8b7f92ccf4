//! Memory of the CPU device: host allocations from the pool, or host data that was lent to it.

use crate::host_buffer::Pages;
use crate::pool::{Block, Pinned, Place, Source};
use crate::{Buffer, BufferRef, Error, Result};
use halcyon_ir::data::Bytes;
use std::alloc::Layout;
use std::any::Any;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, Ordering};

/// Alignment of small allocations: a cache line, which is also the widest vector.
pub(crate) const LINE: usize = 64;
/// Allocations of at least this size are aligned to it, so that the system can back them with huge pages.
const HUGE: usize = 2 << 20;
/// A page, where they are not larger.
const PAGE: usize = 4096;

/// Zeroed memory of the process. Zeroed, because reading bytes that nothing has written is undefined in Rust,
/// whatever the contract of a device says about them; large blocks come from the system as zero pages and
/// cost nothing more.
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
        HostMemory::aligned(bytes, if bytes >= HUGE { HUGE } else { LINE })
    }

    /// From whole pages on, for whoever reads and writes them beside the processor.
    pub(crate) fn pages(bytes: usize) -> Option<HostMemory> {
        HostMemory::aligned(bytes, if bytes >= HUGE { HUGE } else { PAGE })
    }

    fn aligned(bytes: usize, align: usize) -> Option<HostMemory> {
        // Over-allocated and aligned by hand: an aligned request would be cleared by hand instead of mapped
        // as zeros.
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

// SAFETY: zeroed when it was allocated, at one address, owned.
unsafe impl Pages for HostMemory {
    fn start(&self) -> *mut u8 {
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

/// Where a block starts.
#[derive(Debug)]
pub(crate) struct HostPlace(AtomicPtr<u8>);

impl HostPlace {
    pub(crate) fn get(&self) -> *mut u8 {
        // The device's lock orders this with moves.
        self.0.load(Ordering::Relaxed)
    }
}

impl Place for HostPlace {
    fn replace(&self, with: HostPlace) {
        self.0.store(with.get(), Ordering::Relaxed);
    }
}

impl Source for HostSource {
    type Raw = HostMemory;
    type Place = HostPlace;

    fn allocate(&self, bytes: usize) -> std::result::Result<HostMemory, String> {
        HostMemory::new(bytes).ok_or_else(|| "the system has no memory left".into())
    }

    fn place(
        &self,
        raw: &HostMemory,
        range: Option<(usize, usize)>,
    ) -> std::result::Result<HostPlace, String> {
        Ok(HostPlace(AtomicPtr::new(raw.start().wrapping_add(range.map_or(0, |(offset, _)| offset)))))
    }

    fn alignment(&self) -> usize {
        LINE
    }
}

enum Storage {
    /// Shared with the streams that use it.
    Pooled(Block<HostSource>),
    /// A range of a block, which may move.
    Part { block: Block<HostSource>, offset: usize, bytes: usize },
    /// Read only.
    Lent(Arc<dyn Bytes>),
    /// A range of lent data, which it keeps alive.
    LentPart { at: Ptr, of: Arc<dyn Bytes> },
}

/// A buffer of the CPU device.
pub(crate) struct CpuBuffer {
    storage: Storage,
    /// Number of the opening that made it, whose lock and tracker keep its work apart.
    owner: u64,
}

/// What keeps a buffer's bytes where they are, apart from the buffer: streams hold it until their work has
/// run, and whoever counts the references to a buffer sees none of it.
pub(crate) enum Keep {
    Pooled(Pinned<HostSource>),
    Lent { data: Arc<dyn Bytes> },
}

impl Keep {
    /// Tells memory apart.
    pub(crate) fn key(&self) -> usize {
        match self {
            Keep::Pooled(b) => b.block().key(),
            Keep::Lent { data } => Arc::as_ptr(data) as *const u8 as usize,
        }
    }
}

/// Where a buffer lies. Whoever follows the pointer has checked the length, keeps the memory alive, and has
/// entered what it reads and writes with the device's tracker, or holds the device's lock while there is no
/// stream.
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
    pub(crate) fn pooled(block: Block<HostSource>, owner: u64) -> CpuBuffer {
        CpuBuffer { storage: Storage::Pooled(block), owner }
    }

    /// Host data as a buffer, where its address suits every element type.
    pub(crate) fn lent(data: Arc<dyn Bytes>, owner: u64) -> Option<CpuBuffer> {
        (data.bytes().as_ptr() as usize)
            .is_multiple_of(super::device::ELEMENT)
            .then(|| CpuBuffer { storage: Storage::Lent(data), owner })
    }

    /// A range of a buffer, which must lie inside of it.
    pub(crate) fn part(of: &BufferRef, offset: usize, bytes: usize, owner: u64) -> Result<CpuBuffer> {
        let whole = CpuBuffer::of(&**of, owner, "part")?;
        crate::validate::range("part", whole.at().bytes, offset, bytes)?;
        let block = |block: &Block<HostSource>, start: usize| Storage::Part {
            block: block.clone(),
            offset: start + offset,
            bytes,
        };
        let lent = |at: Ptr, of: &Arc<dyn Bytes>| Storage::LentPart {
            at: Ptr { ptr: at.ptr.wrapping_add(offset), bytes, ..at },
            of: of.clone(),
        };
        let storage = match &whole.storage {
            Storage::Pooled(b) => block(b, 0),
            Storage::Part { block: b, offset: start, .. } => block(b, *start),
            Storage::Lent(d) => lent(whole.at(), d),
            Storage::LentPart { at, of } => lent(*at, of),
        };
        Ok(CpuBuffer { storage, owner })
    }

    /// Where it is now. Asked with the device's lock held, unless only the size matters: moves are made under
    /// it.
    pub(crate) fn at(&self) -> Ptr {
        match &self.storage {
            Storage::Pooled(b) => Ptr { ptr: b.place().get(), bytes: b.bytes(), read_only: false },
            Storage::Part { block, offset, bytes } => {
                Ptr { ptr: block.place().get().wrapping_add(*offset), bytes: *bytes, read_only: false }
            }
            Storage::LentPart { at, .. } => *at,
            Storage::Lent(d) => {
                let b = d.bytes();
                Ptr { ptr: b.as_ptr() as *mut u8, bytes: b.len(), read_only: true }
            }
        }
    }

    /// From here on it stays where it is, until what is returned is dropped.
    pub(crate) fn keep(&self) -> Keep {
        match &self.storage {
            Storage::Pooled(block) | Storage::Part { block, .. } => Keep::Pooled(block.pin()),
            Storage::Lent(data) | Storage::LentPart { of: data, .. } => Keep::Lent { data: data.clone() },
        }
    }

    /// What a caller hands in, if this opening made it.
    pub(crate) fn of<'a>(b: &'a dyn Buffer, owner: u64, what: &str) -> Result<&'a CpuBuffer> {
        let own = b.as_any().downcast_ref().filter(|b: &&CpuBuffer| b.owner == owner);
        own.ok_or_else(|| {
            Error::argument(what, "the buffer belongs to another device, or another opening of it")
        })
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
        match &self.storage {
            Storage::Pooled(b) => b.fmt(f),
            Storage::Lent(d) => write!(f, "Lent({} bytes)", d.bytes().len()),
            Storage::Part { block, bytes, .. } => write!(f, "Part({bytes} bytes of {block:?})"),
            Storage::LentPart { at, .. } => write!(f, "Part({} lent bytes)", at.bytes),
        }
    }
}
