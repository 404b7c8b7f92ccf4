//! Dynamic loss scaling for training in f16.

use halcyon::ir::DType;
use halcyon::ir::error::{Error, Result};
use halcyon::{Backend, State, Tensor};
use std::sync::Arc;

/// Scales the loss so that small gradients do not vanish in f16, and skips steps whose gradients overflow
/// (Micikevicius et al. 2018). The device decides whether a training step is skipped: the plan of the step
/// computes the new parameters and states of the optimizer, and selects the old ones if a gradient
/// overflowed. The module's buffers change in a skipped step too. The defaults are those of PyTorch's
/// `GradScaler`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossScaler {
    /// The initial scale, by which the loss is multiplied. Default: 65536.
    pub initial: f64,
    /// The scale is multiplied by this factor after `interval` steps without an overflow. Default: 2.
    pub growth: f64,
    /// The scale is multiplied by this factor after an overflow. Default: 0.5.
    pub backoff: f64,
    /// The number of steps without an overflow after which the scale grows. Default: 2000.
    pub interval: u32,
}

impl Default for LossScaler {
    fn default() -> LossScaler {
        LossScaler { initial: 65536.0, growth: 2.0, backoff: 0.5, interval: 2000 }
    }
}

/// The scale and its counters, on the device.
#[derive(Debug)]
pub(crate) struct Scaling {
    /// f32, rank 0.
    scale: Arc<State>,
    /// Steps without an overflow since the scale last changed: i32, rank 0.
    good: Arc<State>,
    /// Steps skipped so far: i32, rank 0.
    skipped: Arc<State>,
}

impl Scaling {
    pub(crate) fn new(b: &Backend, settings: LossScaler) -> Result<Scaling> {
        let LossScaler { initial, growth, backoff, interval } = settings;
        let fits = initial.is_finite() && initial > 0.0 && growth > 1.0 && backoff > 0.0 && backoff < 1.0;
        if !fits || interval == 0 {
            let what = format!(
                "scale {initial}, growth {growth}, backoff {backoff}, interval {interval}: expected a positive scale, \
                 a growth above 1, a backoff between 0 and 1 and an interval of at least 1"
            );
            return Err(Error::argument("LossScaler", what));
        }
        let count = || Arc::new(State::new(Tensor::scalar(b, 0i64, DType::I32)));
        let scale = Arc::new(State::new(Tensor::scalar(b, initial, DType::F32)));
        Ok(Scaling { scale, good: count(), skipped: count() })
    }

    /// Makes the scale and its counters from the values of [`Scaling::states`].
    pub(crate) fn holding(values: [Tensor; 3]) -> Scaling {
        let [scale, good, skipped] = values.map(|t| Arc::new(State::new(t)));
        Scaling { scale, good, skipped }
    }

    /// The scale, the number of steps without an overflow since it changed, and the number of skipped steps.
    pub(crate) fn states(&self) -> [&Arc<State>; 3] {
        [&self.scale, &self.good, &self.skipped]
    }
}

/// Whether any gradient has an element that is not finite in f32: bool, rank 0. `None` if there are no
/// gradients.
#[track_caller]
pub(crate) fn overflowed(grads: &[Tensor]) -> Option<Tensor> {
    // Zero times an infinity or NaN is NaN, and a sum with NaN is NaN.
    let zeros = grads.iter().map(|g| (g.cast(DType::F32) * 0.0).sum(..));
    zeros.reduce(|a, b| a + b).map(|sum| sum.isnan())
}

/// The values of [`Scaling::states`] after a step.
#[track_caller]
pub(crate) fn next(s: &LossScaler, [scale, good, skipped]: [&Tensor; 3], overflow: &Tensor) -> [Tensor; 3] {
    let grown = (good + 1).ge(i64::from(s.interval));
    // The limit keeps the scale finite, because backoff cannot reduce an infinite scale.
    let kept = grown.select(&(scale * s.growth).minimum(2f64.powi(127)), scale);
    let zero = Tensor::scalar(good.backend(), 0i64, DType::I32);
    let counted = grown.select(&zero, &(good + 1));
    [
        overflow.select(&(scale * s.backoff), &kept),
        overflow.select(&zero, &counted),
        overflow.select(&(skipped + 1), skipped),
    ]
}
