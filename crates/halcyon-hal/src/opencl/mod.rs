//! OpenCL 1.2 and later, loaded at run time. All kernels come from the kernel IR; no vendor library is used.
//!
//! A broken driver (ICD) can crash a process that lists devices, so [`crate::probe`] first lists them in a
//! child process.

mod adapter;
mod capture;
mod command_buffer;
mod device;
mod memory;
mod probe;
mod program;
mod queue;
mod stream;
mod sys;

pub use probe::PROBE;

use crate::{BackendType, Device, DeviceInfo, Driver, Error, Options, Result, driver_output, no_device};
use std::sync::Arc;

/// The OpenCL driver, as one of the two backends that use it.
#[derive(Debug)]
pub struct OpenClDriver {
    kind: BackendType,
}

impl OpenClDriver {
    /// Every device of the library.
    pub const ANY: OpenClDriver = OpenClDriver { kind: BackendType::OpenCl };
    /// Intel's GPUs and accelerators as a separate backend. They are also listed as OpenCL devices.
    pub const INTEL: OpenClDriver = OpenClDriver { kind: BackendType::Intel };

    fn lists(&self, d: &DeviceInfo) -> bool {
        // The device of Intel's driver for CPUs has the same vendor name, but it is a software device.
        self.kind == BackendType::OpenCl || (!d.software && d.vendor.to_ascii_lowercase().contains("intel"))
    }

    /// The devices that belong to this backend, with this backend's name and their indices in it.
    fn devices_of_backend(&self, all: Vec<DeviceInfo>) -> Result<Vec<DeviceInfo>> {
        let others: Vec<String> = all.iter().map(|d| format!("{} {}", d.id, d.name)).collect();
        let mut own: Vec<DeviceInfo> = all.into_iter().filter(|d| self.lists(d)).collect();
        for (index, d) in own.iter_mut().enumerate() {
            d.backend = self.kind;
            d.index = index;
            d.id = format!("{}:{index}", self.kind);
        }
        match own.is_empty() {
            true => Err(Error::Unavailable {
                backend: self.kind.id().into(),
                tried: others,
                reason: "the OpenCL library lists no graphics processor or accelerator of Intel's".into(),
                fix: "Install Intel's compute runtime for OpenCL (on Debian: intel-opencl-icd)".into(),
            }),
            false => Ok(own),
        }
    }

    /// Replaces the backend's name in an error.
    fn with_backend_name(&self, e: Error) -> Error {
        match e {
            Error::Unavailable { tried, reason, fix, .. } => {
                Error::Unavailable { backend: self.kind.id().into(), tried, reason, fix }
            }
            e => e,
        }
    }
}

impl Driver for OpenClDriver {
    fn kind(&self) -> BackendType {
        self.kind
    }

    fn probe(&self) -> Result<Vec<DeviceInfo>> {
        let mut all = PROBE.devices().map_err(|e| self.with_backend_name(e))?;
        // The free memory in a stored probe is outdated, so it is queried again. The library is loaded for
        // this only if a device has its own memory and AMD's extension, which reports how much is free.
        let mut now = None;
        for d in &mut all {
            let amd = d.properties.get("extensions").is_some_and(|e| e.contains(sys::AMD_ATTRIBUTES));
            d.free_memory = match (d.software || d.unified_memory, amd) {
                (true, _) => crate::host_memory(d.total_memory),
                (false, true) => {
                    let all = || sys::load().and_then(adapter::Adapter::all).unwrap_or_default();
                    now.get_or_insert_with(all).get(d.index).and_then(adapter::Adapter::free_memory)
                }
                (false, false) => None,
            };
        }
        self.devices_of_backend(all)
    }

    fn open(&self, index: usize, options: &Options) -> Result<Arc<dyn Device>> {
        PROBE.may_open(self.kind, index).map_err(|e| self.with_backend_name(e))?;
        let _driver = driver_output::capture(PROBE.backend.id());
        let all = sys::load().and_then(adapter::Adapter::all).map_err(|e| self.with_backend_name(e))?;
        // Querying a device's properties takes many calls. The backend that lists every device does not need
        // the properties here, so it skips the query.
        let all_of_them = self.kind == BackendType::OpenCl;
        let own: Vec<adapter::Adapter> =
            all.into_iter().filter(|a| all_of_them || self.lists(&a.info())).collect();
        let a = own.get(index).copied();
        let a = a.ok_or_else(|| no_device(self.kind, index, own.iter().map(|a| a.info())))?;
        let a = adapter::Adapter { backend: self.kind, index, ..a };
        Ok(Arc::new(device::OpenClDevice::open(a, options)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intel_lists_only_accelerators_of_intel() {
        let like = crate::noop::NoopDriver.probe().unwrap().remove(0);
        let device = |index: usize, vendor: &str, software| DeviceInfo {
            backend: BackendType::OpenCl,
            id: format!("opencl:{index}"),
            index,
            vendor: vendor.into(),
            software,
            ..like.clone()
        };
        let all = vec![
            device(0, "The pocl project", true),
            device(1, "Intel(R) Corporation", true),
            device(2, "NVIDIA Corporation", false),
            device(3, "Intel(R) Corporation", false),
        ];
        let own = OpenClDriver::INTEL.devices_of_backend(all.clone()).unwrap();
        let ids: Vec<(&str, usize, BackendType)> =
            own.iter().map(|d| (d.id.as_str(), d.index, d.backend)).collect();
        assert_eq!(ids, [("intel:0", 0, BackendType::Intel)]);
        assert_eq!(OpenClDriver::ANY.devices_of_backend(all.clone()).unwrap(), all);
        let e = OpenClDriver::INTEL.devices_of_backend(all[..3].to_vec()).unwrap_err();
        assert_eq!(e.exit_code(), 4);
        assert!(
            e.to_string().starts_with("intel is not available") && e.to_string().contains("opencl:2"),
            "{e}"
        );
    }

    #[test]
    fn intel_is_present_if_opencl_lists_it() {
        match (OpenClDriver::ANY.probe(), OpenClDriver::INTEL.probe()) {
            (Ok(all), Ok(own)) => assert!(own.len() <= all.len()),
            (Ok(all), Err(e)) => {
                assert!(!all.iter().any(|d| OpenClDriver::INTEL.lists(d)), "{e}");
                assert_eq!(OpenClDriver::INTEL.open(0, &Options::default()).unwrap_err().exit_code(), 4);
            }
            (Err(a), Err(b)) => {
                assert!(a.to_string().contains("opencl") && b.to_string().starts_with("intel"), "{b}")
            }
            (Err(a), Ok(own)) => panic!("{a}: {own:?}"),
        }
    }
}
