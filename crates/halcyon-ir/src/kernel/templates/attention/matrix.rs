//! Attention on matrix units, for prompts (Dao et al. 2022; Dao 2023). A workgroup computes a tile of
//! queries; each subgroup holds some of the tile's rows in registers. The workgroup iterates over the keys in
//! tiles.
//!
//! Keys and values have separate workgroup memory: while a tile of one is multiplied, the next tile of the
//! other is loaded into registers. Scores, the running maximum and sum of each row, and the results stay in
//! f32 registers for the whole loop. Weights are rounded to the operands' type for the second product, but
//! the sum by which the results are divided is the sum of the unrounded weights. Exponentials are computed as
//! powers of two.

use super::super::common::*;
use super::problem::Problem;
use super::{Cx, NEG_INF};
use crate::kernel::ir::{FragmentId, MatrixOp, Part, Reduce, Ty};
use crate::kernel::lower::Lowered;
use crate::kernel::tune::Variant;
use crate::kernel::{Buf, Builder, E, Local};
use crate::ops::element_wise::ScalarOp;
use crate::target::{Declined, Operand};

const LOG2_E: f64 = std::f64::consts::LOG2_E;

/// Parameters of the kernel: the number of a subgroup's matrices along the queries (`rows`), the number of
/// keys in a tile (`keys`), and the number of subgroups in a workgroup (`subgroups`).
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct Tile {
    pub rows: u32,
    pub keys: u32,
    pub subgroups: u32,
}

const NAMES: [&str; 3] = ["rows", "keys", "subgroups"];

impl Tile {
    pub(super) fn variant(self) -> Variant {
        let v = [self.rows, self.keys, self.subgroups];
        Variant::new("matrix", &std::array::from_fn::<_, 3, _>(|i| (NAMES[i], v[i])))
    }

    pub(super) fn of(v: &Variant) -> Result<Tile, Declined> {
        let [rows, keys, subgroups] = NAMES.map(|name| v.number(name));
        Ok(Tile { rows: rows?, keys: keys?, subgroups: subgroups? })
    }
}

/// The device's matrix op for the operands' type.
pub(super) fn unit_of(cx: &Cx<'_>) -> Option<MatrixOp> {
    matrix_unit(cx.dtype, cx.caps)
}

/// Candidates for tuning. Not every device can run all of them.
pub(super) fn tiles() -> impl Iterator<Item = Tile> {
    let all = [
        (1, 64, 4),
        (1, 32, 4),
        (1, 64, 8),
        (1, 32, 8),
        (1, 128, 4),
        (2, 64, 4),
        (2, 32, 4),
        (1, 64, 2),
        (1, 32, 2),
        (1, 16, 4),
    ];
    all.into_iter().map(|(rows, keys, subgroups)| Tile { rows, keys, subgroups })
}

/// The heuristic's choice, if there are enough rows to fill a matrix and the device has a matrix unit for the
/// type.
pub(super) fn choose(cx: &Cx<'_>) -> Option<Tile> {
    let op = matrix_unit(cx.dtype, cx.caps)?;
    let rows = cx.p.shared * cx.p.sq;
    if rows < op.m as usize {
        return None;
    }
    // More queries per workgroup read each key less often. Use 8 subgroups only if registers suffice for two
    // such workgroups per unit and enough workgroups remain for all units.
    let groups = cx.p.b * cx.p.hk * rows.div_ceil(8 * op.m as usize);
    let subgroups = match rows.div_ceil(op.m as usize) {
        0..=2 => 2,
        _ if cx.p.d <= 64 && groups >= 2 * cx.caps.units() => 8,
        _ => 4,
    };
    // Longer rows, and the values that a mask needs per row, leave fewer registers for scores.
    let keys = if cx.p.sk <= 32 || cx.p.d > 80 || cx.p.mask.is_some() { 32 } else { 64 };
    let wanted = Tile { rows: 1, keys, subgroups };
    let smaller = Tile { keys: 32, subgroups: subgroups.min(4), ..wanted };
    [wanted, smaller, Tile { keys: 16, ..smaller }].into_iter().find(|t| legal(cx, *t))
}

/// Layout of workgroup memory. Offsets and pitches count elements of the operands' type.
struct Layout {
    op: MatrixOp,
    tile: Tile,
    items: u32,
    /// Queries of a workgroup (`queries`) and of a subgroup (`part`).
    queries: u32,
    part: u32,
    /// Row length, rounded up to whole matrices.
    width: u32,
    /// Number of operand elements in 16 bytes.
    per: u32,
    /// Pitch of a key and of a value.
    pitches: [u32; 2],
    /// Offset of the values. The keys are at offset 0, where the queries are before the loop.
    values: u32,
    /// Byte offset of the subgroups' own memory, `OWN` bytes for each subgroup.
    own: u32,
    bytes: u32,
}

/// Each subgroup has workgroup memory of its own, for one matrix in f32. `OWN_PITCH` is the distance between
/// the rows of this matrix in elements, and `OWN` is the size of the memory in bytes.
const OWN_PITCH: u32 = 20;
const OWN: u32 = 16 * OWN_PITCH * 4;

impl Layout {
    fn new(p: &Problem, op: MatrixOp, t: Tile) -> Layout {
        let size = op.operand.storage().size() as u32;
        let per = 16 / size;
        let part = t.rows * op.m as u32;
        let queries = t.subgroups * part;
        let width = (p.d as u32).max(1).next_multiple_of(op.n as u32);
        // Padding avoids bank conflicts in the reads of a subgroup: keys are read along the summed dimension,
        // values across it.
        let pitches = [width + per, width + 8];
        let values = t.keys * pitches[0];
        let own = (values + t.keys * pitches[1]).max(queries * pitches[0]) * size;
        Layout {
            op,
            tile: t,
            items: t.subgroups * op.width as u32,
            queries,
            part,
            width,
            per,
            pitches,
            values,
            own,
            bytes: own + t.subgroups * OWN,
        }
    }
}

/// The properties of a call that, besides the tile, change the kernel's text.
pub(super) fn text(cx: &Cx<'_>) -> String {
    let Some(op) = unit_of(cx) else { return String::new() };
    let per = 16 / op.operand.storage().size() as isize;
    let wide = cx.aligned(per).map(u8::from);
    let width = cx.p.d.next_multiple_of(op.n as usize);
    format!(" matrix{width} {}{}{}{}", wide[0], wide[1], wide[2], if cx.p.late() { " late" } else { "" })
}

/// Whether the device can run the tile.
pub(super) fn legal(cx: &Cx<'_>, t: Tile) -> bool {
    let Some(op) = matrix_unit(cx.dtype, cx.caps) else { return false };
    if [t.rows, t.keys, t.subgroups].contains(&0) || (op.m, op.n) != (16, 16) || cx.p.sk >= 1 << 30 {
        return false;
    }
    let l = Layout::new(&cx.p, op, t);
    let even = |n: u32, by: u32| n >= by && n.is_multiple_of(by);
    // The registers have no space for more results and scores than this.
    let registers = t.rows * (l.width + t.keys);
    l.items <= cx.caps.max_workgroup
        && l.items.is_multiple_of(64)
        && registers <= 256
        && l.width <= 128
        && even(t.keys, op.n as u32)
        && even(t.keys, op.k as u32)
        && l.bytes <= cx.caps.workgroup_memory
}

/// Loads rows of an operand from global to workgroup memory.
struct Rows<'a> {
    b: &'a Builder,
    buf: Buf,
    /// Whether the rows are read 16 bytes at a time; `per` is the number of elements in 16 bytes.
    aligned: bool,
    per: u32,
    /// Elements in a row.
    d: E<'a>,
    /// For each 16-byte vector of a work-item: its row in the tile, its first element in the row, its
    /// destination in vectors, and a constant number of rows to add.
    vectors: Vec<([E<'a>; 3], u32)>,
    /// Whether this work-item has a last vector. `None` if all work-items have the same number of vectors.
    last: Option<E<'a>>,
}

impl<'a> Rows<'a> {
    fn new(
        b: &'a Builder,
        l: &Layout,
        rows: u32,
        (pitch, first): (u32, u32),
        (buf, aligned): (Buf, bool),
        d: E<'a>,
    ) -> Rows<'a> {
        let run = l.width / l.per;
        let all = rows * run;
        let vectors: Vec<_> = (0..all.div_ceil(l.items))
            .map(|i| {
                // If a workgroup loads whole rows at a time, a work-item's vectors differ by a constant
                // number of rows, the same for all work-items.
                let (skip, more) = match l.items.is_multiple_of(run) {
                    true => (0, i * (l.items / run)),
                    false => (i * l.items, 0),
                };
                let e = b.local_id(0) + skip;
                let (row, at) = (e.idiv(run), e.imod(run) * l.per);
                let to = (row * pitch + at).idiv(l.per) + (first + more * pitch) / l.per;
                ([row, at, to], more)
            })
            .collect();
        let last = (!all.is_multiple_of(l.items)).then(|| b.let_(b.local_id(0).lt(all % l.items)));
        Rows { b, buf, aligned, per: l.per, d, vectors, last }
    }

    /// Reads rows; missing rows are zeros. `start(row, more)` gives two offsets whose sum is the start of row
    /// `row + more`, and whether this row exists.
    fn fetch(&self, start: impl Fn(E<'a>, u32) -> [E<'a>; 3]) -> Vec<E<'a>> {
        let b = self.b;
        let one = |(i, ([row, at, _], more)): (usize, &([E<'a>; 3], u32))| {
            let [from, further, mut there] = start(*row, *more);
            if let Some(last) = self.last.filter(|_| i + 1 == self.vectors.len()) {
                there = there.and(last);
            }
            let from = from + *at;
            if self.aligned {
                let index = from.idiv(self.per) + further.idiv(self.per);
                return b.load_vector_if(self.buf, Ty::U32x4, index, there.and(at.lt(self.d)));
            }
            let x: Vec<E<'a>> = (0..self.per)
                .map(|e| b.load_if(self.buf, from + further + e, there.and((*at + e).lt(self.d))))
                .collect();
            words(b, self.buf.dtype, &x)
        };
        self.vectors.iter().enumerate().map(one).collect()
    }

    fn put(&self, memory: Local<'a>, v: &[E<'a>]) {
        for (i, (([_, _, to], _), v)) in self.vectors.iter().zip(v).enumerate() {
            match self.last.filter(|_| i + 1 == self.vectors.len()) {
                Some(last) => self.b.if_(last, || memory.store(*to, *v)),
                None => memory.store(*to, *v),
            }
        }
    }
}

/// The fragments of a subgroup for one matrix of queries.
struct Block {
    /// The first row of the matrix among the rows of the subgroup.
    first: u32,
    queries: Vec<FragmentId>,
    scores: Vec<FragmentId>,
    weight: FragmentId,
    results: Vec<FragmentId>,
    /// Row fragments: `top` is the largest score so far, `sum` the sum of the weights, `shift` the value that
    /// is subtracted from scores and `decay` the factor for earlier sums. A tile's maximum or sum is first
    /// taken per element over the score matrices (`columns`), then over all columns (`share`).
    top: FragmentId,
    sum: FragmentId,
    shift: FragmentId,
    decay: FragmentId,
    share: FragmentId,
    columns: FragmentId,
}

impl Block {
    fn new(b: &Builder, l: &Layout, i: u32) -> Block {
        let op = l.op;
        let make = |n: u32, part| (0..n).map(|_| b.fragment(op, part)).collect::<Vec<_>>();
        let [k, n] = [op.k as u32, op.n as u32];
        let [top, sum, shift, decay, share] = [(); 5].map(|_| b.fragment(op, Part::Rows));
        Block {
            first: i * op.m as u32,
            queries: make(l.width.div_ceil(k), Part::A),
            scores: make(l.tile.keys / n, Part::Sum),
            weight: b.fragment(op, Part::A),
            results: make(l.width / n, Part::Sum),
            top,
            sum,
            shift,
            decay,
            share,
            columns: b.fragment(op, Part::Sum),
        }
    }

    fn start(&self, b: &Builder) {
        b.fill_fragment(self.top, f32::NEG_INFINITY);
        for f in self.results.iter().chain([&self.sum, &self.shift, &self.decay, &self.columns]) {
            b.fill_fragment(*f, 0.0);
        }
    }

    /// Replaces the scores by their weights, and rescales the earlier sums. A weight is a power of two. Its
    /// exponent is the score minus the row's maximum, multiplied by `factor`. If there is no `factor`, the
    /// scores are scaled already, and the difference is multiplied by log₂ e. The scores themselves are not
    /// multiplied by log₂ e, because a mask may contain the lowest finite number, and its product with log₂ e
    /// would be -inf.
    fn softmax<'a>(&self, b: &'a Builder, factor: Option<E<'a>>) {
        let scaled = |x: E<'a>| factor.map_or(x, |f| x * f);
        // Weight of a score. If there is a `factor`, `shift` has been multiplied by it.
        let weight = |x: E<'a>, shift: E<'a>| {
            let distance = factor.map_or_else(|| (x - shift) * LOG2_E, |f| x.fma(f, -shift));
            b.op(ScalarOp::Exp2, &[distance])
        };
        b.map_fragment(self.columns, |_, _| {
            let scores = self.scores.iter().map(|f| b.element(*f));
            // This maximum may lose a NaN, but the weight of the NaN is a NaN again.
            let top = scores.reduce(|x, y| b.let_(y.gt(x).select(y, x)));
            top.into_iter().for_each(|x| b.set_element(self.columns, x));
        });
        b.fill_fragment(self.share, f32::NEG_INFINITY);
        b.reduce_fragment(Reduce::Max, self.share, self.columns);
        b.map_fragment(self.share, |_, _| {
            let (old, new) = (b.element(self.top), b.let_(b.element(self.top).max(b.element(self.share))));
            // If all scores so far are -inf, a finite shift gives weights of 0; -inf minus -inf would give
            // NaN.
            let shift = b.let_(new.equals(NEG_INF).select(b.constant(Ty::F32, 0), scaled(new)));
            b.set_element(self.decay, weight(old, shift));
            b.set_element(self.shift, shift);
            b.set_element(self.top, new);
        });
        b.map_fragment(self.columns, |_, _| {
            let shift = b.element(self.shift);
            let weights = self.scores.iter().map(|f| {
                let s = b.element(*f);
                let w = b.let_(weight(s, shift));
                b.set_element(*f, w);
                w
            });
            let sum = weights.reduce(|x, y| x + y);
            sum.into_iter().for_each(|x| b.set_element(self.columns, x));
        });
        b.fill_fragment(self.share, 0.0);
        b.reduce_fragment(Reduce::Add, self.share, self.columns);
        b.map_fragment(self.share, |_, _| {
            let sum = b.element(self.sum).fma(b.element(self.decay), b.element(self.share));
            b.set_element(self.sum, sum);
        });
        b.map_fragment(self.columns, |_, _| {
            let decay = b.element(self.decay);
            self.results.iter().for_each(|f| b.set_element(*f, b.element(*f) * decay));
        });
    }
}

/// A workgroup's parameters and its position among the queries.
struct Group<'a> {
    b: &'a Builder,
    l: &'a Layout,
    p: &'a Problem,
    memory: Local<'a>,
    /// Offsets of the operands and the result.
    offsets: Vec<E<'a>>,
    mask: Option<Buf>,
    shared: E<'a>,
    sq: E<'a>,
    sk: E<'a>,
    d: E<'a>,
    qs: Vec<E<'a>>,
    ms: Vec<E<'a>>,
    /// Scale factor of the scores. Includes log₂ e if `late` is set.
    scale: E<'a>,
    late: bool,
    /// Batch (`n`), key head (`h`), and their linear index (`bk`).
    n: E<'a>,
    h: E<'a>,
    bk: E<'a>,
    /// Number of rows (the queries of all query heads of the key head, ordered by head), and the workgroup's
    /// first row.
    rows: E<'a>,
    r0: E<'a>,
    /// The subgroup's first row in the tile, and the offset of its own workgroup memory in vectors.
    part: E<'a>,
    own: E<'a>,
}

impl<'a> Group<'a> {
    /// Query head and position of row `r`.
    fn query(&self, r: E<'a>) -> (E<'a>, E<'a>) {
        (self.b.let_(self.h * self.shared + r.idiv(self.sq)), self.b.let_(r.imod(self.sq)))
    }

    /// Number of keys that the query at position `i` attends to. It may be negative, which means none.
    fn limit(&self, i: E<'a>) -> E<'a> {
        if self.p.causal { self.b.let_((i + 1 + self.sk - self.sq).min(self.sk)) } else { self.sk }
    }

    /// Number of keys that every query of the tile attends to, and number of keys that at least one of them
    /// attends to.
    fn limits(&self) -> [E<'a>; 2] {
        let b = self.b;
        let last = b.let_((self.r0 + (self.l.queries - 1)).min(self.rows - 1));
        let one_head = b.let_(self.r0.idiv(self.sq).equals(last.idiv(self.sq)));
        let at = |r: E<'a>, other: E<'a>| self.limit(one_head.select(r.imod(self.sq), other));
        [at(self.r0, b.index(0)), at(last, self.sq - 1)]
    }

    /// Loads the queries into registers through the memory of the keys. Rows past the end are copies of the
    /// last row; their results are not stored.
    fn queries(&self, buf: (Buf, bool), blocks: &[Block]) {
        let (b, pitch) = (self.b, self.l.pitches[0]);
        let rows = Rows::new(b, self.l, self.l.queries, (pitch, 0), buf, self.d);
        let x = rows.fetch(|r, more| {
            let (h, i) = self.query(b.let_((self.r0 + r + more).min(self.rows - 1)));
            let start = self.offsets[0] + self.n * self.qs[0] + h * self.qs[1] + i * self.qs[2];
            [b.let_(start), b.index(0), b.constant(Ty::Bool, true)]
        });
        rows.put(self.memory, &x);
        b.barrier();
        for block in blocks {
            let start = b.let_((self.part + block.first) * pitch);
            for (f, column) in block.queries.iter().zip((0..).step_by(self.l.op.k as usize)) {
                b.load_fragment(*f, self.memory, start + column as u32, pitch, false);
            }
        }
        b.barrier();
    }

    /// Completes the scores of a tile of keys. If there is no `factor`, multiplies the scores by the scale;
    /// otherwise [`Block::softmax`] multiplies by `factor` later. Adds the mask. Keys that are not visible to
    /// a query get the score -inf.
    fn finish(&self, block: &Block, first: E<'a>, factor: Option<E<'a>>) {
        let b = self.b;
        b.map_fragment(block.columns, |row, column| {
            let r = b.let_((self.r0 + self.part + block.first + row).min(self.rows - 1));
            let (h, i) = self.query(r);
            let (limit, from) = (self.limit(i), b.let_(first + column));
            for (f, j) in block.scores.iter().zip((0..).step_by(self.l.op.n as usize)) {
                let (mut v, key) = (b.element(*f), b.let_(from + j as u32));
                if factor.is_none() {
                    v = v * self.scale;
                }
                if let (Some(m), [m0, m1, m2, m3]) = (self.mask, &self.ms[..]) {
                    let at = self.offsets[3] + self.n * *m0 + h * *m1 + i * *m2 + key * *m3;
                    v = v + b.load_if(m, at, key.lt(self.sk));
                }
                b.set_element(*f, key.lt(limit).select(v, NEG_INF));
            }
        });
    }

    /// Accumulates all keys and values into the blocks' results.
    fn attend(&self, blocks: &[Block], [k, v]: [(Buf, bool); 2], [ks, vs]: [&[E<'a>]; 2]) {
        let (b, l) = (self.b, self.l);
        let (op, [pk, pv]) = (l.op, l.pitches);
        let side = |buf, pitch, first| Rows::new(b, l, l.tile.keys, (pitch, first), buf, self.d);
        let (keys, values) = (side(k, pk, 0), side(v, pv, l.values));
        let start = |i: usize, s: &[E<'a>]| b.let_(self.offsets[i] + self.n * s[0] + self.h * s[1]);
        let (k0, v0) = (start(1, ks), start(2, vs));
        let [least, end] = self.limits();
        // Keys that no query of the tile attends to are not read.
        let fetch = |side: &Rows<'a>, start: E<'a>, stride: E<'a>, first: E<'a>| {
            side.fetch(|r, more| {
                let r = first + r;
                [start + r * stride, stride * more, (r + more).lt(end)]
            })
        };
        let factor = self.late.then_some(self.scale);
        let right = b.fragment(op, Part::B);
        let [n, k] = [op.n as u32, op.k as u32];
        blocks.iter().for_each(|x| x.start(b));
        keys.put(self.memory, &fetch(&keys, k0, ks[2], b.index(0)));
        b.barrier();
        b.for_(0, end, l.tile.keys, |first| {
            let fetched = fetch(&values, v0, vs[2], first);
            blocks.iter().flat_map(|x| &x.scores).for_each(|f| b.fill_fragment(*f, 0.0));
            for i in 0..l.width / k {
                for j in 0..l.tile.keys / n {
                    // Rows of keys are the columns of the right factor.
                    b.load_fragment(right, self.memory, i * k + j * n * pk, pk, true);
                    blocks.iter().for_each(|x| b.mma(x.scores[j as usize], x.queries[i as usize], right));
                }
            }
            let next = b.let_(first + l.tile.keys);
            for x in blocks {
                match factor {
                    Some(_) => b.if_(next.gt(least), || self.finish(x, first, factor)),
                    None => self.finish(x, first, factor),
                }
                x.softmax(b, factor);
            }
            values.put(self.memory, &fetched);
            b.barrier();
            let fetched = fetch(&keys, k0, ks[2], next);
            for i in 0..l.tile.keys / k {
                for x in blocks {
                    let src = (x.scores[(i * k / n) as usize], (i * k % n) as u8);
                    b.convert_fragment(x.weight, src, self.memory, self.own * l.per, OWN_PITCH / 4 * l.per);
                }
                for j in 0..l.width / n {
                    b.load_fragment(right, self.memory, l.values + i * k * pv + j * n, pv, false);
                    blocks.iter().for_each(|x| b.mma(x.results[j as usize], x.weight, right));
                }
            }
            keys.put(self.memory, &fetched);
            b.barrier();
        });
    }

    /// Divides the results by the sums of the weights and writes them, one matrix at a time, through the
    /// subgroup's own workgroup memory.
    fn write(&self, y: Buf, out: &Operand, blocks: &[Block]) {
        let (b, l, d) = (self.b, self.l, self.d);
        let (m, width, per) = (l.op.m as u32, l.op.width as u32, 16 / y.dtype.size() as u32);
        let run = l.op.n as u32 / per;
        // Whether rows of the result are aligned to 16 bytes.
        let whole = self.p.d.is_multiple_of(per as usize) && out.view.offset % per as isize == 0;
        let lane = b.let_(b.local_id(0).imod(width));
        let start = self.offsets.last().map_or(b.index(0), |o| *o + self.bk * self.rows * d);
        let start = b.let_(start);
        for x in blocks {
            b.map_fragment(x.columns, |_, _| {
                let sum = b.element(x.sum);
                x.results.iter().for_each(|f| b.set_element(*f, b.element(*f) / sum));
            });
            let first = b.let_(self.r0 + self.part + x.first);
            for (f, column) in x.results.iter().zip((0..).step_by(l.op.n as usize)) {
                b.store_fragment(*f, self.memory, self.own * 4, OWN_PITCH);
                b.barrier();
                for turn in 0..(m * run).div_ceil(width) {
                    let e = lane + turn * width;
                    let (r, c) = (b.let_(e.idiv(run)), b.let_(e.imod(run) * per));
                    let (row, at) = (b.let_(first + r), b.let_(c + column as u32));
                    b.if_(r.lt(m).and(row.lt(self.rows)).and(at.lt(d)), || {
                        let from = b.let_(self.own + (r * OWN_PITCH + c).idiv(4));
                        let quads: Vec<E<'a>> = (0..per / 4).map(|q| self.memory.load(from + q)).collect();
                        let to = b.let_(start + row * d + at);
                        let value = |e: u32| quads[e as usize / 4].lane(e as u8 % 4).bitcast(Ty::F32);
                        if whole {
                            let v = match quads[..] {
                                [quad] => quad,
                                _ => words(b, y.dtype, &(0..per).map(value).collect::<Vec<_>>()),
                            };
                            return b.store_vector(y, to.idiv(per), v);
                        }
                        for e in 0..per {
                            b.if_((at + e).lt(d), || b.store(y, to + e, value(e)));
                        }
                    });
                }
                b.barrier();
            }
        }
    }
}

impl Cx<'_> {
    /// For each of q, k and v: whether its rows are aligned to `per` elements and a multiple of `per` long,
    /// and no stride is negative.
    fn aligned(&self, per: isize) -> [bool; 3] {
        let whole = |v: isize| v % per == 0;
        std::array::from_fn(|i| {
            let placed = self.p.strides[i].iter().all(|s| whole(*s) && *s >= 0);
            placed && whole(self.p.offsets[i]) && whole(self.p.d as isize)
        })
    }

    pub(super) fn matrix(&self, args: Args, out: &Operand, t: Tile) -> Result<Lowered, Declined> {
        let Some(op) = unit_of(self).filter(|_| legal(self, t)) else {
            return Err(Declined::because(format!(
                "attention: the device cannot run tiles of {}",
                t.variant()
            )));
        };
        let (p, l) = (&self.p, &Layout::new(&self.p, op, t));
        let builder = Builder::with_index("attention_matrix", [l.items, 1, 1], self.ix);
        let b = &builder;
        let aligned = self.aligned(l.per as isize);
        let [q, k, v] = [0, 1, 2].map(|i: usize| (b.raw_buffer(self.dtype, false), aligned[i]));
        let mask = p.mask.as_ref().map(|m| b.raw_buffer(m.dtype, false));
        let y = b.raw_buffer(self.dtype, true);
        let offsets: Vec<E<'_>> =
            (0..3 + p.mask.iter().len() + 1).map(|i| b.size(&format!("o{i}"))).collect();
        let [bh, hk, shared, sq, sk, d] = ["bh", "hk", "shared", "sq", "sk", "d"].map(|n| b.size(n));
        let [qs, ks, vs] = ["q", "k", "v"].map(|n| sizes(b, n, 3));
        let ms = sizes(b, "m", if mask.is_some() { 4 } else { 0 });
        // If scaling is late, the kernel scales the maximum and the differences from it instead of the
        // scores. This saves one instruction per score.
        let late = p.late();
        let scale = b.param("scale", Ty::F32);
        let scale = if late { b.let_(scale * LOG2_E) } else { scale };
        let memory = b.local(Ty::U32x4, l.bytes / 16);
        let rows = b.let_(shared * sq);
        let tiles = b.let_(rows.div_ceil(l.queries));
        let g = b.let_(b.linear_group());
        b.if_(g.lt(bh * tiles), || {
            let (bk, at) = (b.let_(g.idiv(tiles)), b.let_(g.imod(tiles)));
            let (n, h) = (b.let_(bk.idiv(hk)), b.let_(bk.imod(hk)));
            // Under a causal limit the last queries have the most keys, so they start first.
            let r0 = b.let_(if p.causal { tiles - 1 - at } else { at } * l.queries);
            let sub = b.let_(b.local_id(0).idiv(op.width as u32));
            let (part, own) = (b.let_(sub * l.part), b.let_(sub * (OWN / 16) + l.own / 16));
            let at = Group {
                b,
                l,
                p,
                memory,
                offsets,
                mask,
                shared,
                sq,
                sk,
                d,
                qs,
                ms,
                scale,
                late,
                n,
                h,
                bk,
                rows,
                r0,
                part,
                own,
            };
            let blocks: Vec<Block> = (0..t.rows).map(|i| Block::new(b, l, i)).collect();
            at.queries(q, &blocks);
            at.attend(&blocks, [k, v], [&ks, &vs]);
            at.write(y, out, &blocks);
        });
        let tiles = (p.shared * p.sq).div_ceil(l.queries as usize);
        single(builder, &args, p.b * p.hk * tiles, self.caps)
    }
}
