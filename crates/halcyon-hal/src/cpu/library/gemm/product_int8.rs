//! Exact matrix products of 8-bit integers: `C = A B` in wrapping i32.
//!
//! AMX (`tiles.rs`) has an instruction for every mix of signed and unsigned bytes, so operands are multiplied
//! as they are.
//!
//! With AVX512_VNNI, one `vpdpbusd` consumes a K group of four bytes per lane and multiplies unsigned by
//! signed bytes. The left operand is therefore packed as unsigned (an i8 plus 128) and the right one as
//! signed (a u8 minus 128). Sums start from the correction of this shift, which is computed per row of A and
//! per column of B during packing: `sum a b = sum a' b' - 128 s_a sum b' + 128 u_b sum a`, where s_a is 1 for
//! signed A and u_b is 1 for unsigned B. `vpdpbusd` sums do not saturate. AVX2 and other processors widen to
//! 16 bits and multiply pairs (`vpmaddwd`, or plain integers), which is exact as well. So the result is the
//! same on every processor and for any number of threads. Zero points are left to the caller:
//! `sum (a - x)(b - y)` needs a correction of the same form.
//!
//! Cost. One K group of the 12 x 32 tile takes 24 instructions of 64 multiply-adds on 12 + 32 lanes of 4
//! bytes: 3,072 operations per 176 bytes read from cache, so the instruction's rate is the ceiling, four
//! times that of f32. Relative to that, packing and C (4 bytes per element, written once per 2,048 elements
//! of K) cost four times as much as for f32. `examples/narrow_gemm.rs` measures it against the instruction on
//! registers. On two cores of an Intel Xeon shared with other work, the best of 5 runs reached 80 to 83 % of
//! the best peak, 1,450 Gop/s, at n = 1024. At 2048 no undisturbed run with two threads was possible; one
//! thread reached 61 to 77 %. Tried without gain: prefetching C's lines before the sums (within noise), and
//! keeping panels of B instead of A's in the first-level cache (8 % slower at 1024, 3 % at 2048).

use super::k_groups::{Kind, LaneElem, PanelShape, Panels, Place, Right, batch, pack_lanes, product};
use super::matrix::{Batch, Gemm, Mat, MatMut};
#[cfg(target_arch = "x86_64")]
use super::tile_registers::PackedShape;
#[cfg(target_arch = "x86_64")]
use super::tile_registers_int8::{self, gemm_i8_tiles, pack_i8_tiles};
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

/// A byte that is widened to 16 bits when packed.
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

/// A vector of i32 sums, and of the lanes that are multiplied. Each lane of a factor is a K group.
///
/// The methods must be called from code compiled for the implementation's instruction set.
trait Ints: Copy {
    type V: Copy;
    /// Lanes.
    const W: usize;
    /// # Safety
    /// The calling function is compiled for the instruction set.
    unsafe fn zero() -> Self::V;
    /// # Safety
    /// The calling function is compiled for the instruction set.
    unsafe fn splat(x: u32) -> Self::V;
    /// # Safety
    /// `W` lanes at `p` are readable; the calling function is compiled for the instruction set.
    unsafe fn load(p: *const u32) -> Self::V;
    /// # Safety
    /// `W` lanes at `p` are writable; the calling function is compiled for the instruction set.
    unsafe fn store(p: *mut i32, v: Self::V);
    /// # Safety
    /// The calling function is compiled for the instruction set.
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V;
    /// `acc` plus, in each lane, the sum of the products of the lane's integers.
    ///
    /// # Safety
    /// The calling function is compiled for the instruction set.
    unsafe fn dot(acc: Self::V, a: Self::V, b: Self::V) -> Self::V;
}

/// Computes `R x (NV W)` sums over `kc` K groups and stores or adds them to `out`. With `head`, panels begin
/// with one row of starting values; B's are used only with `b_head`.
///
/// # Safety
/// `a` is a packed panel of `MR` rows and `b` one of `NV W` columns, with `kc` K groups each plus the head.
/// `out.rows <= R`, `out.cols <= NV W`, and the tile of `out` is writable (and readable unless `out.first`).
/// The calling function is compiled for the instructions of `S`.
#[inline(always)]
unsafe fn micro<S: Ints, const R: usize, const MR: usize, const NV: usize>(
    kc: usize,
    head: bool,
    b_head: bool,
    a: *const u32,
    b: *const u32,
    out: &Place<i32>,
) {
    // SAFETY: by contract the panels hold `kc` K groups (plus the head) per row and column, and `out` is
    // valid for `out.rows x out.cols`; `sums` holds 16 values per vector and `W <= 16`. Loops over the sums
    // have constant bounds and no early exits; otherwise the compiler keeps the sums in memory.
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

/// [`micro`] with a third, two thirds or all of the panel's rows, whichever is enough for `out.rows`.
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

/// Packs bytes as 16-bit integers, in panels of `width` lines.
///
/// # Safety
/// As [`pack_lanes`]: the `n` lines of `k` bytes are readable and `dst` is writable for the panels.
unsafe fn pack_wide(signed: bool, lines: Mat<u8>, n: usize, k: usize, width: usize, dst: *mut u32) {
    let panel = PanelShape { width, head: 0 };
    // SAFETY: by contract the `n` lines of `k` bytes are readable and `dst` holds the panels; `Wide` is a
    // transparent wrapper of u8.
    unsafe {
        if signed {
            pack_lanes(lines.cast::<Wide<true>>(), n, k, panel, dst)
        } else {
            pack_lanes(lines.cast::<Wide<false>>(), n, k, panel, dst)
        }
    }
}

/// Plain integers, which the compiler vectorises for the baseline instruction set.
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
        // SAFETY: `Ints::load` requires 4 readable lanes at `p`.
        unsafe { std::ptr::read_unaligned(p as *const [i32; 4]) }
    }
    #[inline(always)]
    unsafe fn store(p: *mut i32, v: [i32; 4]) {
        // SAFETY: `Ints::store` requires 4 writable lanes at `p`.
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
        // SAFETY: `Kind::pack_a` guarantees readable rows and room for the panels of `MR` rows.
        unsafe { pack_wide(self.0.a, Mat { ptr: src, rs, cs: ks }, rows, k, Self::MR, dst) }
    }
    unsafe fn pack_b(&self, src: *const u8, cs: isize, ks: isize, cols: usize, k: usize, dst: *mut u32) {
        // SAFETY: `Kind::pack_b` guarantees readable columns and room for the panels of `NR` columns.
        unsafe { pack_wide(self.0.b, Mat { ptr: src, rs: cs, cs: ks }, cols, k, Self::NR, dst) }
    }
    unsafe fn tile(&self, kc: usize, a: *const u32, b: *const u32, out: &Place<i32>) {
        // SAFETY: `Kind::tile` guarantees packed panels of `kc` K groups and a writable tile; no instruction
        // set is needed.
        unsafe { tile_of_rows!(Plain4, 4, 2, kc, false, false, a, b, out) }
    }
}

/// Which instructions multiply bytes; packed operands depend on it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Code {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    Vnni,
    /// Tile registers.
    Tiles,
}

impl Code {
    pub(crate) fn of(isa: Isa) -> Code {
        match isa.check() {
            _ if isa.has_int8_tiles() => Code::Tiles,
            _ => Code::vectors(isa),
        }
    }

    /// The best instructions without AMX.
    pub(crate) fn vectors(isa: Isa) -> Code {
        match isa.check() {
            _ if isa.has_vnni() => Code::Vnni,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 | Isa::Avx2 => Code::Avx2,
            _ => Code::Portable,
        }
    }
}

/// Runs `$e` with `$k` as the [`Kind`] of product for `$code`.
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

/// `C = A B` in wrapping i32: A is m x k and B is k x n, each i8 or u8, with any strides. If `k` is 0, C is
/// zero.
///
/// # Safety
/// Every element of A and B is readable and every element of C writable; C overlaps nothing else, and its
/// elements do not overlap each other.
pub unsafe fn gemm_i8<A: Byte, B: Byte>(team: &Team, isa: Isa, g: &Gemm<Mat<A>, Mat<B>, MatMut<i32>, ()>) {
    // SAFETY: the caller guarantees readable A and B and a writable C; `Code::of` returns instructions that
    // this processor has.
    unsafe { on_threads(Code::of(isa), team, team.threads(), g) }
}

/// [`gemm_i8`] with the given instructions on at most `threads` threads.
///
/// # Safety
/// As [`gemm_i8`]; the processor has the instructions.
pub(crate) unsafe fn on_threads<A: Byte, B: Byte>(
    code: Code,
    team: &Team,
    threads: usize,
    g: &Gemm<Mat<A>, Mat<B>, MatMut<i32>, ()>,
) {
    #[cfg(target_arch = "x86_64")]
    if code == Code::Tiles {
        // SAFETY: the caller guarantees valid matrices and AMX.
        return unsafe {
            let b = tile_registers_int8::plain(g.b);
            tile_registers_int8::on_tiles(team, threads, &g.with_b((&b, B::SIGNED)))
        };
    }
    let b = Right::Plain(bytes(g.b));
    with_kind!(code, Signs { a: A::SIGNED, b: B::SIGNED }, kind => {
        // SAFETY: the caller guarantees valid matrices and the instructions of `code`.
        unsafe { product(team, threads, &kind, &g.with_a(bytes(g.a)).with_b(&b)) }
    });
}

/// The products of a batch that starts with `g`.
///
/// # Safety
/// As [`gemm_i8`] for every product; the results do not overlap.
pub unsafe fn gemm_i8_batched<A: Byte, B: Byte>(
    team: &Team,
    isa: Isa,
    items: Batch,
    g: &Gemm<Mat<A>, Mat<B>, MatMut<i32>, ()>,
) {
    let code = Code::of(isa);
    // AMX is faster, so a product must be larger before sharing it among all threads pays.
    let scale = if code == Code::Tiles { 8 } else { 1 };
    batch(team, items.count, g.work() / scale, &|i, threads| {
        // SAFETY: the caller guarantees the conditions of `gemm_i8` for product `i < items.count`; `Code::of`
        // returned instructions that this processor has.
        unsafe { on_threads(code, team, threads, &items.item(g, i)) };
    });
}

/// [`gemm_i8`] whose result has the type of the operands and wraps in it.
///
/// # Safety
/// As [`gemm_i8`].
pub unsafe fn gemm_i8_wrapped<T: Byte>(team: &Team, isa: Isa, g: &Gemm<Mat<T>, Mat<T>, MatMut<T>, ()>) {
    let (m, n, _) = g.size();
    let scratch = team.scratch(m * n);
    let sums = SharedMut(scratch.ptr() as *mut i32);
    let out = MatMut { ptr: g.c.ptr as *mut u8, rs: g.c.rs, cs: g.c.cs };
    // SAFETY: the caller guarantees readable A and B; the scratch memory holds `m * n` i32 sums.
    unsafe { gemm_i8(team, isa, &g.with_c(MatMut::rows(sums.get(), n))) };
    team.ranges(m, (16 << 10) / n.max(1), &|i0, i1| {
        // Capture the whole matrix, which is `Sync`, instead of its raw pointer, which is not.
        let c = out.offset(0);
        for i in i0..i1 {
            for j in 0..n {
                // SAFETY: `gemm_i8` wrote all `m * n` sums; C is writable by contract; ranges cover disjoint
                // rows.
                unsafe {
                    *c.ptr.offset(i as isize * c.rs + j as isize * c.cs) = *sums.get().add(i * n + j) as u8
                };
            }
        }
    });
}

/// A right operand packed once for many products (weights), with the sums of its columns if the instructions
/// need them.
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

/// The 64 bytes of a row of a tile register, aligned for loading.
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
        // SAFETY: the caller guarantees a readable `k x n` matrix; `Code::of` returns instructions that this
        // processor has.
        unsafe { PackedI8::b_for(Code::of(isa), b, k, n) }
    }

    /// Packs the right operand for the given instructions.
    ///
    /// # Safety
    /// As [`PackedI8::b`]; the processor has the instructions.
    pub(crate) unsafe fn b_for<B: Byte>(code: Code, b: Mat<B>, k: usize, n: usize) -> PackedI8 {
        #[cfg(target_arch = "x86_64")]
        if code == Code::Tiles {
            let shape = PackedShape { k, n, group: 4 };
            let mut rows = vec![Row([0; 64]); shape.bytes() / 64];
            // SAFETY: the caller guarantees a readable matrix and AMX; `rows` holds `shape.bytes()` bytes.
            unsafe { pack_i8_tiles(&shape, None, b, rows.as_mut_ptr().cast()) };
            return PackedI8(Form8::Tiles { rows, shape, signed: B::SIGNED });
        }
        let b = bytes(b);
        // B's head is always computed for a signed A; `Vnni::tile` ignores it if A is unsigned.
        with_kind!(code, Signs { a: true, b: B::SIGNED }, kind => {
            // SAFETY: the caller guarantees a readable `k x n` matrix and the instructions of `code`.
            PackedI8(Form8::Lanes { panels: unsafe { Panels::new(&kind, b, k, n) }, code, signed: B::SIGNED })
        })
    }

    /// Size of the packed operand in bytes.
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
/// Every element of A is readable and every element of C writable; C overlaps nothing else.
///
/// # Panics
/// If `b` was packed for another shape.
pub unsafe fn gemm_i8_packed<A: Byte>(team: &Team, g: &Gemm<Mat<A>, &PackedI8, MatMut<i32>, ()>) {
    let shape = match &g.b.0 {
        #[cfg(target_arch = "x86_64")]
        Form8::Tiles { shape, .. } => (shape.k, shape.n),
        Form8::Lanes { panels, .. } => (panels.k, panels.extent),
    };
    assert!(shape == (g.k, g.n), "the packed operand is for another product");
    match &g.b.0 {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the caller guarantees A and C; the shape was checked; `b` was packed for tile registers
        // only because this process may use them.
        Form8::Tiles { rows, signed, .. } => unsafe {
            gemm_i8_tiles(team, &g.with_b((rows.as_ptr().cast(), *signed)));
        },
        Form8::Lanes { panels, code, signed } => {
            with_kind!(*code, Signs { a: A::SIGNED, b: *signed }, kind => {
                // SAFETY: the caller guarantees A and C; the shape was checked; `code` was available when `b`
                // was packed.
                unsafe { product(team, team.threads(), &kind, &g.with_a(bytes(g.a)).with_b(&Right::Packed(panels))) }
            });
        }
    }
}

#[cfg(target_arch = "x86_64")]
pub(crate) use x86::Quad;
#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::super::k_groups::{Kind, LaneElem, LaneVector, PanelShape, Place, pack_vectors};
    use super::super::matrix::Mat;
    use super::super::tile_registers::Source;
    use super::{Ints, Signs, micro, pack_wide};
    use crate::cpu::library::simd::mask16;
    use std::arch::x86_64::*;

    /// 8 lanes of two 16-bit integers each.
    #[derive(Clone, Copy)]
    struct Words;

    // SAFETY (of every block below): `Ints` requires that the caller is compiled for AVX2, and that `W` lanes
    // are valid at the pointers of `load` and `store`.
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

    /// 16 lanes of four bytes each, unsigned on the left and signed on the right.
    #[derive(Clone, Copy)]
    struct Bytes;

    // SAFETY (of every block below): `Ints` requires that the caller is compiled for AVX-512 F and
    // AVX512_VNNI, and that `W` lanes are valid at the pointers of `load` and `store`.
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
    /// As [`micro`] with panels of 6 rows and 16 columns; the processor has AVX2.
    #[target_feature(enable = "avx2")]
    unsafe fn tile_words(kc: usize, a: *const u32, b: *const u32, out: &Place<i32>) {
        // SAFETY: the contract is that of `micro`; this function enables AVX2.
        unsafe { tile_of_rows!(Words, 6, 2, kc, false, false, a, b, out) }
    }

    /// # Safety
    /// As [`micro`] with panels of 12 rows and 32 columns and heads; the processor has AVX512_VNNI.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn tile_bytes(kc: usize, b_head: bool, a: *const u32, b: *const u32, out: &Place<i32>) {
        // SAFETY: the contract is that of `micro`; this function enables AVX512_VNNI.
        unsafe { tile_of_rows!(Bytes, 12, 2, kc, true, b_head, a, b, out) }
    }

    pub(crate) struct Avx2(pub Signs);

    impl Kind for Avx2 {
        type A = u8;
        type B = u8;
        type C = i32;
        const GROUP: usize = 2;
        const HEAD: usize = 0;
        const MR: usize = 6;
        const NR: usize = 16;
        unsafe fn pack_a(&self, src: *const u8, rs: isize, ks: isize, rows: usize, k: usize, dst: *mut u32) {
            // SAFETY: `Kind::pack_a` guarantees readable rows and room for the panels of `MR` rows.
            unsafe { pack_wide(self.0.a, Mat { ptr: src, rs, cs: ks }, rows, k, Self::MR, dst) }
        }
        unsafe fn pack_b(&self, src: *const u8, cs: isize, ks: isize, cols: usize, k: usize, dst: *mut u32) {
            // SAFETY: `Kind::pack_b` guarantees readable columns and room for the panels of `NR` columns.
            unsafe { pack_wide(self.0.b, Mat { ptr: src, rs: cs, cs: ks }, cols, k, Self::NR, dst) }
        }
        unsafe fn tile(&self, kc: usize, a: *const u32, b: *const u32, out: &Place<i32>) {
            // SAFETY: `Kind::tile` guarantees packed panels and a writable tile; a `Kind` is used only on a
            // processor with its instructions, here AVX2.
            unsafe { tile_words(kc, a, b, out) }
        }
    }

    /// A byte. With FLIP its top bit is inverted: i8 plus 128 as u8, or u8 minus 128 as i8.
    #[derive(Clone, Copy)]
    #[repr(transparent)]
    pub(crate) struct Quad<const FLIP: bool>(u8);

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

    // SAFETY (of every block below): `LaneVector` requires AVX-512 BW and VL and readable elements at `p`:
    // `n` or 16 in each of `rows` (else 4) rows that are `ks` apart. Masked elements are not read.
    #[allow(clippy::undocumented_unsafe_blocks)]
    impl<const FLIP: bool> LaneVector for Quad<FLIP> {
        #[inline(always)]
        unsafe fn along(p: *const Self, n: usize) -> __m512i {
            unsafe {
                let m = if n >= 64 { u64::MAX } else { (1 << n) - 1 };
                let v = _mm512_maskz_loadu_epi8(m, p as *const i8);
                // Elements past `n` must stay zero, so only the first `n` are inverted.
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

    /// Lane j is byte j of each of the four rows: 4 x 4 blocks of 32 bits are transposed across the register,
    /// then bytes within each 128 bits.
    ///
    /// # Safety
    /// The calling function is compiled for AVX-512 F and BW.
    #[inline(always)]
    unsafe fn quads(r0: __m128i, r1: __m128i, r2: __m128i, r3: __m128i) -> __m512i {
        // SAFETY: AVX-512 F and BW are enabled in the caller; only registers are used.
        unsafe {
            let v = _mm512_inserti32x4::<1>(_mm512_castsi128_si512(r0), r1);
            let v = _mm512_inserti32x4::<3>(_mm512_inserti32x4::<2>(v, r2), r3);
            let blocks = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
            let v = _mm512_permutexvar_epi32(blocks, v);
            let turn = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
            _mm512_shuffle_epi8(v, _mm512_broadcast_i32x4(turn))
        }
    }

    /// Packs lines of bytes in panels of `width`, leaving room for one head row per panel.
    ///
    /// # Safety
    /// As [`pack_vectors`]; the processor has AVX-512 BW and VL and AVX512_VNNI.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn pack(flip: bool, lines: Mat<u8>, n: usize, k: usize, width: usize, dst: *mut u32) {
        let panel = PanelShape { width, head: 1 };
        // SAFETY: by contract the lines are readable and `dst` holds the panels, as `pack_vectors` requires;
        // this function enables AVX-512 BW and VL; `Quad` is a transparent wrapper of u8.
        unsafe {
            if flip {
                pack_vectors(lines.cast::<Quad<true>>(), n, k, panel, dst)
            } else {
                pack_vectors(lines.cast::<Quad<false>>(), n, k, panel, dst)
            }
        }
    }

    /// Writes the heads of packed panels: `scale (sum of the line's bytes + less k)`, with the bytes read as
    /// signed or unsigned.
    ///
    /// # Safety
    /// `dst` is writable for `panels` packed panels of `width` lines, `k` bytes each, with heads; the
    /// processor has AVX512_VNNI.
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
                // SAFETY: the mask limits loads and stores to the panel's `width` lines; `dst` holds `panels`
                // panels.
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

    pub(crate) struct Vnni(pub Signs);

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
            // SAFETY: `Kind::pack_a` guarantees readable rows and room for the panels with heads; a `Kind` is
            // used only on a processor with its instructions, here AVX512_VNNI.
            unsafe {
                pack(self.0.a, Mat { ptr: src, rs, cs: ks }, rows, k, Self::MR, dst);
                heads(false, scale, less, panels, Self::MR, k, dst);
            }
        }
        unsafe fn pack_b(&self, src: *const u8, cs: isize, ks: isize, cols: usize, k: usize, dst: *mut u32) {
            let panels = cols.div_ceil(Self::NR);
            // SAFETY: `Kind::pack_b` guarantees readable columns and room for the panels with heads; a `Kind`
            // is used only on a processor with its instructions, here AVX512_VNNI.
            unsafe {
                pack(!self.0.b, Mat { ptr: src, rs: cs, cs: ks }, cols, k, Self::NR, dst);
                heads(true, if self.0.a { -128 } else { 0 }, 0, panels, Self::NR, k, dst);
            }
        }
        unsafe fn tile(&self, kc: usize, a: *const u32, b: *const u32, out: &Place<i32>) {
            // SAFETY: `Kind::tile` guarantees packed panels with heads and a writable tile; a `Kind` is used
            // only on a processor with its instructions, here AVX512_VNNI.
            unsafe { tile_bytes(kc, self.0.a, a, b, out) }
        }
    }
}
