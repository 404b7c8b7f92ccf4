//! The tests of kernels. They are one binary, so that a change of the crate links once for all of them.

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
