//! Tensor data held by a graph or a file.

use crate::dtype::{DType, Element, Scalar};
use crate::error::{Error, Result};
use crate::shape::Dims;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

/// Owner of bytes: a vector, a mapped file, or a slice of such a file.
pub trait Bytes: Send + Sync {
    fn bytes(&self) -> &[u8];
}
impl<T: AsRef<[u8]> + Send + Sync> Bytes for T {
    fn bytes(&self) -> &[u8] {
        self.as_ref()
    }
}

/// Dense row-major little-endian tensor data. Elements of fewer than 8 bits are packed with the first element
/// in the low bits of a byte, as in ONNX raw data; unused bits of the last byte are ignored. Cloning shares
/// the bytes. Two values are equal if their dtypes, shapes and bytes are equal.
#[derive(Clone, Serialize, Deserialize)]
pub struct ConstData {
    pub dtype: DType,
    pub dims: Dims,
    /// Index among the blobs of a serialised graph.
    pub(crate) blob: u32,
    #[serde(skip, default = "empty")]
    data: Arc<dyn Bytes>,
}

fn empty() -> Arc<dyn Bytes> {
    Arc::new(Vec::<u8>::new())
}

/// Element `i`. `bytes` must contain it.
fn element(dtype: DType, bytes: &[u8], i: usize) -> Scalar {
    match dtype.bits() as usize {
        bits if bits < 8 => Scalar::from_bytes(dtype, &[bytes[i * bits / 8] >> (i * bits % 8)]),
        bits => Scalar::from_bytes(dtype, &bytes[i * (bits / 8)..]),
    }
}

impl ConstData {
    /// `data` must have exactly the size of the dense tensor; otherwise `Error::Shape`.
    pub fn new(dtype: DType, dims: &[usize], data: Arc<dyn Bytes>) -> Result<ConstData> {
        let n = dims
            .iter()
            .try_fold(1usize, |a, d| a.checked_mul(*d))
            .filter(|n| n.checked_mul(dtype.bits() as usize).is_some())
            .ok_or_else(|| {
                Error::shape(
                    "data",
                    format!("a tensor of the shape {dims:?} is larger than the address space"),
                )
            })?;
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

    /// Copies `values` into a tensor of the element type's dtype.
    pub fn from_slice<T: Element>(dims: &[usize], values: &[T]) -> Result<ConstData> {
        ConstData::new(T::DTYPE, dims, Arc::new(T::write_all(values)))
    }

    /// Casts each value to `dtype` by the rules of [`Scalar::cast`]. Unused bits of the last byte are zero.
    pub fn from_scalars(
        dtype: DType,
        dims: &[usize],
        values: impl IntoIterator<Item = Scalar>,
    ) -> Result<ConstData> {
        let values = values.into_iter();
        let (bits, size) = (dtype.bits() as usize, dtype.size());
        let mut b = Vec::with_capacity(dtype.bytes(values.size_hint().0));
        if bits >= 8 {
            values.for_each(|v| b.extend_from_slice(&v.to_bytes(dtype)[..size]));
            return ConstData::new(dtype, dims, Arc::new(b));
        }
        let mut at = 0;
        for v in values {
            let low = v.to_bytes(dtype)[0];
            match b.last_mut().filter(|_| at > 0) {
                Some(last) => *last |= low << at,
                None => b.push(low),
            }
            at = (at + bits) % 8;
        }
        ConstData::new(dtype, dims, Arc::new(b))
    }

    /// A tensor filled with `v` cast to `dtype`.
    pub fn splat(dtype: DType, dims: &[usize], v: Scalar) -> Result<ConstData> {
        let n: usize = dims.iter().product();
        if dtype.bits() < 8 {
            return ConstData::from_scalars(dtype, dims, std::iter::repeat_n(v, n));
        }
        let b = v.to_bytes(dtype);
        ConstData::new(dtype, dims, Arc::new(b[..dtype.size()].repeat(n)))
    }

    /// The bytes of the tensor.
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

    /// Number of elements whose bytes are present. It is 0 while the blobs of a deserialised graph are not
    /// attached; otherwise it counts all elements.
    fn held(&self) -> usize {
        let n = self.numel();
        if self.bytes().len() < self.dtype.bytes(n) { 0 } else { n }
    }

    /// Element `i` in row-major order; `None` if out of range.
    pub fn get(&self, i: usize) -> Option<Scalar> {
        (i < self.held()).then(|| element(self.dtype, self.bytes(), i))
    }

    /// The elements in row-major order.
    pub fn scalars(&self) -> impl Iterator<Item = Scalar> + '_ {
        let (dtype, bytes) = (self.dtype, self.bytes());
        (0..self.held()).map(move |i| element(dtype, bytes, i))
    }

    /// All elements converted to `T` by the rules of [`Scalar::cast`].
    pub fn to_vec<T: Element>(&self) -> Vec<T> {
        if self.dtype == T::DTYPE {
            return T::read_all(&self.bytes()[..self.dtype.bytes(self.held())]);
        }
        self.scalars().map(|s| T::from_scalar(s.cast(T::DTYPE))).collect()
    }

    /// Address and length of the shared bytes, as a key for caches.
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
        // Hashes at most the first 64 bytes, to avoid reading gigabytes of weights. Equal data still has
        // equal hashes.
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

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};

    /// Bytes that begin at an odd address if the vector begins at an even one.
    struct Odd(Vec<u8>);
    impl AsRef<[u8]> for Odd {
        fn as_ref(&self) -> &[u8] {
            &self.0[1..]
        }
    }

    #[test]
    fn elements_of_the_same_type_keep_their_values() {
        fn check<T: Element + PartialEq + fmt::Debug>(of: [f64; 4]) {
            let c = ConstData::from_scalars(T::DTYPE, &[2, 2], of.map(Scalar::F)).unwrap();
            let odd = Odd([&[7], c.bytes()].concat());
            let c = ConstData::new(T::DTYPE, &[2, 2], Arc::new(odd)).unwrap();
            let each: Vec<T> = c.scalars().map(T::from_scalar).collect();
            let written = ConstData::from_slice(&[2, 2], &each).unwrap();
            assert_eq!((written.bytes(), written.dtype), (c.bytes(), T::DTYPE));
            assert_eq!((c.to_vec::<T>(), each.len()), (each, 4), "{}", T::DTYPE);
        }
        check::<bool>([0.0, 1.0, 1.0, 0.0]);
        check::<u8>([0.0, 1.0, 200.0, 255.0]);
        check::<u16>([0.0, 1.0, 300.0, 65535.0]);
        check::<u32>([0.0, 1.0, 70000.0, 4294967295.0]);
        check::<i8>([0.0, -1.0, 100.0, -128.0]);
        check::<i16>([0.0, -1.0, 300.0, -32768.0]);
        check::<i32>([0.0, -1.0, 70000.0, -2147483648.0]);
        check::<f16>([-0.0, 0.5, -65504.0, f64::INFINITY]);
        check::<bf16>([-0.0, 0.5, 1e38, f64::NEG_INFINITY]);
        check::<f32>([-0.0, 0.1, 1e-45, f64::INFINITY]);
        check::<f64>([-0.0, 0.1, 5e-324, f64::INFINITY]);
        // Integers that f64 does not hold.
        let (u, i) = ([u64::MAX, 1 << 53 | 1], [i64::MIN + 1, i64::MAX]);
        assert_eq!(ConstData::from_slice(&[2], &u).unwrap().to_vec::<u64>(), u);
        assert_eq!(ConstData::from_slice(&[2], &i).unwrap().to_vec::<i64>(), i);
        // Every byte other than 0 is true.
        let bools = ConstData::new(DType::Bool, &[3], Arc::new(vec![0, 1, 2])).unwrap();
        assert_eq!(bools.to_vec::<bool>(), [false, true, true]);
    }

    #[test]
    fn packed_elements() {
        let v = [-8i64, 7, -1, 0, 3];
        let c = ConstData::from_scalars(DType::I4, &[5], v.map(Scalar::I)).unwrap();
        assert_eq!(c.bytes(), [0x78, 0x0f, 0x03]);
        assert_eq!(c.to_vec::<i64>(), v);
        assert_eq!((c.get(4), c.get(5)), (Some(Scalar::I(3)), None));
        // The unused bits of the last byte are ignored.
        let c = ConstData::new(DType::I4, &[5], Arc::new(vec![0x78, 0x0f, 0xe3])).unwrap();
        assert_eq!(c.to_vec::<i64>(), v);
        let c = ConstData::from_scalars(DType::U2, &[2, 3], [1u64, 2, 3, 0, 1, 3].map(Scalar::U)).unwrap();
        assert_eq!(c.bytes(), [0b00111001, 0b1101]);
        assert_eq!(c.to_vec::<u8>(), [1, 2, 3, 0, 1, 3]);
        let c = ConstData::splat(DType::I2, &[3], Scalar::I(-1)).unwrap();
        assert_eq!(c.bytes(), [0b111111]);
        let c = ConstData::splat(DType::F4E2M1, &[3], Scalar::F(-6.0)).unwrap();
        assert_eq!((c.bytes(), c.to_vec::<f32>()), (&[0xff, 0x0f][..], vec![-6.0; 3]));
        let c = ConstData::splat(DType::F8E4M3FN, &[2], Scalar::F(448.0)).unwrap();
        assert_eq!((c.bytes(), c.get(1)), (&[0x7e, 0x7e][..], Some(Scalar::F(448.0))));
        assert!(ConstData::from_scalars(DType::U4, &[0, 3], []).unwrap().bytes().is_empty());
        assert!(ConstData::new(DType::U4, &[5], Arc::new(vec![0; 2])).is_err());
        assert!(ConstData::new(DType::U2, &[5], Arc::new(vec![0; 3])).is_err());
    }
}
