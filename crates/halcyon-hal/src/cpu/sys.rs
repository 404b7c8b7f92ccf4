//! Processor features: instruction sets, cache sizes, and the flush-to-zero mode of the calling thread.

use super::isa::IsaLevel;
use std::marker::PhantomData;
use std::path::Path;
use std::sync::OnceLock;

/// Instruction sets that the CPU's kernels are compiled for, ordered from least to most capable on one
/// architecture.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Isa {
    /// The target's baseline (SSE2 on x86-64, NEON on aarch64). On x86, multiplication and addition round
    /// separately.
    Portable,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, DQ, VL.
    Avx512,
}

impl Isa {
    /// The best set that the processor and the operating system support, within [`super::isa::VARIABLE`].
    /// Detected once.
    pub fn best() -> Isa {
        static BEST: OnceLock<Isa> = OnceLock::new();
        *BEST.get_or_init(|| *Isa::available().last().unwrap_or(&Isa::Portable))
    }

    /// Every set that may run here, least capable first.
    pub fn available() -> Vec<Isa> {
        let steps = [(Isa::Avx2, IsaLevel::Avx2), (Isa::Avx512, IsaLevel::Avx512)];
        let more = steps.into_iter().take_while(|(isa, step)| isa.detected() && step.allowed());
        std::iter::once(Isa::Portable).chain(more.map(|(isa, _)| isa)).collect()
    }

    /// Whether the processor and its operating system support the set.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn detected(self) -> bool {
        let avx2 = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        match self {
            Isa::Portable => true,
            Isa::Avx2 => avx2,
            Isa::Avx512 => {
                avx2 && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
            }
        }
    }

    #[cfg(not(target_arch = "x86_64"))]
    pub(crate) fn detected(self) -> bool {
        self == Isa::Portable
    }

    /// Panics if the set is not available here, so that safe functions can take an `Isa` and be sound.
    #[inline]
    pub(crate) fn check(self) -> Isa {
        assert!(self <= Isa::best(), "{self:?} is not available here");
        self
    }

    /// Whether kernels of this set may use products of bf16 pairs in vectors (AVX512_BF16, `vdpbf16ps`).
    #[inline]
    pub fn has_bf16(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        if self == Isa::Avx512 {
            return self.check() == self
                && is_x86_feature_detected!("avx512bf16")
                && IsaLevel::Avx512Bf16.allowed();
        }
        false
    }

    /// Whether kernels of this set may use bf16 products on tile registers (AMX-BF16, together with
    /// AVX512_BF16).
    #[inline]
    pub fn has_bf16_tiles(self) -> bool {
        self.has_bf16() && super::amx::available().bf16
    }

    /// Whether kernels of this set may use products of 8-bit integers on tile registers (AMX-INT8, together
    /// with AVX512_VNNI, and AVX512_BF16, which the functions that pack the operands are compiled for).
    #[inline]
    pub fn has_int8_tiles(self) -> bool {
        self.has_vnni() && self.has_bf16() && super::amx::available().int8
    }

    /// Whether bf16 products are faster than f32 multiply-adds. On tile registers they are faster: 15 times
    /// as fast on the measured processor. For products in vectors ([`Isa::has_bf16`]), the answer depends on
    /// the vendor. On an Intel processor, loops without memory accesses reached 107 GFLOP/s per core in bf16
    /// and 204 in f32, so bf16 is slower. Processors of other vendors are assumed to reach twice the f32
    /// rate.
    #[inline]
    pub fn bf16_is_faster(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        if self.has_bf16() {
            // "Genu" begins the vendor string "GenuineIntel".
            return self.has_bf16_tiles()
                || std::arch::x86_64::__cpuid(0).ebx != u32::from_le_bytes(*b"Genu");
        }
        false
    }

    /// Whether kernels of this set may use products of four 8-bit integers in vectors (AVX512_VNNI,
    /// `vpdpbusd`).
    #[inline]
    pub fn has_vnni(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        if self == Isa::Avx512 {
            return self.check() == self
                && is_x86_feature_detected!("avx512vnni")
                && IsaLevel::Avx512Vnni.allowed();
        }
        false
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

/// Whether this processor has f16 arithmetic (AVX512-FP16, FEAT_FP16).
pub fn f16_arithmetic() -> bool {
    #[cfg(target_arch = "x86_64")]
    return is_x86_feature_detected!("avx512fp16");
    #[cfg(target_arch = "aarch64")]
    return std::arch::is_aarch64_feature_detected!("fp16");
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    return false;
}

/// Sizes in bytes of the data caches that one core can use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Caches {
    pub l1: usize,
    pub l2: usize,
    /// The last level, shared by several cores; 0 if there is none or the system does not report it.
    pub l3: usize,
    /// Whether the system reported at least one of these sizes. `l1` and `l2` are typical values if the
    /// system did not report them.
    pub known: bool,
}

impl Caches {
    /// Cache sizes of this machine: from the system on Linux, typical values elsewhere. Detected once.
    pub fn get() -> Caches {
        static CACHES: OnceLock<Caches> = OnceLock::new();
        *CACHES.get_or_init(|| Caches::read(Path::new("/sys/devices/system/cpu/cpu0/cache")))
    }

    /// Reads `index*/{level,type,size}` in a folder laid out like Linux's
    /// `/sys/devices/system/cpu/cpu0/cache`.
    fn read(dir: &Path) -> Caches {
        let mut c = Caches { l1: 32 << 10, l2: 512 << 10, l3: 0, known: false };
        for i in 0..8 {
            let text = |name: &str| std::fs::read_to_string(dir.join(format!("index{i}/{name}"))).ok();
            let (Some(level), Some(kind), Some(size)) = (text("level"), text("type"), text("size")) else {
                break;
            };
            let Some(bytes) = parse_size(size.trim()) else {
                continue;
            };
            match (level.trim(), kind.trim()) {
                ("1", "Data" | "Unified") => c.l1 = bytes,
                ("2", "Data" | "Unified") => c.l2 = bytes,
                ("3", "Data" | "Unified") => c.l3 = bytes,
                _ => continue,
            }
            c.known = true;
        }
        c
    }
}

/// Parses `48K`, `1M` or plain bytes.
fn parse_size(s: &str) -> Option<usize> {
    let (digits, unit) = match s.as_bytes().last()? {
        b'K' => (&s[..s.len() - 1], 1 << 10),
        b'M' => (&s[..s.len() - 1], 1 << 20),
        b'G' => (&s[..s.len() - 1], 1 << 30),
        _ => (s, 1),
    };
    digits.parse::<usize>().ok()?.checked_mul(unit)
}

/// Number of processors this process may use; 1 if the system does not report it.
pub fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, |n| n.get())
}

/// Makes the calling thread treat denormal operands and results as zero while the guard lives, because
/// denormals slow arithmetic down. Works on x86-64 and aarch64; does nothing elsewhere. Every thread has its
/// own mode, so create one guard per part of a job.
#[derive(Debug)]
pub struct FlushToZero {
    before: u64,
    /// Makes the guard `!Send`, because the mode belongs to the thread.
    _not_send: PhantomData<*const ()>,
}

impl FlushToZero {
    #[allow(clippy::new_without_default)]
    #[inline]
    pub fn new() -> FlushToZero {
        let before = control();
        set_control(before | FLUSH);
        FlushToZero { before, _not_send: PhantomData }
    }
}

impl Drop for FlushToZero {
    #[inline]
    fn drop(&mut self) {
        set_control(self.before);
    }
}

/// FTZ (bit 15) and DAZ (bit 6) of MXCSR.
#[cfg(target_arch = "x86_64")]
const FLUSH: u64 = 1 << 15 | 1 << 6;
/// FZ of FPCR.
#[cfg(target_arch = "aarch64")]
const FLUSH: u64 = 1 << 24;
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
const FLUSH: u64 = 0;

#[cfg(target_arch = "x86_64")]
#[inline]
fn control() -> u64 {
    let mut v = 0u32;
    // SAFETY: `stmxcsr` stores 4 bytes to `v`.
    unsafe { std::arch::asm!("stmxcsr [{}]", in(reg) &mut v, options(nostack, preserves_flags)) };
    v as u64
}

#[cfg(target_arch = "x86_64")]
#[inline]
fn set_control(v: u64) {
    let v = v as u32;
    // SAFETY: `v` is a value read from MXCSR with at most the flush bits changed. The compiler computes
    // constants in the default mode. The modes differ for denormals only, and callers of `FlushToZero` accept
    // that difference.
    unsafe { std::arch::asm!("ldmxcsr [{}]", in(reg) &v, options(nostack, preserves_flags, readonly)) };
}

#[cfg(target_arch = "aarch64")]
#[inline]
fn control() -> u64 {
    let v: u64;
    // SAFETY: `mrs` only reads FPCR.
    unsafe { std::arch::asm!("mrs {}, fpcr", out(reg) v, options(nomem, nostack, preserves_flags)) };
    v
}

#[cfg(target_arch = "aarch64")]
#[inline]
fn set_control(v: u64) {
    // SAFETY: `v` is a value read from FPCR with at most the flush bit changed; only denormals are affected.
    unsafe { std::arch::asm!("msr fpcr, {}", in(reg) v, options(nomem, nostack, preserves_flags)) };
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn control() -> u64 {
    0
}
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn set_control(_: u64) {}

/// Defines a function that runs `$body::<FMA, ..>(args)` compiled for the given instruction set. The body
/// must be an `#[inline(always)]` function whose first generic parameter is `const FMA: bool`. The two
/// bracketed lists declare and name further generic parameters.
macro_rules! dispatch {
    ($(#[$doc:meta])* $vis:vis fn $name:ident [$($g:tt)*] [$($u:tt)*] ($isa:ident $(, $arg:ident: $ty:ty)* $(,)?) $(-> $ret:ty)? = $body:ident) => {
        $(#[$doc])*
        $vis fn $name<$($g)*>($isa: $crate::cpu::sys::Isa $(, $arg: $ty)*) $(-> $ret)? {
            /// # Safety
            /// The processor has AVX-512 F, BW, DQ and VL, AVX2, FMA and F16C.
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
            fn avx512<$($g)*>($($arg: $ty),*) $(-> $ret)? {
                $body::<true, $($u)*>($($arg),*)
            }
            /// # Safety
            /// The processor has AVX2, FMA and F16C.
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c")]
            fn avx2<$($g)*>($($arg: $ty),*) $(-> $ret)? {
                $body::<true, $($u)*>($($arg),*)
            }
            match $isa.check() {
                // SAFETY: `check` verified that this processor has AVX-512, AVX2, FMA and F16C.
                #[cfg(target_arch = "x86_64")]
                $crate::cpu::sys::Isa::Avx512 => unsafe { avx512::<$($u)*>($($arg),*) },
                // SAFETY: `check` verified that this processor has AVX2, FMA and F16C.
                #[cfg(target_arch = "x86_64")]
                $crate::cpu::sys::Isa::Avx2 => unsafe { avx2::<$($u)*>($($arg),*) },
                _ => $body::<{ cfg!(target_arch = "aarch64") }, $($u)*>($($arg),*),
            }
        }
    };
}
pub(crate) use dispatch;

/// Like `dispatch!`, for bodies that access raw memory.
macro_rules! dispatch_raw {
    ($(#[$doc:meta])* $vis:vis unsafe fn $name:ident [$($g:tt)*] [$($u:tt)*] ($isa:ident $(, $arg:ident: $ty:ty)* $(,)?) = $body:ident) => {
        $(#[$doc])*
        $vis unsafe fn $name<$($g)*>($isa: $crate::cpu::sys::Isa $(, $arg: $ty)*) {
            /// # Safety
            /// The contract of the enclosing function, on a processor with AVX-512.
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
            unsafe fn avx512<$($g)*>($($arg: $ty),*) {
                // SAFETY: this function has the contract of `$name`, which is that of the body, and is
                // compiled for AVX-512.
                unsafe { $body::<true, $($u)*>($($arg),*) }
            }
            /// # Safety
            /// The contract of the enclosing function, on a processor with AVX2, FMA and F16C.
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c")]
            unsafe fn avx2<$($g)*>($($arg: $ty),*) {
                // SAFETY: this function has the contract of `$name`, which is that of the body, and is
                // compiled for AVX2.
                unsafe { $body::<true, $($u)*>($($arg),*) }
            }
            // SAFETY: `check` verified the features; `$name` has the contract of the body.
            unsafe {
                match $isa.check() {
                    #[cfg(target_arch = "x86_64")]
                    $crate::cpu::sys::Isa::Avx512 => avx512::<$($u)*>($($arg),*),
                    #[cfg(target_arch = "x86_64")]
                    $crate::cpu::sys::Isa::Avx2 => avx2::<$($u)*>($($arg),*),
                    _ => $body::<{ cfg!(target_arch = "aarch64") }, $($u)*>($($arg),*),
                }
            }
        }
    };
}
pub(crate) use dispatch_raw;

#[cfg(test)]
mod tests {
    use super::*;
    use std::hint::black_box;

    #[test]
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    fn flushing_lasts_as_long_as_its_guard() {
        let half = || black_box(f32::MIN_POSITIVE) * black_box(0.5);
        assert!(half() > 0.0);
        {
            let _outer = FlushToZero::new();
            assert_eq!(half(), 0.0);
            {
                let _inner = FlushToZero::new();
            }
            assert_eq!(half(), 0.0);
        }
        assert!(half() > 0.0);
    }

    #[test]
    fn sizes_are_read_as_the_system_writes_them() {
        assert_eq!(parse_size("48K"), Some(48 << 10));
        assert_eq!(parse_size("1M"), Some(1 << 20));
        assert_eq!(parse_size("512"), Some(512));
        assert_eq!(parse_size("K"), None);
        assert_eq!(parse_size(""), None);
        assert!(!Caches::read(Path::new("/nowhere")).known);
        let c = Caches::get();
        assert!(c.l1 >= 4096 && c.l2 >= c.l1, "{c:?}");
    }

    #[test]
    fn the_best_set_is_available() {
        assert_eq!(Isa::available().last(), Some(&Isa::best()));
        assert!(processors() > 0);
    }
}
