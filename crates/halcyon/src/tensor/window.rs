//! Narrow, split and chunk: parts of a tensor along an axis.
//!
//! In a narrow of data, the start is a run-time argument, like a literal, so cutting data into batches builds
//! one plan for all offsets. Data are values on the device, inputs of compiled functions, and results
//! computed element by element from these. For such results, the narrow is moved through the operations to
//! the data, so that only that part is computed. A narrow of a state or of any other result (a product, say)
//! is a view, which costs nothing; its start is fixed in the plan. Split and chunk always make such views.

use super::{Node, Tensor};
use halcyon_ir::composite::CompositeKind;
use halcyon_ir::error::{Error, Result, Span};
use halcyon_ir::shape::{Dim, Shape};
use halcyon_ir::{DType, Op, Scalar};
use std::panic::Location;
use std::sync::atomic::Ordering;

/// Maximum number of operations that a narrow is moved through. This limit bounds the recursion and the cost
/// of one call.
const MAX_OPERATIONS: usize = 32;

/// A narrow: `len` elements from `start` along an axis.
#[derive(Clone, Copy)]
struct Narrow {
    axis: usize,
    start: usize,
    len: usize,
}

impl Tensor {
    /// A part of the tensor: `len` elements from `start` along `axis` (negative counts from the end). If the
    /// tensor is data (a value on the device, or computed element by element from such values), `start` is a
    /// run-time argument, so a loop over batches uses one plan:
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
    /// [`Error::Shape`] if the axis does not exist or the part exceeds it.
    #[track_caller]
    pub fn narrow(&self, axis: i64, start: impl Into<Dim>, len: impl Into<Dim>) -> Tensor {
        let (start, len, at) = (start.into(), len.into(), Location::caller());
        if let (Ok(s), Some(start), Some(len)) = (self.shape(), start.known(), len.known())
            && let Ok(k) = s.axis(axis)
            && let Some(n) = s[k].known()
            && len < n
            && start.checked_add(len).is_some_and(|end| end <= n)
            && let Some(t) = self.move_narrow(Narrow { axis: k, start, len }, &mut { MAX_OPERATIONS }, at)
        {
            return t;
        }
        self.narrow_fixed(axis, start, len)
    }

    /// [`Tensor::narrow`] as a view whose start is fixed in the plan.
    #[track_caller]
    pub(crate) fn narrow_fixed(&self, axis: i64, start: impl Into<Dim>, len: impl Into<Dim>) -> Tensor {
        let (start, len) = (start.into(), len.into());
        Tensor::build(&[self], |g, x| {
            let k = g.shape(x[0]).axis(axis)?;
            g.narrow(x[0], k, start, len)
        })
    }

    /// A part of the tensor: `len` elements along `axis` from a `position` computed on the device (an integer
    /// of rank 0).
    ///
    /// # Errors
    /// [`Error::Shape`] if `len` exceeds the axis; [`Error::Index`], when the result is read, if the part
    /// exceeds it.
    #[track_caller]
    pub fn narrow_at(&self, axis: i64, position: &Tensor, len: usize) -> Tensor {
        Tensor::build(&[self, position], |g, x| {
            let k = g.shape(x[0]).axis(axis)?;
            g.slice_at(x[0], x[1], k, len)
        })
    }

    /// Moves the narrow to the data that this tensor is computed from. `None` if it cannot be moved to data.
    fn move_narrow(&self, c: Narrow, left: &mut usize, at: &'static Location<'static>) -> Option<Tensor> {
        let n: &Node = &self.0;
        // A state is read in place, because a run-time slice would copy it, and a state may be a growing
        // cache.
        if n.state.load(Ordering::Relaxed) {
            return None;
        }
        if self.is_data() {
            return Some(self.narrow_here(c, at));
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
                let x: Option<Vec<Tensor>> = inputs.iter().map(|x| x.move_narrow(c, left, at)).collect();
                x.map(again)
            }
            Op::Expand => {
                let x = inputs.first()?;
                let lead = n.ty.shape.rank() - x.0.ty.shape.rank();
                let own = c.axis.checked_sub(lead).filter(|k| !x.0.ty.shape[*k].is(1));
                let x = match own {
                    Some(axis) => x.move_narrow(Narrow { axis, ..c }, left, at)?,
                    // The axis is expanded: every part of it is the whole operand.
                    None => x.clone(),
                };
                Some(again(vec![x]))
            }
            Op::Reshape => {
                let x = inputs.first()?;
                let (from, to) = (&x.0.ty.shape, &n.ty.shape);
                let same = from.rank() > c.axis && from[..=c.axis] == to[..=c.axis];
                match same.then(|| x.move_narrow(c, left, at)).flatten() {
                    Some(x) => Some(again(vec![x])),
                    None => self.views_data().then(|| self.narrow_here(c, at)),
                }
            }
            Op::Permute(p) => {
                let x = inputs.first()?.move_narrow(Narrow { axis: *p.get(c.axis)?, ..c }, left, at)?;
                Some(again(vec![x]))
            }
            _ => None,
        }
    }

    /// Whether this is a reshape or permutation of data (not of a state).
    fn views_data(&self) -> bool {
        let mut t = self.clone();
        while !t.is_data() && matches!(t.0.op, Op::Reshape | Op::Permute(_)) {
            let Some(x) = t.0.lock().inputs.first().cloned() else { return false };
            t = x;
        }
        t.is_data() && !t.0.state.load(Ordering::Relaxed)
    }

    /// Whether this is a value on the device, an input, or a run-time slice.
    fn is_data(&self) -> bool {
        let part = matches!(&self.0.op, Op::Composite(c) if c.kind == CompositeKind::SliceAt);
        part || self.is_ready() || matches!(self.0.op, Op::Input(_))
    }

    /// The narrow of this data with a run-time start.
    fn narrow_here(&self, c: Narrow, at: &'static Location<'static>) -> Tensor {
        let start = Tensor::build_on(self.backend(), &[], at, |g, _| {
            Ok(g.full(DType::I64, Shape::scalar(), Scalar::from(c.start)))
        });
        Tensor::build_on(self.backend(), &[self, &start], at, |g, x| g.slice_at(x[0], x[1], c.axis, c.len))
    }

    /// Consecutive parts along an axis. `sizes` must add up to the size of the axis.
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

    /// Splits along an axis into at most `count` parts of equal size (rounded up); the last may be smaller.
    ///
    /// # Errors
    /// [`Error::Argument`] if `count` is 0, [`Error::Shape`] if the axis does not exist; the error that the
    /// tensor carries.
    #[track_caller]
    pub fn chunk(&self, count: usize, axis: i64) -> Result<Vec<Tensor>> {
        let at = Span::caller();
        if count == 0 {
            return Err(Error::argument("chunk", "the number of parts is 0; give 1 or more").at(&at));
        }
        let k = self.shape()?.axis(axis).map_err(|e| e.at(&at))?;
        let n = self.dims()?[k];
        self.parts("chunk", &equal_parts(n, n.div_ceil(count).max(1)), axis, &at)
    }

    /// Splits along an axis: into parts of one size, the last possibly smaller (`x.split(2, 0)`), or into
    /// parts of the given sizes, which must add up to the size of the axis (`x.split([1, 3], 0)`).
    ///
    /// # Errors
    /// [`Error::Argument`] if the one size is 0, [`Error::Shape`] if the sizes do not add up to the size of
    /// the axis or the axis does not exist; the error that the tensor carries.
    #[track_caller]
    pub fn split(&self, sizes: impl Into<Parts>, axis: i64) -> Result<Vec<Tensor>> {
        let at = Span::caller();
        let sizes = match sizes.into() {
            Parts::Of(0) => {
                return Err(Error::argument("split", "the size of the parts is 0; give 1 or more").at(&at));
            }
            Parts::Of(size) => {
                let k = self.shape()?.axis(axis).map_err(|e| e.at(&at))?;
                equal_parts(self.dims()?[k], size)
            }
            Parts::Sizes(v) => v,
        };
        self.parts("split", &sizes, axis, &at)
    }
}

fn equal_parts(n: usize, size: usize) -> Vec<usize> {
    if n == 0 {
        return vec![0];
    }
    (0..n).step_by(size).map(|i| size.min(n - i)).collect()
}

/// The parts that [`Tensor::split`] makes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Parts {
    /// Parts of one size; the last may be smaller.
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
