//! `Split`: one graph run on several devices.
//!
//! The graph is cut into segments. Each segment is a graph that is planned and compiled for its device like
//! any other. If a segment reads a value that another device has computed, the value is copied directly from
//! device to device where that is possible ([`halcyon_hal::Device::copy_from_peer`]), else through the host.
//! Nodes that depend on no input are duplicated in each segment that reads them. Before a run,
//! [`Placement`] gives the device of every op and the copies, with the bytes that [`halcyon_hal::Counters`]
//! will count.

mod assign;
mod copy;
mod cut;
mod placement;

use crate::backend::Backend;
use crate::executable::Executable;
pub use assign::{by_layers, by_support};
pub use copy::PlacedCopy;
use copy::direct;
use cut::{SegmentGraph, parts};
use halcyon_hal::{BufferRef, Tag};
use halcyon_host as host;
use halcyon_ir::error::{Error, Result};
use halcyon_ir::graph::{Graph, NodeId};
use halcyon_ir::{ConstData, Op, Scalar, cost};
pub use placement::{PlacedOp, Placement, Share};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

/// A part of the graph that runs on one device.
#[derive(Debug)]
struct Segment {
    device: usize,
    exe: Arc<Executable>,
    /// The segment's inputs. They are nodes of the whole graph, as are the outputs.
    inputs: Vec<NodeId>,
    outputs: Vec<NodeId>,
    /// The inputs and outputs that neither a later segment nor the caller reads. Their buffers are released
    /// after the segment.
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
        let parts = parts(backends.len(), &graph, assign)?;
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
            .map(|(SegmentGraph { device, graph, inputs, outputs, .. }, last)| {
                Ok(Segment { device, exe: backends[device].plan(graph, vec![])?, inputs, outputs, last })
            })
            .collect::<Result<_>>()?;
        let n = backends.len();
        let pairs = (0..n).flat_map(|from| (0..n).map(move |to| (from, to)));
        let direct =
            pairs.filter(|(from, to)| from != to && direct(&backends[*from], &backends[*to])).collect();
        Ok(Split { graph, backends: backends.to_vec(), segments, placement, direct })
    }

    /// Splits by layers, see [`by_layers`]. The number beside each backend is its share of the work.
    ///
    /// # Errors
    /// The errors of [`by_layers`] and [`Split::new`].
    pub fn layers(backends: &[(Backend, f64)], graph: Graph) -> Result<Split> {
        let shares: Vec<f64> = backends.iter().map(|b| b.1).collect();
        let assign = by_layers(&graph, &shares)?;
        let backends: Vec<Backend> = backends.iter().map(|b| b.0.clone()).collect();
        Split::new(&backends, graph, &assign, &BTreeMap::new())
    }

    /// Assigns all ops that `first` supports to `first`, and the others to `rest`. If the others have more
    /// than the fraction `limit` (0 to 1) of the FLOPs, the result is an error; see [`by_support`].
    ///
    /// # Errors
    /// The errors of [`by_support`] and [`Split::new`].
    pub fn leaving(first: &Backend, rest: &Backend, graph: Graph, limit: f64) -> Result<Split> {
        let (assign, why) = by_support(first, rest, &graph, limit)?;
        Split::new(&[first.clone(), rest.clone()], graph, &assign, &why)
    }

    /// The device of every op, and the copies of a run.
    pub fn placement(&self) -> &Placement {
        &self.placement
    }

    /// The backends, in the order of [`Placement::devices`].
    pub fn backends(&self) -> &[Backend] {
        &self.backends
    }

    /// Runs the graph. `inputs` and the results are in the graph's order; `args` are the values of the
    /// graph's run-time arguments.
    ///
    /// # Errors
    /// [`Error::Argument`] if the number, dtypes or shapes of the inputs are not the graph's; errors of the
    /// devices.
    pub fn run(&self, inputs: &[ConstData], args: &[Scalar]) -> Result<Vec<ConstData>> {
        let specs = self.graph.inputs();
        if specs.len() != inputs.len() {
            let what = format!("the graph takes {} inputs, got {}", specs.len(), inputs.len());
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
                    _ => return Err(Error::internal("a segment reads a value that was not computed before")),
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
                _ => Err(Error::internal("an output of the graph that no segment computes")),
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
