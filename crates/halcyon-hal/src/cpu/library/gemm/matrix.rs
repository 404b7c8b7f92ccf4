//! Matrices in memory, the epilogue of a product, and the register tile of f32 sums.

use crate::cpu::library::epilogue::BoundChain;
use crate::cpu::library::simd::{Simd, dispatch_simd};
use crate::cpu::team::SharedConst;

/// A readable matrix: element `(i, j)` is at `ptr[i * rs + j * cs]`. Strides count elements and may be zero
/// or negative.
#[derive(Debug)]
pub struct Mat<T> {
    pub ptr: *const T,
    pub rs: isize,
    pub cs: isize,
}

impl<T> Clone for Mat<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Mat<T> {}
// SAFETY: the matrix is only read through; dereferencing the pointer is unsafe, and `T: Sync` allows shared
// reads.
unsafe impl<T: Sync> Send for Mat<T> {}
// SAFETY: the matrix is only read through; dereferencing the pointer is unsafe, and `T: Sync` allows shared
// reads.
unsafe impl<T: Sync> Sync for Mat<T> {}

impl<T> Mat<T> {
    /// Row-major, with `rs` elements from row to row.
    pub fn rows(ptr: *const T, rs: usize) -> Mat<T> {
        Mat { ptr, rs: rs as isize, cs: 1 }
    }

    /// The same matrix with elements of another type of the same size.
    pub(crate) fn cast<U>(self) -> Mat<U> {
        const { assert!(size_of::<T>() == size_of::<U>()) };
        Mat { ptr: self.ptr.cast(), rs: self.rs, cs: self.cs }
    }

    /// The transpose, sharing memory.
    pub fn t(self) -> Mat<T> {
        Mat { ptr: self.ptr, rs: self.cs, cs: self.rs }
    }

    pub(crate) fn offset(self, by: isize) -> Mat<T> {
        // `wrapping`, because an empty matrix may come with any pointer.
        Mat { ptr: self.ptr.wrapping_offset(by), ..self }
    }
}

/// A writable matrix, the result of a product: element `(i, j)` is at `ptr[i * rs + j * cs]`.
#[derive(Debug)]
pub struct MatMut<T> {
    pub ptr: *mut T,
    pub rs: isize,
    pub cs: isize,
}

impl<T> Clone for MatMut<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for MatMut<T> {}
// SAFETY: dereferencing the pointer is unsafe, and the code that does so must keep threads on disjoint
// elements.
unsafe impl<T: Send> Send for MatMut<T> {}
// SAFETY: dereferencing the pointer is unsafe, and the code that does so must keep threads on disjoint
// elements.
unsafe impl<T: Send> Sync for MatMut<T> {}

impl<T> MatMut<T> {
    /// Row-major, with `rs` elements from row to row.
    pub fn rows(ptr: *mut T, rs: usize) -> MatMut<T> {
        MatMut { ptr, rs: rs as isize, cs: 1 }
    }

    /// The transpose, sharing memory.
    pub fn t(self) -> MatMut<T> {
        MatMut { ptr: self.ptr, rs: self.cs, cs: self.rs }
    }

    pub(crate) fn offset(self, by: isize) -> MatMut<T> {
        MatMut { ptr: self.ptr.wrapping_offset(by), ..self }
    }
}

/// One matrix product, `C = act(alpha A B + beta C + bias)`. The types of the operands say how they are
/// stored: [`Mat`] in place with strides, `Packed` and the like in the layout that a kernel reads, `*const T`
/// as dense rows. `E` is the type of the epilogue; `()` means that the sums are stored as they are.
#[derive(Clone, Copy, Debug)]
pub struct Gemm<A, B, C = MatMut<f32>, E = Epilogue> {
    /// Rows of A and C.
    pub m: usize,
    /// Columns of B and C.
    pub n: usize,
    /// Columns of A and rows of B.
    pub k: usize,
    /// The left operand, `m x k`.
    pub a: A,
    /// The right operand, `k x n`.
    pub b: B,
    /// The result, `m x n`.
    pub c: C,
    pub epilogue: E,
}

impl<A, B, C, E: Default> Gemm<A, B, C, E> {
    /// A product of size `(m, n, k)` with the default epilogue.
    pub fn new((m, n, k): (usize, usize, usize), a: A, b: B, c: C) -> Gemm<A, B, C, E> {
        Gemm { m, n, k, a, b, c, epilogue: E::default() }
    }
}

impl<A, B, C, E> Gemm<A, B, C, E> {
    /// `(m, n, k)`.
    pub(crate) fn size(&self) -> (usize, usize, usize) {
        (self.m, self.n, self.k)
    }

    /// Multiplications; the largest number if they cannot be counted.
    pub(crate) fn work(&self) -> usize {
        self.m.saturating_mul(self.n).saturating_mul(self.k)
    }

    /// This product with another epilogue.
    pub fn with(self, epilogue: E) -> Gemm<A, B, C, E> {
        Gemm { epilogue, ..self }
    }

    /// This product without an epilogue.
    pub(crate) fn plain(self) -> Gemm<A, B, C, ()> {
        let Gemm { m, n, k, a, b, c, .. } = self;
        Gemm { m, n, k, a, b, c, epilogue: () }
    }

    /// This product with its left operand in another form.
    pub(crate) fn with_a<T>(self, a: T) -> Gemm<T, B, C, E> {
        let Gemm { m, n, k, b, c, epilogue, .. } = self;
        Gemm { m, n, k, a, b, c, epilogue }
    }

    /// This product with its right operand in another form.
    pub(crate) fn with_b<T>(self, b: T) -> Gemm<A, T, C, E> {
        let Gemm { m, n, k, a, c, epilogue, .. } = self;
        Gemm { m, n, k, a, b, c, epilogue }
    }

    /// This product with another place for the result.
    pub(crate) fn with_c<T>(self, c: T) -> Gemm<A, B, T, E> {
        let Gemm { m, n, k, a, b, epilogue, .. } = self;
        Gemm { m, n, k, a, b, c, epilogue }
    }
}

impl<A, B, C> Gemm<Mat<A>, Mat<B>, MatMut<C>> {
    /// The transposed product: `C^T = B^T A^T`, sharing memory.
    pub(crate) fn t(&self) -> Gemm<Mat<B>, Mat<A>, MatMut<C>> {
        Gemm {
            m: self.n,
            n: self.m,
            k: self.k,
            a: self.b.t(),
            b: self.a.t(),
            c: self.c.t(),
            epilogue: self.epilogue.t(),
        }
    }
}

/// How many products a batch has, and the distance in elements from one product's operands to the next's.
/// Distance 0 repeats an operand.
#[derive(Clone, Copy, Debug)]
pub struct Batch {
    pub count: usize,
    pub a: isize,
    pub b: isize,
    pub c: isize,
}

impl Batch {
    /// Product `i` of the batch that starts with `g`.
    pub(crate) fn item<A, B, C, E: Copy>(
        &self,
        g: &Gemm<Mat<A>, Mat<B>, MatMut<C>, E>,
        i: usize,
    ) -> Gemm<Mat<A>, Mat<B>, MatMut<C>, E> {
        let i = i as isize;
        Gemm { a: g.a.offset(i * self.a), b: g.b.offset(i * self.b), c: g.c.offset(i * self.c), ..*g }
    }
}

/// The epilogue of a product, done before the result is stored: `C = act(alpha A B + beta C + bias)`.
#[derive(Clone, Copy, Debug)]
pub struct Epilogue {
    pub alpha: f32,
    /// If 0, C is not read (it may hold NaN).
    pub beta: f32,
    /// One value per row of C (m of them), or null.
    pub bias_row: SharedConst<f32>,
    /// One value per column of C (n of them), or null.
    pub bias_col: SharedConst<f32>,
    pub relu: bool,
    /// A chain that is applied in place to each part of a row once its sums are complete.
    pub chain: BoundChain,
}

impl Default for Epilogue {
    fn default() -> Self {
        let none = SharedConst(std::ptr::null());
        Epilogue {
            alpha: 1.0,
            beta: 0.0,
            bias_row: none,
            bias_col: none,
            relu: false,
            chain: BoundChain::default(),
        }
    }
}

impl Epilogue {
    pub(crate) fn store(&self) -> Store {
        if self.alpha != 1.0 || !self.bias_row.0.is_null() || !self.bias_col.0.is_null() || self.relu {
            Store::Other
        } else if self.beta == 0.0 {
            Store::Plain
        } else if self.beta == 1.0 {
            Store::Add
        } else {
            Store::Other
        }
    }

    /// The epilogue of the transposed product.
    pub(crate) fn t(&self) -> Epilogue {
        Epilogue { bias_row: self.bias_col, bias_col: self.bias_row, ..*self }
    }

    /// The part of the epilogue that one K block applies; `first` and `last` say whether it is the first or
    /// last.
    pub(crate) fn for_block(self, first: bool, last: bool) -> Epilogue {
        let none = SharedConst(std::ptr::null());
        Epilogue {
            alpha: self.alpha,
            beta: if first { self.beta } else { 1.0 },
            bias_row: if last { self.bias_row } else { none },
            bias_col: if last { self.bias_col } else { none },
            relu: last && self.relu,
            chain: if last { self.chain } else { BoundChain::default() },
        }
    }

    /// Value of one element whose dot product is `sum`. Reads `c` only if beta is not 0.
    ///
    /// # Safety
    /// `c` is readable if beta is not 0; the biases are null or have elements `i` and `j`.
    #[inline(always)]
    pub(crate) unsafe fn scalar(&self, sum: f32, c: *const f32, i: usize, j: usize) -> f32 {
        // SAFETY: the contract makes `c` and elements `i` and `j` of the biases readable where they are read.
        unsafe {
            let mut v = self.alpha * sum;
            if self.beta != 0.0 {
                v += self.beta * *c;
            }
            if !self.bias_row.0.is_null() {
                v += *self.bias_row.0.add(i);
            }
            if !self.bias_col.0.is_null() {
                v += *self.bias_col.0.add(j);
            }
            if self.relu && v < 0.0 { 0.0 } else { v }
        }
    }
}

/// A tile of C and the epilogue of its sums.
pub(crate) struct Tile {
    pub c: *mut f32,
    pub rs: isize,
    pub cs: isize,
    /// Rows and columns of the tile that lie in C.
    pub rows: usize,
    pub cols: usize,
    /// Row and column of the tile's first element in C, for the biases.
    pub i: usize,
    pub j: usize,
    pub store: Store,
    pub epi: Epilogue,
    /// Memory that a later tile reads, to be prefetched: two cache lines every [`STRIDE`] steps. Null for
    /// none.
    pub ahead: *const f32,
}

/// Steps of a tile between two prefetches.
pub(crate) const STRIDE: usize = 8;
/// Floats prefetched each time.
pub(crate) const AHEAD: usize = 32;

/// Kinds of epilogue. Full tiles apply `Plain` and `Add` directly from registers.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Store {
    Plain,
    /// `C += A B`.
    Add,
    Other,
}

/// One step of a register tile's sum.
pub(crate) trait Step<S: Simd> {
    /// Returns `acc` plus the lane-wise product of `a` and `b`.
    ///
    /// # Safety
    /// The caller is compiled for `S`'s instruction set.
    unsafe fn step(a: S::V, b: S::V, acc: S::V) -> S::V;
}

/// Lanes are f32.
pub(crate) struct Fma;

impl<S: Simd> Step<S> for Fma {
    #[inline(always)]
    unsafe fn step(a: S::V, b: S::V, acc: S::V) -> S::V {
        // SAFETY: the contract of `step` gives the instruction set of `S`.
        unsafe { S::fma(a, b, acc) }
    }
}

/// The left operand of a register tile: element `k` of row `i` is at `ptr[i * rs + k * ks]`. Callers pass a
/// constant `ks`, so that the offsets in an unrolled loop are constants.
#[derive(Clone, Copy)]
pub(crate) struct TileRows {
    pub ptr: *const f32,
    pub rs: isize,
    pub ks: usize,
}

/// Unrolled steps of the loop. With one step, advancing the pointers takes a third of the time on processors
/// with 16 registers.
const UNROLL: usize = 4;

/// Computes `R x (NV W)` sums over `kc` steps in registers. The order of each sum does not depend on R and
/// NV. Element `k` of column `j` of the right operand is at `b[k * NV * W + j]`. `ahead` is as in [`Tile`].
///
/// # Safety
/// The caller is compiled for `S`'s instruction set; both operands are readable for `i < R`, `j < NV W`,
/// `k < kc`. `ahead` need not be readable.
#[inline(always)]
pub(crate) unsafe fn sums<S: Simd, D: Step<S>, const R: usize, const NV: usize>(
    kc: usize,
    a: TileRows,
    b: *const f32,
    ahead: *const f32,
) -> [[S::V; NV]; R] {
    // SAFETY: `left` counts the steps down, so `k < kc` in every access, `i < R` and `j < NV W`; the contract
    // makes these elements readable. Prefetches may have any address.
    unsafe {
        let mut acc = [[S::zero(); NV]; R];
        // One pointer serves three rows: their offsets are an index register times 0, 1 and 2.
        let mut rows = [a.ptr; R];
        for g in 1..R.div_ceil(3) {
            rows[g] = a.ptr.wrapping_offset(3 * g as isize * a.rs);
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
                        let x = S::splat(
                            *rows[i / 3].wrapping_offset((i % 3) as isize * a.rs).wrapping_add(u * a.ks),
                        );
                        for v in 0..NV {
                            acc[i][v] = D::step(x, bv[v], acc[i][v]);
                        }
                    }
                }
                for g in 0..R.div_ceil(3) {
                    rows[g] = rows[g].wrapping_add($n * a.ks);
                }
                b = b.wrapping_add($n * NV * S::W);
            };
        }
        let mut left = kc;
        if !ahead.is_null() {
            let mut ahead = ahead;
            while left >= STRIDE {
                S::prefetch(ahead);
                S::prefetch(ahead.wrapping_add(AHEAD / 2));
                ahead = ahead.wrapping_add(AHEAD);
                for _ in 0..STRIDE / UNROLL {
                    turn!(UNROLL);
                }
                left -= STRIDE;
            }
        }
        while left >= UNROLL {
            turn!(UNROLL);
            left -= UNROLL;
        }
        while left > 0 {
            turn!(1);
            left -= 1;
        }
        acc
    }
}

/// Computes the tile of [`sums`] and stores it through the epilogue. `out` may have fewer rows than R and
/// fewer columns than NV W.
///
/// # Safety
/// The contract of [`sums`]; the rows and columns of `out` are writable, used by no other thread, and covered
/// by its biases.
#[inline(always)]
pub(crate) unsafe fn register_tile<S: Simd, D: Step<S>, const R: usize, const NV: usize>(
    kc: usize,
    a: TileRows,
    b: *const f32,
    out: &Tile,
) {
    // SAFETY: the contract of `sums` holds. The fast path stores all R rows and NV W columns only if `out`
    // has them; `store_tile` stores the rows and columns of `out` only.
    unsafe {
        let acc = sums::<S, D, R, NV>(kc, a, b, out.ahead);
        // Loops over the accumulators have constant bounds and no exits, or the compiler would keep them in
        // memory.
        let full = out.cs == 1 && out.rows == R && out.cols == NV * S::W;
        if full && out.store != Store::Other {
            let add = out.store == Store::Add;
            for i in 0..R {
                for v in 0..NV {
                    let p = out.c.offset(i as isize * out.rs).add(v * S::W);
                    let x = if add { S::add(acc[i][v], S::load(p)) } else { acc[i][v] };
                    S::store(p, x);
                }
            }
        } else {
            let mut sums = [[[0f32; 16]; NV]; R];
            for i in 0..R {
                for v in 0..NV {
                    S::store(sums[i][v].as_mut_ptr(), acc[i][v]);
                }
            }
            store_tile(S::ISA, sums.as_ptr().cast(), NV, out);
        }
    }
}

dispatch_simd! {
    /// Stores the sums of a tile of any size, with the element order and rounding of [`register_tile`]'s fast
    /// path. One function serves all tiles of an instruction set. A row of `sums` has `vectors` groups of 16
    /// floats; the lanes of a vector are the first of each group.
    ///
    /// # Safety
    /// `sums` has `out.rows` rows; the rows and columns of `out` are writable, used by no other thread, and
    /// covered by its biases.
    unsafe fn store_tile[][](isa, sums: *const f32, vectors: usize, out: &Tile) = store_tile_body
}

/// The body of `store_tile`.
///
/// # Safety
/// The contract of `store_tile`, and the caller is compiled for `S`'s instruction set.
#[inline(always)]
unsafe fn store_tile_body<S: Simd>(sums: *const f32, vectors: usize, out: &Tile) {
    let e = &out.epi;
    // SAFETY: rows stop at `out.rows`, and `n` limits each vector to `out.cols`, which the contract makes
    // valid.
    unsafe {
        let alpha = S::splat(e.alpha);
        let beta = S::splat(e.beta);
        for i in 0..out.rows {
            let row = out.c.offset(i as isize * out.rs);
            for v in 0..vectors {
                let sums = sums.add((i * vectors + v) * 16);
                let n = out.cols.saturating_sub(v * S::W).min(S::W);
                if n == 0 {
                    break;
                }
                if out.cs != 1 {
                    for l in 0..n {
                        let j = v * S::W + l;
                        let p = row.offset(j as isize * out.cs);
                        *p = e.scalar(*sums.add(l), p, out.i + i, out.j + j);
                    }
                    continue;
                }
                let p = row.add(v * S::W);
                let mut x = S::mul(S::load(sums), alpha);
                if e.beta != 0.0 {
                    x = S::fma(S::load_part(p, n), beta, x);
                }
                if !e.bias_row.0.is_null() {
                    x = S::add(x, S::splat(*e.bias_row.0.add(out.i + i)));
                }
                if !e.bias_col.0.is_null() {
                    x = S::add(x, S::load_part(e.bias_col.0.add(out.j + v * S::W), n));
                }
                if e.relu {
                    x = S::relu(x);
                }
                S::store_part(p, x, n);
            }
        }
    }
}
