//! Halcyon: one API for machine-learning code on many kinds of hardware.
//!
//! ```
//! use halcyon::prelude::*;
//! # fn main() -> halcyon::Result<()> {
//! let backend = Backend::cpu()?;
//! let x = Tensor::from_slice(&backend, [2, 2], &[1.0f32, 2.0, 3.0, 4.0])?;
//! let y = (x.matmul(&x) + 1.0).relu();
//! assert_eq!(y.to_vec::<f32>()?, [8.0, 11.0, 16.0, 23.0]);
//! # Ok(())
//! # }
//! ```
//!
//! Tensors are lazy handles: an operation checks shapes and types immediately, but computes nothing. Reading
//! a value, [`Tensor::eval`] or [`eval`] runs the pending operations it depends on as one plan. Operators
//! chain without `?`: an error is stored in the tensor, with the caller's line, and returned by the first
//! later call that returns a `Result`.
#![forbid(unsafe_code)]

#[cfg(not(target_arch = "wasm32"))]
mod amp_rates;
pub mod backend;
#[cfg(feature = "onnx")]
mod bad_index;
pub mod blas;
pub mod capture;
mod constants;
pub mod doctor;
pub mod executable;
mod faults;
pub mod fit;
pub mod gradient;
mod lru;
#[cfg(feature = "onnx")]
pub mod onnx;
pub mod ops;
pub mod optable;
mod planner;
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

pub use backend::{Backend, BackendBuilder};
pub use blas::{BatchNorm, ConvConfig};
pub use capture::{CapturedGraph, Compiled};
pub use executable::{Captures, Executable};
pub use fit::Fit;
pub use gradient::{Gradients, value_and_grad};
#[cfg(feature = "onnx")]
pub use halcyon_formats as formats;
pub use halcyon_hal as hal;
pub use halcyon_hal::policy::{Fallback, Policy};
pub use halcyon_hal::select::Selection;
pub use halcyon_hal::{
    AllocationStrategy, BackendType, Counters, Defragmented, DeviceInfo, HostBuffer, MemoryPoolConfig,
    MemoryStats, StreamOptions,
};
pub use halcyon_ir as ir;
pub use halcyon_ir::error::{Error, Result};
pub use halcyon_ir::op::{Conv, Pool, PoolKind, ReduceKind, ScatterKind};
pub use halcyon_ir::passes::{AmpPolicy, Level};
pub use halcyon_ir::target::MatmulPrecision;
pub use halcyon_ir::{ConstData, DType, Dim, Element, Scalar, Shape};
#[cfg(feature = "onnx")]
pub use onnx::OnnxSession;
pub use ops::{Attention, CrossEntropy, Order, Scan, Variance};
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
