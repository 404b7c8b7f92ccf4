//! The copies in a run of a split graph, and their times, which are estimated from measured copies.

use super::cut::SegmentGraph;
use crate::backend::Backend;
use halcyon_hal::Tag;
use halcyon_host as host;
use halcyon_ir::error::Result;
use halcyon_ir::graph::{Graph, NodeId};
use halcyon_ir::{Op, cost};
use serde::Serialize;
use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, HashMap};
use std::time::Instant;

/// A value that is copied in every run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PlacedCopy {
    /// The op that computes the value, or the name of the input or output.
    pub value: String,
    /// Index in [`Placement::devices`](super::Placement::devices); `None` for the host.
    pub from: Option<usize>,
    /// Index in `Placement::devices`; `None` for the host.
    pub to: Option<usize>,
    /// Bytes copied.
    pub bytes: u64,
    /// Whether the devices copy directly, without the host.
    pub direct: bool,
    /// Estimated time of the copy, from measured times of small and large copies on these devices.
    pub seconds: f64,
}

/// The cost model of copies to a device, from a device or between two devices: latency plus bytes times
/// `per_byte`.
#[derive(Clone, Copy)]
struct CopyCost {
    /// Seconds for a copy of any size.
    latency: f64,
    /// Seconds per byte.
    per_byte: f64,
}

impl CopyCost {
    fn seconds(self, bytes: u64) -> f64 {
        self.latency + bytes as f64 * self.per_byte
    }
}

/// Whether values are copied from one device to the other without the host.
pub(super) fn direct(from: &Backend, to: &Backend) -> bool {
    to.device().can_copy_from(&**from.device()).is_ok()
}

/// Measures writing to and reading from a device, each with copies of 4 bytes and of 1 MiB (less if memory is
/// short). Each time is the shortest of three.
fn rates(b: &Backend) -> Result<(CopyCost, CopyCost)> {
    const SMALL: usize = 4;
    let d = b.device();
    // The device may have little memory left.
    let large = d.available().map_or(1 << 20, |free| (free / 4).clamp(4096, 1 << 20)) as usize;
    let mut bytes = host::zeros(large, "a copy to be timed")?;
    let buffer = d.alloc(large, Tag::Io)?;
    let mut time = |n: usize| -> Result<(f64, f64)> {
        let (mut write, mut read) = (f64::INFINITY, f64::INFINITY);
        for _ in 0..3 {
            let start = Instant::now();
            d.write(&buffer, 0, &bytes[..n])?;
            d.synchronize()?;
            write = write.min(start.elapsed().as_secs_f64());
            let start = Instant::now();
            d.read(&buffer, 0, &mut bytes[..n])?;
            read = read.min(start.elapsed().as_secs_f64());
        }
        Ok((write, read))
    };
    let (small, all) = (time(SMALL)?, time(large)?);
    let line = |small: f64, all: f64| CopyCost {
        latency: small,
        per_byte: (all - small).max(0.0) / (large - SMALL) as f64,
    };
    Ok((line(small.0, all.0), line(small.1, all.1)))
}

/// Measures direct copies from one device to another, in the same way as `rates`.
fn rate_between(from: &Backend, to: &Backend) -> Result<CopyCost> {
    const SMALL: usize = 4;
    let left = |b: &Backend| b.device().available().map_or(1 << 20, |free| (free / 4).clamp(4096, 1 << 20));
    let large = left(from).min(left(to)) as usize;
    let (src, dst) = (from.device().alloc(large, Tag::Io)?, to.device().alloc(large, Tag::Io)?);
    let time = |n: usize| -> Result<f64> {
        let mut best = f64::INFINITY;
        for _ in 0..3 {
            let start = Instant::now();
            to.device().copy_from_peer(&**from.device(), &src, 0, &dst, 0, n)?;
            to.device().synchronize()?;
            best = best.min(start.elapsed().as_secs_f64());
        }
        Ok(best)
    };
    let (small, all) = (time(SMALL)?, time(large)?);
    Ok(CopyCost { latency: small, per_byte: (all - small).max(0.0) / (large - SMALL) as f64 })
}

/// The copies of a run, in order, with their bytes and estimated times.
pub(super) fn copies(backends: &[Backend], graph: &Graph, parts: &[SegmentGraph]) -> Result<Vec<PlacedCopy>> {
    let rates = backends.iter().map(rates).collect::<Result<Vec<_>>>()?;
    let mut copies = vec![];
    let mut at: BTreeSet<(NodeId, usize)> = BTreeSet::new();
    let mut made: HashMap<NodeId, usize> = HashMap::new();
    let bytes = |v: NodeId| cost::type_bytes(graph.ty(v));
    let mut between: HashMap<(usize, usize), CopyCost> = HashMap::new();
    let name = |v: NodeId| match &graph.node(v).op {
        Op::Input(k) => graph.inputs()[*k as usize].name.to_string(),
        op => format!("{} at {}", op.name(), graph.node(v).span),
    };
    for s in parts {
        for &v in &s.inputs {
            if made.get(&v) != Some(&s.device) && at.insert((v, s.device)) {
                let (from, b) = (made.get(&v).copied(), bytes(v)?);
                let to = s.device;
                let direct = from.is_some_and(|f| direct(&backends[f], &backends[to]));
                let seconds = match (direct, from) {
                    (true, Some(f)) => {
                        if let Entry::Vacant(e) = between.entry((f, to)) {
                            e.insert(rate_between(&backends[f], &backends[to])?);
                        }
                        between[&(f, to)].seconds(b)
                    }
                    _ => rates[to].0.seconds(b) + from.map_or(0.0, |f| rates[f].1.seconds(b)),
                };
                copies.push(PlacedCopy { value: name(v), from, to: Some(to), bytes: b, direct, seconds });
            }
        }
        made.extend(s.outputs.iter().map(|v| (*v, s.device)));
    }
    for o in graph.outputs() {
        if let Some(&d) = made.get(&o.node) {
            let b = bytes(o.node)?;
            let seconds = rates[d].1.seconds(b);
            let value = o.name.to_string();
            copies.push(PlacedCopy { value, from: Some(d), to: None, bytes: b, direct: false, seconds });
        }
    }
    Ok(copies)
}
