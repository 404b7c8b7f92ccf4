//! Algorithm search: a library lists algorithms for a call, its favourite first. They are measured once per
//! call, in turns, and the fastest is kept in the tuning cache ([`crate::tune`]).
//!
//! Every algorithm of the list is as exact as the call requires, so the results of the search cannot be
//! wrong, and they are not compared. An algorithm that fails is not tried again.

use super::SimtKernel;
use crate::simt::device::SimtDevice;
use crate::simt::memory::SimtBuffer;
use crate::simt::queue::Queue;
use crate::tune::{self, Best, Entry, Guard, RejectReason, Rejection, TuningCache};
use crate::{Counts, Error, Result, Tag, cache};
use halcyon_ir::kernel::tune::Variant;
use std::sync::{Arc, Mutex};

/// The byte that fills operands: an ordinary number in every type.
const FILL: u8 = 0x3C;
/// How often each algorithm is timed. If one turn takes longer than `LONG_TURN` seconds, `FEW_ROUNDS` times.
const ROUNDS: usize = 9;
const FEW_ROUNDS: usize = 3;
const LONG_TURN: f64 = 0.2;
/// Seconds of work between two time stamps, and the maximum number of runs for that.
const BURST: f64 = 200e-6;
const MAX_RUNS: f64 = 50.0;
/// An algorithm that takes more than this multiple of the favourite's time is dropped after its first runs.
const TOO_SLOW: f64 = 20.0;
/// The least gain over the favourite for which another algorithm is taken.
const LEAST_GAIN: f64 = 1.02;

/// The settings of the search on one device.
#[derive(Debug)]
pub(in crate::simt) struct Search {
    cache: Arc<TuningCache>,
    /// The device's key in the cache.
    device: String,
    /// Held during a measurement, because two would disturb each other. Whether the algorithms that were
    /// running when a process ended have been rejected.
    recovered: Mutex<bool>,
}

/// An algorithm of a library for a call.
#[derive(Debug)]
pub(super) struct Algorithm {
    pub variant: Variant,
    pub kernel: SimtKernel,
}

/// A device on which algorithms are measured.
#[derive(Clone, Copy, Debug)]
pub(in crate::simt) struct Searcher<'a> {
    pub search: &'a Search,
    pub device: &'a SimtDevice,
}

/// The times of an algorithm, in seconds per run.
struct Times {
    at: usize,
    seconds: Vec<f64>,
}

fn median(v: &[f64]) -> f64 {
    let mut v = v.to_vec();
    v.sort_by(f64::total_cmp);
    v.get(v.len() / 2).copied().unwrap_or(f64::NAN)
}

/// The interval that contains the median with a confidence of at least 95 %, by order statistics; for fewer
/// than nine values, all values.
fn interval(v: &[f64]) -> (f64, f64) {
    let mut v = v.to_vec();
    v.sort_by(f64::total_cmp);
    let skip = usize::from(v.len() >= ROUNDS);
    match v.len() {
        0 => (f64::NAN, f64::NAN),
        n => (v[skip], v[n - 1 - skip]),
    }
}

impl Search {
    pub(in crate::simt) fn new(cache: Arc<TuningCache>, device: String) -> Search {
        Search { cache, device, recovered: Mutex::default() }
    }

    /// The index of the algorithm that the cache has for this call, if the library still lists the same ones.
    fn known(&self, key: &str, program: &str, all: &[Algorithm]) -> Option<usize> {
        let entry = self.cache.get(&self.device, key)?;
        let best = entry.best().filter(|b| b.program == program)?;
        all.iter().position(|a| a.variant == best.variant)
    }
}

impl Searcher<'_> {
    /// The fastest of a library's algorithms for a call. `key` identifies the call, `version` the library.
    /// The algorithms are measured if the cache has no result for the call. If that is impossible, the result
    /// is the first one.
    ///
    /// # Panics
    /// If there are no algorithms.
    pub(super) fn fastest(&self, key: &str, version: &str, mut all: Vec<Algorithm>) -> SimtKernel {
        let s = self.search;
        if all.len() == 1 {
            return all.swap_remove(0).kernel;
        }
        let listed: Vec<String> = all.iter().map(|a| a.variant.to_string()).collect();
        let parts: Vec<&[u8]> =
            std::iter::once(version).chain(listed.iter().map(|v| v.as_str())).map(str::as_bytes).collect();
        let program = format!("{:032x}", cache::digest(&parts));
        if let Some(at) = s.known(key, &program, &all) {
            s.cache.touch(&s.device, &[key]);
            return all.swap_remove(at).kernel;
        }
        let mut recovered = s.recovered.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(at) = s.known(key, &program, &all) {
            return all.swap_remove(at).kernel;
        }
        if !std::mem::replace(&mut *recovered, true) {
            let detail = "an earlier process ended while it ran this algorithm (it crashed or was stopped)";
            if let Err(e) = s.cache.recover(RejectReason::Crashed, detail) {
                tracing::warn!(%e, "the tuning cache was not searched for algorithms that crashed");
            }
        }
        let at = match self.measure(key, &program, &all) {
            Ok(at) => at,
            Err(e) => {
                tracing::warn!(device = %s.device, call = key, "algorithms were not measured: {e}");
                0
            }
        };
        all.swap_remove(at).kernel
    }

    /// Measures the algorithms and stores the result; returns the index of the fastest.
    fn measure(&self, key: &str, program: &str, all: &[Algorithm]) -> Result<usize> {
        let s = self.search;
        let rejected = s.cache.get(&s.device, key).map(|e| e.rejected).unwrap_or_default();
        let open = |i: &usize| rejected.iter().all(|r| r.variant != all[*i].variant);
        let left: Vec<usize> = (0..all.len()).filter(open).collect();
        match left[..] {
            [] => return Err(Error::internal("all algorithms failed before")),
            [only] => return Ok(only),
            _ => {}
        }
        let bench = Bench::new(self.device, all)?;
        let mut guard = s.cache.guard().unwrap_or_else(|e| {
            tracing::debug!(%e, "a crash of an algorithm would not be noted");
            None
        });
        let mut entry = Entry::new(&s.device, key);
        let mut good: Vec<(Times, f64)> = vec![];
        for at in left {
            let a = &all[at];
            match bench.first(key, &s.device, a, &mut guard)? {
                Ok(seconds) => match good.first() {
                    Some((_, favourite)) if seconds > TOO_SLOW * favourite => {
                        let detail = format!("{:.1} times as slow as the first choice", seconds / favourite);
                        entry.rejected.push(reject(a, RejectReason::TooSlow, detail));
                    }
                    _ => good.push((Times { at, seconds: vec![] }, seconds)),
                },
                Err(e) => entry.rejected.push(reject(a, RejectReason::DeviceError, e.to_string())),
            }
        }
        let turn: f64 = good.iter().map(|(_, seconds)| seconds.max(BURST)).sum();
        for _ in 0..if turn > LONG_TURN { FEW_ROUNDS } else { ROUNDS } {
            for (times, seconds) in &mut good {
                let n = (BURST / seconds.max(1e-9)).clamp(1.0, MAX_RUNS) as usize;
                times.seconds.push(bench.time(&all[times.at].kernel, n)?);
            }
        }
        drop(guard);
        let Some((favourite, _)) = good.first() else {
            s.cache.add(&entry);
            s.cache.save_or_warn();
            let what = format!("all {} algorithms failed", all.len());
            return Err(Error::internal(what));
        };
        let ratios = |t: &Times| -> Vec<f64> {
            let pairs = favourite.seconds.iter().zip(&t.seconds);
            pairs.map(|(f, s)| f.max(1e-9) / s.max(1e-9)).collect()
        };
        let mut best = (favourite, 1.0, (1.0, 1.0));
        for (t, _) in &good[1..] {
            let (gain, range) = (median(&ratios(t)), interval(&ratios(t)));
            if gain >= LEAST_GAIN.max(best.1) && range.0 > 1.0 {
                best = (t, gain, range);
            }
        }
        let (winner, gain, interval) = best;
        let chosen = &all[winner.at];
        entry.best = Some(Best {
            variant: chosen.variant.clone(),
            program: program.into(),
            default: all[0].variant.clone(),
            gain,
            interval,
            seconds: median(&winner.seconds),
            default_seconds: median(&favourite.seconds),
            error: 0.0,
            tried: good.len() + entry.rejected.len(),
            measured: tune::now(),
        });
        tracing::info!(device = %s.device, call = key, chosen = %chosen.variant, gain, "algorithms were measured");
        s.cache.add(&entry);
        s.cache.save_or_warn();
        Ok(winner.at)
    }
}

fn reject(a: &Algorithm, why: RejectReason, detail: String) -> Rejection {
    tracing::debug!(algorithm = %a.variant, %why, "{detail}");
    Rejection { variant: a.variant.clone(), why, detail }
}

/// A queue and buffers for measurements.
struct Bench<'a> {
    device: &'a SimtDevice,
    /// Declared before the buffers: dropping it waits for its work.
    queue: Queue,
    buffers: Vec<SimtBuffer>,
    workspace: Option<SimtBuffer>,
}

impl<'a> Bench<'a> {
    fn new(device: &'a SimtDevice, all: &[Algorithm]) -> Result<Bench<'a>> {
        let sizes = all[0].kernel.operands();
        let room = all.iter().map(|a| a.kernel.workspace).max().filter(|n| *n > 0);
        let buffers = sizes.iter().map(|n| device.scratch(*n)).collect::<Result<Vec<_>>>()?;
        let workspace = room.map(|n| device.scratch(n)).transpose()?;
        // The pool may reuse memory whose last work is still pending, and the new queue is not ordered with
        // that work.
        device.wait_for_all()?;
        let (context, counts) = (&device.shared.context, Arc::new(Counts::default()));
        let queue = Queue::new(context, device.pool.clone(), counts, false, false)?;
        let bench = Bench { device, queue, buffers, workspace };
        for b in &bench.buffers {
            // SAFETY: the buffer belongs to the device, and nothing else uses it.
            unsafe { bench.queue.fill(b, FILL) }?;
        }
        bench.queue.finish()?;
        Ok(bench)
    }

    /// The seconds of a run, after a run that is not timed because the library may set itself up in it. The
    /// inner error is one of this algorithm.
    fn first(
        &self,
        key: &str,
        device: &str,
        a: &Algorithm,
        guard: &mut Option<Guard>,
    ) -> Result<Result<f64>> {
        if let Some(g) = guard {
            g.begin(device, key, &a.variant)?;
        }
        Counts::add(&self.device.shared.counts.algorithms_measured, 1);
        let ran = self.time(&a.kernel, 1).and_then(|_| self.time(&a.kernel, 1));
        // After an error of the device, this fails too.
        self.queue.finish()?;
        if let Some(g) = guard {
            g.end()?;
        }
        Ok(ran)
    }

    /// The seconds of a run, from `n` runs.
    fn time(&self, k: &SimtKernel, n: usize) -> Result<f64> {
        let room = self.workspace.iter().filter(|_| k.workspace > 0);
        let all: Vec<&SimtBuffer> = self.buffers.iter().chain(room).collect();
        // The pool moves no buffer of a queue that holds this lock.
        let still = self.device.queue.begin()?;
        k.check(&all)?;
        let begin = self.queue.stamp()?;
        for _ in 0..n {
            // SAFETY: the queue owns the stream. The buffers belong to its device, passed `check` and are not
            // moved while `still` is held; `finish` below waits for the work.
            unsafe { k.enqueue(self.queue.raw(), &all) }.or_else(|e| self.queue.finish().and(Err(e)))?;
        }
        let end = self.queue.stamp()?;
        self.queue.finish()?;
        drop(still);
        Ok(end.since(&begin)? as f64 * 1e-9 / n as f64)
    }
}

impl SimtDevice {
    /// Memory of the pool for a measurement.
    fn scratch(&self, bytes: usize) -> Result<SimtBuffer> {
        let block = self.pool.alloc(bytes, Tag::Workspace, &|| {
            Err(Error::unsupported("moving buffers for a measurement", "Use the library's first choice"))
        })?;
        Ok(SimtBuffer::pooled(block, self.shared.number))
    }

    /// Waits for all work submitted so far, including that of streams.
    fn wait_for_all(&self) -> Result<()> {
        self.queue.finish()?;
        self.shared.queues.drain();
        Ok(())
    }
}
