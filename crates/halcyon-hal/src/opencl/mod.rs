//! OpenCL 1.2 and later, loaded at run time. Kernels come through the IR; there is no vendor library.
//!
//! A registered driver (ICD) that is broken can end the process that looks for devices. A program that has an executable to
//! spare for it sets [`set_probe_executable`], and the first look is then made by a child; see [`probe_via_child`].

pub mod adapter;
pub mod device;
pub mod memory;
pub mod probe;
pub mod program;
pub mod queue;
pub mod sys;

pub use probe::{
    PROBE_CHILD_VARIABLE, probe_in_process, probe_report, probe_via_child, set_probe_executable,
};

use crate::{BackendType, Device, DeviceInfo, Driver, Error, Options, Result};
use std::sync::Arc;

/// The OpenCL driver.
#[derive(Debug)]
pub struct OpenClDriver;

impl Driver for OpenClDriver {
    fn kind(&self) -> BackendType {
        BackendType::OpenCl
    }

    fn probe(&self) -> Result<Vec<DeviceInfo>> {
        probe::probe()
    }

    fn open(&self, index: usize, options: &Options) -> Result<Arc<dyn Device>> {
        let all = adapter::Adapter::all(sys::load()?)?;
        let a = all.get(index).copied().ok_or_else(|| Error::Unavailable {
            backend: "opencl".into(),
            tried: all.iter().map(|a| format!("{} {}", a.id(), a.info().name)).collect(),
            reason: format!("there is no device {index}"),
            fix: format!("Choose one of 0..{}", all.len()),
        })?;
        Ok(Arc::new(device::OpenClDevice::open(a, options)?))
    }
}
