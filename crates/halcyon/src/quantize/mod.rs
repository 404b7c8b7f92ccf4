//! Level O3: products and convolutions in 8 bits, or with weights of 4 bits.
//!
//! [`quantize`] rewrites a graph. Each product or convolution whose weights are a constant (a layer) becomes
//! one of integers: the weights are rounded to i8 with one scale for each output channel, and the
//! activations to bytes with a scale that comes from calibration samples or is computed in each run. The
//! rewritten graph is an ordinary graph. It runs on every backend; a device that multiplies bytes does so.
//!
//! The error of the rewritten graph is measured on samples that were not used for calibration. If it exceeds
//! the caller's bound, the layers that contribute most return to f32, one after the other, until the bound is
//! met. If no layer can be quantised within the bound, the result is an error with the measured error.
//!
//! ```
//! use halcyon::quantize::{QuantizeOptions, quantize};
//! use halcyon::{Backend, ConstData, DType, Session, Shape};
//! use halcyon::ir::{Graph, TensorType};
//! # fn main() -> halcyon::Result<()> {
//! let backend = Backend::cpu()?;
//! let mut g = Graph::new();
//! let x = g.input("x", TensorType::new(DType::F32, [4usize, 64]));
//! let weights: Vec<f32> = (0..64 * 32).map(|i| ((i * 37 % 101) as f32 - 50.0) / 100.0).collect();
//! let w = g.constant(ConstData::from_slice(&[64, 32], &weights)?);
//! let y = g.matmul(x, w)?;
//! g.output("y", y);
//! let sample = |seed: usize| -> halcyon::Result<Vec<ConstData>> {
//!     let values: Vec<f32> = (0..256).map(|i| ((i * 13 + seed) % 17) as f32 / 17.0).collect();
//!     Ok(vec![ConstData::from_slice(&[4, 64], &values)?])
//! };
//! let options = QuantizeOptions { max_error: 5e-2, ..QuantizeOptions::default() };
//! let q = quantize(&backend, &g, &[sample(1)?], &[sample(2)?], &options)?;
//! assert!(q.report.error <= 5e-2);
//! let y = Session::new(&backend, q.graph).run(&sample(3)?)?;
//! assert_eq!(y[0].dims[..], [4, 32]);
//! # Ok(())
//! # }
//! ```

mod calibrate;
mod layers;
mod report;
mod rewrite;
mod search;
mod weights;

use crate::backend::Backend;
use crate::receipts::{Effort, compare, median};
use crate::session::Session;
use halcyon_hal::BackendType;
use halcyon_ir::error::{Error, Result};
use halcyon_ir::passes::{Level, QUANTIZED, cse, fold, simplify};
use halcyon_ir::plan::Receipt;
use halcyon_ir::{ConstData, Graph};
pub use report::{LayerReport, QuantizeReport};
pub use search::error;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// The type of quantised weights.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WeightType {
    /// i8 with one scale per output channel; activations are bytes too.
    #[default]
    Int8,
    /// 4 bits with one scale for each 32 weights; activations stay f32. Products only.
    Int4,
    /// [`WeightType::Int4`] with a minimum for each 32 weights. More accurate where the weights of a block
    /// are not centred on 0.
    Int4Min,
    /// f8e4m3fn, for weights and activations. Products only, and only on a device that multiplies it.
    F8,
}

impl WeightType {
    /// Every type.
    pub const ALL: &'static [WeightType] =
        &[WeightType::Int8, WeightType::Int4, WeightType::Int4Min, WeightType::F8];

    /// Whether activations stay f32, so that nothing depends on their ranges.
    pub fn keeps_activations(self) -> bool {
        matches!(self, WeightType::Int4 | WeightType::Int4Min)
    }

    /// The name, as [`FromStr`] reads it.
    pub fn name(self) -> &'static str {
        match self {
            WeightType::Int8 => "int8",
            WeightType::Int4 => "int4",
            WeightType::Int4Min => "int4min",
            WeightType::F8 => "f8",
        }
    }
}

impl fmt::Display for WeightType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for WeightType {
    type Err = Error;
    fn from_str(s: &str) -> Result<WeightType> {
        let known = WeightType::ALL.iter().find(|w| w.name() == s.trim().to_ascii_lowercase());
        known.copied().ok_or_else(|| {
            let names: Vec<&str> = WeightType::ALL.iter().map(|w| w.name()).collect();
            Error::argument("weights", format!("\"{s}\" is not one of {}", names.join(", ")))
        })
    }
}

/// Where the scales of activations come from. With weights of 4 bits activations have no scales: only `Auto`
/// is valid, and calibration samples are not used.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Activations {
    /// [`Activations::MinMax`] if there are calibration samples, else [`Activations::Dynamic`].
    #[default]
    Auto,
    /// Computed in each run: one scale for each row of a product's operand, one for an image.
    Dynamic,
    /// One scale for each tensor: the least and the largest value over all calibration samples.
    MinMax,
    /// As `MinMax`, but in each sample the values beyond this percentile are left out, and saturate. 100 is
    /// `MinMax`; at least 50.
    Percentile(f64),
}

/// Options of [`quantize`].
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct QuantizeOptions {
    /// The type of the weights.
    pub weights: WeightType,
    /// Where the scales of activations come from.
    pub activations: Activations,
    /// Bound of the error: the largest difference from O0 over the standard deviation of O0's output
    /// ([`error`]).
    pub max_error: f64,
    /// Bits of i8 weights: 7 or 8. `None`: 7 on a CPU that multiplies pairs of bytes with saturation (AVX2
    /// without VNNI), where weights of 7 bits are faster; else 8.
    pub weight_bits: Option<u32>,
}

impl Default for QuantizeOptions {
    /// int8, an error of 1e-2.
    fn default() -> QuantizeOptions {
        QuantizeOptions {
            weights: WeightType::Int8,
            activations: Activations::Auto,
            max_error: 1e-2,
            weight_bits: None,
        }
    }
}

/// A quantised graph.
#[derive(Clone, Debug)]
pub struct Quantized {
    /// The rewritten graph. Its inputs and outputs are those of the original.
    pub graph: Graph,
    /// What was quantised, and the measured error.
    pub report: QuantizeReport,
    /// The graph before, which [`Quantized::receipt`] compares with.
    original: Graph,
}

/// The bits of i8 weights that are fastest on the device.
fn weight_bits(backend: &Backend) -> u32 {
    // Without the CPU backend there is no such device.
    #[cfg(feature = "cpu")]
    let saturates = halcyon_hal::cpu::saturates_bytes();
    #[cfg(not(feature = "cpu"))]
    let saturates = false;
    if saturates && backend.info().backend == BackendType::Cpu { 7 } else { 8 }
}

fn check(options: &QuantizeOptions) -> Result<()> {
    let bad = |name: &str, what: String| Err(Error::argument(name, what));
    if !(options.max_error > 0.0 && options.max_error.is_finite()) {
        return bad("max_error", format!("{} is not a positive number", options.max_error));
    }
    if let Some(b) = options.weight_bits.filter(|b| !matches!(b, 7 | 8)) {
        return bad("weight_bits", format!("{b}: expected 7 or 8"));
    }
    match options.activations {
        a if options.weights.keeps_activations() && a != Activations::Auto => {
            let what = format!("it has no effect with {} weights: activations stay f32", options.weights);
            bad("activations", what)
        }
        Activations::Percentile(p) if !(50.0..=100.0).contains(&p) => {
            bad("activations", format!("percentile {p} is outside 50..=100"))
        }
        _ => Ok(()),
    }
}

/// Quantises a graph for `backend`, within [`QuantizeOptions::max_error`]. `calibration` and `samples` hold
/// sets of inputs, each in the order of the graph's inputs. The error is measured on `samples`, which should
/// not be among the calibration samples. The graph may have symbols, and the sets may have different sizes.
///
/// If the backend was built without the transformation [`QUANTIZED`], the graph is returned unchanged.
///
/// # Errors
/// [`Error::Argument`] for options out of range or without effect, without samples, for calibrated
/// activations without calibration samples, and for a graph in which nothing can be quantised;
/// [`Error::Unsupported`] with the measured error if the bound cannot be met, and for f8 on a device that
/// does not multiply it; the errors of [`Session::run`].
pub fn quantize(
    backend: &Backend,
    graph: &Graph,
    calibration: &[Vec<ConstData>],
    samples: &[Vec<ConstData>],
    options: &QuantizeOptions,
) -> Result<Quantized> {
    check(options)?;
    if samples.is_empty() {
        return Err(Error::argument("samples", "none given; the error is measured on at least one"));
    }
    let mut options = options.clone();
    if options.activations == Activations::Auto && !options.weights.keeps_activations() {
        let none = calibration.is_empty();
        options.activations = if none { Activations::Dynamic } else { Activations::MinMax };
    }
    let bits = options.weight_bits.unwrap_or_else(|| weight_bits(backend));
    options.weight_bits = Some(bits);
    let original = prepared(graph)?;
    if backend.lower_options().passes.without.contains(QUANTIZED) {
        let report = QuantizeReport::off(options);
        return Ok(Quantized { graph: original.clone(), report, original });
    }
    let reference = at_level_zero(backend);
    let found = layers::find(&original);
    if found.iter().all(|l| l.quantizable(&options).is_err()) {
        let what = match found.first() {
            None => "the model has no product or convolution with constant weights".to_string(),
            Some(l) => match l.quantizable(&options) {
                Err(why) => {
                    format!("none of {} layers can be in {}; {}: {why}", found.len(), options.weights, l.name)
                }
                Ok(()) => "no layer".to_string(),
            },
        };
        return Err(Error::argument(QUANTIZED, what));
    }
    let ranges = calibrate::ranges(&reference, &original, &found, calibration, &options)?;
    let trial = search::Trial { backend, reference: &reference, original: &original, layers: &found };
    let (graph, report) = trial.search(&ranges, samples, &options)?;
    Ok(Quantized { graph, report, original })
}

/// The graph after the device-independent passes, which remove what would hide constant weights.
fn prepared(graph: &Graph) -> Result<Graph> {
    let (g, _) = fold::run_lean(graph)?;
    let (g, _) = simplify::run(&g)?;
    Ok(cse::run(&g)?.0)
}

/// The backend's device at level O0.
fn at_level_zero(backend: &Backend) -> Backend {
    Backend::from_device(backend.device().clone(), backend.selection().clone(), Level::O0)
}

impl Quantized {
    /// Whether any layer is quantised.
    pub fn changed(&self) -> bool {
        self.report.quantized() > 0
    }

    /// The receipt of the quantisation on these inputs: the time of the original graph over the time of the
    /// quantised one (the median of at least `n` pairs of bursts), and the report's error.
    ///
    /// # Errors
    /// The errors of [`Session::run`].
    pub fn receipt(&self, backend: &Backend, inputs: &[ConstData], n: usize) -> Result<Receipt> {
        let (ours, theirs) =
            (Session::new(backend, self.graph.clone()), Session::new(backend, self.original.clone()));
        let ratios = compare(&ours, &theirs, inputs, Effort { pairs: n, ..Effort::default() })?;
        Ok(Receipt { gain: Some(median(&ratios)), ..self.plain_receipt() })
    }

    /// The receipt without a measured gain.
    pub fn plain_receipt(&self) -> Receipt {
        Receipt {
            error: Some(self.report.error),
            bytes: self.report.bytes_saved(),
            ..Receipt::new(QUANTIZED, self.report.quantized())
        }
    }
}
