use super::{invalid, located};
use crate::init::{Fan, Init};
use crate::module::{Module, Visit};
use crate::slot::Param;
use halcyon::ir::DType;
use halcyon::ir::error::Result;
use halcyon::{Backend, Tensor};

/// Options of [`Linear::with`].
#[derive(Clone, Copy, Debug)]
pub struct LinearOptions {
    /// Whether there is a bias. Default: true.
    pub bias: bool,
    pub dtype: DType,
    /// Initial values of the weight. Default: uniform within `1 / sqrt(inputs)`.
    pub weight: Init,
    /// Initial values of the bias. Default `None`: uniform within `1 / sqrt(inputs)`.
    pub bias_init: Option<Init>,
}

/// PyTorch's default: a Kaiming initialisation with `a = sqrt(5)`, whose bound is `1 / sqrt(fan_in)`.
pub(crate) const DEFAULT_WEIGHT: Init = Init::KaimingUniform { gain: 0.577_350_269_189_625_8, fan: Fan::In };

impl Default for LinearOptions {
    fn default() -> LinearOptions {
        LinearOptions { bias: true, dtype: DType::F32, weight: DEFAULT_WEIGHT, bias_init: None }
    }
}

/// `y = x Wᵀ + b` over the last axis: maps `[…, inputs]` to `[…, outputs]`. `weight` is `[outputs, inputs]`,
/// `bias` is `[outputs]`.
#[derive(Clone, Debug)]
pub struct Linear {
    pub weight: Param,
    pub bias: Option<Param>,
}

impl Module for Linear {
    fn visit(&self, visit: &mut Visit<'_>) {
        visit.child("weight", &self.weight);
        visit.child("bias", &self.bias);
    }
    fn kind(&self) -> &'static str {
        "Linear"
    }
}

impl Linear {
    /// A layer with a bias and the default initial values.
    ///
    /// # Errors
    /// `Error::Argument` if a size is 0; errors of the device.
    pub fn new(backend: &Backend, inputs: usize, outputs: usize) -> Result<Linear> {
        Linear::with(backend, inputs, outputs, LinearOptions::default())
    }

    /// A layer with options.
    ///
    /// # Errors
    /// Those of [`Linear::new`].
    pub fn with(backend: &Backend, inputs: usize, outputs: usize, o: LinearOptions) -> Result<Linear> {
        if inputs == 0 || outputs == 0 {
            return Err(invalid(
                "Linear",
                format!("{inputs} inputs and {outputs} outputs; both must be at least 1"),
            ));
        }
        let bound = 1.0 / (inputs as f64).sqrt();
        let weight = o.weight.tensor(backend, &[outputs, inputs], o.dtype)?;
        let init = o.bias_init.unwrap_or(Init::Uniform { low: -bound, high: bound });
        let bias = match o.bias {
            true => Some(Param::new(init.tensor(backend, &[outputs], o.dtype)?)),
            false => None,
        };
        Ok(Linear { weight: Param::new(weight), bias })
    }

    /// The layer's result for `x` of shape `[…, inputs]`.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Tensor {
        let y = linear(x, &self.weight.value(), self.bias.as_ref().map(Param::value).as_ref());
        located(y, &self.weight, x)
    }
}

/// `x weightᵀ + bias`, with `weight` of shape `[outputs, inputs]`.
#[track_caller]
pub(crate) fn linear(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Tensor {
    let y = x.matmul(&weight.transpose(0, 1));
    match bias {
        Some(b) => y + b,
        None => y,
    }
}
