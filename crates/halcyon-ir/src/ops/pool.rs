//! Pools over windows, and their gradients.

use super::conv::Window;
use super::{
    Cost, Facts, IndexRange, Lowering, MixedRole, Moves, Op, ReduceKind, Rewrite, Rounding, Rules, Types,
    checked_count, count,
};
use crate::dtype::DType;
use crate::error::Result;
use crate::grad::{Backward, Gradient};
use crate::kernel::lower::{KernelCall, Lowered, Template};
use crate::kernel::templates;
use crate::layout::Restride;
use crate::reference::{Eval, Tensor, Vals, fold_f, fold_i, mixed, of_scalar, order, window};
use crate::shape::{Shape, TensorType};
use crate::target::{Declined, Operand};
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;
use std::cmp::Ordering;

/// The kind of a pool.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub enum PoolKind {
    /// The maximum. Padding is never the maximum. A window that lies completely in the padding gives -inf (or
    /// the type's lowest value).
    Max,
    /// Mean over the window's elements inside the input, or, with `count_include_pad`, over the whole padded
    /// window.
    Avg { count_include_pad: bool },
}

/// Pooling over the trailing axes of `[n, c, i…]`. An axis of size `i` with the padding `(lo, hi)` and the
/// kernel size `k` gives an axis of size `(i + lo + hi - ((k-1)*dilation+1)) / stride + 1`.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct Pool {
    pub kind: PoolKind,
    pub kernel: SmallVec<[usize; 3]>,
    pub stride: SmallVec<[usize; 3]>,
    pub pad: SmallVec<[(usize, usize); 3]>,
    pub dilation: SmallVec<[usize; 3]>,
}

impl Pool {
    fn of(kind: PoolKind, kernel: &[usize]) -> Pool {
        let n = kernel.len();
        Pool {
            kind,
            kernel: kernel.into(),
            stride: kernel.into(),
            pad: SmallVec::from_elem((0, 0), n),
            dilation: SmallVec::from_elem(1, n),
        }
    }

    /// Maximum over non-overlapping windows (stride = kernel size), without padding: `Pool::max([2, 2])`.
    pub fn max(kernel: impl AsRef<[usize]>) -> Pool {
        Pool::of(PoolKind::Max, kernel.as_ref())
    }

    /// Mean over non-overlapping windows (stride = kernel size). Padding is not counted.
    pub fn avg(kernel: impl AsRef<[usize]>) -> Pool {
        Pool::of(PoolKind::Avg { count_include_pad: false }, kernel.as_ref())
    }

    /// Sets the stride, one entry per spatial axis.
    pub fn stride(mut self, stride: impl AsRef<[usize]>) -> Pool {
        self.stride = stride.as_ref().into();
        self
    }

    /// Sets the padding, the same on both sides of each spatial axis.
    pub fn padding(mut self, padding: impl AsRef<[usize]>) -> Pool {
        self.pad = padding.as_ref().iter().map(|n| (*n, *n)).collect();
        self
    }

    /// Sets the distance between the window's elements along each spatial axis.
    pub fn dilation(mut self, dilation: impl AsRef<[usize]>) -> Pool {
        self.dilation = dilation.as_ref().into();
        self
    }
}

const TEMPLATE: Template = Template { lower: templates::pool::lower, tuning: None };

/// The facts of a pool and of its gradient.
fn facts(moves: Moves, identity: Option<ReduceKind>) -> Facts {
    Facts {
        lowering: Lowering::Step,
        moves,
        identity,
        packs: false,
        in_place: false,
        summed: None,
        template: Some(&TEMPLATE),
    }
}

impl Rules for Pool {
    fn name(&self) -> String {
        if self.kind == PoolKind::Max { "max_pool" } else { "avg_pool" }.into()
    }
    fn attributes(&self) -> String {
        format!(
            "kernel {:?}, stride {:?}, pad {:?}, dilation {:?}",
            self.kernel, self.stride, self.pad, self.dilation
        )
    }
    fn facts(&self) -> Facts {
        match self.kind {
            PoolKind::Max => facts(Moves::Compared(&[0]), Some(ReduceKind::Max)),
            PoolKind::Avg { .. } => facts(Moves::Nothing, None),
        }
    }
    fn infer(&self, t: &Types<'_>) -> Result<TensorType> {
        t.arity(1)?;
        let (i, d, n) = (&t.x[0].shape, t.x[0].dtype, self.kernel.len());
        if i.rank() != n + 2 || [self.stride.len(), self.pad.len(), self.dilation.len()] != [n; 3] {
            return Err(t.shape(format!(
                "input {i}: expected 2 + {n} axes, and {n} strides, paddings and dilations"
            )));
        }
        if d == DType::Bool || (!d.is_float() && self.kind != PoolKind::Max) {
            return Err(t.dtype(d, "a float type is needed"));
        }
        let mut shape = Shape::from(vec![i[0], i[1]]);
        for k in 0..n {
            let window = Window {
                kernel: self.kernel[k],
                pad: (t.amount(self.pad[k].0)?, t.amount(self.pad[k].1)?),
                stride: self.stride[k],
                dilation: self.dilation[k],
                input_dilation: 1,
            };
            shape.0.push(window.count(t, i[k + 2])?);
        }
        Ok(TensorType { dtype: d, shape })
    }
    fn rewrite(&self, _: &Rewrite<'_>) -> Result<Op> {
        Ok(Op::Pool(self.clone()))
    }
    fn reference(&self, e: &Eval<'_>) -> Result<Tensor> {
        e.made(forward(self, e.x[0], &e.dims))
    }
    fn gradient(&self, b: &mut Backward<'_>) -> Result<Gradient> {
        let d = b.g.push(Op::PoolGrad(self.clone()), &[b.x(0), b.id, b.dy], None)?;
        Ok(b.only(d))
    }
    fn cost(&self, inputs: &[Operand], output: &Operand) -> Cost {
        let flops = (output.view.numel() as u64).saturating_mul(count(&self.kernel));
        Cost::reading_all(flops, inputs, output)
    }
    fn terms(&self, _: &[&[usize]]) -> Option<usize> {
        checked_count(&self.kernel)
    }
    fn index_range(&self, _: &[Operand]) -> Option<IndexRange> {
        None
    }
    fn rounding(&self, _: &[&TensorType], y: &TensorType) -> Rounding {
        match self.kind {
            PoolKind::Max => Rounding::Moves { with: Op::Pool(self.clone()), clamp: true },
            PoolKind::Avg { .. } if y.dtype.is_float() => {
                Rounding::Linear { terms: self.kernel.iter().product() }
            }
            PoolKind::Avg { .. } => Rounding::Exact,
        }
    }
    fn mixed(&self, _: DType, _: &[DType], _: DType) -> MixedRole {
        // An average sums in f32, so only its result is rounded.
        MixedRole::Moves { tables: false }
    }
    fn restride(&self, _: &[usize]) -> Option<Restride> {
        None
    }
    fn kernels(&self, call: &KernelCall<'_>) -> Result<Lowered, Declined> {
        Err(call.no_template())
    }
}

pub(super) struct PoolGrad<'a>(pub &'a Pool);

impl Rules for PoolGrad<'_> {
    fn name(&self) -> String {
        if self.0.kind == PoolKind::Max { "max_pool_grad" } else { "avg_pool_grad" }.into()
    }
    fn attributes(&self) -> String {
        self.0.attributes()
    }
    fn facts(&self) -> Facts {
        facts(Moves::Nothing, None)
    }
    fn infer(&self, t: &Types<'_>) -> Result<TensorType> {
        t.arity(3)?;
        let y = Op::Pool(self.0.clone()).infer(&t.x[..1], None)?;
        if *t.x[1] != y || *t.x[2] != y {
            return Err(t.shape(format!("y {} and dy {} must have the type {y}", t.x[1], t.x[2])));
        }
        Ok(t.x[0].clone())
    }
    fn rewrite(&self, _: &Rewrite<'_>) -> Result<Op> {
        Ok(Op::PoolGrad(self.0.clone()))
    }
    fn reference(&self, e: &Eval<'_>) -> Result<Tensor> {
        e.made(backward(self.0, e.x[0], e.x[1], e.x[2])?)
    }
    fn gradient(&self, b: &mut Backward<'_>) -> Result<Gradient> {
        if self.0.kind == PoolKind::Max {
            return Err(b.unsupported(
                "the second gradient of max_pool",
                "Write the pool as slices and max where it is differentiated twice",
            ));
        }
        // The gradient is linear in dy, and its derivatives with respect to x and y are zero.
        let mut out = b.no_grads();
        out[2] = Some(b.g.pool(b.dy, self.0.clone())?);
        Ok(Gradient::Of(out))
    }
    fn cost(&self, inputs: &[Operand], output: &Operand) -> Cost {
        let windows = inputs.get(1).map_or(0, |y| y.view.numel() as u64);
        Cost::reading_all(windows.saturating_mul(count(&self.0.kernel)), inputs, output)
    }
    fn terms(&self, x: &[&[usize]]) -> Option<usize> {
        self.0.terms(x)
    }
    fn index_range(&self, _: &[Operand]) -> Option<IndexRange> {
        None
    }
    fn rounding(&self, _: &[&TensorType], _: &TensorType) -> Rounding {
        Rounding::OfLargest { units: 8.0 }
    }
    fn mixed(&self, _: DType, _: &[DType], _: DType) -> MixedRole {
        // If windows do not overlap, each element gets the gradient of at most one window, so nothing is
        // summed.
        let separate = self.0.kernel.iter().zip(&self.0.stride).all(|(k, s)| s >= k)
            && self.0.dilation.iter().all(|d| *d == 1);
        if self.0.kind == PoolKind::Max && separate { MixedRole::Follows } else { MixedRole::Wide }
    }
    fn restride(&self, _: &[usize]) -> Option<Restride> {
        None
    }
    fn kernels(&self, call: &KernelCall<'_>) -> Result<Lowered, Declined> {
        Err(call.no_template())
    }
}

fn taps(p: &Pool, i: &[usize], y: &[usize]) -> window::Taps {
    let axes: Vec<window::Axis> = (0..p.kernel.len())
        .map(|k| window::Axis {
            i: i[k + 2],
            k: p.kernel[k],
            y: y[k + 2],
            stride: p.stride[k],
            dilation: p.dilation[k],
            input_dilation: 1,
            lo: p.pad[k].0 as i64,
        })
        .collect();
    window::Taps::new(&axes)
}

/// Number of elements that each window averages over.
fn counts(t: &window::Taps, include_pad: bool) -> Vec<f64> {
    (0..t.out)
        .map(|o| (0..t.kernels()).filter(|k| include_pad || t.kernel(*k)[o].is_some()).count().max(1) as f64)
        .collect()
}

fn forward(p: &Pool, x: &Tensor, out: &[usize]) -> Vals {
    let t = taps(p, &x.dims, out);
    let planes = out[0] * out[1];
    let size: usize = x.dims[2..].iter().product();
    fn fold<T: Copy>(
        t: &window::Taps,
        planes: usize,
        size: usize,
        x: &[T],
        first: T,
        f: impl Fn(T, T) -> T,
    ) -> Vec<T> {
        let mut y = vec![first; planes * t.out];
        for n in 0..planes {
            for k in 0..t.kernels() {
                for (o, q) in t.kernel(k).iter().enumerate() {
                    if let Some(q) = q {
                        let y = &mut y[n * t.out + o];
                        *y = f(*y, x[n * size + q]);
                    }
                }
            }
        }
        y
    }
    let first = ReduceKind::Max.identity(x.dtype);
    match (&x.v, p.kind) {
        (Vals::F(v), PoolKind::Max) => {
            Vals::F(fold(&t, planes, size, v, first.as_f64(), fold_f(ReduceKind::Max)))
        }
        (Vals::I(v), _) => {
            Vals::I(fold(&t, planes, size, v, of_scalar(first), fold_i(ReduceKind::Max, x.dtype)))
        }
        (Vals::F(v), PoolKind::Avg { count_include_pad }) => {
            let c = counts(&t, count_include_pad);
            let mut y = fold(&t, planes, size, v, 0.0, |a, b| a + b);
            y.iter_mut().enumerate().for_each(|(i, y)| *y /= c[i % t.out]);
            Vals::float(x.dtype, y)
        }
    }
}

fn backward(p: &Pool, x: &Tensor, y: &Tensor, dy: &Tensor) -> Result<Vals> {
    let Vals::F(g) = &dy.v else {
        return Err(mixed());
    };
    let t = taps(p, &x.dims, &y.dims);
    let size: usize = x.dims[2..].iter().product();
    let mut dx = vec![0.0; x.dims.iter().product()];
    let cmp = order(x);
    match p.kind {
        PoolKind::Avg { count_include_pad } => {
            let c = counts(&t, count_include_pad);
            for (i, g) in g.iter().enumerate() {
                for k in 0..t.kernels() {
                    if let Some(q) = t.kernel(k)[i % t.out] {
                        dx[i / t.out * size + q] += g / c[i % t.out];
                    }
                }
            }
        }
        PoolKind::Max => {
            for (i, g) in g.iter().enumerate() {
                // The first of several equal largest elements is used. NaN counts as the largest.
                let best = (0..t.kernels())
                    .filter_map(|k| t.kernel(k)[i % t.out])
                    .map(|q| i / t.out * size + q)
                    .reduce(|a, b| if cmp(b, a) == Ordering::Greater { b } else { a });
                if let Some(b) = best {
                    dx[b] += g;
                }
            }
        }
    }
    Ok(Vals::float(x.dtype, dx))
}
