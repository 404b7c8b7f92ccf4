//! The kernel for one or two queries on GPUs without enough workgroup memory for the split kernel.

use super::super::common::*;
use super::Cx;
use super::problem::Io;
use super::running::Running;
use crate::kernel::Builder;
use crate::kernel::ir::Reduce;
use crate::kernel::lower::Lowered;
use crate::target::Declined;

impl Cx<'_> {
    /// One query per workgroup: one key per work-item for the scores, one column per work-item for the sums.
    pub(super) fn by_key(&self, args: Args) -> Result<Lowered, Declined> {
        let n = self.p.width;
        let b = Builder::with_index("attention_key", [n, 1, 1], self.ix);
        let io = Io::declare(&b, self);
        let (query, weight) = (b.local(self.ty, n), b.local(self.ty, n));
        let scratch = b.local(self.ty, n);
        let g = b.let_(b.linear_group());
        let rows = b.let_(io.shared * io.sq);
        b.if_(g.lt(io.bh * rows), || {
            let me = b.local_id(0);
            let bk = b.let_(g.idiv(rows));
            let q = io.query(bk, b.let_(g.imod(rows)));
            let (k0, v0) = io.heads(bk);
            query.store(me, b.load_if(io.q, q.q + me, me.lt(io.d)));
            b.barrier();
            let run = Running::new(&b, self.ty);
            let acc = b.var_of(self.ty, 0);
            b.for_(0, q.keys, n, |first| {
                let key = b.let_(first + me);
                let dot = b.var_of(self.ty, 0);
                b.if_(key.lt(q.keys), || {
                    let row = b.let_(k0 + key * io.ks[2]);
                    b.for_(0, io.d, 1, |j| {
                        dot.set(query.load(j).mul_add(b.load(io.k, row + j), dot.get()));
                    });
                });
                let s = io.score(&q, key, dot.get());
                let (shift, decay) = run.raise(b.group_reduce(Reduce::Max, s, scratch));
                let w = b.let_((s - shift).exp());
                weight.store(me, w);
                // The barriers of the reduction also make the weights visible to all work-items.
                run.add(b.group_reduce(Reduce::Add, w, scratch));
                acc.set(acc.get() * decay);
                b.if_(me.lt(io.d), || {
                    b.for_(0, (q.keys - first).min(n), 1, |c| {
                        let v = b.load(io.v, v0 + (first + c) * io.vs[2] + me);
                        acc.set(weight.load(c).mul_add(v, acc.get()));
                    });
                });
                b.barrier();
            });
            b.if_(me.lt(io.d), || b.store(io.y, q.y + me, acc.get() / run.sum.get()));
        });
        single(b, &args, self.queries(), self.caps)
    }
}
