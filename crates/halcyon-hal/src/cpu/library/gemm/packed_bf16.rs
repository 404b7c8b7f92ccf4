//! Right operands of [`super::product_bf16`] that are packed once and used for many products.

use super::k_groups::{Panels, Right};
use super::product_bf16::{Bf16Code, Bf16Elem, Bf16Out, dots, epilogue};
#[cfg(target_arch = "x86_64")]
use super::product_bf16::{gemm_bf16_tiles, x86};
use super::product_f32::{Gemm, Mat, MatMut, PackShape, Packed, gemm_packed};
#[cfg(target_arch = "x86_64")]
use super::tile_registers;
use crate::cpu::sys::Isa;
use crate::cpu::team::Team;
use half::bf16;

/// A packed right operand, such as weights. Its elements are stored as bf16 for [`Bf16Code::Tiles`] and
/// [`Bf16Code::Pairs`], and as f32 for [`Bf16Code::Wide`].
#[derive(Debug)]
pub struct PackedBf16(Form16);

/// A row of a tile register: 64 bytes, aligned to 64 bytes.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
struct Row([u8; 64]);

#[derive(Debug)]
enum Form16 {
    #[cfg(target_arch = "x86_64")]
    Tiles(Vec<Row>, tile_registers::PackedShape, Isa),
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
    Lanes(Panels),
    Wide(Vec<f32>, PackShape, usize, usize),
}

impl PackedBf16 {
    /// Packs the right operand, a `k x n` matrix.
    ///
    /// # Safety
    /// All `k x n` elements of the matrix are readable.
    pub unsafe fn b<B: Bf16Elem>(isa: Isa, b: Mat<B>, k: usize, n: usize) -> PackedBf16 {
        // SAFETY: by contract all elements of the matrix are readable, as `b_for` requires.
        unsafe { PackedBf16::b_for(Bf16Code::best(isa), isa, b, k, n) }
    }

    /// Packs the right operand for the given instructions.
    ///
    /// # Safety
    /// All `k x n` elements of the matrix are readable.
    ///
    /// # Panics
    /// If the processor does not support `code`.
    pub unsafe fn b_for<B: Bf16Elem>(code: Bf16Code, isa: Isa, b: Mat<B>, k: usize, n: usize) -> PackedBf16 {
        #[cfg_attr(not(target_arch = "x86_64"), allow(unused_variables))]
        let code = code.check(isa);
        #[cfg(target_arch = "x86_64")]
        if code == Bf16Code::Tiles {
            let shape = tile_registers::PackedShape { k, n, group: 2 };
            let mut room = vec![Row([0; 64]); shape.bytes() / 64];
            // SAFETY: `b_for` requires a readable matrix; `room` has `shape.bytes()` bytes; `check` found
            // tile registers.
            unsafe { shape.pack(None, b, room.as_mut_ptr().cast()) };
            return PackedBf16(Form16::Tiles(room, shape, isa));
        }
        #[cfg(target_arch = "x86_64")]
        if code == Bf16Code::Pairs {
            let kind = x86::Dots::<B, B>::new(Default::default(), None);
            // SAFETY: `b_for` requires a readable matrix; `check` found AVX512_BF16.
            return PackedBf16(Form16::Lanes(unsafe { Panels::new(&kind, b, k, n) }));
        }
        let shape = PackShape::b(isa, k, n);
        let mut room = vec![0f32; shape.floats()];
        // SAFETY: `b_for` requires a readable matrix; `room` has `shape.floats()` floats.
        unsafe { shape.pack_b(None, b, room.as_mut_ptr()) };
        PackedBf16(Form16::Wide(room, shape, k, n))
    }

    /// Number of bytes that the packed operand occupies.
    pub fn bytes(&self) -> usize {
        match &self.0 {
            #[cfg(target_arch = "x86_64")]
            Form16::Tiles(p, ..) => size_of_val(&p[..]),
            Form16::Lanes(p) => p.bytes(),
            Form16::Wide(p, ..) => p.len() * size_of::<f32>(),
        }
    }
}

/// [`super::product_bf16::gemm_bf16`] with a right operand packed by [`PackedBf16::b`].
///
/// # Safety
/// The contract of [`super::product_f32::gemm`] for A, C and the epilogue. The epilogue has no chain.
///
/// # Panics
/// If `b` was packed for another shape.
pub unsafe fn gemm_bf16_packed<A: Bf16Elem, C: Bf16Out>(
    team: &Team,
    g: &Gemm<Mat<A>, &PackedBf16, MatMut<C>>,
) {
    let Gemm { m, n, k, b, c, .. } = *g;
    let shape = match &b.0 {
        #[cfg(target_arch = "x86_64")]
        Form16::Tiles(_, s, _) => (s.k, s.n),
        Form16::Lanes(p) => (p.k, p.extent),
        Form16::Wide(_, _, k, n) => (*k, *n),
    };
    assert!(shape == (k, n), "the right operand was packed for another shape");
    if m == 0 || n == 0 {
        return;
    }
    match &b.0 {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: A and C are valid by contract; `b_for` packed `p` for this shape after it checked for tile
        // registers.
        Form16::Tiles(p, _, isa) => unsafe {
            gemm_bf16_tiles(team, *isa, &g.with_b(p.as_ptr().cast()));
        },
        // SAFETY: A and C are valid by contract; `b_for` packed `p` for this shape after it checked for
        // AVX512_BF16.
        Form16::Lanes(p) => unsafe {
            dots::<A, bf16, C>(team, team.threads(), &g.with_b(&Right::Packed(p)));
        },
        Form16::Wide(p, shape, ..) => {
            let epi = epilogue(c, g.epilogue);
            // SAFETY: `b_for` filled `p` with this shape, and `p` lives as long as this call; A is readable
            // by contract, and `through` passes a writable matrix of the shape of C.
            let product = |sums| unsafe {
                let b = Packed::new(*shape, p.as_ptr());
                gemm_packed(team, &g.with_b(&b).with_c(sums).with(epi));
            };
            // SAFETY: C is writable by contract, and `product` writes all `m * n` elements. If C is bf16,
            // `epilogue` has set beta to 0, so that `product` does not read an element before it writes it.
            unsafe { C::through(team, m, n, c, &product) };
        }
    }
}
