//! The kernel for CPUs, and for GPUs that can run no other kernel: one row and head per work-item.

use super::{NEG_INF, Problem, Running, declare, shift};
use crate::kernel::access::Template as Kernel;
use crate::kernel::ir::Ty;
use crate::kernel::lower::Lowered;
use crate::kernel::templates::common::{declined, items};
use crate::kernel::verify_for;
use crate::target::{Caps, Declined};

/// Positions of a part.
const PART: u32 = 16;

pub(super) fn lower(p: &Problem<'_>, caps: &Caps) -> Result<Lowered, Declined> {
    let n = items(if caps.is_cpu { 4 } else { 64 }, caps);
    let operands = p.operands();
    let t = Kernel::new("cached_attention_item", n, &operands);
    write(&t, p);
    let groups = (p.rows * p.heads).div_ceil(n as usize) as u64;
    let (k, launch) = t.finish(groups, caps.max_groups).map_err(declined)?;
    verify_for(&k, caps).map_err(declined)?;
    Ok(Lowered { steps: vec![(k, launch, (0..operands.len()).collect())], temps: vec![] })
}

fn write(t: &Kernel, p: &Problem<'_>) {
    let b = &t.b;
    let (io, sinks, y, _) = declare(t, p, false);
    let Some(y) = y else { return };
    let (rows, heads, shared) =
        (t.size("rows", p.rows), t.size("heads", p.heads), t.size("shared", p.shared));
    let [kq, vq] = p.quads();
    let [key_per, per] = p.runs.map(|run| run / 4);
    let query = b.private(Ty::F32x4, kq.max(1));
    let acc = b.private(Ty::F32x4, vq.max(1));
    let weight = b.private(Ty::F32, PART);
    let place = b.private(b.ix(), PART);
    let zero = b.constant(Ty::F32x4, 0.0);
    let at = b.linear_id();
    b.if_(at.lt(rows * heads), || {
        let (r, h) = (b.let_(at.idiv(heads)), b.let_(at.imod(heads)));
        let row = io.row(r);
        let head = b.let_(h.idiv(shared));
        b.for_(0, i64::from(kq), 1, |i| {
            let x = [0, 1, 2, 3].map(|e| {
                let c = i * 4 + e;
                b.load_if(io.q.buf, io.q.at(b, &[r, h, c]), c.lt(io.keys.size))
            });
            query.store(i, b.vector(&x));
        });
        b.for_(0, i64::from(vq), 1, |i| acc.store(i, zero));
        let run = Running::new(b);
        b.for_(row.first.idiv(PART) * PART, row.end, PART, |base| {
            let (first, end) = (b.let_(base.max(row.first)), b.let_((base + PART).min(row.end)));
            let top = b.var_of(Ty::F32, NEG_INF);
            b.for_(first, end, 1, |j| {
                let (key, value) = io.place(&row, head, j);
                place.store(j - base, value);
                let dot = b.var(zero);
                b.for_(0, i64::from(kq), key_per, |i| {
                    for (v, x) in io.keys.load(b, key, b.let_(i * 4)).into_iter().enumerate() {
                        dot.set(query.load(i + v).fma(x, dot.get()));
                    }
                });
                let s = io.score(dot.get());
                weight.store(j - base, s);
                top.set(top.get().max(s));
            });
            let top = b.let_(top.get());
            let shift = shift(b, top);
            let sum = b.var_of(Ty::F32, 0.0);
            b.for_(first, end, 1, |j| {
                let w = b.let_((weight.load(j - base) - shift).exp());
                weight.store(j - base, w);
                sum.set(sum.get() + w);
            });
            let (before, after) = run.join(top, b.let_(sum.get()));
            b.for_(0, i64::from(vq), per, |i| {
                let part: Vec<_> = (0..per).map(|_| b.var(zero)).collect();
                b.for_(first, end, 1, |j| {
                    let w = b.let_(weight.load(j - base).to(Ty::F32x4));
                    let x = io.values.load(b, place.load(j - base), b.let_(i * 4));
                    part.iter().zip(x).for_each(|(part, x)| part.set(w.fma(x, part.get())));
                });
                for (v, part) in part.iter().enumerate() {
                    let old = acc.load(i + v) * before.to(Ty::F32x4);
                    acc.store(i + v, part.get().fma(after.to(Ty::F32x4), old));
                }
            });
        });
        let sink = sinks.as_ref().map(|s| s.load(b, &[h]));
        let (factor, sum) = run.finish(sink);
        b.for_(0, i64::from(vq), 1, |i| {
            let v = b.let_(acc.load(i));
            for e in 0..4 {
                let c = b.let_(i * 4 + i64::from(e));
                let out = row.used.select(v.lane(e) * factor / sum, 0.0);
                b.if_(c.lt(io.values.size), || y.store(b, &[r, h, c], out));
            }
        });
    });
}
