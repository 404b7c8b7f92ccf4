//! Datasets in which one column is replaced by a column that is computed from it, batch by batch.

use crate::dataset::{Column, Dataset, check_value, find, single};
use halcyon_ir::{ConstData, DType, Error, Result};
use std::fmt;
use std::sync::Arc;

type Function = dyn Fn(ConstData) -> Result<ConstData> + Send + Sync;

/// A dataset with one column replaced: see [`DatasetExt::map`](crate::DatasetExt::map).
#[derive(Clone)]
pub struct Mapped {
    inner: Arc<dyn Dataset>,
    columns: Vec<Column>,
    at: usize,
    f: Arc<Function>,
}

impl fmt::Debug for Mapped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Mapped({:?}, column {})", self as &dyn Dataset, self.at)
    }
}

impl Mapped {
    pub(crate) fn new<F>(inner: Arc<dyn Dataset>, column: &str, to: Column, f: F) -> Result<Mapped>
    where
        F: Fn(ConstData) -> Result<ConstData> + Send + Sync + 'static,
    {
        let at = find(inner.columns(), column)?;
        let mut columns = inner.columns().to_vec();
        if columns.iter().enumerate().any(|(k, c)| k != at && c.name == to.name) {
            return Err(Error::argument("map", format!("there is another column '{}'", to.name)));
        }
        columns[at] = to;
        Ok(Mapped { inner, columns, at, f: Arc::new(f) })
    }

    /// The column `name` with another dtype.
    fn retyped(inner: &Arc<dyn Dataset>, name: &str, dtype: DType) -> Result<Column> {
        let column = &inner.columns()[find(inner.columns(), name)?];
        Ok(Column { dtype, ..column.clone() })
    }

    pub(crate) fn cast(inner: Arc<dyn Dataset>, column: &str, dtype: DType) -> Result<Mapped> {
        let to = Mapped::retyped(&inner, column, dtype)?;
        if dtype.bits() < 8 {
            let what = format!("{dtype} in column '{column}' of a dataset");
            return Err(Error::unsupported(what, "Cast it to u8 or i8"));
        }
        Mapped::new(inner, column, to, move |x| match dtype {
            DType::F32 => ConstData::new(dtype, &x.dims, Arc::new(floats(&x))),
            _ => halcyon_formats::data::cast(&x, dtype),
        })
    }

    pub(crate) fn normalise(
        inner: Arc<dyn Dataset>,
        column: &str,
        mean: &[f32],
        std: &[f32],
    ) -> Result<Mapped> {
        let to = Mapped::retyped(&inner, column, DType::F32)?;
        let bad = |what: String| Error::argument("normalise", what);
        let channels = to.dims.first().copied().unwrap_or(1);
        for (name, list) in [("mean", mean), ("std", std)] {
            if ![1, channels].contains(&list.len()) {
                let what = format!("{} numbers of {name} for {channels} channels", list.len());
                return Err(bad(format!("{what} of column '{column}'; give one, or one for each")));
            }
            if let Some(v) = list.iter().find(|v| !v.is_finite() || name == "std" && **v == 0.0) {
                return Err(bad(format!("{v} as {name} of column '{column}'")));
            }
        }
        let of = |list: &[f32], k: usize| list.get(k).or(list.first()).copied().unwrap_or(0.0);
        // There is one pair (mean, std) for all elements, or one pair per channel.
        let pairs = if mean.len().max(std.len()) == 1 { 1 } else { channels };
        let stats: Vec<(f32, f32)> = (0..pairs).map(|k| (of(mean, k), of(std, k))).collect();
        let per_channel = if pairs == 1 { 0 } else { to.dims[1..].iter().product() };
        Mapped::new(inner, column, to, move |x| {
            let mut v = floats(&x);
            let chunk = if per_channel == 0 { v.len() } else { per_channel * 4 };
            for (k, part) in v.chunks_exact_mut(chunk.max(1)).enumerate() {
                let (mean, std) = stats[k % stats.len()];
                for e in part.as_chunks_mut::<4>().0 {
                    *e = ((f32::from_le_bytes(*e) - mean) / std).to_le_bytes();
                }
            }
            ConstData::new(DType::F32, &x.dims, Arc::new(v))
        })
    }

    pub(crate) fn reshape(inner: Arc<dyn Dataset>, column: &str, dims: &[usize]) -> Result<Mapped> {
        let old = &inner.columns()[find(inner.columns(), column)?];
        let count = |d: &[usize]| d.iter().try_fold(1usize, |n, d| n.checked_mul(*d));
        if count(dims) != count(&old.dims) {
            let what =
                format!("column '{column}' is {:?}, which does not fill {dims:?}", old.dims.as_slice());
            return Err(Error::shape("reshape", what));
        }
        let to = Column { dims: dims.into(), ..old.clone() };
        let shape = to.clone();
        Mapped::new(inner, column, to, move |x| {
            ConstData::new(x.dtype, &shape.batch_dims(x.dims[0]), x.owner())
        })
    }
}

impl Dataset for Mapped {
    fn len(&self) -> usize {
        self.inner.len()
    }

    fn columns(&self) -> &[Column] {
        &self.columns
    }

    fn row(&self, row: usize) -> Result<Vec<ConstData>> {
        single(self, row)
    }

    fn batch(&self, rows: &[usize]) -> Result<Vec<ConstData>> {
        let mut values = self.inner.batch(rows)?;
        let (column, inner) = (&self.columns[self.at], &self.inner.columns()[self.at]);
        let Some(x) = values.get_mut(self.at) else {
            return Err(Error::shape("dataset", format!("a batch has no column '{}'", inner.name)));
        };
        check_value(inner, x, &inner.batch_dims(rows.len()), "the batch")?;
        *x = (self.f)(x.clone())?;
        check_value(column, x, &column.batch_dims(rows.len()), "the mapped batch")?;
        Ok(values)
    }
}

/// The values as little-endian f32. The dtypes that are common in images, sensor data and tables are
/// converted in simple loops, which are much faster than the conversion by [`halcyon_ir::Scalar`].
fn floats(x: &ConstData) -> Vec<u8> {
    let from = x.bytes();
    let mut out = vec![0; x.numel() * 4];
    let to = out.as_chunks_mut::<4>().0;
    match x.dtype {
        DType::F32 => return from.to_vec(),
        DType::U8 => to.iter_mut().zip(from).for_each(|(o, v)| *o = f32::from(*v).to_le_bytes()),
        DType::I16 => {
            let from = from.as_chunks::<2>().0;
            to.iter_mut().zip(from).for_each(|(o, v)| *o = f32::from(i16::from_le_bytes(*v)).to_le_bytes());
        }
        DType::I32 => {
            let from = from.as_chunks::<4>().0;
            to.iter_mut().zip(from).for_each(|(o, v)| *o = (i32::from_le_bytes(*v) as f32).to_le_bytes());
        }
        DType::F64 => {
            let from = from.as_chunks::<8>().0;
            to.iter_mut().zip(from).for_each(|(o, v)| *o = (f64::from_le_bytes(*v) as f32).to_le_bytes());
        }
        _ => {
            let values = x.to_vec::<f32>();
            to.iter_mut().zip(values).for_each(|(o, v)| *o = v.to_le_bytes());
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Arrays, DatasetExt};

    fn data(x: ConstData) -> Arrays {
        Arrays::new([("x", x)]).unwrap()
    }

    #[test]
    fn every_type_converts_as_scalars_do() {
        for dtype in DType::all().filter(|d| d.bits() >= 8) {
            let v = [0.0, 1.0, -3.0, 100.5, 1e9, -1e9, 255.0, 16777217.0];
            let x = halcyon_formats::data::from_scalars(dtype, &[8], v.map(Into::into)).unwrap();
            let want: Vec<u32> = x.to_vec::<f32>().iter().map(|v| v.to_bits()).collect();
            let got: Vec<u32> =
                floats(&x).as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect();
            assert_eq!(got, want, "{dtype}");
        }
    }

    #[test]
    fn values_are_normalised_by_channel() {
        let x = ConstData::from_slice(&[2, 2, 2], &[0u8, 10, 20, 30, 40, 50, 60, 70]).unwrap();
        let y = data(x.clone()).normalise("x", &[10.0, 20.0], &[2.0, 5.0]).unwrap();
        assert_eq!(y.columns()[0], Column::new("x", DType::F32, &[2, 2]));
        let want = [-5.0, 0.0, 0.0, 2.0, 15.0, 20.0, 8.0, 10.0];
        assert_eq!(y.batch(&[0, 1]).unwrap()[0].to_vec::<f32>(), want);
        // In a subset of the rows, every channel still gets its own mean and std.
        assert_eq!(y.batch(&[1]).unwrap()[0].to_vec::<f32>(), want[4..]);
        let one = data(x.clone()).normalise("x", &[10.0], &[2.0, 5.0]).unwrap();
        assert_eq!(one.batch(&[0]).unwrap()[0].to_vec::<f32>(), [-5.0, 0.0, 2.0, 4.0]);
        let scaled = data(x.clone()).scale("x", 255.0).unwrap();
        assert_eq!(
            scaled.batch(&[0]).unwrap()[0].to_vec::<f32>(),
            [0.0, 10.0, 20.0, 30.0].map(|v| v / 255.0f32)
        );
        // Rows without axes, and rows without elements.
        let flat = data(ConstData::from_slice(&[2], &[3i16, -4]).unwrap()).scale("x", 2.0).unwrap();
        assert_eq!(flat.batch(&[0, 1]).unwrap()[0].to_vec::<f32>(), [1.5, -2.0]);
        let none = data(ConstData::from_slice::<u8>(&[2, 2, 0], &[]).unwrap());
        assert_eq!(
            none.normalise("x", &[1.0, 2.0], &[1.0]).unwrap().batch(&[1]).unwrap()[0].dims[..],
            [1, 2, 0]
        );
        for (mean, std) in
            [(&[0.0][..], &[0.0][..]), (&[f32::NAN], &[1.0]), (&[1.0, 2.0, 3.0], &[1.0]), (&[], &[1.0])]
        {
            let e = data(x.clone()).normalise("x", mean, std).unwrap_err();
            assert!(matches!(e, Error::Argument { .. }), "{e}");
        }
    }

    #[test]
    fn columns_are_cast_reshaped_and_mapped() {
        let x = ConstData::from_slice(&[2, 4], &[0u8, 1, 2, 3, 4, 5, 6, 255]).unwrap();
        let y = data(x.clone()).cast("x", DType::I32).unwrap().reshape("x", &[1, 2, 2]).unwrap();
        let batch = y.batch(&[1]).unwrap();
        assert_eq!(
            (batch[0].dims.as_slice(), batch[0].to_vec::<i32>()),
            (&[1, 1, 2, 2][..], vec![4, 5, 6, 255])
        );
        assert_eq!(y.row(0).unwrap()[0].dims[..], [1, 2, 2]);
        assert!(matches!(data(x.clone()).reshape("x", &[3]), Err(Error::Shape { .. })));
        assert!(matches!(data(x.clone()).cast("x", DType::I4), Err(Error::Unsupported { .. })));

        let sums = |x: ConstData| {
            let v: Vec<f32> = x.to_vec::<f32>().chunks(4).map(|r| r.iter().sum()).collect();
            ConstData::from_slice(&[v.len()], &v)
        };
        let to = Column::new("sum", DType::F32, &[]);
        let y = data(x.clone()).map("x", to.clone(), sums).unwrap();
        assert_eq!(y.batch(&[1, 0]).unwrap()[0].to_vec::<f32>(), [270.0, 6.0]);
        // The array that the function returns must have the declared dtype and shape.
        let wrong = data(x.clone()).map("x", Column::new("sum", DType::F64, &[]), sums).unwrap();
        assert!(matches!(wrong.batch(&[0]), Err(Error::Shape { .. })));
        let both = Arrays::new([("x", x.clone()), ("sum", x)]).unwrap();
        assert!(matches!(both.map("x", to, sums), Err(Error::Argument { .. })));
    }
}
