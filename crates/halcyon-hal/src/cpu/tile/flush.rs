//! Flush-to-zero: denormal results slow some processors down by two and more, and every op's tolerance allows
//! zero for them.

#[cfg(target_arch = "x86_64")]
mod imp {
    use std::arch::asm;

    /// Results flush to zero. Denormal operands keep their values (no denormals-are-zero), so that
    /// comparisons, copies and classification stay exact.
    const FTZ: u32 = 1 << 15;

    pub(crate) fn on() -> u32 {
        let mut old = 0u32;
        // SAFETY: reads and writes this thread's control word through valid pointers. Only the treatment of
        // denormal results changes; `restore` undoes it before the thread returns to other code.
        unsafe {
            asm!("stmxcsr [{}]", in(reg) &mut old, options(nostack, preserves_flags));
            let new = old | FTZ;
            asm!("ldmxcsr [{}]", in(reg) &new, options(nostack, preserves_flags, readonly));
        }
        old
    }

    pub(crate) fn restore(old: u32) {
        // SAFETY: the word that `on` read.
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
