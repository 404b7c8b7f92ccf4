//! Softmax, log-softmax, layer normalisation and RMS normalisation over contiguous rows.
//!
//! Storage is f32, f16 or bf16. The arithmetic is f32, with an exponential whose error is below 1.5 ulp. Sums
//! are kept in four vector registers that are added at the end, in an order that depends only on the row's
//! length and the instruction set. As their definitions require, softmax and log-softmax of f16 and bf16
//! round the result of every operation, and the normalisations compute in f32 and round once.

use crate::cpu::library::gemm::product_f32::PackElem;
use crate::cpu::library::simd::{Simd, dispatch_simd};
use crate::cpu::sys::Isa;
use crate::cpu::team::{SharedConst, SharedMut, Team};
use crate::cpu::vmath;

/// Sum of `f(x)` over the elements of the row, in four vector registers that are added at the end. `f` must
/// map 0 to 0.
///
/// # Safety
/// The caller is compiled for `S`'s instruction set.
#[inline(always)]
pub(crate) unsafe fn sum_of<S: Simd>(x: &[f32], f: impl Fn(S::V) -> S::V) -> f32 {
    // SAFETY: whole vectors end inside `x`, and the last access is limited to its `n` elements; the contract
    // gives the instruction set.
    unsafe {
        let p = x.as_ptr();
        let mut acc = [S::zero(); 4];
        let mut i = 0;
        while i + 4 * S::W <= x.len() {
            for (u, a) in acc.iter_mut().enumerate() {
                *a = S::add(*a, f(S::load(p.add(i + u * S::W))));
            }
            i += 4 * S::W;
        }
        while i < x.len() {
            let n = (x.len() - i).min(S::W);
            acc[0] = S::add(acc[0], f(S::load_part(p.add(i), n)));
            i += n;
        }
        S::sum(S::add(S::add(acc[0], acc[1]), S::add(acc[2], acc[3])))
    }
}

/// Largest element, ignoring NaN; -inf for an empty row.
///
/// # Safety
/// The caller is compiled for `S`'s instruction set.
#[inline(always)]
pub(crate) unsafe fn max_of<S: Simd>(x: &[f32]) -> f32 {
    // SAFETY: whole vectors end inside `x`; `t` has room for four vectors of at most 16 floats; the contract
    // gives the instruction set.
    unsafe {
        let p = x.as_ptr();
        let mut acc = [S::splat(f32::NEG_INFINITY); 4];
        let mut i = 0;
        while i + 4 * S::W <= x.len() {
            for (u, a) in acc.iter_mut().enumerate() {
                *a = S::max(S::load(p.add(i + u * S::W)), *a);
            }
            i += 4 * S::W;
        }
        while i + S::W <= x.len() {
            acc[0] = S::max(S::load(p.add(i)), acc[0]);
            i += S::W;
        }
        let mut t = [f32::NEG_INFINITY; 64];
        for (u, a) in acc.iter().enumerate() {
            S::store(t.as_mut_ptr().add(u * S::W), *a);
        }
        t.iter().chain(&x[i..]).fold(f32::NEG_INFINITY, |m, &v| if v > m { v } else { m })
    }
}

/// `y[i] = exp(x[i] - m)`; returns the sum of `y`.
///
/// # Safety
/// The caller is compiled for `S`'s instruction set.
#[inline(always)]
unsafe fn exp_minus<S: Simd>(x: &[f32], m: f32, y: &mut [f32]) -> f32 {
    // SAFETY: the length is at most that of both slices; the caller has the instruction set of `S`.
    unsafe { S::exp_minus(x.len().min(y.len()), x.as_ptr(), m, y.as_mut_ptr()) };
    // SAFETY: the contract of `exp_minus` requires a CPU with the instruction set of `S`.
    unsafe { sum_of::<S>(y, |v| v) }
}

/// Replaces each `x` by `exp(x - m)` and returns the sum.
///
/// # Safety
/// The caller is compiled for `S`'s instruction set.
#[inline(always)]
pub(crate) unsafe fn exp_in_place<S: Simd>(x: &mut [f32], m: f32) -> f32 {
    // SAFETY: both pointers are valid for the slice's length; the caller has the instruction set of `S`.
    unsafe { S::exp_minus(x.len(), x.as_ptr(), m, x.as_mut_ptr()) };
    // SAFETY: the contract of `exp_in_place` requires a CPU with the instruction set of `S`.
    unsafe { sum_of::<S>(x, |v| v) }
}

/// The op of a row kernel.
#[derive(Clone, Copy, Debug)]
enum Kind {
    Softmax,
    LogSoftmax,
    Layer { eps: f32 },
    Rms { eps: f32 },
}

/// Computes one row. `scale` and `shift` are empty or as long as the row.
///
/// # Safety
/// The caller is compiled for `S`'s instruction set.
#[inline(always)]
unsafe fn row_body<S: Simd>(kind: Kind, x: &[f32], y: &mut [f32], scale: &[f32], shift: &[f32]) {
    let n = x.len() as f32;
    // SAFETY: the contract of `row_body` gives the instruction set, and the called functions have no other
    // condition.
    let (center, factor) = unsafe {
        match kind {
            Kind::Softmax => {
                let r = 1.0 / exp_minus::<S>(x, max_of::<S>(x), y);
                for y in y {
                    *y *= r;
                }
                return;
            }
            Kind::LogSoftmax => {
                let m = max_of::<S>(x);
                let l = vmath::log::<false>(exp_minus::<S>(x, m, y));
                for (y, x) in y.iter_mut().zip(x) {
                    *y = (*x - m) - l;
                }
                return;
            }
            Kind::Layer { eps } => {
                let mean = sum_of::<S>(x, |v| v) / n;
                // Only whole vectors are summed this way: the empty lanes of a partial vector would add the
                // square of the mean.
                let c = S::splat(mean);
                let square = |v: S::V| {
                    let d = S::sub(v, c);
                    S::mul(d, d)
                };
                let whole = x.len() / S::W * S::W;
                let mut rest = 0.0;
                for v in &x[whole..] {
                    rest += (*v - mean) * (*v - mean);
                }
                let var = (sum_of::<S>(&x[..whole], square) + rest) / n;
                (mean, 1.0 / (var + eps).sqrt())
            }
            Kind::Rms { eps } => (0.0, 1.0 / (sum_of::<S>(x, |v| S::mul(v, v)) / n + eps).sqrt()),
        }
    };
    match (scale.is_empty(), shift.is_empty()) {
        (true, true) => y.iter_mut().zip(x).for_each(|(y, x)| *y = (*x - center) * factor),
        (false, true) => {
            for ((y, x), s) in y.iter_mut().zip(x).zip(scale) {
                *y = (*x - center) * factor * *s;
            }
        }
        (true, false) => {
            for ((y, x), b) in y.iter_mut().zip(x).zip(shift) {
                *y = (*x - center) * factor + *b;
            }
        }
        (false, false) => {
            for (((y, x), s), b) in y.iter_mut().zip(x).zip(scale).zip(shift) {
                *y = (*x - center) * factor * *s + *b;
            }
        }
    }
}

/// Computes rows of `n > 0` elements.
///
/// # Safety
/// The caller is compiled for `S`'s instruction set.
#[inline(always)]
unsafe fn rows_body<S: Simd>(kind: Kind, n: usize, x: &[f32], y: &mut [f32], scale: &[f32], shift: &[f32]) {
    for (x, y) in x.chunks_exact(n).zip(y.chunks_exact_mut(n)) {
        // SAFETY: the contract of `rows_body` requires a CPU with the instruction set of `S`.
        unsafe { row_body::<S>(kind, x, y, scale, shift) };
    }
}
dispatch_simd! {
    /// # Safety
    /// No conditions; the dispatch checks that `isa` is available.
    unsafe fn rows_f32[][](isa, kind: Kind, n: usize, x: &[f32], y: &mut [f32], scale: &[f32], shift: &[f32]) = rows_body
}

/// Computes softmax of `x`, or its logarithm, into `y`. Rounds the result of every operation but the last to
/// `T`, as the definition in `T` requires; the caller rounds the last result. Overwrites `x`, and uses the
/// row `room` as scratch memory.
///
/// # Safety
/// The caller is compiled for `S`'s instruction set.
#[inline(always)]
unsafe fn soft_half_body<S: Simd, T: PackElem>(log: bool, x: &mut [f32], y: &mut [f32], room: &mut [T]) {
    let round = |v: &mut [f32], room: &mut [T]| {
        T::narrow_slice(v, &mut room[..v.len()]);
        T::widen_slice(&room[..v.len()], v);
    };
    // SAFETY: the contract of `soft_half_body` requires a CPU with the instruction set of `S`.
    unsafe {
        let top = max_of::<S>(x);
        x.iter_mut().for_each(|v| *v -= top);
        round(x, room);
        y.copy_from_slice(x);
        exp_in_place::<S>(y, 0.0);
        round(y, room);
        let mut sum = [sum_of::<S>(y, |v| v)];
        round(&mut sum, room);
        if !log {
            return y.iter_mut().for_each(|y| *y /= sum[0]);
        }
        let mut l = [vmath::log::<false>(sum[0])];
        round(&mut l, room);
        y.iter_mut().zip(x).for_each(|(y, x)| *y = *x - l[0]);
    }
}
dispatch_simd! {
    /// # Safety
    /// No conditions; the dispatch checks that `isa` is available.
    unsafe fn soft_half[T: PackElem][T](isa, log: bool, x: &mut [f32], y: &mut [f32], room: &mut [T]) = soft_half_body
}

/// The operands of a kernel that computes each row of `y` from the same row of `x`: `rows` rows of `n`
/// elements, dense.
#[derive(Clone, Copy, Debug)]
pub struct Rows<T> {
    pub rows: usize,
    pub n: usize,
    pub x: *const T,
    pub y: *mut T,
}

/// Runs a row kernel.
///
/// # Safety
/// `x` has `rows * n` readable elements, `y` as many writable ones that nothing else uses; they do not
/// overlap. `scale` and `shift` are empty or have `n` elements.
unsafe fn over_rows<T: PackElem>(
    team: &Team,
    isa: Isa,
    kind: Kind,
    operands: &Rows<T>,
    scale: &[f32],
    shift: &[f32],
) {
    let Rows { rows, n, x, y } = *operands;
    if rows * n == 0 {
        return;
    }
    let each = if T::IS_F32 { 0 } else { (2 * n).next_multiple_of(16) };
    let scratch = (each > 0).then(|| team.scratch(each * team.threads()));
    let buf = SharedMut(scratch.as_ref().map_or(std::ptr::null_mut(), |s| s.ptr()));
    let (xs, ys) = (SharedConst(x), SharedMut(y));
    let parts = if rows * n < 8192 { 1 } else { rows.min(team.threads() * 4) };
    team.run_with(parts, &|worker, part| {
        let (r0, r1) = (rows * part / parts, rows * (part + 1) / parts);
        // SAFETY: rows `r0..r1` lie in `x` and `y`, and parts are disjoint; a worker's scratch of `each`
        // floats is its own and is zeroed first.
        unsafe {
            if T::IS_F32 {
                let x = std::slice::from_raw_parts((xs.get() as *const f32).add(r0 * n), (r1 - r0) * n);
                let y = std::slice::from_raw_parts_mut((ys.get() as *mut f32).add(r0 * n), (r1 - r0) * n);
                rows_f32(isa, kind, n, x, y, scale, shift);
                return;
            }
            let own = buf.get().add(worker * each);
            std::ptr::write_bytes(own, 0, each);
            let (a, b) = std::slice::from_raw_parts_mut(own, each).split_at_mut(n);
            let b = &mut b[..n];
            for r in r0..r1 {
                let y = std::slice::from_raw_parts_mut(ys.get().add(r * n), n);
                T::widen_slice(std::slice::from_raw_parts(xs.get().add(r * n), n), a);
                match kind {
                    Kind::Softmax | Kind::LogSoftmax => {
                        soft_half(isa, matches!(kind, Kind::LogSoftmax), a, b, y);
                    }
                    _ => rows_f32(isa, kind, n, a, b, scale, shift),
                }
                T::narrow_slice(b, y);
            }
        }
    });
}

/// Softmax of each row: `exp(x - max) / sum`. A row with NaN or +inf, or with only -inf, becomes NaN.
///
/// # Safety
/// `x` has `rows * n` readable elements, `y` as many writable ones that nothing else uses; they do not
/// overlap.
pub unsafe fn softmax<T: PackElem>(team: &Team, isa: Isa, rows: &Rows<T>) {
    // SAFETY: `softmax` has the contract of `over_rows`.
    unsafe { over_rows(team, isa, Kind::Softmax, rows, &[], &[]) }
}

/// The logarithm of [`softmax`], computed as `x - max - log(sum)`.
///
/// # Safety
/// `x` has `rows * n` readable elements, `y` as many writable ones that nothing else uses; they do not
/// overlap.
pub unsafe fn log_softmax<T: PackElem>(team: &Team, isa: Isa, rows: &Rows<T>) {
    // SAFETY: `log_softmax` has the contract of `over_rows`.
    unsafe { over_rows(team, isa, Kind::LogSoftmax, rows, &[], &[]) }
}

/// `(x - mean) / sqrt(variance + eps) * scale + shift` over each row (Ba, Kiros and Hinton, "Layer
/// normalization", 2016), with the biased variance of the row. An empty `scale` or `shift` is left out.
///
/// # Safety
/// `x` has `rows * n` readable elements, `y` as many writable ones that nothing else uses; they do not
/// overlap.
///
/// # Panics
/// If `scale` or `shift` is neither empty nor of length `n`.
pub unsafe fn layer_norm<T: PackElem>(
    team: &Team,
    isa: Isa,
    rows: &Rows<T>,
    scale: &[f32],
    shift: &[f32],
    eps: f32,
) {
    assert!(
        [0, rows.n].contains(&scale.len()) && [0, rows.n].contains(&shift.len()),
        "scale and shift must be empty or have the row's length"
    );
    // SAFETY: `layer_norm` has the contract of `over_rows`; the assertion checked the lengths.
    unsafe { over_rows(team, isa, Kind::Layer { eps }, rows, scale, shift) }
}

/// `x / sqrt(mean(x^2) + eps) * scale` over each row (Zhang and Sennrich, "Root mean square layer
/// normalization", 2019). An empty `scale` is left out.
///
/// # Safety
/// `x` has `rows * n` readable elements, `y` as many writable ones that nothing else uses; they do not
/// overlap.
///
/// # Panics
/// If `scale` is neither empty nor of length `n`.
pub unsafe fn rms_norm<T: PackElem>(team: &Team, isa: Isa, rows: &Rows<T>, scale: &[f32], eps: f32) {
    assert!([0, rows.n].contains(&scale.len()), "scale must be empty or have the row's length");
    // SAFETY: `rms_norm` has the contract of `over_rows`; the assertion checked the length.
    unsafe { over_rows(team, isa, Kind::Rms { eps }, rows, scale, &[]) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::library::testing::*;
    use half::{bf16, f16};

    /// The row kernels' definitions in f64. `round` rounds the result of each operation of softmax.
    fn reference(
        kind: Kind,
        x: &[f64],
        scale: &[f32],
        shift: &[f32],
        round: impl Fn(f64) -> f64,
    ) -> Vec<f64> {
        let n = x.len() as f64;
        let max = x.iter().fold(f64::NEG_INFINITY, |m, v| if v.is_nan() { m } else { m.max(*v) });
        let sum: f64 = round(x.iter().map(|v| round(round(v - max).exp())).sum());
        let mean = x.iter().sum::<f64>() / n;
        let var = x.iter().map(|v| (v - mean) * (v - mean)).sum::<f64>() / n;
        let square = x.iter().map(|v| v * v).sum::<f64>() / n;
        x.iter()
            .enumerate()
            .map(|(i, v)| {
                let s = scale.get(i).map_or(1.0, |s| *s as f64);
                let b = shift.get(i).map_or(0.0, |s| *s as f64);
                match kind {
                    Kind::Softmax => round(round(v - max).exp()) / sum,
                    Kind::LogSoftmax => round(v - max) - round(sum.ln()),
                    Kind::Layer { eps } => (v - mean) / (var + eps as f64).sqrt() * s + b,
                    Kind::Rms { eps } => v / (square + eps as f64).sqrt() * s,
                }
            })
            .collect()
    }

    fn check<T: PackElem>(
        rng: &mut Rng,
        team: &Team,
        isa: Isa,
        conv: fn(f32) -> T,
        wide: fn(T) -> f32,
        tol: f64,
    ) {
        for (rows, n) in [(0, 5), (3, 0), (1, 1), (4, 7), (3, 16), (5, 33), (2, 1000), (70, 257)] {
            for kind in [Kind::Softmax, Kind::LogSoftmax, Kind::Layer { eps: 1e-5 }, Kind::Rms { eps: 1e-6 }]
            {
                let mut data: Vec<f32> = rng.vec(rows * n).into_iter().map(|v| v * 8.0).collect();
                if matches!(kind, Kind::Softmax | Kind::LogSoftmax) && n > 4 && rows > 2 {
                    data[0] = f32::NEG_INFINITY;
                    data[n + 1] = f32::NAN;
                    data[2 * n..3 * n].fill(f32::NEG_INFINITY);
                }
                let side = [Side::Start, Side::End][rng.below(2)];
                let x = Guarded::new(&data.iter().map(|v| conv(*v)).collect::<Vec<T>>(), side);
                let y = Guarded::new(&vec![conv(77.0); rows * n], side);
                let (with_scale, with_shift) = (rng.below(2) == 0, rng.below(2) == 0);
                let scale = Guarded::new(&rng.vec(if with_scale { n } else { 0 }), side);
                let shift = Guarded::new(&rng.vec(if with_shift { n } else { 0 }), side);
                let all = Rows { rows, n, x: x.ptr(), y: y.mut_ptr() };
                // SAFETY: the guarded vectors have `rows * n` elements.
                unsafe {
                    match kind {
                        Kind::Softmax => softmax(team, isa, &all),
                        Kind::LogSoftmax => log_softmax(team, isa, &all),
                        Kind::Layer { eps } => layer_norm(team, isa, &all, scale.slice(), shift.slice(), eps),
                        Kind::Rms { eps } => rms_norm(team, isa, &all, scale.slice(), eps),
                    }
                }
                for r in 0..rows {
                    let row: Vec<f64> =
                        x.slice()[r * n..(r + 1) * n].iter().map(|v| wide(*v) as f64).collect();
                    let soft = matches!(kind, Kind::Softmax | Kind::LogSoftmax) && !T::IS_F32;
                    let round = |v: f64| if soft { wide(conv(v as f32)) as f64 } else { v };
                    let want = reference(kind, &row, scale.slice(), shift.slice(), round);
                    for (i, w) in want.iter().enumerate() {
                        let got = wide(y.slice()[r * n + i]);
                        // Normalised values are sums of terms near 1, but probabilities may be small.
                        let unit = if matches!(kind, Kind::Softmax) { 1e-3 } else { 1.0 };
                        // The result of an operation near a tie may be rounded up or down.
                        let tol = if soft { 4.0 * tol } else { tol };
                        close(got, *w, w.abs() + unit, tol, &(isa, kind, rows, n, r, i));
                    }
                }
            }
        }
    }

    #[test]
    fn row_kernels_follow_f64_between_guard_pages() {
        let mut rng = Rng::new();
        for threads in [1, 2] {
            let team = Team::new(threads);
            for isa in Isa::available() {
                check::<f32>(&mut rng, &team, isa, |x| x, |x| x, 3e-6);
                check::<f16>(&mut rng, &team, isa, f16::from_f32, f16::to_f32, 6e-4);
                check::<bf16>(&mut rng, &team, isa, bf16::from_f32, bf16::to_f32, 5e-3);
            }
        }
    }
    #[test]
    fn softmax_of_halves_rounds_every_step() {
        let mut rng = Rng::new();
        let team = Team::new(1);
        for isa in Isa::available() {
            let (rows, n) = (500, 6);
            let x: Vec<bf16> = rng.vec(rows * n).into_iter().map(|v| bf16::from_f32(v * 2.0)).collect();
            let mut y = vec![bf16::ZERO; rows * n];
            // SAFETY: both vectors have `rows * n` elements.
            unsafe { softmax(&team, isa, &Rows { rows, n, x: x.as_ptr(), y: y.as_mut_ptr() }) };
            let (mut steps, mut once) = (0, 0);
            for (x, y) in x.chunks(n).zip(y.chunks(n)) {
                let x: Vec<f64> = x.iter().map(|v| v.to_f64()).collect();
                let half = |v: f64| bf16::from_f32(v as f32).to_f64();
                let stepwise = reference(Kind::Softmax, &x, &[], &[], half);
                let whole = reference(Kind::Softmax, &x, &[], &[], |v| v);
                for (i, y) in y.iter().enumerate() {
                    steps += usize::from(y.to_f64() == half(stepwise[i]));
                    once += usize::from(y.to_f64() == half(whole[i]));
                }
            }
            assert!(steps * 100 > rows * n * 99, "{isa:?}: {steps} of {}", rows * n);
            assert!(once * 10 < rows * n * 9, "{isa:?}: {once} of {}", rows * n);
        }
    }
}
