use super::*;
use std::sync::atomic::{AtomicU64, Ordering};

/// A source without memory: each allocation is only its size. The field is the largest size that it
/// allocates.
struct Fake(usize);
impl Source for Fake {
    type Raw = usize;
    type Place = RwLock<usize>;
    fn allocate(&self, bytes: usize) -> std::result::Result<usize, String> {
        if bytes > self.0 { Err("no room".into()) } else { Ok(bytes) }
    }
    fn place(&self, raw: &usize, range: Option<(usize, usize)>) -> std::result::Result<Self::Place, String> {
        Ok(RwLock::new(range.map_or(*raw, |r| r.0)))
    }
}

fn pool<S: Source>(source: S, limit: Option<u64>, config: &str) -> Arc<Pool<S>> {
    let memory_pool = Some(config.parse().unwrap());
    let options = Options { memory_limit: limit, memory_pool, ..Default::default() };
    Pool::new(source, "test".into(), &options, None, Arc::default()).unwrap()
}

fn never() -> Result<Defragmented> {
    panic!("this pool does not defragment")
}

impl<S: Source> Pool<S> {
    fn get(self: &Arc<Self>, bytes: usize, tag: Tag) -> Result<Block<S>> {
        self.alloc(bytes, tag, &never)
    }
}

#[test]
fn freed_blocks_are_reused_and_counted() {
    let c = Arc::new(Counts::default());
    let p = Pool::new(Fake(1 << 20), "test".into(), &Options::default(), None, c.clone()).unwrap();
    drop(p.get(1000, Tag::Io).unwrap());
    let b = p.get(1000, Tag::Io).unwrap();
    assert_eq!(c.snapshot().allocations, 1);
    assert!(p.stats().allocated >= 1000 && p.stats().cached == 0);
    drop(b);
    assert_eq!((p.stats().allocated, p.stats().allocations, p.stats().frees), (0, 2, 2));
    assert_eq!(p.stats().largest_free, p.stats().cached);
    assert!(p.trim() >= 1000);
    assert_eq!((p.stats().reserved, p.stats().peak_reserved), (0, footprint(1000, Tag::Io) as u64));
}

#[test]
fn the_limit_and_the_driver_both_say_out_of_memory() {
    let p = pool(Fake(1 << 20), Some(4096), "exclusive");
    let keep = p.get(3000, Tag::Io).unwrap();
    let e = p.get(3000, Tag::Weights).unwrap_err();
    assert_eq!(e.exit_code(), 5);
    // The message lists live bytes by tag and what would fit.
    let fits = 4096 - footprint(3000, Tag::Io);
    for part in ["4096", "Weights", &format!("Io {}", 4096 - fits), &format!("at most {fits} bytes")] {
        assert!(e.to_string().contains(part), "{part}: {e}");
    }
    drop(keep);
    assert!(p.get(3000, Tag::Weights).is_ok());
    assert_eq!(p.stats().refusals, 1);
    let q = pool(Fake(1 << 10), None, "exclusive");
    assert!(matches!(q.get(4096, Tag::Io), Err(Error::OutOfMemory { .. })));
}

#[test]
fn the_peak_is_reported_by_tag() {
    let p = pool(Fake(1 << 30), None, "exclusive");
    let a = p.get(5 << 20, Tag::Activations).unwrap();
    let b = p.get(3000, Tag::Io).unwrap();
    drop(a);
    let c = p.get(1 << 20, Tag::Weights).unwrap();
    let s = p.stats();
    let io = footprint(3000, Tag::Io) as u64;
    assert_eq!(s.peak, (5 << 20) + io);
    assert_eq!(s.peak_by_tag, BTreeMap::from([(Tag::Activations, 5 << 20), (Tag::Io, io)]));
    assert_eq!(s.by_tag[&Tag::Activations], 0);
    assert_eq!((s.allocated_mb(), s.free_mb()), (s.allocated as f64 / 1048576.0, None));
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

#[test]
fn cached_memory_counts_and_is_freed_oldest_first() {
    let p = pool(Fake(1 << 30), Some(10 << 20), "exclusive");
    let all: Vec<_> = (1..=4).map(|n| p.get(n << 20, Tag::Weights).unwrap()).collect();
    drop(all);
    assert_eq!((p.stats().reserved, p.stats().cached, p.stats().trims), (10 << 20, 10 << 20, 0));
    // No kept size is close enough. Evicting the first two freed allocations (1 and 2 MiB) does not make room
    // for 6 MiB; evicting the third does.
    let b = p.get(6 << 20, Tag::Weights).unwrap();
    let s = p.stats();
    assert_eq!((s.reserved, s.cached, s.largest_free, s.trims), (10 << 20, 4 << 20, 4 << 20, 1));
    // A request that cannot fit does not change the cache.
    assert!(p.get(5 << 20, Tag::Weights).is_err());
    assert_eq!(p.stats().cached, 4 << 20);
    drop(b);
}

#[test]
fn changing_sizes_do_not_accumulate_memory() {
    let p = pool(Fake(1 << 40), None, "exclusive");
    for n in 1..400 {
        drop(p.get(n << 20, Tag::Activations).unwrap());
    }
    let s = p.stats();
    assert!(s.cached <= s.peak.max(KEPT), "{s:?}");
    assert!(s.cached > 300 << 20, "what was used last is kept: {s:?}");
}

#[test]
fn chunks_are_taken_within_the_cap_and_given_back() {
    for (strategy, takes) in [("best-fit", 100 << 10), ("first-fit", 100 << 10), ("buddy", 128 << 10)] {
        let p = pool(Fake(1 << 30), None, &format!("{strategy}:64KiB..1MiB"));
        assert_eq!(
            (p.stats().reserved, p.stats().allocated, p.stats().largest_free),
            (64 << 10, 0, 64 << 10)
        );
        assert_eq!(p.footprint(100 << 10, Tag::Io), takes);
        let a = p.get(100 << 10, Tag::Kv).unwrap();
        // The second chunk has the size that the limit leaves.
        let s = p.stats();
        assert_eq!((s.reserved, s.peak_reserved), (1 << 20, 1 << 20));
        assert_eq!((s.allocated, s.by_tag[&Tag::Kv]), (takes as u64, takes as u64));
        assert_eq!(s.cached, s.reserved - s.allocated);
        assert!(s.fragmentation() > 0.0 && s.fragmentation() < 1.0);
        assert!(p.get(2 << 20, Tag::Io).is_err());
        // The empty chunk is released.
        assert_eq!(p.trim(), 64 << 10);
        drop(a);
        assert_eq!(p.stats().largest_free, if strategy == "buddy" { 512 << 10 } else { 960 << 10 });
        // A request for a larger chunk succeeds, because the pool first releases the empty chunk.
        assert!(strategy == "buddy" || p.get(1 << 20, Tag::Io).is_ok());
        assert!(strategy == "buddy" || p.stats().trims == 1);
        drop(p);
    }
    let o = Options { memory_pool: Some("buddy:2M..4M".parse().unwrap()), ..Default::default() };
    let e = Pool::new(Fake(1 << 20), "test".into(), &o, None, Arc::default()).unwrap_err();
    assert!(e.exit_code() == 5 && e.to_string().contains("initial size"), "{e}");
}

/// A source whose memory the test can read and copy.
trait Memory: Source {
    fn with<T>(place: &Self::Place, bytes: usize, f: impl FnOnce(&mut [u8]) -> T) -> T;
    fn copy(m: Relocation<'_, Self::Raw>);
}

#[cfg(feature = "cpu")]
impl Memory for crate::cpu::memory::HostSource {
    fn with<T>(place: &Self::Place, bytes: usize, f: impl FnOnce(&mut [u8]) -> T) -> T {
        // SAFETY: `place` points to the `bytes` bytes of a live block. The tests hold the `turn` lock while
        // they access or move blocks, so no other reference exists.
        f(unsafe { std::slice::from_raw_parts_mut(place.get(), bytes) })
    }
    fn copy(m: Relocation<'_, Self::Raw>) {
        // SAFETY: the pool places both ranges of `m.bytes` bytes inside their allocations; `copy` allows
        // overlap.
        unsafe { std::ptr::copy(m.from.0.start().add(m.from.1), m.to.0.start().add(m.to.1), m.bytes) };
    }
}

impl Memory for crate::noop::HostMemory {
    fn with<T>(place: &Self::Place, bytes: usize, f: impl FnOnce(&mut [u8]) -> T) -> T {
        let place = place.read().unwrap();
        f(&mut place.0.lock().unwrap()[place.1..place.1 + bytes])
    }
    fn copy(m: Relocation<'_, Self::Raw>) {
        let data = m.from.0.lock().unwrap()[m.from.1..m.from.1 + m.bytes].to_vec();
        m.to.0.lock().unwrap()[m.to.1..m.to.1 + m.bytes].copy_from_slice(&data);
    }
}

/// Counts the bytes that a source has allocated and not freed, independently of the pool.
struct Counted<S> {
    source: S,
    given: Arc<AtomicU64>,
    most: Arc<AtomicU64>,
}

#[derive(Debug)]
struct Given<R> {
    raw: R,
    bytes: u64,
    given: Arc<AtomicU64>,
}

impl<R> Drop for Given<R> {
    fn drop(&mut self) {
        self.given.fetch_sub(self.bytes, Ordering::SeqCst);
    }
}

impl<S: Source> Source for Counted<S> {
    type Raw = Given<S::Raw>;
    type Place = S::Place;
    fn allocate(&self, bytes: usize) -> std::result::Result<Self::Raw, String> {
        let raw = self.source.allocate(bytes)?;
        let now = self.given.fetch_add(bytes as u64, Ordering::SeqCst) + bytes as u64;
        self.most.fetch_max(now, Ordering::SeqCst);
        Ok(Given { raw, bytes: bytes as u64, given: self.given.clone() })
    }
    fn place(
        &self,
        raw: &Self::Raw,
        range: Option<(usize, usize)>,
    ) -> std::result::Result<Self::Place, String> {
        self.source.place(&raw.raw, range)
    }
    fn alignment(&self) -> usize {
        self.source.alignment()
    }
}

fn move_in<S: Memory>(p: &Pool<Counted<S>>, turn: &Mutex<()>) -> Result<Defragmented> {
    let _turn = turn.lock().unwrap();
    p.defragment(&mut |m| {
        let (from, to) = ((&m.from.0.raw, m.from.1), (&m.to.0.raw, m.to.1));
        S::copy(Relocation { from, to, bytes: m.bytes, same: m.same });
        Ok(())
    })
}

/// Whether all bytes are `v`. Under Miri only a few hundred are compared, because each takes a microsecond.
fn holds(m: &[u8], v: u8) -> bool {
    m.iter().step_by(if cfg!(miri) { 1021 } else { 1 }).all(|x| *x == v)
}

/// Several threads allocate and free blocks of any size, write to them, check them later, and sometimes
/// defragment. The source never exceeds the limit, and no block's contents change.
fn stress<S: Memory>(source: impl Fn() -> S, config: &str) {
    const CAP: u64 = 3 << 19;
    const THREADS: u64 = 4;
    let (given, most) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let counted = Counted { source: source(), given: given.clone(), most: most.clone() };
    let p = pool(counted, Some(CAP), config);
    let turn = Mutex::new(());
    let seed = halcyon_test_host::seed("pool");
    let refused = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for t in 0..THREADS {
            let (p, turn, refused) = (&p, &turn, &refused);
            scope.spawn(move || {
                let mut x = seed.wrapping_add(t.wrapping_mul(0x9E37_79B9_7F4A_7C15)) | 1;
                let mut below = |n: u64| {
                    x ^= x << 13;
                    x ^= x >> 7;
                    x ^= x << 17;
                    x % n
                };
                let mut mine: Vec<(Block<Counted<S>>, u8)> = vec![];
                for step in 0..if cfg!(miri) { 250 } else { 1500 } {
                    // Together, the blocks of the threads would need more than the limit, so some requests
                    // fail.
                    if mine.len() < 24 && below(5) > 1 {
                        let most = 1 << (6 + below(14));
                        let n = 1 + below(most) as usize;
                        match p.alloc(n, Tag::Activations, &|| move_in(p, turn)) {
                            Ok(b) => {
                                let _turn = turn.lock().unwrap();
                                S::with(b.place(), b.bytes(), |m| m.fill(step as u8));
                                mine.push((b, step as u8));
                            }
                            Err(e) => {
                                assert_eq!(e.exit_code(), 5, "{e}");
                                refused.fetch_add(1, Ordering::Relaxed);
                            }
                        }
                    } else if !mine.is_empty() {
                        let (b, v) = mine.swap_remove(below(mine.len() as u64) as usize);
                        let _turn = turn.lock().unwrap();
                        S::with(b.place(), b.bytes(), |m| assert!(holds(m, v), "{b:?}"));
                    }
                    if step % 200 == 199 {
                        move_in(p, turn).unwrap();
                    }
                    if step % 300 == 150 {
                        p.trim();
                    }
                }
                let _turn = turn.lock().unwrap();
                for (b, v) in &mine {
                    S::with(b.place(), b.bytes(), |m| assert!(holds(m, *v), "{b:?}"));
                }
            });
        }
    });
    let s = p.stats();
    assert_eq!((s.allocated, s.allocations), (0, s.frees), "{s:?}");
    assert_eq!(s.refusals, refused.load(Ordering::Relaxed));
    // The pool's statistics agree with the source's count, and neither exceeded the limit.
    assert_eq!((s.reserved, s.peak_reserved), (given.load(Ordering::SeqCst), most.load(Ordering::SeqCst)));
    assert!(s.peak <= s.peak_reserved && s.peak_reserved <= CAP, "{s:?}");
    assert!(s.refusals > 0 && s.peak_reserved > CAP / 2, "the cap was met: {s:?}");
    println!(
        "{config}: {} allocations, {} refused, {} bytes moved",
        s.allocations, s.refusals, s.moved_bytes
    );
    assert_eq!(config.contains("exclusive"), s.moved_bytes == 0);
    p.trim();
    assert_eq!((p.stats().reserved, given.load(Ordering::SeqCst)), (0, 0));
}

const POOLS: [&str; 7] = [
    "exclusive",
    "best-fit",
    "best-fit:1M..,defragment",
    "first-fit",
    "first-fit,defragment",
    "buddy",
    "buddy:512K..,defragment",
];

/// The pools to test. Under Miri only every third, because each takes a minute.
fn pools() -> impl Iterator<Item = &'static str> {
    POOLS.into_iter().step_by(if cfg!(miri) { 3 } else { 1 })
}

#[test]
#[cfg(feature = "cpu")]
fn the_cap_holds_under_stress_on_the_cpus_memory() {
    pools().for_each(|c| stress(|| crate::cpu::memory::HostSource, c));
}

#[test]
#[cfg_attr(miri, ignore = "fills megabytes byte by byte in safe code")]
fn the_cap_holds_under_stress_on_noops_memory() {
    pools().for_each(|c| stress(|| crate::noop::HostMemory, c));
}

#[test]
#[cfg_attr(miri, ignore = "fills megabytes byte by byte in safe code")]
fn a_scattered_pool_takes_a_large_block_after_it_moved_and_a_pinned_one_stays() {
    type Source = Counted<crate::noop::HostMemory>;
    let new = |config: &str| {
        let source = crate::noop::HostMemory;
        pool(Counted { source, given: Arc::default(), most: Arc::default() }, Some(1 << 20), config)
    };
    let turn = Mutex::new(());
    let fill = |p: &Arc<Pool<Source>>| -> Vec<(Block<Source>, u8)> {
        let get = |i: u8| {
            let b = p.alloc(32 << 10, Tag::State, &never).unwrap();
            crate::noop::HostMemory::with(b.place(), b.bytes(), |m| m.fill(i));
            (b, i)
        };
        let all: Vec<_> = (0..32).map(get).collect();
        all.into_iter().step_by(2).collect()
    };
    let intact = |all: &[(Block<Source>, u8)]| {
        for (b, v) in all {
            crate::noop::HostMemory::with(b.place(), b.bytes(), |m| assert!(holds(m, *v)));
        }
    };
    for strategy in ["best-fit", "first-fit", "buddy"] {
        let p = new(strategy);
        let all = fill(&p);
        assert_eq!((p.stats().largest_free, p.stats().fragmentation()), (32 << 10, 1.0 - 1.0 / 16.0));
        let e = p.get(512 << 10, Tag::Kv).unwrap_err();
        for part in ["scattered", "defragment", "State 524288", "at most 32768 bytes fit"] {
            assert!(e.to_string().contains(part), "{part}: {e}");
        }
        intact(&all);
        let p = new(&format!("{strategy},defragment"));
        let all = fill(&p);
        let b = p.alloc(512 << 10, Tag::Kv, &|| move_in(&p, &turn)).unwrap();
        let s = p.stats();
        assert_eq!((s.allocated, s.reserved, s.generation, s.defragmentations), (1 << 20, 1 << 20, 1, 1));
        assert!(s.moved_bytes > 0 && s.refusals == 0);
        intact(&all);
        drop((b, all));
        assert_eq!(p.stats().largest_free, 1 << 20);
        // The pinned blocks lie so that neither half of the pool can become free.
        let all = fill(&p);
        let pins: Vec<Pinned<Source>> = all.iter().skip(7).step_by(2).map(|(b, _)| b.pin()).collect();
        let e = p.alloc(512 << 10, Tag::Kv, &|| move_in(&p, &turn)).unwrap_err();
        assert!(e.to_string().contains("cannot be moved"), "{e}");
        intact(&all);
        drop(pins);
        let b = p.alloc(512 << 10, Tag::Kv, &|| move_in(&p, &turn)).unwrap();
        intact(&all);
        drop(b);
        // A clone keeps the memory allocated as the block itself does.
        let (part, before) = (all[0].0.clone(), p.stats().allocated);
        drop(all);
        assert_eq!(p.stats().allocated, before / 16);
        drop(part);
        assert_eq!(p.stats().allocated, 0);
    }
}

#[test]
fn a_failed_defragmentation_keeps_completed_moves() {
    let p = pool(Fake(1 << 30), Some(1 << 20), "best-fit");
    let all: Vec<_> = (0..16).map(|_| p.get(64 << 10, Tag::Io).unwrap()).collect();
    let rest: Vec<_> = all.into_iter().skip(1).step_by(2).collect();
    let mut done = 0;
    let e = p.defragment(&mut |_| {
        done += 1;
        if done == 4 { Err(Error::internal("the copy failed")) } else { Ok(()) }
    });
    assert!(e.is_err() && done == 4);
    let mut places: Vec<usize> = rest.iter().map(|b| *b.place().read().unwrap()).collect();
    places.sort();
    assert_eq!(places, [0, 1, 2, 7, 9, 11, 13, 15].map(|n| n * (64 << 10)));
    assert_eq!(p.stats().moved_bytes, 3 * (64 << 10));
    drop(rest);
    assert_eq!((p.stats().largest_free, p.stats().allocated), (1 << 20, 0));
}
