//! WebGPU through `wgpu`: Vulkan, Direct3D 12 and Metal. Kernels come through the IR as WGSL; there is no vendor library.
//!
//! `wgpu` finds the system's libraries at run time, so a build needs none. Its calls report errors through scopes, and one is open around
//! every call made here ([`sys::scoped`]); what arrives outside of one (a lost device) is kept and returned by the next call.

pub mod adapter;
pub mod device;
pub mod memory;
pub mod probe;
pub mod program;
pub mod queue;
mod stream;
pub mod sys;

pub use probe::LOOK;

use crate::{BackendType, Device, DeviceInfo, Driver, Error, Options, Result};
use std::sync::Arc;

/// The driver of one backend that `wgpu` reaches.
#[derive(Debug)]
pub struct WebGpuDriver {
    kind: BackendType,
}

impl WebGpuDriver {
    /// Whatever adapters there are.
    pub const ANY: WebGpuDriver = WebGpuDriver { kind: BackendType::WebGpu };
    /// Apple's devices, under their own name.
    pub const METAL: WebGpuDriver = WebGpuDriver { kind: BackendType::Metal };
}

impl Driver for WebGpuDriver {
    fn kind(&self) -> BackendType {
        self.kind
    }

    fn probe(&self) -> Result<Vec<DeviceInfo>> {
        if self.kind == BackendType::Metal {
            // Part of the system, not a driver that somebody registered.
            return Ok(adapter::Adapter::all(self.kind)?.iter().map(|a| a.info()).collect());
        }
        let mut all = LOOK.devices()?;
        // A device that is remembered has the memory that is there now.
        for d in all.iter_mut().filter(|d| d.software) {
            (d.free_memory, d.total_memory) = halcyon_ir::host::memory().unzip();
        }
        Ok(all)
    }

    fn open(&self, index: usize, options: &Options) -> Result<Arc<dyn Device>> {
        let all = adapter::Adapter::all(self.kind)?;
        let a = all.get(index).ok_or_else(|| Error::Unavailable {
            backend: self.kind.id().into(),
            tried: all.iter().map(|a| format!("{} {}", a.id(), a.info().name)).collect(),
            reason: format!("there is no device {index}"),
            fix: format!("Choose one of 0..{}", all.len()),
        })?;
        Ok(Arc::new(device::WebGpuDevice::open(a, options)?))
    }
}
