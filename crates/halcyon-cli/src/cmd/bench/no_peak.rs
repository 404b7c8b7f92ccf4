//! Takes the place of `peak.rs` in builds without the CPU backend, which cannot measure peaks.

use super::limits::Limits;
use crate::args::BenchPeakArgs;
use halcyon::{Backend, Result};

/// # Errors
/// Always [`halcyon::Error::Unsupported`], or the error of opening the backend.
pub(crate) fn main(a: &BenchPeakArgs) -> Result<u8> {
    match Limits::new(&Backend::builder().backend_type(a.backend.parse()?).build()?)? {}
}
