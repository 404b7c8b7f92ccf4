//! Matrix products with bf16 factors and f32 sums: on the tile registers of AMX, or AVX512_BF16's
//! `vdpbf16ps`, where the processor has them.
//!
//! What the numbers are: factors are bf16 (f32 operands are rounded to nearest, ties to even, while they are
//! packed); every product of two bf16 is exact in f32; a lane adds two products per step, each as a
//! multiply-add that rounds to nearest even, whatever the thread's rounding mode. **Denormal bf16 factors
//! count as zero, and so do denormal sums**: products below 2^-126 vanish. f32 factors thus lose all but 8
//! bits, which `MatmulPrecision::Medium` allows and `Highest` and `High` do not. For bf16 operands only the
//! denormals and the order of the sums differ from [`super::gemm::gemm`], which widens them; calls ask for
//! this file at `Medium` alone all the same, so that levels O0 and O1 (`Highest`) stay the reference.
//!
//! Results depend on shape and strides, not on the number of threads. Products with few rows or columns are
//! bound by memory and run as [`super::gemm::gemm`] does them, in f32; so does everything where both are
//! missing ("bf16 or better").
//!
//! On tile registers ([`Bf16Code::Tiles`], `tiles.rs`) a product adds 16 pairs to each of 16 x 16 sums, with
//! the same rounding and the same treatment of denormals. `vdpbf16ps` is for processors without them. On the
//! Intel processor measured that instruction does half the flops of f32 multiply-adds and tiles do 15 times
//! as many; other processors do twice. Calls use bf16 where [`Isa::bf16_is_faster`].
//!
//! Cost of `vdpbf16ps`. One step of the 12 x 32 micro-tile is 24 instructions (64 flops each) on 12 + 32
//! lanes of 4 bytes: 1,536 flops on 176 bytes of cache, so the ceiling is the instruction's rate. Around it,
//! for a product of size n: packing reads and writes both operands (2 n^2 elements of 2 bytes in, as much
//! out), and C is written once per 1,024 steps of K. Measured beside the instruction on registers (two cores
//! of an Intel Xeon with AVX512_BF16, other work on the machine): the best of 5 runs had 93 to 97 % of the
//! best peak, 205 GFLOP/s, at 1024. At 2048 one core had medians of 93 to 95 %. `examples/narrow_gemm.rs`
//! measures products beside their instruction.

use super::gemm::{Epilogue, Form, Mat, MatMut, PackElem, gemm};
#[cfg(target_arch = "x86_64")]
use super::lanes::product;
use super::lanes::{LaneElem, Right, batch};
use super::mat::Store;
pub use super::packed_bf16::{PackedBf16, gemm_bf16_packed};
use super::post::{PostRun, Target, round_rows};
use super::simd::Storage;
#[cfg(target_arch = "x86_64")]
use super::tiles;
use crate::cpu::sys::Isa;
#[cfg(target_arch = "x86_64")]
use crate::cpu::team::SharedConst;
use crate::cpu::team::{SharedMut, Team};
use half::bf16;

impl LaneElem for bf16 {
    const GROUP: usize = 2;
    #[inline(always)]
    fn bits(self) -> u32 {
        self.to_bits().into()
    }
}

impl LaneElem for f32 {
    const GROUP: usize = 2;
    #[inline(always)]
    fn bits(self) -> u32 {
        bf16::from_f32(self).to_bits().into()
    }
}

/// Operands of [`gemm_bf16`]: bf16, or f32 that are rounded to it.
#[allow(private_bounds)]
pub trait Bf16Elem: PackElem + Factor {}
impl Bf16Elem for bf16 {}
impl Bf16Elem for f32 {}

#[cfg(target_arch = "x86_64")]
pub(crate) use x86::Factor;
#[cfg(not(target_arch = "x86_64"))]
pub(crate) trait Factor: LaneElem {}
#[cfg(not(target_arch = "x86_64"))]
impl<T: LaneElem> Factor for T {}

/// Results of [`gemm_bf16`]: f32 as summed, or rounded once to bf16.
pub trait Bf16Out: Copy + Send + Sync + sealed::Sealed + 'static {
    /// Gives `f` a matrix of f32 to write, whose elements are then those of `c`.
    #[doc(hidden)]
    fn through(team: &Team, m: usize, n: usize, c: MatMut<Self>, f: &dyn Fn(MatMut<f32>));
    /// `c`, the type known.
    #[doc(hidden)]
    fn known(c: MatMut<Self>) -> Known;
}

/// A result's type.
#[doc(hidden)]
#[derive(Debug)]
pub enum Known {
    F32(MatMut<f32>),
    Bf16(MatMut<bf16>),
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for half::bf16 {}
}

impl Bf16Out for f32 {
    fn through(_: &Team, _: usize, _: usize, c: MatMut<f32>, f: &dyn Fn(MatMut<f32>)) {
        f(c);
    }
    fn known(c: MatMut<f32>) -> Known {
        Known::F32(c)
    }
}

impl Bf16Out for bf16 {
    fn through(team: &Team, m: usize, n: usize, c: MatMut<bf16>, f: &dyn Fn(MatMut<f32>)) {
        let scratch = team.scratch(m * n);
        let sums = SharedMut(scratch.ptr());
        f(MatMut::rows(sums.get(), n));
        team.ranges(m, (16 << 10) / n.max(1), &|i0, i1| {
            let c = c.offset(0);
            for i in i0..i1 {
                // SAFETY: `f` wrote the sums; rows of different ranges are disjoint and inside C.
                unsafe {
                    let row = std::slice::from_raw_parts(sums.get().add(i * n), n);
                    let to = c.ptr.offset(i as isize * c.rs);
                    if c.cs == 1 {
                        bf16::narrow_slice(row, std::slice::from_raw_parts_mut(to, n));
                    } else {
                        for (j, v) in row.iter().enumerate() {
                            *to.offset(j as isize * c.cs) = bf16::from_f32(*v);
                        }
                    }
                }
            }
        });
    }
    fn known(c: MatMut<bf16>) -> Known {
        Known::Bf16(c)
    }
}

/// What multiplies bf16.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Bf16Code {
    /// Tile registers ([`Isa::has_bf16_tiles`]).
    Tiles,
    /// `vdpbf16ps` ([`Isa::has_bf16`]).
    Pairs,
    /// f32, exact.
    Wide,
}

impl Bf16Code {
    /// Tile registers where this process has them, else pairs in vectors, else f32.
    pub fn best(isa: Isa) -> Bf16Code {
        [Bf16Code::Tiles, Bf16Code::Pairs].into_iter().find(|c| c.runs(isa)).unwrap_or(Bf16Code::Wide)
    }

    /// Whether this processor has it beside `isa`.
    pub fn runs(self, isa: Isa) -> bool {
        match self {
            Bf16Code::Tiles => isa.has_bf16_tiles(),
            Bf16Code::Pairs => isa.has_bf16(),
            Bf16Code::Wide => true,
        }
    }

    /// `amx_bf16`, `avx512_bf16`, `f32`.
    pub fn name(self) -> &'static str {
        match self {
            Bf16Code::Tiles => "amx_bf16",
            Bf16Code::Pairs => "avx512_bf16",
            Bf16Code::Wide => "f32",
        }
    }

    pub(super) fn check(self, isa: Isa) -> Bf16Code {
        assert!(self.runs(isa), "{self:?} is not available on this processor");
        self
    }
}

/// `C = act(alpha A B + beta C + bias)` with bf16 factors and f32 sums: A is m x k, B is k x n, any strides,
/// f32 or bf16. With a bf16 result each element is rounded once, to nearest even, and the epilogue's `beta`
/// is ignored.
///
/// # Safety
/// As [`gemm`].
pub unsafe fn gemm_bf16<A: Bf16Elem, B: Bf16Elem, C: Bf16Out>(
    team: &Team,
    isa: Isa,
    m: usize,
    n: usize,
    k: usize,
    a: Mat<A>,
    b: Mat<B>,
    c: MatMut<C>,
    epi: Epilogue,
) {
    // SAFETY: the caller's.
    unsafe { gemm_bf16_by(Bf16Code::best(isa), team, isa, m, n, k, a, b, c, epi) }
}

/// [`gemm_bf16`] by this code.
///
/// # Safety
/// As [`gemm`].
///
/// # Panics
/// Where the processor lacks it.
pub unsafe fn gemm_bf16_by<A: Bf16Elem, B: Bf16Elem, C: Bf16Out>(
    code: Bf16Code,
    team: &Team,
    isa: Isa,
    m: usize,
    n: usize,
    k: usize,
    a: Mat<A>,
    b: Mat<B>,
    c: MatMut<C>,
    epi: Epilogue,
) {
    // SAFETY: the caller's.
    unsafe { on_threads(code.check(isa), team, team.threads(), isa, m, n, k, a, b, c, epi) }
}

unsafe fn on_threads<A: Bf16Elem, B: Bf16Elem, C: Bf16Out>(
    code: Bf16Code,
    team: &Team,
    threads: usize,
    isa: Isa,
    m: usize,
    n: usize,
    k: usize,
    a: Mat<A>,
    b: Mat<B>,
    c: MatMut<C>,
    epi: Epilogue,
) {
    if m == 0 || n == 0 {
        return;
    }
    let panels = Form::of(m, n, &a, &b) == Form::Panels;
    #[cfg(target_arch = "x86_64")]
    if code == Bf16Code::Tiles && panels {
        // SAFETY: the caller's, and the process has the registers.
        return unsafe { on_tiles(team, threads, isa, m, n, k, a, &tiles::Right::Plain(b), c, epi) };
    }
    if epi.post.is_some() {
        let plain = Epilogue { post: PostRun::default(), ..epilogue(c, epi) };
        // SAFETY: the caller's.
        return unsafe {
            finished(team, isa, m, n, c, epi, &|sums| {
                on_threads(code, team, threads, isa, m, n, k, a, b, sums, plain);
            })
        };
    }
    if code == Bf16Code::Wide || !panels {
        let epi = epilogue(c, epi);
        // SAFETY: the caller's.
        C::through(team, m, n, c, &|sums| unsafe { gemm(team, isa, m, n, k, a, b, sums, epi) });
        return;
    }
    // SAFETY: the caller's, and the processor has the instruction.
    unsafe { dots(team, threads, m, n, k, a, &Right::Plain(b), c, epi) }
}

/// A product made by `f` in scratch memory, then the chain of `epi` from there to C.
///
/// # Safety
/// The chain's operands are bound; C is writable, with contiguous rows.
unsafe fn finished<C: Bf16Out>(
    team: &Team,
    isa: Isa,
    m: usize,
    n: usize,
    c: MatMut<C>,
    epi: Epilogue,
    f: &dyn Fn(MatMut<f32>),
) {
    let scratch = team.scratch(m * n);
    let sums = SharedMut(scratch.ptr());
    f(MatMut::rows(sums.get(), n));
    let only = Epilogue { post: epi.post, ..Epilogue::default() };
    team.ranges(m, (16 << 10) / n, &|i0, i1| {
        // SAFETY: `f` wrote the sums; rows of different ranges are disjoint and inside C.
        unsafe { finish(isa, &only, C::known(c), (i0, i1 - i0), (0, n), sums.get().add(i0 * n), n) }
    });
}

/// Complete sums of some rows and columns (first, count), `rs` from row to row, through the epilogue to C.
///
/// # Safety
/// The sums are the calling thread's, C's part is too; operands of the epilogue are readable.
unsafe fn finish(
    isa: Isa,
    epi: &Epilogue,
    c: Known,
    (i, rows): (usize, usize),
    (j, cols): (usize, usize),
    sums: *mut f32,
    rs: usize,
) {
    // SAFETY: the caller's.
    unsafe {
        if epi.store() != Store::Plain {
            for r in 0..rows {
                for l in 0..cols {
                    let before = match &c {
                        Known::F32(c) => {
                            c.ptr.offset((i + r) as isize * c.rs + (j + l) as isize * c.cs).cast_const()
                        }
                        // Its `beta` is 0.
                        Known::Bf16(_) => std::ptr::null(),
                    };
                    let s = sums.add(r * rs + l);
                    *s = epi.scalar(*s, before, i + r, j + l);
                }
            }
        }
        if epi.post.is_some() {
            let to = match &c {
                Known::F32(c) => Target::F32(c.ptr.offset(i as isize * c.rs + j as isize), c.rs),
                Known::Bf16(c) => Target::Bf16(c.ptr.offset(i as isize * c.rs + j as isize), c.rs),
            };
            return epi.post.run_into(isa, (i, rows), (j, cols), sums, rs, to);
        }
        if let Known::Bf16(c) = &c
            && c.cs == 1
        {
            let to = c.ptr.offset(i as isize * c.rs + j as isize);
            return round_rows(isa, rows, cols, (sums, rs as isize), (to, c.rs));
        }
        for r in 0..rows {
            let from = sums.add(r * rs);
            match &c {
                Known::F32(c) if c.cs == 1 => {
                    let to = c.ptr.offset((i + r) as isize * c.rs + j as isize);
                    std::ptr::copy_nonoverlapping(from, to, cols);
                }
                Known::F32(c) => {
                    for l in 0..cols {
                        *c.ptr.offset((i + r) as isize * c.rs + (j + l) as isize * c.cs) = *from.add(l);
                    }
                }
                Known::Bf16(c) => {
                    for l in 0..cols {
                        *c.ptr.offset((i + r) as isize * c.rs + (j + l) as isize * c.cs) =
                            bf16::from_f32(*from.add(l));
                    }
                }
            }
        }
    }
}

/// The product on tile registers.
///
/// # Safety
/// As [`gemm`]; [`Bf16Code::Tiles`] runs here.
#[cfg(target_arch = "x86_64")]
unsafe fn on_tiles<A: Bf16Elem, B: Bf16Elem, C: Bf16Out>(
    team: &Team,
    threads: usize,
    isa: Isa,
    m: usize,
    n: usize,
    k: usize,
    a: Mat<A>,
    b: &tiles::Right<B>,
    c: MatMut<C>,
    epi: Epilogue,
) {
    let epi = epilogue(c, epi);
    let size = (m, n, k);
    // SAFETY: the caller's.
    unsafe {
        match C::known(c) {
            Known::F32(to) if to.cs == 1 && epi.store() == Store::Plain && !epi.post.is_some() => {
                let sums = MatMut { ptr: to.ptr.cast(), rs: to.rs, cs: 1 };
                tiles::product::<tiles::Halves, A, B>(team, threads, size, a, b, tiles::Dest::Sums(sums))
            }
            _ => {
                let f = |rows: (usize, usize), cols: (usize, usize), sums: *mut u8, rs: usize| {
                    finish(isa, &epi, C::known(c), rows, cols, sums.cast(), rs);
                };
                let near = match C::known(c) {
                    Known::F32(c) => (c.cs == 1).then(|| (c.ptr.cast(), c.rs * 4, 4)),
                    Known::Bf16(c) => (c.cs == 1).then(|| (c.ptr.cast(), c.rs * 2, 2)),
                };
                let near = near.map(|(at, rs, bytes)| tiles::Near { at, rs, bytes });
                let to = tiles::Dest::Parts(&f, near);
                tiles::product::<tiles::Halves, A, B>(team, threads, size, a, b, to)
            }
        }
    }
}

/// [`gemm_bf16`] on tile registers with the right operand packed as [`bf16_pack_tiles`] does.
///
/// # Safety
/// As [`gemm`]; [`Bf16Code::Tiles`] runs here.
#[cfg(target_arch = "x86_64")]
pub(super) unsafe fn gemm_bf16_tiles<A: Bf16Elem, C: Bf16Out>(
    team: &Team,
    isa: Isa,
    m: usize,
    n: usize,
    k: usize,
    a: Mat<A>,
    b: *const u8,
    c: MatMut<C>,
    epi: Epilogue,
) {
    let b = tiles::Right::<bf16>::Packed(SharedConst(b));
    // SAFETY: the caller's.
    unsafe { on_tiles(team, team.threads(), isa, m, n, k, a, &b, c, epi) }
}

/// Without `beta` where the result is rounded.
pub(super) fn epilogue<C: Bf16Out>(c: MatMut<C>, epi: Epilogue) -> Epilogue {
    match C::known(c) {
        Known::F32(_) => epi,
        Known::Bf16(_) => Epilogue { beta: 0.0, ..epi },
    }
}

/// The product on the instruction.
///
/// # Safety
/// As [`gemm`]; the processor has AVX512_BF16.
#[cfg(target_arch = "x86_64")]
pub(super) unsafe fn dots<A: Bf16Elem, B: Bf16Elem, C: Bf16Out>(
    team: &Team,
    threads: usize,
    m: usize,
    n: usize,
    k: usize,
    a: Mat<A>,
    b: &Right<'_, B>,
    c: MatMut<C>,
    epi: Epilogue,
) {
    let epi = epilogue(c, epi);
    match C::known(c) {
        Known::Bf16(out) => {
            let kind = x86::Dots::<A, B>::new(epi, Some(out));
            // One block of K is rounded from registers; the sums of more wait in f32.
            let blocks = super::gemm::k_blocks(k.div_ceil(2));
            let scratch = team.scratch(if blocks > 1 { m * n } else { 0 });
            // SAFETY: the caller's; the scratch holds the sums where there are some.
            unsafe { product(team, threads, &kind, m, n, k, a, b, MatMut::rows(scratch.ptr(), n)) }
        }
        Known::F32(c) => {
            // SAFETY: the caller's.
            unsafe { product(team, threads, &x86::Dots::<A, B>::new(epi, None), m, n, k, a, b, c) }
        }
    }
}

#[cfg(not(target_arch = "x86_64"))]
pub(super) unsafe fn dots<A: Bf16Elem, B: Bf16Elem, C: Bf16Out>(
    _: &Team,
    _: usize,
    _: usize,
    _: usize,
    _: usize,
    _: Mat<A>,
    _: &Right<'_, B>,
    _: MatMut<C>,
    _: Epilogue,
) {
    unreachable!("no processor of this architecture has `vdpbf16ps`")
}

/// `items` products whose operands lie `stride` elements apart (0 repeats an operand).
///
/// # Safety
/// As [`gemm`], for every product; the results do not overlap.
pub unsafe fn gemm_bf16_batched<A: Bf16Elem, B: Bf16Elem, C: Bf16Out>(
    team: &Team,
    isa: Isa,
    items: usize,
    m: usize,
    n: usize,
    k: usize,
    a: (Mat<A>, isize),
    b: (Mat<B>, isize),
    c: (MatMut<C>, isize),
    epi: Epilogue,
) {
    // SAFETY: the caller's.
    unsafe { gemm_bf16_batched_by(Bf16Code::best(isa), team, isa, items, m, n, k, a, b, c, epi) }
}

/// [`gemm_bf16_batched`] by this code.
///
/// # Safety
/// As [`gemm_bf16_batched`].
///
/// # Panics
/// Where the processor lacks it.
pub unsafe fn gemm_bf16_batched_by<A: Bf16Elem, B: Bf16Elem, C: Bf16Out>(
    code: Bf16Code,
    team: &Team,
    isa: Isa,
    items: usize,
    m: usize,
    n: usize,
    k: usize,
    a: (Mat<A>, isize),
    b: (Mat<B>, isize),
    c: (MatMut<C>, isize),
    epi: Epilogue,
) {
    let code = code.check(isa);
    // Tiles are done sooner: products worth all threads are larger.
    let scale = if code == Bf16Code::Tiles { 8 } else { 1 };
    batch(team, items, m.saturating_mul(n).saturating_mul(k) / scale, &|i, threads| {
        // A chain sees the products below each other.
        let down = i * (c.1.unsigned_abs() / n.max(1));
        let i = i as isize;
        let (a, b, c) = (a.0.offset(i * a.1), b.0.offset(i * b.1), c.0.offset(i * c.1));
        let epi = Epilogue { post: epi.post.below(down), ..epi };
        // SAFETY: the caller's.
        unsafe { on_threads(code, team, threads, isa, m, n, k, a, b, c, epi) };
    });
}

#[cfg(target_arch = "x86_64")]
pub(super) mod x86 {
    use super::super::gemm::Epilogue;
    use super::super::lanes::{Kind, LaneVector, Place, interleave, pack_vectors};
    use super::super::mat::{MatMut, Step, Tile, TileRows, register_tile};
    use super::super::simd::{Avx512, mask16};
    use super::super::tiles::Source;
    use half::bf16;
    use std::arch::x86_64::*;
    use std::marker::PhantomData;
    use std::mem::{MaybeUninit, transmute};

    const MR: usize = 12;
    const NV: usize = 2;
    const NR: usize = NV * 16;

    /// Two bf16 in each lane.
    struct Pairs;
    impl Step<Avx512> for Pairs {
        #[inline(always)]
        unsafe fn step(a: __m512, b: __m512, acc: __m512) -> __m512 {
            // SAFETY: AVX512_BF16 by the caller's condition; the types differ in name only.
            unsafe {
                _mm512_dpbf16_ps(acc, transmute::<__m512, __m512bh>(a), transmute::<__m512, __m512bh>(b))
            }
        }
    }

    /// Elements that are packed as bf16.
    pub(crate) trait Factor: Source {}
    impl Factor for bf16 {}
    impl Factor for f32 {}
    impl Source for bf16 {
        const RAW: bool = true;
    }
    impl Source for f32 {
        const RAW: bool = false;
    }

    /// The first `n <= 16` elements, then zeros.
    #[inline(always)]
    unsafe fn halves(p: *const bf16, n: usize) -> __m256i {
        // SAFETY: AVX-512 BW and VL by the caller's condition, n elements by its promise.
        unsafe { _mm256_maskz_loadu_epi16(mask16(n), p as *const i16) }
    }

    /// The first `n <= 16` elements rounded, then zeros.
    #[inline(always)]
    unsafe fn rounded(p: *const f32, n: usize) -> __m256i {
        // SAFETY: AVX512_BF16 by the caller's condition, n elements by its promise.
        unsafe {
            let v = _mm512_maskz_loadu_ps(mask16(n), p);
            transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(v))
        }
    }

    // SAFETY (of the blocks below): the trait's condition on the instruction set, and the caller's pointers.
    #[allow(clippy::undocumented_unsafe_blocks)]
    impl LaneVector for bf16 {
        #[inline(always)]
        unsafe fn along(p: *const bf16, n: usize) -> __m512i {
            unsafe { _mm512_maskz_loadu_epi16(((1u64 << n) - 1) as u32, p as *const i16) }
        }
        #[inline(always)]
        unsafe fn across(p: *const bf16, ks: isize) -> __m512i {
            unsafe {
                let lo = _mm256_loadu_si256(p as *const __m256i);
                interleave(lo, _mm256_loadu_si256(p.offset(ks) as *const __m256i))
            }
        }
        #[inline(always)]
        unsafe fn across_part(p: *const bf16, ks: isize, rows: usize, n: usize) -> __m512i {
            unsafe {
                let hi = if rows > 1 { halves(p.offset(ks), n) } else { _mm256_setzero_si256() };
                interleave(halves(p, n), hi)
            }
        }
    }

    // SAFETY (of the blocks below): as above, with AVX512_BF16.
    #[allow(clippy::undocumented_unsafe_blocks)]
    impl LaneVector for f32 {
        #[inline(always)]
        unsafe fn along(p: *const f32, n: usize) -> __m512i {
            unsafe {
                let lo = _mm512_maskz_loadu_ps(mask16(n.min(16)), p);
                let hi = _mm512_maskz_loadu_ps(mask16(n.saturating_sub(16)), p.wrapping_add(16));
                transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(hi, lo))
            }
        }
        #[inline(always)]
        unsafe fn across(p: *const f32, ks: isize) -> __m512i {
            unsafe { interleave(rounded(p, 16), rounded(p.offset(ks), 16)) }
        }
        #[inline(always)]
        unsafe fn across_part(p: *const f32, ks: isize, rows: usize, n: usize) -> __m512i {
            unsafe {
                let hi = if rows > 1 { rounded(p.offset(ks), n) } else { _mm256_setzero_si256() };
                interleave(rounded(p, n), hi)
            }
        }
    }

    /// # Safety
    /// As [`pack_vectors`]; the processor has AVX512_BF16.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
    unsafe fn pack<T: Factor>(
        src: *const T,
        rs: isize,
        ks: isize,
        extent: usize,
        width: usize,
        k: usize,
        dst: *mut u32,
    ) {
        // SAFETY: the caller's.
        unsafe { pack_vectors(src, rs, ks, extent, width, k, 0, dst) }
    }

    /// # Safety
    /// As [`register_tile`], of packed panels; the processor has AVX512_BF16.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
    unsafe fn tile(kc: usize, a: *const f32, b: *const f32, out: &Tile) {
        // SAFETY: the caller's.
        unsafe {
            let a = TileRows { ptr: a, rs: 1, ks: MR };
            if out.rows > MR * 2 / 3 {
                register_tile::<Avx512, Pairs, MR, NV>(kc, a, b, out)
            } else if out.rows > MR / 3 {
                register_tile::<Avx512, Pairs, { MR * 2 / 3 }, NV>(kc, a, b, out)
            } else {
                register_tile::<Avx512, Pairs, { MR / 3 }, NV>(kc, a, b, out)
            }
        }
    }

    /// Rounds `rows x cols` sums to nearest even; `from` has contiguous rows.
    ///
    /// # Safety
    /// Both cover the tile; the processor has AVX512_BF16.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
    unsafe fn round(from: *const f32, rs: isize, rows: usize, cols: usize, to: MatMut<bf16>) {
        for i in 0..rows {
            for j in (0..cols).step_by(16) {
                let n = (cols - j).min(16);
                // SAFETY: lanes below n are inside the tile.
                unsafe {
                    let v = _mm512_maskz_loadu_ps(mask16(n), from.offset(i as isize * rs).add(j));
                    let h = transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(v));
                    let p = to.ptr.offset(i as isize * to.rs + j as isize * to.cs);
                    if to.cs == 1 {
                        _mm256_mask_storeu_epi16(p as *mut i16, mask16(n), h);
                    } else {
                        let h = transmute::<__m256i, [bf16; 16]>(h);
                        for (l, v) in h.iter().enumerate().take(n) {
                            *p.offset(l as isize * to.cs) = *v;
                        }
                    }
                }
            }
        }
    }

    /// The product on the instruction, its sums left in f32 or rounded to `out` after the last block of K.
    pub(in super::super) struct Dots<A, B> {
        epi: Epilogue,
        out: Option<MatMut<bf16>>,
        of: PhantomData<(A, B)>,
    }

    impl<A, B> Dots<A, B> {
        pub(in super::super) fn new(epi: Epilogue, out: Option<MatMut<bf16>>) -> Dots<A, B> {
            Dots { epi, out, of: PhantomData }
        }
    }

    impl<A: Factor, B: Factor> Kind for Dots<A, B> {
        type A = A;
        type B = B;
        type C = f32;
        const GROUP: usize = 2;
        const HEAD: usize = 0;
        const MR: usize = MR;
        const NR: usize = NR;

        unsafe fn pack_a(&self, src: *const A, rs: isize, ks: isize, rows: usize, k: usize, dst: *mut u32) {
            // SAFETY: the caller's; whoever makes this kind has looked for the instruction.
            unsafe { pack(src, rs, ks, rows, MR, k, dst) }
        }
        unsafe fn pack_b(&self, src: *const B, cs: isize, ks: isize, cols: usize, k: usize, dst: *mut u32) {
            // SAFETY: as above.
            unsafe { pack(src, cs, ks, cols, NR, k, dst) }
        }
        unsafe fn tile(&self, kc: usize, a: *const u32, b: *const u32, out: &Place<f32>) {
            let mut here = MaybeUninit::<[f32; MR * NR]>::uninit();
            let to = self.out.filter(|_| out.last);
            // What is rounded at once needs no place in memory.
            let (c, rs, cs) = match to {
                Some(_) if out.first => (here.as_mut_ptr() as *mut f32, NR as isize, 1),
                _ => (out.c, out.rs, out.cs),
            };
            let epi = self.epi.for_block(out.first, out.last);
            let (rows, cols, i, j) = (out.rows, out.cols, out.i, out.j);
            let t = Tile { c, rs, cs, rows, cols, i, j, store: epi.store(), epi, ahead: std::ptr::null() };
            // SAFETY: the caller's; the local tile holds every row and column.
            unsafe {
                tile(kc, a as *const f32, b as *const f32, &t);
                if let Some(to) = to {
                    let at = i as isize * to.rs + j as isize * to.cs;
                    round(c, rs, rows, cols, to.offset(at));
                }
            }
        }
    }
}
