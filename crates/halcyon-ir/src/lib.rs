//! Graph, passes, kernel IR and renderers. No FFI and no `unsafe`.
#![forbid(unsafe_code)]
pub mod dtype;
pub mod error;
pub mod scalar_op;
pub use dtype::{DType, Scalar};
pub use error::{Error, Result};
pub use scalar_op::ScalarOp;
