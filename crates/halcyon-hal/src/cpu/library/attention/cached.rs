//! Attention over a paged cache of keys and values: the composite `cached_attention`.
//!
//! Results are batch-invariant: the bits of a row depend only on its query and on the cached positions that
//! it sees. So every row is computed by the same operations in the same order, with any company of other
//! rows and any number of threads:
//!
//! - Positions are in blocks of [`BLOCK`], counted from position 0. A block has a result for itself: the
//!   largest score, the sum of the weights, and the weighted sum of the values.
//! - The results of the blocks that a row sees are merged in the order of positions (Milakov and Gimelshein,
//!   "Online normalizer calculation for softmax", 2018).
//! - In a block, a score is a sum in the order of features, one key per lane, and a sum of values is in the
//!   order of positions, one feature per lane.
//!
//! A tile holds the queries of one key head in neighbouring rows of one sequence. The tile reads each block
//! once, converts it to f32, and transposes the keys. In decoding, a tile holds the heads of one row. If
//! there are few tiles, the blocks of a tile are spread over several threads, and their results are merged
//! later.

mod block;
mod pack;

use crate::Declined;
use crate::cpu::library::calls::dense;
use crate::cpu::library::simd::{Simd, Sizes as Vectors, dispatch_simd};
use crate::cpu::library::{CpuKernel, Fault, Run};
use crate::cpu::sys::Isa;
use crate::cpu::team::{AssertSync, SharedConst, SharedMut, Team};
use crate::cpu::vmath;
use crate::library_call::CallForm;
use block::{BlockRows, Partial, Room, Seen, block_result, wide};
use halcyon_ir::composite::Composite;
use halcyon_ir::layout::View;
use halcyon_ir::ops::CachedAttentionSizes;
use pack::{Kept, Numbers};

/// Positions of a block.
const BLOCK: usize = 256;
/// Largest number of queries in a tile: a multiple of the rows of every register tile.
const QUERIES: usize = 96;
/// Parts of the work to make per thread. There are several, so that one delayed part does not delay the call.
const PARTS: usize = 4;
/// The cost of reading a block, in queries that would take as long to compute.
const READING: usize = 6;
/// Largest number of floats that hold the results of single blocks.
const MOST_KEPT: usize = 16 << 20;
/// Calls with fewer multiply-adds than this run on the calling thread.
const SERIAL: usize = 200_000;

/// The sizes and options of a call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cached {
    pub rows: usize,
    /// Query heads: a multiple of `shared`.
    pub heads: usize,
    /// Key heads.
    pub shared: usize,
    /// Features of queries and keys (`d`) and of values (`dv`).
    pub d: usize,
    pub dv: usize,
    /// Number of pages, and positions per page.
    pub pages: usize,
    pub page: usize,
    /// Rows and columns of the table.
    pub sequences: usize,
    pub columns: usize,
    pub scale: f32,
    pub softcap: Option<f32>,
    pub window: Option<usize>,
}

impl Cached {
    /// Query heads per key head.
    fn group(&self) -> usize {
        self.heads / self.shared
    }
}

/// The dense operands of a call. Their shapes are those of [`halcyon_ir::Graph::cached_attention`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Operands {
    pub q: SharedConst<f32>,
    pub keys: Numbers,
    pub values: Numbers,
    pub table: SharedConst<i32>,
    pub sequence: SharedConst<i32>,
    pub position: SharedConst<i32>,
    /// Null if there are none.
    pub sinks: SharedConst<f32>,
    pub y: SharedMut<f32>,
}

/// A kernel for the composite `cached_attention`.
pub(crate) fn call(isa: Isa, call: &CallForm<'_>, c: &Composite) -> Result<CpuKernel, Declined> {
    let because = |what: &str| Err(Declined::because(what));
    let Some(options) = c.cached_attention() else { return because("no scale") };
    let Some(s) = c.cached_attention_sizes(call.inputs, call.outputs) else {
        return because("the operands have other types or shapes");
    };
    let (Some(k), Some(v)) = (Kept::of(call.inputs[1].dtype), Kept::of(call.inputs[2].dtype)) else {
        return because("keys or values have another type");
    };
    let CachedAttentionSizes { rows, heads, pages, page, sequences, columns, .. } = s;
    if rows > 0 && pages * page * sequences.min(1) * columns.min(1) == 0 {
        return because("there are no positions");
    }
    dense(call, &(0..call.inputs.len()).collect::<Vec<_>>())?;
    let (scale, softcap) = (options.scale as f32, options.softcap.map(|c| c as f32));
    let window = options.window;
    let (shared, d, dv) = (s.key_heads, s.key, s.value);
    let a = Cached { rows, heads, shared, d, dv, pages, page, sequences, columns, scale, softcap, window };
    let views: Vec<View> = call.inputs.iter().map(|o| o.view.clone()).collect();
    CpuKernel::new(format!("cpu.{}.{}", c.kind, isa.name()), call, move |r| {
        // SAFETY: the operands are dense and have the types and the shapes checked above. `CpuKernel::run`
        // has checked that they lie in their buffers, and that the output shares no buffer with an input.
        unsafe { run(r, &a, &views, [k, v]) }
    })
}

/// # Safety
/// The contract of [`cached_attention`] for the operands in the buffers of `r`.
unsafe fn run(r: &Run<'_>, a: &Cached, views: &[View], kept: [Kept; 2]) {
    let numbers = |i: usize| Numbers {
        at: SharedConst((r.bufs[i].ptr as *const u8).wrapping_offset(views[i].offset * kept[i - 1].step())),
        kept: kept[i - 1],
    };
    let ints = |i: usize| SharedConst(r.ptr::<i32>(i, &views[i]));
    let operands = Operands {
        q: SharedConst(r.ptr::<f32>(0, &views[0])),
        keys: numbers(1),
        values: numbers(2),
        table: ints(3),
        sequence: ints(4),
        position: ints(5),
        sinks: SharedConst(views.get(6).map_or(std::ptr::null(), |v| r.ptr::<f32>(6, v))),
        y: SharedMut(r.bufs[views.len()].ptr as *mut f32),
    };
    // SAFETY: the contract of this function.
    unsafe { cached_attention(r.team, r.isa, a, operands, r.fault) }
}

/// What all parts of a call share.
struct Job<'a> {
    a: &'a Cached,
    operands: Operands,
    fault: Fault<'a>,
    /// The rows in use, ordered by sequence and position.
    rows: Vec<Row>,
    tiles: Vec<Tile>,
    /// Memory for the results of single blocks.
    kept: SharedMut<f32>,
}

/// A row of the queries, which sees positions `from..to` of its sequence.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Row {
    sequence: usize,
    to: usize,
    from: usize,
    row: usize,
}

/// Queries of each key head that are computed together: `heads` heads from `head` on, in `rows` of [`Job`].
#[derive(Clone, Copy)]
struct Tile {
    first: usize,
    rows: usize,
    head: usize,
    heads: usize,
    /// Blocks of which a row sees a position.
    blocks: (usize, usize),
}

impl Tile {
    fn queries(&self) -> usize {
        self.rows * self.heads
    }
    fn count(&self) -> usize {
        self.blocks.1 - self.blocks.0
    }
}

/// Blocks of a tile for one key head.
#[derive(Clone, Copy)]
struct Part {
    tile: usize,
    shared: usize,
    blocks: (usize, usize),
    /// The place in [`Job::kept`] of the results of the tile's blocks, if several parts compute them.
    kept: Option<usize>,
}

/// `i` if it is less than `n`; otherwise the nearest index that is, and a fault is reported.
fn clamped(i: i32, n: usize, fault: Fault<'_>) -> usize {
    if i >= 0 && (i as usize) < n {
        return i as usize;
    }
    fault.set();
    if i < 0 { 0 } else { n - 1 }
}

/// `y = softmax(scores) values` for each row and head; a row with a negative position becomes 0.
///
/// # Safety
/// The operands are dense, have the shapes that `a` gives and are readable, but positions of the cache that
/// no row sees are not read. `y` is writable and overlaps nothing else. If `a.rows > 0`, the table addresses
/// at least one position, `a.pages > 0`, and `a.heads` is a multiple of `a.shared > 0`.
pub(crate) unsafe fn cached_attention(
    team: &Team,
    isa: Isa,
    a: &Cached,
    operands: Operands,
    fault: Fault<'_>,
) {
    if a.rows * a.heads * a.dv == 0 {
        return;
    }
    let lanes = Vectors::of(isa).lanes;
    // SAFETY: by contract the sequences and positions are readable and `y` is writable for all rows.
    let rows = unsafe { used_rows(a, &operands, fault) };
    let tiles = tiles(a, &rows);
    let (parts, kept) = parts(a, team.threads(), wide(lanes, a), &tiles);
    let seen: usize = rows.iter().map(|r| r.to - r.from).sum();
    let serial = seen.saturating_mul(a.heads).saturating_mul(a.d + a.dv) < SERIAL;
    let each = Room::new(lanes, a).end;
    let workers = if serial { 1 } else { team.threads() };
    let scratch = team.scratch(each * workers);
    let memory = (kept > 0).then(|| team.scratch(kept));
    let kept = SharedMut(memory.as_ref().map_or(std::ptr::null_mut(), |m| m.ptr()));
    let own = SharedMut(scratch.ptr());
    // SAFETY: the pointers of the job are those of the operands, which are only read, the rows of `y`, which
    // belong to one part each, and `kept`, where each part has its own range.
    let job = unsafe { AssertSync::new(Job { a, operands, fault, rows, tiles, kept }) };
    let run = |worker: usize, part: &Part, merge: bool| {
        let own = own.get().wrapping_add(worker * each);
        // SAFETY: the contract of this function covers the operands. A thread has `each` floats of scratch
        // memory of its own. Parts are different blocks of a tile, or different tiles; the second job begins
        // when all parts of the first have ended.
        unsafe {
            if merge {
                merge_part(isa, job.get(), part, own)
            } else {
                compute_part(isa, job.get(), part, own)
            }
        }
    };
    let merges: Vec<Part> = parts
        .iter()
        .copied()
        .filter(|p| p.kept.is_some() && p.blocks.0 == job.get().tiles[p.tile].blocks.0)
        .collect();
    if serial {
        parts.iter().for_each(|p| run(0, p, false));
        merges.iter().for_each(|p| run(0, p, true));
    } else {
        team.run_with(parts.len(), &|worker, i| run(worker, &parts[i], false));
        team.run_with(merges.len(), &|worker, i| run(worker, &merges[i], true));
    }
}

/// The rows in use, in order. The results of the others are set to 0.
///
/// # Safety
/// The contract of [`cached_attention`].
unsafe fn used_rows(a: &Cached, o: &Operands, fault: Fault<'_>) -> Vec<Row> {
    let reach = a.columns.saturating_mul(a.page);
    let mut rows = Vec::with_capacity(a.rows);
    for row in 0..a.rows {
        // SAFETY: `row < a.rows`, the length of both operands and the number of rows of `y`.
        unsafe {
            let position = *o.position.get().add(row);
            if position < 0 {
                std::ptr::write_bytes(o.y.get().add(row * a.heads * a.dv), 0, a.heads * a.dv);
                continue;
            }
            let sequence = clamped(*o.sequence.get().add(row), a.sequences, fault);
            let to = clamped(position, reach, fault) + 1;
            let from = a.window.map_or(0, |w| to.saturating_sub(w));
            rows.push(Row { sequence, to, from, row });
        }
    }
    if !rows.is_sorted() {
        rows.sort_unstable();
    }
    rows
}

/// Divides the rows into tiles.
fn tiles(a: &Cached, rows: &[Row]) -> Vec<Tile> {
    let group = a.group();
    let most = (QUERIES / group).max(1);
    let mut tiles = vec![];
    let mut first = 0;
    while first < rows.len() {
        let near = rows[first..].iter().take(most);
        let n = near.take_while(|r| r.sequence == rows[first].sequence).count();
        let these = &rows[first..first + n];
        let from = these.iter().map(|r| r.from).min().unwrap_or(0) / BLOCK;
        let to = these.iter().map(|r| r.to).max().unwrap_or(0).div_ceil(BLOCK);
        for head in (0..group).step_by(QUERIES) {
            let heads = (group - head).min(QUERIES);
            tiles.push(Tile { first, rows: n, head, heads, blocks: (from, to) });
        }
        first += n;
    }
    tiles
}

/// Divides the tiles into parts, and returns the number of floats for the results of single blocks. The
/// blocks of a tile are spread over several parts if one part would be too large a share of the work.
fn parts(a: &Cached, threads: usize, wide: usize, tiles: &[Tile]) -> (Vec<Part>, usize) {
    let total: usize = tiles.iter().map(|t| t.count() * (t.queries() + READING)).sum();
    let share = total * a.shared / (PARTS * threads);
    let (mut parts, mut floats) = (vec![], 0);
    // The last tiles of a sequence see the most positions. Starting with them balances the threads.
    for (i, t) in tiles.iter().enumerate().rev() {
        let most = (share / (t.queries() + READING)).max(1);
        let need = t.count() * t.queries() * (wide + 2);
        for shared in 0..a.shared {
            let split = threads > 1 && t.count() > most && floats + need <= MOST_KEPT;
            let n = if split { t.count().div_ceil(most) } else { 1 };
            let cut = |p: usize| t.blocks.0 + t.count() * p / n;
            let kept = split.then_some(floats);
            parts.extend((0..n).map(|p| Part { tile: i, shared, blocks: (cut(p), cut(p + 1)), kept }));
            floats += if split { need } else { 0 };
        }
    }
    (parts, floats)
}

dispatch_simd! {
    /// Computes the blocks of a part. Merges their results and stores the rows of `y`, or keeps the result of
    /// each block.
    ///
    /// # Safety
    /// The contract of [`cached_attention`] for the operands of `job`. `own` is writable for the floats of
    /// [`Room`] and used by no other thread. No other thread uses the blocks of the part in [`Job::kept`], or
    /// the rows of `y` if nothing is kept.
    unsafe fn compute_part[][](isa, job: &Job<'_>, part: &Part, own: *mut f32) = compute_body
}
dispatch_simd! {
    /// Merges the kept results of the blocks of a part's tile, and stores the rows of `y`.
    ///
    /// # Safety
    /// The contract of [`compute_part`]; the results of all blocks of the tile are kept.
    unsafe fn merge_part[][](isa, job: &Job<'_>, part: &Part, own: *mut f32) = merge_body
}

/// # Safety
/// The contract of [`compute_part`]; the caller is compiled for the instruction set of `S`.
#[inline(always)]
unsafe fn compute_body<S: Simd>(job: &Job<'_>, part: &Part, own: *mut f32) {
    let (a, tile) = (job.a, &job.tiles[part.tile]);
    let (room, wide, n) = (Room::new(S::W, a), wide(S::W, a), tile.queries());
    let rows = &job.rows[tile.first..tile.first + tile.rows];
    // SAFETY: `own` has the pieces of `Room`, and `kept` the results of all blocks of the tile. The queries
    // of the tile are readable.
    unsafe {
        for (r, row) in rows.iter().enumerate() {
            let at = row.row * a.heads + part.shared * a.group() + tile.head;
            let from = std::slice::from_raw_parts(job.operands.q.get().add(at * a.d), tile.heads * a.d);
            let to = own.add(room.queries + r * tile.heads * a.d);
            for (i, x) in from.iter().enumerate() {
                *to.add(i) = *x * a.scale;
            }
        }
        let merged = Partial::at(own.add(room.merged), n);
        if part.kept.is_none() {
            begin::<S>(job, part, merged);
        }
        let mut next = BlockRows::new(job, part, part.blocks.0);
        for j in next.seen.all.0..next.seen.all.1 {
            job.operands.keys.prefetch::<S>(next.at[j], a.d);
        }
        for block in part.blocks.0..part.blocks.1 {
            let now = next;
            next = match block + 1 < part.blocks.1 {
                true => BlockRows::new(job, part, block + 1),
                false => BlockRows::NONE,
            };
            if now.seen.all.0 >= now.seen.all.1 {
                continue;
            }
            let kept = part.kept.map(|k| job.kept.get().add(k + (block - tile.blocks.0) * n * (wide + 2)));
            let result = Partial::at(kept.unwrap_or(own.add(room.block)), n);
            block_result::<S>(job, n, (&now, &next), own, result);
            if kept.is_none() {
                merge::<S>(n, wide, &now.seen, result, merged);
            }
        }
        if part.kept.is_none() {
            finish::<S>(job, part, merged);
        }
    }
}

/// # Safety
/// The contract of [`merge_part`]; the caller is compiled for the instruction set of `S`.
#[inline(always)]
unsafe fn merge_body<S: Simd>(job: &Job<'_>, part: &Part, own: *mut f32) {
    let tile = &job.tiles[part.tile];
    let (room, wide, n) = (Room::new(S::W, job.a), wide(S::W, job.a), tile.queries());
    let rows = &job.rows[tile.first..tile.first + tile.rows];
    let Some(kept) = part.kept else { return };
    // SAFETY: `own` has the pieces of `Room`, and `kept` the results of all blocks of the tile.
    unsafe {
        let merged = Partial::at(own.add(room.merged), n);
        begin::<S>(job, part, merged);
        for block in tile.blocks.0..tile.blocks.1 {
            let seen = Seen::new(rows, tile.heads, block);
            if seen.all.0 < seen.all.1 {
                let at = kept + (block - tile.blocks.0) * n * (wide + 2);
                merge::<S>(n, wide, &seen, Partial::at(job.kept.get().add(at), n), merged);
            }
        }
        finish::<S>(job, part, merged);
    }
}

/// The result before the first block: only the sinks have a weight.
///
/// # Safety
/// `to` is writable for the queries of the part's tile; the sinks are readable.
#[inline(always)]
unsafe fn begin<S: Simd>(job: &Job<'_>, part: &Part, to: Partial) {
    let (a, tile) = (job.a, &job.tiles[part.tile]);
    // SAFETY: the contract makes the result writable, and a head of the tile is below `a.heads`.
    unsafe {
        std::ptr::write_bytes(to.out, 0, tile.queries() * wide(S::W, a));
        for i in 0..tile.queries() {
            let head = part.shared * a.group() + tile.head + i % tile.heads;
            let sinks = job.operands.sinks.get();
            let sink = if sinks.is_null() { f32::NEG_INFINITY } else { *sinks.add(head) };
            *to.top.add(i) = sink;
            // As in a softmax, the weight of a score that is infinite or NaN is NaN.
            *to.sum.add(i) = match sink {
                f32::NEG_INFINITY => 0.0,
                _ if sink.is_finite() => 1.0,
                _ => f32::NAN,
            };
        }
    }
}

/// e^x with the rounding of `S`.
#[inline(always)]
fn exp<S: Simd>(x: f32) -> f32 {
    if S::FMA { vmath::exp::<true>(x) } else { vmath::exp::<false>(x) }
}

/// Merges the result of a block into the result of the blocks before it. A query that sees nothing of the
/// block keeps its result.
///
/// # Safety
/// Both results are valid for `n <= QUERIES` queries, `to` is writable, and they do not overlap. The caller
/// is compiled for the instruction set of `S`.
#[inline(always)]
unsafe fn merge<S: Simd>(n: usize, wide: usize, seen: &Seen, block: Partial, to: Partial) {
    let (mut keep, mut add) = ([0f32; QUERIES], [0f32; QUERIES]);
    // SAFETY: by contract the results are valid for `n` queries, and a row of values has `wide` floats, a
    // multiple of the lanes.
    unsafe {
        let (top, sum) =
            (std::slice::from_raw_parts_mut(to.top, n), std::slice::from_raw_parts_mut(to.sum, n));
        let own = (std::slice::from_raw_parts(block.top, n), std::slice::from_raw_parts(block.sum, n));
        for i in 0..n {
            let new = if own.0[i] > top[i] { own.0[i] } else { top[i] };
            // If all scores are -inf, all weights are 0.
            let base = if new == f32::NEG_INFINITY { 0.0 } else { new };
            (keep[i], add[i]) = (exp::<S>(top[i] - base), exp::<S>(own.0[i] - base));
            top[i] = new;
            sum[i] = sum[i] * keep[i] + own.1[i] * add[i];
        }
        for i in (0..n).filter(|i| seen.from[*i] < seen.to[*i]) {
            let (k, x) = (S::splat(keep[i]), S::splat(add[i]));
            let (from, to) = (block.out.add(i * wide), to.out.add(i * wide));
            for j in (0..wide).step_by(S::W) {
                let added = S::mul(S::load(from.add(j)), x);
                S::store(to.add(j), S::fma(S::load(to.add(j)), k, added));
            }
        }
    }
}

/// Stores the rows of `y`: the sums of values, divided by the sums of weights.
///
/// # Safety
/// The rows of `y` are writable and used by no other thread; `from` is valid for the queries of the tile. The
/// caller is compiled for the instruction set of `S`.
#[inline(always)]
unsafe fn finish<S: Simd>(job: &Job<'_>, part: &Part, from: Partial) {
    let (a, tile) = (job.a, &job.tiles[part.tile]);
    for i in 0..tile.queries() {
        let row = job.rows[tile.first + i / tile.heads].row;
        let head = part.shared * a.group() + tile.head + i % tile.heads;
        // SAFETY: `row < a.rows` and `head < a.heads`, so the row of `y` exists.
        unsafe {
            let over = 1.0 / *from.sum.add(i);
            let x = std::slice::from_raw_parts(from.out.add(i * wide(S::W, a)), a.dv);
            let y = job.operands.y.get().add((row * a.heads + head) * a.dv);
            for (y, x) in std::slice::from_raw_parts_mut(y, a.dv).iter_mut().zip(x) {
                *y = *x * over;
            }
        }
    }
}

#[cfg(test)]
#[path = "cached_tests.rs"]
mod tests;
