//! Shared by the driver tests: the test devices of this machine.
#![allow(dead_code, unused_imports)]

pub use halcyon_hal::conformance::Lane;
pub use halcyon_hal::conformance::kernels::*;
use halcyon_hal::{BackendType, registry};

#[cfg(all(unix, feature = "cuda", feature = "rocm"))]
pub mod standin;

/// Every driver of this build that has a device, and the CUDA and ROCm drivers over stand-ins. OpenCL and
/// WebGPU may be missing unless HALCYON_REQUIRE_LANES=1.
pub fn lanes() -> Vec<Lane> {
    let mut out = vec![];
    for driver in registry::drivers() {
        let kind = driver.kind();
        match Lane::new(driver) {
            Ok(lane) => out.push(lane),
            Err(e) => {
                let always = [BackendType::Cpu, BackendType::Noop];
                assert!(!always.contains(&kind), "{kind} must always be there: {e}");
                // CI has implementations of these. Others need the hardware, and Metal also the system.
                let lane = [BackendType::OpenCl, BackendType::WebGpu].contains(&kind)
                    || (kind == BackendType::Metal && cfg!(target_vendor = "apple"));
                assert!(!lane || std::env::var("HALCYON_REQUIRE_LANES").as_deref() != Ok("1"), "{e}");
                eprintln!("skipped on {kind}: {e}");
            }
        }
    }
    #[cfg(all(unix, feature = "cuda", feature = "rocm"))]
    out.extend(standin::all().iter().map(|s| Lane::new(s.driver.clone()).unwrap()));
    out
}
