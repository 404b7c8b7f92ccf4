//! Command-line arguments, one file for each group of commands. `help.rs` builds the help texts from them.

mod backend;
mod bench;
#[cfg(feature = "language")]
mod cache;
mod check;
pub(crate) mod common;
#[cfg(feature = "language")]
mod files;
pub(crate) mod help;
#[cfg(feature = "language")]
mod hub;
#[cfg(feature = "language")]
mod language;
#[cfg(feature = "language")]
mod lora;
mod model;
mod prepare;
mod quantize;
mod run;
mod runtime;
mod train;
mod tune;

use crate::cmd::Command;
pub(crate) use backend::*;
pub(crate) use bench::*;
#[cfg(feature = "language")]
pub(crate) use cache::CacheArgs;
pub(crate) use check::*;
use clap::Parser;
pub(crate) use common::Verbosity;
#[cfg(feature = "language")]
pub(crate) use files::*;
pub(crate) use help::{CompletionsArgs, HelpArgs, ManArgs, command};
#[cfg(feature = "language")]
pub(crate) use hub::*;
#[cfg(feature = "language")]
pub(crate) use language::*;
#[cfg(feature = "language")]
pub(crate) use lora::*;
pub(crate) use model::*;
pub(crate) use prepare::*;
pub(crate) use quantize::*;
pub(crate) use run::*;
pub(crate) use runtime::*;
pub(crate) use train::*;
pub(crate) use tune::*;

#[derive(Parser, Debug)]
#[command(name = "halcyon", version, about = "Runs machine-learning models on the accelerators of this machine", after_help = TOP)]
#[command(disable_help_subcommand = true, max_term_width = 100)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub verbosity: Verbosity,
    /// Accepts external data behind a link that leads out of the model's folder. Links of a Hugging
    /// Face cache are always accepted
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
