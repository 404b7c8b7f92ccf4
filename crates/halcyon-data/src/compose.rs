//! Datasets that consist of rows or columns of other datasets.

use crate::dataset::{Column, Dataset, array, buffer, check_rows, find, single};
use halcyon_ir::{ConstData, Error, Result};
use std::ops::Range;
use std::sync::Arc;

#[derive(Clone, Debug)]
pub(crate) enum Rows {
    Range(Range<usize>),
    List(Arc<[usize]>),
}

/// Some rows of a dataset: see [`DatasetExt::subset`](crate::DatasetExt::subset).
#[derive(Clone, Debug)]
pub struct Subset {
    inner: Arc<dyn Dataset>,
    rows: Rows,
}

impl Subset {
    pub(crate) fn new(inner: Arc<dyn Dataset>, rows: Rows) -> Result<Subset> {
        match &rows {
            Rows::Range(r) if r.start > r.end || r.end > inner.len() => {
                let what =
                    format!("there are no rows {}..{} in a dataset of {} rows", r.start, r.end, inner.len());
                return Err(Error::argument("subset", what));
            }
            Rows::Range(_) => {}
            Rows::List(list) => check_rows(list, inner.len())?,
        }
        Ok(Subset { inner, rows })
    }
}

impl Dataset for Subset {
    fn len(&self) -> usize {
        match &self.rows {
            Rows::Range(r) => r.len(),
            Rows::List(list) => list.len(),
        }
    }

    fn columns(&self) -> &[Column] {
        self.inner.columns()
    }

    fn row(&self, row: usize) -> Result<Vec<ConstData>> {
        single(self, row)
    }

    fn batch(&self, rows: &[usize]) -> Result<Vec<ConstData>> {
        check_rows(rows, self.len())?;
        let inner: Vec<usize> = match &self.rows {
            Rows::Range(range) => rows.iter().map(|r| range.start + r).collect(),
            Rows::List(list) => rows.iter().map(|r| list[*r]).collect(),
        };
        self.inner.batch(&inner)
    }
}

/// The rows of several datasets, one after another.
#[derive(Clone, Debug)]
pub struct Concat {
    parts: Vec<Arc<dyn Dataset>>,
    /// The index of the first row of each part, and at the end the number of all rows.
    starts: Vec<usize>,
}

impl Concat {
    /// # Errors
    /// [`Error::Argument`] if there are no parts, if the columns of two parts differ, or if there are too
    /// many rows.
    pub fn new(parts: Vec<Arc<dyn Dataset>>) -> Result<Concat> {
        let bad = |what: String| Error::argument("concat", what);
        let first = parts.first().ok_or_else(|| bad("there is no dataset".into()))?;
        if let Some(k) = parts.iter().position(|p| p.columns() != first.columns()) {
            return Err(bad(format!("dataset {k} has other columns than the first: {:?}", parts[k])));
        }
        let (mut starts, mut n) = (vec![0], 0usize);
        for part in &parts {
            n = n.checked_add(part.len()).ok_or_else(|| bad("there are too many rows".into()))?;
            starts.push(n);
        }
        Ok(Concat { parts, starts })
    }
}

impl Dataset for Concat {
    fn len(&self) -> usize {
        self.starts.last().copied().unwrap_or(0)
    }

    fn columns(&self) -> &[Column] {
        self.parts[0].columns()
    }

    fn row(&self, row: usize) -> Result<Vec<ConstData>> {
        single(self, row)
    }

    fn batch(&self, rows: &[usize]) -> Result<Vec<ConstData>> {
        check_rows(rows, self.len())?;
        let columns = self.columns();
        let mut out = columns.iter().map(|c| buffer(c, rows.len())).collect::<Result<Vec<_>>>()?;
        out.iter_mut().zip(columns).for_each(|(o, c)| o.resize(c.row_bytes() * rows.len(), 0));
        for (part, range) in self.parts.iter().zip(self.starts.windows(2)) {
            let at: Vec<usize> =
                (0..rows.len()).filter(|k| (range[0]..range[1]).contains(&rows[*k])).collect();
            if at.is_empty() {
                continue;
            }
            let inner: Vec<usize> = at.iter().map(|k| rows[*k] - range[0]).collect();
            for ((out, x), column) in out.iter_mut().zip(part.batch(&inner)?).zip(columns) {
                let size = column.row_bytes();
                for (from, to) in at.iter().enumerate() {
                    out[to * size..][..size].copy_from_slice(&x.bytes()[from * size..][..size]);
                }
            }
        }
        columns.iter().zip(out).map(|(c, bytes)| array(c, rows.len(), bytes)).collect()
    }
}

/// Some columns of a dataset: see [`DatasetExt::select`](crate::DatasetExt::select).
#[derive(Clone, Debug)]
pub struct Select {
    inner: Arc<dyn Dataset>,
    columns: Vec<Column>,
    from: Vec<usize>,
}

impl Select {
    pub(crate) fn new<S: AsRef<str>>(inner: Arc<dyn Dataset>, names: &[S]) -> Result<Select> {
        let mut from = vec![];
        for name in names {
            let at = find(inner.columns(), name.as_ref())?;
            if from.contains(&at) {
                return Err(Error::argument("select", format!("'{}' appears twice", name.as_ref())));
            }
            from.push(at);
        }
        let columns = from.iter().map(|k| inner.columns()[*k].clone()).collect();
        Ok(Select { inner, columns, from })
    }

    fn pick(&self, values: &[ConstData]) -> Vec<ConstData> {
        self.from.iter().filter_map(|k| values.get(*k).cloned()).collect()
    }
}

impl Dataset for Select {
    fn len(&self) -> usize {
        self.inner.len()
    }

    fn columns(&self) -> &[Column] {
        &self.columns
    }

    fn row(&self, row: usize) -> Result<Vec<ConstData>> {
        Ok(self.pick(&self.inner.row(row)?))
    }

    fn batch(&self, rows: &[usize]) -> Result<Vec<ConstData>> {
        Ok(self.pick(&self.inner.batch(rows)?))
    }
}

#[cfg(test)]
mod tests {
    use crate::{Arrays, ConstData, Dataset, DatasetExt, Error};

    fn rows(range: std::ops::Range<i32>) -> Arrays {
        let v: Vec<i32> = range.collect();
        let twice: Vec<i32> = v.iter().map(|k| 2 * k).collect();
        let x = ConstData::from_slice(&[v.len()], &v).unwrap();
        Arrays::new([("x", x), ("twice", ConstData::from_slice(&[v.len()], &twice).unwrap())]).unwrap()
    }

    fn x(data: &impl Dataset, rows: &[usize]) -> Vec<i32> {
        let batch = data.batch(rows).unwrap();
        assert_eq!(
            batch[1].to_vec::<i32>(),
            batch[0].to_vec::<i32>().iter().map(|k| 2 * k).collect::<Vec<_>>()
        );
        batch[0].to_vec()
    }

    #[test]
    fn subsets_number_their_rows_from_zero_and_keep_to_them() {
        let part = rows(0..10).subset(3..7).unwrap();
        assert_eq!((part.len(), x(&part, &[0, 3])), (4, vec![3, 6]));
        assert!(matches!(part.batch(&[4]), Err(Error::Argument { .. })));
        let list = part.rows(vec![2, 2, 0]).unwrap();
        assert_eq!((list.len(), x(&list, &[0, 1, 2])), (3, vec![5, 5, 3]));
        assert_eq!(list.row(2).unwrap()[0].to_vec::<i32>(), [3]);
        assert!(list.batch(&[3]).is_err());
        for range in [0..11, 11..11, std::ops::Range { start: 4, end: 3 }] {
            assert!(rows(0..10).subset(range).is_err());
        }
        assert!(rows(0..10).rows(vec![10]).is_err());
        assert!(rows(0..10).subset(10..10).unwrap().is_empty());
    }

    #[test]
    fn concatenated_rows_come_from_their_parts_in_the_given_order() {
        let all = rows(0..3).concat(rows(100..100)).unwrap().concat(rows(10..14)).unwrap();
        assert_eq!((all.len(), x(&all, &[6, 0, 3, 2, 3])), (7, vec![13, 0, 10, 2, 10]));
        assert_eq!(x(&all, &[]), Vec::<i32>::new());
        assert!(all.batch(&[7]).is_err());
        let other = rows(0..3).select(&["twice", "x"]).unwrap();
        assert!(rows(0..3).concat(other).unwrap_err().to_string().contains("other columns"));
    }

    #[test]
    fn columns_are_selected_by_name() {
        let data = rows(4..6).select(&["twice"]).unwrap();
        assert_eq!((data.columns().len(), data.column("twice").unwrap()), (1, 0));
        assert_eq!(data.batch(&[1]).unwrap()[0].to_vec::<i32>(), [10]);
        assert_eq!(data.row(0).unwrap()[0].to_vec::<i32>(), [8]);
        assert!(rows(0..1).select(&["x", "x"]).is_err() && rows(0..1).select(&["z"]).is_err());
    }
}
