//! Renderers: kernel IR to source text.

pub mod c;
pub mod dialect;
mod helpers;
mod legalize;
pub mod wgsl;

pub use legalize::without_subgroups;

pub use dialect::{MATRIX_CUDA, MATRIX_HIP};

use crate::error::Result;
use crate::kernel::Kernel;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;

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
    /// WebGPU Shading Language; 64-bit types as naga spells them.
    Wgsl,
}

impl Language {
    pub const ALL: [Language; 5] =
        [Language::OpenCl, Language::Cuda, Language::Hip, Language::Metal, Language::Wgsl];

    /// Extension of a source file.
    pub fn extension(self) -> &'static str {
        match self {
            Language::OpenCl => "cl",
            Language::Cuda => "cu",
            Language::Hip => "hip",
            Language::Metal => "metal",
            Language::Wgsl => "wgsl",
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Language::OpenCl => "OpenCL C",
            Language::Cuda => "CUDA C++",
            Language::Hip => "HIP C++",
            Language::Metal => "Metal",
            Language::Wgsl => "WGSL",
        }
    }
}

/// Source text and, per kernel asked for, its entry point.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    pub text: String,
    pub entries: Vec<String>,
}

/// Renders one verified kernel; its entry point has the kernel's name (in WGSL after `k_`).
///
/// # Errors
/// [`crate::Error::Unsupported`] for what the language cannot say (f64 in Metal, products of matrices outside
/// of CUDA and HIP).
pub fn render(k: &Kernel, language: Language) -> Result<Source> {
    batch(&[(k, k.name.clone())], language)
}

/// What an entry point reads from a buffer of arguments instead of getting it with the launch, so that a
/// launch that was recorded can run again with other values. Each takes a word of eight bytes there, in this
/// order: the fault word's address, then the parameters.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct Indirect {
    /// The address of the fault word, which is the kernel's last buffer.
    pub fault: bool,
    /// Numbers of parameters, rising.
    pub params: Vec<usize>,
}

/// Renders one verified kernel whose entry point gets, behind its other arguments, the address of its words
/// in a buffer of arguments.
///
/// # Errors
/// As [`render`]; [`crate::Error::Unsupported`] for languages without addresses of 64 bits as arguments.
pub fn render_indirect(k: &Kernel, language: Language, indirect: &Indirect) -> Result<Source> {
    match dialect::Dialect::of(language).filter(|d| !d.arguments.is_empty()) {
        Some(d) => c::batch(&[(k, k.name.clone())], d, Some(indirect)),
        None => Err(crate::Error::unsupported(
            format!("arguments in a buffer in {} (kernel {})", language.name(), k.name),
            "Launch the kernel with its arguments",
        )),
    }
}

/// Renders many kernels into one source: equal kernels once, helpers once. Entry `i` of the result belongs to
/// kernel `i`.
///
/// # Errors
/// As [`render`].
pub fn to_batch(kernels: &[&Kernel], language: Language) -> Result<Source> {
    let mut seen: HashMap<u128, usize> = HashMap::new();
    let mut unique = vec![];
    let mut places = vec![];
    for k in kernels {
        places.push(*seen.entry(k.key()).or_insert_with(|| {
            unique.push((*k, format!("{}_{}", k.name, unique.len())));
            unique.len() - 1
        }));
    }
    let s = batch(&unique, language)?;
    Ok(Source { entries: places.into_iter().map(|i| s.entries[i].clone()).collect(), text: s.text })
}

fn batch(kernels: &[(&Kernel, String)], language: Language) -> Result<Source> {
    match dialect::Dialect::of(language) {
        Some(d) => c::batch(kernels, d, None),
        None => wgsl::batch(kernels, &wgsl::Options::default()),
    }
}

/// Names of the helpers (`h_…`) that a text calls.
fn calls(text: &str) -> impl Iterator<Item = &str> {
    let ident = |c: u8| c.is_ascii_alphanumeric() || c == b'_';
    let bytes = text.as_bytes();
    text.match_indices("h_").filter_map(move |(start, _)| {
        let end = start + bytes[start..].iter().take_while(|&&c| ident(c)).count();
        let whole = start == 0 || !ident(bytes[start - 1]);
        (whole && bytes.get(end) == Some(&b'(')).then(|| &text[start..end])
    })
}
