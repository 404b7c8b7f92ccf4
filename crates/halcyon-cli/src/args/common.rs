//! Arguments that every command accepts.

use clap::Args;

/// How much is printed. Both flags are global: they stand before or after the command's name.
#[derive(Args, Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Verbosity {
    /// Print more: every reason, time and size
    #[arg(long, short = 'v', global = true, help_heading = "Output")]
    pub verbose: bool,
    /// Print the answer alone: no notes, warnings or progress
    #[arg(long, short = 'q', global = true, conflicts_with = "verbose", help_heading = "Output")]
    pub quiet: bool,
}
