//! Level O3: products and convolutions with quantised weights, in 8 bits by default.
//!
//! [`quantize`] rewrites a graph. A product or convolution with constant weights is called a layer. With the
//! default type of weights, each layer becomes a product or convolution of integers: the weights are rounded
//! to i8 with one scale per output channel, and the activations are rounded to bytes with a scale that comes
//! from calibration samples or is computed in each run. The rewritten graph is an ordinary graph and runs on
//! every backend. A device with kernels for byte products uses them.
//!
//! The error of the rewritten graph is measured on samples that should not be among the calibration samples.
//! If the error exceeds the caller's bound, the layers with the largest errors of their own get a wider type
//! ([`WiderType`]), so many that the bound is met. If no layer can be quantised within the bound, an `Error`
//! with the measured error is returned.
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
use crate::backend::options::bf16_is_faster;
use crate::receipts::{Effort, compare, median};
use crate::session::Session;
use halcyon_hal::BackendType;
use halcyon_ir::composite::CompositeKind;
use halcyon_ir::error::{Error, Result};
use halcyon_ir::layout::View;
use halcyon_ir::passes::bytes::operation;
use halcyon_ir::passes::{Level, QUANTIZED, cse, fold, simplify};
use halcyon_ir::plan::Receipt;
use halcyon_ir::target::{LibraryCall, Operand, Work};
use halcyon_ir::{ConstData, DType, Graph, Op, Shape};
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
    /// i16 with one scale per output channel; activations are i16 too. Weights have about 12 bits and
    /// activations about 14, so that the sums fit in 32 bits. Only for products.
    Int16,
    /// bf16, for weights and activations.
    Bf16,
    /// 4 bits with one scale per block of 32 weights; activations stay in f32. Only for products.
    Int4,
    /// Like [`WeightType::Int4`], with an additional minimum per block of 32 weights. More accurate if the
    /// weights of a block are not centred on 0.
    Int4Min,
    /// f8e4m3fn, for weights and activations. Only for products, and only on a device with products of this
    /// type.
    F8,
}

impl WeightType {
    /// Every type.
    pub const ALL: &'static [WeightType] = &[
        WeightType::Int8,
        WeightType::Int16,
        WeightType::Bf16,
        WeightType::Int4,
        WeightType::Int4Min,
        WeightType::F8,
    ];

    /// Whether activations stay floats (f32 or bf16), so that nothing depends on their ranges.
    pub fn keeps_activations(self) -> bool {
        matches!(self, WeightType::Int4 | WeightType::Int4Min | WeightType::Bf16)
    }

    /// The name, as [`FromStr`] reads it.
    pub fn name(self) -> &'static str {
        match self {
            WeightType::Int8 => "int8",
            WeightType::Int16 => "int16",
            WeightType::Bf16 => "bf16",
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

/// The source of the scales of activations. With weights of 4 bits or in bf16, activations have no scales:
/// only `Auto` is valid, and calibration samples are an error.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Activations {
    /// [`Activations::MinMax`] if there are calibration samples, otherwise [`Activations::Dynamic`].
    #[default]
    Auto,
    /// The scales are computed in each run: one scale per row of a product's operand, and one scale for the
    /// whole operand of a convolution or of a product in f8.
    Dynamic,
    /// One scale per tensor, from the least and the largest value over all calibration samples.
    MinMax,
    /// Like `MinMax`, but in each sample, values beyond this percentile are ignored. In a run, such values
    /// saturate. The percentile is at least 50; 100 is the same as `MinMax`.
    Percentile(f64),
}

/// The wider type: the type of those layers that cannot have the type [`QuantizeOptions::weights`] without
/// exceeding the bound of the error.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WiderType {
    /// The type of 16 bits whose products are faster than those of f32 on the device: bf16, else int16, else
    /// f32. With weights of 16 bits: f32.
    #[default]
    Auto,
    /// f32: these layers are not quantised.
    F32,
    /// [`WeightType::Int16`] for products, f32 for convolutions.
    Int16,
    /// [`WeightType::Bf16`].
    Bf16,
}

impl WiderType {
    /// Every choice.
    pub const ALL: &'static [WiderType] =
        &[WiderType::Auto, WiderType::F32, WiderType::Int16, WiderType::Bf16];

    /// The name, as [`FromStr`] reads it.
    pub fn name(self) -> &'static str {
        ["auto", "f32", "int16", "bf16"][self as usize]
    }

    /// The type of weights. `None` for f32 and for a choice that is not made yet.
    fn weights(self) -> Option<WeightType> {
        match self {
            WiderType::Auto | WiderType::F32 => None,
            WiderType::Int16 => Some(WeightType::Int16),
            WiderType::Bf16 => Some(WeightType::Bf16),
        }
    }
}

impl fmt::Display for WiderType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for WiderType {
    type Err = Error;
    fn from_str(s: &str) -> Result<WiderType> {
        let known = WiderType::ALL.iter().find(|w| w.name() == s.trim().to_ascii_lowercase());
        known.copied().ok_or_else(|| {
            let names: Vec<&str> = WiderType::ALL.iter().map(|w| w.name()).collect();
            Error::argument("wider type", format!("\"{s}\" is not one of {}", names.join(", ")))
        })
    }
}

/// Options of [`quantize`].
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct QuantizeOptions {
    /// The type of the weights.
    pub weights: WeightType,
    /// The source of the scales of activations.
    pub activations: Activations,
    /// The bound of the error. The error is the largest difference from O0, divided by the standard deviation
    /// of O0's output ([`error`]).
    pub max_error: f64,
    /// Bits of the i8 weights of convolutions: 7 or 8. `None` means 7 on a CPU whose convolutions of bytes
    /// add pairs with saturation (AVX2 or AVX-512 without VNNI), where 7-bit weights are faster, and 8 on
    /// every other device. The i8 weights of products always have 8 bits.
    pub weight_bits: Option<u32>,
    /// The type of those layers that cannot have the type `weights` without exceeding the bound.
    pub wider_type: WiderType,
}

impl Default for QuantizeOptions {
    /// int8 weights and an error bound of 1e-2.
    fn default() -> QuantizeOptions {
        QuantizeOptions {
            weights: WeightType::Int8,
            activations: Activations::Auto,
            max_error: 1e-2,
            weight_bits: None,
            wider_type: WiderType::Auto,
        }
    }
}

/// A quantised graph.
#[derive(Clone, Debug)]
pub struct Quantized {
    /// The rewritten graph. Its inputs and outputs are those of the original.
    pub graph: Graph,
    /// The report: which layers were quantised, and the measured error.
    pub report: QuantizeReport,
    /// The original graph. [`Quantized::receipt`] compares its time with the quantised graph's.
    original: Graph,
}

/// The bits of the i8 weights of convolutions that are fastest on the device.
fn weight_bits(backend: &Backend) -> u32 {
    // Without the CPU backend, no device needs 7 bits.
    #[cfg(feature = "cpu")]
    let saturates = halcyon_hal::cpu::saturates_bytes();
    #[cfg(not(feature = "cpu"))]
    let saturates = false;
    if saturates && backend.info().backend == BackendType::Cpu { 7 } else { 8 }
}

/// The type of 16 bits that is faster than f32 on the device.
fn wider_type(backend: &Backend) -> WiderType {
    if bf16_is_faster(&**backend.device()) {
        return WiderType::Bf16;
    }
    if multiplies(backend, DType::I16) { WiderType::Int16 } else { WiderType::F32 }
}

/// Whether the device has a kernel for products of these integers.
fn multiplies(backend: &Backend, d: DType) -> bool {
    // A product of any size.
    let (m, n, k) = (64, 64, 64);
    let operands = [[m, k], [n, k]].map(|s| Operand { dtype: d, view: View::dense(&s) });
    let out = [Operand { dtype: DType::I32, view: View::dense(&[m, n]) }];
    let shapes = [[m, k], [n, k]].map(Shape::from);
    operation([d; 2], shapes, false, DType::I32).is_ok_and(|c| {
        let op = Op::Composite(c);
        let call = LibraryCall::new(Work::Op(&op), &operands, &out);
        backend.device().as_target().library(&call).is_ok()
    })
}

fn check(options: &QuantizeOptions) -> Result<()> {
    let bad = |name: &str, what: String| Err(Error::argument(name, what));
    if !(options.max_error > 0.0 && options.max_error.is_finite()) {
        return bad("max_error", format!("{} is not a positive number", options.max_error));
    }
    if let Some(b) = options.weight_bits.filter(|b| !matches!(b, 7 | 8)) {
        return bad("weight_bits", format!("{b}: expected 7 or 8"));
    }
    if options.weight_bits.is_some() && options.weights != WeightType::Int8 {
        let what = format!("it has no effect with {} weights; leave it out", options.weights);
        return bad("weight_bits", what);
    }
    if options.wider_type.weights() == Some(options.weights) {
        let what = format!("{} is the type of the weights; use f32 or auto", options.weights);
        return bad("wider_type", what);
    }
    match options.activations {
        a if options.weights.keeps_activations() && a != Activations::Auto => {
            let what = format!(
                "it has no effect with {} weights: activations stay floats; use Activations::Auto",
                options.weights
            );
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
/// [`Error::Argument`] for options or calibration samples that are out of range or without effect, without
/// samples, for calibrated activations without calibration samples, and for a graph in which nothing can be
/// quantised;
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
        return Err(Error::argument("samples", "none given; the error is measured on at least one sample"));
    }
    let mut options = options.clone();
    if options.activations == Activations::Auto && !options.weights.keeps_activations() {
        let none = calibration.is_empty();
        options.activations = if none { Activations::Dynamic } else { Activations::MinMax };
    }
    let ranges = matches!(options.activations, Activations::MinMax | Activations::Percentile(_));
    if !calibration.is_empty() && !ranges {
        let what = "they have no effect: activations stay floats or get new scales in each run; pass none";
        return Err(Error::argument("calibration", what));
    }
    let bits = options.weight_bits.unwrap_or_else(|| weight_bits(backend));
    options.weight_bits = (options.weights == WeightType::Int8).then_some(bits);
    if options.wider_type == WiderType::Auto {
        // Neither type of 16 bits is wider than the other.
        let wide = matches!(options.weights, WeightType::Int16 | WeightType::Bf16);
        options.wider_type = if wide { WiderType::F32 } else { wider_type(backend) };
    }
    let original = prepared(graph)?;
    if backend.lower_options().passes.without.contains(QUANTIZED) {
        let report = QuantizeReport::off(options);
        return Ok(Quantized { graph: original.clone(), report, original });
    }
    let reference = at_level_zero(backend);
    let found = layers::find(&original);
    let weights = options.weights;
    if found.iter().all(|l| l.quantizable(weights).is_err()) {
        let what = match found.first() {
            None => "the model has no product or convolution with constant weights".to_string(),
            Some(l) => match l.quantizable(weights) {
                Err(why) => {
                    format!("none of {} layers can be in {weights}; {}: {why}", found.len(), l.name)
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

/// The graph after folding, simplification and removal of common subexpressions. Afterwards weights that a
/// constant expression computes are constants too.
fn prepared(graph: &Graph) -> Result<Graph> {
    let (g, _) = fold::run_lean(graph)?;
    let (g, _) = simplify::run(&g)?;
    Ok(cse::run(&g)?.0)
}

/// A handle on the backend's device at level O0.
fn at_level_zero(backend: &Backend) -> Backend {
    Backend::from_device(backend.device().clone(), backend.selection().clone(), Level::O0)
}

impl Quantized {
    /// Whether any layer is quantised.
    pub fn changed(&self) -> bool {
        self.report.quantized() > 0
    }

    /// The receipt of the quantisation on these inputs. It has the time of the original graph divided by the
    /// time of the quantised graph (the median of at least `n` pairs of bursts), and the report's error.
    ///
    /// # Errors
    /// The errors of [`Session::run`].
    pub fn receipt(&self, backend: &Backend, inputs: &[ConstData], n: usize) -> Result<Receipt> {
        let (ours, theirs) =
            (Session::new(backend, self.graph.clone()), Session::new(backend, self.original.clone()));
        let ratios = compare(&ours, &theirs, inputs, Effort { pairs: n, ..Effort::default() })?;
        Ok(Receipt { gain: Some(median(&ratios)), ..self.plain_receipt() })
    }

    /// The types of quantised layers that run in f32 on dequantised weights, because the plan for these
    /// inputs has no kernel for these types. Either the device has no such kernel, or a transformation is
    /// switched off.
    ///
    /// # Errors
    /// Errors of planning.
    pub fn types_without_kernels(&self, backend: &Backend, inputs: &[ConstData]) -> Result<Vec<WeightType>> {
        let exe = Session::new(backend, self.graph.clone()).prepare(inputs)?;
        let plan = exe.plan();
        let runs = |kinds: &[CompositeKind]| {
            let names: Vec<String> = kinds.iter().map(ToString::to_string).collect();
            plan.steps.iter().any(|s| names.iter().any(|n| s.op.starts_with(n.as_str())))
        };
        // A convolution in a blocked layout computes in bytes if its packed weights are bytes.
        let packed_bytes = plan.packed.iter().any(|p| !p.data.dtype.is_float());
        let has_kernel = |t: &WeightType| match t {
            WeightType::Int8 | WeightType::F8 => {
                runs(&[CompositeKind::ByteMatmul, CompositeKind::ByteConv])
                    || packed_bytes && runs(&[CompositeKind::BlockedConv])
            }
            // A byte product in the plan may also belong to an int8 layer, so check as well that the device
            // multiplies i16.
            WeightType::Int16 => runs(&[CompositeKind::ByteMatmul]) && multiplies(backend, DType::I16),
            WeightType::Int4 | WeightType::Int4Min => runs(&[CompositeKind::QuantizedMatmul]),
            WeightType::Bf16 => bf16_is_faster(&**backend.device()),
        };
        let used = |t: &&WeightType| self.report.of_type(**t) > 0;
        Ok(WeightType::ALL.iter().filter(used).filter(|t| !has_kernel(t)).copied().collect())
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
