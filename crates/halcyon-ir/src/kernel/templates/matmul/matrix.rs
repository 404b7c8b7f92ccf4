//! Matrix products on matrix units. A workgroup computes a tile of the result; each of its subgroups holds a
//! part of the tile in registers.
//!
//! Each iteration of the loop covers `depth` elements of K. Workgroup memory has two halves, and each half
//! holds the elements of both operands for one iteration. While one half is multiplied, the elements of the
//! next iteration are loaded into registers; then they are stored in the other half. Operands are read 16
//! bytes at a time if the layout allows it (this changes the kernel's text). They keep their memory order.
//! Rows are padded, so that a subgroup's reads have no bank conflicts. Finally the sums are stored in the
//! same memory, from which the result is written in runs of adjacent elements. Sums are f32 throughout and
//! rounded once.

use super::super::common::*;
use super::Cx;
use super::problem::{Problem, Shape, fill};
use crate::dtype::DType;
use crate::kernel::ir::{FragmentId, MatrixOp, Part, Ty};
use crate::kernel::lower::Lowered;
use crate::kernel::tune::Variant;
use crate::kernel::{Buf, Builder, E, Local};
use crate::target::{Caps, Declined, Operand};

/// Parameters of the kernel.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct Tile {
    /// Rows and columns of the tile that a workgroup computes, and number of elements of K per iteration.
    pub m: u32,
    pub n: u32,
    pub depth: u32,
    /// Number of subgroups along the rows and columns of the tile.
    pub rows: u32,
    pub columns: u32,
}

const NAMES: [&str; 5] = ["m", "n", "depth", "rows", "columns"];

impl Tile {
    const fn new([m, n, depth]: [u32; 3], [rows, columns]: [u32; 2]) -> Tile {
        Tile { m, n, depth, rows, columns }
    }

    pub(super) fn variant(self) -> Variant {
        let v = [self.m, self.n, self.depth, self.rows, self.columns];
        Variant::new("matrix", &std::array::from_fn::<_, 5, _>(|i| (NAMES[i], v[i])))
    }

    pub(super) fn of(v: &Variant) -> Result<Tile, Declined> {
        let [m, n, depth, rows, columns] = NAMES.map(|name| v.number(name));
        Ok(Tile { m: m?, n: n?, depth: depth?, rows: rows?, columns: columns? })
    }

    /// Rows and columns of a subgroup's part of the tile.
    fn part(self) -> [u32; 2] {
        [self.m / self.rows, self.n / self.columns]
    }
}

/// Candidates for measurement, not all legal on the device. The first is the heuristic's choice for large
/// products.
pub(super) fn tiles(op: MatrixOp) -> Vec<Tile> {
    // `d` elements of K fill 64 bytes, for all types.
    let d = 64 / op.operand.storage().size() as u32;
    let four = [2, 2];
    let large = if op.width == 32 { [4, 2] } else { four };
    vec![
        Tile::new([128, 128, d], large),
        Tile::new([128, 128, d], if op.width == 32 { four } else { [4, 2] }),
        Tile::new([64, 64, d], four),
        Tile::new([128, 64, d], four),
        Tile::new([64, 128, d], four),
        Tile::new([128, 128, d / 2], large),
    ]
}

pub(super) fn choose(p: &Problem, op: MatrixOp, caps: &Caps) -> Tile {
    let all = tiles(op);
    let groups = |t: &Tile| p.m.div_ceil(t.m as usize) * p.n.div_ceil(t.n as usize) * p.batches();
    // Use smaller tiles if large ones would leave compute units idle or would be mostly empty.
    let large = groups(&all[0]) >= caps.units() && p.m.min(p.n) > 64;
    if large { all[0] } else { all[2] }
}

/// An operand in workgroup memory. A "row" is a row of the left operand or a column of the right one.
#[derive(Clone, Copy)]
struct Side {
    rows: u32,
    depth: u32,
    /// Whether elements adjacent in memory belong to one row.
    along_k: bool,
    /// Whether the operand is read 16 bytes at a time.
    aligned: bool,
    /// The distance between runs of adjacent elements, the length of this operand's part of a half, and the
    /// offset of this part in the half. All three count elements.
    pitch: u32,
    len: u32,
    first: u32,
}

struct Layout {
    op: MatrixOp,
    tile: Tile,
    items: u32,
    /// Elements in 16 bytes of the operands (`per`) and of the result (`per_out`).
    per: u32,
    per_out: u32,
    sides: [Side; 2],
    /// Elements of one half of the workgroup memory, for both operands.
    half: u32,
    /// Total bytes of workgroup memory.
    bytes: u32,
}

/// Distance between rows of the sums in workgroup memory, in f32 values.
fn sums_pitch(t: Tile) -> u32 {
    t.part()[1] + 8
}

fn layout(p: &Problem, out: DType, op: MatrixOp, t: Tile, offsets: [isize; 2]) -> Layout {
    let size = op.operand.storage().size() as u32;
    let per = 16 / size;
    let side = |rows: u32, n: usize, fast_k: [isize; 2], batch: &[isize], offset: isize, first: u32| {
        let [k, other] = fast_k;
        let along_k = k.abs() <= other.abs();
        let (fast, slow, extent) = if along_k { (k, other, p.k) } else { (other, k, n) };
        let whole = |v: isize| v % per as isize == 0;
        let aligned = fast == 1
            && whole(slow)
            && whole(offset)
            && whole(extent as isize)
            && batch.iter().all(|s| whole(*s));
        // Padding avoids bank conflicts in `ldmatrix` and in the plain loads of a subgroup.
        let (runs, run, pad) = if along_k { (rows, t.depth, per) } else { (t.depth, rows, 8) };
        let pitch = run + pad;
        Side { rows, depth: t.depth, along_k, aligned, pitch, len: runs * pitch, first }
    };
    let a = side(t.m, p.m, [p.ak, p.am], &p.ab, offsets[0], 0);
    let b = side(t.n, p.n, [p.bk, p.bn], &p.bb, offsets[1], a.len);
    let half = a.len + b.len;
    let sums = t.rows * t.columns * op.m as u32 * sums_pitch(t) * 4;
    Layout {
        op,
        tile: t,
        items: t.rows * t.columns * op.width as u32,
        per,
        per_out: 16 / out.size() as u32,
        sides: [a, b],
        half,
        bytes: (2 * half * size).max(sums),
    }
}

/// Which operands are read 16 bytes at a time, as part of the key under which tuning stores a measurement.
pub(super) fn vectors(p: &Problem, out: DType, op: MatrixOp, offsets: [isize; 2]) -> &'static str {
    match layout(p, out, op, tiles(op)[0], offsets).sides.map(|s| s.aligned) {
        [false, false] => "",
        [true, false] => " a16",
        [false, true] => " b16",
        [true, true] => " a16 b16",
    }
}

/// Whether the device can run the tile. All work-items must load, and store, the same number of vectors.
pub(super) fn legal(p: &Problem, out: DType, op: MatrixOp, t: Tile, caps: &Caps) -> bool {
    if [t.m, t.n, t.depth, t.rows, t.columns].contains(&0) {
        return false;
    }
    let l = layout(p, out, op, t, [0, 0]);
    let ([m, n], each) = (t.part(), |n: u32, by: u32| n >= by && n.is_multiple_of(by));
    l.items <= caps.max_workgroup
        && l.items.is_multiple_of(64)
        && t.m.is_multiple_of(t.rows)
        && t.n.is_multiple_of(t.columns)
        && each(m, op.m as u32)
        && each(n, op.n as u32)
        && each(t.depth, op.k as u32)
        && l.sides.iter().all(|s| each(s.rows * s.depth / l.per, l.items))
        && each(op.m as u32 * n / l.per_out, op.width as u32)
        && l.bytes <= caps.workgroup_memory
}

/// Copies one operand from global to workgroup memory. Describes the elements that one work-item copies in an
/// iteration.
struct OperandCopy<'a> {
    side: Side,
    buf: Buf,
    /// For each of the work-item's vectors: row and position along K (within the iteration) of its first
    /// element, and its destination in a half, in vectors.
    vectors: Vec<[E<'a>; 3]>,
    start: E<'a>,
    /// Number of rows, and the strides of a row and along K.
    n: E<'a>,
    strides: [E<'a>; 2],
}

impl<'a> OperandCopy<'a> {
    fn new(
        b: &'a Builder,
        l: &Layout,
        side: Side,
        buf: Buf,
        start: E<'a>,
        [n, row0]: [E<'a>; 2],
        strides: [E<'a>; 2],
    ) -> OperandCopy<'a> {
        let count = side.rows * side.depth / l.per / l.items;
        let vectors = (0..count).map(|i| {
            let e = b.local_id(0) + i * l.items;
            let run = if side.along_k { side.depth } else { side.rows } / l.per;
            let (outer, inner) = (b.let_(e.idiv(run)), b.let_(e.imod(run) * l.per));
            let (row, k) = if side.along_k { (outer, inner) } else { (inner, outer) };
            let to = (outer * side.pitch + inner).idiv(l.per) + side.first / l.per;
            let row = b.let_(row0 + row);
            [row, k, b.let_(to)]
        });
        OperandCopy { side, buf, vectors: vectors.collect(), start, n, strides }
    }

    /// Reads the elements of the iteration that begins at `k0`. Elements past the ends are zero.
    fn fetch(&self, b: &'a Builder, l: &Layout, k0: E<'a>, k: E<'a>) -> Vec<E<'a>> {
        let one = |[row, at_k, _]: &[E<'a>; 3]| {
            let from = b.let_(k0 + *at_k);
            if self.side.aligned {
                let inside = row.lt(self.n).and(from.lt(k));
                return b.load_vector_if(
                    self.buf,
                    Ty::U32x4,
                    (self.start + *row * self.strides[0] + from * self.strides[1]).idiv(l.per),
                    inside,
                );
            }
            let x: Vec<E<'a>> = (0..l.per)
                .map(|e| {
                    let (row, from) = if self.side.along_k { (*row, from + e) } else { (*row + e, from) };
                    let at = self.start + row * self.strides[0] + from * self.strides[1];
                    b.load_if(self.buf, at, row.lt(self.n).and(from.lt(k)))
                })
                .collect();
            words(b, self.buf.dtype, &x)
        };
        self.vectors.iter().map(one).collect()
    }

    fn put(&self, l: &Layout, memory: Local<'a>, half: E<'a>, v: &[E<'a>]) {
        for ([_, _, to], v) in self.vectors.iter().zip(v) {
            memory.store(half * (l.half / l.per) + *to, *v);
        }
    }
}

impl Cx<'_> {
    pub(super) fn matrix(
        &self,
        p: &Problem,
        mut args: Args,
        inputs: &[Operand],
        out: &Operand,
        t: Tile,
    ) -> Result<Lowered, Declined> {
        let op = matrix_unit(self.dtype, self.caps)
            .ok_or_else(|| Declined::because(format!("the device has no matrix unit for {}", self.dtype)))?;
        if !legal(p, out.dtype, op, t, self.caps) {
            return Err(Declined::because(format!("matmul: the device cannot run tiles of {}", t.variant())));
        }
        let l = &layout(p, out.dtype, op, t, [inputs[0].view.offset, inputs[1].view.offset]);
        let class = p.rank_class();
        let b = Builder::with_index("matmul_matrix", [l.items, 1, 1], self.ix);
        let (a, w) = (b.raw_buffer(self.dtype, false), b.raw_buffer(self.dtype, false));
        let y = b.raw_buffer(out.dtype, true);
        let [oa, ow, oy] = ["o0", "o1", "o2"].map(|n| b.size(n));
        let s = Shape::declare(&b, class);
        let memory = b.local(Ty::U32x4, l.bytes / 16);
        let (gm, gn) = (b.let_(s.m.div_ceil(t.m)), b.let_(s.n.div_ceil(t.n)));
        let g = b.let_(b.linear_group());
        b.if_(g.lt(gm * gn * s.batches()), || {
            let (bt, tile) = (b.let_(g.idiv(gm * gn)), b.let_(g.imod(gm * gn)));
            let (i0, j0) = (b.let_(tile.idiv(gn) * t.m), b.let_(tile.imod(gn) * t.n));
            let (x0, w0) = s.starts(&b, bt);
            let (x0, w0) = (b.let_(x0 + oa), b.let_(w0 + ow));
            let copies = [
                OperandCopy::new(&b, l, l.sides[0], a, x0, [s.m, i0], [s.am, s.ak]),
                OperandCopy::new(&b, l, l.sides[1], w, w0, [s.n, j0], [s.bn, s.bk]),
            ];
            let sub = b.let_(b.local_id(0).idiv(op.width as u32));
            let at = [b.let_(sub.idiv(t.columns)), b.let_(sub.imod(t.columns))];
            let sums = self.sums(&b, l, memory, &s, &copies, at);
            let first = [i0 + at[0] * t.part()[0], j0 + at[1] * t.part()[1]].map(|e| b.let_(e));
            let start = b.let_(bt * (s.m * s.n) + oy);
            let whole = p.n.is_multiple_of(l.per_out as usize) && out.view.offset % l.per_out as isize == 0;
            Destination { l, memory, s: &s, y, start, sub, first, whole }.write(&b, &sums);
        });
        fill(&mut args, p, class);
        let groups = p.m.div_ceil(t.m as usize) * p.n.div_ceil(t.n as usize) * p.batches();
        single(b, &args, groups, self.caps)
    }

    /// Accumulates all products. Returns the subgroup's sum fragments, row by row.
    fn sums<'a>(
        &self,
        b: &'a Builder,
        l: &Layout,
        memory: Local<'a>,
        s: &Shape<'a>,
        copies: &[OperandCopy<'a>; 2],
        at: [E<'a>; 2],
    ) -> Vec<FragmentId> {
        let (op, t) = (l.op, l.tile);
        let [rows, columns] = [t.part()[0] / op.m as u32, t.part()[1] / op.n as u32];
        let make = |n: u32, part| (0..n).map(|_| b.fragment(op, part)).collect::<Vec<_>>();
        let sums = make(rows * columns, Part::Sum);
        let (x, y) = (make(rows, Part::A), make(columns, Part::B));
        sums.iter().for_each(|f| b.fill_fragment(*f, 0.0));
        // Start of the subgroup's rows in a half.
        let begin: Vec<E<'a>> = l
            .sides
            .iter()
            .zip(at)
            .zip(t.part())
            .map(|((side, at), part)| {
                b.let_(at * (part * if side.along_k { side.pitch } else { 1 }) + side.first)
            })
            .collect();
        let zero = b.index(0);
        for c in copies {
            c.put(l, memory, zero, &c.fetch(b, l, zero, s.k));
        }
        b.barrier();
        let steps = b.let_(s.k.div_ceil(t.depth));
        b.for_(0, steps, 1, |step| {
            let next = b.let_((step + 1) * t.depth);
            let fetched = copies.each_ref().map(|c| c.fetch(b, l, next, s.k));
            let half = b.let_(step.imod(2));
            let from: Vec<E<'a>> = begin.iter().map(|e| b.let_(*e + half * l.half)).collect();
            for k in (0..t.depth).step_by(op.k as usize) {
                let load = |f: FragmentId, i: u32, side: usize, edge: u8| {
                    let d = l.sides[side];
                    let (row, k) = if d.along_k { (d.pitch, k) } else { (1, k * d.pitch) };
                    // If adjacent elements run along K, the left operand is row-major and the right one
                    // column-major; otherwise it is the reverse.
                    let column_major = d.along_k == (side == 1);
                    b.load_fragment(
                        f,
                        memory,
                        from[side] + (i * edge as u32 * row + k),
                        d.pitch,
                        column_major,
                    );
                };
                x.iter().zip(0..).for_each(|(f, i)| load(*f, i, 0, op.m));
                for (j, v) in y.iter().enumerate() {
                    load(*v, j as u32, 1, op.n);
                    x.iter().enumerate().for_each(|(i, u)| b.mma(sums[i * columns as usize + j], *u, *v));
                }
            }
            for (c, v) in copies.iter().zip(&fetched) {
                c.put(l, memory, b.index(1) - half, v);
            }
            b.barrier();
        });
        sums
    }
}

/// The destination of a subgroup's sums.
struct Destination<'a, 's> {
    l: &'s Layout,
    /// Workgroup memory that the sums go through, one row of fragments at a time.
    memory: Local<'a>,
    s: &'s Shape<'a>,
    /// The buffer of the result, and the offset of the batch in it.
    y: Buf,
    start: E<'a>,
    /// Index of the subgroup, which selects its part of `memory`, and the first row and column of its part of
    /// the result.
    sub: E<'a>,
    first: [E<'a>; 2],
    /// Whether rows of the result are aligned to 16 bytes.
    whole: bool,
}

impl<'a> Destination<'a, '_> {
    fn write(&self, b: &'a Builder, sums: &[FragmentId]) {
        let Destination { l, memory, s, y, start, sub, first, whole } = *self;
        let (op, pitch, n) = (l.op, sums_pitch(l.tile), l.tile.part()[1]);
        let (m, width) = (op.m as u32, op.width as u32);
        let mine = b.let_(sub * (m * pitch));
        let lane = b.let_(b.local_id(0).imod(width));
        for (i, row) in sums.chunks((n / op.n as u32) as usize).enumerate() {
            for (j, f) in row.iter().enumerate() {
                b.store_fragment(*f, memory, mine + j as u32 * op.n as u32, pitch);
            }
            b.barrier();
            let run = n / l.per_out;
            for turn in 0..m * run / width {
                let e = lane + turn * width;
                let (r, c) = (b.let_(e.idiv(run)), b.let_(e.imod(run) * l.per_out));
                let from = b.let_((mine + r * pitch + c).idiv(4));
                let quads: Vec<E<'a>> = (0..l.per_out / 4).map(|q| memory.load(from + q)).collect();
                let (row, column) = (b.let_(first[0] + i as u32 * m + r), b.let_(first[1] + c));
                let to = b.let_(start + row * s.n + column);
                let inside = row.lt(s.m);
                let value = |e: u32| quads[e as usize / 4].lane(e as u8 % 4).bitcast(Ty::F32);
                if whole {
                    b.if_(inside.and(column.lt(s.n)), || {
                        let v = match quads[..] {
                            [quad] => quad,
                            _ => words(b, y.dtype, &(0..l.per_out).map(value).collect::<Vec<_>>()),
                        };
                        b.store_vector(y, to.idiv(l.per_out), v);
                    });
                    continue;
                }
                for e in 0..l.per_out {
                    b.if_(inside.and((column + e).lt(s.n)), || b.store(y, to + e, value(e)));
                }
            }
            b.barrier();
        }
    }
}
