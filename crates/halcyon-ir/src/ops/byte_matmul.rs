//! Products of 8-bit floats, or of integers of 8 or 16 bits. The pass `crate::passes::bytes` creates them.

use super::composite::{CompositeGradient, CompositeRow};
use super::matmul;

pub(super) static BYTE_MATMUL: CompositeRow = CompositeRow {
    name: "byte_matmul",
    has_builder: false,
    has_kernels: true,
    packs: true,
    summed: None,
    half: None,
    template: None,
    flops: |_, inputs, output| matmul::flops(inputs, output),
    gradient: CompositeGradient::Body,
};
