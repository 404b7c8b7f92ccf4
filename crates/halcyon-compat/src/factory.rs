//! Backends by vendor name, with a common interface to query their devices and memory and to prepare models.
//!
//! ```
//! use halcyon_compat::factory::*;
//! # fn main() -> halcyon::Result<()> {
//! let backend = BackendFactory::create("cpu", None)?;
//! assert_eq!((backend.backend_name(), backend.device_type().as_str()), ("cpu", "cpu"));
//! println!("{:?} MiB allocated", backend.get_memory_stats().allocated_mb());
//!
//! let model = halcyon_nn::Linear::new(&backend, 4, 2)?;
//! let model = backend.prepare_model(model, "balanced")?;
//! let model = backend.optimize_for_inference(model, None, None)?;
//! let x = halcyon::Tensor::ones(&backend, [1, 4], halcyon::DType::F32);
//! assert_eq!(model.forward(&x)?.dims()?.as_slice(), [1, 2]);
//! # Ok(())
//! # }
//! ```

mod direct;
mod models;

pub use direct::{AmdBackend, CpuBackend, IntelBackend, NvidiaBackend, TpuBackend};
pub use halcyon::prepare::{Metrics, OptimizationResult, Scope, Strategy, levels};
pub use halcyon_nn::{Inference, Prepared};
pub use models::{
    Dictionary, ForInference, ForTraining, LevelName, Movable, OfModule, OfPrepared, OfSession, OfTensor,
    Optimizer, PrepareModel, get_optimizer,
};

use halcyon::hal::select::BackendReport;
use halcyon::hal::{registry, select};
use halcyon::{
    Backend, BackendBuilder, BackendType, DType, DeviceInfo, Error, Fallback, Level, MemoryStats, Policy,
    Result,
};
use halcyon_nn::TrainingOptimizer;
use serde::Serialize;
use std::collections::BTreeMap;

/// Optimisation levels, under the name that this interface has for them.
pub use halcyon::Level as OptimizationLevel;

/// Backends by vendor name, such as `BackendType::NVIDIA`, when this trait is in scope.
pub trait Vendors {
    const NVIDIA: BackendType = BackendType::Cuda;
    const AMD: BackendType = BackendType::Rocm;
}

impl Vendors for BackendType {}

/// Options of [`BackendFactory::create`] and [`get_backend`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BackendConfig {
    /// The optimisation level.
    pub level: Level,
    /// Index of the device; `None` for the first.
    pub device_id: Option<usize>,
    /// Hard cap on the device's memory, in bytes.
    pub memory_limit: Option<u64>,
    /// Number of threads of the CPU device.
    pub num_threads: Option<usize>,
}

/// The name of a backend: a [`BackendType`], or any of its names as text.
pub trait BackendName {
    /// # Errors
    /// [`Error::Argument`] if the name is unknown.
    fn backend_type(&self) -> Result<BackendType>;
}

impl BackendName for BackendType {
    fn backend_type(&self) -> Result<BackendType> {
        Ok(*self)
    }
}

impl BackendName for &str {
    fn backend_type(&self) -> Result<BackendType> {
        self.parse()
    }
}

impl BackendName for String {
    fn backend_type(&self) -> Result<BackendType> {
        self.parse()
    }
}

/// The order of `auto` in this module: NVIDIA, AMD, Google, Intel, CPU.
fn vendors() -> Result<Policy> {
    "vendors".parse()
}

/// Information about a backend, obtained without opening it.
#[derive(Clone, Debug, Serialize)]
pub struct BackendInfo {
    /// Whether it has a device.
    pub available: bool,
    #[serde(rename = "type")]
    pub backend: BackendType,
    pub devices: Vec<DeviceInfo>,
    /// Why it is not available; `None` if it is.
    pub reason: Option<String>,
}

/// The builder for a backend with options.
fn builder(kind: BackendType, c: BackendConfig) -> Result<BackendBuilder> {
    let mut b = Backend::builder().backend_type(kind).level(c.level);
    // An order applies only to `auto`.
    if kind == BackendType::Auto {
        b = b.policy(vendors()?);
    }
    if let Some(i) = c.device_id {
        b = b.device(i);
    }
    if let Some(n) = c.memory_limit {
        b = b.memory_limit(n);
    }
    if let Some(n) = c.num_threads {
        b = b.num_threads(n);
    }
    Ok(b)
}

/// Opens backends.
#[derive(Clone, Copy, Debug)]
pub struct BackendFactory;

impl BackendFactory {
    /// Opens a backend by type or name; `auto` opens the first available of NVIDIA, AMD, TPU, Intel and CPU.
    ///
    /// # Errors
    /// [`Error::Argument`] if the name is unknown; the errors of [`halcyon::BackendBuilder::build`].
    pub fn create(backend: impl BackendName, config: Option<BackendConfig>) -> Result<Backend> {
        builder(backend.backend_type()?, config.unwrap_or_default())?.build()
    }

    /// Whether a backend has a device on this machine.
    ///
    /// # Errors
    /// [`Error::Argument`] if the name is unknown.
    pub fn is_available(backend: impl BackendName) -> Result<bool> {
        let kind = backend.backend_type()?;
        if kind == BackendType::Auto {
            return Ok(!Backend::available().is_empty());
        }
        Ok(registry::driver(kind).and_then(|d| d.list()).is_ok_and(|d| !d.is_empty()))
    }

    /// Every backend by vendor name (`nvidia`, `amd`, …), with its devices or the reason that it has none.
    pub fn get_all_backend_info() -> BTreeMap<&'static str, BackendInfo> {
        let info = |r: BackendReport| {
            let name = vendor_name(r.id);
            (
                name,
                BackendInfo { available: r.available, backend: r.id, devices: r.devices, reason: r.reason },
            )
        };
        select::discover().into_iter().map(info).collect()
    }
}

/// The vendor's name (`nvidia`), or the backend's: for TPU, Metal, registered backends, and backends that are
/// not of one vendor.
fn vendor_name(b: BackendType) -> &'static str {
    match b {
        BackendType::Tpu => "tpu",
        BackendType::Metal => "metal",
        BackendType::Other(r) => r.id,
        b => b.vendor(),
    }
}

/// Opens a backend by name, with options; without a name, the best one.
///
/// # Errors
/// The errors of [`BackendFactory::create`].
pub fn get_backend(name: Option<&str>, config: Option<BackendConfig>) -> Result<Backend> {
    BackendFactory::create(name.unwrap_or("auto"), config)
}

/// The backend that `auto` chooses, by vendor name: `nvidia`, `amd`, `tpu`, `intel` or `cpu`.
///
/// # Errors
/// The errors of [`BackendFactory::create`].
pub fn detect_best_backend() -> Result<&'static str> {
    Ok(vendor_name(get_backend(None, None)?.selection().device.backend))
}

/// The name of the best backend's GPU stack: the first available of `cuda`, `rocm`, `xpu`, `tpu` and `cpu`.
///
/// # Errors
/// The errors of [`BackendFactory::create`].
pub fn detect_best_runtime() -> Result<&'static str> {
    use BackendType::*;
    let order = Policy::of(&[Cuda, Rocm, Intel, Tpu, Cpu])?;
    let b = Backend::builder().policy(order).fallback(Fallback::Next).build()?;
    Ok(match b.selection().device.backend {
        Intel => "xpu",
        b => b.id(),
    })
}

/// Vendor names of the backends that have a device.
pub fn list_available_backends() -> Vec<&'static str> {
    Backend::available().into_iter().map(vendor_name).collect()
}

/// The description of a device in this interface.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StandardDeviceInfo {
    /// The vendor's name: `nvidia`, `cpu`.
    pub backend: &'static str,
    /// PyTorch's name of the device (`cuda:0`) if it has one, else Halcyon's.
    pub device_type: String,
    /// Index among the backend's devices.
    pub device_id: usize,
    pub device_name: String,
    /// Compute capability, if the driver reports one.
    pub compute_capability: Option<String>,
    /// `None` if the driver does not report it.
    pub total_memory_bytes: Option<u64>,
    /// Free memory; `None` if the driver does not report it.
    pub available_memory_bytes: Option<u64>,
    pub driver_version: Option<String>,
    pub is_available: bool,
    /// Dtypes that its kernels load and store.
    pub supported_dtypes: Vec<DType>,
    /// Properties that the driver reports, and two more: `fp8_supported` (whether the device multiplies 8-bit
    /// floats: `true`, `false` or `unknown`) and `f16_arithmetic`.
    pub properties: BTreeMap<String, String>,
}

impl StandardDeviceInfo {
    fn of(b: &Backend) -> StandardDeviceInfo {
        let (d, caps) = (b.info(), b.device().as_target().caps());
        let mut properties = d.properties.clone();
        let fp8 = caps.f8_products.map_or("unknown".into(), |yes| yes.to_string());
        properties.insert("fp8_supported".into(), fp8);
        properties.insert("f16_arithmetic".into(), caps.f16_arithmetic.to_string());
        StandardDeviceInfo {
            backend: vendor_name(d.backend),
            device_type: d.torch_device().unwrap_or_else(|| d.id.clone()),
            device_id: d.index,
            device_name: d.name.clone(),
            compute_capability: d.compute_capability.clone(),
            total_memory_bytes: d.total_memory,
            available_memory_bytes: b.device().free_memory(),
            driver_version: d.driver_version.clone(),
            is_available: true,
            supported_dtypes: b.supported_dtypes().to_vec(),
            properties,
        }
    }

    /// Total memory in GiB (1024³ bytes).
    pub fn total_memory_gb(&self) -> Option<f64> {
        self.total_memory_bytes.map(|b| b as f64 / (1u64 << 30) as f64)
    }

    /// Total memory in MiB (1024² bytes).
    pub fn total_memory_mb(&self) -> Option<f64> {
        self.total_memory_bytes.map(|b| b as f64 / (1u64 << 20) as f64)
    }

    /// Free memory in GiB (1024³ bytes).
    pub fn available_memory_gb(&self) -> Option<f64> {
        self.available_memory_bytes.map(|b| b as f64 / (1u64 << 30) as f64)
    }

    /// All fields by name, plus `total_memory_gb`.
    ///
    /// # Errors
    /// [`Error::Internal`] if it cannot be converted to JSON.
    pub fn to_dict(&self) -> Result<serde_json::Value> {
        let mut v = serde_json::to_value(self).map_err(|e| Error::internal(e.to_string()))?;
        v["total_memory_gb"] = self.total_memory_gb().into();
        Ok(v)
    }
}

/// What every backend does: answer queries, move data, and prepare models.
///
/// A model is a module of `halcyon-nn`, a [`halcyon::Session`] or an imported ONNX model.
pub trait BaseBackend {
    /// The vendor's name: `nvidia`, `amd`, `tpu`, `intel`, `cpu`.
    fn backend_name(&self) -> &'static str;
    /// PyTorch's name of the device (`cuda:0`) if it has one, else Halcyon's.
    fn device_type(&self) -> String;
    /// Whether the device responds.
    fn is_available(&self) -> bool;
    /// Number of devices of this backend.
    fn device_count(&self) -> usize;
    /// Information about one of this backend's devices; `None` for the open one.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if there is no such device.
    fn get_device_info(&self, device_id: Option<usize>) -> Result<StandardDeviceInfo>;
    /// Memory use in bytes; `allocated_mb()` and `free_mb()` return MiB (1024² bytes).
    fn get_memory_stats(&self) -> MemoryStats;
    /// Like [`BaseBackend::get_device_info`], but returns a dictionary, as earlier versions of this interface
    /// did.
    ///
    /// # Errors
    /// The errors of [`BaseBackend::get_device_info`].
    #[deprecated(note = "use `get_device_info`, and `to_dict` for a dictionary")]
    fn get_device_info_dict(&self, device_id: Option<usize>) -> Result<serde_json::Value> {
        self.get_device_info(device_id)?.to_dict()
    }
    /// Moves a tensor or a module to this backend. For a tensor, returns its copy on this backend, or the
    /// tensor itself if it is already there. For a module, moves all its parameters and buffers.
    ///
    /// # Errors
    /// Errors of evaluating and copying.
    fn to_device<K, T: Movable<K> + ?Sized>(&self, what: &T) -> Result<T::Moved>;
    /// Prepares a model for this backend at a level. `level` is an [`OptimizationLevel`], its name or alias,
    /// or `None` for the backend's own level.
    ///
    /// # Errors
    /// [`Error::Argument`] for an unknown level, [`Error::Unsupported`] for one that is not supported; errors
    /// of moving the model.
    fn prepare_model<K, M: PrepareModel<K>>(&self, model: M, level: impl LevelName) -> Result<M::Prepared>;
    /// Compiles a model for inference. The weights of a module become constants. With a sample, the call
    /// makes the plan and runs it once. With a dtype, products and convolutions compute in that dtype. A
    /// module that is not prepared gets the backend's level; other models keep their level.
    ///
    /// # Errors
    /// [`Error::Argument`] for a dtype other than f32, bf16 and f16, for bf16 or f16 below level O2, and at
    /// level O3 without a sample; [`Error::Unsupported`] for a dtype that the device does not support; errors
    /// of the model and the device.
    fn optimize_for_inference<K, M: ForInference<K>>(
        &self,
        model: M,
        sample: Option<&M::Sample>,
        dtype: Option<DType>,
    ) -> Result<M::Optimized>;
    /// Prepares a module for training on this backend. Returns it together with the optimizer, if one is
    /// given instead of `()`. With a dtype, products and convolutions of training steps compute in that
    /// dtype. A module that is not prepared gets the backend's level; a module that does not implement
    /// `Forward` must be prepared first.
    ///
    /// # Errors
    /// The errors of [`BaseBackend::optimize_for_inference`].
    fn optimize_for_training<K, M: ForTraining<K>, O: TrainingOptimizer>(
        &self,
        model: M,
        optimizer: O,
        dtype: Option<DType>,
    ) -> Result<O::With<M::Module>>;
    /// Replaces this backend by another device with the same settings.
    ///
    /// # Errors
    /// Errors of opening the device; the backend then stays unchanged.
    fn set_device(&mut self, device_id: usize) -> Result<()>;
}

impl BaseBackend for Backend {
    fn backend_name(&self) -> &'static str {
        vendor_name(self.info().backend)
    }

    fn device_type(&self) -> String {
        self.info().torch_device().unwrap_or_else(|| self.id().into())
    }

    fn is_available(&self) -> bool {
        // Synchronise only the device, so that a kernel's fault is still reported to the reader of its
        // result.
        self.device().synchronize().is_ok()
    }

    fn device_count(&self) -> usize {
        let kind = self.info().backend;
        registry::driver(kind).and_then(|d| d.list()).map_or(0, |d| d.len())
    }

    fn get_device_info(&self, device_id: Option<usize>) -> Result<StandardDeviceInfo> {
        match device_id.filter(|i| *i != self.info().index) {
            None => Ok(StandardDeviceInfo::of(self)),
            Some(i) => Ok(StandardDeviceInfo::of(&self.on_device(i)?)),
        }
    }

    fn get_memory_stats(&self) -> MemoryStats {
        self.memory()
    }

    fn to_device<K, T: Movable<K> + ?Sized>(&self, what: &T) -> Result<T::Moved> {
        what.moved(self)
    }

    fn prepare_model<K, M: PrepareModel<K>>(&self, model: M, level: impl LevelName) -> Result<M::Prepared> {
        model.prepared(self, level.level(self)?)
    }

    fn optimize_for_inference<K, M: ForInference<K>>(
        &self,
        model: M,
        sample: Option<&M::Sample>,
        dtype: Option<DType>,
    ) -> Result<M::Optimized> {
        model.for_inference(self, sample, dtype)
    }

    fn optimize_for_training<K, M: ForTraining<K>, O: TrainingOptimizer>(
        &self,
        model: M,
        optimizer: O,
        dtype: Option<DType>,
    ) -> Result<O::With<M::Module>> {
        halcyon_nn::prepare::optimize_for_training(model.for_training(self)?, optimizer, dtype)
    }

    fn set_device(&mut self, device_id: usize) -> Result<()> {
        if device_id != self.info().index {
            *self = self.on_device(device_id)?;
        }
        Ok(())
    }
}
