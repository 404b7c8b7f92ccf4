//! The command line, and the program that probes drivers in child processes.

use halcyon_cli::Program;
use halcyon_hal::probe;
use pyo3::prelude::*;
use std::ffi::OsString;
use std::path::PathBuf;

fn of(executable: PathBuf, arguments: Vec<OsString>) -> Program {
    Program { executable, arguments }
}

/// Runs the command `halcyon` in this process and returns its exit code. The first argument is the command's
/// name. `program` has the executable and the leading arguments with which the command is started again.
#[pyfunction]
pub(crate) fn command(
    py: Python<'_>,
    arguments: Vec<OsString>,
    program: Option<(PathBuf, Vec<OsString>)>,
) -> u8 {
    let program = program.map(|(executable, arguments)| of(executable, arguments));
    py.detach(|| halcyon_cli::main_with(arguments, program))
}

/// Probes drivers in children of this program from now on. Only the first call has an effect.
#[pyfunction]
pub(crate) fn set_program(executable: PathBuf, arguments: Vec<OsString>) {
    probe::set_program(of(executable, arguments));
}
