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

/// Bytes of a record, a group of activations: the scale, for each half of the group one number that depends
/// on the sum of its codes ([`Form`]), and 32 codes, of two bytes each if `words`. The size is a multiple of
/// 16, so that no read crosses a cache line.
pub(super) const fn record_bytes(words: bool) -> usize {
    CODES + if words { 2 * GROUP } else { GROUP }
}

/// Place of the scale in a record.
pub(super) const SCALE: usize = 0;
/// Place of the first of the two numbers with sums.
pub(super) const SUMS: usize = 4;
/// Place of the first code.
pub(super) const CODES: usize = 16;

/// What the kernel needs of a group of activations.
#[derive(Clone, Copy, Debug)]
pub(super) struct Form {
    /// Whether a group has two records.
    pub fine: bool,
    /// Whether codes have 16 bits. Of each four, codes 0 and 2 then come before 1 and 3.
    pub words: bool,
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
    let bytes = record_bytes(form.words);
    for r in 0..tall {
        for g in 0..k / GROUP {
            // SAFETY: by contract the row is readable, and the tile has `parts` records for the group.
            unsafe {
                let v = x.add(*rows.add(r) as usize * k + g * GROUP).cast::<[f32; GROUP]>().read_unaligned();
                let to = to.add((g * tall + r) * parts * bytes);
                let rest = record::<S>(&v, form, to);
                if form.fine {
                    record::<S>(&rest, form, to.add(bytes));
                }
            }
        }
    }
}

/// Writes the record of one group. Returns what rounding took from the values if the form is fine.
///
/// # Safety
/// `to` is writable for a record. The calling function is compiled for the instruction set of `S`.
#[inline(always)]
unsafe fn record<S: Simd>(v: &[f32; GROUP], form: Form, to: *mut u8) -> [f32; GROUP] {
    // The bits of non-negative floats are ordered like the floats, and infinity and NaN come last.
    let top = v.iter().fold(0, |a, v| a.max(v.to_bits() as i32 & i32::MAX));
    let top = f32::from_bits(top as u32);
    let scale = if top.is_finite() { top / 127.0 } else { f32::NAN };
    // Without the power of two, the inverse of a very small number would not be finite.
    let lift = if top < 1e-30 { 18_446_744_073_709_551_616.0 } else { 1.0 };
    let inverse = 127.0 / (top * lift);
    // Adding `ROUND` gives a float whose lowest bits are the code.
    let (mut rounded, mut sums) = ([ROUND; GROUP], [0.0; 2]);
    if top.is_finite() && top > 0.0 {
        // SAFETY: by contract the caller is compiled for the instruction set, and `W` divides 16.
        unsafe {
            let (lift, inverse, round) = (S::splat(lift), S::splat(inverse), S::splat(ROUND));
            for half in 0..2 {
                let mut sum = S::zero();
                for i in (half * GROUP / 2..(half + 1) * GROUP / 2).step_by(S::W) {
                    let v = S::mul(S::mul(S::load(v.as_ptr().add(i)), lift), inverse);
                    let v = S::add(v, round);
                    S::store(rounded.as_mut_ptr().add(i), v);
                    sum = S::add(sum, S::sub(v, round));
                }
                sums[half] = S::sum(sum);
            }
        }
    }
    if !form.halves {
        sums[0] += sums[1];
    }
    let codes = rounded.map(|v| v.to_bits() as i32 - ROUND.to_bits() as i32);
    let [first, second] = sums;
    // SAFETY: the four parts of a record lie inside its bytes.
    unsafe {
        if form.words {
            // The vectors of x86-64, which alone have words, store the low half of a pair first.
            let mut pairs = [0i32; GROUP / 2];
            for i in 0..GROUP / 2 {
                let at = i / 2 * 4 + i % 2;
                pairs[i] = codes[at] & 0xffff | codes[at + 2] << 16;
            }
            to.add(CODES).cast::<[i32; GROUP / 2]>().write_unaligned(pairs);
        } else {
            to.add(CODES).cast::<[i8; GROUP]>().write_unaligned(codes.map(|c| c as i8));
        }
        to.add(SCALE).cast::<f32>().write_unaligned(scale);
        let at = to.add(SUMS);
        if form.offset {
            at.cast::<[f32; 2]>().write_unaligned([first * scale, second * scale]);
        } else {
            at.cast::<[i32; 2]>().write_unaligned([-form.zero * first as i32, -form.zero * second as i32]);
        }
    }
    let mut rest = [0.0; GROUP];
    // If a value is not finite, the scale of this record is NaN, which is enough.
    if form.fine && top.is_finite() {
        for i in 0..GROUP {
            rest[i] = v[i] - codes[i] as f32 * scale;
        }
    }
    rest
}
