//! Conversions of Python's values.

use crate::errors::argument;
use halcyon_ir::{DType, Scalar};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyFloat, PyInt};

/// The dtype with this name, such as `f32`.
pub(crate) fn dtype(name: &str) -> PyResult<DType> {
    DType::from_name(name).ok_or_else(|| {
        let all: Vec<&str> = DType::all().map(DType::name).collect();
        argument("dtype", format!("\"{name}\" is not an element type; the types are {}", all.join(", ")))
    })
}

/// A number of Python.
pub(crate) fn scalar(value: &Bound<'_, PyAny>) -> PyResult<Scalar> {
    if value.is_instance_of::<PyBool>() {
        return Ok(Scalar::Bool(value.extract()?));
    }
    if value.is_instance_of::<PyInt>() {
        return match value.extract::<i64>() {
            Ok(i) => Ok(Scalar::I(i)),
            Err(_) => Ok(Scalar::U(value.extract()?)),
        };
    }
    if value.is_instance_of::<PyFloat>() {
        return Ok(Scalar::F(value.extract()?));
    }
    // NumPy's scalars.
    if let Ok(i) = value.call_method0("__index__") {
        return scalar(&i);
    }
    Ok(Scalar::F(value.extract()?))
}

/// A number as Python's bool, int or float.
pub(crate) fn number<'py>(py: Python<'py>, value: Scalar) -> PyResult<Bound<'py, PyAny>> {
    Ok(match value {
        Scalar::Bool(b) => PyBool::new(py, b).to_owned().into_any(),
        Scalar::I(i) => i.into_pyobject(py)?.into_any(),
        Scalar::U(u) => u.into_pyobject(py)?.into_any(),
        Scalar::F(f) => PyFloat::new(py, f).into_any(),
    })
}
