//! `Backend`: an open device.

use crate::calls::{Callback, Work};
use crate::errors::{OrRaise, argument};
use halcyon::hal::backend::DeviceName;
use halcyon::hal::select;
use halcyon::{AmpPolicy, Backend as Inner, Level};
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// An open device.
#[pyclass(frozen, module = "halcyon._native")]
pub(crate) struct Backend(pub(crate) Inner);

/// A serialisable value as Python's dictionaries, lists and numbers.
pub(crate) fn object<'py>(py: Python<'py>, value: &impl serde::Serialize) -> PyResult<Bound<'py, PyAny>> {
    let text = serde_json::to_string(value).map_err(|e| argument("report", e.to_string()))?;
    let _callback = Callback::begin(py);
    py.import("json")?.call_method1("loads", (text,))
}

/// A number that an argument gives.
fn not_negative<T: TryFrom<i64>>(name: &str, n: i64) -> PyResult<T> {
    T::try_from(n).map_err(|_| argument(name, format!("{n}: expected at least 0")))
}

#[pymethods]
impl Backend {
    /// Opens a device by name: `auto`, `cpu`, `cuda:0`, or a name that `devices()` lists.
    #[new]
    #[pyo3(signature = (name = "auto", *, threads = None, level = None, memory_limit = None, amp = None,
        profile = false))]
    fn new(
        py: Python<'_>,
        name: &str,
        threads: Option<i64>,
        level: Option<&str>,
        memory_limit: Option<i64>,
        amp: Option<&str>,
        profile: bool,
    ) -> PyResult<Backend> {
        let device: DeviceName = name.parse().or_raise()?;
        let mut b = Inner::builder().backend_type(device.backend).profile(profile);
        if let Some(i) = device.index {
            b = b.device(i);
        }
        if let Some(n) = threads {
            b = b.num_threads(not_negative("threads", n)?);
        }
        if let Some(l) = level {
            b = b.level(l.parse::<Level>().or_raise()?);
        }
        if let Some(bytes) = memory_limit {
            b = b.memory_limit(not_negative("memory_limit", bytes)?);
        }
        if let Some(p) = amp {
            b = b.amp(p.parse::<AmpPolicy>().or_raise()?);
        }
        py.work(|| b.build()).map(Backend)
    }

    /// The device's name, such as `cpu:0`.
    #[getter]
    fn id(&self) -> &str {
        self.0.id()
    }

    /// The backend's name, such as `cpu`.
    #[getter]
    fn kind(&self) -> &'static str {
        self.0.info().backend.id()
    }

    /// The level of optimisation, `O0` to `O3`.
    #[getter]
    fn level(&self) -> String {
        format!("{:?}", self.0.level())
    }

    /// The device's properties.
    #[getter]
    fn info<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        object(py, self.0.info())
    }

    /// The names of the element types that the device computes with.
    #[getter]
    fn supported_dtypes(&self) -> Vec<&'static str> {
        self.0.supported_dtypes().iter().map(|d| d.name()).collect()
    }

    /// The report of the selection: every candidate, and the rule that rejected it.
    #[getter]
    fn selection(&self) -> String {
        self.0.selection().to_string()
    }

    /// Options without effect on this device.
    #[getter]
    fn warnings(&self) -> Vec<String> {
        self.0.warnings().to_vec()
    }

    /// Memory in bytes: allocated, reserved, peaks and limits.
    fn memory<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let m = self.0.memory();
        let d = PyDict::new(py);
        d.set_item("allocated", m.allocated)?;
        d.set_item("peak_allocated", m.peak)?;
        d.set_item("reserved", m.reserved)?;
        d.set_item("peak_reserved", m.peak_reserved)?;
        d.set_item("cached", m.cached)?;
        d.set_item("limit", m.limit)?;
        d.set_item("allocations", m.allocations)?;
        d.set_item("frees", m.frees)?;
        Ok(d)
    }

    /// Launches, copies and compilations since the device was opened.
    fn counters<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        object(py, &self.0.counters())
    }

    /// Waits for all submitted work.
    fn synchronize(&self, py: Python<'_>) -> PyResult<()> {
        py.work(|| self.0.synchronize())
    }

    /// Returns cached memory to the driver. Returns the number of bytes.
    fn empty_cache(&self, py: Python<'_>) -> PyResult<u64> {
        py.work(|| Ok(self.0.empty_cache()))
    }

    /// Sets the seed of the random numbers that follow.
    fn manual_seed(&self, seed: u64) {
        self.0.manual_seed(seed);
    }

    /// The next seed; every call gives another one.
    fn next_seed(&self) -> u64 {
        self.0.next_seed()
    }

    /// Whether both are the same open device.
    fn is_same(&self, other: &Backend) -> bool {
        self.0.is_same(&other.0)
    }

    /// The backend and the number in a device's name, without opening the device.
    #[staticmethod]
    fn parse(name: &str) -> PyResult<(&'static str, Option<usize>)> {
        let device: DeviceName = name.parse().or_raise()?;
        Ok((device.backend.id(), device.index))
    }

    fn __repr__(&self) -> String {
        format!("Backend({}, {})", self.0.id(), self.0.info().name)
    }
}

/// The backends of the machine with their devices, or the reason why a backend has none.
#[pyfunction]
pub(crate) fn devices(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
    let all = py.work(|| Ok(select::discover()))?;
    object(py, &all)
}
