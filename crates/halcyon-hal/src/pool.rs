//! Memory pools, shared by the drivers. The default is a caching allocator: freed memory is kept by size and
//! reused, because fresh pages and driver calls cost more than most kernels. The other strategies obtain
//! large chunks from the driver and allocate ranges of them. Ranges can be moved together, which joins the
//! free memory between them.
//!
//! The memory obtained from the driver (live buffers, kept allocations, unused parts of chunks) never exceeds
//! the limit. See `docs/memory.md`.

mod config;
mod ranges;
#[cfg(test)]
mod tests;

pub use config::{AllocationStrategy, MemoryPoolConfig, size};

use crate::{Counts, Error, MemoryStats, Options, Result, Tag};
use ranges::{AllocatedRange, Ranges};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, RwLock, Weak};

/// Allocates and frees the memory of one driver.
pub trait Source: Send + Sync + 'static {
    /// One allocation; dropping it frees it.
    type Raw: Send + Sync + fmt::Debug;
    type Place: Place;

    /// Allocates exactly `bytes` bytes (never 0); the error is the driver's reason.
    fn allocate(&self, bytes: usize) -> std::result::Result<Self::Raw, String>;

    /// The handle that commands use for an allocation or for a range (offset, bytes) of it. A handle to an
    /// object of the driver keeps the object alive; an address does not keep the memory alive.
    fn place(
        &self,
        raw: &Self::Raw,
        range: Option<(usize, usize)>,
    ) -> std::result::Result<Self::Place, String>;

    /// Alignment of the start of ranges; a power of two.
    fn alignment(&self) -> usize {
        1
    }

    /// Maximum bytes of one allocation.
    fn most(&self) -> u64 {
        u64::MAX
    }
}

/// A buffer's location as used in the driver's calls. It changes when the buffer is moved. The driver moves
/// buffers only while no command runs and none is being submitted.
pub trait Place: Send + Sync + fmt::Debug {
    fn replace(&self, with: Self);
}

impl<T: Send + Sync + fmt::Debug> Place for RwLock<T> {
    fn replace(&self, with: Self) {
        let with = with.into_inner().unwrap_or_else(|e| e.into_inner());
        *self.write().unwrap_or_else(|e| e.into_inner()) = with;
    }
}

/// A copy that moves a buffer. Within one allocation the two ranges may overlap; `to` is then below `from`.
#[derive(Debug)]
pub struct Relocation<'a, R> {
    pub from: (&'a R, usize),
    pub to: (&'a R, usize),
    pub bytes: usize,
    /// `from` and `to` lie in one allocation.
    pub same: bool,
}

impl<R> Relocation<'_, R> {
    pub fn overlaps(&self) -> bool {
        self.same && self.from.1.abs_diff(self.to.1) < self.bytes
    }
}

/// The result of [`crate::Device::defragment`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Defragmented {
    pub moved_buffers: u64,
    pub moved_bytes: u64,
    /// Bytes returned to the driver.
    pub released_bytes: u64,
    /// Bytes of the largest free range.
    pub largest_free_before: u64,
    pub largest_free_after: u64,
}

/// Runs [`Pool::defragment`] with the driver's copies. If the settings enable defragmentation, the pool calls
/// this function when no free range fits a request but the free memory would suffice in total.
pub type Defragment<'a> = &'a dyn Fn() -> Result<Defragmented>;

struct State<S: Source> {
    /// Freed allocations by size, oldest first, each with a number that increases in the order of freeing.
    kept: BTreeMap<usize, Vec<(u64, S::Raw)>>,
    /// The chunks by id. A newer chunk has a larger id.
    chunks: BTreeMap<u64, Chunk<S::Raw>>,
    /// Live ranges of chunks, by id.
    live: HashMap<u64, Live<S>>,
    next: u64,
    stats: MemoryStats,
}

struct Chunk<R> {
    raw: R,
    ranges: Ranges,
}

struct Live<S: Source> {
    chunk: u64,
    offset: usize,
    bytes: usize,
    pins: u32,
    held: Weak<BlockInner<S>>,
}

/// A pool over a source of memory.
pub struct Pool<S: Source> {
    source: S,
    device: String,
    config: MemoryPoolConfig,
    /// Sizes of ranges are multiples of this.
    unit: usize,
    state: Mutex<State<S>>,
    counts: Arc<Counts>,
}

/// Memory borrowed from a pool. Clones share the memory. Dropping the last clone returns the memory to the
/// pool.
pub struct Block<S: Source>(Arc<BlockInner<S>>);

impl<S: Source> Clone for Block<S> {
    fn clone(&self) -> Self {
        Block(self.0.clone())
    }
}

struct BlockInner<S: Source> {
    place: S::Place,
    home: Origin<S::Raw>,
    bytes: usize,
    class: usize,
    tag: Tag,
    /// See [`Block::is_new`].
    new: bool,
    pool: Arc<Pool<S>>,
}

enum Origin<R> {
    /// A separate allocation; taken out of the option when the block is freed.
    Own(Option<R>),
    /// A range of a chunk: its key in `live`.
    Range(u64),
}

/// The block is not moved while this value lives.
pub struct Pinned<S: Source>(Block<S>);

/// A weak reference to a block.
pub struct WeakBlock<S: Source>(Weak<BlockInner<S>>);

impl<S: Source> Clone for WeakBlock<S> {
    fn clone(&self) -> Self {
        WeakBlock(self.0.clone())
    }
}

/// Large long-lived allocations are rounded up to a multiple of this.
const PAGE: usize = 4096;
/// Sizes of ranges are multiples of this or of the source's alignment, whichever is larger.
const UNIT: usize = 256;
/// Size in bytes of a new chunk. It is larger if the request is larger, and smaller if the limit leaves less,
/// if the source allows less, or if the driver refuses a chunk of this size.
const GROWTH: usize = 32 << 20;
/// Number of sizes in `kept` above which sizes without allocations are removed.
const SIZES: usize = 256;
/// Freed memory is kept up to the peak of live bytes, or up to this many bytes if the peak is lower. The
/// second bound is for programs with a low peak whose sizes change: a freed buffer rarely fits the next
/// request there, so it is useful to keep more than the peak.
const KEPT: u64 = 256 << 20;

/// Bytes that a request occupies in a pool of the default strategy. Long-lived buffers (weights, activations,
/// workspace) of 1 MiB or more are rounded up to whole pages. All other sizes are rounded up to a size class,
/// so that a buffer can reuse the memory of another one of a similar size.
pub fn footprint(bytes: usize, tag: Tag) -> usize {
    match tag {
        Tag::Weights | Tag::Activations | Tag::Workspace if bytes >= 1 << 20 => {
            bytes.div_ceil(PAGE).saturating_mul(PAGE)
        }
        _ => size_class(bytes),
    }
}

/// Rounds up to at least 256 bytes, then to one of eight steps per power of two (four steps below 512 bytes).
/// From 512 bytes on, this adds at most 12.5 %.
fn size_class(bytes: usize) -> usize {
    let b = bytes.max(256);
    let step = (b.checked_next_power_of_two().unwrap_or(1 << (usize::BITS - 1)) >> 4).max(64);
    b.div_ceil(step).saturating_mul(step)
}

impl<S: Source> State<S> {
    /// Bytes that may still be requested from the driver.
    fn room(&self) -> u64 {
        self.stats.limit.map_or(u64::MAX, |l| l.saturating_sub(self.stats.reserved))
    }

    fn took(&mut self, bytes: usize) {
        let s = &mut self.stats;
        s.reserved += bytes as u64;
        s.peak_reserved = s.peak_reserved.max(s.reserved);
    }

    /// Gives the oldest kept allocation back to the driver. Returns its size in bytes.
    fn evict(&mut self) -> Option<u64> {
        let oldest = |(class, v): (&usize, &Vec<(u64, S::Raw)>)| Some((v.first()?.0, *class));
        let (_, class) = self.kept.iter().filter_map(oldest).min()?;
        let v = self.kept.get_mut(&class)?;
        v.remove(0);
        if v.is_empty() {
            self.kept.remove(&class);
        }
        self.stats.reserved -= class as u64;
        Some(class as u64)
    }

    /// Gives empty chunks except `keep` back to the driver. Returns the number of bytes.
    fn release(&mut self, keep: Option<u64>) -> u64 {
        let before = self.stats.reserved;
        let reserved = &mut self.stats.reserved;
        self.chunks.retain(|k, c| {
            let stays = !c.ranges.is_free() || Some(*k) == keep;
            *reserved -= if stays { 0 } else { c.ranges.bytes() as u64 };
            stays
        });
        before - self.stats.reserved
    }

    /// Gives all kept and unused memory back to the driver. Returns the number of bytes.
    fn trim(&mut self) -> u64 {
        let mut freed = self.release(None);
        while let Some(n) = self.evict() {
            freed += n;
        }
        self.kept.clear();
        freed
    }

    fn largest_free(&self) -> u64 {
        let kept = self.kept.iter().rev().find(|(_, v)| !v.is_empty()).map_or(0, |(n, _)| *n);
        self.chunks.values().map(|c| c.ranges.largest()).fold(kept, usize::max) as u64
    }

    /// The statistics, with derived fields filled in.
    fn shown(&self) -> MemoryStats {
        let mut s = self.stats.clone();
        s.cached = s.reserved - s.allocated;
        s.largest_free = self.largest_free();
        s
    }
}

/// Why a request failed, and whether moving buffers could help.
struct PoolError {
    why: String,
    scattered: bool,
}

/// The functions of a pool that a [`crate::Device`] calls, for any kind of memory.
pub trait Accounts: Send + Sync {
    fn stats(&self) -> MemoryStats;
    /// Bytes that a request occupies in this pool.
    fn footprint(&self, bytes: usize, tag: Tag) -> usize;
    /// Gives kept and unused memory back to the driver. Returns the number of bytes.
    fn trim(&self) -> u64;
}

impl<S: Source> Accounts for Pool<S> {
    fn stats(&self) -> MemoryStats {
        Pool::stats(self)
    }

    fn footprint(&self, bytes: usize, tag: Tag) -> usize {
        Pool::footprint(self, bytes, tag)
    }

    fn trim(&self) -> u64 {
        Pool::trim(self)
    }
}

impl<S: Source> Pool<S> {
    /// A pool with the settings of `options`. If they set no limit, `total` (the device's memory) is the
    /// limit.
    ///
    /// # Errors
    /// [`Error::Argument`] for contradictory settings; [`Error::OutOfMemory`] if there is no memory for the
    /// initial size.
    pub fn new(
        source: S,
        device: String,
        options: &Options,
        total: Option<u64>,
        counts: Arc<Counts>,
    ) -> Result<Arc<Pool<S>>> {
        let config = options.memory_pool.unwrap_or_default();
        config.check()?;
        let caps = [options.memory_limit, config.max_size];
        let limit = caps.into_iter().flatten().min().or(total);
        let stats = MemoryStats { limit, ..Default::default() };
        let unit = source.alignment().max(UNIT).next_power_of_two();
        let state =
            State { kept: BTreeMap::new(), chunks: BTreeMap::new(), live: HashMap::new(), next: 0, stats };
        let pool = Pool { source, device, config, unit, state: Mutex::new(state), counts };
        let mut left = usize::try_from(config.initial_size).unwrap_or(usize::MAX);
        let mut s = pool.lock();
        while left >= unit {
            let most = usize::try_from(pool.source.most()).unwrap_or(usize::MAX);
            let bytes = left.min(most) / unit * unit;
            if let Err(f) = pool.add_chunk(&mut s, bytes) {
                return Err(pool.refusal(&mut s, left, "the initial size of the pool".into(), f));
            }
            left -= bytes;
        }
        drop(s);
        Ok(Arc::new(pool))
    }

    fn lock(&self) -> MutexGuard<'_, State<S>> {
        // Every update leaves the state consistent, so a poisoned lock is safe to use.
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn exclusive(&self) -> bool {
        self.config.strategy == AllocationStrategy::Exclusive
    }

    /// Bytes that a request occupies in this pool.
    pub fn footprint(&self, bytes: usize, tag: Tag) -> usize {
        match self.exclusive() {
            true => footprint(bytes, tag),
            false => ranges::rounded(self.config.strategy, bytes, self.unit),
        }
    }

    /// A block of at least `bytes` bytes. If there is no memory for the block, the pool releases the memory
    /// that it keeps and tries again. If that fails because the free memory is scattered, and defragmentation
    /// is enabled, the pool calls `defragment` (without the pool's lock) and tries once more.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] with the size that would fit, if that is known; errors of `defragment`.
    pub fn alloc(self: &Arc<Self>, bytes: usize, tag: Tag, defragment: Defragment<'_>) -> Result<Block<S>> {
        let class = self.footprint(bytes, tag);
        let mut s = self.lock();
        let full = match self.serve(&mut s, bytes, class, tag) {
            Ok(b) => return Ok(b),
            Err(f) => f,
        };
        if !(self.config.defragment && full.scattered) {
            return Err(self.refusal(&mut s, bytes, format!("{tag:?}"), full));
        }
        drop(s);
        let did = defragment()?;
        tracing::warn!(device = %self.device, bytes, ?did, "out of memory: buffers were moved together");
        let mut s = self.lock();
        self.serve(&mut s, bytes, class, tag).map_err(|f| self.refusal(&mut s, bytes, format!("{tag:?}"), f))
    }

    fn serve(
        self: &Arc<Self>,
        s: &mut State<S>,
        bytes: usize,
        class: usize,
        tag: Tag,
    ) -> std::result::Result<Block<S>, PoolError> {
        let held = |place, home, class, new| {
            Arc::new(BlockInner { place, home, bytes, class, tag, new, pool: self.clone() })
        };
        let block = match self.exclusive() {
            true => {
                let (raw, class, new) = self.whole(s, class)?;
                let place = self.source.place(&raw, None);
                let place = place.map_err(|why| {
                    s.stats.reserved -= class as u64;
                    PoolError { why, scattered: false }
                })?;
                held(place, Origin::Own(Some(raw)), class, new)
            }
            false => {
                let (chunk, offset) = self.range(s, class)?;
                let place = match s.chunks.get(&chunk) {
                    Some(c) => self.source.place(&c.raw, Some((offset, class))),
                    None => Err("the chunk is gone".into()),
                };
                let place = place.map_err(|why| {
                    if let Some(c) = s.chunks.get_mut(&chunk) {
                        c.ranges.give(offset, class);
                    }
                    PoolError { why, scattered: false }
                })?;
                s.next += 1;
                let number = s.next;
                let h = held(place, Origin::Range(number), class, false);
                let live = Live { chunk, offset, bytes: class, pins: 0, held: Arc::downgrade(&h) };
                s.live.insert(number, live);
                h
            }
        };
        let stats = &mut s.stats;
        stats.allocations += 1;
        stats.allocated += block.class as u64;
        *stats.by_tag.entry(tag).or_default() += block.class as u64;
        if stats.allocated > stats.peak {
            stats.peak = stats.allocated;
            stats.peak_by_tag.clone_from(&stats.by_tag);
        }
        Ok(Block(block))
    }

    /// An allocation for one buffer, either a kept allocation or a new one, with its size in bytes and
    /// whether it is new.
    fn whole(&self, s: &mut State<S>, class: usize) -> std::result::Result<(S::Raw, usize, bool), PoolError> {
        // The smallest kept allocation that is at most 25 % larger than the request.
        let fit = s
            .kept
            .range(class..=class.saturating_add(class / 4))
            .find(|(_, v)| !v.is_empty())
            .map(|(k, _)| *k);
        if let Some(k) = fit
            && let Some((_, raw)) = s.kept.get_mut(&k).and_then(Vec::pop)
        {
            return Ok((raw, k, false));
        }
        if s.stats.limit.is_some_and(|l| s.stats.allocated.saturating_add(class as u64) > l) {
            return Err(PoolError { why: "over the limit of this device".into(), scattered: false });
        }
        let mut gave = 0;
        while s.room() < class as u64
            && let Some(n) = s.evict()
        {
            gave += n;
        }
        if s.kept.len() > SIZES {
            s.kept.retain(|_, v| !v.is_empty());
        }
        Counts::add(&self.counts.allocations, 1);
        let mut got = self.source.allocate(class);
        if let Err(first) = &got
            && s.stats.reserved > s.stats.allocated
        {
            tracing::warn!(device = %self.device, bytes = class, %first, "out of memory: emptying the cache and trying again");
            gave += s.trim();
            got = self.source.allocate(class);
        }
        s.stats.trims += (gave > 0) as u64;
        let raw = got.map_err(|why| PoolError { why, scattered: false })?;
        s.took(class);
        Ok((raw, class, true))
    }

    /// Allocates a range of a chunk: (chunk, offset).
    fn range(&self, s: &mut State<S>, class: usize) -> std::result::Result<(u64, usize), PoolError> {
        let fits = s.chunks.iter().filter_map(|(k, c)| Some((c.ranges.fit(class)?, *k)));
        let found = match self.config.strategy {
            // The map iterates over the chunks in the order of their ids.
            AllocationStrategy::FirstFit => fits.map(|(_, k)| k).next(),
            _ => fits.min_by_key(|((n, _), k)| (*n, *k)).map(|(_, k)| k),
        };
        let chunk = match found {
            Some(k) => k,
            None => self.grow(s, class)?,
        };
        let at = s.chunks.get_mut(&chunk).and_then(|c| c.ranges.take(class));
        at.map(|at| (chunk, at))
            .ok_or_else(|| PoolError { why: "the new chunk is too small".into(), scattered: false })
    }

    /// Adds a chunk that holds `class` bytes. Tries the usual size, then the smallest possible size. If both
    /// fail and there are empty chunks whose release makes enough room, releases them and tries both again.
    fn grow(&self, s: &mut State<S>, class: usize) -> std::result::Result<u64, PoolError> {
        if class as u64 > self.source.most() {
            let why = format!("the device allows {} bytes in one buffer", self.source.most());
            return Err(PoolError { why, scattered: false });
        }
        let most = usize::try_from(self.source.most().min(GROWTH as u64)).unwrap_or(GROWTH);
        let mut why = String::new();
        for trimmed in [false, true] {
            if trimmed {
                let free = s.chunks.values().filter(|c| c.ranges.is_free()).map(|c| c.ranges.bytes() as u64);
                let free: u64 = free.sum();
                if free == 0 || s.room().saturating_add(free) < class as u64 {
                    break;
                }
                let gave = s.release(None);
                tracing::warn!(device = %self.device, bytes = class, gave, %why, "out of memory: free chunks are returned to the driver");
                s.stats.trims += 1;
            }
            let room = usize::try_from(s.room()).unwrap_or(usize::MAX);
            let usual = most.min(room).max(class) / self.unit * self.unit;
            for bytes in [usual, class] {
                match self.add_chunk(s, bytes) {
                    Ok(k) => return Ok(k),
                    Err(f) => why = f.why,
                }
                if usual == class {
                    break;
                }
            }
        }
        // Moving buffers helps if the free memory would suffice in total.
        let free: usize = s.chunks.values().map(|c| c.ranges.free_bytes()).sum();
        let scattered = (free as u64).saturating_add(s.room()) >= class as u64;
        Err(PoolError { why, scattered })
    }

    /// Adds one chunk, within the limit.
    fn add_chunk(&self, s: &mut State<S>, bytes: usize) -> std::result::Result<u64, PoolError> {
        if bytes as u64 > s.room() {
            return Err(PoolError { why: "over the limit of this device".into(), scattered: false });
        }
        Counts::add(&self.counts.allocations, 1);
        let raw = self.source.allocate(bytes).map_err(|why| PoolError { why, scattered: false })?;
        s.took(bytes);
        s.next += 1;
        s.chunks.insert(s.next, Chunk { raw, ranges: Ranges::new(self.config.strategy, bytes) });
        Ok(s.next)
    }

    fn refusal(&self, s: &mut State<S>, bytes: usize, what: String, full: PoolError) -> Error {
        s.stats.refusals += 1;
        let m = s.shown();
        let total = m.limit.unwrap_or(0);
        let free = total.saturating_sub(m.allocated);
        let fits = match self.exclusive() {
            true => free,
            false => m.largest_free.max(s.room().min(self.source.most())),
        };
        let held: Vec<String> =
            m.by_tag.iter().filter(|(_, n)| **n > 0).map(|(t, n)| format!("{t:?} {n}")).collect();
        let fits = if m.limit.is_some() || !self.exclusive() {
            format!("; at most {fits} bytes fit now")
        } else {
            String::new()
        };
        let held =
            if held.is_empty() { "no buffer is live".into() } else { format!("live: {}", held.join(", ")) };
        let next = match full.scattered {
            true if self.config.defragment => {
                "The free memory lies between buffers that cannot be moved; use a smaller batch, or raise the memory limit"
            }
            true => {
                "The free memory is scattered: open the device with `defragment` set, use a smaller batch, or raise the memory limit"
            }
            false => "Use a smaller batch, or raise the memory limit",
        };
        let e = Error::OutOfMemory {
            device: self.device.clone(),
            what: format!("{what}, {}; {held}{fits}", full.why),
            requested: bytes as u64,
            free,
            total,
            next: next.into(),
        };
        tracing::warn!(device = %self.device, error = %e, "out of memory: the request is refused");
        e
    }

    pub fn stats(&self) -> MemoryStats {
        self.lock().shown()
    }

    /// Gives kept and unused memory back to the driver. Returns the number of bytes.
    pub fn trim(&self) -> u64 {
        self.lock().trim()
    }

    /// Moves buffers together, then frees the empty chunks. The largest empty chunk is kept if it has a
    /// larger free range than every chunk that is in use. The strategy `exclusive` has no chunks, so only the
    /// kept memory is released. `copy` is called for one move after another. The caller must ensure that no
    /// command runs or is being submitted meanwhile, and that commands submitted later run after the copies.
    /// `copy` must not call the pool.
    ///
    /// # Errors
    /// Errors of `copy`, and [`Error::Driver`] if a new location cannot be created. Earlier moves stay in
    /// effect.
    pub fn defragment(
        &self,
        copy: &mut dyn FnMut(Relocation<'_, S::Raw>) -> Result<()>,
    ) -> Result<Defragmented> {
        // Must be dropped after the guard: dropping the last reference to a block locks the pool.
        let mut held: Vec<Arc<BlockInner<S>>> = vec![];
        let mut guard = self.lock();
        let s = &mut *guard;
        let mut did = Defragmented { largest_free_before: s.largest_free(), ..Default::default() };
        if self.exclusive() {
            did.released_bytes = s.trim();
            return Ok(did);
        }
        let numbers: Vec<u64> = s.live.keys().copied().collect();
        let chunks: Vec<u64> = s.chunks.keys().copied().collect();
        let sizes: Vec<usize> = s.chunks.values().map(|c| c.ranges.bytes()).collect();
        let lying: Vec<AllocatedRange> = numbers
            .iter()
            .filter_map(|n| {
                let l = s.live.get(n)?;
                let alive = l.held.upgrade();
                // A block that is being freed concurrently must not move.
                let pinned = l.pins > 0 || alive.is_none();
                held.extend(alive);
                let chunk = chunks.iter().position(|c| *c == l.chunk)?;
                Some(AllocatedRange { chunk, offset: l.offset, bytes: l.bytes, pinned })
            })
            .collect();
        let mut result = Ok(());
        for m in ranges::compact(self.config.strategy, &sizes, &lying) {
            let bytes = lying[m.block].bytes;
            result = self.relocate(s, numbers[m.block], chunks[m.to.0], m.to.1, copy);
            if result.is_err() {
                break;
            }
            did.moved_buffers += 1;
            did.moved_bytes += bytes as u64;
        }
        for (k, c) in &mut s.chunks {
            let inside = s.live.values().filter(|l| l.chunk == *k);
            let taken: Vec<(usize, usize)> = inside.map(|l| (l.offset, l.bytes)).collect();
            c.ranges = Ranges::with(self.config.strategy, c.ranges.bytes(), &taken);
        }
        s.stats.defragmentations += 1;
        s.stats.moved_bytes += did.moved_bytes;
        s.stats.generation += (did.moved_buffers > 0) as u64;
        let free = s.chunks.iter().filter(|(_, c)| c.ranges.is_free()).max_by_key(|(_, c)| c.ranges.bytes());
        let partly = s.chunks.values().filter(|c| !c.ranges.is_free()).map(|c| c.ranges.largest()).max();
        let keep = free.filter(|(_, c)| c.ranges.largest() > partly.unwrap_or(0)).map(|(k, _)| *k);
        did.released_bytes = s.release(keep);
        did.largest_free_after = s.largest_free();
        drop(guard);
        drop(held);
        result.map(|()| did)
    }

    /// Performs one move: creates the new place, copies, then updates the block.
    fn relocate(
        &self,
        s: &mut State<S>,
        number: u64,
        chunk: u64,
        offset: usize,
        copy: &mut dyn FnMut(Relocation<'_, S::Raw>) -> Result<()>,
    ) -> Result<()> {
        let gone = || Error::internal("a block was freed while it was being moved");
        let l = s.live.get_mut(&number).ok_or_else(gone)?;
        let (from, to) = (s.chunks.get(&l.chunk).ok_or_else(gone)?, s.chunks.get(&chunk).ok_or_else(gone)?);
        let held = l.held.upgrade().ok_or_else(gone)?;
        let place = self.source.place(&to.raw, Some((offset, l.bytes))).map_err(|code| Error::Driver {
            device: self.device.clone(),
            call: "creating the handle of a moved buffer".into(),
            code,
            next: "The buffers stay where they are; use a smaller batch, or raise the memory limit".into(),
        })?;
        let same = l.chunk == chunk;
        copy(Relocation { from: (&from.raw, l.offset), to: (&to.raw, offset), bytes: l.bytes, same })?;
        held.place.replace(place);
        (l.chunk, l.offset) = (chunk, offset);
        Ok(())
    }
}

impl<S: Source> Block<S> {
    /// The requested size in bytes.
    pub fn bytes(&self) -> usize {
        self.0.bytes
    }

    /// The occupied bytes: the requested size, rounded up.
    pub fn room(&self) -> usize {
        self.0.class
    }

    /// A number that is unique among live blocks.
    pub fn key(&self) -> usize {
        Arc::as_ptr(&self.0) as usize
    }

    /// Whether the source allocated this memory for this block: no block before it had any of the memory.
    pub fn is_new(&self) -> bool {
        self.0.new
    }

    pub fn downgrade(&self) -> WeakBlock<S> {
        WeakBlock(Arc::downgrade(&self.0))
    }

    /// The current location. It may change while the driver's lock is not held.
    pub fn place(&self) -> &S::Place {
        &self.0.place
    }

    /// Prevents moves of the block, for callers that hold its address.
    pub fn pin(&self) -> Pinned<S> {
        self.pins(1);
        Pinned(self.clone())
    }

    fn pins(&self, more: i32) {
        let Origin::Range(number) = &self.0.home else { return };
        if let Some(l) = self.0.pool.lock().live.get_mut(number) {
            l.pins = l.pins.saturating_add_signed(more);
        }
    }
}

impl<S: Source> Pinned<S> {
    pub fn block(&self) -> &Block<S> {
        &self.0
    }
}

impl<S: Source> WeakBlock<S> {
    pub fn is_held(&self) -> bool {
        self.0.strong_count() > 0
    }

    pub fn upgrade(&self) -> Option<Block<S>> {
        self.0.upgrade().map(Block)
    }
}

impl<S: Source> Drop for Pinned<S> {
    fn drop(&mut self) {
        self.0.pins(-1);
    }
}

impl<S: Source> Drop for BlockInner<S> {
    fn drop(&mut self) {
        let mut s = self.pool.lock();
        let stats = &mut s.stats;
        stats.frees += 1;
        stats.allocated -= self.class as u64;
        if let Some(t) = stats.by_tag.get_mut(&self.tag) {
            *t -= self.class as u64;
        }
        match &mut self.home {
            Origin::Range(number) => {
                let s = &mut *s;
                if let Some(l) = s.live.remove(number)
                    && let Some(c) = s.chunks.get_mut(&l.chunk)
                {
                    c.ranges.give(l.offset, l.bytes);
                }
            }
            Origin::Own(raw) => {
                let Some(raw) = raw.take() else { return };
                s.next += 1;
                let when = s.next;
                s.kept.entry(self.class).or_default().push((when, raw));
                while s.stats.reserved - s.stats.allocated > s.stats.peak.max(KEPT) && s.evict().is_some() {}
            }
        }
    }
}

impl<S: Source> fmt::Debug for Block<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Block({} bytes, {:?}, {})", self.0.bytes, self.0.tag, self.0.pool.device)
    }
}
impl<S: Source> fmt::Debug for WeakBlock<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "WeakBlock({:?})", self.upgrade())
    }
}
impl<S: Source> fmt::Debug for Pinned<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pinned({:?})", self.0)
    }
}
impl<S: Source> fmt::Debug for Pool<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pool({}, {}, {:?})", self.device, self.config, self.stats())
    }
}
