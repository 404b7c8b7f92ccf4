//! Products of 8-bit floats for devices that multiply them as they are: NVIDIA's tensor cores from sm_89 on, AMD's from gfx940 on.
//!
//! In a graph such a product is one of numbers that were widened, `matmul(cast(a), cast(b))`, maybe with scales: the form of a quantised
//! model (ONNX's `DequantizeLinear`) and of `torch._scaled_mm`. It becomes the composite [`F8_MATMUL`] of the bytes, which
//! [`super::narrow`] would else take apart; widening is exact, so the products are the same. A scale that is one number is the composite's
//! own operand, and one for each row or column multiplies the result: `Σ (s a) (t b) = s t Σ a b`, rounded elsewhere. A cast of the sums to a
//! half type, if nothing else reads them, becomes the composite's result type.
//!
//! A composite that the device does not claim is not made. How exact sums must be is the device's to look at: those of 8-bit floats have
//! fewer digits than f32 on some.

use super::narrow::decode;
use super::rebuild::{Rebuild, prune};
use crate::composite::{Attr, Composite};
use crate::data::ConstData;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::graph::{Graph, NodeId};
use crate::op::Op;
use crate::scalar_op::ScalarOp;
use crate::shape::{Dim, Shape, TensorType};
use smallvec::SmallVec;
use std::collections::HashMap;
use std::sync::Arc;

/// `scale · a bᵀ` with `a` `[batch…, m, k]` and `b` `[batch…, n, k]` as bytes, whose types are the attributes `left` and `right`, a scale
/// `[1]` in f32 or none, and a result `[batch…, m, n]` in f32, f16 or bf16. Both operands run along the sum, as the units read them.
pub const F8_MATMUL: &str = "f8_matmul";

/// Nodes that an operand is followed through.
const MOST: usize = 16;
/// Constants up to this many elements are looked at whole.
const LOOKED_AT: usize = 1 << 16;

/// The element types of [`F8_MATMUL`]'s operands.
pub fn formats(c: &Composite) -> Option<[DType; 2]> {
    (&*c.name == F8_MATMUL).then(|| Some([c.dtype("left")?, c.dtype("right")?]))?
}

fn is_f8(d: DType) -> bool {
    matches!(d, DType::F8E4M3FN | DType::F8E4M3FNUZ | DType::F8E5M2 | DType::F8E5M2FNUZ)
}

/// An operand of a product, as its 8-bit floats and what was done to them.
#[derive(Clone, Debug)]
struct Factor {
    codes: NodeId,
    /// Views behind the codes, the last one first.
    views: SmallVec<[NodeId; 4]>,
    /// Numbers that multiply all of it: nodes of one element.
    scales: SmallVec<[NodeId; 2]>,
    /// What multiplies rows: a node of the whole shape, and how many of the views come behind it.
    rows: Option<(NodeId, usize)>,
}

struct Finder<'a> {
    g: &'a Graph,
}

impl Finder<'_> {
    fn input(&self, id: NodeId) -> Option<NodeId> {
        self.g.node(id).inputs.first().copied()
    }

    /// The node of one element that this one repeats.
    fn uniform(&self, mut id: NodeId) -> Option<NodeId> {
        for _ in 0..MOST {
            if self.g.shape(id).numel().is(1) {
                return Some(id);
            }
            match self.g.node(id).op {
                Op::Expand | Op::Reshape | Op::Permute(_) => id = self.input(id)?,
                _ => return None,
            }
        }
        None
    }

    /// Whether all elements along an axis are one.
    fn constant_along(&self, mut id: NodeId, mut axis: usize) -> bool {
        for _ in 0..MOST {
            let n = self.g.node(id);
            if n.ty.shape.get(axis).is_some_and(|d| d.is(1)) {
                return true;
            }
            let Some(x) = self.input(id) else { return matches!(n.op, Op::Full(_)) };
            match &n.op {
                Op::Permute(p) => axis = p[axis],
                Op::Expand => match axis.checked_sub(n.ty.shape.rank() - self.g.shape(x).rank()) {
                    Some(a) => axis = a,
                    None => return true,
                },
                Op::Cast => {}
                _ => return false,
            }
            id = x;
        }
        false
    }

    fn zero(&self, mut id: NodeId) -> bool {
        for _ in 0..MOST {
            let n = self.g.node(id);
            match &n.op {
                Op::Full(v) => return v.as_f64() == 0.0,
                Op::Const(c) => return c.numel() <= LOOKED_AT && c.scalars().all(|v| v.as_f64() == 0.0),
                Op::Cast | Op::Expand | Op::Reshape | Op::Permute(_) => match n.inputs.first() {
                    Some(x) => id = *x,
                    None => return false,
                },
                _ => return false,
            }
        }
        false
    }

    /// What `id` is made of, if that is 8-bit floats; `axis` is the one that is summed over, where it is still known.
    fn factor(&self, id: NodeId, axis: Option<usize>, mut f: Factor, depth: usize) -> Option<Factor> {
        let n = self.g.node(id);
        if is_f8(n.ty.dtype) {
            return Some(Factor { codes: id, ..f });
        }
        let x = n.inputs.first().copied().filter(|_| depth < MOST)?;
        match &n.op {
            // The three hold every 8-bit float.
            Op::Cast if matches!(n.ty.dtype, DType::F32 | DType::F16 | DType::BF16) => {
                is_f8(self.g.dtype(x)).then_some(Factor { codes: x, ..f })
            }
            Op::Permute(_) | Op::Expand | Op::Reshape | Op::Slice(_) => {
                let axis = match &n.op {
                    Op::Permute(p) => axis.map(|a| p[a]),
                    Op::Expand => {
                        axis.and_then(|a| a.checked_sub(n.ty.shape.rank() - self.g.shape(x).rank()))
                    }
                    Op::Slice(_) => axis,
                    _ => None,
                };
                f.views.push(id);
                self.factor(x, axis, f, depth + 1)
            }
            // ONNX's zero point.
            Op::Scalar(ScalarOp::Sub) if self.zero(n.inputs[1]) => self.factor(x, axis, f, depth + 1),
            // Halves would have rounded here.
            Op::Scalar(ScalarOp::Mul) if n.ty.dtype == DType::F32 => {
                let y = n.inputs[1];
                [(x, y), (y, x)].into_iter().find_map(|(x, s)| {
                    let mut f = f.clone();
                    match (self.uniform(s), axis) {
                        (Some(one), _) => f.scales.push(one),
                        (None, Some(a)) if f.rows.is_none() && self.constant_along(s, a) => {
                            f.rows = Some((s, f.views.len()));
                        }
                        _ => return None,
                    }
                    self.factor(x, axis, f, depth + 1)
                })
            }
            _ => None,
        }
    }

    /// The factors of a product of 8-bit floats.
    fn product(&self, id: NodeId) -> Option<[Factor; 2]> {
        let n = self.g.node(id);
        let (Op::Matmul, [a, b]) = (&n.op, &n.inputs[..]) else { return None };
        let known = matches!(n.ty.dtype, DType::F32 | DType::F16 | DType::BF16) || is_f8(n.ty.dtype);
        let rank = n.ty.shape.rank();
        let none = |codes| Factor { codes, views: SmallVec::new(), scales: SmallVec::new(), rows: None };
        let of = |x: NodeId, axis| self.factor(x, Some(axis), none(x), 0);
        known.then(|| Some([of(*a, rank - 1)?, of(*b, rank - 2)?]))?
    }
}

/// A constant of two axes with the axes exchanged.
fn turned(c: &ConstData) -> Result<ConstData> {
    let (rows, cols) = (c.dims[0], c.dims[1]);
    let (from, mut to) = (c.bytes(), vec![0u8; rows * cols]);
    // By tiles, so that both sides stay in the cache.
    const TILE: usize = 64;
    for r0 in (0..rows).step_by(TILE) {
        for c0 in (0..cols).step_by(TILE) {
            for c in c0..cols.min(c0 + TILE) {
                for r in r0..rows.min(r0 + TILE) {
                    to[c * rows + r] = from[r * cols + c];
                }
            }
        }
    }
    ConstData::new(DType::U8, &[cols, rows], Arc::new(to))
}

/// Applies views of the old graph, the last of `views` first.
fn through(r: &mut Rebuild<'_>, old: &Graph, mut x: NodeId, views: &[NodeId]) -> Result<NodeId> {
    for v in views.iter().rev() {
        let n = old.node(*v);
        let ty = TensorType { dtype: r.new.dtype(x), shape: n.ty.shape.clone() };
        x = r.new.push(n.op.clone(), &[x], Some(ty))?;
    }
    Ok(x)
}

/// The bytes of an operand, those of the right one with the summed axis last.
fn bytes(r: &mut Rebuild<'_>, old: &Graph, f: &Factor, right: bool) -> Result<NodeId> {
    let expanded = f.views.iter().all(|v| old.node(*v).op == Op::Expand);
    if let (Op::Const(c), true) = (&old.node(f.codes).op, right && expanded)
        && c.dims.len() == 2
    {
        // Once, here, and not in every run.
        let c = turned(c)?;
        let x = r.new.constant(c);
        return match f.views.first() {
            None => Ok(x),
            Some(v) => {
                let mut s: Vec<Dim> = old.shape(*v).to_vec();
                let last = s.len() - 1;
                s.swap(last - 1, last);
                r.new.expand(x, &Shape::from(&s[..]))
            }
        };
    }
    let x = r.get(f.codes)?;
    let x = r.new.bitcast(x, DType::U8)?;
    let x = through(r, old, x, &f.views)?;
    let last = r.new.shape(x).rank() - 1;
    if right { r.new.transpose(x, last - 1, last) } else { Ok(x) }
}

/// The composite on bytes.
fn composite(
    g: &mut Graph,
    [left, right]: [DType; 2],
    a: NodeId,
    b: NodeId,
    scale: Option<NodeId>,
    result: DType,
) -> Result<NodeId> {
    let attrs = [("left".into(), Attr::DType(left)), ("right".into(), Attr::DType(right))].into();
    let x: Vec<NodeId> = [a, b].into_iter().chain(scale).collect();
    g.composite(F8_MATMUL, attrs, &x, |g, x| {
        let (a, b) = (decode(g, x[0], left)?, decode(g, x[1], right)?);
        let last = g.shape(b).rank() - 1;
        let b = g.transpose(b, last - 1, last)?;
        let mut y = g.matmul(a, b)?;
        if let Some(s) = x.get(2) {
            y = g.mul(y, *s)?;
        }
        g.cast(y, result)
    })
}

/// A product, and the type of its result.
struct Found {
    factors: [Factor; 2],
    result: DType,
}

/// The composite of operands of these types and shapes: `[batch…, m, k]`, `[batch…, n, k]`.
///
/// # Errors
/// Shapes that do not go together, and types that are no 8-bit floats.
pub fn operation(
    types: [DType; 2],
    shapes: [Shape; 2],
    scaled: bool,
    result: DType,
) -> Result<Arc<Composite>> {
    let mut g = Graph::new();
    let mut input = |d: DType, shape: Shape| g.input("x", TensorType { dtype: d, shape });
    let [a, b] = shapes.map(|s| input(DType::U8, s));
    let scale = scaled.then(|| input(DType::F32, Shape::from([1usize])));
    let y = composite(&mut g, types, a, b, scale, result)?;
    match &g.node(y).op {
        Op::Composite(c) => Ok(c.clone()),
        _ => Err(Error::internal("a composite is another op")),
    }
}

impl Found {
    /// Asks the device before anything is made.
    fn claimed(&self, old: &Graph, id: NodeId, claims: &dyn Fn(&Composite) -> bool) -> Result<bool> {
        let [a, mut b] = [0, 1].map(|k| old.shape(old.node(id).inputs[k]).clone());
        let last = b.rank() - 1;
        b.0.swap(last - 1, last);
        let scaled = self.factors.iter().any(|f| !f.scales.is_empty());
        let types = [0, 1].map(|k: usize| old.dtype(self.factors[k].codes));
        Ok(claims(&*operation(types, [a, b], scaled, self.result)?))
    }
}

/// What takes the place of a product.
fn make(r: &mut Rebuild<'_>, old: &Graph, found: &Found) -> Result<NodeId> {
    let [fa, fb] = &found.factors;
    let (a, b) = (bytes(r, old, fa, false)?, bytes(r, old, fb, true)?);
    let mut scale = None;
    for s in fa.scales.iter().chain(&fb.scales) {
        let s = r.get(*s)?;
        let s = r.new.reshape(s, [1usize])?;
        scale = Some(match scale {
            None => s,
            Some(t) => r.new.mul(t, s)?,
        });
    }
    let types = [fa, fb].map(|f| old.dtype(f.codes));
    let mut y = composite(&mut r.new, types, a, b, scale, found.result)?;
    let last = r.new.shape(y).rank() - 1;
    for (f, summed) in [(fa, last), (fb, last - 1)] {
        let Some((s, behind)) = f.rows else { continue };
        let s = r.get(s)?;
        let s = through(r, old, s, &f.views[..behind])?;
        // Equal along the sum: one of them for each row or column of the result.
        let s = r.new.narrow(s, summed, 0, 1)?;
        y = r.new.mul(y, s)?;
    }
    Ok(y)
}

/// Makes products of 8-bit floats what `claims` takes whole. Shapes must be known. Returns the graph and how many there were.
pub fn run(g: &Graph, claims: &dyn Fn(&Composite) -> bool) -> Result<(Graph, usize)> {
    let live = Rebuild::live(g);
    let finder = Finder { g };
    // By the node that is replaced: the product, or the cast behind it.
    let mut found: HashMap<NodeId, Found> = HashMap::new();
    let mut readers: HashMap<NodeId, SmallVec<[Option<NodeId>; 2]>> = HashMap::new();
    for id in g.ids().filter(|i| live[i.index()]) {
        g.node(id).inputs.iter().for_each(|x| readers.entry(*x).or_default().push(Some(id)));
    }
    g.outputs().iter().for_each(|o| readers.entry(o.node).or_default().push(None));
    for id in g.ids().filter(|i| live[i.index()]) {
        let Some(factors) = finder.product(id) else { continue };
        let mut keep = |at: NodeId, f: Found| -> Result<bool> {
            let claimed = f.claimed(g, id, claims)?;
            if claimed {
                found.insert(at, f);
            }
            Ok(claimed)
        };
        let d = g.dtype(id);
        let result = if matches!(d, DType::F16 | DType::BF16) { d } else { DType::F32 };
        let cast = match readers.get(&id).map(|r| &r[..]) {
            Some([Some(reader)]) if d == DType::F32 && factors.iter().all(|f| f.rows.is_none()) => {
                Some(*reader)
                    .filter(|c| g.node(*c).op == Op::Cast && matches!(g.dtype(*c), DType::F16 | DType::BF16))
            }
            _ => None,
        };
        if let Some(c) = cast
            && keep(c, Found { factors: factors.clone(), result: g.dtype(c) })?
        {
            continue;
        }
        keep(id, Found { factors, result })?;
    }
    if found.is_empty() {
        return Ok((g.clone(), 0));
    }
    let (mut r, mut made) = (Rebuild::new(g), 0);
    for id in g.ids().filter(|i| live[i.index()]) {
        if let Some(f) = found.get(&id) {
            r.new.span = g.node(id).span.clone();
            let mut y = make(&mut r, g, f)?;
            if is_f8(g.dtype(id)) {
                y = r.new.cast(y, g.dtype(id))?;
            }
            r.set(id, y);
            made += 1;
        } else {
            r.copy(id)?;
        }
    }
    Ok((prune(&r.finish()?.0)?, made))
}

#[cfg(test)]
#[path = "f8_tests.rs"]
mod tests;
