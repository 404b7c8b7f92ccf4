//! Kernels that read or write by index.

pub(super) mod blocks;
pub(super) mod gather;
pub(super) mod scatter;
