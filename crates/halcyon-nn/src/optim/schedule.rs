use serde::{Deserialize, Serialize};

/// The learning rate as a function of the step. `k` counts steps from 0. Formulas and defaults are those of
/// the PyTorch schedulers with similar names, in closed form. PyTorch has no `Noam` and no `WarmUp`, and its
/// cosine schedule rises again after `steps` steps.
#[derive(Clone, Debug, PartialEq, Default, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Schedule {
    #[default]
    Constant,
    /// `rate · gamma^floor(k / size)`.
    Step { size: u64, gamma: f64 },
    /// The rate is multiplied by `gamma` at each of the given steps.
    MultiStep { at: Vec<u64>, gamma: f64 },
    /// The rate is multiplied by a factor that changes linearly from `start` to `end` in `steps` steps, and
    /// then stays `end`.
    Linear { start: f64, end: f64, steps: u64 },
    /// `least + (rate - least) (1 + cos(π k / steps)) / 2`; from step `steps` on, the rate is `least`.
    Cosine { steps: u64, least: f64 },
    /// `rate · gamma^k`.
    Exponential { gamma: f64 },
    /// The rate rises from `most / divisor` to `most` in the first `share · steps` steps, then falls to `most
    /// / (divisor · final_divisor)`, each along half a cosine (Smith and Topin 2017). The group's rate has no
    /// effect.
    OneCycle {
        most: f64,
        steps: u64,
        #[serde(default = "share")]
        share: f64,
        #[serde(default = "divisor")]
        divisor: f64,
        #[serde(default = "final_divisor")]
        final_divisor: f64,
    },
    /// `rate · size^-0.5 · min((k + 1)^-0.5, (k + 1) · warmup^-1.5)` (Vaswani et al. 2017).
    Noam { size: f64, warmup: u64 },
    /// `rate · (k + 1) / (steps + 1)` for `steps` steps, then another schedule from its step 0.
    WarmUp { steps: u64, then: Box<Schedule> },
    /// Schedules one after another. Each counts its steps from 0, and each except the last has a number of
    /// steps.
    Sequence { first: Vec<(u64, Schedule)>, last: Box<Schedule> },
}

// PyTorch's defaults for a one-cycle schedule.
fn share() -> f64 {
    0.3
}
fn divisor() -> f64 {
    25.0
}
fn final_divisor() -> f64 {
    1e4
}

impl Schedule {
    /// A [`Schedule::OneCycle`] with PyTorch's defaults.
    pub fn one_cycle(most: f64, steps: u64) -> Schedule {
        Schedule::OneCycle { most, steps, share: share(), divisor: divisor(), final_divisor: final_divisor() }
    }

    /// The learning rate at step `k`, counted from 0. `rate` is the rate of the group.
    pub fn rate(&self, rate: f64, k: u64) -> f64 {
        let cosine =
            |from: f64, to: f64, x: f64| to + (from - to) / 2.0 * (1.0 + (std::f64::consts::PI * x).cos());
        match self {
            Schedule::Constant => rate,
            Schedule::Step { size, gamma } => rate * gamma.powf((k / (*size).max(1)) as f64),
            Schedule::MultiStep { at, gamma } => {
                rate * gamma.powi(at.iter().filter(|a| **a <= k).count() as i32)
            }
            Schedule::Linear { start, end, steps } => {
                let x = if *steps == 0 { 1.0 } else { k.min(*steps) as f64 / *steps as f64 };
                rate * (start + (end - start) * x)
            }
            Schedule::Cosine { steps, least } => match k >= *steps {
                true => *least,
                false => cosine(rate, *least, k as f64 / *steps as f64),
            },
            Schedule::Exponential { gamma } => rate * gamma.powf(k as f64),
            Schedule::OneCycle { most, steps, share, divisor, final_divisor } => {
                let (first, end) = (share * *steps as f64 - 1.0, *steps as f64 - 1.0);
                let (low, least) = (most / divisor, most / divisor / final_divisor);
                let k = (k as f64).min(end);
                match k <= first {
                    // The rise may have a single step.
                    true if first <= 0.0 => *most,
                    true => cosine(low, *most, k / first),
                    false => cosine(*most, least, (k - first) / (end - first).max(1e-300)),
                }
            }
            Schedule::Noam { size, warmup } => {
                let t = (k + 1) as f64;
                let up = t * (*warmup as f64).max(1.0).powf(-1.5);
                rate * size.powf(-0.5) * t.powf(-0.5).min(up)
            }
            Schedule::WarmUp { steps, then } => match k < *steps {
                true => rate * (k + 1) as f64 / (*steps + 1) as f64,
                false => then.rate(rate, k - steps),
            },
            Schedule::Sequence { first, last } => {
                let mut k = k;
                for (steps, s) in first {
                    if k < *steps {
                        return s.rate(rate, k);
                    }
                    k -= steps;
                }
                last.rate(rate, k)
            }
        }
    }
}
