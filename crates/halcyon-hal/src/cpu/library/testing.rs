//! Test helpers for kernels: random numbers, and memory that faults one byte outside an operand.

/// Random numbers. Their seed is HALCYON_SEED, or a new one in each run. The seed is printed, so that it
/// appears when a test fails.
pub(crate) struct Rng(u64);

impl Rng {
    #[track_caller]
    pub(crate) fn new() -> Rng {
        let seed = halcyon_test_host::seed(&std::panic::Location::caller().to_string());
        // SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014) mixes
        // the seed, because a small seed would make the first numbers small.
        let z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        Rng((z ^ (z >> 31)) | 1)
    }

    /// Xorshift* (Vigna, "An experimental exploration of Marsaglia's xorshift generators", 2016).
    pub(crate) fn bits(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// Uniform in -1..1.
    pub(crate) fn f32(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.bits() >> 33) as usize % n
    }

    pub(crate) fn vec(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.f32()).collect()
    }
}

/// Whether products of this size are tested here. An emulator (HALCYON_EMULATED=1) would take minutes for
/// large products.
pub(crate) fn bearable(m: usize, n: usize, k: usize) -> bool {
    m * n * k < 20 << 20 || std::env::var("HALCYON_EMULATED").map_or(true, |v| v != "1")
}

/// The error of a sum of `k` products in f32, relative to the sum of their magnitudes. The rounding errors of
/// the terms are taken to be independent, so the error grows as the square root of `k` (Higham and Mary, "A
/// new approach to probabilistic rounding error analysis", 2019). The 3 is about eight standard deviations.
/// The 4 allows for the rounding by the factor, the old value and the biases.
pub(crate) fn sum_tolerance(k: usize) -> f64 {
    f64::from(f32::EPSILON) / 2.0 * (4.0 + 3.0 * (k as f64).sqrt())
}

/// Asserts `|got - want| <= tol * scale`; NaN equals NaN.
#[track_caller]
pub(crate) fn close(got: f32, want: f64, scale: f64, tol: f64, what: &dyn std::fmt::Debug) {
    if want.is_nan() && got.is_nan() || got as f64 == want {
        return;
    }
    assert!((got as f64 - want).abs() <= tol * scale, "{got} against {want} (scale {scale}) in {what:?}");
}

/// Which end of the accessible pages the operand touches.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Side {
    /// The byte before the first element faults.
    Start,
    /// The byte after the last element faults.
    End,
}

/// Memory of exactly `n` elements between inaccessible pages, one of which is adjacent to the elements.
pub(crate) struct Guarded<T> {
    base: *mut u8,
    bytes: usize,
    ptr: *mut T,
    n: usize,
}

#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
mod os {
    use std::ffi::{c_int, c_void};
    unsafe extern "C" {
        fn mmap(
            addr: *mut c_void,
            len: usize,
            prot: c_int,
            flags: c_int,
            fd: c_int,
            offset: i64,
        ) -> *mut c_void;
        fn mprotect(addr: *mut c_void, len: usize, prot: c_int) -> c_int;
        fn munmap(addr: *mut c_void, len: usize) -> c_int;
    }
    /// Maps `len` bytes. The bytes from `PAGE` to `len - PAGE` are readable and writable, the others are not.
    pub(super) fn map(len: usize) -> *mut u8 {
        // PROT_NONE = 0, PROT_READ | PROT_WRITE = 3, MAP_PRIVATE | MAP_ANONYMOUS = 0x22.
        // SAFETY: `mmap` creates a fresh private mapping, and `mprotect` changes pages of it only.
        unsafe {
            let p = mmap(std::ptr::null_mut(), len, 0, 0x22, -1, 0);
            assert!(p as isize != -1, "mmap");
            let inner = len - 2 * super::PAGE;
            // An operand without elements has no accessible pages; some emulators reject an empty range.
            assert!(inner == 0 || mprotect(p.byte_add(super::PAGE), inner, 3) == 0, "mprotect");
            p as *mut u8
        }
    }
    pub(super) fn unmap(p: *mut u8, len: usize) {
        // SAFETY: `map` created this mapping of `len` bytes, and nothing uses it any more.
        unsafe { munmap(p as *mut c_void, len) };
    }
}

/// On other systems operands lie in plain memory, and the tests check values only.
#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
mod os {
    pub(super) fn map(len: usize) -> *mut u8 {
        Box::leak(vec![0u64; len / 8].into_boxed_slice()).as_mut_ptr() as *mut u8
    }
    pub(super) fn unmap(_: *mut u8, _: usize) {}
}

/// A multiple of every page size in use.
const PAGE: usize = 65536;

impl<T: Copy> Guarded<T> {
    pub(crate) fn new(data: &[T], side: Side) -> Guarded<T> {
        let len = std::mem::size_of_val(data);
        let bytes = len.next_multiple_of(PAGE) + 2 * PAGE;
        let base = os::map(bytes);
        let at = match side {
            Side::Start => PAGE,
            Side::End => bytes - PAGE - len,
        };
        let ptr = base.wrapping_add(at) as *mut T;
        // SAFETY: `len` bytes of a fresh mapping, which `data` cannot overlap, are accessible from `ptr` on.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), ptr, data.len()) };
        Guarded { base, bytes, ptr, n: data.len() }
    }

    pub(crate) fn ptr(&self) -> *const T {
        self.ptr
    }

    pub(crate) fn mut_ptr(&self) -> *mut T {
        self.ptr
    }

    pub(crate) fn slice(&self) -> &[T] {
        // SAFETY: `new` initialised `n` elements at `ptr`, which live as long as `self`.
        unsafe { std::slice::from_raw_parts(self.ptr, self.n) }
    }
}

impl<T> Drop for Guarded<T> {
    fn drop(&mut self) {
        os::unmap(self.base, self.bytes);
    }
}
