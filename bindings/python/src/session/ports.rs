//! Declared inputs of a session, and the conversion of Python's values to them.

use super::values::{Given, SMALL};
use crate::backend::Backend as PyBackend;
use crate::calls::Work;
use crate::convert;
use crate::errors::{OrRaise, argument, exception};
use crate::interface::{View, numpy_view};
use crate::tensor::Tensor;
use halcyon::onnx::{Datum, Keys, Port, PortType, Text};
use halcyon::{Backend, ConstData, DType, Error, Scalar};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyList, PyString, PyTuple, PyType};
use std::sync::Arc;

/// An input of a session.
pub(super) struct InputPort {
    /// The name as Python's string, for looking it up.
    pub(super) key: Py<PyString>,
    pub(super) name: String,
    ty: PortType,
    /// The declared sizes; `None` for sizes that are open. `None` if the rank is open too.
    dims: Option<Vec<Option<usize>>>,
}

/// `numpy.ndarray`, found once.
static NDARRAY: PyOnceLock<Py<PyType>> = PyOnceLock::new();

fn is_array(value: &Bound<'_, PyAny>) -> PyResult<bool> {
    let class = NDARRAY.import(value.py(), "numpy", "ndarray")?;
    value.is_instance(class)
}

impl InputPort {
    pub(super) fn new(py: Python<'_>, port: &Port) -> InputPort {
        let inner = match &port.ty {
            PortType::Optional(of) => of,
            other => other,
        };
        let dims = match inner {
            PortType::Tensor { shape, .. } | PortType::Text { shape } => {
                shape.as_ref().map(|s| s.iter().map(|d| d.known()).collect())
            }
            _ => None,
        };
        InputPort {
            key: PyString::intern(py, &port.name).unbind(),
            name: port.name.clone(),
            ty: port.ty.clone(),
            dims,
        }
    }

    pub(super) fn is_optional(&self) -> bool {
        matches!(self.ty, PortType::Optional(_))
    }

    /// The value of this input.
    pub(super) fn value(
        &self,
        py: Python<'_>,
        backend: &Backend,
        value: &Bound<'_, PyAny>,
    ) -> PyResult<Given> {
        let given = self.convert(py, backend, value, &self.ty)?;
        let dims = given.dims();
        if let (Some(want), Some(got)) = (&self.dims, dims) {
            let fits = |(w, g): (&Option<usize>, &usize)| w.is_none_or(|w| w == *g);
            if want.len() != got.len() || !want.iter().zip(got).all(fits) {
                let got = got.to_vec();
                let what =
                    format!("input \"{}\" has the shape {got:?}, but the model takes {}", self.name, self.ty);
                return Err(argument("run", what));
            }
        }
        Ok(given)
    }

    fn convert(
        &self,
        py: Python<'_>,
        backend: &Backend,
        value: &Bound<'_, PyAny>,
        ty: &PortType,
    ) -> PyResult<Given> {
        // A value of `halcyon.OrtValue`.
        if let Some(inner) = value.getattr_opt(intern!(py, "_halcyon_value"))? {
            return self.convert(py, backend, &inner, ty);
        }
        match ty {
            PortType::Optional(of) => match value.is_none() {
                true => Ok(Given::Host(Datum::Optional(None))),
                false => {
                    let inner = self.convert(py, backend, value, of)?.datum(py)?;
                    Ok(Given::Host(Datum::Optional(Some(Box::new(inner)))))
                }
            },
            PortType::Tensor { dtype, .. } => self.tensor(py, backend, value, *dtype),
            PortType::Text { .. } => self.text(value).map(|t| Given::Host(Datum::Text(t))),
            PortType::Sequence(of) => {
                if value.cast::<PyList>().is_err() && value.cast::<PyTuple>().is_err() {
                    return Err(self.refused(value, "a list"));
                }
                let one = |x: PyResult<Bound<'_, PyAny>>| self.convert(py, backend, &x?, of)?.datum(py);
                let all = value.try_iter()?.map(one).collect::<PyResult<Vec<_>>>()?;
                Ok(Given::Host(Datum::Sequence(all)))
            }
            PortType::Map(of) => match value.cast::<PyDict>() {
                Ok(d) => self.map(d, of).map(Given::Host),
                Err(_) => Err(self.refused(value, "a dict")),
            },
        }
    }

    /// The error for a value of the wrong kind.
    fn refused(&self, value: &Bound<'_, PyAny>, want: &str) -> PyErr {
        let class = value.get_type();
        let class = class.name().map_or_else(|_| "?".into(), |n| n.to_string());
        let what =
            format!("input \"{}\" takes {} ({want}), the value is of the type {class}", self.name, self.ty);
        argument("run", what)
    }

    fn tensor(
        &self,
        py: Python<'_>,
        backend: &Backend,
        value: &Bound<'_, PyAny>,
        dtype: DType,
    ) -> PyResult<Given> {
        if is_array(value)? {
            return self.array(py, backend, value, dtype);
        }
        if let Ok(t) = value.cast::<Tensor>() {
            return self.device(py, backend, &t.get().0, dtype);
        }
        // Arrays of `halcyon.array` hold a tensor.
        if let Some(t) = value.getattr_opt(intern!(py, "_tensor"))?
            && let Ok(t) = t.cast::<Tensor>()
        {
            return self.device(py, backend, &t.get().0, dtype);
        }
        // Numbers and lists, NumPy's scalars, and arrays of other libraries.
        let helper = py.import(intern!(py, "halcyon.session._arrays"))?;
        let made = helper.call_method1(intern!(py, "as_array"), (value, dtype.name(), &self.name))?;
        match made.cast::<Tensor>() {
            Ok(t) => self.device(py, backend, &t.get().0, dtype),
            Err(_) => self.array(py, backend, &made, dtype),
        }
    }

    /// A tensor. Like an array of NumPy, a tensor of another device is copied to the session's.
    fn device(
        &self,
        py: Python<'_>,
        backend: &Backend,
        tensor: &halcyon::Tensor,
        dtype: DType,
    ) -> PyResult<Given> {
        let own = tensor.dtype().or_raise()?;
        if own != dtype {
            return Err(self.wrong_type(own.name()));
        }
        let dims = tensor.dims().or_raise()?.to_vec();
        let tensor = match tensor.backend().is_same(backend) {
            true => tensor.clone(),
            false => py.work(|| tensor.to(backend))?,
        };
        Ok(Given::Device(tensor, dims))
    }

    fn wrong_type(&self, found: &str) -> PyErr {
        let what =
            format!("input \"{}\" takes {}, but the array has the element type {found}", self.name, self.ty);
        argument("run", what)
    }

    fn array(
        &self,
        py: Python<'_>,
        backend: &Backend,
        value: &Bound<'_, PyAny>,
        dtype: DType,
    ) -> PyResult<Given> {
        let view = match numpy_view(value)? {
            Some(v) if v.dtype == dtype => v,
            Some(v) if stores(v.dtype, dtype) => View { dtype, ..v },
            Some(v) if packs(v.dtype, dtype) => return packed(&v, dtype).map(Given::tensor),
            Some(v) => return Err(self.wrong_type(v.dtype.name())),
            // Types of `ml_dtypes`, and another byte order.
            None => {
                let helper = py.import(intern!(py, "halcyon.session._arrays"))?;
                let plain = helper.call_method1(intern!(py, "plain"), (value, dtype.name()))?;
                let view = match plain.is_none() {
                    true => None,
                    false => numpy_view(&plain)?,
                };
                let Some(view) = view else {
                    let text: String = value.getattr("dtype")?.str()?.extract()?;
                    return Err(self.wrong_type(&text));
                };
                let data = match dtype.bits() < 8 {
                    true => packed(&view, dtype),
                    // The copy that the helper made is used at once.
                    false => View { dtype, ..view }.copied(),
                };
                return data.map(Given::tensor);
            }
        };
        let bytes = view.numel().saturating_mul(dtype.size());
        if bytes <= SMALL {
            return view.copied().map(Given::tensor);
        }
        let dims = view.dims.clone();
        let backend = PyBackend(backend.clone());
        let tensor = view.tensor(py, &backend, value.clone().unbind(), None)?;
        Ok(Given::Device(tensor.0, dims))
    }

    /// An array, a list or a string as a tensor of strings.
    fn text(&self, value: &Bound<'_, PyAny>) -> PyResult<Text> {
        let py = value.py();
        let helper = py.import(intern!(py, "halcyon.session._arrays"))?;
        let made = helper.call_method1(intern!(py, "strings"), (value, &self.name))?;
        let (dims, vals): (Vec<usize>, Vec<String>) = made.extract()?;
        Text::new(&dims, vals).or_raise()
    }

    fn map(&self, dict: &Bound<'_, PyDict>, of: &PortType) -> PyResult<Datum> {
        let values: Vec<Bound<'_, PyAny>> = dict.values().iter().collect();
        let keys = match dict.keys().extract::<Vec<i64>>() {
            Ok(k) => Keys::Ints(k),
            Err(_) => Keys::Texts(dict.keys().extract().map_err(|_| {
                argument(
                    "run",
                    format!("input \"{}\" takes a dict with integers or strings as keys", self.name),
                )
            })?),
        };
        let values = match of {
            PortType::Tensor { dtype, .. } => {
                let all = values.iter().map(convert::scalar).collect::<PyResult<Vec<Scalar>>>();
                let all = all.map_err(|_| {
                    argument("run", format!("input \"{}\" takes a dict with numbers as values", self.name))
                })?;
                Datum::Tensor(ConstData::from_scalars(*dtype, &[all.len()], all).or_raise()?)
            }
            PortType::Text { .. } => {
                let all = values.iter().map(|v| v.extract()).collect::<PyResult<Vec<String>>>()?;
                Datum::Text(Text::new(&[all.len()], all).or_raise()?)
            }
            other => {
                let what = format!("input \"{}\", a map to {}", self.name, other.kind());
                return Err(exception(Error::unsupported(
                    what,
                    "Only maps to numbers and strings can be given",
                )));
            }
        };
        Ok(Datum::Map(keys, Box::new(values)))
    }
}

/// Whether an array of `have` may hold the bits of `want`, a type that NumPy lacks.
fn stores(have: DType, want: DType) -> bool {
    let raw = matches!(have, DType::U8 | DType::U16);
    raw && want.row().npy.is_none() && want.bits() >= 8 && have.size() == want.size()
}

/// Whether an array of `have` may hold the values of `want`, a type of fewer than 8 bits.
fn packs(have: DType, want: DType) -> bool {
    want.bits() < 8 && matches!(have, DType::U8 | DType::I8)
}

/// Elements of fewer than 8 bits, from an array with one element in the low bits of each byte.
pub(super) fn packed(view: &View, dtype: DType) -> PyResult<ConstData> {
    let data = view.copied()?;
    let (bits, mask) = (dtype.bits() as usize, (1u8 << dtype.bits()) - 1);
    let mut out = vec![0u8; dtype.bytes(data.numel())];
    for (i, b) in data.bytes().iter().enumerate() {
        out[i * bits / 8] |= (b & mask) << (i * bits % 8);
    }
    ConstData::new(dtype, &view.dims, Arc::new(out)).or_raise()
}
