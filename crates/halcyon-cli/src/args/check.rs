//! Arguments of the commands that check the machine and compare results.

use super::BackendArgs;
use clap::{Args, Subcommand};
use std::path::PathBuf;

#[derive(Args, Debug)]
#[command(after_help = DEVICES)]
pub(crate) struct DevicesArgs {
    /// Probes every driver again, even those whose earlier probe crashed or hung
    #[arg(long)]
    pub refresh: bool,
    /// Prints one JSON array with every backend
    #[arg(long)]
    pub json: bool,
}

const DEVICES: &str = "\
Each device has a line with its id (the value of --backend), its name, its memory and how much of that is free. A backend without a device has \
a line with the reason. -v adds the driver's version and other facts of each device, and for each absent backend what was tried and how to \
install it.

Examples:
  halcyon devices
  halcyon devices -v
  halcyon devices --refresh --json";

#[derive(Args, Debug)]
#[command(after_help = DOCTOR)]
pub(crate) struct DoctorArgs {
    /// Checks this backend only; it is an error if it is not available
    #[arg(long, value_name = "NAME")]
    pub backend: Option<String>,
    /// Seconds that one backend may take
    #[arg(long, value_name = "N", default_value_t = 120)]
    pub timeout: u64,
    /// Prints one JSON object with the measurements
    #[arg(long)]
    pub json: bool,
}

const DOCTOR: &str = "\
Each backend is examined in a process of its own: its library, its devices, a kernel, copies and a matrix product. The result of each step is pass, \
absent (the backend is not on this machine or not in this build), warn or fail, with the reason and what to do. Results are compared \
with the host's; copies and the product are timed. -q prints only warnings and failures.

Exit codes: 0 everything that is present works, 1 warnings, 2 failures (or the requested backend is absent).

Examples:
  halcyon doctor
  halcyon doctor --backend cpu --json";

#[derive(Args, Debug)]
pub(crate) struct ConformanceArgs {
    #[command(subcommand)]
    pub suite: Suite,
}

#[derive(Subcommand, Debug)]
// Only one value is built per process, so its size does not matter.
#[allow(clippy::large_enum_variant)]
pub(crate) enum Suite {
    /// Every op on every type, on this machine
    Ops(OpsArgs),
    /// Cases in the layout of the ONNX backend tests
    Onnx(OnnxArgs),
}

#[derive(Args, Debug)]
#[command(after_help = OPS)]
pub(crate) struct OpsArgs {
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
    /// Only this op, by its name in the table. Repeatable
    #[arg(long = "op", value_name = "NAME")]
    pub ops: Vec<String>,
    /// Only these element types, with commas between
    #[arg(long = "dtype", value_name = "TYPE", value_delimiter = ',')]
    pub dtypes: Vec<String>,
    /// At most this many cases of each op and type. Default: all on the CPU, else 3, because a device may
    /// have to compile for each
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub cases: Option<u32>,
    /// Seed of the random operands, to repeat the run that printed it
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Multiplies the tolerances of ops that round. Below 1 is stricter than the table
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0)]
    pub tolerance: f64,
    /// Checks results only; measures no times and no peaks
    #[arg(long)]
    pub no_speed: bool,
    /// Prints one JSON object
    #[arg(long)]
    pub json: bool,
    /// Prints one JSON object per line, each as soon as it is known. Each op and type has a line `begin` and
    /// then a line `cell` with its result; the last line is `end` with the counts
    #[arg(long, conflicts_with = "json")]
    pub json_lines: bool,
}

const OPS: &str = "\
Results are compared with the reference: in f64 for ops that round, in the op's own type where every bit counts. The cases have odd, \
empty and large shapes, views, NaN and infinities. A cell of the matrix is an op's share of the machine's peak, which is measured in the \
same run (FLOP/s or bytes/s, whichever the op needs longer for; ! marks a rate above the measured peak). Other cells are ok (right, but \
without a share), no (not supported), not run (the device was lost) and FAIL (wrong, or failed). The exit code is 1 if a cell is FAIL, else 0.

Examples:
  halcyon conformance ops --op matmul --op softmax --dtype f32,bf16
  halcyon conformance ops --backend cpu --op relu --no-speed --json";

#[derive(Args, Debug)]
#[command(after_help = CONFORMANCE)]
pub(crate) struct OnnxArgs {
    /// Folder of cases, at any depth
    pub dir: PathBuf,
    #[command(flatten)]
    pub backend: BackendArgs,
    /// Only the first N cases by name
    #[arg(long, value_name = "N")]
    pub limit: Option<usize>,
    /// Saves every result as DIR/CASE/test_data_set_*/output_N.pb. Cases without expected results are run too
    #[arg(long, value_name = "DIR")]
    pub save: Option<PathBuf>,
    /// Prints one JSON object
    #[arg(long)]
    pub json: bool,
    /// Prints one JSON object per line, each as soon as it is known. Each case has a line `begin` and then a
    /// line `case` with its result; the last line is `end` with the counts
    #[arg(long, conflicts_with = "json")]
    pub json_lines: bool,
}

const CONFORMANCE: &str = "\
A case is a folder of model.onnx, test_data_set_*/input_N.pb and output_N.pb, and optionally tolerance.json with \"rtol\" and \"atol\" \
(by default 1e-3 and 1e-7). Element types and shapes must be the expected ones, integers and booleans equal, floats within \
atol + rtol * |expected|, with an rtol of at least 1/64 for bf16; NaN equals NaN. For models that draw random numbers, only types and \
shapes are compared. The exit code is 0 if no case is wrong and none fails.

`cargo xtask test` writes the cases that the example names.

Examples:
  halcyon conformance onnx target/testdata/conformance --limit 40
  halcyon conformance onnx target/testdata/conformance --limit 4 --save results";

#[derive(Args, Debug)]
#[command(after_help = REPLAY)]
pub(crate) struct ReplayArgs {
    /// File that `halcyon run --verify` or `--save-replay` wrote
    pub file: PathBuf,
    /// Backend to use instead of the file's
    #[arg(long, value_name = "NAME")]
    pub backend: Option<String>,
    /// Number of that backend's device
    #[arg(long, value_name = "N")]
    pub device: Option<usize>,
    /// Level to use instead of the file's
    #[arg(long, value_name = "LEVEL")]
    pub level: Option<String>,
    /// Backend of the reference results, at level O0
    #[arg(long, value_name = "NAME", default_value = "cpu")]
    pub reference: String,
    /// Prints one JSON object
    #[arg(long)]
    pub json: bool,
}

const REPLAY: &str = "\
The file holds the part of the graph that went wrong, its inputs, its result and the expected result. This part is run again on the backend \
that the file names and on the reference. The exit code is 0 if the results agree now, 6 if they still differ or the run still fails.

Examples:
  halcyon replay model.replay
  halcyon replay model.replay --backend cpu --level O0";

#[derive(Args, Debug)]
pub(crate) struct ProbeArgs {
    pub backend: String,
    /// Opens this device instead of listing all
    #[arg(long, value_name = "N")]
    pub open: Option<usize>,
}

#[derive(Args, Debug)]
pub(crate) struct DoctorChildArgs {
    pub backend: String,
}
