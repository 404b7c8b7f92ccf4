//! Opens a backend by preference, lists backends, and estimates the memory need of a language model.
//!
//! ```
//! use halcyon_compat::inference::*;
//! # fn main() -> halcyon::Result<()> {
//! let need = estimate_inference_memory(256, 688, 2, 512, 4, 4, 128, 4);
//! let backend = init_backend_with_memory_check(BackendPreference::Cpu, need.total_bytes)?;
//! println!("{}: {:.3} GiB of {:?}", backend.id(), need.total_gb(), backend.info().memory_gb());
//! # Ok(())
//! # }
//! ```

use halcyon::{Backend, BackendBuilder, BackendType, Error, Fallback, Policy, Result, summary};
use serde::Serialize;
use std::str::FromStr;

pub use halcyon::hal::select::{BackendReport, discover as discover_backends};

/// The preferred backend. Every build has all variants.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum BackendPreference {
    /// The best available backend.
    #[default]
    Auto,
    /// The CPU only, without a fallback.
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
    /// Parses any of the names of a backend.
    fn from_str(s: &str) -> Result<BackendPreference> {
        use BackendPreference::*;
        let b: BackendType = s.parse()?;
        [Auto, Cpu, Cuda, Metal, Rocm, OpenCL, WebGPU]
            .into_iter()
            .find(|p| BackendType::from(*p) == b)
            .ok_or_else(|| {
                let names = "auto, cpu, cuda, metal, rocm, opencl, webgpu";
                Error::argument("backend", format!("\"{s}\" is not a preference; choose one of {names}"))
            })
    }
}

/// The order CUDA, ROCm, Metal, OpenCL, WebGPU, CPU.
fn order() -> Result<Policy> {
    "inference".parse()
}

fn preferred(p: BackendPreference) -> Result<BackendBuilder> {
    let fallback = if p == BackendPreference::Cpu { Fallback::Never } else { Fallback::Next };
    Ok(Backend::builder().backend_type(p.into()).policy(order()?).fallback(fallback))
}

/// Opens the preferred backend, or else the first available in the order CUDA, ROCm, Metal, OpenCL, WebGPU,
/// CPU; [`Backend::selection`] gives the choice and its reason. `Cpu` has no fallback.
///
/// # Errors
/// The errors of [`BackendBuilder::build`].
pub fn init_backend(preference: BackendPreference) -> Result<Backend> {
    preferred(preference)?.build()
}

/// Like [`init_backend`], but considers only devices with at least `bytes` bytes of free memory.
///
/// # Errors
/// The errors of [`init_backend`]; [`Error::OutOfMemory`] if no device has enough memory, with the bytes that
/// each lacks.
pub fn init_backend_with_memory_check(preference: BackendPreference, bytes: u64) -> Result<Backend> {
    preferred(preference)?.memory_needed(bytes).build()
}

/// The backend that [`init_backend`] opens for `Auto`.
///
/// # Errors
/// The errors of [`init_backend`].
pub fn best_available_backend() -> Result<BackendType> {
    Ok(init_backend(BackendPreference::Auto)?.selection().device.backend)
}

/// Prints the backends and devices of this machine ([`summary::summary`]).
pub fn print_backend_summary() {
    print!("{}", summary::summary(&discover_backends()));
}

/// The memory need of a decoder, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct MemoryEstimate {
    /// Bytes of all weights.
    pub weights_bytes: u64,
    /// Bytes of the keys and values of `max_seq` tokens.
    pub kv_cache_bytes: u64,
    /// Bytes of the activations of one token.
    pub activation_bytes: u64,
    /// The sum of the other three.
    pub total_bytes: u64,
}

impl MemoryEstimate {
    /// Total in GiB (1024³ bytes).
    pub fn total_gb(&self) -> f64 {
        self.total_bytes as f64 / (1u64 << 30) as f64
    }
}

/// The memory need of a Llama-like decoder, from its sizes. The formulas below are numbers of elements, each
/// of `dtype_bytes` bytes. Results saturate at the maximum of `u64`.
///
/// - Weights: embedding and output matrix, `2 · vocab · hidden`; per layer, attention `hidden · (2 · hidden +
///   2 · kv_heads · head)`, feed-forward network `3 · hidden · intermediate` and two norms; a final norm.
///   `head = hidden / heads`.
/// - KV cache: `2 · layers · max_seq · kv_heads · head`.
/// - Activations of one token: residual, its norm and the attention's result, `3 · hidden`; queries, keys and
///   values; one score per head and position; gate and value of the feed-forward network, `2 · intermediate`;
///   logits, `vocab`.
#[expect(clippy::too_many_arguments, reason = "the arguments are those that the old API promises")]
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
    // A product of five `usize` values can exceed 128 bits, so it saturates too.
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
