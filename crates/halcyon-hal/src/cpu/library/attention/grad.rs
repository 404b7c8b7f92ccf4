//! The gradient of attention. The scores are computed again for one block of queries at a time, so that the
//! matrix of all scores is never stored (Dao et al., "FlashAttention", 2022).
//!
//! Let `P = softmax(scale Q Kᵀ)` be the weights, `dY` the gradient of the result, and `D` the sum of `P ∘ (dY
//! Vᵀ)` over the keys. Then `dV = Pᵀ dY`, `dS = scale P ∘ (dY Vᵀ - D)`, `dQ = dS K`, and `dK = dSᵀ Q`.
//!
//! Each head is computed by one thread, so results do not depend on the number of threads.

use super::{Attention, Heads};
use crate::cpu::library::gemm::product_f32::{
    Epilogue, Gemm, Mat, MatMut, gemm_inline, inline_floats_at_most,
};
use crate::cpu::library::rows::softmax::{exp_in_place, max_of};
use crate::cpu::library::simd::{Simd, dispatch_simd};
use crate::cpu::sys::Isa;
use crate::cpu::team::{SharedConst, SharedMut, Team};

/// Queries per block.
const BQ: usize = 128;

/// The operands. Each head has its own keys and values.
#[derive(Clone, Copy, Debug)]
pub(in crate::cpu::library) struct GradOperands {
    /// Queries, `[batch, heads, queries, d]`.
    pub q: Heads<SharedConst<f32>>,
    /// Keys, `[batch, heads, keys, d]`.
    pub k: Heads<SharedConst<f32>>,
    /// Values, `[batch, heads, keys, dv]`.
    pub v: Heads<SharedConst<f32>>,
    /// The gradient of the result, `[batch, heads, queries, dv]`.
    pub dy: Heads<SharedConst<f32>>,
    /// The gradients of queries, keys and values, stored densely one after the other.
    pub out: SharedMut<f32>,
}

/// Turns a row of scores into weights.
///
/// # Safety
/// The calling function is compiled for the instruction set of `S`.
#[inline(always)]
unsafe fn weights_body<S: Simd>(row: &mut [f32]) {
    // SAFETY: the contract gives the instruction set of `S`.
    unsafe {
        let top = max_of::<S>(row);
        // If every score is -inf, the weights are NaN, as the definition of softmax implies.
        let sum = match top == f32::NEG_INFINITY {
            true => f32::NAN,
            false => exp_in_place::<S>(row, top),
        };
        let k = 1.0 / sum;
        row.iter_mut().for_each(|x| *x *= k);
    }
}

dispatch_simd! {
    /// # Safety
    /// No conditions: it uses slices only, and the dispatch checks that the processor has `isa`.
    unsafe fn weights[][](isa, row: &mut [f32]) = weights_body
}

/// Turns a row of `dY Vᵀ` into a row of `dS`, given the row of weights.
///
/// # Safety
/// The calling function is compiled for the instruction set of `S`.
#[inline(always)]
unsafe fn scores_grad_body<S: Simd>(p: &[f32], dp: &mut [f32], scale: f32) {
    // There are sixteen sums, so that the compiler vectorises the loop.
    let mut sums = [0f32; 16];
    let whole = p.len() / 16 * 16;
    for (p, d) in p[..whole].chunks_exact(16).zip(dp[..whole].chunks_exact(16)) {
        for i in 0..16 {
            sums[i] += p[i] * d[i];
        }
    }
    let mut sum: f32 = p[whole..].iter().zip(&dp[whole..]).map(|(p, d)| p * d).sum();
    sum += sums.iter().sum::<f32>();
    dp.iter_mut().zip(p).for_each(|(d, p)| *d = (*d - sum) * (p * scale));
}

dispatch_simd! {
    /// # Safety
    /// No conditions: it uses slices only, and the dispatch checks that the processor has `isa`.
    unsafe fn scores_grad[][](isa, p: &[f32], dp: &mut [f32], scale: f32) = scores_grad_body
}

/// A block of queries: the first query, the number of queries, the number of keys that they attend to, and
/// the number of keys that earlier blocks attended to.
#[derive(Clone, Copy)]
struct Block {
    from: usize,
    rows: usize,
    keys: usize,
    before: usize,
}

/// The number of keys that query `i` attends to.
fn seen(a: &Attention, i: usize) -> usize {
    match a.causal {
        true => (i + 1 + a.keys).saturating_sub(a.queries).min(a.keys),
        false => a.keys,
    }
}

fn blocks(a: &Attention) -> impl Iterator<Item = Block> {
    let a = *a;
    (0..a.queries).step_by(BQ).map(move |from| Block {
        from,
        rows: BQ.min(a.queries - from),
        keys: seen(&a, BQ.min(a.queries - from) + from - 1),
        before: if from == 0 { 0 } else { seen(&a, from - 1) },
    })
}

/// The scratch memory of one thread in floats: first the weights of a block (the gradients of the scores need
/// the same number), then the buffer of the product.
fn floats(isa: Isa, a: &Attention) -> [usize; 2] {
    let block = (a.queries.min(BQ) * a.keys).next_multiple_of(64);
    let wide = [a.d, a.dv];
    let sizes = blocks(a).flat_map(|b| {
        wide.map(|w| {
            let parts = [(b.before, w, b.rows), (b.keys - b.before, w, b.rows)];
            [(b.rows, b.keys, w), parts[0], parts[1], (b.rows, w, b.keys)]
        })
    });
    let product = sizes.flatten().map(|s| inline_floats_at_most(isa, s)).max().unwrap_or(0);
    [block, product.next_multiple_of(64)]
}

/// Writes the gradients of queries, keys and values.
///
/// # Safety
/// Every element of the inputs is readable; `out` is writable for `batch * heads * (queries * d + keys * d +
/// keys * dv)` floats and overlaps nothing else.
pub(in crate::cpu::library) unsafe fn attention_grad(team: &Team, isa: Isa, a: &Attention, o: GradOperands) {
    let heads = a.batch * a.heads;
    let [block, product] = floats(isa, a);
    let each = 2 * block + product;
    let scratch = team.scratch(each * team.threads());
    let buf = SharedMut(scratch.ptr());
    let work = heads.saturating_mul(a.queries).saturating_mul(a.keys).saturating_mul(a.d + a.dv);
    // SAFETY: `attention_grad` requires the operands of every head; heads write disjoint parts of the output;
    // each thread uses its own `each` floats of scratch memory.
    let body = |worker: usize, h: usize| unsafe {
        head(isa, a, &o, (h / a.heads, h % a.heads), buf.get().add(worker * each), block);
    };
    match work < 200_000 {
        true => (0..heads).for_each(|h| body(0, h)),
        false => team.run_with(heads, &body),
    }
}

/// The gradients of one head.
///
/// # Safety
/// The contract of [`attention_grad`]; `own` is writable for the floats of a thread, and no other thread uses
/// it.
unsafe fn head(
    isa: Isa,
    a: &Attention,
    o: &GradOperands,
    (b, h): (usize, usize),
    own: *mut f32,
    block: usize,
) {
    let (all, at) = (a.batch * a.heads, b * a.heads + h);
    let (queries, keys) = (a.queries * a.d, a.keys * a.d);
    let matrix = |x: &Heads<SharedConst<f32>>, from: usize| Mat {
        ptr: x.at(b, h, from, 0),
        rs: x.strides[2],
        cs: x.strides[3],
    };
    let (k, v) = (matrix(&o.k, 0), matrix(&o.v, 0));
    // SAFETY: the contract makes all elements of the head readable and its parts of the output writable; the
    // products have the sizes for which `floats` reserves memory, or smaller ones. `p` and `dp` are disjoint
    // parts of this thread's memory, written by a product before they are read.
    unsafe {
        let dq = o.out.get().add(at * queries);
        let dk = o.out.get().add(all * queries + at * keys);
        let dv = o.out.get().add(all * (queries + keys) + at * a.keys * a.dv);
        let (p, dp, buf) = (own, own.add(block), own.add(2 * block));
        let inline = |g: Gemm<Mat<f32>, Mat<f32>>, beta: f32, alpha: f32| {
            gemm_inline(isa, &g.with(Epilogue { alpha, beta, ..Epilogue::default() }), buf)
        };
        let mut done = 0;
        for block in blocks(a) {
            let Block { from, rows, keys: n, before } = block;
            let (q, dy) = (matrix(&o.q, from), matrix(&o.dy, from));
            let (of_weights, of_scores) = (Mat::rows(p as *const f32, n), Mat::rows(dp as *const f32, n));
            inline(Gemm::new((rows, n, a.d), q, k.t(), MatMut::rows(p, n)), 0.0, a.scale);
            inline(Gemm::new((rows, n, a.dv), dy, v.t(), MatMut::rows(dp, n)), 0.0, 1.0);
            for i in 0..rows {
                let row = std::slice::from_raw_parts_mut(p.add(i * n), n);
                let grads = std::slice::from_raw_parts_mut(dp.add(i * n), n);
                let (sees, hidden) = row.split_at_mut(seen(a, from + i));
                hidden.fill(0.0);
                weights(isa, sees);
                scores_grad(isa, row, grads, a.scale);
            }
            for (left, right, out, width) in [(of_weights, dy, dv, a.dv), (of_scores, q, dk, a.d)] {
                // Earlier blocks have written sums for the first `before` keys, so this product is added to
                // them.
                let sums = MatMut::rows(out, width);
                inline(Gemm::new((before, width, rows), left.t(), right, sums), 1.0, 1.0);
                let (left, sums) = (left.t().offset(before as isize), sums.offset((before * width) as isize));
                inline(Gemm::new((n - before, width, rows), left, right, sums), 0.0, 1.0);
            }
            let dq = MatMut::rows(dq.add(from * a.d), a.d);
            inline(Gemm::new((rows, a.d, n), of_scores, k, dq), 0.0, 1.0);
            done = n;
        }
        std::ptr::write_bytes(dk.add(done * a.d), 0, (a.keys - done) * a.d);
        std::ptr::write_bytes(dv.add(done * a.dv), 0, (a.keys - done) * a.dv);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::library::testing::*;

    /// The gradients in f64, by the formulas at the top of this file.
    fn reference(a: &Attention, q: &[f32], k: &[f32], v: &[f32], dy: &[f32]) -> Vec<f64> {
        let (heads, wide) = (a.batch * a.heads, |x: &[f32], i: usize| f64::from(x[i]));
        let (nq, nk, nv) = (a.queries * a.d, a.keys * a.d, a.keys * a.dv);
        let mut out = vec![0.0; heads * (nq + nk + nv)];
        for h in 0..heads {
            for i in 0..a.queries {
                let seen = if a.causal { i + 1 + a.keys - a.queries } else { a.keys };
                let dot = |x: &[f32], y: &[f32], n: usize, (xr, yr): (usize, usize)| -> f64 {
                    (0..n).map(|d| wide(x, xr * n + d) * wide(y, yr * n + d)).sum()
                };
                let (row, key) = (h * a.queries + i, |j: usize| h * a.keys + j);
                let s: Vec<f64> =
                    (0..seen).map(|j| f64::from(a.scale) * dot(q, k, a.d, (row, key(j)))).collect();
                let top = s.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let sum: f64 = s.iter().map(|s| (s - top).exp()).sum();
                let p: Vec<f64> = s.iter().map(|s| (s - top).exp() / sum).collect();
                let dp: Vec<f64> = (0..seen).map(|j| dot(dy, v, a.dv, (row, key(j)))).collect();
                let mean: f64 = p.iter().zip(&dp).map(|(p, d)| p * d).sum();
                for j in 0..seen {
                    let ds = f64::from(a.scale) * p[j] * (dp[j] - mean);
                    for d in 0..a.d {
                        out[row * a.d + d] += ds * wide(k, key(j) * a.d + d);
                        out[heads * nq + key(j) * a.d + d] += ds * wide(q, row * a.d + d);
                    }
                    for d in 0..a.dv {
                        out[heads * (nq + nk) + key(j) * a.dv + d] += p[j] * wide(dy, row * a.dv + d);
                    }
                }
            }
        }
        out
    }

    #[test]
    fn gradients_follow_f64_between_guard_pages() {
        let mut rng = Rng::new();
        for isa in Isa::available() {
            for (queries, keys, causal) in [
                (1, 1, true),
                (5, 9, true),
                (130, 130, true),
                (33, 20, false),
                (200, 261, true),
                (7, 300, false),
            ] {
                let a = Attention {
                    batch: 2,
                    heads: 3,
                    kv_heads: 3,
                    queries,
                    keys,
                    d: 1 + rng.below(40),
                    dv: 1 + rng.below(40),
                    scale: 0.2,
                    causal,
                };
                let heads = a.batch * a.heads;
                let (q, k) = (rng.vec(heads * queries * a.d), rng.vec(heads * keys * a.d));
                let (v, dy) = (rng.vec(heads * keys * a.dv), rng.vec(heads * queries * a.dv));
                let want = reference(&a, &q, &k, &v, &dy);
                let side = [Side::Start, Side::End][rng.below(2)];
                let [gq, gk, gv, gy] = [&q, &k, &v, &dy].map(|x| Guarded::new(x, side));
                let at = |g: &Guarded<f32>, n: usize, d: usize| Heads {
                    ptr: SharedConst(g.ptr()),
                    strides: [a.heads * n * d, n * d, d, 1].map(|s| s as isize),
                };
                for threads in [1, 3] {
                    let out = Guarded::new(&vec![f32::NAN; want.len()], side);
                    let o = GradOperands {
                        q: at(&gq, queries, a.d),
                        k: at(&gk, keys, a.d),
                        v: at(&gv, keys, a.dv),
                        dy: at(&gy, queries, a.dv),
                        out: SharedMut(out.mut_ptr()),
                    };
                    // SAFETY: the operands are as large as `a` states, and the output does not overlap them.
                    unsafe { attention_grad(&Team::new(threads), isa, &a, o) };
                    for (i, (got, want)) in out.slice().iter().zip(&want).enumerate() {
                        assert!(
                            (f64::from(*got) - want).abs() <= 2e-5 * (1.0 + want.abs()),
                            "{isa:?} {a:?} {i}: {got}, expected {want}"
                        );
                    }
                }
            }
        }
    }
}
