//! Evaluates graphs on the host by the definition of every op, written for correctness, not speed. The
//! definitions are in `crate::ops`. Level O0 is checked against this evaluation, constant folding uses it,
//! and [`eval_f64`] is the float64 reference of the op tests.
//!
//! Semantics: after every op, elements are rounded to the node's dtype. Float sums, sums of products and
//! scans accumulate in f64 and round once. Integers wrap. For an index out of range, the evaluation returns
//! [`Error::Index`]. (A device uses a valid index instead and reports a fault.) An average over a window
//! wholly in the padding is 0.

use crate::composite::Composite;
use crate::data::ConstData;
use crate::dtype::{Class, DType, Scalar, bf16_of, f16_of};
use crate::error::{Error, Result};
use crate::graph::{Graph, NodeId};
use crate::ops::element_wise::{Rule, ScalarOp};
use crate::ops::{Op, ReduceKind, ScatterKind};
use crate::shape::{Dims, Shape, TensorType};
use std::cmp::Ordering;
use std::sync::Arc;

pub(crate) mod index;
pub(crate) mod window;

/// Elements widened to 64 bits: floats as `f64` (exact); bools and integers as `i64` (a u64 as the i64 with
/// the same bits).
#[derive(Clone, Debug)]
pub(crate) enum Vals {
    F(Vec<f64>),
    I(Vec<i64>),
}

#[derive(Clone, Debug)]
pub(crate) struct Tensor {
    pub(crate) dtype: DType,
    pub(crate) dims: Dims,
    pub(crate) v: Vals,
}

/// Applies the same code to both representations.
macro_rules! each {
    ($v:expr, |$x:ident| $e:expr) => {
        match $v {
            Vals::F($x) => Vals::F($e),
            Vals::I($x) => Vals::I($e),
        }
    };
}

pub(crate) fn mixed() -> Error {
    Error::internal("reference: operands of one op are float and integer")
}

/// Rounds to the float dtype `d`: to nearest, ties to even (E8M0: ties up).
fn round(d: DType, v: f64) -> f64 {
    match d {
        DType::F16 => f16_of(v).to_f64(),
        DType::BF16 => bf16_of(v).to_f64(),
        DType::F32 => v as f32 as f64,
        DType::F64 => v,
        d => Scalar::F(v).cast(d).as_f64(),
    }
}

/// Wraps to the integer dtype `d`. For bool, the result is 0 if `v` is 0, and 1 otherwise.
pub(crate) fn wrap(d: DType, v: i64) -> i64 {
    let sh = 64 - d.bits();
    match d.class() {
        Class::Bool => (v != 0) as i64,
        Class::Uint => ((v as u64) << sh >> sh) as i64,
        _ => (v << sh) >> sh,
    }
}

fn widen(d: DType, v: i64) -> i128 {
    if d == DType::U64 { v as u64 as i128 } else { v as i128 }
}

fn to_scalar(d: DType, v: i64) -> Scalar {
    match d.class() {
        Class::Bool => Scalar::Bool(v != 0),
        Class::Uint => Scalar::U(v as u64),
        _ => Scalar::I(v),
    }
}

pub(crate) fn of_scalar(s: Scalar) -> i64 {
    match s {
        Scalar::U(u) => u as i64,
        s => s.as_i64(),
    }
}

impl Vals {
    pub(crate) fn splat(d: DType, n: usize, v: Scalar) -> Vals {
        if d.is_float() {
            Vals::F(vec![v.cast(d).as_f64(); n])
        } else {
            Vals::I(vec![of_scalar(v.cast(d)); n])
        }
    }

    pub(crate) fn float(d: DType, mut v: Vec<f64>) -> Vals {
        if d == DType::F8E8M0 {
            // A sum of powers of two from the wide range of this dtype is not exact in f64. So by definition,
            // the result is rounded to f32 before it is rounded to the dtype.
            v.iter_mut().for_each(|x| *x = *x as f32 as f64);
        }
        if d != DType::F64 {
            v.iter_mut().for_each(|x| *x = round(d, *x));
        }
        Vals::F(v)
    }

    pub(crate) fn pick(&self, at: &[usize]) -> Vals {
        each!(self, |x| at.iter().map(|&p| x[p]).collect())
    }
}

impl Tensor {
    pub(crate) fn read(c: &ConstData) -> Tensor {
        let b = c.bytes();
        macro_rules! ints {
            ($t:ty) => {
                Vals::I(
                    b.chunks_exact(size_of::<$t>())
                        .map(|x| x.try_into().map_or(0, <$t>::from_le_bytes) as i64)
                        .collect(),
                )
            };
        }
        macro_rules! floats {
            ($t:ty, $f:expr) => {
                Vals::F(
                    b.chunks_exact(size_of::<$t>())
                        .map(|x| $f(x.try_into().map_or(0, <$t>::from_le_bytes)))
                        .collect(),
                )
            };
        }
        let v = match c.dtype {
            DType::Bool => Vals::I(b.iter().map(|x| (*x != 0) as i64).collect()),
            DType::U8 => ints!(u8),
            DType::U16 => ints!(u16),
            DType::U32 => ints!(u32),
            DType::U64 => ints!(u64),
            DType::I8 => ints!(i8),
            DType::I16 => ints!(i16),
            DType::I32 => ints!(i32),
            DType::I64 => ints!(i64),
            DType::F16 => floats!(u16, |u| half::f16::from_bits(u).to_f64()),
            DType::BF16 => floats!(u16, |u| half::bf16::from_bits(u).to_f64()),
            DType::F32 => floats!(u32, |u| f32::from_bits(u) as f64),
            DType::F64 => floats!(u64, f64::from_bits),
            d if d.is_float() => Vals::F(c.scalars().map(Scalar::as_f64).collect()),
            _ => Vals::I(c.scalars().map(of_scalar).collect()),
        };
        Tensor { dtype: c.dtype, dims: c.dims.clone(), v }
    }

    pub(crate) fn write(&self) -> Result<ConstData> {
        if !self.dtype.is_native() {
            return match &self.v {
                Vals::F(v) => {
                    ConstData::from_scalars(self.dtype, &self.dims, v.iter().map(|v| Scalar::F(*v)))
                }
                Vals::I(v) => {
                    ConstData::from_scalars(self.dtype, &self.dims, v.iter().map(|v| Scalar::I(*v)))
                }
            };
        }
        let n = self.dtype.size();
        let b: Vec<u8> = match (&self.v, self.dtype) {
            (Vals::F(v), DType::F16) => v.iter().flat_map(|x| f16_of(*x).to_le_bytes()).collect(),
            (Vals::F(v), DType::BF16) => v.iter().flat_map(|x| bf16_of(*x).to_le_bytes()).collect(),
            (Vals::F(v), DType::F32) => v.iter().flat_map(|x| (*x as f32).to_le_bytes()).collect(),
            (Vals::F(v), _) => v.iter().flat_map(|x| x.to_le_bytes()).collect(),
            (Vals::I(v), _) => {
                let mut b = Vec::with_capacity(v.len() * n);
                v.iter().for_each(|x| b.extend_from_slice(&x.to_le_bytes()[..n]));
                b
            }
        };
        ConstData::new(self.dtype, &self.dims, Arc::new(b))
    }

    pub(crate) fn ints(&self) -> Result<&[i64]> {
        match &self.v {
            Vals::I(v) => Ok(v),
            Vals::F(_) => Err(mixed()),
        }
    }
}

/// Evaluates one op on host data. `ty` is the node's type; `args` are the values of the graph's arguments.
///
/// Errors: `Input`, which has no value; symbolic shapes; an index out of range; errors of a custom op.
pub fn eval_op(op: &Op, inputs: &[&ConstData], ty: &TensorType, args: &[Scalar]) -> Result<ConstData> {
    let x: Vec<Tensor> = inputs.iter().map(|c| Tensor::read(c)).collect();
    let refs: Vec<&Tensor> = x.iter().collect();
    run(op, &refs, ty, args)?.write()
}

/// Evaluates a graph on host data and returns the outputs in order. `inputs` are in the order of
/// [`Graph::inputs`], `args` in the order of [`Graph::args`]. A symbolic graph is bound to the inputs' shapes
/// first. A value is dropped after its last use.
pub fn eval(graph: &Graph, inputs: &[ConstData], args: &[Scalar]) -> Result<Vec<ConstData>> {
    let shapes: Vec<Shape> = inputs.iter().map(|c| Shape::from(&c.dims)).collect();
    if !graph.nodes().iter().all(|n| n.ty.shape.known().is_some()) {
        return eval(&graph.bind(&graph.solve(&shapes)?)?, inputs, args);
    }
    if inputs.len() != graph.inputs().len() || args.len() < graph.args().len() {
        return Err(Error::argument(
            "eval",
            format!(
                "{} inputs and {} arguments are declared, but {} and {} are given",
                graph.inputs().len(),
                graph.args().len(),
                inputs.len(),
                args.len()
            ),
        ));
    }
    for (spec, c) in graph.inputs().iter().zip(inputs) {
        let got = TensorType::new(c.dtype, &c.dims);
        if *graph.ty(spec.node) != got {
            let want = graph.ty(spec.node);
            return Err(Error::shape("input", format!("input \"{}\" is {got}, declared {want}", spec.name)));
        }
    }
    let x: Vec<Tensor> = inputs.iter().map(Tensor::read).collect();
    run_graph(graph, x, args)?.iter().map(Tensor::write).collect()
}

/// Like [`eval`], but computes and stores every float in f64: the reference for measuring rounding errors.
/// Float inputs are widened; float outputs are f64.
pub fn eval_f64(graph: &Graph, inputs: &[ConstData], args: &[Scalar]) -> Result<Vec<ConstData>> {
    let x: Vec<ConstData> = inputs.iter().map(widened).collect::<Result<_>>()?;
    eval(&promote(graph)?, &x, args)
}

fn widened(c: &ConstData) -> Result<ConstData> {
    if c.dtype.is_float() && c.dtype != DType::F64 {
        let t = Tensor::read(c);
        return Tensor { dtype: DType::F64, ..t }.write();
    }
    Ok(c.clone())
}

/// The graph with every float dtype replaced by f64. Literals keep the value rounded to their original dtype.
/// Errors: a bitcast between an integer and a float of fewer than 64 bits. After the promotion, their sizes
/// would differ.
pub fn promote(graph: &Graph) -> Result<Graph> {
    let up = |d: DType| if d.is_float() { DType::F64 } else { d };
    let mut g = Graph::new();
    let mut map: Vec<NodeId> = Vec::with_capacity(graph.nodes().len());
    // Create inputs and arguments first, so that they keep their indices.
    let mut inputs = vec![];
    for i in graph.inputs() {
        let t = graph.ty(i.node);
        g.span = graph.node(i.node).span.clone();
        inputs.push(g.input(&i.name, TensorType::new(up(t.dtype), &t.shape)));
    }
    let args: Vec<NodeId> = graph.args().iter().map(|d| g.arg(up(*d))).collect();
    for n in graph.nodes() {
        g.span = n.span.clone();
        let want = TensorType::new(up(n.ty.dtype), &n.ty.shape);
        let op = match &n.op {
            Op::Input(k) => {
                map.push(lookup(&inputs, *k)?);
                continue;
            }
            Op::Arg(k) => {
                map.push(lookup(&args, *k)?);
                continue;
            }
            Op::Const(c) => Op::Const(widened(c)?),
            Op::Composite(c) => Op::Composite(Arc::new(Composite {
                kind: c.kind.clone(),
                attrs: c.attrs.clone(),
                body: promote(&c.body)?,
            })),
            o => o.clone(),
        };
        let ins: Vec<NodeId> = n.inputs.iter().map(|i| map[i.index()]).collect();
        let dtype = want.dtype;
        let mut id = g.push(op, &ins, Some(want))?;
        // Blocks are decoded to f32 whatever is wanted; the values are exact in f64.
        if g.dtype(id) != dtype && g.dtype(id).is_float() {
            id = g.cast(id, dtype)?;
        }
        map.push(id);
    }
    for o in graph.outputs() {
        g.output(&o.name, map[o.node.index()]);
    }
    for &(i, o) in graph.states() {
        g.state(i, o)?;
    }
    g.span = graph.span.clone();
    Ok(g)
}

fn lookup(v: &[NodeId], k: u32) -> Result<NodeId> {
    v.get(k as usize)
        .copied()
        .ok_or_else(|| Error::internal("a node names an input or argument that is not declared"))
}

pub(crate) fn run_graph(g: &Graph, inputs: Vec<Tensor>, args: &[Scalar]) -> Result<Vec<Tensor>> {
    let roots: Vec<NodeId> = g.outputs().iter().map(|o| o.node).collect();
    let live = g.live(&roots);
    let mut uses = vec![0u32; g.nodes().len()];
    roots.iter().for_each(|r| uses[r.index()] += 1);
    for (n, _) in g.nodes().iter().zip(&live).filter(|(_, l)| **l) {
        n.inputs.iter().for_each(|i| uses[i.index()] += 1);
    }
    let mut inputs: Vec<Option<Tensor>> = inputs.into_iter().map(Some).collect();
    let mut vals: Vec<Option<Tensor>> = vec![None; g.nodes().len()];
    let lost = || Error::internal("reference: a value is missing");
    for (i, n) in g.nodes().iter().enumerate().filter(|(i, _)| live[*i]) {
        let y = match n.op {
            Op::Input(k) => inputs.get_mut(k as usize).and_then(Option::take).ok_or_else(lost)?,
            _ => {
                let x: Vec<&Tensor> = n
                    .inputs
                    .iter()
                    .map(|i| vals[i.index()].as_ref().ok_or_else(lost))
                    .collect::<Result<_>>()?;
                run(&n.op, &x, &n.ty, args).map_err(|e| e.at(&n.span))?
            }
        };
        for x in &n.inputs {
            uses[x.index()] -= 1;
            if uses[x.index()] == 0 {
                vals[x.index()] = None;
            }
        }
        vals[i] = Some(y);
    }
    roots
        .iter()
        .map(|r| {
            uses[r.index()] -= 1;
            let v = &mut vals[r.index()];
            if uses[r.index()] == 0 { v.take() } else { v.clone() }.ok_or_else(lost)
        })
        .collect()
}

/// One op and its operands, from which the op's reference computes the result.
pub(crate) struct Eval<'a> {
    pub(crate) op: &'a Op,
    pub(crate) x: &'a [&'a Tensor],
    /// The type of the result, and its sizes.
    pub(crate) ty: &'a TensorType,
    pub(crate) dims: Dims,
    pub(crate) args: &'a [Scalar],
}

impl Eval<'_> {
    /// The dtype of the result.
    pub(crate) fn dtype(&self) -> DType {
        self.ty.dtype
    }

    /// The number of elements of the result.
    pub(crate) fn len(&self) -> usize {
        self.dims.iter().product()
    }

    /// The result with these elements.
    pub(crate) fn made(&self, v: Vals) -> Result<Tensor> {
        Ok(Tensor { dtype: self.dtype(), dims: self.dims.clone(), v })
    }
}

fn run(op: &Op, x: &[&Tensor], ty: &TensorType, args: &[Scalar]) -> Result<Tensor> {
    if x.is_empty() && !op.is_leaf() {
        return Err(Error::argument(op.name(), "operands are missing"));
    }
    let e = Eval { op, x, ty, dims: ty.shape.dims()?, args };
    op.rules(|r| r.reference(&e))
}

pub(crate) fn scalar(op: ScalarOp, x: &[&Tensor]) -> Result<Vals> {
    let row = op.row();
    if row.rule == Rule::Select {
        let c = x[0].ints()?;
        return Ok(match (&x[1].v, &x[2].v) {
            (Vals::F(a), Vals::F(b)) => Vals::F(blend(c, a, b)),
            (Vals::I(a), Vals::I(b)) => Vals::I(blend(c, a, b)),
            _ => return Err(mixed()),
        });
    }
    let d = x[0].dtype;
    let missing = || Error::internal(format!("{} has no value on {d}", op.name()));
    match &x[0].v {
        Vals::F(a) => {
            let f = row.float.ok_or_else(missing)?;
            let get = |i: usize| match x.get(i).map(|t| &t.v) {
                Some(Vals::F(v)) => Ok(v.as_slice()),
                _ => Err(mixed()),
            };
            let v: Vec<f64> = match row.arity {
                1 => a.iter().map(|a| f(*a, 0.0, 0.0)).collect(),
                2 => a.iter().zip(get(1)?).map(|(a, b)| f(*a, *b, 0.0)).collect(),
                _ => (a.iter().zip(get(1)?).zip(get(2)?)).map(|((a, b), c)| f(*a, *b, *c)).collect(),
            };
            Ok(if row.rule == Rule::Test {
                Vals::I(v.iter().map(|v| (*v != 0.0) as i64).collect())
            } else {
                Vals::float(d, v)
            })
        }
        Vals::I(a) => {
            let f = row.int.ok_or_else(missing)?;
            let w = |v: i64| widen(d, v);
            let out = op.result(d);
            // `not` is the only op on bool whose value as an integer may be other than 0 and 1.
            let fit = |v: i128| {
                if d == DType::Bool { (v & 1) as i64 } else { wrap(out, v as i64) }
            };
            Ok(Vals::I(match row.arity {
                1 => a.iter().map(|a| fit(f(w(*a), 0, 0))).collect(),
                2 => a.iter().zip(x[1].ints()?).map(|(a, b)| fit(f(w(*a), w(*b), 0))).collect(),
                _ => (a.iter().zip(x[1].ints()?).zip(x[2].ints()?))
                    .map(|((a, b), c)| fit(f(w(*a), w(*b), w(*c))))
                    .collect(),
            }))
        }
    }
}

fn blend<T: Copy>(c: &[i64], a: &[T], b: &[T]) -> Vec<T> {
    c.iter().zip(a.iter().zip(b)).map(|(c, (a, b))| if *c != 0 { *a } else { *b }).collect()
}

pub(crate) fn cast(x: &Tensor, d: DType) -> Vals {
    match &x.v {
        Vals::F(v) if d.is_float() => Vals::F(v.iter().map(|v| round(d, *v)).collect()),
        Vals::F(v) => Vals::I(v.iter().map(|v| of_scalar(Scalar::F(*v).cast(d))).collect()),
        Vals::I(v) if d.is_float() => {
            Vals::F(v.iter().map(|v| to_scalar(x.dtype, *v).cast(d).as_f64()).collect())
        }
        Vals::I(v) => Vals::I(v.iter().map(|v| wrap(d, *v)).collect()),
    }
}

/// Combines two partial results of a float reduction.
pub(crate) fn fold_f(kind: ReduceKind) -> impl Fn(f64, f64) -> f64 + Copy {
    let max = ScalarOp::Max.row().float;
    let min = ScalarOp::Min.row().float;
    move |a, b| match (kind, max, min) {
        (ReduceKind::Sum, ..) => a + b,
        (ReduceKind::Prod, ..) => a * b,
        (ReduceKind::Max, Some(f), _) | (ReduceKind::Min, _, Some(f)) => f(a, b, 0.0),
        _ => f64::NAN,
    }
}

/// The initial value of a float reduction. Max and Min start at an end of the dtype's range, because a small
/// float type may have no infinity.
pub(crate) fn start_f(kind: ReduceKind, d: DType) -> f64 {
    match kind {
        ReduceKind::Sum => 0.0,
        ReduceKind::Prod => 1.0,
        ReduceKind::Max => d.range().0,
        ReduceKind::Min => d.range().1,
    }
}

pub(crate) fn fold_i(kind: ReduceKind, d: DType) -> impl Fn(i64, i64) -> i64 + Copy {
    move |a, b| match kind {
        ReduceKind::Sum => wrap(d, a.wrapping_add(b)),
        ReduceKind::Prod => wrap(d, a.wrapping_mul(b)),
        ReduceKind::Max => {
            if widen(d, a) >= widen(d, b) {
                a
            } else {
                b
            }
        }
        ReduceKind::Min => {
            if widen(d, a) <= widen(d, b) {
                a
            } else {
                b
            }
        }
    }
}

/// Ordering of elements, with NaN as the largest.
pub(crate) fn order(x: &Tensor) -> impl Fn(usize, usize) -> Ordering + '_ {
    move |a, b| match &x.v {
        Vals::F(v) => v[a].partial_cmp(&v[b]).unwrap_or_else(|| v[a].is_nan().cmp(&v[b].is_nan())),
        Vals::I(v) => widen(x.dtype, v[a]).cmp(&widen(x.dtype, v[b])),
    }
}

pub(crate) fn scatter(kind: ScatterKind, base: &Tensor, upd: &Tensor, at: &[usize]) -> Result<Vals> {
    fn put<T: Copy>(base: &[T], upd: &[T], at: &[usize], f: impl Fn(T, T) -> T) -> Vec<T> {
        let mut out = base.to_vec();
        at.iter().zip(upd).for_each(|(p, u)| out[*p] = f(out[*p], *u));
        out
    }
    let fold = kind.reduction();
    let d = base.dtype;
    Ok(match (&base.v, &upd.v, fold) {
        (Vals::F(b), Vals::F(u), None) => Vals::F(put(b, u, at, |_, u| u)),
        (Vals::I(b), Vals::I(u), None) => Vals::I(put(b, u, at, |_, u| u)),
        (Vals::F(b), Vals::F(u), Some(k)) => Vals::float(d, put(b, u, at, fold_f(k))),
        (Vals::I(b), Vals::I(u), Some(k)) => Vals::I(put(b, u, at, fold_i(k, d))),
        _ => return Err(mixed()),
    })
}

#[cfg(test)]
mod tests;
