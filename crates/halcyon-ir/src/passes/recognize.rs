//! Recognises functions written out as primitive ops, as exporters to ONNX write them, and replaces them by
//! composites or scalar ops: attention, layer and RMS norm, and the activations GELU (exact and tanh) and
//! SiLU. Results differ only by rounding: the function is the same, evaluated in a different order.
//!
//! Only f32 patterns are recognised, because half types would round at other places. Nodes inside a pattern
//! must have no reader outside it, otherwise they would be computed twice. A composite that the target does
//! not claim is not created.

use super::rebuild::{Rebuild, prune};
use crate::composite::{Composite, CompositeKind};
use crate::dtype::DType;
use crate::error::Result;
use crate::graph::{Graph, NodeId};
use crate::ops::element_wise::ScalarOp;
use crate::ops::{Op, ReduceKind};
use crate::shape::Shape;
use smallvec::SmallVec;
use std::collections::{HashMap, HashSet};
use std::f64::consts::{FRAC_1_SQRT_2, FRAC_2_PI};

/// The op or composite that a pattern computes. Operands are nodes of the old graph.
#[derive(Debug)]
enum Match {
    /// `softmax(q kt scale + mask) v`.
    Attention {
        q: NodeId,
        kt: NodeId,
        v: NodeId,
        mask: Option<NodeId>,
        scale: f64,
    },
    Norm {
        x: NodeId,
        centred: bool,
        axis: usize,
        eps: f64,
        scale: NodeId,
        bias: Option<NodeId>,
    },
    Scalar(ScalarOp, NodeId),
}

/// Maximum number of multiplications through which a product is traced.
const MAX_FACTORS: usize = 8;
/// Maximum number of nodes through which [`shrink`] traces a mask.
const MASK_DEPTH: usize = 8;

struct Finder<'a> {
    g: &'a Graph,
    /// Readers of each node. `None` stands for a graph output, which is outside every pattern.
    users: Vec<SmallVec<[Option<NodeId>; 2]>>,
}

/// The nodes of a pattern, without its operands.
type PatternNodes = SmallVec<[NodeId; 24]>;

fn near(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-5 * b.abs()
}

impl<'a> Finder<'a> {
    fn new(g: &'a Graph, live: &[bool]) -> Finder<'a> {
        let mut users = vec![SmallVec::new(); g.nodes().len()];
        for id in g.ids().filter(|i| live[i.index()]) {
            for x in &g.node(id).inputs {
                users[x.index()].push(Some(id));
            }
        }
        for o in g.outputs() {
            users[o.node.index()].push(None);
        }
        Finder { g, users }
    }

    /// The number that all elements of a node equal, traced through views.
    fn number(&self, mut id: NodeId) -> Option<f64> {
        for _ in 0..MAX_FACTORS {
            let n = self.g.node(id);
            match &n.op {
                Op::Full(v) => return Some(v.as_f64()),
                Op::Const(c) if c.numel() == 1 => return c.get(0).map(|v| v.as_f64()),
                Op::Reshape | Op::Permute(_) | Op::Expand | Op::Slice(_) => id = *n.inputs.first()?,
                _ => return None,
            }
        }
        None
    }

    /// The operand of an expansion; for any other node, the node itself.
    fn peel(&self, id: NodeId, inside: &mut PatternNodes) -> NodeId {
        match (&self.g.node(id).op, self.g.node(id).inputs.first()) {
            (Op::Expand, Some(x)) => {
                inside.push(id);
                *x
            }
            _ => id,
        }
    }

    fn unary(&self, id: NodeId, op: ScalarOp) -> Option<NodeId> {
        let n = self.g.node(id);
        (n.op == Op::Scalar(op)).then(|| n.inputs.first().copied()).flatten()
    }

    fn binary(&self, id: NodeId, op: ScalarOp) -> Option<(NodeId, NodeId)> {
        let n = self.g.node(id);
        match (&n.op, &n.inputs[..]) {
            (Op::Scalar(o), [a, b]) if *o == op => Some((*a, *b)),
            _ => None,
        }
    }

    /// The operands of a commutative op, in both orders.
    fn commuted_operands(&self, id: NodeId, op: ScalarOp) -> SmallVec<[(NodeId, NodeId); 2]> {
        self.binary(id, op).map_or_else(SmallVec::new, |(a, b)| SmallVec::from_slice(&[(a, b), (b, a)]))
    }

    /// Decomposes `x c` into `x` and a number `c`, and `x / c` into `x` and `1 / c`.
    fn times(&self, id: NodeId) -> Option<(NodeId, f64)> {
        if let Some((a, b)) = self.binary(id, ScalarOp::Div) {
            return self.number(b).map(|c| (a, 1.0 / c));
        }
        self.commuted_operands(id, ScalarOp::Mul)
            .into_iter()
            .find_map(|(a, b)| self.number(b).map(|c| (a, c)))
    }

    /// Decomposes `x + c` into `x` and a number `c`.
    fn plus(&self, id: NodeId) -> Option<(NodeId, f64)> {
        self.commuted_operands(id, ScalarOp::Add)
            .into_iter()
            .find_map(|(a, b)| self.number(b).map(|c| (a, c)))
    }

    /// Decomposes a product into a number and its other factors. Factors with another reader are not
    /// decomposed.
    fn factors(&self, id: NodeId, inside: &mut PatternNodes) -> (f64, SmallVec<[NodeId; 4]>) {
        let (mut number, mut rest, mut todo) = (1.0, SmallVec::new(), vec![id]);
        let mut left = MAX_FACTORS;
        while let Some(x) = todo.pop() {
            let open = left > 0 && (x == id || self.users[x.index()].len() == 1);
            match (self.number(x), self.times(x), self.binary(x, ScalarOp::Mul)) {
                (Some(c), _, _) => number *= c,
                (_, Some((y, c)), _) if open => {
                    number *= c;
                    todo.push(y);
                    inside.push(x);
                    left -= 1;
                }
                (_, _, Some((a, b))) if open => {
                    todo.extend([a, b]);
                    inside.push(x);
                    left -= 1;
                }
                _ => rest.push(x),
            }
        }
        (number, rest)
    }

    /// The pattern whose last node is `id`, and the nodes inside it.
    fn find(&self, id: NodeId, composites: bool) -> Option<(Match, PatternNodes)> {
        let n = self.g.node(id);
        if n.ty.dtype != DType::F32 {
            return None;
        }
        let all: [fn(&Self, NodeId, &mut PatternNodes) -> Option<Match>; 3] =
            [Self::attention, Self::norm, Self::activation];
        let tried = match &n.op {
            Op::Matmul if composites => &all[..1],
            Op::Scalar(ScalarOp::Add) if composites => &all[1..2],
            Op::Scalar(ScalarOp::Mul) if composites => &all[1..],
            Op::Scalar(ScalarOp::Mul | ScalarOp::Div) => &all[2..],
            _ => return None,
        };
        tried.iter().find_map(|f| {
            let mut inside = PatternNodes::new();
            let found = f(self, id, &mut inside)?;
            inside.push(id);
            let own: HashSet<NodeId> = inside.iter().copied().collect();
            let closed = own
                .iter()
                .filter(|i| **i != id)
                .all(|i| self.users[i.index()].iter().all(|u| u.is_some_and(|u| own.contains(&u))));
            closed.then_some((found, inside))
        })
    }

    /// Matches `q kt` times a number.
    fn scores(&self, mut id: NodeId, inside: &mut PatternNodes) -> Option<(NodeId, NodeId, f64)> {
        let mut scale = 1.0;
        for _ in 0..MAX_FACTORS {
            inside.push(id);
            if let (Op::Matmul, [q, k]) = (&self.g.node(id).op, &self.g.node(id).inputs[..]) {
                return Some((*q, *k, scale));
            }
            let (x, c) = self.times(id)?;
            (id, scale) = (x, scale * c);
        }
        None
    }

    fn attention(&self, id: NodeId, inside: &mut PatternNodes) -> Option<Match> {
        let [p, v] = self.g.node(id).inputs[..] else { return None };
        let soft = self.g.node(p);
        let Op::Composite(c) = &soft.op else { return None };
        let rank = soft.ty.shape.rank();
        if c.kind != CompositeKind::Softmax
            || c.int("axis") != Some(rank as i64 - 1)
            || !(2..=4).contains(&rank)
        {
            return None;
        }
        inside.push(p);
        let s = *soft.inputs.first()?;
        let start = inside.len();
        let mut masked = |x: NodeId, mask: Option<NodeId>| {
            inside.truncate(start);
            inside.extend(mask.map(|_| s));
            self.scores(x, inside).map(|(q, kt, scale)| (q, kt, scale, mask))
        };
        let (mut q, mut kt, mut scale, mask) = masked(s, None).or_else(|| {
            self.commuted_operands(s, ScalarOp::Add).into_iter().find_map(|(x, mask)| masked(x, Some(mask)))
        })?;
        // The scale may also have been applied to the factors `q` and `kt`. Nothing else may read such a
        // factor.
        for x in [&mut q, &mut kt] {
            if let Some((y, c)) = self.times(*x)
                && self.users[x.index()].len() == 1
            {
                inside.push(*x);
                (*x, scale) = (y, scale * c);
            }
        }
        scale.is_finite().then_some(Match::Attention { q, kt, v, mask, scale })
    }

    /// Matches a mean. Returns its operand and the first of the trailing axes it is taken over.
    fn mean(&self, id: NodeId, inside: &mut PatternNodes) -> Option<(NodeId, usize)> {
        let (s, c) = self.times(id)?;
        let n = self.g.node(s);
        let (Op::Reduce { kind: ReduceKind::Sum, axes, keep: true }, [x]) = (&n.op, &n.inputs[..]) else {
            return None;
        };
        let dims = self.g.shape(*x).known()?;
        let first = *axes.first()?;
        let trailing = axes.iter().copied().eq(first..dims.len());
        let count: usize = dims[first..].iter().product();
        inside.extend([id, s]);
        (trailing && near(c, 1.0 / count as f64)).then_some((*x, first))
    }

    /// Matches `d / sqrt(mean(d²) + epsilon)`. Returns `d`, the first normalised axis and epsilon.
    fn normalised(&self, id: NodeId, inside: &mut PatternNodes) -> Option<(NodeId, usize, f64)> {
        inside.push(id);
        let root = |x: NodeId, inside: &mut PatternNodes| {
            let y = self.unary(x, ScalarOp::Sqrt);
            inside.extend(y.map(|_| x));
            y
        };
        // Matches 1 / root, which is then a factor.
        let over = |x: NodeId, inside: &mut PatternNodes| {
            let y = match (self.unary(x, ScalarOp::Recip), self.binary(x, ScalarOp::Div)) {
                (Some(y), _) => root(self.peel(y, inside), inside),
                (_, Some((one, y))) if self.number(one) == Some(1.0) => root(self.peel(y, inside), inside),
                _ => self.unary(x, ScalarOp::Rsqrt),
            };
            inside.extend(y.map(|_| x));
            y
        };
        let start = inside.len();
        let divided = self.binary(id, ScalarOp::Div).and_then(|(d, y)| {
            let y = self.peel(y, inside);
            root(y, inside).map(|v| (d, v))
        });
        let (d, v) = divided.or_else(|| {
            self.commuted_operands(id, ScalarOp::Mul).into_iter().find_map(|(d, y)| {
                inside.truncate(start);
                let y = self.peel(y, inside);
                over(y, inside).map(|v| (d, v))
            })
        })?;
        inside.push(v);
        let (v, eps) = self.plus(v)?;
        let (square, axis) = self.mean(v, inside)?;
        inside.push(square);
        let same = match (self.binary(square, ScalarOp::Mul), self.binary(square, ScalarOp::Pow)) {
            (Some((a, b)), _) => a == d && b == d,
            (_, Some((a, two))) => a == d && self.number(two) == Some(2.0),
            _ => false,
        };
        same.then_some((d, axis, eps))
    }

    /// The operand that has the shape of one row of `like` (its axes from `axis` on) and is broadcast over
    /// the rest.
    fn row(&self, id: NodeId, like: NodeId, axis: usize, inside: &mut PatternNodes) -> Option<NodeId> {
        let x = self.peel(id, inside);
        let (row, have) = (self.g.shape(like).known()?, self.g.shape(x).known()?);
        let row = &row[axis..];
        let lead = have.len().checked_sub(row.len())?;
        (have[lead..] == *row && have[..lead].iter().all(|n| *n == 1)).then_some(x)
    }

    fn norm(&self, id: NodeId, inside: &mut PatternNodes) -> Option<Match> {
        let scaled = |id: NodeId, inside: &mut PatternNodes| {
            self.commuted_operands(id, ScalarOp::Mul).into_iter().find_map(|(n, s)| {
                let start = inside.len();
                inside.push(id);
                let found = self
                    .normalised(n, inside)
                    .and_then(|(d, axis, eps)| self.row(s, d, axis, inside).map(|s| (d, axis, eps, s)));
                if found.is_none() {
                    inside.truncate(start);
                }
                found
            })
        };
        let biased = self.commuted_operands(id, ScalarOp::Add).into_iter().find_map(|(y, b)| {
            inside.clear();
            let (d, axis, eps, s) = scaled(y, inside)?;
            let b = self.row(b, d, axis, inside)?;
            Some((d, axis, eps, s, Some(b)))
        });
        let (d, axis, eps, scale, bias) = match biased {
            Some(found) => found,
            None => {
                inside.clear();
                let (d, axis, eps, s) = scaled(id, inside)?;
                (d, axis, eps, s, None)
            }
        };
        let centre = self.binary(d, ScalarOp::Sub).and_then(|(x, m)| {
            let mut nodes = PatternNodes::from_slice(&[d]);
            let m = self.peel(m, &mut nodes);
            let (y, first) = self.mean(m, &mut nodes)?;
            (y == x && first == axis).then_some((x, nodes))
        });
        match centre {
            Some((x, nodes)) => {
                inside.extend(nodes);
                Some(Match::Norm { x, centred: true, axis, eps, scale, bias })
            }
            // RMS norm is over the last axis only and has no bias.
            None if bias.is_none() && axis + 1 == self.g.shape(d).rank() => {
                Some(Match::Norm { x: d, centred: false, axis, eps, scale, bias })
            }
            None => None,
        }
    }

    fn activation(&self, id: NodeId, inside: &mut PatternNodes) -> Option<Match> {
        let (c, rest) = self.factors(id, inside);
        let [a, b] = rest[..] else { return None };
        [(a, b), (b, a)].into_iter().find_map(|(x, y)| {
            let mut own = PatternNodes::from_slice(&[y]);
            let op = if self.unary(y, ScalarOp::Sigmoid) == Some(x) && c == 1.0 {
                ScalarOp::Silu
            } else {
                let (f, one) = self.plus(y)?;
                own.push(f);
                let wanted = match (self.unary(f, ScalarOp::Erf), self.unary(f, ScalarOp::Tanh)) {
                    (Some(u), _) => {
                        let (k, rest) = self.factors(u, &mut own);
                        (near(k, FRAC_1_SQRT_2) && rest[..] == [x]).then_some(ScalarOp::Gelu)
                    }
                    (_, Some(u)) => self.cubic(u, x, &mut own).then_some(ScalarOp::GeluTanh),
                    _ => None,
                };
                wanted.filter(|_| one == 1.0 && c == 0.5)?
            };
            inside.extend(own);
            Some(Match::Scalar(op, x))
        })
    }

    /// Whether `u` is `sqrt(2 / π) (x + 0.044715 x³)`.
    fn cubic(&self, u: NodeId, x: NodeId, inside: &mut PatternNodes) -> bool {
        let (k, rest) = self.factors(u, inside);
        let [sum] = rest[..] else { return false };
        inside.push(sum);
        let term = self.commuted_operands(sum, ScalarOp::Add).into_iter().find(|(a, _)| *a == x);
        let Some((_, term)) = term.filter(|_| near(k, FRAC_2_PI.sqrt())) else { return false };
        let (c, rest) = self.factors(term, inside);
        let cube = match rest[..] {
            [p] => {
                inside.push(p);
                self.binary(p, ScalarOp::Pow).is_some_and(|(a, n)| a == x && self.number(n) == Some(3.0))
            }
            [a, b, c] => a == x && b == x && c == x,
            _ => false,
        };
        cube && near(c, 0.044715)
    }
}

/// Removes the expansions from a mask in the new graph `g`: functions of an expanded value are computed on
/// the value before it is expanded.
fn shrink(g: &mut Graph, id: NodeId, depth: usize) -> Result<NodeId> {
    let n = g.node(id).clone();
    let rank = n.ty.shape.rank();
    Ok(match &n.op {
        Op::Expand => {
            let mut dims = g.shape(n.inputs[0]).clone();
            while dims.rank() < rank {
                dims.0.insert(0, 1.into());
            }
            let small = g.reshape(n.inputs[0], dims)?;
            shrink(g, small, depth.saturating_sub(1))?
        }
        Op::Full(v) => g.full(n.ty.dtype, Shape::from(vec![1; rank]), *v),
        Op::Scalar(_) | Op::Cast if depth > 0 => {
            let small: Vec<NodeId> =
                n.inputs.iter().map(|x| shrink(g, *x, depth - 1)).collect::<Result<_>>()?;
            let mut dims = vec![1; rank];
            for x in &small {
                let Some(have) = g.shape(*x).known() else { return Ok(id) };
                dims.iter_mut().zip(&have).for_each(|(d, n)| *d = (*d).max(*n));
            }
            let whole = n.ty.shape.known();
            if whole.is_none_or(|w| w.iter().product::<usize>() <= dims.iter().product()) {
                return Ok(id);
            }
            let dims = Shape::from(dims);
            let x: Vec<NodeId> = small.iter().map(|x| g.expand(*x, &dims)).collect::<Result<_>>()?;
            match &n.op {
                Op::Scalar(op) => g.scalar(*op, &x)?,
                _ => g.cast(x[0], n.ty.dtype)?,
            }
        }
        _ => id,
    })
}

/// Reshapes `[s, d]` to `[1, 1, s, d]`, and `[b, s, d]` to `[b, 1, s, d]`.
fn with_heads(g: &mut Graph, mut x: NodeId) -> Result<NodeId> {
    while g.shape(x).rank() < 4 {
        let axis = usize::from(g.shape(x).rank() == 3);
        x = g.unsqueeze(x, axis)?;
    }
    Ok(x)
}

/// Builds the replacement in the new graph.
fn make(
    r: &mut Rebuild<'_>,
    found: &Match,
    masks: &mut HashMap<NodeId, NodeId>,
    id: NodeId,
) -> Result<NodeId> {
    match found {
        Match::Attention { q, kt, v, mask, scale } => {
            let (q, kt, v) = (r.get(*q)?, r.get(*kt)?, r.get(*v)?);
            let mask = match mask {
                Some(m) => Some(match masks.get(m) {
                    Some(done) => *done,
                    None => {
                        let old = r.get(*m)?;
                        let small = shrink(&mut r.new, old, MASK_DEPTH)?;
                        let small = with_heads(&mut r.new, small)?;
                        masks.insert(*m, small);
                        small
                    }
                }),
                None => None,
            };
            let g = &mut r.new;
            let last = g.shape(kt).rank() - 1;
            let k = g.transpose(kt, last - 1, last)?;
            let (q, k, v) = (with_heads(g, q)?, with_heads(g, k)?, with_heads(g, v)?);
            let y = g.attention(q, k, v, mask, false, *scale)?;
            let shape = r.old_shape(id);
            r.new.reshape(y, shape)
        }
        Match::Norm { x, centred, axis, eps, scale, bias } => {
            let (x, scale) = (r.get(*x)?, r.get(*scale)?);
            let bias = bias.map(|b| r.get(b)).transpose()?;
            match centred {
                true => r.new.layer_norm(x, scale, bias, *axis, *eps),
                false => r.new.rms_norm(x, scale, *eps),
            }
        }
        Match::Scalar(op, x) => {
            let x = r.get(*x)?;
            r.new.scalar(*op, &[x])
        }
    }
}

/// Replaces the patterns in the graph. `claims` returns whether the target runs a composite whole; without
/// it, only activations are recognised. Returns the graph and the number of replacements.
pub fn run(g: &Graph, claims: Option<&dyn Fn(&Composite) -> bool>) -> Result<(Graph, usize)> {
    let live = Rebuild::live(g);
    let finder = Finder::new(g, &live);
    let (mut found, mut taken) = (HashMap::new(), HashSet::new());
    // Visit readers before the nodes that they read, so that the longest pattern is found.
    for id in g.ids().rev().filter(|i| live[i.index()]) {
        if !taken.contains(&id)
            && let Some((f, inside)) = finder.find(id, claims.is_some())
        {
            taken.extend(inside);
            found.insert(id, f);
        }
    }
    if found.is_empty() {
        return Ok((g.clone(), 0));
    }
    let mut r = Rebuild::new(g);
    let (mut made, mut masks) = (0, HashMap::new());
    for id in g.ids().filter(|i| live[i.index()]) {
        if let Some(f) = found.get(&id) {
            r.new.span = g.node(id).span.clone();
            // If the builder rejects the replacement (for example for incompatible shapes), keep the original
            // nodes.
            if let Ok(y) = make(&mut r, f, &mut masks, id)
                && is_claimed(&r.new, y, claims)
                && r.new.ty(y) == g.ty(id)
            {
                r.set(id, y);
                made += 1;
                continue;
            }
        }
        r.copy(id)?;
    }
    Ok((prune(&r.finish()?.0)?, made))
}

/// Whether the target runs `y` whole, if `y` is a composite or a reshape of one. True for other ops.
fn is_claimed(g: &Graph, y: NodeId, claims: Option<&dyn Fn(&Composite) -> bool>) -> bool {
    let n = g.node(y);
    match &n.op {
        Op::Composite(c) => claims.is_some_and(|claims| claims(c)),
        Op::Reshape => n.inputs.first().is_some_and(|x| is_claimed(g, *x, claims)),
        _ => true,
    }
}

#[cfg(test)]
#[path = "recognize_tests.rs"]
mod tests;
