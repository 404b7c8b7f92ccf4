//! Native kernels as plain functions.
pub mod gemm;
#[cfg(test)]
mod gemm_tests;
pub mod gemv;
pub(crate) mod simd;
#[cfg(test)]
pub(crate) mod testing;
