//! Hand-written kernels of the structured ops, one file per op. Sizes, strides and offsets are parameters, so
//! the kernels of one op differ only in element types, rank class and a few flags.

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
