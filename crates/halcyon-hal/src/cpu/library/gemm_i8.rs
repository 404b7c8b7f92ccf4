//! Exact matrix products of 8-bit integers: `C = A B` in i32, which wraps.
//!
//! On tile registers (`tiles.rs`) every mix of signed and unsigned bytes has its instruction, and operands
//! are multiplied as they are.
//!
//! With AVX512_VNNI, four steps of K go through one `vpdpbusd` per lane, which multiplies unsigned by signed
//! bytes. The left operand is packed unsigned (an i8 plus 128), the right one signed (a u8 minus 128), and
//! sums start from what that changed, known per row of A and column of B when they are packed: `sum a b = sum
//! a' b' - 128 s_a sum b' + 128 u_b sum a`, s_a being 1 for signed A, u_b 1 for unsigned B. The sums of the
//! instruction do not saturate. AVX2 and other processors widen to 16 bits and multiply pairs (`vpmaddwd`, or
//! plain integers), exact as well. So the result is the same on every processor, for any number of threads.
//! Zero points are the caller's business: `sum (a - x)(b - y)` is a correction of the same form.
//!
//! Cost. One step of the 12 x 32 micro-tile is 24 instructions of 64 multiply-adds on 12 + 32 lanes of 4
//! bytes: 3,072 operations on 176 bytes of cache, so the ceiling is the instruction's rate, four times that
//! of f32. Packing and C, written once per 2,048 steps of K in 4 bytes, weigh four times what they do for
//! f32. `examples/narrow_gemm.rs` measures it beside the instruction on registers (two cores of an Intel
//! Xeon, other work on the machine): the best of 5 runs had 80 to 83 % of the best peak, 1,450 Gop/s, at
//! 1024. At 2048 no undisturbed run of two threads was had; on one, shares of 61 to 77 % came out. What did
//! not help: asking for C's lines before the sums (within the noise), panels of B in the first cache level
//! instead of A's (8 % slower at 1024, 3 % at 2048).

use super::lanes::{Kind, LaneElem, Panels, Place, Right, batch, pack_lanes, product};
use super::mat::{Mat, MatMut};
#[cfg(target_arch = "x86_64")]
use super::tiles::PackedShape;
#[cfg(target_arch = "x86_64")]
use super::tiles_i8::{self, gemm_i8_tiles, pack_i8_tiles};
use crate::cpu::sys::Isa;
use crate::cpu::team::{SharedMut, Team};

/// Elements of [`gemm_i8`]: i8 and u8.
pub trait Byte: Copy + Send + Sync + sealed::Sealed + 'static {
    #[doc(hidden)]
    const SIGNED: bool;
}
impl Byte for i8 {
    const SIGNED: bool = true;
}
impl Byte for u8 {
    const SIGNED: bool = false;
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for i8 {}
    impl Sealed for u8 {}
}

fn bytes<T: Byte>(m: Mat<T>) -> Mat<u8> {
    Mat { ptr: m.ptr as *const u8, rs: m.rs, cs: m.cs }
}

/// A byte widened to 16 bits.
#[derive(Clone, Copy)]
#[repr(transparent)]
struct Wide<const SIGNED: bool>(u8);

impl<const SIGNED: bool> LaneElem for Wide<SIGNED> {
    const GROUP: usize = 2;
    #[inline(always)]
    fn bits(self) -> u32 {
        if SIGNED { (self.0 as i8 as i16 as u16).into() } else { self.0.into() }
    }
}

/// Vectors of i32 sums and of the lanes that make them.
trait Ints: Copy {
    type V: Copy;
    /// Lanes.
    const W: usize;
    unsafe fn zero() -> Self::V;
    unsafe fn splat(x: u32) -> Self::V;
    unsafe fn load(p: *const u32) -> Self::V;
    unsafe fn store(p: *mut i32, v: Self::V);
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V;
    /// `acc` plus the products of the lanes' integers.
    unsafe fn dot(acc: Self::V, a: Self::V, b: Self::V) -> Self::V;
}

/// `R x (NV W)` sums over `kc` lanes, begun with the operands' heads where they have some (B's only with
/// `b_head`).
#[inline(always)]
unsafe fn micro<S: Ints, const R: usize, const MR: usize, const NV: usize>(
    kc: usize,
    head: bool,
    b_head: bool,
    a: *const u32,
    b: *const u32,
    out: &Place<i32>,
) {
    // SAFETY: the caller's pointers; `out` says how much of the tile exists. Loops over the sums have
    // constant bounds and no exits, or the compiler would keep them in memory.
    unsafe {
        let (mut a, mut b) = (a, b);
        let mut acc = [[S::zero(); NV]; R];
        if head {
            let mut start = [S::zero(); NV];
            if b_head {
                for v in 0..NV {
                    start[v] = S::load(b.add(v * S::W));
                }
            }
            for i in 0..R {
                let x = S::splat(*a.add(i));
                for v in 0..NV {
                    acc[i][v] = S::add(x, start[v]);
                }
            }
            a = a.add(MR);
            b = b.add(NV * S::W);
        }
        for _ in 0..kc {
            let mut bv = [S::zero(); NV];
            for v in 0..NV {
                bv[v] = S::load(b.add(v * S::W));
            }
            for i in 0..R {
                let x = S::splat(*a.add(i));
                for v in 0..NV {
                    acc[i][v] = S::dot(acc[i][v], x, bv[v]);
                }
            }
            a = a.add(MR);
            b = b.add(NV * S::W);
        }
        let full = out.cs == 1 && out.rows == R && out.cols == NV * S::W;
        if full && out.first {
            for i in 0..R {
                for v in 0..NV {
                    S::store(out.c.offset(i as isize * out.rs).add(v * S::W), acc[i][v]);
                }
            }
        } else if full {
            for i in 0..R {
                for v in 0..NV {
                    let p = out.c.offset(i as isize * out.rs).add(v * S::W);
                    S::store(p, S::add(acc[i][v], S::load(p as *const u32)));
                }
            }
        } else {
            let mut sums = [[[0i32; 16]; NV]; R];
            for i in 0..R {
                for v in 0..NV {
                    S::store(sums[i][v].as_mut_ptr(), acc[i][v]);
                }
            }
            for i in 0..out.rows {
                for j in 0..out.cols {
                    let p = out.c.offset(i as isize * out.rs + j as isize * out.cs);
                    let s = sums[i][j / S::W][j % S::W];
                    *p = if out.first { s } else { s.wrapping_add(*p) };
                }
            }
        }
    }
}

/// [`micro`] with as many rows as a third, two thirds or all of the panel's.
macro_rules! tile_of_rows {
    ($s:ty, $mr:literal, $nv:literal, $kc:expr, $head:expr, $b_head:expr, $a:expr, $b:expr, $out:expr) => {
        if $out.rows > $mr * 2 / 3 {
            micro::<$s, $mr, $mr, $nv>($kc, $head, $b_head, $a, $b, $out)
        } else if $out.rows > $mr / 3 {
            micro::<$s, { $mr * 2 / 3 }, $mr, $nv>($kc, $head, $b_head, $a, $b, $out)
        } else {
            micro::<$s, { $mr / 3 }, $mr, $nv>($kc, $head, $b_head, $a, $b, $out)
        }
    };
}

/// Which of the operands are signed.
#[derive(Clone, Copy)]
struct Signs {
    a: bool,
    b: bool,
}

/// Packs bytes as 16-bit integers.
unsafe fn pack_wide(
    signed: bool,
    src: *const u8,
    rs: isize,
    ks: isize,
    n: usize,
    width: usize,
    k: usize,
    dst: *mut u32,
) {
    // SAFETY: the caller's; the wrappers are transparent.
    unsafe {
        if signed {
            pack_lanes(src as *const Wide<true>, rs, ks, n, width, k, 0, dst)
        } else {
            pack_lanes(src as *const Wide<false>, rs, ks, n, width, k, 0, dst)
        }
    }
}

/// Plain integers, which compilers turn into the baseline's vectors.
#[derive(Clone, Copy)]
struct Plain4;

impl Ints for Plain4 {
    type V = [i32; 4];
    const W: usize = 4;
    #[inline(always)]
    unsafe fn zero() -> [i32; 4] {
        [0; 4]
    }
    #[inline(always)]
    unsafe fn splat(x: u32) -> [i32; 4] {
        [x as i32; 4]
    }
    #[inline(always)]
    unsafe fn load(p: *const u32) -> [i32; 4] {
        // SAFETY: the caller's pointer covers 4 lanes.
        unsafe { std::ptr::read_unaligned(p as *const [i32; 4]) }
    }
    #[inline(always)]
    unsafe fn store(p: *mut i32, v: [i32; 4]) {
        // SAFETY: the caller's pointer covers 4 lanes.
        unsafe { std::ptr::write_unaligned(p as *mut [i32; 4], v) }
    }
    #[inline(always)]
    unsafe fn add(a: [i32; 4], b: [i32; 4]) -> [i32; 4] {
        std::array::from_fn(|i| a[i].wrapping_add(b[i]))
    }
    #[inline(always)]
    unsafe fn dot(acc: [i32; 4], a: [i32; 4], b: [i32; 4]) -> [i32; 4] {
        std::array::from_fn(|i| {
            let (lo, hi) = (a[i] as i16 as i32 * b[i] as i16 as i32, (a[i] >> 16) * (b[i] >> 16));
            acc[i].wrapping_add(lo).wrapping_add(hi)
        })
    }
}

struct Portable(Signs);

impl Kind for Portable {
    type A = u8;
    type B = u8;
    type C = i32;
    const GROUP: usize = 2;
    const HEAD: usize = 0;
    const MR: usize = 4;
    const NR: usize = 8;
    unsafe fn pack_a(&self, src: *const u8, rs: isize, ks: isize, rows: usize, k: usize, dst: *mut u32) {
        // SAFETY: the caller's.
        unsafe { pack_wide(self.0.a, src, rs, ks, rows, Self::MR, k, dst) }
    }
    unsafe fn pack_b(&self, src: *const u8, cs: isize, ks: isize, cols: usize, k: usize, dst: *mut u32) {
        // SAFETY: the caller's.
        unsafe { pack_wide(self.0.b, src, cs, ks, cols, Self::NR, k, dst) }
    }
    unsafe fn tile(&self, kc: usize, a: *const u32, b: *const u32, out: &Place<i32>) {
        // SAFETY: the caller's.
        unsafe { tile_of_rows!(Plain4, 4, 2, kc, false, false, a, b, out) }
    }
}

/// Which code multiplies bytes: what operands are packed for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Code {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    Vnni,
    /// Tile registers.
    Tiles,
}

impl Code {
    pub(super) fn of(isa: Isa) -> Code {
        match isa.check() {
            _ if isa.has_int8_tiles() => Code::Tiles,
            _ => Code::vectors(isa),
        }
    }

    /// Without tile registers.
    pub(super) fn vectors(isa: Isa) -> Code {
        match isa.check() {
            _ if isa.has_vnni() => Code::Vnni,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 | Isa::Avx2 => Code::Avx2,
            _ => Code::Portable,
        }
    }
}

/// Runs `$e` with `$k` as the kind of product that `$code` names.
macro_rules! with_kind {
    ($code:expr, $signs:expr, $k:ident => $e:expr) => {
        match $code {
            #[cfg(target_arch = "x86_64")]
            Code::Vnni => {
                let $k = x86::Vnni($signs);
                $e
            }
            #[cfg(target_arch = "x86_64")]
            Code::Avx2 => {
                let $k = x86::Avx2($signs);
                $e
            }
            _ => {
                let $k = Portable($signs);
                $e
            }
        }
    };
}

/// `C = A B` in i32, wrapping: A is m x k of i8 or u8, B is k x n of i8 or u8, any strides. Without steps of
/// K, C is zero.
///
/// # Safety
/// Every element of A and B is readable, of C writable; C overlaps nothing.
pub unsafe fn gemm_i8<A: Byte, B: Byte>(
    team: &Team,
    isa: Isa,
    m: usize,
    n: usize,
    k: usize,
    a: Mat<A>,
    b: Mat<B>,
    c: MatMut<i32>,
) {
    // SAFETY: the caller's.
    unsafe { on_threads(Code::of(isa), team, team.threads(), m, n, k, a, b, c) }
}

/// [`gemm_i8`] by this code on so many threads.
///
/// # Safety
/// As [`gemm_i8`]; the processor has the code.
pub(super) unsafe fn on_threads<A: Byte, B: Byte>(
    code: Code,
    team: &Team,
    threads: usize,
    m: usize,
    n: usize,
    k: usize,
    a: Mat<A>,
    b: Mat<B>,
    c: MatMut<i32>,
) {
    #[cfg(target_arch = "x86_64")]
    if code == Code::Tiles {
        // SAFETY: the caller's.
        return unsafe { tiles_i8::on_tiles(team, threads, m, n, k, a, tiles_i8::plain(b), B::SIGNED, c) };
    }
    let (a, b) = (bytes(a), Right::Plain(bytes(b)));
    with_kind!(code, Signs { a: A::SIGNED, b: B::SIGNED }, kind => {
        // SAFETY: the caller's; the code is for this processor.
        unsafe { product(team, threads, &kind, m, n, k, a, &b, c) }
    });
}

/// `items` products whose operands lie `stride` elements apart (0 repeats an operand).
///
/// # Safety
/// As [`gemm_i8`], for every product; the results do not overlap.
pub unsafe fn gemm_i8_batched<A: Byte, B: Byte>(
    team: &Team,
    isa: Isa,
    items: usize,
    m: usize,
    n: usize,
    k: usize,
    a: (Mat<A>, isize),
    b: (Mat<B>, isize),
    c: (MatMut<i32>, isize),
) {
    let code = Code::of(isa);
    // Tiles are done sooner: products worth all threads are larger.
    let scale = if code == Code::Tiles { 8 } else { 1 };
    batch(team, items, m.saturating_mul(n).saturating_mul(k) / scale, &|i, threads| {
        let i = i as isize;
        let (a, b, c) = (a.0.offset(i * a.1), b.0.offset(i * b.1), c.0.offset(i * c.1));
        // SAFETY: the caller's.
        unsafe { on_threads(code, team, threads, m, n, k, a, b, c) };
    });
}

/// [`gemm_i8`] with operands and result of one type, in which it wraps. C is row-major with `ldc` elements
/// from row to row.
///
/// # Safety
/// As [`gemm_i8`].
pub unsafe fn gemm_i8_wrapped<T: Byte>(
    team: &Team,
    isa: Isa,
    m: usize,
    n: usize,
    k: usize,
    a: Mat<T>,
    b: Mat<T>,
    c: *mut T,
    ldc: usize,
) {
    let scratch = team.scratch(m * n);
    let (sums, out) = (SharedMut(scratch.ptr() as *mut i32), SharedMut(c as *mut u8));
    // SAFETY: the caller's; the scratch holds the sums, which the product writes in full.
    unsafe { gemm_i8(team, isa, m, n, k, a, b, MatMut::rows(sums.get(), n)) };
    team.ranges(m, (16 << 10) / n.max(1), &|i0, i1| {
        for i in i0..i1 {
            for j in 0..n {
                // SAFETY: rows of different ranges are disjoint and inside C.
                unsafe { *out.get().add(i * ldc + j) = *sums.get().add(i * n + j) as u8 };
            }
        }
    });
}

/// A right operand packed once for many products: weights, with the sums of their columns where those are
/// needed.
#[derive(Debug)]
pub struct PackedI8(Form8);

#[derive(Debug)]
enum Form8 {
    #[cfg(target_arch = "x86_64")]
    Tiles {
        rows: Vec<Row>,
        shape: PackedShape,
        signed: bool,
    },
    Lanes {
        panels: Panels,
        code: Code,
        signed: bool,
    },
}

/// 64 bytes, as registers are loaded.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
struct Row([u8; 64]);

impl PackedI8 {
    /// Packs the right operand, `k x n`.
    ///
    /// # Safety
    /// Every element of the matrix is readable.
    pub unsafe fn b<B: Byte>(isa: Isa, b: Mat<B>, k: usize, n: usize) -> PackedI8 {
        // SAFETY: the caller's.
        unsafe { PackedI8::b_for(Code::of(isa), b, k, n) }
    }

    /// Packs the right operand for this code.
    ///
    /// # Safety
    /// As [`PackedI8::b`]; the processor has the code.
    pub(super) unsafe fn b_for<B: Byte>(code: Code, b: Mat<B>, k: usize, n: usize) -> PackedI8 {
        #[cfg(target_arch = "x86_64")]
        if code == Code::Tiles {
            let shape = PackedShape { k, n, group: 4 };
            let mut rows = vec![Row([0; 64]); shape.bytes() / 64];
            // SAFETY: the caller's; the rows are the shape's.
            unsafe { pack_i8_tiles(&shape, None, b, rows.as_mut_ptr().cast()) };
            return PackedI8(Form8::Tiles { rows, shape, signed: B::SIGNED });
        }
        let b = bytes(b);
        // How A is signed does not matter here.
        with_kind!(code, Signs { a: true, b: B::SIGNED }, kind => {
            // SAFETY: the caller's.
            PackedI8(Form8::Lanes { panels: unsafe { Panels::new(&kind, b, k, n) }, code, signed: B::SIGNED })
        })
    }

    /// Bytes of memory it keeps.
    pub fn bytes(&self) -> usize {
        match &self.0 {
            #[cfg(target_arch = "x86_64")]
            Form8::Tiles { rows, .. } => size_of_val(&rows[..]),
            Form8::Lanes { panels, .. } => panels.bytes(),
        }
    }
}

/// [`gemm_i8`] with the right operand packed by [`PackedI8::b`].
///
/// # Safety
/// As [`gemm_i8`].
///
/// # Panics
/// When `b` was packed for another shape.
pub unsafe fn gemm_i8_packed<A: Byte>(
    team: &Team,
    m: usize,
    n: usize,
    k: usize,
    a: Mat<A>,
    b: &PackedI8,
    c: MatMut<i32>,
) {
    let shape = match &b.0 {
        #[cfg(target_arch = "x86_64")]
        Form8::Tiles { shape, .. } => (shape.k, shape.n),
        Form8::Lanes { panels, .. } => (panels.k, panels.extent),
    };
    assert!(shape == (k, n), "the packed operand is for another product");
    match &b.0 {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the caller's; it was packed where the process has the registers.
        Form8::Tiles { rows, signed, .. } => unsafe {
            gemm_i8_tiles(team, m, n, k, a, (rows.as_ptr().cast(), *signed), c);
        },
        Form8::Lanes { panels, code, signed } => {
            with_kind!(*code, Signs { a: A::SIGNED, b: *signed }, kind => {
                // SAFETY: the caller's; the code was looked for when the operand was packed.
                unsafe { product(team, team.threads(), &kind, m, n, k, bytes(a), &Right::Packed(panels), c) }
            });
        }
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) use x86::Quad;
#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::super::lanes::{Kind, LaneElem, LaneVector, Place, pack_vectors};
    use super::super::simd::mask16;
    use super::super::tiles::Source;
    use super::{Ints, Signs, micro, pack_wide};
    use std::arch::x86_64::*;

    /// 8 lanes of two 16-bit integers.
    #[derive(Clone, Copy)]
    struct Words;

    // SAFETY (of every block below): the caller is compiled for these instructions, and its promise about its
    // pointers.
    #[allow(clippy::undocumented_unsafe_blocks)]
    impl Ints for Words {
        type V = __m256i;
        const W: usize = 8;
        #[inline(always)]
        unsafe fn zero() -> __m256i {
            unsafe { _mm256_setzero_si256() }
        }
        #[inline(always)]
        unsafe fn splat(x: u32) -> __m256i {
            unsafe { _mm256_set1_epi32(x as i32) }
        }
        #[inline(always)]
        unsafe fn load(p: *const u32) -> __m256i {
            unsafe { _mm256_loadu_si256(p as *const __m256i) }
        }
        #[inline(always)]
        unsafe fn store(p: *mut i32, v: __m256i) {
            unsafe { _mm256_storeu_si256(p as *mut __m256i, v) }
        }
        #[inline(always)]
        unsafe fn add(a: __m256i, b: __m256i) -> __m256i {
            unsafe { _mm256_add_epi32(a, b) }
        }
        #[inline(always)]
        unsafe fn dot(acc: __m256i, a: __m256i, b: __m256i) -> __m256i {
            unsafe { _mm256_add_epi32(acc, _mm256_madd_epi16(a, b)) }
        }
    }

    /// 16 lanes of four bytes, unsigned on the left and signed on the right.
    #[derive(Clone, Copy)]
    struct Bytes;

    // SAFETY (of every block below): as above.
    #[allow(clippy::undocumented_unsafe_blocks)]
    impl Ints for Bytes {
        type V = __m512i;
        const W: usize = 16;
        #[inline(always)]
        unsafe fn zero() -> __m512i {
            unsafe { _mm512_setzero_si512() }
        }
        #[inline(always)]
        unsafe fn splat(x: u32) -> __m512i {
            unsafe { _mm512_set1_epi32(x as i32) }
        }
        #[inline(always)]
        unsafe fn load(p: *const u32) -> __m512i {
            unsafe { _mm512_loadu_si512(p as *const __m512i) }
        }
        #[inline(always)]
        unsafe fn store(p: *mut i32, v: __m512i) {
            unsafe { _mm512_storeu_si512(p as *mut __m512i, v) }
        }
        #[inline(always)]
        unsafe fn add(a: __m512i, b: __m512i) -> __m512i {
            unsafe { _mm512_add_epi32(a, b) }
        }
        #[inline(always)]
        unsafe fn dot(acc: __m512i, a: __m512i, b: __m512i) -> __m512i {
            unsafe { _mm512_dpbusd_epi32(acc, a, b) }
        }
    }

    /// # Safety
    /// As [`micro`]; the processor has AVX2.
    #[target_feature(enable = "avx2")]
    unsafe fn tile_words(kc: usize, a: *const u32, b: *const u32, out: &Place<i32>) {
        // SAFETY: the caller's.
        unsafe { tile_of_rows!(Words, 6, 2, kc, false, false, a, b, out) }
    }

    /// # Safety
    /// As [`micro`]; the processor has AVX512_VNNI.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn tile_bytes(kc: usize, b_head: bool, a: *const u32, b: *const u32, out: &Place<i32>) {
        // SAFETY: the caller's.
        unsafe { tile_of_rows!(Bytes, 12, 2, kc, true, b_head, a, b, out) }
    }

    pub(super) struct Avx2(pub Signs);

    impl Kind for Avx2 {
        type A = u8;
        type B = u8;
        type C = i32;
        const GROUP: usize = 2;
        const HEAD: usize = 0;
        const MR: usize = 6;
        const NR: usize = 16;
        unsafe fn pack_a(&self, src: *const u8, rs: isize, ks: isize, rows: usize, k: usize, dst: *mut u32) {
            // SAFETY: the caller's.
            unsafe { pack_wide(self.0.a, src, rs, ks, rows, Self::MR, k, dst) }
        }
        unsafe fn pack_b(&self, src: *const u8, cs: isize, ks: isize, cols: usize, k: usize, dst: *mut u32) {
            // SAFETY: the caller's.
            unsafe { pack_wide(self.0.b, src, cs, ks, cols, Self::NR, k, dst) }
        }
        unsafe fn tile(&self, kc: usize, a: *const u32, b: *const u32, out: &Place<i32>) {
            // SAFETY: the caller's; whoever makes this kind has looked for the instructions.
            unsafe { tile_words(kc, a, b, out) }
        }
    }

    /// A byte, with its top bit turned where FLIP: i8 plus 128 as u8, or u8 minus 128 as i8.
    #[derive(Clone, Copy)]
    #[repr(transparent)]
    pub(in super::super) struct Quad<const FLIP: bool>(u8);

    impl Source for Quad<false> {
        const RAW: bool = true;
    }

    impl<const FLIP: bool> LaneElem for Quad<FLIP> {
        const GROUP: usize = 4;
        #[inline(always)]
        fn bits(self) -> u32 {
            (if FLIP { self.0 ^ 0x80 } else { self.0 }).into()
        }
    }

    // SAFETY (of every block below): AVX-512 BW and VL by the trait's condition, and the caller's pointers.
    #[allow(clippy::undocumented_unsafe_blocks)]
    impl<const FLIP: bool> LaneVector for Quad<FLIP> {
        #[inline(always)]
        unsafe fn along(p: *const Self, n: usize) -> __m512i {
            unsafe {
                let m = if n >= 64 { u64::MAX } else { (1 << n) - 1 };
                let v = _mm512_maskz_loadu_epi8(m, p as *const i8);
                // What is not there stays zero.
                if FLIP { _mm512_xor_si512(v, _mm512_maskz_set1_epi8(m, i8::MIN)) } else { v }
            }
        }
        #[inline(always)]
        unsafe fn across(p: *const Self, ks: isize) -> __m512i {
            unsafe {
                let p = p as *const u8;
                let v = quads(
                    _mm_loadu_si128(p as *const __m128i),
                    _mm_loadu_si128(p.offset(ks) as *const __m128i),
                    _mm_loadu_si128(p.offset(2 * ks) as *const __m128i),
                    _mm_loadu_si128(p.offset(3 * ks) as *const __m128i),
                );
                if FLIP { _mm512_xor_si512(v, _mm512_set1_epi8(i8::MIN)) } else { v }
            }
        }
        #[inline(always)]
        unsafe fn across_part(p: *const Self, ks: isize, rows: usize, n: usize) -> __m512i {
            unsafe {
                let m = mask16(n);
                let flip = _mm_maskz_set1_epi8(m, if FLIP { i8::MIN } else { 0 });
                let mut r = [_mm_setzero_si128(); 4];
                for i in 0..4 {
                    if i < rows {
                        let v = _mm_maskz_loadu_epi8(m, p.offset(i as isize * ks) as *const i8);
                        r[i] = _mm_xor_si128(v, flip);
                    }
                }
                quads(r[0], r[1], r[2], r[3])
            }
        }
    }

    /// Lane j is byte j of each of four rows: 4 x 4 blocks of 32 bits are turned across the register, then
    /// bytes within each 128 bits.
    #[inline(always)]
    unsafe fn quads(r0: __m128i, r1: __m128i, r2: __m128i, r3: __m128i) -> __m512i {
        // SAFETY: AVX-512 F and BW by the caller's condition.
        unsafe {
            let v = _mm512_inserti32x4::<1>(_mm512_castsi128_si512(r0), r1);
            let v = _mm512_inserti32x4::<3>(_mm512_inserti32x4::<2>(v, r2), r3);
            let blocks = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
            let v = _mm512_permutexvar_epi32(blocks, v);
            let turn = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
            _mm512_shuffle_epi8(v, _mm512_broadcast_i32x4(turn))
        }
    }

    /// Packs lines of bytes in panels of `width`, leaving room for a head.
    ///
    /// # Safety
    /// As [`pack_vectors`]; the processor has AVX-512 BW and VL.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn pack(
        flip: bool,
        src: *const u8,
        rs: isize,
        ks: isize,
        n: usize,
        width: usize,
        k: usize,
        dst: *mut u32,
    ) {
        // SAFETY: the caller's; the wrappers are transparent.
        unsafe {
            if flip {
                pack_vectors(src as *const Quad<true>, rs, ks, n, width, k, 1, dst)
            } else {
                pack_vectors(src as *const Quad<false>, rs, ks, n, width, k, 1, dst)
            }
        }
    }

    /// Writes the heads of packed panels: `scale (sum of the line's bytes + less k)`, the bytes being
    /// unsigned or signed.
    ///
    /// # Safety
    /// `dst` holds the panels; the processor has AVX512_VNNI.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn heads(
        signed: bool,
        scale: i32,
        less: i32,
        panels: usize,
        width: usize,
        k: usize,
        dst: *mut u32,
    ) {
        let lanes = k.div_ceil(4);
        let ones = _mm512_set1_epi8(1);
        for p in 0..panels {
            for r in (0..width).step_by(16) {
                let m = mask16((width - r).min(16));
                // SAFETY: lanes inside the panel.
                unsafe {
                    let head = dst.add(p * width * (1 + lanes) + r) as *mut i32;
                    let mut s = _mm512_set1_epi32(less.wrapping_mul(k as i32));
                    for l in 0..if scale == 0 { 0 } else { lanes } {
                        let v = _mm512_maskz_loadu_epi32(m, head.add((1 + l) * width));
                        s = if signed {
                            _mm512_dpbusd_epi32(s, ones, v)
                        } else {
                            _mm512_dpbusd_epi32(s, v, ones)
                        };
                    }
                    _mm512_mask_storeu_epi32(head, m, _mm512_mullo_epi32(s, _mm512_set1_epi32(scale)));
                }
            }
        }
    }

    pub(super) struct Vnni(pub Signs);

    impl Kind for Vnni {
        type A = u8;
        type B = u8;
        type C = i32;
        const GROUP: usize = 4;
        const HEAD: usize = 1;
        const MR: usize = 12;
        const NR: usize = 32;
        unsafe fn pack_a(&self, src: *const u8, rs: isize, ks: isize, rows: usize, k: usize, dst: *mut u32) {
            let panels = rows.div_ceil(Self::MR);
            let (scale, less) = (if self.0.b { 0 } else { 128 }, if self.0.a { -128 } else { 0 });
            // SAFETY: the caller's; whoever makes this kind has looked for the instructions.
            unsafe {
                pack(self.0.a, src, rs, ks, rows, Self::MR, k, dst);
                heads(false, scale, less, panels, Self::MR, k, dst);
            }
        }
        unsafe fn pack_b(&self, src: *const u8, cs: isize, ks: isize, cols: usize, k: usize, dst: *mut u32) {
            let panels = cols.div_ceil(Self::NR);
            // SAFETY: as above.
            unsafe {
                pack(!self.0.b, src, cs, ks, cols, Self::NR, k, dst);
                heads(true, if self.0.a { -128 } else { 0 }, 0, panels, Self::NR, k, dst);
            }
        }
        unsafe fn tile(&self, kc: usize, a: *const u32, b: *const u32, out: &Place<i32>) {
            // SAFETY: the caller's; as above.
            unsafe { tile_bytes(kc, self.0.a, a, b, out) }
        }
    }
}
