//! Arguments of `halcyon prepare`.

use super::{BackendArgs, InputArgs};
use clap::Args;
use std::path::PathBuf;

#[derive(Args, Debug)]
#[command(after_help = PREPARE)]
pub(crate) struct PrepareArgs {
    /// ONNX model. Its external data is read from the same folder
    pub model: PathBuf,
    #[command(flatten)]
    pub input: InputArgs,
    #[command(flatten)]
    pub backend: BackendArgs,
    /// Pairs of measurements for each comparison; up to four times as many if times vary
    #[arg(long, value_name = "N", default_value_t = 9, value_parser = clap::value_parser!(u32).range(1..))]
    pub repeat: u32,
    /// Writes the report, with plots, as one HTML file that loads no other file
    #[arg(long, value_name = "FILE.html")]
    pub html: Option<PathBuf>,
    /// Prints one JSON object
    #[arg(long)]
    pub json: bool,
}

const PREPARE: &str = "\
The report compares the model at --level with O0: the time of a run with inputs and outputs on the device, device memory, the number of \
steps, the largest difference of each output, the gain of every transformation that changed the plan, and the time by op. The transformations \
of the level that changed nothing are listed with the reason. Inputs that are not given are filled as by `--input random`; dimensions that the \
model leaves open get size 1. The exit code is 6 if the results at the level cannot be compared with those at O0 (a result has another shape, \
or other elements are finite).

Examples:
  halcyon prepare models/digits.onnx --repeat 3
  halcyon prepare models/digits.onnx --repeat 3 --html page.html
  halcyon prepare models/digits.onnx --level O1 --repeat 3 --json";
