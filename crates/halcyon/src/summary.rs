//! The backends and devices of this machine, as text.

use halcyon_hal::select::BackendReport;
use halcyon_hal::{BackendType, DeviceInfo};
use std::fmt::Write;

/// The backend that `auto` would choose: the backend of highest priority that has a device other than a
/// software device.
pub fn recommended(all: &[BackendReport]) -> Option<BackendType> {
    all.iter()
        .filter(|r| r.id.row().priority.is_some() && r.devices.iter().any(|d| !d.software))
        .max_by_key(|r| r.id.row().priority)
        .map(|r| r.id)
}

/// Every backend with its devices or the reason it has none, and the recommended backend.
pub fn summary(all: &[BackendReport]) -> String {
    let mut out = String::from("=== Available Backends ===\n");
    for r in all {
        let mark = if r.available { '✓' } else { '✗' };
        let _ = writeln!(out, "{mark} {} ({})", r.id.title(), r.id);
        for d in &r.devices {
            let _ = writeln!(out, "    {}", device(d));
        }
        if let Some(why) = &r.reason {
            let why = reason(r.id, why).replace('\n', "\n           ");
            let _ = writeln!(out, "    Error: {why}");
        }
    }
    match recommended(all) {
        Some(b) => {
            let _ = writeln!(out, "\nRecommended backend: {}", b.title());
        }
        None => out.push_str("\nRecommended backend: none, no backend has a device\n"),
    }
    out
}

/// A number with commas between groups of three digits: `1,234,567`.
pub fn grouped(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::new();
    for (i, c) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(c);
    }
    out
}

/// Bytes in GB (10⁹ bytes): `34.36 GB`.
pub fn gigabytes(bytes: u64) -> String {
    format!("{:.2} GB", bytes as f64 / 1e9)
}

/// `[0] Name: 34.36 GB (30.60 GB free)`.
fn device(d: &DeviceInfo) -> String {
    let mut s = format!("[{}] {}: ", d.index, d.name);
    s += &d.total_memory.map_or("memory unknown".into(), gigabytes);
    match d.free_memory {
        Some(free) => s += &format!(" ({} free)", gigabytes(free)),
        None => s += " (free memory unknown)",
    }
    if d.unified_memory {
        s += " (unified memory)";
    }
    if d.software {
        s += " (runs on the CPU, tried last unless named)";
    }
    s
}

/// Why a backend is not available, without the backend's name, which the caller prints beside it, and without
/// an empty list of attempts.
pub fn reason(b: BackendType, why: &str) -> String {
    let name = format!("{b} is not available: ");
    why.strip_prefix(&name).unwrap_or(why).replace(" Tried: nothing.", "")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(backend: BackendType, free: Option<u64>, unified_memory: bool, software: bool) -> DeviceInfo {
        DeviceInfo {
            backend,
            id: format!("{backend}:0"),
            index: 0,
            name: "Thing".into(),
            vendor: String::new(),
            driver_version: None,
            total_memory: Some(32 << 30),
            free_memory: free,
            compute_capability: None,
            compute_units: None,
            unified_memory,
            software,
            properties: Default::default(),
        }
    }

    #[test]
    fn the_summary_has_its_form() {
        let report = |id, devices: Vec<DeviceInfo>, reason: Option<&str>| {
            let reason = reason.map(str::to_string);
            BackendReport { reason, ..BackendReport::of(id, Ok(devices)) }
        };
        let all = [
            report(BackendType::Cpu, vec![info(BackendType::Cpu, Some(57 << 29), false, false)], None),
            report(BackendType::Metal, vec![info(BackendType::Metal, None, true, false)], None),
            report(BackendType::Cuda, vec![], Some("not there")),
            report(BackendType::OpenCl, vec![info(BackendType::OpenCl, None, false, true)], None),
        ];
        assert_eq!(
            summary(&all),
            "=== Available Backends ===\n\
             ✓ CPU (cpu)\n    [0] Thing: 34.36 GB (30.60 GB free)\n\
             ✓ Metal (metal)\n    [0] Thing: 34.36 GB (free memory unknown) (unified memory)\n\
             ✗ CUDA (cuda)\n    Error: not there\n\
             ✓ OpenCL (opencl)\n    [0] Thing: 34.36 GB (free memory unknown) (runs on the CPU, tried last unless named)\n\
             \nRecommended backend: Metal\n"
        );
        assert_eq!(recommended(&all[3..]), None);
    }
}
