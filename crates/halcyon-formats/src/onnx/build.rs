//! The builder that importer functions use. It adds ops to the graph, or evaluates them at once if all
//! operands are small known values.

use super::body::Control;
use super::host::{self, Host, Num, flat, small};
use super::limits::Limits;
use super::stage::Stage;
use halcyon_ir::ops::{Op, ReduceKind};
use halcyon_ir::{
    ConstData, DType, Dim, Dims, Graph, NodeId, Result, Rounding, Scalar, ScalarOp, Shape, Span, TensorType,
};
use std::cell::{Cell, OnceCell};
use std::collections::{BTreeSet, HashMap};
use std::rc::{Rc, Weak};
use std::sync::atomic::{AtomicU64, Ordering};

/// A value during import.
#[derive(Clone, Debug)]
pub struct Value {
    pub ty: TensorType,
    source: Source,
}

#[derive(Clone, Debug)]
enum Source {
    Node(Rc<NodeRef>),
    Constant(Rc<Constant>),
}

/// A node that values refer to, with its elements once a run has computed them.
#[derive(Debug)]
pub(super) struct NodeRef {
    node: Cell<NodeId>,
    data: OnceCell<ConstData>,
    host: OnceCell<Option<Host>>,
}

/// A constant. It is added to the graph on first use, once per numbering of the nodes.
#[derive(Debug)]
struct Constant {
    name: Span,
    data: Data,
    node: Cell<Option<(Numbering, NodeId)>>,
    host: OnceCell<Option<Host>>,
}

/// Identifies the graph that node numbers belong to. A builder gets a new one when it renumbers its nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Numbering(u64);

impl Default for Numbering {
    fn default() -> Numbering {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Numbering(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

#[derive(Debug)]
enum Data {
    Bytes(ConstData),
    Host(Host),
}

impl Value {
    fn constant(ty: TensorType, name: Span, data: Data) -> Value {
        let c = Constant { name, data, node: Cell::new(None), host: OnceCell::new() };
        Value { ty, source: Source::Constant(Rc::new(c)) }
    }

    /// A named weight.
    pub fn weight(data: ConstData, name: &str) -> Value {
        Value::constant(TensorType::new(data.dtype, &data.dims), Span::new(name), Data::Bytes(data))
    }

    /// A constant that an operator creates; its span is that of the node that uses it.
    pub fn table(data: ConstData) -> Value {
        Value::constant(TensorType::new(data.dtype, &data.dims), Span::default(), Data::Bytes(data))
    }

    pub fn rank(&self) -> usize {
        self.ty.shape.rank()
    }

    pub fn shape(&self) -> &Shape {
        &self.ty.shape
    }

    pub fn dtype(&self) -> DType {
        self.ty.dtype
    }

    /// The elements if the value is known and small.
    pub fn host(&self) -> Option<&Host> {
        match &self.source {
            Source::Node(h) => h.data.get().and_then(|d| h.host.get_or_init(|| Host::of(d)).as_ref()),
            Source::Constant(c) => match &c.data {
                Data::Host(h) => Some(h),
                Data::Bytes(b) => c.host.get_or_init(|| Host::of(b)).as_ref(),
            },
        }
    }

    /// The elements if the value is known, of any size.
    ///
    /// # Errors
    /// `Error::Unsupported` if an element depends on a symbolic dimension.
    pub fn data(&self) -> Result<Option<ConstData>> {
        Ok(match &self.source {
            Source::Node(h) => h.data.get().cloned(),
            Source::Constant(c) => Some(match &c.data {
                Data::Host(h) => h.data()?,
                Data::Bytes(b) => b.clone(),
            }),
        })
    }

    /// Whether the value follows from the model alone. Constants are added to a graph only on use, so any
    /// builder may use them.
    pub(super) fn is_constant(&self) -> bool {
        matches!(self.source, Source::Constant(_))
    }

    /// The owner of a constant's bytes, and their number.
    pub(super) fn stored(&self) -> Option<(Weak<dyn std::fmt::Debug>, usize)> {
        let Source::Constant(c) = &self.source else { return None };
        let bytes = match &c.data {
            Data::Bytes(b) => b.bytes().len(),
            Data::Host(h) => std::mem::size_of_val(&h.vals[..]),
        };
        Some((Rc::downgrade(&(c.clone() as Rc<dyn std::fmt::Debug>)), bytes))
    }

    /// Stores the elements that a run computed.
    pub(super) fn learn(&self, data: ConstData) {
        if let Source::Node(h) = &self.source {
            // If they are already set, they have the same value.
            let _ = h.data.set(data);
        }
    }
}

impl From<Host> for Value {
    fn from(h: Host) -> Value {
        let ty = TensorType::new(h.dtype, &h.dims[..]);
        Value::constant(ty, Span::default(), Data::Host(h))
    }
}

/// The graph under construction. Methods take and return [`Value`]s, and fold constants where possible.
#[derive(Debug, Default)]
pub struct Builder {
    pub g: Graph,
    /// The run-time inputs of the last value that the import needed but did not know.
    pub(super) missing: BTreeSet<u32>,
    /// Why the model cannot be one graph, as far as known.
    pub(super) needs_engine: Option<String>,
    pub(super) stage: Option<Stage>,
    /// The control flow of a graph that becomes a [`super::body::CompiledBody`], else `None`.
    pub(super) controls: Option<Vec<Control>>,
    /// Why that graph cannot be built, as far as known.
    pub(super) refused: Option<String>,
    /// Limits on loops.
    pub(super) limits: Limits,
    /// Number of nodes dropped from the graph or made by earlier builders.
    pub(super) before: usize,
    numbering: Numbering,
    /// The nodes that values refer to.
    held: HashMap<NodeId, Weak<NodeRef>>,
    /// Set if the model computes gradients. Floats are then not folded: the graph must show how they depend
    /// on each other.
    pub(super) differentiates: bool,
    /// Total elements of the folded values that have more than [`MIN_COUNTED`] elements.
    folded: usize,
    /// Part of the seed of every random operator without a seed attribute. 0 by default.
    pub base_seed: u64,
    /// Number of seeds made so far for each node name.
    pub(super) draws: HashMap<String, u64>,
}

/// Folded values of at most this many elements are not counted.
const MIN_COUNTED: usize = 64;
/// Limit on the folded elements in total, so that a short model cannot fill the memory with unused values.
/// Beyond it, only tiny values are folded, and reductions and bitcasts, which do not enlarge their operand.
const FOLDED: usize = 4 << 20;

/// The range of a slice along one axis.
#[derive(Clone, Copy, Debug)]
pub struct Range {
    pub start: Dim,
    pub step: i64,
    pub len: Dim,
}

impl Builder {
    /// The node of a value, added to the graph if it is a constant.
    pub fn id(&mut self, v: &Value) -> Result<NodeId> {
        let c = match &v.source {
            Source::Node(h) => return Ok(h.node.get()),
            Source::Constant(c) => c.clone(),
        };
        if let Some((of, n)) = c.node.get()
            && of == self.numbering
        {
            return Ok(n);
        }
        let here = self.g.span.clone();
        if c.name.is_known() {
            self.g.span = c.name.clone();
        }
        let made = match &c.data {
            Data::Bytes(b) => Ok(self.g.constant(b.clone())),
            Data::Host(h) => match h.uniform() {
                Some(s) => Ok(self.g.full(h.dtype, v.ty.shape.clone(), s)),
                None if h.vals.iter().all(|n| n.known().is_some()) => h.data().map(|d| self.g.constant(d)),
                None => self.sizes(h),
            },
        };
        self.g.span = here;
        let n = made?;
        c.node.set(Some((self.numbering, n)));
        Ok(n)
    }

    pub(super) fn bounded(limits: Limits) -> Builder {
        Builder { limits, ..Builder::default() }
    }

    /// Number of nodes made so far, including dropped ones.
    pub(super) fn node_count(&self) -> usize {
        self.before + self.g.nodes().len()
    }

    /// An empty builder for a graph nested in this one.
    pub(super) fn nested(&self) -> Builder {
        Builder {
            controls: Some(vec![]),
            limits: self.limits.clone(),
            before: self.node_count(),
            base_seed: self.base_seed,
            ..Builder::default()
        }
    }

    /// Replaces the graph. `map` gives the new node for each old one that values refer to.
    pub(super) fn renumber(&mut self, g: Graph, map: &[Option<NodeId>]) {
        self.before += self.g.nodes().len().saturating_sub(g.nodes().len());
        self.g = g;
        self.numbering = Numbering::default();
        let held = std::mem::take(&mut self.held);
        for h in held.into_values().filter_map(|h| h.upgrade()) {
            if let Some(n) = map[h.node.get().index()] {
                h.node.set(n);
                self.held.insert(n, Rc::downgrade(&h));
            }
        }
    }

    /// Builds a node for a tensor in which some elements are symbolic sizes. Such an element is computed as
    /// the sum of a vector of ones that has this size.
    fn sizes(&mut self, h: &Host) -> Result<NodeId> {
        let mut parts = Vec::with_capacity(h.vals.len());
        for v in &h.vals {
            parts.push(match v {
                Num::Is(s) => self.g.full(h.dtype, [1usize], *s),
                Num::Size(d) => {
                    let ones = self.g.full(h.dtype, [*d], 1i64);
                    self.g.sum(ones, &[0], true)?
                }
            });
        }
        let all = self.g.concat(&parts, 0)?;
        self.g.reshape(all, &h.dims[..])
    }

    pub fn ids(&mut self, v: &[&Value]) -> Result<Vec<NodeId>> {
        v.iter().map(|v| self.id(v)).collect()
    }

    pub fn value(&mut self, n: NodeId) -> Value {
        let ty = self.g.ty(n).clone();
        let held = match self.held.get(&n).and_then(Weak::upgrade) {
            Some(h) => h,
            None => {
                let h = Rc::new(NodeRef { node: Cell::new(n), data: OnceCell::new(), host: OnceCell::new() });
                self.held.insert(n, Rc::downgrade(&h));
                h
            }
        };
        Value { ty, source: Source::Node(held) }
    }

    /// The nodes that values still refer to.
    pub(super) fn live_nodes(&mut self) -> Vec<NodeId> {
        self.held.retain(|_, h| h.strong_count() > 0);
        let mut v: Vec<NodeId> = self.held.keys().copied().collect();
        v.sort();
        v
    }

    /// The elements of a value, if they are known and may be folded.
    fn host_of<'v>(&self, v: &'v Value) -> Option<&'v Host> {
        if self.differentiates && v.dtype().is_float() { None } else { v.host() }
    }

    fn folds(&self, x: &[&Value]) -> bool {
        x.iter().all(|v| self.host_of(v).is_some())
    }

    /// A scalar with the dtype of `like`.
    pub fn lit(&self, like: &Value, v: impl Into<Scalar>) -> Value {
        Host::scalar(like.dtype(), v).into()
    }

    /// Whether `n` more elements may be folded.
    fn has_fold_budget(&self, n: usize) -> bool {
        n <= MIN_COUNTED || n <= FOLDED.saturating_sub(self.folded)
    }

    /// Counts and returns a folded value.
    fn fold(&mut self, h: Host) -> Value {
        if h.vals.len() > MIN_COUNTED {
            self.folded = self.folded.saturating_add(h.vals.len());
        }
        h.into()
    }

    /// Whether a value of these sizes may be folded.
    fn foldable(&self, dtype: DType, dims: &[usize]) -> bool {
        small(dtype, dims) && self.has_fold_budget(dims.iter().product())
    }

    /// A tensor with the value `v` in every element.
    pub fn full(&mut self, dtype: DType, shape: &Shape, v: Scalar) -> Value {
        let v = v.cast(dtype);
        if let Some(dims) = shape.known()
            && self.foldable(dtype, &dims)
        {
            let n = dims.iter().product();
            return self.fold(Host { dtype, dims: dims.to_vec(), vals: vec![Num::Is(v); n] });
        }
        let n = self.g.full(dtype, shape, v);
        self.value(n)
    }

    /// The vector 0, 1, …, n - 1.
    pub fn iota(&mut self, dtype: DType, n: Dim) -> Result<Value> {
        if let Some(n) = n.known()
            && self.foldable(dtype, &[n])
        {
            let vals = (0..n).map(|i| Num::Is(Scalar::from(i).cast(dtype))).collect();
            return Ok(self.fold(Host { dtype, dims: vec![n], vals }));
        }
        let n = self.g.iota(dtype, [n], 0)?;
        Ok(self.value(n))
    }

    /// A scalar op with NumPy broadcasting.
    pub fn scalar(&mut self, op: ScalarOp, x: &[&Value]) -> Result<Value> {
        if self.folds(x)
            && let Some(h) = fold_scalar(op, x, |n| self.has_fold_budget(n))
        {
            return Ok(self.fold(h));
        }
        let ids = self.ids(x)?;
        let n = self.g.scalar(op, &ids)?;
        Ok(self.value(n))
    }

    pub fn cast(&mut self, x: &Value, dtype: DType) -> Result<Value> {
        if x.dtype() == dtype {
            return Ok(x.clone());
        }
        if let Some(h) =
            self.host_of(x).filter(|h| self.has_fold_budget(h.vals.len())).and_then(|h| h.cast(dtype))
        {
            return Ok(self.fold(h));
        }
        let id = self.id(x)?;
        let n = self.g.cast(id, dtype)?;
        Ok(self.value(n))
    }

    /// Casts to the nearest number in the finite range of `dtype`, see
    /// [`halcyon_ir::Graph::cast_saturating`]. The operator `Cast` uses it for 8-bit floats if `saturate` is
    /// set. With [`Builder::cast`], 8-bit floats overflow to infinity or NaN.
    pub fn cast_saturating(&mut self, x: &Value, dtype: DType) -> Result<Value> {
        if x.dtype() == dtype {
            return Ok(x.clone());
        }
        let id = self.id(x)?;
        let n = self.g.cast_saturating(id, dtype)?;
        Ok(self.value(n))
    }

    /// Casts to `f8e8m0`, like [`halcyon_ir::Graph::cast_e8m0`].
    pub fn cast_e8m0(&mut self, x: &Value, rounding: Rounding, saturate: bool) -> Result<Value> {
        if x.dtype() == DType::F8E8M0 {
            return Ok(x.clone());
        }
        let id = self.id(x)?;
        let n = self.g.cast_e8m0(id, rounding, saturate)?;
        Ok(self.value(n))
    }

    /// Reinterprets the bits as another type of the same width.
    pub fn bitcast(&mut self, x: &Value, dtype: DType) -> Result<Value> {
        let from = x.dtype();
        if from == dtype {
            return Ok(x.clone());
        }
        if from.bits() == dtype.bits()
            && let Some(h) = x.host()
            && let Some(vals) = h.vals.iter().map(|n| n.known()).collect::<Option<Vec<Scalar>>>()
        {
            let vals = vals.iter().map(|v| Num::Is(Scalar::from_bytes(dtype, &v.to_bytes(from)))).collect();
            return Ok(Host { dtype, dims: h.dims.clone(), vals }.into());
        }
        let id = self.id(x)?;
        let n = self.g.bitcast(id, dtype)?;
        Ok(self.value(n))
    }

    pub fn reshape(&mut self, x: &Value, shape: impl Into<Shape>) -> Result<Value> {
        let shape = shape.into();
        if shape == x.ty.shape {
            return Ok(x.clone());
        }
        if let (Some(h), Some(dims)) = (self.host_of(x), shape.known())
            && dims.iter().try_fold(1usize, |n, &d| n.checked_mul(d)) == Some(h.vals.len())
            && self.has_fold_budget(h.vals.len())
        {
            let h = Host { dims: dims.to_vec(), ..h.clone() };
            return Ok(self.fold(h));
        }
        let id = self.id(x)?;
        let n = self.g.reshape(id, shape)?;
        Ok(self.value(n))
    }

    pub fn permute(&mut self, x: &Value, perm: &[usize]) -> Result<Value> {
        if let Some(h) = self.host_of(x)
            && self.has_fold_budget(h.vals.len())
            && is_permutation(perm, h.dims.len())
        {
            let dims = perm.iter().map(|&p| h.dims[p]).collect();
            let mut from = vec![0; perm.len()];
            let out = h.map(dims, |at| {
                perm.iter().zip(at).for_each(|(&p, &i)| from[p] = i);
                Some(flat(&h.dims, from.iter().copied()))
            });
            if let Some(h) = out {
                return Ok(self.fold(h));
            }
        }
        let id = self.id(x)?;
        let n = self.g.permute(id, perm)?;
        Ok(self.value(n))
    }

    /// Broadcasts to `shape` by NumPy's rules.
    pub fn expand(&mut self, x: &Value, shape: &Shape) -> Result<Value> {
        if let (Some(h), Some(dims)) = (self.host_of(x), shape.known())
            && self.foldable(h.dtype, &dims)
            && let Some(h) = h.expand(&dims)
        {
            return Ok(self.fold(h));
        }
        let id = self.id(x)?;
        let n = self.g.expand(id, shape)?;
        Ok(self.value(n))
    }

    /// Slices with one range per axis.
    pub fn slice(&mut self, x: &Value, ranges: &[Range]) -> Result<Value> {
        let known: Option<Vec<(usize, usize)>> =
            ranges.iter().map(|r| Some((r.start.known()?, r.len.known()?))).collect();
        if let (Some(h), Some(k)) = (self.host_of(x), known)
            && self.has_fold_budget(h.vals.len())
            && k.len() == h.dims.len()
        {
            let out = h.map(k.iter().map(|r| r.1).collect(), |at| {
                let mut from = Vec::with_capacity(at.len());
                for (d, (&i, r)) in at.iter().zip(ranges).enumerate() {
                    let p = i64::try_from(k[d].0).ok()?.checked_add(r.step.checked_mul(i as i64)?)?;
                    from.push(usize::try_from(p).ok().filter(|p| *p < h.dims[d])?);
                }
                Some(flat(&h.dims, from.into_iter()))
            });
            if let Some(h) = out {
                return Ok(self.fold(h));
            }
        }
        let id = self.id(x)?;
        let start: Vec<Dim> = ranges.iter().map(|r| r.start).collect();
        let step: Vec<i64> = ranges.iter().map(|r| r.step).collect();
        let len: Vec<Dim> = ranges.iter().map(|r| r.len).collect();
        let n = self.g.slice(id, &start, &step, &len)?;
        Ok(self.value(n))
    }

    /// Takes `len` elements from `start` along one axis, which must exist.
    pub fn narrow(&mut self, x: &Value, axis: usize, start: Dim, len: Dim) -> Result<Value> {
        let mut r: Vec<Range> =
            x.shape().iter().map(|&len| Range { start: Dim::from(0), step: 1, len }).collect();
        if let Some(r) = r.get_mut(axis) {
            (r.start, r.len) = (start, len);
        }
        self.slice(x, &r)
    }

    pub fn concat(&mut self, x: &[&Value], axis: usize) -> Result<Value> {
        let hosts: Option<Vec<&Host>> = x.iter().map(|v| self.host_of(v)).collect();
        let sum = |h: &[&Host]| h.iter().map(|h| h.vals.len()).fold(0, usize::saturating_add);
        if let Some(h) = hosts.filter(|h| self.has_fold_budget(sum(h))).and_then(|h| fold_concat(&h, axis)) {
            return Ok(self.fold(h));
        }
        let ids = self.ids(x)?;
        let n = self.g.concat(&ids, axis)?;
        Ok(self.value(n))
    }

    pub fn gather(&mut self, x: &Value, index: &Value, axis: usize) -> Result<Value> {
        if let (Some(h), Some(i)) = (self.host_of(x), index.host())
            && self.has_fold_budget(h.vals.len().saturating_mul(i.vals.len()).min(4096))
            && let Some(h) = fold_gather(h, i, axis)
        {
            return Ok(self.fold(h));
        }
        let ids = self.ids(&[x, index])?;
        let n = self.g.gather(ids[0], ids[1], axis)?;
        Ok(self.value(n))
    }

    pub fn reduce(&mut self, kind: ReduceKind, x: &Value, axes: &[usize], keep: bool) -> Result<Value> {
        if let Some(h) = self.host_of(x)
            && axes.iter().all(|&a| a < h.dims.len())
            && !(h.dtype == DType::Bool && matches!(kind, ReduceKind::Sum | ReduceKind::Prod))
            && let Some(h) = h.reduce(kind, axes, keep)
        {
            return Ok(self.fold(h));
        }
        let id = self.id(x)?;
        let n = self.g.reduce(kind, id, axes, keep)?;
        Ok(self.value(n))
    }

    /// Sets `missing` to the inputs that `v` depends on.
    pub(super) fn note_missing(&mut self, v: &Value) {
        if let Source::Node(h) = &v.source {
            let live = self.g.live(&[h.node.get()]);
            let inputs = self.g.nodes().iter().zip(live).filter(|(_, live)| *live);
            self.missing =
                inputs.filter_map(|(n, _)| if let Op::Input(k) = n.op { Some(k) } else { None }).collect();
        }
    }
}

fn is_permutation(perm: &[usize], rank: usize) -> bool {
    let mut seen = vec![false; rank];
    perm.len() == rank && perm.iter().all(|&p| p < rank && !std::mem::replace(&mut seen[p], true))
}

fn fold_scalar(op: ScalarOp, x: &[&Value], room: impl Fn(usize) -> bool) -> Option<Host> {
    let first = usize::from(halcyon_ir::graph::has_condition(op));
    let d = x.get(first)?.dtype();
    // If the operands break the type rule, nothing is folded, and the graph reports the error.
    let typed = x[first..].iter().all(|v| v.dtype() == d) && (first == 0 || x[0].dtype() == DType::Bool);
    if !op.takes(d) || !typed || x.len() != op.arity() {
        return None;
    }
    let hosts: Vec<&Host> = x.iter().map(|v| v.host()).collect::<Option<_>>()?;
    let shape = x[1..].iter().try_fold(x[0].ty.shape.clone(), |s, v| s.broadcast(v.shape())).ok()?;
    let dims: Dims = shape.known()?;
    if !small(d, &dims) || !room(dims.iter().product()) {
        return None;
    }
    let wide: Vec<Host> = hosts.iter().map(|h| h.expand(&dims)).collect::<Option<_>>()?;
    let vals = (0..wide[0].vals.len())
        .map(|i| host::eval(op, d, &wide.iter().map(|h| h.vals[i]).collect::<Vec<_>>()))
        .collect::<Option<_>>()?;
    Some(Host { dtype: op.result(d), dims: dims.to_vec(), vals })
}

fn fold_concat(x: &[&Host], axis: usize) -> Option<Host> {
    let first = x.first()?;
    let outside = |h: &Host| {
        h.dtype == first.dtype
            && h.dims.len() == first.dims.len()
            && (0..h.dims.len()).all(|k| k == axis || h.dims[k] == first.dims[k])
    };
    if axis >= first.dims.len() || !x.iter().all(|h| outside(h)) {
        return None;
    }
    let mut dims = first.dims.clone();
    dims[axis] = x.iter().map(|h| h.dims[axis]).try_fold(0usize, |n, d| n.checked_add(d))?;
    if !small(first.dtype, &dims) {
        return None;
    }
    let rows: usize = dims[..axis].iter().product();
    let mut vals = Vec::new();
    for r in 0..rows {
        for h in x {
            let n: usize = h.dims[axis..].iter().product();
            vals.extend_from_slice(&h.vals[r * n..(r + 1) * n]);
        }
    }
    Some(Host { dtype: first.dtype, dims, vals })
}

fn fold_gather(x: &Host, index: &Host, axis: usize) -> Option<Host> {
    let n = *x.dims.get(axis)?;
    if !index.dtype.is_int() {
        return None;
    }
    let r = index.dims.len();
    let dims: Vec<usize> = [&x.dims[..axis], &index.dims, &x.dims[axis + 1..]].concat();
    if !small(x.dtype, &dims) {
        return None;
    }
    x.map(dims, |at| {
        let i = index.vals[flat(&index.dims, at[axis..axis + r].iter().copied())].known()?.as_i64();
        let i = usize::try_from(if i < 0 { i.checked_add(n as i64)? } else { i }).ok().filter(|i| *i < n)?;
        let from = at[..axis].iter().copied().chain([i]).chain(at[axis + r..].iter().copied());
        Some(flat(&x.dims, from))
    })
}
