//! A device's team of threads, which share short jobs. Idle workers spin briefly before they park.
//!
//! A job is a number of parts and a function of the part number. Threads take parts one by one, and the
//! caller takes parts too, so a worker that wakes late delays nothing: once all parts are taken, the job
//! closes and no worker joins it. A job that is started inside a part runs only on the part's thread.

use crate::fork::Origin;
use std::any::Any;
use std::cell::{Cell, UnsafeCell};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

/// How long an idle worker spins before it parks.
const SPIN: Duration = Duration::from_micros(50);
/// Spins between two calls of `yield_now`, which keep an oversubscribed machine responsive.
const SPINS_PER_YIELD: u32 = 256;

/// `fn(worker, part)` without its lifetime. The pointer is valid while the gate of its job is open or has
/// workers inside.
type Job = *const (dyn Fn(usize, usize) + Sync);

// Workers enter a job through a gate. The gate is one word: the number of workers inside (16 bits), whether
// the gate is open (1 bit), and the generation, which is the job's number (the other bits).
const INSIDE: u64 = 0xffff;
const OPEN: u64 = 1 << 16;
const GENERATION: u64 = 1 << 17;

struct Shared {
    gate: AtomicU64,
    /// The next part to take.
    next: AtomicUsize,
    parts: UnsafeCell<usize>,
    job: UnsafeCell<Option<Job>>,
    stop: AtomicBool,
    /// For each worker, whether it is parked or about to park.
    asleep: Vec<AtomicBool>,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

// SAFETY: `parts` and `job` are written only by the thread that holds `Team::running`, while the gate is
// closed and no worker is inside. Only workers that entered through the gate read them, and the gate's atomic
// operations order the accesses.
unsafe impl Sync for Shared {}
// SAFETY: the raw pointer in `job` is dereferenced under the rule for `Sync` above; its function is `Sync`.
unsafe impl Send for Shared {}

thread_local! {
    /// Set while this thread runs a part of any team's job.
    static INSIDE_JOB: Cell<bool> = const { Cell::new(false) };
}

impl Shared {
    /// Takes parts until none is left. A panic stops the job, and its payload is kept for the caller.
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
            // This number is so large that no part follows, and so small that further increments do not wrap.
            self.next.store(usize::MAX / 2, Ordering::Relaxed);
            self.panic.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(e);
        }
    }

    /// Enters the gate if it is open and its generation is not `seen`.
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

    /// Main loop of a worker.
    fn serve(&self, worker: usize) {
        let asleep = &self.asleep[worker - 1];
        let mut seen = 0;
        let mut idle: Option<Instant> = None;
        let mut spins = 0u32;
        loop {
            if self.enter(&mut seen) {
                // SAFETY: this thread is inside the gate, so `run_with` does not write `parts` and `job`.
                let (parts, job) = unsafe { (*self.parts.get(), *self.job.get()) };
                if let Some(job) = job {
                    // SAFETY: `run_with` keeps the function alive until this thread has left the gate.
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
            // Set the flag, check once more, then park. `run_with` opens the gate before it reads the flag,
            // so no wake-up is lost.
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

/// The workers, which share jobs with the calling thread, and the scratch memory that kernels reuse.
pub struct Team {
    shared: Arc<Shared>,
    /// The number of threads for which kernels split their work; at least the actual number.
    width: usize,
    workers: Vec<JoinHandle<()>>,
    wake: Vec<Thread>,
    /// Locked while a job runs, so that the jobs of several callers run one after another.
    running: Mutex<()>,
    scratch: Mutex<Vec<Scratch>>,
    made: AtomicUsize,
    /// The process that has the workers.
    origin: Origin,
}

impl std::fmt::Debug for Team {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Team").field("threads", &self.threads()).finish_non_exhaustive()
    }
}

impl Team {
    /// A team of `threads` threads including the caller's (0 counts as 1, and more than 1,024 as 1,024). If
    /// threads cannot be started (on wasm32, or because the system refuses), the team is smaller; see
    /// [`Team::threads`].
    pub fn new(threads: usize) -> Team {
        Team::with_width(threads, 1)
    }

    /// A team of `threads` threads that reports at least `width` threads to kernels. Kernels made for a wider
    /// team run on it unchanged, with their work split for `width` threads.
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
            origin: Origin::here(),
        }
    }

    /// Number of threads that kernels may assume, including the caller's: the actual number or a larger
    /// `width`.
    pub fn threads(&self) -> usize {
        self.width
    }

    /// Runs `f(part)` for every part in `0..parts`, in no particular order, and returns when all are done. If
    /// a part panics, parts not yet begun are skipped, and the panic is resumed here after the other threads
    /// have left the job.
    pub fn run(&self, parts: usize, f: &(dyn Fn(usize) + Sync)) {
        self.run_with(parts, &|_, p| f(p));
    }

    /// Like [`Team::run`], with the thread number (below [`Team::threads`]) as first argument. Parts of one
    /// job that run at the same time get different numbers.
    pub fn run_with(&self, parts: usize, f: &(dyn Fn(usize, usize) + Sync)) {
        if parts == 0 {
            return;
        }
        // A forked child has no workers.
        if self.workers.is_empty() || parts == 1 || INSIDE_JOB.get() || !self.origin.is_here() {
            for p in 0..parts {
                f(0, p);
            }
            return;
        }
        let turn = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        let s = &*self.shared;
        // SAFETY: only the lifetime changes. Workers use the pointer only while inside the gate, and the loop
        // below waits until none is inside.
        let job: Job = unsafe {
            std::mem::transmute::<*const (dyn Fn(usize, usize) + Sync + '_), Job>(
                f as *const (dyn Fn(usize, usize) + Sync),
            )
        };
        // SAFETY: the gate is closed and empty, so no worker reads these; `turn` keeps other callers out.
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
        // SAFETY: the gate is closed and empty again, so no worker reads the job.
        unsafe { *s.job.get() = None };
        let panic = s.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(turn);
        if let Some(e) = panic {
            resume_unwind(e);
        }
    }

    /// Splits `0..n` into ranges of at least `grain` items, at most four per thread, and runs `f(start, end)`
    /// on each. If `n` is smaller than `2 * grain` or the team has one thread, there is one range; if `n` is
    /// 0, there is none.
    pub fn ranges(&self, n: usize, grain: usize, f: &(dyn Fn(usize, usize) + Sync)) {
        let grain = grain.max(1);
        let most = if self.threads() == 1 { 1 } else { self.threads() * 4 };
        let parts = (n / grain).clamp(1, most);
        if n == 0 {
            return;
        }
        self.run(parts, &|p| f(n * p / parts, n * (p + 1) / parts));
    }

    /// How many times scratch memory was allocated. The number does not grow while the same calls are
    /// repeated.
    pub fn scratch_made(&self) -> usize {
        self.made.load(Ordering::Relaxed)
    }

    /// Borrows uninitialised memory of `floats` f32s, page aligned. Dropping the guard returns it for the
    /// next call.
    pub(crate) fn scratch(&self, floats: usize) -> ScratchGuard<'_> {
        let mut pool = self.scratch.lock().unwrap_or_else(PoisonError::into_inner);
        let best = (0..pool.len()).filter(|&i| pool[i].floats >= floats).min_by_key(|&i| pool[i].floats);
        let s = match best {
            Some(i) => pool.swap_remove(i),
            None => {
                // Free the largest cached allocation, which is too small; the new one takes its place. In the
                // end, the cache has one allocation per simultaneous borrow, each as large as its largest
                // request.
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
        if !self.origin.is_here() {
            std::mem::forget(std::mem::take(&mut self.workers));
            return;
        }
        self.shared.stop.store(true, Ordering::SeqCst);
        for w in self.workers.drain(..) {
            w.thread().unpark();
            // There is no error to report, because a worker catches the panics of its parts.
            let _ = w.join();
        }
    }
}

/// Page-aligned scratch memory of a kernel.
struct Scratch {
    ptr: std::ptr::NonNull<f32>,
    floats: usize,
}

// SAFETY: the value owns plain memory, which is not tied to a thread.
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
        // SAFETY: the size is at least 4 KiB, so it is not zero.
        let p = unsafe { std::alloc::alloc(layout) } as *mut f32;
        match std::ptr::NonNull::new(p) {
            Some(ptr) => Scratch { ptr, floats },
            None => std::alloc::handle_alloc_error(layout),
        }
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // SAFETY: `new` allocated `ptr` with the layout of the same `floats`.
        unsafe { std::alloc::dealloc(self.ptr.as_ptr() as *mut u8, Scratch::layout(self.floats)) };
    }
}

/// Scratch memory borrowed from a [`Team`].
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

/// A pointer that the parts of a job share to write disjoint ranges.
#[derive(Debug)]
pub struct SharedMut<T>(pub *mut T);

impl<T> Clone for SharedMut<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for SharedMut<T> {}
// SAFETY: dereferencing the pointer is unsafe, and code that does so must ensure that different parts use
// disjoint ranges.
unsafe impl<T: Send> Send for SharedMut<T> {}
// SAFETY: `get` only copies the pointer; dereferencing it is unsafe and requires disjoint ranges.
unsafe impl<T: Send> Sync for SharedMut<T> {}

impl<T> SharedMut<T> {
    /// The raw pointer. It is a method, so that closures capture the wrapper and not the pointer.
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
// SAFETY: the pointer is only used for reading, and `T: Sync` allows reads from several threads.
unsafe impl<T: Sync> Send for SharedConst<T> {}
// SAFETY: `get` only copies the pointer; reads from several threads are allowed, since `T: Sync`.
unsafe impl<T: Sync> Sync for SharedConst<T> {}

impl<T> SharedConst<T> {
    /// The raw pointer.
    #[inline(always)]
    pub fn get(self) -> *const T {
        self.0
    }
}

/// Lets a value that holds raw pointers be shared between threads by reference.
pub(crate) struct AssertSync<T>(T);

// SAFETY: `new` requires that everything in the value except its raw pointers may be shared, and that threads
// write through these pointers only to ranges that no other thread uses.
unsafe impl<T> Sync for AssertSync<T> {}

impl<T> AssertSync<T> {
    /// # Safety
    /// Apart from raw pointers, everything in `value` may be shared between threads. Threads that use the
    /// value at the same time write through its pointers only to ranges that no other thread reads or writes.
    #[inline(always)]
    pub(crate) unsafe fn new(value: T) -> AssertSync<T> {
        AssertSync(value)
    }

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
        let jobs = if cfg!(miri) { 30 } else { 3000 };
        for i in 0..jobs {
            team.run(5, &|p| {
                sum.fetch_add(p, Ordering::Relaxed);
            });
            if i % (jobs / 6) == 0 {
                // Long enough for the workers to park.
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        assert_eq!(sum.load(Ordering::Relaxed), 10 * jobs);
    }

    #[test]
    fn a_panic_in_a_part_reaches_the_caller_and_the_team_lives_on() {
        let team = Team::new(3);
        for _ in 0..if cfg!(miri) { 2 } else { 20 } {
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
                    for _ in 0..if cfg!(miri) { 5 } else { 50 } {
                        team.run(4, &|_| {
                            team.run(3, &|_| {
                                n.fetch_add(1, Ordering::Relaxed);
                            })
                        });
                    }
                });
            }
        });
        assert_eq!(n.load(Ordering::Relaxed), 3 * 12 * if cfg!(miri) { 5 } else { 50 });
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

    /// The caller's part waits for the other part, which the second thread must take. `halcyon bench peak`
    /// measures how soon it takes the part.
    #[test]
    fn another_thread_takes_a_part_while_the_caller_is_busy() {
        let team = Team::new(2);
        for _ in 0..if cfg!(miri) { 5 } else { 200 } {
            let taken = AtomicBool::new(false);
            team.run_with(2, &|worker, _| {
                if worker == 0 {
                    // The other part must run on the other thread.
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
