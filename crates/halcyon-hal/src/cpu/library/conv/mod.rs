//! Convolution and pooling, in the plain and in the blocked layout.

pub mod blocked;
pub mod blocked_bf16;
mod blocked_bf16_parts;
#[cfg(test)]
mod blocked_bf16_tests;
mod blocked_bf16_tile;
mod blocked_bf16_vector;
pub(super) mod blocked_calls;
pub mod blocked_int8;
mod blocked_int8_calls;
#[cfg(test)]
mod blocked_int8_tests;
mod blocked_int8_tile;
mod blocked_max_grad;
#[cfg(test)]
mod blocked_tests;
mod blocked_tile;
mod few_positions;
pub(super) mod max_grad;
pub mod plain;
#[cfg(test)]
mod plain_tests;
pub mod pool;
pub mod window;
