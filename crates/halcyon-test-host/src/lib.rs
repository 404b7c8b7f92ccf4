//! Helpers that connect tests with the machine: rules for skipping, seeds and samples, folders of test data,
//! C compilers, other processes, and stand-ins for the vendors' libraries. This crate depends on no other
//! crate of Halcyon, so the tests of every crate and `xtask` can use it without building other crates.
//! `halcyon-test` has the helpers that need Halcyon's types.

mod folders;
mod process;
pub mod proxy;
mod skips;
pub mod standin;
pub mod vendors;

pub use folders::{models, models_dir, prepared, root, target_dir, testdata};
pub use process::{gone, library, soon};
pub use skips::{any_seed, drawn, drawn_of, given_seed, left_out, one_in, required, seed, skip};
