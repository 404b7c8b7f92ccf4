//! What functions that are traced may return.

use crate::tensor::Tensor;
use halcyon_ir::error::Result;

/// What a traced function may return: a tensor, several tensors, or a `Result` of these.
pub trait Outputs {
    fn tensors(self) -> Result<Vec<Tensor>>;
}

impl Outputs for Tensor {
    fn tensors(self) -> Result<Vec<Tensor>> {
        Ok(vec![self])
    }
}
impl Outputs for Vec<Tensor> {
    fn tensors(self) -> Result<Vec<Tensor>> {
        Ok(self)
    }
}
impl<const N: usize> Outputs for [Tensor; N] {
    fn tensors(self) -> Result<Vec<Tensor>> {
        Ok(self.into())
    }
}
impl<T: Outputs> Outputs for Result<T> {
    fn tensors(self) -> Result<Vec<Tensor>> {
        self?.tensors()
    }
}
