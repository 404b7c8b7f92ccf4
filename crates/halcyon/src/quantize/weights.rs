//! Rounds weights to integers.

use halcyon_ir::error::Result;
use halcyon_ir::ops::quantize::{MIDDLE, WEIGHT_BLOCK};
use halcyon_ir::{ConstData, DType};
use std::sync::Arc;

/// Weights in i8 or i16, with one scale per channel.
pub(super) struct IntegerWeights {
    pub codes: ConstData,
    /// `[channels]` in f32.
    pub scales: ConstData,
}

/// Rounds weights to integers from -127 to 127, or from -64 to 64 if `bits` is 7, with one scale per index of
/// axis `axis`: the largest magnitude of the channel becomes the largest integer.
pub(super) fn int8(values: &[f32], dims: &[usize], axis: usize, bits: u32) -> Result<IntegerWeights> {
    let (channels, inner) = (dims[axis], dims[axis + 1..].iter().product::<usize>().max(1));
    // With 7 bits, the magnitudes of two weights add up to at most 128.
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
    Ok(IntegerWeights {
        codes: ConstData::new(DType::I8, dims, Arc::new(codes))?,
        scales: ConstData::from_slice(&[channels], &scales)?,
    })
}

/// The largest sum that i32 holds.
const MAX_SUM: f64 = i32::MAX as f64;

/// The largest magnitude of i16 activations of a product that sums `k` terms: a power of two, or 32767. The
/// sums must fit i32, which limits the number of bits of an activation and a weight together. Activations get
/// two bits more than weights, because the largest magnitude of activations is further from their other
/// magnitudes. The weights of a channel are assumed to have a mean magnitude of a quarter of the largest.
pub(super) fn activation_limit(k: usize) -> i64 {
    let product = MAX_SUM / (0.25 * k.max(1) as f64);
    let limit = (2.0 * product.sqrt()).log2().floor().exp2();
    limit.clamp(1.0, f64::from(i16::MAX)) as i64
}

/// Rounds the weights `[k, n]` of a product to i16 with one scale per column. The scale of a column is the
/// smallest with which the weights fit i16 and the column's sum of products with activations of magnitude
/// `limit` fits i32.
pub(super) fn int16(values: &[f32], [k, n]: [usize; 2], limit: i64) -> Result<IntegerWeights> {
    // Rounding adds at most half a step to each weight.
    let most_sum = MAX_SUM / limit as f64 - 0.5 * k as f64;
    let (mut largest, mut total) = (vec![0f64; n], vec![0f64; n]);
    for (i, v) in values.iter().enumerate() {
        let v = f64::from(v.abs());
        largest[i % n] = largest[i % n].max(v);
        total[i % n] += v;
    }
    let scale = |(m, t): (&f64, &f64)| match *m > 0.0 {
        true => ((t / most_sum.max(1.0)).max(m / f64::from(i16::MAX)) as f32).max(f32::MIN_POSITIVE),
        false => 1.0,
    };
    let scales: Vec<f32> = largest.iter().zip(&total).map(scale).collect();
    // The rounding of the scale to f32 can still make a sum too large. Then the last weights of the column
    // are clamped.
    let mut left = vec![(MAX_SUM / limit as f64) as i64; n];
    let code = |(i, v): (usize, &f32)| {
        let left = &mut left[i % n];
        let most = (*left).min(i64::from(i16::MAX)) as f32;
        let c = (v / scales[i % n]).round_ties_even().clamp(-most, most);
        *left -= c.abs() as i64;
        (c as i16).to_le_bytes()
    };
    let codes: Vec<u8> = values.iter().enumerate().flat_map(code).collect();
    Ok(IntegerWeights {
        codes: ConstData::new(DType::I16, &[k, n], Arc::new(codes))?,
        scales: ConstData::from_slice(&[n], &scales)?,
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
        // The minimum is an integer multiple of the scale, so that 0 has an exact code (and an integer zero
        // point in ONNX).
        let zero = (-low / scale).round_ties_even().clamp(0.0, 15.0);
        return (scale, -zero * scale, values.map(|v| code(v / scale + zero)));
    }
    // The value with the largest magnitude gets the number -8, so that all 16 codes can be used.
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
    fn sums_of_int16_products_fit_i32() {
        for (k, n, spread) in [(384, 7, 1.0), (1536, 5, 1.0), (9, 3, 1.0), (4096, 2, 0.0)] {
            // With `spread` 0 all weights are equal, which is the worst case for sums.
            let v: Vec<f32> = values(k * n, 3).iter().map(|v| 0.7 + spread * (v - 0.7)).collect();
            let limit = activation_limit(k);
            let w = int16(&v, [k, n], limit).unwrap();
            let (codes, scales) = (w.codes.to_vec::<i16>(), w.scales.to_vec::<f32>());
            for column in 0..n {
                let sum: i64 = (0..k).map(|i| i64::from(codes[i * n + column]).abs()).sum();
                assert!(sum * limit <= i64::from(i32::MAX), "{k}: {sum} times {limit}");
                let most = (0..k).map(|i| codes[i * n + column].unsigned_abs()).max().unwrap();
                assert!(most >= 128 || spread == 0.0, "{k}: only {most} steps");
                for i in 0..k {
                    let (s, v) = (scales[column], v[i * n + column]);
                    assert!((f32::from(codes[i * n + column]) * s - v).abs() <= 0.51 * s, "{v}");
                }
            }
        }
        assert_eq!([1, 384, 1536].map(activation_limit), [32767, 8192, 4096]);
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
                    // The error at the ends of the range can be a whole step: the symmetric form has no code
                    // 16, and the minimum is rounded to a multiple of the scale.
                    let bound = 1.001 * scales[b].abs();
                    assert!((got - want).abs() <= bound, "{got} for {want}, minimum {minimum}");
                }
            }
        }
    }
}
