use super::linear::linear;
use super::{Linear, invalid, located};
use crate::init::{Fan, Init};
use crate::module::{Module, Visit};
use crate::slot::Param;
use halcyon::Tensor;
use halcyon::ir::error::Result;

/// Options of [`Lora::new`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LoraOptions {
    /// The rank of the adapter: rows of `lora_A` and columns of `lora_B`. Default: 8.
    pub rank: usize,
    /// The adapter's result is multiplied by `alpha / rank`. Default: 16.
    pub alpha: f64,
}

impl Default for LoraOptions {
    fn default() -> LoraOptions {
        LoraOptions { rank: 8, alpha: 16.0 }
    }
}

/// A frozen linear layer with a trainable adapter of low rank: `y = base(x) + alpha / rank * (x Aᵀ) Bᵀ` (Hu
/// et al. 2021). `lora_A` is `[rank, inputs]` and has a Kaiming initialisation. `lora_B` is `[outputs, rank]`
/// and starts as zeros, so that the layer equals its base before training.
#[derive(Clone, Debug)]
pub struct Lora {
    pub base: Linear,
    pub a: Param,
    pub b: Param,
    scale: f64,
}

impl Module for Lora {
    fn visit(&self, visit: &mut Visit<'_>) {
        visit.child("base", &self.base);
        visit.child("lora_A", &self.a);
        visit.child("lora_B", &self.b);
    }
    fn kind(&self) -> &'static str {
        "Lora"
    }
}

impl Lora {
    /// Freezes `base` and adds an adapter to it.
    ///
    /// # Errors
    /// `Error::Argument` if the rank is 0 or larger than the smaller of `inputs` and `outputs`; errors of the
    /// device.
    pub fn new(base: Linear, options: LoraOptions) -> Result<Lora> {
        let weight = base.weight.slot().stored();
        let (dims, dtype) = (weight.dims()?, weight.dtype()?);
        let (outputs, inputs) = (dims[0], dims[1]);
        if options.rank == 0 || options.rank > inputs.min(outputs) {
            let what = format!("the rank {} does not fit a weight of [{outputs}, {inputs}]", options.rank);
            return Err(invalid("Lora", what));
        }
        let b = weight.backend();
        let init = Init::KaimingUniform { gain: 0.577_350_269_189_625_8, fan: Fan::In };
        let a = Param::new(init.tensor(b, &[options.rank, inputs], dtype)?);
        let b = Param::new(Init::Zeros.tensor(b, &[outputs, options.rank], dtype)?);
        base.weight.slot().set_trainable(false);
        if let Some(bias) = &base.bias {
            bias.slot().set_trainable(false);
        }
        Ok(Lora { base, a, b, scale: options.alpha / options.rank as f64 })
    }

    /// The layer's result for `x` of shape `[…, inputs]`.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Tensor {
        let low = linear(x, &self.a.value(), None);
        let y = self.base.forward(x) + linear(&low, &self.b.value(), None) * self.scale;
        located(y, &self.a, x)
    }

    /// A plain linear layer. Its weight is a copy of the base's weight plus the product of the adapter,
    /// `alpha / rank * B A`.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn merged(&self) -> Result<Linear> {
        let base = &self.base.weight.slot().stored();
        let (a, b) = (self.a.slot().stored(), self.b.slot().stored());
        let weight = base + b.matmul(&a) * self.scale;
        weight.eval()?;
        let bias = match &self.base.bias {
            Some(b) => Some(Param::new(b.slot().stored().detach()?)),
            None => None,
        };
        Ok(Linear { weight: Param::new(weight), bias })
    }
}
