//! `Planner`: makes executables of graphs, and caches them.

mod tuner;

use crate::executable::Executable;
use crate::fit::Fit;
use crate::lru::Lru;
use crate::runtime::Runtime;
use crate::sync::lock;
use crate::tune::{Tuning, TuningMode};
use halcyon_hal::BufferRef;
use halcyon_ir::error::{Error, Result};
use halcyon_ir::lower::{LowerOptions, lower, ranged};
use halcyon_ir::ops::ReduceKind;
use halcyon_ir::passes::autocast::{F16_MAX, KeptInF32, MixedOps, RANGE_MARGIN};
use halcyon_ir::passes::{AmpPolicy, BLOCKED, LAUNCHES, Level, MIXED, PACKED, PassOptions};
use halcyon_ir::plan::Plan;
use halcyon_ir::target::MatmulPrecision;
use halcyon_ir::{Graph, NodeId, Scalar};
use std::collections::BTreeSet;
use std::fmt;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

/// Maximum number of plans that a planner caches.
const PLAN_CACHE: usize = 256;
/// Transformations that cost memory: a merged launch needs the operands of all its parts at once. A plan that
/// does not fit is made again without the first of them, then without the first two, and so on.
const MEMORY_COSTLY: [&str; 3] = [LAUNCHES, PACKED, BLOCKED];

/// How graphs are lowered.
#[derive(Clone, Debug, Default)]
pub(crate) struct Lowering {
    pub(crate) level: Level,
    pub(crate) precision: MatmulPrecision,
    pub(crate) amp: AmpPolicy,
    /// The work that stays in f32 under `amp`, according to measured rates.
    pub(crate) amp_kept: KeptInF32,
    /// The ops that `amp` applies to.
    pub(crate) mixed: MixedOps,
    /// Transformations that are switched off.
    pub(crate) without: BTreeSet<String>,
}

/// Makes the plans of one runtime, and caches them with their programs and constants.
pub(crate) struct Planner {
    pub(crate) runtime: Arc<Runtime>,
    pub(crate) lowering: Lowering,
    /// Shared by the planners of one runtime.
    pub(crate) tuning: Arc<Tuning>,
    plans: Mutex<Lru<PlanKey, Arc<Executable>>>,
    /// The mixed precision of graphs whose values have been checked for f16.
    ranges: Mutex<Lru<(Arc<Graph>, Option<Arc<Mixed>>), Arc<Mixed>>>,
}

/// Mixed precision of one plan, in place of the backend's.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub(crate) struct Mixed {
    pub(crate) policy: AmpPolicy,
    pub(crate) kept: KeptInF32,
    pub(crate) ops: MixedOps,
}

/// The mixed precision and the sample with which a plan is made.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Wanted<'a> {
    /// Mixed precision, if it is not the backend's.
    pub(crate) mixed: Option<&'a Arc<Mixed>>,
    /// The inputs and arguments of the first run, if they are known. They are the sample from which the range
    /// of values is taken before ops are computed in f16.
    pub(crate) sample: Option<(&'a [BufferRef], &'a [Scalar])>,
}

#[derive(Clone, PartialEq, Eq, Hash)]
struct PlanKey {
    graph: Arc<Graph>,
    donated: Vec<bool>,
    /// Generation of the tuning results that the plan was made with.
    tuning: u64,
    mixed: Option<Arc<Mixed>>,
}

impl fmt::Debug for PlanKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PlanKey({:016x})", self.graph.structural_hash())
    }
}

impl Planner {
    pub(crate) fn new(
        runtime: Arc<Runtime>,
        lowering: Lowering,
        tuning: impl Into<Arc<Tuning>>,
    ) -> Arc<Planner> {
        let (plans, ranges) = (Mutex::new(Lru::new(PLAN_CACHE)), Mutex::new(Lru::new(PLAN_CACHE)));
        Arc::new(Planner { runtime, lowering, tuning: tuning.into(), plans, ranges })
    }

    /// The options with which plans are lowered.
    pub(crate) fn lower_options(&self) -> LowerOptions {
        let l = &self.lowering;
        LowerOptions {
            passes: PassOptions {
                level: l.level,
                without: l.without.clone(),
                amp: l.amp,
                kept: l.amp_kept,
                mixed: l.mixed.clone(),
            },
            precision: l.precision,
            donated: vec![],
            tuned: self.tuning.tuned_variants(),
        }
    }

    /// Counts how often tuning has changed which kernels plans use.
    pub(crate) fn tuning_generation(&self) -> u64 {
        self.tuning.generation.load(Ordering::Acquire)
    }

    /// Number of cached plans.
    pub(crate) fn plans(&self) -> usize {
        lock(&self.plans).len()
    }

    pub(crate) fn forget_plans(&self) {
        lock(&self.plans).clear();
    }

    /// The options with which plans with this mixed precision are lowered.
    fn options_for(&self, mixed: Option<&Arc<Mixed>>) -> LowerOptions {
        let mut o = self.lower_options();
        if let Some(m) = mixed {
            (o.passes.amp, o.passes.kept, o.passes.mixed) = (m.policy, m.kept, m.ops.clone());
        }
        o
    }

    /// The executable of a graph without symbols. If the cache has it, nothing is planned. `donated` says for
    /// each input whether the plan may overwrite it.
    pub(crate) fn plan(self: &Arc<Planner>, graph: Graph, donated: Vec<bool>) -> Result<Arc<Executable>> {
        self.plan_for(graph, donated, Wanted::default())
    }

    /// Like [`Planner::plan`], for a first run with known values, or with its own mixed precision.
    pub(crate) fn plan_for(
        self: &Arc<Planner>,
        graph: Graph,
        donated: Vec<bool>,
        wanted: Wanted<'_>,
    ) -> Result<Arc<Executable>> {
        let (r, stats) = (&self.runtime, &self.runtime.stats);
        let graph = Arc::new(graph);
        let mixed = match self.unchecked(wanted.mixed) {
            true => Some(self.checked(&graph, wanted)?),
            false => wanted.mixed.cloned(),
        };
        let mut key = PlanKey { graph, donated, tuning: self.tuning_generation(), mixed };
        if let Some(e) = lock(&self.plans).get(&key) {
            stats.plan_hits.fetch_add(1, Ordering::Relaxed);
            return Ok(e);
        }
        let donated = key.donated.clone();
        let mixed = key.mixed.clone();
        let options = || LowerOptions { donated: donated.clone(), ..self.options_for(mixed.as_ref()) };
        let mode = self.tuning.mode_at(self.lowering.level);
        let at_once = matches!(mode, TuningMode::Budget(_) | TuningMode::Exhaustive);
        if at_once && self.tune_new(&lower(&key.graph, r.device.as_target(), &options())?) {
            key.tuning = self.tuning_generation();
        }
        // Make a lease now, so that a plan whose scratch memory cannot be allocated is not cached.
        let ready = |p: Plan| {
            let exe = Executable::new(r, self.lowering.level, p)?;
            exe.give_back(exe.lease(None)?);
            Ok(exe)
        };
        let (exe, given_up) = self.first_that_fits(&key.graph, options(), &ready)?;
        if !at_once && exe.plan().steps.iter().any(|s| s.tunable.is_some()) {
            self.tune_new(exe.plan());
        }
        let exe = Arc::new(exe);
        tracing::info!(
            device = r.device.info().id,
            nodes = key.graph.nodes().len(),
            steps = exe.plan().steps.len(),
            scratch = exe.plan().scratch(),
            "plan made"
        );
        stats.plans_built.fetch_add(1, Ordering::Relaxed);
        stats.smaller_plans.fetch_add((given_up > 0) as u64, Ordering::Relaxed);
        lock(&self.plans).put(key, exe.clone());
        Ok(exe)
    }

    /// Whether the plan needs a check of values that has not been made: ops may be computed in f16 only if
    /// their values fit.
    fn unchecked(&self, mixed: Option<&Arc<Mixed>>) -> bool {
        let l = &self.lowering;
        let (policy, ops) = mixed.map_or((l.amp, &l.mixed), |m| (m.policy, &m.ops));
        policy == AmpPolicy::F16 && !ops.in_range && self.lower_options().passes.does(MIXED)
    }

    /// The mixed precision of a graph after a check of the values of the sample: ops whose operands or
    /// results are near the end of f16's range stay in f32. Without a sample, f16 is not used.
    fn checked(self: &Arc<Planner>, graph: &Arc<Graph>, wanted: Wanted<'_>) -> Result<Arc<Mixed>> {
        let key = (graph.clone(), wanted.mixed.cloned());
        if let Some(m) = lock(&self.ranges).get(&key) {
            return Ok(m);
        }
        let l = &self.lowering;
        let own = || Mixed { policy: l.amp, kept: l.amp_kept, ops: l.mixed.clone() };
        let mut mixed = wanted.mixed.map_or_else(own, |m| (**m).clone());
        let Some((inputs, args)) = wanted.sample else { return Ok(Arc::new(mixed)) };
        let d = &self.runtime.device;
        let (mut g, ops) = ranged(graph, d.as_target(), &self.options_for(wanted.mixed))?;
        mixed.ops.in_range = true;
        let named = |id: &NodeId| format!("{} at {}", g.node(*id).op.name(), g.node(*id).span);
        let names: Vec<String> = ops.iter().map(|(id, _)| named(id)).collect();
        let mut values: Vec<NodeId> = ops.iter().flat_map(|(_, v)| v.iter().copied()).collect();
        values.sort();
        values.dedup();
        g.set_outputs(vec![]);
        for v in &values {
            let size = g.abs(*v)?;
            let axes: Vec<usize> = (0..g.shape(*v).rank()).collect();
            let most = g.reduce(ReduceKind::Max, size, &axes, false)?;
            g.output("", most);
        }
        let full = Arc::new(Mixed::default());
        let exe = self.plan_for(g, vec![], Wanted { mixed: Some(&full), sample: None })?;
        let most = exe.download(&exe.run(inputs, args)?)?;
        let most = |v: &NodeId| {
            let at = values.binary_search(v).ok().and_then(|k| most.get(k)?.get(0));
            at.map_or(f64::INFINITY, |s| s.as_f64())
        };
        for ((id, values), name) in ops.iter().zip(names) {
            // A NaN counts as too large.
            let top = values.iter().map(most).fold(0.0, |a: f64, b| if b > a || b.is_nan() { b } else { a });
            if top.is_nan() || top > F16_MAX / RANGE_MARGIN {
                mixed.ops.too_large.insert(id.0, format!("{name} (largest value {top:.3e})"));
            }
        }
        let mixed = Arc::new(mixed);
        lock(&self.ranges).put(key, mixed.clone());
        Ok(mixed)
    }

    /// The memory that the plan of a graph needs, without its inputs.
    pub(crate) fn fit(&self, graph: &Graph, donated: Vec<bool>, mixed: Option<&Arc<Mixed>>) -> Result<Fit> {
        let d = &*self.runtime.device;
        let plan = lower(graph, d.as_target(), &LowerOptions { donated, ..self.options_for(mixed) })?;
        Ok(Fit::of(d, &plan, &[]))
    }

    /// The plan of a graph without symbols that fits into the free memory together with inputs of the given
    /// sizes in bytes, which are not allocated yet. The result is the fastest plan or, if the fastest plan
    /// does not fit, a plan without some of the transformations that cost memory.
    pub(crate) fn lower_to_fit(&self, graph: &Graph, inputs: &[usize]) -> Result<Plan> {
        let d = &*self.runtime.device;
        let fits = |p: Plan| Fit::of(d, &p, inputs).check(d, &p).map(|()| p);
        self.first_that_fits(graph, self.lower_options(), &fits).map(|(p, _)| p)
    }

    /// Calls `take` with plans that need less and less memory, until `take` succeeds or returns another error
    /// than out of memory. Returns this result, and how many of the first entries of [`MEMORY_COSTLY`] are
    /// switched off in the plan (0 for the fastest plan).
    fn first_that_fits<T>(
        &self,
        graph: &Graph,
        mut options: LowerOptions,
        take: &dyn Fn(Plan) -> Result<T>,
    ) -> Result<(T, usize)> {
        let d = &*self.runtime.device;
        let target = d.as_target();
        let first = match take(lower(graph, target, &options)?) {
            Err(e @ Error::OutOfMemory { .. }) => e,
            r => return r.map(|v| (v, 0)),
        };
        let need = Fit::of(d, &lower(graph, target, &options)?, &[]).device();
        for (n, name) in MEMORY_COSTLY.iter().enumerate() {
            if !options.passes.does(name) {
                continue;
            }
            options.passes.without.insert(name.to_string());
            let mut plan = lower(graph, target, &options)?;
            let less = Fit::of(d, &plan, &[]).device();
            if less >= need {
                continue;
            }
            plan.warnings
                .push(format!("{name}: left out for lack of memory ({need} bytes with it, {less} without)"));
            match take(plan) {
                Err(Error::OutOfMemory { .. }) => {}
                r => {
                    let (device, without) = (&d.info().id, &MEMORY_COSTLY[..=n]);
                    tracing::warn!(device, ?without, need, less, "out of memory: a smaller plan is taken");
                    return r.map(|v| (v, n + 1));
                }
            }
        }
        Err(first)
    }
}
