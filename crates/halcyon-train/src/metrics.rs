//! Metrics that are accumulated over the batches of an evaluation.

use halcyon::Tensor;
use halcyon::ir::DType;
use halcyon::ir::error::{Error, Result};
use std::collections::HashMap;
use std::fmt;

/// The mean of losses, weighted by the number of samples.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct MeanLoss {
    sum: f64,
    samples: u64,
}

impl MeanLoss {
    /// Adds the mean loss of `samples` samples.
    pub fn add(&mut self, loss: f64, samples: u64) {
        self.sum += loss * samples as f64;
        self.samples += samples;
    }

    /// The mean; NaN without samples.
    pub fn mean(&self) -> f64 {
        self.sum / self.samples as f64
    }

    /// `exp(mean)`: the perplexity, if the loss is a cross-entropy in nats.
    pub fn perplexity(&self) -> f64 {
        self.mean().exp()
    }

    pub fn samples(&self) -> u64 {
        self.samples
    }

    pub(crate) fn sum(&self) -> f64 {
        self.sum
    }

    pub(crate) fn restored(sum: f64, samples: u64) -> MeanLoss {
        MeanLoss { sum, samples }
    }
}

/// Counts of a classification: accuracy, top-k accuracy and the confusion matrix.
///
/// ```
/// use halcyon::prelude::*;
/// use halcyon_train::Classification;
/// # fn main() -> halcyon::Result<()> {
/// let b = Backend::cpu()?;
/// let scores = Tensor::from_slice(&b, [3, 3], &[0.1f32, 0.7, 0.2, 0.5, 0.3, 0.2, 0.1, 0.4, 0.5])?;
/// let targets = Tensor::from_slice(&b, [3], &[1i32, 1, 2])?;
/// let mut counts = Classification::new(3).top_k(2);
/// counts.add(&scores, &targets)?;
/// assert_eq!(counts.accuracy(), 2.0 / 3.0);
/// assert_eq!(counts.top_k_accuracy(), Some(1.0));
/// assert_eq!(counts.confused(1, 0), 1);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Classification {
    classes: usize,
    k: Option<usize>,
    within: u64,
    /// The counts by target and answer. This is a map, because a matrix would be too large for many classes.
    confusion: HashMap<(usize, usize), u64>,
}

impl Classification {
    /// Counts for `classes` classes.
    pub fn new(classes: usize) -> Classification {
        Classification { classes, k: None, within: 0, confusion: HashMap::new() }
    }

    /// Also counts how often the target is among the `k` classes with the largest scores.
    pub fn top_k(mut self, k: usize) -> Classification {
        self.k = Some(k);
        self
    }

    /// Adds scores `[…, classes]`, such as logits, and targets `[…]`, which are class numbers. Negative
    /// targets are ignored. If several classes have the largest score, the first of them is the answer.
    ///
    /// # Errors
    /// `Error::Shape` if the shapes do not match; `Error::Argument` for a target that is not below the number
    /// of classes; errors of the device.
    pub fn add(&mut self, scores: &Tensor, targets: &Tensor) -> Result<()> {
        let (have, want) = (scores.dims()?, targets.dims()?);
        let fits = have.last() == Some(&self.classes) && have[..have.len() - 1] == want[..];
        if !fits {
            let what = format!(
                "scores {:?} for targets {:?}, expected scores {:?} and {}",
                have.as_slice(),
                want.as_slice(),
                want.as_slice(),
                self.classes
            );
            return Err(Error::shape("Classification::add", what));
        }
        let answers = scores.argmax(-1).cast(DType::I32);
        let classes = Tensor::arange(scores.backend(), self.classes, DType::I32);
        let own = classes.eq(targets.cast(DType::I32).unsqueeze(-1));
        let lowest = Tensor::full(scores.backend(), [1usize], f64::NEG_INFINITY, scores.dtype()?);
        let score = own.select(scores, &lowest).max_keepdim(-1);
        // The number of classes whose score is larger than the target's score. If one of the two scores is
        // NaN, the class counts too. So a target whose score is NaN is not among the `k` largest.
        let ahead = (scores.le(&score).cast(DType::I32) * -1 + 1).sum(-1);
        let counted =
            if self.k.is_some() { vec![answers.clone(), ahead.clone()] } else { vec![answers.clone()] };
        halcyon::eval(&counted)?;
        let (answers, targets) = (answers.to_vec::<i64>()?, targets.to_vec::<i64>()?);
        let beyond = targets.iter().find(|t| **t >= self.classes as i64);
        if let Some(t) = beyond {
            let what = format!("the target {t} is not a class; there are {} classes", self.classes);
            return Err(Error::argument("Classification::add", what));
        }
        for (t, a) in targets.iter().zip(&answers) {
            if let (Ok(t), Ok(a)) = (usize::try_from(*t), usize::try_from(*a)) {
                *self.confusion.entry((t, a)).or_default() += 1;
            }
        }
        if let Some(k) = self.k {
            let ahead = ahead.to_vec::<i64>()?;
            let within = targets.iter().zip(&ahead).filter(|(t, n)| **t >= 0 && **n < k as i64);
            self.within += within.count() as u64;
        }
        Ok(())
    }

    /// The number of targets, without the ignored ones.
    pub fn total(&self) -> u64 {
        self.confusion.values().sum()
    }

    /// The share of targets that equal the answer; NaN without targets.
    pub fn accuracy(&self) -> f64 {
        let right: u64 = (0..self.classes).map(|c| self.confused(c, c)).sum();
        right as f64 / self.total() as f64
    }

    /// The share of targets that are among the `k` classes with the largest scores; `None` without
    /// [`Classification::top_k`].
    pub fn top_k_accuracy(&self) -> Option<f64> {
        self.k.map(|_| self.within as f64 / self.total() as f64)
    }

    /// The number of samples of class `target` for which class `answer` was the answer; 0 for a class that
    /// does not exist.
    pub fn confused(&self, target: usize, answer: usize) -> u64 {
        self.confusion.get(&(target, answer)).copied().unwrap_or(0)
    }
}

/// The confusion matrix, with a row per target and a column per answer.
impl fmt::Display for Classification {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let most = self.confusion.values().max().copied().unwrap_or(0).to_string().len();
        let width = most.max(self.classes.to_string().len()) + 1;
        write!(f, "{:width$}", "")?;
        (0..self.classes).try_for_each(|c| write!(f, "{c:>width$}"))?;
        for t in 0..self.classes {
            write!(f, "\n{t:>width$}")?;
            (0..self.classes).try_for_each(|a| write!(f, "{:>width$}", self.confused(t, a)))?;
        }
        Ok(())
    }
}
