//! The tiled kernel, for large products on GPUs without matrix units.

use super::super::common::*;
use super::Cx;
use super::problem::{Problem, Shape, fill};
use crate::kernel::Builder;
use crate::kernel::ir::Ty;
use crate::kernel::lower::Lowered;
use crate::target::{Caps, Declined};

/// Parameters of the tiled kernel.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct Tile {
    /// The workgroup has `side * side` work-items.
    pub side: u32,
    /// Each work-item computes `each * each` outputs.
    pub each: u32,
    /// Number of elements of K per iteration.
    pub depth: u32,
}

impl Tile {
    pub(super) fn choose(p: &Problem, caps: &Caps, ty: Ty) -> Option<Tile> {
        let side = match caps.max_workgroup {
            256.. => 16,
            64.. => 8,
            _ => return None,
        };
        let groups = |edge: u32| p.m.div_ceil(edge as usize) * p.n.div_ceil(edge as usize) * p.batches();
        // Use smaller tiles if large ones would leave compute units idle.
        let each = if groups(side * 4) >= 2 * caps.units() { 4 } else { 2 };
        let t = Tile { side, each, depth: 16 };
        (t.words() as usize * ty.size() <= caps.workgroup_memory as usize).then_some(t)
    }

    fn edge(self) -> u32 {
        self.side * self.each
    }

    pub(super) fn words(self) -> u32 {
        2 * self.depth * (self.edge() + 1)
    }
}

impl Cx<'_> {
    /// The kernel loads tiles of both operands into workgroup memory. Each work-item computes several
    /// outputs. Consecutive work-items read along the axis that is contiguous in memory.
    pub(super) fn tiled(&self, p: &Problem, mut args: Args, t: Tile) -> Result<Lowered, Declined> {
        let (class, edge, n_items) = (p.rank_class(), t.edge(), t.side * t.side);
        let along_k = (p.ak.abs() <= p.am.abs(), p.bk.abs() <= p.bn.abs());
        let b = Builder::with_index("matmul_tiled", [n_items, 1, 1], self.ix);
        let (a, w, y) = self.buffers(&b);
        let s = Shape::declare(&b, class);
        // One element of padding per row avoids bank conflicts between the writes of a column.
        let pitch = edge + 1;
        let (ta, tb) = (b.local(self.ty(), t.depth * pitch), b.local(self.ty(), t.depth * pitch));
        let (gm, gn) = (b.let_(s.m.div_ceil(edge)), b.let_(s.n.div_ceil(edge)));
        let g = b.let_(b.linear_group());
        b.if_(g.lt(gm * gn * s.batches()), || {
            let lid = b.local_id(0);
            let (tx, ty) = (b.let_(lid.imod(t.side)), b.let_(lid.idiv(t.side)));
            let bt = b.let_(g.idiv(gm * gn));
            let tile = b.let_(g.imod(gm * gn));
            let (i0, j0) = (b.let_(tile.idiv(gn) * edge), b.let_(tile.imod(gn) * edge));
            let (x0, w0) = s.starts(&b, bt);
            let acc: Vec<_> = (0..t.each * t.each).map(|_| b.var_of(self.ty(), 0)).collect();
            b.for_(0, s.k, t.depth, |k0| {
                for step in 0..(edge * t.depth).div_ceil(n_items) {
                    let e = lid + step * n_items;
                    let place = |fast_k: bool| match fast_k {
                        true => (e.idiv(t.depth), e.imod(t.depth)),
                        false => (e.imod(edge), e.idiv(edge)),
                    };
                    let (r, c) = place(along_k.0);
                    let (i, k) = (i0 + r, k0 + c);
                    let v = b.load_if(a, x0 + i * s.am + k * s.ak, i.lt(s.m).and(k.lt(s.k)));
                    ta.store(c * pitch + r, v);
                    let (r, c) = place(along_k.1);
                    let (j, k) = (j0 + r, k0 + c);
                    let v = b.load_if(w, w0 + j * s.bn + k * s.bk, j.lt(s.n).and(k.lt(s.k)));
                    tb.store(c * pitch + r, v);
                }
                b.barrier();
                b.for_(0, t.depth, 1, |k| {
                    let at = b.let_(k * pitch);
                    let x: Vec<_> = (0..t.each).map(|i| ta.load(at + ty + i * t.side)).collect();
                    let v: Vec<_> = (0..t.each).map(|j| tb.load(at + tx + j * t.side)).collect();
                    for (q, acc) in acc.iter().enumerate() {
                        let (i, j) = (q / t.each as usize, q % t.each as usize);
                        acc.set(x[i].mul_add(v[j], acc.get()));
                    }
                });
                b.barrier();
            });
            for (q, acc) in acc.iter().enumerate() {
                let (i, j) = (q as u32 / t.each, q as u32 % t.each);
                let (i, j) = (i0 + ty + i * t.side, j0 + tx + j * t.side);
                b.if_(i.lt(s.m).and(j.lt(s.n)), || {
                    b.store(y, (bt * s.m + i) * s.n + j, acc.get());
                });
            }
        });
        fill(&mut args, p, class);
        let edge = edge as usize;
        let groups = p.m.div_ceil(edge) * p.n.div_ceil(edge) * p.batches();
        single(b, &args, groups, self.caps)
    }
}
