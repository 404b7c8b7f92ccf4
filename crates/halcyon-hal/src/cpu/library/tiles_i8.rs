//! Exact products of 8-bit integers on tile registers: quads of bytes, signed or not, into i32.

use super::gemm_i8::{Byte, Quad};
use super::mat::{Mat, MatMut};
use super::tiles::{self, Bytes as Tiled, Dest, PackedShape};
use crate::cpu::team::{SharedConst, Team};

/// The elements as tile registers are loaded.
pub(super) fn quads_of<T: Byte>(m: Mat<T>) -> Mat<Quad<false>> {
    Mat { ptr: m.ptr.cast(), rs: m.rs, cs: m.cs }
}

pub(super) fn plain<T: Byte>(m: Mat<T>) -> tiles::Right<Quad<false>> {
    tiles::Right::Plain(quads_of(m))
}

/// The product on tile registers.
///
/// # Safety
/// As [`super::gemm_i8::gemm_i8`]; the process has the registers.
pub(super) unsafe fn on_tiles<A: Byte>(
    team: &Team,
    threads: usize,
    m: usize,
    n: usize,
    k: usize,
    a: Mat<A>,
    b: tiles::Right<Quad<false>>,
    b_signed: bool,
    c: MatMut<i32>,
) {
    let (a, size) = (quads_of(a), (m, n, k));
    let scatter = |(i, rows): (usize, usize), (j, cols): (usize, usize), sums: *mut u8, rs: usize| {
        let c = c.offset(0);
        for r in 0..rows {
            for l in 0..cols {
                // SAFETY: the sums are there, and C's rows and columns exist.
                unsafe {
                    let at = (i + r) as isize * c.rs + (j + l) as isize * c.cs;
                    *c.ptr.offset(at) = *sums.cast::<i32>().add(r * rs + l);
                }
            }
        }
    };
    let dest = if c.cs == 1 {
        Dest::Sums(MatMut { ptr: c.ptr.cast(), rs: c.rs, cs: 1 })
    } else {
        Dest::Parts(&scatter, None)
    };
    type Q = Quad<false>;
    // SAFETY: the caller's.
    unsafe {
        match (A::SIGNED, b_signed) {
            (true, true) => tiles::product::<Tiled<true, true>, Q, Q>(team, threads, size, a, &b, dest),
            (true, false) => tiles::product::<Tiled<true, false>, Q, Q>(team, threads, size, a, &b, dest),
            (false, true) => tiles::product::<Tiled<false, true>, Q, Q>(team, threads, size, a, &b, dest),
            (false, false) => tiles::product::<Tiled<false, false>, Q, Q>(team, threads, size, a, &b, dest),
        }
    }
}

/// [`super::gemm_i8::gemm_i8`] on tile registers with the right operand (and whether it is signed) as
/// [`pack_i8_tiles`] packs it.
///
/// # Safety
/// As [`super::gemm_i8::gemm_i8`]; the process has the registers (`Isa::has_int8_tiles`).
pub(super) unsafe fn gemm_i8_tiles<A: Byte>(
    team: &Team,
    m: usize,
    n: usize,
    k: usize,
    a: Mat<A>,
    (b, signed): (*const u8, bool),
    c: MatMut<i32>,
) {
    let b = tiles::Right::Packed(SharedConst(b));
    // SAFETY: the caller's.
    unsafe { on_tiles(team, team.threads(), m, n, k, a, b, signed, c) }
}

/// Packs a right operand for tile registers.
///
/// # Safety
/// As [`PackedShape::pack`].
pub(super) unsafe fn pack_i8_tiles<B: Byte>(
    shape: &PackedShape,
    team: Option<&Team>,
    b: Mat<B>,
    dst: *mut u8,
) {
    // SAFETY: the caller's.
    unsafe { shape.pack(team, quads_of(b), dst) }
}
