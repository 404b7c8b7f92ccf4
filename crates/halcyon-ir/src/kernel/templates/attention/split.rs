//! Attention for few queries, as in text generation, where reading the keys and values limits the speed (Dao
//! et al. 2023, flash-decoding).
//!
//! A workgroup processes part of the keys of one key head, for up to eight query rows. (A row is one query of
//! one of the key head's query heads.) It reads each row of K and V once, 16 bytes at a time if the layout
//! allows. The work-items of a key group share one key, and each of them processes some columns of the key;
//! the key groups of a workgroup process different keys. If batch and heads leave compute units idle, the
//! keys are split into parts among workgroups. Each workgroup writes the sums of its part, with the part's
//! largest score and total weight, and a second kernel combines the parts. The number of parts is a
//! parameter, so a program serves any number of keys.

use super::super::common::*;
use super::problem::{Io, Query};
use super::{Cx, NEG_INF};
use crate::kernel::ir::{Reduce, Ty};
use crate::kernel::lower::Lowered;
use crate::kernel::tune::Variant;
use crate::kernel::{Buf, Builder, E};
use crate::target::{Declined, Operand};

/// Default number of rows per workgroup.
const ROWS: u32 = 8;
/// Minimum number of keys per part.
pub(super) const MIN_KEYS: usize = 128;
/// Maximum number of parts. The joining kernel keeps one factor per part in workgroup memory.
const MAX_PARTS: usize = 256;
/// Columns per work-item of the joining kernel.
const QUAD: u32 = 4;
/// In the temporary, `TAIL` elements follow each row of sums. Two of them hold the row's total weight and
/// largest score.
const TAIL: u32 = 4;

/// Parameters of the kernel.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct Split {
    /// Work-items, and maximum number of rows, of a workgroup.
    pub items: u32,
    pub rows: u32,
    /// Number of reads of keys, and of reads of values, that a work-item has in flight.
    pub reads: u32,
    /// Workgroups per compute unit into which the keys are split; 0 disables splitting.
    pub groups: u32,
}

impl Split {
    pub(super) fn variant(self) -> Variant {
        let Split { items, rows, reads, groups } = self;
        let values = [("items", items), ("rows", rows), ("reads", reads), ("groups", groups)];
        Variant::new("split", &values)
    }

    pub(super) fn of(v: &Variant) -> Result<Split, Declined> {
        let n = |name| v.number(name);
        Ok(Split { items: n("items")?, rows: n("rows")?, reads: n("reads")?, groups: n("groups")? })
    }
}

/// Whether rows of q, and rows of both k and v, can be read 16 bytes at a time.
pub(super) fn runs(inputs: &[Operand]) -> [bool; 2] {
    let whole = |i: usize| {
        inputs.get(i).filter(|o| o.dtype.size() <= 4).is_some_and(|o| {
            let (v, run) = (&o.view, (16 / o.dtype.size()) as isize);
            let last = v.rank().saturating_sub(1);
            let placed = |k: usize| v.shape[k] == 1 || v.strides[k] % run == 0;
            v.shape[last] as isize % run == 0 && v.offset % run == 0 && (0..last).all(placed)
        })
    };
    [whole(0), whole(1) && whole(2)]
}

/// How a workgroup divides its work. The fields are constants in the kernel's text.
#[derive(Clone, Copy)]
struct Layout {
    items: u32,
    /// Rows of a workgroup. This and the following sizes are powers of two.
    rows: u32,
    /// Row length, padded.
    width: u32,
    /// Elements per read.
    run: u32,
    /// Reads of a work-item per row of K or V.
    reads: u32,
    /// Number of work-items that share a key (a key group), and number of key groups in a workgroup.
    items_per_key: u32,
    key_groups: u32,
    /// Number of keys that a key group processes per iteration.
    deep: u32,
    /// Whether q, and k and v, are read 16 bytes at a time.
    vectors: [bool; 2],
}

impl Layout {
    fn columns(&self) -> u32 {
        self.run * self.reads
    }

    /// Number of keys that a workgroup processes per iteration.
    fn keys(&self) -> u32 {
        self.key_groups * self.deep
    }

    /// Pitch of a score in the array of partial products. The pitch is odd, to avoid bank conflicts.
    fn pitch(&self) -> u32 {
        self.items_per_key | 1
    }

    /// Words of the array that holds the partial products, and later the key groups' sums.
    fn partial(&self) -> u32 {
        (self.deep * self.rows * self.key_groups * self.pitch()).max(self.key_groups * (self.width + 1))
    }

    /// Total words of workgroup memory.
    fn words(&self) -> u32 {
        self.partial() + self.rows * (2 * self.keys() + 3)
    }

    /// Column of element `e` of read `c` by work-item `t` of a key group.
    fn column<'a>(&self, t: E<'a>, c: u32, e: u32) -> E<'a> {
        if self.vectors[1] {
            t * self.run + (c * self.items_per_key * self.run + e)
        } else {
            t + (c * self.run + e) * self.items_per_key
        }
    }

    /// A work-item's columns of the row at `start`. Columns past the row's end are zero. If `inside` is
    /// false, all columns are zero.
    fn load<'a>(
        &self,
        b: &'a Builder,
        buf: Buf,
        vectors: bool,
        start: E<'a>,
        [t, d]: [E<'a>; 2],
        inside: Option<E<'a>>,
    ) -> Vec<E<'a>> {
        let guard = |j: E<'a>| inside.map_or(j.lt(d), |i| i.and(j.lt(d)));
        let read = |c: u32| -> Vec<E<'a>> {
            if vectors {
                let j = self.column(t, c, 0);
                return b.load_run_if(buf, start + j, self.run, guard(j));
            }
            (0..self.run).map(|e| self.column(t, c, e)).map(|j| b.load_if(buf, start + j, guard(j))).collect()
        };
        (0..self.reads).flat_map(read).collect()
    }
}

/// Offset in the temporary of one row of one part: sums, weight, maximum.
fn row_of_part<'a>(l: &Layout, [bk, parts, part]: [E<'a>; 3], rows: E<'a>, r: E<'a>) -> E<'a> {
    ((bk * parts + part) * rows + r) * (l.width + TAIL)
}

impl Cx<'_> {
    fn rows(&self) -> usize {
        self.p.shared * self.p.sq
    }

    fn layout(&self, s: Split) -> Option<Layout> {
        let rows = self.rows().clamp(1, s.rows.max(1) as usize).next_power_of_two() as u32;
        let run = (16 / self.dtype.size()) as u32;
        let width = (self.p.d as u32).next_power_of_two().max(8);
        // For each row, a work-item keeps the query's columns and the sums in registers.
        let registers = if self.ty == Ty::F64 { 16 } else { 32 };
        let reads = (registers / (run * rows)).clamp(1, 4).min(width / run).min(s.reads);
        let items_per_key = width / run / reads.max(1);
        let whole = [s.items, s.rows, s.reads].iter().all(|n| n.is_power_of_two());
        if !whole || items_per_key > s.items || s.items < rows {
            return None;
        }
        let key_groups = s.items / items_per_key;
        // More keys per iteration would give each work-item more scores to process.
        let deep = (s.reads / reads).min((64 / key_groups).max(1));
        let [q, kv] = self.p.runs;
        Some(Layout {
            items: s.items,
            rows,
            width,
            run,
            reads,
            items_per_key,
            key_groups,
            deep,
            vectors: [q && kv, kv],
        })
    }

    /// Number of workgroups that process the same keys of a key head, for different rows.
    fn blocks(&self, rows: u32) -> usize {
        self.rows().div_ceil(rows as usize)
    }

    /// Number of parts, and number of keys per part. A part is processed in a whole number of iterations.
    fn parts(&self, s: Split, l: &Layout) -> (usize, usize) {
        let heads = (self.p.b * self.p.hk * self.blocks(l.rows)).max(1);
        let want = (s.groups as usize * self.caps.units()).div_ceil(heads);
        let parts = want.min(self.p.sk / MIN_KEYS).clamp(1, MAX_PARTS);
        let per = self.p.sk.div_ceil(parts).next_multiple_of(l.keys() as usize).max(1);
        (self.p.sk.div_ceil(per).max(1), per)
    }

    /// Workgroup size of the joining kernel.
    fn joining(&self) -> Option<u32> {
        [256, 128, 64].into_iter().find(|n| *n <= self.caps.max_workgroup)
    }

    pub(super) fn split_legal(&self, s: Split) -> bool {
        self.layout(s).is_some_and(|l| {
            let join = self.parts(s, &l).0 == 1
                || self.joining().is_some_and(|n| self.fits(MAX_PARTS as u32 + n + n * QUAD));
            s.items <= self.caps.max_workgroup && self.fits(l.words()) && join
        })
    }

    /// Keys are split into four workgroups per compute unit. If the heads alone give two workgroups per
    /// compute unit, keys are not split.
    pub(super) fn split_default(&self) -> Option<Split> {
        let heads = self.p.b * self.p.hk * self.blocks(ROWS);
        let groups = if heads >= 2 * self.caps.units() { 0 } else { 4 };
        let items = if self.p.d > 64 { 128 } else { 64 };
        let all = [(items, 4), (64, 4), (64, 2), (32, 2)].map(|(items, reads)| Split {
            items,
            rows: ROWS,
            reads,
            groups,
        });
        all.into_iter().find(|s| self.split_legal(*s))
    }

    /// Candidates for measurement. Lists only one of the candidates that have the same layout and the same
    /// number of parts.
    pub(super) fn splits(&self) -> Vec<Split> {
        let mut all: Vec<(Split, [u32; 3], usize)> = vec![];
        for groups in [4, 0, 2, 8] {
            for (items, rows, reads) in
                [(64, 8, 4), (128, 8, 4), (128, 4, 4), (128, 8, 8), (256, 8, 4), (64, 4, 8)]
            {
                let s = Split { items, rows, reads, groups };
                let Some(l) = self.layout(s) else { continue };
                let (parts, same) = (self.parts(s, &l).0, [items, l.rows, reads]);
                if !all.iter().any(|(_, o, n)| (*o, *n) == (same, parts)) {
                    all.push((s, same, parts));
                }
            }
        }
        all.into_iter().map(|(s, ..)| s).take(16).collect()
    }

    /// Whether the rows are few enough for this kernel: the rows of one workgroup, or of two workgroups if
    /// there are many keys (the second workgroup then reads the keys from a cache).
    pub(super) fn few(&self) -> bool {
        let most = ROWS as usize;
        self.rows() <= most || (self.rows() <= 2 * most && self.p.sk >= 2 * MIN_KEYS)
    }

    pub(super) fn split(
        &self,
        inputs: &[Operand],
        outputs: &[Operand],
        s: Split,
    ) -> Result<Lowered, Declined> {
        let l = self.layout(s).ok_or_else(|| {
            Declined::because(format!(
                "attention: the device does not support a workgroup with {}",
                s.variant()
            ))
        })?;
        let (parts, per) = self.parts(s, &l);
        let heads = self.p.b * self.p.hk;
        let groups = heads * self.blocks(l.rows) * parts;
        if parts == 1 {
            let mut args = Args::of(inputs, outputs);
            self.p.fill(&mut args);
            return self.part(&args, &l, false, groups);
        }
        let mut args = Args::of(inputs, &[]);
        self.p.fill(&mut args);
        args.int("parts", parts as i64).int("per", per as i64);
        let (n, bytes) = (inputs.len(), (l.width + TAIL) as usize * self.ty.size());
        let mut low = self.part(&args, &l, true, groups)?;
        let mut args = Args::default();
        args.int("o1", outputs.first().map_or(0, |o| o.view.offset as i64));
        args.int("bh", heads as i64).int("rows", self.rows() as i64).int("parts", parts as i64);
        args.int("d", self.p.d as i64);
        low.steps.extend(self.join(&args, &l)?.steps);
        // In the order of the buffers, the temporary comes after the result.
        for ((_, _, places), to) in
            low.steps.iter_mut().zip([(0..n).chain([n + 1]).collect(), vec![n + 1, n]])
        {
            *places = to;
        }
        low.temps = vec![heads * parts * self.rows() * bytes];
        Ok(low)
    }

    /// Computes the sums of one part of the keys. If `split` is false, computes the sums of all keys, divided
    /// by their weight.
    fn part(&self, args: &Args, l: &Layout, split: bool, groups: usize) -> Result<Lowered, Declined> {
        let name = if split { "attention_split" } else { "attention_few" };
        let b = Builder::with_index(name, [l.items, 1, 1], self.ix);
        self.write_part(&b, l, split);
        single(b, args, groups, self.caps)
    }

    fn write_part<'a>(&self, b: &'a Builder, l: &Layout, split: bool) {
        let (n_rows, tile, n_items) = (l.rows, l.keys(), l.items);
        let io = Io::declare_into(b, self, if split { self.ty.dtype() } else { self.dtype });
        let (parts, per) = if split { (b.size("parts"), b.size("per")) } else { (b.index(1), io.sk) };
        let partial = b.local(self.ty, l.partial());
        let scores = b.local(self.ty, n_rows * (tile + 1));
        let weights = b.local(self.ty, n_rows * tile);
        let decays = b.local(self.ty, n_rows);
        let rows = b.let_(io.shared * io.sq);
        let blocks = b.let_(rows.div_ceil(n_rows));
        let g = b.let_(b.linear_group());
        b.if_(g.lt(io.bh * blocks * parts), || {
            // Workgroups with adjacent indexes read the same keys for different rows.
            let (r0, rest) = (b.let_(g.imod(blocks) * n_rows), b.let_(g.idiv(blocks)));
            let (part, bk) = (b.let_(rest.imod(parts)), b.let_(rest.idiv(parts)));
            let start = b.let_(part * per);
            let end = if split { b.let_((start + per).min(io.sk)) } else { io.sk };
            let (k0, v0) = io.heads(bk);
            let lid = b.local_id(0);
            let (key_group, t) = (b.let_(lid.idiv(l.items_per_key)), b.let_(lid.imod(l.items_per_key)));
            let place = [t, io.d];
            // Rows past the end repeat the last row; their stores are skipped.
            let row = |r: E<'a>| (r0 + r).min(rows - 1);
            let queries: Vec<Vec<E<'a>>> = (0..n_rows)
                .map(|r| {
                    let q = io.query(bk, b.let_(row(b.index(r as i64))));
                    let x = l.load(b, io.q, l.vectors[0], q.q, place, None);
                    x.into_iter().map(|x| b.let_(x)).collect()
                })
                .collect();
            // For each score that this work-item sums up: the index of its products, its row, its key within
            // the iteration, and its query.
            let all = l.deep * n_rows * l.key_groups;
            let own: Vec<_> = (0..all.div_ceil(n_items))
                .map(|s| {
                    let i = b.let_(lid + s * n_items);
                    let r = b.let_(i.idiv(l.key_groups).imod(n_rows));
                    let key = b.let_(i.idiv(l.key_groups * n_rows) * l.key_groups + i.imod(l.key_groups));
                    let q = io.query(bk, b.let_(row(r)));
                    (i, r, key, Query { keys: b.let_(q.keys.min(end)), ..q })
                })
                .collect();
            // The row whose weights this work-item computes together with others (`mine`), and its number
            // among them (`member`).
            let sharing = n_items / n_rows;
            let (mine, member) = (b.let_(lid.idiv(sharing)), b.let_(lid.imod(sharing)));
            let top = b.var_of(self.ty, NEG_INF);
            let var = || b.var_of(self.ty, 0);
            let sums: Vec<_> = (0..n_rows).map(|_| var()).collect();
            let acc: Vec<Vec<_>> = (0..n_rows).map(|_| (0..l.columns()).map(|_| var()).collect()).collect();
            b.for_(start, end, tile, |first| {
                let fetch = |buf: Buf, from: E<'a>, step: E<'a>| -> Vec<Vec<E<'a>>> {
                    let one = |p: u32| {
                        let key = b.let_(first + key_group + p * l.key_groups);
                        l.load(b, buf, l.vectors[1], from + key * step, place, Some(key.lt(end)))
                    };
                    (0..l.deep).map(one).collect()
                };
                let keys = fetch(io.k, k0, io.ks[2]);
                // The loads of values overlap the computation of the weights.
                let values = fetch(io.v, v0, io.vs[2]);
                for (p, key) in keys.iter().enumerate() {
                    for (r, query) in queries.iter().enumerate() {
                        let zero = b.constant(self.ty, 0);
                        let dot = query.iter().zip(key).fold(zero, |sum, (x, y)| x.mul_add(*y, sum));
                        let at = (p as u32 * n_rows + r as u32) * l.key_groups;
                        partial.store((key_group + at) * l.pitch() + t, dot);
                    }
                }
                b.barrier();
                for (i, r, key, q) in &own {
                    let add = || {
                        let dot = b.var_of(self.ty, 0);
                        let from = b.let_(*i * l.pitch());
                        b.for_(0, l.items_per_key, 1, |t| dot.set(dot.get() + partial.load(from + t)));
                        scores.store(*r * (tile + 1) + *key, io.score(q, first + *key, dot.get()));
                    };
                    if all < n_items { b.if_(i.lt(all), add) } else { add() }
                }
                b.barrier();
                let old = b.let_(top.get());
                b.for_(0, tile, 1, |c| top.set(top.get().max(scores.load(mine * (tile + 1) + c))));
                let new = b.let_(top.get());
                // If all scores so far are -inf, a finite shift gives weights of 0; -inf minus -inf would
                // give NaN.
                let shift = b.let_(new.equals(NEG_INF).select(b.constant(self.ty, 0), new));
                for s in 0..tile.div_ceil(sharing) {
                    let c = b.let_(member + s * sharing);
                    let weigh = || {
                        let w = (scores.load(mine * (tile + 1) + c) - shift).exp();
                        weights.store(c * n_rows + mine, w);
                    };
                    if tile < sharing { b.if_(c.lt(tile), weigh) } else { weigh() }
                }
                b.if_(member.equals(0), || decays.store(mine, (old - shift).exp()));
                b.barrier();
                for ((r, sum), acc) in sums.iter().enumerate().zip(&acc) {
                    let decay = decays.load(r);
                    // The maximum seldom changes after the first iterations, so this multiplication is mostly
                    // skipped.
                    b.if_(decay.differs(1.0), || {
                        acc.iter().chain([sum]).for_each(|a| a.set(a.get() * decay));
                    });
                }
                for (p, value) in values.iter().enumerate() {
                    for ((r, sum), acc) in sums.iter().enumerate().zip(&acc) {
                        let w = weights.load((key_group + p as u32 * l.key_groups) * n_rows + r);
                        sum.set(sum.get() + w);
                        acc.iter().zip(value).for_each(|(a, v)| a.set(w.mul_add(*v, a.get())));
                    }
                }
            });
            let base = |r: E<'a>| {
                let at =
                    if split { row_of_part(l, [bk, parts, part], rows, r) } else { (bk * rows + r) * io.d };
                b.let_(at)
            };
            if split {
                let r = b.let_(r0 + mine);
                b.if_(member.equals(0).and(r.lt(rows)), || {
                    b.store(io.y, base(r) + (l.width + 1), top.get());
                });
            }
            // Adds up the sums of the key groups, row by row, and their weights. Every work-item of a key
            // group holds the group's weight.
            let total = |j: E<'a>| {
                let sum = b.var_of(self.ty, 0);
                b.for_(0, l.key_groups, 1, |i| sum.set(sum.get() + partial.load(i * (l.width + 1) + j)));
                b.let_(sum.get())
            };
            for ((r, sum), acc) in sums.iter().enumerate().zip(&acc) {
                b.barrier();
                for (i, a) in acc.iter().enumerate() {
                    let j = l.column(t, i as u32 / l.run, i as u32 % l.run);
                    partial.store(key_group * (l.width + 1) + j, a.get());
                }
                b.if_(t.equals(0), || partial.store(key_group * (l.width + 1) + l.width, sum.get()));
                b.barrier();
                let r = b.let_(r0 + r);
                b.if_(r.lt(rows), || {
                    let to = base(r);
                    b.for_(lid, if split { b.index(l.width as i64 + 1) } else { io.d }, n_items, |j| {
                        let sum = total(j);
                        b.store(io.y, to + j, if split { sum } else { sum / total(b.index(l.width as i64)) });
                    });
                });
            }
        });
    }

    /// Combines the sums of the parts, one workgroup per row. Each part is scaled by `exp(m - M)`, where `m`
    /// is the part's largest score and `M` the largest score of all parts.
    fn join(&self, args: &Args, l: &Layout) -> Result<Lowered, Declined> {
        let n = self
            .joining()
            .ok_or_else(|| Declined::because("attention: the device's workgroups are too small"))?;
        let b = Builder::with_index("attention_join", [n, 1, 1], self.ix);
        self.write_join(&b, l, n);
        single(b, args, self.queries(), self.caps)
    }

    fn write_join<'a>(&self, b: &'a Builder, l: &Layout, n: u32) {
        let (x, y) = (b.input(self.ty.dtype()), b.output(self.dtype));
        let [bh, rows, parts, d] = ["bh", "rows", "parts", "d"].map(|n| b.size(n));
        let (factors, scratch) = (b.local(self.ty, MAX_PARTS as u32), b.local(self.ty, n));
        let sums = b.local(self.ty, n * QUAD);
        // Work-items per row, and parts that are read at the same time.
        let across = l.width / QUAD;
        let slices = n / across;
        let g = b.let_(b.linear_group());
        b.if_(g.lt(bh * rows), || {
            let lid = b.local_id(0);
            let (bk, r) = (b.let_(g.idiv(rows)), b.let_(g.imod(rows)));
            let part = |p: E<'a>| b.let_(row_of_part(l, [bk, parts, p], rows, r));
            let top = b.var_of(self.ty, NEG_INF);
            b.for_(lid, parts, n, |p| top.set(top.get().max(b.load(x, part(p) + (l.width + 1)))));
            let top = b.group_reduce(Reduce::Max, top.get(), scratch);
            // If all scores are -inf, all factors are 0 and the result is 0 / 0 = NaN.
            let shift = b.let_(top.equals(NEG_INF).select(b.constant(self.ty, 0), top));
            let weight = b.var_of(self.ty, 0);
            b.for_(lid, parts, n, |p| {
                let at = part(p);
                let f = b.let_((b.load(x, at + (l.width + 1)) - shift).exp());
                factors.store(p, f);
                weight.set(f.mul_add(b.load(x, at + l.width), weight.get()));
            });
            // The barriers of the reduction also make the factors visible to all work-items.
            let weight = b.group_reduce(Reduce::Add, weight.get(), scratch);
            let (j, z) = (b.let_(lid.imod(across) * QUAD), b.let_(lid.idiv(across)));
            let acc: Vec<_> = (0..QUAD).map(|_| b.var_of(self.ty, 0)).collect();
            b.for_(z, parts, slices, |p| {
                let (f, at) = (factors.load(p), b.let_(part(p) + j));
                let v = match self.ty {
                    Ty::F64 => (0..QUAD).map(|e| b.load(x, at + e)).collect(),
                    _ => b.load_run(x, at, QUAD),
                };
                acc.iter().zip(v).for_each(|(a, v)| a.set(f.mul_add(v, a.get())));
            });
            acc.iter().enumerate().for_each(|(e, a)| sums.store(z * l.width + j + e, a.get()));
            b.barrier();
            b.for_(lid, d, n, |j| {
                let sum = b.var_of(self.ty, 0);
                b.for_(0, slices, 1, |z| sum.set(sum.get() + sums.load(z * l.width + j)));
                b.store(y, g * d + j, sum.get() / weight);
            });
        });
    }
}
