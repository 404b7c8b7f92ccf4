//! Without the CPU backend no device's peak can be measured.

use super::limits::Limits;
use crate::args::BenchPeakArgs;
use halcyon::{Backend, Result};

/// # Errors
/// Always [`halcyon::Error::Unsupported`], or what opening the backend gives.
pub fn main(a: &BenchPeakArgs) -> Result<u8> {
    match Limits::new(&Backend::builder().backend_type(a.backend.parse()?).build()?)? {}
}
