//! Chooses the next token from logits.
//!
//! The steps, in llama.cpp's order: penalties, top-k, top-p, min-p, temperature, and a draw.

use halcyon::ir::error::{Error, Result};

/// How tokens are chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Logits are divided by this. 0: the token with the largest logit, and nothing is drawn.
    pub temperature: f32,
    /// Only the `k` most probable tokens; 0: all.
    pub top_k: usize,
    /// Only the most probable tokens whose probabilities reach this sum; 1: all.
    pub top_p: f32,
    /// Only tokens that are at least this factor as probable as the most probable one; 0: all.
    pub min_p: f32,
    /// Positive logits of tokens that occurred are divided by this, negative ones multiplied; 1: none.
    pub repeat_penalty: f32,
    /// Subtracted from the logits of tokens that occurred.
    pub presence_penalty: f32,
    /// Subtracted from the logits of tokens for each time that they occurred.
    pub frequency_penalty: f32,
    /// The number of last tokens to which penalties apply.
    pub repeat_last: usize,
    /// Seed of the draws. Equal seeds give equal draws on every backend.
    pub seed: u64,
}

impl Default for Sampling {
    /// llama.cpp's defaults.
    fn default() -> Sampling {
        Sampling {
            temperature: 0.8,
            top_k: 40,
            top_p: 0.95,
            min_p: 0.05,
            repeat_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repeat_last: 64,
            seed: 0,
        }
    }
}

impl Sampling {
    /// The token with the largest logit.
    pub fn greedy() -> Sampling {
        Sampling { temperature: 0.0, ..Sampling::default() }
    }

    /// # Errors
    /// `Error::Argument` for a value outside of its range.
    pub fn check(&self) -> Result<()> {
        let ranges = [
            ("temperature", self.temperature, 0.0, f32::MAX),
            ("top-p", self.top_p, 0.0, 1.0),
            ("min-p", self.min_p, 0.0, 1.0),
            ("repeat penalty", self.repeat_penalty, f32::MIN_POSITIVE, f32::MAX),
            ("presence penalty", self.presence_penalty, -f32::MAX, f32::MAX),
            ("frequency penalty", self.frequency_penalty, -f32::MAX, f32::MAX),
        ];
        match ranges.iter().find(|(_, v, low, high)| !(low..=high).contains(&v)) {
            None => Ok(()),
            Some((name @ "repeat penalty", v, ..)) => {
                Err(Error::argument("sampling", format!("{name} {v}: expected a number above 0")))
            }
            Some((name, v, low, high)) => {
                let what = match *high == f32::MAX {
                    true if *low < 0.0 => "a number",
                    true => "a number of at least 0",
                    false => "a number from 0 to 1",
                };
                Err(Error::argument("sampling", format!("{name} {v}: expected {what}")))
            }
        }
    }
}

/// A sequence of draws.
#[derive(Clone, Debug)]
pub struct Sampler {
    options: Sampling,
    /// Draws so far.
    drawn: u64,
}

/// A number in [0, 1) that depends on seed and index only (SplitMix64, Steele et al. 2014).
fn uniform(seed: u64, index: u64) -> f64 {
    let mut z = seed.wrapping_add(index.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((z ^ z >> 31) >> 11) as f64 / (1u64 << 53) as f64
}

impl Sampler {
    /// # Errors
    /// Those of [`Sampling::check`].
    pub fn new(options: Sampling) -> Result<Sampler> {
        options.check()?;
        Ok(Sampler { options, drawn: 0 })
    }

    /// The next token after `past`, whose last token is the latest. Logits that are NaN are never chosen; if
    /// all are, the token is 0.
    pub fn next(&mut self, logits: &[f32], past: &[u32]) -> u32 {
        let o = self.options;
        let mut z: Vec<(u32, f32)> = (0..).zip(logits.iter().copied()).filter(|(_, v)| !v.is_nan()).collect();
        penalise(&mut z, past, &o);
        // Ties go to the smaller number, so that the choice does not depend on the order of a sort.
        let order = |a: &(u32, f32), b: &(u32, f32)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
        if o.temperature == 0.0 {
            return z.iter().min_by(|a, b| order(a, b)).map_or(0, |(t, _)| *t);
        }
        if o.top_k > 0 && o.top_k < z.len() {
            z.select_nth_unstable_by(o.top_k - 1, order);
            z.truncate(o.top_k);
        }
        z.sort_unstable_by(order);
        let Some(&(first, best)) = z.first() else { return 0 };
        let mut p: Vec<f64> = z.iter().map(|(_, v)| f64::from(v - best).exp()).collect();
        if o.top_p < 1.0 {
            let total: f64 = p.iter().sum();
            let mut sum = 0.0;
            let kept = p.iter().position(|p| {
                sum += p / total;
                sum >= f64::from(o.top_p)
            });
            p.truncate(kept.map_or(p.len(), |k| k + 1));
        }
        // The most probable token has the value 1.
        let kept = p.iter().take_while(|p| **p >= f64::from(o.min_p)).count();
        p.truncate(kept.max(1));
        for (p, (_, v)) in p.iter_mut().zip(&z) {
            *p = (f64::from(v - best) / f64::from(o.temperature)).exp();
        }
        let mut rest = uniform(o.seed, self.drawn) * p.iter().sum::<f64>();
        self.drawn += 1;
        for (p, (t, _)) in p.iter().zip(&z) {
            rest -= p;
            if rest < 0.0 {
                return *t;
            }
        }
        // Rounding left a remainder.
        z.get(p.len() - 1).map_or(first, |(t, _)| *t)
    }
}

fn penalise(z: &mut [(u32, f32)], past: &[u32], o: &Sampling) {
    if o.repeat_penalty == 1.0 && o.presence_penalty == 0.0 && o.frequency_penalty == 0.0 {
        return;
    }
    let last = &past[past.len().saturating_sub(o.repeat_last)..];
    let mut counts = std::collections::HashMap::new();
    last.iter().for_each(|t| *counts.entry(*t).or_insert(0u32) += 1);
    for (t, v) in z.iter_mut() {
        let Some(n) = counts.get(t) else { continue };
        *v = if *v > 0.0 { *v / o.repeat_penalty } else { *v * o.repeat_penalty };
        *v -= o.presence_penalty + o.frequency_penalty * *n as f32;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draws(o: Sampling, logits: &[f32], n: usize) -> Vec<usize> {
        let mut s = Sampler::new(o).unwrap();
        let mut counts = vec![0; logits.len()];
        (0..n).for_each(|_| counts[s.next(logits, &[]) as usize] += 1);
        counts
    }

    const ALL: Sampling = Sampling {
        temperature: 1.0,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        repeat_penalty: 1.0,
        presence_penalty: 0.0,
        frequency_penalty: 0.0,
        repeat_last: 64,
        seed: 7,
    };

    #[test]
    fn draws_follow_the_softmax() {
        let p = [0.5f64, 0.25, 0.125, 0.125];
        let logits = p.map(|p| p.ln() as f32);
        for temperature in [1.0, 2.0] {
            let counts = draws(Sampling { temperature, ..ALL }, &logits, 20_000);
            let w = p.map(|p| p.powf(1.0 / f64::from(temperature)));
            let total: f64 = w.iter().sum();
            let chi: f64 = counts
                .iter()
                .zip(w)
                .map(|(c, w)| {
                    let e = 20_000.0 * w / total;
                    (*c as f64 - e).powi(2) / e
                })
                .sum();
            // 3 degrees of freedom: above 16.3 once in a thousand seeds.
            assert!(chi < 16.3, "{chi} {counts:?}");
        }
    }

    #[test]
    fn limits_leave_out_improbable_tokens() {
        let logits = [0.5f64, 0.25, 0.125, 0.125].map(|p| p.ln() as f32);
        let kept = |o: Sampling| draws(o, &logits, 2000).iter().map(|c| *c > 0).collect::<Vec<_>>();
        assert_eq!(kept(Sampling { top_k: 2, ..ALL }), [true, true, false, false]);
        assert_eq!(kept(Sampling { top_p: 0.7, ..ALL }), [true, true, false, false]);
        assert_eq!(kept(Sampling { top_p: 0.0, ..ALL }), [true, false, false, false]);
        assert_eq!(kept(Sampling { min_p: 0.3, ..ALL }), [true, true, false, false]);
        assert_eq!(kept(Sampling { temperature: 0.0, ..ALL }), [true, false, false, false]);
    }

    #[test]
    fn penalties_apply_to_the_last_tokens() {
        let mut s =
            Sampler::new(Sampling { repeat_penalty: 2.0, repeat_last: 2, ..Sampling::greedy() }).unwrap();
        assert_eq!(s.next(&[1.0, 0.9], &[0, 1, 1]), 0);
        assert_eq!(s.next(&[1.0, 0.9], &[1, 0]), 0);
        assert_eq!(s.next(&[1.0, 0.9], &[0, 0]), 1);
        assert_eq!(s.next(&[-1.0, -1.5], &[0, 0]), 1);
        let o = Sampling { frequency_penalty: 0.3, presence_penalty: 0.1, ..Sampling::greedy() };
        let mut s = Sampler::new(o).unwrap();
        assert_eq!(s.next(&[1.0, 0.65], &[0]), 1);
        assert_eq!(s.next(&[1.0, 0.55], &[0]), 0);
        assert_eq!(s.next(&[1.0, 0.55], &[0, 0]), 1);
    }

    #[test]
    fn ties_nan_and_bad_options() {
        let mut s = Sampler::new(Sampling::greedy()).unwrap();
        assert_eq!(s.next(&[1.0, 2.0, 2.0], &[]), 1);
        assert_eq!(s.next(&[f32::NAN, -1.0], &[]), 1);
        assert_eq!(s.next(&[f32::NAN], &[]), 0);
        assert!(Sampler::new(Sampling { top_p: 1.5, ..ALL }).is_err());
        assert!(Sampler::new(Sampling { temperature: f32::NAN, ..ALL }).is_err());
    }
}
