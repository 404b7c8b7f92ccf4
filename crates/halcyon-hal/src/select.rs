//! Choosing a device, and saying why.

use crate::{BackendType, Device, DeviceInfo, Error, Options, Result, backend, registry};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::sync::Arc;

/// A backend or device that was looked at.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Candidate {
    pub backend: BackendType,
    /// Set where the backend has devices.
    pub device: Option<String>,
    pub name: Option<String>,
    pub priority: Option<u32>,
    /// The rule that rejected it; `None` for the chosen one.
    pub rejected: Option<String>,
}

/// Report of a choice: what was chosen, by which rule, and why nothing else was.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Selection {
    pub requested: BackendType,
    pub device: DeviceInfo,
    pub rule: String,
    pub candidates: Vec<Candidate>,
}

impl fmt::Display for Selection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({}): {}", self.device.id, self.device.name, self.rule)?;
        for c in self.candidates.iter().filter(|c| c.rejected.is_some()) {
            write!(
                f,
                "\n  not {}: {}",
                c.device.as_deref().unwrap_or(c.backend.id()),
                c.rejected.as_deref().unwrap_or("")
            )?;
        }
        Ok(())
    }
}

/// What a backend reports about itself.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct BackendReport {
    pub id: BackendType,
    pub available: bool,
    pub reason: Option<String>,
    pub devices: Vec<DeviceInfo>,
}

/// Every backend of the table with its devices, or the reason it has none.
pub fn discover() -> Vec<BackendReport> {
    backend::ROWS
        .iter()
        .filter(|r| r.priority.is_some())
        .map(|r| match registry::driver(r.backend).and_then(|d| d.probe()) {
            Ok(devices) => BackendReport {
                id: r.backend,
                available: !devices.is_empty(),
                reason: devices.is_empty().then(|| "the driver lists no device".into()),
                devices,
            },
            Err(e) => BackendReport {
                id: r.backend,
                available: false,
                reason: Some(e.to_string()),
                devices: vec![],
            },
        })
        .collect()
}

/// Opens the device asked for. An explicit backend is that backend or an error; `Auto` takes the highest priority that is
/// there, never a software GPU.
pub fn open(
    requested: BackendType,
    index: Option<usize>,
    options: &Options,
) -> Result<(Arc<dyn Device>, Selection)> {
    if requested != BackendType::Auto {
        let d = registry::driver(requested)?;
        let infos = d.probe()?;
        let i = index.unwrap_or(0);
        let info = infos.get(i).cloned().ok_or_else(|| Error::Unavailable {
            backend: requested.id().into(),
            tried: infos.iter().map(|d| format!("{} {}", d.id, d.name)).collect(),
            reason: format!("there is no device {i}"),
            fix: format!("Choose one of 0..{} with --device", infos.len()),
        })?;
        let rule = format!("{requested} was asked for");
        return Ok((d.open(i, options)?, Selection { requested, device: info, rule, candidates: vec![] }));
    }
    if index.is_some() {
        return Err(Error::argument("device", "a device number needs a backend; give --backend too"));
    }
    let mut rows: Vec<&backend::Row> = backend::ROWS.iter().filter(|r| r.priority.is_some()).collect();
    rows.sort_by_key(|r| std::cmp::Reverse(r.priority));
    let mut candidates = vec![];
    let mut chosen: Option<(Arc<dyn Device>, DeviceInfo, u32)> = None;
    for r in rows {
        let mut note = |device: Option<&DeviceInfo>, rejected: Option<String>| {
            candidates.push(Candidate {
                backend: r.backend,
                device: device.map(|d| d.id.clone()),
                name: device.map(|d| d.name.clone()),
                priority: r.priority,
                rejected,
            })
        };
        if let Some((_, d, p)) = &chosen {
            note(None, Some(format!("priority {} is below {}'s {p}", r.priority.unwrap_or(0), d.id)));
            continue;
        }
        let driver = match registry::driver(r.backend) {
            Ok(d) => d,
            Err(e) => {
                note(None, Some(e.to_string()));
                continue;
            }
        };
        match driver.probe() {
            Err(e) => note(None, Some(e.to_string())),
            Ok(infos) => {
                for info in infos {
                    if chosen.is_some() {
                        note(Some(&info), Some("an earlier device of this backend was chosen".into()));
                    } else if info.software {
                        note(
                            Some(&info),
                            Some(format!(
                                "{} runs on the CPU; a software device is used only when named",
                                info.name
                            )),
                        );
                    } else {
                        match driver.open(info.index, options) {
                            Ok(d) => {
                                note(Some(&info), None);
                                chosen = Some((d, info, r.priority.unwrap_or(0)));
                            }
                            Err(e) => note(Some(&info), Some(e.to_string())),
                        }
                    }
                }
            }
        }
    }
    match chosen {
        Some((d, device, p)) => {
            let rule = format!("highest priority ({p}) of the backends that are there");
            Ok((d, Selection { requested, device, rule, candidates }))
        }
        None => Err(Error::Unavailable {
            backend: "auto".into(),
            tried: candidates
                .iter()
                .map(|c| format!("{}: {}", c.backend, c.rejected.as_deref().unwrap_or("")))
                .collect(),
            reason: "no backend has a device".into(),
            fix: "Build with the feature \"cpu\", which needs nothing else".into(),
        }),
    }
}
