//! Matrix products with bf16 factors and f32 sums, on AVX512_BF16's `vdpbf16ps` where the processor has it.
//!
//! What the numbers are: factors are bf16 (f32 operands are rounded to nearest, ties to even, while they are packed); every
//! product of two bf16 is exact in f32; a lane adds two products per step, each as a multiply-add that rounds to nearest
//! even, whatever the thread's rounding mode. **Denormal bf16 factors count as zero, and so do
//! denormal sums**: products below 2^-126 vanish. f32 factors thus lose all but 8 bits, which `MatmulPrecision::Medium` allows and
//! `Highest` and `High` do not. For bf16 operands only the denormals and the order of the sums differ from [`super::gemm::gemm`], which
//! widens them; calls ask for this file at `Medium` alone all the same, so that levels O0 and O1 (`Highest`) stay the reference.
//!
//! Results depend on shape and strides, not on the number of threads. Products with few rows or columns are bound by memory and run as
//! [`super::gemm::gemm`] does them, in f32; so does everything where the instruction is missing ("bf16 or better").
//!
//! On the Intel processor measured the instruction does half the flops of f32 multiply-adds; other processors do twice. Calls use it
//! where [`Isa::bf16_is_faster`], a rule by vendor.
//!
//! Cost. One step of the 12 x 32 micro-tile is 24 instructions (64 flops each) on 12 + 32 lanes of 4 bytes: 1,536 flops on 176 bytes of
//! cache, so the ceiling is the instruction's rate. Around it, for a product of size n: packing reads and writes both operands (2 n^2
//! elements of 2 bytes in, as much out), and C is written once per 1,024 steps of K. `examples/narrow_gemm.rs` measures it beside the
//! instruction on registers (two cores of an Intel Xeon with AVX512_BF16, other work on the machine): the best of 5 runs had 93 to 97 % of the best peak, 205 GFLOP/s, at 1024.
//! At 2048 one core had medians of 93 to 95 %.

use super::gemm::{Epilogue, Form, Mat, MatMut, PackElem, PackShape, Packed, gemm, gemm_packed};
#[cfg(target_arch = "x86_64")]
use super::lanes::product;
use super::lanes::{LaneElem, Panels, Right, batch};
use super::simd::Storage;
use crate::cpu::sys::Isa;
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

/// `C = act(alpha A B + beta C + bias)` with bf16 factors and f32 sums: A is m x k, B is k x n, any strides, f32 or bf16. With a bf16
/// result each element is rounded once, to nearest even, and the epilogue's `beta` is ignored.
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
    unsafe { on_threads(team, team.threads(), isa, m, n, k, a, b, c, epi) }
}

unsafe fn on_threads<A: Bf16Elem, B: Bf16Elem, C: Bf16Out>(
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
    if !isa.has_bf16() || Form::of(m, n, &a, &b) != Form::Panels {
        let epi = epilogue(c, epi);
        // SAFETY: the caller's.
        C::through(team, m, n, c, &|sums| unsafe { gemm(team, isa, m, n, k, a, b, sums, epi) });
        return;
    }
    // SAFETY: the caller's, and the processor has the instruction.
    unsafe { dots(team, threads, m, n, k, a, &Right::Plain(b), c, epi) }
}

/// Without `beta` where the result is rounded.
fn epilogue<C: Bf16Out>(c: MatMut<C>, epi: Epilogue) -> Epilogue {
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
unsafe fn dots<A: Bf16Elem, B: Bf16Elem, C: Bf16Out>(
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
unsafe fn dots<A: Bf16Elem, B: Bf16Elem, C: Bf16Out>(
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
    batch(team, items, m.saturating_mul(n).saturating_mul(k), &|i, threads| {
        let i = i as isize;
        let (a, b, c) = (a.0.offset(i * a.1), b.0.offset(i * b.1), c.0.offset(i * c.1));
        // SAFETY: the caller's.
        unsafe { on_threads(team, threads, isa, m, n, k, a, b, c, epi) };
    });
}

/// A right operand packed once for many products: weights. In bf16 where the processor multiplies bf16, else widened.
#[derive(Debug)]
pub struct PackedBf16(Form16);

#[derive(Debug)]
enum Form16 {
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
    Lanes(Panels),
    Wide(Vec<f32>, PackShape, usize, usize),
}

impl PackedBf16 {
    /// Packs the right operand, `k x n`.
    ///
    /// # Safety
    /// Every element of the matrix is readable.
    pub unsafe fn b<B: Bf16Elem>(isa: Isa, b: Mat<B>, k: usize, n: usize) -> PackedBf16 {
        #[cfg(target_arch = "x86_64")]
        if isa.has_bf16() {
            let kind = x86::Dots::<B, B>::new(Epilogue::default(), None);
            // SAFETY: the caller's.
            return PackedBf16(Form16::Lanes(unsafe { Panels::new(&kind, b, k, n) }));
        }
        let shape = PackShape::b(isa, k, n);
        let mut room = vec![0f32; shape.floats()];
        // SAFETY: the caller's; the room is the shape's.
        unsafe { shape.pack_b(None, b, room.as_mut_ptr()) };
        PackedBf16(Form16::Wide(room, shape, k, n))
    }

    /// Bytes of memory it keeps.
    pub fn bytes(&self) -> usize {
        match &self.0 {
            Form16::Lanes(p) => p.bytes(),
            Form16::Wide(p, ..) => p.len() * size_of::<f32>(),
        }
    }
}

/// [`gemm_bf16`] with the right operand packed by [`PackedBf16::b`].
///
/// # Safety
/// As [`gemm`].
///
/// # Panics
/// When `b` was packed for another shape.
pub unsafe fn gemm_bf16_packed<A: Bf16Elem, C: Bf16Out>(
    team: &Team,
    m: usize,
    n: usize,
    k: usize,
    a: Mat<A>,
    b: &PackedBf16,
    c: MatMut<C>,
    epi: Epilogue,
) {
    let shape = match &b.0 {
        Form16::Lanes(p) => (p.k, p.extent),
        Form16::Wide(_, _, k, n) => (*k, *n),
    };
    assert!(shape == (k, n), "the packed operand is for another product");
    if m == 0 || n == 0 {
        return;
    }
    match &b.0 {
        // SAFETY: the caller's; it was packed where the processor has the instruction.
        Form16::Lanes(p) => unsafe {
            dots::<A, bf16, C>(team, team.threads(), m, n, k, a, &Right::Packed(p), c, epi);
        },
        Form16::Wide(p, shape, ..) => {
            let epi = epilogue(c, epi);
            // SAFETY: `PackedBf16::b` filled it; it lives as long as this call. The rest is the caller's.
            C::through(team, m, n, c, &|sums| unsafe {
                gemm_packed(team, m, n, k, a, &Packed::new(*shape, p.as_ptr()), sums, epi);
            });
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::super::gemm::Epilogue;
    use super::super::lanes::{Kind, LaneVector, Place, interleave, pack_vectors};
    use super::super::mat::{MatMut, Step, Tile, micro};
    use super::super::simd::{Avx512, mask16};
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
    pub(crate) trait Factor: LaneVector {}
    impl Factor for bf16 {}
    impl Factor for f32 {}

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
    /// As [`micro`]; the processor has AVX512_BF16.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
    unsafe fn tile(kc: usize, a: *const f32, b: *const f32, out: &Tile) {
        // SAFETY: the caller's.
        unsafe {
            if out.rows > MR * 2 / 3 {
                micro::<Avx512, Pairs, MR, MR, NV>(kc, a, b, out)
            } else if out.rows > MR / 3 {
                micro::<Avx512, Pairs, { MR * 2 / 3 }, MR, NV>(kc, a, b, out)
            } else {
                micro::<Avx512, Pairs, { MR / 3 }, MR, NV>(kc, a, b, out)
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
    pub(super) struct Dots<A, B> {
        epi: Epilogue,
        out: Option<MatMut<bf16>>,
        of: PhantomData<(A, B)>,
    }

    impl<A, B> Dots<A, B> {
        pub(super) fn new(epi: Epilogue, out: Option<MatMut<bf16>>) -> Dots<A, B> {
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
