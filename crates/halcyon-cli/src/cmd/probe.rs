//! `halcyon __probe`: what one driver finds, as JSON. Drivers that can end the process are looked at in such a process of their
//! own first.

use crate::args::ProbeArgs;
use crate::report;
use halcyon::hal::registry;
use halcyon::{BackendType, Result};
use serde_json::json;

pub fn main(a: &ProbeArgs) -> Result<u8> {
    let kind: BackendType = a.backend.parse()?;
    #[cfg(feature = "opencl")]
    if kind == BackendType::OpenCl {
        // The driver reads its own form: one line, and exit code 0 unless the process was taken down.
        return report::print(&(halcyon::hal::opencl::probe_report() + "\n")).map(|()| 0);
    }
    let devices = registry::driver(kind)?.probe()?;
    report::print_json(&json!({ "backend": kind, "devices": devices })).map(|()| 0)
}

/// Lets drivers use this executable for such a look.
pub fn offer() {
    #[cfg(feature = "opencl")]
    if let Ok(exe) = std::env::current_exe() {
        halcyon::hal::opencl::set_probe_executable(exe);
    }
}
