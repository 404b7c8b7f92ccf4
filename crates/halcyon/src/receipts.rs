//! What each transformation of a plan gains: the plan beside the one that is made without it.

use crate::backend::Backend;
use crate::executable::Executable;
use crate::session::{Session, difference};
use halcyon_hal::BufferRef;
use halcyon_ir::error::Result;
use halcyon_ir::plan::{Plan, Receipt, StepWork, Storage};
use halcyon_ir::{ConstData, Scalar};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What a plan costs, from the plan alone: the same each time that it is made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Tally {
    /// Launches of one run: the device's kernels, generated ones and work on the host.
    pub steps: usize,
    /// Different generated kernels, each of which is compiled once.
    pub generated: usize,
    /// Scratch buffers that steps write.
    pub intermediates: usize,
    /// Bytes of scratch, with workspace.
    pub scratch: usize,
    /// Bytes of constants that steps read as they are.
    pub constants: usize,
    /// Bytes of packed constants.
    pub packed: usize,
    pub flops: u64,
    /// Bytes that the steps read and write, each by itself.
    pub moved: u64,
}

impl Tally {
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

/// How often, and for how long, times are taken.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// Pairs of bursts for each transformation, at the least: one of runs with it, one without.
    pub pairs: usize,
    /// More pairs, up to [`MOST`] times as many, until the median ratio's 95 % interval is not wider than
    /// this share of it.
    pub interval: f64,
    /// A burst has one run, and as many more as fit in this time.
    pub burst: Duration,
}

impl Default for Effort {
    fn default() -> Effort {
        Effort { pairs: 15, interval: 0.05, burst: Duration::from_millis(10) }
    }
}

/// How many times the asked pairs are measured where the machine is too noisy for fewer.
pub const MOST: usize = 4;

/// A transformation that changed the plan.
#[derive(Clone, Debug)]
pub struct Gain {
    pub transformation: String,
    /// How often it applied.
    pub count: usize,
    /// Of each pair, the time without it over the time with it.
    pub ratios: Vec<f64>,
    /// Of each burst without it, the mean seconds of a run.
    pub without: Vec<f64>,
    /// The plan without it.
    pub tally: Tally,
    /// Largest difference from O0 of the result without it, as [`difference`] has it.
    pub error: f64,
}

/// A plan's receipts with what they gain.
#[derive(Clone, Debug)]
pub struct Measured {
    /// Of each burst with everything on, the mean seconds of a run.
    pub with: Vec<f64>,
    pub tally: Tally,
    /// Largest difference of the result from O0, as [`difference`] has it.
    pub error: f64,
    pub gains: Vec<Gain>,
}

/// The middle one.
pub fn median(values: &[f64]) -> f64 {
    let mut v = values.to_vec();
    v.sort_by(f64::total_cmp);
    match v.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => v[n / 2],
        n => (v[n / 2 - 1] + v[n / 2]) / 2.0,
    }
}

/// The 95 % interval of the median, from the order statistics that the binomial distribution puts around it:
/// ranks `n/2 ± 0.98 √n` (Conover, Practical Nonparametric Statistics, section 3.2).
pub fn median_interval(values: &[f64]) -> (f64, f64) {
    let mut v = values.to_vec();
    v.sort_by(f64::total_cmp);
    let n = v.len();
    if n == 0 {
        return (f64::NAN, f64::NAN);
    }
    let reach = 0.98 * (n as f64).sqrt();
    let low = (n as f64 / 2.0 - reach).floor().max(0.0) as usize;
    (v[low], v[n - 1 - low])
}

/// A plan on device buffers, to be run again and again.
struct Side<'a> {
    backend: &'a Backend,
    exe: Arc<Executable>,
    inputs: Vec<BufferRef>,
}

/// Long enough for the threads of another device to park.
const SETTLE: Duration = Duration::from_millis(1);

impl<'a> Side<'a> {
    fn new(session: &'a Session, inputs: &[ConstData]) -> Result<Side<'a>> {
        Ok(Side {
            backend: session.backend(),
            exe: session.prepare(inputs)?,
            inputs: session.upload(inputs)?,
        })
    }

    fn run(&self) -> Result<()> {
        self.exe.run(self.backend, &self.inputs, &[] as &[Scalar])?;
        self.backend.synchronize()
    }

    /// Mean seconds of a run, after one that brings back what the other side has pushed out of the caches.
    fn burst(&self, time: Duration) -> Result<f64> {
        std::thread::sleep(SETTLE);
        self.run()?;
        let (start, mut n) = (Instant::now(), 0u32);
        while n == 0 || start.elapsed() < time {
            self.run()?;
            n += 1;
        }
        Ok(start.elapsed().as_secs_f64() / f64::from(n))
    }
}

/// Measures the receipts of a session's plan. `rebuild` gives the same backend with one transformation
/// switched off, or at level O0 for `None`. Both sides of a pair follow each other at once and take turns in
/// who is first, so that a machine whose speed drifts decides nothing; where it is noisy, more pairs are
/// taken ([`Effort::interval`]). One other plan is held at a time.
///
/// # Errors
/// Those of [`Session::prepare`] and of the runs.
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
        let (mut ratios, mut without) = (vec![], vec![]);
        let least = effort.pairs.max(1);
        let unsure = |r: &[f64]| {
            let (low, high) = median_interval(r);
            high - low > effort.interval * median(r)
        };
        for i in 0..least * MOST {
            if i >= least && !unsure(&ratios) {
                break;
            }
            let (a, b) = if i % 2 == 0 {
                let a = ours.burst(effort.burst)?;
                (a, theirs.burst(effort.burst)?)
            } else {
                let b = theirs.burst(effort.burst)?;
                (ours.burst(effort.burst)?, b)
            };
            ratios.push(b / a.max(1e-12));
            with.push(a);
            without.push(b);
        }
        let tally = Tally::of(theirs.exe.plan());
        gains.push(Gain { transformation, count, ratios, without, tally, error });
    }
    Ok(Measured { with, tally: Tally::of(ours.exe.plan()), error, gains })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_the_middle_or_between_the_two() {
        assert_eq!((median(&[3.0, 1.0, 2.0]), median(&[4.0, 1.0, 3.0, 2.0])), (2.0, 2.5));
        assert!(median(&[]).is_nan());
    }

    #[test]
    fn the_interval_of_a_median_narrows_with_more_values() {
        let n: Vec<f64> = (0..100).map(f64::from).collect();
        assert_eq!(median_interval(&n), (40.0, 59.0));
        assert_eq!(median_interval(&[3.0, 1.0, 2.0]), (1.0, 3.0));
        assert!(median_interval(&[]).0.is_nan());
    }
}
