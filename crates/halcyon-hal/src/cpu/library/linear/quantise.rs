//! Activations as bytes: rows are rounded to 8 bits in groups of 32, each group with its own scale.
//!
//! A fine product has two records for each group of a row, one after the other: the second has what rounding
//! took from the values of the first, with a scale of its own.
//!
//! A row depends on nothing but its own values, so products are batch-invariant. A group whose values are not
//! all finite gets the scale NaN, which makes the row's results NaN.

use super::layout::GROUP;
use super::rows::Tile;
use crate::cpu::library::simd::{Simd, dispatch_simd};

/// Bytes of a group of activations: 32 codes, the scale, and for each half of the group one number that
/// depends on the sum of its codes ([`Form`]). The size is a multiple of 16, so that no read crosses a cache
/// line.
pub(super) const RECORD: usize = 48;
/// Place of the scale in a record.
pub(super) const SCALE: usize = 32;
/// Place of the first of the two numbers with sums.
pub(super) const SUMS: usize = 36;

/// What the kernel needs of a group of activations.
#[derive(Clone, Copy, Debug)]
pub(super) struct Form {
    /// Whether a group has two records.
    pub fine: bool,
    /// Whether there is a sum of codes for each half of the group. Otherwise the first is for the whole
    /// group.
    pub halves: bool,
    /// The sums times the scale, in f32, if weights have offsets. Otherwise the sums times `-zero`, as
    /// integers.
    pub offset: bool,
    pub zero: i32,
}

/// Half an integer of f32's precision: a number added to it is rounded to an integer, ties to even.
const ROUND: f32 = 12_582_912.0;

dispatch_simd! {
    /// Quantises the rows of a tile. Row `r` of the tile is row `rows[r]` of `x`. In `to`, the records of one
    /// group of all rows of the tile follow each other.
    ///
    /// # Safety
    /// `rows` is readable for the rows of the tile. The rows of `x` are readable for `32 groups` floats, and
    /// start `k` floats apart. `to` is writable for the records of `groups` groups of each row of the tile,
    /// and overlaps nothing else.
    pub(super) unsafe fn quantise[][](
        isa,
        x: *const f32,
        k: usize,
        rows: *const u32,
        tile: Tile,
        form: Form,
        to: *mut u8,
    ) = quantise_body
}

/// # Safety
/// The contract of `quantise`; the calling function is compiled for the instruction set of `S`.
#[inline(always)]
unsafe fn quantise_body<S: Simd>(
    x: *const f32,
    k: usize,
    rows: *const u32,
    tile: Tile,
    form: Form,
    to: *mut u8,
) {
    let (tall, parts) = (tile.rows as usize, if form.fine { 2 } else { 1 });
    for r in 0..tall {
        for g in 0..k / GROUP {
            // SAFETY: by contract the row is readable, and the tile has `parts` records for the group.
            unsafe {
                let v = x.add(*rows.add(r) as usize * k + g * GROUP).cast::<[f32; GROUP]>().read_unaligned();
                let to = to.add((g * tall + r) * parts * RECORD);
                let rest = record(&v, form, to);
                if form.fine {
                    record(&rest, form, to.add(RECORD));
                }
            }
        }
    }
}

/// Writes the record of one group. Returns what rounding took from the values if the form is fine.
///
/// # Safety
/// `to` is writable for a record.
#[inline(always)]
unsafe fn record(v: &[f32; GROUP], form: Form, to: *mut u8) -> [f32; GROUP] {
    // The bits of non-negative floats are ordered like the floats, and infinity and NaN come last.
    let top = v.iter().fold(0, |a, v| a.max(v.to_bits() as i32 & i32::MAX));
    let top = f32::from_bits(top as u32);
    let mut codes = [0i8; GROUP];
    let scale = if top.is_finite() { top / 127.0 } else { f32::NAN };
    if top.is_finite() && top > 0.0 {
        // Without the power of two, the inverse of a very small number would not be finite.
        let lift = if top < 1e-30 { 1.8e19 } else { 1.0 };
        let inverse = 127.0 / (top * lift);
        for i in 0..GROUP {
            let rounded = v[i] * lift * inverse + ROUND;
            codes[i] = (rounded.to_bits() as i32 - ROUND.to_bits() as i32) as i8;
        }
    }
    let sum = |half: usize| codes[half * GROUP / 2..][..GROUP / 2].iter().fold(0, |a, c| a + i32::from(*c));
    let (mut first, second) = (sum(0), sum(1));
    if !form.halves {
        first += second;
    }
    // SAFETY: the four parts of a record lie inside its bytes.
    unsafe {
        to.cast::<[i8; GROUP]>().write_unaligned(codes);
        to.add(SCALE).cast::<f32>().write_unaligned(scale);
        let at = to.add(SUMS);
        if form.offset {
            at.cast::<[f32; 2]>().write_unaligned([first as f32 * scale, second as f32 * scale]);
        } else {
            at.cast::<[i32; 2]>().write_unaligned([-form.zero * first, -form.zero * second]);
        }
    }
    let mut rest = [0.0; GROUP];
    // If a value is not finite, the scale of this record is NaN, which is enough.
    if form.fine && top.is_finite() {
        for i in 0..GROUP {
            rest[i] = v[i] - f32::from(codes[i]) * scale;
        }
    }
    rest
}
