//! Measures the gain of each transformation of a plan by comparison with the plan that is made without it.

use crate::backend::Backend;
use crate::executable::Executable;
use crate::session::{Session, difference};
pub use crate::timing::{Effort, MAX_GROWTH, median, median_interval};
use halcyon_hal::BufferRef;
use halcyon_ir::error::Result;
use halcyon_ir::plan::{Plan, Receipt, StepWork, Storage};
use halcyon_ir::{ConstData, Scalar};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Costs that are computed from the plan alone, so they are reproducible.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Tally {
    /// Steps of one run: library kernels, generated kernels and host work.
    pub steps: usize,
    /// Distinct generated kernels, each compiled once.
    pub generated: usize,
    /// Scratch buffers that steps write.
    pub intermediates: usize,
    /// Bytes of scratch, including workspace.
    pub scratch: usize,
    /// Bytes of constants that steps read unpacked.
    pub constants: usize,
    /// Bytes of packed constants.
    pub packed: usize,
    /// Floating-point operations of all steps.
    pub flops: u64,
    /// Bytes that the steps read and write, summed over the steps.
    pub moved: u64,
}

impl Tally {
    /// The costs of a plan.
    pub fn of(plan: &Plan) -> Tally {
        let mut kernels: Vec<&halcyon_ir::kernel::Kernel> = vec![];
        for s in &plan.steps {
            if let StepWork::Kernel { kernel, .. } = &s.work
                && !kernels.contains(&&**kernel)
            {
                kernels.push(kernel);
            }
        }
        let mut written: Vec<_> = plan
            .steps
            .iter()
            .flat_map(|s| s.buffers.iter().rev().take(s.outputs))
            .filter(|b| matches!(plan.buffers[b.0 as usize].storage, Storage::Slot(_)))
            .collect();
        written.sort();
        written.dedup();
        Tally {
            steps: plan.steps.len(),
            generated: kernels.len(),
            intermediates: written.len(),
            scratch: plan.scratch(),
            constants: plan.const_bytes(),
            packed: plan.packed_bytes(),
            flops: plan.flops(),
            moved: plan.bytes(),
        }
    }
}

/// A transformation that changed the plan, and its measured gain.
#[derive(Clone, Debug)]
pub struct Gain {
    /// Name of the transformation.
    pub transformation: String,
    /// Number of times it was applied.
    pub count: usize,
    /// For each pair of bursts, the time without the transformation divided by the time with it.
    pub ratios: Vec<f64>,
    /// For each burst without the transformation, the mean time of a run in seconds.
    pub without: Vec<f64>,
    /// Costs of the plan without the transformation.
    pub tally: Tally,
    /// Largest difference between the results without the transformation and those at O0, as defined by
    /// [`difference`].
    pub error: f64,
}

/// The measured receipts of a plan.
#[derive(Clone, Debug)]
pub struct Measured {
    /// For each burst with all transformations, the mean time of a run in seconds.
    pub with: Vec<f64>,
    /// Costs of the plan with all transformations.
    pub tally: Tally,
    /// Largest difference between the results and those at O0, as defined by [`difference`].
    pub error: f64,
    /// One entry per transformation that changed the plan.
    pub gains: Vec<Gain>,
}

/// One side of a comparison of two plans: a plan that is run many times, with its inputs on the device.
pub(crate) struct Side<'a> {
    backend: &'a Backend,
    exe: Arc<Executable>,
    inputs: Vec<BufferRef>,
}

/// Time after which the idle threads of the other side's device sleep.
const SLEEP_DELAY: Duration = Duration::from_millis(1);

impl<'a> Side<'a> {
    pub(crate) fn new(session: &'a Session, inputs: &[ConstData]) -> Result<Side<'a>> {
        Ok(Side {
            backend: session.backend(),
            exe: session.prepare(inputs)?,
            inputs: session.upload(inputs)?,
        })
    }

    fn run(&self) -> Result<()> {
        self.exe.run(&self.inputs, &[] as &[Scalar])?;
        self.backend.synchronize()
    }

    /// Measures the mean time of a run in seconds. A first run, which is not timed, refills the caches that
    /// the other side evicted.
    pub(crate) fn burst(&self, time: Duration) -> Result<f64> {
        std::thread::sleep(SLEEP_DELAY);
        self.run()?;
        let (start, mut n) = (Instant::now(), 0u32);
        while n == 0 || start.elapsed() < time {
            self.run()?;
            n += 1;
        }
        Ok(start.elapsed().as_secs_f64() / f64::from(n))
    }
}

/// The times of pairs of bursts.
struct Bursts {
    /// For each pair, the time of the other side over the time of this side.
    ratios: Vec<f64>,
    /// The mean times of a run in seconds.
    ours: Vec<f64>,
    theirs: Vec<f64>,
}

/// Runs pairs of bursts until the median of their ratios is certain enough. The side that is first
/// alternates.
fn bursts(ours: &Side<'_>, theirs: &Side<'_>, effort: Effort) -> Result<Bursts> {
    let mut all = Bursts { ratios: vec![], ours: vec![], theirs: vec![] };
    let least = effort.pairs.max(1);
    let unsure = |r: &[f64]| {
        let (low, high) = median_interval(r);
        high - low > effort.interval * median(r)
    };
    for i in 0..least * MAX_GROWTH {
        if i >= least && !unsure(&all.ratios) {
            break;
        }
        let (a, b) = if i % 2 == 0 {
            let a = ours.burst(effort.burst)?;
            (a, theirs.burst(effort.burst)?)
        } else {
            let b = theirs.burst(effort.burst)?;
            (ours.burst(effort.burst)?, b)
        };
        all.ratios.push(b / a.max(1e-12));
        all.ours.push(a);
        all.theirs.push(b);
    }
    Ok(all)
}

/// The time of a run of `theirs` over that of `ours`, for pairs of bursts that run directly after each other.
///
/// # Errors
/// The errors of [`Session::prepare`] and of the runs.
pub fn compare(ours: &Session, theirs: &Session, inputs: &[ConstData], effort: Effort) -> Result<Vec<f64>> {
    let (ours, theirs) = (Side::new(ours, inputs)?, Side::new(theirs, inputs)?);
    bursts(&ours, &theirs, effort).map(|b| b.ratios)
}

/// Measures the receipts of a session's plan. `rebuild` opens the same backend with one transformation
/// disabled, or at level O0 for `None`. The two bursts of a pair run directly after each other, and the side
/// that is first alternates, so that drift in the machine's speed cancels. On a noisy machine more pairs are
/// measured ([`Effort::interval`]). At most one other plan is in memory at a time.
///
/// # Errors
/// The errors of [`Session::prepare`] and of the runs.
pub fn measure(
    session: &Session,
    inputs: &[ConstData],
    effort: Effort,
    rebuild: impl Fn(Option<&str>) -> Result<Backend>,
) -> Result<Measured> {
    let ours = Side::new(session, inputs)?;
    let reference = Session::new(&rebuild(None)?, session.graph().clone()).run(inputs)?;
    let error = difference(&session.run(inputs)?, &reference);
    let (mut with, mut gains) = (vec![], vec![]);
    if ours.exe.plan().receipts.is_empty() {
        for _ in 0..effort.pairs.max(1) {
            with.push(ours.burst(effort.burst)?);
        }
    }
    for Receipt { transformation, count, .. } in ours.exe.plan().receipts.clone() {
        let other = Session::new(&rebuild(Some(&transformation))?, session.graph().clone());
        let error = difference(&other.run(inputs)?, &reference);
        let theirs = Side::new(&other, inputs)?;
        let Bursts { ratios, ours: more, theirs: without } = bursts(&ours, &theirs, effort)?;
        with.extend(more);
        let tally = Tally::of(theirs.exe.plan());
        gains.push(Gain { transformation, count, ratios, without, tally, error });
    }
    Ok(Measured { with, tally: Tally::of(ours.exe.plan()), error, gains })
}

impl Session {
    /// The receipts of this session's plan with measured gain and error. The gain of a transformation is the
    /// time without it divided by the time with it (the median of at least `n` pairs of bursts, see
    /// [`measure`]). The error is the largest difference of the whole plan's results from those at level O0,
    /// relative to O0's largest magnitude; all receipts have the same error. `rebuild` opens the same backend
    /// without the given transformation, or at level O0 for `None`.
    pub fn measure_receipts(
        &self,
        inputs: &[ConstData],
        n: usize,
        rebuild: impl Fn(Option<&str>) -> Result<Backend>,
    ) -> Result<Vec<Receipt>> {
        let effort = Effort { pairs: n, ..Effort::default() };
        let m = measure(self, inputs, effort, rebuild)?;
        let of = |g: &Gain| Receipt {
            gain: Some(median(&g.ratios)),
            error: Some(m.error),
            ..Receipt::new(&g.transformation, g.count)
        };
        Ok(m.gains.iter().map(of).collect())
    }
}
