//! The encoders: one block each, with the reconstruction error of ggml's reference quantiser.
//!
//! `q4_0`, `q4_1`, `q5_0`, `q5_1`, `q8_0` and `mxfp4` get the same bytes as from ggml. The others
//! first find a scale, and for some formats a minimum, for each part of the block, round these to the few
//! bits that they have, and then choose the codes anew.
//!
//! An element that is not finite gives its block undefined values, and never a panic. A scale beyond the
//! range of `f16` becomes infinite, as in ggml.

use super::formats::{IQ4_VALUES, e8m0_half};
use super::search::{
    Range, best_scale, extreme, inverse, nearest, scale_and_min, symmetric, symmetric_by_codes,
};
use half::f16;

/// Writes `d` as `f16`. Returns what a decoder reads there.
fn put_half(b: &mut [u8], at: usize, d: f32) -> f32 {
    let h = f16::from_f32(d);
    b[at..at + 2].copy_from_slice(&h.to_le_bytes());
    h.to_f32()
}

/// The smallest and the largest element. Of zeros, the first: `f32::min` may take either sign.
fn bounds(x: &[f32]) -> (f32, f32) {
    x.iter().fold((f32::MAX, f32::MIN), |(low, high), &v| {
        (if v < low { v } else { low }, if v > high { v } else { high })
    })
}

/// Writes codes of 4 bits: the first half of the codes in the low halves of the bytes.
fn put_nibbles(b: &mut [u8], code: impl Fn(usize) -> u8) {
    let n = b.len();
    for i in 0..n {
        b[i] = code(i) & 15 | code(n + i) << 4;
    }
}

/// Writes the high bits of 32 codes of 5 bits.
fn put_fifth_bits(b: &mut [u8], codes: &[u8; 32]) {
    let bits = codes.iter().enumerate().fold(0, |bits, (i, &c)| bits | u32::from(c >> 4) << i);
    b.copy_from_slice(&bits.to_le_bytes());
}

/// Codes around zero with one scale, which maps the extreme to the lowest code `-half`.
fn around_zero(x: &[f32; 32], half: f32) -> (f32, [u8; 32]) {
    let d = extreme(x) / -half;
    let id = inverse(d);
    (d, x.map(|v| (v * id + (half + 0.5)).min(2.0 * half - 1.0) as u8))
}

/// Codes from the smallest element on, in `top` steps.
fn from_minimum(x: &[f32; 32], top: f32) -> (f32, f32, [u8; 32]) {
    let (low, high) = bounds(x);
    let d = (high - low) / top;
    let id = inverse(d);
    (d, low, x.map(|v| ((v - low) * id + 0.5).min(top) as u8))
}

pub(super) fn q4_0(x: &[f32; 32], b: &mut [u8; 18]) {
    let (d, codes) = around_zero(x, 8.0);
    put_half(b, 0, d);
    put_nibbles(&mut b[2..], |i| codes[i]);
}

pub(super) fn q4_1(x: &[f32; 32], b: &mut [u8; 20]) {
    let (d, min, codes) = from_minimum(x, 15.0);
    put_half(b, 0, d);
    put_half(b, 2, min);
    put_nibbles(&mut b[4..], |i| codes[i]);
}

pub(super) fn q5_0(x: &[f32; 32], b: &mut [u8; 22]) {
    let (d, codes) = around_zero(x, 16.0);
    put_half(b, 0, d);
    put_fifth_bits(&mut b[2..6], &codes);
    put_nibbles(&mut b[6..], |i| codes[i]);
}

pub(super) fn q5_1(x: &[f32; 32], b: &mut [u8; 24]) {
    let (d, min, codes) = from_minimum(x, 31.0);
    put_half(b, 0, d);
    put_half(b, 2, min);
    put_fifth_bits(&mut b[4..8], &codes);
    put_nibbles(&mut b[8..], |i| codes[i]);
}

pub(super) fn q8_0(x: &[f32; 32], b: &mut [u8; 34]) {
    let d = extreme(x).abs() / 127.0;
    let id = inverse(d);
    put_half(b, 0, d);
    for i in 0..32 {
        b[2 + i] = (x[i] * id).round() as i8 as u8;
    }
}

/// The scales and minima of the parts of a block, found with the weights that `weight` gives the elements.
fn parts<const N: usize, const P: usize>(
    x: &[f32; 256],
    range: &Range,
    weights: impl Fn(&[f32; N]) -> [f32; N],
) -> ([f32; P], [f32; P]) {
    let (mut scales, mut mins) = ([0.0; P], [0.0; P]);
    for (p, x) in x.as_chunks::<N>().0.iter().enumerate() {
        (scales[p], mins[p]) = scale_and_min(x, &weights(x), range);
    }
    (scales, mins)
}

/// Scales that are not negative, as whole numbers up to `top` times a common scale.
fn whole_scales<const P: usize>(scales: &[f32; P], top: f32) -> (f32, [u8; P]) {
    let largest = scales.iter().fold(0.0f32, |m, &s| m.max(s));
    if largest <= 0.0 {
        return (0.0, [0; P]);
    }
    (largest / top, scales.map(|s| nearest(top / largest * s).clamp(0.0, top) as u8))
}

/// The codes of a part: `(x + min) / scale`, rounded.
fn codes_above(x: &[f32], scale: f32, min: f32, top: f32, codes: &mut [u8]) {
    for (x, c) in x.iter().zip(codes) {
        *c = if scale == 0.0 { 0 } else { nearest((x + min) / scale).clamp(0.0, top) as u8 };
    }
}

pub(super) fn q2_k(x: &[f32; 256], b: &mut [u8; 84]) {
    let range = Range { top: 3.0, first: -0.5, tries: 15, absolute: true };
    let (scales, mins) = parts::<16, 16>(x, &range, |x| x.map(f32::abs));
    let ((d, scales), (dmin, mins)) = (whole_scales(&scales, 15.0), whole_scales(&mins, 15.0));
    let (d, dmin) = (put_half(b, 80, d), put_half(b, 82, dmin));
    let mut codes = [0; 256];
    for p in 0..16 {
        b[p] = scales[p] | mins[p] << 4;
        let at = p * 16..p * 16 + 16;
        let (scale, min) = (d * f32::from(scales[p]), dmin * f32::from(mins[p]));
        codes_above(&x[at.clone()], scale, min, 3.0, &mut codes[at]);
    }
    put_pairs(&mut b[16..80], &codes);
}

/// Writes 256 codes of 2 bits: a byte has codes that are 32 elements apart.
fn put_pairs(b: &mut [u8], codes: &[u8; 256]) {
    for (i, b) in b.iter_mut().enumerate() {
        let at = i / 32 * 128 + i % 32;
        *b = (0..4).fold(0, |v, k| v | (codes[at + 32 * k] & 3) << (2 * k));
    }
}

/// Scales of any sign as whole numbers from `-n` to `n - 1` times a common scale, which maps the extreme to
/// `-n`. The common scale is what a decoder reads from its place in the block.
fn whole_signed_scales<const P: usize>(
    scales: &[f32; P],
    n: f32,
    put: impl FnOnce(f32) -> f32,
) -> (f32, [f32; P]) {
    let extreme = extreme(scales);
    if extreme == 0.0 {
        return (put(0.0), [0.0; P]);
    }
    let d = put(extreme / -n);
    (d, scales.map(|s| nearest(-n / extreme * s).clamp(-n, n - 1.0)))
}

pub(super) fn q3_k(x: &[f32; 256], b: &mut [u8; 110]) {
    let mut scales = [0.0; 16];
    for (s, x) in scales.iter_mut().zip(x.as_chunks::<16>().0) {
        *s = symmetric_by_codes(x, 4.0);
    }
    let (d, scales) = whole_signed_scales(&scales, 32.0, |d| put_half(b, 108, d));
    b[..108].fill(0);
    let mut codes = [0; 256];
    for p in 0..16 {
        let scale = (scales[p] + 32.0) as u8;
        b[96 + p % 8] |= (scale & 15) << (p / 8 * 4);
        b[104 + p % 4] |= scale >> 4 << (p / 4 * 2);
        codes_above(
            &x[p * 16..p * 16 + 16],
            d * scales[p],
            4.0 * d * scales[p],
            7.0,
            &mut codes[p * 16..p * 16 + 16],
        );
    }
    for (i, c) in codes.iter().enumerate() {
        b[i % 32] |= (c >> 2) << (i / 32);
    }
    put_pairs(&mut b[32..96], &codes);
}

/// The first 16 bytes of `q4_k` and `q5_k`: the common scales, and 6 bits for each scale and each minimum.
/// Returns the codes of the elements.
fn eight_parts(x: &[f32; 256], range: &Range, b: &mut [u8]) -> [u8; 256] {
    let (scales, mins) = parts::<32, 8>(x, range, |x| {
        let level = (x.iter().map(|v| v * v).sum::<f32>() / 32.0).sqrt();
        x.map(|v| level + v.abs())
    });
    let ((d, scales), (dmin, mins)) = (whole_scales(&scales, 63.0), whole_scales(&mins, 63.0));
    let (d, dmin) = (put_half(b, 0, d), put_half(b, 2, dmin));
    let mut codes = [0; 256];
    for p in 0..8 {
        let at = p * 32..p * 32 + 32;
        let (scale, min) = (d * f32::from(scales[p]), dmin * f32::from(mins[p]));
        codes_above(&x[at.clone()], scale, min, range.top, &mut codes[at]);
    }
    for p in 0..4 {
        b[4 + p] = scales[p] | scales[4 + p] >> 4 << 6;
        b[8 + p] = mins[p] | mins[4 + p] >> 4 << 6;
        b[12 + p] = scales[4 + p] & 15 | mins[4 + p] << 4;
    }
    codes
}

pub(super) fn q4_k(x: &[f32; 256], b: &mut [u8; 144]) {
    let range = Range { top: 15.0, first: -1.0, tries: 20, absolute: false };
    let codes = eight_parts(x, &range, &mut b[..16]);
    for (p, b) in b[16..].chunks_exact_mut(32).enumerate() {
        put_nibbles(b, |i| codes[p * 64 + i]);
    }
}

pub(super) fn q5_k(x: &[f32; 256], b: &mut [u8; 176]) {
    let range = Range { top: 31.0, first: -0.5, tries: 15, absolute: false };
    let codes = eight_parts(x, &range, &mut b[..16]);
    for (i, b) in b[16..48].iter_mut().enumerate() {
        *b = (0..8).fold(0, |v, p| v | codes[p * 32 + i] >> 4 << p);
    }
    for (p, b) in b[48..].chunks_exact_mut(32).enumerate() {
        put_nibbles(b, |i| codes[p * 64 + i]);
    }
}

pub(super) fn q6_k(x: &[f32; 256], b: &mut [u8; 210]) {
    let mut scales = [0.0; 16];
    for (s, x) in scales.iter_mut().zip(x.as_chunks::<16>().0) {
        *s = symmetric(x, 32.0);
    }
    let (d, scales) = whole_signed_scales(&scales, 128.0, |d| put_half(b, 208, d));
    let mut codes = [0; 256];
    for p in 0..16 {
        b[192 + p] = scales[p] as i8 as u8;
        let scale = d * scales[p];
        codes_above(&x[p * 16..p * 16 + 16], scale, 32.0 * scale, 63.0, &mut codes[p * 16..p * 16 + 16]);
    }
    for part in 0..2 {
        let codes = &codes[part * 128..part * 128 + 128];
        put_nibbles(&mut b[part * 64..part * 64 + 64], |i| codes[i]);
        for i in 0..32 {
            b[128 + part * 32 + i] = (0..4).fold(0, |v, k| v | codes[32 * k + i] >> 4 << (2 * k));
        }
    }
}

/// The code of `iq4_nl` that is nearest to a scaled element, for each half step from -127 to 113.
const IQ4_CODES: [u8; 481] = {
    let mut codes = [0; 481];
    let mut i = 0;
    while i < 481 {
        // Twice the scaled element. The borders between codes are sums of two values, so they are whole here.
        let twice = i as f32 - 254.0;
        let mut c = 0;
        while c < 15 && twice >= IQ4_VALUES[c] + IQ4_VALUES[c + 1] {
            c += 1;
        }
        codes[i] = c as u8;
        i += 1;
    }
    codes
};

/// The code of `iq4_nl` whose value is nearest to `v`. Of two equally near ones, the higher.
fn iq4_code(v: f32) -> u8 {
    let code = IQ4_CODES[(v.clamp(-127.0, 113.0) * 2.0 + 254.0) as usize];
    // The sum above can round up to a border.
    let below = code > 0 && 2.0 * v < IQ4_VALUES[usize::from(code)] + IQ4_VALUES[usize::from(code) - 1];
    code - u8::from(below)
}

/// The scale of 32 elements: 16 tries around the one that maps the extreme to the first value.
fn iq4_scale(x: &[f32; 32]) -> f32 {
    let extreme = extreme(x);
    if extreme.abs() < 1e-15 {
        return 0.0;
    }
    let first = 1.0 / (extreme / -IQ4_VALUES[0]);
    let tries = std::iter::once(first).chain((-7..=7).map(|s| (IQ4_VALUES[0] + s as f32) / extreme));
    best_scale(x, tries, |x, inverse| {
        let (q, w) = (IQ4_VALUES[usize::from(iq4_code(inverse * x))], x * x);
        [w * q * x, w * q * q]
    })
}

fn put_iq4_codes(x: &[f32; 32], scale: f32, b: &mut [u8]) {
    let inverse = inverse(scale);
    put_nibbles(b, |i| iq4_code(inverse * x[i]));
}

pub(super) fn iq4_nl(x: &[f32; 32], b: &mut [u8; 18]) {
    let d = put_half(b, 0, iq4_scale(x));
    put_iq4_codes(x, d, &mut b[2..]);
}

pub(super) fn iq4_xs(x: &[f32; 256], b: &mut [u8; 136]) {
    let x = x.as_chunks::<32>().0;
    let mut scales = [0.0; 8];
    for (s, x) in scales.iter_mut().zip(x) {
        *s = iq4_scale(x);
    }
    let (d, scales) = whole_signed_scales(&scales, 32.0, |d| put_half(b, 0, d));
    b[2..8].fill(0);
    for p in 0..8 {
        let scale = (scales[p] + 32.0) as u8;
        b[4 + p / 2] |= (scale & 15) << (p % 2 * 4);
        b[2 + p / 4] |= scale >> 4 << (p % 4 * 2);
        put_iq4_codes(&x[p], d * scales[p], &mut b[8 + p * 16..24 + p * 16]);
    }
}

pub(super) fn mxfp4(x: &[f32; 32], b: &mut [u8; 17]) {
    let largest = extreme(x).abs();
    // The exponent such that the largest element lies between the doubled values 8 and 16.
    b[0] = ((largest.to_bits() >> 23) as u8).saturating_sub(2);
    let d = e8m0_half(b[0]);
    put_nibbles(&mut b[1..], |i| {
        let v = x[i].abs() / d;
        let code = [0.5, 1.5, 2.5, 3.5, 5.0, 7.0, 10.0].iter().fold(0, |c, &border| c + u8::from(v > border));
        // There is no negative zero.
        if x[i] < 0.0 && code > 0 { code | 8 } else { code }
    });
}
