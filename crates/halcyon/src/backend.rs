//! `Backend`: an open device with its optimisation level and its caches.

mod builder;
pub(crate) mod options;
mod settings;
mod view;

use crate::constants::PackedCache;
use crate::executable::Executable;
use crate::planner::{Lowering, Mixed, Planner};
use crate::runtime::Runtime;
pub use crate::stats::CacheStats;
use crate::sync::lock;
use crate::tune::{TuneOptions, Tuning, TuningReport};
pub use builder::BackendBuilder;
use halcyon_hal::policy::Fallback;
use halcyon_hal::select::{self, Selection};
use halcyon_hal::tune::{self, TuningCache, TuningMode};
use halcyon_hal::{
    BackendType, Counters, Defragmented, Device, DeviceInfo, DeviceName, HostBuffer, MemoryStats,
};
use halcyon_ir::Graph;
#[cfg(doc)]
use halcyon_ir::error::Error;
use halcyon_ir::error::Result;
use halcyon_ir::lower::LowerOptions;
use halcyon_ir::passes::autocast::{self, MixedOps};
use halcyon_ir::passes::{AmpPolicy, Level};
use halcyon_ir::plan::Plan;
use halcyon_ir::target::MatmulPrecision;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

/// A handle on an open device. Cloning is cheap; clones share the device and all caches.
#[derive(Clone)]
pub struct Backend(Arc<Inner>);

struct Inner {
    runtime: Arc<Runtime>,
    planner: Arc<Planner>,
    selection: Selection,
    /// Warnings about the options with which the backend was built.
    warnings: Vec<String>,
    /// The settings with which the backend was built; `None` if it was made from a device.
    built: Option<BackendBuilder>,
    /// Seed of the next [`Backend::rand`] or [`Backend::randn`].
    seed: Arc<AtomicU64>,
    /// Held while a run collects its inputs and submits its commands: two threads must not decide about the
    /// donation of one buffer at the same time.
    running: Arc<Mutex<()>>,
}

/// Mixed precision of a compiled function ([`Backend::compile_mixed`]).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MixedPrecision {
    pub policy: AmpPolicy,
    /// The names of the ops that take the half type, such as `matmul`, `conv`, `attention`. `None`: all ops
    /// that support it ([`autocast`]).
    pub only: Option<Vec<String>>,
    /// What stays in f32: names of ops, and places such as `model.rs:42`. A place also keeps the gradients of
    /// its ops in f32.
    pub f32: Vec<String>,
    /// Whether the dtype is used even where the processor is not clearly faster in it
    /// ([`BackendBuilder::force_amp`]).
    pub force: bool,
    /// Whether the function itself handles values that overflow f16, as a training step with a loss scaler
    /// does. If not, the values of the first call decide which ops are computed in f16.
    pub guarded: bool,
}

impl From<AmpPolicy> for MixedPrecision {
    fn from(policy: AmpPolicy) -> MixedPrecision {
        MixedPrecision { policy, ..MixedPrecision::default() }
    }
}

/// The parts from which a backend is assembled.
struct Parts {
    device: Arc<dyn Device>,
    selection: Selection,
    lowering: Lowering,
    tuning: Tuning,
    packed: Option<PackedCache>,
    warnings: Vec<String>,
    built: Option<BackendBuilder>,
}

impl Parts {
    fn assemble(self) -> Backend {
        let runtime = Arc::new(Runtime::new(self.device, self.packed));
        Backend(Arc::new(Inner {
            planner: Planner::new(runtime.clone(), self.lowering, self.tuning),
            runtime,
            selection: self.selection,
            warnings: self.warnings,
            built: self.built,
            seed: Arc::default(),
            running: Arc::default(),
        }))
    }
}

impl Backend {
    /// Settings for opening a device.
    pub fn builder() -> BackendBuilder {
        BackendBuilder::default()
    }

    /// Opens the first device of a backend, or the best device of this machine for `Auto`, with default
    /// settings.
    pub fn new(kind: BackendType) -> Result<Backend> {
        Backend::builder().backend_type(kind).build()
    }

    /// Opens a device by its name, as [`Backend::id`] and `halcyon devices` print it: `cpu`, `cuda:1`,
    /// `opencl:0`; `auto` selects the best device.
    ///
    /// ```
    /// use halcyon::prelude::*;
    /// # fn main() -> halcyon::Result<()> {
    /// assert_eq!(Backend::open("cpu")?.id(), "cpu:0");
    /// assert!(Backend::open("cpu:7").is_err());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::Argument`], with the valid names, if the name is not one of them; [`Error::Unavailable`] if
    /// there is no such device.
    pub fn open(name: &str) -> Result<Backend> {
        let DeviceName { backend, index } = name.parse()?;
        let builder = Backend::builder().backend_type(backend);
        match index {
            None => builder.build(),
            Some(i) => builder.device(i).fallback(Fallback::Never).build(),
        }
    }

    /// Opens the CPU of this machine.
    pub fn cpu() -> Result<Backend> {
        Backend::new(BackendType::Cpu)
    }

    /// Opens the best device of this machine; [`Backend::selection`] gives the reason for the choice.
    pub fn auto() -> Result<Backend> {
        Backend::new(BackendType::Auto)
    }

    /// The backends that have a device on this machine.
    pub fn available() -> Vec<BackendType> {
        select::discover().into_iter().filter(|r| r.available).map(|r| r.id).collect()
    }

    /// All devices of this machine, by backend, including software devices.
    pub fn list_devices() -> Vec<DeviceInfo> {
        select::discover().into_iter().flat_map(|r| r.devices).collect()
    }

    /// Opens another device of this backend with the same settings.
    ///
    /// # Errors
    /// The errors of [`BackendBuilder::build`].
    pub fn on_device(&self, index: usize) -> Result<Backend> {
        let built = self.0.built.clone().unwrap_or_else(|| BackendBuilder::of(&self.0.planner.lowering));
        built.backend_type(self.info().backend).device(index).fallback(Fallback::Never).build()
    }

    /// A backend over an open device, with default settings: f32 products at highest precision, no mixed
    /// precision, tuning results kept in memory.
    pub fn from_device(device: Arc<dyn Device>, selection: Selection, level: Level) -> Backend {
        let key = tune::device_key(device.info(), device.as_target().caps());
        Parts {
            device,
            selection,
            lowering: Lowering { level, ..Lowering::default() },
            tuning: Tuning::new(None, Arc::new(TuningCache::memory()), key),
            packed: None,
            warnings: vec![],
            built: None,
        }
        .assemble()
    }

    /// Why this device was chosen, and why others were rejected.
    pub fn selection(&self) -> &Selection {
        &self.0.selection
    }

    /// The device of this backend.
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.0.runtime.device
    }

    /// Name, memory, driver and properties of the device.
    pub fn info(&self) -> &DeviceInfo {
        self.device().info()
    }

    /// The device's name: `cpu:0`, `opencl:1`.
    pub fn id(&self) -> &str {
        &self.info().id
    }

    /// The optimisation level of this backend's plans.
    pub fn level(&self) -> Level {
        self.0.planner.lowering.level
    }

    /// How exact f32 matrix products and convolutions are.
    pub fn precision(&self) -> MatmulPrecision {
        self.0.planner.lowering.precision
    }

    /// Dtypes that kernels of this device load and store, as reported by its driver. f64 and 64-bit integers
    /// need support by the device; all others run on every device ([`halcyon_hal::Caps::storage_of`]).
    pub fn supported_dtypes(&self) -> &[halcyon_ir::DType] {
        &self.device().caps().storage
    }

    /// The mixed-precision policy that plans follow. It is also `None` if the device is clearly faster in the
    /// requested type neither at products nor at convolutions. Then everything stays in f32, and
    /// [`Backend::warnings`] states the measured rates.
    pub fn amp(&self) -> AmpPolicy {
        let l = &self.0.planner.lowering;
        if l.amp_kept.is_everything() { AmpPolicy::None } else { l.amp }
    }

    /// The mixed precision of one plan. Under [`MixedPrecision::force`], even work that is not clearly faster
    /// in the half type uses the half type.
    pub(crate) fn mixed(&self, m: &MixedPrecision) -> Result<Mixed> {
        autocast::check(m.policy, self.device().as_target().caps(), self.id())?;
        let own = self.0.built.clone().unwrap_or_else(|| BackendBuilder::of(&self.0.planner.lowering));
        let kept = own.level(self.level()).force_amp(m.force).kept_now(&**self.device(), m.policy);
        let ops = MixedOps {
            only: m.only.as_ref().map(|o| o.iter().cloned().collect()),
            f32: m.f32.iter().cloned().collect(),
            in_range: m.guarded,
            too_large: Default::default(),
        };
        Ok(Mixed { policy: m.policy, kept, ops })
    }

    /// Whether plans need the values of a first run, because f16 has a small range.
    pub(crate) fn needs_sample(&self) -> bool {
        let l = &self.0.planner.lowering;
        l.amp == AmpPolicy::F16 && l.level >= Level::O2
    }

    /// The initial loss scale of training steps on this backend, if it was set
    /// ([`BackendBuilder::loss_scale`]).
    pub fn loss_scale(&self) -> Option<f64> {
        self.0.built.as_ref().and_then(BackendBuilder::loss_scale_set)
    }

    /// Whether the algorithms of vendors' libraries are measured
    /// ([`BackendBuilder::enable_algorithm_search`]). `false` if that has no effect on this device.
    pub fn searches_algorithms(&self) -> bool {
        self.device().searches_algorithms().is_ok()
    }

    /// One line for each requested option that has no effect on this device, or less effect than requested.
    pub fn warnings(&self) -> &[String] {
        &self.0.warnings
    }

    /// Counters of the device since it was opened: launches, copies, allocations and compilations.
    pub fn counters(&self) -> Counters {
        self.device().counters()
    }

    /// Memory use of the device, in bytes.
    pub fn memory(&self) -> MemoryStats {
        self.device().memory()
    }

    /// Waits for all work of this backend, including that of streams and futures.
    ///
    /// # Errors
    /// The first error not yet reported: an index out of range, or an error of the driver.
    pub fn synchronize(&self) -> Result<()> {
        self.device().synchronize()?;
        let settled = self.0.runtime.wait_for_runs(None);
        self.check_faults().and(settled)
    }

    /// Drops cached plans and programs and releases cached memory; returns the bytes freed.
    pub fn empty_cache(&self) -> u64 {
        self.0.planner.forget_plans();
        self.0.runtime.forget_programs();
        self.device().empty_cache()
    }

    /// Waits for the device and moves buffers together, so that free memory lies in large ranges
    /// ([`Device::defragment`]).
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the device has no pool; errors of the driver.
    pub fn defragment(&self) -> Result<Defragmented> {
        self.device().defragment()
    }

    /// Allocates host memory that the device can copy to and from directly ([`Device::alloc_host`]).
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the device cannot provide it; [`Error::OutOfMemory`].
    pub fn alloc_host(&self, bytes: usize) -> Result<HostBuffer> {
        self.device().alloc_host(bytes)
    }

    /// Counters of this backend's plans, programs and runs.
    pub fn cache_stats(&self) -> CacheStats {
        let g = |c: &AtomicU64| c.load(Ordering::Relaxed);
        let s = &self.0.runtime.stats;
        CacheStats {
            plans_built: g(&s.plans_built),
            plan_hits: g(&s.plan_hits),
            plans: self.0.planner.plans(),
            programs: self.0.runtime.programs(),
            runs: g(&s.runs),
            steps: g(&s.steps),
            copies: g(&s.state_copies),
            packed_loads: g(&s.packed_loads),
            kernels_tuned: g(&s.kernels_tuned),
            candidates_tried: g(&s.candidates_tried),
            smaller_plans: g(&s.smaller_plans),
        }
    }

    /// The options with which plans of this backend are lowered.
    pub fn lower_options(&self) -> LowerOptions {
        self.0.planner.lower_options()
    }

    /// The executable of a graph without symbols. If the cache has it, nothing is planned. `donated` says for
    /// each input whether the plan may overwrite it.
    pub fn plan(&self, graph: Graph, donated: Vec<bool>) -> Result<Arc<Executable>> {
        self.0.planner.plan(graph, donated)
    }

    /// Makes a plan of a graph without symbols that fits the free memory together with its inputs. `inputs`
    /// are the sizes in bytes of the inputs that are not allocated yet. The result is the fastest plan or, if
    /// the fastest plan does not fit, a plan without some of the transformations that cost memory.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] with the need of the fastest plan, if no plan fits; errors of planning.
    pub fn lower_to_fit(&self, graph: &Graph, inputs: &[usize]) -> Result<Plan> {
        self.0.planner.lower_to_fit(graph, inputs)
    }

    /// The tuning cache, which has the results of all devices of this machine.
    pub fn tuning_cache(&self) -> &TuningCache {
        &self.0.planner.tuning.cache
    }

    /// When this backend tunes.
    pub fn tuning_mode(&self) -> TuningMode {
        self.0.planner.tuning.mode_at(self.level())
    }

    /// The key of this device in a tuning cache.
    pub fn tuning_device(&self) -> &str {
        &self.0.planner.tuning.device
    }

    /// Counts how often tuning has changed which kernels plans use. A plan of an earlier generation is made
    /// again when it is next requested. Compiled functions and captured graphs keep their plans.
    pub fn tuning_generation(&self) -> u64 {
        self.0.planner.tuning_generation()
    }

    /// Tunes the kernels that a graph's plan uses and that are not tuned yet. The graph must have no symbols.
    ///
    /// # Errors
    /// [`Error::Argument`] if the backend's level, tuning mode or settings use no tuned kernels;
    /// [`Error::Io`] if the cache file cannot be written (checked before anything is measured);
    /// [`Error::Driver`] if the device fails even with the default kernels.
    pub fn tune(&self, graph: &Graph, budget: Option<Duration>) -> Result<TuningReport> {
        self.tune_with(std::slice::from_ref(graph), &TuneOptions { budget, ..TuneOptions::default() })
    }

    /// Like [`Backend::tune`], for the kernels of several graphs.
    ///
    /// # Errors
    /// The errors of [`Backend::tune`].
    pub fn tune_with(&self, graphs: &[Graph], options: &TuneOptions<'_>) -> Result<TuningReport> {
        self.0.planner.tune(graphs, options)
    }

    /// Waits, at most `limit`, until background tuning has finished all requested kernels. Returns false if
    /// the time was not enough.
    pub fn wait_for_tuning(&self, limit: Duration) -> bool {
        self.0.planner.tuning.wait(limit)
    }

    /// Makes the executable of a plan. It is not cached.
    ///
    /// # Errors
    /// Errors of compiling the programs and of placing the constants.
    pub(crate) fn executable(&self, plan: Plan) -> Result<Executable> {
        Executable::new(&self.0.runtime, self.level(), plan)
    }

    /// The planner, which makes and caches the plans of this backend.
    pub(crate) fn planner(&self) -> &Arc<Planner> {
        &self.0.planner
    }

    /// The runtime: the device, and everything that executables on this device share.
    pub(crate) fn runtime(&self) -> &Arc<Runtime> {
        &self.0.runtime
    }

    /// Waits, and turns the first fault of a kernel into an error that names its op.
    pub(crate) fn check_faults(&self) -> Result<()> {
        self.0.runtime.check_faults()
    }

    /// Returns the seed of the next draw and increments it.
    pub fn next_seed(&self) -> u64 {
        self.0.seed.fetch_add(1, Ordering::Relaxed)
    }

    /// Sets the seed of the next [`Backend::rand`] or [`Backend::randn`].
    pub fn manual_seed(&self, seed: u64) {
        self.0.seed.store(seed, Ordering::Relaxed);
    }

    /// Whether two handles belong to one open device. Their plans may be made differently
    /// ([`Backend::with_level`]).
    pub fn is_same(&self, o: &Backend) -> bool {
        Arc::ptr_eq(&self.0.runtime, &o.0.runtime)
    }

    /// Whether two handles belong to one open device and make plans in the same way.
    pub(crate) fn plans_alike(&self, o: &Backend) -> bool {
        Arc::ptr_eq(&self.0, &o.0)
    }

    /// Returns the lock that a caller holds while it collects the inputs of a run and submits the run.
    pub(crate) fn running(&self) -> MutexGuard<'_, ()> {
        lock(&self.0.running)
    }
}

impl fmt::Debug for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Backend({} {}, {})", self.id(), self.info().name, self.level())
    }
}
