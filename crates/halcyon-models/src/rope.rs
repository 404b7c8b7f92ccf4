//! Rotary position embeddings (Su et al. 2021) and the ways to stretch them over longer contexts.

use std::f64::consts::PI;

/// The rotation of queries and keys by their position.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    pub base: f64,
    /// Elements of a head that are rotated, from its first on. An even number.
    pub size: usize,
    pub layout: Layout,
    pub scaling: Scaling,
    /// The frequencies are divided by these; pairs without one are not. `None`: by `rope_freqs` of the file,
    /// if it has them.
    pub factors: Option<Vec<f64>>,
}

/// Which two elements are rotated together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// `i` and `i + size / 2`.
    Half,
    /// `2 i` and `2 i + 1`.
    Pairs,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Scaling {
    None,
    /// Positions are divided by the factor (Chen et al. 2023).
    Linear {
        factor: f64,
    },
    /// The base grows with the context beyond `original` (NTK-aware scaling).
    Dynamic {
        factor: f64,
        original: usize,
    },
    /// Gemma 4: only this part of the pairs turns, with the frequencies of a whole head divided by the
    /// factor.
    Proportional {
        part: f64,
        factor: f64,
    },
    /// Peng et al. 2023.
    Yarn(Yarn),
    /// Llama 3.1: low frequencies are divided, high ones are not, and those between are blended.
    Llama3 {
        factor: f64,
        low: f64,
        high: f64,
        original: usize,
    },
    /// Phi-3: factors per frequency, for contexts up to `original` and beyond it.
    Long {
        short: Vec<f64>,
        long: Vec<f64>,
        original: usize,
        factor: f64,
        attention: Option<f64>,
    },
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Yarn {
    pub factor: f64,
    pub original: usize,
    pub beta_fast: f64,
    pub beta_slow: f64,
    /// Cosines and sines are multiplied by this. `None`: by the formula of the paper.
    pub attention: Option<f64>,
    /// `mscale` and `mscale_all_dim` of DeepSeek's models.
    pub mscale: Option<(f64, f64)>,
    /// Whether the ends of the ramp are rounded to whole dimensions.
    pub truncate: bool,
}

impl Yarn {
    /// The factor of cosines and sines.
    pub(crate) fn factor_of_rotations(&self) -> f64 {
        match (self.attention, self.mscale) {
            (Some(a), _) => a,
            (None, Some((m, all))) => yarn_attention(self.factor, m) / yarn_attention(self.factor, all),
            (None, None) => yarn_attention(self.factor, 1.0),
        }
    }
}

/// `0.1 m ln(factor) + 1`.
pub fn yarn_attention(factor: f64, m: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * m * factor.ln() + 1.0 }
}

impl Rope {
    /// A plain rotation.
    pub fn plain(base: f64, size: usize, layout: Layout) -> Rope {
        Rope { base, size, layout, scaling: Scaling::None, factors: None }
    }

    /// Angle per position of each pair of elements, and the factor of cosines and sines, for sequences of
    /// `context` positions.
    pub fn frequencies(&self, context: usize) -> (Vec<f64>, f64) {
        let n = self.size / 2;
        let plain = |base: f64| -> Vec<f64> {
            (0..n).map(|i| base.powf(-2.0 * i as f64 / self.size as f64)).collect()
        };
        let (mut f, mut attention) = (plain(self.base), 1.0);
        match &self.scaling {
            Scaling::None => {}
            Scaling::Linear { factor } => f.iter_mut().for_each(|f| *f /= factor),
            Scaling::Dynamic { factor, original } if context > *original => {
                let d = self.size as f64;
                let grown = factor * context as f64 / *original as f64 - (factor - 1.0);
                f = plain(self.base * grown.powf(d / (d - 2.0)));
            }
            Scaling::Dynamic { .. } => {}
            Scaling::Proportional { part, factor } => {
                let turned = (part * n as f64) as usize;
                for (i, f) in f.iter_mut().enumerate() {
                    *f = if i < turned { *f / factor } else { 0.0 };
                }
            }
            Scaling::Yarn(y) => attention = self.yarn(&mut f, y),
            Scaling::Llama3 { factor, low, high, original } => {
                let (long, short) = (*original as f64 / low, *original as f64 / high);
                for f in &mut f {
                    let wave = 2.0 * PI / *f;
                    let smooth = (*original as f64 / wave - low) / (high - low);
                    *f = match () {
                        () if wave > long => *f / factor,
                        () if wave < short => *f,
                        () => (1.0 - smooth) * *f / factor + smooth * *f,
                    };
                }
            }
            Scaling::Long { short, long, original, factor, attention: given } => {
                let factors = if context > *original { long } else { short };
                f.iter_mut().zip(factors).for_each(|(f, by)| *f /= by);
                attention = given.unwrap_or_else(|| match *factor <= 1.0 {
                    true => 1.0,
                    false => (1.0 + factor.ln() / (*original as f64).ln()).sqrt(),
                });
            }
        }
        f.iter_mut().zip(self.factors.iter().flatten()).for_each(|(f, by)| *f /= by);
        (f, attention)
    }

    /// Scales the frequencies and returns the factor of cosines and sines.
    fn yarn(&self, f: &mut [f64], y: &Yarn) -> f64 {
        let d = self.size as f64;
        // The dimension whose wave turns `turns` times in the original context.
        let dimension =
            |turns: f64| d * (y.original as f64 / (turns * 2.0 * PI)).ln() / (2.0 * self.base.ln());
        let (mut low, mut high) = (dimension(y.beta_fast), dimension(y.beta_slow));
        if y.truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        (low, high) = (low.max(0.0), high.min(d - 1.0));
        if low == high {
            high += 0.001;
        }
        for (i, f) in f.iter_mut().enumerate() {
            let ramp = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
            *f = *f / y.factor * ramp + *f * (1.0 - ramp);
        }
        y.factor_of_rotations()
    }

    /// Cosines and sines of rows at `positions` of sequences with `lengths` positions, each `[rows, size /
    /// 2]` in row-major order. Negative positions count as 0.
    pub fn rotations(&self, positions: &[i32], lengths: &[usize]) -> (Vec<f32>, Vec<f32>) {
        let n = positions.len() * self.size / 2;
        let (mut cos, mut sin) = (Vec::with_capacity(n), Vec::with_capacity(n));
        let mut known: Option<(usize, (Vec<f64>, f64))> = None;
        for (p, length) in positions.iter().zip(lengths) {
            if known.as_ref().is_none_or(|(l, _)| l != length) {
                known = Some((*length, self.frequencies(*length)));
            }
            let Some((_, (f, attention))) = &known else { continue };
            for f in f {
                let (s, c) = (f64::from((*p).max(0)) * f).sin_cos();
                cos.push((c * attention) as f32);
                sin.push((s * attention) as f32);
            }
        }
        (cos, sin)
    }
}
