//! The dot kernel. It is for CPUs, if both operands are contiguous along K.

use super::super::common::*;
use super::Cx;
use super::problem::{Problem, Shape, fill};
use crate::kernel::Builder;
use crate::kernel::lower::Lowered;
use crate::target::Declined;

impl Cx<'_> {
    /// Computes one output per work-item, in `width` partial sums, which compilers map to vector lanes.
    pub(super) fn dot(&self, p: &Problem, mut args: Args, width: u32, wg: u32) -> Result<Lowered, Declined> {
        let class = p.rank_class();
        let b = Builder::with_index("matmul_dot", [wg, 1, 1], self.ix);
        let (a, w, y) = self.buffers(&b);
        let s = Shape::declare(&b, class);
        let lanes = b.private(self.ty(), width);
        let at = b.linear_id();
        b.if_(at.lt(s.batches() * s.m * s.n), || {
            let (row, j) = (b.let_(at.idiv(s.n)), b.let_(at.imod(s.n)));
            let (x0, w0) = s.starts(&b, row.idiv(s.m));
            let (x0, w0) = (b.let_(x0 + row.imod(s.m) * s.am), b.let_(w0 + j * s.bn));
            b.for_(0, width, 1, |l| lanes.store(l, 0));
            let whole = b.let_(s.k.idiv(width) * width);
            b.for_(0, whole, width, |k| {
                let (x1, w1) = (b.let_(x0 + k), b.let_(w0 + k));
                b.for_(0, width, 1, |l| {
                    let (x, v) = (b.load(a, x1 + l), b.load(w, w1 + l));
                    lanes.store(l, x.mul_add(v, lanes.load(l)));
                });
            });
            let acc = b.var_of(self.ty(), 0);
            b.for_(whole, s.k, 1, |k| {
                let (x, v) = (b.load(a, x0 + k), b.load(w, w0 + k));
                acc.set(x.mul_add(v, acc.get()));
            });
            b.for_(0, width, 1, |l| acc.set(acc.get() + lanes.load(l)));
            b.store(y, at, acc.get());
        });
        fill(&mut args, p, class);
        single(b, &args, (p.batches() * p.m * p.n).div_ceil(wg as usize), self.caps)
    }
}
