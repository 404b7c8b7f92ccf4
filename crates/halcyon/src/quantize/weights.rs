//! Rounds weights to integers.

use halcyon_ir::error::Result;
use halcyon_ir::ops::quantize::{MIDDLE, WEIGHT_BLOCK};
use halcyon_ir::{ConstData, DType};
use std::sync::Arc;

/// Weights in i8, with one scale per channel.
pub(super) struct Int8Weights {
    pub codes: ConstData,
    /// `[channels]` in f32.
    pub scales: ConstData,
}

/// Rounds weights to integers of `bits` bits with one scale per index of axis `axis`: the largest magnitude
/// of the channel becomes the largest integer.
pub(super) fn int8(values: &[f32], dims: &[usize], axis: usize, bits: u32) -> Result<Int8Weights> {
    let (channels, inner) = (dims[axis], dims[axis + 1..].iter().product::<usize>().max(1));
    // 7 bits: the magnitudes of two weights add up to at most 128.
    let most = if bits == 7 { 64.0 } else { 127.0 };
    let mut largest = vec![0f32; channels];
    for (i, v) in values.iter().enumerate() {
        let c = i / inner % channels;
        largest[c] = largest[c].max(v.abs());
    }
    let scales: Vec<f32> = largest.iter().map(|m| if *m > 0.0 { m / most } else { 1.0 }).collect();
    let code = |(i, v): (usize, &f32)| {
        let s = scales[i / inner % channels];
        (v / s).round_ties_even().clamp(-most, most) as i8 as u8
    };
    let codes: Vec<u8> = values.iter().enumerate().map(code).collect();
    Ok(Int8Weights {
        codes: ConstData::new(DType::I8, dims, Arc::new(codes))?,
        scales: ConstData::from_slice(&[channels], &scales)?,
    })
}

/// Weights of 4 bits in blocks, as [`halcyon_ir::Graph::quantized_matmul`] reads them.
pub(super) struct Int4Weights {
    pub codes: ConstData,
    pub scales: ConstData,
    pub minima: Option<ConstData>,
}

/// The scale and the minimum of a block, and its codes.
fn block(values: &[f32; WEIGHT_BLOCK], minimum: bool) -> (f32, f32, [u8; WEIGHT_BLOCK]) {
    let code = |v: f32| v.round_ties_even().clamp(0.0, 15.0) as u8;
    if minimum {
        let low = values.iter().fold(0f32, |a, v| a.min(*v));
        let high = values.iter().fold(0f32, |a, v| a.max(*v));
        let scale = (high - low) / 15.0;
        if scale <= 0.0 {
            return (1.0, 0.0, [0; WEIGHT_BLOCK]);
        }
        // A whole number of steps, so that 0 is a code (and an integer zero point in ONNX).
        let zero = (-low / scale).round_ties_even().clamp(0.0, 15.0);
        return (scale, -zero * scale, values.map(|v| code(v / scale + zero)));
    }
    // The value of the largest magnitude becomes -8, so that all 16 codes are used.
    let top = values.iter().fold(0f32, |a, v| if v.abs() > a.abs() { *v } else { a });
    if top == 0.0 {
        return (1.0, 0.0, [MIDDLE as u8; WEIGHT_BLOCK]);
    }
    let scale = top / -(MIDDLE as f32);
    (scale, 0.0, values.map(|v| code(v / scale + MIDDLE as f32)))
}

/// Rounds the weights `[k, n]` of a product to 4 bits; `k` is a multiple of 32.
pub(super) fn int4(values: &[f32], [k, n]: [usize; 2], minimum: bool) -> Result<Int4Weights> {
    let blocks = k / WEIGHT_BLOCK;
    let (mut codes, mut scales, mut minima) =
        (Vec::with_capacity(n * k / 2), Vec::with_capacity(n * blocks), Vec::with_capacity(n * blocks));
    for column in 0..n {
        for b in 0..blocks {
            let own: [f32; WEIGHT_BLOCK] =
                std::array::from_fn(|i| values[(b * WEIGHT_BLOCK + i) * n + column]);
            let (scale, low, c) = block(&own, minimum);
            scales.push(scale);
            minima.push(low);
            codes.extend(c.as_chunks::<2>().0.iter().map(|[a, b]| a | b << 4));
        }
    }
    let dims = [n, blocks];
    Ok(Int4Weights {
        codes: ConstData::new(DType::U8, &[n, k / 2], Arc::new(codes))?,
        scales: ConstData::from_slice(&dims, &scales)?,
        minima: if minimum { Some(ConstData::from_slice(&dims, &minima)?) } else { None },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(n: usize, seed: u64) -> Vec<f32> {
        let mut s = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut next = || {
            s ^= s << 13;
            s ^= s >> 7;
            s ^= s << 17;
            (s >> 40) as f32 / (1u64 << 23) as f32 - 1.0
        };
        (0..n).map(|_| next() * 3.0 + 0.25).collect()
    }

    #[test]
    fn int8_rounds_to_half_a_step_of_its_channel() {
        for (axis, bits) in [(0, 8), (1, 8), (1, 7)] {
            let dims = [6, 40];
            let v = values(240, 1 + axis as u64);
            let w = int8(&v, &dims, axis, bits).unwrap();
            let (codes, scales) = (w.codes.to_vec::<i8>(), w.scales.to_vec::<f32>());
            assert_eq!(scales.len(), dims[axis]);
            for (i, v) in v.iter().enumerate() {
                let s = scales[if axis == 0 { i / 40 } else { i % 40 }];
                assert!((f32::from(codes[i]) * s - v).abs() <= 0.5001 * s, "{v}");
            }
            let most = codes.iter().map(|c| c.unsigned_abs()).max();
            assert_eq!(most, Some(if bits == 7 { 64 } else { 127 }));
        }
        let zeros = int8(&[0.0; 8], &[2, 4], 0, 8).unwrap();
        assert!(zeros.codes.to_vec::<i8>().iter().all(|c| *c == 0));
    }

    #[test]
    fn int4_rounds_to_about_half_a_step_of_its_block() {
        let (k, n) = (64, 5);
        let v = values(k * n, 9);
        for minimum in [false, true] {
            let w = int4(&v, [k, n], minimum).unwrap();
            let codes = w.codes.bytes();
            let scales = w.scales.to_vec::<f32>();
            let minima = w.minima.map(|m| m.to_vec::<f32>());
            for column in 0..n {
                for i in 0..k {
                    let byte = codes[(column * k + i) / 2];
                    let code = f32::from(if i % 2 == 0 { byte & 15 } else { byte >> 4 });
                    let b = column * (k / 32) + i / 32;
                    let got = match &minima {
                        Some(m) => code * scales[b] + m[b],
                        None => (code - 8.0) * scales[b],
                    };
                    let want = v[i * n + column];
                    // An end of the range may be one step short: the symmetric form has no code 16, and the
                    // minimum is a whole number of steps.
                    let bound = 1.001 * scales[b].abs();
                    assert!((got - want).abs() <= bound, "{got} for {want}, minimum {minimum}");
                }
            }
        }
    }
}
