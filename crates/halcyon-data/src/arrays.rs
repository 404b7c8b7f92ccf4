//! Columns in memory, or mapped from a file.

use crate::bad;
use crate::dataset::{Column, Dataset, array, buffer, check_rows, find, single};
use halcyon_formats::npz::Npz;
use halcyon_formats::safetensors::SafeTensors;
use halcyon_ir::{ConstData, Error, Result};
use std::path::Path;
use std::sync::Arc;

/// A dataset of arrays, one per column. The first axis of each array counts the rows. Clones share the
/// arrays.
///
/// A batch is a copy of its rows. Arrays of uncompressed files that need no conversion are mapped: their data
/// is read from the file when it is needed.
#[derive(Clone, Debug)]
pub struct Arrays {
    columns: Vec<Column>,
    data: Vec<ConstData>,
    rows: usize,
}

impl Arrays {
    /// Makes a dataset of named columns. The first axis of every array must have the same size, the number of
    /// rows.
    ///
    /// # Errors
    /// [`Error::Argument`] if there are no columns, an array has no axes, the numbers of rows differ, a name
    /// appears twice, or a dtype has fewer than 8 bits.
    pub fn new<N: Into<String>>(columns: impl IntoIterator<Item = (N, ConstData)>) -> Result<Arrays> {
        let columns = columns.into_iter().map(|(name, x)| (name.into(), x)).collect();
        Arrays::build(columns).map_err(|what| Error::argument("Arrays", what))
    }

    /// Reads the arrays `names` of an `.npz` file, in this order. If `names` is empty, reads all arrays in
    /// the order of the file.
    ///
    /// # Errors
    /// The errors of [`Npz::open`] and [`Npz::get`]; [`Error::Format`] if the arrays do not fit together as
    /// columns.
    pub fn npz<S: AsRef<str>>(path: &Path, names: &[S]) -> Result<Arrays> {
        let file = Npz::open(path)?;
        let all: Vec<&str> = file.names().collect();
        Arrays::of_file(path, &all, names, |name| file.get(name))
    }

    /// Reads the tensors `names` of a safetensors file, in this order. If `names` is empty, reads all
    /// tensors, sorted by name.
    ///
    /// # Errors
    /// The errors of [`SafeTensors::open`] and [`SafeTensors::get`]; [`Error::Format`] if the tensors do not
    /// fit together as columns.
    pub fn safetensors<S: AsRef<str>>(path: &Path, names: &[S]) -> Result<Arrays> {
        let file = SafeTensors::open(path)?;
        let all: Vec<&str> = file.names().collect();
        Arrays::of_file(path, &all, names, |name| file.get(name))
    }

    fn of_file<S: AsRef<str>>(
        path: &Path,
        all: &[&str],
        names: &[S],
        get: impl Fn(&str) -> Result<ConstData>,
    ) -> Result<Arrays> {
        let names: Vec<&str> = match names {
            [] => all.to_vec(),
            _ => names.iter().map(S::as_ref).collect(),
        };
        let columns = names.iter().map(|n| Ok((n.to_string(), get(n)?))).collect::<Result<Vec<_>>>()?;
        Arrays::build(columns).map_err(|what| {
            let next = "name the arrays that belong together in `columns`";
            bad(&path.display().to_string(), format!("{what}; {next}"))
        })
    }

    fn build(named: Vec<(String, ConstData)>) -> std::result::Result<Arrays, String> {
        let (mut columns, mut data) = (Vec::<Column>::new(), Vec::<ConstData>::new());
        let mut rows = None;
        for (name, x) in named {
            let Some((&n, dims)) = x.dims.split_first() else {
                return Err(format!("'{name}' has no axis of rows"));
            };
            let (first, most) = rows.get_or_insert_with(|| (name.clone(), n));
            if n != *most {
                return Err(format!("'{first}' has {most} rows, but '{name}' has {n}"));
            }
            if x.dtype.bits() < 8 {
                return Err(format!("'{name}' is {}, which a dataset cannot hold; store it as u8", x.dtype));
            }
            if columns.iter().any(|c| c.name == name) {
                return Err(format!("two columns are called '{name}'"));
            }
            columns.push(Column::new(name, x.dtype, dims));
            data.push(x);
        }
        let (_, rows) = rows.ok_or("there is no column")?;
        Ok(Arrays { columns, data, rows })
    }

    /// Sets the names of the classes of a column.
    ///
    /// # Errors
    /// [`Error::Argument`] if there is no such column.
    pub fn with_classes(mut self, column: &str, classes: impl Into<Arc<[String]>>) -> Result<Arrays> {
        let at = find(&self.columns, column)?;
        self.columns[at].classes = classes.into();
        Ok(self)
    }

    /// The whole array of a column: `[rows, ..dims]`.
    ///
    /// # Errors
    /// [`Error::Argument`] if there is no such column.
    pub fn array(&self, column: &str) -> Result<&ConstData> {
        Ok(&self.data[find(&self.columns, column)?])
    }
}

impl Dataset for Arrays {
    fn len(&self) -> usize {
        self.rows
    }

    fn columns(&self) -> &[Column] {
        &self.columns
    }

    fn row(&self, row: usize) -> Result<Vec<ConstData>> {
        single(self, row)
    }

    fn batch(&self, rows: &[usize]) -> Result<Vec<ConstData>> {
        check_rows(rows, self.rows)?;
        let gather = |(column, x): (&Column, &ConstData)| {
            let mut out = buffer(column, rows.len())?;
            let (from, size) = (x.bytes(), column.row_bytes());
            rows.iter().for_each(|r| out.extend_from_slice(&from[r * size..][..size]));
            array(column, rows.len(), out)
        };
        self.columns.iter().zip(&self.data).map(gather).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use halcyon_ir::DType;

    fn range(dims: &[usize]) -> ConstData {
        let n = dims.iter().product::<usize>() as i64;
        ConstData::from_slice(dims, &(0..n).collect::<Vec<_>>()).unwrap()
    }

    #[test]
    fn batches_have_the_rows_in_the_given_order() {
        let data = Arrays::new([("a", range(&[4, 2])), ("b", range(&[4])), ("e", range(&[4, 0]))]).unwrap();
        let b = data.batch(&[3, 0, 3]).unwrap();
        assert_eq!((b[0].dims.as_slice(), b[0].to_vec::<i64>()), (&[3, 2][..], vec![6, 7, 0, 1, 6, 7]));
        assert_eq!((b[1].dims.as_slice(), b[1].to_vec::<i64>()), (&[3][..], vec![3, 0, 3]));
        assert_eq!((b[2].dims.as_slice(), b[2].bytes().len()), (&[3, 0][..], 0));
        assert!(matches!(data.batch(&[0, 4]), Err(Error::Argument { .. })));
        assert_eq!(data.array("b").unwrap().dims[..], [4]);
        assert!(data.array("c").unwrap_err().to_string().contains("only a, b, e"));
    }

    #[test]
    fn arrays_that_do_not_fit_together() {
        let text = |c: Vec<(&str, ConstData)>| Arrays::new(c).unwrap_err().to_string();
        assert!(text(vec![]).contains("no column"));
        assert!(text(vec![("a", range(&[]))]).contains("'a' has no axis of rows"));
        assert!(text(vec![("a", range(&[2])), ("b", range(&[3]))]).contains("'a' has 2 rows, but 'b' has 3"));
        assert!(text(vec![("a", range(&[2])), ("a", range(&[2]))]).contains("two columns"));
        let packed = ConstData::splat(DType::U4, &[2], 1.0.into()).unwrap();
        assert!(text(vec![("a", packed)]).contains("'a' is u4"));
    }

    #[test]
    fn files_of_arrays() {
        let dir = tempfile::tempdir().unwrap();
        let (x, y) = (range(&[3, 2]), range(&[3]));
        let path = dir.path().join("f.npz");
        halcyon_formats::npz::write(&path, &[("y", &y), ("x", &x), ("other", &range(&[5]))]).unwrap();
        let data = Arrays::npz(&path, &["x", "y"]).unwrap();
        assert_eq!((data.columns()[0].name.as_str(), data.array("y").unwrap()), ("x", &y));
        let all = Arrays::npz::<&str>(&path, &[]).unwrap_err();
        let text = all.to_string();
        assert!(matches!(all, Error::Format { .. }) && text.contains("f.npz"), "{text}");
        assert!(text.contains("'y' has 3 rows, but 'other' has 5; name"), "{text}");
        assert!(matches!(Arrays::npz(&path, &["z"]), Err(Error::Argument { .. })));

        let path = dir.path().join("f.safetensors");
        halcyon_formats::safetensors::write(&path, &[("y", &y), ("x", &x)], &Default::default()).unwrap();
        let data = Arrays::safetensors::<&str>(&path, &[]).unwrap();
        assert_eq!((data.columns()[0].name.as_str(), data.array("x").unwrap()), ("x", &x));
        let whole = std::fs::read(&path).unwrap();
        std::fs::write(&path, &whole[..whole.len() - 1]).unwrap();
        assert!(matches!(Arrays::safetensors(&path, &["x"]), Err(Error::Format { .. })));
    }
}
