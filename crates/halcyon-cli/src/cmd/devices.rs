//! `halcyon devices`: every backend with its devices, or the reason it has none.

use crate::args::DevicesArgs;
use crate::report;
use halcyon::hal::select;
use halcyon::summary::summary;
use halcyon::{Error, Result};

pub fn main(a: &DevicesArgs) -> Result<u8> {
    let all = select::discover();
    if a.json {
        let v = serde_json::to_value(&all).map_err(|e| Error::internal(e.to_string()))?;
        report::print_json(&v)?;
    } else {
        report::print(&summary(&all))?;
    }
    Ok(0)
}
