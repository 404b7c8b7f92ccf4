//! The probe for OpenCL devices, which [`crate::probe`] runs.

use super::{adapter::Adapter, sys};
use crate::probe::{ProbeDependencies, ProbeSpec, State, entries};
use crate::{BackendType, DeviceInfo, Result};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// The probe for the devices of the OpenCL library.
pub static PROBE: ProbeSpec = ProbeSpec {
    backend: BackendType::OpenCl,
    list: list_devices,
    repeat: true,
    depends,
    fix: "Remove the broken driver (on Linux: the files in /etc/OpenCL/vendors), or set OCL_ICD_VENDORS to a working driver",
    state: Mutex::new(State::new()),
};

fn list_devices() -> Result<Vec<DeviceInfo>> {
    Ok(Adapter::all(sys::load()?)?.iter().map(|a| a.info()).collect())
}

fn depends(root: &Path) -> ProbeDependencies {
    let mut vendors = vec![root.join("etc/OpenCL/vendors")];
    for name in ["OCL_ICD_VENDORS", "OPENCL_VENDOR_PATH"] {
        vendors.extend(std::env::var_os(name).map(PathBuf::from));
    }
    let registered = |file: PathBuf| {
        let driver = std::fs::read_to_string(&file).unwrap_or_default();
        (file, Some(PathBuf::from(driver.trim())))
    };
    ProbeDependencies {
        libraries: sys::candidates(),
        later: vec![],
        manifests: vendors.iter().flat_map(|dir| entries(dir)).map(registered).collect(),
        variables: &["OCL_", "OPENCL_", "POCL_", "CUDA_", "NVIDIA_", "HIP_", "ROCR_", "GPU_"],
    }
}
