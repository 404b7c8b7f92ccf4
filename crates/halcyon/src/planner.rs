//! `Planner`: makes executables of graphs, and caches them.

mod tuner;

use crate::executable::Executable;
use crate::fit::Fit;
use crate::lru::Lru;
use crate::runtime::Runtime;
use crate::sync::lock;
use crate::tune::{Tuning, TuningMode};
use halcyon_ir::Graph;
use halcyon_ir::error::{Error, Result};
use halcyon_ir::lower::{LowerOptions, lower};
use halcyon_ir::passes::autocast::KeptInF32;
use halcyon_ir::passes::{AmpPolicy, BLOCKED, Level, PACKED, PassOptions};
use halcyon_ir::plan::Plan;
use halcyon_ir::target::MatmulPrecision;
use std::collections::BTreeSet;
use std::fmt;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

/// Maximum number of plans that a planner caches.
const PLAN_CACHE: usize = 256;
/// Transformations that cost memory. A plan that does not fit is made again without the first, then without
/// both.
const MEMORY_COSTLY: [&str; 2] = [PACKED, BLOCKED];

/// How graphs are lowered.
#[derive(Clone, Debug, Default)]
pub(crate) struct Lowering {
    pub(crate) level: Level,
    pub(crate) precision: MatmulPrecision,
    pub(crate) amp: AmpPolicy,
    /// The work that stays in f32 under `amp`, according to measured rates.
    pub(crate) amp_kept: KeptInF32,
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
}

#[derive(Clone, PartialEq, Eq, Hash)]
struct PlanKey {
    graph: Arc<Graph>,
    donated: Vec<bool>,
    /// Generation of the tuning results that the plan was made with.
    tuning: u64,
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
        Arc::new(Planner {
            runtime,
            lowering,
            tuning: tuning.into(),
            plans: Mutex::new(Lru::new(PLAN_CACHE)),
        })
    }

    /// The options with which plans are lowered.
    pub(crate) fn lower_options(&self) -> LowerOptions {
        let l = &self.lowering;
        LowerOptions {
            passes: PassOptions { level: l.level, without: l.without.clone(), amp: l.amp, kept: l.amp_kept },
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

    /// The executable of a graph without symbols, from the cache if it is there. `donated` says for each
    /// input whether the plan may overwrite it.
    pub(crate) fn plan(self: &Arc<Planner>, graph: Graph, donated: Vec<bool>) -> Result<Arc<Executable>> {
        let (r, stats) = (&self.runtime, &self.runtime.stats);
        let mut key = PlanKey { graph: Arc::new(graph), donated, tuning: self.tuning_generation() };
        if let Some(e) = lock(&self.plans).get(&key) {
            stats.plan_hits.fetch_add(1, Ordering::Relaxed);
            return Ok(e);
        }
        let donated = key.donated.clone();
        let options = || LowerOptions { donated: donated.clone(), ..self.lower_options() };
        let at_once = matches!(self.tuning.mode, TuningMode::Budget(_));
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

    /// The plan of a graph without symbols that fits into the free memory together with inputs of the given
    /// sizes in bytes, which are not allocated yet. This is the fastest plan, or if that does not fit, one
    /// without the transformations that cost memory.
    pub(crate) fn lower_to_fit(&self, graph: &Graph, inputs: &[usize]) -> Result<Plan> {
        let d = &*self.runtime.device;
        let fits = |p: Plan| Fit::of(d, &p, inputs).check(d, &p).map(|()| p);
        self.first_that_fits(graph, self.lower_options(), &fits).map(|(p, _)| p)
    }

    /// Calls `take` with plans that need less and less memory, until `take` returns something else than an
    /// out-of-memory error. Returns this result and the number of transformations that were left out.
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
