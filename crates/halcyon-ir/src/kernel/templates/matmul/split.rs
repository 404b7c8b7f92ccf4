//! The split kernel, for products with few rows or columns on GPUs: a workgroup splits each sum over its
//! work-items.

use super::super::common::*;
use super::Cx;
use super::problem::{Problem, Shape, fill};
use crate::kernel::lower::Lowered;
use crate::kernel::{Builder, E, Local};
use crate::target::Declined;

/// The partial sums of a workgroup in its memory: for each of a work-item's `count` sums, `slices` times
/// `columns` values.
struct Sums<'a> {
    memory: Local<'a>,
    count: u32,
    slices: u32,
    columns: u32,
}

impl<'a> Sums<'a> {
    /// Adds the slices pairwise, in a tree. Slice 0 then holds the sums. The work-item is at `slice` and
    /// column `c`.
    fn add(&self, b: &'a Builder, slice: E<'a>, c: E<'a>) {
        let mut half = self.slices / 2;
        while half > 0 {
            b.if_(slice.lt(half), || {
                for q in 0..self.count {
                    let at = slice * self.columns + c + q * (self.slices * self.columns);
                    let other = at + half * self.columns;
                    let sum = self.memory.load(at) + self.memory.load(other);
                    self.memory.store(at, sum);
                }
            });
            b.barrier();
            half /= 2;
        }
    }
}

impl Cx<'_> {
    /// Whether the product has so few rows or columns that the split kernel computes it.
    pub(super) fn few(&self, p: &Problem) -> bool {
        p.m.min(p.n) <= 8 && p.k >= 64 && self.caps.max_workgroup >= 64
    }

    /// Whether the right operand of the split kernel, after [`Cx::transposed`], has its smaller stride along
    /// K. Consecutive work-items then read along K.
    pub(super) fn split_along_k(p: &Problem) -> bool {
        if p.m > p.n { p.ak.abs() <= p.am.abs() } else { p.bk.abs() <= p.bn.abs() }
    }

    /// The product that the split kernel computes, and the offset of its right operand. A product with few
    /// columns is transposed, so that it has few rows.
    pub(super) fn transposed(&self, p: &Problem) -> (Problem, isize) {
        if p.m > p.n { (p.transposed(), self.offsets[0]) } else { (p.clone(), self.offsets[1]) }
    }

    /// Consecutive elements of the right operand that a work-item of the split kernel reads at a time: 16
    /// bytes, or one element.
    pub(super) fn run(&self, p: &Problem, offset: isize) -> u32 {
        let along_k = p.bk.abs() <= p.bn.abs();
        let (fast, slow, extent) = if along_k { (p.bk, p.bn, p.k) } else { (p.bn, p.bk, p.n) };
        let each = self.runs(fast, slow, extent, &p.bb, offset);
        // The partial sums of several columns need workgroup memory.
        let words = if p.m == 1 { 256 } else { 1024 } * each as usize;
        let fits = along_k || words * self.ty().size() <= self.caps.workgroup_memory as usize;
        if fits { each } else { 1 }
    }

    /// Elements in 16 bytes if an operand with these strides can be read 16 bytes at a time, else 1.
    fn runs(&self, fast: isize, slow: isize, extent: usize, batch: &[isize], offset: isize) -> u32 {
        let each = (16 / self.dtype.size()) as isize;
        let whole = |n: isize| n % each == 0;
        let placed =
            whole(slow) && whole(offset) && whole(extent as isize) && batch.iter().all(|s| whole(*s));
        if self.dtype.size() <= 4 && fast == 1 && placed { each as u32 } else { 1 }
    }

    /// The kernel for few rows. A workgroup computes some columns of up to four rows and splits each sum over
    /// its work-items. If `flipped` is set, `p` is the transpose of the op's product, so the operand buffers
    /// are swapped.
    pub(super) fn split(
        &self,
        p: &Problem,
        mut args: Args,
        flipped: bool,
        n_items: u32,
        columns: u32,
    ) -> Result<Lowered, Declined> {
        let class = p.rank_class();
        let along_k = p.bk.abs() <= p.bn.abs();
        let (slices, rows) = (n_items / columns, if p.m == 1 { 1u32 } else { 4 });
        let [x_offset, w_offset] = if flipped { [1, 0] } else { [0, 1] }.map(|i: usize| self.offsets[i]);
        let run = self.run(p, w_offset);
        // Columns per work-item.
        let each = if along_k { 1 } else { run };
        let x_runs = along_k && run > 1 && self.runs(p.ak, p.am, p.k, &p.ab, x_offset) > 1;
        let b = Builder::with_index("matmul_split", [n_items, 1, 1], self.ix);
        let (a, w, y) = self.buffers(&b);
        let (a, w) = if flipped { (w, a) } else { (a, w) };
        let s = Shape::declare(&b, class);
        let (ym, yn) = (b.size("ym"), b.size("yn"));
        let scratch = b.local(self.ty(), rows * each * n_items);
        let (gm, gn) = (b.let_(s.m.div_ceil(rows)), b.let_(s.n.div_ceil(columns * each)));
        let g = b.let_(b.linear_group());
        b.if_(g.lt(gm * gn * s.batches()), || {
            let lid = b.local_id(0);
            // Consecutive work-items read along the contiguous axis of the right operand.
            let (c, slice) = match along_k {
                true => (b.let_(lid.idiv(slices)), b.let_(lid.imod(slices))),
                false => (b.let_(lid.imod(columns)), b.let_(lid.idiv(columns))),
            };
            let bt = b.let_(g.idiv(gm * gn));
            let tile = b.let_(g.imod(gm * gn));
            let (i0, j) = (b.let_(tile.idiv(gn) * rows), b.let_((tile.imod(gn) * columns + c) * each));
            let (x0, w0) = s.starts(&b, bt);
            let w0 = b.let_(w0 + j * s.bn);
            let acc: Vec<_> = (0..rows * each).map(|_| b.var_of(self.ty(), 0)).collect();
            // Rows past the end recompute the last row; their stores are skipped.
            let row = |r: u32| if rows == 1 { x0 } else { x0 + (i0 + r).min(s.m - 1) * s.am };
            b.if_(j.lt(s.n), || {
                if run > 1 && along_k {
                    b.for_(slice * run, s.k, slices * run, |k| {
                        let v = b.load_run(w, w0 + k, run);
                        for (r, acc) in acc.iter().enumerate() {
                            let at = row(r as u32);
                            let x = match x_runs {
                                true => b.load_run(a, at + k, run),
                                false => (0..run).map(|e| b.load(a, at + (k + e) * s.ak)).collect(),
                            };
                            acc.set(x.iter().zip(&v).fold(acc.get(), |sum, (x, v)| x.mul_add(*v, sum)));
                        }
                    });
                    return;
                }
                if run > 1 {
                    b.for_(slice, s.k, slices, |k| {
                        let v = b.load_run(w, w0 + k * s.bk, run);
                        for (r, acc) in acc.chunks(run as usize).enumerate() {
                            let x = b.load(a, row(r as u32) + k * s.ak);
                            acc.iter().zip(&v).for_each(|(acc, v)| acc.set(x.mul_add(*v, acc.get())));
                        }
                    });
                    return;
                }
                b.for_(slice, s.k, slices, |k| {
                    let v = b.load(w, w0 + k * s.bk);
                    for (r, acc) in acc.iter().enumerate() {
                        let i = i0 + r;
                        let x = b.load_if(a, x0 + i * s.am + k * s.ak, i.lt(s.m));
                        acc.set(x.mul_add(v, acc.get()));
                    }
                });
            });
            for (r, acc) in acc.iter().enumerate() {
                scratch.store(slice * columns + c + r as u32 * n_items, acc.get());
            }
            b.barrier();
            let sums = Sums { memory: scratch, count: rows * each, slices, columns };
            sums.add(&b, slice, c);
            b.if_(slice.equals(0).and(j.lt(s.n)), || {
                for r in 0..rows {
                    let i = i0 + r;
                    b.if_(i.lt(s.m), || {
                        for e in 0..each {
                            let v = scratch.load(c + (r * each + e) * n_items);
                            b.store(y, bt * (s.m * s.n) + i * ym + (j + e) * yn, v);
                        }
                    });
                }
            });
        });
        fill(&mut args, p, class);
        args.int("ym", p.ym as i64).int("yn", p.yn as i64);
        let groups = p.m.div_ceil(rows as usize) * p.n.div_ceil((columns * each) as usize) * p.batches();
        single(b, &args, groups, self.caps)
    }
}
