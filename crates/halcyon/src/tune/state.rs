//! The tuning state of a backend: which kernels are tuned, which wait to be tuned, and the results.

use super::measure::{Measured, NotTuned};
use super::options::TuneOptions;
use super::report::{Event, TunedKernel, TuningReport, Untuned};
use crate::runtime::Runtime;
use crate::sync::lock;
use halcyon_hal::tune::{Entry, RejectReason, TuningCache, TuningMode};
use halcyon_ir::error::Result;
use halcyon_ir::kernel::tune::{Tunable, TunedVariants};
use halcyon_ir::passes::Level;
use halcyon_ir::plan::Plan;
use std::collections::{BTreeMap, HashSet, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

/// A key to tune. Steps whose kernels have the same variants share a key.
#[derive(Clone, Debug)]
pub(crate) struct Job {
    tunable: Arc<Tunable>,
    steps: usize,
    /// Estimated time in one run of the plan, in seconds: determines the order.
    cost: f64,
}

/// The keys of plans that are not tuned yet, the most expensive first, and the number of tuned keys.
pub(crate) fn jobs(plans: &[Plan]) -> (Vec<Job>, usize) {
    let mut by_key: BTreeMap<&str, Job> = BTreeMap::new();
    let mut known = HashSet::new();
    for s in plans.iter().flat_map(|p| &p.steps) {
        let Some(t) = &s.tunable else { continue };
        if t.tuned {
            known.insert(&*t.choices.key);
            continue;
        }
        // Rates of a small device; only the order of keys depends on them.
        let cost = s.flops as f64 / 1e11 + s.bytes as f64 / 1e10 + 1e-6;
        let job = by_key.entry(&t.choices.key);
        let job = job.or_insert_with(|| Job { tunable: t.clone(), steps: 0, cost: 0.0 });
        (job.steps, job.cost) = (job.steps + 1, job.cost + cost);
    }
    let mut jobs: Vec<Job> = by_key.into_values().collect();
    jobs.sort_by(|a, b| b.cost.total_cmp(&a.cost));
    (jobs, known.len())
}

/// Which kernels of a device are tuned or are to be tuned, and the cache of the results.
#[derive(Debug)]
pub(crate) struct Tuning {
    pub(crate) mode: TuningMode,
    /// Whether the user set the mode.
    chosen: bool,
    pub(crate) cache: Arc<TuningCache>,
    /// The device's key in the cache.
    pub(crate) device: String,
    known: Mutex<Option<Arc<TunedVariants>>>,
    /// Incremented whenever new results change which kernels plans use.
    pub(crate) generation: AtomicU64,
    /// Remaining time of [`TuningMode::Budget`].
    left: Mutex<Duration>,
    waiting: Mutex<TuneQueue>,
    idle: Condvar,
    recovered: AtomicBool,
    /// Only one tuner runs at a time, because two would disturb each other's timings.
    busy: Mutex<()>,
}

/// The keys to tune in the background.
#[derive(Debug, Default)]
struct TuneQueue {
    jobs: VecDeque<Job>,
    /// Keys that were requested so far.
    seen: HashSet<String>,
    /// Whether a thread tunes keys.
    working: bool,
}

impl Tuning {
    /// `mode` is `None` if the user set no mode.
    pub(crate) fn new(mode: Option<TuningMode>, cache: Arc<TuningCache>, device: String) -> Tuning {
        let (chosen, mode) = (mode.is_some(), mode.unwrap_or_default());
        let left = if let TuningMode::Budget(d) = mode { d } else { Duration::ZERO };
        Tuning {
            mode,
            chosen,
            cache,
            device,
            known: Mutex::default(),
            generation: AtomicU64::new(0),
            left: Mutex::new(left),
            waiting: Mutex::default(),
            idle: Condvar::new(),
            recovered: AtomicBool::new(false),
            busy: Mutex::default(),
        }
    }

    /// The mode for plans of a level.
    pub(crate) fn mode_at(&self, level: Level) -> TuningMode {
        if level == Level::O3 && !self.chosen { TuningMode::Exhaustive } else { self.mode }
    }

    /// The tuned kernels that plans may use; `None` if tuning is off.
    pub(crate) fn tuned_variants(&self) -> Option<Arc<TunedVariants>> {
        if self.mode == TuningMode::Off {
            return None;
        }
        let mut k = lock(&self.known);
        Some(k.get_or_insert_with(|| Arc::new(self.cache.tuned_variants(&self.device))).clone())
    }

    /// Makes plans use the current contents of the cache. If that changes their kernels (`news`), the
    /// generation changes.
    fn adopt(&self, news: bool) {
        *lock(&self.known) = Some(Arc::new(self.cache.tuned_variants(&self.device)));
        if news {
            self.generation.fetch_add(1, Ordering::AcqRel);
        }
    }

    /// Tunes keys, and makes plans use the results. If the results change which kernels plans use, the
    /// generation changes.
    ///
    /// # Errors
    /// [`halcyon_ir::Error::Io`] if the cache cannot be written; errors of the device.
    pub(crate) fn run(
        &self,
        runtime: &Runtime,
        jobs: &[Job],
        options: &TuneOptions<'_>,
    ) -> Result<TuningReport> {
        let _alone = lock(&self.busy);
        let start = Instant::now();
        let deadline = options.budget.and_then(|b| start.checked_add(b));
        let mut report = TuningReport {
            device: self.device.clone(),
            cache: self.cache.path().map(Into::into),
            ..TuningReport::default()
        };
        if !self.recovered.swap(true, Ordering::Relaxed) {
            let detail = "an earlier process ended while it ran this variant (it crashed or was stopped)";
            report.recovered = self.cache.recover(RejectReason::Crashed, detail)?;
        }
        let mut guard = self.cache.guard()?;
        let mut result = Ok(());
        for (i, job) in jobs.iter().enumerate() {
            if deadline.is_some_and(|d| Instant::now() >= d) {
                report.left = jobs.len() - i;
                break;
            }
            let measured = Measured {
                runtime,
                cache: &self.cache,
                device: &self.device,
                tunable: &job.tunable,
                options,
                deadline,
                done: (i, jobs.len()),
            };
            let (key, op) = (job.tunable.choices.key.clone(), job.tunable.op());
            match measured.best(&mut guard) {
                Ok(best) => {
                    runtime.stats.kernels_tuned.fetch_add(1, Ordering::Relaxed);
                    self.cache.add(&Entry { best: Some(best.clone()), ..Entry::new(&self.device, &key) });
                    let rejected = self.cache.get(&self.device, &key).map(|e| e.rejected).unwrap_or_default();
                    let done = TunedKernel { key, op, steps: job.steps, best, rejected };
                    (options.events)(Event::Done(&done));
                    report.tuned.push(done);
                    result = self.cache.save();
                }
                Err(NotTuned::Time) => {
                    report.left = jobs.len() - i;
                    break;
                }
                Err(NotTuned::Kernel(reason)) => report.failed.push(Untuned { key, op, reason }),
                Err(NotTuned::Device(e)) => result = Err(e),
            }
            if result.is_err() {
                break;
            }
        }
        drop(guard);
        self.adopt(report.tuned.iter().any(|k| k.best.variant != k.best.default));
        report.seconds = start.elapsed().as_secs_f64();
        result.map(|()| report)
    }

    /// Tunes the untuned keys of a plan that were not requested before. With [`TuningMode::Budget`], tuning
    /// stops when the remaining time is used up.
    ///
    /// # Errors
    /// The errors of [`Tuning::run`].
    pub(crate) fn run_at_once(&self, runtime: &Runtime, plan: &Plan, mode: TuningMode) -> Result<()> {
        let mut left = lock(&self.left);
        let budget = matches!(mode, TuningMode::Budget(_)).then_some(*left);
        if budget.is_some_and(|b| b.is_zero()) {
            return Ok(());
        }
        let start = Instant::now();
        let options = TuneOptions { budget, ..TuneOptions::default() };
        let new = |j: &Job| lock(&self.waiting).seen.insert(j.tunable.choices.key.clone());
        let jobs: Vec<Job> = jobs(std::slice::from_ref(plan)).0.into_iter().filter(new).collect();
        if !jobs.is_empty() {
            tracing::info!(kernels = jobs.len(), "tuning the kernels of a plan before its first run");
        }
        let ran = self.run(runtime, &jobs, &options);
        *left = left.saturating_sub(start.elapsed());
        ran.map(drop)
    }

    /// Notes in the cache which tuned kernels a plan uses. Returns whether it also has untuned keys.
    pub(crate) fn touch(&self, plan: &Plan) -> bool {
        let keys = |tuned: bool| {
            let all = plan.steps.iter().filter_map(|s| s.tunable.as_ref());
            all.filter(move |t| t.tuned == tuned).map(|t| &*t.choices.key).collect::<Vec<_>>()
        };
        self.cache.touch(&self.device, &keys(true));
        !keys(false).is_empty()
    }

    /// Adds keys that were not requested before to the keys that wait. If keys wait and no thread tunes them,
    /// calls `start`, which starts such a thread.
    pub(crate) fn enqueue(&self, jobs: Vec<Job>, start: impl FnOnce() -> std::io::Result<()>) {
        let mut w = lock(&self.waiting);
        for j in jobs {
            if w.seen.insert(j.tunable.choices.key.clone()) {
                w.jobs.push_back(j);
            }
        }
        if w.working || w.jobs.is_empty() {
            return;
        }
        match start() {
            Ok(()) => w.working = true,
            Err(e) => {
                tracing::warn!(%e, "the thread that tunes kernels does not start");
                w.jobs.clear();
            }
        }
    }

    /// The next waiting key. If no key waits, the calling thread must end.
    pub(crate) fn next_job(&self) -> Option<Job> {
        let mut w = lock(&self.waiting);
        let job = w.jobs.pop_front();
        w.working = job.is_some();
        drop(w);
        if job.is_none() {
            self.idle.notify_all();
        }
        job
    }

    /// Drops the keys that wait. The thread that tunes them calls this before it ends.
    pub(crate) fn abandon(&self) {
        let mut w = lock(&self.waiting);
        w.jobs.clear();
        w.working = false;
        drop(w);
        self.idle.notify_all();
    }

    /// Waits, at most `limit`, until no key waits and none is being tuned. Returns false if the time was not
    /// enough.
    pub(crate) fn wait(&self, limit: Duration) -> bool {
        let busy = |w: &mut TuneQueue| w.working || !w.jobs.is_empty();
        let waited = self.idle.wait_timeout_while(lock(&self.waiting), limit, busy);
        !waited.map_or_else(|e| e.into_inner().1.timed_out(), |(_, w)| w.timed_out())
    }
}
