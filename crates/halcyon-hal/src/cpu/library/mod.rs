//! Native kernels as plain functions.
pub mod attention;
pub mod conv;
#[cfg(test)]
mod conv_tests;
pub mod elem;
pub mod gemm;
#[cfg(test)]
mod gemm_tests;
pub mod gemv;
pub mod mat;
pub mod matmul_any;
pub mod pool;
pub(crate) mod simd;
pub mod softmax;
#[cfg(test)]
pub(crate) mod testing;
pub mod window;
