//! Splitting one model over several devices, shared by `run` and `select`.

use crate::args::{BackendArgs, SplitArgs};
use crate::report::{figures, size, time};
use halcyon::hal::DeviceName;
use halcyon::ir::Graph;
use halcyon::split::{Placement, Split, by_layers, by_support};
use halcyon::{Backend, BackendType, Error, Fallback, Result};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Duration;

/// Limit on the lines of a list in text output; JSON contains all.
const ROWS: usize = 8;

/// One device of `--split`.
#[derive(Debug, PartialEq)]
pub(super) struct DeviceShare {
    backend: BackendType,
    device: Option<usize>,
    pub(super) share: Option<f64>,
}

/// Parses `cpu=0.7,opencl:1=0.3`.
pub(super) fn parts(text: &str) -> Result<Vec<DeviceShare>> {
    let one = |t: &str| {
        let bad = |what: &str| {
            Error::argument(
                "--split",
                format!("\"{t}\" {what}; write NAME[:NUMBER][=SHARE], as in opencl:0=0.3"),
            )
        };
        let (device, share) = t.split_once('=').map_or((t, None), |(d, s)| (d, Some(s)));
        let number = |s: &str| s.trim().parse::<f64>().map_err(|_| bad("has no number as its share"));
        let share = share.map(number).transpose()?;
        if share.is_some_and(|s| !s.is_finite() || s <= 0.0) {
            return Err(bad("has a share that is not above 0"));
        }
        let DeviceName { backend, index } = device.parse()?;
        if backend == BackendType::Auto {
            return Err(bad("names no backend"));
        }
        Ok(DeviceShare { backend, device: index, share })
    };
    let all = text.split(',').map(str::trim).map(one).collect::<Result<Vec<_>>>()?;
    if all.len() < 2 {
        return Err(Error::argument("--split", "a split takes two devices or more; --backend takes one"));
    }
    Ok(all)
}

/// The device arguments for one part of a split. The named device is required, regardless of the
/// configuration file's fallback.
pub(super) fn of_part(a: &BackendArgs, p: &DeviceShare) -> BackendArgs {
    let fallback = Some(Fallback::Never.to_string());
    BackendArgs { backend: p.backend.id().into(), device: p.device, fallback, ..a.clone() }
}

/// Rejects invalid arguments without opening a device.
pub(super) fn check(s: &SplitArgs) -> Result<()> {
    s.split.as_deref().map(parts).transpose()?;
    match s.may_leave {
        Some(p) if !(0.0..=100.0).contains(&p) => {
            Err(Error::argument("--may-leave", format!("{p} is not a percentage from 0 to 100")))
        }
        _ => Ok(()),
    }
}

/// The arguments for the first device.
pub(super) fn first(s: &SplitArgs, a: &BackendArgs) -> Result<BackendArgs> {
    Ok(match &s.split {
        Some(t) => of_part(a, &parts(t)?[0]),
        None => a.clone(),
    })
}

/// The assignment of a graph's nodes to devices.
#[derive(Debug)]
pub(super) struct Assignment {
    pub backends: Vec<Backend>,
    pub of: Vec<usize>,
    pub why: BTreeMap<usize, String>,
}

/// The requested assignment. `first` is the first device, which is already open. By default all nodes go to
/// this device.
pub(super) fn assign(s: &SplitArgs, a: &BackendArgs, first: &Backend, g: &Graph) -> Result<Assignment> {
    if let Some(t) = &s.split {
        let parts = parts(t)?;
        let rest = parts[1..].iter().map(|p| of_part(a, p).open(false));
        let backends = std::iter::once(Ok(first.clone())).chain(rest).collect::<Result<Vec<_>>>()?;
        let shares: Vec<f64> = parts.iter().map(|p| p.share.unwrap_or(1.0)).collect();
        return Ok(Assignment { backends, of: by_layers(g, &shares)?, why: BTreeMap::new() });
    }
    match s.may_leave {
        Some(percent) if first.info().backend != BackendType::Cpu => {
            let cpu = BackendArgs { backend: "cpu".into(), device: None, ..a.clone() }.open(false)?;
            let (of, why) = by_support(first, &cpu, g, percent / 100.0)?;
            // The CPU was opened only to compare kernels. If it gets no work, it is not part of the
            // placement.
            let backends = match why.is_empty() {
                true => vec![first.clone()],
                false => vec![first.clone(), cpu],
            };
            Ok(Assignment { backends, of, why })
        }
        _ => Ok(Assignment {
            backends: vec![first.clone()],
            of: vec![0; g.nodes().len()],
            why: BTreeMap::new(),
        }),
    }
}

/// Splits the model over the requested devices.
pub(super) fn split(s: &SplitArgs, a: &BackendArgs, first: &Backend, g: &Graph) -> Result<Split> {
    let x = assign(s, a, first, g)?;
    Split::new(&x.backends, g.clone(), &x.of, &x.why)
}

/// The devices' shares, the copies, and the ops that are not on the requested device.
pub(super) fn text(p: &Placement) -> String {
    let mut out = String::new();
    if let [one] = &p.devices[..] {
        // Writing to a string cannot fail.
        let _ = writeln!(
            out,
            "placement  {} ops on {}; {} to the device, {} back, estimated {}",
            one.ops,
            one.id,
            size(one.uploaded),
            size(one.downloaded),
            time(Duration::from_secs_f64(p.seconds()))
        );
        return out;
    }
    let _ = writeln!(
        out,
        "placement  {} segments; {} between devices per run, copies estimated at {}",
        p.segments,
        size(p.between()),
        time(Duration::from_secs_f64(p.seconds()))
    );
    let mut rows = vec![
        ["device", "ops", "MFLOP", "share", "constants", "uploaded", "downloaded", "received"]
            .map(String::from)
            .to_vec(),
    ];
    for d in &p.devices {
        rows.push(vec![
            d.id.clone(),
            d.ops.to_string(),
            format!("{:.1}", d.flops as f64 / 1e6),
            format!("{:.1} %", 100.0 * d.flops as f64 / p.flops().max(1) as f64),
            size(d.constants),
            size(d.uploaded),
            size(d.downloaded),
            size(d.received),
        ]);
    }
    out += &figures(rows, &[1, 2, 3, 4, 5, 6, 7]);
    let name = |d: Option<usize>| d.map_or("host", |i| p.devices[i].id.as_str());
    let copies: Vec<_> = p.copies.iter().filter(|c| c.from.is_some() && c.to.is_some()).collect();
    for c in copies.iter().take(ROWS) {
        let way = if c.direct { ", without the host" } else { "" };
        let (from, to) = (name(c.from), name(c.to));
        let _ = writeln!(out, "copy     {} from {from} to {to}: {}{way}", c.value, size(c.bytes));
    }
    if copies.len() > ROWS {
        let _ = writeln!(out, "         and {} more copies (--json has them)", copies.len() - ROWS);
    }
    let away: Vec<_> = p.ops.iter().filter(|o| o.reason.is_some()).collect();
    for o in away.iter().take(ROWS) {
        let why = o.reason.as_deref().unwrap_or("");
        let _ = writeln!(out, "elsewhere {} at {} on {}: {why}", o.op, o.at, p.devices[o.device].id);
    }
    if away.len() > ROWS {
        let _ = writeln!(out, "          and {} more ops (--json has them)", away.len() - ROWS);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_parse() {
        let p = parts("cpu=0.7, cl:1=0.3").unwrap();
        assert_eq!(p[0], DeviceShare { backend: BackendType::Cpu, device: None, share: Some(0.7) });
        assert_eq!(p[1], DeviceShare { backend: BackendType::OpenCl, device: Some(1), share: Some(0.3) });
        assert_eq!(parts("cpu,cl").unwrap()[1].share, None);
        for (text, part) in [
            ("cpu", "two devices"),
            ("cpu,auto", "names no backend"),
            ("cpu,opencl=x", "no number as its share"),
            ("cpu,opencl=-1", "not above 0"),
            ("cpu,opencl:x", "no device number"),
            ("cpu,opencll", "not a backend"),
        ] {
            let e = parts(text).unwrap_err();
            assert!(e.exit_code() == 2 && e.to_string().contains(part), "{text}: {e}");
        }
    }
}
