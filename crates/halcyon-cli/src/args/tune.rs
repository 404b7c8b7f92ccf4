//! Arguments of `halcyon tune`.

use super::{BackendArgs, InputArgs};
use clap::Args;
use std::path::PathBuf;

#[derive(Args, Debug)]
#[command(after_help = TUNE)]
pub(crate) struct TuneArgs {
    /// ONNX model whose kernels are tuned. Without one, common operations are tuned
    pub model: Option<PathBuf>,
    #[command(flatten)]
    pub input: InputArgs,
    #[command(flatten)]
    pub backend: BackendArgs,
    /// Stops after this many seconds. The most expensive kernels come first
    #[arg(long, value_name = "SECONDS", overrides_with = "budget", value_parser = seconds)]
    pub budget: Option<f64>,
    /// Seconds that one candidate may take before it counts as hung
    #[arg(long, value_name = "SECONDS", default_value_t = 60.0, value_parser = seconds)]
    pub patience: f64,
    /// Tries quarantined candidates of this device again
    #[arg(long)]
    pub retry: bool,
    /// Adds the entries of another cache
    #[arg(long, value_name = "FILE")]
    pub import: Option<PathBuf>,
    /// Adds all entries to another cache, after tuning
    #[arg(long, value_name = "FILE")]
    pub export: Option<PathBuf>,
    /// Lists the cached results of every device
    #[arg(long)]
    pub list: bool,
    /// Prints one JSON object
    #[arg(long)]
    pub json: bool,
}

/// Parses seconds that fit a `Duration`.
fn seconds(s: &str) -> std::result::Result<f64, String> {
    let n: f64 = s.parse().map_err(|_| format!("\"{s}\" is not a number"))?;
    std::time::Duration::try_from_secs_f64(n).map(|_| n).map_err(|e| e.to_string())
}

const TUNE: &str = "\
Candidates run in a child process. A candidate that gives wrong results, does not compile, crashes or hangs is quarantined, with the reason, \
and is not tried again on that device with that driver (unless --retry is given). Kernels with results in the cache are not tuned again. \
Without a MODEL, --list, --import and --export tune nothing. Tuned kernels are used from level O2 on.

Examples:
  halcyon tune models/digits.onnx --budget 10
  halcyon tune --list
  halcyon tune --export copy.json
  halcyon tune --import copy.json";
