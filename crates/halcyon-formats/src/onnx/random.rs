//! Random numbers, computed by nodes of the graph.
//!
//! The generator is counter-based: element `i` of a tensor is Threefry-2x32 with 20 rounds ([`S::Threefry`];
//! Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) of the counter `i` under a key. The
//! bits are therefore equal on every device and independent of the execution order, and every run of a graph
//! draws the same numbers.
//!
//! **Keys.** A draw has a `seed` and a `salt`. The seed belongs to the node ([`Builder::node_seed`]): the
//! bits of its `seed` attribute, else a hash of the node's name and of [`Builder::base_seed`]. If a node is
//! built several times (in the body of an unrolled loop), each instance has its own seed. The salt
//! distinguishes the draws of one node. The generator's key follows from both and is an argument of the
//! kernel, so changing the seed does not recompile kernels.
//!
//! **Period.** The counter has 32 bits; draws of more than 2³² elements are unsupported.

use super::build::{Builder, Value};
use super::host::Host;
use super::node::Call;
use halcyon_ir::ScalarOp as S;
use halcyon_ir::{DType, Error, Result, Scalar, Shape};

/// The finalizer of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
/// OOPSLA 2014).
fn mix(z: u64) -> u64 {
    let z = z.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// FNV-1a with 64 bits.
fn hash(text: &str) -> u64 {
    text.bytes().fold(0xCBF2_9CE4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01B3))
}

impl Builder {
    /// The seed of a node: `given` (the bits of its `seed` attribute), else derived from its name and
    /// [`Builder::base_seed`]. Each further call for the same node name returns another seed.
    pub fn node_seed(&mut self, c: &Call<'_>, given: Option<u64>) -> u64 {
        let turn = self.draws.entry(c.name.to_string()).or_insert(0);
        let seed = given.unwrap_or_else(|| mix(self.base_seed) ^ hash(c.name));
        let seed = if *turn == 0 { seed } else { mix(seed ^ mix(*turn)) };
        *turn += 1;
        seed
    }

    /// Like [`Builder::node_seed`], for operators whose `seed` attribute is a float.
    ///
    /// # Errors
    /// If the attribute is not a float.
    pub fn float_seed(&mut self, c: &Call<'_>) -> Result<u64> {
        let given = c.opt_float("seed")?.map(|s| u64::from(s.to_bits()));
        Ok(self.node_seed(c, given))
    }

    /// Uniformly distributed bits: a u32 tensor of `shape`.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for more than 2³² elements.
    pub fn random_bits(&mut self, shape: &Shape, seed: u64, salt: u32) -> Result<Value> {
        self.random_word(shape, seed, salt, 0)
    }

    /// Like [`Builder::random_bits`], for word number `word` of each element of the draw.
    fn random_word(&mut self, shape: &Shape, seed: u64, salt: u32, word: u32) -> Result<Value> {
        let known = shape.iter().try_fold(1u64, |n, d| n.checked_mul(d.known().unwrap_or(1) as u64));
        if known.is_none_or(|n| n > 1 << 32) {
            return Err(Error::unsupported(
                format!("{shape} random numbers in one tensor"),
                "Draw at most 2^32 elements at once",
            ));
        }
        let key = mix(seed ^ mix(u64::from(salt) << 32 | u64::from(word)));
        let half = |k: u64| Value::from(Host::scalar(DType::U32, Scalar::U(k & u64::from(u32::MAX))));
        let at = self.iota(DType::U32, shape.numel())?;
        let bits = self.scalar(S::Threefry, &[&half(key), &half(key >> 32), &at])?;
        self.reshape(&bits, shape)
    }

    /// Uniform in `[0, 1)`, in f32 (24 random bits) or f64 (53 random bits). Draws with the same seed and
    /// salt are independent if one has `pair` 0 and the other 1.
    fn random_unit(&mut self, wide: DType, shape: &Shape, seed: u64, salt: u32, pair: u32) -> Result<Value> {
        let top = self.random_word(shape, seed, salt, 2 * pair)?;
        let drop = |b: &mut Builder, v: &Value, n: u64| -> Result<Value> {
            let n = b.lit(v, Scalar::U(n));
            let v = b.scalar(S::Shr, &[v, &n])?;
            b.cast(&v, wide)
        };
        if wide != DType::F64 {
            let v = drop(self, &top, 8)?;
            return self.scaled_by(&v, (0.5f64).powi(24));
        }
        let low = self.random_word(shape, seed, salt, 2 * pair + 1)?;
        let (top, low) = (drop(self, &top, 5)?, drop(self, &low, 6)?);
        let top = self.scaled_by(&top, (0.5f64).powi(27))?;
        let low = self.scaled_by(&low, (0.5f64).powi(53))?;
        self.scalar(S::Add, &[&top, &low])
    }

    fn scaled_by(&mut self, x: &Value, k: f64) -> Result<Value> {
        let k = self.lit(x, k);
        self.scalar(S::Mul, &[x, &k])
    }

    /// Uniform between `lo` and `hi`: `lo + u * (hi - lo)` with `u` in `[0, 1)`, computed in f32, or in f64
    /// for a result in f64. Rounding can give `hi` itself, but not for the bounds 0 and 1 in f32 and f64.
    ///
    /// # Errors
    /// [`Error::DType`] for a type that is not a float; [`Error::Argument`] if `hi - lo` is not finite in the
    /// type of the computation; the errors of [`Builder::random_bits`].
    pub fn random_uniform(
        &mut self,
        dtype: DType,
        shape: &Shape,
        (lo, hi): (f64, f64),
        seed: u64,
        salt: u32,
    ) -> Result<Value> {
        let wide = self.float_of(dtype)?;
        let span = Scalar::F(hi - lo).cast(wide).as_f64();
        if !span.is_finite() {
            return Err(Error::argument(
                "random_uniform",
                format!("the range from {lo} to {hi} is too large"),
            )
            .at(&self.g.span));
        }
        let mut v = self.random_unit(wide, shape, seed, salt, 0)?;
        if (lo, hi) != (0.0, 1.0) {
            let lo = self.lit(&v, lo);
            v = self.scaled_by(&v, span)?;
            v = self.scalar(S::Add, &[&v, &lo])?;
        }
        self.cast(&v, dtype)
    }

    /// Normally distributed with the given mean and standard deviation, by the method of Box and Muller ("A
    /// note on the generation of random normal deviates", 1958): `mean + scale * sqrt(-2 ln u) * cos(2π v)`.
    /// Computed in f32, which reaches 6.7 standard deviations, or in f64.
    ///
    /// # Errors
    /// The errors of [`Builder::random_uniform`].
    pub fn random_normal(
        &mut self,
        dtype: DType,
        shape: &Shape,
        (mean, scale): (f64, f64),
        seed: u64,
        salt: u32,
    ) -> Result<Value> {
        let wide = self.float_of(dtype)?;
        // u is in (0, 1]. The logarithm needs fine resolution near zero, so in f32 u is made from all 32
        // bits.
        let u = if wide == DType::F64 {
            let u = self.random_unit(wide, shape, seed, salt, 0)?;
            let one = self.lit(&u, 1.0);
            self.scalar(S::Sub, &[&one, &u])?
        } else {
            let bits = self.random_word(shape, seed, salt, 0)?;
            let bits = self.cast(&bits, wide)?;
            let (k, half) = (self.lit(&bits, (0.5f64).powi(32)), self.lit(&bits, (0.5f64).powi(33)));
            let u = self.scalar(S::Mul, &[&bits, &k])?;
            self.scalar(S::Add, &[&u, &half])?
        };
        let v = self.random_unit(wide, shape, seed, salt, 1)?;
        let l = self.scalar(S::Log, &[&u])?;
        let l = self.scaled_by(&l, -2.0)?;
        let r = self.scalar(S::Sqrt, &[&l])?;
        let a = self.scaled_by(&v, std::f64::consts::TAU)?;
        let c = self.scalar(S::Cos, &[&a])?;
        let z = self.scalar(S::Mul, &[&r, &c])?;
        let mean = self.lit(&z, mean);
        let z = self.scaled_by(&z, scale)?;
        let z = self.scalar(S::Add, &[&z, &mean])?;
        self.cast(&z, dtype)
    }

    /// The type to draw numbers of type `dtype` in: f32, or f64 for f64.
    fn float_of(&self, dtype: DType) -> Result<DType> {
        match dtype {
            DType::F64 => Ok(DType::F64),
            d if d.is_float() => Ok(DType::F32),
            dtype => Err(Error::DType {
                op: "random".into(),
                dtype,
                want: "a float type is needed".into(),
                at: self.g.span.clone(),
            }),
        }
    }
}

#[cfg(test)]
#[path = "random_tests.rs"]
mod tests;
