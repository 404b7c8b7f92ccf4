//! Random numbers for test operands.

use std::hash::{BuildHasher, Hasher, RandomState};

/// A small generator (xorshift64*, Vigna 2016). The same seed gives the same numbers on every machine.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    pub fn new(seed: u64) -> Rng {
        Rng(seed | 1)
    }

    /// Returns a seed that differs from run to run.
    pub fn fresh_seed() -> u64 {
        // The keys of the standard library's hasher come from the system's random numbers. The shift makes
        // the seed short enough to type.
        RandomState::new().build_hasher().finish() >> 24
    }

    /// 64 random bits.
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    /// An integer in `[0, n)`.
    pub fn below(&mut self, n: usize) -> usize {
        ((self.next() >> 32) as usize) % n.max(1)
    }

    /// A float in `[lo, hi)`.
    pub fn uniform(&mut self, lo: f64, hi: f64) -> f64 {
        lo + (self.next() >> 11) as f64 / (1u64 << 53) as f64 * (hi - lo)
    }

    /// `n` floats in `[-1, 1)`.
    pub fn f32s(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.uniform(-1.0, 1.0) as f32).collect()
    }
}
