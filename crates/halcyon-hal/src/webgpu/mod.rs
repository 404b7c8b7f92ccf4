//! WebGPU through `wgpu`: Vulkan, Direct3D 12 and Metal. Kernels come through the IR as WGSL; there is no
//! vendor library.
//!
//! `wgpu` finds the system's libraries at run time, so a build needs none. Its calls report errors through
//! scopes, and one is open around every call made here ([`sys::scoped`]); what arrives outside of one (a lost
//! device) is kept and returned by the next call.

pub mod adapter;
mod budget;
pub mod device;
pub mod memory;
pub mod probe;
pub mod program;
pub mod queue;
mod stream;
pub mod sys;

pub use probe::LOOK;

use crate::{BackendType, Device, DeviceInfo, Driver, Options, Result, chatter, no_device};
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
        let mut all = self.list()?;
        // A look that is remembered tells what was free then.
        if all.iter().any(|d| !d.software && !d.unified_memory) {
            let _driver = chatter::capture(self.kind.id());
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
            // Part of the system, not a driver that somebody registered.
            return Ok(adapter::Adapter::all(self.kind)?.iter().map(|a| a.info()).collect());
        }
        let mut all = LOOK.devices()?;
        for d in &mut all {
            let here = d.software || d.unified_memory;
            d.free_memory = if here { crate::host_memory(d.total_memory) } else { None };
        }
        Ok(all)
    }

    fn open(&self, index: usize, options: &Options) -> Result<Arc<dyn Device>> {
        if self.kind != BackendType::Metal {
            LOOK.may_open(self.kind, index)?;
        }
        let _driver = chatter::capture(self.kind.id());
        let all = adapter::Adapter::all(self.kind)?;
        let a = all.get(index).ok_or_else(|| no_device(self.kind, index, all.iter().map(|a| a.info())))?;
        Ok(Arc::new(device::WebGpuDevice::open(a, options)?))
    }
}
