//! Random tensors. The bits of element `i` are Threefry-2x32 with 20 rounds ([`ScalarOp::Threefry`]) of
//! counter `i` with the seed as key. So a draw has the same bits on every device. The seed is a run-time
//! argument, so a new seed needs no new kernel.

use crate::backend::Backend;
use crate::tensor::Tensor;
use halcyon_ir::dtype::{DType, Scalar};
use halcyon_ir::error::{Error, Result};
use halcyon_ir::graph::Graph;
use halcyon_ir::shape::Shape;
use halcyon_ir::{NodeId, ScalarOp};
use std::panic::Location;

/// The two halves of a key: u32 of rank 0, the low one first.
type Key = [NodeId; 2];

/// The key of a seed, as literals.
fn key_of(g: &mut Graph, seed: u64) -> Key {
    [seed, seed >> 32].map(|k| g.full(DType::U32, Shape::scalar(), Scalar::U(k & u32::MAX as u64)))
}

/// 32 random bits per element. A draw that needs more bits uses further values of `word`.
fn bits(g: &mut Graph, shape: &Shape, [low, high]: Key, word: u64) -> Result<NodeId> {
    let n = shape.dims()?.iter().try_fold(1u64, |n, d| n.checked_mul(*d as u64));
    let n = n.filter(|n| *n <= 1 << 32).ok_or_else(|| {
        let what = format!("{shape} random numbers in one tensor");
        Error::unsupported(what, "Draw at most 2^32 elements at once")
    })?;
    // Each word has its own key. Keys may differ in few bits, because the generator is designed for that.
    let high = match word {
        0 => high,
        _ => {
            let by = g.lit(high, Scalar::U(word));
            g.add(high, by)?
        }
    };
    let at = g.iota(DType::U32, [n as usize], 0)?;
    let b = g.scalar(ScalarOp::Threefry, &[low, high, at])?;
    g.reshape(b, shape)
}

fn scaled(g: &mut Graph, x: NodeId, by: f64) -> Result<NodeId> {
    let k = g.lit(x, by);
    g.mul(x, k)
}

/// Random bits of a uniform f32.
const DIGITS: u32 = 24;

/// Random bits of a uniform value of this type: those of its significand, at most 24. With more bits, values
/// near 1 would round to 1.
fn digits(dtype: DType) -> u32 {
    let largest = |p: u32| 1.0 - 0.5f64.powi(p as i32);
    let exact = |p: &u32| Scalar::F(largest(*p)).cast(dtype).as_f64() == largest(*p);
    (1..=DIGITS).rev().find(exact).unwrap_or(DIGITS)
}

/// Uniform in `[0, 1)`: f32 with this many random bits.
fn unit(g: &mut Graph, shape: &Shape, key: Key, word: u64, digits: u32) -> Result<NodeId> {
    let b = bits(g, shape, key, word)?;
    let by = g.lit(b, Scalar::U(u64::from(32 - digits)));
    let b = g.scalar(ScalarOp::Shr, &[b, by])?;
    let b = g.cast(b, DType::F32)?;
    scaled(g, b, 0.5f64.powi(digits as i32))
}

/// Standard normal in f32, by the Box-Muller transform ("A note on the generation of random normal deviates",
/// 1958).
fn normal(g: &mut Graph, shape: &Shape, key: Key) -> Result<NodeId> {
    // Map to (0, 1], because the logarithm needs fine steps near zero, and f32 has its finest steps there.
    let b = bits(g, shape, key, 0)?;
    let b = g.cast(b, DType::F32)?;
    let u = scaled(g, b, (0.5f64).powi(32))?;
    let least = g.lit(u, (0.5f64).powi(33));
    let u = g.add(u, least)?;
    let l = g.log(u)?;
    let l = scaled(g, l, -2.0)?;
    let r = g.sqrt(l)?;
    let v = unit(g, shape, key, 1, DIGITS)?;
    let a = scaled(g, v, std::f64::consts::TAU)?;
    let c = g.cos(a)?;
    g.mul(r, c)
}

impl Tensor {
    #[track_caller]
    fn draw(
        backend: &Backend,
        shape: impl Into<Shape>,
        dtype: DType,
        f: impl FnOnce(&mut Graph, &Shape) -> Result<NodeId>,
    ) -> Tensor {
        let shape = shape.into();
        Tensor::build_on(backend, &[], Location::caller(), |g, _| {
            if !dtype.is_float() {
                let want = "a float type; to get integers, draw floats and cast them".into();
                return Err(Error::DType { op: "random".into(), dtype, want, at: Default::default() });
            }
            let x = f(g, &shape)?;
            g.cast(x, dtype)
        })
    }

    /// Uniform in `[0, 1)`: multiples of 2^-24 in f32 and f64, of 2^-11 in f16, and of 2^-8 in bf16. The same
    /// seed gives the same numbers.
    #[track_caller]
    pub fn rand(backend: &Backend, shape: impl Into<Shape>, dtype: DType, seed: u64) -> Tensor {
        Tensor::draw(backend, shape, dtype, |g, s| {
            let key = key_of(g, seed);
            unit(g, s, key, 0, digits(dtype))
        })
    }

    /// Standard normal, drawn in f32 (at most 6.8 standard deviations) and cast to `dtype`. The same seed
    /// gives the same numbers.
    #[track_caller]
    pub fn randn(backend: &Backend, shape: impl Into<Shape>, dtype: DType, seed: u64) -> Tensor {
        Tensor::draw(backend, shape, dtype, |g, s| {
            let key = key_of(g, seed);
            normal(g, s, key)
        })
    }

    /// Uniform in `[0, 1)` in f32, like [`Tensor::rand`] with the seed `key[0] + (key[1] << 32)`. The halves
    /// of the key are tensors, u32 of rank 0, so a compiled function can get them as arguments.
    #[track_caller]
    pub fn rand_by_key(key: [&Tensor; 2], shape: impl Into<Shape>) -> Tensor {
        let shape = shape.into();
        Tensor::build(&key, |g, x| match *x {
            [low, high] => unit(g, &shape, [low, high], 0, DIGITS),
            _ => Err(Error::internal("a key has two halves")),
        })
    }

    /// Standard normal in f32, like [`Tensor::randn`] with the seed `key[0] + (key[1] << 32)`.
    #[track_caller]
    pub fn randn_by_key(key: [&Tensor; 2], shape: impl Into<Shape>) -> Tensor {
        let shape = shape.into();
        Tensor::build(&key, |g, x| match *x {
            [low, high] => normal(g, &shape, [low, high]),
            _ => Err(Error::internal("a key has two halves")),
        })
    }
}

impl Backend {
    /// Uniform in `[0, 1)`. Every call uses the next seed, like [`Backend::randn`].
    #[track_caller]
    pub fn rand(&self, shape: impl Into<Shape>, dtype: DType) -> Tensor {
        Tensor::rand(self, shape, dtype, self.next_seed())
    }

    /// Standard normal. Every call uses the next seed, so a program that makes the same calls in the same
    /// order gets the same numbers; see [`Backend::manual_seed`].
    #[track_caller]
    pub fn randn(&self, shape: impl Into<Shape>, dtype: DType) -> Tensor {
        Tensor::randn(self, shape, dtype, self.next_seed())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uniform_numbers_are_below_one_in_every_type() {
        assert_eq!([DType::F64, DType::F32, DType::F16, DType::BF16].map(digits), [24, 24, 11, 8]);
        let b = Backend::cpu().unwrap();
        for (dtype, largest) in [(DType::BF16, 1.0 - 1.0 / 256.0), (DType::F16, 1.0 - 1.0 / 2048.0)] {
            let v = Tensor::rand(&b, [1 << 16], dtype, 7).cast(DType::F32).to_vec::<f32>().unwrap();
            let (low, high) = v.iter().fold((1f32, 0f32), |(l, h), v| (l.min(*v), h.max(*v)));
            assert_eq!((low, high), (0.0, largest), "{dtype}");
            let mean = v.iter().sum::<f32>() / v.len() as f32;
            assert!((mean - 0.5).abs() < 0.01, "{dtype}: {mean}");
        }
    }
}
