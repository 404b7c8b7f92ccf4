//! Chooses the next token from logits.
//!
//! A [`Sampler`] is a chain of steps ([`crate::chain`]), then a draw. [`Sampling`] configures the usual ones.

use crate::chain::*;
use halcyon::ir::error::{Error, Result};

/// How tokens are chosen.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// Logits are divided by this. 0: the token with the largest logit, and nothing is drawn.
    pub temperature: f32,
    /// Only the `k` most probable tokens; 0: all.
    pub top_k: usize,
    /// Only the tokens whose information is nearest to the entropy, until their probabilities reach this sum;
    /// 1: all.
    pub typical_p: f32,
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
    /// The steps in their order. A step that is not named is left out.
    pub steps: Vec<StepName>,
}

impl Default for Sampling {
    /// llama.cpp's defaults.
    fn default() -> Sampling {
        Sampling {
            temperature: 0.8,
            top_k: 40,
            typical_p: 1.0,
            top_p: 0.95,
            min_p: 0.05,
            repeat_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repeat_last: 64,
            seed: 0,
            steps: StepName::ALL.to_vec(),
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
            ("typical", self.typical_p, 0.0, 1.0),
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

/// Chooses tokens of one sequence: a chain of steps, then a draw.
#[derive(Clone, Debug)]
pub struct Sampler {
    steps: Vec<Box<dyn SampleStep>>,
    /// Whether the most probable candidate is taken, and nothing is drawn.
    greedy: bool,
    seed: u64,
    /// Draws so far.
    drawn: u64,
}

/// A number in [0, 1) that depends on seed and index only (SplitMix64, Steele et al. 2014).
pub(crate) fn uniform(seed: u64, index: u64) -> f64 {
    let mut z = seed.wrapping_add(index.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((z ^ z >> 31) >> 11) as f64 / (1u64 << 53) as f64
}

impl Sampler {
    /// The steps that the options name, in their order. With temperature 0 only penalties count.
    ///
    /// # Errors
    /// Those of [`Sampling::check`].
    pub fn new(options: &Sampling) -> Result<Sampler> {
        options.check()?;
        let o = options;
        let greedy = o.temperature == 0.0;
        let step = |s: &StepName| -> Box<dyn SampleStep> {
            match s {
                StepName::Penalties => Box::new(Penalties {
                    repeat: o.repeat_penalty,
                    presence: o.presence_penalty,
                    frequency: o.frequency_penalty,
                    last: o.repeat_last,
                }),
                StepName::TopK => Box::new(TopK(o.top_k)),
                StepName::Typical => Box::new(Typical(o.typical_p)),
                StepName::TopP => Box::new(TopP(o.top_p)),
                StepName::MinP => Box::new(MinP(o.min_p)),
                StepName::Temperature => Box::new(Temperature(o.temperature)),
            }
        };
        let used = o.steps.iter().filter(|s| !greedy || **s == StepName::Penalties);
        Ok(Sampler { steps: used.map(step).collect(), greedy, seed: o.seed, drawn: 0 })
    }

    /// A sampler of these steps, which draws among what they leave; if `greedy`, it takes the largest logit.
    pub fn of(steps: Vec<Box<dyn SampleStep>>, greedy: bool, seed: u64) -> Sampler {
        Sampler { steps, greedy, seed, drawn: 0 }
    }

    /// Puts a step before all others.
    pub fn put_first(&mut self, step: Box<dyn SampleStep>) {
        self.steps.insert(0, step);
    }

    /// The tokens that may be drawn after `past`, whose last token is the latest, with their probabilities,
    /// the most probable first. One token if the sampler is greedy. Logits that are NaN are never chosen; if
    /// all are, the token is 0.
    ///
    /// # Errors
    /// Errors of the steps, such as a grammar that allows no token.
    pub fn distribution(&mut self, logits: &[f32], past: &[u32]) -> Result<Vec<(u32, f64)>> {
        self.distribution_of(Candidates::new(logits), past)
    }

    /// [`Sampler::distribution`] of the candidates that are given.
    ///
    /// # Errors
    /// Those of [`Sampler::distribution`].
    pub fn distribution_of(&mut self, mut c: Candidates, past: &[u32]) -> Result<Vec<(u32, f64)>> {
        for step in &mut self.steps {
            step.apply(&mut c, past)?;
        }
        if self.greedy {
            return Ok(vec![(c.best().unwrap_or(0), 1.0)]);
        }
        let p = c.probabilities();
        let out: Vec<(u32, f64)> = c.list().iter().map(|(t, _)| *t).zip(p).collect();
        Ok(if out.is_empty() { vec![(0, 1.0)] } else { out })
    }

    /// A number in [0, 1), the next of the seed's sequence.
    pub fn uniform(&mut self) -> f64 {
        self.drawn += 1;
        uniform(self.seed, self.drawn - 1)
    }

    /// Draws from tokens with weights, whose sum need not be 1. A single token takes no draw of a greedy
    /// sampler.
    pub fn draw(&mut self, among: &[(u32, f64)]) -> u32 {
        if self.greedy {
            return among.first().map_or(0, |(t, _)| *t);
        }
        let mut rest = self.uniform() * among.iter().map(|(_, p)| p).sum::<f64>();
        for (t, p) in among {
            rest -= p;
            if rest < 0.0 {
                return *t;
            }
        }
        // Rounding left a remainder.
        among.iter().rev().find(|(_, p)| *p > 0.0).map_or(0, |(t, _)| *t)
    }

    /// The next token after `past`. Does not tell the steps: see [`Sampler::accept`].
    ///
    /// # Errors
    /// Those of [`Sampler::distribution`].
    pub fn next(&mut self, logits: &[f32], past: &[u32]) -> Result<u32> {
        let among = self.distribution(logits, past)?;
        Ok(self.draw(&among))
    }

    /// Tells the steps that a token was chosen.
    ///
    /// # Errors
    /// Errors of the steps, such as a grammar that does not allow the token.
    pub fn accept(&mut self, token: u32) -> Result<()> {
        self.steps.iter_mut().try_for_each(|s| s.accept(token))
    }

    /// Whether a step, such as a grammar, lets no token follow because the text is complete.
    pub fn is_complete(&self) -> bool {
        self.steps.iter().any(|s| s.is_complete())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draws(o: Sampling, logits: &[f32], n: usize) -> Vec<usize> {
        let mut s = Sampler::new(&o).unwrap();
        let mut counts = vec![0; logits.len()];
        (0..n).for_each(|_| counts[s.next(logits, &[]).unwrap() as usize] += 1);
        counts
    }

    fn all() -> Sampling {
        Sampling { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0, seed: 7, ..Sampling::default() }
    }

    #[test]
    fn draws_follow_the_softmax() {
        let p = [0.5f64, 0.25, 0.125, 0.125];
        let logits = p.map(|p| p.ln() as f32);
        for temperature in [1.0, 2.0] {
            let counts = draws(Sampling { temperature, ..all() }, &logits, 20_000);
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
        assert_eq!(kept(Sampling { top_k: 2, ..all() }), [true, true, false, false]);
        assert_eq!(kept(Sampling { top_p: 0.7, ..all() }), [true, true, false, false]);
        assert_eq!(kept(Sampling { top_p: 0.0, ..all() }), [true, false, false, false]);
        assert_eq!(kept(Sampling { min_p: 0.3, ..all() }), [true, true, false, false]);
        assert_eq!(kept(Sampling { temperature: 0.0, ..all() }), [true, false, false, false]);
        // The entropy is 1.75 bits: the second token is nearest (2 bits), then the first one.
        assert_eq!(kept(Sampling { typical_p: 0.2, ..all() }), [false, true, false, false]);
        assert_eq!(kept(Sampling { typical_p: 0.3, ..all() }), [true, true, false, false]);
    }

    #[test]
    fn penalties_apply_to_the_last_tokens() {
        let mut s =
            Sampler::new(&Sampling { repeat_penalty: 2.0, repeat_last: 2, ..Sampling::greedy() }).unwrap();
        assert_eq!(s.next(&[1.0, 0.9], &[0, 1, 1]).unwrap(), 0);
        assert_eq!(s.next(&[1.0, 0.9], &[1, 0]).unwrap(), 0);
        assert_eq!(s.next(&[1.0, 0.9], &[0, 0]).unwrap(), 1);
        assert_eq!(s.next(&[-1.0, -1.5], &[0, 0]).unwrap(), 1);
        let o = Sampling { frequency_penalty: 0.3, presence_penalty: 0.1, ..Sampling::greedy() };
        let mut s = Sampler::new(&o).unwrap();
        assert_eq!(s.next(&[1.0, 0.65], &[0]).unwrap(), 1);
        assert_eq!(s.next(&[1.0, 0.55], &[0]).unwrap(), 0);
        assert_eq!(s.next(&[1.0, 0.55], &[0, 0]).unwrap(), 1);
    }

    #[test]
    fn ties_nan_and_bad_options() {
        let mut s = Sampler::new(&Sampling::greedy()).unwrap();
        assert_eq!(s.next(&[1.0, 2.0, 2.0], &[]).unwrap(), 1);
        assert_eq!(s.next(&[f32::NAN, -1.0], &[]).unwrap(), 1);
        assert_eq!(s.next(&[f32::NAN], &[]).unwrap(), 0);
        assert!(Sampler::new(&Sampling { top_p: 1.5, ..all() }).is_err());
        assert!(Sampler::new(&Sampling { temperature: f32::NAN, ..all() }).is_err());
    }

    #[test]
    fn the_order_of_the_steps_counts() {
        let logits = [0.4f64, 0.3, 0.2, 0.1].map(|p| p.ln() as f32);
        let kept = |steps: &[StepName]| {
            let o = Sampling { temperature: 4.0, top_p: 0.65, top_k: 3, steps: steps.to_vec(), ..all() };
            Sampler::new(&o).unwrap().distribution(&logits, &[]).unwrap().len()
        };
        use StepName::{Temperature, TopK, TopP};
        assert_eq!(kept(&[TopP, Temperature]), 2);
        assert_eq!(kept(&[Temperature, TopP]), 3);
        // Of three tokens, two have 7/9 of the probability.
        assert_eq!(kept(&[TopK, TopP]), 2);
        assert_eq!(kept(&[TopK]), 3);
        assert_eq!(kept(&[]), 4);
        assert_eq!("top-k".parse::<StepName>().unwrap(), TopK);
        assert!("mirostat".parse::<StepName>().unwrap_err().to_string().contains("typ_p"));
    }

    /// Allows the tokens of one bit set, once.
    #[derive(Clone, Debug)]
    struct Once(Option<u32>);

    impl TokenMask for Once {
        fn allowed(&mut self) -> Result<Vec<u32>> {
            Ok(vec![self.0.unwrap_or(0)])
        }
        fn accept(&mut self, _: u32) -> Result<()> {
            self.0 = None;
            Ok(())
        }
        fn fork(&self) -> Box<dyn TokenMask> {
            Box::new(self.clone())
        }
    }

    #[test]
    fn a_mask_removes_tokens_and_is_told_what_was_chosen() {
        let mask: Box<dyn TokenMask> = Box::new(Once(Some(0b1010)));
        let mut s = Sampler::new(&Sampling::greedy()).unwrap();
        s.put_first(Box::new(mask));
        let mut other = s.clone();
        let logits = [9.0, 1.0, 8.0, 2.0];
        assert_eq!(s.next(&logits, &[]).unwrap(), 3);
        s.accept(3).unwrap();
        assert!(s.next(&logits, &[]).is_err());
        assert_eq!(other.next(&logits, &[]).unwrap(), 3);
    }
}
