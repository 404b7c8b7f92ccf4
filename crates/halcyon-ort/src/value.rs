//! Values in ONNX Runtime's memory.

use crate::{NAME, failed};
use halcyon_formats::onnx::{Datum, Keys, Text};
use halcyon_ir::{ConstData, DType, Error, Result};
use ort::memory::Allocator;
use ort::value::{
    DynTensor, DynTensorValueType, DynValue, DynValueTypeMarker, Map, Sequence, Tensor, TensorElementType,
    ValueType,
};
use std::sync::Arc;

/// Element types of both sides. Their elements have the same bytes.
const TYPES: [(DType, TensorElementType); 23] = [
    (DType::Bool, TensorElementType::Bool),
    (DType::U2, TensorElementType::Uint2),
    (DType::U4, TensorElementType::Uint4),
    (DType::U8, TensorElementType::Uint8),
    (DType::U16, TensorElementType::Uint16),
    (DType::U32, TensorElementType::Uint32),
    (DType::U64, TensorElementType::Uint64),
    (DType::I2, TensorElementType::Int2),
    (DType::I4, TensorElementType::Int4),
    (DType::I8, TensorElementType::Int8),
    (DType::I16, TensorElementType::Int16),
    (DType::I32, TensorElementType::Int32),
    (DType::I64, TensorElementType::Int64),
    (DType::F4E2M1, TensorElementType::Float4E2M1),
    (DType::F8E4M3FN, TensorElementType::Float8E4M3FN),
    (DType::F8E4M3FNUZ, TensorElementType::Float8E4M3FNUZ),
    (DType::F8E5M2, TensorElementType::Float8E5M2),
    (DType::F8E5M2FNUZ, TensorElementType::Float8E5M2FNUZ),
    (DType::F8E8M0, TensorElementType::Float8E8M0),
    (DType::F16, TensorElementType::Float16),
    (DType::BF16, TensorElementType::Bfloat16),
    (DType::F32, TensorElementType::Float32),
    (DType::F64, TensorElementType::Float64),
];

fn dtype(t: TensorElementType) -> Option<DType> {
    TYPES.iter().find(|(_, o)| *o == t).map(|(d, _)| *d)
}

/// Whether outputs of a type can be read.
pub(crate) enum OutputType {
    Readable,
    Unreadable(String),
}

/// `ort` panics when it reads an optional without a value, and cannot say before whether there is one.
pub(crate) fn output_type(t: &ValueType) -> OutputType {
    match t {
        ValueType::Optional(_) => {
            OutputType::Unreadable("an optional, which the crate ort cannot read".into())
        }
        ValueType::Tensor { ty, .. } if *ty != TensorElementType::String && dtype(*ty).is_none() => {
            OutputType::Unreadable(format!("a tensor of {ty}, a type that Halcyon does not have"))
        }
        _ => OutputType::Readable,
    }
}

fn unsupported(name: &str, what: &str) -> Error {
    Error::unsupported(format!("'{name}', {what}, in {NAME}"), "Run this model with Halcyon alone")
}

/// Copies a value to ONNX Runtime's memory.
pub(crate) fn to_ort(name: &str, d: &Datum) -> Result<DynValue> {
    let wrap = |e: ort::Error| failed(&format!("the input '{name}'"), &e);
    match d {
        Datum::Tensor(t) => tensor(name, t).map(DynTensor::into_dyn),
        Datum::Text(t) => {
            Ok(Tensor::from_string_array((t.dims.clone(), t.vals.as_slice())).map_err(wrap)?.into_dyn())
        }
        Datum::Sequence(all) if all.is_empty() => Err(unsupported(name, "a sequence without elements")),
        Datum::Sequence(all) => {
            let all = all.iter().map(|d| to_ort(name, d)).collect::<Result<Vec<DynValue>>>()?;
            Ok(Sequence::new(all).map_err(wrap)?.into_dyn())
        }
        Datum::Optional(Some(d)) => to_ort(name, d),
        Datum::Optional(None) => Err(unsupported(name, "an optional without a value")),
        Datum::Map(keys, values) => map(name, keys, values),
    }
}

fn tensor(name: &str, t: &ConstData) -> Result<DynTensor> {
    let element = TYPES.iter().find(|(d, _)| *d == t.dtype).map(|(_, e)| *e);
    let element = element.ok_or_else(|| unsupported(name, &format!("a tensor of {}", t.dtype)))?;
    let made = DynTensor::new(&Allocator::default(), element, t.dims.to_vec());
    let mut x = made.map_err(|e| failed(&format!("a tensor for '{name}'"), &e))?;
    let bytes = t.bytes();
    if bytes.is_empty() {
        return Ok(x);
    }
    let to = x.data_ptr_mut().cast::<u8>();
    if to.is_null() {
        return Err(Error::internal(format!("{NAME} gave no memory for '{name}'")));
    }
    // SAFETY: the tensor was made above in host memory for this element type and these sizes, so `to` has the
    // bytes of a dense tensor, as `bytes` has (`ConstData::new` checks it). Both are different allocations,
    // and nothing else refers to the new one. Every pattern of bits is a valid number, except for booleans,
    // which are brought to 0 and 1 below.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
    if t.dtype == DType::Bool {
        for (i, b) in bytes.iter().enumerate() {
            // SAFETY: `i` is below the number of bytes that were copied, and `to` is valid for them.
            unsafe { *to.add(i) = u8::from(*b != 0) };
        }
    }
    Ok(x)
}

fn map(name: &str, keys: &Keys, values: &Datum) -> Result<DynValue> {
    let wrap = |e: ort::Error| failed(&format!("the input '{name}'"), &e);
    let Datum::Tensor(t) = values else { return Err(unsupported(name, "a map to strings")) };
    macro_rules! with {
        ($t:ty) => {{
            let values = t.to_vec::<$t>();
            match keys {
                Keys::Ints(k) => Map::<i64, $t>::new(k.iter().copied().zip(values)).map_err(wrap)?.into_dyn(),
                Keys::Texts(k) => {
                    Map::<String, $t>::new(k.iter().cloned().zip(values)).map_err(wrap)?.into_dyn()
                }
            }
        }};
    }
    Ok(match t.dtype {
        DType::F32 => with!(f32),
        DType::F64 => with!(f64),
        DType::I64 => with!(i64),
        d => return Err(unsupported(name, &format!("a map to {d}"))),
    })
}

/// Copies a value from ONNX Runtime's memory.
pub(crate) fn from_ort(name: &str, v: DynValue) -> Result<Datum> {
    let wrap = |e: ort::Error| failed(&format!("the output '{name}'"), &e);
    match v.dtype().clone() {
        // A sparse tensor has the type of a tensor, but is none.
        ValueType::Tensor { .. } if !v.is_tensor() => Err(unsupported(name, "a sparse tensor")),
        ValueType::Tensor { ty: TensorElementType::String, .. } => {
            let (shape, vals) = v.try_extract_strings().map_err(wrap)?;
            Ok(Datum::Text(Text::new(&sizes(name, shape)?, vals)?))
        }
        ValueType::Tensor { ty, shape, .. } => {
            let dtype = dtype(ty).ok_or_else(|| unsupported(name, &format!("a tensor of {ty}")))?;
            let dims = sizes(name, &shape)?;
            let bytes = halcyon_formats::data::byte_len(dtype, &dims)
                .ok_or_else(|| unsupported(name, "a tensor that is larger than the address space"))?;
            let t = v.downcast::<DynTensorValueType>().map_err(wrap)?;
            Ok(Datum::Tensor(ConstData::new(dtype, &dims, Arc::new(bytes_of(name, &t, bytes)?))?))
        }
        ValueType::Sequence(_) => {
            let all = v.try_extract_sequence::<DynValueTypeMarker>().map_err(wrap)?;
            Ok(Datum::Sequence(all.into_iter().map(|v| from_ort(name, v)).collect::<Result<_>>()?))
        }
        ValueType::Map { key, value } => from_map(name, &v, key, value),
        ValueType::Optional(_) => Err(unsupported(name, "an optional")),
    }
}

fn sizes(name: &str, dims: &[i64]) -> Result<Vec<usize>> {
    let one = |d: &i64| usize::try_from(*d);
    let all = dims.iter().map(one).collect::<std::result::Result<Vec<_>, _>>();
    all.map_err(|_| unsupported(name, &format!("a tensor of the shape {dims:?}")))
}

/// Copies the first `bytes` bytes of a tensor, which must be those of its elements.
fn bytes_of(name: &str, t: &DynTensor, bytes: usize) -> Result<Vec<u8>> {
    if !t.memory_info().is_cpu_accessible() {
        return Err(unsupported(name, "a tensor that stayed on its device"));
    }
    let mut out = halcyon_host::reserve(bytes, "an output of ONNX Runtime")?;
    if bytes == 0 {
        return Ok(out);
    }
    let from = t.data_ptr().cast::<u8>();
    if from.is_null() {
        return Err(Error::internal(format!("{NAME} gave no memory of '{name}'")));
    }
    // SAFETY: ONNX Runtime allocates at least `bytes` bytes for the tensor, because the caller computed them
    // from its element type and sizes. A run has written all of them. `t` keeps the memory while the slice
    // exists, and nothing writes to it.
    out.extend_from_slice(unsafe { std::slice::from_raw_parts(from, bytes) });
    Ok(out)
}

fn from_map(name: &str, v: &DynValue, key: TensorElementType, value: TensorElementType) -> Result<Datum> {
    let wrap = |e: ort::Error| failed(&format!("the output '{name}'"), &e);
    macro_rules! with {
        ($key:ty, $keys:path, $value:ty) => {{
            let all = v.try_extract_key_values::<$key, $value>().map_err(wrap)?;
            let (keys, values): (Vec<$key>, Vec<$value>) = all.into_iter().unzip();
            Ok(Datum::Map($keys(keys), Box::new(ConstData::from_slice(&[values.len()], &values)?.into())))
        }};
    }
    use TensorElementType::{Float32, Float64, Int64, String as Text};
    match (key, value) {
        (Int64, Float32) => with!(i64, Keys::Ints, f32),
        (Int64, Float64) => with!(i64, Keys::Ints, f64),
        (Int64, Int64) => with!(i64, Keys::Ints, i64),
        (Text, Float32) => with!(String, Keys::Texts, f32),
        (Text, Float64) => with!(String, Keys::Texts, f64),
        (Text, Int64) => with!(String, Keys::Texts, i64),
        _ => Err(unsupported(name, &format!("a map from {key} to {value}"))),
    }
}
