//! Batched matrix products over strided operands: `[b…, m, k] × [b…, k, n] → [b…, m, n]`.

use super::template::{GROUP, Template, multiply_add};
use super::{E, Kernel, Launch, Reduce, Ty, Var};
use crate::error::Result;
use crate::target::{Caps, Operand};

/// Work-items along each side of a group of the tiled kernel, elements each computes along a side, and depth of a tile.
const SIDE: u32 = 16;
const EACH: u32 = 4;
const DEPTH: u32 = 16;

/// Chooses by shape: tiles in workgroup memory for large products, one group per result for long dot products with few
/// results, else one work-item per result. Sums are in the compute type.
pub(super) fn build(a: &Operand, b: &Operand, out: &Operand, caps: &Caps) -> Result<(Kernel, Launch)> {
    let r = out.view.rank();
    let (m, n, k) = (out.view.shape[r - 2], out.view.shape[r - 1], a.view.shape[r - 1]);
    let results = out.view.numel();
    let tile_bytes = (2 * DEPTH * SIDE * EACH) as usize * Ty::of(out.dtype).size();
    if m >= 16 && n >= 16 && caps.max_workgroup >= SIDE * SIDE && tile_bytes <= caps.workgroup_memory as usize
    {
        tiled(a, b, out, caps)
    } else if k >= 256 && results <= 1 << 14 && b.view.strides[r - 2] == 1 && a.view.strides[r - 1] == 1 {
        rows(a, b, out, caps)
    } else {
        naive(a, b, out, caps)
    }
}

/// One work-item per result.
fn naive(a: &Operand, b: &Operand, out: &Operand, caps: &Caps) -> Result<(Kernel, Launch)> {
    let t = Template::new("matmul_item", GROUP, &[a, b, out]);
    let (d, r) = (out.dtype, out.view.rank());
    let (x, y, z) = (t.input(a), t.input(b), t.output(out));
    let k = t.size("k", a.view.shape[r - 1]);
    let groups = t.points(&out.view.shape, |_, idx| {
        let bl = &t.b;
        let acc = bl.var_of(Ty::of(d), 0);
        bl.for_(0, k, 1, |p| {
            let (i, j) = ends(idx, p);
            acc.set(multiply_add(bl, d, x.load(bl, &i), y.load(bl, &j), acc.get()));
        });
        z.store(bl, idx, acc.get());
    });
    t.finish(groups, caps.max_groups)
}

/// Index into the left and right operand of the result at `idx`, position `p` of the sum.
fn ends<'a>(idx: &[E<'a>], p: E<'a>) -> (Vec<E<'a>>, Vec<E<'a>>) {
    let r = idx.len();
    let (mut i, mut j) = (idx.to_vec(), idx.to_vec());
    i[r - 1] = p;
    j[r - 2] = p;
    (i, j)
}

/// One group per result: work-items stride through the sum.
fn rows(a: &Operand, b: &Operand, out: &Operand, caps: &Caps) -> Result<(Kernel, Launch)> {
    let t = Template::new("matmul_row", GROUP, &[a, b, out]);
    let (d, r) = (out.dtype, out.view.rank());
    let (x, y, z) = (t.input(a), t.input(b), t.output(out));
    let k = t.size("k", a.view.shape[r - 1]);
    let count = t.size("n", out.view.numel());
    let dims = t.sizes("d", &out.view.shape);
    let bl = &t.b;
    let scratch = bl.local(Ty::of(d), GROUP);
    let g = bl.let_(bl.linear_group());
    let todo = t.work(count, k);
    let idx = t.split(g, &dims);
    let acc = bl.var_of(Ty::of(d), 0);
    bl.for_(bl.local_id(0), todo, GROUP, |p| {
        let (i, j) = ends(&idx, p);
        acc.set(multiply_add(bl, d, x.load(bl, &i), y.load(bl, &j), acc.get()));
    });
    let sum = bl.group_reduce(Reduce::Add, acc.get(), scratch);
    bl.if_(bl.local_id(0).equals(0).and(g.lt(count)), || {
        z.store(bl, &idx, sum)
    });

    t.finish(out.view.numel() as u64, caps.max_groups)
}

/// Square tiles: each group computes `SIDE * EACH` rows and columns, a slice of `DEPTH` at a time.
fn tiled(a: &Operand, b: &Operand, out: &Operand, caps: &Caps) -> Result<(Kernel, Launch)> {
    let t = Template::new("matmul_tile", SIDE * SIDE, &[a, b, out]);
    let (d, r) = (out.dtype, out.view.rank());
    let ty = Ty::of(d);
    let edge = SIDE * EACH;
    let shape = &out.view.shape;
    let (m, n, k) = (shape[r - 2], shape[r - 1], a.view.shape[r - 1]);
    let batch: usize = shape[..r - 2].iter().product();
    let (x, y, z) = (t.input(a), t.input(b), t.output(out));
    let (em, en, ek) = (t.size("m", m), t.size("n", n), t.size("k", k));
    let dims = t.sizes("d", &shape[..r - 2]);
    let total = t.size("batch", batch);
    let bl = &t.b;
    // Rows are padded by one so that a column's elements lie in different banks.
    let pad = edge + 1;
    let (left, right) = (bl.local(ty, DEPTH * pad), bl.local(ty, DEPTH * pad));
    let me = bl.local_id(0);
    let (row, col) = (me.idiv(SIDE), me.imod(SIDE));
    let (tiles_m, tiles_n) = (em.div_ceil(edge), en.div_ceil(edge));
    let g = bl.let_(bl.linear_group());
    let tiles = bl.let_(tiles_m * tiles_n * total);
    let todo = t.work(tiles, ek);
    let first_col = bl.let_(g.imod(tiles_n) * edge);
    let rest = bl.let_(g.idiv(tiles_n));
    let first_row = bl.let_(rest.imod(tiles_m) * edge);
    let at = t.split(rest.idiv(tiles_m), &dims);
    let acc: Vec<Var<'_>> = (0..EACH * EACH).map(|_| bl.var_of(ty, 0)).collect();
    bl.for_(0, todo, DEPTH, |p0| {
        bl.barrier();
        // Each group loads edge * DEPTH elements of both sides; neighbours in memory go to neighbouring items
        // where the innermost stride is 1.
        bl.for_(me, edge * DEPTH, SIDE * SIDE, |e| {
            let (i, p) = if a.view.strides[r - 1] == 1 {
                (e.idiv(DEPTH), e.imod(DEPTH))
            } else {
                (e.imod(edge), e.idiv(edge))
            };
            let mut idx = at.clone();
            idx.extend([first_row + i, p0 + p]);
            let inside = (first_row + i).lt(em).and((p0 + p).lt(ek));
            left.store(p * pad + i, x.load_if(bl, &idx, inside));
            let (j, p) = if b.view.strides[r - 2] == 1 && b.view.strides[r - 1] != 1 {
                (e.idiv(DEPTH), e.imod(DEPTH))
            } else {
                (e.imod(edge), e.idiv(edge))
            };
            let mut idx = at.clone();
            idx.extend([p0 + p, first_col + j]);
            let inside = (first_col + j).lt(en).and((p0 + p).lt(ek));
            right.store(p * pad + j, y.load_if(bl, &idx, inside));
        });
        bl.barrier();
        bl.for_(0, DEPTH, 1, |p| {
            let base = bl.let_(p * pad);
            let u: Vec<E<'_>> = (0..EACH).map(|i| left.load(base + row + i * SIDE)).collect();
            let v: Vec<E<'_>> = (0..EACH).map(|j| right.load(base + col + j * SIDE)).collect();
            for (c, acc) in acc.iter().enumerate() {
                let (i, j) = (c / EACH as usize, c % EACH as usize);
                acc.set(multiply_add(bl, d, u[i], v[j], acc.get()));
            }
        });
    });
    for (c, acc) in acc.iter().enumerate() {
        let (i, j) = (c as u32 / EACH, c as u32 % EACH);
        let (i, j) = (first_row + row + i * SIDE, first_col + col + j * SIDE);
        let mut idx = at.clone();
        idx.extend([i, j]);
        bl.if_(i.lt(em).and(j.lt(en)).and(g.lt(tiles)), || {
            z.store(bl, &idx, acc.get())
        });
    }

    let groups = m.div_ceil(edge as usize) * n.div_ceil(edge as usize) * batch;
    t.finish(groups as u64, caps.max_groups)
}
