//! Hand-written kernels of the structured ops. A file or folder holds an op, or a family of ops with common
//! code; the folders of matmul and attention have a file per kernel. Sizes, strides and offsets are
//! parameters, so the kernels of one op differ only in element types, rank class and a few flags. `rows.rs`
//! and `common.rs` are shared.

pub mod attention;
mod common;
pub mod conv;
pub(crate) mod gather;
pub mod matmul;
pub mod norm;
pub mod pool;
mod rows;
pub(crate) mod scan;
pub mod softmax;
