//! Renderers: kernel IR to source text.

pub mod c;
pub mod dialect;
mod helpers;
mod legalize;

pub use c::{render, to_batch};
pub use legalize::without_subgroups;

use serde::{Deserialize, Serialize};

/// A kernel language.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub enum Language {
    /// OpenCL C 1.2.
    OpenCl,
    /// CUDA C++ for NVRTC, no headers.
    Cuda,
    /// HIP C++ for hipRTC.
    Hip,
    /// Metal Shading Language 2.
    Metal,
}

impl Language {
    pub const ALL: [Language; 4] = [Language::OpenCl, Language::Cuda, Language::Hip, Language::Metal];

    /// Extension of a source file.
    pub fn extension(self) -> &'static str {
        match self {
            Language::OpenCl => "cl",
            Language::Cuda => "cu",
            Language::Hip => "hip",
            Language::Metal => "metal",
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Language::OpenCl => "OpenCL C",
            Language::Cuda => "CUDA C++",
            Language::Hip => "HIP C++",
            Language::Metal => "Metal",
        }
    }
}

/// Source text and, per kernel asked for, its entry point.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    pub text: String,
    pub entries: Vec<String>,
}
