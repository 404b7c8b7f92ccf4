//! The trait of datasets, and the methods that every dataset has: subsets, splits and transforms.

use crate::compose::{Concat, Rows, Select, Subset};
use crate::order;
use crate::transform::Mapped;
use halcyon_ir::{ConstData, DType, Dims, Error, Result};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// A column of a dataset: the name, dtype and shape of one value of each row.
#[derive(Clone, Debug, PartialEq)]
pub struct Column {
    pub name: String,
    pub dtype: DType,
    /// Shape of the value of one row. A batch of `n` rows has the shape `[n, ..dims]`.
    pub dims: Dims,
    /// The names of the classes, if the column holds class numbers or tokens. Empty if there are no names.
    pub classes: Arc<[String]>,
}

impl Column {
    pub fn new(name: impl Into<String>, dtype: DType, dims: &[usize]) -> Column {
        Column { name: name.into(), dtype, dims: dims.into(), classes: Arc::new([]) }
    }

    /// Sets the names of the classes: class `i` is `classes[i]`.
    pub fn with_classes(mut self, classes: impl Into<Arc<[String]>>) -> Column {
        self.classes = classes.into();
        self
    }

    /// The size of the value of one row in bytes, capped at a quarter of the address space, so that sums do
    /// not overflow.
    pub fn row_bytes(&self) -> usize {
        let n = self.dims.iter().fold(1usize, |n, d| n.saturating_mul(*d)).min(usize::MAX >> 5);
        self.dtype.bytes(n)
    }

    /// The shape of `n` rows.
    pub(crate) fn batch_dims(&self, n: usize) -> Dims {
        std::iter::once(n).chain(self.dims.iter().copied()).collect()
    }
}

/// Rows that can be read in any order, from several threads at once.
///
/// A new dataset needs [`Dataset::len`], [`Dataset::columns`] and [`Dataset::row`]. If many rows can be read
/// faster than one by one, implement [`Dataset::batch`] too.
pub trait Dataset: Send + Sync {
    /// The number of rows.
    fn len(&self) -> usize;

    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The columns, the same for every row. By convention the first column is the input of a model, and the
    /// second column is what the model should predict.
    fn columns(&self) -> &[Column];

    /// Reads one row. Returns one array per column, with the dtype and shape of the column.
    ///
    /// # Errors
    /// [`Error::Argument`] if there is no such row; errors of reading the row.
    fn row(&self, row: usize) -> Result<Vec<ConstData>>;

    /// Reads rows, in the given order. Returns for each column an array `[rows.len(), ..dims]`.
    ///
    /// # Errors
    /// Those of [`Dataset::row`]; [`Error::Shape`] if a row does not have the number, dtypes and shapes of
    /// the columns; [`Error::Unsupported`] for a column whose dtype has fewer than 8 bits;
    /// [`Error::OutOfMemory`].
    fn batch(&self, rows: &[usize]) -> Result<Vec<ConstData>> {
        stack(self, rows)
    }
}

impl fmt::Debug for dyn Dataset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} rows of", self.len())?;
        self.columns().iter().try_for_each(|c| write!(f, " {}: {}{:?}", c.name, c.dtype, c.dims.as_slice()))
    }
}

impl<D: Dataset + ?Sized> Dataset for Arc<D> {
    fn len(&self) -> usize {
        (**self).len()
    }
    fn columns(&self) -> &[Column] {
        (**self).columns()
    }
    fn row(&self, row: usize) -> Result<Vec<ConstData>> {
        (**self).row(row)
    }
    fn batch(&self, rows: &[usize]) -> Result<Vec<ConstData>> {
        (**self).batch(rows)
    }
}

/// Subsets and transforms, for every dataset. Each method consumes the dataset. To keep the dataset, put it
/// into an `Arc` and call the method on a clone.
pub trait DatasetExt: Dataset + Sized + 'static {
    /// Erases the type of the dataset, so that datasets of different types can be stored together.
    fn share(self) -> Arc<dyn Dataset> {
        Arc::new(self)
    }

    /// The index of the column with this name.
    ///
    /// # Errors
    /// [`Error::Argument`] if there is no such column.
    fn column(&self, name: &str) -> Result<usize> {
        find(self.columns(), name)
    }

    /// A range of the rows.
    ///
    /// # Errors
    /// [`Error::Argument`] if the range is not within the dataset.
    fn subset(self, rows: Range<usize>) -> Result<Subset> {
        Subset::new(self.share(), Rows::Range(rows))
    }

    /// The rows with these numbers, in this order. A row may appear more than once.
    ///
    /// # Errors
    /// [`Error::Argument`] if there is no such row.
    fn rows(self, rows: Vec<usize>) -> Result<Subset> {
        Subset::new(self.share(), Rows::List(rows.into()))
    }

    /// Splits the rows at random into two parts. The first part has `fraction` of the rows, rounded to the
    /// nearest integer. Within a part, rows keep their order. The parts depend only on the number of rows and
    /// on `seed`.
    ///
    /// # Errors
    /// [`Error::Argument`] if `fraction` is not between 0 and 1, or a part would be empty.
    fn split(self, fraction: f64, seed: u64) -> Result<(Subset, Subset)> {
        let (first, second) = split_rows(self.len(), fraction, seed)?;
        let all = self.share();
        let part = |rows: Vec<usize>| Subset::new(all.clone(), Rows::List(rows.into()));
        Ok((part(first)?, part(second)?))
    }

    /// The rows of this dataset, followed by the rows of another dataset with the same columns.
    ///
    /// # Errors
    /// [`Error::Argument`] if the columns differ.
    fn concat(self, other: impl Dataset + 'static) -> Result<Concat> {
        Concat::new(vec![self.share(), other.share()])
    }

    /// A dataset with only these columns, in this order.
    ///
    /// # Errors
    /// [`Error::Argument`] if there is no such column, or a name appears twice.
    fn select<S: AsRef<str>>(self, columns: &[S]) -> Result<Select> {
        Select::new(self.share(), columns)
    }

    /// Replaces a column by the column `to`, which `f` computes from it. `f` gets the values of a batch, `[n,
    /// ..dims]`, and returns an array `[n, ..to.dims]` of the dtype of `to`. `f` runs in the loader's
    /// threads.
    ///
    /// # Errors
    /// [`Error::Argument`] if there is no column `column`, or another column has the name of `to`.
    fn map<F>(self, column: &str, to: Column, f: F) -> Result<Mapped>
    where
        F: Fn(ConstData) -> Result<ConstData> + Send + Sync + 'static,
    {
        Mapped::new(self.share(), column, to, f)
    }

    /// Casts a column by the rules of [`halcyon_ir::Scalar::cast`].
    ///
    /// # Errors
    /// [`Error::Argument`] if there is no such column, [`Error::Unsupported`] if `dtype` has fewer than 8
    /// bits.
    fn cast(self, column: &str, dtype: DType) -> Result<Mapped> {
        Mapped::cast(self.share(), column, dtype)
    }

    /// Converts a column to f32 and divides it by `divisor`, for example by 255 for pixels.
    ///
    /// # Errors
    /// [`Error::Argument`] if there is no such column, or `divisor` is zero or not finite.
    fn scale(self, column: &str, divisor: f32) -> Result<Mapped> {
        Mapped::normalise(self.share(), column, &[0.0], &[divisor])
    }

    /// Converts a column to f32 and computes `(value - mean) / std`. `mean` and `std` have one number, or one
    /// number per channel. The channels are the first axis of a row.
    ///
    /// # Errors
    /// [`Error::Argument`] if there is no such column, the length of a list is neither 1 nor the number of
    /// channels, an element of `std` is zero, or a number is not finite.
    fn normalise(self, column: &str, mean: &[f32], std: &[f32]) -> Result<Mapped> {
        Mapped::normalise(self.share(), column, mean, std)
    }

    /// Changes the shape of the rows of a column. The number of elements stays the same.
    ///
    /// # Errors
    /// [`Error::Argument`] if there is no such column; [`Error::Shape`] for another number of elements.
    fn reshape(self, column: &str, dims: &[usize]) -> Result<Mapped> {
        Mapped::reshape(self.share(), column, dims)
    }
}

impl<D: Dataset + 'static> DatasetExt for D {}

/// The row numbers of the two parts of [`DatasetExt::split`], each list sorted.
pub(crate) fn split_rows(n: usize, fraction: f64, seed: u64) -> Result<(Vec<usize>, Vec<usize>)> {
    let bad = |what: String| Error::argument("split", what);
    if !(fraction > 0.0 && fraction < 1.0) {
        return Err(bad(format!("the fraction is {fraction}; it must be between 0 and 1")));
    }
    let first = (n as f64 * fraction).round() as usize;
    if first == 0 || first >= n {
        return Err(bad(format!("{n} rows split at {fraction} leave a part empty")));
    }
    let mut first_rows = order::permutation(n, seed, 0);
    let mut second_rows = first_rows.split_off(first);
    first_rows.sort_unstable();
    second_rows.sort_unstable();
    Ok((first_rows, second_rows))
}

pub(crate) fn find(columns: &[Column], name: &str) -> Result<usize> {
    columns.iter().position(|c| c.name == name).ok_or_else(|| {
        let have: Vec<&str> = columns.iter().map(|c| c.name.as_str()).collect();
        Error::argument("dataset", format!("there is no column '{name}', only {}", have.join(", ")))
    })
}

/// Checks that every row number is below `len`, the number of rows.
pub(crate) fn check_rows(rows: &[usize], len: usize) -> Result<()> {
    match rows.iter().find(|r| **r >= len) {
        Some(r) => Err(Error::argument("dataset", format!("there is no row {r} among {len} rows"))),
        None => Ok(()),
    }
}

/// Buffers up to this size in bytes are allocated without first querying the system's free memory. The query
/// takes longer than reading a batch.
const SMALL: usize = 16 << 20;

/// An empty buffer for `rows` rows of `column`.
pub(crate) fn buffer(column: &Column, rows: usize) -> Result<Vec<u8>> {
    if column.dtype.bits() < 8 {
        return Err(Error::unsupported(
            format!("{} in column '{}' of a dataset", column.dtype, column.name),
            "Store it as u8 or i8",
        ));
    }
    match column.row_bytes().saturating_mul(rows) {
        n if n <= SMALL => Ok(Vec::with_capacity(n)),
        n => halcyon_host::reserve(n, &format!("{rows} rows of column '{}'", column.name)),
    }
}

/// The array of `rows` rows of `column`.
pub(crate) fn array(column: &Column, rows: usize, bytes: Vec<u8>) -> Result<ConstData> {
    ConstData::new(column.dtype, &column.batch_dims(rows), Arc::new(bytes))
}

/// A batch made of single rows.
fn stack<D: Dataset + ?Sized>(data: &D, rows: &[usize]) -> Result<Vec<ConstData>> {
    check_rows(rows, data.len())?;
    let columns = data.columns();
    let mut out = columns.iter().map(|c| buffer(c, rows.len())).collect::<Result<Vec<_>>>()?;
    for &row in rows {
        let values = data.row(row)?;
        if values.len() != columns.len() {
            let what = format!("row {row} has {} values for {} columns", values.len(), columns.len());
            return Err(Error::shape("dataset", what));
        }
        for ((out, value), column) in out.iter_mut().zip(&values).zip(columns) {
            check_value(column, value, &column.dims, &format!("row {row}"))?;
            out.extend_from_slice(value.bytes());
        }
    }
    columns.iter().zip(out).map(|(c, bytes)| array(c, rows.len(), bytes)).collect()
}

/// Checks that `value` has the dtype of `column` and the shape `dims`.
pub(crate) fn check_value(column: &Column, value: &ConstData, dims: &[usize], place: &str) -> Result<()> {
    if value.dtype == column.dtype && value.dims[..] == *dims {
        return Ok(());
    }
    let (have, shape) = (value.dtype, value.dims.as_slice());
    let what =
        format!("{place} of column '{}' is {have}{shape:?}, not {}{dims:?}", column.name, column.dtype);
    Err(Error::shape("dataset", what))
}

/// One row, read as a batch of one.
pub(crate) fn single<D: Dataset + ?Sized>(data: &D, row: usize) -> Result<Vec<ConstData>> {
    let batch = data.batch(&[row])?;
    batch.into_iter().map(|x| ConstData::new(x.dtype, &x.dims[1..], x.owner())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Arrays;

    /// A dataset that a user defines: row `i` is `[i, i + 1]`. Row 3 has a wrong shape, and row 4 has too
    /// many values.
    struct Own(Vec<Column>);

    impl Dataset for Own {
        fn len(&self) -> usize {
            5
        }
        fn columns(&self) -> &[Column] {
            &self.0
        }
        fn row(&self, row: usize) -> Result<Vec<ConstData>> {
            let pair = ConstData::from_slice(&[2], &[row as i16, row as i16 + 1])?;
            Ok(match row {
                3 => vec![ConstData::from_slice(&[1], &[1i16])?],
                4 => vec![pair.clone(), pair],
                _ => vec![pair],
            })
        }
    }

    fn own() -> Own {
        Own(vec![Column::new("x", DType::I16, &[2])])
    }

    #[test]
    fn rows_are_stacked_and_checked() {
        let batch = own().batch(&[2, 0]).unwrap();
        assert_eq!(batch, [ConstData::from_slice(&[2, 2], &[2i16, 3, 0, 1]).unwrap()]);
        assert_eq!(own().batch(&[]).unwrap()[0].dims[..], [0, 2]);
        let text = |rows: &[usize]| own().batch(rows).unwrap_err().to_string();
        assert!(text(&[1, 3]).contains("row 3 of column 'x' is i16[1], not i16[2]"), "{}", text(&[1, 3]));
        assert!(text(&[4]).contains("row 4 has 2 values for 1 columns"));
        assert!(text(&[5]).contains("there is no row 5 among 5 rows"));
        let small = Own(vec![Column::new("x", DType::U4, &[2])]);
        assert!(matches!(small.batch(&[0]), Err(Error::Unsupported { .. })));
    }

    #[test]
    fn a_single_row_of_a_batch() {
        let x = ConstData::from_slice(&[2, 1], &[7.0f32, 8.0]).unwrap();
        let data = Arrays::new([("x", x), ("y", ConstData::from_slice(&[2], &[1u8, 2]).unwrap())]).unwrap();
        let row = data.row(1).unwrap();
        assert_eq!(row[0], ConstData::from_slice(&[1], &[8.0f32]).unwrap());
        assert_eq!((row[1].dims.len(), row[1].to_vec::<u8>()), (0, vec![2]));
        let shared = data.share();
        assert_eq!(format!("{shared:?}"), "2 rows of x: f32[1] y: u8[]");
        assert!(shared.row(2).is_err());
    }

    #[test]
    fn splits_cover_every_row_once() {
        for (n, fraction) in [(2, 0.5), (10, 0.8), (1000, 0.333)] {
            let (a, b) = split_rows(n, fraction, 3).unwrap();
            assert_eq!(a.len(), (n as f64 * fraction).round() as usize);
            let mut all = [a.clone(), b].concat();
            all.sort_unstable();
            assert_eq!(all, (0..n).collect::<Vec<_>>());
            assert!(a.is_sorted() && (n < 100 || a != (0..a.len()).collect::<Vec<_>>()));
            assert_eq!(a, split_rows(n, fraction, 3).unwrap().0);
            assert!(n < 100 || a != split_rows(n, fraction, 4).unwrap().0);
        }
        for (n, fraction) in [(10, 0.0), (10, 1.0), (10, f64::NAN), (10, -1.0), (10, 0.01), (0, 0.5)] {
            assert!(matches!(split_rows(n, fraction, 3), Err(Error::Argument { .. })), "{n} {fraction}");
        }
    }
}
