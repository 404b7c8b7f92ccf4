//! The op table ([`halcyon::optable`]) as used by the tests.
#![allow(unreachable_pub, reason = "public for the test files that include this one")]
#![allow(dead_code, unused_imports)]

pub mod check;
pub mod grads;
pub mod random;
pub mod sanitizer;

pub use halcyon::optable::{case, elementwise, rows, small, structured, user, views, windows};
