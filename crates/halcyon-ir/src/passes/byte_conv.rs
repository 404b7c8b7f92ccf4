//! Convolutions of bytes. In a quantised model, the operands of a convolution are 8-bit integers that are
//! widened and scaled (ONNX's DequantizeLinear before Conv). Such a convolution becomes the composite
//! [`crate::composite::CompositeKind::ByteConv`] of the integers, followed by one multiplication.
//!
//! Padding adds zeros to the dequantised image, so the zero point of the image must be 0. The image has one
//! scale. The weights are a constant of i8 with the zero point 0 and one scale, or one for each output
//! channel. The composite is created only if the target has a kernel for it in the blocked layout, because
//! [`super::blocked`] then changes the layout.

use super::blocked;
use super::bytes::Finder;
use super::rebuild::{Rebuild, prune};
use crate::composite::Composite;
use crate::dtype::DType;
use crate::error::Result;
use crate::graph::{Graph, NodeId};
use crate::ops::element_wise::ScalarOp;
use crate::ops::{Conv, Op};
use crate::shape::{Dim, Shape};
use std::collections::HashMap;

/// Channels per block of an image of bytes.
pub const BLOCK: usize = 64;

/// A value that is computed from bytes: the bytes, and the scale that multiplies them, in the shape of the
/// value.
struct Scaled {
    codes: NodeId,
    scale: Option<NodeId>,
}

/// The convolution inside a composite of bytes.
pub(super) fn inner(c: &Composite) -> Option<&Conv> {
    c.body.nodes().iter().find_map(|n| match &n.op {
        Op::Conv(c) => Some(c),
        _ => None,
    })
}

/// Reads `id` as scaled bytes whose zero point is 0.
fn scaled(f: &Finder<'_>, id: NodeId) -> Option<Scaled> {
    let g = f.graph();
    let (mut at, mut scale) = (id, None);
    if g.node(at).op == Op::Scalar(ScalarOp::Mul) {
        let [a, b] = g.node(at).inputs[..] else { return None };
        let codes = |x: NodeId| g.node(x).op == Op::Cast && !g.dtype(g.node(x).inputs[0]).is_float();
        (at, scale) = if codes(a) { (a, Some(b)) } else { (b, Some(a)) };
    }
    if g.node(at).op != Op::Cast || g.dtype(at) != DType::F32 {
        return None;
    }
    at = g.node(at).inputs[0];
    if g.node(at).op == Op::Scalar(ScalarOp::Sub) && g.dtype(at) == DType::I32 {
        let [x, z] = g.node(at).inputs[..] else { return None };
        if !f.zero(z) || g.node(x).op != Op::Cast {
            return None;
        }
        at = g.node(x).inputs[0];
    }
    matches!(g.dtype(at), DType::I8 | DType::U8).then_some(Scaled { codes: at, scale })
}

/// A convolution to replace: image and weights.
struct Found {
    image: Scaled,
    weights: Scaled,
}

fn find(f: &Finder<'_>, id: NodeId, claims: &dyn Fn(&Composite) -> bool) -> Result<Option<Found>> {
    let g = f.graph();
    let n = g.node(id);
    let (Op::Conv(attrs), &[x, w]) = (&n.op, &n.inputs[..]) else { return Ok(None) };
    let (Some(image), Some(weights)) = (scaled(f, x), scaled(f, w)) else { return Ok(None) };
    let (Some(xs), Some(ws)) = (g.shape(x).known(), g.shape(w).known()) else { return Ok(None) };
    let constant = matches!(&g.node(weights.codes).op, Op::Const(c) if c.dtype == DType::I8);
    // The image must have a single scale, and the weights a single scale or one per output channel.
    let one = image.scale.is_none_or(|s| f.uniform(s).is_some());
    let rows = weights.scale.is_none_or(|s| (1..ws.len()).all(|axis| f.constant_along(s, axis)));
    let blocks = xs.len() == 4 && xs[1].is_multiple_of(BLOCK) && ws[0].is_multiple_of(BLOCK);
    if !constant || !one || !rows || !blocks || n.ty.dtype != DType::F32 {
        return Ok(None);
    }
    let types = [g.ty(image.codes), g.ty(weights.codes)];
    let c = blocked::byte_conv(types, attrs)?;
    Ok(claims(&c).then_some(Found { image, weights }))
}

/// Replaces the convolutions of bytes that `claims` accepts in the blocked layout. Shapes must be known.
/// Returns the graph and the number of convolutions replaced.
pub fn run(g: &Graph, claims: &dyn Fn(&Composite) -> bool) -> Result<(Graph, usize)> {
    let live = Rebuild::live(g);
    let finder = Finder::new(g, &live);
    let mut found = HashMap::new();
    for id in g.ids().filter(|i| live[i.index()]) {
        if let Some(f) = find(&finder, id, claims)? {
            found.insert(id, f);
        }
    }
    if found.is_empty() {
        return Ok((g.clone(), 0));
    }
    let mut r = Rebuild::new(g);
    for id in g.ids().filter(|i| live[i.index()]) {
        let (Some(f), Op::Conv(attrs)) = (found.get(&id), &g.node(id).op) else {
            r.copy(id)?;
            continue;
        };
        r.new.span = g.node(id).span.clone();
        let (x, w) = (r.get(f.image.codes)?, r.get(f.weights.codes)?);
        let mut y = r.new.byte_conv(x, w, attrs.clone())?;
        if let Some(s) = scales(&mut r, &finder, f)? {
            y = r.new.mul(y, s)?;
        }
        r.set(id, y);
    }
    Ok((prune(&r.finish()?.0)?, found.len()))
}

/// The factor of the sums, `[1, O, 1, 1]` or `[1]`. `None` if neither operand has a scale.
fn scales(r: &mut Rebuild<'_>, f: &Finder<'_>, found: &Found) -> Result<Option<NodeId>> {
    let image = match found.image.scale.and_then(|s| f.uniform(s)) {
        Some(s) => {
            let s = r.get(s)?;
            Some(r.new.reshape(s, [1usize])?)
        }
        None => None,
    };
    let weights = match found.weights.scale {
        Some(s) => {
            // If the scales are one vector before they are broadcast, use that vector. Else slice the
            // broadcast tensor.
            let mut before = s;
            while f.graph().node(before).op == Op::Expand {
                before = f.graph().node(before).inputs[0];
            }
            let channels = f.graph().shape(s)[0];
            let whole = f.graph().shape(before).numel() == channels;
            let mut s = r.get(if whole { before } else { s })?;
            for axis in 1..if whole { 1 } else { 4 } {
                s = r.new.narrow(s, axis, 0, 1)?;
            }
            let s = r.new.reshape(s, [channels])?;
            let shape = Shape::from(vec![Dim::from(1), r.new.shape(s)[0], Dim::from(1), Dim::from(1)]);
            Some(r.new.reshape(s, shape)?)
        }
        None => None,
    };
    match (image, weights) {
        (Some(a), Some(b)) => r.new.mul(a, b).map(Some),
        (a, b) => Ok(a.or(b)),
    }
}

#[cfg(test)]
#[path = "byte_conv_tests.rs"]
mod tests;
