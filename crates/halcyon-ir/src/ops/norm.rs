//! Norms over trailing axes, and over channels.

use super::composite::{CompositeGradient, CompositeKind, CompositeRow, some_per_element};
use super::{HalfForm, HalfWhen};
use crate::composite::{Attr, Composite, attrs, float};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::grad::{Backward, Gradient, flat};
use crate::graph::{Graph, NodeId};
use crate::kernel::lower::Template;
use crate::kernel::templates;
use crate::shape::{Dim, Dims};
use crate::target::Operand;

const TEMPLATE: Template = tuned_template!(norm);

/// Under mixed precision, only the first operand is rounded; scales and biases stay in f32.
const HALF: HalfForm = HalfForm { rounded: 1, when: HalfWhen::Read, rate: None };

pub(super) static LAYER_NORM: CompositeRow = CompositeRow {
    name: "layer_norm",
    has_builder: true,
    has_kernels: true,
    packs: false,
    summed: None,
    half: Some(HALF),
    template: Some(&TEMPLATE),
    flops: some_per_element,
    gradient: CompositeGradient::Closed(layer_norm_gradient),
};

pub(super) static LAYER_NORM_GRAD: CompositeRow = CompositeRow {
    name: "layer_norm_grad",
    has_builder: true,
    has_kernels: true,
    packs: false,
    summed: None,
    half: None,
    template: None,
    flops: grad_flops,
    gradient: CompositeGradient::Body,
};

/// About 18 operations for each element of the operand.
fn grad_flops(_: &Composite, inputs: &[Operand], _: &Operand) -> u64 {
    inputs.first().map_or(0, |x| 18 * x.view.numel() as u64)
}

/// One composite computes the gradients of operand, scale and bias. The body is differentiated instead if
/// scale or bias does not have the shape of a row, the operands are not all f32 or all f64, a size is not
/// known, or the body is not the built-in one.
fn layer_norm_gradient(c: &Composite, b: &mut Backward<'_>) -> Result<Gradient> {
    let axis = c.int("axis").and_then(|a| usize::try_from(a).ok());
    let (Some(axis), Some(eps)) = (axis, c.float("eps")) else { return Ok(Gradient::Body) };
    if !b.is_built_by(2, |g, x| g.layer_norm(x[0], x[1], x.get(2).copied(), axis, eps)) {
        return Ok(Gradient::Body);
    }
    let known: Option<Vec<Dims>> = b.node.inputs.iter().map(|x| b.g.shape(*x).known()).collect();
    let Some(known) = known else { return Ok(Gradient::Body) };
    let types = b.node.inputs.iter().map(|x| b.g.dtype(*x)).collect::<Vec<_>>();
    let row = known[0].get(axis..).unwrap_or_default().to_vec();
    let plain = matches!(types[0], DType::F32 | DType::F64) && types.iter().all(|d| *d == types[0]);
    if !plain || row.is_empty() || known[1..].iter().any(|d| d[..] != row[..]) {
        return Ok(Gradient::Body);
    }
    let all = b.g.layer_norm_grad([b.x(0), b.x(1), b.dy], axis, eps)?;
    b.parts(all, &known)
}

pub(super) static RMS_NORM: CompositeRow = CompositeRow {
    name: "rms_norm",
    has_builder: true,
    has_kernels: true,
    packs: false,
    summed: None,
    half: Some(HALF),
    template: Some(&TEMPLATE),
    flops: some_per_element,
    gradient: CompositeGradient::Body,
};

pub(super) static BATCH_NORM: CompositeRow = CompositeRow {
    name: "batch_norm",
    has_builder: true,
    has_kernels: true,
    packs: false,
    summed: None,
    half: None,
    template: None,
    flops: some_per_element,
    gradient: CompositeGradient::Body,
};

impl Graph {
    /// `(x - mean) / sqrt(variance + eps) * scale + bias` over the axes from `axis` on, with the biased
    /// variance. Half types are computed in f32. (Ba, Kiros, Hinton 2016.)
    pub fn layer_norm(
        &mut self,
        x: NodeId,
        scale: NodeId,
        bias: Option<NodeId>,
        axis: usize,
        eps: f64,
    ) -> Result<NodeId> {
        self.need_float(CompositeKind::LayerNorm.name(), x)?;
        let mut ins = vec![x, scale];
        ins.extend(bias);
        self.composite(
            CompositeKind::LayerNorm,
            attrs([("axis", Attr::Int(axis as i64)), ("eps", float(eps))]),
            &ins,
            |g, v| {
                let dt = g.dtype(v[0]);
                let w: Vec<NodeId> = v.iter().map(|i| g.cast(*i, dt.compute())).collect::<Result<_>>()?;
                let axes: Vec<usize> = (axis..g.shape(v[0]).rank()).collect();
                let m = g.mean(w[0], &axes, true)?;
                let d = g.sub(w[0], m)?;
                let sq = g.mul(d, d)?;
                let var = g.mean(sq, &axes, true)?;
                let e = g.lit(var, eps);
                let ve = g.add(var, e)?;
                let r = g.rsqrt(ve)?;
                let n = g.mul(d, r)?;
                let mut y = g.mul(n, w[1])?;
                if let Some(b) = w.get(2) {
                    y = g.add(y, *b)?;
                }
                g.cast(y, dt)
            },
        )
    }

    /// The gradients of [`Graph::layer_norm`] for f32 and f64. `of` has the operand, the scale and the
    /// gradient of the result. The scale has the shape of a row. The result has one axis. It holds the
    /// gradients of operand, scale and bias, one after the other.
    pub fn layer_norm_grad(&mut self, of: [NodeId; 3], axis: usize, eps: f64) -> Result<NodeId> {
        let name = LAYER_NORM_GRAD.name;
        self.need_float(name, of[0])?;
        let (x, scale, dy) =
            (self.shape(of[0]).clone(), self.shape(of[1]).clone(), self.shape(of[2]).clone());
        if axis >= x.rank() || scale[..] != x[axis..] || dy != x {
            let what = format!("operand {x}, scale {scale}, gradient {dy}: rows begin at axis {axis}");
            return Err(Error::shape(name, what).at(&self.span));
        }
        let a = attrs([("axis", Attr::Int(axis as i64)), ("eps", float(eps))]);
        self.composite(CompositeKind::LayerNormGrad, a, &of, |g, v| {
            let (x, scale, dy) = (v[0], v[1], v[2]);
            let rank = g.shape(x).rank();
            let (axes, others): (Vec<usize>, Vec<usize>) = ((axis..rank).collect(), (0..axis).collect());
            let m = g.mean(x, &axes, true)?;
            let d = g.sub(x, m)?;
            let sq = g.mul(d, d)?;
            let var = g.mean(sq, &axes, true)?;
            let e = g.lit(var, eps);
            let ve = g.add(var, e)?;
            let r = g.rsqrt(ve)?;
            let n = g.mul(d, r)?;
            let dn = g.mul(dy, scale)?;
            let a = g.mean(dn, &axes, true)?;
            let p = g.mul(dn, n)?;
            let b = g.mean(p, &axes, true)?;
            let nb = g.mul(n, b)?;
            let t = g.sub(dn, a)?;
            let t = g.sub(t, nb)?;
            let dx = g.mul(t, r)?;
            let p = g.mul(dy, n)?;
            let dscale = g.sum(p, &others, false)?;
            let dbias = g.sum(dy, &others, false)?;
            flat(g, &[dx, dscale, dbias])
        })
    }

    /// `x / sqrt(mean(x²) + eps) * scale` over the last axis. Half types are computed in f32. (Zhang and
    /// Sennrich 2019.)
    pub fn rms_norm(&mut self, x: NodeId, scale: NodeId, eps: f64) -> Result<NodeId> {
        self.need_float(CompositeKind::RmsNorm.name(), x)?;
        self.composite(CompositeKind::RmsNorm, attrs([("eps", float(eps))]), &[x, scale], |g, v| {
            let dt = g.dtype(v[0]);
            let w: Vec<NodeId> = v.iter().map(|i| g.cast(*i, dt.compute())).collect::<Result<_>>()?;
            let last = g.shape(v[0]).axis(-1)?;
            let sq = g.mul(w[0], w[0])?;
            let m = g.mean(sq, &[last], true)?;
            let e = g.lit(m, eps);
            let me = g.add(m, e)?;
            let r = g.rsqrt(me)?;
            let n = g.mul(w[0], r)?;
            let y = g.mul(n, w[1])?;
            g.cast(y, dt)
        })
    }

    /// `(x - mean) / sqrt(var + eps) * scale + bias` with given statistics. Mean, variance, scale and bias
    /// have one element per channel (axis 1). (Ioffe and Szegedy 2015.)
    pub fn batch_norm(
        &mut self,
        x: NodeId,
        scale: NodeId,
        bias: NodeId,
        mean: NodeId,
        var: NodeId,
        eps: f64,
    ) -> Result<NodeId> {
        self.need_float(CompositeKind::BatchNorm.name(), x)?;
        self.composite(
            CompositeKind::BatchNorm,
            attrs([("eps", float(eps))]),
            &[x, scale, bias, mean, var],
            |g, v| {
                let r = g.shape(v[0]).rank();
                if r < 2 {
                    return Err(Error::shape(
                        CompositeKind::BatchNorm.name(),
                        "the input needs a batch and a channel axis",
                    ));
                }
                let mut chan = vec![Dim::from(1); r - 1];
                chan[0] = g.shape(v[0])[1];
                let c: Vec<NodeId> =
                    v[1..].iter().map(|i| g.reshape(*i, chan.clone())).collect::<Result<_>>()?;
                let e = g.lit(c[3], eps);
                let ve = g.add(c[3], e)?;
                let r = g.rsqrt(ve)?;
                let k = g.mul(r, c[0])?;
                let d = g.sub(v[0], c[2])?;
                let n = g.mul(d, k)?;
                g.add(n, c[1])
            },
        )
    }
}
