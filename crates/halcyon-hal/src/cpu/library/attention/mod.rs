//! Scaled dot-product attention that never stores the matrix of scores (Milakov and Gimelshein, "Online
//! normalizer calculation for softmax", 2018; Dao et al., "FlashAttention", 2022): it works on blocks of keys
//! with a running maximum and a running sum per row.
//!
//! The rows of all query heads that share a key head form one product, so keys and values are read once for
//! all these heads. `flash.rs` computes many rows, in blocks. This file computes few rows, as in decoding. It
//! reads keys and values once, without packing them. Keys are never split among threads, so results do not
//! depend on the number of threads. `cached.rs` reads keys and values from a paged cache.

pub(super) mod cached;
mod flash;
#[cfg(target_arch = "x86_64")]
pub(super) mod flash_bf16;
pub(super) mod grad;

use crate::cpu::library::gemm::gemv::{ROWS, few_rows_inline};
use crate::cpu::library::gemm::panels::{Left, inline_floats, panels_inline};
use crate::cpu::library::gemm::product_f32::{Epilogue, Gemm, Mat, MatMut, has_few_rows};
use crate::cpu::library::rows::softmax::{exp_in_place, max_of};
use crate::cpu::library::simd::{Simd, dispatch_simd};
use crate::cpu::sys::Isa;
use crate::cpu::team::{AssertSync, SharedConst, SharedMut, Team};
use crate::cpu::vmath;

/// An operand `[batch, head, position, feature]` with its strides in elements.
#[derive(Clone, Copy, Debug)]
pub struct Heads<P> {
    pub ptr: P,
    pub strides: [isize; 4],
}

impl<T> Heads<SharedConst<T>> {
    pub(crate) fn at(&self, b: usize, h: usize, s: usize, d: usize) -> *const T {
        let o = [b, h, s, d].iter().zip(self.strides).map(|(i, t)| *i as isize * t).sum();
        self.ptr.get().wrapping_offset(o)
    }
}

/// The sizes and options of an attention.
#[derive(Clone, Copy, Debug)]
pub struct Attention {
    pub batch: usize,
    /// Query heads; a multiple of `kv_heads`. Query head `h` reads key head `h * kv_heads / heads`.
    pub heads: usize,
    pub kv_heads: usize,
    pub queries: usize,
    pub keys: usize,
    /// Features of queries and keys (`d`) and of values (`dv`).
    pub d: usize,
    pub dv: usize,
    /// Factor of the scores, applied before the mask is added.
    pub scale: f32,
    /// Query `i` attends to keys `j <= i + keys - queries`, where `keys` is the number of valid keys.
    pub causal: bool,
}

/// The operands of an attention: queries, keys and values of type `T`, an additive mask of type `M` and the
/// result of type `Y`. The shapes are those of [`attention`].
#[derive(Clone, Copy, Debug)]
pub struct Operands<T, M, Y> {
    /// Queries, `[batch, heads, queries, d]`.
    pub q: Heads<SharedConst<T>>,
    /// Keys, `[batch, kv_heads, keys, d]`.
    pub k: Heads<SharedConst<T>>,
    /// Values, `[batch, kv_heads, keys, dv]`.
    pub v: Heads<SharedConst<T>>,
    /// Added to the scores, `[batch, heads, queries, keys]`; stride 0 on broadcast axes.
    pub mask: Option<Heads<SharedConst<M>>>,
    /// The result, `[batch, heads, queries, dv]`.
    pub y: Heads<SharedMut<Y>>,
}

/// Keys per block when there are few rows.
const BK: usize = 256;

/// Updates the running maximum `m` and sum `l` of each row with a block of scores, and scales the output `o`
/// if the maximum rose. The scores become the weights `e^(score - m)`.
///
/// # Safety
/// The calling function is compiled for the instruction set of `S`.
#[inline(always)]
unsafe fn fold_body<S: Simd>(
    s: &mut [f32],
    cols: usize,
    m: &mut [f32],
    l: &mut [f32],
    o: &mut [f32],
    dv: usize,
) {
    for (i, row) in s.chunks_exact_mut(cols).enumerate() {
        // SAFETY: `fold_body` requires a caller compiled for the instruction set of `S`.
        let top = unsafe { max_of::<S>(row) };
        let new = if top > m[i] { top } else { m[i] };
        if new == f32::NEG_INFINITY {
            // All scores so far are -inf or NaN. A NaN must be kept.
            let nan = row.iter().any(|v| v.is_nan());
            row.fill(0.0);
            if nan {
                l[i] = f32::NAN;
            }
            continue;
        }
        let keep = vmath::exp::<false>(m[i] - new);
        // SAFETY: `fold_body` requires a caller compiled for the instruction set of `S`.
        l[i] = l[i] * keep + unsafe { exp_in_place::<S>(row, new) };
        if keep != 1.0 {
            for v in &mut o[i * dv..(i + 1) * dv] {
                *v *= keep;
            }
        }
        m[i] = new;
    }
}
dispatch_simd! {
    /// [`fold_body`] for `isa`.
    ///
    /// # Safety
    /// No conditions: it uses slices only, and the dispatch checks that the processor has `isa`.
    unsafe fn fold[][](isa, s: &mut [f32], cols: usize, m: &mut [f32], l: &mut [f32], o: &mut [f32], dv: usize) = fold_body
}

/// The layout of one thread's scratch memory when there are few rows.
struct Layout {
    rows: usize,
    cols: usize,
    gemm: usize,
}

impl Layout {
    fn new(isa: Isa, a: &Attention) -> Layout {
        let rows = a.heads / a.kv_heads * a.queries;
        let cols = a.keys.min(BK);
        let gemm = inline_floats(isa, rows, cols, a.d, true).max(inline_floats(isa, rows, a.dv, cols, true));
        Layout { rows, cols, gemm: gemm.max(ROWS * cols.max(a.dv)) }
    }
    /// Offsets in floats of queries, scores, output, maxima, sums and product buffer, and the total.
    fn offsets(&self, a: &Attention) -> [usize; 7] {
        let mut at = [0; 7];
        let sizes =
            [self.rows * a.d, self.rows * self.cols, self.rows * a.dv, self.rows, self.rows, self.gemm];
        for (i, s) in sizes.iter().enumerate() {
            at[i + 1] = at[i] + s.next_multiple_of(64);
        }
        at
    }
}

/// `y = softmax(scale q k^T + mask) v` per batch and query head: `q` is `[batch, heads, queries, d]`, `k` is
/// `[batch, kv_heads, keys, d]`, `v` is `[batch, kv_heads, keys, dv]` and `y` is
/// `[batch, heads, queries, dv]`.
///
/// `mask` (`[batch, heads, queries, keys]`, stride 0 on broadcast axes) is added to the scores. `lengths`
/// gives the number of valid keys: empty for all keys, one number for every batch, or one per batch; it is
/// clamped to `keys`. If a row attends to no key, or all its scores are -inf, the result is NaN, as the
/// definition implies.
///
/// # Safety
/// Every element of the operands is readable (of `k`, `v` and `mask` only up to the valid length) and every
/// element of `y` is writable; `y` overlaps nothing else.
///
/// # Panics
/// If `heads` is not a multiple of `kv_heads`, or `lengths` has more than one entry but not one per batch.
pub unsafe fn attention(
    team: &Team,
    isa: Isa,
    a: &Attention,
    lengths: &[usize],
    operands: Operands<f32, f32, f32>,
) {
    assert!(
        a.kv_heads > 0 && a.heads.is_multiple_of(a.kv_heads),
        "{} heads are not a multiple of {} key heads",
        a.heads,
        a.kv_heads
    );
    assert!(
        lengths.len() <= 1 || lengths.len() == a.batch,
        "{} lengths for {} batches",
        lengths.len(),
        a.batch
    );
    let group = a.heads / a.kv_heads;
    let all_rows = group * a.queries;
    if a.batch * all_rows * a.dv == 0 {
        return;
    }
    let few = all_rows <= ROWS;
    let layout = few.then(|| Layout::new(isa, a));
    let each = layout.as_ref().map_or_else(|| flash::floats(isa, a.d, a.dv), |l| l.offsets(a)[6]);
    // Each block reads all its keys and values once. Use smaller blocks if threads would lack work otherwise.
    let heads = a.batch * a.kv_heads;
    let enough = heads * all_rows.div_ceil(flash::BQ) >= 4 * team.threads();
    let block_rows = match (few, enough) {
        (true, _) => all_rows,
        (false, true) => flash::BQ,
        (false, false) => flash::BQ / 2,
    };
    let blocks = all_rows.div_ceil(block_rows);
    let scratch = team.scratch(each * team.threads());
    let buf = SharedMut(scratch.ptr());
    let parts = heads * blocks;
    let work = parts.saturating_mul(block_rows).saturating_mul(a.keys).saturating_mul(a.d + a.dv);
    // SAFETY: the job holds pointers and sizes; a part writes its own rows of `y`.
    let job = unsafe { AssertSync::new(flash::Job { a, operands }) };
    let body = |worker: usize, part: usize| {
        // Under a causal mask the last rows attend to the most keys. Starting with them balances the threads.
        let block = blocks - 1 - part % blocks;
        let (b, hk) = (part / blocks / a.kv_heads, part / blocks % a.kv_heads);
        let (r0, r1) = (block * block_rows, ((block + 1) * block_rows).min(all_rows));
        let valid = match lengths {
            [] => a.keys,
            [n] => (*n).min(a.keys),
            many => many[b].min(a.keys),
        };
        let at = flash::Rows { b, hk, r0, rows: r1 - r0, valid };
        let own = buf.get().wrapping_add(worker * each);
        // SAFETY: `attention` requires valid operands; each thread uses its own `each` floats of scratch
        // memory, which is what `few_rows` or `flash::block` needs; blocks are disjoint rows of `y`.
        unsafe {
            match &layout {
                Some(layout) => few_rows(isa, layout, job.get(), at, own),
                None => flash::block(isa, job.get(), at, own),
            }
        }
    };
    if work < 200_000 {
        (0..parts).for_each(|p| body(0, p));
    } else {
        team.run_with(parts, &body);
    }
}

/// Attention of few rows. Each key and value is read only once, so packing them would take longer than it
/// saves.
///
/// # Safety
/// The contract of [`attention`], for these rows; `own` is writable for the layout's floats and used by no
/// other thread.
unsafe fn few_rows(isa: Isa, layout: &Layout, job: &flash::Job<'_>, rows: flash::Rows, own: *mut f32) {
    let flash::Job { a, operands: Operands { q, k, v, mask, y } } = job;
    let flash::Rows { b, hk, r0, rows, valid } = rows;
    let (group, at) = (a.heads / a.kv_heads, layout.offsets(a));
    // Head and position of a row of this block, and the number of keys that the row attends to.
    let place = |i: usize| (hk * group + (r0 + i) / a.queries, (r0 + i) % a.queries);
    let sees = |i: usize| {
        let n = if a.causal { (place(i).1 + 1 + valid).saturating_sub(a.queries) } else { valid };
        n.min(valid)
    };
    let most = (0..rows).map(sees).max().unwrap_or(0);
    // SAFETY: by contract `own` holds the layout's floats and is this thread's; the slices are its disjoint
    // parts, zeroed before use. Operands are readable for `rows` rows and the `most <= valid` keys that a row
    // attends to; `y` is writable.
    unsafe {
        let piece = |i: usize, n: usize| {
            let p = own.add(at[i]);
            std::ptr::write_bytes(p, 0, n);
            std::slice::from_raw_parts_mut(p, n)
        };
        let qs = piece(0, rows * a.d);
        let scores = piece(1, rows * layout.cols);
        let o = piece(2, rows * a.dv);
        let m = piece(3, rows);
        let l = piece(4, rows);
        let product = own.add(at[5]);
        m.fill(f32::NEG_INFINITY);
        for i in 0..rows {
            let (h, s) = place(i);
            for d in 0..a.d {
                qs[i * a.d + d] = *q.at(b, h, s, d) * a.scale;
            }
        }
        let mut k0 = 0;
        while k0 < most {
            let cols = (most - k0).min(layout.cols);
            let kt = Mat { ptr: k.at(b, hk, k0, 0), rs: k.strides[3], cs: k.strides[2] };
            let vm = Mat { ptr: v.at(b, hk, k0, 0), rs: v.strides[2], cs: v.strides[3] };
            let out = MatMut::rows(scores.as_mut_ptr(), cols);
            product_inline(isa, &Gemm::new((rows, cols, a.d), qs.as_ptr(), kt, out), product);
            let scores = &mut scores[..rows * cols];
            for i in 0..rows {
                let row = &mut scores[i * cols..(i + 1) * cols];
                if let Some(mask) = &mask {
                    let (h, s) = place(i);
                    let step = mask.strides[3];
                    let p = mask.at(b, h, s, k0);
                    for (j, x) in row.iter_mut().enumerate().take(sees(i).saturating_sub(k0)) {
                        *x += *p.offset(j as isize * step);
                    }
                }
                let seen = sees(i).saturating_sub(k0).min(cols);
                row[seen..].fill(f32::NEG_INFINITY);
            }
            fold(isa, scores, cols, m, l, o, a.dv);
            let out = MatMut::rows(o.as_mut_ptr(), a.dv);
            let add = Epilogue { beta: 1.0, ..Epilogue::default() };
            let sums = Gemm::new((rows, a.dv, cols), scores.as_ptr(), vm, out).with(add);
            product_inline(isa, &sums, product);
            k0 += cols;
        }
        for i in 0..rows {
            let (h, s) = place(i);
            for d in 0..a.dv {
                let o_at: isize = [b, h, s, d].iter().zip(y.strides).map(|(i, t)| *i as isize * t).sum();
                *y.ptr.get().offset(o_at) = o[i * a.dv + d] / l[i];
            }
        }
    }
}

/// The product on the calling thread; the rows of A are contiguous.
///
/// # Safety
/// A and B are readable; C is writable, readable if beta is not 0, and overlaps nothing else. `buf` is
/// writable for the floats that [`Layout::new`] computes for the product and used by no other thread.
unsafe fn product_inline(isa: Isa, g: &Gemm<*const f32, Mat<f32>>, buf: *mut f32) {
    // SAFETY: by contract A and B are readable, C is writable, and `buf` has the larger of the sizes
    // that the two algorithms need.
    unsafe {
        if has_few_rows(g.m, &g.b) {
            few_rows_inline(isa, g, buf)
        } else {
            panels_inline(isa, &g.with_a(&Left::Plain(Mat::rows(g.a, g.k))).with_b(&g.b), buf)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::library::testing::*;

    /// Strides of `[b, h, s, d]`. With `b_s_h_d` the axes lie in memory in the order `[b, s, h, d]`.
    fn strides(b_s_h_d: bool, h: usize, s: usize, d: usize) -> [isize; 4] {
        let t = if b_s_h_d { [s * h * d, d, h * d, 1] } else { [h * s * d, s * d, d, 1] };
        t.map(|v| v as isize)
    }

    fn at(s: [isize; 4], i: [usize; 4]) -> usize {
        i.iter().zip(s).map(|(i, t)| i * t as usize).sum()
    }

    #[test]
    fn attention_follows_f64_between_guard_pages() {
        let mut rng = Rng::new();
        let teams = [Team::new(1), Team::new(2)];
        for _ in 0..2 {
            for isa in Isa::available() {
                for round in 0..60 {
                    // With the sequence as outer axis, positions of eight heads of 64 features are 512
                    // elements apart.
                    let kv_heads = [1, 2, 3, 8][rng.below(4)];
                    let a = Attention {
                        batch: 1 + rng.below(2),
                        heads: kv_heads * (1 + rng.below(3)),
                        kv_heads,
                        queries: [1, 1, 3, 20, 101][rng.below(5)],
                        keys: [1, 5, 33, 256, 300][rng.below(5)],
                        d: [1, 8, 17, 32, 64][rng.below(5)],
                        dv: [1, 8, 19, 32, 45][rng.below(5)],
                        scale: 0.7,
                        causal: rng.below(2) == 0,
                    };
                    let side = [Side::Start, Side::End][rng.below(2)];
                    let seq_major = rng.below(2) == 0;
                    let q = Guarded::new(&rng.vec(a.batch * a.heads * a.queries * a.d), side);
                    let k = Guarded::new(&rng.vec(a.batch * kv_heads * a.keys * a.d), side);
                    let v = Guarded::new(&rng.vec(a.batch * kv_heads * a.keys * a.dv), side);
                    let y = Guarded::new(&vec![f32::MAX; a.batch * a.heads * a.queries * a.dv], side);
                    let sq = strides(seq_major, a.heads, a.queries, a.d);
                    let sk = strides(seq_major, kv_heads, a.keys, a.d);
                    let sv = strides(seq_major, kv_heads, a.keys, a.dv);
                    let sy = strides(seq_major, a.heads, a.queries, a.dv);
                    // No mask, one value per batch and key (hiding a third of the keys), or one value per
                    // score.
                    let (mut mv, sm) = match round % 3 {
                        0 => (vec![], [0; 4]),
                        1 => (rng.vec(a.batch * a.keys), [a.keys as isize, 0, 0, 1]),
                        // One value per score, shared by all batches.
                        _ => {
                            let [_, h, s, t] = strides(false, a.heads, a.queries, a.keys);
                            (rng.vec(a.heads * a.queries * a.keys), [0, h, s, t])
                        }
                    };
                    for m in &mut mv {
                        if *m > 0.3 {
                            *m = f32::NEG_INFINITY;
                        }
                    }
                    let mask = Guarded::new(&mv, side);
                    let lengths: Vec<usize> = match rng.below(3) {
                        0 => vec![],
                        1 => vec![rng.below(a.keys + 2)],
                        _ => (0..a.batch).map(|_| rng.below(a.keys + 1)).collect(),
                    };
                    let head = |p, strides| Heads { ptr: SharedConst(p), strides };
                    let with_mask = (!mv.is_empty()).then(|| head(mask.ptr(), sm));
                    let again = Guarded::new(y.slice(), side);
                    for (team, y) in teams.iter().zip([&y, &again]) {
                        let out = Heads { ptr: SharedMut(y.mut_ptr()), strides: sy };
                        // SAFETY: each guarded vector holds the elements that its operand's strides reach.
                        unsafe {
                            let (q, k, v) = (head(q.ptr(), sq), head(k.ptr(), sk), head(v.ptr(), sv));
                            let operands = Operands { q, k, v, mask: with_mask, y: out };
                            attention(team, isa, &a, &lengths, operands);
                        }
                    }
                    let same = y.slice().iter().zip(again.slice()).all(|(a, b)| a.to_bits() == b.to_bits());
                    assert!(same, "one thread and two differ: {:?}", (isa, &a, &lengths, round));
                    for (b, h, s) in (0..a.batch)
                        .flat_map(|b| (0..a.heads).flat_map(move |h| (0..a.queries).map(move |s| (b, h, s))))
                    {
                        let hk = h * a.kv_heads / a.heads;
                        let valid = match &lengths[..] {
                            [] => a.keys,
                            [n] => *n.min(&a.keys),
                            n => n[b],
                        };
                        let w: Vec<f64> = (0..valid)
                            .map(|j| {
                                if a.causal && j + a.queries > s + valid {
                                    return f64::NEG_INFINITY;
                                }
                                let dot: f64 = (0..a.d)
                                    .map(|d| {
                                        q.slice()[at(sq, [b, h, s, d])] as f64
                                            * k.slice()[at(sk, [b, hk, j, d])] as f64
                                    })
                                    .sum();
                                let m = if mv.is_empty() { 0.0 } else { mv[at(sm, [b, h, s, j])] as f64 };
                                dot * a.scale as f64 + m
                            })
                            .collect();
                        let top = w.iter().fold(f64::NEG_INFINITY, |m, v| m.max(*v));
                        let sum: f64 = w.iter().map(|v| (v - top).exp()).sum();
                        for d in 0..a.dv {
                            let p =
                                |j: usize| (w[j] - top).exp() / sum * v.slice()[at(sv, [b, hk, j, d])] as f64;
                            let want: f64 = if valid == 0 { f64::NAN } else { (0..valid).map(p).sum() };
                            let got = y.slice()[at(sy, [b, h, s, d])];
                            close(got, want, 1.0, 3e-6, &(isa, &a, &lengths, round, b, h, s, d));
                        }
                    }
                }
            }
        }
    }
}
