//! Exact matrix products of 8-bit integers: `C = A B` in wrapping i32.
//!
//! AMX (`tile_registers_int8.rs`) has an instruction for every combination of signed and unsigned bytes, so
//! the bytes are packed as they are.
//!
//! With AVX512_VNNI, one `vpdpbusd` consumes a K group of four bytes per lane and multiplies unsigned by
//! signed bytes. The left operand is therefore packed as unsigned (an i8 plus 128) and the right one as
//! signed (a u8 minus 128). Sums start from the correction of this shift, which is computed per row of A and
//! per column of B during packing: `sum a b = sum a' b' - 128 s_a sum b' + 128 u_b sum a`, where a' and b'
//! are the packed bytes, s_a is 1 for signed A, and u_b is 1 for unsigned B. `vpdpbusd` sums do not saturate.
//! Processors without AVX512_VNNI widen bytes to 16 bits and multiply pairs (`product_int16.rs`), which is
//! exact as well. So the result is the same on every processor and for any number of threads. Zero points x
//! and y are left to the caller: `sum (a - x)(b - y)` needs a correction of the same form.
//!
//! Cost of `vpdpbusd`. One K group of the 12 x 32 tile takes 24 instructions of 64 multiply-adds on 12 + 32
//! lanes of 4 bytes: 3,072 operations per 176 bytes read from cache. So the limit is the rate of the
//! instruction, which is four times the rate of f32. Relative to this rate, packing and writing C (4 bytes
//! per element, written once per 2,048 elements of K) cost four times as much as for f32.
//! `examples/narrow_gemm.rs` compares products with the instruction on registers. On two cores of an Intel
//! Xeon shared with other work, the best of 5 runs reached 80 to 83 % of the best peak, 1,450 Gop/s, at n =
//! 1024. At 2048 no undisturbed run with two threads was possible; one thread reached 61 to 77 %. Two changes
//! were tried without gain: prefetching the lines of C before the sums (within noise), and keeping panels of
//! B instead of panels of A in the first-level cache (8 % slower at 1024, 3 % at 2048).

use super::k_groups::batch;
#[cfg(target_arch = "x86_64")]
use super::k_groups::{Panels, Right, product};
use super::matrix::{Batch, Epilogue, Gemm, Mat, MatMut};
#[cfg(target_arch = "x86_64")]
use super::product_int8_vectors;
use super::product_int16::{PairElem, PairShape, gemm_pairs, gemm_pairs_packed};
#[cfg(target_arch = "x86_64")]
use super::tile_registers::PackedShape;
#[cfg(target_arch = "x86_64")]
use super::tile_registers_int8::{self, gemm_i8_tiles, pack_i8_tiles};
use crate::cpu::sys::Isa;
use crate::cpu::team::{SharedMut, Team};

/// Elements of [`gemm_i8`]: i8 and u8.
#[allow(private_bounds)]
pub trait Byte: PairElem + sealed::Sealed {
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

#[cfg(target_arch = "x86_64")]
fn bytes<T: Byte>(m: Mat<T>) -> Mat<u8> {
    Mat { ptr: m.ptr as *const u8, rs: m.rs, cs: m.cs }
}

/// Which of the operands are signed.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
pub(super) struct Signs {
    pub a: bool,
    pub b: bool,
}

/// Which instructions multiply bytes. The layout of packed operands depends on it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Code {
    /// Pairs of 16-bit integers.
    Pairs,
    #[cfg(target_arch = "x86_64")]
    Vnni,
    /// Tile registers.
    #[cfg(target_arch = "x86_64")]
    Tiles,
}

impl Code {
    pub(crate) fn of(isa: Isa) -> Code {
        match isa.check() {
            #[cfg(target_arch = "x86_64")]
            _ if isa.has_int8_tiles() => Code::Tiles,
            _ => Code::vectors(isa),
        }
    }

    /// The best instructions without AMX.
    pub(crate) fn vectors(isa: Isa) -> Code {
        match isa.check() {
            #[cfg(target_arch = "x86_64")]
            _ if isa.has_vnni() => Code::Vnni,
            _ => Code::Pairs,
        }
    }
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
    unsafe { on_threads(Code::of(isa), team, (team.threads(), isa), g) }
}

/// [`gemm_i8`] with the given instructions on at most `threads` threads.
///
/// # Safety
/// The contract of [`gemm_i8`]; the processor has the instructions.
pub(crate) unsafe fn on_threads<A: Byte, B: Byte>(
    code: Code,
    team: &Team,
    (threads, isa): (usize, Isa),
    g: &Gemm<Mat<A>, Mat<B>, MatMut<i32>, ()>,
) {
    match code {
        #[cfg(target_arch = "x86_64")]
        Code::Tiles => {
            // SAFETY: `on_threads` requires readable A and B, a writable C and, for this `code`, AMX.
            unsafe {
                let b = tile_registers_int8::plain(g.b);
                tile_registers_int8::on_tiles(team, threads, &g.with_b((&b, B::SIGNED)))
            }
        }
        #[cfg(target_arch = "x86_64")]
        Code::Vnni => {
            let kind = product_int8_vectors::Vnni(Signs { a: A::SIGNED, b: B::SIGNED });
            let b = Right::Plain(bytes(g.b));
            // SAFETY: `on_threads` requires readable A and B, a writable C and the instructions of `code`.
            unsafe { product(team, threads, &kind, &g.with_a(bytes(g.a)).with_b(&b)) }
        }
        // SAFETY: `on_threads` requires readable A and B and a writable C.
        Code::Pairs => unsafe { gemm_pairs(team, threads, isa, &g.with_epilogue(Epilogue::default())) },
    }
}

/// The products of the batch whose first product is `g`.
///
/// # Safety
/// The contract of [`gemm_i8`] for every product; the results do not overlap.
pub unsafe fn gemm_i8_batched<A: Byte, B: Byte>(
    team: &Team,
    isa: Isa,
    items: Batch,
    g: &Gemm<Mat<A>, Mat<B>, MatMut<i32>, ()>,
) {
    let code = Code::of(isa);
    // AMX is faster, so a product must be larger before it pays to share it among all threads.
    let scale = if isa.has_int8_tiles() { 8 } else { 1 };
    batch(team, items.count, g.work() / scale, &|i, threads| {
        // SAFETY: `gemm_i8_batched` requires readable A and B and a writable C for product `i < items.count`;
        // `Code::of` returned instructions that this processor has.
        unsafe { on_threads(code, team, (threads, isa), &items.item(g, i)) };
    });
}

/// Like [`gemm_i8`], but the result has the type of the operands and wraps in this type.
///
/// # Safety
/// The contract of [`gemm_i8`].
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
    #[cfg(target_arch = "x86_64")]
    Vnni {
        panels: Panels,
        signed: bool,
    },
    Pairs {
        words: Vec<u32>,
        shape: PairShape,
        isa: Isa,
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
        unsafe { PackedI8::b_for(Code::of(isa), isa, b, k, n) }
    }

    /// Packs the right operand for the given instructions.
    ///
    /// # Safety
    /// The contract of [`PackedI8::b`]; the processor has the instructions.
    pub(crate) unsafe fn b_for<B: Byte>(code: Code, isa: Isa, b: Mat<B>, k: usize, n: usize) -> PackedI8 {
        match code {
            #[cfg(target_arch = "x86_64")]
            Code::Tiles => {
                let shape = PackedShape { k, n, group: 4 };
                let mut rows = vec![Row([0; 64]); shape.bytes() / 64];
                // SAFETY: `b_for` requires a readable matrix and, for this `code`, AMX; `rows` holds
                // `shape.bytes()` bytes.
                unsafe { pack_i8_tiles(&shape, None, b, rows.as_mut_ptr().cast()) };
                PackedI8(Form8::Tiles { rows, shape, signed: B::SIGNED })
            }
            #[cfg(target_arch = "x86_64")]
            Code::Vnni => {
                // B's head is always computed for a signed A; `Vnni::tile` ignores it if A is unsigned.
                let kind = product_int8_vectors::Vnni(Signs { a: true, b: B::SIGNED });
                // SAFETY: `b_for` requires a readable `k x n` matrix and the instructions of `code`.
                let panels = unsafe { Panels::new(&kind, bytes(b), k, n) };
                PackedI8(Form8::Vnni { panels, signed: B::SIGNED })
            }
            Code::Pairs => {
                let shape = PairShape::new(isa, k, n);
                let mut words = vec![0u32; shape.words()];
                // SAFETY: `b_for` requires a readable `k x n` matrix; `words` has room for the panels.
                unsafe { shape.pack(None, b, words.as_mut_ptr()) };
                PackedI8(Form8::Pairs { words, shape, isa })
            }
        }
    }

    /// Size of the packed operand in bytes.
    pub fn bytes(&self) -> usize {
        match &self.0 {
            #[cfg(target_arch = "x86_64")]
            Form8::Tiles { rows, .. } => size_of_val(&rows[..]),
            #[cfg(target_arch = "x86_64")]
            Form8::Vnni { panels, .. } => panels.bytes(),
            Form8::Pairs { words, .. } => size_of_val(&words[..]),
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
    #[cfg(target_arch = "x86_64")]
    let check =
        |k: usize, n: usize| assert!((k, n) == (g.k, g.n), "the operand was packed for another product");
    match &g.b.0 {
        #[cfg(target_arch = "x86_64")]
        Form8::Tiles { rows, signed, shape } => {
            check(shape.k, shape.n);
            // SAFETY: `gemm_i8_packed` requires a readable A and a writable C; the shape was checked; `b` was
            // packed for tile registers only because this process may use them.
            unsafe { gemm_i8_tiles(team, &g.with_b((rows.as_ptr().cast(), *signed))) }
        }
        #[cfg(target_arch = "x86_64")]
        Form8::Vnni { panels, signed } => {
            check(panels.k, panels.extent);
            let kind = product_int8_vectors::Vnni(Signs { a: A::SIGNED, b: *signed });
            let b = Right::Packed(panels);
            // SAFETY: `gemm_i8_packed` requires a readable A and a writable C; the shape was checked;
            // AVX512_VNNI was available when `b` was packed.
            unsafe { product(team, team.threads(), &kind, &g.with_a(bytes(g.a)).with_b(&b)) }
        }
        Form8::Pairs { words, shape, isa } => {
            assert!(*shape == PairShape::new(*isa, g.k, g.n), "the operand was packed for another product");
            let g = g.with_b((*shape, words.as_ptr())).with_epilogue(Epilogue::default());
            // SAFETY: `gemm_i8_packed` requires a readable A and a writable C; the shape was checked.
            unsafe { gemm_pairs_packed(team, *isa, &g) }
        }
    }
}
