//! The steps of a sampler. Each step removes candidates or changes their logits; the sampler draws among what
//! is left.

use halcyon::ir::error::{Error, Result};
use std::cmp::Ordering;
use std::collections::HashMap;
use std::fmt;
use std::str::FromStr;

/// Tokens that may come next, with their logits.
#[derive(Clone, Debug, Default)]
pub struct Candidates {
    list: Vec<(u32, f32)>,
    /// Whether the list has the order of [`Candidates::sort`].
    sorted: bool,
}

/// Larger logits first. Ties go to the smaller number, so that a choice does not depend on how a sort works.
fn order(a: &(u32, f32), b: &(u32, f32)) -> Ordering {
    b.1.total_cmp(&a.1).then(a.0.cmp(&b.0))
}

impl Candidates {
    /// All tokens whose logits are numbers.
    pub fn new(logits: &[f32]) -> Candidates {
        let list = (0..).zip(logits.iter().copied()).filter(|(_, v)| !v.is_nan()).collect();
        Candidates { list, sorted: false }
    }

    /// These tokens and logits; those that are not numbers are left out.
    pub fn of(mut list: Vec<(u32, f32)>) -> Candidates {
        list.retain(|(_, v)| !v.is_nan());
        Candidates { list, sorted: false }
    }

    /// Tokens and logits.
    pub fn list(&self) -> &[(u32, f32)] {
        &self.list
    }

    /// Tokens and logits, to be changed. They count as unsorted afterwards.
    pub fn list_mut(&mut self) -> &mut Vec<(u32, f32)> {
        self.sorted = false;
        &mut self.list
    }

    /// Sorts by logit, the largest first; of equal ones, the smaller token first.
    pub fn sort(&mut self) {
        if !self.sorted {
            self.list.sort_unstable_by(order);
            self.sorted = true;
        }
    }

    /// The token with the largest logit; of equal ones, the smaller token.
    pub fn best(&self) -> Option<u32> {
        self.list.iter().min_by(|a, b| order(a, b)).map(|(t, _)| *t)
    }

    /// Sorts, and gives `exp(logit - largest logit)` of each candidate.
    fn powers(&mut self) -> Vec<f64> {
        self.sort();
        let best = self.list.first().map_or(0.0, |(_, v)| *v);
        self.list.iter().map(|(_, v)| if *v == best { 1.0 } else { f64::from(v - best).exp() }).collect()
    }

    /// Sorts, and gives the probability of each candidate: the softmax of the logits.
    pub fn probabilities(&mut self) -> Vec<f64> {
        let mut p = self.powers();
        let total: f64 = p.iter().sum();
        p.iter_mut().for_each(|p| *p /= total);
        p
    }
}

/// A step of a sampler.
pub trait SampleStep: fmt::Debug + Send {
    /// Removes candidates or changes their logits. `past` are the tokens so far, the latest last.
    ///
    /// # Errors
    /// Errors of the step, for example of a grammar.
    fn apply(&mut self, candidates: &mut Candidates, past: &[u32]) -> Result<()>;

    /// A token was chosen.
    ///
    /// # Errors
    /// Errors of the step, for example if a grammar does not allow the token.
    fn accept(&mut self, token: u32) -> Result<()> {
        let _ = token;
        Ok(())
    }

    /// Whether the text is complete and no token can follow.
    fn is_complete(&self) -> bool {
        false
    }

    /// The step in its present state, for another sequence.
    fn fork(&self) -> Box<dyn SampleStep>;
}

impl Clone for Box<dyn SampleStep> {
    fn clone(&self) -> Self {
        self.fork()
    }
}

/// Says which tokens may come next, for example by a grammar.
pub trait TokenMask: fmt::Debug + Send {
    /// The tokens that may come next: bit `t % 32` of word `t / 32`. Tokens beyond the last word may not.
    ///
    /// # Errors
    /// Errors of the mask, for example a limit of its work.
    fn allowed(&mut self) -> Result<Vec<u32>>;

    /// A token was chosen.
    ///
    /// # Errors
    /// If the token is not allowed.
    fn accept(&mut self, token: u32) -> Result<()>;

    /// Whether the text is complete and nothing can follow.
    fn is_complete(&self) -> bool {
        false
    }

    /// The mask in its present state, for another sequence.
    fn fork(&self) -> Box<dyn TokenMask>;
}

impl Clone for Box<dyn TokenMask> {
    fn clone(&self) -> Self {
        (**self).fork()
    }
}

impl SampleStep for Box<dyn TokenMask> {
    fn apply(&mut self, candidates: &mut Candidates, _: &[u32]) -> Result<()> {
        let words = self.allowed()?;
        let may = |t: u32| words.get(t as usize / 32).is_some_and(|w| w >> (t % 32) & 1 == 1);
        // Removing keeps the order.
        candidates.list.retain(|(t, _)| may(*t));
        match candidates.list.is_empty() {
            true => {
                Err(Error::argument("sampling", "no token with a logit that is a number is allowed here"))
            }
            false => Ok(()),
        }
    }

    fn accept(&mut self, token: u32) -> Result<()> {
        (**self).accept(token)
    }

    fn is_complete(&self) -> bool {
        (**self).is_complete()
    }

    fn fork(&self) -> Box<dyn SampleStep> {
        Box::new(self.clone())
    }
}

/// Implements `fork` for a step that is plain data.
macro_rules! plain {
    () => {
        fn fork(&self) -> Box<dyn SampleStep> {
            Box::new(*self)
        }
    };
}

/// Makes tokens less probable that occurred.
#[derive(Clone, Copy, Debug)]
pub struct Penalties {
    /// Positive logits are divided by this, negative ones multiplied; 1: none.
    pub repeat: f32,
    /// Subtracted from the logits.
    pub presence: f32,
    /// Subtracted from the logits for each time that the token occurred.
    pub frequency: f32,
    /// The number of last tokens that count.
    pub last: usize,
}

impl SampleStep for Penalties {
    fn apply(&mut self, candidates: &mut Candidates, past: &[u32]) -> Result<()> {
        if self.repeat == 1.0 && self.presence == 0.0 && self.frequency == 0.0 {
            return Ok(());
        }
        let mut counts = HashMap::new();
        let last = &past[past.len().saturating_sub(self.last)..];
        last.iter().for_each(|t| *counts.entry(*t).or_insert(0u32) += 1);
        for (t, v) in candidates.list_mut() {
            let Some(n) = counts.get(t) else { continue };
            *v = if *v > 0.0 { *v / self.repeat } else { *v * self.repeat };
            *v -= self.presence + self.frequency * *n as f32;
        }
        Ok(())
    }
    plain!();
}

/// Keeps the `k` most probable tokens; 0: all.
#[derive(Clone, Copy, Debug)]
pub struct TopK(pub usize);

impl SampleStep for TopK {
    fn apply(&mut self, candidates: &mut Candidates, _: &[u32]) -> Result<()> {
        let list = &mut candidates.list;
        if self.0 > 0 && self.0 < list.len() {
            if !candidates.sorted {
                list.select_nth_unstable_by(self.0 - 1, order);
            }
            list.truncate(self.0);
        }
        Ok(())
    }
    plain!();
}

/// Keeps the most probable tokens whose probabilities reach this sum; 1: all.
#[derive(Clone, Copy, Debug)]
pub struct TopP(pub f32);

impl SampleStep for TopP {
    fn apply(&mut self, candidates: &mut Candidates, _: &[u32]) -> Result<()> {
        if self.0 < 1.0 {
            let mut sum = 0.0;
            let kept = candidates.probabilities().iter().position(|p| {
                sum += p;
                sum >= f64::from(self.0)
            });
            candidates.list.truncate(kept.map_or(usize::MAX, |k| k + 1));
        }
        Ok(())
    }
    plain!();
}

/// Keeps tokens that are at least this factor as probable as the most probable one; 0: all.
#[derive(Clone, Copy, Debug)]
pub struct MinP(pub f32);

impl SampleStep for MinP {
    fn apply(&mut self, candidates: &mut Candidates, _: &[u32]) -> Result<()> {
        if self.0 > 0.0 {
            let p = candidates.powers();
            let kept = p.iter().take_while(|p| **p >= f64::from(self.0)).count();
            candidates.list.truncate(kept.max(1));
        }
        Ok(())
    }
    plain!();
}

/// Keeps the tokens whose information is nearest to the entropy, until their probabilities reach this sum; 1:
/// all (locally typical sampling, Meister et al. 2023).
#[derive(Clone, Copy, Debug)]
pub struct Typical(pub f32);

impl SampleStep for Typical {
    fn apply(&mut self, candidates: &mut Candidates, _: &[u32]) -> Result<()> {
        if self.0 >= 1.0 {
            return Ok(());
        }
        let p = candidates.probabilities();
        let information = |p: f64| if p > 0.0 { -p.ln() } else { f64::INFINITY };
        let entropy: f64 = p.iter().filter(|p| **p > 0.0).map(|p| p * information(*p)).sum();
        let mut by: Vec<usize> = (0..p.len()).collect();
        let far = |i: usize| (information(p[i]) - entropy).abs();
        by.sort_by(|a, b| far(*a).total_cmp(&far(*b)));
        let mut sum = 0.0;
        let kept = by.iter().position(|i| {
            sum += p[*i];
            sum > f64::from(self.0)
        });
        by.truncate(kept.map_or(by.len(), |k| k + 1));
        // In the order of the list, so that it stays sorted.
        by.sort_unstable();
        candidates.list = by.iter().map(|i| candidates.list[*i]).collect();
        Ok(())
    }
    plain!();
}

/// Divides the logits by this. Must be above 0; a sampler that takes the largest logit has no such step.
#[derive(Clone, Copy, Debug)]
pub struct Temperature(pub f32);

impl SampleStep for Temperature {
    fn apply(&mut self, candidates: &mut Candidates, _: &[u32]) -> Result<()> {
        // Very small temperatures must not make all logits infinite.
        let best = candidates.list.iter().map(|(_, v)| *v).fold(f32::NEG_INFINITY, f32::max);
        for (_, v) in &mut candidates.list {
            *v = if *v == best { 0.0 } else { (*v - best) / self.0 };
        }
        Ok(())
    }
    plain!();
}

/// The name of a step that [`crate::Sampling`] configures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepName {
    Penalties,
    TopK,
    Typical,
    TopP,
    MinP,
    Temperature,
}

impl StepName {
    /// Every step, in llama.cpp's order.
    pub const ALL: [StepName; 6] = [
        StepName::Penalties,
        StepName::TopK,
        StepName::Typical,
        StepName::TopP,
        StepName::MinP,
        StepName::Temperature,
    ];

    /// The name as `--samplers` writes it.
    pub fn name(self) -> &'static str {
        match self {
            StepName::Penalties => "penalties",
            StepName::TopK => "top_k",
            StepName::Typical => "typ_p",
            StepName::TopP => "top_p",
            StepName::MinP => "min_p",
            StepName::Temperature => "temperature",
        }
    }
}

impl FromStr for StepName {
    type Err = Error;

    fn from_str(text: &str) -> Result<StepName> {
        let same = text.trim().replace('-', "_");
        let found = StepName::ALL.into_iter().find(|s| s.name() == same);
        found.ok_or_else(|| {
            let all = StepName::ALL.map(StepName::name).join(", ");
            Error::argument("samplers", format!("'{text}': expected names of {all}"))
        })
    }
}
