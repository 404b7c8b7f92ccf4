//! Exact products of 8-bit integers on tile registers: K groups of four bytes, signed or not, into i32.

use super::matrix::{Gemm, Mat, MatMut};
use super::product_int8::Byte;
use super::product_int8_vectors::Quad;
use super::tile_registers::{self, Bytes as Tiled, Dest, PackedShape, StoreSums};
use crate::cpu::team::{SharedConst, Team};

/// The operand as plain bytes, the elements that tile registers are loaded with.
pub(crate) fn quads_of<T: Byte>(m: Mat<T>) -> Mat<Quad<false>> {
    m.cast()
}

pub(crate) fn plain<T: Byte>(m: Mat<T>) -> tile_registers::Right<Quad<false>> {
    tile_registers::Right::Plain(quads_of(m))
}

/// Stores sums to a matrix whose rows are not contiguous.
struct StridedStore {
    c: MatMut<i32>,
}

impl StoreSums for StridedStore {
    unsafe fn store(&self, (i, rows): (usize, usize), (j, cols): (usize, usize), sums: *mut u8, rs: usize) {
        let c = self.c;
        for r in 0..rows {
            for l in 0..cols {
                // SAFETY: `store` gives `rows` rows of `cols` sums. These rows and columns lie in the
                // product, so their places lie in C. `on_tiles` requires that C is writable; no other thread
                // stores this part.
                unsafe {
                    let at = (i + r) as isize * c.rs + (j + l) as isize * c.cs;
                    *c.ptr.offset(at) = *sums.cast::<i32>().add(r * rs + l);
                }
            }
        }
    }
}

/// Computes the product on tile registers. `g.b` holds the right operand, and whether it is signed.
///
/// # Safety
/// The contract of [`super::product_int8::gemm_i8`]; a packed B has the shape `k x n`; `threads` is 1 or at
/// least the team's number of threads; the process may use tile registers with AMX-INT8.
pub(crate) unsafe fn on_tiles<A: Byte>(
    team: &Team,
    threads: usize,
    g: &Gemm<Mat<A>, (&tile_registers::Right<Quad<false>>, bool), MatMut<i32>, ()>,
) {
    let (a, size, (b, b_signed), c) = (quads_of(g.a), g.size(), g.b, g.c);
    let scatter = StridedStore { c };
    let dest = if c.cs == 1 {
        Dest::Sums(MatMut { ptr: c.ptr.cast(), rs: c.rs, cs: 1 })
    } else {
        Dest::Parts(&scatter, None)
    };
    type Q = Quad<false>;
    // SAFETY: `on_tiles` has the contract of `product`, and the code matches the operands' signs.
    unsafe {
        match (A::SIGNED, b_signed) {
            (true, true) => {
                tile_registers::product::<Tiled<true, true>, Q, Q>(team, threads, size, a, b, dest)
            }
            (true, false) => {
                tile_registers::product::<Tiled<true, false>, Q, Q>(team, threads, size, a, b, dest)
            }
            (false, true) => {
                tile_registers::product::<Tiled<false, true>, Q, Q>(team, threads, size, a, b, dest)
            }
            (false, false) => {
                tile_registers::product::<Tiled<false, false>, Q, Q>(team, threads, size, a, b, dest)
            }
        }
    }
}

/// [`super::product_int8::gemm_i8`] on tile registers. `g.b` holds the right operand, which [`pack_i8_tiles`]
/// packed, and whether it is signed.
///
/// # Safety
/// The contract of [`super::product_int8::gemm_i8`] for A and C; B was packed for `k x n`;
/// `Isa::has_int8_tiles` holds.
pub(crate) unsafe fn gemm_i8_tiles<A: Byte>(
    team: &Team,
    g: &Gemm<Mat<A>, (*const u8, bool), MatMut<i32>, ()>,
) {
    let (b, signed) = g.b;
    let b = tile_registers::Right::Packed(SharedConst(b));
    // SAFETY: `gemm_i8_tiles` has the contract of `on_tiles`, on all threads of the team.
    unsafe { on_tiles(team, team.threads(), &g.with_b((&b, signed))) }
}

/// Packs a right operand for tile registers.
///
/// # Safety
/// The contract of [`PackedShape::pack`].
pub(crate) unsafe fn pack_i8_tiles<B: Byte>(
    shape: &PackedShape,
    team: Option<&Team>,
    b: Mat<B>,
    dst: *mut u8,
) {
    // SAFETY: `pack_i8_tiles` has the contract of `pack`.
    unsafe { shape.pack(team, quads_of(b), dst) }
}
