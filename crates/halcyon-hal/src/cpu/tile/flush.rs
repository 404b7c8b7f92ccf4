//! Flush-to-zero. Denormal results make some processors at least twice as slow, and every op's tolerance
//! allows zero instead.

#[cfg(target_arch = "x86_64")]
mod imp {
    use std::arch::asm;

    /// FTZ, bit 15 of MXCSR: denormal results become zero. Denormal operands keep their values (DAZ is not
    /// set), so that comparisons, copies and classification stay exact.
    const FTZ: u32 = 1 << 15;

    pub(crate) fn on() -> u32 {
        let mut old = 0u32;
        // SAFETY: reads and writes this thread's MXCSR through valid pointers. Only the treatment of denormal
        // results changes, and `restore` undoes it before the thread returns to other code.
        unsafe {
            asm!("stmxcsr [{}]", in(reg) &mut old, options(nostack, preserves_flags));
            let new = old | FTZ;
            asm!("ldmxcsr [{}]", in(reg) &new, options(nostack, preserves_flags, readonly));
        }
        old
    }

    pub(crate) fn restore(old: u32) {
        // SAFETY: callers pass the value that `on` read from MXCSR.
        unsafe { asm!("ldmxcsr [{}]", in(reg) &old, options(nostack, preserves_flags, readonly)) };
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod imp {
    pub(crate) fn on() -> u32 {
        0
    }
    pub(crate) fn restore(_: u32) {}
}

pub(crate) use imp::{on, restore};
