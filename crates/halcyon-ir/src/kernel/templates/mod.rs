//! Hand-written kernels of the structured ops, one file each. Sizes, strides and offsets are parameters, so
//! an op's kernels differ only by element types, a rank class and a few flags.

pub mod attention;
mod attention_matrix;
mod attention_split;
mod common;
pub mod conv;
pub(super) mod gather;
pub mod matmul;
mod matmul_matrix;
pub mod norm;
pub mod pool;
mod rows;
pub(super) mod scan;
pub mod softmax;
