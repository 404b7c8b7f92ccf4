//! What the processor can do: instruction sets, cache sizes, and the flush-to-zero mode of the calling thread.

use std::sync::OnceLock;

/// Instruction sets the native kernels are compiled for. Ordered from least to most capable on one architecture.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Isa {
    /// Whatever the target's baseline gives (SSE2 on x86-64, NEON on aarch64); multiply and add round separately on x86.
    Portable,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, DQ, VL.
    Avx512,
}

impl Isa {
    /// The best set this processor and its operating system support. Detected once.
    pub fn best() -> Isa {
        static BEST: OnceLock<Isa> = OnceLock::new();
        *BEST.get_or_init(|| *Isa::available().last().unwrap_or(&Isa::Portable))
    }

    /// Every set that can run here, least capable first.
    pub fn available() -> Vec<Isa> {
        #[allow(unused_mut)]
        let mut v = vec![Isa::Portable];
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 = is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("fma")
                && is_x86_feature_detected!("f16c");
            if avx2 {
                v.push(Isa::Avx2);
            }
            if avx2
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl")
            {
                v.push(Isa::Avx512);
            }
        }
        v
    }

    /// Panics when the set cannot run here, so that a safe function may take an `Isa` and still be sound.
    #[inline]
    pub(crate) fn check(self) -> Isa {
        assert!(self <= Isa::best(), "{self:?} is not available on this processor");
        self
    }

    /// Short name for reports.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Portable if cfg!(target_arch = "aarch64") => "neon",
            Isa::Portable => "portable",
            Isa::Avx2 => "avx2+fma",
            Isa::Avx512 => "avx512",
        }
    }
}

/// Defines a function that runs `$body::<FMA, ..>(args)` compiled for the given instruction set. The body must be an
/// `#[inline(always)]` function, generic over `const FMA: bool` first. The two bracketed lists are further generic parameters,
/// declared and named.
macro_rules! dispatch {
    ($(#[$doc:meta])* $vis:vis fn $name:ident [$($g:tt)*] [$($u:tt)*] ($isa:ident $(, $arg:ident: $ty:ty)* $(,)?) $(-> $ret:ty)? = $body:ident) => {
        $(#[$doc])*
        $vis fn $name<$($g)*>($isa: $crate::cpu::sys::Isa $(, $arg: $ty)*) $(-> $ret)? {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
            fn avx512<$($g)*>($($arg: $ty),*) $(-> $ret)? {
                $body::<true, $($u)*>($($arg),*)
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c")]
            fn avx2<$($g)*>($($arg: $ty),*) $(-> $ret)? {
                $body::<true, $($u)*>($($arg),*)
            }
            match $isa.check() {
                // SAFETY: `check` has verified that this processor has the features.
                #[cfg(target_arch = "x86_64")]
                $crate::cpu::sys::Isa::Avx512 => unsafe { avx512::<$($u)*>($($arg),*) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                $crate::cpu::sys::Isa::Avx2 => unsafe { avx2::<$($u)*>($($arg),*) },
                _ => $body::<{ cfg!(target_arch = "aarch64") }, $($u)*>($($arg),*),
            }
        }
    };
}
pub(crate) use dispatch;
