use super::invalid;
use crate::module::{Module, Visit};
use crate::scope::{is_training, uniform};
use halcyon::Tensor;
use halcyon::ir::error::Result;

/// In training, sets each element to zero with a given probability `p` and divides the other elements by `1 -
/// p` (Srivastava et al. 2014). In evaluation, returns its input.
#[derive(Clone, Copy, Debug)]
pub struct Dropout {
    probability: f64,
}

impl Module for Dropout {
    fn visit(&self, _: &mut Visit<'_>) {}
    fn kind(&self) -> &'static str {
        "Dropout"
    }
}

impl Dropout {
    /// A layer that drops elements with a probability in `0..=1`.
    ///
    /// # Errors
    /// `Error::Argument` for any other number.
    pub fn new(probability: f64) -> Result<Dropout> {
        match (0.0..=1.0).contains(&probability) {
            true => Ok(Dropout { probability }),
            false => Err(invalid("Dropout", format!("the probability {probability} is outside of 0..=1"))),
        }
    }

    /// Whether [`Dropout::forward`] changes anything in training.
    pub(crate) fn forward_drops(&self) -> bool {
        self.probability > 0.0
    }

    /// The layer's result, of the shape of `x`.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Tensor {
        if !is_training() || self.probability == 0.0 {
            return x.clone();
        }
        let (Ok(shape), Ok(dtype)) = (x.shape(), x.dtype()) else { return x.clone() };
        if self.probability == 1.0 {
            return Tensor::zeros(x.backend(), shape, dtype);
        }
        let stay = uniform(x.backend(), shape).ge(self.probability).cast(dtype);
        x * (stay * (1.0 / (1.0 - self.probability)))
    }
}
