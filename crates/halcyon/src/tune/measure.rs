//! One key: candidates are built, compared with the default, and timed in turns with it.

use super::{
    Best, Choices, Entry, Event, Guard, Progress, Rejection, Tolerance, TuneOptions, TuningCache, Variant,
    Why,
};
use crate::backend::Backend;
use crate::receipts::{median, median_interval};
use halcyon_hal::{BufferRef, Command, Program, Tag};
use halcyon_ir::error::{Error, Result};
use halcyon_ir::host;
use halcyon_ir::kernel::lower::Lowered;
use halcyon_ir::kernel::tune::{Tunable, digest};
use halcyon_ir::target::Operand;
use halcyon_ir::{ConstData, DType, Scalar};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant, SystemTime};

/// What outputs hold before a candidate runs: a large finite number in every type, which no kernel gives by
/// chance.
const POISON: u8 = 0x7A;
/// Pairs of bursts that decide which candidates are measured well.
const SCREEN: usize = 3;
/// Candidates that are.
const FINALISTS: usize = 2;
/// A candidate that takes so many times the default's time is not tried again.
const TOO_SLOW: f64 = 20.0;
/// Runs of a candidate that have to agree on that.
const SURE: usize = 5;
/// Seconds of the default beyond which nothing is measured.
const TOO_LONG: f64 = 5.0;
/// What a gain must be for another kernel to be worth it.
const LEAST_GAIN: f64 = 1.02;
/// Launches of a burst.
const MOST_LAUNCHES: f64 = 256.0;

/// Why a key has no outcome.
pub(super) enum Stop {
    /// The budget is spent.
    Time,
    /// Something about this key.
    Kernel(String),
    /// The device fails.
    Device(Error),
}

/// A key being measured.
pub(super) struct Measured<'a> {
    pub backend: &'a Backend,
    pub cache: &'a TuningCache,
    pub device: &'a str,
    pub tunable: &'a Tunable,
    pub options: &'a TuneOptions<'a>,
    pub deadline: Option<Instant>,
    /// Keys that are done, and all.
    pub progress: (usize, usize),
}

/// Kernels with their operands, ready to run.
struct Runner {
    steps: Vec<(Arc<dyn Program>, [u32; 3], Vec<Scalar>, Vec<BufferRef>)>,
    digest: u128,
}

/// A candidate that computes the right thing.
struct Candidate {
    variant: Variant,
    runner: Runner,
    error: f64,
    ratios: Vec<f64>,
    seconds: Vec<f64>,
}

/// What a candidate's result is compared with.
struct Expected {
    want: ConstData,
    /// Allowed difference of each element; one for all where there is one.
    slack: Vec<f64>,
}

impl Measured<'_> {
    /// The fastest kernel. What fails goes into quarantine on the way.
    pub(super) fn best(&self, guard: &mut Option<Guard>) -> Result<Best, Stop> {
        let t = self.tunable;
        let bench = Bench::new(self.backend, t)?;
        let caps = self.backend.device().as_target().caps();
        let build = |v: &Variant| self.options.space.build(t, v, caps);
        let default = &t.choices.default;
        let lowered = build(default).map_err(|d| Stop::Kernel(d.reason))?;
        // The default runs in every plan; if it fails, the device does.
        let base = bench.runner(&lowered).map_err(Stop::Device)?;
        let expected = bench.expected(&base, &t.choices).map_err(of_default)?;
        let mut alone = bench.time(&base).map_err(Stop::Device)?;
        if alone > TOO_LONG {
            return Err(Stop::Kernel(format!("a run takes {alone:.1} s, too long to measure others")));
        }
        for _ in 1..SURE {
            alone = alone.min(bench.time(&base).map_err(Stop::Device)?);
        }

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
            if self.deadline.is_some_and(|d| Instant::now() >= d) {
                return Err(Stop::Time);
            }
            let at = Progress {
                done: self.progress.0,
                of: self.progress.1,
                key: t.choices.key.clone(),
                candidate: i + 1,
                candidates: variants.len(),
            };
            self.backend.0.stats.candidates_tried.fetch_add(1, Ordering::Relaxed);
            let tried = self.guarded(guard, v, || {
                let low = build(v).map_err(|d| (Why::DoesNotFit, d.reason))?;
                self.try_one(&bench, &base, &expected, alone, v, &low, &at)
            })?;
            match tried {
                Ok(c) => good.push(c),
                Err((why, detail)) => self.reject(&bench, &base, v, why, detail)?,
            }
        }
        let tried = 1 + variants.len();
        // The best by few bursts are measured well.
        good.sort_by(|a, b| median(&b.ratios).total_cmp(&median(&a.ratios)));
        let mut best = self.keep(default, &base, alone, tried);
        for c in good.iter_mut().take(FINALISTS).filter(|c| median(&c.ratios) > 1.0) {
            if self.deadline.is_some_and(|d| Instant::now() >= d) {
                return Err(Stop::Time);
            }
            let at = Progress {
                done: self.progress.0,
                of: self.progress.1,
                key: t.choices.key.clone(),
                candidate: variants.len(),
                candidates: variants.len(),
            };
            let v = c.variant.clone();
            let n = self.options.effort.pairs;
            self.guarded(guard, &v, || self.pairs(&bench, &base, c, n, &at))?.map_err(Stop::Device)?;
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

    /// Does what may end the process, with a note on disk of what it was.
    fn guarded<T>(
        &self,
        guard: &mut Option<Guard>,
        v: &Variant,
        work: impl FnOnce() -> T,
    ) -> Result<T, Stop> {
        if let Some(g) = guard {
            g.begin(self.device, &self.tunable.choices.key, v).map_err(Stop::Device)?;
        }
        let out = work();
        if let Some(g) = guard {
            g.end().map_err(Stop::Device)?;
        }
        Ok(out)
    }

    /// The outcome where nothing is faster.
    fn keep(&self, default: &Variant, base: &Runner, seconds: f64, tried: usize) -> Best {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        Best {
            variant: default.clone(),
            program: format!("{:032x}", base.digest),
            default: default.clone(),
            gain: 1.0,
            interval: (1.0, 1.0),
            seconds,
            default_seconds: seconds,
            error: 0.0,
            tried,
            measured: now.map_or(0, |d| d.as_secs()),
        }
    }

    /// Compiles, checks and screens a candidate; or why it is never tried again.
    fn try_one(
        &self,
        bench: &Bench<'_>,
        base: &Runner,
        expected: &Expected,
        alone: f64,
        v: &Variant,
        low: &Lowered,
        at: &Progress,
    ) -> Result<Candidate, (Why, String)> {
        let of = |e: Error| {
            let why = match &e {
                Error::Compile { .. } | Error::Argument { .. } => Why::DoesNotCompile,
                Error::OutOfMemory { .. } | Error::Unsupported { .. } => Why::DoesNotFit,
                _ => Why::DeviceError,
            };
            (why, e.to_string())
        };
        let runner = bench.runner(low).map_err(of)?;
        let got = bench.result(&runner).map_err(of)?;
        let error = expected.compare(&got).map_err(|what| (Why::Wrong, what))?;
        let mut once = bench.time(&runner).map_err(of)?;
        // A machine that does something else for a while is no reason for quarantine.
        let mut again = 1;
        while once > TOO_SLOW * alone && again < SURE {
            once = once.min(bench.time(&runner).map_err(of)?);
            again += 1;
        }
        if once > TOO_SLOW * alone {
            let what = format!("{:.3} ms, the default takes {:.3} ms", once * 1e3, alone * 1e3);
            return Err((Why::TooSlow, what));
        }
        let mut c = Candidate { variant: v.clone(), runner, error, ratios: vec![], seconds: vec![] };
        // One that is far behind needs no better measurement.
        let pairs = if once > 2.0 * alone { 1 } else { SCREEN };
        self.pairs(bench, base, &mut c, pairs, at).map_err(of)?;
        Ok(c)
    }

    /// Times both in turns, each first in every other pair, so that a machine whose speed drifts decides
    /// nothing.
    fn pairs(
        &self,
        bench: &Bench<'_>,
        base: &Runner,
        c: &mut Candidate,
        n: usize,
        at: &Progress,
    ) -> Result<()> {
        let burst = self.options.effort.burst;
        (c.ratios, c.seconds) = (vec![], vec![]);
        for i in 0..n {
            (self.options.events)(Event::Candidate(at));
            let (a, b) = if i % 2 == 0 {
                let a = bench.burst(base, burst)?;
                (a, bench.burst(&c.runner, burst)?)
            } else {
                let b = bench.burst(&c.runner, burst)?;
                (bench.burst(base, burst)?, b)
            };
            c.ratios.push(a / b.max(1e-12));
            c.seconds.push(b);
        }
        Ok(())
    }

    /// Puts a variant into quarantine, at once on disk: the next may end the process.
    fn reject(
        &self,
        bench: &Bench<'_>,
        base: &Runner,
        v: &Variant,
        why: Why,
        detail: String,
    ) -> Result<(), Stop> {
        let key = &self.tunable.choices.key;
        tracing::warn!(key, variant = %v, %why, detail, "a kernel is put into quarantine");
        let rejected = vec![Rejection { variant: v.clone(), why, detail }];
        self.cache.add(&Entry { rejected, ..Entry::new(self.device, key) });
        self.cache.save_or_warn();
        // A device that is lost fails with every kernel.
        if why == Why::DeviceError {
            bench.time(base).map_err(Stop::Device)?;
        }
        Ok(())
    }
}

fn of_default(e: Error) -> Stop {
    match e {
        Error::OutOfMemory { .. } => Stop::Kernel(e.to_string()),
        e => Stop::Device(e),
    }
}

/// A key's operands on the device.
struct Bench<'a> {
    backend: &'a Backend,
    inputs: Vec<(Operand, usize, BufferRef)>,
    output: Operand,
    result: BufferRef,
}

impl<'a> Bench<'a> {
    fn new(backend: &'a Backend, t: &Tunable) -> Result<Bench<'a>, Stop> {
        let d = backend.device();
        let extent = |o: &Operand| match o.view.range() {
            None => Ok(0),
            Some((lo, hi)) if lo >= 0 => Ok(hi as usize + 1),
            Some(_) => Err(Stop::Kernel("a view begins before its buffer".into())),
        };
        let sizes = t.inputs.iter().map(extent).collect::<Result<Vec<_>, _>>()?;
        let bytes = t.inputs.iter().zip(&sizes).map(|(o, n)| o.dtype.bytes(*n));
        let out = t.output.dtype.bytes(t.output.view.numel());
        let total = bytes.fold(out, usize::saturating_add) as u64;
        if d.available().is_some_and(|free| free / 2 < total) {
            return Err(Stop::Kernel(format!(
                "its operands take {total} bytes, which would leave the program too little memory"
            )));
        }
        let alloc = |n: usize| d.alloc(n, Tag::Workspace).map_err(of_default);
        let inputs = t.inputs.iter().zip(sizes);
        let inputs = inputs.map(|(o, n)| Ok((o.clone(), n, alloc(o.dtype.bytes(n))?)));
        let inputs = inputs.collect::<Result<Vec<_>, Stop>>()?;
        Ok(Bench { backend, inputs, output: t.output.clone(), result: alloc(out)? })
    }

    fn runner(&self, low: &Lowered) -> Result<Runner> {
        let d = self.backend.device();
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
        self.backend.device().submit(&commands)
    }

    /// Seconds of a run, the wait included.
    fn time(&self, r: &Runner) -> Result<f64> {
        self.times(r, 1)
    }

    fn times(&self, r: &Runner, n: u32) -> Result<f64> {
        let d = self.backend.device();
        d.synchronize()?;
        let start = Instant::now();
        for _ in 0..n {
            self.launch(r)?;
        }
        d.synchronize()?;
        Ok(start.elapsed().as_secs_f64() / f64::from(n))
    }

    /// Mean seconds of a run, of as many as fit in the time, after one that brings back what the other side
    /// has pushed out of the caches.
    fn burst(&self, r: &Runner, time: Duration) -> Result<f64> {
        let one = self.time(r)?.max(1e-7);
        self.times(r, (time.as_secs_f64() / one).clamp(1.0, MOST_LAUNCHES) as u32)
    }

    /// Writes random numbers, or their magnitudes, into the operands: the same in each call.
    fn fill(&self, magnitudes: bool) -> Result<()> {
        for (i, (o, n, b)) in self.inputs.iter().enumerate() {
            let bytes = random(o.dtype, *n, i as u64 + 1, magnitudes)?;
            self.backend.device().write(b, 0, &bytes)?;
        }
        Ok(())
    }

    /// Runs kernels over an output full of [`POISON`].
    fn result(&self, r: &Runner) -> Result<ConstData> {
        let d = self.backend.device();
        let n = self.output.view.numel();
        let mut bytes = host::zeros(self.output.dtype.bytes(n), "a kernel's result")?;
        bytes.fill(POISON);
        d.write(&self.result, 0, &bytes)?;
        self.launch(r)?;
        d.read(&self.result, 0, &mut bytes)?;
        ConstData::new(self.output.dtype, &[n], Arc::new(bytes))
    }

    /// The default's result, and how far another may be off. The operands hold random numbers afterwards.
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
    /// The largest difference as a share of what is allowed, or what is wrong.
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

/// Random elements: floats in [-1, 1), integers from -4 (unsigned ones from 0) to 4; a period of a prime
/// number of elements, for speed.
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
    fn differences_are_shares_of_what_is_allowed() {
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
