//! Caching allocator shared by the drivers: freed memory is kept by size and handed out again, because fresh pages and driver
//! calls cost more than most kernels.

use crate::{Counts, Error, MemoryStats, Result, Tag};
use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};

/// Allocates and frees the memory of one driver.
pub trait Source: Send + Sync + 'static {
    type Raw: Send + Sync + fmt::Debug;
    /// Exactly `bytes` bytes (never 0), or the driver's reason.
    fn allocate(&self, bytes: usize) -> std::result::Result<Self::Raw, String>;
}

struct State<R> {
    free: BTreeMap<usize, Vec<R>>,
    stats: MemoryStats,
}

/// A pool over a source of memory.
pub struct Pool<S: Source> {
    source: S,
    device: String,
    state: Mutex<State<S::Raw>>,
    counts: Arc<Counts>,
}

/// Memory on loan from a pool.
pub struct Block<S: Source> {
    raw: Option<S::Raw>,
    bytes: usize,
    class: usize,
    tag: Tag,
    pool: Arc<Pool<S>>,
}

/// What is rounded to pages alone.
const PAGE: usize = 4096;

/// Bytes that a request takes of a pool, whatever memory serves it. What a plan holds for long (weights, scratch) is rounded to
/// pages from 1 MiB on; the rest comes and goes in changing sizes and gets a size class, so that it finds what others freed.
pub fn footprint(bytes: usize, tag: Tag) -> usize {
    match tag {
        Tag::Weights | Tag::Activations | Tag::Workspace if bytes >= 1 << 20 => {
            bytes.div_ceil(PAGE).saturating_mul(PAGE)
        }
        _ => size_class(bytes),
    }
}

/// Rounds up to one of eight steps per power of two, at least 256 bytes: at most 12.5 % is lost.
fn size_class(bytes: usize) -> usize {
    let b = bytes.max(256);
    let step = (b.checked_next_power_of_two().unwrap_or(1 << (usize::BITS - 1)) >> 4).max(64);
    b.div_ceil(step).saturating_mul(step)
}

impl<S: Source> Pool<S> {
    pub fn new(source: S, device: String, limit: Option<u64>, counts: Arc<Counts>) -> Arc<Pool<S>> {
        let stats = MemoryStats { limit, ..Default::default() };
        Arc::new(Pool { source, device, state: Mutex::new(State { free: BTreeMap::new(), stats }), counts })
    }

    fn lock(&self) -> MutexGuard<'_, State<S::Raw>> {
        // Every update leaves the state whole, so a panic elsewhere does not damage it.
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// A block of at least `bytes` bytes. On failure the cache is emptied and the request repeated once.
    pub fn alloc(self: &Arc<Self>, bytes: usize, tag: Tag) -> Result<Block<S>> {
        let class = footprint(bytes, tag);
        let mut s = self.lock();
        let oom = |s: &State<S::Raw>, total: u64, why: String| Error::OutOfMemory {
            device: self.device.clone(),
            what: format!("{tag:?}, {why}"),
            requested: bytes as u64,
            free: total.saturating_sub(s.stats.allocated),
            total,
            next: "Use a smaller batch, or raise the memory limit".into(),
        };
        if let Some(l) = s.stats.limit
            && s.stats.allocated.saturating_add(class as u64) > l
        {
            return Err(oom(&s, l, "over the limit set for this device".into()));
        }
        // Best fit within 25 % of the request.
        let fit = s.free.range(class..=class + class / 4).find(|(_, v)| !v.is_empty()).map(|(k, _)| *k);
        let (raw, class) = match fit.and_then(|k| Some((s.free.get_mut(&k)?.pop()?, k))) {
            Some((raw, k)) => {
                s.stats.cached -= k as u64;
                (raw, k)
            }
            None => {
                Counts::add(&self.counts.allocations, 1);
                let raw = match self.source.allocate(class) {
                    Ok(r) => r,
                    Err(first) => {
                        tracing::warn!(device = %self.device, bytes, %first, "out of memory: emptying the cache and trying again");
                        s.free.clear();
                        s.stats.cached = 0;
                        self.source.allocate(class).map_err(|e| oom(&s, s.stats.limit.unwrap_or(0), e))?
                    }
                };
                (raw, class)
            }
        };
        s.stats.allocated += class as u64;
        *s.stats.by_tag.entry(tag).or_default() += class as u64;
        if s.stats.allocated > s.stats.peak {
            let stats = &mut s.stats;
            stats.peak = stats.allocated;
            stats.peak_by_tag.clone_from(&stats.by_tag);
        }
        Ok(Block { raw: Some(raw), bytes, class, tag, pool: self.clone() })
    }

    pub fn stats(&self) -> MemoryStats {
        self.lock().stats.clone()
    }

    /// Frees what is cached.
    pub fn trim(&self) -> u64 {
        let mut s = self.lock();
        s.free.clear();
        std::mem::take(&mut s.stats.cached)
    }
}

/// What a device in the machine's memory can still take.
pub(crate) fn left_on_host(m: &MemoryStats) -> Option<u64> {
    let left = m.limit.map(|l| l.saturating_sub(m.allocated));
    // What the pool keeps is handed out again, or given back when the system has no more.
    let free = halcyon_ir::host::memory().map(|(free, _)| free.saturating_add(m.cached));
    match (left, free) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}

impl<S: Source> Block<S> {
    /// The bytes that were asked for.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The driver's handle. Present until the block is dropped.
    pub fn raw(&self) -> Option<&S::Raw> {
        self.raw.as_ref()
    }
}

impl<S: Source> Drop for Block<S> {
    fn drop(&mut self) {
        let mut s = self.pool.lock();
        s.stats.allocated -= self.class as u64;
        if let Some(t) = s.stats.by_tag.get_mut(&self.tag) {
            *t -= self.class as u64;
        }
        if let Some(raw) = self.raw.take() {
            s.stats.cached += self.class as u64;
            s.free.entry(self.class).or_default().push(raw);
        }
    }
}

impl<S: Source> fmt::Debug for Block<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Block({} bytes, {:?}, {})", self.bytes, self.tag, self.pool.device)
    }
}
impl<S: Source> fmt::Debug for Pool<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pool({}, {:?})", self.device, self.stats())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Fake(usize);
    impl Source for Fake {
        type Raw = usize;
        fn allocate(&self, bytes: usize) -> std::result::Result<usize, String> {
            if bytes > self.0 { Err("no room".into()) } else { Ok(bytes) }
        }
    }

    #[test]
    fn freed_blocks_are_reused_and_counted() {
        let c = Arc::new(Counts::default());
        let p = Pool::new(Fake(1 << 20), "test".into(), None, c.clone());
        drop(p.alloc(1000, Tag::Io).unwrap());
        let b = p.alloc(1000, Tag::Io).unwrap();
        assert_eq!(c.snapshot().allocations, 1);
        assert!(p.stats().allocated >= 1000 && p.stats().cached == 0);
        drop(b);
        assert_eq!(p.stats().allocated, 0);
        assert!(p.trim() >= 1000);
    }

    #[test]
    fn the_limit_and_the_driver_both_say_out_of_memory() {
        let p = Pool::new(Fake(1 << 20), "test".into(), Some(4096), Arc::default());
        let keep = p.alloc(3000, Tag::Io).unwrap();
        let e = p.alloc(3000, Tag::Weights).unwrap_err();
        assert_eq!(e.exit_code(), 5);
        assert!(e.to_string().contains("4096"), "{e}");
        drop(keep);
        assert!(p.alloc(3000, Tag::Weights).is_ok());
        let q = Pool::new(Fake(1 << 10), "test".into(), None, Arc::default());
        assert!(matches!(q.alloc(4096, Tag::Io), Err(Error::OutOfMemory { .. })));
    }

    #[test]
    fn the_peak_is_told_by_purpose() {
        let p = Pool::new(Fake(1 << 30), "test".into(), None, Arc::default());
        let a = p.alloc(5 << 20, Tag::Activations).unwrap();
        let b = p.alloc(3000, Tag::Io).unwrap();
        drop(a);
        let c = p.alloc(1 << 20, Tag::Weights).unwrap();
        let s = p.stats();
        let io = footprint(3000, Tag::Io) as u64;
        assert_eq!(s.peak, (5 << 20) + io);
        assert_eq!(s.peak_by_tag, BTreeMap::from([(Tag::Activations, 5 << 20), (Tag::Io, io)]));
        assert_eq!(s.by_tag[&Tag::Activations], 0);
        drop((b, c));
    }

    #[test]
    fn size_classes_waste_little() {
        assert_eq!(size_class(usize::MAX), usize::MAX);
        for b in [1, 255, 256, 257, 5000, 1 << 20, (1 << 20) + 1] {
            let c = size_class(b);
            assert!(c >= b && (b <= 512 || c as f64 <= b as f64 * 1.13), "{b} {c}");
            let long = footprint(b, Tag::Activations);
            assert!(long >= b && long <= c && (b < 1 << 20 || long < b + PAGE), "{b} {long}");
            assert_eq!(footprint(b, Tag::Io), c);
        }
    }
}
