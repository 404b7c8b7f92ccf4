//! A backend by preference, what there is, and what a language model needs.
//!
//! ```
//! use halcyon::compat::inference::*;
//! # fn main() -> halcyon::Result<()> {
//! let need = estimate_inference_memory(256, 688, 2, 512, 4, 4, 128, 4);
//! let backend = init_backend_with_memory_check(BackendPreference::Cpu, need.total_bytes)?;
//! println!("{}: {:.3} GiB of {:?}", backend.id(), need.total_gb(), backend.info().memory_gb());
//! # Ok(())
//! # }
//! ```

use crate::backend::{Backend, BackendBuilder};
use crate::summary;
use halcyon_hal::BackendType;
use halcyon_hal::policy::{Fallback, Policy};
use halcyon_ir::error::{Error, Result};
use serde::Serialize;
use std::str::FromStr;

pub use halcyon_hal::select::{BackendReport, discover as discover_backends};

/// Which backend is wanted. Every build knows all of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum BackendPreference {
    /// The best there is.
    #[default]
    Auto,
    /// The CPU and nothing else.
    Cpu,
    Cuda,
    Metal,
    Rocm,
    OpenCL,
    WebGPU,
}

impl From<BackendPreference> for BackendType {
    fn from(p: BackendPreference) -> BackendType {
        match p {
            BackendPreference::Auto => BackendType::Auto,
            BackendPreference::Cpu => BackendType::Cpu,
            BackendPreference::Cuda => BackendType::Cuda,
            BackendPreference::Metal => BackendType::Metal,
            BackendPreference::Rocm => BackendType::Rocm,
            BackendPreference::OpenCL => BackendType::OpenCl,
            BackendPreference::WebGPU => BackendType::WebGpu,
        }
    }
}

impl FromStr for BackendPreference {
    type Err = Error;
    /// Any name of the backend.
    fn from_str(s: &str) -> Result<BackendPreference> {
        use BackendPreference::*;
        let b: BackendType = s.parse()?;
        [Auto, Cpu, Cuda, Metal, Rocm, OpenCL, WebGPU]
            .into_iter()
            .find(|p| BackendType::from(*p) == b)
            .ok_or_else(|| {
                let names = "auto, cpu, cuda, metal, rocm, opencl, webgpu";
                Error::argument("backend", format!("\"{s}\" is no preference; choose one of {names}"))
            })
    }
}

/// CUDA, ROCm, Metal, OpenCL, WebGPU, CPU.
fn order() -> Result<Policy> {
    "inference".parse()
}

fn preferred(p: BackendPreference) -> Result<BackendBuilder> {
    let fallback = if p == BackendPreference::Cpu { Fallback::Never } else { Fallback::Next };
    Ok(Backend::builder().backend_type(p.into()).policy(order()?).fallback(fallback))
}

/// The preferred backend, else the next that is there in the order CUDA, ROCm, Metal, OpenCL, WebGPU, CPU,
/// which [`Backend::selection`] tells. `Cpu` forces the CPU.
///
/// # Errors
/// Those of [`BackendBuilder::build`].
pub fn init_backend(preference: BackendPreference) -> Result<Backend> {
    preferred(preference)?.build()
}

/// As [`init_backend`], of devices that have `bytes` bytes left.
///
/// # Errors
/// [`Error::OutOfMemory`] where none has, with what each lacks.
pub fn init_backend_with_memory_check(preference: BackendPreference, bytes: u64) -> Result<Backend> {
    preferred(preference)?.memory_needed(bytes).build()
}

/// The backend that [`init_backend`] takes under `Auto`.
///
/// # Errors
/// As [`init_backend`].
pub fn best_available_backend() -> Result<BackendType> {
    Ok(init_backend(BackendPreference::Auto)?.selection().device.backend)
}

/// Prints what this machine has ([`summary::summary`]).
pub fn print_backend_summary() {
    print!("{}", summary::summary(&discover_backends()));
}

/// What a decoder takes in memory, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct MemoryEstimate {
    pub weights_bytes: u64,
    pub kv_cache_bytes: u64,
    pub activation_bytes: u64,
    pub total_bytes: u64,
}

impl MemoryEstimate {
    /// In GiB (1024³ bytes).
    pub fn total_gb(&self) -> f64 {
        self.total_bytes as f64 / (1u64 << 30) as f64
    }
}

/// What a Llama-like decoder takes, by its sizes. Sums that no `u64` holds stop at its end.
///
/// - Weights: embedding and output `2 · vocab · hidden`; in each layer the attention's `hidden · (2 · hidden
///   + 2 · kv_heads · head)`, the network's `3 · hidden · intermediate` and two norms; one norm at the end. A
///   head has `hidden / heads` elements.
/// - Keys and values: `2 · layers · max_seq · kv_heads · head`.
/// - Activations of one token: residual, its norm and the attention's result, `3 · hidden`; queries, keys and
///   values; a score for every head and position; gate and value of the network, `2 · intermediate`; the
///   logits, `vocab`.
pub fn estimate_inference_memory(
    hidden: usize,
    intermediate: usize,
    layers: usize,
    vocab: usize,
    heads: usize,
    kv_heads: usize,
    max_seq: usize,
    dtype_bytes: usize,
) -> MemoryEstimate {
    // Products of five sizes of an address space may pass even 128 bits; they stop at the end as well.
    let product = |f: &[usize]| f.iter().fold(1u128, |p, x| p.saturating_mul(*x as u128));
    let sum = |t: &[u128]| t.iter().fold(0u128, |s, x| s.saturating_add(*x));
    let bytes =
        |elements: u128| u64::try_from(elements.saturating_mul(dtype_bytes as u128)).unwrap_or(u64::MAX);
    let head = hidden.checked_div(heads).unwrap_or(0);
    let layer = sum(&[
        product(&[2, hidden, hidden]),
        product(&[2, hidden, kv_heads, head]),
        product(&[3, hidden, intermediate]),
        product(&[2, hidden]),
    ]);
    let weights = sum(&[product(&[2, vocab, hidden]), layer.saturating_mul(layers as u128), hidden as u128]);
    let kv = product(&[2, layers, max_seq, kv_heads, head]);
    let activations = sum(&[
        product(&[3, hidden]),
        hidden as u128,
        product(&[2, kv_heads, head]),
        product(&[heads, max_seq]),
        product(&[2, intermediate]),
        vocab as u128,
    ]);
    MemoryEstimate {
        weights_bytes: bytes(weights),
        kv_cache_bytes: bytes(kv),
        activation_bytes: bytes(activations),
        total_bytes: bytes(sum(&[weights, kv, activations])),
    }
}
