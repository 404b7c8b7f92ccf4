//! The machine that the process runs on: how much memory is left, and files that are read or replaced as a
//! whole.
#![forbid(unsafe_code)]
pub mod input;
mod memory;
pub mod output;

pub use memory::{
    AnonymousPeak, MemorySampler, anonymous, check_available, memory, page_faults, reserve, zeros,
};
