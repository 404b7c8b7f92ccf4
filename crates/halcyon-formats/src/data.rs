//! Constructors of [`ConstData`], the host tensor that every format of this crate produces.

use bytes::Bytes;
use halcyon_ir::{ConstData, DType, Error, Result, Scalar};
use std::sync::Arc;

/// Size in bytes of a dense tensor. `None` if its number of bits does not fit a `usize`, or its size exceeds
/// the largest possible allocation. In this check a dimension of 0 counts as 1: the strides are products of
/// the other dimensions and must not overflow either.
pub fn byte_len(dtype: DType, dims: &[usize]) -> Option<usize> {
    let bound = dims.iter().try_fold(1usize, |n, &d| n.checked_mul(d.max(1)))?;
    let bits = bound.checked_mul(dtype.bits() as usize)?;
    if bits.div_ceil(8) > isize::MAX as usize {
        return None;
    }
    Some(if dims.contains(&0) { 0 } else { bits.div_ceil(8) })
}

/// Wraps row-major little-endian bytes as a tensor without copying them.
///
/// # Errors
/// [`Error::Shape`] if the length of `bytes` differs from the size of `dtype` and `dims`, or if that size is
/// too large to address.
pub fn from_bytes(dtype: DType, dims: &[usize], bytes: Bytes) -> Result<ConstData> {
    if byte_len(dtype, dims).is_none() {
        return Err(too_large(dtype, dims));
    }
    ConstData::new(dtype, dims, Arc::new(bytes))
}

fn too_large(dtype: DType, dims: &[usize]) -> Error {
    Error::shape("data", format!("{dtype}{dims:?} is too large to address"))
}

/// Builds a tensor, casting each value to `dtype`. Same errors as [`from_bytes`].
pub fn from_scalars(
    dtype: DType,
    dims: &[usize],
    values: impl IntoIterator<Item = Scalar>,
) -> Result<ConstData> {
    if byte_len(dtype, dims).is_none() {
        return Err(too_large(dtype, dims));
    }
    ConstData::from_scalars(dtype, dims, values)
}

/// Casts every element with [`Scalar::cast`]. Returns a clone if the dtype is already `dtype`.
pub fn cast(t: &ConstData, dtype: DType) -> Result<ConstData> {
    if dtype == t.dtype { Ok(t.clone()) } else { from_scalars(dtype, &t.dims, t.scalars()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn length_must_match_and_sizes_must_fit() {
        assert!(from_bytes(DType::F32, &[2, 3], Bytes::from(vec![0; 24])).is_ok());
        assert!(from_bytes(DType::F32, &[2, 3], Bytes::from(vec![0; 23])).is_err());
        assert!(from_bytes(DType::U8, &[0, 1 << 40, 1 << 40], Bytes::new()).is_err());
        assert_eq!(byte_len(DType::F32, &[]), Some(4));
        assert_eq!(byte_len(DType::F32, &[0, 7]), Some(0));
        assert_eq!(byte_len(DType::F32, &[usize::MAX, 2]), None);
        assert_eq!(byte_len(DType::F64, &[1 << 61]), None);
        // Strides that overflow are an error, even if another dimension is 0.
        assert_eq!(byte_len(DType::U8, &[0, 1 << 40, 1 << 40]), None);
    }

    #[test]
    fn casts() {
        let t = ConstData::from_slice(&[2, 2], &[1.5f32, -2.0, 3.0, 400.0]).unwrap();
        assert_eq!(cast(&t, DType::I8).unwrap().to_vec::<i8>(), [1, -2, 3, 127]);
        assert_eq!(cast(&t, DType::F32).unwrap().key(), t.key());
    }
}
