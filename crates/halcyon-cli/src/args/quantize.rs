//! Arguments of level O3, and of `halcyon optimize`.

use super::{BackendArgs, InputArgs};
use clap::Args;
use halcyon::quantize::{Activations, QuantizeOptions, WeightType, WiderType};
use halcyon::{Error, Result};
use halcyon_formats::onnx::export::ExportOptions;
use std::path::PathBuf;

/// How a model is quantised.
#[derive(Args, Debug, Clone, Default)]
pub(crate) struct QuantizeArgs {
    /// Bound of the error at O3: the largest difference from O0, divided by the standard deviation of O0's
    /// output [default: 1e-2]
    ///
    /// Layers return to a wider type (--wider-type) until the error is within the bound. If no layer can be
    /// quantised within it, the run is refused (exit code 3) with the measured error.
    #[arg(long, value_name = "ERROR", hide_short_help = true)]
    pub max_error: Option<f64>,
    /// Samples for the ranges of activations at O3: a folder (each file is a sample: .npz, .npy, image,
    /// .txt), an .npz with an array for each input, or a .txt with a line of text for each sample. Without
    /// it, ranges are computed in each run
    ///
    /// If an array of an .npz has one axis more than the input, each index of its first axis is a sample. If
    /// the input's first dimension is 1 or open, each row is a sample. The error is measured on the inputs of
    /// the run, if there is one set of them (`run`) or --input is given (`optimize`). Otherwise a quarter of
    /// the samples (at least one, if there are two) measures the error and is not used for calibration. If
    /// activations have no ranges (weights of 4 bits or bf16, dynamic ranges), all samples measure the error.
    #[arg(long, value_name = "DIR|FILE", hide_short_help = true)]
    pub calibrate: Option<PathBuf>,
    /// Type of weights at O3: int8, int16, bf16, int4, int4min (4 bits with a minimum for each 32 weights) or
    /// f8 (on devices with f8 products) [default: int8]
    #[arg(long, value_name = "TYPE", hide_short_help = true)]
    pub weights: Option<String>,
    /// Type of the layers that would exceed the bound: auto, f32, int16 or bf16. `auto` is the type of 16
    /// bits whose products are faster than those of f32 on the device, or f32 [default: auto]
    #[arg(long, value_name = "TYPE", hide_short_help = true)]
    pub wider_type: Option<String>,
    /// Ranges of activations at O3: dynamic (computed in each run), minmax, or percentile:P, which leaves out
    /// the values beyond percentile P of each sample. Not for weights of 4 bits or bf16 [default: minmax with
    /// --calibrate, else dynamic]
    #[arg(long, value_name = "HOW", hide_short_help = true)]
    pub activations: Option<String>,
}

impl QuantizeArgs {
    /// The name of the first of these options that was given.
    fn given(&self) -> Option<&'static str> {
        [
            (self.max_error.is_some(), "--max-error"),
            (self.calibrate.is_some(), "--calibrate"),
            (self.weights.is_some(), "--weights"),
            (self.wider_type.is_some(), "--wider-type"),
            (self.activations.is_some(), "--activations"),
        ]
        .into_iter()
        .find_map(|(given, name)| given.then_some(name))
    }

    /// Rejects options of O3 at another level.
    pub(crate) fn only_at_o3(&self) -> Result<()> {
        match self.given() {
            Some(name) => Err(Error::argument(name, "it has an effect only at level O3; add --level O3")),
            None => Ok(()),
        }
    }

    /// The options, after checking them.
    pub(crate) fn options(&self) -> Result<QuantizeOptions> {
        let default = QuantizeOptions::default();
        let weights: Option<WeightType> = self.weights.as_deref().map(str::parse).transpose()?;
        let wider_type: Option<WiderType> = self.wider_type.as_deref().map(str::parse).transpose()?;
        let (weights, activations) = (weights.unwrap_or_default(), self.activations()?);
        if weights.keeps_activations() && activations != Activations::Auto {
            let what =
                format!("it has no effect with --weights {weights}: activations stay floats; leave it out");
            return Err(Error::argument("--activations", what));
        }
        Ok(QuantizeOptions {
            weights,
            wider_type: wider_type.unwrap_or_default(),
            activations,
            max_error: self.max_error.unwrap_or(default.max_error),
            ..default
        })
    }

    fn activations(&self) -> Result<Activations> {
        let Some(text) = self.activations.as_deref() else { return Ok(Activations::Auto) };
        match text.split_once(':') {
            None if text == "dynamic" => Ok(Activations::Dynamic),
            None if text == "minmax" => Ok(Activations::MinMax),
            Some(("percentile", p)) => p.parse().map(Activations::Percentile).map_err(|_| {
                Error::argument("--activations", format!("\"{p}\" is not a number; write percentile:99.9"))
            }),
            _ => Err(Error::argument(
                "--activations",
                format!("\"{text}\" is not one of dynamic, minmax and percentile:P"),
            )),
        }
    }
}

#[derive(Args, Debug)]
#[command(after_help = OPTIMIZE)]
pub(crate) struct OptimizeArgs {
    /// ONNX model. Its external data is read from the same folder
    pub model: PathBuf,
    /// File to write. It may be the model itself
    #[arg(long, short = 'o', value_name = "FILE")]
    pub output: PathBuf,
    #[command(flatten)]
    pub quantize: QuantizeArgs,
    #[command(flatten)]
    pub input: InputArgs,
    #[command(flatten)]
    pub backend: BackendArgs,
    /// Version of the operator set
    #[arg(long, value_name = "N", default_value_t = ExportOptions::default().opset)]
    pub opset: i64,
    /// Writes the weights to a file beside the model. Above 2 GiB, this is always done
    #[arg(long)]
    pub external_data: bool,
    /// Measures how much faster the written model is on the device
    #[arg(long)]
    pub receipts: bool,
    /// Prints one JSON object
    #[arg(long)]
    pub json: bool,
}

const OPTIMIZE: &str = "\
Quantises the model's products and convolutions and writes it with QuantizeLinear and DequantizeLinear, or with MatMulNBits of \
onnxruntime for weights of 4 bits. Other engines can load the written model. The error is measured on the device with samples that are not \
used for calibration: a part of --calibrate, or the inputs given with --input.

Examples:
  halcyon optimize models/digits.onnx -o q8.onnx -i ones --max-error 0.5";
