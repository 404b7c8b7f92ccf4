//! The kernel for CPUs, and for GPUs that can run no other kernel: one query per work-item.

use super::super::common::*;
use super::problem::Io;
use super::running::Running;
use super::{Cx, NEG_INF};
use crate::kernel::Builder;
use crate::kernel::lower::Lowered;
use crate::target::Declined;

impl Cx<'_> {
    /// Each work-item computes one query. It reads the keys in blocks of `block`, and accumulates the product
    /// of a key with the query in `block` partial sums.
    pub(super) fn by_item(&self, args: Args, wg: u32, block: u32) -> Result<Lowered, Declined> {
        let b = Builder::with_index("attention_item", [wg, 1, 1], self.ix);
        let io = Io::declare(&b, self);
        let (acc, weight) = (b.private(self.ty, self.p.width), b.private(self.ty, block));
        let lanes = b.private(self.ty, block);
        let at = b.linear_id();
        let rows = b.let_(io.shared * io.sq);
        b.if_(at.lt(io.bh * rows), || {
            let bk = b.let_(at.idiv(rows));
            let q = io.query(bk, b.let_(at.imod(rows)));
            let (k0, v0) = io.heads(bk);
            let run = Running::new(&b, self.ty);
            b.for_(0, io.d, 1, |j| acc.store(j, 0));
            let whole = b.let_(io.d.idiv(block) * block);
            b.for_(0, q.keys, block, |first| {
                let count = b.let_((q.keys - first).min(block));
                let top = b.var_of(self.ty, NEG_INF);
                b.for_(0, count, 1, |c| {
                    let row = b.let_(k0 + (first + c) * io.ks[2]);
                    let dot = b.var_of(self.ty, 0);
                    b.for_(0, block, 1, |l| lanes.store(l, 0));
                    b.for_(0, whole, block, |j| {
                        b.for_(0, block, 1, |l| {
                            let (x, y) = (b.load(io.q, q.q + j + l), b.load(io.k, row + j + l));
                            lanes.store(l, x.mul_add(y, lanes.load(l)));
                        });
                    });
                    b.for_(whole, io.d, 1, |j| {
                        let (x, y) = (b.load(io.q, q.q + j), b.load(io.k, row + j));
                        dot.set(x.mul_add(y, dot.get()));
                    });
                    b.for_(0, block, 1, |l| dot.set(dot.get() + lanes.load(l)));
                    let s = io.score(&q, first + c, dot.get());
                    weight.store(c, s);
                    top.set(top.get().max(s));
                });
                let (shift, decay) = run.raise(top.get());
                b.for_(0, io.d, 1, |j| acc.store(j, acc.load(j) * decay));
                b.for_(0, count, 1, |c| {
                    let w = b.let_((weight.load(c) - shift).exp());
                    run.add(w);
                    let row = b.let_(v0 + (first + c) * io.vs[2]);
                    b.for_(0, io.d, 1, |j| {
                        let v = b.load(io.v, row + j);
                        acc.store(j, w.mul_add(v, acc.load(j)));
                    });
                });
            });
            let sum = b.let_(run.sum.get());
            b.for_(0, io.d, 1, |j| b.store(io.y, q.y + j, acc.load(j) / sum));
        });
        single(b, &args, self.queries().div_ceil(wg as usize), self.caps)
    }
}
