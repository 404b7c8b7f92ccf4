//! How the command treats drivers: they are looked at by children first, and what they print is kept apart
//! from what the command prints.

use crate::args::Command;
use crate::report;
use halcyon::hal::chatter::{self, Chatter};
use halcyon::hal::probe;

/// Before a driver is loaded.
pub fn start(command: &Command, json: bool) {
    chatter::show(|driver, line| {
        if report::verbose() {
            report::note(&format!("{driver} driver: {line}"));
        }
    });
    chatter::separate(match command {
        // The parent collects what is on standard error.
        Command::Probe(_) | Command::DoctorChild(_) => Chatter::ToStderr,
        _ => Chatter::Captured,
    });
    // Nobody reads a note beside JSON. `-q` is heard by `note`.
    let notice: fn(&str) = match json {
        true => |_| {},
        false => report::note,
    };
    probe::set_notice(notice);
    if let Ok(exe) = std::env::current_exe() {
        probe::set_executable(exe);
    }
}
