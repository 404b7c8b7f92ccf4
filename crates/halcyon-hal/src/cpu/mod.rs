//! The CPU backend: library kernels, an executor that runs fused kernels block by block, and the interpreter
//! of kernel IR for the rest.

// Hidden modules are public for benchmarks and tests; they are not part of the driver contract.
#[doc(hidden)]
pub mod amx;
#[doc(hidden)]
pub mod chain;
mod device;
pub mod isa;
#[doc(hidden)]
pub mod library;
pub(crate) mod memory;
#[doc(hidden)]
pub mod peak;
mod program;
mod stream;
#[doc(hidden)]
pub mod sys;
#[doc(hidden)]
pub mod team;
mod tracker;
#[doc(hidden)]
pub mod vmath;
#[cfg(target_arch = "x86_64")]
mod vmath512;

pub use device::CpuDevice;

use crate::{BackendType, Device, DeviceInfo, Driver, Error, Options, Result};
use std::sync::Arc;

/// Whether the fastest instruction for convolutions of bytes on the CPU device adds two products in 16 bits
/// and saturates. This is so with AVX2, and with AVX-512 without AVX512_VNNI. Kernels use the instruction
/// only if no sum can saturate, as with weights of 7 bits. For other weights they widen the bytes to 16 bits,
/// which is exact but slower.
pub fn saturates_bytes() -> bool {
    let best = sys::Isa::best();
    best != sys::Isa::Portable && !best.has_vnni()
}

/// The driver of the host processor, which is always present.
#[derive(Clone, Copy, Debug, Default)]
pub struct CpuDriver;

impl Driver for CpuDriver {
    fn kind(&self) -> BackendType {
        BackendType::Cpu
    }

    fn probe(&self) -> Result<Vec<DeviceInfo>> {
        isa::limit()?;
        Ok(vec![device::describe()])
    }

    fn open(&self, index: usize, options: &Options) -> Result<Arc<dyn Device>> {
        if index != 0 {
            return Err(Error::Unavailable {
                backend: "cpu".into(),
                tried: vec!["cpu:0".into()],
                reason: format!("there is no device {index}"),
                fix: "Use device 0, which is the whole machine".into(),
            });
        }
        isa::limit()?;
        let missing = |feature: &str, what: &str| {
            Err(Error::unsupported(
                format!("{what} on the CPU in a build without the feature \"{feature}\""),
                format!("Build with --features {feature}"),
            ))
        };
        if options.threads.is_some_and(|n| n > 1) && !cfg!(feature = "parallel") {
            return missing("parallel", "more than one thread");
        }
        if options.simd == Some(true) && !cfg!(feature = "simd") {
            return missing("simd", "instruction sets beyond the target's baseline");
        }
        Ok(Arc::new(CpuDevice::new(options)?))
    }
}
