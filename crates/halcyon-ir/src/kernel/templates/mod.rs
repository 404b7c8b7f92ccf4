//! Templates: the kernels of the structured ops. A file or folder holds an op, or a family of ops with common
//! code; the folders of matmul, attention and cached attention have a file per kernel. Sizes, strides and
//! offsets are parameters, so the kernels of one variant differ only in element types, number of axes and a
//! few flags. Several templates use `rows.rs` and `common.rs`.

pub mod attention;
pub(crate) mod blocks;
pub(crate) mod cached;
mod common;
pub mod conv;
pub(crate) mod gather;
pub(crate) mod linear;
pub mod matmul;
pub mod norm;
pub mod pool;
mod rows;
pub(crate) mod scan;
pub mod softmax;
