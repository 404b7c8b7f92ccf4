use super::zero_of;
use crate::module::{Module, Visit};
use halcyon::Tensor;

/// Which formula GELU uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gelu {
    /// With the error function.
    Exact,
    /// With the hyperbolic tangent (Hendrycks and Gimpel 2016).
    Tanh,
}

/// An activation function as a module, for [`super::Sequential`] and configurations. In a forward that you
/// write yourself, call the tensor's methods instead.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Activation {
    Relu,
    /// `x` where positive, else `slope * x`.
    LeakyRelu(f64),
    /// `x` where positive, else `alpha * (exp(x) - 1)`.
    Elu(f64),
    Gelu(Gelu),
    /// `x * sigmoid(x)`, also called swish.
    Silu,
    Sigmoid,
    Tanh,
    Softplus,
    Mish,
    /// `x * min(max(x + 3, 0), 6) / 6`.
    HardSwish,
    /// Softmax along an axis.
    Softmax(i64),
    LogSoftmax(i64),
}

impl Module for Activation {
    fn visit(&self, _: &mut Visit<'_>) {}
    fn kind(&self) -> &'static str {
        match self {
            Activation::Relu => "ReLU",
            Activation::LeakyRelu(_) => "LeakyReLU",
            Activation::Elu(_) => "ELU",
            Activation::Gelu(_) => "GELU",
            Activation::Silu => "SiLU",
            Activation::Sigmoid => "Sigmoid",
            Activation::Tanh => "Tanh",
            Activation::Softplus => "Softplus",
            Activation::Mish => "Mish",
            Activation::HardSwish => "Hardswish",
            Activation::Softmax(_) => "Softmax",
            Activation::LogSoftmax(_) => "LogSoftmax",
        }
    }
}

impl Activation {
    /// Applies the activation to every element of `x`, or along the axis of a softmax.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Tensor {
        match *self {
            Activation::Relu => x.relu(),
            Activation::LeakyRelu(slope) => x.leaky_relu(slope),
            Activation::Elu(alpha) => elu(x, alpha),
            Activation::Gelu(Gelu::Exact) => x.gelu(),
            Activation::Gelu(Gelu::Tanh) => x.gelu_tanh(),
            Activation::Silu => x.silu(),
            Activation::Sigmoid => x.sigmoid(),
            Activation::Tanh => x.tanh(),
            Activation::Softplus => softplus(x),
            Activation::Mish => x * softplus(x).tanh(),
            Activation::HardSwish => x * (x + 3.0).clamp(0.0, 6.0) * (1.0 / 6.0),
            Activation::Softmax(axis) => x.softmax(axis),
            Activation::LogSoftmax(axis) => x.log_softmax(axis),
        }
    }
}

/// `log(1 + exp(x))`. For `x` above 20 the result is `x`, which is the same number in f32.
#[track_caller]
pub(crate) fn softplus(x: &Tensor) -> Tensor {
    x.gt(20.0).select(x, &x.minimum(20.0).exp().log1p())
}

/// `x` where positive, else `alpha (exp(x) - 1)`. At 0 the slope is `alpha`, as in PyTorch.
#[track_caller]
fn elu(x: &Tensor, alpha: f64) -> Tensor {
    let positive = x.gt(0.0);
    // Positive elements are replaced by zero, because their exponential could overflow.
    let below = positive.select(&zero_of(x), x);
    positive.select(x, &(below.expm1() * alpha))
}
