//! The tests of kernels: one binary, because linking a binary for each file took longer than running the tests.

#[path = "../common/mod.rs"]
mod common;
#[path = "../common/tensor.rs"]
mod tensor;
#[path = "../common/vendors.rs"]
mod vendors;

mod chains;
mod compile;
mod interp;
mod snapshots;
mod structured;
mod templates;
