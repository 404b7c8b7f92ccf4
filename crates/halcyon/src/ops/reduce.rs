//! Reductions, cumulative reductions and sorting.

use crate::tensor::Tensor;
use halcyon_ir::NodeId;
use halcyon_ir::error::{Error, Result};
use halcyon_ir::graph::Graph;
use halcyon_ir::ops::ReduceKind;
use std::ops::RangeFull;

/// The axes of a reduction: one (`1`), several (`[0, -1]`), or all (`..`, or an empty list). Negative values
/// count from the end.
pub trait Axes {
    fn axes(&self) -> &[i64];
}

impl Axes for i64 {
    fn axes(&self) -> &[i64] {
        std::slice::from_ref(self)
    }
}
impl<const N: usize> Axes for [i64; N] {
    fn axes(&self) -> &[i64] {
        self
    }
}
impl<const N: usize> Axes for &[i64; N] {
    fn axes(&self) -> &[i64] {
        *self
    }
}
impl Axes for &[i64] {
    fn axes(&self) -> &[i64] {
        self
    }
}
impl Axes for Vec<i64> {
    fn axes(&self) -> &[i64] {
        self
    }
}
impl Axes for &Vec<i64> {
    fn axes(&self) -> &[i64] {
        self
    }
}
impl Axes for RangeFull {
    fn axes(&self) -> &[i64] {
        &[]
    }
}

/// Options of [`Tensor::var_with`] and [`Tensor::std_with`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Variance {
    /// Subtracted from the number of elements to give the divisor: 1 (the default) estimates the variance of
    /// a population from a sample, 0 gives the variance of the elements themselves.
    pub correction: usize,
    /// Keep the reduced axes, with size 1.
    pub keepdim: bool,
}

impl Default for Variance {
    fn default() -> Variance {
        Variance { correction: 1, keepdim: false }
    }
}

/// The order of a sort.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Order {
    #[default]
    Ascending,
    Descending,
}

/// Options of [`Tensor::scan`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Scan {
    /// Each result covers only the elements before its position, without the element at its position.
    pub exclusive: bool,
    /// Runs from the end of the axis to its start.
    pub reverse: bool,
}

pub(super) fn axes_of(g: &Graph, x: NodeId, axes: &[i64]) -> Result<Vec<usize>> {
    axes.iter().map(|a| g.shape(x).axis(*a)).collect()
}

/// Like [`axes_of`], but an empty list means all axes, and a repeated axis is an error.
fn reduced(g: &Graph, op: &str, x: NodeId, axes: &[i64]) -> Result<Vec<usize>> {
    if axes.is_empty() {
        return Ok((0..g.shape(x).rank()).collect());
    }
    let v = axes_of(g, x, axes)?;
    match (1..v.len()).find(|k| v[..*k].contains(&v[*k])) {
        None => Ok(v),
        Some(k) => {
            let what = format!("axis {} of {} is named twice in {axes:?}", v[k], g.shape(x));
            Err(Error::shape(op, what))
        }
    }
}

macro_rules! reductions {
    ($($(#[$m:meta])* $n:ident $keep:ident $kind:ident),* $(,)?) => {
        /// Reductions over axes. The `_keepdim` methods keep the reduced axes with size 1, so that the result
        /// broadcasts against the operand.
        impl Tensor {
            $(
                $(#[$m])*
                #[track_caller]
                pub fn $n(&self, axes: impl Axes) -> Tensor {
                    self.reduce(ReduceKind::$kind, axes)
                }
                #[doc = concat!("[`Tensor::", stringify!($n), "`] with the reduced axes kept, of size 1.")]
                #[track_caller]
                pub fn $keep(&self, axes: impl Axes) -> Tensor {
                    self.reduce_keepdim(ReduceKind::$kind, axes)
                }
            )*
        }
    };
}
reductions! {
    /// Sum over axes (`..`: all). 16-bit floats are summed in f32.
    sum sum_keepdim Sum,
    /// Product over axes.
    prod prod_keepdim Prod,
    /// Largest element over axes; NaN if any element is NaN. For bools: whether any element is true.
    /// ([`Tensor::maximum`] compares two tensors.)
    max max_keepdim Max,
    /// Smallest element over axes; NaN if any element is NaN. For bools: whether all elements are true.
    /// ([`Tensor::minimum`] compares two tensors.)
    min min_keepdim Min,
}

macro_rules! arg {
    ($($(#[$m:meta])* $n:ident $keep:ident $max:literal),* $(,)?) => {
        impl Tensor {
            $(
                $(#[$m])*
                #[track_caller]
                pub fn $n(&self, axis: i64) -> Tensor {
                    self.arg_reduce($max, axis, false)
                }
                #[doc = concat!("[`Tensor::", stringify!($n), "`] with the axis kept, of size 1.")]
                #[track_caller]
                pub fn $keep(&self, axis: i64) -> Tensor {
                    self.arg_reduce($max, axis, true)
                }
            )*
        }
    };
}
arg! {
    /// Index (i64) of the first largest element along an axis. NaN counts as the largest.
    argmax argmax_keepdim true,
    /// Index (i64) of the first smallest element along an axis. NaN counts as the smallest.
    argmin argmin_keepdim false,
}

impl Tensor {
    /// A reduction over axes, which are removed.
    #[track_caller]
    pub fn reduce(&self, kind: ReduceKind, axes: impl Axes) -> Tensor {
        self.reduced(kind, axes.axes(), false)
    }

    /// A reduction over axes, which are kept with size 1.
    #[track_caller]
    pub fn reduce_keepdim(&self, kind: ReduceKind, axes: impl Axes) -> Tensor {
        self.reduced(kind, axes.axes(), true)
    }

    #[track_caller]
    fn reduced(&self, kind: ReduceKind, axes: &[i64], keep: bool) -> Tensor {
        Tensor::build(&[self], |g, x| {
            let a = reduced(g, kind.name(), x[0], axes)?;
            g.reduce(kind, x[0], &a, keep)
        })
    }

    #[track_caller]
    fn arg_reduce(&self, max: bool, axis: i64, keep: bool) -> Tensor {
        Tensor::build(&[self], |g, x| {
            let a = g.shape(x[0]).axis(axis)?;
            g.argreduce(max, x[0], a, keep, false)
        })
    }

    /// Mean over axes (`..`: all). The dtype must be a float.
    #[track_caller]
    pub fn mean(&self, axes: impl Axes) -> Tensor {
        self.mean_of(axes.axes(), false)
    }

    /// [`Tensor::mean`] with the reduced axes kept, of size 1.
    #[track_caller]
    pub fn mean_keepdim(&self, axes: impl Axes) -> Tensor {
        self.mean_of(axes.axes(), true)
    }

    #[track_caller]
    fn mean_of(&self, axes: &[i64], keep: bool) -> Tensor {
        Tensor::build(&[self], |g, x| {
            let a = reduced(g, "mean", x[0], axes)?;
            g.mean(x[0], &a, keep)
        })
    }

    /// Variance over axes, estimated from a sample as with [`Variance::default`]: the sum of the squared
    /// distances from the mean is divided by the number of elements minus one. NaN for one element.
    #[track_caller]
    pub fn var(&self, axes: impl Axes) -> Tensor {
        self.var_with(axes, Variance::default())
    }

    /// [`Tensor::var`] with the reduced axes kept, of size 1.
    #[track_caller]
    pub fn var_keepdim(&self, axes: impl Axes) -> Tensor {
        self.var_with(axes, Variance { keepdim: true, ..Variance::default() })
    }

    /// Variance over axes, of floats. If `correction` is not less than the number of elements, the result is
    /// NaN or infinite.
    #[track_caller]
    pub fn var_with(&self, axes: impl Axes, options: Variance) -> Tensor {
        Tensor::build(&[self], |g, x| variance(g, x[0], axes.axes(), options))
    }

    /// Standard deviation over axes: the square root of [`Tensor::var`].
    #[track_caller]
    pub fn std(&self, axes: impl Axes) -> Tensor {
        self.std_with(axes, Variance::default())
    }

    /// [`Tensor::std`] with the reduced axes kept, of size 1.
    #[track_caller]
    pub fn std_keepdim(&self, axes: impl Axes) -> Tensor {
        self.std_with(axes, Variance { keepdim: true, ..Variance::default() })
    }

    /// Standard deviation over axes: the square root of [`Tensor::var_with`].
    #[track_caller]
    pub fn std_with(&self, axes: impl Axes, options: Variance) -> Tensor {
        Tensor::build(&[self], |g, x| {
            let v = variance(g, x[0], axes.axes(), options)?;
            g.sqrt(v)
        })
    }

    /// Indices (i64) that sort the elements along an axis. The sort is stable; NaN sorts as the largest.
    #[track_caller]
    pub fn argsort(&self, axis: i64, order: Order) -> Tensor {
        Tensor::build(&[self], |g, x| {
            let a = g.shape(x[0]).axis(axis)?;
            g.argsort(x[0], a, order == Order::Descending)
        })
    }

    /// Cumulative reduction along an axis.
    #[track_caller]
    pub fn scan(&self, kind: ReduceKind, axis: i64, options: Scan) -> Tensor {
        Tensor::build(&[self], |g, x| {
            let a = g.shape(x[0]).axis(axis)?;
            g.scan(kind, x[0], a, options.exclusive, options.reverse)
        })
    }

    /// Cumulative sum along an axis.
    #[track_caller]
    pub fn cumsum(&self, axis: i64) -> Tensor {
        self.scan(ReduceKind::Sum, axis, Scan::default())
    }
}

/// Sums the squared distances from the mean, so that a large mean loses no digits. 16-bit floats compute in
/// f32.
fn variance(g: &mut Graph, x: NodeId, axes: &[i64], o: Variance) -> Result<NodeId> {
    let (dtype, axes) = (g.dtype(x), reduced(g, "var", x, axes)?);
    let w = if dtype.is_float() { g.cast(x, dtype.compute())? } else { x };
    let m = g.mean(w, &axes, true)?;
    let d = g.sub(w, m)?;
    let q = g.mul(d, d)?;
    let s = g.sum(q, &axes, o.keepdim)?;
    let n = axes.iter().try_fold(1usize, |n, k| g.shape(x)[*k].known().and_then(|d| n.checked_mul(d)));
    let n =
        n.ok_or_else(|| Error::unsupported("a variance over symbolic dimensions", "Bind the sizes first"))?;
    let by = g.lit(s, n.saturating_sub(o.correction) as f64);
    let v = g.div(s, by)?;
    g.cast(v, dtype)
}
