//! The rows of the formats that are decoded when they are loaded, and their decoders.

use super::formats::half;
use super::{BlockRow, block_row, codebooks};

block_row!(IQ2_XXS, "iq2_xxs", 16, 256, 66, iq2_xxs);
block_row!(IQ2_XS, "iq2_xs", 17, 256, 74, iq2_xs);
block_row!(IQ3_XXS, "iq3_xxs", 18, 256, 98, iq3_xxs);
block_row!(IQ1_S, "iq1_s", 19, 256, 50, iq1_s);
block_row!(IQ3_S, "iq3_s", 21, 256, 110, iq3_s);
block_row!(IQ2_S, "iq2_s", 22, 256, 82, iq2_s);
block_row!(IQ1_M, "iq1_m", 29, 256, 56, iq1_m);
block_row!(TQ1_0, "tq1_0", 34, 256, 54, tq1_0);
block_row!(TQ2_0, "tq2_0", 35, 256, 66, tq2_0);

/// The values of codes of 2 bits in the codebooks of the iq2 formats. No entry has code 3.
const IQ2_VALUES: [f32; 4] = [8.0, 25.0, 43.0, 0.0];
/// The values of codes of 3 bits in the codebook of `iq3_xxs`.
const IQ3_XXS_VALUES: [f32; 8] = [4.0, 12.0, 20.0, 28.0, 36.0, 44.0, 52.0, 62.0];
/// The values of codes of 3 bits in the codebook of `iq3_s`.
const IQ3_S_VALUES: [f32; 8] = [1.0, 3.0, 5.0, 7.0, 9.0, 11.0, 13.0, 15.0];
/// What `iq1_s` and `iq1_m` add to the values -1, 0 and 1, or subtract.
const IQ1_DELTA: f32 = 0.125;

fn u16_at(b: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([b[at], b[at + 1]])
}

fn u32_at(b: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]])
}

/// The half of byte `i / 2` that belongs to `i`: the low half first.
fn nibble(b: &[u8], i: usize) -> u8 {
    b[i / 2] >> (i % 2 * 4) & 15
}

/// The signs of 8 elements from 7 bits. The eighth is such that the number of negative ones is even.
fn even_signs(bits: u32) -> u8 {
    let seven = (bits & 127) as u8;
    seven | ((seven.count_ones() as u8 & 1) << 7)
}

/// `v` with the other sign if bit `i` is set.
fn signed(v: f32, signs: u8, i: usize) -> f32 {
    if signs >> i & 1 == 0 { v } else { -v }
}

/// 8 elements from an entry of a codebook of an iq2 format.
fn grid_of_eight(entry: u16, d: f32, signs: u8, v: &mut [f32]) {
    for (i, v) in v.iter_mut().enumerate() {
        *v = signed(d * IQ2_VALUES[usize::from(entry >> (2 * i) & 3)], signs, i);
    }
}

/// 4 elements from an entry of a codebook of an iq3 format, with 4 of 8 signs.
fn grid_of_four(entry: u16, values: &[f32; 8], d: f32, signs: u8, v: &mut [f32]) {
    for (i, v) in v.iter_mut().enumerate() {
        *v = signed(d * values[usize::from(entry >> (4 * i) & 7)], signs, i);
    }
}

/// 8 elements from an entry of the codebook of the iq1 formats.
fn grid_of_three_values(entry: u16, d: f32, minus: bool, v: &mut [f32]) {
    let delta = if minus { -IQ1_DELTA } else { IQ1_DELTA };
    for (i, v) in v.iter_mut().enumerate() {
        *v = d * (f32::from(entry >> (2 * i) & 3) - 1.0 + delta);
    }
}

fn iq2_xxs(b: &[u8; 66], v: &mut [f32; 256]) {
    let d = half(b, 0);
    for (g, v) in v.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let group = 2 + g / 4 * 8;
        let rest = u32_at(b, group + 4);
        let scale = d * (0.5 + (rest >> 28) as f32) * 0.25;
        let entry = codebooks::IQ2_XXS[usize::from(b[group + g % 4])];
        grid_of_eight(entry, scale, even_signs(rest >> (g % 4 * 7)), v);
    }
}

fn iq2_xs(b: &[u8; 74], v: &mut [f32; 256]) {
    let d = half(b, 0);
    for (g, v) in v.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let code = u16_at(b, 2 + 2 * g);
        let scale = d * (0.5 + f32::from(nibble(&b[66..], g / 2))) * 0.25;
        grid_of_eight(codebooks::IQ2_XS[usize::from(code & 511)], scale, even_signs(u32::from(code >> 9)), v);
    }
}

fn iq2_s(b: &[u8; 82], v: &mut [f32; 256]) {
    let d = half(b, 0);
    for (g, v) in v.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let high = usize::from(b[66 + g / 4] >> (g % 4 * 2) & 3);
        let scale = d * (0.5 + f32::from(nibble(&b[74..], g / 2))) * 0.25;
        grid_of_eight(codebooks::IQ2_S[usize::from(b[2 + g]) | high << 8], scale, b[34 + g], v);
    }
}

fn iq3_xxs(b: &[u8; 98], v: &mut [f32; 256]) {
    let d = half(b, 0);
    for (g, v) in v.as_chunks_mut::<4>().0.iter_mut().enumerate() {
        let rest = u32_at(b, 66 + g / 8 * 4);
        let scale = d * (0.5 + (rest >> 28) as f32) * 0.5;
        let signs = even_signs(rest >> (g % 8 / 2 * 7)) >> (g % 2 * 4);
        grid_of_four(codebooks::IQ3_XXS[usize::from(b[2 + g])], &IQ3_XXS_VALUES, scale, signs, v);
    }
}

fn iq3_s(b: &[u8; 110], v: &mut [f32; 256]) {
    let d = half(b, 0);
    for (g, v) in v.as_chunks_mut::<4>().0.iter_mut().enumerate() {
        let high = usize::from(b[66 + g / 8] >> (g % 8) & 1);
        let scale = d * f32::from(1 + 2 * nibble(&b[106..], g / 8));
        let entry = codebooks::IQ3_S[usize::from(b[2 + g]) | high << 8];
        grid_of_four(entry, &IQ3_S_VALUES, scale, b[74 + g / 2] >> (g % 2 * 4), v);
    }
}

fn iq1_s(b: &[u8; 50], v: &mut [f32; 256]) {
    let d = half(b, 0);
    for (g, v) in v.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let rest = u16_at(b, 34 + g / 4 * 2);
        let index = u16::from(b[2 + g]) | (rest >> (g % 4 * 3) & 7) << 8;
        let scale = d * f32::from(2 * (rest >> 12 & 7) + 1);
        grid_of_three_values(codebooks::IQ1[usize::from(index)], scale, rest >> 15 == 1, v);
    }
}

fn iq1_m(b: &[u8; 56], v: &mut [f32; 256]) {
    let scales = &b[48..];
    let d = (0..4).fold(0, |d, i| d | u16_at(scales, 2 * i) >> 12 << (4 * i));
    let d = half(&d.to_le_bytes(), 0);
    for (g, v) in v.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let rest = nibble(&b[32..], g);
        let index = usize::from(b[g]) | usize::from(rest & 7) << 8;
        let scale = u16_at(scales, g / 8 * 2) >> (g / 2 % 4 * 3) & 7;
        grid_of_three_values(codebooks::IQ1[index], d * f32::from(2 * scale + 1), rest >> 3 == 1, v);
    }
}

fn tq1_0(b: &[u8; 54], v: &mut [f32; 256]) {
    let d = half(b, 52);
    // The first byte, the number of bytes, and the number of elements in each.
    let mut done = 0;
    for (at, bytes, digits) in [(0, 32, 5), (32, 16, 5), (48, 4, 4)] {
        let mut power = 1u8;
        for _ in 0..digits {
            for i in 0..bytes {
                // A byte is a fraction of 256. A product with a power of three moves the next digit to the
                // top.
                let digit = (u16::from(b[at + i].wrapping_mul(power)) * 3) >> 8;
                v[done + i] = d * (f32::from(digit) - 1.0);
            }
            done += bytes;
            power = power.wrapping_mul(3);
        }
    }
}

fn tq2_0(b: &[u8; 66], v: &mut [f32; 256]) {
    let d = half(b, 64);
    for (row, v) in v.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        for i in 0..32 {
            let code = b[row / 4 * 32 + i] >> (row % 4 * 2) & 3;
            v[i] = d * (f32::from(code) - 1.0);
        }
    }
}
