//! Gradients with respect to the parameters of a module.

use crate::module::{Module, ModuleExt};
use crate::scope::{Scope, Writes, within};
use crate::slot::Slot;
use halcyon::Tensor;
use halcyon::ir::error::Result;

/// Gradients of a scalar with respect to a module's trainable parameters.
#[derive(Debug)]
pub struct ModuleGrads {
    pub(crate) of: Vec<(String, Slot, Tensor)>,
    /// Buffers that the forward wrote.
    pub(crate) written: Vec<Slot>,
}

impl ModuleGrads {
    /// The gradient of the parameter at a path; `None` if there is no such trainable parameter.
    pub fn get(&self, path: &str) -> Option<&Tensor> {
        self.of.iter().find(|(p, _, _)| p == path).map(|(_, _, g)| g)
    }

    /// Paths and gradients, in the module's order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        self.of.iter().map(|(p, _, g)| (p.as_str(), g))
    }

    /// Number of gradients.
    pub fn len(&self) -> usize {
        self.of.len()
    }

    /// Whether there are no gradients.
    pub fn is_empty(&self) -> bool {
        self.of.is_empty()
    }

    /// Replaces each gradient by `f(path, gradient)`, for example to clip or average gradients.
    ///
    /// # Errors
    /// The first error of `f`.
    pub fn map(self, mut f: impl FnMut(&str, &Tensor) -> Result<Tensor>) -> Result<ModuleGrads> {
        let of = self.of.into_iter().map(|(p, s, g)| {
            let g = f(&p, &g)?;
            Ok((p, s, g))
        });
        Ok(ModuleGrads { of: of.collect::<Result<_>>()?, written: self.written })
    }

    /// Adds the gradients of `other`, which belong to the same module, for example for gradient accumulation.
    /// A gradient that only one of the two has is kept unchanged.
    pub fn add(mut self, other: ModuleGrads) -> ModuleGrads {
        for (path, slot, g) in other.of {
            match self.of.iter_mut().find(|(_, s, _)| s.id() == slot.id()) {
                Some((_, _, sum)) => *sum = &*sum + &g,
                None => self.of.push((path, slot, g)),
            }
        }
        for slot in other.written {
            if self.written.iter().all(|w| w.id() != slot.id()) {
                self.written.push(slot);
            }
        }
        self
    }
}

/// The value of `f` and its gradients with respect to the trainable parameters of `module`. Inside of `f`,
/// modules behave as in training. The function only records ops: the values are computed when they are read,
/// or by an optimizer's step.
///
/// ```
/// use halcyon::prelude::*;
/// use halcyon_nn::{Linear, loss_and_grads};
/// # fn main() -> halcyon::Result<()> {
/// let b = Backend::cpu()?;
/// let layer = Linear::new(&b, 3, 1)?;
/// let x = Tensor::ones(&b, [5, 3], DType::F32);
/// let (loss, grads) = loss_and_grads(&layer, |m| Ok(m.forward(&x).sum(..)))?;
/// assert_eq!(grads.get("weight").unwrap().to_vec::<f32>()?, [5.0; 3]);
/// # let _ = loss;
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// Errors of `f`, and `Error::Unsupported` for an op without a gradient.
pub fn loss_and_grads<M: Module>(
    module: &M,
    f: impl FnOnce(&M) -> Result<Tensor>,
) -> Result<(Tensor, ModuleGrads)> {
    let params = module.trainable();
    let leaves = params.iter().map(|(_, s)| s.value().requires_grad()).collect::<Result<Vec<_>>>()?;
    let values = params.iter().zip(&leaves).map(|((_, s), t)| (s.id(), t.clone())).collect();
    let writes = Writes::Listed(vec![]);
    let scope = Scope { values, training: true, writes, ..Scope::default() };
    let (result, scope) = within(scope, || halcyon::value_and_grad(&leaves, |_| f(module)));
    let (loss, grads) = result?;
    let of = params.into_iter().zip(grads).map(|((path, slot), g)| (path, slot, g)).collect();
    let written = match scope.writes {
        Writes::Listed(written) => written,
        _ => vec![],
    };
    Ok((loss, ModuleGrads { of, written }))
}
