//! Exact algebraic simplification. Results are the same, including infinities and the signs of zeros. NaN
//! stays NaN.

use super::rebuild::{Rebuild, prune};
use crate::dtype::{Class, DType, Scalar};
use crate::error::Result;
use crate::graph::{Graph, Node, NodeId};
use crate::ops::element_wise::ScalarOp;
use crate::ops::{Op, ReduceKind, SliceAxis};
use crate::shape::Dim;

/// Applies the identities once in node order, and drops dead nodes. Operands come before the nodes that use
/// them, so several identities in a row are applied in one run. Returns the graph and the number of nodes
/// rewritten or dropped.
pub fn run(g: &Graph) -> Result<(Graph, usize)> {
    let live = Rebuild::live(g);
    let mut r = Rebuild::new(g);
    let mut changes = 0;
    for id in g.ids() {
        let n = g.node(id);
        if !live[id.index()] {
            changes += !matches!(n.op, Op::Input(_) | Op::Arg(_)) as usize;
            continue;
        }
        if !n.op.is_leaf() {
            let x = r.operands(n)?;
            r.new.span = n.span.clone();
            if let Some(mut y) = rewrite(&mut r.new, n, &x) {
                // The result may be a new node to which another identity applies.
                while let n = r.new.node(y).clone()
                    && let Some(z) = rewrite(&mut r.new, &n, &n.inputs)
                {
                    y = z;
                }
                r.set(id, y);
                changes += 1;
                continue;
            }
        }
        r.copy(id)?;
    }
    let g = r.finish()?.0;
    Ok((prune(&g)?, changes))
}

/// The value that all elements of a node equal, traced through at most 15 views.
fn uniform(g: &Graph, mut id: NodeId) -> Option<Scalar> {
    for _ in 0..16 {
        let n = g.node(id);
        match &n.op {
            Op::Full(v) => return Some(*v),
            Op::Reshape | Op::Permute(_) | Op::Expand | Op::Slice(_) => id = *n.inputs.first()?,
            _ => return None,
        }
    }
    None
}

/// A simpler node with the value of `n` on operands `x`. If the builder rejects the simpler node, nothing is
/// rewritten.
fn rewrite(g: &mut Graph, n: &Node, x: &[NodeId]) -> Option<NodeId> {
    let first = *x.first()?;
    let under = g.node(first).clone();
    let inner = under.inputs.first().copied();
    match (&n.op, &under.op) {
        (Op::Scalar(s), _) => scalar(g, *s, n, x),
        (Op::Cast, _) if under.ty.dtype == n.ty.dtype => Some(first),
        (Op::Cast, Op::Cast) => {
            let from = g.dtype(inner?);
            casts_merge(from, under.ty.dtype, n.ty.dtype).then(|| g.cast(inner?, n.ty.dtype).ok()).flatten()
        }
        (Op::Bitcast, _) if under.ty.dtype == n.ty.dtype => Some(first),
        (Op::Bitcast, Op::Bitcast) => {
            if g.dtype(inner?) == n.ty.dtype {
                return inner;
            }
            g.bitcast(inner?, n.ty.dtype).ok()
        }
        (Op::Reshape | Op::Expand, _) if under.ty.shape == n.ty.shape => Some(first),
        (Op::Reshape, Op::Reshape) => g.reshape(inner?, &n.ty.shape).ok(),
        (Op::Expand, Op::Expand) => g.expand(inner?, &n.ty.shape).ok(),
        (Op::Permute(p), _) if p.iter().copied().eq(0..p.len()) => Some(first),
        (Op::Permute(p), Op::Permute(q)) => {
            let both: Vec<usize> = p.iter().map(|k| q[*k]).collect();
            g.permute(inner?, &both).ok()
        }
        (Op::Slice(a), _)
            if under.ty.shape == n.ty.shape && a.iter().all(|a| a.start.is(0) && a.step == 1) =>
        {
            Some(first)
        }
        (Op::Slice(a), Op::Slice(b)) => {
            let axes: Vec<SliceAxis> = a.iter().zip(b).map(|(a, b)| compose(a, b)).collect::<Option<_>>()?;
            let start: Vec<Dim> = axes.iter().map(|a| a.start).collect();
            let step: Vec<i64> = axes.iter().map(|a| a.step).collect();
            g.slice(inner?, &start, &step, &n.ty.shape).ok()
        }
        (Op::Slice(a), Op::Concat { axis }) => part_of_concat(g, a, *axis, &under, n),
        (Op::Pad { lo, hi, .. }, _) if lo.iter().chain(hi).all(|n| *n == 0) => Some(first),
        (Op::Pad { lo, hi, value }, Op::Pad { lo: l, hi: h, value: v }) if value == v => {
            let sum = |a: &[usize], b: &[usize]| -> Vec<usize> {
                a.iter().zip(b).map(|(a, b)| a.saturating_add(*b)).collect()
            };
            g.pad(inner?, &sum(lo, l), &sum(hi, h), *value).ok()
        }
        (Op::Concat { .. }, _) if x.len() == 1 => Some(first),
        // A reduction of single elements. (Not float sums: they start at +0, which would turn -0 into +0.)
        (Op::Reduce { kind, axes, .. }, _)
            if axes.iter().all(|k| under.ty.shape[*k].is(1))
                && (*kind != ReduceKind::Sum || !n.ty.dtype.is_float()) =>
        {
            g.reshape(first, &n.ty.shape).ok()
        }
        _ => None,
    }
}

/// A slice that lies in one part of a concatenation, as a slice of that part.
fn part_of_concat(g: &mut Graph, a: &[SliceAxis], axis: usize, under: &Node, n: &Node) -> Option<NodeId> {
    let along = a.get(axis)?;
    let (mut start, len) = (along.start.known()?, n.ty.shape[axis].known()?);
    if along.step != 1 || len == 0 {
        return None;
    }
    for part in &under.inputs {
        let size = g.shape(*part)[axis].known()?;
        if start < size {
            let fits = start + len <= size;
            let mut starts: Vec<Dim> = a.iter().map(|a| a.start).collect();
            starts[axis] = Dim::from(start);
            let steps: Vec<i64> = a.iter().map(|a| a.step).collect();
            return fits.then(|| g.slice(*part, &starts, &steps, &n.ty.shape).ok()).flatten();
        }
        start -= size;
    }
    None
}

/// Composes slice `a` of slice `b` along one axis.
fn compose(a: &SliceAxis, b: &SliceAxis) -> Option<SliceAxis> {
    let (s, t) = (i64::try_from(a.start.known()?).ok()?, i64::try_from(b.start.known()?).ok()?);
    let start = s.checked_mul(b.step)?.checked_add(t)?;
    Some(SliceAxis { start: Dim::from(usize::try_from(start).ok()?), step: a.step.checked_mul(b.step)? })
}

/// Whether dtype `b` represents every value of dtype `a`.
fn holds(b: DType, a: DType) -> bool {
    // Number of bits of the integers that the float type represents exactly.
    let exact = match b {
        DType::F16 => 11,
        DType::BF16 => 8,
        DType::F32 => 24,
        DType::F64 => 53,
        _ => 0,
    };
    match (a.class(), b.class()) {
        _ if a == b => true,
        // Small types have been removed before this pass.
        _ if !a.is_native() || !b.is_native() => false,
        (Class::Bool, _) => true,
        (Class::Uint, Class::Uint) | (Class::Int, Class::Int) => b.bits() >= a.bits(),
        (Class::Uint, Class::Int) => b.bits() > a.bits(),
        (Class::Uint | Class::Int, Class::Float) => a.bits() <= exact,
        (Class::Float, Class::Float) => b == DType::F64 || (b == DType::F32 && a != DType::F64),
        _ => false,
    }
}

/// Whether casting `a` to `b` to `c` equals casting `a` to `c`. `b` must represent every value of `a`, and
/// the second cast must treat the value as a direct cast does: casts from floats to integers saturate, casts
/// between integers wrap.
fn casts_merge(a: DType, b: DType, c: DType) -> bool {
    let wraps = a.is_int() && b.is_float() && c.is_int();
    holds(b, a) && (!wraps || c == a)
}

fn scalar(g: &mut Graph, op: ScalarOp, n: &Node, x: &[NodeId]) -> Option<NodeId> {
    use ScalarOp::*;
    let d = n.ty.dtype;
    let float = d.is_float();
    let value = |v: Scalar| v.cast(d);
    let is = |g: &Graph, k: usize, v: Scalar| uniform(g, x[k]) == Some(v.cast(d));
    let full = |g: &mut Graph, v: Scalar| Some(g.full(d, &n.ty.shape, v));
    let arg_of = |g: &Graph, k: usize, inner: &[ScalarOp]| {
        let u = g.node(x[k]);
        match u.op {
            Op::Scalar(s) if inner.contains(&s) => u.inputs.first().copied(),
            _ => None,
        }
    };
    let integral = [Floor, Ceil, Round, Trunc];
    let (one, nil, ones) = (Scalar::I(1), Scalar::I(0), value(Scalar::I(-1)));
    // Adding -0 changes nothing, but adding +0 turns -0 into +0.
    let add_id = if float { Scalar::F(-0.0) } else { nil };
    let lowest = ReduceKind::Max.identity(d);
    let highest = ReduceKind::Min.identity(d);
    let same = x.len() > 1 && x[0] == x[1];
    match op {
        Neg | Not => arg_of(g, 0, &[op]),
        Abs if d.class() == Class::Uint => Some(x[0]),
        Abs => match arg_of(g, 0, &[Neg]) {
            Some(i) => g.abs(i).ok(),
            None => arg_of(g, 0, &[Abs]).map(|_| x[0]),
        },
        Relu | Sign => arg_of(g, 0, &[op]).map(|_| x[0]),
        Floor | Ceil | Round | Trunc => arg_of(g, 0, &integral).map(|_| x[0]),
        Add if is(g, 1, add_id) => Some(x[0]),
        Add if is(g, 0, add_id) => Some(x[1]),
        Sub if is(g, 1, nil) => Some(x[0]),
        Sub if same && !float => full(g, nil),
        Mul if is(g, 1, one) => Some(x[0]),
        Mul if is(g, 0, one) => Some(x[1]),
        Mul if !float && (is(g, 0, nil) || is(g, 1, nil)) => full(g, nil),
        Div | Pow if is(g, 1, one) => Some(x[0]),
        Max | Min | And | Or if same => Some(x[0]),
        Xor if same => full(g, nil),
        Max if is(g, 1, lowest) => Some(x[0]),
        Max if is(g, 0, lowest) => Some(x[1]),
        Min if is(g, 1, highest) => Some(x[0]),
        Min if is(g, 0, highest) => Some(x[1]),
        And if is(g, 1, ones) => Some(x[0]),
        And if is(g, 0, ones) => Some(x[1]),
        And if is(g, 0, nil) || is(g, 1, nil) => full(g, nil),
        Or | Xor if is(g, 1, nil) => Some(x[0]),
        Or | Xor if is(g, 0, nil) => Some(x[1]),
        Or if is(g, 0, ones) || is(g, 1, ones) => full(g, ones),
        Shl | Shr if is(g, 1, nil) => Some(x[0]),
        // Not for floats: NaN is not equal to itself.
        Eq | Le | Ge if same && !g.dtype(x[0]).is_float() => full(g, one),
        Ne | Lt | Gt if same && !g.dtype(x[0]).is_float() => full(g, nil),
        Select if x[1] == x[2] => Some(x[1]),
        Select => match uniform(g, x[0]) {
            Some(c) => Some(if c.as_bool() { x[1] } else { x[2] }),
            None => {
                let c = arg_of(g, 0, &[Not])?;
                g.select(c, x[2], x[1]).ok()
            }
        },
        _ => None,
    }
}
