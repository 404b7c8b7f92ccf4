//! Arguments of `halcyon bench`.

use super::{BackendArgs, InputArgs};
use clap::{Args, Subcommand};
use std::path::PathBuf;

#[derive(Args, Debug)]
pub struct BenchArgs {
    #[command(subcommand)]
    pub what: Bench,
}

#[derive(Subcommand, Debug)]
pub enum Bench {
    /// What the machine can do: multiply-add rates, memory bandwidth, hand-off of the threads
    Peak(BenchPeakArgs),
    /// A table of works (matrix products, convolutions, norms, attention, sorting) beside the measured peaks
    Ops(BenchOpsArgs),
    /// A model end to end, and where its time goes
    Model(BenchModelArgs),
    /// What each transformation of a model's plan gains: the plan beside the one made without it
    Receipts(BenchReceiptsArgs),
}

#[derive(Args, Debug)]
#[command(after_help = BENCH_PEAK)]
pub struct BenchPeakArgs {
    /// Backend: at present the CPU can be measured
    #[arg(long, value_name = "NAME", default_value = "auto")]
    pub backend: String,
    /// Threads of the CPU device; all without
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
Figures are the best of a dozen bursts or more (until some agree), with the median
and the spread (middle half of the bursts over the median) beside them. The triad is c = s a + b,
counted as two reads and one write. Working sets are those of all threads together. Hand-off: from
the start of a job until all threads have joined it and the caller goes on.

Examples:
  halcyon bench peak
  halcyon bench peak --threads 1 --json";

#[derive(Args, Debug)]
#[command(after_help = BENCH_OPS)]
pub struct BenchOpsArgs {
    /// Only this work, or all whose names begin with NAME and a dash; repeatable
    #[arg(long, value_name = "NAME")]
    pub only: Vec<String>,
    #[command(flatten)]
    pub backend: BackendArgs,
    /// Runs of each work; without, at least 7, and as many more as half a second holds
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
Works run on device buffers that hold random numbers; weights of convolutions are constants, all
else is an input. FLOPs count a multiply-add as two; bytes are those of inputs and outputs, once.
The share is that of the limit that is nearer, measured before and after each work: the multiply-add
rate (of bf16 work that of f32, where it is higher), or the bandwidth on a working set of the work's
size (reading, where less than a tenth is written, else the triad). The spread is the middle half of
the runs over the median. Compared, a ratio above 1 is faster now; * marks what lies beyond the
spread of both.

Examples:
  halcyon bench ops --only gemm --only softmax
  halcyon bench ops --backend cpu --threads 2 --json > before.json
  halcyon bench ops --backend cpu --threads 2 --compare before.json";

#[derive(Args, Debug)]
#[command(after_help = BENCH_MODEL)]
pub struct BenchModelArgs {
    /// ONNX model; external data is looked for beside it
    pub model: PathBuf,
    #[command(flatten)]
    pub input: InputArgs,
    #[command(flatten)]
    pub backend: BackendArgs,
    /// Runs; without, at least 10, and as many more as two seconds hold
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub repeat: Option<u32>,
    /// How many of the slowest steps to list; JSON has all
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
Inputs that are not given are filled as by `random`, symbolic sizes with 1. End to end includes the
copies of inputs and outputs; steps are timed by the device in the same runs. Shares of the peak are
as in `halcyon bench ops`, with peaks measured before the runs.

Examples:
  halcyon bench model models/digits.onnx
  halcyon bench model model.onnx --input random:8x3x224x224 --threads 2 --picture where.svg
  halcyon bench model model.onnx --level O0 --json > before.json
  halcyon bench model model.onnx --compare before.json";

#[derive(Args, Debug)]
#[command(after_help = BENCH_RECEIPTS)]
pub struct BenchReceiptsArgs {
    /// ONNX model; external data is looked for beside it
    pub model: PathBuf,
    #[command(flatten)]
    pub input: InputArgs,
    #[command(flatten)]
    pub backend: BackendArgs,
    /// Pairs of bursts for each transformation, one with it and one without; up to four times as many where times scatter
    #[arg(long, value_name = "N", default_value_t = 15, value_parser = clap::value_parser!(u32).range(1..))]
    pub repeat: u32,
    /// A report of this command (--json) to compare with
    #[arg(long, value_name = "FILE")]
    pub compare: Option<PathBuf>,
    /// Exit code 1 if a gain is another than in that report by more than so many percent, or if what does not depend on time is
    #[arg(long, value_name = "PERCENT", requires = "compare")]
    pub within: Option<f64>,
    /// Prints one JSON object
    #[arg(long)]
    pub json: bool,
}

const BENCH_RECEIPTS: &str = "\
Gain is the time without a transformation over the time with it: the median of pairs of bursts that follow each other at once, with
the middle half of the pairs over the median as its spread. Beside it stands what the plan alone tells, with it -> without it, and is
the same each time: steps (launches), generated kernels, intermediate buffers, bytes of scratch and of packed constants, FLOPs, bytes
moved by the steps. Inputs that are not given are filled as by `random`, symbolic sizes with 1.

Examples:
  halcyon bench receipts models/digits.onnx
  halcyon bench receipts model.onnx --level O2 --threads 2 --json > first.json
  halcyon bench receipts model.onnx --level O2 --threads 2 --compare first.json --within 15";
