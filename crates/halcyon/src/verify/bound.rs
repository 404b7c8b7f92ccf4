//! Bounds how far two correct results of a part of a graph may differ.
//!
//! Each op has its own tolerance, from its row in the op table. The bound for several ops is derived from
//! these tolerances. The part is computed again in f64. An error is computed with each value: the largest
//! error that rounding in all earlier ops can have caused. Each op adds its own rounding error and propagates
//! the errors of its operands: by the product rule for sums of products, and for most other ops by evaluating
//! the op at the ends of the error intervals. Both results are rounded, so twice the error is allowed.

use crate::backend::Backend;
use crate::ir::composite::Composite;
use crate::ir::graph::{Graph, Node, NodeId};
use crate::ir::ops::element_wise::{Rule, ScalarOp};
use crate::ir::ops::{Op, ReduceKind, Rounding};
use crate::ir::reference;
use crate::ir::shape::TensorType;
use crate::optable::case::extremes;
use crate::optable::check::{Expected, eps};
use crate::{ConstData, DType, Error, Result, Session};

/// Allowed error of a composite's kernel, in units in the last place of the largest value. It is attention's
/// tolerance in the op table. Gradients of composites have twice this tolerance there, and [`expected`]
/// allows twice the error.
const COMPOSITE: f64 = 32.0;
/// The same if activations are rounded to 8 bits: half of the tolerance in the op table.
const ACTIVATIONS_IN_BYTES: f64 = 125_000.0;
/// Allowed error in the same units, per op of the part, if the error of an op cannot be propagated (a custom
/// op, the bits of a float).
const UNKNOWN: f64 = 32.0;
/// Rounding error of a sum of `k` terms, in units in the last place of the sum of magnitudes, as in the op
/// table.
fn sum_units(k: usize) -> f64 {
    4.0 + 2.0 * (k as f64).sqrt()
}

/// If the device lacks f64, the host's reference computes values up to this number of elements.
const ON_HOST: usize = 1 << 26;

/// Runs a graph once on a backend, without using the plan cache.
pub(super) fn once(b: &Backend, graph: &Graph, inputs: &[ConstData]) -> Result<Vec<ConstData>> {
    let plan = crate::ir::lower::lower(graph, b.device().as_target(), &b.lower_options())?;
    let exe = b.executable(plan)?;
    let s = Session::new(b, graph.clone());
    let out = exe.run(&s.upload(inputs)?, &[])?;
    s.download(&exe, &out)
}

/// The allowed results for the outputs of `part`, given what the reference computed.
pub(super) fn expected(
    part: &Graph,
    inputs: &[ConstData],
    want: Vec<ConstData>,
    reference: &Backend,
) -> Result<Vec<Expected>> {
    if exact(part) {
        return Ok(want.into_iter().map(Expected::equal).collect());
    }
    let Some(slack) = slack(part, inputs, reference)? else {
        let ops = part.nodes().iter().filter(|n| !n.op.is_leaf() && !n.op.is_view()).count() as f64;
        return want.into_iter().map(|w| Ok(coarse(w, UNKNOWN * ops))).collect();
    };
    Ok(want
        .into_iter()
        .zip(slack)
        .map(|(w, s)| match s {
            Some(s) => Expected::within(w, s.scalars().map(|e| 2.0 * e.as_f64()).collect()),
            None => Expected::equal(w),
        })
        .collect())
}

/// Allows `units` in the last place of the tensor's largest magnitude.
fn coarse(want: ConstData, units: f64) -> Expected {
    if !want.dtype.is_float() {
        return Expected::equal(want);
    }
    let top = want.scalars().map(|s| s.as_f64().abs()).filter(|v| v.is_finite()).fold(0.0, f64::max);
    let slack = vec![units * eps(want.dtype) * top + extremes(want.dtype).1; want.numel()];
    Expected::within(want, slack)
}

/// Whether every op of a graph is exact or has a result that the op table defines bit by bit.
fn exact(g: &Graph) -> bool {
    let ints = |n: &Node| !n.ty.dtype.is_float() && n.inputs.iter().all(|i| !g.dtype(*i).is_float());
    g.nodes().iter().all(|n| {
        let x: Vec<&TensorType> = n.inputs.iter().map(|i| g.ty(*i)).collect();
        match n.op.rounding(&x, &n.ty) {
            Rounding::Given | Rounding::Exact | Rounding::Moves { .. } | Rounding::Bits => true,
            Rounding::Unknown { exact } => exact,
            Rounding::Linear { .. } | Rounding::OfLargest { .. } => false,
            Rounding::Scalar(s) => s.row().ulps == 0.0 || ints(n),
            // Devices convert wide integers to 16-bit floats through f32, which may round twice.
            Rounding::Cast => {
                let from = x.first().map_or(n.ty.dtype, |x| x.dtype);
                !(from.is_int() && from.bits() >= 32 && n.ty.dtype.is_float() && n.ty.dtype.bits() == 16)
            }
            Rounding::Body => matches!(&n.op, Op::Composite(c) if exact(&c.body)),
        }
    })
}

/// For each output, the error that one result may have; `None` for an output that must be equal. `Ok(None)`
/// if the error cannot be bounded.
fn slack(part: &Graph, inputs: &[ConstData], reference: &Backend) -> Result<Option<Vec<Option<ConstData>>>> {
    let mut a = Analysis { g: Graph::new() };
    let mut ins = vec![];
    for i in part.inputs() {
        let t = part.ty(i.node);
        ins.push(Value { v: a.g.input(&i.name, f64_type(t)), e: None });
    }
    let values = match a.walk(part, &ins) {
        Ok(v) => v,
        Err(BoundError::Unbounded) => return Ok(None),
        Err(BoundError::Error(e)) => return Err(e),
    };
    let errors: Vec<Option<NodeId>> =
        part.outputs().iter().map(|o| values[o.node.index()].and_then(|v| v.e)).collect();
    errors.iter().flatten().for_each(|e| {
        a.g.output("error", *e);
    });
    if errors.iter().all(Option::is_none) {
        return Ok(Some(errors.into_iter().map(|_| None).collect()));
    }
    let wide: Vec<ConstData> = inputs.iter().map(to_f64).collect::<Result<_>>()?;
    let found = match once(reference, &a.g, &wide) {
        Err(Error::Unsupported { .. }) => {
            let most = a.g.nodes().iter().filter_map(|n| n.ty.shape.numel().known()).max().unwrap_or(0);
            if most > ON_HOST {
                return Ok(None);
            }
            reference::eval(&a.g, &wide, &[])?
        }
        r => r?,
    };
    let mut found = found.into_iter();
    Ok(Some(errors.into_iter().map(|e| e.and_then(|_| found.next())).collect()))
}

fn f64_type(t: &TensorType) -> TensorType {
    TensorType { dtype: f64_dtype(t.dtype), shape: t.shape.clone() }
}

fn f64_dtype(d: DType) -> DType {
    if d.is_float() { DType::F64 } else { d }
}

fn to_f64(c: &ConstData) -> Result<ConstData> {
    if c.dtype.is_float() && c.dtype != DType::F64 {
        return ConstData::from_scalars(DType::F64, &c.dims, c.scalars());
    }
    Ok(c.clone())
}

/// A value in f64 (integers and bools keep their dtype) and its possible error in f64. The error is `None` if
/// the value is exact.
#[derive(Clone, Copy, Debug)]
struct Value {
    v: NodeId,
    e: Option<NodeId>,
}

enum BoundError {
    /// The error cannot be propagated through some op.
    Unbounded,
    Error(Error),
}

impl From<Error> for BoundError {
    fn from(e: Error) -> BoundError {
        BoundError::Error(e)
    }
}

type BoundResult<T> = std::result::Result<T, BoundError>;

/// The graph that computes the values and their errors.
struct Analysis {
    g: Graph,
}

impl Analysis {
    fn walk(&mut self, graph: &Graph, ins: &[Value]) -> BoundResult<Vec<Option<Value>>> {
        let roots: Vec<NodeId> = graph.outputs().iter().map(|o| o.node).collect();
        let live = graph.live(&roots);
        let mut out: Vec<Option<Value>> = vec![None; graph.nodes().len()];
        for id in graph.ids().filter(|i| live[i.index()]) {
            let n = graph.node(id);
            let x = n
                .inputs
                .iter()
                .map(|i| out[i.index()].ok_or(BoundError::Unbounded))
                .collect::<BoundResult<Vec<_>>>()?;
            let from: Vec<DType> = n.inputs.iter().map(|i| graph.dtype(*i)).collect();
            out[id.index()] = Some(self.node(n, &x, &from, ins)?);
        }
        Ok(out)
    }

    fn node(&mut self, n: &Node, x: &[Value], from: &[DType], ins: &[Value]) -> BoundResult<Value> {
        let (ty, d) = (f64_type(&n.ty), n.ty.dtype);
        let operands: Vec<NodeId> = x.iter().map(|x| x.v).collect();
        let errs = x.iter().any(|x| x.e.is_some());
        let exact = |v: NodeId| Ok(Value { v, e: None });
        let types: Vec<TensorType> = from.iter().zip(x).map(|(d, x)| self.ty(*d, x.v)).collect();
        let rounding = n.op.rounding(&types.iter().collect::<Vec<_>>(), &n.ty);
        // First handle the ops that cannot be built unchanged on the widened operands.
        match (&n.op, &rounding) {
            (Op::Input(k), _) => return ins.get(*k as usize).copied().ok_or(BoundError::Unbounded),
            (Op::Const(c), _) => return exact(self.g.constant(to_f64(c)?)),
            (Op::Full(s), _) => return exact(self.g.full(ty.dtype, ty.shape, *s)),
            (Op::Composite(c), _) => return self.composite(c, d, x),
            (_, Rounding::Unknown { .. }) => return Err(BoundError::Unbounded),
            (_, Rounding::Bits) if errs || d.is_float() || from[0].is_float() => {
                return Err(BoundError::Unbounded);
            }
            (_, Rounding::Cast) => return self.cast(d, from[0], x[0]),
            _ => {}
        }
        let op = n.op.with_fill(|v| v.cast(ty.dtype))?;
        let v = self.g.push(op.clone(), &operands, Some(ty.clone()))?;
        let e = match (rounding, errs) {
            (Rounding::Scalar(s), _) => self.scalar(s, d, v, x)?,
            (Rounding::Linear { terms }, _) => Some(self.linear(&op, d, v, &ty, x, terms)?),
            (Rounding::Moves { with, clamp }, true) => Some(self.moved_errors(&op, with, clamp, &ty, x)?),
            (Rounding::OfLargest { units }, false) => {
                Some(self.of_largest(v, units * eps(d), extremes(d).1)?)
            }
            (Rounding::Given | Rounding::Exact | Rounding::Bits | Rounding::Moves { .. }, false) => None,
            (Rounding::Given | Rounding::Exact | Rounding::Bits | Rounding::OfLargest { .. }, true) => {
                return Err(BoundError::Unbounded);
            }
            // The first `match` has returned for these.
            (Rounding::Cast | Rounding::Body | Rounding::Unknown { .. }, _) => {
                return Err(BoundError::Unbounded);
            }
        };
        Ok(Value { v, e })
    }

    /// The type of operand `x` before it was widened from `dtype` to f64.
    fn ty(&self, dtype: DType, x: NodeId) -> TensorType {
        TensorType { dtype, shape: self.g.shape(x).clone() }
    }

    /// The errors of an op that moves elements. Applies `with` to the errors of the operands whose elements
    /// appear in the result of `op`. The other operands are indices and positions, which must be exact.
    fn moved_errors(
        &mut self,
        op: &Op,
        with: Op,
        clamp: bool,
        ty: &TensorType,
        x: &[Value],
    ) -> BoundResult<NodeId> {
        let moves = op.facts().moves;
        let mut operands = vec![];
        for (k, x) in x.iter().enumerate() {
            let data = moves.operand(k);
            if !data && x.e.is_some() {
                return Err(BoundError::Unbounded);
            }
            operands.push(if data { self.error_of(*x)? } else { x.v });
        }
        let want = TensorType { dtype: DType::F64, shape: ty.shape.clone() };
        let e = self.g.push(with, &operands, Some(want))?;
        if clamp { self.not_negative(e) } else { Ok(e) }
    }

    /// The error of a value as a tensor, which is zero everywhere if the value is exact.
    fn error_of(&mut self, x: Value) -> BoundResult<NodeId> {
        Ok(match x.e {
            Some(e) => e,
            None => {
                let shape = self.g.shape(x.v).clone();
                self.g.full(DType::F64, shape, 0.0)
            }
        })
    }

    fn not_negative(&mut self, e: NodeId) -> BoundResult<NodeId> {
        Ok(self.g.relu(e)?)
    }

    /// `units * |v| + tiny`.
    fn of_value(&mut self, v: NodeId, units: f64, tiny: f64) -> BoundResult<NodeId> {
        let a = self.g.abs(v)?;
        self.affine(a, units, tiny)
    }

    fn affine(&mut self, a: NodeId, by: f64, plus: f64) -> BoundResult<NodeId> {
        let (k, t) = (self.g.lit(a, by), self.g.lit(a, plus));
        let m = self.g.mul(a, k)?;
        Ok(self.g.add(m, t)?)
    }

    /// `units * max|v| + tiny` for every element.
    fn of_largest(&mut self, v: NodeId, units: f64, tiny: f64) -> BoundResult<NodeId> {
        let shape = self.g.shape(v).clone();
        let a = self.g.abs(v)?;
        // NaN and infinity must not enlarge the bound of other elements.
        let (inf, zero) = (self.g.lit(a, f64::INFINITY), self.g.lit(a, 0.0));
        let finite = self.g.lt(a, inf)?;
        let a = self.g.select(finite, a, zero)?;
        let axes: Vec<usize> = (0..shape.rank()).collect();
        let top = self.g.reduce(ReduceKind::Max, a, &axes, true)?;
        let e = self.affine(top, units, tiny)?;
        Ok(self.g.expand(e, &shape)?)
    }

    fn sum(&mut self, a: Option<NodeId>, b: Option<NodeId>) -> BoundResult<Option<NodeId>> {
        Ok(match (a, b) {
            (Some(a), Some(b)) => Some(self.g.add(a, b)?),
            (a, b) => a.or(b),
        })
    }

    fn max_error(&mut self, a: Option<NodeId>, b: Option<NodeId>) -> BoundResult<Option<NodeId>> {
        Ok(match (a, b) {
            (Some(a), Some(b)) => Some(self.g.max(a, b)?),
            (a, b) => a.or(b),
        })
    }

    /// The error of an op whose result `v` is a sum of products of `k` terms. Each operand has a value `x.v`
    /// and an error `x.e`. The rounding error is relative to the op applied to `|x.v| + x.e`. The propagated
    /// error is the result of that op minus the op applied to `|x.v|`.
    fn linear(
        &mut self,
        op: &Op,
        d: DType,
        v: NodeId,
        ty: &TensorType,
        x: &[Value],
        k: usize,
    ) -> BoundResult<NodeId> {
        let mut sizes = vec![];
        let mut off = vec![];
        for x in x {
            if self.g.dtype(x.v) != DType::F64 {
                if x.e.is_some() {
                    return Err(BoundError::Unbounded);
                }
                sizes.push(x.v);
                off.push(x.v);
                continue;
            }
            let a = self.g.abs(x.v)?;
            sizes.push(a);
            off.push(match x.e {
                Some(e) => self.g.add(a, e)?,
                None => a,
            });
        }
        let scale = self.g.push(op.clone(), &off, Some(ty.clone()))?;
        let own = self.affine(scale, eps(d.compute()) * sum_units(k), extremes(d).1)?;
        let stored = match once_rounded(d) {
            r if r > 0.0 => Some(self.of_value(v, r, 0.0)?),
            _ => None,
        };
        let mut e = self.sum(Some(own), stored)?.unwrap_or(own);
        if sizes != off {
            let plain = self.g.push(op.clone(), &sizes, Some(ty.clone()))?;
            let more = self.g.sub(scale, plain)?;
            e = self.g.add(e, more)?;
        }
        Ok(e)
    }

    fn composite(&mut self, c: &Composite, d: DType, x: &[Value]) -> BoundResult<Value> {
        let body = self.walk(&c.body, x)?;
        let root = c.result()?;
        let y = body[root.index()].ok_or(BoundError::Unbounded)?;
        if !d.is_float() || exact(&c.body) {
            return Ok(y);
        }
        // A kernel for the whole composite may round differently from its body. If the weights have blocks,
        // it may round activations to 8 bits, or to 15.
        let units = match (c.weight_blocks(), c.fine_activations()) {
            (None, _) => COMPOSITE,
            (Some(_), false) => ACTIVATIONS_IN_BYTES,
            (Some(_), true) => COMPOSITE + ACTIVATIONS_IN_BYTES / 128.0,
        };
        let own = self.of_largest(y.v, units * eps(d.compute()) + 2.0 * once_rounded(d), extremes(d).1)?;
        let e = self.sum(Some(own), y.e)?;
        Ok(Value { v: y.v, e })
    }

    fn cast(&mut self, to: DType, from: DType, x: Value) -> BoundResult<Value> {
        let v = self.g.cast(x.v, f64_dtype(to))?;
        if to.is_float() {
            let narrows = !from.is_float() || eps(to) > eps(from);
            let own = match narrows {
                true => Some(self.of_value(v, eps(to), extremes(to).1)?),
                false => None,
            };
            return Ok(Value { v, e: self.sum(own, x.e)? });
        }
        let Some(e) = x.e else { return Ok(Value { v, e: None }) };
        if !from.is_float() {
            return Ok(Value { v, e: Some(e) });
        }
        let mut worst = None;
        for sign in [1.0, -1.0] {
            let d = self.affine(e, sign, 0.0)?;
            let moved = self.g.add(x.v, d)?;
            let y = self.g.cast(moved, to)?;
            let off = self.distance(y, v)?;
            worst = self.max_error(worst, Some(off))?;
        }
        Ok(Value { v, e: worst })
    }

    /// `|a - b|` in f64, 0 where they are equal, infinite where one is NaN.
    fn distance(&mut self, a: NodeId, b: NodeId) -> BoundResult<NodeId> {
        let same = self.g.scalar(ScalarOp::Eq, &[a, b])?;
        let (x, y) = (self.g.cast(a, DType::F64)?, self.g.cast(b, DType::F64)?);
        let d = self.g.sub(x, y)?;
        let d = self.g.abs(d)?;
        let (zero, inf) = (self.g.lit(d, 0.0), self.g.lit(d, f64::INFINITY));
        let lost = self.g.isnan(d)?;
        let d = self.g.select(lost, inf, d)?;
        Ok(self.g.select(same, zero, d)?)
    }

    fn scalar(&mut self, s: ScalarOp, d: DType, v: NodeId, x: &[Value]) -> BoundResult<Option<NodeId>> {
        let passed = match x.iter().any(|x| x.e.is_some()) {
            true => self.propagate(s, v, x)?,
            false => None,
        };
        let row = s.row();
        if !d.is_float() || row.ulps == 0.0 {
            return Ok(passed);
        }
        let (ec, once, tiny) = (eps(d.compute()), once_rounded(d), extremes(d).1);
        let own = match s {
            // For negative operands the result is a difference of nearly equal numbers, so the error is
            // relative to the operand.
            ScalarOp::Gelu | ScalarOp::GeluTanh => {
                let a = self.g.abs(x[0].v)?;
                let scale = self.g.scalar(s, &[a])?;
                let e = self.affine(scale, ec * sum_units(100), tiny)?;
                let stored = self.of_value(v, once, 0.0)?;
                self.g.add(e, stored)?
            }
            // The error of arithmetic is relative to its result, however small the result is. The error of
            // other functions near a zero is relative to their operand, so results below 1e-3 count as 1e-3.
            _ if row.ulps <= 4.0 => self.of_value(v, once + row.ulps * ec, tiny)?,
            _ => {
                let a = self.g.abs(v)?;
                let least = self.g.lit(a, 1e-3);
                let a = self.g.max(a, least)?;
                self.affine(a, once + row.ulps * ec, tiny)?
            }
        };
        self.sum(Some(own), passed)
    }

    /// The error of an op's result caused by the errors of its operands.
    fn propagate(&mut self, s: ScalarOp, v: NodeId, x: &[Value]) -> BoundResult<Option<NodeId>> {
        match (s, x) {
            (ScalarOp::Neg | ScalarOp::Abs | ScalarOp::Relu, [x]) => return Ok(x.e),
            (ScalarOp::Not, [x]) if self.g.dtype(x.v) == DType::Bool => return Ok(x.e),
            (ScalarOp::Add | ScalarOp::Sub, [a, b]) => return self.sum(a.e, b.e),
            (ScalarOp::Max | ScalarOp::Min, [a, b]) => return self.max_error(a.e, b.e),
            (ScalarOp::And | ScalarOp::Or | ScalarOp::Xor, [a, b]) if self.g.dtype(a.v) == DType::Bool => {
                return self.max_error(a.e, b.e);
            }
            (ScalarOp::Select, [c, a, b]) => {
                let (ea, eb) = (self.error_of(*a)?, self.error_of(*b)?);
                let e = self.g.select(c.v, ea, eb)?;
                let Some(ec) = c.e else { return Ok(Some(e)) };
                // If the condition is uncertain, the other branch may be taken.
                let off = self.distance(a.v, b.v)?;
                let zero = self.g.lit(ec, 0.0);
                let unsure = self.g.gt(ec, zero)?;
                let both = self.g.max(ea, eb)?;
                let other = self.g.add(off, both)?;
                return Ok(Some(self.g.select(unsure, other, e)?));
            }
            _ => {}
        }
        // Evaluate the op at all combinations of the interval ends of the operands that have an error.
        let mut ends: Vec<Vec<NodeId>> = vec![vec![]];
        for (k, x) in x.iter().enumerate() {
            let choices = match x.e {
                None => vec![x.v],
                Some(_) if self.g.dtype(x.v) != DType::F64 => return Err(BoundError::Unbounded),
                Some(e) => vec![self.g.add(x.v, e)?, self.g.sub(x.v, e)?],
            };
            debug_assert!(s.row().rule != Rule::Select || k > 0);
            ends = ends.iter().flat_map(|p| choices.iter().map(|c| [&p[..], &[*c]].concat())).collect();
        }
        let mut worst = None;
        for e in ends {
            let y = self.g.scalar(s, &e)?;
            let off = self.distance(y, v)?;
            worst = self.max_error(worst, Some(off))?;
        }
        Ok(worst)
    }
}

/// 16-bit floats are computed in f32 and rounded once more when they are stored. Returns the relative error
/// of that rounding, which is 0 for other types.
fn once_rounded(d: DType) -> f64 {
    let (e, c) = (eps(d), eps(d.compute()));
    if e > c { e } else { 0.0 }
}
