//! Tuning: finds which of the kernels that a template can build is fastest on this device.
//!
//! A backend first uses the kernels that the templates' heuristics choose (the default). Tuning builds the
//! other variants that are legal on the device ([`halcyon_ir::kernel::tune`]), compares their results with
//! the default's, times both alternately, and records the best in a cache on disk ([`halcyon_hal::tune`]). A
//! variant that gives wrong results, does not compile, fails or crashes is also recorded (quarantined), and
//! never tried again on that device with that driver. Plans use tuned kernels at level O2; their receipts and
//! steps say so.
//!
//! [`Backend::tune`] tunes the kernels of a graph on request; [`TuningMode`] controls automatic tuning.

mod measure;
mod standard;

pub use halcyon_hal::tune::{
    Best, Entry, FILE_VARIABLE, Guard, Rejection, Table, TuningCache, TuningMode, VARIABLE, Why, device_key,
};
pub use halcyon_ir::kernel::tune::{Choices, Known, Tolerance, Tunable, Variant};
pub use standard::standard;

use crate::backend::{Backend, Inner};
use crate::receipts::Effort;
use crate::session::Session;
use halcyon_ir::error::{Error, Result};
use halcyon_ir::kernel::lower::Lowered;
use halcyon_ir::lower::lower;
use halcyon_ir::passes::{Level, TUNED};
use halcyon_ir::plan::Plan;
use halcyon_ir::shape::Shape;
use halcyon_ir::target::{Caps, Declined};
use halcyon_ir::{ConstData, Graph};
use measure::{Measured, Stop};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashSet, VecDeque};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Weak};
use std::time::{Duration, Instant};

/// The source of candidates.
pub trait Space: Sync {
    /// The variants to measure against the default.
    fn variants(&self, t: &Tunable) -> Vec<Variant>;
    /// Builds the kernels of a variant, or of the default.
    ///
    /// # Errors
    /// [`Declined`] if the device cannot run it.
    fn build(&self, t: &Tunable, v: &Variant, caps: &Caps) -> Result<Lowered, Declined>;
}

/// The variants of the kernel IR's templates.
#[derive(Clone, Copy, Debug, Default)]
pub struct Templates;

impl Space for Templates {
    fn variants(&self, t: &Tunable) -> Vec<Variant> {
        t.choices.others.clone()
    }

    fn build(&self, t: &Tunable, v: &Variant, caps: &Caps) -> Result<Lowered, Declined> {
        t.build(v, caps)
    }
}

/// Progress events of tuning. At least one is sent for every pair of bursts.
#[derive(Clone, Copy, Debug)]
pub enum Event<'a> {
    Candidate(&'a Progress),
    Done(&'a TunedKernel),
}

/// The progress of tuning.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    /// Number of kernels done; `of` is their total.
    pub done: usize,
    /// Number of kernels to tune.
    pub of: usize,
    /// The key of the kernel being tuned.
    pub key: String,
    /// Number, from 1, of the candidate being tried; `candidates` is their total.
    pub candidate: usize,
    /// Number of candidates of that kernel.
    pub candidates: usize,
}

/// Options of `Backend::tune_with`.
#[derive(Clone, Copy)]
pub struct TuneOptions<'a> {
    /// Time after which to stop; `None`: no limit. Kernels are tuned in order of their cost in the plan, most
    /// expensive first.
    pub budget: Option<Duration>,
    /// Number and duration of measurements of the candidates closest to the best.
    pub effort: Effort,
    /// The source of candidates; the kernel IR's templates by default.
    pub space: &'a dyn Space,
    /// Called with each progress event.
    pub events: &'a (dyn Fn(Event<'_>) + Sync),
}

impl std::fmt::Debug for TuneOptions<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TuneOptions").field("budget", &self.budget).field("effort", &self.effort).finish()
    }
}

impl Default for TuneOptions<'_> {
    fn default() -> Self {
        let effort = Effort { pairs: 11, interval: 0.05, burst: Duration::from_millis(4) };
        TuneOptions { budget: None, effort, space: &Templates, events: &|_| () }
    }
}

/// A kernel that was tuned.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TunedKernel {
    /// The kernel's key in the cache.
    pub key: String,
    /// The op that the kernel computes.
    pub op: String,
    /// Number of steps of the plan that use it.
    pub steps: usize,
    /// The fastest variant, which may be the default.
    pub best: Best,
    /// Variants that were quarantined, now or earlier.
    pub rejected: Vec<Rejection>,
}

/// A kernel that could not be tuned, and why.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Untuned {
    /// The kernel's key in the cache.
    pub key: String,
    /// The op that the kernel computes.
    pub op: String,
    /// Why it was not tuned.
    pub reason: String,
}

/// The results of tuning.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TuningReport {
    /// The device's key in the cache, as [`device_key`] gives it.
    pub device: String,
    /// Path of the cache file; `None` if the cache is in memory.
    pub cache: Option<PathBuf>,
    /// Kernels that were tuned.
    pub tuned: Vec<TunedKernel>,
    /// Number of kernels that had been tuned before.
    pub known: usize,
    /// Number of kernels not tuned because the budget was used up.
    pub left: usize,
    /// Kernels that could not be tuned.
    pub failed: Vec<Untuned>,
    /// Candidates during which an earlier process ended, quarantined now: key and rejection.
    pub recovered: Vec<(String, Rejection)>,
    /// Time taken, in seconds.
    pub seconds: f64,
}

/// A key to tune.
#[derive(Clone, Debug)]
struct Job {
    tunable: Arc<Tunable>,
    steps: usize,
    /// Estimated time in one run of the plan, in seconds: determines the order.
    cost: f64,
}

/// The keys of plans that are not tuned yet, the most expensive first, and the number of tuned ones.
fn jobs(plans: &[Plan]) -> (Vec<Job>, usize) {
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

/// The tuning state of a backend.
#[derive(Debug)]
pub(crate) struct Tuning {
    mode: TuningMode,
    cache: TuningCache,
    /// The device's key in the cache.
    device: String,
    known: Mutex<Option<Arc<Known>>>,
    /// Incremented whenever new results change which kernels plans use.
    generation: AtomicU64,
    /// Remaining time of [`TuningMode::Budget`].
    left: Mutex<Duration>,
    queue: Mutex<Queue>,
    idle: Condvar,
    recovered: AtomicBool,
    /// One tuner at a time: two would disturb each other's timings.
    busy: Mutex<()>,
}

#[derive(Debug, Default)]
struct Queue {
    jobs: VecDeque<Job>,
    /// Keys that were requested so far.
    seen: HashSet<String>,
    working: bool,
}

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    // The values are changed only in complete steps, so a panic in another thread leaves them valid.
    m.lock().unwrap_or_else(|e| e.into_inner())
}

impl Tuning {
    pub(crate) fn new(mode: TuningMode, cache: TuningCache, device: String) -> Tuning {
        let left = if let TuningMode::Budget(d) = mode { d } else { Duration::ZERO };
        Tuning {
            mode,
            cache,
            device,
            known: Mutex::default(),
            generation: AtomicU64::new(0),
            left: Mutex::new(left),
            queue: Mutex::default(),
            idle: Condvar::new(),
            recovered: AtomicBool::new(false),
            busy: Mutex::default(),
        }
    }

    pub(crate) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// The tuned kernels that plans may use; `None` if tuning is off.
    pub(crate) fn known(&self) -> Option<Arc<Known>> {
        if self.mode == TuningMode::Off {
            return None;
        }
        let mut k = lock(&self.known);
        Some(k.get_or_insert_with(|| Arc::new(self.cache.known(&self.device))).clone())
    }
}

impl Backend {
    fn tuning(&self) -> &Tuning {
        &self.0.tuning
    }

    /// The tuning cache, which has the results of all devices of this machine.
    pub fn tuning_cache(&self) -> &TuningCache {
        &self.tuning().cache
    }

    /// When this backend tunes.
    pub fn tuning_mode(&self) -> TuningMode {
        self.tuning().mode
    }

    /// The key of this device in a tuning cache.
    pub fn tuning_device(&self) -> &str {
        &self.tuning().device
    }

    /// Counts how often tuning has changed which kernels plans use. Plans of an earlier generation are made
    /// again when they are next requested; compiled functions and captured graphs keep theirs.
    pub fn tuning_generation(&self) -> u64 {
        self.tuning().generation()
    }

    /// Tunes the kernels that a graph's plan uses and that are not tuned yet. The graph must have no symbols.
    ///
    /// # Errors
    /// [`Error::Argument`] if the backend's level or mode uses no tuned kernels; [`Error::Io`] if the cache
    /// file cannot be written (checked before anything is measured); [`Error::Driver`] if the device fails
    /// even with the default kernels.
    pub fn tune(&self, graph: &Graph, budget: Option<Duration>) -> Result<TuningReport> {
        self.tune_with(std::slice::from_ref(graph), &TuneOptions { budget, ..TuneOptions::default() })
    }

    /// As [`Backend::tune`], for the kernels of several graphs.
    ///
    /// # Errors
    /// As [`Backend::tune`].
    pub fn tune_with(&self, graphs: &[Graph], options: &TuneOptions<'_>) -> Result<TuningReport> {
        let lowering = self.lower_options();
        if lowering.tuned.is_none() || !lowering.passes.does(TUNED) {
            let why = match self.tuning_mode() {
                TuningMode::Off => "tuning is off for this backend".into(),
                _ if self.level() < Level::O2 => {
                    format!("level {} takes no tuned kernels; use O2", self.level())
                }
                _ => format!("\"{TUNED}\" is switched off"),
            };
            return Err(Error::argument("tune", why));
        }
        // The user asked for tuning, so an unwritable file is an error; report it before the work, not after.
        self.tuning().cache.save()?;
        let target = self.device().as_target();
        let plans = graphs.iter().map(|g| lower(g, target, &lowering)).collect::<Result<Vec<_>>>()?;
        let (jobs, known) = jobs(&plans);
        drop(plans);
        let mut report = self.tune_jobs(&jobs, options)?;
        report.known = known;
        Ok(report)
    }

    /// Waits, at most `limit`, until background tuning has finished all requested kernels. Returns whether it
    /// has.
    pub fn wait_for_tuning(&self, limit: Duration) -> bool {
        let t = self.tuning();
        let busy = |q: &mut Queue| q.working || !q.jobs.is_empty();
        let waited = t.idle.wait_timeout_while(lock(&t.queue), limit, busy);
        !waited.map_or_else(|e| e.into_inner().1.timed_out(), |(_, w)| w.timed_out())
    }

    fn tune_jobs(&self, jobs: &[Job], options: &TuneOptions<'_>) -> Result<TuningReport> {
        let t = self.tuning();
        let _alone = lock(&t.busy);
        let start = Instant::now();
        let deadline = options.budget.and_then(|b| start.checked_add(b));
        let mut report = TuningReport {
            device: t.device.clone(),
            cache: t.cache.path().map(Into::into),
            ..TuningReport::default()
        };
        if !t.recovered.swap(true, Ordering::Relaxed) {
            let detail = "an earlier process ended while it ran (a crash, or it was stopped)";
            report.recovered = t.cache.recover(Why::Crashed, detail)?;
        }
        let mut guard = t.cache.guard()?;
        let mut result = Ok(());
        for (i, job) in jobs.iter().enumerate() {
            if deadline.is_some_and(|d| Instant::now() >= d) {
                report.left = jobs.len() - i;
                break;
            }
            let measured = Measured {
                backend: self,
                cache: &t.cache,
                device: &t.device,
                tunable: &job.tunable,
                options,
                deadline,
                progress: (i, jobs.len()),
            };
            let (key, op) = (job.tunable.choices.key.clone(), job.tunable.op());
            match measured.best(&mut guard) {
                Ok(best) => {
                    self.0.stats.kernels_tuned.fetch_add(1, Ordering::Relaxed);
                    t.cache.add(&Entry { best: Some(best.clone()), ..Entry::new(&t.device, &key) });
                    let rejected = t.cache.get(&t.device, &key).map(|e| e.rejected).unwrap_or_default();
                    let done = TunedKernel { key, op, steps: job.steps, best, rejected };
                    (options.events)(Event::Done(&done));
                    report.tuned.push(done);
                    result = t.cache.save();
                }
                Err(Stop::Time) => {
                    report.left = jobs.len() - i;
                    break;
                }
                Err(Stop::Kernel(reason)) => report.failed.push(Untuned { key, op, reason }),
                Err(Stop::Device(e)) => result = Err(e),
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

    /// Makes plans use the current contents of the cache. If that changes their kernels (`news`), drops the
    /// cached plans.
    fn adopt(&self, news: bool) {
        let t = self.tuning();
        *lock(&t.known) = Some(Arc::new(t.cache.known(&t.device)));
        if news {
            t.generation.fetch_add(1, Ordering::AcqRel);
            self.forget_plans();
        }
    }

    /// Whether a new plan's kernels are tuned before its first run.
    pub(crate) fn tunes_at_once(&self) -> bool {
        matches!(self.tuning().mode, TuningMode::Budget(_))
    }

    /// Tunes, or queues, the kernels of a new plan as the mode says. Returns whether plans would now use
    /// other kernels.
    pub(crate) fn tune_new(&self, plan: &Plan) -> bool {
        let t = self.tuning();
        let keys = |tuned: bool| {
            let all = plan.steps.iter().filter_map(|s| s.tunable.as_ref());
            all.filter(move |t| t.tuned == tuned).map(|t| &*t.choices.key).collect::<Vec<_>>()
        };
        t.cache.touch(&t.device, &keys(true));
        if keys(false).is_empty() {
            return false;
        }
        match t.mode {
            TuningMode::Off | TuningMode::Cached => false,
            TuningMode::Background => {
                self.enqueue(jobs(std::slice::from_ref(plan)).0);
                false
            }
            TuningMode::Budget(_) => {
                let mut left = lock(&t.left);
                if left.is_zero() {
                    return false;
                }
                let (before, start) = (t.generation(), Instant::now());
                let options = TuneOptions { budget: Some(*left), ..TuneOptions::default() };
                let new = |j: &Job| lock(&t.queue).seen.insert(j.tunable.choices.key.clone());
                let jobs: Vec<Job> = jobs(std::slice::from_ref(plan)).0.into_iter().filter(new).collect();
                if let Err(e) = self.tune_jobs(&jobs, &options) {
                    tracing::warn!(%e, "kernels are not tuned");
                }
                *left = left.saturating_sub(start.elapsed());
                t.generation() != before
            }
        }
    }

    fn enqueue(&self, jobs: Vec<Job>) {
        let t = self.tuning();
        let mut q = lock(&t.queue);
        for j in jobs {
            if q.seen.insert(j.tunable.choices.key.clone()) {
                q.jobs.push_back(j);
            }
        }
        if q.working || q.jobs.is_empty() {
            return;
        }
        let weak = Arc::downgrade(&self.0);
        let thread =
            std::thread::Builder::new().name("halcyon-tuner".into()).spawn(move || background(&weak));
        match thread {
            Ok(_) => q.working = true,
            Err(e) => {
                tracing::warn!(%e, "kernels are not tuned in the background");
                q.jobs.clear();
            }
        }
    }
}

/// Tunes the queued kernels until none is left or the last handle on the backend is dropped.
fn background(weak: &Weak<Inner>) {
    while let Some(backend) = weak.upgrade().map(Backend) {
        let t = backend.tuning();
        let job = {
            let mut q = lock(&t.queue);
            let job = q.jobs.pop_front();
            q.working = job.is_some();
            job
        };
        let Some(job) = job else {
            t.idle.notify_all();
            return;
        };
        match backend.tune_jobs(std::slice::from_ref(&job), &TuneOptions::default()) {
            Ok(r) => {
                r.failed.iter().for_each(|f| tracing::warn!(key = f.key, reason = f.reason, "not tuned"))
            }
            Err(e) => {
                tracing::warn!(%e, "kernels are not tuned any more");
                // The other kernels would fail in the same way.
                let mut q = lock(&t.queue);
                q.jobs.clear();
                q.working = false;
                t.idle.notify_all();
                return;
            }
        }
    }
}

impl Session {
    /// Tunes the kernels of the plan for inputs of these sizes.
    ///
    /// # Errors
    /// As [`Backend::tune`]; errors of binding the graph's symbols.
    pub fn tune(&self, inputs: &[ConstData], options: &TuneOptions<'_>) -> Result<TuningReport> {
        let shapes: Vec<Shape> = inputs.iter().map(|x| Shape::from(&x.dims)).collect();
        let graph = self.graph().bind(&self.graph().solve(&shapes)?)?;
        self.backend().tune_with(&[graph], options)
    }
}
