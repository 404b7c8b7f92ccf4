//! Parts of a tensor along an axis.
//!
//! Where a part begins is a run-time argument, as literals are: cutting data into batches builds one plan,
//! whatever the offset. That holds for what is data: values on the device, inputs of compiled functions, and
//! what is computed from those element by element, through which the cut is moved to the data itself, so that
//! only the part is computed. A cut through another result (a product, say) has its place in the model; it
//! stays a view, which costs nothing.

use super::{Node, Tensor};
use halcyon_ir::composite::SLICE_AT;
use halcyon_ir::error::{Error, Result, Span};
use halcyon_ir::shape::{Dim, Shape};
use halcyon_ir::{DType, Op, Scalar};
use std::panic::Location;
use std::sync::atomic::Ordering;

/// Operations that a cut is moved through. Bounds recursion and what one call costs.
const MOST: usize = 32;

/// A cut: `len` elements from `start` along an axis.
#[derive(Clone, Copy)]
struct Cut {
    axis: usize,
    start: usize,
    len: usize,
}

impl Tensor {
    /// `len` elements from `start` along an axis, which may count from the end. Another `start` builds no
    /// other plan where the tensor is data (a value on the device, or computed from such element by element),
    /// so a loop over batches runs one:
    ///
    /// ```
    /// use halcyon::prelude::*;
    /// # fn main() -> halcyon::Result<()> {
    /// let b = Backend::cpu()?;
    /// let x = Tensor::arange(&b, 12, DType::F32).eval()?.reshape([6, 2]);
    /// for i in 0..3 {
    ///     assert_eq!(x.narrow(0, 2 * i, 2).sum(..).item::<f32>()?, 6.0 + 16.0 * i as f32);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::Shape`] for an axis that there is not, and for a part that leaves it.
    #[track_caller]
    pub fn narrow(&self, axis: i64, start: impl Into<Dim>, len: impl Into<Dim>) -> Tensor {
        let (start, len, at) = (start.into(), len.into(), Location::caller());
        if let (Ok(s), Some(start), Some(len)) = (self.shape(), start.known(), len.known())
            && let Ok(k) = s.axis(axis)
            && let Some(n) = s[k].known()
            && len < n
            && start.checked_add(len).is_some_and(|end| end <= n)
            && let Some(t) = self.cut(Cut { axis: k, start, len }, &mut { MOST }, at)
        {
            return t;
        }
        self.narrow_fixed(axis, start, len)
    }

    /// [`Tensor::narrow`] as a view with a start that belongs to the plan.
    #[track_caller]
    pub(crate) fn narrow_fixed(&self, axis: i64, start: impl Into<Dim>, len: impl Into<Dim>) -> Tensor {
        let (start, len) = (start.into(), len.into());
        Tensor::build(&[self], |g, x| {
            let k = g.shape(x[0]).axis(axis)?;
            g.narrow(x[0], k, start, len)
        })
    }

    /// `len` elements along an axis from a `position` that is computed on the device (an integer of rank 0).
    ///
    /// # Errors
    /// [`Error::Shape`] for a part that is longer than the axis; [`Error::Index`], when the result is read,
    /// for a position that leaves too little room.
    #[track_caller]
    pub fn narrow_at(&self, axis: i64, position: &Tensor, len: usize) -> Tensor {
        Tensor::build(&[self, position], |g, x| {
            let k = g.shape(x[0]).axis(axis)?;
            g.slice_at(x[0], x[1], k, len)
        })
    }

    /// The cut moved to the data that this is computed from; `None` where that is no data.
    fn cut(&self, c: Cut, left: &mut usize, at: &'static Location<'static>) -> Option<Tensor> {
        let n: &Node = &self.0;
        // A state is read where it stands: a cache that grows would be copied whole.
        if n.state.load(Ordering::Relaxed) {
            return None;
        }
        if self.is_data() {
            return Some(self.cut_here(c, at));
        }
        *left = left.checked_sub(1)?;
        let inputs: Vec<Tensor> = n.lock().inputs.to_vec();
        let shape: Shape =
            n.ty.shape
                .iter()
                .enumerate()
                .map(|(k, d)| if k == c.axis { Dim::from(c.len) } else { *d })
                .collect();
        let again = |x: Vec<Tensor>| {
            let x: Vec<&Tensor> = x.iter().collect();
            let want = halcyon_ir::shape::TensorType { dtype: n.ty.dtype, shape: shape.clone() };
            Tensor::build_on(self.backend(), &x, at, |g, x| g.push(n.op.clone(), x, Some(want)))
        };
        match &n.op {
            Op::Full(_) => Some(again(vec![])),
            Op::Scalar(_) | Op::Cast => {
                let x: Option<Vec<Tensor>> = inputs.iter().map(|x| x.cut(c, left, at)).collect();
                x.map(again)
            }
            Op::Expand => {
                let x = inputs.first()?;
                let lead = n.ty.shape.rank() - x.0.ty.shape.rank();
                let own = c.axis.checked_sub(lead).filter(|k| !x.0.ty.shape[*k].is(1));
                let x = match own {
                    Some(axis) => x.cut(Cut { axis, ..c }, left, at)?,
                    // Every part of what is repeated is the whole.
                    None => x.clone(),
                };
                Some(again(vec![x]))
            }
            Op::Reshape => {
                let x = inputs.first()?;
                let (from, to) = (&x.0.ty.shape, &n.ty.shape);
                let same = from.rank() > c.axis && from[..=c.axis] == to[..=c.axis];
                match same.then(|| x.cut(c, left, at)).flatten() {
                    Some(x) => Some(again(vec![x])),
                    None => self.views_data().then(|| self.cut_here(c, at)),
                }
            }
            Op::Permute(p) => {
                let x = inputs.first()?.cut(Cut { axis: *p.get(c.axis)?, ..c }, left, at)?;
                Some(again(vec![x]))
            }
            _ => None,
        }
    }

    /// Whether this is data under another shape.
    fn views_data(&self) -> bool {
        let mut t = self.clone();
        while !t.is_data() && matches!(t.0.op, Op::Reshape | Op::Permute(_)) {
            let Some(x) = t.0.lock().inputs.first().cloned() else { return false };
            t = x;
        }
        t.is_data() && !t.0.state.load(Ordering::Relaxed)
    }

    /// A value that is there or will be given, or a part of one.
    fn is_data(&self) -> bool {
        let part = matches!(&self.0.op, Op::Composite(c) if &*c.name == SLICE_AT);
        part || self.is_ready() || matches!(self.0.op, Op::Input(_))
    }

    /// This part of the data, from a run-time start.
    fn cut_here(&self, c: Cut, at: &'static Location<'static>) -> Tensor {
        let start = Tensor::build_on(self.backend(), &[], at, |g, _| {
            Ok(g.full(DType::I64, Shape::scalar(), Scalar::from(c.start)))
        });
        Tensor::build_on(self.backend(), &[self, &start], at, |g, x| g.slice_at(x[0], x[1], c.axis, c.len))
    }

    /// Several parts along an axis, whose sizes add up to it.
    fn parts(&self, op: &str, sizes: &[usize], axis: i64, at: &Span) -> Result<Vec<Tensor>> {
        let dims = self.dims()?;
        let k = self.shape()?.axis(axis).map_err(|e| e.at(at))?;
        let sum = sizes.iter().try_fold(0usize, |a, n| a.checked_add(*n));
        if sum != Some(dims[k]) {
            let what = format!("parts of {sizes:?} do not add up to axis {axis} of {:?}", dims.as_slice());
            return Err(Error::shape(op, what).at(at));
        }
        let mut start = 0;
        let mut out = Vec::with_capacity(sizes.len());
        for n in sizes {
            let t = self.narrow_fixed(axis, start, *n);
            t.check()?;
            out.push(t);
            start += n;
        }
        Ok(out)
    }

    /// At most `count` parts along an axis: of equal size, rounded up, the last one smaller.
    ///
    /// # Errors
    /// [`Error::Argument`] for no parts, [`Error::Shape`] for an axis that there is not; what the tensor
    /// carries.
    #[track_caller]
    pub fn chunk(&self, count: usize, axis: i64) -> Result<Vec<Tensor>> {
        let at = Span::caller();
        if count == 0 {
            return Err(Error::argument("chunk", "into no parts; give 1 or more").at(&at));
        }
        let k = self.shape()?.axis(axis).map_err(|e| e.at(&at))?;
        let n = self.dims()?[k];
        self.parts("chunk", &even(n, n.div_ceil(count).max(1)), axis, &at)
    }

    /// Parts along an axis: of one size, the last one smaller (`x.split(2, 0)`), or of these sizes, which
    /// must add up to the axis (`x.split([1, 3], 0)`).
    ///
    /// # Errors
    /// [`Error::Argument`] for a size of 0, [`Error::Shape`] for sizes that do not add up and for an axis
    /// that there is not; what the tensor carries.
    #[track_caller]
    pub fn split(&self, sizes: impl Into<Parts>, axis: i64) -> Result<Vec<Tensor>> {
        let at = Span::caller();
        let sizes = match sizes.into() {
            Parts::Of(0) => return Err(Error::argument("split", "into parts of size 0").at(&at)),
            Parts::Of(size) => {
                let k = self.shape()?.axis(axis).map_err(|e| e.at(&at))?;
                even(self.dims()?[k], size)
            }
            Parts::Sizes(v) => v,
        };
        self.parts("split", &sizes, axis, &at)
    }
}

fn even(n: usize, size: usize) -> Vec<usize> {
    if n == 0 {
        return vec![0];
    }
    (0..n).step_by(size).map(|i| size.min(n - i)).collect()
}

/// How [`Tensor::split`] cuts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Parts {
    /// Parts of one size, the last one smaller.
    Of(usize),
    Sizes(Vec<usize>),
}

impl From<usize> for Parts {
    fn from(n: usize) -> Parts {
        Parts::Of(n)
    }
}
impl From<&[usize]> for Parts {
    fn from(v: &[usize]) -> Parts {
        Parts::Sizes(v.into())
    }
}
impl From<Vec<usize>> for Parts {
    fn from(v: Vec<usize>) -> Parts {
        Parts::Sizes(v)
    }
}
impl<const N: usize> From<[usize; N]> for Parts {
    fn from(v: [usize; N]) -> Parts {
        Parts::Sizes(v.into())
    }
}
impl<const N: usize> From<&[usize; N]> for Parts {
    fn from(v: &[usize; N]) -> Parts {
        Parts::Sizes(v.to_vec())
    }
}
