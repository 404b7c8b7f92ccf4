//! Halcyon runs machine-learning code on the CPU and the accelerators of a machine: tensors, gradients, ONNX
//! models. The results agree on every device within stated tolerances.
//!
//! # A first program
//!
//! ```
//! use halcyon::prelude::*;
//!
//! fn main() -> halcyon::Result<()> {
//!     let backend = Backend::cpu()?;
//!     let x = Tensor::from_slice(&backend, [2, 2], &[1.0f32, 2.0, 3.0, 4.0])?;
//!     let y = (x.matmul(&x) + 1.0).relu();
//!     assert_eq!(y.to_vec::<f32>()?, [8.0, 11.0, 16.0, 23.0]);
//!     Ok(())
//! }
//! ```
//!
//! A [`Backend`] is an open device. A [`Tensor`] is a lazy handle: an operation checks shapes and types at
//! once but computes nothing. Reading a value ([`Tensor::to_vec`], [`Tensor::item`]), [`Tensor::eval`] or
//! [`eval`] runs the pending operations that the value depends on as one plan. The plan is cached, so the
//! same computation with other values runs without planning or compiling.
//!
//! # Choosing a device
//!
//! [`Backend::cpu`] always works. [`Backend::auto`] opens the best device of the machine;
//! [`Backend::selection`] gives the reasons. [`Backend::open`] takes a name, as `halcyon devices` prints it.
//! [`Backend::builder`] has all settings.
//!
//! ```
//! use halcyon::{Level, prelude::*};
//! # fn main() -> halcyon::Result<()> {
//! let best = Backend::auto()?;
//! println!("{} was chosen:\n{}", best.id(), best.selection());
//!
//! let named = Backend::open("cpu:0")?;
//! assert_eq!(named.id(), "cpu:0");
//!
//! let careful = Backend::builder()
//!     .backend_type(BackendType::Cpu)
//!     .num_threads(1)
//!     .level(Level::O0)
//!     .memory_limit(1 << 30)
//!     .build()?;
//! assert_eq!(careful.level(), Level::O0);
//! # Ok(())
//! # }
//! ```
//!
//! An operation cannot mix tensors of two open devices: [`Tensor::to`] copies a tensor to another device.
//! [`Split`] runs one graph on several devices.
//!
//! # Running an ONNX model
//!
//! With the feature `onnx`, which is on by default:
//!
#![cfg_attr(feature = "onnx", doc = "```")]
#![cfg_attr(not(feature = "onnx"), doc = "```ignore")]
//! use halcyon::{OnnxSession, prelude::*};
//! # fn main() -> halcyon::Result<()> {
//! # let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/digits.onnx");
//! # #[cfg(any())]
//! let path = "models/digits.onnx";
//! let backend = Backend::cpu()?;
//! let model = OnnxSession::open(&backend, path)?;
//! for port in model.ports() {
//!     println!("{}: {}", port.name, port.ty);
//! }
//! let image = Tensor::zeros(&backend, [1, 1, 8, 8], DType::F32);
//! let outputs = model.run([("image", &image)])?;
//! let probabilities = outputs["probabilities"].to_vec::<f32>()?;
//! assert_eq!(probabilities.len(), 10);
//! # Ok(())
//! # }
//! ```
//!
//! Outputs stay on the device until they are read. [`Session`] does the same for a graph made by
//! [`Tensor::trace`]; [`Session::verify`] compares a run with a reference, step by step.
//!
//! # Training
//!
//! [`value_and_grad`] gives a value and its gradients. A [`State`] holds a parameter that every training step
//! replaces: the new version reuses the memory of the old one.
//!
//! ```
//! use halcyon::prelude::*;
//! # fn main() -> halcyon::Result<()> {
//! let backend = Backend::cpu()?;
//! let x = Tensor::from_slice(&backend, [4, 1], &[0.0f32, 1.0, 2.0, 3.0])?;
//! let y = Tensor::from_slice(&backend, [4, 1], &[1.0f32, 3.0, 5.0, 7.0])?;
//! let weight = State::new(Tensor::zeros(&backend, [1, 1], DType::F32));
//! let bias = State::new(Tensor::zeros(&backend, [1], DType::F32));
//! let mut last = f32::INFINITY;
//! for _ in 0..200 {
//!     let params = [weight.value().requires_grad()?, bias.value().requires_grad()?];
//!     let (loss, grads) = value_and_grad(&params, |p| Ok((x.matmul(&p[0]) + &p[1] - &y).sqr().mean(..)))?;
//!     weight.write(&params[0] - &grads[0] * 0.1)?;
//!     bias.write(&params[1] - &grads[1] * 0.1)?;
//!     eval(&[loss.clone(), weight.value(), bias.value()])?;
//!     last = loss.item()?;
//! }
//! assert!(last < 1e-3);
//! assert!((weight.value().item::<f32>()? - 2.0).abs() < 0.1);
//! # Ok(())
//! # }
//! ```
//!
//! # Errors
//!
//! Operators chain without `?`. A tensor stores the first error, with the caller's line, and the first later
//! call that returns a [`Result`] returns it. An [`Error`] carries facts and says what to do next.
//!
//! ```
//! use halcyon::{Error, prelude::*};
//! # fn main() -> halcyon::Result<()> {
//! let backend = Backend::cpu()?;
//! let a = Tensor::ones(&backend, [2, 3], DType::F32);
//! let b = Tensor::ones(&backend, [4, 5], DType::F32);
//! let c = a.matmul(&b).relu(); // the error is made here,
//! let e = c.to_vec::<f32>().unwrap_err(); // and returned here
//! assert!(matches!(e, Error::Shape { .. }));
//! assert!(e.to_string().contains("matmul"));
//! # Ok(())
//! # }
//! ```
//!
//! # Faster loops
//!
//! [`Backend::compile`] traces a function once per set of input types. [`Backend::capture_graph`] also fixes
//! the memory of the inputs. [`Stream`]s and [`Tensor::eval_async`] overlap work. [`Backend::tune`] measures
//! which kernels are fastest on the device.
//!
//! # Features
//!
//! All features except `metal`, `metal-gpu` and `ndarray` are on by default. No feature needs a library at
//! build time, because the libraries of drivers are loaded at run time.
//!
//! | feature | brings |
//! |---|---|
//! | `cpu` | the CPU device |
//! | `simd`, `parallel` | for the CPU: instruction sets beyond the target's baseline; more than one thread |
//! | `cuda`, `rocm`, `opencl`, `webgpu` | devices of these interfaces |
//! | `tpu` | detection of TPUs; running on them is an error |
//! | `metal`, `metal-gpu` | Apple's GPUs, through the driver of `webgpu` |
//! | `onnx` | [`OnnxSession`], and export to ONNX |
//! | `images` | for ONNX's ImageDecoder: formats beyond JPEG |
//! | `ndarray` | arrays of that crate as inputs of [`OnnxSession`] |
#![forbid(unsafe_code)]

#[cfg(not(target_arch = "wasm32"))]
mod amp_rates;
pub mod backend;
#[cfg(feature = "onnx")]
mod bad_index;
pub mod blas;
mod cancel;
pub mod capture;
mod checkpoint;
mod constants;
pub mod doctor;
pub mod executable;
mod faults;
pub mod fit;
pub mod gradient;
mod lru;
pub mod markup;
#[cfg(feature = "onnx")]
pub mod onnx;
pub mod ops;
pub mod optable;
mod planner;
pub mod prepare;
pub mod quantize;
mod queue;
pub mod random;
pub mod receipts;
mod runtime;
pub mod session;
pub mod split;
pub mod state;
mod stats;
pub mod stream;
pub mod summary;
mod sync;
pub mod tensor;
mod timing;
pub mod tune;
pub mod verify;

pub use backend::{Backend, BackendBuilder, MixedPrecision};
pub use blas::{BatchNorm, ConvConfig};
pub use capture::{CapturedGraph, Compiled};
pub use checkpoint::{checkpoint, composite};
pub use executable::{Captures, Executable};
pub use fit::Fit;
pub use gradient::{Gradients, value_and_grad, value_and_grad_in_parts};
#[cfg(feature = "onnx")]
pub use halcyon_formats as formats;
pub use halcyon_hal as hal;
pub use halcyon_hal::policy::{Fallback, Policy};
pub use halcyon_hal::select::Selection;
pub use halcyon_hal::{
    AllocationStrategy, BackendType, Counters, Defragmented, DeviceInfo, HostBuffer, MemoryPoolConfig,
    MemoryStats, StreamOptions, Supply,
};
pub use halcyon_host as host;
pub use halcyon_ir as ir;
pub use halcyon_ir::blocks::BlockType;
pub use halcyon_ir::error::{Error, Result};
pub use halcyon_ir::ops::{
    CachedAttention, ChunkScan, Conv, Pool, PoolKind, ReduceKind, RowMatmul, ScatterKind,
};
pub use halcyon_ir::passes::{AmpPolicy, Level};
pub use halcyon_ir::target::MatmulPrecision;
pub use halcyon_ir::{ConstData, DType, Dim, Element, Scalar, Shape};
#[cfg(feature = "onnx")]
pub use onnx::OnnxSession;
pub use ops::{Attention, Cache, CrossEntropy, Order, Scan, Variance};
pub use session::Session;
pub use split::Split;
pub use state::State;
pub use stream::{Event, Pending, Stream};
pub use tensor::{Ellipsis, NewAxis, Tensor, eval, step};
pub use tune::{TuningMode, TuningReport};
pub use verify::{Replay, VerifyOptions, VerifyReport};

/// The items that most programs need.
pub mod prelude {
    pub use crate::{
        Backend, BackendType, DType, Level, Result, Scalar, Shape, State, Tensor, eval, value_and_grad,
    };
}
