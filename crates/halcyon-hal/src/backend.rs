//! Names of backends: one enum, parsed from every alias in use.

use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
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
    /// Allocates and validates, computes nothing; only when named.
    Noop,
}

/// Id, vendor, priority under the default policy, and aliases.
#[derive(Debug)]
pub struct Row {
    pub backend: BackendType,
    pub id: &'static str,
    pub vendor: &'static str,
    /// Higher is tried first; `None` is never chosen automatically.
    pub priority: Option<u32>,
    pub aliases: &'static [&'static str],
}

pub const ROWS: &[Row] = &[
    Row { backend: BackendType::Auto, id: "auto", vendor: "", priority: None, aliases: &[] },
    Row {
        backend: BackendType::Cuda,
        id: "cuda",
        vendor: "nvidia",
        priority: Some(100),
        aliases: &["nvidia"],
    },
    Row {
        backend: BackendType::Rocm,
        id: "rocm",
        vendor: "amd",
        priority: Some(90),
        aliases: &["amd", "hip"],
    },
    Row { backend: BackendType::Metal, id: "metal", vendor: "apple", priority: Some(88), aliases: &["mps"] },
    Row { backend: BackendType::Tpu, id: "tpu", vendor: "google", priority: Some(85), aliases: &["xla"] },
    Row {
        backend: BackendType::Intel,
        id: "intel",
        vendor: "intel",
        priority: Some(80),
        aliases: &["xpu", "oneapi"],
    },
    Row {
        backend: BackendType::OpenCl,
        id: "opencl",
        vendor: "opencl",
        priority: Some(60),
        aliases: &["cl"],
    },
    Row {
        backend: BackendType::WebGpu,
        id: "webgpu",
        vendor: "webgpu",
        priority: Some(50),
        aliases: &["wgpu", "vulkan"],
    },
    Row { backend: BackendType::Cpu, id: "cpu", vendor: "cpu", priority: Some(0), aliases: &["host"] },
    Row { backend: BackendType::Noop, id: "noop", vendor: "", priority: None, aliases: &[] },
];

impl BackendType {
    pub fn row(self) -> &'static Row {
        &ROWS[self as usize]
    }

    pub fn id(self) -> &'static str {
        self.row().id
    }

    pub fn vendor(self) -> &'static str {
        self.row().vendor
    }
}

impl fmt::Display for BackendType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.id())
    }
}

impl FromStr for BackendType {
    type Err = Error;
    fn from_str(s: &str) -> Result<BackendType> {
        let l = s.trim().to_ascii_lowercase();
        ROWS.iter().find(|r| r.id == l || r.aliases.contains(&l.as_str())).map(|r| r.backend).ok_or_else(
            || {
                let names: Vec<&str> = ROWS
                    .iter()
                    .flat_map(|r| std::iter::once(r.id).chain(r.aliases.iter().copied()))
                    .collect();
                Error::argument(
                    "backend",
                    format!("\"{s}\" is not a backend; valid names are {}", names.join(", ")),
                )
            },
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_in_enum_order_and_names_parse() {
        for (i, r) in ROWS.iter().enumerate() {
            assert_eq!(r.backend as usize, i);
            for n in r.aliases.iter().chain([&r.id]) {
                assert_eq!(n.to_uppercase().parse::<BackendType>().unwrap(), r.backend);
            }
        }
        let e = "cudaa".parse::<BackendType>().unwrap_err();
        assert!(e.to_string().contains("rocm") && e.exit_code() == 2, "{e}");
    }
}
