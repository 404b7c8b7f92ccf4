//! How measurements are repeated, and the median of their results.

use std::time::Duration;

/// How many measurements to take, and how long each lasts.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// Minimum number of pairs of bursts per transformation; a pair is one burst with the transformation and
    /// one without.
    pub pairs: usize,
    /// Pairs are added until the 95 % confidence interval of the median ratio is at most as wide as this
    /// fraction of the ratio, or until there are [`MAX_GROWTH`] times `pairs`.
    pub interval: f64,
    /// Duration of a burst. A burst has at least one run.
    pub burst: Duration,
}

impl Default for Effort {
    fn default() -> Effort {
        Effort { pairs: 15, interval: 0.05, burst: Duration::from_millis(10) }
    }
}

/// Maximum factor by which the number of pairs grows on a noisy machine.
pub const MAX_GROWTH: usize = 4;

/// The median; NaN if there are no values.
pub fn median(values: &[f64]) -> f64 {
    let mut v = values.to_vec();
    v.sort_by(f64::total_cmp);
    match v.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => v[n / 2],
        n => (v[n / 2 - 1] + v[n / 2]) / 2.0,
    }
}

/// The 95 % confidence interval of the median, from the order statistics of ranks `n/2 ± 0.98 √n`, by the
/// normal approximation of the binomial distribution (Conover, Practical Nonparametric Statistics, section
/// 3.2).
pub fn median_interval(values: &[f64]) -> (f64, f64) {
    let mut v = values.to_vec();
    v.sort_by(f64::total_cmp);
    let n = v.len();
    if n == 0 {
        return (f64::NAN, f64::NAN);
    }
    let reach = 0.98 * (n as f64).sqrt();
    let low = (n as f64 / 2.0 - reach).floor().max(0.0) as usize;
    (v[low], v[n - 1 - low])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_the_middle_or_between_the_two() {
        assert_eq!((median(&[3.0, 1.0, 2.0]), median(&[4.0, 1.0, 3.0, 2.0])), (2.0, 2.5));
        assert!(median(&[]).is_nan());
    }

    #[test]
    fn the_interval_of_a_median_narrows_with_more_values() {
        let n: Vec<f64> = (0..100).map(f64::from).collect();
        assert_eq!(median_interval(&n), (40.0, 59.0));
        assert_eq!(median_interval(&[3.0, 1.0, 2.0]), (1.0, 3.0));
        assert!(median_interval(&[]).0.is_nan());
    }
}
