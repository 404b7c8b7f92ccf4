//! The complete `halcyon` command, extended by this backend, which `--backend interp` selects.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    match halcyon_interpreter::register() {
        Ok(()) => halcyon_cli::main(),
        Err(e) => {
            eprintln!("error: {e}");
            ExitCode::from(e.exit_code().clamp(1, 255) as u8)
        }
    }
}
