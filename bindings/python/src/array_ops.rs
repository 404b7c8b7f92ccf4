//! Further operations of the submodule `ops`, for arrays.

use crate::errors::argument;
use crate::tensor::Tensor;
use pyo3::prelude::*;

/// `len` elements of an axis from `start` on. If the tensor is data, the start is a run-time argument of the
/// plan, so a loop over parts uses one plan.
#[pyfunction]
fn narrow(x: PyRef<'_, Tensor>, axis: i64, start: usize, len: usize) -> PyResult<Tensor> {
    Tensor::made(x.0.narrow(axis, start, len))
}

/// Whether gradients can be taken through the tensor.
#[pyfunction]
fn is_tracked(x: PyRef<'_, Tensor>) -> bool {
    x.0.is_tracked()
}

/// Adds the functions to the submodule `ops`.
pub(crate) fn register(parent: &Bound<'_, PyModule>) -> PyResult<()> {
    let ops = parent.getattr("ops")?;
    let ops = ops.cast::<PyModule>().map_err(|_| argument("ops", "is not a module"))?;
    ops.add_function(wrap_pyfunction!(narrow, ops)?)?;
    ops.add_function(wrap_pyfunction!(is_tracked, ops)?)?;
    crate::linalg::register(ops)
}
