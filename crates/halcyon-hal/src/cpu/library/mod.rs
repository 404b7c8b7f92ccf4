//! Native kernels as plain functions.
pub mod conv;
#[cfg(test)]
mod conv_tests;
pub mod gemm;
#[cfg(test)]
mod gemm_tests;
pub mod gemv;
pub(crate) mod simd;
#[cfg(test)]
pub(crate) mod testing;
pub mod window;
