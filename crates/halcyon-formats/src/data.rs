//! A tensor on the host: element type, sizes and bytes.

use bytes::Bytes;
use halcyon_ir::dtype::Element;
use halcyon_ir::{DType, Error, Result, Scalar};

/// A dense tensor in row-major order, little endian. The bytes are shared, often a slice of a mapped file, and need not
/// be aligned to the element type.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorData {
    pub dtype: DType,
    pub dims: Vec<usize>,
    pub bytes: Bytes,
}

/// Bytes that a dense tensor takes, or `None` if that (with every size of zero taken as one, so that strides fit as
/// well) is more than an allocation can hold.
pub fn byte_len(dtype: DType, dims: &[usize]) -> Option<usize> {
    let bound = dims.iter().try_fold(1usize, |n, &d| n.checked_mul(d.max(1)))?;
    let bits = bound.checked_mul(dtype.bits() as usize)?;
    if bits.div_ceil(8) > isize::MAX as usize {
        return None;
    }
    Some(if dims.contains(&0) { 0 } else { bits.div_ceil(8) })
}

impl TensorData {
    /// # Errors
    /// [`Error::Shape`] if `bytes` is not exactly what `dtype` and `dims` take.
    pub fn new(dtype: DType, dims: Vec<usize>, bytes: Bytes) -> Result<TensorData> {
        match byte_len(dtype, &dims) {
            Some(n) if n == bytes.len() => Ok(TensorData { dtype, dims, bytes }),
            Some(n) => Err(Error::shape(
                "tensor data",
                format!("{dtype}{dims:?} takes {n} bytes, {} given", bytes.len()),
            )),
            None => Err(Error::shape(
                "tensor data",
                format!("{dtype}{dims:?} is too large to address"),
            )),
        }
    }

    /// Copies `values` in. Errors as [`TensorData::new`].
    pub fn from_slice<T: Element>(dims: &[usize], values: &[T]) -> Result<TensorData> {
        let scalars = values.iter().map(|v| v.to_scalar());
        TensorData::from_scalars(T::DTYPE, dims, scalars)
    }

    /// Casts each value to `dtype`. Errors as [`TensorData::new`].
    pub fn from_scalars(
        dtype: DType,
        dims: &[usize],
        values: impl IntoIterator<Item = Scalar>,
    ) -> Result<TensorData> {
        let size = dtype.size();
        let mut bytes = Vec::new();
        for v in values {
            bytes.extend_from_slice(&v.to_bytes(dtype)[..size]);
        }
        TensorData::new(dtype, dims.to_vec(), bytes.into())
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.bytes.len() / self.dtype.size()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Element `i` in row-major order, or `None` past the end.
    pub fn get(&self, i: usize) -> Option<Scalar> {
        let size = self.dtype.size();
        let at = i.checked_mul(size)?;
        self.bytes
            .get(at..at.checked_add(size)?)
            .map(|b| Scalar::from_bytes(self.dtype, b))
    }

    /// The elements in row-major order.
    pub fn scalars(&self) -> impl ExactSizeIterator<Item = Scalar> + '_ {
        self.bytes
            .chunks_exact(self.dtype.size())
            .map(|b| Scalar::from_bytes(self.dtype, b))
    }

    /// Copies the elements out.
    ///
    /// # Errors
    /// [`Error::DType`] unless the tensor holds exactly `T`.
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>> {
        if self.dtype != T::DTYPE {
            return Err(Error::DType {
                op: "to_vec".into(),
                dtype: self.dtype,
                want: format!("{} was asked for", T::DTYPE),
                at: Default::default(),
            });
        }
        Ok(self.scalars().map(T::from_scalar).collect())
    }

    /// A copy with every element cast by [`Scalar::cast`].
    pub fn cast(&self, dtype: DType) -> TensorData {
        if dtype == self.dtype {
            return self.clone();
        }
        let size = dtype.size();
        let mut bytes = Vec::with_capacity(self.len() * size);
        for v in self.scalars() {
            bytes.extend_from_slice(&v.to_bytes(dtype)[..size]);
        }
        TensorData {
            dtype,
            dims: self.dims.clone(),
            bytes: bytes.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn length_must_match_and_sizes_must_fit() {
        assert!(TensorData::new(DType::F32, vec![2, 3], Bytes::from(vec![0; 24])).is_ok());
        assert!(TensorData::new(DType::F32, vec![2, 3], Bytes::from(vec![0; 23])).is_err());
        assert_eq!(byte_len(DType::F32, &[]), Some(4));
        assert_eq!(byte_len(DType::F32, &[0, 7]), Some(0));
        assert_eq!(byte_len(DType::F32, &[usize::MAX, 2]), None);
        assert_eq!(byte_len(DType::F64, &[1 << 61]), None);
        // A zero must not hide sizes whose strides overflow.
        assert_eq!(byte_len(DType::U8, &[0, 1 << 40, 1 << 40]), None);
    }

    #[test]
    fn values_round_trip_and_cast() {
        let t = TensorData::from_slice(&[2, 2], &[1.5f32, -2.0, 3.0, 400.0]).unwrap();
        assert_eq!(t.to_vec::<f32>().unwrap(), [1.5, -2.0, 3.0, 400.0]);
        assert!(matches!(t.to_vec::<i32>(), Err(Error::DType { .. })));
        assert_eq!(t.cast(DType::I8).to_vec::<i8>().unwrap(), [1, -2, 3, 127]);
        assert_eq!(t.get(3), Some(Scalar::F(400.0)));
        assert_eq!(t.get(4), None);
    }
}
