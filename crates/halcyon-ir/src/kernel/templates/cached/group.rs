//! The kernels for GPUs: a workgroup per row and few query heads of a key head, and per part of the positions
//! if there are few rows.
//!
//! For the scores of a part, each work-item takes two positions. For the values, the work-items are slices of
//! columns: a slice adds the values of every n-th position, and the sums of the slices are then added in
//! order.

use super::{Io, NEG_INF, Problem, Row, Running, declare, shift};
use crate::dtype::DType;
use crate::kernel::access::Template as Kernel;
use crate::kernel::ir::Ty;
use crate::kernel::lower::Lowered;
use crate::kernel::templates::common::declined;
use crate::kernel::{Buf, Builder, E, Launch, Local, verify_for};
use crate::target::{Caps, Declined};

/// Positions that a work-item scores per part.
const EACH: u32 = 2;
/// Maximum number of query heads of a workgroup.
const HEADS: usize = 4;
/// Largest temporary of divided parts, in bytes.
const TEMPORARY: usize = 64 << 20;
/// In the temporary, elements that follow each row of sums: two of them hold the sum and the maximum.
const TAIL: u32 = 4;
/// Work-items of the joining kernel.
const JOINING: u32 = 64;

/// How a workgroup divides its work.
#[derive(Clone, Copy)]
pub(super) struct Layout {
    items: u32,
    /// Query heads of a workgroup.
    heads: u32,
    /// Vectors of four elements of a query and of a result.
    key: u32,
    value: u32,
    /// Vectors of a read of keys, and of values.
    key_per: u32,
    per: u32,
    /// Work-items of a slice, and slices.
    columns: u32,
    slices: u32,
    /// Whether the parts are divided among workgroups.
    split: bool,
}

impl Layout {
    /// The layout for a device: everything except `split` and the number of heads decides the order of sums,
    /// and depends only on the device and on sizes of the cache's rows.
    pub(super) fn choose(p: &Problem<'_>, caps: &Caps) -> Option<Layout> {
        if caps.is_cpu {
            return None;
        }
        let [key, value] = p.quads();
        let [key_per, per] = p.runs.map(|run| run / 4);
        let columns = (value / per).max(1).next_power_of_two();
        let all = [(128, HEADS), (128, 2), (128, 1), (64, 1), (32, 1)];
        let mut l = all.into_iter().find_map(|(items, most)| {
            let heads = p.together(most) as u32;
            let slices = items / columns;
            let l = Layout { items, heads, key, value, key_per, per, columns, slices, split: false };
            let bytes = l.words() as u64 * 4;
            // 64-bit places take twice the space.
            let fits = bytes + u64::from(l.part()) * 4 <= u64::from(caps.workgroup_memory);
            (slices > 0 && items <= caps.max_workgroup && fits).then_some(l)
        })?;
        let few = p.rows * l.groups(p) < 4 * caps.units();
        let bytes = (p.rows * p.heads * l.parts(p)).saturating_mul(l.row() as usize * 4);
        let joins = caps.max_workgroup >= JOINING;
        l.split = few && l.parts(p) > 1 && bytes <= TEMPORARY && joins;
        Some(l)
    }

    /// Positions of a part.
    fn part(&self) -> u32 {
        self.items * EACH
    }

    /// Parts that the table can address.
    fn parts(&self, p: &Problem<'_>) -> usize {
        p.reach.div_ceil(self.part() as usize)
    }

    /// Workgroups of a row.
    fn groups(&self, p: &Problem<'_>) -> usize {
        p.heads / self.heads as usize
    }

    /// Elements of the temporary for one part of a row and head.
    fn row(&self) -> u32 {
        self.value * 4 + TAIL
    }

    /// Words of workgroup memory.
    fn words(&self) -> u32 {
        let heads = self.key * 4 + self.part() + self.items + self.sums() * 4 + self.slices + self.value * 4;
        self.heads * heads + self.part()
    }

    /// Vectors of one head in the array of the slices' sums.
    fn sums(&self) -> u32 {
        self.slices * self.columns * self.per
    }
}

pub(super) fn lower(p: &Problem<'_>, l: Layout, caps: &Caps) -> Result<Lowered, Declined> {
    let operands = p.operands();
    let name = if l.split { "cached_attention_part" } else { "cached_attention_row" };
    let t = Kernel::new(name, l.items, &operands);
    write(&t, p, l);
    let parts = if l.split { l.parts(p) } else { 1 };
    let groups = p.rows * l.groups(p) * parts;
    let (k, launch) = t.finish(groups as u64, caps.max_groups).map_err(declined)?;
    verify_for(&k, caps).map_err(declined)?;
    let n = p.inputs.len();
    if !l.split {
        return Ok(Lowered { steps: vec![(k, launch, (0..=n).collect())], temps: vec![] });
    }
    let (joining, second) = join(p, l, caps)?;
    // The parts read neither the sinks nor the result. The temporary has the number after the result.
    let first = (0..6).chain([n + 1]).collect();
    let then = [n + 1, 5].into_iter().chain((n > 6).then_some(6)).chain([n]).collect();
    let bytes = p.rows * p.heads * parts * l.row() as usize * 4;
    Ok(Lowered { steps: vec![(k, launch, first), (joining, second, then)], temps: vec![bytes] })
}

/// The workgroup's arrays.
struct Arrays<'a> {
    query: Local<'a>,
    /// Weights of the part, by head and position.
    weights: Local<'a>,
    /// For the maxima.
    scratch: Local<'a>,
    /// Where the values of the part's positions start.
    places: Local<'a>,
    /// The slices' sums of weighted values and of weights.
    sums: Local<'a>,
    totals: Local<'a>,
}

/// A kernel being written.
struct Cx<'a, 'l> {
    b: &'a Builder,
    io: &'l Io<'a>,
    arrays: Arrays<'a>,
    l: Layout,
    lid: E<'a>,
    row: Row<'a>,
    /// Key head, and first query head.
    shared: E<'a>,
    head: E<'a>,
}

fn write(t: &Kernel, p: &Problem<'_>, l: Layout) {
    let b = &t.b;
    let (io, sinks, y, temp) = declare(t, p, l.split);
    let (rows, groups) = (t.size("rows", p.rows), t.size("groups", l.groups(p)));
    let per_key = t.size("per_key", p.shared / l.heads as usize);
    let parts = t.size("parts", if l.split { l.parts(p) } else { 1 });
    let arrays = Arrays {
        query: b.local(Ty::F32x4, (l.heads * l.key).max(1)),
        weights: b.local(Ty::F32, l.heads * l.part()),
        scratch: b.local(Ty::F32, l.heads * l.items),
        places: b.local(b.ix(), l.part()),
        sums: b.local(Ty::F32x4, l.heads * l.sums()),
        totals: b.local(Ty::F32, l.heads * l.slices),
    };
    let g = b.let_(b.linear_group());
    let count = b.let_(rows * groups * parts);
    // Workgroups of a folded grid that have no work repeat the last one's row.
    let item = b.let_(g.min(count - 1));
    let (own, rest) = (b.let_(item.imod(parts)), b.let_(item.idiv(parts)));
    let (r, group) = (b.let_(rest.idiv(groups)), b.let_(rest.imod(groups)));
    let row = io.row(r);
    let (shared, head) = (b.let_(group.idiv(per_key)), b.let_(group * i64::from(l.heads)));
    let cx = Cx { b, io: &io, arrays, l, lid: b.let_(b.local_id(0)), row, shared, head };
    cx.load_query(r);
    let end = t.work(count, cx.row.end.div_ceil(l.part()));
    let first = b.let_(cx.row.first.idiv(l.part()));
    if let Some(temp) = temp {
        let end = b.let_(end.min(own + 1));
        b.for_(own.max(first), end, 1, |part| {
            let tops = cx.part(part);
            let place = |h: u32| {
                (((r * (groups * i64::from(l.heads)) + head + i64::from(h)) * parts) + own)
                    * i64::from(l.row())
            };
            cx.store_part(temp, &tops, place);
        });
        return;
    }
    let Some(y) = y else { return };
    let running: Vec<Running<'_>> = (0..l.heads).map(|_| Running::new(b)).collect();
    let result = b.local(Ty::F32x4, (l.heads * l.value).max(1));
    let each = |f: &dyn Fn(E<'_>)| b.for_(cx.lid, i64::from(l.value), l.items, f);
    for h in 0..l.heads {
        each(&|i| result.store(i + i64::from(h * l.value), b.constant(Ty::F32x4, 0.0)));
    }
    b.for_(first, end, 1, |part| {
        let tops = cx.part(part);
        for (h, (run, top)) in (0..l.heads).zip(running.iter().zip(tops)) {
            let (before, after) = run.join(top, cx.total(h));
            each(&|i| {
                let at = i + i64::from(h * l.value);
                let old = result.load(at) * before.to(Ty::F32x4);
                result.store(at, cx.sum(h, i).fma(after.to(Ty::F32x4), old));
            });
        }
        b.barrier();
    });
    for (h, run) in (0..l.heads).zip(running) {
        let h64 = i64::from(h);
        let sink = sinks.as_ref().map(|s| s.load(b, &[head + h64]));
        let (factor, sum) = run.finish(sink);
        each(&|i| {
            let v = b.let_(result.load(i + i64::from(h * l.value)));
            for e in 0..4 {
                let c = b.let_(i * 4 + i64::from(e));
                let out = cx.row.used.select(v.lane(e) * factor / sum, 0.0);
                b.if_(g.lt(count).and(c.lt(io.values.size)), || y.store(b, &[r, head + h64, c], out));
            }
        });
    }
}

impl<'a> Cx<'a, '_> {
    /// Copies the queries to workgroup memory. The first barrier of [`Cx::part`] is between the copy and the
    /// reads of the second part; this barrier is before those of the first.
    fn load_query(&self, r: E<'a>) {
        let (b, l, q) = (self.b, &self.l, &self.io.q);
        b.for_(self.lid, i64::from(l.heads * l.key), l.items, |i| {
            let (h, first) =
                (b.let_(i.idiv(i64::from(l.key.max(1)))), b.let_(i.imod(i64::from(l.key.max(1))) * 4));
            let x = [0, 1, 2, 3].map(|e| {
                let c = first + e;
                b.load_if(q.buf, q.at(b, &[r, self.head + h, c]), c.lt(self.io.keys.size))
            });
            self.arrays.query.store(i, b.vector(&x));
        });
        b.barrier();
    }

    /// Computes one part. Returns the maximum of the scores of each head. The sums are in workgroup memory,
    /// after a barrier.
    fn part(&self, part: E<'a>) -> Vec<E<'a>> {
        let (b, l, a) = (self.b, &self.l, &self.arrays);
        let base = b.let_(part * i64::from(l.part()));
        let scores: Vec<Vec<_>> = (0..EACH)
            .map(|i| {
                let j = b.let_(base + self.lid + i64::from(i * l.items));
                let own: Vec<_> = (0..l.heads).map(|_| b.var_of(Ty::F32, NEG_INF)).collect();
                b.if_(j.ge(self.row.first).and(j.lt(self.row.end)), || {
                    let (key, value) = self.io.place(&self.row, self.shared, j);
                    a.places.store(j - base, value);
                    for (own, dot) in own.iter().zip(self.dots(key)) {
                        own.set(self.io.score(dot));
                    }
                });
                own
            })
            .collect();
        let place = |h: u32| self.lid + i64::from(h * l.items);
        for h in 0..l.heads {
            let all = scores.iter().map(|own| own[h as usize].get()).reduce(E::max);
            a.scratch.store(place(h), all.unwrap_or(base));
        }
        b.barrier();
        b.for_(0, l.items.ilog2(), 1, |s| {
            let step = b.let_(b.constant(Ty::U32, l.items / 2).shr(s.to(Ty::U32)).to(b.ix()));
            b.if_(self.lid.lt(step), || {
                for h in 0..l.heads {
                    a.scratch.store(place(h), a.scratch.load(place(h)).max(a.scratch.load(place(h) + step)));
                }
            });
            b.barrier();
        });
        let tops: Vec<E<'a>> = (0..l.heads).map(|h| a.scratch.load(i64::from(h * l.items))).collect();
        for (h, top) in (0..l.heads).zip(&tops) {
            let shift = shift(b, *top);
            for (i, own) in (0..EACH).zip(&scores) {
                let w = (own[h as usize].get() - shift).exp();
                a.weights.store(self.lid + i64::from(h * l.part() + i * l.items), w);
            }
        }
        b.barrier();
        self.add_values(base);
        b.barrier();
        tops
    }

    /// The products of the queries with a key, in four partial sums each.
    fn dots(&self, key: E<'a>) -> Vec<E<'a>> {
        let (b, l) = (self.b, &self.l);
        let sums: Vec<_> = (0..l.heads).map(|_| b.var_of(Ty::F32x4, 0.0)).collect();
        // Several reads per iteration are in flight together.
        let reads = [4, 2].into_iter().find(|n| l.key.is_multiple_of(l.key_per * n)).unwrap_or(1);
        b.for_(0, i64::from(l.key), l.key_per * reads, |i| {
            let x: Vec<E<'a>> = (0..reads)
                .flat_map(|n| self.io.keys.load(b, key, b.let_((i + i64::from(n * l.key_per)) * 4)))
                .collect();
            for (v, x) in x.into_iter().enumerate() {
                for (h, sum) in (0..l.heads).zip(&sums) {
                    let q = self.arrays.query.load(i + i64::from(h * l.key) + v as i64);
                    sum.set(q.fma(x, sum.get()));
                }
            }
        });
        sums.iter().map(|s| b.let_(s.get())).collect()
    }

    /// Adds the weighted values of a part in slices.
    fn add_values(&self, base: E<'a>) {
        let (b, l, a) = (self.b, &self.l, &self.arrays);
        let (slice, column) = (b.let_(self.lid.idiv(l.columns)), b.let_(self.lid.imod(l.columns)));
        let sums: Vec<Vec<_>> =
            (0..l.heads).map(|_| (0..l.per).map(|_| b.var_of(Ty::F32x4, 0.0)).collect()).collect();
        let totals: Vec<_> = (0..l.heads).map(|_| b.var_of(Ty::F32, 0.0)).collect();
        let first = b.let_(column * i64::from(l.per * 4));
        let end = b.let_((self.row.end - base).min(i64::from(l.part())));
        b.if_(first.lt(self.io.values.size), || {
            b.for_(slice, end, l.slices, |i| {
                b.if_((base + i).ge(self.row.first), || {
                    let x = self.io.values.load(b, a.places.load(i), first);
                    for (h, (sums, total)) in (0..l.heads).zip(sums.iter().zip(&totals)) {
                        let w = a.weights.load(i + i64::from(h * l.part()));
                        total.set(total.get() + w);
                        for (sum, x) in sums.iter().zip(&x) {
                            sum.set(w.to(Ty::F32x4).fma(*x, sum.get()));
                        }
                    }
                });
            });
        });
        for (h, (sums, total)) in (0..l.heads).zip(sums.iter().zip(&totals)) {
            let at = self.lid * i64::from(l.per) + i64::from(h * l.sums());
            sums.iter().enumerate().for_each(|(v, s)| a.sums.store(at + v as i64, s.get()));
            b.if_(column.equals(0), || a.totals.store(slice + i64::from(h * l.slices), total.get()));
        }
    }

    /// The sum of the weights of a part.
    fn total(&self, h: u32) -> E<'a> {
        let (b, l) = (self.b, &self.l);
        let sum = b.var_of(Ty::F32, 0.0);
        b.for_(0, i64::from(l.slices), 1, |s| {
            sum.set(sum.get() + self.arrays.totals.load(s + i64::from(h * l.slices)));
        });
        b.let_(sum.get())
    }

    /// The sum of the weighted values of a part: vector `i` of head `h`.
    fn sum(&self, h: u32, i: E<'a>) -> E<'a> {
        let (b, l) = (self.b, &self.l);
        let sum = b.var_of(Ty::F32x4, 0.0);
        b.for_(0, i64::from(l.slices), 1, |s| {
            let at = s * i64::from(l.columns * l.per) + i + i64::from(h * l.sums());
            sum.set(sum.get() + self.arrays.sums.load(at));
        });
        b.let_(sum.get())
    }

    /// Writes the results of a part to the temporary.
    fn store_part(&self, temp: Buf, tops: &[E<'a>], place: impl Fn(u32) -> E<'a>) {
        let (b, l) = (self.b, &self.l);
        for (h, top) in (0..l.heads).zip(tops) {
            let at = b.let_(place(h).idiv(4));
            b.for_(self.lid, i64::from(l.value), l.items, |i| b.store_vector(temp, at + i, self.sum(h, i)));
            let total = self.total(h);
            b.if_(self.lid.equals(0), || {
                let zero = b.constant(Ty::F32, 0.0);
                b.store_vector(temp, at + i64::from(l.value), b.vector(&[total, *top, zero, zero]));
            });
        }
        b.barrier();
    }
}

/// The kernel that joins the parts of a row and head, in order: one workgroup for each.
fn join(p: &Problem<'_>, l: Layout, caps: &Caps) -> Result<(crate::kernel::Kernel, Launch), Declined> {
    let operands = p.operands();
    let t = Kernel::new("cached_attention_join", JOINING, &operands);
    let b = &t.b;
    let temp = b.raw_buffer(DType::F32, false);
    let position = t.input(&p.inputs[5]);
    let sinks = p.inputs.get(6).map(|o| t.input(o));
    let y = t.output(p.out);
    let (rows, heads, parts) =
        (t.size("rows", p.rows), t.size("heads", p.heads), t.size("parts", l.parts(p)));
    let (reach, size) = (t.size("reach", p.reach), t.size("size", p.value));
    let window = p.options.window.map(|w| t.size("window", w.min(p.reach)));
    let g = b.let_(b.linear_group());
    b.if_(g.lt(rows * heads), || {
        let (r, h) = (b.let_(g.idiv(heads)), b.let_(g.imod(heads)));
        let raw = position.load(b, &[r]).to(b.ix());
        let used = b.let_(raw.ge(0));
        let end = b.let_(used.select(raw.min(reach - 1) + 1, 0));
        let first = window.map_or(b.index(0), |w| b.let_((end - w).max(0)));
        let (first, end) = (b.let_(first.idiv(l.part())), b.let_(end.div_ceil(l.part())));
        let quad = i64::from(l.row() / 4);
        let start = b.let_(g * parts * quad);
        let sink = sinks.as_ref().map(|s| s.load(b, &[h]));
        b.for_(b.local_id(0), i64::from(l.value), JOINING, |i| {
            let run = Running::new(b);
            let sum = b.var_of(Ty::F32x4, 0.0);
            b.for_(first, end, 1, |part| {
                let at = b.let_(start + part * quad);
                let tail = b.load_vector(temp, Ty::F32x4, at + i64::from(l.value));
                let v = b.load_vector(temp, Ty::F32x4, at + i);
                let (before, after) = run.join(tail.lane(1), tail.lane(0));
                let old = sum.get() * before.to(Ty::F32x4);
                sum.set(v.fma(after.to(Ty::F32x4), old));
            });
            let (factor, divisor) = run.finish(sink);
            let v = b.let_(sum.get());
            for e in 0..4 {
                let c = b.let_(i * 4 + i64::from(e));
                let out = used.select(v.lane(e) * factor / divisor, 0.0);
                b.if_(c.lt(size), || y.store(b, &[r, h, c], out));
            }
        });
    });
    let (k, launch) = t.finish((p.rows * p.heads) as u64, caps.max_groups).map_err(declined)?;
    verify_for(&k, caps).map_err(declined)?;
    Ok((k, launch))
}
