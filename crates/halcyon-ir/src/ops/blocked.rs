//! The composites for convolutions and pools over images in a blocked layout. `crate::passes::blocked`
//! inserts them.

use super::composite::{CompositeGradient, CompositeRow, some_per_element};
use super::conv;

pub(super) static BLOCKED_CONV: CompositeRow = CompositeRow {
    name: "blocked_conv",
    has_builder: false,
    has_kernels: true,
    packs: true,
    summed: None,
    half: None,
    template: None,
    flops: |_, inputs, output| conv::flops(inputs, output),
    gradient: CompositeGradient::Body,
};

pub(super) static BLOCKED_POOL: CompositeRow = CompositeRow {
    name: "blocked_pool",
    has_builder: false,
    has_kernels: true,
    packs: false,
    summed: None,
    half: None,
    template: None,
    flops: some_per_element,
    gradient: CompositeGradient::Body,
};
