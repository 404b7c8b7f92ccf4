//! The process's own allocator.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// The system's allocator with a count of what it was asked for: for tests and measurements, as a program's
/// `#[global_allocator]`.
#[derive(Debug, Default)]
pub struct Counting(AtomicU64);

impl Counting {
    pub const fn new() -> Counting {
        Counting(AtomicU64::new(0))
    }

    /// Allocations and growths so far, by all threads.
    pub fn allocations(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

// SAFETY: every call goes to the system's allocator as it is.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        self.0.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's.
        unsafe { System.alloc(layout) }
    }
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        self.0.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's.
        unsafe { System.alloc_zeroed(layout) }
    }
    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        self.0.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's.
        unsafe { System.realloc(ptr, layout, size) }
    }
    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's.
        unsafe { System.dealloc(ptr, layout) }
    }
}

/// The system's allocator, which remembers what it refused: as the `#[global_allocator]` of a command that
/// says so ([`end_when_out`]).
#[derive(Debug, Default)]
pub struct Noted;

/// Bytes that the system refused last.
static REFUSED: AtomicUsize = AtomicUsize::new(0);

fn noted(p: *mut u8, bytes: usize) -> *mut u8 {
    if p.is_null() {
        REFUSED.store(bytes, Ordering::Relaxed);
    }
    p
}

// SAFETY: every call goes to the system's allocator as it is.
unsafe impl GlobalAlloc for Noted {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the arguments are passed on unchanged, so what the caller guarantees for them holds for the
        // system's allocator.
        noted(unsafe { System.alloc(layout) }, layout.size())
    }
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the arguments are passed on unchanged, so what the caller guarantees for them holds for the
        // system's allocator.
        noted(unsafe { System.alloc_zeroed(layout) }, layout.size())
    }
    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the arguments are passed on unchanged, so what the caller guarantees for them holds for the
        // system's allocator.
        noted(unsafe { System.realloc(ptr, layout, size) }, size)
    }
    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the arguments are passed on unchanged, so what the caller guarantees for them holds for the
        // system's allocator.
        unsafe { System.dealloc(ptr, layout) }
    }
}

/// Has the process end with exit code 5 and one message where it would be ended for want of memory: by an
/// allocation that cannot fail in an orderly way, in Rust (of a process with [`Noted`]) or in a driver's
/// library. Without it such an end is a signal. `json` has the message on standard output as the command
/// prints errors. Where there are no signals this does nothing.
pub fn end_when_out(json: bool) {
    #[cfg(unix)]
    out::install(json);
    #[cfg(not(unix))]
    let _ = json;
}

#[cfg(unix)]
mod out {
    use super::REFUSED;
    use std::ffi::{c_char, c_int, c_void};
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

    unsafe extern "C" {
        fn signal(number: c_int, handler: usize) -> usize;
        fn write(fd: c_int, bytes: *const c_void, count: usize) -> isize;
        fn read(fd: c_int, bytes: *mut c_void, count: usize) -> isize;
        fn open(path: *const c_char, flags: c_int, ...) -> c_int;
        fn _exit(code: c_int) -> !;
    }

    /// The same numbers on Linux and macOS, but for the bus error's.
    const ABORT: c_int = 6;
    const SEGMENT: c_int = 11;
    const BUS: c_int = if cfg!(target_os = "linux") { 7 } else { 10 };
    const DEFAULT: usize = 0;
    const PAGE: u64 = 4096;

    static JSON: AtomicBool = AtomicBool::new(false);
    /// Bytes of address space that the process may have; 0 without a limit.
    static LIMIT: AtomicU64 = AtomicU64::new(0);

    pub fn install(json: bool) {
        JSON.store(json, Ordering::Relaxed);
        let limits = std::fs::read_to_string("/proc/self/limits").unwrap_or_default();
        let line = limits.lines().find_map(|l| l.strip_prefix("Max address space"));
        let limit: u64 = line.and_then(|l| l.split_whitespace().next()?.parse().ok()).unwrap_or(0);
        LIMIT.store(limit, Ordering::Relaxed);
        // Where memory is limited, C libraries go on with the null that they got.
        let numbers = if limit > 0 { &[ABORT, SEGMENT, BUS][..] } else { &[ABORT] };
        for n in numbers {
            let handler: extern "C" fn(c_int) = ended;
            // SAFETY: the handler calls what may be called in one: read, write, open, signal and _exit.
            unsafe { signal(*n, handler as usize) };
        }
    }

    /// Bytes of address space that the process has.
    fn used() -> u64 {
        let mut text = [0u8; 64];
        // SAFETY: the path ends with a NUL, and at most the length of the array is read into it.
        let n = unsafe {
            let fd = open(c"/proc/self/statm".as_ptr(), 0);
            read(fd, text.as_mut_ptr().cast(), text.len())
        };
        let digits = text.iter().take(usize::try_from(n).unwrap_or(0)).take_while(|b| b.is_ascii_digit());
        digits.fold(0u64, |n, b| n.wrapping_mul(10).wrapping_add(u64::from(b - b'0'))).saturating_mul(PAGE)
    }

    fn say(fd: c_int, text: &[u8]) {
        // SAFETY: the bytes are those of a slice. Nothing is left to do where they cannot be written.
        unsafe { write(fd, text.as_ptr().cast(), text.len()) };
    }

    /// A number without an allocation.
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
        let (refused, limit) = (REFUSED.load(Ordering::Relaxed) as u64, LIMIT.load(Ordering::Relaxed));
        let full = limit > 0 && used() > limit / 4 * 3;
        if !(full || number == ABORT && refused > 0) {
            // Not for want of memory: what follows ends the process as it would have.
            // SAFETY: restoring the default action may be done in a handler.
            unsafe { signal(number, DEFAULT) };
            return;
        }
        let json = JSON.load(Ordering::Relaxed);
        let fd = crate::chatter::descriptor(!json);
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
        // SAFETY: it ends the process and runs nothing of it.
        unsafe { _exit(5) }
    }
}

/// Gives memory that was freed and that the allocator keeps back to the system, where there is such a call
/// (glibc): what planning leaves behind then makes room for the plan. Says whether anything was given back.
pub fn trim() -> bool {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        unsafe extern "C" {
            fn malloc_trim(pad: usize) -> std::ffi::c_int;
        }
        // SAFETY: it takes no pointer, and the allocator locks what it works on; live allocations are not
        // touched.
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
    fn what_is_free_is_given_back_and_what_is_not_stays() {
        // Pieces that are too small to be mapped by themselves, of which every second one is freed.
        let mut pieces: Vec<Option<Vec<u8>>> = (0..4000u32).map(|i| Some(vec![i as u8; 16 << 10])).collect();
        pieces.iter_mut().step_by(2).for_each(|p| *p = None);
        let gave = super::trim();
        assert_eq!(gave, cfg!(all(target_os = "linux", target_env = "gnu")));
        for (i, p) in pieces.iter().enumerate().filter_map(|(i, p)| Some((i, p.as_ref()?))) {
            assert!(p.iter().all(|b| *b == i as u8));
        }
    }
}
