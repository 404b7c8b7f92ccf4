//! Limits the CPU backend to an instruction set.
//!
//! `HALCYON_CPU_ISA` names the highest set that kernels may use, one of [`IsaLevel::ALL`]. Every query for
//! instructions respects it: [`Isa::best`], [`Isa::available`], [`amx::available`] and the `has_*` methods.
//! If the limit is `avx2`, a machine with AVX-512 chooses the kernels, packings and plans of a machine
//! without AVX-512, so tests on one machine cover both.

#[cfg_attr(not(target_arch = "x86_64"), allow(unused_imports))]
use super::{amx, sys::Isa};
use crate::{Error, Result};
use std::sync::OnceLock;

/// Name of the variable with the highest instruction set that kernels may use. Unset or empty: no limit.
pub const VARIABLE: &str = "HALCYON_CPU_ISA";

/// Instruction sets in ascending order. Each includes those before it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum IsaLevel {
    /// The target's baseline: SSE2 on x86-64, NEON on aarch64.
    Portable,
    /// AVX2, FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, DQ and VL.
    Avx512,
    /// AVX512_VNNI: products of 8-bit integers.
    Avx512Vnni,
    /// AVX512_BF16: products of bf16.
    Avx512Bf16,
    /// The tile registers of AMX.
    Amx,
}

impl IsaLevel {
    /// All levels, least capable first.
    pub const ALL: [IsaLevel; 6] = [
        IsaLevel::Portable,
        IsaLevel::Avx2,
        IsaLevel::Avx512,
        IsaLevel::Avx512Vnni,
        IsaLevel::Avx512Bf16,
        IsaLevel::Amx,
    ];

    /// The spelling used in `HALCYON_CPU_ISA`.
    pub fn name(self) -> &'static str {
        match self {
            IsaLevel::Portable => "portable",
            IsaLevel::Avx2 => "avx2",
            IsaLevel::Avx512 => "avx512",
            IsaLevel::Avx512Vnni => "avx512vnni",
            IsaLevel::Avx512Bf16 => "avx512bf16",
            IsaLevel::Amx => "amx",
        }
    }

    /// The levels that this machine and this build support, regardless of the variable. Detected once.
    pub fn available() -> &'static [IsaLevel] {
        static LEVELS: OnceLock<Vec<IsaLevel>> = OnceLock::new();
        LEVELS.get_or_init(|| {
            if !cfg!(feature = "simd") {
                return vec![IsaLevel::Portable];
            }
            // A level counts only if all lower ones are supported.
            IsaLevel::ALL.into_iter().take_while(|l| l.detected()).collect()
        })
    }

    #[cfg(target_arch = "x86_64")]
    fn detected(self) -> bool {
        match self {
            IsaLevel::Portable => true,
            IsaLevel::Avx2 => Isa::Avx2.detected(),
            IsaLevel::Avx512 => Isa::Avx512.detected(),
            IsaLevel::Avx512Vnni => is_x86_feature_detected!("avx512vnni"),
            IsaLevel::Avx512Bf16 => is_x86_feature_detected!("avx512bf16"),
            IsaLevel::Amx => amx::detected() != amx::Amx::default(),
        }
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn detected(self) -> bool {
        self == IsaLevel::Portable
    }

    /// The level that kernels use: the limit if one is set, otherwise the highest available.
    pub fn used() -> IsaLevel {
        let best = *IsaLevel::available().last().unwrap_or(&IsaLevel::Portable);
        limit().ok().flatten().unwrap_or(best)
    }

    /// Whether the limit permits this level. Does not check that the processor supports it.
    #[inline]
    pub(crate) fn allowed(self) -> bool {
        // An invalid value makes probing and opening the device fail; until then it limits nothing.
        limit().ok().flatten().is_none_or(|l| self <= l)
    }
}

/// The limit that `HALCYON_CPU_ISA` sets; `None` if it is unset. Read once.
///
/// # Errors
/// [`Error::Argument`] for an unknown name or a set that this machine does not support. Both messages list
/// the supported sets.
pub fn limit() -> Result<Option<IsaLevel>> {
    static LIMIT: OnceLock<std::result::Result<Option<IsaLevel>, String>> = OnceLock::new();
    let read = || match std::env::var_os(VARIABLE) {
        Some(v) => parse(&v.to_string_lossy(), IsaLevel::available()),
        None => Ok(None),
    };
    match LIMIT.get_or_init(read) {
        Ok(l) => Ok(*l),
        Err(what) => Err(Error::argument(VARIABLE, what.clone())),
    }
}

/// Parses the variable's text; `there` lists the available levels.
fn parse(text: &str, there: &[IsaLevel]) -> std::result::Result<Option<IsaLevel>, String> {
    let name = text.trim().to_ascii_lowercase();
    if name.is_empty() {
        return Ok(None);
    }
    let has = there.iter().map(|l| l.name()).collect::<Vec<_>>().join(", ");
    match IsaLevel::ALL.into_iter().find(|l| l.name() == name) {
        Some(l) if there.contains(&l) => Ok(Some(l)),
        Some(_) if !cfg!(feature = "simd") => Err(format!(
            "\"{name}\" is not in this build, which lacks the feature \"simd\"; it has {has}. Build with --features simd, or unset \
             {VARIABLE}"
        )),
        Some(_) => Err(format!(
            "this machine has no \"{name}\"; it has {has}. Choose one of these, or unset {VARIABLE}"
        )),
        None => Err(format!(
            "\"{text}\" is no instruction set; this machine has {has}. Choose one of these, or unset {VARIABLE}"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_parsed_and_what_is_missing_lists_what_is_there() {
        let there = [IsaLevel::Portable, IsaLevel::Avx2];
        assert_eq!(parse("", &there), Ok(None));
        assert_eq!(parse(" AVX2 ", &there), Ok(Some(IsaLevel::Avx2)));
        for l in IsaLevel::ALL {
            assert_eq!(parse(l.name(), &IsaLevel::ALL), Ok(Some(l)));
        }
        let unknown = parse("avx1024", &there).unwrap_err();
        assert!(unknown.contains("\"avx1024\"") && unknown.contains("has portable, avx2."), "{unknown}");
        let missing = parse("amx", &there).unwrap_err();
        assert!(
            missing.contains("no \"amx\"") || missing.contains("\"amx\" is not in this build"),
            "{missing}"
        );
        assert!(missing.contains("has portable, avx2."), "{missing}");
    }

    /// All queries for instructions agree with the list of levels. If the test runs with `HALCYON_CPU_ISA`
    /// set, they respect the limit.
    #[test]
    fn the_requested_instruction_set_limits_every_query() {
        let used = IsaLevel::used();
        assert!(IsaLevel::available().contains(&used) && limit().is_ok());
        let best = Isa::best();
        assert_eq!(Isa::available().last(), Some(&best));
        if !cfg!(feature = "simd") {
            return;
        }
        assert_eq!(best == Isa::Portable, used < IsaLevel::Avx2);
        assert_eq!(best == Isa::Avx512, used >= IsaLevel::Avx512);
        for (has, step) in [
            (best.has_vnni(), IsaLevel::Avx512Vnni),
            (best.has_bf16(), IsaLevel::Avx512Bf16),
            (amx::available() != amx::Amx::default(), IsaLevel::Amx),
        ] {
            // A processor may support a level without a lower one. Kernels then use the instructions of the
            // higher level too, unless a limit excludes them.
            assert!(has || used < step, "{used:?} without {step:?}");
            if limit().unwrap().is_some_and(|l| l < step) {
                assert!(!has, "{step:?} beyond the limit {used:?}");
            }
        }
        assert!(!best.has_bf16_tiles() || used == IsaLevel::Amx);
    }
}
