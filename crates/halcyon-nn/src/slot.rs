//! Parameters and buffers: the tensors that a module owns.

use crate::scope;
use halcyon::ir::DType;
use halcyon::ir::error::{Error, Result};
use halcyon::{Backend, State, Tensor};
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

/// The kind of a slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SlotKind {
    /// A parameter. If it is trainable when an optimizer is made, the optimizer changes it.
    Param,
    /// A buffer, such as running statistics: the module itself changes it. It has no gradient.
    Buffer,
}

struct Inner {
    kind: SlotKind,
    /// Whether files of weights contain the slot.
    saved: bool,
    state: Mutex<Arc<State>>,
    trainable: AtomicBool,
    /// The longest path under which a visit found this slot.
    path: Mutex<String>,
}

/// The storage of a parameter or buffer. Clones share it: two fields of a model that hold clones are tied.
#[derive(Clone)]
pub struct Slot(Arc<Inner>);

/// Identifies a slot as long as the slot exists.
pub type SlotId = usize;

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    // The values are replaced as a whole, so a panic in another thread leaves them valid.
    m.lock().unwrap_or_else(|e| e.into_inner())
}

impl Slot {
    fn new(kind: SlotKind, saved: bool, value: Tensor) -> Slot {
        Slot(Arc::new(Inner {
            kind,
            saved,
            state: Mutex::new(Arc::new(State::new(value))),
            trainable: AtomicBool::new(kind == SlotKind::Param),
            path: Mutex::default(),
        }))
    }

    /// Whether the slot is a parameter or a buffer.
    pub fn kind(&self) -> SlotKind {
        self.0.kind
    }

    /// Whether files of weights contain the slot. False for buffers made by [`Buffer::transient`].
    pub fn is_saved(&self) -> bool {
        self.0.saved
    }

    /// The identity of the slot. Fields that share the slot have the same id.
    pub fn id(&self) -> SlotId {
        Arc::as_ptr(&self.0) as usize
    }

    /// The state that holds the value. [`Slot::replace`] makes a new state.
    pub(crate) fn state(&self) -> Arc<State> {
        lock(&self.0.state).clone()
    }

    /// The value outside of any scope.
    pub(crate) fn stored(&self) -> Tensor {
        lock(&self.0.state).value()
    }

    /// The value. Inside of a training step or of [`crate::loss_and_grads`], this is the tensor that the
    /// forward computes with.
    pub fn value(&self) -> Tensor {
        scope::value_of(self).unwrap_or_else(|| self.stored())
    }

    /// Replaces the value by one of the same dtype and shape.
    ///
    /// # Errors
    /// `Error::Shape` if the dtype or shape differs, with the path of the slot; the error that `new` carries.
    pub fn set(&self, new: Tensor) -> Result<()> {
        self.state().write(new).map_err(|e| self.name_in(e))
    }

    /// Offers the new value of a buffer to the scopes, and stores it if no scope keeps it.
    pub(crate) fn write(&self, new: Tensor) -> Result<()> {
        match scope::keep(self, &new)? {
            true => Ok(()),
            false => self.set(new),
        }
    }

    /// Replaces the value by one of another dtype, on another device, or both. The shape must be the same.
    ///
    /// # Errors
    /// `Error::Shape` if the shape differs; the error that `new` carries.
    pub fn replace(&self, new: Tensor) -> Result<()> {
        self.accepts(&new)?;
        *lock(&self.0.state) = Arc::new(State::new(new));
        Ok(())
    }

    /// Fails if [`Slot::replace`] would fail.
    pub(crate) fn accepts(&self, new: &Tensor) -> Result<()> {
        let (have, want) = (new.shape()?, self.stored().shape()?);
        if have != want {
            let what = format!("the parameter is {want}, but the new value is {have}");
            return Err(self.name_in(Error::shape("Slot::replace", what)));
        }
        Ok(())
    }

    /// Whether the slot is trainable: optimizers that are made from now on change it, and
    /// [`crate::loss_and_grads`] computes its gradient.
    pub fn is_trainable(&self) -> bool {
        self.0.trainable.load(Ordering::Relaxed)
    }

    /// Makes a parameter trainable or not; see [`Slot::is_trainable`]. Buffers are never trainable.
    pub fn set_trainable(&self, on: bool) {
        self.0.trainable.store(on && self.0.kind == SlotKind::Param, Ordering::Relaxed);
    }

    /// The path in the model, such as `layers.0.attn.q.weight`; empty before the model was first visited.
    pub fn path(&self) -> String {
        lock(&self.0.path).clone()
    }

    /// A visit of a whole model gives longer paths than a visit of a part of it, so the longest path is kept.
    pub(crate) fn found_at(&self, path: &str) {
        let mut known = lock(&self.0.path);
        if path.len() > known.len() {
            path.clone_into(&mut known);
        }
    }

    /// Puts the slot's path before the op's name in an error.
    fn name_in(&self, e: Error) -> Error {
        in_module(e, &self.path())
    }
}

/// Puts a module's path before the op's name in an error about shapes, dtypes or arguments.
pub(crate) fn in_module(e: Error, path: &str) -> Error {
    if path.is_empty() {
        return e;
    }
    let named = |op: String| format!("{path}: {op}");
    match e {
        Error::Shape { op, what, at } => Error::Shape { op: named(op), what, at },
        Error::DType { op, dtype, want, at } => Error::DType { op: named(op), dtype, want, at },
        Error::Argument { op, what, at } => Error::Argument { op: named(op), what, at },
        other => other,
    }
}

impl fmt::Debug for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let t = self.stored();
        match (t.dtype(), t.shape()) {
            (Ok(d), Ok(s)) => write!(f, "{:?}({d} {s}", self.0.kind)?,
            _ => write!(f, "{:?}(failed", self.0.kind)?,
        }
        let frozen = self.0.kind == SlotKind::Param && !self.is_trainable();
        f.write_str(if frozen { ", frozen)" } else { ")" })
    }
}

/// A trainable tensor of a module.
#[derive(Clone, Debug)]
pub struct Param(pub(crate) Slot);

impl Param {
    /// A parameter with an initial value.
    pub fn new(value: Tensor) -> Param {
        Param(Slot::new(SlotKind::Param, true, value))
    }

    /// The value to compute with; see [`Slot::value`].
    pub fn value(&self) -> Tensor {
        self.0.value()
    }

    /// Its storage.
    pub fn slot(&self) -> &Slot {
        &self.0
    }

    /// Replaces the value; see [`Slot::set`].
    ///
    /// # Errors
    /// Those of [`Slot::set`].
    pub fn set(&self, new: Tensor) -> Result<()> {
        self.0.set(new)
    }

    /// The path of the module that owns the parameter: the parameter's path without its last part.
    pub(crate) fn module_path(&self) -> String {
        let path = self.0.path();
        path.rsplit_once('.').map_or_else(String::new, |(module, _)| module.to_string())
    }
}

/// A tensor that a module changes itself, such as a running mean.
#[derive(Clone, Debug)]
pub struct Buffer(pub(crate) Slot);

impl Buffer {
    /// A buffer that files of weights contain.
    pub fn new(value: Tensor) -> Buffer {
        Buffer(Slot::new(SlotKind::Buffer, true, value))
    }

    /// A buffer that files of weights leave out.
    pub fn transient(value: Tensor) -> Buffer {
        Buffer(Slot::new(SlotKind::Buffer, false, value))
    }

    /// The value to compute with; see [`Slot::value`].
    pub fn value(&self) -> Tensor {
        self.0.value()
    }

    /// Its storage.
    pub fn slot(&self) -> &Slot {
        &self.0
    }

    /// Replaces the value, without gradient history. Inside of a training step, later reads get the new
    /// value, and the buffer is replaced when the step ends.
    ///
    /// # Errors
    /// Those of [`Slot::set`]; `Error::Unsupported` inside of the forward of a [`crate::Inference`].
    pub fn write(&self, new: Tensor) -> Result<()> {
        self.0.write(new)
    }
}

/// The backend of a slot's value.
pub(crate) fn backend_of(slot: &Slot) -> Backend {
    slot.stored().backend().clone()
}

/// The dtype of a slot's value.
pub(crate) fn dtype_of(slot: &Slot) -> Result<DType> {
    slot.stored().dtype()
}
