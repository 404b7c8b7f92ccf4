//! Tensors in host memory.

use crate::guard::{Failure, HalcyonStatus, guard, value};
use crate::pointer::{Out, free, get, slice, text};
use halcyon::formats::onnx::{Datum, Text};
use halcyon::{ConstData, DType};
use std::ffi::{c_char, c_void};
use std::ptr::null;
use std::sync::Arc;

/// The element type of a tensor. The numbers are those of ONNX's `TensorProto.DataType`.
///
/// Elements of fewer than 8 bits are packed into bytes, the first element in the low bits.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HalcyonDtype {
    /// No element type: the value is not a tensor, or its type is not known before a run.
    None = 0,
    /// `float`.
    F32 = 1,
    /// `uint8_t`.
    U8 = 2,
    /// `int8_t`.
    I8 = 3,
    /// `uint16_t`.
    U16 = 4,
    /// `int16_t`.
    I16 = 5,
    /// `int32_t`.
    I32 = 6,
    /// `int64_t`.
    I64 = 7,
    /// Text. Such tensors are made by `halcyon_tensor_from_strings` and read by `halcyon_tensor_string`.
    String = 8,
    /// `bool`: one byte, 0 or 1.
    Bool = 9,
    /// IEEE 754 binary16.
    F16 = 10,
    /// `double`.
    F64 = 11,
    /// `uint32_t`.
    U32 = 12,
    /// `uint64_t`.
    U64 = 13,
    /// The upper 16 bits of a `float`.
    BF16 = 16,
    /// 8 bits, without infinity (OCP E4M3).
    F8E4M3FN = 17,
    /// 8 bits, without infinity and negative zero.
    F8E4M3FNUZ = 18,
    /// 8 bits, with infinity (OCP E5M2).
    F8E5M2 = 19,
    /// 8 bits, without infinity and negative zero.
    F8E5M2FNUZ = 20,
    /// 4 bits, unsigned.
    U4 = 21,
    /// 4 bits, signed.
    I4 = 22,
    /// 4 bits (OCP E2M1).
    F4E2M1 = 23,
    /// 8 bits, a power of two (OCP E8M0).
    F8E8M0 = 24,
    /// 2 bits, unsigned.
    U2 = 25,
    /// 2 bits, signed.
    I2 = 26,
}

impl HalcyonDtype {
    /// The number of an element type.
    pub(crate) fn of(dtype: DType) -> i32 {
        dtype.row().onnx
    }
}

const STRING: i32 = HalcyonDtype::String as i32;

/// The element type with a number. Text is not one of them.
fn number_type(number: i32) -> Result<DType, Failure> {
    DType::from_onnx(number).ok_or_else(|| {
        let known: Vec<String> = DType::all().map(|d| format!("{} ({d})", HalcyonDtype::of(d))).collect();
        let text = match number {
            STRING => "`dtype` is text; make such a tensor with halcyon_tensor_from_strings".into(),
            n => format!("`dtype` is {n}, which is no element type; they are {}", known.join(", ")),
        };
        Failure { status: HalcyonStatus::Dtype, text }
    })
}

/// The name of an element type, such as `f32`. `unknown` for a number that is not in `HalcyonDtype`. Never
/// NULL. The string is valid for ever.
#[unsafe(no_mangle)]
pub extern "C" fn halcyon_dtype_name(dtype: i32) -> *const c_char {
    const NAMES: &[(HalcyonDtype, &std::ffi::CStr)] = &[
        (HalcyonDtype::None, c"none"),
        (HalcyonDtype::F32, c"f32"),
        (HalcyonDtype::U8, c"u8"),
        (HalcyonDtype::I8, c"i8"),
        (HalcyonDtype::U16, c"u16"),
        (HalcyonDtype::I16, c"i16"),
        (HalcyonDtype::I32, c"i32"),
        (HalcyonDtype::I64, c"i64"),
        (HalcyonDtype::String, c"string"),
        (HalcyonDtype::Bool, c"bool"),
        (HalcyonDtype::F16, c"f16"),
        (HalcyonDtype::F64, c"f64"),
        (HalcyonDtype::U32, c"u32"),
        (HalcyonDtype::U64, c"u64"),
        (HalcyonDtype::BF16, c"bf16"),
        (HalcyonDtype::F8E4M3FN, c"f8e4m3fn"),
        (HalcyonDtype::F8E4M3FNUZ, c"f8e4m3fnuz"),
        (HalcyonDtype::F8E5M2, c"f8e5m2"),
        (HalcyonDtype::F8E5M2FNUZ, c"f8e5m2fnuz"),
        (HalcyonDtype::U4, c"u4"),
        (HalcyonDtype::I4, c"i4"),
        (HalcyonDtype::F4E2M1, c"f4e2m1"),
        (HalcyonDtype::F8E8M0, c"f8e8m0"),
        (HalcyonDtype::U2, c"u2"),
        (HalcyonDtype::I2, c"i2"),
    ];
    NAMES.iter().find(|(d, _)| *d as i32 == dtype).map_or(c"unknown", |(_, name)| name).as_ptr()
}

/// The bits of an element; 0 for text and for a number that is not an element type.
#[unsafe(no_mangle)]
pub extern "C" fn halcyon_dtype_bits(dtype: i32) -> usize {
    DType::from_onnx(dtype).map_or(0, |d| d.bits() as usize)
}

/// Data begins at a multiple of this number of bytes.
const ALIGNMENT: usize = 16;

/// Bytes whose address is a multiple of [`ALIGNMENT`].
struct Aligned {
    memory: Vec<u8>,
    start: usize,
}

impl Aligned {
    fn copy(bytes: &[u8]) -> Result<Aligned, Failure> {
        let mut memory: Vec<u8> = Vec::new();
        let full = |_| Failure {
            status: HalcyonStatus::OutOfMemory,
            text: format!("out of memory: a tensor of {} bytes was requested", bytes.len()),
        };
        // A second allocation must not move the bytes, so the room for the alignment is reserved at once.
        memory.try_reserve_exact(bytes.len().saturating_add(ALIGNMENT)).map_err(full)?;
        let start = memory.as_ptr().addr().wrapping_neg() % ALIGNMENT;
        memory.resize(start, 0);
        memory.extend_from_slice(bytes);
        Ok(Aligned { memory, start })
    }
}

impl AsRef<[u8]> for Aligned {
    fn as_ref(&self) -> &[u8] {
        &self.memory[self.start..]
    }
}

/// A tensor in host memory. It never changes, so any number of threads may use a handle of this type at the
/// same time.
#[derive(Debug)]
pub struct HalcyonTensor {
    value: Datum,
    dims: Vec<i64>,
    /// The strings of a tensor of text, each with a NUL at its end.
    strings: Vec<Vec<u8>>,
}

impl HalcyonTensor {
    /// A handle on a value. `what` names the value for errors.
    pub(crate) fn of(value: Datum, what: &str) -> Result<HalcyonTensor, Failure> {
        let (value, sizes, strings) = match value {
            Datum::Tensor(t) => {
                let aligned = t.bytes().as_ptr().addr() % ALIGNMENT == 0;
                let t = match aligned {
                    true => t,
                    false => ConstData::new(t.dtype, &t.dims, Arc::new(Aligned::copy(t.bytes())?))?,
                };
                let sizes = t.dims.to_vec();
                (Datum::Tensor(t), sizes, vec![])
            }
            Datum::Text(t) => {
                let strings = t.vals.iter().map(|s| [s.as_bytes(), b"\0"].concat()).collect();
                let sizes = t.dims.clone();
                (Datum::Text(t), sizes, strings)
            }
            other => {
                let text = format!(
                    "not supported yet: {what}, {}, as a tensor. The C library has tensors of numbers and of \
                     text only",
                    other.describe()
                );
                return Err(Failure { status: HalcyonStatus::Unsupported, text });
            }
        };
        let size = |n: &usize| i64::try_from(*n).map_err(|_| Failure::argument(format!("the size {n}")));
        let dims = sizes.iter().map(size).collect::<Result<_, _>>()?;
        Ok(HalcyonTensor { value, dims, strings })
    }

    /// The value. Cloning shares the elements of a tensor of numbers.
    pub(crate) fn datum(&self) -> Datum {
        self.value.clone()
    }

    fn numbers(&self) -> Result<&ConstData, Failure> {
        self.value.tensor().ok_or_else(|| Failure {
            status: HalcyonStatus::Dtype,
            text: "`tensor` holds text; read it with halcyon_tensor_string".into(),
        })
    }
}

/// The sizes of a tensor and their product.
///
/// # Safety
/// `dims` points to `rank` numbers.
unsafe fn sizes(dims: *const i64, rank: usize) -> Result<(Vec<usize>, usize), Failure> {
    // SAFETY: the caller guarantees `rank` numbers.
    let dims = unsafe { slice(dims, rank, "dims") }?;
    let wrong =
        |why: String| Failure { status: HalcyonStatus::Shape, text: format!("`dims` {dims:?}: {why}") };
    let size = |(axis, n): (usize, &i64)| {
        usize::try_from(*n).map_err(|_| wrong(format!("the size of axis {axis} is {n}")))
    };
    let sizes = dims.iter().enumerate().map(size).collect::<Result<Vec<_>, _>>()?;
    let count = sizes.iter().try_fold(1usize, |n, d| n.checked_mul(*d));
    let count = count.ok_or_else(|| wrong("the tensor is larger than the address space".into()))?;
    Ok((sizes, count))
}

/// Makes a tensor of numbers by copying them. `dtype` is a `HalcyonDtype`; `dims` has `rank` sizes, and may
/// be NULL for a scalar (`rank` 0). `data` has the elements in row-major order, little-endian, and `bytes` is
/// their exact size; `data` may be NULL if there are none. The caller frees `*out` with
/// `halcyon_tensor_free`.
///
/// # Safety
/// `dims` points to `rank` numbers, `data` to `bytes` bytes, `out` to a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn halcyon_tensor_new(
    dtype: i32,
    dims: *const i64,
    rank: usize,
    data: *const c_void,
    bytes: usize,
    out: *mut *mut HalcyonTensor,
) -> HalcyonStatus {
    guard(|| {
        // SAFETY: the caller guarantees memory for a pointer.
        let out = unsafe { Out::handle(out) }?;
        let dtype = number_type(dtype)?;
        // SAFETY: the caller guarantees `rank` numbers.
        let (sizes, count) = unsafe { sizes(dims, rank) }?;
        let want = count.checked_mul(dtype.bits() as usize).map(|bits| bits.div_ceil(8));
        if want != Some(bytes) {
            let text = format!(
                "`bytes` is {bytes}, but {dtype}{sizes:?} takes {}",
                want.map_or("more than the address space".into(), |n| n.to_string())
            );
            return Err(Failure { status: HalcyonStatus::Shape, text });
        }
        // SAFETY: the caller guarantees `bytes` bytes.
        let data = unsafe { slice(data.cast::<u8>(), bytes, "data") }?;
        if let Some(at) = data.iter().position(|b| dtype == DType::Bool && *b > 1) {
            return Err(Failure::argument(format!(
                "`data` has the value {} at {at}; a bool is 0 or 1",
                data[at]
            )));
        }
        let data = ConstData::new(dtype, &sizes, Arc::new(Aligned::copy(data)?))?;
        out.give(HalcyonTensor::of(Datum::Tensor(data), "the tensor")?);
        Ok(())
    })
}

/// Makes a tensor of text by copying it. `dims` has `rank` sizes; `strings` has `count` strings in row-major
/// order, as many as the sizes say. The caller frees `*out` with `halcyon_tensor_free`.
///
/// # Safety
/// `dims` points to `rank` numbers, `strings` to `count` strings, `out` to a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn halcyon_tensor_from_strings(
    dims: *const i64,
    rank: usize,
    strings: *const *const c_char,
    count: usize,
    out: *mut *mut HalcyonTensor,
) -> HalcyonStatus {
    guard(|| {
        // SAFETY: the caller guarantees memory for a pointer, and `rank` numbers.
        let (out, (sizes, elements)) = unsafe { (Out::handle(out)?, sizes(dims, rank)?) };
        if elements != count {
            let text = format!("`count` is {count}, but a tensor of the sizes {sizes:?} has {elements}");
            return Err(Failure { status: HalcyonStatus::Shape, text });
        }
        // SAFETY: the caller guarantees `count` pointers.
        let strings = unsafe { slice(strings, count, "strings") }?;
        // SAFETY: the caller guarantees that each pointer is a string.
        let one = |(i, s): (usize, &*const c_char)| unsafe { text(*s, &format!("strings[{i}]")) };
        let strings = strings.iter().enumerate().map(|p| one(p).map(String::from));
        let text = Text::new(&sizes, strings.collect::<Result<_, _>>()?)?;
        out.give(HalcyonTensor::of(Datum::Text(text), "the tensor")?);
        Ok(())
    })
}

/// Frees a tensor. NULL is allowed.
///
/// # Safety
/// `tensor` is NULL or a tensor that was not freed yet, and nothing uses it any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn halcyon_tensor_free(tensor: *mut HalcyonTensor) {
    // SAFETY: the caller guarantees that this is the last use of the handle.
    unsafe { free(tensor) }
}

/// The element type of a tensor; `HALCYON_DTYPE_NONE` if `tensor` is NULL.
///
/// # Safety
/// `tensor` is NULL or a tensor.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn halcyon_tensor_dtype(tensor: *const HalcyonTensor) -> i32 {
    value(HalcyonDtype::None as i32, || {
        // SAFETY: the caller guarantees a tensor or NULL.
        let tensor = unsafe { get(tensor, "tensor") }?;
        Ok(tensor.value.tensor().map_or(STRING, |t| HalcyonDtype::of(t.dtype)))
    })
}

/// The number of dimensions; 0 if `tensor` is NULL.
///
/// # Safety
/// `tensor` is NULL or a tensor.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn halcyon_tensor_rank(tensor: *const HalcyonTensor) -> usize {
    // SAFETY: the caller guarantees a tensor or NULL.
    value(0, || Ok(unsafe { get(tensor, "tensor") }?.dims.len()))
}

/// The sizes, as many as `halcyon_tensor_rank` says. They belong to the tensor. NULL if `tensor` is NULL.
///
/// # Safety
/// `tensor` is NULL or a tensor.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn halcyon_tensor_dims(tensor: *const HalcyonTensor) -> *const i64 {
    // SAFETY: the caller guarantees a tensor or NULL.
    value(null(), || Ok(unsafe { get(tensor, "tensor") }?.dims.as_ptr()))
}

/// The number of elements; 0 if `tensor` is NULL.
///
/// # Safety
/// `tensor` is NULL or a tensor.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn halcyon_tensor_count(tensor: *const HalcyonTensor) -> usize {
    value(0, || {
        // SAFETY: the caller guarantees a tensor or NULL.
        let tensor = unsafe { get(tensor, "tensor") }?;
        Ok(tensor.value.tensor().map_or(tensor.strings.len(), ConstData::numel))
    })
}

/// The elements of a tensor of numbers, in row-major order, little-endian. The address is a multiple of 16.
/// The memory belongs to the tensor and must not be written. NULL if `tensor` is NULL or holds text.
///
/// # Safety
/// `tensor` is NULL or a tensor.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn halcyon_tensor_data(tensor: *const HalcyonTensor) -> *const c_void {
    // SAFETY: the caller guarantees a tensor or NULL.
    value(null(), || Ok(unsafe { get(tensor, "tensor") }?.numbers()?.bytes().as_ptr().cast()))
}

/// The size of the elements of a tensor of numbers in bytes; 0 if `tensor` is NULL or holds text.
///
/// # Safety
/// `tensor` is NULL or a tensor.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn halcyon_tensor_bytes(tensor: *const HalcyonTensor) -> usize {
    // SAFETY: the caller guarantees a tensor or NULL.
    value(0, || Ok(unsafe { get(tensor, "tensor") }?.numbers()?.bytes().len()))
}

/// The string at an index in row-major order. It belongs to the tensor and ends with NUL; if `length` is not
/// NULL, `*length` is its length in bytes, because the text may contain NUL. NULL if `tensor` is NULL or
/// holds numbers, or if there is no such string.
///
/// # Safety
/// `tensor` is NULL or a tensor, `length` is NULL or points to a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn halcyon_tensor_string(
    tensor: *const HalcyonTensor,
    index: usize,
    length: *mut usize,
) -> *const c_char {
    value(null(), || {
        // SAFETY: the caller guarantees a tensor or NULL.
        let tensor = unsafe { get(tensor, "tensor") }?;
        if let Some(t) = tensor.value.tensor() {
            let text = format!("`tensor` holds {}; read it with halcyon_tensor_data", t.dtype);
            return Err(Failure { status: HalcyonStatus::Dtype, text });
        }
        let none = || {
            let n = tensor.strings.len();
            Failure::argument(format!("`index` is {index}, and the tensor has {n} strings"))
        };
        let string = tensor.strings.get(index).ok_or_else(none)?;
        if !length.is_null() {
            // SAFETY: the caller guarantees memory for a number.
            unsafe { Out::new(length, "length") }?.set(string.len() - 1);
        }
        Ok(string.as_ptr().cast())
    })
}
