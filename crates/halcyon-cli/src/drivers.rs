//! How the command treats drivers: their output is kept apart from the output of the command.

use crate::cmd::Command;
use crate::report;
use halcyon::hal::driver_output::{self, DriverOutput};
use halcyon::hal::probe;

/// Must be called before any driver is loaded.
pub(crate) fn start(command: &Command, json: bool) {
    driver_output::set_listener(|driver, line| {
        if report::verbose() {
            report::note(&format!("{driver} driver: {line}"));
        }
    });
    driver_output::separate(match command {
        // The parent process collects stderr.
        Command::Probe(_) | Command::DoctorChild(_) => DriverOutput::ToStderr,
        _ => DriverOutput::Captured,
    });
    // With `--json`, notices about probes are dropped. `note` itself handles `-q`.
    let notice: fn(&str) = match json {
        true => |_| {},
        false => report::note,
    };
    probe::set_notice(notice);
}
