//! `BackendBuilder`: the settings of a backend, and how a device is opened with them.

use super::settings::Settings;
use super::{Backend, Parts, options};
use crate::constants::PackedCache;
use crate::planner::Lowering;
use crate::tune::Tuning;
use halcyon_hal::policy::{Fallback, Policy};
use halcyon_hal::select::{self, Request, Selection};
use halcyon_hal::tune::{self, AlgorithmSearch, TuningCache, TuningMode};
use halcyon_hal::{BackendType, Device, MemoryPoolConfig};
use halcyon_ir::Graph;
use halcyon_ir::error::{Error, Result};
use halcyon_ir::passes::autocast::{self, KeptInF32};
use halcyon_ir::passes::{AmpPolicy, Level, MIXED};
use halcyon_ir::target::MatmulPrecision;
use std::path::PathBuf;
use std::sync::Arc;

/// Settings for opening a [`Backend`].
#[derive(Clone, Debug, Default)]
pub struct BackendBuilder(Settings);

impl BackendBuilder {
    /// The backend to open; `Auto` if not set.
    pub fn backend_type(mut self, b: BackendType) -> Self {
        self.0.backend = Some(b);
        self
    }

    /// The index of the device among the backend's devices.
    pub fn device(mut self, index: usize) -> Self {
        self.0.device = Some(index);
        self
    }

    /// The order in which `Auto` tries backends. If not set: the environment variable `HALCYON_BACKENDS`,
    /// else the configuration file, else the built-in priorities ([`select`]).
    pub fn policy(mut self, order: Policy) -> Self {
        self.0.policy = Some(order);
        self
    }

    /// What to do if the requested backend is missing or has too little memory. If not set: `Never` for a
    /// backend requested by name, `Next` for `Auto`.
    pub fn fallback(mut self, f: Fallback) -> Self {
        self.0.fallback = Some(f);
        self
    }

    /// Bytes of free memory that the device must have. A device with less is rejected, and the selection
    /// report states how many bytes are missing.
    pub fn memory_needed(mut self, bytes: u64) -> Self {
        self.0.memory = bytes;
        self
    }

    /// The optimisation level: which graph passes and device kernels plans use.
    pub fn level(mut self, level: Level) -> Self {
        self.0.level = level;
        self
    }

    /// How exact f32 matrix products and convolutions must be, from level O2 on; below O2 they are always
    /// `Highest`. `High` and `Medium` let NVIDIA's libraries on `cuda` round the factors of products and
    /// convolutions to TF32. `Medium` lets the CPU round the factors of matrix products to bf16 (and flush
    /// denormals to zero) if the processor multiplies bf16 faster than f32; everything else is computed at
    /// `Highest`.
    pub fn precision(mut self, p: MatmulPrecision) -> Self {
        self.0.precision = Some(p);
        self
    }

    /// Whether matrix units (tensor cores) are used. `true`: factors of f32 products may be rounded for them,
    /// to TF32 if the device has it ([`MatmulPrecision::High`]), on the CPU to bf16 if that is faster
    /// ([`MatmulPrecision::Medium`]). `false`: CUDA and ROCm devices multiply no dtype on matrix units, and
    /// f32 stays exact. If not set, f16 and bf16 products use matrix units, and f32 products do not.
    /// [`BackendBuilder::precision`] takes precedence.
    pub fn enable_tensor_cores(mut self, on: bool) -> Self {
        self.0.tensor_cores = Some(on);
        self.0.options.matrix_units = Some(on);
        self
    }

    /// Mixed precision, from level O2 on: products and convolutions read and write the policy's dtype, and so
    /// do attention, norms and softmax if the device has kernels for them. Everything else computes in f32
    /// ([`autocast`]). Inputs, outputs and states keep their dtypes. Mixed precision also works for training:
    /// parameters stay f32. In f16, ops whose values come near the end of f16's range in the first run stay
    /// in f32, and a warning of the plan names them. If not set: the environment variable `HALCYON_PRECISION`
    /// (`f32`, `bf16`, `f16`), else [`AmpPolicy::None`].
    pub fn amp(mut self, policy: AmpPolicy) -> Self {
        self.0.amp = Some(policy);
        self
    }

    /// Uses the dtype of [`BackendBuilder::amp`] even where the processor is not clearly faster in it. If not
    /// set, the CPU device measures products and convolutions in f32 and in that dtype (once per processor).
    /// A kind of work that is not more than 10 % faster in that dtype stays in f32. A warning of the plan and
    /// [`Backend::warnings`] state the rates.
    pub fn force_amp(mut self, on: bool) -> Self {
        self.0.force_amp = on;
        self
    }

    /// The ops that take the dtype of [`BackendBuilder::amp`], by name: `matmul`, `conv`, `attention` and
    /// others ([`autocast`]). If not set, all ops that support the dtype.
    pub fn amp_only<S: Into<String>>(mut self, ops: impl IntoIterator<Item = S>) -> Self {
        self.0.mixed.only = Some(ops.into_iter().map(Into::into).collect());
        self
    }

    /// What stays in f32 under [`BackendBuilder::amp`]: names of ops, and places such as `model.rs:42`. A
    /// place also keeps the gradients of its ops in f32.
    pub fn amp_f32<S: Into<String>>(mut self, ops: impl IntoIterator<Item = S>) -> Self {
        self.0.mixed.f32 = ops.into_iter().map(Into::into).collect();
        self
    }

    /// The initial loss scale of training steps, by which the loss is multiplied so that small gradients do
    /// not vanish in f16. If not set: 65536 for steps with mixed precision in f16; other steps do not scale
    /// the loss.
    pub fn loss_scale(mut self, scale: f64) -> Self {
        self.0.loss_scale = Some(scale);
        self
    }

    pub(super) fn loss_scale_set(&self) -> Option<f64> {
        self.0.loss_scale
    }

    /// The work that stays in f32 under a policy on this device.
    pub(super) fn kept_now(mut self, device: &dyn Device, amp: AmpPolicy) -> KeptInF32 {
        self.0.amp_kept = None;
        self.kept_in_f32(device, amp)
    }

    /// Sets the kinds of work that stay in f32, without measuring.
    pub(crate) fn amp_kept(mut self, kept: KeptInF32) -> Self {
        self.0.amp_kept = Some(kept);
        self
    }

    /// Number of threads of the CPU device, including the calling thread.
    pub fn num_threads(mut self, n: usize) -> Self {
        self.0.options.threads = Some(n);
        self
    }

    /// Whether the CPU device uses instruction sets beyond the target's baseline (AVX2, AVX-512). If not set,
    /// it uses them.
    pub fn enable_simd(mut self, on: bool) -> Self {
        self.0.options.simd = Some(on);
        self
    }

    /// Whether a CUDA device uses cuDNN. `true`: opening fails if cuDNN is missing. If not set, cuDNN is used
    /// if it is found.
    pub fn enable_cudnn(mut self, on: bool) -> Self {
        self.0.options.cudnn = Some(on);
        self
    }

    /// Whether the algorithms that a vendor's library lists for a product or a convolution (cuBLASLt,
    /// hipBLASLt, cuDNN) are measured on the device, from level O2 on. Each call is measured once; the
    /// fastest algorithm is kept in the tuning cache ([`BackendBuilder::autotuning_cache_file`]), so another
    /// process measures nothing. [`BackendBuilder::tuning`] has no influence on this. If it is off or not
    /// set, the library's first choice is taken.
    pub fn enable_algorithm_search(mut self, on: bool) -> Self {
        self.0.algorithm_search = Some(on);
        self
    }

    /// Hard cap, in bytes, on the memory taken from the driver: live buffers, and free memory that the pool
    /// keeps.
    pub fn memory_limit(mut self, bytes: u64) -> Self {
        self.0.options.memory_limit = Some(bytes);
        self
    }

    /// How buffers get their memory. If not set: the configuration file, else one allocation of the driver
    /// for each buffer.
    ///
    /// ```
    /// use halcyon::prelude::*;
    /// use halcyon::{AllocationStrategy, MemoryPoolConfig};
    /// # fn main() -> halcyon::Result<()> {
    /// let b = Backend::builder()
    ///     .backend_type(BackendType::Cpu)
    ///     .memory_pool(MemoryPoolConfig {
    ///         initial_size: 1 << 20,
    ///         max_size: Some(64 << 20),
    ///         strategy: AllocationStrategy::BestFit,
    ///         defragment: true,
    ///     })
    ///     .build()?;
    /// assert_eq!(b.memory().reserved, 1 << 20);
    /// # Ok(())
    /// # }
    /// ```
    pub fn memory_pool(mut self, config: MemoryPoolConfig) -> Self {
        self.0.options.memory_pool = Some(config);
        self
    }

    /// The most bytes that the pool takes from the driver ([`MemoryPoolConfig::max_size`]), with any
    /// strategy.
    pub fn memory_pool_size(mut self, bytes: u64) -> Self {
        self.0.options.memory_pool.get_or_insert_default().max_size = Some(bytes);
        self
    }

    /// The most bytes that [`Backend::alloc_host`] may allocate in total. If not set, half of the machine's
    /// memory.
    pub fn host_limit(mut self, bytes: u64) -> Self {
        self.0.options.host_limit = Some(bytes);
        self
    }

    /// The directory of everything that is kept on disk: compiled programs, packed constants, measured rates,
    /// tuning results. If not set, the user's cache directory, or none with `HALCYON_CACHE=off`. A directory
    /// that is set here is used even with `HALCYON_CACHE=off`.
    pub fn cache_dir(mut self, dir: impl Into<PathBuf>) -> Self {
        self.0.options.cache_dir = Some(dir.into());
        self
    }

    /// Whether packed constants are cached on disk, below the cache directory: `true` always, `false` never.
    /// If not set, they are cached if reading them back is faster than packing again, which is measured.
    pub fn keep_packed(mut self, on: bool) -> Self {
        self.0.keep_packed = Some(on);
        self
    }

    /// Whether kernels are tuned: `true` tunes in the background while plans run
    /// ([`TuningMode::Background`]); `false` disables tuning and also ignores cached results of earlier
    /// processes ([`TuningMode::Off`]). A kernel found in the tuning cache is not tuned again.
    pub fn enable_autotuning(self, on: bool) -> Self {
        self.tuning(if on { TuningMode::Background } else { TuningMode::Off })
    }

    /// When kernels are tuned. If not set: the environment variable `HALCYON_TUNING` (`off`, `cached`,
    /// `background`, `exhaustive`, or a budget in seconds), else `tuning` in the configuration file, else
    /// [`TuningMode::Exhaustive`] at level O3 and [`TuningMode::Cached`] at others. Tuned kernels are used
    /// from level O2 on.
    pub fn tuning(mut self, mode: TuningMode) -> Self {
        self.0.tuning = Some(mode);
        self
    }

    /// The file of the tuning cache. If not set: the environment variable `HALCYON_TUNING_CACHE` (`off` for
    /// no file), else `tuning_cache` in the configuration file, else `tuning.json` in the cache directory.
    pub fn autotuning_cache_file(mut self, path: impl Into<PathBuf>) -> Self {
        self.0.tuning_file = Some(path.into());
        self
    }

    /// The path of the tuning cache file, without opening it; `None` if there is none.
    ///
    /// # Errors
    /// Errors of the configuration file; [`Error::Format`] if the named file is not a tuning cache.
    pub fn tuning_file(&self) -> Result<Option<PathBuf>> {
        Ok(self.tuning_settings()?.1)
    }

    /// The tuning mode, if one is set, and the path of the tuning cache file.
    fn tuning_settings(&self) -> Result<(Option<TuningMode>, Option<PathBuf>)> {
        let (mode, file) = (std::env::var(tune::VARIABLE).ok(), std::env::var_os(tune::FILE_VARIABLE));
        let config = match (self.0.tuning, &self.0.tuning_file) {
            (Some(_), Some(_)) => None,
            _ => halcyon_hal::config::load()?.map(|(_, c)| c),
        };
        let mode = match (self.0.tuning, mode) {
            (Some(m), _) => Some(m),
            (None, Some(m)) => Some(m.parse()?),
            (None, None) => config.as_ref().and_then(|c| c.tuning),
        };
        let named = match (&self.0.tuning_file, file) {
            (Some(f), _) => Some(f.clone()),
            (None, Some(f)) if f.eq_ignore_ascii_case("off") => return Ok((mode, None)),
            (None, Some(f)) => Some(f.into()),
            (None, None) => config.and_then(|c| c.tuning_cache),
        };
        if let Some(f) = &named {
            tune::check(f)?;
        }
        Ok((mode, named.or_else(|| self.tuning_default())))
    }

    #[cfg(not(target_arch = "wasm32"))]
    fn tuning_default(&self) -> Option<PathBuf> {
        let dir = self.0.options.cache_dir.clone().or_else(halcyon_hal::cache::user_dir);
        dir.map(|d| d.join("tuning.json"))
    }

    #[cfg(target_arch = "wasm32")]
    fn tuning_default(&self) -> Option<PathBuf> {
        None
    }

    /// Whether the time of every command on the device is measured.
    pub fn profile(mut self, on: bool) -> Self {
        self.0.options.profile = on;
        self
    }

    /// Disables a transformation (see [`halcyon_ir::passes`] for the names).
    pub fn without(mut self, transformation: &str) -> Self {
        self.0.without.insert(transformation.into());
        self
    }

    /// Opens the device.
    ///
    /// # Errors
    /// Errors of [`select::open`]; [`Error::Argument`] for settings that are invalid or contradict each
    /// other; [`Error::Unsupported`] if the device does not support the requested mixed precision, or if
    /// cuDNN is required and missing; errors of environment variables and of the configuration file.
    pub fn build(self) -> Result<Backend> {
        self.open(|_| Ok(()))
    }

    /// Opens the first device that can run a graph in the device's free memory. The graph is planned for each
    /// device that is tried. The graph must have no symbols. `inputs` are the sizes of its inputs in bytes.
    ///
    /// # Errors
    /// The errors of [`BackendBuilder::build`]; [`Error::OutOfMemory`] if the plan fits on no device, with
    /// the bytes that each device lacks.
    pub fn build_for(self, graph: &Graph, inputs: &[usize]) -> Result<Backend> {
        self.open(|b| b.lower_to_fit(graph, inputs).map(drop))
    }

    fn open(self, admit: impl Fn(&Backend) -> Result<()>) -> Result<Backend> {
        #[cfg(not(target_arch = "wasm32"))]
        halcyon_hal::cache::policy()?;
        let amp = match (self.0.amp, std::env::var("HALCYON_PRECISION")) {
            (Some(p), _) => p,
            (None, Ok(p)) => p.parse()?,
            (None, Err(_)) => AmpPolicy::None,
        };
        options::check(&self.0, amp)?;
        let (mode, file) = self.tuning_settings()?;
        let cache = Arc::new(file.map_or_else(TuningCache::memory, TuningCache::at));
        let tuning = (mode, cache);
        let mut hardware = self.0.options.clone();
        if self.0.algorithm_search == Some(true) && self.0.level >= Level::O2 {
            hardware.algorithm_search = Some(AlgorithmSearch(tuning.1.clone()));
        }
        let request = Request {
            backend: self.0.backend.unwrap_or(BackendType::Auto),
            index: self.0.device,
            policy: self.0.policy.clone(),
            fallback: self.0.fallback,
            memory: self.0.memory,
        };
        let (device, selection) = select::open_for(&request, &hardware, &mut |d| {
            autocast::check(amp, d.as_target().caps(), &d.info().id)?;
            if self.0.options.cudnn == Some(true) && !d.info().properties.contains_key("cudnn") {
                let what = format!("cuDNN on {}", d.info().id);
                return Err(Error::unsupported(what, "Do not require cuDNN, or choose the backend cuda"));
            }
            admit(&self.over(d.clone(), Selection::given(d.info().clone()), amp, &tuning))
        })?;
        Ok(self.over(device, selection, amp, &tuning))
    }

    /// The work that stays in f32 on a device under a mixed-precision policy.
    fn kept_in_f32(&self, device: &dyn Device, amp: AmpPolicy) -> KeptInF32 {
        match self.0.amp_kept {
            _ if self.0.force_amp || self.0.level < Level::O2 || self.0.without.contains(MIXED) => {
                KeptInF32::default()
            }
            Some(k) => k,
            #[cfg(not(target_arch = "wasm32"))]
            None => crate::amp_rates::kept_in_f32(device.info(), &self.0.options, amp),
            #[cfg(target_arch = "wasm32")]
            None => {
                let _ = (device, amp);
                KeptInF32::default()
            }
        }
    }

    /// How these settings lower graphs for a device.
    fn lowering(&self, device: &dyn Device, amp: AmpPolicy) -> Lowering {
        Lowering {
            level: self.0.level,
            precision: options::precision(&self.0, device),
            amp,
            amp_kept: self.kept_in_f32(device, amp),
            mixed: self.0.mixed.clone(),
            without: self.0.without.clone(),
        }
    }

    /// The lowering for a device that is open already, and one line for each setting without effect.
    ///
    /// # Errors
    /// Those of [`BackendBuilder::build`] that concern lowering.
    pub(super) fn lowering_for(
        &self,
        device: &dyn Device,
        amp: AmpPolicy,
    ) -> Result<(Lowering, Vec<String>)> {
        options::check(&self.0, amp)?;
        autocast::check(amp, device.as_target().caps(), &device.info().id)?;
        let lowering = self.lowering(device, amp);
        let warnings = options::warnings(&self.0, device, amp, &lowering.amp_kept);
        Ok((lowering, warnings))
    }

    /// The directory that [`BackendBuilder::cache_dir`] set.
    pub(super) fn own_cache_dir(&self) -> Option<PathBuf> {
        self.0.options.cache_dir.clone()
    }

    /// Lets the device's rates decide again which work stays in f32.
    pub(super) fn amp_unmeasured(mut self) -> Self {
        self.0.amp_kept = None;
        self
    }

    fn over(
        &self,
        device: Arc<dyn Device>,
        selection: Selection,
        amp: AmpPolicy,
        (mode, cache): &(Option<TuningMode>, Arc<TuningCache>),
    ) -> Backend {
        let lowering = self.lowering(&*device, amp);
        let mut warnings = options::warnings(&self.0, &*device, amp, &lowering.amp_kept);
        warnings.extend(options::unused_order(&self.0, &selection));
        let key = tune::device_key(device.info(), device.as_target().caps());
        let tuning = Tuning::new(*mode, cache.clone(), key);
        let (packed, built) = (self.packed_cache(), Some(self.clone()));
        Parts { device, selection, lowering, tuning, packed, warnings, built }.assemble()
    }

    /// The disk cache of packed constants, if they are cached.
    #[cfg(not(target_arch = "wasm32"))]
    fn packed_cache(&self) -> Option<PackedCache> {
        let dir = self.0.options.cache_dir.clone();
        match self.0.keep_packed {
            Some(true) => dir.or_else(halcyon_hal::cache::user_dir).map(|d| PackedCache::new(d, true)),
            Some(false) => None,
            None => PackedCache::open(dir),
        }
    }

    #[cfg(target_arch = "wasm32")]
    fn packed_cache(&self) -> Option<PackedCache> {
        None
    }

    /// Settings that lower graphs in the same way as an open backend.
    pub(super) fn of(l: &Lowering) -> BackendBuilder {
        BackendBuilder(Settings {
            level: l.level,
            precision: Some(l.precision),
            amp: Some(l.amp),
            amp_kept: Some(l.amp_kept),
            mixed: l.mixed.clone(),
            without: l.without.clone(),
            ..Settings::default()
        })
    }
}
