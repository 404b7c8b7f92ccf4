//! Matrices in memory, and what a product consists of: its operands, its batch and its epilogue.

use crate::cpu::library::Run;
use crate::cpu::library::epilogue::BoundChain;
use crate::cpu::team::SharedConst;
use halcyon_ir::layout::{View, collapse};

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
// SAFETY: the pointer is only used for reading; dereferencing it is unsafe, and `T: Sync` allows shared
// reads.
unsafe impl<T: Sync> Send for Mat<T> {}
// SAFETY: the pointer is only used for reading; dereferencing it is unsafe, and `T: Sync` allows shared
// reads.
unsafe impl<T: Sync> Sync for Mat<T> {}

impl<T> Mat<T> {
    /// Row-major, with `rs` elements from row to row.
    pub fn rows(ptr: *const T, rs: usize) -> Mat<T> {
        Mat { ptr, rs: rs as isize, cs: 1 }
    }

    /// The same matrix with elements of another type of the same size.
    #[cfg(target_arch = "x86_64")]
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

/// One matrix product. [`Epilogue`] gives the formula. The type of an operand says how the operand is stored:
/// [`Mat`] is a matrix in place with strides, `*const f32` points to dense rows, and `Packed` and similar
/// types (also `*const u8`) are operands in the layout that a kernel reads. `E` is the type of the epilogue;
/// `()` means that the sums are stored as they are.
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

    /// Number of multiplications, at most `usize::MAX`.
    pub(crate) fn work(&self) -> usize {
        self.m.saturating_mul(self.n).saturating_mul(self.k)
    }

    /// This product with another epilogue.
    pub fn with(self, epilogue: E) -> Gemm<A, B, C, E> {
        Gemm { epilogue, ..self }
    }

    /// This product with an epilogue of another type.
    pub(crate) fn with_epilogue<F>(self, epilogue: F) -> Gemm<A, B, C, F> {
        let Gemm { m, n, k, a, b, c, .. } = self;
        Gemm { m, n, k, a, b, c, epilogue }
    }

    /// This product without an epilogue.
    pub(crate) fn plain(self) -> Gemm<A, B, C, ()> {
        self.with_epilogue(())
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

/// How many products a batch has, and the distances in elements from the operands and the result of one
/// product to the operands and the result of the next. Distance 0 repeats an operand.
#[derive(Clone, Copy, Debug)]
pub struct Batch {
    pub count: usize,
    pub a: isize,
    pub b: isize,
    pub c: isize,
}

impl Batch {
    /// Product `i` of the batch whose first product is `g`.
    pub(crate) fn item<A, B, C, E: Copy>(
        &self,
        g: &Gemm<Mat<A>, Mat<B>, MatMut<C>, E>,
        i: usize,
    ) -> Gemm<Mat<A>, Mat<B>, MatMut<C>, E> {
        let i = i as isize;
        Gemm { a: g.a.offset(i * self.a), b: g.b.offset(i * self.b), c: g.c.offset(i * self.c), ..*g }
    }
}

/// The sizes and strides of a batch of matrix products.
#[derive(Clone, Debug)]
pub(crate) struct Product {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub a: View,
    pub b: View,
    /// The batch axes except the last: `[size, stride of a, of b, of c]`, strides in elements.
    pub outer: Vec<[isize; 4]>,
    /// The size of the last batch axis, and its strides in a, b and c.
    pub batch: usize,
    pub step: [isize; 3],
}

impl Product {
    pub(crate) fn new(a: &View, b: &View) -> Product {
        let rank = a.rank();
        let (mut m, k, n) = (a.shape[rank - 2], a.shape[rank - 1], b.shape[rank - 1]);
        let head = |v: &View| View {
            shape: v.shape[..rank - 2].into(),
            strides: v.strides[..rank - 2].into(),
            offset: 0,
            mask: None,
        };
        let mut c = head(&View::dense(&[&a.shape[..rank - 2], &[m, n][..]].concat()));
        let (mut ba, mut bb) = (head(a), head(b));
        collapse(&mut [&mut ba, &mut bb, &mut c], rank - 2);
        let axis = |i: usize| [ba.shape[i] as isize, ba.strides[i], bb.strides[i], c.strides[i]];
        let mut outer: Vec<[isize; 4]> = (0..ba.rank()).map(axis).collect();
        let [mut batch, sa, sb, sc] = outer.pop().unwrap_or([1, 0, 0, 0]);
        // All products along this axis have the same right operand, and the rows of each left operand follow
        // those of the one before at the same distance. So these products are one product with more rows.
        if sb == 0 && batch > 1 && sa == m as isize * a.strides[rank - 2] && n > 0 {
            m *= batch as usize;
            batch = 1;
        }
        Product { m, n, k, a: a.clone(), b: b.clone(), outer, batch: batch as usize, step: [sa, sb, sc] }
    }

    /// Calls `f` with the offsets in a, b and c of every index of the outer batch axes.
    pub(crate) fn groups(&self, mut f: impl FnMut(isize, isize, isize)) {
        let total: isize = self.outer.iter().map(|o| o[0]).product();
        for g in 0..total {
            let (mut left, mut at) = (g, [0isize; 3]);
            for o in self.outer.iter().rev() {
                let i = left % o[0];
                left /= o[0];
                (0..3).for_each(|x| at[x] += i * o[x + 1]);
            }
            f(at[0], at[1], at[2]);
        }
    }

    /// `(m, n, k)` of one product.
    pub(crate) fn size(&self) -> (usize, usize, usize) {
        (self.m, self.n, self.k)
    }

    /// The products along the last batch axis.
    pub(crate) fn all(&self) -> Batch {
        let [a, b, c] = self.step;
        Batch { count: self.batch, a, b, c }
    }

    pub(crate) fn mats<T>(&self, r: &Run<'_>) -> (Mat<T>, Mat<T>) {
        (self.a(r), self.b(r))
    }

    pub(crate) fn a<T>(&self, r: &Run<'_>) -> Mat<T> {
        Product::mat(r, 0, &self.a)
    }

    pub(crate) fn b<T>(&self, r: &Run<'_>) -> Mat<T> {
        Product::mat(r, 1, &self.b)
    }

    fn mat<T>(r: &Run<'_>, buf: usize, v: &View) -> Mat<T> {
        let rank = v.rank();
        Mat { ptr: r.ptr(buf, v), rs: v.strides[rank - 2], cs: v.strides[rank - 1] }
    }
}

/// The epilogue of a product: `C = chain(act(alpha A B + beta C + bias))`, where `act` is ReLU or nothing.
/// The kernel applies everything but the chain while it stores the sums. The chain runs afterwards, on
/// complete sums.
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
    /// A chain that is applied to a part of the result once the sums of that part are complete: in place in
    /// C, or from scratch memory to C. Not every product applies it, see [`super::product_f32::gemm`].
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
    /// last K block.
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

    /// Value of one element whose dot product is `sum`, without the chain. Reads `c` only if beta is not 0.
    ///
    /// # Safety
    /// `c` is readable if beta is not 0; `bias_row` is null or has element `i`; `bias_col` is null or has
    /// element `j`.
    #[inline(always)]
    pub(crate) unsafe fn scalar(&self, sum: f32, c: *const f32, i: usize, j: usize) -> f32 {
        // SAFETY: `scalar` requires that `c` is readable if beta is not 0, and that a bias that is not null
        // has its element `i` or `j`.
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

/// Kinds of epilogue, apart from the chain. Full tiles apply `Plain` and `Add` directly from registers.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Store {
    Plain,
    /// `C += A B`.
    Add,
    Other,
}
