//! Attention of bf16 operands on the tile registers of AMX. Scores and outputs are summed in f32. Softmax is
//! computed in f32, and its weights are rounded to bf16 for the second product.
//!
//! A part is one or more blocks of 32 queries of one head. A block processes 256 keys at a time. It computes
//! their scores, which stay in the first-level cache, turns them into weights row after row, and updates a
//! running maximum and sum per row (as in [`crate::cpu::library::attention`]). It then multiplies the weights
//! by the values and adds the product to the output, which is first scaled down if the maximum rose. A thread
//! packs the keys and values of a head when it starts on that head, and keeps them until it starts on
//! another. Keys are never split among threads, so results depend on the shape alone.
//!
//! Cost. The two products of a head take `4 * queries * keys * d` FLOPs, and softmax takes `queries * keys`
//! exponentials. With `d` = 128 features, the products and the exponentials took about the same time on the
//! measured processor.

use crate::cpu::amx::{TileConfig, Tiles};
use crate::cpu::library::attention::{Attention, Operands};
use crate::cpu::library::gemm::matrix::Mat;
use crate::cpu::library::gemm::tile_registers::{
    self, CHUNK_ROWS as ROWS, Halves, Micro, PANEL, PackedShape, TILE,
};
use crate::cpu::sys::Isa;
use crate::cpu::team::{AssertSync, SharedMut, Team};
use crate::cpu::{vmath, vmath512};
use half::bf16;
use std::arch::x86_64::*;

/// Number of keys that a block processes at a time.
const KEYS: usize = 256;

/// Element types of a mask.
pub(crate) trait MaskElem: Copy + Send + Sync {
    fn f32(self) -> f32;
}
impl MaskElem for f32 {
    fn f32(self) -> f32 {
        self
    }
}
impl MaskElem for bf16 {
    fn f32(self) -> f32 {
        self.to_f32()
    }
}

/// Result types: the f32 result, or the result rounded once to bf16.
pub(crate) trait OutElem: Copy + Send + Sync {
    fn of(x: f32) -> Self;
}
impl OutElem for f32 {
    fn of(x: f32) -> f32 {
        x
    }
}
impl OutElem for bf16 {
    fn of(x: f32) -> bf16 {
        bf16::from_f32(x)
    }
}

/// Offsets in bytes of the parts of a thread's scratch memory.
struct Room {
    keys: usize,
    values: usize,
    queries: usize,
    scores: usize,
    weights: usize,
    out: usize,
    mask: usize,
    end: usize,
}

impl Room {
    fn new(a: &Attention, kt: &PackedShape, v: &PackedShape) -> Room {
        // The first 64 bytes hold `tag`: the number of the batch and head whose keys and values are packed.
        let mut at = 64;
        let mut piece = |n: usize| {
            at += n.next_multiple_of(64);
            at - n.next_multiple_of(64)
        };
        Room {
            keys: piece(kt.bytes()),
            values: piece(v.bytes()),
            queries: piece(a.d.next_multiple_of(32) * 2 * ROWS),
            scores: piece(ROWS * KEYS * 4),
            weights: piece(ROWS * KEYS * 2),
            out: piece(ROWS * a.dv.next_multiple_of(PANEL) * 4),
            mask: piece(KEYS * 4),
            end: at.next_multiple_of(4096),
        }
    }
}

/// The operands, options and layouts that all parts of a call share.
struct Job<'a, M, Y> {
    a: &'a Attention,
    kt: PackedShape,
    vs: PackedShape,
    room: Room,
    operands: Operands<bf16, M, Y>,
}

/// `y = softmax(scale q k^T + mask) v` per batch and head, with the shapes of
/// [`crate::cpu::library::attention::attention`]. Denormal factors and sums count as zero.
///
/// # Safety
/// Every element of the operands is readable and every element of `y` writable; `y` overlaps nothing else.
///
/// # Panics
/// If the process has no tile registers for bf16 ([`Isa::has_bf16_tiles`]), or `heads` is not a multiple of
/// `kv_heads`.
pub(crate) unsafe fn attention_bf16<M: MaskElem, Y: OutElem>(
    team: &Team,
    isa: Isa,
    a: &Attention,
    operands: Operands<bf16, M, Y>,
) {
    assert!(isa.has_bf16_tiles() && a.kv_heads > 0 && a.heads.is_multiple_of(a.kv_heads));
    let heads = a.batch * a.heads;
    if heads * a.queries * a.dv == 0 {
        return;
    }
    let (kt, vs) =
        (PackedShape { k: a.d, n: a.keys, group: 2 }, PackedShape { k: a.keys, n: a.dv, group: 2 });
    let room = Room::new(a, &kt, &vs);
    let each = room.end;
    let blocks = a.queries.div_ceil(ROWS);
    let work = (heads * a.queries).saturating_mul(a.keys).saturating_mul(a.d + a.dv);
    let threads = if work < 2_000_000 { 1 } else { team.threads() };
    // With enough heads, each part is a whole head.
    let cuts = if threads == 1 { 1 } else { (4 * threads).div_ceil(heads).clamp(1, blocks) };
    let scratch = team.scratch(each * threads / 4);
    let buf: SharedMut<u8> = SharedMut(scratch.ptr().cast());
    for w in 0..threads {
        // SAFETY: the scratch memory holds `each` bytes per thread, which start with the aligned `tag`;
        // nothing else uses it yet.
        unsafe { buf.get().add(w * each).cast::<usize>().write(usize::MAX) };
    }
    // SAFETY: the job holds pointers and sizes; a part writes its own rows of `y`.
    let job = unsafe { AssertSync::new(Job { a, kt, vs, room, operands }) };
    let body = |worker: usize, part: usize| {
        let (head, cut) = (part / cuts, part % cuts);
        let (b0, b1) = (blocks * cut / cuts, blocks * (cut + 1) / cuts);
        let own = buf.get().wrapping_add(worker * each);
        // SAFETY: `attention_bf16` requires valid operands; tile registers were checked above; each thread
        // uses its own `each` bytes of scratch memory; parts write disjoint rows of `y`.
        unsafe { rows(job.get(), head / a.heads, head % a.heads, b0, b1, own) };
    };
    if threads == 1 {
        (0..heads * cuts).for_each(|p| body(0, p));
    } else {
        team.run_with(heads * cuts, &body);
    }
}

/// Computes blocks `b0..b1` of the queries of one head.
///
/// # Safety
/// The contract of [`attention_bf16`], for these queries. `own` has the layout of [`Room`], starts with an
/// initialised `tag` and is used by no other thread; the process has tile registers for bf16.
unsafe fn rows<M: MaskElem, Y: OutElem>(
    job: &Job<'_, M, Y>,
    b: usize,
    h: usize,
    b0: usize,
    b1: usize,
    own: *mut u8,
) {
    let (a, room) = (job.a, &job.room);
    let hk = h / (a.heads / a.kv_heads);
    let (tag, place) = (own.cast::<usize>(), b * a.kv_heads + hk);
    let (keys, values) = (own.wrapping_add(room.keys), own.wrapping_add(room.values));
    let (queries, scores) = (own.wrapping_add(room.queries), own.wrapping_add(room.scores).cast::<f32>());
    let (weights, out) =
        (own.wrapping_add(room.weights).cast::<bf16>(), own.wrapping_add(room.out).cast::<f32>());
    let wide = a.dv.next_multiple_of(PANEL);
    // SAFETY: by contract `own` holds all parts of `Room`, and the operands cover the batch, the head and the
    // queries below `a.queries`. Packing pads to whole panels, which `Room` includes.
    unsafe {
        if *tag != place {
            let (k, v) = (job.operands.k.at(b, hk, 0, 0), job.operands.v.at(b, hk, 0, 0));
            job.kt.pack(
                None,
                Mat { ptr: k, rs: job.operands.k.strides[3], cs: job.operands.k.strides[2] },
                keys,
            );
            job.vs.pack(
                None,
                Mat { ptr: v, rs: job.operands.v.strides[2], cs: job.operands.v.strides[3] },
                values,
            );
            *tag = place;
        }
        let mut registers = Tiles::new(&TileConfig::FULL);
        for block in b0..b1 {
            let (r0, n) = (block * ROWS, (a.queries - block * ROWS).min(ROWS));
            registers.configure(&TileConfig::two_by_two(n.min(16) as u8, n.saturating_sub(16).max(1) as u8));
            let below = n > 16;
            let q = Mat {
                ptr: job.operands.q.at(b, h, r0, 0),
                rs: job.operands.q.strides[2],
                cs: job.operands.q.strides[3],
            };
            let steps = a.d.div_ceil(32);
            tile_registers::pack_left(q, (0, n), a.d, (0, steps), queries);
            let sees = |i: usize| match a.causal {
                true => (r0 + i + 1 + a.keys).saturating_sub(a.queries).min(a.keys),
                false => a.keys,
            };
            let most = sees(n - 1);
            let (mut m, mut l) = ([f32::NEG_INFINITY; ROWS], [0f32; ROWS]);
            if most == 0 {
                std::ptr::write_bytes(out, 0, ROWS * wide);
            }
            for k0 in (0..most).step_by(KEYS) {
                let cols = (most - k0).min(KEYS);
                for j in (0..cols).step_by(PANEL) {
                    let w = Micro {
                        b: keys.wrapping_add((k0 + j) / PANEL * steps * 2 * TILE),
                        c: scores.wrapping_add(j).cast(),
                        c_stride: (KEYS * 4) as isize,
                        ..Micro::new(steps, queries, 64, TILE as isize, 2 * TILE)
                    };
                    tile_registers::run_micro::<Halves>(&w, below, cols - j > 16);
                }
                let mut last: *const M = std::ptr::null();
                for i in 0..n {
                    let seen = sees(i).saturating_sub(k0).min(cols);
                    let mut mask = std::ptr::null();
                    if let Some(of) = &job.operands.mask {
                        let (from, room) =
                            (of.at(b, h, r0 + i, k0), own.wrapping_add(room.mask).cast::<f32>());
                        // A row of the mask that all queries share is converted once. With `causal`, the
                        // queries have different numbers of keys, so each query converts its own part.
                        if from != last {
                            for j in 0..cols.min(if a.causal { seen } else { cols }) {
                                *room.add(j) = (*from.wrapping_offset(j as isize * of.strides[3])).f32();
                            }
                            last = if a.causal { std::ptr::null() } else { from };
                        }
                        mask = room.cast_const();
                    }
                    let row = scores.add(i * KEYS);
                    let padded = cols.next_multiple_of(32);
                    let to = weights.add(i * KEYS);
                    let (top, sum) = weigh(row, seen, padded, a.scale, mask, m[i], to);
                    // If the mask hides all keys so far, all weights are 0, and the factor 1.0 leaves the
                    // zero output unchanged.
                    let keep = if top == f32::NEG_INFINITY { 1.0 } else { vmath::exp::<false>(m[i] - top) };
                    (m[i], l[i]) = (top, l[i] * keep + sum);
                    if k0 > 0 && keep != 1.0 {
                        times(out.add(i * wide), wide, keep);
                    }
                }
                for j in (0..wide).step_by(PANEL) {
                    let w = Micro {
                        b: values
                            .wrapping_add(j / PANEL * a.keys.div_ceil(32) * 2 * TILE + k0 / 32 * 2 * TILE),
                        more: k0 > 0,
                        c: out.wrapping_add(j).cast(),
                        c_stride: (wide * 4) as isize,
                        ..Micro::new(
                            cols.div_ceil(32),
                            weights.cast(),
                            2 * KEYS as isize,
                            32 * KEYS as isize,
                            64,
                        )
                    };
                    tile_registers::run_micro::<Halves>(&w, below, a.dv - j > 16);
                }
            }
            let step = job.operands.y.strides[3];
            for i in 0..n {
                let at =
                    [b, h, r0 + i, 0].iter().zip(job.operands.y.strides).map(|(i, t)| *i as isize * t).sum();
                let to = job.operands.y.ptr.get().wrapping_offset(at);
                let over = 1.0 / l[i];
                for d in 0..a.dv {
                    *to.wrapping_offset(d as isize * step) = Y::of(*out.add(i * wide + d) * over);
                }
            }
        }
    }
}

/// Scales the scores of a row, adds the mask, and turns the scores into bf16 weights `e^(score - maximum)`,
/// with zeros from `seen` to `padded`. Returns the largest score so far (`before` is the earlier one) and the
/// sum of the weights before rounding.
///
/// # Safety
/// `padded` is a multiple of 32. `s` is readable and writable and `w` writable for `padded` elements; `mask`
/// is null or readable for `seen` elements. The processor has AVX512_BF16.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
unsafe fn weigh(
    s: *mut f32,
    seen: usize,
    padded: usize,
    scale: f32,
    mask: *const f32,
    before: f32,
    w: *mut bf16,
) -> (f32, f32) {
    // SAFETY: by contract scores and weights have `padded` elements; the load of the mask is limited to
    // `seen` lanes.
    unsafe {
        let (low, scale) = (_mm512_set1_ps(f32::NEG_INFINITY), _mm512_set1_ps(scale));
        let mut top = [low; 2];
        for j in (0..padded).step_by(32) {
            for u in 0..2 {
                let at = j + 16 * u;
                let there = crate::cpu::library::simd::mask16(seen.saturating_sub(at).min(16));
                let mut v = _mm512_mul_ps(_mm512_loadu_ps(s.add(at)), scale);
                if !mask.is_null() {
                    v = _mm512_add_ps(v, _mm512_maskz_loadu_ps(there, mask.wrapping_add(at)));
                }
                let v = _mm512_mask_mov_ps(low, there, v);
                // `max_ps` returns its second operand if the first is NaN, so a NaN score does not replace
                // the maximum.
                top[u] = _mm512_max_ps(v, top[u]);
                _mm512_storeu_ps(s.add(at), v);
            }
        }
        let new = _mm512_reduce_max_ps(_mm512_max_ps(top[0], top[1]));
        let new = if new > before { new } else { before };
        let base = _mm512_set1_ps(if new == f32::NEG_INFINITY { 0.0 } else { new });
        let mut sum = [_mm512_setzero_ps(); 2];
        for j in (0..padded).step_by(32) {
            let lo = vmath512::exp_16(_mm512_sub_ps(_mm512_loadu_ps(s.add(j)), base));
            let hi = vmath512::exp_16(_mm512_sub_ps(_mm512_loadu_ps(s.add(j + 16)), base));
            sum[0] = _mm512_add_ps(sum[0], lo);
            sum[1] = _mm512_add_ps(sum[1], hi);
            let v = std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(hi, lo));
            _mm512_storeu_si512(w.add(j).cast(), v);
        }
        (new, _mm512_reduce_add_ps(_mm512_add_ps(sum[0], sum[1])))
    }
}

/// `x[i] *= by` for `i < n`.
///
/// # Safety
/// `n` is a multiple of 16; `x` is readable and writable for `n` floats; the processor has AVX-512 F.
#[target_feature(enable = "avx512f")]
unsafe fn times(x: *mut f32, n: usize, by: f32) {
    for i in (0..n).step_by(16) {
        // SAFETY: `i + 16 <= n`, as `n` is a multiple of 16, and `x` has `n` floats by contract.
        unsafe { _mm512_storeu_ps(x.add(i), _mm512_mul_ps(_mm512_loadu_ps(x.add(i)), _mm512_set1_ps(by))) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::library::attention::Heads;
    use crate::cpu::library::testing::*;
    use crate::cpu::team::SharedConst;

    fn check<M: MaskElem, Y: OutElem>(
        team: &Team,
        rng: &mut Rng,
        a: &Attention,
        to_m: fn(f32) -> M,
        poison: Y,
        value: fn(Y) -> f32,
        slack: f64,
    ) {
        let side = [Side::Start, Side::End][rng.below(2)];
        let seq_major = rng.below(2) == 0;
        let strides = |h: usize, s: usize, d: usize| {
            let t = if seq_major { [s * h * d, d, h * d, 1] } else { [h * s * d, s * d, d, 1] };
            t.map(|v| v as isize)
        };
        let mut halves = |n: usize| {
            Guarded::new(&rng.vec(n).into_iter().map(|v| bf16::from_f32(v * 2.0)).collect::<Vec<_>>(), side)
        };
        let q = halves(a.batch * a.heads * a.queries * a.d);
        let k = halves(a.batch * a.kv_heads * a.keys * a.d);
        let v = halves(a.batch * a.kv_heads * a.keys * a.dv);
        let (sq, sk) = (strides(a.heads, a.queries, a.d), strides(a.kv_heads, a.keys, a.d));
        let (sv, sy) = (strides(a.kv_heads, a.keys, a.dv), strides(a.heads, a.queries, a.dv));
        // No mask, one row for all queries, or one row per query.
        let kind = rng.below(3);
        let hides = |x: f32| if x < -0.6 { f32::NEG_INFINITY } else { (x * 16.0).round() / 8.0 };
        let rows = if kind == 2 { a.queries } else { 1 };
        let mask: Vec<f32> = rng.vec(a.batch * rows * a.keys).into_iter().map(hides).collect();
        let held = Guarded::new(&mask.iter().map(|x| to_m(*x)).collect::<Vec<M>>(), side);
        let per = (rows * a.keys) as isize;
        let sm = [per, 0, if kind == 2 { a.keys as isize } else { 0 }, 1];
        let y = Guarded::new(&vec![poison; a.batch * a.heads * a.queries * a.dv], side);
        // SAFETY: each guarded vector holds the elements that its operand's strides reach; `y` is separate
        // memory.
        unsafe {
            let of = |g: &Guarded<bf16>, strides| Heads { ptr: SharedConst(g.ptr()), strides };
            let mask = (kind > 0).then(|| Heads { ptr: SharedConst(held.ptr()), strides: sm });
            let to = Heads { ptr: SharedMut(y.mut_ptr()), strides: sy };
            let operands = Operands { q: of(&q, sq), k: of(&k, sk), v: of(&v, sv), mask, y: to };
            attention_bf16(team, Isa::best(), a, operands);
        }
        let at =
            |s: [isize; 4], i: [usize; 4]| -> usize { i.iter().zip(s).map(|(i, t)| i * t as usize).sum() };
        for b in 0..a.batch {
            for h in 0..a.heads {
                let hk = h * a.kv_heads / a.heads;
                for i in 0..a.queries {
                    let sees = if a.causal { (i + 1 + a.keys).saturating_sub(a.queries) } else { a.keys };
                    let scores: Vec<f64> = (0..a.keys.min(sees))
                        .map(|j| {
                            let dot: f64 = (0..a.d)
                                .map(|d| {
                                    q.slice()[at(sq, [b, h, i, d])].to_f64()
                                        * k.slice()[at(sk, [b, hk, j, d])].to_f64()
                                })
                                .sum();
                            let m = if kind > 0 { mask[at(sm, [b, h, i, j])] } else { 0.0 };
                            dot * f64::from(a.scale) + f64::from(m)
                        })
                        .collect();
                    let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                    let weights: Vec<f64> = scores.iter().map(|s| (s - top).exp()).collect();
                    let sum: f64 = weights.iter().sum();
                    for d in 0..a.dv {
                        let got = f64::from(value(y.slice()[at(sy, [b, h, i, d])]));
                        let part = |j: usize| weights[j] / sum * v.slice()[at(sv, [b, hk, j, d])].to_f64();
                        let want: f64 = (0..weights.len()).map(part).sum();
                        if top == f64::NEG_INFINITY {
                            assert!(got.is_nan(), "{a:?}: {got} where nothing is seen");
                            continue;
                        }
                        // The weights have 8 significant bits.
                        let mag: f64 = (0..weights.len()).map(|j| part(j).abs()).sum();
                        let most = mag / 256.0 + slack * want.abs() + 1e-5;
                        assert!((got - want).abs() <= most, "{a:?} {kind} {b} {h} {i} {d}: {got} for {want}");
                    }
                }
            }
        }
    }

    #[test]
    fn bf16_attention_follows_f64_between_guard_pages() {
        if !Isa::best().has_bf16_tiles() {
            println!("skipped: no AMX-BF16 for this process");
            return;
        }
        let mut rng = Rng::new();
        for threads in [1, 2, 3] {
            let team = Team::new(threads);
            for _ in 0..40 {
                let kv_heads = [1, 2, 3][rng.below(3)];
                let a = Attention {
                    batch: 1 + rng.below(2),
                    heads: kv_heads * (1 + rng.below(2)),
                    kv_heads,
                    queries: [1, 3, 16, 20, 33, 70][rng.below(6)],
                    keys: [1, 5, 33, 256, 300][rng.below(5)],
                    d: [1, 8, 17, 32, 64, 80][rng.below(6)],
                    dv: [1, 8, 19, 32, 45, 64][rng.below(6)],
                    scale: 0.3,
                    causal: rng.below(2) == 0,
                };
                let (half, as_is) = (bf16::from_f32 as fn(f32) -> bf16, |x: f32| x);
                check::<f32, f32>(&team, &mut rng, &a, as_is, f32::MAX, as_is, 0.0);
                check::<bf16, bf16>(&team, &mut rng, &a, half, bf16::MAX, bf16::to_f32, 1.0 / 256.0);
            }
        }
    }

    #[test]
    fn bf16_attention_is_the_same_for_any_number_of_threads() {
        if !Isa::best().has_bf16_tiles() {
            println!("skipped: no AMX-BF16 for this process");
            return;
        }
        let mut rng = Rng::new();
        let (heads, n, d) = (3, 130, 32);
        let a = Attention {
            batch: 1,
            heads,
            kv_heads: heads,
            queries: n,
            keys: n,
            d,
            dv: d,
            scale: 0.2,
            causal: true,
        };
        let x: Vec<bf16> = rng.vec(heads * n * d).into_iter().map(bf16::from_f32).collect();
        let strides = [heads * n * d, n * d, d, 1].map(|v| v as isize);
        let runs = [1, 2, 3].map(|threads| {
            let mut y = vec![f32::NAN; heads * n * d];
            let of = Heads { ptr: SharedConst(x.as_ptr()), strides };
            let to = Heads { ptr: SharedMut(y.as_mut_ptr()), strides };
            // SAFETY: `x` and `y` hold the `heads * n * d` elements that the strides reach; only `y` is
            // written.
            unsafe {
                let operands = Operands { q: of, k: of, v: of, mask: None::<Heads<SharedConst<f32>>>, y: to };
                attention_bf16::<f32, f32>(&Team::new(threads), Isa::best(), &a, operands)
            };
            y
        });
        assert!(runs[0].iter().all(|v| v.is_finite()));
        assert!(runs[0] == runs[1] && runs[0] == runs[2]);
    }
}
