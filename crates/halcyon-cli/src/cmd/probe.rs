//! `halcyon __probe`: prints as JSON what one driver finds, or the outcome of opening one of its devices.
//! Runs in a child process, because drivers may crash the process.

use crate::args::ProbeArgs;
use crate::report;
use halcyon::hal::{probe, registry};
use halcyon::{BackendType, Result};
use serde_json::json;

pub(crate) fn main(a: &ProbeArgs) -> Result<u8> {
    let kind: BackendType = a.backend.parse()?;
    if let Some(index) = a.open {
        return report::print(&(probe::report_open(kind, index)? + "\n")).map(|()| 0);
    }
    if let Some(line) = probe::report(kind) {
        // The parent parses this form: one line, and exit code 0 unless the process crashed.
        return report::print(&(line + "\n")).map(|()| 0);
    }
    let devices = registry::driver(kind)?.list()?;
    report::print_json(&json!({ "backend": kind, "devices": devices })).map(|()| 0)
}
