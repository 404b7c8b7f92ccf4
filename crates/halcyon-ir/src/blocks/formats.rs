//! The rows of the formats.

use super::BlockRow;
use half::f16;

fn half(b: &[u8]) -> f32 {
    f16::from_le_bytes([b[0], b[1]]).to_f32()
}

const fn row(
    name: &'static str,
    ggml: u32,
    elements: usize,
    bytes: usize,
    decode: fn(&[u8], &mut [f32]),
) -> BlockRow {
    BlockRow { name, ggml, elements, bytes, decode, encode: None }
}

pub(super) static Q4_0: BlockRow = row("q4_0", 2, 32, 18, |b, v| {
    let d = half(b);
    for i in 0..16 {
        v[i] = (f32::from(b[2 + i] & 15) - 8.0) * d;
        v[16 + i] = (f32::from(b[2 + i] >> 4) - 8.0) * d;
    }
});
pub(super) static Q4_1: BlockRow = row("q4_1", 3, 32, 20, |b, v| {
    let (d, m) = (half(b), half(&b[2..]));
    for i in 0..16 {
        v[i] = f32::from(b[4 + i] & 15) * d + m;
        v[16 + i] = f32::from(b[4 + i] >> 4) * d + m;
    }
});
pub(super) static Q5_0: BlockRow = row("q5_0", 6, 32, 22, |b, v| {
    let d = half(b);
    let high = u32::from_le_bytes([b[2], b[3], b[4], b[5]]);
    for i in 0..16 {
        let bit = |at: usize| ((high >> at & 1) << 4) as u8;
        v[i] = (f32::from(b[6 + i] & 15 | bit(i)) - 16.0) * d;
        v[16 + i] = (f32::from(b[6 + i] >> 4 | bit(i + 16)) - 16.0) * d;
    }
});
pub(super) static Q5_1: BlockRow = row("q5_1", 7, 32, 24, |b, v| {
    let (d, m) = (half(b), half(&b[2..]));
    let high = u32::from_le_bytes([b[4], b[5], b[6], b[7]]);
    for i in 0..16 {
        let bit = |at: usize| ((high >> at & 1) << 4) as u8;
        v[i] = f32::from(b[8 + i] & 15 | bit(i)) * d + m;
        v[16 + i] = f32::from(b[8 + i] >> 4 | bit(i + 16)) * d + m;
    }
});
pub(super) static Q8_0: BlockRow = row("q8_0", 8, 32, 34, |b, v| {
    let d = half(b);
    for i in 0..32 {
        v[i] = f32::from(b[2 + i] as i8) * d;
    }
});
pub(super) static Q2_K: BlockRow = row("q2_k", 10, 256, 84, |b, v| {
    // 16 bytes of scales (low half) and minima (high half), 64 bytes of codes, d, dmin.
    let (d, dmin) = (half(&b[80..]), half(&b[82..]));
    for (i, v) in v.iter_mut().enumerate() {
        let (part, within) = (i / 128, i % 128);
        let sub = b[i / 16];
        let code = b[16 + part * 32 + within % 32] >> (2 * (within / 32)) & 3;
        *v = d * f32::from(sub & 15) * f32::from(code) - dmin * f32::from(sub >> 4);
    }
});
pub(super) static Q3_K: BlockRow = row("q3_k", 11, 256, 110, |b, v| {
    // 32 bytes of high bits, 64 bytes of low bits, 12 bytes of scales, d.
    let d = half(&b[108..]);
    let s = &b[96..108];
    for (i, v) in v.iter_mut().enumerate() {
        let (part, within, sub) = (i / 128, i % 128, i / 16);
        let low = if sub < 8 { s[sub] & 15 } else { s[sub - 8] >> 4 };
        let scale = (low | (s[8 + sub % 4] >> (2 * (sub / 4)) & 3) << 4) as i32 - 32;
        let code = (b[32 + part * 32 + within % 32] >> (2 * (within / 32)) & 3) as i32;
        let high = b[within % 32] >> (i / 32) & 1;
        let q = code - if high == 0 { 4 } else { 0 };
        *v = d * scale as f32 * q as f32;
    }
});

/// The scale and the minimum of 32 elements, 6 bits each.
fn scale_min(s: &[u8], sub: usize) -> (u8, u8) {
    match sub < 4 {
        true => (s[sub] & 63, s[sub + 4] & 63),
        false => (s[sub + 4] & 15 | s[sub - 4] >> 6 << 4, s[sub + 4] >> 4 | s[sub] >> 6 << 4),
    }
}

pub(super) static Q4_K: BlockRow = row("q4_k", 12, 256, 144, |b, v| {
    let (d, dmin) = (half(b), half(&b[2..]));
    for sub in 0..8 {
        let (scale, min) = scale_min(&b[4..16], sub);
        let (d1, m1) = (d * f32::from(scale), dmin * f32::from(min));
        for i in 0..32 {
            let code = b[16 + sub / 2 * 32 + i] >> (4 * (sub % 2)) & 15;
            v[sub * 32 + i] = d1 * f32::from(code) - m1;
        }
    }
});
pub(super) static Q5_K: BlockRow = row("q5_k", 13, 256, 176, |b, v| {
    let (d, dmin) = (half(b), half(&b[2..]));
    for sub in 0..8 {
        let (scale, min) = scale_min(&b[4..16], sub);
        let (d1, m1) = (d * f32::from(scale), dmin * f32::from(min));
        for i in 0..32 {
            let low = b[48 + sub / 2 * 32 + i] >> (4 * (sub % 2)) & 15;
            let high = b[16 + i] >> sub & 1;
            v[sub * 32 + i] = d1 * f32::from(low | high << 4) - m1;
        }
    }
});
pub(super) static Q6_K: BlockRow = row("q6_k", 14, 256, 210, |b, v| {
    // 128 bytes of low bits, 64 bytes of high bits, 16 scales (i8), d.
    let d = half(&b[208..]);
    for (i, v) in v.iter_mut().enumerate() {
        let (part, within) = (i / 128, i % 128);
        let (quarter, at) = (within / 32, within % 32);
        let low = b[part * 64 + quarter % 2 * 32 + at] >> (4 * (quarter / 2)) & 15;
        let high = b[128 + part * 32 + at] >> (2 * quarter) & 3;
        let q = i32::from(low | high << 4) - 32;
        *v = d * f32::from(b[192 + i / 16] as i8) * q as f32;
    }
});

/// The values of the codes of `iq4_nl` and `iq4_xs`.
pub(crate) const IQ4_VALUES: [i8; 16] =
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

pub(super) static IQ4_NL: BlockRow = row("iq4_nl", 20, 32, 18, |b, v| {
    let d = half(b);
    for i in 0..16 {
        v[i] = d * f32::from(IQ4_VALUES[usize::from(b[2 + i] & 15)]);
        v[16 + i] = d * f32::from(IQ4_VALUES[usize::from(b[2 + i] >> 4)]);
    }
});
pub(super) static IQ4_XS: BlockRow = row("iq4_xs", 23, 256, 136, |b, v| {
    // d, 2 bytes of the scales' high bits, 4 bytes of their low bits, 128 bytes of codes.
    let d = half(b);
    let high = u16::from_le_bytes([b[2], b[3]]);
    for sub in 0..8 {
        let low = b[4 + sub / 2] >> (4 * (sub % 2)) & 15;
        let scale = i32::from(low) | i32::from(high >> (2 * sub) & 3) << 4;
        let d1 = d * (scale - 32) as f32;
        for i in 0..16 {
            let code = b[8 + sub * 16 + i];
            v[sub * 32 + i] = d1 * f32::from(IQ4_VALUES[usize::from(code & 15)]);
            v[sub * 32 + 16 + i] = d1 * f32::from(IQ4_VALUES[usize::from(code >> 4)]);
        }
    }
});

/// Twice the values of the codes of `mxfp4` (f4e2m1).
pub(crate) const MXFP4_VALUES: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// Half of `2^(e - 127)`.
pub(super) fn e8m0_half(e: u8) -> f32 {
    match e {
        0 => f32::from_bits(0x0020_0000),
        1 => f32::from_bits(0x0040_0000),
        e => f32::from_bits(u32::from(e - 1) << 23),
    }
}

pub(super) static MXFP4: BlockRow = row("mxfp4", 39, 32, 17, |b, v| {
    let d = e8m0_half(b[0]);
    for i in 0..16 {
        v[i] = d * f32::from(MXFP4_VALUES[usize::from(b[1 + i] & 15)]);
        v[16 + i] = d * f32::from(MXFP4_VALUES[usize::from(b[1 + i] >> 4)]);
    }
});
