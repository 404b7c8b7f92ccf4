//! The `halcyon` command, with the backends of this build.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    halcyon_cli::main()
}
