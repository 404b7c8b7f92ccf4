//! Products of weights in f32, f16 or bf16 and activations in f32.
//!
//! A panel has the weights of 16 outputs: the 16 weights of each element of `k` follow each other. A result
//! is one sum over all of `k`, in order, so its bits do not depend on the tile that it belongs to.

use super::layout::PANEL;
#[cfg(target_arch = "x86_64")]
use crate::cpu::library::simd::{Avx2, Avx512};
use crate::cpu::library::simd::{Portable, Simd, Storage};
use crate::cpu::sys::Isa;

/// Bytes of a panel.
pub(super) fn panel_bytes<T>(k: usize) -> usize {
    (k * PANEL * size_of::<T>()).next_multiple_of(64)
}

/// Some panels times the rows of one tile.
#[derive(Clone, Copy, Debug)]
pub(super) struct Task {
    pub k: usize,
    pub panel: *const u8,
    /// Bytes from a panel to the next.
    pub panel_bytes: usize,
    /// The rows of the tile: for each element of `k`, the values of all rows.
    pub x: *const f32,
    /// The rows of the results, as many as the tile has.
    pub rows: *const u32,
    /// The first result of the first panel in row 0.
    pub y: *mut f32,
    /// Floats from a row of the results to the next.
    pub stride: usize,
    /// Results that there are from this panel on.
    pub columns: usize,
}

/// Multiplies panels with a tile.
///
/// # Safety
/// The operands are as [`Task`] says, and the instruction set is available.
pub(super) type TileFn = unsafe fn(&Task);

/// The functions for tiles with a certain number of rows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tiles {
    pub rows: usize,
    /// Panels that `many` multiplies.
    pub panels: usize,
    pub many: TileFn,
    /// Multiplies one panel.
    pub one: TileFn,
}

/// The numbers of rows that tiles may have.
pub(super) fn sizes(isa: Isa) -> &'static [usize] {
    match isa {
        Isa::Avx512 => &[12, 8, 4, 2, 1],
        Isa::Avx2 => &[6, 4, 2, 1],
        Isa::Portable => &[2, 1],
    }
}

/// The functions in the order of [`sizes`].
pub(super) fn tiles<T: Storage>(isa: Isa) -> &'static [Tiles] {
    macro_rules! tiles {
        ($f:ident: $($rows:literal $panels:literal)*) => {
            const { &[$(Tiles {
                rows: $rows, panels: $panels, many: $f::<T, $rows, $panels>, one: $f::<T, $rows, 1>,
            }),*] }
        };
    }
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => tiles!(avx512: 12 2 8 2 4 4 2 4 1 4),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => tiles!(avx2: 6 1 4 1 2 2 1 4),
        _ => tiles!(portable: 2 1 1 2),
    }
}

/// # Safety
/// The contract of [`TileFn`] for `R` rows and `P` panels; the processor has AVX-512.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn avx512<T: Storage, const R: usize, const P: usize>(t: &Task) {
    // SAFETY: this function has the contract of `tile` and is compiled for AVX-512.
    unsafe { tile::<Avx512, T, R, P, 1>(t) }
}

/// # Safety
/// The contract of [`TileFn`] for `R` rows and `P` panels; the processor has AVX2, FMA and F16C.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn avx2<T: Storage, const R: usize, const P: usize>(t: &Task) {
    // SAFETY: this function has the contract of `tile` and is compiled for AVX2.
    unsafe { tile::<Avx2, T, R, P, 2>(t) }
}

/// # Safety
/// The contract of [`TileFn`] for `R` rows and `P` panels.
unsafe fn portable<T: Storage, const R: usize, const P: usize>(t: &Task) {
    // SAFETY: this function has the contract of `tile`.
    unsafe { tile::<Portable, T, R, P, 4>(t) }
}

/// `P` panels of `V` vectors times `R` rows.
///
/// # Safety
/// The contract of [`TileFn`] for `R` rows and `P` panels. The calling function is compiled for the
/// instruction set of `S`.
#[inline(always)]
unsafe fn tile<S: Simd, T: Storage, const R: usize, const P: usize, const V: usize>(t: &Task) {
    const { assert!(V * S::W == PANEL) };
    // SAFETY: by contract the panels have `k` times 16 weights and the tile `k` times `R` values. Results are
    // written for the rows and the columns that there are.
    unsafe {
        let mut out = [[[S::zero(); V]; P]; R];
        let panels: [*const T; P] = std::array::from_fn(|p| t.panel.add(p * t.panel_bytes).cast());
        for i in 0..t.k {
            let x = t.x.add(i * R);
            let w: [[S::V; V]; P] = std::array::from_fn(|p| {
                std::array::from_fn(|v| T::load::<S>(panels[p].add(i * PANEL + v * S::W)))
            });
            for r in 0..R {
                let x = S::splat(*x.add(r));
                for p in 0..P {
                    for v in 0..V {
                        out[r][p][v] = S::fma(w[p][v], x, out[r][p][v]);
                    }
                }
            }
        }
        for r in 0..R {
            let y = t.y.add(*t.rows.add(r) as usize * t.stride);
            for p in 0..P {
                for v in 0..V {
                    let at = p * PANEL + v * S::W;
                    if at + S::W <= t.columns {
                        S::store(y.add(at), out[r][p][v]);
                    } else if at < t.columns {
                        S::store_part(y.add(at), out[r][p][v], t.columns - at);
                    }
                }
            }
        }
    }
}

/// Packs a panel: rows `0 .. rows` of `from`, each of `k` weights. Outputs that there are not have zeros.
///
/// # Safety
/// The rows are readable. `to` is writable for [`panel_bytes`] and overlaps nothing else.
pub(super) unsafe fn pack<T: Copy>(from: *const T, rows: usize, k: usize, to: *mut u8) {
    // Elements of `k` at a time, so that the lines that are written stay in the cache.
    const AT_ONCE: usize = 64;
    // SAFETY: by contract the rows have `k` weights and the panel has room for 16 times `k`. Zero bytes are
    // a zero of every type.
    unsafe {
        if rows < PANEL || !k.is_multiple_of(AT_ONCE) {
            to.write_bytes(0, panel_bytes::<T>(k));
        }
        let to = to.cast::<T>();
        for first in (0..k).step_by(AT_ONCE) {
            for r in 0..rows.min(PANEL) {
                for i in first..(first + AT_ONCE).min(k) {
                    to.add(i * PANEL + r).write_unaligned(from.add(r * k + i).read_unaligned());
                }
            }
        }
    }
}

/// Writes the rows of a tile as [`Task::x`] has them. Row `r` of the tile is row `rows[r]` of `x`.
///
/// # Safety
/// `rows` is readable for `tall` numbers, and these rows of `x` for `k` floats each. `to` is writable for `k`
/// floats of each row of the tile and overlaps nothing else.
pub(super) unsafe fn arrange(x: *const f32, k: usize, rows: *const u32, tall: usize, to: *mut f32) {
    // SAFETY: by contract the rows are readable and the places writable.
    unsafe {
        for r in 0..tall {
            let from = x.add(*rows.add(r) as usize * k);
            if tall == 1 {
                to.copy_from_nonoverlapping(from, k);
                continue;
            }
            for i in 0..k {
                *to.add(i * tall + r) = *from.add(i);
            }
        }
    }
}
