//! Losses, under PyTorch's names and with its defaults.

use crate::layers::{softplus, zero_of};
use halcyon::Tensor;
use halcyon::ir::DType;
use halcyon::ir::error::{Error, Result};
use halcyon::ops::CrossEntropy;

/// How the losses of the elements are reduced to the result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reduction {
    /// Their mean: a scalar.
    #[default]
    Mean,
    /// Their sum: a scalar.
    Sum,
    /// None: the result has one loss per element.
    None,
}

impl Reduction {
    /// Reduces the losses of the elements.
    #[track_caller]
    fn of(self, x: Tensor) -> Tensor {
        match self {
            Reduction::Mean => x.mean(..),
            Reduction::Sum => x.sum(..),
            Reduction::None => x,
        }
    }
}

/// A tensor that depends on `x` and carries the error.
#[track_caller]
fn failed(x: &Tensor, e: Error) -> Tensor {
    Tensor::build(&[x], |_, _| Err(e))
}

/// Returns an error if the shapes differ. PyTorch only warns and broadcasts, but different shapes are nearly
/// always a mistake.
fn same_shape(op: &str, x: &Tensor, target: &Tensor) -> Result<()> {
    let (a, b) = (x.shape()?, target.shape()?);
    match a == b {
        true => Ok(()),
        false => Err(Error::shape(op, format!("the prediction is {a}, but the target is {b}"))),
    }
}

macro_rules! elementwise {
    ($($(#[$doc:meta])* $name:ident($x:ident, $y:ident $(, $arg:ident: $ty:ty)*) $body:expr;)*) => {
        $(
            $(#[$doc])*
            /// Prediction and target have the same shape.
            #[track_caller]
            pub fn $name($x: &Tensor, $y: &Tensor $(, $arg: $ty)*, reduction: Reduction) -> Tensor {
                match same_shape(stringify!($name), $x, $y) {
                    Ok(()) => reduction.of($body),
                    Err(e) => failed($x, e),
                }
            }
        )*
    };
}
elementwise! {
    /// `(x - y)²`.
    mse_loss(x, y) (x - y).sqr();
    /// `|x - y|`.
    l1_loss(x, y) (x - y).abs();
    /// `(x - y)² / 2` where `|x - y| < delta`, elsewhere `delta (|x - y| - delta / 2)` (Huber 1964).
    huber_loss(x, y, delta: f64) huber(&(x - y).abs(), delta);
    /// [`huber_loss`] divided by `beta`: `(x - y)² / (2 beta)` where `|x - y| < beta`, else `|x - y| - beta /
    /// 2`. With `beta` 0 it is [`l1_loss`].
    smooth_l1_loss(x, y, beta: f64) match beta == 0.0 {
        true => (x - y).abs(),
        false => huber(&(x - y).abs(), beta) * (1.0 / beta),
    };
    /// `y (log y - x)`, the terms of the Kullback-Leibler divergence. `x` holds logarithms of probabilities,
    /// `y` holds probabilities. A term with `y = 0` is 0. `Reduction::Mean` is the mean over all elements, as
    /// PyTorch's `mean`. For PyTorch's `batchmean`, use `Reduction::Sum` and divide by the batch size.
    kl_div(x, y) {
        let log = y.maximum(f64::MIN_POSITIVE.max(1e-38)).log();
        y.gt(0.0).select(&(y * (log - x)), &zero_of(y))
    };
    /// `-(y log x + (1 - y) log(1 - x))`, where `x` are probabilities. Logarithms are at least -100.
    binary_cross_entropy(x, y) {
        let (a, b) = (x.log().maximum(-100.0), (1.0 - x).log().maximum(-100.0));
        (y - 1.0) * b - y * a
    };
}

/// `d² / 2` below `delta`, else `delta (d - delta / 2)`; `d` is not negative.
#[track_caller]
fn huber(d: &Tensor, delta: f64) -> Tensor {
    d.lt(delta).select(&(d.sqr() * 0.5), &((d - 0.5 * delta) * delta))
}

/// Options of [`binary_cross_entropy_with_logits`].
#[derive(Clone, Copy, Debug, Default)]
pub struct BceOptions<'a> {
    /// A factor for each element's loss; it broadcasts.
    pub weight: Option<&'a Tensor>,
    /// A factor for the positive term, one per class; it broadcasts.
    pub pos_weight: Option<&'a Tensor>,
    pub reduction: Reduction,
}

/// [`binary_cross_entropy`] of `sigmoid(x)`, computed without overflow: `(1 - y) x + (1 + (p - 1) y) log(1 +
/// exp(-x))` with the positive weight `p`.
#[track_caller]
pub fn binary_cross_entropy_with_logits(x: &Tensor, y: &Tensor, o: BceOptions<'_>) -> Tensor {
    if let Err(e) = same_shape("binary_cross_entropy_with_logits", x, y) {
        return failed(x, e);
    }
    let log = softplus(&-x);
    let log = match o.pos_weight {
        Some(p) => ((p - 1.0) * y + 1.0) * log,
        None => log,
    };
    let loss = (1.0 - y) * x + log;
    o.reduction.of(match o.weight {
        Some(w) => loss * w,
        None => loss,
    })
}

/// Options of [`cross_entropy`] and [`nll_loss`].
#[derive(Clone, Copy, Debug)]
pub struct CrossEntropyOptions<'a> {
    /// A factor per class, `[classes]`. The mean divides by the sum of the targets' factors, or by the number
    /// of targets if these are probabilities.
    pub weight: Option<&'a Tensor>,
    /// Targets with this value do not contribute to the loss. Default: -100.
    pub ignore_index: Option<i64>,
    /// Share of the target's probability that is spread over all classes (Szegedy et al. 2015). Default: 0.
    pub label_smoothing: f64,
    pub reduction: Reduction,
}

impl Default for CrossEntropyOptions<'_> {
    fn default() -> Self {
        CrossEntropyOptions {
            weight: None,
            ignore_index: Some(-100),
            label_smoothing: 0.0,
            reduction: Reduction::Mean,
        }
    }
}

/// Cross-entropy of logits `[batch, classes, …]` and targets. The targets are class numbers `[batch, …]`, or
/// probabilities with the shape of the logits.
///
/// A class number that is out of range causes an error when a result is read.
#[track_caller]
pub fn cross_entropy(logits: &Tensor, target: &Tensor, o: CrossEntropyOptions<'_>) -> Tensor {
    match cross_entropy_of(logits, target, o) {
        Ok(t) => t,
        Err(e) => failed(logits, e),
    }
}

#[track_caller]
fn cross_entropy_of(logits: &Tensor, target: &Tensor, o: CrossEntropyOptions<'_>) -> Result<Tensor> {
    if !(0.0..=1.0).contains(&o.label_smoothing) {
        let what = format!("the label smoothing {} is outside of 0..=1", o.label_smoothing);
        return Err(Error::argument("cross_entropy", what));
    }
    if target.dtype()?.is_float() {
        return with_probabilities(logits, target, o);
    }
    if o.weight.is_none() && o.label_smoothing == 0.0 && o.reduction == Reduction::Mean {
        // The tensor's method computes this common case with fewer ops.
        return Ok(logits.cross_entropy_with(target, CrossEntropy { ignore_index: o.ignore_index }));
    }
    let log = logits.log_softmax(1);
    let picked = Picked::of(&log, target, o)?;
    let loss = match o.label_smoothing {
        0.0 => picked.loss.clone(),
        s => {
            let weighted = match o.weight {
                Some(w) => &log * along_classes(w, &log)?,
                None => log.clone(),
            };
            let classes = log.dims()?[1] as f64;
            let smooth = -weighted.sum(1) * &picked.counts;
            &picked.loss * (1.0 - s) + smooth * (s / classes)
        }
    };
    Ok(picked.reduce(loss, o.reduction))
}

/// Negative log-likelihood. Like [`cross_entropy`], but `log` holds logarithms of probabilities instead of
/// logits, and label smoothing is not supported.
#[track_caller]
pub fn nll_loss(log: &Tensor, target: &Tensor, o: CrossEntropyOptions<'_>) -> Tensor {
    let loss = || {
        if o.label_smoothing != 0.0 {
            return Err(Error::unsupported("label smoothing in nll_loss", "Use cross_entropy"));
        }
        let picked = Picked::of(log, target, o)?;
        Ok(picked.reduce(picked.loss.clone(), o.reduction))
    };
    match loss() {
        Ok(t) => t,
        Err(e) => failed(log, e),
    }
}

/// Reshapes a vector `[classes]` so that it broadcasts along axis 1 of `like`.
fn along_classes(w: &Tensor, like: &Tensor) -> Result<Tensor> {
    let dims = like.dims()?;
    if dims.len() < 2 || w.dims()?.as_slice() != [dims[1]] {
        let what =
            format!("a weight of {:?} does not fit logits of {:?}", w.dims()?.as_slice(), dims.as_slice());
        return Err(Error::shape("cross_entropy", what));
    }
    let mut shape = vec![1usize; dims.len() - 1];
    shape[0] = dims[1];
    Ok(w.reshape(shape))
}

/// The terms of the loss that belong to the target classes, `[batch, …]`.
struct Picked {
    /// `-weight · log`, 0 for ignored targets.
    loss: Tensor,
    /// 1 for targets that count, 0 for ignored targets.
    counts: Tensor,
    /// The factor of each target; 0 for ignored targets.
    weight: Tensor,
}

impl Picked {
    #[track_caller]
    fn of(log: &Tensor, target: &Tensor, o: CrossEntropyOptions<'_>) -> Result<Picked> {
        let (dims, t) = (log.dims()?, target.dims()?);
        let fits = dims.len() >= 2 && t.first() == dims.first() && t[1..] == dims[2..];
        if !fits {
            let what = format!("targets of {:?} do not fit logits of {:?}", t.as_slice(), dims.as_slice());
            return Err(Error::shape("cross_entropy", what));
        }
        let dtype = log.dtype()?;
        let target = target.cast(DType::I32);
        let (counts, index) = match o.ignore_index {
            Some(i) => {
                let counts = target.ne(i);
                (counts.cast(dtype), counts.select(&target, &zero_of(&target)))
            }
            None => (Tensor::ones(target.backend(), target.shape()?, dtype), target.clone()),
        };
        let index = index.unsqueeze(1);
        let value = log.gather_elements(&index, 1).squeeze(1);
        let weight = match o.weight {
            Some(w) => w.cast(dtype).gather(&index.squeeze(1), 0) * &counts,
            None => counts.clone(),
        };
        along_classes_checked(o.weight, log)?;
        // This is a select and not a product, because an infinite logarithm times 0 would be NaN.
        let loss = counts.gt(0.0).select(&(-value * &weight), &zero_of(&counts));
        Ok(Picked { loss, counts, weight })
    }

    #[track_caller]
    fn reduce(&self, loss: Tensor, reduction: Reduction) -> Tensor {
        match reduction {
            Reduction::Mean => loss.sum(..) / self.weight.sum(..),
            Reduction::Sum => loss.sum(..),
            Reduction::None => loss,
        }
    }
}

fn along_classes_checked(weight: Option<&Tensor>, log: &Tensor) -> Result<()> {
    weight.map_or(Ok(()), |w| along_classes(w, log).map(drop))
}

/// Cross-entropy for targets that are probabilities. The mean divides by the number of targets; class weights
/// do not change the divisor.
#[track_caller]
fn with_probabilities(logits: &Tensor, target: &Tensor, o: CrossEntropyOptions<'_>) -> Result<Tensor> {
    same_shape("cross_entropy", logits, target)?;
    let dims = logits.dims()?;
    if dims.len() < 2 {
        return Err(Error::shape(
            "cross_entropy",
            format!("logits of {:?} have no classes", dims.as_slice()),
        ));
    }
    let classes = dims[1] as f64;
    let s = o.label_smoothing;
    let target = if s > 0.0 { target * (1.0 - s) + s / classes } else { target.clone() };
    let mut terms = logits.log_softmax(1) * target;
    if let Some(w) = o.weight {
        terms = &terms * along_classes(w, &terms)?;
    }
    Ok(o.reduction.of(-terms.sum(1)))
}

/// Options of [`ctc_loss`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CtcOptions {
    /// The class that means "no label". Default: 0.
    pub blank: usize,
    /// `Mean` divides each loss by its target's length before the mean over the batch.
    pub reduction: Reduction,
    /// Whether infinite losses count as 0. A loss is infinite if the target is too long for its input.
    pub zero_infinity: bool,
}

/// Connectionist temporal classification (Graves et al. 2006). `log` holds logarithms of probabilities,
/// `[time, batch, classes]`. `targets` holds class numbers `[batch, longest]` without blanks; the padding may
/// be any class. `input_lengths` and `target_lengths` hold the number of time steps and of labels of each
/// sequence.
///
/// # Errors
/// `Error::Shape` and `Error::Argument` for operands that do not fit together.
#[track_caller]
pub fn ctc_loss(
    log: &Tensor,
    targets: &Tensor,
    input_lengths: &[usize],
    target_lengths: &[usize],
    o: CtcOptions,
) -> Result<Tensor> {
    let (dims, t) = (log.dims()?, targets.dims()?);
    let [time, batch, classes] = dims[..] else {
        return Err(Error::shape(
            "ctc_loss",
            format!("the logarithms are {:?}, not of three axes", dims.as_slice()),
        ));
    };
    let fits = t.len() == 2 && t[0] == batch && input_lengths.len() == batch && target_lengths.len() == batch;
    if !fits || o.blank >= classes {
        let what = format!(
            "logarithms of {:?}, targets of {:?}, {} input and {} target lengths, blank {}",
            dims.as_slice(),
            t.as_slice(),
            input_lengths.len(),
            target_lengths.len(),
            o.blank
        );
        return Err(Error::shape("ctc_loss", what));
    }
    let longest = t[1];
    let too_long =
        input_lengths.iter().any(|n| *n > time || *n == 0) || target_lengths.iter().any(|n| *n > longest);
    if too_long {
        let what = format!(
            "input lengths {input_lengths:?}, expected 1 to {time}; target lengths {target_lengths:?}, expected at most {longest}"
        );
        return Err(Error::argument("ctc_loss", what));
    }
    let b = log.backend();
    // Blank, label, blank, label, …, blank: 2 · longest + 1 states per sequence.
    let states = 2 * longest + 1;
    let blank = Tensor::full(b, [batch, longest, 1], o.blank as i64, DType::I32);
    let labels = targets.cast(DType::I32).unsqueeze(2);
    let pairs = Tensor::cat(&[blank, labels], 2).reshape([batch, 2 * longest]);
    let end = Tensor::full(b, [batch, 1], o.blank as i64, DType::I32);
    let extended = Tensor::cat(&[pairs, end], 1);
    // A finite number in place of -∞, because -∞ - (-∞) is NaN.
    const NEVER: f64 = -1e30;
    let never = |n: usize| Tensor::full(b, [batch, n], NEVER, DType::F32);
    // A path may skip one state, unless the states before and after the skipped state have the same label.
    let skip = match states > 2 {
        true => {
            let (now, before) =
                (extended.narrow(1, 2usize, states - 2), extended.narrow(1, 0usize, states - 2));
            let differ = now.ne(&before).select(&Tensor::scalar(b, 0.0, DType::F32), &never(states - 2));
            Some(Tensor::cat(&[never(2), differ], 1))
        }
        false => None,
    };
    let emitted =
        |step: usize| log.narrow(0, step, 1usize).squeeze(0).cast(DType::F32).gather_elements(&extended, 1);
    let start = states.min(2);
    let open = Tensor::zeros(b, [batch, start], DType::F32);
    let allowed = match states > start {
        true => Tensor::cat(&[open, never(states - start)], 1),
        false => open,
    };
    let mut alpha = emitted(0) + allowed;
    let lengths: Vec<i32> = input_lengths.iter().map(|n| *n as i32).collect();
    let lengths = Tensor::from_slice(b, [batch, 1], &lengths)?;
    for step in 1..time {
        let shifted = |n: usize| match states > n {
            true => Tensor::cat(&[never(n), alpha.narrow(1, 0usize, states - n)], 1),
            false => never(states),
        };
        let mut sources = vec![alpha.clone(), shifted(1)];
        if let Some(skip) = &skip {
            sources.push(shifted(2) + skip);
        }
        let new = log_sum_exp(&sources) + emitted(step);
        // A sequence that has already ended keeps its state.
        alpha = lengths.gt(step as i64).select(&new, &alpha);
    }
    let last: Vec<i32> = target_lengths.iter().map(|n| 2 * *n as i32).collect();
    let last = Tensor::from_slice(b, [batch, 1], &last)?;
    let at_blank = alpha.gather_elements(&last, 1);
    let at_label = alpha.gather_elements(&(&last - 1).maximum(0), 1);
    // A target without labels has no last label.
    let at_label = last.gt(0).select(&at_label, &never(1));
    let total = log_sum_exp(&[at_blank, at_label]).squeeze(1);
    let impossible = total.lt(NEVER * 0.5);
    let worst = if o.zero_infinity { 0.0 } else { f64::INFINITY };
    let loss = impossible.select(&Tensor::full(b, [batch], worst, DType::F32), &-total);
    Ok(match o.reduction {
        Reduction::Mean => {
            let lengths: Vec<f32> = target_lengths.iter().map(|n| (*n).max(1) as f32).collect();
            (loss / Tensor::from_slice(b, [batch], &lengths)?).mean(..)
        }
        r => r.of(loss),
    })
}

/// `log Σ exp` over several tensors, element by element.
#[track_caller]
fn log_sum_exp(x: &[Tensor]) -> Tensor {
    let most = x[1..].iter().fold(x[0].clone(), |m, t| m.maximum(t)).stop_gradient();
    let sum = x[1..].iter().fold((&x[0] - &most).exp(), |s, t| s + (t - &most).exp());
    sum.log() + most
}
