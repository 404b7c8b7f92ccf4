//! Activation checkpointing of parts of a forward.

use crate::scope::{Scope, Writes, has_key, is_training, within};
use halcyon::Tensor;
use halcyon::ir::DType;
use halcyon::ir::composite::CompositeKind;
use halcyon::ir::error::{Error, Result};

/// Returns `f(x)`. The intermediate results of `f` are not kept for the gradient: the gradient computes `f`
/// again (Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016). Wrap each block of a deep
/// model in `checkpoint`:
///
/// ```
/// use halcyon::prelude::*;
/// use halcyon_nn::{Linear, Module, checkpoint};
///
/// #[derive(Module)]
/// struct Net {
///     blocks: Vec<Linear>,
/// }
///
/// impl Net {
///     fn forward(&self, x: &Tensor) -> Tensor {
///         self.blocks.iter().fold(x.clone(), |x, block| checkpoint(&x, |x| block.forward(x).tanh() + x))
///     }
/// }
/// # fn main() -> halcyon::Result<()> {
/// # let b = Backend::cpu()?;
/// # let net = Net { blocks: vec![Linear::new(&b, 3, 3)?, Linear::new(&b, 3, 3)?] };
/// # let x = Tensor::ones(&b, [2, 3], DType::F32);
/// # let (_, grads) = halcyon_nn::loss_and_grads(&net, |n| Ok(n.forward(&x).sum(..)))?;
/// # assert_eq!(grads.len(), 4);
/// # Ok(())
/// # }
/// ```
///
/// The gradients are the same as without `checkpoint`. Dropout inside of `f` drops the same elements in both
/// computations, and buffers such as running statistics are written once. `f` may capture tensors; captured
/// tensors that were made before the call count as inputs. `f` cannot read the values of tensors. If `f`
/// fails, the returned tensor carries the error.
#[track_caller]
pub fn checkpoint(x: &Tensor, f: impl FnOnce(&Tensor) -> Tensor) -> Tensor {
    let made = checkpoint_many(&[x], |x| Ok(vec![f(&x[0])]));
    let one = made.and_then(|mut m| m.pop().ok_or_else(|| Error::internal("a checkpoint without a result")));
    one.unwrap_or_else(|e| Tensor::build(&[x], |_, _| Err(e)))
}

/// Like [`checkpoint`], for several inputs and results.
///
/// # Errors
/// `Error::Argument` if there are no inputs; errors of `f`, including errors that its results carry.
#[track_caller]
pub fn checkpoint_many(
    x: &[&Tensor],
    f: impl FnOnce(&[Tensor]) -> Result<Vec<Tensor>>,
) -> Result<Vec<Tensor>> {
    let Some(first) = x.first() else {
        return Err(Error::argument(
            CompositeKind::Checkpoint,
            "there are no inputs; give the tensors that f reads",
        ));
    };
    // Outside of a training step, the random numbers in `f` follow from a key that is an input of the
    // checkpoint. The next call passes another key and draws other numbers, but uses the same plan.
    let backend = first.backend();
    let key = (!has_key()).then(|| {
        let seed = backend.next_seed();
        [seed & 0xffff_ffff, seed >> 32].map(|k| Tensor::scalar(backend, k, DType::U32))
    });
    let writes = Writes::KeptAndListed(vec![]);
    let scope = Scope { training: is_training(), key, writes, ..Scope::default() };
    let mut written = vec![];
    let mut count = 0;
    let mut made = halcyon::checkpoint(x, |x| {
        let (results, scope) = within(scope, || f(x));
        let mut results = results?;
        count = results.len();
        if let Writes::KeptAndListed(slots) = scope.writes {
            results.extend(slots.iter().filter_map(|s| scope.values.get(&s.id()).cloned()));
            written = slots;
        }
        Ok(results)
    })?;
    let new = made.split_off(count);
    written.iter().zip(new).try_for_each(|(slot, new)| slot.write(new))?;
    Ok(made)
}
