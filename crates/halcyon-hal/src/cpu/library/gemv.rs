//! Products with few rows: matrix-vector, and up to [`ROWS`] vectors at once. The large operand is read once,
//! from where it lies, in the order it lies in; everything else stays in the first cache level.
//!
//! Two forms, by the layout of the large operand `B` (k x n). Rows contiguous: `c += a_k * B[k, :]` over a
//! chunk of columns, several k at a time, each element a chain of multiply-adds in the order of k. Columns
//! contiguous: dot products, four columns at a time, each in lanes that are summed at the end. Neither order
//! depends on how the columns are shared out.

use super::gemm::{Epilogue, Mat, MatMut, PackElem};
use super::simd::{Simd, Storage, dispatch_simd};
use crate::cpu::sys::Isa;
use crate::cpu::team::{Across, SharedMut, Team};

/// The most rows this file takes.
pub const ROWS: usize = 8;
/// Products smaller than this many multiply-adds stay on the calling thread.
const SERIAL: usize = 64 << 10;

/// `buf[i][j] += sum over q < KB of a[i][q] * b[q][j]` for `M` rows and `cols` columns; rows of `a` are `lda`
/// apart, rows of `buf` are `ldb` apart.
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
    // SAFETY: the caller's pointers.
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

/// Work on columns `j0..j1`: what every task of one product shares.
struct Job<T> {
    k: usize,
    /// The small operand, `m` rows of `k`.
    a: *const f32,
    b: Mat<T>,
    c: MatMut<f32>,
    epi: Epilogue,
}

/// Sums on their way to C: `m` rows of `cols`, from column `j0`. One function for all forms and sizes, as
/// loops over an epilogue become a copy for each of its cases.
///
/// # Safety
/// `sums` covers `m * cols` floats; that part of C is writable.
#[inline(never)]
unsafe fn finish(c: &MatMut<f32>, epi: &Epilogue, (m, cols): (usize, usize), j0: usize, sums: *const f32) {
    for i in 0..m {
        for j in 0..cols {
            // SAFETY: the caller's.
            unsafe {
                let p = c.ptr.offset(i as isize * c.rs + (j0 + j) as isize * c.cs);
                *p = epi.scalar(*sums.add(i * cols + j), p, i, j0 + j);
            }
        }
    }
}

/// Columns `j0..j1` in the row-contiguous form; `buf` holds `M * (j1 - j0)` floats.
#[inline(always)]
unsafe fn rows_body<S: Simd, T: Storage, const M: usize>(w: &Job<T>, j0: usize, j1: usize, buf: *mut f32) {
    let cols = j1 - j0;
    // SAFETY: the caller's pointers.
    unsafe {
        for i in 0..M * cols {
            *buf.add(i) = 0.0;
        }
        let b = w.b.ptr.add(j0);
        let mut k = 0;
        // As many steps at once as leave their multipliers in registers.
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
    unsafe fn rows_form[T: Storage, const M: usize][T, M](isa, w: &Job<T>, j0: usize, j1: usize, buf: *mut f32) = rows_body
}

/// Dot products of `M` rows of `a` with `R` columns of B, in `U` registers each. The order of each sum does
/// not depend on R.
#[inline(always)]
unsafe fn dots<S: Simd, T: Storage, const M: usize, const R: usize, const U: usize>(
    w: &Job<T>,
    j: usize,
) -> [[f32; R]; M] {
    // SAFETY: the caller's pointers.
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

/// Columns `j0..j1` in the column-contiguous form.
#[inline(always)]
unsafe fn cols_body<S: Simd, T: Storage, const M: usize>(w: &Job<T>, j0: usize, j1: usize) {
    // SAFETY: the caller's pointers.
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
    unsafe fn cols_form[T: Storage, const M: usize][T, M](isa, w: &Job<T>, j0: usize, j1: usize) = cols_body
}

/// Whether [`few_rows`] takes a product.
pub(crate) fn fits<T>(m: usize, b: &Mat<T>) -> bool {
    m <= ROWS && (b.cs == 1 || b.rs == 1)
}

/// `C = act(alpha A B + beta C + bias)` for up to [`ROWS`] rows, where B's rows or columns are contiguous.
///
/// # Safety
/// As [`super::gemm::gemm`].
pub(crate) unsafe fn few_rows<A: PackElem, B: PackElem>(
    team: &Team,
    isa: Isa,
    m: usize,
    n: usize,
    k: usize,
    a: Mat<A>,
    b: Mat<B>,
    c: MatMut<f32>,
    epi: Epilogue,
) {
    let parallel = m.saturating_mul(n).saturating_mul(k) >= SERIAL;
    let threads = if parallel { team.threads() } else { 1 };
    // Long enough for the memory's prefetchers, short enough that the sums stay in the first cache level.
    let widest = if b.cs == 1 { (4096 / m).max(512) } else { 512 };
    let share = n.div_ceil(threads * 4).next_multiple_of(16);
    let chunk = share.clamp(16, widest);
    let parts = n.div_ceil(chunk);
    let scratch = team.scratch(m * k + threads * m * chunk);
    let copy = scratch.ptr();
    let bufs = SharedMut(copy.wrapping_add(m * k));
    // SAFETY: the caller's matrix; the scratch holds the copy and a buffer for each thread.
    unsafe { copy_rows(m, k, a, copy) };
    let job = Across(Job { k, a: copy, b, c, epi });
    let f = |worker: usize, part: usize| {
        let (j0, j1) = (part * chunk, ((part + 1) * chunk).min(n));
        let w = job.get();
        let buf = bufs.get().wrapping_add(worker * m * chunk);
        // SAFETY: columns of different parts are disjoint, a worker's buffer is its own.
        unsafe { columns(isa, m, w, j0, j1, buf) };
    };
    if parallel {
        team.run_with(parts, &f);
    } else {
        (0..parts).for_each(|p| f(0, p));
    }
}

/// [`few_rows`] on the calling thread, with `a` as `m` contiguous rows of `k`. `buf` holds `m * n` floats.
pub(crate) unsafe fn few_rows_inline<B: Storage>(
    isa: Isa,
    m: usize,
    n: usize,
    k: usize,
    a: *const f32,
    b: Mat<B>,
    c: MatMut<f32>,
    epi: Epilogue,
    buf: *mut f32,
) {
    // SAFETY: the caller's.
    unsafe { columns(isa, m, &Job { k, a, b, c, epi }, 0, n, buf) }
}

/// Columns summed at once when one thread does the whole product.
fn item_chunk(m: usize, n: usize) -> usize {
    n.min((4096 / m.max(1)).max(512))
}

/// Floats of scratch that [`few_rows_item`] needs.
pub(crate) fn item_floats(m: usize, n: usize, k: usize) -> usize {
    m * k + m * item_chunk(m, n)
}

/// [`few_rows`] on the calling thread, with the same results. `buf` holds [`item_floats`].
pub(crate) unsafe fn few_rows_item<A: Storage, B: Storage>(
    isa: Isa,
    m: usize,
    n: usize,
    k: usize,
    a: Mat<A>,
    b: Mat<B>,
    c: MatMut<f32>,
    epi: Epilogue,
    buf: *mut f32,
) {
    // SAFETY: the caller's.
    unsafe {
        copy_rows(m, k, a, buf);
        let job = Job { k, a: buf, b, c, epi };
        let chunk = item_chunk(m, n);
        for j in (0..n).step_by(chunk.max(1)) {
            columns(isa, m, &job, j, (j + chunk).min(n), buf.add(m * k));
        }
    }
}

/// The small operand as contiguous rows of f32.
unsafe fn copy_rows<A: Storage>(m: usize, k: usize, a: Mat<A>, to: *mut f32) {
    for i in 0..m {
        for q in 0..k {
            // SAFETY: the caller's matrix and room for `m * k` floats.
            unsafe { *to.add(i * k + q) = (*a.ptr.offset(i as isize * a.rs + q as isize * a.cs)).widen() };
        }
    }
}

/// Columns `j0..j1` in the form that B's layout asks for.
unsafe fn columns<B: Storage>(isa: Isa, m: usize, w: &Job<B>, j0: usize, j1: usize, buf: *mut f32) {
    macro_rules! rows {
        ($($m:literal)*) => {
            // SAFETY: the caller's.
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

/// `y = act(alpha A x + beta y + bias)`: A is m x k with contiguous rows or columns, x has k elements
/// `x_stride` apart, y has m. `bias_row` of the epilogue is per element of y.
///
/// # Safety
/// As [`super::gemm::gemm`].
pub unsafe fn gemv<A: PackElem, X: PackElem>(
    team: &Team,
    isa: Isa,
    m: usize,
    k: usize,
    a: Mat<A>,
    x: *const X,
    x_stride: isize,
    y: *mut f32,
    epi: Epilogue,
) {
    let x = Mat { ptr: x, rs: x_stride, cs: 1 };
    // SAFETY: the caller's.
    unsafe { super::gemm::gemm(team, isa, m, 1, k, a, x, MatMut { ptr: y, rs: 1, cs: 1 }, epi) }
}
