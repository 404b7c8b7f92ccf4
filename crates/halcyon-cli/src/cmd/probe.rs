//! `halcyon __probe`: what one driver finds, as JSON. It runs in a process of its own, so that a driver that ends the process
//! ends only this one.

use crate::args::ProbeArgs;
use crate::report;
use halcyon::hal::registry;
use halcyon::{BackendType, Result};
use serde_json::json;

pub fn main(a: &ProbeArgs) -> Result<u8> {
    let kind: BackendType = a.backend.parse()?;
    match registry::driver(kind).and_then(|d| d.probe()) {
        Ok(devices) => report::print_json(&json!({ "backend": kind, "devices": devices })).map(|()| 0),
        Err(e) => {
            report::print_error(&e, true);
            Ok(e.exit_code().clamp(1, 255) as u8)
        }
    }
}
