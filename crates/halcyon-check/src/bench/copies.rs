//! Measures copies between host memory, page-locked if the driver can lock it, and the device.

use super::{Bench, part, rate};
use crate::child_section::SectionArgs;
use halcyon::hal::Tag;
use halcyon::prelude::*;
use serde_json::json;
use std::cell::RefCell;

/// The share of PyTorch's rate that a copy must reach. The link to the device limits both rates.
const TARGET: f64 = 0.9;

pub(crate) fn main(o: &SectionArgs) -> Result<()> {
    let bytes: usize = if o.tiny { 1 << 16 } else { 1 << 30 };
    let mut bench = Bench::new(o);
    let b = o.open(Level::O2)?;
    let d = b.device();
    let host = RefCell::new(b.alloc_host(bytes)?);
    let locked = if host.borrow().is_locked() { "locked pages" } else { "pages that are not locked" };
    let buffer = d.alloc(bytes, Tag::Io)?;
    let remark = format!("{} MiB, {locked}", bytes as f64 / (1 << 20) as f64);
    part(o, "host to device", || {
        let there = bench.prepare(&json!({ "do": "upload", "bytes": bytes }));
        let t = bench.time(there, || d.write(&buffer, 0, &host.borrow()), || d.synchronize())?;
        rate("host to device", "GB/s", bytes as f64 / 1e9, t, &bench.theirs(), Some(TARGET), &remark);
        Ok(())
    });
    part(o, "device to host", || {
        let there = bench.prepare(&json!({ "do": "download", "bytes": bytes }));
        let t = bench.time(there, || d.read(&buffer, 0, &mut host.borrow_mut()), || d.synchronize())?;
        rate("device to host", "GB/s", bytes as f64 / 1e9, t, &bench.theirs(), Some(TARGET), &remark);
        Ok(())
    });
    Ok(())
}
