//! Tunes one key (`Choices::key`): builds its candidate kernels, compares their results with those of the
//! default kernel, and compares their times with the default kernel's time.

use super::options::TuneOptions;
use super::report::{Event, Progress};
use crate::runtime::Runtime;
use crate::timing::{median, median_interval};
use halcyon_hal::tune::{Best, Entry, Guard, RejectReason, Rejection, TuningCache};
use halcyon_hal::{BufferRef, Command, Device, Program, Tag};
use halcyon_host as host;
use halcyon_ir::error::{Error, Result};
use halcyon_ir::kernel::lower::Lowered;
use halcyon_ir::kernel::tune::{Choices, Tolerance, Tunable, Variant, digest};
use halcyon_ir::target::{Declined, Operand};
use halcyon_ir::{ConstData, DType, Scalar};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant, SystemTime};

/// Byte that fills outputs before a candidate runs: a large finite number in every dtype, which no kernel is
/// likely to compute.
const POISON: u8 = 0x7A;
/// Number of pairs of bursts (one of the default, one of the candidate) that screen a candidate.
const SCREENING_PAIRS: usize = 3;
/// Maximum number of candidates that are measured in full: the fastest of those that were faster than the
/// default in the screening.
const FINALISTS: usize = 2;
/// A candidate that takes more than this multiple of the default's time is quarantined.
const TOO_SLOW: f64 = 20.0;
/// A candidate is quarantined only if this many runs are all too slow. The default's time is the shortest of
/// as many runs.
const SLOW_RUNS: usize = 5;
/// If one run of the default takes longer than this many seconds, the key is not tuned.
const TOO_LONG: f64 = 5.0;
/// Minimum gain (default's time over candidate's) for a candidate to replace the default.
const LEAST_GAIN: f64 = 1.02;
/// Maximum number of launches in a burst.
const MAX_LAUNCHES: f64 = 256.0;

/// Why a key was not tuned.
pub(super) enum NotTuned {
    /// The time for tuning is used up.
    Time,
    /// A problem of this key.
    Kernel(String),
    /// The device failed.
    Device(Error),
}

/// A key to measure.
pub(super) struct Measured<'a> {
    pub runtime: &'a Runtime,
    pub cache: &'a TuningCache,
    pub device: &'a str,
    pub tunable: &'a Tunable,
    pub options: &'a TuneOptions<'a>,
    pub deadline: Option<Instant>,
    /// Number of keys done, and of all keys.
    pub done: (usize, usize),
}

/// Compiled kernels with their operands, ready to run.
struct Runner {
    steps: Vec<(Arc<dyn Program>, [u32; 3], Vec<Scalar>, Vec<BufferRef>)>,
    digest: u128,
}

/// A candidate whose results are right.
struct Candidate {
    variant: Variant,
    runner: Runner,
    error: f64,
    ratios: Vec<f64>,
    seconds: Vec<f64>,
}

/// The default kernels of a key, which candidates are compared with.
struct Baseline<'a> {
    bench: Bench<'a>,
    runner: Runner,
    expected: Expected,
    /// Time of one run in seconds.
    seconds: f64,
}

/// The expected result of a candidate.
struct Expected {
    want: ConstData,
    /// Allowed difference of each element; a single entry applies to all.
    slack: Vec<f64>,
}

impl Measured<'_> {
    /// Finds the fastest kernel. Candidates that fail are put into quarantine.
    pub(super) fn best(&self, guard: &mut Option<Guard>) -> Result<Best, NotTuned> {
        let t = self.tunable;
        let base = self.baseline()?;
        let default = &t.choices.default;
        let rejected = self.cache.get(self.device, &t.choices.key).map(|e| e.rejected).unwrap_or_default();
        let variants: Vec<Variant> = self
            .options
            .space
            .variants(t)
            .into_iter()
            .filter(|v| v != default && rejected.iter().all(|r| r.variant != *v))
            .collect();
        let mut good: Vec<Candidate> = vec![];
        for (i, v) in variants.iter().enumerate() {
            self.check_time()?;
            let at = self.progress(i + 1, variants.len());
            self.runtime.stats.candidates_tried.fetch_add(1, Ordering::Relaxed);
            match self.guarded(guard, v, || self.try_one(&base, v, &at))? {
                Ok(c) => good.push(c),
                Err((why, detail)) => self.reject(&base, v, why, detail)?,
            }
        }
        let tried = 1 + variants.len();
        // The fastest candidates of the screening are measured in full.
        good.sort_by(|a, b| median(&b.ratios).total_cmp(&median(&a.ratios)));
        let mut best = keep_default(default, &base, tried);
        for c in good.iter_mut().take(FINALISTS).filter(|c| median(&c.ratios) > 1.0) {
            self.check_time()?;
            let at = self.progress(variants.len(), variants.len());
            let v = c.variant.clone();
            let n = self.options.effort.pairs;
            self.guarded(guard, &v, || self.pairs(&base, c, n, &at))?.map_err(NotTuned::Device)?;
            let (gain, interval) = (median(&c.ratios), median_interval(&c.ratios));
            if gain >= LEAST_GAIN.max(best.gain) && interval.0 > 1.0 {
                let seconds = median(&c.seconds);
                best = Best {
                    variant: c.variant.clone(),
                    program: format!("{:032x}", c.runner.digest),
                    gain,
                    interval,
                    seconds,
                    default_seconds: seconds * gain,
                    error: c.error,
                    ..best
                };
            }
        }
        Ok(best)
    }

    /// Compiles and runs the default kernels. Untuned plans use them, so most of their failures count as
    /// failures of the device.
    fn baseline(&self) -> Result<Baseline<'_>, NotTuned> {
        let t = self.tunable;
        let bench = Bench::new(&*self.runtime.device, t)?;
        let lowered = self.build(&t.choices.default).map_err(|d| NotTuned::Kernel(d.reason))?;
        let runner = bench.runner(&lowered).map_err(NotTuned::Device)?;
        let expected = bench.expected(&runner, &t.choices).map_err(of_default)?;
        let mut seconds = bench.time(&runner).map_err(NotTuned::Device)?;
        if seconds > TOO_LONG {
            return Err(NotTuned::Kernel(format!(
                "a run takes {seconds:.1} s, too long to measure other variants"
            )));
        }
        for _ in 1..SLOW_RUNS {
            seconds = seconds.min(bench.time(&runner).map_err(NotTuned::Device)?);
        }
        Ok(Baseline { bench, runner, expected, seconds })
    }

    /// Builds the kernels of a variant.
    fn build(&self, v: &Variant) -> Result<Lowered, Declined> {
        self.options.space.build(self.tunable, v, self.runtime.device.as_target().caps())
    }

    fn check_time(&self) -> Result<(), NotTuned> {
        match self.deadline {
            Some(d) if Instant::now() >= d => Err(NotTuned::Time),
            _ => Ok(()),
        }
    }

    fn progress(&self, candidate: usize, candidates: usize) -> Progress {
        let (done, of) = self.done;
        Progress { done, of, key: self.tunable.choices.key.clone(), candidate, candidates }
    }

    /// Runs `work`. Because `work` may end the process, a note on disk names the candidate until `work`
    /// returns.
    fn guarded<T>(
        &self,
        guard: &mut Option<Guard>,
        v: &Variant,
        work: impl FnOnce() -> T,
    ) -> Result<T, NotTuned> {
        if let Some(g) = guard {
            g.begin(self.device, &self.tunable.choices.key, v).map_err(NotTuned::Device)?;
        }
        let out = work();
        if let Some(g) = guard {
            g.end().map_err(NotTuned::Device)?;
        }
        Ok(out)
    }

    /// Compiles, checks and screens a candidate. An error is the reason for quarantine.
    fn try_one(
        &self,
        base: &Baseline<'_>,
        v: &Variant,
        at: &Progress,
    ) -> Result<Candidate, (RejectReason, String)> {
        let Baseline { bench, expected, seconds: alone, .. } = base;
        let low = self.build(v).map_err(|d| (RejectReason::DoesNotFit, d.reason))?;
        let of = |e: Error| {
            let why = match &e {
                Error::Compile { .. } | Error::Argument { .. } => RejectReason::DoesNotCompile,
                Error::OutOfMemory { .. } | Error::Unsupported { .. } => RejectReason::DoesNotFit,
                _ => RejectReason::DeviceError,
            };
            (why, e.to_string())
        };
        let runner = bench.runner(&low).map_err(of)?;
        let got = bench.result(&runner).map_err(of)?;
        let error = expected.compare(&got).map_err(|what| (RejectReason::Wrong, what))?;
        let limit = TOO_SLOW * alone;
        let mut once = bench.time(&runner).map_err(of)?;
        // Repeat, so that a candidate is not quarantined because other work slowed down the machine.
        let mut again = 1;
        while once > limit && again < SLOW_RUNS {
            once = once.min(bench.time(&runner).map_err(of)?);
            again += 1;
        }
        if once > limit {
            let what =
                format!("a run takes {:.3} ms, a run of the default {:.3} ms", once * 1e3, alone * 1e3);
            return Err((RejectReason::TooSlow, what));
        }
        let mut c = Candidate { variant: v.clone(), runner, error, ratios: vec![], seconds: vec![] };
        // A candidate that is far slower needs no precise measurement.
        let pairs = if once > 2.0 * alone { 1 } else { SCREENING_PAIRS };
        self.pairs(base, &mut c, pairs, at).map_err(of)?;
        Ok(c)
    }

    /// Times the candidate and the default alternately. Which of the two is first alternates too, so that
    /// gradual changes of the machine's speed cancel.
    fn pairs(&self, base: &Baseline<'_>, c: &mut Candidate, n: usize, at: &Progress) -> Result<()> {
        let bench = &base.bench;
        let burst = self.options.effort.burst;
        (c.ratios, c.seconds) = (vec![], vec![]);
        for i in 0..n {
            (self.options.events)(Event::Candidate(at));
            let (a, b) = if i % 2 == 0 {
                let a = bench.burst(&base.runner, burst)?;
                (a, bench.burst(&c.runner, burst)?)
            } else {
                let b = bench.burst(&c.runner, burst)?;
                (bench.burst(&base.runner, burst)?, b)
            };
            c.ratios.push(a / b.max(1e-12));
            c.seconds.push(b);
        }
        Ok(())
    }

    /// Quarantines a variant and saves the cache immediately, because the next candidate may end the process.
    fn reject(
        &self,
        base: &Baseline<'_>,
        v: &Variant,
        why: RejectReason,
        detail: String,
    ) -> Result<(), NotTuned> {
        let key = &self.tunable.choices.key;
        tracing::warn!(key, variant = %v, %why, detail, "a kernel is quarantined");
        let rejected = vec![Rejection { variant: v.clone(), why, detail }];
        self.cache.add(&Entry { rejected, ..Entry::new(self.device, key) });
        self.cache.save_or_warn();
        // If the device is lost, the default kernel fails too.
        if why == RejectReason::DeviceError {
            base.bench.time(&base.runner).map_err(NotTuned::Device)?;
        }
        Ok(())
    }
}

/// The outcome if no candidate is faster than the default.
fn keep_default(default: &Variant, base: &Baseline<'_>, tried: usize) -> Best {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    Best {
        variant: default.clone(),
        program: format!("{:032x}", base.runner.digest),
        default: default.clone(),
        gain: 1.0,
        interval: (1.0, 1.0),
        seconds: base.seconds,
        default_seconds: base.seconds,
        error: 0.0,
        tried,
        measured: now.map_or(0, |d| d.as_secs()),
    }
}

fn of_default(e: Error) -> NotTuned {
    match e {
        Error::OutOfMemory { .. } => NotTuned::Kernel(e.to_string()),
        e => NotTuned::Device(e),
    }
}

/// The operands of a key, on the device.
struct Bench<'a> {
    device: &'a dyn Device,
    inputs: Vec<(Operand, usize, BufferRef)>,
    output: Operand,
    result: BufferRef,
}

impl<'a> Bench<'a> {
    fn new(d: &'a dyn Device, t: &Tunable) -> Result<Bench<'a>, NotTuned> {
        let extent = |o: &Operand| match o.view.range() {
            None => Ok(0),
            Some((lo, hi)) if lo >= 0 => Ok(hi as usize + 1),
            Some(_) => Err(NotTuned::Kernel("a view begins before its buffer".into())),
        };
        let sizes = t.inputs.iter().map(extent).collect::<Result<Vec<_>, _>>()?;
        let bytes = t.inputs.iter().zip(&sizes).map(|(o, n)| o.dtype.bytes(*n));
        let out = t.output.dtype.bytes(t.output.view.numel());
        let total = bytes.fold(out, usize::saturating_add) as u64;
        if d.available().is_some_and(|free| free / 2 < total) {
            return Err(NotTuned::Kernel(format!(
                "its operands need {total} bytes, more than half of the free device memory"
            )));
        }
        let alloc = |n: usize| d.alloc(n, Tag::Workspace).map_err(of_default);
        let inputs = t.inputs.iter().zip(sizes);
        let inputs = inputs.map(|(o, n)| Ok((o.clone(), n, alloc(o.dtype.bytes(n))?)));
        let inputs = inputs.collect::<Result<Vec<_>, NotTuned>>()?;
        Ok(Bench { device: d, inputs, output: t.output.clone(), result: alloc(out)? })
    }

    fn runner(&self, low: &Lowered) -> Result<Runner> {
        let d = self.device;
        let temps = low.temps.iter().map(|n| d.alloc(*n, Tag::Workspace)).collect::<Result<Vec<_>>>()?;
        let mut all: Vec<BufferRef> = self.inputs.iter().map(|(_, _, b)| b.clone()).collect();
        all.push(self.result.clone());
        all.extend(temps);
        let mut steps = vec![];
        for (kernel, launch, places) in &low.steps {
            let buffers =
                places.iter().map(|p| all.get(*p).cloned()).collect::<Option<Vec<_>>>().ok_or_else(|| {
                    Error::internal(format!("kernel {} has an unknown operand", kernel.name))
                })?;
            steps.push((d.compile(kernel)?, launch.groups, launch.params.clone(), buffers));
        }
        Ok(Runner { steps, digest: digest(low) })
    }

    fn launch(&self, r: &Runner) -> Result<()> {
        let commands: Vec<Command<'_>> = r
            .steps
            .iter()
            .map(|(program, groups, params, buffers)| Command::Launch {
                program,
                groups: *groups,
                buffers,
                params,
                fault: 0,
            })
            .collect();
        self.device.submit(&commands)
    }

    /// The time of one run in seconds, including the wait for its end.
    fn time(&self, r: &Runner) -> Result<f64> {
        self.times(r, 1)
    }

    fn times(&self, r: &Runner, n: u32) -> Result<f64> {
        let d = self.device;
        d.synchronize()?;
        let start = Instant::now();
        for _ in 0..n {
            self.launch(r)?;
        }
        d.synchronize()?;
        Ok(start.elapsed().as_secs_f64() / f64::from(n))
    }

    /// The mean time of a run in seconds, over as many runs as fit in `time`. One run before the burst
    /// measures how many runs fit, and also brings the operands back into the caches.
    fn burst(&self, r: &Runner, time: Duration) -> Result<f64> {
        let one = self.time(r)?.max(1e-7);
        self.times(r, (time.as_secs_f64() / one).clamp(1.0, MAX_LAUNCHES) as u32)
    }

    /// Fills the operands with random numbers, or with their magnitudes; every call writes the same numbers.
    fn fill(&self, magnitudes: bool) -> Result<()> {
        for (i, (o, n, b)) in self.inputs.iter().enumerate() {
            let bytes = random(o.dtype, *n, i as u64 + 1, magnitudes)?;
            self.device.write(b, 0, &bytes)?;
        }
        Ok(())
    }

    /// Runs the kernels with an output filled with [`POISON`], and returns the output.
    fn result(&self, r: &Runner) -> Result<ConstData> {
        let d = self.device;
        let n = self.output.view.numel();
        let mut bytes = host::zeros(self.output.dtype.bytes(n), "a kernel's result")?;
        bytes.fill(POISON);
        d.write(&self.result, 0, &bytes)?;
        self.launch(r)?;
        d.read(&self.result, 0, &mut bytes)?;
        ConstData::new(self.output.dtype, &[n], Arc::new(bytes))
    }

    /// The default's result and the allowed difference from it. Leaves the signed random numbers in the
    /// operands.
    fn expected(&self, base: &Runner, choices: &Choices) -> Result<Expected> {
        let d = self.output.dtype;
        let share = choices.share(d);
        if d.is_float() && matches!(choices.tolerance, Tolerance::Products(_)) {
            self.fill(true)?;
            let scale = self.result(base)?;
            self.fill(false)?;
            let slack = scale.scalars().map(|s| share * s.as_f64().abs() + 1e-30).collect();
            return Ok(Expected { want: self.result(base)?, slack });
        }
        self.fill(false)?;
        let want = self.result(base)?;
        if !d.is_float() {
            return Ok(Expected { want, slack: vec![0.0] });
        }
        let magnitudes = want.scalars().map(|s| s.as_f64().abs());
        let top = magnitudes.filter(|v| v.is_finite()).fold(0.0, f64::max);
        Ok(Expected { want, slack: vec![share * top + 1e-30] })
    }
}

impl Expected {
    /// The largest ratio of a difference to the allowed difference, or a description of the wrong elements.
    fn compare(&self, got: &ConstData) -> Result<f64, String> {
        let (mut worst, mut wrong, mut first) = (0f64, 0usize, None);
        for (i, (g, w)) in got.scalars().zip(self.want.scalars()).enumerate() {
            let (x, y) = (g.as_f64(), w.as_f64());
            let slack = self.slack[i.min(self.slack.len() - 1)];
            let off = match () {
                _ if g == w || x == y || (x.is_nan() && y.is_nan()) => 0.0,
                _ if !x.is_finite() || !y.is_finite() || slack == 0.0 => f64::INFINITY,
                _ => (x - y).abs() / slack,
            };
            worst = worst.max(off);
            if off > 1.0 {
                wrong += 1;
                first.get_or_insert((i, x, y));
            }
        }
        match first {
            None => Ok(worst),
            Some((i, x, y)) => Err(format!(
                "{wrong} of {} results differ from the default's, first element {i}: {x:e} instead of {y:e}",
                got.numel()
            )),
        }
    }
}

/// Random elements: floats in [-1, 1), integers from -4 (unsigned: 0) to 4, bools. For speed, the elements
/// repeat with a prime period.
fn random(d: DType, n: usize, seed: u64, magnitudes: bool) -> Result<Vec<u8>> {
    const PERIOD: usize = 65_521;
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 11) as f64 / (1u64 << 53) as f64
    };
    let mut bytes = host::zeros(d.bytes(n), "a kernel's operand")?;
    let size = d.size().max(1);
    let head = n.min(PERIOD);
    for i in 0..head {
        let u = next() * 2.0 - 1.0;
        let v = match d {
            DType::Bool => Scalar::U(u64::from(u > 0.0)),
            _ if d.is_float() => Scalar::F(if magnitudes { u.abs() } else { u }),
            _ if d.range().0 < 0.0 => Scalar::I((u * 4.99) as i64),
            _ => Scalar::I((u.abs() * 4.99) as i64),
        };
        bytes[i * size..(i + 1) * size].copy_from_slice(&v.cast(d).to_bytes(d)[..size]);
    }
    let period = head * size;
    for at in (period..bytes.len()).step_by(period.max(1)) {
        let (done, rest) = bytes.split_at_mut(at);
        let many = rest.len().min(period);
        rest[..many].copy_from_slice(&done[..many]);
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_are_shares_of_the_tolerance() {
        let data = |v: &[f32]| ConstData::from_slice(&[v.len()], v).unwrap();
        let e = Expected { want: data(&[1.0, f32::NAN, f32::INFINITY]), slack: vec![0.5, 0.5, 0.5] };
        assert_eq!(e.compare(&data(&[1.25, f32::NAN, f32::INFINITY])), Ok(0.5));
        assert!(e.compare(&data(&[1.75, f32::NAN, f32::INFINITY])).unwrap_err().contains("first element 0"));
        assert!(e.compare(&data(&[1.0, 0.0, f32::INFINITY])).unwrap_err().contains("1 of 3"));
        assert!(e.compare(&data(&[1.0, f32::NAN, 1.0])).is_err());
        let poison = f32::from_bits(u32::from_le_bytes([POISON; 4]));
        assert!(poison.is_finite() && e.compare(&data(&[1.0, f32::NAN, poison])).is_err());
    }

    #[test]
    fn operands_are_random_and_repeat_after_a_prime() {
        let floats = |magnitudes| {
            let b = random(DType::F32, 70_000, 3, magnitudes).unwrap();
            ConstData::new(DType::F32, &[70_000], Arc::new(b)).unwrap().to_vec::<f32>()
        };
        let (v, m) = (floats(false), floats(true));
        assert!(v.iter().zip(&m).all(|(v, m)| v.abs() == *m && *m <= 1.0));
        assert!(v[..1000].iter().any(|x| *x < -0.5) && v[..1000].iter().any(|x| *x > 0.5));
        assert_eq!(v[65_521..], v[..70_000 - 65_521]);
        for (d, least) in [(DType::I8, -4), (DType::U8, 0), (DType::Bool, 0)] {
            let b = random(d, 1000, 1, false).unwrap();
            let c = ConstData::new(d, &[1000], Arc::new(b)).unwrap();
            let all: Vec<f64> = c.scalars().map(|s| s.as_f64()).collect();
            assert!(all.iter().all(|x| *x >= f64::from(least) && *x <= 4.0), "{d}");
            assert!(all.iter().any(|x| *x != all[0]));
        }
    }
}
