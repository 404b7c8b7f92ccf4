//! Operations that reshape, reorder, join or select elements.

use super::reduce::axes_of;
use crate::tensor::Tensor;
use halcyon_ir::NodeId;
use halcyon_ir::dtype::Scalar;
use halcyon_ir::error::{Error, Result};
use halcyon_ir::graph::Graph;
use halcyon_ir::ops::ScatterKind;
use halcyon_ir::shape::{Dim, Dims, Shape};
use std::borrow::Borrow;

/// A size in [`Tensor::reshape`]: a number, a symbol, or -1 for the size that follows from the others.
pub trait Extent: Clone {
    /// The size; `None` stands for -1.
    fn extent(self) -> Result<Option<Dim>>;
}

impl Extent for usize {
    fn extent(self) -> Result<Option<Dim>> {
        Ok(Some(Dim::from(self)))
    }
}
impl Extent for i64 {
    fn extent(self) -> Result<Option<Dim>> {
        match usize::try_from(self) {
            Ok(n) => Ok(Some(Dim::from(n))),
            Err(_) if self == -1 => Ok(None),
            Err(_) => {
                Err(Error::argument("reshape", format!("{self} is not a size; only -1 may be negative")))
            }
        }
    }
}
impl Extent for i32 {
    fn extent(self) -> Result<Option<Dim>> {
        i64::from(self).extent()
    }
}
impl Extent for Dim {
    fn extent(self) -> Result<Option<Dim>> {
        Ok(Some(self))
    }
}
impl Extent for &str {
    fn extent(self) -> Result<Option<Dim>> {
        Ok(Some(Dim::from(self)))
    }
}

/// The argument of [`Tensor::reshape`]: a [`Shape`], or a list of sizes, at most one of them -1.
pub trait Extents {
    fn extents(self) -> Result<Vec<Option<Dim>>>;
}

fn all<E: Extent>(v: impl IntoIterator<Item = E>) -> Result<Vec<Option<Dim>>> {
    v.into_iter().map(Extent::extent).collect()
}

impl<E: Extent, const N: usize> Extents for [E; N] {
    fn extents(self) -> Result<Vec<Option<Dim>>> {
        all(self)
    }
}
impl<E: Extent, const N: usize> Extents for &[E; N] {
    fn extents(self) -> Result<Vec<Option<Dim>>> {
        all(self.iter().cloned())
    }
}
impl<E: Extent> Extents for &[E] {
    fn extents(self) -> Result<Vec<Option<Dim>>> {
        all(self.iter().cloned())
    }
}
impl<E: Extent> Extents for Vec<E> {
    fn extents(self) -> Result<Vec<Option<Dim>>> {
        all(self)
    }
}
impl Extents for Shape {
    fn extents(self) -> Result<Vec<Option<Dim>>> {
        Ok(self.iter().map(|d| Some(*d)).collect())
    }
}
impl Extents for &Shape {
    fn extents(self) -> Result<Vec<Option<Dim>>> {
        self.clone().extents()
    }
}
impl Extents for &Dims {
    fn extents(self) -> Result<Vec<Option<Dim>>> {
        all(self.iter().copied())
    }
}

/// The new shape of a tensor of shape `from`: `want`, with -1 replaced by the size that follows from the
/// others.
fn resolve_shape(from: &Shape, want: Vec<Option<Dim>>) -> Result<Shape> {
    let holes = want.iter().filter(|d| d.is_none()).count();
    if holes == 0 {
        return Ok(want.into_iter().flatten().collect());
    }
    let text: Vec<String> = want.iter().map(|d| d.as_ref().map_or("-1".into(), |d| d.to_string())).collect();
    let bad = |what: &str| Error::shape("reshape", format!("{from} to [{}]: {what}", text.join(", ")));
    if holes > 1 {
        return Err(bad("only one size can be -1"));
    }
    let rest = want.iter().flatten().fold(Dim::from(1), |a, d| a.mul(*d));
    let n = from.numel();
    let open = match (n.known(), rest.known()) {
        (_, Some(0)) => return Err(bad("the size -1 is not determined, because another size is 0")),
        (Some(n), Some(rest)) if n % rest != 0 => {
            return Err(bad(&format!("{n} elements are not divisible by {rest}")));
        }
        (Some(n), Some(rest)) => Dim::from(n / rest),
        _ => n.div(rest)?,
    };
    Ok(want.into_iter().map(|d| d.unwrap_or(open)).collect())
}

/// Resolves the position of an axis that is about to be inserted.
fn new_axis(g: &Graph, op: &str, x: NodeId, axis: i64) -> Result<usize> {
    let n = g.shape(x).rank() as i64 + 1;
    let a = if axis < 0 { axis + n } else { axis };
    usize::try_from(a).ok().filter(|a| (*a as i64) < n).ok_or_else(|| {
        Error::shape(op, format!("axis {axis} is outside -{n}..{n} for a new axis of {}", g.shape(x)))
    })
}

fn operands<T: Borrow<Tensor>>(x: &[T]) -> Vec<&Tensor> {
    x.iter().map(Borrow::borrow).collect()
}

impl Tensor {
    /// The same elements in row-major order with another shape. At most one size may be -1: it is computed
    /// from the others, as in `x.reshape([-1, 4])`.
    ///
    /// # Errors
    /// [`Error::Shape`] if the numbers of elements differ or the size -1 is not determined;
    /// [`Error::Argument`] for a size below -1.
    #[track_caller]
    pub fn reshape(&self, shape: impl Extents) -> Tensor {
        Tensor::build(&[self], |g, x| {
            let s = resolve_shape(g.shape(x[0]), shape.extents()?)?;
            g.reshape(x[0], s)
        })
    }

    /// Joins the axes from `start` to `end`, inclusive, into one.
    ///
    /// # Errors
    /// [`Error::Shape`] if an axis does not exist or `end` comes before `start`.
    #[track_caller]
    pub fn flatten(&self, start: i64, end: i64) -> Tensor {
        Tensor::build(&[self], |g, x| {
            let s = g.shape(x[0]).clone();
            if s.rank() == 0 && matches!((start, end), (0 | -1, 0 | -1)) {
                return g.reshape(x[0], [1usize]);
            }
            let (a, b) = (s.axis(start)?, s.axis(end)?);
            if a > b {
                let what = format!("axis {start} of {s} comes after axis {end}");
                return Err(Error::shape("flatten", what));
            }
            let one = s[a..=b].iter().fold(Dim::from(1), |n, d| n.mul(*d));
            let to: Shape = s[..a].iter().chain([&one]).chain(&s[b + 1..]).copied().collect();
            g.reshape(x[0], to)
        })
    }

    /// All elements as one axis, in row-major order.
    #[track_caller]
    pub fn flatten_all(&self) -> Tensor {
        self.flatten(0, -1)
    }

    /// Axis `k` of the result is axis `axes[k]` of the operand.
    #[track_caller]
    pub fn permute(&self, axes: &[i64]) -> Tensor {
        Tensor::build(&[self], |g, x| {
            let k = axes_of(g, x[0], axes)?;
            g.permute(x[0], &k)
        })
    }

    /// Swaps two axes.
    #[track_caller]
    pub fn transpose(&self, a: i64, b: i64) -> Tensor {
        Tensor::build(&[self], |g, x| {
            let k = axes_of(g, x[0], &[a, b])?;
            g.transpose(x[0], k[0], k[1])
        })
    }

    /// The transposed matrix; tensors of rank 0 or 1 are returned unchanged.
    ///
    /// # Errors
    /// [`Error::Shape`] for more than two axes; then use [`Tensor::transpose`].
    #[track_caller]
    pub fn t(&self) -> Tensor {
        Tensor::build(&[self], |g, x| match g.shape(x[0]).rank() {
            0 | 1 => Ok(x[0]),
            2 => g.transpose(x[0], 0, 1),
            _ => {
                let what =
                    format!("{} is not a matrix; transpose(-1, -2) swaps the last two axes", g.shape(x[0]));
                Err(Error::shape("t", what))
            }
        })
    }

    /// Broadcasts to a shape, as in NumPy.
    #[track_caller]
    pub fn expand(&self, shape: impl Into<Shape>) -> Tensor {
        let s = shape.into();
        Tensor::build(&[self], |g, x| g.expand(x[0], &s))
    }

    /// Strided slice: on every axis `k`, `len[k]` elements from `start[k]` in steps of `step[k]`.
    #[track_caller]
    pub fn slice(&self, start: &[usize], step: &[i64], len: &[usize]) -> Tensor {
        let d = |v: &[usize]| v.iter().map(|n| Dim::from(*n)).collect::<Vec<_>>();
        let (s, l) = (d(start), d(len));
        Tensor::build(&[self], |g, x| g.slice(x[0], &s, step, &l))
    }

    /// Reverses the order of elements along axes.
    #[track_caller]
    pub fn flip(&self, axes: &[i64]) -> Tensor {
        Tensor::build(&[self], |g, x| {
            let a = axes_of(g, x[0], axes)?;
            g.flip(x[0], &a)
        })
    }

    /// Pads every axis `k` with `lo[k]` elements of `value` before and `hi[k]` after.
    #[track_caller]
    pub fn pad(&self, lo: &[usize], hi: &[usize], value: impl Into<Scalar>) -> Tensor {
        let v = value.into();
        Tensor::build(&[self], |g, x| g.pad(x[0], lo, hi, v))
    }

    /// Inserts an axis of size 1 at position `axis` of the result (-1: last).
    #[track_caller]
    pub fn unsqueeze(&self, axis: i64) -> Tensor {
        Tensor::build(&[self], |g, x| {
            let a = new_axis(g, "unsqueeze", x[0], axis)?;
            g.unsqueeze(x[0], a)
        })
    }

    /// Removes an axis of size 1.
    #[track_caller]
    pub fn squeeze(&self, axis: i64) -> Tensor {
        Tensor::build(&[self], |g, x| {
            let a = g.shape(x[0]).axis(axis)?;
            g.squeeze(x[0], a)
        })
    }

    /// Concatenates tensors along an existing axis.
    #[track_caller]
    pub fn cat<T: Borrow<Tensor>>(x: &[T], axis: i64) -> Tensor {
        Tensor::build(&operands(x), |g, x| {
            let a = g.shape(x[0]).axis(axis)?;
            g.concat(x, a)
        })
    }

    /// Joins tensors of equal shape along a new axis, at position `axis` of the result.
    #[track_caller]
    pub fn stack<T: Borrow<Tensor>>(x: &[T], axis: i64) -> Tensor {
        Tensor::build(&operands(x), |g, x| {
            let a = new_axis(g, "stack", x[0], axis)?;
            for y in x {
                if g.shape(*y) != g.shape(x[0]) {
                    let what = format!("the shapes {} and {} differ", g.shape(x[0]), g.shape(*y));
                    return Err(Error::shape("stack", what));
                }
            }
            let wide: Vec<NodeId> = x.iter().map(|y| g.unsqueeze(*y, a)).collect::<Result<_>>()?;
            g.concat(&wide, a)
        })
    }

    /// Selects elements along `axis` by an integer tensor, whose axes replace `axis`:
    /// `out[a…, i…, b…] = x[a…, index[i…], b…]`. Negative indices count from the end; indices out of range
    /// are reported when the result is read.
    #[track_caller]
    pub fn gather(&self, index: &Tensor, axis: i64) -> Tensor {
        Tensor::build(&[self, index], |g, x| {
            let a = g.shape(x[0]).axis(axis)?;
            g.gather(x[0], x[1], a)
        })
    }

    /// Selects element by element along `axis`: `out[i…] = x[i… with i_axis = index[i…]]`.
    #[track_caller]
    pub fn gather_elements(&self, index: &Tensor, axis: i64) -> Tensor {
        Tensor::build(&[self, index], |g, x| {
            let a = g.shape(x[0]).axis(axis)?;
            g.gather_elements(x[0], x[1], a)
        })
    }

    /// A copy of this tensor with `updates` combined into it element by element: `index`, of the same shape
    /// as `updates`, gives the position along `axis`, and `kind` is the way to combine them.
    #[track_caller]
    pub fn scatter_elements(&self, index: &Tensor, updates: &Tensor, axis: i64, kind: ScatterKind) -> Tensor {
        Tensor::build(&[self, index, updates], |g, x| {
            let a = g.shape(x[0]).axis(axis)?;
            g.scatter_elements(x[0], x[1], x[2], a, kind)
        })
    }

    /// A copy of this tensor with `updates` combined into the rows that `index` names along `axis`, as `kind`
    /// describes. `updates` has the shape of `Tensor::gather`'s result for this `index`.
    #[track_caller]
    pub fn scatter_rows(&self, index: &Tensor, updates: &Tensor, axis: i64, kind: ScatterKind) -> Tensor {
        Tensor::build(&[self, index, updates], |g, x| {
            let a = g.shape(x[0]).axis(axis)?;
            g.scatter_rows(x[0], x[1], x[2], a, kind)
        })
    }

    /// A copy of this tensor with `update` written along `axis` at `position`, an integer of rank 0 computed
    /// at run time. The position must not be negative. If `update` does not fit at the position, reading the
    /// result returns an error.
    #[track_caller]
    pub fn update_slice(&self, update: &Tensor, position: &Tensor, axis: i64) -> Tensor {
        Tensor::build(&[self, update, position], |g, x| {
            let a = g.shape(x[0]).axis(axis)?;
            g.update_slice(x[0], x[1], x[2], a)
        })
    }
}
