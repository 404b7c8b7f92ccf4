//! The block kernel, for CPUs, if rows of the right operand are contiguous.

use super::super::common::*;
use super::Cx;
use super::problem::{Problem, Shape, fill};
use crate::kernel::lower::Lowered;
use crate::kernel::{Builder, E};
use crate::target::Declined;

impl Cx<'_> {
    /// Each work-item computes a block of rows and columns. Inner loops run over consecutive columns, so
    /// compilers vectorise them.
    pub(super) fn block(
        &self,
        p: &Problem,
        mut args: Args,
        rows: u32,
        columns: u32,
        wg: u32,
    ) -> Result<Lowered, Declined> {
        let class = p.rank_class();
        let b = Builder::with_index("matmul_block", [wg, 1, 1], self.ix);
        let (a, w, y) = self.buffers(&b);
        let s = Shape::declare(&b, class);
        let acc = b.private(self.ty(), rows * columns);
        let (gm, gn) = (b.let_(s.m.div_ceil(rows)), b.let_(s.n.div_ceil(columns)));
        let at = b.linear_id();
        b.if_(at.lt(gm * gn * s.batches()), || {
            let (bt, tile) = (b.let_(at.idiv(gm * gn)), b.let_(at.imod(gm * gn)));
            let (i0, j0) = (b.let_(tile.idiv(gn) * rows), b.let_(tile.imod(gn) * columns));
            let (x0, w0) = s.starts(&b, bt);
            let w0 = b.let_(w0 + j0);
            // Rows past the end recompute the last row; their stores are skipped.
            let row: Vec<_> = (0..rows).map(|r| b.let_(x0 + (i0 + r).min(s.m - 1) * s.am)).collect();
            let body = |end: E<'_>| {
                b.for_(0, rows * columns, 1, |q| acc.store(q, 0));
                b.for_(0, s.k, 1, |k| {
                    let from = b.let_(w0 + k * s.bk);
                    let x: Vec<_> = row.iter().map(|r| b.load(a, *r + k * s.ak)).collect();
                    b.for_(0, end, 1, |j| {
                        let v = b.load(w, from + j);
                        for (r, x) in x.iter().enumerate() {
                            let at = j + r as u32 * columns;
                            acc.store(at, x.mul_add(v, acc.load(at)));
                        }
                    });
                });
                for r in 0..rows {
                    b.if_((i0 + r).lt(s.m), || {
                        let to = b.let_((bt * s.m + i0 + r) * s.n + j0);
                        b.for_(0, end, 1, |j| b.store(y, to + j, acc.load(j + r * columns)));
                    });
                }
            };
            let left = b.let_(s.n - j0);
            b.if_else(left.ge(columns), || body(b.index(columns as i64)), || body(left));
        });
        fill(&mut args, p, class);
        let blocks = p.m.div_ceil(rows as usize) * p.n.div_ceil(columns as usize) * p.batches();
        single(b, &args, blocks.div_ceil(wg as usize), self.caps)
    }
}
