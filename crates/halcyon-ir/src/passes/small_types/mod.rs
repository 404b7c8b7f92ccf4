//! Rewrites a graph to native dtypes: removes the small types ([`DType::is_native`]).
//!
//! In the new graph a small value is stored in a carrier, one byte per element: i8 or u8 for integers, u8 for
//! floats, whose bits are the low bits of the byte. Ops that only move elements (views, gather, concat,
//! select) work on carriers. Ops that compute decode floats to f32, and round or wrap the result to the small
//! type again. Packed bytes (u8) occur only at the borders: inputs, large constants and outputs. All
//! conversions are ordinary element-wise arithmetic and are fused.
//!
//! Results equal those of `reference::eval`, except for arithmetic on small floats, which is done in f32.

mod float;
mod packed;

pub(crate) use float::{decode, encode_e8m0};

use super::fold::MAX_RESULT;
use super::rebuild::Rebuild;
use crate::data::ConstData;
use crate::dtype::{Class, DType, Scalar};
use crate::error::{Error, Result};
use crate::graph::{Graph, Node, NodeId};
use crate::ops::element_wise::{Rule, ScalarOp as S};
use crate::ops::{Moves, Op, ReduceKind};
use crate::shape::{Dims, TensorType};
use float::{Arith, encode};

/// Returns the graph without small types. Composites with such types must have been inlined, and shapes must
/// be known. Inputs and outputs of 8-bit types keep their shapes as u8; those of fewer bits become vectors of
/// bytes.
///
/// # Errors
/// [`Error::Unsupported`] for custom ops on small types.
pub fn run(g: &Graph) -> Result<Graph> {
    let live = Rebuild::live(g);
    let inputs = g.inputs().iter().map(|i| stored(g.ty(i.node))).collect::<Result<Vec<_>>>()?;
    let mut r = Rebuild::retyped(g, inputs, g.args().iter().map(|d| wide(*d)).collect());
    for id in g.ids().filter(|i| live[i.index()]) {
        let n = g.node(id);
        let native = n.ty.dtype.is_native() && n.inputs.iter().all(|i| g.dtype(*i).is_native());
        if native {
            r.copy(id)?;
        } else {
            r.new.span = n.span.clone();
            let y = node(&mut r, g, n).map_err(|e| e.at(&n.span))?;
            r.set(id, y);
        }
    }
    let mut done: Vec<NodeId> = vec![];
    for o in g.outputs() {
        let d = g.dtype(o.node);
        if d.bits() >= 8 || done.contains(&o.node) {
            continue;
        }
        done.push(o.node);
        r.new.span = g.node(o.node).span.clone();
        let x = r.get(o.node)?;
        let y = packed::pack(&mut r.new, x, d)?;
        r.set(o.node, y);
    }
    Ok(r.finish()?.0)
}

/// The type of the buffer that holds an input or output.
fn stored(t: &TensorType) -> Result<TensorType> {
    Ok(match t.dtype {
        d if d.is_native() => t.clone(),
        d if d.bits() == 8 => TensorType { dtype: DType::U8, shape: t.shape.clone() },
        d => TensorType::new(DType::U8, [d.bytes(t.shape.dims()?.iter().product())]),
    })
}

/// The carrier dtype of a small type; native types are their own carriers.
fn carrier(d: DType) -> DType {
    match d.class() {
        _ if d.is_native() => d,
        Class::Int => DType::I8,
        _ => DType::U8,
    }
}

/// The dtype in which values are computed: f32 for small floats, else the carrier.
fn wide(d: DType) -> DType {
    if !d.is_native() && d.is_float() { DType::F32 } else { carrier(d) }
}

/// A value of a small type as stored in its carrier.
fn carried(d: DType, v: Scalar) -> Scalar {
    match d.is_float() {
        _ if d.is_native() => v,
        true => Scalar::U(v.to_bytes(d)[0].into()),
        false => v.cast(d),
    }
}

/// Decodes carriers to numbers of type [`wide`].
fn value(g: &mut Graph, x: NodeId, d: DType) -> Result<NodeId> {
    if wide(d) == DType::F32 && d != DType::F32 { decode(g, x, d) } else { Ok(x) }
}

/// Rounds or wraps numbers of type [`wide`] to carriers.
fn fit(g: &mut Graph, y: NodeId, d: DType) -> Result<NodeId> {
    match d.is_float() {
        _ if d.is_native() => Ok(y),
        true => encode(g, y, d),
        false => fit_int(g, y, carrier(d), d.bits()),
    }
}

/// The low `bits` bits of an integer, sign-extended if `as_type` is signed.
fn fit_int(g: &mut Graph, y: NodeId, as_type: DType, bits: u32) -> Result<NodeId> {
    let mut a = Arith::like(g, y);
    let y = a.with(S::And, y, (1i64 << bits) - 1)?;
    if as_type.class() != Class::Int {
        return Ok(y);
    }
    let half = 1i64 << (bits - 1);
    let y = a.with(S::Xor, y, half)?;
    a.with(S::Sub, y, half)
}

/// Rewrites a node whose own dtype or an operand's dtype is small.
fn node(r: &mut Rebuild<'_>, old: &Graph, n: &Node) -> Result<NodeId> {
    let d = n.ty.dtype;
    let x = r.operands(n)?;
    let from: Vec<DType> = n.inputs.iter().map(|i| old.dtype(*i)).collect();
    let dims = || n.ty.shape.dims();
    let g = &mut r.new;
    let moved = |g: &mut Graph, op: Op| {
        g.push(op, &x, Some(TensorType { dtype: carrier(d), shape: n.ty.shape.clone() }))
    };
    match &n.op {
        Op::Input(k) => {
            let p = r.input(*k)?;
            if d.bits() == 8 { Ok(p) } else { packed::unpack(&mut r.new, p, d, &dims()?) }
        }
        Op::Arg(k) => {
            let a = r.arg(*k)?;
            fit(&mut r.new, a, d)
        }
        Op::Const(c) => constant(g, c, d),
        Op::Full(v) => Ok(g.full(carrier(d), &n.ty.shape, carried(d, *v))),
        Op::Cast => cast(g, x[0], from[0], d),
        Op::Bitcast => {
            let bits = match from[0] {
                s if s.is_native() => Arith::like(g, x[0]).bits(x[0], DType::U8)?,
                s => packed::unsigned(g, x[0], s)?,
            };
            match d {
                d if d.is_native() => Arith::like(g, bits).bits(bits, d),
                d => packed::signed(g, bits, d),
            }
        }
        Op::Custom(c) => Err(Error::unsupported(
            format!(
                "custom op {} on {}",
                c.op().name(),
                from.iter().chain([&d]).find(|d| !d.is_native()).unwrap_or(&d)
            ),
            "Cast its operands and result to wider types",
        )),
        Op::Composite(c) => Err(Error::internal(format!("composite {} holds small types", c.kind))),
        // An op that moves elements moves their carriers in the same way.
        op if matches!(op.facts().moves, Moves::All | Moves::Operands(_)) => {
            moved(g, op.with_fill(|v| carried(d, v))?)
        }
        op => {
            let mut v = vec![];
            for (x, d) in x.iter().zip(&from) {
                v.push(value(g, *x, *d)?);
            }
            let y = g.push(op.clone(), &v, Some(TensorType { dtype: wide(d), shape: n.ty.shape.clone() }))?;
            if keeps_carrier(op, d) {
                return Ok(y);
            }
            // A maximum or minimum over no elements is the identity of the wide type, which lies outside of
            // the small type's range. It is replaced by the end of this range.
            let y = match op.facts().identity {
                Some(kind) if !d.is_native() => bounded(g, y, kind, d)?,
                _ => y,
            };
            fit(g, y, d)
        }
    }
}

/// Whether a scalar op's result needs no rounding or wrapping, because it is a bool or a valid carrier of an
/// integer. (Rounding or wrapping would not change a valid carrier.)
fn keeps_carrier(op: &Op, d: DType) -> bool {
    let Op::Scalar(s) = op else { return false };
    s.row().rule == Rule::Test || d.is_int() && !d.is_native() && s.stays_in(d)
}

fn bounded(g: &mut Graph, y: NodeId, kind: ReduceKind, d: DType) -> Result<NodeId> {
    let (lo, hi) = d.range();
    let (op, end) = match kind {
        ReduceKind::Max => (S::Max, lo),
        ReduceKind::Min => (S::Min, hi),
        _ => return Ok(y),
    };
    if end.is_infinite() { Ok(y) } else { Arith::like(g, y).with(op, y, end) }
}

fn cast(g: &mut Graph, x: NodeId, from: DType, to: DType) -> Result<NodeId> {
    let mut x = value(g, x, from)?;
    if to.is_native() {
        return g.cast(x, to);
    }
    if to.is_float() {
        return encode(g, x, to);
    }
    let (a, b) = (from.range(), to.range());
    let fits = !from.is_float() && a.0 >= b.0 && a.1 <= b.1;
    if from.is_float() {
        x = g.cast(x, DType::I32)?;
    }
    let y = g.cast(x, carrier(to))?;
    if fits { Ok(y) } else { fit(g, y, to) }
}

/// 8-bit constants keep the model's bytes. Packed constants of at most [`MAX_RESULT`] elements are unpacked
/// now, larger ones in every run.
fn constant(g: &mut Graph, c: &ConstData, d: DType) -> Result<NodeId> {
    let n = c.numel();
    if d.bits() == 8 {
        return Ok(g.constant(ConstData::new(DType::U8, &c.dims, c.owner())?));
    }
    if n <= MAX_RESULT {
        let v = c.scalars().map(|v| carried(d, v));
        return Ok(g.constant(ConstData::from_scalars(carrier(d), &c.dims, v)?));
    }
    let p = g.constant(ConstData::new(DType::U8, &[d.bytes(n)], c.owner())?);
    packed::unpack(g, p, d, &Dims::from(&c.dims[..]))
}

#[cfg(test)]
mod tests;
