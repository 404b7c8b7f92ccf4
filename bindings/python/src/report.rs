//! Reports: the devices of the machine, a selection, and the findings of `doctor`.

use crate::backend::{Backend, object};
use crate::calls::Work;
use crate::errors::{OrRaise, argument};
use halcyon::doctor::Status;
use halcyon::hal::backend::{self, DeviceName};
use halcyon::hal::policy::{Fallback, Policy};
use halcyon::hal::{probe, select};
use halcyon::{Backend as Inner, BackendType, summary};
use halcyon_cli::{Program, Section};
use pyo3::prelude::*;
use serde_json::json;
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

/// The backends of the machine with their devices, or the reasons why a backend has none; the backend that
/// `auto` would choose; and both as text. With `refresh`, the results of earlier probes are discarded.
#[pyfunction]
pub(crate) fn discover(py: Python<'_>, refresh: bool) -> PyResult<Bound<'_, PyAny>> {
    let all = py.work(|| {
        if refresh {
            probe::forget();
        }
        Ok(select::discover())
    })?;
    let recommended = summary::recommended(&all).map(BackendType::id);
    object(py, &json!({ "backends": all, "recommended": recommended, "text": summary::summary(&all) }))
}

/// Selects and opens a device.
#[pyfunction]
#[pyo3(signature = (name, policy, fallback, memory))]
pub(crate) fn select_backend(
    py: Python<'_>,
    name: &str,
    policy: Option<&str>,
    fallback: Option<&str>,
    memory: u64,
) -> PyResult<Backend> {
    let device: DeviceName = name.parse().or_raise()?;
    let mut b = Inner::builder().backend_type(device.backend).memory_needed(memory);
    if let Some(i) = device.index {
        b = b.device(i);
    }
    if let Some(p) = policy {
        b = b.policy(p.parse::<Policy>().or_raise()?);
    }
    if let Some(f) = fallback {
        b = b.fallback(f.parse::<Fallback>().or_raise()?);
    }
    py.work(|| b.build()).map(Backend)
}

/// The report of a backend's selection.
#[pyfunction]
pub(crate) fn selection<'py>(py: Python<'py>, backend: &Backend) -> PyResult<Bound<'py, PyAny>> {
    object(py, backend.0.selection())
}

/// The names of the backends that `doctor` examines: the one that is asked for, or all.
#[pyfunction]
#[pyo3(signature = (name = None))]
pub(crate) fn doctor_backends(name: Option<&str>) -> PyResult<Vec<&'static str>> {
    let asked: Option<BackendType> = name.map(str::parse).transpose().or_raise()?;
    Ok(match asked {
        None | Some(BackendType::Auto) => backend::all().into_iter().map(BackendType::id).collect(),
        Some(kind) => vec![kind.id()],
    })
}

fn with_text<'py>(py: Python<'py>, s: &Section) -> PyResult<Bound<'py, PyAny>> {
    object(py, &json!({ "section": s, "text": s.to_string() }))
}

/// The section of `doctor` about the machine. Discards the results of earlier probes.
#[pyfunction]
pub(crate) fn doctor_host(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
    let section = py.work(|| {
        // Drivers that crashed or hung are examined again.
        probe::forget();
        Ok(Section::host())
    })?;
    with_text(py, &section)
}

/// The section of `doctor` about a backend, which a child process examines for at most `limit` seconds.
#[pyfunction]
pub(crate) fn doctor_section<'py>(
    py: Python<'py>,
    name: &str,
    limit: u64,
    program: (PathBuf, Vec<OsString>),
) -> PyResult<Bound<'py, PyAny>> {
    let kind: BackendType = name.parse().or_raise()?;
    let program = Program { executable: program.0, arguments: program.1 };
    let section = py.work(|| Section::of(kind, Duration::from_secs(limit), &program))?;
    with_text(py, &section)
}

/// The exit code of `halcyon doctor` for sections of these statuses; `asked`: the last one was asked for.
#[pyfunction]
pub(crate) fn doctor_verdict(statuses: Vec<String>, asked: bool) -> PyResult<u8> {
    let read = |s: &String| {
        serde_json::from_value::<Status>(json!(s)).map_err(|e| argument("doctor", e.to_string()))
    };
    let statuses = statuses.iter().map(read).collect::<PyResult<Vec<Status>>>()?;
    Ok(halcyon_cli::doctor_verdict(&statuses, asked))
}
