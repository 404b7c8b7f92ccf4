//! `halcyon devices`: lists the available devices, then the backends without one.

use crate::args::DevicesArgs;
use crate::report::{self, columns, short, size, table, wrap};
use halcyon::hal::select::{self, BackendReport};
use halcyon::hal::{DeviceInfo, probe};
use halcyon::summary::recommended;
use halcyon::{Error, Result};
use std::fmt::Write;

pub(crate) fn main(a: &DevicesArgs) -> Result<u8> {
    if a.refresh {
        probe::forget();
    }
    let all = select::discover();
    if a.json {
        let v = serde_json::to_value(&all).map_err(|e| Error::internal(e.to_string()))?;
        report::print_json(&v)?;
    } else if report::verbose() {
        report::print(&details(&all))?;
    } else {
        report::print(&overview(&all, report::quiet()))?;
    }
    Ok(0)
}

/// A size such as `23.5 GiB`, or "unknown".
fn amount(bytes: Option<u64>) -> String {
    bytes.map_or("unknown".into(), size)
}

fn nothing() -> String {
    "no device was found, not even the CPU: this build has no backend that works here\n".into()
}

/// A line for each device and then, unless `alone` is set, a line for each backend without a device.
fn overview(all: &[BackendReport], alone: bool) -> String {
    let row = |d: &DeviceInfo| {
        let software = if d.software { "software, tried last" } else { "" };
        let memory = format!("{}, free {}", amount(d.total_memory), amount(d.free_memory));
        vec![d.id.clone(), short(&d.name, 60), memory, software.into()]
    };
    let rows: Vec<Vec<String>> = all.iter().flat_map(|r| &r.devices).map(row).collect();
    let mut out = match rows.is_empty() {
        true => nothing(),
        false => table(&rows).lines().map(|l| format!("{}\n", l.trim_start())).collect(),
    };
    let absent: Vec<&BackendReport> = all.iter().filter(|r| !r.available).collect();
    if alone || absent.is_empty() {
        return out;
    }
    out.push('\n');
    for r in absent {
        // Writing to a string cannot fail.
        let _ = writeln!(out, "{:<7} {}", r.id.id(), short(why(r), columns().saturating_sub(9)));
    }
    out
}

fn why(r: &BackendReport) -> &str {
    r.brief.as_deref().or(r.reason.as_deref()).unwrap_or("no reason is known")
}

/// All known properties of the devices, then the backends without a device, each with what was tried and the
/// fix, and the recommended backend.
fn details(all: &[BackendReport]) -> String {
    let mut out = String::new();
    for d in all.iter().flat_map(|r| &r.devices) {
        let _ = writeln!(out, "{}  {}", d.id, d.name);
        let yes = |b: bool| if b { "yes" } else { "no" };
        let unknown = || "unknown".to_string();
        let mut rows = vec![
            ("vendor", d.vendor.clone()),
            ("driver", d.driver_version.clone().unwrap_or_else(unknown)),
            ("memory", format!("{}, free {}", amount(d.total_memory), amount(d.free_memory))),
            ("shares the host's memory", yes(d.unified_memory).into()),
            ("software", yes(d.software).into()),
        ];
        if let Some(c) = &d.compute_capability {
            rows.push(("compute capability", c.clone()));
        }
        if let Some(n) = d.compute_units {
            rows.push(("compute units", n.to_string()));
        }
        rows.extend(d.properties.iter().map(|(k, v)| (k.as_str(), v.clone())));
        for (k, v) in rows.iter().filter(|(_, v)| !v.is_empty()) {
            out += &wrap(v, &format!("    {k}: "), "        ");
        }
        out.push('\n');
    }
    if all.iter().all(|r| r.devices.is_empty()) {
        out += &nothing();
    }
    for r in all.iter().filter(|r| !r.available) {
        out += &wrap(why(r), &format!("{}  ", r.id), "    ");
        for t in &r.tried {
            out += &wrap(t, "    tried: ", "        ");
        }
        if let Some(fix) = &r.fix {
            out += &wrap(fix, "    fix: ", "        ");
        }
        out.push('\n');
    }
    match recommended(all) {
        Some(b) => out + &format!("recommended: {b}\n"),
        None => out.trim_end().to_string() + "\n",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use halcyon::BackendType;

    fn some() -> Vec<BackendReport> {
        let cpu = BackendReport::of(
            BackendType::Cpu,
            halcyon::hal::registry::driver(BackendType::Cpu).and_then(|d| d.probe()),
        );
        let gone = Error::Unavailable {
            backend: "cuda".into(),
            tried: vec!["libcuda.so.1: cannot open it".into()],
            reason: "no NVIDIA driver on this machine".into(),
            fix: "Install it".into(),
        };
        let mut cpu = cpu;
        for d in &mut cpu.devices {
            (d.name, d.total_memory, d.free_memory) = ("A processor".into(), Some(3 << 29), None);
        }
        vec![BackendReport::of(BackendType::Cuda, Err(gone)), cpu]
    }

    #[test]
    fn present_devices_come_first_and_absent_backends_have_one_line() {
        assert_eq!(
            overview(&some(), false),
            "cpu:0  A processor  1.5 GiB, free unknown\n\ncuda    no NVIDIA driver on this machine\n"
        );
        assert_eq!(overview(&some(), true), "cpu:0  A processor  1.5 GiB, free unknown\n");
        assert!(overview(&some()[..1], false).starts_with("no device was found"));
    }

    #[test]
    fn details_have_what_was_tried_and_what_to_do() {
        let text = details(&some());
        for line in [
            "cpu:0  A processor",
            "    tried: libcuda.so.1: cannot open it",
            "    fix: Install it",
            "recommended: cpu",
        ] {
            assert!(text.lines().any(|l| l == line), "{line}: {text}");
        }
    }
}
