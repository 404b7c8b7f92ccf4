//! The result of one block of positions for the queries of a tile. [`super`] describes blocks and tiles.

use super::pack::{pack_keys, pack_values};
use super::{BLOCK, Cached, Job, Part, QUERIES, Row, clamped};
use crate::cpu::library::simd::Simd;
use crate::cpu::vmath;

/// Floats from one row of scores to the next. This is an odd number of cache lines, so that the elements of a
/// column are in different sets of a cache.
const PITCH: usize = BLOCK + 16;
/// Positions whose values are converted at a time for one register tile: they stay in the first-level cache
/// until they are added. For more queries, all values of a block are converted first.
const STRIP: usize = 32;
/// Largest number of rows of a register tile.
const MOST_ROWS: usize = 12;
/// Vectors per row of a register tile.
pub(super) const NV: usize = 2;

/// Offsets in floats of the parts of a thread's scratch memory.
pub(super) struct Room {
    pub(super) queries: usize,
    keys: usize,
    values: usize,
    scores: usize,
    /// The result of a block, and the merged result.
    pub(super) block: usize,
    pub(super) merged: usize,
    pub(super) end: usize,
}

impl Room {
    pub(super) fn new(lanes: usize, a: &Cached) -> Room {
        let mut at = 0;
        let mut piece = |n: usize| {
            at += n.next_multiple_of(16);
            at - n.next_multiple_of(16)
        };
        let wide = wide(lanes, a);
        Room {
            queries: piece(QUERIES * a.d),
            keys: piece(NV * lanes * a.d),
            values: piece(BLOCK * wide),
            scores: piece(QUERIES * PITCH),
            block: piece(QUERIES * (wide + 2)),
            merged: piece(QUERIES * (wide + 2)),
            end: at.next_multiple_of(1024),
        }
    }
}

/// Floats from one row of sums of values to the next.
pub(super) fn wide(lanes: usize, a: &Cached) -> usize {
    a.dv.next_multiple_of(NV * lanes)
}

/// For each of some queries: the largest score, the sum of the weights, and the weighted sum of the values,
/// whose rows are [`wide`] floats apart.
#[derive(Clone, Copy)]
pub(super) struct Partial {
    pub(super) top: *mut f32,
    pub(super) sum: *mut f32,
    pub(super) out: *mut f32,
}

impl Partial {
    /// The result of `n` queries, in `n * (wide + 2)` floats at `p`.
    pub(super) fn at(p: *mut f32, n: usize) -> Partial {
        Partial { top: p, sum: p.wrapping_add(n), out: p.wrapping_add(2 * n) }
    }
}

/// The positions of a block that each query of a tile sees, and that any of them sees, counted from the
/// block's first.
pub(super) struct Seen {
    pub(super) from: [usize; QUERIES],
    pub(super) to: [usize; QUERIES],
    pub(super) all: (usize, usize),
}

impl Seen {
    pub(super) fn new(rows: &[Row], heads: usize, block: usize) -> Seen {
        let mut seen = Seen { from: [0; QUERIES], to: [0; QUERIES], all: (BLOCK, 0) };
        let inside = |p: usize| p.saturating_sub(block * BLOCK).min(BLOCK);
        for (r, row) in rows.iter().enumerate() {
            let (from, to) = (inside(row.from), inside(row.to));
            // A row that sees nothing of the block has an empty range.
            let (from, to) = if from < to { (from, to) } else { (0, 0) };
            seen.from[r * heads..(r + 1) * heads].fill(from);
            seen.to[r * heads..(r + 1) * heads].fill(to);
            if from < to {
                seen.all = (seen.all.0.min(from), seen.all.1.max(to));
            }
        }
        seen
    }
}

/// A block of a tile: what its queries see, and the numbers of the rows `[pages, key heads, page]` of keys
/// and values that hold the seen positions.
pub(super) struct BlockRows {
    pub(super) seen: Seen,
    pub(super) at: [usize; BLOCK],
}

impl BlockRows {
    /// A block of which nothing is seen.
    pub(super) const NONE: BlockRows =
        BlockRows { seen: Seen { from: [0; QUERIES], to: [0; QUERIES], all: (BLOCK, 0) }, at: [0; BLOCK] };

    /// # Safety
    /// The contract of [`super::compute_part`].
    pub(super) unsafe fn new(job: &Job<'_>, part: &Part, block: usize) -> BlockRows {
        let (a, tile) = (job.a, &job.tiles[part.tile]);
        let rows = &job.rows[tile.first..tile.first + tile.rows];
        let mut this = BlockRows { seen: Seen::new(rows, tile.heads, block), at: [0; BLOCK] };
        let (mut j, end) = this.seen.all;
        while j < end {
            let position = block * BLOCK + j;
            let (column, slot) = (position / a.page, position % a.page);
            // SAFETY: `sequence < a.sequences`, and a seen position is below `a.columns * a.page`.
            let page = unsafe { *job.operands.table.get().add(rows[0].sequence * a.columns + column) };
            let page = clamped(page, a.pages, job.fault);
            let run = (a.page - slot).min(end - j);
            let first = (page * a.shared + part.shared) * a.page + slot;
            for (i, x) in this.at[j..j + run].iter_mut().enumerate() {
                *x = first + i;
            }
            j += run;
        }
        this
    }
}

/// Calls `$f` with the number of rows that [`tile_rows`] gives, as a constant.
macro_rules! with_rows {
    ($s:ident, $left:expr, $f:ident($($arg:expr),*)) => {
        match $left {
            12.. if $s::MR >= 12 => $f::<$s, 12>($($arg),*),
            8.. if $s::MR >= 8 => $f::<$s, 8>($($arg),*),
            6.. if $s::MR >= 6 => $f::<$s, 6>($($arg),*),
            4.. => $f::<$s, 4>($($arg),*),
            2.. => $f::<$s, 2>($($arg),*),
            _ => $f::<$s, 1>($($arg),*),
        }
    };
}

/// The largest number of rows of a register tile that is not above `left`.
fn tile_rows<S: Simd>(left: usize) -> usize {
    [12, 8, 6].into_iter().find(|r| left >= *r && S::MR >= *r).unwrap_or(match left {
        4.. => 4,
        2.. => 2,
        _ => 1,
    })
}

/// The result of one block, of which at least one query sees a position.
///
/// # Safety
/// The contract of [`super::compute_part`]. `own` holds the queries, and `to` has room for the result. The
/// caller is compiled for the instruction set of `S`.
#[inline(always)]
pub(super) unsafe fn block_result<S: Simd>(
    job: &Job<'_>,
    n: usize,
    (block, next): (&BlockRows, &BlockRows),
    own: *mut f32,
    to: Partial,
) {
    let (a, seen) = (job.a, &block.seen);
    let (room, nr, wide) = (Room::new(S::W, a), NV * S::W, wide(S::W, a));
    // SAFETY: `own` has the pieces of `Room`, and the rows of `block` are readable. Panels and tiles lie in
    // their pieces: panels have `nr` keys of a block or `nr` features of a row of values, and tiles have rows
    // below `n`.
    unsafe {
        let (qs, ks, vs) = (own.add(room.queries), own.add(room.keys), own.add(room.values));
        let s = own.add(room.scores);
        for p in seen.all.0 / nr..seen.all.1.div_ceil(nr) {
            pack_keys::<S>(job, block, p * nr, ks);
            let mut i = 0;
            while i < n {
                let rows = tile_rows::<S>(n - i);
                let sees = |i: usize| seen.from[i] < (p + 1) * nr && seen.to[i] > p * nr;
                if (i..i + rows).any(sees) {
                    let q = qs.add(i * a.d);
                    with_rows!(S, n - i, score_tile(a.d, q, ks, s.add(i * PITCH + p * nr)));
                }
                i += rows;
            }
        }
        for i in 0..n {
            let (from, end) = (seen.from[i], seen.to[i]);
            (*to.top.add(i), *to.sum.add(i)) = weights::<S>(a, s.add(i * PITCH), from, end);
        }
        let strip = if n <= MOST_ROWS { STRIP } else { BLOCK };
        for from in (seen.all.0 / strip * strip..seen.all.1).step_by(strip) {
            let (near, fresh) = ((from, from + strip), from <= seen.all.0);
            pack_values::<S>(job, block, next, near, vs);
            // Positions are counted from the first of the block, but a panel begins with the strip.
            let vs = vs.wrapping_sub(from * nr);
            for j in (0..wide).step_by(nr) {
                let mut i = 0;
                while i < n {
                    let rows = tile_rows::<S>(n - i);
                    let (s, v) = (s.add(i * PITCH), vs.wrapping_add(j * strip));
                    let out = (to.out.wrapping_add(i * wide + j), wide);
                    value_rows::<S>((seen, i, rows), near, s, v, out, fresh);
                    i += rows;
                }
            }
        }
    }
}

/// The scores of `R` queries, rows of `d` floats, and a panel of keys.
///
/// # Safety
/// The queries and the panel are readable, and `R` rows of `s`, [`PITCH`] floats apart, are writable for
/// `NV W` floats. The caller is compiled for the instruction set of `S`.
#[inline(always)]
unsafe fn score_tile<S: Simd, const R: usize>(d: usize, q: *const f32, k: *const f32, s: *mut f32) {
    // SAFETY: by contract the queries have `d` features, the panel has `d` rows, and the tile is writable.
    unsafe {
        let mut acc = [[S::zero(); NV]; R];
        multiply::<S, R>(&mut acc, d, (q, d), k);
        for i in 0..R {
            for v in 0..NV {
                S::store(s.add(i * PITCH + v * S::W), acc[i][v]);
            }
        }
    }
}

/// Adds `n` products to each sum: `acc[i] += x[i][k] b[k]` in the order of `k`. Rows of `x` are `x.1` floats
/// apart.
///
/// # Safety
/// `x` is readable for `R` rows of `n` floats and `b` for `n` rows of `NV W` floats. The caller is compiled
/// for the instruction set of `S`.
#[inline(always)]
unsafe fn multiply<S: Simd, const R: usize>(
    acc: &mut [[S::V; NV]; R],
    n: usize,
    x: (*const f32, usize),
    b: *const f32,
) {
    /// Steps per iteration of the unrolled loop.
    const UNROLL: usize = 4;
    // SAFETY: `k < n` in every access, and the contract makes these elements readable.
    unsafe {
        // One pointer serves three rows, whose offsets from it are 0, 1 and 2 times the stride: an address on
        // x86-64 can contain such a multiple of a register.
        let mut rows = [x.0; R];
        for g in 1..R.div_ceil(3) {
            rows[g] = x.0.wrapping_add(3 * g * x.1);
        }
        let mut b = b;
        macro_rules! turn {
            ($n:expr) => {
                for u in 0..$n {
                    let mut bv = [S::zero(); NV];
                    for v in 0..NV {
                        bv[v] = S::load(b.add((u * NV + v) * S::W));
                    }
                    for i in 0..R {
                        let x = S::splat(*rows[i / 3].wrapping_add(i % 3 * x.1 + u));
                        for v in 0..NV {
                            acc[i][v] = S::fma(x, bv[v], acc[i][v]);
                        }
                    }
                }
                for g in 0..R.div_ceil(3) {
                    rows[g] = rows[g].wrapping_add($n);
                }
                b = b.wrapping_add($n * NV * S::W);
            };
        }
        let mut left = n;
        while left >= UNROLL {
            turn!(UNROLL);
            left -= UNROLL;
        }
        while left > 0 {
            turn!(1);
            left -= 1;
        }
    }
}

/// Turns the scores of a query at positions `from..to` into weights `e^(score - top)`. Returns the largest
/// score and the sum of the weights.
///
/// # Safety
/// `s` is valid for all vectors that have a lane in `from..to`, counted from `s`. The caller is compiled for
/// the instruction set of `S`.
#[inline(always)]
unsafe fn weights<S: Simd>(a: &Cached, s: *mut f32, from: usize, to: usize) -> (f32, f32) {
    if from >= to {
        return (f32::NEG_INFINITY, 0.0);
    }
    let (first, end) = (from / S::W * S::W, to.next_multiple_of(S::W));
    // SAFETY: the contract makes `first..end` valid, and these are whole vectors.
    unsafe {
        let row = std::slice::from_raw_parts_mut(s.add(first), end - first);
        if let Some(c) = a.softcap {
            for x in row.iter_mut() {
                let t = *x / c;
                *x = c * if S::FMA { vmath::tanh::<true>(t) } else { vmath::tanh::<false>(t) };
            }
        }
        row[..from - first].fill(f32::NEG_INFINITY);
        row[to - first..].fill(f32::NEG_INFINITY);
        let mut most = [S::splat(f32::NEG_INFINITY); 4];
        let n = (end - first) / S::W;
        for j in 0..n {
            // A score that is NaN does not count. Its weight is NaN.
            most[j % 4] = S::max(S::load(s.add(first + j * S::W)), most[j % 4]);
        }
        let most = S::max(S::max(most[0], most[1]), S::max(most[2], most[3]));
        let mut lanes = [0f32; 16];
        S::store(lanes.as_mut_ptr(), most);
        let top = lanes[..S::W].iter().fold(f32::NEG_INFINITY, |m, x| if *x > m { *x } else { m });
        let base = [if top == f32::NEG_INFINITY { 0.0 } else { top }; 16];
        let mut sum = [0f32; 16];
        S::weigh(s.add(first), n, S::W, &base[..S::W], &mut sum[..S::W]);
        (top, S::sum(S::load(sum.as_ptr())))
    }
}

/// Adds the values at positions `near` of a block, for one panel of features, to the sums of queries `i..i +
/// rows`, which begin with 0 if `fresh`. Each query adds the values of the positions that it sees, and no
/// others: an unseen value may be NaN.
///
/// # Safety
/// The contract of [`value_run`] for `rows` rows and the seen positions of `near`.
#[inline(always)]
unsafe fn value_rows<S: Simd>(
    (seen, i, rows): (&Seen, usize, usize),
    near: (usize, usize),
    s: *const f32,
    v: *const f32,
    (out, wide): (*mut f32, usize),
    fresh: bool,
) {
    let (mut from, mut to) = ([0; MOST_ROWS], [0; MOST_ROWS]);
    // All queries see the positions `first..end`.
    let (mut first, mut end, mut low) = (0, BLOCK, BLOCK);
    for r in 0..rows {
        let inside = |p: usize| p.clamp(near.0, near.1);
        (from[r], to[r]) = (inside(seen.from[i + r]), inside(seen.to[i + r]));
        (first, end, low) = (first.max(from[r]), end.min(to[r]), low.min(from[r]));
    }
    let same = low == first && first < end;
    // SAFETY: the contract covers the rows and the positions.
    unsafe {
        if !same {
            for r in 0..rows {
                let to = if first < end { first } else { to[r] };
                let near = (from[r], to.max(from[r]));
                if near.0 == near.1 && !fresh {
                    continue;
                }
                value_run::<S, 1>(near, s.add(r * PITCH), v, (out.add(r * wide), wide), fresh);
            }
        }
        if first < end {
            with_rows!(S, rows, value_run((first, end), s, v, (out, wide), same && fresh));
            for r in (0..rows).filter(|r| to[*r] > end) {
                value_run::<S, 1>((end, to[r]), s.add(r * PITCH), v, (out.add(r * wide), wide), false);
            }
        }
    }
}

/// Adds the weighted values at positions `from..to` to the sums of `R` queries, which begin with 0 if
/// `fresh`. The sums of a query begin at `out.0`, and those of the next query `out.1` floats later.
///
/// # Safety
/// `s` is readable for `R` rows of weights, [`PITCH`] floats apart, and `v` for the panel's rows of `NV W`
/// values, at these positions. `out` is writable for `R` rows of `NV W` floats, and readable unless `fresh`.
/// The caller is compiled for the instruction set of `S`.
#[inline(always)]
unsafe fn value_run<S: Simd, const R: usize>(
    (from, to): (usize, usize),
    s: *const f32,
    v: *const f32,
    out: (*mut f32, usize),
    fresh: bool,
) {
    // SAFETY: by contract weights and values are readable at `from..to`, and the tile at `out` is valid.
    unsafe {
        let mut acc = [[S::zero(); NV]; R];
        if !fresh {
            for i in 0..R {
                for u in 0..NV {
                    acc[i][u] = S::load(out.0.add(i * out.1 + u * S::W));
                }
            }
        }
        multiply::<S, R>(&mut acc, to - from, (s.add(from), PITCH), v.wrapping_add(from * NV * S::W));
        for i in 0..R {
            for u in 0..NV {
                S::store(out.0.add(i * out.1 + u * S::W), acc[i][u]);
            }
        }
    }
}
