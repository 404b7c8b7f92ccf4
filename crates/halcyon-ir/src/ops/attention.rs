//! Scaled dot-product attention.

use super::composite::{CompositeGradient, CompositeKind, CompositeRow};
use super::{HalfForm, HalfWhen, RatedWork, count};
use crate::composite::{Attr, Composite, attrs, float};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::grad::{Backward, Gradient, flat};
use crate::graph::{Graph, NodeId};
use crate::kernel::lower::Template;
use crate::kernel::templates;
use crate::shape::Shape;
use crate::target::Operand;

const NAME: &str = "attention";

const TEMPLATE: Template = tuned_template!(attention);

pub(super) static ATTENTION: CompositeRow = CompositeRow {
    name: NAME,
    has_builder: true,
    has_kernels: true,
    packs: false,
    // If there are no keys, the result is a sum over no values, which is 0.
    summed: Some((1, 1)),
    // The mask stays in f32.
    half: Some(HalfForm { rounded: 3, when: HalfWhen::Always, rate: Some(RatedWork::Products) }),
    template: Some(&TEMPLATE),
    flops,
    gradient: CompositeGradient::Closed(gradient),
};

pub(super) static ATTENTION_GRAD: CompositeRow = CompositeRow {
    name: "attention_grad",
    has_builder: true,
    has_kernels: true,
    packs: false,
    summed: None,
    half: None,
    template: None,
    flops: grad_flops,
    gradient: CompositeGradient::Body,
};

/// The gradient computes five products, the attention itself two.
fn grad_flops(c: &Composite, inputs: &[Operand], y: &Operand) -> u64 {
    (flops(c, inputs, y) / 2).saturating_mul(5)
}

/// One composite computes the gradients of queries, keys and values. The body is differentiated instead if
/// the mask needs a gradient, query heads share key heads, a size is not known, or the body is not the
/// built-in one.
fn gradient(c: &Composite, b: &mut Backward<'_>) -> Result<Gradient> {
    let (Some(scale), causal) = (c.float("scale"), c.flag("causal")) else { return Ok(Gradient::Body) };
    let own = |g: &mut Graph, x: &[NodeId]| g.attention(x[0], x[1], x[2], x.get(3).copied(), causal, scale);
    if !b.is_built_by(3, own) {
        return Ok(Gradient::Body);
    }
    let sizes = |g: &Graph, x: NodeId| g.shape(x).known();
    let (Some(q), Some(k), Some(v)) = (sizes(b.g, b.x(0)), sizes(b.g, b.x(1)), sizes(b.g, b.x(2))) else {
        return Ok(Gradient::Body);
    };
    if b.needs_grad(3) || q[1] != k[1] {
        return Ok(Gradient::Body);
    }
    let mask = b.node.inputs.get(3).copied();
    let all = b.g.attention_grad([b.x(0), b.x(1), b.x(2), b.dy], mask, causal, scale)?;
    b.parts(all, &[q, k, v])
}

/// The weights `softmax(q·kᵀ·scale + mask)`. With `causal`, the scores of hidden keys are -inf. The keys must
/// have as many heads as the queries.
fn weights(
    g: &mut Graph,
    (q, k): (NodeId, NodeId),
    mask: Option<NodeId>,
    causal: bool,
    scale: f64,
) -> Result<NodeId> {
    let kt = g.transpose(k, 2, 3)?;
    let mut s = g.matmul(q, kt)?;
    let c = g.lit(s, scale);
    s = g.mul(s, c)?;
    if let Some(m) = mask {
        s = g.add(s, m)?;
    }
    if causal {
        let (queries, keys) = (g.shape(q)[2], g.shape(k)[2]);
        let t = Shape::from([queries, keys]);
        let (i, j) = (g.iota(DType::I32, &t, 0)?, g.iota(DType::I32, &t, 1)?);
        let off = match (queries.known(), keys.known()) {
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
    g.softmax(s, 3)
}

/// Two products, each with `d` multiply-adds per score, and the softmax, which counts as 12 FLOPs per score.
fn flops(c: &Composite, inputs: &[Operand], _: &Operand) -> u64 {
    let [q, k, ..] = inputs else { return 0 };
    let (q, k) = (&q.view.shape, &k.view.shape);
    if q.len() != 4 || k.len() != 4 {
        // Another crate's composite of this name.
        return 0;
    }
    let pairs = if c.flag("causal") { visible(q[2], k[2]) } else { count(&[q[2], k[2]]) };
    let scores = count(&[q[0], q[1]]).saturating_mul(pairs);
    scores.saturating_mul(4 * q[3] as u64 + 12)
}

/// Number of (query, key) pairs in causal attention, where query `i` attends to keys up to `i + keys -
/// queries`.
fn visible(queries: usize, keys: usize) -> u64 {
    let (q, k) = (queries as u64, keys as u64);
    // With more queries than keys, the first queries attend to no key. The last query attends to all keys.
    let (rows, first) = if k >= q { (q, k - q + 1) } else { (k, 1) };
    let twice = u128::from(rows) * (u128::from(first) + u128::from(k));
    u64::try_from(twice / 2).unwrap_or(u64::MAX)
}

impl Graph {
    /// Scaled dot-product attention: `softmax(q·kᵀ·scale + mask)·v`. Shapes: `q [b, h, sq, d]`, `k, v [b, hk,
    /// sk, d]`, where `h` is a multiple of `hk` and consecutive query heads share a key head. `mask` is
    /// additive and broadcasts to `[b, h, sq, sk]`. With `causal`, query `i` attends to keys up to `i + sk -
    /// sq`. If `causal` or a mask of -inf hides all keys from a query, its result is NaN. (Vaswani et al.
    /// 2017; Ainslie et al. 2023 for shared heads.)
    pub fn attention(
        &mut self,
        q: NodeId,
        k: NodeId,
        v: NodeId,
        mask: Option<NodeId>,
        causal: bool,
        scale: f64,
    ) -> Result<NodeId> {
        self.need_float(NAME, q)?;
        let (sq, sk) = (self.shape(q).clone(), self.shape(k).clone());
        let heads = |s: &Shape| s.get(1).and_then(|d| d.known());
        let (Some(h), Some(hk), 4, 4) = (heads(&sq), heads(&sk), sq.rank(), sk.rank()) else {
            return Err(
                Error::shape(NAME, format!("q {sq} and k {sk}: expected [b, h, s, d]")).at(&self.span)
            );
        };
        if hk == 0 || h % hk != 0 {
            return Err(Error::shape(NAME, format!("{h} query heads are not a multiple of {hk} key heads"))
                .at(&self.span));
        }
        let mut ins = vec![q, k, v];
        ins.extend(mask);
        let a = attrs([("causal", Attr::Bool(causal)), ("scale", float(scale))]);
        self.composite(CompositeKind::Attention, a, &ins, |g, x| {
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
            let p = weights(g, (x[0], kk), x.get(3).copied(), causal, scale)?;
            let vv = rep(g, x[2])?;
            g.matmul(p, vv)
        })
    }

    /// The gradients of [`Graph::attention`] with as many key heads as query heads. `of` has the queries, the
    /// keys, the values and the gradient of the result. The result has one axis. It holds the gradients of
    /// queries, keys and values, one after the other. (Dao et al. 2022.)
    pub fn attention_grad(
        &mut self,
        of: [NodeId; 4],
        mask: Option<NodeId>,
        causal: bool,
        scale: f64,
    ) -> Result<NodeId> {
        let name = ATTENTION_GRAD.name;
        self.need_float(name, of[0])?;
        let shapes = of.map(|x| self.shape(x).clone());
        if shapes.iter().any(|s| s.rank() != 4) {
            let what = format!("operands {shapes:?}: expected [b, h, s, d] each");
            return Err(Error::shape(name, what).at(&self.span));
        }
        let mut ins = of.to_vec();
        ins.extend(mask);
        let a = attrs([("causal", Attr::Bool(causal)), ("scale", float(scale))]);
        self.composite(CompositeKind::AttentionGrad, a, &ins, |g, x| {
            let (q, k, v, dy) = (x[0], x[1], x[2], x[3]);
            let p = weights(g, (q, k), x.get(4).copied(), causal, scale)?;
            let pt = g.transpose(p, 2, 3)?;
            let dv = g.matmul(pt, dy)?;
            let vt = g.transpose(v, 2, 3)?;
            let dp = g.matmul(dy, vt)?;
            let both = g.mul(p, dp)?;
            let sum = g.sum(both, &[3], true)?;
            let d = g.sub(dp, sum)?;
            let c = g.lit(p, scale);
            let scaled = g.mul(p, c)?;
            let ds = g.mul(scaled, d)?;
            let dq = g.matmul(ds, k)?;
            let dst = g.transpose(ds, 2, 3)?;
            let dk = g.matmul(dst, q)?;
            flat(g, &[dq, dk, dv])
        })
    }
}

#[cfg(test)]
mod tests {
    use super::visible;

    #[test]
    fn causal_attention_counts_the_pairs_that_are_seen() {
        for (q, k) in [(4, 4), (1, 7), (3, 8), (8, 3), (5, 0), (0, 5)] {
            let seen = |i: usize| (i + k + 1).saturating_sub(q).min(k) as u64;
            assert_eq!(visible(q, k), (0..q).map(seen).sum::<u64>(), "{q} {k}");
        }
        assert_eq!(visible(1 << 40, 1 << 40), u64::MAX);
    }
}
