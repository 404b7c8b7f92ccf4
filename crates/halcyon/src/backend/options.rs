//! The effect of a backend's options on the device that was opened. No option is ignored silently: each takes
//! effect, is rejected with an error, or causes a warning here
//! ([`Backend::warnings`](super::Backend::warnings)).

use super::settings::Settings;
use halcyon_hal::policy::Fallback;
use halcyon_hal::select::Selection;
use halcyon_hal::tune::TuningMode;
use halcyon_hal::{BackendType, Device};
use halcyon_ir::error::{Error, Result};
use halcyon_ir::kernel::MatrixType;
use halcyon_ir::passes::{self, AmpPolicy, Level, autocast::KeptInF32};
use halcyon_ir::target::MatmulPrecision;

/// Rejects options that contradict each other or are invalid on every device.
///
/// # Errors
/// [`Error::Argument`] with the option's name.
pub(super) fn check(b: &Settings, amp: AmpPolicy) -> Result<()> {
    if b.options.threads == Some(0) {
        return Err(Error::argument("threads", "at least one thread is needed"));
    }
    if let Some(name) = b.without.iter().find(|n| !passes::ALL.contains(&n.as_str())) {
        let all = passes::ALL.join(", ");
        return Err(Error::argument(
            "without",
            format!("\"{name}\" is not a transformation; the transformations are {all}"),
        ));
    }
    if b.tensor_cores == Some(false) && b.precision.is_some_and(|p| p != MatmulPrecision::Highest) {
        let what = "tensor cores are switched off, and a precision below highest is requested; leave one out";
        return Err(Error::argument("enable_tensor_cores", what));
    }
    if let Some(s) = b.loss_scale.filter(|s| !(s.is_finite() && *s > 0.0)) {
        let what = format!("the scale {s} of the loss is not a positive number");
        return Err(Error::argument("loss_scale", what));
    }
    if b.force_amp && amp == AmpPolicy::None {
        let what = "mixed precision is not requested; add amp(AmpPolicy::Bf16) (--precision bf16)";
        return Err(Error::argument("force_amp (--force-precision)", what));
    }
    Ok(())
}

/// The requested precision. If none is requested but tensor cores are enabled, the precision that this
/// implies: TF32, or on the CPU bf16, because the CPU has no TF32. Otherwise `Highest`.
pub(super) fn precision(b: &Settings, d: &dyn Device) -> MatmulPrecision {
    let kind = b.backend.filter(|k| *k != BackendType::Auto).unwrap_or(d.info().backend);
    match (b.precision, b.tensor_cores) {
        (Some(p), _) => p,
        (None, Some(true)) if kind == BackendType::Cpu => MatmulPrecision::Medium,
        (None, Some(true)) => MatmulPrecision::High,
        (None, _) => MatmulPrecision::Highest,
    }
}

/// Whether f32 products are faster on the device at this precision than at `Highest`.
pub(crate) fn gains(d: &dyn Device, precision: MatmulPrecision) -> bool {
    let tf32 = d.as_target().caps().matrix.iter().any(|o| o.operand == MatrixType::Tf32);
    let bf16 = d.info().properties.get("bf16_products").is_some_and(|code| code != "f32");
    match precision {
        MatmulPrecision::Highest => false,
        MatmulPrecision::High => tf32,
        MatmulPrecision::Medium => tf32 || bf16,
    }
}

/// Whether products of bf16 are expected to be faster than those of f32 on the device.
pub(crate) fn bf16_is_faster(d: &dyn Device) -> bool {
    let matrix = d.as_target().caps().matrix.iter().any(|o| o.operand == MatrixType::BF16);
    matrix || d.info().properties.get("bf16_products").is_some_and(|code| code != "f32")
}

/// A warning if an order of backends was given but not used. The order is used for `auto`, and for the
/// fallback from a backend that is requested by name.
pub(super) fn unused_order(b: &Settings, s: &Selection) -> Option<String> {
    let named = b.backend.is_some_and(|k| k != BackendType::Auto);
    let unused = b.policy.is_some() && named && s.fallback != Fallback::Next;
    unused.then(|| {
        let (id, kind) = (&s.device.id, s.requested);
        format!(
            "policy (--backends) has no effect on {id}: {kind} was requested by name, and the fallback is {}",
            s.fallback
        )
    })
}

/// One line for each option that was set and has no effect on the device, and for each kind of work that
/// stays in f32 despite the mixed-precision policy.
pub(super) fn warnings(b: &Settings, d: &dyn Device, amp: AmpPolicy, kept: &KeptInF32) -> Vec<String> {
    let (id, cpu) = (&d.info().id, d.info().backend == BackendType::Cpu);
    let mut all = vec![];
    let mut warn = |option: &str, why: String| all.push(format!("{option} has no effect on {id}: {why}"));
    if !cpu && b.options.threads.is_some() {
        warn("num_threads (--threads)", "it sets the threads of the CPU device".into());
    }
    if !cpu && b.options.simd.is_some() {
        warn("enable_simd", "it chooses instruction sets of the CPU device".into());
    }
    let o2 = b.level >= Level::O2;
    let precision = precision(b, d);
    let name = match b.precision {
        Some(_) => format!("matmul precision {precision}"),
        None => "enable_tensor_cores(true)".into(),
    };
    if precision != MatmulPrecision::Highest {
        let halves = match d.as_target().caps().matrix.is_empty() {
            true => "",
            false => "; f16 and bf16 products use matrix units at every precision",
        };
        match (o2, gains(d, precision)) {
            (false, _) => warn(&name, format!("it needs level O2, and the level is {}", b.level)),
            (true, false) => {
                warn(&name, format!("f32 products are not faster there at lower precision{halves}"))
            }
            _ => {}
        }
    }
    let tiles = d.info().properties.get("bf16_products").is_some_and(|c| c.starts_with("amx"));
    if b.tensor_cores == Some(false) && tiles {
        warn("enable_tensor_cores(false)", "bf16 products always use the processor's tile registers".into());
    }
    if b.keep_packed == Some(true) && !cpu {
        warn("keep_packed", "only the CPU device packs constants".into());
    }
    #[cfg(not(target_arch = "wasm32"))]
    if b.keep_packed == Some(true)
        && cpu
        && b.options.cache_dir.is_none()
        && halcyon_hal::cache::user_dir().is_none()
    {
        warn("keep_packed", "there is no cache directory (HALCYON_CACHE is off, or no home is known)".into());
    }
    if !o2
        && matches!(b.tuning, Some(TuningMode::Background | TuningMode::Budget(_) | TuningMode::Exhaustive))
    {
        warn("tuning", format!("tuned kernels need level O2, and the level is {}", b.level));
    }
    if b.algorithm_search == Some(true) {
        match (o2, d.searches_algorithms()) {
            (false, _) => {
                warn("enable_algorithm_search", format!("it needs level O2, and the level is {}", b.level))
            }
            (true, Err(why)) => warn("enable_algorithm_search", why),
            (true, Ok(())) => {}
        }
    }
    let searches = b.algorithm_search == Some(true) && o2;
    if b.tuning == Some(TuningMode::Off) && b.tuning_file.is_some() && !searches {
        warn(
            "autotuning_cache_file (--tuning-cache)",
            "tuning is off, so the file is neither read nor written".into(),
        );
    }
    if b.options.host_limit.is_some() && matches!(d.alloc_host(0), Err(Error::Unsupported { .. })) {
        warn("host_limit", "it uses no host memory for copies".into());
    }
    if b.memory > 0 && d.available().is_none() {
        warn("memory_needed", "its driver does not report its memory, and no limit is set".into());
    }
    if amp != AmpPolicy::None && !o2 {
        warn(
            &format!("mixed precision in {amp}"),
            format!("it needs level O2, and the level is {}", b.level),
        );
    }
    if let Some(low) = amp.dtype() {
        all.extend(kept.describe(low));
    }
    all
}
