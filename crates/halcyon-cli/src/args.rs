//! Arguments, and what several commands share.

mod backend;
mod bench;

pub use backend::*;
pub use bench::*;
use clap::{Args, Parser, Subcommand, ValueEnum};
use halcyon_formats::onnx::export::ExportOptions;
use std::path::PathBuf;

#[derive(Parser, Debug)]
#[command(name = "halcyon", version, about = "Runs machine-learning models on the hardware that is there", after_help = TOP)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

const TOP: &str = "\
Exit codes: 0 done, 1 error, 2 usage, 3 not supported, 4 backend not available, 5 out of memory, 6 a result differs from the reference.
Environment: HALCYON_LOG=info prints log lines to stderr. HALCYON_CACHE=off keeps nothing on disk between runs, programs
keeps no packed weights, packed keeps them even where packing again is faster. HALCYON_PRECISION is the default of --precision,
HALCYON_BACKENDS of --backends. HALCYON_CONFIG names the configuration file (off for none).

Examples:
  halcyon run models/digits.onnx --input models/digit-7.png --top-k 3
  halcyon devices
  halcyon inspect models/digits.onnx
  halcyon trace models/digits.onnx
  halcyon bench model models/digits.onnx";

#[derive(Subcommand, Debug)]
pub enum Command {
    /// Runs an ONNX model
    Run(RunArgs),
    /// Says what a model holds, costs and would run on, without running it
    Inspect(InspectArgs),
    /// Says what memory a model takes, whether it fits and up to which batch, without loading it
    Fit(FitArgs),
    /// Says which device a model would run on and why, what it needs there, and which op would run where
    Select(SelectArgs),
    /// Writes an ONNX model as Halcyon understood it: checked, folded and simplified
    Export(ExportArgs),
    /// Lists backends with their devices, or the reason they have none
    Devices(DevicesArgs),
    /// Examines each backend in a process of its own: library, devices, a kernel, copies, a product; each step passes or fails
    Doctor(DoctorArgs),
    /// Compares results with what they should be: of every op on this machine, or of a folder of models
    Conformance(ConformanceArgs),
    /// Runs again what went wrong, from the file that `run --verify` or `run --save-replay` wrote
    Replay(ReplayArgs),
    /// Measures which kernels are fastest on a device, and keeps what it finds
    Tune(TuneArgs),
    /// Shows a model's graph, what the passes did, the chosen kernels, their source and the times
    Trace(TraceArgs),
    /// Measures the machine, single works, or a model, and compares with an earlier report
    Bench(BenchArgs),
    /// Probes a driver and prints what it found as JSON
    #[command(name = "__probe", hide = true)]
    Probe(ProbeArgs),
    /// Examines a backend in this process and prints an event a line
    #[command(name = "__doctor", hide = true)]
    DoctorChild(ProbeArgs),
    /// Tunes in this process and prints an event a line
    #[command(name = "__tune", hide = true)]
    TuneChild(TuneArgs),
}

/// What the model is given.
#[derive(Args, Debug, Clone)]
pub struct InputArgs {
    /// [NAME=]SOURCE: an .npy, .npz or ONNX .pb file, a PNG or JPEG image, or random|zeros|ones[:SHAPE] (1x3x8x8);
    /// without a NAME, inputs are taken in the model's order. Types NumPy lacks come as f32 (bf16, f8..., f4...), i8 (i4, i2)
    /// or u8 (u4, u2). Strings come as JSON (nested arrays), as text with one on each line, or as .npy; maps as JSON objects
    #[arg(long = "input", short = 'i', value_name = "[NAME=]SOURCE")]
    pub inputs: Vec<String>,
    /// Start of the random numbers for `random`
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    /// Size an image is brought to, instead of the model's
    #[arg(long, value_name = "WxH")]
    pub image_size: Option<String>,
    /// Subtracted from an image's values, which are in 0..1: one number, or one per channel
    #[arg(long, value_name = "A[,B,C]", value_delimiter = ',', allow_hyphen_values = true)]
    pub image_mean: Vec<f64>,
    /// What an image's values are divided by after that: one number, or one per channel
    #[arg(long, value_name = "A[,B,C]", value_delimiter = ',')]
    pub image_std: Vec<f64>,
    /// Order of an image's axes, instead of the one that the model's shape suggests
    #[arg(long, value_name = "ORDER")]
    pub image_layout: Option<ImageLayout>,
}

#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageLayout {
    Nchw,
    Nhwc,
}

#[derive(Args, Debug)]
#[command(after_help = RUN)]
pub struct RunArgs {
    /// ONNX model; external data is looked for beside it
    pub model: PathBuf,
    #[command(flatten)]
    pub input: InputArgs,
    #[command(flatten)]
    pub backend: BackendArgs,
    #[command(flatten)]
    pub split: SplitArgs,
    /// Saves every output there as NAME.npy (characters other than letters, digits and ._- become _); types NumPy lacks are saved
    /// as f32, i8 or u8, which a note says
    #[arg(long, value_name = "DIR")]
    pub output_dir: Option<PathBuf>,
    /// Prints the N largest values of every row of the first output
    #[arg(long, value_name = "N")]
    pub top_k: Option<usize>,
    /// Names of the classes for --top-k, one a line
    #[arg(long, value_name = "FILE", requires = "top_k")]
    pub labels: Option<PathBuf>,
    /// Runs N times and reports the median, minimum and maximum
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub repeat: u32,
    /// Measures what each transformation gained and how far the result is from level O0
    #[arg(long, conflicts_with_all = ["split", "may_leave"])]
    pub receipts: bool,
    /// Runs once more and checks a share of the plan's steps on another backend at level O0: BACKEND[:SHARE], as cpu:1% or cpu (all).
    /// Exit code 6 at the first that differs, which is left in a replay file
    #[arg(long, value_name = "BACKEND[:SHARE]", conflicts_with_all = ["split", "may_leave"])]
    pub verify: Option<String>,
    /// Draws the steps of --verify as the run that printed this seed did
    #[arg(long, value_name = "N", requires = "verify")]
    pub verify_seed: Option<u64>,
    /// File for what fails or differs, for `halcyon replay` (without it --verify writes MODEL.replay here)
    #[arg(long, value_name = "FILE", conflicts_with_all = ["split", "may_leave"])]
    pub save_replay: Option<PathBuf>,
    /// Prints one JSON object
    #[arg(long)]
    pub json: bool,
}

const RUN: &str = "\
Images: values are scaled to 0..1, then (x - mean) / std. Grey or colour follows the model's channels, the size its shape.
random: floats uniform in 0..1, integers uniform in 0..9, bool either; the same for the same --seed.

Examples:
  halcyon run models/digits.onnx --input models/digit-7.png --top-k 3 --labels models/digits-labels.txt
  halcyon run model.onnx --input image=photo.jpg --image-mean 0.485,0.456,0.406 --image-std 0.229,0.224,0.225
  halcyon run encoder.onnx --input ids=ids.npy --input mask=ones --output-dir out
  halcyon run model.onnx --input random:1x3x224x224 --backend opencl --level O1 --repeat 20 --receipts
  halcyon run model.onnx --input ids=ids.npy --backend opencl --verify cpu:5%";

/// More than one device for one model.
#[derive(Args, Debug, Clone)]
pub struct SplitArgs {
    /// Splits the model by layers over devices, in this order: NAME[:NUMBER][=SHARE] with commas between, where SHARE is the part
    /// of the work (1 without one)
    #[arg(long, value_name = "DEVICES", conflicts_with_all = ["backend", "device", "backends", "fallback"])]
    pub split: Option<String>,
    /// Ops that the device has no kernel for may run on the CPU, as long as they are at most so many percent of the FLOPs
    #[arg(long, value_name = "PERCENT", conflicts_with = "split")]
    pub may_leave: Option<f64>,
}

#[derive(Args, Debug)]
#[command(after_help = SELECT)]
pub struct SelectArgs {
    /// ONNX model; external data is looked for beside it
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
Every device that is looked at is opened and the model planned for it; one that lacks memory is rejected with what it lacks. Inputs that
are not given are made up (random, sizes 1 where the model leaves them open): only their shapes matter. Times of copies are estimates
from small and large ones that are made now.

Examples:
  halcyon select models/digits.onnx
  halcyon select model.onnx --input random:8x3x224x224 --backends opencl,cpu --json
  halcyon select model.onnx --split cpu=0.7,opencl=0.3
  halcyon select model.onnx --backend webgpu --may-leave 5";

#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  halcyon devices\n  halcyon devices --json")]
pub struct DevicesArgs {
    /// Prints one JSON array: id, available, reason and devices of every backend
    #[arg(long)]
    pub json: bool,
}

#[derive(Args, Debug)]
#[command(after_help = DOCTOR)]
pub struct DoctorArgs {
    /// This backend alone, which has to be there
    #[arg(long, value_name = "NAME")]
    pub backend: Option<String>,
    /// Seconds that one backend may take
    #[arg(long, value_name = "N", default_value_t = 120)]
    pub timeout: u64,
    /// Prints one JSON object: the lines of every section with what was measured
    #[arg(long)]
    pub json: bool,
}

const DOCTOR: &str = "\
Each line is pass, absent (the backend is not on this machine or not in this build), warn or fail, with the reason and what to do.
A kernel runs on numbers drawn for it, and every result is compared; so are what copies bring back and a matrix product, both with
their rates.
Exit codes: 0 everything that is here works, 1 warnings, 2 failures (or the backend that was asked for is absent).

Examples:
  halcyon doctor
  halcyon doctor --backend opencl --json";

#[derive(Args, Debug)]
pub struct ConformanceArgs {
    #[command(subcommand)]
    pub suite: Suite,
}

#[derive(Subcommand, Debug)]
pub enum Suite {
    /// Every op on every type, on this machine: right or wrong, by how much, and its share of the machine's peak
    Ops(OpsArgs),
    /// Cases in the layout of the ONNX backend tests
    Onnx(OnnxArgs),
}

#[derive(Args, Debug)]
#[command(after_help = OPS)]
pub struct OpsArgs {
    /// Backend, as in `halcyon run`
    #[arg(long, value_name = "NAME", default_value = "auto")]
    pub backend: String,
    /// Number of the backend's device
    #[arg(long, value_name = "N")]
    pub device: Option<usize>,
    /// Threads of the CPU device
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
    /// Level of the plans: O0, O1 or O2
    #[arg(long, value_name = "LEVEL", default_value = "O1")]
    pub level: String,
    /// Only this op, by its name in the table; repeatable
    #[arg(long = "op", value_name = "NAME")]
    pub ops: Vec<String>,
    /// Only these element types, with commas between
    #[arg(long = "dtype", value_name = "TYPE", value_delimiter = ',')]
    pub dtypes: Vec<String>,
    /// At most so many cases of each op and type (all on the CPU, else 3: a device may have to compile for each)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub cases: Option<u32>,
    /// Draws the operands as the run that printed this seed did
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Multiplies the tolerances of ops that round: below 1 asks for more than the table does
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0)]
    pub tolerance: f64,
    /// Only right or wrong: measures no times and no peaks
    #[arg(long)]
    pub no_speed: bool,
    /// Prints one JSON object
    #[arg(long)]
    pub json: bool,
    /// Prints a JSON object a line, each as soon as it is known: `begin`, then its result, and `end` with the counts
    #[arg(long, conflicts_with = "json")]
    pub json_lines: bool,
}

const OPS: &str = "\
Results are judged against the reference: in f64 for ops that round, in the op's own type where every bit counts. The cases have odd, empty
and large shapes, views, NaN and infinities. A cell of the matrix is the share of the machine's peak (measured in the same run: FLOP/s or
bytes/s, whichever the op needs longer for) of an op that passed, or ok where it was not measured; no: not supported; FAIL: wrong. Exit code
0 if nothing is wrong, else 1.

Examples:
  halcyon conformance ops
  halcyon conformance ops --backend opencl --op matmul --op softmax
  halcyon conformance ops --dtype f32,bf16 --json";

#[derive(Args, Debug)]
#[command(after_help = REPLAY)]
pub struct ReplayArgs {
    /// File that `halcyon run` wrote
    pub file: PathBuf,
    /// Another backend than the one that the file names
    #[arg(long, value_name = "NAME")]
    pub backend: Option<String>,
    /// Number of its device
    #[arg(long, value_name = "N")]
    pub device: Option<usize>,
    /// Another level than the file's
    #[arg(long, value_name = "LEVEL")]
    pub level: Option<String>,
    /// Backend that says what is right, at level O0
    #[arg(long, value_name = "NAME", default_value = "cpu")]
    pub reference: String,
    /// Prints one JSON object
    #[arg(long)]
    pub json: bool,
}

const REPLAY: &str = "\
The file holds the part of the graph that went wrong, its inputs, what came out and what should have. It is run again on its backend and on
the reference. Exit code 0 if they agree now, 6 if they still differ or it still fails.

Examples:
  halcyon replay model.replay
  halcyon replay model.replay --backend cpu --level O0";

#[derive(Args, Debug)]
#[command(after_help = CONFORMANCE)]
pub struct OnnxArgs {
    /// Folder of cases, at any depth
    pub dir: PathBuf,
    #[command(flatten)]
    pub backend: BackendArgs,
    /// Only the first N cases by name
    #[arg(long, value_name = "N")]
    pub limit: Option<usize>,
    /// Saves every result as DIR/CASE/test_data_set_*/output_N.pb; cases without expectations are run too
    #[arg(long, value_name = "DIR")]
    pub save: Option<PathBuf>,
    /// Prints one JSON object
    #[arg(long)]
    pub json: bool,
    /// Prints a JSON object a line, each as soon as it is known: `begin`, then its result, and `end` with the counts
    #[arg(long, conflicts_with = "json")]
    pub json_lines: bool,
}

const CONFORMANCE: &str = "\
A case is a folder of model.onnx, test_data_set_*/input_N.pb and output_N.pb, and optionally tolerance.json with \"rtol\" and
\"atol\" (1e-3 and 1e-7 without). Element types and shapes must be the expected ones, integers and booleans equal, floats within
atol + rtol * |expected|, with an rtol of at least 1/64 for bf16; NaN equals NaN. Of models that draw
random numbers only types and shapes are compared. Exit code 0 if no case is wrong and none fails.

Examples:
  halcyon conformance onnx target/testdata/conformance
  halcyon conformance onnx target/testdata/conformance --backend opencl --limit 40 --json
  halcyon conformance onnx cases-without-outputs --save results";

#[derive(Args, Debug)]
#[command(after_help = TUNE)]
pub struct TuneArgs {
    /// ONNX model whose kernels are tuned; without one, a short list of works that most models have
    pub model: Option<PathBuf>,
    #[command(flatten)]
    pub input: InputArgs,
    #[command(flatten)]
    pub backend: BackendArgs,
    /// Stops in so many seconds; the kernels that cost most come first
    #[arg(long, value_name = "SECONDS", overrides_with = "budget", value_parser = seconds)]
    pub budget: Option<f64>,
    /// Seconds that one candidate may take before it counts as hung
    #[arg(long, value_name = "SECONDS", default_value_t = 60.0, value_parser = seconds)]
    pub patience: f64,
    /// Tries what is in quarantine on this device again
    #[arg(long)]
    pub retry: bool,
    /// Adds the entries of another cache
    #[arg(long, value_name = "FILE")]
    pub import: Option<PathBuf>,
    /// Adds all entries to another cache, after tuning
    #[arg(long, value_name = "FILE")]
    pub export: Option<PathBuf>,
    /// Lists what is known, of every device
    #[arg(long)]
    pub list: bool,
    /// Prints one JSON object
    #[arg(long)]
    pub json: bool,
}

/// A number of seconds that a duration can be.
fn seconds(s: &str) -> std::result::Result<f64, String> {
    let n: f64 = s.parse().map_err(|_| format!("\"{s}\" is no number"))?;
    std::time::Duration::try_from_secs_f64(n).map(|_| n).map_err(|e| e.to_string())
}

const TUNE: &str = "\
Candidates run in a process of their own: one that is wrong, does not compile, crashes or hangs is put into quarantine with the reason, and
is never tried again on that device with that driver (--retry forgets that). Kernels that the cache knows are not tuned again. Without a
MODEL, --list, --import and --export tune nothing. What was found counts from level O2 on.

Examples:
  halcyon tune --backend opencl
  halcyon tune model.onnx --backend opencl --input random:8x3x224x224 --budget 60
  halcyon tune --list
  halcyon tune --import other-machine.json";

#[derive(Args, Debug)]
#[command(after_help = "Inputs that are not given are filled as by `random`, symbolic sizes with 1.\n\n\
Examples:\n  halcyon trace models/digits.onnx\n  halcyon trace models/digits.onnx --backend opencl --level O0 --json")]
pub struct TraceArgs {
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

#[derive(Args, Debug)]
#[command(after_help = INSPECT)]
pub struct InspectArgs {
    /// ONNX model; or a file of tensors (safetensors, .npz, .npy, ONNX .pb)
    pub file: PathBuf,
    /// Size of an input, [NAME=]1x3x224x224, where the model leaves it open; or a source as in `halcyon run`, where its value
    /// decides something. Without, open sizes are 1
    #[arg(long = "input", short = 'i', value_name = "[NAME=]SHAPE")]
    pub inputs: Vec<String>,
    /// Only this backend, instead of every one of this machine
    #[arg(long, value_name = "NAME")]
    pub backend: Option<String>,
    /// Level the plans are made at: O0, O1 or O2
    #[arg(long, value_name = "LEVEL", default_value = "O2")]
    pub level: String,
    /// Type of products and convolutions at O2: f32 or bf16
    #[arg(long, value_name = "TYPE")]
    pub precision: Option<String>,
    /// How many of the largest tensors to list
    #[arg(long, value_name = "N", default_value_t = 10)]
    pub top: usize,
    /// Prints one JSON object
    #[arg(long)]
    pub json: bool,
}

const INSPECT: &str = "\
FLOPs count a multiply-add as two. Bytes moved are those of each op by itself, reading its operands and writing its result; a
backend's plan fuses and moves fewer. Exit code 0 also for a model with unsupported operators, which the report names.

Examples:
  halcyon inspect models/digits.onnx
  halcyon inspect model.onnx --input ids=1x128 --input mask=1x128 --backend cpu
  halcyon inspect model.safetensors --top 50 --json";

#[derive(Args, Debug)]
#[command(after_help = FIT)]
pub struct FitArgs {
    /// ONNX model; external data is looked for beside it
    pub model: PathBuf,
    #[command(flatten)]
    pub input: InputArgs,
    /// Size of the batch: the first dimension of the inputs where the model leaves it open, and every other that has its name
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1 << 31))]
    pub batch: Option<u64>,
    #[command(flatten)]
    pub backend: BackendArgs,
    /// Prints one JSON object
    #[arg(long)]
    pub json: bool,
}

const FIT: &str = "\
The figures come from the plan, before a weight is uploaded or scratch is allocated. Inputs are as in `halcyon run`, or a shape
alone (NAME=8x3x224x224); those that are not given have the declared sizes, with 1 for open ones. Exit code 0 if the model fits, 5 if not.
`run` reports the same figures as measured, under \"memory\". The device's are exact; anonymous memory does not know of scratch that kernels of
the CPU keep for themselves (some MiB).

Examples:
  halcyon fit models/digits.onnx --batch 1000
  halcyon fit model.onnx --input ids=1x128 --input mask=1x128 --backend cpu --json
  halcyon fit model.onnx --memory-limit 2G";

#[derive(Args, Debug)]
#[command(after_help = EXPORT)]
pub struct ExportArgs {
    /// ONNX model
    pub model: PathBuf,
    /// File to write; it may be the model itself
    #[arg(long, short = 'o', value_name = "FILE")]
    pub output: PathBuf,
    /// Fixes the size of an input, [NAME=]1x3x224x224; others stay symbolic
    #[arg(long = "input", short = 'i', value_name = "[NAME=]SHAPE")]
    pub inputs: Vec<String>,
    /// Version of the operator set
    #[arg(long, value_name = "N", default_value_t = ExportOptions::default().opset)]
    pub opset: i64,
    /// Keeps weights in a file beside the model (always above 2 GiB)
    #[arg(long)]
    pub external_data: bool,
    /// Prints one JSON object
    #[arg(long)]
    pub json: bool,
}

const EXPORT: &str = "\
Constants are folded, common parts merged and what changes nothing is left out; functions and control flow that is decided by
constants are gone. A model that computed values decide is no single graph, and is refused (exit code 3).

Examples:
  halcyon export model.onnx -o smaller.onnx
  halcyon export model.onnx -o fixed.onnx --input image=1x3x224x224 --opset 24 --external-data";

#[derive(Args, Debug)]
pub struct ProbeArgs {
    pub backend: String,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_definition_is_consistent() {
        Cli::command().debug_assert();
    }
}
