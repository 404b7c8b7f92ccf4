//! Renderers: translate kernel IR to source text.

pub mod c;
pub mod dialect;
mod functions;
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
    /// CUDA C++ for NVRTC, without headers.
    Cuda,
    /// HIP C++ for hipRTC.
    Hip,
    /// Metal Shading Language 2.
    Metal,
    /// WebGPU Shading Language. 64-bit types are spelled as in naga.
    Wgsl,
}

impl Language {
    pub const ALL: [Language; 5] =
        [Language::OpenCl, Language::Cuda, Language::Hip, Language::Metal, Language::Wgsl];

    /// File extension of the source.
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

/// Source text, and the entry point of each kernel that was passed in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    pub text: String,
    pub entries: Vec<String>,
}

/// Renders one verified kernel. Its entry point has the kernel's name (in WGSL with the prefix `k_`).
///
/// # Errors
/// [`crate::Error::Unsupported`] if the language cannot express the kernel: f64 in Metal, matrix products
/// outside of CUDA and HIP, several parts in WGSL.
pub fn render(k: &Kernel, language: Language) -> Result<Source> {
    batch(&[(k, k.name.clone())], language)
}

/// The values that an entry point reads from an argument buffer instead of from the launch, so that a
/// captured launch can run again with other values. Each value takes a word of eight bytes, in this order:
/// the fault word's address, then the parameters.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct Indirect {
    /// Whether the address of the fault word is read. The fault word is the kernel's last buffer.
    pub fault: bool,
    /// Indexes of the parameters, in increasing order.
    pub params: Vec<usize>,
}

/// Renders one verified kernel whose entry point takes the address of its words in an argument buffer as its
/// last argument.
///
/// # Errors
/// The errors of [`render`]. [`crate::Error::Unsupported`] for languages without argument buffers, and for
/// the fault word in OpenCL C, which cannot read a buffer's address from a buffer.
pub fn render_indirect(k: &Kernel, language: Language, indirect: &Indirect) -> Result<Source> {
    let refused = |what: &str| {
        Err(crate::Error::unsupported(
            format!("{what} in {} (kernel {})", language.name(), k.name),
            "Launch the kernel with its arguments",
        ))
    };
    match dialect::Dialect::of(language).filter(|d| !d.arguments.is_empty()) {
        // In a language with address spaces, a buffer can only be an argument of the launch.
        Some(d) if indirect.fault && !d.global.is_empty() => refused("addresses in a buffer"),
        Some(d) => c::batch(&[(k, k.name.clone())], d, Some(indirect)),
        None => refused("arguments in a buffer"),
    }
}

/// Renders many kernels into one source. Equal kernels and helpers are emitted once. Entry `i` of the result
/// belongs to kernel `i`.
///
/// # Errors
/// The errors of [`render`].
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

/// Names of the helpers (`h_…`) called in a text.
fn calls(text: &str) -> impl Iterator<Item = &str> {
    let ident = |c: u8| c.is_ascii_alphanumeric() || c == b'_';
    let bytes = text.as_bytes();
    text.match_indices("h_").filter_map(move |(start, _)| {
        let end = start + bytes[start..].iter().take_while(|&&c| ident(c)).count();
        let whole = start == 0 || !ident(bytes[start - 1]);
        (whole && bytes.get(end) == Some(&b'(')).then(|| &text[start..end])
    })
}
