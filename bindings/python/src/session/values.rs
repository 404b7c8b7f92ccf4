//! Inputs of a run, and its results as Python's values.

use crate::calls::{Callback, Work};
use crate::errors::OrRaise;
use crate::tensor::Tensor;
use halcyon::onnx::{Datum, Input, Keys, Outputs, Results, Text};
use halcyon::{ConstData, DType, hal::Exported};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyByteArray, PyDict, PyFloat, PyList, PyString, PyTuple};
use std::hash::{Hash, Hasher};

/// Arrays of up to this number of bytes are copied, because sharing their memory costs more.
pub(super) const SMALL: usize = 16 << 10;

/// The value of an input.
pub(super) enum Given {
    Host(Datum),
    /// A tensor with its sizes.
    Device(halcyon::Tensor, Vec<usize>),
}

impl Given {
    pub(super) fn tensor(t: ConstData) -> Given {
        Given::Host(Datum::Tensor(t))
    }

    /// The sizes of a tensor.
    pub(super) fn dims(&self) -> Option<&[usize]> {
        fn of(d: &Datum) -> Option<&[usize]> {
            match d {
                Datum::Tensor(t) => Some(&t.dims),
                Datum::Text(t) => Some(&t.dims),
                Datum::Optional(Some(d)) => of(d),
                _ => None,
            }
        }
        match self {
            Given::Host(d) => of(d),
            Given::Device(_, dims) => Some(dims),
        }
    }

    pub(super) fn hash_sizes(&self, h: &mut impl Hasher) {
        self.dims().hash(h);
    }

    pub(super) fn input(self) -> Input {
        match self {
            Given::Host(d) => d.into(),
            Given::Device(t, _) => t.into(),
        }
    }

    pub(super) fn datum(self, py: Python<'_>) -> PyResult<Datum> {
        match self {
            Given::Host(d) => Ok(d),
            Given::Device(t, _) => py.work(|| t.to_data()).map(Datum::Tensor),
        }
    }
}

/// An output that is complete, before it becomes a value of Python.
pub(super) enum Fetched {
    /// A tensor whose memory the host reads in place.
    Shared(halcyon::Tensor, Exported),
    /// A tensor in the memory of a device.
    Device(halcyon::Tensor),
    /// A tensor that stays where it is.
    Kept(halcyon::Tensor),
    Host(Datum),
}

/// Waits for the outputs with these numbers, in this order.
pub(super) fn fetch(results: Results, wanted: &[usize], keep: bool) -> halcyon::Result<Vec<Fetched>> {
    match results {
        Results::Host(run) => Ok(pick(run.outputs, wanted).into_iter().map(Fetched::Host).collect()),
        Results::Device(outputs) => fetch_tensors(outputs, wanted, keep),
    }
}

/// The values with these numbers. A value that is asked for once is moved.
fn pick<T: Clone>(values: Vec<T>, wanted: &[usize]) -> Vec<T> {
    if wanted.iter().copied().eq(0..values.len()) {
        return values;
    }
    wanted.iter().filter_map(|k| values.get(*k).cloned()).collect()
}

fn fetch_tensors(outputs: Outputs, wanted: &[usize], keep: bool) -> halcyon::Result<Vec<Fetched>> {
    let tensors: Vec<halcyon::Tensor> = outputs.into_iter().map(|(_, t)| t).collect();
    let mut shared: Vec<usize> = vec![];
    let mut one = |t: halcyon::Tensor| {
        let dims = t.dims()?;
        if keep {
            return Ok(Fetched::Kept(t));
        }
        let dtype = t.dtype()?;
        if dtype.bits() < 8 || dtype.bytes(dims.iter().product()) <= SMALL {
            return t.to_data().map(Datum::Tensor).map(Fetched::Host);
        }
        match t.export()? {
            // Each result is an array of its own, also if outputs share a value.
            Some(m) if !shared.contains(&m.as_ptr().addr()) => {
                shared.push(m.as_ptr().addr());
                Ok(Fetched::Shared(t, m))
            }
            _ => Ok(Fetched::Device(t)),
        }
    };
    pick(tensors, wanted).into_iter().map(&mut one).collect()
}

/// The results as a list of Python.
pub(super) fn list<'py>(py: Python<'py>, all: Vec<Fetched>) -> PyResult<Bound<'py, PyList>> {
    let out = PyList::empty(py);
    for f in all {
        out.append(value(py, f)?)?;
    }
    Ok(out)
}

fn value<'py>(py: Python<'py>, f: Fetched) -> PyResult<Bound<'py, PyAny>> {
    match f {
        Fetched::Kept(t) => Ok(Bound::new(py, Tensor(t))?.into_any()),
        Fetched::Host(d) => datum(py, &d),
        Fetched::Shared(t, memory) => {
            let (dtype, dims) = (t.dtype().or_raise()?, t.dims().or_raise()?.to_vec());
            let memory = Bound::new(py, HostMemory { memory, dtype, dims, _tensor: t })?;
            let array = py.import(intern!(py, "numpy"))?.call_method1(intern!(py, "asarray"), (memory,))?;
            typed(array, dtype)
        }
        Fetched::Device(t) => {
            let (dtype, dims) = (t.dtype().or_raise()?, t.dims().or_raise()?.to_vec());
            let n = dtype.bytes(dims.iter().product());
            let bytes = PyByteArray::new_with(py, n, |to| py.work(|| t.read_into(to)))?;
            array(py, bytes, dtype, &dims)
        }
    }
}

/// A copy of a tensor's value as an array of NumPy.
#[pyfunction]
pub(crate) fn to_numpy<'py>(py: Python<'py>, tensor: &Tensor) -> PyResult<Bound<'py, PyAny>> {
    let _callback = Callback::begin(py);
    let t = tensor.0.clone();
    let made = py.work(|| {
        let small = t.dtype()?.bits() < 8;
        // A copy, because the tensor's other holders must not see changes of the array.
        if small { t.to_data().map(|d| Fetched::Host(Datum::Tensor(d))) } else { Ok(Fetched::Device(t)) }
    });
    value(py, made?)
}

/// The memory of a result on the host, which NumPy uses in place.
#[pyclass(frozen, module = "halcyon._native")]
struct HostMemory {
    memory: Exported,
    dtype: DType,
    dims: Vec<usize>,
    /// Keeps a later computation from writing to the memory.
    _tensor: halcyon::Tensor,
}

#[pymethods]
impl HostMemory {
    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let d = PyDict::new(py);
        d.set_item("version", 3)?;
        d.set_item("typestr", storage(self.dtype))?;
        d.set_item("shape", PyTuple::new(py, &self.dims)?)?;
        // Nobody else holds the result, so its new owner may write to it.
        d.set_item("data", (self.memory.as_ptr().expose_provenance(), self.memory.is_read_only()))?;
        Ok(d)
    }
}

/// NumPy's name of the type that stores a dtype's bits. Types of fewer than 8 bits take a byte each.
fn storage(dtype: DType) -> &'static str {
    dtype.row().npy.unwrap_or(match dtype.bits() {
        16 => "<u2",
        _ => "|u1",
    })
}

/// NumPy's dtype objects by our dtypes.
static DTYPES: PyOnceLock<Vec<(DType, Py<PyAny>)>> = PyOnceLock::new();

fn numpy_dtype<'py>(py: Python<'py>, dtype: DType) -> PyResult<Bound<'py, PyAny>> {
    let all = DTYPES.get_or_try_init(py, || {
        let class = py.import("numpy")?.getattr("dtype")?;
        let one = |d: DType| Ok((d, class.call1((storage(d),))?.unbind()));
        DType::all().map(one).collect::<PyResult<Vec<_>>>()
    })?;
    match all.iter().find(|(d, _)| *d == dtype) {
        Some((_, found)) => Ok(found.bind(py).clone()),
        None => Err(crate::errors::argument("dtype", format!("{dtype} has no type of NumPy"))),
    }
}

/// An array over bytes in memory of its own.
fn array<'py>(
    py: Python<'py>,
    bytes: Bound<'py, PyByteArray>,
    dtype: DType,
    dims: &[usize],
) -> PyResult<Bound<'py, PyAny>> {
    static ARRAY: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let class = ARRAY.get_or_try_init(py, || py.import("numpy")?.getattr("ndarray").map(Bound::unbind))?;
    let made = class.bind(py).call1((PyTuple::new(py, dims)?, numpy_dtype(py, dtype)?, bytes))?;
    typed(made, dtype)
}

/// The array with its own element type, if NumPy lacks it and the package `ml_dtypes` has it.
fn typed<'py>(array: Bound<'py, PyAny>, dtype: DType) -> PyResult<Bound<'py, PyAny>> {
    if dtype.row().npy.is_some() {
        return Ok(array);
    }
    let py = array.py();
    let helper = py.import(intern!(py, "halcyon.session._arrays"))?;
    helper.call_method1(intern!(py, "typed"), (array, dtype.name()))
}

fn tensor<'py>(py: Python<'py>, t: &ConstData) -> PyResult<Bound<'py, PyAny>> {
    let bytes = match t.dtype.bits() {
        8.. => PyByteArray::new(py, t.bytes()),
        _ => PyByteArray::new(py, &unpacked(t)),
    };
    array(py, bytes, t.dtype, &t.dims)
}

/// One byte for each element of fewer than 8 bits. Signed integers keep their value.
fn unpacked(t: &ConstData) -> Vec<u8> {
    let bits = t.dtype.bits() as usize;
    let signed = matches!(t.dtype, DType::I2 | DType::I4);
    let element = |i: usize| {
        let low = t.bytes()[i * bits / 8] >> (i * bits % 8);
        let high = low << (8 - bits);
        if signed { ((high as i8) >> (8 - bits)) as u8 } else { high >> (8 - bits) }
    };
    (0..t.numel()).map(element).collect()
}

fn text<'py>(py: Python<'py>, t: &Text) -> PyResult<Bound<'py, PyAny>> {
    let helper = py.import(intern!(py, "halcyon.session._arrays"))?;
    helper.call_method1(intern!(py, "string_array"), (&t.vals, PyTuple::new(py, &t.dims)?))
}

/// A value of any kind.
pub(super) fn datum<'py>(py: Python<'py>, d: &Datum) -> PyResult<Bound<'py, PyAny>> {
    match d {
        Datum::Tensor(t) => tensor(py, t),
        Datum::Text(t) => text(py, t),
        Datum::Sequence(all) => {
            let out = PyList::empty(py);
            for d in all {
                out.append(datum(py, d)?)?;
            }
            Ok(out.into_any())
        }
        Datum::Optional(None) => Ok(py.None().into_bound(py)),
        Datum::Optional(Some(d)) => datum(py, d),
        Datum::Map(keys, values) => map(py, keys, values),
    }
}

fn map<'py>(py: Python<'py>, keys: &Keys, values: &Datum) -> PyResult<Bound<'py, PyAny>> {
    let values: Vec<Bound<'py, PyAny>> = match values {
        // A map has a number for each key.
        Datum::Tensor(t) if t.dims.len() == 1 => t
            .scalars()
            .map(|s| match t.dtype.is_float() {
                true => Ok(PyFloat::new(py, s.as_f64()).into_any()),
                false => crate::convert::number(py, s),
            })
            .collect::<PyResult<_>>()?,
        Datum::Text(t) => t.vals.iter().map(|s| PyString::new(py, s).into_any()).collect(),
        other => datum(py, other)?.try_iter()?.collect::<PyResult<_>>()?,
    };
    let out = PyDict::new(py);
    match keys {
        Keys::Ints(k) => k.iter().zip(values).try_for_each(|(k, v)| out.set_item(k, v))?,
        Keys::Texts(k) => k.iter().zip(values).try_for_each(|(k, v)| out.set_item(k, v))?,
    }
    Ok(out.into_any())
}
