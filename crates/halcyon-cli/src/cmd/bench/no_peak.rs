//! Takes the place of `peak.rs` in builds without the CPU backend, which cannot measure peaks.

use super::limits::Limits;
use crate::args::BenchPeakArgs;
use halcyon::{Backend, Result};

/// # Errors
/// The error of opening the backend; if it opens, [`halcyon::Error::Unsupported`].
pub(crate) fn main(a: &BenchPeakArgs) -> Result<u8> {
    match Limits::new(&Backend::builder().backend_type(a.backend.parse()?).build()?)? {}
}
