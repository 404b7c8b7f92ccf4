//! The types of cached keys and values. In blocks of Q8_0 they are rounded to 8 bits when they are written,
//! and attention reads the blocks.
//!
//! A row of a state holds the bytes of a head's blocks, as GGUF files and llama.cpp store them: a factor in
//! f16, `d = largest / 127`, and 32 integers, `x / d` rounded to nearest, halves away from zero. Rounding,
//! decoding and attention compute each row for itself, so the bits of a result do not depend on other rows.

use super::Decoder;
use crate::spec::Mixer;
use halcyon::ir::error::{Error, Result};
use halcyon::{BlockType, DType, Tensor};
use std::fmt;

const FORMAT: BlockType = BlockType::Q8_0;

/// Elements of a block.
const BLOCK: usize = 32;

/// The types of cached keys and values: f32, f16, bf16, or u8 for blocks of Q8_0. With latent attention, keys
/// serve as values, and only their type counts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CacheTypes {
    pub keys: DType,
    pub values: DType,
}

/// One type for both.
impl From<DType> for CacheTypes {
    fn from(dtype: DType) -> CacheTypes {
        CacheTypes { keys: dtype, values: dtype }
    }
}

impl fmt::Display for CacheTypes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [keys, values] = [self.keys, self.values].map(cache_name);
        match keys == values {
            true => f.write_str(&keys),
            false => write!(f, "{keys} (keys) and {values} (values)"),
        }
    }
}

/// Columns of a state whose rows hold `size` numbers.
pub(super) fn columns(dtype: DType, size: usize) -> usize {
    match dtype {
        // `Decoder::check_cache` refuses sizes that are not whole blocks.
        DType::U8 => size.div_ceil(BLOCK).saturating_mul(FORMAT.row().bytes),
        _ => size,
    }
}

/// The name of a cache's type: `q8_0` for u8, otherwise that of the dtype.
pub fn cache_name(dtype: DType) -> String {
    if dtype == DType::U8 { FORMAT.name().into() } else { dtype.to_string() }
}

impl Decoder {
    /// Whether keys and values can be cached in these types. Recurrent layers keep their states in f32 with
    /// each of them.
    ///
    /// # Errors
    /// `Error::Argument` for another type; `Error::Unsupported` if the sizes of heads are not whole blocks.
    pub fn check_cache(&self, types: impl Into<CacheTypes>) -> Result<()> {
        let types = types.into();
        let kept = |d: &DType| matches!(d, DType::F32 | DType::F16 | DType::BF16 | DType::U8);
        if let Some(d) = [types.keys, types.values].into_iter().find(|d| !kept(d)) {
            let what = format!("a cache in {d}: expected f32, f16, bf16, or u8 for q8_0");
            return Err(Error::argument("engine", what));
        }
        for (i, layer) in self.spec.layers.iter().enumerate() {
            let Mixer::Attention(a) = &layer.mixer else { continue };
            let values = (a.value, if a.latent.is_some() { DType::F32 } else { types.values });
            let whole = |(n, d): &(usize, DType)| *d != DType::U8 || n.is_multiple_of(BLOCK);
            if let Some((size, _)) = [(a.key, types.keys), values].into_iter().find(|x| !whole(x)) {
                return Err(Error::unsupported(
                    format!(
                        "a cache in q8_0 for heads of size {size}, as layer {i} has, because a block has {BLOCK} numbers"
                    ),
                    "Use a cache in f16",
                ));
            }
        }
        Ok(())
    }
}

/// Rows `[n, size]` as the bytes of their blocks, u8 `[n, bytes]`.
pub(super) fn encoded(x: &Tensor, n: usize, size: usize) -> Tensor {
    let b = x.backend();
    let number = |v: f64| Tensor::scalar(b, v, DType::F32);
    let groups = size / BLOCK;
    let x = x.cast(DType::F32).reshape([n, groups, BLOCK]);
    let factor = x.abs().max(-1).reshape([n, groups, 1]) / 127.0;
    let zero = number(0.0);
    let inverse = factor.eq(&zero).select(&zero, &factor.recip());
    let scaled = x * inverse;
    // Halves are rounded away from zero. The fraction is exact.
    let size_of = scaled.abs();
    let whole = size_of.floor();
    let up = (size_of - &whole).ge(number(0.5)).cast(DType::F32);
    let code = (whole + up).minimum(number(127.0));
    let code = scaled.le(number(-0.5)).select(&(number(256.0) - &code), &code).cast(DType::U8);
    let bits = factor.cast(DType::F16).bitcast(DType::U16).cast(DType::I32);
    let part = Tensor::scalar(b, 256, DType::I32);
    let high = &bits / &part;
    let low = bits - &high * &part;
    let [low, high] = [low, high].map(|t| t.cast(DType::U8));
    Tensor::cat(&[&low, &high, &code], 2).reshape([n, groups * FORMAT.row().bytes])
}

#[cfg(test)]
mod tests {
    use super::*;
    use halcyon::{Backend, BackendType, Level};
    use halcyon_test::{Rng, devices};

    fn bytes(b: &Backend, x: &[f32], n: usize, size: usize) -> Vec<u8> {
        let t = Tensor::from_slice(b, [n, size], x).unwrap();
        encoded(&t, n, size).to_vec::<u8>().unwrap()
    }

    fn rows() -> Vec<f32> {
        let mut x = Rng::new(3).f32s(6 * 64);
        x[..32].fill(0.0);
        // Halves: the factor of this block is 1.
        x[32..64].copy_from_slice(&std::array::from_fn::<f32, 32, _>(|i| i as f32 - 15.5));
        x[40] = 127.0;
        x[64] = -1e4;
        x[130] = 3e-6;
        x
    }

    #[test]
    fn rows_become_the_blocks_of_the_format() {
        let x = rows();
        let mut want = vec![0u8; FORMAT.bytes_of(x.len()).unwrap()];
        FORMAT.encode(&x, &mut want);
        let cpu = Backend::new(BackendType::Cpu).unwrap();
        assert_eq!(bytes(&cpu, &x, 6, 64), want);
        for kind in [BackendType::OpenCl, BackendType::WebGpu] {
            let name = "rows_become_the_blocks_of_the_format";
            if devices::test_backends().contains(&kind)
                && let Some(b) = devices::open(name, kind, Level::O2)
            {
                // Division may round in another way there, which can move a number by one step.
                let mut y = vec![0f32; x.len()];
                FORMAT.decode(&bytes(&b, &x, 6, 64), &mut y);
                for (i, (x, y)) in x.chunks(BLOCK).zip(y.chunks(BLOCK)).enumerate() {
                    let step = x.iter().fold(0f32, |m, v| m.max(v.abs())) / 127.0;
                    let far = x.iter().zip(y).fold(0f32, |m, (x, y)| m.max((x - y).abs()));
                    assert!(far <= step * 0.6 + 1e-7, "block {i} on {}: {far} of {step}", b.id());
                }
            }
        }
    }
}
