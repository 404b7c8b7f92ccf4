//! Products of activations and weights on matrix units: `y[i, j] = Σ x[i, k] * w[j, k]`, for weights in
//! blocks and in 16-bit floats, for every number of rows.
//!
//! Both operands are written to workgroup memory as sums of bf16 parts. One part keeps 8 significant bits of
//! an f32, two keep 16, three keep all 24. The products of parts that matter are added, the smallest first
//! ([`Parts`]). bf16 has the range of f32, so no activation overflows.
//!
//! The kernel is batch-invariant. K is divided into slices of [`SLICE`] elements. The products of a slice are
//! summed in the order of K, and the slices are added in order. Both do not depend on the tile, which depends
//! on the number of rows. Of many rows, a subgroup sums all slices of its part of the tile, one after the
//! other. Of few rows, the slices are divided among the subgroups of a workgroup, because the weights of few
//! columns must then be read by many work-items at a time; the sums of the slices meet in workgroup memory.

use super::super::blocks;
use super::super::common::{declined, matrix_unit, words};
use super::{Activations, Problem, Weights, elements};
use crate::blocks::BlockType;
use crate::dtype::DType;
use crate::kernel::access::{Access, Template as Kernel};
use crate::kernel::ir::{FragmentId, MatrixOp, Part, Ty};
use crate::kernel::lower::Lowered;
use crate::kernel::{Builder, E, Local, Var, verify_for};
use crate::target::{Caps, Declined};

/// Elements of K whose products are summed before they are added to the result: whole blocks of all types.
const SLICE: u32 = 256;
/// Elements of 16 bytes in bf16.
const RUN: u32 = 8;
/// Padding of rows in workgroup memory, in elements, against bank conflicts.
const PAD: u32 = 8;
/// Columns of padding of sums in workgroup memory.
const SUM_PAD: u32 = 4;

/// The bf16 parts of both operands.
#[derive(Clone, Copy)]
struct Parts {
    x: u32,
    w: u32,
    /// The parts whose products are added, in this order. The others are too small to matter.
    terms: &'static [(usize, usize)],
}

impl Parts {
    /// Weights in blocks: 8 significant bits, or 16 if activations are fine. Floats: as products of f32.
    fn of(p: &Problem<'_>) -> Option<Parts> {
        match (p.blocks, p.fine, p.w.dtype) {
            (Some(_), false, _) => Some(Parts { x: 1, w: 1, terms: &[(0, 0)] }),
            (Some(_), true, _) => Some(Parts { x: 2, w: 2, terms: &[(1, 0), (0, 1), (0, 0)] }),
            (None, _, DType::BF16) => Some(Parts { x: 3, w: 1, terms: &[(2, 0), (1, 0), (0, 0)] }),
            (None, _, DType::F16) => {
                Some(Parts { x: 3, w: 2, terms: &[(2, 0), (1, 1), (1, 0), (0, 1), (0, 0)] })
            }
            _ => None,
        }
    }
}

/// What a workgroup computes.
#[derive(Clone, Copy)]
struct Tile {
    /// Rows and columns of the tile.
    m: u32,
    n: u32,
    /// Subgroups along the rows and the columns of the tile.
    rows: u32,
    columns: u32,
    /// Slices that are summed at a time, each by as many subgroups.
    slices: u32,
}

impl Tile {
    const fn new([m, n]: [u32; 2], [rows, columns]: [u32; 2], slices: u32) -> Tile {
        Tile { m, n, rows, columns, slices }
    }
}

/// Tiles, from the fewest rows to the most. Of those with the same rows, the one with the most slices at a
/// time is the first, because it reads the most weights at a time.
const TILES: &[Tile] = &[
    Tile::new([16, 16], [1, 1], 8),
    Tile::new([16, 16], [1, 1], 4),
    Tile::new([16, 16], [1, 1], 2),
    Tile::new([16, 16], [1, 1], 1),
    Tile::new([32, 32], [2, 1], 4),
    Tile::new([32, 32], [2, 1], 2),
    Tile::new([32, 32], [2, 2], 1),
    Tile::new([64, 64], [2, 2], 1),
    Tile::new([128, 64], [4, 2], 1),
];

/// A kernel's layout. Workgroup memory has an area for each slice that is summed at a time: the parts of the
/// activations, the parts of the weights, and the sums.
#[derive(Clone, Copy)]
struct Layout {
    op: MatrixOp,
    parts: Parts,
    tile: Tile,
    /// Elements of K between two barriers.
    depth: u32,
    /// Rows of the tile that hold rows of the activations. The others stay zero.
    filled: u32,
    /// Work-items of a slice, and of the workgroup.
    team: u32,
    items: u32,
    /// Elements of a part of the activations and of the weights.
    x: u32,
    w: u32,
    /// Bytes of an area, and of all.
    area: u32,
    bytes: u32,
}

impl Layout {
    fn of(p: &Problem<'_>, op: MatrixOp, parts: Parts, tile: Tile) -> Layout {
        // A unit of these types holds weights of 128 neighbours.
        let wide = matches!(p.blocks, Some(BlockType::Q2_K | BlockType::Q3_K | BlockType::Q6_K));
        let depth = if wide { 128 } else { 64 };
        let team = tile.rows * tile.columns * u32::from(op.width);
        let (x, w) = (tile.m * (depth + PAD), tile.n * (depth + PAD));
        let operands = 2 * (parts.x * x + parts.w * w);
        let sums = match tile.slices {
            // A fragment's rows of each subgroup. They use the memory of the operands.
            1 => 0,
            _ => tile.m * (tile.n + SUM_PAD) * 4,
        };
        let last = tile.rows * u32::from(op.m) * (tile.n + tile.columns * SUM_PAD) * 4;
        let area = (operands + sums).max(last);
        Layout {
            op,
            parts,
            tile,
            depth,
            filled: if p.m == 1 { 1 } else { tile.m },
            team,
            items: team * tile.slices,
            x,
            w,
            area,
            bytes: area * tile.slices,
        }
    }

    fn fits(&self, caps: &Caps) -> bool {
        let whole = self.tile.slices == 1 || (self.tile.m * self.tile.n).is_multiple_of(self.items);
        // Kernels with operations of subgroups need whole subgroups of up to 64 work-items.
        whole
            && self.items.is_multiple_of(64)
            && self.items <= caps.max_workgroup.min(256)
            && self.bytes <= caps.workgroup_memory
    }

    /// The layout for a product. Whether there is one does not depend on the number of rows.
    fn choose(p: &Problem<'_>, caps: &Caps) -> Option<Layout> {
        let op = matrix_unit(DType::BF16, caps).filter(|o| [o.m, o.n, o.k] == [16; 3])?;
        let parts = Parts::of(p)?;
        let fitting: Vec<Layout> =
            TILES.iter().map(|t| Layout::of(p, op, parts, *t)).filter(|l| l.fits(caps)).collect();
        let least = fitting.iter().find(|l| l.tile.m == 16)?;
        // The smallest tile that holds few rows; for many rows, the largest that leaves no compute unit idle.
        let groups = |l: &Layout| p.m.div_ceil(l.tile.m as usize) * p.n.div_ceil(l.tile.n as usize);
        let few = fitting.iter().find(|l| p.m <= l.tile.m.min(32) as usize);
        let busy = fitting.iter().rev().find(|l| groups(l) >= caps.units());
        let many = fitting.iter().find(|l| l.tile.m > 16);
        Some(*few.or(busy).or(many).unwrap_or(least))
    }

    /// Rows and columns of a subgroup's fragments.
    fn fragments(&self) -> [u32; 2] {
        let t = self.tile;
        [t.m / t.rows / u32::from(self.op.m), t.n / t.columns / u32::from(self.op.n)]
    }

    /// Distance between rows of operands in workgroup memory.
    fn pitch(&self) -> u32 {
        self.depth + PAD
    }
}

/// A kernel for the product, if the device has matrix units that compute it.
pub(super) fn lower(p: &Problem<'_>, caps: &Caps) -> Option<Result<Lowered, Declined>> {
    if p.which.is_some() {
        return None;
    }
    Layout::choose(p, caps).map(|l| build(p, l, caps))
}

fn build(p: &Problem<'_>, l: Layout, caps: &Caps) -> Result<Lowered, Declined> {
    let t = Kernel::new("row_product_matrix", l.items, &[p.x, p.w, p.out]);
    let tile = l.tile;
    {
        let x = Activations::declare(&t, p.x, p.k);
        let w = Weights::declare(&t, p);
        let y = t.output(p.out);
        write(&t, p, l, (&x, &w, &y));
    }
    let tiles = p.m.div_ceil(tile.m as usize) * p.n.div_ceil(tile.n as usize);
    let (k, launch) = t.finish(tiles as u64, caps.max_groups).map_err(declined)?;
    verify_for(&k, caps).map_err(declined)?;
    Ok(Lowered { steps: vec![(k, launch, vec![0, 1, 2])], temps: vec![] })
}

/// Where a work-item works.
#[derive(Clone, Copy)]
struct Place<'a> {
    /// Number of the slice among those that are summed at a time, and of the work-item within its team.
    slice: E<'a>,
    id: E<'a>,
    /// The subgroup's row and column in the tile.
    at: [E<'a>; 2],
    /// First element, in bf16, of the slice's area.
    area: E<'a>,
    /// The tile's first row and column.
    first: [E<'a>; 2],
    /// Rows, columns and elements of K.
    sizes: [E<'a>; 3],
    /// Whether the workgroup has a tile.
    inside: E<'a>,
}

fn write<'a>(
    t: &'a Kernel,
    p: &Problem<'_>,
    l: Layout,
    (x, w, y): (&Activations<'a>, &Weights<'a>, &Access<'a>),
) {
    let (b, tile) = (&t.b, l.tile);
    let sizes = [t.size("m", p.m), t.size("n", p.n), t.size("depth", p.k)];
    let slices = t.size("slices", p.k.div_ceil(SLICE as usize));
    let memory = b.local(Ty::U32x4, l.bytes / 16);
    let row_tiles = b.let_(sizes[0].div_ceil(tile.m));
    let tiles = b.let_(row_tiles * sizes[1].div_ceil(tile.n));
    let (g, lid) = (b.let_(b.linear_group()), b.local_id(0));
    let (slice, id) = (b.let_(lid.idiv(l.team)), b.let_(lid.imod(l.team)));
    let sub = b.let_(id.idiv(u32::from(l.op.width)));
    let place = Place {
        slice,
        id,
        at: [b.let_(sub.idiv(tile.columns)), b.let_(sub.imod(tile.columns))],
        area: b.let_(slice * (l.area / 2)),
        // Row tiles of the same columns follow one another, so that weights stay in the caches.
        first: [b.let_(g.imod(row_tiles) * tile.m), b.let_(g.idiv(row_tiles) * tile.n)],
        sizes,
        inside: b.let_(g.lt(tiles)),
    };
    let [rows, columns] = l.fragments();
    let make = |n: u32, part| (0..n).map(|_| b.fragment(l.op, part)).collect::<Vec<FragmentId>>();
    let sums = make(rows * columns, Part::Sum);
    let totals = if tile.slices == 1 { make(rows * columns, Part::Sum) } else { vec![] };
    let operands = [make(rows * l.parts.x, Part::A), make(columns * l.parts.w, Part::B)];
    totals.iter().for_each(|f| b.fill_fragment(*f, 0.0));
    // The tile is a multiple of the work-items, see `Layout::fits`.
    let each = if tile.slices == 1 { 0 } else { tile.m * tile.n / l.items };
    let added: Vec<Var<'a>> = (0..each).map(|_| b.var_of(Ty::F32, 0.0)).collect();
    clear(b, &l, &place, memory);
    let rounds = t.work(tiles, slices.div_ceil(tile.slices));
    b.for_(0, rounds, 1, |round| {
        sums.iter().for_each(|f| b.fill_fragment(*f, 0.0));
        let k0 = b.let_((round * tile.slices + place.slice) * SLICE);
        b.for_(0, SLICE / l.depth, 1, |step| {
            let from = b.let_(k0 + step * l.depth);
            let loaded = [load_x(b, &l, &place, x, from), load_w(b, &l, &place, w, p, from)];
            // All subgroups have multiplied what the memory holds.
            b.barrier();
            for (to, part, guard) in loaded.into_iter().flatten() {
                let put = || memory.store(to, part);
                match guard {
                    Some(guard) => b.if_(guard, put),
                    None => put(),
                }
            }
            b.barrier();
            multiply(b, &l, &place, memory, &operands, &sums);
        });
        match tile.slices {
            1 => sums.iter().zip(&totals).for_each(|(s, t)| {
                b.map_fragment(*t, |_, _| b.set_element(*t, b.element(*t) + b.element(*s)))
            }),
            _ => add_slices(b, &l, &place, memory, &sums, &added),
        }
    });
    match tile.slices {
        1 => store_totals(b, &l, &place, memory, &totals, y),
        _ => added.iter().zip(0..).for_each(|(v, i)| {
            let e = b.let_(lid + i * l.items);
            let at = [e.idiv(tile.n), e.imod(tile.n)];
            store(b, &place, at, v.get(), y);
        }),
    }
}

/// Stores a value at a row and a column of the tile, unless they are past the ends.
fn store<'a>(b: &'a Builder, s: &Place<'a>, at: [E<'a>; 2], v: E<'a>, y: &Access<'a>) {
    let [row, column] = [0, 1].map(|i| b.let_(s.first[i] + at[i]));
    let inside = s.inside.and(row.lt(s.sizes[0])).and(column.lt(s.sizes[1]));
    b.if_(inside, || y.store(b, &[row, column], v));
}

/// Sets the rows of the activations' area that are never filled to zero.
fn clear<'a>(b: &'a Builder, l: &Layout, s: &Place<'a>, memory: Local<'a>) {
    let zero = b.constant(Ty::U32, 0);
    let empty = (l.tile.m - l.filled) * l.pitch() / RUN;
    for part in 0..l.parts.x {
        let start = b.let_((s.area + part * l.x + l.filled * l.pitch()).idiv(RUN));
        for i in 0..empty.div_ceil(l.team) {
            let e = b.let_(s.id + i * l.team);
            b.if_(e.lt(empty), || memory.store(start + e, b.words([zero; 4])));
        }
    }
}

/// A vector for the workgroup memory: where it goes, and whether this work-item stores it.
type Stored<'a> = (E<'a>, E<'a>, Option<E<'a>>);

/// The bf16 parts of eight elements.
fn divided<'a>(b: &'a Builder, v: &[E<'a>], parts: u32) -> Vec<E<'a>> {
    let mut rest = v.to_vec();
    let part = |i: u32| {
        let part = b.let_(words(b, DType::BF16, &rest));
        if i + 1 < parts {
            rest = rest.iter().map(|v| b.let_(*v - v.cast(DType::BF16))).collect();
        }
        part
    };
    (0..parts).map(part).collect()
}

/// Loads a step's activations.
fn load_x<'a>(
    b: &'a Builder,
    l: &Layout,
    s: &Place<'a>,
    x: &Activations<'a>,
    from: E<'a>,
) -> Vec<Stored<'a>> {
    let runs = l.depth / RUN;
    let count = l.filled * runs;
    let mut out = vec![];
    for i in 0..count.div_ceil(l.team) {
        let e = b.let_(s.id + i * l.team);
        let mine = (!count.is_multiple_of(l.team)).then(|| b.let_(e.lt(count)));
        let (row, at) = (b.let_(e.idiv(runs)), b.let_(e.imod(runs) * RUN));
        let (i, k) = (b.let_(s.first[0] + row), b.let_(from + at));
        let exists = i.lt(s.sizes[0]);
        let exists = b.let_(mine.map_or(exists, |m| m.and(exists)));
        let line = x.line(b, i);
        let v: Vec<E<'a>> = [0, 4].into_iter().flat_map(|q| x.guarded(b, line, k + q, (s, exists))).collect();
        let to = s.area + row * l.pitch() + at;
        for (part, v) in divided(b, &v, l.parts.x).into_iter().zip(0..) {
            out.push((b.let_((to + v * l.x).idiv(RUN)), part, mine));
        }
    }
    out
}

impl<'a> Activations<'a> {
    /// Four elements from `k` on, zero past the row's end or if the row does not exist.
    fn guarded(&self, b: &'a Builder, line: E<'a>, k: E<'a>, (s, exists): (&Place<'a>, E<'a>)) -> Vec<E<'a>> {
        let end = s.sizes[2];
        if !self.vectors {
            return (0..4).map(|e| b.load_if(self.buf, line + k + e, exists.and((k + e).lt(end)))).collect();
        }
        let v = b.load_vector_if(self.buf, Ty::F32x4, line + k.idiv(4), exists.and(k.lt(end)));
        (0..4).map(|e| v.lane(e)).collect()
    }
}

/// Loads a step's weights.
fn load_w<'a>(
    b: &'a Builder,
    l: &Layout,
    s: &Place<'a>,
    w: &Weights<'a>,
    p: &Problem<'_>,
    from: E<'a>,
) -> Vec<Stored<'a>> {
    // Elements that a work-item decodes at a time.
    let unit = p.blocks.map_or(RUN, |ty| (ty.row().elements / blocks::units(ty)) as u32);
    let per = l.depth / unit;
    let count = l.tile.n * per;
    let mut out = vec![];
    for i in 0..count.div_ceil(l.team) {
        let e = b.let_(s.id + i * l.team);
        let mine = (!count.is_multiple_of(l.team)).then(|| b.let_(e.lt(count)));
        let (row, at) = (b.let_(e.idiv(per).min(l.tile.n - 1)), b.let_(e.imod(per)));
        // Columns past the end repeat the last one; their results are not stored.
        let start = w.start(b, None, (s.first[1] + row).min(s.sizes[1] - 1));
        let to = b.let_(s.area + l.parts.x * l.x + row * l.pitch());
        let mut put = |at: E<'a>, v: &[E<'a>]| {
            for (part, v) in divided(b, v, l.parts.w).into_iter().zip(0..) {
                out.push((b.let_((to + at + v * l.w).idiv(RUN)), part, mine));
            }
        };
        match w {
            Weights::Blocks { ty, rows } => {
                let elements = ty.row().elements as i64;
                let k = b.let_(from + at * unit);
                let exists = b.let_(k.lt(s.sizes[2]));
                let block = b.let_(k.idiv(elements));
                let last = b.let_(s.sizes[2].idiv(elements) - 1);
                let within = k.idiv(unit).imod(blocks::units(*ty) as i64);
                for strip in rows.block(start, block.min(last)).strips(within) {
                    let at = b.let_(block * elements + strip.first - from);
                    // Blocks past the end of K hold zeros.
                    let scale = b.let_(exists.select(strip.scale, 0.0));
                    let offset = strip.offset.map(|o| b.let_(exists.select(o, 0.0)));
                    for run in 0..strip.words.len() / 2 {
                        let v: Vec<E<'a>> = (0..2)
                            .flat_map(|i| {
                                let codes = b.let_(strip.codes(b, 2 * run + i));
                                (0..4).map(move |e| codes.lane(e))
                            })
                            .map(|c| b.let_(offset.map_or(c * scale, |o| c.fma(scale, o))))
                            .collect();
                        put(at + RUN * run as u32, &v);
                    }
                }
            }
            Weights::Floats { buf, runs, .. } => {
                let (at, end) = (b.let_(at * RUN), s.sizes[2]);
                let k = b.let_(from + at);
                let v = match runs {
                    true => b.load_run_if(*buf, start + k, RUN, k.lt(end)),
                    false => {
                        [0, 4].into_iter().flat_map(|q| elements(b, *buf, start, k + q, Some(end))).collect()
                    }
                };
                put(at, &v);
            }
        }
    }
    out
}

/// Multiplies what the workgroup memory holds.
fn multiply<'a>(
    b: &'a Builder,
    l: &Layout,
    s: &Place<'a>,
    memory: Local<'a>,
    [x, w]: &[Vec<FragmentId>; 2],
    sums: &[FragmentId],
) {
    let [rows, columns] = l.fragments();
    let side = u32::from(l.op.m);
    let begin = |at: E<'a>, n: u32| b.let_(s.area + at * (n * side * l.pitch()));
    let (x0, w0) = (begin(s.at[0], rows), begin(s.at[1], columns));
    for k in (0..l.depth).step_by(l.op.k.into()) {
        // Fragment `i` of part `part`.
        for (part, f) in x.chunks(rows as usize).enumerate() {
            for (f, i) in f.iter().zip(0..) {
                let at = part as u32 * l.x + i * side * l.pitch() + k;
                b.load_fragment(*f, memory, x0 + at, l.pitch(), false);
            }
        }
        for (part, f) in w.chunks(columns as usize).enumerate() {
            for (f, j) in f.iter().zip(0..) {
                let at = l.parts.x * l.x + part as u32 * l.w + j * side * l.pitch() + k;
                b.load_fragment(*f, memory, w0 + at, l.pitch(), true);
            }
        }
        for &(px, pw) in l.parts.terms {
            for i in 0..rows as usize {
                for j in 0..columns as usize {
                    let (a, w) = (x[px * rows as usize + i], w[pw * columns as usize + j]);
                    b.mma(sums[i * columns as usize + j], a, w);
                }
            }
        }
    }
}

/// Adds the sums of the slices of a round to the results, in order.
fn add_slices<'a>(
    b: &'a Builder,
    l: &Layout,
    s: &Place<'a>,
    memory: Local<'a>,
    sums: &[FragmentId],
    added: &[Var<'a>],
) {
    let (tile, side) = (l.tile, u32::from(l.op.m));
    let [rows, columns] = l.fragments();
    let pitch = tile.n + SUM_PAD;
    // In f32 values, behind the operands.
    let start = (l.parts.x * l.x + l.parts.w * l.w) / 2;
    let mine = b.let_(s.area.idiv(2) + start + s.at[0] * (rows * side * pitch) + s.at[1] * (columns * side));
    for (f, i) in sums.iter().zip(0..) {
        let (r, c) = (i / columns, i % columns);
        b.store_fragment(*f, memory, mine + (r * side * pitch + c * side), pitch);
    }
    b.barrier();
    let lid = b.local_id(0);
    for (v, i) in added.iter().zip(0..) {
        let e = b.let_(lid + i * l.items);
        let at = b.let_(e.idiv(tile.n) * pitch + e.imod(tile.n) + start);
        for slice in 0..tile.slices {
            v.set(v.get() + value(b, memory, at + slice * (l.area / 4)));
        }
    }
}

/// Value `i` of f32 values in workgroup memory.
fn value<'a>(b: &'a Builder, memory: Local<'a>, i: E<'a>) -> E<'a> {
    let i = b.let_(i);
    let v = b.let_(memory.load(i.idiv(4)));
    let lane = b.let_(i.imod(4));
    let [v0, v1, v2, v3] = [0, 1, 2, 3].map(|e| v.lane(e));
    let (low, high) = (lane.equals(0).select(v0, v1), lane.equals(2).select(v2, v3));
    lane.lt(2).select(low, high).bitcast(Ty::F32)
}

/// Stores the results that subgroups hold, through workgroup memory, one row of fragments at a time.
fn store_totals<'a>(
    b: &'a Builder,
    l: &Layout,
    s: &Place<'a>,
    memory: Local<'a>,
    totals: &[FragmentId],
    y: &Access<'a>,
) {
    let (tile, side, width) = (l.tile, u32::from(l.op.m), u32::from(l.op.width));
    let [rows, columns] = l.fragments();
    let n = columns * side;
    let pitch = n + SUM_PAD;
    let mine = b.let_((s.at[0] * tile.columns + s.at[1]) * (side * pitch));
    let lane = b.let_(s.id.imod(width));
    for (i, f) in totals.chunks(columns as usize).zip(0..).map(|(f, i)| (i, f)) {
        b.barrier();
        for (f, j) in f.iter().zip(0..) {
            b.store_fragment(*f, memory, mine + j * side, pitch);
        }
        b.barrier();
        for turn in 0..side * n / 4 / width {
            let e = b.let_(lane + turn * width);
            let (r, c) = (b.let_(e.idiv(n / 4)), b.let_(e.imod(n / 4) * 4));
            let v = b.let_(memory.load((mine + r * pitch + c).idiv(4)));
            let row = b.let_(s.at[0] * (rows * side) + i * side + r);
            for q in 0..4u8 {
                let column = s.at[1] * n + c + u32::from(q);
                store(b, s, [row, column], v.lane(q).bitcast(Ty::F32), y);
            }
        }
    }
}
