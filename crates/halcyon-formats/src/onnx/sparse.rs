//! Sparse tensors (`SparseTensorProto` of onnx.proto): the non-zero elements and their positions.
//!
//! A few bytes may declare a tensor of any size, so large tensors are not made dense on the host. They become
//! a scatter into zeros in the graph, and the device's allocator decides whether they fit.

use super::build::{Builder, Value};
use super::proto::SparseTensorProto;
use super::tensor::{self, External};
use crate::bad;
use halcyon_ir::ops::ScatterKind;
use halcyon_ir::{ConstData, DType, Result, Scalar, Shape, TensorType};
use std::sync::Arc;

/// A dense tensor is made on the host if it has at most this many bytes plus [`GROWTH`] times the stored
/// bytes.
const ALWAYS_ALLOWED: usize = 64 << 10;
/// See [`ALWAYS_ALLOWED`].
const GROWTH: usize = 4;

/// A sparse tensor in coordinate form.
#[derive(Clone, Debug)]
pub struct Sparse {
    pub name: String,
    pub dims: Vec<usize>,
    /// Row-major offsets of the elements, ascending.
    pub places: Vec<i64>,
    /// The elements at these offsets, as a tensor with one axis.
    pub values: ConstData,
}

/// Decodes a sparse tensor. Indices are row-major offsets (`[n]`) or coordinates (`[n, rank]`), strictly
/// ascending. `file` names the file in errors.
///
/// # Errors
/// [`halcyon_ir::Error::Format`] if the parts are inconsistent or an index is out of range; errors of
/// [`tensor::decode`].
pub fn decode(t: &SparseTensorProto, external: &External, file: &str) -> Result<Sparse> {
    let part = |p: &Option<super::proto::TensorProto>, name: &str| {
        let p = p.as_ref().ok_or_else(|| bad(file, format!("a sparse tensor has no {name}")))?;
        Ok((p.name.clone(), tensor::decode(p, external, file)?))
    };
    let (name, values) = part(&t.values, "values")?;
    let (_, indices) = part(&t.indices, "indices")?;
    let fail = |why: String| bad(file, format!("sparse tensor '{name}': {why}"));
    let dims = tensor::sizes(&t.dims, &format!("{file}: sparse tensor '{name}'"))?;
    TensorType::new(values.dtype, &dims[..]).check("sparse tensor").map_err(|e| fail(e.to_string()))?;
    let [n] = values.dims[..] else {
        return Err(fail(format!("the values have {} axes, not one", values.dims.len())));
    };
    if indices.dtype != DType::I64 {
        return Err(fail(format!("the indices are {}, not i64", indices.dtype)));
    }
    let flat = match indices.dims[..] {
        [m] if m == n => true,
        [m, r] if m == n && r == dims.len() => false,
        _ => {
            let have = indices.dims.as_slice();
            let what =
                format!("the shape of the indices is {have:?}, expected [{n}] or [{n}, {}]", dims.len());
            return Err(fail(what));
        }
    };
    // Cannot overflow: the sizes have been checked.
    let numel: usize = dims.iter().product();
    let index: Vec<i64> = indices.to_vec();
    let mut places = Vec::with_capacity(n);
    for k in 0..n {
        let place = if flat {
            usize::try_from(index[k]).ok().filter(|i| *i < numel)
        } else {
            let at = &index[k * dims.len()..(k + 1) * dims.len()];
            dims.iter()
                .zip(at)
                .try_fold(0usize, |p, (&d, &i)| usize::try_from(i).ok().filter(|i| *i < d).map(|i| p * d + i))
        };
        // Cannot overflow: `TensorType::check` limits the number of elements to far less than 2^63.
        let place = place.ok_or_else(|| fail(format!("index {k} is outside {dims:?}")))? as i64;
        if places.last().is_some_and(|last| *last >= place) {
            return Err(fail(format!("index {k} is not above the index before it")));
        }
        places.push(place);
    }
    Ok(Sparse { name, dims, places, values })
}

/// The name of a sparse weight, which is stored as the name of its values.
pub fn name(t: &SparseTensorProto) -> &str {
    t.values.as_ref().map_or("", |v| v.name.as_str())
}

impl Sparse {
    fn bytes(&self) -> usize {
        self.values.dtype.bytes(self.dims.iter().product())
    }

    /// Whether the dense tensor is small, or not much larger than its stored form.
    pub fn is_small(&self) -> bool {
        let stored = self.values.bytes().len().saturating_add(self.places.len().saturating_mul(8));
        self.bytes() <= stored.saturating_mul(GROWTH).saturating_add(ALWAYS_ALLOWED)
    }

    /// Makes the dense tensor on the host.
    pub fn dense(&self) -> Result<ConstData> {
        let d = self.values.dtype;
        let mut out = vec![0u8; self.bytes()];
        if d.bits() < 8 {
            for (p, v) in self.places.iter().zip(self.values.scalars()) {
                let bit = *p as usize * d.bits() as usize;
                out[bit / 8] |= v.to_bytes(d)[0] << (bit % 8);
            }
            return ConstData::new(d, &self.dims, Arc::new(out));
        }
        for (p, v) in self.places.iter().zip(self.values.bytes().chunks_exact(d.size())) {
            out[*p as usize * d.size()..][..d.size()].copy_from_slice(v);
        }
        ConstData::new(d, &self.dims, Arc::new(out))
    }

    /// Adds the tensor to the graph: a weight if it is small, else a scatter into zeros.
    pub fn value(&self, b: &mut Builder) -> Result<Value> {
        if self.is_small() {
            return Ok(Value::weight(self.dense()?, &self.name));
        }
        let d = self.values.dtype;
        let zero = b.g.full(d, [self.dims.iter().product::<usize>()], Scalar::I(0).cast(d));
        let places = b.g.constant(ConstData::from_slice(&[self.places.len()], &self.places)?);
        let values = b.g.constant(self.values.clone());
        let all = b.g.scatter_elements(zero, places, values, 0, ScatterKind::Set)?;
        let all = b.g.reshape(all, Shape::from(&self.dims[..]))?;
        Ok(b.value(all))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::onnx::test_models::{ints, t};
    use halcyon_ir::{Element, Error};

    fn proto<T: Element>(dims: &[i64], index: ConstData, values: &[T]) -> SparseTensorProto {
        SparseTensorProto {
            values: Some(tensor::encode(&t(&[values.len()], values), "s")),
            indices: Some(tensor::encode(&index, "")),
            dims: dims.to_vec(),
        }
    }

    fn read(p: &SparseTensorProto) -> Result<Sparse> {
        decode(p, &External::none(), "m")
    }

    #[test]
    fn places_and_coordinates_give_the_dense_tensor() {
        let want = [0f32, 7.0, 0.0, 0.0, 0.0, 8.0];
        let flat = read(&proto(&[2, 3], ints(&[1, 5]), &[7f32, 8.0])).unwrap();
        let coordinates = read(&proto(&[2, 3], t(&[2, 2], &[0i64, 1, 1, 2]), &[7f32, 8.0])).unwrap();
        for s in [flat, coordinates] {
            let d = s.dense().unwrap();
            assert_eq!((&d.dims[..], d.to_vec::<f32>()), (&[2, 3][..], want.to_vec()));
        }
        let empty = read(&proto::<i64>(&[2, 0], t(&[0, 2], &[] as &[i64]), &[])).unwrap();
        assert_eq!(empty.dense().unwrap().numel(), 0);
        let scalar = read(&proto(&[], t(&[1, 0], &[] as &[i64]), &[5i64])).unwrap();
        assert_eq!(scalar.dense().unwrap().to_vec::<i64>(), [5]);
    }

    #[test]
    fn a_large_one_is_a_scatter() {
        let s = read(&proto(&[300, 1000], ints(&[4, 299_999]), &[7f32, 8.0])).unwrap();
        assert!(!s.is_small());
        let mut b = Builder::default();
        let v = s.value(&mut b).unwrap();
        let id = b.id(&v).unwrap();
        b.g.output("y", id);
        let y = halcyon_ir::reference::eval(&b.g, &[], &[]).unwrap().remove(0);
        assert_eq!(y, s.dense().unwrap());
        // The dense tensor is never allocated.
        let s = read(&proto(&[1 << 40], ints(&[4]), &[7f32])).unwrap();
        assert!(s.value(&mut b).is_ok());
    }

    #[test]
    fn inconsistent_sparse_tensors_are_errors() {
        let i32s = |v: &[i32]| t(&[v.len()], v);
        for (p, part) in [
            (proto(&[2, 3], ints(&[1, 6]), &[7f32, 8.0]), "outside"),
            (proto(&[2, 3], ints(&[-1, 5]), &[7f32, 8.0]), "outside"),
            (proto(&[2, 3], t(&[1, 2], &[0i64, 3]), &[7f32]), "outside"),
            (proto(&[2, 3], t(&[1, 2], &[i64::MAX, 1]), &[7f32]), "outside"),
            (proto(&[2, 0], ints(&[0]), &[7f32]), "outside"),
            (proto(&[2, 3], ints(&[5, 1]), &[7f32, 8.0]), "is not above"),
            (proto(&[2, 3], ints(&[5, 5]), &[7f32, 8.0]), "is not above"),
            (proto(&[2, 3], ints(&[1]), &[7f32, 8.0]), "indices is [1], expected [2]"),
            (proto(&[2, 3], t(&[2, 1], &[0i64, 1]), &[7f32, 8.0]), "indices is [2, 1], expected"),
            (proto(&[2, 3], i32s(&[1, 2]), &[7f32, 8.0]), "not i64"),
            (proto(&[-2, 3], ints(&[1, 2]), &[7f32, 8.0]), "negative"),
            (proto(&[i64::MAX, i64::MAX], ints(&[1, 2]), &[7f32, 8.0]), "too large"),
            (proto(&[0, i64::MAX, i64::MAX], ints(&[]), &[] as &[f32]), "too large"),
            (SparseTensorProto::default(), "no values"),
        ] {
            let e = read(&p).unwrap_err();
            assert!(matches!(e, Error::Format { .. }) && e.to_string().contains(part), "{part}: {e}");
        }
        let mut two = proto(&[2, 3], ints(&[1, 2]), &[7f32, 8.0]);
        two.values.as_mut().unwrap().dims = vec![1, 2];
        assert!(read(&two).unwrap_err().to_string().contains("2 axes"));
    }
}
