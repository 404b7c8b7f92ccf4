//! Indexing with integers, ranges and index tensors.

use super::Tensor;
use halcyon_ir::error::{Error, Result, Span};
use std::ops::{Bound, Range, RangeFrom, RangeFull, RangeInclusive, RangeTo, RangeToInclusive};
use std::panic::Location;

/// The effect of [`Tensor::index`] on one axis.
#[derive(Clone, Debug)]
pub enum IndexItem {
    /// Selects one element and removes the axis. Negative values count from the end.
    At(i64),
    /// Selects the elements from `start` (default: the first), up to but without `end` (default: one after
    /// the last). Negative bounds count from the end of the axis. Takes every `step`-th element; a negative
    /// `step` walks down from the last element of the range.
    Range { start: Option<i64>, end: Option<i64>, step: i64 },
    /// Selects the elements at the indices in an integer tensor, whose axes replace this axis.
    Take(Tensor),
    /// Inserts a new axis of size 1; consumes no axis of the tensor.
    New,
    /// Takes the whole of every axis that has no other item.
    Rest,
}

/// A new axis of size 1, for [`Tensor::index`].
#[derive(Clone, Copy, Debug)]
pub struct NewAxis;

/// Takes the whole of every axis that has no other item, for [`Tensor::index`]: `x.index((Ellipsis, 0))`
/// selects the first element along the last axis.
#[derive(Clone, Copy, Debug)]
pub struct Ellipsis;

/// Every `by`-th element of a range, for [`Tensor::index`]: `step(.., 2)`, `step(1..7, 3)`. A negative `by`
/// walks down from the range's last element: `step(.., -1)` reverses. [`Tensor::index`] reports
/// `Error::Argument` if `range` is not a range or `by` is 0.
pub fn step(range: impl Into<IndexItem>, by: i64) -> IndexItem {
    match range.into() {
        IndexItem::Range { start, end, step } => {
            IndexItem::Range { start, end, step: step.saturating_mul(by) }
        }
        // `index` rejects a step of 0.
        _ => IndexItem::Range { start: None, end: None, step: 0 },
    }
}

macro_rules! items {
    ($($t:ty),*) => {$(
        impl From<$t> for IndexItem {
            fn from(i: $t) -> IndexItem { IndexItem::At(wide(i)) }
        }
        impl From<Range<$t>> for IndexItem {
            fn from(r: Range<$t>) -> IndexItem { range(Bound::Included(r.start), Bound::Excluded(r.end)) }
        }
        impl From<RangeFrom<$t>> for IndexItem {
            fn from(r: RangeFrom<$t>) -> IndexItem { range(Bound::Included(r.start), Bound::Unbounded) }
        }
        impl From<RangeTo<$t>> for IndexItem {
            fn from(r: RangeTo<$t>) -> IndexItem { range(Bound::Unbounded, Bound::Excluded(r.end)) }
        }
        impl From<RangeInclusive<$t>> for IndexItem {
            fn from(r: RangeInclusive<$t>) -> IndexItem {
                range(Bound::Included(*r.start()), Bound::Included(*r.end()))
            }
        }
        impl From<RangeToInclusive<$t>> for IndexItem {
            fn from(r: RangeToInclusive<$t>) -> IndexItem { range(Bound::Unbounded, Bound::Included(r.end)) }
        }
    )*};
}
items!(i32, i64, usize);

/// A value beyond `i64` becomes `i64::MAX`, which is out of range for every axis.
fn wide(i: impl TryInto<i64>) -> i64 {
    i.try_into().unwrap_or(i64::MAX)
}

fn range<T: TryInto<i64>>(start: Bound<T>, end: Bound<T>) -> IndexItem {
    let start = match start {
        Bound::Included(i) | Bound::Excluded(i) => Some(wide(i)),
        Bound::Unbounded => None,
    };
    let end = match end {
        Bound::Excluded(i) => Some(wide(i)),
        // -1 is the last element. The end after it cannot be given as a negative number, so the range has no
        // end.
        Bound::Included(i) => match wide(i) {
            -1 => None,
            i => Some(i.saturating_add(1)),
        },
        Bound::Unbounded => None,
    };
    IndexItem::Range { start, end, step: 1 }
}

impl From<RangeFull> for IndexItem {
    fn from(_: RangeFull) -> IndexItem {
        IndexItem::Range { start: None, end: None, step: 1 }
    }
}
impl From<NewAxis> for IndexItem {
    fn from(_: NewAxis) -> IndexItem {
        IndexItem::New
    }
}
impl From<Ellipsis> for IndexItem {
    fn from(_: Ellipsis) -> IndexItem {
        IndexItem::Rest
    }
}
impl From<&Tensor> for IndexItem {
    fn from(t: &Tensor) -> IndexItem {
        IndexItem::Take(t.clone())
    }
}
impl From<Tensor> for IndexItem {
    fn from(t: Tensor) -> IndexItem {
        IndexItem::Take(t)
    }
}

/// The argument of [`Tensor::index`]: one item, a tuple of up to six, or a slice of [`IndexItem`]s.
pub trait Index {
    fn items(self) -> Vec<IndexItem>;
}

impl<T: Into<IndexItem>> Index for T {
    fn items(self) -> Vec<IndexItem> {
        vec![self.into()]
    }
}
impl Index for &[IndexItem] {
    fn items(self) -> Vec<IndexItem> {
        self.to_vec()
    }
}
macro_rules! tuples {
    ($(($($t:ident $i:tt),+)),+) => {$(
        impl<$($t: Into<IndexItem>),+> Index for ($($t,)+) {
            fn items(self) -> Vec<IndexItem> { vec![$(self.$i.into()),+] }
        }
    )+};
}
tuples!(
    (A 0), (A 0, B 1), (A 0, B 1, C 2), (A 0, B 1, C 2, D 3), (A 0, B 1, C 2, D 3, E 4), (A 0, B 1, C 2, D 3, E 4, F 5)
);

/// Resolves a range along axis `axis` of size `n` to its first element and number of elements.
fn resolve(start: Option<i64>, end: Option<i64>, by: i64, n: usize, axis: usize) -> Result<(usize, usize)> {
    let place = |i: i64, what: &str| {
        let p = if i < 0 { i.saturating_add(n as i64) } else { i };
        usize::try_from(p).ok().filter(|p| *p <= n).ok_or_else(|| {
            Error::shape(
                "index",
                format!("the range's {what}, {i}, is outside of axis {axis}, which has {n} elements"),
            )
        })
    };
    if by == 0 {
        return Err(Error::argument("index", "step() takes a range and a step that is not 0"));
    }
    let (a, b) = (place(start.unwrap_or(0), "start")?, end.map_or(Ok(n), |e| place(e, "end"))?);
    if a > b {
        let what = format!("the range {a}..{b} of axis {axis} ends before it starts");
        return Err(Error::shape("index", what));
    }
    let len = (b - a).div_ceil(usize::try_from(by.unsigned_abs()).unwrap_or(usize::MAX));
    Ok((if by > 0 || len == 0 { a } else { b - 1 }, len))
}

impl Tensor {
    /// A part of the tensor, as in NumPy. An integer takes one element of an axis and removes the axis; a
    /// range takes a part of the axis; `..` takes the whole axis; an integer tensor takes the elements at its
    /// indices. Integers and range bounds may be negative (counted from the end). Axes without an item are
    /// taken whole. Without a step, the start of a part is a run-time argument in the same cases as in
    /// [`Tensor::narrow`].
    /// ```
    /// use halcyon::prelude::*;
    /// # fn main() -> halcyon::Result<()> {
    /// let b = Backend::cpu()?;
    /// let x = Tensor::arange(&b, 24, DType::I64).reshape([2, 3, 4]);
    /// assert_eq!(x.index((1, -1, ..)).to_vec::<i64>()?, [20, 21, 22, 23]);
    /// assert_eq!(x.index((.., 1..3, 0)).to_vec::<i64>()?, [4, 8, 16, 20]);
    /// assert_eq!(x.index((0, halcyon::step(.., -2), 3)).to_vec::<i64>()?, [11, 3]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::Shape`] for more indices than axes, for more than one [`Ellipsis`], for integers and ranges
    /// outside of their axis (ranges are not clamped), and for ranges that end before they start;
    /// [`Error::Argument`] for a step of 0; [`Error::Unsupported`] for several index tensors. Indices out of
    /// range in an index tensor are reported when the result is read.
    #[track_caller]
    pub fn index(&self, items: impl Index) -> Tensor {
        let at = Location::caller();
        match self.indexed(items.items()) {
            Ok(t) => t,
            Err(e) => Tensor::failed(self.backend(), e.at(&Span::Caller(at)), at),
        }
    }

    #[track_caller]
    fn indexed(&self, items: Vec<IndexItem>) -> Result<Tensor> {
        let rank = self.shape()?.rank();
        let taken = items.iter().filter(|i| !matches!(i, IndexItem::New | IndexItem::Rest)).count();
        let rests = items.iter().filter(|i| matches!(i, IndexItem::Rest)).count();
        if taken > rank {
            let what = format!("{taken} indices for the {rank} axes of {}", self.shape()?);
            return Err(Error::shape("index", what));
        }
        if rests > 1 {
            return Err(Error::shape("index", format!("Ellipsis is given {rests} times; once is allowed")));
        }
        if items.iter().filter(|i| matches!(i, IndexItem::Take(_))).count() > 1 {
            return Err(Error::unsupported(
                "an index with several tensors",
                "Index with one tensor after the other, or gather from a reshaped tensor",
            ));
        }
        let mut x = self.clone();
        // The next axis of `x` (the intermediate result), and of `self`.
        let (mut axis, mut own) = (0usize, 0usize);
        for item in items {
            match item {
                IndexItem::New => {
                    x = x.unsqueeze(axis as i64);
                    axis += 1;
                }
                IndexItem::Rest => {
                    axis += rank - taken;
                    own += rank - taken;
                }
                IndexItem::At(i) => {
                    let n = x.dims()?[axis];
                    let p = if i < 0 { i.saturating_add(n as i64) } else { i };
                    let p = usize::try_from(p).ok().filter(|p| *p < n).ok_or_else(|| {
                        Error::shape("index", format!("{i} is outside of axis {own}, which has {n} elements"))
                    })?;
                    x = x.narrow(axis as i64, p, 1).squeeze(axis as i64);
                    own += 1;
                }
                IndexItem::Range { start, end, step } => {
                    let dims = x.dims()?;
                    let (from, len) = resolve(start, end, step, dims[axis], own)?;
                    x = if step == 1 || len == 1 {
                        x.narrow(axis as i64, from, len)
                    } else {
                        let mut starts = vec![0; dims.len()];
                        let mut steps = vec![1; dims.len()];
                        let mut lens = dims.to_vec();
                        (starts[axis], steps[axis], lens[axis]) = (from, step, len);
                        if len == 0 { x.narrow(axis as i64, 0, 0) } else { x.slice(&starts, &steps, &lens) }
                    };
                    axis += 1;
                    own += 1;
                }
                IndexItem::Take(t) => {
                    let more = t.shape()?.rank();
                    x = x.gather(&t, axis as i64);
                    axis += more;
                    own += 1;
                }
            }
            x.check()?;
        }
        Ok(x)
    }
}
