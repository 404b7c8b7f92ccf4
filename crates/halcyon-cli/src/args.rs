//! Command-line arguments, one file for each group of commands. `help.rs` builds the help texts from them.

mod backend;
mod bench;
mod check;
pub mod common;
pub mod help;
mod model;
mod run;
mod tune;

pub use backend::*;
pub use bench::*;
pub use check::*;
use clap::{Parser, Subcommand};
pub use common::Verbosity;
pub use help::{CompletionsArgs, HelpArgs, ManArgs, command};
pub use model::*;
pub use run::*;
pub use tune::*;

#[derive(Parser, Debug)]
#[command(name = "halcyon", version, about = "Runs machine-learning models on the hardware that is there", after_help = TOP)]
#[command(disable_help_subcommand = true, max_term_width = 100)]
pub struct Cli {
    #[command(flatten)]
    pub verbosity: Verbosity,
    /// Takes external data of a model behind a link that leads out of the model's folder. Links of a Hugging
    /// Face cache are always taken
    #[arg(long, global = true)]
    pub allow_external_links: bool,
    #[command(subcommand)]
    pub command: Command,
}

const TOP: &str = "\
Exit codes: 0 done, 1 error, 2 usage, 3 not supported, 4 backend not available, 5 out of memory, \
6 a result differs from the reference.

`halcyon help environment` lists the environment variables.

Examples:
  halcyon run models/digits.onnx --input models/digit-7.png --top-k 3
  halcyon devices
  halcyon help run";

#[derive(Subcommand, Debug)]
pub enum Command {
    /// Runs an ONNX model
    Run(RunArgs),
    /// Says what a model holds, what it costs and where it can run
    Inspect(InspectArgs),
    /// Says how much memory a model takes and the largest batch
    Fit(FitArgs),
    /// Says which device a model would run on, and why
    Select(SelectArgs),
    /// Writes an ONNX model again: checked, folded, simplified
    Export(ExportArgs),
    /// Lists the devices of this machine
    Devices(DevicesArgs),
    /// Checks that each backend works, step by step
    Doctor(DoctorArgs),
    /// Compares results with what they should be
    Conformance(ConformanceArgs),
    /// Repeats a failure from its replay file
    Replay(ReplayArgs),
    /// Measures which kernels are fastest and keeps the result
    Tune(TuneArgs),
    /// Shows a model's graph, passes, kernels, source and times
    Trace(TraceArgs),
    /// Measures the machine, single operations, or a model
    Bench(BenchArgs),
    /// Prints a completion script for a shell
    Completions(CompletionsArgs),
    /// Prints or writes the manual pages
    Man(ManArgs),
    /// Prints help on a command or a topic
    Help(HelpArgs),
    /// Probes a driver and prints what it found as JSON
    #[command(name = "__probe", hide = true)]
    Probe(ProbeArgs),
    /// Examines a backend in this process and prints an event a line
    #[command(name = "__doctor", hide = true)]
    DoctorChild(DoctorChildArgs),
    /// Tunes in this process and prints an event a line
    #[command(name = "__tune", hide = true)]
    TuneChild(TuneArgs),
}
