//! Conversion of elements under 8 bits between packed bytes and one byte per element.

use super::float::Arith;
use super::{carrier, fit_int};
use crate::dtype::{Class, DType};
use crate::error::Result;
use crate::graph::{Graph, NodeId};
use crate::ops::element_wise::ScalarOp as S;
use crate::shape::{Dims, Shape};

/// Unpacks packed elements of dtype `d` to carriers of shape `dims`.
pub(super) fn unpack(g: &mut Graph, packed: NodeId, d: DType, dims: &Dims) -> Result<NodeId> {
    let per = 8 / d.bits() as usize;
    let n: usize = dims.iter().product();
    if n == 0 {
        return Ok(g.full(carrier(d), dims.as_slice(), 0u8));
    }
    let bytes = n.div_ceil(per);
    let x = g.reshape(packed, [bytes, 1])?;
    let x = g.expand(x, &Shape::from([bytes, per]))?;
    let at = g.iota(DType::U8, [bytes, per], 1)?;
    let mut a = Arith::like(g, x);
    let at = a.with(S::Mul, at, d.bits())?;
    let x = a.op(S::Shr, &[x, at])?;
    let mask = (1u32 << d.bits()) - 1;
    let x = a.with(S::And, x, mask)?;
    let mut x = signed(g, x, d)?;
    if bytes * per > n {
        x = g.reshape(x, [bytes * per])?;
        x = g.narrow(x, 0, 0, n)?;
    }
    g.reshape(x, dims.as_slice())
}

/// Converts elements of `d`, each in the low bits of a u8, to carriers.
pub(super) fn signed(g: &mut Graph, x: NodeId, d: DType) -> Result<NodeId> {
    if d.class() != Class::Int {
        return Ok(x);
    }
    let x = g.bitcast(x, DType::I8)?;
    let mut a = Arith::like(g, x);
    let half = 1i64 << (d.bits() - 1);
    let x = a.with(S::Xor, x, half)?;
    a.with(S::Sub, x, half)
}

/// Converts carriers of `d` to their bits in u8. The upper bits are zero.
pub(super) fn unsigned(g: &mut Graph, x: NodeId, d: DType) -> Result<NodeId> {
    if d.class() != Class::Int {
        return Ok(x);
    }
    let x = g.bitcast(x, DType::U8)?;
    fit_int(g, x, DType::U8, d.bits())
}

/// Packs carriers of `d` into bytes. Unused bits of the last byte are zero.
pub(super) fn pack(g: &mut Graph, x: NodeId, d: DType) -> Result<NodeId> {
    let bits = d.bits() as usize;
    let per = 8 / bits;
    let n: usize = g.shape(x).dims()?.iter().product();
    let bytes = n.div_ceil(per);
    if n == 0 {
        return Ok(g.full(DType::U8, [0usize], 0u8));
    }
    let x = unsigned(g, x, d)?;
    let x = g.reshape(x, [n])?;
    let x = g.pad(x, &[0], &[bytes * per - n], 0u8)?;
    let x = g.reshape(x, [bytes, per])?;
    let mut sum = None;
    for k in 0..per {
        let part = g.narrow(x, 1, k, 1)?;
        let part = g.reshape(part, [bytes])?;
        let mut a = Arith::like(g, part);
        let part = if k == 0 { part } else { a.with(S::Shl, part, (k * bits) as u32)? };
        sum = Some(match sum {
            None => part,
            Some(s) => a.op(S::Or, &[s, part])?,
        });
    }
    Ok(sum.unwrap_or(x))
}
