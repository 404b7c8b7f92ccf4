//! The CUDA and ROCm drivers over stand-ins for the vendors' libraries.

use halcyon_hal::simt::{Family, SimtDriver};
use halcyon_hal::{Driver, cuda, rocm};
use halcyon_test_host::standin::{self, CUDA, HIP, Kind};
use std::sync::{Arc, LazyLock};

pub type StandIn = standin::StandIn<SimtDriver>;

/// The ROCm family with a fixed architecture. The driver would look it up among the system's devices, which
/// do not include a stand-in's device.
static AMD: Family = Family { architecture: |_| HIP.amd.map(String::from), ..rocm::ROCM };

fn driver(kind: &Kind, path: &str) -> SimtDriver {
    let family = if kind.amd.is_some() { &AMD } else { &cuda::CUDA };
    // SAFETY: `path` is a stand-in, whose functions have the signatures of the vendor's library. The driver
    // never unloads it.
    unsafe { SimtDriver::over(family, path, path).with_kernels(path) }
}

/// Both stand-ins, or none if [`standin::folder`] returns `None`.
pub fn all() -> Vec<Arc<StandIn>> {
    static BUILT: LazyLock<Vec<Arc<StandIn>>> = LazyLock::new(|| {
        let Some(dir) = standin::folder() else { return vec![] };
        [&CUDA, &HIP].map(|kind| Arc::new(StandIn::new(kind, &dir, driver))).into()
    });
    for s in BUILT.iter() {
        s.driver.probe().expect("a stand-in has devices");
    }
    BUILT.clone()
}
