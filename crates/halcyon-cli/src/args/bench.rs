//! Arguments of `halcyon bench`.

use super::{BackendArgs, InputArgs};
use clap::{Args, Subcommand};
use std::path::PathBuf;

#[derive(Args, Debug)]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    pub what: Bench,
}

#[derive(Subcommand, Debug)]
pub(crate) enum Bench {
    /// Peak arithmetic rate, memory bandwidth and cost of starting threads
    Peak(BenchPeakArgs),
    /// Single operations, compared with the measured peaks
    Ops(BenchOpsArgs),
    /// A model end to end, and where its time goes
    Model(BenchModelArgs),
    /// Tokens per second of a language model
    #[cfg(feature = "language")]
    Llm(super::BenchLlmArgs),
    /// What each transformation of a model's plan gains
    Receipts(BenchReceiptsArgs),
}

#[derive(Args, Debug)]
#[command(after_help = BENCH_PEAK)]
pub(crate) struct BenchPeakArgs {
    /// Backend. Only the CPU can be measured at present
    #[arg(long, value_name = "NAME", default_value = "auto")]
    pub backend: String,
    /// Threads of the CPU device. Default: all
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
    /// A report of this command (--json) to compare with
    #[arg(long, value_name = "FILE")]
    pub compare: Option<PathBuf>,
    /// Prints one JSON object
    #[arg(long)]
    pub json: bool,
}

const BENCH_PEAK: &str = "\
Each figure is the best of at least a dozen bursts. The median and the spread (the range of the middle half of the bursts, divided by the \
median) stand beside it. The triad is c = s a + b, counted as two reads and one write. A working set is the memory of all threads together. The \
time of starting a job ends when all threads have joined the job and the caller goes on.

Examples:
  halcyon bench peak
  halcyon bench peak --threads 1 --json";

#[derive(Args, Debug)]
#[command(after_help = BENCH_OPS)]
pub(crate) struct BenchOpsArgs {
    /// Only this operation, or all whose names begin with NAME and a dash. Repeatable
    #[arg(long, value_name = "NAME")]
    pub only: Vec<String>,
    #[command(flatten)]
    pub backend: BackendArgs,
    /// Runs of each operation. Default: half a second of runs, at least 7
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub repeat: Option<u32>,
    /// A report of this command (--json) to compare with
    #[arg(long, value_name = "FILE")]
    pub compare: Option<PathBuf>,
    /// Prints one JSON object
    #[arg(long)]
    pub json: bool,
}

const BENCH_OPS: &str = "\
Operations run on device buffers of random numbers. The weights of convolutions are constants; all other operands are inputs. A multiply-add \
counts as two FLOPs; the bytes are those of all inputs and outputs, each counted once. Two limits are measured before and after each operation: \
the multiply-add rate (for bf16, the rate of f32 if that is higher), and the bandwidth on a working set of the same size (of reading if less \
than a tenth of the bytes is written, else of the triad). Each limit gives the least time of the operation; the share is the longer of the two, divided by the measured time. The \
spread is the range of the middle half of the runs, divided by the median. In a comparison, a ratio above 1 means that the operation is faster \
now, and * marks rows where the middle halves of the runs, now and before, do not overlap.

Examples:
  halcyon bench ops --only softmax
  halcyon bench ops --only softmax --threads 1 --json > before.json
  halcyon bench ops --only softmax --threads 1 --compare before.json";

#[derive(Args, Debug)]
#[command(after_help = BENCH_MODEL)]
pub(crate) struct BenchModelArgs {
    /// ONNX model. Its external data is read from the same folder
    pub model: PathBuf,
    #[command(flatten)]
    pub input: InputArgs,
    #[command(flatten)]
    pub backend: BackendArgs,
    /// Number of runs. Default: two seconds of runs, at least 10
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub repeat: Option<u32>,
    /// How many of the slowest steps to list. JSON has all
    #[arg(long, value_name = "N", default_value_t = 15)]
    pub top: usize,
    /// A report of this command (--json) to compare with
    #[arg(long, value_name = "FILE")]
    pub compare: Option<PathBuf>,
    /// Draws where the time goes into an SVG file
    #[arg(long, value_name = "FILE.svg")]
    pub picture: Option<PathBuf>,
    /// Prints one JSON object
    #[arg(long)]
    pub json: bool,
}

const BENCH_MODEL: &str = "\
Inputs that are not given are filled as by `--input random`; dimensions that the model leaves open get size 1. The end-to-end time includes the copies of \
inputs and outputs; the device times the steps in the same runs. Shares of the peak are as in `halcyon bench ops`, with peaks measured before \
the runs.

Examples:
  halcyon bench model models/digits.onnx
  halcyon bench model models/digits.onnx --threads 1 --picture where.svg
  halcyon bench model models/digits.onnx --level O0 --json > before.json
  halcyon bench model models/digits.onnx --compare before.json";

#[derive(Args, Debug)]
#[command(after_help = BENCH_RECEIPTS)]
pub(crate) struct BenchReceiptsArgs {
    /// ONNX model. Its external data is read from the same folder
    pub model: PathBuf,
    #[command(flatten)]
    pub input: InputArgs,
    #[command(flatten)]
    pub backend: BackendArgs,
    /// Pairs of measurements for each transformation; up to four times as many if times vary
    #[arg(long, value_name = "N", default_value_t = 15, value_parser = clap::value_parser!(u32).range(1..))]
    pub repeat: u32,
    /// A report of this command (--json) to compare with
    #[arg(long, value_name = "FILE")]
    pub compare: Option<PathBuf>,
    /// Exit code 1 if a gain differs by more than this from the earlier report, or if another figure of the
    /// plan differs at all
    #[arg(long, value_name = "PERCENT", requires = "compare")]
    pub within: Option<f64>,
    /// Prints one JSON object
    #[arg(long)]
    pub json: bool,
}

const BENCH_RECEIPTS: &str = "\
The gain is the time without a transformation divided by the time with it. It is the median over pairs of bursts, one burst right after the \
other; its spread is the range of the middle half of the pairs, divided by the median. Counts that depend on the plan alone follow, as \
`with the transformation -> without it`: steps (launches), generated kernels, intermediate buffers, bytes of scratch memory and of packed \
constants, FLOPs, and bytes that the steps move. Inputs that \
are not given are filled as by `--input random`; dimensions that the model leaves open get size 1.

Examples:
  halcyon bench receipts models/digits.onnx --repeat 3
  halcyon bench receipts models/digits.onnx --repeat 3 --json > first.json
  halcyon bench receipts models/digits.onnx --repeat 3 --compare first.json";
