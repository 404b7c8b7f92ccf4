//! Byte products for devices that multiply bytes directly: 8-bit floats on NVIDIA's tensor cores from sm_89
//! on and AMD's from gfx940 on, 8-bit integers almost everywhere. Products of 16-bit integers are handled
//! too; below, "bytes" includes 16-bit integers.
//!
//! In a graph such a product has widened operands, `matmul(cast(a), cast(b))`, possibly with zero points and
//! scales. This is the form of a quantised model (ONNX's `DequantizeLinear`, `MatMulInteger`,
//! `QLinearMatMul`) and of `torch._scaled_mm`. The product becomes the composite
//! [`CompositeKind::ByteMatmul`]. The zero points `z` and `w` of the bytes `a` and `b` and their scales `s`
//! and `t` move after the sum, which has `k` terms:
//! `Σ s (a - z) t (b - w) = s t (Σ a b - z Σ b - w Σ a + k z w)`.
//!
//! - **8-bit floats.** Without this pass [`super::small_types`] would rewrite them to native types. Widening
//!   is exact, so the products are the same. A scale that is a single number is an operand of the composite.
//!   A cast of the sums to a half type becomes the composite's result type if nothing else reads the sums.
//! - **16-bit integers** are summed in i32 if the right operand is a constant and no sum can wrap. Usually
//!   the left operand is clamped for this purpose. They have no zero points.
//! - **8-bit integers** are summed in i32. An f32 sum is replaced only if the i32 sum cannot wrap. The i32
//!   sum is then exact, unlike the f32 sum. A sum of products over parts of the summed axis, which an
//!   importer creates so that each part is exact in f32, becomes one product again. If the device has only i8
//!   kernels, u8 values and their zero points are shifted by 128.
//!
//! Composites that the target does not claim are not created. The target also judges the accuracy of the
//! sums: on some devices sums of 8-bit floats have fewer digits than f32.

mod limits;

use super::derived::{Derived, derived_bytes};
use super::fold;
use super::rebuild::{Rebuild, prune};
use super::small_types::decode;
use crate::composite::{Attr, Composite, CompositeKind};
use crate::data::ConstData;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::graph::{Graph, NodeId};
use crate::ops::Op;
use crate::ops::element_wise::ScalarOp;
use crate::shape::{Dim, Shape, TensorType};
use smallvec::SmallVec;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// `a bᵀ` with `a` `[batch…, m, k]` and `b` `[batch…, n, k]`, both with the summed axis last, as matrix units
/// read them. The attributes `left` and `right` are the dtypes of the operands. Integers (each operand i8 or
/// u8, or both i16) give `[batch…, m, n]` in i32, which wraps. 8-bit floats (stored as u8) give f32, f16 or
/// bf16. Only 8-bit floats may have a third operand, a scale `[1]` in f32, which multiplies the sums.
const KIND: CompositeKind = CompositeKind::ByteMatmul;

/// Maximum number of nodes through which an operand is traced (`MAX_DEPTH`), and of products in a sum
/// (`PARTS`).
const MAX_DEPTH: usize = 16;
const PARTS: usize = 64;
/// Constants of up to this many elements are examined in full.
const MAX_EXAMINED: usize = 1 << 16;

/// The dtypes of [`CompositeKind::ByteMatmul`]'s operands.
pub fn formats(c: &Composite) -> Option<[DType; 2]> {
    (c.kind == KIND).then(|| Some([c.dtype("left")?, c.dtype("right")?]))?
}

pub(super) fn is_f8(d: DType) -> bool {
    matches!(d, DType::F8E4M3FN | DType::F8E4M3FNUZ | DType::F8E5M2 | DType::F8E5M2FNUZ)
}

pub(super) fn is_int8(d: DType) -> bool {
    matches!(d, DType::I8 | DType::U8)
}

/// Whether a dtype holds the integers of quantised values: i8, u8 or i16.
pub(super) fn is_code(d: DType) -> bool {
    is_int8(d) || d == DType::I16
}

/// Adds the composite on byte operands.
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
    g.composite(KIND, attrs, &x, |g, x| {
        let wide = |g: &mut Graph, x, d| if is_f8(d) { decode(g, x, d) } else { g.cast(x, DType::I32) };
        let (a, b) = (wide(g, x[0], left)?, wide(g, x[1], right)?);
        let last = g.shape(b).rank() - 1;
        let b = g.transpose(b, last - 1, last)?;
        let mut y = g.matmul(a, b)?;
        if let Some(s) = x.get(2) {
            y = g.mul(y, *s)?;
        }
        g.cast(y, result)
    })
}

/// The composite for operands of these dtypes and shapes: `[batch…, m, k]`, `[batch…, n, k]`.
///
/// # Errors
/// Incompatible shapes, and dtypes other than two 8-bit floats, two 8-bit integers or two i16.
pub fn operation(
    types: [DType; 2],
    shapes: [Shape; 2],
    scaled: bool,
    result: DType,
) -> Result<Arc<Composite>> {
    let known = [is_f8, is_int8, |d| d == DType::I16];
    if !known.iter().any(|is| types.iter().all(|d| is(*d))) {
        return Err(Error::argument(
            KIND.name(),
            format!(
                "expected two 8-bit floats, two 8-bit integers or two i16, found {} and {}",
                types[0], types[1]
            ),
        ));
    }
    let mut g = Graph::new();
    let mut input = |d: DType, shape: Shape| g.input("x", TensorType { dtype: d, shape });
    let mut at = 0;
    let [a, b] = shapes.map(|s| {
        at += 1;
        input(stored(types[at - 1]), s)
    });
    let scale = scaled.then(|| input(DType::F32, Shape::from([1usize])));
    let y = composite(&mut g, types, a, b, scale, result)?;
    match &g.node(y).op {
        Op::Composite(c) => Ok(c.clone()),
        _ => Err(Error::internal("a composite is another op")),
    }
}

/// Whether a factor's matrix is transposed and then only repeated along batch axes (true), or only repeated
/// (false). None for other views.
fn turned(g: &Graph, f: &Factor) -> Option<bool> {
    let turns = f.views.last().is_some_and(|v| matches!(&g.node(*v).op, Op::Permute(p) if p[..] == [1, 0]));
    let others = &f.views[..f.views.len() - usize::from(turns)];
    others.iter().all(|v| repeats_matrices(g, *v)).then_some(turns)
}

/// Whether a node repeats its input only along batch axes, so that its matrices equal those of its input.
fn repeats_matrices(g: &Graph, id: NodeId) -> bool {
    let (n, last) = (g.node(id), |s: &Shape| s.rank().checked_sub(2).map(|r| s[r..].to_vec()));
    n.op == Op::Expand && last(g.shape(n.inputs[0])).is_some_and(|own| last(&n.ty.shape) == Some(own))
}

/// The dtype in which bytes of dtype `d` are stored.
fn stored(d: DType) -> DType {
    if is_f8(d) { DType::U8 } else { d }
}

/// A value (scale or zero point) that is constant along the summed axis.
#[derive(Clone, Copy, Debug)]
struct Term {
    node: NodeId,
    /// Number of the factor's views that are applied after the term. `None`: the node has a single element.
    behind: Option<usize>,
}

/// An operand of a product: its bytes and the operations applied to them.
#[derive(Clone, Debug)]
struct Factor {
    codes: NodeId,
    /// Views between the bytes and the product, the last one first.
    views: SmallVec<[NodeId; 4]>,
    /// Scales in f32. Those in `scales` are single numbers; `rows` varies along the axis that is not summed.
    scales: SmallVec<[NodeId; 2]>,
    rows: Option<Term>,
    /// The zero point subtracted from the integers.
    zero: Option<Term>,
    /// Set once the traced value is known to be an integer. The rest of the trace, down to the bytes, then
    /// accepts only integers.
    whole: bool,
}

/// A product that was found: its operands in the old graph, their factors, and the result dtype and shifts of
/// the composite that replaces it.
struct ProductMatch {
    operands: [NodeId; 2],
    factors: [Factor; 2],
    /// Batch dimensions.
    batch: Shape,
    /// Result dtype of the composite.
    result: DType,
    /// Operands that are shifted from u8 to i8.
    shifted: [bool; 2],
}

pub(super) struct Finder<'a> {
    g: &'a Graph,
    /// Readers of each node. `None` in the list stands for a graph output.
    readers: HashMap<NodeId, SmallVec<[Option<NodeId>; 2]>>,
}

impl<'a> Finder<'a> {
    /// The graph that is searched.
    pub(super) fn graph(&self) -> &'a Graph {
        self.g
    }

    pub(super) fn new(g: &'a Graph, live: &[bool]) -> Finder<'a> {
        let mut readers: HashMap<NodeId, SmallVec<[Option<NodeId>; 2]>> = HashMap::new();
        for id in g.ids().filter(|i| live[i.index()]) {
            g.node(id).inputs.iter().for_each(|x| readers.entry(*x).or_default().push(Some(id)));
        }
        g.outputs().iter().for_each(|o| readers.entry(o.node).or_default().push(None));
        Finder { g, readers }
    }

    fn input(&self, id: NodeId) -> Option<NodeId> {
        self.g.node(id).inputs.first().copied()
    }

    /// The reader of a node that has exactly one.
    fn reader(&self, id: NodeId) -> Option<NodeId> {
        match self.readers.get(&id).map(|r| &r[..]) {
            Some([Some(r)]) => Some(*r),
            _ => None,
        }
    }

    /// The single-element node that this node repeats.
    pub(super) fn uniform(&self, mut id: NodeId) -> Option<NodeId> {
        for _ in 0..MAX_DEPTH {
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

    /// Whether all elements along an axis are known to be equal.
    pub(super) fn constant_along(&self, mut id: NodeId, mut axis: usize) -> bool {
        for _ in 0..MAX_DEPTH {
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

    /// `node` as a term: a single number, or constant along the summed axis.
    fn term(&self, node: NodeId, axis: Option<usize>, views: usize) -> Option<Term> {
        match (self.uniform(node), axis) {
            (Some(node), _) => Some(Term { node, behind: None }),
            (None, Some(a)) if self.constant_along(node, a) => Some(Term { node, behind: Some(views) }),
            _ => None,
        }
    }

    /// Follows a value back through casts and views to the first node for which `ask` returns `Some`. False
    /// if there is no such node.
    fn leaf(&self, mut id: NodeId, ask: impl Fn(NodeId) -> Option<bool>) -> bool {
        for _ in 0..MAX_DEPTH {
            if let Some(answer) = ask(id) {
                return answer;
            }
            match (&self.g.node(id).op, self.input(id)) {
                (Op::Cast | Op::Expand | Op::Reshape | Op::Permute(_) | Op::Slice(_), Some(x)) => id = x,
                _ => return false,
            }
        }
        false
    }

    /// Whether `is` holds for every element of a constant (false for a large one whose elements differ).
    /// `None` for other nodes.
    fn all_elements(&self, id: NodeId, is: impl Fn(f64) -> bool) -> Option<bool> {
        match &self.g.node(id).op {
            Op::Full(v) => Some(is(v.as_f64())),
            Op::Const(c) => Some(match fold::uniform(c) {
                Some(v) => is(v.as_f64()),
                None => c.numel() <= MAX_EXAMINED && c.scalars().all(|v| is(v.as_f64())),
            }),
            _ => None,
        }
    }

    pub(super) fn zero(&self, id: NodeId) -> bool {
        self.leaf(id, |id| self.all_elements(id, |v| v == 0.0))
    }

    /// Whether all values are integers of at most 8 bits.
    fn bytes(&self, id: NodeId) -> bool {
        self.leaf(id, |id| match is_int8(self.g.dtype(id)) {
            true => Some(true),
            false => self.all_elements(id, |v| v.fract() == 0.0 && (-128.0..=255.0).contains(&v)),
        })
    }

    /// Whether all values, which must be integers of at most 8 bits, are in the range of `d`.
    fn of_type(&self, id: NodeId, d: DType) -> bool {
        let (least, most) = d.range();
        self.leaf(id, |id| match is_int8(self.g.dtype(id)) {
            true => Some(self.g.dtype(id) == d),
            false => self.all_elements(id, |v| (least..=most).contains(&v)),
        })
    }

    /// Decomposes `id` into a factor, if it is computed from bytes. `axis` is the summed axis of `id`; `None`
    /// if a view between `id` and the product hides it.
    fn factor(&self, id: NodeId, axis: Option<usize>, mut f: Factor, depth: usize) -> Option<Factor> {
        let n = self.g.node(id);
        if is_f8(n.ty.dtype) && !f.whole || is_code(n.ty.dtype) {
            return Some(Factor { codes: id, ..f });
        }
        let x = n.inputs.first().copied().filter(|_| depth < MAX_DEPTH)?;
        let (d, from) = (n.ty.dtype, self.g.dtype(x));
        match &n.op {
            // These result dtypes represent every value of the 8-bit floats exactly.
            Op::Cast if is_f8(from) && matches!(d, DType::F32 | DType::F16 | DType::BF16) && !f.whole => {
                Some(Factor { codes: x, ..f })
            }
            Op::Cast if is_code(from) && matches!(d, DType::F32 | DType::I32) => {
                Some(Factor { codes: x, ..f })
            }
            Op::Cast if matches!((from, d), (DType::F32, DType::I32) | (DType::I32, DType::F32)) => {
                f.whole = true;
                self.factor(x, axis, f, depth + 1)
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
            Op::Scalar(ScalarOp::Sub) if matches!(d, DType::F32 | DType::I32) => {
                let z = n.inputs[1];
                if !self.zero(z) {
                    if f.zero.is_some() || !self.bytes(z) {
                        return None;
                    }
                    (f.zero, f.whole) = (Some(self.term(z, axis, f.views.len())?), true);
                }
                self.factor(x, axis, f, depth + 1)
            }
            // Only in f32, because multiplication in a half type would have rounded.
            Op::Scalar(ScalarOp::Mul) if d == DType::F32 && !f.whole => {
                let y = n.inputs[1];
                [(x, y), (y, x)].into_iter().find_map(|(x, s)| {
                    let (mut f, t) = (f.clone(), self.term(s, axis, f.views.len())?);
                    match t.behind {
                        None => f.scales.push(t.node),
                        Some(_) if f.rows.is_none() => f.rows = Some(t),
                        Some(_) => return None,
                    }
                    self.factor(x, axis, f, depth + 1)
                })
            }
            _ => None,
        }
    }

    /// The product of two values with these batch dimensions, computed in `d`.
    fn product(&self, operands: [NodeId; 2], batch: &[Dim], d: DType) -> Option<ProductMatch> {
        let [a, b] = operands;
        let of = |x: NodeId, back: usize| {
            let none = Factor {
                codes: x,
                views: SmallVec::new(),
                scales: SmallVec::new(),
                rows: None,
                zero: None,
                whole: false,
            };
            let f = self.factor(x, Some(self.g.shape(x).rank() - back), none, 0)?;
            // Only 8-bit integers may have a zero point.
            (f.zero.is_none() || is_int8(self.g.dtype(f.codes))).then_some(f)
        };
        let factors = [of(a, 1)?, of(b, 2)?];
        let types = [0, 1].map(|i: usize| self.g.dtype(factors[i].codes));
        let k = self.g.shape(a).last()?.known().filter(|k| *k > 0)?;
        let result = match d {
            _ if types.iter().all(|t| is_f8(*t)) => match d {
                DType::F16 | DType::BF16 => d,
                d if d == DType::F32 || is_f8(d) => DType::F32,
                _ => return None,
            },
            DType::F32 if types == [DType::I16; 2] => {
                // f32 sums do not wrap, so i32 sums must not either.
                let most = self.largest_code(factors[0].codes) * self.largest_sum(&factors[1])?;
                if most > i32::MAX as u64 {
                    return None;
                }
                DType::I32
            }
            DType::I32 | DType::F32 if types.iter().all(|t| is_int8(*t)) => {
                let largest = |i: usize| match (types[i], factors[i].zero) {
                    (DType::I8, None) => 128,
                    (_, None) => 255,
                    (d, Some(z)) if self.of_type(z.node, d) => 255,
                    // The magnitude of 255 - (-128) and of -128 - 255.
                    _ => 383,
                };
                // f32 sums do not wrap, so i32 sums must not either.
                let fits = largest(0) * largest(1) * k as u64 <= i32::MAX as u64;
                if d == DType::F32 && !fits {
                    return None;
                }
                DType::I32
            }
            _ => return None,
        };
        Some(ProductMatch { operands, factors, batch: Shape::from(batch), result, shifted: [false; 2] })
    }

    fn matmul(&self, id: NodeId) -> Option<ProductMatch> {
        let n = self.g.node(id);
        let (Op::Matmul, [a, b]) = (&n.op, &n.inputs[..]) else { return None };
        self.product([*a, *b], &n.ty.shape[..n.ty.shape.rank() - 2], n.ty.dtype)
    }

    /// A product of integers in f32 that is cast to i32, or a sum of such products over parts of the summed
    /// axis. Also returns the nodes inside it.
    fn sum(&self, id: NodeId) -> Option<(ProductMatch, Vec<NodeId>)> {
        let g = self.g;
        let (mut todo, mut inside, mut products) = (vec![id], vec![], vec![]);
        while let Some(x) = todo.pop() {
            let n = g.node(x);
            // This bounds the search. Because a search starts at every addition, a long chain would take
            // quadratic time otherwise.
            let enough = products.len() > PARTS || inside.len() > 3 * PARTS;
            if n.ty.dtype != DType::I32 || x != id && self.reader(x).is_none() || enough {
                return None;
            }
            match (&n.op, &n.inputs[..]) {
                (Op::Scalar(ScalarOp::Add), [a, b]) => todo.extend([*b, *a]),
                (Op::Cast, [p]) if g.node(*p).op == Op::Matmul && g.dtype(*p) == DType::F32 => {
                    self.reader(*p)?;
                    products.push(*p);
                    inside.push(*p);
                }
                _ => return None,
            }
            inside.push(x);
        }
        let batch = |p: NodeId| &g.shape(p)[..g.shape(p).rank() - 2];
        if let [p] = products[..] {
            return Some((self.matmul(p)?, inside));
        }
        // Each product must read its part of the same two values, and the parts must be consecutive.
        let mut whole: Option<[NodeId; 2]> = None;
        let mut end = 0;
        for p in &products {
            let mut sources = [id; 2];
            let mut len = [0; 2];
            for (i, back) in [(0, 1), (1, 2)] {
                let mut x = g.node(*p).inputs[i];
                if repeats_matrices(g, x) {
                    x = self.input(x)?;
                }
                let Op::Slice(axes) = &g.node(x).op else { return None };
                let axis = axes.len().checked_sub(back)?;
                let plain = axes.iter().enumerate().all(|(a, s)| s.step == 1 && (a == axis || s.start.is(0)));
                if !plain || axes[axis].start.known()? != end {
                    return None;
                }
                (sources[i], len[i]) = (self.input(x)?, g.shape(x)[axis].known()?);
                let others = |s: &Shape| s.iter().enumerate().all(|(a, d)| a == axis || g.shape(x)[a] == *d);
                if !others(g.shape(sources[i])) {
                    return None;
                }
            }
            if len[0] != len[1] || *whole.get_or_insert(sources) != sources || batch(*p) != batch(products[0])
            {
                return None;
            }
            end += len[0];
        }
        let [a, b] = whole?;
        let k = |s: &Shape, back: usize| s.rank().checked_sub(back).is_some_and(|axis| s[axis].is(end));
        if !k(g.shape(a), 1) || !k(g.shape(b), 2) {
            return None;
        }
        // Parts of 8-bit floats are not merged, because the graph truncates the sum of each part to an
        // integer.
        let found = self.product([a, b], batch(products[0]), DType::F32)?;
        (found.result == DType::I32).then_some((found, inside))
    }
}

impl ProductMatch {
    fn types(&self, old: &Graph) -> [DType; 2] {
        [0, 1].map(|i: usize| if self.shifted[i] { DType::I8 } else { old.dtype(self.factors[i].codes) })
    }

    /// Queries the target before any node is created: first for the bytes as they are, then for u8 as i8.
    fn check_claims(
        mut self,
        old: &Graph,
        claims: &dyn Fn(&Composite) -> bool,
    ) -> Result<Option<ProductMatch>> {
        let shape = |i: usize| -> Shape {
            let s = old.shape(self.operands[i]);
            let mut last = [s[s.rank() - 2], s[s.rank() - 1]];
            if i == 1 {
                last.reverse();
            }
            self.batch.iter().copied().chain(last).collect()
        };
        let shapes = [shape(0), shape(1)];
        let scaled = self.result != DType::I32 && self.factors.iter().any(|f| !f.scales.is_empty());
        if claims(&*operation(self.types(old), shapes.clone(), scaled, self.result)?) {
            return Ok(Some(self));
        }
        self.shifted = self.types(old).map(|d| d == DType::U8);
        let other = self.shifted.contains(&true);
        Ok((other && claims(&*operation(self.types(old), shapes, scaled, self.result)?)).then_some(self))
    }
}

/// A matrix constant, transposed.
fn transposed_constant(c: &ConstData) -> Result<ConstData> {
    let (rows, cols) = (c.dims[0], c.dims[1]);
    let size = stored(c.dtype).bytes(1);
    let turn = |from: &[u8]| {
        let mut to = vec![0u8; rows * cols * size];
        // In tiles, so that reads and writes both stay in the cache.
        const TILE: usize = 64;
        for r0 in (0..rows).step_by(TILE) {
            for c0 in (0..cols).step_by(TILE) {
                for c in c0..cols.min(c0 + TILE) {
                    for r in r0..rows.min(r0 + TILE) {
                        let (at, of) = ((c * rows + r) * size, (r * cols + c) * size);
                        to[at..at + size].copy_from_slice(&from[of..of + size]);
                    }
                }
            }
        }
        Some(to)
    };
    let bytes = derived_bytes(c, Derived::Transposed([rows, cols]), turn)
        .ok_or_else(|| Error::internal("a constant could not be transposed"))?;
    ConstData::new(stored(c.dtype), &[cols, rows], bytes)
}

/// The column sums `[1, n]` of the right operand in i32, computed now. `None` if the operand is not a
/// constant matrix, possibly transposed.
fn constant_sums(r: &mut Rebuild<'_>, old: &Graph, found: &ProductMatch) -> Result<Option<NodeId>> {
    let f = &found.factors[1];
    let Op::Const(c) = &old.node(f.codes).op else { return Ok(None) };
    let (&[rows, cols], d) = (&c.dims[..], c.dtype) else { return Ok(None) };
    let Some(turns) = turned(old, f) else { return Ok(None) };
    // The summed axis of the constant.
    let axis = usize::from(turns);
    let shift = if found.shifted[1] { 128 } else { 0 };
    let add = |bytes: &[u8]| {
        let mut sums = vec![0i32; if axis == 0 { cols } else { rows }];
        for (i, row) in bytes.chunks_exact(cols.max(1)).enumerate() {
            let values = row.iter().map(|b| if d == DType::I8 { i32::from(*b as i8) } else { i32::from(*b) });
            match axis {
                0 => sums.iter_mut().zip(values).for_each(|(s, v)| *s = s.wrapping_add(v)),
                _ => sums[i] = values.fold(0, i32::wrapping_add),
            }
        }
        Some(sums.iter().flat_map(|s| s.to_le_bytes()).collect())
    };
    let bytes = derived_bytes(c, Derived::Sums(d, [rows, cols], axis), add)
        .ok_or_else(|| Error::internal("a constant could not be summed"))?;
    let (n, k) = if axis == 0 { (cols, rows) } else { (rows, cols) };
    let sums = r.new.constant(ConstData::new(DType::I32, &[1, n], bytes)?);
    if shift == 0 {
        return Ok(Some(sums));
    }
    let less = r.new.full(DType::I32, [1usize], -(shift * k as i64));
    r.new.add(sums, less).map(Some)
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

/// The bytes of an operand. Those of the right operand have the summed axis last.
fn bytes(r: &mut Rebuild<'_>, old: &Graph, found: &ProductMatch, i: usize) -> Result<NodeId> {
    let (f, right) = (&found.factors[i], i == 1);
    let d = old.dtype(f.codes);
    let expanded = f.views.iter().all(|v| repeats_matrices(old, *v));
    let mut x = match &old.node(f.codes).op {
        // Transpose the constant now, not in every run.
        Op::Const(c) if right && expanded && c.dims.len() == 2 => {
            let c = transposed_constant(c)?;
            r.new.constant(c)
        }
        _ => {
            let mut x = r.get(f.codes)?;
            if is_f8(d) {
                x = r.new.bitcast(x, DType::U8)?;
            }
            let x = through(r, old, x, &f.views)?;
            let last = r.new.shape(x).rank() - 1;
            if right { r.new.transpose(x, last - 1, last)? } else { x }
        }
    };
    if found.shifted[i] {
        // u8 minus 128, as i8.
        let top = r.new.full(DType::U8, [1usize], 0x80u32);
        x = r.new.xor(x, top)?;
        x = r.new.bitcast(x, DType::I8)?;
    }
    let s = r.new.shape(x);
    let all: Shape = found.batch.iter().chain(&s[s.rank() - 2..]).copied().collect();
    r.new.expand(x, &all)
}

/// The values of a term: one number, or one number per row `[…, m, 1]` or column `[…, 1, n]`.
fn lines(r: &mut Rebuild<'_>, old: &Graph, found: &ProductMatch, i: usize, t: Term) -> Result<NodeId> {
    let x = r.get(t.node)?;
    match t.behind {
        None => r.new.reshape(x, [1usize]),
        Some(behind) => {
            let x = through(r, old, x, &found.factors[i].views[..behind])?;
            let summed = r.new.shape(x).rank() - 1 - i;
            r.new.narrow(x, summed, 0, 1)
        }
    }
}

/// The zero point of the bytes as the product reads them (shifted or not), in i32.
fn zero(r: &mut Rebuild<'_>, old: &Graph, found: &ProductMatch, i: usize) -> Result<Option<NodeId>> {
    let z = match found.factors[i].zero {
        Some(t) => {
            let z = lines(r, old, found, i, t)?;
            Some(r.new.cast(z, DType::I32)?)
        }
        None => None,
    };
    let shift = |g: &mut Graph, z: Option<NodeId>| -> Result<NodeId> {
        let top = g.full(DType::I32, [1usize], -128);
        z.map_or(Ok(top), |z| g.add(z, top))
    };
    if found.shifted[i] { shift(&mut r.new, z).map(Some) } else { Ok(z) }
}

/// Creates the nodes that replace a product.
fn make(r: &mut Rebuild<'_>, old: &Graph, found: &ProductMatch) -> Result<NodeId> {
    let [fa, fb] = &found.factors;
    let (a, b) = (bytes(r, old, found, 0)?, bytes(r, old, found, 1)?);
    let last = r.new.shape(a).rank() - 1;
    let mut scales = SmallVec::<[NodeId; 4]>::new();
    for s in fa.scales.iter().chain(&fb.scales) {
        let s = r.get(*s)?;
        scales.push(r.new.reshape(s, [1usize])?);
    }
    let whole = found.result == DType::I32;
    // The composite takes a single scale.
    let mut own = None;
    for s in scales.iter().filter(|_| !whole) {
        own = Some(own.map_or(Ok(*s), |t| r.new.mul(t, *s))?);
    }
    let mut y = composite(&mut r.new, found.types(old), a, b, own, found.result)?;
    if whole {
        let sums = |g: &mut Graph, x: NodeId| {
            let x = g.cast(x, DType::I32)?;
            g.sum(x, &[last], true)
        };
        let (za, zb) = (zero(r, old, found, 0)?, zero(r, old, found, 1)?);
        let k = r.new.shape(a)[last].known().unwrap_or(0) as i64;
        let known = if za.is_some() { constant_sums(r, old, found)? } else { None };
        let g = &mut r.new;
        if let Some(za) = za {
            // z (Σ b - k w)
            let mut of = match known {
                Some(sums) => sums,
                None => {
                    let of = sums(g, b)?;
                    g.transpose(of, last - 1, last)?
                }
            };
            if let Some(zb) = zb {
                let k = g.full(DType::I32, [1usize], k);
                let all = g.mul(k, zb)?;
                of = g.sub(of, all)?;
            }
            let of = g.mul(za, of)?;
            y = g.sub(y, of)?;
        }
        if let Some(zb) = zb {
            let of = sums(g, a)?;
            let of = g.mul(of, zb)?;
            y = g.sub(y, of)?;
        }
        // Multiply one scale after the other: their product could overflow or underflow f32 although the
        // result does not.
        for s in scales {
            y = g.cast(y, DType::F32)?;
            y = g.mul(y, s)?;
        }
    }
    for (i, f) in [fa, fb].into_iter().enumerate() {
        if let Some(t) = f.rows {
            let s = lines(r, old, found, i, t)?;
            y = r.new.cast(y, DType::F32)?;
            y = r.new.mul(y, s)?;
        }
    }
    Ok(y)
}

/// Replaces the byte products that `claims` accepts. Shapes must be known. Returns the graph and the number
/// of products replaced.
pub fn run(g: &Graph, claims: &dyn Fn(&Composite) -> bool) -> Result<(Graph, usize)> {
    let live = Rebuild::live(g);
    let finder = Finder::new(g, &live);
    // Keyed by the node that is replaced: the product, or the cast or sum that reads it.
    let (mut found, mut taken) = (HashMap::new(), HashSet::new());
    // Readers first, so that the longest pattern is found.
    for id in g.ids().rev().filter(|i| live[i.index()]) {
        if taken.contains(&id) {
            continue;
        }
        let n = g.node(id);
        let product = n.inputs.first().copied().filter(|p| n.op == Op::Cast && g.node(*p).op == Op::Matmul);
        let this = match &n.op {
            Op::Matmul => finder.matmul(id).map(|f| (f, vec![])),
            // Sums of 8-bit floats that are cast to a half type.
            Op::Cast if matches!(n.ty.dtype, DType::F16 | DType::BF16) => product
                .filter(|p| g.dtype(*p) == DType::F32 && finder.reader(*p).is_some())
                .and_then(|p| Some((finder.matmul(p)?, vec![p])))
                .filter(|(f, _)| f.result == DType::F32 && f.factors.iter().all(|f| f.rows.is_none()))
                .map(|(f, inside)| (ProductMatch { result: n.ty.dtype, ..f }, inside)),
            Op::Cast | Op::Scalar(ScalarOp::Add) if n.ty.dtype == DType::I32 => finder.sum(id),
            _ => None,
        };
        let Some((f, inside)) = this else { continue };
        // Integer sums are scaled only in f32.
        let scaled = f.factors.iter().any(|f| !f.scales.is_empty() || f.rows.is_some());
        if f.result == DType::I32 && scaled && n.ty.dtype != DType::F32 {
            continue;
        }
        if let Some(f) = f.check_claims(g, claims)? {
            taken.extend(inside);
            found.insert(id, f);
        }
    }
    if found.is_empty() {
        return Ok((g.clone(), 0));
    }
    let (mut r, mut made) = (Rebuild::new(g), 0);
    for id in g.ids().filter(|i| live[i.index()]) {
        if let Some(f) = found.get(&id) {
            r.new.span = g.node(id).span.clone();
            let y = make(&mut r, g, f)?;
            let y = r.new.cast(y, g.dtype(id))?;
            if r.new.shape(y) != g.shape(id) {
                let (new, old) = (r.new.shape(y), g.shape(id));
                return Err(Error::internal(format!("a product {old} became one {new}")));
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
#[path = "bytes_tests.rs"]
mod tests;
