//! `Tensor`: a lazy tensor of Halcyon.

use crate::backend::Backend;
use crate::calls::Work;
use crate::convert;
use crate::errors::{OrRaise, argument};
use halcyon::Tensor as Inner;
use halcyon_ir::ConstData;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple};
use std::sync::Arc;

/// A lazy, immutable tensor on a backend.
///
/// Operations check shapes and element types at once and compute nothing. Reading a value computes it.
#[pyclass(frozen, module = "halcyon._native")]
pub(crate) struct Tensor(pub(crate) Inner);

impl Tensor {
    /// Checks that an operation succeeded.
    pub(crate) fn made(t: Inner) -> PyResult<Tensor> {
        t.check().or_raise()?;
        Ok(Tensor(t))
    }
}

#[pymethods]
impl Tensor {
    /// A tensor filled with a number.
    #[staticmethod]
    fn full(backend: &Backend, shape: Vec<usize>, value: &Bound<'_, PyAny>, dtype: &str) -> PyResult<Tensor> {
        let dtype = convert::dtype(dtype)?;
        Tensor::made(Inner::full(&backend.0, shape, convert::scalar(value)?, dtype))
    }

    /// The numbers 0, 1, …, n-1.
    #[staticmethod]
    fn arange(backend: &Backend, n: usize, dtype: &str) -> PyResult<Tensor> {
        Tensor::made(Inner::arange(&backend.0, n, convert::dtype(dtype)?))
    }

    /// A tensor from dense row-major little-endian bytes.
    #[staticmethod]
    fn from_bytes(
        py: Python<'_>,
        backend: &Backend,
        data: Vec<u8>,
        shape: Vec<usize>,
        dtype: &str,
    ) -> PyResult<Tensor> {
        let data = ConstData::new(convert::dtype(dtype)?, &shape, Arc::new(data)).or_raise()?;
        let backend = backend.0.clone();
        py.work(|| Inner::from_data(&backend, &data)).and_then(Tensor::made)
    }

    /// Uniform random numbers in [0, 1); the same seed gives the same numbers on every device.
    #[staticmethod]
    fn rand(backend: &Backend, shape: Vec<usize>, dtype: &str, seed: u64) -> PyResult<Tensor> {
        Tensor::made(Inner::rand(&backend.0, shape, convert::dtype(dtype)?, seed))
    }

    /// Standard normal random numbers; the same seed gives the same numbers on every device.
    #[staticmethod]
    fn randn(backend: &Backend, shape: Vec<usize>, dtype: &str, seed: u64) -> PyResult<Tensor> {
        Tensor::made(Inner::randn(&backend.0, shape, convert::dtype(dtype)?, seed))
    }

    /// The name of the element type, such as `f32`.
    #[getter]
    fn dtype(&self) -> PyResult<&'static str> {
        Ok(self.0.dtype().or_raise()?.name())
    }

    /// The sizes of the axes.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.0.dims().or_raise()?.iter())
    }

    /// The number of axes.
    #[getter]
    fn ndim(&self) -> PyResult<usize> {
        Ok(self.0.dims().or_raise()?.len())
    }

    /// The number of elements.
    #[getter]
    fn size(&self) -> PyResult<usize> {
        Ok(self.0.dims().or_raise()?.iter().product())
    }

    /// The size of the elements in bytes.
    #[getter]
    fn nbytes(&self) -> PyResult<usize> {
        Ok(self.0.dtype().or_raise()?.bytes(self.size()?))
    }

    /// The backend that the tensor belongs to.
    #[getter]
    fn backend(&self) -> Backend {
        Backend(self.0.backend().clone())
    }

    /// Whether the value is computed.
    #[getter]
    fn is_ready(&self) -> bool {
        self.0.is_ready()
    }

    /// Computes the value and waits for it.
    fn eval(&self, py: Python<'_>) -> PyResult<()> {
        py.work(|| self.0.eval().map(drop))
    }

    /// Copies the tensor to another backend.
    fn to(&self, py: Python<'_>, backend: &Backend) -> PyResult<Tensor> {
        let to = backend.0.clone();
        py.work(|| self.0.to(&to)).and_then(Tensor::made)
    }

    /// The value as dense row-major little-endian bytes.
    fn to_bytes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let data = py.work(|| self.0.to_data())?;
        Ok(PyBytes::new(py, data.bytes()))
    }

    /// The elements in row-major order as a flat list of Python's numbers.
    fn to_list<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let data = py.work(|| self.0.to_data())?;
        data.scalars().map(|s| convert::number(py, s)).collect()
    }

    /// The only element, as a number of Python.
    fn item<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let data = py.work(|| self.0.to_data())?;
        match data.numel() {
            1 => convert::number(py, data.get(0).unwrap_or(halcyon_ir::Scalar::Bool(false))),
            n => Err(argument("item", format!("the tensor has {n} elements; item() needs exactly one"))),
        }
    }

    /// Starts recording operations for gradients ([`gradients`](crate::compile::gradients)).
    fn requires_grad(&self) -> PyResult<Tensor> {
        self.0.requires_grad().or_raise().map(Tensor)
    }

    /// The same value without its gradient history.
    fn detach(&self) -> PyResult<Tensor> {
        self.0.detach().or_raise().map(Tensor)
    }

    fn __repr__(&self) -> String {
        format!("{:?}", self.0)
    }
}

/// Computes several tensors as one plan; operations that they share are computed once.
#[pyfunction]
pub(crate) fn eval(py: Python<'_>, tensors: Vec<PyRef<'_, Tensor>>) -> PyResult<()> {
    let all: Vec<Inner> = tensors.iter().map(|t| t.0.clone()).collect();
    drop(tensors);
    py.work(|| halcyon::eval(&all))
}
