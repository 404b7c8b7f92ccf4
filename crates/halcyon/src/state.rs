//! State: a value with versions, such as a KV cache or a parameter.

use crate::tensor::Tensor;
use halcyon_ir::error::{Error, Result};
use std::sync::{Mutex, MutexGuard};

/// A value that is replaced over time. Reads and writes are ordered by the program: [`State::value`] gives
/// the version that is current at the call, whatever is written later. A new version takes the old one's
/// memory unless something still reads that; then the memory is copied, which
/// [`crate::backend::CacheStats::copies`] counts.
#[derive(Debug)]
pub struct State(Mutex<Tensor>);

impl State {
    pub fn new(initial: Tensor) -> State {
        State(Mutex::new(initial))
    }

    fn lock(&self) -> MutexGuard<'_, Tensor> {
        // The handle is replaced whole, so a panic elsewhere leaves it usable.
        self.0.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// The current version.
    pub fn value(&self) -> Tensor {
        self.lock().clone()
    }

    /// Makes `new` the current version, without its gradient history. It must have the state's type.
    pub fn write(&self, new: Tensor) -> Result<()> {
        let mut cur = self.lock();
        new.check()?;
        if new.0.ty != cur.0.ty {
            return Err(Error::shape(
                "State::write",
                format!("the state is {}, the new value {}", cur.0.ty, new.0.ty),
            )
            .at(&new.0.span));
        }
        let new = new.untracked();
        new.mark_state();
        *cur = new;
        Ok(())
    }

    /// Writes `update` at the run-time `position` along `axis`, and returns the new version.
    #[track_caller]
    pub fn append(&self, update: &Tensor, position: &Tensor, axis: i64) -> Result<Tensor> {
        let mut cur = self.lock();
        let new = cur.update_slice(update, position, axis);
        new.check()?;
        new.mark_state();
        *cur = new.clone();
        Ok(new)
    }
}
