//! CUDA and ROCm drivers over stand-ins for the vendors' libraries.

use halcyon_hal::simt::{Family, SimtDriver};
use halcyon_hal::{Driver, cuda, rocm};
use halcyon_test_host::standin::{self, CUDA, HIP, HIP_WAVES_OF_32, Kind, OLDER_CUDA, folder};
use std::path::Path;
use std::sync::{Arc, LazyLock};

pub type StandIn = standin::StandIn<SimtDriver>;

/// The ROCm family with a fixed architecture. The driver would read it from the system's list of devices,
/// which does not contain the device of a stand-in.
fn amd(architecture: fn(&halcyon_hal::simt::adapter::Adapter) -> Option<String>) -> &'static Family {
    Box::leak(Box::new(Family { architecture, ..rocm::ROCM }))
}

fn driver(kind: &Kind, path: &str) -> SimtDriver {
    let family = match kind.amd {
        None => &cuda::CUDA,
        Some("gfx90a") => amd(|_| Some("gfx90a".into())),
        Some(_) => amd(|_| Some("gfx1100".into())),
    };
    // SAFETY: `path` is a stand-in, whose functions have the vendor's signatures. `StandIn` has loaded it and
    // never unloads it.
    unsafe { SimtDriver::over(family, path, path).with_kernels(path) }
}

fn load(kind: &'static Kind, dir: &Path) -> StandIn {
    let s = StandIn::new(kind, dir, driver);
    s.driver.probe().unwrap();
    s
}

/// The stand-ins for CUDA and HIP, or none if they cannot be built.
pub fn all() -> Vec<Arc<StandIn>> {
    static BUILT: LazyLock<Vec<Arc<StandIn>>> = LazyLock::new(|| {
        let Some(dir) = folder() else { return vec![] };
        [&CUDA, &HIP].map(|kind| Arc::new(load(kind, &dir))).into()
    });
    BUILT.clone()
}

/// The stand-in for an AMD GPU with waves of 32 work-items; `None` if it cannot be built.
pub fn waves_of_32() -> Option<Arc<StandIn>> {
    static BUILT: LazyLock<Option<Arc<StandIn>>> =
        LazyLock::new(|| folder().map(|dir| Arc::new(load(&HIP_WAVES_OF_32, &dir))));
    BUILT.clone()
}

/// A stand-in for a libcuda without support for graphs. Only call this if [`all`] is not empty.
pub fn older() -> StandIn {
    load(&OLDER_CUDA, &standin::dir())
}

/// A copy of a stand-in with separate state. `name` is its file name in a directory of this process.
pub fn copy(s: &StandIn, name: &str) -> StandIn {
    s.copy(name, driver)
}
