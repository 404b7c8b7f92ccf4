//! Drivers by backend. Adding one is adding a line to `built_in`; others are registered at run time.

use crate::{BackendType, Driver, Error, Result};
use std::sync::{Arc, LazyLock, RwLock};

static DRIVERS: LazyLock<RwLock<Vec<Arc<dyn Driver>>>> = LazyLock::new(|| RwLock::new(built_in()));

fn built_in() -> Vec<Arc<dyn Driver>> {
    vec![
        #[cfg(feature = "cpu")]
        Arc::new(crate::cpu::CpuDriver),
        #[cfg(all(feature = "opencl", not(target_arch = "wasm32")))]
        Arc::new(crate::opencl::OpenClDriver::ANY),
        #[cfg(all(feature = "opencl", not(target_arch = "wasm32")))]
        Arc::new(crate::opencl::OpenClDriver::INTEL),
        #[cfg(all(feature = "webgpu", not(target_arch = "wasm32")))]
        Arc::new(crate::webgpu::WebGpuDriver::ANY),
        #[cfg(all(feature = "webgpu", not(target_arch = "wasm32")))]
        Arc::new(crate::webgpu::WebGpuDriver::METAL),
        #[cfg(all(feature = "tpu", not(target_arch = "wasm32")))]
        Arc::new(crate::tpu::TpuDriver),
        Arc::new(crate::noop::NoopDriver),
    ]
}

/// All drivers of this build, in registration order.
pub fn drivers() -> Vec<Arc<dyn Driver>> {
    DRIVERS.read().unwrap_or_else(|e| e.into_inner()).clone()
}

/// Adds a driver, or replaces the one of its backend.
pub fn register(d: Arc<dyn Driver>) {
    let mut v = DRIVERS.write().unwrap_or_else(|e| e.into_inner());
    v.retain(|x| x.kind() != d.kind());
    v.push(d);
}

/// The driver of a backend; [`Error::Unavailable`] where this build has none.
pub fn driver(kind: BackendType) -> Result<Arc<dyn Driver>> {
    drivers().into_iter().find(|d| d.kind() == kind).ok_or_else(|| {
        let (reason, fix) = match kind {
            BackendType::Cpu => {
                ("this build has the feature \"cpu\" switched off", "Build with --features cpu")
            }
            BackendType::OpenCl | BackendType::Intel => {
                ("this build has the feature \"opencl\" switched off", "Build with --features opencl")
            }
            BackendType::Tpu => {
                ("this build has the feature \"tpu\" switched off", "Build with --features tpu")
            }
            BackendType::WebGpu | BackendType::Metal => {
                ("this build has the feature \"webgpu\" switched off", "Build with --features webgpu")
            }
            _ => ("this version has no driver for it yet", "Use --backend cpu or --backend opencl"),
        };
        Error::Unavailable {
            backend: kind.id().into(),
            tried: vec![],
            reason: reason.into(),
            fix: fix.into(),
        }
    })
}
