//! The code shared by the CUDA and ROCm drivers. HIP is CUDA's driver API under other names, so there is one
//! driver with a table of both sets of names (`sys.rs`). A [`Family`] holds the names, libraries, numbers and
//! compiler flags of CUDA or of ROCm.
//!
//! Kernels come from the kernel IR, rendered to CUDA C++ or HIP C++ without headers and compiled at run time
//! (NVRTC, hipRTC), or from vendor libraries (`library`). Binaries are cached on disk.

// Hidden modules are public for tests; they are not part of the driver contract.
#[doc(hidden)]
pub mod adapter;
mod capture;
mod device;
mod library;
mod memory;
mod peer;
#[doc(hidden)]
pub mod program;
mod queue;
mod stream;
mod sys;
mod toolchain;

use crate::probe::ProbeSpec;
use crate::{BackendType, Device, DeviceInfo, Driver, Options, Result, driver_output, no_device};
use halcyon_ir::kernel::MatrixOp;
use halcyon_ir::render::Language;
use std::sync::Arc;
pub use sys::Side;

/// The numbers that CUDA or HIP gives to attributes of devices.
#[derive(Clone, Copy, Debug)]
pub struct Attributes {
    pub max_workgroup: i32,
    pub workgroup_memory: i32,
    pub subgroup: i32,
    pub clock_khz: i32,
    pub concurrent: i32,
    pub compute_units: i32,
    pub integrated: i32,
    pub memory_clock_khz: i32,
    pub memory_bits: i32,
    pub l2_bytes: i32,
    pub major: i32,
    pub minor: i32,
}

/// An optional vendor library.
#[derive(Clone, Copy, Debug)]
pub struct VendorLibrary {
    /// The vendor's spelling: `cuBLASLt`.
    pub title: &'static str,
    pub names: &'static [&'static str],
    /// The environment variable that names the only library to try.
    pub variable: &'static str,
    /// Directories below Python's package directories.
    pub packages: &'static [&'static str],
    /// Whether the number in the library's file name is a major version of CUDA, so that the names are tried
    /// in an order that fits the driver's version.
    pub with_driver: bool,
    pub fix: &'static str,
}

/// CUDA or ROCm.
#[derive(Clone, Copy, Debug)]
pub struct Family {
    pub kind: BackendType,
    pub side: Side,
    pub title: &'static str,
    /// The software that the user must install: "NVIDIA driver".
    pub runtime: &'static str,
    pub vendor: &'static str,
    pub language: Language,
    /// The library of CUDA or HIP: its file names, and the environment variable that names the only library
    /// to try.
    pub libraries: &'static [&'static str],
    pub library_variable: &'static str,
    pub fix: &'static str,
    /// What the user can do if the library loads but finds no device.
    pub no_device: &'static str,
    /// The run-time compiler: its file names, and the environment variable that names the only library to
    /// try.
    pub compilers: &'static [&'static str],
    pub compiler_variable: &'static str,
    pub compiler_fix: &'static str,
    /// Where the toolkit may be: environment variables that name its directory, its default directories, and
    /// its directories in Python packages.
    pub toolkit_variables: &'static [&'static str],
    pub toolkits: &'static [&'static str],
    pub packages: &'static [&'static str],
    pub attributes: Attributes,
    /// The library for products with a choice of algorithms and with epilogues.
    pub products: VendorLibrary,
    /// The library for products without a choice of algorithms and without epilogues.
    pub plain_products: Option<VendorLibrary>,
    /// The library for convolutions and attention.
    pub convolutions: Option<VendorLibrary>,
    /// The compiler's name of a device's architecture: `sm_90`, `gfx90a`.
    pub architecture: fn(&adapter::Adapter) -> Option<String>,
    /// The compiler's flags for an architecture; `None` if the architecture must be known but is not.
    pub flags: fn(Option<&str>) -> Option<Vec<String>>,
    /// The operations of an architecture's matrix units.
    pub matrix: fn(Option<&str>) -> Vec<MatrixOp>,
    /// The 16-bit and 8-bit float arithmetic of a device of this compute capability and architecture.
    pub halves: fn(Option<(u32, u32)>, Option<&str>) -> Halves,
    pub probe: &'static ProbeSpec,
}

/// A device's arithmetic in 16-bit and 8-bit floats.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Halves {
    /// Whether the device computes in `f16`.
    pub f16: bool,
    /// Products of 8-bit floats; `None` if the architecture is unknown.
    pub f8: Option<bool>,
}

/// The driver of one family.
#[derive(Debug)]
pub struct SimtDriver {
    family: &'static Family,
    /// Set by tests: the library of CUDA or HIP, and the compilers to choose from.
    libraries: Option<(String, Vec<String>)>,
    /// Set by tests: one library with the functions of all vendor libraries.
    kernels: Option<String>,
}

impl SimtDriver {
    pub(crate) const fn new(family: &'static Family) -> SimtDriver {
        SimtDriver { family, libraries: None, kernels: None }
    }

    /// A driver that uses exactly these libraries and no vendor kernels.
    ///
    /// # Safety
    /// Loading `runtime` and `compiler`, and unloading them again if they lack a function, must be sound, now
    /// and whenever the driver is used. If they have a function of CUDA, of HIP or of the compiler, the
    /// function must have the type that the vendor declares.
    pub unsafe fn over(family: &'static Family, runtime: &str, compiler: &str) -> SimtDriver {
        SimtDriver { family, libraries: Some((runtime.into(), vec![compiler.into()])), kernels: None }
    }

    /// Like `SimtDriver::over`, with these compilers to choose from.
    ///
    /// # Safety
    /// The contract of [`SimtDriver::over`], for each of the compilers.
    pub unsafe fn with_compilers(self, compilers: &[&str]) -> SimtDriver {
        let libraries = self.libraries.map(|l| (l.0, compilers.iter().map(|c| c.to_string()).collect()));
        SimtDriver { libraries, ..self }
    }

    /// Like `SimtDriver::over`, with the vendor kernels of this library.
    ///
    /// # Safety
    /// The contract of [`SimtDriver::over`], for the functions of all vendor libraries of the family.
    pub unsafe fn with_kernels(self, library: &str) -> SimtDriver {
        SimtDriver { kernels: Some(library.into()), ..self }
    }

    /// Where to search for vendor libraries.
    fn sources(&self) -> library::Sources {
        match (&self.kernels, &self.libraries) {
            (Some(path), _) => library::Sources::Named(path.clone()),
            (None, Some(_)) => library::Sources::None,
            (None, None) => library::Sources::System,
        }
    }

    fn adapters(&self) -> Result<Vec<adapter::Adapter>> {
        let names = self.libraries.as_ref().map_or_else(|| self.family.candidates(), |l| vec![l.0.clone()]);
        // SAFETY: each name is a name of the vendor's library, or one that the user set in its place, or it
        // comes from `over`, which requires that loading the library is sound.
        adapter::Adapter::all(unsafe { self.family.load(&names) }?)
    }
}

impl Driver for SimtDriver {
    fn kind(&self) -> BackendType {
        self.family.kind
    }

    fn probe(&self) -> Result<Vec<DeviceInfo>> {
        let mut all = self.list()?;
        // The list has no free memory, so the devices are queried for it. `list` succeeded, so the library
        // can be loaded.
        let _driver = driver_output::capture(self.family.kind.id());
        for a in self.adapters().unwrap_or_default() {
            // Querying free memory creates a context, as opening the device does. `may_open` first tries this
            // in a child process.
            let may =
                self.libraries.is_some() || self.family.probe.may_open(self.family.kind, a.index).is_ok();
            if let Some(d) = all.iter_mut().find(|d| may && d.index == a.index) {
                d.free_memory = a.free_memory();
            }
        }
        Ok(all)
    }

    fn list(&self) -> Result<Vec<DeviceInfo>> {
        match &self.libraries {
            None => self.family.probe.devices(),
            Some(_) => Ok(self.adapters()?.iter().map(adapter::Adapter::info).collect()),
        }
    }

    fn open(&self, index: usize, options: &Options) -> Result<Arc<dyn Device>> {
        if self.libraries.is_none() {
            self.family.probe.may_open(self.family.kind, index)?;
        }
        let _driver = driver_output::capture(self.family.kind.id());
        let all = self.adapters()?;
        let a = all
            .get(index)
            .ok_or_else(|| no_device(self.family.kind, index, all.iter().map(adapter::Adapter::info)))?;
        // A device without a compiler could build no kernels, so opening it fails, and automatic selection
        // tries the next device.
        let compilers =
            self.libraries.as_ref().map_or_else(|| self.family.compiler_candidates(), |l| l.1.clone());
        // SAFETY: each name is a name of a vendor's library, or one that the user set in its place, or it
        // comes from `over`, `with_compilers` or `with_kernels`, which require that loading the library is
        // sound.
        let device = unsafe { device::SimtDevice::open(a, &compilers, self.sources(), options) }?;
        Ok(Arc::new(device))
    }
}
