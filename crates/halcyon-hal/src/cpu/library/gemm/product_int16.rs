//! Exact matrix products of 16-bit and 8-bit integers, `C = A B` in wrapping i32, with the instructions that
//! multiply pairs of 16-bit integers: `vpmaddwd` and an addition (AVX2), or `vpdpwssd` (AVX512_VNNI).
//! Processors without them use plain integer arithmetic.
//!
//! Two consecutive elements of K are a pair of 32 bits. A matrix of pairs lies in memory like a matrix of f32
//! with half as many columns, so a product of pairs runs on the loops of f32 products ([`super::panels`])
//! with another multiply-add. Bytes are widened to 16 bits first, which is exact. Odd K gets a zero at its
//! end.
//!
//! Cost. A step multiplies two elements of K; a step of an f32 product multiplies one element. Both steps
//! read the same number of bytes, so a product of pairs can reach at most twice the rate of f32. Rows of A
//! are read in place if they are contiguous 16-bit integers, all pairs are aligned and K is even.

use super::matrix::{Gemm, Mat, MatMut};
use super::panels::{Block, Left, Step, block_of, gemm_blocks};
use super::product_f32::{KC, PackShape, Packed, Panels, pack};
#[cfg(target_arch = "x86_64")]
use crate::cpu::library::simd::{Avx2, Avx512};
use crate::cpu::library::simd::{Portable, Simd};
use crate::cpu::sys::Isa;
use crate::cpu::team::{SharedMut, Team};

/// Elements of [`gemm_pairs`]: i8, u8 and i16.
pub(crate) trait PairElem: Copy + Send + Sync + 'static {
    const IS_I16: bool = false;
    /// The element as the bits of a 16-bit integer.
    fn word(self) -> u16;
}
impl PairElem for i8 {
    #[inline(always)]
    fn word(self) -> u16 {
        i16::from(self) as u16
    }
}
impl PairElem for u8 {
    #[inline(always)]
    fn word(self) -> u16 {
        self.into()
    }
}
impl PairElem for i16 {
    const IS_I16: bool = true;
    #[inline(always)]
    fn word(self) -> u16 {
        self as u16
    }
}

/// Adds the products of pairs of 16-bit integers to i32 sums.
struct Dot;

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{Avx2, Avx512, Dot, Step};
    use std::arch::x86_64::*;

    // SAFETY (of every block below): `Step` requires a caller that is compiled for AVX2; no memory is
    // accessed.
    #[allow(clippy::undocumented_unsafe_blocks)]
    impl Step<Avx2> for Dot {
        const INTEGERS: bool = true;
        #[inline(always)]
        unsafe fn step(a: __m256, b: __m256, acc: __m256) -> __m256 {
            unsafe { dot_pairs(a, b, acc) }
        }
        #[inline(always)]
        unsafe fn add(a: __m256, b: __m256) -> __m256 {
            unsafe { sums(_mm256_add_epi32(ints(a), ints(b))) }
        }
        #[inline(always)]
        unsafe fn float(v: __m256) -> __m256 {
            unsafe { _mm256_cvtepi32_ps(ints(v)) }
        }
    }

    /// `acc` plus the products of pairs. This is assembly, because otherwise the compiler would reorder the
    /// additions of several steps. The reordered code needs more registers than there are, so the compiler
    /// would keep the sums in memory.
    ///
    /// # Safety
    /// The processor has AVX2.
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn dot_pairs(a: __m256, b: __m256, acc: __m256) -> __m256 {
        let mut sum = acc;
        // SAFETY: the instructions are those of AVX2, which this function enables, and change only the named
        // registers.
        unsafe {
            std::arch::asm!(
                "vpmaddwd {both}, {a}, {b}",
                "vpaddd {sum}, {sum}, {both}",
                both = out(ymm_reg) _,
                a = in(ymm_reg) a,
                b = in(ymm_reg) b,
                sum = inout(ymm_reg) sum,
                options(pure, nomem, nostack, preserves_flags)
            );
        }
        sum
    }

    /// # Safety
    /// The caller is compiled for AVX2.
    #[inline(always)]
    unsafe fn ints(v: __m256) -> __m256i {
        // SAFETY: `ints` requires AVX2; no memory is accessed.
        unsafe { _mm256_castps_si256(v) }
    }

    /// # Safety
    /// The caller is compiled for AVX2.
    #[inline(always)]
    unsafe fn sums(v: __m256i) -> __m256 {
        // SAFETY: `sums` requires AVX2; no memory is accessed.
        unsafe { _mm256_castsi256_ps(v) }
    }

    /// Like [`Dot`], with AVX512_VNNI.
    pub(super) struct DotVnni;

    // SAFETY (of every block below): `Step` requires a caller that is compiled for AVX-512 F and for
    // AVX512_VNNI, which `DotVnni` names; no memory is accessed.
    #[allow(clippy::undocumented_unsafe_blocks)]
    impl Step<Avx512> for DotVnni {
        const INTEGERS: bool = true;
        #[inline(always)]
        unsafe fn step(a: __m512, b: __m512, acc: __m512) -> __m512 {
            unsafe {
                let (a, b) = (_mm512_castps_si512(a), _mm512_castps_si512(b));
                _mm512_castsi512_ps(_mm512_dpwssd_epi32(_mm512_castps_si512(acc), a, b))
            }
        }
        #[inline(always)]
        unsafe fn add(a: __m512, b: __m512) -> __m512 {
            unsafe { _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a), _mm512_castps_si512(b))) }
        }
        #[inline(always)]
        unsafe fn float(v: __m512) -> __m512 {
            unsafe { _mm512_cvtepi32_ps(_mm512_castps_si512(v)) }
        }
    }
}

/// Adds the two products of one lane to its sum.
#[inline(always)]
fn dot(a: f32, b: f32, acc: f32) -> f32 {
    let (a, b) = (a.to_bits() as i32, b.to_bits() as i32);
    let low = i32::from(a as i16) * i32::from(b as i16);
    let high = (a >> 16).wrapping_mul(b >> 16);
    f32::from_bits((acc.to_bits() as i32).wrapping_add(low).wrapping_add(high) as u32)
}

impl Step<Portable> for Dot {
    const INTEGERS: bool = true;
    #[inline(always)]
    unsafe fn step(a: [f32; 4], b: [f32; 4], acc: [f32; 4]) -> [f32; 4] {
        std::array::from_fn(|i| dot(a[i], b[i], acc[i]))
    }
    #[inline(always)]
    unsafe fn add(a: [f32; 4], b: [f32; 4]) -> [f32; 4] {
        std::array::from_fn(|i| f32::from_bits(a[i].to_bits().wrapping_add(b[i].to_bits())))
    }
    #[inline(always)]
    unsafe fn float(v: [f32; 4]) -> [f32; 4] {
        v.map(|x| x.to_bits() as i32 as f32)
    }
}

/// The instruction set for products of pairs: `isa`, except that AVX2 replaces AVX-512 without VNNI.
pub(crate) fn isa_of_pairs(isa: Isa) -> Isa {
    match isa.check() {
        Isa::Avx512 if !isa.has_vnni() => Isa::Avx2,
        isa => isa,
    }
}

/// Computes a block. `isa` comes from [`isa_of_pairs`].
///
/// # Safety
/// The contract of [`block_of`] without its condition on the caller, because this function checks the
/// instruction set. The epilogue has no scale, no bias and no ReLU.
unsafe fn block(isa: Isa, w: &Block<'_, Packed>) {
    /// # Safety
    /// The contract of [`block_of`], on a processor with AVX512_VNNI.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
    unsafe fn vnni(w: &Block<'_, Packed>) {
        // SAFETY: `vnni` has the contract of `block_of`, and this function enables AVX512_VNNI.
        unsafe { block_of::<Avx512, x86::DotVnni, Packed>(w) }
    }
    /// # Safety
    /// The contract of [`block_of`], on a processor with AVX2, FMA and F16C.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn avx2(w: &Block<'_, Packed>) {
        // SAFETY: `avx2` has the contract of `block_of`, and this function enables AVX2.
        unsafe { block_of::<Avx2, Dot, Packed>(w) }
    }
    // SAFETY: `check` verified the instruction set, and `isa_of_pairs` returns AVX-512 only with VNNI.
    // `block` has the rest of the contract of `block_of`.
    unsafe {
        match isa.check() {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => vnni(w),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => avx2(w),
            _ => block_of::<Portable, Dot, Packed>(w),
        }
    }
}

/// A right operand `k x n` whose elements are packed as pairs.
struct Pairs<T> {
    b: Mat<T>,
    k: usize,
}

/// The pair of two elements; the first has the low bits.
#[inline(always)]
fn pair(low: u16, high: u16) -> u32 {
    u32::from(low) | u32::from(high) << 16
}

impl<T: PairElem> Pairs<T> {
    /// The same memory as a matrix of 32-bit pairs, under the conditions of [`words`] on the columns.
    fn as_words(&self) -> Option<Mat<f32>> {
        words(self.b.t(), self.k).map(Mat::t)
    }
}

/// A matrix of 16-bit integers with contiguous rows of `k` elements, as a matrix of 32-bit pairs. `None` for
/// other matrices, or if a pair is not aligned or not complete.
fn words<T: PairElem>(m: Mat<T>, k: usize) -> Option<Mat<f32>> {
    let aligned = m.ptr.cast::<f32>().is_aligned() && m.rs % 2 == 0;
    let fits = T::IS_I16 && m.cs == 1 && k.is_multiple_of(2) && aligned;
    fits.then(|| Mat { ptr: m.ptr.cast(), rs: m.rs / 2, cs: 1 })
}

impl<T: PairElem> Panels for Pairs<T> {
    #[inline(always)]
    unsafe fn pack<S: Simd>(&self, k0: usize, kc: usize, j: usize, cols: usize, nr: usize, dst: *mut f32) {
        let Mat { ptr, rs, cs } = self.b;
        let first = ptr.wrapping_offset(2 * k0 as isize * rs + j as isize * cs);
        // The number of elements; the last pair may have only one.
        let elements = (self.k - 2 * k0).min(2 * kc);
        // SAFETY: `Panels::pack` requires that columns `j .. j + cols` are readable in the pairs
        // `k0 .. k0 + kc`, which hold `elements` elements of K, and that `dst` has room for `nr * kc` words.
        // `kc <= KC`, so a line of `lines` has room for `kc` pairs.
        unsafe {
            if let Some(m) = self.as_words() {
                let p = m.ptr.offset(k0 as isize * m.rs + j as isize * m.cs);
                return pack::<S, f32>(p, m.cs, m.rs, cols, nr, kc, dst);
            }
            let dst = dst.cast::<u32>();
            if rs == 1 {
                // Columns are contiguous: widen some of them, and transpose the pairs.
                let mut lines = [[0u32; KC]; LINES];
                for c in (0..nr).step_by(LINES) {
                    for (l, line) in lines.iter_mut().enumerate() {
                        let n = if c + l < cols { elements } else { 0 };
                        let from = first.wrapping_offset((c + l) as isize * cs);
                        widen_line(std::slice::from_raw_parts(from, n), &mut line[..kc]);
                    }
                    let lines = lines.as_ptr().cast::<f32>();
                    for l in (0..LINES.min(nr - c)).step_by(S::W) {
                        let to = dst.add(c + l).cast::<f32>();
                        S::transpose(lines.add(l * KC), KC as isize, S::W.min(nr - c - l), kc, to, nr);
                    }
                }
                return;
            }
            for q in 0..kc {
                let (low, two) = (first.offset(2 * q as isize * rs), 2 * q + 1 < elements);
                let high = if two { low.offset(rs) } else { low };
                let to = dst.add(q * nr);
                let mask = if two { 0xffff } else { 0 };
                if cs == 1 {
                    for c in 0..cols {
                        *to.add(c) = pair((*low.add(c)).word(), (*high.add(c)).word() & mask);
                    }
                } else {
                    for c in 0..cols {
                        let at = c as isize * cs;
                        *to.add(c) = pair((*low.offset(at)).word(), (*high.offset(at)).word() & mask);
                    }
                }
                (cols..nr).for_each(|c| *to.add(c) = 0);
            }
        }
    }
}

/// Columns that are widened at a time: a multiple of every vector's lanes.
const LINES: usize = 16;

/// Widens the elements of `from` into pairs. `to` has room for all of them; the rest of `to` becomes zero.
#[inline(always)]
fn widen_line<T: PairElem>(from: &[T], to: &mut [u32]) {
    let (pairs, rest) = from.as_chunks::<2>();
    let (whole, left) = to.split_at_mut(pairs.len());
    for (w, p) in whole.iter_mut().zip(pairs) {
        *w = pair(p[0].word(), p[1].word());
    }
    left.fill(0);
    if let (Some(w), Some(x)) = (left.first_mut(), rest.first()) {
        *w = x.word().into();
    }
}

/// `C = A B` in wrapping i32, on 1 or all threads of the team. If the epilogue has a chain, the sums are
/// converted to f32 and the chain runs over them, so that C holds f32.
///
/// # Safety
/// Every element of A and B is readable and every element of C writable; C has contiguous rows if there is a
/// chain; C overlaps nothing else, and its elements do not overlap each other. The operands of the chain are
/// bound. The epilogue has nothing besides a chain.
pub(crate) unsafe fn gemm_pairs<A: PairElem, B: PairElem>(
    team: &Team,
    threads: usize,
    isa: Isa,
    g: &Gemm<Mat<A>, Mat<B>, MatMut<i32>>,
) {
    if g.m == 0 || g.n == 0 {
        return;
    }
    // B is packed first, and not part by part, so that one kernel serves every source of B.
    let shape = PairShape::new(isa, g.k, g.n);
    let scratch = team.scratch(shape.words());
    // SAFETY: `gemm_pairs` requires a readable B; the scratch memory has room for its panels. The rest is the
    // contract of `on_panels`.
    unsafe {
        shape.pack((threads > 1).then_some(team), g.b, scratch.ptr().cast());
        on_panels(team, threads, isa, &g.with_b((shape, scratch.ptr().cast_const().cast())));
    }
}

/// [`gemm_pairs`] with a right operand that [`PairShape::pack`] packed.
///
/// # Safety
/// The contract of [`gemm_pairs`]; `g.b` holds the shape of the product's right operand and the panels of
/// this operand.
unsafe fn on_panels<A: PairElem>(
    team: &Team,
    threads: usize,
    isa: Isa,
    g: &Gemm<Mat<A>, (PairShape, *const u32), MatMut<i32>>,
) {
    if g.m == 0 || g.n == 0 {
        return;
    }
    let pairs = g.k.div_ceil(2);
    // SAFETY: `on_panels` requires panels of this shape.
    let b = unsafe { Packed::new(g.b.0.shape, g.b.1.cast()) };
    let run = |a: Mat<f32>| {
        let c = MatMut { ptr: g.c.ptr.cast::<f32>(), rs: g.c.rs, cs: g.c.cs };
        let a = Left::Plain(a);
        let g = Gemm::new((g.m, g.n, pairs), &a, &b, c).with(g.epilogue);
        // SAFETY: `on_panels` requires a readable B, a writable C and a bound chain; `run` is called with a
        // readable A of `pairs` columns.
        unsafe { gemm_blocks(team, threads, isa_of_pairs(isa), block, &g) }
    };
    if let Some(a) = words(g.a, g.k) {
        return run(a);
    }
    let scratch = team.scratch(g.m * pairs);
    let to = SharedMut(scratch.ptr().cast::<u32>());
    // SAFETY: `on_panels` requires a readable A; the scratch memory has `m * pairs` words.
    unsafe { widen_rows(team, threads, g.a, (g.m, g.k), to) };
    run(Mat::rows(scratch.ptr().cast_const(), pairs));
}

/// Widens a matrix of `(m, k)` elements to rows of pairs without gaps.
///
/// # Safety
/// The elements are readable; `to` has room for `m * k.div_ceil(2)` words and overlaps nothing.
unsafe fn widen_rows<T: PairElem>(
    team: &Team,
    threads: usize,
    a: Mat<T>,
    (m, k): (usize, usize),
    to: SharedMut<u32>,
) {
    let pairs = k.div_ceil(2);
    let rows = |i0: usize, i1: usize| {
        for i in i0..i1 {
            let a = a.offset(i as isize * a.rs);
            // SAFETY: row `i` is readable and `to` has room for it; ranges are disjoint.
            unsafe {
                let to = to.get().add(i * pairs);
                // Initialise the memory, because a reference to the words requires it.
                std::ptr::write_bytes(to, 0, pairs);
                let to = std::slice::from_raw_parts_mut(to, pairs);
                if a.cs == 1 {
                    widen_line(std::slice::from_raw_parts(a.ptr, k), to);
                    continue;
                }
                let at = |q: usize| (*a.ptr.offset(q as isize * a.cs)).word();
                for (q, w) in to.iter_mut().enumerate() {
                    *w = pair(at(2 * q), if 2 * q + 1 < k { at(2 * q + 1) } else { 0 });
                }
            }
        }
    };
    match threads {
        1 => rows(0, m),
        _ => team.ranges(m, (16 << 10) / k.max(1), &rows),
    }
}

/// The layout of a right operand `k x n` packed as pairs for many products.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PairShape {
    shape: PackShape,
    k: usize,
}

impl PairShape {
    pub(crate) fn new(isa: Isa, k: usize, n: usize) -> PairShape {
        PairShape { shape: PackShape::b(isa_of_pairs(isa), k.div_ceil(2), n), k }
    }

    /// Size of the packed operand in words of 4 bytes.
    pub(crate) fn words(&self) -> usize {
        self.shape.floats()
    }

    /// # Safety
    /// The `k x n` elements of `b` are readable; `to` has room for [`PairShape::words`] and overlaps nothing.
    pub(crate) unsafe fn pack<T: PairElem>(&self, team: Option<&Team>, b: Mat<T>, to: *mut u32) {
        // SAFETY: `pack` has the contract of `pack_panels`.
        unsafe { self.shape.pack_panels(team, &Pairs { b, k: self.k }, to.cast()) }
    }
}

/// [`gemm_pairs`] on all threads, with a right operand that [`PairShape::pack`] packed.
///
/// # Safety
/// The contract of [`gemm_pairs`]; `g.b` holds the shape of the product's right operand and the panels of
/// this operand.
pub(crate) unsafe fn gemm_pairs_packed<A: PairElem>(
    team: &Team,
    isa: Isa,
    g: &Gemm<Mat<A>, (PairShape, *const u32), MatMut<i32>>,
) {
    // SAFETY: `gemm_pairs_packed` has the contract of `on_panels`.
    unsafe { on_panels(team, team.threads(), isa, g) }
}
