//! Lazy tensors.
//!
//! A [`Tensor`] is a handle on a node: an operation with its operands, or a value on a device. [`eval()`]
//! collects everything that the given tensors depend on into one graph. In this graph, every value on the
//! device is an input, and every literal is a run-time argument. The graph does not depend on these values,
//! so a computation that is repeated with other values, or continued from evaluated results, finds its plan
//! in the cache.

mod display;
mod eval;
mod index;
mod window;

use crate::backend::Backend;
pub use eval::eval;
pub(crate) use eval::{Collector, Mode, Node, eval_now, lift};
use eval::{NewNode, SERIAL, Value};
use halcyon_hal::{BufferRef, Event, Tag};
use halcyon_ir::dtype::{DType, Element, Scalar};
use halcyon_ir::error::{Error, Result, Span};
use halcyon_ir::shape::{Shape, TensorType};
use halcyon_ir::{ConstData, Graph, Op};
pub use index::{Ellipsis, Index, IndexItem, NewAxis, step};
use smallvec::SmallVec;
use std::fmt;
use std::panic::Location;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// A handle on a value that is computed on demand. Cloning shares the value.
#[derive(Clone)]
pub struct Tensor(pub(crate) Arc<Node>);

impl Tensor {
    fn leaf(backend: &Backend, ty: TensorType, value: Value, span: Span) -> Tensor {
        Tensor::make(backend.clone(), NewNode::leaf(ty, value, span))
    }

    pub(crate) fn failed(backend: &Backend, e: Error, at: &'static Location<'static>) -> Tensor {
        let span = Span::Caller(at);
        let ty = TensorType::new(DType::F32, Shape::scalar());
        Tensor::leaf(backend, ty, Value::Failed(e.at(&span)), span)
    }

    /// Copies host values in row-major order to the device.
    ///
    /// # Errors
    /// If the number of values does not match the shape, the shape has symbols, or the device is out of
    /// memory.
    #[track_caller]
    pub fn from_slice<T: Element>(
        backend: &Backend,
        shape: impl Into<Shape>,
        values: &[T],
    ) -> Result<Tensor> {
        Tensor::from_data(backend, &ConstData::from_slice(&shape.into().dims()?, values)?)
    }

    /// Copies host data to the device.
    #[track_caller]
    pub fn from_data(backend: &Backend, data: &ConstData) -> Result<Tensor> {
        let b = backend.device().alloc(data.bytes().len(), Tag::Io)?;
        backend.device().write(&b, 0, data.bytes())?;
        Ok(Tensor::from_buffer(backend, TensorType::new(data.dtype, &data.dims), b))
    }

    /// Like [`Tensor::from_data`], for data that does not change (weights). A device that shares the host's
    /// memory uses the data in place, without a copy.
    #[track_caller]
    pub fn from_weights(backend: &Backend, data: &ConstData) -> Result<Tensor> {
        let b = backend.runtime().constant(data)?;
        Ok(Tensor::from_buffer(backend, TensorType::new(data.dtype, &data.dims), b))
    }

    /// Like [`Tensor::from_data`], but a device that can read host memory uses the data in place, without a
    /// copy, and keeps its owner as long as the memory is used. The data must not change in that time.
    #[track_caller]
    pub fn from_shared(backend: &Backend, data: &ConstData) -> Result<Tensor> {
        match backend.device().import(data.owner()) {
            // A device may import more than it was given, for example whole pages, but never less.
            Some(b) if b.bytes() >= data.bytes().len() => {
                Ok(Tensor::from_buffer(backend, TensorType::new(data.dtype, &data.dims), b))
            }
            _ => Tensor::from_data(backend, data),
        }
    }

    /// The memory of the value, evaluated first if needed, for code that reads it in place. `None` if the
    /// host cannot address it. The memory is valid while the result lives; hold the tensor as long, because a
    /// computation may overwrite the memory of a value that no tensor holds.
    ///
    /// # Errors
    /// The errors of [`Tensor::to_data`].
    #[track_caller]
    pub fn export(&self) -> Result<Option<halcyon_hal::Exported>> {
        let b = self.buffer()?;
        let memory = self.backend().device().export(&b)?;
        self.backend().runtime().check_faults()?;
        Ok(memory)
    }

    /// The memory of the value by its address on the device, evaluated first if needed, for other libraries
    /// that use the same device. `None` if the device has no addresses that other libraries know. The memory
    /// is valid while the result lives; hold the tensor as long, because a computation may overwrite the
    /// memory of a value that no tensor holds.
    ///
    /// # Errors
    /// The errors of [`Tensor::to_data`].
    #[track_caller]
    pub fn export_device(&self) -> Result<Option<halcyon_hal::DeviceMemory>> {
        let b = self.buffer()?;
        let memory = self.backend().device().export_device(&b)?;
        self.backend().runtime().check_faults()?;
        Ok(memory)
    }

    /// A tensor over memory of the backend's device that another library allocated: dense elements in
    /// row-major order. Used in place if its address is a multiple of the device's alignment, otherwise
    /// copied on the device.
    ///
    /// # Errors
    /// Those of [`halcyon_hal::Device::import_device`]; [`Error::Argument`] if the memory is too small.
    #[track_caller]
    pub fn from_device(
        backend: &Backend,
        dtype: DType,
        dims: &[usize],
        memory: halcyon_hal::DeviceMemory,
    ) -> Result<Tensor> {
        let bytes = dims.iter().try_fold(dtype.size(), |n, d| n.checked_mul(*d));
        match bytes {
            Some(n) if n <= memory.bytes() => {}
            _ => {
                let what = format!("{dtype}{dims:?} does not fit into {memory:?}");
                return Err(Error::argument("from_device", what));
            }
        }
        let b = backend.device().import_device(memory)?;
        Ok(Tensor::from_buffer(backend, TensorType::new(dtype, dims), b))
    }

    /// A constant of the computations that read it. Plans treat it as a weight of a model: it is uploaded
    /// once, and kernels may keep it in a layout of their own. Unlike [`Tensor::from_weights`], whose values
    /// are an input of every plan, other data means another plan.
    #[track_caller]
    pub fn constant(backend: &Backend, data: &ConstData) -> Tensor {
        Tensor::build_on(backend, &[], Location::caller(), |g, _| Ok(g.constant(data.clone())))
    }

    #[track_caller]
    pub(crate) fn from_buffer(backend: &Backend, ty: TensorType, b: BufferRef) -> Tensor {
        Tensor::leaf(backend, ty, Value::Ready(b), Span::caller())
    }

    /// A tensor filled with `value`, cast to `dtype`. The value is a run-time argument of kernels, so another
    /// value does not recompile them.
    #[track_caller]
    pub fn full(
        backend: &Backend,
        shape: impl Into<Shape>,
        value: impl Into<Scalar>,
        dtype: DType,
    ) -> Tensor {
        let (shape, v) = (shape.into(), value.into());
        Tensor::build_on(backend, &[], Location::caller(), |g, _| {
            let s = g.full(dtype, Shape::scalar(), v);
            g.expand(s, &shape)
        })
    }

    /// A tensor filled with 0.
    #[track_caller]
    pub fn zeros(backend: &Backend, shape: impl Into<Shape>, dtype: DType) -> Tensor {
        Tensor::full(backend, shape, 0i64, dtype)
    }

    /// A tensor filled with 1.
    #[track_caller]
    pub fn ones(backend: &Backend, shape: impl Into<Shape>, dtype: DType) -> Tensor {
        Tensor::full(backend, shape, 1i64, dtype)
    }

    /// A tensor of rank 0 whose value is a run-time argument.
    #[track_caller]
    pub fn scalar(backend: &Backend, value: impl Into<Scalar>, dtype: DType) -> Tensor {
        Tensor::full(backend, Shape::scalar(), value, dtype)
    }

    /// A tensor of shape `[n]` with the values `0, 1, …, n-1`.
    #[track_caller]
    pub fn arange(backend: &Backend, n: usize, dtype: DType) -> Tensor {
        Tensor::build_on(backend, &[], Location::caller(), |g, _| g.iota(dtype, [n], 0))
    }

    /// A placeholder for an input without a value, for [`Tensor::trace`]. Its shape may have symbols.
    /// Evaluating it is an error.
    #[track_caller]
    pub fn placeholder(backend: &Backend, dtype: DType, shape: impl Into<Shape>) -> Tensor {
        Tensor::leaf(backend, TensorType::new(dtype, shape), Value::Pending, Span::caller())
    }

    /// Inside of a function compiled by [`Backend::compile`]: the value of rank 0 that
    /// [`crate::Compiled::call_with`] gets as argument number `number`. Evaluating it elsewhere is an error.
    #[track_caller]
    pub fn argument(backend: &Backend, number: u32, dtype: DType) -> Tensor {
        let ty = TensorType::new(dtype, Shape::scalar());
        let leaf = NewNode::leaf(ty, Value::Pending, Span::caller());
        Tensor::make(backend.clone(), NewNode { op: Op::Arg(number), ..leaf })
    }

    /// Element type.
    ///
    /// # Errors
    /// The error that the tensor carries.
    pub fn dtype(&self) -> Result<DType> {
        self.check().map(|_| self.0.ty.dtype)
    }

    /// Sizes of the axes, which may be symbols.
    pub fn shape(&self) -> Result<Shape> {
        self.check().map(|_| self.0.ty.shape.clone())
    }

    /// The backend that the tensor belongs to.
    pub fn backend(&self) -> &Backend {
        &self.0.backend
    }

    /// Returns the tensor if it is on `backend`, otherwise a tensor that carries an error. `halcyon-compat`
    /// needs this, because its operations are methods of a backend.
    #[doc(hidden)]
    #[track_caller]
    pub fn must_be_on(&self, backend: &Backend) -> Tensor {
        match self.backend().is_same(backend) {
            true => self.clone(),
            false => Tensor::failed(backend, mixed("operation", backend, self.backend()), Location::caller()),
        }
    }

    /// If the tensor carries an error, returns a tensor that carries `f(error)`, otherwise the tensor itself.
    /// Layers use this method to put their names into errors.
    #[track_caller]
    pub fn map_error(&self, f: impl FnOnce(Error) -> Error) -> Tensor {
        match &self.0.lock().value {
            Value::Failed(e) => Tensor::failed(self.backend(), f(e.clone()), Location::caller()),
            _ => self.clone(),
        }
    }

    /// The completion event of the work that computes the value, if a stream computes it.
    pub(crate) fn completion(&self) -> Option<Event> {
        self.0.lock().completion.clone()
    }

    pub(crate) fn set_completion(&self, event: Option<Event>) {
        self.0.lock().completion = event;
    }

    /// The value of a tensor with exactly one element.
    ///
    /// # Errors
    /// [`Error::Shape`] if the number of elements is not 1, before anything runs. Otherwise the errors of
    /// [`Tensor::to_data`].
    #[track_caller]
    pub fn item<T: Element>(&self) -> Result<T> {
        self.check()?;
        let n: usize = self.dims()?.iter().product();
        if n != 1 {
            let what = format!("{} has {n} elements, not one; read them with to_vec()", self.0.ty.shape);
            return Err(Error::shape("item", what).at(&Span::caller()));
        }
        let v = self.to_vec::<T>()?;
        v.first().copied().ok_or_else(|| Error::internal("a tensor of one element has no data"))
    }

    /// The tensor on another backend: a copy, through host memory. If `backend` is the tensor's own backend,
    /// returns the same tensor. If `backend` is another handle on the same open device
    /// ([`Backend::with_level`]), returns a tensor of that handle that shares the memory. No other operation
    /// on tensors moves data between devices.
    #[track_caller]
    pub fn to(&self, backend: &Backend) -> Result<Tensor> {
        if self.0.backend.plans_alike(backend) {
            return Ok(self.clone());
        }
        if self.0.backend.is_same(backend) {
            self.check()?;
            return Ok(self.on_handle(backend));
        }
        Tensor::from_data(backend, &self.to_data()?)
    }

    /// The tensor on another handle of its device. If this tensor has a value and no gradient history, the
    /// new tensor shares the value. Otherwise this tensor becomes the operand of a view that changes nothing.
    fn on_handle(&self, backend: &Backend) -> Tensor {
        let n = &self.0;
        let leaf = NewNode::leaf(n.ty.clone(), Value::Pending, n.span.clone());
        let (value, completion) = {
            let state = n.lock();
            (state.value.clone(), state.completion.clone())
        };
        let new = match value {
            Value::Ready(_) if !n.tracked => NewNode { value, ..leaf },
            _ => {
                let inputs = std::iter::once(self.clone()).collect();
                NewNode { op: Op::Reshape, inputs, tracked: n.tracked, of_gradient: n.of_gradient, ..leaf }
            }
        };
        let t = Tensor::make(backend.clone(), new);
        if t.is_ready() {
            // The value may still be in computation.
            t.set_completion(completion);
        }
        t
    }

    /// Allows the next evaluation that reads this tensor to reuse its memory. Operations already pending on
    /// it still get the right value (they are computed in the same run, or the memory is copied). If the
    /// memory was reused, later reads return [`Error::Donated`].
    pub fn donate(&self) -> &Tensor {
        self.0.donate.store(true, Ordering::Relaxed);
        self
    }

    /// Evaluates the tensor and returns a leaf with the same value, with respect to which gradients can be
    /// taken.
    #[track_caller]
    pub fn requires_grad(&self) -> Result<Tensor> {
        let b = self.buffer()?;
        let n = &self.0;
        let leaf = NewNode::leaf(n.ty.clone(), Value::Ready(b), n.span.clone());
        Ok(Tensor::make(n.backend.clone(), NewNode { tracked: true, ..leaf }))
    }

    /// Whether gradients can be taken through the tensor: whether it is a leaf of
    /// [`Tensor::requires_grad`] or was computed from one.
    pub fn is_tracked(&self) -> bool {
        self.0.tracked
    }

    /// Evaluates the tensor and returns a leaf with the same value and no gradient history. The two share
    /// memory.
    pub fn detach(&self) -> Result<Tensor> {
        let b = self.buffer()?;
        let n = &self.0;
        Ok(Tensor::leaf(&n.backend, n.ty.clone(), Value::Ready(b), n.span.clone()))
    }

    /// The same value without its gradient history, still lazy: evaluating it keeps no intermediate values
    /// for gradients.
    pub fn without_history(&self) -> Tensor {
        let n = &self.0;
        if !n.tracked {
            return self.clone();
        }
        let inner = n.lock();
        let (value, inputs) = (inner.value.clone(), inner.inputs.clone());
        drop(inner);
        let leaf = NewNode::leaf(n.ty.clone(), value, n.span.clone());
        Tensor::make(n.backend.clone(), NewNode { op: n.op.clone(), inputs, ..leaf })
    }

    /// A leaf over a buffer that holds its value.
    pub(crate) fn at(backend: &Backend, ty: TensorType, b: BufferRef, span: Span) -> Tensor {
        Tensor::leaf(backend, ty, Value::Ready(b), span)
    }

    /// A placeholder that a traced function gets as an argument, in place of an input. Nodes that sum its
    /// gradients get its span.
    pub(crate) fn stand_in(backend: &Backend, ty: TensorType, span: Span) -> Tensor {
        Tensor::leaf(backend, ty, Value::Pending, span)
    }

    /// The serial number that the next tensor gets.
    pub(crate) fn next_serial() -> u64 {
        SERIAL.load(Ordering::Relaxed)
    }

    pub(crate) fn serial(&self) -> u64 {
        self.0.serial
    }

    /// The operands, as long as the tensor keeps them.
    pub(crate) fn operands(&self) -> SmallVec<[Tensor; 3]> {
        self.0.lock().inputs.clone()
    }

    pub(crate) fn is_donated(&self) -> bool {
        self.0.donate.load(Ordering::Relaxed)
    }

    pub(crate) fn mark_state(&self) {
        self.0.state.store(true, Ordering::Relaxed);
    }

    /// The graph from `inputs` (placeholders or any tensors) to `outputs`, for inspection, serialisation or a
    /// [`crate::Session`]. Other evaluated tensors become constants; literals stay literals.
    pub fn trace(inputs: &[(&str, &Tensor)], outputs: &[(&str, &Tensor)]) -> Result<Graph> {
        let mut c = Collector { mode: Mode::Data, ..Collector::default() };
        for (name, t) in inputs {
            t.check()?;
            c.declare(name, t);
        }
        for (_, t) in outputs {
            c.visit(t)?;
        }
        for (name, t) in outputs {
            let id = c.ids[&Arc::as_ptr(&t.0)];
            c.graph.output(name, id);
        }
        Ok(c.graph)
    }

    /// Like [`Tensor::trace`], for results that may depend on [`Tensor::argument`]. Also returns the
    /// evaluated tensors that the results depend on, which are further inputs, and the numbers of the graph's
    /// arguments. The outputs are called `0`, `1` and so on.
    ///
    /// # Errors
    /// Errors that the tensors carry.
    pub fn trace_compiled(
        inputs: &[(&str, &Tensor)],
        outputs: &[Tensor],
    ) -> Result<(Graph, Vec<Tensor>, Vec<u32>)> {
        let mut c = Collector { mode: Mode::Compile, ..Collector::default() };
        for (name, t) in inputs {
            t.check()?;
            c.declare(name, t);
        }
        outputs.iter().try_for_each(|t| c.visit(t))?;
        for (i, t) in outputs.iter().enumerate() {
            let id = c.ids[&Arc::as_ptr(&t.0)];
            c.graph.output(&i.to_string(), id);
        }
        Ok((c.graph, c.leaves, c.numbers))
    }
}

/// The error for operands on two backends.
pub(crate) fn mixed(op: &str, a: &Backend, b: &Backend) -> Error {
    Error::MixedDevices { op: op.into(), a: a.id().into(), b: b.id().into(), at: Span::default() }
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let inner = self.0.lock();
        let state = match &inner.value {
            Value::Pending => "pending".to_string(),
            Value::Ready(_) => "ready".to_string(),
            Value::Donated { by } => format!("donated to {by}"),
            Value::Failed(e) => format!("error: {e}"),
        };
        write!(f, "Tensor({}, {}, {}, {state})", self.0.ty, self.0.op.name(), self.0.backend.id())
    }
}
