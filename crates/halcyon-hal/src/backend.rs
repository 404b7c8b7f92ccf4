//! The table of backends, and the enum [`BackendType`], which is parsed from their names and aliases.
//! Backends of drivers registered at run time ([`crate::registry::register`]) bring their own names.

#[cfg(not(target_arch = "wasm32"))]
use crate::probe::ProbeSpec;
use crate::{Driver, Error, Result, registry};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

/// Names and priority of a backend.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Row {
    /// Lower-case letters, digits, `-` and `_`, as in `cuda`.
    pub id: &'static str,
    /// Display name: `CUDA`.
    pub title: &'static str,
    pub vendor: &'static str,
    /// Automatic selection tries backends with a higher priority first, and never chooses a backend with
    /// `None`.
    pub priority: Option<u32>,
    pub aliases: &'static [&'static str],
}

/// PyTorch's name for a kind of device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Torch {
    /// Devices have numbers: `cuda:0`.
    Numbered(&'static str),
    /// There is one device: `mps`.
    Single(&'static str),
}

/// How tests get a device of a backend.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TestDevice {
    /// Every machine has a device of this backend.
    Always,
    /// Test machines install a software implementation of this name. With `HALCYON_REQUIRE_ALL=1` tests fail
    /// without it.
    Installed(&'static str),
    /// The operating system includes the driver. With `HALCYON_REQUIRE_ALL=1` the conformance suite fails
    /// without it.
    System,
    /// The tests build a stand-in for the vendor's library (`halcyon_test_host::standin`), and the driver
    /// loads it.
    StandIn,
    /// Tests need the hardware itself. They are skipped if the machine has none.
    Hardware,
}

/// A backend of this crate: a row of the table below.
#[derive(Debug)]
pub struct BuiltIn {
    pub kind: BackendType,
    pub row: Row,
    pub torch: Option<Torch>,
    /// Names that other projects use for this kind of device, and the hint that the error for such a name
    /// gives.
    pub elsewhere: Option<(&'static [&'static str], &'static str)>,
    /// The Cargo feature that adds the driver; `None` if every build has the driver, or no build has it.
    pub feature: Option<&'static str>,
    /// What to do if this build has no driver.
    pub fix: &'static str,
    pub test: TestDevice,
    /// The environment variables that name the vendor's kernel libraries; empty if the vendor has none.
    pub libraries: &'static [&'static str],
    /// Whether all its devices launch recorded commands with one call ([`crate::Device::capture`]). Some
    /// OpenCL devices do.
    pub captures: bool,
    /// Whether `fma` in its kernels rounds once. WGSL guarantees only the accuracy of `x * y + z`.
    pub exact_fma: bool,
    /// The driver; `None` if this build has none.
    pub driver: fn() -> Option<Arc<dyn Driver>>,
    /// The probe that a child process makes; `None` if the backend is not probed in children, or shares the
    /// probe of another backend.
    #[cfg(not(target_arch = "wasm32"))]
    pub probe: fn() -> Option<&'static ProbeSpec>,
}

/// The defaults of the fields that a row of the table leaves out.
const PLAIN: BuiltIn = BuiltIn {
    kind: BackendType::Auto,
    row: Row { id: "", title: "", vendor: "", priority: None, aliases: &[] },
    torch: None,
    elsewhere: None,
    feature: None,
    fix: "Choose another backend",
    test: TestDevice::Hardware,
    libraries: &[],
    captures: false,
    exact_fma: true,
    driver: || None,
    #[cfg(not(target_arch = "wasm32"))]
    probe: || None,
};

/// Makes [`BackendType`] and [`BUILT_IN`] from one table. A row is `Variant { fields of BuiltIn }`. If the
/// backend has a driver, one of these follows and defines the builds that have it:
/// - `, native "FEATURE" => DRIVER, probe PROBE`: builds with the feature, except for wasm32, which cannot
///   load libraries;
/// - `, portable "FEATURE" => DRIVER`: builds with the feature;
/// - `, always => DRIVER`: all builds.
macro_rules! backends {
    ($(
        $(#[$doc:meta])*
        $kind:ident { $($field:ident: $value:expr),* $(,)? }
        $(, native $native:literal => $loaded:expr $(, probe $probe:expr)?)?
        $(, portable $portable:literal => $compiled:expr)?
        $(, always => $always:expr)?;
    )*) => {
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
        #[serde(into = "String", try_from = "String")]
        pub enum BackendType {
            $($(#[$doc])* $kind,)*
            /// A backend of a registered driver, which provides the row. Its names can be parsed while the
            /// driver is registered.
            Other(&'static Row),
        }

        /// The backends known to this crate, whether or not this build has their drivers.
        // A row may give every field.
        #[allow(clippy::needless_update)]
        pub static BUILT_IN: &[BuiltIn] = &[$(BuiltIn {
            kind: BackendType::$kind,
            $($field: $value,)*
            $(
                feature: Some($native),
                driver: || vec![
                    #[cfg(all(feature = $native, not(target_arch = "wasm32")))]
                    (Arc::new($loaded) as Arc<dyn Driver>)
                ].pop(),
                $(
                    #[cfg(not(target_arch = "wasm32"))]
                    probe: || vec![#[cfg(feature = $native)] (&$probe as &'static ProbeSpec)].pop(),
                )?
            )?
            $(
                feature: Some($portable),
                driver: || vec![#[cfg(feature = $portable)] (Arc::new($compiled) as Arc<dyn Driver>)].pop(),
            )?
            $(driver: || Some(Arc::new($always) as Arc<dyn Driver>),)?
            ..PLAIN
        }),*];
    };
}

backends! {
    /// The best backend that has a device.
    Auto {
        row: Row { id: "auto", title: "Auto", vendor: "", priority: None, aliases: &[] },
        elsewhere: Some((
            &["gpu", "accelerator", "dgpu", "igpu"],
            "auto, the default, takes the first GPU that is present",
        )),
    };
    /// NVIDIA's GPUs.
    Cuda {
        row: Row { id: "cuda", title: "CUDA", vendor: "nvidia", priority: Some(100), aliases: &["nvidia"] },
        torch: Some(Torch::Numbered("cuda")),
        elsewhere: Some((&["tensorrt", "trt", "nvtensorrtrtx", "cudnn"], "for NVIDIA's GPUs it is cuda")),
        fix: "Build with --features cuda",
        test: TestDevice::StandIn,
        libraries: &["HALCYON_CUBLASLT_LIBRARY", "HALCYON_CUDNN_LIBRARY"],
        captures: true,
    }, native "cuda" => crate::cuda::DRIVER, probe crate::cuda::PROBE;
    /// AMD's GPUs.
    Rocm {
        row: Row { id: "rocm", title: "ROCm", vendor: "amd", priority: Some(90), aliases: &["amd", "hip"] },
        torch: Some(Torch::Numbered("cuda")),
        elsewhere: Some((&["migraphx", "radeon"], "for AMD's GPUs it is rocm")),
        fix: "Build with --features rocm",
        test: TestDevice::StandIn,
        libraries: &["HALCYON_HIPBLASLT_LIBRARY", "HALCYON_ROCBLAS_LIBRARY"],
        captures: true,
    }, native "rocm" => crate::rocm::DRIVER, probe crate::rocm::PROBE;
    /// Apple's GPUs, through the WebGPU driver.
    Metal {
        row: Row { id: "metal", title: "Metal", vendor: "apple", priority: Some(88), aliases: &["mps"] },
        torch: Some(Torch::Single("mps")),
        elsewhere: Some((&["coreml", "ane", "apple", "m1"], "for Apple's GPUs it is metal")),
        fix: "Build with --features webgpu",
        test: if cfg!(target_vendor = "apple") { TestDevice::System } else { TestDevice::Hardware },
        exact_fma: false,
    }, native "webgpu" => crate::webgpu::WebGpuDriver::METAL;
    /// Google's tensor processing units.
    Tpu {
        row: Row { id: "tpu", title: "TPU", vendor: "google", priority: Some(85), aliases: &["xla"] },
        torch: Some(Torch::Numbered("xla")),
        fix: "Build with --features tpu",
    }, native "tpu" => crate::tpu::TpuDriver, probe crate::tpu::PROBE;
    /// Intel's GPUs and accelerators, through the OpenCL driver.
    Intel {
        row: Row { id: "intel", title: "Intel", vendor: "intel", priority: Some(80), aliases: &["xpu", "oneapi"] },
        torch: Some(Torch::Numbered("xpu")),
        fix: "Build with --features opencl",
    }, native "opencl" => crate::opencl::OpenClDriver::INTEL;
    /// Every OpenCL device.
    OpenCl {
        row: Row { id: "opencl", title: "OpenCL", vendor: "opencl", priority: Some(60), aliases: &["cl"] },
        fix: "Build with --features opencl",
        test: TestDevice::Installed("PoCL"),
    }, native "opencl" => crate::opencl::OpenClDriver::ANY, probe crate::opencl::PROBE;
    /// GPUs through Vulkan, Direct3D 12 or Metal.
    WebGpu {
        row: Row { id: "webgpu", title: "WebGPU", vendor: "webgpu", priority: Some(50), aliases: &["wgpu", "vulkan"] },
        elsewhere: Some((
            &["dml", "directml", "dx12", "d3d12", "directx", "webnn"],
            "Direct3D 12 is reached by webgpu",
        )),
        fix: "Build with --features webgpu",
        test: TestDevice::Installed("lavapipe"),
        exact_fma: false,
    }, native "webgpu" => crate::webgpu::WebGpuDriver::ANY, probe crate::webgpu::PROBE;
    /// The processor.
    Cpu {
        row: Row { id: "cpu", title: "CPU", vendor: "cpu", priority: Some(0), aliases: &["host"] },
        torch: Some(Torch::Single("cpu")),
        elsewhere: Some((
            &["openvino", "dnnl", "onednn", "xnnpack", "x86", "arm", "simd"],
            "for processors it is cpu",
        )),
        fix: "Build with --features cpu",
        test: TestDevice::Always,
    }, portable "cpu" => crate::cpu::CpuDriver;
    /// Allocates and validates but computes nothing; used only when named.
    Noop {
        row: Row { id: "noop", title: "Noop", vendor: "", priority: None, aliases: &[] },
        test: TestDevice::Always,
    }, always => crate::noop::NoopDriver;
}

/// The backends that may have devices: those of `BUILT_IN` except `auto` and `noop`, and those of
/// registered drivers.
pub fn all() -> Vec<BackendType> {
    let planned = kinds().filter(|b| !matches!(b, BackendType::Auto | BackendType::Noop));
    planned.chain(others()).collect()
}

/// The backends of [`BUILT_IN`].
pub(crate) fn kinds() -> impl Iterator<Item = BackendType> {
    BUILT_IN.iter().map(|b| b.kind)
}

/// The backends of registered drivers.
fn others() -> impl Iterator<Item = BackendType> {
    registry::drivers().into_iter().map(|d| d.kind()).filter(|k| matches!(k, BackendType::Other(_)))
}

impl Row {
    /// Id and aliases.
    pub fn names(&self) -> impl Iterator<Item = &'static str> + use<> {
        std::iter::once(self.id).chain(self.aliases.iter().copied())
    }
}

impl BackendType {
    pub fn row(self) -> &'static Row {
        match self {
            BackendType::Other(row) => row,
            // The table has a row for every other variant.
            b => b.built_in().map_or(&BUILT_IN[0].row, |b| &b.row),
        }
    }

    /// The backend's row of [`BUILT_IN`]; `None` for a backend of a registered driver.
    pub fn built_in(self) -> Option<&'static BuiltIn> {
        BUILT_IN.iter().find(|b| b.kind == self)
    }

    pub fn id(self) -> &'static str {
        self.row().id
    }

    pub fn vendor(self) -> &'static str {
        self.row().vendor
    }

    /// PyTorch's name for this kind of device; ROCm is `cuda` too.
    pub fn torch_name(self) -> Option<&'static str> {
        self.torch().map(|(Torch::Numbered(name) | Torch::Single(name))| name)
    }

    /// [`BackendType::torch_name`], and whether PyTorch numbers the devices.
    pub fn torch(self) -> Option<Torch> {
        self.built_in().and_then(|b| b.torch)
    }

    /// Display name: `OpenCL`.
    pub fn title(self) -> &'static str {
        self.row().title
    }
}

impl fmt::Display for BackendType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.id())
    }
}

impl FromStr for BackendType {
    type Err = Error;
    /// Any name of a built-in or registered backend, case-insensitive.
    fn from_str(s: &str) -> Result<BackendType> {
        let l = s.trim().to_ascii_lowercase();
        let known: Vec<BackendType> = kinds().chain(others()).collect();
        known.iter().find(|b| b.row().names().any(|n| n == l)).copied().ok_or_else(|| {
            let names: Vec<&str> = known.iter().flat_map(|b| b.row().names()).collect();
            Error::argument(
                "backend",
                format!("\"{s}\" is not a backend; {}valid names are {}", meant(&l), names.join(", ")),
            )
        })
    }
}

/// A hint for a name used by other projects: the start of a sentence, or empty.
fn meant(name: &str) -> String {
    const NONE: (&[&str], &str) = (&["npu", "qnn"], "there is none for NPUs");
    let name = name.strip_suffix("executionprovider").unwrap_or(name);
    if let Some(b) = BUILT_IN.iter().find(|b| b.row.names().any(|n| n == name)) {
        return format!("it is called {} here; ", b.row.id);
    }
    let mut hints = BUILT_IN.iter().filter_map(|b| b.elsewhere).chain([NONE]);
    hints.find(|(names, _)| names.contains(&name)).map_or(String::new(), |(_, what)| format!("{what}; "))
}

impl From<BackendType> for String {
    fn from(b: BackendType) -> String {
        b.id().into()
    }
}

impl TryFrom<String> for BackendType {
    type Error = Error;
    fn try_from(s: String) -> Result<BackendType> {
        s.parse()
    }
}

/// Any name of a backend, optionally followed by a device index: `cuda`, `cuda:1`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DeviceName {
    pub backend: BackendType,
    pub index: Option<usize>,
}

impl FromStr for DeviceName {
    type Err = Error;
    fn from_str(s: &str) -> Result<DeviceName> {
        let Some((name, number)) = s.split_once(':') else {
            return Ok(DeviceName { backend: s.parse()?, index: None });
        };
        let backend: BackendType = name.parse()?;
        let bad = |what: &str| Error::argument("backend", format!("\"{s}\" {what}; write cuda or cuda:1"));
        let index = number.trim().parse().map_err(|_| bad("has no device number after the colon"))?;
        match backend {
            BackendType::Auto => Err(bad("has a device number, but auto can be any backend")),
            _ => Ok(DeviceName { backend, index: Some(index) }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_named_by_backend_and_number() {
        let is = |s: &str| s.parse::<DeviceName>().map(|d| (d.backend, d.index));
        assert_eq!(is("cuda").unwrap(), (BackendType::Cuda, None));
        assert_eq!(is("NVIDIA: 1").unwrap(), (BackendType::Cuda, Some(1)));
        assert_eq!(is("auto").unwrap(), (BackendType::Auto, None));
        for bad in ["cuda:", "cuda:x", "cuda:-1", "cuda:0:1", "auto:0", ":0", "cudda:0"] {
            assert_eq!(is(bad).unwrap_err().exit_code(), 2, "{bad}");
        }
    }

    #[test]
    fn names_of_every_row_parse_and_belong_to_it() {
        for b in kinds() {
            for n in b.row().names() {
                assert_eq!(n.to_uppercase().parse::<BackendType>().unwrap(), b);
            }
            let text = serde_json::to_string(&b).unwrap();
            assert_eq!(text, format!("\"{b}\""));
            assert_eq!(serde_json::from_str::<BackendType>(&text).unwrap(), b);
        }
        let e = "cudaa".parse::<BackendType>().unwrap_err();
        assert!(e.to_string().contains("rocm") && e.exit_code() == 2, "{e}");
    }
}
