//! Update rules: each computes a new parameter from its gradient.

use super::Num;
use halcyon::Tensor;
use halcyon::ir::error::{Error, Result};
use std::fmt::Debug;

/// A tensor that a rule keeps for each parameter.
#[derive(Clone, Debug, PartialEq)]
pub struct StateSpec {
    /// The name in checkpoints, such as `exp_avg`.
    pub name: &'static str,
    pub dims: Vec<usize>,
    /// The value before the first step.
    pub initial: f64,
}

/// The numbers that differ between steps and groups.
#[derive(Clone, Debug)]
pub struct StepNumbers {
    /// The number of the step, from 1. Steps that a loss scaler skips do not count.
    pub step: Num,
    /// The learning rate.
    pub rate: Num,
    pub weight_decay: f64,
}

/// Computes a new parameter from its gradient. All tensors are in f32, or in f64 for a parameter in f64.
pub trait UpdateRule: Debug + Send + Sync {
    /// The name in messages and checkpoints.
    fn name(&self) -> &'static str;

    /// The learning rate and the weight decay of groups that do not set them.
    fn defaults(&self) -> (f64, f64);

    /// The tensors kept for a parameter of shape `dims`.
    ///
    /// # Errors
    /// `Error::Argument` for a parameter that the rule cannot update.
    fn state(&self, dims: &[usize]) -> Result<Vec<StateSpec>>;

    /// The scalars of a step, computed once for all parameters of a group.
    fn scalars(&self, n: &StepNumbers) -> Vec<Num>;

    /// The new parameter and state. `scalars` holds the values of [`UpdateRule::scalars`] as rank-0 tensors.
    fn update(&self, p: &Tensor, g: &Tensor, state: &[Tensor], scalars: &[Tensor]) -> (Tensor, Vec<Tensor>);
}

fn like(name: &'static str, dims: &[usize]) -> StateSpec {
    StateSpec { name, dims: dims.to_vec(), initial: 0.0 }
}

/// `a + (b - a) weight`.
#[track_caller]
fn lerp(a: &Tensor, b: &Tensor, weight: f64) -> Tensor {
    a + (b - a) * weight
}

macro_rules! setters {
    ($name:ident $($field:ident: $ty:ty = $doc:literal),*) => {
        impl $name {
            /// The defaults.
            pub fn new() -> $name {
                $name::default()
            }
            $(#[doc = $doc]
            pub fn $field(mut self, $field: $ty) -> $name {
                self.$field = $field;
                self
            })*
        }
    };
}

/// Stochastic gradient descent with optional momentum (Sutskever et al. 2013). Defaults: rate 1e-3, no
/// momentum.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sgd {
    pub rate: f64,
    pub momentum: f64,
    pub dampening: f64,
    pub weight_decay: f64,
    pub nesterov: bool,
}

impl Default for Sgd {
    fn default() -> Sgd {
        Sgd { rate: 1e-3, momentum: 0.0, dampening: 0.0, weight_decay: 0.0, nesterov: false }
    }
}
setters!(Sgd rate: f64 = "Sets the learning rate.", momentum: f64 = "Sets the momentum.",
    dampening: f64 = "Sets the dampening: after step 1, the momentum adds the gradient times `1 - dampening`.",
    weight_decay: f64 = "Sets the weight decay, added to the gradient.",
    nesterov: bool = "Uses Nesterov's momentum.");

impl UpdateRule for Sgd {
    fn name(&self) -> &'static str {
        "sgd"
    }
    fn defaults(&self) -> (f64, f64) {
        (self.rate, self.weight_decay)
    }
    fn state(&self, dims: &[usize]) -> Result<Vec<StateSpec>> {
        if self.nesterov && (self.momentum <= 0.0 || self.dampening != 0.0) {
            let what = "Nesterov's momentum needs a momentum above 0 and no dampening";
            return Err(Error::argument("sgd", what));
        }
        Ok(if self.momentum == 0.0 { vec![] } else { vec![like("momentum_buffer", dims)] })
    }
    fn scalars(&self, n: &StepNumbers) -> Vec<Num> {
        // In the first step, the momentum is the gradient, without dampening.
        let share = n.step.clone().one_if_first(1.0 - self.dampening);
        vec![n.rate.clone(), n.weight_decay.into(), share]
    }
    fn update(&self, p: &Tensor, g: &Tensor, state: &[Tensor], s: &[Tensor]) -> (Tensor, Vec<Tensor>) {
        let g = g + p * &s[1];
        let Some(buffer) = state.first() else { return (p - g * &s[0], vec![]) };
        let buffer = buffer * self.momentum + &g * &s[2];
        let step = if self.nesterov { g + &buffer * self.momentum } else { buffer.clone() };
        (p - step * &s[0], vec![buffer])
    }
}

/// Adam (Kingma and Ba 2014) and AdamW (Loshchilov and Hutter 2017). Defaults: rate 1e-3, betas 0.9 and
/// 0.999, eps 1e-8.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adam {
    pub rate: f64,
    pub beta1: f64,
    pub beta2: f64,
    pub eps: f64,
    pub weight_decay: f64,
    /// Whether the weight decay is applied to the parameter (AdamW) or added to the gradient (Adam).
    pub decoupled: bool,
    /// Whether the largest second moment so far is used (Reddi et al. 2018).
    pub amsgrad: bool,
}

impl Default for Adam {
    fn default() -> Adam {
        Adam {
            rate: 1e-3,
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 0.0,
            decoupled: false,
            amsgrad: false,
        }
    }
}
setters!(Adam rate: f64 = "Sets the learning rate.", beta1: f64 = "Sets the decay of the first moment.",
    beta2: f64 = "Sets the decay of the second moment.", eps: f64 = "Sets the term added to the divisor.",
    weight_decay: f64 = "Sets the weight decay.", amsgrad: bool = "Uses the largest second moment so far.");

impl Adam {
    /// AdamW. The weight decay is applied to the parameter; its default is 0.01.
    pub fn w() -> Adam {
        Adam { decoupled: true, weight_decay: 0.01, ..Adam::default() }
    }
}

impl UpdateRule for Adam {
    fn name(&self) -> &'static str {
        if self.decoupled { "adamw" } else { "adam" }
    }
    fn defaults(&self) -> (f64, f64) {
        (self.rate, self.weight_decay)
    }
    fn state(&self, dims: &[usize]) -> Result<Vec<StateSpec>> {
        let mut state = vec![like("exp_avg", dims), like("exp_avg_sq", dims)];
        if self.amsgrad {
            state.push(like("max_exp_avg_sq", dims));
        }
        Ok(state)
    }
    fn scalars(&self, n: &StepNumbers) -> Vec<Num> {
        let first = n.step.clone().one_minus_power_of(self.beta1);
        let second = n.step.clone().one_minus_power_of(self.beta2);
        let decay = match self.decoupled {
            true => 1.0 - n.rate.clone() * n.weight_decay,
            false => n.weight_decay.into(),
        };
        vec![n.rate.clone() / first, 1.0 / second.sqrt(), decay]
    }
    fn update(&self, p: &Tensor, g: &Tensor, state: &[Tensor], s: &[Tensor]) -> (Tensor, Vec<Tensor>) {
        let (p, g) = match self.decoupled {
            true => (p * &s[2], g.clone()),
            false => (p.clone(), g + p * &s[2]),
        };
        let m = lerp(&state[0], &g, 1.0 - self.beta1);
        let v = &state[1] * self.beta2 + g.sqr() * (1.0 - self.beta2);
        let mut new = vec![m.clone(), v.clone()];
        let v = match state.get(2) {
            Some(most) => {
                new.push(most.maximum(&v));
                new[2].clone()
            }
            None => v,
        };
        (p - m / (v.sqrt() * &s[1] + self.eps) * &s[0], new)
    }
}

/// AdaGrad (Duchi et al. 2011). Defaults: rate 1e-2, eps 1e-10.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdaGrad {
    pub rate: f64,
    pub rate_decay: f64,
    pub weight_decay: f64,
    pub initial: f64,
    pub eps: f64,
}

impl Default for AdaGrad {
    fn default() -> AdaGrad {
        AdaGrad { rate: 1e-2, rate_decay: 0.0, weight_decay: 0.0, initial: 0.0, eps: 1e-10 }
    }
}
setters!(AdaGrad rate: f64 = "Sets the learning rate.",
    rate_decay: f64 = "Sets `d` in the rate of step `k`, `rate / (1 + (k - 1) d)`.",
    weight_decay: f64 = "Sets the weight decay.",
    initial: f64 = "Sets the sum of squares before the first step.",
    eps: f64 = "Sets the term added to the divisor.");

impl UpdateRule for AdaGrad {
    fn name(&self) -> &'static str {
        "adagrad"
    }
    fn defaults(&self) -> (f64, f64) {
        (self.rate, self.weight_decay)
    }
    fn state(&self, dims: &[usize]) -> Result<Vec<StateSpec>> {
        Ok(vec![StateSpec { initial: self.initial, ..like("sum", dims) }])
    }
    fn scalars(&self, n: &StepNumbers) -> Vec<Num> {
        let rate = n.rate.clone() / ((n.step.clone() - 1.0) * self.rate_decay + 1.0);
        vec![rate, n.weight_decay.into()]
    }
    fn update(&self, p: &Tensor, g: &Tensor, state: &[Tensor], s: &[Tensor]) -> (Tensor, Vec<Tensor>) {
        let g = g + p * &s[1];
        let sum = &state[0] + g.sqr();
        (p - g / (sum.sqrt() + self.eps) * &s[0], vec![sum])
    }
}

/// RMSProp (Tieleman and Hinton 2012). Defaults: rate 1e-2, alpha 0.99, eps 1e-8.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RmsProp {
    pub rate: f64,
    pub alpha: f64,
    pub eps: f64,
    pub weight_decay: f64,
    pub momentum: f64,
    pub centered: bool,
}

impl Default for RmsProp {
    fn default() -> RmsProp {
        RmsProp { rate: 1e-2, alpha: 0.99, eps: 1e-8, weight_decay: 0.0, momentum: 0.0, centered: false }
    }
}
setters!(RmsProp rate: f64 = "Sets the learning rate.", alpha: f64 = "Sets the decay of the mean square.",
    eps: f64 = "Sets the term added to the divisor.", weight_decay: f64 = "Sets the weight decay.",
    momentum: f64 = "Sets the momentum.", centered: bool = "Divides by the standard deviation.");

impl UpdateRule for RmsProp {
    fn name(&self) -> &'static str {
        "rmsprop"
    }
    fn defaults(&self) -> (f64, f64) {
        (self.rate, self.weight_decay)
    }
    fn state(&self, dims: &[usize]) -> Result<Vec<StateSpec>> {
        let mut state = vec![like("square_avg", dims)];
        if self.momentum > 0.0 {
            state.push(like("momentum_buffer", dims));
        }
        if self.centered {
            state.push(like("grad_avg", dims));
        }
        Ok(state)
    }
    fn scalars(&self, n: &StepNumbers) -> Vec<Num> {
        vec![n.rate.clone(), n.weight_decay.into()]
    }
    fn update(&self, p: &Tensor, g: &Tensor, state: &[Tensor], s: &[Tensor]) -> (Tensor, Vec<Tensor>) {
        let g = g + p * &s[1];
        let square = &state[0] * self.alpha + g.sqr() * (1.0 - self.alpha);
        let mut new = vec![square.clone()];
        let mean = self.centered.then(|| lerp(&state[state.len() - 1], &g, 1.0 - self.alpha));
        let variance = mean.as_ref().map_or(square.clone(), |m| &square - m.sqr());
        let step = g / (variance.sqrt() + self.eps);
        let step = match self.momentum > 0.0 {
            true => {
                new.push(&state[1] * self.momentum + step);
                new[1].clone()
            }
            false => step,
        };
        new.extend(mean);
        (p - step * &s[0], new)
    }
}

/// Adafactor (Shazeer and Stern 2018). The second moments of a matrix are kept as the means of its rows and
/// of its columns. The learning rate is relative to the root-mean-square of the parameter and is `min(rate, 1
/// / sqrt(step))`; the default of `rate` is 1e-2.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adafactor {
    pub rate: f64,
    pub beta2_decay: f64,
    /// A lower bound. The products of row and column means are divided by the larger of `eps1` and the mean
    /// of all second moments. Each resulting second moment is at least `eps1²`.
    pub eps1: f64,
    /// The relative learning rate is multiplied by the parameter's root-mean-square, but at least by `eps2`.
    pub eps2: f64,
    /// The largest root-mean-square of the gradient after division by the root of its second moments.
    pub clip: f64,
    pub weight_decay: f64,
}

impl Default for Adafactor {
    fn default() -> Adafactor {
        Adafactor {
            rate: 1e-2,
            beta2_decay: -0.8,
            eps1: f32::EPSILON as f64,
            eps2: 1e-3,
            clip: 1.0,
            weight_decay: 0.0,
        }
    }
}
setters!(Adafactor rate: f64 = "Sets the largest relative learning rate.",
    beta2_decay: f64 = "Sets the exponent `d` of the second moments' decay, `1 - step^d`.",
    eps1: f64 = "Sets the lower bound of the second moments' mean; each moment is at least `eps1²`.",
    eps2: f64 = "Sets the lower bound of the factor that is the parameter's root-mean-square.",
    clip: f64 = "Sets the largest root-mean-square of the scaled gradient.",
    weight_decay: f64 = "Sets the weight decay, applied to the parameter.");

impl UpdateRule for Adafactor {
    fn name(&self) -> &'static str {
        "adafactor"
    }
    fn defaults(&self) -> (f64, f64) {
        (self.rate, self.weight_decay)
    }
    fn state(&self, dims: &[usize]) -> Result<Vec<StateSpec>> {
        let n = dims.len();
        if n < 2 {
            return Ok(vec![like("variance", dims)]);
        }
        let (mut rows, mut cols) = (dims.to_vec(), dims.to_vec());
        (rows[n - 1], cols[n - 2]) = (1, 1);
        Ok(vec![like("row_var", &rows), like("col_var", &cols)])
    }
    fn scalars(&self, n: &StepNumbers) -> Vec<Num> {
        let share = n.step.clone().pow(self.beta2_decay);
        // The smaller of the rate and 1 / sqrt(step).
        let root = 1.0 / n.step.clone().sqrt();
        let relative = match (&n.rate, &root) {
            (Num::Host(a), Num::Host(b)) => Num::Host(a.min(*b)),
            (Num::Host(a), Num::Device(b)) => Num::Device(b.minimum(*a)),
            (Num::Device(a), Num::Host(b)) => Num::Device(a.minimum(*b)),
            (Num::Device(a), Num::Device(b)) => Num::Device(a.minimum(b)),
        };
        vec![relative, share, 1.0 - n.rate.clone() * n.weight_decay]
    }
    fn update(&self, p: &Tensor, g: &Tensor, state: &[Tensor], s: &[Tensor]) -> (Tensor, Vec<Tensor>) {
        let rms = |x: &Tensor| x.sqr().mean(..).sqrt();
        let alpha = rms(p).maximum(self.eps2) * &s[0];
        let p = p * &s[2];
        let blend = |old: &Tensor, new: Tensor| old + (new - old) * &s[1];
        let square = g.sqr();
        let (estimate, new) = match state {
            [rows, cols] => {
                let rows = blend(rows, square.mean_keepdim(-1));
                let cols = blend(cols, square.mean_keepdim(-2));
                let mean = rows.mean_keepdim(-2).maximum(self.eps1);
                (&rows * &cols / mean, vec![rows, cols])
            }
            _ => {
                let v = blend(&state[0], square);
                (v.clone(), vec![v])
            }
        };
        let step = estimate.maximum(self.eps1 * self.eps1).rsqrt() * g;
        let bound = (rms(&step) * (1.0 / self.clip)).maximum(1.0);
        (p - step * (alpha / bound), new)
    }
}

/// Lion (Chen et al. 2023). Defaults: rate 1e-4, betas 0.9 and 0.99.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Lion {
    pub rate: f64,
    pub beta1: f64,
    pub beta2: f64,
    pub weight_decay: f64,
}

impl Default for Lion {
    fn default() -> Lion {
        Lion { rate: 1e-4, beta1: 0.9, beta2: 0.99, weight_decay: 0.0 }
    }
}
setters!(Lion rate: f64 = "Sets the learning rate.",
    beta1: f64 = "Sets the momentum's share in the step.", beta2: f64 = "Sets the decay of the momentum.",
    weight_decay: f64 = "Sets the weight decay, applied to the parameter.");

impl UpdateRule for Lion {
    fn name(&self) -> &'static str {
        "lion"
    }
    fn defaults(&self) -> (f64, f64) {
        (self.rate, self.weight_decay)
    }
    fn state(&self, dims: &[usize]) -> Result<Vec<StateSpec>> {
        Ok(vec![like("exp_avg", dims)])
    }
    fn scalars(&self, n: &StepNumbers) -> Vec<Num> {
        // The second scalar is `rate * decay`, because `1 - rate * decay` would lose digits in f32.
        vec![n.rate.clone(), n.rate.clone() * n.weight_decay]
    }
    fn update(&self, p: &Tensor, g: &Tensor, state: &[Tensor], s: &[Tensor]) -> (Tensor, Vec<Tensor>) {
        let step = (&state[0] * self.beta1 + g * (1.0 - self.beta1)).sign();
        let m = &state[0] * self.beta2 + g * (1.0 - self.beta2);
        (p - (step * &s[0] + p * &s[1]), vec![m])
    }
}

/// Muon (Jordan et al. 2024): the update is the momentum of a matrix, made nearly orthogonal by the
/// Newton-Schulz iteration. The rule is for matrices only; put other parameters into a group with another
/// rule. Defaults: rate 1e-3, momentum 0.95, weight decay 0.1, five iterations.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Muon {
    pub rate: f64,
    pub momentum: f64,
    pub weight_decay: f64,
    pub nesterov: bool,
    pub iterations: usize,
    /// The momentum is divided by its norm, but at least by `eps`.
    pub eps: f64,
}

impl Default for Muon {
    fn default() -> Muon {
        Muon { rate: 1e-3, momentum: 0.95, weight_decay: 0.1, nesterov: true, iterations: 5, eps: 1e-7 }
    }
}
setters!(Muon rate: f64 = "Sets the learning rate.", momentum: f64 = "Sets the momentum.",
    weight_decay: f64 = "Sets the weight decay, applied to the parameter.",
    nesterov: bool = "Uses Nesterov's momentum.", iterations: usize = "Sets the number of iterations.",
    eps: f64 = "Sets the least norm that the momentum is divided by.");

/// The Newton-Schulz iteration `x := a x + b (x xᵀ) x + c (x xᵀ)² x` with the coefficients of Jordan et al.,
/// which move the singular values near 1 in few iterations. A matrix with more rows than columns is
/// transposed first, so that `x xᵀ` has the smaller of the two sizes.
#[track_caller]
fn orthogonalised(x: &Tensor, iterations: usize, eps: f64, wide: bool) -> Tensor {
    const A: f64 = 3.4445;
    const B: f64 = -4.775;
    const C: f64 = 2.0315;
    let mut x = if wide { x.clone() } else { x.transpose(0, 1) };
    x = &x / x.sqr().sum(..).sqrt().maximum(eps);
    for _ in 0..iterations {
        let gram = x.matmul(&x.transpose(0, 1));
        let factor = &gram * B + gram.matmul(&gram) * C;
        x = &x * A + factor.matmul(&x);
    }
    if wide { x } else { x.transpose(0, 1) }
}

impl UpdateRule for Muon {
    fn name(&self) -> &'static str {
        "muon"
    }
    fn defaults(&self) -> (f64, f64) {
        (self.rate, self.weight_decay)
    }
    fn state(&self, dims: &[usize]) -> Result<Vec<StateSpec>> {
        if dims.len() != 2 {
            let what =
                format!("it updates matrices, not {dims:?}; put this parameter in a group with another rule");
            return Err(Error::argument("muon", what));
        }
        Ok(vec![like("momentum_buffer", dims)])
    }
    fn scalars(&self, n: &StepNumbers) -> Vec<Num> {
        vec![n.rate.clone(), 1.0 - n.rate.clone() * n.weight_decay]
    }
    fn update(&self, p: &Tensor, g: &Tensor, state: &[Tensor], s: &[Tensor]) -> (Tensor, Vec<Tensor>) {
        let buffer = lerp(&state[0], g, 1.0 - self.momentum);
        let step = if self.nesterov { lerp(g, &buffer, self.momentum) } else { buffer.clone() };
        let (rows, cols) = match p.dims().as_deref() {
            Ok([r, c]) => (*r, *c),
            _ => (1, 1),
        };
        let step = orthogonalised(&step, self.iterations, self.eps, rows <= cols);
        let scale = (rows as f64 / cols as f64).max(1.0).sqrt();
        (p * &s[1] - step * scale * &s[0], vec![buffer])
    }
}
