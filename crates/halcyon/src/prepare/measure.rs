//! Measures a model before and after its optimisation.

use super::result::{MemoryPart, Metrics, OpTime, OutputError};
use crate::executable::Executable;
use crate::fit::Fit;
use crate::receipts::{Effort, MAX_GROWTH, Side, median, median_interval};
use crate::session::{Session, difference};
use halcyon_hal::{Device, Timing};
use halcyon_ir::ConstData;
use halcyon_ir::error::Result;
use halcyon_ir::plan::{Plan, StepWork};
use std::collections::BTreeMap;

/// The times of two plans, measured in pairs, and the differences of their results.
pub(super) struct Compared {
    /// The times of a run in seconds.
    before: Vec<f64>,
    after: Vec<f64>,
    /// The time before divided by the time after, for each pair.
    ratios: Vec<f64>,
    pub(super) outputs: Vec<OutputError>,
    error: Option<f64>,
}

/// Runs both plans on the sample in bursts of runs. The two bursts of a pair run directly one after the
/// other. The plan that runs first alternates, so that drift in the machine's speed cancels.
pub(super) fn compare(
    before: &Session,
    after: &Session,
    sample: &[ConstData],
    effort: Effort,
) -> Result<Compared> {
    let (want, got) = (before.run(sample)?, after.run(sample)?);
    let names = after.graph().outputs().iter().map(|o| o.name.to_string());
    let outputs =
        names.zip(want.iter().zip(&got)).map(|(name, (want, got))| output(name, want, got)).collect();
    let error = Some(difference(&got, &want)).filter(|e| e.is_finite());
    let (old, new) = (Side::new(before, sample)?, Side::new(after, sample)?);
    let mut c = Compared { before: vec![], after: vec![], ratios: vec![], outputs, error };
    let least = effort.pairs.max(1);
    for i in 0..least * MAX_GROWTH {
        let (low, high) = median_interval(&c.ratios);
        if i >= least && high - low <= effort.interval * median(&c.ratios) {
            break;
        }
        let (a, b) = if i % 2 == 0 {
            let a = old.burst(effort.burst)?;
            (a, new.burst(effort.burst)?)
        } else {
            let b = new.burst(effort.burst)?;
            (old.burst(effort.burst)?, b)
        };
        c.before.push(a);
        c.after.push(b);
        c.ratios.push(a / b.max(1e-12));
    }
    Ok(c)
}

fn output(name: String, want: &ConstData, got: &ConstData) -> OutputError {
    let one = |d: &ConstData| std::slice::from_ref(d).to_vec();
    let relative = Some(difference(&one(got), &one(want))).filter(|e| e.is_finite());
    let deviation = deviation(want).filter(|s| *s > 0.0);
    let deviations = relative.and(deviation).map(|s| {
        let pairs = want.scalars().zip(got.scalars()).map(|(w, g)| (w.as_f64() - g.as_f64()).abs());
        pairs.filter(|d| d.is_finite()).fold(0.0, f64::max) / s
    });
    OutputError { name, relative, deviations }
}

/// The standard deviation of the finite values; `None` if there are none.
fn deviation(d: &ConstData) -> Option<f64> {
    let values: Vec<f64> = d.scalars().map(|s| s.as_f64()).filter(|v| v.is_finite()).collect();
    let n = values.len() as f64;
    let mean = values.iter().sum::<f64>() / n;
    let variance = values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / n;
    (!values.is_empty()).then(|| variance.sqrt())
}

impl Compared {
    pub(super) fn metrics(
        self,
        old: &Executable,
        new: &Executable,
        device: &dyn Device,
        sample: &[ConstData],
    ) -> Metrics {
        let (low, high) = median_interval(&self.ratios);
        let need = |e: &Executable| Fit::of(device, e.plan(), &sizes(sample)).device();
        Metrics {
            time_before_ms: median(&self.before) * 1e3,
            time_after_ms: median(&self.after) * 1e3,
            speedup: median(&self.ratios),
            speedup_interval: [low, high],
            memory_before_bytes: need(old),
            memory_after_bytes: need(new),
            steps_before: old.plan().steps.len(),
            steps_after: new.plan().steps.len(),
            error: self.error,
            outputs: self.outputs,
        }
    }
}

fn sizes(sample: &[ConstData]) -> Vec<usize> {
    sample.iter().map(|d| d.bytes().len()).collect()
}

/// The memory of two plans by kind.
pub(super) fn memory(device: &dyn Device, plans: [&Plan; 2], sample: &[ConstData]) -> Vec<MemoryPart> {
    let [old, new] = plans.map(|p| Fit::of(device, p, &sizes(sample)).parts());
    let both = old.into_iter().zip(new);
    both.map(|((name, before), (_, after))| MemoryPart { name: name.into(), before, after })
        .filter(|p| p.before > 0 || p.after > 0)
        .collect()
}

/// The time of each kind of op in both sessions' plans, or the reason why it cannot be measured.
pub(super) fn ops(
    sessions: [&Session; 2],
    sample: &[ConstData],
    effort: Effort,
) -> Result<std::result::Result<[Vec<OpTime>; 2], String>> {
    let profiled = match sessions[0].backend().profiled() {
        Ok(b) => b,
        Err(e) => return Ok(Err(format!("the device could not be opened with profiling: {e}"))),
    };
    let mut both = vec![];
    for s in sessions {
        let level = s.backend().level();
        let b = profiled.with_amp(s.backend().amp())?.with_level(level)?;
        match op_times(&Session::new(&b, s.graph().clone()), sample, effort.pairs.max(1))? {
            Some(t) => both.push(t),
            None => {
                return Ok(Err("the device does not measure them, or a step ran on the host".into()));
            }
        }
    }
    match <[Vec<OpTime>; 2]>::try_from(both) {
        Ok(both) => Ok(Ok(both)),
        Err(_) => Ok(Err("there are no steps".into())),
    }
}

fn op_times(session: &Session, sample: &[ConstData], runs: usize) -> Result<Option<Vec<OpTime>>> {
    let (exe, buffers) = (session.prepare(sample)?, session.upload(sample)?);
    let device = session.backend().device();
    let mut times: Vec<Vec<f64>> = vec![];
    // The first run is not counted, because it includes one-time costs of the device.
    for run in 0..=runs {
        session.backend().synchronize()?;
        device.take_timings()?;
        exe.run(&buffers, &[])?;
        session.backend().synchronize()?;
        match by_step(&exe, &device.take_timings()?) {
            Some(t) if run > 0 => times.push(t),
            Some(_) => {}
            None => return Ok(None),
        }
    }
    Ok(Some(by_op(exe.plan(), &times)))
}

/// Milliseconds of each step of a run; `None` if the device does not measure them or a step ran on the host.
fn by_step(exe: &Executable, timings: &[Timing]) -> Option<Vec<f64>> {
    let steps = &exe.plan().steps;
    let device_only = steps.iter().all(|s| !matches!(s.work, StepWork::Host(_)));
    (device_only && timings.len() == steps.len())
        .then(|| timings.iter().map(|t| t.nanoseconds as f64 / 1e6).collect())
}

/// `times[run][step]`, summed by op, the slowest first.
fn by_op(plan: &Plan, times: &[Vec<f64>]) -> Vec<OpTime> {
    let mut kinds: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for (i, s) in plan.steps.iter().enumerate() {
        kinds.entry(&s.op).or_default().push(i);
    }
    let one = |(op, of): (&str, Vec<usize>)| {
        let sums: Vec<f64> = times.iter().map(|run| of.iter().map(|i| run[*i]).sum()).collect();
        let steps = || of.iter().map(|i| &plan.steps[*i]);
        let mut kernels: Vec<String> = steps().map(|s| s.work.kernel_name()).collect();
        kernels.sort();
        kernels.dedup();
        OpTime {
            op: op.into(),
            kernel: kernels.join(", "),
            steps: of.len(),
            time_ms: median(&sums),
            flops: steps().fold(0, |n, s| n.saturating_add(s.flops)),
            bytes: steps().fold(0, |n, s| n.saturating_add(s.bytes)),
        }
    };
    let mut all: Vec<OpTime> = kinds.into_iter().map(one).collect();
    all.sort_by(|a, b| b.time_ms.total_cmp(&a.time_ms));
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_are_relative_to_magnitude_and_to_deviation() {
        let of = |v: &[f32]| ConstData::from_slice(&[v.len()], v).unwrap();
        // The mean is 0, the standard deviation is 2, the largest magnitude is 2.
        let want = of(&[2.0, -2.0, 2.0, -2.0]);
        let o = output("y".into(), &want, &of(&[2.0, -2.5, 2.0, -2.0]));
        assert_eq!((o.relative, o.deviations), (Some(0.25), Some(0.25)));
        let same = of(&[3.0; 4]);
        let o = output("y".into(), &same, &of(&[3.0, 3.0, 3.0, 6.0]));
        assert_eq!((o.relative, o.deviations), (Some(1.0), None), "no deviation to compare with");
        for bad in [of(&[2.0, f32::INFINITY, 2.0, -2.0]), of(&[2.0; 3])] {
            let o = output("y".into(), &want, &bad);
            assert_eq!((o.relative, o.deviations), (None, None));
        }
    }
}
