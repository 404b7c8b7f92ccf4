//! The peaks that performance is compared with, measured on the device's threads.

use super::threads;
use halcyon::{Backend, BackendType, Error, Result};
use halcyon_hal::cpu::peak::{self, MulAdd, Stream};
use halcyon_hal::cpu::sys::{Caches, Isa};
use halcyon_hal::cpu::team::Team;
use std::collections::BTreeMap;
use std::time::Duration;

/// Smallest working set for measuring bandwidth. In smaller working sets, overhead dominates.
const MIN_WORKING_SET: u64 = 256 << 10;
/// Largest working set; no cache holds a significant part of it.
const MAX_WORKING_SET: u64 = 1 << 30;
/// Time after which the threads of another team are asleep, so that they do not disturb a measurement.
const SLEEP_DELAY: Duration = Duration::from_millis(5);

/// The operations and memory traffic of some work.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Work {
    pub flops: u64,
    pub read: u64,
    pub written: u64,
    /// Arithmetic of its products: `f32`, `bf16` or `int8`.
    pub arithmetic: &'static str,
}

impl Work {
    pub(crate) fn bytes(&self) -> u64 {
        self.read.saturating_add(self.written)
    }

    fn stream(&self) -> Stream {
        if self.written < self.bytes() / 10 { Stream::Read } else { Stream::Triad }
    }

    fn kind(&self) -> MulAdd {
        MulAdd::ALL.into_iter().find(|k| k.name() == self.arithmetic).unwrap_or(MulAdd::F32)
    }
}

/// The least time for some work at the machine's peaks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limit {
    pub seconds: f64,
    /// `compute` or `memory`, whichever takes longer.
    pub bound: &'static str,
    /// FLOP/s.
    pub flops: f64,
    /// Bytes per second.
    pub bandwidth: f64,
}

/// Measures peaks shortly before or after the work that they limit.
#[derive(Debug)]
pub(crate) struct Limits {
    team: Team,
    isa: Isa,
    flops: BTreeMap<MulAdd, f64>,
    bandwidth: BTreeMap<(Stream, u64), f64>,
}

impl Limits {
    /// # Errors
    /// [`Error::Unsupported`] for devices other than the CPU.
    pub(crate) fn new(b: &Backend) -> Result<Limits> {
        if b.info().backend != BackendType::Cpu {
            return Err(Error::unsupported(
                format!("measuring the peaks of {}", b.id()),
                "Use --backend cpu for shares of a peak",
            ));
        }
        let threads =
            threads(b).ok_or_else(|| Error::internal("the CPU device does not report its threads"))?;
        Ok(Limits {
            team: Team::new(threads),
            isa: Isa::best(),
            flops: BTreeMap::new(),
            bandwidth: BTreeMap::new(),
        })
    }

    /// Drops the measured peaks.
    pub(crate) fn clear(&mut self) {
        self.flops.clear();
        self.bandwidth.clear();
    }

    /// The limit of this work from peaks measured now. If a peak was measured before, the higher figure is
    /// kept.
    pub(crate) fn measure(&mut self, w: &Work) -> Result<Limit> {
        std::thread::sleep(SLEEP_DELAY);
        self.measure_flops(w.kind())?;
        self.measure_bandwidth(w.stream(), size(w))?;
        Ok(self.limit(w, size(w)))
    }

    fn measure_flops(&mut self, kind: MulAdd) -> Result<()> {
        let known = self.flops.entry(kind).or_default();
        match rates(|| peak::multiply_add(&self.team, self.isa, kind)) {
            Ok(r) => *known = best(&r).max(*known),
            Err(Error::Unsupported { .. }) if kind != MulAdd::F32 => {}
            Err(e) => return Err(e),
        }
        // Low-precision products can also run in f32, which is faster on some processors.
        if kind != MulAdd::F32 {
            let r = rates(|| peak::multiply_add(&self.team, self.isa, MulAdd::F32))?;
            *known = best(&r).max(*known);
        }
        Ok(())
    }

    fn measure_bandwidth(&mut self, stream: Stream, size: u64) -> Result<()> {
        let r = rates(|| peak::bandwidth(&self.team, self.isa, stream, size as usize))?;
        let known = self.bandwidth.entry((stream, size)).or_default();
        *known = best(&r).max(*known);
        Ok(())
    }

    /// Like [`Limits::measure`], but reuses known peaks, and rounds working sets up to a few sizes.
    pub(crate) fn cached(&mut self, w: &Work) -> Result<Limit> {
        let (kind, stream, size) = (w.kind(), w.stream(), round_up(size(w)));
        if !self.flops.contains_key(&kind) {
            std::thread::sleep(SLEEP_DELAY);
            self.measure_flops(kind)?;
        }
        if !self.bandwidth.contains_key(&(stream, size)) {
            self.measure_bandwidth(stream, size)?;
        }
        Ok(self.limit(w, size))
    }

    fn limit(&self, w: &Work, size: u64) -> Limit {
        let flops = self.flops.get(&w.kind()).copied().unwrap_or(f64::NAN);
        let bandwidth = self.bandwidth.get(&(w.stream(), size)).copied().unwrap_or(f64::NAN);
        let (compute, memory) = (w.flops as f64 / flops, w.bytes() as f64 / bandwidth);
        let bound = if compute >= memory { "compute" } else { "memory" };
        Limit { seconds: compute.max(memory), bound, flops, bandwidth }
    }
}

fn size(w: &Work) -> u64 {
    w.bytes().clamp(MIN_WORKING_SET, MAX_WORKING_SET)
}

fn best(rates: &[f64]) -> f64 {
    rates.iter().copied().fold(0.0, f64::max)
}

/// Rounds up to the next number of the form 2^k or 3 * 2^k.
fn round_up(n: u64) -> u64 {
    let p = n.next_power_of_two();
    if n <= p / 4 * 3 { p / 4 * 3 } else { p }
}

/// Repeats bursts until the best three agree within 5 %, because other load on the machine can spoil a few
/// bursts. Calls `measure` at most four times.
pub(crate) fn rates(mut measure: impl FnMut() -> Result<Vec<f64>>) -> Result<Vec<f64>> {
    let mut all = measure()?;
    for _ in 0..3 {
        all.sort_by(|a, b| b.total_cmp(a));
        if all.get(2).is_none_or(|third| *third > 0.95 * all[0]) {
            break;
        }
        all.extend(measure()?);
    }
    Ok(all)
}

/// Sizes in bytes of three working sets, of all threads together: for the second-level caches, for the
/// third-level cache, and for memory. An error is the reason why this machine has no such working set.
pub(crate) fn working_sets(threads: usize) -> [(&'static str, std::result::Result<usize, String>); 3] {
    let c = Caches::get();
    let l2 = c.l2 * threads;
    let l3 = if c.l3 == 0 {
        Err("the system reports no third-level cache".into())
    } else if c.l3 < 4 * l2 {
        Err(format!(
            "the third-level cache ({} KiB) is not much larger than all second-level caches together",
            c.l3 >> 10
        ))
    } else {
        // The working set is well above the second-level caches, and only a part of the third-level cache,
        // which other programs may use too.
        Ok((4 * l2).min(c.l3 / 2))
    };
    [("L2", Ok(l2 / 2)), ("L3", l3), ("DRAM", Ok((2 * c.l3).clamp(256 << 20, MAX_WORKING_SET as usize)))]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearer_limit_counts() {
        let b = Backend::builder().backend_type(BackendType::Cpu).num_threads(1).build().expect("a CPU");
        let mut l = Limits::new(&b).expect("a CPU");
        let gemm = Work { flops: 1 << 40, read: 1 << 20, written: 1 << 18, arithmetic: "f32" };
        let a = l.cached(&gemm).expect("measured");
        assert_eq!(a.bound, "compute");
        assert!((a.seconds - gemm.flops as f64 / a.flops).abs() < 1e-9);
        let copy = Work { flops: 10, ..gemm };
        let m = l.cached(&copy).expect("measured");
        assert_eq!((m.bound, m.flops, m.bandwidth), ("memory", a.flops, a.bandwidth));
        // The higher figure is kept.
        l.flops.insert(MulAdd::F32, 1e30);
        assert_eq!(l.measure(&gemm).expect("measured").flops, 1e30);
        l.clear();
        assert!(l.measure(&gemm).expect("measured").flops < 1e30);
    }

    #[test]
    fn reading_and_writing_have_their_own_limits() {
        let w = |read, written| Work { flops: 0, read, written, arithmetic: "f32" };
        assert_eq!((w(100, 1).stream(), w(50, 50).stream()), (Stream::Read, Stream::Triad));
        let odd = Work { arithmetic: "none", ..w(1, 1) };
        assert_eq!((odd.kind(), Work { arithmetic: "bf16", ..odd }.kind()), (MulAdd::F32, MulAdd::Bf16));
    }

    #[test]
    fn sizes_are_rounded_up_by_less_than_half() {
        let rounded =
            [(1 << 20, 1 << 20), ((1 << 20) + 1, 3 << 19), (3 << 19, 3 << 19), ((3 << 19) + 1, 2 << 20)];
        assert!(rounded.iter().all(|(n, r)| round_up(*n) == *r));
    }

    #[test]
    fn unsteady_rates_are_measured_again() {
        let mut n = 0;
        let mut run = |values: &[[f64; 3]]| {
            n = 0;
            let all = rates(|| {
                n += 1;
                Ok(values[n - 1].to_vec())
            });
            (all.expect("values").len(), n)
        };
        assert_eq!(run(&[[1.0, 0.99, 0.98]]), (3, 1));
        assert_eq!(run(&[[1.0, 0.5, 0.5], [1.0, 0.2, 0.1], [0.97, 0.1, 0.1]]), (9, 3));
        assert_eq!(run(&[[1.0, 0.5, 0.2], [2.0, 0.5, 0.2], [3.0, 0.5, 0.2], [4.0, 0.5, 0.2]]), (12, 4));
    }

    #[test]
    fn working_sets_grow() {
        let s = working_sets(2);
        let sizes: Vec<usize> = s.iter().filter_map(|(_, n)| n.as_ref().ok().copied()).collect();
        assert!(sizes.windows(2).all(|w| w[0] < w[1]), "{s:?}");
    }
}
