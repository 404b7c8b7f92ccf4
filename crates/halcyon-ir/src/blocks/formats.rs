//! The rows of the formats that are kept in blocks, and their decoders.

use super::{BlockRow, block_row, encode};
use half::f16;

/// The `f16` at byte `at`.
pub(super) fn half(b: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([b[at], b[at + 1]]).to_f32()
}

block_row!(Q4_0, "q4_0", 2, 32, 18, q4_0, encode::q4_0);
block_row!(Q4_1, "q4_1", 3, 32, 20, q4_1, encode::q4_1);
block_row!(Q5_0, "q5_0", 6, 32, 22, q5_0, encode::q5_0);
block_row!(Q5_1, "q5_1", 7, 32, 24, q5_1, encode::q5_1);
block_row!(Q8_0, "q8_0", 8, 32, 34, q8_0, encode::q8_0);
block_row!(Q2_K, "q2_k", 10, 256, 84, q2_k, encode::q2_k);
block_row!(Q3_K, "q3_k", 11, 256, 110, q3_k, encode::q3_k);
block_row!(Q4_K, "q4_k", 12, 256, 144, q4_k, encode::q4_k);
block_row!(Q5_K, "q5_k", 13, 256, 176, q5_k, encode::q5_k);
block_row!(Q6_K, "q6_k", 14, 256, 210, q6_k, encode::q6_k);
block_row!(IQ4_NL, "iq4_nl", 20, 32, 18, iq4_nl, encode::iq4_nl);
block_row!(IQ4_XS, "iq4_xs", 23, 256, 136, iq4_xs, encode::iq4_xs);
block_row!(MXFP4, "mxfp4", 39, 32, 17, mxfp4, encode::mxfp4);

fn q4_0(b: &[u8; 18], v: &mut [f32; 32]) {
    let d = half(b, 0);
    for i in 0..16 {
        v[i] = (f32::from(b[2 + i] & 15) - 8.0) * d;
        v[16 + i] = (f32::from(b[2 + i] >> 4) - 8.0) * d;
    }
}

fn q4_1(b: &[u8; 20], v: &mut [f32; 32]) {
    let (d, m) = (half(b, 0), half(b, 2));
    for i in 0..16 {
        v[i] = f32::from(b[4 + i] & 15) * d + m;
        v[16 + i] = f32::from(b[4 + i] >> 4) * d + m;
    }
}

/// The codes of 5 bits: 4 bytes with the high bits, then 16 bytes with two low parts each.
fn five_bits(b: &[u8; 20]) -> [u8; 32] {
    let mut codes = [0; 32];
    for i in 0..16 {
        let high = |at: usize| (b[at / 8] >> (at % 8) & 1) << 4;
        codes[i] = b[4 + i] & 15 | high(i);
        codes[16 + i] = b[4 + i] >> 4 | high(16 + i);
    }
    codes
}

fn q5_0(b: &[u8; 22], v: &mut [f32; 32]) {
    let d = half(b, 0);
    let codes = five_bits(b.last_chunk().expect("20 of 22 bytes"));
    for (v, c) in v.iter_mut().zip(codes) {
        *v = (f32::from(c) - 16.0) * d;
    }
}

fn q5_1(b: &[u8; 24], v: &mut [f32; 32]) {
    let (d, m) = (half(b, 0), half(b, 2));
    let codes = five_bits(b.last_chunk().expect("20 of 24 bytes"));
    for (v, c) in v.iter_mut().zip(codes) {
        *v = f32::from(c) * d + m;
    }
}

fn q8_0(b: &[u8; 34], v: &mut [f32; 32]) {
    let d = half(b, 0);
    for i in 0..32 {
        v[i] = f32::from(b[2 + i] as i8) * d;
    }
}

fn q2_k(b: &[u8; 84], v: &mut [f32; 256]) {
    let (d, dmin) = (half(b, 80), half(b, 82));
    for sub in 0..16 {
        let (part, shift, at) = (sub / 8, sub / 2 % 4 * 2, sub % 2 * 16);
        let (d1, m1) = (d * f32::from(b[sub] & 15), dmin * f32::from(b[sub] >> 4));
        for i in 0..16 {
            let code = b[16 + part * 32 + at + i] >> shift & 3;
            v[sub * 16 + i] = d1 * f32::from(code) - m1;
        }
    }
}

fn q3_k(b: &[u8; 110], v: &mut [f32; 256]) {
    let d = half(b, 108);
    let s = &b[96..108];
    for sub in 0..16 {
        let (part, shift, at) = (sub / 8, sub / 2 % 4 * 2, sub % 2 * 16);
        let low = if sub < 8 { s[sub] & 15 } else { s[sub - 8] >> 4 };
        let scale = low | (s[8 + sub % 4] >> (sub / 4 * 2) & 3) << 4;
        let d1 = d * (f32::from(scale) - 32.0);
        for i in 0..16 {
            let low = b[32 + part * 32 + at + i] >> shift & 3;
            let high = b[at + i] >> (sub / 2) & 1;
            v[sub * 16 + i] = d1 * (f32::from(low | high << 2) - 4.0);
        }
    }
}

/// The scale and the minimum of 32 elements, 6 bits each.
fn scale_min(s: &[u8], sub: usize) -> (u8, u8) {
    match sub < 4 {
        true => (s[sub] & 63, s[sub + 4] & 63),
        false => (s[sub + 4] & 15 | s[sub - 4] >> 6 << 4, s[sub + 4] >> 4 | s[sub] >> 6 << 4),
    }
}

fn q4_k(b: &[u8; 144], v: &mut [f32; 256]) {
    let (d, dmin) = (half(b, 0), half(b, 2));
    for sub in 0..8 {
        let (scale, min) = scale_min(&b[4..16], sub);
        let (d1, m1) = (d * f32::from(scale), dmin * f32::from(min));
        for i in 0..32 {
            let code = b[16 + sub / 2 * 32 + i] >> (sub % 2 * 4) & 15;
            v[sub * 32 + i] = d1 * f32::from(code) - m1;
        }
    }
}

fn q5_k(b: &[u8; 176], v: &mut [f32; 256]) {
    let (d, dmin) = (half(b, 0), half(b, 2));
    for sub in 0..8 {
        let (scale, min) = scale_min(&b[4..16], sub);
        let (d1, m1) = (d * f32::from(scale), dmin * f32::from(min));
        for i in 0..32 {
            let low = b[48 + sub / 2 * 32 + i] >> (sub % 2 * 4) & 15;
            let high = b[16 + i] >> sub & 1;
            v[sub * 32 + i] = d1 * f32::from(low | high << 4) - m1;
        }
    }
}

fn q6_k(b: &[u8; 210], v: &mut [f32; 256]) {
    let d = half(b, 208);
    for sub in 0..16 {
        let (part, quarter, at) = (sub / 8, sub / 2 % 4, sub % 2 * 16);
        let d1 = d * f32::from(b[192 + sub] as i8);
        for i in 0..16 {
            let low = b[part * 64 + quarter % 2 * 32 + at + i] >> (quarter / 2 * 4) & 15;
            let high = b[128 + part * 32 + at + i] >> (quarter * 2) & 3;
            v[sub * 16 + i] = d1 * (f32::from(low | high << 4) - 32.0);
        }
    }
}

/// The values of the codes of `iq4_nl` and `iq4_xs`.
pub(super) const IQ4_VALUES: [f32; 16] =
    [-127., -104., -83., -65., -49., -35., -22., -10., 1., 13., 25., 38., 53., 69., 89., 113.];

/// 32 elements with codes of 4 bits: the low halves of the bytes, then the high halves.
fn look_up(b: &[u8], d: f32, values: &[f32; 16], v: &mut [f32]) {
    for i in 0..16 {
        v[i] = d * values[usize::from(b[i] & 15)];
        v[16 + i] = d * values[usize::from(b[i] >> 4)];
    }
}

fn iq4_nl(b: &[u8; 18], v: &mut [f32; 32]) {
    look_up(&b[2..], half(b, 0), &IQ4_VALUES, v);
}

fn iq4_xs(b: &[u8; 136], v: &mut [f32; 256]) {
    let d = half(b, 0);
    let high = u16::from_le_bytes([b[2], b[3]]);
    for sub in 0..8 {
        let low = u16::from(b[4 + sub / 2] >> (sub % 2 * 4) & 15);
        let scale = f32::from(low | (high >> (2 * sub) & 3) << 4) - 32.0;
        look_up(&b[8 + sub * 16..24 + sub * 16], d * scale, &IQ4_VALUES, &mut v[sub * 32..sub * 32 + 32]);
    }
}

/// Twice the values of the codes of `mxfp4` (f4e2m1). The negative zero of f4e2m1 is zero here, as in ggml.
const MXFP4_VALUES: [f32; 16] = [0., 1., 2., 3., 4., 6., 8., 12., 0., -1., -2., -3., -4., -6., -8., -12.];

/// Half of `2^(e - 127)`.
pub(super) fn e8m0_half(e: u8) -> f32 {
    // The first two are subnormal numbers.
    match e {
        0 => f32::from_bits(0x0020_0000),
        1 => f32::from_bits(0x0040_0000),
        e => f32::from_bits(u32::from(e - 1) << 23),
    }
}

fn mxfp4(b: &[u8; 17], v: &mut [f32; 32]) {
    look_up(&b[1..], e8m0_half(b[0]), &MXFP4_VALUES, v);
}
