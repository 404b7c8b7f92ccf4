//! Tensor data held by a graph or a file.

use crate::dtype::{DType, Element, Scalar};
use crate::error::{Error, Result};
use crate::shape::Dims;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

/// Owner of bytes: a vector, a mapped file, a slice of one.
pub trait Bytes: Send + Sync {
    fn bytes(&self) -> &[u8];
}
impl<T: AsRef<[u8]> + Send + Sync> Bytes for T {
    fn bytes(&self) -> &[u8] {
        self.as_ref()
    }
}

/// Dense row-major little-endian tensor data. Cloning shares the bytes. Two values are equal when they share them, or when
/// type, shape and bytes are equal.
#[derive(Clone, Serialize, Deserialize)]
pub struct ConstData {
    pub dtype: DType,
    pub dims: Dims,
    /// Place among the blobs of a serialised graph.
    pub(crate) blob: u32,
    #[serde(skip, default = "empty")]
    data: Arc<dyn Bytes>,
}

fn empty() -> Arc<dyn Bytes> {
    Arc::new(Vec::<u8>::new())
}

impl ConstData {
    /// `data` must hold exactly the bytes of a dense tensor.
    pub fn new(dtype: DType, dims: &[usize], data: Arc<dyn Bytes>) -> Result<ConstData> {
        let n = dims
            .iter()
            .try_fold(1usize, |a, d| a.checked_mul(*d))
            .filter(|n| n.checked_mul(dtype.bits() as usize).is_some())
            .ok_or_else(|| Error::shape("data", format!("{dims:?} is larger than memory")))?;
        if data.bytes().len() != dtype.bytes(n) {
            return Err(Error::shape(
                "data",
                format!(
                    "{} bytes do not fill {dtype}{dims:?}, which takes {}",
                    data.bytes().len(),
                    dtype.bytes(n)
                ),
            ));
        }
        Ok(ConstData { dtype, dims: dims.into(), blob: 0, data })
    }

    pub fn from_slice<T: Element>(dims: &[usize], values: &[T]) -> Result<ConstData> {
        let mut b = Vec::with_capacity(values.len() * T::DTYPE.size());
        for v in values {
            b.extend_from_slice(&v.to_scalar().to_bytes(T::DTYPE)[..T::DTYPE.size()]);
        }
        ConstData::new(T::DTYPE, dims, Arc::new(b))
    }

    /// A tensor that holds `v` (cast to `dtype`) everywhere.
    pub fn splat(dtype: DType, dims: &[usize], v: Scalar) -> Result<ConstData> {
        let n: usize = dims.iter().product();
        let b = v.to_bytes(dtype);
        ConstData::new(dtype, dims, Arc::new(b[..dtype.size()].repeat(n)))
    }

    pub fn bytes(&self) -> &[u8] {
        self.data.bytes()
    }

    /// The shared owner of the bytes.
    pub fn owner(&self) -> Arc<dyn Bytes> {
        self.data.clone()
    }

    pub(crate) fn attach(&mut self, data: Arc<dyn Bytes>) -> Result<()> {
        *self = ConstData { blob: self.blob, ..ConstData::new(self.dtype, &self.dims, data)? };
        Ok(())
    }

    pub fn numel(&self) -> usize {
        self.dims.iter().product()
    }

    /// Element `i` in row-major order; `None` past the end.
    pub fn get(&self, i: usize) -> Option<Scalar> {
        let n = self.dtype.size();
        self.bytes().get(i * n..(i + 1) * n).map(|b| Scalar::from_bytes(self.dtype, b))
    }

    pub fn scalars(&self) -> impl Iterator<Item = Scalar> + '_ {
        self.bytes().chunks_exact(self.dtype.size()).map(|b| Scalar::from_bytes(self.dtype, b))
    }

    /// All elements converted to `T` by the rules of [`Scalar::cast`].
    pub fn to_vec<T: Element>(&self) -> Vec<T> {
        self.scalars().map(|s| T::from_scalar(s.cast(T::DTYPE))).collect()
    }

    /// Identity of the shared bytes, for caches.
    pub fn key(&self) -> (usize, usize) {
        (self.bytes().as_ptr() as usize, self.bytes().len())
    }
}

impl PartialEq for ConstData {
    fn eq(&self, o: &Self) -> bool {
        self.dtype == o.dtype && self.dims == o.dims && (self.key() == o.key() || self.bytes() == o.bytes())
    }
}
impl Eq for ConstData {}
impl Hash for ConstData {
    fn hash<H: Hasher>(&self, h: &mut H) {
        // Equal data hash alike; weights are told apart by their first bytes, not by reading gigabytes.
        (self.dtype, &self.dims, &self.bytes()[..self.bytes().len().min(64)]).hash(h)
    }
}
impl fmt::Debug for ConstData {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{:?}", self.dtype, self.dims.as_slice())?;
        if self.numel() <= 8 {
            write!(f, " {:?}", self.scalars().map(|s| s.as_f64()).collect::<Vec<_>>())?;
        }
        Ok(())
    }
}
