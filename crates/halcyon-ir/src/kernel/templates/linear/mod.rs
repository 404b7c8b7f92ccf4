//! Activations times weights that are stored by rows: `y[i, j] = Σ x[i, k] * w[j, k]`, with weights in floats
//! or in blocks.
//!
//! The kernel is batch-invariant: the order in which an output is summed follows from the row length, the
//! type of the weights and the device. A team of lanes computes one tile of outputs, a few rows by a few
//! columns. Lane `l` sums the units `l`, `l + lanes`, … of weights, each in order, in four partial sums; a
//! unit is what [`Block::strips`](super::blocks::Block::strips) decodes at a time, or eight floats. Then the
//! team adds its sums in a tree. The tile's size only decides how often a loaded value is used: weights are
//! decoded once for all rows, activations are loaded once for all columns. On CPUs, and on devices with too
//! little workgroup memory, a team is one work-item.
//!
//! All products are explicit fused multiply-adds, so that no compiler contracts them in one kernel and not in
//! another.

mod matrix;

use super::blocks::{self, Rows};
use super::common::{arity, declined, items, unmasked};
use super::gather::checked;
use crate::blocks::BlockType;
use crate::composite::CompositeKind;
use crate::kernel::access::Template as Kernel;
use crate::kernel::ir::Ty;
use crate::kernel::lower::{Lowered, Template};
use crate::kernel::{Buf, Builder, E, Var, verify_for};
use crate::ops::{Op, RowMatmulSizes};
use crate::target::{Caps, Declined, Operand};

/// Kernels for the composite `row_matmul`.
pub(crate) static TEMPLATE: Template = Template { lower, tuning: None };

/// Lanes that share an output.
const LANES: u32 = 32;
/// Work-items of a workgroup.
const ITEMS: u32 = 128;
/// Maximum number of rows of a tile.
const ROWS: usize = 8;
/// Maximum number of outputs of a tile.
const OUTPUTS: usize = 8;
/// Floats of a unit.
const UNIT: usize = 8;

/// How a workgroup divides its work.
#[derive(Clone, Copy)]
struct Layout {
    items: u32,
    /// Lanes of a team.
    lanes: u32,
    rows: usize,
    columns: usize,
}

impl Layout {
    /// The lanes depend on the device only; the tile may depend on the number of rows.
    fn choose(rows: usize, caps: &Caps) -> Layout {
        let most = 1 << caps.max_workgroup.max(1).ilog2();
        let n = ITEMS.min(most);
        let rows = rows.next_power_of_two().min(ROWS);
        let scratch = OUTPUTS as u32 * n * 4;
        if caps.is_cpu || n < LANES || scratch > caps.workgroup_memory {
            let n = items(if caps.is_cpu { 8 } else { 64 }, caps);
            return Layout { items: n, lanes: 1, rows, columns: 1 };
        }
        Layout { items: n, lanes: LANES, rows, columns: (OUTPUTS / rows).min(2) }
    }

    fn teams(&self) -> usize {
        (self.items / self.lanes) as usize
    }
}

/// Sizes and operands of a call.
struct Problem<'o> {
    m: usize,
    n: usize,
    k: usize,
    blocks: Option<BlockType>,
    /// Whether activations keep at least 15 bits.
    fine: bool,
    x: &'o Operand,
    w: &'o Operand,
    which: Option<&'o Operand>,
    out: &'o Operand,
}

/// Lowers the composite `row_matmul`: activations f32 `[m, k]`; weights `[n, k]`, or bytes of blocks;
/// optionally the number of a matrix for each row, and weights with an axis of matrices in front.
///
/// # Errors
/// Declines with `needs_dense` if the rows of the activations or of the weights are not contiguous.
fn lower(op: &Op, inputs: &[Operand], outputs: &[Operand], caps: &Caps) -> Result<Lowered, Declined> {
    let c = match op {
        Op::Composite(c) if c.kind == CompositeKind::RowMatmul => c,
        _ => return Err(Declined::because(format!("another op: {}", op.name()))),
    };
    arity(&op.name(), inputs, outputs, 2..=3)?;
    unmasked(inputs)?;
    let Some(RowMatmulSizes { m, n, k, matrices }) = c.row_matmul_sizes(inputs, outputs) else {
        return Err(Declined::because("row_matmul: the operands have other types or shapes"));
    };
    let contiguous = |o: &Operand| {
        let last = o.view.rank() - 1;
        o.view.shape[last] <= 1 || o.view.strides[last] == 1
    };
    let bad: Vec<usize> = (0..2).filter(|i| !contiguous(&inputs[*i])).collect();
    if !bad.is_empty() {
        return Err(Declined::needs_dense(bad));
    }
    let (x, w, out) = (&inputs[0], &inputs[1], &outputs[0]);
    let which = inputs.get(2);
    if matrices == 0 {
        return Err(Declined::because("there are no matrices"));
    }
    let (blocks, fine) = (c.weight_blocks(), c.fine_activations());
    let p = Problem { m, n, k, blocks, fine, x, w, which, out };
    if let Some(made) = matrix::lower(&p, caps) {
        return made;
    }
    // Rows with matrices of their own share no weights.
    let l = Layout::choose(if which.is_some() { 1 } else { m }, caps);
    p.build(l, caps)
}

impl Problem<'_> {
    fn build(&self, l: Layout, caps: &Caps) -> Result<Lowered, Declined> {
        let operands: Vec<&Operand> =
            [self.x, self.w].into_iter().chain(self.which).chain([self.out]).collect();
        let name = if self.which.is_some() { "row_matmul_of" } else { "row_product" };
        let t = Kernel::new(name, l.items, &operands);
        self.write(&t, l);
        let tiles = self.m.div_ceil(l.rows) * self.n.div_ceil(l.teams() * l.columns);
        let (k, launch) = t.finish(tiles as u64, caps.max_groups).map_err(declined)?;
        verify_for(&k, caps).map_err(declined)?;
        Ok(Lowered { steps: vec![(k, launch, (0..operands.len()).collect())], temps: vec![] })
    }

    /// Units of a row.
    fn units(&self) -> usize {
        match self.blocks {
            Some(ty) => self.k / ty.row().elements * blocks::units(ty),
            None => self.k.div_ceil(UNIT),
        }
    }

    fn write(&self, t: &Kernel, l: Layout) {
        let b = &t.b;
        let x = Activations::declare(t, self.x, self.k);
        let w = Weights::declare(t, self);
        let which = self.which.map(|o| t.input(o));
        let y = t.output(self.out);
        let fault = self.which.map(|_| (b.fault(), t.size("matrices", self.w.view.shape[0])));
        let (m, n) = (t.size("m", self.m), t.size("n", self.n));
        let units = t.size("units", self.units());
        let row_tiles = b.let_(m.div_ceil(l.rows));
        let columns = l.teams() * l.columns;
        let tiles = b.let_(row_tiles * n.div_ceil(columns));
        let g = b.let_(b.linear_group());
        let lid = b.local_id(0);
        let (team, lane) = (b.let_(lid.idiv(l.lanes)), b.let_(lid.imod(l.lanes)));
        // Row tiles of the same columns follow one another, so that weights stay in the caches.
        let i0 = b.let_(g.imod(row_tiles) * l.rows);
        let j0 = b.let_((g.idiv(row_tiles) * l.teams() + team) * l.columns);
        // Rows and columns past the end repeat the last ones; their stores are skipped.
        let rows: Vec<E<'_>> = (0..l.rows).map(|r| b.let_((i0 + r).min(m - 1))).collect();
        let matrix = which
            .zip(fault)
            .map(|(which, (fault, matrices))| checked(b, which.load(b, &[rows[0]]), matrices, fault));
        let starts: Vec<E<'_>> = (0..l.columns).map(|c| w.start(b, matrix, (j0 + c).min(n - 1))).collect();
        let acc: Vec<Vec<Var<'_>>> =
            (0..l.columns).map(|_| rows.iter().map(|_| b.var_of(Ty::F32x4, 0.0)).collect()).collect();
        let lines: Vec<E<'_>> = rows.iter().map(|r| x.line(b, *r)).collect();
        b.for_(lane, t.work(tiles, units), l.lanes, |u| w.add(b, u, &starts, (&x, &lines), &acc));
        let sums: Vec<E<'_>> = acc.iter().flatten().map(|a| b.let_(across(a.get()))).collect();
        let inside = |r: usize, c: usize| g.lt(tiles).and((i0 + r).lt(m)).and((j0 + c).lt(n));
        let store = |i: usize, v: E<'_>| {
            let (c, r) = (i / l.rows, i % l.rows);
            b.if_(inside(r, c), || y.store(b, &[i0 + r, j0 + c], v));
        };
        if l.lanes == 1 {
            sums.into_iter().enumerate().for_each(|(i, v)| store(i, v));
            return;
        }
        let scratch = b.local(Ty::F32, sums.len() as u32 * l.items);
        let place = |i: usize| lid + i * l.items as usize;
        sums.iter().enumerate().for_each(|(i, v)| scratch.store(place(i), *v));
        b.barrier();
        b.for_(0, l.lanes.ilog2(), 1, |s| {
            let step = b.let_(b.constant(Ty::U32, l.lanes / 2).shr(s.to(Ty::U32)).to(b.ix()));
            b.if_(lane.lt(step), || {
                for i in 0..sums.len() {
                    scratch.store(place(i), scratch.load(place(i)) + scratch.load(place(i) + step));
                }
            });
            b.barrier();
        });
        b.if_(lane.equals(0), || (0..sums.len()).for_each(|i| store(i, scratch.load(place(i)))));
    }
}

/// The sum of the lanes of a vector.
fn across(v: E<'_>) -> E<'_> {
    (v.lane(0) + v.lane(1)) + (v.lane(2) + v.lane(3))
}

/// Four elements of a row of an f32 operand, or of a type that is computed in f32.
struct Activations<'a> {
    buf: Buf,
    offset: E<'a>,
    stride: E<'a>,
    /// The length of a row, if it may end within four elements.
    end: Option<E<'a>>,
    /// Whether four elements are loaded at once.
    vectors: bool,
}

impl<'a> Activations<'a> {
    fn declare(t: &'a Kernel, x: &Operand, k: usize) -> Activations<'a> {
        let v = &x.view;
        let vectors = v.offset % 4 == 0 && k.is_multiple_of(4) && (v.shape[0] == 1 || v.strides[0] % 4 == 0);
        let buf = t.b.raw_buffer(x.dtype, false);
        let (offset, stride) = (t.size("xo", v.offset as i64), t.size("xs", v.strides[0] as i64));
        let end = (!k.is_multiple_of(UNIT)).then(|| t.size("k", k));
        Activations { buf, offset, stride, end, vectors }
    }

    /// Where a row starts, in vectors or elements.
    fn line(&self, b: &'a Builder, row: E<'a>) -> E<'a> {
        let at = self.offset + row * self.stride;
        b.let_(if self.vectors { at.idiv(4) } else { at })
    }

    /// Four elements from `k` on, a multiple of 4. Elements past the row's end are zero.
    fn load(&self, b: &'a Builder, line: E<'a>, k: E<'a>) -> E<'a> {
        match (self.vectors, self.end) {
            (true, None) => b.load_vector(self.buf, Ty::F32x4, line + k.idiv(4)),
            (true, Some(end)) => b.load_vector_if(self.buf, Ty::F32x4, line + k.idiv(4), k.lt(end)),
            _ => b.let_(b.vector(&elements(b, self.buf, line, k, self.end))),
        }
    }
}

/// Four elements from `k` on of the row that starts at `line`. Elements past the row's end are zero.
fn elements<'a>(b: &'a Builder, buf: Buf, line: E<'a>, k: E<'a>, end: Option<E<'a>>) -> [E<'a>; 4] {
    [0, 1, 2, 3].map(|e| match end {
        Some(end) => b.load_if(buf, line + k + e, (k + e).lt(end)),
        None => b.load(buf, line + k + e),
    })
}

/// The weights of a kernel.
enum Weights<'a> {
    Blocks {
        ty: BlockType,
        rows: Rows<'a>,
    },
    Floats {
        buf: Buf,
        /// Strides of the leading axes.
        strides: Vec<E<'a>>,
        /// As in [`Activations`].
        end: Option<E<'a>>,
        /// Whether a unit is loaded at once.
        runs: bool,
    },
}

impl<'a> Weights<'a> {
    fn declare(t: &'a Kernel, p: &Problem<'_>) -> Weights<'a> {
        let v = &p.w.view;
        let lead = v.rank() - 1;
        if let Some(ty) = p.blocks {
            return Weights::Blocks { ty, rows: Rows::declare(t, "w", ty, p.w) };
        }
        let run = (16 / p.w.dtype.size()) as isize;
        let placed = |k: usize| v.shape[k] == 1 || v.strides[k] % run == 0;
        let runs = p.k.is_multiple_of(UNIT) && v.offset % run == 0 && (0..lead).all(placed);
        let buf = t.b.buffer(p.w.dtype, false);
        t.value(&format!("o{}", buf.id.0), v.offset as i64);
        let strides = (0..lead).map(|k| t.size(&format!("ws{k}"), v.strides[k] as i64)).collect();
        let end = (!p.k.is_multiple_of(UNIT)).then(|| t.size("wk", p.k));
        Weights::Floats { buf, strides, end, runs }
    }

    /// Where the row of a column starts, in bytes or elements.
    fn start(&self, b: &'a Builder, matrix: Option<E<'a>>, j: E<'a>) -> E<'a> {
        let at: Vec<E<'a>> = matrix.into_iter().chain([j]).collect();
        match self {
            Weights::Blocks { rows, .. } => rows.row(&at),
            Weights::Floats { strides, .. } => {
                let terms = at.iter().zip(strides).map(|(i, s)| *i * *s);
                b.let_(terms.reduce(|a, t| a + t).unwrap_or(j))
            }
        }
    }

    /// Adds the products of unit `u` to the sums: `acc[c][r]` is the sum of column `c` and row `r`.
    fn add(
        &self,
        b: &'a Builder,
        u: E<'a>,
        starts: &[E<'a>],
        x: (&Activations<'a>, &[E<'a>]),
        acc: &[Vec<Var<'a>>],
    ) {
        match self {
            Weights::Blocks { ty, rows } => add_blocks(b, (*ty, rows), u, starts, x, acc),
            Weights::Floats { buf, end, runs, .. } => {
                let k = b.let_(u * UNIT);
                let quads: Vec<[E<'a>; 2]> = starts
                    .iter()
                    .map(|s| match runs {
                        true => {
                            let v = b.load_run(*buf, *s + k, UNIT as u32);
                            [&v[..4], &v[4..]].map(|v| b.let_(b.vector(v)))
                        }
                        false => [0, 4].map(|e| b.let_(b.vector(&elements(b, *buf, *s, k + e, *end)))),
                    })
                    .collect();
                for q in 0..2 {
                    for (r, line) in x.1.iter().enumerate() {
                        let x = x.0.load(b, *line, k + 4 * q);
                        for (quads, acc) in quads.iter().zip(acc) {
                            acc[r].set(quads[q].fma(x, acc[r].get()));
                        }
                    }
                }
            }
        }
    }
}

/// [`Weights::add`] for blocks. The products of a strip with the codes are summed first; the scale then
/// multiplies this sum, and the offset the sum of the activations.
fn add_blocks<'a>(
    b: &'a Builder,
    (ty, rows): (BlockType, &Rows<'a>),
    u: E<'a>,
    starts: &[E<'a>],
    (x, lines): (&Activations<'a>, &[E<'a>]),
    acc: &[Vec<Var<'a>>],
) {
    let per = blocks::units(ty) as i64;
    let (block, within) = (b.let_(u.idiv(per)), b.let_(u.imod(per)));
    let all: Vec<_> = starts.iter().map(|s| rows.block(*s, block).strips(within)).collect();
    let zero = b.constant(Ty::F32x4, 0.0);
    for s in 0..all[0].len() {
        let k = b.let_(block * ty.row().elements as i64 + all[0][s].first);
        let mut sums = vec![vec![zero; lines.len()]; starts.len()];
        let mut plain = vec![zero; lines.len()];
        for i in 0..all[0][s].words.len() {
            let codes: Vec<E<'a>> = all.iter().map(|c| b.let_(c[s].codes(b, i))).collect();
            for (r, line) in lines.iter().enumerate() {
                let v = x.load(b, *line, k + 4 * i);
                for (sums, codes) in sums.iter_mut().zip(&codes) {
                    sums[r] = b.let_(codes.fma(v, sums[r]));
                }
                if all[0][s].offset.is_some() {
                    plain[r] = b.let_(plain[r] + v);
                }
            }
        }
        for ((strips, sums), acc) in all.iter().zip(&sums).zip(acc) {
            let strip = &strips[s];
            for (r, acc) in acc.iter().enumerate() {
                let sum = strip.scale.to(Ty::F32x4).fma(sums[r], acc.get());
                acc.set(match strip.offset {
                    Some(o) => o.to(Ty::F32x4).fma(plain[r], sum),
                    None => sum,
                });
            }
        }
    }
}
