//! Global allocators of a process, its exit when it runs out of memory, and the release of freed memory.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// The system allocator with a counter of allocations, for tests and measurements as a program's
/// `#[global_allocator]`.
#[derive(Debug, Default)]
pub struct Counting(AtomicU64);

impl Counting {
    pub const fn new() -> Counting {
        Counting(AtomicU64::new(0))
    }

    /// Allocations and reallocations so far, in all threads.
    pub fn allocations(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

// SAFETY: every method forwards to the system allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        self.0.fetch_add(1, Ordering::Relaxed);
        // SAFETY: `GlobalAlloc::alloc` requires the same of `layout` (non-zero size) as `System.alloc`.
        unsafe { System.alloc(layout) }
    }
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        self.0.fetch_add(1, Ordering::Relaxed);
        // SAFETY: `GlobalAlloc::alloc_zeroed` requires the same of `layout` (non-zero size) as
        // `System.alloc_zeroed`.
        unsafe { System.alloc_zeroed(layout) }
    }
    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        self.0.fetch_add(1, Ordering::Relaxed);
        // SAFETY: `ptr` was allocated by `System` with `layout` (all methods forward to it), and
        // `GlobalAlloc::realloc` requires `size` to be valid.
        unsafe { System.realloc(ptr, layout, size) }
    }
    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: `ptr` was allocated by `System` with `layout`, because all methods forward to it.
        unsafe { System.dealloc(ptr, layout) }
    }
}

/// The system allocator, which records the size of a failed request. For use as `#[global_allocator]` with
/// [`end_when_out`].
#[derive(Debug, Default)]
pub struct RecordingAllocator;

/// Size in bytes of the last failed request.
static LAST_FAILED_BYTES: AtomicUsize = AtomicUsize::new(0);

fn record_failure(p: *mut u8, bytes: usize) -> *mut u8 {
    if p.is_null() {
        LAST_FAILED_BYTES.store(bytes, Ordering::Relaxed);
    }
    p
}

// SAFETY: every method forwards to the system allocator unchanged.
unsafe impl GlobalAlloc for RecordingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: `layout` is passed on unchanged; `GlobalAlloc::alloc` requires the same of it as
        // `System.alloc`.
        record_failure(unsafe { System.alloc(layout) }, layout.size())
    }
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: `layout` is passed on unchanged; `GlobalAlloc::alloc_zeroed` requires the same of it as
        // `System.alloc_zeroed`.
        record_failure(unsafe { System.alloc_zeroed(layout) }, layout.size())
    }
    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: `ptr` was allocated by `System` with `layout`, because all methods forward to it;
        // `GlobalAlloc::realloc` requires `size` to be valid.
        record_failure(unsafe { System.realloc(ptr, layout, size) }, size)
    }
    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: `ptr` was allocated by `System` with `layout`, because all methods forward to it.
        unsafe { System.dealloc(ptr, layout) }
    }
}

/// Makes the process exit with code 5 and one message, instead of by a signal, if it runs out of memory.
/// Covers infallible allocations of Rust in a process with [`RecordingAllocator`]. If the process has a limit
/// on its address space (`ulimit -v`), also covers crashes in a driver's library when most of the limit is
/// used. With `json`, standard output gets the message in the format of the command's errors. No effect on
/// systems without signals.
pub fn end_when_out(json: bool) {
    #[cfg(unix)]
    out::install(json);
    #[cfg(not(unix))]
    let _ = json;
}

#[cfg(unix)]
mod out {
    use super::LAST_FAILED_BYTES;
    use std::ffi::{c_char, c_int, c_void};
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

    unsafe extern "C" {
        fn signal(number: c_int, handler: usize) -> usize;
        fn write(fd: c_int, bytes: *const c_void, count: usize) -> isize;
        fn read(fd: c_int, bytes: *mut c_void, count: usize) -> isize;
        fn open(path: *const c_char, flags: c_int, ...) -> c_int;
        fn _exit(code: c_int) -> !;
    }

    /// Numbers of signals. Only the number of the bus error differs between Linux and macOS.
    const ABORT: c_int = 6;
    const SEGMENT: c_int = 11;
    const BUS: c_int = if cfg!(target_os = "linux") { 7 } else { 10 };
    const DEFAULT: usize = 0;
    const PAGE: u64 = 4096;

    static JSON: AtomicBool = AtomicBool::new(false);
    /// The limit of the process's address space in bytes; 0: none.
    static LIMIT: AtomicU64 = AtomicU64::new(0);

    pub(super) fn install(json: bool) {
        JSON.store(json, Ordering::Relaxed);
        let limits = std::fs::read_to_string("/proc/self/limits").unwrap_or_default();
        let line = limits.lines().find_map(|l| l.strip_prefix("Max address space"));
        let limit: u64 = line.and_then(|l| l.split_whitespace().next()?.parse().ok()).unwrap_or(0);
        LIMIT.store(limit, Ordering::Relaxed);
        // Under a limit, C libraries may dereference the null pointer of a failed allocation.
        let numbers = if limit > 0 { &[ABORT, SEGMENT, BUS][..] } else { &[ABORT] };
        for n in numbers {
            let handler: extern "C" fn(c_int) = ended;
            // SAFETY: `handler` has the signature that `signal` expects and calls only async-signal-safe
            // functions: read, write, open, signal and _exit.
            unsafe { signal(*n, handler as usize) };
        }
    }

    /// The process's address space in use, in bytes.
    fn used() -> u64 {
        let mut text = [0u8; 64];
        // SAFETY: the path is a NUL-terminated literal, and `read` writes at most `text.len()` bytes to
        // `text`.
        let n = unsafe {
            let fd = open(c"/proc/self/statm".as_ptr(), 0);
            read(fd, text.as_mut_ptr().cast(), text.len())
        };
        let digits = text.iter().take(usize::try_from(n).unwrap_or(0)).take_while(|b| b.is_ascii_digit());
        digits.fold(0u64, |n, b| n.wrapping_mul(10).wrapping_add(u64::from(b - b'0'))).saturating_mul(PAGE)
    }

    fn say(fd: c_int, text: &[u8]) {
        // SAFETY: the pointer and length are those of a slice. A failure to write is ignored.
        unsafe { write(fd, text.as_ptr().cast(), text.len()) };
    }

    /// Formats a number without allocating.
    fn digits(mut n: u64, to: &mut [u8; 20]) -> &[u8] {
        let mut at = to.len();
        loop {
            at -= 1;
            to[at] = b'0' + (n % 10) as u8;
            n /= 10;
            if n == 0 {
                return &to[at..];
            }
        }
    }

    extern "C" fn ended(number: c_int) {
        let (refused, limit) =
            (LAST_FAILED_BYTES.load(Ordering::Relaxed) as u64, LIMIT.load(Ordering::Relaxed));
        let full = limit > 0 && used() > limit / 4 * 3;
        if !(full || number == ABORT && refused > 0) {
            // The signal was not caused by lack of memory, so the default action ends the process.
            // SAFETY: `signal` is async-signal-safe, and the default action is always valid.
            unsafe { signal(number, DEFAULT) };
            return;
        }
        let json = JSON.load(Ordering::Relaxed);
        let fd = crate::driver_output::descriptor(!json);
        let (start, end): (&[u8], &[u8]) = match json {
            true => (
                b"{\"error\":{\"kind\":\"OutOfMemory\",\"message\":\"out of memory on the host: ",
                b"Give the process more memory (ulimit -v), or use less\",\"facts\":{\"device\":\"the host\"}},\"exit_code\":5}\n",
            ),
            false => (b"error: out of memory on the host: ", b"Give the process more memory (ulimit -v), or use less\n"),
        };
        let mut room = [0; 20];
        say(fd, start);
        if refused > 0 {
            say(fd, digits(refused, &mut room));
            say(fd, b" bytes were refused. ");
        } else {
            say(fd, b"the limit of ");
            say(fd, digits(limit, &mut room));
            say(fd, b" bytes is reached. ");
        }
        say(fd, end);
        // SAFETY: `_exit` has no preconditions; it ends the process without running any handlers.
        unsafe { _exit(5) }
    }
}

/// Makes the allocator return the freed memory that it keeps to the system, so that memory freed by planning
/// is available to the plan. Needs glibc; does nothing elsewhere. Returns whether memory was released.
pub fn trim() -> bool {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        unsafe extern "C" {
            fn malloc_trim(pad: usize) -> std::ffi::c_int;
        }
        // SAFETY: `malloc_trim` takes no pointer, locks the allocator's structures itself and does not touch
        // live allocations.
        unsafe { malloc_trim(0) == 1 }
    }
    #[cfg(not(all(target_os = "linux", target_env = "gnu")))]
    {
        false
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn free_memory_is_returned_and_used_memory_stays() {
        // Blocks too small to be mapped separately; every second one is freed.
        let mut pieces: Vec<Option<Vec<u8>>> = (0..4000u32).map(|i| Some(vec![i as u8; 16 << 10])).collect();
        pieces.iter_mut().step_by(2).for_each(|p| *p = None);
        let gave = super::trim();
        assert_eq!(gave, cfg!(all(target_os = "linux", target_env = "gnu")));
        for (i, p) in pieces.iter().enumerate().filter_map(|(i, p)| Some((i, p.as_ref()?))) {
            assert!(p.iter().all(|b| *b == i as u8));
        }
    }
}
