//! The list of transformations, with the speed-up of each on a device.

use super::networks;
use crate::backend::Backend;
use crate::quantize::{QuantizeOptions, quantize};
use crate::receipts::{self, Effort};
use crate::session::Session;
#[cfg(not(target_arch = "wasm32"))]
use halcyon_hal::cache::{self, DiskCache};
use halcyon_ir::error::Result;
use halcyon_ir::passes::{self, AmpPolicy, Level, PassOptions};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// A transformation, with its measured speed-up.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Strategy {
    /// The name in receipts and for `--without`.
    pub name: String,
    pub description: String,
    /// The time without the transformation divided by the time with it: the geometric mean over the small
    /// networks that the transformation changed on this device. `None` if the transformation changed no
    /// network, or could not be measured.
    pub speedup_estimate: Option<f64>,
    /// The levels that include the transformation.
    pub applicable_levels: Vec<Level>,
}

/// Speed-ups by transformation.
type Gains = BTreeMap<String, f64>;

/// The maximum size of all gains on disk, in bytes.
#[cfg(not(target_arch = "wasm32"))]
const LIMIT: u64 = 1 << 20;
/// The version of the method of measuring. Cached gains of another version are ignored.
#[cfg(not(target_arch = "wasm32"))]
const METHOD: u32 = 3;
/// Each burst has one run. Only the fastest run with and the fastest run without a transformation are used,
/// so disturbed runs do not matter. For quantisation only `pairs` is used, and the gain is a median.
const EFFORT: Effort = Effort { pairs: 20, interval: f64::INFINITY, burst: Duration::ZERO };

fn description(name: &str) -> &'static str {
    match name {
        passes::FOLD => "computes values that depend only on constants once, when the plan is made",
        passes::SIMPLIFY => "applies identities that keep every bit, and drops ops without effect",
        passes::CSE => "computes equal values once",
        passes::FUSION => "computes element-wise ops inside the kernel that reads their result",
        passes::COMPOSITES => "runs softmax, norms and attention as one kernel each",
        passes::IN_PLACE => {
            "writes updated slices into the tensor that they update, and element-wise results into donated inputs"
        }
        passes::JOINED => {
            "computes an element-wise result that is stored and its element-wise reader in one kernel"
        }
        passes::LAUNCHES => "runs the same element-wise kernel on many small tensors in one launch",
        passes::PACKED => "stores constants once in the layout that the kernel reads",
        passes::EPILOGUES => "computes the ops after a product or convolution on its tiles",
        passes::AFFINE => "merges additions and multiplications by constants after a product",
        passes::BLOCKED => "keeps images in blocks of channels from convolution to convolution",
        passes::RECOGNITION => "finds attention, norms and activations that are written as separate ops",
        passes::MIXED => "computes products and convolutions in a 16-bit type",
        passes::TUNED => "uses the variants of kernels that tuning found fastest",
        passes::QUANTIZED => {
            "computes products and convolutions in 8-bit integers, within a bound of the error"
        }
        _ => "a transformation of plans",
    }
}

pub(super) fn of(backend: &Backend) -> Vec<Strategy> {
    let gains = gains(backend);
    let one = |name: &&str| Strategy {
        name: name.to_string(),
        description: description(name).into(),
        speedup_estimate: gains.get(*name).copied(),
        applicable_levels: levels_of(name),
    };
    passes::ALL.iter().map(one).collect()
}

fn levels_of(name: &str) -> Vec<Level> {
    super::levels().into_iter().filter(|l| PassOptions::at(*l).does(name)).collect()
}

/// The gains on a device. They are measured once. If the measurement fails, the list is empty, and the log
/// has the reason.
fn gains(backend: &Backend) -> Gains {
    static KNOWN: Mutex<Option<HashMap<(String, Option<PathBuf>), Gains>>> = Mutex::new(None);
    // The lock is held during the measurement, because concurrent measurements would disturb each other.
    let mut known = KNOWN.lock().unwrap_or_else(|e| e.into_inner());
    let known = known.get_or_insert_default();
    let place = (identity(backend), backend.cache_dir());
    if let Some(g) = known.get(&place) {
        return g.clone();
    }
    let gains = match read(&place) {
        Some(g) => g,
        None => match measure(backend) {
            Ok(g) => {
                write(&place, &g);
                g
            }
            Err(e) => {
                tracing::warn!(device = backend.id(), error = %e, "speed-ups could not be measured");
                return Gains::new();
            }
        },
    };
    known.insert(place, gains.clone());
    gains
}

/// Everything that the gains depend on: the device, its driver and settings, and this build.
fn identity(b: &Backend) -> String {
    let d = b.info();
    let build = if cfg!(debug_assertions) { "debug" } else { "release" };
    format!(
        "{} {build} {} {} {:?} {:?} {} {:?}",
        env!("CARGO_PKG_VERSION"),
        d.id,
        d.name,
        d.driver_version,
        d.properties,
        b.precision(),
        b.tuning_mode()
    )
}

#[cfg(not(target_arch = "wasm32"))]
fn disk((identity, dir): &(String, Option<PathBuf>)) -> Option<(DiskCache, u128)> {
    let cache = DiskCache::new(dir.as_ref()?.join("gains"), LIMIT);
    Some((cache, cache::digest(&[&METHOD.to_le_bytes(), identity.as_bytes()])))
}

#[cfg(not(target_arch = "wasm32"))]
fn read(place: &(String, Option<PathBuf>)) -> Option<Gains> {
    let (cache, key) = disk(place)?;
    serde_json::from_slice(&cache.get(key)?).ok()
}

#[cfg(not(target_arch = "wasm32"))]
fn write(place: &(String, Option<PathBuf>), gains: &Gains) {
    if let (Some((cache, key)), Ok(text)) = (disk(place), serde_json::to_vec(gains)) {
        cache.put(key, &text);
    }
}

#[cfg(target_arch = "wasm32")]
fn read(_: &(String, Option<PathBuf>)) -> Option<Gains> {
    None
}

#[cfg(target_arch = "wasm32")]
fn write(_: &(String, Option<PathBuf>), _: &Gains) {}

fn best(seconds: &[f64]) -> f64 {
    seconds.iter().copied().fold(f64::INFINITY, f64::min)
}

/// Measures every transformation on every network that it changes.
fn measure(backend: &Backend) -> Result<Gains> {
    let start = Instant::now();
    let full = backend.with_amp(AmpPolicy::None)?.with_level(Level::O2)?;
    let mut ratios: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    let mut measure = |over: &Backend, only: &dyn Fn(&str) -> bool| -> Result<()> {
        for n in networks::all()? {
            let session = Session::new(over, n.graph);
            let input = std::slice::from_ref(&n.input);
            let found = receipts::measure(&session, input, EFFORT, |without| match without {
                None => over.with_level(Level::O0),
                Some(name) => over.with_transformation_off(name),
            })?;
            // `found.with` has the bursts with the transformation, in the order of the gains.
            let mut with = &found.with[..];
            for g in &found.gains {
                let (own, after) = with.split_at(g.ratios.len());
                with = after;
                if only(&g.transformation) {
                    let gain = best(&g.without) / best(own).max(1e-12);
                    ratios.entry(g.transformation.clone()).or_default().push(gain);
                }
            }
        }
        Ok(())
    };
    measure(&full, &|_| true)?;
    // Mixed precision is measured only if the device computes in bf16 and is faster in bf16.
    match full.with_amp(AmpPolicy::Bf16) {
        Ok(mixed) if mixed.amp() != AmpPolicy::None => measure(&mixed, &|name| name == passes::MIXED)?,
        Ok(_) => {}
        Err(e) => tracing::debug!(device = backend.id(), error = %e, "mixed precision is not measured"),
    }
    let options = QuantizeOptions { max_error: 0.1, ..QuantizeOptions::default() };
    let o3 = backend.with_amp(AmpPolicy::None)?.with_level(Level::O3)?;
    for n in networks::all()? {
        let input = std::slice::from_ref(&n.input);
        // A network without layers to quantise, or with an error above the bound, is skipped.
        if let Ok(q) = quantize(&o3, &n.graph, &[], &[input.to_vec()], &options)
            && let Some(gain) = q.receipt(&o3, input, EFFORT.pairs)?.gain
        {
            ratios.entry(passes::QUANTIZED.into()).or_default().push(gain);
        }
    }
    let mean = |r: Vec<f64>| (r.iter().map(|x| x.max(1e-12).ln()).sum::<f64>() / r.len() as f64).exp();
    let gains: Gains = ratios.into_iter().map(|(name, r)| (name, mean(r))).collect();
    tracing::debug!(device = backend.id(), elapsed = ?start.elapsed(), ?gains, "measured speed-ups");
    Ok(gains)
}
