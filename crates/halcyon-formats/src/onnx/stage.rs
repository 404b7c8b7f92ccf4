//! Runs a model in stages. When the importer needs a value that only a run can give (a condition, a size, or
//! the input of an operator whose result shape depends on data), the graph built so far runs on the device,
//! and the rest is built on its results.
//!
//! A run computes only the nodes that the wanted nodes depend on, back to nodes that earlier runs computed.
//! It also keeps those of its results from which other live values are computed, so every [`Value`] stays
//! valid. Between the iterations of a loop, nodes that no value needs any more are dropped if there are many.
//!
//! Loop bodies are compiled once if possible ([`super::body`]).

use super::build::{Builder, Value};
use super::host::{Host, Num};
use super::item::{Datum, Item};
use halcyon_ir::graph::Node;
use halcyon_ir::{ConstData, DType, Error, Graph, NodeId, Result, Span, TensorType};
use std::any::Any;
use std::collections::{BTreeSet, HashMap};
use std::fmt::Debug;
use std::sync::Arc;

/// A tensor in the engine's memory.
pub type Handle = Arc<dyn Any + Send + Sync>;

/// The engine that runs the stages of a model.
pub trait Engine: Debug {
    /// Runs a graph on `inputs` and returns its outputs, both in the graph's order. The graph has no symbols.
    fn run(&mut self, graph: Graph, inputs: &[Handle]) -> Result<Vec<Handle>>;
    fn upload(&mut self, data: &ConstData) -> Result<Handle>;
    fn read(&mut self, tensor: &Handle) -> Result<ConstData>;

    /// Prepares a graph for many runs with [`Engine::launch`].
    fn prepare(&mut self, graph: Graph) -> Result<Handle> {
        Ok(Arc::new(graph))
    }

    /// Runs a prepared graph. `inputs` and `outputs` are indices into `values`, in the graph's order.
    fn launch(
        &mut self,
        plan: &Handle,
        values: &mut [Option<Handle>],
        inputs: &[usize],
        outputs: &[usize],
    ) -> Result<()> {
        let graph: &Graph = plan.downcast_ref().ok_or_else(|| Error::internal("a plan of another engine"))?;
        let x = inputs.iter().map(|i| value_of(&values[*i]).cloned()).collect::<Result<Vec<_>>>()?;
        let y = self.run(graph.clone(), &x)?;
        outputs.iter().zip(y).for_each(|(o, y)| values[*o] = Some(y));
        Ok(())
    }

    /// Reads a condition, a tensor of one element.
    fn flag(&mut self, tensor: &Handle) -> Result<bool> {
        let data = self.read(tensor)?;
        data.get(0).map(|s| s.as_bool()).ok_or_else(|| Error::internal("a condition without an element"))
    }

    /// Creates a tensor. Its first bytes are copied from `from`, as many as fit; the rest is undefined.
    fn resize(&mut self, from: Option<&Handle>, dtype: DType, dims: &[usize]) -> Result<Handle> {
        let old = from.map(|h| self.read(h)).transpose()?;
        let mut bytes = old.map_or(vec![], |d| d.bytes().to_vec());
        bytes.resize(dtype.bytes(dims.iter().product()), 0);
        self.upload(&ConstData::new(dtype, dims, Arc::new(bytes))?)
    }

    /// Copies a tensor into another at byte offset `at`. Clones of the handle `into` must not be in use:
    /// whether they see the change depends on the engine.
    fn put(&mut self, into: &mut Handle, at: usize, tensor: &Handle) -> Result<()> {
        let (to, row) = (self.read(into)?, self.read(tensor)?);
        let mut bytes = to.bytes().to_vec();
        let part = bytes.get_mut(at..at + row.bytes().len());
        part.ok_or_else(|| Error::internal("a row has no room"))?.copy_from_slice(row.bytes());
        *into = self.upload(&ConstData::new(to.dtype, &to.dims, Arc::new(bytes))?)?;
        Ok(())
    }
}

/// A value that must have been computed already.
pub(super) fn value_of(v: &Option<Handle>) -> Result<&Handle> {
    v.as_ref().ok_or_else(|| Error::internal("a step needs a value that no step computed"))
}

/// A value that the importer read from the device during a run. Results, and what compiled bodies read
/// (conditions and trip counts), are not listed.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Read {
    pub node: String,
    /// Why it was needed.
    pub what: String,
    pub bytes: u64,
}

/// A loop whose body was compiled.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct LoopRun {
    pub node: String,
    pub iterations: u64,
    /// Number of sets of shapes that the body was compiled for.
    pub bodies: usize,
}

/// The parts of a staged run that the device computed, and those that the host computed.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize)]
pub struct Placement {
    /// Number of graphs that ran on the device, without the runs of compiled loop bodies.
    pub stages: usize,
    /// Nodes computed on the host, each with its number of runs.
    pub host_nodes: Vec<(String, usize)>,
    pub reads: Vec<Read>,
    pub bytes_read: u64,
    pub bytes_written: u64,
    /// Loops whose bodies were compiled. Nested loops are part of the body and not listed.
    pub loops: Vec<LoopRun>,
    /// Missed optimisations: loops whose bodies could not be compiled, or were compiled several times.
    pub warnings: Vec<String>,
}

/// The most reads, loops and warnings that a [`Placement`] lists. Reads that are left out are still counted
/// in `bytes_read`.
const MAX_LISTED: usize = 256;
/// A loop runs the pending nodes once there are more than this many.
const STAGE_NODES: usize = 4096;
/// The most nodes that a loop may add to a graph that is built without an engine.
const UNROLLED_NODES: usize = 20_000;
/// Unneeded nodes are dropped once the graph has this many nodes, and twice as many as after the last drop.
const DROP_NODES: usize = 2 * STAGE_NODES;
/// Limit on the nodes of all stages together.
pub(super) const MAX_NODES: usize = 1 << 20;

#[derive(Clone)]
enum Source {
    Host(ConstData),
    Device(Handle),
}

impl Debug for Source {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if matches!(self, Source::Host(_)) { "host" } else { "device" })
    }
}

#[derive(Debug)]
pub(super) struct Stage {
    engine: Box<dyn Engine>,
    /// Nodes whose values have been computed.
    done: HashMap<NodeId, Source>,
    pub(super) placement: Placement,
    /// Total number of nodes when the last stage ran.
    mark: usize,
    /// Number of nodes left by the last drop of unneeded nodes.
    kept: usize,
}

impl Stage {
    pub(super) fn new(engine: Box<dyn Engine>) -> Stage {
        Stage { engine, done: HashMap::new(), placement: Placement::default(), mark: 0, kept: 0 }
    }

    /// The handle of a computed value. A value on the host is uploaded first.
    fn handle(&mut self, n: NodeId) -> Result<Handle> {
        let data = match self.done.get(&n) {
            None => return Err(Error::internal("a stage needs a value that no stage computed")),
            Some(Source::Device(h)) => return Ok(h.clone()),
            Some(Source::Host(d)) => d.clone(),
        };
        self.placement.bytes_written += data.bytes().len() as u64;
        let h = self.engine.upload(&data)?;
        self.done.insert(n, Source::Device(h.clone()));
        Ok(h)
    }
}

/// Marks the nodes that `roots` depend on. Stops at nodes that are `done`.
fn reach(g: &Graph, roots: impl Iterator<Item = NodeId>, done: &impl Fn(NodeId) -> bool) -> Vec<bool> {
    let mut seen = vec![false; g.nodes().len()];
    let mut todo: Vec<NodeId> = roots.collect();
    while let Some(n) = todo.pop() {
        if !std::mem::replace(&mut seen[n.index()], true) && !done(n) {
            todo.extend(&g.node(n).inputs);
        }
    }
    seen
}

/// A part of a graph as a separate graph.
pub(super) struct Subgraph {
    pub(super) graph: Graph,
    /// The nodes of the whole graph that its inputs and outputs correspond to.
    pub(super) inputs: Vec<NodeId>,
    pub(super) outputs: Vec<NodeId>,
}

/// The part that computes `wanted` from nodes that are `done`. Its outputs also include the nodes of the part
/// that are in `later`, or from which other nodes in `later` are computed.
pub(super) fn subgraph(
    g: &Graph,
    wanted: &[NodeId],
    later: &[NodeId],
    done: &impl Fn(NodeId) -> bool,
) -> Result<Subgraph> {
    let cone = reach(g, wanted.iter().copied(), done);
    let alive = reach(g, wanted.iter().chain(later).copied(), done);
    // Leaf nodes are cheap to recompute and are not kept.
    let keep = |n: NodeId| cone[n.index()] && !g.node(n).op.is_leaf() && !done(n);
    let mut outputs: BTreeSet<NodeId> = wanted.iter().copied().collect();
    outputs.extend(later.iter().copied().filter(|n| keep(*n)));
    for n in g.ids().filter(|n| alive[n.index()] && !cone[n.index()] && !done(*n)) {
        outputs.extend(g.node(n).inputs.iter().copied().filter(|x| keep(*x)));
    }

    let mut part = Graph::new();
    let mut map: HashMap<NodeId, NodeId> = HashMap::new();
    let mut inputs = vec![];
    for n in g.ids().filter(|n| cone[n.index()]) {
        let node = g.node(n);
        part.span = node.span.clone();
        let new = if done(n) {
            inputs.push(n);
            part.input(&format!("v{}", inputs.len()), node.ty.clone())
        } else {
            let lost = || Error::internal("a stage lost an operand");
            let operands = node.inputs.iter().map(|x| map.get(x).copied().ok_or_else(lost));
            part.push_unchecked(Node { inputs: operands.collect::<Result<_>>()?, ..node.clone() })
        };
        map.insert(n, new);
    }
    part.span = Span::default();
    for n in &outputs {
        part.output(&format!("o{}", part.outputs().len()), map[n]);
    }
    Ok(Subgraph { graph: part, inputs, outputs: outputs.into_iter().collect() })
}

impl Builder {
    /// A builder that can run what it has built.
    pub(super) fn staged(engine: Box<dyn Engine>) -> Builder {
        let mut b = Builder::default();
        b.stage = Some(Stage::new(engine));
        b
    }

    /// The report of the parts that ran on the device and on the host.
    pub(super) fn placement(&self) -> Placement {
        self.stage.as_ref().map(|s| s.placement.clone()).unwrap_or_default()
    }

    /// The error for a value that only a run can give, in a graph that is built without a run. `what` names
    /// the value.
    pub(super) fn no_engine(&mut self, what: &str) -> Error {
        self.needs_engine.get_or_insert_with(|| format!("{what} (at {})", self.g.span));
        Error::unsupported(
            format!("{what} computed at run time"),
            "Only values that follow from constants and shapes can be used in a graph; run the model in stages",
        )
    }

    /// The elements of a tensor of any size, on the host. In a staged run, the device computes them first.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a non-constant value of a graph that is built without a run; `what` names
    /// the value.
    pub fn fetch(&mut self, v: &Value, what: &str) -> Result<ConstData> {
        if let Some(d) = v.data()? {
            return Ok(d);
        }
        let n = self.id(v)?;
        if self.stage.is_none() {
            return Err(self.no_engine(what));
        }
        self.compute(&[n])?;
        let node = self.g.span.text().into_owned();
        let stage = self.stage.as_mut().ok_or_else(|| Error::internal("the engine is gone"))?;
        let data = match stage.done.get(&n) {
            Some(Source::Host(d)) => d.clone(),
            _ => {
                let h = stage.handle(n)?;
                let d = stage.engine.read(&h)?;
                let bytes = d.bytes().len() as u64;
                stage.placement.bytes_read += bytes;
                if stage.placement.reads.len() < MAX_LISTED {
                    stage.placement.reads.push(Read { node, what: what.into(), bytes });
                }
                d
            }
        };
        v.learn(data.clone());
        Ok(data)
    }

    /// Turns a result computed on the host into a tensor of the model.
    pub fn feed(&mut self, data: ConstData) -> Value {
        let Some(stage) = &mut self.stage else {
            // Without a run all operands were constant, so the result is constant too.
            return Value::weight(data, &self.g.span.text());
        };
        let node = self.g.span.text().into_owned();
        match stage.placement.host_nodes.iter_mut().find(|(n, _)| *n == node) {
            Some((_, count)) => *count += 1,
            None => stage.placement.host_nodes.push((node, 1)),
        }
        self.runtime_constant(data, "")
    }

    /// A run-time tensor whose value is known. Only for staged runs.
    pub(super) fn runtime_constant(&mut self, data: ConstData, name: &str) -> Value {
        let ty = halcyon_ir::TensorType::new(data.dtype, &data.dims);
        let n = self.g.input(name, ty);
        if let Some(stage) = &mut self.stage {
            stage.done.insert(n, Source::Host(data));
        }
        self.value(n)
    }

    /// Runs the device to compute `wanted`, plus the intermediate values that other live nodes need.
    fn compute(&mut self, wanted: &[NodeId]) -> Result<()> {
        let held: Vec<NodeId> = self.live_nodes();
        let g = &self.g;
        let Some(stage) = &mut self.stage else {
            return Err(Error::internal("there is no engine to compute with"));
        };
        let wanted: Vec<NodeId> = wanted.iter().copied().filter(|n| !stage.done.contains_key(n)).collect();
        if wanted.is_empty() {
            return Ok(());
        }
        self.limits.go_on(&g.span.text())?;
        let part = subgraph(g, &wanted, &held, &|n| stage.done.contains_key(&n))?;
        let outputs = part.outputs;
        let handles = part.inputs.into_iter().map(|n| stage.handle(n)).collect::<Result<Vec<_>>>()?;
        let results = stage.engine.run(part.graph, &handles)?;
        if results.len() != outputs.len() {
            return Err(Error::internal("the engine gave another number of outputs than the graph has"));
        }
        for (n, h) in outputs.iter().zip(results) {
            stage.done.insert(*n, Source::Device(h));
        }
        stage.placement.stages += 1;
        stage.mark = self.before + g.nodes().len();
        // Releases the values that nothing depends on any more.
        let alive = reach(g, held.iter().chain(&outputs).copied(), &|n| stage.done.contains_key(&n));
        stage.done.retain(|n, _| alive[n.index()]);
        Ok(())
    }

    /// The engine's handles of values. Values not computed yet are computed in one stage.
    pub(super) fn handles(&mut self, values: &[Value]) -> Result<Vec<Handle>> {
        let mut ids = vec![];
        for v in values {
            ids.push(match v.data()? {
                Some(d) if v.is_constant() => Err(d),
                _ => Ok(self.id(v)?),
            });
        }
        let open: Vec<NodeId> = ids.iter().filter_map(|n| n.as_ref().ok().copied()).collect();
        self.compute(&open)?;
        let stage = self.stage.as_mut().ok_or_else(|| Error::internal("there is no engine"))?;
        let one = |n: std::result::Result<NodeId, ConstData>| match n {
            Ok(n) => stage.handle(n),
            Err(d) => {
                stage.placement.bytes_written += d.bytes().len() as u64;
                stage.engine.upload(&d)
            }
        };
        ids.into_iter().map(one).collect()
    }

    /// Wraps a handle that the engine has computed as a value.
    pub(super) fn computed(&mut self, handle: Handle, ty: TensorType) -> Value {
        let n = self.g.input("", ty);
        if let Some(stage) = &mut self.stage {
            stage.done.insert(n, Source::Device(handle));
        }
        self.value(n)
    }

    /// The engine of a staged run.
    pub(super) fn engine(&mut self) -> Result<&mut dyn Engine> {
        let stage = self.stage.as_mut().ok_or_else(|| Error::internal("there is no engine"))?;
        Ok(&mut *stage.engine)
    }

    /// Records a missed optimisation of a staged run, once per message.
    pub(super) fn warn(&mut self, what: String) {
        if let Some(s) = &mut self.stage
            && !s.placement.warnings.contains(&what)
            && s.placement.warnings.len() < MAX_LISTED
        {
            s.placement.warnings.push(what);
        }
    }

    /// Records iterations of a loop whose body was compiled.
    pub(super) fn record_iterations(&mut self, node: &str, iterations: u64, bodies: usize) {
        let Some(s) = &mut self.stage else { return };
        let loops = &mut s.placement.loops;
        match loops.iter().position(|l| l.node == node) {
            Some(k) => {
                loops[k].iterations += iterations;
                loops[k].bodies = loops[k].bodies.max(bodies);
            }
            None if loops.len() < MAX_LISTED => loops.push(LoopRun { node: node.into(), iterations, bodies }),
            None => {}
        }
    }

    /// Drops the nodes that no value needs, if the graph has grown large.
    fn drop_unreached(&mut self) {
        let nodes = self.g.nodes().len();
        let held = self.live_nodes();
        let Some(stage) = &mut self.stage else { return };
        if self.differentiates || nodes < (2 * stage.kept).max(DROP_NODES) {
            return;
        }
        let alive = reach(&self.g, held.into_iter(), &|n| stage.done.contains_key(&n));
        let mut g = Graph::new();
        g.span = self.g.span.clone();
        let mut map: Vec<Option<NodeId>> = vec![None; nodes];
        let mut done = HashMap::new();
        for n in self.g.ids().filter(|n| alive[n.index()]) {
            let node = self.g.node(n);
            let new = match stage.done.remove(&n) {
                Some(s) => {
                    let new = g.input("", node.ty.clone());
                    done.insert(new, s);
                    new
                }
                None => {
                    // All operands of a reachable node are reachable, so each has a new number.
                    let inputs = node.inputs.iter().filter_map(|x| map[x.index()]).collect();
                    g.push_unchecked(Node { inputs, ..node.clone() })
                }
            };
            map[n.index()] = Some(new);
        }
        stage.done = done;
        stage.kept = g.nodes().len();
        self.renumber(g, &map);
    }

    /// Called between two iterations of an unrolled loop. Runs the pending nodes and drops unneeded ones, if
    /// there are many. `state` holds the values that the loop carries from one iteration to the next; `start`
    /// is the number of nodes made before the loop began.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the model exceeds the limit on nodes, or the lower limit of a graph built
    /// without a run.
    pub fn pace(&mut self, state: &[Item], start: usize) -> Result<()> {
        let n = self.node_count();
        if n > MAX_NODES {
            return Err(Error::unsupported(
                format!("a model of more than {MAX_NODES} operations with its loops unrolled"),
                "Bound the number of its iterations",
            ));
        }
        let Some(s) = &self.stage else {
            if n - start <= UNROLLED_NODES {
                return Ok(());
            }
            if self.controls.is_some() {
                self.refused =
                    Some(format!("{} unrolls to more than {UNROLLED_NODES} operations", self.g.span));
            }
            return Err(self.no_engine("a long loop"));
        };
        if n - s.mark > STAGE_NODES {
            let mut values = vec![];
            state.iter().for_each(|i| i.tensors(&mut values));
            let values: Vec<Value> = values.into_iter().filter(|v| v.host().is_none()).cloned().collect();
            let ids = values.iter().map(|v| self.id(v)).collect::<Result<Vec<_>>>()?;
            self.compute(&ids)?;
        }
        self.drop_unreached();
        Ok(())
    }

    /// The values of items, all computed in one stage.
    pub(super) fn results(&mut self, items: &[Item]) -> Result<Vec<Datum>> {
        let mut values = vec![];
        items.iter().for_each(|i| i.tensors(&mut values));
        let mut ids = vec![];
        for v in values {
            if v.data()?.is_none() {
                ids.push(self.id(v)?);
            }
        }
        self.compute(&ids)?;
        items.iter().map(|i| self.datum(i)).collect()
    }

    fn datum(&mut self, i: &Item) -> Result<Datum> {
        Ok(match i {
            Item::Tensor(v) => Datum::Tensor(match v.data()? {
                Some(d) => d,
                None => {
                    let n = self.id(v)?;
                    let stage = self.stage.as_mut().ok_or_else(|| Error::internal("the engine is gone"))?;
                    match stage.done.get(&n) {
                        Some(Source::Host(d)) => d.clone(),
                        _ => {
                            let h = stage.handle(n)?;
                            stage.engine.read(&h)?
                        }
                    }
                }
            }),
            Item::Text(t) => Datum::Text((**t).clone()),
            Item::Sequence(s) => Datum::Sequence(s.iter().map(|i| self.datum(i)).collect::<Result<_>>()?),
            Item::Optional(None) => Datum::Optional(None),
            Item::Optional(Some(i)) => Datum::Optional(Some(Box::new(self.datum(i)?))),
            Item::Map(m) => Datum::Map(m.0.clone(), Box::new(self.datum(&m.1)?)),
        })
    }

    /// Elements that must be known during import: axes, sizes, conditions. A staged run computes them. `what`
    /// names them in errors.
    pub fn known<'v>(&mut self, v: &'v Value, what: &str) -> Result<&'v Host> {
        if v.host().is_none() && self.stage.is_some() {
            self.fetch(v, what)?;
        }
        if let Some(h) = v.host() {
            return Ok(h);
        }
        if self.stage.is_some() {
            return Err(Error::unsupported(
                format!("{what} of type {}", v.ty),
                "Values that determine a graph must have at most 4096 elements (64 for floats)",
            ));
        }
        self.note_missing(v);
        Err(self.no_engine(what))
    }

    /// Like [`Builder::known`], converted to integers.
    pub fn known_ints(&mut self, v: &Value, what: &str) -> Result<Vec<i64>> {
        let h = self.known(v, what)?;
        let one = |n: &Num| match n {
            Num::Is(s) => Ok(s.as_i64()),
            Num::Size(d) => Err(super::host::symbolic(*d)),
        };
        h.vals.iter().map(one).collect()
    }

    /// Like [`Builder::known`], for a single element.
    pub fn known_scalar(&mut self, v: &Value, what: &str) -> Result<halcyon_ir::Scalar> {
        match self.known(v, what)?.vals[..] {
            [Num::Is(s)] => Ok(s),
            [Num::Size(d)] => Err(super::host::symbolic(d)),
            _ => Err(Error::shape(what, format!("expected one element, found {}", v.ty)).at(&self.g.span)),
        }
    }
}
