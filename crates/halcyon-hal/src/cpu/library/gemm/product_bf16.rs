//! Matrix products with bf16 factors and f32 sums, on the tile registers of AMX or with `vdpbf16ps` of
//! AVX512_BF16.
//!
//! Numerics. f32 operands are rounded to bf16 (to nearest, ties to even) while they are packed. The product
//! of two bf16 is exact in f32. Each lane adds two products per K group, each as a multiply-add that rounds
//! to nearest even, regardless of the thread's rounding mode. **Denormal bf16 factors and denormal sums count
//! as zero**: products below 2^-126 vanish. Rounding leaves f32 factors only 8 bits of significand.
//! `MatmulPrecision::Medium` allows this rounding; `Highest` and `High` do not. [`super::product_f32::gemm`]
//! widens bf16 operands to f32. With bf16 operands, the results of this file differ from its results only in
//! denormals and in the order of the sums. Nevertheless, library calls use this file only at `Medium`. Levels
//! O0 and O1 use `Highest`, so their results are free of these differences and serve for comparison.
//!
//! Results depend on the instructions, the shape and the strides, not on the number of threads. Products with
//! few rows or columns are bound by memory and run in f32 as in [`super::product_f32::gemm`]. On processors
//! with neither AMX nor AVX512_BF16 all products run in f32; `Medium` permits this, because it requires bf16
//! precision or better.
//!
//! One instruction on tile registers ([`Bf16Code::Tiles`], `tile_registers.rs`) adds 16 pairs to each of 16 x
//! 16 sums, with the same rounding and the same treatment of denormals. `vdpbf16ps` serves processors without
//! AMX. On the Intel processor that was measured, `vdpbf16ps` reaches half the FLOP/s of f32 multiply-adds,
//! and AMX reaches 15 times the FLOP/s of f32 multiply-adds. On processors of other vendors, `vdpbf16ps` is
//! assumed to reach twice the FLOP/s of f32 multiply-adds. Library calls use these
//! instructions only if [`Isa::bf16_is_faster`] holds.
//!
//! Cost of `vdpbf16ps`. One K group of the 12 x 32 tile takes 24 instructions (64 FLOPs each) on 12 + 32
//! lanes of 4 bytes: 1,536 FLOPs per 176 bytes read from cache, so the instruction's rate limits the product.
//! In addition, for a product of size n, packing reads and writes both operands (2 n^2 elements of 2 bytes
//! each way), and C is written once per 1,024 elements of K. Measured against the instruction on registers
//! (two cores of an Intel Xeon with AVX512_BF16, machine shared with other work): the best of 5 runs reached
//! 93 to 97 % of the best peak, 205 GFLOP/s, at n = 1024. At 2048, one core had medians of 93 to 95 %.
//! `examples/narrow_gemm.rs` measures products against their instruction.

#[cfg(target_arch = "x86_64")]
use super::k_groups::product;
use super::k_groups::{LaneElem, Right, batch};
use super::matrix::{Batch, Gemm, Store};
pub use super::packed_bf16::{PackedBf16, gemm_bf16_packed};
use super::product_f32::{Epilogue, Form, Mat, MatMut, PackElem, gemm};
#[cfg(target_arch = "x86_64")]
use super::tile_registers;
use crate::cpu::library::epilogue::{BoundChain, Target, round_rows};
use crate::cpu::library::simd::Storage;
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

/// Operands of [`gemm_bf16`]: bf16, or f32 that is rounded to bf16.
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

/// Result types of [`gemm_bf16`]: the f32 sums, or the sums rounded once to bf16.
pub trait Bf16Out: Copy + Send + Sync + sealed::Sealed + 'static {
    /// Calls `f` with an f32 matrix to write. Afterwards `c` holds the elements of that matrix, rounded if
    /// `Self` is bf16.
    ///
    /// # Safety
    /// The `m * n` elements of `c` are writable, do not overlap and are used by nothing else. `f` writes all
    /// `m * n` elements of its matrix. If `Self` is bf16, `f` does not read an element before it writes it.
    #[doc(hidden)]
    unsafe fn through(team: &Team, m: usize, n: usize, c: MatMut<Self>, f: &dyn Fn(MatMut<f32>));
    /// Returns `c` with its concrete type.
    #[doc(hidden)]
    fn known(c: MatMut<Self>) -> Known;
}

/// A result matrix with its element type.
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
    unsafe fn through(_: &Team, _: usize, _: usize, c: MatMut<f32>, f: &dyn Fn(MatMut<f32>)) {
        f(c);
    }
    fn known(c: MatMut<f32>) -> Known {
        Known::F32(c)
    }
}

impl Bf16Out for bf16 {
    unsafe fn through(team: &Team, m: usize, n: usize, c: MatMut<bf16>, f: &dyn Fn(MatMut<f32>)) {
        let scratch = team.scratch(m * n);
        let sums = SharedMut(scratch.ptr());
        f(MatMut::rows(sums.get(), n));
        team.ranges(m, (16 << 10) / n.max(1), &|i0, i1| {
            let c = c.offset(0);
            for i in i0..i1 {
                // SAFETY: `through` requires that `f` wrote all `m * n` sums and that C is writable; ranges
                // cover disjoint rows.
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

/// Which instructions multiply bf16.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Bf16Code {
    /// AMX tile registers ([`Isa::has_bf16_tiles`]).
    Tiles,
    /// `vdpbf16ps` ([`Isa::has_bf16`]).
    Pairs,
    /// f32 multiply-adds; factors are widened, not rounded.
    Wide,
}

impl Bf16Code {
    /// Tile registers if this process may use them, else `vdpbf16ps`, else f32.
    pub fn best(isa: Isa) -> Bf16Code {
        [Bf16Code::Tiles, Bf16Code::Pairs].into_iter().find(|c| c.runs(isa)).unwrap_or(Bf16Code::Wide)
    }

    /// Whether kernels of `isa` can use these instructions on this processor.
    pub fn runs(self, isa: Isa) -> bool {
        match self {
            Bf16Code::Tiles => isa.has_bf16_tiles(),
            Bf16Code::Pairs => isa.has_bf16(),
            Bf16Code::Wide => true,
        }
    }

    /// The name in kernel names and reports: `amx_bf16`, `avx512_bf16` or `f32`.
    pub fn name(self) -> &'static str {
        match self {
            Bf16Code::Tiles => "amx_bf16",
            Bf16Code::Pairs => "avx512_bf16",
            Bf16Code::Wide => "f32",
        }
    }

    pub(crate) fn check(self, isa: Isa) -> Bf16Code {
        assert!(self.runs(isa), "{self:?} is not available on this processor");
        self
    }
}

/// `C = act(alpha A B + beta C + bias)` with bf16 factors and f32 sums: A is m x k, B is k x n, f32 or bf16,
/// with any strides. A bf16 result is rounded once, to nearest even; for such a result, the epilogue's `beta`
/// is ignored. With [`Bf16Code::Wide`], f32 factors are not rounded. A chain of the epilogue is applied to
/// the f32 sums.
///
/// # Safety
/// The contract of [`gemm`]. If the epilogue has a chain, beta is 0, the chain's operands are bound, and C
/// has contiguous rows.
pub unsafe fn gemm_bf16<A: Bf16Elem, B: Bf16Elem, C: Bf16Out>(
    team: &Team,
    isa: Isa,
    g: &Gemm<Mat<A>, Mat<B>, MatMut<C>>,
) {
    // SAFETY: `gemm_bf16` requires readable A, B and biases and a writable C; `best` returns instructions
    // that this processor has.
    unsafe { gemm_bf16_by(Bf16Code::best(isa), team, isa, g) }
}

/// [`gemm_bf16`] with the given instructions.
///
/// # Safety
/// The contract of [`gemm`]. If the epilogue has a chain, beta is 0, the chain's operands are bound, and C
/// has contiguous rows.
///
/// # Panics
/// If the processor lacks these instructions.
pub unsafe fn gemm_bf16_by<A: Bf16Elem, B: Bf16Elem, C: Bf16Out>(
    code: Bf16Code,
    team: &Team,
    isa: Isa,
    g: &Gemm<Mat<A>, Mat<B>, MatMut<C>>,
) {
    // SAFETY: `gemm_bf16_by` requires readable A, B and biases and a writable C; `check` has verified the
    // instructions.
    unsafe { on_threads(code.check(isa), team, team.threads(), isa, g) }
}

/// [`gemm_bf16_by`] on at most `threads` threads of the team. (A product that runs in f32 may use all
/// threads.)
///
/// # Safety
/// The contract of [`gemm`]; the processor has the instructions of `code`. If the epilogue has a chain, C has
/// contiguous rows and beta is 0. (Without tile registers, a product with a chain is written to uninitialised
/// scratch memory, and the kernels would read this memory if beta were not 0.)
unsafe fn on_threads<A: Bf16Elem, B: Bf16Elem, C: Bf16Out>(
    code: Bf16Code,
    team: &Team,
    threads: usize,
    isa: Isa,
    g: &Gemm<Mat<A>, Mat<B>, MatMut<C>>,
) {
    let Gemm { m, n, k: _, a, b, c, epilogue: epi } = *g;
    if m == 0 || n == 0 {
        return;
    }
    let panels = Form::of(m, n, &a, &b) == Form::Panels;
    #[cfg(target_arch = "x86_64")]
    if code == Bf16Code::Tiles && panels {
        // SAFETY: `on_threads` requires readable A, B and biases, a writable C, and AMX if `code` is `Tiles`.
        return unsafe { on_tiles(team, threads, isa, &g.with_b(&tile_registers::Right::Plain(b))) };
    }
    if epi.chain.is_some() {
        let plain = Epilogue { chain: BoundChain::default(), ..epilogue(c, epi) };
        // SAFETY: `on_threads` requires readable A, B and biases, a writable C and a bound chain. `sums` is
        // scratch memory for the whole product. Beta is 0, so that the product does not read `sums`.
        return unsafe {
            finished(team, isa, m, n, c, epi, &|sums| {
                on_threads(code, team, threads, isa, &g.with_c(sums).with(plain));
            })
        };
    }
    if code == Bf16Code::Wide || !panels {
        let epi = epilogue(c, epi);
        // SAFETY: `on_threads` has the contract of `gemm`: A, B and the biases are readable, C is writable.
        // `sums` is C itself or scratch memory of `m * n` floats, which `gemm` writes. If `sums` is scratch
        // memory, `epilogue` has set beta to 0, so that `gemm` does not read `sums`.
        let product = |sums| unsafe { gemm(team, isa, &g.with_c(sums).with(epi)) };
        // SAFETY: `on_threads` requires a writable C, and `product` writes all `m * n` elements.
        return unsafe { C::through(team, m, n, c, &product) };
    }
    // SAFETY: `on_threads` requires readable A, B and biases, a writable C and, because `code` is `Pairs`
    // here, AVX512_BF16.
    unsafe { dots(team, threads, &g.with_b(&Right::Plain(b))) }
}

/// Computes a product with `f` into scratch memory, then runs the chain of `epi` from there to C.
///
/// # Safety
/// The chain's operands are bound. C is writable, overlaps nothing, and has contiguous rows. `f` writes all
/// `m * n` sums; `n > 0`.
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
    let only = Epilogue { chain: epi.chain, ..Epilogue::default() };
    team.ranges(m, (16 << 10) / n, &|i0, i1| {
        // SAFETY: `f` wrote the sums; C is writable by contract; ranges cover disjoint rows of both.
        unsafe { finish(isa, &only, C::known(c), (i0, i1 - i0), (0, n), sums.get().add(i0 * n), n) }
    });
}

/// Applies the epilogue to complete sums and stores them to C. `(i, rows)` and `(j, cols)` are the first row
/// and column in C and their counts; rows of `sums` are `rs` elements apart.
///
/// # Safety
/// No other thread uses these sums or this part of C. The sums are readable and writable; the part of C is
/// writable (f32: also readable unless beta is 0); operands of the epilogue are readable. A chain needs C
/// with contiguous rows.
unsafe fn finish(
    isa: Isa,
    epi: &Epilogue,
    c: Known,
    (i, rows): (usize, usize),
    (j, cols): (usize, usize),
    sums: *mut f32,
    rs: usize,
) {
    // SAFETY: by contract the sums, this part of C and the epilogue's operands are valid for rows
    // `i .. i + rows` and columns `j .. j + cols`.
    unsafe {
        if epi.store() != Store::Plain {
            for r in 0..rows {
                for l in 0..cols {
                    let before = match &c {
                        Known::F32(c) => {
                            c.ptr.offset((i + r) as isize * c.rs + (j + l) as isize * c.cs).cast_const()
                        }
                        // A bf16 result has beta 0, so C is not read.
                        Known::Bf16(_) => std::ptr::null(),
                    };
                    let s = sums.add(r * rs + l);
                    *s = epi.scalar(*s, before, i + r, j + l);
                }
            }
        }
        if epi.chain.is_some() {
            let to = match &c {
                Known::F32(c) => Target::F32(c.ptr.offset(i as isize * c.rs + j as isize), c.rs),
                Known::Bf16(c) => Target::Bf16(c.ptr.offset(i as isize * c.rs + j as isize), c.rs),
            };
            return epi.chain.run_into(isa, (i, rows), (j, cols), sums, rs, to);
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

/// Stores the sums of tile registers with [`finish`].
#[cfg(target_arch = "x86_64")]
struct Finish<C> {
    isa: Isa,
    epi: Epilogue,
    c: MatMut<C>,
}

#[cfg(target_arch = "x86_64")]
impl<C: Bf16Out> tile_registers::StoreSums for Finish<C> {
    unsafe fn store(&self, rows: (usize, usize), cols: (usize, usize), sums: *mut u8, rs: usize) {
        // SAFETY: `store` gives complete sums of rows and columns of the product that no other thread stores.
        // `on_tiles`, which makes the value, requires that C is writable there and that the epilogue's
        // operands are readable.
        unsafe { finish(self.isa, &self.epi, C::known(self.c), rows, cols, sums.cast(), rs) }
    }
}

/// The product on tile registers, on at most `threads` threads of the team.
///
/// # Safety
/// The contract of [`gemm`]; the processor has the instructions of [`Bf16Code::Tiles`].
#[cfg(target_arch = "x86_64")]
unsafe fn on_tiles<A: Bf16Elem, B: Bf16Elem, C: Bf16Out>(
    team: &Team,
    threads: usize,
    isa: Isa,
    g: &Gemm<Mat<A>, &tile_registers::Right<B>, MatMut<C>>,
) {
    let Gemm { a, b, c, .. } = *g;
    let epi = epilogue(c, g.epilogue);
    let size = g.size();
    // SAFETY: `on_tiles` requires readable A and B, a writable C and tile registers, as
    // `tile_registers::product` does.
    unsafe {
        match C::known(c) {
            Known::F32(to) if to.cs == 1 && epi.store() == Store::Plain && !epi.chain.is_some() => {
                let sums = MatMut { ptr: to.ptr.cast(), rs: to.rs, cs: 1 };
                tile_registers::product::<tile_registers::Halves, A, B>(
                    team,
                    threads,
                    size,
                    a,
                    b,
                    tile_registers::Dest::Sums(sums),
                )
            }
            _ => {
                let store = Finish { isa, epi, c };
                let near = match C::known(c) {
                    Known::F32(c) => (c.cs == 1).then(|| (c.ptr.cast(), c.rs * 4, 4)),
                    Known::Bf16(c) => (c.cs == 1).then(|| (c.ptr.cast(), c.rs * 2, 2)),
                };
                let near = near.map(|(at, rs, bytes)| tile_registers::Near { at, rs, bytes });
                let to = tile_registers::Dest::Parts(&store, near);
                tile_registers::product::<tile_registers::Halves, A, B>(team, threads, size, a, b, to)
            }
        }
    }
}

/// [`gemm_bf16`] on tile registers. B points to the right operand as packed by
/// `tile_registers::PackedShape::pack`.
///
/// # Safety
/// The contract of [`gemm`]; B is readable and was packed for `k x n`; the processor has the instructions of
/// [`Bf16Code::Tiles`].
#[cfg(target_arch = "x86_64")]
pub(crate) unsafe fn gemm_bf16_tiles<A: Bf16Elem, C: Bf16Out>(
    team: &Team,
    isa: Isa,
    g: &Gemm<Mat<A>, *const u8, MatMut<C>>,
) {
    let b = tile_registers::Right::<bf16>::Packed(SharedConst(g.b));
    // SAFETY: `gemm_bf16_tiles` requires readable A and biases, a writable C, AMX, and a B that was packed
    // for `k x n`.
    unsafe { on_tiles(team, team.threads(), isa, &g.with_b(&b)) }
}

/// The epilogue with beta 0 if the result is bf16.
pub(crate) fn epilogue<C: Bf16Out>(c: MatMut<C>, epi: Epilogue) -> Epilogue {
    match C::known(c) {
        Known::F32(_) => epi,
        Known::Bf16(_) => Epilogue { beta: 0.0, ..epi },
    }
}

/// The product with `vdpbf16ps`, on at most `threads` threads of the team.
///
/// # Safety
/// The contract of [`gemm`]; the epilogue has no chain; the processor has AVX512_BF16.
#[cfg(target_arch = "x86_64")]
pub(crate) unsafe fn dots<A: Bf16Elem, B: Bf16Elem, C: Bf16Out>(
    team: &Team,
    threads: usize,
    g: &Gemm<Mat<A>, &Right<'_, B>, MatMut<C>>,
) {
    let Gemm { m, n, k, c, .. } = *g;
    let epi = epilogue(c, g.epilogue);
    match C::known(c) {
        Known::Bf16(out) => {
            let kind = x86::Dots::<A, B>::new(epi, Some(out));
            // With one K block, each tile is rounded as soon as it is computed. With more, the partial sums
            // of all tiles are kept as f32 in scratch memory.
            let blocks = super::product_f32::k_blocks(k.div_ceil(2));
            let scratch = team.scratch(if blocks > 1 { m * n } else { 0 });
            // SAFETY: `dots` requires readable A, B and biases, a writable C and AVX512_BF16. The scratch
            // memory holds `m * n` sums if there is more than one K block; with one block it is not accessed.
            unsafe { product(team, threads, &kind, &g.with_c(MatMut::rows(scratch.ptr(), n)).plain()) }
        }
        Known::F32(c) => {
            // SAFETY: `dots` requires readable A, B and biases, a writable C and AVX512_BF16.
            unsafe { product(team, threads, &x86::Dots::<A, B>::new(epi, None), &g.with_c(c).plain()) }
        }
    }
}

/// Never called, because [`Bf16Code::Pairs`] does not run on this architecture.
///
/// # Safety
/// None; it panics.
#[cfg(not(target_arch = "x86_64"))]
pub(crate) unsafe fn dots<A: Bf16Elem, B: Bf16Elem, C: Bf16Out>(
    _: &Team,
    _: usize,
    _: &Gemm<Mat<A>, &Right<'_, B>, MatMut<C>>,
) {
    unreachable!("no processor of this architecture has `vdpbf16ps`")
}

/// Computes the products of the batch whose first product is `g`.
///
/// # Safety
/// The contract of [`gemm_bf16`] for every product; the results do not overlap. If there is a chain, the
/// results lie one below the other in one matrix.
pub unsafe fn gemm_bf16_batched<A: Bf16Elem, B: Bf16Elem, C: Bf16Out>(
    team: &Team,
    isa: Isa,
    items: Batch,
    g: &Gemm<Mat<A>, Mat<B>, MatMut<C>>,
) {
    // SAFETY: `gemm_bf16_batched` requires readable A, B and biases and a writable C for every product, and
    // that results do not overlap; `best` returns instructions that this processor has.
    unsafe { gemm_bf16_batched_by(Bf16Code::best(isa), team, isa, items, g) }
}

/// [`gemm_bf16_batched`] with the given instructions.
///
/// # Safety
/// The contract of [`gemm_bf16_batched`].
///
/// # Panics
/// If the processor lacks these instructions.
pub unsafe fn gemm_bf16_batched_by<A: Bf16Elem, B: Bf16Elem, C: Bf16Out>(
    code: Bf16Code,
    team: &Team,
    isa: Isa,
    items: Batch,
    g: &Gemm<Mat<A>, Mat<B>, MatMut<C>>,
) {
    let code = code.check(isa);
    // AMX is faster, so a product must be larger before it pays to share it among all threads.
    let scale = if code == Bf16Code::Tiles { 8 } else { 1 };
    batch(team, items.count, g.work() / scale, &|i, threads| {
        // For the chain, the results of the batch lie one below the other in one matrix.
        let down = i * (items.c.unsigned_abs() / g.n.max(1));
        let epi = Epilogue { chain: g.epilogue.chain.below(down), ..g.epilogue };
        // SAFETY: `gemm_bf16_batched_by` requires readable A, B and biases and a writable C for product
        // `i < items.count`; `check` has verified the instructions.
        unsafe { on_threads(code, team, threads, isa, &items.item(g, i).with(epi)) };
    });
}

#[cfg(target_arch = "x86_64")]
pub(crate) mod x86 {
    use super::super::k_groups::{Kind, LaneVector, PanelShape, Place, interleave, pack_vectors};
    use super::super::matrix::{Mat, MatMut};
    use super::super::panels::{Step, Tile, TileRows, register_tile};
    use super::super::product_f32::Epilogue;
    use super::super::tile_registers::Source;
    use crate::cpu::library::simd::{Avx512, mask16};
    use half::bf16;
    use std::arch::x86_64::*;
    use std::marker::PhantomData;
    use std::mem::{MaybeUninit, transmute};

    const MR: usize = 12;
    const NV: usize = 2;
    const NR: usize = NV * 16;

    /// Multiply-add of lanes that hold two bf16 each.
    struct Pairs;
    impl Step<Avx512> for Pairs {
        #[inline(always)]
        unsafe fn step(a: __m512, b: __m512, acc: __m512) -> __m512 {
            // SAFETY: `Step::step` requires a caller compiled for AVX512_BF16. The vector types have the same
            // size and representation.
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
    ///
    /// # Safety
    /// `n` elements at `p` are readable; the calling function is compiled for AVX-512 BW and VL.
    #[inline(always)]
    unsafe fn halves(p: *const bf16, n: usize) -> __m256i {
        // SAFETY: `halves` requires a caller compiled for AVX-512 BW and VL, and `n` readable elements; the
        // mask limits the load to these elements.
        unsafe { _mm256_maskz_loadu_epi16(mask16(n), p as *const i16) }
    }

    /// The first `n <= 16` elements rounded to bf16, then zeros.
    ///
    /// # Safety
    /// `n` elements at `p` are readable; the calling function is compiled for AVX512_BF16.
    #[inline(always)]
    unsafe fn rounded(p: *const f32, n: usize) -> __m256i {
        // SAFETY: `rounded` requires a caller compiled for AVX512_BF16, and `n` readable elements; the mask
        // limits the load to these elements.
        unsafe {
            let v = _mm512_maskz_loadu_ps(mask16(n), p);
            transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(v))
        }
    }

    // SAFETY (of every block below): `LaneVector` requires AVX-512 BW and VL, and `n` readable elements at
    // `p` (16 if there is no `n`). `across_part` reads `n` elements of each of `rows` rows, and `across`
    // reads 16 elements of each of 2 rows; rows are `ks` elements apart. Masked lanes are not read.
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

    // SAFETY (of every block below): `LaneVector` requires readable elements at `p` as for `bf16`; these
    // methods are reached only from `pack` and from the packing functions of `tile_registers.rs`, all of
    // which are compiled for AVX512_BF16.
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
    /// The contract of [`pack_vectors`]; the processor has AVX512_BF16.
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
        // SAFETY: by contract the elements are readable and `dst` holds the panels; this function enables
        // AVX-512.
        unsafe { pack_vectors(Mat { ptr: src, rs, cs: ks }, extent, k, PanelShape { width, head: 0 }, dst) }
    }

    /// # Safety
    /// The contract of [`register_tile`] for packed panels; the processor has AVX512_BF16.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
    unsafe fn tile(kc: usize, a: *const f32, b: *const f32, out: &Tile) {
        // SAFETY: by contract the panels cover `MR` rows, `NR` columns and `kc` K groups, and `out` is
        // writable; the function enables the instructions of `Avx512` and `Pairs`.
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

    /// Rounds `rows x cols` sums to bf16, to nearest even. `from` has contiguous rows, `rs` elements apart.
    ///
    /// # Safety
    /// `from` is readable and `to` writable for the tile; the processor has AVX512_BF16.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
    unsafe fn round(from: *const f32, rs: isize, rows: usize, cols: usize, to: MatMut<bf16>) {
        for i in 0..rows {
            for j in (0..cols).step_by(16) {
                let n = (cols - j).min(16);
                // SAFETY: the mask limits the load and the store to the `n` lanes inside the tile.
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

    /// The product with `vdpbf16ps`. Sums stay in f32, or are rounded into `out` after the last K block.
    pub(crate) struct Dots<A, B> {
        epi: Epilogue,
        out: Option<MatMut<bf16>>,
        of: PhantomData<(A, B)>,
    }

    impl<A, B> Dots<A, B> {
        pub(crate) fn new(epi: Epilogue, out: Option<MatMut<bf16>>) -> Dots<A, B> {
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
            // SAFETY: `Kind::pack_a` guarantees readable rows and room for the panels; `Dots` is used only by
            // `dots` and for packing, which require AVX512_BF16.
            unsafe { pack(src, rs, ks, rows, MR, k, dst) }
        }
        unsafe fn pack_b(&self, src: *const B, cs: isize, ks: isize, cols: usize, k: usize, dst: *mut u32) {
            // SAFETY: `Kind::pack_b` guarantees readable columns and room for the panels; `Dots` is used only
            // by `dots` and for packing, which require AVX512_BF16.
            unsafe { pack(src, cs, ks, cols, NR, k, dst) }
        }
        unsafe fn tile(&self, kc: usize, a: *const u32, b: *const u32, out: &Place<f32>) {
            let mut here = MaybeUninit::<[f32; MR * NR]>::uninit();
            let to = self.out.filter(|_| out.last);
            // If there is only one K block, the sums are rounded at once, so a tile on the stack holds them.
            let (c, rs, cs) = match to {
                Some(_) if out.first => (here.as_mut_ptr() as *mut f32, NR as isize, 1),
                _ => (out.c, out.rs, out.cs),
            };
            let epi = self.epi.for_block(out.first, out.last);
            let (rows, cols, i, j) = (out.rows, out.cols, out.i, out.j);
            let (store, ahead) = (epi.store(), std::ptr::null());
            let t = Tile { c, rs, cs, rows, cols, i, j, store, epi, ahead, convert: false };
            // SAFETY: `Kind::tile` guarantees packed panels and a writable tile of C; the local tile holds
            // `MR x NR` sums; the processor has AVX512_BF16 for the reason given in `pack_a`; `to` is C,
            // writable in the tile's rows and columns.
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
