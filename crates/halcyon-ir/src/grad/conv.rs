//! Gradients of a convolution, as convolutions.
//!
//! On one spatial axis with input size `i`, kernel `k`, output `o`, stride `s`, dilation `d`, input dilation
//! `e` and low padding `l`, the convolution is `y[q] = Σ_j x̂[q·s + j·d - l]·w[j]`. Here `x̂` is `x` with
//! `e - 1` zeros between elements. Hence, with `dx`, `dw` and `dy` for the gradients of `x`, `w` and `y`:
//! - `dx[p] = Σ_j ŷ[p·e + l - j·d]·w[j]`, where `ŷ` is `dy` with `s - 1` zeros between elements: a
//!   convolution of `dy` with the flipped weight, with stride `e`, dilation `d`, input dilation `s` and low
//!   padding `(k-1)·d - l`;
//! - `dw[j] = Σ_q x̂[j·d + q·s - l]·dy[q]`: a convolution of `x` with `dy` as its weight, with stride `d`,
//!   dilation `s`, input dilation `e` and low padding `l`.
//!
//! High paddings are chosen to give the exact size of the result. Since both gradients are convolutions,
//! gradients of any order follow.

use super::unsupported;
use crate::error::Result;
use crate::graph::{Graph, Node, NodeId};
use crate::ops::Conv;
use crate::shape::{Dim, Shape};

/// Sizes of one spatial axis.
struct Axis {
    i: i64,
    k: i64,
    o: i64,
}

fn axes(g: &Graph, node: &Node, c: &Conv) -> Result<Vec<Axis>> {
    let (x, w) = (g.shape(node.inputs[0]), g.shape(node.inputs[1]));
    (0..c.stride.len())
        .map(|a| {
            let get = |s: &Shape| s[a + 2].known().map(|n| n as i64);
            match (get(x), get(w), get(&node.ty.shape)) {
                (Some(i), Some(k), Some(o)) => Ok(Axis { i, k, o }),
                _ => Err(unsupported(
                    "the gradient of a convolution over symbolic sizes",
                    "Bind the spatial sizes first",
                    node,
                )),
            }
        })
        .collect()
}

/// Splits axis `at` into two axes `[groups, n / groups]`.
fn split(s: &Shape, at: usize, groups: usize) -> Result<Shape> {
    let mut t = s.clone();
    t.0[at] = s[at].div(Dim::from(groups))?;
    t.0.insert(at, Dim::from(groups));
    Ok(t)
}

/// Merges axes `at` and `at + 1`.
fn merge(s: &Shape, at: usize) -> Shape {
    let mut t = s.clone();
    let n = t.0.remove(at + 1);
    t.0[at] = t[at].mul(n);
    t
}

/// Gradient of the input.
pub(crate) fn input(g: &mut Graph, node: &Node, c: &Conv, dy: NodeId) -> Result<NodeId> {
    let ax = axes(g, node, c)?;
    let n = ax.len();
    // [G·O', C', k…] → [G·C', O', k…], flipped, for G groups of C' input and O' output channels.
    let w = node.inputs[1];
    let s = split(g.shape(w), 0, c.groups)?;
    let w = g.reshape(w, s)?;
    let w = g.transpose(w, 1, 2)?;
    let s = merge(g.shape(w), 0);
    let w = g.reshape(w, s)?;
    let w = g.flip(w, &(2..n + 2).collect::<Vec<_>>())?;
    let pad = |a: usize| {
        let (d, s, e) = (c.dilation[a] as i64, c.stride[a] as i64, c.input_dilation[a] as i64);
        let lo = (ax[a].k - 1) * d - c.pad[a].0;
        (lo, (ax[a].i - 1) * e + (ax[a].k - 1) * d - (ax[a].o - 1) * s - lo)
    };
    let attrs = Conv {
        stride: c.input_dilation.clone(),
        pad: (0..n).map(pad).collect(),
        dilation: c.dilation.clone(),
        input_dilation: c.stride.clone(),
        groups: c.groups,
    };
    g.conv(dy, w, attrs)
}

/// Gradient of the weight.
pub(crate) fn weight(g: &mut Graph, node: &Node, c: &Conv, dy: NodeId) -> Result<NodeId> {
    let ax = axes(g, node, c)?;
    let n = ax.len();
    // [N, G·C', i…] → [C', G·N, i…]: the channels become the batch.
    let x = node.inputs[0];
    let s = split(g.shape(x), 1, c.groups)?;
    let x = g.reshape(x, s)?;
    let x = g.transpose(x, 0, 2)?;
    let s = merge(g.shape(x), 1);
    let x = g.reshape(x, s)?;
    let d = g.transpose(dy, 0, 1)?;
    let pad = |a: usize| {
        let (d, s, e) = (c.dilation[a] as i64, c.stride[a] as i64, c.input_dilation[a] as i64);
        let lo = c.pad[a].0;
        (lo, (ax[a].k - 1) * d + (ax[a].o - 1) * s - (ax[a].i - 1) * e - lo)
    };
    let attrs = Conv {
        stride: c.dilation.clone(),
        pad: (0..n).map(pad).collect(),
        dilation: c.stride.clone(),
        input_dilation: c.input_dilation.clone(),
        groups: c.groups,
    };
    let w = g.conv(x, d, attrs)?;
    g.transpose(w, 0, 1)
}
