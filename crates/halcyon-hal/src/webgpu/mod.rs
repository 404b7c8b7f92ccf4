//! WebGPU through `wgpu`, on Vulkan, Direct3D 12 and Metal. All kernels come from the kernel IR as WGSL; no
//! vendor library is used.
//!
//! `wgpu` loads the system's libraries at run time, so a build needs none. It reports errors through error
//! scopes. This driver opens a scope around each of its calls ([`sys::scoped`]). Errors outside of a scope (a
//! lost device) are kept, and the next call returns them.

// The hidden modules define types that public traits use. They are not part of the driver contract.
#[doc(hidden)]
pub mod adapter;
mod budget;
#[doc(hidden)]
pub mod device;
#[doc(hidden)]
pub mod memory;
#[doc(hidden)]
pub mod probe;
#[doc(hidden)]
pub mod program;
#[doc(hidden)]
pub mod queue;
mod stream;
#[doc(hidden)]
pub mod sys;

pub use probe::PROBE;

use crate::{BackendType, Device, DeviceInfo, Driver, Options, Result, driver_output, no_device};
use std::sync::Arc;

/// The driver of one backend that uses `wgpu`.
#[derive(Debug)]
pub struct WebGpuDriver {
    kind: BackendType,
}

impl WebGpuDriver {
    /// The driver of all adapters.
    pub const ANY: WebGpuDriver = WebGpuDriver { kind: BackendType::WebGpu };
    /// The driver of Apple's devices as a separate backend.
    pub const METAL: WebGpuDriver = WebGpuDriver { kind: BackendType::Metal };
}

impl Driver for WebGpuDriver {
    fn kind(&self) -> BackendType {
        self.kind
    }

    fn probe(&self) -> Result<Vec<DeviceInfo>> {
        let mut all = self.list()?;
        // The free memory in a stored probe is outdated.
        if all.iter().any(|d| !d.software && !d.unified_memory) {
            let _driver = driver_output::capture(self.kind.id());
            for a in adapter::Adapter::all(self.kind)? {
                if let Some(d) = all.iter_mut().find(|d| d.index == a.index) {
                    d.free_memory = a.free_memory();
                }
            }
        }
        Ok(all)
    }

    fn list(&self) -> Result<Vec<DeviceInfo>> {
        if self.kind == BackendType::Metal {
            // Metal is part of the system, so it is not probed in a child as third-party drivers are.
            return Ok(adapter::Adapter::all(self.kind)?.iter().map(|a| a.info()).collect());
        }
        let mut all = PROBE.devices()?;
        for d in &mut all {
            let here = d.software || d.unified_memory;
            d.free_memory = if here { crate::host_memory(d.total_memory) } else { None };
        }
        Ok(all)
    }

    fn open(&self, index: usize, options: &Options) -> Result<Arc<dyn Device>> {
        if self.kind != BackendType::Metal {
            PROBE.may_open(self.kind, index)?;
        }
        let _driver = driver_output::capture(self.kind.id());
        let all = adapter::Adapter::all(self.kind)?;
        let a = all.get(index).ok_or_else(|| no_device(self.kind, index, all.iter().map(|a| a.info())))?;
        Ok(Arc::new(device::WebGpuDevice::open(a, options)?))
    }
}
