//! Names of backends: one enum, parsed from every alias in use. Backends of drivers registered at run time
//! ([`crate::registry::register`]) bring their own names.

use crate::{Error, Result, registry};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum BackendType {
    Auto,
    Cuda,
    Rocm,
    Metal,
    Tpu,
    Intel,
    OpenCl,
    WebGpu,
    Cpu,
    /// Allocates and validates but computes nothing; used only when named.
    Noop,
    /// A backend of a registered driver, which provides the row. Its names can be parsed while the driver is
    /// registered.
    Other(&'static Row),
}

/// Id, vendor, priority under the default policy, and aliases.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Row {
    /// Lower-case letters, digits, `-` and `_`, as in `cuda`.
    pub id: &'static str,
    /// Display name: `CUDA`.
    pub title: &'static str,
    pub vendor: &'static str,
    /// Higher is tried first; `None`: never chosen automatically.
    pub priority: Option<u32>,
    pub aliases: &'static [&'static str],
}

/// The backends known to this crate, whether or not this build has their drivers.
pub const BUILT_IN: &[(BackendType, Row)] = &[
    (BackendType::Auto, Row { id: "auto", title: "Auto", vendor: "", priority: None, aliases: &[] }),
    (
        BackendType::Cuda,
        Row { id: "cuda", title: "CUDA", vendor: "nvidia", priority: Some(100), aliases: &["nvidia"] },
    ),
    (
        BackendType::Rocm,
        Row { id: "rocm", title: "ROCm", vendor: "amd", priority: Some(90), aliases: &["amd", "hip"] },
    ),
    (
        BackendType::Metal,
        Row { id: "metal", title: "Metal", vendor: "apple", priority: Some(88), aliases: &["mps"] },
    ),
    (
        BackendType::Tpu,
        Row { id: "tpu", title: "TPU", vendor: "google", priority: Some(85), aliases: &["xla"] },
    ),
    (
        BackendType::Intel,
        Row { id: "intel", title: "Intel", vendor: "intel", priority: Some(80), aliases: &["xpu", "oneapi"] },
    ),
    (
        BackendType::OpenCl,
        Row { id: "opencl", title: "OpenCL", vendor: "opencl", priority: Some(60), aliases: &["cl"] },
    ),
    (
        BackendType::WebGpu,
        Row {
            id: "webgpu",
            title: "WebGPU",
            vendor: "webgpu",
            priority: Some(50),
            aliases: &["wgpu", "vulkan"],
        },
    ),
    (BackendType::Cpu, Row { id: "cpu", title: "CPU", vendor: "cpu", priority: Some(0), aliases: &["host"] }),
    (BackendType::Noop, Row { id: "noop", title: "Noop", vendor: "", priority: None, aliases: &[] }),
];

/// The backends that may have devices: those of `BUILT_IN` except `auto` and `noop`, and those of
/// registered drivers.
pub fn all() -> Vec<BackendType> {
    let planned =
        BUILT_IN.iter().map(|(b, _)| *b).filter(|b| !matches!(b, BackendType::Auto | BackendType::Noop));
    planned.chain(others()).collect()
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
            // Every other variant has a row; a test below checks this.
            b => BUILT_IN.iter().find(|(x, _)| *x == b).map_or(&BUILT_IN[0].1, |(_, row)| row),
        }
    }

    pub fn id(self) -> &'static str {
        self.row().id
    }

    pub fn vendor(self) -> &'static str {
        self.row().vendor
    }

    /// PyTorch's name for this kind of device; ROCm is `cuda` too.
    pub fn torch_name(self) -> Option<&'static str> {
        match self {
            BackendType::Cuda | BackendType::Rocm => Some("cuda"),
            BackendType::Metal => Some("mps"),
            BackendType::Tpu => Some("xla"),
            BackendType::Intel => Some("xpu"),
            BackendType::Cpu => Some("cpu"),
            _ => None,
        }
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
        let known: Vec<BackendType> = BUILT_IN.iter().map(|(b, _)| *b).chain(others()).collect();
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
    const ELSEWHERE: &[(&[&str], &str)] = &[
        (&["gpu", "accelerator", "dgpu", "igpu"], "auto, the default, takes the first GPU that is there"),
        (&["tensorrt", "trt", "nvtensorrtrtx", "cudnn"], "for NVIDIA's GPUs it is cuda"),
        (&["migraphx", "radeon"], "for AMD's GPUs it is rocm"),
        (&["coreml", "ane", "apple", "m1"], "for Apple's GPUs it is metal"),
        (&["dml", "directml", "dx12", "d3d12", "directx", "webnn"], "Direct3D 12 is reached by webgpu"),
        (&["openvino", "dnnl", "onednn", "xnnpack", "x86", "arm", "simd"], "for processors it is cpu"),
        (&["npu", "qnn"], "there is none for NPUs"),
    ];
    let name = name.strip_suffix("executionprovider").unwrap_or(name);
    if let Some(b) = BUILT_IN.iter().find(|(_, r)| r.names().any(|n| n == name)) {
        return format!("it is called {} here; ", b.1.id);
    }
    let row = ELSEWHERE.iter().find(|(names, _)| names.contains(&name));
    row.map_or(String::new(), |(_, what)| format!("{what}; "))
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
        let index = number.trim().parse().map_err(|_| bad("has no number of a device behind the colon"))?;
        match backend {
            BackendType::Auto => Err(bad("has a number, and auto is no one backend")),
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
    fn every_backend_has_a_row_and_its_names_parse() {
        use BackendType::*;
        for b in [Auto, Cuda, Rocm, Metal, Tpu, Intel, OpenCl, WebGpu, Cpu, Noop] {
            let rows: Vec<_> = BUILT_IN.iter().filter(|(x, _)| *x == b).collect();
            assert_eq!(rows.len(), 1, "{b:?}");
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
