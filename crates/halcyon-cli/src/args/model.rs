//! Arguments of the commands that inspect a model without running it.

use super::{BackendArgs, InputArgs};
#[cfg(feature = "language")]
use super::{HubArgs, LanguageFitArgs};
use clap::Args;
use halcyon_formats::onnx::export::ExportOptions;
use std::path::PathBuf;

/// More than one device for one model.
#[derive(Args, Debug, Clone)]
pub(crate) struct SplitArgs {
    /// Splits the model by layers over several devices. DEVICES is a list of NAME[:NUMBER][=SHARE], separated
    /// by commas, in the order of the layers; SHARE is the device's part of the work (default 1)
    #[arg(long, value_name = "DEVICES", conflicts_with_all = ["backend", "device", "backends", "fallback"])]
    pub split: Option<String>,
    /// Lets ops for which the device has no kernel run on the CPU, up to this share of the model's FLOPs
    #[arg(long, value_name = "PERCENT", conflicts_with = "split")]
    pub may_leave: Option<f64>,
}

#[derive(Args, Debug)]
#[command(after_help = SELECT)]
pub(crate) struct SelectArgs {
    /// ONNX model. Its external data is read from the same folder
    pub model: PathBuf,
    #[command(flatten)]
    pub input: InputArgs,
    #[command(flatten)]
    pub backend: BackendArgs,
    #[command(flatten)]
    pub split: SplitArgs,
    /// Prints one JSON object, with every op and its device
    #[arg(long)]
    pub json: bool,
}

const SELECT: &str = "\
Each device that is considered is opened and the model is planned for it. A device with too little memory is rejected, and the \
report gives the missing amount. -v shows the whole reason for each device. Only the shapes of inputs matter, so inputs that are \
not given are random, with size 1 where the model leaves a size open. The times of copies are estimated from copies that the \
command measures.

Examples:
  halcyon select models/digits.onnx
  halcyon select models/digits.onnx --input random:8x1x8x8 --backends opencl,cpu
  halcyon select models/digits.onnx --split cpu=0.7,cpu=0.3 --json";

#[derive(Args, Debug)]
#[command(after_help = TRACE)]
pub(crate) struct TraceArgs {
    /// ONNX model
    pub model: PathBuf,
    #[command(flatten)]
    pub input: InputArgs,
    #[command(flatten)]
    pub backend: BackendArgs,
    /// Prints one JSON object
    #[arg(long)]
    pub json: bool,
}

const TRACE: &str = "\
Inputs that are not given are filled as by `random`; dimensions that the model leaves open get size 1.

Examples:
  halcyon trace models/digits.onnx
  halcyon trace models/digits.onnx --level O0 --json";

#[derive(Args, Debug, Clone)]
#[command(after_help = INSPECT)]
pub(crate) struct InspectArgs {
    /// ONNX model, or a file of tensors: GGUF, safetensors, .npz, .npy or ONNX .pb; or the name of a language
    /// model (hf:ORG/REPO), if it is one file
    pub file: PathBuf,
    #[cfg(feature = "language")]
    #[command(flatten)]
    pub hub: HubArgs,
    /// Size of an input whose dimensions the model leaves open: [NAME=]1x3x224x224. If shapes depend on the
    /// input's value, give a source as in `halcyon run`. Open sizes that are not given are 1
    #[arg(long = "input", short = 'i', value_name = "[NAME=]SHAPE")]
    pub inputs: Vec<String>,
    /// Only this backend. Default: every backend of this machine
    #[arg(long, value_name = "NAME")]
    pub backend: Option<String>,
    /// Level of the plans: O0, O1 or O2
    #[arg(long, value_name = "LEVEL", default_value = "O2")]
    pub level: String,
    /// Type of products and convolutions at O2: f32, bf16 or f16
    #[arg(long, value_name = "TYPE")]
    pub precision: Option<String>,
    /// Plans products and convolutions with --precision even where that is slower (see `halcyon run --help`)
    #[arg(long, requires = "precision")]
    pub force_precision: bool,
    /// How many of the largest tensors to list
    #[arg(long, value_name = "N", default_value_t = 10)]
    pub top: usize,
    /// Prints one JSON object
    #[arg(long)]
    pub json: bool,
}

const INSPECT: &str = "\
FLOPs count a multiply-add as two. Bytes moved are those of each op by itself, which reads its operands and writes its result; \
a backend's plan fuses ops and moves fewer. The exit code is 0 also for a model with unsupported operators, which the report names.

Examples:
  halcyon inspect models/digits.onnx
  halcyon inspect models/digits.onnx --input image=32x1x8x8 --backend cpu
  halcyon inspect models/digits.npz --top 50 --json
  halcyon inspect model-q4_k.gguf";

#[derive(Args, Debug)]
#[command(after_help = FIT)]
pub(crate) struct FitArgs {
    /// ONNX model (its external data is read from the same folder), GGUF file, folder of a language model,
    /// or its name (hf:ORG/REPO)
    pub model: PathBuf,
    #[command(flatten)]
    pub input: InputArgs,
    /// Size of the batch. The batch is the first dimension of an input, if the model leaves it open, and
    /// every other dimension of the same name; of a language model, the number of sequences
    #[arg(
        long,
        visible_alias = "parallel",
        value_name = "N",
        value_parser = clap::value_parser!(u64).range(1..=1 << 31)
    )]
    pub batch: Option<u64>,
    #[cfg(feature = "language")]
    #[command(flatten)]
    pub language: LanguageFitArgs,
    /// Computes the memory of training instead of running: parameters, gradients, the state of Adam, and
    /// activations (all kept, or computed again in part)
    #[arg(long)]
    pub train: bool,
    #[command(flatten)]
    pub backend: BackendArgs,
    /// Prints one JSON object
    #[arg(long)]
    pub json: bool,
}

const FIT: &str = "\
The figures come from the plan, before a weight is uploaded or scratch is allocated. Inputs are as in `halcyon run`, or a shape \
alone (NAME=8x3x224x224); those that are not given have the declared sizes, with 1 for open ones. The exit code is 5 if the model \
does not fit, else 0 (also for a model that runs in stages, for which this is not known). `halcyon run --json` reports the measured \
figures under \"memory\". The figures of `fit` are exact for the \
device; for anonymous memory they leave out scratch that kernels of the CPU keep for themselves (some MiB).

For a language model the figures are those of a prompt of at least one chunk and of single tokens after it; shorter prompts take \
less. `halcyon generate --json` reports the measured figures.

With --train every float initialiser with more than one element is a parameter, and the loss is the sum of the means of the float \
outputs. Activations can be computed again for the gradients, part by part of the forward, which takes up to a third more time. The \
report has the number of parts that needs the least memory.

Examples:
  halcyon fit models/digits.onnx --batch 1000
  halcyon fit models/digits.onnx --input image=64x1x8x8 --backend cpu --json
  halcyon fit models/digits.onnx --train --batch 64
  halcyon fit models/digits.onnx --memory-limit 2G
  halcyon fit tiny.gguf --context 256 --kv-dtype f32";

#[derive(Args, Debug)]
#[command(after_help = EXPORT)]
pub(crate) struct ExportArgs {
    /// ONNX model
    pub model: PathBuf,
    /// File to write, or - for standard output. It may be the model itself. Links are followed; devices and
    /// pipes are written in place
    #[arg(long, short = 'o', value_name = "FILE")]
    pub output: PathBuf,
    /// Fixes the size of an input: [NAME=]1x3x224x224. The sizes of other inputs stay symbolic
    #[arg(long = "input", short = 'i', value_name = "[NAME=]SHAPE")]
    pub inputs: Vec<String>,
    /// Version of the operator set
    #[arg(long, value_name = "N", default_value_t = ExportOptions::default().opset)]
    pub opset: i64,
    /// Writes the weights to a file beside the model. Above 2 GiB, this is always done
    #[arg(long)]
    pub external_data: bool,
    /// Prints one JSON object
    #[arg(long)]
    pub json: bool,
}

const EXPORT: &str = "\
Constants are folded where that does not grow the model, common parts are merged, and operators without effect are removed. \
Functions, and control flow that constants decide, do not appear in the written model. If the written model is larger than the \
original, the report says what grew. A model whose structure depends on computed values is not a single graph and is refused \
(exit code 3).

Examples:
  halcyon export models/digits.onnx -o smaller.onnx
  halcyon export models/digits.onnx -o fixed.onnx --input 1x1x8x8 --opset 20";
