//! The primitive operations of a graph, their attributes and their type rules.
//!
//! Every op has one output. Operands of [`Op::Scalar`] have equal shapes; the graph's builder inserts
//! [`Op::Expand`] to broadcast. Norms, softmax, gelu, attention and similar functions are composites
//! (`crate::composite`).

use crate::composite::Composite;
use crate::custom::Custom;
use crate::data::ConstData;
use crate::dtype::{DType, Scalar};
use crate::error::{Error, Result};
use crate::scalar_op::{Rule, ScalarOp};
use crate::shape::{Dim, Shape, TensorType};
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;
use std::sync::Arc;

/// Axis indices.
pub type Axes = SmallVec<[usize; 4]>;

/// The op name in errors about labels.
pub const CROSS_ENTROPY: &str = "cross_entropy";

/// The combining operation of a reduction or scan.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord, Serialize, Deserialize)]
pub enum ReduceKind {
    Sum,
    Prod,
    /// Propagates NaN. On bool: any.
    Max,
    /// Propagates NaN. On bool: all.
    Min,
}

impl ReduceKind {
    pub fn name(self) -> &'static str {
        ["sum", "prod", "max", "min"][self as usize]
    }

    /// The scalar op that combines two partial results.
    pub fn op(self, dtype: DType) -> ScalarOp {
        match (self, dtype) {
            (ReduceKind::Sum, DType::Bool) => ScalarOp::Or,
            (ReduceKind::Prod, DType::Bool) => ScalarOp::And,
            (ReduceKind::Sum, _) => ScalarOp::Add,
            (ReduceKind::Prod, _) => ScalarOp::Mul,
            (ReduceKind::Max, _) => ScalarOp::Max,
            (ReduceKind::Min, _) => ScalarOp::Min,
        }
    }

    /// The result of reducing no elements.
    pub fn identity(self, dtype: DType) -> Scalar {
        let (lo, hi) = dtype.range();
        match self {
            ReduceKind::Sum => Scalar::I(0).cast(dtype),
            ReduceKind::Prod => Scalar::I(1).cast(dtype),
            ReduceKind::Max => Scalar::F(lo).cast(dtype),
            ReduceKind::Min => Scalar::F(hi).cast(dtype),
        }
    }
}

/// Convolution of input `[n, c, i…]` with weight `[o, c/groups, k…]`. The result is `[n, o, y…]` with `y =
/// (((i-1)*input_dilation+1) + lo + hi - ((k-1)*dilation+1)) / stride + 1`. Padding is with zeros; negative
/// padding crops. It is a cross-correlation, as in ONNX `Conv`. Each vector has one entry per spatial axis.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct Conv {
    pub stride: SmallVec<[usize; 3]>,
    pub pad: SmallVec<[(i64, i64); 3]>,
    pub dilation: SmallVec<[usize; 3]>,
    /// One plus the number of zeros inserted between input elements (1 = none). Values above 1 give the
    /// transposed convolution.
    pub input_dilation: SmallVec<[usize; 3]>,
    pub groups: usize,
}

impl Conv {
    /// A convolution over `spatial` axes with stride and dilation 1, no padding and one group.
    pub fn new(spatial: usize) -> Conv {
        Conv {
            stride: SmallVec::from_elem(1, spatial),
            pad: SmallVec::from_elem((0, 0), spatial),
            dilation: SmallVec::from_elem(1, spatial),
            input_dilation: SmallVec::from_elem(1, spatial),
            groups: 1,
        }
    }

    /// Sets the stride, one entry per spatial axis: `Conv::new(2).stride([2, 2]).padding([1, 1]).groups(4)`.
    pub fn stride(mut self, stride: impl AsRef<[usize]>) -> Conv {
        self.stride = stride.as_ref().into();
        self
    }

    /// Sets the zero padding, the same on both sides of each spatial axis.
    pub fn padding(mut self, padding: impl AsRef<[usize]>) -> Conv {
        let both = |n: &usize| i64::try_from(*n).unwrap_or(i64::MAX);
        self.pad = padding.as_ref().iter().map(|n| (both(n), both(n))).collect();
        self
    }

    /// Sets the zero padding `(before, after)` of each spatial axis. Negative values crop.
    pub fn padding_each(mut self, padding: impl AsRef<[(i64, i64)]>) -> Conv {
        self.pad = padding.as_ref().into();
        self
    }

    /// Sets the distance between the weight's elements along each spatial axis.
    pub fn dilation(mut self, dilation: impl AsRef<[usize]>) -> Conv {
        self.dilation = dilation.as_ref().into();
        self
    }

    /// Sets the number of groups. Each group of output channels reads only its own group of input channels.
    pub fn groups(mut self, groups: usize) -> Conv {
        self.groups = groups;
        self
    }
}

/// The kind of a pool.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub enum PoolKind {
    /// Padding never wins. A window wholly in the padding gives -inf (or the type's lowest value).
    Max,
    /// Mean over the window's elements inside the input, or, with `count_include_pad`, over the whole padded
    /// window.
    Avg { count_include_pad: bool },
}

/// Pooling over the trailing axes of `[n, c, i…]`; `y = (i + lo + hi - ((k-1)*dilation+1)) / stride + 1`.
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

/// How a scatter combines an update with the base element. Variants other than `Set` are reductions.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub enum ScatterKind {
    /// The last update in index order wins.
    Set,
    Add,
    Mul,
    Max,
    Min,
}

/// Start and step of a slice along one axis. `start` may be symbolic.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct SliceAxis {
    pub start: Dim,
    /// Non-zero. A negative step walks down from `start`.
    pub step: i64,
}

/// What a node computes. [`Op::infer`] is its type rule.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub enum Op {
    /// Run-time tensor. The number is its index among the graph's inputs.
    Input(u32),
    /// Run-time scalar argument (rank 0). The number is its index among the graph's arguments. A new value
    /// never causes recompilation.
    Arg(u32),
    /// Constant data such as weights, read lazily.
    Const(ConstData),
    /// A tensor of the node's type filled with one value. Kernels receive the value as an argument.
    Full(Scalar),
    /// The index along `axis`, as an integer or float type.
    Iota {
        axis: usize,
    },
    Scalar(ScalarOp),
    /// Converts to the node's dtype by the rules of [`Scalar::cast`].
    Cast,
    /// Reinterprets the bits as a dtype of equal size.
    Bitcast,
    /// Reduces over `axes` (sorted). `keep` keeps them as axes of size 1.
    Reduce {
        kind: ReduceKind,
        axes: Axes,
        keep: bool,
    },
    /// Index (i64) of the largest or smallest element. Among equal elements the first wins, or the last if
    /// `last`. A NaN wins over every number.
    ArgReduce {
        max: bool,
        axis: usize,
        keep: bool,
        last: bool,
    },
    /// `[b…, m, k] × [b…, k, n] → [b…, m, n]` with equal batch dimensions. Sums are accumulated in
    /// `DType::accum`.
    Matmul,
    /// Operands: input, weight.
    Conv(Conv),
    Pool(Pool),
    /// Gradient of a pool. Operands: x, y, dy. The result has the type of x. Where several elements of a
    /// window equal its maximum, the first receives the gradient.
    PoolGrad(Pool),
    /// `out[a…, i…, b…] = x[a…, index[i…], b…]`. Negative indices count from the end.
    Gather {
        axis: usize,
    },
    /// `out[i…] = x[i… with i_axis = index[i…]]`.
    GatherElements {
        axis: usize,
    },
    /// Operands: base, index, updates (index and updates have the same shape). The result has the type of
    /// base.
    ScatterElements {
        axis: usize,
        kind: ScatterKind,
    },
    /// Operands: base, index `[i…]`, updates with the shape of [`Op::Gather`]'s result. The result has the
    /// type of base.
    ScatterRows {
        axis: usize,
        kind: ScatterKind,
    },
    /// Operands: base, update, position (rank-0 integer). The result is base with `update` written at
    /// `position` along `axis`. A position at which the update would reach past the end is clamped and
    /// reported as a fault.
    UpdateSlice {
        axis: usize,
    },
    /// Class labels (integers of any type) as i64 class indices. A label equal to `ignore` becomes 0. Any
    /// other label outside `[0, classes)` becomes 0 and is reported as a fault. Negative labels do not count
    /// from the end.
    ClassIndex {
        classes: Dim,
        ignore: Option<i64>,
    },
    /// Indices (i64) that stably sort the elements along an axis. NaN sorts as the largest value.
    ArgSort {
        axis: usize,
        descending: bool,
    },
    /// Running reduction along an axis.
    Scan {
        kind: ReduceKind,
        axis: usize,
        exclusive: bool,
        reverse: bool,
    },
    /// The view ops are `Reshape`, `Permute`, `Expand`, `Slice` and `Pad`.
    Reshape,
    Permute(Axes),
    Expand,
    Slice(SmallVec<[SliceAxis; 4]>),
    /// Adds `lo` elements before and `hi` after along each axis, filled with `value`.
    Pad {
        lo: SmallVec<[usize; 4]>,
        hi: SmallVec<[usize; 4]>,
        value: Scalar,
    },
    Concat {
        axis: usize,
    },
    /// A named function of primitive ops, which a target may run whole.
    Composite(Arc<Composite>),
    /// An op registered by the user.
    Custom(Custom),
}

fn window(
    op: &str,
    i: Dim,
    k: usize,
    lo: i64,
    hi: i64,
    stride: usize,
    dilation: usize,
    in_dil: usize,
) -> Result<Dim> {
    if stride == 0 || dilation == 0 || in_dil == 0 || k == 0 {
        return Err(Error::argument(op, "kernel, stride and dilation must be at least 1"));
    }
    // In i128, products of two 64-bit numbers and sums of a few of them cannot overflow.
    let wide = |n: usize| n as i128;
    let reach = (wide(k) - 1) * wide(dilation) + 1;
    let (lo, hi) = (i128::from(lo), i128::from(hi));
    let far = || Error::shape(op, "kernel, stride, dilation or padding is out of range");
    match i.known() {
        Some(0) => Err(Error::shape(op, "a spatial dimension is empty")),
        Some(n) => {
            let have = (wide(n) - 1) * wide(in_dil) + 1 + lo + hi;
            if have < reach {
                return Err(Error::shape(
                    op,
                    format!(
                        "a window of {reach} does not fit into {have} (input {n}, padding {lo} and {hi})"
                    ),
                ));
            }
            usize::try_from((have - reach) / wide(stride) + 1).map(Dim::from).map_err(|_| far())
        }
        None => Ok(i
            .offset(-1)
            .mul(Dim::from(in_dil))
            .offset(i64::try_from(1 + lo + hi - reach).map_err(|_| far())?)
            .div(Dim::from(stride))?
            .offset(1)),
    }
}

impl Op {
    /// The op's name in messages, traces and receipts.
    pub fn name(&self) -> String {
        match self {
            Op::Scalar(s) => s.name().into(),
            Op::Reduce { kind, .. } => format!("reduce_{}", kind.name()),
            Op::Scan { kind, .. } => format!("scan_{}", kind.name()),
            Op::Pool(p) => if p.kind == PoolKind::Max { "max_pool" } else { "avg_pool" }.into(),
            Op::PoolGrad(p) => if p.kind == PoolKind::Max { "max_pool_grad" } else { "avg_pool_grad" }.into(),
            Op::Composite(c) => c.name.to_string(),
            Op::Custom(c) => c.op().name().to_string(),
            Op::ArgReduce { max, .. } => if *max { "argmax" } else { "argmin" }.into(),
            Op::Input(_) => "input".into(),
            Op::Arg(_) => "arg".into(),
            Op::Const(_) => "const".into(),
            Op::Full(_) => "full".into(),
            Op::Iota { .. } => "iota".into(),
            Op::Cast => "cast".into(),
            Op::Bitcast => "bitcast".into(),
            Op::Matmul => "matmul".into(),
            Op::Conv(_) => "conv".into(),
            Op::Gather { .. } => "gather".into(),
            Op::GatherElements { .. } => "gather_elements".into(),
            Op::ScatterElements { .. } => "scatter_elements".into(),
            Op::ScatterRows { .. } => "scatter_rows".into(),
            Op::UpdateSlice { .. } => "update_slice".into(),
            // Errors about labels should name the op that the user called, which is cross_entropy.
            Op::ClassIndex { .. } => CROSS_ENTROPY.into(),
            Op::ArgSort { .. } => "argsort".into(),
            Op::Reshape => "reshape".into(),
            Op::Permute(_) => "permute".into(),
            Op::Expand => "expand".into(),
            Op::Slice(_) => "slice".into(),
            Op::Pad { .. } => "pad".into(),
            Op::Concat { .. } => "concat".into(),
        }
    }

    /// Whether the op is a view: it only maps the indices of its operand.
    pub fn is_view(&self) -> bool {
        matches!(self, Op::Reshape | Op::Permute(_) | Op::Expand | Op::Slice(_) | Op::Pad { .. })
    }

    /// Whether the op has no operands.
    pub fn is_leaf(&self) -> bool {
        matches!(self, Op::Input(_) | Op::Arg(_) | Op::Const(_) | Op::Full(_) | Op::Iota { .. })
    }

    /// The result type for operands of types `x`. `want` is the requested type. Ops whose type does not
    /// follow from their operands (leaves, cast, reshape, expand, slice) check it; the others ignore it.
    pub fn infer(&self, x: &[&TensorType], want: Option<&TensorType>) -> Result<TensorType> {
        let name = self.name();
        let op = name.as_str();
        let shape = |s: String| Error::shape(op, s);
        let arity = |n: usize| {
            if x.len() == n {
                Ok(())
            } else {
                Err(Error::argument(op, format!("takes {n} operands, got {}", x.len())))
            }
        };
        let wanted = || want.cloned().ok_or_else(|| Error::internal(format!("{op}: no result type given")));
        let bad = |d: DType, w: &str| Error::DType {
            op: op.into(),
            dtype: d,
            want: w.into(),
            at: Default::default(),
        };
        let need_int = |d: DType| {
            if d.is_int() { Ok(()) } else { Err(bad(d, "an integer type is needed for indices")) }
        };
        let amount = |n: usize| i64::try_from(n).map_err(|_| shape(format!("padding of {n} elements")));
        let axis_ok = |a: usize, s: &Shape| {
            if a < s.rank() { Ok(()) } else { Err(shape(format!("axis {a} is outside shape {s}"))) }
        };
        Ok(match self {
            Op::Input(_) => wanted()?,
            Op::Arg(_) => {
                let t = wanted()?;
                if t.shape.rank() != 0 {
                    return Err(shape(format!("an argument is a scalar, not {}", t.shape)));
                }
                t
            }
            Op::Const(c) => TensorType::new(c.dtype, &c.dims),
            Op::Full(_) => wanted()?,
            Op::Iota { axis } => {
                let t = wanted()?;
                axis_ok(*axis, &t.shape)?;
                if t.dtype == DType::Bool {
                    return Err(bad(t.dtype, "a number type is needed"));
                }
                t
            }
            Op::Scalar(s) => {
                arity(s.arity())?;
                let first = if s.row().rule == Rule::Select { 1 } else { 0 };
                let d = x[first].dtype;
                if !s.takes(d) {
                    return Err(bad(
                        d,
                        &format!(
                            "it takes the classes \"{}\" (f float, i signed, u unsigned, b bool)",
                            s.row().on
                        ),
                    ));
                }
                if first == 1 && x[0].dtype != DType::Bool {
                    return Err(bad(x[0].dtype, "the condition must be bool"));
                }
                for t in &x[first..] {
                    if t.dtype != d {
                        return Err(bad(t.dtype, &format!("the other operand is {d}; cast one")));
                    }
                }
                for t in x {
                    if t.shape != x[0].shape {
                        return Err(shape(format!("operand shapes {} and {} differ", x[0].shape, t.shape)));
                    }
                }
                TensorType { dtype: s.result(d), shape: x[0].shape.clone() }
            }
            Op::Cast => {
                arity(1)?;
                TensorType { dtype: wanted()?.dtype, shape: x[0].shape.clone() }
            }
            Op::Bitcast => {
                arity(1)?;
                let d = wanted()?.dtype;
                if d.bits() != x[0].dtype.bits() {
                    return Err(bad(d, &format!("its size differs from {}", x[0].dtype)));
                }
                TensorType { dtype: d, shape: x[0].shape.clone() }
            }
            Op::Reduce { kind, axes, keep } => {
                arity(1)?;
                let d = x[0].dtype;
                if d == DType::Bool && matches!(kind, ReduceKind::Sum | ReduceKind::Prod) {
                    return Err(bad(d, "cast to a number first, or use max (any) and min (all)"));
                }
                for &a in axes {
                    axis_ok(a, &x[0].shape)?;
                }
                TensorType { dtype: d, shape: reduced(&x[0].shape, axes, *keep) }
            }
            Op::ArgReduce { axis, keep, .. } => {
                arity(1)?;
                axis_ok(*axis, &x[0].shape)?;
                if x[0].shape[*axis].is(0) {
                    return Err(shape(format!("axis {axis} of {} is empty", x[0].shape)));
                }
                TensorType { dtype: DType::I64, shape: reduced(&x[0].shape, &[*axis], *keep) }
            }
            Op::Matmul => {
                arity(2)?;
                let (a, b) = (&x[0].shape, &x[1].shape);
                if x[0].dtype != x[1].dtype {
                    return Err(bad(x[1].dtype, &format!("the left operand is {}", x[0].dtype)));
                }
                if x[0].dtype == DType::Bool {
                    return Err(bad(DType::Bool, "cast to a number first"));
                }
                let r = a.rank();
                if r < 2 || r != b.rank() || a[..r - 2] != b[..r - 2] || a[r - 1] != b[r - 2] {
                    return Err(shape(format!("{a} × {b}: expected [batch…, m, k] × [batch…, k, n]")));
                }
                let mut s = a.clone();
                s.0[r - 1] = b[r - 1];
                TensorType { dtype: x[0].dtype, shape: s }
            }
            Op::Conv(c) => {
                arity(2)?;
                let (i, w) = (&x[0].shape, &x[1].shape);
                let n = c.stride.len();
                if x[0].dtype != x[1].dtype {
                    return Err(bad(x[1].dtype, &format!("the input is {}", x[0].dtype)));
                }
                if !x[0].dtype.is_float() {
                    return Err(bad(x[0].dtype, "a float type is needed"));
                }
                if i.rank() != n + 2
                    || w.rank() != n + 2
                    || c.pad.len() != n
                    || c.dilation.len() != n
                    || c.input_dilation.len() != n
                {
                    return Err(shape(format!(
                        "input {i} and weight {w}: expected {n} spatial axes after two others"
                    )));
                }
                let g = Dim::from(c.groups);
                if c.groups == 0 || w[1].mul(g) != i[1] {
                    return Err(shape(format!(
                        "input {i} has {} channels, weight {w} with {} groups takes {}",
                        i[1],
                        c.groups,
                        w[1].mul(g)
                    )));
                }
                if w[0].known().is_some_and(|o| o % c.groups != 0) {
                    return Err(shape(format!(
                        "{} output channels do not divide into {} groups",
                        w[0], c.groups
                    )));
                }
                let mut s = Shape::from(vec![i[0], w[0]]);
                for k in 0..n {
                    let kk = w[k + 2]
                        .known()
                        .ok_or_else(|| shape(format!("weight {w} has symbolic kernel sizes")))?;
                    s.0.push(window(
                        op,
                        i[k + 2],
                        kk,
                        c.pad[k].0,
                        c.pad[k].1,
                        c.stride[k],
                        c.dilation[k],
                        c.input_dilation[k],
                    )?);
                }
                TensorType { dtype: x[0].dtype, shape: s }
            }
            Op::Pool(p) => {
                arity(1)?;
                let (i, n) = (&x[0].shape, p.kernel.len());
                if i.rank() != n + 2 || p.stride.len() != n || p.pad.len() != n || p.dilation.len() != n {
                    return Err(shape(format!("input {i}: expected {n} spatial axes after two others")));
                }
                if x[0].dtype == DType::Bool || (!x[0].dtype.is_float() && p.kind != PoolKind::Max) {
                    return Err(bad(x[0].dtype, "a float type is needed"));
                }
                let mut s = Shape::from(vec![i[0], i[1]]);
                for k in 0..n {
                    s.0.push(window(
                        op,
                        i[k + 2],
                        p.kernel[k],
                        amount(p.pad[k].0)?,
                        amount(p.pad[k].1)?,
                        p.stride[k],
                        p.dilation[k],
                        1,
                    )?);
                }
                TensorType { dtype: x[0].dtype, shape: s }
            }
            Op::PoolGrad(p) => {
                arity(3)?;
                let y = Op::Pool(p.clone()).infer(&x[..1], None)?;
                if *x[1] != y || *x[2] != y {
                    return Err(shape(format!("y {} and dy {} must be {y}", x[1], x[2])));
                }
                x[0].clone()
            }
            Op::Gather { axis } => {
                arity(2)?;
                axis_ok(*axis, &x[0].shape)?;
                need_int(x[1].dtype)?;
                TensorType { dtype: x[0].dtype, shape: gathered(&x[0].shape, &x[1].shape, *axis) }
            }
            Op::GatherElements { axis } => {
                arity(2)?;
                let (s, i) = (&x[0].shape, &x[1].shape);
                axis_ok(*axis, s)?;
                need_int(x[1].dtype)?;
                let fits = |k: usize| {
                    k == *axis
                        || s[k] == i[k]
                        || matches!((s[k].known(), i[k].known()), (Some(a), Some(b)) if b <= a)
                };
                if s.rank() != i.rank() || !(0..s.rank()).all(fits) {
                    return Err(shape(format!("index {i} does not fit into {s} outside axis {axis}")));
                }
                TensorType { dtype: x[0].dtype, shape: i.clone() }
            }
            Op::ScatterElements { axis, kind } => {
                arity(3)?;
                Op::GatherElements { axis: *axis }.infer(&x[..2], None)?;
                scatter_types(op, x, *kind)?;
                if x[2].shape != x[1].shape {
                    return Err(shape(format!(
                        "updates {} must be shaped like the index {}",
                        x[2].shape, x[1].shape
                    )));
                }
                x[0].clone()
            }
            Op::ScatterRows { axis, kind } => {
                arity(3)?;
                axis_ok(*axis, &x[0].shape)?;
                need_int(x[1].dtype)?;
                scatter_types(op, x, *kind)?;
                let u = gathered(&x[0].shape, &x[1].shape, *axis);
                if x[2].shape != u {
                    return Err(shape(format!("updates {} must be {u}", x[2].shape)));
                }
                x[0].clone()
            }
            Op::UpdateSlice { axis } => {
                arity(3)?;
                let (b, u) = (&x[0].shape, &x[1].shape);
                axis_ok(*axis, b)?;
                need_int(x[2].dtype)?;
                if x[2].shape.rank() != 0 {
                    return Err(shape(format!("the position is a scalar, not {}", x[2].shape)));
                }
                if x[1].dtype != x[0].dtype {
                    return Err(bad(x[1].dtype, &format!("the base is {}", x[0].dtype)));
                }
                let longer = matches!((u.get(*axis).and_then(|d| d.known()), b[*axis].known()), (Some(a), Some(n)) if a > n);
                if u.rank() != b.rank() || longer || (0..b.rank()).any(|k| k != *axis && u[k] != b[k]) {
                    return Err(shape(format!("update {u} does not fit into {b} along axis {axis}")));
                }
                x[0].clone()
            }
            Op::ClassIndex { .. } => {
                arity(1)?;
                if !x[0].dtype.is_int() {
                    return Err(bad(x[0].dtype, "labels are integers"));
                }
                TensorType { dtype: DType::I64, shape: x[0].shape.clone() }
            }
            Op::ArgSort { axis, .. } => {
                arity(1)?;
                axis_ok(*axis, &x[0].shape)?;
                TensorType { dtype: DType::I64, shape: x[0].shape.clone() }
            }
            Op::Scan { axis, .. } => {
                arity(1)?;
                axis_ok(*axis, &x[0].shape)?;
                if x[0].dtype == DType::Bool {
                    return Err(bad(DType::Bool, "cast to a number first"));
                }
                x[0].clone()
            }
            Op::Reshape => {
                arity(1)?;
                let w = wanted()?;
                let n = w.shape.numel();
                if n != x[0].shape.numel() || n.is_lost() {
                    return Err(shape(format!(
                        "{} has {} elements, {} has {}",
                        x[0].shape,
                        x[0].shape.numel(),
                        w.shape,
                        w.shape.numel()
                    )));
                }
                TensorType { dtype: x[0].dtype, shape: w.shape }
            }
            Op::Permute(p) => {
                arity(1)?;
                let mut seen: Vec<usize> = p.to_vec();
                seen.sort();
                if !seen.iter().copied().eq(0..x[0].shape.rank()) {
                    return Err(shape(format!("{p:?} is not a permutation of the axes of {}", x[0].shape)));
                }
                TensorType { dtype: x[0].dtype, shape: p.iter().map(|&i| x[0].shape[i]).collect() }
            }
            Op::Expand => {
                arity(1)?;
                let w = wanted()?;
                if x[0].shape.broadcast(&w.shape)? != w.shape {
                    return Err(shape(format!("{} does not broadcast to {}", x[0].shape, w.shape)));
                }
                TensorType { dtype: x[0].dtype, shape: w.shape }
            }
            Op::Slice(axes) => {
                arity(1)?;
                let (s, w) = (&x[0].shape, wanted()?);
                if axes.len() != s.rank() || w.shape.rank() != s.rank() {
                    return Err(shape(format!("one entry per axis of {s} is needed")));
                }
                for (k, a) in axes.iter().enumerate() {
                    if a.step == 0 {
                        return Err(Error::argument(op, "step 0"));
                    }
                    if let (Some(n), Some(st), Some(l)) = (s[k].known(), a.start.known(), w.shape[k].known())
                        && l > 0
                    {
                        let last = st as i128 + (l as i128 - 1) * i128::from(a.step);
                        if st >= n || last < 0 || last >= n as i128 {
                            return Err(shape(format!(
                                "{l} elements from {st} by {} leave axis {k} of {s}",
                                a.step
                            )));
                        }
                    }
                }
                TensorType { dtype: x[0].dtype, shape: w.shape }
            }
            Op::Pad { lo, hi, .. } => {
                arity(1)?;
                let s = &x[0].shape;
                if lo.len() != s.rank() || hi.len() != s.rank() {
                    return Err(shape(format!("one entry per axis of {s} is needed")));
                }
                let grown = |k: usize| Ok(s[k].offset(amount(lo[k])?).offset(amount(hi[k])?));
                let out = (0..s.rank()).map(grown).collect::<Result<_>>()?;
                TensorType { dtype: x[0].dtype, shape: out }
            }
            Op::Concat { axis } => {
                let Some(f) = x.first() else {
                    return Err(Error::argument(op, "needs at least one operand"));
                };
                axis_ok(*axis, &f.shape)?;
                let mut s = f.shape.clone();
                s.0[*axis] = Dim::from(0);
                for t in x {
                    let same =
                        t.shape.rank() == s.rank() && (0..s.rank()).all(|k| k == *axis || t.shape[k] == s[k]);
                    if t.dtype != f.dtype {
                        return Err(bad(t.dtype, &format!("the first operand is {}", f.dtype)));
                    }
                    if !same {
                        return Err(shape(format!("{} and {} differ outside axis {axis}", f.shape, t.shape)));
                    }
                    s.0[*axis] = s[*axis].add(t.shape[*axis]);
                }
                TensorType { dtype: f.dtype, shape: s }
            }
            Op::Composite(c) => c.infer(x)?,
            Op::Custom(c) => {
                let owned: Vec<TensorType> = x.iter().map(|t| (*t).clone()).collect();
                c.op().infer(&owned)?
            }
        })
    }

    /// Replaces the symbols in attributes by their sizes.
    pub fn bind(&self, b: &crate::shape::Bindings) -> Result<Op> {
        Ok(match self {
            Op::Slice(axes) => Op::Slice(
                axes.iter()
                    .map(|a| Ok(SliceAxis { start: a.start.bind(b)?, step: a.step }))
                    .collect::<Result<_>>()?,
            ),
            Op::ClassIndex { classes, ignore } => {
                Op::ClassIndex { classes: classes.bind(b)?, ignore: *ignore }
            }
            Op::Composite(c) => Op::Composite(Arc::new(c.bind(b)?)),
            o => o.clone(),
        })
    }
}

fn scatter_types(op: &str, x: &[&TensorType], kind: ScatterKind) -> Result<()> {
    let bad = |d, want: String| Err(Error::DType { op: op.into(), dtype: d, want, at: Default::default() });
    if x[2].dtype != x[0].dtype {
        return bad(x[2].dtype, format!("the base is {}", x[0].dtype));
    }
    if x[0].dtype == DType::Bool && kind != ScatterKind::Set {
        return bad(DType::Bool, "cast to a number first".into());
    }
    Ok(())
}

/// The shape after a reduction over `axes`. With `keep` they stay as axes of size 1.
pub fn reduced(s: &Shape, axes: &[usize], keep: bool) -> Shape {
    s.iter()
        .enumerate()
        .filter_map(|(k, d)| match axes.contains(&k) {
            false => Some(*d),
            true if keep => Some(Dim::from(1)),
            true => None,
        })
        .collect()
}

fn gathered(x: &Shape, index: &Shape, axis: usize) -> Shape {
    x[..axis].iter().chain(index.iter()).chain(&x[axis + 1..]).copied().collect()
}
