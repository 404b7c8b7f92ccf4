//! `Split`: one graph run on several devices. [`Placement`] says which op runs where and what is copied.
//!
//! The graph is cut into segments. Each segment is a graph that is planned and compiled for its device like
//! any other. Values that cross segments on different devices are copied from device to device where that is
//! possible ([`halcyon_hal::Device::copy_from_peer`]), else through the host. Nodes computed from constants
//! alone are duplicated in each segment that reads them. [`Placement`] gives all of this before a run, with
//! the bytes that [`halcyon_hal::Counters`] will count.

use crate::backend::Backend;
use crate::executable::Executable;
use halcyon_hal::{BufferRef, Tag};
use halcyon_ir::error::{Error, Result};
use halcyon_ir::graph::{Graph, Node, NodeId};
use halcyon_ir::kernel::verify_for;
use halcyon_ir::lower::{LowerOptions, lower};
use halcyon_ir::passes::{Level, PassOptions};
use halcyon_ir::plan::StepWork;
use halcyon_ir::{ConstData, Op, Scalar, cost, host};
use serde::Serialize;
use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Instant;

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
    /// Why the op is not on the device asked for; `None` if it is.
    pub reason: Option<String>,
}

/// A value that is copied in every run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PlacedCopy {
    /// The op that computes it, or the name of the input or output.
    pub value: String,
    /// Index in [`Placement::devices`]; `None` for the host.
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

/// Which op runs on which device, and what is copied.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Placement {
    /// One share per backend, in their order.
    pub devices: Vec<Share>,
    /// In the graph's order, without inputs, constants and ops computed from constants alone.
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

/// A part of the graph that runs on one device.
#[derive(Debug)]
struct Segment {
    device: usize,
    exe: Arc<Executable>,
    /// Inputs and outputs are nodes of the whole graph.
    inputs: Vec<NodeId>,
    outputs: Vec<NodeId>,
    /// Values that no later segment reads.
    last: Vec<NodeId>,
}

/// A graph compiled for several devices.
#[derive(Debug)]
pub struct Split {
    graph: Graph,
    backends: Vec<Backend>,
    segments: Vec<Segment>,
    placement: Placement,
    /// Pairs (from, to) of devices that copy directly, without the host.
    direct: BTreeSet<(usize, usize)>,
}

/// For each node, whether it is computed from constants alone. Such nodes are duplicated in each segment.
fn constant(g: &Graph) -> Vec<bool> {
    let mut c: Vec<bool> = vec![];
    for n in g.nodes() {
        let it = match n.op {
            Op::Input(_) => false,
            _ => n.op.is_leaf() || n.inputs.iter().all(|i| c[i.index()]),
        };
        c.push(it);
    }
    c
}

/// Assigns a device to every node by a split into layers: in node order, the first `shares[0]` of the work
/// goes to the first device, and so on; only the ratios of `shares` matter. Each cut is moved, within 1/20 of
/// the work, to where the fewest bytes cross it. Work is measured in FLOPs, or in bytes moved if the graph
/// has no FLOPs.
///
/// # Errors
/// [`Error::Argument`] for shares that are not positive numbers; errors for a graph with symbols.
pub fn by_layers(g: &Graph, shares: &[f64]) -> Result<Vec<usize>> {
    if shares.is_empty() || shares.iter().any(|s| !s.is_finite() || *s <= 0.0) {
        return Err(Error::argument("split", format!("shares are positive numbers, not {shares:?}")));
    }
    let n = g.nodes().len();
    let constants = constant(g);
    let costs = g.ids().map(|i| cost::of_node(g, i)).collect::<Result<Vec<_>>>()?;
    let any = costs.iter().any(|c| c.0 > 0);
    let work = |i: usize| {
        if constants[i] || g.nodes()[i].op.is_leaf() {
            0
        } else if any {
            costs[i].0
        } else {
            costs[i].1
        }
    };
    // Work up to and including node i.
    let mut done = Vec::with_capacity(n);
    let mut sum = 0f64;
    for i in 0..n {
        sum += work(i) as f64;
        done.push(sum);
    }
    // Bytes that a cut after node i would send across: values computed before it and read after it.
    let mut last = vec![0usize; n];
    for (i, node) in g.nodes().iter().enumerate() {
        node.inputs.iter().for_each(|x| last[x.index()] = i);
    }
    g.outputs().iter().for_each(|o| last[o.node.index()] = last[o.node.index()].max(o.node.index()));
    let mut crossing = vec![0i128; n + 1];
    for i in (0..n).filter(|i| !constants[*i]) {
        let bytes = i128::from(cost::type_bytes(&g.nodes()[i].ty)?);
        // Inputs are on the host, so a cut does not copy them between devices.
        if last[i] > i && !g.nodes()[i].op.is_leaf() {
            crossing[i] += bytes;
            crossing[last[i]] -= bytes;
        }
    }
    for i in 1..=n {
        crossing[i] += crossing[i - 1];
    }
    let all: f64 = shares.iter().sum();
    let (mut assign, mut from, mut share) = (vec![shares.len() - 1; n], 0, 0.0);
    for (d, s) in shares[..shares.len() - 1].iter().enumerate() {
        share += s / all;
        let goal = share * sum;
        let near = |i: usize| (done[i] - goal).abs();
        let after = from..n.saturating_sub(1);
        let closest = after.clone().map(near).fold(f64::INFINITY, f64::min);
        let bound = closest.max(sum / 20.0);
        let cut = after
            .filter(|i| near(*i) <= bound)
            .min_by(|a, b| crossing[*a].cmp(&crossing[*b]).then(near(*a).total_cmp(&near(*b))));
        let Some(cut) = cut else { break };
        assign[from..=cut].fill(d);
        from = cut + 1;
    }
    Ok(assign)
}

/// Whether a device can run one node; the error says why not.
fn takes(b: &Backend, g: &Graph, id: NodeId) -> Result<()> {
    let n = g.node(id);
    let mut one = Graph::new();
    one.span = n.span.clone();
    let inputs =
        n.inputs.iter().enumerate().map(|(k, x)| one.input(&format!("x{k}"), g.ty(*x).clone())).collect();
    let y = one.push_unchecked(Node { inputs, ..n.clone() });
    one.output("y", y);
    let passes = PassOptions { level: Level::O1, ..b.lower_options().passes };
    let target = b.device().as_target();
    let plan = lower(&one, target, &LowerOptions { passes, ..b.lower_options() })?;
    let caps = target.caps();
    if let Some(big) = plan.buffers.iter().find(|x| x.bytes as u64 > caps.max_binding_bytes) {
        return Err(Error::unsupported(
            format!("{} bytes in one buffer, where {} binds {}", big.bytes, b.id(), caps.max_binding_bytes),
            "Use another device, or smaller inputs",
        ));
    }
    plan.steps.iter().try_for_each(|s| match &s.work {
        StepWork::Kernel { kernel, .. } => verify_for(kernel, caps),
        _ => Ok(()),
    })
}

/// Assigns a device to every node: the first device runs all ops it can, the second the others. Also returns,
/// by node, why the others are on the second device.
///
/// # Errors
/// [`Error::Unsupported`], with the ops, if more than the fraction `limit` of the FLOPs would run on the
/// second device; the error of an op that neither device can run.
pub fn by_support(
    first: &Backend,
    rest: &Backend,
    g: &Graph,
    limit: f64,
) -> Result<(Vec<usize>, BTreeMap<usize, String>)> {
    let constants = constant(g);
    let (mut assign, mut why) = (vec![0; g.nodes().len()], BTreeMap::new());
    let (mut all, mut away) = (0u64, 0u64);
    for id in g.ids() {
        let n = g.node(id);
        if constants[id.index()] || n.op.is_leaf() {
            continue;
        }
        let flops = cost::of_node(g, id)?.0;
        all = all.saturating_add(flops);
        match takes(first, g, id) {
            Ok(()) => {}
            Err(e @ (Error::Unsupported { .. } | Error::UnsupportedOps(_) | Error::DType { .. })) => {
                takes(rest, g, id)?;
                assign[id.index()] = 1;
                away = away.saturating_add(flops);
                why.insert(id.index(), e.to_string());
            }
            Err(e) => return Err(e),
        }
    }
    let share = away as f64 / all.max(1) as f64;
    // A limit of 0 also rejects ops without FLOPs.
    if share > limit || (limit <= 0.0 && !why.is_empty()) {
        let named = |i: &usize| format!("{} at {}", g.nodes()[*i].op.name(), g.nodes()[*i].span);
        let some: Vec<String> = why.keys().take(4).map(named).collect();
        let more = why.len().saturating_sub(some.len());
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        return Err(Error::unsupported(
            format!(
                "{} ops with {:.1} % of the FLOPs on {}, where {:.1} % may leave it: {}{more}; the first because: {}",
                why.len(),
                100.0 * share,
                first.id(),
                100.0 * limit,
                some.join(", "),
                why.values().next().map_or("", String::as_str)
            ),
            format!("Let more of the work go to {}, or use it alone", rest.id()),
        ));
    }
    Ok((assign, why))
}

/// The cost model of copies to or from a device: latency plus bytes times `per_byte`.
#[derive(Clone, Copy)]
struct Copying {
    /// Seconds for a copy of any size.
    latency: f64,
    /// Seconds per byte.
    per_byte: f64,
}

impl Copying {
    fn seconds(self, bytes: u64) -> f64 {
        self.latency + bytes as f64 * self.per_byte
    }
}

/// Whether values are copied from one device to the other without the host.
fn direct(from: &Backend, to: &Backend) -> bool {
    to.device().can_copy_from(&**from.device()).is_ok()
}

/// Measures writing to and reading from a device, with copies of 4 bytes and of 1 MiB (less if memory is
/// short), best of three.
fn rates(b: &Backend) -> Result<(Copying, Copying)> {
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
    let line = |small: f64, all: f64| Copying {
        latency: small,
        per_byte: (all - small).max(0.0) / (large - SMALL) as f64,
    };
    Ok((line(small.0, all.0), line(small.1, all.1)))
}

impl Placement {
    /// Placement of a graph without symbols on `backends`. `assign` gives the device of each node, as an
    /// index into `backends`; `why` gives reasons for the placement of some nodes. Nothing is compiled, but
    /// reads and writes of the devices are timed.
    ///
    /// # Errors
    /// As [`Split::new`], except for errors of planning.
    pub fn of(
        backends: &[Backend],
        graph: &Graph,
        assign: &[usize],
        why: &BTreeMap<usize, String>,
    ) -> Result<Placement> {
        Placement::of_parts(backends, graph, &parts(backends, graph, assign)?, assign, why)
    }

    fn of_parts(
        backends: &[Backend],
        graph: &Graph,
        parts: &[Part],
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

/// Measures direct copies from one device to another, in the same way as `rates`.
fn rate_between(from: &Backend, to: &Backend) -> Result<Copying> {
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
    Ok(Copying { latency: small, per_byte: (all - small).max(0.0) / (large - SMALL) as f64 })
}

/// The copies of a run, in order, with their bytes and estimated times.
fn copies(backends: &[Backend], graph: &Graph, parts: &[Part]) -> Result<Vec<PlacedCopy>> {
    let rates = backends.iter().map(rates).collect::<Result<Vec<_>>>()?;
    let mut copies = vec![];
    let mut at: BTreeSet<(NodeId, usize)> = BTreeSet::new();
    let mut made: HashMap<NodeId, usize> = HashMap::new();
    let bytes = |v: NodeId| cost::type_bytes(graph.ty(v));
    let mut between: HashMap<(usize, usize), Copying> = HashMap::new();
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

impl Split {
    /// Plans and compiles a graph without symbols for `backends`. `assign` gives the device of each node, as
    /// an index into `backends`; `why` gives reasons for the placement of some nodes.
    ///
    /// # Errors
    /// [`Error::Argument`] if `assign` has the wrong length or names a device that does not exist;
    /// [`Error::Unsupported`] for graphs with states; errors of planning a segment, including the memory
    /// check of its device.
    pub fn new(
        backends: &[Backend],
        graph: Graph,
        assign: &[usize],
        why: &BTreeMap<usize, String>,
    ) -> Result<Split> {
        let parts = parts(backends, &graph, assign)?;
        let placement = Placement::of_parts(backends, &graph, &parts, assign, why)?;
        // Outputs of the graph stay in memory until the host has read them.
        let mut seen: BTreeSet<NodeId> = graph.outputs().iter().map(|o| o.node).collect();
        let mut segments = vec![];
        for part in parts.into_iter().rev() {
            let last = part.inputs.iter().chain(&part.outputs).copied().filter(|v| seen.insert(*v)).collect();
            segments.push((part, last));
        }
        let segments = segments
            .into_iter()
            .rev()
            .map(|(Part { device, graph, inputs, outputs, .. }, last)| {
                Ok(Segment { device, exe: backends[device].plan(graph, vec![])?, inputs, outputs, last })
            })
            .collect::<Result<_>>()?;
        let n = backends.len();
        let pairs = (0..n).flat_map(|from| (0..n).map(move |to| (from, to)));
        let direct =
            pairs.filter(|(from, to)| from != to && direct(&backends[*from], &backends[*to])).collect();
        Ok(Split { graph, backends: backends.to_vec(), segments, placement, direct })
    }

    /// Splits by layers, see [`by_layers`]; each backend comes with its share.
    ///
    /// # Errors
    /// As [`by_layers`] and [`Split::new`].
    pub fn layers(backends: &[(Backend, f64)], graph: Graph) -> Result<Split> {
        let shares: Vec<f64> = backends.iter().map(|b| b.1).collect();
        let assign = by_layers(&graph, &shares)?;
        let backends: Vec<Backend> = backends.iter().map(|b| b.0.clone()).collect();
        Split::new(&backends, graph, &assign, &BTreeMap::new())
    }

    /// Runs on the first device all ops that it supports and the others on the second, if at most the
    /// fraction `limit` (0 to 1) of the FLOPs is on the second: see [`by_support`].
    ///
    /// # Errors
    /// As [`by_support`] and [`Split::new`].
    pub fn leaving(first: &Backend, rest: &Backend, graph: Graph, limit: f64) -> Result<Split> {
        let (assign, why) = by_support(first, rest, &graph, limit)?;
        Split::new(&[first.clone(), rest.clone()], graph, &assign, &why)
    }

    /// Which op runs where, and what a run copies.
    pub fn placement(&self) -> &Placement {
        &self.placement
    }

    /// The backends, in the order of [`Placement::devices`].
    pub fn backends(&self) -> &[Backend] {
        &self.backends
    }

    /// Runs the graph with inputs in its order and values of its run-time arguments. Outputs are in the
    /// graph's order.
    ///
    /// # Errors
    /// [`Error::Argument`] if the number, dtypes or shapes of the inputs are not the graph's; errors of the
    /// devices.
    pub fn run(&self, inputs: &[ConstData], args: &[Scalar]) -> Result<Vec<ConstData>> {
        let specs = self.graph.inputs();
        if specs.len() != inputs.len() {
            let what = format!("the graph takes {}, {} given", specs.len(), inputs.len());
            return Err(Error::argument("inputs", what));
        }
        for (s, x) in specs.iter().zip(inputs) {
            let ty = self.graph.ty(s.node);
            if ty.dtype != x.dtype || ty.shape.dims()? != x.dims {
                let what = format!("input \"{}\" is {}{:?}, the graph takes {ty}", s.name, x.dtype, x.dims);
                return Err(Error::argument("inputs", what));
            }
        }
        let mut at: HashMap<(NodeId, usize), BufferRef> = HashMap::new();
        let mut made: HashMap<NodeId, usize> = HashMap::new();
        for s in &self.segments {
            let backend = &self.backends[s.device];
            let d = backend.device();
            let mut buffers = Vec::with_capacity(s.inputs.len());
            for &v in &s.inputs {
                if let Some(b) = at.get(&(v, s.device)) {
                    buffers.push(b.clone());
                    continue;
                }
                if let Some(&from) = made.get(&v)
                    && self.direct.contains(&(from, s.device))
                {
                    let b = self.receive(&at, v, from, backend)?;
                    at.insert((v, s.device), b.clone());
                    buffers.push(b);
                    continue;
                }
                let moved;
                let bytes = match (&self.graph.node(v).op, made.get(&v)) {
                    (_, Some(&from)) => {
                        moved = self.read(&at, v, from)?;
                        moved.bytes()
                    }
                    (Op::Input(k), None) => inputs[*k as usize].bytes(),
                    _ => return Err(Error::internal("a segment reads a value that nothing has made")),
                };
                let b = d.alloc(bytes.len(), Tag::Io)?;
                d.write(&b, 0, bytes)?;
                at.insert((v, s.device), b.clone());
                buffers.push(b);
            }
            let outputs = s.exe.run(&buffers, args)?;
            for (v, b) in s.outputs.iter().zip(outputs) {
                at.insert((*v, s.device), b);
                made.insert(*v, s.device);
            }
            for v in &s.last {
                (0..self.backends.len()).for_each(|d| {
                    at.remove(&(*v, d));
                });
            }
        }
        let outputs = self
            .graph
            .outputs()
            .iter()
            .map(|o| match (&self.graph.node(o.node).op, made.get(&o.node)) {
                (_, Some(&d)) => self.read(&at, o.node, d),
                (Op::Input(k), None) => Ok(inputs[*k as usize].clone()),
                _ => Err(Error::internal("an output that no segment makes")),
            })
            .collect::<Result<Vec<_>>>()?;
        self.backends.iter().try_for_each(Backend::check_faults)?;
        Ok(outputs)
    }

    /// Copies a value directly from one device to another.
    fn receive(
        &self,
        at: &HashMap<(NodeId, usize), BufferRef>,
        v: NodeId,
        from: usize,
        to: &Backend,
    ) -> Result<BufferRef> {
        let src = at
            .get(&(v, from))
            .ok_or_else(|| Error::internal("a value was dropped before its last reader"))?;
        let bytes = cost::type_bytes(self.graph.ty(v))? as usize;
        let dst = to.device().alloc(bytes, Tag::Io)?;
        to.device().copy_from_peer(&**self.backends[from].device(), src, 0, &dst, 0, bytes)?;
        Ok(dst)
    }

    /// Copies a value to the host.
    fn read(&self, at: &HashMap<(NodeId, usize), BufferRef>, v: NodeId, device: usize) -> Result<ConstData> {
        let b = at
            .get(&(v, device))
            .ok_or_else(|| Error::internal("a value was dropped before its last reader"))?;
        let ty = self.graph.ty(v);
        let mut bytes = host::zeros(cost::type_bytes(ty)? as usize, "a value between devices")?;
        self.backends[device].device().read(b, 0, &mut bytes)?;
        ConstData::new(ty.dtype, &ty.shape.dims()?, Arc::new(bytes))
    }
}

/// A segment before planning.
#[derive(Debug)]
struct Part {
    device: usize,
    /// Its nodes in the whole graph, without the duplicated nodes computed from constants.
    nodes: Vec<NodeId>,
    graph: Graph,
    inputs: Vec<NodeId>,
    outputs: Vec<NodeId>,
}

/// Cuts a graph into parts, in an order in which they can run.
fn parts(backends: &[Backend], g: &Graph, assign: &[usize]) -> Result<Vec<Part>> {
    if assign.len() != g.nodes().len() || assign.iter().any(|d| *d >= backends.len()) {
        let what = format!("{} nodes need a device each, of {}", g.nodes().len(), backends.len());
        return Err(Error::argument("split", what));
    }
    if !g.states().is_empty() {
        return Err(Error::unsupported("a graph with states over several devices", "Run it on one device"));
    }
    let cuts = Cuts::of(g, assign);
    let one = |(k, (device, nodes)): (usize, &(usize, Vec<NodeId>))| {
        let (graph, inputs, outputs) = cuts.graph_of(g, k, nodes)?;
        Ok(Part { device: *device, nodes: nodes.clone(), graph, inputs, outputs })
    };
    cuts.segments.iter().enumerate().map(one).collect()
}

/// The segment of each node.
struct Cuts {
    /// `None` for inputs, and for nodes that each segment duplicates.
    place: Vec<Option<usize>>,
    /// Device and nodes of each segment, in an order in which they can run.
    segments: Vec<(usize, Vec<NodeId>)>,
    /// For each node, the other segments that read it.
    readers: Vec<BTreeSet<usize>>,
    /// Which nodes are computed from constants alone.
    constants: Vec<bool>,
}

impl Cuts {
    fn of(g: &Graph, assign: &[usize]) -> Cuts {
        let live = g.live(&g.outputs().iter().map(|o| o.node).collect::<Vec<_>>());
        let constants = constant(g);
        let output: BTreeSet<usize> = g.outputs().iter().map(|o| o.node.index()).collect();
        // A node's stage is the largest number of device changes on a path to it. Nodes of one stage and
        // device never wait for each other's segments, so they can form one segment.
        let mut keys: Vec<Option<(usize, usize)>> = vec![None; g.nodes().len()];
        for (i, n) in g.nodes().iter().enumerate() {
            // A constant that is an output must be computed in some segment.
            let own = constants[i] && !output.contains(&i);
            if own || !live[i] || matches!(n.op, Op::Input(_)) {
                continue;
            }
            let of = |x: &NodeId| keys[x.index()].map(|(s, d)| s + usize::from(d != assign[i]));
            let stage = n.inputs.iter().filter_map(of).max().unwrap_or(0);
            keys[i] = Some((stage, assign[i]));
        }
        // Move a node that could run early to the stage of its first reader on its device, so that it does
        // not form a segment of its own.
        let mut readers: Vec<Vec<usize>> = vec![vec![]; g.nodes().len()];
        for (i, n) in g.nodes().iter().enumerate().filter(|(i, _)| keys[*i].is_some()) {
            n.inputs.iter().for_each(|x| readers[x.index()].push(i));
        }
        for i in (0..keys.len()).rev().filter(|i| !output.contains(i)) {
            let Some((stage, device)) = keys[i] else { continue };
            let readers = || readers[i].iter().filter_map(|r| keys[*r]);
            let latest = readers().map(|(s, d)| s - usize::from(d != device)).min().unwrap_or(stage);
            if latest > stage && readers().any(|k| k == (latest, device)) {
                keys[i] = Some((latest, device));
            }
        }
        let mut groups: BTreeMap<(usize, usize), Vec<NodeId>> = BTreeMap::new();
        for (i, k) in keys.iter().enumerate() {
            if let Some(k) = k {
                groups.entry(*k).or_default().push(NodeId(i as u32));
            }
        }
        let mut place = vec![None; g.nodes().len()];
        for (s, nodes) in groups.values().enumerate() {
            nodes.iter().for_each(|n| place[n.index()] = Some(s));
        }
        let mut readers = vec![BTreeSet::new(); g.nodes().len()];
        for (i, n) in g.nodes().iter().enumerate() {
            let Some(s) = place[i] else { continue };
            for x in &n.inputs {
                if place[x.index()].is_some_and(|p| p != s) {
                    readers[x.index()].insert(s);
                }
            }
        }
        Cuts { place, segments: groups.into_iter().map(|((_, d), n)| (d, n)).collect(), readers, constants }
    }

    /// Segment `k` as a graph, with the nodes of the whole graph that correspond to its inputs and outputs.
    fn graph_of(&self, g: &Graph, k: usize, nodes: &[NodeId]) -> Result<(Graph, Vec<NodeId>, Vec<NodeId>)> {
        let mut sub = Graph::new();
        let mut map: HashMap<NodeId, NodeId> = HashMap::new();
        let (mut inputs, mut outputs) = (vec![], vec![]);
        // Run-time arguments keep their numbers.
        let args: Vec<NodeId> = g.args().iter().map(|d| sub.arg(*d)).collect();
        let finals: BTreeSet<NodeId> = g.outputs().iter().map(|o| o.node).collect();
        // A node that the segment reads from outside becomes an input of the segment; one computed from
        // constants alone is duplicated.
        let mut need: Vec<NodeId> = vec![];
        for &id in nodes {
            need.push(id);
            while let Some(&at) = need.last() {
                let n = g.node(at);
                if map.contains_key(&at) {
                    need.pop();
                    continue;
                }
                // A constant that is an output has its own segment. No other waits for that, as it may come
                // later: they duplicate the constant.
                let elsewhere = self.place[at.index()].is_some_and(|p| p != k) && !self.constants[at.index()];
                let from_outside = matches!(n.op, Op::Input(_)) || elsewhere;
                if from_outside {
                    sub.span = n.span.clone();
                    map.insert(at, sub.input(&format!("v{}", at.0), n.ty.clone()));
                    inputs.push(at);
                    need.pop();
                    continue;
                }
                let waits: Vec<NodeId> = n.inputs.iter().copied().filter(|x| !map.contains_key(x)).collect();
                if !waits.is_empty() {
                    need.extend(waits);
                    continue;
                }
                let new = match n.op {
                    Op::Arg(a) => {
                        *args.get(a as usize).ok_or_else(|| Error::internal("an argument is not declared"))?
                    }
                    _ => sub.push_unchecked(Node {
                        inputs: n.inputs.iter().map(|x| map[x]).collect(),
                        ..n.clone()
                    }),
                };
                map.insert(at, new);
                need.pop();
            }
            if finals.contains(&id) || !self.readers[id.index()].is_empty() {
                outputs.push(id);
            }
        }
        for v in &outputs {
            sub.output(&format!("v{}", v.0), map[v]);
        }
        Ok((sub, inputs, outputs))
    }
}
