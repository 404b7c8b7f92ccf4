//! Host memory of Python's arrays as tensors: the protocol `__array_interface__` of NumPy, and what both
//! protocols share.
#![allow(unsafe_code)]

use crate::backend::Backend;
use crate::calls::Work;
use crate::errors::{OrRaise, argument, exception};
use crate::tensor::Tensor;
use halcyon::{Error, Tensor as Inner};
use halcyon_ir::data::Bytes;
use halcyon_ir::{ConstData, DType};
use pyo3::ffi;
use pyo3::prelude::*;
use std::ffi::{c_char, c_int, c_void};
use std::sync::Arc;

/// Memory that a Python object owns. The object lives as long as this value.
struct Foreign {
    /// An address, so that the value may be sent between threads.
    start: usize,
    bytes: usize,
    _owner: Py<PyAny>,
}

impl Bytes for Foreign {
    fn bytes(&self) -> &[u8] {
        if self.bytes == 0 {
            return &[];
        }
        // SAFETY: the owner's protocol promises that these bytes are readable while the owner lives, and this
        // value holds the owner. `View::new` excludes a null address and sizes above `isize::MAX`. That the
        // bytes do not change meanwhile is a duty of the caller of `from_dlpack` and `from_array_interface`,
        // which their documentation states, as it is for mapped files.
        unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance(self.start), self.bytes) }
    }
}

/// A strided array, in host memory unless a function says otherwise.
pub(crate) struct View {
    pub(crate) start: usize,
    pub(crate) dtype: DType,
    pub(crate) dims: Vec<usize>,
    /// Distance of neighbours along each axis in bytes.
    pub(crate) strides: Vec<isize>,
}

impl View {
    /// The number of bytes of the elements. Checks that the sizes and the address are possible.
    fn bytes(&self) -> PyResult<usize> {
        let n = self.dims.iter().try_fold(self.dtype.size(), |n, d| n.checked_mul(*d));
        let n = n.filter(|n| isize::try_from(*n).is_ok());
        let n = n.ok_or_else(|| argument("array", format!("the sizes {:?} are too large", self.dims)))?;
        match n > 0 && self.start == 0 {
            true => Err(argument("array", "its memory has the address 0")),
            false => Ok(n),
        }
    }

    /// Whether the elements are dense in row-major order, as no elements are.
    pub(crate) fn is_dense(&self) -> bool {
        if self.dims.contains(&0) {
            return true;
        }
        let mut next = self.dtype.size() as isize;
        for (n, stride) in self.dims.iter().zip(&self.strides).rev() {
            if *n != 1 && *stride != next {
                return false;
            }
            next = next.saturating_mul(*n as isize);
        }
        true
    }

    /// The elements in dense row-major order.
    fn gather(&self, bytes: usize) -> halcyon::Result<Vec<u8>> {
        let mut out = halcyon::host::zeros(bytes, "an array's copy")?;
        if bytes == 0 {
            return Ok(out);
        }
        let size = self.dtype.size();
        let Some((last, outer)) = self.dims.split_last() else {
            self.copy(self.start, &mut out);
            return Ok(out);
        };
        let stride = self.strides[outer.len()];
        let mut index = vec![0usize; outer.len()];
        let mut row = self.start;
        for to in out.chunks_exact_mut(last * size) {
            if stride == size as isize {
                self.copy(row, to);
            } else {
                let mut at = row;
                for e in to.chunks_exact_mut(size) {
                    self.copy(at, e);
                    at = at.wrapping_add_signed(stride);
                }
            }
            for k in (0..outer.len()).rev() {
                row = row.wrapping_add_signed(self.strides[k]);
                index[k] += 1;
                if index[k] < outer[k] {
                    break;
                }
                row = row.wrapping_add_signed(self.strides[k].wrapping_mul(-(outer[k] as isize)));
                index[k] = 0;
            }
        }
        Ok(out)
    }

    /// The range of the elements, which may be memory of a device: its first address and its size in bytes.
    pub(crate) fn extent(&self) -> PyResult<(usize, usize)> {
        let bytes = self.bytes()?;
        if bytes == 0 {
            return Ok((self.start, 0));
        }
        let (mut low, mut high) = (0isize, 0isize);
        for (n, stride) in self.dims.iter().zip(&self.strides) {
            let last = stride.saturating_mul(*n as isize - 1);
            low = low.saturating_add(last.min(0));
            high = high.saturating_add(last.max(0));
        }
        let bytes = high.checked_sub(low).and_then(|n| n.checked_add(self.dtype.size() as isize));
        let start = self.start.checked_add_signed(low);
        match (start, bytes.filter(|n| *n < isize::MAX)) {
            (Some(start), Some(bytes)) => Ok((start, bytes as usize)),
            _ => Err(argument("array", "its elements span more than the address space")),
        }
    }

    /// The elements in dense row-major order, from the flat tensor of the range that begins at `start`.
    pub(crate) fn gathered(&self, whole: &Inner, start: usize) -> halcyon::Result<Inner> {
        let (backend, size) = (whole.backend(), self.dtype.size() as isize);
        let first = (self.start.wrapping_sub(start) / size as usize) as i64;
        let mut index = Inner::full(backend, vec![1usize; self.dims.len()], first, DType::I64);
        for (k, (n, stride)) in self.dims.iter().zip(&self.strides).enumerate() {
            let mut dims = vec![1usize; self.dims.len()];
            dims[k] = *n;
            let step = Inner::arange(backend, *n, DType::I64) * (stride / size) as i64;
            index = index + step.reshape(dims);
        }
        let out = whole.gather(&index.reshape([self.numel()]), 0).reshape(self.dims.as_slice());
        out.dtype().map(|_| out)
    }

    /// A copy of the elements.
    pub(crate) fn copied(&self) -> PyResult<ConstData> {
        let bytes = self.gather(self.bytes()?).or_raise()?;
        ConstData::new(self.dtype, &self.dims, Arc::new(bytes)).or_raise()
    }

    /// The number of elements.
    pub(crate) fn numel(&self) -> usize {
        self.dims.iter().fold(1, |n, d| n.saturating_mul(*d))
    }

    fn copy(&self, from: usize, to: &mut [u8]) {
        // SAFETY: `gather` only computes addresses of elements of the array, which the owner's protocol
        // promises to be readable. `to` is memory of its own.
        unsafe {
            let from: *const u8 = std::ptr::with_exposed_provenance(from);
            std::ptr::copy_nonoverlapping(from, to.as_mut_ptr(), to.len());
        }
    }

    /// The elements in place. Their bytes may change while the result lives if the owner allows it, so only
    /// what reads them at once may use it.
    pub(crate) fn shared(&self, owner: Py<PyAny>) -> PyResult<ConstData> {
        let bytes = self.bytes()?;
        if !self.is_dense() {
            return Err(argument("array", "it is not dense in row-major order"));
        }
        let data: Arc<dyn Bytes> = Arc::new(Foreign { start: self.start, bytes, _owner: owner });
        ConstData::new(self.dtype, &self.dims, data).or_raise()
    }

    /// The tensor of these elements. `copy`: true copies; false shares the memory or fails; None shares it if
    /// the device can.
    pub(crate) fn tensor(
        &self,
        py: Python<'_>,
        backend: &Backend,
        owner: Py<PyAny>,
        copy: Option<bool>,
    ) -> PyResult<Tensor> {
        let bytes = self.bytes()?;
        let (dtype, dims, backend) = (self.dtype, &self.dims, backend.0.clone());
        let shared = self.is_dense() && copy != Some(true);
        let refused = |why: &str| {
            let what = format!("{why}, and copy=False forbids a copy");
            exception(Error::argument("from_dlpack", what))
        };
        if copy == Some(false) && !shared {
            return Err(refused("the array is not dense in row-major order"));
        }
        if shared {
            let data: Arc<dyn Bytes> = Arc::new(Foreign { start: self.start, bytes, _owner: owner });
            let data = ConstData::new(dtype, dims, data).or_raise()?;
            // Without elements there is nothing to share.
            if copy == Some(false) && bytes > 0 && backend.device().import(data.owner()).is_none() {
                return Err(refused(&format!("{} cannot use this memory in place", backend.id())));
            }
            return py.work(|| Inner::from_shared(&backend, &data)).and_then(Tensor::made);
        }
        let made = py.work(|| {
            let data = ConstData::new(dtype, dims, Arc::new(self.gather(bytes)?))?;
            // The copy belongs to nobody else, so the device may use it in place.
            Inner::from_shared(&backend, &data)
        });
        drop(owner);
        made.and_then(Tensor::made)
    }
}

/// The dtype of a type string such as `<f4`.
fn dtype_of(text: &str) -> PyResult<DType> {
    let bad = |what: &str| argument("array", format!("element type {text} {what}"));
    let (order, kind) = match text.as_bytes().first() {
        Some(b'<' | b'|' | b'=') => text.split_at(1),
        Some(b'>') => return Err(bad("is big-endian; convert it to little-endian")),
        _ => ("", text),
    };
    let _ = order;
    Ok(match kind {
        "b1" => DType::Bool,
        "u1" => DType::U8,
        "u2" => DType::U16,
        "u4" => DType::U32,
        "u8" => DType::U64,
        "i1" => DType::I8,
        "i2" => DType::I16,
        "i4" => DType::I32,
        "i8" => DType::I64,
        "f2" => DType::F16,
        "f4" => DType::F32,
        "f8" => DType::F64,
        _ => {
            return Err(crate::errors::exception(Error::Unsupported {
                what: format!("arrays with the element type {text}"),
                next: "Convert it to bool, an integer of 8 to 64 bits, float16, float32 or float64".into(),
            }));
        }
    })
}

/// The tensor of an object with NumPy's `__array_interface__`. With `copy=None` or `False` the tensor may use
/// the array's memory, which then must not change while the tensor or a result that is not computed yet
/// lives. `dtype` overrides the element type, for arrays that store another type's bits.
#[pyfunction]
#[pyo3(signature = (backend, array, copy = None, dtype = None))]
pub(crate) fn from_array_interface(
    py: Python<'_>,
    backend: &Backend,
    array: &Bound<'_, PyAny>,
    copy: Option<bool>,
    dtype: Option<&str>,
) -> PyResult<Tensor> {
    let i = array.getattr("__array_interface__")?;
    let (start, _read_only): (usize, bool) = i.get_item("data")?.extract()?;
    let dims: Vec<usize> = i.get_item("shape")?.extract()?;
    let text: String = i.get_item("typestr")?.extract()?;
    let own = match (dtype, text.get(1..)) {
        (Some(name), Some(kind)) => {
            let d = crate::convert::dtype(name)?;
            let size: usize = kind.get(1..).and_then(|n| n.parse().ok()).unwrap_or(0);
            if size != d.size() || d.bits() < 8 {
                let what = format!("elements of {size} bytes cannot be read as {name}");
                return Err(argument("array", what));
            }
            d
        }
        _ => dtype_of(&text)?,
    };
    let strides: Option<Vec<isize>> = i.call_method1("get", ("strides",))?.extract()?;
    let strides = strides.unwrap_or_else(|| dense(&dims, own.size()));
    if strides.len() != dims.len() {
        return Err(argument("array", format!("{} sizes and {} strides", dims.len(), strides.len())));
    }
    let view = View { start, dtype: own, dims, strides };
    view.tensor(py, backend, array.clone().unbind(), copy)
}

/// The strides in bytes of a dense array.
pub(crate) fn dense(dims: &[usize], size: usize) -> Vec<isize> {
    let mut strides = vec![0; dims.len()];
    let mut next = size as isize;
    for (s, n) in strides.iter_mut().zip(dims).rev() {
        *s = next;
        next = next.saturating_mul((*n).max(1) as isize);
    }
    strides
}

/// The structure of NumPy's protocol `__array_struct__`
/// (<https://numpy.org/doc/stable/reference/arrays.interface.html>).
#[repr(C)]
struct ArrayStruct {
    two: c_int,
    rank: c_int,
    kind: c_char,
    size: c_int,
    flags: c_int,
    shape: *const isize,
    strides: *const isize,
    data: *const c_void,
    descr: *const c_void,
}

/// The flag of elements in the machine's byte order.
const NATIVE_ORDER: c_int = 0x200;

/// The memory of an array of NumPy, read through `__array_struct__`, which is many times faster than
/// `__array_interface__`. `None` for elements that are not bools, integers or floats in the machine's byte
/// order. `array` must be an instance of `numpy.ndarray`.
pub(crate) fn numpy_view(array: &Bound<'_, PyAny>) -> PyResult<Option<View>> {
    let capsule = array.getattr(pyo3::intern!(array.py(), "__array_struct__"))?;
    // SAFETY: `PyCapsule_GetPointer` accepts any object and checks its type and name. NumPy promises that the
    // pointer is that of a structure of this form, which lives as long as the capsule, and that the lists
    // have `rank` entries.
    let (kind, size, flags, start, dims, strides) = unsafe {
        let p: *const ArrayStruct = ffi::PyCapsule_GetPointer(capsule.as_ptr(), std::ptr::null()).cast();
        if p.is_null() {
            return Err(PyErr::fetch(array.py()));
        }
        let a = &*p;
        let rank = usize::try_from(a.rank).unwrap_or(0);
        let list = |p: *const isize| match rank == 0 || p.is_null() {
            true => &[][..],
            false => std::slice::from_raw_parts(p, rank),
        };
        let dims = list(a.shape).iter().map(|d| usize::try_from(*d).unwrap_or(0)).collect();
        (a.kind as u8, a.size, a.flags, a.data.expose_provenance(), dims, list(a.strides).to_vec())
    };
    let dtype = match (kind, size) {
        (b'b', 1) => DType::Bool,
        (b'u', 1) => DType::U8,
        (b'u', 2) => DType::U16,
        (b'u', 4) => DType::U32,
        (b'u', 8) => DType::U64,
        (b'i', 1) => DType::I8,
        (b'i', 2) => DType::I16,
        (b'i', 4) => DType::I32,
        (b'i', 8) => DType::I64,
        (b'f', 2) => DType::F16,
        (b'f', 4) => DType::F32,
        (b'f', 8) => DType::F64,
        _ => return Ok(None),
    };
    match flags & NATIVE_ORDER != 0 || size == 1 {
        true => Ok(Some(View { start, dtype, dims, strides })),
        false => Ok(None),
    }
}
