//! The device of every op of a split, and the copies between devices.

use super::copy::{PlacedCopy, copies};
use super::cut::{SegmentGraph, parts};
use crate::backend::Backend;
use halcyon_ir::error::Result;
use halcyon_ir::graph::{Graph, NodeId};
use halcyon_ir::{Op, cost};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// An op and the device it runs on.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PlacedOp {
    /// The op's name.
    pub op: String,
    /// The op's origin: the model's node, or the caller's file and line.
    pub at: String,
    /// Index in [`Placement::devices`].
    pub device: usize,
    /// Floating-point operations of one run.
    pub flops: u64,
    /// The least bytes that the op must read and write on its device.
    pub bytes: u64,
    /// Why the op is not on the requested device; `None` if it is.
    pub reason: Option<String>,
}

/// The part of the work that one device does.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Share {
    /// The device's name: `cpu:0`.
    pub id: String,
    /// Number of ops that run on it.
    pub ops: usize,
    /// Floating-point operations that a run does on it.
    pub flops: u64,
    /// Bytes of the constants that its segments read.
    pub constants: u64,
    /// Bytes that the host writes to it in a run.
    pub uploaded: u64,
    /// Bytes that the host reads from it in a run.
    pub downloaded: u64,
    /// Bytes copied to it from other devices in a run, without the host.
    pub received: u64,
}

/// The device of every op, and the copies of a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Placement {
    /// One share per backend, in the order of the backends.
    pub devices: Vec<Share>,
    /// In the graph's order, without inputs, constants, ops computed from constants alone, and ops that no
    /// output depends on.
    pub ops: Vec<PlacedOp>,
    /// The copies of a run, in order.
    pub copies: Vec<PlacedCopy>,
    /// Number of segments.
    pub segments: usize,
}

impl Placement {
    /// Floating-point operations of a run on all devices.
    pub fn flops(&self) -> u64 {
        self.devices.iter().fold(0, |a, d| a.saturating_add(d.flops))
    }

    /// Fraction of the FLOPs that is not on the first device.
    pub fn flops_elsewhere(&self) -> f64 {
        let elsewhere = self.devices.iter().skip(1).fold(0u64, |a, d| a.saturating_add(d.flops));
        elsewhere as f64 / self.flops().max(1) as f64
    }

    /// Bytes copied from one device to another in a run, each counted once.
    pub fn between(&self) -> u64 {
        self.copies.iter().filter(|c| c.from.is_some() && c.to.is_some()).map(|c| c.bytes).sum()
    }

    /// Estimated time of all copies of a run, in seconds.
    pub fn seconds(&self) -> f64 {
        self.copies.iter().map(|c| c.seconds).sum()
    }
}

impl Placement {
    /// Placement of a graph without symbols on `backends`. `assign` gives the device of each node, as an
    /// index into `backends`; `why` gives reasons for the placement of some nodes. Nothing is compiled, but
    /// reads and writes of the devices are timed.
    ///
    /// # Errors
    /// The errors of [`Split::new`](super::Split::new), except for errors of planning.
    pub fn of(
        backends: &[Backend],
        graph: &Graph,
        assign: &[usize],
        why: &BTreeMap<usize, String>,
    ) -> Result<Placement> {
        Placement::of_parts(backends, graph, &parts(backends.len(), graph, assign)?, assign, why)
    }

    pub(super) fn of_parts(
        backends: &[Backend],
        graph: &Graph,
        parts: &[SegmentGraph],
        assign: &[usize],
        why: &BTreeMap<usize, String>,
    ) -> Result<Placement> {
        let mut p = Placement { segments: parts.len(), ..Placement::default() };
        p.devices = backends.iter().map(|b| Share { id: b.id().into(), ..Share::default() }).collect();
        let placed: BTreeSet<NodeId> = parts.iter().flat_map(|x| x.nodes.iter().copied()).collect();
        for id in placed {
            let (n, device) = (graph.node(id), assign[id.index()]);
            let (flops, bytes) = cost::of_node(graph, id)?;
            let d = &mut p.devices[device];
            d.ops += 1;
            d.flops = d.flops.saturating_add(flops);
            p.ops.push(PlacedOp {
                op: n.op.name(),
                at: n.span.text().into(),
                device,
                flops,
                bytes,
                reason: why.get(&id.index()).cloned(),
            });
        }
        for part in parts {
            for n in part.graph.nodes() {
                if let Op::Const(c) = &n.op {
                    p.devices[part.device].constants += c.bytes().len() as u64;
                }
            }
        }
        p.copies = copies(backends, graph, parts)?;
        for c in &p.copies {
            if let (true, Some(d)) = (c.direct, c.to) {
                p.devices[d].received += c.bytes;
                continue;
            }
            if let Some(d) = c.to {
                p.devices[d].uploaded += c.bytes;
            }
            if let Some(d) = c.from {
                p.devices[d].downloaded += c.bytes;
            }
        }
        Ok(p)
    }
}
