//! The op table ([`halcyon::optable`]) as used by the tests.

pub mod check;
pub mod grads;
pub mod random;
pub mod sanitizer;

pub use halcyon::optable::{case, elementwise, rows, small, structured, user, views, windows};
