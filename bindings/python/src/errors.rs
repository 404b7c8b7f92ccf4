//! Errors of Halcyon as Python exceptions, which `halcyon/_errors.py` defines.

use halcyon::Error;
use halcyon_ir::error::Span;
use pyo3::exceptions::{PyKeyboardInterrupt, PyRuntimeError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;

/// The exception classes by name, found once.
static MODULE: PyOnceLock<Py<PyModule>> = PyOnceLock::new();

/// The name of the exception class for an error.
fn class(e: &Error) -> &'static str {
    match e {
        Error::Shape { .. } => "ShapeError",
        Error::DType { .. } => "DTypeError",
        // Numbers that a decomposition cannot work with (linalg.rs).
        Error::Argument { op, .. } if op.starts_with("linalg.") => "LinAlgError",
        Error::Argument { .. } => "ArgumentError",
        Error::Unsupported { .. } | Error::UnsupportedOps(_) => "UnsupportedError",
        Error::Unavailable { .. } => "UnavailableError",
        Error::OutOfMemory { .. } => "OutOfMemoryError",
        Error::Driver { .. } | Error::Compile { .. } => "DriverError",
        Error::Donated { .. } => "DonatedError",
        Error::MixedDevices { .. } => "MixedDevicesError",
        Error::Index { .. } => "OutOfRangeError",
        Error::Endless { .. } => "EndlessError",
        Error::Format { .. } => "FormatError",
        Error::Io { .. } => "FileError",
        _ => "HalcyonError",
    }
}

/// Removes a place in this module's Rust files, because the traceback has the caller's line. The node of a
/// model stays.
fn without_rust_line(mut e: Error) -> Error {
    if let Error::Shape { at, .. }
    | Error::DType { at, .. }
    | Error::Argument { at, .. }
    | Error::MixedDevices { at, .. }
    | Error::Index { at, .. } = &mut e
        && let Span::Caller(_) = at
    {
        *at = Span::default();
    }
    e
}

/// Says in Python's terms that a traced function reads a value, which Rust's functions do by other means.
fn in_python_terms(mut e: Error) -> Error {
    if let Error::Argument { op, what, .. } = &mut e
        && op == "eval"
        && what.starts_with("a placeholder has no value")
    {
        *what = "a placeholder has no value: it is read while its function is traced, as bool(), float(), \
            int() and numpy.asarray() do. Use halcyon.array.where, or read it outside of the function"
            .into();
    }
    e
}

/// The exception for an error of Halcyon. An interrupted run is a `KeyboardInterrupt`.
pub(crate) fn exception(e: Error) -> PyErr {
    let e = in_python_terms(without_rust_line(e));
    if let Error::MixedDevices { a, b, .. } = &e
        && a == b
    {
        let what = format!(
            "operands belong to two backends that were opened separately on {a}. Make one of them with \
             device=x.device of the other, or call halcyon.set_default_backend before arrays are made"
        );
        return named("MixedDevicesError", what);
    }
    if let Error::Interrupted { .. } = e {
        return PyKeyboardInterrupt::new_err(e.to_string());
    }
    named(class(&e), e.to_string())
}

/// An exception of the class with this name in `halcyon/_errors.py`.
pub(crate) fn named(class: &str, message: String) -> PyErr {
    Python::attach(|py| {
        let made = MODULE
            .get_or_try_init(py, || PyModule::import(py, "halcyon._errors").map(Bound::unbind))
            .and_then(|m| m.bind(py).getattr(class))
            .and_then(|c| Ok(c.cast_into::<PyType>()?));
        match made {
            Ok(class) => PyErr::from_type(class, message),
            // The package is not importable, for example at the end of the interpreter.
            Err(_) => PyRuntimeError::new_err(message),
        }
    })
}

/// The exception for an invalid argument.
pub(crate) fn argument(op: &str, what: impl Into<String>) -> PyErr {
    exception(Error::argument(op, what))
}

/// A result of Halcyon as a result for Python.
pub(crate) trait OrRaise<T> {
    fn or_raise(self) -> PyResult<T>;
}

impl<T> OrRaise<T> for halcyon::Result<T> {
    fn or_raise(self) -> PyResult<T> {
        self.map_err(exception)
    }
}
