//! Resolves a device by name, configures it for training, and chooses a mixed-precision policy.
//!
//! ```
//! use halcyon_compat::training::{configure_backend, resolve_amp_config, resolve_device};
//! # fn main() -> Result<(), halcyon_compat::BackendError> {
//! let device = resolve_device("cpu")?;
//! let configured = configure_backend("cpu", &device, false)?;
//! assert_eq!(configured.backend.id(), "cpu:0");
//! assert!(!resolve_amp_config(&device).enabled);
//! # Ok(())
//! # }
//! ```

use crate::BackendError;
use halcyon::hal::{Driver, registry};
use halcyon::summary::gigabytes;
use halcyon::{
    AmpPolicy, Backend, BackendBuilder, BackendType, DType, DeviceInfo, Error, Fallback, MatmulPrecision,
};
use serde::Serialize;
use std::fmt;
use std::sync::Arc;

/// The order in which `auto` tries backends: it takes the first that has a device. ROCm follows CUDA, because
/// PyTorch calls both `cuda`.
pub const AUTO_ORDER: [BackendType; 4] =
    [BackendType::Cuda, BackendType::Rocm, BackendType::Metal, BackendType::Cpu];

/// The GPU stack that `b` is often confused with.
fn twin(b: BackendType) -> Option<BackendType> {
    match b {
        BackendType::Cuda => Some(BackendType::Rocm),
        BackendType::Rocm => Some(BackendType::Cuda),
        _ => None,
    }
}

fn first_device(b: BackendType) -> Result<DeviceInfo, Error> {
    let driver: Arc<dyn Driver> = registry::driver(b)?;
    driver.probe()?.into_iter().next().ok_or_else(|| Error::Unavailable {
        backend: b.id().into(),
        tried: vec![],
        reason: "the driver lists no device".into(),
        fix: "Use \"auto\" or \"cpu\"".into(),
    })
}

/// Resolves a name to a device: `auto` is the first available backend in [`AUTO_ORDER`]; the name of a
/// backend is that backend's first device. The result is the same at each call on a machine.
///
/// # Errors
/// [`BackendErrorKind::UnknownValue`](crate::BackendErrorKind) for an unknown name; `Mismatch` for `cuda` on
/// a machine that has ROCm but no CUDA, and vice versa; `MissingRuntime` if the backend has no device.
pub fn resolve_device(name: &str) -> Result<DeviceInfo, BackendError> {
    let asked: BackendType = name.parse().map_err(BackendError::from)?;
    if asked == BackendType::Auto {
        let mut last = Error::internal("an empty order");
        for b in AUTO_ORDER {
            match first_device(b) {
                Ok(d) => return Ok(d),
                Err(e) => last = e,
            }
        }
        return Err(last.into());
    }
    first_device(asked).map_err(|e| match twin(asked).filter(|t| first_device(*t).is_ok()) {
        Some(there) => {
            let reason = format!("the GPU stack of this machine is {}", there.title());
            BackendError::mismatch(asked, there, reason)
        }
        None => e.into(),
    })
}

/// The settings of a device for training.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Tuning {
    /// Whether products may be computed in TF32.
    pub tf32: bool,
    /// How exact f32 matrix products are, in the backend's kernels and library calls.
    pub matmul_precision: MatmulPrecision,
    /// Whether the algorithms that the vendor's libraries list for a product or a convolution are measured,
    /// and the fastest is kept in the tuning cache.
    pub algorithm_search: bool,
}

/// TF32 requires compute capability 8.0.
fn has_tf32(d: &DeviceInfo) -> bool {
    let major = d.compute_capability.as_deref().and_then(|c| c.split('.').next()?.parse::<u32>().ok());
    d.backend == BackendType::Cuda && major.is_some_and(|m| m >= 8)
}

/// The settings for a device. CUDA, ROCm and Metal devices get [`MatmulPrecision::High`]; this allows TF32,
/// which only CUDA devices with compute capability 8.0 or later have. On other CUDA devices, on ROCm and on
/// Metal, products are as exact as at [`MatmulPrecision::Highest`]. Devices of other backends stay at
/// `MatmulPrecision::Highest`. CUDA devices search algorithms.
pub fn tuning(d: &DeviceInfo) -> Tuning {
    let high = matches!(d.backend, BackendType::Cuda | BackendType::Rocm | BackendType::Metal);
    Tuning {
        tf32: has_tf32(d),
        matmul_precision: if high { MatmulPrecision::High } else { MatmulPrecision::Highest },
        algorithm_search: d.backend == BackendType::Cuda,
    }
}

/// A backend opened with the settings of [`tuning`], and its description.
#[derive(Clone, Debug)]
pub struct Configured {
    pub backend: Backend,
    /// The name as requested.
    pub requested: String,
    pub tuning: Tuning,
}

/// Opens a resolved device with the settings for its kind. `verbose` prints its description, which is also
/// the displayed text of [`Configured`]. The description has the versions of the vendor's libraries and of
/// the run-time compiler, so it loads the libraries.
///
/// # Errors
/// The errors of [`resolve_device`]; `Mismatch` if `name` is another backend than the device's; errors of
/// opening the device.
pub fn configure_backend(name: &str, device: &DeviceInfo, verbose: bool) -> Result<Configured, BackendError> {
    let asked: BackendType = name.parse().map_err(BackendError::from)?;
    if asked != BackendType::Auto && asked != device.backend {
        let reason = format!("the given device is {}", device.id);
        return Err(BackendError::mismatch(asked, device.backend, reason));
    }
    let tuning = tuning(device);
    let b = Backend::builder().backend_type(device.backend).device(device.index).fallback(Fallback::Never);
    let b = b.precision(tuning.matmul_precision).enable_algorithm_search(tuning.algorithm_search);
    let backend = b.build()?;
    let c = Configured { backend, requested: name.into(), tuning };
    if verbose {
        println!("{c}");
    }
    Ok(c)
}

impl fmt::Display for Configured {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let d = self.backend.info();
        let known = |s: &Option<String>| s.clone().unwrap_or_else(|| "not reported by the driver".into());
        // TF32 is used only if the device has it and the precision allows it.
        let tf32 = has_tf32(d) && self.backend.lower_options().precision > MatmulPrecision::Highest;
        let m = self.backend.memory();
        writeln!(f, "backend requested: {}", self.requested)?;
        writeln!(f, "backend resolved:  {} ({})", d.backend, d.id)?;
        writeln!(f, "halcyon:           {}", env!("CARGO_PKG_VERSION"))?;
        writeln!(f, "driver:            {}", known(&d.driver_version))?;
        for (name, found) in self.backend.device().kernel_libraries() {
            writeln!(f, "{:<18} {found}", format!("{name}:"))?;
        }
        writeln!(f, "device:            {}", d.name)?;
        writeln!(f, "capability:        {}", known(&d.compute_capability))?;
        writeln!(
            f,
            "memory total:      {}",
            d.total_memory.map_or("not reported by the driver".into(), gigabytes)
        )?;
        writeln!(f, "memory allocated:  {}", gigabytes(m.allocated))?;
        writeln!(f, "memory reserved:   {}", gigabytes(m.allocated + m.cached))?;
        writeln!(f, "TF32:              {}", if tf32 { "on" } else { "off" })?;
        writeln!(f, "matmul precision:  {:?}", self.tuning.matmul_precision)?;
        // If it was requested without effect, `Backend::warnings` has the reason.
        write!(f, "algorithm search:  {}", if self.backend.searches_algorithms() { "on" } else { "off" })
    }
}

/// The mixed-precision policy for a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct AmpConfig {
    pub enabled: bool,
    /// The dtype that autocast computes in; `None` if it is disabled.
    pub dtype: Option<DType>,
    /// Whether gradients should be scaled, because f16 has a small range.
    pub use_grad_scaler: bool,
}

impl AmpConfig {
    /// The settings for opening a backend with this policy. With gradient scaling, training steps of
    /// `halcyon-nn` on that backend begin with a scale of 65536.
    ///
    /// # Errors
    /// [`BackendErrorKind`](crate::BackendErrorKind)`::Unsupported` if mixed precision is enabled and the
    /// dtype is neither f16 nor bf16.
    pub fn apply(&self, builder: BackendBuilder) -> Result<BackendBuilder, BackendError> {
        let policy = match self.dtype.filter(|_| self.enabled) {
            None => AmpPolicy::None,
            Some(DType::F16) => AmpPolicy::F16,
            Some(DType::BF16) => AmpPolicy::Bf16,
            Some(d) => {
                let what = format!("mixed precision in {d}");
                return Err(Error::unsupported(what, "Use F16 or BF16").into());
            }
        };
        let builder = builder.amp(policy);
        Ok(if self.use_grad_scaler { builder.loss_scale(65536.0) } else { builder })
    }
}

/// Mixed precision in f16 on CUDA, ROCm and Metal, with gradient scaling on CUDA and ROCm; no mixed precision
/// on other devices.
pub fn resolve_amp_config(device: &DeviceInfo) -> AmpConfig {
    let (enabled, use_grad_scaler) = match device.backend {
        BackendType::Cuda | BackendType::Rocm => (true, true),
        BackendType::Metal => (true, false),
        _ => (false, false),
    };
    AmpConfig { enabled, dtype: enabled.then_some(DType::F16), use_grad_scaler }
}

/// Execution providers of ONNX Runtime by backend: the first name that is available serves the backend. The
/// order is that of `auto`.
const PROVIDERS: [(BackendType, &[&str]); 4] = [
    (BackendType::Cuda, &["CUDAExecutionProvider"]),
    // MIGraphX takes ROCm's place from ONNX Runtime 1.23 on.
    (BackendType::Rocm, &["ROCMExecutionProvider", "MIGraphXExecutionProvider"]),
    (BackendType::Metal, &["CoreMLExecutionProvider"]),
    (BackendType::Cpu, &[CPU_PROVIDER]),
];
const CPU_PROVIDER: &str = "CPUExecutionProvider";

/// The execution providers of ONNX Runtime for a backend, the preferred first. `available` are the providers
/// that a build of ONNX Runtime has. `auto` takes the first that is available of CUDA, ROCm (or MIGraphX),
/// CoreML and the CPU. The CPU's provider is always last, because others do not run every operator.
///
/// ```
/// use halcyon_compat::training::resolve_ort_providers;
/// # fn main() -> Result<(), halcyon_compat::BackendError> {
/// let available = ["CUDAExecutionProvider", "CPUExecutionProvider"];
/// assert_eq!(resolve_ort_providers("auto", &available)?, available);
/// assert_eq!(resolve_ort_providers("cpu", &available)?, ["CPUExecutionProvider"]);
/// assert!(resolve_ort_providers("rocm", &available).is_err());
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// [`BackendErrorKind::UnknownValue`](crate::BackendErrorKind) for an unknown name; `Mismatch` for `cuda`
/// where `rocm` is available, and vice versa; `UnavailableProvider` if the backend's provider is not
/// available; `Unsupported` for a backend that has no provider here.
pub fn resolve_ort_providers(
    name: &str,
    available: &[impl AsRef<str>],
) -> Result<Vec<&'static str>, BackendError> {
    let asked: BackendType = name.parse().map_err(BackendError::from)?;
    let has = |p: &&&str| available.iter().any(|a| a.as_ref() == **p);
    let of = |b: BackendType| PROVIDERS.iter().find(|(k, _)| *k == b).map(|(_, names)| *names);
    let first = |b: BackendType| of(b).and_then(|names| names.iter().find(has).copied());
    let found = match asked {
        BackendType::Auto => PROVIDERS.iter().find_map(|(b, _)| first(*b)).unwrap_or(CPU_PROVIDER),
        b => {
            let Some(names) = of(b) else {
                let what = format!("an execution provider for {}", b.title());
                return Err(Error::unsupported(
                    what,
                    "Use \"auto\", \"cuda\", \"rocm\", \"metal\" or \"cpu\"",
                )
                .into());
            };
            // ONNX Runtime has the CPU's provider in every build.
            match first(b).or((b == BackendType::Cpu).then_some(CPU_PROVIDER)) {
                Some(found) => found,
                None => {
                    return Err(match twin(b).filter(|t| first(*t).is_some()) {
                        Some(there) => {
                            let reason = format!("this ONNX Runtime is a build for {}", there.title());
                            BackendError::mismatch(b, there, reason)
                        }
                        None => BackendError::no_provider(b, names, available),
                    });
                }
            }
        }
    };
    let more = (found != CPU_PROVIDER).then_some(CPU_PROVIDER);
    Ok(std::iter::once(found).chain(more).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tf32_depends_on_the_compute_capability() {
        let cpu = first_device(BackendType::Cpu).unwrap();
        let of = |backend, capability: Option<&str>| {
            tuning(&DeviceInfo { backend, compute_capability: capability.map(String::from), ..cpu.clone() })
                .tf32
        };
        for (capability, want) in [
            (None, false),
            (Some("7.5"), false),
            (Some("8.0"), true),
            (Some("9.0"), true),
            (Some("12.0"), true),
        ] {
            assert_eq!(of(BackendType::Cuda, capability), want, "{capability:?}");
        }
        assert!(!of(BackendType::Rocm, Some("9.4")) && !of(BackendType::Cpu, None));
    }
}
