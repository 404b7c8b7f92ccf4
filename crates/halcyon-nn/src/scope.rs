//! Scopes change how a forward computes, for example while a gradient is taken or a step is traced. A scope
//! can replace the values of slots and set the key of random numbers, and it sets the mode (training or
//! evaluation). Each thread has its own scopes. Scopes nest.

use crate::slot::{Slot, SlotId};
use halcyon::ir::DType;
use halcyon::ir::error::{Error, Result};
use halcyon::ir::shape::Shape;
use halcyon::{Backend, Tensor};
use std::cell::RefCell;
use std::collections::HashMap;

/// Values and mode of a forward.
#[derive(Default)]
pub(crate) struct Scope {
    pub(crate) values: HashMap<SlotId, Tensor>,
    /// Whether modules behave as in training: dropout drops, batch normalisation uses the batch.
    pub(crate) training: bool,
    /// The key of random numbers: its low and high half, u32 of rank 0.
    pub(crate) key: Option<[Tensor; 2]>,
    /// Number of draws made so far with this key. Each draw of a step gets its own random numbers.
    pub(crate) draws: u32,
    pub(crate) writes: Writes,
}

/// How a scope handles writes to buffers.
#[derive(Default)]
pub(crate) enum Writes {
    /// The enclosing scope decides. If there is no enclosing scope, the buffer gets the value at once.
    #[default]
    Outer,
    /// The buffer gets the value at once, and the scope lists the buffer.
    Listed(Vec<Slot>),
    /// The scope keeps the value in its `values`.
    Kept,
    /// The scope keeps the value in its `values`, and lists the buffer.
    KeptAndListed(Vec<Slot>),
    /// Writing is an error, because the results must depend on the inputs alone.
    Refused,
}

thread_local! {
    static SCOPES: RefCell<Vec<Scope>> = const { RefCell::new(vec![]) };
}

/// Leaves the scope when dropped, which happens only if the function inside of the scope panics.
struct Leave;

impl Drop for Leave {
    fn drop(&mut self) {
        SCOPES.with_borrow_mut(|s| s.pop());
    }
}

/// Runs `f` inside of a scope. Returns its result and the scope as `f` left it.
pub(crate) fn within<R>(scope: Scope, f: impl FnOnce() -> R) -> (R, Scope) {
    SCOPES.with_borrow_mut(|s| s.push(scope));
    let leave = Leave;
    let result = f();
    std::mem::forget(leave);
    (result, SCOPES.with_borrow_mut(|s| s.pop()).unwrap_or_default())
}

/// The value of a slot in the innermost scope that has a value for the slot.
pub(crate) fn value_of(slot: &Slot) -> Option<Tensor> {
    SCOPES.with_borrow(|s| s.iter().rev().find_map(|s| s.values.get(&slot.id()).cloned()))
}

/// Offers a buffer's new value to the scopes. Returns whether a scope keeps the value.
pub(crate) fn keep(slot: &Slot, new: &Tensor) -> Result<bool> {
    new.check()?;
    SCOPES.with_borrow_mut(|scopes| {
        for scope in scopes.iter_mut().rev() {
            match &mut scope.writes {
                Writes::Outer => {}
                Writes::Listed(written) => {
                    if written.iter().all(|w| w.id() != slot.id()) {
                        written.push(slot.clone());
                    }
                    return Ok(false);
                }
                Writes::KeptAndListed(written) => {
                    if written.iter().all(|w| w.id() != slot.id()) {
                        written.push(slot.clone());
                    }
                    scope.values.insert(slot.id(), new.clone());
                    return Ok(true);
                }
                Writes::Refused => {
                    let what = format!("a forward that writes the buffer `{}`, for inference", slot.path());
                    return Err(Error::unsupported(what, "Return the value as an output"));
                }
                Writes::Kept => {
                    scope.values.insert(slot.id(), new.clone());
                    return Ok(true);
                }
            }
        }
        Ok(false)
    })
}

/// Whether a scope has a key of random numbers.
pub(crate) fn has_key() -> bool {
    SCOPES.with_borrow(|s| s.iter().any(|s| s.key.is_some()))
}

/// Whether modules behave as in training. False outside of [`training`], [`crate::loss_and_grads`] and
/// training steps.
pub fn is_training() -> bool {
    SCOPES.with_borrow(|s| s.last().is_some_and(|s| s.training))
}

/// Uniform random numbers in `[0, 1)`, f32. In a scope with a key, the key and the number of the draw
/// determine the random numbers. Outside of such a scope, every draw uses the backend's next seed.
#[track_caller]
pub fn uniform(backend: &Backend, shape: impl Into<Shape>) -> Tensor {
    let drawn = SCOPES.with_borrow_mut(|scopes| {
        let scope = scopes.iter_mut().rev().find(|s| s.key.is_some())?;
        scope.draws += 1;
        Some((scope.key.clone()?, scope.draws - 1))
    });
    match drawn {
        None => backend.rand(shape, DType::F32),
        Some(([low, high], n)) => {
            // Each draw advances the high half by 2, because a draw of normal numbers would use two keys.
            let high = high + Tensor::scalar(backend, u64::from(n) * 2, DType::U32);
            Tensor::rand_by_key([&low, &high], shape)
        }
    }
}

/// Runs `f`. Inside of `f`, modules behave as in training. Random numbers follow from the backend's seed (see
/// [`halcyon::Backend::manual_seed`]), except inside of a training step, whose own seed determines them.
pub fn training<R>(f: impl FnOnce() -> R) -> R {
    within(Scope { training: true, ..Scope::default() }, f).0
}

/// Runs `f`. Inside of `f`, modules behave as in evaluation, also inside of a training step.
pub fn evaluation<R>(f: impl FnOnce() -> R) -> R {
    within(Scope::default(), f).0
}
