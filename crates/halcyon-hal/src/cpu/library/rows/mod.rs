//! Kernels that work along one axis: softmax and normalisation, scans, sorts.

pub(super) mod layer_norm_grad;
pub(super) mod scan;
pub mod softmax;
pub(super) mod sort;
