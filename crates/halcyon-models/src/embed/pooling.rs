//! From the vectors of tokens to one vector.

use halcyon::ir::error::{Error, Result};

/// How the vectors of a text's tokens become one vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pooling {
    /// The vector of the first token.
    Cls,
    /// The largest element of all tokens.
    Max,
    Mean,
    /// The sum divided by the square root of the number of tokens.
    MeanSqrtLen,
    /// A mean in which token `i` counts `i + 1` times.
    WeightedMean,
    /// The vector of the last token.
    LastToken,
}

impl Pooling {
    /// Every way, in the order in which sentence-transformers joins their results.
    pub const ALL: [Pooling; 6] = [
        Pooling::Cls,
        Pooling::Max,
        Pooling::Mean,
        Pooling::MeanSqrtLen,
        Pooling::WeightedMean,
        Pooling::LastToken,
    ];

    /// Its name in options, and in sentence-transformers.
    pub fn name(self) -> &'static str {
        match self {
            Pooling::Cls => "cls",
            Pooling::Max => "max",
            Pooling::Mean => "mean",
            Pooling::MeanSqrtLen => "mean_sqrt_len_tokens",
            Pooling::WeightedMean => "weightedmean",
            Pooling::LastToken => "lasttoken",
        }
    }

    /// Its key in `1_Pooling/config.json`.
    pub(super) fn key(self) -> &'static str {
        match self {
            Pooling::Cls => "pooling_mode_cls_token",
            Pooling::Max => "pooling_mode_max_tokens",
            Pooling::Mean => "pooling_mode_mean_tokens",
            Pooling::MeanSqrtLen => "pooling_mode_mean_sqrt_len_tokens",
            Pooling::WeightedMean => "pooling_mode_weightedmean_tokens",
            Pooling::LastToken => "pooling_mode_lasttoken",
        }
    }

    /// The way with this name. `last` is llama.cpp's name of `lasttoken`.
    ///
    /// # Errors
    /// `Error::Argument` for another name, with those that are known.
    pub fn by_name(name: &str) -> Result<Pooling> {
        let name = if name == "last" { "lasttoken" } else { name };
        Pooling::ALL.into_iter().find(|p| p.name() == name).ok_or_else(|| {
            let known: Vec<&str> = Pooling::ALL.iter().map(|p| p.name()).collect();
            Error::argument("pooling", format!("'{name}': expected one of {}", known.join(", ")))
        })
    }

    /// Pools the rows of `hidden`, `[tokens, size]`, of which the first `skipped` do not count unless there
    /// are no others. Sums are in f64.
    pub fn apply(self, hidden: &[f32], size: usize, skipped: usize) -> Vec<f32> {
        let all = hidden.len() / size.max(1);
        let first = if skipped < all { skipped } else { 0 };
        let rows: Vec<&[f32]> = hidden.chunks_exact(size.max(1)).skip(first).collect();
        let (Some(start), Some(end)) = (rows.first(), rows.last()) else { return vec![0.0; size] };
        let sum = |weight: &dyn Fn(usize) -> f64, by: f64| -> Vec<f32> {
            let mut out = vec![0f64; size];
            for (i, row) in rows.iter().enumerate() {
                let w = weight(i);
                out.iter_mut().zip(*row).for_each(|(o, v)| *o += w * f64::from(*v));
            }
            out.iter().map(|v| (v / by) as f32).collect()
        };
        let n = rows.len() as f64;
        match self {
            Pooling::Cls => hidden[..size].to_vec(),
            Pooling::LastToken => end.to_vec(),
            Pooling::Mean => sum(&|_| 1.0, n),
            Pooling::MeanSqrtLen => sum(&|_| 1.0, n.sqrt()),
            // Weights count from the first token of the text.
            Pooling::WeightedMean => {
                let weight = |i: usize| (first + i + 1) as f64;
                sum(&weight, (0..rows.len()).map(weight).sum())
            }
            Pooling::Max => rows.iter().skip(1).fold(start.to_vec(), |mut best, row| {
                best.iter_mut().zip(*row).for_each(|(b, v)| *b = b.max(*v));
                best
            }),
        }
    }
}

/// Divides by the Euclidean length, as far as there is one.
pub(super) fn normalize(v: &mut [f32]) {
    let length = v.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt().max(1e-12);
    v.iter_mut().for_each(|v| *v = (f64::from(*v) / length) as f32);
}
