//! Shared by the driver tests: the test devices of this machine.
#![allow(unreachable_pub, reason = "public for the test files that include this one")]
#![allow(dead_code, unused_imports)]

use halcyon_hal::backend::TestDevice;
pub use halcyon_hal::conformance::DeviceUnderTest;
pub use halcyon_hal::conformance::kernels::*;
use halcyon_hal::registry;
use halcyon_test_host::required;

#[cfg(all(unix, feature = "cuda", feature = "rocm"))]
pub mod standin;

/// Every driver of this build that has a device, and the CUDA and ROCm drivers over stand-ins. The table of
/// backends states which drivers may be missing ([`TestDevice`]).
pub fn devices_under_test() -> Vec<DeviceUnderTest> {
    let mut out = vec![];
    for driver in registry::drivers() {
        let kind = driver.kind();
        match DeviceUnderTest::new(driver) {
            Ok(under_test) => out.push(under_test),
            Err(e) => {
                let must = match kind.built_in().map(|b| b.test) {
                    Some(TestDevice::Always) => true,
                    Some(TestDevice::Installed(_) | TestDevice::System) => required(),
                    Some(TestDevice::StandIn | TestDevice::Hardware) | None => false,
                };
                assert!(!must, "{kind} must be here: {e}");
                eprintln!("skipped on {kind}: {e}");
            }
        }
    }
    #[cfg(all(unix, feature = "cuda", feature = "rocm"))]
    out.extend(standin::all().iter().map(|s| DeviceUnderTest::new(s.driver.clone()).unwrap()));
    out
}
