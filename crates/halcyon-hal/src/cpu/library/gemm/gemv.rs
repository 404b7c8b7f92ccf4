//! Products with few rows: one vector, or up to [`ROWS`] at once, times a matrix. The large operand is read
//! once, in place and in memory order; everything else stays in the first-level cache.
//!
//! There are two forms, one for each layout of the large operand `B` (k x n). If its rows are contiguous, a
//! chunk of columns is summed as `c += a_k * B[k, :]`, several k at a time; each element is accumulated in
//! the order of k. If its columns are contiguous, dot products with up to four columns at a time are
//! accumulated in vector lanes, which are summed at the end. The order of a sum does not depend on how the
//! columns are divided among threads.

use super::product_f32::{Epilogue, Gemm, Mat, MatMut, PackElem};
use crate::cpu::library::simd::{Simd, Storage, dispatch_simd};
use crate::cpu::sys::Isa;
use crate::cpu::team::{AssertSync, SharedMut, Team};

/// The largest number of rows that `few_rows` takes.
pub const ROWS: usize = 8;
/// Products with fewer multiply-adds than this run on the calling thread.
const SERIAL: usize = 64 << 10;

/// `buf[i][j] += sum over q < KB of a[i][q] * b[q][j]` for `M` rows and `cols` columns. Rows of `a` are `lda`
/// floats apart, rows of `b` are `rs` elements apart, and rows of `buf` are `ldb` floats apart.
///
/// # Safety
/// The caller is compiled for `S`'s instruction set. `a` has M rows of KB readable floats. `b` has KB rows of
/// `cols` readable elements. `buf` has M rows of `cols` writable floats.
#[inline(always)]
unsafe fn axpy<S: Simd, T: Storage, const M: usize, const KB: usize>(
    a: *const f32,
    lda: usize,
    b: *const T,
    rs: isize,
    cols: usize,
    buf: *mut f32,
    ldb: usize,
) {
    // SAFETY: `axpy` requires M rows of `a` and `buf` and KB rows of `b`. Whole vectors end at
    // `j + S::W <= cols`, and partial accesses reach only the last `n = cols - j` columns.
    unsafe {
        let mut x = [[S::zero(); KB]; M];
        for i in 0..M {
            for q in 0..KB {
                x[i][q] = S::splat(*a.add(i * lda + q));
            }
        }
        let mut j = 0;
        while j + S::W <= cols {
            let mut v = [S::zero(); KB];
            for q in 0..KB {
                v[q] = T::load::<S>(b.offset(q as isize * rs).add(j));
            }
            for i in 0..M {
                let p = buf.add(i * ldb + j);
                let mut s = S::load(p);
                for q in 0..KB {
                    s = S::fma(x[i][q], v[q], s);
                }
                S::store(p, s);
            }
            j += S::W;
        }
        if j < cols {
            let n = cols - j;
            let mut v = [S::zero(); KB];
            for q in 0..KB {
                v[q] = T::load_part::<S>(b.offset(q as isize * rs).add(j), n);
            }
            for i in 0..M {
                let p = buf.add(i * ldb + j);
                let mut s = S::load_part(p, n);
                for q in 0..KB {
                    s = S::fma(x[i][q], v[q], s);
                }
                S::store_part(p, s, n);
            }
        }
    }
}

/// The data that all parts of one product share.
struct Job<T> {
    k: usize,
    /// The small operand: `m` contiguous rows of `k` floats.
    a: *const f32,
    b: Mat<T>,
    c: MatMut<f32>,
    epi: Epilogue,
}

/// Stores sums to C through the epilogue: `m` rows of `cols` columns from column `j0`. One function, not
/// inlined, serves all forms and sizes, because the compiler copies the loop for each case of the epilogue.
///
/// # Safety
/// `sums` has `m * cols` readable floats; rows `0..m`, columns `j0..j0 + cols` of C are writable, and no
/// other thread uses them; the biases of `epi` are null or cover these rows and columns.
#[inline(never)]
unsafe fn finish(c: &MatMut<f32>, epi: &Epilogue, (m, cols): (usize, usize), j0: usize, sums: *const f32) {
    for i in 0..m {
        for j in 0..cols {
            // SAFETY: `finish` requires that `sums`, C and the biases are valid for `i < m` and `j < cols`.
            unsafe {
                let p = c.ptr.offset(i as isize * c.rs + (j0 + j) as isize * c.cs);
                *p = epi.scalar(*sums.add(i * cols + j), p, i, j0 + j);
            }
        }
    }
}

/// Computes columns `j0..j1` in the row-contiguous form.
///
/// # Safety
/// The caller is compiled for `S`'s instruction set. `w.a` has M rows of `w.k` floats; `w.b` has `w.k` rows
/// with contiguous columns, readable in `j0..j1`; those columns of C are writable and used by this thread
/// only; `buf` has room for `M * (j1 - j0)` floats.
#[inline(always)]
unsafe fn rows_body<S: Simd, T: Storage, const M: usize>(w: &Job<T>, j0: usize, j1: usize, buf: *mut f32) {
    let cols = j1 - j0;
    // SAFETY: `k < w.k` in every step, so the rows of A and B are those that `rows_body` requires to be
    // readable; `buf` holds `M * cols` floats, which `finish` then reads.
    unsafe {
        for i in 0..M * cols {
            *buf.add(i) = 0.0;
        }
        let b = w.b.ptr.add(j0);
        let mut k = 0;
        // Take as many rows of B at a time as the registers allow, because the multipliers of these rows must
        // stay in registers.
        macro_rules! steps {
            ($kb:literal) => {
                while w.k - k >= $kb {
                    axpy::<S, T, M, $kb>(
                        w.a.add(k),
                        w.k,
                        b.offset(k as isize * w.b.rs),
                        w.b.rs,
                        cols,
                        buf,
                        cols,
                    );
                    k += $kb;
                }
            };
        }
        match M {
            1 | 2 => steps!(8),
            3 | 4 => steps!(4),
            _ => steps!(2),
        }
        steps!(1);
        finish(&w.c, &w.epi, (M, cols), j0, buf);
    }
}
dispatch_simd! {
    /// # Safety
    /// The contract of `rows_body` without its condition on the caller, because the dispatch checks `isa`.
    unsafe fn rows_form[T: Storage, const M: usize][T, M](isa, w: &Job<T>, j0: usize, j1: usize, buf: *mut f32) = rows_body
}

/// Dot products of `M` rows of `a` with `R` columns of B from column `j`, in `U` registers each. The order of
/// each sum does not depend on R.
///
/// # Safety
/// The caller is compiled for `S`'s instruction set. `w.a` has M rows of `w.k` floats, and columns `j..j + R`
/// of `w.b` have `w.k` contiguous readable elements.
#[inline(always)]
unsafe fn dots<S: Simd, T: Storage, const M: usize, const R: usize, const U: usize>(
    w: &Job<T>,
    j: usize,
) -> [[f32; R]; M] {
    // SAFETY: whole vectors end at or before `w.k`, and the last accesses are limited to the `n` elements
    // before `w.k`. `dots` requires that these are readable.
    unsafe {
        let mut acc = [[[S::zero(); U]; R]; M];
        let mut cols = [w.b.ptr; R];
        for r in 0..R {
            cols[r] = w.b.ptr.offset((j + r) as isize * w.b.cs);
        }
        let mut k = 0;
        while k + U * S::W <= w.k {
            for u in 0..U {
                let at = k + u * S::W;
                let mut v = [S::zero(); R];
                for r in 0..R {
                    v[r] = T::load::<S>(cols[r].add(at));
                }
                for i in 0..M {
                    let x = S::load(w.a.add(i * w.k + at));
                    for r in 0..R {
                        acc[i][r][u] = S::fma(x, v[r], acc[i][r][u]);
                    }
                }
            }
            k += U * S::W;
        }
        while k < w.k {
            let n = (w.k - k).min(S::W);
            let mut v = [S::zero(); R];
            for r in 0..R {
                v[r] = T::load_part::<S>(cols[r].add(k), n);
            }
            for i in 0..M {
                let x = S::load_part(w.a.add(i * w.k + k), n);
                for r in 0..R {
                    acc[i][r][0] = S::fma(x, v[r], acc[i][r][0]);
                }
            }
            k += n;
        }
        let mut out = [[0f32; R]; M];
        for i in 0..M {
            for r in 0..R {
                let mut t = acc[i][r][0];
                for u in 1..U {
                    t = S::add(t, acc[i][r][u]);
                }
                out[i][r] = S::sum(t);
            }
        }
        out
    }
}

/// Computes columns `j0..j1` in the column-contiguous form.
///
/// # Safety
/// The caller is compiled for `S`'s instruction set. `w.a` has M rows of `w.k` floats; columns `j0..j1` of
/// `w.b` have `w.k` contiguous readable elements; those columns of C are writable and used by this thread
/// only.
#[inline(always)]
unsafe fn cols_body<S: Simd, T: Storage, const M: usize>(w: &Job<T>, j0: usize, j1: usize) {
    // SAFETY: `columns!` keeps `j + r <= j1`, so `dots` and `finish` use only columns that `cols_body`
    // requires to be valid.
    unsafe {
        macro_rules! columns {
            ($j:ident $r:literal $u:literal) => {
                while j1 - $j >= $r {
                    let s = dots::<S, T, M, $r, $u>(w, $j);
                    finish(&w.c, &w.epi, (M, $r), $j, s.as_flattened().as_ptr());
                    $j += $r;
                }
            };
        }
        let mut j = j0;
        match M {
            1 => {
                columns!(j 4 4);
                columns!(j 1 4);
            }
            2 => {
                columns!(j 4 2);
                columns!(j 1 2);
            }
            3 | 4 => {
                columns!(j 4 1);
                columns!(j 1 1);
            }
            _ => {
                columns!(j 2 1);
                columns!(j 1 1);
            }
        }
    }
}
dispatch_simd! {
    /// # Safety
    /// The contract of `cols_body` without its condition on the caller, because the dispatch checks `isa`.
    unsafe fn cols_form[T: Storage, const M: usize][T, M](isa, w: &Job<T>, j0: usize, j1: usize) = cols_body
}

/// `C = act(alpha A B + beta C + bias)` for up to [`ROWS`] rows. The rows or the columns of B are contiguous.
/// The epilogue's chain is not applied.
///
/// # Safety
/// The contract of [`super::product_f32::gemm`]; `has_few_rows` holds for `m` and `b`.
pub(crate) unsafe fn few_rows<A: PackElem, B: PackElem>(team: &Team, isa: Isa, g: &Gemm<Mat<A>, Mat<B>>) {
    let Gemm { m, n, k, a, b, c, epilogue } = *g;
    let parallel = g.work() >= SERIAL;
    let threads = if parallel { team.threads() } else { 1 };
    // A chunk is long enough for hardware prefetching, and so short that its sums stay in the first-level
    // cache.
    let widest = if b.cs == 1 { (4096 / m).max(512) } else { 512 };
    let share = n.div_ceil(threads * 4).next_multiple_of(16);
    let chunk = share.clamp(16, widest);
    let parts = n.div_ceil(chunk);
    let scratch = team.scratch(m * k + threads * m * chunk);
    let copy = scratch.ptr();
    let bufs = SharedMut(copy.wrapping_add(m * k));
    // SAFETY: `few_rows` requires a readable A, and the scratch holds `m * k` floats for the copy.
    unsafe { copy_rows(m, k, a, copy) };
    // SAFETY: the job holds pointers and sizes; parts write disjoint columns of C.
    let job = unsafe { AssertSync::new(Job { k, a: copy, b, c, epi: epilogue }) };
    let f = |worker: usize, part: usize| {
        let (j0, j1) = (part * chunk, ((part + 1) * chunk).min(n));
        let w = job.get();
        let buf = bufs.get().wrapping_add(worker * m * chunk);
        // SAFETY: parts have disjoint columns; the buffer of `m * chunk` floats belongs to this worker;
        // `few_rows` requires readable A and B and a writable C.
        unsafe { columns(isa, m, w, j0, j1, buf) };
    };
    if parallel {
        team.run_with(parts, &f);
    } else {
        (0..parts).for_each(|p| f(0, p));
    }
}

/// [`few_rows`] on the calling thread, for an A of `m` contiguous rows of `k` floats.
///
/// # Safety
/// The contract of [`few_rows`]; A has `m * k` readable floats and `buf` room for `m * n`.
pub(crate) unsafe fn few_rows_inline<B: Storage>(isa: Isa, g: &Gemm<*const f32, Mat<B>>, buf: *mut f32) {
    let Gemm { m, n, k, a, b, c, epilogue } = *g;
    // SAFETY: `few_rows_inline` requires readable A and B, a writable C, and a `buf` of `m * n` floats, for
    // columns `0..n`.
    unsafe { columns(isa, m, &Job { k, a, b, c, epi: epilogue }, 0, n, buf) }
}

/// Number of columns summed at a time when one thread computes the whole product.
fn item_chunk(m: usize, n: usize) -> usize {
    n.min((4096 / m.max(1)).max(512))
}

/// Floats of scratch memory that [`few_rows_item`] needs.
pub(crate) fn item_floats(m: usize, n: usize, k: usize) -> usize {
    m * k + m * item_chunk(m, n)
}

/// [`few_rows`] on the calling thread, with the same results.
///
/// # Safety
/// The contract of [`few_rows`]; `buf` has room for [`item_floats`] floats.
pub(crate) unsafe fn few_rows_item<A: Storage, B: Storage>(
    isa: Isa,
    g: &Gemm<Mat<A>, Mat<B>>,
    buf: *mut f32,
) {
    let Gemm { m, n, k, a, b, c, epilogue } = *g;
    // SAFETY: `few_rows_item` requires readable A and B and a writable C. The `item_floats` floats of `buf`
    // are `m * k` for the copy and `m * chunk` for sums.
    unsafe {
        copy_rows(m, k, a, buf);
        let job = Job { k, a: buf, b, c, epi: epilogue };
        let chunk = item_chunk(m, n);
        for j in (0..n).step_by(chunk.max(1)) {
            columns(isa, m, &job, j, (j + chunk).min(n), buf.add(m * k));
        }
    }
}

/// Copies the small operand to contiguous rows of f32.
///
/// # Safety
/// Elements `(i, q)` of `a` are readable for `i < m`, `q < k`; `to` has room for `m * k` floats.
unsafe fn copy_rows<A: Storage>(m: usize, k: usize, a: Mat<A>, to: *mut f32) {
    for i in 0..m {
        for q in 0..k {
            // SAFETY: `copy_rows` requires that `a` is readable and `to` writable for `i < m` and `q < k`.
            unsafe { *to.add(i * k + q) = (*a.ptr.offset(i as isize * a.rs + q as isize * a.cs)).widen() };
        }
    }
}

/// Computes columns `j0..j1` in the form that suits B's layout.
///
/// # Safety
/// `m <= ROWS`. The contract of `rows_form` if `w.b.cs == 1`, otherwise of `cols_form`, with `M = m`.
unsafe fn columns<B: Storage>(isa: Isa, m: usize, w: &Job<B>, j0: usize, j1: usize, buf: *mut f32) {
    macro_rules! rows {
        ($($m:literal)*) => {
            // SAFETY: `columns` requires the contract of the form that the match picks.
            unsafe {
                match m {
                    $($m if w.b.cs == 1 => rows_form::<B, $m>(isa, w, j0, j1, buf),
                    $m => cols_form::<B, $m>(isa, w, j0, j1),)*
                    _ => {}
                }
            }
        };
    }
    rows!(1 2 3 4 5 6 7 8);
}
