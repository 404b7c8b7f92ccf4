//! The process's own allocator.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering};

/// The system's allocator with a count of what it was asked for: for tests and measurements, as a program's `#[global_allocator]`.
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

/// Gives memory that was freed and that the allocator keeps back to the system, where there is such a call (glibc): what planning
/// leaves behind then makes room for the plan. Says whether anything was given back.
pub fn trim() -> bool {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        unsafe extern "C" {
            fn malloc_trim(pad: usize) -> std::ffi::c_int;
        }
        // SAFETY: it takes no pointer, and the allocator locks what it works on; live allocations are not touched.
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
