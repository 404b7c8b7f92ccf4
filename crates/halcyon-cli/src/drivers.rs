//! How the command treats drivers: child processes probe them first, and their output is kept apart from the
//! command's output.

use crate::cmd::Command;
use crate::report;
use halcyon::hal::chatter::{self, Chatter};
use halcyon::hal::probe;

/// Call before any driver is loaded.
pub(crate) fn start(command: &Command, json: bool) {
    chatter::show(|driver, line| {
        if report::verbose() {
            report::note(&format!("{driver} driver: {line}"));
        }
    });
    chatter::separate(match command {
        // The parent process collects stderr.
        Command::Probe(_) | Command::DoctorChild(_) => Chatter::ToStderr,
        _ => Chatter::Captured,
    });
    // With `--json` notes are dropped. `note` itself handles `-q`.
    let notice: fn(&str) = match json {
        true => |_| {},
        false => report::note,
    };
    probe::set_notice(notice);
    if let Ok(exe) = std::env::current_exe() {
        probe::set_executable(exe);
    }
}
