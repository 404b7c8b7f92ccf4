//! Compiled functions and gradients of Python functions over tensors.

use crate::backend::Backend;
use crate::calls::{self, Callback, Work};
use crate::tensor::Tensor;
use halcyon::{Compiled as Inner, Error, Result, Tensor as Raw};
use halcyon_ir::Scalar;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use std::cell::Cell;

thread_local! {
    /// The exception that the function raised which this thread traces. Threads may trace at the same time.
    static RAISED: Cell<Option<PyErr>> = const { Cell::new(None) };
}

type Traced = Box<dyn Fn(&[Raw]) -> Result<Vec<Raw>> + Send + Sync>;

/// Calls a Python function that takes tensors and returns a sequence of tensors.
fn call(py: Python<'_>, f: &Py<PyAny>, inputs: &[Raw]) -> PyResult<Vec<Raw>> {
    let inputs = PyTuple::new(
        py,
        inputs.iter().map(|t| Tensor(t.clone())).map(|t| Py::new(py, t)).collect::<PyResult<Vec<_>>>()?,
    )?;
    let out: Vec<PyRef<'_, Tensor>> = f.bind(py).call1(inputs)?.extract()?;
    Ok(out.iter().map(|t| t.0.clone()).collect())
}

fn keep(e: PyErr) -> Error {
    RAISED.set(Some(e));
    Error::argument("compiled function", "the function raised an exception")
}

/// A function of tensors that is traced once for each set of input types.
#[pyclass(frozen, module = "halcyon._native")]
pub(crate) struct Compiled {
    inner: Inner<Traced>,
}

#[pymethods]
impl Compiled {
    /// `function` takes tensors and returns a list of tensors. It is called with placeholders.
    #[new]
    fn new(backend: &Backend, function: Py<PyAny>) -> Compiled {
        let traced: Traced = Box::new(move |x| Python::attach(|py| call(py, &function, x).map_err(keep)));
        Compiled { inner: backend.0.compile(traced) }
    }

    /// Runs the function. `args` are the numbers that the function reads by `ops.call_argument`; new numbers
    /// need no new plan.
    #[pyo3(signature = (inputs, args = None))]
    fn __call__(
        &self,
        py: Python<'_>,
        inputs: Vec<PyRef<'_, Tensor>>,
        args: Option<Vec<Bound<'_, PyAny>>>,
    ) -> PyResult<Vec<Tensor>> {
        let all: Vec<Raw> = inputs.iter().map(|t| t.0.clone()).collect();
        drop(inputs);
        let args: Vec<Scalar> =
            args.iter().flatten().map(crate::convert::scalar).collect::<PyResult<Vec<Scalar>>>()?;
        let _call = calls::call(py)?;
        drop(RAISED.take());
        let made = py.detach(|| {
            let all: Vec<&Raw> = all.iter().collect();
            self.inner.call_with(&all, &args)
        });
        match made {
            Ok(out) => Ok(out.into_iter().map(Tensor).collect()),
            Err(e) => Err(RAISED.take().unwrap_or_else(|| crate::errors::exception(e))),
        }
    }

    /// The number of plans that the function keeps.
    #[getter]
    fn plans(&self) -> usize {
        self.inner.plans()
    }
}

/// The gradients of a float with one element with respect to tensors from `requires_grad`.
#[pyfunction]
pub(crate) fn gradients(
    py: Python<'_>,
    of: PyRef<'_, Tensor>,
    with_respect_to: Vec<PyRef<'_, Tensor>>,
) -> PyResult<Vec<Tensor>> {
    let of = of.0.clone();
    let all: Vec<Raw> = with_respect_to.iter().map(|t| t.0.clone()).collect();
    drop(with_respect_to);
    let (_, grads) = py.work(|| halcyon::value_and_grad(&all, |_| Ok(of)))?;
    Ok(grads.into_iter().map(Tensor).collect())
}

/// The value of a function of tensors and its gradients with respect to them. The function returns one
/// tensor with one element. With `traced` this is part of a compiled function, which cannot evaluate the
/// parameters. The gradients keep their history only with `inner`: inside of a compiled function or of
/// another gradient. Otherwise it would make a loop over steps keep the values of all steps.
#[pyfunction]
#[pyo3(signature = (function, params, traced = false, inner = false))]
pub(crate) fn value_and_grad(
    py: Python<'_>,
    function: Py<PyAny>,
    params: Vec<PyRef<'_, Tensor>>,
    traced: bool,
    inner: bool,
) -> PyResult<(Tensor, Vec<Tensor>)> {
    let given: Vec<Raw> = params.iter().map(|t| t.0.clone()).collect();
    drop(params);
    // Each parameter is a tensor of its own, so that nothing that the function captures depends on it. One
    // with a history keeps it, for gradients of gradients. A placeholder cannot be evaluated.
    let leaf = |t: &Raw| if traced || t.is_tracked() { Ok(t.variable()) } else { t.requires_grad() };
    let all = py.work(|| given.iter().map(leaf).collect::<Result<Vec<Raw>>>())?;
    let _callback = Callback::begin(py);
    drop(RAISED.take());
    let made = halcyon::value_and_grad(&all, |p| {
        let mut out = call(py, &function, p).map_err(keep)?;
        match out.len() {
            1 => Ok(out.remove(0)),
            n => {
                Err(Error::argument("value_and_grad", format!("the function returned {n} tensors, not one")))
            }
        }
    });
    match made {
        Ok((value, grads)) => {
            let history = |g: Raw| if inner { g } else { g.without_history() };
            Ok((Tensor(value), grads.into_iter().map(history).map(Tensor).collect()))
        }
        Err(e) => Err(RAISED.take().unwrap_or_else(|| crate::errors::exception(e))),
    }
}
