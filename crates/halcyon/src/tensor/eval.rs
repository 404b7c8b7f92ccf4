//! Nodes, and how they get their values: makes the nodes of tensors that are computed later, collects nodes
//! in a graph, and evaluates the graph.

use super::{Tensor, mixed};
use crate::backend::Backend;
use crate::gradient::is_variable;
use crate::planner::Wanted;
use halcyon_hal::{BufferRef, Event};
use halcyon_ir::composite::CompositeKind;
use halcyon_ir::dtype::{Element, Scalar};
use halcyon_ir::error::{Error, Result, Span};
use halcyon_ir::shape::{Dim, Dims, TensorType};
use halcyon_ir::{ConstData, Graph, NodeId, Op};
use smallvec::SmallVec;
use std::collections::{HashMap, HashSet};
use std::panic::Location;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

/// The state of a node's value.
#[derive(Clone)]
pub(super) enum Value {
    Pending,
    Ready(BufferRef),
    Donated { by: Span },
    Failed(Error),
}

pub(crate) struct Node {
    pub(crate) backend: Backend,
    pub(crate) op: Op,
    pub(crate) ty: TensorType,
    pub(crate) span: Span,
    /// Whether gradients can be taken through this node. If so, its operands are kept after evaluation.
    pub(crate) tracked: bool,
    /// Whether the gradient pass made this node. If so, evaluating it keeps no intermediate values for
    /// gradients.
    pub(super) of_gradient: bool,
    /// Nodes made later have larger numbers, and operands are made before the nodes that read them.
    pub(super) serial: u64,
    inner: Mutex<Inner>,
    /// Number of nodes that hold this one as an operand: pending nodes, and evaluated nodes that keep their
    /// operands for gradients.
    readers: AtomicUsize,
    pub(super) donate: AtomicBool,
    /// Whether this node is a version of a state. If so, and if something outside of the plan holds the node,
    /// a plan that computes the node also returns its value.
    pub(super) state: AtomicBool,
}

pub(super) struct Inner {
    pub(super) value: Value,
    pub(super) inputs: SmallVec<[Tensor; 3]>,
    /// The completion event of the work that computes the value, if a stream computes it.
    pub(super) completion: Option<Event>,
}

/// The serial number of the next node.
pub(super) static SERIAL: AtomicU64 = AtomicU64::new(0);

impl Node {
    pub(super) fn lock(&self) -> MutexGuard<'_, Inner> {
        // The fields are replaced as a whole, so a panic in another thread leaves them valid.
        self.inner.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Number of nodes that hold this one as an operand.
    pub(crate) fn readers(&self) -> usize {
        self.readers.load(Ordering::Relaxed)
    }
}

impl Drop for Node {
    /// Drops the operands iteratively, because recursion would overflow the stack for 100,000 nodes of which
    /// each is the operand of the next.
    fn drop(&mut self) {
        let inner = self.inner.get_mut().unwrap_or_else(|e| e.into_inner());
        let mut stack: Vec<Tensor> = release(&mut inner.inputs);
        while let Some(t) = stack.pop() {
            if let Some(mut node) = Arc::into_inner(t.0) {
                let inner = node.inner.get_mut().unwrap_or_else(|e| e.into_inner());
                stack.extend(release(&mut inner.inputs));
            }
        }
    }
}

fn release(inputs: &mut SmallVec<[Tensor; 3]>) -> Vec<Tensor> {
    let v: Vec<Tensor> = std::mem::take(inputs).into_vec();
    v.iter().for_each(|t| {
        t.0.readers.fetch_sub(1, Ordering::Relaxed);
    });
    v
}

impl Tensor {
    /// Adds the nodes that `f` builds from `inputs`. This makes all of [`Graph`]'s builders, custom ops
    /// included, available as tensor operations.
    #[track_caller]
    pub fn build(inputs: &[&Tensor], f: impl FnOnce(&mut Graph, &[NodeId]) -> Result<NodeId>) -> Tensor {
        let at = Location::caller();
        match inputs.first() {
            Some(t) => Tensor::build_on(&t.0.backend.clone(), inputs, at, f),
            // Without an operand there is no backend for the tensor that carries the error. The noop backend
            // always exists.
            None => match Backend::new(halcyon_hal::BackendType::Noop) {
                Ok(b) => Tensor::failed(&b, Error::argument("operation", "needs at least one operand"), at),
                Err(e) => unreachable!("the noop driver is part of every build: {e}"),
            },
        }
    }

    pub(crate) fn build_on(
        backend: &Backend,
        inputs: &[&Tensor],
        at: &'static Location<'static>,
        f: impl FnOnce(&mut Graph, &[NodeId]) -> Result<NodeId>,
    ) -> Tensor {
        for t in inputs {
            if let Value::Failed(e) = &t.0.lock().value {
                return Tensor::failed(backend, e.clone(), at);
            }
            if !t.0.backend.is_same(backend) {
                let e = mixed("operation", backend, t.backend()).at(&Span::Caller(at));
                return Tensor::failed(backend, e, at);
            }
        }
        let mut g = Graph::new();
        g.span = Span::Caller(at);
        let ids: Vec<NodeId> = inputs.iter().map(|t| g.input("", t.0.ty.clone())).collect();
        match f(&mut g, &ids) {
            Err(e) => Tensor::failed(backend, e, at),
            Ok(root) => {
                let mut map: HashMap<NodeId, Tensor> =
                    ids.iter().zip(inputs).map(|(i, t)| (*i, (*t).clone())).collect();
                match lift(backend, &g, &[root], &mut map, false) {
                    Ok(mut v) => {
                        v.pop().unwrap_or_else(|| Tensor::failed(backend, Error::internal("no result"), at))
                    }
                    Err(e) => Tensor::failed(backend, e, at),
                }
            }
        }
    }

    pub(super) fn make(backend: Backend, new: NewNode) -> Tensor {
        for t in &new.inputs {
            t.0.readers.fetch_add(1, Ordering::Relaxed);
        }
        Tensor(Arc::new(Node {
            backend,
            op: new.op,
            ty: new.ty,
            span: new.span,
            tracked: new.tracked,
            of_gradient: new.of_gradient,
            serial: SERIAL.fetch_add(1, Ordering::Relaxed),
            inner: Mutex::new(Inner { value: new.value, inputs: new.inputs, completion: None }),
            readers: AtomicUsize::new(0),
            donate: AtomicBool::new(false),
            state: AtomicBool::new(false),
        }))
    }
}

/// The fields of a new node.
pub(super) struct NewNode {
    pub(super) op: Op,
    pub(super) ty: TensorType,
    pub(super) span: Span,
    pub(super) inputs: SmallVec<[Tensor; 3]>,
    pub(super) value: Value,
    pub(super) tracked: bool,
    pub(super) of_gradient: bool,
}

impl NewNode {
    pub(super) fn leaf(ty: TensorType, value: Value, span: Span) -> NewNode {
        let (op, inputs) = (Op::Input(0), SmallVec::new());
        NewNode { op, ty, span, inputs, value, tracked: false, of_gradient: false }
    }
}

/// Turns new graph nodes into tensors. `map` holds the tensors of the nodes that already have one.
pub(crate) fn lift(
    backend: &Backend,
    g: &Graph,
    roots: &[NodeId],
    map: &mut HashMap<NodeId, Tensor>,
    of_gradient: bool,
) -> Result<Vec<Tensor>> {
    // Lift only the nodes that the roots depend on and that are not in `map`.
    let mut need = vec![false; g.nodes().len()];
    for r in roots {
        need[r.index()] = true;
    }
    for i in (0..need.len()).rev() {
        let id = NodeId(i as u32);
        if need[i] && !map.contains_key(&id) {
            g.node(id).inputs.iter().for_each(|x| need[x.index()] = true);
        }
    }
    for id in g.ids() {
        if !need[id.index()] || map.contains_key(&id) {
            continue;
        }
        let n = g.node(id);
        let inputs: SmallVec<[Tensor; 3]> = n
            .inputs
            .iter()
            .map(|x| map.get(x).cloned().ok_or_else(|| Error::internal("lift: operand missing")))
            .collect::<Result<_>>()?;
        let tracked = inputs.iter().any(|t| t.0.tracked) && n.ty.dtype.is_float();
        let leaf = NewNode::leaf(n.ty.clone(), Value::Pending, n.span.clone());
        let new = NewNode { op: n.op.clone(), inputs, tracked, of_gradient, ..leaf };
        let t = Tensor::make(backend.clone(), new);
        map.insert(id, t);
    }
    roots.iter().map(|r| map.get(r).cloned().ok_or_else(|| Error::internal("lift: root missing"))).collect()
}

/// How evaluated tensors and literals are represented in a graph built from tensors.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) enum Mode {
    /// Evaluated tensors become inputs, literals become run-time arguments.
    #[default]
    Run,
    /// Evaluated tensors become inputs, literals stay literals.
    Compile,
    /// Evaluated tensors become constants, literals stay literals.
    Data,
    /// Like `Run`, but an evaluated tensor that kept its operands is represented by its operation on them,
    /// and placeholders and arguments of compiled functions become inputs.
    Gradient,
}

/// Builds one graph from tensors.
#[derive(Default)]
pub(crate) struct Collector {
    pub(crate) mode: Mode,
    pub(crate) graph: Graph,
    pub(crate) ids: HashMap<*const Node, NodeId>,
    /// The tensor of each node, by node number.
    pub(crate) order: Vec<Tensor>,
    /// The tensors of the graph's inputs, in order.
    pub(crate) leaves: Vec<Tensor>,
    pub(crate) args: Vec<Scalar>,
    /// In mode `Compile`: for each argument of the graph, the number given to [`Tensor::argument`].
    pub(crate) numbers: Vec<u32>,
}

impl Collector {
    /// Makes a tensor an input of the graph, even if it is computed from others.
    pub(crate) fn declare(&mut self, name: &str, t: &Tensor) {
        self.graph.span = t.0.span.clone();
        let id = self.graph.input(name, t.0.ty.clone());
        self.ids.insert(Arc::as_ptr(&t.0), id);
        self.order.push(t.clone());
    }

    /// Adds the nodes that `root` depends on, and `root` itself.
    pub(crate) fn visit(&mut self, root: &Tensor) -> Result<()> {
        let mut stack: Vec<(Tensor, bool)> = vec![(root.clone(), false)];
        while let Some((t, expanded)) = stack.pop() {
            if self.ids.contains_key(&Arc::as_ptr(&t.0)) {
                continue;
            }
            let operands = self.operands_of(&t)?;
            if !expanded && !operands.is_empty() {
                stack.push((t, true));
                stack.extend(operands.into_iter().rev().map(|i| (i, false)));
                continue;
            }
            self.place(t, &operands)?;
        }
        Ok(())
    }

    /// Adds the nodes that `roots` depend on, and the roots, in the order in which they were made. So the
    /// steps of a plan are in the order of the user's calls, and the gradient of a parameter is computed at
    /// its place in the backward pass, not at the end.
    pub(crate) fn visit_in_order(&mut self, roots: &[Tensor]) -> Result<()> {
        let mut stack: Vec<Tensor> = roots.to_vec();
        let mut seen: HashSet<*const Node> = HashSet::new();
        let mut all: Vec<(Tensor, SmallVec<[Tensor; 3]>)> = vec![];
        while let Some(t) = stack.pop() {
            let key = Arc::as_ptr(&t.0);
            if self.ids.contains_key(&key) || !seen.insert(key) {
                continue;
            }
            let operands = self.operands_of(&t)?;
            stack.extend(operands.iter().cloned());
            all.push((t, operands));
        }
        all.sort_by_key(|(t, _)| t.0.serial);
        all.into_iter().try_for_each(|(t, operands)| self.place(t, &operands))
    }

    /// Whether a tensor's value is used instead of the operation that computed it.
    fn uses_value(&self, t: &Tensor, inner: &Inner) -> bool {
        let history = self.mode == Mode::Gradient && t.0.tracked && !inner.inputs.is_empty();
        matches!(inner.value, Value::Ready(_)) && !history
    }

    /// The operands from which the graph computes a tensor; none if it uses the tensor's value.
    fn operands_of(&self, t: &Tensor) -> Result<SmallVec<[Tensor; 3]>> {
        let inner = t.0.lock();
        match &inner.value {
            Value::Failed(e) => return Err(e.clone()),
            Value::Donated { by } => return Err(Error::Donated { by: by.clone() }),
            _ => {}
        }
        Ok(if self.uses_value(t, &inner) { SmallVec::new() } else { inner.inputs.clone() })
    }

    /// Adds the node of a tensor whose operands have been added.
    fn place(&mut self, t: Tensor, operands: &[Tensor]) -> Result<()> {
        let ready = self.uses_value(&t, &t.0.lock());
        let ins: SmallVec<[NodeId; 3]> = operands.iter().map(|i| self.ids[&Arc::as_ptr(&i.0)]).collect();
        self.graph.span = t.0.span.clone();
        let id = self.add(&t, ready, ins)?;
        self.ids.insert(Arc::as_ptr(&t.0), id);
        self.order.resize(id.index() + 1, t.clone());
        self.order[id.index()] = t;
        Ok(())
    }

    fn add(&mut self, t: &Tensor, ready: bool, ins: SmallVec<[NodeId; 3]>) -> Result<NodeId> {
        let n = &t.0;
        Ok(match &n.op {
            _ if ready && self.mode == Mode::Data => {
                let d = t.to_data()?;
                self.graph.constant(d)
            }
            _ if ready => {
                self.leaves.push(t.clone());
                self.graph.input("", n.ty.clone())
            }
            Op::Input(_) | Op::Arg(_) if self.mode == Mode::Gradient => self.graph.input("", n.ty.clone()),
            Op::Arg(k) if self.mode == Mode::Compile => {
                self.numbers.push(*k);
                self.graph.arg(n.ty.dtype)
            }
            Op::Arg(k) => {
                let what = format!("argument {k} has no value: only a compiled function may compute with it");
                return Err(Error::argument("eval", what).at(&n.span));
            }
            Op::Input(_) => {
                return Err(Error::argument(
                    "eval",
                    "a placeholder has no value; it is only for Tensor::trace and compiled functions, which do not read it",
                )
                .at(&n.span));
            }
            // With literals kept in the graph, a slice with a literal start becomes a plain narrow.
            Op::Composite(c)
                if matches!(self.mode, Mode::Compile | Mode::Data) && c.kind == CompositeKind::SliceAt =>
            {
                let (start, axis) = (fixed_start(t), c.int("axis").and_then(|a| usize::try_from(a).ok()));
                match (start, axis) {
                    (Some(start), Some(axis)) => {
                        let len = n.ty.shape.get(axis).copied().unwrap_or(Dim::from(0));
                        self.graph.narrow(ins[0], axis, start, len)?
                    }
                    _ => self.plain(t, ins),
                }
            }
            Op::Full(v) if matches!(self.mode, Mode::Run | Mode::Gradient) => {
                self.args.push(*v);
                let a = self.graph.arg(n.ty.dtype);
                self.graph.expand(a, &n.ty.shape)?
            }
            _ => self.plain(t, ins),
        })
    }

    fn plain(&mut self, t: &Tensor, inputs: SmallVec<[NodeId; 3]>) -> NodeId {
        let n = &t.0;
        self.graph.push_unchecked(halcyon_ir::graph::Node {
            op: n.op.clone(),
            inputs,
            ty: n.ty.clone(),
            span: n.span.clone(),
        })
    }
}

/// The start of a slice with a run-time start, if that start is a literal.
fn fixed_start(t: &Tensor) -> Option<usize> {
    match &t.0.lock().inputs.get(1)?.0.op {
        Op::Full(v) => usize::try_from(v.as_f64() as i64).ok(),
        _ => None,
    }
}

impl Tensor {
    /// Sizes of the axes.
    ///
    /// # Errors
    /// The error that the tensor carries, or an error that names the symbols of its shape.
    pub fn dims(&self) -> Result<Dims> {
        self.check()?;
        self.0.ty.shape.dims()
    }

    /// Returns the error that the tensor carries, if any, without evaluating it.
    pub fn check(&self) -> Result<()> {
        match &self.0.lock().value {
            Value::Failed(e) => Err(e.clone()),
            Value::Donated { by } => Err(Error::Donated { by: by.clone() }),
            _ => Ok(()),
        }
    }

    /// Whether the value is on the device, or a stream is computing it. In the second case, work that uses
    /// the value waits for it on the device.
    pub fn is_ready(&self) -> bool {
        matches!(self.0.lock().value, Value::Ready(_))
    }

    /// The buffer of an evaluated value.
    pub(crate) fn ready(&self) -> Result<BufferRef> {
        match &self.0.lock().value {
            Value::Ready(b) => Ok(b.clone()),
            v => Err(self.missing_value(v)),
        }
    }

    /// Like [`Tensor::ready`], but returns no buffer.
    pub(crate) fn check_alive(&self) -> Result<()> {
        match &self.0.lock().value {
            Value::Ready(_) => Ok(()),
            v => Err(self.missing_value(v)),
        }
    }

    fn missing_value(&self, value: &Value) -> Error {
        match value {
            Value::Donated { by } => Error::Donated { by: by.clone() },
            Value::Failed(e) => e.clone(),
            _ => Error::internal("a tensor that was evaluated has no value"),
        }
    }

    /// Marks the value as donated: its memory now belongs to a result of `by`.
    pub(crate) fn taken(&self, by: &Span) {
        self.0.lock().value = Value::Donated { by: by.clone() };
    }

    /// Computes the value.
    ///
    /// # Errors
    /// The error that the tensor carries, with the line of the operation that caused it. Also errors of
    /// planning and of the device.
    #[track_caller]
    pub fn eval(&self) -> Result<&Tensor> {
        eval(std::slice::from_ref(self))?;
        Ok(self)
    }

    /// The buffer of the value, evaluated first if needed.
    #[track_caller]
    pub(crate) fn buffer(&self) -> Result<BufferRef> {
        self.eval()?;
        self.ready()
    }

    /// Evaluates the tensor if needed and copies its values to the host.
    ///
    /// # Errors
    /// The errors of [`Tensor::eval`]; [`Error::Index`] if a kernel found an index out of range.
    #[track_caller]
    pub fn to_data(&self) -> Result<ConstData> {
        self.eval()?;
        let dims = self.dims()?;
        let mut bytes =
            halcyon_host::zeros(self.0.ty.dtype.bytes(dims.iter().product()), "a tensor's value")?;
        self.read_into(&mut bytes)?;
        ConstData::new(self.0.ty.dtype, &dims, Arc::new(bytes))
    }

    /// Like [`Tensor::to_data`], into memory of the caller, which must have the size of the value.
    ///
    /// # Errors
    /// The errors of [`Tensor::to_data`]; [`Error::Argument`] for memory of another size.
    #[track_caller]
    pub fn read_into(&self, to: &mut [u8]) -> Result<()> {
        let b = self.buffer()?;
        let bytes = self.0.ty.dtype.bytes(self.dims()?.iter().product());
        if to.len() != bytes {
            let what = format!("the value has {bytes} bytes, the memory {}", to.len());
            return Err(Error::argument("read_into", what));
        }
        self.0.backend.device().read(&b, 0, to)?;
        self.0.backend.runtime().check_faults()
    }

    /// The values on the host in row-major order, converted to `T`. Evaluates the tensor if needed.
    ///
    /// # Errors
    /// The errors of [`Tensor::to_data`].
    #[track_caller]
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>> {
        Ok(self.to_data()?.to_vec())
    }
}

/// Computes several tensors as one plan; operations that they share are computed once. Inside
/// [`crate::Stream::run`] the work is enqueued in that stream.
///
/// # Errors
/// The errors of [`Tensor::eval`]; [`Error::MixedDevices`] if the tensors belong to several backends.
#[track_caller]
pub fn eval(outputs: &[Tensor]) -> Result<()> {
    eval_now(outputs).map(drop)
}

/// Like [`eval`], but also returns the event of its completion if a stream runs it.
#[track_caller]
pub(crate) fn eval_now(outputs: &[Tensor]) -> Result<Option<Event>> {
    let at = Location::caller();
    let todo: Vec<&Tensor> = outputs.iter().filter(|t| !t.is_ready()).collect();
    let Some(first) = todo.first() else { return Ok(None) };
    let backend = first.0.backend.clone();
    if let Some(o) = todo.iter().find(|t| !t.0.backend.is_same(&backend)) {
        return Err(mixed("eval", &backend, o.backend()).at(&Span::Caller(at)));
    }
    let _running = backend.running();
    let mut c = Collector::default();
    for t in &todo {
        c.visit(t)?;
    }
    let (results, donated) = c.results(&todo);
    let names: Vec<NodeId> = results.iter().map(|t| c.ids[&Arc::as_ptr(&t.0)]).collect();
    for id in &names {
        c.graph.output("", *id);
    }
    let Collector { graph, leaves, args, order, ids, .. } = c;
    drop((order, ids));
    let inputs: Vec<BufferRef> = leaves
        .iter()
        .map(|t| match &t.0.lock().value {
            Value::Ready(b) => Ok(b.clone()),
            _ => Err(Error::internal("a leaf lost its value")),
        })
        .collect::<Result<_>>()?;
    let wanted = Wanted { sample: Some((&inputs, &args)), mixed: None };
    let exe = backend.planner().plan_for(graph, donated.clone(), wanted)?;
    let by = first.0.span.clone();
    let take = || leaves.iter().zip(&donated).filter(|(_, d)| **d).for_each(|(t, _)| t.taken(&by));
    let on = backend.runtime().queues.current();
    let (made, event) = exe.run_on(&inputs, &args, on.as_deref()).map_err(|f| {
        // A run that failed part-way leaves donated memory in an unknown state, so the tensors lose it.
        if f.started {
            take();
        }
        f.error
    })?;
    drop(inputs);
    for (t, b) in results.iter().zip(made) {
        let mut inner = t.0.lock();
        inner.value = Value::Ready(b);
        inner.completion.clone_from(&event);
        let old = if t.0.tracked { vec![] } else { release(&mut inner.inputs) };
        drop(inner);
        drop(old);
    }
    take();
    Ok(event)
}

impl Collector {
    /// The tensors that the plan must compute: the requested tensors, and tensors that later evaluations
    /// need. Also returns for each leaf whether the plan may overwrite it.
    fn results(&self, asked: &[&Tensor]) -> (Vec<Tensor>, Vec<bool>) {
        let key = |t: &Tensor| Arc::as_ptr(&t.0);
        let mut out: Vec<Tensor> = vec![];
        let mut have: HashSet<*const Node> = HashSet::new();
        let mut add = |t: &Tensor| {
            if !t.is_ready() && have.insert(key(t)) {
                out.push(t.clone());
            }
        };
        asked.iter().for_each(|t| add(t));
        // Counts the references to each node from inside: from nodes of this plan that have it as an operand
        // (`readers`), and from this collector (`own`).
        let mut readers: HashMap<*const Node, usize> = HashMap::new();
        let mut own: HashMap<*const Node, usize> = HashMap::new();
        for t in self.order.iter().chain(&self.leaves) {
            *own.entry(key(t)).or_default() += 1;
        }
        let mut distinct: Vec<&Tensor> = vec![];
        let mut seen: HashSet<*const Node> = HashSet::new();
        for t in &self.order {
            if seen.insert(key(t)) {
                distinct.push(t);
                for x in &t.0.lock().inputs {
                    *readers.entry(key(x)).or_default() += 1;
                }
            }
        }
        let inside =
            |t: &Tensor| readers.get(&key(t)).copied().unwrap_or(0) + own.get(&key(t)).copied().unwrap_or(0);
        let held_elsewhere = |t: &Tensor| Arc::strong_count(&t.0) > inside(t);

        let keep = asked.iter().any(|t| t.0.tracked && !t.0.of_gradient);
        for t in &distinct {
            let computes = !t.0.op.is_view() && !t.0.op.is_leaf() && !is_variable(&t.0.op);
            let residual = keep && t.0.tracked && !t.0.of_gradient && computes;
            let version = t.0.state.load(Ordering::Relaxed) && held_elsewhere(t);
            if residual || version {
                add(t);
            }
        }

        let updated: HashSet<NodeId> =
            self.graph.nodes().iter().filter(|n| n.op.facts().in_place).map(|n| n.inputs[0]).collect();
        let mut donated = vec![false; self.leaves.len()];
        let mut stale = vec![false; self.graph.nodes().len()];
        for (k, leaf) in self.leaves.iter().enumerate() {
            let id = self.ids[&key(leaf)];
            let asked_for = leaf.0.donate.load(Ordering::Relaxed);
            if !asked_for && !updated.contains(&id) {
                continue;
            }
            let outside =
                leaf.0.readers.load(Ordering::Relaxed) > readers.get(&key(leaf)).copied().unwrap_or(0);
            // Another tensor may share the memory (`detach`), or a captured graph may be bound to it, or it
            // belongs to an owner outside of Halcyon (`from_shared`).
            let shared = matches!(&leaf.0.lock().value,
                Value::Ready(b) if Arc::strong_count(b) > 1 || !b.is_writable());
            if outside || shared || (held_elsewhere(leaf) && !asked_for) {
                // Something outside this plan may still read the old value, so the plan copies it.
                leaf.0.backend.runtime().stats.state_copies.fetch_add(1, Ordering::Relaxed);
            } else {
                donated[k] = true;
                stale[id.index()] = true;
            }
        }
        // If the plan overwrites a value, nodes that depend on the value cannot be computed later. So if
        // there are handles on such nodes outside of the plan, the plan computes these nodes too.
        if donated.contains(&true) {
            for (i, n) in self.graph.nodes().iter().enumerate() {
                if !stale[i] && n.inputs.iter().any(|x| stale[x.index()]) {
                    stale[i] = true;
                    if held_elsewhere(&self.order[i]) {
                        add(&self.order[i]);
                    }
                }
            }
        }
        (out, donated)
    }
}
