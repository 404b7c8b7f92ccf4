//! Dropout for inference and training.

use super::{Row, row};
use crate::onnx::build::{Builder, Value};
use crate::onnx::node::Call;
use halcyon_ir::ScalarOp as S;
use halcyon_ir::{ConstData, DType, Result, Scalar, Shape};

pub(super) const ROWS: &[Row] =
    &[row("Dropout", 1, &["consumed_inputs", "is_test", "ratio", "seed"], dropout)];

/// Limit on the elements of a mask computed during import.
const MAX_MASK: usize = 1 << 24;

/// In inference the result is the operand and the mask is all ones. In training an element is kept with
/// probability `1 - ratio` and divided by that probability. Opset versions 7 to 11 only define inference.
fn dropout(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let x = c.arg(0)?;
    let (mut training, mut ratio) = (false, f64::from(c.float("ratio", 0.5)?));
    if c.opset < 7 {
        training = !c.flag("is_test", false)?;
    } else if c.opset >= 12 {
        if let Some(t) = c.opt(2) {
            training = b.known_scalar(t, "training_mode of Dropout")?.as_bool();
        }
        if let (true, Some(r)) = (training, c.opt(1)) {
            ratio = b.known_scalar(r, "the ratio of Dropout")?.as_f64();
        }
    }
    let masks = if c.opset < 10 { x.dtype() } else { DType::Bool };
    if !training || ratio == 0.0 {
        let all = if c.is_result_used(1) { Some(b.full(masks, x.shape(), Scalar::Bool(true))) } else { None };
        return Ok([x.clone()].into_iter().chain(all).collect());
    }
    if !x.dtype().is_float() || !(0.0..1.0).contains(&ratio) {
        return Err(c.invalid(format!("ratio {ratio} for {}: expected 0 <= ratio < 1 and floats", x.ty)));
    }
    let keep = mask(b, c, x.shape(), ratio)?;
    let (scale, zero) = (b.lit(x, 1.0 / (1.0 - ratio)), b.lit(x, 0.0));
    let y = b.scalar(S::Mul, &[x, &scale])?;
    let y = b.scalar(S::Select, &[&keep, &y, &zero])?;
    Ok(vec![y, b.cast(&keep, masks)?])
}

/// The mask of the elements that are kept. With a seed, it equals the mask of ONNX's reference
/// implementation: during import, a [`Twister`] draws a double for each element, and the element is kept if
/// the double is at least `ratio`. Without a seed, or if the shape is symbolic or large, the graph computes
/// the mask.
fn mask(b: &mut Builder, c: &Call<'_>, shape: &Shape, ratio: f64) -> Result<Value> {
    let seed = c.opt_int("seed")?;
    let n = shape.known().and_then(|d| d.iter().try_fold(1usize, |n, &k| n.checked_mul(k)));
    if let (Some(seed), Some(dims), Some(n)) = (seed, shape.known(), n.filter(|n| *n <= MAX_MASK)) {
        let mut r = Twister::new(seed as u32);
        let keep: Vec<bool> = (0..n).map(|_| r.uniform() >= ratio).collect();
        let id = b.g.constant(ConstData::from_slice(&dims, &keep)?);
        return Ok(b.value(id));
    }
    let seed = b.node_seed(c, seed.map(|s| s as u64));
    let u = b.random_uniform(DType::F32, shape, (0.0, 1.0), seed, 0)?;
    let least = b.lit(&u, ratio);
    b.scalar(S::Ge, &[&u, &least])
}

/// MT19937 (Matsumoto and Nishimura, "Mersenne twister", 1998), seeded by its authors' `init_genrand`.
struct Twister {
    state: [u32; 624],
    at: usize,
}

impl Twister {
    fn new(seed: u32) -> Twister {
        let mut state = [seed; 624];
        for i in 1..624 {
            let last = state[i - 1];
            state[i] = 1_812_433_253u32.wrapping_mul(last ^ (last >> 30)).wrapping_add(i as u32);
        }
        Twister { state, at: 624 }
    }

    fn next(&mut self) -> u32 {
        let s = &mut self.state;
        if self.at == 624 {
            for i in 0..624 {
                let y = (s[i] & 0x8000_0000) | (s[(i + 1) % 624] & 0x7fff_ffff);
                s[i] = s[(i + 397) % 624] ^ (y >> 1) ^ if y & 1 == 1 { 0x9908_b0df } else { 0 };
            }
            self.at = 0;
        }
        let mut y = s[self.at];
        self.at += 1;
        y ^= y >> 11;
        y ^= (y << 7) & 0x9d2c_5680;
        y ^= (y << 15) & 0xefc6_0000;
        y ^ (y >> 18)
    }

    /// Uniform on [0, 1) with 53 bits, as the authors' `genrand_res53`.
    fn uniform(&mut self) -> f64 {
        let (a, b) = (self.next() >> 5, self.next() >> 6);
        (f64::from(a) * 67_108_864.0 + f64::from(b)) / 9_007_199_254_740_992.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::onnx::test_models::*;

    #[test]
    fn mersenne_twister_gives_its_authors_numbers() {
        // The first and the 10,000th number for the seed 5489; the second is from the C++ standard (26.6.5).
        let mut r = Twister::new(5489);
        let v: Vec<u32> = (0..10_000).map(|_| r.next()).collect();
        assert_eq!((v[0], v[9_999]), (3_499_211_612, 4_123_659_995));
    }

    #[test]
    fn inference_passes_on_and_training_drops() {
        let x = t(&[4000], &[1f32; 4000]);
        let node = || node("Dropout", &["x", "w0", "w1"], &["y"]);
        let mode = |v: bool| [t(&[], &[0.25f32]), t(&[], &[v])];
        check(13, node(), &x, &mode(false), &[4000], &[1.0; 4000]);
        check(13, node(), &x, &[t(&[], &[0f32]), t(&[], &[true])], &[4000], &[1.0; 4000]);
        let drop = |n| run_one(13, n, &x, &mode(true)).to_vec::<f64>();
        for y in [drop(node()), drop(node().int("seed", 7))] {
            let kept = y.iter().filter(|v| **v != 0.0).count();
            assert!((2900..3100).contains(&kept), "{kept}");
            assert!(y.iter().all(|v| *v == 0.0 || (v - 4.0 / 3.0).abs() < 1e-6));
        }
        assert_ne!(drop(node().int("seed", 7)), drop(node().int("seed", 8)));
        assert_eq!(drop(node().int("seed", 7)), drop(node().int("seed", 7)));
        // Before opset version 7, the mode was an attribute, and training was the default.
        let old = |test| crate::onnx::test_models::node("Dropout", &["x"], &["y"]).int("is_test", test);
        check(6, old(1), &x, &[], &[4000], &[1.0; 4000]);
        assert!(run_one(6, old(0), &x, &[]).to_vec::<f64>().contains(&2.0));
        let bad = model(
            13,
            port("x", DType::F32, &["4"]),
            vec![node()],
            &[("w0", t(&[], &[1f32])), ("w1", t(&[], &[true]))],
        );
        assert!(matches!(import(bad), Err(halcyon_ir::Error::Argument { .. })));
    }
}
