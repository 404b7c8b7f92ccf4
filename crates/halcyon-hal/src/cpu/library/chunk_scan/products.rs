//! Products with the matrix of a head. The operations for an element of a result do not depend on the tile
//! that computes it.

use crate::cpu::library::simd::Simd;

/// A matrix `[key, value]` in rows without gaps.
#[derive(Clone, Copy)]
pub(super) struct Matrix {
    pub key: usize,
    pub value: usize,
    /// Floats of a row of `value` in scratch memory.
    pub wide: usize,
}

/// Calls `$tile` for all columns in blocks of 4, 2 and 1 vectors, and for the part of a vector at the end.
macro_rules! columns {
    ($s:ident, $m:expr, |$at:ident, $nv:ident, $last:ident| $tile:expr) => {{
        let value = $m.value;
        let mut $at = 0;
        // Wider blocks do not fit the registers of narrower vectors.
        while $s::W == 16 && value - $at >= 4 * $s::W {
            const $nv: usize = 4;
            let $last = $s::W;
            $tile;
            $at += 4 * $s::W;
        }
        while value - $at >= 2 * $s::W {
            const $nv: usize = 2;
            let $last = $s::W;
            $tile;
            $at += 2 * $s::W;
        }
        while $at < value {
            const $nv: usize = 1;
            let $last = (value - $at).min($s::W);
            $tile;
            $at += $s::W;
        }
    }};
}

pub(super) use columns;

/// Loads a vector, of which the last one of a row has `n` lanes.
///
/// # Safety
/// `p` has `n` readable floats; the caller is compiled for the instruction set of `S`.
#[inline(always)]
pub(super) unsafe fn load<S: Simd>(p: *const f32, n: usize) -> S::V {
    // SAFETY: the contract of this function.
    unsafe { if n == S::W { S::load(p) } else { S::load_part(p, n) } }
}

/// Stores a vector, of which the last one of a row has `n` lanes.
///
/// # Safety
/// `p` has room for `n` floats; the caller is compiled for the instruction set of `S`.
#[inline(always)]
pub(super) unsafe fn store<S: Simd>(p: *mut f32, v: S::V, n: usize) {
    // SAFETY: the contract of this function.
    unsafe { if n == S::W { S::store(p, v) } else { S::store_part(p, v, n) } }
}

/// `to[i] = rows[i] * matrix`. The rows of `to` have `wide` floats, those after the values are 0.
///
/// # Safety
/// Each row has `key` readable floats, the matrix is readable, and `to` has room for the rows and overlaps
/// nothing else. The caller is compiled for the instruction set of `S`.
#[inline(always)]
pub(super) unsafe fn times<S: Simd>(m: Matrix, rows: &[*const f32], matrix: *const f32, to: *mut f32) {
    // SAFETY: the contract of this function; the columns are those of the matrix.
    unsafe {
        let mut i = 0;
        while rows.len() - i >= 4 {
            let to = to.add(i * m.wide);
            columns!(S, m, |at, NV, last| tile::<S, 4, NV>(m, &rows[i..], matrix.add(at), to.add(at), last));
            i += 4;
        }
        while i < rows.len() {
            let to = to.add(i * m.wide);
            columns!(S, m, |at, NV, last| tile::<S, 1, NV>(m, &rows[i..], matrix.add(at), to.add(at), last));
            i += 1;
        }
    }
}

/// # Safety
/// The contract of [`times`] for the first `R` rows and for `N` vectors of columns, the last of which has
/// `last` lanes.
#[inline(always)]
unsafe fn tile<S: Simd, const R: usize, const N: usize>(
    m: Matrix,
    rows: &[*const f32],
    matrix: *const f32,
    to: *mut f32,
    last: usize,
) {
    // SAFETY: the contract of this function.
    unsafe {
        let mut sum = [[S::zero(); N]; R];
        for k in 0..m.key {
            let at = matrix.add(k * m.value);
            let x: [S::V; N] = std::array::from_fn(|n| {
                if n + 1 < N { S::load(at.add(n * S::W)) } else { load::<S>(at.add(n * S::W), last) }
            });
            for (sum, row) in sum.iter_mut().zip(rows) {
                let by = S::splat(*row.add(k));
                for n in 0..N {
                    sum[n] = S::fma(by, x[n], sum[n]);
                }
            }
        }
        for (r, sum) in sum.iter().enumerate() {
            for (n, v) in sum.iter().enumerate() {
                S::store(to.add(r * m.wide + n * S::W), *v);
            }
        }
    }
}

/// `to = keep * from + Σ_j keys[j]ᵀ parts[j]`, where the parts have `wide` floats each. `from` and `to` may
/// be the same matrix.
///
/// # Safety
/// Each key has `key` readable floats, there is a readable part for each, and the matrices are valid. The
/// caller is compiled for the instruction set of `S`.
#[inline(always)]
pub(super) unsafe fn change<S: Simd>(
    m: Matrix,
    keep: f32,
    keys: &[*const f32],
    parts: *const f32,
    from: *const f32,
    to: *mut f32,
) {
    // SAFETY: the contract of this function; the columns are those of the matrices.
    unsafe {
        let mut k = 0;
        while m.key - k >= 4 {
            let (from, to) = (from.add(k * m.value), to.add(k * m.value));
            columns!(S, m, |at, NV, last| added::<S, 4, NV>(
                m,
                keep,
                (keys, k),
                parts.add(at),
                (from.add(at), to.add(at)),
                last
            ));
            k += 4;
        }
        while k < m.key {
            let (from, to) = (from.add(k * m.value), to.add(k * m.value));
            columns!(S, m, |at, NV, last| added::<S, 1, NV>(
                m,
                keep,
                (keys, k),
                parts.add(at),
                (from.add(at), to.add(at)),
                last
            ));
            k += 1;
        }
    }
}

/// # Safety
/// The contract of [`change`] for `R` rows of the matrices, from row `k` on, and for `N` vectors of columns,
/// the last of which has `last` lanes.
#[inline(always)]
unsafe fn added<S: Simd, const R: usize, const N: usize>(
    m: Matrix,
    keep: f32,
    (keys, k): (&[*const f32], usize),
    parts: *const f32,
    (from, to): (*const f32, *mut f32),
    last: usize,
) {
    let lanes = |n: usize| if n + 1 < N { S::W } else { last };
    // SAFETY: the contract of this function.
    unsafe {
        let keep = S::splat(keep);
        let mut sum: [[S::V; N]; R] = std::array::from_fn(|r| {
            std::array::from_fn(|n| S::mul(keep, load::<S>(from.add(r * m.value + n * S::W), lanes(n))))
        });
        for (j, key) in keys.iter().enumerate() {
            let x: [S::V; N] = std::array::from_fn(|n| S::load(parts.add(j * m.wide + n * S::W)));
            for (r, sum) in sum.iter_mut().enumerate() {
                let by = S::splat(*key.add(k + r));
                for n in 0..N {
                    sum[n] = S::fma(by, x[n], sum[n]);
                }
            }
        }
        for (r, sum) in sum.iter().enumerate() {
            for (n, v) in sum.iter().enumerate() {
                store::<S>(to.add(r * m.value + n * S::W), *v, lanes(n));
            }
        }
    }
}
