//! The arguments of this command, and how its children are started.

use halcyon::hal::child::Program;
use halcyon::hal::probe;
use halcyon::{Error, Result};
use std::ffi::OsString;
use std::sync::{Mutex, MutexGuard};

static STARTED: Mutex<(Vec<OsString>, Option<Program>)> = Mutex::new((vec![], None));

fn started() -> MutexGuard<'static, (Vec<OsString>, Option<Program>)> {
    STARTED.lock().unwrap_or_else(|e| e.into_inner())
}

/// Remembers both, and probes drivers in children from now on.
pub(crate) fn start(args: &[OsString], program: Option<Program>) {
    if let Some(p) = &program {
        probe::set_program(p.clone());
    }
    *started() = (args.to_vec(), program);
}

/// The arguments after the program's name.
pub(crate) fn args() -> Vec<OsString> {
    started().0.get(1..).unwrap_or_default().to_vec()
}

/// How this command is started again.
///
/// # Errors
/// [`Error::Io`] if that is not known.
pub(crate) fn program() -> Result<Program> {
    started().1.clone().ok_or_else(|| Error::Io {
        path: "this executable".into(),
        what: "its path is not known, so no child process can be started".into(),
    })
}
