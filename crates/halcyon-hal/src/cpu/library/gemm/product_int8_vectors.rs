//! Products of 8-bit integers with AVX512_VNNI (`vpdpbusd`).

use super::k_groups::{Kind, LaneElem, LaneVector, PanelShape, Place, pack_vectors};
use super::matrix::Mat;
use super::product_int8::Signs;
use super::tile_registers::Source;
use crate::cpu::library::simd::mask16;
use std::arch::x86_64::*;

/// The vectors of a product. A lane of a vector of sums is an i32; a lane of a vector of factors is a K
/// group.
///
/// The methods must be called from code compiled for the implementation's instruction set.
trait Ints: Copy {
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
/// `a` is a packed panel of `MR` rows, and `b` is a packed panel of `NV W` columns. Both have `kc` K groups,
/// after a head row if `head`. `out.rows <= R`, `out.cols <= NV W`, and the tile of `out` is writable (and
/// readable unless `out.first`). The calling function is compiled for the instructions of `S`.
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

/// [`micro`] with a third, two thirds or all of the panel's rows: the smallest of these numbers that covers
/// `out.rows`.
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
/// The contract of [`micro`] for panels of 12 rows and of 32 columns, both with heads; the processor has
/// AVX512_VNNI.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn tile_bytes(kc: usize, b_head: bool, a: *const u32, b: *const u32, out: &Place<i32>) {
    // SAFETY: the macro only calls `micro`; `tile_bytes` has the contract of `micro` and enables AVX512_VNNI.
    unsafe { tile_of_rows!(Bytes, 12, 2, kc, true, b_head, a, b, out) }
}

/// A byte; a K group has four. With FLIP, packing inverts the top bit of the byte. This adds 128 to an i8 and
/// gives a u8, or it subtracts 128 from a u8 and gives an i8.
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

// SAFETY (of every block below): `LaneVector` requires AVX-512 BW and VL, and that the elements at `p` are
// readable. `along` reads `n` elements. `across` reads 16 elements of each of 4 rows, and `across_part` reads
// `n` elements of each of `rows` rows; rows are `ks` apart. Masked elements are not read.
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

/// Returns a vector whose lane j has byte j of each of the four rows. First the 4 x 4 matrix of 32-bit words
/// is transposed across the register, then the 4 x 4 matrix of bytes within each 128 bits.
///
/// # Safety
/// The calling function is compiled for AVX-512 F and BW.
#[inline(always)]
unsafe fn quads(r0: __m128i, r1: __m128i, r2: __m128i, r3: __m128i) -> __m512i {
    // SAFETY: `quads` requires that AVX-512 F and BW are enabled, and accesses only registers.
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
/// The contract of [`pack_vectors`]; the processor has AVX-512 BW and VL and AVX512_VNNI.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn pack(flip: bool, lines: Mat<u8>, n: usize, k: usize, width: usize, dst: *mut u32) {
    let panel = PanelShape { width, head: 1 };
    // SAFETY: `pack` requires readable lines and room for the panels at `dst`, as `pack_vectors` does; this
    // function enables AVX-512 BW and VL; `Quad` is a transparent wrapper of u8.
    unsafe {
        if flip {
            pack_vectors(lines.cast::<Quad<true>>(), n, k, panel, dst)
        } else {
            pack_vectors(lines.cast::<Quad<false>>(), n, k, panel, dst)
        }
    }
}

/// Writes the heads of packed panels. The head of a line is `scale * (sum of the line's bytes + less * k)`;
/// `signed` says how to read the bytes.
///
/// # Safety
/// `dst` holds `panels` packed panels with room for heads, of `width` lines of `k` bytes each, and is
/// writable; the processor has AVX512_VNNI.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn heads(signed: bool, scale: i32, less: i32, panels: usize, width: usize, k: usize, dst: *mut u32) {
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
