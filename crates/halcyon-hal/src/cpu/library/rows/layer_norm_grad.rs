//! The gradient of layer normalisation in f32.
//!
//! With `z = (x - mean) / sqrt(variance + eps)` and `g = dy * scale`, each row has the gradient
//! `dx = (g - mean(g) - z mean(g z)) / sqrt(variance + eps)`. The gradients of scale and shift are the sums
//! of `dy z` and `dy` over all rows. All passes over a row follow each other, so that the row stays in the
//! first-level cache. Sums over rows are computed for fixed ranges of rows and then added in order, so
//! results do not depend on the number of threads.

use super::softmax::sum_of;
use crate::cpu::library::simd::{Simd, dispatch_simd};
use crate::cpu::sys::Isa;
use crate::cpu::team::{SharedConst, SharedMut, Team};

/// The minimum number of rows of a range, and the maximum number of ranges.
const ROWS: usize = 64;
const RANGES: usize = 256;

/// A range of rows. `dscale` and `dshift` become the sums over these rows.
struct Range<'a> {
    n: usize,
    eps: f32,
    x: &'a [f32],
    dy: &'a [f32],
    scale: &'a [f32],
    dx: &'a mut [f32],
    dscale: &'a mut [f32],
    dshift: &'a mut [f32],
}

/// The sum of `f(i)` for `i < n`. There are sixteen partial sums, so that the compiler vectorises the loop.
#[inline(always)]
fn sum(n: usize, f: impl Fn(usize) -> f32) -> f32 {
    let mut sums = [0f32; 16];
    let whole = n / 16 * 16;
    for i in (0..whole).step_by(16) {
        for (k, s) in sums.iter_mut().enumerate() {
            *s += f(i + k);
        }
    }
    sums.iter().sum::<f32>() + (whole..n).map(f).sum::<f32>()
}

/// # Safety
/// The calling function is compiled for the instruction set of `S`.
#[inline(always)]
unsafe fn range_body<S: Simd>(r: Range<'_>) {
    let n = r.n;
    let (scale, dscale, dshift) = (&r.scale[..n], &mut r.dscale[..n], &mut r.dshift[..n]);
    dscale.fill(0.0);
    dshift.fill(0.0);
    let share = 1.0 / n as f32;
    for ((x, dy), dx) in r.x.chunks_exact(n).zip(r.dy.chunks_exact(n)).zip(r.dx.chunks_exact_mut(n)) {
        // SAFETY: the contract gives the instruction set of `S`.
        let mean = unsafe { sum_of::<S>(x, |v| v) } * share;
        let variance = sum(n, |i| (x[i] - mean) * (x[i] - mean)) * share;
        let factor = 1.0 / (variance + r.eps).sqrt();
        let g = sum(n, |i| dy[i] * scale[i]) * share;
        let gn = sum(n, |i| dy[i] * scale[i] * ((x[i] - mean) * factor)) * share;
        for i in 0..n {
            let norm = (x[i] - mean) * factor;
            dx[i] = (dy[i] * scale[i] - g - norm * gn) * factor;
            dscale[i] += dy[i] * norm;
            dshift[i] += dy[i];
        }
    }
}

dispatch_simd! {
    /// # Safety
    /// No conditions: it uses slices only, and the dispatch checks that `isa` is available.
    unsafe fn range[][](isa, r: Range<'_>) = range_body
}

/// Writes the gradients of `x`, of the scale and of the shift to `out`, one after the other. `x` and `dy`
/// have `rows` rows of `n` elements.
///
/// # Safety
/// `x` and `dy` are readable for `rows * n` floats, `scale` for `n`; `out` is writable for `(rows + 2) * n`
/// floats and overlaps nothing else.
pub(in crate::cpu::library) unsafe fn layer_norm_grad(
    team: &Team,
    isa: Isa,
    (rows, n): (usize, usize),
    eps: f32,
    [x, scale, dy]: [*const f32; 3],
    out: *mut f32,
) {
    if n == 0 {
        return;
    }
    let each = rows.div_ceil(RANGES).max(ROWS);
    let ranges = rows.div_ceil(each);
    let scratch = team.scratch(ranges * 2 * n);
    let (sums, out) = (SharedMut(scratch.ptr()), SharedMut(out));
    let (x, scale, dy) = (SharedConst(x), SharedConst(scale), SharedConst(dy));
    let run = |part: usize| {
        let (r0, r1) = (part * each, ((part + 1) * each).min(rows));
        let len = (r1 - r0) * n;
        // SAFETY: the contract makes the operands readable and the output writable for all rows; a range has
        // its own rows of the output and its own `2 n` floats of scratch memory, which are zeroed before the
        // slices are made.
        unsafe {
            let own = sums.get().add(part * 2 * n);
            std::ptr::write_bytes(own, 0, 2 * n);
            let (dscale, dshift) = std::slice::from_raw_parts_mut(own, 2 * n).split_at_mut(n);
            let to = out.get().add(r0 * n);
            std::ptr::write_bytes(to, 0, len);
            let r = Range {
                n,
                eps,
                x: std::slice::from_raw_parts(x.get().add(r0 * n), len),
                dy: std::slice::from_raw_parts(dy.get().add(r0 * n), len),
                scale: std::slice::from_raw_parts(scale.get(), n),
                dx: std::slice::from_raw_parts_mut(to, len),
                dscale,
                dshift,
            };
            range(isa, r);
        }
    };
    match rows * n < 8192 {
        true => (0..ranges).for_each(run),
        false => team.run(ranges, &run),
    }
    // SAFETY: every range has written its sums; the last `2 n` floats of the output are writable.
    unsafe {
        let total = out.get().add(rows * n);
        std::ptr::write_bytes(total, 0, 2 * n);
        for part in 0..ranges {
            let own = sums.get().add(part * 2 * n);
            for i in 0..2 * n {
                *total.add(i) += *own.add(i);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::library::testing::*;

    #[test]
    fn gradients_of_norms_follow_f64_between_guard_pages() {
        let mut rng = Rng::new();
        for isa in Isa::available() {
            for (rows, n) in [(1, 1), (3, 5), (70, 33), (200, 64), (1, 700), (0, 4)] {
                let side = [Side::Start, Side::End][rng.below(2)];
                let (x, scale, dy) = (rng.vec(rows * n), rng.vec(n), rng.vec(rows * n));
                let eps = 1e-3f32;
                let mut want = vec![0f64; (rows + 2) * n];
                for r in 0..rows {
                    let at = |v: &[f32], i: usize| f64::from(v[r * n + i]);
                    let mean = (0..n).map(|i| at(&x, i)).sum::<f64>() / n as f64;
                    let var = (0..n).map(|i| (at(&x, i) - mean).powi(2)).sum::<f64>() / n as f64;
                    let f = 1.0 / (var + f64::from(eps)).sqrt();
                    let norm = |i: usize| (at(&x, i) - mean) * f;
                    let g = |i: usize| at(&dy, i) * f64::from(scale[i]);
                    let a = (0..n).map(g).sum::<f64>() / n as f64;
                    let b = (0..n).map(|i| g(i) * norm(i)).sum::<f64>() / n as f64;
                    for i in 0..n {
                        want[r * n + i] = (g(i) - a - norm(i) * b) * f;
                        want[rows * n + i] += at(&dy, i) * norm(i);
                        want[(rows + 1) * n + i] += at(&dy, i);
                    }
                }
                let [gx, gs, gy] = [&x, &scale, &dy].map(|v| Guarded::new(v, side));
                let mut first: Option<Vec<f32>> = None;
                for threads in [1, 3] {
                    let out = Guarded::new(&vec![f32::NAN; want.len()], side);
                    let from = [gx.ptr(), gs.ptr(), gy.ptr()];
                    // SAFETY: the operands have these sizes, and the output does not overlap them.
                    unsafe { layer_norm_grad(&Team::new(threads), isa, (rows, n), eps, from, out.mut_ptr()) };
                    for (got, want) in out.slice().iter().zip(&want) {
                        close(*got, *want, 1.0 + want.abs(), 1e-3, &(isa, rows, n));
                    }
                    let all = first.get_or_insert_with(|| out.slice().to_vec());
                    assert_eq!(all, out.slice(), "{threads} threads change the results");
                }
            }
        }
    }
}
