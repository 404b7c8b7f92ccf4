//! The `halcyon` command. One file per command in `cmd/`.
//!
//! It is a library too, so that a program can have the whole command with backends of its own: register them
//! ([`halcyon_hal::registry::register`]), then call [`main`]. `examples/backend` does.
#![forbid(unsafe_code)]

mod args;
mod cmd;
mod image;
mod report;
mod source;
mod words;

pub use cmd::conformance::answers;

use args::{Cli, Command};
use clap::Parser;
use clap::error::ErrorKind;
use halcyon::{Error, Result};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;

/// Runs the command that this process was started with.
pub fn main() -> ExitCode {
    // Known before parsing, so that a usage error is JSON too.
    let json = std::env::args_os().skip(1).take_while(|a| a != "--").any(|a| a == "--json");
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(e) if matches!(e.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) => {
            let _ = e.print();
            return ExitCode::SUCCESS;
        }
        Err(e) if json => {
            let text = e.to_string();
            let message = text.trim_start_matches("error: ").trim_end();
            report::print_error_json("Usage", message, serde_json::Value::Null, 2);
            return ExitCode::from(2);
        }
        Err(e) => {
            let _ = e.print();
            return ExitCode::from(2);
        }
    };
    if std::env::var_os("HALCYON_LOG").is_some() {
        start_log();
    }
    let result = catch_unwind(AssertUnwindSafe(|| run(cli)))
        .unwrap_or_else(|p| Err(Error::internal(report::panic_text(p.as_ref()))));
    match result {
        Ok(code) => ExitCode::from(code),
        Err(e) => {
            report::print_error(&e, json);
            ExitCode::from(e.exit_code().clamp(1, 255) as u8)
        }
    }
}

/// The exit code of a command that found no error.
fn run(cli: Cli) -> Result<u8> {
    cmd::probe::offer();
    match cli.command {
        Command::Run(a) => cmd::run::main(&a),
        Command::Inspect(a) => cmd::inspect::main(&a),
        Command::Fit(a) => cmd::fit::main(&a),
        Command::Select(a) => cmd::select::main(&a),
        Command::Export(a) => cmd::export::main(&a),
        Command::Replay(a) => cmd::replay::main(&a),
        Command::Doctor(a) => cmd::doctor::main(&a),
        Command::DoctorChild(a) => cmd::doctor::child(&a),
        Command::Devices(a) => cmd::devices::main(&a),
        Command::Conformance(a) => cmd::conformance::main(&a),
        Command::Trace(a) => cmd::trace::main(&a),
        Command::Tune(a) => cmd::tune::main(&a),
        Command::TuneChild(a) => cmd::tune::child(&a),
        Command::Bench(a) => cmd::bench::main(&a),
        Command::Probe(a) => cmd::probe::main(&a),
    }
}

/// Log lines on stderr, chosen by `HALCYON_LOG` (`info`, `halcyon_hal=debug`).
fn start_log() {
    use tracing_subscriber::EnvFilter;
    let filter = EnvFilter::try_from_env("HALCYON_LOG").unwrap_or_else(|e| {
        eprintln!("warning: HALCYON_LOG is not understood ({e}); using \"info\"");
        EnvFilter::new("info")
    });
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    // Only a second logger would make this fail, and there is none.
    let _ = log.try_init();
}
