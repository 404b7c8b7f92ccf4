//! DLPack: exchange of tensors with other libraries. The structures are those of `dlpack.h`, version 1.1
//! (<https://dmlc.github.io/dlpack/latest/c_api.html>).
#![allow(unsafe_code)]

use crate::backend::Backend;
use crate::calls::Work;
use crate::errors::{OrRaise, argument, exception, named};
use crate::interface::{View, dense};
use crate::tensor::Tensor;
use halcyon::hal::{BackendType, DeviceMemory};
use halcyon::{Error, Tensor as Inner};
use halcyon_ir::DType;
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use std::any::Any;
use std::ffi::{CStr, c_void};

const CPU: i32 = 1;
const CUDA_HOST: i32 = 3;
/// Backends whose memory other libraries know by its address, with their device types.
const DEVICES: &[(i32, BackendType)] = &[(2, BackendType::Cuda), (10, BackendType::Rocm)];
const READ_ONLY: u64 = 1;
const IS_COPIED: u64 = 2;

#[repr(C)]
#[derive(Clone, Copy)]
struct DlDevice {
    kind: i32,
    id: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct DlType {
    code: u8,
    bits: u8,
    lanes: u16,
}

#[repr(C)]
struct DlTensor {
    data: *mut c_void,
    device: DlDevice,
    ndim: i32,
    dtype: DlType,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

#[repr(C)]
struct Plain {
    tensor: DlTensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Plain)>,
}

#[repr(C)]
struct Versioned {
    version: [u32; 2],
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Versioned)>,
    flags: u64,
    tensor: DlTensor,
}

const PLAIN: &CStr = c"dltensor";
const PLAIN_USED: &CStr = c"used_dltensor";
const VERSIONED: &CStr = c"dltensor_versioned";
const VERSIONED_USED: &CStr = c"used_dltensor_versioned";

/// The code of complex element types in `dlpack.h`.
const COMPLEX: u8 = 5;
/// The element types by their codes in `dlpack.h`.
const TYPES: &[(DType, u8, u8)] = &[
    (DType::Bool, 6, 8),
    (DType::I8, 0, 8),
    (DType::I16, 0, 16),
    (DType::I32, 0, 32),
    (DType::I64, 0, 64),
    (DType::U8, 1, 8),
    (DType::U16, 1, 16),
    (DType::U32, 1, 32),
    (DType::U64, 1, 64),
    (DType::F16, 2, 16),
    (DType::F32, 2, 32),
    (DType::F64, 2, 64),
    (DType::BF16, 4, 16),
    (DType::F8E4M3FN, 10, 8),
    (DType::F8E4M3FNUZ, 11, 8),
    (DType::F8E5M2, 12, 8),
    (DType::F8E5M2FNUZ, 13, 8),
    (DType::F8E8M0, 14, 8),
];

/// A tensor that another library lent. The library gets it back when this object is dropped. It is a Python
/// object, so that a thread that does not hold the interpreter's lock can drop a reference to it.
#[pyclass(frozen)]
struct Managed {
    address: usize,
    is_versioned: bool,
}

impl Drop for Managed {
    fn drop(&mut self) {
        // SAFETY: the address is that of the structure in the capsule, which `from_dlpack` took over and
        // which nobody else deletes.
        unsafe {
            if self.is_versioned {
                let m: *mut Versioned = std::ptr::with_exposed_provenance_mut(self.address);
                if let Some(delete) = (*m).deleter {
                    delete(m);
                }
            } else {
                let m: *mut Plain = std::ptr::with_exposed_provenance_mut(self.address);
                if let Some(delete) = (*m).deleter {
                    delete(m);
                }
            }
        }
    }
}

/// Takes over the structure in a capsule. A capsule can be taken once.
fn take(capsule: &Bound<'_, PyAny>) -> PyResult<Managed> {
    let p = capsule.as_ptr();
    for (name, used, is_versioned) in [(VERSIONED, VERSIONED_USED, true), (PLAIN, PLAIN_USED, false)] {
        // SAFETY: `PyCapsule_IsValid` accepts any object. It checks the name and that the pointer is not
        // null, so `PyCapsule_GetPointer` succeeds. The new name is static.
        unsafe {
            if ffi::PyCapsule_IsValid(p, name.as_ptr()) == 1 {
                let address = ffi::PyCapsule_GetPointer(p, name.as_ptr()).expose_provenance();
                if ffi::PyCapsule_SetName(p, used.as_ptr()) != 0 {
                    return Err(PyErr::fetch(capsule.py()));
                }
                return Ok(Managed { address, is_versioned });
            }
        }
    }
    Err(argument("from_dlpack", "the object is no DLPack capsule, or another library has taken it"))
}

/// The strided array that a structure describes.
///
/// # Safety
/// `t` must follow `dlpack.h`.
unsafe fn view(t: &DlTensor) -> PyResult<View> {
    let DlType { code, bits, lanes } = t.dtype;
    let row = TYPES.iter().find(|(_, c, b)| (*c, *b, 1) == (code, bits, lanes));
    let Some((dtype, ..)) = row else {
        if code == COMPLEX {
            let what = "from_dlpack: the element type is complex, and Halcyon has no complex types";
            return Err(named("DTypeError", what.into()));
        }
        return Err(exception(Error::unsupported(
            format!("DLPack element type with code {code}, {bits} bits and {lanes} lanes"),
            "Convert it to a bool, an integer or a float type",
        )));
    };
    let rank = usize::try_from(t.ndim).map_err(|_| argument("from_dlpack", "the rank is negative"))?;
    let list = |p: *const i64| -> Vec<i64> {
        match rank == 0 || p.is_null() {
            true => vec![],
            // SAFETY: by contract, a list that is not null has `ndim` entries.
            false => unsafe { std::slice::from_raw_parts(p, rank) }.to_vec(),
        }
    };
    let dims = list(t.shape)
        .into_iter()
        .map(|d| usize::try_from(d).map_err(|_| argument("from_dlpack", format!("{d} is not a size"))))
        .collect::<PyResult<Vec<usize>>>()?;
    if dims.len() != rank {
        return Err(argument("from_dlpack", "the tensor has no shape"));
    }
    let size = dtype.size();
    let strides = match t.strides.is_null() {
        true => dense(&dims, size),
        false => list(t.strides).into_iter().map(|s| (s as isize).wrapping_mul(size as isize)).collect(),
    };
    let offset =
        usize::try_from(t.byte_offset).map_err(|_| argument("from_dlpack", "the offset is too large"))?;
    let start = match t.data.is_null() {
        true => 0,
        false => t.data.expose_provenance().wrapping_add(offset),
    };
    Ok(View { start, dtype: *dtype, dims, strides })
}

/// The strided array in host memory of a capsule, and the object that keeps it.
pub(crate) fn open(py: Python<'_>, capsule: &Bound<'_, PyAny>) -> PyResult<(View, Py<PyAny>)> {
    let Opened { view, device, owner, .. } = opened(py, capsule)?;
    match device.kind {
        CPU | CUDA_HOST => Ok((view, owner)),
        kind => Err(elsewhere(kind)),
    }
}

/// The error for memory that Halcyon cannot read.
fn elsewhere(kind: i32) -> PyErr {
    let what = format!("DLPack from a device of the type {kind}");
    exception(Error::unsupported(what, "Copy the array to the CPU first"))
}

/// What a capsule holds.
struct Opened {
    /// The strided array, which may be memory of a device.
    view: View,
    device: DlDevice,
    /// Whether the producer says that the memory must not be written. A capsule that is not versioned cannot
    /// say so.
    is_read_only: bool,
    /// The object that keeps the memory.
    owner: Py<PyAny>,
}

/// Opens a capsule.
fn opened(py: Python<'_>, capsule: &Bound<'_, PyAny>) -> PyResult<Opened> {
    let managed = take(capsule)?;
    // SAFETY: `take` gives the address of a structure of this kind, which lives as long as `managed`. The
    // producer follows `dlpack.h`.
    let (view, device, is_read_only) = unsafe {
        if managed.is_versioned {
            let m: *const Versioned = std::ptr::with_exposed_provenance(managed.address);
            if (*m).version[0] != 1 {
                let what = format!("DLPack version {}", (*m).version[0]);
                return Err(exception(Error::unsupported(what, "Ask the producer for version 1")));
            }
            (view(&(*m).tensor)?, (*m).tensor.device, (*m).flags & READ_ONLY != 0)
        } else {
            let m: *const Plain = std::ptr::with_exposed_provenance(managed.address);
            (view(&(*m).tensor)?, (*m).tensor.device, false)
        }
    };
    Ok(Opened { view, device, is_read_only, owner: Py::new(py, managed)?.into_any() })
}

/// Host memory that another library lent, for NumPy's protocol `__array_interface__`. NumPy lacks some of the
/// element types, so the elements are unsigned integers of the same size.
#[pyclass(frozen, module = "halcyon._native")]
pub(crate) struct Lent {
    view: View,
    is_read_only: bool,
    _owner: Py<PyAny>,
}

#[pymethods]
impl Lent {
    /// The name of the element type.
    #[getter]
    fn dtype(&self) -> &'static str {
        self.view.dtype.name()
    }

    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let all = PyDict::new(py);
        all.set_item("version", 3)?;
        all.set_item("typestr", format!("<u{}", self.view.dtype.size()))?;
        all.set_item("shape", PyTuple::new(py, &self.view.dims)?)?;
        all.set_item("strides", PyTuple::new(py, &self.view.strides)?)?;
        all.set_item("data", (self.view.start, self.is_read_only))?;
        Ok(all)
    }
}

/// The memory of a DLPack capsule of the host. It is shared.
#[pyfunction]
pub(crate) fn lend(py: Python<'_>, capsule: &Bound<'_, PyAny>) -> PyResult<Lent> {
    let Opened { view, device, is_read_only, owner } = opened(py, capsule)?;
    match device.kind {
        // `extent` checks that the sizes and addresses are possible.
        CPU | CUDA_HOST => view.extent().map(|_| Lent { view, is_read_only, _owner: owner }),
        kind => Err(elsewhere(kind)),
    }
}

/// The tensor in a DLPack capsule. With `copy=None` or `False` the tensor may use the producer's memory,
/// which then must not change while the tensor or a result that is not computed yet lives. Memory of a device
/// must be that of the backend's device.
#[pyfunction]
#[pyo3(signature = (backend, capsule, copy = None))]
pub(crate) fn from_dlpack(
    py: Python<'_>,
    backend: &Backend,
    capsule: &Bound<'_, PyAny>,
    copy: Option<bool>,
) -> PyResult<Tensor> {
    let Opened { view, device, owner, .. } = opened(py, capsule)?;
    match (device.kind, DEVICES.iter().find(|(kind, _)| *kind == device.kind)) {
        (CPU | CUDA_HOST, _) => view.tensor(py, backend, owner, copy),
        (_, Some((_, kind))) => {
            let device = (*kind, usize::try_from(device.id).unwrap_or(usize::MAX));
            on_device(py, (view, device, owner), backend, copy)
        }
        (kind, None) => Err(elsewhere(kind)),
    }
}

/// The tensor of an array in memory of a device, with the object that keeps it. The producer must follow
/// `dlpack.h`.
fn on_device(
    py: Python<'_>,
    (view, device, owner): (View, (BackendType, usize), Py<PyAny>),
    backend: &Backend,
    copy: Option<bool>,
) -> PyResult<Tensor> {
    let (at, bytes) = view.extent()?;
    // SAFETY: the producer follows `dlpack.h`: this memory of the device is valid while `owner` lives. That
    // it does not change is a duty of the caller, as for host memory.
    let memory = unsafe { DeviceMemory::new(device, at as u64, bytes, Box::new(owner)) };
    let backend = backend.0.clone();
    let info = backend.info();
    if (info.backend, info.index) != device {
        let what = format!("the array is on {}:{}, the backend is {}", device.0.id(), device.1, backend.id());
        return Err(argument("from_dlpack", what));
    }
    let in_place = view.is_dense() && copy != Some(true);
    if !in_place && copy == Some(false) {
        let what = "the array is not dense in row-major order, and copy=False forbids a copy";
        return Err(argument("from_dlpack", what));
    }
    py.work(|| match in_place {
        true => Inner::from_device(&backend, view.dtype, &view.dims, memory),
        false => {
            let whole = Inner::from_device(&backend, view.dtype, &[bytes / view.dtype.size()], memory)?;
            let copied = view.gathered(&whole, at)?;
            // The import ends here, not when the result is first used.
            halcyon::eval(std::slice::from_ref(&copied))?;
            Ok(copied)
        }
    })
    .and_then(Tensor::made)
}

/// What an exported structure keeps alive.
struct Context {
    shape: Vec<i64>,
    strides: Vec<i64>,
    /// The memory and its tensor, because a computation may overwrite a value that no tensor holds.
    _keep: Option<Box<dyn Any + Send + Sync>>,
    device: DlDevice,
    copy: Vec<u64>,
}

impl Context {
    fn describe(&mut self, data: *mut c_void, dtype: DlType) -> DlTensor {
        DlTensor {
            data,
            device: self.device,
            ndim: self.shape.len() as i32,
            dtype,
            shape: self.shape.as_mut_ptr(),
            strides: self.strides.as_mut_ptr(),
            byte_offset: 0,
        }
    }
}

/// The deleter of a structure before version 1.
///
/// # Safety
/// `m` comes from [`to_dlpack`], and nothing uses it afterwards.
unsafe extern "C" fn delete_plain(m: *mut Plain) {
    // SAFETY: both were made by `Box::into_raw` in `to_dlpack`, and a consumer deletes a structure once.
    unsafe {
        drop(Box::from_raw((*m).context.cast::<Context>()));
        drop(Box::from_raw(m));
    }
}

/// The deleter of a structure of version 1.
///
/// # Safety
/// `m` comes from [`to_dlpack`], and nothing uses it afterwards.
unsafe extern "C" fn delete_versioned(m: *mut Versioned) {
    // SAFETY: `Box::into_raw` in `to_dlpack` made both, and a consumer deletes a structure once.
    unsafe {
        drop(Box::from_raw((*m).context.cast::<Context>()));
        drop(Box::from_raw(m));
    }
}

/// Deletes the structure of a capsule that nobody took.
///
/// # Safety
/// `capsule` is a capsule of [`to_dlpack`] that Python deletes.
unsafe extern "C" fn drop_capsule(capsule: *mut ffi::PyObject) {
    // SAFETY: Python calls this once with the capsule that `to_dlpack` made. A consumer that took the
    // structure has renamed the capsule.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, VERSIONED.as_ptr()) == 1 {
            delete_versioned(ffi::PyCapsule_GetPointer(capsule, VERSIONED.as_ptr()).cast());
        } else if ffi::PyCapsule_IsValid(capsule, PLAIN.as_ptr()) == 1 {
            delete_plain(ffi::PyCapsule_GetPointer(capsule, PLAIN.as_ptr()).cast());
        }
    }
}

/// The memory of a value for a capsule.
struct Shared {
    address: usize,
    device: DlDevice,
    is_read_only: bool,
    keep: Box<dyn Any + Send + Sync>,
}

/// The memory of the value itself: of the host, or with `on_device` of its device. `None` if there is none
/// that another library can use.
fn shared(t: &Inner, on_device: bool) -> halcyon::Result<Option<Shared>> {
    if !on_device {
        return Ok(t.export()?.map(|m| Shared {
            address: m.as_ptr().expose_provenance(),
            device: DlDevice { kind: CPU, id: 0 },
            is_read_only: m.is_read_only(),
            keep: Box::new((t.clone(), m)),
        }));
    }
    let Some(m) = t.export_device()? else { return Ok(None) };
    let Some((kind, _)) = DEVICES.iter().find(|(_, b)| *b == m.device().0) else { return Ok(None) };
    Ok(Some(Shared {
        address: m.address() as usize,
        device: DlDevice { kind: *kind, id: m.device().1 as i32 },
        is_read_only: m.is_read_only(),
        keep: Box::new((t.clone(), m)),
    }))
}

/// The DLPack device of a tensor's memory: that of a device whose memory other libraries know, else the
/// host's.
#[pyfunction]
pub(crate) fn dlpack_device(tensor: &Tensor) -> (i32, i32) {
    let info = tensor.0.backend().info();
    let device = DEVICES.iter().find(|(_, b)| *b == info.backend);
    device.map_or((CPU, 0), |(kind, _)| (*kind, info.index as i32))
}

/// A DLPack capsule of the value in host memory, or with `on_device` in the memory of its device. Without a
/// copy the memory is the tensor's own and marked as read-only, unless `writable`, with which the caller
/// promises not to use the tensor again. A capsule that is not versioned cannot say that memory is read-only,
/// so it always has a copy.
#[pyfunction]
#[pyo3(signature = (tensor, versioned, copy = None, writable = false, on_device = false))]
pub(crate) fn to_dlpack<'py>(
    py: Python<'py>,
    tensor: &Tensor,
    versioned: bool,
    copy: Option<bool>,
    writable: bool,
    on_device: bool,
) -> PyResult<Bound<'py, PyAny>> {
    let t = tensor.0.clone();
    let dtype = t.dtype().or_raise()?;
    let Some((_, code, bits)) = TYPES.iter().find(|(d, ..)| *d == dtype) else {
        return Err(PyBufferError::new_err(format!("DLPack has no element type {dtype}")));
    };
    let dims = t.dims().or_raise()?;
    let shape: Vec<i64> = dims.iter().map(|d| *d as i64).collect();
    let strides = dense(&dims, 1).into_iter().map(|s| s as i64).collect();
    let must_copy = copy == Some(true) || !(versioned || writable);
    let own = match (must_copy, on_device) {
        (false, _) => py.work(|| shared(&t, on_device))?,
        (true, true) if copy != Some(false) => py.work(|| {
            let n: usize = dims.iter().product();
            let copied = t.reshape([n]).gather(&Inner::arange(t.backend(), n, DType::I64), 0);
            shared(&copied.reshape(dims.as_slice()), true)
        })?,
        (true, _) => None,
    };
    let mut context =
        Context { shape, strides, _keep: None, device: DlDevice { kind: CPU, id: 0 }, copy: vec![] };
    let mut flags = 0;
    let data = match own {
        Some(memory) => {
            if must_copy {
                flags |= IS_COPIED;
            } else if !writable || memory.is_read_only {
                flags |= READ_ONLY;
            }
            context.device = memory.device;
            context._keep = Some(memory.keep);
            std::ptr::with_exposed_provenance_mut(memory.address)
        }
        None if copy == Some(false) => {
            let what =
                "the memory cannot be shared: it is on a device, or the consumer is of a DLPack before 1.0";
            return Err(PyBufferError::new_err(format!("{what}, and copy=False forbids a copy")));
        }
        None => {
            let data = py.work(|| t.to_data())?;
            // Words, so that elements of every size are aligned.
            context.copy = vec![0; data.bytes().len().div_ceil(8)];
            flags |= IS_COPIED;
            let to: *mut u8 = context.copy.as_mut_ptr().cast();
            // SAFETY: the words have at least this number of bytes and do not overlap the source.
            unsafe { std::ptr::copy_nonoverlapping(data.bytes().as_ptr(), to, data.bytes().len()) };
            to.cast()
        }
    };
    let dtype = DlType { code: *code, bits: *bits, lanes: 1 };
    let tensor = context.describe(data, dtype);
    let context = Box::into_raw(Box::new(context)).cast();
    let (name, pointer): (&CStr, *mut c_void) = match versioned {
        true => {
            let m = Versioned { version: [1, 1], context, deleter: Some(delete_versioned), flags, tensor };
            (VERSIONED, Box::into_raw(Box::new(m)).cast())
        }
        false => {
            let m = Plain { tensor, context, deleter: Some(delete_plain) };
            (PLAIN, Box::into_raw(Box::new(m)).cast())
        }
    };
    // SAFETY: the pointer is not null and the name is static. If Python has no memory for the capsule, the
    // structure is deleted here.
    unsafe {
        let capsule = ffi::PyCapsule_New(pointer, name.as_ptr(), Some(drop_capsule));
        if capsule.is_null() {
            match versioned {
                true => delete_versioned(pointer.cast()),
                false => delete_plain(pointer.cast()),
            }
        }
        Bound::from_owned_ptr_or_err(py, capsule)
    }
}
