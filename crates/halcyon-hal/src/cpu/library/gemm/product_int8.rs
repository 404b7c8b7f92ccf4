//! Exact matrix products of 8-bit integers: `C = A B` in wrapping i32.
//!
//! AMX (`tile_registers_int8.rs`) has an instruction for every mix of signed and unsigned bytes, so operands
//! are multiplied as they are.
//!
//! With AVX512_VNNI, one `vpdpbusd` consumes a K group of four bytes per lane and multiplies unsigned by
//! signed bytes. The left operand is therefore packed as unsigned (an i8 plus 128) and the right one as
//! signed (a u8 minus 128). Sums start from the correction of this shift, which is computed per row of A and
//! per column of B during packing: `sum a b = sum a' b' - 128 s_a sum b' + 128 u_b sum a`, where a' and b'
//! are the packed bytes, s_a is 1 for signed A, and u_b is 1 for unsigned B. `vpdpbusd` sums do not saturate.
//! AVX2 and other processors widen to 16 bits and multiply pairs (`vpmaddwd`, or plain integers), which is
//! exact as well. If the magnitudes of each pair of a signed right operand sum to at most 128 (weights of 7
//! bits), AVX2 multiplies pairs of bytes (`vpmaddubsw`), whose sums then do not saturate 16 bits. So the
//! result is the same on every processor and for any number of threads. Zero points x and y are left to the
//! caller: `sum (a - x)(b - y)` needs a correction of the same form.
//!
//! Cost. One K group of the 12 x 32 tile takes 24 instructions of 64 multiply-adds on 12 + 32 lanes of 4
//! bytes: 3,072 operations per 176 bytes read from cache, so the instruction's rate, four times that of f32,
//! is the limit. Relative to this rate, packing and writing C (4 bytes per element, written once per 2,048
//! elements of K) cost four times as much as for f32. `examples/narrow_gemm.rs` compares products with the
//! instruction on registers. On two cores of an Intel Xeon shared with other work, the best of 5 runs reached
//! 80 to 83 % of the best peak, 1,450 Gop/s, at n = 1024. At 2048 no undisturbed run with two threads was
//! possible; one thread reached 61 to 77 %. Two changes were tried without gain: prefetching the lines of C
//! before the sums (within noise), and keeping panels of B instead of panels of A in the first-level cache (8
//! % slower at 1024, 3 % at 2048).

use super::k_groups::{Kind, LaneElem, PanelShape, Panels, Place, Right, batch, pack_lanes, product};
use super::matrix::{Batch, Gemm, Mat, MatMut};
#[cfg(target_arch = "x86_64")]
use super::product_int8_vectors;
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
pub(super) trait Ints: Copy {
    type V: Copy;
    /// Number of lanes.
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
/// with one row of starting values. The starting values of B are used only with `b_head`.
///
/// # Safety
/// `a` is a packed panel of `MR` rows and `b` one of `NV W` columns, with `kc` K groups each plus the head.
/// `out.rows <= R`, `out.cols <= NV W`, and the tile of `out` is writable (and readable unless `out.first`).
/// The calling function is compiled for the instructions of `S`.
#[inline(always)]
pub(super) unsafe fn micro<S: Ints, const R: usize, const MR: usize, const NV: usize>(
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

#[cfg(target_arch = "x86_64")]
pub(super) use tile_of_rows;

/// Which of the operands are signed.
#[derive(Clone, Copy)]
pub(super) struct Signs {
    pub a: bool,
    pub b: bool,
}

/// Packs bytes as 16-bit integers, in panels of `width` lines.
///
/// # Safety
/// As [`pack_lanes`]: the `n` lines of `k` bytes are readable and `dst` is writable for the panels.
pub(super) unsafe fn pack_wide(
    signed: bool,
    lines: Mat<u8>,
    n: usize,
    k: usize,
    width: usize,
    dst: *mut u32,
) {
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

/// Which instructions multiply bytes. The layout of packed operands depends on it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Code {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX2, for a signed right operand whose products do not saturate 16 bits.
    #[cfg(target_arch = "x86_64")]
    Avx2Small,
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

/// Fewest rows for which examining the right operand costs little.
const MANY: usize = 8;

impl Code {
    /// The best instructions for this right operand, among those that run wherever `self` does.
    ///
    /// # Safety
    /// The `k x n` elements of `b` are readable.
    unsafe fn for_right<B: Byte>(self, b: Mat<u8>, k: usize, n: usize) -> Code {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `for_right` requires a readable `b`.
        if self == Code::Avx2 && B::SIGNED && unsafe { product_int8_vectors::is_small(b, k, n) } {
            return Code::Avx2Small;
        }
        let _ = (b, k, n);
        self
    }
}

/// Runs `$e` with `$k` as the [`Kind`] of product for `$code`.
macro_rules! with_kind {
    ($code:expr, $signs:expr, $k:ident => $e:expr) => {
        match $code {
            #[cfg(target_arch = "x86_64")]
            Code::Vnni => {
                let $k = product_int8_vectors::Vnni($signs);
                $e
            }
            #[cfg(target_arch = "x86_64")]
            Code::Avx2 => {
                let $k = product_int8_vectors::Avx2($signs);
                $e
            }
            #[cfg(target_arch = "x86_64")]
            Code::Avx2Small => {
                let $k = product_int8_vectors::Avx2Small($signs.a);
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
    // SAFETY: `gemm_i8` requires readable A and B and a writable C; `Code::of` returns instructions that
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
        // SAFETY: `on_threads` requires readable A and B, a writable C and, for this `code`, AMX.
        return unsafe {
            let b = tile_registers_int8::plain(g.b);
            tile_registers_int8::on_tiles(team, threads, &g.with_b((&b, B::SIGNED)))
        };
    }
    // SAFETY: `on_threads` requires a readable B.
    let code = if g.m >= MANY { unsafe { code.for_right::<B>(bytes(g.b), g.k, g.n) } } else { code };
    let b = Right::Plain(bytes(g.b));
    with_kind!(code, Signs { a: A::SIGNED, b: B::SIGNED }, kind => {
        // SAFETY: `on_threads` requires readable A and B, a writable C and the instructions of `code`.
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
    // AMX is faster, so a product must be larger before it pays to share it among all threads.
    let scale = if code == Code::Tiles { 8 } else { 1 };
    batch(team, items.count, g.work() / scale, &|i, threads| {
        // SAFETY: `gemm_i8_batched` requires readable A and B and a writable C for product `i < items.count`;
        // `Code::of` returned instructions that this processor has.
        unsafe { on_threads(code, team, threads, &items.item(g, i)) };
    });
}

/// Like [`gemm_i8`], but the result has the type of the operands and wraps in this type.
///
/// # Safety
/// As [`gemm_i8`].
pub unsafe fn gemm_i8_wrapped<T: Byte>(team: &Team, isa: Isa, g: &Gemm<Mat<T>, Mat<T>, MatMut<T>, ()>) {
    let (m, n, _) = g.size();
    let scratch = team.scratch(m * n);
    let sums = SharedMut(scratch.ptr() as *mut i32);
    let out = MatMut { ptr: g.c.ptr as *mut u8, rs: g.c.rs, cs: g.c.cs };
    // SAFETY: `gemm_i8_wrapped` requires readable A and B; the scratch memory holds `m * n` i32 sums.
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
        // SAFETY: `PackedI8::b` requires a readable `k x n` matrix; `Code::of` returns instructions that this
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
            // SAFETY: `b_for` requires a readable matrix and, for this `code`, AMX; `rows` holds
            // `shape.bytes()` bytes.
            unsafe { pack_i8_tiles(&shape, None, b, rows.as_mut_ptr().cast()) };
            return PackedI8(Form8::Tiles { rows, shape, signed: B::SIGNED });
        }
        let b = bytes(b);
        // SAFETY: `b_for` requires a readable `k x n` matrix.
        let code = unsafe { code.for_right::<B>(b, k, n) };
        // B's head is always computed for a signed A; `Vnni::tile` ignores it if A is unsigned.
        with_kind!(code, Signs { a: true, b: B::SIGNED }, kind => {
            // SAFETY: `b_for` requires a readable `k x n` matrix and the instructions of `code`.
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
        // SAFETY: `gemm_i8_packed` requires a readable A and a writable C; the shape was checked; `b` was
        // packed for tile registers only because this process may use them.
        Form8::Tiles { rows, signed, .. } => unsafe {
            gemm_i8_tiles(team, &g.with_b((rows.as_ptr().cast(), *signed)));
        },
        Form8::Lanes { panels, code, signed } => {
            with_kind!(*code, Signs { a: A::SIGNED, b: *signed }, kind => {
                // SAFETY: `gemm_i8_packed` requires a readable A and a writable C; the shape was checked;
                // `code` was available when `b` was packed.
                unsafe { product(team, team.threads(), &kind, &g.with_a(bytes(g.a)).with_b(&Right::Packed(panels))) }
            });
        }
    }
}
