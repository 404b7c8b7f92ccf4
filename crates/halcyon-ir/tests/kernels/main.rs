//! The tests of kernels. They are one binary, so that only one binary is linked after a change of the crate.

#[path = "../common/mod.rs"]
mod common;
#[path = "../common/tensor.rs"]
mod tensor;

mod chains;
mod compile;
mod interp;
mod snapshots;
mod structured;
mod templates;
