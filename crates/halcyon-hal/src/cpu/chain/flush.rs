//! Flush-to-zero. Denormal results make some processors at least twice as slow, and every op's tolerance
//! allows zero in their place.

use std::marker::PhantomData;

/// While this value lives, denormal results of this thread's arithmetic are zero. Dropping it, also in a
/// panic, restores the thread's setting. It has no effect on processors other than x86-64.
pub(crate) struct FlushToZero {
    #[cfg(target_arch = "x86_64")]
    before: u32,
    /// The setting belongs to this thread.
    thread: PhantomData<*const ()>,
}

#[cfg(target_arch = "x86_64")]
mod imp {
    use super::FlushToZero;
    use std::arch::asm;
    use std::marker::PhantomData;

    /// FTZ, bit 15 of MXCSR: denormal results become zero. Denormal operands keep their values (DAZ is not
    /// set), so that comparisons, copies and classification stay exact.
    const FTZ: u32 = 1 << 15;

    impl FlushToZero {
        pub(crate) fn new() -> FlushToZero {
            let mut before = 0u32;
            // SAFETY: reads and writes this thread's MXCSR through valid pointers. Only the treatment of
            // denormal results changes, and `drop` undoes it before the thread returns to other code.
            unsafe {
                asm!("stmxcsr [{}]", in(reg) &mut before, options(nostack, preserves_flags));
                let new = before | FTZ;
                asm!("ldmxcsr [{}]", in(reg) &new, options(nostack, preserves_flags, readonly));
            }
            FlushToZero { before, thread: PhantomData }
        }
    }

    impl Drop for FlushToZero {
        fn drop(&mut self) {
            // SAFETY: `before` is the value that `new` read from this thread's MXCSR; the type is not `Send`.
            unsafe {
                asm!("ldmxcsr [{}]", in(reg) &self.before, options(nostack, preserves_flags, readonly))
            };
        }
    }
}

#[cfg(not(target_arch = "x86_64"))]
impl FlushToZero {
    pub(crate) fn new() -> FlushToZero {
        FlushToZero { thread: PhantomData }
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::FlushToZero;
    use std::hint::black_box;

    fn flushes() -> bool {
        black_box(f32::MIN_POSITIVE) * black_box(0.5) == 0.0
    }

    #[test]
    fn a_panic_restores_the_setting() {
        assert!(!flushes());
        let panicked = std::panic::catch_unwind(|| {
            let _ftz = FlushToZero::new();
            assert!(flushes());
            panic!("a kernel's bug");
        });
        assert!(panicked.is_err() && !flushes());
    }
}
