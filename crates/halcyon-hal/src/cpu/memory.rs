//! Memory of the CPU device: host allocations from the pool, or imported host data.

use super::team::{SharedConst, SharedMut, Team};
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

/// Alignment of small allocations: a cache line, which is also the width of the widest vector.
pub(crate) const LINE: usize = 64;
/// Allocations of at least this size are aligned to it, so that the system can back them with huge pages.
const HUGE: usize = 2 << 20;
/// Alignment of smaller host buffers: a page.
const PAGE: usize = 4096;

/// Zeroed memory of the process. It is zeroed because reading uninitialised bytes is undefined behaviour in
/// Rust, although the driver contract leaves the contents of a new buffer undefined. The system supplies
/// large blocks as zero pages, so zeroing them costs nothing.
pub(crate) struct HostMemory {
    base: NonNull<u8>,
    layout: Layout,
    start: NonNull<u8>,
}

// SAFETY: the value owns plain memory, which is not tied to a thread.
unsafe impl Send for HostMemory {}
// SAFETY: `&HostMemory` only gives out a raw pointer; the device orders accesses through it.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    pub(crate) fn new(bytes: usize) -> Option<HostMemory> {
        HostMemory::aligned(bytes, if bytes >= HUGE { HUGE } else { LINE })
    }

    /// Memory that begins at a page (or at a huge page, if it is large), for host buffers.
    pub(crate) fn pages(bytes: usize) -> Option<HostMemory> {
        HostMemory::aligned(bytes, if bytes >= HUGE { HUGE } else { PAGE })
    }

    fn aligned(bytes: usize, align: usize) -> Option<HostMemory> {
        // Over-allocate and align by hand: for a larger alignment the allocator would clear the memory itself
        // instead of mapping zero pages.
        let layout = Layout::from_size_align(bytes.checked_add(align)?, 16).ok()?;
        // SAFETY: the size is at least `align`, so it is not zero.
        let base = NonNull::new(unsafe { std::alloc::alloc_zeroed(layout) })?;
        let skip = base.as_ptr().align_offset(align);
        // SAFETY: `skip < align`, and `bytes + align` bytes were allocated.
        let start = NonNull::new(unsafe { base.as_ptr().add(skip) })?;
        Some(HostMemory { base, layout, start })
    }

    /// Address of the first requested byte.
    pub(crate) fn start(&self) -> *mut u8 {
        self.start.as_ptr()
    }
}

// SAFETY: the memory is zeroed on allocation, owned by the value, and `start` never changes.
unsafe impl Pages for HostMemory {
    fn start(&self) -> *mut u8 {
        self.start.as_ptr()
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        // SAFETY: `aligned` allocated `base` with this layout, and it is freed only here.
        unsafe { std::alloc::dealloc(self.base.as_ptr(), self.layout) }
    }
}

impl fmt::Debug for HostMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostMemory({:?}, {} bytes)", self.start, self.layout.size())
    }
}

/// The process's allocator as the source of the pool's memory.
#[derive(Debug)]
pub(crate) struct HostSource;

/// Start address of a block of the pool.
#[derive(Debug)]
pub(crate) struct HostPlace(AtomicPtr<u8>);

impl HostPlace {
    pub(crate) fn get(&self) -> *mut u8 {
        // Relaxed is enough, because the device lock or a pin orders this load with moves of the block.
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
    /// A pool block, shared with the streams that use it.
    Pooled(Block<HostSource>),
    /// A range of a pool block. The block may be moved.
    Part { block: Block<HostSource>, offset: usize, bytes: usize },
    /// Imported data, or a range of it, which is read-only and kept alive by `of`. The address is read once,
    /// because a second call of `Bytes::bytes` could return data that were not checked.
    Lent { at: Ptr, of: Arc<dyn Bytes> },
}

/// A buffer of the CPU device.
pub(crate) struct CpuBuffer {
    storage: Storage,
    /// Number of the device instance that made the buffer. The lock and the tracker of that device order the
    /// buffer's use.
    owner: u64,
}

/// Keeps a buffer's memory alive and in place without holding the buffer itself. A stream holds one `Keep`
/// per buffer until its work has run. A `Keep` does not count as a reference to the buffer.
pub(crate) enum Keep {
    Pooled(Pinned<HostSource>),
    Lent { data: Arc<dyn Bytes> },
}

impl Keep {
    /// Identifies the memory, to remove duplicates.
    pub(crate) fn key(&self) -> usize {
        match self {
            Keep::Pooled(b) => b.block().key(),
            Keep::Lent { data } => Arc::as_ptr(data) as *const u8 as usize,
        }
    }
}

/// Writable memory of a buffer that stays alive and in place.
pub(crate) struct Held {
    _keep: Keep,
    at: Ptr,
}

impl Held {
    /// Makes the system supply the memory that it has not supplied yet.
    #[cfg(target_os = "linux")]
    pub(crate) fn supply(&self) {
        // Small enough for other threads, which may wait for the process's list of mappings meanwhile.
        const STEP: usize = 1 << 20;
        // SAFETY: `sysconf` only reads a setting of the system.
        let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(PAGE).max(PAGE);
        let (start, end) = (self.at.ptr as usize, self.at.ptr as usize + self.at.bytes);
        let (start, end) = (start.next_multiple_of(page), end / page * page);
        for at in (start..end).step_by(STEP) {
            let p = self.at.ptr.wrapping_add(at - self.at.ptr as usize);
            // SAFETY: whole pages inside the memory that `_keep` keeps alive and in place. The advice does
            // not change the contents of a page, so other threads may use the memory meanwhile.
            let done = unsafe { libc::madvise(p.cast(), STEP.min(end - at), libc::MADV_POPULATE_WRITE) };
            if done != 0 {
                // Before Linux 5.14, or without memory: the first access supplies a page.
                return;
            }
        }
    }

    /// The first access supplies a page: there is no call for it that leaves the contents alone.
    #[cfg(not(target_os = "linux"))]
    pub(crate) fn supply(&self) {
        let _ = self.at;
    }
}

/// Address and length of a buffer. Code that dereferences the pointer must have checked the length, must keep
/// the memory alive, and must have registered its reads and writes with the device's tracker (or hold the
/// device lock while there are no streams).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ptr {
    pub ptr: *mut u8,
    pub bytes: usize,
    pub read_only: bool,
}

impl Ptr {
    /// A range of the buffer. Neither checks the range nor dereferences the pointer.
    pub(crate) fn part(&self, offset: usize, bytes: usize) -> Ptr {
        Ptr { ptr: self.ptr.wrapping_add(offset), bytes, read_only: self.read_only }
    }

    /// Whether the two ranges share a byte.
    pub(crate) fn overlaps(&self, o: &Ptr) -> bool {
        let (a, b) = (self.ptr as usize, o.ptr as usize);
        self.bytes > 0 && o.bytes > 0 && a < b.saturating_add(o.bytes) && b < a.saturating_add(self.bytes)
    }
}

// SAFETY: a `Ptr` is only an address; dereferencing it is unsafe.
unsafe impl Send for Ptr {}
// SAFETY: a `Ptr` is only an address; dereferencing it is unsafe.
unsafe impl Sync for Ptr {}

impl CpuBuffer {
    pub(crate) fn pooled(block: Block<HostSource>, owner: u64) -> CpuBuffer {
        CpuBuffer { storage: Storage::Pooled(block), owner }
    }

    /// Imports host data as a buffer. `None` if its address is not aligned for every element type.
    pub(crate) fn lent(data: Arc<dyn Bytes>, owner: u64) -> Option<CpuBuffer> {
        let b = data.bytes();
        let at = Ptr { ptr: b.as_ptr() as *mut u8, bytes: b.len(), read_only: true };
        let aligned = (at.ptr as usize).is_multiple_of(super::device::ELEMENT);
        aligned.then(|| CpuBuffer { storage: Storage::Lent { at, of: data }, owner })
    }

    /// A view of `bytes` bytes from `offset` of a buffer. Fails if the range reaches past the buffer, or if
    /// `offset` is not a multiple of [`LINE`].
    pub(crate) fn part(of: &BufferRef, offset: usize, bytes: usize, owner: u64) -> Result<CpuBuffer> {
        let whole = CpuBuffer::of(&**of, owner, "part")?;
        crate::validate::range("part", whole.at().bytes, offset, bytes)?;
        if !offset.is_multiple_of(LINE) {
            return Err(Error::argument(
                "part",
                format!(
                    "offset {offset} is not a multiple of {LINE}; Device::part takes multiples of Target::part_alignment"
                ),
            ));
        }
        let block = |block: &Block<HostSource>, start: usize| Storage::Part {
            block: block.clone(),
            offset: start + offset,
            bytes,
        };
        let storage = match &whole.storage {
            Storage::Pooled(b) => block(b, 0),
            Storage::Part { block: b, offset: start, .. } => block(b, *start),
            Storage::Lent { at, of } => {
                Storage::Lent { at: Ptr { ptr: at.ptr.wrapping_add(offset), bytes, ..*at }, of: of.clone() }
            }
        };
        Ok(CpuBuffer { storage, owner })
    }

    /// The buffer's current address. Blocks are moved under the device lock, so the caller holds that lock or
    /// a pin, unless it needs only the size.
    pub(crate) fn at(&self) -> Ptr {
        match &self.storage {
            Storage::Pooled(b) => Ptr { ptr: b.place().get(), bytes: b.bytes(), read_only: false },
            Storage::Part { block, offset, bytes } => {
                Ptr { ptr: block.place().get().wrapping_add(*offset), bytes: *bytes, read_only: false }
            }
            Storage::Lent { at, .. } => *at,
        }
    }

    /// Keeps the memory alive and in place until the result is dropped.
    pub(crate) fn keep(&self) -> Keep {
        match &self.storage {
            Storage::Pooled(block) | Storage::Part { block, .. } => Keep::Pooled(block.pin()),
            Storage::Lent { of, .. } => Keep::Lent { data: of.clone() },
        }
    }

    /// The memory, kept alive and in place; `None` for imported data.
    pub(crate) fn held(&self) -> Option<Held> {
        let keep = self.keep();
        // Read after the pin, which excludes moves.
        let at = self.at();
        (!at.read_only).then_some(Held { _keep: keep, at })
    }

    /// Downcasts a buffer that device instance `owner` made. Returns an error for any other buffer.
    pub(crate) fn of<'a>(b: &'a dyn Buffer, owner: u64, what: &str) -> Result<&'a CpuBuffer> {
        let own = b.as_any().downcast_ref().filter(|b: &&CpuBuffer| b.owner == owner);
        own.ok_or_else(|| {
            Error::argument(
                what,
                "the buffer belongs to another device, or to another opening of this device",
            )
        })
    }
}

impl Buffer for CpuBuffer {
    fn bytes(&self) -> usize {
        self.at().bytes
    }
    fn is_writable(&self) -> bool {
        !self.at().read_only
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl fmt::Debug for CpuBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.storage {
            Storage::Pooled(b) => b.fmt(f),
            Storage::Lent { at, .. } => write!(f, "Lent({} bytes)", at.bytes),
            Storage::Part { block, bytes, .. } => write!(f, "Part({bytes} bytes of {block:?})"),
        }
    }
}

/// Minimum number of bytes in each part of a copy that several threads share.
const GRAIN: usize = 256 << 10;

/// Copies `bytes` bytes from `src` to `dst`. The ranges may overlap.
///
/// # Safety
/// `src` is readable and `dst` writable for `bytes` bytes, and no other thread accesses the destination or
/// writes the source during the call.
pub(crate) unsafe fn copy_bytes(team: &Team, src: *const u8, dst: *mut u8, bytes: usize) {
    let (s, d) = (src as usize, dst as usize);
    if s.abs_diff(d) < bytes {
        // SAFETY: both ranges are valid by contract. `copy` allows overlap; the parallel copy below does not.
        unsafe { std::ptr::copy(src, dst, bytes) };
        return;
    }
    let (src, dst) = (SharedConst(src), SharedMut(dst));
    team.ranges(bytes, GRAIN, &|a, b| {
        // SAFETY: the contract makes both ranges valid. They do not overlap, because their distance is at
        // least `bytes`. Parts are disjoint.
        unsafe { std::ptr::copy_nonoverlapping(src.get().add(a), dst.get().add(a), b - a) };
    });
}
