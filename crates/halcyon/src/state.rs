//! `State`: a value with versions, such as a KV cache or a parameter.

use crate::backend::Backend;
use crate::tensor::Tensor;
use halcyon_hal::{BufferRef, Supply, Tag};
use halcyon_ir::dtype::DType;
use halcyon_ir::error::{Error, Result};
use halcyon_ir::shape::{Shape, TensorType};
use std::sync::{Mutex, MutexGuard};

/// A value that is replaced over time. Reads and writes follow program order: [`State::value`] returns the
/// version that is current at the call. Later writes do not change this version. A new version reuses the old
/// one's memory. If something still has to read the old version, the memory is copied instead;
/// [`crate::backend::CacheStats::copies`] counts these copies.
#[derive(Debug)]
pub struct State(Mutex<Tensor>);

impl State {
    /// A state whose first version is `initial`.
    pub fn new(initial: Tensor) -> State {
        State(Mutex::new(initial))
    }

    /// A state of zeros, evaluated. On a device that has such memory, nothing writes the zeros, and the
    /// system supplies the memory at the first access or at [`State::supply`].
    ///
    /// # Errors
    /// `Error::OutOfMemory`; errors of the device.
    #[track_caller]
    pub fn zeros(backend: &Backend, shape: impl Into<Shape>, dtype: DType) -> Result<State> {
        let shape = shape.into();
        // A size in bytes that does not fit `usize` gets its error below.
        const MOST: usize = usize::MAX >> 6;
        let count =
            |dims: &[usize]| dims.iter().try_fold(1usize, |n, d| n.checked_mul(*d).filter(|n| *n < MOST));
        if let Ok(dims) = shape.dims()
            && let Some(n) = count(&dims)
            && let Some(b) = backend.device().alloc_zeroed(dtype.bytes(n), Tag::Io)?
        {
            return Ok(State::new(Tensor::from_buffer(backend, TensorType::new(dtype, &dims), b)));
        }
        let zeros = Tensor::zeros(backend, shape, dtype);
        zeros.eval()?;
        Ok(State::new(zeros))
    }

    fn lock(&self) -> MutexGuard<'_, Tensor> {
        // The handle is replaced as a whole, so a panic in another thread leaves it valid.
        self.0.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// The current version.
    pub fn value(&self) -> Tensor {
        self.lock().clone()
    }

    /// Starts a thread on which the system supplies the memory of states from [`State::zeros`]. Call it after
    /// the first use of the states, which then comes sooner. Dropping the result waits for the thread.
    pub fn supply<'a>(states: impl IntoIterator<Item = &'a State>) -> Vec<Supply> {
        let mut by_device: Vec<(Backend, Vec<BufferRef>)> = vec![];
        for t in states.into_iter().map(State::value) {
            let Ok(b) = t.ready() else { continue };
            match by_device.iter_mut().find(|(d, _)| d.is_same(&t.0.backend)) {
                Some((_, all)) => all.push(b),
                None => by_device.push((t.0.backend.clone(), vec![b])),
            }
        }
        by_device.iter().map(|(d, all)| d.device().supply(all)).collect()
    }

    /// Makes `new` the current version, without its gradient history.
    ///
    /// # Errors
    /// `Error::Shape` if the dtype or shape differs from the state's; the error that `new` carries.
    pub fn write(&self, new: Tensor) -> Result<()> {
        let mut cur = self.lock();
        new.check()?;
        if new.0.ty != cur.0.ty {
            return Err(Error::shape(
                "State::write",
                format!("the state is {}, but the new value is {}", cur.0.ty, new.0.ty),
            )
            .at(&new.0.span));
        }
        let new = new.without_history();
        new.mark_state();
        *cur = new;
        Ok(())
    }

    /// Writes `update` along `axis` at `position`, an integer of rank 0 computed at run time. Returns the new
    /// version, which has the state's shape.
    ///
    /// # Errors
    /// The errors of `Tensor::update_slice` that are found before anything runs.
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
