//! `Backend`: an open device with its optimisation level and its caches.

mod builder;
mod options;

use crate::executable::{Executable, FaultTable};
use crate::fit::Fit;
use crate::lru::Lru;
use crate::stream::Lanes;
use crate::tune::Tuning;
pub use builder::BackendBuilder;
use halcyon_hal::policy::Fallback;
use halcyon_hal::select::{self, Selection};
use halcyon_hal::tune::{self, TuningCache, TuningMode};
use halcyon_hal::{
    BackendType, BufferRef, Counters, Defragmented, Device, DeviceInfo, DeviceName, HostBuffer, MemoryStats,
    Program, Tag,
};
use halcyon_ir::error::{Error, Result};
use halcyon_ir::lower::{LowerOptions, lower};
use halcyon_ir::passes::autocast::Kept;
use halcyon_ir::passes::{AmpPolicy, BLOCKED, Level, PACKED, PassOptions};
use halcyon_ir::plan::{PackedConst, Plan};
use halcyon_ir::target::{MatmulPrecision, Packing};
use halcyon_ir::{ConstData, Graph};
use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

/// Maximum numbers of plans and programs that a backend caches.
const PLAN_CACHE: usize = 256;
const PROGRAM_CACHE: usize = 1024;
/// Transformations that cost memory. A plan that does not fit is made again without the first, then without
/// both.
const COSTLY: [&str; 2] = [PACKED, BLOCKED];

/// A handle on an open device. Cloning is cheap; clones share the device and all caches.
#[derive(Clone)]
pub struct Backend(pub(crate) Arc<Inner>);

pub(crate) struct Inner {
    pub(crate) device: Arc<dyn Device>,
    selection: Selection,
    level: Level,
    precision: MatmulPrecision,
    amp: AmpPolicy,
    /// What stays in f32 under `amp`, according to measured rates.
    amp_kept: Kept,
    /// Warnings about the options it was built with.
    warnings: Vec<String>,
    without: std::collections::BTreeSet<String>,
    plans: Mutex<Lru<PlanKey, Arc<Executable>>>,
    programs: Mutex<Lru<u128, Arc<dyn Program>>>,
    /// Device buffers of constants, by the identity of their host bytes. Plans that use them keep the bytes
    /// alive.
    consts: Mutex<HashMap<(usize, usize), (Weak<dyn halcyon_hal::Buffer>, ConstData)>>,
    /// Packed constants, by the identity of their host bytes and by their packing.
    packed: Mutex<HashMap<((usize, usize), Packing), (Weak<dyn halcyon_hal::Buffer>, ConstData)>>,
    /// The disk cache of packed constants.
    #[cfg(not(target_arch = "wasm32"))]
    kept: Option<crate::packed::Kept>,
    pub(crate) faults: FaultTable,
    pub(crate) stats: Stats,
    pub(crate) lanes: Lanes,
    /// Seed of the next [`Backend::randn`].
    pub(crate) seed: AtomicU64,
    /// The settings it was built with; `None` if it was made from a device.
    built: Option<BackendBuilder>,
    pub(crate) tuning: Tuning,
    /// Held while a run collects its inputs and submits its commands: two threads must not decide about the
    /// donation of one buffer at the same time.
    pub(crate) running: Mutex<()>,
}

/// Counters of the caches.
#[derive(Default, Debug)]
pub(crate) struct Stats {
    pub(crate) plans_built: AtomicU64,
    pub(crate) plan_hits: AtomicU64,
    pub(crate) runs: AtomicU64,
    pub(crate) state_copies: AtomicU64,
    pub(crate) steps: AtomicU64,
    pub(crate) packed_loads: AtomicU64,
    pub(crate) kernels_tuned: AtomicU64,
    pub(crate) candidates_tried: AtomicU64,
    pub(crate) smaller_plans: AtomicU64,
}

/// Counters of a backend's plans, programs and runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct CacheStats {
    /// Plans made by lowering a graph.
    pub plans_built: u64,
    /// Requests for a plan that the cache answered.
    pub plan_hits: u64,
    /// Plans now in the cache.
    pub plans: usize,
    /// Programs now in the cache.
    pub programs: usize,
    /// Runs of plans.
    pub runs: u64,
    /// Steps submitted by all runs.
    pub steps: u64,
    /// States or donated tensors that were copied because the old value was still to be read.
    pub copies: u64,
    /// Packed constants read from the disk cache instead of packed.
    pub packed_loads: u64,
    /// Kernels that were tuned: their candidates were compiled, checked and timed.
    pub kernels_tuned: u64,
    /// Candidates tried when tuning them.
    pub candidates_tried: u64,
    /// Plans made without a transformation that costs memory, because there was too little.
    pub smaller_plans: u64,
}

#[derive(Clone, PartialEq, Eq, Hash)]
struct PlanKey {
    graph: Arc<Graph>,
    donated: Vec<bool>,
    level: Level,
    amp: AmpPolicy,
    /// Generation of the tuning results that the plan was made with.
    tuning: u64,
}

impl fmt::Debug for PlanKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PlanKey({:016x})", self.graph.structural_hash())
    }
}

/// Offsets of pieces of these sizes in one block, each aligned to `align` bytes, and the block's size.
pub(crate) fn offsets(sizes: &[usize], align: usize) -> (Vec<usize>, usize) {
    let mut end = 0usize;
    let mut at = |n: &usize| {
        let start = end.checked_next_multiple_of(align).unwrap_or(usize::MAX);
        end = start.saturating_add(*n);
        start
    };
    let starts = sizes.iter().map(&mut at).collect();
    (starts, end)
}

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    // The caches hold only complete entries, so a panic in another thread leaves them valid.
    m.lock().unwrap_or_else(|e| e.into_inner())
}

impl Backend {
    /// Settings for opening a device.
    pub fn builder() -> BackendBuilder {
        BackendBuilder::default()
    }

    /// Opens the first device of a backend with default settings.
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

    /// Opens the best device of this machine; [`Backend::selection`] says why it was chosen.
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
    /// As [`BackendBuilder::build`].
    pub fn on_device(&self, index: usize) -> Result<Backend> {
        let built = self.0.built.clone().unwrap_or_else(|| BackendBuilder {
            level: self.0.level,
            precision: Some(self.0.precision),
            amp: Some(self.0.amp),
            amp_kept: Some(self.0.amp_kept),
            without: self.0.without.clone(),
            ..BackendBuilder::default()
        });
        built.backend_type(self.info().backend).device(index).fallback(Fallback::Never).build()
    }

    /// A backend over an open device, with default settings: f32 products at highest precision, no mixed
    /// precision, tuning results kept in memory.
    pub fn from_device(device: Arc<dyn Device>, selection: Selection, level: Level) -> Backend {
        let key = tune::device_key(device.info(), device.as_target().caps());
        Backend(Arc::new(Inner {
            device,
            selection,
            level,
            precision: MatmulPrecision::Highest,
            amp: AmpPolicy::None,
            amp_kept: Kept::default(),
            warnings: vec![],
            without: Default::default(),
            plans: Mutex::new(Lru::new(PLAN_CACHE)),
            programs: Mutex::new(Lru::new(PROGRAM_CACHE)),
            consts: Mutex::default(),
            packed: Mutex::default(),
            #[cfg(not(target_arch = "wasm32"))]
            kept: None,
            faults: FaultTable::default(),
            stats: Stats::default(),
            lanes: Lanes::default(),
            seed: AtomicU64::new(0),
            built: None,
            tuning: Tuning::new(TuningMode::Cached, TuningCache::memory(), key),
            running: Mutex::new(()),
        }))
    }

    /// As `Backend::from_device`, with a mixed-precision policy that keeps nothing in f32.
    #[cfg(not(target_arch = "wasm32"))]
    pub(crate) fn with_amp(
        device: Arc<dyn Device>,
        selection: Selection,
        level: Level,
        amp: AmpPolicy,
    ) -> Result<Backend> {
        let mut b = Backend::from_device(device, selection, level);
        let i = Arc::get_mut(&mut b.0).ok_or_else(|| Error::internal("a new backend is shared"))?;
        i.amp = amp;
        Ok(b)
    }

    /// Why this device was chosen, and why others were rejected.
    pub fn selection(&self) -> &Selection {
        &self.0.selection
    }

    /// The device of this backend.
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.0.device
    }

    /// Name, memory, driver and properties of the device.
    pub fn info(&self) -> &DeviceInfo {
        self.0.device.info()
    }

    /// The device's name: `cpu:0`, `opencl:1`.
    pub fn id(&self) -> &str {
        &self.info().id
    }

    /// The optimisation level of this backend's plans.
    pub fn level(&self) -> Level {
        self.0.level
    }

    /// How exact f32 matrix products and convolutions are.
    pub fn precision(&self) -> MatmulPrecision {
        self.0.precision
    }

    /// Dtypes that kernels of this device load and store, as reported by its driver. f64 and 64-bit integers
    /// need support by the device; all others run on every device ([`halcyon_hal::Caps::storage_of`]).
    pub fn supported_dtypes(&self) -> &[halcyon_ir::DType] {
        &self.0.device.caps().storage
    }

    /// The mixed-precision policy that plans follow. `None` also if the device is no faster in the requested
    /// type, so that everything stays in f32 ([`Backend::warnings`] states the measured rates).
    pub fn amp(&self) -> AmpPolicy {
        if self.0.amp_kept.everything() { AmpPolicy::None } else { self.0.amp }
    }

    /// Options it was built with that have no effect on this device, or less than requested: one line each.
    pub fn warnings(&self) -> &[String] {
        &self.0.warnings
    }

    /// What the device has done since it was opened: launches, copies, allocations and compilations.
    pub fn counters(&self) -> Counters {
        self.0.device.counters()
    }

    /// Memory use of the device, in bytes.
    pub fn memory(&self) -> MemoryStats {
        self.0.device.memory()
    }

    /// Waits for all work of this backend, including that of streams and futures.
    ///
    /// # Errors
    /// The first error not yet reported: an index out of range, or an error of the driver.
    pub fn synchronize(&self) -> Result<()> {
        self.0.device.synchronize()?;
        let told = self.0.lanes.settle(None, self);
        self.check_faults().and(told)
    }

    /// Drops cached plans and programs and releases cached memory; returns the bytes freed.
    pub fn empty_cache(&self) -> u64 {
        self.forget_plans();
        lock(&self.0.programs).clear();
        self.0.device.empty_cache()
    }

    pub(crate) fn forget_plans(&self) {
        lock(&self.0.plans).clear();
    }

    /// Waits for the device and moves buffers together, so that free memory lies in large ranges
    /// ([`Device::defragment`]).
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the device has no pool; errors of the driver.
    pub fn defragment(&self) -> Result<Defragmented> {
        self.0.device.defragment()
    }

    /// Allocates host memory that the device can copy to and from directly ([`Device::alloc_host`]).
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the device cannot provide it; [`Error::OutOfMemory`].
    pub fn alloc_host(&self, bytes: usize) -> Result<HostBuffer> {
        self.0.device.alloc_host(bytes)
    }

    /// Counters of this backend's plans, programs and runs.
    pub fn cache_stats(&self) -> CacheStats {
        let g = |c: &AtomicU64| c.load(Ordering::Relaxed);
        let s = &self.0.stats;
        CacheStats {
            plans_built: g(&s.plans_built),
            plan_hits: g(&s.plan_hits),
            plans: lock(&self.0.plans).len(),
            programs: lock(&self.0.programs).len(),
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
        LowerOptions {
            passes: PassOptions {
                level: self.0.level,
                without: self.0.without.clone(),
                amp: self.0.amp,
                kept: self.0.amp_kept,
            },
            precision: self.0.precision,
            donated: vec![],
            tuned: self.0.tuning.known(),
        }
    }

    /// The executable plan of a graph without symbols, from the cache if it is there. `donated` says for each
    /// input whether the plan may overwrite it.
    pub fn plan(&self, graph: Graph, donated: Vec<bool>) -> Result<Arc<Executable>> {
        let tuning = self.0.tuning.generation();
        let graph = Arc::new(graph);
        let mut key = PlanKey { graph, donated, level: self.0.level, amp: self.0.amp, tuning };
        if let Some(e) = lock(&self.0.plans).get(&key) {
            self.0.stats.plan_hits.fetch_add(1, Ordering::Relaxed);
            return Ok(e);
        }
        let donated = key.donated.clone();
        let options = || LowerOptions { donated: donated.clone(), ..self.lower_options() };
        let at_once = self.tunes_at_once();
        if at_once && self.tune_new(&lower(&key.graph, self.0.device.as_target(), &options())?) {
            key.tuning = self.0.tuning.generation();
        }
        // Bind once, so that a plan without enough memory for its scratch is not cached.
        let ready = |p: Plan| {
            let exe = Executable::new(self, p)?;
            exe.give_back(exe.lease(self, None)?);
            Ok(exe)
        };
        let (exe, given_up) = self.first_that_fits(&key.graph, options(), &ready)?;
        if !at_once {
            self.tune_new(exe.plan());
        }
        let exe = Arc::new(exe);
        tracing::info!(
            device = self.id(),
            nodes = key.graph.nodes().len(),
            steps = exe.plan().steps.len(),
            scratch = exe.plan().scratch(),
            "plan made"
        );
        self.0.stats.plans_built.fetch_add(1, Ordering::Relaxed);
        self.0.stats.smaller_plans.fetch_add((given_up > 0) as u64, Ordering::Relaxed);
        lock(&self.0.plans).put(key, exe.clone());
        Ok(exe)
    }

    /// The plan that the backend makes of a graph without symbols in the memory left, with inputs of the
    /// given sizes in bytes still to be allocated. This is the fastest plan; if that does not fit, one
    /// without the transformations that cost memory.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] with the need of the fastest plan, if none fits; errors of planning.
    pub fn lower_to_fit(&self, graph: &Graph, inputs: &[usize]) -> Result<Plan> {
        let fits = |p: Plan| Fit::of(self, &p, inputs).check(self, &p).map(|()| p);
        self.first_that_fits(graph, self.lower_options(), &fits).map(|(p, _)| p)
    }

    /// Calls `take` with plans of decreasing memory need until it returns something else than out of memory.
    /// Returns its result and the number of transformations given up.
    fn first_that_fits<T>(
        &self,
        graph: &Graph,
        mut options: LowerOptions,
        take: &dyn Fn(Plan) -> Result<T>,
    ) -> Result<(T, usize)> {
        let target = self.0.device.as_target();
        let first = match take(lower(graph, target, &options)?) {
            Err(e @ Error::OutOfMemory { .. }) => e,
            r => return r.map(|v| (v, 0)),
        };
        let need = Fit::of(self, &lower(graph, target, &options)?, &[]).device();
        for (n, name) in COSTLY.iter().enumerate() {
            if !options.passes.does(name) {
                continue;
            }
            options.passes.without.insert(name.to_string());
            let mut plan = lower(graph, target, &options)?;
            let less = Fit::of(self, &plan, &[]).device();
            if less >= need {
                continue;
            }
            plan.warnings
                .push(format!("{name}: left out for want of memory ({need} bytes with it, {less} without)"));
            match take(plan) {
                Err(Error::OutOfMemory { .. }) => {}
                r => {
                    tracing::warn!(device = self.id(), without = ?&COSTLY[..=n], need, less, "out of memory: a smaller plan is taken");
                    return r.map(|v| (v, n + 1));
                }
            }
        }
        Err(first)
    }

    pub(crate) fn program(&self, k: &halcyon_ir::kernel::Kernel) -> Result<Arc<dyn Program>> {
        let key = k.key();
        if let Some(p) = lock(&self.0.programs).get(&key) {
            return Ok(p);
        }
        let p = self.0.device.compile(k)?;
        lock(&self.0.programs).put(key, p.clone());
        Ok(p)
    }

    /// The device buffer of a constant: imported without a copy if the device can, else uploaded once and
    /// shared.
    pub(crate) fn constant(&self, c: &ConstData) -> Result<BufferRef> {
        let mut m = lock(&self.0.consts);
        if let Some((w, _)) = m.get(&c.key())
            && let Some(b) = w.upgrade()
        {
            return Ok(b);
        }
        let d = &self.0.device;
        let b = match d.import(c.owner()) {
            Some(b) => b,
            None => {
                let b = d.alloc(c.bytes().len(), Tag::Weights)?;
                d.write(&b, 0, c.bytes())?;
                b
            }
        };
        m.retain(|_, (w, _)| w.strong_count() > 0);
        m.insert(c.key(), (Arc::downgrade(&b), c.clone()));
        Ok(b)
    }

    /// Device buffers of a plan's packed constants. Plans share them. New ones are placed in one block if the
    /// device supports parts of buffers.
    pub(crate) fn packed(&self, plan: &Plan) -> Result<Vec<BufferRef>> {
        let mut m = lock(&self.0.packed);
        let mut buffers = vec![None; plan.packed.len()];
        let mut new = vec![];
        for (i, p) in plan.packed.iter().enumerate() {
            let packing =
                p.kernel.packing().ok_or_else(|| Error::internal("a packed constant without a packing"))?;
            let key = (p.data.key(), packing.clone());
            match m.get(&key).and_then(|(w, _)| w.upgrade()) {
                Some(b) => buffers[i] = Some(b),
                None => new.push((i, p, key)),
            }
        }
        if !new.is_empty() {
            let sizes: Vec<usize> = new.iter().map(|(_, _, key)| key.1.bytes).collect();
            let constants: Vec<&PackedConst> = new.iter().map(|(_, p, _)| *p).collect();
            let made = self.pack(&constants, &sizes)?;
            m.retain(|_, (w, _)| w.strong_count() > 0);
            for ((i, p, key), b) in new.into_iter().zip(made) {
                m.insert(key, (Arc::downgrade(&b), p.data.clone()));
                buffers[i] = Some(b);
            }
        }
        buffers.into_iter().map(|b| b.ok_or_else(|| Error::internal("a constant was not packed"))).collect()
    }

    fn pack(&self, constants: &[&PackedConst], sizes: &[usize]) -> Result<Vec<BufferRef>> {
        let d = &self.0.device;
        let fill = |to: &[BufferRef]| {
            let jobs: Vec<_> =
                constants.iter().zip(to).map(|(p, b)| (&*p.kernel, p.data.bytes(), b)).collect();
            d.pack_host(&jobs)
        };
        let Some(align) = d.as_target().part_alignment() else {
            let each: Vec<BufferRef> =
                sizes.iter().map(|n| d.alloc(*n, Tag::Weights)).collect::<Result<_>>()?;
            fill(&each)?;
            return Ok(each);
        };
        let (offsets, total) = offsets(sizes, align);
        let parts = |block: &BufferRef| -> Result<Vec<BufferRef>> {
            offsets.iter().zip(sizes).map(|(at, n)| d.part(block, *at, *n)).collect()
        };
        #[cfg(not(target_arch = "wasm32"))]
        let kept = self.0.kept.as_ref().map(|k| crate::packed::Block::new(self, k, constants, total));
        #[cfg(not(target_arch = "wasm32"))]
        if let Some(block) = kept.as_ref().and_then(|k| k.load()) {
            return parts(&block);
        }
        let block = d.alloc(total, Tag::Weights)?;
        let made = parts(&block)?;
        #[cfg(not(target_arch = "wasm32"))]
        let start = std::time::Instant::now();
        fill(&made)?;
        #[cfg(not(target_arch = "wasm32"))]
        if let Some(k) = kept {
            k.keep(&block, start.elapsed())?;
        }
        Ok(made)
    }

    /// Waits, and turns the first fault of a kernel into an error that names its op.
    pub(crate) fn check_faults(&self) -> Result<()> {
        match self.0.device.take_fault()? {
            None => self.stray(),
            Some(id) => Err(self.0.faults.explain(id, &*self.0.device)),
        }
    }

    /// Reports the first index out of range found by finished work of a stream and not yet reported.
    pub(crate) fn stray(&self) -> Result<()> {
        self.0.lanes.fault().map_or(Ok(()), |id| Err(self.0.faults.explain(id, &*self.0.device)))
    }

    pub(crate) fn same(&self, o: &Backend) -> bool {
        Arc::ptr_eq(&self.0, &o.0)
    }

    pub(crate) fn running(&self) -> MutexGuard<'_, ()> {
        lock(&self.0.running)
    }
}

impl fmt::Debug for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Backend({} {}, {})", self.id(), self.info().name, self.0.level)
    }
}
