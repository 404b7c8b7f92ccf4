//! Softmax and its logarithm.

use super::composite::{CompositeGradient, CompositeKind, CompositeRow, some_per_element};
use super::{HalfForm, HalfWhen, ReduceKind};
use crate::composite::{Attr, Composite, attrs};
use crate::error::Result;
use crate::grad::{Backward, Gradient};
use crate::graph::{Graph, NodeId};
use crate::kernel::lower::Template;
use crate::kernel::templates;

const TEMPLATE: Template = tuned_template!(softmax);

pub(super) static SOFTMAX: CompositeRow = CompositeRow {
    name: "softmax",
    has_builder: true,
    has_kernels: true,
    packs: false,
    summed: None,
    // The softmax takes its operand in the dtype that it already has. A softmax alone is no reason to round
    // scores that are f32 sums.
    half: Some(HalfForm { rounded: 1, when: HalfWhen::Follows, rate: None }),
    template: Some(&TEMPLATE),
    flops: some_per_element,
    gradient: CompositeGradient::Closed(softmax_gradient),
};

pub(super) static LOG_SOFTMAX: CompositeRow = CompositeRow {
    name: "log_softmax",
    has_builder: true,
    has_kernels: true,
    packs: false,
    summed: None,
    half: None,
    template: Some(&TEMPLATE),
    flops: some_per_element,
    gradient: CompositeGradient::Closed(log_softmax_gradient),
};

/// The axis, if the composite equals the one that `build` makes for this axis.
fn own_axis(
    c: &Composite,
    b: &Backward<'_>,
    build: fn(&mut Graph, NodeId, usize) -> Result<NodeId>,
) -> Result<Option<usize>> {
    let Some(axis) = c.int("axis").and_then(|a| usize::try_from(a).ok()) else { return Ok(None) };
    Ok(b.is_built_by(1, |g, x| build(g, x[0], axis)).then_some(axis))
}

/// `y·(dy − Σ dy·y)`.
fn softmax_gradient(c: &Composite, b: &mut Backward<'_>) -> Result<Gradient> {
    let Some(axis) = own_axis(c, b, Graph::softmax)? else { return Ok(Gradient::Body) };
    let (y, dy) = (b.id, b.dy);
    let p = b.g.mul(dy, y)?;
    let s = b.g.sum(p, &[axis], true)?;
    let d = b.g.sub(dy, s)?;
    let dx = b.g.mul(y, d)?;
    Ok(b.only(dx))
}

/// `dy − exp(y)·Σ dy`.
fn log_softmax_gradient(c: &Composite, b: &mut Backward<'_>) -> Result<Gradient> {
    let Some(axis) = own_axis(c, b, Graph::log_softmax)? else { return Ok(Gradient::Body) };
    let (y, dy) = (b.id, b.dy);
    let (s, e) = (b.g.sum(dy, &[axis], true)?, b.g.exp(y)?);
    let m = b.g.mul(e, s)?;
    let dx = b.g.sub(dy, m)?;
    Ok(b.only(dx))
}

impl Graph {
    /// `exp(x - max) / Σ exp(x - max)` along `axis`.
    pub fn softmax(&mut self, x: NodeId, axis: usize) -> Result<NodeId> {
        self.need_float(CompositeKind::Softmax.name(), x)?;
        self.composite(CompositeKind::Softmax, attrs([("axis", Attr::Int(axis as i64))]), &[x], |g, x| {
            let e = g.shifted_exp(x[0], axis)?;
            let s = g.sum(e.1, &[axis], true)?;
            g.div(e.1, s)
        })
    }

    /// `x - max - ln Σ exp(x - max)` along `axis`.
    pub fn log_softmax(&mut self, x: NodeId, axis: usize) -> Result<NodeId> {
        self.need_float(CompositeKind::LogSoftmax.name(), x)?;
        self.composite(CompositeKind::LogSoftmax, attrs([("axis", Attr::Int(axis as i64))]), &[x], |g, x| {
            let e = g.shifted_exp(x[0], axis)?;
            let s = g.sum(e.1, &[axis], true)?;
            let l = g.log(s)?;
            g.sub(e.0, l)
        })
    }

    /// Returns `(x - max, exp(x - max))`, with the maximum along `axis`.
    fn shifted_exp(&mut self, x: NodeId, axis: usize) -> Result<(NodeId, NodeId)> {
        let m = self.reduce(ReduceKind::Max, x, &[axis], true)?;
        let d = self.sub(x, m)?;
        Ok((d, self.exp(d)?))
    }
}
