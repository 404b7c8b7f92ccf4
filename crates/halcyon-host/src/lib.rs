//! The machine that the process runs on: how much memory is left, files that are read or replaced as a whole,
//! and the folders of Python's packages.
#![forbid(unsafe_code)]
pub mod input;
mod memory;
pub mod output;
pub mod python;

pub use memory::{
    AnonymousPeak, MemorySampler, anonymous, check_available, memory, page_faults, reserve, zeros,
};
