//! Scaled dot-product attention, one group per query: scores and weights never leave workgroup and private memory (the running
//! maximum and sum of Milakov and Gimelshein 2018, as in FlashAttention).

use super::template::Template;
use super::{E, Kernel, Launch, Reduce, Ty};
use crate::dtype::Scalar;
use crate::error::Result;
use crate::target::{Caps, Operand};

/// Work-items per query, and keys per round.
const ITEMS: u32 = 64;
/// Longest head the kernel takes: each work-item keeps this share of the result.
pub(super) const MAX_HEAD: usize = 512;

/// `q [b, h, sq, d]`, `k, v [b, hk, sk, d]`, an additive mask broadcast to `[b, h, sq, sk]`; `causal` lets query `i` see keys up to
/// `i + sk - sq`. A query that sees no key gives NaN, as the definition does.
pub(super) fn build(
    causal: bool,
    scale: f64,
    x: &[Operand],
    out: &Operand,
    caps: &Caps,
) -> Result<(Kernel, Launch)> {
    let (q, k, v) = (&x[0], &x[1], &x[2]);
    let (heads, sq, width) = (q.view.shape[1], q.view.shape[2], v.view.shape[3]);
    let (shared, sk) = (k.view.shape[1], k.view.shape[2]);
    let mask = x.get(3).map(|m| {
        let full = [q.view.shape[0], heads, sq, sk];
        Operand {
            dtype: m.dtype,
            view: m.view.expand(&full),
        }
    });
    let mut all = vec![q, k, v, out];
    all.extend(mask.as_ref());
    let t = Template::new("attention", ITEMS, &all);
    let (aq, ak, av) = (t.input(q), t.input(k), t.input(v));
    let am = mask.as_ref().map(|m| t.input(m));
    let ao = t.output(out);
    let b = &t.b;
    let ty = Ty::of(q.dtype);
    let scale = t.float("scale", ty, scale);
    let rows = t.size("rows", q.view.shape[0] * heads * sq);
    let (eh, es, group) = (
        t.size("h", heads),
        t.size("sq", sq),
        t.size("share", heads / shared),
    );
    let (keys, depth, wide) = (
        t.size("sk", sk),
        t.size("d", q.view.shape[3]),
        t.size("dv", width),
    );
    let scratch = b.local(ty, ITEMS);
    let weights = b.local(ty, ITEMS);
    let query = b.local(ty, MAX_HEAD as u32);
    // Column `lane + ITEMS * j` of the result is work-item `lane`'s element `j`.
    let each = (MAX_HEAD as u32).div_ceil(ITEMS);
    let sums = b.private(ty, each);
    let me = b.local_id(0);
    let g = b.let_(b.linear_group());
    // A group past the last query has nothing to read and nothing to write.
    let (keys, depth, wide) = (t.work(rows, keys), t.work(rows, depth), t.work(rows, wide));
    let at = t.split(g, &[rows, eh, es]);
    let (batch, head, i) = (at[0], at[1], at[2]);
    let from = b.let_(head.idiv(group));
    b.for_(me, depth, ITEMS, |c| {
        query.store(c, aq.load(b, &[batch, head, i, c]) * scale)
    });
    b.for_(0, each, 1, |j| sums.store(j, 0.0));
    let lowest = Scalar::F(f64::NEG_INFINITY);
    let (top, total) = (b.var_of(ty, lowest), b.var_of(ty, 0.0));
    b.barrier();
    let end = if causal {
        b.let_(keys.min(i + keys - es + 1))
    } else {
        keys
    };
    b.for_(0, end, ITEMS, |j0| {
        let j = b.let_(j0 + me);
        let score = b.var_of(ty, lowest);
        b.if_(j.lt(end), || {
            let dot = b.var_of(ty, 0.0);
            b.for_(0, depth, 1, |c| {
                dot.set(query.load(c).fma(ak.load(b, &[batch, from, j, c]), dot.get()))
            });
            let s = dot.get();
            score.set(match &am {
                Some(m) => s + m.load(b, &[batch, head, i, j]),
                None => s,
            });
        });
        let old = top.get();
        let peak = b.let_(old.max(b.group_reduce(Reduce::Max, score.get(), scratch)));
        // While every key so far is masked out the peak is -inf, and the difference would be NaN.
        let none = peak.equals(b.constant(ty, lowest));
        let zero = b.constant(ty, 0.0);
        let w = b.let_(none.select(zero, (score.get() - peak).exp()));
        let keep = b.let_(none.select(b.constant(ty, 1.0), (old - peak).exp()));
        weights.store(me, w);
        let round = b.group_reduce(Reduce::Add, w, scratch);
        total.set(total.get() * keep + round);
        top.set(peak);
        let here = b.let_((end - j0).min(ITEMS));
        b.for_(me, wide, ITEMS, |c| {
            let slot = b.let_(c.idiv(ITEMS));
            let acc = b.var(sums.load(slot) * keep);
            b.for_(0, here, 1, |p| {
                acc.set(
                    weights
                        .load(p)
                        .fma(av.load(b, &[batch, from, j0 + p, c]), acc.get()),
                )
            });
            sums.store(slot, acc.get());
        });
        b.barrier();
    });
    let sum = total.get();
    b.for_(me, wide, ITEMS, |c: E<'_>| {
        let v = sums.load(c.idiv(ITEMS));
        ao.store(b, &[batch, head, i, c], v / sum);
    });

    let n = q.view.shape[0] * heads * sq;
    t.finish(n as u64, caps.max_groups)
}
