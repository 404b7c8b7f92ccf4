//! The simple kernel, for tiny products on any device, and for products that no other kernel can compute.

use super::super::common::*;
use super::Cx;
use super::problem::{Problem, Shape, fill};
use crate::kernel::Builder;
use crate::kernel::lower::Lowered;
use crate::target::Declined;

impl Cx<'_> {
    /// One output per work-item.
    pub(super) fn simple(&self, p: &Problem, mut args: Args, wg: u32) -> Result<Lowered, Declined> {
        let class = p.rank_class();
        let b = Builder::with_index("matmul_simple", [wg, 1, 1], self.ix);
        let (a, w, y) = self.buffers(&b);
        let s = Shape::declare(&b, class);
        let at = b.linear_id();
        b.if_(at.lt(s.batches() * s.m * s.n), || {
            let (row, j) = (b.let_(at.idiv(s.n)), b.let_(at.imod(s.n)));
            let (x0, w0) = s.starts(&b, row.idiv(s.m));
            let (x0, w0) = (b.let_(x0 + row.imod(s.m) * s.am), b.let_(w0 + j * s.bn));
            let acc = b.var_of(self.ty(), 0);
            b.for_(0, s.k, 1, |k| {
                let (x, v) = (b.load(a, x0 + k * s.ak), b.load(w, w0 + k * s.bk));
                acc.set(x.mul_add(v, acc.get()));
            });
            b.store(y, at, acc.get());
        });
        fill(&mut args, p, class);
        single(b, &args, (p.batches() * p.m * p.n).div_ceil(wg as usize), self.caps)
    }
}
