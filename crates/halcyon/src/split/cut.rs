//! Cuts a graph into segments.

use halcyon_ir::Op;
use halcyon_ir::error::{Error, Result};
use halcyon_ir::graph::{Graph, Node, NodeId};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// For each node, whether it is constant: computed from constants, literals and run-time arguments alone,
/// without inputs. Constant nodes are duplicated in each segment that reads them.
pub(super) fn constant(g: &Graph) -> Vec<bool> {
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

/// A segment before planning.
#[derive(Debug)]
pub(super) struct SegmentGraph {
    pub(super) device: usize,
    /// The segment's nodes, with their ids in the whole graph. Duplicated constant nodes are not included.
    pub(super) nodes: Vec<NodeId>,
    pub(super) graph: Graph,
    pub(super) inputs: Vec<NodeId>,
    pub(super) outputs: Vec<NodeId>,
}

/// Cuts a graph into segments, in an order in which they can run.
pub(super) fn parts(devices: usize, g: &Graph, assign: &[usize]) -> Result<Vec<SegmentGraph>> {
    if assign.len() != g.nodes().len() || assign.iter().any(|d| *d >= devices) {
        let what = format!("each of the {} nodes needs a device number below {}", g.nodes().len(), devices);
        return Err(Error::argument("split", what));
    }
    if !g.states().is_empty() {
        return Err(Error::unsupported("a graph with states over several devices", "Run it on one device"));
    }
    let cuts = Cuts::of(g, assign);
    let one = |(k, (device, nodes)): (usize, &(usize, Vec<NodeId>))| {
        let (graph, inputs, outputs) = cuts.graph_of(g, k, nodes)?;
        Ok(SegmentGraph { device: *device, nodes: nodes.clone(), graph, inputs, outputs })
    };
    cuts.segments.iter().enumerate().map(one).collect()
}

/// The segment of each node.
struct Cuts {
    /// `None` for inputs, for nodes that each segment duplicates, and for nodes that no output depends on.
    place: Vec<Option<usize>>,
    /// Device and nodes of each segment, in an order in which they can run.
    segments: Vec<(usize, Vec<NodeId>)>,
    /// For each node, the other segments that read it.
    readers: Vec<BTreeSet<usize>>,
    /// Which nodes are constant (see [`constant`]).
    constants: Vec<bool>,
}

impl Cuts {
    fn of(g: &Graph, assign: &[usize]) -> Cuts {
        let live = g.live(&g.outputs().iter().map(|o| o.node).collect::<Vec<_>>());
        let constants = constant(g);
        let output: BTreeSet<usize> = g.outputs().iter().map(|o| o.node.index()).collect();
        // A node's depth is the largest number of device changes on a path to it. If two nodes have the same
        // depth and device, no path between them leaves the device, so they can be in one segment.
        let mut keys: Vec<Option<(usize, usize)>> = vec![None; g.nodes().len()];
        for (i, n) in g.nodes().iter().enumerate() {
            // A constant that is an output must be computed in some segment.
            let own = constants[i] && !output.contains(&i);
            if own || !live[i] || matches!(n.op, Op::Input(_)) {
                continue;
            }
            let of = |x: &NodeId| keys[x.index()].map(|(s, d)| s + usize::from(d != assign[i]));
            let depth = n.inputs.iter().filter_map(of).max().unwrap_or(0);
            keys[i] = Some((depth, assign[i]));
        }
        // Find the greatest depth that the readers of a node permit. If a reader on the node's device has
        // this depth, move the node to it, so that the node does not form a segment of its own.
        let mut readers: Vec<Vec<usize>> = vec![vec![]; g.nodes().len()];
        for (i, n) in g.nodes().iter().enumerate().filter(|(i, _)| keys[*i].is_some()) {
            n.inputs.iter().for_each(|x| readers[x.index()].push(i));
        }
        for i in (0..keys.len()).rev().filter(|i| !output.contains(i)) {
            let Some((depth, device)) = keys[i] else { continue };
            let readers = || readers[i].iter().filter_map(|r| keys[*r]);
            let latest = readers().map(|(s, d)| s - usize::from(d != device)).min().unwrap_or(depth);
            if latest > depth && readers().any(|k| k == (latest, device)) {
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
        // If the segment reads a node of another segment or an input of the graph, that node becomes an input
        // of the segment. If the segment reads a constant node, the node is duplicated.
        let mut need: Vec<NodeId> = vec![];
        for &id in nodes {
            need.push(id);
            while let Some(&at) = need.last() {
                let n = g.node(at);
                if map.contains_key(&at) {
                    need.pop();
                    continue;
                }
                // A constant that is an output belongs to one segment. Other segments duplicate it and do not
                // read it from that segment, because that segment may run later.
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
