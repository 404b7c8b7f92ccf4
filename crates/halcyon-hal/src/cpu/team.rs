//! A team of threads that share short jobs: one per device, spinning briefly before it parks.
//!
//! A job is a number of parts and a function of the part. Parts are handed out one by one, and the caller
//! works too, so a worker that wakes late costs nothing: when all parts are taken the job closes and nobody
//! joins it any more. A job started from inside a part runs on that thread alone.

use std::any::Any;
use std::cell::{Cell, UnsafeCell};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

/// How long an idle worker looks for the next job before it parks.
const SPIN: Duration = Duration::from_micros(50);
/// Looks at the gate between two offers of the processor to others, so that an oversubscribed machine is not
/// starved.
const SPINS_PER_YIELD: u32 = 256;

/// `fn(worker, part)` with its lifetime removed; valid while the gate that published it is open or has
/// workers inside.
type Job = *const (dyn Fn(usize, usize) + Sync);

// The gate is one word: workers inside (16 bits), open (1 bit), generation (the rest).
const INSIDE: u64 = 0xffff;
const OPEN: u64 = 1 << 16;
const GENERATION: u64 = 1 << 17;

struct Shared {
    gate: AtomicU64,
    /// The next part to hand out.
    next: AtomicUsize,
    parts: UnsafeCell<usize>,
    job: UnsafeCell<Option<Job>>,
    stop: AtomicBool,
    /// One flag per worker: it is parked or about to be.
    asleep: Vec<AtomicBool>,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

// SAFETY: `parts` and `job` are written only by the thread that holds `Team::running` while the gate is
// closed with nobody inside, and read only by threads that entered through the gate, whose atomic operations
// order the accesses.
unsafe impl Sync for Shared {}
// SAFETY: the raw pointer in `job` is only followed under the same rule; the function behind it is `Sync`.
unsafe impl Send for Shared {}

thread_local! {
    /// Set while this thread runs a part of any team's job.
    static INSIDE_JOB: Cell<bool> = const { Cell::new(false) };
}

impl Shared {
    /// Takes parts until none is left. A panic ends the handing out and is kept for the caller.
    fn work(&self, worker: usize, parts: usize, job: &(dyn Fn(usize, usize) + Sync)) {
        let before = INSIDE_JOB.replace(true);
        let r = catch_unwind(AssertUnwindSafe(|| {
            loop {
                let part = self.next.fetch_add(1, Ordering::Relaxed);
                if part >= parts {
                    break;
                }
                job(worker, part);
            }
        }));
        INSIDE_JOB.set(before);
        if let Err(e) = r {
            // Large enough that no part follows, small enough that further additions do not wrap.
            self.next.store(usize::MAX / 2, Ordering::Relaxed);
            self.panic.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(e);
        }
    }

    /// Enters the open job of a generation not yet seen.
    fn enter(&self, seen: &mut u64) -> bool {
        let mut g = self.gate.load(Ordering::Acquire);
        loop {
            if g & OPEN == 0 || g / GENERATION == *seen {
                return false;
            }
            match self.gate.compare_exchange_weak(g, g + 1, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => {
                    *seen = g / GENERATION;
                    return true;
                }
                Err(now) => g = now,
            }
        }
    }

    /// A worker's life.
    fn serve(&self, worker: usize) {
        let asleep = &self.asleep[worker - 1];
        let mut seen = 0;
        let mut idle: Option<Instant> = None;
        let mut spins = 0u32;
        loop {
            if self.enter(&mut seen) {
                // SAFETY: this thread is inside the gate, so the caller keeps the job alive and does not
                // write it.
                let (parts, job) = unsafe { (*self.parts.get(), *self.job.get()) };
                if let Some(job) = job {
                    // SAFETY: as above; `run` does not return before this thread has left.
                    self.work(worker, parts, unsafe { &*job });
                }
                self.gate.fetch_sub(1, Ordering::Release);
                idle = None;
                spins = 0;
                continue;
            }
            std::hint::spin_loop();
            spins += 1;
            if spins < SPINS_PER_YIELD {
                continue;
            }
            spins = 0;
            if self.stop.load(Ordering::Acquire) {
                return;
            }
            if idle.get_or_insert_with(Instant::now).elapsed() < SPIN {
                std::thread::yield_now();
                continue;
            }
            // Announce, look once more, then park: `run` opens the gate before it reads the flag.
            asleep.store(true, Ordering::SeqCst);
            let g = self.gate.load(Ordering::SeqCst);
            if (g & OPEN == 0 || g / GENERATION == seen) && !self.stop.load(Ordering::SeqCst) {
                std::thread::park();
            }
            asleep.store(false, Ordering::SeqCst);
            idle = None;
        }
    }
}

/// A team of `threads() - 1` workers and the calling thread, with the scratch memory its kernels reuse.
pub struct Team {
    shared: Arc<Shared>,
    /// What kernels take for the number of threads; there are no more.
    width: usize,
    workers: Vec<JoinHandle<()>>,
    wake: Vec<Thread>,
    /// Held for the length of a job: jobs of several callers follow each other.
    running: Mutex<()>,
    scratch: Mutex<Vec<Scratch>>,
    made: AtomicUsize,
}

impl std::fmt::Debug for Team {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Team").field("threads", &self.threads()).finish_non_exhaustive()
    }
}

impl Team {
    /// A team of `threads` threads including the caller's (0 counts as 1). Where threads cannot be started
    /// (wasm32, or the system refuses), the team is smaller; [`Team::threads`] tells.
    pub fn new(threads: usize) -> Team {
        Team::with_width(threads, 1)
    }

    /// A team of `threads` threads that kernels see as one of at least `width`: those that were made for a
    /// wider team run on it, with work cut as for that.
    pub fn with_width(threads: usize, width: usize) -> Team {
        let want = if cfg!(target_arch = "wasm32") { 0 } else { threads.clamp(1, 1024) - 1 };
        let shared = Arc::new(Shared {
            gate: AtomicU64::new(0),
            next: AtomicUsize::new(0),
            parts: UnsafeCell::new(0),
            job: UnsafeCell::new(None),
            stop: AtomicBool::new(false),
            asleep: (0..want).map(|_| AtomicBool::new(false)).collect(),
            panic: Mutex::new(None),
        });
        let mut workers = Vec::with_capacity(want);
        for i in 1..=want {
            let s = shared.clone();
            match std::thread::Builder::new().name(format!("halcyon-cpu-{i}")).spawn(move || s.serve(i)) {
                Ok(h) => workers.push(h),
                Err(e) => {
                    tracing::warn!(wanted = threads, started = i, "the system refused a thread: {e}");
                    break;
                }
            }
        }
        let wake = workers.iter().map(|w| w.thread().clone()).collect();
        Team {
            shared,
            width: width.max(workers.len() + 1),
            workers,
            wake,
            running: Mutex::new(()),
            scratch: Mutex::new(Vec::new()),
            made: AtomicUsize::new(0),
        }
    }

    /// Threads that work on a job, the caller's included, or the width that stands for them.
    pub fn threads(&self) -> usize {
        self.width
    }

    /// Runs `f(part)` for every part in `0..parts`, in no particular order, and returns when all are done. A
    /// panic in a part is resumed here, after the other threads have left the job; parts not yet begun are
    /// skipped then.
    pub fn run(&self, parts: usize, f: &(dyn Fn(usize) + Sync)) {
        self.run_with(parts, &|_, p| f(p));
    }

    /// Like [`Team::run`], with the number of the thread (below [`Team::threads`]) as first argument. No two
    /// parts that run at the same time in one job get the same number.
    pub fn run_with(&self, parts: usize, f: &(dyn Fn(usize, usize) + Sync)) {
        if parts == 0 {
            return;
        }
        if self.workers.is_empty() || parts == 1 || INSIDE_JOB.get() {
            for p in 0..parts {
                f(0, p);
            }
            return;
        }
        let turn = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        let s = &*self.shared;
        // SAFETY: only the lifetime changes; the pointer is used only until the wait below ends.
        let job: Job = unsafe {
            std::mem::transmute::<*const (dyn Fn(usize, usize) + Sync + '_), Job>(
                f as *const (dyn Fn(usize, usize) + Sync),
            )
        };
        // SAFETY: the gate is closed with nobody inside, and `turn` keeps other callers out.
        unsafe {
            *s.parts.get() = parts;
            *s.job.get() = Some(job);
        }
        s.next.store(0, Ordering::Relaxed);
        let g = s.gate.load(Ordering::Relaxed);
        s.gate.store(((g / GENERATION + 1) * GENERATION) | OPEN, Ordering::SeqCst);
        for (flag, t) in s.asleep.iter().zip(&self.wake).take(parts - 1) {
            if flag.load(Ordering::SeqCst) && flag.swap(false, Ordering::SeqCst) {
                t.unpark();
            }
        }
        s.work(0, parts, f);
        let mut g = s.gate.fetch_and(!OPEN, Ordering::AcqRel);
        let mut spins = 0u32;
        while g & INSIDE != 0 {
            std::hint::spin_loop();
            spins += 1;
            if spins.is_multiple_of(4096) {
                std::thread::yield_now();
            }
            g = s.gate.load(Ordering::Acquire);
        }
        // SAFETY: closed and empty again.
        unsafe { *s.job.get() = None };
        let panic = s.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(turn);
        if let Some(e) = panic {
            resume_unwind(e);
        }
    }

    /// Splits `0..n` into ranges of at least `grain` items, a few per thread, and runs `f(start, end)` on
    /// each.
    pub fn ranges(&self, n: usize, grain: usize, f: &(dyn Fn(usize, usize) + Sync)) {
        let grain = grain.max(1);
        let most = if self.threads() == 1 { 1 } else { self.threads() * 4 };
        let parts = (n / grain).clamp(1, most);
        if n == 0 {
            return;
        }
        self.run(parts, &|p| f(n * p / parts, n * (p + 1) / parts));
    }

    /// How many times scratch memory had to be allocated; stays put over warm calls.
    pub fn scratch_made(&self) -> usize {
        self.made.load(Ordering::Relaxed)
    }

    /// Borrows uninitialised memory of `floats` f32s (64-byte aligned), kept for the next call when returned
    /// by drop.
    pub(crate) fn scratch(&self, floats: usize) -> ScratchGuard<'_> {
        let mut pool = self.scratch.lock().unwrap_or_else(PoisonError::into_inner);
        let best = (0..pool.len()).filter(|&i| pool[i].floats >= floats).min_by_key(|&i| pool[i].floats);
        let s = match best {
            Some(i) => pool.swap_remove(i),
            None => {
                // One of those at hand is outgrown; holding on to it as well would only add up. What remains
                // is as many pieces as are borrowed at one time, each as large as the largest request that
                // met it.
                if let Some(i) = (0..pool.len()).max_by_key(|&i| pool[i].floats) {
                    pool.swap_remove(i);
                }
                self.made.fetch_add(1, Ordering::Relaxed);
                Scratch::new(floats)
            }
        };
        ScratchGuard { team: self, scratch: Some(s) }
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        for w in self.workers.drain(..) {
            w.thread().unpark();
            // A worker catches the panics of its parts, so it has none of its own to report.
            let _ = w.join();
        }
    }
}

/// Memory of a kernel, page aligned.
struct Scratch {
    ptr: std::ptr::NonNull<f32>,
    floats: usize,
}

// SAFETY: plain memory, owned.
unsafe impl Send for Scratch {}

impl Scratch {
    fn layout(floats: usize) -> std::alloc::Layout {
        match std::alloc::Layout::from_size_align(floats.saturating_mul(4), 4096) {
            Ok(l) => l,
            Err(_) => panic!("kernel scratch of {floats} floats is larger than the address space"),
        }
    }

    fn new(floats: usize) -> Scratch {
        let floats = floats.max(1024);
        let layout = Scratch::layout(floats);
        // SAFETY: the size is not zero.
        let p = unsafe { std::alloc::alloc(layout) } as *mut f32;
        match std::ptr::NonNull::new(p) {
            Some(ptr) => Scratch { ptr, floats },
            None => std::alloc::handle_alloc_error(layout),
        }
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout.
        unsafe { std::alloc::dealloc(self.ptr.as_ptr() as *mut u8, Scratch::layout(self.floats)) };
    }
}

/// Scratch memory on loan from a [`Team`].
pub(crate) struct ScratchGuard<'a> {
    team: &'a Team,
    scratch: Option<Scratch>,
}

impl ScratchGuard<'_> {
    pub(crate) fn ptr(&self) -> *mut f32 {
        self.scratch.as_ref().map_or(std::ptr::NonNull::dangling().as_ptr(), |s| s.ptr.as_ptr())
    }
}

impl Drop for ScratchGuard<'_> {
    fn drop(&mut self) {
        if let Some(s) = self.scratch.take() {
            self.team.scratch.lock().unwrap_or_else(PoisonError::into_inner).push(s);
        }
    }
}

/// A pointer that parts of a job share to write disjoint places.
#[derive(Debug)]
pub struct SharedMut<T>(pub *mut T);

impl<T> Clone for SharedMut<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for SharedMut<T> {}
// SAFETY: whoever dereferences the pointer (which is unsafe) promises that parts do not overlap.
unsafe impl<T: Send> Send for SharedMut<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for SharedMut<T> {}

impl<T> SharedMut<T> {
    /// The pointer itself (a method, so that closures capture the wrapper).
    #[inline(always)]
    pub fn get(self) -> *mut T {
        self.0
    }
}

/// Like [`SharedMut`], for reading.
#[derive(Debug)]
pub struct SharedConst<T>(pub *const T);

impl<T> Clone for SharedConst<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for SharedConst<T> {}
// SAFETY: the memory is only read through it.
unsafe impl<T: Sync> Send for SharedConst<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for SharedConst<T> {}

impl<T> SharedConst<T> {
    /// The pointer itself.
    #[inline(always)]
    pub fn get(self) -> *const T {
        self.0
    }
}

/// Lets a value that holds raw pointers cross threads by reference.
pub(crate) struct Across<T>(pub(crate) T);

// SAFETY: computing with the pointers is harmless; whoever dereferences one (which is unsafe) promises that
// threads touch disjoint places.
unsafe impl<T> Sync for Across<T> {}

impl<T> Across<T> {
    #[inline(always)]
    pub(crate) fn get(&self) -> &T {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;

    #[test]
    fn every_part_runs_once() {
        for threads in [1, 2, 3, 8] {
            let team = Team::new(threads);
            for parts in [0, 1, 2, 3, 7, 100, 1000] {
                let hits: Vec<AtomicU32> = (0..parts).map(|_| AtomicU32::new(0)).collect();
                team.run(parts, &|p| {
                    hits[p].fetch_add(1, Ordering::Relaxed);
                });
                assert!(hits.iter().all(|h| h.load(Ordering::Relaxed) == 1), "{threads} {parts}");
            }
        }
    }

    #[test]
    fn thousands_of_jobs_with_pauses() {
        let team = Team::new(4);
        let sum = AtomicUsize::new(0);
        for i in 0..3000 {
            team.run(5, &|p| {
                sum.fetch_add(p, Ordering::Relaxed);
            });
            if i % 500 == 0 {
                // Long enough for the workers to park.
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        assert_eq!(sum.load(Ordering::Relaxed), 30_000);
    }

    #[test]
    fn a_panic_in_a_part_reaches_the_caller_and_the_team_lives_on() {
        let team = Team::new(3);
        for _ in 0..20 {
            let r = catch_unwind(AssertUnwindSafe(|| {
                team.run(50, &|p| {
                    if p == 17 {
                        resume_unwind(Box::new("part 17"));
                    }
                })
            }));
            assert_eq!(r.unwrap_err().downcast_ref::<&str>(), Some(&"part 17"));
            let n = AtomicU32::new(0);
            team.run(50, &|_| {
                n.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(n.load(Ordering::Relaxed), 50);
        }
    }

    #[test]
    fn jobs_inside_jobs_and_several_callers() {
        let team = Team::new(2);
        let n = AtomicU32::new(0);
        std::thread::scope(|s| {
            for _ in 0..3 {
                s.spawn(|| {
                    for _ in 0..50 {
                        team.run(4, &|_| {
                            team.run(3, &|_| {
                                n.fetch_add(1, Ordering::Relaxed);
                            })
                        });
                    }
                });
            }
        });
        assert_eq!(n.load(Ordering::Relaxed), 3 * 50 * 12);
    }

    #[test]
    fn concurrent_parts_have_distinct_thread_numbers() {
        let team = Team::new(4);
        let busy: Vec<AtomicBool> = (0..4).map(|_| AtomicBool::new(false)).collect();
        team.run_with(200, &|w, _| {
            assert!(!busy[w].swap(true, Ordering::SeqCst));
            std::hint::black_box((0..1000).sum::<usize>());
            busy[w].store(false, Ordering::SeqCst);
        });
    }

    /// A part that waits for another one: the second thread takes it, also while the first is busy. How soon
    /// is the matter of `halcyon bench peak`.
    #[test]
    fn another_thread_takes_a_part_while_the_caller_is_busy() {
        let team = Team::new(2);
        for _ in 0..200 {
            let taken = AtomicBool::new(false);
            team.run_with(2, &|worker, _| {
                if worker == 0 {
                    // The other part is the other thread's.
                    while !taken.load(Ordering::Acquire) {
                        std::thread::yield_now();
                    }
                } else {
                    taken.store(true, Ordering::Release);
                }
            });
            assert!(taken.load(Ordering::Relaxed));
        }
    }

    #[test]
    fn scratch_is_reused() {
        let team = Team::new(1);
        let a = team.scratch(5000).ptr();
        let b = team.scratch(4000).ptr();
        assert_eq!(a, b);
        assert_eq!(a as usize % 64, 0);
    }
}
