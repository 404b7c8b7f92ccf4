//! Composites: named functions of primitive ops. A target may run a composite whole as a library kernel;
//! otherwise the composite is replaced by its body. To add one, add a function here.

use crate::dtype::{DType, Scalar};
use crate::error::{Error, Result};
use crate::graph::{Graph, NodeId};
use crate::op::{CROSS_ENTROPY, Op, ReduceKind};
use crate::shape::{Bindings, Dim, Shape, TensorType};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Value of an attribute.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub enum Attr {
    Int(i64),
    Float(Scalar),
    Bool(bool),
    Ints(Vec<i64>),
    DType(DType),
}

/// Attributes by name.
pub type Attrs = BTreeMap<String, Attr>;

/// A named function of primitive ops with one result.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct Composite {
    pub name: Arc<str>,
    pub attrs: Attrs,
    /// One input per operand, in order, and one output.
    pub body: Graph,
}

impl Composite {
    /// Checks that the operand types `x` equal the body's input types. Returns the result type.
    pub fn infer(&self, x: &[&TensorType]) -> Result<TensorType> {
        let i = self.body.inputs();
        if i.len() != x.len() {
            return Err(Error::argument(&*self.name, format!("takes {} operands, got {}", i.len(), x.len())));
        }
        for (i, t) in i.iter().zip(x) {
            if self.body.ty(i.node) != *t {
                return Err(Error::shape(
                    &*self.name,
                    format!("operand \"{}\" is {t}, expected {}", i.name, self.body.ty(i.node)),
                ));
            }
        }
        self.result().map(|r| self.body.ty(r).clone())
    }

    /// The node of the body's output.
    pub fn result(&self) -> Result<NodeId> {
        self.body
            .outputs()
            .first()
            .map(|o| o.node)
            .ok_or_else(|| Error::internal(format!("composite {} has no result", self.name)))
    }

    /// Replaces the symbols in the body by their sizes.
    pub fn bind(&self, b: &Bindings) -> Result<Composite> {
        Ok(Composite { name: self.name.clone(), attrs: self.attrs.clone(), body: self.body.bind(b)? })
    }

    /// The integer attribute `name`, if there is one.
    pub fn int(&self, name: &str) -> Option<i64> {
        match self.attrs.get(name) {
            Some(Attr::Int(i)) => Some(*i),
            _ => None,
        }
    }

    /// The float attribute `name`, if there is one.
    pub fn float(&self, name: &str) -> Option<f64> {
        match self.attrs.get(name) {
            Some(Attr::Float(f)) => Some(f.as_f64()),
            _ => None,
        }
    }

    /// The dtype attribute `name`, if there is one.
    pub fn dtype(&self, name: &str) -> Option<DType> {
        match self.attrs.get(name) {
            Some(Attr::DType(d)) => Some(*d),
            _ => None,
        }
    }

    /// Whether the bool attribute `name` is set.
    pub fn flag(&self, name: &str) -> bool {
        matches!(self.attrs.get(name), Some(Attr::Bool(true)))
    }
}

fn attrs<const N: usize>(a: [(&str, Attr); N]) -> Attrs {
    a.into_iter().map(|(k, v)| (k.to_string(), v)).collect()
}

fn float(v: f64) -> Attr {
    Attr::Float(Scalar::F(v))
}

impl Graph {
    /// Adds a composite node. `body` builds the body from input nodes that stand for `x`.
    pub fn composite(
        &mut self,
        name: &str,
        attrs: Attrs,
        x: &[NodeId],
        body: impl FnOnce(&mut Graph, &[NodeId]) -> Result<NodeId>,
    ) -> Result<NodeId> {
        let mut g = Graph::new();
        let ins: Vec<NodeId> =
            x.iter().enumerate().map(|(i, n)| g.input(&format!("x{i}"), self.ty(*n).clone())).collect();
        let y = body(&mut g, &ins).map_err(|e| e.at(&self.span))?;
        g.output("y", y);
        self.push(Op::Composite(Arc::new(Composite { name: name.into(), attrs, body: g })), x, None)
    }

    fn need_float(&self, op: &str, x: NodeId) -> Result<()> {
        match self.dtype(x) {
            d if d.is_float() => Ok(()),
            d => Err(Error::DType {
                op: op.into(),
                dtype: d,
                want: "a float type is needed".into(),
                at: self.span.clone(),
            }),
        }
    }

    /// `exp(x - max) / Σ exp(x - max)` along `axis`.
    pub fn softmax(&mut self, x: NodeId, axis: usize) -> Result<NodeId> {
        self.need_float("softmax", x)?;
        self.composite("softmax", attrs([("axis", Attr::Int(axis as i64))]), &[x], |g, x| {
            let e = g.shifted_exp(x[0], axis)?;
            let s = g.sum(e.1, &[axis], true)?;
            g.div(e.1, s)
        })
    }

    /// `x - max - ln Σ exp(x - max)` along `axis`.
    pub fn log_softmax(&mut self, x: NodeId, axis: usize) -> Result<NodeId> {
        self.need_float("log_softmax", x)?;
        self.composite("log_softmax", attrs([("axis", Attr::Int(axis as i64))]), &[x], |g, x| {
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

    /// Mean over `axes`. Float types only; the sizes of `axes` must be known.
    pub fn mean(&mut self, x: NodeId, axes: &[usize], keep: bool) -> Result<NodeId> {
        self.need_float("mean", x)?;
        let n = axes
            .iter()
            .fold(Dim::from(1), |a, &k| a.mul(self.shape(x).get(k).copied().unwrap_or(Dim::from(1))));
        let s = self.sum(x, axes, keep)?;
        let n = n.known().ok_or_else(|| {
            Error::unsupported("a mean over symbolic dimensions", "Bind the sizes first").at(&self.span)
        })?;
        let d = self.lit(s, n as f64);
        self.div(s, d)
    }

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
        self.need_float("layer_norm", x)?;
        let mut ins = vec![x, scale];
        ins.extend(bias);
        self.composite(
            "layer_norm",
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

    /// `x / sqrt(mean(x²) + eps) * scale` over the last axis. Half types are computed in f32. (Zhang and
    /// Sennrich 2019.)
    pub fn rms_norm(&mut self, x: NodeId, scale: NodeId, eps: f64) -> Result<NodeId> {
        self.need_float("rms_norm", x)?;
        self.composite("rms_norm", attrs([("eps", float(eps))]), &[x, scale], |g, v| {
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

    /// `(x - mean) / sqrt(var + eps) * scale + bias` with one statistic per channel (axis 1). (Ioffe and
    /// Szegedy 2015.)
    pub fn batch_norm(
        &mut self,
        x: NodeId,
        scale: NodeId,
        bias: NodeId,
        mean: NodeId,
        var: NodeId,
        eps: f64,
    ) -> Result<NodeId> {
        self.need_float("batch_norm", x)?;
        self.composite("batch_norm", attrs([("eps", float(eps))]), &[x, scale, bias, mean, var], |g, v| {
            let r = g.shape(v[0]).rank();
            if r < 2 {
                return Err(Error::shape("batch_norm", "the input needs a batch and a channel axis"));
            }
            let mut chan = vec![Dim::from(1); r - 1];
            chan[0] = g.shape(v[0])[1];
            let c: Vec<NodeId> = v[1..].iter().map(|i| g.reshape(*i, chan.clone())).collect::<Result<_>>()?;
            let e = g.lit(c[3], eps);
            let ve = g.add(c[3], e)?;
            let r = g.rsqrt(ve)?;
            let k = g.mul(r, c[0])?;
            let d = g.sub(v[0], c[2])?;
            let n = g.mul(d, k)?;
            g.add(n, c[1])
        })
    }

    /// Scaled dot-product attention: `softmax(q·kᵀ·scale + mask)·v`. Shapes: `q [b, h, sq, d]`, `k, v [b, hk,
    /// sk, d]`, where `h` is a multiple of `hk` and consecutive query heads share a key head. `mask` is
    /// additive and broadcasts to `[b, h, sq, sk]`. With `causal`, query `i` attends to keys up to `i + sk -
    /// sq`. (Vaswani et al. 2017; Ainslie et al. 2023 for shared heads.)
    pub fn attention(
        &mut self,
        q: NodeId,
        k: NodeId,
        v: NodeId,
        mask: Option<NodeId>,
        causal: bool,
        scale: f64,
    ) -> Result<NodeId> {
        self.need_float("attention", q)?;
        let (sq, sk) = (self.shape(q).clone(), self.shape(k).clone());
        let heads = |s: &Shape| s.get(1).and_then(|d| d.known());
        let (Some(h), Some(hk), 4, 4) = (heads(&sq), heads(&sk), sq.rank(), sk.rank()) else {
            return Err(
                Error::shape("attention", format!("q {sq} and k {sk}: expected [b, h, s, d]")).at(&self.span)
            );
        };
        if hk == 0 || h % hk != 0 {
            return Err(Error::shape("attention", format!("{h} query heads do not share {hk} key heads"))
                .at(&self.span));
        }
        let mut ins = vec![q, k, v];
        ins.extend(mask);
        let a = attrs([("causal", Attr::Bool(causal)), ("scale", float(scale))]);
        self.composite("attention", a, &ins, |g, x| {
            let rep = |g: &mut Graph, t: NodeId| -> Result<NodeId> {
                if h == hk {
                    return Ok(t);
                }
                let s = g.shape(t).clone();
                let u = g.unsqueeze(t, 2)?;
                let e = g.expand(u, &[s[0], s[1], (h / hk).into(), s[2], s[3]].into())?;
                g.reshape(e, [s[0], h.into(), s[2], s[3]])
            };
            let kk = rep(g, x[1])?;
            let kt = g.transpose(kk, 2, 3)?;
            let mut s = g.matmul(x[0], kt)?;
            let c = g.lit(s, scale);
            s = g.mul(s, c)?;
            if let Some(m) = x.get(3) {
                s = g.add(s, *m)?;
            }
            if causal {
                let t = Shape::from([sq[2], sk[2]]);
                let (i, j) = (g.iota(DType::I32, &t, 0)?, g.iota(DType::I32, &t, 1)?);
                let off = match (sq[2].known(), sk[2].known()) {
                    (Some(a), Some(b)) => b as i64 - a as i64,
                    _ => {
                        return Err(Error::unsupported(
                            "causal attention over symbolic lengths",
                            "Bind the sizes first",
                        ));
                    }
                };
                let o = g.lit(i, off);
                let lim = g.add(i, o)?;
                let ok = g.le(j, lim)?;
                let ninf = g.lit(s, f64::NEG_INFINITY);
                s = g.select(ok, s, ninf)?;
            }
            let p = g.softmax(s, 3)?;
            let vv = rep(g, x[2])?;
            g.matmul(p, vv)
        })
    }

    /// `x` where it is positive, else `slope * x`.
    pub fn leaky_relu(&mut self, x: NodeId, slope: f64) -> Result<NodeId> {
        let (z, k) = (self.lit(x, 0.0), self.lit(x, slope));
        let (c, y) = (self.lt(x, z)?, self.mul(x, k)?);
        self.select(c, y, x)
    }

    /// Mean negative log-likelihood of integer `labels [n, d…]` under `logits [n, classes, d…]`. Labels equal
    /// to `ignore` are excluded from both the sum and the count; if all labels are excluded the result is
    /// NaN. A label outside `[0, classes)` makes the run fail. Half types are summed in f32.
    pub fn cross_entropy(&mut self, logits: NodeId, labels: NodeId, ignore: Option<i64>) -> Result<NodeId> {
        self.need_float(CROSS_ENTROPY, logits)?;
        let (s, l) = (self.shape(logits).clone(), self.shape(labels).clone());
        if s.rank() < 2 || l.rank() + 1 != s.rank() || l[0] != s[0] || l[1..] != s[2..] {
            let what = format!("logits {s} and labels {l}: expected [n, classes, …] and [n, …]");
            return Err(Error::shape(CROSS_ENTROPY, what).at(&self.span));
        }
        let wide = self.dtype(logits).compute();
        let p = self.log_softmax(logits, 1)?;
        let at = self.class_index(labels, s[1], ignore)?;
        let at = self.unsqueeze(at, 1)?;
        let picked = self.gather_elements(p, at, 1)?;
        let picked = self.squeeze(picked, 1)?;
        let picked = self.cast(picked, wide)?;
        let axes: Vec<usize> = (0..l.rank()).collect();
        let mean = match ignore {
            None => self.mean(picked, &axes, false)?,
            Some(i) => {
                // Compared as i64 because the labels' type may not be able to hold `ignore`.
                let labels = self.cast(labels, DType::I64)?;
                let i = self.lit(labels, i);
                let counts = self.ne(labels, i)?;
                let zero = self.lit(picked, 0.0);
                let kept = self.select(counts, picked, zero)?;
                let ones = self.cast(counts, wide)?;
                let (sum, n) = (self.sum(kept, &axes, false)?, self.sum(ones, &axes, false)?);
                self.div(sum, n)?
            }
        };
        let y = self.neg(mean)?;
        self.cast(y, self.dtype(logits))
    }

    /// `len` elements along `axis`, from the run-time `position` (a rank-0 integer). `position + len` must
    /// not exceed the axis.
    pub fn slice_at(&mut self, x: NodeId, position: NodeId, axis: usize, len: usize) -> Result<NodeId> {
        let s = self.shape(x).clone();
        if axis >= s.rank() || s[axis].known().is_some_and(|n| n < len) {
            let what = format!("{len} elements along axis {axis} of {s}");
            return Err(Error::shape(SLICE_AT, what).at(&self.span));
        }
        if !self.dtype(position).is_int() || self.shape(position).rank() != 0 {
            let what = format!("the position is an integer of rank 0, not {}", self.ty(position));
            return Err(Error::argument(SLICE_AT, what).at(&self.span));
        }
        let a = attrs([("axis", Attr::Int(axis as i64)), ("len", Attr::Int(len as i64))]);
        self.composite(SLICE_AT, a, &[x, position], |g, x| {
            let i = g.iota(g.dtype(x[1]), [len], 0)?;
            let i = g.add(i, x[1])?;
            g.gather(x[0], i, axis)
        })
    }
}

/// Name of the composite that [`Graph::slice_at`] builds.
pub const SLICE_AT: &str = "slice_at";
