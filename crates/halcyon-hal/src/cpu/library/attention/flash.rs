//! Blocked attention: scores and weights are kept transposed, with one row per key and one column per query.
//!
//! A score tile is then `keys x queries` with queries along the vector. The running maximum and sum of a
//! query each stay in one lane, and a block of weights is the left operand of the second product without
//! packing. Keys are read unpacked where possible; queries and values are packed into panels of the
//! micro-kernel's width.

use crate::cpu::library::attention::{Attention, Operands};
use crate::cpu::library::gemm::panels::{Fma, TileRows, sums};
use crate::cpu::library::gemm::product_f32::pack;
use crate::cpu::library::simd::{Simd, Sizes, dispatch_simd};
use crate::cpu::sys::Isa;
use crate::cpu::vmath;

/// Maximum number of queries in a block. This number and its half are multiples of the rows and columns of
/// every tile.
pub(crate) const BQ: usize = 192;
/// Floats from one row of scores to the next. This is an odd number of cache lines, so that the elements of a
/// column are in different sets of a cache.
const PITCH: usize = BQ + 16;
/// Keys of a block: a multiple of the rows of the largest tile.
const BK: usize = 132;

/// The operands and options that all blocks of a call share.
pub(crate) struct Job<'a> {
    pub a: &'a Attention,
    pub operands: Operands<f32, f32, f32>,
}

/// Rows `r0..r0 + rows` of the queries that share key head `hk` of batch `b`, over the first `valid` keys.
#[derive(Clone, Copy)]
pub(crate) struct Rows {
    pub b: usize,
    pub hk: usize,
    pub r0: usize,
    pub rows: usize,
    pub valid: usize,
}

/// Offsets in floats of the parts of a thread's scratch memory.
struct Room {
    queries: usize,
    scores: usize,
    out: usize,
    values: usize,
    keys: usize,
    mask: usize,
    end: usize,
}

impl Room {
    fn new((mr, nr): (usize, usize), d: usize, dv: usize) -> Room {
        let wide = dv.next_multiple_of(nr);
        let mut at = 0;
        let mut piece = |n: usize| {
            at += n.next_multiple_of(16);
            at - n.next_multiple_of(16)
        };
        Room {
            queries: piece(BQ * d),
            scores: piece(BK.next_multiple_of(mr) * PITCH),
            out: piece(BQ * wide),
            values: piece(BK * wide),
            keys: piece(BK.next_multiple_of(mr) * d),
            mask: piece(BK * 16),
            end: at,
        }
    }
}

/// Floats of scratch memory that a block needs.
pub(crate) fn floats(isa: Isa, d: usize, dv: usize) -> usize {
    Room::new(Sizes::of(isa).attention, d, dv).end.next_multiple_of(1024)
}

/// Stores a tile of scores, `R` keys by one panel of queries, to rows `PITCH` floats apart.
///
/// # Safety
/// `k` is readable for `R` rows of `d` floats, `rs` apart; `q` is a packed panel of `d * NV * W` floats; `s`
/// is writable for `R` rows of `NV * W` floats. The calling function is compiled for the instruction set of
/// `S`.
#[inline(always)]
unsafe fn score_tile<S: Simd, const R: usize, const NV: usize>(
    d: usize,
    k: *const f32,
    rs: isize,
    q: *const f32,
    s: *mut f32,
) {
    // SAFETY: the contract gives `d` readable floats for each of `R` keys and each of `NV * W` queries, and a
    // writable tile at `s`.
    unsafe {
        let acc = sums::<S, Fma, R, NV>(d, TileRows { ptr: k, rs, ks: 1 }, q, std::ptr::null());
        for i in 0..R {
            for v in 0..NV {
                S::store(s.add(i * PITCH + v * S::W), acc[i][v]);
            }
        }
    }
}

/// `o = keep o + weights values` for `R` queries and one panel of features. Rows of `o` are `width` floats
/// apart.
///
/// # Safety
/// `w` is readable for `keys` rows of `R` floats, `PITCH` apart; `v` is a packed panel of `keys * NV * W`
/// floats; `keep` has `R` floats; `o` is readable and writable for `R` rows of `NV * W` floats. The calling
/// function is compiled for the instruction set of `S`.
#[inline(always)]
unsafe fn value_tile<S: Simd, const R: usize, const NV: usize>(
    keys: usize,
    w: *const f32,
    v: *const f32,
    keep: *const f32,
    o: *mut f32,
    width: usize,
) {
    // SAFETY: the contract gives `keys` readable floats for each of `R` queries and each of `NV * W`
    // features, the tile at `o`, and a factor at `keep` for each row of the tile.
    unsafe {
        let acc = sums::<S, Fma, R, NV>(keys, TileRows { ptr: w, rs: 1, ks: PITCH }, v, std::ptr::null());
        for i in 0..R {
            let x = S::splat(*keep.add(i));
            for v in 0..NV {
                let p = o.add(i * width + v * S::W);
                S::store(p, S::fma(S::load(p), x, acc[i][v]));
            }
        }
    }
}

/// Adds the mask to the scores of keys `k0 .. k0 + cols`. Query `i` sees only the first `sees[i]` keys. Sets
/// the scores of the other keys to -inf.
///
/// # Safety
/// The mask has an element for every query of the block and every key that the query sees. `s` holds `cols`
/// rows of scores, `PITCH` apart, each with `BQ` columns, and `room` has `BK * 16` floats; both belong to
/// this thread. The calling function is compiled for the instruction set of `S`.
#[inline(always)]
unsafe fn hide<S: Simd>(
    job: &Job<'_>,
    at: Rows,
    k0: usize,
    cols: usize,
    sees: &[usize; BQ],
    s: *mut f32,
    room: *mut f32,
) {
    let place = |i: usize| {
        let group = job.a.heads / job.a.kv_heads;
        (at.hk * group + (at.r0 + i) / job.a.queries, (at.r0 + i) % job.a.queries)
    };
    // SAFETY: by contract the mask is readable for the keys below `sees[i]` of query `i`, and `s` and `room`
    // hold the rows written here; `cols <= BK` and `W <= 16`.
    unsafe {
        if let Some(mask) = &job.operands.mask {
            let step = mask.strides[3];
            // Whether all queries share one row of the mask, which has one value per key.
            let alike = mask.strides[2] == 0 && (mask.strides[1] == 0 || place(0).0 == place(at.rows - 1).0);
            let seen = sees[..at.rows].iter().map(|n| n.saturating_sub(k0).min(cols)).max().unwrap_or(0);
            if alike {
                let (h, q) = place(0);
                let p = mask.at(at.b, h, q, k0);
                for j in 0..seen {
                    let m = S::splat(*p.wrapping_offset(j as isize * step));
                    for i in (0..at.rows).step_by(S::W) {
                        let x = s.add(j * PITCH + i);
                        S::store(x, S::add(S::load(x), m));
                    }
                }
            } else {
                let mut i = 0;
                while i < at.rows {
                    // The next queries of one head, at most up to the end of a vector.
                    let (h, q) = place(i);
                    let n = (job.a.queries - q).min(at.rows - i).min(S::W - i % S::W);
                    let most =
                        sees[i..i + n].iter().map(|n| n.saturating_sub(k0).min(cols)).max().unwrap_or(0);
                    let least =
                        sees[i..i + n].iter().map(|n| n.saturating_sub(k0).min(cols)).min().unwrap_or(0);
                    let p = mask.at(at.b, h, q, k0);
                    let mut done = 0;
                    if step == 1 && n == S::W {
                        S::transpose(p, mask.strides[2], n, least, room, S::W);
                        for j in 0..least {
                            let x = s.add(j * PITCH + i);
                            S::store(x, S::add(S::load(x), S::load(room.add(j * S::W))));
                        }
                        done = least;
                    }
                    for j in done..most {
                        for r in (0..n).filter(|r| sees[i + r] > k0 + j) {
                            let at = r as isize * mask.strides[2] + j as isize * step;
                            *s.add(j * PITCH + i + r) += *p.wrapping_offset(at);
                        }
                    }
                    i += n;
                }
            }
        }
        let all = sees[..at.rows].iter().copied().min().unwrap_or(0);
        for j in all.saturating_sub(k0).min(cols)..cols {
            let row = std::slice::from_raw_parts_mut(s.add(j * PITCH), BQ);
            for (x, n) in row.iter_mut().zip(sees) {
                *x = if *n <= k0 + j { f32::NEG_INFINITY } else { *x };
            }
        }
    }
}

/// Turns scores into weights `e^(score - m)` and updates the running maxima `m` and sums `l` of the first
/// `width` columns. `keep` receives the factors for the earlier weights.
///
/// # Safety
/// `s` is readable and writable for `cols` rows of `width` floats, `PITCH` apart; `width <= BQ` is a multiple
/// of `W`. The calling function is compiled for the instruction set of `S`.
#[inline(always)]
unsafe fn fold<S: Simd>(
    s: *mut f32,
    cols: usize,
    width: usize,
    m: &mut [f32; BQ],
    l: &mut [f32; BQ],
    keep: &mut [f32; BQ],
) {
    // SAFETY: by contract `s` holds the rows, and `width <= BQ`, the length of the arrays, is a multiple of
    // `W`.
    unsafe {
        let mut base = [0f32; BQ];
        for i in (0..width).step_by(S::W) {
            let mut top = [S::load(m.as_ptr().add(i)); 2];
            let mut j = 0;
            while j + 2 <= cols {
                top[0] = S::max(S::load(s.add(j * PITCH + i)), top[0]);
                top[1] = S::max(S::load(s.add((j + 1) * PITCH + i)), top[1]);
                j += 2;
            }
            if j < cols {
                top[0] = S::max(S::load(s.add(j * PITCH + i)), top[0]);
            }
            S::store(base.as_mut_ptr().add(i), S::max(top[0], top[1]));
        }
        for i in 0..width {
            let new = base[i];
            // If all scores so far are -inf, all weights are 0, and the factor 1.0 leaves the zero output
            // unchanged.
            let none = new == f32::NEG_INFINITY;
            keep[i] = if none { 1.0 } else { vmath::exp::<false>(m[i] - new) };
            base[i] = if none { 0.0 } else { new };
            m[i] = new;
        }
        let mut sum = [0f32; BQ];
        S::weigh(s, cols, PITCH, &base[..width], &mut sum[..width]);
        for i in 0..width {
            l[i] = l[i] * keep[i] + sum[i];
        }
    }
}

/// Calls `$f` with the tile's size as constants, because constants of a trait cannot be generic arguments.
macro_rules! with_tile {
    ($s:ident, $f:ident($($arg:expr),*)) => {
        match ($s::MR, $s::NV) {
            (12, 2) => $f::<$s, 12, 2>($($arg),*),
            (8, 2) => $f::<$s, 8, 2>($($arg),*),
            (6, 2) => $f::<$s, 6, 2>($($arg),*),
            (4, 2) => $f::<$s, 4, 2>($($arg),*),
            _ => unreachable!("no such micro-tile"),
        }
    };
}

/// The body of [`block`].
///
/// # Safety
/// The contract of [`block`]; the calling function is compiled for the instruction set of `S`.
#[inline(always)]
unsafe fn block_body<S: Simd>(job: &Job<'_>, at: Rows, own: *mut f32) {
    let a = job.a;
    let (mr, nr) = (S::MR, S::NV * S::W);
    let room = Room::new((mr, nr), a.d, a.dv);
    let dv = a.dv.next_multiple_of(nr);
    let group = a.heads / a.kv_heads;
    let place = |i: usize| (at.hk * group + (at.r0 + i) / a.queries, (at.r0 + i) % a.queries);
    let mut sees = [at.valid; BQ];
    if a.causal {
        for (i, n) in sees.iter_mut().enumerate().take(at.rows) {
            *n = (place(i).1 + 1 + at.valid).saturating_sub(a.queries).min(at.valid);
        }
        // Columns past the last query are treated like the last query.
        let last = sees[at.rows - 1];
        sees[at.rows..].fill(last);
    }
    let most_of = |i: usize, n: usize| sees[i..(i + n).min(BQ)].iter().copied().max().unwrap_or(0);
    let most = most_of(0, at.rows);
    let (mut m, mut l, mut keep) = ([f32::NEG_INFINITY; BQ], [0f32; BQ], [1f32; BQ]);
    // Sizes in whole panels of queries and in whole tiles of rows.
    let panels = at.rows.div_ceil(nr);
    let (wide, tall) = (panels * nr, at.rows.next_multiple_of(mr).min(BQ));
    // SAFETY: `own` holds the floats that `Room` lays out, and only this thread uses it. `attention`
    // guarantees readable queries, keys and values below `valid`, and writable rows of `y` that only this
    // block writes.
    unsafe {
        let (qs, s, o) = (own.add(room.queries), own.add(room.scores), own.add(room.out));
        let (vs, ks) = (own.add(room.values), own.add(room.keys));
        // Pack the queries, feature by feature. Rows of different heads need not be `rs` apart, so each run
        // of rows of one head is packed separately.
        for p in 0..panels {
            let dst = qs.add(p * nr * a.d);
            std::ptr::write_bytes(dst, 0, nr * a.d);
            let mut i = 0;
            let n = (at.rows - p * nr).min(nr);
            while i < n {
                let (h, r) = place(p * nr + i);
                let run = (a.queries - r).min(n - i);
                let src = job.operands.q.at(at.b, h, r, 0);
                let (rs, cs) = (job.operands.q.strides[2], job.operands.q.strides[3]);
                if run == nr {
                    pack::<S, f32>(src, rs, cs, nr, nr, a.d, dst);
                } else {
                    for x in 0..run {
                        for d in 0..a.d {
                            *dst.add(d * nr + i + x) =
                                *src.wrapping_offset(x as isize * rs + d as isize * cs);
                        }
                    }
                }
                i += run;
            }
            for x in std::slice::from_raw_parts_mut(dst, nr * a.d) {
                *x *= a.scale;
            }
        }
        std::ptr::write_bytes(o, 0, tall * dv);
        // Keys with contiguous features are read unpacked, unless their stride maps many of them to one cache
        // set.
        let step = job.operands.k.strides[2];
        let direct = job.operands.k.strides[3] == 1 && step > 0 && step % 512 != 0;
        let mut k0 = 0;
        while k0 < most {
            let cols = (most - k0).min(BK);
            for j in (0..dv).step_by(nr) {
                let src = job.operands.v.at(at.b, at.hk, k0, j);
                let n = (a.dv - j).min(nr);
                pack::<S, f32>(
                    src,
                    job.operands.v.strides[3],
                    job.operands.v.strides[2],
                    n,
                    nr,
                    cols,
                    vs.add(j * cols),
                );
            }
            // The address and row stride of a tile of keys.
            let tile_of = |t: usize| {
                if direct && t + mr <= cols {
                    (job.operands.k.at(at.b, at.hk, k0 + t, 0), step)
                } else {
                    (ks.add(t * a.d).cast_const(), a.d as isize)
                }
            };
            for t in (0..cols).step_by(mr) {
                let (own, n) = (ks.add(t * a.d), (cols - t).min(mr));
                if direct && n == mr {
                    continue;
                }
                for i in 0..mr {
                    let src = job.operands.k.at(at.b, at.hk, k0 + t + i, 0);
                    for d in 0..a.d {
                        *own.add(i * a.d + d) = if i < n {
                            *src.wrapping_offset(d as isize * job.operands.k.strides[3])
                        } else {
                            0.0
                        };
                    }
                }
            }
            // A panel of queries stays in the first-level cache, while the tiles of keys, which are smaller,
            // are read one after another.
            for p in 0..panels {
                for t in (0..cols).step_by(mr) {
                    let tile = s.add(t * PITCH + p * nr);
                    if a.causal && most_of(p * nr, nr) <= k0 + t {
                        // No query of this panel sees these keys; `hide` sets their scores to -inf.
                        for i in 0..mr {
                            std::ptr::write_bytes(tile.add(i * PITCH), 0, nr);
                        }
                        continue;
                    }
                    let (src, rs) = tile_of(t);
                    with_tile!(S, score_tile(a.d, src, rs, qs.add(p * nr * a.d), tile));
                }
            }
            let all_see = sees[..at.rows].iter().all(|n| *n >= k0 + cols);
            if job.operands.mask.is_some() || !all_see {
                hide::<S>(job, at, k0, cols, &sees, s, own.add(room.mask));
            }
            fold::<S>(s, cols, wide, &mut m, &mut l, &mut keep);
            for j in (0..dv).step_by(nr) {
                for i in (0..tall).step_by(mr) {
                    // The weights of later keys are 0.
                    let n = if a.causal { most_of(i, mr).saturating_sub(k0).min(cols) } else { cols };
                    let (w, v) = (s.add(i), vs.add(j * cols));
                    with_tile!(S, value_tile(n, w, v, keep.as_ptr().wrapping_add(i), o.add(i * dv + j), dv));
                }
            }
            k0 += cols;
        }
        let [_, _, _, step] = job.operands.y.strides;
        for i in 0..at.rows {
            let (h, r) = place(i);
            let to: isize =
                [at.b, h, r, 0].iter().zip(job.operands.y.strides).map(|(i, t)| *i as isize * t).sum();
            let to = job.operands.y.ptr.get().wrapping_offset(to);
            let (row, over) = (std::slice::from_raw_parts(o.add(i * dv), a.dv), 1.0 / l[i]);
            if step == 1 {
                for (y, x) in std::slice::from_raw_parts_mut(to, a.dv).iter_mut().zip(row) {
                    *y = *x * over;
                }
            } else {
                for (d, x) in row.iter().enumerate() {
                    *to.wrapping_offset(d as isize * step) = *x * over;
                }
            }
        }
    }
}

dispatch_simd! {
    /// Attention of one block of rows.
    ///
    /// # Safety
    /// The contract of [`crate::cpu::library::attention::attention`], for these rows. `own` is writable for
    /// [`floats`] floats and used by no other thread. `at.rows` is between 1 and [`BQ`].
    pub(crate) unsafe fn block[][](isa, job: &Job<'_>, at: Rows, own: *mut f32) = block_body
}
