//! Decides whether mixed precision is faster on this processor: measures the rates of f32 and of the 16-bit
//! type with the kernels that plans use.
//!
//! Only CPU devices are measured. A small network of matrix products and a small network of convolutions run
//! on one core, alternately in f32 and in the 16-bit type. The best time of each type counts. This takes some
//! tens of milliseconds, once per processor and 16-bit type, because the rates are kept in the process, and
//! on disk beside the compiled programs.

use crate::executable::Executable;
use crate::planner::{Lowering, Planner};
use crate::runtime::Runtime;
use crate::tune::{Tuning, TuningCache, TuningMode};
use halcyon_hal::cache::{self, DiskCache};
use halcyon_hal::{BackendType, DeviceInfo, Options, Tag, registry};
use halcyon_ir::error::{Error, Result};
use halcyon_ir::ops::Conv;
use halcyon_ir::passes::autocast::{KeptInF32, MixedOps, Rates};
use halcyon_ir::passes::{AmpPolicy, Level};
use halcyon_ir::{ConstData, DType, Graph, TensorType};
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Number of pairs of runs. The best time of each type counts, so disturbed runs do not matter.
const PAIRS: usize = 6;
/// Maximum bytes of all rates on disk.
const LIMIT: u64 = 1 << 20;
/// Layers of each network: enough to make the casts of its input and output insignificant.
const LAYERS: usize = 3;

/// The work that a policy keeps in f32 on a device. If the measurement fails, nothing is kept in f32, and the
/// log has the reason.
pub(crate) fn kept_in_f32(info: &DeviceInfo, options: &Options, amp: AmpPolicy) -> KeptInF32 {
    if info.backend != BackendType::Cpu || amp == AmpPolicy::None {
        return KeptInF32::default();
    }
    type RateCache = HashMap<(u128, Option<PathBuf>), [Rates; 2]>;
    static CACHE: Mutex<Option<RateCache>> = Mutex::new(None);
    let key = key(info, amp);
    // The lock is held while measuring, because concurrent measurements would disturb each other.
    let mut known = CACHE.lock().unwrap_or_else(|e| e.into_inner());
    let known = known.get_or_insert_default();
    let dir = options.cache_dir.clone().or_else(cache::user_dir);
    let place = (key, dir.clone());
    let rates = match known.get(&place) {
        Some(r) => *r,
        None => {
            let disk = dir.map(|d| DiskCache::new(d.join("rates"), LIMIT));
            let read = disk.as_ref().and_then(|d| serde_json::from_slice(&d.get(key)?).ok());
            let rates = match read.map_or_else(|| measure(options.simd, amp), Ok) {
                Ok(r) => r,
                Err(e) => {
                    tracing::warn!(device = info.id, error = %e, "rates in {amp} could not be measured: the requested type is used");
                    return KeptInF32::default();
                }
            };
            if let (None, Some(d), Ok(text)) = (read, disk, serde_json::to_vec(&rates)) {
                d.put(key, &text);
            }
            known.insert(place, rates);
            rates
        }
    };
    let slow = |r: Rates| Some(r).filter(|r| !r.is_faster());
    KeptInF32 { products: slow(rates[0]), convolutions: slow(rates[1]) }
}

/// Identifies the release, the 16-bit type, the processor, and the instruction sets that its kernels use.
fn key(info: &DeviceInfo, amp: AmpPolicy) -> u128 {
    let mut parts = vec![env!("CARGO_PKG_VERSION").to_string(), amp.to_string(), info.name.clone()];
    parts.extend(
        ["architecture", "simd", "features", "bf16_products"]
            .map(|k| format!("{k} {:?}", info.properties.get(k))),
    );
    cache::digest(&[parts.join("\n").as_bytes()])
}

/// Rates of products and of convolutions, on one core.
fn measure(simd: Option<bool>, amp: AmpPolicy) -> Result<[Rates; 2]> {
    let start = Instant::now();
    let options = Options { threads: Some(1), simd, ..Options::default() };
    let device = registry::driver(BackendType::Cpu)?.open(0, &options)?;
    let planner = |amp| {
        // The values in these networks are small, so no check of their range is needed.
        let mixed = MixedOps { in_range: true, ..MixedOps::default() };
        let lowering = Lowering { level: Level::O2, amp, mixed, ..Lowering::default() };
        let tuning = Tuning::new(Some(TuningMode::Cached), Arc::new(TuningCache::memory()), String::new());
        Planner::new(Arc::new(Runtime::new(device.clone(), None)), lowering, tuning)
    };
    let (full, half) = (planner(AmpPolicy::None), planner(amp));
    let rates = [products()?, convolutions()?].map(|w| w.rates(&full, &half));
    let [p, c] = rates;
    let rates = [p?, c?];
    tracing::debug!(elapsed = ?start.elapsed(), ?rates, "measured products and convolutions in f32 and {amp}");
    Ok(rates)
}

/// A network with layers of one kind.
struct Work {
    graph: Graph,
    input: ConstData,
    /// Floating-point operations of one run.
    flops: f64,
}

impl Work {
    fn rates(&self, full: &Arc<Planner>, half: &Arc<Planner>) -> Result<Rates> {
        let plan =
            |p: &Arc<Planner>| -> Result<_> { Ok((p.runtime.clone(), p.plan(self.graph.clone(), vec![])?)) };
        let plans: [(Arc<Runtime>, Arc<Executable>); 2] = [plan(full)?, plan(half)?];
        let mut best = [Duration::MAX; 2];
        // The first pair is not timed: it lets the processor's clock rise.
        for pair in 0..=PAIRS {
            for ((runtime, exe), best) in plans.iter().zip(&mut best) {
                let start = Instant::now();
                std::hint::black_box(self.run(runtime, exe)?);
                if pair > 0 {
                    *best = (*best).min(start.elapsed());
                }
            }
        }
        let [full, half] = best.map(|t| rate(self.flops, t));
        Ok(Rates { full, half })
    }

    /// Copies the input to the device, runs, and copies the outputs back.
    fn run(&self, runtime: &Runtime, exe: &Executable) -> Result<Vec<ConstData>> {
        let d = &runtime.device;
        let input = d.alloc(self.input.bytes().len(), Tag::Io)?;
        d.write(&input, 0, self.input.bytes())?;
        exe.download(&exe.run(&[input], &[])?)
    }
}

/// The rate in MFLOP/s.
fn rate(flops: f64, time: Duration) -> u64 {
    (flops / time.as_secs_f64().max(1e-9) / 1e6).round() as u64
}

/// Small numbers of both signs, the same in every run.
fn numbers(dims: &[usize], scale: f32) -> Result<ConstData> {
    let n: usize = dims.iter().product();
    let at = |i: usize| ((i * 7919 % 257) as f32 / 128.0 - 1.0) * scale;
    ConstData::from_slice(dims, &(0..n).map(at).collect::<Vec<f32>>())
        .map_err(|e| Error::internal(e.to_string()))
}

/// Products of 256 × 256 weights with 256 rows.
fn products() -> Result<Work> {
    const N: usize = 256;
    let mut g = Graph::new();
    let mut y = g.input("x", TensorType::new(DType::F32, [N, N]));
    for _ in 0..LAYERS {
        let w = g.constant(numbers(&[N, N], 0.1)?);
        let p = g.matmul(y, w)?;
        y = g.relu(p)?;
    }
    g.output("y", y);
    let flops = (LAYERS * 2 * N * N * N) as f64;
    Ok(Work { graph: g, input: numbers(&[N, N], 1.0)?, flops })
}

/// 3 × 3 convolutions from 64 to 64 channels on 28 × 28 points, as in the middle of a residual network.
fn convolutions() -> Result<Work> {
    const C: usize = 64;
    const S: usize = 28;
    let mut g = Graph::new();
    let mut y = g.input("x", TensorType::new(DType::F32, [1, C, S, S]));
    let mut attrs = Conv::new(2);
    attrs.pad = [(1, 1), (1, 1)].into_iter().collect();
    for _ in 0..LAYERS {
        let w = g.constant(numbers(&[C, C, 3, 3], 0.05)?);
        let p = g.conv(y, w, attrs.clone())?;
        y = g.relu(p)?;
    }
    g.output("y", y);
    let flops = (LAYERS * 2 * C * C * 9 * S * S) as f64;
    Ok(Work { graph: g, input: numbers(&[1, C, S, S], 1.0)?, flops })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::Backend;

    #[test]
    fn rates_are_measured_once_and_kept_on_disk() {
        let dir = tempfile::tempdir().unwrap();
        let options = Options { cache_dir: Some(dir.path().into()), ..Options::default() };
        let mut info = registry::driver(BackendType::Cpu).unwrap().probe().unwrap().remove(0);
        info.name = "a processor of this test".into();
        let first = kept_in_f32(&info, &options, AmpPolicy::Bf16);
        let files = || std::fs::read_dir(dir.path().join("rates")).unwrap().count();
        assert_eq!(files(), 1);
        assert_eq!(kept_in_f32(&info, &options, AmpPolicy::Bf16), first);
        // Rates that another process cached are used: first slow rates, then fast rates.
        let disk = DiskCache::new(dir.path().join("rates"), LIMIT);
        for (name, half) in [("slow", 50), ("fast", 200)] {
            info.name = name.into();
            let rates = [Rates { full: 100, half }; 2];
            disk.put(key(&info, AmpPolicy::Bf16), &serde_json::to_vec(&rates).unwrap());
            let k = kept_in_f32(&info, &options, AmpPolicy::Bf16);
            assert_eq!(k.is_everything(), half < 100, "{k:?}");
            assert_eq!(k == KeptInF32::default(), half > 100);
        }
        // Nothing is measured without mixed precision, or on a device that is not a CPU.
        assert_eq!(kept_in_f32(&info, &options, AmpPolicy::None), KeptInF32::default());
        info.backend = BackendType::OpenCl;
        assert_eq!(kept_in_f32(&info, &options, AmpPolicy::Bf16), KeptInF32::default());
    }

    /// A cache with the given rates for this processor: (f32, bf16) of products and of convolutions. The
    /// builder uses this cache.
    fn cpu_with(rates: [(u64, u64); 2]) -> (tempfile::TempDir, crate::BackendBuilder) {
        let dir = tempfile::tempdir().unwrap();
        let b = Backend::builder().backend_type(BackendType::Cpu).cache_dir(dir.path());
        let info = b.clone().amp(AmpPolicy::None).build().unwrap().info().clone();
        let rates = rates.map(|(full, half)| Rates { full, half });
        let disk = DiskCache::new(dir.path().join("rates"), LIMIT);
        disk.put(key(&info, AmpPolicy::Bf16), &serde_json::to_vec(&rates).unwrap());
        (dir, b.amp(AmpPolicy::Bf16))
    }

    #[test]
    fn a_processor_that_is_slower_in_bf16_stays_in_f32_and_says_the_rates() {
        let product = products().unwrap().graph;
        let plan = |b: &Backend| {
            halcyon_ir::lower::lower(&product, b.device().as_target(), &b.lower_options()).unwrap()
        };
        let mixed =
            |b: &Backend| plan(b).receipts.iter().any(|r| r.transformation == halcyon_ir::passes::MIXED);
        let told = |lines: &[String]| {
            lines.iter().any(|w| w.contains("measured 41.2 GFLOP/s in bf16 and 98.7 in f32"))
        };

        let (_dir, b) = cpu_with([(98_700, 41_200); 2]);
        let kept = b.clone().build().unwrap();
        assert_eq!(kept.amp(), AmpPolicy::None);
        assert!(!mixed(&kept) && told(&plan(&kept).warnings), "{:?}", plan(&kept).warnings);
        assert!(told(kept.warnings()), "{:?}", kept.warnings());
        let forced = b.clone().force_amp(true).build().unwrap();
        assert_eq!(forced.amp(), AmpPolicy::Bf16);
        assert!(mixed(&forced) && forced.warnings().is_empty() && plan(&forced).warnings.is_empty());
        // A device that is opened with the same settings stays in f32 too. Below level O2 there is no warning
        // about rates.
        assert_eq!(kept.on_device(0).unwrap().amp(), AmpPolicy::None);
        let o1 = b.level(Level::O1).build().unwrap();
        assert!(o1.warnings().iter().all(|w| !w.contains("GFLOP/s")), "{:?}", o1.warnings());

        // Only convolutions are slower: products are in bf16.
        let (_dir, b) = cpu_with([(98_700, 180_000), (98_700, 41_200)]);
        let some = b.build().unwrap();
        assert_eq!(some.amp(), AmpPolicy::Bf16);
        assert!(mixed(&some) && plan(&some).warnings.is_empty() && told(some.warnings()));

        let (_dir, b) = cpu_with([(98_700, 180_000); 2]);
        let fast = b.build().unwrap();
        assert!(mixed(&fast) && fast.warnings().is_empty(), "{:?}", fast.warnings());
        // Forcing without mixed precision is an error.
        let e = Backend::builder().amp(AmpPolicy::None).force_amp(true).build().unwrap_err();
        assert!(e.exit_code() == 2 && e.to_string().contains("--force-precision"), "{e}");
    }

    #[test]
    fn the_half_type_must_be_a_tenth_faster() {
        for (full, half, pays) in [(100, 50, false), (100, 109, false), (100, 111, true), (0, 0, false)] {
            assert_eq!(Rates { full, half }.is_faster(), pays, "{full} {half}");
        }
    }

    #[test]
    fn both_kinds_have_rates() {
        assert_eq!(rate(98.7e6, Duration::from_millis(1)), 98_700);
        assert_eq!(rate(98.7e6, Duration::MAX), 0, "nothing was timed");
        let rates = measure(None, AmpPolicy::Bf16).unwrap();
        println!("{rates:?}");
        assert!(rates.iter().all(|r| r.full > 0 && r.half > 0), "{rates:?}");
    }
}
