//! The feed-forward part of a layer, and its experts.

use super::load::{Loader, expect};
use super::weights::{Matrix, NormWeights};
use crate::spec::*;
use halcyon::Order as Sort;
use halcyon::ir::error::Result;
use halcyon::{ConstData, DType, ScatterKind, Tensor};

#[derive(Debug)]
pub(crate) struct Dense {
    gate: Option<Matrix>,
    up: Matrix,
    down: Matrix,
}

#[derive(Debug)]
pub(crate) struct ExpertWeights {
    router: Matrix,
    choice_bias: Option<Tensor>,
    gate: Option<Matrix>,
    up: Matrix,
    down: Matrix,
    common: Option<Dense>,
    common_gate: Option<Matrix>,
    /// What the router reads is normed by this first.
    router_norm: Option<NormWeights>,
    /// f32 `[experts]`: the weights of the chosen experts are multiplied by these.
    scales: Option<Tensor>,
}

/// A gated part and experts.
#[derive(Debug)]
pub(crate) struct BesideWeights {
    dense: Dense,
    activation: Activation,
    dense_after: NormWeights,
    experts: ExpertWeights,
    spec: Experts,
    experts_before: NormWeights,
    experts_after: NormWeights,
}

#[derive(Debug)]
pub(crate) enum FfnWeights {
    Dense(Dense, Activation),
    Experts(Box<ExpertWeights>, Experts),
    Beside(Box<BesideWeights>),
}

impl Loader<'_> {
    fn dense(&self, stem: &str, suffix: &str, inner: usize, gated: bool) -> Result<Dense> {
        let h = self.spec.hidden;
        let name = |n: &str| format!("{stem}.ffn_{n}{suffix}");
        Ok(Dense {
            gate: gated.then(|| self.matrix(&name("gate"), &[inner, h])).transpose()?,
            up: self.matrix(&name("up"), &[inner, h])?,
            down: self.matrix(&name("down"), &[h, inner])?,
        })
    }

    pub(crate) fn ffn(&self, i: usize, l: &Layer) -> Result<FfnWeights> {
        let (h, p, n) = (self.spec.hidden, format!("blk.{i}"), l.inner);
        Ok(match &l.ffn {
            Ffn::Gated(a) => FfnWeights::Dense(self.dense(&p, "", n, true)?, *a),
            Ffn::Plain(a) => FfnWeights::Dense(self.dense(&p, "", n, false)?, *a),
            Ffn::Experts(e) => FfnWeights::Experts(Box::new(self.experts(&p, e, n)?), e.clone()),
            Ffn::Beside(a, b) => {
                let norm = |name: &str| self.norm(&format!("{p}.{name}"), h, l.norm);
                let mut experts = self.experts(&p, &b.experts, b.inner)?;
                experts.router_norm = Some(self.router_norm(&format!("{p}.ffn_gate_inp.scale"), l.norm)?);
                experts.scales = self.vector(&format!("{p}.ffn_down_exps.scale"), &[b.experts.count])?;
                FfnWeights::Beside(Box::new(BesideWeights {
                    dense: self.dense(&p, "", n, true)?,
                    activation: *a,
                    dense_after: norm("post_ffw_norm_1")?,
                    experts,
                    spec: b.experts.clone(),
                    experts_before: norm("pre_ffw_norm_2")?,
                    experts_after: norm("post_ffw_norm_2")?,
                }))
            }
        })
    }

    /// The norm of what a router reads. Its factors are divided by the root of their number.
    fn router_norm(&self, name: &str, spec: Norm) -> Result<NormWeights> {
        let (h, w) = (self.spec.hidden, self.need(name)?);
        expect(name, &w.dims(), &[h])?;
        let root = (h as f32).sqrt();
        let values: Vec<f32> = self.floats(&w)?.iter().map(|v| v / root).collect();
        let weight = Tensor::constant(self.backend, &ConstData::from_slice(&[h], &values)?);
        Ok(NormWeights { weight: Some(weight), bias: None, spec })
    }

    fn experts(&self, p: &str, e: &Experts, n: usize) -> Result<ExpertWeights> {
        let h = self.spec.hidden;
        let shared = match e.common {
            Some(inner) => Some(self.dense(p, "_shexp", inner, true)?),
            None => None,
        };
        let choice = format!("{p}.exp_probs_b.bias");
        Ok(ExpertWeights {
            router: self.matrix(&format!("{p}.ffn_gate_inp"), &[e.count, h])?,
            choice_bias: if e.choice_bias { self.vector(&choice, &[e.count])? } else { None },
            gate: Some(self.matrix(&format!("{p}.ffn_gate_exps"), &[e.count, n, h])?),
            up: self.matrix(&format!("{p}.ffn_up_exps"), &[e.count, n, h])?,
            down: self.matrix(&format!("{p}.ffn_down_exps"), &[e.count, h, n])?,
            common: shared,
            common_gate: match e.common_gate {
                true => Some(self.row_gate(&format!("{p}.ffn_gate_inp_shexp"))?),
                false => None,
            },
            router_norm: None,
            scales: None,
        })
    }

    /// A gate with one output. Files store it as a vector or as a matrix of one row.
    fn row_gate(&self, stem: &str) -> Result<Matrix> {
        let name = format!("{stem}.weight");
        let values = self.floats(&self.need(&name)?)?;
        expect(&name, &[values.len()], &[self.spec.hidden])?;
        let data = ConstData::from_slice(&[1, values.len()], &values)?;
        Ok(Matrix::new(Tensor::constant(self.backend, &data), None))
    }
}

pub(super) fn activate(a: Activation, gate: &Tensor) -> Tensor {
    match a {
        Activation::Silu => gate.silu(),
        Activation::GeluTanh => gate.gelu_tanh(),
        Activation::Gelu => gate.gelu(),
        Activation::Relu => gate.relu(),
        Activation::ReluSquared => {
            let r = gate.relu();
            &r * &r
        }
        Activation::ClampedSwiglu { alpha, .. } => gate * &(gate * alpha).sigmoid(),
    }
}

/// The product of gate and up part.
fn gated(a: Activation, gate: Tensor, up: Tensor) -> Tensor {
    if let Activation::ClampedSwiglu { limit, .. } = a {
        let g = gate.minimum(limit);
        let u = up.clamp(-limit, limit);
        return activate(a, &g) * (u + 1.0);
    }
    activate(a, &gate) * up
}

fn dense(w: &Dense, a: Activation, x: &Tensor) -> Tensor {
    let up = w.up.apply(x);
    let inner = match &w.gate {
        Some(g) => gated(a, g.apply(x), up),
        None => activate(a, &up),
    };
    w.down.apply(&inner)
}

/// The feed-forward part of `x`, the normed activations `raw`.
pub(crate) fn feed_forward(w: &FfnWeights, x: &Tensor, raw: &Tensor) -> Tensor {
    match w {
        FfnWeights::Dense(d, a) => dense(d, *a, x),
        FfnWeights::Experts(w, e) => experts(w, e, x, x),
        FfnWeights::Beside(w) => {
            let y = w.dense_after.apply(&dense(&w.dense, w.activation, x));
            let z = experts(&w.experts, &w.spec, &w.experts_before.apply(raw), raw);
            y + w.experts_after.apply(&z)
        }
    }
}

/// The numbers of the chosen experts, i64 `[rows, used]`, and their weights, f32 `[rows, used]`.
fn choose(w: &ExpertWeights, e: &Experts, x: &Tensor) -> (Tensor, Tensor) {
    let logits = match &w.router_norm {
        Some(n) => w.router.apply(&n.apply(x)),
        None => w.router.apply(x),
    };
    let scores = match e.score {
        Score::Softmax => logits.softmax(-1),
        Score::Sigmoid => logits.sigmoid(),
        Score::SoftmaxOfChosen => logits.clone(),
    };
    let mut judged = match &w.choice_bias {
        Some(b) => &scores + b,
        None => scores.clone(),
    };
    if let Some((groups, kept)) = e.groups.filter(|(n, kept)| kept < n) {
        judged = in_groups(judged, e, groups, kept);
    }
    let order = judged.argsort(-1, Sort::Descending).narrow(-1, 0, e.used);
    let mut weights = scores.gather_elements(&order, -1);
    if e.score == Score::SoftmaxOfChosen {
        weights = weights.softmax(-1);
    }
    if e.normalise {
        let sum = weights.sum_keepdim(-1);
        // DeepSeek's models add a small number for sums of zero.
        weights = weights / (sum + 1e-20);
    }
    if let Some(by) = e.scale {
        weights = weights * by;
    }
    if let Some(s) = &w.scales {
        weights = weights * s.gather(&order, 0);
    }
    (order, weights)
}

/// The scores with those of experts outside of the best groups replaced. The score of a group is the sum of
/// its two best experts if the choice has a bias, else its best expert (DeepSeek-V3 and V2).
fn in_groups(scores: Tensor, e: &Experts, groups: usize, kept: usize) -> Tensor {
    let n = scores.dims().map_or(0, |d| d[0]);
    let size = e.count / groups;
    let by_group = scores.reshape([n, groups, size]);
    let best = if e.choice_bias { 2.min(size) } else { 1 };
    let top = by_group.argsort(-1, Sort::Descending).narrow(-1, 0, best);
    let judged = by_group.gather_elements(&top, -1).sum(-1);
    let order = judged.argsort(-1, Sort::Descending).narrow(-1, 0, kept);
    let zeros = Tensor::zeros(scores.backend(), [n, groups], DType::F32);
    let ones = Tensor::ones(scores.backend(), [n, kept], DType::F32);
    let mask = zeros.scatter_elements(&order, &ones, -1, ScatterKind::Set).reshape([n, groups, 1]);
    let none =
        Tensor::scalar(scores.backend(), if e.choice_bias { f64::NEG_INFINITY } else { 0.0 }, DType::F32);
    mask.gt(0.5).select(&by_group, &none).reshape([n, e.count])
}

/// The experts' part of `x`. The router reads `routed`.
fn experts(w: &ExpertWeights, e: &Experts, x: &Tensor, routed: &Tensor) -> Tensor {
    let (order, weights) = choose(w, e, routed);
    let dims = x.dims().unwrap_or_default();
    let (n, h) = (dims.first().copied().unwrap_or(0), dims.last().copied().unwrap_or(0));
    let which = order.cast(DType::I32).reshape([n * e.used]);
    // Not by `expand`: of one row that is a view, which has other kernels and so other bits.
    let used = Tensor::scalar(x.backend(), e.used as i64, DType::I32);
    let rows = x.gather(&(Tensor::arange(x.backend(), n * e.used, DType::I32) / used), 0);
    let up = w.up.apply_which(&rows, &which);
    let inner = match &w.gate {
        Some(g) => gated(e.activation, g.apply_which(&rows, &which), up),
        None => activate(e.activation, &up),
    };
    let y = w.down.apply_which(&inner, &which).reshape([n, e.used, h]);
    let mut y = (y * weights.reshape([n, e.used, 1])).sum(1);
    if let Some(c) = &w.common {
        let mut z = dense(c, e.activation, x);
        if let Some(g) = &w.common_gate {
            z = z * g.apply(x).sigmoid();
        }
        y = y + z;
    }
    y
}
