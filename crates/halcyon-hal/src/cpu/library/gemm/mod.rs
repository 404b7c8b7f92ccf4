//! Matrix products.

pub mod gemv;
// Only x86-64 has instructions that multiply K groups.
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
pub(super) mod k_groups;
#[cfg(test)]
mod low_precision_call_tests;
pub(super) mod low_precision_calls;
#[cfg(test)]
mod low_precision_tests;
pub mod matrix;
mod packed_bf16;
pub(super) mod panels;
pub mod product_any;
pub mod product_bf16;
pub mod product_f32;
#[cfg(test)]
mod product_f32_tests;
pub(super) mod product_int16;
pub(super) mod product_int4;
pub mod product_int8;
#[cfg(target_arch = "x86_64")]
mod product_int8_vectors;
#[cfg(target_arch = "x86_64")]
pub(super) mod tile_registers;
#[cfg(target_arch = "x86_64")]
mod tile_registers_int8;
